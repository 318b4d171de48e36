from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from e2e_vl.data.user_inputs import list_images, read_given_boxes


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def test_a_folder(tmp_path: Path):
    touch(tmp_path, "b.JPG", "sub/a.png", "x.1.jpeg", "notes.txt")
    assert [(image.id, image.path.name) for image in list_images(tmp_path)] == [
        ("b", "b.JPG"),
        ("sub/a", "a.png"),
        ("x.1", "x.1.jpeg"),
    ]
    touch(tmp_path, "sub/a.jpg")
    with pytest.raises(ValueError, match=r"a\.jpg and .*a\.png have the same id sub/a"):
        list_images(tmp_path)


def test_a_list(tmp_path: Path):
    (tmp_path / "list.txt").write_text(f"one/b.jpg\n\n{tmp_path}/c.png\n../d.png\n")
    found = list_images(tmp_path / "list.txt")
    assert [image.id for image in found] == ["one/b", "c", "d"]
    assert [image.path for image in found] == [tmp_path / "one/b.jpg", tmp_path / "c.png", tmp_path / "../d.png"]
    assert list_images(tmp_path / "list.txt", "/photos")[0].path == Path("/photos/one/b.jpg")


def test_a_coco_file(tmp_path: Path):
    path = tmp_path / "images.json"
    path.write_text(json.dumps({"images": [{"id": 7, "file_name": "a/x.jpg"}, {"id": 3, "file_name": "y.jpg"}]}))
    assert [(image.id, image.path) for image in list_images(path, tmp_path / "r")] == [
        ("7", tmp_path / "r/a/x.jpg"),
        ("3", tmp_path / "r/y.jpg"),
    ]


def test_bad_lists(tmp_path: Path):
    with pytest.raises(ValueError, match="there are no images"):
        list_images(tmp_path)
    touch(tmp_path, "a\tb.jpg")
    with pytest.raises(ValueError, match=r"'a\\tb' has characters"):
        list_images(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"none\.txt"):
        list_images(tmp_path / "none.txt")
    (tmp_path / "bad.json").write_text('{"images": [{"id": 1}]}')
    with pytest.raises(ValueError, match=r"bad\.json: image number 0 has no 'file_name'"):
        list_images(tmp_path / "bad.json")


def test_boxes_of_detections(tmp_path: Path):
    rows = [
        {"image_id": 2, "bbox": [1, 2, 3, 4], "category_id": 1, "score": 0.5},
        {"image_id": 1, "box": [0, 0, 2, 2], "det_id": 70},
        {"image_id": 2, "bbox": [5, 5, 1, 1]},
    ]
    (tmp_path / "d.json").write_text(json.dumps(rows))
    found = read_given_boxes(tmp_path / "d.json")
    assert set(found) == {"1", "2"}
    assert np.array_equal(found["2"].boxes, [[1, 2, 4, 6], [5, 5, 6, 6]])
    assert found["2"].ids.tolist() == [0, 2] and found["1"].ids.tolist() == [70]
    (tmp_path / "d.json").write_text(json.dumps([{"image_id": 1, "bbox": [1, 1, 0, 2]}]))
    with pytest.raises(ValueError, match=r"d\.json: detection 0: the box .* is empty"):
        read_given_boxes(tmp_path / "d.json")


def test_boxes_of_instances(tmp_path: Path):
    content = {
        "images": [{"id": i, "file_name": "x", "width": 9, "height": 9} for i in (1, 2)],
        "annotations": [
            {"id": 11, "image_id": 1, "category_id": 5, "bbox": [1, 1, 2, 3]},
            {"id": 10, "image_id": 1, "category_id": 5, "bbox": [0, 0, 4, 4], "iscrowd": 1},
        ],
        "categories": [{"id": 5, "name": "thing"}],
    }
    (tmp_path / "i.json").write_text(json.dumps(content))
    found = read_given_boxes(tmp_path / "i.json")
    assert found["1"].ids.tolist() == [11, 10] and found["2"].boxes.shape == (0, 4)
    assert np.array_equal(found["1"].boxes, [[1, 1, 3, 4], [0, 0, 4, 4]])


def test_a_list_of_other_editors(tmp_path: Path):
    (tmp_path / "list.txt").write_bytes("\ufeffb.jpg\r\nc.jpg\n".encode())
    assert [image.id for image in list_images(tmp_path / "list.txt")] == ["b", "c"]
