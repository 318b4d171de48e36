"""Image network of R2C (Zellers et al., CVPR 2019): features of given boxes from pixels, instance masks and classes.

A ResNet up to res4 processes the image. Each box is pooled from res4, features of the object's mask are added to the
first channels of the pooled map, and res5 and average pooling follow. The region feature is computed from the result
and, unless CLASS_DIM is 0, an embedding of the box's class. The official VisualBERT code trains this network on VCR
together with its encoder. Shape legend: see `detector/structures.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from msgspec import structs
from torch import Tensor, nn
from typing_extensions import override

from detector.backbones.base import Backbone, blocks_to_compile, recompute_activations
from detector.backbones.layers import BatchStatistics, ConvNorm, FrozenBatchNorm2d, freeze
from detector.backbones.resnet import BLOCKS_PER_STAGE, BasicStem, BottleneckBlock
from detector.boxes import check_boxes, prepend, whole_image_boxes
from detector.config import DetectorConfig, ResNetConfig
from detector.errors import UserError
from detector.images import normalise_images
from detector.roi_pooler import align_rois, to_rois
from detector.structures import DetectionTargets, Detector, FeatureMap, ImageBatch, Regions

STRIDE = 16  # stride of res4: pixels of the padded image per cell
EXPANSION = 4  # output channels of a bottleneck block / channels of its 3x3 convolution
WHOLE_IMAGE = 0  # row of the class embedding for the whole image; class k of a box has row k + 1


class NetworkSizes(NamedTuple):
    """Number of channels and blocks of a ResNet."""

    stem: int  # output channels
    blocks: tuple[int, ...]  # number of blocks in res2 .. res5
    widths: tuple[int, ...]  # channels of the 3x3 convolutions in res2 .. res5

    @classmethod
    def from_config(cls, config: ResNetConfig) -> NetworkSizes:
        widths = tuple(config.width_per_group * 2**number for number in range(4))
        return cls(config.stem_out_channels, BLOCKS_PER_STAGE[config.depth], widths)


class DescribedBoxes(NamedTuple):
    """The network's output for J boxes."""

    pooled: Float[Tensor, "J channels S S"]  # from res4, without mask features
    mean: Float[Tensor, "J channels5"]  # mean of res5's output
    features: Float[Tensor, "J D"]
    class_logits: Float[Tensor, "J K_plus_1"]  # background last


class R2CTrunk(Backbone):
    """Stem and res2 .. res4 with strides 4, 4, 8, 16. Stages up to FREEZE_AT get no gradient.

    `sizes` overrides those of `MODEL.RESNETS`.
    """

    def __init__(self, config: DetectorConfig, sizes: NetworkSizes | None = None) -> None:
        super().__init__()
        resnet = config.resnet
        sizes = sizes or NetworkSizes.from_config(resnet)
        self.stem = BasicStem(structs.replace(resnet, stem_out_channels=sizes.stem))
        channels = sizes.stem
        for number, name in enumerate(("res2", "res3", "res4")):
            stride = 1 if number == 0 else 2
            self.add_module(name, _make_blocks(resnet, sizes, number, channels, stride=stride))
            channels = EXPANSION * sizes.widths[number]
        self.frozen_norm = BatchStatistics if config.r2c.frozen_statistics == "batch" else FrozenBatchNorm2d
        self.freeze_stages(resnet.freeze_at)

    @override
    def freeze_stages(self, count: int) -> None:
        for name in ("stem", "res2", "res3", "res4")[:count]:
            freeze(getattr(self, name), self.frozen_norm)

    @override
    def forward(self, pixels: Float[Tensor, "N 3 H W"]) -> FeatureMap:
        """Return res4 alone, which is all that `R2CNetwork` reads."""
        return self.res4(self.res3(self.res2(self.stem(pixels))))


