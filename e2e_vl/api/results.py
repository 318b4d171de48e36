"""What `ask`, `hide` and `regions` return: plain values, and a picture of them.

Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from detector.errors import UserError
from detector.images import ResizeRule, load_resized, resize_boxes
from e2e_vl.api.inputs import ImageFile, stamp_of
from e2e_vl.drawing import box_colours, draw_boxes
from e2e_vl.samples import ImageBytes
from e2e_vl.tasks.base import CLEARLY_NAMED, box_in_words

SHOWN_SIZE = ResizeRule(600, 1000)  # of pictures; large photos are shrunk
MOST_ATTENDED = 5  # regions in a picture
SAYS_SOMETHING = 2.0  # attention of a region, as a multiple of an equal share, from which it is worth a box
WORTH_DRAWING = 0.05  # least score of a region in a picture
GREY = 127  # in place of hidden pixels


class Picture:
    """Shows `draw()` in a notebook."""

    def draw(self) -> Image.Image:
        raise NotImplementedError

    def _repr_png_(self) -> bytes:
        stream = io.BytesIO()
        self.draw().save(stream, "PNG")
        return stream.getvalue()


@dataclasses.dataclass(frozen=True)
class GroundedPhrase:
    """What one phrase of a text names, for a run with `phrases.weight`."""

    text: str
    characters: tuple[int, int]  # of the text: the first one and the last plus one
    box: list[float] | None  # xyxy in pixels of the original (first) image; None: there is no region
    score: float  # share of its attention on that box: low where several objects fit

    @property
    def is_clear(self) -> bool:
        """It names one region clearly; otherwise pictures mark it as unsure."""
        return self.box is not None and self.score >= CLEARLY_NAMED

    @property
    def label(self) -> str:
        """Its words and score, for a picture."""
        return f"{self.text} {self.score:.2f}" + ("" if self.is_clear else ", unsure")

    @property
    def line(self) -> str:
        """Its words, box and score."""
        return f"{self.text}: {'no region' if self.box is None else box_in_words(self.box)} ({self.score:.2f})"


@dataclasses.dataclass(frozen=True, eq=False)  # arrays have no single truth value, so == would fail
class Answer(Picture):
    """The answer to one text. All boxes are xyxy in pixels of the original image."""

    text: str  # what was asked
    answer: str  # the answer in words; where the task points at a box, where that is
    score: float | None  # of the answer, 0 to 1; None: the task gives several
    box: np.ndarray | None  # float32 [4], what the text refers to; None: the task points at no box, or found none
    top: list[tuple[str, float]]  # the best answers with their scores, best first; empty where answers are no texts
    lines: list[str]  # all of this in words
    boxes: np.ndarray  # float32 [R, 4], the candidate boxes that the answer was made from
    box_images: np.ndarray  # int64 [R], which of the `images` each of them lies in
    box_names: list[str]  # R names: what was detected, or in VCR what the user called the box; "" where it is unknown
    attention: np.ndarray | None  # float32 [R], how much the answer looks at each; None: the task points at a box
    unknown_words: tuple[str, ...]  # of the text, the choices and the given answer: the vocabulary lacks them
    pointed: list[tuple[str, list[float]]]  # labels and boxes that the answer points at; empty for most tasks
    phrases: list[GroundedPhrase]  # of the text; empty for a run that does not ground phrases
    record: dict[str, Any]  # the whole prediction, JSON-able
    images: tuple[ImageFile, ...] = dataclasses.field(repr=False)
    # size and time of change of each file when it was read, so that no picture shows another photo; None: in memory
    stamps: tuple[tuple[int, int] | None, ...] = dataclasses.field(repr=False)

    def draw(self, image: int = 0) -> Image.Image:
        """The boxes that the answer points at, or the regions that it looks at much more than at the others.

        In other colours the boxes of phrases, see `shown_phrases`; those of unsure ones are dashed.

        Args:
            image: number of the image, for a text about several images.

        Raises:
            FileNotFoundError, ValueError: the photo is gone, or was changed since it was asked about.
        """
        file, stamp = self.images[image], self.stamps[image]
        rows = np.flatnonzero(self.box_images == image)
        title = self.text if self.pointed else f"{self.text} -> {self.answer}" if self.answer else self.text
        phrases = self.shown_phrases() if image == 0 else []
        if self.pointed:
            labels, boxes = map(list, zip(*self.pointed, strict=True))
            return _picture(file, stamp, boxes, labels, title, phrases=phrases)
        hidden = self.record.get("hidden", [])
        covered = [one["box"] for one in hidden]  # the first of the candidates
        labels = [f"hidden: {one['classes'][0][0]} {one['classes'][0][1]:.2f}" for one in hidden]
        seen = [row for row in self._attended() if row >= len(hidden) and row in rows]
        labels += [f"{self.box_names[row]} attention {self.attention[row]:.2f}".strip() for row in seen]
        return _picture(file, stamp, [*covered, *self.boxes[seen]], labels, title, covered, phrases)

    def draw_candidates(self, image: int = 0) -> Image.Image:
        """All candidate boxes of one image with their numbers, and their names where they have some."""
        rows = np.flatnonzero(self.box_images == image)
        labels = [f"{row} {self.box_names[row]}".strip() for row in rows]
        return _picture(self.images[image], self.stamps[image], self.boxes[rows], labels, None)

    def shown_phrases(self) -> list[GroundedPhrase]:
        """The phrases that a picture shows, in their order: those that name one region clearly.

        The first phrase is about the answer itself; where no other one, such as the landmark of a relation, is clear,
        the other one with the best score is shown too. Left out are boxes that the answer points at anyway.
        """
        taken = [box for _, box in self.pointed]
        free = [one for one in self.phrases if one.box is not None and not any(_same(one.box, box) for box in taken)]
        landmarks = self.phrases[1:]
        best = None
        if not any(one.is_clear for one in landmarks):
            unsure = [one for one in free if any(one is landmark for landmark in landmarks)]
            best = max(unsure, key=lambda one: one.score, default=None)
        return [one for one in free if one.is_clear or one is best]

    def _attended(self) -> np.ndarray:
        """Rows of the regions that the answer looks at most, if it looks at them more than at others."""
        if self.attention is None or not len(self.attention):
            return np.zeros(0, dtype=np.int64)
        best = np.argsort(-self.attention, kind="stable")[:MOST_ATTENDED]
        return best[self.attention[best] >= SAYS_SOMETHING * self.attention.mean()]


@dataclasses.dataclass(frozen=True, eq=False)  # arrays have no single truth value, so == would fail
class FoundRegions(Picture):
    """The regions of one image, best score first. Boxes are xyxy in pixels of the original image."""

    boxes: np.ndarray  # float32 [R, 4]
    scores: np.ndarray  # float32 [R]
    classes: np.ndarray  # int64 [R], 0 .. K-1
    names: list[str]  # R class names; numbers where the names are unknown
    features: np.ndarray  # float32 [R, D]
    attributes: list[str]  # R most probable attributes; empty where the detector came without names of attributes
    image: ImageFile = dataclasses.field(repr=False)
    stamp: tuple[int, int] | None = dataclasses.field(repr=False)  # as `Answer.stamps`

    def __len__(self) -> int:
        return len(self.boxes)

    def draw(self) -> Image.Image:
        """The regions with their classes and scores, without those that only fill up the number."""
        rows = np.flatnonzero(self.scores >= WORTH_DRAWING)
        attributes = self.attributes or [""] * len(self)
        names = [f"{attribute} {name}".strip() for attribute, name in zip(attributes, self.names, strict=True)]
        labels = [f"{names[row]} {self.scores[row]:.2f}" for row in rows]
        return _picture(self.image, self.stamp, self.boxes[rows], labels, None)


def _picture(
    image: ImageFile,
    stamp: tuple[int, int] | None,
    boxes: Any,
    labels: list[str],
    title: str | None,
    covered: Any = (),
    phrases: Sequence[GroundedPhrase] = (),
) -> Image.Image:
    """Boxes in pixels of the original image, drawn on it; `covered` boxes hide what is in them."""
    found = stamp_of(image)
    if found is not None and found != stamp:
        raise UserError(f"{image} was changed after the model looked at it, so the boxes do not fit; ask again.")
    if isinstance(image, ImageBytes):
        pixels, size = load_resized(image.content, SHOWN_SIZE, "RGB", image.name)
    else:
        pixels, size = load_resized(image, SHOWN_SIZE, "RGB")
    pixels = pixels.copy()
    for x1, y1, x2, y2 in _moved(covered, size, pixels).astype(int):
        pixels[y1 : y2 + 1, x1 : x2 + 1] = GREY
    marks = marks_of(labels, phrases)
    moved = _moved([*boxes, *(phrase.box for phrase in phrases)], size, pixels)
    return Image.fromarray(draw_boxes(pixels, moved, title=title, **marks))


def marks_of(labels: Sequence[str], phrases: Sequence[GroundedPhrase]) -> dict[str, list[Any]]:
    """`labels`, `colours` and `dashed` of `draw_boxes` for boxes with these labels, then boxes of phrases."""
    return {
        "labels": [*labels, *(phrase.label for phrase in phrases)],
        "colours": box_colours(len(labels), len(phrases)),
        "dashed": [*[False] * len(labels), *(not phrase.is_clear for phrase in phrases)],
    }


def _same(one: Any, other: Any) -> bool:
    return np.allclose(one, other, atol=0.5)


def _moved(boxes: Any, size: tuple[int, int], pixels: np.ndarray) -> np.ndarray:
    return resize_boxes(np.asarray(boxes, dtype=np.float64).reshape(-1, 4), size, pixels.shape[:2])
