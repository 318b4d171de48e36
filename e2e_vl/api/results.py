"""What `ask`, `hide` and `regions` return: plain values, and a picture of them.

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

SHOWN_SIZE = ResizeRule(600, 1000)  # of pictures; large photos are shrunk
MOST_ATTENDED = 5  # regions in a picture
HIGH_ATTENTION = 2.0  # attention of a region, as a multiple of an equal share, from which it is drawn
MIN_DRAWN_SCORE = 0.05  # of a region in a picture
GREY = 127  # in place of masked pixels


@dataclasses.dataclass(frozen=True, eq=False)  # arrays have no single truth value, so == would fail
class Answer:
    """The answer to one text. All boxes are xyxy in pixels of the original image."""

    text: str  # what was asked
    answer: str  # the answer in words; where the task points at a box, where that is
    score: float | None  # of the answer, 0 to 1; None: the task gives several
    box: np.ndarray | None  # float32 [4], what the text refers to; None: the task points at no box, or found none
    top: Ranked  # the best answers with their scores, best first; empty where answers are no texts
    lines: list[str]  # all of this in words
    boxes: np.ndarray  # float32 [R, 4], the candidate boxes that the answer was made from
    box_images: np.ndarray  # int64 [R], which of the `images` each of them lies in
    box_names: list[str]  # R names: what was detected, or in VCR what the user called the box; "" where it is unknown
    attention: np.ndarray | None  # float32 [R], attention of the answer to each; None: the task points at a box
    unknown_words: tuple[str, ...]  # of the text, the choices and the given answer: the vocabulary lacks them
    answer_boxes: list[tuple[str, Box]]  # labels and boxes that the answer points at; empty for most tasks
    prediction: Prediction  # all of it, of the task's own class
    images: tuple[ImageFile, ...] = dataclasses.field(repr=False)

    @property
    def phrases(self) -> Sequence[GroundedPhrase]:
        """The phrases of the text; empty for a run that does not ground phrases."""
        return self.prediction.grounded

    def draw(self, image: int = 0) -> Image.Image:
        """The boxes that the answer points at, or the regions that get much more attention than the others.

        In other colours the boxes of phrases, see `shown_phrases`; those of unsure ones are dashed.

        Args:
            image: number of the image, for a text about several images.
        """
        phrases = self.shown_phrases() if image == 0 else []
        if self.answer_boxes:
            labels, boxes = map(list, zip(*self.answer_boxes, strict=True))
            return draw_on(self.images[image], boxes, labels, self.text, phrases=phrases)
        title = f"{self.text} -> {self.answer}" if self.answer else self.text
        masked = self.prediction.masked_regions  # the first of the candidates
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
        """All candidate boxes of one image with their numbers, and their names where they have some."""
        rows = np.flatnonzero(self.box_images == image)
        labels = [f"{row} {self.box_names[row]}".strip() for row in rows]
        return draw_on(self.images[image], self.boxes[rows], labels)

    def shown_phrases(self) -> list[GroundedPhrase]:
        """The phrases that a picture shows, in their order: those that name one region clearly.

        The first phrase is about the answer itself; where no other one, such as the landmark of a relation, is clear,
        the other one with the best score is shown too. Left out are boxes that the answer points at anyway.
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


@dataclasses.dataclass(frozen=True, eq=False)  # arrays have no single truth value, so == would fail
class FoundRegions:
    """The regions of one image, best score first. Boxes are xyxy in pixels of the original image."""

    boxes: np.ndarray  # float32 [R, 4]
    scores: np.ndarray  # float32 [R]
    classes: np.ndarray  # int64 [R], 0 .. K-1
    names: list[str]  # R class names; numbers where the names are unknown
    features: np.ndarray  # float32 [R, D]
    attributes: list[str]  # R most probable attributes; empty where the detector came without names of attributes
    image: ImageFile = dataclasses.field(repr=False)

    def __len__(self) -> int:
        return len(self.boxes)

    def draw(self) -> Image.Image:
        """The regions with their classes and scores, without those that only fill up the number."""
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
    """Draw boxes, in pixels of the original image, on it; `covered` boxes hide what is in them."""
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
    """`labels`, `colours` and `dashed` of `draw_boxes` for boxes with these labels, then boxes of phrases."""
    return {
        "labels": [*labels, *(phrase.label for phrase in phrases)],
        "colours": box_colours(len(labels), len(phrases)),
        "dashed": [*[False] * len(labels), *(not phrase.is_clear for phrase in phrases)],
    }
