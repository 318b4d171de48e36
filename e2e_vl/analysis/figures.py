"""The figures of an analysis: accuracy of each head by layer, and pictures of attention."""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from PIL import Image

from detector.errors import UserError
from detector.images import load_image
from e2e_vl.analysis.collect import (
    ALL,
    CONFIDENCE,
    DEPENDENCIES,
    ENTITIES,
    GROUPING,
    LARGEST,
    NEEDS,
    MeasureKey,
    RecordedText,
    choose_queries,
)
from e2e_vl.analysis.measures import attention_from
from e2e_vl.analysis.options import AttentionOptions, parse_head
from e2e_vl.analysis.tables import AttentionResults
from e2e_vl.drawing import BLUE, GREEN, RED, draw_boxes, draw_heat_map
from e2e_vl.structures import AttentionBlock, AttentionGraph

ACTIVE, INACTIVE = "#1f5fa8", "#b9cfe8"  # colours of active heads and of others
LINES = {CONFIDENCE: ("#b3261e", "--"), LARGEST: ("#8a5a00", "-."), "chance": ("#666666", ":")}
COLUMNS = 3  # panels side by side
LONGEST_LABEL = 28  # characters of a relation in a title


def draw_head_figure(results: AttentionResults, graph: str, measure: str, labels: Sequence[str] = (ALL,)) -> bytes:
    """Plot each head's accuracy by layer (VisualBERT's ACL paper, figures 3 and 4), one panel per label, as PNG."""
    columns = min(COLUMNS, len(labels))
    rows = math.ceil(len(labels) / columns)
    figure = Figure(figsize=(max(3.5 * columns, 7), 2.6 * rows + 0.8), layout="constrained", dpi=130)
    every = [results.of(graph, measure, label) for label in labels]
    top = max(float(sums.accuracy.max()) for sums in every)
    for number, (label, sums) in enumerate(zip(labels, every, strict=True)):
        axes = figure.add_subplot(rows, columns, number + 1)
        _panel(axes, results, MeasureKey(graph, measure, label), top)
        title = label or f"{measure}, graph: {graph}"
        short = title if len(labels) == 1 or len(title) <= LONGEST_LABEL else f"{title[: LONGEST_LABEL - 1]}…"
        axes.set_title(f"{short} ({sums.examples:,})", fontsize=9, parse_math=False)
        if number % columns == 0:
            axes.set_ylabel("accuracy", fontsize=8)
        if number >= len(labels) - columns:
            axes.set_xlabel("layer", fontsize=8)
    handles = [
        Line2D([], [], marker="o", linestyle="", markersize=5, color=colour, label=label)
        for colour, label in ((ACTIVE, "active head"), (INACTIVE, "inactive head"))
    ]
    names = dict.fromkeys(name for sums in every for name in sums.baselines)
    handles += [Line2D([], [], color=LINES[name][0], linestyle=LINES[name][1], label=name) for name in names]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return _png(figure)


def _panel(axes: Axes, results: AttentionResults, key: MeasureKey, top: float) -> None:
    """One point per head (light if inactive), a label on the best active head, and a line per baseline."""
    options, place = results.options, (key.graph, key.measure, key.label)
    sums, active, best = results.of(*place), results.active(*place), results.best_active(*place)
    layers, heads = sums.hits.shape
    for wanted, colour, order in ((False, INACTIVE, 1), (True, ACTIVE, 2)):
        places = [
            (layer, head) for layer in range(layers) for head in range(heads) if bool(active[layer, head]) is wanted
        ]
        x = [layer + options.first_number + _spread(head, heads) for layer, head in places]
        y = [float(sums.accuracy[place]) for place in places]
        axes.scatter(x, y, s=14, color=colour, zorder=order + 2, linewidths=0, clip_on=False)
    for name in sums.baselines:
        colour, style = LINES[name]
        axes.axhline(sums.baseline(name), color=colour, linestyle=style, linewidth=1.2, zorder=0)
    highest = max(float(sums.accuracy.max()), *(sums.baseline(name) for name in sums.baselines), top)
    axes.set_ylim(0, min(1.18 * highest, 1.12) if highest else 1)
    axes.set_xlim(options.first_number - 0.6, options.first_number + layers - 0.4)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25)
    if best is not None:
        at = best[0] + options.first_number + _spread(best[1], heads)
        is_right = best[0] >= layers / 2
        axes.annotate(
            f"{options.number(*best)}: {float(sums.accuracy[best]):.2f}",
            (at, float(sums.accuracy[best])),
            xytext=(-4 if is_right else 4, 4),
            textcoords="offset points",
            fontsize=8,
            ha="right" if is_right else "left",
            bbox={"boxstyle": "round,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.8},
        )


def _spread(head: int, heads: int) -> float:
    """Horizontal offset within a layer, to separate heads with equal accuracy."""
    return 0.5 * (head / max(heads - 1, 1) - 0.5) if heads > 1 else 0.0


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer)
    return buffer.getvalue()


