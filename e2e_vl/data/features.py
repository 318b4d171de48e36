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
import contextlib
import dataclasses
import importlib
import io
import itertools
import json
import logging
import math
import os
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec
import numpy as np
from msgspec import Meta
from tqdm.auto import tqdm

from detector.errors import MissingFileError, UserError, reading, user_path
from detector.io import atomic_file, json_text, write_text
from e2e_vl.data.storage.array_files import read_npz
from e2e_vl.data.storage.files import read_json
from e2e_vl.data.storage.index_files import OpenFiles, one_process
from e2e_vl.data.storage.lmdb_pages import DamagedLmdbError, find_values
from e2e_vl.io import id_of, inside, name_of
from e2e_vl.records import Record, checked, parsed_json, whole_number

# The regions of one image as they are kept on disk, and the `.npz` file that holds them.


# Columns that a file may lack, with their types; R rows each.
OPTIONAL = {
    "scores": np.float32,
    "classes": np.int64,
    "attributes": np.int64,
    "attribute_scores": np.float32,
    "box_ids": np.int64,
}
LONGEST_SIDE = 10**9  # of an image, pixels
TOLERANCE = 1.0  # pixels by which a box may leave its image
ROUNDING = 1e-3  # by which a probability may leave 0 to 1: half precision


@dataclasses.dataclass(frozen=True)
class RegionFeatures:
    """Boxes and features of one image; boxes are continuous xyxy in pixels of the original image, inside it.

    Raises:
        UserError: arrays whose shapes do not fit together; the image is named.
    """

    image_id: str
    image_size: tuple[int, int]  # (height, width) of the original image, after its EXIF rotation
    boxes: np.ndarray  # float32 [R, 4]
    features: np.ndarray  # float32 [R, D]
    scores: np.ndarray | None = None  # float32 [R], probability of the class
    classes: np.ndarray | None = None  # int64 [R], 0 .. K-1
    attributes: np.ndarray | None = None  # int64 [R], most probable attribute, 0 .. A-1
    attribute_scores: np.ndarray | None = None  # float32 [R], its probability
    box_ids: np.ndarray | None = None  # int64 [R], annotation ids of given boxes
    image_feature: np.ndarray | None = None  # float32 [D], the feature of the whole image

    def __post_init__(self) -> None:
        if self.boxes.shape != (len(self), 4) or self.features.ndim != 2 or len(self.features) != len(self):
            raise UserError(
                f"image {self.image_id}: boxes {list(self.boxes.shape)} and features {list(self.features.shape)} do "
                "not fit together; expected [R, 4] and [R, D]"
            )
        if len(self) and not self.features.shape[1]:
            raise UserError(f"image {self.image_id}: the features of its {len(self)} regions have no columns")
        for name in OPTIONAL:
            column = getattr(self, name)
            if column is not None and column.shape != (len(self),):
                raise UserError(f"image {self.image_id}: {name} {list(column.shape)} for {len(self)} boxes")
        whole = self.image_feature
        if whole is not None and whole.shape != self.features.shape[1:]:
            raise UserError(
                f"image {self.image_id}: the whole image's feature has shape {list(whole.shape)}, the features of "
                f"the regions have {self.features.shape[1]} columns"
            )

    def __len__(self) -> int:
        return len(self.boxes)

    def columns(self) -> dict[str, np.ndarray]:
        """Names and arrays of R rows that are there: `boxes`, `features` and some of `OPTIONAL`."""
        names = ("boxes", "features", *OPTIONAL)
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


def save_npz(file: Path | BinaryIO, record: RegionFeatures, stamp: dict[str, Any] | None = None) -> None:
    """Write one image's regions; `stamp` (JSON) says how they were made."""
    if isinstance(file, Path):
        with atomic_file(file) as part, part.open("wb") as stream:
            save_npz(stream, record, stamp)
        return
    arrays: dict[str, Any] = dict(record.columns())
    if record.image_feature is not None:
        arrays["image_feature"] = record.image_feature
    if stamp is not None:
        arrays["stamp"] = np.array(json.dumps(stamp))
    np.savez(file, image_id=np.array(record.image_id), image_size=np.array(record.image_size), **arrays)


def load_npz(file: Path | BinaryIO, where: str | None = None) -> RegionFeatures:
    """Read the regions that `save_npz` wrote; `where` names an open file in errors.

    Raises:
        MissingFileError: no such file.
        UserError: it is damaged, lacks an array or claims more than it holds.
    """
    where = where or str(file)
    arrays = read_npz(file, where)
    try:
        height, width = as_column("image_size", arrays["image_size"], np.int64).reshape(2).tolist()
        names = ("boxes", "features", "image_feature", *OPTIONAL)
        columns = {name: as_column(name, arrays[name]) for name in names if name in arrays or name in names[:2]}
        return RegionFeatures(image_id=str(arrays["image_id"]), image_size=(height, width), **columns)
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise UserError(f"{where}: no readable file of region features ({error}); extract the image again") from error


