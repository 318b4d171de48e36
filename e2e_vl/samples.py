"""Samples from data sets and users: images, texts and ground truth, before any preprocessing.

Boxes are float64 xyxy, continuous, in pixels of the image as it is stored (after its EXIF rotation).
Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from detector.errors import UserError
from e2e_vl.io import Id
from e2e_vl.masks import ObjectMask
from e2e_vl.predictions import TrueObject


@dataclasses.dataclass(frozen=True)
class ImageBytes:
    """The contents of an image file in an archive or in memory."""

    content: bytes = dataclasses.field(repr=False)
    name: str  # archive and member, address, or what it is, for error messages

    def __str__(self) -> str:
        return self.name


# an image's file, its contents, or a function that finds either when it is needed
ImageSource = Path | ImageBytes | Callable[[], Path | ImageBytes]


class BrokenImageError(Exception):
    """An image that is missing or cannot be read; `__cause__` says which and why."""


@dataclasses.dataclass(frozen=True)
class AnnotatedObjects:
    """The annotated objects of one image, in the order of the file, or boxes from a user."""

    boxes: np.ndarray  # float64 [G, 4]
    origin: str  # file and image, or option of a command, for error messages
    classes: np.ndarray | None = None  # int64 [G], 0 .. K-1
    is_crowd: np.ndarray | None = None  # bool [G]; None: no object is a crowd
    attributes: np.ndarray | None = None  # int64 [G, T], -1 = none in this slot; None: the file has no attributes
    ids: tuple[Id, ...] | None = None  # G annotation ids
    names: tuple[str, ...] | None = None  # G class names; None where they are unknown
    # G lists of float64 [points, 2] outlines (x, y); None where they are unknown
    outlines: Sequence[list[np.ndarray]] | None = None
    attribute_names: Sequence[str] | None = None  # of the attributes, by their number; None: unknown
    scores: np.ndarray | None = None  # float32 [G], 0 to 1, of boxes from a user that a detector proposed
    image_size: tuple[int, int] | None = None  # (height, width), where the file of a user's boxes says it

    def __len__(self) -> int:
        return len(self.boxes)


@dataclasses.dataclass(frozen=True)
class BoxPredictions:
    """What a detector predicts for R boxes of one image; None where it predicts nothing of the kind."""

    classes: np.ndarray | None = None  # int64 [R], the best class except the background, 0 .. K-1
    scores: np.ndarray | None = None  # float32 [R], its probability
    attributes: np.ndarray | None = None  # int64 [R], the best attribute
    attribute_scores: np.ndarray | None = None  # float32 [R], its probability

    def select(self, rows: np.ndarray | slice) -> BoxPredictions:
        """Return the predictions for some of the boxes."""
        columns = {}
        for field in dataclasses.fields(self):
            values = getattr(self, field.name)
            columns[field.name] = None if values is None else values[rows]
        return BoxPredictions(**columns)


@dataclasses.dataclass(frozen=True)
class CandidateBoxes:
    """Candidate boxes of one image from a file or from a user, with features and labels."""

    boxes: np.ndarray  # float [R, 4]
    origin: str  # file and record, for error messages
    class_probs: np.ndarray | None = None  # float32 [R, C], distributions over the classes of a detector
    image_size: tuple[int, int] | None = None  # (height, width) of the original image, where the file says it
    features: np.ndarray | None = None  # float32 [R, D]
    image_feature: np.ndarray | None = None  # float32 [D], feature of the whole image
    predictions: BoxPredictions = BoxPredictions()
    phrases: tuple[str, ...] | None = None  # R phrases or class names, for which a detector proposed the boxes


class ImageKey(NamedTuple):
    """Identifies an image of a data set; splits joined by "+" may use the same id for different images."""

    split_index: int  # index of the joined split, see `VLDataset.split_values`
    id: str


@dataclasses.dataclass(frozen=True)
class SampleImage:
    """One image: its id, its file and its annotations."""

    id: str  # names it in files of boxes and features
    file: ImageSource
    size: tuple[int, int] | None = None  # (height, width) according to the annotations
    objects: AnnotatedObjects | None = None
    candidates: tuple[int, ...] | None = None  # rows of `objects` that are candidate boxes; None: all of them
    boxes: CandidateBoxes | None = None  # candidates of the sample itself, which replace those of every other source
    boxes_to_mask: np.ndarray | None = None  # float64 [Q, 4], mask exactly these; None: drawn at random
    # (whose id, id) of the image, as `VLDataset.id_namespace` has them, where an image's own data set says it
    image_aliases: tuple[tuple[str, str], ...] = ()
    split_index: int = 0  # index of the joined split that the image belongs to, see `VLDataset.split_values`

    @property
    def key(self) -> ImageKey:
        return ImageKey(self.split_index, self.id)

    def locate(self) -> Path | ImageBytes:
        return self.file() if callable(self.file) else self.file


Sentence = list[str | list[int]]  # words, and lists of objects of the image that the sentence names


@dataclasses.dataclass(frozen=True)
class SampleText:
    """One text of a data set, and its ground truth."""

    index: int  # its number in the data set
    words: str  # the text
    # plain JSON-able values that go into the predictions: ids, and kinds by which texts are grouped. No truth: a key
    # that is a field of the task's prediction is refused, unless the field is one of its `metadata_fields`
    metadata: dict[str, Any]
    # one of the records below, or one of a task's own, in pixels of the original image; None: unknown
    truth: Any = None
    image_index: tuple[int, ...] = (0,)  # rows of `Sample.images`; empty for a text without an image
    phrases: PhraseBoxes | None = None  # what it names in its first image, whatever the task; None: unknown
    # its data set, one of several joined ones, annotates phrases, but perhaps nothing else that the task learns from
    may_lack_target: bool = False


@dataclasses.dataclass(frozen=True)
class ChoiceText(SampleText):
    """A question with several possible answers; `words` is the question as plain text."""

    # sentences that stand before every choice, such as a question and the answer it was given
    query: tuple[Sentence, ...] = ()
    choices: tuple[Sentence, ...] = ()  # the possible answers
    is_learned: bool = True  # False: its truth is for metrics only, because other texts of the split have none
    # each name of an object is a phrase for its box; the preprocessor adds them, because it chooses the names
    names_are_phrases: bool = False


@runtime_checkable
class TextPool(Protocol):
    """Texts to draw from, such as a corpus."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> str: ...


