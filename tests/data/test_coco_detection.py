"""What the reader of COCO detection states; its pixels are tested once for all readers."""

from __future__ import annotations

import dataclasses
import logging

import numpy as np
import pytest

from e2e_vl.config import DataSettings
from e2e_vl.data.base import open_options
from e2e_vl.data.coco import CocoDetectionDataset, read_instances
from e2e_vl.samples import Categories
from tests.data.roads import open_dataset

NO_OBJECTS = {"id": 11, "file_name": "eleven.png", "width": 30, "height": 20}


def dataset_of(tiny, **options) -> CocoDetectionDataset:
    return CocoDetectionDataset(tiny.images_root, read_instances(tiny.instances_file, drop_empty_boxes=True), **options)


def test_every_image_has_one_empty_text(tiny):
    tiny.instances["images"].append(NO_OBJECTS)
    dataset = dataset_of(tiny.write())
    assert len(dataset) == 4
    assert dataset.groups == [[0], [1], [2], [3]]
    for index, image_id in enumerate((7, 3, 9, 11)):
        sample = dataset.sample((index,))
        [image], [text] = sample.images, sample.texts
        assert image.id == str(image_id) and image.boxes is None
        assert (text.words, text.image_index, text.index) == ("", (0,), index)
        assert text.metadata["image_id"] == image_id
        row = tiny.instances["images"][index]
        assert image.size == (row["height"], row["width"])
    assert dataset.sample((3,)).texts[0].metadata["objects"] == []
    assert list(dataset.truths()) == [dataset.sample((index,)).texts[0].truth for index in range(4)]


def test_crowds_are_part_of_the_truth(tiny):
    sample = dataset_of(tiny).sample((0,))
    assert [entry["is_crowd"] for entry in sample.texts[0].metadata["objects"]] == [False, False, True]
    assert sample.images[0].objects.is_crowd.tolist() == [False, False, True]


def test_empty_images_can_be_left_out(tiny):
    tiny.instances["images"].insert(0, NO_OBJECTS)
    tiny.instances["annotations"][3]["iscrowd"] = 1  # the only one of image 3
    dataset = dataset_of(tiny.write(), keep_empty_images=False)
    assert [dataset.images[index].id for [index] in dataset.groups] == [7, 9]
    tiny.instances["annotations"] = []
    with pytest.raises(ValueError, match=r"instances.json has no images with objects"):
        dataset_of(tiny.write(), keep_empty_images=False)
    tiny.instances["images"] = []
    with pytest.raises(ValueError, match=r"instances.json has no images"):
        dataset_of(tiny.write())


def test_classes_lead_to_category_ids_and_back(tiny):
    dataset = dataset_of(tiny)
    seen = set()
    for index in range(3):
        sample = dataset.sample((index,))
        [text], objects = sample.texts, sample.images[0].objects
        assert text.truth == Categories((2, 90))
        truth = text.metadata["objects"]
        assert np.array(text.truth.ids)[objects.classes].tolist() == [entry["category_id"] for entry in truth]
        seen |= {(entry["category_id"], entry["category"]) for entry in truth}
    assert seen == {(2, "square"), (90, "box")}


def test_the_facts_hold_boxes_and_areas_of_the_file(tiny):
    tiny.instances["annotations"][0]["area"] = 123.5
    facts = dataset_of(tiny.write()).sample((0,)).texts[0].metadata
    assert facts["objects"][0] == {
        "box": [10, 20, 30, 40],
        "category_id": 2,
        "category": "square",
        "area": 123.5,
        "is_crowd": False,
    }
    assert facts["objects"][1]["area"] is None


def settings_of(tiny, **changes) -> DataSettings:
    root = tiny.images_root.parent
    (root / "instances_some.json").write_bytes(tiny.instances_file.read_bytes())
    files = {"images": "images", "instances": "instances_{split}.json"}
    return DataSettings(**({"name": "coco_detection", "root": str(root), "files": files} | changes))


def test_settings_name_files_by_split_and_leave_images_out_in_training_only(tiny):
    tiny.instances["images"].append(NO_OBJECTS)
    settings = settings_of(tiny.write(), keep_empty_images=False)
    training, evaluation = (
        open_dataset(CocoDetectionDataset, settings, "some", training=value) for value in (True, False)
    )
    assert (len(training.groups), len(evaluation.groups)) == (3, 4)
    kept = dataclasses.replace(settings, keep_empty_images=True)
    assert len(open_dataset(CocoDetectionDataset, kept, "some", training=True).groups) == 4
    options = open_options(CocoDetectionDataset, settings)
    assert list(CocoDetectionDataset.texts_of(*options, "some")) == ["square", "box"]


def test_settings_that_do_not_fit_are_one_sentence(tiny):
    with pytest.raises(ValueError, match=r"data.files.instances is not set"):
        open_dataset(CocoDetectionDataset, settings_of(tiny, files={"images": "images"}), "some")
    with pytest.raises(FileNotFoundError, match=r"instances_other.json: cannot read the instances"):
        open_dataset(CocoDetectionDataset, settings_of(tiny), "other")
    dataset = dataset_of(tiny)
    dataset.check_classes(2)
    for classes in (1, 3):
        with pytest.raises(ValueError, match=f"has 2 categories, but the detector has {classes} classes"):
            dataset.check_classes(classes)


def test_objects_without_extent_are_left_out_and_logged(tiny, caplog):
    tiny.instances["annotations"][0]["bbox"] = [10, 20, 0, 5]
    with caplog.at_level(logging.WARNING):
        sample = dataset_of(tiny.write()).sample((0,))
    assert "left out 1 annotations with empty boxes: [100]" in caplog.text
    assert len(sample.images[0].objects) == 2
