"""Run by test_launch.py in two processes of e2e_vl/cli/processes.py: several trainings, one after the other.

JOBS.json holds a list of [config file, list of key=value words, run to resume or null]. A run that is resumed is copied
without its newest checkpoint. Each run is evaluated once more afterwards. RUN/collectives.json lists the collective
operations of the third step: by name, how many numbers each one sends; `trained` is the number of trained parameters.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.profiler
from accelerate import Accelerator
from accelerate.state import PartialState

from detector.errors import StoppedRunError
from e2e_vl.config_files import load_config
from e2e_vl.run.evaluate import evaluate_run
from e2e_vl.run.train import Trainer, train
from tests.run.runs import ROOT, lose_newest

LAUNCH = """
import sys
from e2e_vl.cli.processes import free_port, start_processes
sys.exit(start_processes(sys.argv[1:], 2, {"MASTER_PORT": str(free_port())}))
"""
Job = tuple[Path, list[str], Path | None]


def start(jobs: list[Job], folder: Path) -> subprocess.Popen:
    """Do all of the jobs, in two processes; the list of jobs is written to the folder."""
    path = folder / "jobs.json"
    path.write_text(json.dumps(jobs, default=str))
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCH, sys.executable, __file__, str(path)],
        cwd=ROOT,
        env={**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@contextlib.contextmanager
def counted_collectives(path: Path) -> Iterator[None]:
    step = Trainer.train_step

    def counted(self, micro_batches):
        if self.step != 2:  # the second rebuilds the buckets of DistributedDataParallel
            return step(self, micro_batches)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
            result = step(self, micro_batches)
        found: dict[str, Any] = {"trained": sum(one.numel() for one in self.model.parameters() if one.requires_grad)}
        for event in profile.events():
            if event.name.startswith("gloo:"):
                found.setdefault(event.name, []).append(math.prod(event.input_shapes[0]))
        if os.environ["RANK"] == "0":
            path.write_text(json.dumps(found), encoding="utf-8")
        return result

    with mock.patch.object(Trainer, "train_step", counted):
        yield


def main() -> None:
    Accelerator.end_training = lambda self: None  # it would end the process group before the next training
    for config, words, resumed in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        settings = load_config(config, words)
        run = Path(settings.output)
        if resumed is not None and os.environ["RANK"] == "0":
            lose_newest(Path(resumed), run)
        if resumed is not None:
            PartialState().wait_for_everyone()
        with counted_collectives(run / "collectives.json"):
            train(settings, resume=resumed is not None)
        evaluate_run(run, split="val", boxes="gt", output=run / "again.json")
    PartialState().destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except StoppedRunError as stopped:
        if str(stopped):
            print(stopped, flush=True)
        raise SystemExit(stopped.status) from None
