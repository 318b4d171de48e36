"""Region features on disk: readers and writers for all formats.

A store may be copied to worker processes. Each process opens the files itself, because forked workers must not share
file positions or LMDB environments.

Formats
    npz      one file per image, named after its id
    tsv      bottom-up attention: image_id, image_w, image_h, num_boxes, boxes, features
    lxmert   img_id, img_h, img_w, objects_id, objects_conf, attrs_id, attrs_conf, num_boxes, boxes, features
    hdf5     the regions of all images, concatenated; `starts` [N + 1] holds the first row of each image
    lmdb     image id -> contents of an `.npz` file; a file, or a folder with data.mdb
In both TSV files, arrays are base64 of float32 (ids: int64), and boxes are xyxy in pixels of the original image.
Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

import abc
import base64
import codecs
import contextlib
import dataclasses
import hashlib
import importlib
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote

import msgspec
import numpy as np
from tqdm.auto import tqdm
from typing_extensions import override

from detector.errors import MissingFileError, UserError, reading, user_path
from detector.io import atomic_file, read_json, write_json
from e2e_vl.data.box_checks import reach_outside, require_pixels
from e2e_vl.data.tables import SkippedRecords
from e2e_vl.io import files_in, require_unique
from e2e_vl.samples import BoxPredictions

# Columns with R rows, and their dtypes; the predicted ones are the fields of `BoxPredictions`
REQUIRED_COLUMNS = {"boxes": np.float32, "features": np.float32}
PREDICTED_COLUMNS = {
    "scores": np.float32,
    "classes": np.int64,
    "attributes": np.int64,
    "attribute_scores": np.float32,
}
OPTIONAL_COLUMNS = {**PREDICTED_COLUMNS, "box_ids": np.int64}
COLUMNS = {**REQUIRED_COLUMNS, **OPTIONAL_COLUMNS}
ROUNDING = 1e-3  # by which a probability may exceed [0, 1] (half precision)
STAMP_NAME = "stamp.json"
STAMP_KEY = b"__stamp__"  # in an LMDB file
LMDB_FILE = "data.mdb"  # in a folder
ZIP_START = b"PK\x03\x04"  # of an `.npz` file
TSV_COLUMNS = {
    "tsv": ("image_id", "image_w", "image_h", "num_boxes", "boxes", "features"),
    "lxmert": (
        "img_id",
        "img_h",
        "img_w",
        "objects_id",
        "objects_conf",
        "attrs_id",
        "attrs_conf",
        "num_boxes",
        "boxes",
        "features",
    ),
}
# Column of LXMERT's TSV file -> field of `BoxPredictions`
LXMERT_FIELDS = {
    "objects_id": "classes",
    "objects_conf": "scores",
    "attrs_id": "attributes",
    "attrs_conf": "attribute_scores",
}


@dataclasses.dataclass(frozen=True)
class RegionFeatures:
    """Boxes and features of one image; boxes are continuous xyxy in pixels of the original image, inside it."""

    image_id: str
    image_size: tuple[int, int]  # (height, width) of the original image, after EXIF rotation
    boxes: np.ndarray  # float32 [R, 4]
    features: np.ndarray  # float32 [R, D]
    predictions: BoxPredictions = BoxPredictions()
    box_ids: np.ndarray | None = None  # int64 [R], annotation ids, if the boxes were annotated
    image_feature: np.ndarray | None = None  # float32 [D], feature of the whole image

    @classmethod
    def from_columns(
        cls,
        image_id: str,
        image_size: tuple[int, int],
        columns: Mapping[str, np.ndarray],
        image_feature: np.ndarray | None = None,
    ) -> RegionFeatures:
        """Make the record of an image from the columns of a file; they are converted to their dtypes."""
        converted = {}
        for name, dtype in COLUMNS.items():
            if name in columns:
                converted[name] = columns[name].astype(dtype, copy=False)
        if image_feature is not None:
            image_feature = image_feature.astype(np.float32, copy=False)
        predicted = {name: converted[name] for name in PREDICTED_COLUMNS if name in converted}
        return cls(
            image_id,
            image_size,
            boxes=converted["boxes"],
            features=converted["features"],
            predictions=BoxPredictions(**predicted),
            box_ids=converted.get("box_ids"),
            image_feature=image_feature,
        )

    def __len__(self) -> int:
        return len(self.boxes)

    def columns(self) -> dict[str, np.ndarray]:
        """Return the arrays with R rows, by name: `boxes`, `features` and the `OPTIONAL_COLUMNS` that are not None."""
        columns = {"boxes": self.boxes, "features": self.features}
        for name in PREDICTED_COLUMNS:
            columns[name] = getattr(self.predictions, name)
        columns["box_ids"] = self.box_ids
        return {name: values for name, values in columns.items() if values is not None}

    def check(self, image_id: str, where: str) -> None:
        """Raise a UserError if these are not plausible regions of the requested image; `where` begins its message.

        Boxes may exceed the image a little, see `box_checks.reach_outside`. Empty boxes are accepted, normalised ones
        are not.
        """
        columns = self.columns()
        if len(self.image_size) != 2 or self.boxes.shape != (len(self), 4) or self.features.ndim != 2:
            raise UserError(
                f"{where}: the shapes of image_size {[len(self.image_size)]}, boxes {[*self.boxes.shape]} and features "
                f"{[*self.features.shape]} must be [2], [regions, 4] and [regions, values]; extract the image again"
            )
        height, width = self.image_size
        size = np.array([width, height], dtype=np.float32)
        scores = [columns[name] for name in ("scores", "attribute_scores") if name in columns]
        arrays = list(columns.values())
        if self.image_feature is not None:
            arrays.append(self.image_feature)
        problem = None
        if self.image_id != image_id:
            problem = f"has the features of image {self.image_id!r} instead of image {image_id!r}"
        elif {len(rows) for rows in columns.values()} != {len(self)}:
            problem = f"has columns of different lengths, {', '.join(columns)}"
        elif not all(np.isfinite(array).all() for array in arrays):
            problem = "has NaN or infinite values"
        elif any((rows < -ROUNDING).any() or (rows > 1 + ROUNDING).any() for rows in scores):
            problem = "has scores outside [0, 1]"
        else:
            is_inverted = (self.boxes[:, :2] > self.boxes[:, 2:]).any(axis=1)
            is_wrong = is_inverted | reach_outside(self.boxes, size)
            if is_wrong.any():
                box = self.boxes[is_wrong.argmax()].tolist()
                problem = (
                    f"has a box {box} that is inverted or exceeds the {width} x {height} image, as corners x1, y1, x2, "
                    "y2 in pixels of the original image"
                )
        if problem is not None:
            raise UserError(f"{where}: {problem}; extract the image again")
        require_pixels(self.boxes, where)


def save_npz(file: Path | BinaryIO, record: RegionFeatures, stamp: dict[str, Any] | None = None) -> None:
    """Write one image's regions; `stamp` (JSON) describes how they were extracted."""
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
    """Read regions written by `save_npz`; `where` names the file in error messages."""
    with reading(where or file, Exception), np.load(file, allow_pickle=False) as arrays:  # damage raises many types
        names = [name for name in COLUMNS if name in arrays or name in REQUIRED_COLUMNS]
        columns = {name: arrays[name] for name in names}
        image_feature = arrays.get("image_feature")
        image_id = str(arrays["image_id"])
        image_size = tuple(arrays["image_size"].tolist())
        return RegionFeatures.from_columns(image_id, image_size, columns, image_feature)


