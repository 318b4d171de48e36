"""Lists of possible answers (answer vocabularies) as files; the row in the list is the class."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

from detector.errors import UserError, user_path
from detector.io import read_json, write_text
from e2e_vl.data.tables import require_unique
from e2e_vl.io import Record, read_text

ANSWERS_FILE = "answers.json"  # a model's own list of answers, beside its weights


class _SourcedAnswer(Record):
    ans: str
    dsets: list[str]


def read_answers(path: str | Path, sources: Collection[str] | None = None) -> list[str]:
    """Read an answer vocabulary; the row in the list is the class.

    Args:
        path: `.txt`, one answer per line, lower-cased here and blank lines dropped (Pythia, VL-BERT; usually with an
            entry `<unk>`); or `.json`: a list of answers (LXMERT's `trainval_label2ans.json`), or an object from answer
            to class (`trainval_ans2label.json`), or a list of {"ans": answer, "dsets": [source, ...]} (LXMERT's
            `all_ans.json`). JSON may hold the empty answer.
        sources: of the last kind, only answers of these data sets are kept, which numbers them anew.
    """
    path = user_path(path)
    if path.suffix == ".txt":
        answers = [line.strip().lower() for line in read_text(path).split("\n") if line.strip()]
    else:
        content = read_json(path, list[str | _SourcedAnswer] | dict[str, int])
        rows = list(content)
        if sources is not None and not (isinstance(content, list) and all(isinstance(one, Record) for one in rows)):
            raise UserError(f"{path}: the file does not say from which data sets its answers are; name no sources")
        if isinstance(content, dict):
            rows = sorted(content, key=content.get)
            if [content[answer] for answer in rows] != list(range(len(rows))):
                raise UserError(f"{path}: the classes of the {len(rows)} answers are not 0 to {len(rows) - 1}")
        kept = (one for one in rows if sources is None or set(one.dsets) & set(sources))
        answers = [one if isinstance(one, str) else one.ans for one in kept]
    if not answers:
        raise UserError(f"{path} holds no answers")
    if path.name != ANSWERS_FILE:  # a model's own may have an answer twice, since tasks spell the lines of text files
        require_unique(answers, f"{path}: the answer")
    return answers


def write_answers(path: str | Path, answers: list[str]) -> None:
    """Write a vocabulary as a JSON list; `read_answers` gives it back."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(answers, indent=0, ensure_ascii=False) + "\n")
