"""VCR: questions about a film scene with four answers (Q->A), or with four rationales for an answer (QA->R).

Files (`data.files`, relative to `data.root`; {split} is the split)
    questions  {split}.jsonl: one question per line
    images     vcr1images: folder of the image and metadata files
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta
from typing_extensions import override

from detector.errors import UserError
from detector.io import read_json
from e2e_vl.config import BoxSource
from e2e_vl.data.base import DataFiles, DataNeeds, VLDataset
from e2e_vl.data.box_checks import require_pixels
from e2e_vl.data.config import CLASS_NAMES, VCRDatasetConfig
from e2e_vl.data.table_files import tabulate
from e2e_vl.data.tables import SerializedList, SkippedRecords, TextGroups, drop_repeats, stream_lines
from e2e_vl.io import Count, Name, Pixel, Record, Side, require_unique
from e2e_vl.samples import AnnotatedObjects, ChoiceText, CorrectChoice, Sample, SampleImage, Sentence

CHOICES = 4
_Tokens = Annotated[list[str | Annotated[list[Count], Meta(min_length=1)]], Meta(min_length=1)]
_Choices = Annotated[list[_Tokens], Meta(min_length=CHOICES, max_length=CHOICES)]
_Label = Literal[0, 1, 2, 3] | None  # None in the test split
Outlines = list[Annotated[list[tuple[Pixel, Pixel]], Meta(min_length=1)]]  # of one object: polygons of points (x, y)


class VCRQuestion(Record):
    """One line of a jsonl file."""

    annot_id: Name
    img_fn: Name  # image file, relative to vcr1images
    metadata_fn: Name  # metadata file, relative to vcr1images
    objects: list[Name]  # class names; texts refer to objects by index
    question: _Tokens
    answer_choices: _Choices
    rationale_choices: _Choices
    answer_label: _Label = None
    rationale_label: _Label = None
    family: str | None = None  # kind of question, in synthetic data only

    @property
    def id(self) -> str:
        return self.annot_id

    @property
    def sentences(self) -> tuple[_Tokens, ...]:
        """The question and all its choices."""
        return (self.question, *self.answer_choices, *self.rationale_choices)


class ImageMetadata(Record):
    """The metadata file of an image, see `VCRQuestion.metadata_fn`.

    It may also have `attribute_ids` (synthetic data only): a list of attribute numbers from 0 for each object, all of
    the same length. A fifth number of a box is its score.
    """

    boxes: list[Annotated[list[Pixel], Meta(min_length=4, max_length=5)]]
    segms: list[Outlines]
    names: list[str]
    width: Side
    height: Side
    attribute_ids: list[list[Count]] | None = None

    def objects(self, where: str) -> AnnotatedObjects:
        """Return the objects in file order, without classes; `where` names the file in error messages."""
        number = len(self.names)
        boxes = np.array([box[:4] for box in self.boxes], dtype=np.float64).reshape(-1, 4)
        lengths = {len(self.boxes), len(self.segms), len(self.attribute_ids or self.names)}
        if lengths != {number} or (boxes[:, 2:] <= boxes[:, :2]).any():
            raise UserError(
                f"{where}: boxes, segms and attribute_ids need one entry for each of {number} names, and no empty box"
            )
        require_pixels(boxes, where)
        attributes = None
        if self.attribute_ids:
            attributes = np.array(self.attribute_ids, dtype=np.int64).reshape(number, -1)
        outlines = [_polygons(segmentation) for segmentation in self.segms]
        return AnnotatedObjects(boxes, where, attributes=attributes, names=tuple(self.names), outlines=outlines)


def _polygons(segmentation: Outlines) -> list[np.ndarray]:
    """Return the polygons of one object, float64 [points, 2] each."""
    return [np.array(polygon, dtype=np.float64) for polygon in segmentation]


def read_questions(path: str | Path) -> SerializedList[VCRQuestion]:
    """Read all questions; exact repeats are skipped, and their number is logged.

    Raises:
        UserError: there are none, two questions have one id, or a sentence names an object that its question does not
            list.
    """
    ids: list[str] = []
    skipped = SkippedRecords(path)
    questions = SerializedList(_distinct_questions(path, skipped, ids), VCRQuestion)
    skipped.log()
    if not len(questions):
        raise UserError(f"{path} has no questions; download it again.")
    require_unique(ids, f"{path}: the annot_id", "give each question its own id")
    return questions


def _distinct_questions(path: str | Path, skipped: SkippedRecords, ids: list[str]) -> Iterator[VCRQuestion]:
    """Yield the questions of a file, and add their ids to `ids`."""
    for question in drop_repeats(stream_lines(path, VCRQuestion), skipped, "questions"):
        last = max(find_mentioned_objects(question.sentences), default=-1)
        if last >= len(question.objects):
            raise UserError(
                f"{path}: a sentence of {question.annot_id} names object {last}, but the question has "
                f"{len(question.objects)} objects, counted from 0; correct the line or download the file again."
            )
        ids.append(question.annot_id)
        yield question


class QuestionTable:
    """The questions of a file, and what can be said of them only by reading all of them.

    Attributes:
        questions: in file order.
        lacks_label: bool [questions, 2]: whether the label of the answer, and that of the rationale, is unknown.
        object_names: the class names of all objects, sorted.
        images: the questions of each image, with images in the order of first mention; questions with other objects
            are as of another image.

    Args:
        folder: of a table, from which later starts read a large file.
    """

    def __init__(self, path: Path, folder: Path) -> None:
        self._path = path
        kind = [VCRQuestion.__name__, *VCRQuestion.__struct_fields__]
        self.lacks_label, encoded_names, rows, counts, ends, data = tabulate([path], folder, kind, self._read)
        self.questions = SerializedList.from_arrays(ends, data, VCRQuestion)
        self.object_names = msgspec.msgpack.decode(encoded_names, type=list[str])
        self.images = TextGroups(rows, counts)

    def _read(self) -> list[np.ndarray]:
        """Return the arrays: attributes, with names as bytes of MessagePack, and those of the questions."""
        questions = read_questions(self._path)
        object_names: set[str] = set()
        images: list[tuple[str, ...]] = []
        lacks_label: list[tuple[bool, bool]] = []
        for question in questions:
            object_names.update(question.objects)
            images.append((question.img_fn, *question.objects))
            lacks_label.append((question.answer_label is None, question.rationale_label is None))
        groups = TextGroups.of_images(images)
        encoded_names = np.frombuffer(msgspec.msgpack.encode(sorted(object_names)), dtype=np.uint8)
        return [np.array(lacks_label), encoded_names, groups.texts, np.diff(groups.starts), *questions.arrays]


def read_metadata(path: Path, question: VCRQuestion) -> tuple[tuple[int, int], AnnotatedObjects]:
    """Read (height, width) of a question's image and its objects in the order of the metadata file, without classes."""
    content = read_json(path, ImageMetadata)
    where = f"{path} ({question.annot_id})"
    if content.names != question.objects:
        raise UserError(
            f"{where}: the names {content.names} differ from the question's objects {question.objects}; use "
            "annotations and images of the same release"
        )
    return (content.height, content.width), content.objects(where)