# Readers


class FeatureStore(abc.ABC):
    """Region features by image id."""

    path: Path  # the file or folder
    rows: dict[str, Any]  # image id -> where its record is, in the order of the file
    stamp: dict[str, Any] | None  # how the features were extracted; None if not in the file

    @property
    def ids(self) -> list[str]:
        return list(self.rows)

    @abc.abstractmethod
    def read(self, image_id: str) -> RegionFeatures:
        """Read the regions of an image in `ids`."""

    def __getitem__(self, image_id: str) -> RegionFeatures:
        """Read the regions of an image and check them with `RegionFeatures.check`."""
        if image_id not in self:
            example = next(reversed(self.rows), None)
            others = "of no image" if example is None else f"of images such as {example}"
            raise UserError(f"{self.path} has no features for image {image_id}, but {others}; extract them too")
        record = self.read(image_id)
        record.check(image_id, f"{self.path}: image {image_id}")
        return record

    def __contains__(self, image_id: str) -> bool:
        return image_id in self.rows


def open_features(path: str | Path) -> FeatureStore:
    """Open a file or folder of region features in any format."""
    path = user_path(path)
    if not path.exists():
        raise MissingFileError(f"{path} does not exist; extract the region features with e2e-vl extract")
    if (path / LMDB_FILE).is_file():
        return LmdbStore(path)
    if path.is_dir():
        return NpzStore(path)
    kinds = {".tsv": TsvStore, ".h5": Hdf5Store, ".hdf5": Hdf5Store, ".lmdb": LmdbStore}
    if path.suffix.lower() not in kinds:
        raise UserError(f"{path}: region features must be a folder of .npz files or end in {', '.join(kinds)}")
    return kinds[path.suffix.lower()](path)


