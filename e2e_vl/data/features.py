"""Region features on disk: what is kept of an image, readers and writers of every format.

A store may be copied to worker processes. Neither file positions nor LMDB's maps may be shared with a forked worker, so
every process opens the files itself.

Formats
    npz      one file per image, named by its id
    tsv      bottom-up attention: image_id, image_w, image_h, num_boxes, boxes, features
    lxmert   img_id, img_h, img_w, objects_id, objects_conf, attrs_id, attrs_conf, num_boxes, boxes, features
    hdf5     the regions of all images one after the other, `starts` [N + 1] says where each image begins
    lmdb     image id -> content of an `.npz` file
In both TSV files, arrays are base64 of float32 (ids: int64), and boxes are xyxy in pixels of the original image.

Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

import abc
import base64
import contextlib
import dataclasses
import functools
import importlib
import io
import json
import os
import zipfile
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
from tqdm.auto import tqdm

from detector.errors import MissingFileError, UserError, first_line, user_path
from detector.io import atomic_file, read_json, write_json
from e2e_vl.io import text_of_name

# Columns that a file may lack, with their types; R rows each.
OPTIONAL = {
    "scores": np.float32,
    "classes": np.int64,
    "attributes": np.int64,
    "attribute_scores": np.float32,
    "box_ids": np.int64,
}
TOLERANCE = 1.0  # pixels by which a box may leave its image
ROUNDING = 1e-3  # by which a probability may leave 0 to 1: half precision
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

    def check(self, image_id: str, where: str) -> None:
        """Check what was read from a file against the image that was asked for.

        Boxes may leave the image by `TOLERANCE`, since some projects count pixels from 1 or round. A box without area
        passes here: how it is placed decides about it.

        Args:
            where: names the file and the image in errors.

        Raises:
            UserError: it is another image's, the image has no size, a number is NaN or infinite, a box is inverted or
                outside of the image, or a score is no probability.
        """
        height, width = self.image_size
        problem = None
        if self.image_id != image_id:
            problem = f"holds the features of image {self.image_id!r} in the place of image {image_id!r}"
        elif min(height, width) < 1:
            problem = f"says that the image has {width} x {height} pixels"
        for name, values in {**self.columns(), "image_feature": self.image_feature}.items():
            if values is not None and not np.isfinite(values).all():
                problem = problem or f"{name} has values that are NaN or infinite"
        low, high = self.boxes[:, :2], self.boxes[:, 2:]
        size = np.array([width, height], dtype=np.float32)
        wrong = (low > high) | (low < -TOLERANCE) | (high > size + TOLERANCE)
        if problem is None and wrong.any():
            row = int(wrong.any(axis=1).argmax())
            values = ", ".join(f"{value:g}" for value in self.boxes[row])
            problem = f"box {row} [{values}] is inverted or leaves the {width} x {height} image"
        for name in ("scores", "attribute_scores"):
            values = getattr(self, name)
            if values is not None and len(values) and not -ROUNDING <= values.min() <= values.max() <= 1 + ROUNDING:
                problem = problem or f"{name} lie between {values.min():g} and {values.max():g}, not 0 and 1"
        if problem is not None:
            raise UserError(f"{where}: {problem}; extract the image again")


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
        UserError: the file is damaged or lacks an array.
    """
    try:
        with np.load(file, allow_pickle=False) as arrays:
            names = [name for name in ("image_feature", *OPTIONAL) if name in arrays]
            return RegionFeatures(
                image_id=str(arrays["image_id"]),
                image_size=tuple(arrays["image_size"].tolist()),
                **{name: to_column(name, arrays[name]) for name in ("boxes", "features", *names)},
            )
    except (ValueError, KeyError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(
            f"{where or file}: no readable file of region features ({first_line(error)}); extract the image again"
        ) from error


def to_column(name: str, values: np.ndarray) -> np.ndarray:
    """An array of a file in the type of its column: float32 or int64.

    Raises:
        ValueError: whole numbers are expected, and there are others.
    """
    kind = OPTIONAL.get(name, np.float32)
    if kind is np.int64 and (values != np.floor(values)).any():
        raise ValueError(f"{name} has values that are no whole numbers")
    return values.astype(kind, copy=False)


# Readers


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
        """Regions of one image, checked to be this image's."""
        if image_id not in self:
            raise UserError(f"{self.path}: has no features of image {image_id}; extract them with the others")
        record = self.read(image_id)
        record.check(image_id, f"{self.path}: image {image_id}")
        return record

    @functools.cached_property
    def _known(self) -> frozenset[str]:
        return frozenset(self.ids)

    def __contains__(self, image_id: str) -> bool:
        return image_id in self._known


def open_features(path: str | Path) -> FeatureStore:
    """Open region features of any format that e2e-vl extract writes.

    Raises:
        MissingFileError: nothing there.
        UserError: not such a file, one without any image, or the package that reads it is not installed.
    """
    path = user_path(path)
    if not path.exists():
        raise MissingFileError(f"{path}: there are no region features; make them with e2e-vl extract")
    kinds = {".tsv": TsvStore, ".h5": Hdf5Store, ".hdf5": Hdf5Store, ".lmdb": LmdbStore}
    if path.suffix not in kinds and not path.is_dir():
        raise UserError(f"{path}: region features are a folder of .npz files or end in {', '.join(kinds)}")
    store = NpzStore(path) if path.is_dir() else kinds[path.suffix](path)
    if not store.ids:
        raise UserError(f"{path}: there are no features of any image; copy or extract them again")
    return store


class NpzStore(FeatureStore):
    """A folder of `.npz` files; their paths in it without the suffix are the quoted ids."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._names = {text_of_name(name): name for name in sorted(npz_names(path))}
        self.ids = list(self._names)
        stamp = path / STAMP_NAME
        self.stamp = read_json(stamp, dict[str, Any]) if stamp.is_file() else None

    def read(self, image_id: str) -> RegionFeatures:
        return load_npz(self.path / f"{self._names[image_id]}.npz")


def npz_names(folder: Path) -> list[str]:
    """Paths of the `.npz` files of a folder, relative to it and without their suffix."""
    return [file.relative_to(folder).as_posix().removesuffix(".npz") for file in folder.rglob("*.npz")]


def sidecar(path: Path) -> Path:
    """The file beside a TSV file that holds its stamp and its index."""
    return path.with_name(path.name + ".json")


class _Index(msgspec.Struct):
    """Where the rows of a TSV file of so many bytes begin."""

    bytes: int
    offsets: dict[str, int]


class _Sidecar(msgspec.Struct):
    """The file beside a TSV file."""

    stamp: dict[str, Any] | None = None
    index: _Index | None = None


class TsvStore(FeatureStore):
    """A TSV file of bottom-up attention or of LXMERT, told apart by their numbers of columns.

    Rows are found by their offsets: from the file beside it if that fits, else the whole file is read once, and the
    offsets are written beside it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        beside = sidecar(path)
        content = read_json(beside, _Sidecar) if beside.is_file() else _Sidecar()
        if content.index is None or content.index.bytes != path.stat().st_size:
            content.index = self._scan()
            with contextlib.suppress(PermissionError):  # in a folder of someone else it is made anew every time
                write_json(beside, msgspec.to_builtins(content))
        self.stamp = content.stamp
        self.offsets = content.index.offsets
        self.ids = list(self.offsets)

    def _scan(self) -> _Index:
        offsets: dict[str, int] = {}
        position, size = 0, self.path.stat().st_size
        title = f"indexing {self.path.name}"
        with self.path.open("rb") as file, tqdm(total=size, desc=title, unit="B", unit_scale=True, delay=1) as bar:
            for number, line in enumerate(file, start=1):
                image_id = line.split(b"\t", 1)[0].decode("utf-8", "replace")
                if image_id in offsets:
                    raise UserError(f"{self.path}: line {number} repeats image {image_id}; ids must be unique")
                offsets[image_id] = position
                position += len(line)
                bar.update(len(line))
        return _Index(size, offsets)

    def read(self, image_id: str) -> RegionFeatures:
        with self.path.open("rb") as file:
            file.seek(self.offsets[image_id])
            line = file.readline()
        try:
            return parse_row(line.decode("utf-8").rstrip("\r\n"))
        except ValueError as error:
            raise UserError(
                f"{self.path}: the row of image {image_id} is damaged ({first_line(error)}); copy or extract the file "
                "again"
            ) from error


def parse_row(line: str) -> RegionFeatures:
    """One row of either TSV file; raises ValueError for a damaged one."""
    cells = line.split("\t")
    names = next((names for names in TSV_COLUMNS.values() if len(names) == len(cells)), None)
    if names is None:
        raise ValueError(f"it has {len(cells)} columns, expected 6 (bottom-up attention) or 10 (LXMERT)")
    row = dict(zip(names, cells, strict=True))
    number = int(row["num_boxes"])
    is_lxmert = "img_id" in row
    return RegionFeatures(
        image_id=row[names[0]],
        image_size=tuple(int(row[f"{'img' if is_lxmert else 'image'}_{side}"]) for side in "hw"),
        boxes=_array(row["boxes"], np.float32).reshape(number, 4),
        features=_array(row["features"], np.float32).reshape(number, -1 if number else 0),
        **{field: _array(row[name], OPTIONAL[field]) for name, field in LXMERT_FIELDS.items() if is_lxmert},
    )


def _array(cell: str, kind: type) -> np.ndarray:
    return np.frombuffer(base64.b64decode(cell, validate=True), dtype=kind).copy()


class Hdf5Store(FeatureStore):
    """One HDF5 file, which stays open because opening it takes as long as reading an image."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with import_optional("h5py").File(path, "r") as file:
                self.ids = [one.decode() for one in file["ids"][:]]
                self.starts, self.sizes = file["starts"][:].astype(np.int64), file["image_sizes"][:].astype(np.int64)
                self.stamp = json.loads(file.attrs["stamp"]) if "stamp" in file.attrs else None
                if len(self.starts) != len(self.ids) + 1 or self.starts[-1] != len(file["boxes"]):
                    raise ValueError("its starts do not fit its ids and boxes")
        except (OSError, KeyError, ValueError) as error:
            raise UserError(
                f"{path}: no readable HDF5 file of region features ({first_line(error)}); copy or make it again"
            ) from error
        self.rows = {image_id: row for row, image_id in enumerate(self.ids)}

    def read(self, image_id: str) -> RegionFeatures:
        file, row = _open(_hdf5_file, self.path), self.rows[image_id]
        rows = slice(self.starts[row], self.starts[row + 1])
        try:
            names = [name for name in OPTIONAL if name in file]
            columns = {name: to_column(name, file[name][rows]) for name in ("boxes", "features", *names)}
            if "image_feature" in file:
                columns["image_feature"] = to_column("image_feature", file["image_feature"][row])
        except (OSError, KeyError, ValueError) as error:
            raise UserError(
                f"{self.path}: image {image_id} is damaged ({first_line(error)}); copy or make the file again"
            ) from error
        return RegionFeatures(image_id=image_id, image_size=tuple(self.sizes[row].tolist()), **columns)


def _hdf5_file(path: Path) -> Any:
    return import_optional("h5py").File(path, "r")


class LmdbStore(FeatureStore):
    """One LMDB file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with _open(_lmdb_environment, path).begin() as transaction:
                self.ids = [key.decode() for key in transaction.cursor().iternext(values=False) if key != STAMP_KEY]
                stamp = transaction.get(STAMP_KEY)
        except import_optional("lmdb").Error as error:
            raise UserError(f"{path}: no readable LMDB file ({first_line(error)}); copy or make it again") from error
        self.stamp = None if stamp is None else json.loads(stamp)

    def read(self, image_id: str) -> RegionFeatures:
        with _open(_lmdb_environment, self.path).begin() as transaction:
            content = transaction.get(image_id.encode())
        return load_npz(io.BytesIO(content), f"{self.path}: image {image_id}")


def _lmdb_environment(path: Path) -> Any:
    return import_optional("lmdb").open(str(path), subdir=False, readonly=True, lock=False, readahead=False)


_handles: dict[Path, tuple[tuple[int, int], Any]] = {}


def _open(opener: Callable[[Path], Any], path: Path) -> Any:
    """An open file, once per process and version of the file: LMDB refuses to open one twice, also after a fork."""
    version = os.getpid(), path.stat().st_mtime_ns
    if path in _handles and _handles[path][0] != version:
        _handles.pop(path)[1].close()
    if path not in _handles:
        _handles[path] = version, opener(path)
    return _handles[path][1]


def import_optional(name: str) -> Any:
    """The module h5py or lmdb; raises UserError with the command that installs it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        kind = {"h5py": "HDF5", "lmdb": "LMDB"}[name]
        raise UserError(
            f"{kind} files need the package {name}; install it with: pip install 'e2e-vl[features]'"
        ) from error


# Writers


LMDB_COMMIT = 256  # images per transaction
LMDB_OVERHEAD = 2.0  # pages of the file per byte of content, at most; the space is reserved, not filled


def write_tsv(path: Path, records: Iterable[RegionFeatures], stamp: dict[str, Any], *, layout: str = "tsv") -> None:
    """Write a TSV file of the layout "tsv" (bottom-up attention) or "lxmert", and a JSON file with its stamp and the
    offset of each row.

    Raises:
        UserError: LXMERT's layout, and an image without classes or attributes.
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
        write_json(sidecar(path), {"stamp": stamp, "columns": TSV_COLUMNS[layout], "index": index})


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

    HDF5 keeps and compares checksums of the data (its filter fletcher32).
    """
    ids, sizes, starts = [], [], [0]
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
    """
    size = int(num_bytes * LMDB_OVERHEAD) + 2**26
    with atomic_file(path) as part:
        environment = import_optional("lmdb").open(str(part), subdir=False, map_size=size, lock=False, meminit=False)
        with contextlib.closing(environment):
            transaction = environment.begin(write=True)
            transaction.put(STAMP_KEY, json.dumps(stamp).encode())
            for number, record in enumerate(records, start=1):
                key, content = record.image_id.encode("utf-8"), io.BytesIO()
                if len(key) > environment.max_key_size():
                    raise UserError(
                        f"image {record.image_id}: the id has {len(key)} bytes, too many for LMDB; use hdf5"
                    )
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
    """Raise a UserError now rather than after hours: a name that does not fit, or a package that is not installed."""
    if layout == "npz":
        if path.is_file():
            raise UserError(f"{path} is a file; .npz files go to a folder")
    elif path.suffix not in SUFFIXES[layout]:
        raise UserError(f"{path}: a file of the format {layout} must end in {' or '.join(SUFFIXES[layout])}")
    elif layout in PACKAGES:
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
