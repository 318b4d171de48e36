"""Lists of images, and boxes, given by a user.

Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any
from zipfile import BadZipFile

import numpy as np
from msgspec import Meta

from detector.errors import UserError, first_line, user_path
from detector.io import read_json
from e2e_vl.data.box_checks import reach_outside, require_pixels, warn_of_boxes_outside
from e2e_vl.data.coco import CocoInstances
from e2e_vl.data.user_images import IMAGE_SUFFIXES, ImageFile, images_in_folder, list_items, to_numpy
from e2e_vl.data.user_images import to_image_file as to_image_file  # also a name of this module
from e2e_vl.data.vcr import Outlines
from e2e_vl.io import Count, FourNumbers, Id, Name, Pixel, Record, Score, box_corners, read_text
from e2e_vl.samples import AnnotatedObjects

logger = logging.getLogger(__name__)


class _ListedRow(Record):
    id: Id
    file_name: Name
    width: Count | None = None
    height: Count | None = None


class _ImagesFile(Record):
    images: list[_ListedRow]


class _GivenDetection(Record):
    image_id: Id
    bbox: FourNumbers | None = None  # COCO's results
    box: FourNumbers | None = None  # MAttNet's
    det_id: Id | None = None

    def corners(self, where: str) -> FourNumbers:
        """Return x1, y1, x2, y2; `where` names the file and the record in error messages."""
        sides = self.box or self.bbox
        if sides is None:
            raise UserError(f"{where} has no bbox, [x, y, width, height]; correct or remove it.")
        return box_corners(sides, where)


class _LabelledDetection(_GivenDetection):
    score: Score | None = None
    category_name: str | None = None
    phrase: str | None = None


_Corners = Annotated[list[Pixel], Meta(min_length=4, max_length=5)]  # x1, y1, x2, y2 and optionally a score


class _SavedRegion(Record):
    box: _Corners


class _Annotation(Record):
    """An annotation of which nothing is read."""


class _BoxesFile(Record):
    boxes: list[_Corners | Pixel] | None = None
    names: list[Name] | None = None
    scores: list[Score] | None = None
    segms: list[Outlines] | None = None
    regions: list[_SavedRegion | _Corners] | None = None  # of results that were saved as JSON
    annotations: list[_Annotation] | None = None  # of a COCO instances file, which is then read as such


@dataclasses.dataclass(frozen=True)
class ListedImage:
    """One image file; `id` is unique in its list and identifies the image's features."""

    id: str
    path: Path
    annotated_size: tuple[int, int] | None = None  # (height, width) in the list, see `detector.images.load_image`


@dataclasses.dataclass(frozen=True)
class GivenBoxes:
    """Boxes of one image, in file order."""

    boxes: np.ndarray  # float64 [R, 4], continuous xyxy in pixels of the original image
    ids: np.ndarray  # int64 [R], annotation ids, or the row in the file, see `read_given_boxes`
    annotated_size: tuple[int, int] | None = None  # (height, width) of the image in the file


def list_images(source: str | Path, root: str | Path | None = None) -> list[ListedImage]:
    """List images of a folder, a text file (one path per line) or a COCO JSON file (`images` with id and file_name).

    Those of a folder are in natural order, see `images_in_folder`. Ids are the COCO ids, or the paths as listed (in a
    folder: relative to it) without suffix. For a path outside the root, the id is the file name without suffix.

    Args:
        root: folder that listed paths are relative to; default: the folder of the list.
    """
    source = user_path(source)
    images: list[ListedImage] = []
    if source.is_dir():
        images = [ListedImage(_id(path.relative_to(source)), path) for path in images_in_folder(source)]
    else:
        root = user_path(root) if root is not None else source.parent
        if source.suffix.lower() == ".json":
            for row in read_json(source, _ImagesFile).images:
                size = None
                if row.height and row.width:
                    size = (row.height, row.width)
                images.append(ListedImage(str(row.id), root / row.file_name, size))
        else:
            lines = (line.strip() for line in read_text(source).split("\n"))
            paths = [user_path(line, f"{source}: the image") for line in lines if line]
            images = [ListedImage(_id(path), root / path) for path in paths]
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
    """Return the id of the image that a list names with a path."""
    if path.is_absolute() or ".." in path.parts:
        return path.stem
    return path.with_suffix("").as_posix()


