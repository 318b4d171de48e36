"""Reader of COCO `instances.json` files (also the ones that come with RefCOCO, RefCOCO+ and RefCOCOg).

Shape legend: see `detector/structures.py`.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta, field

from detector.errors import UserError
from detector.user_paths import user_path
from e2e_vl.data.formats.coco_arrays import (
    AnnotationRow,
    AnnotationsByImage,
    CocoAnnotation,
    CocoAnnotations,
    CocoImage,
    CocoImages,
)
from e2e_vl.data.storage.files import checked_records, corners_of
from e2e_vl.data.storage.json_rows import read_json_rows
from e2e_vl.data.storage.record_errors import RAISE, RecordErrors
from e2e_vl.file_names import shown
from e2e_vl.records import Box, Id, Name, Record, Side, Words, as_written
from e2e_vl.samples import AnnotatedObjects, SampleImage

logger = logging.getLogger(__name__)


class _InstancesFile(Record):
    images: list[Any]
    annotations: list[Any]
    categories: list[Any]
    attributes: list[Any] = field(default_factory=list)


class _InstancesImage(Record):
    id: Id
    file_name: Name
    width: Side
    height: Side


class _InstanceRow(Record):
    id: Id
    image_id: Id
    category_id: Id
    bbox: Box
    iscrowd: Literal[0, 1] | bool | None = 0
    attribute_ids: list[Id] = field(default_factory=list)
    area: Annotated[float, Meta(ge=0, le=1e18)] | None = None


class _NamedRow(Record):
    id: Id
    name: Words


@dataclasses.dataclass(frozen=True)
class CocoInstances:
    """Images, annotations and classes of one file, in flat arrays."""

    path: Path
    images: CocoImages  # by image id, in file order
    annotations: CocoAnnotations  # by annotation id, in file order
    category_ids: list[int]  # sorted; the position is the class index
    class_names: list[str]  # K names
    attribute_names: list[str]  # empty unless the file has a top-level list `attributes`
    # annotations with empty boxes that were left out: what is wrong with each, by its id
    dropped: Mapping[int, str] = dataclasses.field(default_factory=dict)

    @property
    def by_image(self) -> Mapping[int, list[CocoAnnotation]]:
        """Every image id with a (maybe empty) list of its annotations, in file order."""
        return AnnotationsByImage(self.images, self.annotations)

    def sample_image(self, image_id: int, file: Path) -> SampleImage:
        """The facts about an image, which lies in `file`."""
        image = self.images[image_id]
        return SampleImage(str(image_id), file, (image.height, image.width), self.objects(image_id))

    def objects(self, image_id: int) -> AnnotatedObjects:
        """All annotated objects of an image, crowds too."""
        rows = self.by_image[image_id]
        classes, attributes = object_labels(rows, len(self.attribute_names))
        return AnnotatedObjects(
            boxes=self.boxes(image_id),
            origin=f"{self.path}: image {image_id}",
            classes=classes,
            is_crowd=np.array([row.is_crowd for row in rows], dtype=bool),
            attributes=attributes,
            ids=tuple(row.id for row in rows),
            names=tuple(self.class_names[row.class_index] for row in rows),
        )

    def boxes(self, image_id: int) -> np.ndarray:
        """float64 [R, 4]: all annotated boxes of an image (crowds too), xyxy in pixels of the stored image."""
        row = self.images.row(image_id)
        if row is None:
            raise KeyError(image_id)
        return self.annotations.boxes_of(row)


def read_instances(path: str | Path, *, drop_empty_boxes: bool = False, errors: RecordErrors = RAISE) -> CocoInstances:
    """Read an instances file; boxes become continuous corners (x2 = x + w), class indices follow sorted category ids.

    Besides COCO's own keys, annotations may carry `attribute_ids` that point into a top-level list `attributes`
    [{id, name}].

    Args:
        drop_empty_boxes: leave out annotations without width or height and log how many. Off by default: an empty box
            is an error. (COCO's own files are known to hold a few.)
        errors: what becomes of an error about one record.

    Raises:
        FileNotFoundError: no such file.
        ValueError: invalid JSON, a missing key, a duplicate id, an unknown image, category or attribute, a box that is
            empty, inverted, not finite or outside its image; the file and the record are named.
    """
    path = user_path(path)
    content = read_json_rows(path, "instances", _InstancesFile, "annotations")
    category_ids, class_names = _names(content.categories, f"{path}: category", errors)
    attribute_ids, attribute_names = _names(content.attributes, f"{path}: attribute", errors)
    class_of = {category: index for index, category in enumerate(category_ids)}
    attribute_of = {attribute: index for index, attribute in enumerate(attribute_ids)}

    rows = checked_records(_InstancesImage, content.images, f"{path}: image", "id", unique="image ids", errors=errors)
    images = CocoImages(CocoImage(row.id, row.file_name, row.width, row.height) for _, row in rows)
    as_texts: dict[str, int | str] = {}
    for one in images:
        if as_texts.setdefault(str(one), one) != one:
            with errors.about(f"{path}: image {one}"):
                raise UserError(f"{path}: image {one} is listed twice, as a number and as a text; ids must be unique")
    sizes = {image.id: (row, image.width, image.height) for row, image in enumerate(images.rows)}
    dropped: dict[int, str] = {}

    def found() -> Iterator[AnnotationRow]:
        what, unique = f"{path}: annotation", "annotation ids"
        for where, row in checked_records(_InstanceRow, content.annotations, what, "id", unique=unique, errors=errors):
            one = None
            with errors:
                if row.image_id not in sizes:
                    raise UserError(f"{where} belongs to image {row.image_id}, which is not in the file's images")
                if row.category_id not in class_of:
                    raise UserError(f"{where} has category {row.category_id}, which is not in the file's categories")
                if drop_empty_boxes and (row.bbox[2] <= 0 or row.bbox[3] <= 0):
                    dropped[row.id] = _reason(row, where)
                    continue
                one = _annotation(row, where, sizes[row.image_id], class_of, attribute_of)
            if one is not None:
                yield one

    annotations = CocoAnnotations(found(), images, category_ids)
    if dropped:
        logger.warning("%s: left out %d annotations with empty boxes: %s", path, len(dropped), [*dropped])
    return CocoInstances(path, images, annotations, category_ids, class_names, attribute_names, dropped)


def _annotation(
    row: _InstanceRow,
    where: str,
    image: tuple[int, int, int],
    class_of: dict[int, int],
    attribute_of: dict[int, int],
) -> AnnotationRow:
    """What is kept of an annotation of an image, of which row, width and height are given."""
    box = corners_of(row.bbox, where)
    number, width, height = image
    if box[0] >= width or box[1] >= height or box[2] <= 0 or box[3] <= 0:
        raise UserError(f"{where}: the box {as_written(row.bbox)} lies outside its {width} x {height} image")
    unknown = [attribute for attribute in row.attribute_ids if attribute not in attribute_of]
    if unknown:
        raise UserError(f"{where} has attribute {unknown[0]}, which is not in the file's attributes")
    attributes = [attribute_of[attribute] for attribute in row.attribute_ids]
    return AnnotationRow(row.id, number, class_of[row.category_id], box, bool(row.iscrowd), attributes, row.area)


def object_labels(annotations: Sequence[CocoAnnotation], num_attributes: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Class and attribute targets of some annotations.

    Returns:
        classes int64 [G], and attributes int64 [G, T] padded with -1 (as many slots as the most attributes of any of
        them, at least 1), or None when the file has no attributes.
    """
    classes = np.array([annotation.class_index for annotation in annotations], dtype=np.int64)
    if not num_attributes:
        return classes, None
    slots = max((len(annotation.attributes) for annotation in annotations), default=0) or 1
    attributes = np.full((len(annotations), slots), -1, dtype=np.int64)
    for row, annotation in enumerate(annotations):
        attributes[row, : len(annotation.attributes)] = annotation.attributes
    return classes, attributes


def _reason(row: _InstanceRow, where: str) -> str:
    try:
        corners_of(row.bbox, where)
    except UserError as error:
        return str(error)
    return f"{where}: the box {as_written(row.bbox)} is empty"


def _names(rows: list[Any], what: str, errors: RecordErrors) -> tuple[list[int], list[str]]:
    records = checked_records(_NamedRow, rows, what, "id", unique="ids", errors=errors)
    names = {row.id: row.name for _, row in records}
    of_name: dict[str, int] = {}
    for one, name in names.items():
        if of_name.setdefault(name, one) != one:
            with errors.about(f"{what} {one}"):
                raise UserError(f"{what} {one} has the name {shown(name)} of {of_name[name]}; names must be unique")
    ids = sorted(names, key=lambda one: (isinstance(one, str), one))  # numbers before texts
    return ids, [names[key] for key in ids]
