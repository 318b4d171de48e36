"""YOLO's text files, one per image, and the lists of class names (Ultralytics, Darknet, CVAT, Label Studio, LabelImg).

Lines `class x_centre y_centre width height [score]`, `class x1 y1 x2 y2 x3 y3 ...` (polygons, and oriented boxes of
four corners), or a box and its keypoints, as `kpt_shape` in data.yaml says. Coordinates are shares of the image's
sides, after the EXIF rotation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from detector.errors import UserError, reading
from detector.io import read_yaml
from e2e_vl.data.annotation_tools.files import list_files, relative_name
from e2e_vl.data.annotation_tools.images import READABLE_SUFFIXES
from e2e_vl.data.annotation_tools.records import Annotation, Remarks, enclosing_corners, split_of_path
from e2e_vl.io import FourNumbers, Record, read_text

YAML = (".yaml", ".yml")
CLASS_FILES = ("classes.txt", "obj.names", "_darknet.labels")  # Label Studio and LabelImg, CVAT, Roboflow
_MARGIN = 0.01  # by which a share may lie outside 0 .. 1, because of rounding


class LabelError(ValueError):
    """A line is not a box. Its arguments are the kind of problem, and what to do."""


class _DataFile(Record):
    """data.yaml."""

    names: list[Any] | dict[int, Any]
    kpt_shape: tuple[int, int] | None = None  # keypoints, and numbers of each


class ClassList:
    """The class names of the label files in a folder and its subfolders.

    Args:
        path: a YAML file, or a text file with one name per line.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.keypoint_numbers: int | None = None  # in a line, after the box
        if path.suffix.lower() in YAML:
            with reading(path, msgspec.ValidationError):
                content = msgspec.convert(read_yaml(path), _DataFile, strict=False)
            names = content.names
            if isinstance(names, list):
                names = dict(enumerate(names))
            if content.kpt_shape is not None:
                self.keypoint_numbers = math.prod(content.kpt_shape)
        else:
            lines = read_text(path).splitlines()
            names = {number: line for number, line in enumerate(lines) if line.strip()}
        self.names = {number: self._text(name) for number, name in names.items()}
        if not self.names:
            raise UserError(f"{path} has no class names.")

    def _text(self, name: object) -> str:
        if name is None or isinstance(name, bool):  # YAML reads yes, no, on and off as truth values
            raise UserError(f"{self.path}: a class name is read as {name}; put it in quotes.")
        return str(name).strip()


def find_class_lists(folder: Path) -> list[ClassList]:
    """Read the lists of class names in a folder and its subfolders; YAML files without `names` are something else."""
    paths = [path for path in list_files(folder, (".txt", ".names", ".labels")) if path.name.lower() in CLASS_FILES]
    for path in list_files(folder, YAML):
        content = read_yaml(path)
        if isinstance(content, dict) and "names" in content:
            paths.append(path)
    return [ClassList(path) for path in paths]


def describe_labels(folder: Path) -> str | None:
    """Say what the text files of a folder without class names are; None if they have no boxes."""
    for path in list_files(folder, (".txt",)):
        lines = [line.split() for line in read_text(path).splitlines()]
        if any(map(_is_of_dota, lines)):
            return "text files of DOTA; export YOLO with oriented boxes (OBB)"
        if any(map(_looks_like_a_label, lines)):
            return "text files of YOLO, but no class names; add classes.txt or data.yaml"
    return None


def read_yolo(
    folder: Path, class_lists: list[ClassList], remarks: Remarks, has_image: Callable[[str], bool]
) -> Iterator[Annotation]:
    """Read the boxes of all label files below a folder; the id of a box is the number of its line, from 1.

    Args:
        has_image: whether an image has a name; then the text file of this name has labels, whatever its lines are.
    """
    list_paths = {class_list.path for class_list in class_lists}
    for path in list_files(folder, (".txt",)):
        if path in list_paths:
            continue
        lines = [line.split() for line in read_text(path).splitlines()]
        name = relative_name(path, folder)
        image = name.removesuffix(path.suffix)
        if not has_image(image) and not any(map(_looks_like_a_label, lines)):
            is_blank = not any(lines)
            lists_images = all(_names_an_image(line) for line in lines if line)  # train.txt does
            if not is_blank and not lists_images:
                remarks.note("text files without boxes are not read", name)
            continue
        classes = _classes_of(path, class_lists)
        for number, words in enumerate(lines, start=1):
            if not words:
                continue
            where = f"{name}, line {number}"
            try:
                label, corners = _read_line(words, classes)
            except LabelError as error:
                problem, details, remedy = error.args
                remarks.refuse(problem, f"{where}{details}", remedy)
                continue
            yield Annotation(where, image, label, corners, number, in_shares=True, folder_split=split_of_path(name))


