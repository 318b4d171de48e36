"""Train tasks with the detector frozen and trained, from detectors that know all, classes only, or other pictures.

    python tools/experiments/end_to_end.py --output runs/end_to_end --jobs 2
    python tools/experiments/end_to_end.py --output runs/end_to_end --settings classes_only --tasks refcoco --seeds 0
    python tools/experiments/end_to_end.py --output runs/end_to_end --dry-run --timed runs/trial

What the settings, tasks, encoders and variants are is in configs/end_to_end/settings.yaml. Each run of tools/train.py
lies in OUTPUT/<setting>_<task>_<encoder>_<variant>_<seed>. It starts from a random encoder and from its setting's
detector, which is trained once (configs/pairs/detector.yaml, in OUTPUT/<detector>), or continues another task's run.
Scenes are drawn into OUTPUT/data.

Writes OUTPUT/end_to_end.json, end_to_end.md and end_to_end.png with all finished runs, also after a failure: accuracy
on the evaluated splits with annotated and predicted boxes, mean and standard deviation over seeds, the difference
between trained and frozen with the same seed, and the best rule that does not read everything
(e2e_vl/synthetic/shortcuts.py).
Finished runs are not repeated and interrupted ones are continued: repeat the command until all are done. The time that
unfinished runs need is estimated from the seconds per step of finished ones.
"""

from __future__ import annotations

import argparse
import itertools
import math
import operator
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from compare import Job, add_common_options, made_by, markdown_table, mean_and_std, run_jobs, write_table
from detector.io import read_json, read_yaml
from e2e_vl.cli.main import make_parser, print_errors
from e2e_vl.config import BoxSource, RunConfig
from e2e_vl.config_files import load_config, save_config
from e2e_vl.metrics.baselines import CHANCE, read_baselines
from e2e_vl.registry import Config, decode
from e2e_vl.run.metric_names import MetricName
from pairs import CONFIGS, DETECTOR, ENCODERS, ROOT, TASKS, make_config

EXPERIMENT = ROOT / "configs" / "end_to_end" / "settings.yaml"
BOXES = {"gt": "annotated boxes", "online": "predicted boxes"}
DIFFERENCE = "difference"  # of the second variant to the first, in the table


class TaskPlan(Config, frozen=True):
    """The runs of a task in every setting."""

    encoders: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    # another task, whose run of the same setting, encoder, variant and seed comes first: detector and encoder continue
    after: str | None = None


class Setting(Config, frozen=True):
    """What the detector knows when a task begins, and what the task's pictures are."""

    title: str
    detector: str  # which of the experiment's detectors
    data: str  # name of the synthetic scenes
    overrides: tuple[str, ...] = ()
    task_overrides: dict[str, tuple[str, ...]] = msgspec.field(default_factory=dict)


class Experiment(Config, frozen=True):
    """The content of configs/end_to_end/settings.yaml; overrides are `key=value` settings."""

    common: list[str]
    encoder_overrides: dict[str, list[str]]  # encoder -> settings of its runs
    tasks: dict[str, TaskPlan]
    variants: dict[str, list[str]]  # two, of which the second is compared to the first
    detectors: dict[str, list[str]]  # name -> changes to configs/pairs/detector.yaml
    settings: dict[str, Setting]


class Cell(NamedTuple):
    """One run."""

    setting: str
    task: str
    encoder: str
    variant: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.setting}_{self.task}_{self.encoder}_{self.variant}_{self.seed}"


Kind = tuple[str, str, str]  # task, encoder and variant


class Timing(NamedTuple):
    """How long a finished run took."""

    seconds_per_step: float
    other_seconds: float  # evaluation, and building data and model

    @classmethod
    def read(cls, metrics_file: Path) -> Timing:
        metrics = read_json(metrics_file, dict[str, Any])
        training = metrics["seconds_training"]
        others = max(metrics["seconds"] - training, 0.0)  # "seconds" are those since a resume
        return cls(training / metrics["steps"], others)