@dataclasses.dataclass(frozen=True)
class Sample:
    """One image (or pair of images) with some of its texts."""

    images: tuple[SampleImage, ...]
    texts: tuple[SampleText, ...]  # about these images
    # all texts of the data set, also of other images, by their index; None: there are no others
    pool: TextPool | None = None
    own_texts: Sequence[int] = ()  # indices in `pool` of all texts about this image
    corpus: TextPool | None = None  # texts without images
    from_user: bool = False  # a user made this sample: nothing is drawn at random


@runtime_checkable
class DatasetInfo(Protocol):
    """Information about the training data for tasks, implemented by every data set."""

    groups: Sequence[Sequence[int]]  # text indices of each image
    class_names: Sequence[str] | None  # of the annotated objects
    corpus: TextPool | None  # texts without images

    def truths(self) -> Iterable[Any]:
        """Return the ground truth of every text that needs no image; None where it is unknown."""


# Kinds of ground truth. A reader states a truth once, in one of these records; the preprocessor of the task makes the
# targets and the fields of the prediction from it.


@dataclasses.dataclass(frozen=True)
class ReferredBoxes:
    """The boxes that an expression refers to, usually one; none if nothing in the image fits."""

    boxes: tuple[tuple[float, float, float, float], ...]
    ann_ids: tuple[Id, ...] | None = None  # annotations of the boxes; None: unknown
    category: str | None = None  # of the one box; None: unknown, or not exactly one box
    masks: tuple[ObjectMask, ...] | None = None  # of the boxes' objects; None: not needed


@dataclasses.dataclass(frozen=True)
class PhraseBoxes:
    """The phrases of a text and the boxes that each of them names."""

    spans: tuple[tuple[int, int], ...]  # of each phrase the first and the last character plus one in the text's words
    # of each phrase float64 [boxes, 4], no row where the phrase names nothing in the image; None: they are unknown
    boxes: tuple[np.ndarray, ...] | None
    is_complete: bool = False  # no phrase of the text is left out


@dataclasses.dataclass(frozen=True, kw_only=True)
class EntityPhrases(PhraseBoxes):
    """Phrases with boxes, and the entity that each of them names."""

    entities: tuple[str, ...]  # the id of each phrase's entity; phrases of several sentences may name the same one
    types: tuple[tuple[str, ...], ...]  # of each phrase, such as ("people",) or ("instruments", "other")


