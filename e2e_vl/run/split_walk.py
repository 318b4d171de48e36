"""Looks at all records of one split of a data set, for a check of the data.

Each group of texts is looked at on its own, in whichever process, and the facts about it are put together in the order
of the groups. So the number of processes changes nothing in what is found. An image that several groups have is counted
with the first of them; as a process does not know the groups of others, that is decided when facts are put together.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from detector.errors import UserError
from e2e_vl.data.base import VLDataset
from e2e_vl.data.overlap import PhotoId, number_of_photos
from e2e_vl.data.storage.record_errors import NotedErrors
from e2e_vl.run.forked_work import in_order
from e2e_vl.samples import (
    AnnotatedObjects,
    Categories,
    ChoiceText,
    CorrectAnswer,
    HumanAnswers,
    SampleImage,
    SampleText,
    ScoredAnswers,
    Sentence,
)
from e2e_vl.text import basic_tokenize

MARGIN = 1.0  # pixels by which a box may leave its image without being counted: corners are often rounded
CHUNK = 200  # groups that a process looks at before it hands over what it found


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


@dataclasses.dataclass(slots=True)
class ImageFacts:
    """One image of a group."""

    id: str
    photos: tuple[PhotoId, ...] | None = None  # None: a problem came before they were known
    missing: str | None = None  # the path of a file that is not there
    boxes: int | None = None  # None: the image was read without annotated boxes
    classes: frozenset[int] = frozenset()
    empty_boxes: int = 0
    boxes_outside: int = 0
    outside_example: str | None = None
    problem: str | None = None  # it ends the work on the group


@dataclasses.dataclass(slots=True)
class GroupFacts:
    """One group of texts with its images."""

    images: list[ImageFacts] = dataclasses.field(default_factory=list)
    problems_before: tuple[str, ...] = ()  # that were found before the images
    problems_behind: list[str] = dataclasses.field(default_factory=list)  # and behind them, with the texts
    texts: int = 0
    pieces: int = 0  # of all texts
    longest: int = 0
    too_long: int = 0
    too_long_example: str | None = None
    without_known_answer: int | None = None  # None: no text has an answer


class FolderLists:
    """Looks for files; a folder is listed once."""

    def __init__(self) -> None:
        self._names: dict[str, set[str]] = {}

    def has(self, path: Path) -> bool:
        folder, name = os.path.split(path)
        if folder not in self._names:
            place = Path(folder)
            self._names[folder] = {one.name for one in place.iterdir()} if place.is_dir() else set()
        return name in self._names[folder]


class TextLengths:
    """Wordpieces of texts, many texts at a time.

    The tokenizer (BERT's) splits at spaces before all else, so a text has as many wordpieces as its words together, and
    each word is cut once, however often it comes.

    Args:
        tokenizer: None: words are counted.
        limit: texts that are longer are counted.
        split: for messages.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, limit: int | None, split: str) -> None:
        self.limit, self.split = limit, split
        self._tokenizer = None if tokenizer is None else tokenizer.backend_tokenizer
        self._waiting: list[tuple[GroupFacts, str, int, int]] = []
        self._pieces: dict[str, int] = {"": 0}  # of each word that came
        self._broken: set[str] = set()  # words that are no text of Unicode

    def add(self, group: GroupFacts, words: str, extra: int, index: int) -> None:
        """A text of a group.

        Args:
            extra: special wordpieces beside it.
            index: of the text in the data set.
        """
        self._waiting.append((group, words, extra, index))

    def flush(self) -> None:
        """Put the lengths of all texts that were added into the facts about their groups."""
        waiting, self._waiting = self._waiting, []
        if self._tokenizer is None:
            lengths = [len(basic_tokenize(words)) for _, words, _, _ in waiting]
        else:
            words_of = [words.split(" ") for _, words, _, _ in waiting]
            for word in set().union(*words_of).difference(self._pieces):
                self._pieces[word] = self._cut(word)
            lengths = [sum(map(self._pieces.__getitem__, own)) for own in words_of]
            if self._broken:
                for (group, words, _, index), own in zip(waiting, words_of, strict=True):
                    if not self._broken.isdisjoint(own):
                        group.problems_behind.append(
                            f"the split {self.split}: text {index} holds half a character (a lone surrogate): {words!r}"
                        )
        for (group, words, extra, _), length in zip(waiting, lengths, strict=True):
            length += extra
            group.texts += 1
            group.pieces += length
            group.longest = max(group.longest, length)
            if self.limit is not None and length > self.limit:
                group.too_long += 1
                group.too_long_example = group.too_long_example or words

    def _cut(self, word: str) -> int:
        """One by one: the tokenizer uses threads for many at once, and a process with threads should not fork."""
        try:
            word.encode()
        except UnicodeEncodeError:  # JSON can write halves of characters
            self._broken.add(word)
            word = word.encode("utf-8", "replace").decode()
        return len(self._tokenizer.encode(word, add_special_tokens=False).ids)


