"""Writer of VCR: questions about drawn scenes with four answers and four reasons each.

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
from typing import Any

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
    *("answer_label", "answer_sources", "answer_match_iter", "answer_orig", "answer_likelihood"),
    *("rationale_label", "rationale_sources", "rationale_match_iter", "rationale_orig"),
    *("match_fold", "match_index"),
)

Sentence = list[Any]  # words, and lists of objects
_Choices = tuple[list[Sentence], int]  # and the row of the right one
_Asked = tuple[Sentence, _Choices, _Choices]  # question, answers, rationales
_Question = dict[str, Any]


class VCRWriter(FormatWriter):
    """Writes the files listed at the top; image files of an interrupted run are replaced."""

    @override
    def draw(self, scene: SceneRecord, graph: SceneGraph) -> list[_Question]:
        """Draw up to `_MAX_QUESTIONS` different questions.

        Returns dicts of "family", "question", and "answer_choices", "answer_label", "rationale_choices" and
        "rationale_label", the right choice at a random place.
        """
        rng, families = self.recipe.generator(scene.split, scene.number, "vcr"), self.recipe.language.vcr_families
        colours = [appearance.colour for appearance in graph.appearances]
        found: dict[str, _Question] = {}
        for attempt in range(_ATTEMPTS):
            if len(found) == _MAX_QUESTIONS:
                break
            family = families[attempt % len(families)]
            asked = _ask(family, colours, rng)
            if asked is None or json.dumps(asked[0]) in found:
                continue
            question, answers, rationales = asked
            record: _Question = {"family": family, "question": question}
            for kind, (choices, right) in (("answer", answers), ("rationale", rationales)):
                order = rng.permutation(CHOICES).tolist()
                record[f"{kind}_choices"] = [choices[index] for index in order]
                record[f"{kind}_label"] = order.index(right)
            found[json.dumps(question)] = record
        return list(found.values())

    @override
    def write(self, folder: Path, scenes: Sequence[SceneRecord]) -> None:
        for split, part in by_split(scenes).items():
            (folder / "vcr1images" / f"drawn_{split}").mkdir(parents=True, exist_ok=True)
            lines: list[str] = []
            for scene in part:
                image = f"drawn_{split}/{split}_{scene.number:06d}@0"
                metadata = _metadata(scene)
                link_image(scene.image_file, folder / "vcr1images" / f"{image}{scene.image_file.suffix}")
                (folder / "vcr1images" / f"{image}.json").write_text(json.dumps(metadata), encoding="utf-8")
                for position, question in enumerate(scene.drawn):
                    files = {"img_fn": f"{image}{scene.image_file.suffix}", "metadata_fn": f"{image}.json"}
                    ids = {"img_id": f"{split}-{scene.number}", "question_number": position}
                    lines.append(json.dumps(_line(question, split, len(lines), metadata["names"], files, ids)))
            (folder / f"{split}.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _ask(family: str, colours: Sequence[str], rng: np.random.Generator) -> _Asked | None:
    """Make a question about one or two objects; None if the scene has too few colours that several objects share.

    Three objects of different colours are named before the asked colour is drawn: that of a named object and others, or
    one of a single object, for which no named object is right. So the image and the choices alone leave three or four
    that are equally likely.
    """
    places = {colour: [i for i, own in enumerate(colours) if own == colour] for colour in _shuffled(COLOURS, rng)}
    shared = [colour for colour, own in places.items() if len(own) > 1][: CHOICES - 1]
    single = [colour for colour, own in places.items() if len(own) == 1]
    fillers, rest = single[: CHOICES - 1 - len(shared)], single[CHOICES - 1 - len(shared) :][:1]
    possible = [*shared, *rest]
    if len(possible) < CHOICES - 1:
        return None
    row = int(rng.integers(len(possible)))
    asked = possible[row]
    one = _any(places[asked], rng)
    named = [_any([i for i in places[colour] if i != one], rng) for colour in (*shared, *fillers)]
    absent = [colour for colour, own in places.items() if not own]
    words = [["It", "is", colour, "."] for colour in [*possible, *fillers, *absent][:CHOICES]], row
    right = row if asked in shared else CHOICES - 1
    if family == "match":
        answers = [*([[i], "."] for i in named), ["None", "."]]
        return ["Which", "has", "the", "colour", "of", [one], "?"], (answers, right), words
    subject = ["It"] if family == "colour" else ["The", "first"]
    reasons = [[*subject, "has", "the", "colour", "of", [i], "."] for i in named]
    rationales = [*reasons, [*subject, "has", "a", "colour", "of", "its", "own", "."]], right
    if family == "colour":
        return ["What", "colour", "is", [one], "?"], words, rationales
    other = _any([colour for colour in possible if colour != asked], rng)
    seconds = _shuffled([colour for colour, own in places.items() if own and colour not in (asked, other)], rng)[:2]
    if len(seconds) < 2:
        return None
    answers = [["They", "are", first, "and", second, "."] for first in (asked, other) for second in seconds]
    return ["What", "colours", "are", [one, _any(places[seconds[0]], rng)], "?"], (answers, 0), rationales


def _any(values: Sequence[Any], rng: np.random.Generator) -> Any:
    return values[int(rng.integers(len(values)))]


def _shuffled(values: Sequence[Any], rng: np.random.Generator) -> list[Any]:
    return [values[int(index)] for index in rng.permutation(len(values))]


def as_read_aloud(sentence: Sentence) -> str:
    """Format a sentence for the `_orig` fields, which number objects from 1."""
    words = (t if isinstance(t, str) else " and ".join(str(number + 1) for number in t) for t in sentence)
    return " ".join(words)


def _metadata(scene: SceneRecord) -> dict[str, Any]:
    """The content of an image's metadata file; `attribute_ids` (see `coco.py`) are ours."""
    boxes = [item.box for item in scene.objects]
    return {
        "boxes": [[x, y, x + w, y + h, 1.0] for x, y, w, h in boxes],
        "segms": [[np.reshape(flat, (-1, 2)).tolist() for flat in item.outlines] for item in scene.objects],
        "names": [CLASS_OF[item.appearance.shape] for item in scene.objects],
        "width": scene.size[1],
        "height": scene.size[0],
        "attribute_ids": [item.attribute_ids for item in scene.objects],
    }


def _line(
    question: _Question, split: str, index: int, objects: list[str], files: dict[str, str], ids: dict[str, Any]
) -> dict[str, Any]:
    """A line of a jsonl file, with VCR's keys; `index` is its number in the file."""
    answer, rationale = (question[f"{kind}_choices"][question[f"{kind}_label"]] for kind in ("answer", "rationale"))
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
    left_out = _LABELS if split == UNLABELLED else ()
    return {key: value for key, value in record.items() if key not in left_out}
