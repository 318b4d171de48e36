"""What is read is compared with the image that was asked for."""

from __future__ import annotations

import dataclasses
import os
import shutil

import numpy as np
import pytest

from detector.errors import UserError
from e2e_vl.data.features import RegionFeatures, check_record, open_features, save_npz, write_features

BOXES = np.array([[0, 0, 10, 10], [5, 5, 40, 30]], dtype=np.float32)


def record(image_id: str = "1", **changes) -> RegionFeatures:
    values = {
        "image_size": (30, 40),
        "boxes": BOXES,
        "features": np.ones((2, 6), np.float32),
        "scores": np.array([0.0, 1.0], np.float32),
        "classes": np.array([0, 3]),
        "attributes": np.array([0, 3]),
        "attribute_scores": np.array([0.5, 0.5], np.float32),
    }
    return RegionFeatures(image_id, **{**values, **changes})


def test_good_records_pass():
    check_record(record(), "1", "f")
    check_record(record(boxes=BOXES + np.float32([-1, -1, 1, 1])), "1", "f")  # rounding, or counted from 1
    check_record(record(scores=np.array([-1e-4, 1.0001], np.float32)), "1", "f")
    check_record(RegionFeatures("1", (30, 40), BOXES[:0], np.zeros((0, 6), np.float32)), "1", "f")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"image_id": "2"}, "holds the features of image '2' in the place of image '1'"),
        ({"image_size": (0, 40)}, "40 x 0 pixels"),
        ({"features": np.array([[1] * 6, [np.nan] * 6], np.float32)}, "features has values .* in row 1"),
        ({"boxes": np.array([[0, 0, np.inf, 1], [0, 0, 1, 1]], np.float32)}, "boxes has values .* in row 0"),
        ({"image_feature": np.full(6, np.nan, np.float32)}, "image_feature has values"),
        ({"boxes": BOXES[:, [2, 1, 0, 3]]}, r"box 0 \[10, 0, 0, 10\] is inverted"),
        ({"boxes": BOXES * 2}, r"box 1 \[10, 10, 80, 60\] leaves the 40 x 30 image"),
        ({"boxes": BOXES - 2}, r"box 0 \[-2, -2, 8, 8\] leaves"),
        ({"scores": np.array([0.1, 7.0], np.float32)}, "scores lie between 0.1 and 7"),
        ({"attribute_scores": np.array([-0.1, 0.5], np.float32)}, "attribute_scores lie between -0.1"),
        ({"classes": np.array([-1, 3])}, "classes has the number -1"),
    ],
)
def test_what_cannot_be_is_refused(changes, reason):
    with pytest.raises(UserError, match=f"^f: image 1: .*{reason}"):
        check_record(record(**changes), "1", "f: image 1")


def test_exchanged_files_are_found(tmp_path):
    for image_id in ("1", "2"):
        save_npz(tmp_path / f"{image_id}.npz", record(image_id))
    shutil.move(tmp_path / "1.npz", tmp_path / "3.npz")
    store = open_features(tmp_path)
    assert store["2"].image_id == "2"
    with pytest.raises(UserError, match=r"features of image '1' in the place of image '3'"):
        store["3"]


@pytest.mark.parametrize(
    ("layout", "name"), [("tsv", "f.tsv"), ("lxmert", "f.tsv"), ("hdf5", "f.h5"), ("lmdb", "f.lmdb")]
)
def test_every_store_checks(tmp_path, layout, name):
    path = tmp_path / name
    records = [record("1"), dataclasses.replace(record("2"), boxes=BOXES * 3)]
    write_features(layout, path, records, {}, num_bytes=10_000)
    store = open_features(path)
    assert len(store["1"]) == 2
    with pytest.raises(UserError, match=rf"{name}: image 2: box 1 .* leaves the 40 x 30 image"):
        store["2"]


def test_a_damaged_index_beside_a_tsv_file(tmp_path):
    write_features("tsv", tmp_path / "f.tsv", [record()], {}, num_bytes=1000)
    for text in ('{"index": {"bytes": "x"}}', '{"index": {"bytes": 9, "offsets": {"1": 99}}}', '{"index": 3}', "[]"):
        (tmp_path / "f.tsv.json").write_text(text)
        with pytest.raises(UserError, match=r"f\.tsv\.json.*remove"):
            open_features(tmp_path / "f.tsv")


