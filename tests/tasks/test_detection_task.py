from __future__ import annotations

import dataclasses

import pytest
import torch

from detector.structures import DetectionTargets, ImageBatch, Regions
from e2e_vl.structures import Batch, EncoderOutput, ModelOutput, TextBatch, gather_regions
from e2e_vl.tasks.config import DetectionConfig
from e2e_vl.tasks.detection import CategoryTargets, DetectionTask

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
    assert first == {"image_id": 22, "objects": [], "boxes": [], "scores": [], "category_ids": []}
    assert second == {
        "image_id": 11,
        "objects": [],
        "boxes": [[20, 40, 220, 120], [0, 0, 400, 200]],
        "scores": [0.75, 0.25],
        "category_ids": [30, 4],
    }


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


def test_given_boxes_and_other_classes_are_errors():
    task, batch = DetectionTask(5).eval(), batch_of()
    given = dataclasses.replace(regions_of(), scores=None, classes=None)
    with pytest.raises(ValueError, match="evaluate with boxes 'online'"):
        task.predict(batch, output_of(task, batch, given))
    fewer = batch_of(targets=CategoryTargets(CATEGORY_IDS[:, :2]))
    with pytest.raises(ValueError, match="The detector has 3 classes, but the data set has 2 categories"):
        task.predict(fewer, output_of(task, fewer, regions_of()))


def entry(box: list[float], category_id: int = 4, *, is_crowd: bool = False) -> dict:
    return {"box": box, "category_id": category_id, "category": "x", "area": None, "is_crowd": is_crowd}


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
    record = {
        "image_id": 1,
        "objects": objects,
        "boxes": [box for box, _, _ in found],
        "category_ids": [category for _, category, _ in found],
        "scores": [score for _, _, score in found],
    }
    assert DetectionTask(5).correct(record) == pytest.approx(expected)


def test_metrics_are_cocos():
    record = {"image_id": 1, "boxes": [A], "scores": [0.9], "category_ids": [4], "objects": [entry(A)]}
    metrics = DetectionTask(5).metrics([record, record | {"image_id": 2, "boxes": [FAR], "scores": [0.1]}])
    assert metrics["AP50"] == metrics["AP/x"] == pytest.approx(51 / 101)


@pytest.mark.parametrize("field", ["shown_score", "positive_iou"])
def test_thresholds_lie_between_0_and_1(field):
    with pytest.raises(ValueError, match=f"task.config.{field} is 1.5"):
        DetectionConfig(**{field: 1.5})
