"""The built-in detector: a Faster R-CNN, C4 or FPN, with the arithmetic of Detectron2, on torchvision's operators.

Shape legend: see `detector/structures.py`. `head_dim` is the width of the box predictor's input; in a C4 detector it is
D, the number of channels of res5.

One forward pass runs the backbone once, and res5 or the box head once for all boxes: whole images, regions, RoIs of the
losses. (Where the detector predicts the boxes, a pass over the proposals comes first.)
"""

from __future__ import annotations

import abc
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float32, Int64
from torch import Tensor, nn
from typing_extensions import override

from detector.backbones.base import blocks_to_compile, check_maps, recompute_activations
from detector.boxes import are_valid, check_boxes, prepend, whole_image_boxes
from detector.config import BACKBONES, DetectorConfig
from detector.errors import UserError
from detector.images import normalise_images
from detector.roi_heads import Detections, Res5ROIHeads, StandardROIHeads
from detector.roi_pooler import to_rois
from detector.rpn import RPN
from detector.structures import (
    DetectionTargets,
    Detector,
    FeatureMaps,
    ImageBatch,
    ImageBoxes,
    ImageSizes,
    Loss,
    Regions,
    RoIFeatures,
    evaluation_mode,
)


class TwoStageDetector(Detector):
    """What both backends share: the order of the steps of a forward pass.

    The steps run the built-in modules here; the Detectron2 backend overrides them.

    The outputs of `run_rpn` and `sample` may have any type: they are only passed from step to step. `sizes` holds N
    (height, width) of the images without padding.
    """

    @override
    def freeze_predictions(self) -> None:
        self.proposal_generator.requires_grad_(False)
        self.roi_heads.box_predictor.requires_grad_(False)

    @abc.abstractmethod
    def features(self, images: ImageBatch) -> FeatureMaps:
        """Compute feature maps of the normalised batch, padded further where the backbone needs it."""

    def run_rpn(self, features: FeatureMaps) -> Any:
        """Return the output of the region proposal network for every anchor."""
        return self.proposal_generator(features)

    def propose(self, rpn_output: Any, sizes: ImageSizes) -> ImageBoxes:
        """Return the proposals of each image, best first."""
        return self.proposal_generator.propose(rpn_output, sizes).boxes

    def rpn_losses(self, rpn_output: Any, targets: DetectionTargets, sizes: ImageSizes) -> dict[str, Loss]:
        """Compute `loss_rpn_cls` and `loss_rpn_loc`."""
        return self.proposal_generator.losses(rpn_output, targets, sizes)

    def sample(self, proposals: ImageBoxes, targets: DetectionTargets, sizes: ImageSizes) -> Any:
        """Sample RoIs to train the box head on; the result has at least `boxes`, N x [P, 4]."""
        return self.roi_heads.label_and_sample(proposals, targets)

    def head_losses(
        self, inputs: Float[Tensor, "J head_dim"], sampled: Any, targets: DetectionTargets
    ) -> dict[str, Loss]:
        """Compute `loss_cls`, `loss_box_reg` (and `loss_attribute`) from the predictor's inputs of the sampled RoIs."""
        return self.roi_heads.losses(inputs, sampled, targets)

    def describe(
        self,
        features: FeatureMaps,
        rois: Float[Tensor, "J 5"],
        masks: Float[Tensor, "masks rows columns"] | None = None,
    ) -> RoIFeatures:
        """Compute features of RoIs; `masks` as in `Detector.forward`."""
        return self.roi_heads.describe(features, rois, masks)

    def choose(
        self, predictions: tuple[Float[Tensor, "J K_plus_1"], Tensor], proposals: ImageBoxes, sizes: ImageSizes
    ) -> Detections:
        """Choose final boxes by class logits and box deltas ([J, 4 * K], or [J, 4] if class-agnostic) of proposals."""
        return self.roi_heads.detect(*predictions, proposals, sizes)

    @torch.no_grad()
    def detect(
        self, features: FeatureMaps, proposals: ImageBoxes, sizes: ImageSizes
    ) -> tuple[Detections, list[RoIFeatures]]:
        """Return final boxes, and the features of the proposals that they came from, as in evaluation.

        Nothing is differentiable, so that only some of the hundreds of proposals are in memory at a time.
        """
        with evaluation_mode(self):
            pooled = self.describe(features, to_rois(proposals))
            detections = self.choose(self.roi_heads.box_predictor(pooled.predictor), proposals, sizes)
        pooled_by_image = pooled.split([len(boxes) for boxes in proposals])
        features_by_image = []
        for rows, index in zip(pooled_by_image, detections.proposal_index, strict=True):
            features_by_image.append(rows.apply(lambda values, index=index: values[index]))
        return detections, features_by_image

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
        """Detect boxes, or take the given ones, and describe them; see `Detector.forward`.

        The score and class of a RoI sampled in training belong to its best foreground class; a whole-image row has
        score 1 and class K (background). The `mean` of each loss is Detectron2's value, weights included.
        """
        self._check_inputs(boxes, targets, images.names)
        images = normalise_images(images, self.config.input, pixel_masks)
        sizes = [(height, width) for height, width in images.sizes.tolist()]
        features = self.features(images)

        losses = {}
        sampled = detections = proposal_features = None
        if boxes is None or targets is not None:
            with torch.set_grad_enabled(torch.is_grad_enabled() and targets is not None):
                rpn_output = self.run_rpn(features)
        if targets is not None:
            losses |= self.rpn_losses(rpn_output, targets, sizes)
            sampled = self.sample(self.propose(rpn_output, sizes), targets, sizes)

        groups = {}
        if whole_image:
            groups["whole"] = whole_image_boxes(images.sizes.to(images.pixels.device))
        if boxes is not None:
            groups["regions"] = boxes
        elif sampled is None or not self.training:
            with evaluation_mode(self):
                proposals = self.propose(rpn_output, sizes)
            detections, proposal_features = self.detect(features, proposals, sizes)
            if self.config.roi_heads.features_of == "final":
                groups["regions"] = detections.boxes
                proposal_features = None
            elif self.training or torch.is_grad_enabled():  # describe the chosen proposals once more
                pairs = zip(proposals, detections.proposal_index, strict=True)
                groups["regions"] = [rows[index] for rows, index in pairs]
                proposal_features = None
        if sampled is not None:
            groups["sampled"] = sampled.boxes
        pooled = self._describe(features, groups, roi_masks)

        if sampled is not None:
            losses |= self.head_losses(RoIFeatures.join(pooled["sampled"]).predictor, sampled, targets)
        if proposal_features is not None:
            pooled["regions"] = proposal_features
        if detections is not None:
            groups["regions"] = detections.boxes
        group = "regions" if "regions" in groups else "sampled"
        region_boxes = groups[group]
        region_features = pooled[group]
        if whole_image:
            region_boxes = prepend(groups["whole"], region_boxes)
            pairs = zip(pooled["whole"], region_features, strict=True)
            region_features = [RoIFeatures.join(pair) for pair in pairs]
        regions = self._make_regions(region_boxes, region_features)
        if boxes is None:
            regions = self._with_scores(regions, detections, whole_image)
        maps = features if self.config.mask_on else None
        return dataclasses.replace(regions, losses=losses, maps=maps)

    @override
    def mask_logits(
        self, maps: FeatureMaps, rois: Float[Tensor, "J 5"], classes: Int64[Tensor, " J"]
    ) -> Float32[Tensor, "J side side"]:
        if not self.config.mask_on:
            return super().mask_logits(maps, rois, classes)
        return self.roi_heads.mask_logits(maps, rois, classes)

    def _describe(
        self, features: FeatureMaps, groups: dict[str, list[Float[Tensor, "_R 4"]]], roi_masks: list[Tensor] | None
    ) -> dict[str, list[RoIFeatures]]:
        """Describe several groups of N x [R, 4] boxes in one pass; masks belong to the group "regions"."""
        if not groups:
            return {}
        masks = None
        if roi_masks is not None:
            masks = []
            for name, boxes in groups.items():
                for rows, mask in zip(boxes, roi_masks, strict=True):
                    if name != "regions":
                        mask = mask.new_ones(len(rows), *mask.shape[1:])
                    masks.append(mask)
            masks = torch.cat(masks)
        rois = torch.cat([to_rois(boxes) for boxes in groups.values()])
        pooled = self.describe(features, rois, masks)
        counts = [len(rows) for rows in itertools.chain.from_iterable(groups.values())]
        split = iter(pooled.split(counts))
        return {name: [next(split) for _ in boxes] for name, boxes in groups.items()}

    def _make_regions(self, boxes: list[Float[Tensor, "_R 4"]], features: list[RoIFeatures]) -> Regions:
        counts = [len(rows) for rows in boxes]
        inputs = torch.cat([rows.predictor for rows in features])
        predictor = self.roi_heads.box_predictor
        logits = predictor.class_logits(inputs)
        attributes = None
        if predictor.has_attributes:
            attributes = list(predictor.attributes(inputs, logits.argmax(dim=1))[:, :-1].split(counts))
        described = [rows.region for rows in features]
        return Regions(boxes, described, list(logits.split(counts)), attribute_logits=attributes)

    @torch.no_grad()
    def _with_scores(self, regions: Regions, detections: Detections | None, whole_image: bool) -> Regions:
        if detections is None:
            first = int(whole_image)  # row 0 is the whole image then
            best = [logits[first:].softmax(dim=1)[:, :-1].max(dim=1) for logits in regions.class_logits]
            scores = [pair.values for pair in best]
            classes = [pair.indices for pair in best]
        else:
            scores = detections.scores
            classes = detections.classes
        if whole_image:
            scores = [torch.cat((rows.new_ones(1), rows)) for rows in scores]
            classes = [torch.cat((rows.new_full((1,), self.num_classes), rows)) for rows in classes]
        return dataclasses.replace(regions, scores=scores, classes=classes)

    def _check_inputs(self, boxes: ImageBoxes | None, targets: DetectionTargets | None, names: list[str]) -> None:
        """Raise a UserError for invalid boxes or classes; a GPU waits once, unless something is wrong."""
        all_boxes = [*(boxes or [])]
        if targets is not None:
            all_boxes += targets.boxes
        if not all_boxes:
            return
        is_valid = are_valid(torch.cat(all_boxes)).all()
        if targets is not None:
            classes = torch.cat(targets.classes)
            is_valid &= ((classes >= 0) & (classes < self.num_classes)).all()
        if bool(is_valid):
            return
        if boxes is not None:
            check_boxes(boxes, names, "box")
        if targets is not None:
            check_boxes(targets.boxes, names, "annotated box")
            raise UserError(
                f"{', '.join(names)}: a class label of an annotated object is not in 0 .. {self.num_classes - 1}; set "
                "MODEL.ROI_HEADS.NUM_CLASSES to the number of classes of the data."
            )


