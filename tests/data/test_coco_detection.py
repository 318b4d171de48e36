from __future__ import annotations

import logging

import numpy as np
import pytest

from detector.images import ResizeRule
from e2e_vl.config import DataSettings, ResizeSettings
from e2e_vl.data.coco_detection import CocoDetectionDataset
from e2e_vl.data.examples import Request

TWICE = ResizeRule(120, 1000, "detectron2")  # of image 7, 100 x 60 pixels
NO_OBJECTS = {"id": 11, "file_name": "eleven.png", "width": 30, "height": 20}


def dataset_of(tiny, **options) -> CocoDetectionDataset:
    rule = options.pop("resize", TWICE)
    return CocoDetectionDataset(tiny.images_root, tiny.instances_file, tiny.tokenizer, rule, **options)


def example_of(dataset, index: int, epoch: int = 0):
    return dataset[Request(group=index, texts=(index,), epoch=epoch)]


def test_every_image_has_one_blank_text(tiny):
    tiny.instances["images"].append(NO_OBJECTS)
    dataset = dataset_of(tiny.write())
    assert len(dataset) == 4
    assert dataset.groups == [[0], [1], [2], [3]]
    for index, image_id in enumerate((7, 3, 9, 11)):
        example = example_of(dataset, index)
        [image], [text] = example.images, example.texts
        assert (image.boxes, image.objects) == (None, None)
        assert text.looks_at == (0,)
        assert text.input_ids.tolist() == tiny.tokenizer("")["input_ids"]
        assert (text.record["text_index"], text.record["image_id"]) == (index, image_id)
        height, width = text.record["image_size"]
        assert image.original_size == (height, width)


def test_crowds_are_truth_but_no_training_target(tiny):
    example = example_of(dataset_of(tiny, with_objects=True), 0)
    objects = example.images[0].objects
    np.testing.assert_allclose(objects.boxes, [[20, 40, 60, 80], [120, 20, 180, 80]])
    assert objects.boxes.dtype == np.float32
    assert objects.classes.tolist() == [0, 0]
    assert [entry["is_crowd"] for entry in example.texts[0].record["objects"]] == [False, False, True]


def test_an_image_without_objects_has_empty_targets(tiny):
    tiny.instances["images"].append(NO_OBJECTS)
    example = example_of(dataset_of(tiny.write(), with_objects=True), 3)
    assert example.images[0].objects.boxes.shape == (0, 4)
    assert example.images[0].objects.classes.shape == (0,)
    assert example.texts[0].record["objects"] == []


def test_empty_images_can_be_left_out(tiny):
    tiny.instances["images"].insert(0, NO_OBJECTS)
    tiny.instances["annotations"][3]["iscrowd"] = 1  # the only one of image 3
    dataset = dataset_of(tiny.write(), keep_empty_images=False)
    assert [dataset.images[index].id for [index] in dataset.groups] == [7, 9]
    tiny.instances["annotations"] = []
    with pytest.raises(ValueError, match=r"instances.json has no images with objects"):
        dataset_of(tiny.write(), keep_empty_images=False)


def test_classes_lead_to_category_ids_and_back(tiny):
    dataset = dataset_of(tiny, with_objects=True)
    seen = set()
    for index in range(3):
        example = example_of(dataset, index)
        category_ids = example.texts[0].targets["category_ids"]
        assert category_ids.tolist() == [2, 90]
        truth = [entry for entry in example.texts[0].record["objects"] if not entry["is_crowd"]]
        assert category_ids[example.images[0].objects.classes].tolist() == [entry["category_id"] for entry in truth]
        seen |= {(entry["category_id"], entry["category"]) for entry in truth}
    assert seen == {(2, "square"), (90, "box")}


def test_the_record_holds_boxes_and_areas_of_the_file(tiny):
    tiny.instances["annotations"][0]["area"] = 123.5
    record = example_of(dataset_of(tiny.write(), flip_probability=1.0), 0).texts[0].record
    assert record["objects"][0] == {
        "box": [10, 20, 30, 40],
        "category_id": 2,
        "category": "square",
        "area": 123.5,
        "is_crowd": False,
    }
    assert record["objects"][1]["area"] is None


def test_mirrored_boxes_lie_on_the_mirrored_objects(tiny):
    plain = example_of(dataset_of(tiny, with_objects=True, resize=ResizeRule(60, 1000, "detectron2")), 0).images[0]
    mirrored = dataset_of(tiny, with_objects=True, resize=ResizeRule(60, 1000, "detectron2"), flip_probability=1.0)
    mirrored = example_of(mirrored, 0).images[0]
    # Detectron2: x' = width - x, so both borders stay on the edges of the object's pixels
    np.testing.assert_allclose(mirrored.objects.boxes, [[70, 20, 90, 40], [10, 10, 40, 40]])
    for one, other in zip(plain.objects.boxes.astype(int), mirrored.objects.boxes.astype(int), strict=True):
        inside = mirrored.pixels[other[1] : other[3], other[0] : other[2]]
        assert (inside == inside[0, 0]).all()
        assert (inside == plain.pixels[one[1] : one[3], one[0] : one[2]]).all()


