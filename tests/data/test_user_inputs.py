"""Lists of images, and boxes in any form that users have them: in memory, in files, on a command line."""

from __future__ import annotations

import json
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from torchvision import tv_tensors

from detector.errors import UserError
from e2e_vl.data.user_inputs import (
    ListedImage,
    boxes_of_image,
    convert_boxes,
    list_images,
    read_boxes,
    read_given_boxes,
    require_inside,
    warn_of_given_boxes_outside,
)
from tests.data.helpers import refused
from tests.data.tiny_refcoco import annotation


def test_images_of_a_folder(tmp_path):
    (tmp_path / "sub").mkdir()
    for name in ("b.JPG", "sub/a.png", "x.1.jpeg", "notes.txt", "._b.jpg", "sub/._a.png"):
        (tmp_path / name).touch()
    listed = [(image.id, image.path.name) for image in list_images(tmp_path)]
    assert listed == [("b", "b.JPG"), ("sub/a", "a.png"), ("x.1", "x.1.jpeg")]
    (tmp_path / "sub" / "a.jpg").touch()
    with refused("a.png", "sub/a"):
        list_images(tmp_path)


def test_images_of_lists(tmp_path):
    (tmp_path / "list.txt").write_bytes(f"\ufeffone/b.jpg\r\n\n{tmp_path}/c.png\n../d.png\n".encode())
    images = list_images(tmp_path / "list.txt")
    assert [image.id for image in images] == ["one/b", "c", "d"]
    assert [image.path for image in images] == [tmp_path / "one/b.jpg", tmp_path / "c.png", tmp_path / "../d.png"]
    assert list_images(tmp_path / "list.txt", "/photos")[0].path == Path("/photos/one/b.jpg")
    path = tmp_path / "images.json"
    sized = {"id": 7, "file_name": "a/x.jpg", "width": 40.0, "height": 30}
    path.write_text(json.dumps({"images": [sized, {"id": 3, "file_name": "y.jpg", "width": 0, "height": 0}]}))
    images = list_images(path.rename(tmp_path / "images.JSON"), tmp_path / "r")
    assert images == [ListedImage("7", tmp_path / "r/a/x.jpg", (30, 40)), ListedImage("3", tmp_path / "r/y.jpg")]


def test_lists_that_cannot_be_used(tmp_path):
    with refused("no images"):
        list_images(tmp_path)
    (tmp_path / "a\tb.jpg").touch()
    with refused("a\\tb"):
        list_images(tmp_path)
    (tmp_path / "list.txt").write_text("https://example.org/a.jpg")
    with refused("list.txt", "is a URL"):
        list_images(tmp_path / "list.txt")
    (tmp_path / "bad.json").write_text('{"images": [{"id": 1}]}')
    with refused("bad.json", "images[0]", "file_name"):
        list_images(tmp_path / "bad.json")


def test_given_boxes_of_detections(tmp_path):
    rows = [
        {"image_id": 2, "bbox": [1, 2, 3, 4], "category_id": 1, "score": 0.5},
        {"image_id": 1, "box": [0, 0, 2, 2], "det_id": 70},
        {"image_id": 2, "bbox": [5, 5, 1, 1]},
    ]
    (tmp_path / "d.json").write_text(json.dumps(rows))
    given_boxes = read_given_boxes(tmp_path / "d.json")
    assert set(given_boxes) == {"1", "2"}
    assert np.array_equal(given_boxes["2"].boxes, [[1, 2, 4, 6], [5, 5, 6, 6]])
    assert given_boxes["2"].ids.tolist() == [0, 2] and given_boxes["1"].ids.tolist() == [70]
    for row, part in (({}, "detection 0"), ({"bbox": [0.1, 0.2, 0.5, 0.6]}, "normalised")):
        (tmp_path / "d.json").write_text(json.dumps([{"image_id": 1, **row}]))
        with refused("d.json", part):
            read_given_boxes(tmp_path / "d.json")


def test_detections_that_are_corners_are_warned_of(tmp_path, caplog):
    (tmp_path / "d.json").write_text(json.dumps([{"image_id": 1, "bbox": [90, 70, 96, 78]}]))
    given_boxes = read_given_boxes(tmp_path / "d.json")
    warn_of_given_boxes_outside(given_boxes, [ListedImage("1", Path("a.jpg"), (180, 190))], "d.json")
    assert not caplog.records
    warn_of_given_boxes_outside(given_boxes, [ListedImage("1", Path("a.jpg"), (80, 100))], "d.json")
    assert "d.json: 1 of 1 boxes reach outside" in caplog.text and "look like corners" in caplog.text


def test_boxes_with_words_as_ids_are_numbered(tiny, tmp_path, caplog):
    rows = [
        {"image_id": "a", "bbox": [1, 2, 3, 4], "det_id": "x"},
        {"image_id": "a", "bbox": [5, 5, 4, 4], "det_id": 7},
    ]
    (tmp_path / "d.json").write_text(json.dumps(rows))
    assert read_given_boxes(tmp_path / "d.json")["a"].ids.tolist() == [0, 1]
    for row in tiny.instances["annotations"]:
        row["id"] += 2**70
    assert read_given_boxes(tiny.write().instances_file)["9"].ids.tolist() == [4, 5]
    assert [record.getMessage().partition(": ")[2][:18] for record in caplog.records] == ["boxes are numbered"] * 2


