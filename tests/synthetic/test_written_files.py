"""The written files, read back with nothing of this project."""

from __future__ import annotations

import json
import pickletools
import re
from collections import Counter

import numpy as np
import pytest
from PIL import Image
from pycocotools.coco import COCO

from e2e_vl.synthetic.base import polygons

SPLITS = {"train": 110, "val": 20, "testA": 10, "testB": 10}
DETECTIONS = "detections/refcoco+_unc/res101_coco_minus_refer_notime_dets.json"


def _iou(a, b) -> float:
    w = min(a[0] + a[2], b[0] + b[2]) - max(a[0], b[0])
    h = min(a[1] + a[3], b[1] + b[3]) - max(a[1], b[1])
    overlap = max(w, 0) * max(h, 0)
    return overlap / (a[2] * a[3] + b[2] * b[3] - overlap)


def test_images_and_instances(synthetic_folder, coco):
    images, annotations = coco.dataset["images"], coco.dataset["annotations"]
    assert [image["id"] for image in images] == list(range(1, 151))
    files = sorted(path.name for path in (synthetic_folder / "images/train2014").iterdir())
    assert files == [image["file_name"] for image in images]
    assert files[0] == "COCO_train2014_000000000001.jpg"
    for image in images[::10]:
        with Image.open(synthetic_folder / "images/train2014" / image["file_name"]) as picture:
            assert (picture.width, picture.height, picture.mode) == (image["width"], image["height"], "RGB")
    assert [entry["id"] for entry in annotations] == list(range(1, len(annotations) + 1))
    assert set(coco.dataset) == {"info", "images", "licenses", "annotations", "categories", "attributes"}
    names = [entry["name"] for entry in coco.dataset["attributes"]]
    assert [entry["id"] for entry in coco.dataset["attributes"]] == list(range(len(names)))
    counts = Counter()
    for entry in annotations:
        assert entry["iscrowd"] == 0
        assert entry["area"] > 0
        colour, texture, size = (names[i] for i in entry["attribute_ids"])
        assert texture in ("plain", "striped")
        assert size in ("small", "big")
        counts.update([colour, texture, size, entry["category_id"]])
    assert set(counts) >= {"red", "blue", 1, 2, 3, 4, 5, 6}
    assert 0.4 < counts["small"] / len(annotations) < 0.6
    assert 0.4 < counts["plain"] / len(annotations) < 0.6
    per_image = Counter(entry["image_id"] for entry in annotations)
    assert set(per_image.values()) == set(range(5, 11))
    assert synthetic_folder.joinpath("refcoco+/instances.json").read_bytes() == (
        synthetic_folder.joinpath("annotations/instances_train2014.json").read_bytes()
    )


def test_segmentations_give_box_and_area(coco):
    for entry in coco.dataset["annotations"][::5]:
        mask = coco.annToMask(entry)
        rows, columns = np.nonzero(mask)
        x, y, w, h = entry["bbox"]
        assert (x, y, x + w, y + h) == (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)
        assert mask.sum() == pytest.approx(entry["area"], rel=0.02)


def test_polygons_of_a_ragged_mask_are_exact():
    rng = np.random.default_rng(0)
    mask = np.zeros((30, 40), bool)
    mask[5:20, 8:30] = True
    mask[4, 8:30] = rng.random(22) < 0.5
    mask[5:20, 30] = rng.random(15) < 0.5
    mask[0, 39] = True  # a second part, one pixel in the picture's corner
    coco = COCO()
    coco.dataset = {
        "images": [{"id": 1, "height": 30, "width": 40}],
        "annotations": [{"id": 1, "image_id": 1, "segmentation": polygons(mask), "category_id": 1}],
        "categories": [],
    }
    coco.createIndex()
    assert len(polygons(mask)) == 2
    assert (coco.annToMask(coco.anns[1]) == mask).all()


