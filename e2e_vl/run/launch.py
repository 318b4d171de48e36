"""The `Accelerator` of a command, and what its processes tell each other."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import (
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    get_cpu_distributed_information,
    parse_flag_from_env,
)

from detector.errors import UserError

# Ways of accelerate to divide a model; checkpoints and the gradient norm need the whole one.
SHARDED = {
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism config",
}
Found = TypeVar("Found")


def make_accelerator(mixed_precision: str, *, max_wait_minutes: float = 240.0, **options: Any) -> Accelerator:
    """An `Accelerator` on the GPU, or on the CPU where there is no GPU or ACCELERATE_USE_CPU is true.

    On the CPU, where `accelerate launch` leaves each process one thread, the processes share all cores unless
    `--num_cpu_threads_per_process` gives them more. Accelerate's own setting of gradient accumulation is ignored.

    Args:
        mixed_precision: no, bf16 or fp16.
        max_wait_minutes: how long processes wait for each other; accelerate's default of 10 minutes is too short to
            read large data for the first time.
    """
    for variable, name in SHARDED.items():
        if parse_flag_from_env(variable):
            raise UserError(
                f"{name} was asked for ({variable}, of `accelerate launch` or `accelerate config`), which this project "
                "does not support; every process has the whole model, so launch without it (for less memory: "
                "train.activation_checkpointing=true, train.mixed_precision=bf16)."
            )
    on_cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
    if on_cpu and "ACCELERATE_MIXED_PRECISION" in os.environ:  # set by `accelerate launch`
        processes = get_cpu_distributed_information().local_world_size
        torch.set_num_threads(max((os.cpu_count() or 1) // processes, torch.get_num_threads()))
    one = GradientAccumulationPlugin(num_steps=1)  # else the environment decides, and every loss is divided by it
    waiting = InitProcessGroupKwargs(timeout=datetime.timedelta(minutes=max_wait_minutes))
    handlers = [*options.pop("kwargs_handlers", []), waiting]
    return Accelerator(
        mixed_precision=mixed_precision,
        cpu=on_cpu,
        gradient_accumulation_plugin=one,
        kwargs_handlers=handlers,
        **options,
    )


def gather_to_main(accelerator: Accelerator, own: list[Found]) -> list[Found]:
    """The lists of all processes one after the other, on the main process; the others get an empty list.

    (Predictions of a large split on every process would take that many times their memory.)
    """
    if accelerator.num_processes == 1:
        return own
    parts: list[Any] | None = [None] * accelerator.num_processes if accelerator.is_main_process else None
    torch.distributed.gather_object(own, parts, dst=0)
    return [] if parts is None else [one for part in parts for one in part]


def on_main(accelerator: Accelerator, compute: Callable[[], Found]) -> Found:
    """What the main process computes, on every process.

    An error ends the main process alone, and the launcher ends the others, which wait.
    """
    found = [compute() if accelerator.is_main_process else None]
    if accelerator.num_processes > 1:
        torch.distributed.broadcast_object_list(found, src=0)
    return found[0]