def test_given_boxes_of_instances(tiny):
    tiny.instances["images"].append({"id": 11, "file_name": "x.png", "width": 9, "height": 9})
    given_boxes = read_given_boxes(tiny.write().instances_file)
    assert given_boxes["7"].ids.tolist() == [100, 101, 102] and given_boxes["11"].boxes.shape == (0, 4)
    assert given_boxes["3"].boxes.tolist() == [[5.5, 10, 25.75, 70]]


def test_boxes_in_words():
    boxes = read_boxes(["1,2,3,4", "0.5,0,9,8.25"])
    np.testing.assert_array_equal(boxes.boxes, [[1, 2, 3, 4], [0.5, 0, 9, 8.25]])
    assert boxes.names is None and boxes.outlines is None
    assert read_boxes(["person:1,2,3,4", "hot:dog:1,2,3,4"]).names == ("person", "hot:dog")


def test_boxes_of_a_file(tmp_path):
    outline = [[[1, 2], [3, 2], [3, 4]]]
    content = {"boxes": [[1, 2, 3, 4, 0.75]], "names": ["cat"], "segms": [outline], "width": 9, "height": 9}
    (tmp_path / "one.json").write_text(json.dumps(content))
    boxes = read_boxes([str(tmp_path / "one.json")])
    np.testing.assert_array_equal(boxes.boxes, [[1, 2, 3, 4]])
    assert boxes.names == ("cat",) and boxes.origin.endswith("one.json")
    np.testing.assert_array_equal(boxes.outlines[0], outline)
    for saved in ([1, 2, 3, 4], {"regions": [{"box": [1, 2, 3, 4], "name": "cat"}]}, {"regions": [[1, 2, 3, 4]]}):
        (tmp_path / "one.json").write_text(json.dumps(saved))
        np.testing.assert_array_equal(read_boxes([str(tmp_path / "one.json")]).boxes, [[1, 2, 3, 4]])
    np.savez(tmp_path / "some.npz", boxes=np.array([[1, 2, 3, 4]]))
    np.testing.assert_array_equal(read_boxes([str(tmp_path / "some.npz")]).boxes, [[1, 2, 3, 4]])
    np.savez(tmp_path / "bad.npz", rows=np.eye(4))
    with refused("bad.npz"):
        read_boxes([str(tmp_path / "bad.npz")])


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["none.json"], "none.json"),
        (["1,2,3,4", "1,2,x,4"], "'x'"),
        (["5,2,3,4"], "not a box"),
        (["1,2,3"], "not a box"),
        (["0.1,0.2,0.5,0.6", "0.3,0.4,1.01,0.9"], "normalised"),
        (["0,0,1,1"], "normalised"),
        ("[[0.1, 0.2, 0.5, 0.6]]", "pixels"),
        ("[[1, 2, 3]]", "[0]"),
        ("[[1, 2, 3, 4], [5, 6, 5, 9]]", "[5.0, 6.0, 5.0, 9.0]"),
        ("[]", "no box"),
        ("{}", "no `boxes`"),
        ("[1, [1, 2, 3, 4]]", "not a box"),
        ("[", "JSON"),
        ('{"boxes": [[1, 2, 3, 4]], "names": ["a", "b"]}', "names"),
        ('{"boxes": [[1, 2, 3, 4]], "segms": [[[1, 2]]]}', "segms[0]"),
    ],
)
def test_bad_boxes_are_named(tmp_path, words, part):
    """On the command line, or (a text) in a file."""
    path, in_file = tmp_path / "bad.json", isinstance(words, str)
    path.write_text(words if in_file else "")
    with refused(part, "bad.json" if in_file else ""):
        read_boxes([str(path)] if in_file else words)


def test_boxes_must_lie_in_their_image():
    require_inside(np.array([[-1.0, 0, 101, 61]]), (60, 100), "--boxes", "a.jpg")
    for box in ([0, 0, 102, 5], [0, 0, 5, 62], [-2, 0, 5, 5]):
        with refused("--boxes", "box 0", "a.jpg", "100 x 60"):
            require_inside(np.array([box], dtype=float), (60, 100), "--boxes", "a.jpg")


