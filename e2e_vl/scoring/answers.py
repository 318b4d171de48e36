"""Reading somebody's predictions of referring expressions: records with boxes, or with texts that contain them.

| format | a record | layout, scale |
| --- | --- | --- |
| a run of this package | a `ReferringPrediction`, or an entry of its submission file | xyxy, pixels |
| COCO results | {"image_id", "bbox", "score"}, one per box | xywh, pixels |
| MDETR | {id: {"boxes", "scores"}} | xyxy, pixels |
| MMDetection | {"img_id", "pred_instances": {"bboxes", "scores"}} | xyxy, pixels |
| boxes | an object with "box", "bbox", "boxes", "bboxes", "pred_box", "pred_bbox" or "bbox_2d" | xyxy, pixels |
| texts | an object with "response", "answer", ... (also of lmms-eval, Qwen-VL, InternVL) | xyxy, not known |

Files are JSON, or JSON lines with the ending `.jsonl`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from detector.errors import UserError
from detector.io import decode_json, read_json
from e2e_vl.io import read_text
from e2e_vl.metrics.refcoco import ReferringPrediction
from e2e_vl.predictions import read_predictions, with_target
from e2e_vl.scoring.boxes_in_text import find_boxes

BOX_KEYS = ("box", "bbox", "boxes", "bboxes", "pred_box", "pred_bbox", "pred_boxes", "bbox_2d")
TEXT_KEYS = ("response", "answer", "prediction", "pred", "output", "completion", "generated_text", "model_output")
# what tells the expression of a record -> names of it in files, of which the first one that is there counts
ID_KEYS: dict[str, tuple[str, ...]] = {
    "sent_id": ("sent_id",),
    "ann_id": ("ann_id",),
    "image": ("file_name", "image", "image_path", "img_path", "image_id"),
    "words": ("sent", "expression", "caption", "sentence", "phrase", "query", "text"),
    "id": ("question_id", "id", "img_id", "image_id"),
}


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a file says of one expression."""

    where: str  # the record, for error messages
    keys: Mapping[str, Any]  # what tells the expression: keys of `ID_KEYS`
    boxes: Sequence[Sequence[float]]  # as they are written; the first one is the answer if there are no scores
    scores: Sequence[float] | None = None
    candidates: Sequence[Sequence[float]] | None = None  # None: the boxes themselves

    @property
    def best_box(self) -> Sequence[float] | None:
        """The box with the highest score, or the first one; None: there is no box."""
        if not self.boxes:
            return None
        if self.scores is None:
            return self.boxes[0]
        return self.boxes[self.scores.index(max(self.scores))]

    def says_the_same(self, other: Answer) -> bool:
        return self.boxes == other.boxes and self.scores == other.scores


@dataclasses.dataclass(frozen=True)
class AnswerFile:
    """All predictions of a file, with what its format says of the boxes."""

    path: Path
    kind: str  # the format in words
    answers: list[Answer]
    layout: str = "xyxy"
    is_pixels: bool = True  # the format says so; False: it says nothing of the scale


def read_rows(path: Path) -> Any:
    """Read a file of JSON, or of JSON lines."""
    if path.suffix.lower() in (".pkl", ".pickle", ".pth", ".pt"):
        raise UserError(
            f"{path}: pickled predictions are not read, because a pickle can run code; write them as JSON, see "
            "docs/scoring.md."
        )
    if path.suffix.lower() != ".jsonl":
        return read_json(path)
    lines = enumerate(read_text(path).split("\n"), start=1)
    return [decode_json(line, f"{path}, line {number}") for number, line in lines if line.strip()]


def read_answers(path: Path, answer_key: str | None = None) -> AnswerFile:
    """Read a file of predictions of referring expressions.

    Args:
        answer_key: the key of the prediction in each record; None: the one that is there.
    """
    content = read_rows(path)
    if isinstance(content, Mapping):
        return AnswerFile(path, "boxes by id, as of MDETR", _answers_by_id(path, content))
    if not isinstance(content, list) or not content or not all(isinstance(row, Mapping) for row in content):
        raise UserError(f"{path}: it is no list of predictions; see docs/scoring.md for the formats.")
    first = content[0]
    if any(row.get("type") == ReferringPrediction.__name__ for row in content):
        return AnswerFile(path, "a run of this package", _answers_of_run(path))
    if answer_key is None and {"image_id", "bbox", "score"} <= first.keys() and not _text_keys(first):
        return AnswerFile(path, "COCO results", _answers_of_results(path, content), layout="xywh")
    if answer_key is None and "pred_instances" in first:
        return AnswerFile(path, "MMDetection's results", _answers_of_instances(path, content))
    key = answer_key or find_answer_key(path, first)
    answers = [_answer_of_row(path, number, row, key) for number, row in enumerate(content)]
    if any(is_text(row.get(key)) for row in content):
        return AnswerFile(path, f"texts under {key!r}", answers, is_pixels=False)
    return AnswerFile(path, f"boxes under {key!r}", answers)


