"""The built-in FPN detector gives the numbers of torchvision's own models: boxes, scores, features and losses.

Weights are random; each batch norm takes the statistics of the images, so that all activations keep their range, and
the class scores are spread, so that there are detections. Both networks compute in float64: in float32 two orders of
summation are enough to swap detections of nearly equal scores. Boxes and scores are float32 in both (see
`choose_in_float32`), because scores that are equal in float32 have an order in float64, and an overlap at the limit of
the NMS may lie on either side of it.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn
from torchvision.models import detection
from torchvision.ops import FrozenBatchNorm2d

from detector.checkpoint import load_weights
from detector.config import DetectorConfig, flatten, load_tree
from detector.faster_rcnn import FasterRCNN
from detector.images import make_image_batch
from detector.structures import DetectionTargets, ImageBatch
from detector.weight_names import from_torchvision_detector
from detector.zoo import PUBLISHED

CLASSES = 6
PROPOSALS = 30  # of an image, at most; fewer than torchvision's, so that the tests are fast
LOGITS_STD = 2.0  # of the class logits: there are detections, and few probabilities that are 1 in float32
SIDE = 136  # the short edge of the images, pixels: p6 gets a stride other than 64
MODELS = {
    "fasterrcnn_resnet50_fpn": "torchvision_R_50_FPN",
    "fasterrcnn_resnet50_fpn_v2": "torchvision_R_50_FPN_v2",
    "fasterrcnn_mobilenet_v3_large_fpn": "torchvision_mobilenet_v3_large_fpn",
    "fasterrcnn_mobilenet_v3_large_320_fpn": "torchvision_mobilenet_v3_large_320_fpn",
}


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


def calibrated(name: str, images: list[np.ndarray], proposals: int) -> nn.Module:
    """Torchvision's model in evaluation mode."""
    torch.manual_seed(0)
    sizes = {"min_size": SIDE, "max_size": 10 * SIDE}  # the images have these sizes: nothing is resized
    numbers = {f"rpn_post_nms_top_n_{mode}": proposals for mode in ("train", "test")}
    model = (
        getattr(detection, name)(weights=None, weights_backbone=None, num_classes=CLASSES + 1, **sizes, **numbers)
        .double()
        .eval()
    )

    def take_statistics(norm: nn.Module, inputs: tuple[torch.Tensor]) -> None:
        norm.running_mean.copy_(inputs[0].mean(dim=(0, 2, 3)))
        norm.running_var.copy_(inputs[0].var(dim=(0, 2, 3)))

    norms = [part for part in model.modules() if isinstance(part, FrozenBatchNorm2d | nn.BatchNorm2d)]

    def spread(layer: nn.Linear, inputs: tuple[torch.Tensor], logits: torch.Tensor) -> None:
        layer.weight.mul_(LOGITS_STD / logits.std())

    hooks = [norm.register_forward_pre_hook(take_statistics) for norm in norms]
    hooks.append(model.roi_heads.box_predictor.cls_score.register_forward_hook(spread))
    with torch.no_grad():
        model.roi_heads.box_predictor.bbox_pred.weight.mul_(5)
        model(as_floats(images))
    for hook in hooks:
        hook.remove()
    choose_in_float32(model)
    return model


def choose_in_float32(model: nn.Module) -> None:
    """Let torchvision's float64 model decode and choose boxes as a float32 model does.

    This detector does so whatever its network computes in, as Detectron2 does.
    """
    heads = model.roi_heads
    model.rpn.head.register_forward_hook(
        lambda head, inputs, outputs: tuple([level.float() for level in levels] for levels in outputs)
    )
    heads.box_predictor.register_forward_hook(lambda layer, inputs, outputs: tuple(part.float() for part in outputs))
    heads.box_roi_pool.register_forward_pre_hook(
        lambda pool, inputs: (inputs[0], [boxes.double() for boxes in inputs[1]], inputs[2])
    )


def as_floats(images: list[np.ndarray]) -> list[torch.Tensor]:
    return [torch.from_numpy(image).permute(2, 0, 1).double() / 255 for image in images]


def builtin(name: str, model: nn.Module, proposals: int) -> FasterRCNN:
    """The same network here."""
    flat = flatten(load_tree(PUBLISHED / f"{MODELS[name]}.yaml")) | {"MODEL.ROI_HEADS.NUM_CLASSES": CLASSES}
    flat |= {f"MODEL.RPN.POST_NMS_TOPK_{mode}": proposals for mode in ("TRAIN", "TEST")}
    detector = FasterRCNN(DetectorConfig.from_flat(flat)).double()
    load_weights(detector, from_torchvision_detector(model.state_dict()), name)
    return detector.eval()


