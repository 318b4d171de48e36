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
        """The sums of a measure; None if it has no examples."""
        return self.sums.get(MeasureKey(graph, measure, label))

    def measures(self, graph: str) -> list[str]:
        """The measures of a graph that have examples."""
        return [key.measure for key in self.sums if key.graph == graph and key.label == ALL]

    @property
    def notes(self) -> list[str]:
        """What could not be measured, and why."""
        missing = not any(CONFIDENCE in sums.baselines for sums in self.sums.values())
        no_parses = "Syntactic grounding needs parses; give --parses or --spacy."
        return [NO_CONFIDENCE] * missing + [no_parses] * (self.parses is None)

    def active_heads(self, graph: str, measure: str, label: str = ALL) -> Bool[Tensor, "layers heads"]:
        """The active heads of a measure, see `options.active_over`; all False without examples."""
        own = sums = self.get_sums(graph, measure, label)
        if self.options.active_over == "entities" and REQUIRED_BLOCK[measure] is AttentionBlock.WORDS_TO_REGIONS:
            sums = self.get_sums(graph, ENTITIES)
        if sums is None:
            return torch.zeros_like(own.hits, dtype=torch.bool)
        return sums.mean_attention > self.options.active_above

    def best_active_head(self, graph: str, measure: str, label: str = ALL) -> tuple[int, int] | None:
        """Layer and head of the active head with the highest accuracy; None without examples or an active head."""
        sums = self.get_sums(graph, measure, label)
        return None if sums is None else sums.best_head(self.active_heads(graph, measure, label))

    def summary(self, graph: str, measure: str, label: str = ALL) -> dict[str, Any]:
        """One measure as a JSON-ready dict: its best heads and baselines."""
        sums = self.get_sums(graph, measure, label)
        places = {"best_head": sums.best_head(), "best_active_head": self.best_active_head(graph, measure, label)}
        found: dict[str, Any] = {"examples": sums.examples, "denominator": sums.count}
        found["baselines"] = {name: sums.baseline_accuracy(name) for name in sums.baselines}
        for name, place in places.items():
            found[name] = place and {
                "head": self.options.head_name(*place),
                "accuracy": float(sums.accuracy[place]),
                "attention": float(sums.mean_attention[place]),
            }
        return found

    def summary_lines(self) -> list[str]:
        """A line per graph and measure, and per shown relation, then the notes."""
        found = []
        for graph in self.graphs:
            for measure in self.measures(graph):
                reads_regions = REQUIRED_BLOCK[measure] is AttentionBlock.WORDS_TO_REGIONS
                for label in (ALL, *(self.relations[graph] if measure == RELATIONS else ())):
                    one = self.summary(graph, measure, label)
                    best = one["best_active_head" if reads_regions else "best_head"]
                    said = "no head is active" if best is None else f"{best['accuracy']:.4f} (head {best['head']})"
                    rules = ", ".join(f"{name} {value:.4f}" for name, value in one["baselines"].items())
                    name = "/".join(filter(None, (graph, measure, label)))
                    found.append(f"{name:45s} {said}; {rules}; {one['examples']} examples")
        return [*found, *self.notes]

    def as_json(self) -> dict[str, Any]:
        """All results and options as a JSON-ready dict; matrices are [layer][head]."""
        graphs: dict[str, Any] = {}
        for graph, phrases in self.graphs.items():
            measures = {}
            for measure in self.measures(graph):
                labels = sorted({key.label for key in self.sums if (key.graph, key.measure) == (graph, measure)})
                by_label = {}
                for label in labels:
                    sums = self.get_sums(graph, measure, label)
                    matrices = {"accuracy": sums.accuracy.tolist(), "attention": sums.mean_attention.tolist()}
                    by_label[label] = {**self.summary(graph, measure, label), **matrices}
                measures[measure] = {**by_label.pop(ALL), "by_relation": by_label}
            graphs[graph] = {
                "layers": len(phrases.steps),
                "reads": sorted(map(str, phrases.blocks)),
                "shown_relations": self.relations[graph],
                "measures": measures,
            }
        own = ("run", "encoder", "data", "split", "images", "boxes", "parses", "notes")
        return {
            **{name: getattr(self, name) for name in own},
            "options": {choice["name"]: choice["value"] for choice in self.options.describe()},
            "counts": dict(self.counts),
            "graphs": graphs,
        }

    def relation_rows(self, graph: str) -> list[dict[str, Any]]:
        """The shown relations as rows of the paper's table 2: baselines and the best active head of each."""
        rows = []
        for label in self.relations[graph]:
            one = self.summary(graph, RELATIONS, label)
            best = one["best_active_head"] or {"head": "", "accuracy": None, "attention": None}
            row = {"relation": label, "pairs": one["examples"], **one["baselines"], "best active head": best["head"]}
            rows.append({**row, "accuracy": best["accuracy"], "attention on regions": best["attention"]})
        return rows


