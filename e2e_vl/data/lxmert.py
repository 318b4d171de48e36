"""Readers of the JSON files of the official LXMERT code: sentences for pre-training, questions and pairs of images.

    pre-training  list of {"img_id", "sentf": {source: [sentence, ...]}, "labelf": {source: [{answer: score}, ...]}}
    VQA, GQA      list of {"question_id", "img_id", "sent", "label": {answer: score}, ...}; test files have no `label`
    NLVR2         list of {"identifier", "img0", "img1", "sent", "label": 0 or 1, "uid"}; test files have no `label`

Sources are those that the file names, such as "mscoco" and "vg" (captions, which have no labels), "vqa", "gqa" and
"visual7w" (questions of Visual Genome). An image of any of these files is called as in the TSV files of its features.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta, field

from detector.errors import UserError, user_path
from e2e_vl.config import BoxSource
from e2e_vl.data.base import DataFiles, VLDataset, Wants, group_texts, split_names
from e2e_vl.data.batching import ConsecutiveGroups
from e2e_vl.data.coco import ImageNames
from e2e_vl.data.features import FeatureStore, open_features
from e2e_vl.data.overlap import known_by_number
from e2e_vl.data.storage.files import checked_records, read_json, require_file
from e2e_vl.data.storage.record_errors import RAISE, RecordErrors
from e2e_vl.data.storage.record_table import RecordTable, text_column
from e2e_vl.io import require_name
from e2e_vl.records import Id, Name, Record, Score
from e2e_vl.samples import CorrectChoice, Sample, SampleImage, SampleText, ScoredAnswers

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


# Where the images and features of a split are whose annotations have no place for it, and which images are there.


logger = logging.getLogger(__name__)
Item = TypeVar("Item")


@dataclasses.dataclass(frozen=True)
class ImageSets(ImageNames):
    """Fields of `data.config`."""

    # split -> what {images} stands for in `data.files`, such as {mscoco_train: train2014}; a split that is not named
    # stands for itself
    image_sets: dict[str, str] = dataclasses.field(default_factory=dict)
    # leave out texts about images that the file of features (or of detections) lacks, as the official LXMERT code does,
    # and log their number. False: such an image is an error.
    leave_out_unseen: bool = False
    # split -> number of rows: only texts about images in the first so many rows of that file are kept, and the number
    # of the others is logged (minival of the official LXMERT code: 5000)
    first_rows: dict[str, int] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        wrong = next((split for split, number in self.first_rows.items() if number < 1), None)
        if wrong is not None:
            raise UserError(f"data.config.first_rows.{wrong} is {self.first_rows[wrong]}; it must be at least 1.")

    def values(self, split: str) -> dict[str, str]:
        """Placeholder values of a split."""
        return {"split": split, "images": self.image_sets.get(split, split)}

    def kept(
        self,
        items: Iterable[Item],
        images_of: Callable[[Item], Iterable[str]],
        files: DataFiles,
        values: Mapping[str, str],
        wants: Wants,
    ) -> list[Item]:
        """The items that `leave_out_unseen` and `first_rows` leave; without them these are all items.

        Raises:
            ValueError: none is left, or `first_rows` counts rows of boxes that do not come from one file.
        """
        items, split = list(items), values["split"]
        rows = self.first_rows.get(split)
        if wants.boxes not in (BoxSource.PRECOMPUTED, BoxSource.DETECTIONS):
            if rows is not None:
                raise UserError(
                    f"data.config.first_rows.{split} counts rows of a file of boxes, but boxes are '{wants.boxes}'; "
                    "take boxes of a file, or leave first_rows out."
                )
            return items
        if rows is None and not self.leave_out_unseen:
            return items
        path: Path = files.path(wants.boxes.needs[-1], **values)
        store = open_features(path)
        seen = items
        if self.leave_out_unseen:
            seen = [item for item in items if all(image in store for image in images_of(item))]
        left = seen if rows is None else _in_first_rows(seen, images_of, store, rows, split)
        if not left:
            raise UserError(f"{path}: has features of no image of the split {split}; give another file")
        if len(seen) < len(items):
            number = len(items) - len(seen)
            logger.warning("%s: %d records of %s have no features and are left out.", path, number, split)
        if len(left) < len(seen):
            number = len(seen) - len(left)
            logger.warning("%s: %d records of %s are behind row %d and are left out.", path, number, split, rows)
        return left


def _in_first_rows(
    items: list[Item], images_of: Callable[[Item], Iterable[str]], store: FeatureStore, rows: int, split: str
) -> list[Item]:
    """The items without an image behind the first rows. Images that the file lacks are left to the reader."""
    if store.path.is_dir():
        raise UserError(
            f"{store.path}: is a folder, which has no rows for data.config.first_rows.{split}; give a file of features"
        )
    behind = set(store.ids[rows:])
    return [item for item in items if behind.isdisjoint(images_of(item))]


# Sentences of several sources about images, for pre-training: the files of the official LXMERT code.


@dataclasses.dataclass(frozen=True)
class SentenceOptions(ImageSets):
    """Fields of `data.config`."""

    sources: list[str] | None = None  # only sentences of these sources; None: of all


class ImageSentenceDataset(VLDataset):
    """Sentences of one or several splits; the texts of an image stand one after the other.

    Args:
        sentences: of each image.
        folders: of each image, the folder that it is in; empty: no image is read.
        parts: placeholder values of each split, see `VLDataset.parts`.
    """

    known_files = ("images", "sentences", "detections", "features")
    options = SentenceOptions
    box_sources = (BoxSource.ONLINE, BoxSource.DETECTIONS, BoxSource.PRECOMPUTED)

    def __init__(
        self,
        sentences: Mapping[str, Sequence[SourcedSentence]],
        folders: Mapping[str, Path],
        options: SentenceOptions,
        parts: Sequence[Mapping[str, str]],
    ) -> None:
        self.images = text_column(sentences)
        self.sentences = RecordTable(SourcedSentence, (one for own in sentences.values() for one in own))
        self.groups = ConsecutiveGroups([len(own) for own in sentences.values()])
        self.folders = folders
        self.settings = options
        self.parts = parts

    @classmethod
    def open(cls, files: DataFiles, options: SentenceOptions, split: str, wants: Wants) -> ImageSentenceDataset:
        """`split` names one split or several joined by "+"; the top of this file says which files there are.

        Raises:
            ValueError: an image that is in two of the splits; and see `read_image_sentences`.
        """
        sentences: dict[str, Sequence[SourcedSentence]] = {}
        folders: dict[str, Path] = {}
        parts = []
        for name in split_names(split):
            values = options.values(name)
            own = read_image_sentences(files.path("sentences", **values), options.sources, files.errors)
            own = dict(options.kept(own.items(), lambda item: item[:1], files, values, wants))
            twice = next((image for image in own if image in sentences), None)
            if twice is not None:
                raise UserError(f"image {twice} is in two of the splits {split}; name each split once")
            sentences |= own
            if wants.boxes is not BoxSource.PRECOMPUTED:
                folders |= dict.fromkeys(own, files.path("images", **values))
            parts.append(values)
        return cls(sentences, folders, options, parts)

    @classmethod
    def texts_of(cls, files: DataFiles, options: SentenceOptions, split: str) -> Iterable[str]:
        """All sentences of a split."""
        for name in split_names(split):
            path = files.path("sentences", **options.values(name))
            found = read_image_sentences(path, options.sources, files.errors)
            yield from (sentence.words for own in found.values() for sentence in own)

    def __len__(self) -> int:
        """Number of sentences."""
        return len(self.sentences)

    def __getitem__(self, text: int) -> str:
        """One sentence; the data set is a pool of texts."""
        return self.sentences.column("words")[text]

    def image_ids(self) -> Iterable[str]:
        return self.images

    def truths(self) -> Iterable[ScoredAnswers | None]:
        return map(_truth, self.sentences)

    def sample(self, texts: Sequence[int]) -> Sample:
        """Some sentences about one image."""
        group = self.groups.of_text(texts[0])
        name = self.images[group]
        folder = self.folders.get(name, Path())
        image = SampleImage(name, self.settings.file(folder, name), photo_aliases=known_by_number(name))
        return Sample(
            (image,), tuple(self._text(index, name) for index in texts), pool=self, own_texts=self.groups[group]
        )

    def _text(self, index: int, image_id: str) -> SampleText:
        sentence = self.sentences[index]
        facts = {"image_id": image_id, "uid": sentence.uid(image_id), "source": sentence.source, "sent": sentence.words}
        return SampleText(index, sentence.words, facts, _truth(sentence))


def _truth(sentence: SourcedSentence) -> ScoredAnswers | None:
    return None if sentence.scores is None else ScoredAnswers(sentence.scores)


# Questions whose answers have scores: the files of VQA and GQA of the official LXMERT code.


class ScoredQuestionDataset(VLDataset):
    """Questions of one or several splits, grouped by image.

    Args:
        questions: their indices are text indices.
        folders: of each question, the folder of its image.
        parts: placeholder values of each split, see `VLDataset.parts`.
    """

    known_files = ("images", "questions", "answers", "detections", "features")
    options = ImageSets
    box_sources = (BoxSource.ONLINE, BoxSource.DETECTIONS, BoxSource.PRECOMPUTED)

    def __init__(
        self,
        questions: Sequence[ScoredQuestion],
        folders: Sequence[Path],
        options: ImageSets,
        parts: Sequence[Mapping[str, str]],
    ) -> None:
        self.questions = RecordTable(ScoredQuestion, questions)
        self.folders = folders
        self.settings = options
        self.parts = parts
        self.groups = group_texts(question.image_id for question in questions)

    @classmethod
    def open(cls, files: DataFiles, options: ImageSets, split: str, wants: Wants) -> ScoredQuestionDataset:
        """`split` names one split or several joined by "+"; the top of this file says which files there are.

        Raises:
            ValueError: a question in two of the splits, or a split to train on that has no labels.
        """
        questions: dict[int | str, ScoredQuestion] = {}
        folders, parts = [], []
        for name in split_names(split):
            values = options.values(name)
            own = read_scored_questions(path := files.path("questions", **values), files.errors)
            if wants.training and own[0].scores is None:
                raise UserError(f"{path}: the split {name} has no labels to learn from; train on another split")
            own = options.kept(own, lambda one: [one.image_id], files, values, wants)
            twice = next((one.question_id for one in own if one.question_id in questions), None)
            if twice is not None:
                raise UserError(f"question {twice} is in two of the splits {split}; name each split once")
            questions |= {one.question_id: one for one in own}
            reads_images = wants.boxes is not BoxSource.PRECOMPUTED
            folders += [files.path("images", **values) if reads_images else Path()] * len(own)
            parts.append(values)
        return cls(list(questions.values()), folders, options, parts)

    @classmethod
    def reads(cls, options: ImageSets, split: str, wants: Wants) -> tuple[str, ...]:
        return tuple(key for key in super().reads(options, split, wants) if key != "answers")

    @classmethod
    def texts_of(cls, files: DataFiles, options: ImageSets, split: str) -> Iterable[str]:
        """All questions of a split and the best answer to each."""
        for question in cls._read(files, options, split):
            yield question.words
            if question.scores:
                yield max(question.scores, key=question.scores.get)

    @classmethod
    def answers_of(cls, files: DataFiles, options: ImageSets, split: str) -> dict[Any, str]:
        """The best answer to each question that has one."""
        found = cls._read(files, options, split)
        return {one.question_id: max(one.scores, key=one.scores.get) for one in found if one.scores}

    @staticmethod
    def _read(files: DataFiles, options: ImageSets, split: str) -> list[ScoredQuestion]:
        paths = [files.path("questions", **options.values(name)) for name in split_names(split)]
        return [question for path in paths for question in read_scored_questions(path, files.errors)]

    def __len__(self) -> int:
        """Number of questions."""
        return len(self.questions)

    def image_ids(self) -> Iterable[str]:
        return (self.questions[texts[0]].image_id for texts in self.groups)

    def truths(self) -> Iterable[ScoredAnswers | None]:
        return map(_truth_scored_questions, self.questions)

    def sample(self, texts: Sequence[int]) -> Sample:
        """Some questions about one image."""
        name = self.questions[texts[0]].image_id
        file = self.settings.file(self.folders[texts[0]], name)
        image = SampleImage(name, file, photo_aliases=known_by_number(name))
        return Sample((image,), tuple(self._text(index) for index in texts))

    def _text(self, index: int) -> SampleText:
        one = self.questions[index]
        facts = {"question_id": one.question_id, "question": one.words, "image_id": one.image_id}
        if one.scores is not None:
            facts["answer_scores"] = dict(one.scores)
        for key in ("question_type", "answer_type"):
            if getattr(one, key) is not None:
                facts[key] = getattr(one, key)
        return SampleText(index, one.words, facts, _truth_scored_questions(one))


def _truth_scored_questions(question: ScoredQuestion) -> ScoredAnswers | None:
    return None if question.scores is None else ScoredAnswers(question.scores)


# Sentences about pairs of images that are named one by one: the files of NLVR2 of the official LXMERT code.


LABELS = ("False", "True")  # as predictions and the official scores have them


@dataclasses.dataclass(frozen=True)
class ListedPairOptions(ImageSets):
    """Fields of `data.config`."""

    image_name: str = "{id}.png"


class ListedPairDataset(VLDataset):
    """Sentences of one or several splits, grouped by their pair of images.

    Args:
        pairs: the sentences; their indices are text indices.
        folders: of each sentence, the folder of its images.
        parts: placeholder values of each split, see `VLDataset.parts`.
    """

    known_files = ("images", "examples", "detections", "features")
    options = ListedPairOptions
    box_sources = (BoxSource.ONLINE, BoxSource.DETECTIONS, BoxSource.PRECOMPUTED)

    def __init__(
        self,
        pairs: Sequence[ListedPair],
        folders: Sequence[Path],
        options: ListedPairOptions,
        parts: Sequence[Mapping[str, str]],
    ) -> None:
        self.pairs = RecordTable(ListedPair, pairs)
        self.folders = folders
        self.settings = options
        self.parts = parts
        self.groups = group_texts(pair.images for pair in pairs)

    @classmethod
    def open(cls, files: DataFiles, options: ListedPairOptions, split: str, wants: Wants) -> ListedPairDataset:
        """`split` names one split or several joined by "+"; the top of this file says which files there are.

        Raises:
            ValueError: a sentence in two of the splits, or a split to train on that has no labels.
        """
        pairs: dict[str, ListedPair] = {}
        folders, parts = [], []
        for name in split_names(split):
            values = options.values(name)
            own = read_listed_pairs(path := files.path("examples", **values), files.errors)
            if wants.training and own[0].label is None:
                raise UserError(f"{path}: the split {name} has no labels to learn from; train on another split")
            own = options.kept(own, lambda pair: pair.images, files, values, wants)
            twice = next((pair.identifier for pair in own if pair.identifier in pairs), None)
            if twice is not None:
                raise UserError(f"example {twice} is in two of the splits {split}; name each split once")
            pairs |= {pair.identifier: pair for pair in own}
            reads_images = wants.boxes is not BoxSource.PRECOMPUTED
            folders += [files.path("images", **values) if reads_images else Path()] * len(own)
            parts.append(values)
        return cls(list(pairs.values()), folders, options, parts)

    @classmethod
    def texts_of(cls, files: DataFiles, options: ListedPairOptions, split: str) -> Iterable[str]:
        """All sentences of a split."""
        paths = [files.path("examples", **options.values(name)) for name in split_names(split)]
        return [pair.words for path in paths for pair in read_listed_pairs(path, files.errors)]

    def __len__(self) -> int:
        """Number of sentences about pairs."""
        return len(self.pairs)

    def image_ids(self) -> Iterable[str]:
        return (name for texts in self.groups for name in self.pairs[texts[0]].images)

    def truths(self) -> Iterable[CorrectChoice | None]:
        return map(_truth_listed_pairs, self.pairs)

    def sample(self, texts: Sequence[int]) -> Sample:
        """Some sentences about one pair."""
        folder = self.folders[texts[0]]
        names = self.pairs[texts[0]].images
        images = tuple(SampleImage(name, self.settings.file(folder, name)) for name in names)
        return Sample(images, tuple(self._text(index) for index in texts))

    def _text(self, index: int) -> SampleText:
        pair = self.pairs[index]
        facts = {"identifier": pair.identifier, "sent": pair.words}
        facts |= {} if pair.label is None else {"label": LABELS[pair.label]}
        return SampleText(index, pair.words, facts, _truth_listed_pairs(pair), image_index=(0, 1))


def _truth_listed_pairs(pair: ListedPair) -> CorrectChoice | None:
    return None if pair.label is None else CorrectChoice(pair.label)
