"""GQA's scores are those of the official script."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from e2e_vl.data.gqa import Choices, read_entries, read_questions
from e2e_vl.metrics.gqa import GQAPrediction, belongs, gqa_metrics, gqa_scores, write_submission
from e2e_vl.tasks.gqa import GQAVocabulary
from tests.parity.evaluation_common import folder_of


@pytest.fixture(scope="module")
def gqa_folder(golden_root: Path) -> Path:
    return folder_of(golden_root, "gqa")


@pytest.fixture(scope="module")
def gqa_expected(gqa_folder: Path) -> dict:
    return json.loads((gqa_folder / "expected.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def gqa_records(gqa_folder: Path) -> list[GQAPrediction]:
    """The questions as the reader gives them, with the recorded predictions."""
    [questions] = gqa_folder.glob("*_questions.json")
    choices = next(gqa_folder.glob("*_choices.json"), None)  # without them validity and plausibility are unknown
    [predictions] = gqa_folder.glob("*_predictions.json")
    predicted = {row["questionId"]: row["prediction"] for row in json.loads(predictions.read_text("utf-8"))}
    file, records = {} if choices is None else read_entries([choices], Choices), []
    for question in read_questions([questions]):
        facts = question.metadata | GQAVocabulary([question.answer]).labels_of(question.truth).record
        answer = predicted[question.id]
        if question.id in file:
            own = file[question.id]
            facts["is_valid"] = belongs(answer, own.valid, facts["types"])
            facts["is_plausible"] = belongs(answer, own.plausible, facts["types"])
        records.append(GQAPrediction.from_record(facts, text=question.words, answer=answer, score=1.0))
    return records


def test_gqa_scores_of_the_official_script(gqa_expected, gqa_records):
    assert len(gqa_records) == gqa_expected["questions"]
    assert sum(record.is_balanced for record in gqa_records) == gqa_expected["balanced"]
    ours, expected = gqa_scores(gqa_records), gqa_expected["scores"]
    assert set(ours) == set(expected)
    for name, value in expected.items():
        if not isinstance(value, dict):
            # the script prints the distribution with few decimals
            assert ours[name] == pytest.approx(value, abs=5e-5 if name == "distribution" else 1e-9), name
            continue
        assert set(ours[name]) == set(value), name
        for key, row in value.items():
            assert ours[name][key]["count"] == row["count"], (name, key)
            assert ours[name][key]["accuracy"] == pytest.approx(row["accuracy"], abs=1e-9), (name, key)


def test_gqa_metrics_of_a_run_are_the_same_numbers(gqa_expected, gqa_records):
    metrics, expected = gqa_metrics(gqa_records), gqa_expected["scores"]
    names = {name: name for name in ("accuracy", "validity", "plausibility", "consistency") if name in expected}
    assert "accuracy" in names
    for ours, name in (names | {"accuracy/binary": "binary", "accuracy/open": "open"}).items():
        assert 100 * metrics[ours] == pytest.approx(expected[name], abs=1e-9), name
    assert metrics["distribution"] == pytest.approx(expected["distribution"], abs=5e-5)
    tables = {
        "structure": "accuracyPerStructuralType",
        "meaning": "accuracyPerSemanticType",
        "words": "accuracyPerLength",
        "steps": "accuracyPerSteps",
    }
    for ours, table in tables.items():
        for key, row in expected[table].items():
            assert 100 * metrics[f"accuracy_by_{ours}/{key}"] == pytest.approx(row["accuracy"], abs=1e-9)


def test_gqa_file_of_predictions_comes_back_equal(gqa_folder, gqa_records, tmp_path):
    [path] = gqa_folder.glob("*_predictions.json")
    recorded = json.loads(path.read_text("utf-8"))
    by_id = {record.question_id: record for record in gqa_records}
    write_submission(tmp_path / "again.json", [by_id[row["questionId"]] for row in recorded])
    assert json.loads((tmp_path / "again.json").read_text("utf-8")) == recorded
