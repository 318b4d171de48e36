"""Readers of region features: a folder of `.npz` files, TSV files, an HDF5 file, an LMDB file.

A store may be copied to worker processes: neither file positions nor LMDB's maps may be shared with a forked worker, so
every process opens the files itself.

Formats
    npz      one file per image, named by its id (see `record.py`)
    tsv      bottom-up attention: image_id, image_w, image_h, num_boxes, boxes, features
    lxmert   img_id, img_h, img_w, objects_id, objects_conf, attrs_id, attrs_conf, num_boxes, boxes, features
    hdf5     the regions of all images one after the other, `starts` [N + 1] says where each image begins
    lmdb     image id -> content of an `.npz` file
In both TSV files, arrays are base64 of float32 (ids: int64), and boxes are xyxy in pixels of the original image.
"""

from __future__ import annotations

import abc
import base64
import binascii
import codecs
import importlib
import io
import itertools
import json
import logging
import os
import struct
import zlib
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec
import numpy as np
from msgspec import Meta
from tqdm.auto import tqdm

from detector.errors import MissingFileError, UserError
from detector.file_faults import reading
from detector.user_paths import user_path
from e2e_vl.data.storage.features.hdf5_checks import check_datasets, check_starts
from e2e_vl.data.storage.features.record import OPTIONAL, RegionFeatures, as_column, check_record, load_npz
from e2e_vl.data.storage.files import read_json
from e2e_vl.data.storage.index_files import OpenFiles, one_process
from e2e_vl.data.storage.lmdb_pages import DamagedLmdbError, find_values
from e2e_vl.file_names import id_of, inside, name_of
from e2e_vl.records import Record, checked, parsed_json, whole_number
from e2e_vl.run_files import write_text

logger = logging.getLogger(__name__)

SMALL = 1 << 26  # bytes of a TSV file that is read in less than a second
_START = 1 << 16  # bytes of a TSV file that show whether it is a text
STAMP_NAME = "stamp.json"
STAMP_KEY = b"__stamp__"  # in an LMDB file
TSV_COLUMNS = {
    "tsv": ("image_id", "image_w", "image_h", "num_boxes", "boxes", "features"),
    "lxmert": (
        *("img_id", "img_h", "img_w", "objects_id", "objects_conf", "attrs_id", "attrs_conf"),
        *("num_boxes", "boxes", "features"),
    ),
}
# Column of LXMERT's file -> field of `RegionFeatures`
LXMERT_FIELDS = {
    "objects_id": "classes",
    "objects_conf": "scores",
    "attrs_id": "attributes",
    "attrs_conf": "attribute_scores",
}


class FeatureStore(abc.ABC):
    """Region features by image id.

    Attributes:
        path: the file or folder.
        ids: image ids, in the order of the file.
        stamp: how the features were made; None where the file does not say.
    """

    path: Path
    ids: list[str]
    stamp: dict[str, Any] | None

    @abc.abstractmethod
    def read(self, image_id: str) -> RegionFeatures:
        """Regions of an image that is in `ids`."""

    def __getitem__(self, image_id: str) -> RegionFeatures:
        """Regions of one image, checked to be this image's (`check_record`).

        Raises:
            UserError: the file does not have it, or is damaged there.
        """
        if image_id not in self:
            raise UserError(f"{self.path}: has no features of image {image_id}; extract them with the others")
        record = self.read(image_id)
        check_record(record, image_id, f"{self.path}: image {image_id}")
        return record

    def __contains__(self, image_id: str) -> bool:
        if not hasattr(self, "_known"):
            self._known = set(self.ids)
        return image_id in self._known


