"""Enforces the shapes in annotations, and leaves other annotations alone: tests may hand over stand-ins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from beartype import BeartypeConf, beartype

ARRAYS = ("Tensor", "ndarray", "Array", "FeatureMap")


def check_shapes(function: Callable[..., Any]) -> Callable[..., Any]:
    """For `jaxtyping.install_import_hook`: `beartype` of the annotations that name an array."""
    hints = getattr(function, "__annotations__", {})
    function.__annotations__ = {
        name: hint
        for name, hint in hints.items()
        if any(word in (hint if isinstance(hint, str) else repr(hint)) for word in ARRAYS)
    }
    return beartype(conf=BeartypeConf(is_pep484_tower=True))(function)
