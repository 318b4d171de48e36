"""Writer of VCR: questions about drawn scenes with four answers and four reasons each.

    train.jsonl, val.jsonl, ...                      one question per line; "test" has no labels
    vcr1images/drawn_<split>/<split>_000001@0.jpg    the scene's image, a hard link where the disk has hard links
    vcr1images/drawn_<split>/<split>_000001@0.json   boxes, outlines and class names of its objects

Sentences name objects by number, and what is asked about an object is its colour, which neither its class nor its box
tells: the image is needed. Wrong choices name colours or objects of the same scene: the question is needed too.

A line's `family` is ours, the other keys are VCR's:

    colour   What colour is [2] ?              It is red .                         It has the colour of [0] .
    match    Which has the colour of [2] ?     [0] .                               Both are red .
    pair     What colours are [2, 1] ?         [2] is red and [1] is blue .        [2] has the colour of [0] .
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

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
_Asked = tuple[Sentence, list[Sentence], list[Sentence]]  # question; answers and rationales, the right ones first
_Question = dict[str, Any]


class VCRWriter(FormatWriter):
    """Writes the files listed at the top; image files of an interrupted run are replaced."""

    def draw(self, scene: SceneRecord, graph: SceneGraph) -> list[_Question]:
        """Up to `_MAX_QUESTIONS` different questions.

        Returns:
            dicts of "family", "question", and "answer_choices", "answer_label", "rationale_choices" and
            "rationale_label", the right choice at a random place.
        """
        rng, families = self.recipe.generator(scene.split, scene.number, "vcr"), self.recipe.language.vcr_families
        colours = [appearance.colour for appearance in graph.appearances]
        found: dict[str, _Question] = {}
        for attempt in range(_ATTEMPTS):
            if len(found) == _MAX_QUESTIONS:
                break
            family = families[attempt % len(families)]
            one = int(rng.integers(len(colours)))
            asked = _ask(family, colours, one, rng)
            if asked is None or json.dumps(asked[0]) in found:
                continue
            question, answers, rationales = asked
            record: _Question = {"family": family, "question": question}
            for kind, choices in (("answer", answers), ("rationale", rationales)):
                order = rng.permutation(CHOICES)
                record[f"{kind}_choices"] = [choices[index] for index in order]
                record[f"{kind}_label"] = int(np.argmin(order))
            found[json.dumps(question)] = record
        return list(found.values())

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


def _ask(family: str, colours: Sequence[str], one: int, rng: np.random.Generator) -> _Asked | None:
    """Make a question about an object; None if too few objects have its colour or another one."""
    first = colours[one]
    same = [index for index, colour in enumerate(colours) if colour == first and index != one]
    others = [index for index, colour in enumerate(colours) if colour != first]
    wrong = _wrong_colours(colours, first, rng) if family == "colour" else []
    if not same or len(others) < CHOICES - 1:
        return None
    two = _any(others, rng) if family == "pair" else None
    if family == "pair":
        wrong = [colour for colour in _wrong_colours(colours, first, rng) if colour != colours[two]]
    objects = [_any(same, rng), *_some(others, CHOICES - 1, rng)]
    if family == "colour":
        answers = [["It", "is", colour, "."] for colour in (first, *wrong)]
        rationales = [["It", "has", "the", "colour", "of", [o], "."] for o in objects]
        return ["What", "colour", "is", [one], "?"], answers, rationales
    if family == "match":
        wrong = _wrong_colours(colours, first, rng)
        rationales = [["Both", "are", colour, "."] for colour in (first, *wrong)]
        return ["Which", "has", "the", "colour", "of", [one], "?"], [[[o], "."] for o in objects], rationales
    # neither half of an answer reveals it
    said = [(a, b) for a in (first, wrong[0]) for b in (colours[two], wrong[1])]
    answers = [[[one], "is", a, "and", [two], "is", b, "."] for a, b in said]
    rationales = [[[one], "has", "the", "colour", "of", [o], "."] for o in objects]
    return ["What", "colours", "are", [one, two], "?"], answers, rationales


def _wrong_colours(colours: Sequence[str], right: str, rng: np.random.Generator) -> list[str]:
    """Three other colours, preferably in the scene, so that a colour's presence does not reveal the answer."""
    present = [colour for colour in COLOURS if colour in colours and colour != right]
    absent = [colour for colour in COLOURS if colour not in colours]
    return [*_some(present, len(present), rng), *_some(absent, len(absent), rng)][: CHOICES - 1]


def _any(values: Sequence[Any], rng: np.random.Generator) -> Any:
    return values[int(rng.integers(len(values)))]


def _some(values: Sequence[Any], number: int, rng: np.random.Generator) -> list[Any]:
    return [values[int(index)] for index in rng.permutation(len(values))[:number]]


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
