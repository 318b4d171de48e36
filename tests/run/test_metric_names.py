from __future__ import annotations

import pytest

from e2e_vl.config import BoxSource
from e2e_vl.run.metric_names import MetricName, choose_metric, metrics_from_json, metrics_to_json, name_metrics


def test_a_name_is_taken_apart_as_it_was_made():
    for source in BoxSource.for_evaluation():
        [metric] = name_metrics({"accuracy_by_question/yes/no": 1.0}, "val", source)
        name = f"val/accuracy_by_question_{source.metric_suffix}/yes/no"
        assert metric == MetricName("val", "accuracy_by_question", source, "yes/no") and str(metric) == name
        assert MetricName.read(name) == metric
        assert str(metric.whole) == name.removesuffix("/yes/no")
        [metric] = name_metrics({"AP50": 1.0}, "testA", source)
        assert MetricName.read(str(metric)) == metric


def test_what_was_not_measured_with_boxes_is_no_metric():
    names = ("seconds", "images_per_second", "val/loss", "val/own", "parameters")
    assert [MetricName.read(name) for name in names] == [None] * 5
    content = dict.fromkeys(names, 1.0)
    assert metrics_from_json({**content, "val/accuracy_gt_boxes": 0.5}) == {
        MetricName("val", "accuracy", BoxSource.GT): 0.5
    }


def test_metrics_are_written_and_read_by_name():
    metrics = name_metrics({"accuracy": 0.5, "accuracy/yes/no": None}, "val", BoxSource.ONLINE)
    content = metrics_to_json(metrics)
    assert content == {"val/accuracy_predicted_boxes": 0.5, "val/accuracy_predicted_boxes/yes/no": None}
    assert metrics_from_json(content) == metrics


def test_what_training_cannot_change():
    names = {
        "val/count_predicted_boxes": True,
        "val/ceiling_gt_boxes/relation": True,
        "val/best_shortcut_predicted_boxes/largest object": True,
        "val/sure_threshold_predicted_boxes": True,
        "val/ceiling_predicted_boxes": False,
        "val/accuracy_gt_boxes": False,
    }
    assert {name: MetricName.read(name).is_constant for name in names} == names
    unlike_models = ("ceiling_predicted_boxes", "best_shortcut_gt_boxes/relation/largest", "sure_threshold_gt_boxes")
    for name in (f"val/{metric}" for metric in unlike_models):
        assert not MetricName.read(name).measures_model
    assert MetricName.read("val/count_predicted_boxes").boxes == "predicted boxes"


def test_a_setting_names_a_metric_that_training_changes():
    metrics = metrics_from_json({"val/accuracy_gt_boxes": 0.5, "val/count_gt_boxes": 6.0, "val/ceiling_gt_boxes": 1.0})
    for name in ("val/count_gt_boxes", "val/ceiling_gt_boxes", "val/accuracy_predicted_boxes", "accuracy"):
        with pytest.raises(ValueError, match=r"there is val/accuracy_gt_boxes"):
            choose_metric(name, metrics, "setting")
    for name in ("val/accuracy_gt_boxes", "val/accuracy_gt_boxes/relation"):  # a family may be missing in a part
        assert str(choose_metric(name, metrics, "setting")) == name
    loss = metrics_from_json({"val/loss_gt_boxes": 0.5})
    assert choose_metric("val/loss_gt_boxes", loss, "setting").is_loss
    with pytest.raises(ValueError, match="there is val/loss_gt_boxes; did you mean 'val/loss_gt_boxes'"):
        choose_metric("val/loss_gt_boxes/relation", loss, "setting")
