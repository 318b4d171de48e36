"""Writers of region features; `stores.py` describes the formats.

Each takes the regions of all images in turn, never all at once, and puts the finished file in its place in one step.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from detector.errors import UserError
from e2e_vl.data.storage.features.record import RegionFeatures, save_npz
from e2e_vl.data.storage.features.stores import LXMERT_FIELDS, STAMP_KEY, TSV_COLUMNS, import_optional, sidecar
from e2e_vl.whole_files import json_text, whole_file, write_text

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
    with whole_file(path) as part:
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
    with whole_file(path) as part, import_optional("h5py").File(part, "w", libver=("v110", "v110")) as file:
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
    with whole_file(path) as part:
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
