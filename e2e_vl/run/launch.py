"""The `Accelerator` of a command: on the right device, with all processes that were asked for, on all cores."""

from __future__ import annotations

import datetime
import logging
import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import (
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    get_cpu_distributed_information,
    get_int_from_env,
    parse_flag_from_env,
)

from detector.errors import UserError

logger = logging.getLogger(__name__)

# What torch's launcher and the MPI libraries tell each process about the number of processes.
NUMBERS_OF_PROCESSES = ("LOCAL_WORLD_SIZE", "WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
# Ways of accelerate to divide a model, which checkpoints and the check of gradients know nothing of.
DIVIDED = {
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism config",
}
ACCUMULATION = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
Found = TypeVar("Found")


def make_accelerator(mixed_precision: str, *, max_wait_minutes: float = 240.0, **options: Any) -> Accelerator:
    """An `Accelerator` on the GPU, or on the CPU where there is no GPU or ACCELERATE_USE_CPU is true.

    On the CPU, processes of `torchrun` find each other. `accelerate launch` leaves each process one thread; the
    processes share all cores here unless `--num_cpu_threads_per_process` gives them more.
    `mixed_precision` is no, bf16 or fp16. Gradients are accumulated as the settings say, whatever accelerate's own
    settings are. Processes wait `max_wait_minutes` for each other before they give up (accelerate's own limit is 10
    minutes, in which large data cannot be read for the first time).

    Raises:
        UserError: GPUs were asked for that do not exist, `accelerate launch` was asked for several processes and
            started one, or the model was to be divided by FSDP, DeepSpeed or the like.
    """
    refuse_missing_gpus()
    for variable, name in DIVIDED.items():
        if parse_flag_from_env(variable):
            raise UserError(
                f"{name} was asked for ({variable}, of `accelerate launch` or `accelerate config`), which this project "
                "does not support; every process has the whole model, so launch without it (for less memory: "
                "train.activation_checkpointing=true, train.mixed_precision=bf16)."
            )
    if os.environ.get(ACCUMULATION, "1") != "1":
        logger.warning(
            "%s is %s, which is ignored; train.accumulate says how many micro-batches a step has.",
            *(ACCUMULATION, os.environ[ACCUMULATION]),
        )
    on_cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
    if "ACCELERATE_MIXED_PRECISION" in os.environ:  # set by `accelerate launch`
        # where there are not several GPUs, `accelerate launch --num_processes 2` leaves the second one to MPI: it
        # starts one process without saying so, and tells it only where the others would meet it
        if "MASTER_ADDR" in os.environ and not get_int_from_env(NUMBERS_OF_PROCESSES, 0):
            raise UserError(
                "`accelerate launch` was asked for several processes, but it starts only one where there are not "
                "several GPUs; start N processes on the CPU with `torchrun --standalone --nproc_per_node N -- "
                f"{sys.argv[0]} ...`, or leave out --num_processes (and unset MASTER_ADDR)."
            )
        if on_cpu:
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


def refuse_missing_gpus() -> None:
    """Raises UserError if the run was to have GPUs that torch does not find; it would use fewer, or the CPU.

    GPUs are asked for by CUDA_VISIBLE_DEVICES (also through `accelerate launch --gpu_ids`), by
    `accelerate launch --multi_gpu`, and by more processes on a machine with GPUs than it has.
    """
    if parse_flag_from_env("ACCELERATE_USE_CPU"):
        return
    on_the_cpu = "or use the CPU (`accelerate launch --cpu`, or ACCELERATE_USE_CPU=true)"
    found = torch.accelerator.device_count()
    there = f"{found or 'no'} GPU{'' if found == 1 else 's'}"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    asked = [word for word in visible.split(",") if word.strip().isdigit() or word.strip().startswith(("GPU-", "MIG-"))]
    if len(asked) > found:
        raise UserError(
            f"CUDA_VISIBLE_DEVICES (or --gpu_ids) asks for the GPUs {visible}, but torch finds {there} among them; "
            f"name GPUs that nvidia-smi lists, {on_the_cpu}."
        )
    processes = get_int_from_env(("LOCAL_WORLD_SIZE",), 1)
    # for one process, and for processes on the CPU, `accelerate launch` sets ACCELERATE_USE_CPU to true or false
    is_multi_gpu = "ACCELERATE_MIXED_PRECISION" in os.environ and "ACCELERATE_USE_CPU" not in os.environ
    if processes > found and (found or is_multi_gpu):
        raise UserError(
            f"{processes} processes were asked for, each with a GPU of its own, but torch finds {there} on this "
            f"machine; start as many processes as there are GPUs, {on_the_cpu}."
        )
