"""Several processes of a command on this machine: `e2e-vl train --num-processes N`.

The launchers of accelerate and torch end at once with Ctrl-C, or after 30 seconds, with a traceback and status 1. This
one passes signals on, waits until the processes have saved a checkpoint, prints nothing, and exits with their status.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TextIO

from detector.errors import UserError
from detector.io import read_yaml
from e2e_vl.terminal import LAUNCHED, LOST_PROCESS, handling_signals

PATIENCE = 10.0  # seconds until the others are killed after a process has failed
POLL_SECONDS = 0.05
# distributed types of accelerate's files; the others shard the model, or need other hardware
REPLICATED = ("NO", "MULTI_CPU", "MULTI_GPU")


def add_process_options(parser: argparse.ArgumentParser) -> None:
    """Add --num-processes and --accelerate-config."""
    parser.add_argument(
        "--num-processes", type=int, metavar="N", help="processes to start on this machine, one per GPU (default: 1)"
    )
    parser.add_argument(
        "--accelerate-config",
        type=Path,
        metavar="FILE",
        help="file of `accelerate config` with their number, GPUs and port",
    )


def run_in_processes(
    args: argparse.Namespace,
    command: str,
    argv: Sequence[str] | None,
    check: Callable[[int], None] = lambda number: None,
) -> int | None:
    """Run a command of `e2e-vl` in the processes that its options ask for.

    Args:
        args: the parsed options, with those of `add_process_options`.
        argv: the words after the command; None: those of this process.
        check: raises an error if the command cannot run in this number of processes.

    Returns:
        The exit status; None if this process is to do the work itself: without the options, or because it was started
        here.
    """
    if LAUNCHED in os.environ or (args.num_processes is None and args.accelerate_config is None):
        return None
    if "RANK" in os.environ:
        raise UserError(
            "--num-processes starts the processes itself; use it without `accelerate launch` or `torchrun`."
        )
    number, environment = process_settings(args)
    check(number)
    words = sys.argv[1:] if argv is None else argv
    return start_processes([sys.executable, "-m", "e2e_vl", command, *words], number, environment)


def process_settings(args: argparse.Namespace) -> tuple[int, dict[str, str]]:
    """Return the number of processes, and the environment that they get; --num-processes beats the file."""
    settings = {}
    if args.accelerate_config is not None:
        settings = read_yaml(args.accelerate_config)
    if not isinstance(settings, Mapping):
        raise UserError(f"{args.accelerate_config} is not a file of `accelerate config`.")
    kind = settings.get("distributed_type", "NO")
    if str(kind) not in REPLICATED and kind is not False:  # YAML reads an unquoted NO as false
        raise UserError(
            f"{args.accelerate_config}: distributed_type {kind} is not supported: every process needs the whole model; "
            f"it can be {', '.join(REPLICATED)}."
        )
    if settings.get("num_machines", 1) != 1:
        raise UserError(
            f"{args.accelerate_config}: num_machines is {settings['num_machines']}, but --num-processes is for one "
            "machine; use `accelerate launch` or `torchrun` for several."
        )
    number = args.num_processes
    if number is None:
        number = settings.get("num_processes", 1)
    if not isinstance(number, int) or number < 1:
        raise UserError(f"The number of processes is {number}; give 1 or more as --num-processes.")
    environment = {"MASTER_PORT": str(settings.get("main_process_port") or free_port())}
    if settings.get("use_cpu"):
        environment["ACCELERATE_USE_CPU"] = "true"
    if settings.get("gpu_ids", "all") != "all":
        environment["CUDA_VISIBLE_DEVICES"] = str(settings["gpu_ids"])
    return number, environment


def free_port() -> int:
    """Return a port of this machine on which nothing listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def start_processes(call: Sequence[str], number: int, environment: Mapping[str, str]) -> int:
    """Start a command in several processes that torch.distributed can join, and wait for all of them.

    Returns:
        The exit status: that of the process that failed first, or 128 + the signal that stopped them, or 0.
    """
    common = {
        "OMP_NUM_THREADS": str(max((os.cpu_count() or 1) // number, 1)),
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "WORLD_SIZE": str(number),
        "LOCAL_WORLD_SIZE": str(number),
        LAUNCHED: "1",
        **environment,
    }
    if Path("/sys/class/net/lo").exists():  # gloo would look up the host's name, which containers may not know
        common.setdefault("GLOO_SOCKET_IFNAME", "lo")
    processes = []
    for rank in range(number):
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        # in sessions of their own, so that a signal of the terminal reaches them once: through `supervise`
        processes.append(subprocess.Popen(call, env={**common, **ranks}, start_new_session=True))
    return supervise(processes)


def run_command(call: Sequence[str], output: TextIO) -> int:
    """Run a command, whose standard output goes to a file, and return its exit status.

    Unlike `subprocess.run` it passes signals on and waits, instead of killing a training that saves its checkpoint.
    """
    return supervise([subprocess.Popen(call, stdout=output, start_new_session=True)])


def send_to_group(process: subprocess.Popen, signal_number: int) -> None:
    """Send a signal to a process and to what it started: a launcher does not always pass it on."""
    if os.name == "nt":  # it has no groups
        process.terminate()
    else:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.killpg(process.pid, signal_number)


def supervise(processes: Sequence[subprocess.Popen]) -> int:
    """Wait for processes, pass signals on to them, and return the exit status, see `start_processes`.

    After a signal they have as long as they need to save. After a failure the others, which may wait forever for the
    one that failed, have PATIENCE.

    Args:
        processes: each one started with `start_new_session=True`.
    """
    passed_on: list[int] = []

    def pass_on(signal_number: int, frame: FrameType | None) -> None:
        passed_on.append(signal_number)
        for process in processes:
            if process.poll() is None:
                send_to_group(process, signal_number)

    failures: dict[int, int] = {}  # rank -> exit status, in the order of time
    deadline = math.inf
    with handling_signals(pass_on):
        while any(process.poll() is None for process in processes):
            time.sleep(POLL_SECONDS)
            expected = {0, None, *(128 + signal_number for signal_number in passed_on)}
            for rank, process in enumerate(processes):
                if rank not in failures and exit_status(process) not in expected:
                    failures[rank] = exit_status(process)
                    deadline = min(deadline, time.monotonic() + PATIENCE)
                    describe_kill(rank, process)
            if time.monotonic() > deadline:
                for process in processes:
                    process.kill()
    statuses = [*failures.values(), *map(exit_status, processes)]
    errors = [status for status in statuses if status]
    causes = [status for status in errors if status != LOST_PROCESS]  # a lost process is a consequence
    return next(iter(causes + errors), 0)


def exit_status(process: subprocess.Popen) -> int | None:
    """Return the exit status as in shells: 128 + the signal that ended the process; None: it is still running."""
    status = process.poll()
    if status is not None and status < 0:
        return 128 - status
    return status


def describe_kill(rank: int, process: subprocess.Popen) -> None:
    """Say that a signal ended a process, which then could not say so itself."""
    if process.returncode < 0:
        name = signal.Signals(-process.returncode).name
        print(
            f"error: process {rank} was ended by {name} (the system kills processes that need too much memory).",
            file=sys.stderr,
        )
