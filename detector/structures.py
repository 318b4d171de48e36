"""Input and output of a detector, its interface, and the detector that returns precomputed features.

Shape legend of the whole package
    N     images in the batch
    H, W  height and width of the padded batch, pixels of the network input
    h, w  height and width of a feature map, cells
    R     regions (candidate boxes) of one image; differs from image to image, so regions are lists of N tensors
    G     annotated objects of one image
    P     proposals or sampled RoIs of one image
    Q     masked boxes of one image
    B     anchors of one image
    J     RoIs of all images, joined; rows are [image, x1, y1, x2, y2]
    S     side of a RoI map
    D     width of a region feature
    K     foreground classes; K is also the label of the background
    A     attributes
    T     attribute slots of an object

`K_plus_1` is K + 1: class logits have the background in their last column; `A_plus_1`: "no attribute" comes last. Words
(`channels`, `kept`) are sizes without a letter. A leading underscore (`_R`) marks a size that may differ from entry to
entry of a list. The tests enforce these annotations.

All boxes are xyxy, in pixels of the *resized* image, continuous: a box covers [x1, x2) x [y1, y2).
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float, Float32, Int64, Num, UInt8
from torch import Tensor, nn
from typing_extensions import override

from detector.boxes import prepend, whole_image_boxes
from detector.config import DetectorConfig
from detector.errors import UserError

FeatureMap = Float[Tensor, "N channels h w"]
FeatureMaps = dict[str, Float[Tensor, "N _channels _h _w"]]  # by Detectron2's names: res4, or p2 .. p6
LevelMaps = list[Float[Tensor, "N channels _h _w"]]  # maps of one width, finest first
ImageBoxes = list[Float[Tensor, "_R 4"]]  # one entry per image
ImageSizes = list[tuple[int, int]]  # one (height, width) per image, without padding


@dataclasses.dataclass(frozen=True)
class Loss:
    """A loss before its mean is taken.

    Sum and count are separate so that processes with different numbers of regions or words can divide by the count of
    *all* of them: two processes then compute exactly the gradient of one process with the whole batch.
    """

    total: Float[Tensor, ""]  # with gradient
    count: Float[Tensor, ""]  # without gradient; 0 when nothing was labelled

    @property
    def mean(self) -> Float[Tensor, ""]:
        """total / count; exactly 0 (with a gradient of 0) when nothing was labelled, never NaN.

        Training divides by the counts of all processes instead (`Trainer.train_step`).
        """
        return self.total / self.count.clamp(min=1)


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Copy nested lists, dicts and dataclasses and change their tensors; fields in `on_host` stay as they are."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list):
        return [map_tensors(item, change) for item in value]
    if isinstance(value, dict):
        return {key: map_tensors(item, change) for key, item in value.items()}
    if dataclasses.is_dataclass(value):
        names = {field.name for field in dataclasses.fields(value)} - getattr(value, "on_host", frozenset())
        return dataclasses.replace(value, **{name: map_tensors(getattr(value, name), change) for name in names})
    return value


class Movable:
    """Adds `.to(device)` to a dataclass of tensors, lists of tensors and nested dataclasses."""

    on_host: ClassVar[frozenset[str]] = frozenset()  # fields that stay on the CPU; reading them never waits

    def to(self, device: torch.device | str):
        """Return a copy on a device; the host does not wait for a GPU."""
        return map_tensors(self, lambda tensor: tensor.to(device, non_blocking=torch.device(device).type != "cpu"))

    def cpu(self):
        """Return a copy on the CPU, without gradients. All tensors travel as one, so that a GPU waits once."""
        tensors: list[Tensor] = []
        map_tensors(self, lambda tensor: tensors.append(tensor) or tensor)
        moved = [tensor for tensor in tensors if tensor.device.type != "cpu"]
        moved.sort(key=lambda tensor: -tensor.element_size())  # every part starts at a multiple of its element size
        flat = [tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in moved]
        copies = {}
        if flat:
            parts = torch.cat(flat).cpu().split([len(tensor) for tensor in flat])
            for tensor, part in zip(moved, parts, strict=True):
                copies[id(tensor)] = part.view(tensor.dtype).view(tensor.shape)
        return map_tensors(self, lambda tensor: copies.get(id(tensor), tensor))


@dataclasses.dataclass
class PrecomputedFeatures(Movable):
    """Features of given boxes that were extracted before and read from a file."""

    features: list[Float[Tensor, "_R D"]]  # N entries, row by row the features of the boxes
    image_features: Float[Tensor, "N D"] | None = None  # of the whole images


@dataclasses.dataclass
class ImageBatch(Movable):
    """N resized images, zero-padded at the right and the bottom.

    Pixels are uint8, 0 .. 255, and travel as such; a detector normalises them on its device. Floating-point pixels are
    normalised already, see `normalise_images`.
    """

    on_host = frozenset({"sizes", "original_sizes"})

    pixels: UInt8[Tensor, "N 3 H W"] | Float[Tensor, "N 3 H W"]  # channels in the order of the detector's config (BGR)
    sizes: Int64[Tensor, "N 2"]  # (height, width) of each resized image without padding; on the CPU
    original_sizes: Num[Tensor, "N 2"]  # (height, width) of each image as stored (after its EXIF rotation); on the CPU
    names: list[str]  # N names (usually paths) for error messages
    precomputed: PrecomputedFeatures | None = None  # if given, nothing was read and `pixels` is empty, [N, 3, 0, 0]

    def __len__(self) -> int:
        return self.pixels.shape[0]

    @property
    def scales(self) -> Float32[Tensor, "N 2"]:
        """(x, y) factors from original to resized pixels; on the CPU."""
        return (self.sizes.float() / self.original_sizes.float()).flip(1)


@dataclasses.dataclass
class DetectionTargets(Movable):
    """Annotated objects of N images, for the detection losses."""

    boxes: list[Float[Tensor, "_G 4"]]
    classes: list[Int64[Tensor, " _G"]]  # 0 .. K-1
    attributes: list[Int64[Tensor, "_G T"]] | None = None  # attribute labels 0 .. A-1, -1 = none in this slot


@dataclasses.dataclass
class Regions(Movable):
    """A detector's output for N images: one row per region, in each image's own order."""

    boxes: list[Float[Tensor, "_R 4"]]
    features: list[Float[Tensor, "_R D"]]  # differentiable
    class_logits: list[Float[Tensor, "_R K_plus_1"]]  # background last; no column where they are unknown
    scores: list[Float[Tensor, " _R"]] | None = None  # detection score; None when the boxes were given
    classes: list[Int64[Tensor, " _R"]] | None = None  # detected class; None when the boxes were given
    attribute_logits: list[Float[Tensor, "_R A"]] | None = None  # only with an attribute head
    losses: dict[str, Loss] = dataclasses.field(default_factory=dict)  # detection losses, when targets were passed
    maps: FeatureMaps | None = None  # for `Detector.mask_logits`; None: the detector has no mask head

    def __len__(self) -> int:
        return len(self.boxes)


class Detector(nn.Module, abc.ABC):
    """images (+ boxes) -> regions with differentiable features, and detection losses from the same backbone pass."""

    reads_classes: ClassVar[bool] = False  # `forward` also takes `box_classes`, N entries, the class of each given box

    def __init__(self, config: DetectorConfig, class_names: Sequence[str] | None = None) -> None:
        """Build the detector with random weights; `class_names`: of the classes 0 .. K-1, None: unknown."""
        super().__init__()
        self.config = config
        self.feature_dim = config.feature_dim  # D
        self.num_classes = config.roi_heads.num_classes  # K
        self.class_names = None if class_names is None else tuple(class_names)
        self.map_size: int | None = config.map_size  # S of the RoI masks; None: this detector reads none

    def freeze_predictions(self) -> None:
        """Freeze the layers that only detection losses train: the RPN and the box predictor."""

    def recompute_activations(self) -> None:
        """Save memory in training: compute activations again in the backward pass instead of keeping them."""
        raise UserError(
            f"{type(self).__name__} has no activation checkpointing; switch train.activation_checkpointing off or use "
            "detector.backend builtin."
        )

    def blocks_to_compile(self) -> Sequence[nn.Module]:
        """Return the blocks that `train.torch_compile` compiles.

        Raises:
            UserError: this detector has none.
        """
        raise UserError(
            f"{type(self).__name__} has no blocks that can be compiled; switch train.torch_compile off or use "
            "detector.backend builtin."
        )

    def mask_logits(
        self, maps: FeatureMaps, rois: Float[Tensor, "J 5"], classes: Int64[Tensor, " J"]
    ) -> Float32[Tensor, "J side side"]:
        """Return the masks of boxes as logits, with the gradient to the backbone; side * side cells cover a box.

        Args:
            maps: `Regions.maps` of the forward pass.
            classes: 0 .. K-1, for a head with a mask per class.
        """
        raise UserError(
            f"{type(self).__name__} has no mask head; use detector.backend builtin with MODEL.MASK_ON true."
        )

    @abc.abstractmethod
    def forward(
        self,
        images: ImageBatch,
        boxes: list[Float[Tensor, "_R 4"]] | None = None,
        targets: DetectionTargets | None = None,
        *,
        pixel_masks: list[Float[Tensor, "_Q 4"]] | None = None,
        roi_masks: list[Float[Tensor, "_R S S"]] | None = None,
        whole_image: bool = False,
    ) -> Regions:
        """Describe regions of all images in one backbone pass.

        Args:
            images: N resized images, which `normalise_images` prepares.
            boxes: N entries, the boxes to describe (R may be 0). Without boxes, in training mode with `targets`, the
                regions are the RoIs that the box head was trained on in this step (sampled proposals and annotated
                boxes, Faster R-CNN section 3.2); otherwise they are the final detections of evaluation, best first.
            targets: annotated objects; adds `loss_rpn_cls`, `loss_rpn_loc`, `loss_cls`, `loss_box_reg` (and
                `loss_attribute` with an attribute head) to the result.
            pixel_masks: N entries, boxes whose pixels become 0 in the network input (the mean colour).
            roi_masks: N entries, instance masks in 0..1 that multiply the last RoI map: the output of res5 before its
                mean (the divisor stays S * S, as in VL-BERT on VCR), or the pooled map before a box head. Only together
                with `boxes`.
            whole_image: put the box [0, 0, width - 1, height - 1] in front of each image's regions as row 0.
        """


class PrecomputedDetector(Detector):
    """Returns the features in `ImageBatch.precomputed`; it has no parameters and cannot be trained.

    `config`: settings of the detector that made the features: their width and the number of classes follow from it.
    """

    def __init__(self, config: DetectorConfig, class_names: Sequence[str] | None = None) -> None:
        super().__init__(config, class_names)
        self.map_size = None

    @override
    def recompute_activations(self) -> None:
        """Do nothing: there are no activations to keep."""

    @override
    def blocks_to_compile(self) -> Sequence[nn.Module]:
        return ()

    def forward(
        self,
        images: ImageBatch,
        boxes: list[Float[Tensor, "_R 4"]] | None = None,
        targets: DetectionTargets | None = None,
        *,
        pixel_masks: list[Float[Tensor, "_Q 4"]] | None = None,
        roi_masks: list[Float[Tensor, "_R S S"]] | None = None,
        whole_image: bool = False,
    ) -> Regions:
        """Return the features as in `Detector.forward`; `boxes` are those that they belong to, row by row.

        The class logits have no column: feature files do not hold them.
        """
        if targets is not None or pixel_masks is not None or roi_masks is not None:
            raise UserError(
                "Precomputed features have no detection losses and no pixel or RoI masks; use the built-in detector."
            )
        precomputed = images.precomputed
        if precomputed is None or boxes is None or (whole_image and precomputed.image_features is None):
            raise UserError(
                "The images come without precomputed features, or without the feature of the whole image that the "
                "encoder needs (extract with --image-feature); set the box source to precomputed, or detector.backend "
                "to builtin."
            )
        for rows, image_boxes, name in zip(precomputed.features, boxes, images.names, strict=True):
            if len(rows) != len(image_boxes) or (len(rows) and rows.shape[1] != self.feature_dim):
                raise UserError(
                    f"{name}: precomputed features {list(rows.shape)} for {len(image_boxes)} boxes, but width "
                    f"{self.feature_dim} in the detector's config; use the config that they were made with."
                )
        features = [rows.reshape(len(rows), self.feature_dim) for rows in precomputed.features]
        if whole_image:
            boxes = prepend(whole_image_boxes(images.sizes.to(boxes[0].device)), boxes)
            features = prepend(list(precomputed.image_features[:, None]), features)
        return Regions(boxes=boxes, features=features, class_logits=[rows.new_zeros(len(rows), 0) for rows in features])


@contextlib.contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Set evaluation mode for a while; afterwards every part is in the mode that it was in."""
    before = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in before:
            part.training = training


class RoIFeatures(NamedTuple):
    """What describes each RoI to an encoder, and what the box predictor reads; often they are one tensor."""

    region: Float[Tensor, "J D"]
    predictor: Float[Tensor, "J head_dim"]  # input of the box predictor

    def apply(self, function: Callable[[Tensor], Tensor]) -> RoIFeatures:
        """Apply a function to both; it is computed once where both are one tensor."""
        region = function(self.region)
        if self.predictor is self.region:
            return RoIFeatures(region, region)
        return RoIFeatures(region, function(self.predictor))

    def split(self, counts: list[int]) -> list[RoIFeatures]:
        regions = self.region.split(counts)
        predictors = regions if self.predictor is self.region else self.predictor.split(counts)
        return [RoIFeatures(*pair) for pair in zip(regions, predictors, strict=True)]

    @staticmethod
    def join(parts: Sequence[RoIFeatures]) -> RoIFeatures:
        region = torch.cat([part.region for part in parts])
        if all(part.predictor is part.region for part in parts):
            return RoIFeatures(region, region)
        return RoIFeatures(region, torch.cat([part.predictor for part in parts]))