def batch_of(images: list[np.ndarray], detector: FasterRCNN) -> ImageBatch:
    config = detector.config.input
    sizes = [image.shape[:2] for image in images]
    batch = make_image_batch(images, sizes, ["image"] * len(images), config.pixel_mean, config.pixel_std)
    return dataclasses.replace(batch, pixels=batch.pixels.double())


@pytest.fixture(scope="module", params=list(MODELS))
def pair(request: pytest.FixtureRequest) -> tuple[nn.Module, FasterRCNN]:
    return make_pair(request.param, PROPOSALS)


def make_pair(name: str, proposals: int) -> tuple[nn.Module, FasterRCNN]:
    model = calibrated(name, drawn_images(), proposals)
    return model, builtin(name, model, proposals)


def as_rows(boxes: torch.Tensor, scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """[R, 6] in units in which 0.01 is the difference that is allowed."""
    return torch.cat((boxes.double(), 100 * scores.double()[:, None], labels.double()[:, None]), dim=1)


def assert_same_detections(model: nn.Module, detector: FasterRCNN, images: list[np.ndarray]) -> int:
    """Returns the number of detections of all images."""
    with torch.no_grad():
        expected = model(as_floats(images))
        found = detector(batch_of(images, detector))
    for row, wanted in enumerate(expected):
        ours = as_rows(found.boxes[row], found.scores[row], found.classes[row] + 1)
        theirs = as_rows(wanted["boxes"], wanted["scores"], wanted["labels"])
        assert len(ours) == len(theirs)
        torch.testing.assert_close(found.scores[row], wanted["scores"].float(), rtol=1e-4, atol=1e-4)
        # scores that are equal in float32 may change places
        distances = (ours[:, None] - theirs[None]).abs().amax(dim=2)
        assert distances.amin(dim=0).max() < 0.01 and distances.amin(dim=1).max() < 0.01
    return sum(len(wanted["boxes"]) for wanted in expected)


def test_detections(pair):
    assert assert_same_detections(*pair, drawn_images()) > 20


def test_features_of_given_boxes(pair):
    model, detector = pair
    images = drawn_images()
    boxes = [[[5.0, 6.0, 68.0, 60.0], [0.0, 0.0, 135.0, 115.0]], [[20.0, 27.0, 37.0, 40.0]]]
    boxes = [torch.tensor(rows, dtype=torch.float64) for rows in boxes]
    with torch.no_grad():
        resized, _ = model.transform(as_floats(images))
        maps = model.backbone(resized.tensors)
        expected = model.roi_heads.box_head(model.roi_heads.box_roi_pool(maps, boxes, resized.image_sizes))
        found = detector(batch_of(images, detector), boxes)
    scale = expected.abs().max()
    torch.testing.assert_close(torch.cat(found.features) / scale, expected / scale, rtol=1e-4, atol=1e-5)


def test_losses(pair):
    """All anchors and all RoIs count, so that nothing is drawn at random."""
    model, detector = pair
    images = drawn_images()
    boxes = [[[14.0, 20.0, 54.0, 60.0], [68.0, 60.0, 123.0, 115.0]], [[40.0, 100.0, 60.0, 120.0]]]
    boxes = [torch.tensor(rows, dtype=torch.float64) for rows in boxes]
    classes = [torch.tensor([1, 4]), torch.tensor([2])]
    everything = {"MODEL.RPN.BATCH_SIZE_PER_IMAGE": 10**6, "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE": 10**6}
    unsampled = FasterRCNN(DetectorConfig.from_flat(detector.config.to_flat() | everything)).double()
    unsampled.load_state_dict(detector.state_dict())
    samplers = model.rpn.fg_bg_sampler, model.roi_heads.fg_bg_sampler
    before = [sampler.batch_size_per_image for sampler in samplers]
    for sampler in samplers:
        sampler.batch_size_per_image = 10**6
    targets = [{"boxes": rows, "labels": labels + 1} for rows, labels in zip(boxes, classes, strict=True)]
    try:
        model.train()
        unsampled.train()
        for network in (model, unsampled):  # batch norms that learn would see other statistics
            for part in network.modules():
                if isinstance(part, nn.BatchNorm2d):
                    part.eval()
        expected = model(as_floats(images), targets)
        found = unsampled(batch_of(images, unsampled), None, DetectionTargets(boxes, classes)).losses
    finally:
        model.eval()
        for sampler, number in zip(samplers, before, strict=True):
            sampler.batch_size_per_image = number
    names = {"loss_cls": "loss_classifier", "loss_box_reg": "loss_box_reg"}
    names |= {"loss_rpn_cls": "loss_objectness", "loss_rpn_loc": "loss_rpn_box_reg"}
    for ours, theirs in names.items():
        assert found[ours].mean.item() == pytest.approx(expected[theirs].item(), rel=1e-4), ours