def read_given_boxes(path: str | Path) -> dict[str, GivenBoxes]:
    """Read boxes by image id from a COCO instances file or from a list of detections.

    Detections are objects with `image_id` and `bbox` (COCO's results) or `box` (MAttNet), both [x, y, width, height].
    All boxes are kept, including crowds and low scores. Empty boxes in an instances file are skipped and logged. If ids
    of boxes are strings, all boxes are numbered as in the file, since feature files have integers.
    """
    path = user_path(path)
    rows: list[tuple[str, FourNumbers, Id | None]] = []
    if isinstance(read_json(path), list):
        for number, detection in enumerate(read_json(path, list[_GivenDetection])):
            box = detection.corners(f"{path}: detection {number}")
            rows.append((str(detection.image_id), box, detection.det_id))
        require_pixels(np.array([box for _, box, _ in rows]), str(path))
        size_of = dict.fromkeys(image_id for image_id, _, _ in rows)
    else:
        images = CocoInstances(path).images
        size_of = {str(image.id): (image.height, image.width) for image in images}
        for image in images:
            rows += [(str(image.id), annotated.box, annotated.id) for annotated in image.objects]
    text_ids = [box_id for _, _, box_id in rows if isinstance(box_id, str)]
    if text_ids:
        logger.warning(
            "%s: boxes are numbered as in the file, because ids such as %r are no integers.", path, text_ids[0]
        )
    boxes: dict[str, list[FourNumbers]] = {image_id: [] for image_id in size_of}
    ids: dict[str, list[int]] = {image_id: [] for image_id in size_of}
    for number, (image_id, box, box_id) in enumerate(rows):
        boxes[image_id].append(box)
        if text_ids or box_id is None:
            box_id = number
        ids[image_id].append(box_id)
    given_boxes = {}
    for image_id, size in size_of.items():
        corners = np.array(boxes[image_id], dtype=np.float64).reshape(-1, 4)
        given_boxes[image_id] = GivenBoxes(corners, np.array(ids[image_id], dtype=np.int64), size)
    return given_boxes


def warn_of_given_boxes_outside(
    given_boxes: Mapping[str, GivenBoxes], images: Sequence[ListedImage], where: str
) -> None:
    """Log one warning if many boxes of a list of detections reach outside their images.

    Boxes of an instances file were checked when it was read.

    Args:
        given_boxes: by image id.
        images: those whose list states no size are left out.
        where: the file of the detections.
    """
    boxes: list[np.ndarray] = []
    sizes: list[tuple[int, int]] = []
    image_ids: list[str] = []
    for image in images:
        detections = given_boxes.get(image.id)
        if detections is None or detections.annotated_size is not None or image.annotated_size is None:
            continue
        boxes += list(detections.boxes)
        sizes += [image.annotated_size[::-1]] * len(detections.boxes)
        image_ids += [image.id] * len(detections.boxes)
    if boxes:
        warn_of_boxes_outside(np.array(boxes), np.array(sizes), image_ids, where)


@dataclasses.dataclass(frozen=True)
class BoxesOfImages:
    """The boxes of many images in a file of detections, or of annotations.

    Detections name an image by its id, which is the end of its path without suffix, or the number at its end.
    Annotations name its file.
    """

    path: Path
    by_image: Mapping[str, AnnotatedObjects]  # of each image that has boxes, by its id or by the name of its file
    has_file_names: bool = False  # the images are named by their files

    def of(self, file: ImageFile) -> AnnotatedObjects:
        """Return the boxes of an image.

        Raises:
            UserError: the file has no boxes for it.
        """
        path = Path(str(file))
        if not self.has_file_names:
            path = path.with_suffix("")
        parts = path.parts
        names = ["/".join(parts[first:]) for first in range(len(parts))]
        number = re.search(r"\d+$", parts[-1]) if parts else None
        if number is not None and not self.has_file_names:
            names.append(str(int(number[0])))
        for name in names:
            if name in self.by_image:
                return self.by_image[name]
        raise UserError(f"{self.path}: there are no boxes of the image {file}; give its boxes, or another file.")


