"""What a report shows of a file of predictions: counts by family, the errors, and fair samples of the rest."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from e2e_vl.records import checked
from e2e_vl.tasks.base import PredictionWords, Records, Task, box_in_words, with_target
from e2e_vl.tasks.prediction_records import PredictionRecord
from e2e_vl.wording import ONLY_PHRASES

OUTCOMES = ("wrong", "partly right", "right", "without a label")
MOST_MISTAKES = 8  # rows of the list of frequent mistakes


@dataclasses.dataclass(frozen=True)
class Prediction:
    """One prediction and what the task says of it."""

    record: dict
    words: PredictionWords

    @property
    def outcome(self) -> str:
        """One of `OUTCOMES`."""
        correct = self.record["correct"]
        if correct is None:
            return "without a label"
        return "right" if correct >= 1 else "partly right" if correct > 0 else "wrong"


@dataclasses.dataclass(frozen=True)
class Sampled:
    """Some predictions of `total`, drawn at random."""

    title: str
    total: int
    shown: list[Prediction]


@dataclasses.dataclass(frozen=True)
class PredictionLists:
    """What is shown of one file of predictions."""

    groups: dict[str, Counter[str]]  # family or type of question, "all" first -> number of predictions by outcome
    # the most frequent pairs of a truth and a wrong answer, and in how many images each occurs
    mistakes: list[tuple[str, str, int]]
    outcomes: list[str]  # those that occur, "wrong" and "right" in any case
    wrong: list[Sampled]  # one for each group that has errors, the group with the most errors first
    # family or type -> of wrong predictions whose text has a second phrase: how often those phrases are all right
    grounded: dict[str, Counter[str]]
    others: list[Sampled]  # partly right, right and unlabelled predictions, where there are any


def check_predictions(records: Sequence[Any], task: Task, path: Path) -> None:
    """Refuse a file of predictions that does not hold what a report reads.

    Args:
        records: the list in the file.
        task: declares what its predictions hold.
        path: of the file, for errors.

    Raises:
        UserError: a prediction lacks a key, or has a value that cannot be; the sentence names file and prediction.
    """
    kind = task.prediction_record
    for number, record in enumerate(records, start=1):
        has_phrases_only = isinstance(record, dict) and record.get(ONLY_PHRASES) is True
        checked(
            *(PredictionRecord if has_phrases_only else kind, record, f"{path}: prediction {number}"),
            remedy="get the run again, or remove the file",
        )


def list_predictions(records: Records, task: Task, number: int, seed: int) -> PredictionLists:
    """Count and draw from all predictions of a split with one source of boxes.

    Args:
        records: as in `predictions_*.json`, with `correct`; None there is an unknown truth and never an error. Texts
            with phrases only are left out.
        task: describes them.
        number: at most `number` wrong predictions are drawn, over all groups together, and at most `number` of each
            other outcome. Within a group, and within an outcome, every prediction has the same chance.
        seed: of the drawing.
    """
    generator = np.random.default_rng(seed)
    predictions = [Prediction(record, task.describe(record)) for record in with_target(records)]
    groups = {"all": Counter(one.outcome for one in predictions)}
    for name in sorted({one.words.group for one in predictions} - {""}):
        groups[name] = Counter(one.outcome for one in predictions if one.words.group == name)
    wrong = [one for one in predictions if one.outcome == "wrong"]
    others = []
    for outcome in OUTCOMES[1:]:
        found = [one for one in predictions if one.outcome == outcome]
        if found:
            others.append(Sampled(outcome, len(found), _draw(found, number, generator)))
    return PredictionLists(
        groups,
        _mistakes([one for one in predictions if one.outcome in ("wrong", "partly right")]),
        [outcome for outcome in OUTCOMES if groups["all"][outcome] or outcome in ("wrong", "right")],
        _by_group(wrong, number, generator),
        _grounded(wrong),
        others,
    )


def phrase_line(record: dict) -> str:
    """What the phrases of a prediction name, in words; "" for a run without phrases.

    Boxes are in pixels of the original image.
    """
    words = {True: ", right", False: ", wrong"}
    return "; ".join(
        f"{one['text']}: {'no region' if one['box'] is None else box_in_words(one['box'])} ({one['score']:.2f}"
        f"{words.get(one.get('correct'), '')})"
        for one in record.get("grounded", ())
    )


def _grounded(wrong: Sequence[Prediction]) -> dict[str, Counter[str]]:
    """Whether what an expression refers by, such as the landmark of a relation, was found although the answer is wrong.

    It is every phrase but the first, which is about the answer itself.
    """
    found: dict[str, Counter[str]] = {}
    for one in wrong:
        judged = [phrase["correct"] for phrase in one.record.get("grounded", ())[1:] if "correct" in phrase]
        if judged:
            found.setdefault(one.words.group, Counter())["right" if all(judged) else "wrong"] += 1
    return found


def _by_group(wrong: Sequence[Prediction], number: int, generator: np.random.Generator) -> list[Sampled]:
    """A sample of the errors of each group; the groups take turns until `number` errors are drawn."""
    groups: dict[str, list[Prediction]] = {}
    for one in wrong:
        groups.setdefault(one.words.group, []).append(one)
    ordered = sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
    takes = dict.fromkeys(groups, 0)
    left = min(number, len(wrong))
    while left:
        for name, members in ordered:
            if left and takes[name] < len(members):
                takes[name] += 1
                left -= 1
    return [Sampled(name, len(members), _draw(members, takes[name], generator)) for name, members in ordered]


def _draw(members: Sequence[Prediction], number: int, generator: np.random.Generator) -> list[Prediction]:
    """Up to `number` of them, in their order."""
    rows = generator.choice(len(members), size=min(number, len(members)), replace=False)
    return [members[row] for row in sorted(rows)]


def _mistakes(predictions: Sequence[Prediction]) -> list[tuple[str, str, int]]:
    """Pairs of a truth and another answer that occur in more than one image."""
    found: dict[tuple[str, str, str | None], None] = {}  # each pair once per image, in order
    for one in predictions:
        whole = ((one.words.truth, one.words.answer),) if one.outcome == "wrong" else ()
        for pair in whole if one.words.mistakes is None else one.words.mistakes:
            found[(*pair, one.record.get("file_name"))] = None
    pairs = Counter((truth, answer) for truth, answer, _ in found if truth)
    return [(*pair, count) for pair, count in pairs.most_common(MOST_MISTAKES) if count > 1]
