"""Both detector backends for parity tests: how to build them, and inner values under one name."""

from __future__ import annotations

import importlib.util
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from detector.faster_rcnn import FasterRCNN, TwoStageDetector
from detector.structures import DetectionTargets

NAMES = ("builtin", "detectron2")


def detector_class(name: str) -> type[TwoStageDetector]:
    """The class of a backend; the test is skipped where Detectron2 is not installed."""
    if name == "builtin":
        return FasterRCNN
    if importlib.util.find_spec("detectron2") is None:
        pytest.skip("Detectron2 is not installed")
    from detector.detectron2_backend import Detectron2Detector

    return Detectron2Detector


def is_builtin(model: TwoStageDetector) -> bool:
    return isinstance(model, FasterRCNN)


def stages(model: TwoStageDetector, pixels: Tensor) -> dict[str, Tensor]:
    """Outputs of the stem and of all stages of the ResNet."""
    resnet = getattr(model.backbone, "bottom_up", model.backbone)
    outputs = {}
    for name in ("stem", "res2", "res3", "res4", "res5"):
        if hasattr(resnet, name):
            pixels = outputs[name] = getattr(resnet, name)(pixels)
    return outputs


def head_maps(model: TwoStageDetector, features: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Objectness [N, C, h, w] and deltas [N, 4 * C, h, w] of the RPN head, by the name of the feature map."""
    rpn = model.proposal_generator
    if is_builtin(model):
        return {name: rpn.rpn_head(features[name]) for name in rpn.in_features}
    pairs = zip(*rpn.rpn_head([features[name] for name in rpn.in_features]), strict=True)
    return dict(zip(rpn.in_features, pairs, strict=True))


def cell_anchors(model: TwoStageDetector) -> Tensor:
    """[feature maps, C, 4]."""
    rpn = model.proposal_generator
    if is_builtin(model):
        return torch.stack([generator.cell_anchors for generator in rpn.anchor_generators])
    return torch.stack(list(rpn.anchor_generator.cell_anchors))


def round_anchors(model: TwoStageDetector) -> None:
    """Float32 anchors in a float64 model, as in Detectron2: rounding decides which of several IoUs is the largest."""
    if is_builtin(model):
        model.proposal_generator.anchor_generators.float()


class RPNArrays(NamedTuple):
    anchors: Tensor  # [A, 4]
    objectness: Tensor  # [N, A]
    deltas: Tensor  # [N, A, 4]


def rpn_arrays(rpn_output: Any) -> RPNArrays:
    if not isinstance(rpn_output.anchors, list):
        return RPNArrays(rpn_output.anchors, rpn_output.objectness, rpn_output.deltas)
    anchors = torch.cat([level.tensor for level in rpn_output.anchors])
    return RPNArrays(anchors, torch.cat(rpn_output.objectness, dim=1), torch.cat(rpn_output.deltas, dim=1))


def proposals(model: TwoStageDetector, rpn_output: Any, sizes: list) -> tuple[list[Tensor], list[Tensor]]:
    """Boxes and objectness logits of the proposals of each image."""
    if is_builtin(model):
        found = model.proposal_generator.propose(rpn_output, sizes)
        return found.boxes, found.objectness
    found = model.proposal_generator.predict_proposals(*rpn_output, sizes)
    return [rows.proposal_boxes.tensor for rows in found], [rows.objectness_logits for rows in found]


def pooled_maps(model: TwoStageDetector, features: dict[str, Tensor], rois: Tensor) -> Tensor:
    """Pooled maps of rois [R, 5]."""
    if not is_builtin(model):
        return model.pool(features, rois)
    return model.roi_heads.pool([features[name] for name in model.roi_heads.in_features], rois)


def roi_maps(model: TwoStageDetector, features: dict[str, Tensor], rois: Tensor) -> tuple[Tensor, Tensor]:
    """Pooled maps and res5 maps of rois [R, 5]."""
    pooled = pooled_maps(model, features, rois)
    return pooled, model.roi_heads.res5(pooled)


def label_anchors(
    model: TwoStageDetector, rpn_output: Any, targets: DetectionTargets, sizes: list
) -> tuple[Tensor, Tensor]:
    """Labels [N, A] and matched objects [N, A] before sampling."""
    if is_builtin(model):
        return model.proposal_generator.label_anchors(rpn_output.anchors, targets.boxes, sizes)
    from detectron2.structures import Boxes, pairwise_iou

    rpn, anchors = model.proposal_generator, Boxes.cat(rpn_output.anchors)
    labels, matches = [], []
    for boxes, size in zip(targets.boxes, sizes, strict=True):
        matched, label = rpn.anchor_matcher(pairwise_iou(Boxes(boxes), anchors))
        if rpn.anchor_boundary_thresh >= 0:
            label[~anchors.inside_box(size, rpn.anchor_boundary_thresh)] = -1
        labels.append(label)
        matches.append(matched)
    return torch.stack(labels), torch.stack(matches)


class SampledArrays(NamedTuple):
    boxes: list[Tensor]
    classes: list[Tensor]
    matched_boxes: list[Tensor]  # of the annotated object each RoI was compared with; 0 in an image without objects


def sampled_arrays(sampled: Any, targets: DetectionTargets) -> SampledArrays:
    if hasattr(sampled, "instances"):
        rows = sampled.instances
        classes = [one.gt_classes for one in rows]
        matched = [one.gt_boxes.tensor if one.has("gt_boxes") else torch.zeros(len(one), 4) for one in rows]
    else:
        classes = sampled.classes
        matched = [
            boxes[index] if len(boxes) else torch.zeros(len(index), 4)
            for boxes, index in zip(targets.boxes, sampled.matched, strict=True)
        ]
    return SampledArrays(sampled.boxes, classes, matched)