class R2CHead(nn.Module):
    """Compute region features from RoI maps, masks and classes.

    Masks have twice the side of the RoI maps, and `mask_filter` has stride 2. If `MODEL.R2C.CLASS_DIM` is 0, there is
    no class embedding, and features do not depend on the classes.
    """

    def __init__(self, config: DetectorConfig, sizes: NetworkSizes) -> None:
        super().__init__()
        r2c = config.r2c
        classes = config.roi_heads.num_classes + 1
        channels4, channels5 = (EXPANSION * width for width in sizes.widths[2:])
        self.mask_channels = r2c.mask_channels
        self.mask_filter = nn.Conv2d(1, r2c.mask_channels, 3, stride=2, padding=1)
        self.res5 = _make_blocks(config.resnet, sizes, 3, channels4, stride=1)
        self.class_embedding = nn.Embedding(classes, r2c.class_dim) if r2c.class_dim else None
        self.dropout = nn.Dropout(r2c.dropout)
        self.projection = nn.Linear(channels5 + r2c.class_dim, r2c.feature_dim)
        self.classifier = nn.Linear(channels5, classes)  # not trained: its loss weight is 0 in all official configs

    def forward(
        self, pooled: Float[Tensor, "J channels S S"], masks: Float[Tensor, "J _ _"], classes: Int64[Tensor, " J"]
    ) -> DescribedBoxes:
        outlines = self.mask_filter(masks[:, None].to(pooled.dtype) - 0.5)
        first, rest = pooled.split([self.mask_channels, pooled.shape[1] - self.mask_channels], dim=1)
        last = self.res5(torch.cat([first + outlines, rest], dim=1).contiguous(memory_format=torch.channels_last))
        mean = last.mean(dim=(2, 3))
        described = mean
        if self.class_embedding is not None:
            described = torch.cat([mean, self.class_embedding(classes).to(mean.dtype)], dim=1)
        features = F.relu(self.projection(self.dropout(described)))
        return DescribedBoxes(pooled, mean, features, self.classifier(mean).roll(-1, dims=1))


