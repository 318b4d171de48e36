"""Enforces the shapes in annotations, and leaves other annotations alone: tests may hand over stand-ins."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jaxtyping
from beartype import BeartypeConf, beartype

ARRAYS = ("Tensor", "ndarray", "Array", "FeatureMap")
_decorate = jaxtyping.jaxtyped


def jaxtyped(decorated: Any = None, *, typechecker: Callable[..., Any]) -> Any:
    """`jaxtyping.jaxtyped` where an annotation names an array; any other function or dataclass as it is.

    There is nothing to check in the others, and a call of a decorated function takes long: a tiny training makes tens
    of thousands of them, which were a seventh of its time.
    """
    if decorated is None:
        return functools.partial(jaxtyped, typechecker=typechecker)
    is_class = inspect.isclass(decorated)
    if is_class and not dataclasses.is_dataclass(decorated):
        return decorated
    function = decorated.__init__ if is_class else decorated
    if not any(names_array(_resolved(hint, function)) for hint in getattr(function, "__annotations__", {}).values()):
        return decorated
    return _decorate(decorated, typechecker=typechecker)


def check_shapes(function: Callable[..., Any]) -> Callable[..., Any]:
    """For `jaxtyping.install_import_hook`: `beartype` of the annotations that name an array."""
    hints = getattr(function, "__annotations__", {})
    function.__annotations__ = {name: hint for name, hint in hints.items() if names_array(hint)}
    return beartype(conf=BeartypeConf(is_pep484_tower=True))(function)


def names_array(hint: Any) -> bool:
    """Whether an annotation, or its text, has an array in it."""
    return any(word in (hint if isinstance(hint, str) else repr(hint)) for word in ARRAYS)


def _resolved(hint: Any, function: Callable[..., Any]) -> Any:
    """What the text of an annotation stands for: it may be a name for the type of an array."""
    if not isinstance(hint, str):
        return hint
    try:
        return eval(hint, getattr(function, "__globals__", {}))
    except Exception:  # a name that the module does not know, or not yet
        return hint
