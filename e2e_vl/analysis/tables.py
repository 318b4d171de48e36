"""The results of an analysis, and their JSON and CSV files."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from e2e_vl.analysis.collect import ALL, CONFIDENCE, ENTITIES, LARGEST, NEEDS, RELATIONS, MeasureKey
from e2e_vl.analysis.measures import HeadSums
from e2e_vl.analysis.options import AttentionOptions
from e2e_vl.structures import AttentionBlock, AttentionGraph

# descriptions of the baselines
BASELINE_DESCRIPTIONS = {
    CONFIDENCE: "always the region with the highest detection confidence (the paper's baseline)",
    LARGEST: "always the largest region",
    "chance": "a region (or word) drawn at random",
    "word before": "always the word before",
    "word behind": "always the word behind",
}
NO_CONFIDENCE = (
    "The regions have no detection confidences, so the paper's baseline (always the region with the highest one) "
    "cannot be computed; compare with the largest region and with chance."
)


@dataclasses.dataclass(frozen=True)
class AttentionResults:
    """The results of an analysis."""

    run: str
    encoder: str
    data: str
    split: str
    boxes: str
    parses: str | None  # file or spaCy model; None without parses
    options: AttentionOptions
    graphs: Mapping[str, AttentionGraph]
    sums: Mapping[MeasureKey, HeadSums]
    numbers: Mapping[str, int]
    relations: Mapping[str, list[str]]  # graph -> relations to show
    images: int

    def of(self, graph: str, measure: str, label: str = ALL) -> HeadSums | None:
        """The sums of a measure; None if it has no examples."""
        found = self.sums.get(MeasureKey(graph, measure, label))
        return found if found is not None and found.examples else None

    def measures(self, graph: str) -> list[str]:
        """The measures of a graph that have examples."""
        return list(
            dict.fromkeys(key.measure for key in self.sums if key.graph == graph and self.of(graph, key.measure))
        )

    @property
    def notes(self) -> list[str]:
        """Notes that accompany the results."""
        notes = []
        if not any(CONFIDENCE in sums.baselines for sums in self.sums.values()):
            notes.append(NO_CONFIDENCE)
        if self.parses is None:
            notes.append("Syntactic grounding needs parses; give --parses or --spacy.")
        share = f"{100 * self.options.active_above:g} %"
        notes.append(
            f"A head is active if, on average over the examples of the measure, more than {share} of the attention of "
            "the measured words is on regions."
            if self.options.active_over == "examples"
            else f"A head is active if, on average over all measured entities, more than {share} of their attention is "
            "on regions; this also decides which heads are active for relations."
        )
        notes.append(f"A region is correct if its IoU with an annotated box is at least {self.options.min_iou:g}.")
        notes.append(
            "Ties (several regions with the same highest attention or baseline score) are resolved in favour of the "
            "first box."
        )
        return notes

    def active(self, graph: str, measure: str, label: str = ALL) -> Bool[Tensor, "layers heads"]:
        """The active heads of a measure, see `options.active_over`; all False without examples."""
        own = sums = self.of(graph, measure, label)
        if self.options.active_over == "entities" and NEEDS[measure] is AttentionBlock.WORDS_TO_REGIONS:
            sums = self.of(graph, ENTITIES)
        if sums is None:
            return torch.zeros_like(own.hits, dtype=torch.bool)
        return sums.mean_attention > self.options.active_above

    def best_active(self, graph: str, measure: str, label: str = ALL) -> tuple[int, int] | None:
        """Layer and head of the active head with the highest accuracy; None without examples or an active head."""
        sums = self.of(graph, measure, label)
        return None if sums is None else sums.best(self.active(graph, measure, label))

    def summary(self, graph: str, measure: str, label: str = ALL) -> dict[str, Any]:
        """One measure as a JSON-ready dict: its best heads and baselines."""
        sums = self.of(graph, measure, label)
        found: dict[str, Any] = {
            "examples": sums.examples,
            "divided_by": sums.count,
            "baselines": {name: sums.baseline(name) for name in sums.baselines},
        }
        places = {"best_head": sums.best(), "best_active_head": self.best_active(graph, measure, label)}
        for name, place in places.items():
            found[name] = None
            if place is not None:
                found[name] = {
                    "head": self.options.number(*place),
                    "accuracy": float(sums.accuracy[place]),
                    "attention": float(sums.mean_attention[place]),
                }
        return found

    def lines(self) -> list[str]:
        """A text summary: one line per graph and measure, then the notes."""
        found = []
        for graph in self.graphs:
            for measure in self.measures(graph):
                one = self.summary(graph, measure)
                best = (
                    one["best_active_head"] if NEEDS[measure] is AttentionBlock.WORDS_TO_REGIONS else one["best_head"]
                )
                said = "no head is active" if best is None else f"{best['accuracy']:.4f} (head {best['head']})"
                rules = ", ".join(f"{name} {value:.4f}" for name, value in one["baselines"].items())
                found.append(f"{graph}, {measure}: {said}; {rules}; {one['examples']} examples")
        return [*found, *self.notes]

    def as_json(self) -> dict[str, Any]:
        """All results and options as a JSON-ready dict; matrices are [layer][head]."""
        graphs: dict[str, Any] = {}
        for graph, phrases in self.graphs.items():
            measures = {}
            for measure in self.measures(graph):
                labels = sorted({key.label for key in self.sums if (key.graph, key.measure) == (graph, measure)})
                own = {}
                for label in labels:
                    sums = self.of(graph, measure, label)
                    matrices = {"accuracy": sums.accuracy.tolist(), "attention": sums.mean_attention.tolist()}
                    own[label] = {**self.summary(graph, measure, label), **matrices}
                measures[measure] = {**own.pop(ALL), "by_relation": own}
            graphs[graph] = {
                "layers": len(phrases.steps),
                "reads": sorted(map(str, phrases.blocks)),
                "shown_relations": self.relations[graph],
                "measures": measures,
            }
        return {
            "run": self.run,
            "encoder": self.encoder,
            "data": self.data,
            "split": self.split,
            "images": self.images,
            "boxes": self.boxes,
            "parses": self.parses,
            "options": {choice["name"]: choice["value"] for choice in self.options.describe()},
            "notes": self.notes,
            "numbers": dict(self.numbers),
            "graphs": graphs,
        }

    def relation_rows(self, graph: str, measure: str = RELATIONS) -> list[dict[str, Any]]:
        """The shown relations as rows of the paper's table 2: baselines and the best active head of each."""
        rows = []
        for label in self.relations[graph]:
            sums = self.of(graph, measure, label)
            place = self.best_active(graph, measure, label)
            rows.append(
                {
                    "relation": label,
                    "pairs": sums.examples,
                    **{name: sums.baseline(name) for name in sums.baselines},
                    "best active head": "" if place is None else self.options.number(*place),
                    "accuracy": None if place is None else float(sums.accuracy[place]),
                    "attention on regions": None if place is None else float(sums.mean_attention[place]),
                }
            )
        return rows


