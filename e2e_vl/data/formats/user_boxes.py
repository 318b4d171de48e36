"""Boxes that a user gives on a command line or in a small file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from detector.errors import MissingFileError, UserError
from detector.user_paths import user_path
from e2e_vl.data.formats.vcr_files import read_polygons
from e2e_vl.data.storage.array_files import read_npz
from e2e_vl.data.storage.files import read_json
from e2e_vl.records import FourNumbers, checked
from e2e_vl.samples import AnnotatedObjects

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
