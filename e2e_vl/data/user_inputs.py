"""Which images are to be described, and boxes that are given for them.

Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from detector.errors import MissingFileError, UserError, user_path
from e2e_vl.data.coco import read_instances
from e2e_vl.data.storage.array_files import read_npz
from e2e_vl.data.storage.files import checked_records, corners_of, read_json, read_text, require_file
from e2e_vl.data.vcr import read_polygons
from e2e_vl.io import inside, require_distinct
from e2e_vl.records import Box, FourNumbers, Id, Name, Number, Record, Score, checked
from e2e_vl.samples import AnnotatedObjects

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff")


class _ImagesFile(Record):
    images: list[Any]


class _ListedRow(Record):
    id: Id
    file_name: Name


class _GivenDetection(Record):
    image_id: Id
    bbox: Box | None = None  # COCO's results
    box: Box | None = None  # MAttNet's
    det_id: Number | None = None
    score: Score | None = None
    category_id: Number | None = None


@dataclasses.dataclass(frozen=True)
class ListedImage:
    """One image file; `id` is unique in its list and names the image's features."""

    id: str
    path: Path


@dataclasses.dataclass(frozen=True)
class GivenBoxes:
    """Boxes of one image, in file order."""

    boxes: np.ndarray  # float64 [R, 4], continuous xyxy in pixels of the original image
    ids: np.ndarray  # int64 [R], annotation ids; the row in the file for detections without `det_id`


def list_images(source: str | Path, root: str | Path | None = None) -> list[ListedImage]:
    """Images of a folder, of a text file (one path per line), or of a COCO JSON file (`images` with id and file_name).

    Ids are the COCO ids, or the paths as listed (in a folder: relative to it) without suffix; of a path that leads out
    of the root, the file's name without suffix.

    Args:
        source: the folder or file.
        root: folder that listed paths start from; default: the folder of the list.

    Raises:
        FileNotFoundError: nothing there.
        ValueError: no image at all, two images with one id or with ids that differ in upper and lower case only, an
            id that a TSV file or the name of a file cannot hold, or a `file_name` that leads out of the root.
    """
    source = user_path(source)
    if source.is_dir():
        paths = sorted(path for path in source.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file())
        images = [ListedImage(_id(path.relative_to(source)), path) for path in paths]
    else:
        require_file(source, "list of images")
        root = user_path(root) if root is not None else source.parent
        images = _of_coco(source, root) if source.suffix == ".json" else _of_lines(source, root)
    if not images:
        raise UserError(f"{source}: there are no images; known suffixes are {', '.join(IMAGE_SUFFIXES)}")
    seen: dict[str, Path] = {}
    for image in images:
        if image.id in seen:
            raise UserError(
                f"{source}: {seen[image.id]} and {image.path} have the same id {image.id}; rename one of them or list "
                "them apart"
            )
        if not image.id.isprintable() or not image.id or '"' in image.id:
            raise UserError(f"{source}: the id {image.id!r} has characters that feature files cannot hold; rename it")
        seen[image.id] = image.path
    require_distinct(seen, str(source))
    return images


def _of_coco(source: Path, root: Path) -> list[ListedImage]:
    rows = read_json(source, "list of images", _ImagesFile).images
    return [
        ListedImage(str(row.id), inside(root, row.file_name, where, follows_links=True))
        for where, row in checked_records(_ListedRow, rows, f"{source}: image")
    ]


def _of_lines(source: Path, root: Path) -> list[ListedImage]:
    lines = read_text(source, "paths of images").split("\n")
    return [ListedImage(_id(Path(line.strip())), root / line.strip()) for line in lines if line.strip()]


def _id(path: Path) -> str:
    return path.stem if path.is_absolute() or ".." in path.parts else path.with_suffix("").as_posix()


def read_given_boxes(path: str | Path) -> dict[str, GivenBoxes]:
    """Boxes by image id from a COCO instances file or from a list of detections.

    Detections are objects with `image_id` and `bbox` (COCO's results) or `box` (MAttNet), both [x, y, width, height].
    Every box counts, whatever its score; crowds too. Empty boxes of an instances file are left out and logged.

    Raises:
        FileNotFoundError, ValueError: see `read_instances`; or a detection without a key, or with a bad box.
    """
    path = user_path(path)
    content = read_json(path, "boxes")
    if not isinstance(content, list):
        instances = read_instances(path, drop_empty_boxes=True)
        for one in instances.annotations:
            checked(Number, one, f"{path}: annotation {one}: its id")
        return {
            str(image_id): GivenBoxes(instances.boxes(image_id), np.array([row.id for row in rows], dtype=np.int64))
            for image_id, rows in instances.by_image.items()
        }
    boxes: dict[str, list[tuple[FourNumbers, int]]] = {}
    for number, value in enumerate(content):
        where = f"{path}: detection {number}"
        row = checked(_GivenDetection, value, where)
        box = row.box if row.bbox is None else row.bbox
        if box is None:
            raise UserError(f"{where} has no 'box' and no 'bbox'; a detection has one of them, [x, y, width, height]")
        box_id = number if row.det_id is None else row.det_id
        boxes.setdefault(str(row.image_id), []).append((corners_of(box, where), box_id))
    return {
        image_id: GivenBoxes(
            np.array([box for box, _ in rows], dtype=np.float64), np.array([i for _, i in rows], dtype=np.int64)
        )
        for image_id, rows in boxes.items()
    }


