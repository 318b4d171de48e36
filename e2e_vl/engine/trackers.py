"""What the experiment trackers of `train.trackers` get: the settings, every value that can change, and pictures."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

from detector.errors import UserError
from e2e_vl.config import RunConfig
from e2e_vl.drawing import draw_boxes
from e2e_vl.metric_names import MetricName
from e2e_vl.tasks.base import Records, Task, with_target

PICTURES = 4  # of each evaluation
PROJECT = "e2e-vl"  # name of the project, or of the folder, that trackers put the run into


def installed_trackers() -> set[str]:
    """Names of the trackers whose packages are installed."""
    return {str(name) for name in get_available_trackers()}


def check_trackers(names: Iterable[str]) -> None:
    """Raises ValueError for the first tracker that accelerate does not know or that is not installed."""
    for name in names:
        if name not in LOGGER_TYPE_TO_CLASS:
            raise UserError(f"train.trackers has '{name}'; it must be some of {', '.join(LOGGER_TYPE_TO_CLASS)}.")
        if name not in installed_trackers():
            raise UserError(f"train.trackers has '{name}', which is not installed; install it or leave it out.")


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


def track_pictures(accelerator: Accelerator, task: Task, records: Records, name: str, step: int) -> None:
    """Give the predictions for the first text with a target of the first images, drawn, to trackers of pictures.

    They are the same texts in every evaluation, so that a tracker shows how their answers change. A text whose image
    lies in an archive has no picture.

    Args:
        name: of the evaluation, such as "val, gt".
    """
    takers = [one for one in accelerator.trackers if hasattr(one, "log_images")]
    if not takers:
        return
    records = with_target(records)
    of_images = {record["file_name"]: record for record in reversed(records) if record.get("file_name")}
    shown = [record for record in records if of_images.get(record.get("file_name")) is record][:PICTURES]
    for number, record in enumerate(shown):
        try:
            picture = _picture(task, {**record, "correct": task.correct(record)})
        except (FileNotFoundError, ValueError):  # it lies in an archive, or was moved meanwhile
            continue
        for tracker in takers:
            key = f"{name} {number}"
            if tracker.name == "tensorboard":
                tracker.log_images({key: picture[None]}, step=step, dataformats="NHWC")
            else:  # for aim and clearml a value is one picture, for the others a list
                value = picture if tracker.name in ("aim", "clearml") else [picture]
                tracker.log_images({key: value}, step=step)


def _picture(task: Task, record: dict[str, Any]) -> np.ndarray:
    words = task.describe(record)
    return draw_boxes(task.draw(record), [], title=f"{words.asked} -> {words.answer}")


def without_constants(config: RunConfig, values: Mapping[str, float | None]) -> dict[str, float]:
    """The values that can differ from step to step, of those that are logged.

    The number of evaluated texts cannot, nor can the best accuracy that boxes of a file allow (`ceiling`), nor a
    learning rate of a schedule that neither rises nor falls.
    """
    has_warmup = config.train.warmup_steps > 0 or bool(config.train.warmup_share)
    is_flat = config.train.schedule == "constant" and not has_warmup
    left = {}
    for name, value in values.items():
        found = MetricName.read(name)
        is_constant = found is not None and found.is_constant
        if value is not None and not is_constant and not (is_flat and name.startswith("train/lr_")):
            left[name] = value
    return left
