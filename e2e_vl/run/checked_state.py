"""Checking the state of a checkpoint, before Accelerate loads it and after.

Accelerate loads whatever lies there: weights as a pickle where there are no safetensors, and moments of any shape.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from msgspec import UNSET, Meta, UnsetType
from safetensors import safe_open

from detector.errors import UserError
from detector.torch_files import DamagedTorchFileError, check_torch_file
from detector.weight_files import check_safetensors
from e2e_vl.records import Count, Record, checked
from e2e_vl.run.failed_step import not_finite

WEIGHTS = "model.safetensors"
_REMEDY = "get the file again"
_Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]


class _Place(Record):
    epoch: Count
    images: Count
    images_per_step: _Positive
    order: dict[str, Any]


class _Judged(Record):
    metric: str | None
    step: Count | None
    value: float | None
    judged_step: Count | None
    waited: Count


class _Position(Record):
    """The content of step.json; earlier versions wrote less."""

    processes: _Positive
    step: Count = 0
    images_seen: Annotated[int, Meta(ge=0, le=2**62)] | UnsetType = UNSET
    steps_summed: Count | UnsetType = UNSET
    loss_sums: dict[str, float] | UnsetType = UNSET
    seconds_training: Annotated[float, Meta(ge=0)] | UnsetType = UNSET
    place: _Place | UnsetType = UNSET
    best: _Judged | UnsetType = UNSET


def checked_position(content: dict[str, Any], path: Path) -> dict[str, Any]:
    """What a step.json holds, with numbers of the kinds that a run goes on with.

    Raises:
        UserError: a value is of another kind or out of range.
    """
    return {**content, **msgspec.to_builtins(checked(_Position, content, str(path), remedy=_REMEDY))}


def check_files(state: Path) -> None:
    """Look at all files of a state before Accelerate loads any of them.

    Raises:
        UserError: a file is damaged or claims more than it holds; or the weights are missing, NaN or infinite.
        ForbiddenGlobalError: a file tries to run code.
    """
    for path in sorted(state.iterdir()):
        if path.suffix == ".safetensors" or path.name.startswith("."):
            continue
        if not path.is_file():
            raise UserError(f"{path.name} is not a file")
        try:
            check_torch_file(path)
        except DamagedTorchFileError as error:
            raise UserError(f"{path.name}: {error}") from error
    if not (state / WEIGHTS).is_file():  # without it, Accelerate looks for a pickle
        raise UserError(f"the weights are missing: there is no {WEIGHTS}")
    try:
        check_safetensors(state / WEIGHTS)
    except ValueError as error:
        raise UserError(f"{WEIGHTS}: {error}") from error
    with safe_open(state / WEIGHTS, framework="pt") as file:
        names = file.keys()
        for name in names:
            if not_finite({name: file.get_tensor(name)}):
                raise UserError(f"{WEIGHTS}: {name} is NaN or infinite")


def check_optimizer(optimizer: torch.optim.Optimizer, *, has_stepped: bool) -> None:
    """Look at what an optimiser was given.

    Args:
        has_stepped: at least one update was made.

    Raises:
        UserError: moments are missing, are NaN or infinite, or have another shape than their parameter.
    """
    remembers = any(group.get("momentum", 1) for group in optimizer.param_groups)  # SGD alone may do without
    if has_stepped and remembers and not any(optimizer.state.values()):
        raise UserError("optimizer.bin holds no moments")
    numbers = {id(one): n for n, one in enumerate(one for group in optimizer.param_groups for one in group["params"])}
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            what = f"optimizer.bin: {name} of parameter {numbers.get(id(parameter), 'unknown')}"
            if not isinstance(value, torch.Tensor | int | float | None):
                raise UserError(f"{what} is a {type(value).__name__}")
            tensor = torch.as_tensor(0.0 if value is None else value)
            if tensor.dim() and tensor.shape != parameter.shape:
                raise UserError(f"{what} has the shape {list(tensor.shape)}, expected {list(parameter.shape)}")
            if not_finite({name: tensor}):
                raise UserError(f"{what} is NaN or infinite")


def has_random_state(device: torch.device, states: dict[str, Any]) -> bool:
    """Whether the random state that a device has now is one of those that were loaded; always for the CPU.

    (Accelerate goes on without a word where the states of devices do not fit the devices.)

    Args:
        states: of a random_states file.
    """
    if device.type == "cpu":
        return True
    own = torch.get_device_module(device).get_rng_state(device)
    return any(torch.equal(own, one) for one in states.get(f"torch_{device.type}_manual_seed", ()))
