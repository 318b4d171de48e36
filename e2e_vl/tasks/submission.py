"""Submission files: the predictions of a split as an evaluation server or an official script reads them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class SecondRun:
    """Another run of the task, which predicts the other half of a submission file."""

    settings: tuple[str, ...]  # `key=value`, with which it predicts
    option: str  # the command-line option for its folder
    # metrics that need the predictions of both runs; empty if the split has no labels
    joint_metrics: Callable[[Sequence[Any], Sequence[Any]], dict[str, float]]


@dataclasses.dataclass(frozen=True)
class Submission:
    """The submission file of a task."""

    # called with a path and the predictions of a split in data set order; with a second run, also with its predictions
    write: Callable[..., None]
    second_run: SecondRun | None = None  # None: one run is enough
