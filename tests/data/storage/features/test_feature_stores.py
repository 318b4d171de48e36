from __future__ import annotations

import base64
import csv
import json
import multiprocessing
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from detector.errors import UserError
from e2e_vl.data import features as stores
from e2e_vl.data.features import (
    OPTIONAL,
    TSV_COLUMNS,
    RegionFeatures,
    TsvStore,
    check_format,
    open_features,
    save_npz,
    sidecar,
    write_features,
)

STAMP = {"config": {"a": [1, 2]}, "channel_order": "BGR"}
FILES = {"tsv": "f.tsv", "lxmert": "f.tsv", "hdf5": "f.h5", "lmdb": "f.lmdb"}
KEPT = {
    "tsv": set(),
    "lxmert": {"scores", "classes", "attributes", "attribute_scores"},
    "hdf5": {*OPTIONAL, "image_feature"},
    "lmdb": {*OPTIONAL, "image_feature"},
}


@pytest.fixture
def records() -> list[RegionFeatures]:
    generator = np.random.default_rng(0)
    made = []
    for image_id, rows in (("val/7", 3), ("42", 5), ("é", 0), ("9", 1)):
        columns = {name: generator.integers(0, 9, rows).astype(kind) for name, kind in OPTIONAL.items()}
        columns |= {name: columns[name] / 10 for name in ("scores", "attribute_scores")}  # probabilities
        made.append(
            RegionFeatures(
                image_id,
                (30, 40),
                generator.random((rows, 4), dtype=np.float32).cumsum(axis=1),  # x1 < x2, y1 < y2
                generator.standard_normal((rows, 6)).astype(np.float32),
                image_feature=generator.random(6, dtype=np.float32),
                **columns,
            )
        )
    return made


def write(layout: str, folder: Path, records: list[RegionFeatures]) -> Path:
    path = folder / FILES[layout]
    write_features(layout, path, iter(records), STAMP, num_bytes=1000)
    return path


def assert_equal(found: RegionFeatures, expected: RegionFeatures, kept: set[str]) -> None:
    assert (found.image_id, found.image_size) == (expected.image_id, expected.image_size)
    assert np.array_equal(found.boxes, expected.boxes)
    assert found.features.size == expected.features.size == 0 or np.array_equal(found.features, expected.features)
    for name in {*OPTIONAL, "image_feature"}:
        if name in kept:
            assert np.array_equal(getattr(found, name), getattr(expected, name)), name
            assert getattr(found, name).dtype == getattr(expected, name).dtype
        else:
            assert getattr(found, name) is None


@pytest.mark.parametrize("layout", FILES)
def test_what_is_written_is_read_again(layout: str, tmp_path: Path, records):
    store = open_features(write(layout, tmp_path, records))
    assert store.stamp == STAMP
    assert sorted(store.ids) == sorted(record.image_id for record in records)
    for one in (store, pickle.loads(pickle.dumps(store))):
        for record in records[::-1]:
            assert_equal(one[record.image_id], record, KEPT[layout])
    with pytest.raises(ValueError, match=r"no features of image 43"):
        store["43"]
    assert not list(tmp_path.glob("*.part"))


def test_npz_files_in_a_folder(tmp_path: Path, records):
    for record in records:
        path = tmp_path / f"{record.image_id}.npz"
        path.parent.mkdir(exist_ok=True)
        save_npz(path, record, STAMP)
    store = open_features(tmp_path)
    assert sorted(store.ids) == sorted(record.image_id for record in records)
    for record in records:
        assert_equal(store[record.image_id], record, {*OPTIONAL, "image_feature"})
    assert json.loads(str(np.load(tmp_path / "42.npz")["stamp"])) == STAMP


