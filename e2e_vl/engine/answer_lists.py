"""The list of possible answers of a task: read, or built from the training annotations, and kept with the model."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from detector.errors import UserError
from detector.user_paths import user_path
from e2e_vl.config import RunConfig
from e2e_vl.data.base import VLDataset, open_options
from e2e_vl.data.formats.answer_files import read_answers
from e2e_vl.data.storage.record_errors import RAISE, RecordErrors
from e2e_vl.data.storage.shared_reads import SharedReads
from e2e_vl.tasks.base import Task

OFFICIAL_SUFFIX = ".answers.txt"


def are_given(config: RunConfig) -> bool:
    """Whether the settings name the answers, so that the order of the classes is theirs."""
    return config.task.config.get("answers") is not None or "answers" in config.data.files


def answers_path(config: RunConfig) -> Path | None:
    """The file that gives the answers; None where they are a list in the settings, or are built."""
    given = config.task.config.get("answers")
    if given is None and "answers" in config.data.files:
        return user_path(config.data.root, "data.root") / config.data.files["answers"]
    return user_path(given, "task.config.answers") if isinstance(given, str) else None


def possible_answers(
    config: RunConfig,
    dataset: type[VLDataset],
    task: type[Task],
    min_count: int,
    errors: RecordErrors = RAISE,
    shared: SharedReads | None = None,
) -> list[str]:
    """Answers in the order of their classes.

    `task.config.answers` (a list or a file) or the file `data.files.answers`, under data.root, gives them. Without
    either they are built from the annotations of the training split, where each must answer at least `min_count`
    questions. The task spells the answers of annotations and of text files. `errors` says what becomes of an error
    about one annotation, and `shared` is what splits have read already.

    Raises:
        FileNotFoundError, ValueError: see `read_answers`, the data set's reader and `frequent_answers`.
    """
    given = config.task.config.get("answers")
    if given is not None and not isinstance(given, str):
        return list(given)
    path = answers_path(config)
    if path is not None:
        answers = read_answers(path)
        return [task.official_answer(answer) for answer in answers] if path.suffix == ".txt" else answers
    given = dataset.answers_of(*open_options(dataset, config.data, errors, shared), config.data.train_split)
    return frequent_answers(given, min_count, task.spell_answer)


def with_answers(objective: Any) -> Any:
    """The settings of an objective, with the list in the place of a file of answers.

    Raises:
        FileNotFoundError, ValueError: see `read_answers`.
    """
    path = getattr(objective, "answers", None)
    if not isinstance(path, str):
        return objective
    return dataclasses.replace(objective, answers=tuple(read_answers(path, objective.answer_sources)))


def frequent_answers(most_frequent: Mapping[Any, str], min_count: int, spell: Callable[[str], str]) -> list[str]:
    """A list of answers from the most frequent answer to each question, by question id.

    Those that, spelled alike, at least `min_count` questions have. The empty answer may be one of them. Ordered by
    falling count, then alphabetically; published vocabularies have orders of their own.

    Raises:
        ValueError: no answer is frequent enough.
    """
    counts = Counter(spell(answer) for answer in most_frequent.values())
    kept = [answer for answer, count in counts.items() if count >= min_count]
    if not kept:
        raise UserError(
            f"no answer belongs to at least {min_count} of the {len(most_frequent)} questions; lower the least count"
        )
    return sorted(kept, key=lambda answer: (-counts[answer], answer))


def official_lines(task: Task) -> str:
    """A task's answers as the text file of official code, one per line in the order of their classes.

    Lines of an official file that the task spells alike are one answer with several classes, of which the first counts;
    they are written as different lines again ("t shirt", then "t-shirt"), since `read_answers` refuses equal ones.

    Raises:
        ValueError: an answer that such a file cannot hold: an empty one, one that is read back as another (lines are
            stripped and lower-cased, and the task spells them as official code does), or one that is there several
            times and that no other line is read as.
    """
    used: dict[str, int] = {}  # line -> number of its answer
    for number, answer in enumerate(task.answers):
        own = answer.strip().lower()
        if len(own.splitlines()) != 1 or task.official_answer(own) != answer:
            raise UserError(
                f"Answer {number} is {answer!r}, which an official answer vocabulary (one answer per line) cannot "
                "hold; train with a list without it, task.config.answers."
            )
        lines = (one for one in _spellings(own) if one not in used and task.official_answer(one) == answer)
        line = next(lines, None)
        if line is None:
            raise UserError(
                f"Answers {used[own]} and {number} are both {answer!r}, which an official answer vocabulary holds once "
                "only; train with a list that has it once, task.config.answers."
            )
        used[line] = number
    return "".join(f"{line}\n" for line in used)


def _spellings(line: str) -> Iterator[str]:
    """The line, then lines that official code may read as the same answer: with a hyphen, or with periods at the end.

    Official code deletes the first 32 periods that no digit follows.
    """
    yield line
    if " " in line:
        yield line.replace(" ", "-")
        yield line.replace(" ", "-", 1)
    for number in range(1, 33):
        yield line + "." * number
