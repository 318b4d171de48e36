"""Region proposal network on one or several feature maps (Faster R-CNN, section 3.1), with Detectron2's arithmetic.

Shape legend: see `detector/structures.py`.

The anchors of all maps are concatenated, map by map; the h * w * cell_anchors anchors of a map are ordered by (y, x,
cell anchor).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float32, Int8, Int64
from torch import Tensor, nn

from detector.boxes import (
    box_regression_loss,
    decode_deltas,
    is_at_least,
    is_larger,
    match,
    nms_per_image,
    pairwise_iou,
    subsample,
)
from detector.config import AnchorConfig, DetectorConfig, RPNConfig
from detector.operators import clip_boxes_to_image
from detector.structures import DetectionTargets, FeatureMap, FeatureMaps, ImageBoxes, ImageSizes, Loss


def make_cell_anchors(sizes: Sequence[float], aspect_ratios: Sequence[float]) -> Float32[Tensor, "cell_anchors 4"]:
    """Make anchors centred on (0, 0), see `AnchorConfig`. Corners are not rounded (torchvision's are)."""
    anchors = []
    for size in sizes:
        for ratio in aspect_ratios:
            width = math.sqrt(size**2 / ratio)
            height = ratio * width
            anchors.append((-width / 2, -height / 2, width / 2, height / 2))
    return torch.tensor(anchors)


def configured_cell_anchors(config: AnchorConfig, num_maps: int) -> list[Float32[Tensor, "cell_anchors 4"]]:
    """Return CELL_ANCHORS where given, otherwise made from SIZES and ASPECT_RATIOS; one entry per feature map."""
    if config.cell_anchors:
        return list(torch.tensor(config.cell_anchors).chunk(num_maps))
    return [make_cell_anchors(*pair) for pair in config.pairs(num_maps)]


class AnchorGenerator(nn.Module):
    """Anchors of a feature map. The cell anchors are a buffer that is not saved, as in Detectron2 since May 2021."""

    cell_anchors: Tensor

    def __init__(self, cell_anchors: Float32[Tensor, "cell_anchors 4"], stride: int, config: AnchorConfig) -> None:
        """Keep the cell anchors; `stride` is in pixels of the network input per cell.

        The config's `offset` is where the first anchor's centre lies, as a fraction of the stride; `cell_anchors` are
        relative to it.
        """
        super().__init__()
        self.stride = stride
        self.offset = config.offset
        self.follows_image = config.strides == "image"
        self.register_buffer("cell_anchors", cell_anchors, persistent=False)

    def forward(self, height: int, width: int, padded: Sequence[int] | None = None) -> Float[Tensor, "B 4"]:
        """Return the anchors of height x width cells, ordered by (y, x, cell anchor), the cell anchor running fastest.

        `padded` is the (height, width) of the padded batch.
        """
        strides = [self.stride] * 2
        if self.follows_image and padded is not None:
            strides = [padded[0] // height, padded[1] // width]
        device = self.cell_anchors.device
        y, x = (
            torch.arange(
                self.offset * stride, (self.offset + cells) * stride, stride, dtype=torch.float32, device=device
            )[:cells]
            for cells, stride in zip((height, width), strides, strict=True)
        )
        grid_y, grid_x = torch.meshgrid(y, x, indexing="ij")
        shifts = torch.stack((grid_x, grid_y, grid_x, grid_y), dim=-1)
        return (shifts[:, :, None] + self.cell_anchors).reshape(-1, 4)


class RPNOutput(NamedTuple):
    """The network's output for every anchor."""

    anchors: Float[Tensor, "B 4"]  # shared by all images
    objectness: Float32[Tensor, "N B"]  # logits
    deltas: Float32[Tensor, "N B 4"]
    counts: tuple[int, ...]  # anchors of each feature map; their sum is B


class Proposals(NamedTuple):
    """Proposed boxes of N images, clipped to the image, best first. No gradient flows through them."""

    boxes: list[Float32[Tensor, "_P 4"]]
    objectness: list[Float32[Tensor, " _P"]]  # logits
    anchor_index: list[Int64[Tensor, " _P"]]  # row of the anchor that each proposal came from


class RPNHead(nn.Module):
    """3x3 convolution(s) with ReLU, then 1x1 convolutions to objectness and deltas."""

    def __init__(self, in_channels: int, num_cell_anchors: int, conv_dims: tuple[int, ...]) -> None:
        super().__init__()
        convs = []
        channels = in_channels
        for dim in conv_dims:
            width = channels if dim == -1 else dim  # -1 keeps the width
            convs.append(nn.Conv2d(channels, width, kernel_size=3, padding=1))
            channels = width
        if len(convs) == 1:
            self.conv = convs[0]
        else:  # Detectron2 names them conv.conv0, conv.conv1, ...
            self.conv = nn.Sequential()
            for index, conv in enumerate(convs):
                self.conv.add_module(f"conv{index}", conv)
        self.objectness_logits = nn.Conv2d(channels, num_cell_anchors, kernel_size=1)
        self.anchor_deltas = nn.Conv2d(channels, num_cell_anchors * 4, kernel_size=1)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.normal_(layer.weight, std=0.01)
                nn.init.zeros_(layer.bias)

    def forward(
        self, features: FeatureMap
    ) -> tuple[Float[Tensor, "N cell_anchors h w"], Float[Tensor, "N 4*cell_anchors h w"]]:
        """Return objectness and deltas; the channel of a delta is anchor * 4 + delta."""
        x = features
        convs = self.conv if isinstance(self.conv, nn.Sequential) else [self.conv]
        for conv in convs:
            x = F.relu_(conv(x))
        return self.objectness_logits(x), self.anchor_deltas(x)


class RPN(nn.Module):
    """Anchors, head, losses and the choice of proposals."""

    def __init__(self, config: DetectorConfig) -> None:
        super().__init__()
        self.config: RPNConfig = config.rpn
        self.in_features = config.rpn.in_features
        shapes = [config.map_shapes[name] for name in self.in_features]
        cells = configured_cell_anchors(config.anchors, len(shapes))
        self.anchor_generators = nn.ModuleList(
            AnchorGenerator(level_cells, shape.stride, config.anchors)
            for level_cells, shape in zip(cells, shapes, strict=True)
        )
        self.rpn_head = RPNHead(shapes[0].channels, len(cells[0]), config.rpn.conv_dims)  # shared by all maps

    def forward(self, features: FeatureMaps) -> RPNOutput:
        anchors = []
        objectness = []
        deltas = []
        finest = features[self.in_features[0]]
        padded = [side * self.anchor_generators[0].stride for side in finest.shape[2:]]  # (height, width), pixels
        for name, generator in zip(self.in_features, self.anchor_generators, strict=True):
            scores, shifts = self.rpn_head(features[name])
            anchors.append(generator(*scores.shape[2:], padded))
            objectness.append(scores.float().permute(0, 2, 3, 1).reshape(len(scores), -1))
            deltas.append(shifts.float().permute(0, 2, 3, 1).reshape(len(scores), -1, 4))
        counts = tuple(len(rows) for rows in anchors)
        return RPNOutput(torch.cat(anchors), torch.cat(objectness, dim=1), torch.cat(deltas, dim=1), counts)

    @torch.no_grad()
    def propose(self, output: RPNOutput, sizes: ImageSizes) -> Proposals:
        """Choose proposals: top-k by logit, decode, clip, drop short sides, NMS, cut.

        Top-k and NMS work on each feature map for itself, the cut on all of them together. A proposal that is not
        finite raises FloatingPointError in training, and is dropped in evaluation, as in Detectron2.
        """
        config = self.config
        if self.training:
            before = config.pre_nms_topk_train
            after = config.post_nms_topk_train
        else:
            before = config.pre_nms_topk_test
            after = config.post_nms_topk_test
        logits_of_maps = output.objectness.split(output.counts, 1)
        best = [logits.topk(min(before, logits.shape[1]), dim=1) for logits in logits_of_maps]
        starts = [sum(output.counts[:number]) for number in range(len(best))]
        scores = torch.cat([level.values for level in best], dim=1)
        index = torch.cat([level.indices + start for level, start in zip(best, starts, strict=True)], dim=1)
        levels = torch.cat([torch.full_like(level.indices, number) for number, level in enumerate(best)], dim=1)
        chosen = output.deltas.gather(1, index[..., None].expand(-1, -1, 4))
        decoded = decode_deltas(chosen, output.anchors[index], config.box_weights)
        is_usable = torch.isfinite(decoded).all(dim=2) & torch.isfinite(scores)
        if self.training and not bool(is_usable.all()):
            raise FloatingPointError("Proposals are NaN or infinite: the training has diverged; lower train.lr.")
        boxes = torch.stack([clip_boxes_to_image(rows, size) for rows, size in zip(decoded, sizes, strict=True)])
        is_usable &= is_larger(boxes, config.min_size) & is_at_least(boxes, config.min_side)
        if config.score_thresh > 0:
            is_usable &= scores.sigmoid() >= config.score_thresh
        image = torch.arange(len(sizes), device=scores.device)[:, None].expand_as(index)
        boxes = boxes.flatten(0, 1)
        scores = scores.flatten()
        index = index.flatten()
        rows_of_images = nms_per_image(
            boxes,
            scores,
            image.flatten(),
            levels.flatten(),
            sizes=sizes,
            num_groups=len(best),
            threshold=config.nms_thresh,
            limit=after,
            is_usable=is_usable.flatten(),
        )
        return Proposals(
            [boxes[rows] for rows in rows_of_images],
            [scores[rows] for rows in rows_of_images],
            [index[rows] for rows in rows_of_images],
        )

    @torch.no_grad()
    def label_anchors(
        self, anchors: Float[Tensor, "B 4"], objects: ImageBoxes, sizes: ImageSizes
    ) -> tuple[Int8[Tensor, "N B"], Int64[Tensor, "N B"]]:
        """Return the labels of all anchors, and the row of the object that each overlaps most.

        Labels are 1 (positive), 0 (negative) or -1 (ignored); the row is 0 if there is no object.
        """
        labels = []
        matches = []
        for boxes, size in zip(objects, sizes, strict=True):
            matched, label = match(
                pairwise_iou(boxes, anchors), self.config.iou_thresholds, self.config.iou_labels, allow_low_quality=True
            )
            margin = self.config.boundary_thresh  # pixels that an anchor may reach beyond the image
            if margin >= 0:
                inside = (anchors[:, :2] >= -margin).all(dim=1)
                inside &= (anchors[:, 2] < size[1] + margin) & (anchors[:, 3] < size[0] + margin)
                label[~inside] = -1
            labels.append(label)
            matches.append(matched)
        return torch.stack(labels), torch.stack(matches)

    def losses(self, output: RPNOutput, targets: DetectionTargets, sizes: ImageSizes) -> dict[str, Loss]:
        """Compute `loss_rpn_cls` and `loss_rpn_loc` of a random, limited set of anchors of each image."""
        labels, matched = self.label_anchors(output.anchors, targets.boxes, sizes)
        num_anchors = len(output.anchors)
        sampled = subsample(list(labels), self.config.batch_size_per_image, self.config.positive_fraction)
        # rows of the anchors of all images, joined
        positive = torch.cat([number * num_anchors + rows for number, (rows, _) in enumerate(sampled)]).sort().values
        negative = torch.cat([number * num_anchors + rows for number, (_, rows) in enumerate(sampled)])
        used = torch.cat((positive, negative)).sort().values
        image = positive // num_anchors
        anchor = positive % num_anchors
        starts = torch.tensor([0] + [len(boxes) for boxes in targets.boxes[:-1]], device=labels.device).cumsum(0)
        target_boxes = torch.cat(targets.boxes)[starts[image] + matched[image, anchor]]
        loc = box_regression_loss(
            output.deltas[image, anchor],
            output.anchors[anchor],
            target_boxes,
            weights=self.config.box_weights,
            kind=self.config.box_loss_type,
            smooth_l1_beta=self.config.smooth_l1_beta,
        )
        objectness = output.objectness.flatten()[used]
        is_object = labels.flatten()[used].float()
        cls = F.binary_cross_entropy_with_logits(objectness, is_object, reduction="sum")
        if self.config.loss_normaliser == "sampled":
            number = len(used)
        else:
            number = self.config.batch_size_per_image * len(sizes)
        count = cls.new_tensor(float(number))
        weight = self.config.loss_weight
        return {
            "loss_rpn_cls": Loss(cls * weight, count),
            "loss_rpn_loc": Loss(loc * (weight * self.config.box_loss_weight), count),
        }
