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
from typing import Any

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
        generator = self.recipe.generator(scene.split, scene.number, "gqa")
        return {
            "questions": draw_questions(graph, self.recipe.scene.values, generator),
            "in_front": [members(graph.related["in front"][anchor]) for anchor in range(graph.count)],
        }

    @override
    def write(self, folder: Path, scenes: Sequence[SceneRecord]) -> None:
        for name in ("questions", "eval", "sceneGraphs"):
            (folder / name).mkdir(exist_ok=True)
        for split, part in by_split(scenes).items():
            questions = {key: one for scene in part for key, one in _with_ids(scene).items()}
            choices = {
                key: {"valid": one["choices"], "plausible": one.pop("choices")} for key, one in questions.items()
            }
            balanced = {key: one for key, one in questions.items() if one["isBalanced"]}
            graphs = {str(scene.image_id): _graph(scene) for scene in part}
            write_compact(folder / "questions" / f"{split}_all_questions.json", questions)
            write_compact(folder / "questions" / f"{split}_balanced_questions.json", balanced)
            write_compact(folder / "eval" / f"{split}_choices.json", choices)
            write_compact(folder / "sceneGraphs" / f"{split}_sceneGraphs.json", graphs)


def draw_questions(graph: SceneGraph, values: Values, rng: np.random.Generator) -> list[_Question]:
    makers = {"query": _query, "choose": _choose, "verify": _verify, "logical": _logical, "compare": _compare}
    questions: dict[str, _Question] = {}
    for kind in _KINDS:
        for _ in range(_ATTEMPTS):
            made = makers[kind](graph, values, rng)
            if made is None:
                break
            asked, *entailed = made
            if asked["question"] in questions:
                continue
            entailed = [one for one in entailed if one["question"] not in questions]
            asked["entailed"] = [len(questions) + 1 + number for number in range(len(entailed))]
            questions |= {one["question"]: one for one in (asked, *entailed)}
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
        dependencies = [[number - 1] if number else [] for number in range(len(program))]
    return {
        "question": text[0].upper() + text[1:] + "?",
        "answer": answer,
        "choices": list(choices),
        "semantic": [
            {"operation": operation, "dependencies": own, "argument": argument}
            for (operation, argument), own in zip(program, dependencies, strict=True)
        ],
        "types": dict(zip(("structural", "semantic", "detailed"), types, strict=True)),
        "group": group,
        "objects": list(objects),
        "isBalanced": balanced,
        "entailed": [],
    }


def _value(
    graph: SceneGraph, values: Values, rng: np.random.Generator
) -> tuple[int, str, str, str, list[str], str] | None:
    """Draw what to ask for: object, its description, GQA's attribute name, the value, other values, and an article."""
    slot = _ASKED[rng.integers(len(_ASKED))]
    found = identify(graph, without(SLOTS, slot), rng)
    if found is None or len(values[slot]) < 2:
        return None
    index, description = found
    answer = getattr(graph.appearances[index], slot)
    article = "a " if slot == "shape" else ""
    return index, noun_phrase(description), _SPELLED.get(slot, slot), answer, without(values[slot], answer), article


def _query(graph: SceneGraph, values: Values, rng: np.random.Generator) -> list[_Question] | None:
    """Ask for a value; entails asking whether it is that value, and whether it is another one."""
    drawn = _value(graph, values, rng)
    if drawn is None:
        return None
    index, thing, name, answer, others, article = drawn
    select = "select", f"{thing} ({index})"
    asked = _make_question(
        f"what {name} is the {thing}",
        answer,
        values["colour" if name == "color" else name],
        (select, ("query", name)),
        ("query", "attr", name),
        group=name,
        objects=[index],
    )
    entailed = [
        _make_question(
            f"is the {thing} {article}{value}",
            is_true,
            _YES_OR_NO,
            (select, (f"verify {name}", value)),
            ("verify", "attr", f"verify{name.capitalize()}"),
            objects=[index],
            balanced=False,
        )
        for value, is_true in ((answer, "yes"), (others[rng.integers(len(others))], "no"))
    ]
    return [asked, *entailed]


def _choose(graph: SceneGraph, values: Values, rng: np.random.Generator) -> list[_Question] | None:
    drawn = _value(graph, values, rng)
    if drawn is None:
        return None
    index, thing, name, answer, others, article = drawn
    both = [answer, others[rng.integers(len(others))]]
    both = [both[number] for number in rng.permutation(2)]
    asked = _make_question(
        f"is the {thing} {article}{both[0]} or {article}{both[1]}",
        answer,
        both,
        (("select", f"{thing} ({index})"), (f"choose {name}", "|".join(both))),
        ("choose", "attr", f"choose{name.capitalize()}"),
        group=f"choose {name}",
        objects=[index],
    )
    return [asked]


