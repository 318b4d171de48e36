"""NLVR2: accuracy and consistency of the official script, pinned by golden data.

An identifier is split-set-pair-sentence, such as dev-850-2-0. A prediction is right if it is the label whatever the
case of its letters; nothing is stripped. Examples that differ in the pair only are one group, the same sentence about
other images; groups are told from identifiers, not from sentences, which may occur in several groups.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from detector.errors import MissingFileError, UserError, reading, user_path
from detector.io import write_text

_LABELS = ("False", "True")  # as they are written


def group_of(identifier: str) -> str:
    """The identifier without its pair.

    Raises:
        ValueError: it does not have four parts.
    """
    parts = identifier.split("-")
    if len(parts) != 4:
        raise UserError(f"the identifier {identifier!r} is not split-set-pair-sentence, such as dev-850-2-0")
    split, number, _, sentence = parts
    return f"{split}-{number}-{sentence}"


def truth_scores(labels: Mapping[str, str], predictions: Mapping[str, str]) -> dict[str, float]:
    """Accuracy and consistency, 0 to 1.

    Args:
        labels: identifier -> "True" or "False".
        predictions: identifier -> what was predicted; identifiers without a label are ignored (official).

    Returns:
        "accuracy" over the labelled examples, and "consistency", the share of groups in which every prediction is
        right.

    Raises:
        ValueError: there is no label, or a labelled example has no prediction.
    """
    if not labels:
        raise UserError("there is no labelled example to score")
    groups: dict[str, list[bool]] = defaultdict(list)
    for identifier, label in labels.items():
        if identifier not in predictions:
            raise UserError(f"example {identifier} has no prediction; predict the split that the labels belong to")
        groups[group_of(identifier)].append(predictions[identifier].lower() == label.lower())
    hits = [hit for group in groups.values() for hit in group]
    return {
        "accuracy": sum(hits) / len(hits),
        "consistency": sum(all(group) for group in groups.values()) / len(groups),
    }


def truth_metrics(records: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """The scores of records with "identifier", "prediction" and, where it is known, "label".

    Returns:
        "count", and if there are labels "accuracy", "accuracy/<label>" of the examples with that label, and
        "consistency".
    """
    records = list(records)
    labelled = [record for record in records if record.get("label") is not None]
    metrics = {"count": float(len(records))}
    if not labelled:
        return metrics
    labels = {record["identifier"]: record["label"] for record in labelled}
    metrics |= truth_scores(labels, {record["identifier"]: record["prediction"] for record in labelled})
    for label in _LABELS:
        hits = [record["prediction"] == label for record in labelled if record["label"] == label]
        if hits:
            metrics[f"accuracy/{label.lower()}"] = sum(hits) / len(hits)
    return metrics


def read_predictions(path: str | Path) -> dict[str, str]:
    """The predictions of a CSV file, read as the official script does.

    Line ends are stripped and nothing else; of more than two columns the others are ignored, and of an identifier that
    is there twice the last line counts.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a line without a comma, such as a blank one.
    """
    path = user_path(path)
    if not path.is_file():
        raise MissingFileError(f"{path}: there is no such file of predictions; check the path")
    found: dict[str, str] = {}
    with reading(path), path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            columns = line.rstrip().split(",")
            if len(columns) < 2:
                raise UserError(f"{path}, line {number}: expected identifier,True or identifier,False; correct it")
            found[columns[0]] = columns[1]
    return found


def write_submission(path: str | Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Write predictions as the official script reads them: lines identifier,True or identifier,False without a header.

    Raises:
        ValueError: an identifier twice.
    """
    records = list(records)
    counts = Counter(record["identifier"] for record in records)
    double = next((name for name, count in counts.items() if count > 1), None)
    if double is not None:
        raise UserError(f"the predictions have example {double} twice; one record each is expected")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "".join(f"{record['identifier']},{record['prediction']}\n" for record in records))
