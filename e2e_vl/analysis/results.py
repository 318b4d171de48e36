"""The results of an analysis: JSON and CSV files, figures of each head's accuracy, and pictures of attention."""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from PIL import Image
from torch import Tensor

from detector.boxes import pairwise_iou
from detector.errors import UserError
from detector.images import load_image
from e2e_vl.analysis.collect import (
    ALL,
    CONFIDENCE,
    DEPENDENCIES,
    ENTITIES,
    GROUPING,
    LARGEST,
    RELATIONS,
    REQUIRED_BLOCK,
    MeasureKey,
    TextAttention,
    choose_queries,
)
from e2e_vl.analysis.measures import HeadSums, attention_from
from e2e_vl.analysis.options import AnalysisConfig, parse_head
from e2e_vl.drawing import BLUE, GREEN, RED, draw_boxes, draw_heat_map
from e2e_vl.parquet import image_of_name
from e2e_vl.structures import AttentionBlock, AttentionGraph

NO_CONFIDENCE = (
    "The regions have no detection confidences, so the paper's baseline (always the region with the highest one) "
    "cannot be computed; compare with the largest region and with chance."
)


@dataclasses.dataclass(frozen=True)
class AnalysisResults:
    """The results of an analysis."""

    run: str
    encoder: str
    data: str
    split: str
    boxes: str
    parses: str | None  # file or spaCy model; None without parses
    options: AnalysisConfig
    graphs: Mapping[str, AttentionGraph]
    sums: Mapping[MeasureKey, HeadSums]
    counts: Mapping[str, int]
    relations: Mapping[str, list[str]]  # graph -> relations to show
    images: int

    def get_sums(self, graph: str, measure: str, label: str = ALL) -> HeadSums | None:
        """Return the sums of a measure; None if it has no examples."""
        return self.sums.get(MeasureKey(graph, measure, label))

    def measures(self, graph: str) -> list[str]:
        """List the measures of a graph that have examples."""
        return [key.measure for key in self.sums if key.graph == graph and key.label == ALL]

    @property
    def notes(self) -> list[str]:
        """What could not be measured, and why."""
        notes = []
        if not any(CONFIDENCE in sums.baselines for sums in self.sums.values()):
            notes.append(NO_CONFIDENCE)
        if self.parses is None:
            notes.append("Syntactic grounding needs parses; give --parses or --spacy.")
        return notes

    def active_heads(self, graph: str, measure: str, label: str = ALL) -> Bool[Tensor, "layers heads"]:
        """Mark the active heads of a measure, see `options.active_over`; all are False without examples."""
        sums = self.get_sums(graph, measure, label)
        activity = sums  # where the attention on regions is taken from
        if self.options.active_over == "entities" and REQUIRED_BLOCK[measure] is AttentionBlock.WORDS_TO_REGIONS:
            activity = self.get_sums(graph, ENTITIES)
        if activity is None:
            return torch.zeros_like(sums.hits, dtype=torch.bool)
        return activity.mean_attention > self.options.active_above

    def best_active_head(self, graph: str, measure: str, label: str = ALL) -> tuple[int, int] | None:
        """Return layer and head of the most accurate active head; None without examples or an active head."""
        sums = self.get_sums(graph, measure, label)
        if sums is None:
            return None
        return sums.best_head(self.active_heads(graph, measure, label))

    def summary(self, graph: str, measure: str, label: str = ALL) -> dict[str, Any]:
        """Summarise one measure as a JSON-ready dict: its best heads and baselines."""
        sums = self.get_sums(graph, measure, label)
        summary: dict[str, Any] = {"examples": sums.examples, "denominator": sums.count}
        summary["baselines"] = {name: sums.baseline_accuracy(name) for name in sums.baselines}
        summary["best_head"] = self._describe_head(sums, sums.best_head())
        summary["best_active_head"] = self._describe_head(sums, self.best_active_head(graph, measure, label))
        return summary

    def _describe_head(self, sums: HeadSums, head: tuple[int, int] | None) -> dict[str, Any] | None:
        """Return name, accuracy and attention of a head, given as layer and head; None stays None."""
        if head is None:
            return None
        return {
            "head": self.options.head_name(*head),
            "accuracy": float(sums.accuracy[head]),
            "attention": float(sums.mean_attention[head]),
        }

    def summary_lines(self) -> list[str]:
        """Return a line per graph and measure, and per shown relation, then the notes."""
        lines = []
        for graph in self.graphs:
            for measure in self.measures(graph):
                labels = [ALL]
                if measure == RELATIONS:
                    labels += self.relations[graph]
                lines += [self._summary_line(graph, measure, label) for label in labels]
        return [*lines, *self.notes]

    def _summary_line(self, graph: str, measure: str, label: str) -> str:
        summary = self.summary(graph, measure, label)
        reads_regions = REQUIRED_BLOCK[measure] is AttentionBlock.WORDS_TO_REGIONS
        best = summary["best_active_head" if reads_regions else "best_head"]
        result = "no head is active"
        if best is not None:
            result = f"{best['accuracy']:.4f} (head {best['head']})"
        baselines = ", ".join(f"{name} {value:.4f}" for name, value in summary["baselines"].items())
        name = "/".join(filter(None, (graph, measure, label)))
        return f"{name:45s} {result}; {baselines}; {summary['examples']} examples"

    def as_json(self) -> dict[str, Any]:
        """Return all results and options as a JSON-ready dict; matrices are [layer][head]."""
        graphs: dict[str, Any] = {}
        for name, graph in self.graphs.items():
            graphs[name] = {
                "layers": len(graph.steps),
                "reads": sorted(map(str, graph.blocks)),
                "shown_relations": self.relations[name],
                "measures": {measure: self._measure_as_json(name, measure) for measure in self.measures(name)},
            }
        fields = ("run", "encoder", "data", "split", "images", "boxes", "parses", "notes")
        return {
            **{field: getattr(self, field) for field in fields},
            "options": {option["name"]: option["value"] for option in self.options.describe()},
            "counts": dict(self.counts),
            "graphs": graphs,
        }

    def _measure_as_json(self, graph: str, measure: str) -> dict[str, Any]:
        labels = {key.label for key in self.sums if key.graph == graph and key.measure == measure}
        by_label = {}
        for label in sorted(labels):
            sums = self.get_sums(graph, measure, label)
            matrices = {"accuracy": sums.accuracy.tolist(), "attention": sums.mean_attention.tolist()}
            by_label[label] = {**self.summary(graph, measure, label), **matrices}
        return {**by_label.pop(ALL), "by_relation": by_label}

    def relation_rows(self, graph: str) -> list[dict[str, Any]]:
        """Return the shown relations as rows of the paper's table 2: baselines and the best active head of each."""
        rows = []
        for label in self.relations[graph]:
            summary = self.summary(graph, RELATIONS, label)
            best = summary["best_active_head"] or {"head": "", "accuracy": None, "attention": None}
            row = {
                "relation": label,
                "pairs": summary["examples"],
                **summary["baselines"],
                "best active head": best["head"],
                "accuracy": best["accuracy"],
                "attention on regions": best["attention"],
            }
            rows.append(row)
        return rows


