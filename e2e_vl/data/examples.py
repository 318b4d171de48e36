"""What a dataset returns: images and the texts that look at them, before they are joined into a batch.

Shape legend
    R   candidate boxes of one image
    S   side of a RoI map
    G   annotated objects of one image
    A   attribute slots of an object
    P   masked boxes of one image
    D   width of a region feature
    L   wordpieces of one text

Boxes are xyxy float32 in pixels of the resized image.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Request:
    """Asks a dataset for one image (`group`) with some of its texts."""

    group: int  # index into `dataset.groups`
    texts: tuple[int, ...]  # text indices, all of this group
    epoch: int = 0  # selects the randomness


@dataclasses.dataclass
class Objects:
    """Annotated objects of one image, the targets of the detection losses."""

    boxes: np.ndarray  # float32 [G, 4]
    classes: np.ndarray  # int64 [G], 0 .. K-1
    attributes: np.ndarray | None = None  # int64 [G, A], -1 = none in this slot


@dataclasses.dataclass
class ImageExample:
    """One resized image."""

    pixels: np.ndarray  # uint8 [h, w, 3]
    original_size: tuple[int, int]  # (height, width) as stored, after the EXIF rotation
    name: str  # for error messages, usually the path
    boxes: np.ndarray | None = None  # float32 [R, 4] candidates; None: the detector proposes them
    objects: Objects | None = None
    pixel_masks: np.ndarray | None = None  # float32 [P, 4], boxes whose pixels are hidden from the detector
    features: np.ndarray | None = None  # float32 [R, D], precomputed; only the shape of `pixels` counts then
    image_feature: np.ndarray | None = None  # float32 [D], precomputed feature of the whole image
    roi_masks: np.ndarray | None = None  # float32 [R, S, S], instance masks in 0..1 on the RoI maps
    region_targets: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)  # [R, ...], a row per candidate box


@dataclasses.dataclass
class TextExample:
    """One text, its targets, and which images of its `Example` it looks at.

    Targets whose names end in `_labels` have an entry per wordpiece, int64 [L], -1 = no label.
    """

    input_ids: np.ndarray  # int64 [L]
    segment_ids: np.ndarray  # int64 [L], 0 or 1
    looks_at: tuple[int, ...]  # rows of `Example.images`; empty for a text without an image
    targets: dict[str, np.ndarray]  # the task's file documents the keys
    record: dict[str, Any]  # plain JSON-able values: ids, text, truth in pixels of the original image
    positions: dict[str, int] = dataclasses.field(default_factory=dict)  # e.g. where [MASK] is
    region_of_token: np.ndarray | None = None  # int64 [L], row of the candidate box a wordpiece names; -1 = none


@dataclasses.dataclass
class Example:
    """One image (or pair) with the texts that look at it."""

    images: list[ImageExample]
    texts: list[TextExample]


def random_generator(seed: int, epoch: int, text: int) -> np.random.Generator:
    """The generator of one text in one epoch; it depends on nothing else, so neither on workers nor on order."""
    return np.random.default_rng([seed, epoch, text])
