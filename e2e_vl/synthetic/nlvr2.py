"""Writer of NLVR2: sentences about pairs of scenes. Neither the sentence nor the pair alone reveals the label.

The examples come in sets of four pairs of images and two sentences, as in the release: each sentence is true of two of
the pairs and false of the others, and each pair has one true sentence and one false one. Who reads only the sentence,
or sees only the images, is right half of the time. More sentences per pair (`language.sentences_per_pair`) come two
by two in the same way; training from pixels needs them, because the detector's work is the same for two and for twenty.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from typing_extensions import override

from e2e_vl.synthetic.base import FormatWriter, Recipe, SceneRecord, by_split, link_image
from e2e_vl.synthetic.coco import write_instances
from e2e_vl.synthetic.config import PAIR_FAMILIES
from e2e_vl.synthetic.language import NUMBERS, Description, Values, all_descriptions, is_true_of, noun_phrase

PAIRS = 4  # per set
_DIRECTORIES = 100  # folders of the training images
_DRAWN_PAIRS = 40  # candidates for the pairs of a set
_ATTEMPTS = 200
_SLOTS = (("shape",), ("colour",), ("colour", "shape"))

_Pair = tuple[SceneRecord, SceneRecord]  # the left and the right image


@dataclass(frozen=True)
class PairSentence:
    """A sentence about two images, decided by the number of matching objects in each."""

    family: str
    words: str
    description: Description
    side: str  # the image that is named first, "left" or "right", if any is named
    number: int  # of objects, if a number is named

    def is_true(self, pair: _Pair) -> bool:
        """Return whether the sentence is true of a pair of images."""
        left, right = pair
        return self.is_true_of_counts(self.count(left), self.count(right))

    def is_true_of_counts(self, left: int, right: int) -> bool:
        """Return whether the sentence is true of images with `left` and `right` matching objects."""
        if self.family == "both":
            return left > 0 and right > 0
        if self.family == "exactly one":
            return (left > 0) != (right > 0)
        here, there = (left, right) if self.side == "left" else (right, left)
        if self.family == "side":
            return here > 0
        if self.family == "more":
            return here > there
        return left + right == self.number  # total

    def count(self, scene: SceneRecord) -> int:
        """Count the objects of a scene that match the description."""
        return sum(is_true_of(self.description, item.appearance) for item in scene.objects)


class PairSet(NamedTuple):
    """Four pairs of images, sentences about them, and which sentence is true of which pair."""

    pairs: list[_Pair]
    sentences: list[PairSentence]
    labels: list[list[bool]]  # [pair][sentence]


def draw_sentence(values: Values, rng: np.random.Generator, families: Sequence[str] = PAIR_FAMILIES) -> PairSentence:
    """Draw a sentence of one of the families; whether it is true of any pair is left open."""
    slots = _SLOTS[rng.integers(len(_SLOTS))]
    descriptions = all_descriptions(slots, values)
    description = descriptions[rng.integers(len(descriptions))]
    singular = noun_phrase(description)
    plural = noun_phrase(description, plural=True)
    side, other_side = [("left", "right"), ("right", "left")][rng.integers(2)]
    number = int(rng.integers(1, 5))
    family = families[rng.integers(len(families))]
    words = {
        "both": f"both images contain a {singular}",
        "exactly one": f"exactly one of the two images contains a {singular}",
        "side": f"the {side} image contains a {singular}",
        "more": f"there are more {plural} in the {side} image than in the {other_side} image",
        "total": f"the images contain {NUMBERS[number]} {singular if number == 1 else plural} in total",
    }[family]
    return PairSentence(family, words[0].upper() + words[1:] + ".", description, side, number)


def draw_set(
    scenes: Sequence[SceneRecord],
    values: Values,
    rng: np.random.Generator,
    num_sentences: int = 2,
    families: Sequence[str] = PAIR_FAMILIES,
) -> PairSet | None:
    """Draw four pairs and at most `num_sentences` sentences.

    None if no two sentences are found that are balanced over four of the drawn pairs.
    """
    if len(scenes) < 2:
        return None
    candidates: list[_Pair] = []
    for _ in range(_DRAWN_PAIRS):
        left, right = rng.permutation(len(scenes))[:2]
        candidates.append((scenes[int(left)], scenes[int(right)]))
    for _ in range(_ATTEMPTS):
        first = draw_sentence(values, rng, families)
        second = draw_sentence(values, rng, families)
        pairs = _balanced_pairs(first, second, candidates)
        if pairs is None:
            continue
        pairs = [pairs[row] for row in rng.permutation(PAIRS)]
        sentences = [first, second]
        if num_sentences > 2:
            sentences += _more_sentences(sentences, pairs, values, rng, num_sentences - 2, families)
        labels = [[sentence.is_true(pair) for sentence in sentences] for pair in pairs]
        return PairSet(pairs, sentences, labels)
    return None


def _balanced_pairs(first: PairSentence, second: PairSentence, candidates: Sequence[_Pair]) -> list[_Pair] | None:
    """Choose two pairs of which only the first sentence is true and two of which only the second is true."""
    only_first = []
    only_second = []
    for pair in candidates:
        labels = (first.is_true(pair), second.is_true(pair))
        if labels == (True, False):
            only_first.append(pair)
        elif labels == (False, True):
            only_second.append(pair)
    half = PAIRS // 2
    if min(len(only_first), len(only_second)) < half:
        return None
    return only_first[:half] + only_second[:half]


def _more_sentences(
    sentences: Sequence[PairSentence],
    pairs: Sequence[_Pair],
    values: Values,
    rng: np.random.Generator,
    number: int,
    families: Sequence[str],
) -> list[PairSentence]:
    """Draw at most `number` further sentences, two by two; of each pair of images one of the two is true."""
    more: list[PairSentence] = []
    waiting: dict[tuple[bool, ...], list[PairSentence]] = {}  # without a partner, by their labels
    known = {sentence.words for sentence in sentences}
    for _ in range(_ATTEMPTS):
        sentence = draw_sentence(values, rng, families)
        labels = tuple(sentence.is_true(pair) for pair in pairs)
        if sum(labels) != PAIRS // 2 or sentence.words in known:
            continue
        known.add(sentence.words)
        opposite = tuple(not label for label in labels)
        if waiting.get(opposite):
            more += [waiting[opposite].pop(), sentence]
        else:
            waiting.setdefault(labels, []).append(sentence)
        if len(more) >= number:
            break
    return more


def draw_sets(split: str, scenes: Sequence[SceneRecord], recipe: Recipe) -> Iterator[tuple[int, PairSet]]:
    """Yield the sets of a split with their numbers; a number without a set is left out."""
    language = recipe.language
    for number in range(max(len(scenes) // 2, 1)):
        rng = recipe.generator(split, number, "nlvr2")
        pair_set = draw_set(scenes, recipe.scene.values, rng, language.sentences_per_pair, language.pair_families)
        if pair_set is not None:
            yield number, pair_set


class PairWriter(FormatWriter):
    """Writes the examples, the images and the instances of NLVR2.

    The files are `data/<split>.json` (a line each), `images/<split>/...` under the names of the release, and
    `instances_<split>.json`, where each image of a pair is an image of its own.

    The images are links to the drawn scenes where the disk allows it, whatever their format: as in the release, the
    name of a JPEG file may end in .png.
    """

    @override
    def write(self, folder: Path, scenes: Sequence[SceneRecord]) -> None:
        (folder / "data").mkdir(exist_ok=True)
        for split, split_scenes in by_split(scenes).items():
            examples: list[dict[str, Any]] = []
            images: dict[Path, SceneRecord] = {}  # by their paths under images/
            for number, pair_set in draw_sets(split, split_scenes, self.recipe):
                examples += _examples(split, number, pair_set)
                images |= _images(split, number, pair_set)
            text = "".join(json.dumps(example) + "\n" for example in examples)
            (folder / "data" / f"{split}.json").write_text(text, encoding="utf-8")
            records: list[SceneRecord] = []
            first_annotation_id = 1
            for image_id, (path, scene) in enumerate(images.items(), start=1):
                file = folder / "images" / path
                file.parent.mkdir(parents=True, exist_ok=True)
                link_image(scene.image_file, file)
                record = replace(scene, image_id=image_id, image_file=path, first_annotation_id=first_annotation_id)
                records.append(record)
                first_annotation_id += len(scene.objects)
            write_instances(folder / f"instances_{split}.json", records)


def _examples(split: str, number: int, pair_set: PairSet) -> Iterator[dict[str, Any]]:
    """Yield the lines of a set, one per pair and sentence."""
    for row, labels in enumerate(pair_set.labels):
        for column, (sentence, label) in enumerate(zip(pair_set.sentences, labels, strict=True)):
            example = {
                "identifier": f"{split}-{number}-{row}-{column}",
                "sentence": sentence.words,
                "label": str(label),
                "left_url": "",
                "right_url": "",
                "writer": "0",
                "synset": sentence.description.shape or "thing",
                "query": "",
                "validation": {},
                "family": sentence.family,
            }
            if split == "train":
                example["directory"] = number % _DIRECTORIES
            else:
                example["extra_validations"] = {}
            yield example


def _images(split: str, number: int, pair_set: PairSet) -> Iterator[tuple[Path, SceneRecord]]:
    """Yield the image paths of a set, as the release names them, and their scenes."""
    folder = Path(split)
    if split == "train":
        folder /= str(number % _DIRECTORIES)
    for row, pair in enumerate(pair_set.pairs):
        for side, scene in enumerate(pair):
            yield folder / f"{split}-{number}-{row}-img{side}.png", scene
