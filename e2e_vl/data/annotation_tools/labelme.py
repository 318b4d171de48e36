"""LabelMe's JSON files, one per image (also those of X-AnyLabeling)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from detector.io import read_json
from e2e_vl.data.annotation_tools.files import relative_name
from e2e_vl.data.annotation_tools.records import Annotation, Remarks, beside, enclosing_corners, split_of_path
from e2e_vl.io import Record

_POINTS = {  # shape -> the points it needs; two points are opposite corners
    "rectangle": 2,
    "mask": 2,  # its bounding box; the pixels are in another field
    "polygon": 3,
    "circle": 2,  # its centre and a point of its edge
    "rotation": 4,  # of X-AnyLabeling
    "oriented_rectangle": 4,
}
_WITHOUT_AREA = ("point", "points", "line", "linestrip")


class _Shape(Record):
    label: str | int
    points: list[tuple[float, float]] | None = None
    shape_type: str | None = "polygon"
    description: str | None = None


class _LabelMe(Record, rename="camel"):
    shapes: list[_Shape]
    image_path: str | None = None
    image_width: float | None = None
    image_height: float | None = None


def read_labelme(path: Path, source: Path, remarks: Remarks) -> Iterator[Annotation]:
    """Read the boxes around the shapes of a file; the id of a box is the number of its shape, from 1."""
    content = read_json(path, _LabelMe)
    name = relative_name(path, source)
    stem = name.rpartition(".")[0]  # of the image, unless it was renamed
    image = beside(name, content.image_path) if content.image_path else stem
    size = None  # a file of another tool may not state it
    if content.image_width and content.image_height:
        size = (round(content.image_width), round(content.image_height))
    for number, shape in enumerate(content.shapes, start=1):
        where = f"{name}, shape {number}"
        kind = shape.shape_type or "polygon"
        points = np.array(shape.points or [], dtype=np.float64).reshape(-1, 2)
        if kind in _WITHOUT_AREA:
            remarks.note("points and lines are no boxes", where)
            continue
        if kind not in _POINTS:
            remedy = "draw rectangles, polygons or circles"
            remarks.refuse("shapes that are not known", f"{where} ({kind})", remedy)
            continue
        if len(points) < _POINTS[kind]:
            remarks.refuse("shapes with too few points", f"{where} ({kind} of {len(points)})")
            continue
        if kind == "circle":
            centre, edge = points[:2]
            radius = np.linalg.norm(edge - centre)
            points = np.stack([centre - radius, centre + radius])
        yield Annotation(
            where,
            image,
            str(shape.label),
            enclosing_corners(points),
            id=number,
            image_size=size,
            states_corners=True,
            other_name=stem,
            text=shape.description,
            folder_split=split_of_path(name),
        )
