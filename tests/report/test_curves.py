from __future__ import annotations

from collections.abc import Sequence

import cv2
import numpy as np
import pytest
from matplotlib.axes import Axes

from e2e_vl.run import report as curves

LINES = [
    {
        "step": 1,
        "kind": "train",
        "epoch": 0.1,
        "loss": 3.0,
        "loss_cls": 1.0,
        "vqa": 2.0,
        "grad_norm": 9.0,
        "lr_head": 1.0,
    },
    {
        "step": 2,
        "kind": "train",
        "epoch": 0.2,
        "loss": 2.0,
        "loss_cls": 0.5,
        "vqa": 0.0,
        "grad_norm": 9.0,
        "lr_head": 1.0,
    },
    {
        "step": 2,
        "kind": "eval",
        "val/accuracy_gt_boxes": 0.5,
        "val/count_gt_boxes": 40.0,
        "val/AP_predicted_boxes": None,
    },
    {"step": 2, "kind": "eval", "val/accuracy_gt_boxes": 0.25, "val/accuracy_gt_boxes/relation": 0.1},
    {"step": 2, "kind": "final", "val/accuracy_gt_boxes": 0.75},  # of other images
]


@pytest.fixture
def plots(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[str, dict[str, tuple[list, list]]]]:
    """Title -> (scale of the y axis, points of each line by its label), filled as plots are drawn."""
    found = {}
    draw = curves._plot

    def spy(axes: Axes, title: str, series: curves.Series) -> None:
        draw(axes, title, series)
        lines = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}
        found[title] = (axes.get_yscale(), lines)

    monkeypatch.setattr(curves, "_plot", spy)
    return found


def test_losses_are_grouped_and_their_sum_is_apart(plots):
    picture = cv2.imdecode(np.frombuffer(curves.draw_curves(LINES), np.uint8), 1)
    assert picture.shape[1] > 1000 and picture.std() > 5
    assert {title: lines for title, (_, lines) in plots.items()} == {
        "losses of the task": {"vqa": ([1, 2], [2.0, 0.0])},
        "losses of the detector (not weighted)": {"loss_cls": ([1, 2], [1.0, 0.5])},
        "weighted sum of all losses": {"loss": ([1, 2], [3.0, 2.0])},
        "evaluation": {"val: accuracy, gt boxes": ([2], [0.25])},  # the last one of a step counts
    }


def test_losses_of_evaluations_have_axes_of_their_own(plots):
    """They would press accuracies flat, or lie outside of their axes."""
    evaluations = [
        {"step": step, "kind": "eval", "val/accuracy_gt_boxes": 0.1 * step, "val/loss_gt_boxes": loss}
        for step, loss in ((1, 40.0), (2, 2.0))
    ]
    curves.draw_curves(evaluations)
    assert plots == {
        "evaluation": ("linear", {"val: accuracy, gt boxes": ([1, 2], [0.1, 0.2])}),
        "loss of the evaluation": ("log", {"val: loss, gt boxes": ([1, 2], [40.0, 2.0])}),
    }
    assert curves.draw_curves(evaluations[:1]) is not None


@pytest.mark.parametrize(("values", "scale"), [([100.0, 1.0], "log"), ([2.0, 1.0], "linear"), ([100.0, 0.0], "linear")])
def test_a_wide_range_of_losses_has_a_logarithmic_axis(plots, values: Sequence[float], scale: str):
    curves.draw_curves([{"step": step, "kind": "train", "x": value} for step, value in enumerate(values)])
    assert plots["losses of the task"][0] == scale


def test_without_values_there_is_no_picture():
    assert curves.draw_curves([]) is None
    assert curves.draw_curves([{"step": 1, "kind": "eval", "val/accuracy_gt_boxes": None}]) is None


def test_what_is_no_loss_or_no_number_is_no_point(plots):
    curves.draw_curves(
        [
            {"step": 1, "kind": "train", "vqa": None, "not_finite": ["vqa"], "skipped_steps": 1.0},
            {"step": 2, "kind": "train", "vqa": 2.0, "skipped_steps": 0.5},
        ]
    )
    assert {title: lines for title, (_, lines) in plots.items()} == {"losses of the task": {"vqa": ([2], [2.0])}}
    nothing = [{"step": 1, "kind": "train", "vqa": None, "not_finite": ["vqa"]}]
    assert curves.draw_curves(nothing) is None
