"""Writer of VCR: questions about synthetic scenes with four answers and four reasons each.

    train.jsonl, val.jsonl, ...                      one question per line; "test" has no labels
    vcr1images/drawn_<split>/<split>_000001@0.jpg    the scene's image, a hard link where the disk has hard links
    vcr1images/drawn_<split>/<split>_000001@0.json   boxes, outlines and class names of its objects

Sentences name objects by number, and what is asked about an object is its colour, which neither its class nor its box
tells: the image is needed. Whose colour is asked is drawn only after the choices, from three or four colours among them
(see `_ask`): the question is needed too, and choices never name the object that is asked about.

A line's `family` is ours, the other keys are VCR's:

    colour   What colour is [2] ?              It is red .              It has the colour of [0] .
    match    Which has the colour of [2] ?     [0] .                    It is red .
    pair     What colours are [2, 1] ?         They are red and blue .  The first has a colour of its own .
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from typing_extensions import override

from e2e_vl.synthetic.base import FormatWriter, SceneRecord, by_split, link_image
from e2e_vl.synthetic.config import COLOURS
from e2e_vl.synthetic.scenes import SceneGraph

CLASS_OF = {  # VCR's names for our shapes
    "triangle": "person",
    "star": "person",
    "circle": "sportsball",
    "square": "book",
    "cross": "airplane",
    "diamond": "kite",
}
UNLABELLED = "test"  # the split without labels, as in the release
CHOICES = 4
_MAX_QUESTIONS = 4  # per scene
_ATTEMPTS = 40
_LABELS = (  # keys that lines of the unlabelled split do not have
    "answer_label",
    "answer_sources",
    "answer_match_iter",
    "answer_orig",
    "answer_likelihood",
    "rationale_label",
    "rationale_sources",
    "rationale_match_iter",
    "rationale_orig",
    "match_fold",
    "match_index",
)

Sentence = list[Any]  # words, and lists of objects
_Question = dict[str, Any]


class _Choices(NamedTuple):
    """The answers or the rationales of a question."""

    sentences: list[Sentence]
    right: int  # the row of the right one


class _Draft(NamedTuple):
    """A question whose choices are not yet in a random order."""

    question: Sentence
    answers: _Choices
    rationales: _Choices


class VCRWriter(FormatWriter):
    """Writes the files listed at the top; image files of an interrupted run are replaced."""

    @override
    def draw(self, scene: SceneRecord, graph: SceneGraph) -> list[_Question]:
        """Draw up to `_MAX_QUESTIONS` different questions.

        Returns dicts of "family", "question", and "answer_choices", "answer_label", "rationale_choices" and
        "rationale_label", the right choice at a random place.
        """
        rng = self.recipe.generator(scene.split, scene.number, "vcr")
        families = self.recipe.language.vcr_families
        colours = [appearance.colour for appearance in graph.appearances]
        questions: dict[str, _Question] = {}  # by the text of their JSON
        for attempt in range(_ATTEMPTS):
            if len(questions) == _MAX_QUESTIONS:
                break
            family = families[attempt % len(families)]
            draft = _ask(family, colours, rng)
            if draft is None:
                continue
            text = json.dumps(draft.question)
            if text in questions:
                continue
            question: _Question = {"family": family, "question": draft.question}
            for kind, choices in (("answer", draft.answers), ("rationale", draft.rationales)):
                order = rng.permutation(CHOICES).tolist()
                question[f"{kind}_choices"] = [choices.sentences[row] for row in order]
                question[f"{kind}_label"] = order.index(choices.right)
            questions[text] = question
        return list(questions.values())

    @override
    def write(self, folder: Path, scenes: Sequence[SceneRecord]) -> None:
        for split, split_scenes in by_split(scenes).items():
            images = folder / "vcr1images"
            (images / f"drawn_{split}").mkdir(parents=True, exist_ok=True)
            lines: list[str] = []
            for scene in split_scenes:
                name = f"drawn_{split}/{split}_{scene.number:06d}@0"
                files = {"img_fn": f"{name}{scene.image_file.suffix}", "metadata_fn": f"{name}.json"}
                metadata = _metadata(scene)
                link_image(scene.image_file, images / files["img_fn"])
                (images / files["metadata_fn"]).write_text(json.dumps(metadata), encoding="utf-8")
                for position, question in enumerate(scene.drawn):
                    ids = {"img_id": f"{split}-{scene.number}", "question_number": position}
                    line = _line(question, split, len(lines), metadata["names"], files, ids)
                    lines.append(json.dumps(line) + "\n")
            (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")


def _ask(family: str, colours: Sequence[str], rng: np.random.Generator) -> _Draft | None:
    """Make a question about one or two objects; None if the scene has too few colours that several objects share.

    Three objects of different colours are named before the asked colour is drawn: that of a named object and others, or
    one of a single object, for which no named object is right. So the image and the choices alone leave three or four
    that are equally likely.

    Args:
        colours: the colour of each object.
    """
    owners: dict[str, list[int]] = {}  # colour -> the objects that have it
    for colour in _shuffled(COLOURS, rng):
        owners[colour] = [index for index, other in enumerate(colours) if other == colour]
    absent = [colour for colour in owners if len(owners[colour]) == 0]
    single = [colour for colour in owners if len(owners[colour]) == 1]
    shared = [colour for colour in owners if len(owners[colour]) > 1][: CHOICES - 1]
    num_fillers = CHOICES - 1 - len(shared)
    fillers = single[:num_fillers]
    possible = [*shared, *single[num_fillers:][:1]]  # colours that may be asked for
    if len(possible) < CHOICES - 1:
        return None
    row = int(rng.integers(len(possible)))
    asked_colour = possible[row]
    asked = _draw(owners[asked_colour], rng)
    named = []  # objects in the choices, never the one that is asked about
    for colour in (*shared, *fillers):
        others = [index for index in owners[colour] if index != asked]
        named.append(_draw(others, rng))
    right = row if asked_colour in shared else CHOICES - 1  # "none of the named objects" comes last

    answer_colours = [*possible, *fillers, *absent][:CHOICES]
    colour_choices = _Choices([["It", "is", colour, "."] for colour in answer_colours], row)
    if family == "match":
        answers = [*([[index], "."] for index in named), ["None", "."]]
        question = ["Which", "has", "the", "colour", "of", [asked], "?"]
        return _Draft(question, _Choices(answers, right), colour_choices)

    subject = ["It"] if family == "colour" else ["The", "first"]
    reasons = [[*subject, "has", "the", "colour", "of", [index], "."] for index in named]
    reasons.append([*subject, "has", "a", "colour", "of", "its", "own", "."])
    rationales = _Choices(reasons, right)
    if family == "colour":
        return _Draft(["What", "colour", "is", [asked], "?"], colour_choices, rationales)

    wrong_colour = _draw([colour for colour in possible if colour != asked_colour], rng)
    used = (asked_colour, wrong_colour, *absent)
    seconds = _shuffled([colour for colour in owners if colour not in used], rng)[:2]
    if len(seconds) < 2:
        return None
    second = _draw(owners[seconds[0]], rng)
    answers = []
    for first_colour in (asked_colour, wrong_colour):
        for second_colour in seconds:
            answers.append(["They", "are", first_colour, "and", second_colour, "."])
    return _Draft(["What", "colours", "are", [asked, second], "?"], _Choices(answers, 0), rationales)


def _draw(values: Sequence[Any], rng: np.random.Generator) -> Any:
    return values[int(rng.integers(len(values)))]


def _shuffled(values: Sequence[Any], rng: np.random.Generator) -> list[Any]:
    return [values[int(index)] for index in rng.permutation(len(values))]


def as_read_aloud(sentence: Sentence) -> str:
    """Format a sentence for the `_orig` fields, which number objects from 1."""
    words = []
    for token in sentence:
        if isinstance(token, list):
            token = " and ".join(str(index + 1) for index in token)
        words.append(token)
    return " ".join(words)


def _metadata(scene: SceneRecord) -> dict[str, Any]:
    """Return the content of an image's metadata file; `attribute_ids` (see `coco.py`) are ours."""
    boxes = []
    polygons = []
    for item in scene.objects:
        x, y, w, h = item.box
        boxes.append([x, y, x + w, y + h, 1.0])
        polygons.append([np.reshape(outline, (-1, 2)).tolist() for outline in item.outlines])
    return {
        "boxes": boxes,
        "segms": polygons,
        "names": [CLASS_OF[item.appearance.shape] for item in scene.objects],
        "width": scene.size[1],
        "height": scene.size[0],
        "attribute_ids": [item.attribute_ids for item in scene.objects],
    }


