"""COCO's instances files, and object detection on them: one file per split, including images without objects.

Batches consist of texts about images, so each image gets one empty text, whose index is the image's row in the file.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta, field
from typing_extensions import override

from detector.errors import UserError, user_path
from detector.io import read_json
from e2e_vl.config import BoxSource
from e2e_vl.data.base import DataFiles, DataNeeds, VLDataset
from e2e_vl.data.box_checks import check_file_boxes, has_part_inside
from e2e_vl.data.config import NoDatasetConfig
from e2e_vl.data.table_files import tabulate
from e2e_vl.data.tables import RowIndex, SerializedList
from e2e_vl.io import FourNumbers, Id, Name, Record, Side, Words, require_unique
from e2e_vl.predictions import TrueObject
from e2e_vl.samples import AnnotatedObjects, CategorisedObjects, ImageKey, ImageSource, Sample, SampleImage, SampleText

logger = logging.getLogger(__name__)


class _Image(Record):
    id: Id
    file_name: Name
    width: Side
    height: Side


class _Annotation(Record):
    id: Id
    image_id: Id
    category_id: Id
    bbox: FourNumbers  # x, y, width, height
    iscrowd: Literal[0, 1] | bool | None = 0
    attribute_ids: list[Id] | None = field(default_factory=list)
    area: Annotated[float, Meta(ge=0)] | None = None
    attributes: dict[str, Any] | list[Any] | None = field(default_factory=dict)  # CVAT's; of other tools null or a list

    def __post_init__(self) -> None:
        """Take null, and the lists of other tools, for no attributes."""
        if not isinstance(self.attributes, dict):
            self.attributes = {}
        if self.attribute_ids is None:
            self.attribute_ids = []


class _NamedId(Record):
    id: Id
    name: Words


class _Category(_NamedId):
    supercategory: Any = None


class InstancesFile(Record):
    """COCO's JSON."""

    images: list[_Image]
    annotations: list[_Annotation]
    categories: list[_Category]
    attributes: list[_NamedId] | None = field(default_factory=list)

    def root_category(self) -> _Category | None:
        """Return Roboflow's first category, which stands for the project; None for files of other tools.

        It is the supercategory of all others, and no annotation has it.
        """
        if len(self.categories) < 2:
            return None
        root, *classes = self.categories
        is_above_others = all(category.supercategory == root.name for category in classes)
        is_used = any(annotation.category_id == root.id for annotation in self.annotations)
        if root.supercategory != "none" or not is_above_others or is_used:
            return None
        return root


class CocoObject(Record, array_like=True):
    """One annotated object."""

    id: Id
    class_index: int  # 0 .. K-1, by sorted category id
    box: FourNumbers  # xyxy, continuous, pixels of the original image
    is_crowd: bool
    attributes: tuple[int, ...]  # 0 .. number of attributes - 1, by sorted attribute id
    area: float | None  # of its mask, pixels of the original image; None if not in the file


class CocoImage(Record, array_like=True):
    """One image with its annotated objects, in the order of the file."""

    id: Id
    file_name: str
    width: int  # pixels of the original image
    height: int
    objects: list[CocoObject]


class _Names(Record, array_like=True):
    """What an instances file says beside its images."""

    category_ids: list[Id]
    class_names: list[str]
    attribute_names: list[str]
    empty_boxes: frozenset[str]  # ids of the skipped annotations


