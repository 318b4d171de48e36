"""Lists of possible answers (answer vocabularies) as files; the row in the list is the class."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from detector.errors import UserError, user_path
from detector.io import write_text
from e2e_vl.data.storage.files import read_json, read_text
from e2e_vl.records import Number, Record, checked, cut_text


class _SourcedAnswer(Record):
    ans: str
    dsets: list[str]


ANSWERS_FILE = "answers.json"  # a model's own list of answers, beside its weights


def read_answers(path: str | Path, sources: Collection[str] | None = None) -> list[str]:
    """Read an answer vocabulary; the row in the list is the class.

    Args:
        path: `.txt`, one answer per line, lower-cased here and blank lines dropped (Pythia, VL-BERT; usually with an
            entry `<unk>`); or `.json`: a list of answers (LXMERT's `trainval_label2ans.json`), or an object from answer
            to class (`trainval_ans2label.json`), or a list of {"ans": answer, "dsets": [source, ...]} (LXMERT's
            `all_ans.json`). JSON may hold the empty answer.
        sources: of the last kind, only answers of these data sets are kept, which numbers them anew.

    Raises:
        FileNotFoundError: no such file.
        ValueError: another suffix or content, no answers, classes that are not 0, 1, 2, ..., or an answer that is
            listed twice. (A model's own list, `answers.json`, may have such: a task spells the lines of text files.)
    """
    path = user_path(path)
    if path.suffix == ".json":
        rows, answers = _answers_of_json(read_json(path, "answers"), path, sources)
        if path.name != ANSWERS_FILE:
            _require_each_once(answers, rows, f"{path}: the entries", " (counted from 0)")
    elif path.suffix == ".txt":
        lines = read_text(path, "answers").split("\n")
        found = {number: line.strip().lower() for number, line in enumerate(lines, start=1) if line.strip()}
        answers = list(found.values())
        _require_each_once(answers, list(found), f"{path}: the lines", "")
    else:
        raise UserError(f"{path}: an answer vocabulary is a .txt file, one answer per line, or a .json file")
    if not answers:
        raise UserError(f"{path} holds no answers")
    return answers


def _require_each_once(answers: Sequence[str], places: Sequence[int], what: str, how: str) -> None:
    """Raises UserError, which names both places, if an answer is there twice."""
    first: dict[str, int] = {}
    for answer, place in zip(answers, places, strict=True):
        if (other := first.setdefault(answer, place)) != place:
            raise UserError(
                f"{what} {other} and {place}{how} are both the answer {cut_text(answer)}, which has one class only; "
                "remove one of them, or copy or download the file again"
            )


def _answers_of_json(content: Any, path: Path, sources: Collection[str] | None) -> tuple[Sequence[int], list[str]]:
    """Places in the list of the file, and answers."""
    places: Sequence[int] | None = None
    if isinstance(content, list) and all(isinstance(one, dict) and {"ans", "dsets"} <= one.keys() for one in content):
        rows = [checked(_SourcedAnswer, one, f"{path}: answer {number}") for number, one in enumerate(content)]
        places = [row for row, one in enumerate(rows) if sources is None or set(one.dsets) & set(sources)]
        content = [rows[row].ans for row in places]
    elif sources is not None:
        raise UserError(f"{path}: the file does not say from which data sets its answers are; name no sources")
    if isinstance(content, dict):
        classes = checked(dict[str, Number], content, f"{path}: the classes of the answers").values()
        if sorted(classes) != list(range(len(content))):
            raise UserError(f"{path}: the classes of the {len(content)} answers are not 0 to {len(content) - 1}")
        content = sorted(content, key=content.get)
    if not isinstance(content, list) or not all(isinstance(answer, str) for answer in content):
        raise UserError(f"{path}: expected a list of answers, or an object from answer to class")
    return range(len(content)) if places is None else places, content


def write_answers(path: str | Path, answers: list[str]) -> None:
    """Write a vocabulary as a JSON list; `read_answers` gives it back."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(answers, indent=0, ensure_ascii=False) + "\n")
