"""Resized images, and the transform of their boxes.

Shape legend: see `e2e_vl/structures.py`. Boxes are xyxy float32 in pixels of the resized image.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Bool, Float, Int64, UInt8

from detector.errors import UserError
from e2e_vl.io import Id
from e2e_vl.masks import ObjectMask, resize_mask
from e2e_vl.samples import BoxPredictions


@dataclasses.dataclass(frozen=True)
class ImageTransform:
    """The resize and flip of an image, applied to its boxes.

    The methods take boxes as float [R, 4] xyxy in pixels of the original image and return pixels of the resized image:

    transform_boxes            not clamped: phrases
    transform_referred_boxes   clamped: the boxes that an expression refers to (official VL-BERT code)
    transform_and_clamp_boxes  clamped, and never empty: candidate boxes (official VL-BERT code)
    transform_objects          clipped: targets of detection losses (Detectron2)
    """

    original_size: tuple[int, int]  # (height, width)
    size: tuple[int, int]  # (height, width) after the resize
    flipped: bool = False

    def transform_boxes(self, boxes: np.ndarray) -> np.ndarray:
        """Return float64 [R, 4]; a flip is x' = width - 1 - x, with the width of the resized image."""
        moved = self._scaled(boxes)
        if self.flipped:
            moved[:, [0, 2]] = self.size[1] - 1 - moved[:, [2, 0]]
        return moved

    def transform_referred_boxes(self, boxes: np.ndarray) -> np.ndarray:
        """Return float32 [R, 4], clamped to [0, width - 1] x [0, height - 1]."""
        return self._clamped(self.transform_boxes(boxes))

    def transform_objects(self, boxes: np.ndarray) -> np.ndarray:
        """Return float32 [G, 4], clipped to [0, width] x [0, height]; a flip is x' = width - x."""
        height, width = self.size
        moved = self._scaled(boxes)
        if self.flipped:
            moved[:, [0, 2]] = width - moved[:, [2, 0]]
        return moved.clip(0, [width, height, width, height]).astype(np.float32)

    def transform_and_clamp_boxes(self, boxes: np.ndarray, name: str) -> np.ndarray:
        """Return float32 [R, 4], clamped to [0, width - 1] x [0, height - 1], with a positive area.

        A box that only covers the last column or row of pixels, and would be empty after clamping, becomes one pixel
        wide or high: boxes never have zero area. `name` describes them in the error about a box outside the image.
        """
        boxes = np.asarray(boxes, dtype=np.float64).reshape(-1, 4)
        original_height, original_width = self.original_size
        outside = (boxes[:, 0] >= original_width) | (boxes[:, 1] >= original_height) | (boxes[:, 2:] <= 0).any(axis=1)
        if outside.any():
            row = int(outside.argmax())
            raise UserError(
                f"{name}: box {row} [x1, y1, x2, y2] = {boxes[row].tolist()} lies outside the "
                f"{original_width} x {original_height} image; correct or remove it"
            )
        moved = self._clamped(self.transform_boxes(boxes))
        for low, high in ((0, 2), (1, 3)):
            is_empty = moved[:, high] <= moved[:, low]
            moved[is_empty, low] = np.maximum(moved[is_empty, high] - 1, 0)
            moved[is_empty, high] = moved[is_empty, low] + 1
        return moved

    def transform_mask(self, mask: ObjectMask) -> Bool[np.ndarray, "height width"]:
        """Return the mask of an object in pixels of the resized image, see `resize_mask`; a flip is x' = width - x."""
        return resize_mask(mask, self.original_size, self.size, flipped=self.flipped)

    def _clamped(self, moved: np.ndarray) -> np.ndarray:
        height, width = self.size
        return np.clip(moved, 0, np.array([width - 1, height - 1, width - 1, height - 1])).astype(np.float32)

    def _scaled(self, boxes: np.ndarray) -> np.ndarray:
        height, width = self.size
        original_height, original_width = self.original_size
        x_scale = width / original_width
        y_scale = height / original_height
        return np.asarray(boxes, dtype=np.float64).reshape(-1, 4) * (x_scale, y_scale, x_scale, y_scale)


@dataclasses.dataclass
class DetectionObjects:
    """Annotated objects of one image, the targets of the detection losses."""

    boxes: Float[np.ndarray, "G 4"]
    classes: Int64[np.ndarray, " G"]  # 0 .. K-1
    attributes: Int64[np.ndarray, "G T"] | None = None  # -1 = none in this slot


@dataclasses.dataclass
class LoadedImage:
    """One resized image."""

    pixels: UInt8[np.ndarray, "height width 3"]  # with precomputed features, only the shape is used
    image_transform: ImageTransform
    name: str  # for error messages, usually the path
    boxes: Float[np.ndarray, "R 4"] | None = None  # candidates; None: the detector proposes them
    box_ids: tuple[Id, ...] | None = None  # annotation ids, if all candidates are annotated objects
    box_classes: Int64[np.ndarray, " R"] | None = None  # annotated classes, if all candidates are annotated objects
    class_probs: Float[np.ndarray, "R C"] | None = None  # class distributions of the candidates, from a file
    predictions: BoxPredictions = BoxPredictions()  # what a detector predicts for the candidates
    phrases: tuple[str, ...] | None = None  # R phrases or class names for which the candidates were proposed
    objects: DetectionObjects | None = None
    roi_masks: Float[np.ndarray, "R S S"] | None = None  # instance masks in 0..1 on the RoI maps
    boxes_to_mask: Float[np.ndarray, "Q 4"] | None = None  # mask exactly these boxes; None: drawn at random
    features: Float[np.ndarray, "R D"] | None = None  # precomputed
    image_feature: Float[np.ndarray, " D"] | None = None  # precomputed feature of the whole image

    def without_boxes(self) -> LoadedImage:
        """Return a copy without candidate boxes, for image-blind controls: boxes reveal something about the image."""
        if self.boxes is None:
            return self
        emptied = {}
        for name in ("boxes", "box_classes", "class_probs", "roi_masks", "features"):
            values = getattr(self, name)
            if values is not None:
                emptied[name] = values[:0]
        no_predictions = self.predictions.select(slice(0))
        return dataclasses.replace(self, **emptied, predictions=no_predictions, phrases=None, box_ids=None)
