"""What the experiment trackers of `train.trackers` get: the settings, and every value that can change."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

from e2e_vl.box_sources import BoxSource
from e2e_vl.config import RunConfig

PROJECT = "e2e-vl"  # name of the project, or of the folder, that trackers put the run into


def installed_trackers() -> set[str]:
    """Names of the trackers whose packages are installed."""
    return {str(name) for name in get_available_trackers()}


def check_trackers(names: Iterable[str]) -> None:
    """Raises ValueError for the first tracker that accelerate does not know or that is not installed."""
    for name in names:
        if name not in LOGGER_TYPE_TO_CLASS:
            raise ValueError(f"train.trackers has '{name}'; it must be some of {', '.join(LOGGER_TYPE_TO_CLASS)}.")
        if name not in installed_trackers():
            raise ValueError(f"train.trackers has '{name}', which is not installed; install it or leave it out.")


def start_trackers(accelerator: Accelerator, config: RunConfig) -> None:
    """Start the accelerator's trackers, with all settings as hyper-parameters."""
    accelerator.init_trackers(PROJECT, config=dict(_flat(dataclasses.asdict(config))))


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, bool | int | float | str]]:
    """Dotted names and plain values; lists as text, and nothing for what is not set."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif value is not None:
            yield prefix + name, value if isinstance(value, bool | int | float | str) else str(value)


def without_constants(config: RunConfig, values: Mapping[str, float | None]) -> dict[str, float]:
    """The values that can differ from step to step, of those that are logged.

    The number of evaluated texts cannot, nor can the best accuracy that boxes of a file allow (`ceiling`), nor a
    learning rate of a schedule that neither rises nor falls.
    """
    given = tuple(source.metric_suffix for source in BoxSource.for_evaluation() if source is not BoxSource.ONLINE)
    is_flat = config.train.schedule == "constant" and config.train.warmup_steps == 0
    left = {}
    for name, value in values.items():
        metric = name.split("/")[1]
        is_constant = metric.startswith("count_") or (metric.startswith("ceiling_") and metric.endswith(given))
        if value is not None and not is_constant and not (is_flat and metric.startswith("lr_")):
            left[name] = value
    return left
