from __future__ import annotations

import base64
import html
import json
import re
from pathlib import Path

import cv2
import numpy as np
import pytest

from e2e_vl.config import EvalSettings, RunConfig, save_config
from e2e_vl.report.page import write_report
from e2e_vl.run_files import RunLog, write_json

IMAGE = re.compile(r"<img[^>]* src='data:image/(png|jpeg);base64,([^']+)'>")


def images_of(page: str) -> list[np.ndarray]:
    found = [cv2.imdecode(np.frombuffer(base64.b64decode(data), np.uint8), 1) for _, data in IMAGE.findall(page)]
    assert all(image is not None for image in found)
    return found


def test_the_report_of_a_run_is_one_self_contained_page(trained_run):
    page = (trained_run.path / "report.html").read_text(encoding="utf-8")
    assert "http" not in page
    assert not re.search(r"<(script|link|iframe)|src='(?!data:)|url\(", page)
    curves, *pictures = images_of(page)
    assert curves.shape[1] > 800
    assert curves.std() > 5
    # four validation images for each of three sources of boxes
    assert len(pictures) == 3 * trained_run.config.eval.report_pictures == page.count("<figcaption>")
    assert len({picture.tobytes() for picture in pictures}) == len(pictures)
    for name, value in trained_run.metrics.items():
        if isinstance(value, float):
            assert f"<td>{name}</td><td class='number'>{value:.4g}</td>" in page
    for boxes in ("gt", "detections", "online"):
        records = json.loads((trained_run.path / f"predictions_val_{boxes}.json").read_text())
        first = records[0]
        mark = "right" if first["correct"] else "wrong"
        caption = html.escape(trained_run.model.task.caption(first))
        assert first["sent"] in caption
        assert f"<span class='{mark}'>{caption}</span>" in page


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with nothing but what the report reads."""
    cv2.imwrite(str(tmp_path / "grey.png"), np.full((60, 90), 200, np.uint8))
    save_config(RunConfig(output=str(tmp_path)), tmp_path / "config.yaml")
    write_json(tmp_path / "metrics.json", {"val/accuracy_gt_boxes": 0.5, "val/none": None, "parameters": {"task": 3}})
    return tmp_path


class FakeTask:
    """Draws a dark red picture of every prediction with a `box`."""

    def draw(self, record: dict) -> np.ndarray | None:
        return np.full((60, 90, 3), (200, 30, 10), np.uint8) if "box" in record else None

    def caption(self, record: dict) -> str:
        return record["sent"]


def record(run: Path, **changes) -> dict:
    return {"file_name": str(run / "grey.png"), "sent": "x", "correct": 1.0, "box": [50, 10, 80, 50], **changes}


def report(run: Path, config: RunConfig | None = None) -> str:
    return write_report(run, config or RunConfig(output=str(run)), FakeTask()).read_text(encoding="utf-8")


def test_texts_are_escaped(run):
    write_json(run / "predictions_val_gt.json", [record(run, sent="a <b>bold</b> & 'quoted' cup")])
    page = report(run)
    assert "<b>" not in page
    assert "a &lt;b&gt;bold&lt;/b&gt; &amp; &#x27;quoted&#x27; cup" in page


@pytest.mark.parametrize(("number", "shown"), [(0, 0), (1, 1), (5, 2)])
def test_one_picture_per_image_and_no_more_than_asked_for(run, number, shown):
    cv2.imwrite(str(run / "other.png"), np.zeros((50, 50, 3), np.uint8))
    records = [record(run), record(run), record(run, file_name=str(run / "other.png"))]
    write_json(run / "predictions_val_gt.json", records)
    config = RunConfig(output=str(run), eval=EvalSettings(report_pictures=number))
    assert report(run, config).count("<figure>") == shown


def test_a_run_without_evaluations_or_losses_has_a_report(run):
    log = RunLog(run / "log.jsonl", enabled=True)
    log.write(1, "eval", {"val/accuracy_gt_boxes": None})
    page = report(run)
    assert len(images_of(page)) == 1


def test_a_picture_keeps_its_colours_and_its_caption_says_how_right_it_is(run):
    files = [str(run / f"{name}.png") for name in ("right", "wrong", "half", "unknown")]
    scores = (1.0, 0.0, 0.5, None)
    records = [record(run, file_name=file, correct=score) for file, score in zip(files, scores, strict=True)]
    write_json(run / "predictions_val_gt.json", records)
    page = report(run)
    assert re.findall(r"<span class='(\w*)'>x</span>", page) == ["right", "wrong", "", ""]
    _, *pictures = images_of(page)
    for picture in pictures:
        assert np.abs(picture.astype(int) - (10, 30, 200)).max() < 8  # OpenCV reads BGR


def test_a_prediction_that_the_task_does_not_draw_leaves_room_for_the_next(run):
    blank = {"sent": "no file", "correct": 1.0}
    write_json(run / "predictions_val_gt.json", [blank, blank, record(run)])
    page = report(run, RunConfig(output=str(run), eval=EvalSettings(report_pictures=1)))
    assert page.count("<figure>") == 1
    assert "no file" not in page
