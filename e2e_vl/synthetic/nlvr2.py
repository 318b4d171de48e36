"""Writer of NLVR2: sentences about pairs of scenes. Neither the sentence nor the pair alone reveals the label.

The examples come in sets of four pairs of images and two sentences, as in the release: each sentence is true of two of
the pairs and false of the others, and each pair has one true sentence and one false one. Who reads only the sentence,
or sees only the images, is right half of the time. More sentences per pair (`language.sentences_per_pair`) come two
by two in the same way; training from pixels needs them, because the detector's work is the same for two and for twenty.

The four pairs of a set join two left images with two right ones. So an image says nothing about a sentence that the
images of the other side decide, and no image alone decides whether exactly one of the two has a thing. A split needs
four scenes, because the images of a set differ.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from typing_extensions import override

from e2e_vl.synthetic.base import FormatWriter, Recipe, SceneRecord, by_split, link_image
from e2e_vl.synthetic.coco import write_instances
from e2e_vl.synthetic.config import PAIR_FAMILIES
from e2e_vl.synthetic.language import NUMBERS, Description, Values, all_descriptions, describe, is_true_of, noun_phrase

_IMAGES = 4  # of a set, half of them on the left
_DIRECTORIES = 100  # folders of the training images
_DRAWN_SENTENCES = 200  # candidates for the sentences of a set
_TRIES = 30  # draws of the images of a set
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
    """Draw two left and two right images, which make four pairs, and at most `num_sentences` sentences about them.

    Of the images that are tried, those are chosen whose sentences name most attributes. None if no two sentences are
    balanced over any of them, or if there are fewer than four scenes.
    """
    if len(scenes) < _IMAGES:
        return None
    candidates: dict[str, PairSentence] = {}  # by words
    for _ in range(_DRAWN_SENTENCES):
        sentence = draw_sentence(values, rng, families)
        candidates.setdefault(sentence.words, sentence)
    best_pairs: list[_Pair] = []
    best_sentences: list[PairSentence] = []
    most_attributes = 0
    for _ in range(_TRIES):
        rows = rng.choice(len(scenes), _IMAGES, replace=False)
        images = [scenes[row] for row in rows]
        lefts = images[:2]
        rights = images[2:]
        sentences = _balanced_sentences(lefts, rights, candidates.values())[:num_sentences]
        num_attributes = sum(sentence.description.num_attributes for sentence in sentences)
        if num_attributes > most_attributes:
            most_attributes = num_attributes
            best_pairs = list(product(lefts, rights))
            best_sentences = sentences
        if len(best_sentences) == num_sentences:
            break
    if not best_sentences:
        return None
    pairs = [best_pairs[row] for row in rng.permutation(len(best_pairs))]
    labels = []
    for pair in pairs:
        labels.append([sentence.is_true(pair) for sentence in best_sentences])
    return PairSet(pairs, best_sentences, labels)


def _balanced_sentences(
    lefts: Sequence[SceneRecord], rights: Sequence[SceneRecord], candidates: Iterable[PairSentence]
) -> list[PairSentence]:
    """Choose sentences that are true of two of the four pairs, two by two; of each pair one of the two is true."""
    left_counts = [_count_described(scene) for scene in lefts]
    right_counts = [_count_described(scene) for scene in rights]
    sentences: list[PairSentence] = []
    waiting: dict[tuple[bool, ...], list[PairSentence]] = {}  # without a partner, by their labels
    for sentence in candidates:
        description = sentence.description
        left = [counts[description] for counts in left_counts]
        right = [counts[description] for counts in right_counts]
        # otherwise whether the thing is anywhere would often be enough
        if sentence.family == "side" and not (_is_in_one(left) and _is_in_one(right)):
            continue
        labels = tuple(sentence.is_true_of_counts(*pair) for pair in product(left, right))
        if sum(labels) != len(labels) // 2:
            continue
        if not all(_has_similar(counts, description) for counts in (*left_counts, *right_counts)):
            continue
        opposite = tuple(not label for label in labels)
        if waiting.get(opposite):
            sentences += [waiting[opposite].pop(), sentence]
        else:
            waiting.setdefault(labels, []).append(sentence)
    return sentences


def _count_described(scene: SceneRecord) -> Counter[Description]:
    """Count the objects of a scene that each description is true of."""
    counts: Counter[Description] = Counter()
    for item in scene.objects:
        counts.update(describe(item.appearance, slots) for slots in _SLOTS)
    return counts


def _is_in_one(counts: Sequence[int]) -> bool:
    """Return whether exactly one of two images has a thing."""
    first, second = counts
    return (first > 0) != (second > 0)


def _has_similar(counts: Counter[Description], description: Description) -> bool:
    """Return whether an image has a thing of the colour or of the shape, if the description names both."""
    if description.num_attributes == 1:
        return True
    return counts[Description(colour=description.colour)] > 0 or counts[Description(shape=description.shape)] > 0


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

    The images are links to the synthetic scenes where the disk allows it, whatever their format: as in the release, the
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
