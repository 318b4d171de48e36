"""One image with its candidate boxes: what the readers of several datasets share.

Boxes come from annotations, a detections file, a features file, or nowhere (then the detector proposes them).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch

from detector.boxes import check_boxes
from detector.images import ResizeRule
from detector.selection import SelectionRule, select_regions
from e2e_vl.config import DataSettings
from e2e_vl.data.coco import CocoAnnotation, CocoInstances, object_labels
from e2e_vl.data.detections import DetectionsFile
from e2e_vl.data.examples import ImageExample, Objects
from e2e_vl.data.features.stores import FeatureStore, open_features
from e2e_vl.data.images import Placement, read_image

BoxSource = Literal["gt", "detections", "detections+gt", "online", "precomputed"]
MEAN_COLOUR = {"RGB": (123, 116, 103), "BGR": (103, 116, 123)}  # of natural images, as detectors subtract it


class ImageSource:
    """Reads images and finds their candidate boxes.

    Args:
        resize: size of the network input; of several rules one is drawn at random per image (multi-scale training).
        box_source: where candidate boxes come from: "gt" = all annotations of the image, crowds too; "detections" = a
            file; "detections+gt" = the file's boxes, then all annotations; "online" = the detector proposes them;
            "precomputed" = boxes and features of a features file, no image is read.
        instances: annotated objects; needed by the sources that use them and by `with_objects`. If given, images must
            have the sizes that it states.
        detections_file: MAttNet's detections (path or content); needed by the two sources that use it.
        features_file: region features by image id, opened with `open_features`; needed by the source "precomputed".
        selection: which of the detections file's boxes are kept, by score; None = all, in file order.
        flip_probability: chance to mirror the image; for training.
        channel_order: "BGR" or "RGB".
        with_objects: add the annotated objects, without crowds, as targets of the detection losses.
        blank_image: every pixel is the mean colour, and precomputed features are zero: the control that sees no image.
        mirror_precomputed: mirror the boxes of precomputed features although the features stay those of the image as it
            is (the official VL-BERT code does); False forbids flips of precomputed features.
        mean_image_feature: the whole image's feature is the mean of its regions' where the features file has none
            (official VL-BERT code); False leaves it out.
        name: of the class that uses it, for error messages.

    Raises:
        FileNotFoundError, ValueError: see the readers; or a box source without its file, or settings that exclude each
            other.
    """

    def __init__(
        self,
        resize: ResizeRule | Sequence[ResizeRule],
        *,
        box_source: BoxSource = "gt",
        instances: CocoInstances | None = None,
        detections_file: str | Path | DetectionsFile | None = None,
        features_file: str | Path | FeatureStore | None = None,
        selection: SelectionRule | None = None,
        flip_probability: float = 0.0,
        channel_order: str = "BGR",
        with_objects: bool = False,
        blank_image: bool = False,
        mirror_precomputed: bool = False,
        mean_image_feature: bool = False,
        name: str = "ImageSource",
    ) -> None:
        if box_source not in get_args(BoxSource):
            raise ValueError(f"unknown box source {box_source!r}; choose one of {', '.join(get_args(BoxSource))}")
        if not 0 <= flip_probability <= 1:
            raise ValueError(f"flip_probability is {flip_probability}, expected a number from 0 to 1")
        self.resize_rules = [resize] if isinstance(resize, ResizeRule) else list(resize)
        if not self.resize_rules:
            raise ValueError(f"{name} needs at least one resize rule")
        if instances is None and (with_objects or box_source in ("gt", "detections+gt")):
            wants = "the targets of the detection losses" if with_objects else f"box source {box_source!r}"
            raise ValueError(f"{wants} come from annotated objects; give an instances file as data.files.instances")
        self.box_source = box_source
        self.instances = instances
        self.selection = selection
        self.flip_probability = flip_probability
        self.channel_order = channel_order
        self.with_objects = with_objects
        self.blank_image = blank_image
        self.mean_image_feature = mean_image_feature

        self.features: FeatureStore | None = None
        if box_source == "precomputed":
            if features_file is None:
                raise ValueError("box source 'precomputed' needs a features file; give one as data.files.features")
            if flip_probability > 0 and not mirror_precomputed:
                raise ValueError(
                    "precomputed features are those of images as they are, not mirrored; set data.flip to 0"
                )
            self.features = features_file if isinstance(features_file, FeatureStore) else open_features(features_file)
        self.detections: DetectionsFile | None = None
        if box_source in ("detections", "detections+gt"):
            if detections_file is None:
                raise ValueError(f"box source {box_source!r} needs a detections file; give one or choose gt or online")
            is_read = isinstance(detections_file, DetectionsFile)
            self.detections = detections_file if is_read else DetectionsFile(detections_file)

    @staticmethod
    def options_of(settings: DataSettings, *, training: bool) -> dict[str, Any]:
        """Arguments of the constructor that follow from a run's settings.

        In evaluation the last of the short edges is used and nothing is mirrored.
        """
        sizes = settings.resize.short_edge if training else settings.resize.short_edge[-1:]
        selection = settings.boxes.selection
        return {
            "resize": [ResizeRule(size, settings.resize.long_edge, settings.resize.rounding) for size in sizes],
            "selection": SelectionRule(selection.min_score, selection.min_regions, selection.max_regions),
            "flip_probability": settings.flip if training else 0.0,
            "blank_image": settings.blank_image,
        }

    def require_images(self, image_ids: Iterable[int], split: str) -> None:
        """Check that the files hold all images of a split.

        Raises:
            ValueError: one of them has no features, no detections or no entry in the instances file; the first is named
                and all are counted.
        """
        image_ids = list(image_ids)
        if self.features is not None:
            missing = [image_id for image_id in image_ids if str(image_id) not in self.features]
            if missing:
                raise ValueError(
                    f"{self.features.path}: has no features of image {missing[0]} and {len(missing) - 1} more of the "
                    f"split {split}; extract them, with the instances file as the list of images"
                )
        if self.detections is not None:
            self.detections.require_images(image_ids)
        if self.instances is not None:
            missing = [image_id for image_id in image_ids if image_id not in self.instances.images]
            if missing:
                raise ValueError(
                    f"{self.instances.path}: has no image {missing[0]} and {len(missing) - 1} more of the split "
                    f"{split}; use the instances file of the same images"
                )

    def load(self, image_id: int, path: Path, generator: np.random.Generator) -> tuple[ImageExample, Placement]:
        """Read one image; the generator decides about size and flip.

        Raises:
            FileNotFoundError: the image file is missing; names image id and path.
            ValueError: the image cannot be read, has another size than the instances file says, or a detected box lies
                outside it.
        """
        flip = bool(generator.random() < self.flip_probability)
        resize = self.resize_rules[int(generator.integers(len(self.resize_rules)))]
        size = None
        if self.instances is not None:
            image = self.instances.images[image_id]
            size = (image.height, image.width)
        if self.features is not None:
            return self._precomputed(image_id, size, path, resize, flip)
        pixels, placement = read_image(
            path, size, resize, flip=flip, channel_order=self.channel_order, name=f"image {image_id}"
        )
        if self.blank_image:
            pixels = np.broadcast_to(np.array(MEAN_COLOUR[self.channel_order], dtype=np.uint8), pixels.shape)
        example = ImageExample(
            pixels=pixels,
            original_size=placement.original_size,
            name=str(path),
            boxes=self._candidates(image_id, placement),
            objects=self._objects(self.instances.by_image[image_id], placement) if self.with_objects else None,
        )
        return example, placement

    def _precomputed(
        self, image_id: int, size: tuple[int, int] | None, path: Path, resize: ResizeRule, flip: bool
    ) -> tuple[ImageExample, Placement]:
        """Boxes and features from the file; of the image only the sizes."""
        found = self.features[str(image_id)]
        if size is not None and found.image_size != size:
            raise ValueError(
                f"{self.features.path}: image {image_id} was {found.image_size[1]} x {found.image_size[0]} pixels, but "
                f"{self.instances.path} says {size[1]} x {size[0]}; use features of the same images"
            )
        size = found.image_size
        placement = Placement(size, resize.target_size(*size), flip)
        features, whole = found.features, found.image_feature
        if whole is None and self.mean_image_feature:
            whole = features.mean(axis=0) if len(features) else np.zeros(features.shape[1], dtype=np.float32)
        if self.blank_image:
            features, whole = np.zeros_like(features), None if whole is None else np.zeros_like(whole)
        example = ImageExample(
            pixels=np.broadcast_to(np.uint8(0), (*placement.size, 3)),  # a shape without memory
            original_size=size,
            name=str(path),
            boxes=placement.move_and_clamp_boxes(found.boxes, f"{self.features.path}: image {image_id}"),
            features=features,
            image_feature=whole,
        )
        return example, placement

    def _candidates(self, image_id: int, placement: Placement) -> np.ndarray | None:
        """float32 [R, 4] in pixels of the resized image, clamped; None when the detector proposes."""
        if self.box_source == "online":
            return None
        parts = []
        if self.detections is not None:
            found = self.detections.by_image[image_id]
            boxes = found.boxes
            if self.selection is not None:
                kept = select_regions(torch.from_numpy(found.scores), self.selection)
                boxes = boxes[np.asarray(kept)]
            parts.append(placement.move_and_clamp_boxes(boxes, f"{self.detections.path}: image {image_id}"))
        if self.box_source in ("gt", "detections+gt"):
            boxes = self.instances.boxes(image_id)
            parts.append(placement.move_and_clamp_boxes(boxes, f"{self.instances.path}: image {image_id}"))
        return np.concatenate(parts)

    def _objects(self, annotations: Sequence[CocoAnnotation], placement: Placement) -> Objects:
        single = [annotation for annotation in annotations if not annotation.is_crowd]
        boxes = np.array([annotation.box for annotation in single], dtype=np.float64).reshape(-1, 4)
        classes, attributes = object_labels(single, len(self.instances.attribute_names))
        moved = placement.move_objects(boxes)
        check_boxes(moved, str(self.instances.path), "object")
        return Objects(moved, classes, attributes)

    def check_classes(self, num_classes: int) -> None:
        """Raises ValueError if a detector with `num_classes` foreground classes cannot learn the annotated objects."""
        if self.instances is not None and self.instances.num_classes > num_classes:
            raise ValueError(
                f"{self.instances.path} has {self.instances.num_classes} categories, but the detector has "
                f"{num_classes} classes; set MODEL.ROI_HEADS.NUM_CLASSES in its config."
            )
