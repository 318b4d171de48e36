"""Draw accuracy, and what the region features know, over the steps of runs with the detector frozen and trained.

    python tools/experiments/plateau.py --output runs/plateau --jobs 2
    python tools/experiments/plateau.py --output runs/plateau --figure docs/end_to_end_steps.png
    python tools/experiments/plateau.py --output runs/plateau --dry-run --timed runs/end_to_end

The runs are those of configs/end_to_end/plateau.yaml: of one setting of tools/experiments/end_to_end.py, in
OUTPUT/<setting>_<task>_<encoder>_<run>_<seed>, and the detector that they start from in OUTPUT/<detector>. Accuracy is
what they log in their evaluations. Linear probes (e2e-vl probe) read the labels of annotated objects off the region
features of the checkpoints of the first seed, in this process once its runs are finished; OUTPUT/probe has all of them.

Writes OUTPUT/plateau.json, plateau.md and the figure, also after a failure. Finished runs are not repeated and
interrupted ones are continued: repeat the command until all are done.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from compare import Job, format_mean, made_by, markdown_table, mean_and_std, run_jobs, write_table
from detector.io import read_yaml
from e2e_vl.cli.main import make_parser, print_errors
from e2e_vl.config_files import load_config
from e2e_vl.io import read_log
from e2e_vl.registry import Config, decode
from e2e_vl.run.metric_names import MetricName
from end_to_end import BOXES, EXPERIMENT, Cell, Experiment, add_run_options, announce, make_jobs, plan
from pairs import ROOT, TASKS

PLATEAU = ROOT / "configs" / "end_to_end" / "plateau.yaml"
RUN_COLOURS = ("#666666", "#1f5fa8", "#00a0a8")  # in the order of the runs
LABEL_COLOURS = ("#b3261e", "#0a7d32", "#6a3fa0", "#c77700")  # in the order of the labels
LINE_STYLES = ("-", "--")  # of the probed runs
FONT = 9


class PlateauRun(Config, frozen=True):
    """A line of the figure."""

    title: str
    overrides: list[str]


class Plateau(Config, frozen=True):
    """The content of configs/end_to_end/plateau.yaml; overrides are `key=value` settings."""

    setting: str
    task: str
    encoder: str
    overrides: list[str]
    runs: dict[str, PlateauRun]
    probed: list[str]
    probed_overrides: list[str]
    labels: list[str]


@print_errors
def main(argv: list[str] | None = None) -> int:
    plateau = decode(read_yaml(PLATEAU), Plateau, PLATEAU.name)
    experiment = add_runs(decode(read_yaml(EXPERIMENT), Experiment, EXPERIMENT.name), plateau)
    parser = make_parser(__doc__)
    parser.add_argument("--figure", type=Path, metavar="PNG", help="the figure (default: OUTPUT/plateau.png)")
    add_run_options(parser)
    args = parser.parse_args(argv)
    cells = plan(experiment, [plateau.setting], [plateau.task], [plateau.encoder], args.seeds)
    jobs, _ = make_jobs(experiment, cells, args.output, args.configs, args.set, args.set_detectors)
    jobs |= add_overrides(plateau, cells, jobs, args.set)
    announce(cells, jobs, args)
    if args.dry_run:
        return 0
    try:
        run_jobs(list(jobs.values()), launch=args.launch, parallel=args.jobs, keep_going=True)
    finally:  # the table has the finished runs even after a failure
        results = collect(plateau, cells, jobs, args.output)
        write_table(args.output / "plateau", results, [*as_markdown(results), made_by(__file__, argv)])
        draw(results, args.figure or args.output / "plateau.png")
    return 0


def add_runs(experiment: Experiment, plateau: Plateau) -> Experiment:
    """Return the experiment with the runs of the plateau as its variants."""
    variants = {name: run.overrides for name, run in plateau.runs.items()}
    return msgspec.structs.replace(experiment, common=[*experiment.common, *plateau.overrides], variants=variants)


def add_overrides(
    plateau: Plateau, cells: Sequence[Cell], jobs: Mapping[str, Job], overrides: Sequence[str]
) -> dict[str, Job]:
    """Return the runs, those of the probed seed with more checkpoints; `overrides` come last."""
    changed = {}
    for cell in cells:
        words = list(jobs[cell.name].overrides)
        if is_probed(plateau, cells, cell):
            words += plateau.probed_overrides
        changed[cell.name] = dataclasses.replace(jobs[cell.name], overrides=(*words, *overrides))
    return changed


def is_probed(plateau: Plateau, cells: Sequence[Cell], cell: Cell) -> bool:
    """Return whether the checkpoints of a run are probed: those of the first seed."""
    return cell.seed == cells[0].seed and cell.variant in plateau.probed


def collect(plateau: Plateau, cells: Sequence[Cell], jobs: Mapping[str, Job], output: Path) -> dict[str, Any]:
    """Return the results of finished runs.

    Returns:
        "metric": what accuracy is measured on. "accuracy": title of a run -> what `average_steps` returns. "probes":
        what `probe` returns; None until all probed runs are finished.
    """
    finished = [cell for cell in cells if jobs[cell.name].metrics is not None]
    metric = ""
    curves: dict[str, dict[int, dict[int, float]]] = {}  # title -> seed -> step -> accuracy
    for cell in finished:
        config = load_config(jobs[cell.name].config, jobs[cell.name].all_overrides)
        split, *_ = config.data.eval_splits
        boxes, *_ = config.eval.boxes
        _, measure = TASKS[cell.task]
        metric = f"{measure}, {split}, {BOXES[boxes]}"
        name = str(MetricName(split, measure, boxes))
        lines = read_log(jobs[cell.name].run / "log.jsonl")
        by_step = {line["step"]: line[name] for line in lines if name in line}
        curves.setdefault(plateau.runs[cell.variant].title, {})[cell.seed] = by_step
    accuracy = {}
    for run in plateau.runs.values():
        if run.title in curves:
            accuracy[run.title] = average_steps(curves[run.title])
    probed_runs = {}
    for name in plateau.probed:
        for cell in finished:
            if cell.variant == name and is_probed(plateau, cells, cell):
                probed_runs[plateau.runs[name].title] = jobs[cell.name].run
    probes = None
    if len(probed_runs) == len(plateau.probed):
        probes = probe(probed_runs, plateau.labels, config.data.eval_splits[0], output / "probe")
    return {"metric": metric, "accuracy": accuracy, "probes": probes}


def average_steps(curves: Mapping[int, Mapping[int, float]]) -> dict[str, Any]:
    """Return "seeds", and under "steps" for each step that all seeds have: "values", "mean" and "std".

    Args:
        curves: seed -> step -> accuracy.
    """
    steps = set.intersection(*(set(curve) for curve in curves.values()))
    rows = {}
    for step in sorted(steps):
        values = [curve[step] for curve in curves.values()]
        rows[step] = {"values": values, **mean_and_std(values)}
    return {"seeds": list(curves), "steps": rows}


def probe(runs: Mapping[str, Path], labels: Sequence[str], split: str, output: Path) -> dict[str, Any]:
    """Probe the region features of all checkpoints of some runs.

    Returns:
        "images", and "labels": label -> "chance" and "runs": title -> step -> accuracy.
    """
    from e2e_vl.analysis.probe import ProbeArguments, probe_runs  # late: imports torch
    from e2e_vl.analysis.probe_report import REGION_FEATURE

    arguments = ProbeArguments(
        runs=tuple(runs.values()),
        split=split,
        output=output,
        max_images=None,
        max_checkpoints=100,
        gradient_batches=0,
    )
    results, _ = probe_runs(arguments)
    by_label: dict[str, dict[str, Any]] = {}
    for label in labels:
        curves = {}
        for title, run in runs.items():
            steps = results.steps(str(run))
            curves[title] = {step: results.accuracy(str(run), step, REGION_FEATURE, label) for step in steps}
        by_label[label] = {"chance": results.chance(label, [REGION_FEATURE]), "runs": curves}
    return {"images": results.images, "labels": by_label}


def as_markdown(results: Mapping[str, Any]) -> list[str]:
    """Return the lines of a table of accuracies and a table of probes, with a row per step."""
    if not results["accuracy"]:
        return ["No run is finished yet.", ""]
    titles = list(results["accuracy"])
    steps: set[int] = set()
    for curve in results["accuracy"].values():
        steps.update(curve["steps"])
    rows = {}
    for step in sorted(steps):
        entries = [curve["steps"].get(step) for curve in results["accuracy"].values()]
        rows[str(step)] = ["–" if entry is None else format_mean(entry, "{:.3f}") for entry in entries]
    seeds = max(len(curve["seeds"]) for curve in results["accuracy"].values())
    lines = [f"## {results['metric']}, by step", "", *markdown_table(titles, rows), ""]
    if seeds > 1:
        lines += [f"Mean ± standard deviation of {seeds} seeds.", ""]
    if results["probes"] is None:
        return lines
    columns = []
    cells_by_step: dict[str, list[str]] = {"chance": []}
    for label, probes in results["probes"]["labels"].items():
        for title, curve in probes["runs"].items():
            columns.append(f"{label}, {title}")
            cells_by_step["chance"].append(f"{probes['chance']:.2f}")
            for step, accuracy in curve.items():
                cells_by_step.setdefault(str(step), []).append(f"{accuracy:.2f}")
    images = results["probes"]["images"]
    note = f"Linear probes of the region feature, first seed, on {images} images; learned on half of them."
    return [*lines, "## linear probe, by step", "", *markdown_table(columns, cells_by_step), "", note, ""]


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Draw accuracy over steps beside what the region features know; nothing without a finished run."""
    if not results["accuracy"]:
        return
    figure = Figure(figsize=(9, 4.3), dpi=200, layout="constrained")
    accuracy_axes, probe_axes = figure.subplots(1, 2)
    draw_accuracy(accuracy_axes, results)
    if results["probes"] is not None:
        draw_probes(probe_axes, results["probes"])
    for axes in (accuracy_axes, probe_axes):
        axes.set_xlim(left=0)
        axes.set_ylim(0, 1.02)
        axes.set_xlabel("step", fontsize=FONT)
        axes.tick_params(labelsize=FONT)
        axes.grid(alpha=0.25)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def draw_accuracy(axes: Axes, results: Mapping[str, Any]) -> None:
    """Draw the mean of each run over steps, and a band from the lowest to the highest seed."""
    for (title, curve), colour in zip(results["accuracy"].items(), RUN_COLOURS, strict=False):
        steps = list(curve["steps"])
        entries = list(curve["steps"].values())
        axes.plot(steps, [entry["mean"] for entry in entries], color=colour, label=title)
        lowest = [min(entry["values"]) for entry in entries]
        highest = [max(entry["values"]) for entry in entries]
        axes.fill_between(steps, lowest, highest, color=colour, alpha=0.2, linewidth=0)
    axes.set_title(results["metric"], fontsize=FONT + 1)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), fontsize=FONT, frameon=False)


def draw_probes(axes: Axes, probes: Mapping[str, Any]) -> None:
    """Draw the probes of each label over steps: a colour per label, a line style per run, chance dotted."""
    handles = []
    titles = []
    for (label, entry), colour in zip(probes["labels"].items(), LABEL_COLOURS, strict=True):
        for (title, curve), style in zip(entry["runs"].items(), LINE_STYLES, strict=True):
            axes.plot(list(curve), list(curve.values()), color=colour, linestyle=style)
            titles.append(title)
        axes.axhline(entry["chance"], color=colour, linestyle=":", linewidth=1)
        handles.append(Line2D([], [], color=colour, label=label))
    for title, style in zip(dict.fromkeys(titles), LINE_STYLES, strict=True):
        handles.append(Line2D([], [], color="black", linestyle=style, label=title))
    handles.append(Line2D([], [], color="black", linestyle=":", linewidth=1, label="chance"))
    axes.set_title("linear probe of the region feature", fontsize=FONT + 1)
    axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, fontsize=FONT, frameon=False)


if __name__ == "__main__":
    raise SystemExit(main())