def test_the_columns_of_the_tsv_files(tmp_path: Path, records):
    """Read as the programs read them that these formats come from."""
    csv.field_size_limit(sys.maxsize)
    for layout in ("tsv", "lxmert"):
        with write(layout, tmp_path, records).open(newline="") as file:
            rows = list(csv.DictReader(file, TSV_COLUMNS[layout], delimiter="\t"))
        row, record = rows[1], records[1]
        boxes = np.frombuffer(base64.b64decode(row["boxes"]), dtype=np.float32).reshape(int(row["num_boxes"]), -1)
        assert np.array_equal(boxes, record.boxes)
        features = np.frombuffer(base64.b64decode(row["features"]), dtype=np.float32).reshape(len(boxes), -1)
        assert np.array_equal(features, record.features)
    assert (row["img_id"], row["img_h"], row["img_w"]) == ("42", "30", "40")
    assert np.array_equal(np.frombuffer(base64.b64decode(row["attrs_id"]), dtype=np.int64), record.attributes)
    assert np.array_equal(np.frombuffer(base64.b64decode(row["objects_conf"]), dtype=np.float32), record.scores)


def test_a_tsv_file_is_read_without_its_index(tmp_path: Path, records, monkeypatch):
    path = write("tsv", tmp_path, records)
    indexed = TsvStore(path)
    sidecar(path).unlink()
    scanned = TsvStore(path)
    assert scanned.offsets == indexed.offsets and scanned.stamp is None
    assert not sidecar(path).exists(), "a small file needs no index"
    monkeypatch.setattr(stores, "SMALL", 0)
    TsvStore(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TsvStore, "_scan", lambda self: pytest.fail("the index is kept beside the file"))
        assert TsvStore(path).offsets == indexed.offsets
    with pytest.MonkeyPatch.context() as patch:
        sidecar(path).unlink()
        patch.setattr(os, "access", lambda *_: False)  # a folder of someone else
        assert TsvStore(path).offsets == indexed.offsets and not sidecar(path).exists()
    assert sorted(one.name for one in tmp_path.iterdir()) == [path.name], "no lock stays"
    path.write_bytes(path.read_bytes() * 2)
    with pytest.raises(ValueError, match="line 5 repeats image val/7"):
        TsvStore(path)


_inherited = {}  # of a forked worker


def _sum(image_id: str) -> float:
    return float(_inherited["store"][image_id].features.sum())


@pytest.mark.parametrize("layout", ["tsv", "hdf5", "lmdb"])
def test_forked_workers_read_at_once(layout: str, tmp_path: Path, records):
    """Their file positions are their own although the store was in use before the fork."""
    store = open_features(write(layout, tmp_path, records))
    ids = [record.image_id for record in records] * 50
    expected = [float(store[image_id].features.sum()) for image_id in ids]
    with multiprocessing.get_context("fork").Pool(2, _inherited.update, [{"store": store}]) as pool:
        assert pool.map(_sum, ids, chunksize=1) == expected


def test_lxmert_needs_attributes(tmp_path: Path, records):
    bare = RegionFeatures("1", (3, 4), records[0].boxes, records[0].features)
    with pytest.raises(ValueError, match="image 1: LXMERT's file needs objects_id, objects_conf, attrs_id"):
        write("lxmert", tmp_path, [bare])


@pytest.mark.parametrize("layout", ["hdf5", "lmdb"])
def test_a_missing_package_is_named(layout: str, tmp_path: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, {"hdf5": "h5py", "lmdb": "lmdb"}[layout], None)
    with pytest.raises(ValueError, match=r"pip install 'e2e-vl\[features\]'"):
        check_format(layout, tmp_path / FILES[layout])


@pytest.mark.parametrize(("name", "content"), [("f.tsv", b"1\t2\n"), ("f.h5", b"x"), ("f.lmdb", b"x"), ("f.zip", b"")])
def test_a_damaged_file_is_named(name: str, content: bytes, tmp_path: Path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=name):
        open_features(tmp_path / name)["1"]


