"""Comparisons with a set recorded from stock Detectron2 that C4 and FPN share, in the order of the forward pass."""

from __future__ import annotations

import re
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from detector.boxes import decode_deltas, encode_deltas, rescale_detections
from detector.config import DetectorConfig
from detector.faster_rcnn import TwoStageDetector, pad_to_multiple
from detector.images import make_image_batch, resize_image
from detector.roi_pooler import to_rois
from detector.structures import DetectionTargets, ImageBatch
from tests.parity.detectron2_common import GoldenSet, assert_near, assert_same_rows, detections_of, with_area
from tests.parity.tolerances import ARITHMETIC, GRADIENT, NETWORK


def test_box_coder(golden: GoldenSet):
    for name in ("w1", "wroi"):
        stated = re.search(r"weights \(([^)]*)\)", golden.description(f"coder.{name}.decoded"))
        values = tuple(float(value) for value in stated[1].split(","))
        decoded = decode_deltas(golden["coder.deltas"], golden["coder.boxes"], values)
        encoded = encode_deltas(golden["coder.boxes"], golden["coder.targets"], values)
        assert_near(decoded, golden[f"coder.{name}.decoded"], ARITHMETIC)
        assert_near(encoded, golden[f"coder.{name}.encoded"], ARITHMETIC)


def test_state_dict_loads_strictly(golden: GoldenSet):
    model = golden.detector_class(DetectorConfig.from_yaml(golden.config))
    model.load_state_dict(golden.weights, strict=True)
    assert set(model.state_dict()) == set(golden.weights)


def test_config_is_the_effective_one(golden: GoldenSet):
    config = DetectorConfig.from_yaml(golden.config)
    flat = config.to_flat()
    for section, values in golden.meta["config_effective"].items():
        items = values.items() if isinstance(values, dict) else [(None, values)]
        for name, value in items:
            key = (section if "." in section else f"MODEL.{section}") + (f".{name}" if name else "")
            if key in flat:
                assert flat[key] == value, key


def test_preprocessing(golden: GoldenSet, images: ImageBatch):
    assert torch.equal(images.sizes, golden["pre.image_sizes"])
    padded = pad_to_multiple(images.pixels, DetectorConfig.from_yaml(golden.config).size_divisibility)
    assert_near(padded, golden["pre.batch"], ARITHMETIC)


def test_anchors(golden: GoldenSet, model: TwoStageDetector, rpn_output: Any, backends: ModuleType):
    cells = golden["rpn.cell_anchors"]  # without the axis of the feature maps if there is only one
    assert torch.equal(backends.cell_anchors(model).reshape(cells.shape), cells)
    assert torch.equal(backends.rpn_arrays(rpn_output).anchors, golden["rpn.anchors"])


def test_proposals(
    golden: GoldenSet, model: TwoStageDetector, rpn_output: Any, sizes: list[tuple[int, int]], backends: ModuleType
):
    boxes, objectness = backends.proposals(model, rpn_output, sizes)
    for number in range(golden.num_images):
        prefix = f"rpn.image{number}."
        recorded = golden.rows(prefix, "proposal_boxes", "proposal_logits")
        rows = assert_same_rows((boxes[number], objectness[number]), recorded)
        if backends.is_builtin(model):  # Detectron2 does not say which anchor a proposal came from
            index = model.proposal_generator.propose(rpn_output, sizes).anchor_index[number]
            assert torch.equal(index[rows], golden[f"{prefix}proposal_anchor_index"])


def test_box_head_on_proposals(golden: GoldenSet, model: TwoStageDetector, features: Any):
    proposals = golden.of_images("rpn.{}.proposal_boxes")
    with torch.no_grad():
        pooled = model.describe(features, to_rois(proposals)).predictor
        logits, deltas = model.roi_heads.box_predictor(pooled)
    decoded = decode_deltas(deltas, torch.cat(proposals), model.config.roi_heads.box_weights)
    assert_near(pooled, torch.cat(golden.of_images("roi.{}.pooled_features")))
    assert_near(logits, torch.cat(golden.of_images("roi.{}.class_logits")))
    assert_near(deltas, torch.cat(golden.of_images("roi.{}.box_deltas")))
    assert_near(logits.softmax(dim=1), torch.cat(golden.of_images("roi.{}.class_probs")))
    assert_near(decoded, torch.cat(golden.of_images("roi.{}.decoded_boxes")))