@dataclasses.dataclass(frozen=True)
class WalkRules:
    """What a run asks of the records.

    Attributes:
        lengths: of texts.
        extras: special wordpieces beside one text, and beside two.
        files: where images are looked for; None: images are not read.
        ids: the photo that an image of a data set is.
        answers: in the list of possible answers; None: there is no list.
        is_known: whether an answer, as written, is in it.
        skips_missing: a run leaves out images that are missing.
    """

    lengths: TextLengths
    extras: tuple[int, int]
    files: FolderLists | None
    ids: Callable[[VLDataset, SampleImage], tuple[PhotoId, ...]]
    answers: int | None
    is_known: Callable[[str], bool]
    skips_missing: bool


class SplitWalk:
    """Fills in the facts about a split.

    Args:
        photos: receives the ids of the photos by image id.
    """

    def __init__(
        self,
        dataset: VLDataset,
        rules: WalkRules,
        facts: SplitFacts,
        photos: dict[str, tuple[PhotoId, ...]],
        errors: NotedErrors,
    ) -> None:
        self.dataset, self.rules, self.facts, self.photos, self.errors = dataset, rules, facts, photos, errors
        self._classes: set[int] = set()
        self._texts = self._pieces = 0

    def run(self, max_images: int | None, processes: int | None) -> None:
        """Look at all groups, or at as many, evenly spread, and note problems.

        Raises:
            ChildProcessError: see `in_order`.
        """
        facts, groups = self.facts, len(self.dataset.groups)
        number = groups if max_images is None else min(max_images, groups)
        facts.looked_at = number / max(groups, 1)
        facts.texts = len(self.dataset)
        steps = [step * groups // number for step in range(number)]
        chunks = [steps[first : first + CHUNK] for first in range(0, number, CHUNK)]
        for found in in_order(self.look_at, chunks, processes):
            for group in found:
                self._add(group)
        facts.mean_length = self._pieces / max(self._texts, 1)
        facts.images, facts.photos = len(self.photos), number_of_photos(self.photos.values())
        if self._classes:
            facts.classes = len(self._classes)
        if facts.missing_images and not self.rules.skips_missing:
            self.errors.note(
                f"{facts.missing_examples[0]}: the file of an image is missing ({facts.missing_images} of "
                f"{facts.images} images of the split {facts.split} that were looked at are missing)"
            )

    # In any process

    def look_at(self, numbers: Sequence[int]) -> list[GroupFacts]:
        """The facts about some groups."""
        seen: set[str] = set()
        found = [self._look_at(number, seen) for number in numbers]
        self.rules.lengths.flush()
        return found

    def _look_at(self, number: int, seen: set[str]) -> GroupFacts:
        """`seen`: images that need not be looked at again."""
        group = GroupFacts()
        texts = self.dataset.groups[number]
        where = f"the split {self.facts.split}, text {texts[0] if len(texts) else number}"
        with self.errors.apart() as noted:
            with self.errors.about(where):
                sample = self.dataset.sample(texts)
                group.problems_before = tuple(noted)
                noted.clear()
                has_problem = False
                for image in sample.images:
                    if image.id not in seen:
                        facts = self._image(image)
                        group.images.append(facts)
                        if not has_problem and facts.photos is not None:  # else other groups may have to count it
                            seen.add(image.id)
                        has_problem = has_problem or facts.problem is not None
                for text in sample.texts:
                    self._text(group, text, sample.images)
            group.problems_behind += noted
        return group

    def _image(self, image: SampleImage) -> ImageFacts:
        found = ImageFacts(image.id)
        try:
            found.photos = self.rules.ids(self.dataset, image)
            files = self.rules.files
            if files is not None and isinstance(image.file, Path) and not files.has(image.file):
                found.missing = str(image.file)
            if image.objects is not None:
                _count_boxes(found, image.objects, image.size)
        except Exception as error:
            found.problem = self.errors.sentence(error)
            if found.problem is None:
                raise
        return found

    def _text(self, group: GroupFacts, text: SampleText, images: Sequence[SampleImage]) -> None:
        lengths, (extra, extra_of_pair) = self.rules.lengths, self.rules.extras
        if isinstance(text, ChoiceText):
            names = images[0].objects.names if images and images[0].objects is not None else None
            query = " ".join([_plain(sentence, names) for sentence in text.query])
            for choice in text.choices:
                lengths.add(group, f"{query} {_plain(choice, names)}", extra_of_pair, text.index)
        else:
            split = self.facts.split
            if not isinstance(text.words, str):
                raise UserError(f"text {text.index} of the split {split} is {text.words!r}; it must be a text")
            if not text.words.strip() and not isinstance(text.truth, Categories):  # detection has no texts
                ids = ", ".join(f"{key} {text.metadata[key]}" for key in text.metadata if key.endswith(("_id", "Id")))
                self.errors.note(f"the split {split}: text {text.index} is empty ({ids or 'no ids'})")
            lengths.add(group, text.words, extra, text.index)
        if self.rules.answers is not None and text.truth is not None:
            is_known = any(map(self.rules.is_known, _annotated_answers(text.truth)))
            group.without_known_answer = (group.without_known_answer or 0) + (not is_known)

    # In the first process, group by group

    def _add(self, group: GroupFacts) -> None:
        facts = self.facts
        for sentence in group.problems_before:
            self.errors.note(sentence)
        for image in group.images:
            if image.id not in self.photos:
                self._add_image(image)
                if image.problem is not None:
                    self.errors.note(image.problem)
                    return
        for sentence in group.problems_behind:
            self.errors.note(sentence)
        self._texts += group.texts
        self._pieces += group.pieces
        facts.longest = max(facts.longest, group.longest)
        facts.too_long += group.too_long
        facts.too_long_example = facts.too_long_example or group.too_long_example
        if group.without_known_answer is not None:
            facts.answers = self.rules.answers
            facts.texts_without_known_answer = (facts.texts_without_known_answer or 0) + group.without_known_answer

    def _add_image(self, image: ImageFacts) -> None:
        facts = self.facts
        if image.photos is not None:
            self.photos[image.id] = image.photos
        if image.missing is not None:
            facts.missing_images += 1
            if len(facts.missing_examples) < 3:
                facts.missing_examples.append(image.missing)
        if image.boxes is not None:
            facts.boxes += image.boxes
            facts.images_without_boxes = (facts.images_without_boxes or 0) + (not image.boxes)
            self._classes |= image.classes
        facts.empty_boxes += image.empty_boxes
        facts.boxes_outside += image.boxes_outside
        facts.boxes_outside_example = facts.boxes_outside_example or image.outside_example


def _count_boxes(facts: ImageFacts, objects: AnnotatedObjects, size: tuple[int, int] | None) -> None:
    boxes = objects.boxes
    facts.boxes = len(boxes)
    if objects.classes is not None:
        facts.classes = frozenset(objects.classes.tolist())
    if not len(boxes):
        return
    facts.empty_boxes = int((boxes[:, 2:] <= boxes[:, :2]).any(axis=1).sum())
    if size is not None:
        height, width = size
        outside = ((boxes[:, :2] < -MARGIN) | (boxes[:, 2:] > np.array([width, height]) + MARGIN)).any(axis=1)
        facts.boxes_outside = int(outside.sum())
        if facts.boxes_outside:
            row = boxes[int(outside.argmax())].tolist()
            facts.outside_example = f"{objects.origin}: {row} of {width} x {height} pixels"


def _plain(sentence: Sentence, names: Sequence[str] | None) -> str:
    """A sentence in words; objects are called by their classes."""
    return " ".join(
        [
            token if isinstance(token, str) else " ".join([names[number] if names else "object" for number in token])
            for token in sentence
        ]
    )


def _annotated_answers(truth: Any) -> Sequence[str]:
    if isinstance(truth, HumanAnswers):
        return truth.answers
    if isinstance(truth, CorrectAnswer):
        return (truth.answer,)
    return list(truth.scores) if isinstance(truth, ScoredAnswers) else ()
