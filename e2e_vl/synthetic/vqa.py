"""Writer of VQA v2: questions about scenes with ten answers each.

Every kind of question is balanced, so that neither its words nor the image says much about the answer. A colour or
shape of one object among several is asked for only if the scene has others that could be asked for, and each of them
is equally likely, however many objects have it. A count is drawn before what is counted, and yes is as frequent as no.
The ten people mostly agree: some are wrong, and some write a number as a word.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

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
    identify_each_value,
    noun_phrase,
    without,
)
from e2e_vl.synthetic.scenes import SceneGraph

SOURCE = "vqa"  # name of these questions in other formats
SCORES = (0.0, 0.3, 0.6, 0.9, 1.0)  # of an answer that 0, 1, 2, 3, and 4 or more of ten people gave
_WRONG = 0.08  # chance that a person is wrong
_SPELLED = 0.1  # chance that a person writes a number up to ten as a word
_MOST = {"colour": 3, "shape": 1, "count": 2, "exists": 1, "verify": 1}  # questions of each kind about one scene
_ANSWER_TYPES = {"count": "number", "exists": "yes/no", "verify": "yes/no"}  # of other kinds: "other"
_COUNTED = (("colour",), ("shape",), ("texture", "colour"))
_MANY_COUNTS = 3  # as many different answers are better than fewer
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


class _Draft(NamedTuple):
    """A question before people answer it."""

    text: str  # lower case, without the question mark
    question_type: str
    answer: str  # the right one
    wrong_answers: Sequence[str]


class VQAWriter(FormatWriter):
    """Writes `v2_OpenEnded_mscoco_<split>_questions.json` and `v2_mscoco_<split>_annotations.json`."""

    @override
    def draw(self, scene: SceneRecord, graph: SceneGraph) -> list[_Question]:
        rng = self.recipe.generator(scene.split, scene.number, "vqa")
        return draw_vqa_questions(graph, self.recipe.scene, rng)

    @override
    def write(self, folder: Path, scenes: Sequence[SceneRecord]) -> None:
        for split, split_scenes in by_split(scenes).items():
            questions = []
            annotations = []
            for scene in split_scenes:
                for number, question in enumerate(scene.drawn):
                    ids = {"image_id": scene.image_id, "question_id": scene.image_id * 1000 + number}
                    questions.append({**ids, "question": question["question"]})
                    annotations.append({**ids, **_annotation(question)})
            header = {"info": _INFO, "data_type": "mscoco", "data_subtype": split, "license": {"url": "", "name": ""}}
            questions_file = {**header, "task_type": "Open-Ended", "questions": questions}
            annotations_file = {**header, "annotations": annotations}
            _write(folder / f"v2_OpenEnded_mscoco_{split}_questions.json", questions_file)
            _write(folder / f"v2_mscoco_{split}_annotations.json", annotations_file)


def _annotation(question: _Question) -> dict[str, Any]:
    """Return a question's answers as the annotations file has them, without ids."""
    answers = [
        {"answer": answer, "answer_confidence": "yes", "answer_id": person}
        for person, answer in enumerate(question["answers"], start=1)
    ]
    return {
        "question_type": question["question_type"],
        "answer_type": question["answer_type"],
        "multiple_choice_answer": question["multiple_choice_answer"],
        "answers": answers,
    }


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


def draw_vqa_questions(graph: SceneGraph, config: SceneConfig, rng: np.random.Generator) -> list[_Question]:
    """Draw different questions about a scene, leaving out kinds that do not apply to it.

    Returns dicts of "question", "kind", "question_type", "answer_type", "answers" (ten strings) and
    "multiple_choice_answer"; at least one question is about a count.
    """
    makers = {
        "colour": partial(_ask_values, "colour", "what color is the"),
        "shape": partial(_ask_values, "shape", "what is the"),
        "count": _ask_counts,
        "exists": _ask_existence,
        "verify": _ask_yes_or_no,
    }
    questions = []
    for kind, most in _MOST.items():
        drafts = makers[kind](graph, config.values, rng)
        for draft in drafts[:most]:
            answers = _answers_of_people(draft.answer, draft.wrong_answers, rng)
            [(most_common, _)] = Counter([*answers, draft.answer]).most_common(1)
            question = {
                "question": draft.text[0].upper() + draft.text[1:] + "?",
                "kind": kind,
                "question_type": draft.question_type,
                "answer_type": _ANSWER_TYPES.get(kind, "other"),
                "answers": answers,
                "multiple_choice_answer": most_common,
            }
            questions.append(question)
    return questions


