"""Many training runs that need each other, several at a time, each in a process of its own."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import os
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from e2e_vl.config import differences, load_config
from e2e_vl.engine.build import take_sizes_of_detector


@dataclasses.dataclass(frozen=True)
class Job:
    """A run of tools/train.py.

    Attributes:
        config: YAML file.
        words: `key=value` settings that beat it, without `output`.
        run: run directory; unique among the jobs.
        after: run directories of the jobs that must be finished before.
    """

    config: Path
    words: tuple[str, ...]
    run: Path
    after: tuple[Path, ...] = ()

    @property
    def settings(self) -> list[str]:
        """All settings that beat the file."""
        return [*self.words, f"output={self.run}"]

    @property
    def metrics(self) -> dict[str, Any] | None:
        """What the finished run measured; None before it is finished."""
        path = self.run / "metrics.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def run_jobs(jobs: Sequence[Job], *, train: Path, launch: str, parallel: int = 1) -> None:
    """Run what is not finished yet; an interrupted run goes on, so the same call can be made until all are done.

    Args:
        jobs: in an order in which each comes after those it needs.
        train: tools/train.py.
        launch: command that starts it, such as "python" or "accelerate launch --num_processes 4".
        parallel: runs at a time; on CPU they share the cores evenly.

    Raises:
        ValueError: a folder that holds a run with other settings, or a run that failed; both name the run's log.
    """
    for job in jobs:
        check_same_run(job.run, job.config, job.settings)
    waiting = [job for job in jobs if job.metrics is None]
    environment = {**os.environ, "OMP_NUM_THREADS": str(max((os.cpu_count() or 1) // parallel, 1))}
    running: dict[concurrent.futures.Future[None], Job] = {}
    with (
        concurrent.futures.ThreadPoolExecutor(parallel) as pool,
        tqdm(total=len(jobs), initial=len(jobs) - len(waiting), desc="runs", unit="run") as bar,
    ):
        while waiting or running:
            unfinished = {job.run for job in (*waiting, *running.values())}
            ready = [job for job in waiting if not unfinished.intersection(job.after)]
            for job in ready[: parallel - len(running)]:
                waiting.remove(job)
                running[pool.submit(_run, job, train, launch, environment)] = job
            done, _ = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
            for future in done:
                running.pop(future)
                try:
                    future.result()
                except ValueError:
                    waiting.clear()  # the other running ones still end by themselves
                    raise
                bar.update()


def check_same_run(run: Path, config: Path, settings: list[str]) -> None:
    """A run directory that is there already must hold a run of this file with these settings.

    Raises:
        ValueError: it does not, or the settings do not load.
    """
    wanted = load_config(config, settings)
    saved = run / "config.yaml"
    if saved.is_file():
        take_sizes_of_detector(wanted)
        changed = differences(load_config(saved), wanted)
        if changed:
            raise ValueError(
                f"{run} holds a run with other settings ({'; '.join(changed[:3])}); remove it or choose another "
                "--output."
            )


def _run(job: Job, train: Path, launch: str, environment: dict[str, str]) -> None:
    resume = ["--resume"] if any(job.run.glob("checkpoints/*")) else []
    log = job.run.with_name(job.run.name + ".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [*shlex.split(launch), str(train), "--config", str(job.config), *resume, *job.settings]
    with log.open("w", encoding="utf-8") as file:
        file.write(f"{shlex.join(command)}\n")
        file.flush()
        status = subprocess.run(command, check=False, env=environment, stdout=file, stderr=file).returncode
    if status != 0 or job.metrics is None:
        raise ValueError(f"The run {job.run} failed with exit status {status}, see {log}; give the command again.")
