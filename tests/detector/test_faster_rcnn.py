"""The detector as a whole, C4 and FPN, with random weights: its boxes, its losses, its gradients."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchvision.models import detection
from torchvision.ops import FrozenBatchNorm2d

from detector import roi_heads
from detector.checkpoint import load_weights
from detector.config import AnchorConfig, DetectorConfig
from detector.errors import UserError
from detector.faster_rcnn import FasterRCNN
from detector.images import make_image_batch, normalise_images
from detector.roi_pooler import to_rois
from detector.rpn import AnchorGenerator, make_cell_anchors
from detector.structures import DetectionTargets, ImageBatch, Regions, evaluation_mode
from detector.weight_names import from_torchvision_detector
from detector.yaml_tree import flatten, load_tree
from detector.zoo import PUBLISHED

NUM_CLASSES, NUM_ATTRIBUTES = 4, 5
SIZES = [(70, 80), (54, 97)]  # no multiples of the strides
TINY: dict[str, Any] = {
    "MODEL": {
        "BACKBONE": {"FREEZE_AT": 0},
        "RESNETS": {
            "DEPTH": 18,
            "NORM": "GN",
            "STEM_OUT_CHANNELS": 8,
            "RES2_OUT_CHANNELS": 16,
            "WIDTH_PER_GROUP": 4,
            "STEM_POOL": "none",
        },
        "ANCHOR_GENERATOR": {"SIZES": [[16, 32]], "ASPECT_RATIOS": [[1.0]]},
        "RPN": {"POST_NMS_TOPK_TRAIN": 40, "POST_NMS_TOPK_TEST": 30},
        "ROI_HEADS": {"NUM_CLASSES": NUM_CLASSES, "BATCH_SIZE_PER_IMAGE": 16, "SCORE_THRESH_TEST": 0.0},
        "ROI_BOX_HEAD": {"POOLER_RESOLUTION": 7, "POOLER_SAMPLING_RATIO": 1},
    },
    "TEST": {"DETECTIONS_PER_IMAGE": 10},
}
ATTRIBUTES = {"MODEL.ROI_BOX_HEAD.ATTRIBUTES": {"NUM_CLASSES": NUM_ATTRIBUTES, "EMBEDDING_DIM": 4, "HIDDEN_DIM": 8}}
FPN = load_tree(Path(__file__).parents[2] / "configs" / "detector" / "tiny_fpn.yaml")
FPN["MODEL"]["RESNETS"]["NORM"] = FPN["MODEL"]["FPN"]["NORM"] = "GN"  # the same for one image and for many
LOSSES = {"loss_rpn_cls", "loss_rpn_loc", "loss_cls", "loss_box_reg"}


def make(changes: dict[str, Any] | None = None, tree: dict[str, Any] = TINY) -> FasterRCNN:
    torch.manual_seed(0)
    return FasterRCNN(DetectorConfig.from_flat(flatten(tree) | flatten(changes or {})))


@pytest.fixture
def images() -> ImageBatch:
    generator = torch.Generator().manual_seed(1)
    pixels = torch.zeros(2, 3, 70, 97)
    for image, (height, width) in zip(pixels, SIZES, strict=True):
        image[:, :height, :width] = torch.randn(3, height, width, generator=generator) * 50
    sizes = torch.tensor(SIZES)
    return ImageBatch(pixels, sizes, sizes, ["first.jpg", "second.jpg"])


@pytest.fixture
def boxes() -> list[Tensor]:
    return [
        torch.tensor([[2.0, 3.0, 30.0, 40.0], [40.0, 10.0, 79.0, 60.0], [0.0, 0.0, 79.0, 69.0]]),
        torch.tensor([[10.0, 5.0, 60.0, 45.0]]),
    ]


@pytest.fixture
def targets(boxes: list[Tensor]) -> DetectionTargets:
    attributes = [torch.tensor([[0, 4], [2, -1], [-1, -1]]), torch.tensor([[1, -1]])]
    return DetectionTargets(boxes, [torch.tensor([0, 1, 2]), torch.tensor([3])], attributes)


def total(regions: Regions) -> Tensor:
    return sum(loss.mean for loss in regions.losses.values())


def test_whole_image_row_comes_first(images: ImageBatch, boxes: list[Tensor]):
    model = make().eval()
    whole = [torch.tensor([[0.0, 0.0, width - 1.0, height - 1.0]]) for height, width in SIZES]
    by_hand = model(images, [torch.cat(pair) for pair in zip(whole, boxes, strict=True)])
    regions = model(images, boxes, whole_image=True)
    for name in ("boxes", "features", "class_logits"):
        torch.testing.assert_close(getattr(regions, name), getattr(by_hand, name))
    plain, regions = model(images), model(images, whole_image=True)
    for name in ("boxes", "features", "scores", "classes"):
        torch.testing.assert_close([rows[1:] for rows in getattr(regions, name)], getattr(plain, name))
    for number in range(2):
        assert torch.equal(regions.boxes[number][:1], whole[number])
        assert (regions.scores[number][0], regions.classes[number][0]) == (1, NUM_CLASSES)


def test_images_without_boxes(images: ImageBatch, boxes: list[Tensor]):
    model, nothing = make().train(), boxes[0][:0]
    for given, counts in (([nothing, boxes[1]], (0, 1)), ([nothing, nothing], (0, 0))):
        for extra in (0, 1):
            regions = model(images, given, whole_image=bool(extra))
            assert [rows.shape for rows in regions.features] == [(count + extra, 128) for count in counts]
    sure = make({"MODEL.ROI_HEADS.SCORE_THRESH_TEST": 0.99}).eval()
    assert [len(rows) for rows in sure(images).boxes] == [0, 0]


@pytest.mark.parametrize("norm", ["FrozenBN", "BN"])
@pytest.mark.parametrize(("tree", "sampled"), [(TINY, 16), (FPN, 24)], ids=["c4", "fpn"])
def test_training_on_proposals_reuses_the_sampled_rois(
    images: ImageBatch, targets: DetectionTargets, tree: dict[str, Any], sampled: int, norm: str
):
    changes = {"MODEL.RESNETS.NORM": norm}
    if tree is FPN:
        changes["MODEL.FPN.NORM"] = "" if norm == "FrozenBN" else norm
    model = make(changes, tree).train()
    head = model.roi_heads.res5 if tree is TINY else model.roi_heads.box_head
    calls = []
    head.register_forward_hook(lambda module, args, out: calls.append(len(out if tree is TINY else out.region)))
    regions = model(images, None, targets, whole_image=True)
    assert calls == [sampled + sampled + 2]  # one pass over the sampled RoIs and the whole images
    for rows in (regions.boxes, regions.scores, regions.classes):
        assert [len(row) for row in rows] == [1 + sampled, 1 + sampled]
    assert set(regions.losses) == LOSSES | ({"loss_attribute"} if tree is FPN else set())
    total(regions).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name


def test_given_boxes_and_targets_share_one_pass(images: ImageBatch, boxes: list[Tensor], targets: DetectionTargets):
    model = make().train()
    trunk, calls = [], []
    model.backbone.register_forward_hook(lambda module, args, out: trunk.append(1))
    model.roi_heads.res5.register_forward_hook(lambda module, args, out: calls.append(len(out)))
    torch.manual_seed(5)
    both = model(images, boxes, targets)
    assert (len(trunk), calls) == (1, [4 + 32])
    torch.manual_seed(5)
    alone = model(images, None, targets)
    for name in LOSSES:
        torch.testing.assert_close(both.losses[name].mean, alone.losses[name].mean)
        assert both.losses[name].count == 2 * (256 if "rpn" in name else 16)
    torch.testing.assert_close(both.features[0], model(images, boxes).features[0])


@pytest.mark.parametrize("appended", [True, False])
def test_sampled_rois_hold_the_annotated_boxes(images: ImageBatch, targets: DetectionTargets, appended: bool):
    model = make({"MODEL.ROI_HEADS": {"POSITIVE_FRACTION": 1.0, "PROPOSAL_APPEND_GT": appended}}).train()
    for sampled, annotated in zip(model(images, None, targets).boxes, targets.boxes, strict=True):
        assert ((sampled[:, None] == annotated).all(dim=2).any(dim=0) == appended).all()


@pytest.mark.parametrize("empty", [(0,), (0, 1)])
def test_images_without_objects_have_finite_losses(
    images: ImageBatch, targets: DetectionTargets, empty: tuple[int, ...]
):
    for number in empty:
        for part in (targets.boxes, targets.classes, targets.attributes):
            part[number] = part[number][:0]
    model = make(ATTRIBUTES).train()
    regions = model(images, None, targets)
    assert set(regions.losses) == LOSSES | {"loss_attribute"}
    assert all(loss.mean.isfinite() for loss in regions.losses.values())
    if len(empty) == 2:
        assert regions.losses["loss_box_reg"].mean == regions.losses["loss_rpn_loc"].mean == 0
        assert regions.losses["loss_attribute"].count == regions.losses["loss_attribute"].mean == 0
    total(regions).backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)


def test_targets_in_evaluation_mode_give_losses_beside_detections(images: ImageBatch, targets: DetectionTargets):
    model = make().eval()
    regions = model(images, None, targets)
    assert set(regions.losses) == LOSSES
    torch.testing.assert_close(regions.boxes, model(images).boxes)


@pytest.mark.parametrize(
    ("output", "freeze_at"),
    [("features", 0), ("features", 2), ("features", 4), ("class_logits", 0), ("class_logits", 5)],
)
def test_frozen_stages_get_no_gradient(images: ImageBatch, boxes: list[Tensor], output: str, freeze_at: int):
    model = make({"MODEL.BACKBONE.FREEZE_AT": freeze_at, "MODEL.RESNETS.NORM": "BN"}).train()
    regions = model(images, boxes)
    stages = [getattr(model.backbone, name) for name in ("stem", "res2", "res3", "res4")] + [model.roi_heads.res5]
    torch.cat(getattr(regions, output)).square().sum().backward()
    for level, stage in enumerate(stages, start=1):
        grads = [parameter.grad for parameter in stage.parameters()]
        assert all(grad is None for grad in grads) if level <= freeze_at else any(g.abs().sum() > 0 for g in grads)


@pytest.mark.parametrize("features_of", ["final", "proposal"])
def test_predicted_boxes_in_training_are_final_detections_found_in_chunks(
    images: ImageBatch, features_of: str, monkeypatch: pytest.MonkeyPatch
):
    """Without targets: the boxes of evaluation, of which alone the features are kept for the backward pass."""
    changes = {"MODEL.ROI_HEADS.FEATURES_OF": features_of, "MODEL.RESNETS.NORM": "BN"}
    model = make(changes | {"MODEL.RPN.POST_NMS_TOPK_TRAIN": 999, "MODEL.RPN.PRE_NMS_TOPK_TRAIN": 999}).eval()
    with torch.no_grad():
        expected = model(images, whole_image=True)
    live = model(images, whole_image=True)  # with gradients, in evaluation mode
    torch.testing.assert_close(torch.cat(live.features), torch.cat(expected.features))

    model.train().backbone.eval()  # the same maps in both modes
    monkeypatch.setattr(roi_heads, "CHUNK", 20)
    calls: list[tuple[int, bool, bool]] = []
    model.roi_heads.res5.register_forward_hook(
        lambda module, args, out: calls.append((len(out), torch.is_grad_enabled(), module.training))
    )
    regions = model(images, whole_image=True)
    assert calls == [(20, False, False)] * 3 + [(10 + 10 + 2, True, True)], "30 proposals per image, then 10 boxes"
    assert model.training
    assert not model.backbone.training, "parts are in their modes again"
    for number in range(2):
        torch.testing.assert_close(regions.boxes[number], expected.boxes[number])
        assert torch.equal(regions.classes[number], expected.classes[number])
        assert not regions.boxes[number].requires_grad
    torch.cat(regions.features).sum().backward()
    assert model.backbone.stem.conv1.weight.grad.abs().sum() > 0


def test_class_agnostic_boxes(images: ImageBatch, targets: DetectionTargets):
    model = make({"MODEL.ROI_BOX_HEAD.CLS_AGNOSTIC_BBOX_REG": True})
    assert model.roi_heads.box_predictor.bbox_pred.out_features == 4
    total(model.train()(images, None, targets)).backward()
    assert [len(rows) for rows in model.eval()(images).boxes] == [10, 10]


def test_grid_of_anchors_has_fixed_stride_and_offset():
    anchors = AnchorGenerator(make_cell_anchors((10,), (1.0,)), 16, AnchorConfig(offset=0.5))(2, 3)
    centres = (anchors[:, :2] + anchors[:, 2:]) / 2
    assert centres.tolist() == [[8, 8], [24, 8], [40, 8], [8, 24], [24, 24], [40, 24]]


def test_diverged_training_is_an_error_and_evaluation_drops_what_is_not_finite(
    images: ImageBatch, targets: DetectionTargets
):
    model = make()
    with torch.no_grad():
        model.proposal_generator.rpn_head.anchor_deltas.bias[0] = float("nan")
    with pytest.raises(FloatingPointError, match="diverged"):
        model.train()(images, None, targets)
    regions = model.eval()(images)
    assert all(rows.isfinite().all() for rows in regions.boxes)


def test_impossible_boxes_and_labels_are_named(images: ImageBatch, boxes: list[Tensor], targets: DetectionTargets):
    bad = torch.tensor([9.0, 1.0, 1.0, 9.0])
    with pytest.raises(UserError, match=r"second\.jpg: box 1 \["):
        make()(images, [boxes[0], torch.cat((boxes[1], bad[None]))])
    for wrong in (-1, NUM_CLASSES):
        with pytest.raises(UserError, match=r"class label .*MODEL\.ROI_HEADS\.NUM_CLASSES"):
            make()(images, None, dataclasses.replace(targets, classes=[torch.tensor([0, wrong, 2]), torch.tensor([3])]))
    targets.boxes[0][2] = bad
    with pytest.raises(UserError, match=r"first\.jpg: annotated box 2 \["):
        make()(images, None, targets)


def test_a_mobilenet_trains_above_its_frozen_stages(images: ImageBatch, boxes: list[Tensor]):
    small = {"MODEL.ROI_HEADS.NUM_CLASSES": 3, "MODEL.ROI_BOX_HEAD.FC_DIM": 16}
    model = make(small, load_tree(PUBLISHED / "torchvision_mobilenet_v3_large_320_fpn.yaml")).train()
    torch.cat(model(images, boxes).features).square().sum().backward()
    trained = {name.split(".")[2] for name, value in model.named_parameters() if value.grad is not None}
    # torchvision's trainable_backbone_layers=3 leaves blocks 0 .. 6 as they are
    assert {"7", "16", "inner_blocks"} <= trained and not {str(number) for number in range(7)} & trained


def test_roi_masks_multiply_the_pooled_map_before_the_box_head(images: ImageBatch, boxes: list[Tensor]):
    model = make({"MODEL.ROI_BOX_HEAD.REGION_FEATURE": "mean"}, FPN).eval()
    assert model.map_size == 7
    masks = [torch.rand(3, 7, 7), torch.ones(1, 7, 7)]
    regions = model(images, boxes, roi_masks=masks, whole_image=True)
    plain = model(images, boxes, whole_image=True)
    torch.testing.assert_close(regions.features[1], plain.features[1])
    torch.testing.assert_close(regions.features[0][0], plain.features[0][0])  # the whole image is not masked
    features = model.features(images)
    maps = model.roi_heads.pool([features[name] for name in model.roi_heads.in_features], to_rois(boxes[:1]))
    masked = maps * masks[0][:, None]
    torch.testing.assert_close(regions.features[0][1:], masked.mean(dim=(2, 3)))
    logits = model.roi_heads.box_predictor.class_logits(model.roi_heads.box_head(masked).predictor)
    torch.testing.assert_close(regions.class_logits[0][1:], logits)


def test_fpn_in_bfloat16_under_autocast(images: ImageBatch, boxes: list[Tensor], targets: DetectionTargets):
    model = make({}, FPN).train()
    torch.manual_seed(4)
    with torch.autocast("cpu", torch.bfloat16):
        features = model.features(images)
        pooled = model.roi_heads.pool([features[name] for name in model.roi_heads.in_features], to_rois(boxes))
        regions = model(images, boxes, targets)
    assert features["p2"].dtype == torch.bfloat16
    assert pooled.dtype == torch.float32
    assert regions.class_logits[0].dtype == torch.float32
    total(regions).backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    exact = model(images, boxes)
    distance = (torch.cat(regions.features).float() - torch.cat(exact.features)).norm()
    assert distance <= 0.05 * torch.cat(exact.features).norm()


# Torchvision's own models give the same boxes, scores, features and losses.

CLASSES = 6
PROPOSALS = 30  # of an image, at most; fewer than torchvision's, so that the tests are fast
LOGITS_STD = 2.0  # of the class logits: there are detections, and few probabilities that are 1 in float32
SIDE = 136  # the short edge of the images, pixels: p6 gets a stride other than 64
ALL = 10**6
MODELS = {
    "fasterrcnn_resnet50_fpn": "torchvision_R_50_FPN",
    "fasterrcnn_resnet50_fpn_v2": "torchvision_R_50_FPN_v2",
    "fasterrcnn_mobilenet_v3_large_fpn": "torchvision_mobilenet_v3_large_fpn",
    "fasterrcnn_mobilenet_v3_large_320_fpn": "torchvision_mobilenet_v3_large_320_fpn",
}


class Pair(NamedTuple):
    """Torchvision's model in evaluation mode, and the same network here."""

    theirs: nn.Module
    ours: FasterRCNN
    floats: list[Tensor]  # torchvision's input, RGB in 0 .. 1
    batch: ImageBatch  # the same images


