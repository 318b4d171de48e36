"""GQA: questions about the scene graphs of images, with one answer each.

Files (`data.files`, relative to `data.root`; {split} is the split, such as train_balanced, and {part} what stands
before its first underscore, such as train)
    questions     questions/{split}_questions.json, or a folder of pieces of that name
    images        folder of the images
    choices       eval/{part}_choices.json: valid and plausible answers, for two of the scores; may be left out
    answers       list of possible answers; None: built from the balanced training questions
    scene_graphs  sceneGraphs/{part}_sceneGraphs.json: boxes "gt", and the grounding score
    instances     COCO instances of the same images, whose ids are numbers: boxes "gt" and detection losses
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import convert, field

from detector.errors import MissingFileError, UserError, user_path
from e2e_vl.data.base import DataFiles, VLDataset, Wants, split_names
from e2e_vl.data.batching import ConsecutiveGroups
from e2e_vl.data.coco import CocoInstances, ImageNames, instances_image, read_instances, require_instances
from e2e_vl.data.storage.files import corners_of
from e2e_vl.data.storage.index_files import OpenFiles
from e2e_vl.data.storage.json_entries import json_entries, read_entry
from e2e_vl.data.storage.record_errors import RAISE, RecordErrors
from e2e_vl.records import MISFITS, Pixel, Record, Side, Words, checked
from e2e_vl.samples import AnnotatedObjects, CorrectAnswer, Sample, SampleImage, SampleText

# Reader of the official GQA files: questions (also in pieces), choices and scene graphs; of any size.


_TYPES = ("structural", "semantic", "detailed")
_NO_STEP = re.compile("exist|query: name|choose name")  # of a program: they only read the answer


class _Types(Record):
    structural: str | None
    semantic: str | None
    detailed: str | None


class _Groups(Record):
    all: str | None = field(name="global")


class _Step(Record):
    operation: str
    argument: str


class _Named(Record):
    question: dict[str, str] = field(default_factory=dict)
    full_answer: dict[str, str] = field(name="fullAnswer", default_factory=dict)


class _Question(Record, kw_only=True):
    question: Words
    image_id: Words = field(name="imageId")
    is_balanced: bool = field(name="isBalanced")
    answer: str | None = None  # none in the splits test, challenge and submission
    entailed: list[str] = field(default_factory=list)
    semantic: list[_Step] = field(default_factory=list)
    annotations: _Named | None = None


class _AnsweredQuestion(_Question, kw_only=True):
    types: _Types
    groups: _Groups


class _IndexedQuestion(Record):
    """What is looked at in all of the 14 million questions before one is asked for; the rest is checked then."""

    question: str
    image_id: str = field(name="imageId")
    is_balanced: bool = field(name="isBalanced")
    answer: str | None = None
    types: _Types | None = None
    groups: _Groups | None = None


class _Choices(Record):
    valid: list[str]
    plausible: list[str]


class _SceneObject(Record):
    name: str
    x: Pixel
    y: Pixel
    w: Pixel
    h: Pixel

    def corners(self, where: str) -> tuple[float, float, float, float]:
        return corners_of((self.x, self.y, self.w, self.h), where)


class _SceneGraph(Record):
    width: Side
    height: Side
    objects: dict[str, _SceneObject]


def pieces_of(path: str | Path) -> list[Path]:
    """The file, or the pieces that a large one is released in: NAME/NAME_0.json, NAME/NAME_1.json, ... for NAME.json.

    Raises:
        FileNotFoundError: neither is there.
    """
    path = user_path(path)
    if path.is_file():
        return [path]
    folder = path if path.is_dir() else path.with_suffix("")
    numbered = {}
    for piece in folder.glob("*.json") if folder.is_dir() else ():
        if found := re.fullmatch(rf"{re.escape(folder.name)}_([0-9]+)", piece.stem):
            numbered[int(found[1])] = piece
    if not numbered:
        raise MissingFileError(
            f"{path}: cannot read the questions, there is no such file, and no folder {folder} with pieces "
            f"{folder.name}_0.json, ...; check the path in the data config"
        )
    absent = set(range(max(numbered))) - set(numbered)
    if absent:
        raise MissingFileError(
            f"{folder}: the piece {folder.name}_{min(absent)}.json is missing; download all pieces of the release"
        )
    return [numbered[number] for number in sorted(numbered)]


def check_question(record: Any, where: str) -> None:
    """Raises UserError, naming the record, for a missing key or a value of another kind."""
    is_answered = isinstance(record, dict) and record.get("answer") is not None
    checked(_AnsweredQuestion if is_answered else _Question, record, where)


def _indexed(record: Any, where: str) -> _IndexedQuestion:
    """Raises UserError as `check_question` does."""
    try:
        found = convert(record, _IndexedQuestion)
    except MISFITS:
        check_question(record, where)
        return checked(_IndexedQuestion, record, where)  # a key that an unanswered question need not have
    is_whole = found.answer is None or (found.types is not None and found.groups is not None)
    if not (is_whole and found.question.strip() and found.image_id.strip()):
        check_question(record, where)
    return found


def reasoning_steps(program: Iterable[Mapping[str, Any]]) -> int:
    """Number of steps of a question's program (`semantic`) that reason, and do not only read the answer.

    As the official evaluation script counts them.
    """
    return sum(_NO_STEP.search(f"{step['operation']}: {step['argument']}") is None for step in program)


def question_facts(question_id: str, record: Mapping[str, Any]) -> dict[str, Any]:
    """What predictions and scores need of a question; see `e2e_vl.metrics.gqa.GQAPrediction`."""
    facts: dict[str, Any] = {"question_id": question_id, "image_id": record["imageId"], "question": record["question"]}
    facts["is_balanced"] = record["isBalanced"]
    if record.get("answer") is None:
        return facts
    return facts | {
        "right_answer": record["answer"],
        "types": {kind: record["types"][kind] for kind in _TYPES},
        "group": record["groups"]["global"],
        "entailed": list(record.get("entailed", ())),
        "steps": reasoning_steps(record.get("semantic", ())),
    }


class GQAQuestions(Sequence):
    """Questions of some files, those of an image one after the other; images and the questions of each in file order.

    Args:
        paths: question files, such as the pieces of one split or several splits.
        errors: what becomes of an error about one question.

    Attributes:
        image_ids: of every image, in the order of its first question.
        counts: int64 [images], questions of each image.
        is_balanced: bool [questions].

    Raises:
        FileNotFoundError: no such file.
        ValueError: no JSON, a record that is no question, a question that is there twice, questions with answers beside
            some without in one file, or no question at all. File and question are named.
    """

    def __init__(self, paths: Iterable[Path], errors: RecordErrors = RAISE) -> None:
        self.paths = list(paths)
        self._files = OpenFiles()
        file_of, starts, sizes, images, answers, names, balanced = (array(kind) for kind in "HqIiiQb")
        image_numbers: dict[str, int] = {}
        answer_numbers: dict[str, int] = {}
        for number, path in enumerate(self.paths):
            first: bool | None = None
            file = str(path)
            with errors.about(file):
                for key, record, start, size in json_entries(path, "questions"):
                    where = f"{file}: question {key}"
                    with errors.about(where):
                        one = _indexed(record, where)
                        answer = one.answer
                        first = answer is not None if first is None else first
                        if first != (answer is not None):
                            raise UserError(
                                f"{where} has {'no' if first else 'an'} answer, unlike the first; repair the file"
                            )
                        file_of.append(number)
                        starts.append(start)
                        sizes.append(size)
                        images.append(image_numbers.setdefault(one.image_id, len(image_numbers)))
                        number_of_answer = -1
                        if answer is not None:
                            number_of_answer = answer_numbers.setdefault(answer, len(answer_numbers))
                        answers.append(number_of_answer)
                        names.append(_number_of(key))
                        balanced.append(one.is_balanced)
        if not starts:
            raise UserError(f"{', '.join(map(str, self.paths))}: there is no question in it")
        self.image_ids, self._answers = list(image_numbers), list(answer_numbers)
        image_of = np.asarray(images)
        order = np.argsort(image_of, kind="stable")
        self.counts = np.bincount(image_of, minlength=len(image_numbers))
        self._file_of, self._starts, self._sizes, self._answer_of, hashes = (
            np.asarray(values)[order] for values in (file_of, starts, sizes, answers, names)
        )
        self.is_balanced = np.asarray(balanced, dtype=bool)[order]
        self._check_unique(hashes, errors)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> tuple[str, dict[str, Any]]:
        """Id and record of a question."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        path = self.paths[self._file_of[index]]
        key, record = read_entry(self._files, path, int(self._starts[index]), int(self._sizes[index]))
        check_question(record, f"{path}: question {key}")
        return key, record

    def place(self, index: int) -> str:
        """File and id of a question, for messages."""
        return f"{self.paths[self._file_of[index]]}: question {self[index][0]}"

    def answers(self) -> Iterator[str | None]:
        """The answer to every question; None where it is unknown."""
        return (None if number < 0 else self._answers[number] for number in self._answer_of)

    def _check_unique(self, hashes: np.ndarray, errors: RecordErrors) -> None:
        order = np.argsort(hashes, kind="stable")
        for row in np.flatnonzero(hashes[order[1:]] == hashes[order[:-1]]):
            (first, _), (second, _) = (self[int(order[row + step])] for step in (0, 1))
            if first == second:
                files = {str(self.paths[self._file_of[order[row + step]]]) for step in (0, 1)}
                with errors:
                    raise UserError(
                        f"{' and '.join(sorted(files))}: question {first} is there twice; name each split once"
                    )


