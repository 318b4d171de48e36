"""Regions of texts that share no image."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from e2e_vl.structures import TextRegions


def regions_of_own_images(
    features: Tensor, boxes: Tensor, image_sizes: Tensor, attention_mask: Tensor, image_slot: Tensor
) -> TextRegions:
    """`image` is the text's own row, `row` counts its regions, none is masked."""
    number, position = (torch.arange(length, device=attention_mask.device) for length in attention_mask.shape)
    return TextRegions(
        features,
        boxes,
        image_sizes,
        attention_mask,
        image_slot,
        image=number[:, None].expand_as(attention_mask).masked_fill(~attention_mask, -1),
        row=position.expand_as(attention_mask).masked_fill(~attention_mask, -1),
        is_masked=torch.zeros_like(attention_mask),
        classes=torch.full_like(image_slot, -1),
    )


def learn_geometry(encoder: nn.Module) -> None:
    """Give an encoder's relative geometry, which starts at zero, random weights."""
    for layer in encoder.relative_geometry.output:
        nn.init.normal_(layer.weight)
        nn.init.normal_(layer.bias)
