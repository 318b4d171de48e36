"""Object detection on data in COCO's format: all images of one instances file per split, with and without objects.

There is nothing to read in this task, but batches are made of texts that look at images. So each image has one empty
text; its index is the image's number in the file.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta, field

from detector.errors import UserError, user_path
from e2e_vl.config import BoxSource
from e2e_vl.data.base import DataFiles, NoOptions, VLDataset, Wants
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
from e2e_vl.io import inside, is_name_pattern, shown
from e2e_vl.records import Box, Id, Name, Record, Side, Words, as_written
from e2e_vl.samples import AnnotatedObjects, Categories, Sample, SampleImage, SampleText

# Reader of COCO `instances.json` files (also the ones that come with RefCOCO, RefCOCO+ and RefCOCOg).


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


class CocoDetectionDataset(VLDataset):
    """The images of a file with their annotated objects.

    Args:
        images_root: folder of the image files named in the instances file.
        instances: their annotated objects. Annotations without width or height, which COCO's own files have a few of,
            are left out.
        keep_empty_images: False leaves out the images that have no object, or only crowds.

    Raises:
        ValueError: no image is left.
    """

    known_files = ("images", "instances")
    box_sources = (BoxSource.ONLINE,)  # it is about the boxes that the detector finds

    def __init__(
        self,
        images_root: str | Path,
        instances: CocoInstances,
        *,
        keep_empty_images: bool = True,
    ) -> None:
        self.images_root = user_path(images_root)
        self.instances = instances
        self.images = self.instances.images.rows
        has_objects = self.instances.annotations.has_objects()
        self.groups = [[index] for index in range(len(self.images)) if keep_empty_images or has_objects[index]]
        if not self.groups:
            raise UserError(f"{self.instances.path} has no {'images' if keep_empty_images else 'images with objects'}")
        self.parts = [{}]
        self._categories = Categories(tuple(self.instances.category_ids))
        self.class_names = self.instances.class_names

    @classmethod
    def open(cls, files: DataFiles, options: NoOptions, split: str, wants: Wants) -> CocoDetectionDataset:
        """`data.files` holds `images` and `instances`; in evaluation every image counts."""
        keep = files.settings.keep_empty_images or not wants.training
        return cls(files.path("images", split=split), _instances(files, split), keep_empty_images=keep)

    @classmethod
    def reads(cls, options: NoOptions, split: str, wants: Wants) -> tuple[str, ...]:
        return cls.known_files

    @classmethod
    def texts_of(cls, files: DataFiles, options: NoOptions, split: str) -> Iterable[str]:
        """The category names: the only words there are for a vocabulary."""
        return _instances(files, split).class_names

    def check_classes(self, num_classes: int, known: Sequence[str] | None = None) -> None:
        """As in `VLDataset`; and the detector may not have more classes, which would be no categories."""
        if len(self.class_names) != num_classes:
            raise UserError(
                f"{self.instances.path} has {len(self.class_names)} categories, but the detector has "
                f"{num_classes} classes; set MODEL.ROI_HEADS.NUM_CLASSES in its config."
            )
        super().check_classes(num_classes, known)

    def __len__(self) -> int:
        """Number of images in the file, so also of texts."""
        return len(self.images)

    def truths(self) -> Iterable[Categories]:
        return (self._categories for _ in self.images)

    def sample(self, texts: Sequence[int]) -> Sample:
        """One image with its empty text."""
        [index] = texts
        image = self.images[index]
        where = f"{self.instances.path}: image {image.id}"
        file = inside(self.images_root, image.file_name, where, follows_links=True)
        stated = self.instances.sample_image(image.id, file)
        objects = [self._fact(annotation) for annotation in self.instances.by_image[image.id]]
        text = SampleText(index, "", {"image_id": image.id, "objects": objects}, self._categories)
        return Sample((stated,), (text,))

    def _fact(self, annotation: CocoAnnotation) -> dict[str, Any]:
        """Plain values for metrics; box and area in pixels of the stored image."""
        return {
            "box": list(annotation.box),
            "category_id": annotation.category_id,
            "category": self.instances.class_names[annotation.class_index],
            "area": annotation.area,
            "is_crowd": annotation.is_crowd,
        }


def _instances(files: DataFiles, split: str) -> CocoInstances:
    return files.read(read_instances, files.path("instances", split=split), drop_empty_boxes=True)


# File names of images that are made from their ids, and annotated objects of images whose ids are texts.


_NUMBER = re.compile(r"[0-9]{1,18}")


@dataclasses.dataclass(frozen=True)
class ImageNames:
    """How the files of images are called; fields of `data.config`.

    Raises:
        ValueError: a pattern that names all images alike, or holds something else than {id}.
    """

    # file name of an image; {id} is its id as a text, so {id:0>12} fills it up with zeros to twelve characters
    image_name: str = "{id}.jpg"

    def __post_init__(self) -> None:
        if not is_name_pattern(self.image_name, "id"):
            raise UserError(f"data.config.image_name is {shown(self.image_name)}; it takes {{id}} alone.")
        try:
            same = self.image_name.format(id="1") == self.image_name.format(id="2")
        except (KeyError, IndexError, ValueError) as error:
            raise UserError(f"data.config.image_name is '{self.image_name}'; it takes {{id}} alone.") from error
        if same:
            raise UserError(f"data.config.image_name is '{self.image_name}'; it must hold {{id}}, the image's id.")

    def file(self, folder: Path, image_id: str) -> Path:
        """The file of an image."""
        return inside(folder, self.image_name.format(id=image_id), f"image {shown(image_id)}", follows_links=True)


def instances_image(instances: CocoInstances, image_id: str, file: Path) -> SampleImage:
    """The facts about an image whose id in the instances is a number, such as 12 for "12"."""
    return instances.sample_image(int(image_id), file)


def require_instances(instances: CocoInstances, image_ids: Iterable[str]) -> None:
    """Raises ValueError unless the instances list all images."""
    known = set(instances.images)
    missing = [name for name in image_ids if not _NUMBER.fullmatch(name) or int(name) not in known]
    if missing:
        raise UserError(
            f"{instances.path}: has no image {missing[0]} and {len(set(missing)) - 1} more of the texts; use the "
            "instances file of the same images"
        )
