"""The VCR files of synthetic scenes: official layout, true and false sentences as they should be."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import cv2
import numpy as np
import pytest

from e2e_vl.synthetic.base import ATTRIBUTES
from e2e_vl.synthetic.config import COLOURS
from e2e_vl.synthetic.vcr import CLASS_OF, as_read_aloud
from tests.synthetic.meaning import SPLITS


@pytest.fixture(scope="module")
def folder(synthetic_folder) -> Path:
    return synthetic_folder / "vcr"


@pytest.fixture(scope="module")
def lines(folder) -> list[dict]:
    return read(folder, "train")


def read(folder: Path, split: str) -> list[dict]:
    return [json.loads(line) for line in (folder / f"{split}.jsonl").read_text("utf-8").splitlines()]


def metadata_of(folder: Path, line: dict) -> dict:
    return json.loads((folder / "vcr1images" / line["metadata_fn"]).read_text("utf-8"))


def test_layout(folder, lines):
    assert [line["annot_id"] for line in lines] == [f"train-{number}" for number in range(len(lines))]
    assert len({line["img_fn"] for line in lines}) > 0.3 * SPLITS["train"]
    for line in lines[::7]:
        file = folder / "vcr1images" / line["img_fn"]
        metadata = metadata_of(folder, line)
        assert cv2.imread(str(file)).shape[:2] == (metadata["height"], metadata["width"])
        assert metadata["names"] == line["objects"]
        assert len(metadata["boxes"]) == len(metadata["segms"]) == len(line["objects"])
        for (x1, y1, x2, y2, score), parts in zip(metadata["boxes"], metadata["segms"], strict=True):
            points = np.concatenate([np.array(part) for part in parts])
            assert points.min(axis=0).tolist() == [x1, y1]
            assert points.max(axis=0).tolist() == [x2, y2]
            assert 0 < score <= 1


def test_keys_are_those_of_the_release(folder, lines, golden_root):
    official = json.loads((golden_root / "evaluation" / "vcr" / "val.jsonl").read_text("utf-8").splitlines()[0])
    assert set(lines[0]) == {*official, "family"}
    for key, value in official.items():
        assert type(lines[0][key]) is type(value), key
    unlabelled = read(folder, "test")[0]
    assert {"question", "answer_choices", "rationale_choices", "objects", "img_fn", "annot_id"} <= set(unlabelled)
    secret = ("label", "sources", "match", "answer_orig", "rationale_orig")
    assert not any(word in key for key in unlabelled for word in secret)


def is_true(sentence: list, question: list, colours: list[str]) -> bool:
    """Whether a choice is right, from the words and the colours of the objects."""
    asked = [colours[number] for token in question if isinstance(token, list) for number in token]
    named = [colours[token[0]] for token in sentence if isinstance(token, list)]
    said = [token for token in sentence if token in COLOURS]
    if said:
        return said == asked[: len(said)] and len(said) == (len(asked) if "They" in sentence else 1)
    return named == asked[:1] if named else colours.count(asked[0]) == 1


def test_exactly_the_labelled_choices_are_true(folder, lines):
    names = {entry["id"]: entry["name"] for entry in ATTRIBUTES}
    for line in lines:
        colours = [names[ids[0]] for ids in metadata_of(folder, line)["attribute_ids"]]
        for kind in ("answer", "rationale"):
            truth = [is_true(choice, line["question"], colours) for choice in line[f"{kind}_choices"]]
            assert [number for number, right in enumerate(truth) if right] == [line[f"{kind}_label"]], line
            assert len({json.dumps(choice) for choice in line[f"{kind}_choices"]}) == 4
            asked = next(token for token in line["question"] if isinstance(token, list))[0]
            assert not any([asked] in choice for choice in line[f"{kind}_choices"])


def test_labels_families_and_names_are_mixed(lines):
    for kind in ("answer", "rationale"):
        counts = Counter(line[f"{kind}_label"] for line in lines)
        assert min(counts[number] for number in range(4)) > 0.15 * len(lines)
    families = Counter(line["family"] for line in lines)
    assert set(families) == {"colour", "match", "pair"}
    assert min(families.values()) > 0.2 * len(lines)
    assert {name for line in lines for name in line["objects"]} == set(CLASS_OF.values())
    assert any(len(token) > 1 for line in lines for token in line["question"] if isinstance(token, list))
    assert as_read_aloud(["Why", [0], "and", [1, 2], "?"]) == "Why 1 and 2 and 3 ?"