def test_damaged_and_missing_npz_files(tmp_path: Path, records):
    with pytest.raises(FileNotFoundError, match=r"extract_features\.py"):
        open_features(tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"no \.npz file"):
        open_features(tmp_path)
    save_npz(tmp_path / "9.npz", records[3])
    content = (tmp_path / "9.npz").read_bytes()
    (tmp_path / "9.npz").write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"9\.npz: no readable file"):
        open_features(tmp_path)["9"]


def test_arrays_that_do_not_fit(records):
    boxes, features = records[0].boxes, records[0].features
    with pytest.raises(ValueError, match=r"image 1: boxes \[2, 4\] and features \[3, 6\]"):
        RegionFeatures("1", (3, 4), boxes[:2], features)
    with pytest.raises(ValueError, match=r"image 1: scores \[2\] for 3 boxes"):
        RegionFeatures("1", (3, 4), boxes, features, scores=np.zeros(2, dtype=np.float32))


def test_readers_need_no_optional_package_to_be_imported():
    code = "import sys; sys.modules.update(h5py=None, lmdb=None); import e2e_vl.data.features"
    root = Path(__file__).parents[4]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)


def as_bytes(found: RegionFeatures) -> tuple[object, ...]:
    columns = {**found.columns(), "image_feature": found.image_feature}
    return found.image_id, found.image_size, *((name, np.asarray(one).tobytes()) for name, one in columns.items())


@pytest.mark.parametrize("layout", ["tsv", "lxmert", "hdf5"])
def test_flipped_bits_are_found(layout: str, tmp_path: Path, records):
    """A record is as it was written, or refused with its file, whichever bit of the file is another one."""
    path = write(layout, tmp_path, records)
    whole, store = path.read_bytes(), open_features(path)
    expected = {image_id: as_bytes(store[image_id]) for image_id in store.ids}
    refused = 0
    del store  # HDF5 opens a file once, as long as it is open
    for place in range(0, len(whole), 1 + len(whole) // 300):
        changed = bytearray(whole)
        changed[place] ^= 1 << place % 8
        path.write_bytes(changed)
        try:
            store = open_features(path)
            for image_id, content in expected.items():
                assert as_bytes(store[image_id]) == content, place
        except ValueError as error:
            assert str(path) in str(error), error
            refused += 1
        store = None
    assert refused > 100


def test_tsv_files_from_elsewhere_need_no_checksums(tmp_path: Path, records):
    path = write("tsv", tmp_path, records)
    content = json.loads(sidecar(path).read_text())
    assert len(content["index"].pop("checksums")) == len(records)
    sidecar(path).write_text(json.dumps(content))
    assert_equal(open_features(path)["42"], records[1], set())
    for checksums in ([1], [0] * 4):
        content["index"]["checksums"] = checksums
        sidecar(path).write_text(json.dumps(content))
        with pytest.raises(
            ValueError, match=r"its index is damaged|image 42 is not as it was written .* remove f\.tsv"
        ):
            open_features(path)["42"]


def test_an_index_that_is_made_here_has_checksums(tmp_path: Path, records, monkeypatch):
    path = write("tsv", tmp_path, records)
    sidecar(path).unlink()
    monkeypatch.setattr(stores, "SMALL", 0)
    open_features(path)
    whole = path.read_bytes()
    place = whole.index(b"\n42\t") + len(b"\n42\t40\t")
    path.write_bytes(whole[:place] + b"4" + whole[place + 1 :])  # the height, 30 before
    with pytest.raises(ValueError, match="image 42 is not as it was written"):
        open_features(path)["42"]


@pytest.mark.parametrize("layout", FILES)
def test_a_file_without_any_image_is_refused(tmp_path: Path, layout: str):
    """The file beside a TSV file of 0 bytes may say so itself, or be missing."""
    path = tmp_path / FILES[layout]
    write_features(layout, path, [], STAMP, num_bytes=1000)
    for _ in range(2):
        with pytest.raises(UserError, match=rf"{path.name}: .*again"):
            open_features(path)
        sidecar(path).unlink(missing_ok=True)