class NpzStore(FeatureStore):
    """A folder of `.npz` files; the relative paths without suffix are the quoted image ids."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = npz_names(path)
        if not self.rows:
            raise UserError(f"{path}: the folder has no .npz files of region features")
        stamp = path / STAMP_NAME
        self.stamp = read_json(stamp, dict[str, Any]) if stamp.is_file() else None

    @override
    def read(self, image_id: str) -> RegionFeatures:
        return load_npz(self.path / self.rows[image_id])


def npz_names(folder: Path) -> dict[str, str]:
    """Return the path of each image's `.npz` file in a folder, relative to it, by image id in the order of the ids."""
    files = sorted(file.relative_to(folder) for file in files_in(folder, (".npz",)))
    return {unquote(file.with_suffix("").as_posix()): file.as_posix() for file in files}


def sidecar_path(path: Path) -> Path:
    """Return the path of the JSON file with the stamp and the index of a TSV file."""
    return path.with_name(path.name + ".json")


class _Index(msgspec.Struct):
    bytes: int  # of the TSV file
    offsets: dict[str, int]  # of the row of each image


class _Sidecar(msgspec.Struct):
    """The contents of the JSON file beside a TSV file."""

    stamp: dict[str, Any] | None = None
    index: _Index | None = None


class TsvStore(FeatureStore):
    """A TSV file of bottom-up attention or of LXMERT.

    The row offsets are in a JSON file beside it. If that is missing, the whole TSV file is scanned once.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        content = _Sidecar()
        if sidecar_path(path).is_file():
            content = read_json(sidecar_path(path), _Sidecar)
        if content.index is None or content.index.bytes != path.stat().st_size:
            content.index = self._scan()
            with contextlib.suppress(OSError):  # in a read-only folder the file is scanned every time
                write_json(sidecar_path(path), msgspec.to_builtins(content))
        self.stamp = content.stamp
        self.rows = content.index.offsets

    def _scan(self) -> _Index:
        """Find the rows of the file; of several rows of one image, the last one counts."""
        offsets: dict[str, int] = {}
        skipped = SkippedRecords(self.path)
        position = 0
        size = self.path.stat().st_size
        title = f"indexing {self.path.name}"
        with self.path.open("rb") as file, tqdm(total=size, desc=title, unit="B", unit_scale=True, delay=1) as bar:
            for line in file:
                if position == 0:
                    row = line.removeprefix(codecs.BOM_UTF8)
                    position = len(line) - len(row)
                    line = row
                if line.strip():
                    if not offsets:
                        self._check_columns(line)
                    image_id = line.split(b"\t", 1)[0].decode("utf-8", "replace")
                    if image_id in offsets:
                        skipped.add("rows of images that have a later row", image_id)
                    offsets[image_id] = position
                position += len(line)
                bar.update(len(line))
        skipped.log()
        return _Index(size, offsets)

    def _check_columns(self, line: bytes) -> None:
        """Raise a UserError if the first line is no row of a known format: other columns, compressed, UTF-16."""
        counts = [len(columns) for columns in TSV_COLUMNS.values()]
        number = line.count(b"\t") + 1
        if number not in counts or b"\0" in line:
            names = "; or ".join(", ".join(columns) for columns in TSV_COLUMNS.values())
            raise UserError(
                f"{self.path}: the first line is no row of region features in UTF-8, separated by tabs; the columns "
                f"are {names}."
            )

    @override
    def read(self, image_id: str) -> RegionFeatures:
        with self.path.open("rb") as file:
            file.seek(self.rows[image_id])
            line = file.readline()
        with reading(f"{self.path}: image {image_id}", ValueError):
            return parse_row(line.decode("utf-8").rstrip("\r\n"))


def parse_row(line: str) -> RegionFeatures:
    """Parse a row of a TSV file; the number of columns tells the format. ValueError if the row is damaged."""
    cells = line.split("\t")
    is_lxmert = len(cells) > len(TSV_COLUMNS["tsv"])
    if is_lxmert:
        columns = TSV_COLUMNS["lxmert"]
        prefix = "img"
    else:
        columns = TSV_COLUMNS["tsv"]
        prefix = "image"
    row = dict(zip(columns, cells, strict=True))
    num_boxes = _whole_number(row["num_boxes"])
    predicted = {}
    if is_lxmert:
        for name, field in LXMERT_FIELDS.items():
            predicted[field] = _array(row[name], PREDICTED_COLUMNS[field])
    return RegionFeatures(
        image_id=row[f"{prefix}_id"],
        image_size=(_whole_number(row[f"{prefix}_h"]), _whole_number(row[f"{prefix}_w"])),
        boxes=_array(row["boxes"], np.float32).reshape(num_boxes, 4),
        features=_array(row["features"], np.float32).reshape(num_boxes, -1 if num_boxes else 0),
        predictions=BoxPredictions(**predicted),
    )


def _whole_number(cell: str) -> int:
    """Parse an integer, which other tools also write as 100.0."""
    value = float(cell)
    if not value.is_integer():
        raise ValueError(f"{cell} is no whole number")
    return int(value)


def _array(cell: str, kind: type) -> np.ndarray:
    """Decode base64 to an array of a dtype."""
    return np.frombuffer(base64.b64decode(cell, validate=True), dtype=kind).copy()


class Hdf5Store(FeatureStore):
    """One HDF5 file, which stays open because opening it takes as long as reading an image."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with (
            reading(path, OSError, KeyError, ValueError, TypeError, RuntimeError),
            import_optional("h5py").File(path, "r") as file,
        ):
            ids = [_decode_id(image_id) for image_id in file["ids"][:]]
            self.starts = file["starts"][:].astype(np.int64)
            self.sizes = file["image_sizes"][:].astype(np.int64)
            self.stamp = json.loads(file.attrs["stamp"]) if "stamp" in file.attrs else None
            names = [name for name in COLUMNS if name in file]
            counts = {name: len(file[name]) for name in names}
            digest = file.attrs.get("index_sha256")
        self.rows = {image_id: row for row, image_id in enumerate(ids)}
        self._check_index(ids, counts)
        if digest is not None and digest != _index_digest(ids, self.sizes, self.starts):
            raise UserError(f"{path}: ids, image_sizes or starts have changed since it was written; extract it again")

    def _check_index(self, ids: list[str], counts: dict[str, int]) -> None:
        """Raise a UserError unless each image has its own rows in all columns."""
        num_images = len(ids)
        if len(self.rows) < num_images:
            require_unique(ids, f"{self.path}: image")
        self._check_shape("image_sizes", self.sizes, (num_images, 2))
        self._check_shape("starts", self.starts, (num_images + 1,))
        if self.starts[0] != 0:
            raise UserError(f"{self.path}: starts begins at {self.starts[0]} instead of 0; write it again")
        descending = np.flatnonzero(np.diff(self.starts) < 0)
        if len(descending):
            row = int(descending[0])
            raise UserError(
                f"{self.path}: image {ids[row]} would end at row {self.starts[row + 1]}, before its start at "
                f"{self.starts[row]}; write it again"
            )
        for name, count in counts.items():
            if self.starts[-1] != count:
                row = max(int(np.searchsorted(self.starts, count, side="right")) - 1, 0)
                raise UserError(
                    f"{self.path}: starts ends at row {self.starts[-1]}, but {name} has {count} rows, which is wrong "
                    f"from image {ids[min(row, num_images - 1)]} on; write it again"
                )

    def _check_shape(self, name: str, values: np.ndarray, expected: tuple[int, ...]) -> None:
        """Raise a UserError if an array of the index does not fit the number of ids."""
        if values.shape != expected:
            raise UserError(
                f"{self.path}: {name} has the shape {[*values.shape]}, but {len(self.rows)} ids need {[*expected]}; "
                "write it again"
            )

    @override
    def read(self, image_id: str) -> RegionFeatures:
        file = _open(import_optional("h5py").File, self.path)
        row = self.rows[image_id]
        rows = slice(self.starts[row], self.starts[row + 1])
        with reading(f"{self.path}: image {image_id}", OSError, KeyError, ValueError, TypeError, RuntimeError):
            names = [name for name in COLUMNS if name in file or name in REQUIRED_COLUMNS]
            columns = {name: file[name][rows] for name in names}
            image_feature = file["image_feature"][row] if "image_feature" in file else None
            image_size = tuple(self.sizes[row].tolist())
            return RegionFeatures.from_columns(image_id, image_size, columns, image_feature)


