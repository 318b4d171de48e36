"""Damaged predictions of every task: a report or one sentence that names the file, and good ones are accepted."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path

import pytest

from detector.errors import UserError
from e2e_vl.examples import ONLY_PHRASES
from e2e_vl.run import report as page
from e2e_vl.run.checkpoint import load_model
from e2e_vl.run.report import check_predictions, list_predictions
from e2e_vl.tasks.base import Task, found_items
from e2e_vl.tasks.detection import DetectionConfig, DetectionTask
from e2e_vl.tasks.flickr30k import Flickr30KPrediction
from e2e_vl.tasks.vcr import VCRPrediction
from tests.campaign.mutations import damaged
from tests.conftest import tiny_run

pytestmark = pytest.mark.usefixtures("on_cpu")
TIMES = 40
RUNS = ("refcoco", "vqa", "vcr", "pretraining", "gqa", "nlvr2", "flickr30k")


@pytest.fixture(params=RUNS)
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A trained run with its predictions."""
    if request.param == "refcoco":
        return request.getfixturevalue("trained_run").path
    if request.param == "vcr":
        return request.getfixturevalue("vcr_runs")[0]
    if request.param in ("vqa", "pretraining"):
        return request.getfixturevalue(f"{request.param}_run")
    return tiny_run(tmp_path, request.param, f"data.root={tmp_path / 'data'}", "eval.boxes=[gt]")


def test_a_report_of_damaged_predictions_is_a_page_or_a_sentence(run: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(page, "draw_curves", lambda _: None)
    config, model, _ = load_model(run)
    config = dataclasses.replace(config, eval=dataclasses.replace(config.eval, report_pictures=3))
    path = sorted(run.glob("predictions_*.json"))[0]
    good, before = path.read_bytes(), (run / "report.html").read_bytes()
    refused = 0
    try:
        page.write_report(run, config, model.task)
        for case in range(TIMES):
            path.write_bytes(damaged(path, good, random.Random(f"{case}")))
            try:
                page.write_report(run, config, model.task)
            except UserError as error:
                refused += 1
                assert str(path) in str(error) and len(str(error)) < 2500, case
    finally:
        path.write_bytes(good)
        (run / "report.html").write_bytes(before)
    assert refused > TIMES / 3


def test_whatever_a_prediction_lacks_it_is_refused_or_shown(run: Path):
    _, model, _ = load_model(run)
    path = sorted(run.glob("predictions_*.json"))[0]
    good = json.loads(path.read_text(encoding="utf-8"))[0]
    refused = set()
    for key in good:
        record = {name: value for name, value in good.items() if name != key}
        try:
            check_predictions([record], model.task, path)
        except UserError as error:
            assert f"'{key}'" in str(error)
            refused.add(key)
        else:
            list_predictions([record], model.task, number=1, seed=0)
            model.task.draw(record)
    assert "correct" in refused and len(refused) < len(good)


@pytest.mark.parametrize(
    "key", ["correct", "file_name", "choices", "probabilities", "choice", "label", "named_boxes", "sent"]
)
def test_what_a_prediction_lacks_is_named(vcr_runs: tuple[Path, Path], key: str):
    _, model, _ = load_model(vcr_runs[0])
    path = vcr_runs[0] / "predictions_val_gt.json"
    records = json.loads(path.read_text())
    check_predictions(records, model.task, path)
    del records[1][key]
    with pytest.raises(UserError) as found:
        check_predictions(records, model.task, path)
    assert str(found.value) == f"{path}: prediction 2 has no '{key}'; get the run again, or remove the file"


def prediction(**more) -> dict:
    """Of an image with one object."""
    thing = {"box": [1, 2, 3, 4], "category_id": 7, "category": "cat", "area": 4.0, "is_crowd": False}
    found = {"boxes": [[1.0, 2.0, 3.0, 4.0]], "scores": [0.5], "category_ids": [7]}
    return {"correct": 1.0, "image_id": 3, "objects": [thing], "file_name": "a.jpg", **found, **more}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"scores": [1.5]}, r"scores\[0\] is 1.5"),
        ({"scores": []}, "1 boxes and 0 scores and 1 category_ids, expected equally many"),
        ({"boxes": [[1, 2, 3]]}, "boxes"),
        ({"objects": [{}]}, r"objects\[0\] has no 'box'"),
        ({"correct": "yes"}, "correct is 'yes', expected a number or null"),
        ({"correct": 2}, "correct is 2"),
        ({"image_id": None}, "image_id"),
    ],
)
def test_a_wrong_detection_is_named(tmp_path: Path, more: dict, words: str):
    task = DetectionTask(8, DetectionConfig())
    check_predictions([prediction()], task, tmp_path / "predictions_val_online.json")
    with pytest.raises(UserError, match=rf"predictions_val_online\.json: prediction 2.*{words}.*get the run again"):
        check_predictions([prediction(), prediction(**more)], task, tmp_path / "predictions_val_online.json")


class Declares:
    """A task, as far as the check of its predictions goes."""

    def __init__(self, kind: type):
        self.prediction_record = kind


@pytest.mark.parametrize(
    ("kind", "record", "words"),
    [
        (VCRPrediction, {"choice": 2}, "there are 2 choices, and 'choice' or 'label' is another one"),
        (VCRPrediction, {"label": 5}, "there are 2 choices, and 'choice' or 'label' is another one"),
        (VCRPrediction, {"probabilities": [0.5]}, "there are 2 choices and 1 probabilities, expected equally many"),
        (Flickr30KPrediction, {"scores": [0.5, 0.5]}, "1 phrases and 1 boxes and 2 scores"),
        (Flickr30KPrediction, {"ranks": [0]}, "there are 'ranks', but no 'phrase_types' or 'gt_boxes'"),
        (found_items(["words"]), {"words": -1}, "words is -1"),
        (found_items(["words"]), {"words_choices": [{"place": 1}]}, r"words_choices\[0\] has no 'chosen'"),
    ],
)
def test_what_does_not_belong_together_is_said(tmp_path: Path, kind: type, record: dict, words: str):
    good = {"correct": None, "file_name": "a.jpg", "sent": "a", "choices": ["a", "b"], "probabilities": [0.5, 0.5]}
    good |= {"choice": 1, "label": 0}
    good |= {"named_boxes": [], "phrases": ["a"], "boxes": [None], "scores": [0.5], "words": 1.0, "words_right": 0}
    task: Task = Declares(kind)
    check_predictions([good], task, tmp_path / "a.json")
    with pytest.raises(UserError, match=rf"a\.json: prediction 1.*{words}"):
        check_predictions([good | record], task, tmp_path / "a.json")


def test_texts_with_phrases_only_need_no_answer(tmp_path: Path):
    task = Declares(VCRPrediction)
    one = {"correct": None, ONLY_PHRASES: True, "grounded": [{"text": "a cat", "box": None, "score": 0.0}]}
    check_predictions([one], task, tmp_path / "a.json")
    with pytest.raises(UserError, match=r"a\.json: prediction 1: grounded\[0\]\.score is 'x', expected a number"):
        check_predictions([one | {"grounded": [one["grounded"][0] | {"score": "x"}]}], task, tmp_path / "a.json")
    with pytest.raises(UserError, match=r"a\.json: prediction 1 is a int, expected an object"):
        check_predictions([3], task, tmp_path / "a.json")
