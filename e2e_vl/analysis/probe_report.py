"""The results of `e2e-vl probe`: lines for the terminal, files, pictures and a page."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from detector.io import write_json
from e2e_vl.analysis.results import encode_png, write_csv
from e2e_vl.run.report import data_uri, render, typed_command

REGION_FEATURE = "region feature"  # the depth of what the detector gives to the encoder
CHANCE_OF_REGIONS = "chance"
CHANCE_OF_WORDS = "chance, words"
WORDS = "words, "  # prefix of the depths at which the words of a phrase are probed for the object that it names
RESULTS_FOLDER = "probe"  # of a run directory
RESULTS_PAGE = "probe.html"
RESULT_FILES = (RESULTS_PAGE, "probe.json", "probe.csv", "gradients.csv", "accuracy_*.png", "gradients.png")

PANELS_PER_ROW = 2
COLOURS = ("#1f5fa8", "#b3261e", "#0a7d32", "#8a5a00", "#6a3fa0", "#00838f", "#c2185b", "#7c9a00")
LINE_STYLES = ("-", "--", "-.", ":")  # of runs
MAX_MODELS = 6  # of a run in the picture of gradients
LIGHT = 0.35  # opacity of the first model of a run
CHANCE = "#666666"
CHANCE_STYLE = {"color": CHANCE, "linestyle": ":", "linewidth": 1.2, "zorder": 0}
FONT = 8
CHARACTERS_PER_INCH = 15


@dataclasses.dataclass(frozen=True)
class ProbeRow:
    """The accuracy of one probe."""

    run: str
    step: int
    depth: str
    label: str
    accuracy: float
    chance: float
    trained_on: int  # objects
    judged: int  # objects


@dataclasses.dataclass(frozen=True)
class GradientRow:
    """The gradient of a stage of one model, see `e2e_vl.analysis.gradients.StageGradient`."""

    run: str
    step: int
    stage: str
    is_trained: bool
    weight_norm: float
    task_gradient: float
    detection_gradient: float
    agreement: float | None
    update: float | None
    relative_gradient: float


@dataclasses.dataclass
class ProbeResults:
    """The results of a diagnosis."""

    runs: list[str]
    data: str
    split: str
    images: int = 0
    boxes: int = 0
    phrases: int = 0  # that name one of the boxes, and whose words are probed
    labels: dict[str, list[str]] = dataclasses.field(default_factory=dict)  # label -> its values
    probes: list[ProbeRow] = dataclasses.field(default_factory=list)
    gradients: list[GradientRow] = dataclasses.field(default_factory=list)
    gradient_batches: int = 0  # whose gradients were measured
    notes: list[str] = dataclasses.field(default_factory=list)  # what could not be measured, and why

    def probed_labels(self) -> list[str]:
        """List the labels with a probe."""
        return list(dict.fromkeys(row.label for row in self.probes))

    def depths(self) -> list[str]:
        """List the depths of all models, from the pixels to the last layer."""
        by_run: dict[str, list[str]] = {}
        for row in self.probes:
            by_run.setdefault(row.run, []).append(row.depth)
        return merge_orders([list(dict.fromkeys(depths)) for depths in by_run.values()])

    def parts(self) -> dict[str, list[str]]:
        """Return the probed depths of regions and of words, by the name of their chance level."""
        regions = []
        words = []
        for depth in self.depths():
            (words if depth.startswith(WORDS) else regions).append(depth)
        parts = {CHANCE_OF_REGIONS: regions, CHANCE_OF_WORDS: words}
        return {name: depths for name, depths in parts.items() if depths}

    def stages(self) -> list[str]:
        """List the stages of all models, from the pixels to the heads."""
        by_run: dict[str, list[str]] = {}
        for row in self.gradients:
            by_run.setdefault(row.run, []).append(row.stage)
        return merge_orders([list(dict.fromkeys(stages)) for stages in by_run.values()])

    def steps(self, run: str) -> list[int]:
        """List the steps of the probed models of a run."""
        return sorted({row.step for row in self.probes if row.run == run})

    def chance(self, label: str, depths: Sequence[str]) -> float | None:
        """Return the accuracy of the most frequent value at some depths; None if there is no probe."""
        for row in self.probes:
            if row.label == label and row.depth in depths:
                return row.chance
        return None

    def accuracy(self, run: str, step: int, depth: str, label: str) -> float | None:
        """Return the accuracy of a probe; None if there is none."""
        for row in self.probes:
            if (row.run, row.step, row.depth, row.label) == (run, step, depth, label):
                return row.accuracy
        return None

    def tables(self) -> list[dict[str, Any]]:
        """Return a table for each run, in the parts regions and words.

        A part has a row per depth with a cell per label: the accuracies of the first and the last model. "chance" is
        a row of such cells, too.
        """
        tables = []
        for run in self.runs:
            steps = self.steps(run)
            ends = list(dict.fromkeys([steps[0], steps[-1]]))
            run_depths = {row.depth for row in self.probes if row.run == run}
            parts = []
            for name, depths in self.parts().items():
                rows: dict[str, list[list[float | None]]] = {}
                for depth in depths:
                    if depth in run_depths:
                        rows[depth] = [self.accuracies(run, ends, depth, label) for label in self.probed_labels()]
                if rows:
                    chance = [[self.chance(label, depths)] for label in self.probed_labels()]
                    parts.append({"name": name, "chance": chance, "rows": rows})
            tables.append({"run": run, "steps": ends, "parts": parts})
        return tables

    def accuracies(self, run: str, steps: Sequence[int], depth: str, label: str) -> list[float | None]:
        return [self.accuracy(run, step, depth, label) for step in steps]

    def gradients_of(self, run: str, step: int) -> list[GradientRow]:
        return [row for row in self.gradients if (row.run, row.step) == (run, step)]

    def summary_lines(self) -> list[str]:
        """Return a line per run and label, then a line per stage of each run's last model, then the notes."""
        lines = [f"{self.boxes:,} annotated boxes in {self.images:,} images of {self.data}, split {self.split}"]
        if self.phrases:
            lines.append(f"{self.phrases:,} texts or phrases that name one of them")
        for table in self.tables():
            steps = " -> ".join(map(str, table["steps"]))
            lines.append(f"{table['run']}: accuracy of linear probes, step {steps}")
            for part in table["parts"]:
                for column, label in enumerate(self.probed_labels()):
                    changes = []
                    for depth, cells in part["rows"].items():
                        changes.append(f"{depth} {format_change(cells[column])}")
                    chance = format_change(part["chance"][column])
                    lines.append(f"  {label} (chance {chance}): {'; '.join(changes)}")
            rows = self.gradients_of(table["run"], table["steps"][-1])
            if rows:
                lines.append(f"{table['run']}: gradients at step {table['steps'][-1]}")
            for row in rows:
                lines.append(f"  {row.stage:20s} {describe_gradient(row)}")
        return [*lines, *self.notes]


