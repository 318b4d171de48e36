"""Writer of VQA v2: questions about scenes with ten answers each.

Every kind of question is balanced, so that its words say little about the answer: the object whose colour or shape is
asked for is drawn at random, a count is drawn before what is counted, and yes is as frequent as no. The ten people
mostly agree: some are wrong, and some write a number as a word.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from e2e_vl.synthetic.base import FormatWriter, SceneRecord, by_split
from e2e_vl.synthetic.config import SceneConfig
from e2e_vl.synthetic.language import SLOTS, Description, Values, all_descriptions, identify, noun_phrase, without
from e2e_vl.synthetic.scenes import SceneFacts

NUM_ANSWERS = 10
SOURCE = "vqa"  # as other formats name these questions
_WRONG = 0.08  # chance that a person is wrong
_SPELLED = 0.1  # chance that a person writes a number as a word
_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_KINDS = ("colour", "colour", "shape", "count", "count", "exists", "verify")  # the questions about one scene
_COUNTED = (("colour",), ("shape",), ("texture", "colour"))
_ATTEMPTS = 30
_SCORES = (0.0, 0.3, 0.6, 0.9, 1.0)  # scores of an answer that 0, 1, 2, 3, and 4 or more of ten people gave

_Question = dict[str, Any]


class VQAWriter(FormatWriter[list[_Question]]):
    """Writes ``v2_OpenEnded_mscoco_<split>_questions.json`` and ``v2_mscoco_<split>_annotations.json``."""

    def draw(self, scene: SceneRecord[Any], facts: SceneFacts) -> list[_Question]:
        return draw_vqa_questions(facts, self.recipe.scene, self.recipe.generator(scene.split, scene.number, "vqa"))

    def write(self, folder: Path, scenes: Sequence[SceneRecord[list[_Question]]]) -> dict[str, Any]:
        for split, part in by_split(scenes).items():
            write_vqa(folder, split, [(scene.image_id, scene.drawn) for scene in part])
        return vqa_statistics([question for scene in scenes for question in scene.drawn])


def draw_vqa_questions(facts: SceneFacts, config: SceneConfig, rng: np.random.Generator) -> list[_Question]:
    """Different questions about a scene; what cannot be asked about it is left out.

    Returns:
        dicts of "question", "kind", "question_type", "answer_type", "answers" (ten strings) and
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
            made = makers[kind](facts, config.values, rng)
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


_Made = tuple[str, str, str, list[str]] | None  # question, its type, the right answer, wrong ones


def _ask_value(slot: str, question_type: str, facts: SceneFacts, values: Values, rng: np.random.Generator) -> _Made:
    found = identify(facts, without(SLOTS, slot), rng)
    if found is None:
        return None
    index, description = found
    answer = getattr(facts.appearances[index], slot)
    return f"{question_type} {noun_phrase(description)}", question_type, answer, without(values[slot], answer)


def _ask_count(facts: SceneFacts, values: Values, rng: np.random.Generator) -> _Made:
    slots = _COUNTED[rng.integers(len(_COUNTED))]
    by_count: dict[int, list[Description]] = defaultdict(list)
    for description in all_descriptions(slots, values):
        by_count[description.mask(facts).bit_count()].append(description)
    number = sorted(by_count)[rng.integers(len(by_count))]
    description = by_count[number][rng.integers(len(by_count[number]))]
    near = [str(other) for other in (number - 1, number + 1) if other >= 0]
    return f"how many {noun_phrase(description, plural=True)} are there", "how many", str(number), near


def _ask_existence(facts: SceneFacts, values: Values, rng: np.random.Generator) -> _Made:
    slots = (("colour", "shape"), ("texture", "shape"), ("size", "colour"))[rng.integers(3)]
    wanted = bool(rng.random() < 0.5)
    some = [description for description in all_descriptions(slots, values) if bool(description.mask(facts)) == wanted]
    if not some:
        return None
    text = f"is there a {noun_phrase(some[rng.integers(len(some))])}"
    return (text, "is there a", *_yes_or_no(wanted))


