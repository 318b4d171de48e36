"""Images and boxes given by a user.

Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated
from zipfile import BadZipFile

import numpy as np
from msgspec import Meta

from detector.errors import UserError, user_path
from detector.io import read_json
from e2e_vl.data.coco import CocoInstances
from e2e_vl.data.vcr import Outlines
from e2e_vl.io import FourNumbers, Id, Name, Pixel, Record, box_corners, read_text
from e2e_vl.samples import AnnotatedObjects

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff")
TOLERANCE = 1.0  # pixels by which a user's box may exceed its image: corners may be counted from 1, or rounded


class _ListedRow(Record):
    id: Id
    file_name: Name


class _ImagesFile(Record):
    images: list[_ListedRow]


class _GivenDetection(Record):
    image_id: Id
    bbox: FourNumbers | None = None  # COCO's results
    box: FourNumbers | None = None  # MAttNet's
    det_id: int | None = None


_Corners = Annotated[list[Pixel], Meta(min_length=4, max_length=5)]  # x1, y1, x2, y2 and optionally a score


class _BoxesFile(Record):
    boxes: list[_Corners]
    names: list[Name] | None = None
    segms: list[Outlines] | None = None


@dataclasses.dataclass(frozen=True)
class ListedImage:
    """One image file; `id` is unique in its list and identifies the image's features."""

    id: str
    path: Path


@dataclasses.dataclass(frozen=True)
class GivenBoxes:
    """Boxes of one image, in file order."""

    boxes: np.ndarray  # float64 [R, 4], continuous xyxy in pixels of the original image
    ids: np.ndarray  # int64 [R], annotation ids, or the row in the file for detections without `det_id`


def list_images(source: str | Path, root: str | Path | None = None) -> list[ListedImage]:
    """Images from a folder, a text file (one path per line) or a COCO JSON file (`images` with id and file_name).

    Ids are the COCO ids, or the paths as listed (in a folder: relative to it) without suffix. For a path outside the
    root, the id is the file name without suffix.

    Args:
        root: folder that listed paths are relative to; default: the folder of the list.
    """
    source = user_path(source)
    if source.is_dir():
        paths = sorted(path for path in source.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file())
        images = [ListedImage(_id(path.relative_to(source)), path) for path in paths]
    else:
        root = user_path(root) if root is not None else source.parent
        if source.suffix == ".json":
            rows = read_json(source, _ImagesFile).images
            images = [ListedImage(str(row.id), root / row.file_name) for row in rows]
        else:
            lines = (line.strip() for line in read_text(source).split("\n"))
            images = [ListedImage(_id(Path(line)), root / line) for line in lines if line]
    if not images:
        raise UserError(f"{source}: no images found; supported suffixes are {', '.join(IMAGE_SUFFIXES)}")
    seen = set()
    for image in images:
        if image.id in seen or not image.id.isprintable() or '"' in image.id:
            raise UserError(
                f"{source}: the id {image.id!r} of {image.path} is not unique, or has characters that "
                "feature files do not allow; rename the file"
            )
        seen.add(image.id)
    return images


def _id(path: Path) -> str:
    return path.stem if path.is_absolute() or ".." in path.parts else path.with_suffix("").as_posix()


def read_given_boxes(path: str | Path) -> dict[str, GivenBoxes]:
    """Boxes by image id from a COCO instances file or from a list of detections.

    Detections are objects with `image_id` and `bbox` (COCO's results) or `box` (MAttNet), both [x, y, width, height].
    All boxes are kept, including crowds and low scores. Empty boxes in an instances file are skipped and logged.
    """
    path = user_path(path)
    rows: dict[str, list[tuple[FourNumbers, int]]] = {}
    if isinstance(read_json(path), list):
        for number, row in enumerate(read_json(path, list[_GivenDetection])):
            box = box_corners(row.box or row.bbox or (0, 0, 0, 0), f"{path}: detection {number}")
            rows.setdefault(str(row.image_id), []).append((box, number if row.det_id is None else row.det_id))
    else:
        rows = {str(image.id): [(one.box, one.id) for one in image.objects] for image in CocoInstances(path).images}
    return {
        image_id: GivenBoxes(
            np.array([box for box, _ in own], dtype=np.float64).reshape(-1, 4),
            np.array([box_id for _, box_id in own], dtype=np.int64),
        )
        for image_id, own in rows.items()
    }


