"""Reads the annotations of a run without training: all problems, sizes, and photos that several data sets share.

The readers of the data sets do the work; told to note errors (`NotedErrors`), they leave a malformed record out and
read on. What is wrong with a file as a whole (no JSON, other questions than annotations) ends the reading of this file;
the other files and splits are read all the same. Nothing is written, no image is opened.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from e2e_vl.box_sources import BoxSource
from e2e_vl.config import RunConfig
from e2e_vl.data.base import VLDataset, Wants, check_boxes_source, open_options
from e2e_vl.data.images.candidates import open_boxes_of
from e2e_vl.data.photo_ids import PhotoId, PhotoIds, number_of_photos
from e2e_vl.data.storage.record_errors import NotedErrors
from e2e_vl.data.storage.shared_reads import SharedReads, collection_paused
from e2e_vl.engine.answer_lists import possible_answers
from e2e_vl.engine.build import named_parts, task_config
from e2e_vl.engine.build_data import is_drawn, open_split
from e2e_vl.engine.preflight import Findings, find_files
from e2e_vl.engine.run import splits_of
from e2e_vl.samples import (
    AnnotatedObjects,
    Categories,
    ChoiceText,
    HumanAnswers,
    RightAnswer,
    SampleImage,
    SampleText,
    ScoredAnswers,
    Sentence,
)
from e2e_vl.text import load_tokenizer, split_words

MARGIN = 1.0  # pixels by which a box may leave its image without being counted: corners are often rounded
_CHUNK = 8192  # texts that are cut into wordpieces together
_VALUES = re.compile(r"'[^']*'|\"[^\"]*\"|\[[^\]]*\]|\d[\d.]*(?:-\d+)*")


@dataclasses.dataclass
class SplitFacts:
    """How large a split is, and what is unusual in it. Problems are apart."""

    split: str
    is_trained: bool
    images: int = 0
    photos: int = 0  # different ones; joined data sets may have the same photo under two ids
    looked_at: float = 1.0  # share of the images that the following numbers are about
    missing_images: int = 0
    missing_examples: list[str] = dataclasses.field(default_factory=list)
    texts: int = 0
    longest: int = 0  # wordpieces (words, where a vocabulary is built from the data), special ones included
    mean_length: float = 0.0
    too_long: int = 0  # texts that data.max_text_length cuts
    too_long_example: str | None = None
    boxes: int = 0
    classes: int | None = None  # that occur, where boxes have any
    images_without_boxes: int | None = None  # None: the split was read without annotated boxes
    empty_boxes: int = 0
    boxes_outside: int = 0  # by more than `MARGIN`
    boxes_outside_example: str | None = None
    answers: int | None = None  # in the list of possible answers
    texts_without_known_answer: int | None = None  # no annotated answer is in the list


@dataclasses.dataclass(frozen=True)
class Overlap:
    """Photos of an evaluated split that occur elsewhere."""

    split: str
    elsewhere: str
    number: int
    of: int  # photos of the split
    examples: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class DataReport:
    """What a check has found.

    Attributes:
        problems: sentences that each name a file and mostly a record; see `alike`.
    """

    splits: list[SplitFacts]
    overlaps: list[Overlap]
    problems: list[str]
    counts_words: bool  # lengths are in words: the vocabulary is not known yet

    def alike(self) -> list[list[str]]:
        """The problems, those together that differ in ids, values and numbers only."""
        kinds: dict[str, list[str]] = {}
        for sentence in self.problems:
            kinds.setdefault(_VALUES.sub("#", sentence), []).append(sentence)
        return list(kinds.values())


class _Lengths:
    """Wordpieces of texts, many texts at a time.

    The tokenizer (BERT's) splits at spaces before all else, so a text has as many wordpieces as its words together, and
    each word is cut once, however often it comes.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, facts: SplitFacts, limit: int | None) -> None:
        self.tokenizer, self.facts, self.limit = tokenizer, facts, limit
        self.waiting: list[tuple[str, int]] = []
        self.pieces: dict[str, int] = {"": 0}  # of each word that came
        self.total = self.number = 0

    def add(self, words: str, extra: int) -> None:
        self.waiting.append((words, extra))
        if len(self.waiting) == _CHUNK:
            self.flush()

    def flush(self) -> None:
        texts = [words for words, _ in self.waiting]
        if self.tokenizer is None:
            lengths = [len(split_words(words)) for words in texts]
        else:
            words_of = [words.split(" ") for words in texts]
            new = list({word for own in words_of for word in own}.difference(self.pieces))
            encoded = self.tokenizer.backend_tokenizer.encode_batch_fast(new, add_special_tokens=False)
            self.pieces.update((word, len(one.ids)) for word, one in zip(new, encoded, strict=True))
            lengths = [sum(map(self.pieces.__getitem__, own)) for own in words_of]
        for (words, extra), length in zip(self.waiting, lengths, strict=True):
            length += extra
            self.total, self.number = self.total + length, self.number + 1
            self.facts.longest = max(self.facts.longest, length)
            if self.limit is not None and length > self.limit:
                self.facts.too_long += 1
                self.facts.too_long_example = self.facts.too_long_example or words
        self.waiting.clear()
        self.facts.mean_length = self.total / max(self.number, 1)


