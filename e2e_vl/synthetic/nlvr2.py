"""Writer of NLVR2: sentences about pairs of scenes. Neither the sentence nor the pair alone reveals the label.

The examples come in sets of four pairs of images and two sentences, as in the release: each sentence is true of two of
the pairs and false of the others, and each pair has one true sentence and one false one. Who reads only the sentence,
or sees only the images, is right half of the time. More sentences per pair (`language.sentences_per_pair`) come two
by two in the same way; training from pixels needs them, because the detector's work is the same for two and for twenty.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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

_Pair = tuple[SceneRecord, SceneRecord]
_Set = tuple[list[_Pair], list["PairSentence"], list[list[bool]]]  # see `draw_set`


@dataclass(frozen=True)
class PairSentence:
    """A sentence about two images, decided by the number of matching objects in each."""

    family: str
    words: str
    description: Description
    predicate: Callable[[int, int], bool]  # takes the counts in the left and the right image

    def is_true(self, pair: _Pair) -> bool:
        appearances = [[item.appearance for item in scene.objects] for scene in pair]
        return self.predicate(*(sum(is_true_of(self.description, one) for one in own) for own in appearances))


def draw_sentence(values: Values, rng: np.random.Generator, wanted: Sequence[str] = PAIR_FAMILIES) -> PairSentence:
    slots = _SLOTS[rng.integers(len(_SLOTS))]
    some = all_descriptions(slots, values)
    description = some[rng.integers(len(some))]
    one, several = noun_phrase(description), noun_phrase(description, plural=True)
    sides = [("left", "right"), ("right", "left")][rng.integers(2)]
    is_left, number = sides[0] == "left", int(rng.integers(1, 5))

    def turned(left: int, right: int) -> tuple[int, int]:
        """The counts on the named side and on the other side."""
        return (left, right) if is_left else (right, left)

    families: dict[str, tuple[str, Callable[[int, int], bool]]] = {
        "both": (f"both images contain a {one}", lambda left, right: left > 0 and right > 0),
        "exactly one": (
            f"exactly one of the two images contains a {one}",
            lambda left, right: (left > 0) != (right > 0),
        ),
        "side": (f"the {sides[0]} image contains a {one}", lambda left, right: turned(left, right)[0] > 0),
        "more": (
            f"there are more {several} in the {sides[0]} image than in the {sides[1]} image",
            lambda left, right: turned(left, right)[0] > turned(left, right)[1],
        ),
        "total": (
            f"the images contain {NUMBERS[number]} {one if number == 1 else several} in total",
            lambda left, right: left + right == number,
        ),
    }
    family = wanted[rng.integers(len(wanted))]
    words, predicate = families[family]
    return PairSentence(family, words[0].upper() + words[1:] + ".", description, predicate)


def draw_set(
    scenes: Sequence[SceneRecord],
    values: Values,
    rng: np.random.Generator,
    sentences: int = 2,
    families: Sequence[str] = PAIR_FAMILIES,
) -> _Set | None:
    """Four pairs, at most `sentences` sentences, and their labels [pair][sentence].

    None if no two sentences are found that are balanced over four of the drawn pairs.
    """
    if len(scenes) < 2:
        return None
    chosen = [rng.permutation(len(scenes))[:2] for _ in range(_DRAWN_PAIRS)]
    pairs = [(scenes[int(left)], scenes[int(right)]) for left, right in chosen]
    for _ in range(_ATTEMPTS):
        first, second = (draw_sentence(values, rng, families) for _ in range(2))
        labels = [[first.is_true(pair), second.is_true(pair)] for pair in pairs]
        groups = [[row for row, own in enumerate(labels) if own == wanted] for wanted in ([True, False], [False, True])]
        if first.words == second.words or min(map(len, groups)) < PAIRS // 2:
            continue
        rows = [row for group in groups for row in group[: PAIRS // 2]]
        rows = [rows[number] for number in rng.permutation(PAIRS)]
        drawn = [pairs[row] for row in rows]
        chosen, waiting = [first, second], {}
        for _ in range(_ATTEMPTS if sentences > 2 else 0):  # two in a row are never true of the same pair
            sentence = draw_sentence(values, rng, families)
            truths = tuple(sentence.is_true(pair) for pair in drawn)
            known = [*chosen, *(one for own in waiting.values() for one in own)]
            if sum(truths) != PAIRS // 2 or any(sentence.words == one.words for one in known):
                continue
            opposite = waiting.get(tuple(not truth for truth in truths))
            if opposite:
                chosen += [opposite.pop(), sentence]
            else:
                waiting.setdefault(truths, []).append(sentence)
            if len(chosen) >= sentences:
                break
        return drawn, chosen, [[sentence.is_true(pair) for sentence in chosen] for pair in drawn]
    return None


def draw_sets(split: str, scenes: Sequence[SceneRecord], recipe: Recipe) -> Iterator[tuple[int, _Set]]:
    language = recipe.language
    for number in range(max(len(scenes) // 2, 1)):
        rng = recipe.generator(split, number, "nlvr2")
        made = draw_set(scenes, recipe.scene.values, rng, language.sentences_per_pair, language.pair_families)
        if made is not None:
            yield number, made


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
        for split, part in by_split(scenes).items():
            examples, images = self._examples(split, part)
            text = "".join(json.dumps(example) + "\n" for example in examples)
            (folder / "data" / f"{split}.json").write_text(text, encoding="utf-8")
            for path, scene in images.items():
                file = folder / "images" / path
                file.parent.mkdir(parents=True, exist_ok=True)
                link_image(scene.image_file, file)
            records, annotation = [], 1
            for number, (path, scene) in enumerate(images.items(), start=1):
                records.append(replace(scene, image_id=number, image_file=path, first_annotation_id=annotation))
                annotation += len(scene.objects)
            write_instances(folder / f"instances_{split}.json", records)

    def _examples(
        self, split: str, scenes: Sequence[SceneRecord]
    ) -> tuple[list[dict[str, Any]], dict[Path, SceneRecord]]:
        examples, images = [], {}
        for number, made in draw_sets(split, scenes, self.recipe):
            directory = number % _DIRECTORIES
            for row, (pair, labels) in enumerate(zip(made[0], made[2], strict=True)):
                place = Path(split) / str(directory) if split == "train" else Path(split)
                for side, scene in enumerate(pair):
                    images[place / f"{split}-{number}-{row}-img{side}.png"] = scene
                for column, (sentence, label) in enumerate(zip(made[1], labels, strict=True)):
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
                    own = {"directory": directory} if split == "train" else {"extra_validations": {}}
                    examples.append(example | own)
        return examples, images
