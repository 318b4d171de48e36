"""Run by test_two_processes.py under `torchrun`: several trainings, one after the other.

    torchrun --standalone --nproc_per_node 2 two_processes.py JOBS.json [--only-train]

JOBS.json holds a list of [config file, list of key=value words]. Each run is evaluated once more afterwards.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from accelerate import Accelerator
from accelerate.state import PartialState

from e2e_vl.config import load_config
from e2e_vl.run.evaluate import evaluate_run
from e2e_vl.run.train import train

ROOT = Path(__file__).parents[2]


def start(jobs: list[tuple[Path, list[str]]], folder: Path, *more: str, processes: int = 2) -> subprocess.Popen:
    """Train as all of the (config file, words) say, in two processes; the list of jobs is written to the folder."""
    path = folder / "jobs.json"
    path.write_text(json.dumps([[str(config), words] for config, words in jobs]))
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    return subprocess.Popen(
        [sys.executable, *launch, __file__, str(path), *more],
        cwd=ROOT,
        env={**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait(process: subprocess.Popen, seconds: float = 800) -> None:
    """Until it has ended without an error."""
    output, _ = process.communicate(timeout=seconds)
    assert process.returncode == 0, output[-4000:]


def main() -> None:
    Accelerator.end_training = lambda self: None  # it would end the process group before the next training
    for config, words in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        settings = load_config(config, words)
        train(settings)
        if "--only-train" in sys.argv:
            continue
        again = Path(settings.output) / "again.json"
        evaluate_run(Path(settings.output), split="val", boxes="gt", output=again)
    PartialState().destroy_process_group()


if __name__ == "__main__":
    main()
