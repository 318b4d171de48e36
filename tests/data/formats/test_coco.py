from __future__ import annotations

import json
import logging
import math
import pickle
from functools import partial

import numpy as np
import pytest

from e2e_vl.data.coco import object_labels, read_instances
from tests.forked_memory import SMAPS, growth_in_a_fork


def test_reads_images_boxes_and_contiguous_labels(tiny):
    instances = read_instances(tiny.instances_file)
    assert list(instances.images) == [7, 3, 9]
    assert (instances.images[3].file_name, instances.images[3].width, instances.images[3].height) == (
        "three.png",
        40,
        80,
    )
    assert instances.category_ids == [2, 90]
    assert instances.class_names == ["square", "box"]
    assert len(instances.class_names) == 2
    assert instances.attribute_names == ["blue", "red", "green"]
    assert [annotation.id for annotation in instances.by_image[7]] == [100, 101, 102]
    np.testing.assert_array_equal(instances.boxes(7), [[10, 20, 30, 40], [60, 10, 90, 40], [0, 0, 100, 60]])
    np.testing.assert_array_equal(instances.boxes(3), [[5.5, 10, 25.75, 70]])
    assert [annotation.is_crowd for annotation in instances.by_image[7]] == [False, False, True]
    assert instances.annotations[200].class_index == 1


def test_object_labels_pad_attributes(tiny):
    instances = read_instances(tiny.instances_file)
    classes, attributes = object_labels(instances.by_image[7][:2], len(instances.attribute_names))
    np.testing.assert_array_equal(classes, [0, 0])
    np.testing.assert_array_equal(attributes, [[1, -1], [0, 2]])
    assert object_labels(instances.by_image[7], 0)[1] is None


def test_an_image_without_annotations_has_no_boxes(tiny):
    tiny.instances["images"].append({"id": 11, "file_name": "eleven.png", "width": 5, "height": 5})
    assert read_instances(tiny.write().instances_file).boxes(11).shape == (0, 4)


@pytest.mark.parametrize(
    ("box", "message"),
    [
        ([10, 20, 0, 5], "empty or inverted"),
        ([10, 20, 5, -1], "empty or inverted"),
        ([math.nan, 20, 5, 5], "finite"),
        ([10, 20, 5], "finite"),
        (None, "finite"),
        ([100, 20, 5, 5], "outside"),
        ([-9, 20, 5, 5], "outside"),
    ],
)
def test_a_bad_box_names_file_and_annotation(tiny, box, message):
    tiny.instances["annotations"][1]["bbox"] = box
    tiny.instances_file.write_text(json.dumps(tiny.instances))
    with pytest.raises(ValueError, match=rf"instances\.json: annotation 101.*{message}"):
        read_instances(tiny.instances_file)


def test_empty_boxes_are_dropped_only_when_asked_and_counted(tiny, caplog):
    tiny.instances["annotations"][1]["bbox"] = [10, 20, 0, 5]
    tiny.write()
    with caplog.at_level(logging.WARNING):
        instances = read_instances(tiny.instances_file, drop_empty_boxes=True)
    assert 101 not in instances.annotations
    assert len(instances.annotations) == 5
    assert "left out 1 annotations with empty boxes: [101]" in caplog.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("categories"), "has no 'categories'"),
        (lambda c: c["annotations"][0].update(image_id=8), "annotation 100 belongs to image 8"),
        (lambda c: c["annotations"][0].update(category_id=8), "annotation 100 has category 8"),
        (lambda c: c["annotations"][0].update(attribute_ids=[8]), "annotation 100 has attribute 8"),
        (lambda c: c["annotations"][0].update(id=101), "annotation 101 is listed twice"),
        (lambda c: c["annotations"][0].pop("bbox"), "annotation 100 has no 'bbox'"),
        (lambda c: c["images"][0].update(id=3), "image 3 is listed twice"),
        (lambda c: c["images"][0].update(id="3"), "image 3 is listed twice, as a number and as a text"),
        (lambda c: c["categories"][0].update(name=c["categories"][1]["name"]), "has the name .* of 90; names must be"),
        (lambda c: c["images"][0].update(width=0), "image 7: width is 0, expected a whole number from 1 on"),
        (lambda c: c["images"][0].pop("id"), "image number 0 has no 'id'"),
        (lambda c: c["categories"][0].update(id=2), "category 2 is listed twice"),
    ],
)
def test_a_bad_record_is_named(tiny, change, message):
    change(tiny.instances)
    tiny.instances_file.write_text(json.dumps(tiny.instances))
    with pytest.raises(ValueError, match=rf"instances\.json.*{message}"):
        read_instances(tiny.instances_file)