def _line(
    question: _Question, split: str, index: int, objects: list[str], files: dict[str, str], ids: dict[str, Any]
) -> dict[str, Any]:
    """Return a line of a jsonl file, with VCR's keys; `index` is its number in the file."""
    answer = question["answer_choices"][question["answer_label"]]
    rationale = question["rationale_choices"][question["rationale_label"]]
    record = {
        "movie": "drawn_scenes",
        "objects": objects,
        "interesting_scores": [0],
        "answer_likelihood": "likely",
        **files,
        "answer_orig": as_read_aloud(answer),
        "question_orig": as_read_aloud(question["question"]),
        "rationale_orig": as_read_aloud(rationale),
        "question": question["question"],
        "answer_match_iter": list(range(CHOICES)),
        "answer_sources": [index] * CHOICES,
        "answer_choices": question["answer_choices"],
        "answer_label": question["answer_label"],
        "rationale_choices": question["rationale_choices"],
        "rationale_sources": [index] * CHOICES,
        "rationale_match_iter": list(range(CHOICES)),
        "rationale_label": question["rationale_label"],
        **ids,
        "annot_id": f"{split}-{index}",
        "match_fold": f"{split}-0",
        "match_index": index,
        "family": question["family"],
    }
    if split == UNLABELLED:
        return {key: value for key, value in record.items() if key not in _LABELS}
    return record
