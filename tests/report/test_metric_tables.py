from __future__ import annotations

from e2e_vl.config import BoxSource
from e2e_vl.metrics.names import named_metrics
from e2e_vl.run.report import MetricTable, metric_tables


def test_metrics_become_tables_of_box_sources_and_families():
    metrics = {
        **named_metrics({"count": 5.0, "accuracy": 0.8, "accuracy/relation": 0.5}, "val", BoxSource.GT),
        **named_metrics({"accuracy": 0.7, "count": 5.0, "accuracy/by_place": None}, "val", BoxSource.ONLINE),
        **named_metrics({"accuracy": 0.1}, "testA", BoxSource.GT),
        "steps": 8,
    }
    both = ["gt boxes", "predicted boxes"]
    assert metric_tables(metrics) == [
        MetricTable("val", both, {"accuracy": [0.8, 0.7], "count": [5.0, 5.0]}),
        MetricTable("val: accuracy", both, {"all": [0.8, 0.7], "relation": [0.5, None], "by place": [None, None]}),
        MetricTable("testA", ["gt boxes"], {"accuracy": [0.1]}),
    ]


def test_a_metric_that_has_families_only_has_no_row_for_all():
    metrics = named_metrics({"accuracy_by_question/how many": 0.25}, "val", BoxSource.GT)
    assert metric_tables(metrics)[-1] == MetricTable("val: accuracy by question", ["gt boxes"], {"how many": [0.25]})
