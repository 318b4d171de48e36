"""The batch that flows through the model, and what the encoder and the task give back.

Shape legend
    N   images in the batch
    M   texts in the batch; several texts may look at the same image, one text may look at K images
    L   wordpieces of the longest text
    R   regions of the text with the most regions
    D   width of a region feature
    H   hidden size of the encoder

Boxes are xyxy, float32, in pixels of the resized image. A mask called `attend` is True where there is something real.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from detector.structures import DetectionTargets, ImageBatch, Loss, Movable, Regions


@dataclasses.dataclass
class TextBatch(Movable):
    """M wordpiece sequences, padded at the end."""

    input_ids: Tensor  # int64 [M, L]
    segment_ids: Tensor  # int64 [M, L], 0 or 1
    attend: Tensor  # bool [M, L], True at real wordpieces
    positions: dict[str, Tensor] = dataclasses.field(default_factory=dict)  # name -> int64 [M], e.g. where [MASK] is
    region_of_token: Tensor | None = None  # int64 [M, L], row of the region a wordpiece names; -1 = none (VCR tags)

    def __len__(self) -> int:
        return self.input_ids.shape[0]


@dataclasses.dataclass
class Batch(Movable):
    """Images, texts, and which text looks at which images."""

    images: ImageBatch
    boxes: list[Tensor] | None  # N x float32 [R, 4]; None: the detector proposes them
    texts: TextBatch
    looks_at: Tensor  # int64 [M, K], index of the image(s) each text is about; -1 = no image
    targets: dict[str, Tensor]  # what the task needs, M rows each; the task's file documents its keys
    detection_targets: DetectionTargets | None = None  # annotated objects of the N images
    pixel_masks: list[Tensor] | None = None  # N x float32 [P, 4], boxes whose pixels are hidden from the detector
    records: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # M plain dicts: ids, text, truth

    def __len__(self) -> int:
        return len(self.texts)


@dataclasses.dataclass
class TextRegions(Movable):
    """Each text's regions, gathered from the images it looks at and padded at the end."""

    features: Tensor  # float [M, R, D]
    boxes: Tensor  # float32 [M, R, 4]; 0 at padding
    image_sizes: Tensor  # float32 [M, R, 2], (height, width) of the resized image a region comes from; 1 at padding
    attend: Tensor  # bool [M, R]
    image_slot: Tensor  # int64 [M, R], which of the text's K images a region comes from; 0 at padding

    @property
    def whole_image(self) -> Tensor:
        """float [M, D]: the feature of row 0, where the encoder asked for the whole image as region 0."""
        return self.features[:, 0]


@dataclasses.dataclass
class EncoderOutput:
    """One vector per wordpiece, one per region, one for all."""

    text: Tensor  # float [M, L, H]
    regions: Tensor  # float [M, R, H]
    pooled: Tensor | None = None  # float [M, H], where the encoder has a pooler
    attentions: tuple[Tensor, ...] | None = None  # a layer: float [M, heads, L + R + 1, ...], only when asked for


@dataclasses.dataclass
class TaskOutput:
    """The same in training and in evaluation."""

    losses: dict[str, Loss]
    logits: Tensor  # float, what the task predicts from; the task's file gives the shape


@dataclasses.dataclass
class ModelOutput:
    """Everything one forward pass produced."""

    task: TaskOutput
    regions: Regions  # per image
    text_regions: TextRegions  # per text
    encoded: EncoderOutput

    @property
    def losses(self) -> dict[str, Loss]:
        """Task losses and detection losses together, unweighted."""
        return {**self.task.losses, **self.regions.losses}


def gather_regions(regions: Regions, image_sizes: Tensor, looks_at: Tensor) -> TextRegions:
    """Copy each text's regions out of the images it looks at; gradients of all texts add up in the shared regions.

    Args:
        regions: regions of N images.
        image_sizes: int64 [N, 2], (height, width) of the resized images.
        looks_at: int64 [M, K], image index or -1.

    Returns:
        `TextRegions` with R = the largest number of regions of any text (at least 1, so that shapes stay valid).
    """
    num_images = len(regions.boxes)
    device = regions.features[0].device
    counts = torch.tensor([len(boxes) for boxes in regions.boxes], device=device)
    padded = max(int(counts.max()) if num_images else 0, 1)
    rows_features = torch.cat(regions.features)
    rows_boxes = torch.cat(regions.boxes)
    starts = counts.cumsum(0) - counts

    # index[n, r] = row of region r of image n in the concatenated rows
    position = torch.arange(padded, device=device)
    is_real = position < counts[:, None]  # [N, R]
    index = (starts[:, None] + position).clamp(max=max(len(rows_features) - 1, 0))

    image = looks_at.clamp(min=0)  # [M, K]
    attend = is_real[image] & (looks_at >= 0)[..., None]  # [M, K, R]
    num_texts, num_slots = looks_at.shape
    slot = torch.arange(num_slots, device=device)[None, :, None].expand_as(attend)
    rows = index[image]

    flat = [tensor.reshape(num_texts, num_slots * padded) for tensor in (attend, slot, rows)]
    sizes = image_sizes.float()[image][:, :, None].expand(-1, -1, padded, -1).reshape(num_texts, -1, 2)
    if num_slots > 1:  # move padding between two images' regions to the end
        order = (~flat[0]).to(torch.uint8).argsort(dim=1, stable=True)
        flat = [tensor.gather(1, order) for tensor in flat]
        sizes = sizes.gather(1, order[..., None].expand(-1, -1, 2))
    longest = max(int(flat[0].sum(1).max()) if num_texts else 0, 1)
    attend, slot, rows = (tensor[:, :longest] for tensor in flat)
    sizes = sizes[:, :longest]

    if len(rows_features) == 0:
        features = rows_features.new_zeros(num_texts, longest, rows_features.shape[1])
        boxes = rows_boxes.new_zeros(num_texts, longest, 4)
    else:
        features = rows_features[rows] * attend[..., None]
        boxes = rows_boxes[rows] * attend[..., None]
    return TextRegions(
        features=features,
        boxes=boxes,
        image_sizes=torch.where(attend[..., None], sizes, torch.ones_like(sizes)),
        attend=attend,
        image_slot=torch.where(attend, slot, torch.zeros_like(slot)),
    )
