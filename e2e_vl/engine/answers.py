"""The list of possible answers of a task: read, or built from the training annotations, and kept with the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from e2e_vl.config import RunConfig
from e2e_vl.data.vqa_files import ANSWERS_FILE, read_answers, write_answers
from e2e_vl.evaluation.vqa import UNKNOWN, frequent_answers, strip_punctuation


def possible_answers(config: RunConfig, dataset: Any, min_count: int) -> list[str]:
    """Answers in the order of their classes.

    They are those of `task.config.answers` (a list or a file) or of the file `data.files.answers`, under data.root;
    without either they are built from the annotations of the training split and written beside the run's settings. To
    the lines of a text file the punctuation step of the official evaluation is applied (official VL-BERT code).

    Args:
        dataset: class with `answers_of(settings, split)`.
        min_count: of questions that a built answer belongs to.

    Raises:
        FileNotFoundError, ValueError: see `read_answers`, the data set's reader and `frequent_answers`.
    """
    given = config.task.config.get("answers")
    if given is not None and not isinstance(given, str):
        return list(given)
    if given is None and "answers" in config.data.files:
        given = Path(config.data.root).expanduser() / config.data.files["answers"]
    if given is not None:
        answers = read_answers(given)
        if Path(given).suffix == ".txt":
            answers = [answer if answer == UNKNOWN else strip_punctuation(answer) for answer in answers]
        return answers
    answers = frequent_answers(dataset.answers_of(config.data, config.data.train_split), min_count)
    write_answers(Path(config.output) / ANSWERS_FILE, answers)
    return answers
