"""VCR: questions about a film scene with four answers (Q->A), or with four reasons for an answer (QA->R)."""

from __future__ import annotations

import collections
import dataclasses
import marshal
import sys
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain, pairwise
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta

from detector.errors import UserError, reading, user_path
from e2e_vl.config import BoxSource
from e2e_vl.data.base import DataFiles, VLDataset, Wants, group_texts
from e2e_vl.data.storage.files import read_json, require_file
from e2e_vl.data.storage.record_errors import RAISE, RecordErrors
from e2e_vl.data.storage.record_table import text_column
from e2e_vl.io import inside, shown
from e2e_vl.records import Count, Name, Pixel, Record, Side, as_written, checked, decoded
from e2e_vl.samples import AnnotatedObjects, ChoiceText, CorrectChoice, Sample, SampleImage, Sentence

# Reader of VCR's files: `train.jsonl`, `val.jsonl`, `test.jsonl` (a question per line) and a metadata file per image.


CHOICES = 4
# The 80 classes of COCO as VCR spells them, in COCO's order. Their numbers are 1 to 80; 0 is the whole image.
# fmt: off
CLASS_NAMES = (
    "person", "bicycle", "car", "motorcycle", "airplane", "bus", "train", "truck", "boat", "trafficlight",
    "firehydrant", "stopsign", "parkingmeter", "bench", "bird", "cat", "dog", "horse", "sheep", "cow", "elephant",
    "bear", "zebra", "giraffe", "backpack", "umbrella", "handbag", "tie", "suitcase", "frisbee", "skis", "snowboard",
    "sportsball", "kite", "baseballbat", "baseballglove", "skateboard", "surfboard", "tennisracket", "bottle",
    "wineglass", "cup", "fork", "knife", "spoon", "bowl", "banana", "apple", "sandwich", "orange", "broccoli",
    "carrot", "hotdog", "pizza", "donut", "cake", "chair", "couch", "pottedplant", "bed", "diningtable", "toilet",
    "tv", "laptop", "mouse", "remote", "keyboard", "cellphone", "microwave", "oven", "toaster", "sink",
    "refrigerator", "book", "clock", "vase", "scissors", "teddybear", "hairdrier", "toothbrush",
)
# fmt: on
_Tokens = Annotated[list[str | Annotated[list[Count], Meta(min_length=1)]], Meta(min_length=1)]
_Choices = Annotated[list[_Tokens], Meta(min_length=CHOICES, max_length=CHOICES)]
_Label = Annotated[Literal[0, 1, 2, 3] | None, Meta(description="0 to 3, or none in the test split")]


class _QuestionLine(Record):
    annot_id: Name
    img_fn: Name
    metadata_fn: Name
    objects: list[Name]
    question: _Tokens
    answer_choices: _Choices
    rationale_choices: _Choices
    answer_label: _Label = None
    rationale_label: _Label = None
    family: str | None = None


class _Metadata(Record):
    boxes: list[Annotated[list[Pixel], Meta(min_length=4, max_length=5)]]
    segms: list[Any]
    names: list[str]
    width: Side
    height: Side
    attribute_ids: list[Any] | None = None


@dataclasses.dataclass(frozen=True)
class VCRQuestion:
    """One line of a jsonl file."""

    annot_id: str
    img_fn: str  # image file, relative to vcr1images
    metadata_fn: str  # metadata file, relative to vcr1images
    objects: list[str]  # class names; the index is what tokens name
    question: Sentence
    answer_choices: list[Sentence]  # four
    rationale_choices: list[Sentence]  # four
    answer_label: int | None = None  # None in the test split
    rationale_label: int | None = None
    family: str | None = None  # kind of question, where the file says it (drawn scenes do)


_FIELDS = tuple(field.name for field in dataclasses.fields(VCRQuestion))


