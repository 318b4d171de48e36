"""Reader of VCR's files: `train.jsonl`, `val.jsonl`, `test.jsonl` (a question per line) and a metadata file per image.

A token of a question, an answer or a rationale is a word, or a list of objects: [0, 1] stands for the objects 0 and 1
of `objects`. The test split has no labels.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import marshal
import sys
from itertools import accumulate, chain, pairwise
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from e2e_vl.data.storage.files import is_box, plain_boxes, read_json, require_file, require_keys
from e2e_vl.data.storage.record_errors import RAISE, RecordErrors
from e2e_vl.data.storage.record_table import text_column
from e2e_vl.file_names import shown
from e2e_vl.samples import AnnotatedObjects, Sentence

CHOICES = 4
_SENTENCES = ("answer_choices", "rationale_choices")
_KEPT = ("annot_id", "img_fn", "metadata_fn", "objects", "question", *_SENTENCES)
_LABELS = ("answer_label", "rationale_label")


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
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                with errors.about(f"{self.path}, line {number}"):
                    record = self._parse(line, number)
                    if lines and (record["answer_label"] is not None) != self.has_labels:
                        raise ValueError(
                            f"{self._where(number, record)} {'has no' if self.has_labels else 'has'} labels, unlike "
                            "the lines before; do not mix the test split with the others"
                        )
                    self.has_labels = record["answer_label"] is not None
                    annot_ids.append(record["annot_id"])
                    image_names.append(sys.intern(record["img_fn"]))
                    for name in record["objects"]:
                        self.class_names.setdefault(name, record["annot_id"])
                    lines.append(marshal.dumps([record[name] for name in _FIELDS]))
        if not lines:
            raise ValueError(f"{self.path}: there is no question in the file; copy or download it again")
        double = [name for name, count in collections.Counter(annot_ids).items() if count > 1]
        for name in double:
            with errors:
                raise ValueError(f"{self.path}: the annot_id {name} is there twice; remove one of the lines")
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

    def _where(self, number: int, record: Any) -> str:
        annot_id = record.get("annot_id") if isinstance(record, dict) else None
        return f"{self.path}, line {number}" + (f" ({annot_id})" if annot_id else "")

    def _parse(self, line: bytes, number: int) -> dict[str, Any]:
        """The checked fields that are used."""
        try:
            record = json.loads(line)
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(
                f"{self.path}, line {number} is not valid JSON ({error}); copy or download the file again"
            ) from error
        where = self._where(number, record)
        require_keys(record, _KEPT, where)
        kept = {key: record[key] for key in _KEPT}
        for key in ("annot_id", "img_fn", "metadata_fn"):
            if not isinstance(kept[key], str) or not kept[key]:
                raise ValueError(f"{where}: {key} is {kept[key]!r}, expected a text")
        for key in ("img_fn", "metadata_fn"):
            name = kept[key]
            if name.startswith("/") or (".." in name and ".." in PurePosixPath(name).parts):
                raise ValueError(f"{where}: {key} is {shown(name)}, expected a path inside the image folder")
        objects = kept["objects"]
        if not isinstance(objects, list) or not all(isinstance(name, str) and name for name in objects):
            raise ValueError(f"{where}: objects is {objects!r}, expected a list of class names")
        if not _is_sentence(kept["question"], len(objects)):
            _check_sentence(kept["question"], len(objects), f"{where}: the question")
        for key in _SENTENCES:
            choices = kept[key]
            if not isinstance(choices, list) or len(choices) != CHOICES:
                raise ValueError(f"{where}: {key} must hold four choices; repair the line")
            for index, choice in enumerate(choices):
                if not _is_sentence(choice, len(objects)):
                    _check_sentence(choice, len(objects), f"{where}: choice {index} of {key}")
        labels = [record.get(key) for key in _LABELS]
        wrong = [label for label in labels if isinstance(label, bool) or label not in (None, *range(CHOICES))]
        if wrong or (labels[0] is None) != (labels[1] is None):
            raise ValueError(f"{where}: the labels are {labels}, expected two of 0 to 3, or none in the test split")
        return kept | dict(zip(_LABELS, labels, strict=True)) | {"family": record.get("family")}


def _is_sentence(sentence: Any, num_objects: int) -> bool:
    """Whether `_check_sentence` finds nothing, as is nearly always so; then no message has to be made ready."""
    if type(sentence) is not list or not sentence:
        return False
    for token in sentence:
        if type(token) is not str:
            if type(token) is not list or not token:
                return False
            for entry in token:
                if type(entry) is not int or not 0 <= entry < num_objects:
                    return False
    return True


def _check_sentence(sentence: Any, num_objects: int, where: str) -> None:
    if not isinstance(sentence, list) or not sentence:
        raise ValueError(f"{where} is {sentence!r}, expected a list of tokens; repair the line")
    for token in sentence:
        if isinstance(token, str):
            continue
        if not isinstance(token, list) or not token or any(type(entry) is not int for entry in token):
            raise ValueError(f"{where} has the token {token!r}, expected a word or a list of object numbers")
        outside = [entry for entry in token if not 0 <= entry < num_objects]
        if outside:
            raise ValueError(
                f"{where} names the object {outside[0]}, but the line has {num_objects} objects (from 0); repair it"
            )


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
    content = read_json(path, what)
    where = f"{path} ({what})"
    require_keys(content, ("boxes", "segms", "names", "width", "height"), where)
    if content["names"] != question.objects:
        raise ValueError(
            f"{where}: its names {content['names']} differ from the question's objects {question.objects}; use the "
            "annotations and the images of the same release"
        )
    number = len(question.objects)
    for key in ("boxes", "segms"):
        if not isinstance(content[key], list) or len(content[key]) != number:
            raise ValueError(f"{where}: {key} must hold one entry for each of the {number} objects")
    size = (content["height"], content["width"])
    if any(type(side) is not int or side < 1 for side in size):
        raise ValueError(f"{where}: width and height are {size[1]!r} and {size[0]!r}, expected positive whole numbers")
    boxes = _all_corners(content["boxes"])
    if boxes is None:  # one by one, to name the object
        rows = [_box(box, f"{where}: box {row}") for row, box in enumerate(content["boxes"])]
        boxes = np.array(rows, dtype=np.float64).reshape(-1, 4)
    polygons = _all_polygons(content["segms"])
    if polygons is None:
        polygons = [read_polygons(item, f"{where}: segms {row}") for row, item in enumerate(content["segms"])]
    attributes = None
    if "attribute_ids" in content:
        attributes = _attributes(content["attribute_ids"], number, f"{where}: attribute_ids")
    objects = AnnotatedObjects(
        boxes=boxes,
        origin=f"{path} ({question.annot_id})",
        attributes=attributes,
        names=tuple(question.objects),
        outlines=polygons,
    )
    return size, objects


def _all_corners(boxes: list[Any]) -> np.ndarray | None:
    """The corners of all boxes, float64, a row per object; None if `_box` would refuse one."""
    if any(type(box) is not list or len(box) > 5 for box in boxes):
        return None
    corners = plain_boxes([box[:4] for box in boxes])
    return None if corners is None or (corners[:, 2:] <= corners[:, :2]).any() else corners


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
        raise ValueError(f"{where} must be a list of equally many numbers from 0 for each of the {number} objects")
    return attributes


def _box(box: Any, where: str) -> list[float]:
    """[x1, y1, x2, y2, score] -> its corners; the score is not used."""
    if not isinstance(box, list) or len(box) > 5 or not is_box(box[:4]):
        raise ValueError(f"{where} is {box!r}, expected [x1, y1, x2, y2, score] of finite numbers")
    if box[2] <= box[0] or box[3] <= box[1]:
        raise ValueError(f"{where} [x1, y1, x2, y2] = {box[:4]} is empty or inverted; correct the file")
    return [float(value) for value in box[:4]]


def read_polygons(outlines: Any, where: str) -> list[np.ndarray]:
    """The outlines of one object; raises ValueError unless they are lists of points."""
    try:
        arrays = [np.array(outline, dtype=np.float64) for outline in outlines]
    except (TypeError, ValueError):
        arrays = None
    if arrays is None or any(a.ndim != 2 or a.shape[1:] != (2,) or not np.isfinite(a).all() for a in arrays):
        raise ValueError(f"{where} must be a list of outlines, each a list of points [x, y]; correct the file")
    return arrays