def as_column(name: str, values: np.ndarray, kind: type[np.number] | None = None) -> np.ndarray:
    """An array of a file in the type of this project.

    Args:
        name: of the array, for the error.
        kind: float32 or int64; None: what the column of that name has.

    Raises:
        ValueError: it holds other things than numbers, or int64 is declared and it has fractions, NaN or numbers that
            are too large.
    """
    kind = kind or OPTIONAL.get(name, np.float32)
    if values.dtype.kind not in "fiu":
        raise ValueError(f"{name} holds {values.dtype}")
    is_small = kind is np.float32 or not values.size or _LEAST <= values.min() <= values.max() <= -_LEAST
    if not is_small or (kind is np.int64 and (values != np.floor(values)).any()):
        raise ValueError(f"{name} has values that are no whole numbers, or too large")
    return values.astype(kind, copy=False)


_LEAST = -(2**53)  # beyond it a float64 does not hold every whole number


def check_record(record: RegionFeatures, image_id: str, where: str) -> None:
    """Check what was read from a file against the image that was asked for.

    Boxes may leave the image by `TOLERANCE`, since some projects count pixels from 1 or round. A box without area
    passes here: how it is placed decides about it.

    Raises:
        UserError: it is another image's, the image has no size, a number is NaN or infinite, a box is inverted or lies
            outside of the image, a score is no probability, or a class or attribute is negative; the row is named.
    """
    remedy = "extract the image again"
    if record.image_id != image_id:
        raise UserError(
            f"{where}: holds the features of image {record.image_id[:100]!r} in the place of image {image_id!r}; files "
            f"or rows were exchanged, so {remedy}"
        )
    height, width = record.image_size
    if not (1 <= height <= LONGEST_SIDE and 1 <= width <= LONGEST_SIDE):
        raise UserError(f"{where}: says that the image has {width} x {height} pixels; {remedy}")
    columns = {**record.columns(), "image_feature": record.image_feature}
    for name in ("boxes", "features", "scores", "attribute_scores", "image_feature"):
        values = columns.get(name)
        if values is not None and not np.isfinite(values).all():
            row = "" if name == "image_feature" else f" in row {int((~np.isfinite(values)).nonzero()[0][0])}"
            raise UserError(f"{where}: {name} has values that are NaN or infinite{row}; {remedy}")
    low, high = record.boxes[:, :2], record.boxes[:, 2:]
    size = np.array([width, height], dtype=np.float32)
    _refuse(low > high, record.boxes, "is inverted", where)
    _refuse((low < -TOLERANCE) | (high > size + TOLERANCE), record.boxes, f"leaves the {width} x {height} image", where)
    for name in ("scores", "attribute_scores"):
        values = columns.get(name)
        if values is not None and len(values) and not -ROUNDING <= values.min() <= values.max() <= 1 + ROUNDING:
            raise UserError(f"{where}: {name} lie between {values.min():g} and {values.max():g}, not 0 and 1; {remedy}")
    for name in ("classes", "attributes"):
        values = columns.get(name)
        if values is not None and len(values) and values.min() < 0:
            raise UserError(f"{where}: {name} has the number {values.min()}; {remedy}")


def _refuse(wrong: np.ndarray, boxes: np.ndarray, what: str, where: str) -> None:
    if wrong.any():
        row = int(wrong.any(axis=1).argmax())
        values = ", ".join(f"{value:g}" for value in boxes[row])
        raise UserError(
            f"{where}: box {row} [{values}] {what}; expected x1, y1, x2, y2 in pixels of the original image, so "
            "extract the image again"
        )


# Checking an HDF5 file of region features before its data sets are read.


NEEDED = ("ids", "image_sizes", "starts", "boxes", "features")
RATIO = 20  # bytes of a data set per byte of the file; features are rarely packed better
SMALL = 1 << 26  # bytes that every data set may have
LARGEST_CHUNK = 1 << 26  # bytes that are read at once