def _answers_of_run(path: Path) -> list[Answer]:
    answers = []
    for number, prediction in enumerate(with_target(read_predictions(path, ReferringPrediction))):
        boxes = [] if prediction.box is None else [prediction.box]
        keys = {"sent_id": prediction.sent_id}
        answers.append(Answer(f"{path}: record {number}", keys, boxes, candidates=prediction.candidate_boxes))
    return answers


def _answers_by_id(path: Path, content: Mapping[str, Any]) -> list[Answer]:
    answers = []
    for name, row in content.items():
        where = f"{path}: id {name}"
        if not isinstance(row, Mapping) or "boxes" not in row:
            raise UserError(f"{where}: it has no 'boxes'; see docs/scoring.md for the formats.")
        boxes = boxes_of(row["boxes"], where)
        answers.append(Answer(where, {"id": name}, boxes, _scores_of(row.get("scores"), boxes, where)))
    return answers


def _answers_of_results(path: Path, rows: Sequence[Mapping[str, Any]]) -> list[Answer]:
    boxes: dict[str, list[Sequence[float]]] = {}
    scores: dict[str, list[float]] = {}
    for number, row in enumerate(rows):
        where = f"{path}: record {number}"
        name = str(row.get("image_id"))
        new_boxes = boxes_of(row.get("bbox"), where)
        boxes.setdefault(name, []).extend(new_boxes)
        scores.setdefault(name, []).extend(_scores_of([row.get("score")], new_boxes, where))
    return [Answer(f"{path}: image_id {name}", {"id": name}, boxes[name], scores[name]) for name in boxes]


def _answers_of_instances(path: Path, rows: Sequence[Mapping[str, Any]]) -> list[Answer]:
    answers = []
    for number, row in enumerate(rows):
        where = f"{path}: record {number}"
        instances = row.get("pred_instances") or {}
        boxes = boxes_of(instances.get("bboxes"), where)
        scores = _scores_of(instances.get("scores"), boxes, where)
        answers.append(Answer(where, _keys_of(row), boxes, scores))
    return answers


def _answer_of_row(path: Path, number: int, row: Mapping[str, Any], key: str) -> Answer:
    where = f"{path}: record {number}"
    if key not in row:
        raise UserError(f"{where} has no {key!r}, which others have; give a null if there is no prediction.")
    value = row[key]
    if isinstance(row.get("doc"), Mapping):  # lmms-eval: the question, whose "answer" is the expression
        question = row["doc"]
        keys = {"ann_id": question.get("question_id"), "image": question.get("file_name")}
        keys["words"] = question.get("answer")
    else:
        keys = _keys_of({name: value for name, value in row.items() if name != key})
    boxes = boxes_of(value, where)
    scores = None if is_text(value) else _scores_of(row.get("scores"), boxes, where)
    return Answer(where, keys, boxes, scores)


def _keys_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what tells the expression of a record."""
    keys = {}
    for meaning, names in ID_KEYS.items():
        for name in names:
            if row.get(name) is not None:
                keys[meaning] = row[name]
                break
    return keys


def find_answer_key(path: Path, row: Mapping[str, Any]) -> str:
    """Return the only key of a record that can hold the prediction."""
    if "filtered_resps" in row:  # lmms-eval
        return "filtered_resps"
    keys = [key for key in BOX_KEYS if key in row] + _text_keys(row)
    if len(keys) == 1:
        return keys[0]
    if keys:
        raise UserError(
            f"{path}: the records have {', '.join(keys)}; name the one that holds the prediction with --answer, as "
            "another may hold the truth."
        )
    raise UserError(f"{path}: no key of the records is known to hold a prediction; name it with --answer.")


def _text_keys(row: Mapping[str, Any]) -> list[str]:
    return [key for key in TEXT_KEYS if key in row]


def is_text(value: Any) -> bool:
    """Return whether a value is a text, or a list that begins with one."""
    while isinstance(value, list) and value:
        value = value[0]
    return isinstance(value, str)


def _text_of(value: Any) -> str:
    """Return a text, or the first one of a list of samples."""
    while isinstance(value, list):
        value = value[0]
    return value


def boxes_of(value: Any, where: str) -> list[Sequence[float]]:
    """Return the boxes that a value holds: one, a list of them, those in a text, or none for null."""
    if value is None:
        return []
    if is_text(value):
        return find_boxes(_text_of(value))
    boxes = value
    if isinstance(value, Sequence) and value and isinstance(value[0], int | float):
        boxes = [value]
    if not isinstance(boxes, Sequence) or not all(_is_box(box) for box in boxes):
        raise UserError(f"{where}: {value!r} is no box of four finite numbers, and no list of them.")
    return list(boxes)


def _scores_of(scores: Any, boxes: Sequence[Any], where: str) -> list[float] | None:
    """Return the scores of the boxes of a record; None: it has none."""
    if scores is None:
        return None
    if not isinstance(scores, list) or len(scores) != len(boxes) or not _are_numbers(scores):
        raise UserError(f"{where}: it has {len(boxes)} boxes, but not as many finite scores.")
    return scores


def _is_box(box: Any) -> bool:
    return isinstance(box, Sequence) and len(box) == 4 and _are_numbers(box)


def _are_numbers(values: Iterable[Any]) -> bool:
    return all(isinstance(value, int | float) and abs(value) < float("inf") for value in values)
