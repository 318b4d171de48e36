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
    from detector.detectron2_adapter import Detectron2Detector

    return Detectron2Detector


def is_builtin(model: TwoStageDetector) -> bool:
    return isinstance(model, FasterRCNN)


def stages(model: TwoStageDetector, pixels: Tensor) -> dict[str, Tensor]:
    """Outputs of stem, res2, res3 and res4."""
    outputs = {}
    for name in ("stem", "res2", "res3", "res4"):
        pixels = outputs[name] = getattr(model.backbone, name)(pixels)
    return outputs


def res4(features: Any) -> Tensor:
    """The feature map in what `features` returned."""
    return features["res4"] if isinstance(features, dict) else features


def head_maps(model: TwoStageDetector, features: Any) -> tuple[Tensor, Tensor]:
    """Objectness [N, C, h, w] and deltas [N, 4 * C, h, w] of the RPN head."""
    if is_builtin(model):
        return model.proposal_generator.rpn_head(features)
    objectness, deltas = model.proposal_generator.rpn_head([features["res4"]])
    return objectness[0], deltas[0]


def cell_anchors(model: TwoStageDetector) -> Tensor:
    found = model.proposal_generator.anchor_generator.cell_anchors
    return found if is_builtin(model) else next(iter(found))


class RPNArrays(NamedTuple):
    anchors: Tensor  # [A, 4]
    objectness: Tensor  # [N, A]
    deltas: Tensor  # [N, A, 4]


def rpn_arrays(rpn_output: Any) -> RPNArrays:
    if not isinstance(rpn_output.anchors, list):
        return RPNArrays(rpn_output.anchors, rpn_output.objectness, rpn_output.deltas)
    return RPNArrays(rpn_output.anchors[0].tensor, rpn_output.objectness[0], rpn_output.deltas[0])


def proposals(model: TwoStageDetector, rpn_output: Any, sizes: list) -> tuple[list[Tensor], list[Tensor]]:
    """Boxes and objectness logits of the proposals of each image."""
    if is_builtin(model):
        found = model.proposal_generator.propose(rpn_output, sizes)
        return found.boxes, found.objectness
    found = model.proposal_generator.predict_proposals(*rpn_output, sizes)
    return [rows.proposal_boxes.tensor for rows in found], [rows.objectness_logits for rows in found]


def roi_maps(model: TwoStageDetector, features: Any, rois: Tensor) -> tuple[Tensor, Tensor]:
    """Pooled maps and res5 maps of rois [R, 5]."""
    heads = model.roi_heads
    pooled = heads.pool(features, rois) if is_builtin(model) else model.pool(features, rois)
    return pooled, heads.res5(pooled)


def label_anchors(
    model: TwoStageDetector, rpn_output: Any, targets: DetectionTargets, sizes: list
) -> tuple[Tensor, Tensor]:
    """Labels [N, A] and matched objects [N, A] before sampling."""
    if is_builtin(model):
        return model.proposal_generator.label_anchors(rpn_output.anchors, targets.boxes, sizes)
    from detectron2.structures import Boxes, pairwise_iou

    rpn, anchors = model.proposal_generator, rpn_output.anchors[0]
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
    matched_boxes: list[Tensor]  # of the annotated object each RoI was compared with


def sampled_arrays(sampled: Any, targets: DetectionTargets) -> SampledArrays:
    if hasattr(sampled, "instances"):
        rows = sampled.instances
        return SampledArrays(sampled.boxes, [r.gt_classes for r in rows], [r.gt_boxes.tensor for r in rows])
    matched = [boxes[index] for boxes, index in zip(targets.boxes, sampled.matched, strict=True)]
    return SampledArrays(sampled.boxes, sampled.classes, matched)
