"""Flickr30K Entities: what is read and dropped, which candidates are right, and the recalls, as in BAN's code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from e2e_vl.data.flickr30k import AnnotatedImage, read_annotation, read_sentences
from e2e_vl.metrics.flickr30k import (
    RECALLS,
    Flickr30KPrediction,
    correct_candidates,
    first_hit,
    phrase_metrics,
    recalls,
)
from tests.parity.evaluation_common import folder_of, read_optional


@pytest.fixture(scope="module")
def entities_folder(golden_root: Path) -> Path:
    return folder_of(golden_root, "flickr30k")


@pytest.fixture(scope="module")
def entities_expected(entities_folder: Path) -> dict:
    return load(entities_folder, "expected.json")


@pytest.fixture(scope="module")
def images(entities_folder: Path) -> dict[str, AnnotatedImage]:
    names = (entities_folder / "images.txt").read_text("utf-8").split()
    return {name: read_annotation(entities_folder / "Annotations" / f"{name}.xml") for name in names}


@pytest.fixture(scope="module")
def phrases(entities_folder: Path, images) -> dict[tuple[str, int, int], dict[str, Any]]:
    """Every phrase with boxes: its types, which candidates are right, and the rank of the best one."""
    candidates = load(entities_folder, "candidates.json")["images"]
    scores = {
        (row["image"], row["sentence"], row["phrase"]): row["scores"]
        for row in load(entities_folder, "phrase_scores.json")["rows"]
    }
    found = {}
    for name, annotated in images.items():
        for line, sentence in enumerate(read_sentences(entities_folder / "Sentences" / f"{name}.txt")):
            for number, phrase in enumerate(sentence.phrases):
                boxes = annotated.boxes_of(phrase.chain)
                if len(boxes):
                    is_correct = correct_candidates(candidates[name]["boxes"], boxes)
                    rank = first_hit(scores[name, line, number], is_correct)
                    found[name, line, number] = {"types": list(phrase.types), "is_correct": is_correct, "rank": rank}
    assert set(found) == set(scores)
    return found


def load(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text("utf-8"))


def test_entities_phrases_of_every_sentence(entities_folder, images):
    for name, recorded in read_optional(entities_folder, "expected_parse.json")["images"].items():
        sentences = read_sentences(entities_folder / "Sentences" / f"{name}.txt")
        assert [sentence.words for sentence in sentences] == [row["sentence"] for row in recorded["sentences"]]
        for sentence, row in zip(sentences, recorded["sentences"], strict=True):
            assert len(sentence.phrases) == len(row["phrases"])
            for phrase, expected in zip(sentence.phrases, row["phrases"], strict=True):
                first, end = phrase.span
                assert sentence.words[first:end] == expected["phrase"]
                assert len(sentence.words[:first].split()) == expected["first_word_index"]
                assert (phrase.chain, list(phrase.types)) == (expected["phrase_id"], expected["phrase_type"])


def test_entities_boxes_of_every_image(entities_folder, images):
    """The official parser counts pixels from 0, the file from 1."""
    for name, recorded in read_optional(entities_folder, "expected_parse.json")["images"].items():
        annotated, expected = images[name], recorded["annotation_zero_based"]
        assert annotated.size == (expected["height"], expected["width"])
        chains = {chain for _, names in zip(annotated.boxes, annotated.names, strict=True) for chain in names}
        assert chains == set(expected["boxes"])
        for chain, boxes in expected["boxes"].items():
            assert (annotated.boxes_of(chain) - 1).tolist() == boxes
        for chain in (*expected["scene"], *expected["nobox"]):
            assert chain in expected["boxes"] or not len(annotated.boxes_of(chain))


def test_entities_every_phrase(entities_expected, phrases):
    columns, rows = entities_expected["per_phrase_columns"], entities_expected["per_phrase"]
    assert len(rows) == len(phrases) == entities_expected["metrics"]["phrases"]
    for row in rows:
        expected = dict(zip(columns, row, strict=True))
        ours = phrases[expected["image"], expected["sentence"], expected["phrase"]]
        assert ours["types"] == expected["types"]
        assert np.flatnonzero(ours["is_correct"]).tolist() == expected["matching_candidates"]
        for k in RECALLS:
            assert (ours["rank"] is not None and ours["rank"] < k) == expected[f"hit@{k}"]


def test_entities_recalls(entities_expected, phrases):
    ours = recalls([phrase["rank"] for phrase in phrases.values()])
    for name, value in entities_expected["metrics"].items():
        if name != "phrases":
            assert ours[name] == pytest.approx(value, abs=1e-12), name
    for kind, expected in entities_expected["per_type_re_derived"].items():
        own = [phrase["rank"] for phrase in phrases.values() if kind in phrase["types"]]
        assert len(own) == expected["phrases"]
        for k in RECALLS:
            assert recalls(own)[f"R@{k}"] == pytest.approx(expected[f"R@{k}"], abs=1e-12)


def test_entities_metrics_of_a_run_are_the_same_numbers(entities_expected, phrases):
    sentences: dict[tuple[str, int], list[dict]] = {}
    for (name, line, _), phrase in phrases.items():
        sentences.setdefault((name, line), []).append(phrase)
    assert len(sentences) == entities_expected["captions_with_a_boxed_phrase"]
    records = [
        Flickr30KPrediction(
            phrases=[""] * len(own),
            boxes=[None] * len(own),
            scores=[0.0] * len(own),
            ranks=[one["rank"] for one in own],
            phrase_types=[one["types"] for one in own],
        )
        for own in sentences.values()
    ]
    metrics, expected = phrase_metrics(records), entities_expected["metrics"]
    names = {"accuracy": "R@1", "recall_5": "R@5", "recall_10": "R@10", "ceiling": "upper_bound"}
    assert all(metrics[ours] == pytest.approx(expected[name], abs=1e-12) for ours, name in names.items())
    for kind, expected in entities_expected["per_type_re_derived"].items():
        assert metrics[f"accuracy_by_type/{kind}"] == pytest.approx(expected["R@1"], abs=1e-12)
