"""COCO JSON as annotation tools export it: CVAT, Label Studio, Roboflow, coco-annotator, VIA."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from detector.io import read_json
from e2e_vl.data.annotation_tools.files import relative_name
from e2e_vl.data.annotation_tools.records import (
    Annotation,
    Remarks,
    enclosing_corners,
    split_of_folders,
    split_of_path,
)
from e2e_vl.io import FourNumbers, Id, Name, Record, require_unique


class _Image(Record):
    id: Id
    file_name: Name
    width: float | None = None
    height: float | None = None

    @property
    def size(self) -> tuple[int, int] | None:
        """(width, height); None if the file does not state both."""
        if not self.width or not self.height:
            return None
        return round(self.width), round(self.height)


class _Annotation(Record):
    image_id: Id
    category_id: Id
    id: Id | None = None
    bbox: list[float | None] | None = None  # x, y, width, height
    segmentation: Any = None
    iscrowd: int | bool | None = None
    attributes: Any = None  # CVAT's, as an object; other tools write null or a list
    rotation: float | None = None  # not of a known tool


class _Category(Record):
    id: Id
    name: str | int


class _CocoFile(Record):
    images: list[_Image]
    annotations: list[_Annotation]
    categories: list[_Category]


def read_coco(path: Path, source: Path, remarks: Remarks) -> Iterator[Annotation]:
    """Read the boxes of a file, without categories that have no boxes, such as the first one of Roboflow's files."""
    content = read_json(path, _CocoFile)
    file_name = relative_name(path, source)
    remedy = "export again, or give new ids"
    require_unique((str(image.id) for image in content.images), f"{path}: image", remedy)
    require_unique((str(category.id) for category in content.categories), f"{path}: category", remedy)
    images = {str(image.id): image for image in content.images}
    labels = {str(category.id): str(category.name) for category in content.categories}
    for number, row in enumerate(content.annotations, start=1):
        annotation_id = number if row.id is None else str(row.id)
        where = f"annotation {annotation_id}"
        if not source.is_file():
            where = f"{file_name}, {where}"
        image = images.get(str(row.image_id))
        label = labels.get(str(row.category_id))
        if image is None or label is None:
            missing_id = f"image_id {row.image_id}" if image is None else f"category_id {row.category_id}"
            remarks.refuse("annotations whose image or category the file does not list", f"{where} ({missing_id})")
            continue
        corners = _corners(row)
        if corners is None:
            remarks.refuse("annotations without a bbox of four numbers", where)
            continue
        attributes = row.attributes if isinstance(row.attributes, dict) else {}
        try:
            degrees = float(attributes.get("rotation") or 0)
        except (TypeError, ValueError):
            degrees = math.nan
        if row.rotation or not math.isfinite(degrees):
            remarks.refuse("rotations that are not written as CVAT does", where, "export upright boxes")
            continue
        if degrees % 180:
            corners = _around_rotated(corners, degrees)
            remarks.note("rotated boxes became the upright boxes around them", where)
        yield Annotation(
            where,
            image.file_name,
            label,
            corners,
            id=annotation_id,
            image_size=image.size,
            text=_expression(attributes, where, remarks),
            folder_split=split_of_path(file_name) or split_of_folders(image.file_name),
            is_crowd=bool(row.iscrowd),
        )


def _corners(row: _Annotation) -> FourNumbers | None:
    """Return x1, y1, x2, y2 of the bbox, or of the box around the polygons where there is no bbox."""
    if row.bbox and len(row.bbox) == 4 and None not in row.bbox:
        x, y, width, height = row.bbox
        return x, y, x + width, y + height
    if row.bbox or not isinstance(row.segmentation, list):
        return None
    polygons = [polygon for polygon in row.segmentation if isinstance(polygon, list)]
    numbers = list(itertools.chain.from_iterable(polygons))
    if len(numbers) < 6 or len(numbers) % 2 or not all(isinstance(number, int | float) for number in numbers):
        return None
    return enclosing_corners(np.array(numbers, dtype=np.float64).reshape(-1, 2))


def _expression(attributes: dict[str, Any], where: str, remarks: Remarks) -> str | None:
    """Return the attribute `expression`; CVAT exports a text of digits as a number."""
    value = attributes.get("expression")
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    remarks.note("attributes named expression that are no text are not read", where)
    return None


def _around_rotated(corners: FourNumbers, degrees: float) -> FourNumbers:
    """Return the corners of the upright box around a box that is rotated about its centre, as CVAT exports it."""
    x1, y1, x2, y2 = corners
    centre = np.array([x1 + x2, y1 + y2]) / 2
    half_width = (x2 - x1) / 2
    half_height = (y2 - y1) / 2
    cosine = abs(np.cos(np.radians(degrees)))
    sine = abs(np.sin(np.radians(degrees)))
    half_size = np.array([half_width * cosine + half_height * sine, half_width * sine + half_height * cosine])
    return enclosing_corners(np.stack([centre - half_size, centre + half_size]))
