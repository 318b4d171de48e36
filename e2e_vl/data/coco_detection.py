"""Object detection on data in COCO's format: all images of one instances file per split, with and without objects.

There is nothing to read in this task, but batches are made of texts that look at images. So each image has one blank
text, `[CLS] [SEP]`; its index is the image's number in the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from detector.images import ResizeRule
from e2e_vl.config import DataSettings
from e2e_vl.data.coco import CocoAnnotation, CocoImage, CocoInstances, object_labels, read_instances
from e2e_vl.data.examples import Example, ImageExample, Objects, Request, TextExample, random_generator
from e2e_vl.data.files import NoOptions, read_options
from e2e_vl.data.images import Placement, read_image


class CocoDetectionDataset(Dataset):
    """The images of a file with their annotated objects.

    Classes are 0 .. K-1 in the order of the sorted category ids. Each text has the target `category_ids`, int64 [K],
    which leads back: the category id of each class. Its record holds the truth, crowds included, as
    `detector.average_precision` reads it.

    Args:
        images_root: folder of the image files named in the instances file.
        instances_file: COCO instances file (path or content). Annotations without width or height, which COCO's own
            files have a few of, are left out and logged.
        tokenizer: gives [CLS] and [SEP].
        resize: size of the network input; of several rules one is drawn at random per request (multi-scale training).
        flip_probability: chance to mirror the image; for training.
        seed: all randomness depends on (seed, epoch, image) only.
        channel_order: "BGR" or "RGB".
        with_objects: add the annotated objects, without crowds, as targets of the detection losses.
        keep_empty_images: False leaves out the images that have no object, or only crowds.

    Attributes:
        images: the images, in file order.
        groups: one text of each image.

    Raises:
        FileNotFoundError, ValueError: see `read_instances`; or a setting that makes no sense, or no image is left.
    """

    # keys of `data.files`
    known_files = ("images", "instances")

    def __init__(
        self,
        images_root: str | Path,
        instances_file: str | Path | CocoInstances,
        tokenizer: PreTrainedTokenizerBase,
        resize: ResizeRule | Sequence[ResizeRule],
        *,
        flip_probability: float = 0.0,
        seed: int = 0,
        channel_order: str = "BGR",
        with_objects: bool = False,
        keep_empty_images: bool = True,
    ) -> None:
        if not 0 <= flip_probability <= 1:
            raise ValueError(f"flip_probability is {flip_probability}, expected a number from 0 to 1")
        self.images_root = Path(images_root).expanduser()
        is_read = isinstance(instances_file, CocoInstances)
        self.instances = instances_file if is_read else read_instances(instances_file, drop_empty_boxes=True)
        self.resize_rules = [resize] if isinstance(resize, ResizeRule) else list(resize)
        if not self.resize_rules:
            raise ValueError("CocoDetectionDataset needs at least one resize rule")
        self.blank_text = np.array([tokenizer.cls_token_id, tokenizer.sep_token_id], dtype=np.int64)
        self.flip_probability = flip_probability
        self.seed = seed
        self.channel_order = channel_order
        self.with_objects = with_objects
        self.images = list(self.instances.images.values())
        self.groups = [
            [index]
            for index, image in enumerate(self.images)
            if keep_empty_images or _without_crowds(self.instances.by_image[image.id])
        ]
        if not self.groups:
            raise ValueError(f"{self.instances.path} has no {'images' if keep_empty_images else 'images with objects'}")

    @classmethod
    def from_settings(
        cls,
        settings: DataSettings,
        tokenizer: PreTrainedTokenizerBase,
        split: str,
        *,
        boxes: str,
        training: bool,
        seed: int,
        channel_order: str,
        with_objects: bool,
    ) -> CocoDetectionDataset:
        """Build from a run's settings; `data.files` holds `images` and `instances`, in which {split} is the split.

        In evaluation the last of the short edges is used, nothing is mirrored and every image counts.

        Raises:
            ValueError: boxes that are not the detector's own, or a file that is not set.
        """
        if boxes != "online":
            raise ValueError(
                f"{settings.name} is about the boxes that the detector finds, not those of '{boxes}'; set "
                "data.boxes.train=online and eval.boxes=[online]."
            )
        read_options(NoOptions, settings.config, "data.config")
        sizes = settings.resize.short_edge if training else settings.resize.short_edge[-1:]
        return cls(
            _file(settings, "images", split),
            _file(settings, "instances", split),
            tokenizer,
            [ResizeRule(size, settings.resize.long_edge, settings.resize.rounding) for size in sizes],
            flip_probability=settings.flip if training else 0.0,
            seed=seed,
            channel_order=channel_order,
            with_objects=with_objects,
            keep_empty_images=settings.keep_empty_images or not training,
        )

    @classmethod
    def texts_of(cls, settings: DataSettings, split: str) -> list[str]:
        """The category names: the only words there are for a vocabulary."""
        return read_instances(_file(settings, "instances", split), drop_empty_boxes=True).class_names

    def check_classes(self, num_classes: int) -> None:
        """Raises ValueError unless a detector with `num_classes` foreground classes has one for each category."""
        if self.instances.num_classes != num_classes:
            raise ValueError(
                f"{self.instances.path} has {self.instances.num_classes} categories, but the detector has "
                f"{num_classes} classes; set MODEL.ROI_HEADS.NUM_CLASSES in its config."
            )

    def __len__(self) -> int:
        """Number of images in the file, so also of texts."""
        return len(self.images)

    def __getitem__(self, request: Request) -> Example:
        """Load one image with its blank text.

        Raises:
            FileNotFoundError: the image file is missing; names image id and path.
            ValueError: the image cannot be read, or has another size than the instances file says.
        """
        [index] = request.texts
        generator = random_generator(self.seed, request.epoch, index)
        flip = bool(generator.random() < self.flip_probability)
        resize = self.resize_rules[int(generator.integers(len(self.resize_rules)))]
        image = self.images[index]
        path = self.images_root / image.file_name
        pixels, placement = read_image(
            path,
            (image.height, image.width),
            resize,
            flip=flip,
            channel_order=self.channel_order,
            name=f"image {image.id}",
        )
        annotations = self.instances.by_image[image.id]
        text = TextExample(
            input_ids=self.blank_text,
            segment_ids=np.zeros_like(self.blank_text),
            looks_at=(0,),
            targets={"category_ids": np.array(self.instances.category_ids, dtype=np.int64)},
            record={"text_index": index, **self._record(image, path, annotations)},
        )
        objects = self._objects(_without_crowds(annotations), placement) if self.with_objects else None
        example_image = ImageExample(pixels, placement.original_size, name=str(path), objects=objects)
        return Example([example_image], [text])

    def _objects(self, annotations: Sequence[CocoAnnotation], placement: Placement) -> Objects:
        boxes = np.array([annotation.box for annotation in annotations], dtype=np.float64).reshape(-1, 4)
        classes, attributes = object_labels(annotations, len(self.instances.attribute_names))
        return Objects(placement.move_objects(boxes), classes, attributes)

    def _record(self, image: CocoImage, path: Path, annotations: Sequence[CocoAnnotation]) -> dict[str, Any]:
        """Plain values for predictions and metrics; boxes and areas in pixels of the stored, unflipped image."""
        return {
            "image_id": image.id,
            "file_name": str(path),
            "image_size": [image.height, image.width],
            "objects": [
                {
                    "box": list(annotation.box),
                    "category_id": annotation.category_id,
                    "category": self.instances.class_names[annotation.class_index],
                    "area": annotation.area,
                    "is_crowd": annotation.is_crowd,
                }
                for annotation in annotations
            ],
        }


def _file(settings: DataSettings, name: str, split: str) -> Path:
    if name not in settings.files:
        raise ValueError(f"data.files.{name} is not set; it names the {name} of {settings.name}.")
    return Path(settings.root).expanduser() / settings.files[name].replace("{split}", split)


def _without_crowds(annotations: Sequence[CocoAnnotation]) -> list[CocoAnnotation]:
    return [annotation for annotation in annotations if not annotation.is_crowd]
