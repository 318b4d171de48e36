"""Where a run is in its data, counted in images, so that a resumed run may have batches of another size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from detector.errors import UserError
from e2e_vl.config import RunConfig
from e2e_vl.data.loading.grouping import GroupedBatchSampler


def place_after(steps: int, sampler: GroupedBatchSampler) -> dict[str, Any]:
    """The place in the data after `steps` steps of the sampler's size, as a checkpoint keeps it."""
    per_step = _images_per_step(sampler)
    epoch, done = divmod(steps, _steps_per_epoch(sampler))
    return {"epoch": epoch, "images": done * per_step, "images_per_step": per_step, "order": _order(sampler)}


def steps_to(place: Mapping[str, Any], sampler: GroupedBatchSampler) -> int:
    """The number of steps of the sampler's size that lead to a place which `place_after` gave.

    Raises:
        ValueError: no number of whole steps does, or images come in another order now.
    """
    per_step, images = _images_per_step(sampler), place["images"]
    if images and place["order"] != _order(sampler):
        changed = ", ".join(name for name, value in _order(sampler).items() if place["order"].get(name) != value)
        raise UserError(
            f"Cannot resume inside of epoch {place['epoch'] + 1}, after {images} of its images: they would come in "
            f"another order now ({changed} differ), and some would be repeated or left out; resume with the earlier "
            "settings."
        )
    if images % per_step:
        raise UserError(
            f"Cannot resume with train.images_per_batch={per_step}: the checkpoint lies after {images} images of epoch "
            f"{place['epoch'] + 1}, which is no whole number of batches, so images would be repeated or left out; "
            f"choose a divisor of {images}, such as the earlier {place['images_per_step']}."
        )
    return place["epoch"] * _steps_per_epoch(sampler) + images // per_step


def check_same_size(saved: RunConfig, settings: RunConfig) -> None:
    """A checkpoint of an earlier version does not know its place in images.

    Raises:
        ValueError: the batches have another size now.
    """
    if saved.train.images_per_batch != settings.train.images_per_batch:
        raise UserError(
            f"Cannot resume with train.images_per_batch={settings.train.images_per_batch}: the checkpoint is of an "
            f"earlier version of this project, which saved no place in the data; resume with the earlier "
            f"{saved.train.images_per_batch}."
        )


def _images_per_step(sampler: GroupedBatchSampler) -> int:
    return sampler.images_per_batch * sampler.accumulate


def _steps_per_epoch(sampler: GroupedBatchSampler) -> int:
    return sampler.batches_per_epoch // sampler.accumulate


def _order(sampler: GroupedBatchSampler) -> dict[str, Any]:
    """What decides in which order images come."""
    return {
        "data.texts_per_image": sampler.texts_per_image,
        "seed": sampler.seed,
        "number of images": sampler.num_groups,
    }
