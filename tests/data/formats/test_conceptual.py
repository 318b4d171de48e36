from __future__ import annotations

import base64
import json
import zipfile

import numpy as np
import pytest

from e2e_vl.data.captions import VLBertCaptions
from e2e_vl.samples import ImageBytes

BOXES = np.array([[0, 0, 10, 10], [5, 5, 20, 15], [1, 2, 3, 4]], dtype=np.float32)
CLASSES = np.array([[0.1, 0.6, 0.3], [0.8, 0.1, 0.1], [0.0, 0.3, 0.7]], dtype=np.float32)
FEATURES = np.arange(12, dtype=np.float32).reshape(3, 4)


def encoded(values: np.ndarray) -> str:
    return base64.encodebytes(values.tobytes()).decode()  # with line breaks, as the official files have them


def frcnn(**changes) -> dict:
    content = {"image_w": 20, "image_h": 15, "num_boxes": 3, "boxes": encoded(BOXES), "classes": encoded(CLASSES)}
    return {**content, "features": encoded(FEATURES), **changes}


class Official:
    """The layout on disk: zipped, or unpacked with the boxes' parts in one folder."""

    def __init__(self, root) -> None:
        self.root = root
        self.lines = [
            {"image": f"train_image.zip@/{i:08d}.jpg", "caption": ["word", f"w{i}", "."], "frcnn": self.frcnn_name(i)}
            for i in range(4)
        ]
        self.files = {f"{i:08d}.json": json.dumps(frcnn(image_w=20 + i)) for i in range(4)}

    @staticmethod
    def frcnn_name(number: int) -> str:
        return f"train_frcnn.{number % 2}.zip@/{number:08d}.json"

    def write(self, *, zipped: bool, compression: int = zipfile.ZIP_STORED) -> VLBertCaptions:
        self.root.mkdir(exist_ok=True)
        (self.root / "train_frcnn.json").write_text("".join(json.dumps(line) + "\n" for line in self.lines))
        images = {f"{i:08d}.jpg": f"jpeg {i}" for i in range(4)}
        if zipped:
            self._pack("train_image.zip", images, compression)
            for part in range(2):
                names = [name for i, name in enumerate(sorted(self.files)) if i % 2 == part]
                self._pack(f"train_frcnn.{part}.zip", {name: self.files[name] for name in names}, compression)
        else:
            for folder, files in (("train_image", images), ("train_frcnn", self.files)):
                (self.root / folder).mkdir()
                for name, content in files.items():
                    (self.root / folder / name).write_text(content)
        return self.read()

    def _pack(self, name, files, compression) -> None:
        with zipfile.ZipFile(self.root / name, "w", compression) as archive:
            for member, content in files.items():
                archive.writestr(member, content)

    def read(self, **options) -> VLBertCaptions:
        return VLBertCaptions(self.root / "train_frcnn.json", self.root.parent / "cache", **options)


@pytest.fixture
def official(tmp_path):
    return Official(tmp_path / "cc")


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_images_and_boxes_in_archives(official, compression):
    source = official.write(zipped=True, compression=compression)
    assert [source.caption(i) for i in range(4)] == [f"word w{i} ." for i in range(4)]
    image = source.image(2)
    assert isinstance(image, ImageBytes)
    assert image.content == b"jpeg 2"
    assert image.name.endswith("train_image.zip: 00000002.jpg")
    assert source.boxes(0) is None, "not asked for"
    found = official.read(with_boxes=True).boxes(3)
    assert found.image_size == (15, 23)
    assert found.features is None


def test_unpacked_files_are_found_in_the_folders_of_the_archives_names(official):
    source = official.write(zipped=False)
    assert source.image(1) == official.root / "train_image" / "00000001.jpg"
    assert official.read(with_boxes=True).boxes(1).image_size == (15, 21)


def test_boxes_are_sorted_by_their_best_class(official):
    official.write(zipped=True)
    found = official.read(with_features=True).boxes(0)
    order = [1, 2, 0]  # 0.8, 0.7, 0.6
    np.testing.assert_array_equal(found.boxes, BOXES[order])
    np.testing.assert_array_equal(found.class_probs, CLASSES[order])
    assert found.class_probs.dtype == np.float32
    np.testing.assert_array_equal(found.features, FEATURES[order])
    np.testing.assert_allclose(found.image_feature, FEATURES.mean(axis=0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"boxes": "?"}, r"the boxes are damaged"),
        ({"boxes": encoded(BOXES[:2])}, r"the boxes are damaged \(8 numbers for 3 boxes\)"),
        ({"boxes": encoded(FEATURES[:, :3])}, r"boxes have 3 numbers each, expected 4"),
        ({"classes": 3}, r"classes is 3, expected a text"),
        ({"num_boxes": 0}, r"damaged \(12 numbers for 0 boxes\)"),
        ({"features": ""}, r"the features are damaged"),
    ],
)
def test_damaged_boxes_name_the_file(official, changes, message):
    official.files["00000000.json"] = json.dumps(frcnn(**changes))
    official.write(zipped=True)
    with pytest.raises(ValueError, match=message) as caught:
        official.read(with_features=True).boxes(0)
    assert "train_frcnn.0.zip@/00000000.json" in str(caught.value)


def test_boxes_without_a_key_or_that_are_no_json(official):
    official.files["00000000.json"] = "{"
    official.files["00000002.json"] = json.dumps({"image_w": 3})
    official.write(zipped=True)
    source = official.read(with_boxes=True)
    with pytest.raises(ValueError, match=r"not valid JSON"):
        source.boxes(0)
    with pytest.raises(ValueError, match=r"00000002.json has no 'image_h', 'num_boxes', 'boxes', 'classes'"):
        source.boxes(2)


def test_bad_lines(official):
    official.lines[1]["caption"] = ["a", 3]
    official.lines[2]["caption"] = " "
    del official.lines[3]["frcnn"]
    source = official.write(zipped=True)
    with pytest.raises(ValueError, match=r"line 2 .*: caption\[1\] is 3, expected a text"):
        source.caption(1)
    with pytest.raises(ValueError, match=r"the caption of line 3 "):
        source.caption(2)
    with pytest.raises(ValueError, match=r"train_frcnn.json: line 4 .* has no 'frcnn'"):
        official.read(with_boxes=True).boxes(3)
    (official.root / "train_frcnn.json").write_text('[{"image": "x"}]')
    with pytest.raises(ValueError, match=r"line 1 .* is a list, expected an object"):
        official.read()
    (official.root / "train_frcnn.json").write_text('{"image": "x",')
    with pytest.raises(ValueError, match=r"line 1 .* is not valid JSON"):
        official.read()
