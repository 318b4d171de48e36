"""Boxes as annotation tools export them: COCO JSON (CVAT, Label Studio), LabelMe, YOLO, CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from pathlib import Path, PureWindowsPath

import msgspec
import numpy as np
from PIL import Image

from detector.errors import UserError, reading
from detector.io import read_json, read_yaml
from e2e_vl.data.coco import InstancesFile
from e2e_vl.io import FourNumbers, Id, Name, Record, Side, read_text

PHOTOS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff")
CLASS_FILES = ("data.yaml", "classes.txt", "obj.names")  # of YOLO: Ultralytics, Label Studio, CVAT
COLUMNS = {"filename": "image", "file_name": "image", "class": "label", "category": "label"}  # other names of columns


class Row(Record):
    """A box, an expression about a box, or both."""

    image: Name  # of `read_boxes`: the photo, relative to the folder of photos
    label: str = ""
    box: FourNumbers | Id | None = None  # [x, y, width, height], pixels, after the EXIF rotation; or the id of a box
    text: str | None = None
    split: str = ""
    id: Id | None = None  # in COCO JSON; elsewhere the number of the shape, line or row in its file, from 1
    is_crowd: bool = False


class Photos:
    """The photos in a folder, found by the names that annotation files give them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.suffix.lower() in PHOTOS)

    def find(self, name: str) -> str:
        """The photo with this name or stem; among several, the one that shares most folders with the name.

        Label Studio's prefix is ignored if necessary: `images\\1/90fbb0c7-mug.jpg` may be mug.jpg.
        """
        *folders, last = PureWindowsPath(name).parts or ("",)  # splits at slashes of both kinds
        bases = (last, re.sub(r"^[0-9a-f]{8}-", "", last))
        found = next(filter(None, ([f for f in self.files if base in (f.name, f.stem)] for base in bases)), [])
        shared = [len({*folders} & {*path.parts[:-1]}) for path in found]
        if shared.count(max(shared, default=0)) != 1:
            raise UserError(f"{self.folder}: {len(found) or 'no'} photos have the name '{name}'; there must be one.")
        return found[int(np.argmax(shared))].as_posix()

    def size(self, photo: str, annotated: tuple[int, int] | None = None) -> tuple[int, int]:
        """(width, height) of a photo; an error if it was annotated in another size."""
        path = self.folder / photo
        with reading(path, Exception), Image.open(path) as image:  # PIL raises many types
            size = image.size[::-1] if image.getexif().get(0x0112, 1) >= 5 else image.size  # its orientation
        if annotated not in (None, size):
            raise UserError(f"{path}: annotated as {annotated} pixels, but it has {size}; use the photo of that size.")
        return size


class _Shape(Record):
    label: str
    points: list[tuple[float, float]]
    shape_type: str = "polygon"
    description: str | None = None


class _LabelMe(Record, rename="camel"):
    image_path: str
    image_width: Side
    image_height: Side
    shapes: list[_Shape]


def read_boxes(source: Path, photos: Photos) -> Iterator[Row]:
    """All boxes of a CSV, COCO or LabelMe file, or of a folder with such JSON files or with YOLO's text files."""
    if source.suffix == ".csv":
        for number, row in enumerate(read_rows(source), start=1):
            if not row.label or not isinstance(row.box, tuple):
                raise UserError(f"{source}, row {number}: it needs image, label, x, y, width and height.")
            yield msgspec.structs.replace(row, image=photos.find(row.image), id=number)
        return
    files = [source] if source.is_file() else sorted(source.rglob("*.json"))
    kinds = {path: [key for key in ("annotations", "shapes") if key in read_json(path)] for path in files}
    for path in (path for path in files if kinds[path]):
        yield from (_read_labelme if "shapes" in kinds[path] else _read_coco)(path, photos)
    if not any(kinds.values()):
        yield from _read_yolo(source, photos)


def read_rows(path: Path) -> list[Row]:
    """The rows of a CSV or JSON file; in CSV, a box is x, y, width, height or xmin, ymin, xmax, ymax."""
    if path.suffix != ".csv":
        return read_json(path, list[Row])
    rows = []
    for line in csv.DictReader(io.StringIO(read_text(path))):
        row = {COLUMNS.get(name, name): value for name, value in line.items() if name and value}
        with reading(f"{path}: {line}", KeyError, ValueError, msgspec.ValidationError):
            if "xmin" in row:
                x, y, right, bottom = (float(row[name]) for name in ("xmin", "ymin", "xmax", "ymax"))
                row["box"] = (x, y, right - x, bottom - y)
            elif "x" in row:
                row["box"] = tuple(float(row[name]) for name in ("x", "y", "width", "height"))
            rows.append(msgspec.convert(row, Row, strict=False))
    return rows


def _read_coco(path: Path, photos: Photos) -> Iterator[Row]:
    content = read_json(path, InstancesFile)
    names = {one.id: one.name for one in content.categories}
    found = {one.id: photos.find(one.file_name) for one in content.images}
    for one in content.images:
        photos.size(found[one.id], (one.width, one.height))
    for one in content.annotations:
        with reading(f"{path}: annotation {one.id}", KeyError):
            photo, label = found[one.image_id], names[one.category_id]
        text = one.attributes.get("expression")  # of CVAT
        yield Row(photo, label, one.bbox, text, id=one.id, is_crowd=bool(one.iscrowd))


def _read_labelme(path: Path, photos: Photos) -> Iterator[Row]:
    content = read_json(path, _LabelMe)
    photo = photos.find(content.image_path)
    photos.size(photo, (content.image_width, content.image_height))
    for number, shape in enumerate(content.shapes, start=1):
        points = np.array(shape.points)
        if shape.shape_type == "circle":  # its centre and a point of its edge
            points = points[0] + np.linalg.norm(points[1] - points[0]) * np.array([[-1, -1], [1, 1]])
        if shape.shape_type not in ("point", "points", "line", "linestrip"):
            yield Row(photo, shape.label, _around(points), shape.description, id=number)


def _read_yolo(folder: Path, photos: Photos) -> Iterator[Row]:
    """Lines `class x_centre y_centre width height [score]` or `class x1 y1 x2 y2 x3 y3 ...`, shares of the sides."""
    lists = [path for name in CLASS_FILES for path in sorted(folder.rglob(name))]
    if not lists:
        raise UserError(f"{folder}: no JSON of COCO or LabelMe, and no {', '.join(CLASS_FILES)} of YOLO.")
    names = read_yaml(lists[0])["names"] if lists[0].suffix == ".yaml" else read_text(lists[0]).splitlines()
    for path in sorted(folder.rglob("*.txt")):
        lines = [line.split() for line in read_text(path).splitlines()]
        if path in lists or not all(len(line) > 4 for line in lines):  # train.txt is a list of photos
            continue
        photo = photos.find(str(path.relative_to(folder).with_suffix(""))) if lines else ""
        for number, line in enumerate(lines, start=1):
            with reading(f"{path}, line {number}", LookupError, ValueError):
                label, points = names[int(line[0])], np.array(line[1:], dtype=float)
            if len(points) <= 5:
                points = np.concatenate([points[:2] - points[2:4] / 2, points[:2] + points[2:4] / 2])
            yield Row(photo, label, _around(points.reshape(-1, 2) * photos.size(photo)), id=number)


def _around(points: np.ndarray) -> FourNumbers:
    (x, y), (right, bottom) = points.min(axis=0).tolist(), points.max(axis=0).tolist()
    return x, y, right - x, bottom - y
