"""Where a region lies: sines and cosines of its coordinates as a vector, and its place relative to other regions.

Shape legend
    M  texts in the batch
    R  regions (candidate boxes) of one image; where padded: of the text or image with the most
    Z  positions of the longest packed sequence

Boxes are xyxy in pixels of the resized image; image sizes are (height, width) of that image without padding.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Num
from torch import Tensor, nn

from e2e_vl.encoders.sequence import SequenceLayout
from e2e_vl.structures import TextRegions

GeometryKind = Literal["centre_size", "corners"]


def sinusoids(values: Float[Tensor, "*shape"], wavelengths: int) -> Float[Tensor, "*shape 2*{wavelengths}"]:
    """Sines, then cosines, of `100 * value / 1000^(i / wavelengths)` for i = 0 .. wavelengths - 1.

    Relation Networks (Hu et al., CVPR 2018, section 3) take this embedding from the Transformer; the factors 100 and
    1000 come from its code and the official VL-BERT code.
    """
    exponents = torch.arange(wavelengths, device=values.device, dtype=values.dtype) / wavelengths
    angles = 100.0 * values[..., None] / 1000.0**exponents
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def geometry_embedding(
    boxes: Float[Tensor, "*shape 4"],
    image_sizes: Num[Tensor, "*shape 2"],
    dim: int = 2048,
    kind: GeometryKind = "centre_size",
) -> Float[Tensor, "*shape {dim}"]:
    """Position and size of a box within its image.

    Args:
        dim: width of the result, a multiple of 8: four coordinates, sine and cosine of dim / 8 wavelengths each.
        kind: "centre_size" embeds (centre x, centre y, width, height) as the official VL-BERT code does; "corners"
            embeds (x1, y1, x2, y2) as the paper's section 3.2 says. Both are divided by the image's width and height.

    Returns:
        For each coordinate in turn dim / 8 sines, then dim / 8 cosines.
    """
    height, width = image_sizes.to(boxes.dtype).unbind(-1)
    if kind == "centre_size":
        low, high = boxes[..., :2], boxes[..., 2:]
        boxes = torch.cat([(low + high) / 2, high - low], dim=-1)
    relative = boxes / torch.stack([width, height, width, height], dim=-1)
    return sinusoids(relative, dim // 8).flatten(-2)


RELATIVE_NUMBERS = 10  # width of `relative_geometry`


def relative_geometry(
    boxes: Float[Tensor, "*shape R 4"], image_sizes: Num[Tensor, "*shape R 2"]
) -> Float[Tensor, "*shape R R 10"]:
    """How every region m lies relative to every region n of the same image.

    Returns:
        Entry [n, m] holds, with lengths along x as shares of the image's width and along y of its height: the way from
        the centre of n to the centre of m in x and y, the absolute values of both, the gap between the boxes in x and y
        (negative where they overlap), log of m's width and height over n's (sides below 1/1000 count as that much), the
        Euclidean norm of the way, and the Euclidean norm of the gaps (a negative one counts as 0).
    """
    height, width = image_sizes.to(boxes.dtype).unbind(-1)
    low, high = (boxes / torch.stack([width, height, width, height], dim=-1)).split(2, dim=-1)
    centres, sides = (low + high) / 2, (high - low).clamp(min=1e-3).log()
    way = centres[..., None, :, :] - centres[..., :, None, :]
    gap = torch.maximum(low[..., None, :, :] - high[..., :, None, :], low[..., :, None, :] - high[..., None, :, :])
    ratio = sides[..., None, :, :] - sides[..., :, None, :]
    # added: the derivative of a norm at 0 is not a number
    norms = [(values.square().sum(dim=-1, keepdim=True) + 1e-12).sqrt() for values in (way, gap.clamp(min=0))]
    return torch.cat([way, way.abs(), gap, ratio, *norms], dim=-1)


class _GeometryHidden(nn.Linear):
    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.in_features**-0.5)
        nn.init.zeros_(self.bias)


class _GeometryOutput(nn.Linear):
    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)


# What decides about "next to" is a few hundredths of the image. In shares of it the weights would have to grow to tens
# before the bias could follow; in units this small, drawn relations are learned in half of the steps.
UNITS = 20.0

GEOMETRY_LAYERS = (_GeometryHidden, _GeometryOutput)  # do not start as the other Linears of an encoder


class RelativeGeometryBias(nn.Module):
    """A learned number per layer and head for each pair of regions of one image, added to their attention logits.

    Each layer has a small network of its own: Linear, GELU, Linear over 20 times `relative_geometry`. Relation Networks
    (Hu et al., CVPR 2018, equations 3 to 5) multiply the exponential of the attention logit with a weight from a linear
    map of sinusoids, which can express neither a direction nor a distance; here the *logarithm* of such a weight is
    learned.
    It starts at 0, which is plain attention, so a checkpoint without it starts as it was.

    Args:
        num_layers: attention layers over regions.
        num_heads: heads of a layer.
        width: of the hidden layer.

    Attributes:
        starts_at_zero: it adds nothing before it is trained, so that weights may lack it as a whole.
    """

    starts_at_zero = True

    def __init__(self, num_layers: int, num_heads: int, width: int = 64):
        super().__init__()
        self.hidden = nn.ModuleList(_GeometryHidden(RELATIVE_NUMBERS, width) for _ in range(num_layers))
        self.output = nn.ModuleList(_GeometryOutput(width, num_heads) for _ in range(num_layers))

    def forward(
        self, boxes: Float[Tensor, "M R 4"], image_sizes: Num[Tensor, "M R 2"], is_pair: Bool[Tensor, "M R R"]
    ) -> list[Float[Tensor, "M heads R R"]]:
        """Regions of M texts -> a bias per layer: rows are queries, columns keys; 0 where there is no pair.

        Texts with the same boxes (as those about one image mostly have) share one run of the networks.
        """
        places = torch.cat([boxes, image_sizes.to(boxes.dtype)], dim=-1).flatten(1).detach()
        known, which = torch.unique(places, dim=0, return_inverse=True)
        # a text that has these boxes; which one does not matter
        text = which.new_zeros(len(known)).scatter(0, which, torch.arange(len(which), device=which.device))
        numbers = UNITS * relative_geometry(boxes[text], image_sizes[text]).to(self.hidden[0].weight.dtype)
        return [
            (output(F.gelu(hidden(numbers))).index_select(0, which) * is_pair[..., None]).permute(0, 3, 1, 2)
            for hidden, output in zip(self.hidden, self.output, strict=True)
        ]


def packed_biases(
    bias: RelativeGeometryBias, regions: TextRegions, layout: SequenceLayout
) -> list[Float[Tensor, "M heads Z Z"]]:
    """The biases of a sequence of words and regions (and perhaps an end), zero but between regions."""
    count = regions.attend.shape[1]
    ends = int(layout.has_end)
    words = layout.is_real.shape[1] - count - ends
    found = bias(regions.boxes, regions.image_sizes, pairs_of_one_image(regions))
    return [layout.pack_pairs(F.pad(one, (words, ends, words, ends))) for one in found]


def pairs_of_one_image(regions: TextRegions) -> Bool[Tensor, "M R R"]:
    """True for two regions that come from the same image of a text."""
    same_image = regions.image_slot[:, :, None] == regions.image_slot[:, None]
    return same_image & regions.attend[:, :, None] & regions.attend[:, None]