def boxes_of_image(boxes: AnnotatedObjects | BoxesOfImages | None, file: ImageFile) -> AnnotatedObjects | None:
    """Return the boxes that a user gave for an image."""
    return boxes.of(file) if isinstance(boxes, BoxesOfImages) else boxes


def _read_boxes_of_images(path: Path, rows: Sequence[_LabelledDetection]) -> BoxesOfImages:
    """Group the detections of a file by image; their names are phrases or class names, if all of them have one."""
    corners: dict[str, list[FourNumbers]] = defaultdict(list)
    scores: dict[str, list[float | None]] = defaultdict(list)
    names: dict[str, list[str | None]] = defaultdict(list)
    for number, row in enumerate(rows):
        image_id = str(row.image_id)
        corners[image_id].append(row.corners(f"{path}: detection {number}"))
        scores[image_id].append(row.score)
        names[image_id].append(row.phrase or row.category_name)
    by_image = {}
    for image_id, boxes in corners.items():
        where = f"{path}: image {image_id}"
        objects = AnnotatedObjects(validate_boxes(boxes, where), where)
        if None not in scores[image_id]:
            objects = dataclasses.replace(objects, scores=np.array(scores[image_id], dtype=np.float32))
        if None not in names[image_id]:
            objects = dataclasses.replace(objects, names=tuple(names[image_id]))
        by_image[image_id] = objects
    return BoxesOfImages(path, by_image)


def _read_annotated_boxes(path: Path) -> BoxesOfImages:
    """Read the boxes of all annotations of a COCO instances file, crowds too, with their class names.

    An image is named by its file: the whole name that the instances file has, or that without folders if no other
    image has the same.
    """
    instances = CocoInstances(path)
    num_images = Counter(Path(image.file_name).name for image in instances.images)
    by_image = {}
    for image in instances.images:
        if not image.objects:
            continue
        objects = dataclasses.replace(instances.objects(image.id), image_size=(image.height, image.width))
        by_image[Path(image.file_name).as_posix()] = objects
        name = Path(image.file_name).name
        if num_images[name] == 1:
            by_image[name] = objects
    return BoxesOfImages(path, by_image, has_file_names=True)


def read_boxes(words: Sequence[str], source: str = "--boxes") -> AnnotatedObjects | BoxesOfImages:
    """Read the boxes of a command line: a file, or arguments `x1,y1,x2,y2` or with a class `person:1,2,30,40`.

    A file is JSON: a list of [x1, y1, x2, y2], or an object with such a list as `boxes` and optionally `scores`, class
    names `names` and outlines `segms`, as in VCR's metadata files (a score after each box is ignored), or the `regions`
    of a saved result, or detections of many images as `e2e-vl detect` writes them, or a COCO instances file; or `.npz`
    with `boxes`, as written by tools/extract_demo.py.
    """
    if len(words) == 1 and "," not in words[0]:
        return read_boxes_file(user_path(words[0], source))
    boxes: list[list[float]] = []
    names: list[str] = []
    for word in words:
        name, _, numbers = word.rpartition(":")
        try:
            boxes.append([float(number) for number in numbers.split(",")])
        except ValueError as error:
            raise UserError(f"{source}: {error}; write every box as x1,y1,x2,y2 or as class:x1,y1,x2,y2.") from error
        names.append(name)
    corners = validate_boxes(boxes, source)
    if not any(names):
        return AnnotatedObjects(corners, source)
    return AnnotatedObjects(corners, source, names=tuple(names))


