"""Strict loading of weights files."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn


def load_strictly(module: nn.Module, path: Path) -> None:
    """Load a safetensors file into a module; every key must be there, in its shape, and no other.

    Raises:
        FileNotFoundError, ValueError: naming the file and the first keys that do not fit.
    """
    if not path.is_file():
        raise FileNotFoundError(f"Weights file {path} does not exist.")
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a readable safetensors file ({error}); copy it again.") from error
    own = module.state_dict()
    problems = [f"missing {key}" for key in own if key not in tensors]
    problems += [f"unexpected {key}" for key in tensors if key not in own]
    problems += [
        f"{key} is {tuple(value.shape)} in the file, {tuple(own[key].shape)} in the model"
        for key, value in tensors.items()
        if key in own and own[key].shape != value.shape
    ]
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise ValueError(
            f"{path} was saved from another architecture: {'; '.join(problems[:3])}{more}; "
            "use the settings that it was trained with."
        )
    module.load_state_dict(tensors)
