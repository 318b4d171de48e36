"""The results of `ask`, `predict_masked` and `regions`, with pictures."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from PIL import Image

from detector.errors import UserError, user_path
from detector.images import ResizeRule, load_resized, resize_boxes
from detector.io import atomic_file, write_json
from e2e_vl.data.user_images import ImageFile
from e2e_vl.drawing import PALETTE, choose_box_colours, draw_boxes, tint
from e2e_vl.predictions import GroundedPhrase, Prediction, Ranked
from e2e_vl.samples import ImageBytes

DISPLAY_SIZE = ResizeRule(600, 1000)  # of pictures
MAX_ATTENDED_REGIONS = 5  # maximum number of attended regions in a picture
HIGH_ATTENTION = 2.0  # minimum attention of a drawn region, as a multiple of the mean
MIN_DRAWN_SCORE = 0.05  # minimum score of a drawn region
PICTURE_FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}
GREY = 127  # value of masked pixels


@dataclasses.dataclass(frozen=True, eq=False)  # == is ambiguous for arrays
class Answer:
    """The answer to one text. All boxes are xyxy in pixels of the original image."""

    question: str
    text: str  # the answer in words; for tasks that predict a box, its position
    score: float | None  # score of the answer, 0 to 1; None: the answer has several scores
    box: np.ndarray | None  # float32 [4], the box that the text refers to; None: no box was predicted
    top_answers: Ranked  # the best answers with their scores, best first; empty if answers are not texts
    top_boxes: np.ndarray  # float32 [K, 4], the boxes of `top_answers`; K = 0 if the task answers in words
    lines: list[str]  # the answer as lines of text
    boxes: np.ndarray  # float32 [R, 4], the candidate boxes
    refined_boxes: np.ndarray | None  # float32 [R, 4], the same boxes after refinement; None: boxes are not refined
    box_images: np.ndarray  # int64 [R], the image index of each box in `images`
    box_names: list[str]  # R class names: predicted, or given by the user; "" if unknown
    attention: np.ndarray | None  # float32 [R], attention from the answer to each region; None: the task predicts a box
    unknown_words: tuple[str, ...]  # words of the text, the choices and the given answer that are not in the vocabulary
    warnings: tuple[str, ...]  # why the answer may be worth little, in sentences
    answer_boxes: list[tuple[str, np.ndarray]]  # labelled boxes that the answer consists of; empty for most tasks
    prediction: Prediction  # the full prediction, of the task's class, as `e2e-vl ask` writes it
    images: tuple[ImageFile, ...]

    def __repr__(self) -> str:
        score = "" if self.score is None else f" ({self.score:.3f})"
        sentences = [f"{self.text}{score}", *self.warnings]
        return f"<Answer to {self.question!r}: {' '.join(sentences)}>"

    @property
    def is_unsure(self) -> bool:
        """Whether the answer is too uncertain to rely on, see `Task.certainty`; `warnings` say why."""
        return self.prediction.is_unsure

    @property
    def marked_lines(self) -> list[str]:
        """The `lines`; the first one ends with a mark if the answer is unsure."""
        if not self.is_unsure or not self.lines:
            return self.lines
        first, *others = self.lines
        return [f"{first} (unsure)", *others]

    @property
    def mask(self) -> np.ndarray | None:
        """The mask of what the text refers to, bool [height, width] of the original image; None: there are no masks."""
        segmentation = getattr(self.prediction, "segmentation", None)
        return None if segmentation is None else segmentation.to_mask()

    @functools.cached_property
    def phrases(self) -> list[GroundedPhrase]:
        """The phrases of the text, with boxes float32 [4]; empty for a run that does not ground phrases.

        If the null candidate wins, the first phrase, which names the target, has no box.
        """
        nothing_fits = self.box is None and getattr(self.prediction, "null_score", None) is not None
        phrases = []
        for number, phrase in enumerate(self.prediction.grounded):
            box = phrase.box
            if nothing_fits and number == 0:
                box = None
            if box is not None:
                box = np.array(box, np.float32)
            phrases.append(msgspec.structs.replace(phrase, box=box))
        return phrases

    def from_score(self, min_score: float) -> Answer:
        """Return the answer with only those `top_answers` and `top_boxes` that score at least `min_score`."""
        count = sum(score >= min_score for _, score in self.top_answers)  # best first
        return dataclasses.replace(self, top_answers=self.top_answers[:count], top_boxes=self.top_boxes[:count])

    def draw(self, image: int = 0) -> Image.Image:
        """Draw the boxes of the answer, with its mask if there is one, or else the regions with the most attention.

        Boxes of phrases have other colours, see `shown_phrases`. The boxes of an unsure answer and of uncertain phrases
        are dashed.

        Args:
            image: image index, for a text about several images.
        """
        phrases = self.shown_phrases() if image == 0 else []
        heading = self.question
        if self.text and not self.answer_boxes:
            heading += f" -> {self.text}"
            if self.is_unsure:
                heading += " (unsure)"
        title = "\n".join((heading, *self.warnings))
        if self.answer_boxes:
            labels, boxes = map(list, zip(*self.answer_boxes, strict=True))
            return draw_on(
                self.images[image], boxes, labels, title, phrases=phrases, is_unsure=self.is_unsure, mask=self.mask
            )
        boxes = []
        labels = []
        for region in self.prediction.masked_regions:  # they are the first candidates
            class_name, score = region.classes[0]
            boxes.append(region.box)
            labels.append(f"masked: {class_name} {score:.2f}")
        covered = list(boxes)
        for label, box in self.attended_regions(image):
            boxes.append(box)
            labels.append(label)
        return draw_on(self.images[image], boxes, labels, title, covered, phrases)

    def show(self, image: int = 0) -> None:
        """Show the picture of `draw` in the viewer of the system, as `PIL.Image.show` does."""
        self.draw(image).show()

    def attended_regions(self, image: int = 0) -> list[tuple[str, np.ndarray]]:
        """Return label and box of the regions of an image with the most attention, highest first; no masked ones."""
        if self.attention is None or not len(self.attention):
            return []
        best = np.argsort(-self.attention, kind="stable")[:MAX_ATTENDED_REGIONS]
        best = best[self.attention[best] >= HIGH_ATTENTION * self.attention.mean()]
        num_masked = len(self.prediction.masked_regions)  # the first rows
        rows = [row for row in best if row >= num_masked and self.box_images[row] == image]
        labels = [f"{self.box_names[row]} attention {self.attention[row]:.2f}".strip() for row in rows]
        return list(zip(labels, self.boxes[rows], strict=True))

    def _repr_png_(self) -> bytes:
        """Return the content of a PNG file, for notebooks."""
        return self.draw()._repr_png_()

    def draw_candidates(self, image: int = 0) -> Image.Image:
        """Draw all candidate boxes of image number `image`, from 0, with their indices and names."""
        rows = np.flatnonzero(self.box_images == image)
        labels = [f"{row} {self.box_names[row]}".strip() for row in rows]
        return draw_on(self.images[image], self.boxes[rows], labels)

    def to_dict(self) -> dict[str, Any]:
        """Return the answer in plain values for JSON: all fields (arrays as lists), `is_unsure` and the phrases."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        values |= {
            "is_unsure": self.is_unsure,
            "phrases": self.phrases,
            "images": [str(image) for image in self.images],
        }
        return to_plain(values)

    def save(self, path: str | Path, image: int = 0) -> None:
        """Write the picture of `draw`, or `to_dict` as JSON, by the suffix of the file.

        Args:
            image: image index of the picture, for a text about several images.
        """
        save_result(path, self.to_dict, functools.partial(self.draw, image))

    def shown_phrases(self) -> list[GroundedPhrase]:
        """Return the phrases that `draw` shows, in text order: those that are clearly grounded in one region.

        The first phrase usually refers to the answer itself. If none of the others, such as the landmark of a relation,
        is clear, the one with the best score is shown too. Phrases whose box is a box of the answer are left out.
        """
        free = []  # numbers of the phrases whose boxes are not drawn as the answer's
        for number, phrase in enumerate(self.phrases):
            if phrase.box is None:
                continue
            is_answer = any(np.allclose(phrase.box, box, atol=0.5) for _, box in self.answer_boxes)
            if not is_answer:
                free.append(number)
        best = None
        if not any(phrase.is_clear for phrase in self.phrases[1:]):
            landmarks = [number for number in free if number > 0]
            best = max(landmarks, key=lambda number: self.phrases[number].score, default=None)
        return [self.phrases[number] for number in free if self.phrases[number].is_clear or number == best]