def _ask_yes_or_no(facts: SceneFacts, values: Values, rng: np.random.Generator) -> _Made:
    slot = ("colour", "texture", "size")[rng.integers(3)]
    found = identify(facts, without(SLOTS, slot), rng)
    if found is None or len(values[slot]) < 2:
        return None
    index, description = found
    true = getattr(facts.appearances[index], slot)
    is_true = bool(rng.random() < 0.5)
    others = without(values[slot], true)
    said = true if is_true else others[rng.integers(len(others))]
    return (f"is the {noun_phrase(description)} {said}", "is the", *_yes_or_no(is_true))


def _yes_or_no(is_true: bool) -> tuple[str, list[str]]:
    """The right answer and the wrong one."""
    return ("yes", ["no"]) if is_true else ("no", ["yes"])


def _answers_of_people(answer: str, others: Sequence[str], rng: np.random.Generator) -> list[str]:
    answers = []
    for _ in range(NUM_ANSWERS):
        wrong, spelled, choice = rng.random(3)
        given = others[int(choice * len(others))] if wrong < _WRONG and others else answer
        if spelled < _SPELLED and given.isdigit() and int(given) < len(_NUMBERS):
            given = _NUMBERS[int(given)]
        answers.append(given)
    return answers


def write_vqa(folder: Path, split: str, asked: Iterable[tuple[int, list[_Question]]]) -> None:
    """Write the two files of a split; ``asked`` pairs image ids with what ``draw_vqa_questions`` returned."""
    info = {"description": "Questions about drawn scenes in the layout of VQA v2.0; not part of it.", "url": ""}
    info |= {"version": "2.0", "year": 2017, "contributor": "e2e_vl.synthetic", "date_created": "2017-04-26 17:07:13"}
    frame = {"info": info, "data_type": "mscoco", "data_subtype": split, "license": {"url": "", "name": ""}}
    questions, annotations = [], []
    for image_id, drawn in asked:
        for number, one in enumerate(drawn):
            ids = {"image_id": image_id, "question_id": image_id * 1000 + number}
            questions.append({**ids, "question": one["question"]})
            answers = [
                {"answer": answer, "answer_confidence": "yes", "answer_id": person}
                for person, answer in enumerate(one["answers"], start=1)
            ]
            kept = {key: one[key] for key in ("question_type", "answer_type", "multiple_choice_answer")}
            annotations.append({**ids, **kept, "answers": answers})
    for name, content in (
        (f"v2_OpenEnded_mscoco_{split}_questions", {**frame, "task_type": "Open-Ended", "questions": questions}),
        (f"v2_mscoco_{split}_annotations", {**frame, "annotations": annotations}),
    ):
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")


def vqa_statistics(drawn: Sequence[_Question]) -> dict[str, Any]:
    """Shares of the kinds of questions, and the VQA accuracy that is possible without the images.

    The accuracies are reached by the best single answer to all questions ("most_frequent_answer"), to all questions of
    a kind ("of_the_kind"), and to all questions of the same words ("of_the_words"). These answers are chosen on the
    questions themselves, so the last accuracy is an upper bound for a model that reads the question only.
    """
    if not drawn:
        return {"questions": 0}
    kinds = sorted(Counter(question["kind"] for question in drawn).items())
    return {
        "questions": len(drawn),
        "kinds": {kind: round(count / len(drawn), 4) for kind, count in kinds},
        "blind_accuracy": {
            "most_frequent_answer": _best_accuracy(drawn, lambda question: ""),
            "of_the_kind": _best_accuracy(drawn, lambda question: question["kind"]),
            "of_the_words": _best_accuracy(drawn, lambda question: question["question"]),
        },
    }


def _best_accuracy(drawn: Sequence[_Question], group_of: Callable[[_Question], str]) -> float:
    """VQA accuracy when each group of questions gets its best single answer."""
    totals: dict[str, Counter[str]] = defaultdict(Counter)
    for question in drawn:
        digits = [str(_NUMBERS.index(answer)) if answer in _NUMBERS else answer for answer in question["answers"]]
        for answer, number in Counter(digits).items():
            totals[group_of(question)][answer] += _SCORES[min(number, 4)]
    return round(sum(max(total.values()) for total in totals.values()) / len(drawn), 4)