def draw_word_map(title: str, words: Sequence[str], values: np.ndarray) -> bytes:
    """Draw the word-to-word attention of one head as PNG; rows attend to columns.

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


# Pictures of the attention of chosen heads: coloured regions on the image, and word-to-word maps.


PHRASES = 3  # maximum number of phrases per caption with pictures
HEADS = 2  # heads per graph with pictures if none is chosen


@dataclasses.dataclass(frozen=True)
class ChosenHead:
    """A head by its graph, layer and number in the layer, from 0."""

    graph: str
    layer: int
    head: int


@dataclasses.dataclass(frozen=True)
class Overlay:
    """One picture and what it shows."""

    index: int  # of the text in its split
    text: str  # the caption
    graph: str
    title: str  # phrase and head
    note: str  # share of attention on regions, and whether the top region is correct
    file: Path | None  # None without a picture
    problem: str = ""  # reason for a missing picture


def parse_heads(
    words: Sequence[str], graphs: Mapping[str, AttentionGraph], options: AttentionOptions, num_heads: int
) -> list[ChosenHead]:
    """Parse --heads; the default graph is the first one in which words attend to regions."""
    reads = [name for name, graph in graphs.items() if AttentionBlock.WORDS_TO_REGIONS in graph.blocks]
    found = []
    for word in words:
        graph, layer, head = parse_head(word, options.first_number)
        graph = graph or reads[0]
        if graph not in graphs or layer >= len(graphs[graph].steps) or head >= num_heads:
            sizes = ", ".join(f"{name} with {len(own.steps)} layers" for name, own in graphs.items())
            raise UserError(f"--heads has '{word}', but there are {num_heads} heads and the graphs {sizes}.")
        found.append(ChosenHead(graph, layer, head))
    return found


def find_best_heads(results: AttentionResults) -> list[ChosenHead]:
    """Find the best (active) heads of each graph in entity grounding, or else in another measure of the graph."""
    found = []
    for graph, phrases in results.graphs.items():
        number = 1
        if NEEDS[ENTITIES] in phrases.blocks:
            measure, number = ENTITIES, HEADS
        else:
            measure = DEPENDENCIES if NEEDS[DEPENDENCIES] in phrases.blocks else GROUPING
        sums = results.of(graph, measure)
        if sums is None:
            found.append(ChosenHead(graph, 0, 0))
            continue
        ranked = sums.accuracy.clone()
        active = results.active(graph, measure)
        if measure == ENTITIES and active.any():
            ranked[~active] = -1
        order = ranked.flatten().argsort(descending=True, stable=True)[:number].tolist()
        found += [ChosenHead(graph, *divmod(place, ranked.shape[1])) for place in order]
    return found


def draw_overlays(
    folder: Path, results: AttentionResults, texts: Sequence[RecordedText], heads: Sequence[ChosenHead]
) -> list[Overlay]:
    """Draw a picture for each text, phrase and head (by default the best heads)."""
    folder.mkdir(parents=True, exist_ok=True)
    heads = heads or find_best_heads(results)
    return [
        overlay
        for text in texts
        for head in heads
        for overlay in _draw_head(folder, results, text, head, results.graphs[head.graph].blocks)
    ]


def _draw_head(
    folder: Path, results: AttentionResults, text: RecordedText, head: ChosenHead, blocks: frozenset[AttentionBlock]
) -> list[Overlay]:
    options = results.options
    name = f"head {options.number(head.layer, head.head)}"
    file = f"{text.index:06d}_{head.graph}_{options.number(head.layer, head.head)}"
    own = torch.from_numpy(text.maps[head.graph][head.layer, head.head]).float()[None, None]
    regions = slice(text.length, text.length + len(text.allowed))
    phrases = [row for row, boxes in enumerate(text.caption.boxes) if len(boxes)][:PHRASES]
    if AttentionBlock.WORDS_TO_REGIONS in blocks:
        queries = choose_queries(text.caption, options)
        seen = attention_from(own, torch.from_numpy(queries.spans), queries.piece)[0, 0, :, regions].numpy()
        phrases = [row for row in phrases if queries.attends[row]]
        overlays = []
        for row in phrases:
            path, title = folder / f"{file}_{row}.jpg", f"“{text.caption.phrases[row]}”, {name}"
            overlays.append(_region_overlay(path, text, head, seen[row], text.allowed, row, title))
        return overlays
    if AttentionBlock.REGIONS_TO_REGIONS in blocks:
        overlays = []
        for row in phrases[:1]:
            right = np.flatnonzero(text.is_right[row])
            if len(right):
                others = text.allowed & (np.arange(len(text.allowed)) != right[0])
                seen = own[0, 0, regions, regions][right[0]].numpy()
                title = f"from the region of “{text.caption.phrases[row]}” to the others, {name}"
                overlays.append(
                    _region_overlay(folder / f"{file}_{row}.jpg", text, head, seen, others, row, title, source=right[0])
                )
        return overlays
    # word-to-word attention: average the rows of a word's wordpieces and sum the columns
    spans, slots = torch.from_numpy(text.caption.word_spans), torch.arange(own.shape[3])
    inside = ((slots >= spans[:, :1]) & (slots < spans[:, 1:])).float()
    values = (attention_from(own, spans, "mean")[0, 0] @ inside.T).numpy()
    path = folder / f"{file}.png"
    path.write_bytes(draw_word_map(f"{head.graph}, {name}", text.caption.forms, values))
    title, note = f"words to words, {name}", "each row attends to the columns"
    return [Overlay(text.index, text.caption.words, head.graph, title, note, path)]


def _region_overlay(
    path: Path,
    text: RecordedText,
    head: ChosenHead,
    seen: np.ndarray,
    allowed: np.ndarray,
    phrase: int,
    title: str,
    source: int | None = None,
) -> Overlay:
    """Colour the regions by attention, and draw the most attended region with its share and the annotated boxes."""
    seen = np.where(allowed, seen, 0)
    total = float(seen.sum())
    best = int(np.where(allowed, seen, -1).argmax()) if allowed.any() else None
    is_right = best is not None and bool(text.is_right[phrase, best])
    note = f"{100 * total:.0f} % of the attention is on regions"
    if best is not None and source is None:
        note += f"; the most attended one is {'right' if is_right else 'wrong'}"
    shown = Overlay(text.index, text.caption.words, head.graph, title, note, path)
    try:
        image = load_image(text.file_name, "RGB")
    except (FileNotFoundError, ValueError) as error:  # in an archive, or absent because features are precomputed
        return dataclasses.replace(shown, file=None, problem=str(error))
    regions = text.region_boxes
    boxes, labels, colours = [], [], []
    if best is not None:
        boxes.append(regions[best])
        labels.append(f"{seen[best]:.2f}")
        colours.append(BLUE if is_right else RED)
    if source is not None:
        boxes.append(regions[source])
        labels.append("this region")
        colours.append(GREEN)
    else:
        gold = text.caption.boxes[phrase]
        boxes += list(gold)
        labels += ["annotated"] * len(gold)
        colours += [GREEN] * len(gold)
    picture = draw_boxes(draw_heat_map(image, regions[allowed], seen[allowed]), boxes, labels, colours, title)
    Image.fromarray(picture).save(path, "JPEG", quality=88)
    return shown