def drawn_images() -> list[np.ndarray]:
    """uint8 RGB images of two sizes with rectangles on noise."""
    generator = np.random.default_rng(0)
    images = []
    for height, width in ((SIDE, 193), (177, SIDE)):
        image = generator.integers(0, 255, (height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8)
        image = image.repeat(8, axis=0).repeat(8, axis=1)[:height, :width].copy()
        for x, y, side in ((14, 20, 40), (68, 60, 55), (40, 100, 20)):
            image[y : y + side, x : x + side] = generator.integers(0, 255, 3)
        images.append(image)
    return images


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest) -> Pair:
    """In float64, whose sums never swap detections; statistics of the images and spread scores give detections."""
    torch.manual_seed(0)
    options = {"min_size": SIDE, "max_size": 10 * SIDE}  # the images have these sizes: nothing is resized
    options |= {f"rpn_post_nms_top_n_{mode}": PROPOSALS for mode in ("train", "test")}
    build = getattr(detection, request.param)
    model = build(weights=None, weights_backbone=None, num_classes=CLASSES + 1, **options).double().eval()
    pixels = drawn_images()
    floats = [torch.from_numpy(image).permute(2, 0, 1).double() / 255 for image in pixels]

    def take_statistics(norm: nn.Module, inputs: tuple[Tensor]) -> None:
        norm.running_mean.copy_(inputs[0].mean(dim=(0, 2, 3)))
        norm.running_var.copy_(inputs[0].var(dim=(0, 2, 3)))

    def spread(layer: nn.Linear, inputs: tuple[Tensor], logits: Tensor) -> None:
        layer.weight.mul_(LOGITS_STD / logits.std())

    heads = model.roi_heads
    norms = [part for part in model.modules() if isinstance(part, FrozenBatchNorm2d | nn.BatchNorm2d)]
    hooks = [norm.register_forward_pre_hook(take_statistics) for norm in norms]
    hooks.append(heads.box_predictor.cls_score.register_forward_hook(spread))
    with torch.no_grad():
        heads.box_predictor.bbox_pred.weight.mul_(5)
        model(floats)
    for hook in hooks:
        hook.remove()
    # Boxes and scores are float32 here, whatever the network computes in, as in Detectron2: scores that are equal in
    # float32 have an order in float64, and an overlap at the limit of the NMS may lie on either side of it.
    model.rpn.head.register_forward_hook(
        lambda head, inputs, outputs: tuple([level.float() for level in levels] for levels in outputs)
    )
    heads.box_predictor.register_forward_hook(lambda layer, inputs, outputs: tuple(part.float() for part in outputs))
    heads.box_roi_pool.register_forward_pre_hook(
        lambda pool, inputs: (inputs[0], [boxes.double() for boxes in inputs[1]], inputs[2])
    )

    flat = flatten(load_tree(PUBLISHED / f"{MODELS[request.param]}.yaml")) | {"MODEL.ROI_HEADS.NUM_CLASSES": CLASSES}
    flat |= {f"MODEL.RPN.POST_NMS_TOPK_{mode}": PROPOSALS for mode in ("TRAIN", "TEST")}
    config = DetectorConfig.from_flat(flat)
    detector = FasterRCNN(config).double().eval()
    load_weights(detector, from_torchvision_detector(model.state_dict()), request.param)
    sizes = [image.shape[:2] for image in pixels]
    batch = normalise_images(make_image_batch(pixels, sizes, ["a", "b"]), config.input)
    return Pair(model, detector, floats, dataclasses.replace(batch, pixels=batch.pixels.double()))