class R2CNetwork(Detector):
    """Features of given boxes from pixels, instance masks and classes. `sizes` overrides those of `MODEL.RESNETS`."""

    reads_classes = True

    def __init__(
        self, config: DetectorConfig, sizes: NetworkSizes | None = None, class_names: Sequence[str] | None = None
    ) -> None:
        super().__init__(config, class_names)
        sizes = sizes or NetworkSizes.from_config(config.resnet)
        self.backbone = R2CTrunk(config, sizes)
        self.roi_heads = R2CHead(config, sizes)

    @override
    def recompute_activations(self) -> None:
        recompute_activations(self, self.backbone)

    @override
    def blocks_to_compile(self) -> list[nn.Module]:
        return blocks_to_compile(self, self.backbone)

    def forward(
        self,
        images: ImageBatch,
        boxes: list[Float[Tensor, "_R 4"]] | None = None,
        targets: DetectionTargets | None = None,
        *,
        pixel_masks: list[Float[Tensor, "_Q 4"]] | None = None,
        roi_masks: list[Float[Tensor, "_R S S"]] | None = None,
        whole_image: bool = False,
        box_classes: list[Int64[Tensor, " _R"]] | None = None,
    ) -> Regions:
        """Describe given boxes, see `Detector.forward`. Without `roi_masks`, all masks are 1.

        The feature of the whole image is pooled from the box [0, 0, width, height], but, as in every detector, the
        returned box is [0, 0, width - 1, height - 1].
        """
        if boxes is None or box_classes is None or targets is not None:
            raise UserError(
                "R2C's network needs given boxes and classes and has no detection losses; set data.boxes.train and "
                "eval.boxes to gt, and detector.loss_weight to 0."
            )
        check_boxes(boxes, images.names, "box")
        side = self.map_size
        parts = [*boxes]
        masks = roi_masks
        if masks is None:
            masks = [rows.new_ones(len(rows), side, side) for rows in boxes]
        classes = [rows + 1 for rows in box_classes]
        if whole_image:
            corners = images.sizes.flip(1).to(boxes[0])
            parts = prepend(list(torch.cat([torch.zeros_like(corners), corners], dim=1)[:, None]), parts)
            masks = [torch.cat([rows.new_ones(1, side, side), rows]) for rows in masks]
            classes = [F.pad(rows, (1, 0), value=WHOLE_IMAGE) for rows in classes]
            boxes = prepend(whole_image_boxes(images.sizes.to(boxes[0].device)), boxes)
        pixels, shifts = self.place_on_canvas(normalise_images(images, self.config.input, pixel_masks))
        parts = [rows + shift.repeat(2) for rows, shift in zip(parts, shifts, strict=True)]
        described = self.describe(pixels, to_rois(parts), torch.cat(masks), torch.cat(classes))
        counts = [len(rows) for rows in boxes]
        return Regions(boxes, list(described.features.split(counts)), list(described.class_logits.split(counts)))

    def describe(
        self,
        pixels: Float[Tensor, "N 3 H W"],
        rois: Float[Tensor, "J 5"],
        masks: Float[Tensor, "J _ _"],
        classes: Int64[Tensor, " J"],
    ) -> DescribedBoxes:
        """Compute features of boxes in pixels of the padded image.

        Args:
            masks: instance masks in 0 .. 1, `map_size` x `map_size` values per box.
            classes: 1 .. K, or 0 for the whole image.
        """
        maps = self.backbone(pixels.contiguous(memory_format=torch.channels_last))
        settings = self.config.roi_heads
        maps = maps.to(torch.promote_types(maps.dtype, torch.float32))  # bfloat16 is too coarse for RoI coordinates
        pooled = align_rois(
            maps,
            rois.to(maps.dtype),
            settings.pooler_resolution,
            1 / STRIDE,
            sampling_ratio=settings.pooler_sampling_ratio,
            aligned=settings.pooler_type == "ROIAlignV2",
        )
        return self.roi_heads(pooled, masks, classes)

    def place_on_canvas(self, images: ImageBatch) -> tuple[Float[Tensor, "N 3 _H _W"], Float[Tensor, "N 2"]]:
        """Place images on black canvases of the configured size, at a random position in training, else in the centre.

        If no canvas is configured, the images are returned unchanged. Returns pixels, and (x, y) of the upper left
        corner of each image.
        """
        canvas = self.config.r2c.canvas
        pixels = images.pixels
        if not canvas:
            return pixels, pixels.new_zeros(len(images), 2)
        settings = self.config.input
        channels = zip(settings.pixel_mean, settings.pixel_std, strict=True)
        black = pixels.new_tensor([-mean / std for mean, std in channels])
        result = black[:, None, None].expand(len(images), 3, *canvas).clone()
        corners = []
        for row, (height, width) in enumerate(images.sizes.tolist()):
            free_rows = canvas[0] - height
            free_columns = canvas[1] - width
            if self.training:
                top = int(torch.randint(free_rows + 1, ()).item())
                left = int(torch.randint(free_columns + 1, ()).item())
            else:
                top = free_rows // 2
                left = free_columns // 2
            result[row, :, top : top + height, left : left + width] = pixels[row, :, :height, :width]
            corners.append((left, top))
        return result, pixels.new_tensor(corners)


def _make_blocks(
    config: ResNetConfig, sizes: NetworkSizes, number: int, channels: int, *, stride: int
) -> nn.Sequential:
    """Make stage res{number + 2} of bottleneck blocks. The stage's stride is in its first block.

    As in torchvision, the first block of every stage after res2 has a convolution in its shortcut.
    """
    width = sizes.widths[number]
    blocks = []
    for index in range(sizes.blocks[number]):
        block_stride = stride if index == 0 else 1
        block = BottleneckBlock(channels, EXPANSION * width, config, width=width, stride=block_stride, dilation=1)
        if index == 0 and number > 0 and block.shortcut is None:
            block.shortcut = ConvNorm(channels, EXPANSION * width, 1, norm=config.norm, stride=stride)
        blocks.append(block)
        channels = EXPANSION * width
    return nn.Sequential(*blocks)
