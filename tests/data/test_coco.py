"""COCO's instances files, and detection on them; pixels are tested once for all readers."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest

from e2e_vl.config import DataConfig
from e2e_vl.data.base import open_options
from e2e_vl.data.coco import CocoDetectionDataset, CocoInstances
from e2e_vl.predictions import TrueObject
from tests.data.helpers import assert_same_from_tables, open_dataset, refused

NO_OBJECTS = {"id": 11, "file_name": "eleven.png", "width": 30, "height": 20}


def test_every_image_and_annotation_is_what_the_file_says(tiny):
    rows = tiny.instances["annotations"]
    rows[0]["area"] = 12.5
    tiny.instances["images"].append(NO_OBJECTS)
    instances = CocoInstances(tiny.write().instances_file)
    assert (instances.category_ids, instances.class_names) == ([2, 90], ["square", "box"])
    assert instances.attribute_names == ["blue", "red", "green"]
    assert [image.id for image in instances.images] == [7, 3, 9, 11]
    for row in rows:
        [annotated] = [annotated for annotated in instances[row["image_id"]].objects if annotated.id == row["id"]]
        x, y, width, height = row["bbox"]
        assert annotated.box == (x, y, x + width, y + height)
        assert instances.category_ids[annotated.class_index] == row["category_id"]
        assert (annotated.is_crowd, annotated.area) == (bool(row["iscrowd"]), row.get("area"))
    again = pickle.loads(pickle.dumps(instances))
    assert again["7"] == instances[7] and 8 not in again
    objects = instances.objects(7)
    assert objects.ids == (100, 101, 102) and objects.names == ("square", "square", "box")
    np.testing.assert_array_equal(objects.attributes, [[1, -1], [0, 2], [-1, -1]])
    assert instances.objects("11").boxes.shape == (0, 4)


def test_a_table_gives_the_same_objects_and_names(tiny, monkeypatch, caplog):
    tiny.instances["annotations"].append(tiny.instances["annotations"][0] | {"id": 999, "bbox": [1, 1, 0, 5]})
    folder = tiny.images_root.parent
    tiny.write()
    assert_same_from_tables(folder, monkeypatch, caplog, lambda: dataset_of(tiny))
    expected = CocoInstances(tiny.instances_file)
    mapped = CocoInstances(tiny.instances_file, folder / "index")
    for name in ("category_ids", "class_names", "attribute_names", "empty_boxes"):
        assert getattr(mapped, name) == getattr(expected, name)
    assert mapped.empty_boxes == {"999"} and mapped["7"] == expected[7] and 8 not in mapped


def add_root(content: dict) -> None:
    for row in content["categories"]:
        row["supercategory"] = "square"
    content["categories"].insert(0, {"id": 0, "name": "square", "supercategory": "none"})


@pytest.mark.parametrize(
    "change",
    [
        lambda c: None,
        lambda c: [row.update(id=float(row["id"]), width=float(row["width"])) for row in c["images"]],
        lambda c: [row.update(image_id=str(row["image_id"])) for row in c["annotations"]],
        lambda c: [row.update(category_id=f"{row['category_id']}") for row in c["annotations"]],
        lambda c: [row.update(attributes=None, area=float("nan")) for row in c["annotations"]],
        lambda c: [row.update(attributes=[]) for row in c["annotations"]],
        add_root,
    ],
)
def test_the_same_in_the_words_of_other_tools(tiny, change):
    before = CocoInstances(tiny.write().instances_file)
    change(tiny.instances)
    tiny.instances_file.write_text("\ufeff" + json.dumps(tiny.instances), encoding="utf-8")
    after = CocoInstances(tiny.instances_file)
    assert [*after.images] == [*before.images]
    assert (after.category_ids, after.class_names) == (before.category_ids, before.class_names)


def test_a_category_without_supercategory_is_a_class_if_a_box_is_of_it(tiny):
    first, second = tiny.instances["categories"]
    first["supercategory"], second["supercategory"] = "none", first["name"]
    assert len(CocoInstances(tiny.write().instances_file).class_names) == 2


def test_detection_needs_numbers_as_category_ids(tiny):
    for row in (*tiny.instances["categories"], *tiny.instances["annotations"]):
        key = "category_id" if "category_id" in row else "id"
        row[key] = f"c{row[key]}"
    tiny.instances_file = tiny.instances_file.with_name("train.json")
    tiny.write()
    assert CocoInstances(tiny.instances_file).category_ids == ["c2", "c90"]
    with refused("train.json: the category id 'c2'"):
        open_dataset(CocoDetectionDataset, settings_of(tiny), "train", "online")


def test_ids_beyond_64_bits_are_read_as_strings(tiny):
    tiny.instances["images"].append(NO_OBJECTS | {"id": 2**70})
    instances = CocoInstances(tiny.write().instances_file)
    assert instances[2**70].id == str(2**70) and instances[2**70].file_name == "eleven.png"


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda c: c["annotations"][0].update(image_id=8), ["annotation 100", "image_id"]),
        (lambda c: c["annotations"][0].update(category_id=8), ["annotation 100", "category_id"]),
        (lambda c: c["annotations"][0].update(attribute_ids=[8]), ["annotation 100", "attribute"]),
        (lambda c: c["annotations"][0].update(id=101), ["annotation 101", "twice"]),
        (lambda c: c["annotations"][1].update(bbox=[100, 20, 5, 5]), ["annotation 101", "outside"]),
        (lambda c: c["annotations"][1].update(bbox=[-9, 20, 5, 5]), ["annotation 101", "outside"]),
        (lambda c: c["images"][0].update(id="3"), ["image 3", "twice"]),
        (lambda c: c["images"][0].update(width=0), ["images[0].width"]),
        (lambda c: c["categories"][0].update(name="square"), ["category square", "twice"]),
        (lambda c: [row.update(bbox=[0.1, 0.2, 0.5, 0.75]) for row in c["annotations"]], ["normalised", "pixels"]),
    ],
)
def test_a_bad_record_is_named(tiny, change, parts):
    change(tiny.instances)
    tiny.instances_file.write_text(json.dumps(tiny.instances))
    with refused("instances.json", *parts):
        CocoInstances(tiny.instances_file)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda row: row.update(bbox=[row["bbox"][0], row["bbox"][1], 99, 99]), "6 of 6 boxes reach outside"),
        (lambda row: row.update(bbox=[0.1, 0.2, 0.5, 0.75]) if row["image_id"] == 9 else None, "those of image 9"),
    ],
)
def test_suspicious_boxes_cause_one_warning(tiny, change, part, caplog):
    for row in tiny.instances["annotations"]:
        change(row)
    CocoInstances(tiny.write().instances_file)
    [record] = caplog.records
    assert part in record.getMessage() and "instances.json" in record.getMessage()


def settings_of(tiny, **changes) -> DataConfig:
    root, files = str(tiny.images_root.parent), {"images": "images", "instances": "{split}.json"}
    return DataConfig(name="coco_detection", root=root, files=files, **changes)


def dataset_of(tiny, *, training: bool = False, **changes) -> CocoDetectionDataset:
    return open_dataset(CocoDetectionDataset, settings_of(tiny, **changes), "instances", training=training)


def test_every_image_has_one_empty_text(tiny):
    tiny.instances["images"].append(NO_OBJECTS)
    tiny.instances["annotations"][0]["area"] = 123.5
    dataset = dataset_of(tiny.write())
    assert len(dataset) == 4 and dataset.groups == [[0], [1], [2], [3]]
    sample = dataset.sample((0,))
    [image], [text] = sample.images, sample.texts
    assert (image.id, image.size, image.boxes) == ("7", (60, 100), None)
    assert (text.words, text.image_index, text.index) == ("", (0,), 0)
    assert text.metadata == {"image_id": 7} and text.truth.category_ids == (2, 90)
    assert [true_object.is_crowd for true_object in text.truth.objects] == [False, False, True]
    assert text.truth.objects[0] == TrueObject((10, 20, 30, 40), 2, "square", is_crowd=False, area=123.5)
    assert dataset.sample((3,)).texts[0].truth.objects == ()
    assert next(iter(dataset.truths())) == text.truth
    options = open_options(CocoDetectionDataset, settings_of(tiny))
    assert list(CocoDetectionDataset.texts_of(*options, "instances")) == ["square", "box"]


def test_images_without_objects_can_be_left_out_in_training(tiny):
    tiny.instances["images"].insert(0, NO_OBJECTS)
    tiny.instances["annotations"][3]["iscrowd"] = 1  # the only one of image 3
    tiny.write()
    dataset = dataset_of(tiny, training=True, keep_empty_images=False)
    assert [dataset.instances.images[index].id for [index] in dataset.groups] == [7, 9]
    assert len(dataset_of(tiny, training=True).groups) == len(dataset_of(tiny, keep_empty_images=False).groups) == 4


def test_the_detector_has_the_same_classes(tiny):
    dataset = dataset_of(tiny)
    dataset.check_classes(2)
    for classes, names in ((1, None), (3, None), (3, ("square", "box", "cup"))):
        with refused(f"2 categories, but the detector has {classes} classes"):
            dataset.check_classes(classes, names)