class CocoInstances:
    """An instances file of COCO, RefCOCO, RefCOCO+ or RefCOCOg.

    Annotations may also have `attribute_ids`, which refer to a top-level list `attributes` [{id, name}]. Annotations
    with empty boxes (COCO's files have a few) are skipped and logged.

    The images are in the order of the file, and `category_ids` are sorted; the position is the class. `attribute_names`
    are empty if the file has no attributes.

    Args:
        folder: of a table, from which later starts read a large file; None: there is none.
    """

    def __init__(self, path: str | Path, folder: Path | None = None) -> None:
        self.path = user_path(path)
        encoded_names, ids, rows, ends, data = tabulate([self.path], folder, ["instances"], self._read)
        names = msgspec.msgpack.decode(encoded_names, type=_Names)
        self.category_ids = names.category_ids
        self.class_names = names.class_names
        self.attribute_names = names.attribute_names
        self.empty_boxes = names.empty_boxes
        self.images = SerializedList.from_arrays(ends, data, CocoImage)
        self._rows = RowIndex.from_arrays(ids, rows)

    def _read(self) -> list[np.ndarray]:
        """Return the names, as bytes of MessagePack, the arrays of the images' ids, and those of the images."""
        content = read_json(self.path, InstancesFile)
        root = content.root_category()
        if root is not None:
            logger.warning(
                "%s: the category '%s' is Roboflow's name of the project, not a class.", self.path, root.name
            )
        categories = [category for category in content.categories if category is not root]
        category_ids, class_names = self._names(categories, "category")
        attribute_ids, attribute_names = self._names(content.attributes or [], "attribute")
        # 12 and "12" are the same id, because some tools write strings in one list only
        class_of = {str(category): index for index, category in enumerate(category_ids)}
        attribute_of = {str(attribute): index for index, attribute in enumerate(attribute_ids)}
        require_unique((str(image.id) for image in content.images), f"{self.path}: image")
        require_unique((row.id for row in content.annotations), f"{self.path}: annotation")
        images = {str(row.id): CocoImage(row.id, row.file_name, row.width, row.height, []) for row in content.images}
        empty_ids = []
        corners: list[FourNumbers] = []
        sizes: list[tuple[int, int]] = []
        image_ids: list[Id] = []
        for row in content.annotations:
            x, y, width, height = row.bbox
            box = (x, y, x + width, y + height)
            if width <= 0 or height <= 0:
                empty_ids.append(row.id)
                continue
            image = images.get(str(row.image_id))
            fault = None
            if image is None:
                fault = f"the image_id {row.image_id!r}, which the file does not list"
            elif str(row.category_id) not in class_of:
                fault = f"the category_id {row.category_id!r}, which the file does not list"
            elif not attribute_of.keys() >= set(map(str, row.attribute_ids)):
                fault = f"an attribute of {row.attribute_ids} that the file does not list"
            elif not has_part_inside(box, image.width, image.height):
                fault = f"a box {[*row.bbox]} outside its image of {image.width} x {image.height} pixels"
            if fault is not None:
                raise UserError(f"{self.path}: annotation {row.id} has {fault}; correct or remove it")
            corners.append(box)
            sizes.append((image.width, image.height))
            image_ids.append(image.id)
            annotation = CocoObject(
                id=row.id,
                class_index=class_of[str(row.category_id)],
                box=box,
                is_crowd=bool(row.iscrowd),
                attributes=tuple(attribute_of[str(attribute)] for attribute in row.attribute_ids),
                area=row.area,
            )
            image.objects.append(annotation)
        if empty_ids:
            logger.warning("%s: skipped %d annotations with empty boxes: %s", self.path, len(empty_ids), empty_ids)
        check_file_boxes(
            np.array(corners, dtype=np.float64).reshape(-1, 4),
            np.array(sizes, dtype=np.int64).reshape(-1, 2),
            image_ids,
            str(self.path),
        )
        names = _Names(category_ids, class_names, attribute_names, frozenset(map(str, empty_ids)))
        encoded_names = np.frombuffer(msgspec.msgpack.encode(names), dtype=np.uint8)
        return [encoded_names, *RowIndex(images).arrays, *SerializedList(images.values(), CocoImage).arrays]

    def _names(self, rows: Sequence[_NamedId], what: str) -> tuple[list[Id], list[str]]:
        """Return the ids, sorted with numbers before strings, and their names."""
        require_unique((str(row.id) for row in rows), f"{self.path}: {what}")
        require_unique((row.name for row in rows), f"{self.path}: {what}")
        rows = sorted(rows, key=lambda row: (isinstance(row.id, str), row.id))
        return [row.id for row in rows], [row.name for row in rows]

    def __contains__(self, image_id: Id) -> bool:
        return self._rows.row(image_id) is not None

    def __getitem__(self, image_id: Id) -> CocoImage:
        """Return an image by its id; an integer id may be a string here."""
        return self.images[self._rows.row(image_id)]

    def require_images(self, image_ids: Iterable[Id]) -> None:
        """Raise a UserError if the file lacks images."""
        missing = {image_id for image_id in image_ids if image_id not in self}
        if missing:
            raise UserError(
                f"{self.path}: {len(missing)} images are missing, such as {min(map(str, missing))}; use the "
                "instances file of the same images"
            )

    def objects(self, image_id: Id) -> AnnotatedObjects:
        """Return all annotated objects of an image, including crowds."""
        objects = self[image_id].objects
        attributes = None
        if self.attribute_names:
            most_attributes = max((len(annotation.attributes) for annotation in objects), default=1)
            attributes = np.full((len(objects), max(most_attributes, 1)), -1, np.int64)
            for row, annotation in enumerate(objects):
                attributes[row, : len(annotation.attributes)] = annotation.attributes
        classes = [annotation.class_index for annotation in objects]
        return AnnotatedObjects(
            boxes=np.array([annotation.box for annotation in objects], dtype=np.float64).reshape(-1, 4),
            origin=f"{self.path}: image {image_id}",
            classes=np.array(classes, dtype=np.int64),
            is_crowd=np.array([annotation.is_crowd for annotation in objects], dtype=bool),
            attributes=attributes,
            attribute_names=self.attribute_names or None,
            ids=tuple(annotation.id for annotation in objects),
            names=tuple(self.class_names[class_index] for class_index in classes),
        )

    def encoded(self, image_id: Id) -> np.ndarray:
        """Return an image with its objects, uint8 [bytes], for `tables.fingerprint`."""
        return self.images.encoded_item(self._rows.row(image_id))

    def sample_image(self, image_id: Id, file: ImageSource) -> SampleImage:
        """Return an image with its objects as a sample has it."""
        image = self[image_id]
        return SampleImage(str(image.id), file, (image.height, image.width), self.objects(image_id))


