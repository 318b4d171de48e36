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
from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta, field

from detector.errors import UserError
from detector.user_paths import user_path
from e2e_vl.data.storage.files import checked_records, read_json, require_file
from e2e_vl.data.storage.record_errors import RAISE, RecordErrors
from e2e_vl.file_names import require_name
from e2e_vl.records import Id, Name, Record, Score

Scores = Mapping[str, float]  # of the answers to a question
_Row = TypeVar("_Row", bound="_ImageRow | _PairRow")


class _ImageRow(Record):
    img_id: Name

    def image_names(self) -> tuple[str, ...]:
        return (self.img_id,)


class _SentencesRow(_ImageRow):
    sentf: dict[str, list[str]]
    labelf: dict[str, list[dict[str, Score]] | None] = field(default_factory=dict)


class _ScoredRow(_ImageRow):
    question_id: Id
    sent: str
    label: dict[str, Score] | None = None
    question_type: str | None = None
    answer_type: str | None = None


class _PairRow(Record):
    identifier: Name
    img0: Name
    img1: Name
    sent: str
    label: Annotated[Literal[0, 1] | None, Meta(description="0 or 1")] = None
    uid: str | None = None

    def image_names(self) -> tuple[str, ...]:
        return self.img0, self.img1


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


def read_image_sentences(
    path: str | Path, sources: Collection[str] | None = None, errors: RecordErrors = RAISE
) -> dict[str, list[SourcedSentence]]:
    """The sentences about each image, sources in the order of the file; images without a sentence are left out.

    Args:
        sources: only sentences of these are kept; None keeps all.
        errors: what becomes of an error about one image.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no such JSON, an image that is listed twice, labels that do not fit the sentences, or no sentence.
    """
    path = user_path(path)
    found: dict[str, list[SourcedSentence]] = {}
    for where, row in _records(_SentencesRow, path, "sentences", "img_id", "image ids", errors):
        own: list[SourcedSentence] = []
        with errors:
            own = _sentences_of(row, sources, where)
        if own:
            found[row.img_id] = own
    if not found:
        of = "" if sources is None else f" of the sources {', '.join(sources)}"
        raise UserError(f"{path}: there is no sentence{of} in the file")
    return found


def _sentences_of(row: _SentencesRow, sources: Collection[str] | None, where: str) -> list[SourcedSentence]:
    own = []
    for source, sentences in row.sentf.items():
        labels = row.labelf.get(source)
        if labels is not None and len(labels) != len(sentences):
            raise UserError(
                f"{where}: the source {source} has {len(sentences)} sentences and a list of labels of another length; "
                "copy or download the file again"
            )
        if sources is not None and source not in sources:
            continue
        for number, words in enumerate(sentences):
            scores = None if labels is None else _shared(labels[number])
            own.append(SourcedSentence(sys.intern(source), number, words, scores))
    return own


def read_scored_questions(path: str | Path, errors: RecordErrors = RAISE) -> list[ScoredQuestion]:
    """The questions of a file of VQA or GQA, in its order.

    Args:
        errors: what becomes of an error about one question.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no such JSON, a question that is listed twice, labels in some records only, or no question.
    """
    found = []
    for _, row in _records(_ScoredRow, path, "questions", "question_id", "ids", errors):
        scores = None if row.label is None else _shared(row.label)
        facts = row.img_id, row.sent, scores, row.question_type, row.answer_type
        found.append(ScoredQuestion(row.question_id, *facts))
    return _labelled_alike(found, [one.scores for one in found], path, errors)


def read_listed_pairs(path: str | Path, errors: RecordErrors = RAISE) -> list[ListedPair]:
    """The sentences of a file of NLVR2, in its order.

    Args:
        errors: what becomes of an error about one sentence.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no such JSON, a sentence that is listed twice, another label, labels in some records only, or no
            sentence.
    """
    found = []
    for _, row in _records(_PairRow, path, "pairs", "identifier", "ids", errors):
        found.append(ListedPair(row.identifier, (row.img0, row.img1), row.sent, row.label, row.uid))
    return _labelled_alike(found, [one.label for one in found], path, errors)


def _records(
    kind: type[_Row], path: str | Path, what: str, key: str, unique: str, errors: RecordErrors
) -> Iterator[tuple[str, _Row]]:
    path = require_file(path, what)
    content = read_json(path, what)
    if not isinstance(content, list):
        raise UserError(f"{path} is a {type(content).__name__}, expected a list of {what}")
    name = {"sentences": "image", "questions": "question", "pairs": "sentence"}[what]
    for where, row in checked_records(kind, content, f"{path}: {name}", key, unique=unique, errors=errors):
        is_named = False
        with errors:
            for image_id in row.image_names():
                require_name(image_id, where)
            is_named = True
        if is_named:
            yield where, row


def _labelled_alike(found: list[Any], labels: list[Any], path: str | Path, errors: RecordErrors) -> list[Any]:
    if not found:
        raise UserError(f"{path}: there is nothing in the file; copy or download it again")
    if len({label is None for label in labels}) > 1:
        with errors.about(str(path)):
            raise UserError(f"{path}: some records have a label and others have none; do not mix splits")
    return found


def _shared(scores: Scores) -> dict[str, float]:
    """The scores with answers that are the same objects for all questions."""
    return {sys.intern(answer): score for answer, score in scores.items()}
