"""The `Accelerator` of a command, and communication between its processes."""

from __future__ import annotations

import datetime
import itertools
import logging
import os
from collections.abc import Callable
from pathlib import Path
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
from e2e_vl.run.devices import default_device

# Sharding backends of accelerate, which are not supported: checkpoints and the gradient norm need the whole model.
SHARDED = {
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism config",
}
CPU_INFO = Path("/proc/cpuinfo")  # of Linux
Value = TypeVar("Value")
logger = logging.getLogger(__name__)


def make_accelerator(
    mixed_precision: str, *, tf32: bool | None = None, max_wait_minutes: float = 240.0, **options: Any
) -> Accelerator:
    """Make an `Accelerator` on the CUDA GPU, or on the CPU if there is none or ACCELERATE_USE_CPU is true.

    Accelerate itself would choose a Mac's MPS, which has no float64.

    On the CPU, `accelerate launch` gives each process one thread; here the processes share all cores, unless
    `--num_cpu_threads_per_process` gives them more. Accelerate's setting for gradient accumulation is ignored.

    Args:
        mixed_precision: no, bf16 or fp16.
        tf32: see `TrainConfig.tf32`.
        max_wait_minutes: timeout of collective operations; accelerate's default of 10 minutes is too short for reading
            large data for the first time.
        options: further arguments of `Accelerator`.
    """
    for variable, name in SHARDED.items():
        if parse_flag_from_env(variable):
            raise UserError(
                f"{name} ({variable}, set by `accelerate launch` or `accelerate config`) is not supported: every "
                "process needs the whole model. Launch without it; to save memory, set "
                "train.activation_checkpointing=true or train.mixed_precision=bf16."
            )
    on_cpu = default_device().type == "cpu"
    if on_cpu and torch.accelerator.is_available() and not parse_flag_from_env("ACCELERATE_USE_CPU"):
        logger.warning(
            "This command runs on CUDA GPUs and CPUs only, so it uses the CPU and not this machine's %s.",
            torch.accelerator.current_accelerator(),
        )
    if on_cpu and mixed_precision == "bf16" and has_bf16_instructions() is False:
        logger.warning(
            "This CPU has no bf16 instructions, so bf16 is many times slower than float32 (20 instead of 152 GFLOP/s "
            "in convolutions, 0.9 instead of 99 in matrix products, on a CPU with AVX2); set train.mixed_precision=no."
        )
    if not on_cpu and int(os.environ.get("LOCAL_RANK", 0)) >= torch.accelerator.device_count():
        raise UserError(
            f"There are {os.environ.get('LOCAL_WORLD_SIZE', 'more')} processes, but {torch.accelerator.device_count()} "
            "GPUs; start one process per GPU, or set ACCELERATE_USE_CPU=true."
        )
    if tf32 is not None:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    if on_cpu and "ACCELERATE_MIXED_PRECISION" in os.environ:  # set by `accelerate launch`
        processes = get_cpu_distributed_information().local_world_size
        torch.set_num_threads(max((os.cpu_count() or 1) // processes, torch.get_num_threads()))
    # without it, accelerate divides every loss by the number of accumulation steps set in the environment
    accumulation = GradientAccumulationPlugin(num_steps=1)
    timeout = InitProcessGroupKwargs(timeout=datetime.timedelta(minutes=max_wait_minutes))
    handlers = [*options.pop("kwargs_handlers", []), timeout]
    return Accelerator(
        mixed_precision=mixed_precision,
        cpu=on_cpu,
        gradient_accumulation_plugin=accumulation,
        kwargs_handlers=handlers,
        **options,
    )


def has_bf16_instructions() -> bool | None:
    """Return whether this machine's CPU computes in bf16; None: its operating system is not Linux.

    The kernel names them avx512_bf16, amx_bf16 or bf16. PyTorch's own `torch.cpu.get_capabilities` is newer than 2.6.
    """
    if not CPU_INFO.is_file():
        return None
    return "bf16" in CPU_INFO.read_text("utf-8")


def gather_to_main(accelerator: Accelerator, values: list[Value]) -> list[Value]:
    """Concatenate the lists of all processes on the main process; returns an empty list on the others.

    Gathering on the main process only saves memory with large splits.
    """
    if accelerator.num_processes == 1:
        return values
    lists: list[Any] | None = None  # of each process
    if accelerator.is_main_process:
        lists = [None] * accelerator.num_processes
    torch.distributed.gather_object(values, lists, dst=0)
    if lists is None:
        return []
    return list(itertools.chain.from_iterable(lists))


def on_main(accelerator: Accelerator, compute: Callable[[], Value]) -> Value:
    """Compute on the main process and broadcast the result.

    After an error on the main process, the launcher ends the other processes.
    """
    value: Any = None
    if accelerator.is_main_process:
        value = compute()
    if accelerator.num_processes > 1:
        values = [value]
        torch.distributed.broadcast_object_list(values, src=0)
        [value] = values
    return value
