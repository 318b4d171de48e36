"""Parquet files: rows as typed records, and the images inside them."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import pytest

from detector.errors import MissingPackageError
from e2e_vl import parquet
from e2e_vl.io import Record
from e2e_vl.parquet import ParquetFiles, image_of_name
from tests.data.helpers import refused

pyarrow = pytest.importorskip(
    "pyarrow", reason='pyarrow is not installed; pip install "e2e-vl[parquet]" lets this test run'
)


class Row(Record):
    number: int
    words: str


def write(path: Path, numbers: list[int], **columns: list) -> Path:
    import pyarrow.parquet

    images = [{"bytes": f"image {number}".encode(), "path": f"{number}.jpg"} for number in numbers]
    content = {"number": numbers, "words": [f"word {number}" for number in numbers], "image": images, **columns}
    pyarrow.parquet.write_table(pyarrow.table(content), path, row_group_size=2)
    return path


@pytest.fixture
def files(tmp_path: Path) -> ParquetFiles:
    write(tmp_path / "val-00000-of-00002.parquet", [0, 1, 2, 3, 4])
    write(tmp_path / "val-00001-of-00002.parquet", [5, 6, 7])
    write(tmp_path / "test-00000-of-00001.parquet", [9])
    return ParquetFiles(tmp_path / "val-*.parquet")


def test_rows_and_images_of_several_files_are_counted_through(files, tmp_path):
    assert len(files) == 8 and files.columns == ["number", "words", "image"]
    assert [(row.number, row.words) for row in files.rows(Row)] == [(n, f"word {n}") for n in range(8)]
    for number in (0, 7, 4, 3, 2, 5):
        image = files.image(number)
        assert image.content == f"image {number}".encode()
        assert image_of_name(str(image)) == image.content, "as predictions name it"
    assert files.name_of(6) == f"{tmp_path / 'val-00001-of-00002.parquet'}: row 1"
    assert image_of_name("folder/7.jpg") == "folder/7.jpg"
    assert len(ParquetFiles(tmp_path)) == 9


def test_a_group_of_rows_is_read_once_for_images_in_order(files, monkeypatch):
    groups = []
    read = parquet._read_images
    monkeypatch.setattr(parquet, "_read_images", lambda group: groups.append(group.first_row) or read(group))
    for number in range(8):
        files.image(number)
    assert groups == [0, 2, 4, 5, 7]
    copy = pickle.loads(pickle.dumps(files))
    assert copy._cached_group is None and copy.image(7).content == b"image 7"


def test_what_cannot_be_read_is_named(tmp_path):
    with refused("none-*.parquet", "no parquet file"):
        ParquetFiles(tmp_path / "none-*.parquet")
    write(tmp_path / "a.parquet", [0, 1], words=[None, "b"])
    with refused("a.parquet: row 0", "words"):
        list(ParquetFiles(tmp_path / "a.parquet").rows(Row))
    write(tmp_path / "a.parquet", [0, 1], image=[{"bytes": None, "path": "0.jpg"}] * 2)
    with refused("a.parquet: row 1 has no image inside"):
        ParquetFiles(tmp_path / "a.parquet").image(1)
    write(tmp_path / "b.parquet", [0], other=[1])
    with refused("b.parquet", "other", "a.parquet"):
        ParquetFiles(tmp_path)
    (tmp_path / "b.parquet").write_bytes(b"PAR1 no more")
    with refused("b.parquet: damaged or in another format"):
        ParquetFiles(tmp_path / "b.parquet")


def test_the_package_that_is_missing_is_named(files, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'e2e-vl\[parquet\]'"):
        ParquetFiles(tmp_path)