def write_tables(folder: Path, results: AnalysisResults) -> None:
    """Write `heads.csv` (every head of every measure, over all relations and for each) and `table2_<graph>.csv`."""
    write_csv(folder / "heads.csv", list(_head_rows(results)))
    for graph in results.graphs:
        write_csv(folder / f"table2_{graph}.csv", results.relation_rows(graph))


def _head_rows(results: AnalysisResults) -> Iterator[dict[str, Any]]:
    """Yield a row of `heads.csv` for each head of each measure."""
    first = results.options.first_number
    for key, sums in results.sums.items():
        is_active = results.active_heads(key.graph, key.measure, key.label)
        reads_regions = REQUIRED_BLOCK[key.measure] is AttentionBlock.WORDS_TO_REGIONS
        layers, heads = sums.hits.shape
        for layer, head in itertools.product(range(layers), range(heads)):
            active = ""
            if reads_regions:
                active = "yes" if is_active[layer, head] else "no"
            yield {
                "graph": key.graph,
                "measure": key.measure,
                "relation": key.label,
                "layer": layer + first,
                "head": head + first,
                "accuracy": float(sums.accuracy[layer, head]),
                "attention": float(sums.mean_attention[layer, head]),
                "active": active,
                "examples": sums.examples,
            }


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows with a header; no file if there are no rows."""
    if rows:
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


# Figures: accuracy of each head by layer, and pictures of attention

# colours of active heads and of others
ACTIVE = "#1f5fa8"
INACTIVE = "#b9cfe8"
STYLES = {CONFIDENCE: ("#b3261e", "--"), LARGEST: ("#8a5a00", "-."), "chance": ("#666666", ":")}
# more could not be read in a window of 800 pixels
PANELS_PER_ROW = 2
MAPS_PER_ROW = 3
MAX_LABEL_LENGTH = 28  # characters of a relation in a title


def draw_head_figure(results: AnalysisResults, graph: str, measure: str, labels: Sequence[str] = (ALL,)) -> bytes:
    """Plot each head's accuracy by layer (VisualBERT's ACL paper, figures 3 and 4), one panel per label, as PNG."""
    columns = min(PANELS_PER_ROW, len(labels))
    rows = math.ceil(len(labels) / columns)
    figure = Figure(figsize=(max(3.5 * columns, 7), 2.6 * rows + 0.8), layout="constrained", dpi=130)
    sums_by_label = {label: results.get_sums(graph, measure, label) for label in labels}
    top = max(float(sums.accuracy.max()) for sums in sums_by_label.values())
    for number, (label, sums) in enumerate(sums_by_label.items()):
        axes = figure.add_subplot(rows, columns, number + 1)
        _plot_panel(axes, results, MeasureKey(graph, measure, label), top)
        title = label or f"{measure}, graph: {graph}"
        if len(labels) > 1 and len(title) > MAX_LABEL_LENGTH:
            title = f"{title[: MAX_LABEL_LENGTH - 1]}…"
        axes.set_title(f"{title} ({sums.examples:,})", fontsize=9, parse_math=False)
        if number % columns == 0:
            axes.set_ylabel("accuracy", fontsize=8)
        if number >= len(labels) - columns:
            axes.set_xlabel("layer", fontsize=8)
    handles = []
    for colour, label in ((ACTIVE, "active head"), (INACTIVE, "inactive head")):
        handles.append(Line2D([], [], marker="o", linestyle="", markersize=5, color=colour, label=label))
    baselines = itertools.chain.from_iterable(sums.baselines for sums in sums_by_label.values())
    for name in dict.fromkeys(baselines):
        colour, style = STYLES[name]
        handles.append(Line2D([], [], color=colour, linestyle=style, label=name))
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return encode_png(figure)


def _plot_panel(axes: Axes, results: AnalysisResults, key: MeasureKey, top: float) -> None:
    """Plot a point per head (light if inactive), a label on the best active head, and a line per baseline.

    Args:
        top: the highest accuracy in all panels of the figure.
    """
    first_number = results.options.first_number
    sums = results.get_sums(key.graph, key.measure, key.label)
    is_active = results.active_heads(key.graph, key.measure, key.label).numpy()
    best = results.best_active_head(key.graph, key.measure, key.label)
    accuracy = sums.accuracy.numpy()
    layers, heads = sums.hits.shape
    spread = np.linspace(-0.25, 0.25, heads) if heads > 1 else np.zeros(1)  # separates heads with equal accuracy
    x = first_number + np.arange(layers)[:, None] + spread
    for shown, colour, order in ((~is_active, INACTIVE, 3), (is_active, ACTIVE, 4)):
        axes.scatter(x[shown], accuracy[shown], s=14, color=colour, zorder=order, linewidths=0, clip_on=False)
    highest = max(float(accuracy.max()), top)
    for name in sums.baselines:
        colour, style = STYLES[name]
        baseline = sums.baseline_accuracy(name)
        axes.axhline(baseline, color=colour, linestyle=style, linewidth=1.2, zorder=0)
        highest = max(highest, baseline)
    axes.set_ylim(0, min(1.18 * highest, 1.12) if highest else 1)
    axes.set_xlim(first_number - 0.6, first_number + layers - 0.4)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25)
    if best is not None:
        # towards the middle of the panel
        is_on_right = best[0] >= layers / 2
        offset = -4 if is_on_right else 4
        alignment = "right" if is_on_right else "left"
        axes.annotate(
            f"{results.options.head_name(*best)}: {accuracy[best]:.2f}",
            (x[best], accuracy[best]),
            xytext=(offset, 4),
            textcoords="offset points",
            fontsize=8,
            ha=alignment,
            bbox={"boxstyle": "round,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.8},
        )


def encode_png(figure: Figure) -> bytes:
    """Return the content of a PNG file."""
    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer)
    return buffer.getvalue()


def draw_maps(titles: Sequence[str], rows: Sequence[str], columns: Sequence[str], values: np.ndarray) -> bytes:
    """Draw how words (rows) attend to words or objects (columns) as PNG, with one panel per head.

    Args:
        values: float [panels, rows, columns].
    """
    width = max(3.2, 0.34 * len(columns) + 1.4)  # of a panel, inches
    height = max(3.2, 0.34 * len(rows) + 1.4)
    panel_columns = min(MAPS_PER_ROW, len(titles))
    panel_rows = math.ceil(len(titles) / MAPS_PER_ROW)
    figure = Figure(figsize=(width * panel_columns, height * panel_rows), layout="constrained", dpi=110)
    for number, (title, panel) in enumerate(zip(titles, values, strict=True), start=1):
        axes = figure.add_subplot(panel_rows, panel_columns, number)
        axes.imshow(panel, cmap="Blues", vmin=0, vmax=max(float(panel.max()), 1e-6))
        axes.set_xticks(range(len(columns)), columns, rotation=90, fontsize=8, parse_math=False)  # "$5" is no formula
        axes.set_yticks(range(len(rows)), rows, fontsize=8, parse_math=False)
        axes.set_title(title, fontsize=9, parse_math=False)
        axes.set_ylabel("attends", fontsize=8)
    return encode_png(figure)


# Pictures of the attention of chosen heads: coloured regions on the image, and maps of words to words and to objects.


MAX_PHRASES = 3  # phrases drawn per caption
BEST_HEADS = 2  # heads drawn per graph by default
BEST_LAYERS = 6  # layers in a map of objects


@dataclasses.dataclass(frozen=True)
class AttentionHead:
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
    words: Sequence[str], graphs: Mapping[str, AttentionGraph], options: AnalysisConfig, num_heads: int
) -> list[AttentionHead]:
    """Parse --heads; a head without a graph belongs to the first graph in which words attend to regions."""
    graphs_on_regions = [name for name, graph in graphs.items() if AttentionBlock.WORDS_TO_REGIONS in graph.blocks]
    heads = []
    for word in words:
        graph_name, layer, head = parse_head(word, options.first_number)
        if graph_name is None:
            graph_name = graphs_on_regions[0]
        if graph_name not in graphs or layer >= len(graphs[graph_name].steps) or head >= num_heads:
            sizes = ", ".join(f"{name} with {len(graph.steps)} layers" for name, graph in graphs.items())
            raise UserError(f"--heads has '{word}', but there are {num_heads} heads and the graphs {sizes}.")
        heads.append(AttentionHead(graph_name, layer, head))
    return heads


def find_best_heads(results: AnalysisResults) -> list[AttentionHead]:
    """Find the best (active) heads of each graph in entity grounding, or else in another measure of the graph."""
    heads = []
    for graph_name, graph in results.graphs.items():
        measure = next(name for name in (ENTITIES, DEPENDENCIES, GROUPING) if REQUIRED_BLOCK[name] in graph.blocks)
        sums = results.get_sums(graph_name, measure)
        if sums is None:
            heads.append(AttentionHead(graph_name, 0, 0))
            continue
        accuracy = sums.accuracy
        is_active = results.active_heads(graph_name, measure)
        if measure == ENTITIES and is_active.any():
            accuracy = accuracy.masked_fill(~is_active, -1)  # inactive heads come last
        ranked = accuracy.flatten().argsort(descending=True, stable=True)
        number = BEST_HEADS if measure == ENTITIES else 1
        for index in ranked[:number].tolist():
            layer, head = divmod(index, accuracy.shape[1])
            heads.append(AttentionHead(graph_name, layer, head))
    return heads


def draw_overlays(
    folder: Path, results: AnalysisResults, texts: Sequence[TextAttention], heads: Sequence[AttentionHead]
) -> list[Overlay]:
    """Draw a picture for each text, phrase and head (by default the best heads), and a map of objects for each text."""
    folder.mkdir(parents=True, exist_ok=True)
    heads = heads or find_best_heads(results)
    overlays = []
    for text in texts:
        for head in heads:
            overlays += _draw_head(folder, results, text, head, results.graphs[head.graph].blocks)
        for graph in results.graphs:
            overlays += _draw_objects(folder, results, text, graph)
    return overlays


def _draw_head(
    folder: Path, results: AnalysisResults, text: TextAttention, head: AttentionHead, blocks: frozenset[AttentionBlock]
) -> list[Overlay]:
    """Draw the attention of one head: on regions for each phrase, from a region to the others, or between words."""
    caption = text.caption
    head_name = results.options.head_name(head.layer, head.head)
    name = f"head {head_name}"
    file = f"{text.index:06d}_{head.graph}_{head_name}"
    maps = torch.from_numpy(text.maps[head.graph][head.layer, head.head]).float()[None, None]
    regions = slice(text.length, text.length + len(text.allowed))
    phrases_with_boxes = [row for row, boxes in enumerate(caption.boxes) if len(boxes)]

    def draw_regions(phrase: int, seen: np.ndarray, title: str, source: int | None = None) -> Overlay:
        path = folder / f"{file}_{phrase}.jpg"
        return _draw_region_overlay(path, text, head.graph, seen, phrase, f"{title}, {name}", source)

    if AttentionBlock.WORDS_TO_REGIONS in blocks:
        queries = choose_queries(caption, results.options)
        seen = attention_from(maps, torch.from_numpy(queries.spans), queries.piece)[0, 0, :, regions].numpy()
        overlays = []
        for phrase in phrases_with_boxes[:MAX_PHRASES]:
            if queries.has_query[phrase]:
                overlays.append(draw_regions(phrase, seen[phrase], f"“{caption.phrases[phrase]}”"))
        return overlays
    if AttentionBlock.REGIONS_TO_REGIONS in blocks:
        if not phrases_with_boxes:
            return []
        phrase = phrases_with_boxes[0]
        correct_regions = np.flatnonzero(text.is_correct[phrase])
        if not len(correct_regions):
            return []
        source = correct_regions[0]
        seen = maps[0, 0, regions, regions].numpy()
        title = f"from the region of “{caption.phrases[phrase]}” to the others"
        return [draw_regions(phrase, seen[source], title, source)]
    # word-to-word attention: average the rows of a word's wordpieces and sum the columns
    spans = torch.from_numpy(caption.word_spans)
    slots = torch.arange(maps.shape[3])
    inside = ((slots >= spans[:, :1]) & (slots < spans[:, 1:])).float()
    values = (attention_from(maps, spans, "mean")[0, 0] @ inside.T).numpy()
    path = folder / f"{file}.png"
    path.write_bytes(draw_maps([f"{head.graph}, {name}"], caption.forms, caption.forms, values[None]))
    note = "each row attends to the columns"
    return [Overlay(text.index, caption.words, head.graph, f"words to words, {name}", note, path)]


def _draw_objects(folder: Path, results: AnalysisResults, text: TextAttention, graph: str) -> list[Overlay]:
    """Draw the attention of words, summed over the regions of each object (VisualBERT's ACL paper, figures 1 and 5).

    The heads are the best ones in entity grounding of the six layers with the highest accuracy. An object is a phrase:
    for each of its boxes the region closest to it, where the paper groups regions by hand.
    """
    caption = text.caption
    sums = results.get_sums(graph, ENTITIES)
    allowed = torch.from_numpy(text.allowed)
    phrases = [row for row, boxes in enumerate(caption.boxes) if len(boxes)]
    if sums is None or not phrases or not allowed.any():
        return []
    best = sums.accuracy.max(dim=1)  # of each layer
    layers = best.values.topk(min(BEST_LAYERS, len(best.values))).indices.sort().values
    heads = best.indices[layers]
    maps = torch.from_numpy(text.maps[graph]).float()[layers, heads][:, None]
    regions = slice(text.length, text.length + len(allowed))
    seen = attention_from(maps, torch.from_numpy(caption.word_spans), "mean")[:, 0, :, regions]
    objects = []  # indices of the regions of each
    names = []
    for phrase in phrases:
        overlap = torch.from_numpy(pairwise_iou(text.region_boxes, caption.boxes[phrase]))
        objects.append(overlap.masked_fill(~allowed[:, None], -1).argmax(dim=0).unique())
        names.append(caption.phrases[phrase][:MAX_LABEL_LENGTH])
    others = allowed.clone()
    others[torch.cat(objects)] = False
    if others.any():
        most_attended = seen.mean(dim=(0, 1)).masked_fill(~others, -1).argmax()
        objects.append(most_attended[None])
        names.append("*")
    values = torch.stack([seen[..., rows].sum(dim=-1) for rows in objects], dim=-1).numpy()
    titles = []
    for layer, head in zip(layers.tolist(), heads.tolist(), strict=True):
        titles.append(f"head {results.options.head_name(layer, head)}")
    path = folder / f"{text.index:06d}_{graph}_objects.png"
    path.write_bytes(draw_maps(titles, caption.forms, names, values))
    note = "summed over the regions of each object; *: the most attended region of no object"
    return [Overlay(text.index, caption.words, graph, "words to objects, layer by layer", note, path)]


def _draw_region_overlay(
    path: Path, text: TextAttention, graph: str, seen: np.ndarray, phrase: int, title: str, source: int | None = None
) -> Overlay:
    """Colour the regions by attention, and draw the most attended one with its share and the annotated boxes.

    Args:
        source: the region that attends; it is no candidate, and is drawn instead of the annotated boxes.
    """
    regions = text.region_boxes
    allowed = text.allowed.copy()
    if source is not None:
        allowed[source] = False
    seen = np.where(allowed, seen, 0)
    note = f"{seen.sum():.2f} of the attention is on regions"
    boxes = []
    labels = []
    colours = []
    if allowed.any():
        best = int(np.where(allowed, seen, -1).argmax())
        is_correct = bool(text.is_correct[phrase, best])
        boxes.append(regions[best])
        labels.append(f"{seen[best]:.2f}")
        colours.append(BLUE if is_correct else RED)
        if source is None:
            judgement = "correct" if is_correct else "wrong"
            note += f"; the most attended one is {judgement}"
    if source is not None:
        boxes.append(regions[source])
        labels.append("this region")
        colours.append(GREEN)
    else:
        for box in text.caption.boxes[phrase]:
            boxes.append(box)
            labels.append("annotated")
            colours.append(GREEN)
    overlay = Overlay(text.index, text.caption.words, graph, title, note, path)
    try:
        image = load_image(image_of_name(text.file_name), "RGB", text.image_size, text.file_name)
    except (FileNotFoundError, ValueError) as error:  # in an archive, or absent because features are precomputed
        return dataclasses.replace(overlay, file=None, problem=str(error))
    heat_map = draw_heat_map(image, regions[allowed], seen[allowed])
    picture = draw_boxes(heat_map, boxes, labels, colours, title)
    Image.fromarray(picture).save(path, "JPEG", quality=88)
    return overlay