def merge_orders(orders: Sequence[Sequence[str]]) -> list[str]:
    """Merge lists of names into one that keeps the order of each, as far as they agree."""
    merged: list[str] = []
    for order in orders:
        position = 0
        for name in order:
            if name in merged:
                position = merged.index(name) + 1
            else:
                merged.insert(position, name)
                position += 1
    return merged


def format_change(values: Sequence[float | None]) -> str:
    """Format the accuracies of the first and the last model."""
    return " -> ".join("–" if value is None else f"{value:.2f}" for value in values)


def describe_gradient(row: GradientRow) -> str:
    """Describe the gradient of a stage in a line."""
    if not row.is_trained:
        return "frozen"
    parts = [f"task gradient {row.task_gradient:.2g} ({row.relative_gradient:.2g} of the weights)"]
    if row.detection_gradient:
        parts.append(f"detection {row.detection_gradient:.2g}")
    if row.agreement is not None:
        parts.append(f"agreement of batches {row.agreement:.2f}")
    if row.update is not None:
        parts.append(f"update {row.update:.2g} of the weights")
    return ", ".join(parts)


def write_results(folder: Path, results: ProbeResults) -> Path:
    """Write all files of a diagnosis into a folder; returns the page."""
    write_json(folder / "probe.json", dataclasses.asdict(results))
    write_csv(folder / "probe.csv", [dataclasses.asdict(row) for row in results.probes])
    write_csv(folder / "gradients.csv", [dataclasses.asdict(row) for row in results.gradients])
    pictures = {"accuracy_by_depth": draw_depths(results)}
    if any(len(results.steps(run)) > 1 for run in results.runs):
        pictures["accuracy_over_steps"] = draw_steps(results)
    if results.gradients:
        pictures["gradients"] = draw_gradients(results)
    for name, content in pictures.items():
        (folder / f"{name}.png").write_bytes(content)
    return render(
        folder / RESULTS_PAGE,
        "probe_page.html.jinja",
        results=results,
        command=typed_command("--run"),
        pictures={name: data_uri(content, "png") for name, content in pictures.items()},
    )


