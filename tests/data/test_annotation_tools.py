"""Parts of the readers of annotation tools; what they give is tested in tests/cli/test_convert_annotations.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from detector.images import load_image
from e2e_vl.data.annotation_tools import ImageFolder
from e2e_vl.data.annotation_tools.records import split_of_path


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("name", ["a.png", "a.tiff"])
def test_boxes_turn_as_the_image_turns(tmp_path, name, orientation):
    pixels = np.zeros((80, 100), dtype=np.uint8)
    pixels[20:60, 10:25] = 255
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(pixels).save(tmp_path / name, exif=exif)
    image = ImageFolder(tmp_path).read(name)
    upright = load_image(tmp_path / name)[:, :, 0]
    assert image.size == upright.shape[::-1] and image.is_rotated == (orientation >= 5)
    if image.is_rotated:
        x1, y1, x2, y2 = image.turn_upright(np.array([[10.0, 20, 25, 60]]))[0].astype(int)
        assert (upright[y1:y2, x1:x2] == 255).all() and upright.sum() == 255 * (x2 - x1) * (y2 - y1)


def test_images_are_found_by_the_names_of_tools(tmp_path):
    for name in (
        "mug.jpg",
        "train/p.JPG",
        "val/p.JPG",
        "a b.png",
        "mug, blue (1).jpg",
        "cafe\u0301.jpg",
        "x.y.png",
        "._mug.jpg",
        ".cache/mug.jpg",
        "Q.png",
        "q.png",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    image_folder = ImageFolder(tmp_path)
    names = {
        "mug": "mug.jpg",
        "images\\1\\90fbb0c7-mug.jpg": "mug.jpg",
        "/data/local-files/?d=set%2Fmug.jpg": "mug.jpg",
        "C:\\data\\val\\p.jpg": "val/p.JPG",
        "labels/train/p": "train/p.JPG",
        "a%20b.png": "a b.png",
        "90fbb0c7-mug_blue_1.jpg": "mug, blue (1).jpg",
        "labels/90fbb0c7-mug_blue_1": "mug, blue (1).jpg",
        "caf\xe9.jpg": "cafe\u0301.jpg",
        "https://host/mug.jpg?width=640": "mug.jpg",
        "x.y": "x.y.png",
        "q.png": "q.png",
        "MUG.JPG": "mug.jpg",
    }
    for name, file in names.items():
        assert image_folder.candidates(name) == [file]
    assert image_folder.candidates("p.jpg") == ["train/p.JPG", "val/p.JPG"]
    assert image_folder.candidates("z") == []


@pytest.mark.parametrize(
    ("path", "split"),
    [
        ("labels/train/a.txt", "train"),
        ("valid/_annotations.coco.json", "val"),
        ("annotations/instances_val2017.json", "val"),
        ("obj_Train_data/a.txt", ""),
        ("train/test/a.txt", ""),
        ("constrain/a.txt", ""),
    ],
)
def test_a_path_may_state_a_split(path, split):
    assert split_of_path(str(Path(path))) == split