def write_tables(folder: Path, results: AnalysisResults) -> None:
    """Write `heads.csv` (every head of every measure, over all relations and for each) and `table2_<graph>.csv`."""
    write_csv(folder / "heads.csv", list(_head_rows(results)))
    for graph in results.graphs:
        write_csv(folder / f"table2_{graph}.csv", results.relation_rows(graph))


def _head_rows(results: AnalysisResults) -> Iterator[dict[str, Any]]:
    first = results.options.first_number
    for key, sums in results.sums.items():
        is_active = results.active_heads(key.graph, key.measure, key.label)
        has_active = REQUIRED_BLOCK[key.measure] is AttentionBlock.WORDS_TO_REGIONS
        for layer, head in itertools.product(*map(range, sums.hits.shape)):
            yield {
                "graph": key.graph,
                "measure": key.measure,
                "relation": key.label,
                "layer": layer + first,
                "head": head + first,
                "accuracy": float(sums.accuracy[layer, head]),
                "attention": float(sums.mean_attention[layer, head]),
                "active": ("yes" if is_active[layer, head] else "no") if has_active else "",
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

ACTIVE, INACTIVE = "#1f5fa8", "#b9cfe8"  # colours of active heads and of others
STYLES = {CONFIDENCE: ("#b3261e", "--"), LARGEST: ("#8a5a00", "-."), "chance": ("#666666", ":")}
PANELS_PER_ROW, MAPS_PER_ROW = 2, 3  # more could not be read in a window of 800 pixels
MAX_LABEL_LENGTH = 28  # characters of a relation in a title


def draw_head_figure(results: AnalysisResults, graph: str, measure: str, labels: Sequence[str] = (ALL,)) -> bytes:
    """Plot each head's accuracy by layer (VisualBERT's ACL paper, figures 3 and 4), one panel per label, as PNG."""
    columns = min(PANELS_PER_ROW, len(labels))
    rows = math.ceil(len(labels) / columns)
    figure = Figure(figsize=(max(3.5 * columns, 7), 2.6 * rows + 0.8), layout="constrained", dpi=130)
    every = [results.get_sums(graph, measure, label) for label in labels]
    top = max(float(sums.accuracy.max()) for sums in every)
    for number, (label, sums) in enumerate(zip(labels, every, strict=True)):
        axes = figure.add_subplot(rows, columns, number + 1)
        _panel(axes, results, MeasureKey(graph, measure, label), top)
        title = label or f"{measure}, graph: {graph}"
        short = title if len(labels) == 1 or len(title) <= MAX_LABEL_LENGTH else f"{title[: MAX_LABEL_LENGTH - 1]}…"
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
    handles += [Line2D([], [], color=STYLES[name][0], linestyle=STYLES[name][1], label=name) for name in names]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return _png(figure)


def _panel(axes: Axes, results: AnalysisResults, key: MeasureKey, top: float) -> None:
    """One point per head (light if inactive), a label on the best active head, and a line per baseline."""
    options, place = results.options, (key.graph, key.measure, key.label)
    sums, active, best = results.get_sums(*place), results.active_heads(*place), results.best_active_head(*place)
    layers, heads = sums.hits.shape
    spread = np.linspace(-0.25, 0.25, heads) if heads > 1 else np.zeros(1)  # separates heads with equal accuracy
    x, accuracy = options.first_number + np.arange(layers)[:, None] + spread, sums.accuracy.numpy()
    for shown, colour, order in ((~active.numpy(), INACTIVE, 3), (active.numpy(), ACTIVE, 4)):
        axes.scatter(x[shown], accuracy[shown], s=14, color=colour, zorder=order, linewidths=0, clip_on=False)
    for name in sums.baselines:
        colour, style = STYLES[name]
        axes.axhline(sums.baseline_accuracy(name), color=colour, linestyle=style, linewidth=1.2, zorder=0)
    highest = max(float(accuracy.max()), *(sums.baseline_accuracy(name) for name in sums.baselines), top)
    axes.set_ylim(0, min(1.18 * highest, 1.12) if highest else 1)
    axes.set_xlim(options.first_number - 0.6, options.first_number + layers - 0.4)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25)
    if best is not None:
        on_right = best[0] >= layers / 2
        axes.annotate(
            f"{options.head_name(*best)}: {accuracy[best]:.2f}",
            (x[best], accuracy[best]),
            xytext=(-4 if on_right else 4, 4),
            textcoords="offset points",
            fontsize=8,
            ha="right" if on_right else "left",
            bbox={"boxstyle": "round,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.8},
        )


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer)
    return buffer.getvalue()