def test_detections(golden: GoldenSet, model: TwoStageDetector, images: ImageBatch):
    with torch.no_grad():
        regions = model(images)
        boxes, usable = with_area(regions.boxes)
        again = model(images, boxes)
    for number in range(golden.num_images):
        recorded = golden.rows(f"det.image{number}.", "boxes", "scores", "classes")
        assert_same_rows(detections_of(regions, number), recorded)
    # of the final boxes, not of the proposals
    assert_near(torch.cat(regions.features)[usable], torch.cat(again.features), 1e-5)


def test_detections_at_another_size(golden: GoldenSet, sizes: list[tuple[int, int]]):
    for number, size in enumerate(sizes):
        prefix = f"det.image{number}."
        boxes, kept = rescale_detections(golden[f"{prefix}boxes"], size, golden[f"{prefix}post.output_size"].tolist())
        assert_near(boxes, golden[f"{prefix}post.boxes"], ARITHMETIC)
        assert torch.equal(golden[f"{prefix}scores"][kept], golden[f"{prefix}post.scores"])
        assert torch.equal(golden[f"{prefix}classes"][kept], golden[f"{prefix}post.classes"])


def test_features_of_proposals(
    golden: GoldenSet, images: ImageBatch, sizes: list[tuple[int, int]], backends: ModuleType
):
    model = golden.detector(MODEL__ROI_HEADS__FEATURES_OF="proposal")
    with torch.no_grad():
        regions = model(images)
        features = model.features(images)
        proposals, objectness = backends.proposals(model, model.run_rpn(features), sizes)
        detections, _ = model.detect(features, model.propose(model.run_rpn(features), sizes), sizes)
    for number in range(golden.num_images):
        prefix = f"det.image{number}."
        rows = assert_same_rows(detections_of(regions, number), golden.rows(prefix, "boxes", "scores", "classes"))
        assert_near(regions.features[number][rows], golden[f"{prefix}proposal_features"])
        recorded = golden.rows(f"rpn.image{number}.", "proposal_boxes", "proposal_logits")
        proposal_rows = assert_same_rows((proposals[number], objectness[number]), recorded)
        expected = proposal_rows[golden[f"{prefix}proposal_index"]]
        assert torch.equal(detections.proposal_index[number][rows], expected)


def test_images_run_alone(golden: GoldenSet, given: list[Tensor], backends: ModuleType):
    model = golden.detector(MODEL__ROI_HEADS__FEATURES_OF="proposal")
    batch = golden.images()
    for number, (height, width) in enumerate(batch.sizes.tolist()):
        rows = slice(number, number + 1)
        alone = ImageBatch(
            batch.pixels[rows, :, :height, :width], batch.sizes[rows], batch.original_sizes[rows], batch.names[rows]
        )
        with torch.no_grad():
            boxes = given[number]
            features = model.features(alone)
            described, detected = model.describe(features, to_rois([boxes])).predictor, model(alone)
        prefix = f"single.image{number}."
        names = [name for name in features if f"{prefix}{name}" in golden.tensors]
        assert names
        for name in names:
            assert_near(features[name], golden[f"{prefix}{name}"])
        assert_near(described, golden[f"{prefix}given_pooled_features"])
        rows = assert_same_rows(detections_of(detected, 0), golden.rows(f"{prefix}det.", "boxes", "scores", "classes"))
        assert_near(detected.features[0][rows], golden[f"{prefix}det.proposal_features"])


def targets_of(golden: GoldenSet) -> DetectionTargets:
    return DetectionTargets(golden.of_images("train.{}.gt_boxes"), golden.of_images("train.{}.gt_classes"))


def test_training_targets(golden: GoldenSet, images: ImageBatch, sizes: list[tuple[int, int]], backends: ModuleType):
    model = golden.detector().train()
    targets = targets_of(golden)
    with torch.no_grad():
        output = model.run_rpn(model.features(images))
    labels, matched = backends.label_anchors(model, output, targets, sizes)
    assert torch.equal(labels, torch.stack(golden.of_images("train.{}.rpn_labels")))
    positive = labels == 1
    assert torch.equal(matched[positive], torch.stack(golden.of_images("train.{}.rpn_matched_gt"))[positive])

    boxes, objectness = backends.proposals(model, output, sizes)
    for number in range(golden.num_images):
        recorded = golden.rows(f"train.image{number}.", "proposal_boxes", "proposal_logits")
        assert_same_rows((boxes[number], objectness[number]), recorded, NETWORK * golden.noise)

    sampled = backends.sampled_arrays(model.sample(boxes, targets, sizes), targets)
    for number in range(golden.num_images):
        prefix = f"train.image{number}."
        expected = golden[f"{prefix}roi_boxes"]
        distances = torch.cdist(expected, sampled.boxes[number])  # sampling shuffles the RoIs
        order = distances.argmin(dim=1)
        assert len(sampled.boxes[number]) == len(expected)
        assert_near(sampled.boxes[number][order], expected, NETWORK * golden.noise)
        assert_near(sampled.boxes[number], expected[distances.argmin(dim=0)], NETWORK * golden.noise)
        assert torch.equal(sampled.classes[number][order], golden[f"{prefix}roi_classes"])
        foreground = golden[f"{prefix}roi_classes"] < model.num_classes
        objects = targets.boxes[number][golden[f"{prefix}roi_matched_gt"][foreground]]
        assert torch.equal(sampled.matched_boxes[number][order][foreground], objects)