@dataclasses.dataclass(frozen=True, eq=False)  # == is ambiguous for arrays
class Region:
    """One region of an image."""

    box: np.ndarray  # float32 [4], xyxy in pixels of the original image
    score: float  # 0 to 1
    class_index: int
    name: str  # of the class
    attribute: str  # the most probable one; "" if attributes are unknown
    feature: np.ndarray = dataclasses.field(repr=False)  # float32 [D]

    def to_dict(self) -> dict[str, Any]:
        """Return the region in plain values for JSON, without its feature."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del values["feature"]
        return to_plain(values)


@dataclasses.dataclass(frozen=True, eq=False)  # == is ambiguous for arrays
class ImageRegions:
    """Regions of one image: predicted, best score first, or given. Boxes are xyxy in pixels of the original image.

    It is a sequence of `Region`; a slice or an array of indices gives fewer `ImageRegions`.
    """

    boxes: np.ndarray  # float32 [R, 4]
    scores: np.ndarray  # float32 [R]
    classes: np.ndarray  # int64 [R], 0 .. K-1
    names: list[str]  # R class names; "class 7" if the names are unknown
    features: np.ndarray  # float32 [R, D]
    attributes: list[str]  # R most probable attributes; empty if their names are unknown
    image: ImageFile
    warning: str = ""  # why they may be worth nothing

    def __len__(self) -> int:
        return len(self.boxes)

    def __iter__(self) -> Iterator[Region]:
        return (self[row] for row in range(len(self)))

    def __getitem__(self, index: Any) -> Any:
        """Return a `Region` for an integer; `ImageRegions` for a slice, a list or array of indices, or a bool mask."""
        if not isinstance(index, int | np.integer):
            rows = np.arange(len(self))[index]
            attributes = []
            if self.attributes:
                attributes = [self.attributes[row] for row in rows]
            return dataclasses.replace(
                self,
                boxes=self.boxes[rows],
                scores=self.scores[rows],
                classes=self.classes[rows],
                names=[self.names[row] for row in rows],
                features=self.features[rows],
                attributes=attributes,
            )
        return Region(
            box=self.boxes[index],
            score=float(self.scores[index]),
            class_index=int(self.classes[index]),
            name=self.names[index],
            attribute=self.attributes[index] if self.attributes else "",
            feature=self.features[index],
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the regions in plain values for JSON, without their features."""
        return {
            "image": str(self.image),
            "regions": [region.to_dict() for region in self],
            "warning": self.warning,
        }

    def save(self, path: str | Path) -> None:
        """Write the picture of `draw`, or `to_dict` as JSON, by the suffix of the file."""
        save_result(path, self.to_dict, self.draw)

    def __repr__(self) -> str:
        best = ", ".join(f"{name} {score:.2f}" for name, score in zip(self.names[:3], self.scores, strict=False))
        text = f"{len(self)} ImageRegions with {self.features.shape[1]} features"
        if best:
            text += f", best {best}"
        if self.warning:
            text += f"; {self.warning}"
        return f"<{text}>"

    def draw(self) -> Image.Image:
        """Draw the regions with their classes and scores, except those with very low scores."""
        rows = np.flatnonzero(self.scores >= MIN_DRAWN_SCORE)
        attributes = self.attributes or [""] * len(self)
        labels = [f"{attributes[row]} {self.names[row]} {self.scores[row]:.2f}".strip() for row in rows]
        return draw_on(self.image, self.boxes[rows], labels, self.warning)

    def show(self) -> None:
        """Show the picture of `draw` in the viewer of the system, as `PIL.Image.show` does."""
        self.draw().show()

    def _repr_png_(self) -> bytes:
        """Return the content of a PNG file, for notebooks."""
        return self.draw()._repr_png_()


