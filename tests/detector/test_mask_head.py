"""The mask head: equal to Detectron2's, forward and gradient, as part of both kinds of detectors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file

from detector.checkpoint import load_checkpoint, save_weights
from detector.config import DetectorConfig, MaskHeadConfig
from detector.errors import UserError
from detector.faster_rcnn import FasterRCNN
from detector.mask_head import MaskHead, crop_masks, mask_losses, paste_mask
from detector.roi_pooler import to_rois
from detector.structures import ImageBatch

ROOT = Path(__file__).parents[2]
# Detectron2 (commit 02b5c4e): `MaskRCNNConvUpsampleHead`, `mask_rcnn_loss`, `BitMasks.crop_and_resize` and
# `paste_masks_in_image` on random polygons and boxes, some of which reach beyond the image
GOLDEN = load_file(ROOT / "tests/golden/mask_head/detectron2.safetensors")
CONFIGS = {
    "fpn": MaskHeadConfig(num_conv=4, conv_dim=8, class_agnostic=True),
    "c4": MaskHeadConfig(conv_dim=8),
}


def golden(kind: str, part: str = "") -> dict[str, torch.Tensor]:
    prefix = f"{kind}/{part}"
    return {name.removeprefix(prefix): value for name, value in GOLDEN.items() if name.startswith(prefix)}


@pytest.mark.parametrize("kind", CONFIGS)
def test_head_and_loss_equal_detectron2(kind: str) -> None:
    expected = golden(kind)
    maps = expected["maps"].clone().requires_grad_()
    head = MaskHead(CONFIGS[kind], maps.shape[1], num_classes=expected["logits"].shape[1])
    head.load_state_dict(golden(kind, "state/"))
    logits = head(maps, expected["classes"])
    column = torch.zeros_like(expected["classes"]) if CONFIGS[kind].class_agnostic else expected["classes"]
    torch.testing.assert_close(logits, expected["logits"][torch.arange(5), column], rtol=1e-5, atol=1e-4)
    loss = mask_losses(logits, expected["targets"]).mean()
    torch.testing.assert_close(loss, expected["loss"][0], rtol=1e-5, atol=1e-6)
    loss.backward()
    torch.testing.assert_close(maps.grad, expected["maps_grad"], rtol=1e-4, atol=1e-5)
    for name, parameter in head.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[f"grad/{name}"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", CONFIGS)
def test_cropped_targets_equal_detectron2(kind: str) -> None:
    expected = golden(kind)
    cropped = crop_masks(expected["masks"], expected["boxes"], expected["targets"].shape[-1])
    assert torch.equal(cropped, expected["targets"])


@pytest.mark.parametrize("kind", CONFIGS)
def test_pasted_masks_equal_detectron2(kind: str) -> None:
    expected = golden(kind)
    column = torch.zeros_like(expected["classes"]) if CONFIGS[kind].class_agnostic else expected["classes"]
    probabilities = expected["logits"][torch.arange(5), column].sigmoid()
    for row, box in enumerate(expected["boxes"]):
        assert torch.equal(paste_mask(probabilities[row], box, (60, 90)), expected["pasted"][row])


def test_mask_of_a_box_outside_the_image_or_without_area_is_empty() -> None:
    probabilities = torch.ones(4, 4)
    for box in ([50.0, 5.0, 60.0, 9.0], [-9.0, -9.0, -4.0, -4.0], [5.0, 5.0, 5.0, 9.0]):
        assert not paste_mask(probabilities, torch.tensor(box), (20, 30)).any()
    assert paste_mask(probabilities, torch.tensor([-5.0, -5.0, 50.0, 50.0]), (20, 30)).all()


def detector_config(name: str, **mask_head: object) -> DetectorConfig:
    tree = {"_BASE_": str(ROOT / f"configs/detector/{name}.yaml")}
    return DetectorConfig.from_yaml(tree | {"MODEL": {"MASK_ON": True, "ROI_MASK_HEAD": {"CONV_DIM": 8} | mask_head}})


def small_batch() -> ImageBatch:
    pixels = torch.randint(0, 256, (2, 3, 64, 96), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    sizes = torch.tensor([[64, 96], [60, 80]])
    return ImageBatch(pixels, sizes, sizes, ["a.jpg", "b.jpg"])


@pytest.mark.parametrize(("name", "side"), [("tiny", 8), ("tiny_fpn", 28)])
def test_gradient_of_masks_reaches_the_backbone_of_both_kinds_of_detectors(name: str, side: int) -> None:
    torch.manual_seed(0)
    detector = FasterRCNN(detector_config(name))
    boxes = [torch.tensor([[4.0, 4.0, 40.0, 50.0]]), torch.tensor([[10.0, 8.0, 70.0, 40.0], [0.0, 0.0, 20.0, 20.0]])]
    regions = detector(small_batch(), boxes)
    logits = detector.mask_logits(regions.maps, to_rois(boxes), torch.tensor([0, 1, 2]))
    assert logits.shape == (3, side, side)
    mask_losses(logits, torch.rand_like(logits) > 0.5).sum().backward()
    first = next(detector.backbone.parameters())
    assert first.grad is not None and first.grad.abs().max() > 0


def test_mask_head_is_saved_and_loaded_with_detectron2s_names(tmp_path: Path) -> None:
    config = detector_config("tiny_fpn", NUM_CONV=2)
    saved = FasterRCNN(config)
    names = [name for name in saved.state_dict() if name.startswith("roi_heads.mask_head.")]
    assert names[0] == "roi_heads.mask_head.mask_fcn1.weight"
    assert names[-1] == "roi_heads.mask_head.predictor.bias"
    path = tmp_path / "model_final.pth"
    save_weights(saved.state_dict(), path)
    loaded = FasterRCNN(config)
    assert not load_checkpoint(loaded, path).missing
    assert torch.equal(loaded.roi_heads.mask_head.deconv.weight, saved.roi_heads.mask_head.deconv.weight)
    fewer_layers = FasterRCNN(detector_config("tiny_fpn", NUM_CONV=1))
    with pytest.raises(UserError, match="no_mask_head"):  # layers of the head are never dropped in silence
        load_checkpoint(fewer_layers, path)
    report = load_checkpoint(fewer_layers, path, expect="no_mask_head")
    assert all(name.startswith("roi_heads.mask_head.") for name in report.missing)
    without_head = FasterRCNN(DetectorConfig.from_yaml({"_BASE_": str(ROOT / "configs/detector/tiny_fpn.yaml")}))
    load_checkpoint(without_head, path)  # the box part of a Mask R-CNN
    with pytest.raises(UserError, match="has no mask head"):
        without_head.mask_logits({}, torch.zeros(0, 5), torch.zeros(0, dtype=torch.long))


def test_a_mask_per_class_is_new_for_other_classes_and_the_rest_of_the_head_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "model_final.pth"
    saved = FasterRCNN(detector_config("tiny_fpn", NUM_CONV=2))
    save_weights(saved.state_dict(), path)
    config = detector_config("tiny_fpn", NUM_CONV=2)
    heads = structs.replace(config.roi_heads, num_classes=config.roi_heads.num_classes + 3)
    loaded = FasterRCNN(structs.replace(config, roi_heads=heads))
    report = load_checkpoint(loaded, path, expect="no_predictor")
    prefixes = ("roi_heads.box_predictor.", "roi_heads.mask_head.predictor.")
    assert report.missing and all(name.startswith(prefixes) for name in report.missing)
    assert torch.equal(loaded.roi_heads.mask_head.deconv.weight, saved.roi_heads.mask_head.deconv.weight)
    agnostic = FasterRCNN(detector_config("tiny_fpn", NUM_CONV=2, CLS_AGNOSTIC_MASK=True))
    with pytest.raises(UserError, match=r"mismatched \(roi_heads.mask_head.predictor.weight"):
        load_checkpoint(agnostic, path, expect="no_predictor")
    with pytest.raises(UserError, match=r"roi_heads.mask_head.mask_fcn2"):
        load_checkpoint(FasterRCNN(detector_config("tiny_fpn", NUM_CONV=1)), path, expect="no_predictor")


def test_config_of_the_mask_head_is_written_and_read() -> None:
    config = detector_config("tiny_fpn", NUM_CONV=2, CLS_AGNOSTIC_MASK=True)
    assert DetectorConfig.from_flat(config.to_flat()) == config
    plain = DetectorConfig.from_yaml({"_BASE_": str(ROOT / "configs/detector/tiny_fpn.yaml")})
    assert not any("MASK_HEAD" in key for key in plain.to_flat())