def read_detected_objects(path: Path, min_score: float) -> tuple[tuple[int, int], AnnotatedObjects]:
    """Read boxes of VCR's classes, predicted in an image of another data set, from a file in VCR's metadata format.

    A box is [x1, y1, x2, y2, score]. VisualBERT's official code uses such boxes for COCO's images in its first phase
    for VCR.

    Args:
        min_score: keep only boxes with a higher score.

    Returns:
        (height, width) of the original image, and these objects in file order, with classes.
    """
    content = read_json(path, ImageMetadata)
    objects = content.objects(str(path))
    unknown_classes = sorted({*content.names} - {*CLASS_NAMES})
    have_scores = all(len(box) == 5 and 0 <= box[4] <= 1 for box in content.boxes)
    if unknown_classes or not have_scores:
        invalid = f"the class {unknown_classes[0]}" if unknown_classes else "a box"
        raise UserError(
            f"{path}: {invalid} is invalid; every box needs a score from 0 to 1 after its corners, and one of VCR's "
            f"{len(CLASS_NAMES)} classes, which are COCO's without spaces"
        )
    rows = [row for row, box in enumerate(content.boxes) if box[4] > min_score]
    names = tuple(content.names[row] for row in rows)
    attributes = None
    if objects.attributes is not None:
        attributes = objects.attributes[rows]
    detected = dataclasses.replace(
        objects,
        boxes=objects.boxes[rows],
        classes=np.array([CLASS_NAMES.index(name) for name in names], dtype=np.int64),
        attributes=attributes,
        names=names,
        outlines=[objects.outlines[row] for row in rows],
    )
    return (content.height, content.width), detected