class _Files:
    """Looks for files; a folder is listed once."""

    def __init__(self) -> None:
        self._names: dict[Path, set[str]] = {}

    def has(self, path: Path) -> bool:
        folder = path.parent
        if folder not in self._names:
            self._names[folder] = {one.name for one in folder.iterdir()} if folder.is_dir() else set()
        return path.name in self._names[folder]


def check_data(
    config: RunConfig,
    *,
    others: Sequence[tuple[str, RunConfig]] = (),
    photo_ids: PhotoIds | None = None,
    detector_photos: set[PhotoId] | None = None,
    max_images: int | None = None,
) -> DataReport:
    """Read all splits that the settings train on and evaluate.

    Args:
        others: (name, settings) of runs whose training splits the evaluated splits are compared with.
        photo_ids: finds photos again in other data sets.
        detector_photos: what the detector was trained on.
        max_images: look at this many images of each split, evenly spread; None = all.

    Raises:
        ValueError: drawn data that are not drawn yet.
    """
    with collection_paused():  # what is made in millions stays until the end
        return _Check(config, photo_ids or PhotoIds(), max_images).run(others, detector_photos)


class _Check:
    def __init__(self, config: RunConfig, photo_ids: PhotoIds, max_images: int | None) -> None:
        self.config, self.photo_ids, self.max_images = config, photo_ids, max_images
        self.errors = NotedErrors()
        self.shared = SharedReads()  # what the splits have read
        self.files = _Files()
        self.parts = named_parts(config)
        self.tokenizer: PreTrainedTokenizerBase | None = None
        self.answers: set[str] | None = None
        self.known: dict[str, bool] = {}  # annotated answers, as written, that have been looked up
        self.not_there: tuple[str, ...] = ()  # beginnings of sentences about files that are known to be missing

    def run(self, others: Sequence[tuple[str, RunConfig]], detector_photos: set[PhotoId] | None) -> DataReport:
        _require_drawn(self.config)
        found = Findings()
        with found.noting():
            find_files(self.config, self.parts.dataset, found, will_be_drawn=False)
        for sentence in found:
            self.errors.note(sentence)
        self.not_there = tuple(sentence.partition(": ")[0] for sentence in found)
        if self.config.data.vocabulary is not None:
            with self.errors:
                self.tokenizer = load_tokenizer(self.config.data.vocabulary)
        with self.errors:
            self.answers = self._known_answers()
        facts, photos = [], {}
        for split, sources, is_trained in _each_split(self.config):
            facts.append(SplitFacts(split, is_trained))
            photos[split] = self._read(facts[-1], sources)
        places: dict[str, set[PhotoId]] = {}
        train = self.config.data.train_split
        own = f"the training split {train}"
        places[own] = _joined(photos[train])
        for name, other in others:
            places[f"the training split {other.data.train_split} of {name}"] = self._photos_of(name, other)
        if detector_photos is not None:
            places["the training images of the detector"] = detector_photos
        overlaps = [
            overlap
            for split in dict.fromkeys(self.config.data.eval_splits)
            for place, known in places.items()
            if (split, place) != (train, own) and (overlap := _overlap(split, photos[split], place, known))
        ]
        problems = [sentence for sentence in self.errors.sentences if not self._is_repeated(sentence, found)]
        return DataReport(facts, overlaps, problems, counts_words=self.tokenizer is None)

    def _is_repeated(self, sentence: str, found: Sequence[str]) -> bool:
        """A reader says again that a file is missing."""
        is_about_file = "there is no such file" in sentence and sentence not in found
        return is_about_file and sentence.partition(": ")[0] in self.not_there

    def _known_answers(self) -> set[str] | None:
        task = self.parts.task[1]
        if not task.chooses_answers:
            return None
        least = task_config(self.config).min_answer_count
        return set(possible_answers(self.config, self.parts.dataset, task, least, self.errors, self.shared))

    # One split

    def _read(self, facts: SplitFacts, sources: Sequence[BoxSource]) -> dict[str, tuple[PhotoId, ...]]:
        """Fill in the facts; returns the ids of the photos by image id."""
        main = next((one for one in sources if one.reads_annotations), sources[0])
        photos: dict[str, tuple[PhotoId, ...]] = {}
        with self.errors.about(f"the split {facts.split}"):
            for boxes in sources:
                check_boxes_source(self.parts.dataset, self.config.data.name, boxes)
            dataset = open_split(
                self.config, facts.split, main, training=facts.is_trained, errors=self.errors, shared=self.shared
            )
            self._walk(dataset, facts, photos)
            for boxes in sources:
                with self.errors:
                    reader = open_boxes_of(dataset, self.config.data, boxes, self.errors, self.shared)
                    if reader is not None:
                        reader.require_images(dataset.image_ids(), facts.split)
        return photos

    def _walk(self, dataset: VLDataset, facts: SplitFacts, photos: dict[str, tuple[PhotoId, ...]]) -> None:
        layout = self.parts.encoder[1].layout
        extra = (layout.question if self.parts.task[1].chooses_answers else layout.single).extra
        extras = (extra, layout.pair.extra)
        lengths = _Lengths(self.tokenizer, facts, self.config.data.max_text_length)
        groups = dataset.groups
        number = len(groups) if self.max_images is None else min(self.max_images, len(groups))
        facts.looked_at = number / max(len(groups), 1)
        facts.texts = len(dataset)
        needs_files = self.config.detector.backend != "precomputed"
        classes: set[int] = set()
        for step in range(number):
            texts = groups[step * len(groups) // number]
            with self.errors.about(f"the split {facts.split}, text {texts[0] if len(texts) else step}"):
                sample = dataset.sample(texts)
                for image in sample.images:
                    if image.id in photos:
                        continue
                    photos[image.id] = self._ids(self.config, dataset, image)
                    if needs_files and isinstance(image.file, Path) and not self.files.has(image.file):
                        facts.missing_images += 1
                        if len(facts.missing_examples) < 3:
                            facts.missing_examples.append(str(image.file))
                    if image.objects is not None:
                        _count_boxes(facts, image.objects, image.size, classes)
                for text in sample.texts:
                    self._count_text(facts, text, sample.images, lengths, extras)
        lengths.flush()
        facts.images, facts.photos = len(photos), number_of_photos(photos.values())
        if classes:
            facts.classes = len(classes)
        skips = facts.is_trained and self.config.data.skip_broken
        if facts.missing_images and not skips:
            self.errors.note(
                f"{facts.missing_examples[0]}: the file of an image is missing ({facts.missing_images} of "
                f"{facts.images} images of the split {facts.split} that were looked at are missing)"
            )

    def _count_text(
        self,
        facts: SplitFacts,
        text: SampleText,
        images: Sequence[SampleImage],
        lengths: _Lengths,
        extras: tuple[int, int],
    ) -> None:
        """`extras`: special wordpieces beside one text, and beside two."""
        if isinstance(text, ChoiceText):
            names = images[0].objects.names if images and images[0].objects is not None else None
            query = " ".join(_plain(sentence, names) for sentence in text.query)
            for choice in text.choices:
                lengths.add(f"{query} {_plain(choice, names)}", extras[1])
        else:
            if not isinstance(text.words, str):
                raise ValueError(f"text {text.index} of the split {facts.split} is {text.words!r}; it must be a text")
            if not text.words.strip() and not isinstance(text.truth, Categories):  # detection has no texts
                ids = ", ".join(f"{key} {text.facts[key]}" for key in text.facts if key.endswith(("_id", "Id")))
                self.errors.note(f"the split {facts.split}: text {text.index} is empty ({ids or 'no ids'})")
            lengths.add(text.words, extras[0])
        if self.answers is not None and text.truth is not None:
            facts.answers = len(self.answers)
            is_known = any(map(self._is_known, _annotated_answers(text.truth)))
            facts.texts_without_known_answer = (facts.texts_without_known_answer or 0) + (not is_known)

    def _is_known(self, answer: str) -> bool:
        """Whether an answer is in the list; the same answers come again and again."""
        if answer not in self.known:
            self.known[answer] = self.parts.task[1].spell_answer(answer) in self.answers
        return self.known[answer]

    # Photos

    def _ids(self, config: RunConfig, dataset: VLDataset, image: SampleImage) -> tuple[PhotoId, ...]:
        if config.data.synthetic.scenes:  # drawn scenes have names of COCO, but are no photos
            return (PhotoId(f"drawn in {config.data.root}", image.id),)
        file = image.file if isinstance(image.file, Path) else None
        return self.photo_ids.of_image(image.id, file, dataset.id_space, image.known_as)

    def _photos_of(self, name: str, config: RunConfig) -> set[PhotoId]:
        """The photos that another run is trained on."""
        found: set[PhotoId] = set()
        errors = NotedErrors()  # records of the other run are its own business
        kind = named_parts(config).dataset
        with self.errors.about(f"--with {name}"):
            _require_drawn(config)
            boxes = BoxSource.ONLINE if BoxSource.ONLINE in kind.box_sources else kind.box_sources[0]
            files, options = open_options(kind, config.data, errors, self.shared)
            dataset = kind.open(files, options, config.data.train_split, Wants(boxes))
            for texts in dataset.groups:
                with errors:
                    for image in dataset.sample(texts[:1]).images:
                        found.update(self._ids(config, dataset, image))
        return found


def _require_drawn(config: RunConfig) -> None:
    if config.data.synthetic.scenes and not is_drawn(config):
        raise ValueError(
            f"{config.data.root}: the scenes of this config are not drawn yet; a run draws them, or e2e-vl synthesize."
        )


def _each_split(config: RunConfig) -> Iterator[tuple[str, list[BoxSource], bool]]:
    """(split, box sources, whether it is trained on); a split that is trained on comes first and once."""
    found: dict[str, tuple[list[BoxSource], bool]] = {}
    for split, boxes, training in splits_of(config):
        sources, is_trained = found.get(split, ([], False))
        found[split] = ([*sources, *([] if boxes in sources else [boxes])], is_trained or training)
    yield from ((split, *facts) for split, facts in found.items())


def _count_boxes(facts: SplitFacts, objects: AnnotatedObjects, size: tuple[int, int] | None, classes: set[int]) -> None:
    boxes = objects.boxes
    facts.boxes += len(boxes)
    facts.images_without_boxes = (facts.images_without_boxes or 0) + (not len(boxes))
    if objects.classes is not None:
        classes.update(objects.classes.tolist())
    if not len(boxes):
        return
    facts.empty_boxes += int(((boxes[:, 2] <= boxes[:, 0]) | (boxes[:, 3] <= boxes[:, 1])).sum())
    if size is not None:
        height, width = size
        outside = (boxes[:, :2] < -MARGIN).any(axis=1) | (boxes[:, 2:] > np.array([width, height]) + MARGIN).any(axis=1)
        facts.boxes_outside += int(outside.sum())
        if outside.any() and facts.boxes_outside_example is None:
            row = boxes[int(outside.argmax())].tolist()
            facts.boxes_outside_example = f"{objects.origin}: {row} of {width} x {height} pixels"


def _plain(sentence: Sentence, names: Sequence[str] | None) -> str:
    """A sentence in words; objects are called by their classes."""
    return " ".join(
        token if isinstance(token, str) else " ".join(names[number] if names else "object" for number in token)
        for token in sentence
    )


def _annotated_answers(truth: Any) -> Sequence[str]:
    if isinstance(truth, HumanAnswers):
        return truth.answers
    if isinstance(truth, RightAnswer):
        return (truth.answer,)
    return list(truth.scores) if isinstance(truth, ScoredAnswers) else ()


def _joined(photos: dict[str, tuple[PhotoId, ...]]) -> set[PhotoId]:
    return {one for ids in photos.values() for one in ids}


def _overlap(split: str, photos: dict[str, tuple[PhotoId, ...]], place: str, known: set[PhotoId]) -> Overlap | None:
    """None if no photo of the split is known there."""
    common = [name for name, ids in photos.items() if not known.isdisjoint(ids)]
    if not common:
        return None
    number, of = (number_of_photos(photos[name] for name in names) for names in (common, photos))
    return Overlap(split, place, number, of, tuple(common[:3]))