def check_datasets(file: Any, size: int) -> None:
    """Check the data sets of an open `h5py.File`.

    Args:
        size: bytes of the file.

    Raises:
        ValueError: one is missing, lies in another file, has a type that is not plain, claims much more than the file
            holds, or is read in pieces that are too large.
    """
    rows: dict[str, int] = {}
    for name in (*NEEDED, *OPTIONAL, "image_feature"):
        if name not in NEEDED and file.get(name, getlink=True) is None:
            continue
        dataset = checked_dataset(file, name, size, "S" if name == "ids" else "biuf")
        rows[name] = dataset.shape[0]
    alike = {"boxes": ("features", *OPTIONAL), "ids": ("image_sizes", "image_feature")}
    for like, name in ((like, name) for like, names in alike.items() for name in names):
        if rows.get(name, rows[like]) != rows[like]:
            raise ValueError(f"{name} has {rows[name]} rows, and {like} {rows[like]}")


def checked_dataset(file: Any, name: str, size: int, kinds: str) -> Any:
    """A data set of an open `h5py.File` whose rows can be read.

    Args:
        size: bytes of the file.
        kinds: numpy's letters for the types that it may have.

    Raises:
        ValueError: it is missing, or see `check_datasets`.
    """
    import h5py

    link = file.get(name, getlink=True)  # opening one that leads to another file may wait for ever
    if link is None:
        raise ValueError(f"it has no {name}")
    dataset = file[name] if isinstance(link, h5py.HardLink) else None
    if not isinstance(dataset, h5py.Dataset) or dataset.is_virtual or dataset.external:
        raise ValueError(f"{name} is not a data set of the file itself")
    if (dataset.dtype.kind not in kinds and dataset.size) or not dataset.shape:
        raise ValueError(f"{name} holds {dataset.dtype} {list(dataset.shape or ())}")
    claimed = math.prod(dataset.shape) * dataset.dtype.itemsize
    if claimed > max(SMALL, RATIO * size) or (dataset.chunks is None and claimed > size):
        raise ValueError(f"{name} claims {claimed} bytes, and the file has {size}")
    if dataset.chunks is not None and math.prod(dataset.chunks) * dataset.dtype.itemsize > LARGEST_CHUNK:
        raise ValueError(f"{name} is stored in pieces of {list(dataset.chunks)}")
    return dataset


def check_starts(starts: np.ndarray, sizes: np.ndarray, images: int, regions: int) -> None:
    """Check the places of the images' regions.

    Raises:
        ValueError: they do not rise from 0 to the number of regions, or they or the sizes belong to another number of
            images.
    """
    if starts.shape != (images + 1,) or sizes.shape != (images, 2):
        raise ValueError(f"{images} images, but starts {list(starts.shape)} and image_sizes {list(sizes.shape)}")
    if starts[0] != 0 or starts[-1] != regions or (np.diff(starts) < 0).any():
        raise ValueError(f"its starts do not rise from 0 to the number of regions, {regions}")


logger = logging.getLogger(__name__)

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
    """A folder of `.npz` files; their paths in it without the suffix tell the ids, see `e2e_vl/io.py`."""

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


# Writers of region features; `stores.py` describes the formats.


LMDB_COMMIT = 256  # images per transaction
LMDB_OVERHEAD = 2.0  # pages of the file per byte of content, at most; the space is reserved, not filled


def write_tsv(path: Path, records: Iterable[RegionFeatures], stamp: dict[str, Any], *, layout: str = "tsv") -> None:
    """Write a TSV file of the layout "tsv" (bottom-up attention) or "lxmert", and a JSON file with its stamp, and the
    offset and the CRC-32 of each row.

    Raises:
        UserError: LXMERT's layout, and an image without classes or attributes.
    """
    offsets: dict[str, int] = {}
    checksums: list[int] = []
    position = 0
    with atomic_file(path) as part:
        with part.open("wb") as file:
            for record in records:
                line = "\t".join(_cells(record, layout)).encode() + b"\n"
                file.write(line)
                offsets[record.image_id] = position
                checksums.append(zlib.crc32(line))
                position += len(line)
        index = {"bytes": position, "offsets": offsets, "checksums": checksums}
        content = {"stamp": stamp, "columns": TSV_COLUMNS[layout], "index": index}
        write_text(sidecar(path), json_text(content, str(sidecar(path)), indent=1) + "\n")


def _cells(record: RegionFeatures, layout: str) -> list[str]:
    height, width = record.image_size
    arrays = {"boxes": record.boxes, "features": record.features}
    if layout == "lxmert":
        arrays |= {name: getattr(record, field) for name, field in LXMERT_FIELDS.items()}
    missing = [name for name, array in arrays.items() if array is None]
    if missing:
        raise UserError(f"image {record.image_id}: LXMERT's file needs {', '.join(missing)}, which were not extracted")
    plain = {
        **dict.fromkeys(("image_id", "img_id"), record.image_id),
        **dict.fromkeys(("image_h", "img_h"), str(height)),
        **dict.fromkeys(("image_w", "img_w"), str(width)),
        "num_boxes": str(len(record)),
    }
    encoded = {name: base64.b64encode(np.ascontiguousarray(array)).decode() for name, array in arrays.items()}
    return [{**plain, **encoded}[name] for name in TSV_COLUMNS[layout]]


