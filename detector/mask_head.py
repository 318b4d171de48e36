"""The mask head of Mask R-CNN (He et al., section 3), named as in Detectron2, and masks on their way to and from it.

Shape legend: see `detector/structures.py`; and here
    side    of the predicted masks, twice that of the RoI maps
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor, nn

from detector.backbones.layers import ConvNorm
from detector.config import MaskHeadConfig
from detector.roi_pooler import align_rois

THRESHOLD = 0.5  # least probability of a pixel that belongs to an object, and least share of a cell


class MaskHead(nn.Module):
    """NUM_CONV 3x3 convolutions, a 2x2 deconvolution of stride 2, both with ReLU, and a 1x1 convolution.

    Named as Detectron2's `MaskRCNNConvUpsampleHead`.
    """

    def __init__(self, config: MaskHeadConfig, in_channels: int, num_classes: int) -> None:
        """Create the layers; `in_channels` is the width of the RoI maps."""
        super().__init__()
        self.is_class_agnostic = config.class_agnostic
        self.convs = [f"mask_fcn{number}" for number in range(1, config.num_conv + 1)]
        channels = in_channels
        for name in self.convs:
            self.add_module(name, ConvNorm(channels, config.conv_dim, 3, norm=config.norm, padding=1))
            channels = config.conv_dim
        self.deconv = nn.ConvTranspose2d(channels, config.conv_dim, kernel_size=2, stride=2)
        self.predictor = nn.Conv2d(config.conv_dim, 1 if config.class_agnostic else num_classes, kernel_size=1)
        nn.init.kaiming_normal_(self.deconv.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(self.deconv.bias)
        nn.init.normal_(self.predictor.weight, std=0.001)
        nn.init.zeros_(self.predictor.bias)

    def forward(
        self, maps: Float[Tensor, "J channels S S"], classes: Int64[Tensor, " J"]
    ) -> Float[Tensor, "J side side"]:
        """Return the logits of the mask of each RoI for its class, 0 .. K-1; a class-agnostic head ignores classes."""
        x = maps
        for name in self.convs:
            x = F.relu(getattr(self, name)(x))
        x = F.relu(self.deconv(x))
        logits = self.predictor(x)
        if self.is_class_agnostic:
            return logits[:, 0]
        return logits[torch.arange(len(logits), device=logits.device), classes]


def mask_losses(logits: Float32[Tensor, "J side side"], targets: Bool[Tensor, "J side side"]) -> Float32[Tensor, " J"]:
    """Return the binary cross entropy of each predicted mask, the mean over its cells (He et al., section 3)."""
    losses = F.binary_cross_entropy_with_logits(logits, targets.to(logits.dtype), reduction="none")
    return losses.mean(dim=(1, 2))


def crop_masks(
    masks: Bool[Tensor, "masks H W"], boxes: Float[Tensor, "masks 4"], side: int
) -> Bool[Tensor, "masks side side"]:
    """Return what lies in a box of each mask, in side * side cells; a cell is set where at least half of it is.

    As Detectron2's `BitMasks.crop_and_resize`, by RoIAlign. Masks and boxes are in pixels of the resized image.
    """
    images = torch.arange(len(masks), device=masks.device, dtype=boxes.dtype)
    rois = torch.cat([images[:, None], boxes], dim=1)
    shares = align_rois(masks[:, None].to(boxes.dtype), rois, side, 1.0, sampling_ratio=0, aligned=True)
    return shares[:, 0] >= THRESHOLD


def paste_mask(
    probabilities: Float[Tensor, "side side"], box: Float[Tensor, " 4"], size: tuple[int, int]
) -> Bool[Tensor, "height width"]:
    """Return the predicted mask of a box in an image of (height, width) pixels, from a threshold of 0.5 on.

    The side * side cells cover the box, and pixels are sampled at their centres, as in Detectron2's
    `paste_masks_in_image`.
    """
    height, width = size
    pasted = torch.zeros(size, dtype=torch.bool, device=probabilities.device)
    x1, y1, x2, y2 = box.tolist()
    # no pixel beyond the box reaches the threshold, because the mask fades to 0 there
    left = min(max(int(x1) - 1, 0), width)
    top = min(max(int(y1) - 1, 0), height)
    right = min(max(int(x2) + 2, left), width)
    bottom = min(max(int(y2) + 2, top), height)
    if left == right or top == bottom or x2 <= x1 or y2 <= y1:
        return pasted
    xs = torch.arange(left, right, device=box.device, dtype=box.dtype)
    ys = torch.arange(top, bottom, device=box.device, dtype=box.dtype)
    x_of_columns = (xs + 0.5 - x1) / (x2 - x1) * 2 - 1
    y_of_rows = (ys + 0.5 - y1) / (y2 - y1) * 2 - 1
    grid = torch.stack(torch.meshgrid(x_of_columns, y_of_rows, indexing="xy"), dim=-1)
    samples = F.grid_sample(probabilities[None, None], grid[None].to(probabilities), align_corners=False)
    pasted[top:bottom, left:right] = samples[0, 0] >= THRESHOLD
    return pasted
