"""Captions of COCO, of img2dataset's shards and in the layout of the official VL-BERT code."""

from __future__ import annotations

import base64
import io
import json
import pickle
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from e2e_vl.data.captions import CocoCaptions, ShardCaptions, VLBertCaptions
from e2e_vl.samples import ImageBytes
from tests.data.helpers import refused

COCO = {
    "images": [
        {"id": 5, "file_name": "a.jpg", "height": 3, "width": 4},
        {"id": 1, "file_name": "b.jpg"},
        {"id": 2, "file_name": "c.jpg"},
    ],
    "annotations": [
        {"image_id": 1, "id": 7, "caption": "one"},
        {"image_id": 5, "id": 8, "caption": "two"},
        {"image_id": 1, "id": 9, "caption": "three"},
    ],
}


def test_coco_captions_are_numbered_image_by_image(tmp_path):
    (tmp_path / "captions.json").write_text(json.dumps(COCO))
    source = CocoCaptions([(tmp_path / "captions.json", tmp_path / "images")])
    assert list(source.groups) == [[0], [1, 2]], "an image without a caption is left out"
    assert [source.caption(text) for text in range(3)] == ["two", "one", "three"]
    assert [source.name(group) for group in range(2)] == ["5", "1"]
    assert source.image(1) == tmp_path / "images" / "b.jpg"
    assert [source.image_size(group) for group in range(2)] == [(3, 4), None]
    assert source.boxes(0) is None


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"images": [{"id": 1}]}, "images[0]"),
        ({"annotations": [{"image_id": 1, "caption": " "}]}, "annotations[0].caption"),
    ],
)
def test_coco_files_with_errors(tmp_path, changes, key):
    (tmp_path / "captions.json").write_text(json.dumps({**COCO, **changes}))
    with refused("captions.json", key):
        CocoCaptions([(tmp_path / "captions.json", tmp_path)])


# Shards


def jpeg(value: int, size=(20, 10)) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.full((size[1], size[0], 3), value, dtype=np.uint8)).save(stream, "JPEG")
    return stream.getvalue()


