"""The network of R2C: what it reads, its whole image, its canvas, and what is frozen. Its numbers: tests/parity."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torchvision.models.resnet import Bottleneck, ResNet

from detector.backbones.layers import BatchStatistics
from detector.checkpoint import load_checkpoint
from detector.config import DetectorConfig
from detector.errors import UserError
from detector.faster_rcnn import FasterRCNN
from detector.r2c import NetworkSizes, R2CNetwork
from detector.structures import DetectionTargets, ImageBatch, Regions

SETTINGS = {"R2C.FEATURE_DIM": 6, "R2C.MASK_CHANNELS": 4, "R2C.CLASS_DIM": 3, "ROI_HEADS.NUM_CLASSES": 5}
SETTINGS |= {"RESNETS.NORM": "BN", "BACKBONE.FREEZE_AT": 0, "ROI_BOX_HEAD.POOLER_RESOLUTION": 7}
SETTINGS |= {"ROI_BOX_HEAD.POOLER_TYPE": "ROIAlign"}
SIZES = NetworkSizes(4, (1, 1, 1, 1), (2, 4, 4, 8))
HEIGHT, WIDTH = 48, 64
BOXES = torch.tensor([[2.0, 3.0, 30.0, 40.0], [20.0, 5.0, 60.0, 44.0]])
CLASSES = torch.tensor([0, 4])


def config_of(**settings: Any) -> DetectorConfig:
    return DetectorConfig.from_flat({f"MODEL.{key}": value for key, value in {**SETTINGS, **settings}.items()})


def network(**settings: Any) -> R2CNetwork:
    torch.manual_seed(0)
    return R2CNetwork(config_of(**settings), SIZES).eval()


def images(number: int = 1) -> ImageBatch:
    torch.manual_seed(1)
    sizes = torch.tensor([[HEIGHT, WIDTH]]).expand(number, 2)
    return ImageBatch(torch.randn(number, 3, HEIGHT, WIDTH), sizes, sizes, [f"{n}.jpg" for n in range(number)])


@torch.no_grad()
def run(detector: R2CNetwork, batch: ImageBatch | None = None, **changes: Any) -> Regions:
    given = {"boxes": [BOXES], "box_classes": [CLASSES], **changes}
    return detector(images() if batch is None else batch, **given)


def test_masks_are_1_and_classes_play_no_part_if_the_settings_say_so():
    detector = network(**{"R2C.CLASS_DIM": 0})
    assert not [name for name in detector.state_dict() if "class_embedding" in name]
    one, other = (run(detector, box_classes=[torch.tensor(rows)]).features[0] for rows in ([0, 4], [2, 1]))
    assert torch.equal(one, other)
    assert torch.equal(one, run(detector, roi_masks=[torch.ones(2, 14, 14)]).features[0])


def test_the_whole_image_is_described_with_its_last_pixel_and_a_class_of_its_own():
    detector = network()
    whole = torch.tensor([[0.0, 0.0, WIDTH, HEIGHT]])
    row = run(detector, boxes=[whole], box_classes=[torch.tensor([-1])]).features[0]
    regions = run(detector, whole_image=True)
    assert torch.allclose(regions.features[0][:1], row, atol=1e-5)
    assert regions.boxes[0].tolist() == [[0, 0, WIDTH - 1, HEIGHT - 1], *BOXES.tolist()]
    assert not torch.allclose(run(detector, boxes=[whole - 1], box_classes=[torch.tensor([-1])]).features[0], row)


def test_boxes_move_with_the_image_on_its_canvas():
    detector, plain = network(**{"R2C.CANVAS": [81, 105]}), network()
    plain.load_state_dict(detector.state_dict())
    sizes = torch.tensor([[81, 105]])  # half of the room, 16.5 and 20.5, is truncated
    pasted = ImageBatch(detector.place_on_canvas(images())[0], sizes, sizes, ["0.jpg"])
    regions, moved = run(detector), BOXES + torch.tensor([20, 16, 20, 16])
    assert torch.allclose(regions.features[0], run(plain, pasted, boxes=[moved]).features[0], atol=1e-5)
    assert torch.equal(regions.boxes[0], BOXES)


def test_in_training_the_place_on_the_canvas_is_random():
    detector = network(**{"R2C.CANVAS": [80, 96]}).train()
    batch = images(8)
    pixels, shifts = detector.place_on_canvas(batch)
    assert len(shifts.unique(dim=0)) > 4
    assert (shifts >= 0).all() and (shifts <= torch.tensor([96 - WIDTH, 80 - HEIGHT])).all()
    left, top = shifts[3].long().tolist()
    assert torch.equal(pixels[3, :, top : top + HEIGHT, left : left + WIDTH], batch.pixels[3])


@pytest.mark.parametrize(("statistics", "moves"), [("stored", False), ("batch", True)])
def test_frozen_stages(statistics, moves):
    """`moves`: another image in the batch changes the features, because the batch's statistics normalise."""
    detector = network(**{"BACKBONE.FREEZE_AT": 4, "R2C.FROZEN_STATISTICS": statistics})
    trained = {name for name, one in detector.named_parameters() if one.requires_grad}
    assert trained and not any(name.startswith("backbone.") for name in trained)
    norms = [module for module in detector.backbone.modules() if isinstance(module, BatchStatistics)]
    before = [norm.running_mean.clone() for norm in norms]
    batch = images(2)
    one = ImageBatch(batch.pixels[:1], batch.sizes[:1], batch.original_sizes[:1], batch.names[:1])
    both = run(detector, batch, boxes=[BOXES, BOXES], box_classes=[CLASSES, CLASSES]).features[0]
    assert torch.allclose(run(detector, one).features[0], both, atol=1e-5) != moves
    detector.train()
    run(detector, one)
    assert bool(norms) == moves
    assert all(torch.equal(norm.running_mean, old) for norm, old in zip(norms, before, strict=True))


def test_it_starts_from_torchvision(tmp_path):
    """Stages in which torchvision doubles the channels, one block each."""
    theirs = ResNet(Bottleneck, [1, 1, 1, 1])
    torch.save(theirs.state_dict(), tmp_path / "x.pth")
    detector = R2CNetwork(config_of(), NetworkSizes(64, (1, 1, 1, 1), (64, 128, 256, 512)))
    report = load_checkpoint(detector, tmp_path / "x.pth", expect="backbone")
    assert report.layout == "torchvision" and set(report.unexpected) == {"fc.weight", "fc.bias"}
    assert all(name.startswith("roi_heads.") and "res5" not in name for name in report.missing)
    assert torch.equal(detector.roi_heads.res5[0].conv2.weight, theirs.layer4[0].conv2.weight)


@pytest.mark.parametrize(
    "changes", [{"boxes": None}, {"box_classes": None}, {"targets": DetectionTargets([BOXES], [CLASSES])}]
)
def test_it_needs_boxes_with_classes_and_has_no_losses(changes):
    with pytest.raises(UserError, match=r"given boxes .*no detection losses"):
        run(network(), **changes)
    with pytest.raises(UserError, match=r"detector\.backend"):
        FasterRCNN(config_of())
