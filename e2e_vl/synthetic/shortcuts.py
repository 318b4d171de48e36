"""Shortcuts: rules that do not read all of a drawn example. A model that reads does better than the best of them.

`shortcuts.json` in the folder of a format: split -> rule -> accuracy. A rule about one family, or VCR's rationales,
begins with that and a slash; "chance" is a guess without image and text. What is usual is counted in one half of the
scenes and tried on the other. "Any value that can be asked for" is what is left to a rule that sees an image of VQA or
GQA perfectly and reads only the kind of question.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from e2e_vl.synthetic.base import Recipe, SceneRecord, by_split, write_compact
from e2e_vl.synthetic.config import COLOURS, SHAPES, SIZES, TEXTURES
from e2e_vl.synthetic.language import (
    SLOTS,
    Description,
    identifying,
    is_true_of,
    noun_phrase,
    pluralised,
    without,
)
from e2e_vl.synthetic.nlvr2 import draw_sets
from e2e_vl.synthetic.phrases import DrawnPhrase, drawn_phrases
from e2e_vl.synthetic.vqa import vqa_scores

CHANCE = "chance"
FILE = "shortcuts.json"
_ADJECTIVES = {*COLOURS, *TEXTURES, *SIZES}
_Scores = Iterator[tuple[str, float]]  # a rule and its accuracy on one example


def write_shortcuts(folder: Path, scenes: Sequence[SceneRecord], recipe: Recipe) -> None:
    """Measure the rules of the format that the folder is named after, if it has any."""
    if folder.name not in _RULES:
        return
    measured: dict[str, dict[str, float]] = {}
    for split, split_scenes in by_split(scenes).items():
        scores_of: dict[str, list[float]] = defaultdict(list)
        for rule, score in _RULES[folder.name](split_scenes, recipe):
            scores_of[rule].append(score)
        measured[split] = {rule: round(float(np.mean(scores)), 4) for rule, scores in scores_of.items()}
    write_compact(folder / FILE, measured)


def _fitting(description: Description, scene: SceneRecord) -> list[int]:
    return [index for index, item in enumerate(scene.objects) if is_true_of(description, item.appearance)]


def _referring(scenes: Sequence[SceneRecord], recipe: Recipe) -> _Scores:
    for scene in scenes:
        boxes = np.array([item.box for item in scene.objects])  # xywh
        areas = boxes[:, 2:].prod(axis=1)
        centres = boxes[:, :2] + boxes[:, 2:] / 2
        for reference in scene.references:
            expression = reference.expression
            target = reference.target
            landmarks = [] if expression.anchor is None else _fitting(expression.anchor, scene)
            fitting = [index for index in _fitting(expression.description, scene) if index not in landmarks]
            scores = {
                CHANCE: 1 / len(boxes),
                "largest object": float(target == areas.argmax()),
                "any that fits the first phrase": 1 / len(fitting),
                "largest that fits the first phrase": float(target == max(fitting, key=areas.__getitem__)),
            }
            if landmarks:
                distances = np.linalg.norm(centres - centres[landmarks[0]], axis=1)
                nearest = min(fitting, key=distances.__getitem__)
                farthest = max(fitting, key=distances.__getitem__)
                scores["nearest to the landmark"] = float(target == nearest)
                scores["farthest from the landmark"] = float(target == farthest)
            else:
                scores["nearest to the landmark"] = 1 / len(fitting)
                scores["farthest from the landmark"] = 1 / len(fitting)
            for rule, score in scores.items():
                yield rule, score
                if expression.operator is not None:  # otherwise the first phrase is all that is said
                    yield f"{expression.family}/{rule}", score
        for reference in scene.without_target:
            is_right = not _fitting(reference.expression.description, scene)
            yield "without a target/nothing fits the first phrase", is_right


class _AnsweredQuestion(NamedTuple):
    """A question with its answers, whichever format it comes from."""

    scene: SceneRecord
    kind: str
    scores: dict[str, float]  # of answers; of others 0
    values: Sequence[str]  # answers that an image can show
    askable: set[str]  # values in the scene, of all attributes, that some question could ask for


def _answered_questions(scenes: Sequence[SceneRecord]) -> Iterator[_AnsweredQuestion]:
    """Yield the questions of VQA, or the balanced ones of GQA."""
    for scene in scenes:
        questions = scene.drawn if isinstance(scene.drawn, list) else scene.drawn["questions"]
        askable = _askable_values(scene)
        for question in questions:
            if "answers" in question:
                kind = question["kind"]
                values = {"colour": COLOURS, "shape": SHAPES}.get(kind, ())
                yield _AnsweredQuestion(scene, kind, vqa_scores(question["answers"]), values, askable)
            elif question["isBalanced"]:
                scores = {question["answer"]: 1.0}
                kind = question["types"]["detailed"]
                yield _AnsweredQuestion(scene, kind, scores, question["choices"], askable)


def _askable_values(scene: SceneRecord) -> set[str]:
    """Return the values of objects that other attributes tell from all others."""
    appearances = [item.appearance for item in scene.objects]
    values = set()
    for index, appearance in enumerate(appearances):
        for slot in SLOTS:
            if identifying(appearances, index, without(SLOTS, slot)):
                values.add(getattr(appearance, slot))
    return values


def _answering(scenes: Sequence[SceneRecord], recipe: Recipe) -> _Scores:
    questions = list(_answered_questions(scenes))
    # how often an answer was given, in each half of the scenes and to each kind of question; CHANCE: to any
    frequencies: list[dict[str, Counter[str]]] = [defaultdict(Counter), defaultdict(Counter)]
    for question in questions:
        half = frequencies[question.scene.number % 2]
        half[question.kind].update(question.scores)
        half[CHANCE].update(question.scores)
    for question in questions:
        other_half = frequencies[1 - question.scene.number % 2]
        yield CHANCE, question.scores.get(_most_common(other_half[CHANCE]), 0.0)
        guess = _most_common(other_half[question.kind])
        yield "usual answer to this kind of question", question.scores.get(guess, 0.0)
        shown: Counter[str] = Counter()
        for item in question.scene.objects:
            shown.update(vars(item.appearance).values())
        shown_values = [value for value in question.values if shown[value]]
        numbers = [shown[value] for value in shown_values]
        guesses = {
            "most frequent value in the image": [value for value in shown_values if shown[value] == max(numbers)],
            "rarest value in the image": [value for value in shown_values if shown[value] == min(numbers)],
            "any value that can be asked for": [value for value in shown_values if value in question.askable],
        }
        for rule, values in guesses.items():  # of several values one is guessed
            scores = [question.scores.get(value, 0.0) for value in values or [guess]]
            yield rule, float(np.mean(scores))


def _most_common(answers: Counter[str]) -> str:
    if not answers:
        return ""
    [(answer, _)] = answers.most_common(1)
    return answer


class _JudgedSentence(NamedTuple):
    """A sentence about a pair of images, and what each rule knows of them."""

    half: int  # of the sets
    family: str
    label: bool
    known: dict[str, tuple[str | int, ...]]  # by rule


def _judged_sentences(scenes: Sequence[SceneRecord], recipe: Recipe) -> Iterator[_JudgedSentence]:
    for number, pair_set in draw_sets(scenes[0].split, scenes, recipe):
        for column, sentence in enumerate(pair_set.sentences):
            description = sentence.description
            noun = Description(shape=description.shape)
            adjective = Description(colour=description.colour)
            said = sentence.words  # of what is described
            for is_plural in (True, False):
                said = said.replace(noun_phrase(description, plural=is_plural), "")
            for pair, labels in zip(pair_set.pairs, pair_set.labels, strict=True):
                left, right = (sentence.count(scene) for scene in pair)
                noun_counts = [len(_fitting(noun, scene)) for scene in pair]
                adjective_counts = [len(_fitting(adjective, scene)) for scene in pair]
                known = {
                    "left image alone": (said, left),
                    "right image alone": (said, right),
                    "what is described alone": tuple(sorted([left, right])),
                    "noun alone": (said, *noun_counts),
                    "adjective alone": (said, *adjective_counts),
                }
                yield _JudgedSentence(number % 2, sentence.family, labels[column], known)


def _judging(scenes: Sequence[SceneRecord], recipe: Recipe) -> _Scores:
    """Guess the label that is usual in the other half of the sets, as far as a rule knows.

    No balance brings a rule below 0.75 where its image or its word is enough for half of the sentences: the left image
    for sentences about one side, a noun where half of the sentences name the shape alone, the adjectives likewise.
    """
    sentences = list(_judged_sentences(scenes, recipe))
    frequencies: list[dict[tuple[Any, ...], Counter[bool]]] = [defaultdict(Counter), defaultdict(Counter)]
    for sentence in sentences:
        for rule_and_known in sentence.known.items():
            frequencies[sentence.half][rule_and_known][sentence.label] += 1
    for sentence in sentences:
        other_half = frequencies[1 - sentence.half]
        yield CHANCE, 0.5
        for rule_and_known in sentence.known.items():
            rule, _ = rule_and_known
            usual = other_half[rule_and_known]
            score = 0.5
            if usual[True] != usual[False]:
                score = float(sentence.label == (usual[True] > usual[False]))
            yield rule, score
            if rule != "what is described alone":  # it does not know the family
                yield f"{sentence.family}/{rule}", score


def _choosing(scenes: Sequence[SceneRecord], recipe: Recipe) -> _Scores:
    for scene in scenes:
        appearances = [item.appearance for item in scene.objects]
        frequency = Counter(appearance.colour for appearance in appearances)
        for question in scene.drawn:
            asked_objects = next(token for token in question["question"] if isinstance(token, list))
            asked_shape = appearances[asked_objects[0]].shape
            for kind, prefix in (("answer", ""), ("rationale", "rationale/")):
                choices = question[f"{kind}_choices"]
                label = question[f"{kind}_label"]
                colour_scores = []
                shape_scores = []
                for choice in choices:
                    words = [token for token in choice if isinstance(token, str)]
                    named = [appearances[token[0]] for token in choice if isinstance(token, list)]
                    colours = [*words, *(appearance.colour for appearance in named)]
                    colour_scores.append(sum(frequency[colour] for colour in colours))
                    shape_scores.append(any(appearance.shape == asked_shape for appearance in named))
                scores_of = {
                    CHANCE: [1] * len(choices),
                    "first choice": [1, 0, 0, 0],
                    "longest choice": [len(choice) for choice in choices],
                    "most frequent colour in the image": colour_scores,
                    "object of the same shape": shape_scores,
                }
                for rule, scores in scores_of.items():
                    best = max(scores)
                    # of several best choices one is guessed
                    yield prefix + rule, (scores[label] == best) / scores.count(best)


def _grounding(scenes: Sequence[SceneRecord], recipe: Recipe) -> _Scores:
    shape_of = {}  # by its nouns
    for shape in SHAPES:
        shape_of[shape] = shape
        shape_of[pluralised(shape)] = shape
    for scene in scenes:
        looks = [set(vars(item.appearance).values()) for item in scene.objects]
        for phrase in drawn_phrases(scene.drawn):
            if not phrase.objects:
                continue
            words = phrase.words.split()
            nouns = {shape_of[word] for word in words if word in shape_of}
            adjectives = _ADJECTIVES.intersection(words)
            yield CHANCE, len(phrase.objects) / len(looks)
            yield "any that fits the noun", _share_named(phrase, looks, nouns)
            yield "any that fits the adjectives", _share_named(phrase, looks, adjectives)
            attributes = sorted(nouns | adjectives)
            rarest = min(attributes, key=lambda attribute: sum(attribute in look for look in looks))
            yield "any that fits the rarest word", _share_named(phrase, looks, {rarest})


def _share_named(phrase: DrawnPhrase, looks: Sequence[set[str]], attributes: set[str]) -> float:
    """Return which share of the objects with these attributes the phrase names."""
    is_named = [index in phrase.objects for index, look in enumerate(looks) if attributes <= look]
    return sum(is_named) / len(is_named)


_QUESTIONS = {"vqa": _answering, "gqa": _answering, "vcr": _choosing}
_RULES = {"refcoco+": _referring, "nlvr2": _judging, "flickr30k": _grounding, **_QUESTIONS}