def test_missing_or_broken_file(tiny, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"gone\.json: cannot read the instances.*check the path"):
        read_instances(tmp_path / "gone.json")
    tiny.instances_file.write_text('{"images": [')
    with pytest.raises(ValueError, match=r"instances\.json: the instances are not valid JSON"):
        read_instances(tiny.instances_file)


def test_ids_may_be_numbers_and_texts(tiny):
    content = tiny.instances
    content["images"][0]["id"], content["images"][1]["id"] = "7", -3
    for annotation in content["annotations"]:
        annotation["image_id"] = {7: "7", 3: -3}.get(annotation["image_id"], annotation["image_id"])
    content["annotations"][0]["id"] = "first"
    tiny.instances_file.write_text(json.dumps(content))
    instances = read_instances(tiny.instances_file)
    assert list(instances.images) == ["7", -3, 9]
    assert 7 not in instances.images and "7" in instances.images and None not in instances.images
    assert [instances.images.id_written(name) for name in ("7", "-3", "9", "09", "--9", "8", "", "٩")] == [
        *("7", -3, 9),
        *[None] * 5,
    ]
    assert [one.id for one in instances.by_image["7"]] == ["first", 101, 102]
    assert instances.annotations["first"].image_id == "7"
    for known in (instances.images, instances.annotations, instances.by_image):
        with pytest.raises(KeyError):
            known[7]
    with pytest.raises(KeyError):
        instances.boxes(7)


def test_every_annotation_is_what_the_file_says(tiny):
    rows = tiny.instances["annotations"]
    rows[0]["area"], rows[1]["area"] = 12.5, 0
    instances = read_instances(tiny.write().instances_file)
    assert list(instances.annotations) == [row["id"] for row in rows]
    for row in rows:
        found = instances.annotations[row["id"]]
        x, y, width, height = row["bbox"]
        assert (found.id, found.image_id, found.category_id) == (row["id"], row["image_id"], row["category_id"])
        assert found.box == (x, y, x + width, y + height) and all(type(one) is float for one in found.box)
        assert found.area == row.get("area")
        assert type(found.id) is type(found.image_id) is type(found.class_index) is int
        assert found in instances.by_image[row["image_id"]]
    assert sum(len(of_image) for of_image in instances.by_image.values()) == len(rows)
    again = pickle.loads(pickle.dumps(instances))
    assert again.annotations == instances.annotations and again.images == instances.images
    assert again.boxes(7).tolist() == instances.boxes(7).tolist()


def test_images_with_only_crowds_have_no_objects(tiny):
    for row in tiny.instances["annotations"]:
        row["iscrowd"] = int(row["image_id"] == 7 or row["iscrowd"])
    tiny.instances["images"].insert(0, {"id": 11, "file_name": "eleven.png", "width": 5, "height": 5})
    instances = read_instances(tiny.write().instances_file)
    has_objects = dict(zip(instances.images, instances.annotations.has_objects().tolist(), strict=True))
    assert has_objects == {
        image_id: any(not one.is_crowd for one in rows) for image_id, rows in instances.by_image.items()
    }
    assert not has_objects[7] and not has_objects[11] and has_objects[3]


@pytest.mark.skipif(not SMAPS.is_file(), reason="only Linux tells the unshared pages")
def test_a_forked_worker_does_not_copy_the_annotations(tmp_path):
    path, number = tmp_path / "instances.json", 20_000
    content = {
        "images": [{"id": 10**6 + one, "file_name": f"{one}.jpg", "width": 64, "height": 64} for one in range(number)],
        "annotations": [
            {"id": 10**6 + one, "image_id": 10**6 + one % number, "category_id": 1, "bbox": [1.5, 2.5, 3.25, 4]}
            for one in range(2 * number)
        ],
        "categories": [{"id": 1, "name": "thing"}],
    }
    path.write_text(json.dumps(content))
    instances = read_instances(path)
    objects = {image_id: instances.by_image[image_id] for image_id in instances.images}

    def look(by_image):
        for image_id in range(10**6, 10**6 + number):
            assert len(by_image[image_id]) == 2
            assert by_image[image_id][0].box == (1.5, 2.5, 4.75, 6.5)

    copied, shared = (growth_in_a_fork(partial(look, one)) for one in (objects, instances.by_image))
    assert copied > 5_000, "lists of objects are copied, so the measurement can tell"
    assert shared < copied / 5