def draw_maps(titles: Sequence[str], rows: Sequence[str], columns: Sequence[str], values: np.ndarray) -> bytes:
    """Draw how words (rows) attend to words or objects (columns) as PNG, with one panel per head.

    Args:
        values: float [panels, rows, columns].
    """
    width, height = (max(3.2, 0.34 * len(names) + 1.4) for names in (columns, rows))
    panels = min(MAPS_PER_ROW, len(titles)), math.ceil(len(titles) / MAPS_PER_ROW)
    figure = Figure(figsize=(width * panels[0], height * panels[1]), layout="constrained", dpi=110)
    for number, (title, panel) in enumerate(zip(titles, values, strict=True)):
        axes = figure.add_subplot(*panels[::-1], number + 1)
        axes.imshow(panel, cmap="Blues", vmin=0, vmax=max(float(panel.max()), 1e-6))
        axes.set_xticks(range(len(columns)), columns, rotation=90, fontsize=8, parse_math=False)  # "$5" is no formula
        axes.set_yticks(range(len(rows)), rows, fontsize=8, parse_math=False)
        axes.set_title(title, fontsize=9, parse_math=False)
        axes.set_ylabel("attends", fontsize=8)
    return _png(figure)


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
    reads = [name for name, graph in graphs.items() if AttentionBlock.WORDS_TO_REGIONS in graph.blocks]
    found = []
    for word in words:
        graph, layer, head = parse_head(word, options.first_number)
        graph = graph or reads[0]
        if graph not in graphs or layer >= len(graphs[graph].steps) or head >= num_heads:
            sizes = ", ".join(f"{name} with {len(one.steps)} layers" for name, one in graphs.items())
            raise UserError(f"--heads has '{word}', but there are {num_heads} heads and the graphs {sizes}.")
        found.append(AttentionHead(graph, layer, head))
    return found


def find_best_heads(results: AnalysisResults) -> list[AttentionHead]:
    """Find the best (active) heads of each graph in entity grounding, or else in another measure of the graph."""
    found = []
    for graph, phrases in results.graphs.items():
        measure = next(one for one in (ENTITIES, DEPENDENCIES, GROUPING) if REQUIRED_BLOCK[one] in phrases.blocks)
        sums = results.get_sums(graph, measure)
        if sums is None:
            found.append(AttentionHead(graph, 0, 0))
            continue
        active = results.active_heads(graph, measure)
        is_ranked_lower = ~active if measure == ENTITIES and active.any() else torch.zeros_like(active)
        ranked = sums.accuracy.masked_fill(is_ranked_lower, -1).flatten().argsort(descending=True, stable=True)
        number = BEST_HEADS if measure == ENTITIES else 1
        found += [AttentionHead(graph, *divmod(place, active.shape[1])) for place in ranked[:number].tolist()]
    return found


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
    options = results.options
    name = f"head {options.head_name(head.layer, head.head)}"
    file = f"{text.index:06d}_{head.graph}_{options.head_name(head.layer, head.head)}"
    maps = torch.from_numpy(text.maps[head.graph][head.layer, head.head]).float()[None, None]
    regions = slice(text.length, text.length + len(text.allowed))
    phrases = [row for row, boxes in enumerate(text.caption.boxes) if len(boxes)][:MAX_PHRASES]

    def draw_regions(row: int, seen: np.ndarray, title: str, source: int | None = None) -> Overlay:
        return _region_overlay(folder / f"{file}_{row}.jpg", text, head.graph, seen, row, f"{title}, {name}", source)

    if AttentionBlock.WORDS_TO_REGIONS in blocks:
        queries = choose_queries(text.caption, options)
        seen = attention_from(maps, torch.from_numpy(queries.spans), queries.piece)[0, 0, :, regions].numpy()
        return [
            draw_regions(row, seen[row], f"“{text.caption.phrases[row]}”") for row in phrases if queries.has_query[row]
        ]
    if AttentionBlock.REGIONS_TO_REGIONS in blocks:
        seen = maps[0, 0, regions, regions].numpy()
        sources = [(row, np.flatnonzero(text.is_correct[row])) for row in phrases[:1]]
        title = "from the region of “{}” to the others"
        return [
            draw_regions(row, seen[source[0]], title.format(text.caption.phrases[row]), source[0])
            for row, source in sources
            if len(source)
        ]
    # word-to-word attention: average the rows of a word's wordpieces and sum the columns
    spans, slots = torch.from_numpy(text.caption.word_spans), torch.arange(maps.shape[3])
    inside = ((slots >= spans[:, :1]) & (slots < spans[:, 1:])).float()
    values = (attention_from(maps, spans, "mean")[0, 0] @ inside.T).numpy()
    path = folder / f"{file}.png"
    path.write_bytes(draw_maps([f"{head.graph}, {name}"], text.caption.forms, text.caption.forms, values[None]))
    title, note = f"words to words, {name}", "each row attends to the columns"
    return [Overlay(text.index, text.caption.words, head.graph, title, note, path)]


