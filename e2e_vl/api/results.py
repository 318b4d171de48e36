"""The results of `ask`, `hide` and `regions`, with pictures.

Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from detector.images import ResizeRule, load_resized, resize_boxes
from e2e_vl.api.inputs import ImageFile
from e2e_vl.drawing import box_colours, draw_boxes
from e2e_vl.predictions import Box, GroundedPhrase, Prediction, Ranked
from e2e_vl.samples import ImageBytes

SHOWN_SIZE = ResizeRule(600, 1000)  # of pictures
MOST_ATTENDED = 5  # maximum number of attended regions in a picture
HIGH_ATTENTION = 2.0  # minimum attention of a drawn region, as a multiple of the mean
MIN_DRAWN_SCORE = 0.05  # minimum score of a drawn region
GREY = 127  # value of masked pixels


@dataclasses.dataclass(frozen=True, eq=False)  # == is ambiguous for arrays
class Answer:
    """The answer to one text. All boxes are xyxy in pixels of the original image."""

    text: str  # the question
    answer: str  # the answer in words; for tasks that predict a box, its position
    score: float | None  # score of the answer, 0 to 1; None: the task gives several
    box: np.ndarray | None  # float32 [4], the box that the text refers to; None: no box was predicted
    top: Ranked  # the best answers with their scores, best first; empty if answers are not texts
    lines: list[str]  # the answer as lines of text
    boxes: np.ndarray  # float32 [R, 4], the candidate boxes
    box_images: np.ndarray  # int64 [R], the image index of each box in `images`
    box_names: list[str]  # R predicted classes, or in VCR the names the user gave; "" if unknown
    attention: np.ndarray | None  # float32 [R], attention from the answer to each region; None: the task predicts a box
    unknown_words: tuple[str, ...]  # words of the text, the choices and the given answer that are not in the vocabulary
    answer_boxes: list[tuple[str, Box]]  # labelled boxes that the answer consists of; empty for most tasks
    prediction: Prediction  # the full prediction, in the task's class
    images: tuple[ImageFile, ...] = dataclasses.field(repr=False)

    @property
    def phrases(self) -> Sequence[GroundedPhrase]:
        """The phrases of the text; empty for a run that does not ground phrases."""
        return self.prediction.grounded

    def draw(self, image: int = 0) -> Image.Image:
        """Draw the boxes of the answer, or else the regions with the most attention.

        Boxes of phrases have other colours, see `shown_phrases`; those of uncertain phrases are dashed.

        Args:
            image: image index, for a text about several images.
        """
        phrases = self.shown_phrases() if image == 0 else []
        if self.answer_boxes:
            labels, boxes = map(list, zip(*self.answer_boxes, strict=True))
            return draw_on(self.images[image], boxes, labels, self.text, phrases=phrases)
        title = f"{self.text} -> {self.answer}" if self.answer else self.text
        masked = self.prediction.masked_regions  # they are the first candidates
        covered = [one.box for one in masked]
        labels = [f"masked: {one.classes[0][0]} {one.classes[0][1]:.2f}" for one in masked]
        rows = []
        if self.attention is not None and len(self.attention):
            best = np.argsort(-self.attention, kind="stable")[:MOST_ATTENDED]
            best = best[self.attention[best] >= HIGH_ATTENTION * self.attention.mean()]
            rows = [row for row in best if row >= len(masked) and self.box_images[row] == image]
        labels += [f"{self.box_names[row]} attention {self.attention[row]:.2f}".strip() for row in rows]
        return draw_on(self.images[image], [*covered, *self.boxes[rows]], labels, title, covered, phrases)

    def _repr_png_(self) -> bytes:
        """For notebooks."""
        return self.draw()._repr_png_()

    def draw_candidates(self, image: int = 0) -> Image.Image:
        """Draw all candidate boxes of one image with their indices and names."""
        rows = np.flatnonzero(self.box_images == image)
        labels = [f"{row} {self.box_names[row]}".strip() for row in rows]
        return draw_on(self.images[image], self.boxes[rows], labels)

    def shown_phrases(self) -> list[GroundedPhrase]:
        """The phrases drawn in a picture, in their order: those with a clear region.

        The first phrase is about the answer itself. If no other phrase, such as the landmark of a relation, is clear,
        the one with the best score is included. Boxes of the answer are left out.
        """
        taken = [box for _, box in self.answer_boxes]
        free = [
            number
            for number, one in enumerate(self.phrases)
            if one.box is not None and not any(np.allclose(one.box, box, atol=0.5) for box in taken)
        ]
        best = None
        if not any(one.is_clear for one in self.phrases[1:]):
            landmarks = [number for number in free if number > 0]
            best = max(landmarks, key=lambda number: self.phrases[number].score, default=None)
        return [self.phrases[number] for number in free if self.phrases[number].is_clear or number == best]


@dataclasses.dataclass(frozen=True, eq=False)  # == is ambiguous for arrays
class FoundRegions:
    """The regions of one image, best score first. Boxes are xyxy in pixels of the original image."""

    boxes: np.ndarray  # float32 [R, 4]
    scores: np.ndarray  # float32 [R]
    classes: np.ndarray  # int64 [R], 0 .. K-1
    names: list[str]  # R class names; "class 7" if the names are unknown
    features: np.ndarray  # float32 [R, D]
    attributes: list[str]  # R most probable attributes; empty if their names are unknown
    image: ImageFile = dataclasses.field(repr=False)

    def __len__(self) -> int:
        return len(self.boxes)

    def draw(self) -> Image.Image:
        """Draw the regions with their classes and scores, except those with very low scores."""
        rows = np.flatnonzero(self.scores >= MIN_DRAWN_SCORE)
        attributes = self.attributes or [""] * len(self)
        labels = [f"{attributes[row]} {self.names[row]} {self.scores[row]:.2f}".strip() for row in rows]
        return draw_on(self.image, self.boxes[rows], labels)

    def _repr_png_(self) -> bytes:
        """For notebooks."""
        return self.draw()._repr_png_()


def draw_on(
    image: ImageFile,
    boxes: Any,
    labels: list[str],
    title: str | None = None,
    covered: Any = (),
    phrases: Sequence[GroundedPhrase] = (),
) -> Image.Image:
    """Draw boxes, given in pixels of the original image; the pixels inside `covered` boxes are grey."""
    if isinstance(image, ImageBytes):
        pixels, size = load_resized(image.content, SHOWN_SIZE, "RGB", image.name)
    else:
        pixels, size = load_resized(image, SHOWN_SIZE, "RGB")
    pixels = pixels.copy()

    def on_picture(boxes: Any) -> np.ndarray:
        return resize_boxes(np.asarray(boxes, dtype=np.float64).reshape(-1, 4), size, pixels.shape[:2])

    for x1, y1, x2, y2 in on_picture(covered).astype(int):
        pixels[y1 : y2 + 1, x1 : x2 + 1] = GREY
    moved = on_picture([*boxes, *(phrase.box for phrase in phrases)])
    return Image.fromarray(draw_boxes(pixels, moved, title=title, **marks_of(labels, phrases)))


def marks_of(labels: Sequence[str], phrases: Sequence[GroundedPhrase]) -> dict[str, list[Any]]:
    """`labels`, `colours` and `dashed` of `draw_boxes` for labelled boxes followed by boxes of phrases."""
    return {
        "labels": [*labels, *(phrase.label for phrase in phrases)],
        "colours": box_colours(len(labels), len(phrases)),
        "dashed": [*[False] * len(labels), *(not phrase.is_clear for phrase in phrases)],
    }