def _verify(graph: SceneGraph, values: Values, rng: np.random.Generator) -> list[_Question] | None:
    wanted = bool(rng.random() < 0.5)
    thing = draw_thing(graph, THING_SLOTS[rng.integers(3)], values, wanted, rng)
    if thing is None:
        return None
    program = ("select", thing), ("exist", "?")
    return [_make_question(f"is there a {thing}", _ANSWER[wanted], _YES_OR_NO, program, ("verify", "obj", "exist"))]


def _logical(graph: SceneGraph, values: Values, rng: np.random.Generator) -> list[_Question] | None:
    """Choose whether the things exist so that "and" and "or" are true as often as false."""
    word = ("and", "or")[rng.integers(2)]
    wanted = bool(rng.random() < 0.5)
    first, second = (wanted, wanted) if wanted == (word == "and") else (wanted, not wanted)
    if rng.random() < 0.5:
        first, second = second, first
    things = [draw_thing(graph, THING_SLOTS[rng.integers(3)], values, is_there, rng) for is_there in (first, second)]
    if None in things or things[0] == things[1]:
        return None
    start = "are there" if word == "and" else "is there"
    asked = _make_question(
        f"{start} a {things[0]} {word} a {things[1]}",
        _ANSWER[wanted],
        _YES_OR_NO,
        (("select", things[0]), ("exist", "?"), ("select", things[1]), ("exist", "?"), (word, "")),
        ("logical", "obj", f"exist{word.capitalize()}"),
        dependencies=[[], [0], [], [2], [1, 3]],
    )
    return [asked]


def _compare(graph: SceneGraph, values: Values, rng: np.random.Generator) -> list[_Question] | None:
    slot = ("colour", "shape")[rng.integers(2)]
    wanted = bool(rng.random() < 0.5)
    for _ in range(_ATTEMPTS):
        found = [identify(graph, without(SLOTS, slot), rng) for _ in range(2)]
        if None in found:
            return None
        (one, first), (other, second) = found
        appearances = [getattr(graph.appearances[index], slot) for index in (one, other)]
        if one != other and (appearances[0] == appearances[1]) == wanted:
            break
    else:
        return None
    name, things = _SPELLED.get(slot, slot), [noun_phrase(first), noun_phrase(second)]
    asked = _make_question(
        f"do the {things[0]} and the {things[1]} have the same {name}",
        _ANSWER[wanted],
        _YES_OR_NO,
        (("select", f"{things[0]} ({one})"), ("select", f"{things[1]} ({other})"), (f"same {name}", "")),
        ("compare", "attr", "twoSame"),
        dependencies=[[], [], [0, 1]],
        objects=[one, other],
    )
    return [asked]


def _with_ids(scene: SceneRecord) -> dict[str, _Question]:
    """The questions of a scene as official records plus their choices; ids are zero-padded."""
    drawn = scene.drawn["questions"]
    ids = [f"{scene.image_id:06d}{number:02d}" for number in range(len(drawn))]
    records = {}
    for key, one in zip(ids, drawn, strict=True):
        pointers = [str(scene.first_annotation_id + index) for index in one["objects"]]
        steps = (f"{step['operation']}: {step['argument']} {step['dependencies']}" for step in one["semantic"])
        last = len(one["question"].split()) - 1
        records[key] = {
            "semantic": one["semantic"],
            "entailed": [ids[number] for number in one["entailed"]],
            "equivalent": [key],
            "question": one["question"],
            "imageId": str(scene.image_id),
            "isBalanced": one["isBalanced"],
            "groups": {"global": one["group"], "local": one["types"]["detailed"]},
            "answer": one["answer"],
            "semanticStr": "->".join(steps),
            "annotations": {
                "answer": {},
                "question": {str(last - number): pointer for number, pointer in enumerate(pointers)},
                "fullAnswer": {},
            },
            "types": one["types"],
            "fullAnswer": f"{one['answer'].capitalize()}.",
            "choices": one["choices"],
        }
    return records


def _graph(scene: SceneRecord) -> dict[str, Any]:
    objects = {}
    for index, item in enumerate(scene.objects):
        x, y, w, h = (int(value) for value in item.box)
        behind = [anchor for anchor, front in enumerate(scene.drawn["in_front"]) if index in front]
        objects[str(scene.first_annotation_id + index)] = {
            "name": item.appearance.shape,
            "x": x,
            "y": y,
            "w": w,
            "h": h,
            "attributes": [item.appearance.colour, item.appearance.texture, item.appearance.size],
            "relations": [
                {"name": "in front of", "object": str(scene.first_annotation_id + anchor)} for anchor in behind
            ],
        }
    return {"width": scene.size[1], "height": scene.size[0], "objects": objects}
