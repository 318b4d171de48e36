"""Region features of every format: what is written is read again, and compared with the image that was asked for."""

from __future__ import annotations

import dataclasses
import errno
import io
import multiprocessing
import pickle
from pathlib import Path

import h5py
import lmdb
import numpy as np
import pytest

from e2e_vl.data.features import (
    OPTIONAL_COLUMNS,
    PREDICTED_COLUMNS,
    STAMP_NAME,
    RegionFeatures,
    TsvStore,
    open_features,
    save_npz,
    sidecar_path,
    write_features,
)
from e2e_vl.io import file_name
from e2e_vl.samples import BoxPredictions
from tests.data.helpers import refused, write_json

STAMP = {"config": {"a": [1, 2]}, "channel_order": "BGR"}
FILES = {"npz": "f", "tsv": "f.tsv", "lxmert": "f.tsv", "hdf5": "f.h5", "lmdb": "f.lmdb"}
KEPT = {"tsv": set(), "lxmert": {"scores", "classes", "attributes", "attribute_scores"}}  # the others keep all columns


@pytest.fixture
def records() -> list[RegionFeatures]:
    generator = np.random.default_rng(0)
    made = []
    for image_id, rows in (("val/7", 3), ("42", 5), ("é", 0), ("9", 1)):
        columns = {name: generator.integers(0, 9, rows).astype(kind) for name, kind in OPTIONAL_COLUMNS.items()}
        columns |= {name: columns[name] / 10 for name in ("scores", "attribute_scores")}  # probabilities
        made.append(
            RegionFeatures.from_columns(
                image_id,
                (30, 40),
                {
                    "boxes": 5 * generator.random((rows, 4), dtype=np.float32).cumsum(axis=1),  # x1 < x2, y1 < y2
                    "features": generator.standard_normal((rows, 6)).astype(np.float32),
                    **columns,
                },
                image_feature=generator.random(6, dtype=np.float32),
            )
        )
    return made


def write(layout: str, folder: Path, records: list[RegionFeatures]) -> Path:
    path = folder / FILES[layout]
    if layout != "npz":
        write_features(layout, path, iter(records), STAMP, num_bytes=1000)
        return path
    write_json(path / STAMP_NAME, STAMP)
    for record in records:
        save_npz(path / f"{file_name(record.image_id)}.npz", record, STAMP)
    return path


def assert_equal(record: RegionFeatures, expected: RegionFeatures, columns: set[str]) -> None:
    assert (record.image_id, record.image_size) == (expected.image_id, expected.image_size)
    assert np.array_equal(record.boxes, expected.boxes)
    assert record.features.size == expected.features.size == 0 or np.array_equal(record.features, expected.features)
    optional, expected_values = optional_values(record), optional_values(expected)
    for name in {*OPTIONAL_COLUMNS, "image_feature"}:
        if name in columns:
            assert np.array_equal(optional[name], expected_values[name]), name
            assert optional[name].dtype == expected_values[name].dtype
        else:
            assert name not in optional


def optional_values(record: RegionFeatures) -> dict[str, np.ndarray]:
    values = {name: column for name, column in record.columns().items() if name in OPTIONAL_COLUMNS}
    if record.image_feature is not None:
        values["image_feature"] = record.image_feature
    return values


@pytest.mark.parametrize("layout", FILES)
def test_what_is_written_is_read_again(layout: str, tmp_path: Path, records):
    store = open_features(write(layout, tmp_path, records))
    assert store.stamp == STAMP
    assert sorted(store.ids) == sorted(record.image_id for record in records)
    for opened in (store, pickle.loads(pickle.dumps(store)), open_features(store.path)):
        for record in records[::-1]:
            assert_equal(opened[record.image_id], record, KEPT.get(layout, {*OPTIONAL_COLUMNS, "image_feature"}))
    with refused(FILES[layout], "image 43"):
        store["43"]
    if layout != "npz":
        with refused("two images have the id"):
            write(layout, tmp_path, [*records, records[0]])
    assert not list(tmp_path.rglob("*.part"))
    if layout == "npz":
        (store.path / "42.npz").rename(store.path / "43.npz")
        with refused("'42'", "'43'"):
            open_features(store.path)["43"]


