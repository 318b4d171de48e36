"""NLVR2: accuracy and consistency of the official script, tested with golden data.

An identifier is split-set-pair-sentence, such as dev-850-2-0. Predictions are compared with labels case-insensitively,
without stripping. Examples that differ only in the pair form a group: the same sentence about different images. Groups
depend on identifiers, not on sentences, which may occur in several groups.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from detector.io import write_text
from e2e_vl.predictions import Prediction, Score

LABELS = ("False", "True")  # as in the official files


class NLVR2Prediction(Prediction, kw_only=True):
    """Whether a sentence is true of two photos."""

    prediction: Literal["True", "False"]
    score: Score  # probability of the prediction
    true: Score  # probability of "True"
    file_names: tuple[str, ...] = ()  # file names of the left and the right photo
    label: Literal["True", "False"] | None = None
    identifier: str = ""


def group_of(identifier: str) -> str:
    """The identifier without its pair."""
    split, number, _, sentence = identifier.split("-")
    return f"{split}-{number}-{sentence}"


def truth_scores(labels: Mapping[str, str], predictions: Mapping[str, str]) -> dict[str, float]:
    """Accuracy and consistency, 0 to 1.

    Args:
        labels: identifier -> "True" or "False".
        predictions: identifier -> prediction; identifiers without a label are ignored (official).

    Returns:
        "accuracy" over the labelled examples, and "consistency", the share of groups with only right
        predictions.
    """
    groups: dict[str, list[bool]] = defaultdict(list)
    for identifier, label in labels.items():
        groups[group_of(identifier)].append(predictions[identifier].lower() == label.lower())
    hits = [hit for group in groups.values() for hit in group]
    return {
        "accuracy": sum(hits) / len(hits),
        "consistency": sum(all(group) for group in groups.values()) / len(groups),
    }


def truth_metrics(predictions: Sequence[NLVR2Prediction]) -> dict[str, float]:
    """The metrics of a run.

    Returns:
        "count"; and if there are labels, "accuracy", "accuracy/<label>" (over the examples with that label) and
        "consistency".
    """
    labelled = [one for one in predictions if one.label is not None]
    metrics = {"count": float(len(predictions))}
    if not labelled:
        return metrics
    labels = {one.identifier: one.label for one in labelled}
    metrics |= truth_scores(labels, {one.identifier: one.prediction for one in labelled})
    for label in LABELS:
        hits = [one.prediction == label for one in labelled if one.label == label]
        if hits:
            metrics[f"accuracy/{label.lower()}"] = sum(hits) / len(hits)
    return metrics


def write_submission(path: str | Path, predictions: Sequence[NLVR2Prediction]) -> None:
    """Write predictions in the official script's format: identifier,True or identifier,False without a header."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "".join(f"{one.identifier},{one.prediction}\n" for one in predictions))