def _draw_objects(folder: Path, results: AnalysisResults, text: TextAttention, graph: str) -> list[Overlay]:
    """Draw the attention of words, summed over the regions of each object (VisualBERT's ACL paper, figures 1 and 5).

    The heads are the best ones in entity grounding of the six layers with the highest accuracy. An object is a phrase:
    for each of its boxes the region closest to it, where the paper groups regions by hand.
    """
    sums, allowed = results.get_sums(graph, ENTITIES), torch.from_numpy(text.allowed)
    phrases = [row for row, boxes in enumerate(text.caption.boxes) if len(boxes)]
    if sums is None or not phrases or not allowed.any():
        return []
    best = sums.accuracy.max(dim=1)
    layers = best.values.topk(min(BEST_LAYERS, len(best.values))).indices.sort().values
    heads = best.indices[layers]
    maps = torch.from_numpy(text.maps[graph]).float()[layers, heads][:, None]
    seen = attention_from(maps, torch.from_numpy(text.caption.word_spans), "mean")[:, 0, :, text.length :]
    seen = seen[..., : len(allowed)]
    objects = []
    for row in phrases:
        overlap = torch.from_numpy(pairwise_iou(text.region_boxes, text.caption.boxes[row]))
        objects.append(overlap.masked_fill(~allowed[:, None], -1).argmax(dim=0).unique())
    names = [text.caption.phrases[row][:MAX_LABEL_LENGTH] for row in phrases]
    others = allowed.clone()
    others[torch.cat(objects)] = False
    if others.any():
        objects.append(seen.mean(dim=(0, 1)).masked_fill(~others, -1).argmax()[None])
        names.append("*")
    values = torch.stack([seen[..., rows].sum(dim=-1) for rows in objects], dim=-1).numpy()
    places = zip(layers.tolist(), heads.tolist(), strict=True)
    titles = [f"head {results.options.head_name(*place)}" for place in places]
    path = folder / f"{text.index:06d}_{graph}_objects.png"
    path.write_bytes(draw_maps(titles, text.caption.forms, names, values))
    note = "summed over the regions of each object; *: the most attended region of no object"
    return [Overlay(text.index, text.caption.words, graph, "words to objects, layer by layer", note, path)]


def _region_overlay(
    path: Path, text: TextAttention, graph: str, seen: np.ndarray, phrase: int, title: str, source: int | None = None
) -> Overlay:
    """Colour the regions by attention, and draw the most attended one with its share and the annotated boxes.

    Args:
        source: the region that attends; it is no candidate, and is drawn instead of the annotated boxes.
    """
    allowed = text.allowed & (np.arange(len(text.allowed)) != source) if source is not None else text.allowed
    seen = np.where(allowed, seen, 0)
    note, regions, marks = f"{seen.sum():.2f} of the attention is on regions", text.region_boxes, []
    if allowed.any():
        best = int(np.where(allowed, seen, -1).argmax())
        is_correct = bool(text.is_correct[phrase, best])
        marks.append((regions[best], f"{seen[best]:.2f}", BLUE if is_correct else RED))
        if source is None:
            note += f"; the most attended one is {'correct' if is_correct else 'wrong'}"
    if source is not None:
        marks.append((regions[source], "this region", GREEN))
    else:
        marks += [(box, "annotated", GREEN) for box in text.caption.boxes[phrase]]
    shown = Overlay(text.index, text.caption.words, graph, title, note, path)
    try:
        image = load_image(text.file_name, "RGB", text.image_size)
    except (FileNotFoundError, ValueError) as error:  # in an archive, or absent because features are precomputed
        return dataclasses.replace(shown, file=None, problem=str(error))
    picture = draw_boxes(draw_heat_map(image, regions[allowed], seen[allowed]), *zip(*marks, strict=True), title)
    Image.fromarray(picture).save(path, "JPEG", quality=88)
    return shown
