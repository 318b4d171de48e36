"""Tiny trainings and extractions in forked processes that something happens to, at a moment that is counted, not timed.

A moment is a step, a line of the log, a described image, a file that reaches the disk, a rename or a removal. Counting
them puts most disturbances where they hurt, between the parts of a checkpoint or of a file of features, and does not
depend on how busy the machine is.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import multiprocessing
import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

from detector import io as whole_writer
from e2e_vl.cli import train as tool
from e2e_vl.io import RunLog, read_log
from e2e_vl.run import train as training

CONFIG = Path(__file__).parents[2] / "configs" / "tiny" / "refcoco.yaml"
STEPS = 6
# 12 images are 3 steps an epoch: checkpoints of the steps 2, 4 and 6, evaluations of the steps 3 and 6
SETTINGS = (
    "data.texts_per_image=null",
    "data.flip=0.5",
    "data.boxes.train=gt",
    "detector.loss_weight=0",
    "encoder.config.hidden_dropout_prob=0.1",
    "detector.overrides.MODEL.RESNETS.NORM=BN",
    f"train.max_steps={STEPS}",
    "train.save_every_epochs=0.6666667",
    "train.keep_best=val/loss_gt_boxes",
    "train.trackers=[]",
    "eval.every_epochs=1",
    "eval.boxes=[gt]",
    "eval.report_pictures=0",
)
FILE_MOMENTS = ((whole_writer, "_sync"), (Path, "rename"), (Path, "replace"), (shutil, "rmtree"))
TRAINING_MOMENTS = (*FILE_MOMENTS, (training._Training, "_update"), (RunLog, "write"))
SECONDS = 600  # after which a process hangs


@dataclasses.dataclass(frozen=True)
class Ended:
    """How the processes of a training ended, by rank."""

    statuses: list[int]  # negative: the signal that killed it
    texts: list[str]  # what it printed
    moments: int  # that process 0 counted


def kill() -> None:
    """Kill this process as if it were pulled out of the machine."""
    os.kill(os.getpid(), signal.SIGKILL)


def train_disturbed(words: list[str], folder: Path, **options: Any) -> Ended:
    """Train as the words of a command line say; see `run_disturbed`."""
    return run_disturbed(lambda: tool.main(["--config", str(CONFIG), *words]), TRAINING_MOMENTS, folder, **options)


def run_disturbed(
    command: Callable[[], int],
    moments: Sequence[tuple[Any, str]],
    folder: Path,
    *,
    processes: int = 1,
    moment: int | None = None,
    victim: int = 0,
    disturb: Callable[[], None] = kill,
) -> Ended:
    """Run a command in one or several processes, and disturb one of them.

    Args:
        command: returns its exit status.
        moments: functions, each as its owner and its name; each call of one is a moment.
        folder: for what the processes print.
        moment: number of the moment, from 1, before which `disturb` is called in the process `victim`; None: never.
    """
    context = multiprocessing.get_context("fork")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launched = []
    for rank in range(processes):
        environment = {"ACCELERATE_USE_CPU": "true"}
        if processes > 1:
            numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
            environment |= {name: str(value) for name, value in numbers.items()}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        own = (disturb, moment) if rank == victim else (disturb, None)
        arguments = (command, moments, folder / f"rank_{rank}.txt", environment, *own)
        process = context.Process(target=_run, args=arguments)
        process.start()
        launched.append(process)
    for process in launched:
        process.join(SECONDS)
        if process.is_alive():
            process.kill()
            raise AssertionError(f"process {process.pid} hangs: {(folder / 'rank_0.txt').read_text()[-2000:]}")
    texts = [(folder / f"rank_{rank}.txt").read_text() for rank in range(processes)]
    counted = [line for line in texts[0].splitlines() if line.startswith("moments: ")]
    return Ended([one.exitcode for one in launched], texts, int(counted[-1].split()[1]) if counted else 0)


def _run(command, moments, printed: Path, environment: dict[str, str], disturb, moment: int | None) -> None:
    handle = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", buffering=1, closefd=False)
    logging.getLogger().handlers = [logging.StreamHandler(sys.stderr)]  # not those of the test that forked
    os.environ.update(environment)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    AcceleratorState._reset_state(reset_partial_state=True)
    torch.set_num_threads(1)
    seen = 0

    def passing() -> None:
        nonlocal seen
        seen += 1
        if seen == moment:
            disturb()

    for owner, name in moments:
        _before_each(owner, name, passing)
    status = command()
    print(f"moments: {seen}", flush=True)
    raise SystemExit(status)


def _before_each(owner: Any, name: str, call: Callable[[], None]) -> None:
    function = getattr(owner, name)

    def counted(*arguments, **named):
        call()
        return function(*arguments, **named)

    setattr(owner, name, counted)  # in this process only, which ends


def differences(run: Path, other: Path) -> list[str]:
    """In what two finished runs differ, bit for bit, besides their times."""
    found = []
    for part in ("detector", "encoder", "task"):
        one, two = (load_file(path / "model" / part / "model.safetensors") for path in (run, other))
        found += [f"{part}.{name}" for name in one if not torch.equal(one[name], two[name])]
    last = sorted((other / "checkpoints").glob("step_*"))[-1].name
    states = [
        torch.load(path / "checkpoints" / last / "state" / "optimizer.bin", weights_only=True)["state"]
        for path in (run, other)
    ]
    found += [
        f"optimiser {number}.{name}"
        for number, state in states[0].items()
        for name, value in state.items()
        if not torch.equal(torch.as_tensor(value), torch.as_tensor(states[1][number][name]))
    ]
    found += ["log"] if read_log(run / "log.jsonl") != read_log(other / "log.jsonl") else []
    metrics = [json.loads((path / "metrics.json").read_text()) for path in (run, other)]
    found += [name for name in metrics[1] if name not in TIMES and metrics[0].get(name) != metrics[1][name]]
    best = [json.loads((path / "best" / "best.json").read_text()) for path in (run, other)]
    return found + (["best"] if best[0] != best[1] else [])


TIMES = ("seconds", "seconds_training", "images_per_second")
