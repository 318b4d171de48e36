from __future__ import annotations

import base64
import html
import json
import re
import tomllib
from pathlib import Path

import cv2
import numpy as np
import pytest

from detector.errors import UserError
from detector.io import write_json
from e2e_vl.config import EvalSettings, RunConfig, save_config
from e2e_vl.io import RunLog
from e2e_vl.run.report import PICTURE_AREA, TEMPLATE, write_report
from e2e_vl.tasks.base import PredictionRecord, PredictionWords

ROOT = Path(__file__).parents[2]
IMAGE = re.compile(r'<img[^>]* src="data:image/(png|jpeg);base64,([^"]+)">')


def images_of(page: str) -> list[np.ndarray]:
    found = [cv2.imdecode(np.frombuffer(base64.b64decode(data), np.uint8), 1) for _, data in IMAGE.findall(page)]
    assert all(image is not None for image in found)
    return found


def text_of(page: str) -> str:
    """The words of the page, with single spaces."""
    body = re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", body)).split())


def test_the_report_of_a_run_is_one_self_contained_page(trained_run):
    page = (trained_run.path / "report.html").read_text(encoding="utf-8")
    assert "http" not in page
    assert not re.search(r'<(script|link|iframe)|src="(?!data:)|url\(', page)
    *pictures, curves = images_of(page)
    assert curves.shape[1] > 800 and curves.std() > 5
    assert len(pictures) == page.count("<figcaption>")
    words = text_of(page)
    number = trained_run.config.eval.report_pictures
    for boxes, name in (("gt", "gt boxes"), ("detections", "detected boxes"), ("online", "predicted boxes")):
        records = json.loads((trained_run.path / f"predictions_val_{boxes}.json").read_text())
        wrong = sum(record["correct"] == 0 for record in records)
        start = words.index(f"Predictions: val, {name}")
        section = words[start : words.find("Predictions: ", start + 1)]
        assert f"all {len(records)} {wrong} {len(records) - wrong}" in section
        shown = [int(count) for count in re.findall(r"Wrong, \w+: (\d+) of \d+", section)]
        assert sum(shown) == min(number, wrong)
    for name, value in trained_run.metrics.items():
        if name.startswith("val/accuracy") and isinstance(value, float):
            assert f"{value:.3f}" in words
    assert "task.config.loss softmax binary" in words
    assert "train.lr 0.0" in words


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with nothing but what the report reads."""
    cv2.imwrite(str(tmp_path / "grey.png"), np.full((60, 90), 200, np.uint8))
    save_config(RunConfig(output=str(tmp_path)), tmp_path / "config.yaml")
    write_json(tmp_path / "metrics.json", {"val/accuracy_gt_boxes": 0.5, "val/none": None, "parameters": {"task": 3}})
    return tmp_path


class FakeTask:
    """Draws a large dark red picture of every prediction with a `box`."""

    prediction_record = PredictionRecord

    def draw(self, record: dict) -> np.ndarray | None:
        if record.get("lost"):
            raise FileNotFoundError(f"Image {record['lost']} does not exist.")
        height, width = record.get("size", (600, 900))
        return np.full((height, width, 3), (200, 30, 10), np.uint8) if "box" in record else None

    def describe(self, record: dict) -> PredictionWords:
        return PredictionWords(record["sent"], "blue", 0.256, record.get("truth", ""), group=record.get("family", ""))


def record(**changes) -> dict:
    return {"sent": "x", "correct": 1.0, "box": [50, 10, 80, 50], **changes}


def report(run: Path, *records: dict, number: int = 12) -> str:
    write_json(run / "predictions_val_gt.json", list(records))
    config = RunConfig(output=str(run), eval=EvalSettings(report_pictures=number))
    return write_report(run, config, FakeTask()).read_text(encoding="utf-8")


def test_texts_are_escaped(run):
    (run / "config.yaml").write_text("output: <b>\n")
    page = report(run, record(sent="a <b>bold</b> & 'quoted' cup", correct=0.0, truth="<i>", family="<u>"))
    assert not re.search(r"<[biu]>(?!a &lt;)", page)
    assert "a &lt;b&gt;bold&lt;/b&gt; &amp; &#39;quoted&#39; cup" in page
    assert "right would be: <i> " in text_of(page) and "Wrong, <u>: 1 of 1" in text_of(page)


def test_errors_come_first_and_say_what_was_chosen_instead(run):
    page = report(run, record(sent="fine"), record(sent="bad", correct=0.0, truth="red", family="colours"))
    words = text_of(page)
    assert "Wrong, colours: 1 of 1 bad wrong: blue (0.26) right would be: red" in words
    assert "Right: 1 of 1 fine right: blue (0.26)" in words
    assert words.index("Wrong, colours") < words.index("Right: 1 of 1")
    assert "all 2 1 1 50.0 % colours 1 1 0 100.0 %" in words


def test_only_some_are_shown_and_the_page_says_of_how_many(run):
    page = report(run, *[record()] * 3, *[record(correct=0.0)] * 5, *[record(correct=0.5)] * 2, number=2)
    words = text_of(page)
    assert page.count("<figure>") == 6
    for heading in ("Wrong: 2 of 5, drawn at random", "Partly right: 2 of 2 x", "Right: 2 of 3, drawn at random"):
        assert heading in words
    none = text_of(report(run, record(correct=0.0), record(correct=0.0, family="relation"), number=0))
    assert "Not shown: wrong predictions of all texts (1), relation (1)." in none
    assert "<figure>" not in report(run, record(), number=0)


def test_a_prediction_without_a_label_is_not_wrong(run):
    page = report(run, record(correct=None), record(correct=None))
    words = text_of(page)
    assert "No prediction is wrong." in words
    assert "all 2 0 0 2 –" in words  # no share of wrong ones either
    assert "Without a label: 2 of 2 x without a label: blue (0.26)" in words
    assert 'class="wrong"' not in page and 'class="right"' not in page


def test_a_run_without_evaluations_or_losses_has_a_report(run):
    log = RunLog(run / "log.jsonl", enabled=True)
    log.write(1, "eval", {"val/accuracy_gt_boxes": None})
    page = write_report(run, RunConfig(output=str(run)), FakeTask()).read_text(encoding="utf-8")
    assert images_of(page) == [] and "Curves" not in page
    assert "val gt boxes accuracy 0.500" in text_of(page)
    assert "parameters of the task 3" in text_of(page)


def test_pictures_are_small_and_keep_their_colours(run):
    [picture] = images_of(report(run, record()))
    assert picture.shape[0] * picture.shape[1] == pytest.approx(PICTURE_AREA, rel=0.01)
    assert np.abs(picture.astype(int) - (10, 30, 200)).max() < 8  # OpenCV reads BGR


def test_a_wide_picture_has_a_row_of_its_own(run):
    page = report(run, record(), record(size=(200, 1500)))
    assert page.count('<figure class="wide">') == 1 and page.count("<figure>") == 1
    [wide] = [picture for picture in images_of(page) if picture.shape[1] > 2 * picture.shape[0]]
    assert wide.shape[1] > 1000  # labels would be illegible in a small one


def test_wrong_relations_say_whether_the_landmark_was_right(run):
    def related(said: str, **known) -> dict:
        found = [{"text": "cup", "box": [50, 10, 80, 50], "score": 0.9}]
        found.append({"text": "the bowl", "box": [1.2, 2, 3, 4], "score": 0.4, **known})
        return record(sent=said, correct=0.0, family="relation", grounded=found)

    wrong = [related("a", correct=True), related("b", correct=True), related("c", correct=False), related("d")]
    words = text_of(report(run, *wrong, record(sent="fine")))
    assert "such as the landmark of a relation second phrases right not right relation 2 1 Pictures show" in words
    cup = "phrases: cup: x 50 to 80, y 10 to 50 (0.90); the bowl: x 1 to 3, y 2 to 4 (0.40"
    for said, end in (("a", ", right)"), ("c", ", wrong)"), ("d", ")")):
        assert f"{said} wrong: blue (0.26) {cup}{end}" in words
    assert "second phrases" not in text_of(report(run, wrong[-1], record(sent="fine")))


def test_a_prediction_without_a_picture_says_why(run):
    page = report(run, record(lost="a.tar: b.jpg"), {"sent": "no image", "correct": 1.0})
    assert "No picture: Image a.tar: b.jpg does not exist." in text_of(page)
    assert page.count("<figure>") == 2 and page.count("No picture") == 1
    assert "no image" in page


def test_sections_are_in_the_order_of_the_settings(run):
    for name in ("val_online", "val_gt", "more_detections"):
        write_json(run / f"predictions_{name}.json", [])
    config = RunConfig(output=str(run), eval=EvalSettings(boxes=["online", "gt"]))
    page = write_report(run, config, FakeTask()).read_text(encoding="utf-8")
    assert re.findall("Predictions: ([^<]+)", page) == ["val, predicted boxes", "val, gt boxes", "more, detected boxes"]


def test_an_installed_package_has_the_template():
    """setuptools copies no file that is not Python, unless the settings name it."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    copied = {
        path
        for package, patterns in settings["package-data"].items()
        for pattern in patterns
        for path in (ROOT / package.replace(".", "/")).glob(pattern)
    }
    own = {path for folder in ("detector", "e2e_vl") for path in (ROOT / folder).rglob("*") if path.is_file()}
    assert TEMPLATE in copied
    assert {path for path in own if path.suffix not in (".py", ".pyc")} == copied


class StrictTask(FakeTask):
    def describe(self, record: dict) -> PredictionWords:
        raise UserError("the prediction for sentence 7: no box")


def test_damaged_files_of_a_run_are_named(run):
    write_json(run / "predictions_val_gt.json", [record()])
    with pytest.raises(UserError, match=r"predictions_val_gt\.json: the prediction for sentence 7: no box"):
        write_report(run, RunConfig(output=str(run)), StrictTask())
    (run / "config.yaml").write_bytes(b"# \xe1\n")
    with pytest.raises(UserError, match=r"config\.yaml is not UTF-8 text \(byte 2\)"):
        write_report(run, RunConfig(output=str(run)), FakeTask())