def test_torchvision_detects_the_same(pair: Pair):
    with torch.no_grad():
        expected, found = pair.theirs(pair.floats), pair.ours(pair.batch)
    assert sum(len(wanted["boxes"]) for wanted in expected) > 20
    for row, wanted in enumerate(expected):
        torch.testing.assert_close(found.scores[row], wanted["scores"].float(), rtol=1e-4, atol=1e-4)
        ours = torch.cat((found.boxes[row], found.classes[row][:, None] + 1), dim=1)
        theirs = torch.cat((wanted["boxes"], wanted["labels"][:, None]), dim=1)
        distances = torch.cdist(ours.double(), theirs.double(), p=torch.inf)
        assert distances.amin(dim=0).max() < 0.01 and distances.amin(dim=1).max() < 0.01, "ties may change places"


def test_torchvision_has_the_same_losses(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    """All anchors and all RoIs count, so that nothing is drawn at random."""
    boxes = [[[14.0, 20.0, 54.0, 60.0], [68.0, 60.0, 123.0, 115.0]], [[40.0, 100.0, 60.0, 120.0]]]
    boxes = [torch.tensor(rows, dtype=torch.float64) for rows in boxes]
    classes = [torch.tensor([1, 4]), torch.tensor([2])]
    everything = {"MODEL.RPN.BATCH_SIZE_PER_IMAGE": ALL, "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE": ALL}
    unsampled = FasterRCNN(DetectorConfig.from_flat(pair.ours.config.to_flat() | everything)).double()
    unsampled.load_state_dict(pair.ours.state_dict())
    for sampler in (pair.theirs.rpn.fg_bg_sampler, pair.theirs.roi_heads.fg_bg_sampler):
        monkeypatch.setattr(sampler, "batch_size_per_image", ALL)
    targets = [{"boxes": rows, "labels": labels + 1} for rows, labels in zip(boxes, classes, strict=True)]
    with evaluation_mode(pair.theirs):
        for network in (pair.theirs, unsampled):
            network.train()
            for part in network.modules():
                if isinstance(part, nn.BatchNorm2d):  # one that learns would see other statistics
                    part.eval()
        expected = pair.theirs(pair.floats, targets)
        found = unsampled(pair.batch, None, DetectionTargets(boxes, classes)).losses
    names = {"loss_cls": "loss_classifier", "loss_box_reg": "loss_box_reg"}
    names |= {"loss_rpn_cls": "loss_objectness", "loss_rpn_loc": "loss_rpn_box_reg"}
    for ours, theirs in names.items():
        assert found[ours].mean.item() == pytest.approx(expected[theirs].item(), rel=1e-4), ours
