"""As many processes as were asked for, also without a GPU.

Accelerate leaves several CPU processes to MPI: `accelerate launch --num_processes 2` starts one process where there is
no GPU, and processes of `torchrun` do not find each other unless they ask for the CPU. Both are made up for here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate import Accelerator
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import parse_flag_from_env


def make_accelerator(mixed_precision: str, **options: Any) -> Accelerator:
    """An `Accelerator` on the GPU, or on the CPU where there is none or the environment asks for it."""
    if _on_cpu() and "ACCELERATE_MIXED_PRECISION" in os.environ:
        # `accelerate launch` leaves every process one thread unless told otherwise: all cores, shared evenly
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        torch.set_num_threads(max((os.cpu_count() or 1) // processes, torch.get_num_threads()))
    return Accelerator(mixed_precision=mixed_precision, cpu=_on_cpu(), **options)


def start_all_processes() -> None:
    """Start the script again with torch's launcher if `accelerate launch` was to start several CPU processes.

    To be called first in a script. It does not return in that case; in all others it does nothing.
    """
    if "LOCAL_RANK" in os.environ or not _on_cpu():
        return
    parent = psutil.Process().parent()
    number = processes_asked_for(parent.cmdline()) if parent is not None else 1
    if number > 1:
        # behind "--" the launcher does not take the script's --run for an abbreviation of an option of its own
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(number), "--"]
        os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // number, 1)))
        os.execv(sys.executable, [sys.executable, *launcher, *sys.argv])


def processes_asked_for(command: Sequence[str]) -> int:
    """`--num_processes` of an `accelerate launch` command on one machine; 1 for every other command."""
    names = [Path(word).name for word in command[:3]]
    if names[1:] == ["accelerate", "launch"]:
        start = 3
    elif names[1:2] == ["accelerate-launch"]:
        start = 2
    elif names[1:] == ["-m", "accelerate.commands.launch"]:
        start = 3
    else:
        return 1
    arguments = launch_command_parser().parse_args(list(command[start:]))
    return arguments.num_processes or 1 if arguments.num_machines in (None, 1) else 1


def _on_cpu() -> bool:
    return parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
