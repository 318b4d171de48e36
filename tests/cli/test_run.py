"""`e2e-vl train`, `evaluate` and `predict`: paths, errors of one sentence, and files as their servers read them."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from e2e_vl.cli import main as tool
from e2e_vl.cli.run import evaluate, train
from e2e_vl.tasks import nlvr2
from tests.cli.calls import data_root, refused, split
from tests.conftest import ROOT, SAME_SIZE
from tests.leaderboard import read_leaderboard, score
from tests.run.runs import predictions_of
from tests.same import assert_same

SHORT = ("train.max_steps=1", "eval.boxes=[gt]", "eval.every_epochs=0", "eval.report_pictures=1", SAME_SIZE)

pytestmark = pytest.mark.usefixtures("on_cpu")


@pytest.fixture
def project(tmp_path, tiny_data) -> Path:
    """A folder with settings and data beside each other, as in the repository."""
    shutil.copytree(ROOT / "configs", tmp_path / "project" / "configs")
    shutil.copytree(tiny_data, tmp_path / "project" / "data" / "tiny_refcoco")
    return tmp_path / "project"


def test_a_run_is_trained_and_evaluated_from_other_directories(project, tmp_path, monkeypatch, capsys):
    """Detector and data are found beside the settings, and the run goes where the command was called."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert train(["--config", "../project/configs/tiny/refcoco.yaml", *SHORT]) == 0
    run = tmp_path / "elsewhere" / "runs" / "tiny_refcoco"
    records = json.loads((run / "predictions_val_gt.json").read_text())
    assert all(Path(record["file_name"]).is_relative_to(project / "data") for record in records)
    assert {path.name for path in (tmp_path / "elsewhere").iterdir()} == {"runs"}
    monkeypatch.chdir(tmp_path)
    assert evaluate(["--run", str(run.relative_to(tmp_path)), "--split", "val", "--boxes", "gt"]) == 0
    assert "val/accuracy_gt_boxes" in capsys.readouterr().out


def test_a_missing_image_is_one_sentence_also_from_a_worker(project, tiny_words, tmp_path, capfd):
    data = project / "data" / "tiny_refcoco"
    image = min((data / "images" / "train2014").iterdir())
    image.unlink()
    words = [*tiny_words, f"data.root={data}", f"output={tmp_path / 'run'}", "data.workers=1"]
    words += ["data.texts_per_image=null", "data.check_images=0", "train.max_steps=6"]
    assert train(["--config", str(ROOT / "configs" / "tiny" / "refcoco.yaml"), *words]) == 2
    err = capfd.readouterr().err
    assert "Traceback" not in err and str(image) in err.splitlines()[-1].removeprefix("error: ")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--split", "testC"], "'testC'"),
        (["--boxes", "gt", "detector.weights=x.pth"], "detector.weights=x.pth"),  # a run has weights of its own
        (["--boxes", "gt", "encoder.config.num_hidden_layers=3"], "model.safetensors does not fit"),
    ],
)
def test_what_does_not_fit_a_run_is_one_sentence(trained_run, capfd, arguments, named):
    assert evaluate(["--run", str(trained_run.path), *arguments]) == 2
    err = capfd.readouterr().err
    assert "Traceback" not in err and named in err.splitlines()[-1]


def test_sources_of_boxes_are_listed_as_they_are_written(capsys):
    with pytest.raises(SystemExit):
        evaluate(["--run", "x", "--boxes", "ground_truth"])
    assert "BoxSource" not in capsys.readouterr().err


# Predictions of whole splits


@pytest.fixture
def predicted(tmp_path, capsys) -> Callable[..., tuple[str, dict[str, float]]]:
    """`predicted(run, split, ...)`: the content of the file that one call writes, and the metrics that it prints."""

    def make(run: Path, name: str, *more: object, boxes: str = "gt") -> tuple[str, dict[str, float]]:
        path = tmp_path / "deep" / name
        assert tool.main(split(run, name, path, *more, boxes=boxes)) == 0
        lines = capsys.readouterr().out.splitlines()
        pairs = [line.split() for line in lines if line.startswith(f"{name}/")]
        metrics = {pair[0]: float(pair[1]) for pair in pairs if len(pair) == 2}
        is_scored = any("accuracy" in key for key in metrics)
        assert is_scored == (not any("no labels" in line for line in lines)) == (name != "test")
        assert lines[-1] == f"predictions: {path}"
        return path.read_text("utf-8"), metrics

    return make


