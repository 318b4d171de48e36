"""Features that other projects published, in small files of their formats, through the command into a store."""

from __future__ import annotations

import base64
import json
import pickle
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from e2e_vl.cli.import_features import main
from e2e_vl.data.features import open_features

RNG = np.random.default_rng(0)


def rows(number: int, width: int) -> np.ndarray:
    return RNG.standard_normal((number, width)).astype(np.float32)


class Evil:
    def __reduce__(self):
        return (Path.touch, (Path("canary"),))


@pytest.fixture
def pythia(tmp_path) -> dict[int, np.ndarray]:
    """A folder of two images, one of them with facts beside it."""
    (tmp_path / "train2014").mkdir()
    images = {9: rows(5, 6), 25: rows(5, 6)}
    for image_id, values in images.items():
        np.save(tmp_path / "train2014" / f"COCO_train2014_{image_id:012}.npy", values)
    facts = np.array({"bbox": Evil()})
    np.save(tmp_path / "train2014" / "COCO_train2014_000000000009_info.npy", facts, allow_pickle=True)
    listed = [{"id": 9, "width": 60, "height": 40, "file_name": "a.jpg"}, {"id": 25, "width": 30, "height": 50}]
    (tmp_path / "captions.json").write_text(json.dumps({"images": listed, "annotations": []}))
    return images


def convert(tmp_path: Path, kind: str, *words: object, output: str = "out.h5", layout: str = "hdf5") -> int:
    return main([kind, *map(str, words), "--output", str(tmp_path / output), "--format", layout])


@pytest.mark.parametrize(("output", "layout"), [("out.h5", "hdf5"), ("out.lmdb", "lmdb"), ("out.tsv", "tsv")])
def test_pythia(tmp_path, pythia, output, layout, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = (tmp_path / "train2014", "--sizes", tmp_path / "captions.json")
    assert convert(tmp_path, "pythia", *words, output=output, layout=layout) == 0
    assert "2 images; every box is the whole image" in capsys.readouterr().out
    store = open_features(tmp_path / output)
    assert store.stamp["published_by"] == "pythia" and not (tmp_path / "canary").exists()
    for image_id, (height, width) in ((9, (40, 60)), (25, (50, 30))):
        record = store.read(str(image_id))
        np.testing.assert_array_equal(record.features, pythia[image_id])
        assert record.image_size == (height, width) and record.boxes.tolist() == [[0, 0, width, height]] * 5


@pytest.mark.parametrize(("as_tensors", "is_zip"), [(True, True), (False, False)])
def test_nlvr2(tmp_path, as_tensors, is_zip):
    boxes = np.array([[0, 0, 20, 30], [5, 6, 59.5, 39.25]], dtype=np.float32)
    scores = np.array([0.9, 0.4], dtype=np.float32)
    entries = {name: (rows(2, 4), boxes, scores) for name in ("dev-0-0-img0", "dev-0-0-img1", "dev-1-2-img0")}
    for file, names in (("0.th", list(entries)[:2]), ("1.th", list(entries)[2:])):
        saved = {name: tuple(map(torch.from_numpy, entries[name])) if as_tensors else entries[name] for name in names}
        content = {f"{name}.png.npz": entry for name, entry in saved.items()}
        torch.save(content, tmp_path / file, _use_new_zipfile_serialization=is_zip)
    assert convert(tmp_path, "detectron", tmp_path / "0.th", tmp_path / "1.th") == 0
    store = open_features(tmp_path / "out.h5")
    assert list(store.ids) == list(entries)
    for name, entry in entries.items():
        record = store.read(name)
        for found, expected in zip((record.features, record.boxes, record.predictions.scores), entry, strict=True):
            np.testing.assert_array_equal(found, expected)
        assert record.image_size == (40, 60)


def test_detectron_on_coco(tmp_path):
    """COCO's images have ids and sizes of their own."""
    entry = (rows(2, 4), np.array([[0, 0, 20, 30], [5, 6, 59, 39]], np.float32), np.ones(2, np.float32))
    torch.save(
        {f"COCO_val2014_{number:012}.jpg{end}": entry for number, end in ((9, ".npz"), (50, ""))}, tmp_path / "x.th"
    )
    listed = [{"id": 9, "width": 70, "height": 50, "file_name": "a.jpg"}]
    (tmp_path / "captions.json").write_text(json.dumps({"images": listed}))
    assert convert(tmp_path, "detectron", tmp_path / "x.th", "--sizes", tmp_path / "captions.json") == 0
    store = open_features(tmp_path / "out.h5")
    assert {name: store.read(name).image_size for name in store.ids} == {"9": (50, 70), "50": (39, 59)}


# image -> (height, width) and boxes
BAN = {
    65567: ((500, 375), [[0, 0, 30, 40], [100, 200, 374.5, 480]]),
    36979: ((333, 500), [[10, 20, 110, 220], [0, 0, 500, 333], [50.5, 60.25, 90, 300]]),
}


@pytest.fixture
def ban(tmp_path) -> dict[int, np.ndarray]:
    """The features of the images of `BAN`; the file has them in another order than the pickle."""
    boxes = np.concatenate([boxes for _, boxes in BAN.values()]).astype(np.float32)
    shares = np.concatenate([np.array(boxes) / (size[::-1] * 2) for size, boxes in BAN.values()])
    features = rows(5, 8)
    with h5py.File(tmp_path / "train.hdf5", "w") as file:
        file["image_features"], file["image_bb"] = features, boxes
        file["spatial_features"] = np.concatenate([shares, shares[:, 2:] - shares[:, :2]], axis=1).astype(np.float32)
        file["pos_boxes"] = np.array([[0, 2], [2, 5]])
    (tmp_path / "ids.pkl").write_bytes(pickle.dumps({36979: 1, 65567: 0}, protocol=2))
    return {65567: features[:2], 36979: features[2:]}


def test_ban(tmp_path, ban):
    assert convert(tmp_path, "ban", tmp_path / "train.hdf5", "--ids", tmp_path / "ids.pkl") == 0
    store = open_features(tmp_path / "out.h5")
    assert sorted(store.ids) == ["36979", "65567"]
    for image_id, (size, boxes) in BAN.items():
        record = store.read(str(image_id))
        np.testing.assert_array_equal(record.features, ban[image_id])
        np.testing.assert_array_equal(record.boxes, boxes)
        assert record.image_size == size


def test_vl_bert(tmp_path):
    boxes, features = rows(3, 4).clip(0, 5).cumsum(axis=1), rows(3, 8)
    (tmp_path / "genome").mkdir()
    arrays = {name: base64.b64encode(values).decode() for name, values in (("boxes", boxes), ("features", features))}
    content = {"image_id": 9, "image_w": 60, "image_h": 40, "num_boxes": 3, **arrays}
    (tmp_path / "genome" / "9.json").write_text(json.dumps(content))
    assert convert(tmp_path, "vl-bert", tmp_path / "genome") == 0
    record = open_features(tmp_path / "out.h5").read("9")
    np.testing.assert_array_equal(record.features, features)
    np.testing.assert_array_equal(record.boxes, boxes)
    assert record.image_size == (40, 60)


def refuses(folder: Path, capsys, monkeypatch, part: str, *words: object) -> None:
    """The command names the file, runs no code that is in it, and writes nothing."""
    monkeypatch.chdir(folder)
    before = {path.name for path in folder.iterdir()}
    assert convert(folder, *words) == 2
    assert part in capsys.readouterr().err and {path.name for path in folder.iterdir()} == before


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("COCO_train2014_000000000025.npy", rows(5, 6) * np.nan),
        ("COCO_train2014_000000000025.npy", np.array({"a": Evil()})),
        ("COCO_train2014_000000000026.npy", rows(5, 6)),  # of unknown size
        ("features.npy", rows(5, 6)),
    ],
)
def test_broken_pythia(tmp_path, pythia, name, content, capsys, monkeypatch):
    np.save(tmp_path / "train2014" / name, content, allow_pickle=True)
    sizes = ("--sizes", tmp_path / "captions.json")
    refuses(tmp_path, capsys, monkeypatch, name, "pythia", tmp_path / "train2014", *sizes)
    refuses(tmp_path, capsys, monkeypatch, "none", "pythia", tmp_path / "none", *sizes)


