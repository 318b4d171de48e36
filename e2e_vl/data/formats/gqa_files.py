"""Reader of the official GQA files: questions (also in pieces), choices and scene graphs; of any size.

Every file is one JSON object from ids, which are strings, to records. The file of all training questions has 14 million
of them: a file is read once to find its entries, and an entry is read again when it is asked for. In memory stay some
40 bytes per question.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from e2e_vl.data.storage.files import corners_of, plain_boxes, require_keys
from e2e_vl.data.storage.index_files import OpenFiles
from e2e_vl.data.storage.json_entries import json_entries, read_entry
from e2e_vl.data.storage.record_errors import RAISE, RecordErrors
from e2e_vl.samples import AnnotatedObjects

_KEYS = ("question", "imageId", "isBalanced")
_ANSWERED = ("answer", "types", "groups")  # of questions with an answer
_TYPES = ("structural", "semantic", "detailed")
_KINDS = frozenset(_TYPES)
_SIDES = ("x", "y", "w", "h")  # of an object's box
_NO_STEP = re.compile("exist|query: name|choose name")  # of a program: they only read the answer


def pieces_of(path: str | Path) -> list[Path]:
    """The file, or the pieces that a large one is released in: NAME/NAME_0.json, NAME/NAME_1.json, ... for NAME.json.

    Raises:
        FileNotFoundError: neither is there.
    """
    path = Path(path).expanduser()
    if path.is_file():
        return [path]
    folder = path if path.is_dir() else path.with_suffix("")
    numbered = {}
    for piece in folder.glob("*.json") if folder.is_dir() else ():
        if found := re.fullmatch(rf"{re.escape(folder.name)}_(\d+)", piece.stem):
            numbered[int(found[1])] = piece
    if not numbered:
        raise FileNotFoundError(
            f"{path}: cannot read the questions, there is no such file, and no folder {folder} with pieces "
            f"{folder.name}_0.json, ...; check the path in the data config"
        )
    absent = set(range(max(numbered))) - set(numbered)
    if absent:
        raise FileNotFoundError(
            f"{folder}: the piece {folder.name}_{min(absent)}.json is missing; download all pieces of the release"
        )
    return [numbered[number] for number in sorted(numbered)]


def check_question(record: Any, where: str) -> None:
    """Raises ValueError, naming the record, for a missing key or a value of another kind."""
    if _is_question(record):
        return
    require_keys(record, _KEYS, where)
    for key in ("question", "imageId"):
        if not isinstance(record[key], str) or not record[key].strip():
            raise ValueError(f"{where}: {key} is {record[key]!r}; it must be a text")
    if not isinstance(record["isBalanced"], bool):
        raise ValueError(f"{where}: isBalanced is {record['isBalanced']!r}; it must be true or false")
    if record.get("answer") is None:  # the splits test, challenge and submission
        return
    require_keys(record, _ANSWERED, where)
    if not isinstance(record["answer"], str):
        raise ValueError(f"{where}: answer is {record['answer']!r}; it must be a text")
    require_keys(record["types"], _TYPES, f"{where}: types")
    require_keys(record["groups"], ("global",), f"{where}: groups")


def _is_question(record: Any) -> bool:
    """Whether `check_question` finds nothing, as is nearly always so; then no message has to be made ready."""
    try:
        question, image_id, answer = record["question"], record["imageId"], record.get("answer")
        is_right = type(question) is type(image_id) is str and type(record["isBalanced"]) is bool
        if not is_right or not question.strip() or not image_id.strip():
            return False
        if answer is None:
            return True
        types, groups = record["types"], record["groups"]
        return (
            type(answer) is str
            and type(types) is type(groups) is dict
            and types.keys() >= _KINDS
            and "global" in groups
        )
    except (AttributeError, KeyError, TypeError):
        return False


def reasoning_steps(program: Iterable[Mapping[str, Any]]) -> int:
    """Number of steps of a question's program (`semantic`) that reason, and do not only read the answer.

    As the official evaluation script counts them.
    """
    return sum(_NO_STEP.search(f"{step['operation']}: {step['argument']}") is None for step in program)


def question_facts(question_id: str, record: Mapping[str, Any]) -> dict[str, Any]:
    """What predictions and scores need of a question, under the names of the files; see `e2e_vl.evaluation.gqa`."""
    facts: dict[str, Any] = {"questionId": question_id, "imageId": record["imageId"], "question": record["question"]}
    facts["isBalanced"] = record["isBalanced"]
    if record.get("answer") is None:
        return facts
    return facts | {
        "answer": record["answer"],
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
                        check_question(record, where)
                        answer = record.get("answer")
                        first = answer is not None if first is None else first
                        if first != (answer is not None):
                            raise ValueError(
                                f"{where} has {'no' if first else 'an'} answer, unlike the first; repair the file"
                            )
                        file_of.append(number)
                        starts.append(start)
                        sizes.append(size)
                        images.append(image_numbers.setdefault(record["imageId"], len(image_numbers)))
                        number_of_answer = -1
                        if answer is not None:
                            number_of_answer = answer_numbers.setdefault(answer, len(answer_numbers))
                        answers.append(number_of_answer)
                        names.append(_number_of(key))
                        balanced.append(record["isBalanced"])
        if not starts:
            raise ValueError(f"{', '.join(map(str, self.paths))}: there is no question in it")
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
        return read_entry(self._files, path, int(self._starts[index]), int(self._sizes[index]))

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
                    raise ValueError(
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
        self.path, self.what = Path(path).expanduser(), what
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
            raise ValueError(f"{self.path}: {key} is there twice among the {what}; download the file again")

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
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")


def find_entry(files: Sequence[EntryFile], key: str) -> EntryFile:
    """The file that has the record.

    Raises:
        ValueError: none has it.
    """
    for file in files:
        if key in file:
            return file
    names = ", ".join(str(file.path) for file in files)
    raise ValueError(f"{names}: there is no entry {key} among the {files[0].what}; use the file of the same split")


def read_choices(file: EntryFile, question_id: str) -> dict[str, list[str]]:
    """The "valid" and "plausible" answers to a question.

    Raises:
        ValueError: the file has none for it, or something else.
    """
    record, where = file[question_id], f"{file.path}: choices of question {question_id}"
    require_keys(record, ("valid", "plausible"), where)
    return {key: list(record[key]) for key in ("valid", "plausible")}


def scene_objects(file: EntryFile, image_id: str) -> tuple[tuple[int, int], AnnotatedObjects]:
    """(height, width) of an image, and the objects of its scene graph; their names are no classes of a detector.

    Raises:
        ValueError: the file has no such image, or a box is no box; image and object are named.
    """
    where = f"{file.path}: scene graph of image {image_id}"
    graph = file[image_id]
    require_keys(graph, ("width", "height", "objects"), where)
    found = graph["objects"]
    boxes = _scene_corners(found)
    if boxes is None:  # one by one, to name the object
        corners = []
        for key, one in found.items():
            require_keys(one, ("name", *_SIDES), f"{where}: object {key}")
            corners.append(corners_of([one[side] for side in _SIDES], f"{where}: object {key}"))
        boxes = np.array(corners, dtype=np.float64).reshape(-1, 4)
    ids = tuple([int(key) if key.isdigit() else number for number, key in enumerate(found)])
    objects = AnnotatedObjects(boxes, where, ids=ids, names=tuple([one["name"] for one in found.values()]))
    return (graph["height"], graph["width"]), objects


def _scene_corners(objects: Mapping[str, Any]) -> np.ndarray | None:
    """Corners of the boxes of objects, float64, a row per object; None if one of them is not as it should be."""
    try:
        if not all("name" in one for one in objects.values()):
            return None
        boxes = plain_boxes([[one["x"], one["y"], one["w"], one["h"]] for one in objects.values()])
    except (AttributeError, KeyError, TypeError):
        return None
    if boxes is None or (boxes[:, 2:] <= 0).any():
        return None
    boxes[:, 2:] += boxes[:, :2]
    return boxes


def named_boxes(record: Mapping[str, Any], file: EntryFile, where: str) -> list[list[float]]:
    """Boxes xyxy, in shares of the image's width and height, of the objects that a question and its full answer name.

    As the official evaluation script takes them from `annotations`: an object that is named twice is there twice.

    Raises:
        ValueError: no annotations, or an object that the scene graph lacks; the question is named.
    """
    require_keys(record, ("annotations",), where)
    named = [key for part in ("question", "fullAnswer") for key in record["annotations"].get(part, {}).values()]
    image_id = record["imageId"]
    graph = file[image_id]
    require_keys(graph, ("width", "height", "objects"), f"{file.path}: scene graph of image {image_id}")
    width, height, objects = graph["width"], graph["height"], graph["objects"]
    boxes = []
    for key in named:
        if key not in objects:
            raise ValueError(f"{where} names the object {key}, which the scene graph of image {image_id} lacks")
        one = objects[key]
        x1, y1, x2, y2 = corners_of([one[side] for side in _SIDES], f"{where}: object {key}")
        boxes.append([x1 / width, y1 / height, x2 / width, y2 / height])
    return boxes