class EntryFile:
    """The records of a file of one JSON object by their id; each is read when it is asked for.

    In memory stay 20 bytes per record: a number made from its id, and its place.

    Args:
        errors: not used, since no record is looked at before it is asked for.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no JSON, or an id that is there twice.
    """

    def __init__(self, path: str | Path, what: str, errors: RecordErrors = RAISE) -> None:
        self.path, self.what = user_path(path), what
        self._files = OpenFiles()
        numbers, starts, sizes = (array(kind) for kind in "QQI")
        for entry in json_entries(self.path, what):
            numbers.append(_number_of(entry.key))
            starts.append(entry.start)
            sizes.append(entry.size)
        order = np.argsort(np.asarray(numbers), kind="stable")
        self._numbers, self._starts, self._sizes = (np.asarray(values)[order] for values in (numbers, starts, sizes))
        double = np.flatnonzero(self._numbers[1:] == self._numbers[:-1])
        if len(double):
            key, _ = self._read(int(double[0]))
            raise UserError(f"{self.path}: {key} is there twice among the {what}; download the file again")

    def __contains__(self, key: str) -> bool:
        return self._row(key) is not None

    def __getitem__(self, key: str) -> Any:
        """One record. Raises ValueError if there is no such record."""
        find_entry([self], key)
        return self._read(self._row(key))[1]

    def _row(self, key: str) -> int | None:
        number = np.uint64(_number_of(key))
        row = int(np.searchsorted(self._numbers, number))
        return row if row < len(self._numbers) and self._numbers[row] == number else None

    def _read(self, row: int) -> tuple[str, Any]:
        return read_entry(self._files, self.path, int(self._starts[row]), int(self._sizes[row]))