def write(path: Path, members: list[tuple[str, bytes]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def record(key: str, caption: str | None, image: bytes | None = b"x", suffix: str = "jpg") -> list[tuple[str, bytes]]:
    members = [(f"{key}.json", b"{}")]
    if image is not None:
        members.append((f"{key}.{suffix}", image))
    if caption is not None:
        members.append((f"{key}.txt", caption.encode()))
    return members


@pytest.fixture
def folder(tmp_path):
    write(
        tmp_path / "cc" / "00000.tar",
        [
            *record("000000000", "A red box.", jpeg(10)),
            *record("000000002", "eine Hütte\n", jpeg(20, (30, 30))),
            *record("000000003", None, jpeg(30)),
            *record("000000004", " \n", jpeg(40)),
            *record("000000005", "lost", None),
            *record("000000006", "empty", b""),
        ],
    )
    write(tmp_path / "cc" / "00001.tar", record("000010000", "last", jpeg(50), "PNG"))
    return tmp_path / "cc"


def make(folder, tmp_path) -> ShardCaptions:
    return ShardCaptions(folder, tmp_path / "cache")


def test_records_of_all_shards_in_order(folder, tmp_path, caplog):
    source = make(folder, tmp_path)
    assert "left out 4 records without image or caption" in caplog.text
    for one in (source, pickle.loads(pickle.dumps(source))):
        assert [one.caption(i) for i in range(3)] == ["A red box.", "eine Hütte", "last"]
        assert [one.name(i) for i in range(3)] == ["000000000", "000000002", "000010000"]
    assert list(source.groups) == [[0], [1], [2]]
    image = source.image(1)
    assert image.content == jpeg(20, (30, 30))
    assert image.name == f"{folder / '00000.tar'}: 000000002.jpg"
    assert source.image_size(0) is source.boxes(0) is None
    write(folder / "00001.tar", [*record("a", "new"), *record("b", "newer")])
    assert [make(folder, tmp_path).caption(i) for i in range(4)] == ["A red box.", "eine Hütte", "new", "newer"]


def test_a_pattern_names_some_shards_and_names_may_be_long(tmp_path):
    """The header of a member holds only the beginning of its name, and only ASCII letters."""
    for number in range(12):
        write(tmp_path / "cc" / f"{number:05d}.tar", record(f"part.d/{'é' * 120}{number}", f"caption {number}"))
    source = make(tmp_path / "cc" / "0000*.tar", tmp_path)
    assert len(source.groups) == 10
    assert source.name(9) == f"part.d/{'é' * 120}9"


def test_webdataset_reads_the_same_records(folder, tmp_path):
    webdataset = pytest.importorskip("webdataset", reason="webdataset is not installed; it reads what we write")
    source = make(folder, tmp_path)
    urls = sorted(str(path) for path in folder.glob("*.tar"))
    samples = [
        sample
        for sample in webdataset.WebDataset(urls, shardshuffle=False)
        if sample.get("txt", b"").strip() and (sample.get("jpg") or sample.get("png"))
    ]
    assert [sample["__key__"] for sample in samples] == [source.name(i) for i in range(3)]
    assert [sample["txt"].decode().strip() for sample in samples] == [source.caption(i) for i in range(3)]


def test_shards_that_cannot_be_used(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        make(tmp_path / "nowhere", tmp_path)
    path = tmp_path / "cc" / "00000.tar"
    whole = write(path, [*record("a", "caption", b"i" * 600), *record("b", "other")]).read_bytes()
    header = whole.index(b"b.json")
    damaged = whole[:header] + b"?" * 512 + whole[header + 512 :]
    for content in (b"", b"not a tar file" * 100, *(whole[:kept] for kept in (700, 1024, 1300, 3072)), damaged):
        path.write_bytes(content)
        with refused("00000.tar"):
            make(path.parent, tmp_path)


# VL-BERT's layout of Conceptual Captions

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

    def __init__(self, root: Path) -> None:
        self.root = root
        self.lines = [
            {
                "image": f"train_image.zip@/{i:08d}.jpg",
                "caption": ["word", f"w{i}", "."],
                "frcnn": f"train_frcnn.{i % 2}.zip@/{i:08d}.json",
            }
            for i in range(4)
        ]
        self.files = {f"{i:08d}.json": json.dumps(frcnn(image_w=20 + i)) for i in range(4)}

    def write(self, *, zipped: bool = True) -> VLBertCaptions:
        self.root.mkdir(exist_ok=True)
        (self.root / "train_frcnn.json").write_text("".join(json.dumps(line) + "\n" for line in self.lines))
        images = {f"{i:08d}.jpg": f"jpeg {i}" for i in range(4)}
        if zipped:
            self._pack("train_image.zip", images)
            for part in range(2):
                names = [name for i, name in enumerate(sorted(self.files)) if i % 2 == part]
                self._pack(f"train_frcnn.{part}.zip", {name: self.files[name] for name in names})
        else:
            for folder, files in (("train_image", images), ("train_frcnn", self.files)):
                (self.root / folder).mkdir()
                for name, content in files.items():
                    (self.root / folder / name).write_text(content)
        return self.read()

    def _pack(self, name: str, files: dict[str, str]) -> None:
        with zipfile.ZipFile(self.root / name, "w") as archive:
            for member, content in files.items():
                archive.writestr(member, content)

    def read(self, **options) -> VLBertCaptions:
        return VLBertCaptions(self.root / "train_frcnn.json", self.root.parent / "cache", **options)


@pytest.fixture
def official(tmp_path):
    return Official(tmp_path / "cc")


def test_images_and_boxes_in_archives(official):
    source = official.write()
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
    official.write()
    found = official.read(with_features=True).boxes(0)
    order = [1, 2, 0]  # 0.8, 0.7, 0.6
    np.testing.assert_array_equal(found.boxes, BOXES[order])
    np.testing.assert_array_equal(found.class_probs, CLASSES[order])
    assert found.class_probs.dtype == np.float32
    np.testing.assert_array_equal(found.features, FEATURES[order])
    np.testing.assert_allclose(found.image_feature, FEATURES.mean(axis=0))


@pytest.mark.parametrize(
    "changes",
    [{"boxes": encoded(BOXES[:2])}, {"classes": 3}, {"features": ""}, {"features": encoded(FEATURES * np.nan)}],
)
def test_damaged_boxes_name_the_file(official, changes):
    official.files["00000000.json"] = json.dumps(frcnn(**changes))
    official.write()
    with refused("train_frcnn.0.zip@/00000000.json", next(iter(changes))):
        official.read(with_features=True).boxes(0)


def test_lines_with_errors(official):
    official.lines[1]["caption"] = ["a", 3]
    del official.lines[3]["frcnn"]
    source = official.write()
    with refused("train_frcnn.json: line 2", "caption[1]"):
        source.caption(1)
    with refused("train_frcnn.json: line 4", "frcnn"):
        official.read(with_boxes=True).boxes(3)
    (official.root / "train_frcnn.json").write_text('{"image": "x",')
    with refused("train_frcnn.json: line 1"):
        official.read()
