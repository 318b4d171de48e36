"""The regions of one image as they are kept on disk, and the `.npz` file that holds them.

Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from detector.errors import UserError
from e2e_vl.data.storage.array_files import read_npz
from e2e_vl.whole_files import whole_file

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
        with whole_file(file) as part, part.open("wb") as stream:
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
