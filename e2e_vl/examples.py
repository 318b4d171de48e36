"""One image (or pair) with its texts, ready to be joined into a batch: resized pixels, moved boxes, wordpieces.

Shape legend: see `e2e_vl/structures.py`.

Boxes are xyxy float32 in pixels of the resized image.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Float, Int64, UInt8

from detector.errors import UserError
from e2e_vl.layout import LaidText
from e2e_vl.samples import FOUND
from e2e_vl.targets import Targets


@dataclasses.dataclass(frozen=True)
class Placement:
    """How pixels of a stored image became pixels of the resized one.

    Boxes are given as float [R, 4] xyxy in pixels of the stored image, and come back in pixels of the resized image.
    """

    original_size: tuple[int, int]  # (height, width)
    size: tuple[int, int]  # (height, width) after the resize
    flipped: bool = False

    def move_boxes(self, boxes: np.ndarray) -> np.ndarray:
        """Scale boxes and flip them, without clamping.

        A flip is x' = width - 1 - x on both corners as they are stored (official VL-BERT code), with the width
        of the resized image.

        Returns:
            float64 [R, 4].
        """
        width = self.size[1]
        moved = self._scaled(boxes)
        if self.flipped:
            moved[:, [0, 2]] = width - 1 - moved[:, [2, 0]]
        return moved

    def move_objects(self, boxes: np.ndarray) -> np.ndarray:
        """Scale, mirror and clip as Detectron2 does: x' = width - x, clipped to [0, width] x [0, height].

        For the targets of detection losses. (`move_and_clamp_boxes` follows the official VL-BERT code.)

        Returns:
            float32 [G, 4].
        """
        height, width = self.size
        moved = self._scaled(boxes)
        if self.flipped:
            moved[:, [0, 2]] = width - moved[:, [2, 0]]
        return moved.clip(0, [width, height, width, height]).astype(np.float32)

    def move_and_clamp_boxes(self, boxes: np.ndarray, name: str) -> np.ndarray:
        """Scale, flip and clamp boxes to [0, width - 1] x [0, height - 1] (official VL-BERT code).

        A box that lies in the image but loses its whole width or height to the clamp, because it only covers the last
        pixel, becomes one pixel wide or high there: boxes never have zero area.

        Args:
            name: names the boxes in the error.

        Returns:
            float32 [R, 4].

        Raises:
            ValueError: a box lies outside the stored image.
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
        height, width = self.size
        moved = self.move_boxes(boxes)
        moved = np.clip(moved, 0, np.array([width - 1, height - 1, width - 1, height - 1])).astype(np.float32)
        for low, high in ((0, 2), (1, 3)):
            lost = moved[:, high] <= moved[:, low]
            moved[lost, low] = np.maximum(moved[lost, high] - 1, 0)
            moved[lost, high] = moved[lost, low] + 1
        return moved

    def _scaled(self, boxes: np.ndarray) -> np.ndarray:
        x_scale, y_scale = self.size[1] / self.original_size[1], self.size[0] / self.original_size[0]
        return np.asarray(boxes, dtype=np.float64).reshape(-1, 4) * (x_scale, y_scale, x_scale, y_scale)


@dataclasses.dataclass
class DetectionObjects:
    """Annotated objects of one image, the targets of the detection losses."""

    boxes: Float[np.ndarray, "G 4"]
    classes: Int64[np.ndarray, " G"]  # 0 .. K-1
    attributes: Int64[np.ndarray, "G T"] | None = None  # -1 = none in this slot


@dataclasses.dataclass
class ImageExample:
    """One resized image."""

    pixels: UInt8[np.ndarray, "height width 3"]  # of precomputed features only its shape counts
    placement: Placement
    name: str  # for error messages, usually the path
    boxes: Float[np.ndarray, "R 4"] | None = None  # candidates; None: the detector proposes them
    box_ids: tuple[int, ...] | None = None  # annotation ids of the candidates, where all of them are annotated
    box_classes: Int64[np.ndarray, " R"] | None = None  # annotated classes, where all candidates are annotated
    class_probs: Float[np.ndarray, "R C"] | None = None  # class distributions of the candidates, from a file
    found_classes: Int64[np.ndarray, " R"] | None = None  # what a detector found in the candidates, see `FOUND`
    found_scores: Float[np.ndarray, " R"] | None = None
    found_attributes: Int64[np.ndarray, " R"] | None = None
    found_attribute_scores: Float[np.ndarray, " R"] | None = None
    objects: DetectionObjects | None = None
    roi_masks: Float[np.ndarray, "R S S"] | None = None  # instance masks in 0..1 on the RoI maps
    hide: Float[np.ndarray, "Q 4"] | None = None  # exactly these boxes are to be hidden; None: drawn at random
    features: Float[np.ndarray, "R D"] | None = None  # precomputed
    image_feature: Float[np.ndarray, " D"] | None = None  # precomputed feature of the whole image

    def without_boxes(self) -> ImageExample:
        """A copy without candidate boxes: their number and places tell about the image."""
        if self.boxes is None:
            return self
        columns = ("boxes", "box_classes", "class_probs", "roi_masks", "features", *FOUND)
        rows = {name: getattr(self, name) for name in columns}
        emptied = {name: None if values is None else values[:0] for name, values in rows.items()}
        return dataclasses.replace(self, **emptied, box_ids=None)


@dataclasses.dataclass(frozen=True)
class TextPhrases:
    """The phrases of one text, see `e2e_vl.phrases.PhraseBatch`."""

    words: str  # the text as written
    places: Int64[np.ndarray, "L 2"]  # first character of each wordpiece and the last plus one; 0, 0 at special ones
    spans: Int64[np.ndarray, "n 2"]  # first wordpiece of each phrase and the last plus one
    boxes: list[Float[np.ndarray, "_ 4"]]  # of each phrase; no row where it names no box or none is known
    is_complete: bool  # all phrases of the text are listed


@dataclasses.dataclass
class TextExample:
    """One text, its targets, and which images of its `Example` it looks at."""

    laid: LaidText
    looks_at: tuple[int, ...]  # rows of `Example.images`; empty for a text without an image
    record: dict[str, Any]  # plain JSON-able values: ids, text, truth in pixels of the original image
    targets: Targets | None = None  # a class of the task's own
    seed: int | None = None  # from which the model draws what is random about the text
    region_of_token: Int64[np.ndarray, " L"] | None = None  # row of the candidate box a wordpiece names; -1 = none
    # None: nobody asks for them, or they are the phrases that the data state of the text
    phrases: TextPhrases | None = None
    # what it says, where that is not the text of the data, whose phrases are then not its own
    other_words: str | None = None


@dataclasses.dataclass
class Example:
    """One image (or pair) with the texts that look at it."""

    images: list[ImageExample]
    texts: list[TextExample]