class FasterRCNN(TwoStageDetector):
    """Faster R-CNN with Detectron2's parameter names: its checkpoints load with `strict=True`."""

    def __init__(self, config: DetectorConfig, class_names: Sequence[str] | None = None) -> None:
        super().__init__(config, class_names)
        backend = config.backbone_spec.backend
        if backend is not None:
            raise UserError(
                f"MODEL.BACKBONE.NAME {config.backbone} needs another detector; set detector.backend to {backend}."
            )
        self.backbone = BACKBONES[config.backbone].cls(config)
        self.proposal_generator = RPN(config)
        self.roi_heads = StandardROIHeads(config) if config.has_box_head else Res5ROIHeads(config)

    @override
    def recompute_activations(self) -> None:
        recompute_activations(self, self.backbone)

    @override
    def blocks_to_compile(self) -> list[nn.Module]:
        return blocks_to_compile(self, self.backbone)

    @override
    def features(self, images: ImageBatch) -> FeatureMaps:
        """Return the maps of the padded batch that `BackboneSpec.maps` names; h, w = H, W / stride."""
        pixels = pad_to_multiple(images.pixels, self.config.size_divisibility)
        maps = self.backbone(pixels.contiguous(memory_format=torch.channels_last))
        check_maps(maps, self.config.map_shapes, pixels, self.config.backbone)
        return maps


def pad_to_multiple(pixels: Float[Tensor, "N 3 _H _W"], multiple: int) -> Float[Tensor, "N 3 _H _W"]:
    """Add zeros (the mean colour) at the right and the bottom until both sides are multiples of `multiple`."""
    height, width = pixels.shape[-2:]
    right = -width % multiple
    bottom = -height % multiple
    if not right and not bottom:
        return pixels
    return F.pad(pixels, (0, right, 0, bottom))
