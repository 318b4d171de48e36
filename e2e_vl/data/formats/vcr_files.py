"""Reader of VCR's files: `train.jsonl`, `val.jsonl`, `test.jsonl` (a question per line) and a metadata file per image.

A token of a question, an answer or a rationale is a word, or a list of objects: [0, 1] stands for the objects 0 and 1
of `objects`. The test split has no labels.
"""

from __future__ import annotations

import collections
import dataclasses
import marshal
import sys
from itertools import accumulate, chain, pairwise
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta

from detector.errors import UserError
from detector.file_faults import reading
from e2e_vl.data.storage.files import read_json, require_file
from e2e_vl.data.storage.record_errors import RAISE, RecordErrors
from e2e_vl.data.storage.record_table import text_column
from e2e_vl.file_names import shown
from e2e_vl.records import Count, Name, Pixel, Record, Side, as_written, checked, decoded
from e2e_vl.samples import AnnotatedObjects, Sentence

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