def _number_of(key: str) -> int:
    """64 bits that stand for an id, the same in every process; two ids of a file never share them in practice."""
    return int.from_bytes(hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def find_entry(files: Sequence[EntryFile], key: str) -> EntryFile:
    """The file that has the record.

    Raises:
        ValueError: none has it.
    """
    for file in files:
        if key in file:
            return file
    names = ", ".join(str(file.path) for file in files)
    raise UserError(f"{names}: there is no entry {key} among the {files[0].what}; use the file of the same split")


def read_choices(file: EntryFile, question_id: str) -> dict[str, list[str]]:
    """The "valid" and "plausible" answers to a question.

    Raises:
        ValueError: the file has none for it, or something else.
    """
    where = f"{file.path}: choices of question {question_id}"
    found = checked(_Choices, file[question_id], where)
    return {"valid": found.valid, "plausible": found.plausible}


def scene_objects(file: EntryFile, image_id: str) -> tuple[tuple[int, int], AnnotatedObjects]:
    """(height, width) of an image, and the objects of its scene graph; their names are no classes of a detector.

    Raises:
        ValueError: the file has no such image, or a box is no box; image and object are named.
    """
    graph, where = _graph(file, image_id)
    found = graph.objects
    boxes = np.array([one.corners(f"{where}: object {key}") for key, one in found.items()], dtype=np.float64)
    ids = tuple([int(key) if _is_number(key) else number for number, key in enumerate(found)])
    names = tuple([one.name for one in found.values()])
    objects = AnnotatedObjects(boxes.reshape(-1, 4), where, ids=ids, names=names)
    return (graph.height, graph.width), objects


def _graph(file: EntryFile, image_id: str) -> tuple[_SceneGraph, str]:
    """A scene graph, and what it is called in errors."""
    where = f"{file.path}: scene graph of image {image_id}"
    return checked(_SceneGraph, file[image_id], where), where


def _is_number(key: str) -> bool:
    return key.isascii() and key.isdecimal() and len(key) < 19  # 64 bits


def named_boxes(record: Mapping[str, Any], file: EntryFile, where: str) -> list[list[float]]:
    """Boxes xyxy, in shares of the image's width and height, of the objects that a question and its full answer name.

    As the official evaluation script takes them from `annotations`: an object that is named twice is there twice.

    Raises:
        ValueError: no annotations, or an object that the scene graph lacks; the question is named.
    """
    named = checked(_Named, record.get("annotations"), f"{where}: annotations")
    image_id = record["imageId"]
    graph, _ = _graph(file, image_id)
    boxes = []
    for key in (*named.question.values(), *named.full_answer.values()):
        if key not in graph.objects:
            raise UserError(f"{where} names the object {key}, which the scene graph of image {image_id} lacks")
        x1, y1, x2, y2 = graph.objects[key].corners(f"{where}: object {key}")
        boxes.append([x1 / graph.width, y1 / graph.height, x2 / graph.width, y2 / graph.height])
    return boxes


logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class GQAOptions(ImageNames):
    """Fields of `data.config`."""

    # in evaluation, state where the objects are that a question and its answer name; needs `data.files.scene_graphs`
    grounding: bool = False


class GQADataset(VLDataset):
    """Questions of one or several splits; the texts of an image stand one after the other.

    Args:
        questions: of all splits.
        folder: of the images.
        names: how the images are called.
        parts: placeholder values of each split, see `VLDataset.parts`.
        choices, scene_graphs: files that together have all questions and images; empty: they are not needed.
        instances: annotated objects of all images.
        grounds: scene graphs of all images, for the objects that questions name; empty: they are not needed.

    Raises:
        ValueError: an image that the instances or the scene graphs lack.
    """

    known_files = (
        *("images", "questions", "choices", "answers", "scene_graphs"),
        *("instances", "detections", "features"),
    )
    options = GQAOptions
    annotation_files = ("instances", "scene_graphs")
    id_space = "vg"

    def __init__(
        self,
        questions: GQAQuestions,
        folder: Path,
        names: ImageNames,
        parts: Sequence[Mapping[str, str]],
        *,
        choices: Sequence[EntryFile] = (),
        scene_graphs: Sequence[EntryFile] = (),
        instances: CocoInstances | None = None,
        grounds: Sequence[EntryFile] = (),
    ) -> None:
        self.questions = questions
        self.folder = folder
        self.names = names
        self.parts = parts
        self.choices = choices
        self.scene_graphs = scene_graphs
        self.instances = instances
        self.grounds = grounds
        self.groups = ConsecutiveGroups(questions.counts)
        if instances is not None:
            require_instances(instances, questions.image_ids)
            self.class_names = instances.class_names
        elif scene_graphs:
            for image_id in questions.image_ids:
                find_entry(scene_graphs, image_id)

    @classmethod
    def open(cls, files: DataFiles, options: GQAOptions, split: str, wants: Wants) -> GQADataset:
        """`split` names one split or several joined by "+"; the top of this file says which files there are."""
        parts = [{"split": name, "part": name.partition("_")[0]} for name in split_names(split)]
        more: dict[str, Any] = {}
        if wants.annotations and "instances" in files:
            paths = {files.path("instances", **values) for values in parts}
            if len(paths) > 1:
                raise UserError("data.files.instances must be one file for splits that are joined.")
            more["instances"] = files.read(read_instances, paths.pop(), drop_empty_boxes=True)
        elif wants.objects:
            raise UserError(
                "The names in scene graphs are no classes of a detector; give an instances file as "
                "data.files.instances, or set detector.loss_weight to 0."
            )
        elif wants.annotations:
            paths = dict.fromkeys(files.path("scene_graphs", **values) for values in parts)
            more["scene_graphs"] = [files.read(EntryFile, path, "scene graphs") for path in paths]
        if "choices" in files and not wants.training:
            more["choices"] = _open_parts(files, parts, "choices", "validity and plausibility are")
        if options.grounding and not wants.training:
            more["grounds"] = more.get("scene_graphs") or _open_parts(files, parts, "scene_graphs", "grounding is")
        questions = files.read(GQAQuestions, tuple(_question_files(files, split)))
        return cls(questions, files.path("images"), options, parts, **more)

    @classmethod
    def reads(cls, options: GQAOptions, split: str, wants: Wants) -> tuple[str, ...]:
        """Questions may lie in pieces, and not every split has choices; `open` looks for them."""
        unread = ("questions", "choices", "answers", "scene_graphs")
        return tuple(key for key in super().reads(options, split, wants) if key not in unread)

    @classmethod
    def texts_of(cls, files: DataFiles, options: GQAOptions, split: str) -> Iterable[str]:
        """All questions of a split with their answers."""
        for path in _question_files(files, split):
            for entry in json_entries(path, "questions"):
                check_question(entry.value, f"{path}: question {entry.key}")
                yield entry.value["question"]
                if entry.value.get("answer") is not None:
                    yield entry.value["answer"]

    @classmethod
    def answers_of(cls, files: DataFiles, options: GQAOptions, split: str) -> dict[Any, str]:
        """Of the balanced questions: the table of 1,842 answers comes from train_balanced+val_balanced."""
        questions = files.read(GQAQuestions, tuple(_question_files(files, split)))
        found = {row: answer for row, answer in enumerate(questions.answers()) if questions.is_balanced[row]}
        for row in (row for row, answer in found.items() if answer is None):
            with files.errors:
                raise UserError(f"{questions.place(row)} has no answer; build the list of answers from another split")
        return {row: answer for row, answer in found.items() if answer is not None}

    def __len__(self) -> int:
        """Number of questions."""
        return len(self.questions)

    def image_ids(self) -> Iterable[str]:
        return self.questions.image_ids

    def truths(self) -> Iterable[CorrectAnswer | None]:
        return (None if answer is None else CorrectAnswer(answer) for answer in self.questions.answers())

    def sample(self, texts: Sequence[int]) -> Sample:
        """Some questions about one image."""
        image = self._image(self.questions.image_ids[self.groups.of_text(texts[0])])
        return Sample((image,), tuple(self._text(index) for index in texts))

    def _image(self, image_id: str) -> SampleImage:
        file = self.names.file(self.folder, image_id)
        if self.instances is not None:
            return instances_image(self.instances, image_id, file)
        if self.scene_graphs:
            return SampleImage(image_id, file, *scene_objects(find_entry(self.scene_graphs, image_id), image_id))
        return SampleImage(image_id, file)

    def _text(self, index: int) -> SampleText:
        question_id, record = self.questions[index]
        facts = question_facts(question_id, record)
        answer = facts.get("right_answer")
        if self.choices and answer is not None and facts["is_balanced"]:
            facts["choices"] = read_choices(find_entry(self.choices, question_id), question_id)
        if self.grounds and answer is not None and facts["is_balanced"]:
            where = self.questions.place(index)
            facts["named_boxes"] = named_boxes(record, find_entry(self.grounds, record["imageId"]), where)
        return SampleText(index, facts["question"], facts, None if answer is None else CorrectAnswer(answer))


def _question_files(files: DataFiles, split: str) -> list[Path]:
    return [piece for name in split_names(split) for piece in pieces_of(files.path("questions", split=name))]


def _open_parts(files: DataFiles, parts: Sequence[Mapping[str, str]], key: str, left_out: str) -> list[EntryFile]:
    """A file for each part; none if a part has no file, since a score needs all of them."""
    what = key.replace("_", " ")
    paths = list(dict.fromkeys(files.path(key, **values) for values in parts))
    for path in paths:
        if not path.is_file():  # the release has them for train and val only
            logger.warning("%s: there is no such file of %s, so %s left out.", path, what, left_out)
            return []
    return [files.read(EntryFile, path, what) for path in paths]
