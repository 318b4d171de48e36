"""Questions about scenes with ten answers each, in VQA v2's format.

    vqa/v2_OpenEnded_mscoco_<split>_questions.json, vqa/v2_mscoco_<split>_annotations.json

Every kind of question is balanced, so that its words say little about the answer: colours and shapes are asked of
objects drawn at random, a count is drawn before what is counted, and yes is as frequent as no. The ten people agree
mostly: some are wrong, and some write a number as a word.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np

from e2e_vl.synthetic.language import SLOTS, Description
from e2e_vl.synthetic.relations import SceneFacts, members
from e2e_vl.synthetic.scenes import SIZES, SceneConfig

NUM_ANSWERS = 10
_WRONG = 0.08  # chance of one person to be wrong
_SPELLED = 0.1  # chance of one person to write a number as a word
_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_KINDS = ("colour", "colour", "shape", "count", "count", "exists", "verify")  # of the questions about one scene
_COUNTED = (("colour",), ("shape",), ("texture", "colour"))
_ATTEMPTS = 30
_SCORES = (0.0, 0.3, 0.6, 0.9, 1.0)  # of an answer that 0, 1, 2, 3 or more of ten people gave


def draw_questions(facts: SceneFacts, config: SceneConfig, rng: np.random.Generator) -> list[dict[str, Any]]:
    """Different questions about a scene: "question", "kind", "question_type", "answer_type", "answers" (ten strings).

    What cannot be asked about a scene is left out; at least one question is about a count.
    """
    values = {"size": SIZES, "texture": config.textures, "colour": config.colours, "shape": config.shapes}
    makers = {"colour": _colour, "shape": _shape, "count": _count, "exists": _exists, "verify": _verify}
    questions: dict[str, dict[str, Any]] = {}
    for kind in _KINDS:
        for _ in range(_ATTEMPTS):
            made = makers[kind](facts, values, rng)
            if made is None:
                break
            text, question_type, answer, others = made
            if text in questions:
                continue
            answers = _people(answer, others, rng)
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


_Values = dict[str, Sequence[str]]
_Made = tuple[str, str, str, list[str]] | None  # question, its type, the right answer, wrong ones


def _colour(facts: SceneFacts, values: _Values, rng: np.random.Generator) -> _Made:
    found = _identify(facts, ("size", "texture", "shape"), rng)
    if found is None:
        return None
    index, description = found
    answer = facts.looks[index].colour
    text = f"what color is the {_noun_phrase(description)}"
    return text, "what color is the", answer, _without(values["colour"], answer)


def _shape(facts: SceneFacts, values: _Values, rng: np.random.Generator) -> _Made:
    found = _identify(facts, ("size", "texture", "colour"), rng)
    if found is None:
        return None
    index, description = found
    answer = facts.looks[index].shape
    return f"what is the {_noun_phrase(description)}", "what is the", answer, _without(values["shape"], answer)


def _count(facts: SceneFacts, values: _Values, rng: np.random.Generator) -> _Made:
    slots = _COUNTED[rng.integers(len(_COUNTED))]
    by_count: dict[int, list[Description]] = defaultdict(list)
    for combination in product(*(values[slot] for slot in slots)):
        description = Description(**dict(zip(slots, combination, strict=True)))
        by_count[description.mask(facts).bit_count()].append(description)
    number = sorted(by_count)[rng.integers(len(by_count))]
    description = by_count[number][rng.integers(len(by_count[number]))]
    near = [str(other) for other in (number - 1, number + 1) if other >= 0]
    return f"how many {_noun_phrase(description, plural=True)} are there", "how many", str(number), near


def _exists(facts: SceneFacts, values: _Values, rng: np.random.Generator) -> _Made:
    slots = (("colour", "shape"), ("texture", "shape"), ("size", "colour"))[rng.integers(3)]
    combinations_of = [
        Description(**dict(zip(slots, combination, strict=True)))
        for combination in product(*(values[slot] for slot in slots))
    ]
    wanted = bool(rng.random() < 0.5)
    some = [description for description in combinations_of if bool(description.mask(facts)) == wanted]
    if not some:
        return None
    text = f"is there a {_noun_phrase(some[rng.integers(len(some))])}"
    return (text, "is there a", *_yes_or_no(wanted))


def _verify(facts: SceneFacts, values: _Values, rng: np.random.Generator) -> _Made:
    slot = ("colour", "texture", "size")[rng.integers(3)]
    found = _identify(facts, tuple(name for name in SLOTS if name != slot), rng)
    if found is None or len(values[slot]) < 2:
        return None
    index, description = found
    true = getattr(facts.looks[index], slot)
    is_true = bool(rng.random() < 0.5)
    others = _without(values[slot], true)
    said = true if is_true else others[rng.integers(len(others))]
    return (f"is the {_noun_phrase(description)} {said}", "is the", *_yes_or_no(is_true))


def _yes_or_no(is_true: bool) -> tuple[str, list[str]]:
    return ("yes", ["no"]) if is_true else ("no", ["yes"])


def _identify(facts: SceneFacts, slots: Sequence[str], rng: np.random.Generator) -> tuple[int, Description] | None:
    """An object drawn at random, and attributes out of these slots that it alone has; None if there is none."""
    for index in rng.permutation(facts.count):
        look = facts.looks[index]
        subsets = [subset for number in range(1, len(slots) + 1) for subset in combinations(slots, number)]
        descriptions = [Description(**{slot: getattr(look, slot) for slot in subset}) for subset in subsets]
        identifying = [one for one in descriptions if members(one.mask(facts)) == [index]]
        if identifying:
            return int(index), identifying[rng.integers(len(identifying))]
    return None


def _noun_phrase(description: Description, *, plural: bool = False) -> str:
    noun = description.shape or "thing"
    if plural:
        noun += "es" if noun.endswith("s") else "s"
    said = (description.size, description.texture, description.colour, noun)
    return " ".join(word for word in said if word)


def _without(values: Sequence[str], value: str) -> list[str]:
    return [other for other in values if other != value]


def _people(answer: str, others: Sequence[str], rng: np.random.Generator) -> list[str]:
    """What ten people answer."""
    answers = []
    for _ in range(NUM_ANSWERS):
        wrong, spelled, choice = rng.random(3)
        given = others[int(choice * len(others))] if wrong < _WRONG and others else answer
        if spelled < _SPELLED and given.isdigit() and int(given) < len(_NUMBERS):
            given = _NUMBERS[int(given)]
        answers.append(given)
    return answers


def write_vqa(folder: Path, split: str, asked: Iterable[tuple[int, list[dict[str, Any]]]]) -> None:
    """Write the two files of a split; `asked` pairs image ids with what `draw_questions` gave."""
    folder.mkdir(parents=True, exist_ok=True)
    frame = {
        "info": {
            "description": "Questions about drawn scenes in the layout of VQA v2.0; not part of it.",
            "url": "",
            "version": "2.0",
            "year": 2017,
            "contributor": "e2e_vl.synthetic",
            "date_created": "2017-04-26 17:07:13",
        },
        "data_type": "mscoco",
        "data_subtype": split,
        "license": {"url": "", "name": ""},
    }
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


def vqa_statistics(drawn: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Shares of the kinds of questions, and the accuracy of answers that look at no image, or at nothing.

    "most_frequent_answer" is the accuracy of the best single answer to all questions, "of_the_kind" that of the best
    answer to each kind of question, "of_the_words" that of the best answer to questions of the same words (an upper
    bound for what text alone could reach: it is chosen on the questions themselves).
    """
    if not drawn:
        return {"questions": 0}
    return {
        "questions": len(drawn),
        "kinds": {
            kind: round(count / len(drawn), 4) for kind, count in sorted(Counter(q["kind"] for q in drawn).items())
        },
        "blind_accuracy": {
            "most_frequent_answer": _best_accuracy(drawn, lambda question: ""),
            "of_the_kind": _best_accuracy(drawn, lambda question: question["kind"]),
            "of_the_words": _best_accuracy(drawn, lambda question: question["question"]),
        },
    }


def _best_accuracy(drawn: Sequence[dict[str, Any]], group_of: Any) -> float:
    totals: dict[str, Counter[str]] = defaultdict(Counter)
    for question in drawn:
        digits = [str(_NUMBERS.index(answer)) if answer in _NUMBERS else answer for answer in question["answers"]]
        for answer, number in Counter(digits).items():
            totals[group_of(question)][answer] += _SCORES[min(number, 4)]
    return round(sum(max(total.values()) for total in totals.values()) / len(drawn), 4)