def test_boxes_of_expressions(trained_run, predicted):
    content, metrics = predicted(trained_run.path, "val", boxes="online")
    entries, records = json.loads(content), predictions_of(trained_run.path, "val_online")
    assert_same(entries, [{key: record[key] for key in ("ref_id", "sent_id", "box")} for record in records])
    assert len({(entry["ref_id"], entry["sent_id"]) for entry in entries}) == len(records)
    name = "val/accuracy_predicted_boxes"
    assert metrics[name] == pytest.approx(trained_run.metrics[name], abs=1e-4)


def test_vqa_results(vqa_run, predicted):
    """Without annotations the answers are the same, and nothing is scored."""
    records = predictions_of(vqa_run)
    for name in ("val", "test"):
        entries = json.loads(predicted(vqa_run, name)[0])
        assert entries == [{"question_id": one["question_id"], "answer": one["answer"]} for one in records]


def test_vcr_leaderboard_file(vcr_runs, tmp_path, predicted):
    answers, rationales = vcr_runs
    for name in ("test", "val"):
        _, metrics = predicted(answers, name, "--rationale-run", rationales)
        found = read_leaderboard(tmp_path / "deep" / name)
        lines = (data_root(answers) / "vcr" / f"{name}.jsonl").read_text().splitlines()
        questions = [json.loads(line) for line in lines]
        assert found.annot_ids == [one["annot_id"] for one in questions]
    labels = [[one[f"{kind}_label"] for one in questions] for kind in ("answer", "rationale")]
    for key, value in score(found, *labels).items():
        assert metrics[f"val/{key}_gt_boxes"] == pytest.approx(value, abs=1e-4)
    right = [record["probabilities"] for record in predictions_of(rationales)]
    np.testing.assert_allclose(found.rationales[range(len(right)), labels[0]], right, atol=1e-5)


def test_runs_that_do_not_go_together(trained_run, vqa_run, vcr_runs, tmp_path, capsys):
    answers, rationales = vcr_runs
    path = tmp_path / "file"
    for words in (split(answers, "test", path), split(answers, "val", path, "--rationale-run", vqa_run)):
        assert "two runs of it, the other one as --rationale-run" in refused(words, capsys)
    assert "needs one run" in refused(split(trained_run.path, "val", path, "--rationale-run", rationales), capsys)
    assert not path.exists()


def test_the_file_of_the_gqa_server(run_of, predicted):
    """All questions, also those that are not balanced; the official script looks answers up by their question ids."""
    run = run_of("gqa", "lxmert")
    content, metrics = predicted(run, "val_all")
    entries = json.loads(content)
    assert [entry["prediction"] for entry in entries] == [one["answer"] for one in predictions_of(run, "val_all_gt")]
    questions = json.loads((data_root(run) / "gqa" / "questions" / "val_all_questions.json").read_text("utf-8"))
    answers = {entry["questionId"]: entry["prediction"] for entry in entries}
    assert set(answers) == set(questions) and len(entries) == len(questions)
    judged = [one["answer"] == answers[number] for number, one in questions.items() if one["isBalanced"]]
    assert metrics["val_all/accuracy_gt_boxes"] == pytest.approx(sum(judged) / len(judged), abs=1e-4)


def test_the_file_of_the_nlvr2_script(run_of, predicted):
    """A CSV without a header; the script groups by the identifiers."""
    run = run_of("nlvr2", "visual_bert")
    content, metrics = predicted(run, "val")
    rows = list(csv.reader(content.splitlines()))
    assert rows == [[record["identifier"], record["prediction"]] for record in predictions_of(run)]
    lines = (data_root(run) / "nlvr2" / "data" / "val.json").read_text("utf-8").splitlines()
    labels = {one["identifier"]: one["label"] for one in map(json.loads, lines)}
    assert set(labels) == {identifier for identifier, _ in rows} and len(labels) == len(rows)
    for name, value in nlvr2.nlvr2_scores(labels, dict(rows)).items():
        assert metrics[f"val/{name}_gt_boxes"] == pytest.approx(value, abs=1e-4)


def test_the_file_of_flickr30k(run_of, predicted):
    run = run_of("flickr30k")
    content, metrics = predicted(run, "val")
    records = predictions_of(run)
    for entry, record in zip(json.loads(content), records, strict=True):
        assert (entry["image"], entry["sentence"]) == (record["image_id"], record["sentence"])
        keys = {"id": "phrase_ids", "phrase": "phrases", "box": "boxes", "score": "scores"}
        for key, column in keys.items():
            assert_same([one[key] for one in entry["phrases"]], record[column])
    hits = [rank == 0 for record in records for rank in record["ranks"]]
    assert metrics["val/accuracy_gt_boxes"] == pytest.approx(sum(hits) / len(hits), abs=1e-4)