@dataclasses.dataclass(frozen=True)
class HumanAnswers:
    """The answers of several people to a question, as written."""

    answers: tuple[str, ...]
    most_frequent: str | None = None  # the most frequent answer according to the annotations; None: they do not say


@dataclasses.dataclass(frozen=True)
class CorrectAnswer:
    """The one right answer to a question, as written."""

    answer: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class StructuredAnswer(CorrectAnswer):
    """The one right answer, with the structure of the question (GQA)."""

    types: Mapping[str, str | None]  # "structural", "semantic" and "detailed"
    group: str | None  # of questions whose answers have a distribution
    entailed: tuple[str, ...]  # ids of the questions whose answers follow from this question and its answer
    steps: int  # reasoning steps in the question's program
    choices: Mapping[str, Sequence[str]] | None = None  # the "valid" and the "plausible" answers; None: unknown
    # boxes of the objects that the question and its full answer mention, xyxy, relative to the image's width and height
    named_boxes: Sequence[Sequence[float]] | None = None


@dataclasses.dataclass(frozen=True)
class ScoredAnswers:
    """The score of each known answer to a question, as written; empty if no answer has a score."""

    scores: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class CorrectChoice:
    """Which of the choices, or of the labels of a task, is right, from 0."""

    number: int


@dataclasses.dataclass(frozen=True)
class CategorisedObjects:
    """All objects of an image, with the data set's category numbers."""

    category_ids: tuple[int, ...]  # the category of each of the detector's K classes
    objects: tuple[TrueObject, ...]


# A user's question


@dataclasses.dataclass(frozen=True)
class Question:
    """One image and one text from a user."""

    image: Path | ImageBytes
    text: str
    boxes: AnnotatedObjects | None = None  # None: the model's own
    choices: Sequence[str] = ()
    answer: str | None = None  # the answer that a rationale is asked for
    boxes_to_mask: AnnotatedObjects | None = None  # that a pre-trained model is to recognise without their pixels
    class_names: Sequence[str] | None = None  # that `boxes` may have, where the text names boxes by their classes
    accepts_answer: bool = False  # the run reads an answer that is given
    others: tuple[Path | ImageBytes, ...] = ()  # further images that the text refers to

    @property
    def images(self) -> tuple[Path | ImageBytes, ...]:
        return (self.image, *self.others)

    def sample(
        self,
        text: SampleText,
        *,
        objects: AnnotatedObjects | None = None,
        masks_regions: bool = False,
        takes_choices: bool = False,
    ) -> Sample:
        """Return the sample of one text about the images, with the user's boxes as candidates.

        Args:
            objects: the user's boxes as annotated objects, for tasks whose texts name them; they are the candidates.
            masks_regions: the task predicts masked boxes; then only those of the user are masked.
        """
        num_images = len(text.image_index)
        if len(self.images) != num_images:
            images = "images" if num_images > 1 else "image"
            are = "are" if len(self.images) > 1 else "is"
            raise UserError(
                f"Texts of this run are about {num_images} {images}, and {len(self.images)} {are} given; "
                f"give {num_images} per text."
            )
        unused = {
            "choices": bool(self.choices) and not takes_choices,
            "given answer": self.answer is not None and not takes_choices,
            "boxes to mask": self.boxes_to_mask is not None and not masks_regions,
            "boxes of several images": bool(self.others) and (self.boxes is not None or self.boxes_to_mask is not None),
        }
        unused_names = [name for name, is_unused in unused.items() if is_unused]
        if unused_names:
            raise UserError(f"This run takes no {' and no '.join(unused_names)}.")
        boxes = None
        if objects is None and self.boxes is not None:
            boxes = CandidateBoxes(
                self.boxes.boxes,
                self.boxes.origin,
                predictions=BoxPredictions(scores=self.boxes.scores),
                phrases=self.boxes.names,
            )
        boxes_to_mask = None
        if masks_regions:
            boxes_to_mask = np.zeros((0, 4)) if self.boxes_to_mask is None else self.boxes_to_mask.boxes
        size = None if self.boxes is None else self.boxes.image_size
        images = []
        for file in self.images:
            images.append(SampleImage(str(file), file, size, objects, boxes=boxes, boxes_to_mask=boxes_to_mask))
        return Sample(tuple(images), (text,), from_user=True)