def _looks_like_a_label(words: list[str]) -> bool:
    """Return whether words are a class and numbers, right or not."""
    return len(words) > 2 and all(map(_is_number, words[1:5]))


def _is_of_dota(words: list[str]) -> bool:
    """Return whether words are four corners, a class name and maybe a difficulty."""
    return len(words) in (9, 10) and all(map(_is_number, words[:8])) and not _is_number(words[8])


def _names_an_image(words: list[str]) -> bool:
    return " ".join(words).lower().endswith(READABLE_SUFFIXES)


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _classes_of(path: Path, class_lists: list[ClassList]) -> ClassList:
    """Return the class names for a label file: those of its folder or a higher one, else those of the whole export."""
    above = [class_list for class_list in class_lists if class_list.path.parent in path.parents]
    matching = above or class_lists
    first = matching[0]
    for other in matching[1:]:
        if other.names != first.names:
            raise UserError(f"{first.path} and {other.path} name the classes differently; keep the list that is right.")
    with_keypoints = [class_list for class_list in matching if class_list.keypoint_numbers is not None]
    return (with_keypoints or matching)[0]


def _read_line(words: list[str], classes: ClassList) -> tuple[str, FourNumbers]:
    """Return the label and the corners of a line, in shares.

    Raises:
        LabelError: the line is not a box or a polygon of a known class.
    """
    if _is_of_dota(words):
        raise LabelError("lines of DOTA's format", "", "export YOLO with oriented boxes (OBB) instead")
    try:
        numbers = np.array(words, dtype=np.float64)
    except ValueError:
        numbers = np.array([np.nan])
    if not np.isfinite(numbers).all():
        raise LabelError("lines that are not numbers", "", "correct or remove them")
    class_number = numbers[0]
    if class_number not in classes.names:
        details = f" (class {words[0]})"
        raise LabelError(f"classes that {classes.path.name} does not name", details, "correct the lines or the list")
    points = _points(numbers[1:], classes.keypoint_numbers)
    if points is None:
        remedy = "correct them; lines with keypoints need kpt_shape in data.yaml"
        raise LabelError("lines that are neither a box nor a polygon", f" ({len(words)} numbers)", remedy)
    return classes.names[int(class_number)], enclosing_corners(points)


def _points(values: np.ndarray, keypoint_numbers: int | None) -> np.ndarray | None:
    """Return the corners [P, 2] of a line without its class; None if their number fits no kind of line."""
    count = len(values)
    box_counts = {4, 5}  # the fifth is the score of a prediction
    if keypoint_numbers is not None:
        box_counts |= {4 + keypoint_numbers, 5 + keypoint_numbers}
    if count in box_counts:
        centre = values[:2]
        size = values[2:4]
        if (size <= 0).any():
            details = f" (width {size[0]:g}, height {size[1]:g})"
            raise LabelError("boxes without area", details, "correct or remove them")
        _require_shares(values[:4])
        return np.stack([centre - size / 2, centre + size / 2])
    if count == 9:  # an oriented box with a score
        values = values[:8]
    if len(values) < 6 or len(values) % 2:
        return None
    _require_shares(values)
    return values.reshape(-1, 2)


def _require_shares(values: np.ndarray) -> None:
    if values.min() < -_MARGIN or values.max() > 1 + _MARGIN:
        numbers = " ".join(f"{value:g}" for value in values[:4])
        details = f" ({numbers})"
        remedy = "divide pixels by the width and height of the image"
        raise LabelError("coordinates outside 0 .. 1, where shares of the image's sides are meant", details, remedy)