def _decode_id(image_id: bytes | str) -> str:
    """Return an image id as a string; h5py reads strings of HDF5 files as bytes."""
    if isinstance(image_id, bytes):
        return image_id.decode()
    return str(image_id)


def _index_digest(ids: Iterable[str], sizes: np.ndarray, starts: np.ndarray) -> str:
    """Return the SHA-256 of what says which rows belong to which image."""
    content = json.dumps([[*ids], np.asarray(sizes).tolist(), np.asarray(starts).tolist()])
    return hashlib.sha256(content.encode()).hexdigest()


class LmdbStore(FeatureStore):
    """One LMDB file, or a folder with it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path / LMDB_FILE if path.is_dir() else path
        with reading(path, import_optional("lmdb").Error), _open(_lmdb_environment, self._file).begin() as transaction:
            keys = (key for key in transaction.cursor().iternext(values=False) if key != STAMP_KEY)
            self.rows = {key.decode("utf-8", "replace"): key for key in keys}
            stamp = transaction.get(STAMP_KEY)
            first = next((transaction.get(key) for key in self.rows.values()), b"")
        if first and not first.startswith(ZIP_START):
            raise UserError(
                f"{path}: an LMDB file of another project, such as MMF, whose values are pickles instead of .npz "
                "files; extract the features with e2e-vl extract, or convert its values to .npz files"
            )
        self.stamp = None if stamp is None else json.loads(stamp)

    @override
    def read(self, image_id: str) -> RegionFeatures:
        with _open(_lmdb_environment, self._file).begin() as transaction:
            content = transaction.get(self.rows[image_id])
        return load_npz(io.BytesIO(content), f"{self.path}: image {image_id}")


def _lmdb_environment(path: Path) -> Any:
    """Open a file that has all its pages: reading a missing one would end the process (SIGBUS)."""
    environment = import_optional("lmdb").open(str(path), subdir=False, readonly=True, lock=False, readahead=False)
    expected = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
    if path.stat().st_size < expected:
        environment.close()
        raise UserError(f"{path}: cut off at {path.stat().st_size} of {expected} bytes; copy or download it again")
    return environment


_handles: dict[Path, tuple[tuple[int, int], Any]] = {}


def _open(opener: Callable[[Path], Any], path: Path) -> Any:
    """Open a file once per process and file version: LMDB cannot open a file twice, nor reuse it after a fork."""
    version = (os.getpid(), path.stat().st_mtime_ns)
    if path in _handles and _handles[path][0] != version:
        _handles.pop(path)[1].close()
    if path not in _handles:
        _handles[path] = (version, opener(path))
    return _handles[path][1]


def import_optional(name: str) -> Any:
    """Import h5py or lmdb.

    Raises:
        UserError: it is not installed; the message has the command that installs it.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        kind = {"h5py": "HDF5", "lmdb": "LMDB"}[name]
        raise UserError(f"{kind} files need the package {name}: pip install 'e2e-vl[features]'") from error