def open_features(path: str | Path) -> FeatureStore:
    """Open region features of any format that tools/extract_features.py writes.

    Raises:
        MissingFileError: nothing there.
        UserError: not such a file, one without any image, or the package that reads it is not installed.
    """
    path = user_path(path)
    if path.is_dir():
        return NpzStore(path)
    if not path.is_file():
        raise MissingFileError(f"{path}: there are no region features; make them with tools/extract_features.py")
    kinds = {".tsv": TsvStore, ".h5": Hdf5Store, ".hdf5": Hdf5Store, ".lmdb": LmdbStore}
    if path.suffix not in kinds:
        raise UserError(f"{path}: region features are a folder of .npz files or end in {', '.join(kinds)}")
    store = kinds[path.suffix](path)
    if not store.ids:
        raise UserError(f"{path}: there is no image in the file; copy or extract it again")
    return store


def sidecar(path: Path) -> Path:
    """The file beside a TSV file that holds its stamp and its index."""
    return path.with_name(path.name + ".json")


class NpzStore(FeatureStore):
    """A folder of `.npz` files; their paths in it without the suffix tell the ids, see `e2e_vl/file_names.py`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        found = {id_of(name): name for name in npz_names(path)}
        self.ids = sorted(found)
        self._other_names = {one: name for one, name in found.items() if name_of(one) != name}  # of earlier versions
        if not self.ids:
            raise UserError(f"{path}: the folder has no .npz file of region features")
        stamp = path / STAMP_NAME
        self.stamp = _read_object(stamp) if stamp.is_file() else None

    def read(self, image_id: str) -> RegionFeatures:
        name = self._other_names.get(image_id) or name_of(image_id)
        return load_npz(inside(self.path, f"{name}.npz", follows_links=True))


def npz_names(folder: Path) -> list[str]:
    """Paths of the `.npz` files of a folder, relative to it and without their ending."""
    return [
        file.relative_to(folder).as_posix().removesuffix(".npz") for file in folder.rglob("*.npz") if file.is_file()
    ]


class _Index(Record):
    """Where the rows of a TSV file of so many bytes begin, and the CRC-32 of each with its line break."""

    bytes: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    offsets: dict[str, Annotated[int, Meta(ge=0, le=2**63 - 1)]]
    checksums: list[Annotated[int, Meta(ge=0, le=2**32 - 1)]] | None = None  # in the order of the offsets


class _Sidecar(Record):
    """The file beside a TSV file."""

    stamp: dict[str, Any] | None = None
    index: _Index | None = None


class TsvStore(FeatureStore):
    """A TSV file of bottom-up attention or of LXMERT, told apart by their numbers of columns.

    Rows are found by their offsets: from the file beside it if that fits, else by reading it once. One process does
    that and writes the offsets beside the file, where the others wait for them; files up to `SMALL` are just read.
    A row is compared with its checksum if there is one: rows that are written or indexed here have one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stamp, index = self._read_sidecar()
        if index is None:
            index = self._make_sidecar()
        self.offsets: dict[str, int] = index.offsets
        self.ids = list(self.offsets)
        self._starts = np.fromiter(self.offsets.values(), dtype=np.int64, count=len(self.offsets))
        self._checksums = None if index.checksums is None else np.array(index.checksums, dtype=np.uint32)

    def _read_sidecar(self) -> tuple[dict[str, Any] | None, _Index | None]:
        """The stamp, and the index if it is the one of this file."""
        beside = sidecar(self.path)
        if not beside.is_file():
            return None, None
        remedy = "remove the file, the index is made again"
        content = checked(_Sidecar, read_json(beside, "facts about the features"), f"{beside}:", remedy=remedy)
        if (index := content.index) is None:
            return content.stamp, None
        is_whole = index.checksums is None or (
            len(index.checksums) == len(index.offsets)
            and all(one < other for one, other in itertools.pairwise(index.offsets.values()))
        )
        if not is_whole or (index.offsets and max(index.offsets.values()) >= index.bytes):
            raise UserError(f"{beside}: its index is damaged; {remedy}")
        if index.bytes == self.path.stat().st_size:
            return content.stamp, index
        if index.checksums is not None:
            raise UserError(
                f"{self.path}: has {self.path.stat().st_size} bytes, and {index.bytes} when it was written; copy or "
                f"extract the file again; if it was changed on purpose, remove {beside.name}, it is made again"
            )
        return content.stamp, None

    def _make_sidecar(self) -> _Index:
        beside = sidecar(self.path)
        if self.path.stat().st_size <= SMALL:
            return self._scan()
        if not os.access(beside.parent, os.W_OK):
            logger.warning(
                "%s: the index of %s cannot be kept there, so every process reads the whole file at every start; make "
                "the folder writable once.",
                *(beside.parent, self.path.name),
            )
            return self._scan()
        with one_process(beside, f"the index of {self.path}"):
            stamp, index = self._read_sidecar()
            if index is None:  # no other process has made it meanwhile
                index = self._scan()
                write_text(beside, json.dumps({"stamp": stamp, "index": msgspec.to_builtins(index)}) + "\n")
        return index

    def _scan(self) -> _Index:
        offsets: dict[str, int] = {}
        checksums: list[int] = []
        position = 0
        title, size = f"indexing {self.path.name}", self.path.stat().st_size
        with (
            reading(self.path),
            self.path.open("rb") as file,
            tqdm(total=size, desc=title, unit="B", unit_scale=True, delay=1, leave=False) as bar,
        ):
            self._check_start(file)
            position = file.tell()
            for number, line in enumerate(file, start=1):
                bar.update(len(line))
                try:
                    image_id = line.split(b"\t", 1)[0].decode("utf-8")
                except UnicodeDecodeError as error:
                    raise UserError(
                        f"{self.path}: the image id in line {number} is not UTF-8 text; copy or extract the file again"
                    ) from error
                if image_id in offsets:
                    raise UserError(
                        f"{self.path}: line {number} repeats image {image_id.strip()[:100]}; ids must be unique"
                    )
                offsets[image_id] = position
                checksums.append(zlib.crc32(line))
                position += len(line)
        return _Index(size, offsets, checksums)

    def _check_start(self, file: BinaryIO) -> None:
        """Stand before the first row, behind the mark of UTF-8 if there is one; refuse what is no text."""
        start = file.read(_START)
        if b"\0" in start:
            raise UserError(
                f"{self.path}: no TSV file of features, as it holds zero bytes; unpack it if it is packed, or copy or "
                "extract the file again"
            )
        file.seek(len(codecs.BOM_UTF8) if start.startswith(codecs.BOM_UTF8) else 0)

    def read(self, image_id: str) -> RegionFeatures:
        start = self.offsets[image_id]
        with reading(self.path), self.path.open("rb") as file:
            file.seek(start)
            line = file.readline()
        if self._checksums is not None and zlib.crc32(line) != self._checksums[np.searchsorted(self._starts, start)]:
            raise UserError(
                f"{self.path}: the row of image {image_id} is not as it was written (its checksum differs); copy or "
                f"extract the file again; if it was changed on purpose, remove {sidecar(self.path).name}, it is made "
                "again"
            )
        try:
            return parse_row(line.decode("utf-8").rstrip("\r\n"))
        except (ValueError, MemoryError, binascii.Error) as error:
            raise UserError(
                f"{self.path}: the row of image {image_id} is damaged ({str(error)[:200]}); copy or extract the file "
                "again"
            ) from error


