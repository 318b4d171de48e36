"""Readers of the JSON files of the official LXMERT code: sentences for pre-training, questions and pairs of images.

    pre-training  list of {"img_id", "sentf": {source: [sentence, ...]}, "labelf": {source: [{answer: score}, ...]}}
    VQA, GQA      list of {"question_id", "img_id", "sent", "label": {answer: score}, ...}; test files have no `label`
    NLVR2         list of {"identifier", "img0", "img1", "sent", "label": 0 or 1, "uid"}; test files have no `label`

Sources are those that the file names, such as "mscoco" and "vg" (captions, which have no labels), "vqa", "gqa" and
"visual7w" (questions of Visual Genome). An image of any of these files is called as in the TSV files of its features.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from e2e_vl.data.storage.files import checked_records, read_json, require_file

Scores = Mapping[str, float]  # of the answers to a question


@dataclasses.dataclass(frozen=True, slots=True)
class SourcedSentence:
    """One sentence about an image."""

    source: str
    number: int  # among the sentences of its source about the image
    words: str
    scores: Scores | None = None  # None: it is no question

    def uid(self, image_id: str) -> str:
        """As the official code calls it."""
        return f"{image_id}_{self.source}_{self.number:03d}"


@dataclasses.dataclass(frozen=True, slots=True)
class ScoredQuestion:
    """A question and how good each known answer is."""

    question_id: int | str  # a number in VQA's files, a text in GQA's
    image_id: str
    words: str
    scores: Scores | None = None  # None: the file has no labels; empty: no answer is good
    question_type: str | None = None
    answer_type: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class ListedPair:
    """A sentence about a pair of images."""

    identifier: str
    images: tuple[str, str]  # the left and the right one
    words: str
    label: int | None = None  # 1 = true; None: the file has no labels
    uid: str | None = None


def read_image_sentences(path: str | Path, sources: Collection[str] | None = None) -> dict[str, list[SourcedSentence]]:
    """The sentences about each image, sources in the order of the file; images without a sentence are left out.

    Args:
        sources: only sentences of these are kept; None keeps all.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no such JSON, an image that is listed twice, labels that do not fit the sentences, or no sentence.
    """
    path = Path(path).expanduser()
    found: dict[str, list[SourcedSentence]] = {}
    for where, row in _records(path, "sentences", ("img_id", "sentf"), "img_id", unique="image ids"):
        labels = _object(row.get("labelf", {}), f"{where}: labelf")
        own = []
        for source, sentences in _object(row["sentf"], f"{where}: sentf").items():
            given = labels.get(source)
            if not isinstance(sentences, list) or (given is not None and len(given) != len(sentences)):
                raise ValueError(
                    f"{where}: the source {source} has no list of sentences, or a list of labels of another length; "
                    "copy or download the file again"
                )
            if sources is not None and source not in sources:
                continue
            for number, words in enumerate(sentences):
                name = f"{where}: sentence {number} of {source}"
                scores = None if given is None else _scores(given[number], name)
                own.append(SourcedSentence(sys.intern(source), number, _text(words, name), scores))
        if own:
            found[_text(row["img_id"], where)] = own
    if not found:
        of = "" if sources is None else f" of the sources {', '.join(sources)}"
        raise ValueError(f"{path}: there is no sentence{of} in the file")
    return found


def read_scored_questions(path: str | Path) -> list[ScoredQuestion]:
    """The questions of a file of VQA or GQA, in its order.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no such JSON, a question that is listed twice, labels in some records only, or no question.
    """
    found = []
    for where, row in _records(path, "questions", ("question_id", "img_id", "sent"), "question_id", unique="ids"):
        kinds = {key: row[key] for key in ("question_type", "answer_type") if isinstance(row.get(key), str)}
        scores = _scores(row["label"], where) if "label" in row else None
        found.append(
            ScoredQuestion(row["question_id"], _text(row["img_id"], where), _text(row["sent"], where), scores, **kinds)
        )
    return _labelled_alike(found, [one.scores for one in found], path)


def read_listed_pairs(path: str | Path) -> list[ListedPair]:
    """The sentences of a file of NLVR2, in its order.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no such JSON, a sentence that is listed twice, another label, labels in some records only, or no
            sentence.
    """
    found = []
    for where, row in _records(path, "pairs", ("identifier", "img0", "img1", "sent"), "identifier", unique="ids"):
        label = row.get("label")
        if label not in (None, 0, 1):
            raise ValueError(f"{where}: the label is {label!r}; it must be 0 or 1")
        images = _text(row["img0"], where), _text(row["img1"], where)
        found.append(ListedPair(row["identifier"], images, _text(row["sent"], where), label, row.get("uid")))
    return _labelled_alike(found, [one.label for one in found], path)


def _records(
    path: str | Path, what: str, keys: tuple[str, ...], key: str, *, unique: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    path = require_file(path, what)
    content = read_json(path, what)
    if not isinstance(content, list):
        raise ValueError(f"{path} is a {type(content).__name__}, expected a list of {what}")
    kind = {"sentences": "image", "questions": "question", "pairs": "sentence"}[what]
    return checked_records(content, keys, f"{path}: {kind}", key, unique=unique)


def _labelled_alike(found: list[Any], labels: list[Any], path: str | Path) -> list[Any]:
    if not found:
        raise ValueError(f"{path}: there is nothing in the file; copy or download it again")
    if len({label is None for label in labels}) > 1:
        raise ValueError(f"{path}: some records have a label and others have none; do not mix splits")
    return found


def _scores(label: Any, where: str) -> dict[str, float]:
    label = _object(label, f"{where}: the label")
    for answer, score in label.items():
        if isinstance(score, bool) or not isinstance(score, int | float) or score < 0:
            raise ValueError(f"{where}: the score of the answer {answer!r} is {score!r}; it must be a number from 0 on")
    return {sys.intern(answer): float(score) for answer, score in label.items()}


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is a {type(value).__name__}, expected an object")
    return value


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where} has {value!r} in the place of a text")
    return value