def test_refs_have_the_official_fields(synthetic_folder, coco, refs):
    data = (synthetic_folder / "refcoco+" / "refs(unc).p").read_bytes()
    opcodes = list(pickletools.genops(data))
    assert opcodes[0][0].name == "PROTO"
    assert opcodes[0][1] == 2
    assert not {"GLOBAL", "REDUCE", "BUILD", "INST", "OBJ"} & {opcode.name for opcode, _, _ in opcodes}
    assert [ref["ref_id"] for ref in refs] == list(range(len(refs)))
    sent_ids = [sentence["sent_id"] for ref in refs for sentence in ref["sentences"]]
    assert sorted(sent_ids) == list(range(len(sent_ids)))
    keys = {"sent_ids", "file_name", "ann_id", "ref_id", "image_id", "split", "sentences", "category_id"}
    splits: dict[str, set[int]] = {split: set() for split in SPLITS}
    for ref in refs:
        assert set(ref) == keys
        annotation = coco.anns[ref["ann_id"]]
        assert (annotation["image_id"], annotation["category_id"]) == (ref["image_id"], ref["category_id"])
        stem = coco.imgs[ref["image_id"]]["file_name"].removesuffix(".jpg")
        assert re.fullmatch(rf"{stem}_\d+\.jpg", ref["file_name"])
        assert ref["sent_ids"] == [sentence["sent_id"] for sentence in ref["sentences"]]
        splits[ref["split"]].add(ref["image_id"])
        for sentence in ref["sentences"]:
            assert set(sentence) == {"tokens", "raw", "sent_id", "sent", "family"}
            assert " ".join(sentence["tokens"]) == sentence["sent"]
            assert " ".join(re.sub(r"[^a-z ]", "", sentence["raw"].lower()).split()) == sentence["sent"]
    assert {split: len(images) for split, images in splits.items()} == SPLITS
    assert sum(len(images) for images in splits.values()) == len(set().union(*splits.values()))


def test_detections(synthetic_folder, coco):
    detections = json.loads((synthetic_folder / DETECTIONS).read_text())
    names = {entry["id"]: entry["name"] for entry in coco.dataset["categories"]}
    assert [entry["det_id"] for entry in detections] == list(range(len(detections)))
    assert {entry["image_id"] for entry in detections} == set(coco.imgs)
    assert [entry["image_id"] for entry in detections] != sorted(entry["image_id"] for entry in detections)
    truth = {image_id: [entry["bbox"] for entry in entries] for image_id, entries in coco.imgToAnns.items()}
    best = []
    covered = Counter()
    for entry in detections:
        assert set(entry) == {"det_id", "h5_id", "box", "image_id", "category_id", "category_name", "score"}
        assert entry["h5_id"] == entry["det_id"]
        assert entry["category_name"] == names[entry["category_id"]]
        assert 0.65 <= entry["score"] <= 1
        x, y, w, h = entry["box"]
        assert min(x, y) >= 0
        assert max(x + w, y + h) <= 128.001
        assert min(w, h) > 0
        ious = [_iou((x, y, w, h), box) for box in truth[entry["image_id"]]]
        best.append(max(ious))
        if max(ious) >= 0.5:
            covered[entry["image_id"], int(np.argmax(ious))] += 1
    assert all(iou >= 0.599 or iou <= 0.401 for iou in best)
    assert 0.05 < np.mean([iou < 0.5 for iou in best]) < 0.3
    assert np.mean([iou > 0.999 for iou in best]) < 0.02
    assert 0.9 < len(covered) / len(coco.anns) < 0.99
    assert set(covered.values()) == {1}


def test_captions(synthetic_folder, coco):
    content = json.loads((synthetic_folder / "annotations/captions_train2014.json").read_text())
    assert content["images"] == coco.dataset["images"]
    per_image = Counter(entry["image_id"] for entry in content["annotations"])
    assert per_image == dict.fromkeys(coco.imgs, 5)
    shapes = {entry["id"]: entry["name"] for entry in coco.dataset["categories"]}
    numbers = {
        "a": 1,
        "two": 2,
        "three": 3,
        "four": 4,
        "five": 5,
        "six": 6,
        "seven": 7,
        "eight": 8,
        "nine": 9,
        "ten": 10,
    }
    checked = 0
    for entry in content["annotations"]:
        caption = entry["caption"]
        assert re.fullmatch(r"[A-Z][a-z ,]*\.", caption)
        counts = re.findall(r"(\w+) (circle|square|triangle|star|cross|diamond)(?:e?s)?\b", caption.lower())
        objects = [shapes[item["category_id"]] for item in coco.imgToAnns[entry["image_id"]]]
        if len(counts) == len(re.split(", | and ", caption)) and all(number in numbers for number, _ in counts):
            total = sum(numbers[number] for number, _ in counts)
            if total == len(objects):  # a caption that counts all shapes
                assert Counter({name: numbers[number] for number, name in counts}) == Counter(objects)
                checked += 1
    assert checked >= 100


def test_detection_files_hold_the_images_of_one_split_each(synthetic_folder, coco):
    first = 1
    annotations = []
    for split, count in SPLITS.items():
        content = json.loads((synthetic_folder / f"detection/instances_{split}.json").read_text())
        assert [image["id"] for image in content["images"]] == list(range(first, first + count))
        assert {entry["image_id"] for entry in content["annotations"]} == set(range(first, first + count))
        assert content["categories"] == coco.dataset["categories"]
        annotations += content["annotations"]
        first += count
    assert annotations == coco.dataset["annotations"]