class VCRDataset(VLDataset):
    """Questions of one split, grouped by image; see `VCRDatasetConfig`.

    Attributes:
        questions: in file order. Text index i is question i; with `condition_on` "each" it is question i // 4, given
            answer i % 4; with `question` "both" it is question i // 2, for its answer if i is even.
        groups: text indices of each image, with images in the order of first mention. If the boxes depend on the text
            (`objects` other than "all"), each text index is a separate group.
    """

    file_keys = ("images", "questions")
    id_namespace = "vcr"
    box_sources = (BoxSource.GT,)  # the sentences refer to the annotated boxes

    def __init__(self, files: DataFiles, options: VCRDatasetConfig, split: str, needs: DataNeeds) -> None:
        self.folder = files.path("images", split=split)
        self.path = files.path("questions", split=split)
        table = QuestionTable(self.path, files.index_folder)
        self.questions = table.questions
        self.options = options
        self.class_names = options.class_names
        self.has_phrases = options.names_are_phrases
        self.split_values = [{}]
        conditions_on_each = options.condition_on == "each"
        needs_labels = needs.training or (options.question != "answer" and not conditions_on_each)
        needs_rationales = needs.training and options.question != "answer"
        lacks_label = table.lacks_label if needs_rationales else table.lacks_label[:, :1]
        unlabelled = np.flatnonzero(lacks_label.any(axis=1))
        if (needs.training and conditions_on_each) or (needs_labels and len(unlabelled)):
            example = f" (such as {self.questions[int(unlabelled[0])].annot_id})" if len(unlabelled) else ""
            raise UserError(
                f"{self.path}: {len(unlabelled)} questions have no labels{example}, or "
                "data.config.condition_on=each drops them; train on a split with labels with condition_on=right, and "
                "predict a test split with condition_on=each."
            )
        self._class_of = {name: number for number, name in enumerate(self.class_names)}
        unknown_classes = set(table.object_names) - self._class_of.keys()
        if unknown_classes:
            raise UserError(
                f"{self.path}: the object class '{min(unknown_classes)}' is not one of the {len(self.class_names)} "
                "classes; correct it or set the list in data.config.class_names."
            )
        self.per_question = 1  # text indices
        if conditions_on_each:
            self.per_question = CHOICES
        elif options.question == "both":
            self.per_question = 2
        if options.objects != "all":
            self.groups = TextGroups.consecutive(np.ones(len(self), dtype=np.int64))
        else:
            first_texts = table.images.texts[:, None] * self.per_question
            texts = first_texts + np.arange(self.per_question)
            self.groups = TextGroups(texts.ravel(), np.diff(table.images.starts) * self.per_question)

    def _is_answer(self, index: int) -> bool:
        """Return whether the choices of this text index are answers, not rationales."""
        if self.options.question == "both":
            return index % 2 == 0
        if self.options.question == "in_turn":
            return index % (2 * CHOICES) < CHOICES
        return self.options.question == "answer"

    @classmethod
    @override
    def texts_of(cls, files: DataFiles, options: VCRDatasetConfig, split: str) -> Iterable[str]:
        """Yield all sentences of a split, with objects replaced by their class names."""
        for question in read_questions(files.path("questions", split=split)):
            for sentence in question.sentences:
                words: list[str] = []
                for token in sentence:
                    if isinstance(token, str):
                        words.append(token)
                    else:
                        words += [question.objects[number] for number in token]
                yield " ".join(words)

    @classmethod
    @override
    def class_names_of(cls, options: VCRDatasetConfig) -> Sequence[str]:
        return options.class_names

    @classmethod
    @override
    def accepts_answer(cls, options: VCRDatasetConfig) -> bool:
        return options.question == "rationale"

    @classmethod
    @override
    def select_candidates(cls, sample: Sample, options: VCRDatasetConfig) -> Sample:
        image = sample.images[0]
        text = sample.texts[0]
        if not isinstance(text, ChoiceText):  # a text with masked words, which refers to no boxes
            return sample
        candidates = _candidate_objects(options.objects, image.objects.names, [*text.query, *text.choices])
        return dataclasses.replace(sample, images=(dataclasses.replace(image, candidates=candidates),))

    def __len__(self) -> int:
        """Return the number of text indices."""
        return len(self.questions) * self.per_question

    @override
    def image_locations(self) -> Iterable[tuple[Path, str]]:
        return ((self.folder, question.img_fn) for question in self.questions)

    @override
    def contents(self) -> Iterable[np.ndarray]:
        yield self.questions.encoded

    @override
    def truths(self) -> Iterable[CorrectChoice | None]:
        return (self._text(index).truth for index in range(len(self)))

    @override
    def sample(self, texts: Sequence[int]) -> Sample:
        question = self.questions[texts[0] // self.per_question]
        size, objects = read_metadata(self.folder / question.metadata_fn, question)
        classes = np.array([self._class_of[name] for name in question.objects], dtype=np.int64)
        sample_texts = tuple(self._text(index) for index in texts)
        sentences = [*sample_texts[0].query, *sample_texts[0].choices]
        if self.options.objects != "r2c":
            sentences = [question.question, *question.answer_choices]
            if self.options.objects == "r2c_all_texts" or not self._is_answer(texts[0]):
                sentences += question.rationale_choices
        image = SampleImage(
            question.img_fn,
            self.folder / question.img_fn,
            size,
            objects=dataclasses.replace(objects, classes=classes),
            candidates=_candidate_objects(self.options.objects, question.objects, sentences),
        )
        return Sample((image,), sample_texts)

    def _text(self, index: int) -> ChoiceText:
        question = self.questions[index // self.per_question]
        conditions_on_each = self.options.condition_on == "each"
        query = [question.question]
        if self._is_answer(index):
            kind = "answer"
            answer = None
            choices = question.answer_choices
            label = question.answer_label
        else:
            kind = "rationale"
            answer = question.answer_label  # that the rationales explain
            if conditions_on_each:
                answer = index % self.per_question
            query.append(question.answer_choices[answer])
            choices = question.rationale_choices
            label = None
            if answer == question.answer_label:  # rationales are written for the right answer
                label = question.rationale_label
        words: list[str] = []
        for sentence in query:
            words += map(str, sentence)
        metadata: dict[str, Any] = {"annot_id": question.annot_id, "kind": kind, "conditioned_on": answer}
        if question.family is not None:
            metadata["family"] = question.family
        truth = None if label is None else CorrectChoice(label)
        return ChoiceText(
            index,
            " ".join(words),
            metadata,
            truth,
            query=tuple(query),
            choices=tuple(choices),
            is_learned=not conditions_on_each,
            names_are_phrases=self.options.names_are_phrases,
        )


def _candidate_objects(rule: str, objects: Sequence[str], sentences: Sequence[Sentence]) -> tuple[int, ...] | None:
    """Return the objects that are candidate boxes by the rule `data.config.objects`; None: all."""
    if rule == "all":
        return None
    if rule == "mentioned":
        return find_mentioned_objects(sentences)
    return find_relevant_objects(objects, sentences)


PERSON = "person"
EVERYONE = ("everyone", "everyones")  # refer to all people in R2C's rule


def find_mentioned_objects(sentences: Iterable[Sentence]) -> tuple[int, ...]:
    """Find the objects mentioned in the sentences, in the order of first mention (VL-BERT's rule)."""
    mentioned: dict[int, None] = {}  # in their order
    for token in itertools.chain.from_iterable(sentences):
        if isinstance(token, list):
            mentioned.update(dict.fromkeys(token))
    return tuple(mentioned)


def find_relevant_objects(objects: Sequence[str], sentences: Sequence[Sentence]) -> tuple[int, ...]:
    """Find the objects that R2C keeps, in ascending order.

    These are the mentioned objects, and all people if a sentence has "everyone" or if no object is mentioned.
    """
    people = {index for index, name in enumerate(objects) if name == PERSON}
    mentioned = set(find_mentioned_objects(sentences))
    tokens = itertools.chain.from_iterable(sentences)
    says_everyone = any(isinstance(token, str) and token.lower() in EVERYONE for token in tokens)
    if says_everyone or not mentioned:
        mentioned |= people
    return tuple(sorted(mentioned))
