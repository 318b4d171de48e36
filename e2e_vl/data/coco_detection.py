"""Object detection on data in COCO's format: all images of one instances file per split, with and without objects.

There is nothing to read in this task, but batches are made of texts that look at images. So each image has one empty
text; its index is the image's number in the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from detector.errors import UserError
from detector.user_paths import user_path
from e2e_vl.box_sources import BoxSource
from e2e_vl.data.base import DataFiles, NoOptions, VLDataset, Wants
from e2e_vl.data.formats.coco import CocoAnnotation, CocoInstances, read_instances
from e2e_vl.file_names import inside
from e2e_vl.samples import Categories, Sample, SampleText


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
