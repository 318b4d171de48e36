"""`e2e-vl detect`: boxes of any object detector of transformers, as a run reads them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from detector.config import SelectionRule
from e2e_vl.cli import main as tool
from e2e_vl.data.image_loader import DetectedBoxes, read_detections
from e2e_vl.data.user_inputs import read_given_boxes
from tests.cli.calls import refused
from tests.extraction.tiny_detectors import CLASSES, save_tiny_detector

pytestmark = pytest.mark.usefixtures("on_cpu")


@pytest.fixture(scope="module")
def detr(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_detector("detr", tmp_path_factory.mktemp("detr"))


@pytest.fixture(scope="module")
def grounding_dino(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_detector("grounding_dino", tmp_path_factory.mktemp("grounding_dino"))


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in (7, 12):
        pixels = np.random.default_rng(number).integers(0, 256, (70, 110, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return folder


def detect(images: Path, model: Path, output: Path, *more: object) -> list[str]:
    return [str(word) for word in ("detect", images, "--model", model, "--output", output, *more)]


def test_a_detector_with_classes(photos: Path, detr: Path, tmp_path: Path, capsys) -> None:
    output = tmp_path / "boxes.json"
    assert tool.main(detect(photos, detr, output, "--max-boxes", 3)) == 0
    records = json.loads(output.read_text())
    assert f"{len(records)} boxes of 2 images" in capsys.readouterr().out
    assert {record["image_id"] for record in records} == {7, 12}
    assert all(record["category_name"] == CLASSES[record["category_id"]] for record in records)
    detections = read_detections(output)["7"]
    assert detections.phrases[0] in CLASSES.values()
    candidates = DetectedBoxes([output], SelectionRule(min_score=0.0)).read("7")
    assert candidates.phrases == detections.phrases
    np.testing.assert_array_equal(candidates.predictions.scores, detections.scores)
    np.testing.assert_array_equal(read_given_boxes(output)["7"].boxes, detections.boxes)
    assert not list(tmp_path.glob("*.lines"))
    assert "boxes.json exists" in refused(detect(photos, detr, output), capsys)


def test_a_detector_looks_for_expressions_of_their_images(photos: Path, grounding_dino: Path, tmp_path: Path) -> None:
    images = [{"id": number, "file_name": f"{number}.png", "height": 70, "width": 110} for number in (7, 12)]
    (photos / "instances.json").write_text(json.dumps({"images": images}))
    sentences = [
        {"sent_id": number, "sent": text} for number, text in enumerate(("red star", "the circle", "red star"))
    ]
    refs = [{"ref_id": 1, "ann_id": 1, "image_id": 12, "split": "train", "sentences": sentences}]
    (tmp_path / "refs.json").write_text(json.dumps(refs))
    words = detect(photos / "instances.json", grounding_dino, tmp_path / "boxes.json", "--max-boxes", 2)
    assert tool.main([*words, "--expressions", str(tmp_path / "refs.json")]) == 0
    records = json.loads((tmp_path / "boxes.json").read_text())
    assert [(record["image_id"], record["phrase"]) for record in records] == [
        (12, "red star"),
        (12, "red star"),
        (12, "the circle"),
        (12, "the circle"),
    ]


def test_an_interrupted_command_continues(photos: Path, grounding_dino: Path, tmp_path: Path, capsys) -> None:
    words = detect(photos, grounding_dino, tmp_path / "boxes.json", "--text", "red star", "the circle")
    (photos / "5.png").write_text("no image")
    assert tool.main(words) == 1
    assert "5: " in capsys.readouterr().err
    lines_file = tmp_path / "boxes.json.lines"
    settings, first, second, _ = lines_file.read_text().split("\n")
    marked = first.replace("red star", "a marked star")
    lines_file.write_text("\n".join([settings, marked, second[:20]]))  # the last line is cut off
    (photos / "5.png").unlink()
    assert "begun with other settings" in refused([*words, "--min-score", "0.2"], capsys)
    assert tool.main(words) == 0
    labels = [record["phrase"] for record in json.loads((tmp_path / "boxes.json").read_text())]
    assert "a marked star" in labels, "this image is not read again"
    assert not lines_file.exists()


def test_mistakes_are_one_sentence(photos: Path, detr: Path, grounding_dino: Path, tmp_path: Path, capsys, monkeypatch):
    output = tmp_path / "boxes.json"
    for model, more, reason in (
        (grounding_dino, [], "looks for phrases; name them with --text, or give --expressions."),
        (detr, ["--text", "a star"], "has classes of its own; leave out --text and --expressions."),
    ):
        assert tool.main(detect(photos, model, output, *more)) == 2
        assert capsys.readouterr().err.strip().endswith(reason)
    assert "min_score" in refused(detect(photos, detr, output, "--min-score", 2), capsys)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    message = refused(detect(photos, Path("someone/detector"), output), capsys)
    assert "check the name and the connection, or download it and give its folder." in message
