"""The figures of an analysis: accuracy of all heads by layer, for entities and for each relation."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from e2e_vl.analysis.attention_tables import AttentionResults
from e2e_vl.analysis.collect import CONFIDENCE, ENTITIES, LARGEST, RELATIONS, MeasureKey
from e2e_vl.analysis.measures import HeadSums

ACTIVE, INACTIVE = "#1f5fa8", "#b9cfe8"  # colours of active heads and of others
LINES = {CONFIDENCE: ("#b3261e", "--"), LARGEST: ("#8a5a00", "-."), "chance": ("#666666", ":")}
COLUMNS = 3  # panels side by side
LONGEST_LABEL = 28  # characters of a relation in a title


def draw_entity_figure(results: AttentionResults, graph: str) -> bytes:
    """Accuracy of entity grounding of each head by layer, as figure 3 of VisualBERT's ACL paper; a PNG file."""
    sums = results.of(graph, ENTITIES)
    figure = Figure(figsize=(max(6.5, 1.6 + 0.45 * len(sums.hits)), 4.2), layout="constrained", dpi=130)
    axes = figure.add_subplot()
    _panel(axes, results, MeasureKey(graph, ENTITIES))
    axes.set_title(f"Entity grounding, graph: {graph} ({sums.examples:,} entities)", fontsize=10)
    axes.set_ylabel("accuracy")
    axes.set_xlabel("layer")
    figure.legend(handles=_legend([sums]), loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return _png(figure)


def draw_relation_figure(results: AttentionResults, graph: str, measure: str = RELATIONS) -> bytes:
    """Accuracy of syntactic grounding of each head by layer, a panel per relation, as figure 4; a PNG file."""
    labels = results.relations[graph]
    columns = min(COLUMNS, len(labels))
    rows = math.ceil(len(labels) / columns)
    figure = Figure(figsize=(max(3.5 * columns, 6.5), 2.6 * rows + 0.8), layout="constrained", dpi=130)
    top = max(float(results.of(graph, measure, label).accuracy.max()) for label in labels)
    every = []
    for number, label in enumerate(labels):
        axes = figure.add_subplot(rows, columns, number + 1)
        sums = results.of(graph, measure, label)
        every.append(sums)
        _panel(axes, results, MeasureKey(graph, measure, label), top=top)
        short = label if len(label) <= LONGEST_LABEL else f"{label[: LONGEST_LABEL - 1]}…"
        axes.set_title(f"{short} ({sums.examples:,})", fontsize=9, parse_math=False)
        if number % columns == 0:
            axes.set_ylabel("accuracy", fontsize=8)
        if number >= len(labels) - columns:
            axes.set_xlabel("layer", fontsize=8)
    figure.legend(handles=_legend(every), loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return _png(figure)


def _panel(axes: Axes, results: AttentionResults, key: MeasureKey, top: float | None = None) -> None:
    """A point per head, light for inactive heads, with the number of the best active one; lines for baselines."""
    choices, place = results.choices, (key.graph, key.measure, key.label)
    sums, active, best = results.of(*place), results.active(*place), results.best_active(*place)
    layers, heads = sums.hits.shape
    for wanted, colour, order in ((False, INACTIVE, 1), (True, ACTIVE, 2)):
        places = [
            (layer, head) for layer in range(layers) for head in range(heads) if bool(active[layer, head]) is wanted
        ]
        x = [layer + choices.first_number + _spread(head, heads) for layer, head in places]
        y = [float(sums.accuracy[place]) for place in places]
        axes.scatter(x, y, s=14, color=colour, zorder=order + 2, linewidths=0, clip_on=False)
    for name in sums.baselines:
        colour, style = LINES[name]
        axes.axhline(sums.baseline(name), color=colour, linestyle=style, linewidth=1.2, zorder=0)
    highest = max(float(sums.accuracy.max()), *(sums.baseline(name) for name in sums.baselines), top or 0)
    axes.set_ylim(0, min(1.18 * highest, 1.12) if highest else 1)
    axes.set_xlim(choices.first_number - 0.6, choices.first_number + layers - 0.4)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25)
    if best is not None:
        at = best[0] + choices.first_number + _spread(best[1], heads)
        is_right = best[0] >= layers / 2
        axes.annotate(
            f"{choices.number(*best)}: {float(sums.accuracy[best]):.2f}",
            (at, float(sums.accuracy[best])),
            xytext=(-4 if is_right else 4, 4),
            textcoords="offset points",
            fontsize=8,
            ha="right" if is_right else "left",
            bbox={"boxstyle": "round,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.8},
        )


def _spread(head: int, heads: int) -> float:
    """A small step beside the layer, so that heads of one accuracy stay apart."""
    return 0.5 * (head / max(heads - 1, 1) - 0.5) if heads > 1 else 0.0


def _legend(every: Iterable[HeadSums]) -> list[Line2D]:
    """What points and lines mean."""
    points = [
        Line2D([], [], marker="o", linestyle="", markersize=5, color=colour, label=label)
        for colour, label in ((ACTIVE, "active head"), (INACTIVE, "inactive head"))
    ]
    names = dict.fromkeys(name for sums in every for name in sums.baselines)
    return points + [Line2D([], [], color=LINES[name][0], linestyle=LINES[name][1], label=name) for name in names]


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer)
    return buffer.getvalue()


def draw_word_map(title: str, words: Sequence[str], values: np.ndarray) -> bytes:
    """The attention among words of one head, rows attend to columns; a PNG file.

    Args:
        values: float [words, words].
    """
    side = max(3.2, 0.34 * len(words) + 1.4)
    figure = Figure(figsize=(side, side), layout="constrained", dpi=110)
    axes = figure.add_subplot()
    axes.imshow(values, cmap="Blues", vmin=0, vmax=max(float(values.max()), 1e-6))
    axes.set_xticks(range(len(words)), words, rotation=90, fontsize=8, parse_math=False)  # "$5" is no formula
    axes.set_yticks(range(len(words)), words, fontsize=8, parse_math=False)
    axes.set_title(title, fontsize=9, parse_math=False)
    axes.set_ylabel("attends", fontsize=8)
    return _png(figure)