@print_errors
def main(argv: list[str] | None = None) -> int:
    experiment = decode(read_yaml(EXPERIMENT), Experiment, EXPERIMENT.name)
    encoders = dict.fromkeys(itertools.chain.from_iterable(task.encoders for task in experiment.tasks.values()))
    parser = make_parser(__doc__)
    for option, names in (("settings", experiment.settings), ("tasks", experiment.tasks), ("encoders", encoders)):
        parser.add_argument(f"--{option}", nargs="+", choices=tuple(names), default=list(names), help="default: all")
    add_run_options(parser)
    args = parser.parse_args(argv)
    cells = plan(experiment, args.settings, args.tasks, args.encoders, args.seeds)
    jobs, configs = make_jobs(experiment, cells, args.output, args.configs, args.set, args.set_detectors)
    announce(cells, jobs, args)
    if args.dry_run:
        return 0
    try:
        run_jobs(list(jobs.values()), launch=args.launch, parallel=args.jobs, keep_going=True)
    finally:  # the table has the finished runs even after a failure
        results = collect(experiment, cells, jobs, configs)
        time = describe_time(cells, jobs, [args.output, *args.timed], args.jobs)
        lines = [*as_markdown(experiment, results), time, "", made_by(__file__, argv)]
        write_table(args.output / "end_to_end", results, lines)
        if results:
            draw(experiment, results, args.output / "end_to_end.png")
    return 0


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a tool whose runs are cells of the experiment."""
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="default: 0 1 2")
    parser.add_argument(
        "--configs", type=Path, default=CONFIGS, metavar="DIR", help="the tasks' configs (default: configs/pairs)"
    )
    parser.add_argument("--jobs", type=int, default=1, help="number of runs in parallel (default: 1)")
    parser.add_argument("--dry-run", action="store_true", help="only show the commands of unfinished runs")
    parser.add_argument(
        "--timed", type=Path, nargs="+", default=[], metavar="DIR", help="other outputs of this tool, to estimate time"
    )
    parser.add_argument(
        "--set-detectors", nargs="+", default=[], metavar="key=value", help="settings for the runs of the detectors"
    )
    add_common_options(parser)


def announce(cells: Sequence[Cell], jobs: Mapping[str, Job], args: argparse.Namespace) -> None:
    """Print how many runs are finished; in a dry run also the commands of the others."""
    if args.dry_run:
        unfinished = [job for job in jobs.values() if job.metrics is None]
        print("\n".join(" ".join(job.command(args.launch)) for job in unfinished))
    print(describe_time(cells, jobs, [args.output, *args.timed], args.jobs))


def plan(
    experiment: Experiment,
    settings: Sequence[str],
    tasks: Sequence[str],
    encoders: Sequence[str],
    seeds: Sequence[int],
) -> list[Cell]:
    """Return the chosen runs: all runs of the first seed, then those of the next one."""
    cells = []
    for seed, setting, task in itertools.product(seeds, settings, tasks):
        for encoder, variant in itertools.product(experiment.tasks[task].encoders, experiment.variants):
            if encoder in encoders:
                cells.append(Cell(setting, task, encoder, variant, seed))
    return cells


def with_earlier(experiment: Experiment, cells: Sequence[Cell]) -> list[Cell]:
    """Return the runs, each after the run that it continues."""
    ordered: dict[Cell, None] = {}
    for cell in cells:
        earlier_task = experiment.tasks[cell.task].after
        if earlier_task is not None:
            ordered[cell._replace(task=earlier_task)] = None
        ordered[cell] = None
    return list(ordered)


def make_jobs(
    experiment: Experiment,
    cells: Sequence[Cell],
    output: Path,
    folder: Path,
    overrides: Sequence[str],
    detector_overrides: Sequence[str],
) -> tuple[dict[str, Job], dict[tuple[str, str, str], RunConfig]]:
    """Return all runs by name, each detector before those that start from it, and the configs without the variants.

    Writes the configs to OUTPUT/configs/<setting>_<task>_<encoder>.yaml.

    Args:
        folder: of the tasks' configs. Those that start from random weights need no detector's run.
        overrides: `key=value` settings that override all others, for all runs but the detectors'.
        detector_overrides: the same for the detectors' runs.

    Returns:
        name -> run, and (setting, task, encoder) -> config.
    """
    encoders = read_yaml(ENCODERS)
    jobs: dict[str, Job] = {}
    configs: dict[tuple[str, str, str], RunConfig] = {}
    config_folder = output / "configs"
    config_folder.mkdir(parents=True, exist_ok=True)
    overridden = {word.partition("=")[0] for word in overrides}
    for cell in with_earlier(experiment, cells):
        setting = experiment.settings[cell.setting]
        task = experiment.tasks[cell.task]
        key = (cell.setting, cell.task, cell.encoder)
        config_file = config_folder / f"{'_'.join(key)}.yaml"
        if key not in configs:
            changes = [f"data.root={output / 'data' / f'{setting.data}_{cell.task}'}"]
            changes += [*experiment.common, *task.overrides, *experiment.encoder_overrides.get(cell.encoder, ())]
            changes += [*setting.overrides, *setting.task_overrides.get(cell.task, ()), *overrides]
            configs[key] = make_config(folder, cell.task, cell.encoder, encoders[cell.encoder], changes)
            save_config(configs[key], config_file)

        run_overrides = [*experiment.variants[cell.variant], f"seed={cell.seed}"]
        after: tuple[Path, ...] = ()
        if task.after is not None:
            run = output / cell._replace(task=task.after).name
            run_overrides += [f"detector.weights={run / 'model'}", f"encoder.weights={run / 'model'}"]
            after = (run,)
        elif configs[key].detector.weights is not None and "detector.weights" not in overridden:
            run = output / setting.detector
            changes = [f"data.root={output / 'data' / DETECTOR}", *experiment.detectors[setting.detector]]
            detector_job = Job(CONFIGS / f"{DETECTOR}.yaml", (*changes, *detector_overrides), run)
            jobs.setdefault(setting.detector, detector_job)
            run_overrides.append(f"detector.weights={run / 'model'}")
            after = (run,)
        jobs[cell.name] = Job(config_file, tuple(run_overrides), output / cell.name, after)
    return jobs, configs


def collect(
    experiment: Experiment,
    cells: Sequence[Cell],
    jobs: Mapping[str, Job],
    configs: Mapping[tuple[str, str, str], RunConfig],
) -> list[dict[str, Any]]:
    """Return the results of finished runs.

    Returns:
        A row for each setting, task, encoder, split and box source: these, "title" of the setting, the baselines
        "chance" and "shortcut", "steps", "minutes" of training of all runs, and under "accuracy" what `summarize`
        returns.
    """
    rows = []
    for key in dict.fromkeys((cell.setting, cell.task, cell.encoder) for cell in cells):
        runs: dict[str, dict[int, dict[str, Any]]] = {variant: {} for variant in experiment.variants}
        for cell in cells:
            metrics = jobs[cell.name].metrics
            if key == (cell.setting, cell.task, cell.encoder) and metrics is not None:
                runs[cell.variant][cell.seed] = metrics
        finished = list(itertools.chain.from_iterable(by_seed.values() for by_seed in runs.values()))
        if not finished:
            continue
        setting, task, encoder = key
        data = configs[key].data
        minutes = sum(metrics["seconds_training"] for metrics in finished) / 60
        for split, boxes in itertools.product(data.eval_splits, configs[key].eval.boxes):
            rules = read_baselines(Path(data.root), data.name, split)
            shortcuts = [rules[rule] for rule in rules if "/" not in rule]
            row = {
                "setting": setting,
                "title": experiment.settings[setting].title,
                "task": task,
                "encoder": encoder,
                "split": split,
                "boxes": str(boxes),
                "chance": rules.get(CHANCE),
                # shortcuts see the annotated boxes
                "shortcut": max(shortcuts, default=None) if boxes == BoxSource.GT else None,
                "steps": finished[0]["steps"],
                "minutes": minutes,
                "accuracy": summarize(runs, str(MetricName(split, TASKS[task][1], boxes))),
            }
            rows.append(row)
    return rows


def summarize(runs: Mapping[str, Mapping[int, Mapping[str, Any]]], metric: str) -> dict[str, dict[str, Any]]:
    """Return a metric of each variant, and the difference of the second to the first for seeds that both have.

    Args:
        runs: variant -> seed -> metrics of finished runs.

    Returns:
        variant, or "difference" -> "seeds", "values", "mean" and "std"; nothing finished: left out.
    """
    values: dict[str, dict[int, float]] = {}
    for variant, by_seed in runs.items():
        values[variant] = {seed: metrics[metric] for seed, metrics in by_seed.items() if metric in metrics}
    first, second = values.values()
    values[DIFFERENCE] = {seed: second[seed] - first[seed] for seed in first if seed in second}
    summary = {}
    for name, by_seed in values.items():
        if by_seed:
            numbers = list(by_seed.values())
            summary[name] = {"seeds": list(by_seed), "values": numbers, **mean_and_std(numbers)}
    return summary


def as_markdown(experiment: Experiment, results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines of a table for each setting, and a note."""
    if not results:
        return ["No run is finished yet.", ""]
    columns = (*experiment.variants, DIFFERENCE)
    lines = []
    for title, setting_rows in itertools.groupby(results, key=lambda row: row["title"]):
        table = {}
        for row in setting_rows:
            cells = []
            for name in columns:
                form = "{:+.3f}" if name == DIFFERENCE else "{:.3f}"
                cells.append(_format(row["accuracy"].get(name), form))
            shortcut = "–" if row["shortcut"] is None else f"{row['shortcut']:.3f}"
            name = f"{_name_pair(row)}, {row['split']}, {BOXES[row['boxes']]}"
            table[name] = [*cells, shortcut, str(row["steps"]), f"{row['minutes']:.0f}"]
        lines += [f"## {title[0].upper()}{title[1:]}", ""]
        lines += [*markdown_table([*columns, "best shortcut", "steps", "minutes"], table), ""]
    note = (
        "Accuracy on unseen synthetic scenes; ± is the standard deviation over seeds; differences are between runs of "
        "the same seed; minutes are the training time of all runs of a task and an encoder."
    )
    return [*lines, note, ""]