def _ask_values(
    slot: str, question_type: str, graph: SceneGraph, values: Values, rng: np.random.Generator
) -> list[_Draft]:
    """Ask for each value that can be asked for, in random order; none if there is only one, but of several objects."""
    identified = identify_each_value(graph, slot, rng)
    if len(identified) == 1 and graph.count > 1:
        return []
    drafts = []
    for index, description in identified:
        answer = getattr(graph.appearances[index], slot)
        text = f"{question_type} {noun_phrase(description)}"
        drafts.append(_Draft(text, question_type, answer, without(values[slot], answer)))
    return drafts


def _ask_counts(graph: SceneGraph, values: Values, rng: np.random.Generator) -> list[_Draft]:
    """Ask how many objects fit a description, once for each count that occurs, in random order."""
    by_count = _draw_counted(graph, values, rng)
    drafts = []
    for count in rng.permutation(sorted(by_count)):
        descriptions = by_count[count]
        description = descriptions[rng.integers(len(descriptions))]
        text = f"how many {noun_phrase(description, plural=True)} are there"
        neighbours = [str(other) for other in (count - 1, count + 1) if other >= 0]
        drafts.append(_Draft(text, "how many", str(count), neighbours))
    return drafts


def _draw_counted(graph: SceneGraph, values: Values, rng: np.random.Generator) -> dict[int, list[Description]]:
    """Draw which attributes a question about a count names.

    Returns:
        count -> the descriptions with these attributes that fit this number of objects.
    """
    options = []
    for slots in _COUNTED:
        by_count: dict[int, list[Description]] = defaultdict(list)
        for description in all_descriptions(slots, values):
            by_count[description.mask(graph).bit_count()].append(description)
        options.append(by_count)
    with_many_counts = [by_count for by_count in options if len(by_count) >= _MANY_COUNTS]
    options = with_many_counts or options
    return options[rng.integers(len(options))]


def _ask_existence(graph: SceneGraph, values: Values, rng: np.random.Generator) -> list[_Draft]:
    slots = THING_SLOTS[rng.integers(len(THING_SLOTS))]
    exists = bool(rng.random() < 0.5)
    thing = draw_thing(graph, slots, values, exists, rng)
    if thing is None:
        return []
    return [_Draft(f"is there a {thing}", "is there a", *_YES_OR_NO[exists])]


def _ask_yes_or_no(graph: SceneGraph, values: Values, rng: np.random.Generator) -> list[_Draft]:
    slot = ("colour", "texture", "size")[rng.integers(3)]
    identified = identify(graph, without(SLOTS, slot), rng)
    if identified is None or len(values[slot]) < 2:
        return []
    index, description = identified
    value = getattr(graph.appearances[index], slot)
    is_true = bool(rng.random() < 0.5)
    if not is_true:
        others = without(values[slot], value)
        value = others[rng.integers(len(others))]
    return [_Draft(f"is the {noun_phrase(description)} {value}", "is the", *_YES_OR_NO[is_true])]


def _answers_of_people(right: str, wrong: Sequence[str], rng: np.random.Generator) -> list[str]:
    answers = []
    for _ in range(10):
        error, spelling, choice = rng.random(3)
        answer = right
        if error < _WRONG and wrong:
            answer = wrong[int(choice * len(wrong))]
        if spelling < _SPELLED and answer.isdigit() and int(answer) <= 10:
            answer = NUMBERS[int(answer)]
        answers.append(answer)
    return answers


def vqa_scores(answers: Sequence[str]) -> dict[str, float]:
    """Map each different answer of the ten people to its score."""
    return {answer: SCORES[min(number, 4)] for answer, number in Counter(answers).items()}