# Pictures


def draw_depths(results: ProbeResults) -> bytes:
    """Plot accuracy by depth as PNG, a panel per label; the first model of a run is light.

    Words and regions have separate curves.
    """
    depths = results.depths()
    figure, panels = make_panels(results.probed_labels(), width=max(4.2, 0.5 * len(depths)))
    for label, axes in panels.items():
        for number, run in enumerate(results.runs):
            steps = results.steps(run)
            for step in dict.fromkeys([steps[0], steps[-1]]):
                opacity = LIGHT if step == steps[0] and len(steps) > 1 else 1.0
                style = {"color": colour_of(number), "alpha": opacity, "label": f"{run}, step {step}"}
                for part in results.parts().values():
                    points = []
                    for depth in part:
                        points.append((depths.index(depth), results.accuracy(run, step, depth, label)))
                    plot_points(axes, points, style)
        for part in results.parts().values():
            chance = results.chance(label, part)
            if chance is not None:
                ends = (depths.index(part[0]) - 0.4, depths.index(part[-1]) + 0.4)
                axes.plot(ends, (chance, chance), **CHANCE_STYLE, label="chance")
        axes.set_xticks(range(len(depths)), depths, rotation=40, ha="right")
        finish_panel(axes, results, label)
    add_legend(figure, panels.values())
    return encode_png(figure)


def draw_steps(results: ProbeResults) -> bytes:
    """Plot accuracy over steps as PNG, a panel per label and a curve per depth, of the deepest ones.

    A colour stands for a depth, and a line style for a run.
    """
    depths = choose_curves(results.depths())
    figure, panels = make_panels(results.probed_labels(), width=4.2)
    for label, axes in panels.items():
        for line_style, run in zip_cyclic(LINE_STYLES, results.runs):
            for number, depth in enumerate(depths):
                points = [(step, results.accuracy(run, step, depth, label)) for step in results.steps(run)]
                plot_points(axes, points, {"linestyle": line_style, "color": colour_of(number), "label": depth})
            if len(results.runs) > 1:
                axes.plot([], [], color="black", linestyle=line_style, label=run)
        for part, part_depths in results.parts().items():
            chance = results.chance(label, part_depths)
            if chance is not None:
                axes.axhline(chance, **CHANCE_STYLE, alpha=1.0 if part == CHANCE_OF_REGIONS else 0.5, label=part)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        axes.set_xlabel("step", fontsize=FONT)
        finish_panel(axes, results, label)
    add_legend(figure, panels.values())
    return encode_png(figure)


def plot_points(axes: Axes, points: Sequence[tuple[float, float | None]], style: Mapping[str, Any]) -> None:
    """Plot a curve through the points whose value is known."""
    known = [point for point in points if point[1] is not None]
    if known:
        axes.plot(*zip(*known, strict=True), marker="o", markersize=3, **style)


MEASURES = {  # field of a row -> title
    "task_gradient": "norm of the task's gradient",
    "relative_gradient": "the same / norm of the weights",
    "update": "update at the highest rate / norm of the weights",
    "agreement": "agreement of batches (1: all in one direction)",
}


