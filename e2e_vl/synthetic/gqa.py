"""Writer of GQA: scene graphs, questions with programs, their valid and plausible answers.

There are five kinds of questions, as in GQA's structural types: ask for the value of an attribute (query), choose
between two values (choose), ask whether a thing exists (verify), whether both or either of two things exist (logical),
or whether two things have the same colour or shape (compare). Neither the words of a question nor the image reveal much
about the answer. A value is asked for only if the scene has other values of the attribute that could be asked for, and
each of them is equally likely, however many objects have it; both values of a choice are among them. Yes and no are
equally frequent, and things are compared only in scenes where some are the same and some are not.

A question about a value entails two others, which are not balanced: whether the thing has that value, and whether it
has another one. The entailed questions are only in the files of all questions, not in the balanced files.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from typing_extensions import override

from e2e_vl.synthetic.base import FormatWriter, SceneRecord, by_split, write_compact
from e2e_vl.synthetic.language import (
    THING_SLOTS,
    Values,
    draw_thing,
    identified_by_value,
    identify_each_value,
    noun_phrase,
    without,
)
from e2e_vl.synthetic.scenes import SceneGraph, members

_MOST_QUERIES = 4  # questions for the value of an attribute, about one scene
_KINDS = ("choose", "verify", "verify", "logical", "compare")  # the other questions about it
_ASKED = ("colour", "shape", "size")  # attributes that questions ask for
_COMPARED = ("colour", "shape")
_SPELLED = {"colour": "color"}  # GQA's names of attributes
_ATTEMPTS = 30

_YES_OR_NO = ("yes", "no")
_ANSWER = {True: "yes", False: "no"}

T = TypeVar("T")
_Question = dict[str, Any]  # a record that refers to other questions and objects by number instead of id


class GQAWriter(FormatWriter):
    """Writes GQA's questions, choices and scene graphs; an image id is the image's number as a string.

    The files are `questions/<split>_{all,balanced}_questions.json`, `eval/<split>_choices.json` and
    `sceneGraphs/<split>_sceneGraphs.json`.
    """

    @override
    def draw(self, scene: SceneRecord, graph: SceneGraph) -> dict[str, Any]:
        rng = self.recipe.generator(scene.split, scene.number, "gqa")
        return {
            "questions": draw_questions(graph, self.recipe.scene.values, rng),
            "in_front": [members(graph.related["in front"][anchor]) for anchor in range(graph.count)],
        }

    @override
    def write(self, folder: Path, scenes: Sequence[SceneRecord]) -> None:
        for name in ("questions", "eval", "sceneGraphs"):
            (folder / name).mkdir(exist_ok=True)
        for split, split_scenes in by_split(scenes).items():
            questions: dict[str, _Question] = {}
            graphs = {}
            for scene in split_scenes:
                questions |= _with_ids(scene)
                graphs[str(scene.image_id)] = _graph(scene)
            choices = {}
            balanced = {}
            for question_id, question in questions.items():
                values = question.pop("choices")
                choices[question_id] = {"valid": values, "plausible": values}
                if question["isBalanced"]:
                    balanced[question_id] = question
            write_compact(folder / "questions" / f"{split}_all_questions.json", questions)
            write_compact(folder / "questions" / f"{split}_balanced_questions.json", balanced)
            write_compact(folder / "eval" / f"{split}_choices.json", choices)
            write_compact(folder / "sceneGraphs" / f"{split}_sceneGraphs.json", graphs)


def draw_questions(graph: SceneGraph, values: Values, rng: np.random.Generator) -> list[_Question]:
    """Draw different questions about a scene, leaving out kinds that do not apply to it.

    An entailed question follows the one that entails it, unless it was asked before.
    """
    questions: dict[str, _Question] = {}
    for candidates in _queries(graph, values, rng)[:_MOST_QUERIES]:
        _add(questions, candidates)
    makers = {"choose": _choose, "verify": _verify, "logical": _logical, "compare": _compare}
    for kind in _KINDS:
        for _ in range(_ATTEMPTS):
            question = makers[kind](graph, values, rng)
            if question is None:
                break
            if question["question"] not in questions:
                _add(questions, [question])
                break
    return list(questions.values())


def _add(questions: dict[str, _Question], candidates: Sequence[_Question]) -> None:
    """Add a new question and those that it entails, unless they were asked before."""
    question, *entailed = candidates
    entailed = [candidate for candidate in entailed if candidate["question"] not in questions]
    first_entailed = len(questions) + 1
    question["entailed"] = list(range(first_entailed, first_entailed + len(entailed)))
    for new_question in (question, *entailed):
        questions[new_question["question"]] = new_question


def _make_question(
    text: str,
    answer: str,
    choices: Sequence[str],
    program: Sequence[tuple[str, str]],
    types: Sequence[str],
    *,
    dependencies: Sequence[list[int]] | None = None,
    group: str | None = None,
    objects: Sequence[int] = (),
    balanced: bool = True,
) -> _Question:
    """Make a question; without `dependencies` each program step depends on the previous one."""
    if dependencies is None:
        dependencies = [[], *([number] for number in range(len(program) - 1))]
    return {
        "question": text[0].upper() + text[1:] + "?",
        "answer": answer,
        "choices": list(choices),
        "semantic": [
            {"operation": operation, "dependencies": earlier_steps, "argument": argument}
            for (operation, argument), earlier_steps in zip(program, dependencies, strict=True)
        ],
        "types": dict(zip(("structural", "semantic", "detailed"), types, strict=True)),
        "group": group,
        "objects": list(objects),
        "isBalanced": balanced,
        "entailed": [],
    }


class _AskedValue(NamedTuple):
    """An attribute of an object that a question asks for."""

    index: int  # of the object
    thing: str  # what describes the object
    slot: str
    name: str  # GQA's name of the attribute
    value: str
    others: list[str]  # other values
    article: str  # before a value: "a " or nothing


def _values_asked(graph: SceneGraph, values: Values, rng: np.random.Generator) -> list[list[_AskedValue]]:
    """Draw how each value is asked for that can be, by attribute; leaves out attributes with a single such value."""
    by_slot = []
    for slot in _ASKED:
        identified = identify_each_value(graph, slot, rng)
        if len(identified) < 2:
            continue
        asked_values = []
        for index, description in identified:
            value = getattr(graph.appearances[index], slot)
            asked = _AskedValue(
                index,
                noun_phrase(description),
                slot,
                _SPELLED.get(slot, slot),
                value,
                without(values[slot], value),
                article="a " if slot == "shape" else "",
            )
            asked_values.append(asked)
        by_slot.append(asked_values)
    return by_slot


def _queries(graph: SceneGraph, values: Values, rng: np.random.Generator) -> list[list[_Question]]:
    """Ask for each value that can be asked for, in random order; see `_query`."""
    asked_values = list(itertools.chain.from_iterable(_values_asked(graph, values, rng)))
    return [_query(asked_values[number], values, rng) for number in rng.permutation(len(asked_values))]


def _query(asked: _AskedValue, values: Values, rng: np.random.Generator) -> list[_Question]:
    """Ask for a value; entails asking whether it is that value, and whether it is another one."""
    select = ("select", f"{asked.thing} ({asked.index})")
    query = _make_question(
        f"what {asked.name} is the {asked.thing}",
        asked.value,
        values[asked.slot],
        (select, ("query", asked.name)),
        ("query", "attr", asked.name),
        group=asked.name,
        objects=[asked.index],
    )
    other = asked.others[rng.integers(len(asked.others))]
    questions = [query]
    for value, answer in ((asked.value, "yes"), (other, "no")):
        entailed = _make_question(
            f"is the {asked.thing} {asked.article}{value}",
            answer,
            _YES_OR_NO,
            (select, (f"verify {asked.name}", value)),
            ("verify", "attr", f"verify{asked.name.capitalize()}"),
            objects=[asked.index],
            balanced=False,
        )
        questions.append(entailed)
    return questions


def _choose(graph: SceneGraph, values: Values, rng: np.random.Generator) -> _Question | None:
    """Choose between two values that are both in the scene; it could have been asked about the other one, too."""
    by_slot = _values_asked(graph, values, rng)
    if not by_slot:
        return None
    asked, other = by_slot[rng.integers(len(by_slot))][:2]
    pair = [asked.value, other.value]
    first, second = (pair[number] for number in rng.permutation(2))
    return _make_question(
        f"is the {asked.thing} {asked.article}{first} or {asked.article}{second}",
        asked.value,
        (first, second),
        (("select", f"{asked.thing} ({asked.index})"), (f"choose {asked.name}", f"{first}|{second}")),
        ("choose", "attr", f"choose{asked.name.capitalize()}"),
        group=f"choose {asked.name}",
        objects=[asked.index],
    )


def _verify(graph: SceneGraph, values: Values, rng: np.random.Generator) -> _Question | None:
    exists = bool(rng.random() < 0.5)
    thing = draw_thing(graph, THING_SLOTS[rng.integers(3)], values, exists, rng)
    if thing is None:
        return None
    program = (("select", thing), ("exist", "?"))
    types = ("verify", "obj", "exist")
    return _make_question(f"is there a {thing}", _ANSWER[exists], _YES_OR_NO, program, types)


def _logical(graph: SceneGraph, values: Values, rng: np.random.Generator) -> _Question | None:
    """Choose whether the things exist so that "and" and "or" are true as often as false."""
    word = ("and", "or")[rng.integers(2)]
    is_true = bool(rng.random() < 0.5)
    first_exists = is_true
    second_exists = is_true
    if (word, is_true) in (("and", False), ("or", True)):  # one of the two is there
        second_exists = not first_exists
    if rng.random() < 0.5:
        first_exists, second_exists = second_exists, first_exists
    first = draw_thing(graph, THING_SLOTS[rng.integers(3)], values, first_exists, rng)
    second = draw_thing(graph, THING_SLOTS[rng.integers(3)], values, second_exists, rng)
    if first is None or second is None or first == second:
        return None
    start = "are there" if word == "and" else "is there"
    return _make_question(
        f"{start} a {first} {word} a {second}",
        _ANSWER[is_true],
        _YES_OR_NO,
        (("select", first), ("exist", "?"), ("select", second), ("exist", "?"), (word, "")),
        ("logical", "obj", f"exist{word.capitalize()}"),
        dependencies=[[], [0], [], [2], [1, 3]],
    )


def _compare(graph: SceneGraph, values: Values, rng: np.random.Generator) -> _Question | None:
    """Ask whether two things have the same colour or shape, in a scene where yes and no are both possible."""
    options = []  # an attribute, and the objects by its values
    for slot in _COMPARED:
        by_value = list(identified_by_value(graph, slot).values())
        if len(by_value) > 1 and max(map(len, by_value)) > 1:
            options.append((slot, by_value))
    if not options:
        return None
    slot, by_value = options[rng.integers(len(options))]
    is_same = bool(rng.random() < 0.5)
    if is_same:
        shared = [objects for objects in by_value if len(objects) > 1]
        objects = shared[rng.integers(len(shared))]
        index, other_index = rng.permutation(list(objects))[:2].tolist()
        other_objects = objects
    else:
        first, second = rng.permutation(len(by_value))[:2]
        objects = by_value[first]
        other_objects = by_value[second]
        index = _pick(list(objects), rng)
        other_index = _pick(list(other_objects), rng)
    description = _pick(objects[index], rng)
    other_description = _pick(other_objects[other_index], rng)
    name = _SPELLED.get(slot, slot)
    thing = noun_phrase(description)
    other_thing = noun_phrase(other_description)
    return _make_question(
        f"do the {thing} and the {other_thing} have the same {name}",
        _ANSWER[is_same],
        _YES_OR_NO,
        (("select", f"{thing} ({index})"), ("select", f"{other_thing} ({other_index})"), (f"same {name}", "")),
        ("compare", "attr", "twoSame"),
        dependencies=[[], [], [0, 1]],
        objects=[index, other_index],
    )


def _pick(options: Sequence[T], rng: np.random.Generator) -> T:
    return options[rng.integers(len(options))]


def _with_ids(scene: SceneRecord) -> dict[str, _Question]:
    """Return the questions of a scene as official records plus their choices; ids are zero-padded."""
    questions = scene.drawn["questions"]
    ids = [f"{scene.image_id:06d}{number:02d}" for number in range(len(questions))]
    records = {}
    for question_id, question in zip(ids, questions, strict=True):
        steps = [f"{step['operation']}: {step['argument']} {step['dependencies']}" for step in question["semantic"]]
        last_word = len(question["question"].split()) - 1
        pointers = {  # number of a word, as a string -> object id
            str(last_word - number): str(scene.first_annotation_id + index)
            for number, index in enumerate(question["objects"])
        }
        records[question_id] = {
            "semantic": question["semantic"],
            "entailed": [ids[number] for number in question["entailed"]],
            "equivalent": [question_id],
            "question": question["question"],
            "imageId": str(scene.image_id),
            "isBalanced": question["isBalanced"],
            "groups": {"global": question["group"], "local": question["types"]["detailed"]},
            "answer": question["answer"],
            "semanticStr": "->".join(steps),
            "annotations": {"answer": {}, "question": pointers, "fullAnswer": {}},
            "types": question["types"],
            "fullAnswer": f"{question['answer'].capitalize()}.",
            "choices": question["choices"],
        }
    return records


def _graph(scene: SceneRecord) -> dict[str, Any]:
    """Return the official scene graph, whose only relation is "in front of"."""
    objects = {}
    for index, item in enumerate(scene.objects):
        x, y, w, h = (int(value) for value in item.box)
        relations = []
        for anchor, in_front in enumerate(scene.drawn["in_front"]):
            if index in in_front:
                relations.append({"name": "in front of", "object": str(scene.first_annotation_id + anchor)})
        objects[str(scene.first_annotation_id + index)] = {
            "name": item.appearance.shape,
            "x": x,
            "y": y,
            "w": w,
            "h": h,
            "attributes": [item.appearance.colour, item.appearance.texture, item.appearance.size],
            "relations": relations,
        }
    return {"width": scene.size[1], "height": scene.size[0], "objects": objects}
