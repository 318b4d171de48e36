"""Where a model runs that is asked from Python."""

from __future__ import annotations

import torch
from accelerate.utils import parse_flag_from_env


def best_device() -> torch.device:
    """The GPU, or the CPU where there is no GPU or ACCELERATE_USE_CPU is true."""
    if torch.accelerator.is_available() and not parse_flag_from_env("ACCELERATE_USE_CPU"):
        return torch.accelerator.current_accelerator()
    return torch.device("cpu")