def draw_gradients(results: ProbeResults) -> bytes:
    """Plot the gradients of each stage as PNG, a panel per measure; later models of a run are darker."""
    stages = results.stages()
    shown = [name for name in MEASURES if any(getattr(row, name) is not None for row in results.gradients)]
    figure, panels = make_panels(shown, width=max(4.2, 0.42 * len(stages)))
    for name, axes in panels.items():
        for number, run in enumerate(results.runs):
            steps = sorted({row.step for row in results.gradients if row.run == run})
            steps = spread(steps, MAX_MODELS)
            for position, step in enumerate(steps):
                values = [math.nan] * len(stages)  # a gap where there is no gradient
                for row in results.gradients_of(run, step):
                    values[stages.index(row.stage)] = getattr(row, name) or math.nan
                opacity = LIGHT + (1 - LIGHT) * (position + 1) / len(steps)
                axes.plot(
                    range(len(stages)),
                    values,
                    marker="o",
                    markersize=3,
                    color=colour_of(number),
                    alpha=opacity,
                    label=f"{run}, step {step}",
                )
        if name == "agreement":
            axes.set_ylim(0, 1.05)
            axes.axhline(results.gradient_batches**-0.5, **CHANCE_STYLE, label="chance")
        else:
            axes.set_yscale("log")
        axes.set_xticks(range(len(stages)), stages, rotation=40, ha="right")
        axes.set_title(MEASURES[name], fontsize=FONT + 1)
        axes.tick_params(labelsize=FONT, which="both")
        axes.grid(alpha=0.25)
    add_legend(figure, panels.values())
    return encode_png(figure)


def make_panels(names: Sequence[str], *, width: float) -> tuple[Figure, dict[str, Axes]]:
    """Make a figure with a panel per name; `width`: of a panel, inches."""
    columns = min(PANELS_PER_ROW, len(names))
    rows = math.ceil(len(names) / columns)
    figure = Figure(figsize=(width * columns, 2.9 * rows + 0.6), layout="constrained", dpi=130)
    return figure, {name: figure.add_subplot(rows, columns, number) for number, name in enumerate(names, start=1)}


def finish_panel(axes: Axes, results: ProbeResults, label: str) -> None:
    """Add limits and a title to a panel of accuracies."""
    axes.set_ylim(0, 1.04)
    axes.set_title(f"{label} ({len(results.labels[label])} values)", fontsize=FONT + 1, parse_math=False)
    axes.set_ylabel("accuracy", fontsize=FONT)
    axes.tick_params(labelsize=FONT)
    axes.grid(alpha=0.25)


def add_legend(figure: Figure, panels: Sequence[Axes]) -> None:
    """Add one legend below all panels."""
    handles = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    width = max(map(len, handles)) + 8  # characters, with the sample of the line
    columns = int(figure.get_figwidth() * CHARACTERS_PER_INCH / width)
    columns = min(max(columns, 1), 3)
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=columns, fontsize=FONT, frameon=False
    )


def choose_curves(depths: Sequence[str]) -> list[str]:
    """Choose the depths that are drawn over steps: some of the backbone, the region feature, the encoder's ends.

    Of the words, the first and the last depth are drawn.
    """
    regions = [depth for depth in depths if not depth.startswith(WORDS)]
    words = [depth for depth in depths if depth.startswith(WORDS)]
    border = regions.index(REGION_FEATURE)
    return [*spread(regions[:border], 3), REGION_FEATURE, *spread(regions[border + 1 :], 2), *spread(words, 2)]


def spread(values: Sequence[Any], limit: int) -> list[Any]:
    """Return at most `limit` of the values, the first and the last one among them, spread evenly."""
    if len(values) <= limit:
        return list(values)
    return [values[round(number * (len(values) - 1) / (limit - 1))] for number in range(limit)]


def zip_cyclic(styles: Sequence[str], runs: Sequence[str]) -> list[tuple[str, str]]:
    return [(styles[number % len(styles)], run) for number, run in enumerate(runs)]


def colour_of(number: int) -> str:
    return COLOURS[number % len(COLOURS)]