def read_boxes_file(path: Path) -> AnnotatedObjects | BoxesOfImages:
    """Read boxes from a file, see `read_boxes`."""
    if path.suffix.lower() == ".npz":
        try:
            with np.load(path, allow_pickle=False) as file:
                content = _BoxesFile(file["boxes"].tolist())
        except (KeyError, OSError, ValueError, BadZipFile) as error:
            raise UserError(f"{path}: the file is missing or has no readable array 'boxes'.") from error
    else:
        rows = read_json(path, list[_Corners | Pixel | _LabelledDetection] | _BoxesFile)
        if isinstance(rows, list) and rows and all(isinstance(row, _LabelledDetection) for row in rows):
            return _read_boxes_of_images(path, rows)
        content = _BoxesFile(rows) if isinstance(rows, list) else rows
        if content.boxes is None and content.annotations is not None:
            return _read_annotated_boxes(path)
    boxes = _boxes_in(content, path)
    for column in (content.names, content.scores, content.segms):
        if column is not None and len(column) != len(boxes):
            raise UserError(
                f"{path}: 'names', 'scores' and 'segms' must have one entry for each of the {len(boxes)} boxes."
            )
    names = None
    if content.names is not None:
        names = tuple(content.names)
    outlines = None
    if content.segms is not None:
        outlines = []
        for outlines_of_box in content.segms:
            outlines.append([np.array(outline, dtype=np.float64) for outline in outlines_of_box])
    scores = None
    if content.scores is not None:
        scores = np.array(content.scores, dtype=np.float32)
    corners = validate_boxes(boxes, str(path))
    return AnnotatedObjects(corners, str(path), names=names, outlines=outlines, scores=scores)


def _boxes_in(content: _BoxesFile, path: Path) -> list[list[float]]:
    """Return the boxes of a file without their scores."""
    rows = content.regions if content.boxes is None else content.boxes
    if rows is None:
        raise UserError(f"{path}: there are no `boxes`, a list of [x1, y1, x2, y2]; add them, or give another file.")
    if rows and all(isinstance(row, float) for row in rows):
        return [rows]  # the four numbers of one box
    boxes = []
    for row in rows:
        box = row.box if isinstance(row, _SavedRegion) else row
        if not isinstance(box, list):  # a number, which is no box
            box = [box]
        boxes.append(box[:4])
    return boxes


def validate_boxes(boxes: Sequence[Sequence[float]], where: str) -> np.ndarray:
    """Return a user's boxes as float64 [R, 4]: at least one, none empty, in pixels.

    `where` names them in error messages.
    """
    problem = None if len(boxes) else "no box given"
    for box in boxes:
        if not _is_box(box):
            problem = f"{box} is not a box"
            break
    if problem is not None:
        raise UserError(
            f"{where}: {problem}; write the corners x1,y1,x2,y2 in pixels of the original image, x1 < x2 and y1 < y2."
        )
    corners = np.array(boxes, dtype=np.float64)
    if corners.max() <= 1:
        raise UserError(
            f"{where}: no box reaches beyond the first pixel, so they seem to be normalised to 0 .. 1; multiply them "
            "by the width and height of the image, because boxes are in pixels of the original image."
        )
    require_pixels(corners, where)
    return corners


def _is_box(corners: Sequence[float]) -> bool:
    """Return whether something is four finite numbers x1 < x2, y1 < y2."""
    if np.ndim(corners) != 1 or len(corners) != 4 or not np.isfinite(corners).all():
        return False
    x1, y1, x2, y2 = corners
    return x1 < x2 and y1 < y2


def require_inside(boxes: np.ndarray, size: tuple[int, int], origin: str, image: str) -> None:
    """Raise a UserError if boxes [R, 4] exceed their image of `size` (height, width), such as those of another size.

    `origin` and `image` name the boxes and the image in the message.
    """
    height, width = size
    outside = reach_outside(boxes, np.array([width, height]))
    if outside.any():
        row = int(outside.argmax())
        values = ", ".join(f"{value:g}" for value in boxes[row])
        raise UserError(
            f"{origin}: box {row} [{values}] lies outside the image {image} of {width} x {height} pixels (width x "
            "height), at least in part; use x1, y1, x2, y2 in pixels of the original image."
        )


def _field_of(value: Any, name: str) -> Any:
    """Return an attribute of an object or an entry of a dict; the value itself if it has none of this name."""
    if isinstance(value, dict):
        return value.get(name, value)
    return getattr(value, name, value)