def write_hdf5(path: Path, records: Iterable[RegionFeatures], stamp: dict[str, Any]) -> None:
    """Write one HDF5 file: columns of all regions; `ids`, `image_sizes` [N, 2] (height, width) and `starts` [N + 1].

    HDF5 itself keeps checksums of the data (its filter fletcher32), and in files of version 1.10 also of what says
    where these are; whoever reads the file checks them.
    """
    ids, sizes, starts = [], [], [0]
    with atomic_file(path) as part, import_optional("h5py").File(part, "w", libver=("v110", "v110")) as file:
        file.attrs["stamp"] = json.dumps(stamp)
        for record in records:
            for name, rows in record.columns().items():
                _append(file, name, rows)
            if record.image_feature is not None:
                _append(file, "image_feature", record.image_feature[None])
            ids.append(record.image_id.encode("utf-8"))
            sizes.append(record.image_size)
            starts.append(starts[-1] + len(record))
        _append(file, "ids", np.array(ids))
        _append(file, "image_sizes", np.array(sizes, dtype=np.int64).reshape(-1, 2))
        _append(file, "starts", np.array(starts, dtype=np.int64))


def _append(file: Any, name: str, rows: np.ndarray) -> None:
    if name not in file:
        more = {"maxshape": (None, *rows.shape[1:]), "chunks": (64, *rows.shape[1:]), "fletcher32": True}
        file.create_dataset(name, data=rows, **more)
        return
    dataset = file[name]
    dataset.resize(len(dataset) + len(rows), axis=0)
    if len(rows):
        dataset[-len(rows) :] = rows


def write_lmdb(path: Path, records: Iterable[RegionFeatures], stamp: dict[str, Any], *, num_bytes: int) -> None:
    """Write one LMDB file.

    Args:
        num_bytes: of all images' `.npz` files together; the file cannot grow beyond about twice of it.

    Raises:
        UserError: an image id that is too long for a key.
    """
    lmdb = import_optional("lmdb")
    size = int(num_bytes * LMDB_OVERHEAD) + 2**26
    with atomic_file(path) as part:
        environment = lmdb.open(str(part), subdir=False, map_size=size, lock=False, meminit=False)
        with contextlib.closing(environment):
            _fill(environment, records, stamp)


def _fill(environment: Any, records: Iterable[RegionFeatures], stamp: dict[str, Any]) -> None:
    """Put all records into an open LMDB file."""
    transaction = environment.begin(write=True)
    transaction.put(STAMP_KEY, json.dumps(stamp).encode())
    for number, record in enumerate(records, start=1):
        key = record.image_id.encode("utf-8")
        if key == STAMP_KEY:
            raise UserError(f"image {record.image_id}: LMDB's file keeps its stamp under this id; use hdf5.")
        if len(key) > environment.max_key_size():
            raise UserError(f"image {record.image_id}: the id has {len(key)} bytes, too many for LMDB; use hdf5")
        content = io.BytesIO()
        save_npz(content, record)
        transaction.put(key, content.getvalue())
        if number % LMDB_COMMIT == 0:
            transaction.commit()
            transaction = environment.begin(write=True)
    transaction.commit()


SUFFIXES = {"tsv": (".tsv",), "lxmert": (".tsv",), "hdf5": (".h5", ".hdf5"), "lmdb": (".lmdb",)}
PACKAGES = {"hdf5": "h5py", "lmdb": "lmdb"}
FORMATS = ("npz", *SUFFIXES)  # the folder of .npz files is written while the extraction goes on


def check_format(layout: str, path: Path) -> None:
    """Raise a ValueError now rather than after hours: a name that does not fit, or a package that is not installed."""
    if layout == "npz":
        if path.is_file():
            raise UserError(f"{path} is a file; .npz files go to a folder")
        return
    suffixes = SUFFIXES[layout]
    if path.suffix not in suffixes:
        raise UserError(f"{path}: a file of the format {layout} must end in {' or '.join(suffixes)}")
    if layout in PACKAGES:
        import_optional(PACKAGES[layout])


def write_features(
    layout: str, path: Path, records: Iterable[RegionFeatures], stamp: dict[str, Any], *, num_bytes: int
) -> None:
    """Write one of the single-file formats; see its writer."""
    if layout == "lmdb":
        write_lmdb(path, records, stamp, num_bytes=num_bytes)
    elif layout == "hdf5":
        write_hdf5(path, records, stamp)
    else:
        write_tsv(path, records, stamp, layout=layout)
