"""Recalls of Flickr30K Entities by hand."""

from __future__ import annotations

import json

import numpy as np

from e2e_vl.metrics.flickr30k import (
    Flickr30KPrediction,
    correct_candidates,
    first_hit,
    phrase_metrics,
    recalls,
    write_submission,
)


def prediction(**more) -> Flickr30KPrediction:
    base = {"phrases": ["a", "b"], "boxes": [[0, 0, 1, 1], None], "scores": [0.5, 0.0]}
    return Flickr30KPrediction.from_record(base | more)


def test_any_box_of_a_phrase_may_be_hit_and_boxes_are_not_merged():
    boxes = [[0, 0, 10, 10], [20, 0, 30, 10]]
    candidates = [[0, 0, 30, 10], [0, 0, 10, 5], [0, 0, 10, 4.9], [21, 0, 31, 10], [5, 5, 5, 5]]
    assert correct_candidates(candidates, boxes).tolist() == [False, True, False, True, False]
    assert correct_candidates(np.zeros((0, 4)), boxes).tolist() == []


def test_ranks():
    assert first_hit([0.5, 0.5], [False, True]) == 1, "of equal scores the first is taken first"
    assert first_hit([0.1], [False]) is None and first_hit([], []) is None


def test_recall_at_k_counts_the_first_k_candidates():
    """Ranks count from 0, so the fifth candidate has rank 4."""
    assert recalls([0, 1, 4, 5, 9, 10, None, None]) == {"R@1": 1 / 8, "R@5": 3 / 8, "R@10": 5 / 8, "upper_bound": 6 / 8}
    metrics = phrase_metrics([prediction(ranks=[0, 4], phrase_types=[["people"], ["people"]])])
    assert (metrics["accuracy"], metrics["recall_5"], metrics["accuracy_by_type/people"]) == (0.5, 1, 0.5)


def test_phrases_with_several_types_count_for_each():
    predictions = [prediction(ranks=[0, None], phrase_types=[["people", "other"], ["other"]]), prediction()]
    metrics = phrase_metrics(predictions)
    assert (metrics["accuracy"], metrics["accuracy_by_type/people"], metrics["accuracy_by_type/other"]) == (0.5, 1, 0.5)
    assert phrase_metrics(predictions[1:]) == {"count": 1}


def test_the_file_has_every_phrase(tmp_path):
    path = tmp_path / "deep" / "phrases.json"
    write_submission(path, [prediction(image_id="7", sentence=2, phrase_ids=["11", "0"])])
    phrases = [
        {"id": "11", "phrase": "a", "box": [0, 0, 1, 1], "score": 0.5},
        {"id": "0", "phrase": "b", "box": None, "score": 0},
    ]
    assert json.loads(path.read_text()) == [{"image": "7", "sentence": 2, "phrases": phrases}]