def test_sizes_of_two_splits_that_number_their_images_alike(tmp_path, pythia, capsys, monkeypatch):
    content = json.loads((tmp_path / "captions.json").read_text())
    content["images"][0]["width"] += 1
    (tmp_path / "other.json").write_text(json.dumps(content))
    words = ("--sizes", tmp_path / "captions.json", tmp_path / "other.json")
    refuses(tmp_path, capsys, monkeypatch, "other.json", "pythia", tmp_path / "train2014", *words)


@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize(
    "entry",
    [
        (np.zeros((2, 4)), np.zeros((2, 4)) - 9, np.zeros(2)),
        (np.full((2, 4), np.nan), np.ones((2, 4)), np.zeros(2)),
        Evil(),
    ],
)
def test_broken_nlvr2(tmp_path, entry, is_zip, capsys, monkeypatch):
    torch.save({"a.png.npz": entry}, tmp_path / "x.th", _use_new_zipfile_serialization=is_zip)
    refuses(tmp_path, capsys, monkeypatch, "x.th", "detectron", tmp_path / "x.th")


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("train.hdf5", lambda file: file["spatial_features"].write_direct(np.ones((5, 6), np.float32) * 0.3)),
        ("train.hdf5", lambda file: file["image_features"].write_direct(np.full((5, 8), np.nan, np.float32))),
        ("train.hdf5", lambda file: file.pop("pos_boxes")),
        ("train.hdf5", lambda file: file["pos_boxes"].write_direct(np.array([[-2, 2], [2, 5]]))),
        ("train.hdf5", lambda file: file["pos_boxes"].write_direct(np.array([[0, 2], [5, 2]]))),
        ("train.hdf5", lambda file: file["pos_boxes"].write_direct(np.array([[0, 2], [2, 50]]))),
        ("ids.pkl", [36979, 65567]),
        ("ids.pkl", {36979: 1, 65567: 1}),
        ("ids.pkl", {36979: 1}),
        ("ids.pkl", Evil()),
        ("out.h5", "mine"),  # it is not written over
    ],
)
def test_broken_ban(tmp_path, ban, part, change, capsys, monkeypatch):
    if part == "train.hdf5":
        with h5py.File(tmp_path / part, "r+") as file:
            change(file)
    else:
        (tmp_path / part).write_bytes(pickle.dumps(change))
    refuses(tmp_path, capsys, monkeypatch, part, "ban", tmp_path / "train.hdf5", "--ids", tmp_path / "ids.pkl")
