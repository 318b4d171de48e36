"""Detection: predictions in original pixels, F1 of an image, COCO's metrics, pictures."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from detector.errors import UserError
from detector.structures import DetectionTargets, Regions
from e2e_vl.drawing import BLUE, GREEN, RED
from e2e_vl.samples import CategorisedObjects, SampleText
from e2e_vl.structures import Batch, EncoderOutput, ModelOutput, gather_regions
from e2e_vl.tasks.detection import CategoryTargets, DetectionPrediction, DetectionTask, coco_metrics
from e2e_vl.text import TextTokenizer
from tests.tasks.batches import has_colour, make_batch
from tests.tasks.preprocessors import preprocess, sample_of


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
    class_names = ("cat", "dog", "bird")
    return ModelOutput(task(batch, gathered, encoded), regions, gathered, encoded, batch, class_names)


def test_predictions_are_in_original_pixels_with_category_ids():
    task, batch = DetectionTask(5).eval(), two_images()
    output = run(task, batch)
    assert output.task.losses == {} and output.task.logits.shape == (2, 0)
    first, second = task.predict(output)
    assert (first.image_id, first.boxes, first.scores, first.category_ids) == (22, (), (), ())
    assert second.image_id == 11 and second.boxes == ((20, 40, 220, 120), (0, 0, 400, 200))
    assert second.scores == (0.75, 0.25) and second.category_ids == (30, 4)
    assert first.categories == () and second.categories == ("bird", "cat")
    assert task.predict(dataclasses.replace(output, class_names=None))[1].categories == ()


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
    return DetectionPrediction.from_record(base | more)


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


BOX, ELSEWHERE = [9.0, 9, 30, 50], [50.0, 9, 80, 50]


@pytest.mark.parametrize(
    ("score", "objects", "colours"),
    [(0.6, [entry(BOX)], [BLUE]), (0.6, [entry(ELSEWHERE)], [RED, GREEN]), (0.4, [entry(BOX, is_crowd=True)], [GREEN])],
)
def test_pictures_show_sure_detections_and_missed_objects_only(grey, score, objects, colours):
    picture = DetectionTask(8).draw(prediction(objects, (BOX, 4, score), file_name=grey))
    assert [one for one in (BLUE, RED, GREEN) if has_colour(picture, one).sum() > 100] == colours


def test_an_empty_text_with_the_numbers_of_the_categories(tokenizer):
    sample = sample_of(SampleText(4, "", {"image_id": 7}, CategorisedObjects((2, 90), ())))
    [text] = preprocess(DetectionTask(8).preprocessor(TextTokenizer(tokenizer)), sample)
    assert text.encoding.input_ids.tolist() == tokenizer("")["input_ids"] and text.image_index == (0,)
    assert text.targets.category_ids.tolist() == [2, 90]
    assert (text.record["text_index"], text.record["image_id"], text.record["image_size"]) == (4, 7, [60, 100])


# COCO average precision


CATEGORIES = {3: "cat", 17: "dog", 44: "kite"}


def random_records(seed: int, images: int = 12) -> list[dict]:
    """Noisy detections of random objects of all sizes: misses, doubles, wrong categories, crowds, empty images."""
    rng = np.random.default_rng(seed)
    records = []
    for number in range(images):
        objects, boxes, ids = [], [], []
        for _ in range(int(rng.integers(1, 7)) if number % 5 else 0):
            corner, side = rng.uniform(0, 300, 2), np.exp(rng.uniform(np.log(8), np.log(250), 2))
            box = np.concatenate([corner, corner + side])
            category = int(rng.choice([3, 17]))
            area = float(side.prod() * rng.uniform(0.3, 1))
            is_crowd = bool(rng.random() < 0.15)
            objects.append(
                {"box": box.tolist(), "category_id": category, "category": CATEGORIES[category]}
                | {"area": area, "is_crowd": is_crowd}
            )
            for _ in range(int(rng.integers(0, 3))):
                boxes.append((box + rng.normal(0, 0.08, 4) * side.repeat(2)).tolist())
                ids.append(category if rng.random() < 0.8 else 44)
        boxes += (rng.uniform(0, 100, (2, 4)) + np.array([0, 0, 110, 110])).tolist()
        ids += [3, 17]
        scores = rng.random(len(boxes)).tolist()
        records.append(
            {"image_id": 100 - number, "boxes": boxes, "scores": scores, "category_ids": ids, "objects": objects}
        )
    return records


def by_pycocotools(records: list[dict], folder: Path) -> COCOeval:
    """The way its documentation goes: from files."""

    def xywh(box: list[float]) -> list[float]:
        return [*box[:2], box[2] - box[0], box[3] - box[1]]

    annotations = [
        {"image_id": record["image_id"], "category_id": entry["category_id"], "bbox": xywh(entry["box"])}
        | {"area": entry["area"], "iscrowd": int(entry["is_crowd"])}
        for record in records
        for entry in record["objects"]
    ]
    content = {
        "images": [{"id": record["image_id"]} for record in records],
        "annotations": [{"id": number, **entry} for number, entry in enumerate(annotations, start=1)],
        "categories": [{"id": key, "name": name} for key, name in CATEGORIES.items()],
    }
    found = [
        {"image_id": record["image_id"], "category_id": category, "score": score, "bbox": xywh(box)}
        for record in records
        for box, score, category in zip(record["boxes"], record["scores"], record["category_ids"], strict=True)
    ]
    (folder / "truth.json").write_text(json.dumps(content))
    (folder / "found.json").write_text(json.dumps(found))
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(folder / "truth.json")
        evaluation = COCOeval(truth, truth.loadRes(str(folder / "found.json")), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return evaluation


@pytest.mark.parametrize("seed", range(2))
def test_numbers_are_those_of_pycocotools(seed, tmp_path, capfd):
    records = random_records(seed)
    metrics = coco_metrics(records)
    assert capfd.readouterr().out == ""
    expected = by_pycocotools(records, tmp_path)
    names = dict(zip(("AP", "AP50", "AP75", "APs", "APm", "APl"), expected.stats[:6], strict=True))
    names["AR100"] = expected.stats[8]
    assert 0.05 < metrics["AP"] < metrics["AP50"] < 0.95
    for name, value in names.items():
        assert metrics[name] == pytest.approx(value, abs=1e-12), name
    for column, name in enumerate(("cat", "dog")):
        precision = expected.eval["precision"][:, :, column, 0, -1]
        assert metrics[f"AP/{name}"] == pytest.approx(precision[precision > -1].mean(), abs=1e-12)
    assert set(metrics) == {*names, "AP/cat", "AP/dog"}  # no kite in the truth


def test_without_an_area_the_box_decides_the_size():
    entry = {"box": [0.0, 0.0, 20.0, 20.0], "category_id": 1}
    record = {"image_id": 1, "boxes": [entry["box"]], "scores": [1.0], "category_ids": [1], "objects": [entry]}
    metrics = coco_metrics([record])
    assert metrics["APs"] == metrics["AP/1"] == pytest.approx(1)  # without a name, the id
    assert metrics["APm"] is None
    assert coco_metrics([record | {"objects": [entry | {"area": 2000.0}]}])["APm"] == pytest.approx(1)


def test_nothing_found_is_zero_and_nothing_to_find_is_none():
    records = random_records(0)
    blank = [record | {"boxes": [], "scores": [], "category_ids": []} for record in records]
    assert {coco_metrics(blank)[name] for name in ("AP", "AP50", "AR100", "AP/cat")} == {0.0}
    empty = [record | {"objects": []} for record in records]
    assert set(coco_metrics(empty).values()) == {None}
    assert set(coco_metrics([]).values()) == {None}


def test_categories_of_one_name_stay_apart():
    box = [0.0, 0.0, 20.0, 20.0]
    objects = [{"box": box, "category_id": number, "category": "thing"} for number in (1, 2)]
    record = {"image_id": 1, "boxes": [box], "scores": [1.0], "category_ids": [2], "objects": objects}
    metrics = coco_metrics([record])
    assert (metrics["AP/thing 1"], metrics["AP/thing 2"]) == (0.0, pytest.approx(1))
