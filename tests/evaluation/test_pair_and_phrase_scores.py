"""Scores of NLVR2 and Flickr30K Entities by hand, and files of predictions."""

from __future__ import annotations

import numpy as np
import pytest

from e2e_vl.metrics.flickr30k import first_hit, phrase_metrics, recalls, right_candidates
from e2e_vl.metrics.nlvr2 import group_of, read_predictions, truth_metrics, truth_scores


def test_groups_leave_the_pair_out():
    assert group_of("dev-850-2-0") == group_of("dev-850-0-0") == "dev-850-0" != group_of("dev-850-2-1")
    with pytest.raises(ValueError, match="'dev-1' is not split-set-pair-sentence"):
        group_of("dev-1")


def test_consistency_asks_for_all_of_a_group():
    labels = {"dev-1-0-0": "True", "dev-1-1-0": "False", "dev-1-0-1": "True"}
    scores = truth_scores(labels, {"dev-1-0-0": "tRUE", "dev-1-1-0": "True", "dev-1-0-1": "true", "dev-9-9-9": "x"})
    assert scores == {"accuracy": pytest.approx(2 / 3), "consistency": 0.5}
    assert truth_scores({"dev-1-0-0": "True"}, {"dev-1-0-0": " True"})["accuracy"] == 0, "nothing is stripped"
    with pytest.raises(ValueError, match="example dev-1-0-0 has no prediction"):
        truth_scores(labels, {})
    with pytest.raises(ValueError, match="no labelled example"):
        truth_scores({}, {})
    assert truth_metrics([{"identifier": "dev-1-0-0", "prediction": "True"}]) == {"count": 1}


def test_files_of_predictions_are_read_as_the_script_reads_them(tmp_path):
    path = tmp_path / "p.csv"
    path.write_text("dev-1-0-0,True,0.9\ndev-1-0-1, False\ndev-1-0-0,False")
    assert read_predictions(path) == {"dev-1-0-0": "False", "dev-1-0-1": " False"}
    path.write_text("dev-1-0-0,True\n\n")
    with pytest.raises(ValueError, match=r"p\.csv, line 2: expected identifier,True"):
        read_predictions(path)
    with pytest.raises(FileNotFoundError, match="no such file of predictions"):
        read_predictions(tmp_path / "none.csv")


def test_any_box_of_a_phrase_may_be_hit_and_boxes_are_not_merged():
    boxes = [[0, 0, 10, 10], [20, 0, 30, 10]]
    candidates = [[0, 0, 30, 10], [0, 0, 10, 5], [0, 0, 10, 4.9], [21, 0, 31, 10], [5, 5, 5, 5]]
    assert right_candidates(candidates, boxes).tolist() == [False, True, False, True, False]
    assert right_candidates(candidates, np.zeros((0, 4))).tolist() == [False] * 5
    assert right_candidates(np.zeros((0, 4)), boxes).tolist() == []


def test_ranks_and_recalls():
    assert first_hit([0.1, 0.9, 0.5], [True, False, True]) == 1
    assert first_hit([0.5, 0.5], [False, True]) == 1, "of equal scores the first is taken first"
    assert first_hit([0.1], [False]) is None and first_hit([], []) is None
    assert recalls([0, 4, 9, None]) == {"R@1": 0.25, "R@5": 0.5, "R@10": 0.75, "upper_bound": 0.75}


def test_phrases_with_several_types_count_for_each():
    records = [{"ranks": [0, None], "phrase_types": [["people", "other"], ["other"]]}, {"ranks": None}]
    metrics = phrase_metrics(records)
    assert (metrics["accuracy"], metrics["accuracy_by_type/people"], metrics["accuracy_by_type/other"]) == (0.5, 1, 0.5)
    assert phrase_metrics(records[1:]) == {"count": 1}
