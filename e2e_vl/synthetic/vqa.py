"""Writer of VQA v2: questions about scenes with ten answers each.

Every kind of question is balanced, so that its words say little about the answer: the object whose colour or shape is
asked for is drawn at random, a count is drawn before what is counted, and yes is as frequent as no. The ten people
mostly agree: some are wrong, and some write a number as a word.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import override

from e2e_vl.synthetic.base import FormatWriter, SceneRecord, by_split
from e2e_vl.synthetic.config import SceneConfig
from e2e_vl.synthetic.language import (
    NUMBERS,
    SLOTS,
    THING_SLOTS,
    Description,
    Values,
    all_descriptions,
    draw_thing,
    identify,
    noun_phrase,
    without,
)
from e2e_vl.synthetic.scenes import SceneGraph

SOURCE = "vqa"  # name of these questions in other formats
SCORES = (0.0, 0.3, 0.6, 0.9, 1.0)  # of an answer that 0, 1, 2, 3, and 4 or more of ten people gave
_WRONG = 0.08  # chance that a person is wrong
_SPELLED = 0.1  # chance that a person writes a number up to ten as a word
_KINDS = ("colour", "colour", "shape", "count", "count", "exists", "verify")  # the questions about one scene
_COUNTED = (("colour",), ("shape",), ("texture", "colour"))
_ATTEMPTS = 30
_YES_OR_NO = {True: ("yes", ["no"]), False: ("no", ["yes"])}  # the right answer, and the wrong one
_INFO = {
    "description": "Questions about drawn scenes in the layout of VQA v2.0; not part of it.",
    "url": "",
    "version": "2.0",
    "year": 2017,
    "contributor": "e2e_vl.synthetic",
    "date_created": "2017-04-26 17:07:13",
}

_Question = dict[str, Any]
_Made = tuple[str, str, str, Sequence[str]] | None  # question, its type, the right answer, wrong ones


class VQAWriter(FormatWriter):
    """Writes `v2_OpenEnded_mscoco_<split>_questions.json` and `v2_mscoco_<split>_annotations.json`."""

    @override
    def draw(self, scene: SceneRecord, graph: SceneGraph) -> list[_Question]:
        return draw_vqa_questions(graph, self.recipe.scene, self.recipe.generator(scene.split, scene.number, "vqa"))

    @override
    def write(self, folder: Path, scenes: Sequence[SceneRecord]) -> None:
        for split, part in by_split(scenes).items():
            frame = {"info": _INFO, "data_type": "mscoco", "data_subtype": split, "license": {"url": "", "name": ""}}
            questions, annotations = [], []
            for scene in part:
                for number, one in enumerate(scene.drawn):
                    ids = {"image_id": scene.image_id, "question_id": scene.image_id * 1000 + number}
                    questions.append({**ids, "question": one["question"]})
                    answers = [
                        {"answer": answer, "answer_confidence": "yes", "answer_id": person}
                        for person, answer in enumerate(one["answers"], start=1)
                    ]
                    kept = {key: one[key] for key in ("question_type", "answer_type", "multiple_choice_answer")}
                    annotations.append({**ids, **kept, "answers": answers})
            for name, content in (
                (
                    f"v2_OpenEnded_mscoco_{split}_questions",
                    {**frame, "task_type": "Open-Ended", "questions": questions},
                ),
                (f"v2_mscoco_{split}_annotations", {**frame, "annotations": annotations}),
            ):
                (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")


def draw_vqa_questions(graph: SceneGraph, config: SceneConfig, rng: np.random.Generator) -> list[_Question]:
    """Draw different questions about a scene, leaving out kinds that do not apply to it.

    Returns dicts of "question", "kind", "question_type", "answer_type", "answers" (ten strings) and
    "multiple_choice_answer"; at least one question is about a count.
    """
    makers = {
        "colour": partial(_ask_value, "colour", "what color is the"),
        "shape": partial(_ask_value, "shape", "what is the"),
        "count": _ask_count,
        "exists": _ask_existence,
        "verify": _ask_yes_or_no,
    }
    questions: dict[str, _Question] = {}
    for kind in _KINDS:
        for _ in range(_ATTEMPTS):
            made = makers[kind](graph, config.values, rng)
            if made is None:
                break
            text, question_type, answer, others = made
            if text in questions:
                continue
            answers = _answers_of_people(answer, others, rng)
            questions[text] = {
                "question": text[0].upper() + text[1:] + "?",
                "kind": kind,
                "question_type": question_type,
                "answer_type": {"count": "number", "exists": "yes/no", "verify": "yes/no"}.get(kind, "other"),
                "answers": answers,
                "multiple_choice_answer": Counter([*answers, answer]).most_common(1)[0][0],
            }
            break
    return list(questions.values())


def _ask_value(slot: str, question_type: str, graph: SceneGraph, values: Values, rng: np.random.Generator) -> _Made:
    found = identify(graph, without(SLOTS, slot), rng)
    if found is None:
        return None
    index, description = found
    answer = getattr(graph.appearances[index], slot)
    return f"{question_type} {noun_phrase(description)}", question_type, answer, without(values[slot], answer)


def _ask_count(graph: SceneGraph, values: Values, rng: np.random.Generator) -> _Made:
    slots = _COUNTED[rng.integers(len(_COUNTED))]
    by_count: dict[int, list[Description]] = defaultdict(list)
    for description in all_descriptions(slots, values):
        by_count[description.mask(graph).bit_count()].append(description)
    number = sorted(by_count)[rng.integers(len(by_count))]
    description = by_count[number][rng.integers(len(by_count[number]))]
    near = [str(other) for other in (number - 1, number + 1) if other >= 0]
    return f"how many {noun_phrase(description, plural=True)} are there", "how many", str(number), near


def _ask_existence(graph: SceneGraph, values: Values, rng: np.random.Generator) -> _Made:
    slots = THING_SLOTS[rng.integers(len(THING_SLOTS))]
    wanted = bool(rng.random() < 0.5)
    thing = draw_thing(graph, slots, values, wanted, rng)
    return None if thing is None else (f"is there a {thing}", "is there a", *_YES_OR_NO[wanted])


def _ask_yes_or_no(graph: SceneGraph, values: Values, rng: np.random.Generator) -> _Made:
    slot = ("colour", "texture", "size")[rng.integers(3)]
    found = identify(graph, without(SLOTS, slot), rng)
    if found is None or len(values[slot]) < 2:
        return None
    index, description = found
    true = getattr(graph.appearances[index], slot)
    is_true = bool(rng.random() < 0.5)
    others = without(values[slot], true)
    said = true if is_true else others[rng.integers(len(others))]
    return (f"is the {noun_phrase(description)} {said}", "is the", *_YES_OR_NO[is_true])


def _answers_of_people(answer: str, others: Sequence[str], rng: np.random.Generator) -> list[str]:
    answers = []
    for _ in range(10):
        wrong, spelled, choice = rng.random(3)
        given = others[int(choice * len(others))] if wrong < _WRONG and others else answer
        if spelled < _SPELLED and given.isdigit() and int(given) <= 10:
            given = NUMBERS[int(given)]
        answers.append(given)
    return answers


def vqa_scores(answers: Sequence[str]) -> dict[str, float]:
    """Map each different answer of the ten people to its score."""
    return {answer: SCORES[min(number, 4)] for answer, number in Counter(answers).items()}
