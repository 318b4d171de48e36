"""Where a region lies, as a vector: sines and cosines of box coordinates.

Shape legend
    M  texts in the batch
    R  regions (candidate boxes) of one image; where padded: of the text or image with the most

Boxes are xyxy in pixels of the resized image; image sizes are (height, width) of that image without padding.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Num
from torch import Tensor, nn

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


def relative_geometry(boxes: Float[Tensor, "M R 4"]) -> Float[Tensor, "M R R 4"]:
    """How every region n lies relative to every region m (Relation Networks, below equation 5).

    Returns:
        Entry [n, m] is log(|x_m - x_n| / w_m), log(|y_m - y_n| / h_m), log(w_n / w_m),
        log(h_n / h_m) of the centres and sizes; distances below 1/1000 of the size, and sizes below one pixel, count
        as that much.
    """
    low, high = boxes[..., :2], boxes[..., 2:]
    centres, sizes = (low + high) / 2, (high - low).clamp(min=1.0)
    distance = (centres[:, :, None] - centres[:, None]).abs() / sizes[:, None]
    ratio = sizes[:, :, None] / sizes[:, None]
    return torch.cat([distance.clamp(min=1e-3).log(), ratio.log()], dim=-1)


class PairwiseGeometryBias(nn.Module):
    """A learned number for each pair of regions of one image, added to their attention logits.

    Relation Networks (Hu et al., CVPR 2018) multiply the exponential of the attention logit with a geometric weight
    w_G = max(0, W_G E(f_m, f_n)) (equations 3 and 5). Here `W_G E` is the *logarithm* of that weight, so that it is
    always positive and never stops learning; it starts at 0, which is plain attention.

    Args:
        num_layers: attention layers, each with its own weights.
        num_heads: heads of a layer, each with its own weights.
        dim: width of E, a multiple of 8; the paper takes 64.
    """

    def __init__(self, num_layers: int, num_heads: int, dim: int = 64):
        super().__init__()
        self.num_layers = num_layers
        self.dim = dim
        self.weight = nn.Parameter(torch.empty(num_layers * num_heads, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, regions: TextRegions) -> Float[Tensor, "layers M heads R R"]:
        """Args: regions of M texts. Returns: rows are queries, columns keys; 0 where there is no pair."""
        embedded = sinusoids(relative_geometry(regions.boxes), self.dim // 8).flatten(-2)
        bias = F.linear(embedded.to(self.weight.dtype), self.weight)  # [M, R, R, layers * heads]
        same_image = regions.image_slot[:, :, None] == regions.image_slot[:, None]
        is_pair = same_image & regions.attend[:, :, None] & regions.attend[:, None]
        bias = (bias * is_pair[..., None]).permute(3, 0, 1, 2)
        return bias.unflatten(0, (self.num_layers, -1)).transpose(1, 2)
