"""Batches of texts about black images for tests of heads, and colours of pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from detector.structures import ImageBatch
from e2e_vl.structures import Batch, ModelOutput, TaskOutput, TextBatch


def make_batch(
    image_index: Sequence[Sequence[int]],
    *,
    sizes: Sequence[Sequence[int]] = ((10, 10),),
    original_sizes: Sequence[Sequence[int]] | None = None,
    length: int = 3,
    summary: torch.Tensor | None = None,
    **fields: Any,
) -> Batch:
    """Texts with equal wordpieces about images a.jpg, b.jpg, ... with (height, width) `sizes`."""
    sizes = torch.tensor(sizes)
    originals = sizes if original_sizes is None else torch.tensor(original_sizes)
    pixels = torch.zeros(len(sizes), 3, *sizes.amax(dim=0).tolist())
    names = [f"{letter}.jpg" for letter, _ in zip("abc", sizes, strict=False)]
    shape, kinds = (len(image_index), length), (torch.long, torch.long, torch.bool)
    texts = TextBatch(*(torch.ones(shape, dtype=kind) for kind in kinds), summary=summary)
    images = ImageBatch(pixels, sizes, originals, names)
    return Batch(images=images, boxes=None, texts=texts, image_index=torch.tensor(image_index), **fields)


def output_of(batch: Batch, logits: torch.Tensor) -> ModelOutput:
    """A model output that only has the logits of the task."""
    return ModelOutput(TaskOutput({}, logits), None, None, None, batch)


def has_colour(picture: np.ndarray, colour: tuple[int, int, int]) -> np.ndarray:
    """bool [height, width]: pixels of about this colour."""
    return np.abs(picture.astype(int) - colour).max(axis=2) < 12
