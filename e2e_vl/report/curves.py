"""Losses and evaluations of a run over its steps, as one picture."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from e2e_vl.metric_names import MetricName

Line = dict[str, Any]  # of log.jsonl, see `e2e_vl.run_files.RunLog`
Series = dict[str, list[tuple[int, float]]]  # name -> (step, value)

TOTAL = "loss"  # the weighted sum that is minimised, and the metric of an evaluation that sums the losses
EVALUATION = "evaluation"
DETECTOR_PREFIX = "loss_"  # Detectron2's names of detection losses, which both detector backends use
# of a line about training; learning rates begin with "lr_"
OTHER_VALUES = ("step", "kind", "epoch", "grad_norm", "skipped_steps", "not_finite")
FEW_POINTS = 30  # curves of at most this many points show each of them


def draw_curves(lines: Sequence[Line]) -> bytes | None:
    """A PNG with one plot each for task losses, detector losses, their weighted sum, the evaluations, and their losses.

    A plot without values is left out. Evaluations of other images than the rest (the kind "final") are no points of a
    curve.

    Returns:
        The content of a PNG file; None if there is nothing to plot.
    """
    losses = _losses([line for line in lines if line["kind"] == "train"])
    evaluations = [line for line in lines if line["kind"] == "eval"]
    of_detector = {name: points for name, points in losses.items() if name.startswith(DETECTOR_PREFIX)}
    of_task = {name: points for name, points in losses.items() if name not in (*of_detector, TOTAL)}
    plots = {
        "losses of the task": of_task,
        "losses of the detector (not weighted)": of_detector,
        "weighted sum of all losses": {name: losses[name] for name in losses if name == TOTAL},
        EVALUATION: _evaluations(evaluations, of_loss=False),
        "loss of the evaluation": _evaluations(evaluations, of_loss=True),
    }
    plots = {title: series for title, series in plots.items() if series}
    if not plots:
        return None
    rows = (len(plots) + 1) // 2
    height = 3.6 * rows
    figure = Figure(figsize=(12, height), dpi=120)
    # places in inches: matplotlib's own layouts draw all texts twice more to measure them
    figure.subplots_adjust(left=0.05, right=0.99, bottom=0.5 / height, top=1 - 0.3 / height, wspace=0.12, hspace=0.28)
    for number, (title, series) in enumerate(plots.items(), start=1):
        _plot(figure.add_subplot(rows, min(len(plots), 2), number), title, series)
    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer)
    return buffer.getvalue()


def _losses(lines: Sequence[Line]) -> Series:
    series: Series = {}
    for line in lines:
        for name, value in line.items():
            # null: it was NaN or infinite
            if value is not None and name not in OTHER_VALUES and not name.startswith("lr_"):
                series.setdefault(name, []).append((line["step"], value))
    return dict(sorted(series.items()))


def _evaluations(lines: Sequence[Line], *, of_loss: bool) -> Series:
    """The metrics over all texts: losses, which have no upper end, or all others."""
    series: Series = {}
    for line in lines:
        for name, value in line.items():
            found = MetricName.read(name)
            if found is None or found.detail or not found.measures_model or value is None:
                continue
            if (found.metric == TOTAL) != of_loss:
                continue
            label = f"{found.split}: {found.metric.replace('_', ' ')}, {found.boxes}"
            series.setdefault(label, []).append((line["step"], value))
    return series


def _plot(axes: Axes, title: str, series: Series) -> None:
    for name, points in series.items():
        # the last evaluation may stand in the log twice: once between epochs, once at the end
        steps, values = zip(*dict(points).items(), strict=True)
        axes.plot(steps, values, label=name, linewidth=1.2, marker="." if len(steps) <= FEW_POINTS else None)
    values = [value for points in series.values() for _, value in points]
    if title == EVALUATION:
        axes.set_ylim(0, max(1.02, *values))
    elif min(values) > 0 and max(values) > 10 * min(values):
        axes.set_yscale("log")
    axes.set_title(title, fontsize=10, y=1)  # without y, matplotlib measures all texts to find it
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8)
