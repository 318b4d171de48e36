"""Accuracy and consistency of NLVR2 by hand."""

from __future__ import annotations

import pytest

from e2e_vl.metrics.nlvr2 import NLVR2Prediction, group_of, truth_metrics, truth_scores, write_submission


def prediction(identifier: str, answer: str = "True", label: str | None = None) -> NLVR2Prediction:
    return NLVR2Prediction(identifier=identifier, prediction=answer, score=0.5, true=0.5, label=label)


def test_groups_leave_the_pair_out():
    assert group_of("dev-850-2-0") == group_of("dev-850-0-0") == "dev-850-0" != group_of("dev-850-2-1")


def test_consistency_asks_for_all_of_a_group():
    labels = {"dev-1-0-0": "True", "dev-1-1-0": "False", "dev-1-0-1": "True"}
    scores = truth_scores(labels, {"dev-1-0-0": "tRUE", "dev-1-1-0": "True", "dev-1-0-1": "true", "dev-9-9-9": "x"})
    assert scores == {"accuracy": pytest.approx(2 / 3), "consistency": 0.5}
    assert truth_scores({"dev-1-0-0": "True"}, {"dev-1-0-0": " True"})["accuracy"] == 0, "nothing is stripped"


def test_metrics_and_the_file_of_the_script(tmp_path):
    ours = [prediction("dev-1-0-0", "True", "True"), prediction("dev-1-1-0", "True", "False")]
    metrics = truth_metrics(ours)
    assert metrics == {"count": 2, "accuracy": 0.5, "consistency": 0, "accuracy/true": 1, "accuracy/false": 0}
    assert truth_metrics([prediction("dev-1-0-0")]) == {"count": 1}
    write_submission(tmp_path / "deep" / "p.csv", ours)
    assert (tmp_path / "deep" / "p.csv").read_text() == "dev-1-0-0,True\ndev-1-1-0,True\n"