def test_boxes_with_scores_and_names():
    boxes = [[1, 2, 30, 40], [5, 6, 7, 8]]
    stated = convert_boxes(boxes, [0.9, 0.25], ["lion", "left lion"])
    assert stated.scores.tolist() == [np.float32(0.9), 0.25] and stated.names == ("lion", "left lion")
    # as a detector of transformers returns them
    result = {"boxes": torch.tensor(boxes), "scores": torch.tensor([0.9, 0.25]), "text_labels": ["lion", "lion"]}
    detected = convert_boxes(result)
    assert detected.scores.tolist() == stated.scores.tolist() and detected.names == ("lion", "lion")
    assert convert_boxes(result, [0.5, 0.5]).scores.tolist() == [0.5, 0.5]
    for scores in ([0.5], [[0.5, 0.5]], [0.5, 1.5], [0.5, np.nan]):
        with pytest.raises(UserError, match="boxes: "):
            convert_boxes(boxes, scores)
    with pytest.raises(UserError, match="give the boxes, too"):
        convert_boxes(None, [0.5])


def test_boxes_of_many_images_are_found_by_the_image(tmp_path):
    rows = [
        {"image_id": 7, "bbox": [10, 20, 30, 40], "score": 0.5, "category_name": "cup"},
        {"image_id": 7, "bbox": [1, 2, 30, 40], "score": 0.25, "phrase": "the blue mug"},
        {"image_id": "kitchen/mug", "box": [1, 2, 3, 4], "score": 1},
    ]
    path = tmp_path / "boxes.json"
    path.write_text(json.dumps(rows))
    boxes = convert_boxes(path)
    for name in ("7.jpg", "COCO_train2014_000000000007.jpg"):
        objects = boxes_of_image(boxes, Path("photos") / name)
        assert objects.boxes.tolist() == [[10, 20, 40, 60], [1, 2, 31, 42]]
        assert objects.names == ("cup", "the blue mug") and objects.scores.tolist() == [0.5, 0.25]
    named = boxes_of_image(boxes, Path("photos/kitchen/mug.png"))
    assert named.boxes.tolist() == [[1, 2, 4, 6]] and named.names is None
    with refused("boxes.json", "photos/mug.png"):
        boxes_of_image(boxes, Path("photos/mug.png"))
    with refused("boxes.json", "leave out scores and names"):
        convert_boxes(path, [0.5])


def test_annotated_boxes_are_found_by_the_name_of_the_image_file(tiny):
    images = tiny.instances["images"]
    images[0]["file_name"] = "train/seven.png"
    images[2]["file_name"] = "val/7.png"  # another image has this id
    images.append({"id": 11, "file_name": "train/twice.png", "width": 40, "height": 80})  # without an object
    images.append({"id": 12, "file_name": "val/twice.png", "width": 40, "height": 80})
    tiny.instances["annotations"] += [annotation(400, 12, 2, [1, 2, 3, 4])]
    tiny.instances_file.write_text(json.dumps(tiny.instances))
    boxes = convert_boxes(tiny.instances_file)
    for path in ("photos/seven.png", "train/seven.png"):
        objects = boxes_of_image(boxes, Path(path))
        assert objects.boxes.tolist() == [[10, 20, 30, 40], [60, 10, 90, 40], [0, 0, 100, 60]]
        assert objects.names == ("square", "square", "box") and objects.image_size == (60, 100)
    assert boxes_of_image(boxes, Path("photos/7.png")).image_size == (50, 50)
    assert boxes_of_image(boxes, Path("photos/val/twice.png")).boxes.tolist() == [[1, 2, 4, 6]]
    for path in ("twice.png", "train/twice.png", "three.jpg", "photo_3.png"):
        with refused("instances.json", path):
            boxes_of_image(boxes, Path(path))
    tiny.instances["annotations"][0]["category_id"] = 5
    tiny.instances_file.write_text(json.dumps(tiny.instances))
    with refused("instances.json", "annotation 100", "category_id"):
        convert_boxes(tiny.instances_file)


def test_forms_of_boxes():
    numbers, kinds = [[1, 2, 30, 40]], tv_tensors.BoundingBoxFormat
    on_canvas = {"canvas_size": (50, 50)}
    for boxes in (
        *([1, 2, 30, 40], ((1, 2, 30, 40),), "1,2,30,40", np.array(["1,2,30,40"]), iter(numbers), np.array([numbers])),
        *(torch.tensor(numbers), torch.tensor(numbers).bfloat16(), [torch.tensor(numbers[0])]),
        *({"boxes": numbers}, types.SimpleNamespace(boxes=numbers)),
        *({"box": numbers[0]}, types.SimpleNamespace(box=numbers[0]), [{"box": np.array(numbers[0])}]),
        tv_tensors.BoundingBoxes(numbers, format=kinds.XYXY, **on_canvas),
    ):
        assert convert_boxes(boxes).boxes.tolist() == numbers
    for boxes in (
        *([], [[1, 2, 3, 4, 0.5, 6]], [[1, 2, 1, 4]], [[1, 2, np.nan, 4]], [[1, 2], [3]], [None], 5, b"1,2,3,4"),
        *([{"bbox": [1, 2, 3, 4]}], np.zeros((2, 3, 4)), [types.SimpleNamespace(boxes=numbers)]),
        tv_tensors.BoundingBoxes(numbers, format=kinds.XYWH, **on_canvas),
    ):
        with pytest.raises(UserError, match="boxes"):
            convert_boxes(boxes)
