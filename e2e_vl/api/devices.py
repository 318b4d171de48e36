"""Where a model runs that is asked from Python."""

from __future__ import annotations

import torch
from accelerate.utils import parse_flag_from_env

from detector.errors import UserError
from e2e_vl.engine.launch import refuse_missing_gpus


def chosen_device(device: str | torch.device | None) -> torch.device:
    """The device that a user names; None: the GPU, or the CPU where there is no GPU or ACCELERATE_USE_CPU is true.

    Raises:
        ValueError: no name of a device, a device that this machine does not have, or (without a name) GPUs that
            CUDA_VISIBLE_DEVICES asks for and that do not exist.
    """
    if device is None:
        refuse_missing_gpus()
        if torch.accelerator.is_available() and not parse_flag_from_env("ACCELERATE_USE_CPU"):
            return torch.accelerator.current_accelerator()
        return torch.device("cpu")
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise UserError(f"device is {device!r}; give a name such as 'cpu', 'cuda' or 'cuda:1'.") from error
    if wanted.type != "cpu" and (wanted.index or 0) >= _count(wanted.type):
        raise UserError(f"device is '{wanted}', but torch finds no such device on this machine; use 'cpu'.")
    return wanted


def _count(kind: str) -> int:
    """How many devices of a kind torch finds."""
    if not torch.accelerator.is_available() or torch.accelerator.current_accelerator().type != kind:
        return 0
    return torch.accelerator.device_count()
