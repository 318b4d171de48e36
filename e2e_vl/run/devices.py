"""The device and the precision that a model runs in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from detector.errors import UserError

PRECISIONS = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}


def default_device() -> torch.device:
    """Return the CUDA GPU, or the CPU if there is none or ACCELERATE_USE_CPU is true.

    Other accelerators, such as a Mac's MPS, run on request only: no training was ever run on them.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    from accelerate.utils import parse_flag_from_env  # late: it imports much

    return torch.device("cpu" if parse_flag_from_env("ACCELERATE_USE_CPU") else "cuda")


def choose_device(device: str | int | torch.device | None) -> torch.device:
    """Return a device that a tensor can be put on.

    Args:
        device: a name such as "cpu", "cuda:1" or "mps"; a GPU's number; None: see `default_device`.

    Raises:
        UserError: the name is unknown, or this machine has no such device.
    """
    if device is None:
        return default_device()
    advice = 'give "cpu", "cuda", "cuda:1" or "mps", or leave the device out for the default'
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise UserError(f"device={device!r} is no device of PyTorch; {advice}.") from error
    if chosen.type == "meta":
        raise UserError(f"device={device!r} holds no values, so nothing can be computed on it; {advice}.")
    try:
        torch.empty(0, device=chosen)
    except Exception as error:  # the types differ between devices: RuntimeError, AssertionError, ImportError, ...
        raise UserError(
            f"device={device!r}: PyTorch {torch.__version__} finds no such device here; {advice}."
        ) from error
    return chosen


def choose_precision(dtype: str | torch.dtype) -> torch.dtype:
    """Return float32, bfloat16 or float16 by its name or its dtype.

    Raises:
        UserError: it is none of them.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in PRECISIONS:
        raise UserError(f"dtype={dtype!r} is not supported; give one of {', '.join(PRECISIONS)}.")
    return PRECISIONS[name]


@contextlib.contextmanager
def computing_in(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Let networks compute in `dtype`, where that is safe, in this context.

    Weights and coordinates of boxes stay float32 (autocast), as in training in mixed precision: bfloat16 has steps of
    4 pixels at 1000.
    """
    is_reduced = dtype != torch.float32
    with torch.autocast(device.type, dtype if is_reduced else None, enabled=is_reduced):
        yield
