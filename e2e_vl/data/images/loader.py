"""From the facts about an image to pixels and moved boxes: the rules of size, flip, candidate boxes and saved features.

They hold for every data set. Which boxes are candidates is the box source; files of boxes are read by `candidates.py`.

Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from detector.boxes import check_boxes
from detector.errors import UserError
from detector.images import ResizeRule
from e2e_vl.box_sources import BoxSource
from e2e_vl.data.images.candidates import BoxReader
from e2e_vl.data.images.instance_masks import instance_mask
from e2e_vl.data.images.reading import ImageSizeError, read_image
from e2e_vl.examples import DetectionObjects, ImageExample, Placement
from e2e_vl.samples import AnnotatedObjects, BrokenImageError, CandidateBoxes, SampleImage

logger = logging.getLogger(__name__)

MEAN_COLOUR = {"RGB": (123, 116, 103), "BGR": (103, 116, 123)}  # of natural images, as detectors subtract it


@dataclasses.dataclass(frozen=True)
class ImageRules:
    """How images reach the network.

    Attributes:
        resize: sizes of the network input; of several one is drawn at random per request (multi-scale training).
        flip_probability: chance to mirror the image; for training.
        channel_order: "BGR" or "RGB".
        with_objects: add the annotated objects, without crowds, as targets of the detection losses.
        mask_size: S, side of the instance masks of the candidate boxes; None: no masks.
        mask_at: see `instance_mask`.
        fill_masks: objects without outlines get masks of their whole boxes, because other images have outlines.
        is_blank: every pixel is the mean colour, saved features are zero and instance masks one: the control that sees
            no image.
        blank_boxes: that control has no candidate boxes either, because their number and places tell the answer.
        mirror_precomputed: mirror the boxes of saved features although the features describe the unmirrored image
            (official VL-BERT code); False forbids flips of saved features.
        mean_image_feature: the whole image's feature is the mean of its regions' features where the file has none
            (official VL-BERT code).

    Raises:
        ValueError: no size, or a probability outside 0 to 1.
    """

    resize: tuple[ResizeRule, ...]
    flip_probability: float = 0.0
    channel_order: str = "BGR"
    with_objects: bool = False
    mask_size: int | None = None
    mask_at: str = "corners"
    fill_masks: bool = False
    is_blank: bool = False
    blank_boxes: bool = False
    mirror_precomputed: bool = False
    mean_image_feature: bool = False

    def __post_init__(self) -> None:
        if not self.resize:
            raise UserError("the images need at least one resize rule")
        if not 0 <= self.flip_probability <= 1:
            raise UserError(f"flip_probability is {self.flip_probability}, expected a number from 0 to 1")


@dataclasses.dataclass(frozen=True)
class Augmentation:
    """What was drawn at random for the images of one request."""

    flip: bool
    resize: ResizeRule


class ImageLoader:
    """Reads images and finds their candidate boxes.

    Args:
        rules: how images reach the network.
        source: where candidate boxes come from; boxes that come with a sample go before it.
        boxes: files of boxes or of saved features; needed by the sources that read one.

    Raises:
        ValueError: flips of saved features.
    """

    def __init__(self, rules: ImageRules, source: BoxSource, boxes: BoxReader | None = None) -> None:
        if source is BoxSource.PRECOMPUTED and rules.flip_probability > 0 and not rules.mirror_precomputed:
            raise UserError("precomputed features describe images as they are, not mirrored; set data.flip to 0")
        self.rules = rules
        self.source = source
        self.boxes = boxes
        self.without_outline: set[tuple[str, int]] = set()

    def require_images(self, image_ids: Iterable[str], split: str) -> None:
        """Check at the start of a run that the files of boxes hold all images of a split.

        Raises:
            ValueError: an image is missing; the first is named and all are counted.
        """
        if self.boxes is not None:
            self.boxes.require_images(image_ids, split)

    def draw_augmentation(self, generator: np.random.Generator) -> Augmentation:
        """Two draws: whether to flip, and which size."""
        flip = bool(generator.random() < self.rules.flip_probability)
        return Augmentation(flip, self.rules.resize[int(generator.integers(len(self.rules.resize)))])

    def load(self, image: SampleImage, augmentation: Augmentation) -> ImageExample:
        """Pixels (or saved features) of one image, with its candidate boxes.

        Raises:
            BrokenImageError: the image is missing or cannot be read; the cause names image and path.
            ValueError: it has another size than the annotations say, a box lies outside it, or there are no boxes or
                objects although they are asked for.
        """
        found = image.boxes
        if found is None and self.boxes is not None:
            found = self.boxes.read(image.id)
        self._check(image, found)
        if found is not None and found.features is not None:
            return self._precomputed(image, found, augmentation)
        size = image.size if found is None or found.image_size is None else found.image_size
        try:
            file = image.locate()
            pixels, placement = read_image(
                file,
                size,
                augmentation.resize,
                flip=augmentation.flip,
                channel_order=self.rules.channel_order,
                name=f"image {image.id}",
            )
        except ImageSizeError:
            raise
        except (ValueError, OSError) as error:
            raise BrokenImageError from error
        if self.rules.is_blank:
            pixels = np.broadcast_to(np.array(MEAN_COLOUR[self.rules.channel_order], dtype=np.uint8), pixels.shape)
        example = ImageExample(pixels, placement, str(file) if isinstance(file, Path) else file.name)
        self._add_candidates(example, image, found)
        if image.hide is not None:
            example.hide = placement.move_and_clamp_boxes(image.hide, "boxes to hide")
        if self.rules.with_objects:
            example.objects = self._objects(image.objects, placement)
        return example.without_boxes() if self.rules.is_blank and self.rules.blank_boxes else example

    def _check(self, image: SampleImage, found: CandidateBoxes | None) -> None:
        """Raises ValueError if boxes or objects are missing that are asked for, or if two files state two sizes."""
        if found is None and self.source not in (BoxSource.GT, BoxSource.ONLINE):
            raise UserError(f"image {image.id} has no boxes '{self.source}'; set data.files.{self.source.needs[-1]}")
        wants_candidates = image.boxes is None and self.source.reads_annotations
        if image.objects is None and (wants_candidates or self.rules.with_objects):
            wanted = f"boxes '{self.source}'" if wants_candidates else "the targets of the detection losses"
            raise UserError(
                f"image {image.id}: {wanted} come from annotated objects; give an instances file (data.files.instances)"
            )
        boxes_size = None if found is None else found.image_size
        if None not in (image.size, boxes_size) and image.size != boxes_size:
            raise UserError(
                f"{found.origin}: the image was {boxes_size[1]} x {boxes_size[0]} pixels, but its annotations say "
                f"{image.size[1]} x {image.size[0]}; use features of the same images"
            )

    def _precomputed(self, image: SampleImage, found: CandidateBoxes, augmentation: Augmentation) -> ImageExample:
        """Boxes and features from a file; of the image only the sizes."""
        size = found.image_size
        placement = Placement(size, augmentation.resize.target_size(*size), augmentation.flip)
        features, whole = found.features, found.image_feature
        if whole is None and self.rules.mean_image_feature:
            whole = features.mean(axis=0) if len(features) else np.zeros(features.shape[1], dtype=np.float32)
        if self.rules.is_blank:
            features, whole = np.zeros_like(features), None if whole is None else np.zeros_like(whole)
        example = ImageExample(
            pixels=np.broadcast_to(np.uint8(0), (*placement.size, 3)),  # a shape without memory
            placement=placement,
            name=str(image.file) if isinstance(image.file, Path) else found.origin,
            boxes=placement.move_and_clamp_boxes(found.boxes, found.origin),
            class_probs=found.class_probs,
            features=features,
            image_feature=whole,
            **found.found,
        )
        return example.without_boxes() if self.rules.is_blank and self.rules.blank_boxes else example

    def _add_candidates(self, example: ImageExample, image: SampleImage, found: CandidateBoxes | None) -> None:
        """Boxes of a file or of the sample, then annotated boxes, as the source says; clamped."""
        parts = []
        if found is not None:
            parts.append(example.placement.move_and_clamp_boxes(found.boxes, found.origin))
            example.class_probs = found.class_probs
        if image.boxes is None and self.source.reads_annotations:
            rows = range(len(image.objects)) if image.candidates is None else image.candidates
            parts.append(self._annotated(example, image, list(rows), alone=not parts))
        if parts:
            example.boxes = np.concatenate(parts)
        if found is not None and len(parts) == 1:  # nothing was found in annotated boxes
            for name, values in found.found.items():
                setattr(example, name, values)

    def _annotated(self, example: ImageExample, image: SampleImage, rows: Sequence[int], *, alone: bool) -> np.ndarray:
        """The candidate boxes among the annotated objects; if they are the only ones, also what is known about them."""
        objects, placement = image.objects, example.placement
        if alone:
            example.box_ids = None if objects.ids is None else tuple(objects.ids[row] for row in rows)
            example.box_classes = None if objects.classes is None else objects.classes[rows]
            if self.rules.mask_size is not None and (objects.outlines is not None or self.rules.fill_masks):
                example.roi_masks = self._masks(image, rows, placement)
        return placement.move_and_clamp_boxes(objects.boxes[rows], objects.origin)

    def _masks(self, image: SampleImage, rows: Sequence[int], placement: Placement) -> np.ndarray:
        """float32 [R, S, S]; objects without outlines are their whole boxes."""
        side, objects = self.rules.mask_size, image.objects
        if objects.outlines is None or self.rules.is_blank:  # outlines tell shapes
            return np.ones((len(rows), side, side), dtype=np.float32)
        at = self.rules.mask_at
        masks = [instance_mask(objects.outlines[row], objects.boxes[row], side, at) for row in rows]
        self._count_empty(image, [row for row, mask in zip(rows, masks, strict=True) if not mask.any()])
        joined = np.array(masks, dtype=np.float32).reshape(-1, side, side)
        return np.ascontiguousarray(joined[:, :, ::-1]) if placement.flipped else joined

    def _count_empty(self, image: SampleImage, rows: Sequence[int]) -> None:
        """Warn of objects that the model cannot see: of the first, and whenever their number has doubled."""
        for row in rows:
            before = len(self.without_outline)
            self.without_outline.add((image.id, row))
            number = len(self.without_outline)
            if number > before and number & before == 0:  # 1, 2, 4, 8, ...
                name = f" ({image.objects.names[row]})" if image.objects.names else ""
                logger.warning(
                    "%s: object %d%s has no outline that covers a point of its mask, so its feature is zero; %d such "
                    "objects so far in this process. task.config.mask_size=null leaves all masks out.",
                    *(image.objects.origin, row, name, number),
                )

    def _objects(self, objects: AnnotatedObjects, placement: Placement) -> DetectionObjects:
        """Targets of the detection losses."""
        kept = np.arange(len(objects)) if objects.is_crowd is None else np.flatnonzero(~objects.is_crowd)
        moved = placement.move_objects(objects.boxes[kept])
        check_boxes(moved, objects.origin, "object")
        attributes = None if objects.attributes is None else objects.attributes[kept]
        return DetectionObjects(moved, objects.classes[kept], attributes)
