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
    region_of_token: Tensor | None = None  # int64 [M, L], row of the candidate box a wordpiece names; -1 = none (VCR)

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
    roi_masks: list[Tensor] | None = None  # N x float32 [R, S, S], instance masks of the candidate boxes (VCR)
    region_targets: dict[str, list[Tensor]] = dataclasses.field(default_factory=dict)  # N x [R, ...] of candidate boxes
    hidden_regions: list[Tensor] | None = None  # N x bool [R], candidate boxes that the encoder must not recognise
    region_limit: Tensor | None = None  # int64 [M], a text reads only the first so many candidate boxes of its image
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
    image: Tensor  # int64 [M, R], row of that image in the batch; -1 at padding
    row: Tensor  # int64 [M, R], row of the region among its image's candidate boxes; -1 = whole image, or padding
    is_hidden: Tensor  # bool [M, R], see `Batch.hidden_regions`

    @classmethod
    def of_own_images(
        cls, features: Tensor, boxes: Tensor, image_sizes: Tensor, attend: Tensor, image_slot: Tensor
    ) -> TextRegions:
        """For texts that share no image: `image` is the text's own row, `row` counts its regions, none is hidden."""
        number, position = (torch.arange(length, device=attend.device) for length in attend.shape)
        return cls(
            features,
            boxes,
            image_sizes,
            attend,
            image_slot,
            image=number[:, None].expand_as(attend).masked_fill(~attend, -1),
            row=position.expand_as(attend).masked_fill(~attend, -1),
            is_hidden=torch.zeros_like(attend),
        )

    @property
    def is_whole_image(self) -> Tensor:
        """bool [M, R]: the region is the whole image, put in front because the encoder asked for it."""
        return self.attend & (self.row < 0)

    def without_whole_image(self) -> TextRegions:
        """A copy in which whole images count as padding; they keep their rows, so padding may be in front."""
        return dataclasses.replace(self, attend=self.attend & ~self.is_whole_image)

    def gather(self, values: list[Tensor], fill: float) -> Tensor:
        """Copy what is known about the candidate boxes to the texts that read them.

        Args:
            values: N x [R, ...], a row per candidate box.
            fill: stands at whole images and padding.

        Returns:
            [M, R, ...].
        """
        counts = torch.tensor([len(rows) for rows in values], device=self.row.device)
        starts = counts.cumsum(0) - counts
        joined = torch.cat(values)
        known = self.row >= 0
        result = joined.new_full((*self.row.shape, *joined.shape[1:]), fill)
        result[known] = joined[(starts[self.image.clamp(min=0)] + self.row)[known]]
        return result

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
    word_table: Tensor | None = (
        None  # float [V, H], the embedding of every wordpiece; a head that names words shares it
    )


@dataclasses.dataclass
class TaskOutput:
    """The same in training and in evaluation."""

    losses: dict[str, Loss]
    logits: Tensor  # float, what the task predicts from; the task's file gives the shape
    details: dict[str, Tensor] = dataclasses.field(default_factory=dict)  # what else it predicts from, M rows each


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


def gather_regions(
    regions: Regions,
    image_sizes: Tensor,
    looks_at: Tensor,
    *,
    whole_image: bool = False,
    hidden: list[Tensor] | None = None,
    limit: Tensor | None = None,
) -> TextRegions:
    """Copy each text's regions out of the images it looks at; gradients of all texts add up in the shared regions.

    Args:
        regions: regions of N images.
        image_sizes: int64 [N, 2], (height, width) of the resized images.
        looks_at: int64 [M, K], image index or -1.
        whole_image: row 0 of every image's regions is the whole image.
        hidden, limit: see `Batch.hidden_regions` and `Batch.region_limit`.

    Returns:
        `TextRegions` with R = the largest number of regions of any text (at least 1, so that shapes stay valid).
    """
    num_images = len(regions.boxes)
    first = int(whole_image)  # candidate boxes begin at this row
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
    if limit is not None:
        attend = attend & (position < limit[:, None, None] + first)
    num_texts, num_slots = looks_at.shape
    slot = torch.arange(num_slots, device=device)[None, :, None].expand_as(attend)
    rows = index[image]
    candidate = (position - first).expand_as(attend)
    image_row = image[..., None].expand_as(attend)

    flat = [t.reshape(num_texts, num_slots * padded) for t in (attend, slot, rows, candidate, image_row)]
    sizes = image_sizes.float()[image][:, :, None].expand(-1, -1, padded, -1).reshape(num_texts, -1, 2)
    if num_slots > 1:  # move padding between two images' regions to the end
        order = (~flat[0]).to(torch.uint8).argsort(dim=1, stable=True)
        flat = [tensor.gather(1, order) for tensor in flat]
        sizes = sizes.gather(1, order[..., None].expand(-1, -1, 2))
    longest = max(int(flat[0].sum(1).max()) if num_texts else 0, 1)
    attend, slot, rows, candidate, image_row = (tensor[:, :longest] for tensor in flat)
    sizes = sizes[:, :longest]

    if len(rows_features) == 0:
        features = rows_features.new_zeros(num_texts, longest, rows_features.shape[1])
        boxes = rows_boxes.new_zeros(num_texts, longest, 4)
    else:
        features = rows_features[rows] * attend[..., None]
        boxes = rows_boxes[rows] * attend[..., None]
    result = TextRegions(
        features=features,
        boxes=boxes,
        image_sizes=torch.where(attend[..., None], sizes, torch.ones_like(sizes)),
        attend=attend,
        image_slot=torch.where(attend, slot, torch.zeros_like(slot)),
        image=image_row.masked_fill(~attend, -1),
        row=candidate.masked_fill(~attend, -1),
        is_hidden=torch.zeros_like(attend),
    )
    if hidden is not None:
        result.is_hidden = result.gather(hidden, fill=False)
    return result
