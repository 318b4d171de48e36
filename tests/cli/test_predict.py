"""`e2e-vl predict`: files of whole splits, read as their servers read them."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from e2e_vl.cli import main as tool
from e2e_vl.tasks import nlvr2
from tests.cli.calls import data_root, refused, saved, split
from tests.leaderboard import read_leaderboard, score
from tests.same import assert_same

pytestmark = pytest.mark.usefixtures("on_cpu")


def test_boxes_of_expressions(trained_run, tmp_path, capsys):
    path = tmp_path / "deep" / "refcoco.json"
    assert tool.main(split(trained_run.path, "val", path, boxes="online")) == 0
    records = saved(trained_run.path, "predictions_val_online.json")
    entries = json.loads(path.read_text(encoding="utf-8"))
    assert_same(entries, [{key: record[key] for key in ("ref_id", "sent_id", "box")} for record in records])
    assert len({(entry["ref_id"], entry["sent_id"]) for entry in entries}) == len(records)
    printed = dict(line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("val/"))
    expected = trained_run.metrics["val/accuracy_predicted_boxes"]
    assert float(printed["val/accuracy_predicted_boxes"]) == pytest.approx(expected, abs=1e-4)


def test_vqa_results(vqa_run, tmp_path, capsys):
    assert tool.main(split(vqa_run, "val", tmp_path / "val.json")) == 0
    assert "val/accuracy_gt_boxes" in capsys.readouterr().out
    records = saved(vqa_run)
    entries = json.loads((tmp_path / "val.json").read_text(encoding="utf-8"))
    assert entries == [{"question_id": r["question_id"], "answer": r["answer"]} for r in records]

    # without annotations the answers are the same, and nothing is scored
    assert tool.main(split(vqa_run, "test", tmp_path / "test.json")) == 0
    printed = capsys.readouterr().out
    assert "accuracy" not in printed and "no labels" in printed
    assert json.loads((tmp_path / "test.json").read_text(encoding="utf-8")) == entries


def test_vcr_leaderboard_file(vcr_runs, tmp_path, capsys):
    answers, rationales = vcr_runs
    questions = {
        name: [json.loads(line) for line in (data_root(answers) / "vcr" / f"{name}.jsonl").read_text().splitlines()]
        for name in ("val", "test")
    }
    both = ["--rationale-run", rationales]
    assert tool.main(split(answers, "test", tmp_path / "test.csv", *both)) == 0
    printed = capsys.readouterr().out
    assert "accuracy" not in printed and "Q->AR" not in printed
    assert (tmp_path / "test.csv").read_text().splitlines()[0].count(",") == 20
    assert read_leaderboard(tmp_path / "test.csv").annot_ids == [one["annot_id"] for one in questions["test"]]

    assert tool.main(split(answers, "val", tmp_path / "val.csv", *both)) == 0
    printed = dict(line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("val/"))
    found = read_leaderboard(tmp_path / "val.csv")
    assert found.annot_ids == [one["annot_id"] for one in questions["val"]]
    labels = [[one[f"{kind}_label"] for one in questions["val"]] for kind in ("answer", "rationale")]
    for name, value in score(found, *labels).items():
        assert float(printed[f"val/{name}_gt_boxes"]) == pytest.approx(value, abs=1e-4)
    right = [record["probabilities"] for record in saved(rationales)]
    np.testing.assert_allclose(found.rationales[range(len(right)), labels[0]], right, atol=1e-5)


def test_runs_that_do_not_go_together(trained_run, vqa_run, vcr_runs, tmp_path, capsys):
    answers, rationales = vcr_runs
    path = tmp_path / "file"
    for words in (split(answers, "test", path), split(answers, "val", path, "--rationale-run", vqa_run)):
        assert "two runs of it, the other one as --rationale-run" in refused(words, capsys)
    assert "needs one run" in refused(split(trained_run.path, "val", path, "--rationale-run", rationales), capsys)
    assert not path.exists()


def predicted(run: Path, name: str, output: Path, capsys) -> tuple[list[dict], dict[str, float]]:
    """The predictions of the evaluation, after `predict` has written its file; and the metrics it printed."""
    capsys.readouterr()
    assert tool.main(split(run, name, output)) == 0
    printed = capsys.readouterr().out
    assert f"predictions: {output}" in printed
    metrics = dict(line.split() for line in printed.splitlines() if line.startswith(f"{name}/"))
    return saved(run, f"predictions_{name}_gt.json"), {key: float(value) for key, value in metrics.items()}


def test_the_file_of_the_gqa_server(run_of, tmp_path, capsys):
    """All questions, also those that are not balanced, in the order of the split, with ids as strings."""
    run = run_of("gqa", "lxmert")
    records, metrics = predicted(run, "val_all", tmp_path / "deep" / "gqa.json", capsys)
    entries = json.loads((tmp_path / "deep" / "gqa.json").read_text("utf-8"))
    assert [entry["prediction"] for entry in entries] == [record["answer"] for record in records]
    questions = json.loads((data_root(run) / "gqa" / "questions" / "val_all_questions.json").read_text("utf-8"))
    assert {entry["questionId"] for entry in entries} == set(questions)
    assert len(entries) == len(questions)

    # The official script looks answers up in the file by their question ids.
    answers = {entry["questionId"]: entry["prediction"] for entry in entries}
    judged = [one["answer"] == answers[number] for number, one in questions.items() if one["isBalanced"]]
    assert metrics["val_all/accuracy_gt_boxes"] == pytest.approx(sum(judged) / len(judged), abs=1e-4)


def test_the_file_of_the_nlvr2_script(run_of, tmp_path, capsys):
    """A CSV without a header, whose second column is True or False; the script groups by the identifiers."""
    run = run_of("nlvr2", "visual_bert")
    records, metrics = predicted(run, "val", tmp_path / "nlvr2.csv", capsys)
    with (tmp_path / "nlvr2.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    assert rows == [[record["identifier"], record["prediction"]] for record in records]
    assert {label for _, label in rows} <= {"True", "False"}
    lines = (data_root(run) / "nlvr2" / "data" / "val.json").read_text("utf-8").splitlines()
    labels = {one["identifier"]: one["label"] for one in map(json.loads, lines)}
    assert set(labels) == {identifier for identifier, _ in rows} and len(labels) == len(rows)
    scores = nlvr2.nlvr2_scores(labels, dict(rows))
    for name in ("accuracy", "consistency"):
        assert metrics[f"val/{name}_gt_boxes"] == pytest.approx(scores[name], abs=1e-4)


def test_the_file_of_flickr30k(run_of, tmp_path, capsys):
    """No server wants one; each sentence has its phrases with their ids, boxes and scores."""
    run = run_of("flickr30k")
    records, metrics = predicted(run, "val", tmp_path / "phrases.json", capsys)
    entries = json.loads((tmp_path / "phrases.json").read_text("utf-8"))
    assert [(entry["image"], entry["sentence"]) for entry in entries] == [
        (record["image_id"], record["sentence"]) for record in records
    ]
    for entry, record in zip(entries, records, strict=True):
        assert [one["id"] for one in entry["phrases"]] == record["phrase_ids"]
        assert [one["phrase"] for one in entry["phrases"]] == record["phrases"]
        assert_same([one["box"] for one in entry["phrases"]], record["boxes"])
        assert_same([one["score"] for one in entry["phrases"]], record["scores"])
    hits = [rank == 0 for record in records for rank in record["ranks"]]
    assert metrics["val/accuracy_gt_boxes"] == pytest.approx(sum(hits) / len(hits), abs=1e-4)