def parse_row(line: str) -> RegionFeatures:
    """One row of either TSV file; raises ValueError for a damaged one."""
    cells = line.split("\t")
    names = next((names for names in TSV_COLUMNS.values() if len(names) == len(cells)), None)
    if names is None:
        raise ValueError(f"it has {len(cells)} columns, expected 6 (bottom-up attention) or 10 (LXMERT)")
    row = dict(zip(names, cells, strict=True))
    number = whole_number(row["num_boxes"])
    if number < 0:
        raise ValueError(f"it has {number} boxes")
    features = _array(row["features"], np.float32)
    if number and len(features) % number:
        raise ValueError(f"{len(features)} feature values for {number} boxes")
    boxes = _array(row["boxes"], np.float32)
    if len(boxes) != 4 * number:
        raise ValueError(f"{len(boxes)} coordinates for {number} boxes")
    is_lxmert = "img_id" in row
    return RegionFeatures(
        image_id=row[names[0]],
        image_size=tuple(whole_number(row[f"{'img' if is_lxmert else 'image'}_{side}"]) for side in "hw"),
        boxes=boxes.reshape(-1, 4),
        features=features.reshape(number, -1 if number else 0),
        **{field: _array(row[name], OPTIONAL[field]) for name, field in LXMERT_FIELDS.items() if is_lxmert},
    )