def test_hdf5_data_sets_that_claim_more_than_the_file(tmp_path):
    h5py = pytest.importorskip("h5py")
    write_features("hdf5", tmp_path / "f.h5", [record()], {}, num_bytes=1000)
    with h5py.File(tmp_path / "f.h5", "a") as file:
        del file["features"]
        file.create_dataset("features", (1 << 40, 6), "f4", chunks=(64, 6))
    with pytest.raises(UserError, match=r"f\.h5: .*features claims 26388279066624 bytes"):
        open_features(tmp_path / "f.h5")
    with h5py.File(tmp_path / "f.h5", "a") as file:
        del file["features"]
        file["features"] = h5py.ExternalLink(str(tmp_path / "other.h5"), "features")
    with pytest.raises(UserError, match=r"f\.h5: no readable HDF5 file"):
        open_features(tmp_path / "f.h5")
    with h5py.File(tmp_path / "f.h5", "a") as file:
        del file["features"]
        file["features"] = np.ones((2, 6), np.float32)
        file["starts"][:] = [0, 3]
    with pytest.raises(UserError, match="starts do not rise from 0 to the number of regions, 2"):
        open_features(tmp_path / "f.h5")


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("starts", np.array([0.0, 1.5, 4.0])),
        ("starts", np.array([0, 2**64 - 1, 4], np.uint64)),
        ("image_sizes", np.array([[30.5, 40], [30, 40]])),
        ("image_sizes", np.array([[np.nan, 40], [30, 40]])),
        ("classes", np.array([1, 1.5, 0, 0])),
        ("boxes", np.ones((4, 4), bool)),
        ("image_feature", np.ones((9, 6), np.float32)),
        ("ids", np.array([b"1", b"1"])),
    ],
)
def test_hdf5_columns_of_other_kinds_are_refused(tmp_path, name, values):
    h5py = pytest.importorskip("h5py")
    path = tmp_path / "f.h5"
    write_features("hdf5", path, [record("1"), record("2")], {}, num_bytes=1000)
    with h5py.File(path, "a") as file:
        if name in file:
            del file[name]
        file[name] = values
    with pytest.raises(UserError, match=r"f\.h5: "):
        open_features(path)["1"]


def test_numbers_of_other_widths_become_ours(tmp_path):
    h5py = pytest.importorskip("h5py")
    path = tmp_path / "f.h5"
    write_features("hdf5", path, [record()], {}, num_bytes=1000)
    expected = open_features(path)["1"]
    with h5py.File(path, "a") as file:
        for name, kind in (("boxes", ">f4"), ("features", "f8"), ("classes", "f4"), ("starts", ">i8")):
            values = file[name][:].astype(kind)
            del file[name]
            file[name] = values
    for name, values in open_features(path)["1"].columns().items():
        assert values.dtype == getattr(expected, name).dtype, name
        np.testing.assert_array_equal(values, getattr(expected, name))


def test_an_hdf5_link_to_another_file_is_not_opened(tmp_path):
    """The other one may be a pipe, which is never ready."""
    h5py = pytest.importorskip("h5py")
    path = tmp_path / "f.h5"
    write_features("hdf5", path, [record()], {}, num_bytes=1000)
    os.mkfifo(tmp_path / "pipe.h5")
    with h5py.File(path, "a") as file:
        del file["features"]
        file["features"] = h5py.ExternalLink(str(tmp_path / "pipe.h5"), "features")
    with pytest.raises(UserError, match="features is not a data set of the file itself"):
        open_features(path)


def test_npz_columns_of_other_kinds_are_refused(tmp_path):
    path = tmp_path / "1.npz"
    save_npz(path, record())
    arrays = dict(np.load(path))
    for name, values in (("classes", np.array([1.7, 2])), ("image_size", np.array([30.5, 40])), ("boxes", BOXES > 0)):
        np.savez(path, **{**arrays, name: values})
        with pytest.raises(UserError, match=rf"1\.npz: no readable file of region features \({name} h"):
            open_features(tmp_path)["1"]
