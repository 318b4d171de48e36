"""Pictures of what chosen heads look at: regions coloured on the image, and maps among words.

Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib import colormaps
from PIL import Image

from detector.errors import UserError
from detector.images import load_image
from e2e_vl.analysis.attending import phrase_queries
from e2e_vl.analysis.attention_choices import AttentionChoices, parse_head
from e2e_vl.analysis.attention_figures import draw_word_map
from e2e_vl.analysis.attention_tables import AttentionResults
from e2e_vl.analysis.collect import DEPENDENCIES, ENTITIES, GROUPING, NEEDS, SeenText
from e2e_vl.analysis.measures import attention_from
from e2e_vl.drawing import BLUE, GREEN, LONGEST, RED, draw_boxes
from e2e_vl.structures import AttentionBlock, AttentionGraph

PHRASES = 3  # of one caption that get pictures
HEADS = 2  # of a graph that get pictures where none is chosen
HEAT = "YlOrRd"  # colours of matplotlib, light for little attention
STRONGEST, FADED = 0.8, 0.55  # share of colour at the most attended region; of grey in the image below
GREY = (0.299, 0.587, 0.114)  # luminance of red, green and blue, ITU-R BT.601


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
    note: str  # what is right or wrong about it
    file: Path | None  # None: there is no picture
    problem: str = ""  # why not


def chosen_heads(
    words: Sequence[str], graphs: Mapping[str, AttentionGraph], choices: AttentionChoices, num_heads: int
) -> list[ChosenHead]:
    """The heads that a user names; without a graph it is the first one in which words read regions.

    Raises:
        ValueError: a graph, layer or head that does not exist.
    """
    reads = [name for name, graph in graphs.items() if AttentionBlock.WORDS_TO_REGIONS in graph.blocks]
    found = []
    for word in words:
        graph, layer, head = parse_head(word, choices.first_number)
        graph = graph or reads[0]
        if graph not in graphs:
            raise UserError(f"--heads has '{word}', but the encoder has the graphs {', '.join(graphs)}.")
        layers, first = len(graphs[graph].steps), choices.first_number
        if layer >= layers or head >= num_heads:
            raise UserError(
                f"--heads has '{word}', but the graph {graph} has the layers {first} to {layers - 1 + first} with the "
                f"heads {first} to {num_heads - 1 + first}."
            )
        found.append(ChosenHead(graph, layer, head))
    return found


def best_heads(results: AttentionResults) -> list[ChosenHead]:
    """The best heads of each graph: in entity grounding the best active ones, else in what the graph can do."""
    found = []
    for graph, stated in results.graphs.items():
        number = 1
        if NEEDS[ENTITIES] in stated.blocks:
            measure, number = ENTITIES, HEADS
        else:
            measure = DEPENDENCIES if NEEDS[DEPENDENCIES] in stated.blocks else GROUPING
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
    folder: Path, results: AttentionResults, texts: Sequence[SeenText], heads: Sequence[ChosenHead]
) -> list[Overlay]:
    """Write a picture for each text, phrase and head (no heads: the best ones)."""
    folder.mkdir(parents=True, exist_ok=True)
    heads = heads or best_heads(results)
    return [
        overlay
        for text in texts
        for head in heads
        for overlay in _of_head(folder, results, text, head, results.graphs[head.graph].blocks)
    ]


def _of_head(
    folder: Path, results: AttentionResults, text: SeenText, head: ChosenHead, blocks: frozenset[AttentionBlock]
) -> list[Overlay]:
    choices = results.choices
    name = f"head {choices.number(head.layer, head.head)}"
    file = f"{text.index:06d}_{head.graph}_{choices.number(head.layer, head.head)}"
    own = torch.from_numpy(text.maps[head.graph][head.layer, head.head]).float()[None, None]
    regions = slice(text.length, text.length + len(text.allowed))
    phrases = [row for row, boxes in enumerate(text.facts.boxes) if len(boxes)][:PHRASES]
    if AttentionBlock.WORDS_TO_REGIONS in blocks:
        queries = phrase_queries(text.facts, choices)
        seen = attention_from(own, torch.from_numpy(queries.spans), queries.piece)[0, 0, :, regions].numpy()
        phrases = [row for row in phrases if queries.attends[row]]
        return [
            _region_overlay(
                folder / f"{file}_{row}.jpg",
                text,
                head,
                seen[row],
                text.allowed,
                row,
                f"“{text.facts.phrases[row]}”, {name}",
            )
            for row in phrases
        ]
    if AttentionBlock.REGIONS_TO_REGIONS in blocks:
        overlays = []
        for row in phrases[:1]:
            right = np.flatnonzero(text.is_right[row])
            if len(right):
                others = text.allowed & (np.arange(len(text.allowed)) != right[0])
                seen = own[0, 0, regions, regions][right[0]].numpy()
                title = f"from the region of “{text.facts.phrases[row]}” to the others, {name}"
                overlays.append(
                    _region_overlay(folder / f"{file}_{row}.jpg", text, head, seen, others, row, title, source=right[0])
                )
        return overlays
    return [_word_overlay(folder / f"{file}.png", text, head, own, name)]


def _region_overlay(
    path: Path,
    text: SeenText,
    head: ChosenHead,
    seen: np.ndarray,
    allowed: np.ndarray,
    phrase: int,
    title: str,
    source: int | None = None,
) -> Overlay:
    """Regions coloured by their attention, the most attended one with its share, and the annotated boxes."""
    seen = np.where(allowed, seen, 0)
    total = float(seen.sum())
    best = int(np.where(allowed, seen, -1).argmax()) if allowed.any() else None
    is_right = best is not None and bool(text.is_right[phrase, best])
    note = f"{100 * total:.0f} % of the attention is on regions"
    if best is not None and source is None:
        note += f"; the most attended one is {'right' if is_right else 'wrong'}"
    shown = Overlay(text.index, text.facts.words, head.graph, title, note, path)
    try:
        image = load_image(text.file_name, "RGB")
    except (FileNotFoundError, ValueError) as error:  # it lies in an archive, or was not needed for saved features
        return dataclasses.replace(shown, file=None, problem=str(error))
    image, factor = _shrunk(image)
    regions = text.region_boxes * factor
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
        gold = text.facts.boxes[phrase] * factor
        boxes += list(gold)
        labels += ["annotated"] * len(gold)
        colours += [GREEN] * len(gold)
    picture = draw_boxes(heat_on(image, regions[allowed], seen[allowed]), boxes, labels, colours, title)
    Image.fromarray(picture).save(path, "JPEG", quality=88)
    return shown


def _shrunk(image: np.ndarray) -> tuple[np.ndarray, float]:
    """An image no larger than pictures are, and the factor of its sides."""
    height, width = image.shape[:2]
    factor = min(LONGEST / max(height, width), 1.0)
    if factor == 1:
        return image, 1.0
    size = max(round(width * factor), 1), max(round(height * factor), 1)
    return np.array(Image.fromarray(image).resize(size, Image.Resampling.BILINEAR)), factor


def heat_on(image: np.ndarray, boxes: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The image in grey, with regions coloured by their value relative to the highest one.

    Where regions overlap the highest value counts.

    Args:
        image: uint8 RGB [h, w, 3]; it is not changed.
        boxes: [R, 4] xyxy in its pixels.
        values: [R], not negative.
    """
    height, width = image.shape[:2]
    strength = np.zeros((height, width), dtype=np.float32)
    highest = float(values.max()) if len(values) else 0.0
    for box, value in zip(boxes, values / highest if highest > 0 else values, strict=True):
        x1, y1 = (int(side) for side in np.floor(box[:2]).clip(0, (width, height)))
        x2, y2 = (int(side) for side in np.ceil(box[2:]).clip(0, (width, height)))
        strength[y1:y2, x1:x2] = np.maximum(strength[y1:y2, x1:x2], value)
    grey = (image @ np.array(GREY, dtype=np.float32))[..., None]
    faded = (1 - FADED) * image + FADED * grey
    table = (colormaps[HEAT](np.linspace(0, 1, 256))[:, :3] * 255).astype(np.float32)
    heat = table[np.round(strength * 255).astype(np.uint8)]
    share = (STRONGEST * strength)[..., None]
    return np.round((1 - share) * faded + share * heat).clip(0, 255).astype(np.uint8)


def _word_overlay(path: Path, text: SeenText, head: ChosenHead, own: torch.Tensor, name: str) -> Overlay:
    """The attention among the words of a caption; of a word's wordpieces rows are averaged and columns summed."""
    spans = torch.from_numpy(text.facts.word_spans)
    slots = torch.arange(own.shape[3])
    inside = ((slots >= spans[:, :1]) & (slots < spans[:, 1:])).float()
    values = (attention_from(own, spans, "mean")[0, 0] @ inside.T).numpy()
    path.write_bytes(draw_word_map(f"{head.graph}, {name}", text.facts.forms, values))
    return Overlay(
        text.index, text.facts.words, head.graph, f"words to words, {name}", "each row attends to the columns", path
    )
