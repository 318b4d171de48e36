"""Writer of VCR's files: questions about drawn scenes with four answers and four reasons each.

    vcr/train.jsonl, val.jsonl, ...                      one question a line; "test" has no labels
    vcr/vcr1images/drawn_<split>/<split>_000001@0.jpg    the scene's image, a hard link where the disk has them
    vcr/vcr1images/drawn_<split>/<split>_000001@0.json   boxes, outlines and class names of its objects

Sentences name objects by number, and what is asked about an object is its colour, which neither its class nor its box
tells. So the image is needed. Wrong choices speak of colours or objects of the same scene, so the question is too.

A line's ``family`` is ours, the other keys are VCR's:

    colour   What colour is [2] ?              It is red .                         It has the colour of [0] .
    match    Which has the colour of [2] ?     [0] .                               Both are red .
    pair     What colours are [2, 1] ?         [2] is red and [1] is blue .        [2] has the colour of [0] .
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from e2e_vl.synthetic.coco import attribute_ids
from e2e_vl.synthetic.relations import SceneFacts
from e2e_vl.synthetic.sampling import VCR_FAMILIES
from e2e_vl.synthetic.scenes import COLOURS, Look

CLASS_OF = {  # what VCR calls our shapes
    "triangle": "person",
    "star": "person",
    "circle": "sportsball",
    "square": "book",
    "cross": "airplane",
    "diamond": "kite",
}
UNLABELLED = "test"  # the split without labels, as in the release
FOLDER = "vcr"
CHOICES = 4
_ATTEMPTS = 40
_HIDDEN = (  # from those who answer the test split
    "answer_label",
    "rationale_label",
    "answer_sources",
    "rationale_sources",
    "answer_match_iter",
    "rationale_match_iter",
    "answer_orig",
    "rationale_orig",
    "answer_likelihood",
    "match_fold",
    "match_index",
)

Sentence = list[Any]  # words, and lists of objects
Drawn = tuple[Sentence, list[Sentence], list[Sentence]]  # question; answers and rationales, the right ones first


def draw_questions(
    facts: SceneFacts, rng: np.random.Generator, count: int = 4, families: Sequence[str] = VCR_FAMILIES
) -> list[dict[str, Any]]:
    """Up to ``count`` different questions about a scene.

    Returns:
        one dict a question: "family", "question", and "answer_choices", "answer_label", "rationale_choices" and
        "rationale_label", the right choice at a random place.
    """
    colours = [look.colour for look in facts.looks]
    draws = {"colour": _ask_colour, "match": _ask_match, "pair": _ask_pair}
    found: dict[str, dict[str, Any]] = {}
    for attempt in range(_ATTEMPTS):
        if len(found) == count:
            break
        family = families[attempt % len(families)]
        drawn = draws[family](colours, rng)
        if drawn is None or json.dumps(drawn[0]) in found:
            continue
        question, answers, rationales = drawn
        record: dict[str, Any] = {"family": family, "question": question}
        for kind, choices in (("answer", answers), ("rationale", rationales)):
            order = rng.permutation(CHOICES)
            record[f"{kind}_choices"] = [choices[index] for index in order]
            record[f"{kind}_label"] = int(np.argmin(order))
        found[json.dumps(question)] = record
    return list(found.values())


def _ask_colour(colours: Sequence[str], rng: np.random.Generator) -> Drawn | None:
    one = int(rng.integers(len(colours)))
    same, others = _same_and_other(colours, one)
    wrong = _wrong_colours(colours, colours[one], rng)
    if not same or len(others) < CHOICES - 1:
        return None
    answers = [["It", "is", colour, "."] for colour in (colours[one], *wrong)]
    objects = [_any(same, rng), *_some(others, CHOICES - 1, rng)]
    return (
        ["What", "colour", "is", [one], "?"],
        answers,
        [["It", "has", "the", "colour", "of", [o], "."] for o in objects],
    )


def _ask_match(colours: Sequence[str], rng: np.random.Generator) -> Drawn | None:
    one = int(rng.integers(len(colours)))
    same, others = _same_and_other(colours, one)
    if not same or len(others) < CHOICES - 1:
        return None
    objects = [_any(same, rng), *_some(others, CHOICES - 1, rng)]
    wrong = _wrong_colours(colours, colours[one], rng)
    rationales = [["Both", "are", colour, "."] for colour in (colours[one], *wrong)]
    return ["Which", "has", "the", "colour", "of", [one], "?"], [[[o], "."] for o in objects], rationales


def _ask_pair(colours: Sequence[str], rng: np.random.Generator) -> Drawn | None:
    one = int(rng.integers(len(colours)))
    same, others = _same_and_other(colours, one)
    if not same or len(others) < CHOICES - 1:
        return None
    two = _any(others, rng)
    first, second = colours[one], colours[two]
    wrong = [colour for colour in _wrong_colours(colours, first, rng) if colour != second]
    said = [(a, b) for a in (first, wrong[0]) for b in (second, wrong[1])]  # no half of an answer gives it away
    answers = [[[one], "is", a, "and", [two], "is", b, "."] for a, b in said]
    objects = [_any(same, rng), *_some(others, CHOICES - 1, rng)]
    rationales = [[[one], "has", "the", "colour", "of", [o], "."] for o in objects]
    return ["What", "colours", "are", [one, two], "?"], answers, rationales


def _same_and_other(colours: Sequence[str], one: int) -> tuple[list[int], list[int]]:
    """Objects of the same colour as one, itself left out, and of other colours."""
    same = [index for index, colour in enumerate(colours) if colour == colours[one] and index != one]
    return same, [index for index, colour in enumerate(colours) if colour != colours[one]]


def _wrong_colours(colours: Sequence[str], right: str, rng: np.random.Generator) -> list[str]:
    """Three other colours, those of the scene first: that a colour is there must not give the answer away."""
    present = [colour for colour in COLOURS if colour in colours and colour != right]
    absent = [colour for colour in COLOURS if colour not in colours]
    return [*_some(present, len(present), rng), *_some(absent, len(absent), rng)][: CHOICES - 1]


def _any(values: Sequence[Any], rng: np.random.Generator) -> Any:
    return values[int(rng.integers(len(values)))]


def _some(values: Sequence[Any], number: int, rng: np.random.Generator) -> list[Any]:
    return [values[int(index)] for index in rng.permutation(len(values))[:number]]


def as_read_aloud(sentence: Sentence) -> str:
    """A sentence as in the ``_orig`` fields, where objects are numbered from 1."""
    words = (t if isinstance(t, str) else " and ".join(str(number + 1) for number in t) for t in sentence)
    return " ".join(words)


def metadata_record(
    size: tuple[int, int], looks: Sequence[Look], boxes: Iterable[list[float]], outlines: Iterable[list[list[int]]]
) -> dict[str, Any]:
    """The content of an image's metadata file; ``attribute_ids``, as in ``coco``, are ours.

    Args:
        size: (height, width), pixels.
        looks: of the objects.
        boxes: [x, y, w, h] each, pixels; written as corners with a score.
        outlines: COCO polygons each, flat lists x, y, ...; written as lists of points.
    """
    return {
        "boxes": [[x, y, x + w, y + h, 1.0] for x, y, w, h in boxes],
        "segms": [[np.reshape(flat, (-1, 2)).tolist() for flat in parts] for parts in outlines],
        "names": [CLASS_OF[look.shape] for look in looks],
        "width": int(size[1]),
        "height": int(size[0]),
        "attribute_ids": [attribute_ids(look) for look in looks],
    }


class VCRWriter:
    """Collects the scenes of all splits and writes them."""

    def __init__(self) -> None:
        self._scenes: dict[str, list[tuple[Path, dict[str, Any], list[dict[str, Any]]]]] = {}

    def add(self, split: str, image: Path, record: dict[str, Any]) -> None:
        """A scene: its image file, and its record with "size", "objects" (look, box, area, outlines) and "vcr"."""
        looks, boxes, _, outlines = zip(*record["objects"], strict=True)
        metadata = metadata_record(record["size"], looks, boxes, outlines)
        self._scenes.setdefault(split, []).append((image, metadata, record["vcr"]))

    def write(self, output: Path) -> None:
        """Write everything under ``output / "vcr"``; image files that are there are replaced."""
        for split, scenes in self._scenes.items():
            folder = output / FOLDER / "vcr1images" / f"drawn_{split}"
            folder.mkdir(parents=True, exist_ok=True)
            lines: list[str] = []
            for number, (image, metadata, questions) in enumerate(scenes):
                name = f"{split}_{number:06d}@0"
                _link(image, folder / f"{name}{image.suffix}")
                (folder / f"{name}.json").write_text(json.dumps(metadata), encoding="utf-8")
                for position, question in enumerate(questions):
                    record = _line(question, split, number, position, len(lines), metadata["names"], folder.name, image)
                    lines.append(json.dumps(record))
            (output / FOLDER / f"{split}.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _line(
    drawn: dict[str, Any],
    split: str,
    number: int,
    position: int,
    index: int,
    objects: list[str],
    folder: str,
    image: Path,
) -> dict[str, Any]:
    """A line of a jsonl file, with VCR's keys."""
    file = f"{folder}/{split}_{number:06d}@0"
    answer, rationale = (drawn[f"{kind}_choices"][drawn[f"{kind}_label"]] for kind in ("answer", "rationale"))
    record = {
        "movie": "drawn_scenes",
        "objects": objects,
        "interesting_scores": [0],
        "answer_likelihood": "likely",
        "img_fn": f"{file}{image.suffix}",
        "metadata_fn": f"{file}.json",
        "answer_orig": as_read_aloud(answer),
        "question_orig": as_read_aloud(drawn["question"]),
        "rationale_orig": as_read_aloud(rationale),
        "question": drawn["question"],
        "answer_match_iter": list(range(CHOICES)),
        "answer_sources": [index] * CHOICES,
        "answer_choices": drawn["answer_choices"],
        "answer_label": drawn["answer_label"],
        "rationale_choices": drawn["rationale_choices"],
        "rationale_sources": [index] * CHOICES,
        "rationale_match_iter": list(range(CHOICES)),
        "rationale_label": drawn["rationale_label"],
        "img_id": f"{split}-{number}",
        "question_number": position,
        "annot_id": f"{split}-{index}",
        "match_fold": f"{split}-0",
        "match_index": index,
        "family": drawn["family"],
    }
    if split == UNLABELLED:
        record = {key: value for key, value in record.items() if key not in _HIDDEN}
    return record


def _link(source: Path, target: Path) -> None:
    """A hard link, or a copy where the disk has none."""
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
