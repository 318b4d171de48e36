"""The metrics of GQA's official evaluation script, tested with golden data.

Answers are compared exactly, including case and spaces. Only balanced questions are evaluated; unbalanced ones count
only for `consistency`, if a balanced question entails them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from e2e_vl.io import Id, Score
from e2e_vl.predictions import Prediction, Ranked, write_list

OPEN = "query"  # the structural type of open questions; all others are binary
COMMON = ("color", "material", "shape")  # choices of questions such as "What do both have in common?"
_KINDS = {"accuracyPerStructuralType": "structural", "accuracyPerSemanticType": "semantic"}


class GQAPrediction(Prediction, kw_only=True):
    """The answer to a question, with fields of the official question files."""

    metadata_fields = Prediction.metadata_fields | {"question_id", "image_id", "is_balanced"}
    answer: str
    score: Score
    top_answers: Ranked = ()
    right_answer: str | None = None
    question_id: Id | None = None
    image_id: Id | None = None
    is_balanced: bool = True
    # "structural", "semantic" and "detailed"; empty in LXMERT's files of balanced questions
    types: dict[str, str] = msgspec.field(default_factory=dict)
    group: str | None = None
    entailed: tuple[str, ...] = ()  # ids of the questions whose answers follow from this question and its answer
    steps: int = 0  # reasoning steps in the question's program
    is_valid: bool | None = None  # the answer is among the question's choices, see `belongs`; None: unknown
    is_plausible: bool | None = None
    grounding: float | None = None  # see the function `grounding`; None: the attention over regions is unknown

    @property
    def is_hit(self) -> bool:
        return self.answer == self.right_answer

    @property
    def entailed_others(self) -> list[str]:
        return [other for other in self.entailed if other != self.question_id]


def belongs(answer: str, choices: Iterable[str], types: Mapping[str, str]) -> bool:
    """Return whether an answer is among the valid (or plausible) choices of a question of these types."""
    if "Common" in types["detailed"]:
        choices = COMMON
    return answer in choices


def gqa_scores(predictions: Sequence[GQAPrediction]) -> dict[str, Any]:
    """Compute the metrics of the official script for the questions of a split, in per cent.

    Returns:
        "accuracy", "binary" and "open"; if known, "validity", "plausibility" and "grounding"; "consistency" if all
        entailed questions have a prediction; "distribution" (chi-square / 100, lower is better); and
        "accuracyPerStructuralType", "accuracyPerSemanticType", "accuracyPerLength" (words) and "accuracyPerSteps", each
        {type: {"accuracy", "count"}}. A metric over no questions is 0, as in the script.
    """
    predictions = [prediction for prediction in predictions if prediction.right_answer is not None]
    scored = [prediction for prediction in predictions if prediction.is_balanced]
    lists: dict[str, list[float]] = {"accuracy": [], "binary": [], "open": []}
    table_names = (*_KINDS, "accuracyPerLength", "accuracyPerSteps")
    tables: dict[str, dict[str, list[bool]]] = {name: defaultdict(list) for name in table_names}
    for prediction in scored:
        lists["accuracy"].append(prediction.is_hit)
        kind = "open" if prediction.types["structural"] == OPEN else "binary"
        lists[kind].append(prediction.is_hit)
        for table, type_name in _KINDS.items():
            tables[table][prediction.types[type_name]].append(prediction.is_hit)
        tables["accuracyPerLength"][str(len(prediction.text.split()))].append(prediction.is_hit)
        tables["accuracyPerSteps"][str(prediction.steps)].append(prediction.is_hit)
    for name, field in (("validity", "is_valid"), ("plausibility", "is_plausible"), ("grounding", "grounding")):
        values = [getattr(prediction, field) for prediction in scored]
        if None not in values:
            lists[name] = values
    hits = {prediction.question_id: prediction.is_hit for prediction in predictions}
    has_distinct_ids = len(hits) == len(predictions)  # joined data sets may repeat them
    entailed: set[str] = set()
    for prediction in scored:
        entailed.update(prediction.entailed_others)
    if has_distinct_ids and entailed <= hits.keys():
        others = []
        for prediction in scored:
            if prediction.is_hit:
                others.append([hits[other] for other in prediction.entailed_others])
        lists["consistency"] = [_mean(hits_of_others) for hits_of_others in others if hits_of_others]
    scores: dict[str, Any] = {name: 100 * _mean(values) for name, values in lists.items()}
    scores["distribution"] = distribution(scored) / 100
    for name, table in tables.items():
        rows = {}
        for key, values in sorted(table.items()):
            rows[key] = {"accuracy": 100 * _mean(values), "count": len(values)}
        scores[name] = rows
    return scores


def distribution(predictions: Iterable[GQAPrediction]) -> float:
    """Compute the chi-square between predicted and annotated answers of each group of questions, weighted by its size.

    Questions without a group are skipped, and so are predicted answers that are not annotated in the group. It is 0 if
    there are no groups.
    """
    gold: dict[str, Counter[str]] = defaultdict(Counter)
    predicted: dict[str, Counter[str]] = defaultdict(Counter)
    for prediction in predictions:
        if prediction.group is not None:
            gold[prediction.group][prediction.right_answer] += 1
            predicted[prediction.group][prediction.answer] += 1
    total = weighted = 0.0
    for group, counts in gold.items():
        size = counts.total()
        chi_square = 0.0
        for answer, count in counts.items():
            chi_square += (predicted[group][answer] - count) ** 2 / count
        weighted += chi_square * size
        total += size
    return weighted / total if total else 0.0


def gqa_metrics(predictions: Sequence[GQAPrediction]) -> dict[str, float]:
    """Compute the metrics of `gqa_scores` as fractions, 0 to 1.

    Predictions without types, such as those for LXMERT's files of balanced questions, only have an accuracy.

    Returns:
        "count"; and if there are balanced questions with answers, "accuracy", "accuracy/binary" and "accuracy/open"
        if there are such questions, "accuracy_by_structure/<type>", "accuracy_by_meaning/<type>",
        "accuracy_by_words/<n>", "accuracy_by_steps/<n>", "distribution" (0 is best, without an upper bound), and if
        known "validity", "plausibility", "grounding" and "consistency" (only if all entailed questions were predicted).
    """
    metrics = {"count": float(len(predictions))}
    answered = [prediction for prediction in predictions if prediction.right_answer is not None]
    if answered and not any(prediction.types for prediction in answered):
        return metrics | {"accuracy": _mean([prediction.is_hit for prediction in answered])}
    balanced = [prediction for prediction in predictions if prediction.is_balanced]
    if not any(prediction.is_balanced for prediction in answered):
        return metrics
    scores = gqa_scores(predictions)
    if not any(prediction.entailed_others for prediction in balanced):
        scores.pop("consistency", None)
    metrics["accuracy"] = scores["accuracy"] / 100
    is_open = {prediction.types["structural"] == OPEN for prediction in balanced}
    for kind, name in ((False, "binary"), (True, "open")):
        if kind in is_open:
            metrics[f"accuracy/{name}"] = scores[name] / 100
    names = ("structure", "meaning", "words", "steps")
    official = (*_KINDS, "accuracyPerLength", "accuracyPerSteps")
    for name, table in zip(names, official, strict=True):
        metrics |= {f"accuracy_by_{name}/{key}": row["accuracy"] / 100 for key, row in scores[table].items()}
    known_only = ("validity", "plausibility", "grounding", "consistency")
    metrics |= {name: scores[name] / 100 for name in known_only if name in scores}
    return metrics | {"distribution": scores["distribution"]}


def grounding(annotated: Sequence[Sequence[float]], attended: Iterable[tuple[Sequence[float], float]]) -> float:
    """Compute the attention on the objects of one question and its answer.

    It is the sum, over annotated boxes and regions, of the region's attention times the share of the region inside the
    box; attention inside several boxes counts several times. (The official script is meant to add the whole image for
    questions about the scene, but never does, because it looks for "scene" among the keys of a program's steps.)

    Args:
        annotated: boxes xyxy of those objects, relative to the image's width and height (the question's `annotations`).
        attended: boxes in the same format, such as regions or grid cells, with their attention.
    """
    total = 0.0
    for box, attention in attended:
        x1, y1, x2, y2 = box
        area = (x2 - x1) * (y2 - y1)
        for other in annotated:
            width = max(min(x2, other[2]) - max(x1, other[0]), 0)
            height = max(min(y2, other[3]) - max(y1, other[1]), 0)
            total += attention * width * height / area
    return total


def write_submission(path: Path, predictions: Sequence[GQAPrediction]) -> None:
    """Write predictions in the evaluation server's format: a JSON list of {"questionId": str, "prediction": str}."""
    entries = [
        {"questionId": str(prediction.question_id), "prediction": prediction.answer} for prediction in predictions
    ]
    write_list(path, entries, ["questionId"])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