def test_a_tsv_file_is_read_without_its_index(tmp_path: Path, records, monkeypatch):
    path = write("tsv", tmp_path, records)
    indexed = TsvStore(path)
    sidecar_path(path).unlink()
    scanned = TsvStore(path)
    assert scanned.rows == indexed.rows and scanned.stamp is None
    with monkeypatch.context() as patch:
        patch.setattr(TsvStore, "_scan", lambda self: pytest.fail("the index is kept beside the file"))
        assert TsvStore(path).rows == indexed.rows


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS])
def test_a_tsv_file_is_read_where_its_index_cannot_be_written(code, tmp_path: Path, records, monkeypatch):
    def refuse(path: Path, value: object) -> None:
        raise OSError(code, "no", str(path))

    path = write("tsv", tmp_path, records)
    sidecar_path(path).unlink()
    monkeypatch.setattr("e2e_vl.data.features.write_json", refuse)
    assert TsvStore(path).ids and not sidecar_path(path).exists()


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


def unknown_compression() -> bytes:
    """A `.npz` file with a damaged byte, after which zipfile raises NotImplementedError."""
    file = io.BytesIO()
    np.savez(file, image_id=np.array("1"))
    return file.getvalue().replace(b"PK\1\2-\3-\0\0\0\0\0", b"PK\1\2-\3-\0\0\0\7\0")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("f.tsv", row) for row in (b"1\t2\n", b"1,640,480,0,,\n", b"\x1f\x8b", "1\t9\t9\t0\t\t\n".encode("utf-16"))),
        *(("f.h5", b"x"), ("f.lmdb", b"x"), ("f.zip", b""), ("1.npz", b"PK"), ("1.npz", unknown_compression())),
    ],
)
def test_damaged_and_missing_files_are_named(name: str, content: bytes, tmp_path: Path):
    path = tmp_path if name.endswith(".npz") else tmp_path / name
    if path != tmp_path:
        with pytest.raises(FileNotFoundError, match=name):
            open_features(path)
    (tmp_path / name).write_bytes(content)
    with refused(name):
        open_features(path)["1"]


def test_the_message_says_that_a_column_is_missing(tmp_path: Path, records):
    np.savez(tmp_path / "1.npz", image_id=np.array("1"), image_size=np.array([9, 9]), boxes=np.zeros((0, 4)))
    with refused("1.npz", "features is not a file in the archive"):
        open_features(tmp_path)["1"]
    path = write("hdf5", tmp_path, records)
    with h5py.File(path, "r+") as file:
        del file["boxes"]
    with refused("f.h5: image 42", "object 'boxes' doesn't exist"):
        open_features(path)["42"]


@pytest.mark.parametrize("layout", FILES)
def test_names_in_upper_case_and_files_of_macos(layout: str, tmp_path: Path, records):
    path = write(layout, tmp_path, records)
    if layout == "npz":
        (path / "42.npz").rename(path / "42.NPZ")
        (path / "._42.npz").write_bytes(b"\0\5\x16\7")
    else:
        path = path.rename(path.with_suffix(path.suffix.upper()))
    store = open_features(path)
    assert sorted(store.ids) == sorted(record.image_id for record in records) and len(store["42"]) == 5


def test_repeated_rows_of_a_tsv_file_are_counted(tmp_path: Path, records, caplog):
    path = write("tsv", tmp_path, records)
    first, *rest = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([b"\n", first, *rest, first, b"\r\n", b"\n"]))
    image_id = first.split(b"\t")[0].decode()
    assert sorted(open_features(path).ids) == sorted(record.image_id for record in records)
    with refused("no features for image 77", "such as"):
        open_features(path)["77"]
    assert f"skipped 1 rows of images that have a later row: {image_id}" in caplog.text


def test_a_tsv_file_of_pandas_with_a_byte_order_mark(tmp_path: Path, records):
    path = write("tsv", tmp_path, records)
    sidecar_path(path).unlink()
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\t40\t30\t", b"\t40.0\t30.0\t"))
    assert len(TsvStore(path)["val/7"]) == 3 and TsvStore(path)["42"].image_size == (30, 40)


def test_folders_without_features_and_lmdb_files_in_folders(tmp_path: Path, records):
    with refused("no .npz files"):
        open_features(tmp_path)
    folder = tmp_path / "detectron.lmdb"
    folder.mkdir()
    write("lmdb", tmp_path / "x", records).rename(folder / "data.mdb")
    assert len(open_features(folder)["42"]) == 5
    with lmdb.open(str(tmp_path / "mmf"), map_size=2**20) as other, other.begin(write=True) as transaction:
        transaction.put(b"42", pickle.dumps({"features": np.zeros((2, 6))}))
        transaction.put(b"keys", pickle.dumps([b"42"]))
    with refused("mmf: an LMDB file of another project"):
        open_features(tmp_path / "mmf")


