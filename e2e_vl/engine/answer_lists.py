"""The list of possible answers of a task: read, or built from the training annotations, and kept with the model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from e2e_vl.config import RunConfig
from e2e_vl.data.base import VLDataset, open_options
from e2e_vl.data.formats.vqa_files import ANSWERS_FILE, read_answers, write_answers
from e2e_vl.evaluation.vqa import UNKNOWN, frequent_answers, strip_punctuation

OFFICIAL_SUFFIX = ".answers.txt"


def are_given(config: RunConfig) -> bool:
    """Whether the settings name the answers, so that the order of the classes is theirs."""
    return config.task.config.get("answers") is not None or "answers" in config.data.files


def answers_path(config: RunConfig) -> Path | None:
    """The file that gives the answers; None where they are a list in the settings, or are built."""
    given = config.task.config.get("answers")
    if given is None and "answers" in config.data.files:
        return Path(config.data.root).expanduser() / config.data.files["answers"]
    return Path(given).expanduser() if isinstance(given, str) else None


def possible_answers(config: RunConfig, dataset: type[VLDataset], min_count: int) -> list[str]:
    """Answers in the order of their classes.

    `task.config.answers` (a list or a file) or the file `data.files.answers`, under data.root, gives them. Without
    either they are built from the annotations of the training split, where each must answer at least `min_count`
    questions, and written beside the run's settings. The lines of a text file go through the punctuation step of the
    official evaluation (official VL-BERT code).

    Raises:
        FileNotFoundError, ValueError: see `read_answers`, the data set's reader and `frequent_answers`.
    """
    given = config.task.config.get("answers")
    if given is not None and not isinstance(given, str):
        return list(given)
    path = answers_path(config)
    if path is not None:
        answers = read_answers(path)
        return [_official_form(answer) for answer in answers] if path.suffix == ".txt" else answers
    given = dataset.answers_of(*open_options(dataset, config.data), config.data.train_split)
    answers = frequent_answers(given, min_count)
    write_answers(Path(config.output) / ANSWERS_FILE, answers)
    return answers


def official_lines(answers: Sequence[str]) -> str:
    """Answers as the text file of the official VL-BERT code, one per line in the order of their classes.

    Raises:
        ValueError: an answer that such a file cannot hold: an empty one, or one that is read back as another (lines are
            stripped and lower-cased, and go through the punctuation step of the official evaluation).
    """
    for number, answer in enumerate(answers):
        line = answer.strip().lower()
        if len(line.splitlines()) != 1 or _official_form(line) != answer:
            raise ValueError(
                f"Answer {number} is {answer!r}, which an official answer vocabulary (one answer a line) cannot hold; "
                "train with a list without it, task.config.answers."
            )
    return "".join(f"{answer}\n" for answer in answers)


def _official_form(line: str) -> str:
    return line if line == UNKNOWN else strip_punctuation(line)