def read_boxes(words: Sequence[str], source: str = "--boxes") -> AnnotatedObjects:
    """Boxes from a command line: a file, or `x1,y1,x2,y2` arguments, each optionally with a class (`person:1,2,30,40`).

    A file is JSON: a list of [x1, y1, x2, y2], or an object with such a list as `boxes` and optionally class names
    `names` and outlines `segms`, as in VCR's metadata files (a score after each box is ignored); or `.npz` with
    `boxes`, as written by tools/extract_demo.py.
    """
    if len(words) == 1 and "," not in words[0]:
        return _read_file(user_path(words[0], source))
    pairs = [word.rpartition(":")[::2] for word in words]
    try:
        boxes = [[float(value) for value in numbers.split(",")] for _, numbers in pairs]
    except ValueError as error:
        raise UserError(f"{source}: {error}; write every box as x1,y1,x2,y2 or as class:x1,y1,x2,y2.") from error
    names = tuple(name for name, _ in pairs)
    return AnnotatedObjects(validate_boxes(boxes, source), source, names=names if any(names) else None)


def _read_file(path: Path) -> AnnotatedObjects:
    if path.suffix == ".npz":
        try:
            with np.load(path, allow_pickle=False) as file:
                content = _BoxesFile(file["boxes"].tolist())
        except (KeyError, OSError, ValueError, BadZipFile) as error:
            raise UserError(f"{path}: the file is missing or has no readable array 'boxes'.") from error
    else:
        found = read_json(path, list[_Corners] | _BoxesFile)
        content = _BoxesFile(found) if isinstance(found, list) else found
        content.boxes = [box[:4] for box in content.boxes]
    names, outlines = content.names, content.segms
    if any(len(one) != len(content.boxes) for one in (names, outlines) if one is not None):
        raise UserError(f"{path}: 'names' and 'segms' must have one entry for each of the {len(content.boxes)} boxes.")
    return AnnotatedObjects(
        validate_boxes(content.boxes, str(path)),
        str(path),
        names=None if names is None else tuple(names),
        outlines=None if outlines is None else [[np.array(one, float) for one in own] for own in outlines],
    )


def validate_boxes(boxes: Sequence[Sequence[float]], where: str) -> np.ndarray:
    """A user's boxes as float64 [R, 4]: at least one, none empty; `where` names them in error messages."""
    wrong = [
        box
        for box in boxes
        if np.ndim(box) != 1 or len(box) != 4 or not np.isfinite(box).all() or box[2] <= box[0] or box[3] <= box[1]
    ]
    if wrong or not len(boxes):
        raise UserError(
            f"{where}: {f'{wrong[0]} is not a box' if wrong else 'no box given'}; write the corners x1,y1,x2,y2 in "
            "pixels of the original image, x1 < x2 and y1 < y2."
        )
    return np.array(boxes, dtype=np.float64)


def require_inside(boxes: np.ndarray, size: tuple[int, int], origin: str, image: str) -> None:
    """Raise a UserError if boxes [R, 4] exceed their image of `size` (height, width), such as those of another size.

    `origin` and `image` name the boxes and the image in the message.
    """
    height, width = size
    outside = ((boxes[:, :2] < -TOLERANCE) | (boxes[:, 2:] > np.array([width, height]) + TOLERANCE)).any(axis=1)
    if outside.any():
        row = int(outside.argmax())
        values = ", ".join(f"{value:g}" for value in boxes[row])
        raise UserError(
            f"{origin}: box {row} [{values}] lies outside the image {image} of {width} x {height} pixels (width x "
            "height), at least in part; use x1, y1, x2, y2 in pixels of the original image."
        )