def test_boxes_are_clipped_to_the_image(tiny):
    tiny.instances["annotations"][0]["bbox"] = [-10, 20, 130, 50]  # of a 100 x 60 image
    objects = example_of(dataset_of(tiny.write(), with_objects=True), 0).images[0].objects
    np.testing.assert_allclose(objects.boxes[0], [0, 40, 200, 120])


def test_scale_and_mirroring_depend_on_seed_epoch_and_image_only(tiny):
    rules = [ResizeRule(size, 1000, "detectron2") for size in (30, 45, 60)]

    def drawn(seed: int) -> list[tuple]:
        dataset = dataset_of(tiny, resize=rules, flip_probability=0.5, seed=seed)
        return [example_of(dataset, 0, epoch).images[0].pixels for epoch in range(12)]

    first, again, other = drawn(1), drawn(1), drawn(2)
    assert all(np.array_equal(one, two) for one, two in zip(first, again, strict=True))
    assert {pixels.shape[0] for pixels in first} == {30, 45, 60}
    assert [pixels.shape for pixels in first] != [pixels.shape for pixels in other]
    # the left red square of image 7 starts at a tenth of its width, the right one ends at nine tenths
    is_mirrored = [bool((p[p.shape[0] // 4, p.shape[1] // 8] != 200).any()) for p in first]
    assert 0 < sum(is_mirrored) < 12


def settings_of(tiny, **changes) -> DataSettings:
    root = tiny.images_root.parent
    (root / "instances_some.json").write_bytes(tiny.instances_file.read_bytes())
    values = {
        "name": "coco_detection",
        "root": str(root),
        "files": {"images": "images", "instances": "instances_{split}.json"},
        "resize": ResizeSettings(short_edge=[30, 60], long_edge=1000, rounding="detectron2"),
        "flip": 1.0,
    }
    return DataSettings(**(values | changes))


def from_settings(tiny, settings, *, split="some", boxes="online", training=False) -> CocoDetectionDataset:
    options = {"seed": 1, "channel_order": "RGB", "with_objects": training}
    return CocoDetectionDataset.from_settings(
        settings, tiny.tokenizer, split, boxes=boxes, training=training, **options
    )


def test_settings_name_files_by_split_and_augment_in_training_only(tiny):
    tiny.instances["images"].append(NO_OBJECTS)
    settings = settings_of(tiny.write(), keep_empty_images=False)
    training, evaluation = (from_settings(tiny, settings, training=value) for value in (True, False))
    assert (len(training.groups), len(evaluation.groups)) == (3, 4)
    assert (training.flip_probability, evaluation.flip_probability) == (1.0, 0.0)
    assert [rule.short_edge for rule in training.resize_rules] == [30, 60]
    assert [rule.short_edge for rule in evaluation.resize_rules] == [60]
    assert CocoDetectionDataset.texts_of(settings, "some") == ["square", "box"]


def test_settings_that_do_not_fit_are_one_sentence(tiny):
    with pytest.raises(ValueError, match=r"not those of 'gt'; set data.boxes.train=online"):
        from_settings(tiny, settings_of(tiny), boxes="gt")
    with pytest.raises(ValueError, match=r"data.files.instances is not set"):
        from_settings(tiny, settings_of(tiny, files={"images": "images"}))
    with pytest.raises(FileNotFoundError, match=r"instances_other.json: cannot read the instances"):
        from_settings(tiny, settings_of(tiny), split="other")
    dataset = dataset_of(tiny)
    dataset.check_classes(2)
    for classes in (1, 3):
        with pytest.raises(ValueError, match=f"has 2 categories, but the detector has {classes} classes"):
            dataset.check_classes(classes)


def test_objects_without_extent_are_left_out_and_logged(tiny, caplog):
    tiny.instances["annotations"][0]["bbox"] = [10, 20, 0, 5]
    with caplog.at_level(logging.WARNING):
        example = example_of(dataset_of(tiny.write(), with_objects=True), 0)
    assert "left out 1 annotations with empty boxes: [100]" in caplog.text
    assert len(example.images[0].objects.boxes) == 1


def test_a_missing_image_is_named(tiny):
    (tiny.images_root / "three.png").unlink()
    with pytest.raises(FileNotFoundError, match=r"three.png: the file of image 3 is missing"):
        example_of(dataset_of(tiny), 1)