def encoded_objects(instances: Sequence[CocoInstances], images: Iterable[ImageKey]) -> Iterator[np.ndarray]:
    """Yield the images of joined splits with their objects, for `tables.fingerprint`.

    Args:
        instances: of each joined split; empty: the data set has no annotated objects.
    """
    if instances:
        for split_index, image_id in images:
            yield instances[split_index].encoded(image_id)


def open_instances(
    files: DataFiles, split_values: Sequence[Mapping[str, str]], images: Iterable[ImageKey] = ()
) -> list[CocoInstances]:
    """Open the instances file of each joined split; splits may share a file.

    Args:
        split_values: the placeholder values of each split, see `VLDataset.split_values`.
        images: that the files must contain.

    Raises:
        UserError: an image is missing, or the files have different categories, so that a class would have several
            meanings.
    """
    paths = [files.path("instances", **values) for values in split_values]
    opened = {path: CocoInstances(path, files.index_folder) for path in dict.fromkeys(paths)}
    first = opened[paths[0]]
    for path, instances in opened.items():
        if instances.class_names != first.class_names:
            raise UserError(
                f"{path} and {first.path} have different categories; joined splits need the same categories, with ids "
                "in the same order"
            )
    image_ids: dict[Path, list[str]] = {path: [] for path in opened}
    for split_index, image_id in images:
        image_ids[paths[split_index]].append(image_id)
    for path, instances in opened.items():
        instances.require_images(image_ids[path])
    return [opened[path] for path in paths]


class CocoDetectionDataset(VLDataset):
    """The images of an instances file (`data.files.instances`), with their annotated objects.

    In training, `data.keep_empty_images: false` skips images without objects, or with crowds only.
    """

    file_keys = ("images", "instances")
    box_sources = (BoxSource.ONLINE,)  # the detector's boxes are evaluated

    def __init__(self, files: DataFiles, options: NoDatasetConfig, split: str, needs: DataNeeds) -> None:
        self.instances = CocoInstances(files.path("instances", split=split), files.index_folder)
        self.folder = files.path("images", split=split)
        needs_objects = needs.training and not files.settings.keep_empty_images
        self.groups = []
        for row, image in enumerate(self.instances.images):
            is_empty = all(annotation.is_crowd for annotation in image.objects)
            if not (needs_objects and is_empty):
                self.groups.append([row])
        if not self.groups:
            raise UserError(f"{self.instances.path}: no image for the split {split}, or none with objects to train on.")
        self.split_values = [{}]
        self.class_names = self.instances.class_names
        text_ids = [category_id for category_id in self.instances.category_ids if isinstance(category_id, str)]
        if text_ids:
            raise UserError(
                f"{self.instances.path}: the category id {text_ids[0]!r} is not an integer of 64 bits, as results in "
                "COCO's format need; number the categories"
            )

    @classmethod
    @override
    def texts_of(cls, files: DataFiles, options: NoDatasetConfig, split: str) -> Iterable[str]:
        """Return the category names, since images have no texts to build a vocabulary from."""
        return CocoInstances(files.path("instances", split=split)).class_names

    @override
    def image_locations(self) -> Iterable[tuple[Path, str]]:
        return ((self.folder, image.file_name) for image in self.instances.images)

    @override
    def contents(self) -> Iterable[np.ndarray]:
        yield self.instances.images.encoded

    @override
    def check_classes(self, num_classes: int, detector_names: Sequence[str] | None = None) -> None:
        """Check the classes as in `VLDataset`, but refuse more detector classes, which would have no category."""
        if len(self.class_names) != num_classes:
            detector_names = None
        super().check_classes(num_classes, detector_names)

    def __len__(self) -> int:
        """Return the number of images in the file, and so of texts."""
        return len(self.instances.images)

    @override
    def truths(self) -> Iterable[CategorisedObjects]:
        return map(self._truth, self.instances.images)

    @override
    def sample(self, texts: Sequence[int]) -> Sample:
        image = self.instances.images[texts[0]]
        text = SampleText(texts[0], "", {"image_id": image.id}, self._truth(image))
        return Sample((self.instances.sample_image(image.id, self.folder / image.file_name),), (text,))

    def _truth(self, image: CocoImage) -> CategorisedObjects:
        category_ids = self.instances.category_ids
        objects = []
        for annotation in image.objects:
            number = annotation.class_index
            category = self.class_names[number]
            objects.append(
                TrueObject(annotation.box, category_ids[number], category, annotation.is_crowd, annotation.area)
            )
        return CategorisedObjects(tuple(category_ids), tuple(objects))
