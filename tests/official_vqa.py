"""What the official evaluation script of VQA v2 reports, from our scores of single answers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

from e2e_vl.metrics.vqa import answer_accuracy


def vqa_accuracy(
    predictions: Sequence[Mapping[str, Any]], annotations: Sequence[Mapping[str, Any]], decimals: int = 2
) -> dict[str, Any]:
    """Per cent: "overall", "perAnswerType", "perQuestionType" and "perQuestion" {question id: accuracy}.

    Args:
        predictions: one {"question_id", "answer"} per question of the annotation file.
        annotations: with "question_id", "answers" (ten strings), "answer_type" and "question_type".
        decimals: places that all numbers are rounded to, half away from zero.
    """
    predicted = {row["question_id"]: row for row in predictions}
    assert len(predicted) == len(predictions) and predicted.keys() == {row["question_id"] for row in annotations}
    scores: dict[Any, float] = {}
    by_answer_type, by_question_type = defaultdict(list), defaultdict(list)
    for annotation in annotations:
        number = annotation["question_id"]
        scores[number] = score = answer_accuracy(predicted[number]["answer"], annotation["answers"])
        by_answer_type[annotation["answer_type"]].append(score)
        by_question_type[annotation["question_type"]].append(score)

    def percent(values: Sequence[float]) -> float:
        return round_half_up(100 * sum(values) / len(values), decimals)

    return {
        "overall": percent(list(scores.values())),
        "perAnswerType": {name: percent(values) for name, values in sorted(by_answer_type.items())},
        "perQuestionType": {name: percent(values) for name, values in sorted(by_question_type.items())},
        "perQuestion": {number: round_half_up(100 * score, decimals) for number, score in scores.items()},
    }


def round_half_up(value: float, decimals: int) -> float:
    """Round ties away from zero as Python 2 does; Python 3 would take the even neighbour."""
    return float(Decimal(value).quantize(Decimal(1).scaleb(-decimals), ROUND_HALF_UP))