# Writers


LMDB_COMMIT = 256  # images per transaction
LMDB_OVERHEAD = 2.0  # maximum size of the file per byte of content; the space is reserved, not filled


def write_tsv(path: Path, records: Iterable[RegionFeatures], stamp: dict[str, Any], *, layout: str = "tsv") -> None:
    """Write a TSV file in the format "tsv" (bottom-up attention) or "lxmert", and a JSON file with its stamp and index.

    LXMERT's format needs classes and attributes.
    """
    offsets: dict[str, int] = {}
    position = 0
    with atomic_file(path) as part:
        with part.open("wb") as file:
            for record in records:
                line = "\t".join(_cells(record, layout)).encode() + b"\n"
                file.write(line)
                offsets[record.image_id] = position
                position += len(line)
        index = {"bytes": position, "offsets": offsets}
        write_json(sidecar_path(path), {"stamp": stamp, "columns": TSV_COLUMNS[layout], "index": index})


def _cells(record: RegionFeatures, layout: str) -> list[str]:
    height, width = record.image_size
    arrays = {"boxes": record.boxes, "features": record.features}
    if layout == "lxmert":
        arrays |= {name: getattr(record.predictions, field) for name, field in LXMERT_FIELDS.items()}
    cells = {
        "image_id": record.image_id,
        "img_id": record.image_id,
        "image_h": str(height),
        "img_h": str(height),
        "image_w": str(width),
        "img_w": str(width),
        "num_boxes": str(len(record)),
    }
    for name, array in arrays.items():
        cells[name] = base64.b64encode(np.ascontiguousarray(array)).decode()
    return [cells[name] for name in TSV_COLUMNS[layout]]


