"""torchvision's compiled operators, and the few functions on boxes that need no more.

`import torchvision` also imports torch's compiler, which takes 1.5 seconds of each command. Its library of operators is
loaded without it. The package itself is imported where a gradient is registered in Python (RoI pooling), or where the
compiler asks for the shapes of an operator.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Float, Int64, Num
from torch import Tensor

MAX_JOINT_NUMBERS = {"cpu": 4_000}  # coordinates up to which `batched_nms` makes one call, as in torchvision
MAX_JOINT_NUMBERS_ELSEWHERE = 100_000


def _load_library() -> None:
    """Load torchvision's operators without its Python package."""
    folder = Path(importlib.util.find_spec("torchvision").origin).parent
    libraries = list(folder.glob("_C*.so"))  # `_C.so` or `_C_stable.so`
    if len(libraries) == 1:
        torch.ops.load_library(libraries[0])
    else:  # of Windows, which must be told where other libraries are
        import torchvision  # noqa: F401


_load_library()


def nms(boxes: Float[Tensor, "R 4"], scores: Float[Tensor, " R"], threshold: float) -> Int64[Tensor, " kept"]:
    """Return the rows that non-maximum suppression keeps, best score first; computed in float32, or in float64."""
    if torch.compiler.is_compiling():
        import torchvision  # noqa: F401  (the operators' shapes)

    boxes = boxes.to(torch.promote_types(boxes.dtype, torch.float32))
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    return torch.ops.torchvision.nms(boxes, scores, threshold)


def batched_nms(
    boxes: Float[Tensor, "R 4"], scores: Float[Tensor, " R"], groups: Int64[Tensor, " R"], threshold: float
) -> Int64[Tensor, " kept"]:
    """Apply `nms` to the boxes of each group, with the rows and the rounding of torchvision's function of this name.

    Few boxes are moved apart by group and take one call; many take a call for each group.
    """
    if not len(boxes):
        return torch.empty_like(groups)
    limit = MAX_JOINT_NUMBERS.get(boxes.device.type, MAX_JOINT_NUMBERS_ELSEWHERE)
    if boxes.numel() <= limit:
        offsets = groups.to(boxes) * (boxes.max() + 1)
        return nms(boxes + offsets[:, None], scores, threshold)
    is_selected = torch.zeros_like(scores, dtype=torch.bool)
    for group in groups.unique():
        rows = torch.where(groups == group)[0]
        is_selected[rows[nms(boxes[rows], scores[rows], threshold)]] = True
    rows = torch.where(is_selected)[0]
    return rows[scores[rows].argsort(descending=True)]


def clip_boxes_to_image(boxes: Num[Tensor, "*R 4"], size: Sequence[int]) -> Num[Tensor, "*R 4"]:
    """Move the corners of boxes into an image of (height, width) `size`."""
    height, width = size
    x = boxes[..., 0::2].clamp(min=0, max=width)
    y = boxes[..., 1::2].clamp(min=0, max=height)
    return torch.stack((x, y), dim=-1).flatten(-2)
