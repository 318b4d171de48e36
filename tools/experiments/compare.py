"""Train variants of a run and put their metrics into one table.

    python tools/experiments/compare.py --config configs/demo/refcoco.yaml --variants configs/demo/variants.yaml \\
        --output runs/demo_compare
    python tools/experiments/compare.py --config FILE --output DIR --variant joint --variant frozen detector.freeze=true
    python tools/experiments/compare.py --config FILE --output DIR --variants FILE --seeds 1 2 3 --jobs 2

Each variant is a run of tools/train.py in the folder OUTPUT/NAME; with --seeds it is one run per seed, and the table
shows the mean and the range over the seeds. Finished runs are not repeated and interrupted runs are continued: repeat
the command until all are done. Writes OUTPUT/comparison.json and OUTPUT/comparison.md, a table of the chosen metrics,
by default on the first of data.eval_splits, and the minutes of training. Compare on validation scenes: a variant that
was chosen on test scenes is fitted to them.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import itertools
import os
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from tqdm.auto import tqdm

from detector.errors import StoppedRunError, UserError
from detector.io import read_json, read_yaml, write_json, write_text
from e2e_vl.cli.main import make_parser, print_errors
from e2e_vl.config_files import differences, load_config
from e2e_vl.run.build import resolve_config

TRAIN = Path(__file__).resolve().parents[1] / "train.py"


@print_errors
def main(argv: list[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--config", type=Path, required=True, help="YAML file of the run that the variants change")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--variants", type=Path, metavar="FILE", help="YAML: name -> key=value settings")
    source.add_argument(
        "--variant",
        nargs="+",
        action="append",
        metavar=("NAME", "key=value"),
        help="name and settings of a variant (repeatable)",
    )
    parser.add_argument("--metrics", nargs="+", help="keys of metrics.json (default: accuracies of the first split)")
    parser.add_argument("--seeds", type=int, nargs="+", help="seeds of each variant's runs (default: the config's)")
    parser.add_argument("--jobs", type=int, default=1, help="number of runs in parallel (default: 1)")
    add_common_options(parser)
    args = parser.parse_args(argv)
    if args.variants is not None:
        variants = read_yaml(args.variants)
    else:
        variants = {name: overrides for name, *overrides in args.variant}
    for name in variants:
        if "=" in name:
            raise UserError(f"--variant needs a name before its settings; found '{name}'.")
    jobs = make_jobs(args.config, args.output, variants, args.set, args.seeds)
    run_jobs(list(itertools.chain.from_iterable(jobs.values())), launch=args.launch, parallel=args.jobs)
    comparison = {"config": str(args.config), "common_overrides": args.set, "seeds": args.seeds}
    comparison |= compare(jobs, variants, args.metrics)
    write_table(args.output / "comparison", comparison, [*as_markdown(comparison), made_by(__file__, argv)])
    return 0


def make_jobs(
    config: Path, output: Path, variants: dict[str, list[str]], common: Sequence[str], seeds: Sequence[int] | None
) -> dict[str, list[Job]]:
    """Return the runs of each variant: one, or one per seed."""
    jobs = {}
    for name, overrides in variants.items():
        settings = (*common, *overrides)
        run = output / name.replace(" ", "_")
        if seeds is None:
            jobs[name] = [Job(config, settings, run)]
        else:
            jobs[name] = [
                Job(config, (*settings, f"seed={seed}"), run.with_name(f"{run.name}_{seed}")) for seed in seeds
            ]
    return jobs


def compare(
    jobs: dict[str, list[Job]], variants: dict[str, list[str]], metrics: Sequence[str] | None
) -> dict[str, Any]:
    """Return the metrics of all variants.

    Args:
        metrics: their names; None: all accuracies over all texts of the first split.
    """
    results = {name: [job.metrics for job in variant_jobs] for name, variant_jobs in jobs.items()}
    if not metrics:
        first_run = next(iter(results.values()))[0]
        accuracies = [key for key in first_run if re.fullmatch(r"[^/]*/accuracy[^/]*", key)]
        metrics = [key for key in accuracies if key.split("/")[0] == accuracies[0].split("/")[0]]
    rows = {}
    for name, runs in results.items():
        rows[name] = {
            "overrides": variants[name],
            "runs": [str(job.run) for job in jobs[name]],
            "metrics": {key: [run[key] for run in runs] for key in metrics},
            "steps": [run["steps"] for run in runs],
            "training_minutes": [run["seconds_training"] / 60 for run in runs],
        }
    return {"metrics": metrics, "variants": rows}


def as_markdown(comparison: dict[str, Any]) -> list[str]:
    """Return the lines of the table, and a note on its seeds."""
    metrics = comparison["metrics"]
    rows = {}
    for name, row in comparison["variants"].items():
        cells = [_format_mean_and_range(row["metrics"][key]) for key in metrics]
        rows[name] = [*cells, f"{statistics.mean(row['training_minutes']):.1f}"]
    lines = [*markdown_table([*metrics, "minutes of training"], rows), ""]
    seeds = comparison["seeds"] or []
    if len(seeds) > 1:
        lines += [f"Mean and range over the seeds {', '.join(map(str, seeds))}.", ""]
    return lines


def _format_mean_and_range(values: Sequence[float | None]) -> str:
    numbers = [value for value in values if value is not None]
    if not numbers:
        return "–"
    mean = f"{statistics.mean(numbers):.3f}"
    if len(numbers) == 1:
        return mean
    return f"{mean} ({min(numbers):.3f} to {max(numbers):.3f})"


# Parallel runs of tools/train.py and tables of their metrics; the other experiments use these too.


@dataclasses.dataclass(frozen=True)
class Job:
    """A run of tools/train.py."""

    config: Path  # YAML file
    overrides: tuple[str, ...]  # `key=value` settings that override the file, without `output`
    run: Path  # run directory; unique among the jobs
    after: tuple[Path, ...] = ()  # run directories of the jobs that must finish before this one starts

    @property
    def all_overrides(self) -> list[str]:
        return [*self.overrides, f"output={self.run}"]

    @property
    def metrics(self) -> dict[str, Any] | None:
        """The metrics of a finished run; None before."""
        path = self.run / "metrics.json"
        return read_json(path, dict[str, Any]) if path.is_file() else None

    def command(self, launch: str) -> list[str]:
        """Return the command that starts the run, or resumes it after an interruption."""
        resume = ["--resume"] if self.run.is_dir() else []
        return [*shlex.split(launch), str(TRAIN), "--config", str(self.config), *resume, *self.all_overrides]

    def check(self) -> None:
        """Check that the config loads and that an existing run directory was made with it."""
        config = load_config(self.config, self.all_overrides)
        saved_file = self.run / "config.yaml"
        if not saved_file.is_file():
            return
        changed = differences(load_config(saved_file), resolve_config(config))
        if changed:
            raise UserError(
                f"{self.run} contains a run with other settings ({'; '.join(changed[:3])}); remove it or use another."
            )


def run_jobs(jobs: Sequence[Job], *, launch: str, parallel: int = 1, keep_going: bool = False) -> None:
    """Run all unfinished jobs; interrupted runs are resumed.

    Args:
        jobs: each job after those that it needs.
        launch: see `Job.command`.
        parallel: number of runs in parallel; on the CPU they share the cores evenly.
        keep_going: after a failure, run the jobs that do not depend on the failed one.
    """
    for job in jobs:
        job.check()
    waiting = [job for job in jobs if job.metrics is None]
    threads = max((os.cpu_count() or 1) // parallel, 1)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    running: dict[concurrent.futures.Future[None], Job] = {}
    failures: list[ValueError] = []
    with (
        concurrent.futures.ThreadPoolExecutor(parallel) as pool,
        tqdm(total=len(jobs), initial=len(jobs) - len(waiting), desc="runs", unit="run") as bar,
        stopped_together(),
    ):
        while waiting or running:
            unfinished = {job.run for job in (*waiting, *running.values())}
            ready = [job for job in waiting if not unfinished.intersection(job.after)]
            for job in ready[: parallel - len(running)]:
                waiting.remove(job)
                running[pool.submit(_run, job, launch, environment)] = job
                bar.set_postfix_str(job.run.name)
            done, _ = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
            for future in done:
                run = running.pop(future).run
                try:
                    future.result()  # if it raises, no further job starts and the pool waits for the running ones
                except ValueError as error:
                    if not keep_going:
                        raise
                    failures.append(error)
                    waiting = _without_dependents(waiting, run)
                bar.update()
    if len(failures) > 1:
        raise UserError(f"{failures[0]} ({len(failures)} runs failed.)")
    if failures:
        raise UserError(str(failures[0]))


def _without_dependents(jobs: Sequence[Job], failed_run: Path) -> list[Job]:
    """Return the jobs that can still start: those that need neither the failed run nor a run that needs it."""
    lost_runs = {failed_run}
    startable = []
    for job in jobs:  # each after those that it needs
        if lost_runs.intersection(job.after):
            lost_runs.add(job.run)
        else:
            startable.append(job)
    return startable


@contextlib.contextmanager
def stopped_together() -> Iterator[None]:
    """Let a signal to this process also stop the runs that it has started: they save a checkpoint."""
    try:
        yield
    except (KeyboardInterrupt, StoppedRunError):
        for child in psutil.Process().children():
            child.terminate()
        raise


def _run(job: Job, launch: str, environment: dict[str, str]) -> None:
    log = job.run.with_name(job.run.name + ".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    command = job.command(launch)
    with log.open("w", encoding="utf-8") as file:
        file.write(f"{shlex.join(command)}\n")
        file.flush()
        status = subprocess.run(command, check=False, env=environment, stdout=file, stderr=file).returncode
    if status != 0 or job.metrics is None:
        raise UserError(f"The run {job.run} failed with exit status {status}, see {log}; repeat the command to resume.")


def add_common_options(parser: argparse.ArgumentParser) -> None:
    """Add the options shared by all commands that train many runs."""
    parser.add_argument("--output", type=Path, required=True, help="folder of the runs and the table")
    parser.add_argument("--set", nargs="+", default=[], metavar="key=value", help="settings for all runs")
    parser.add_argument(
        "--launch",
        default=shlex.quote(sys.executable),
        metavar="COMMAND",
        help='launcher of tools/train.py, such as "accelerate launch --num_processes 4" (default: this Python)',
    )


def made_by(tool: str, argv: Sequence[str] | None) -> str:
    """Return a sentence with the command, as run from the root of the repository."""
    options = sys.argv[1:] if argv is None else argv
    command = shlex.join(["python", f"tools/experiments/{Path(tool).name}", *options])
    return f"Made by `{command}`."


def mean_and_std(values: Sequence[float]) -> dict[str, float | None]:
    """Return the mean and, if there are several values, their standard deviation."""
    std = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.mean(values), "std": std}


def format_mean(entry: Mapping[str, Any], form: str, scale: float = 1) -> str:
    """Return a cell with the mean and standard deviation, if any, of `mean_and_std`."""
    numbers = [entry[key] for key in ("mean", "std") if entry[key] is not None]
    return " ± ".join(form.format(scale * number) for number in numbers)


def markdown_table(columns: Sequence[str], rows: Mapping[str, Iterable[str]]) -> list[str]:
    lines = [f"| | {' | '.join(columns)} |", "|---|" + "---:|" * len(columns)]
    for name, cells in rows.items():
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def write_table(path: Path, content: Any, lines: Sequence[str]) -> None:
    """Write and print a table, and write its content as JSON beside it."""
    write_json(path.with_suffix(".json"), content)
    text = "\n".join([*lines, ""])
    write_text(path.with_suffix(".md"), text)
    print(text)


if __name__ == "__main__":
    raise SystemExit(main())
