from __future__ import annotations

import base64
import json
import re
from pathlib import Path

import cv2
import numpy as np
import pytest

from e2e_vl.config import RunConfig, save_config
from e2e_vl.run_files import RunLog, write_json
from e2e_vl.engine.report import picture_of, write_report

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
        assert f"<span class='{mark}'>{first['sent']}</span> ({first['score']:.2f})" in page


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with nothing but what the report reads."""
    cv2.imwrite(str(tmp_path / "grey.png"), np.full((60, 90), 200, np.uint8))
    save_config(RunConfig(output=str(tmp_path)), tmp_path / "config.yaml")
    write_json(tmp_path / "metrics.json", {"val/accuracy_gt_boxes": 0.5, "val/none": None, "parameters": {"task": 3}})
    return tmp_path


def record(run: Path, **changes) -> dict:
    base = {"file_name": str(run / "grey.png"), "sent": "x", "score": 0.5, "correct": 1.0}
    return {**base, "gt_box": [10, 10, 40, 40], "box": [50, 10, 80, 50], **changes}


def test_texts_are_escaped(run):
    write_json(run / "predictions_val_gt.json", [record(run, sent="a <b>bold</b> & 'quoted' cup")])
    page = write_report(run, RunConfig(output=str(run))).read_text(encoding="utf-8")
    assert "<b>" not in page
    assert "a &lt;b&gt;bold&lt;/b&gt; &amp; &#x27;quoted&#x27; cup" in page


@pytest.mark.parametrize(("number", "shown"), [(0, 0), (1, 1), (5, 2)])
def test_one_picture_per_image_and_no_more_than_asked_for(run, number, shown):
    cv2.imwrite(str(run / "other.png"), np.zeros((50, 50, 3), np.uint8))
    records = [record(run), record(run), record(run, file_name=str(run / "other.png"))]
    write_json(run / "predictions_val_gt.json", records)
    config = RunConfig(output=str(run))
    config.eval.report_pictures = number
    assert write_report(run, config).read_text(encoding="utf-8").count("<figure>") == shown


def test_a_run_without_evaluations_or_losses_has_a_report(run):
    log = RunLog(run / "log.jsonl", enabled=True)
    log.write(1, "eval", {"val/accuracy_gt_boxes": None})
    page = write_report(run, RunConfig(output=str(run))).read_text(encoding="utf-8")
    assert len(images_of(page)) == 1


def coloured(picture: np.ndarray, colour: tuple[int, int, int]) -> int:
    return int((np.abs(picture.astype(int) - colour).max(axis=2) < 12).sum())


GREEN, BLUE, RED = (60, 160, 0), (200, 80, 0), (30, 30, 220)


@pytest.mark.parametrize(
    ("changes", "seen", "unseen"),
    [({}, (GREEN, BLUE), (RED,)), ({"correct": 0.0}, (GREEN, RED), (BLUE,)), ({"box": None}, (GREEN,), (BLUE, RED))],
)
def test_truth_is_green_right_is_blue_and_wrong_is_red(run, changes, seen, unseen):
    picture = picture_of(record(run, **changes))
    assert all(coloured(picture, colour) > 100 for colour in seen)
    assert not any(coloured(picture, colour) for colour in unseen)


def test_the_truth_is_drawn_where_it_is(run):
    picture = picture_of(record(run, box=None))
    rows, columns = np.nonzero(np.abs(picture.astype(int) - GREEN).max(axis=2) < 12)
    scale = picture.shape[1] / 90
    assert columns.max() == pytest.approx(40 * scale, abs=4)
    assert rows.max() == pytest.approx(40 * scale, abs=4)
