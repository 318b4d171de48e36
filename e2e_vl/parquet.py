"""Rows of parquet files, and the images inside them.

The Hugging Face hub publishes data sets so: a table in one or several files, each in groups of rows, often a hundred,
and a column `image` whose entries are {bytes, path} (`datasets.Image`). Everything but the images is read at once. An
image is read with the others of its group, which are kept until another group is asked for, so that images in the order
of the file are read once. No file is unpacked.
"""

from __future__ import annotations

import bisect
import importlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import msgspec

from detector.errors import MissingFileError, MissingPackageError, UserError, first_line, reading
from detector.io import convert
from e2e_vl.io import is_listed
from e2e_vl.samples import ImageBytes

IMAGE = "image"  # the column
_NAMED_ROW = re.compile(r"(.+\.parquet): row ([0-9]+)", re.IGNORECASE)  # as `ParquetFiles.name_of` names it


def import_parquet() -> ModuleType:
    """Import pyarrow's module for parquet files.

    Raises:
        MissingPackageError: it is not installed; the message has the command that installs it.
    """
    try:
        return importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise MissingPackageError("Parquet files need the package pyarrow: pip install 'e2e-vl[parquet]'") from error


class _RowGroup(NamedTuple):
    path: Path
    number: int  # in its file
    first_row: int  # counted through all files
    first_row_of_file: int


class ParquetFiles:
    """The rows of parquet files that have the same columns, one file after the other.

    Args:
        path: a file, a folder (all its `*.parquet`) or a pattern such as `data/val-*.parquet`.

    Attributes:
        columns: the names of the columns.
    """

    def __init__(self, path: Path) -> None:
        names = path.iterdir() if path.is_dir() else path.parent.glob(path.name)
        self.paths = sorted(name for name in names if is_listed(name.name, (".parquet",)))
        if not self.paths:
            raise MissingFileError(f"{path}: no parquet file found; check data.files.parquet and the split")
        parquet = import_parquet()
        self._groups: list[_RowGroup] = []
        self._cached_group: tuple[_RowGroup, Sequence[Any]] | None = None  # with its images
        self._num_rows = 0
        self.columns: list[str] = []
        for file in self.paths:
            with reading(file, OSError, ValueError):
                metadata = parquet.read_metadata(file)
            columns = metadata.schema.to_arrow_schema().names
            self.columns = self.columns or columns
            if columns != self.columns:
                raise UserError(
                    f"{file} has the columns {', '.join(columns)}, but {self.paths[0]} has {', '.join(self.columns)}; "
                    "use the files of one data set"
                )
            first_row_of_file = self._num_rows
            for number in range(metadata.num_row_groups):
                self._groups.append(_RowGroup(file, number, self._num_rows, first_row_of_file))
                self._num_rows += metadata.row_group(number).num_rows

    def __len__(self) -> int:
        return self._num_rows

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the images that are kept."""
        return {**self.__dict__, "_cached_group": None}

    def rows(self, type: type[msgspec.Struct]) -> Iterator[Any]:
        """Yield all rows as `type`; only the columns that are its fields are read."""
        columns = [name for name in self.columns if name in type.__struct_fields__]
        number = 0
        for path in self.paths:
            with reading(path, OSError, ValueError):
                table = import_parquet().read_table(path, columns=columns, use_threads=False)
            for row in table.to_pylist():
                try:
                    yield convert(row, type)
                except msgspec.ValidationError as error:
                    raise UserError(
                        f"{self.name_of(number)}: {first_line(error)}; correct or download the file again"
                    ) from error
                number += 1

    def name_of(self, row: int) -> str:
        """Return the file of a row and its number there, from 0, for messages."""
        group = self._group_of(row)
        return f"{group.path}: row {row - group.first_row_of_file}"

    def image(self, row: int) -> ImageBytes:
        """Read the image of a row."""
        group = self._group_of(row)
        cached_group = self._cached_group
        if cached_group is None or cached_group[0] != group:
            cached_group = (group, _read_images(group))
            self._cached_group = cached_group
        _, images = cached_group
        image = images[row - group.first_row].as_py()
        if not image or not image["bytes"]:
            raise UserError(f"{self.name_of(row)} has no image inside; use files with the images inside")
        return ImageBytes(image["bytes"], self.name_of(row))

    def _group_of(self, row: int) -> _RowGroup:
        position = bisect.bisect_right(self._groups, row, key=lambda group: group.first_row)
        return self._groups[position - 1]


def _read_images(group: _RowGroup) -> Sequence[Any]:
    """Return the images of a group, as pyarrow's scalars."""
    with reading(group.path, OSError, ValueError), import_parquet().ParquetFile(group.path) as file:
        # without threads, which a forked worker does not have
        return file.read_row_group(group.number, columns=[IMAGE], use_threads=False).column(IMAGE)


def image_of_name(name: str) -> str | bytes:
    """Return the image file in a row that `ParquetFiles.name_of` names; any other name is returned as it is."""
    match = _NAMED_ROW.fullmatch(name)
    if match is None:
        return name
    return ParquetFiles(Path(match[1])).image(int(match[2])).content
