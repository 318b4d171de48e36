"""Names of metrics are taken apart as they were made."""

from __future__ import annotations

from e2e_vl.config import BoxSource
from e2e_vl.run.evaluate import MetricName, named_metrics


def test_a_name_is_taken_apart_as_it_was_made():
    for source in BoxSource.for_evaluation():
        [name] = named_metrics({"accuracy_by_question/yes/no": 1.0}, "val", source)
        assert name == f"val/accuracy_by_question_{source.metric_suffix}/yes/no"
        found = MetricName.read(name)
        assert found == MetricName("val", "accuracy_by_question", source, "yes/no") and str(found) == name
        assert str(found.whole) == name.removesuffix("/yes/no")
        [name] = named_metrics({"AP50": 1.0}, "testA", source)
        assert MetricName.read(name) == MetricName("testA", "AP50", source)


def test_what_was_not_measured_with_boxes_is_no_metric():
    assert [MetricName.read(name) for name in ("seconds", "images_per_second", "val/loss", "val/own")] == [None] * 4


def test_what_training_cannot_change():
    names = {
        "val/count_predicted_boxes": True,
        "val/ceiling_gt_boxes/relation": True,
        "val/ceiling_predicted_boxes": False,
        "val/accuracy_gt_boxes": False,
    }
    assert {name: MetricName.read(name).is_constant for name in names} == names
    assert not MetricName.read("val/ceiling_predicted_boxes").measures_model
    assert MetricName.read("val/count_predicted_boxes").boxes == "predicted boxes"
