"""Writer of GQA: scene graphs, questions with programs, their valid and plausible answers.

There are five kinds of questions, as in GQA's structural types: ask for the value of an attribute (query), choose
between two values (choose), ask whether a thing exists (verify), whether both or either of two things exist (logical),
or whether two things have the same colour or shape (compare). Yes and no are equally frequent, and values are drawn
by drawing objects, so the words of a question reveal little about the answer.

A question about a value entails two others, which are not balanced: whether the thing has that value, and whether it
has another one. The entailed questions are only in the files of all questions, not in the balanced files.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from typing_extensions import override

from e2e_vl.synthetic.base import FormatWriter, SceneRecord, by_split, write_compact
from e2e_vl.synthetic.language import SLOTS, THING_SLOTS, Values, draw_thing, identify, noun_phrase, without
from e2e_vl.synthetic.scenes import SceneGraph, members

_KINDS = ("query", "query", "query", "choose", "verify", "verify", "logical", "compare")
_ASKED = ("colour", "shape", "size")  # attributes that questions ask for
_SPELLED = {"colour": "color"}  # GQA's names of attributes
_ATTEMPTS = 30

_YES_OR_NO = ("yes", "no")
_ANSWER = {True: "yes", False: "no"}

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
    makers = {"query": _query, "choose": _choose, "verify": _verify, "logical": _logical, "compare": _compare}
    questions: dict[str, _Question] = {}
    for kind in _KINDS:
        for _ in range(_ATTEMPTS):
            candidates = makers[kind](graph, values, rng)
            if candidates is None:
                break
            question, *entailed = candidates
            if question["question"] in questions:
                continue
            entailed = [candidate for candidate in entailed if candidate["question"] not in questions]
            first_entailed = len(questions) + 1
            question["entailed"] = list(range(first_entailed, first_entailed + len(entailed)))
            for new_question in (question, *entailed):
                questions[new_question["question"]] = new_question
            break
    return list(questions.values())


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


def _draw_value(graph: SceneGraph, values: Values, rng: np.random.Generator) -> _AskedValue | None:
    slot = _ASKED[rng.integers(len(_ASKED))]
    identified = identify(graph, without(SLOTS, slot), rng)
    if identified is None or len(values[slot]) < 2:
        return None
    index, description = identified
    value = getattr(graph.appearances[index], slot)
    return _AskedValue(
        index,
        noun_phrase(description),
        slot,
        _SPELLED.get(slot, slot),
        value,
        without(values[slot], value),
        article="a " if slot == "shape" else "",
    )


def _query(graph: SceneGraph, values: Values, rng: np.random.Generator) -> list[_Question] | None:
    """Ask for a value; entails asking whether it is that value, and whether it is another one."""
    asked = _draw_value(graph, values, rng)
    if asked is None:
        return None
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


def _choose(graph: SceneGraph, values: Values, rng: np.random.Generator) -> list[_Question] | None:
    asked = _draw_value(graph, values, rng)
    if asked is None:
        return None
    pair = [asked.value, asked.others[rng.integers(len(asked.others))]]
    first, second = (pair[number] for number in rng.permutation(2))
    question = _make_question(
        f"is the {asked.thing} {asked.article}{first} or {asked.article}{second}",
        asked.value,
        (first, second),
        (("select", f"{asked.thing} ({asked.index})"), (f"choose {asked.name}", f"{first}|{second}")),
        ("choose", "attr", f"choose{asked.name.capitalize()}"),
        group=f"choose {asked.name}",
        objects=[asked.index],
    )
    return [question]


def _verify(graph: SceneGraph, values: Values, rng: np.random.Generator) -> list[_Question] | None:
    exists = bool(rng.random() < 0.5)
    thing = draw_thing(graph, THING_SLOTS[rng.integers(3)], values, exists, rng)
    if thing is None:
        return None
    program = (("select", thing), ("exist", "?"))
    types = ("verify", "obj", "exist")
    return [_make_question(f"is there a {thing}", _ANSWER[exists], _YES_OR_NO, program, types)]


def _logical(graph: SceneGraph, values: Values, rng: np.random.Generator) -> list[_Question] | None:
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
    question = _make_question(
        f"{start} a {first} {word} a {second}",
        _ANSWER[is_true],
        _YES_OR_NO,
        (("select", first), ("exist", "?"), ("select", second), ("exist", "?"), (word, "")),
        ("logical", "obj", f"exist{word.capitalize()}"),
        dependencies=[[], [0], [], [2], [1, 3]],
    )
    return [question]


def _compare(graph: SceneGraph, values: Values, rng: np.random.Generator) -> list[_Question] | None:
    slot = ("colour", "shape")[rng.integers(2)]
    is_same = bool(rng.random() < 0.5)
    for _ in range(_ATTEMPTS):
        pair = [identify(graph, without(SLOTS, slot), rng) for _ in range(2)]
        if None in pair:
            return None
        (index, description), (other_index, other_description) = pair
        value = getattr(graph.appearances[index], slot)
        other_value = getattr(graph.appearances[other_index], slot)
        if index != other_index and (value == other_value) == is_same:
            break
    else:
        return None
    name = _SPELLED.get(slot, slot)
    thing = noun_phrase(description)
    other_thing = noun_phrase(other_description)
    question = _make_question(
        f"do the {thing} and the {other_thing} have the same {name}",
        _ANSWER[is_same],
        _YES_OR_NO,
        (("select", f"{thing} ({index})"), ("select", f"{other_thing} ({other_index})"), (f"same {name}", "")),
        ("compare", "attr", "twoSame"),
        dependencies=[[], [], [0, 1]],
        objects=[index, other_index],
    )
    return [question]


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