class VCRFile:
    """The questions of one jsonl file, checked when it is read.

    They are held as one block of bytes and decoded when they are asked for, so that forked workers share the memory of
    200,000 questions instead of copying it. The bytes are Python's own (`marshal`), which are quicker than JSON; they
    never leave the memory of the program.

    Args:
        path: the file.
        errors: what becomes of an error about one line.

    Attributes:
        annot_ids: of all questions, in file order.
        image_names: `img_fn` of all questions.
        has_labels: the questions have both labels.
        class_names: every class of `objects`, with the annot_id that has it first.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a line that is no JSON, a missing key, a token that is neither a word nor a list of existing
            objects, other than four choices, a wrong label, labels in some lines only, a double annot_id, or no line.
            The message names file, line and annot_id.
    """

    def __init__(self, path: str | Path, errors: RecordErrors = RAISE) -> None:
        self.path = require_file(path, "VCR questions")
        annot_ids: list[str] = []
        image_names: list[str] = []
        self.has_labels = False
        self.class_names: dict[str, str] = {}
        lines: list[bytes] = []
        with reading(self.path), self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                with errors.about(f"{self.path}, line {number}"):
                    row = self._parse(line, number, errors.is_check)
                    if lines and (row.answer_label is not None) != self.has_labels:
                        is_there = "has no" if self.has_labels else "has"
                        raise UserError(
                            f"{self.path}, line {number} ({row.annot_id}) {is_there} labels, unlike the lines before; "
                            "do not mix the test split with the others"
                        )
                    self.has_labels = row.answer_label is not None
                    annot_ids.append(row.annot_id)
                    image_names.append(sys.intern(row.img_fn))
                    for name in row.objects:
                        self.class_names.setdefault(name, row.annot_id)
                    lines.append(marshal.dumps([getattr(row, name) for name in _FIELDS]))
        if not lines:
            raise UserError(f"{self.path}: there is no question in the file; copy or download it again")
        double = [name for name, count in collections.Counter(annot_ids).items() if count > 1]
        for name in double:
            with errors:
                raise UserError(f"{self.path}: the annot_id {name} is there twice; remove one of the lines")
        self.annot_ids, self.image_names = text_column(annot_ids), text_column(image_names)
        self._ends = np.cumsum([len(line) for line in lines])
        self._bytes = b"".join(lines)

    def __len__(self) -> int:
        return len(self.annot_ids)

    def __getitem__(self, index: int) -> VCRQuestion:
        """The question at a row of the file (0 .. len - 1)."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = int(self._ends[index - 1]) if index else 0
        return VCRQuestion(*marshal.loads(self._bytes[start : int(self._ends[index])]))

    def _parse(self, line: bytes, number: int, is_check: bool) -> _QuestionLine:
        """The checked fields that are used; to look for keys that are there twice would take a quarter of the time."""
        where = f"{self.path}, line {number}"
        row = decoded(_QuestionLine, line, where, key="annot_id", looks_for_doubles=is_check)
        where = f"{where} ({row.annot_id})"
        for key, name in (("img_fn", row.img_fn), ("metadata_fn", row.metadata_fn)):
            if name.startswith("/") or (".." in name and ".." in PurePosixPath(name).parts):
                raise UserError(f"{where}: {key} is {shown(name)}, expected a path inside the image folder")
        number_of_objects = len(row.objects)
        for tokens in (row.question, *row.answer_choices, *row.rationale_choices):
            for token in tokens:
                if type(token) is list and max(token) >= number_of_objects:
                    raise UserError(
                        f"{where} names the object {max(token)}, but the line has {number_of_objects} objects (from "
                        "0); repair it"
                    )
        if (row.answer_label is None) != (row.rationale_label is None):
            labels = [row.answer_label, row.rationale_label]
            raise UserError(f"{where}: the labels are {labels}, expected two of 0 to 3, or none in the test split")
        return row


def read_metadata(path: Path, question: VCRQuestion) -> tuple[tuple[int, int], AnnotatedObjects]:
    """Read the metadata file of a question's image.

    Besides VCR's own keys it may have `attribute_ids` (drawn scenes do): a list of equally many numbers from 0 for each
    object.

    Returns:
        (height, width) of the stored image, and its objects as in the file, without class numbers.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no JSON, a missing key, other objects than the question's, a box or an outline that is not made of
            finite numbers, or a box without area; the message names the file, the object and the question.
    """
    what = f"metadata of {question.annot_id}"
    where = f"{path} ({what})"
    content = checked(_Metadata, read_json(path, what), where)
    if content.names != question.objects:
        raise UserError(
            f"{where}: its names {content.names} differ from the question's objects {question.objects}; use the "
            "annotations and the images of the same release"
        )
    size = content.height, content.width
    return size, _objects(content, where, f"{path} ({question.annot_id})")


def read_detected_objects(path: Path, image: str, min_score: float) -> tuple[tuple[int, int], AnnotatedObjects]:
    """Read what a detector of VCR's classes found in some other image, in the form of a metadata file.

    A box is [x1, y1, x2, y2, score]. Official VisualBERT's first phase for VCR describes COCO's images by such boxes.

    Args:
        path: the file.
        image: id of the image, for messages.
        min_score: only boxes with a higher score are kept.

    Returns:
        (height, width) of the stored image, and the objects that are kept, in file order, with class numbers.

    Raises:
        FileNotFoundError: no such file.
        ValueError: as `read_metadata`; or a box without a score from 0 to 1, or a class that is none of `CLASS_NAMES`.
    """
    what = f"objects of image {image}"
    where = f"{path} ({what})"
    content = checked(_Metadata, read_json(path, what), where)
    objects = _objects(content, where, where)
    for row, box in enumerate(content.boxes):
        if len(box) < 5 or not 0 <= box[4] <= 1:
            raise UserError(f"{where}: box {row} has no score from 0 to 1 behind its corners; correct the file")
    if unknown := [name for name in content.names if name not in CLASS_NAMES]:
        raise UserError(
            f"{where}: the class '{unknown[0]}' is none of VCR's {len(CLASS_NAMES)} classes; write COCO's names "
            "without spaces"
        )
    kept = [row for row, box in enumerate(content.boxes) if box[4] > min_score]
    classes = np.array([CLASS_NAMES.index(content.names[row]) for row in kept], dtype=np.int64)
    chosen = dataclasses.replace(
        objects,
        boxes=objects.boxes[kept],
        classes=classes,
        attributes=None if objects.attributes is None else objects.attributes[kept],
        names=tuple(content.names[row] for row in kept),
        outlines=[objects.outlines[row] for row in kept],
    )
    return (content.height, content.width), chosen


def _objects(content: _Metadata, where: str, origin: str) -> AnnotatedObjects:
    """The objects of a metadata file, without class numbers."""
    number = len(content.names)
    for key in ("boxes", "segms"):
        if len(getattr(content, key)) != number:
            raise UserError(f"{where}: {key} must hold one entry for each of the {number} objects")
    boxes = np.array([box[:4] for box in content.boxes], dtype=np.float64).reshape(-1, 4)
    if (empty := (boxes[:, 2:] <= boxes[:, :2]).any(axis=1)).any():
        row = int(empty.argmax())
        raise UserError(
            f"{where}: box {row} [x1, y1, x2, y2] = {as_written(boxes[row].tolist())} is empty or inverted; correct "
            "the file"
        )
    polygons = _all_polygons(content.segms)
    if polygons is None:
        polygons = [read_polygons(item, f"{where}: segms {row}") for row, item in enumerate(content.segms)]
    attributes = None
    if content.attribute_ids is not None:
        attributes = _attributes(content.attribute_ids, number, f"{where}: attribute_ids")
    return AnnotatedObjects(
        boxes=boxes, origin=origin, attributes=attributes, names=tuple(content.names), outlines=polygons
    )


def _all_polygons(segms: list[Any]) -> list[list[np.ndarray]] | None:
    """The outlines of all objects; None if `read_polygons` might refuse one."""
    if {*map(type, segms)} - {list}:
        return None
    outlines = [*chain(*segms)]
    if {*map(type, outlines)} - {list} or not all(outlines):
        return None
    points = [*chain(*outlines)]
    if {*map(type, points)} - {list} or {*map(len, points)} - {2}:
        return None
    try:
        values = np.fromiter(chain.from_iterable(points), np.float64, 2 * len(points)).reshape(-1, 2)
    except (TypeError, ValueError, OverflowError):
        return None
    if not np.isfinite(values).all():
        return None
    ends = [0, *accumulate(map(len, outlines))]
    arrays = (values[start:end] for start, end in pairwise(ends))
    return [[next(arrays) for _ in item] for item in segms]


def _attributes(rows: Any, number: int, where: str) -> np.ndarray:
    try:
        attributes = np.array(rows, dtype=np.int64).reshape(number, -1)
    except (TypeError, ValueError, OverflowError):
        attributes = np.array([[-1]])
    if attributes.size and attributes.min() < 0:
        raise UserError(f"{where} must be a list of equally many numbers from 0 for each of the {number} objects")
    return attributes


def read_polygons(outlines: Any, where: str) -> list[np.ndarray]:
    """The outlines of one object; raises ValueError unless they are lists of points."""
    try:
        arrays = [np.array(outline, dtype=np.float64) for outline in outlines]
    except (TypeError, ValueError, OverflowError):
        arrays = None
    if arrays is None or any(a.ndim != 2 or a.shape[1:] != (2,) or not np.isfinite(a).all() for a in arrays):
        raise UserError(f"{where} must be a list of outlines, each a list of points [x, y]; correct the file")
    return arrays


PERSON = "person"
EVERYONE = ("everyone", "everyones")  # name all people under R2C's rule


@dataclasses.dataclass(frozen=True)
class VCROptions:
    """Fields of `data.config`. The official VL-BERT code has the same defaults.

    Attributes:
        question: "answer" (Q->A) or "rationale" (QA->R). For pre-training: "both" states each question twice, for its
            answer and for its rationale; "in_turn" (VisualBERT's code, by mistake) once, four questions for their
            answers, the next four for their rationales, and so on.
        condition_on: "right": rationales are given the right answer. "each": given each of the four answers, as the
            leaderboard file wants it; a question is then four text indices, and there is nothing to learn.
        objects: which boxes there are. "all" of the image, in file order: its questions can share a detector pass.
            "mentioned": what question and choices name (for rationales what the answers name too), in the order of
            first mention. "r2c": what R2C chooses of them, see `relevant_objects`, in file order. "r2c_all_texts": the
            same for the question with all its answers and rationales together (official VisualBERT code).
        class_names: the classes of objects, in the order of the detector's classes.
        names_are_phrases: the names of objects in question and choices are phrases for the objects' boxes, which a run
            with `phrases.weight` learns.
    """

    question: Literal["answer", "rationale", "both", "in_turn"] = "answer"
    condition_on: Literal["right", "each"] = "right"
    objects: Literal["all", "mentioned", "r2c", "r2c_all_texts"] = "all"
    class_names: tuple[str, ...] = CLASS_NAMES
    names_are_phrases: bool = False

    def __post_init__(self) -> None:
        if self.condition_on == "each" and self.question != "rationale":
            raise UserError(
                "data.config.condition_on=each is about rationales; set data.config.question=rationale, or give a run "
                "that was trained with it."
            )
        if len(set(self.class_names)) != len(self.class_names):
            raise UserError("data.config.class_names must all be different.")


class VCRDataset(VLDataset):
    """Questions of one jsonl file, grouped by image.

    Args:
        images_root: the folder vcr1images, with the image and metadata files that questions name.
        questions: of the split.
        options: see `VCROptions`.
        training: needs labels.
        errors: what becomes of an error about one record.

    Attributes:
        questions: the questions, in file order. Text index i is question i; with `condition_on` "each" it is question
            i // 4, given answer i % 4; with `question` "both" it is question i // 2, for its answer where i is even.
        groups: text indices of each image, images in order of first mention. Where the boxes depend on the text
            (`objects` other than "all"), every text index is a group of its own.

    Raises:
        FileNotFoundError, ValueError: see the readers; an object's class that `class_names` lacks; training without
            labels or with rationales given each answer.
    """

    known_files = ("images", "questions")
    options = VCROptions
    id_space = "vcr"
    box_sources = (BoxSource.GT,)  # the sentences name the boxes that are given

    def __init__(
        self,
        images_root: str | Path,
        questions: VCRFile,
        options: VCROptions | None = None,
        *,
        training: bool = False,
        errors: RecordErrors = RAISE,
    ) -> None:
        self.images_root = user_path(images_root)
        self.questions = questions
        self.settings = options or VCROptions()
        self.class_names = self.settings.class_names
        self.has_phrases = self.settings.names_are_phrases
        self.parts = [{}]
        self._check_questions(training, errors)
        self._class_of = {name: number for number, name in enumerate(self.class_names)}
        self.per_question = CHOICES if self.settings.condition_on == "each" else 1 + (self.settings.question == "both")
        texts = range(len(self))
        if self.settings.objects != "all":
            self.groups = [[index] for index in texts]
        else:
            self.groups = group_texts(self.questions.image_names[index // self.per_question] for index in texts)

    def _check_questions(self, training: bool, errors: RecordErrors) -> None:
        path = self.questions.path
        if training and self.settings.condition_on == "each":
            raise UserError("data.config.condition_on=each makes prediction files; train with condition_on=right.")
        if not self.questions.has_labels and (training or self._needs_right_answer):
            remedy = "train on another split" if training else "set data.config.condition_on=each"
            raise UserError(f"{path}: the questions have no labels, as in the test split; {remedy}.")
        known = set(self.class_names)
        for name, annot_id in self.questions.class_names.items():
            if name not in known:
                with errors:
                    raise UserError(
                        f"{path} ({annot_id}): the object class '{name}' is none of the {len(known)} classes; correct "
                        "it or give your own list as data.config.class_names."
                    )

    @property
    def _needs_right_answer(self) -> bool:
        return self.settings.question != "answer" and self.settings.condition_on == "right"

    def _is_answer(self, index: int) -> bool:
        """Whether a text index asks for an answer, not for a rationale."""
        if self.settings.question == "both":
            return index % 2 == 0
        if self.settings.question == "in_turn":
            return index % (2 * CHOICES) < CHOICES
        return self.settings.question == "answer"

    @classmethod
    def open(cls, files: DataFiles, options: VCROptions, split: str, wants: Wants) -> VCRDataset:
        """`data.files` holds `images` and `questions`, in which {split} is the split."""
        images, questions = files.path("images", split=split), files.read(VCRFile, files.path("questions", split=split))
        return cls(images, questions, options, training=wants.training, errors=files.errors)

    @classmethod
    def texts_of(cls, files: DataFiles, options: VCROptions, split: str) -> Iterable[str]:
        """All sentences of a split, objects as their class names."""
        questions = files.read(VCRFile, files.path("questions", split=split))
        for index in range(len(questions)):
            one = questions[index]
            for sentence in (one.question, *one.answer_choices, *one.rationale_choices):
                yield " ".join(t if isinstance(t, str) else " ".join(one.objects[o] for o in t) for t in sentence)

    @classmethod
    def class_names_of(cls, options: VCROptions) -> Sequence[str]:
        return options.class_names

    @classmethod
    def wants_given_answer(cls, options: VCROptions) -> bool:
        return options.question == "rationale"

    @classmethod
    def narrowed(cls, sample: Sample, options: VCROptions) -> Sample:
        image, text = sample.images[0], sample.texts[0]
        kept = _kept_objects(options.objects, image.objects.names, [*text.query, *text.choices])
        return dataclasses.replace(sample, images=(dataclasses.replace(image, candidates=kept),))

    def __len__(self) -> int:
        """Number of text indices."""
        return len(self.questions) * self.per_question

    def truths(self) -> Iterable[CorrectChoice | None]:
        for index in range(len(self)):
            yield self._truth(self.questions[index // self.per_question], index)

    def sample(self, texts: Sequence[int]) -> Sample:
        """Some questions about one image.

        Raises:
            FileNotFoundError: the metadata file is missing; names the question.
            ValueError: a file that cannot be read, or objects that contradict each other.
        """
        question = self.questions[texts[0] // self.per_question]
        where = f"{self.questions.path} ({question.annot_id})"
        metadata = inside(self.images_root, question.metadata_fn, where, follows_links=True)
        size, objects = read_metadata(metadata, question)
        classes = np.array([self._class_of[name] for name in question.objects], dtype=np.int64)
        image = SampleImage(
            question.img_fn,
            inside(self.images_root, question.img_fn, where, follows_links=True),
            size,
            objects=dataclasses.replace(objects, classes=classes),
            candidates=self._candidates(question, texts[0]),
        )
        return Sample((image,), tuple(self._text(index, question) for index in texts))

    def _candidates(self, question: VCRQuestion, index: int) -> tuple[int, ...] | None:
        """Objects that are candidate boxes, in the order of the boxes; None: all of them."""
        is_answer = self._is_answer(index)
        choices = question.answer_choices if is_answer else question.rationale_choices
        sentences = [*self._query(question, index), *choices]
        if self.settings.objects == "mentioned":
            sentences = [question.question, *question.answer_choices, *([] if is_answer else choices)]
        if self.settings.objects == "r2c_all_texts":
            sentences = [question.question, *question.answer_choices, *question.rationale_choices]
        return _kept_objects(self.settings.objects, question.objects, sentences)

    def _query(self, question: VCRQuestion, index: int) -> tuple[Sentence, ...]:
        """The sentences in front of a choice."""
        if self._is_answer(index):
            return (question.question,)
        return (question.question, question.answer_choices[self._given_answer(question, index)])

    def _given_answer(self, question: VCRQuestion, index: int) -> int:
        return question.answer_label if self._needs_right_answer else index % self.per_question

    def _truth(self, question: VCRQuestion, index: int) -> CorrectChoice | None:
        if not self.questions.has_labels or self.settings.condition_on != "right":
            return None
        return CorrectChoice(question.answer_label if self._is_answer(index) else question.rationale_label)

    def _text(self, index: int, first: VCRQuestion) -> ChoiceText:
        """One text index; `first` is the question that the image was read for."""
        question = self.questions[index // self.per_question]
        if question.objects != first.objects:
            raise UserError(
                f"{self.questions.path}: {question.annot_id} and {first.annot_id} are about the same image but list "
                "different objects; correct the file"
            )
        is_answer = self._is_answer(index)
        answer = self._given_answer(question, index)
        label = question.answer_label if is_answer else question.rationale_label
        if self.settings.condition_on == "each" and answer != question.answer_label:
            label = None  # rationales are written for the right answer
        facts: dict[str, Any] = {
            "annot_id": question.annot_id,
            "kind": "answer" if is_answer else "rationale",
            "conditioned_on": None if is_answer else answer,
            "label": label,
        }
        if question.family is not None:
            facts["family"] = question.family
        query = self._query(question, index)
        return ChoiceText(
            index,
            " ".join(t if isinstance(t, str) else str(t) for sentence in query for t in sentence),
            facts,
            self._truth(question, index),
            query=query,
            choices=tuple(question.answer_choices if is_answer else question.rationale_choices),
            names_are_phrases=self.settings.names_are_phrases,
        )


def _kept_objects(which: str, objects: Sequence[str], sentences: Sequence[Sentence]) -> tuple[int, ...] | None:
    """Objects that the option `objects` leaves as candidates; None: all of them."""
    if which == "all":
        return None
    return mentioned_objects(sentences) if which == "mentioned" else relevant_objects(objects, sentences)


def mentioned_objects(sentences: Iterable[Sentence]) -> tuple[int, ...]:
    """Objects that the sentences name, in the order of first mention (VL-BERT's rule)."""
    named = (o for sentence in sentences for token in sentence if isinstance(token, list) for o in token)
    return tuple(dict.fromkeys(named))


def relevant_objects(objects: Sequence[str], sentences: Sequence[Sentence]) -> tuple[int, ...]:
    """Objects that R2C keeps, ascending: the named ones; all people if a sentence says "everyone" or names nothing."""
    people = {index for index, name in enumerate(objects) if name == PERSON}
    kept = set(mentioned_objects(sentences))
    says_everyone = any(isinstance(t, str) and t.lower() in EVERYONE for sentence in sentences for t in sentence)
    return tuple(sorted(kept | people if says_everyone or not kept else kept))