def to_plain(value: Any) -> Any:
    """Convert nested records, arrays and numbers of numpy to values for JSON."""

    def convert(value: Any) -> Any:
        if isinstance(value, np.ndarray | np.generic):
            return value.tolist()
        raise TypeError(f"{type(value).__name__} has no form in JSON")

    return msgspec.to_builtins(value, enc_hook=convert)


def save_result(path: str | Path, to_dict: Callable[[], dict[str, Any]], draw: Callable[[], Image.Image]) -> None:
    """Write a result as JSON or as a picture, by the suffix of the file; missing folders are made."""
    path = user_path(path, "The file")
    suffix = path.suffix.lower()
    if suffix == ".json":
        write_json(path, to_dict())
    elif suffix in PICTURE_FORMATS:
        with atomic_file(path) as part:
            draw().save(part, PICTURE_FORMATS[suffix])
    else:
        raise UserError(f"{path}: a result is saved as .json, or as a picture: {', '.join(PICTURE_FORMATS)}.")


class ExampleScene(NamedTuple):
    """An image that ships with a model, and texts about it."""

    image: Path
    texts: list[str]
    boxes: list[list[float] | None]  # what each text refers to, xyxy in pixels of the image; None: nothing


def draw_on(
    image: ImageFile,
    boxes: Any,
    labels: list[str],
    title: str | None = None,
    covered: Any = (),
    phrases: Sequence[GroundedPhrase] = (),
    is_unsure: bool = False,
    mask: np.ndarray | None = None,
) -> Image.Image:
    """Draw boxes given in pixels of the original image; pixels inside the `covered` boxes become grey.

    `mask`, bool [height, width] of the original image, is tinted in the colour of the first box.
    """
    content = image.content if isinstance(image, ImageBytes) else image
    pixels, size = load_resized(content, DISPLAY_SIZE, "RGB", str(image))
    pixels = pixels.copy()

    def on_picture(boxes: Any) -> np.ndarray:
        return resize_boxes(np.asarray(boxes, dtype=np.float64).reshape(-1, 4), size, pixels.shape[:2])

    for x1, y1, x2, y2 in on_picture(covered).astype(int):
        pixels[y1 : y2 + 1, x1 : x2 + 1] = GREY
    if mask is not None:
        pixels = tint(pixels, mask, PALETTE[0])
    moved = on_picture([*boxes, *(phrase.box for phrase in phrases)])
    return Image.fromarray(draw_boxes(pixels, moved, title=title, **box_marks(labels, phrases, is_unsure)))


def box_marks(
    labels: Sequence[str], phrases: Sequence[GroundedPhrase], is_unsure: bool = False
) -> dict[str, list[Any]]:
    """Return `labels`, `colours` and `dashed` of `draw_boxes` for labelled boxes followed by boxes of phrases.

    `is_unsure`: the labelled boxes are of an unsure answer.
    """
    return {
        "labels": [*labels, *(phrase.label for phrase in phrases)],
        "colours": choose_box_colours(len(labels), len(phrases)),
        "dashed": [is_unsure] * len(labels) + [not phrase.is_clear for phrase in phrases],
    }
