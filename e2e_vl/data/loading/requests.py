"""Asking for an image with some of its texts, and the randomness that belongs to a text."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Request:
    """Asks for one image (`group`) with some of its texts."""

    group: int  # index into `groups` of the data set
    texts: tuple[int, ...]  # text indices, all of this group
    epoch: int = 0  # selects the randomness


def random_generator(seed: int, epoch: int, text: int) -> np.random.Generator:
    """The generator of one text in one epoch; it depends on nothing else, so neither on workers nor on order."""
    return np.random.default_rng([seed, epoch, text])