def convert_boxes(
    boxes: Any, scores: Any = None, names: Sequence[str] | None = None
) -> AnnotatedObjects | BoxesOfImages | None:
    """Parse a user's boxes.

    Args:
        boxes: numbers [R, 4] or [4], xyxy in pixels of the original image, in lists, arrays or tensors; an object or a
            dict that has such `boxes`; regions, each with a `box`; or strings or a file as in `--boxes`.
        scores: R numbers from 0 to 1; None: those that `boxes` has, if it has any.
        names: R class names, or phrases that a detector looked for; None: the `text_labels` that `boxes` has, as a
            detector of transformers calls them, if it has any.

    Raises:
        UserError: they are none of these.
    """
    if boxes is None and (scores is not None or names is not None):
        raise UserError("The scores and names are those of boxes; give the boxes, too.")
    if scores is None:
        scores = _stated(boxes, "scores")
    if names is None:
        names = _stated(boxes, "text_labels")
    objects = _convert_corners(boxes)
    if objects is None or (scores is None and names is None):
        return objects
    if isinstance(objects, BoxesOfImages):
        raise UserError(f"{objects.path} has the scores and names of its boxes; leave out scores and names.")
    labels = {}
    if scores is not None:
        labels["scores"] = _convert_scores(scores)
    if names is not None:
        labels["names"] = tuple(map(str, names))
    for kind, values in labels.items():
        if len(values) != len(objects):
            raise UserError(f"boxes: there are {len(objects)} boxes and {len(values)} {kind}; give one for each box.")
    return dataclasses.replace(objects, **labels)


def _stated(value: Any, name: str) -> Any:
    """Return an attribute of an object or an entry of a dict; None if it has none of this name."""
    return value.get(name) if isinstance(value, dict) else getattr(value, name, None)


def _convert_scores(scores: Any) -> np.ndarray:
    """Return a user's scores as float32 [R]."""
    if hasattr(scores, "detach"):
        scores = to_numpy(scores)
    values = np.asarray(scores, dtype=np.float32)
    if values.ndim != 1 or not ((values >= 0) & (values <= 1.0001)).all():  # as `Score`
        raise UserError("boxes: the scores must be a list of numbers from 0 to 1, one for each box.")
    return values


def _convert_corners(boxes: Any) -> AnnotatedObjects | BoxesOfImages | None:
    """Parse the corners of a user's boxes, see `convert_boxes`."""
    if boxes is None or isinstance(boxes, AnnotatedObjects):
        return boxes
    boxes = _field_of(_field_of(boxes, "boxes"), "box")
    if isinstance(boxes, str | os.PathLike):
        boxes = [os.fsdecode(boxes)]
    layout = str(getattr(boxes, "format", "XYXY"))  # of torchvision's BoundingBoxes
    if hasattr(boxes, "detach") and not layout.endswith("XYXY"):
        raise UserError(f"boxes: {layout} is another layout; convert them to XYXY in pixels of the original image.")
    values = to_numpy(boxes) if hasattr(boxes, "detach") else list_items(boxes)
    if values is None:
        values = boxes
    if isinstance(values, Sequence) and len(values) and all(isinstance(word, str) for word in values):
        return read_boxes(values, "boxes")
    if isinstance(values, list | tuple):
        if any(hasattr(item, "boxes") for item in values):
            raise UserError(
                "boxes: the boxes apply to all images of a call; ask about one image at a time, with its boxes."
            )
        values = [_field_of(item, "box") for item in values]
        if not values:
            values = np.zeros((0, 4))
    try:
        corners = np.atleast_2d(np.asarray(values, dtype=np.float64))
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(
            f"boxes: {type(boxes).__name__} holds no numbers [R, 4] ({first_line(error)}); give x1, y1, x2, y2 of each "
            "box in pixels of the original image."
        ) from error
    if corners.ndim == 3 and len(corners) == 1:  # a batch of one image
        corners = corners[0]
    if corners.ndim != 2:
        raise UserError(f"boxes: {list(corners.shape)} is no shape [R, 4]; the boxes apply to all images of a call.")
    return AnnotatedObjects(validate_boxes(corners, "boxes"), "boxes")
