"""What only the Detectron2 backend has; that it equals the built-in one is tested in tests/parity."""

from __future__ import annotations

import sys

import pytest
import torch

from detector.checkpoint import detector_class
from detector.config import DetectorConfig
from detector.errors import UserError
from detector.faster_rcnn import FasterRCNN
from detector.structures import DetectionTargets, ImageBatch

SMALL_FPN = {
    "MODEL": {
        "BACKBONE": {"NAME": "build_resnet_fpn_backbone", "FREEZE_AT": 0},
        "RESNETS": {
            "DEPTH": 50,
            "OUT_FEATURES": ["res2", "res3", "res4", "res5"],
            "RES2_OUT_CHANNELS": 16,
            "STEM_OUT_CHANNELS": 8,
            "WIDTH_PER_GROUP": 4,
            "NORM": "BN",
        },
        "FPN": {"IN_FEATURES": ["res2", "res3", "res4", "res5"], "OUT_CHANNELS": 16},
        "ANCHOR_GENERATOR": {"SIZES": [[32], [64], [128], [256], [512]]},
        "RPN": {
            "IN_FEATURES": ["p2", "p3", "p4", "p5", "p6"],
            "PRE_NMS_TOPK_TEST": 100,
            "POST_NMS_TOPK_TEST": 20,
            "POST_NMS_TOPK_TRAIN": 20,
        },
        "ROI_HEADS": {
            "NAME": "StandardROIHeads",
            "IN_FEATURES": ["p2", "p3", "p4", "p5"],
            "NUM_CLASSES": 7,
            "SCORE_THRESH_TEST": 0.05,
        },
        "ROI_BOX_HEAD": {"NAME": "FastRCNNConvFCHead", "NUM_FC": 2, "FC_DIM": 24, "POOLER_RESOLUTION": 7},
    }
}


def test_without_detectron2_choosing_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "detectron2", None)  # makes `import detectron2` fail, installed or not
    monkeypatch.delitem(sys.modules, "detector.detectron2_backend", raising=False)
    with pytest.raises(UserError, match="python -m pip install 'git"):
        detector_class("detectron2")
    assert detector_class("builtin") is FasterRCNN


@pytest.fixture(scope="module")
def images() -> ImageBatch:
    sizes = torch.tensor([[100, 130], [90, 120]])
    pixels = torch.randn(2, 3, 100, 130, generator=torch.Generator().manual_seed(0))
    pixels[1, :, 90:] = 0
    pixels[1, :, :, 120:] = 0
    return ImageBatch(pixels, sizes, sizes, ["first", "second"])


@pytest.fixture(scope="module")
def fpn():
    pytest.importorskip("detectron2", reason="Detectron2 is not installed")
    from detector.detectron2_backend import Detectron2Detector

    torch.manual_seed(0)
    return Detectron2Detector(DetectorConfig.from_yaml(SMALL_FPN))


@torch.no_grad()
def test_fpn_equals_detectron2s_own_forward_pass(fpn, images):
    from detectron2.modeling import build_model

    from detector.detectron2_backend import make_cfg

    model = build_model(make_cfg(fpn.config)).eval()
    assert model.state_dict().keys() == fpn.state_dict().keys()
    model.load_state_dict(fpn.state_dict())
    mean = torch.tensor(fpn.config.input.pixel_mean)[:, None, None]
    inputs = [
        {"image": pixels[:, :height, :width] + mean, "height": height, "width": width}
        for pixels, (height, width) in zip(images.pixels, images.sizes.tolist(), strict=True)
    ]
    read = []
    hook = model.roi_heads.box_predictor.register_forward_pre_hook(lambda module, args: read.append(args[0]))
    expected = [output["instances"] for output in model(inputs)]
    hook.remove()
    regions = fpn.eval()(images)
    for number, instances in enumerate(expected):
        assert len(instances) > 3
        assert torch.allclose(regions.boxes[number], instances.pred_boxes.tensor, atol=1e-2)
        assert torch.allclose(regions.scores[number], instances.scores, atol=1e-4)
        assert torch.equal(regions.classes[number], instances.pred_classes)

    sizes = [tuple(size) for size in images.sizes.tolist()]
    features = fpn.features(images)
    boxes = fpn.propose(fpn.run_rpn(features), sizes)
    described = fpn(images, boxes)  # what the last linear layers read, image by image
    assert torch.allclose(torch.cat(described.features), read[0], rtol=1e-3, atol=1e-3)


def test_fpn_trains_on_given_boxes(fpn, images):
    boxes = [torch.tensor([[3.0, 4, 50, 60], [10, 10, 90, 80]]), torch.tensor([[3.0, 4, 50, 60]])]
    targets = DetectionTargets(boxes, [torch.tensor([1, 2]), torch.tensor([3])])
    regions = fpn.train()(images, boxes, targets, whole_image=True)
    assert [rows.shape for rows in regions.features] == [(3, fpn.feature_dim), (2, fpn.feature_dim)]
    assert set(regions.losses) == {"loss_rpn_cls", "loss_rpn_loc", "loss_cls", "loss_box_reg"}
    (sum(loss.mean for loss in regions.losses.values()) + torch.cat(regions.features).sum()).backward()
    missing = [name for name, parameter in fpn.named_parameters() if parameter.grad is None]
    assert missing == []
