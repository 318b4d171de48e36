"""The ablation of VL-BERT's table 4 in miniature, on drawn scenes: what does each part of pre-training contribute?

    python tools/experiments/table4.py --output runs/table4
    python tools/experiments/table4.py --output runs/table4 --seeds 0 --rows none full --tasks refcoco

Draws the scenes, trains a detector on objects and attributes (as the paper's detector is trained on Visual Genome),
pre-trains the rows of the table (configs/table4/pretrain*.yaml) and trains every task from each row, with every seed.
Writes OUTPUT/table4.json, table4.md and table4.png: mean and standard deviation over the seeds, and two controls
without the image or the text, with the first seed. Finished runs are not repeated and interrupted ones are continued:
repeat the command until all are done.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from compare import Job, add_common_options, format_mean, made_by, markdown_table, mean_and_std, run_jobs, write_table
from e2e_vl.cli.main import make_parser, print_errors
from e2e_vl.config import load_config
from e2e_vl.run.build import make_synthetic_data, read_training_texts
from e2e_vl.text import build_vocabulary

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs" / "table4"
ROWS = {  # name -> parts of pre-training
    "none": "without pre-training",
    "a": "(a) masked words with visual clues",
    "b": "(b) = (a) + masked regions with linguistic clues",
    "c": "(c) = (b) + sentence-image relationship",
    "d": "(d) = (b) + text-only corpus",
    "full": "full = (d) + detector tuned in pre-training",
}
CONTROLS = {  # name -> title and setting; they start from the full model, with the first seed only
    "image_blind": ("full, without the image", "data.blank_image=true"),
    "text_blind": ("full, without the text", "data.blank_text=true"),
}
TASKS = {"vqa": "VQA", "vcr": "VCR Q -> A", "refcoco": "RefCOCO+"}
METRIC = "val/accuracy_gt_boxes"


@print_errors
def main(argv: list[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="default: 0 1 2")
    parser.add_argument("--rows", nargs="+", choices=tuple(ROWS), default=list(ROWS), help="default: all")
    parser.add_argument("--tasks", nargs="+", choices=tuple(TASKS), default=list(TASKS), help="default: all")
    parser.add_argument("--data", type=Path, default=Path("data/table4"), help="folder of the drawn scenes")
    parser.add_argument("--jobs", type=int, default=2, help="number of runs in parallel (default: 2)")
    parser.add_argument("--configs", type=Path, default=CONFIGS, help="folder of the configs (default: configs/table4)")
    add_common_options(parser)
    args = parser.parse_args(argv)
    settings = [*args.set, f"data.root={args.data}"]
    jobs = plan(args.configs, args.output, settings, args.seeds, args.rows, args.tasks)
    prepare(args.configs, args.output, settings)
    run_jobs(list(jobs.values()), launch=args.launch, parallel=args.jobs)
    table = collect(jobs, args.seeds, args.rows, args.tasks)
    draw(table, args.output / "table4.png")
    write_table(args.output / "table4", table, [*as_markdown(table), made_by(__file__, argv)])
    return 0


def plan(
    configs: Path,
    output: Path,
    settings: Sequence[str],
    seeds: Sequence[int],
    rows: Sequence[str],
    tasks: Sequence[str],
) -> dict[str, Job]:
    """All runs by name, each after the run that it starts from: detector, <row>_<seed>, <task>_<row>_<seed>.

    Heads start at random: the runs are too short to adapt a pre-training head to another task.
    """
    jobs = {"detector": Job(configs / "detector.yaml", tuple(settings), output / "detector")}
    common = (*settings, f"data.vocabulary={output / 'vocabulary' / 'vocab.txt'}")
    detector = jobs["detector"].run
    for seed, row in itertools.product(seeds, [row for row in rows if row != "none"]):
        name = "pretrain.yaml" if row == "full" else f"pretrain_{row}.yaml"
        overrides = (*common, f"seed={seed}", f"detector.weights={detector / 'model'}")
        jobs[f"{row}_{seed}"] = Job(configs / name, overrides, output / f"pretrain_{row}_{seed}", (detector,))
    for seed, task, row in itertools.product(seeds, tasks, rows):
        overrides, after = (*common, f"seed={seed}"), detector
        if row != "none":
            after = jobs[f"{row}_{seed}"].run
            overrides += (f"encoder.weights={after}",)
        overrides += (f"detector.weights={after / 'model'}",)
        name = f"{task}_{row}_{seed}"
        jobs[name] = Job(configs / f"{task}.yaml", overrides, output / name, (after,))
    if "full" in rows:
        for task in tasks:
            like = jobs[f"{task}_full_{seeds[0]}"]
            for control, (_, setting) in CONTROLS.items():
                name = f"{task}_{control}_{seeds[0]}"
                jobs[name] = dataclasses.replace(like, overrides=(*like.overrides, setting), run=output / name)
    return jobs


def prepare(configs: Path, output: Path, settings: Sequence[str]) -> None:
    """Draw the scenes and build one vocabulary for all tasks, unless both exist."""
    make_synthetic_data(load_config(configs / "detector.yaml", settings))
    vocabulary = output / "vocabulary" / "vocab.txt"
    if not vocabulary.is_file():
        texts = []
        for name in ("pretrain", *TASKS):
            texts += read_training_texts(load_config(configs / f"{name}.yaml", settings))
        build_vocabulary(texts, vocabulary)


def collect(
    jobs: dict[str, Job], seeds: Sequence[int], rows: Sequence[str], tasks: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """row -> task -> the seeds' accuracies, their mean and (with several seeds) their standard deviation."""
    table: dict[str, dict[str, Any]] = {}
    for row, task in itertools.product((*rows, *CONTROLS), tasks):
        values = [jobs[name].metrics[METRIC] for seed in seeds if (name := f"{task}_{row}_{seed}") in jobs]
        if values:
            table.setdefault(row, {})[task] = {"seeds": values, **mean_and_std(values)}
    return table


def as_markdown(table: dict[str, dict[str, Any]]) -> list[str]:
    """The lines of the table, in percent, and a note."""
    rows = {}
    for row, cells in table.items():
        title = ROWS[row] if row in ROWS else CONTROLS[row][0]
        rows[title] = [format_mean(cell, "{:.1f}", 100) for cell in cells.values()]
    first = next(iter(table.values()))
    number = len(next(iter(first.values()))["seeds"])
    note = f"Accuracy in percent with annotated boxes; mean ± standard deviation of {number} seed(s)."
    return [*markdown_table([TASKS[task] for task in first], rows), "", note]


def draw(table: dict[str, dict[str, Any]], path: Path) -> None:
    """Write a PNG with a bar chart per task, one bar per row, with error bars of the standard deviation."""
    tasks = list(next(iter(table.values())))
    figure = Figure(figsize=(4 * len(tasks), 3.2), layout="constrained")
    axes = figure.subplots(1, len(tasks), squeeze=False)
    for axis, task in zip(axes[0], tasks, strict=True):
        means = [100 * cells[task]["mean"] for cells in table.values()]
        # one seed has no standard deviation: NaN draws no error bar
        stds = [math.nan if (one := cells[task]["std"]) is None else 100 * one for cells in table.values()]
        axis.bar(list(table), means, yerr=stds, color="0.7", capsize=3)
        axis.set_xticks(range(len(table)), [row.replace("_", " ") for row in table], rotation=45, ha="right")
        axis.set_title(TASKS[task])
        axis.set_ylabel("accuracy, %")
        axis.set_ylim(0, 105)
    FigureCanvasAgg(figure).print_figure(path, dpi=120)


if __name__ == "__main__":
    raise SystemExit(main())