def write_hdf5(path: Path, records: Iterable[RegionFeatures], stamp: dict[str, Any]) -> None:
    """Write one HDF5 file: columns of all regions; `ids`, `image_sizes` [N, 2] (height, width) and `starts` [N + 1].

    HDF5 stores and verifies checksums of the data (filter fletcher32).
    """
    ids = []
    sizes = []
    starts = [0]
    with atomic_file(path) as part, import_optional("h5py").File(part, "w") as file:
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
        file.attrs["index_sha256"] = _index_digest((image_id.decode() for image_id in ids), sizes, starts)


def _append(file: Any, name: str, rows: np.ndarray) -> None:
    """Append rows to a column of an HDF5 file, which is made if it is not there."""
    if name not in file:
        layout = {"maxshape": (None, *rows.shape[1:]), "chunks": (64, *rows.shape[1:]), "fletcher32": True}
        if rows.dtype.kind == "f":  # HDF5 reads rows that a damaged index has lost as this value
            layout["fillvalue"] = np.nan
        file.create_dataset(name, data=rows, **layout)
        return
    dataset = file[name]
    dataset.resize(len(dataset) + len(rows), axis=0)
    if len(rows):
        dataset[-len(rows) :] = rows


def write_lmdb(path: Path, records: Iterable[RegionFeatures], stamp: dict[str, Any], *, num_bytes: int) -> None:
    """Write one LMDB file of at most about twice `num_bytes`, the size of all images' `.npz` files."""
    size = int(num_bytes * LMDB_OVERHEAD) + 2**26
    with atomic_file(path) as part:
        environment = import_optional("lmdb").open(str(part), subdir=False, map_size=size, lock=False, meminit=False)
        with contextlib.closing(environment):
            transaction = environment.begin(write=True)
            transaction.put(STAMP_KEY, json.dumps(stamp).encode())
            for number, record in enumerate(records, start=1):
                content = io.BytesIO()
                save_npz(content, record)
                transaction.put(record.image_id.encode("utf-8"), content.getvalue())
                if number % LMDB_COMMIT == 0:
                    transaction.commit()
                    transaction = environment.begin(write=True)
            transaction.commit()


SUFFIXES = {"tsv": (".tsv",), "lxmert": (".tsv",), "hdf5": (".h5", ".hdf5"), "lmdb": (".lmdb",)}
PACKAGES = {"hdf5": "h5py", "lmdb": "lmdb"}
FORMATS = ("npz", *SUFFIXES)  # the .npz files are written during extraction


def check_format(layout: str, path: Path) -> None:
    """Check the file name and the required package before hours of extraction."""
    if layout != "npz" and path.suffix.lower() not in SUFFIXES[layout]:
        raise UserError(f"{path}: a file in the format {layout} must end in {' or '.join(SUFFIXES[layout])}")
    if layout in PACKAGES:
        import_optional(PACKAGES[layout])


def _refuse_repeats(records: Iterable[RegionFeatures], path: Path) -> Iterator[RegionFeatures]:
    """Yield the records.

    Raises:
        UserError: an image id occurred before; only one of its records could be read again.
    """
    image_ids: set[str] = set()
    for record in records:
        if record.image_id in image_ids:
            raise UserError(f"{path}: two images have the id {record.image_id}; write them to different files")
        image_ids.add(record.image_id)
        yield record


def write_features(
    layout: str, path: Path, records: Iterable[RegionFeatures], stamp: dict[str, Any], *, num_bytes: int
) -> None:
    """Write one of the single-file formats; see its writer. No image may occur twice."""
    records = _refuse_repeats(records, path)
    if layout == "lmdb":
        write_lmdb(path, records, stamp, num_bytes=num_bytes)
    elif layout == "hdf5":
        write_hdf5(path, records, stamp)
    else:
        write_tsv(path, records, stamp, layout=layout)
