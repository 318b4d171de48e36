"""Read answer vocabularies; an answer's position in the list is its class."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from detector.errors import UserError, user_path
from detector.io import read_json
from e2e_vl.io import Record, read_text, require_unique

ANSWERS_FILE = "answers.json"  # the answer vocabulary that is saved beside a model's weights


class _SourcedAnswer(Record):
    ans: str
    dsets: list[str]


def read_answers(path: str | Path, sources: Collection[str] | None = None) -> list[str]:
    """Read an answer vocabulary; an answer's position in the list is its class.

    Args:
        path: `.txt`: one answer per line, lower-cased; blank lines are skipped (Pythia, VL-BERT; usually with an entry
            `<unk>`). `.json`: a list of answers (LXMERT's `trainval_label2ans.json`), an object mapping answers to
            classes (`trainval_ans2label.json`), or a list of {"ans": answer, "dsets": [source, ...]} (LXMERT's
            `all_ans.json`). JSON files may contain the empty answer.
        sources: for `all_ans.json`, keep and number only the answers of these data sets.
    """
    path = user_path(path)
    if sources is not None:
        rows = read_json(path, list[_SourcedAnswer])
        answers = [row.ans for row in rows if not set(row.dsets).isdisjoint(sources)]
    elif path.suffix.lower() == ".txt":
        lines = [line.strip() for line in read_text(path).split("\n")]
        answers = [line.lower() for line in lines if line]
    else:
        content = read_json(path, list[str | _SourcedAnswer] | dict[str, int])
        if isinstance(content, dict):
            answers = sorted(content, key=content.get)
            if [content[answer] for answer in answers] != list(range(len(answers))):
                raise UserError(f"{path}: the classes of the {len(answers)} answers are not 0 to {len(answers) - 1}")
        else:
            answers = []
            for row in content:
                answers.append(row if isinstance(row, str) else row.ans)
    if not answers:
        details = "" if sources is None else f" of {', '.join(sources)}"
        raise UserError(f"{path} has no answers{details}")
    if path.name != ANSWERS_FILE:  # a saved vocabulary may list an answer twice, since tasks normalise text files
        require_unique(answers, f"{path}: the answer")
    return answers