@pytest.mark.parametrize("with_boxes", [False, True])
def test_training_losses_and_gradients(golden: GoldenSet, images: ImageBatch, given: list[Tensor], with_boxes: bool):
    if with_boxes and golden.noise > 1:
        pytest.skip("given boxes take part in the batch statistics of res5, so that the losses are others")
    model = golden.detector().train()
    boxes, rows = with_area(given)
    regions = model(images, boxes if with_boxes else None, targets_of(golden))
    losses = {name: loss.mean for name, loss in regions.losses.items()}
    assert set(losses) == {"loss_rpn_cls", "loss_rpn_loc", "loss_cls", "loss_box_reg"}
    for name, value in losses.items():
        assert value.item() == pytest.approx(golden[f"train.loss.{name}"].item(), rel=NETWORK), name
    total = sum(losses.values())
    assert total.item() == pytest.approx(golden["train.loss.total"].item(), rel=NETWORK)

    total.backward()
    parameters = dict(model.named_parameters())
    names = [key.removeprefix("grad.") for key in golden.tensors if key.startswith("grad.")]
    assert names
    for name in names:
        expected = golden[f"grad.{name}"]
        distance = (parameters[name].grad - expected).norm()
        assert distance <= GRADIENT * golden.noise * expected.norm(), name
    if with_boxes:
        assert_near(torch.cat(regions.features).detach(), golden["given.pooled_features"][rows])


@pytest.mark.parametrize("variant", ["norm", "raw", "none"])
def test_pixel_masks(golden: GoldenSet, model: TwoStageDetector, images: ImageBatch, given: list[Tensor], variant: str):
    batch, masks = images, None
    if variant == "norm":
        rows = golden.of_images("mask.{}.box_rows")
        masks = [boxes[index] for boxes, index in zip(given, rows, strict=True)]
    elif variant == "raw":
        batch = golden.images("mask.raw.{}.bgr_u8")
    boxes, rows = with_area(given)
    with torch.no_grad():
        regions = model(batch, boxes, pixel_masks=masks)
    assert_near(torch.cat(regions.features), golden[f"mask.{variant}.pooled_features"][rows])
    if variant != "none":
        assert_near(torch.cat(regions.class_logits), golden[f"mask.{variant}.class_logits"][rows])


def test_feature_of_a_resized_image(golden: GoldenSet, model: TwoStageDetector):
    cases = sorted({key.split(".")[1] for key in golden.tensors if key.startswith("resize.")})
    assert cases
    for case in cases:
        source = golden[f"resize.{case}.input_bgr_u8"].numpy()
        height, width = golden[f"resize.{case}.output_bgr_u8"].shape[:2]
        resized = np.array(resize_image(Image.fromarray(source), (height, width)))
        batch = make_image_batch([resized], [source.shape[:2]], [case])
        with torch.no_grad():
            regions = model(batch, [torch.tensor([[0.0, 0.0, width, height]])])
        assert_near(regions.features[0], golden[f"resize.{case}.full_image_feature"])


def test_poolers(golden: GoldenSet, features: Any, given: list[Tensor], backends: ModuleType):
    names = sorted({key.removesuffix(".rows") for key in golden.tensors if re.match(r"pooler\..*\.rows", key)})
    assert names
    for name in names:
        note = golden.description(f"{name}.output")
        kind, ratio, side = re.search(r"type (\w+), sampling_ratio (\d+), (\d+)x", note).groups()
        model = golden.detector(
            MODEL__ROI_BOX_HEAD__POOLER_TYPE=kind,
            MODEL__ROI_BOX_HEAD__POOLER_SAMPLING_RATIO=int(ratio),
            MODEL__ROI_BOX_HEAD__POOLER_RESOLUTION=int(side),
        )
        with torch.no_grad():
            maps = backends.pooled_maps(model, features, to_rois(given))
            described = model.describe(features, to_rois(given))
        assert_near(maps[golden[f"{name}.rows"]], golden[f"{name}.output"])
        assert_near(described.predictor, golden[f"{name}.pooled_features"])