def _name_pair(row: Mapping[str, Any]) -> str:
    task_name, _ = TASKS[row["task"]]
    return f"{task_name}, {row['encoder']}"


def _format(entry: Mapping[str, Any] | None, form: str) -> str:
    """Return a mean with its sign, if `form` has one, and the standard deviation without."""
    if entry is None:
        return "–"
    mean = form.format(entry["mean"])
    return mean if entry["std"] is None else f"{mean} ± {entry['std']:.3f}"


def draw(experiment: Experiment, results: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the accuracy on the last split: a plot per setting and box source, with bars for each pair's variants."""
    split = results[-1]["split"]
    titles = {row["setting"]: row["title"] for row in results}
    sources = list(dict.fromkeys(row["boxes"] for row in results))
    figure = Figure(figsize=(4.4 * len(titles), 2.8 * len(sources) + 0.6), dpi=140, layout="constrained")
    plots = figure.subplots(len(sources), len(titles), sharey=True, squeeze=False)
    for (boxes, setting), axes in zip(itertools.product(sources, titles), plots.flat, strict=True):
        rows = [row for row in results if (row["setting"], row["boxes"], row["split"]) == (setting, boxes, split)]
        _draw_bars(axes, tuple(experiment.variants), rows)
    for axes, title in zip(plots[0], titles.values(), strict=True):
        axes.set_title(textwrap.fill(title, 46), fontsize=9)
    for axes, boxes in zip(plots[:, 0], sources, strict=True):
        axes.set_ylabel(f"accuracy, {split}, {BOXES[boxes]}", fontsize=8)
    legend = [Patch(color=f"C{number}", label=variant) for number, variant in enumerate(experiment.variants)]
    legend.append(Line2D([], [], color="black", linestyle="--", label="best shortcut"))
    figure.legend(handles=legend, loc="outside lower center", ncols=len(legend), fontsize=8)
    figure.savefig(path)


def _draw_bars(axes: Axes, variants: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw mean and standard deviation of each variant, and the best shortcut as a line over both bars."""
    width = 0.8 / len(variants)
    for position, row in enumerate(rows):
        for number, variant in enumerate(variants):
            entry = row["accuracy"].get(variant)
            if entry is not None:
                left = position - 0.4 + number * width
                axes.bar(left, entry["mean"], width, align="edge", yerr=entry["std"], color=f"C{number}")
        if row["shortcut"] is not None:
            axes.hlines(row["shortcut"], position - 0.45, position + 0.45, colors="black", linestyles="--")
    names = [_name_pair(row).replace(", ", "\n") for row in rows]
    axes.set_xticks(range(len(rows)), names, fontsize=7)
    axes.set_ylim(0, 1)


def describe_time(cells: Sequence[Cell], jobs: Mapping[str, Job], folders: Sequence[Path], parallel: int) -> str:
    """Return a sentence with the time that the unfinished runs need, from the speed of finished ones.

    Args:
        folders: outputs of this tool, whose finished runs are measured.
        parallel: number of runs in parallel, in which the finished ones were trained, too.
    """
    kinds: dict[str, Kind] = dict.fromkeys(jobs, (DETECTOR, "", ""))
    for cell in cells:
        kinds[cell.name] = (cell.task, cell.encoder, cell.variant)
    timings: list[tuple[Kind, Timing]] = []
    for (name, kind), folder in itertools.product(kinds.items(), folders):
        path = folder / name / "metrics.json"
        if path.is_file():
            timings.append((kind, Timing.read(path)))
    unfinished = [name for name, job in jobs.items() if job.metrics is None]
    count = f"{len(jobs) - len(unfinished)} of {len(jobs)} runs are finished"
    if not unfinished or not timings:
        return f"{count}."
    seconds = 0.0
    for name in unfinished:
        steps = count_steps(load_config(jobs[name].config, jobs[name].all_overrides))
        similar = most_similar(kinds[name], timings)
        seconds += steps * statistics.mean(timing.seconds_per_step for timing in similar)
        seconds += statistics.mean(timing.other_seconds for timing in similar)
    return f"{count}; the others need about {seconds / parallel / 3600:.1f} hours with {parallel} in parallel."


def count_steps(config: RunConfig) -> int:
    """Return the number of steps of a run on synthetic scenes that all have texts."""
    if config.train.max_steps is not None:
        return config.train.max_steps
    scenes = config.data.synthetic.scenes[config.data.train_split]
    return math.ceil(config.train.epochs * scenes / config.train.images_per_batch)


def most_similar(kind: Kind, timings: Sequence[tuple[Kind, Timing]]) -> list[Timing]:
    """Return the timings of the runs that are most like a kind; their setting and seed hardly matter."""
    likeness = [sum(map(operator.eq, kind, other)) for other, _ in timings]
    closest = max(likeness)
    return [timing for (_, timing), value in zip(timings, likeness, strict=True) if value == closest]


if __name__ == "__main__":
    raise SystemExit(main())
