"""The regions of one image as they are kept on disk, and the `.npz` file that holds them.

Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

import dataclasses
import json
import zipfile
import zlib
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

# Columns that a file may lack, with their types; R rows each.
OPTIONAL = {
    "scores": np.float32,
    "classes": np.int64,
    "attributes": np.int64,
    "attribute_scores": np.float32,
    "box_ids": np.int64,
}
DAMAGED = (ValueError, KeyError, EOFError, OSError, zipfile.BadZipFile, zlib.error)  # what numpy raises for a bad .npz


@dataclasses.dataclass(frozen=True)
class RegionFeatures:
    """Boxes and features of one image; boxes are continuous xyxy in pixels of the original image, inside it.

    Raises:
        ValueError: arrays whose shapes do not fit together; the image is named.
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
            raise ValueError(
                f"image {self.image_id}: boxes {list(self.boxes.shape)} and features {list(self.features.shape)} do "
                "not fit together; expected [R, 4] and [R, D]"
            )
        for name in OPTIONAL:
            column = getattr(self, name)
            if column is not None and column.shape != (len(self),):
                raise ValueError(f"image {self.image_id}: {name} {list(column.shape)} for {len(self)} boxes")
        whole = self.image_feature
        if whole is not None and whole.shape != self.features.shape[1:]:
            raise ValueError(
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
    arrays: dict[str, Any] = dict(record.columns())
    if record.image_feature is not None:
        arrays["image_feature"] = record.image_feature
    if stamp is not None:
        arrays["stamp"] = np.array(json.dumps(stamp))
    np.savez(file, image_id=np.array(record.image_id), image_size=np.array(record.image_size), **arrays)


def load_npz(file: Path | BinaryIO, where: str | None = None) -> RegionFeatures:
    """Read the regions that `save_npz` wrote; `where` names an open file in errors.

    Raises:
        FileNotFoundError: no such file.
        ValueError: it is damaged or lacks an array.
    """
    where = where or str(file)
    try:
        with np.load(file, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        height, width = arrays.pop("image_size").tolist()
        return RegionFeatures(
            image_id=str(arrays["image_id"]),
            image_size=(height, width),
            boxes=arrays["boxes"].astype(np.float32, copy=False),
            features=arrays["features"].astype(np.float32, copy=False),
            image_feature=arrays.get("image_feature"),
            **{name: arrays[name].astype(kind, copy=False) for name, kind in OPTIONAL.items() if name in arrays},
        )
    except FileNotFoundError:
        raise
    except DAMAGED as error:
        raise ValueError(f"{where}: no readable file of region features ({error}); extract the image again") from error