def _array(cell: str, kind: type) -> np.ndarray:
    return np.frombuffer(base64.b64decode(cell, validate=True), dtype=kind).copy()


class Hdf5Store(FeatureStore):
    """One HDF5 file, which stays open because opening it takes as long as reading an image."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: dict[int, Any] = {}  # by process
        try:
            with self._open() as file:
                check_datasets(file, self.path.stat().st_size)
                self.ids = [name.decode("utf-8") for name in file["ids"][:]]
                if len(set(self.ids)) < len(self.ids):
                    raise ValueError("two images have one id")
                self.starts = as_column("starts", file["starts"][:], np.int64)
                self.sizes = as_column("image_sizes", file["image_sizes"][:], np.int64)
                stamp = parsed_json(file.attrs["stamp"], "its stamp is") if "stamp" in file.attrs else None
                check_starts(self.starts, self.sizes, len(self.ids), len(file["boxes"]))
        except (OSError, KeyError, ValueError, TypeError, AttributeError, RuntimeError, MemoryError) as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"{path}: no readable HDF5 file of region features ({reason}); copy or make it again"
            ) from error
        self.stamp = stamp
        self.rows = {image_id: row for row, image_id in enumerate(self.ids)}

    def _open(self) -> Any:
        return import_optional("h5py").File(self.path, "r")

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_files": {}}

    def read(self, image_id: str) -> RegionFeatures:
        process, row = os.getpid(), self.rows[image_id]
        rows = slice(int(self.starts[row]), int(self.starts[row + 1]))
        try:
            if process not in self._files:
                self._files[process] = self._open()
            file = self._files[process]
            columns = {
                name: as_column(name, file[name][rows]) for name in ("boxes", "features", *OPTIONAL) if name in file
            }
            if "image_feature" in file:
                columns["image_feature"] = as_column("image_feature", file["image_feature"][row])
            return RegionFeatures(image_id=image_id, image_size=tuple(self.sizes[row].tolist()), **columns)
        except (OSError, KeyError, ValueError, TypeError, RuntimeError, MemoryError) as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"{self.path}: image {image_id} is damaged ({reason}); copy or make the file again"
            ) from error


class LmdbStore(FeatureStore):
    """One LMDB file, whose pages are read like those of any file (`lmdb_pages.py` says why)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = OpenFiles()
        try:
            self._places = {key.decode("utf-8"): place for key, place in find_values(path).items()}
            stamp = self._places.pop(STAMP_KEY.decode(), None)
            self.stamp = None if stamp is None else parsed_json(self._files.read(path, *stamp), "its stamp is")
        except (DamagedLmdbError, ValueError, struct.error, OSError, MemoryError) as error:
            reason = str(error)[:200]
            raise UserError(f"{path}: no readable LMDB file ({reason}); copy or make it again") from error
        self.ids = list(self._places)

    def read(self, image_id: str) -> RegionFeatures:
        content = self._files.read(self.path, *self._places[image_id])
        return load_npz(io.BytesIO(content), f"{self.path}: image {image_id}")


def _read_object(path: Path) -> dict[str, Any]:
    """A small JSON file with an object."""
    content = read_json(path, "facts about the features")
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds a {type(content).__name__}, expected an object; remove or write it again")
    return content


def import_optional(name: str) -> Any:
    """The module h5py or lmdb; raises UserError with the command that installs it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        kind = {"h5py": "HDF5", "lmdb": "LMDB"}[name]
        raise UserError(
            f"{kind} files need the package {name}; install it with: pip install 'e2e-vl[features]'"
        ) from error
