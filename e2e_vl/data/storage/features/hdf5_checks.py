"""Checking an HDF5 file of region features before its data sets are read.

A data set may claim terabytes that were never written, may be packed a thousandfold, and may lie in other files of the
machine. `writers.py` makes none of these.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from e2e_vl.data.storage.features.record import OPTIONAL

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
