"""Shortcuts: rules that do not read all of a drawn example. A model that reads does better than the best of them.

`shortcuts.json` in the folder of a format: split -> rule -> accuracy. A rule about one family, or VCR's rationales,
begins with that and a slash; "chance" is a guess without image and text. What is usual is counted in one half of the
scenes and tried on the other.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from e2e_vl.synthetic.base import Recipe, SceneRecord, by_split, write_compact
from e2e_vl.synthetic.config import COLOURS, SHAPES, SIZES, TEXTURES
from e2e_vl.synthetic.language import Description, is_true_of, pluralised
from e2e_vl.synthetic.nlvr2 import draw_sets
from e2e_vl.synthetic.vqa import vqa_scores

CHANCE = "chance"
FILE = "shortcuts.json"
_ADJECTIVES = {*COLOURS, *TEXTURES, *SIZES}
_Tries = Iterator[tuple[str, float]]  # a rule and its accuracy on one example


def write_shortcuts(folder: Path, scenes: Sequence[SceneRecord], recipe: Recipe) -> None:
    """Measure the rules of the format that the folder is named after, if it has any."""
    if folder.name not in _RULES:
        return
    measured: dict[str, dict[str, float]] = {}
    for split, part in by_split(scenes).items():
        tries: dict[str, list[float]] = defaultdict(list)
        for rule, score in _RULES[folder.name](part, recipe):
            tries[rule].append(score)
        measured[split] = {rule: round(float(np.mean(scores)), 4) for rule, scores in tries.items()}
    write_compact(folder / FILE, measured)


def _fitting(description: Description, scene: SceneRecord) -> list[int]:
    return [index for index, item in enumerate(scene.objects) if is_true_of(description, item.appearance)]


def _referring(scenes: Sequence[SceneRecord], recipe: Recipe) -> _Tries:
    for scene in scenes:
        boxes = np.array([item.box for item in scene.objects])
        areas, centres = boxes[:, 2:].prod(axis=1), boxes[:, :2] + boxes[:, 2:] / 2
        for reference in scene.references:
            said, target = reference.expression, reference.target
            landmark = [] if said.anchor is None else _fitting(said.anchor, scene)
            fits = [i for i in _fitting(said.description, scene) if i not in landmark]
            rules = {CHANCE: 1 / len(boxes), "largest object": float(target == areas.argmax())}
            rules["any that fits the first phrase"] = 1 / len(fits)
            rules["largest that fits the first phrase"] = float(target == max(fits, key=areas.__getitem__))
            far = np.linalg.norm(centres - centres[landmark[0]], axis=1) if landmark else areas
            for rule, choose in (("nearest to the landmark", min), ("farthest from the landmark", max)):
                rules[rule] = float(target == choose(fits, key=far.__getitem__)) if landmark else 1 / len(fits)
            families = ("", f"{said.family}/") if said.operator else ("",)  # the first phrase can be all that is said
            yield from ((family + rule, score) for rule, score in rules.items() for family in families)
        for reference in scene.without_target:
            yield (
                "without a target/nothing fits the first phrase",
                not _fitting(reference.expression.description, scene),
            )


def _answering(scenes: Sequence[SceneRecord], recipe: Recipe) -> _Tries:
    usual: list[dict[str, Counter[str]]] = [defaultdict(Counter), defaultdict(Counter)]
    asked = []
    for scene in scenes:
        for one in scene.drawn if isinstance(scene.drawn, list) else scene.drawn["questions"]:
            if "answers" in one:
                kind, scores = one["kind"], vqa_scores(one["answers"])
                values = {"colour": COLOURS, "shape": SHAPES}.get(kind, ())
            elif one["isBalanced"]:
                kind, scores, values = one["types"]["detailed"], {one["answer"]: 1.0}, one["choices"]
            else:
                continue
            for one in (kind, CHANCE):
                usual[scene.number % 2][one].update(scores)
            asked.append((scene, kind, scores, values))
    for scene, kind, scores, values in asked:
        for rule, group in ((CHANCE, CHANCE), ("usual answer to this kind of question", kind)):
            (guess, _), *_ = usual[1 - scene.number % 2][group].most_common(1) or [("", 0)]
            yield rule, scores.get(guess, 0.0)
        shown = Counter(value for item in scene.objects for value in vars(item.appearance).values())
        seen = [value for value in values if shown[value]]
        yield "most frequent value in the image", scores.get(max(seen, key=shown.get) if seen else guess, 0.0)


def _judging(scenes: Sequence[SceneRecord], recipe: Recipe) -> _Tries:
    for _, (pairs, said, labels) in draw_sets(scenes[0].split, scenes, recipe):
        for column, sentence in enumerate(said):
            counts = [len(_fitting(sentence.description, other)) for other in scenes[:20]]  # imagined on the right
            for (left, _), row in zip(pairs, labels, strict=True):
                here = len(_fitting(sentence.description, left))
                likely = np.mean([sentence.is_true_of_counts(here, there) for there in counts]) > 0.5
                yield "left image alone", float(likely == row[column])
                yield CHANCE, 0.5


def _choosing(scenes: Sequence[SceneRecord], recipe: Recipe) -> _Tries:
    for scene in scenes:
        looks = [item.appearance for item in scene.objects]
        counts = Counter(look.colour for look in looks)
        for question in scene.drawn:
            asked = next(token for token in question["question"] if isinstance(token, list))[0]
            for kind, family in (("answer", ""), ("rationale", "rationale/")):
                choices, label = question[f"{kind}_choices"], question[f"{kind}_label"]
                named = [[looks[token[0]] for token in choice if isinstance(token, list)] for choice in choices]
                said = [[word for word in choice if isinstance(word, str)] for choice in choices]
                colours = [[*own, *(one.colour for one in ones)] for own, ones in zip(said, named, strict=True)]
                rules = {
                    CHANCE: [1] * len(choices),
                    "first choice": [1, 0, 0, 0],
                    "longest choice": [len(choice) for choice in choices],
                    "most frequent colour in the image": [sum(counts[one] for one in own) for own in colours],
                    "object of the same shape": [any(one.shape == looks[asked].shape for one in own) for own in named],
                }
                for rule, scores in rules.items():
                    yield family + rule, (scores[label] == max(scores)) / scores.count(max(scores))


def _grounding(scenes: Sequence[SceneRecord], recipe: Recipe) -> _Tries:
    nouns = {form: shape for shape in SHAPES for form in (shape, pluralised(shape))}
    for scene in scenes:
        looks = [set(vars(item.appearance).values()) for item in scene.objects]
        for phrase in (part for caption in scene.drawn for part in caption if not isinstance(part, str)):
            words = phrase.words.split()
            if phrase.objects:
                yield CHANCE, len(phrase.objects) / len(looks)
            noun, adjectives = {nouns[one] for one in words if one in nouns}, _ADJECTIVES.intersection(words)
            for rule, said in (("any that fits the noun", noun), ("any that fits the adjectives", adjectives)):
                fits = [index in phrase.objects for index, own in enumerate(looks) if said <= own]
                if phrase.objects:
                    yield rule, sum(fits) / len(fits)


_QUESTIONS = {"vqa": _answering, "gqa": _answering, "vcr": _choosing}
_RULES = {"refcoco+": _referring, "nlvr2": _judging, "flickr30k": _grounding, **_QUESTIONS}
