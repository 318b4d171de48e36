"""tools/predict.py on tiny runs of GQA, NLVR2 and Flickr30K Entities with each encoder, read as their servers read."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from e2e_vl.cli import predict as tool
from e2e_vl.metrics import flickr30k, gqa, nlvr2
from tests.cli.calls import ask, data_root, is_picture, refused, saved, split, told
from tests.conftest import ENCODERS
from tests.same import assert_same

TASKS = ("gqa", "nlvr2", "flickr30k")
EVAL_SPLIT = {"gqa": "val_all", "nlvr2": "val", "flickr30k": "val"}

pytestmark = pytest.mark.usefixtures("on_cpu")


@pytest.fixture(scope="session")
def runs(run_of) -> dict[tuple[str, str], Path]:
    """A run of one step of every pair."""
    return {(task, encoder): run_of(task, encoder) for task in TASKS for encoder in ENCODERS}


def predicted(run: Path, task: str, output: Path, capsys) -> tuple[list[dict], dict[str, float]]:
    """The predictions of the evaluation, after `predict split` has written its file; and the metrics it printed."""
    name = EVAL_SPLIT[task]
    capsys.readouterr()
    assert tool.main(split(run, name, output)) == 0
    printed = capsys.readouterr().out
    assert f"predictions: {output}" in printed
    metrics = dict(line.split() for line in printed.splitlines() if line.startswith(f"{name}/"))
    return saved(run, f"predictions_{name}_gt.json"), {key: float(value) for key, value in metrics.items()}


@pytest.mark.parametrize("encoder", ENCODERS)
def test_the_file_of_the_gqa_server(runs, tmp_path, capsys, encoder):
    """All questions, also those that are not balanced, in the order of the split, with ids as strings."""
    run = runs["gqa", encoder]
    records, metrics = predicted(run, "gqa", tmp_path / "deep" / "gqa.json", capsys)
    entries = json.loads((tmp_path / "deep" / "gqa.json").read_text("utf-8"))
    assert all(set(entry) == {"questionId", "prediction"} for entry in entries)
    assert all(isinstance(value, str) and value for entry in entries for value in entry.values())
    assert entries == [{key: record[key] for key in ("questionId", "prediction")} for record in records]
    questions = json.loads((data_root(run) / "gqa" / "questions" / "val_all_questions.json").read_text("utf-8"))
    assert {entry["questionId"] for entry in entries} == set(questions)
    assert len(entries) == len(questions)

    # The official script looks answers up in the file by their question ids.
    answers = {entry["questionId"]: entry["prediction"] for entry in entries}
    judged = [one["answer"] == answers[number] for number, one in questions.items() if one["isBalanced"]]
    assert metrics["val_all/accuracy_gt_boxes"] == pytest.approx(sum(judged) / len(judged), abs=1e-4)
    assert gqa.gqa_metrics(records)["accuracy"] == pytest.approx(sum(judged) / len(judged))


@pytest.mark.parametrize("encoder", ENCODERS)
def test_the_file_of_the_nlvr2_script(runs, tmp_path, capsys, encoder):
    """A CSV without a header, whose second column is True or False; the script groups by the identifiers."""
    run = runs["nlvr2", encoder]
    records, metrics = predicted(run, "nlvr2", tmp_path / "nlvr2.csv", capsys)
    with (tmp_path / "nlvr2.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    assert rows == [[record["identifier"], record["prediction"]] for record in records]
    assert {label for _, label in rows} <= {"True", "False"}
    assert nlvr2.read_predictions(tmp_path / "nlvr2.csv") == dict(rows)
    lines = (data_root(run) / "nlvr2" / "data" / "val.json").read_text("utf-8").splitlines()
    labels = {one["identifier"]: one["label"] for one in map(json.loads, lines)}
    assert set(labels) == {identifier for identifier, _ in rows} and len(labels) == len(rows)
    scores = nlvr2.truth_scores(labels, dict(rows))
    for name in ("accuracy", "consistency"):
        assert metrics[f"val/{name}_gt_boxes"] == pytest.approx(scores[name], abs=1e-4)


@pytest.mark.parametrize("encoder", ENCODERS)
def test_the_file_of_flickr30k(runs, tmp_path, capsys, encoder):
    """No server wants one; each sentence has its phrases with their ids, boxes and scores."""
    run = runs["flickr30k", encoder]
    records, metrics = predicted(run, "flickr30k", tmp_path / "phrases.json", capsys)
    entries = json.loads((tmp_path / "phrases.json").read_text("utf-8"))
    assert [(entry["image"], entry["sentence"]) for entry in entries] == [
        (record["image_id"], record["sentence"]) for record in records
    ]
    for entry, record in zip(entries, records, strict=True):
        assert [one["id"] for one in entry["phrases"]] == record["phrase_ids"]
        assert [one["phrase"] for one in entry["phrases"]] == record["phrases"]
        assert_same([one["box"] for one in entry["phrases"]], record["boxes"])
        assert_same([one["score"] for one in entry["phrases"]], record["scores"])
        height, width = record["image_size"]
        for one in entry["phrases"]:
            x1, y1, x2, y2 = one["box"]
            assert 0 <= x1 < x2 <= width and 0 <= y1 < y2 <= height and 0 < one["score"] <= 1
    hits = [rank == 0 for record in records for rank in record["ranks"]]
    assert metrics["val/accuracy_gt_boxes"] == pytest.approx(sum(hits) / len(hits), abs=1e-4)
    assert flickr30k.phrase_metrics(records)["accuracy"] == pytest.approx(sum(hits) / len(hits))


def corners_of(run: Path, image: Path) -> list[str]:
    """The annotated boxes of an image, in their order in the file."""
    content = json.loads((data_root(run) / "refcoco+" / "instances.json").read_text("utf-8"))
    [number] = [one["id"] for one in content["images"] if one["file_name"] == image.name]
    boxes = [one["bbox"] for one in content["annotations"] if one["image_id"] == number]
    return [f"{x},{y},{x + w},{y + h}" for x, y, w, h in boxes]


@pytest.mark.parametrize("encoder", ENCODERS)
def test_a_question_of_gqa_gets_the_answer_of_the_evaluation(runs, tmp_path, capsys, encoder):
    run = runs["gqa", encoder]
    record = saved(run, "predictions_val_all_gt.json")[0]
    image = Path(record["file_name"])
    capsys.readouterr()
    more = ["--boxes", *corners_of(run, image), "--output", tmp_path]
    assert tool.main(ask(run, image, record["question"], *more)) == 0
    answer = told(tmp_path)
    assert answer["score"] == pytest.approx(record["score"], abs=1e-3)
    assert answer["prediction"] in [name for name, _ in answer["top_answers"]]
    assert capsys.readouterr().out.startswith(f"{answer['score']:.3f}  {answer['prediction']}\n")
    assert is_picture(tmp_path / "answer.png") and is_picture(tmp_path / "regions.png")


@pytest.mark.parametrize("encoder", ENCODERS)
def test_a_sentence_about_two_photos(runs, tmp_path, capsys, encoder):
    run = runs["nlvr2", encoder]
    record = saved(run)[0]
    images = tuple(map(Path, record["file_names"]))
    capsys.readouterr()
    assert tool.main(ask(run, images, record["sent"], "--output", tmp_path)) == 0
    answer = told(tmp_path)
    assert answer["prediction"] in ("True", "False") and 0.5 <= answer["score"] <= 1
    assert capsys.readouterr().out.startswith(f"{answer['score']:.3f}  {answer['prediction']}\n")
    for name in ("answer.png", "regions.png", "answer_2.png", "regions_2.png"):
        assert is_picture(tmp_path / name)
    assert "are about 2 images, and 1 is given" in refused(ask(run, images[0], record["sent"]), capsys)


@pytest.mark.parametrize("encoder", ENCODERS)
def test_the_phrases_of_a_sentence_get_the_boxes_of_the_evaluation(runs, tmp_path, capsys, encoder):
    run = runs["flickr30k", encoder]
    record = saved(run)[0]
    image = Path(record["file_name"])
    text = record["sent"]
    for phrase in dict.fromkeys(record["phrases"]):
        text = text.replace(phrase, f"[{phrase}]", 1)
    more = ["--boxes", *corners_of(run, image), "--output", tmp_path]
    capsys.readouterr()
    assert tool.main(ask(run, image, text, *more)) == 0
    answer = told(tmp_path)
    assert answer["phrases"] == list(dict.fromkeys(record["phrases"]))
    lines = capsys.readouterr().out.splitlines()
    for phrase, box, score, line in zip(answer["phrases"], answer["boxes"], answer["scores"], lines, strict=False):
        assert line.startswith(f"{phrase}: x {box[0]:.0f} to {box[2]:.0f}") and f"({score:.3f})" in line
        row = record["phrases"].index(phrase)
        assert box == pytest.approx(record["boxes"][row], abs=0.5)
        assert score == pytest.approx(record["scores"][row], abs=1e-3)
    assert is_picture(tmp_path / "answer.png")


def test_a_split_without_labels(runs, tmp_path, capsys):
    """The same file for the server, and nothing is scored."""
    run = runs["gqa", "lxmert"]
    folder = data_root(run) / "gqa" / "questions"
    questions = json.loads((folder / "val_all_questions.json").read_text("utf-8"))
    kept = {number: {key: one[key] for key in ("imageId", "question", "isBalanced")}
            for number, one in questions.items()}  # fmt: skip
    (folder / "submission_questions.json").write_text(json.dumps(kept), "utf-8")
    capsys.readouterr()
    assert tool.main(split(run, "submission", tmp_path / "test.json", boxes="online")) == 0
    assert "accuracy" not in capsys.readouterr().out
    entries = json.loads((tmp_path / "test.json").read_text("utf-8"))
    assert [entry["questionId"] for entry in entries] == list(questions)
