"""Runs dependent training jobs, several at a time, each in a separate process."""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from detector.errors import UserError
from detector.io import read_json, write_json, write_text
from e2e_vl.config import differences, load_config
from e2e_vl.run.build import resolve_config

TRAIN = Path(__file__).resolve().parents[1] / "train.py"


@dataclasses.dataclass(frozen=True)
class Job:
    """A run of tools/train.py."""

    config: Path  # YAML file
    words: tuple[str, ...]  # `key=value` settings that override the file, without `output`
    run: Path  # run directory; unique among the jobs
    after: tuple[Path, ...] = ()  # run directories of the jobs that must be finished before this one starts

    @property
    def settings(self) -> list[str]:
        """All settings that override the file."""
        return [*self.words, f"output={self.run}"]

    @property
    def metrics(self) -> dict[str, Any] | None:
        """The numbers of the finished run; None before it is finished."""
        path = self.run / "metrics.json"
        return read_json(path, dict[str, Any]) if path.is_file() else None

    def command(self, launch: str) -> list[str]:
        """The command of the run; an interrupted run goes on.

        Args:
            launch: what starts tools/train.py, such as "python" or "accelerate launch --num_processes 4".
        """
        resume = ["--resume"] if self.run.is_dir() else []
        return [*shlex.split(launch), str(TRAIN), "--config", str(self.config), *resume, *self.settings]

    def check(self) -> None:
        """Check that the settings load, and that a run directory that exists holds a run with them."""
        wanted = load_config(self.config, self.settings)
        saved = self.run / "config.yaml"
        changed = differences(load_config(saved), resolve_config(wanted)) if saved.is_file() else []
        if changed:
            raise UserError(
                f"{self.run} holds a run with other settings ({'; '.join(changed[:3])}); remove it or choose another "
                "--output."
            )


def run_jobs(jobs: Sequence[Job], *, launch: str, parallel: int = 1, keep_going: bool = False) -> None:
    """Run all unfinished jobs. An interrupted run goes on, so the same call can be made until all are done.

    Args:
        jobs: in an order in which each job comes after those that it needs.
        launch: see `Job.command`.
        parallel: runs at a time; on the CPU they share the cores evenly.
        keep_going: after a failure, still run the jobs that do not depend on the failed one.
    """
    for job in jobs:
        job.check()
    waiting = [job for job in jobs if job.metrics is None]
    environment = {**os.environ, "OMP_NUM_THREADS": str(max((os.cpu_count() or 1) // parallel, 1))}
    running: dict[concurrent.futures.Future[None], Job] = {}
    failures: list[ValueError] = []
    with (
        concurrent.futures.ThreadPoolExecutor(parallel) as pool,
        tqdm(total=len(jobs), initial=len(jobs) - len(waiting), desc="runs", unit="run") as bar,
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
                lost = {running.pop(future).run}
                try:
                    future.result()  # an error starts nothing more; the pool waits for the other running jobs
                except ValueError as error:
                    if not keep_going:
                        raise
                    failures.append(error)
                    while more := [job for job in waiting if lost.intersection(job.after)]:  # they never can start
                        waiting = [job for job in waiting if job not in more]
                        lost.update(job.run for job in more)
                bar.update()
    if failures:
        also = f" ({len(failures)} runs failed.)" if len(failures) > 1 else ""
        raise UserError(f"{failures[0]}{also}")


def _run(job: Job, launch: str, environment: dict[str, str]) -> None:
    log = job.run.with_name(job.run.name + ".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    command = job.command(launch)
    with log.open("w", encoding="utf-8") as file:
        file.write(f"{shlex.join(command)}\n")
        file.flush()
        status = subprocess.run(command, check=False, env=environment, stdout=file, stderr=file).returncode
    if status != 0 or job.metrics is None:
        raise UserError(f"The run {job.run} failed with exit status {status}, see {log}; give the command again.")


def add_common_options(parser: argparse.ArgumentParser) -> None:
    """Add the options shared by all commands that train many runs."""
    parser.add_argument("--output", type=Path, required=True, help="folder of the runs and the table")
    parser.add_argument("--set", nargs="+", default=[], metavar="key=value", help="settings for all runs")
    parser.add_argument(
        "--launch",
        default=shlex.quote(sys.executable),
        metavar="COMMAND",
        help='what starts tools/train.py, such as "accelerate launch --num_processes 4" (default: this Python)',
    )


def made_by(tool: str, argv: Sequence[str] | None) -> str:
    """The sentence with the command, to be repeated from the root of the repository."""
    command = shlex.join(["python", f"tools/experiments/{Path(tool).name}", *(sys.argv[1:] if argv is None else argv)])
    return f"Made by `{command}`."


def mean_and_spread(values: Sequence[float]) -> dict[str, float | None]:
    """The mean and, of several values, the standard deviation."""
    return {"mean": statistics.mean(values), "spread": statistics.stdev(values) if len(values) > 1 else None}


def shown(entry: Mapping[str, Any], form: str, scale: float = 1) -> str:
    """A cell with the mean and, where there is one, the spread of `mean_and_spread`."""
    return " ± ".join(form.format(scale * entry[key]) for key in ("mean", "spread") if entry[key] is not None)


def markdown_table(columns: Sequence[str], rows: Mapping[str, Iterable[str]]) -> list[str]:
    """Lines of a table: a name in front of the cells of each row."""
    lines = [f"| | {' | '.join(columns)} |", "|---|" + "---:|" * len(columns)]
    return [*lines, *(f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items())]


def write_table(path: Path, content: Any, lines: Sequence[str]) -> None:
    """Write the numbers as `path` + .json and the lines as `path` + .md, and print the lines."""
    write_json(path.with_suffix(".json"), content)
    text = "\n".join([*lines, ""])
    write_text(path.with_suffix(".md"), text)
    print(text)