def write_tables(folder: Path, results: AttentionResults) -> None:
    """Write `heads.csv`, `relations.csv` (every head of every measure and relation) and `table2_<graph>.csv`."""
    write_csv(folder / "heads.csv", _head_rows(results, only_all=True))
    write_csv(folder / "relations.csv", _head_rows(results, only_all=False))
    for graph in results.graphs:
        if rows := results.relation_rows(graph):
            write_csv(folder / f"table2_{graph}.csv", rows)


def _head_rows(results: AttentionResults, *, only_all: bool) -> Iterable[dict[str, Any]]:
    first = results.options.first_number
    for key, sums in results.sums.items():
        if not sums.examples or (key.label == ALL) != only_all:
            continue
        is_active = results.active(key.graph, key.measure, key.label).tolist()
        knows_active = NEEDS[key.measure] is AttentionBlock.WORDS_TO_REGIONS
        names = {} if only_all else {"relation": key.label}
        for layer, heads in enumerate(sums.accuracy.tolist()):
            for head, accuracy in enumerate(heads):
                yield {
                    "graph": key.graph,
                    "measure": key.measure,
                    **names,
                    "layer": layer + first,
                    "head": head + first,
                    "accuracy": accuracy,
                    "attention": float(sums.mean_attention[layer, head]),
                    "active": ("yes" if is_active[layer][head] else "no") if knows_active else "",
                    "examples": sums.examples,
                }


def write_csv(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows with a header; no file if there are no rows."""
    rows = iter(rows)
    first = next(rows, None)
    if first is None:
        return
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(first))
        writer.writeheader()
        writer.writerow(first)
        writer.writerows(rows)
