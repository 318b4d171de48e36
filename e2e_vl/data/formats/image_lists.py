"""Which images are to be described, and boxes that are given for them.

Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from detector.errors import UserError
from detector.user_paths import user_path
from e2e_vl.data.formats.coco import read_instances
from e2e_vl.data.storage.files import checked_records, corners_of, read_json, read_text, require_file
from e2e_vl.file_names import inside, name_of, require_distinct
from e2e_vl.records import Box, FourNumbers, Id, Name, Number, Record, Score, checked

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
        name_of(image.id)  # now rather than after hours
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
