"""VQA accuracy, answer normalisation and soft targets against numbers of the official script and of BAN's tool."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from e2e_vl.data.vqa import read_questions
from e2e_vl.metrics.vqa import (
    VQAPrediction,
    clean_answer,
    soft_scores,
    standardise_words,
    strip_punctuation,
    vocabulary_answer,
    vqa_metrics,
)
from e2e_vl.run.build import count_frequent_answers
from e2e_vl.tasks.vqa import VQAVocabulary
from tests.official_vqa import vqa_accuracy
from tests.parity.evaluation_common import folder_of, read_optional


@pytest.fixture(scope="module")
def folder(golden_root: Path) -> Path:
    return folder_of(golden_root, "vqa")


@pytest.fixture(scope="module")
def annotations(folder) -> list[dict]:
    [questions], [annotations] = folder.glob("*_questions.json"), folder.glob("*_annotations.json")
    vocabulary = VQAVocabulary([])
    records = {}
    for question in read_questions(questions, annotations):
        records[question.id] = question.metadata | vocabulary.labels_of(question.truth).record
    # the order in which the official script adds up; the twelfth decimal may depend on it
    return [records[row["question_id"]] for row in json.loads(annotations.read_text("utf-8"))["annotations"]]


@pytest.fixture(scope="module")
def predictions(folder) -> list[dict]:
    [path] = folder.glob("*_results.json")
    return json.loads(path.read_text("utf-8"))


def read(folder: Path, name: str):
    return json.loads((folder / name).read_text("utf-8"))


def test_vqa_every_normalised_string(folder):
    rows = read_optional(folder, "normalization.json")["rows"]
    assert rows
    for raw, after_punctuation, after_words in rows:
        stripped = strip_punctuation(clean_answer(raw))
        assert stripped == after_punctuation, raw
        assert standardise_words(stripped) == after_words, raw


def test_vqa_every_contraction(folder):
    rows = read_optional(folder, "contractions.json")["rows"]
    assert rows
    for word, result in rows:
        assert standardise_words(word) == result
        assert standardise_words(result) == result or result in dict(rows)


@pytest.mark.parametrize(("key", "decimals"), [("accuracy", 2), ("accuracy_12_decimals", 12)])
def test_vqa_accuracies(folder, annotations, predictions, key, decimals):
    ours, expected = vqa_accuracy(predictions, annotations, decimals), read(folder, "expected.json")[key]
    assert {name: ours[name] for name in expected} == expected


def test_vqa_accuracy_of_every_question(folder, annotations, predictions):
    expected = read(folder, "expected.json")["per_question"]
    ours = vqa_accuracy(predictions, annotations, 12)["perQuestion"]
    assert {str(number): score for number, score in ours.items()} == expected


def test_vqa_metrics_of_a_run_are_the_same_numbers(folder, annotations, predictions):
    answer_of = {row["question_id"]: row["answer"] for row in predictions}
    metrics = vqa_metrics(
        [VQAPrediction.from_record(row, answer=answer_of[row["question_id"]], score=1.0) for row in annotations]
    )
    expected = read(folder, "expected.json")["accuracy_12_decimals"]
    assert 100 * metrics["accuracy"] == pytest.approx(expected["overall"], abs=1e-10)
    for name, value in expected["perAnswerType"].items():
        assert 100 * metrics[f"accuracy/{name}"] == pytest.approx(value, abs=1e-10)
    for name, value in expected["perQuestionType"].items():
        assert 100 * metrics[f"accuracy_by_question/{name}"] == pytest.approx(value, abs=1e-10)


def test_vqa_vocabulary_and_soft_targets(folder, annotations):
    recorded = read_optional(folder, "soft_targets.json")
    for raw, spelled in recorded["preprocess_answer"]:
        assert vocabulary_answer(raw) == spelled, raw
    most_frequent = {row["question_id"]: row["multiple_choice_answer"] for row in annotations}
    vocabulary = count_frequent_answers(most_frequent, recorded["min_occurrence"], vocabulary_answer)
    assert sorted(vocabulary) == sorted(recorded["vocabulary"])
    assert len(annotations) == len(recorded["targets"])
    for row in annotations:
        scores = soft_scores(row["answers"])
        ours = {answer: score for answer, score in scores.items() if answer in vocabulary}
        assert ours == recorded["targets"][str(row["question_id"])]
