"""Detection: predictions in original pixels, F1 of an image, COCO's metrics, pictures."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
import torch

from detector.structures import DetectionTargets, ImageBatch, Regions
from e2e_vl.drawing import BLUE, GREEN, RED
from e2e_vl.samples import Categories, SampleText
from e2e_vl.structures import Batch, EncoderOutput, ModelOutput, TextBatch, gather_regions
from e2e_vl.tasks.base import PredictionSummary
from e2e_vl.tasks.detection import CategoryTargets, DetectionPrediction, DetectionTask
from e2e_vl.text import TextTokenizer
from tests.tasks.preprocessors import make_tokenizer, sample_of, word

CATEGORY_IDS = torch.tensor([[4, 9, 30]] * 2)


def batch_of(**changes) -> Batch:
    """Two images, the first at half and the second at twice its original size; texts in the other order."""
    images = ImageBatch(
        pixels=torch.zeros(2, 3, 100, 200),
        sizes=torch.tensor([[100, 200], [80, 60]]),
        original_sizes=torch.tensor([[200, 400], [40, 30]]),
        names=["a", "b"],
    )
    ids = torch.zeros(2, 2, dtype=torch.int64)
    batch = Batch(
        images=images,
        boxes=None,
        texts=TextBatch(ids, ids, torch.ones(2, 2, dtype=torch.bool)),
        image_index=torch.tensor([[1], [0]]),
        targets=CategoryTargets(CATEGORY_IDS),
        records=[{"image_id": 22, "objects": []}, {"image_id": 11, "objects": []}],
    )
    return dataclasses.replace(batch, **changes)


def regions_of() -> Regions:
    return Regions(
        boxes=[torch.tensor([[10.0, 20.0, 110.0, 60.0], [0.0, 0.0, 200.0, 100.0]]), torch.zeros(0, 4)],
        features=[torch.zeros(2, 5), torch.zeros(0, 5)],
        class_logits=[torch.zeros(2, 4), torch.zeros(0, 4)],
        scores=[torch.tensor([0.75, 0.25]), torch.zeros(0)],
        classes=[torch.tensor([2, 0]), torch.zeros(0, dtype=torch.int64)],
    )


def output_of(task: DetectionTask, batch: Batch, regions: Regions) -> ModelOutput:
    gathered = gather_regions(regions, batch.images.sizes, batch.image_index)
    encoded = EncoderOutput(text=torch.zeros(2, 2, 5), regions=gathered.features)
    return ModelOutput(task(batch, gathered, encoded), regions, gathered, encoded, batch)


def test_predictions_are_in_original_pixels_with_category_ids():
    task, batch = DetectionTask(5).eval(), batch_of()
    first, second = task.predict(batch, output_of(task, batch, regions_of()))
    assert (first.image_id, first.boxes, first.scores, first.category_ids) == (22, (), (), ())
    assert second.image_id == 11 and second.boxes == ((20, 40, 220, 120), (0, 0, 400, 200))
    assert second.scores == (0.75, 0.25) and second.category_ids == (30, 4)


def test_it_adds_no_loss_and_no_parameter():
    task, batch = DetectionTask(5).eval(), batch_of()
    output = output_of(task, batch, regions_of())
    assert output.task.losses == {}
    assert output.task.logits.shape == (2, 0)
    assert list(task.parameters()) == []


def test_training_without_detection_losses_is_an_error():
    task = DetectionTask(5).train()
    with pytest.raises(ValueError, match=r"set detector.loss_weight to 1"):
        output_of(task, batch_of(), regions_of())
    output_of(task, batch_of(detection_targets=DetectionTargets([], [])), regions_of())


def entry(box: list[float], category_id: int = 4, *, is_crowd: bool = False) -> dict:
    return {"box": box, "category_id": category_id, "category": "x", "area": None, "is_crowd": is_crowd}


def prediction(objects: list[dict], *found: tuple[list[float], int, float], **more) -> DetectionPrediction:
    boxes, category_ids, scores = zip(*found, strict=True) if found else ((), (), ())
    base = {"image_id": 1, "objects": objects, "boxes": boxes, "category_ids": category_ids, "scores": scores}
    return DetectionPrediction.of(base | more)


A, B, FAR = [0.0, 0.0, 10.0, 10.0], [20.0, 0.0, 30.0, 10.0], [50.0, 50.0, 60.0, 60.0]


@pytest.mark.parametrize(
    ("objects", "found", "expected"),
    [
        ([], [], 1),
        ([entry(A, is_crowd=True)], [], 1),
        ([], [(A, 4, 0.9)], 0),
        ([entry(A)], [], 0),
        ([entry(A)], [(A, 4, 0.9)], 1),
        ([entry(A)], [(A, 4, 0.4)], 0),  # not sure enough
        ([entry(A)], [(A, 9, 0.9)], 0),  # another category
        ([entry(A), entry(B)], [(A, 4, 0.9)], 2 / 3),
        ([entry(A), entry(B)], [(A, 4, 0.9), (FAR, 4, 0.9)], 1 / 2),
        ([entry(A)], [(A, 4, 0.9), (A, 4, 0.8)], 2 / 3),  # an object is found once
        ([entry(A)], [([0.0, 0.0, 10.0, 5.0], 4, 0.9)], 1),  # IoU 0.5
        ([entry(A)], [([0.0, 0.0, 10.0, 4.9], 4, 0.9)], 0),
    ],
)
def test_correct_is_the_f1_of_an_image(objects, found, expected):
    assert DetectionTask(5).correct(prediction(objects, *found)) == pytest.approx(expected)


def test_metrics_are_cocos():
    found = prediction([entry(A)], (A, 4, 0.9)), prediction([entry(A)], (FAR, 4, 0.1), image_id=2)
    metrics = DetectionTask(5).metrics(found)
    assert metrics["AP50"] == metrics["AP/x"] == pytest.approx(51 / 101)


BOX = [9.0, 9, 99, 99]


@pytest.fixture
def grey(tmp_path) -> str:
    path = tmp_path / "grey.png"
    cv2.imwrite(str(path), np.full((480, 480, 3), 128, dtype=np.uint8))
    return str(path)


def test_pictures_show_sure_detections_and_missed_objects_only(grey):
    def colours(score: float, *objects: dict) -> list[bool]:
        picture = DetectionTask(8).draw(prediction(list(objects), (BOX, 4, score), file_name=grey)).astype(int)
        return [(np.abs(picture - colour).max(axis=2) < 12).sum() > 100 for colour in (BLUE, RED, GREEN)]

    assert colours(0.4) == [False, False, False]
    assert colours(0.6, entry(BOX)) == [True, False, False]
    assert colours(0.6, entry([200.0, 200, 300, 300])) == [False, True, True]
    assert colours(0.4, entry(BOX, is_crowd=True)) == [False, False, True]


def test_detections_are_described_by_what_was_found():
    one = prediction([entry(BOX), entry([200.0, 200, 300, 300])], (BOX, 4, 0.6))
    words = DetectionTask(8).describe(one)
    assert words == PredictionSummary("image 1", "objects found: 1 of 2, wrong boxes: 0", note="F1 0.67")


def test_categories_that_an_image_lacks_have_their_names_after_the_data_were_checked(grey, monkeypatch):
    labels = []
    monkeypatch.setattr(
        "e2e_vl.tasks.detection.draw_boxes", lambda image, boxes, labels, colours: seen(labels) or image
    )
    seen = labels.append
    task = DetectionTask(8)
    task.draw(prediction([], (BOX, 1, 0.6), file_name=grey))
    facts = SimpleNamespace(truths=lambda: iter([Categories((4, 1))]), class_names=["dog", "cat"])
    task.check_data(facts, None)
    task.draw(prediction([], (BOX, 1, 0.6), file_name=grey))
    assert labels == [["category 1 0.60"], ["cat 0.60"]]


@pytest.mark.parametrize("max_length", [None, 2])
def test_an_empty_text_with_the_numbers_of_the_categories(tmp_path, max_length):
    tokenizer = make_tokenizer(tmp_path, "square")
    sample = sample_of(SampleText(4, "", {"image_id": 7, "objects": []}, Categories((2, 90))))
    [text] = word(DetectionTask(8).preprocessor(TextTokenizer(tokenizer, max_length=max_length)), sample)
    assert text.encoding.input_ids.tolist() == tokenizer("")["input_ids"]
    assert text.image_index == (0,)
    assert text.targets.category_ids.tolist() == [2, 90]
    assert text.record["text_index"] == 4 and text.record["image_id"] == 7
    assert text.record["image_size"] == [60, 100] and "cut_wordpieces" not in text.record
