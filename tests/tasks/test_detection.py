"""Detection: predictions in original pixels, F1 of an image, COCO's metrics, pictures."""

from __future__ import annotations

import pytest
import torch

from detector.errors import UserError
from detector.structures import DetectionTargets, Regions
from e2e_vl.drawing import BLUE, GREEN, RED
from e2e_vl.samples import Categories, SampleText
from e2e_vl.structures import Batch, EncoderOutput, ModelOutput, gather_regions
from e2e_vl.tasks.detection import CategoryTargets, DetectionPrediction, DetectionTask
from e2e_vl.text import TextTokenizer
from tests.tasks.batches import has_colour, make_batch
from tests.tasks.preprocessors import make_tokenizer, preprocess, sample_of


def two_images(**fields) -> Batch:
    """The first at half and the second at twice its original size; texts in the other order."""
    return make_batch(
        [[1], [0]],
        sizes=[[100, 200], [80, 60]],
        original_sizes=[[200, 400], [40, 30]],
        targets=CategoryTargets(torch.tensor([[4, 9, 30]] * 2)),
        records=[{"image_id": 22, "objects": []}, {"image_id": 11, "objects": []}],
        **fields,
    )


def run(task: DetectionTask, batch: Batch) -> ModelOutput:
    regions = Regions(
        boxes=[torch.tensor([[10.0, 20.0, 110.0, 60.0], [0.0, 0.0, 200.0, 100.0]]), torch.zeros(0, 4)],
        features=[torch.zeros(2, 5), torch.zeros(0, 5)],
        class_logits=[torch.zeros(2, 4), torch.zeros(0, 4)],
        scores=[torch.tensor([0.75, 0.25]), torch.zeros(0)],
        classes=[torch.tensor([2, 0]), torch.zeros(0, dtype=torch.int64)],
    )
    gathered = gather_regions(regions, batch.images.sizes, batch.image_index)
    encoded = EncoderOutput(text=torch.zeros(2, 3, 5), regions=gathered.features)
    return ModelOutput(task(batch, gathered, encoded), regions, gathered, encoded, batch)


def test_predictions_are_in_original_pixels_with_category_ids():
    task, batch = DetectionTask(5).eval(), two_images()
    output = run(task, batch)
    assert output.task.losses == {} and output.task.logits.shape == (2, 0)
    first, second = task.predict(batch, output)
    assert (first.image_id, first.boxes, first.scores, first.category_ids) == (22, (), (), ())
    assert second.image_id == 11 and second.boxes == ((20, 40, 220, 120), (0, 0, 400, 200))
    assert second.scores == (0.75, 0.25) and second.category_ids == (30, 4)


def test_training_without_detection_losses_is_an_error():
    task = DetectionTask(5).train()
    with pytest.raises(UserError, match=r"detector.loss_weight"):
        run(task, two_images())
    run(task, two_images(detection_targets=DetectionTargets([], [])))


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
    assert DetectionTask(5).correctness(prediction(objects, *found)) == pytest.approx(expected)


def test_metrics_are_cocos():
    found = prediction([entry(A)], (A, 4, 0.9)), prediction([entry(A)], (FAR, 4, 0.1), image_id=2)
    metrics = DetectionTask(5).metrics(found)
    assert metrics["AP50"] == metrics["AP/x"] == pytest.approx(51 / 101)


BOX, ELSEWHERE = [9.0, 9, 30, 50], [50.0, 9, 80, 50]


@pytest.mark.parametrize(
    ("score", "objects", "colours"),
    [
        (0.6, [entry(BOX)], [BLUE]),
        (0.6, [entry(ELSEWHERE)], [RED, GREEN]),
        (0.4, [entry(BOX, is_crowd=True)], [GREEN]),
    ],
)
def test_pictures_show_sure_detections_and_missed_objects_only(grey, score, objects, colours):
    picture = DetectionTask(8).draw(prediction(objects, (BOX, 4, score), file_name=grey))
    assert [one for one in (BLUE, RED, GREEN) if has_colour(picture, one).sum() > 100] == colours


def test_an_empty_text_with_the_numbers_of_the_categories(tmp_path):
    tokenizer = make_tokenizer(tmp_path, "square")
    sample = sample_of(SampleText(4, "", {"image_id": 7, "objects": []}, Categories((2, 90))))
    [text] = preprocess(DetectionTask(8).preprocessor(TextTokenizer(tokenizer)), sample)
    assert text.encoding.input_ids.tolist() == tokenizer("")["input_ids"] and text.image_index == (0,)
    assert text.targets.category_ids.tolist() == [2, 90]
    assert (text.record["text_index"], text.record["image_id"], text.record["image_size"]) == (4, 7, [60, 100])