# Boxes that a user gives on a command line or in a small file.


TOLERANCE = 1.0  # pixels by which a user's box may leave its image: corners are often counted from 1, or rounded


def read_boxes(words: Sequence[str], source: str = "--boxes") -> AnnotatedObjects:
    """Boxes from a command line: a file, or `x1,y1,x2,y2` words, each maybe with a class in front (`person:1,2,30,40`).

    A file is JSON: a list of [x1, y1, x2, y2], or an object with such a list as `boxes` and maybe class names `names`
    and outlines as `segms` (VCR's metadata files are of this kind; a score behind each box is left out); or `.npz` with
    `boxes`, as tools/extract_demo.py writes it.

    Raises:
        FileNotFoundError, ValueError: no such file, another content, or a box without area; names the box.
    """
    if len(words) == 1 and "," not in words[0]:
        path = user_path(words[0], source)
        if not path.is_file():
            raise MissingFileError(f"{source}: {path} is no file; name one with boxes, or write x1,y1,x2,y2.")
        return _read_file(path)
    boxes, names = [], []
    for number, word in enumerate(words):
        name, _, numbers = word.rpartition(":")
        try:
            values = [float(value) for value in numbers.split(",")]
        except ValueError:
            values = []
        boxes.append(_checked(values, f"box {number} ('{word}')"))
        names.append(name)
    if any(names) and not all(names):
        raise UserError("Some boxes have a class and others have none; write all of them as class:x1,y1,x2,y2.")
    return AnnotatedObjects(_stack(boxes), source, names=tuple(names) if any(names) else None)


def require_inside(boxes: np.ndarray, size: tuple[int, int], origin: str, image: str) -> None:
    """Refuse boxes that leave their image; users who mix up pixels of two sizes would get an answer about other places.

    Args:
        boxes: rows of x1, y1, x2, y2 in pixels of the original image.
        size: its (height, width).
        origin, image: name the boxes and the image in the error.

    Raises:
        ValueError: a side of a box lies more than `TOLERANCE` outside.
    """
    height, width = size
    low, high = (boxes[:, :2] < -TOLERANCE).any(axis=1), (boxes[:, 2:] > np.array([width, height]) + TOLERANCE).any(1)
    if (low | high).any():
        row = int((low | high).argmax())
        values = ", ".join(f"{value:g}" for value in boxes[row])
        raise UserError(
            f"{origin}: box {row} [{values}] lies outside the image {image} of {width} x {height} pixels (width x "
            "height), at least in part; give x1, y1, x2, y2 in pixels of the original image."
        )


def _read_file(path: Path) -> AnnotatedObjects:
    names = outlines = None
    if path.suffix == ".npz":
        try:
            rows: Any = read_npz(path, only=("boxes",))["boxes"].tolist()
        except (KeyError, UserError) as error:
            raise UserError(f"{path}: there is no array 'boxes' that can be read ({error}).") from error
    else:
        content = read_json(path, "boxes")
        rows = content
        if isinstance(content, dict):
            rows, names, outlines = (content.get(key) for key in ("boxes", "names", "segms"))
    if not isinstance(rows, list):
        raise UserError(f"{path}: expected a list of [x1, y1, x2, y2], or an object with such a list as 'boxes'.")
    boxes = []
    for number, row in enumerate(rows):
        row = row[:4] if isinstance(row, list) and len(row) == 5 else row
        boxes.append(_checked(row, f"{path}: box {number}"))
    if names is not None and (
        not isinstance(names, list) or len(names) != len(boxes) or not all(isinstance(n, str) and n for n in names)
    ):
        raise UserError(f"{path}: 'names' must hold one class name for each of the {len(boxes)} boxes.")
    if outlines is not None:
        if not isinstance(outlines, list) or len(outlines) != len(boxes):
            raise UserError(f"{path}: 'segms' must hold the outlines of each of the {len(boxes)} boxes.")
        outlines = [read_polygons(rows, f"{path}: segms {number}") for number, rows in enumerate(outlines)]
    return AnnotatedObjects(_stack(boxes), str(path), names=None if names is None else tuple(names), outlines=outlines)


def _stack(boxes: list[list[float]]) -> np.ndarray:
    return np.array(boxes, dtype=np.float64).reshape(-1, 4)


def _checked(box: Any, where: str) -> list[float]:
    try:
        x1, y1, x2, y2 = checked(FourNumbers, box, where)
    except UserError:
        x1 = y1 = x2 = y2 = 0.0
    if x2 <= x1 or y2 <= y1:
        raise UserError(
            f"{where} is no box; write the corners x1,y1,x2,y2 in pixels of the original image, x1 < x2 and y1 < y2."
        )
    return [x1, y1, x2, y2]