def test_an_lmdb_file_that_was_cut_off_is_refused(tmp_path: Path, records):
    """Reading a page that is missing would end the process."""
    path = write("lmdb", tmp_path, records)
    whole = path.read_bytes()
    for size in (len(whole) - 1, len(whole) // 2, 10_000):
        path.write_bytes(whole[:size])
        with refused(f"f.lmdb: cut off at {size} of {len(whole)} bytes"):
            open_features(path)


@pytest.mark.parametrize(
    ("name", "change", "part"),
    [
        ("starts", lambda starts: [0, 3, -8, 8, 9], "image 42 would end at row -8"),
        ("starts", lambda starts: [0, 8, 3, 8, 9], "image 42 would end at row 3"),
        ("starts", lambda starts: starts + 1, "begins at 1"),
        ("starts", lambda starts: [0, 3, 8, 8, 99], "wrong from image 9 on"),
        ("starts", lambda starts: starts[1:], "starts has the shape [4], but 4 ids need [5]"),
        ("ids", lambda ids: ids[1:], "image_sizes has the shape [4, 2], but 3 ids need [3, 2]"),
        ("ids", lambda ids: [ids[0], *ids[:3]], "image val/7 is listed twice"),
        ("ids", lambda ids: [*ids[1:], ids[0]], "have changed since"),  # each image would have its neighbour's features
    ],
)
def test_an_index_of_hdf5_that_contradicts_its_rows_is_refused(name, change, part, tmp_path: Path, records):
    path = write("hdf5", tmp_path, records)
    with h5py.File(path, "r+") as file:
        values = np.array(change(file[name][:]))
        del file[name]
        file[name] = values
    with refused("f.h5", part):
        open_features(path)


def test_damaged_values_of_an_hdf5_file_are_found(tmp_path: Path, records):
    path = write("hdf5", tmp_path, records)
    whole, values = path.read_bytes(), records[1].features.tobytes()
    at = whole.index(values) + 9
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    with refused("f.h5: image 42"):
        open_features(path)["42"]


def test_values_that_an_hdf5_file_has_lost_are_no_zeros(tmp_path: Path, records):
    path = write("hdf5", tmp_path, records)
    with h5py.File(path, "r+") as file:
        rows = len(file["boxes"])
        file["boxes"].resize(0, axis=0)
        file["boxes"].resize(rows, axis=0)
    with refused("f.h5: image 42", "NaN"):
        open_features(path)["42"]


BOXES = np.array([[0, 0, 10, 10], [5, 5, 40, 30]], dtype=np.float32)


def record(image_id: str = "1", **changes) -> RegionFeatures:
    predictions = {
        "scores": np.array([0.0, 1.0], np.float32),
        "attribute_scores": np.array([0.5, 0.5], np.float32),
    }
    for name in PREDICTED_COLUMNS:
        if name in changes:
            predictions[name] = changes.pop(name)
    values = {"image_size": (30, 40), "boxes": BOXES, "features": np.ones((2, 6), np.float32)}
    return RegionFeatures(**{"image_id": image_id, **values, **changes}, predictions=BoxPredictions(**predictions))


@pytest.mark.parametrize(
    "changes",
    [
        {"image_id": "2"},
        {"features": np.array([[1] * 6, [np.nan] * 6], np.float32)},
        {"boxes": np.array([[0, 0, np.inf, 1], [0, 0, 1, 1]], np.float32)},
        {"image_feature": np.full(6, np.nan, np.float32)},
        {"boxes": BOXES[:, [2, 1, 0, 3]]},
        {"boxes": BOXES * 2},
        {"boxes": BOXES - 2},
        {"boxes": BOXES[:1]},
        {"boxes": BOXES[0]},
        {"features": np.ones(2, np.float32)},
        {"image_size": (30, 40, 3)},
        {"scores": np.array([0.1, 7.0], np.float32)},
        {"attribute_scores": np.array([-0.1, 0.5], np.float32)},
        {"boxes": BOXES / np.float32([40, 30, 40, 30])},  # normalised
    ],
)
def test_implausible_regions_name_file_and_image(changes):
    with refused("f.tsv: image 1"):
        record(**changes).check("1", "f.tsv: image 1")


@pytest.mark.parametrize("layout", FILES)
def test_every_store_checks(tmp_path, layout):
    attributes = {"classes": np.array([0, 3]), "attributes": np.array([0, 3])}
    records = [record("1", **attributes), dataclasses.replace(record("2", **attributes), boxes=BOXES * 3)]
    store = open_features(write(layout, tmp_path, records))
    assert len(store["1"]) == 2
    with refused(FILES[layout], "image 2", "40 x 30"):
        store["2"]
