"""Selection rules, resizing and pixel masking against arrays recorded from the original code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from detector.boxes import best_class_boxes, max_conf, select_max_conf, select_max_nms
from detector.config import InputConfig, SelectionRule
from detector.images import ResizeRule, make_image_batch, mask_rectangles, normalise_images, resize_boxes, resize_image


@pytest.fixture(scope="module")
def detectron2(golden_root: Path) -> dict[str, torch.Tensor]:
    folder = golden_root / "detectron2"
    files = ("eval", "extras", "resize", "mask")
    return {key: value for name in files for key, value in load_file(folder / f"{name}.safetensors").items()}


@pytest.fixture(scope="module")
def tensor_notes(golden_root: Path) -> dict[str, str]:
    meta = json.loads((golden_root / "detectron2" / "meta.json").read_text())
    return {key: note["description"] for notes in meta["tensors"].values() for key, note in notes.items()}


def test_maxconf(detectron2: dict[str, torch.Tensor]):
    keys = [key for key in detectron2 if re.match(r"butd\.select\.maxconf_.*proposal_index", key)]
    assert keys
    for key in keys:
        low, high, threshold, image = re.match(r"butd\.select\.maxconf_(\d+)_(\d+)_([\d.]+)\.(image\d+)", key).groups()
        proposals, probs = detectron2[f"rpn.{image}.proposal_boxes"], detectron2[f"roi.{image}.class_probs"][:, :-1]
        confidence = max_conf(proposals, probs)
        assert torch.allclose(confidence.double(), detectron2[f"butd.select.maxconf.{image}.max_conf"], atol=1e-7)
        rows = select_max_conf(proposals, probs, SelectionRule(float(threshold), int(low), int(high)))
        assert torch.equal(rows, detectron2[key]), key


def test_maxnms(detectron2: dict[str, torch.Tensor]):
    keys = [key for key in detectron2 if re.match(r"butd\.select\.maxnms_.*proposal_index", key)]
    assert keys
    for key in keys:
        low, high, image = re.match(r"butd\.select\.maxnms_(\d+)_(\d+)\.(image\d+)", key).groups()
        size = detectron2[f"input.{image}.bgr_u8"].shape[:2]
        boxes, scores, classes = best_class_boxes(
            detectron2[f"roi.{image}.class_probs"][:, :-1], detectron2[f"roi.{image}.decoded_boxes"], size
        )
        rows, threshold = select_max_nms(boxes, scores, SelectionRule(0.2, int(low), int(high)))
        prefix = key.removesuffix("proposal_index")
        assert torch.equal(rows, detectron2[key]), key
        assert threshold == pytest.approx(float(detectron2[f"{prefix}nms_thresh"]))
        assert torch.allclose(boxes[rows], detectron2[f"{prefix}boxes"], atol=1e-3)
        assert torch.allclose(scores[rows], detectron2[f"{prefix}scores"], atol=1e-6)
        assert torch.equal(classes[rows], detectron2[f"{prefix}classes"])


def test_detectron2_resize(detectron2: dict[str, torch.Tensor], tensor_notes: dict[str, str]):
    cases = sorted({key.split(".")[1] for key in detectron2 if key.startswith("resize.")})
    assert cases
    for case in cases:
        before = detectron2[f"resize.{case}.input_bgr_u8"].numpy()
        after = detectron2[f"resize.{case}.output_bgr_u8"].numpy()
        note = tensor_notes[f"resize.{case}.output_bgr_u8"]
        short, long = re.search(r"short edge (\d+), max (\d+)", note).groups()
        size = ResizeRule(int(short), int(long), "detectron2").target_size(*before.shape[:2])
        assert size == after.shape[:2]
        assert np.array_equal(resize_image(Image.fromarray(before), size), after)
        boxes = resize_boxes(detectron2[f"resize.{case}.boxes_in"], before.shape[:2], size)
        assert torch.allclose(boxes, detectron2[f"resize.{case}.boxes_out"], rtol=0, atol=1e-9)


def test_outward_mask_rectangles(detectron2: dict[str, torch.Tensor]):
    keys = [key for key in detectron2 if key.startswith("mask.image") and key.endswith(".rects")]
    assert keys
    for key in keys:
        image = key.split(".")[1]
        boxes = detectron2[f"given.{image}.boxes"][detectron2[f"mask.{image}.box_rows"]]
        size = detectron2[f"input.{image}.bgr_u8"].shape[:2]
        assert torch.equal(mask_rectangles(boxes, size), detectron2[key])


def test_batch(detectron2: dict[str, torch.Tensor], golden_root: Path):
    images = [detectron2[f"input.image{number}.bgr_u8"].numpy() for number in range(len(detectron2["pre.batch"]))]
    config = json.loads((golden_root / "detectron2" / "meta.json").read_text())["config_effective"]
    sizes = [image.shape[:2] for image in images]
    colours = InputConfig(pixel_mean=tuple(config["PIXEL_MEAN"]), pixel_std=tuple(config["PIXEL_STD"]))
    batch = normalise_images(make_image_batch(images, sizes, ["a"] * len(images)), colours)
    assert torch.equal(batch.pixels, detectron2["pre.batch"])
    assert torch.equal(batch.sizes, detectron2["pre.image_sizes"])


def test_vl_bert_target_sizes(golden_root: Path):
    records = json.loads((golden_root / "vl_bert" / "data.json").read_text())["resize"]
    assert records
    for record in records:
        (width, height), (new_width, new_height) = record["size"], record["out"]
        assert ResizeRule(*record["scales"], "truncate").target_size(height, width) == (new_height, new_width), record


def test_vl_bert_network_input(golden_root: Path):
    """Resize, mirror, normalise and blank masked boxes: the official code's network input, pixel by pixel."""
    arrays = load_file(golden_root / "vl_bert" / "data.safetensors")
    settings = json.loads((golden_root / "vl_bert" / "data.json").read_text())["cc"]
    source = arrays["cc.image_uint8"].numpy()[:, :, ::-1]  # stored as RGB
    size = source.shape[:2]
    new_size = ResizeRule(*settings["scales"], "truncate").target_size(*size)
    resized = np.array(resize_image(Image.fromarray(source), new_size))
    order = arrays["cc.class_scores"].amax(1).argsort(descending=True, stable=True)
    whole = torch.tensor([[0.0, 0.0, size[1] - 1.0, size[0] - 1.0]])
    limit = torch.tensor([new_size[1], new_size[0]] * 2) - 1.0
    colours = InputConfig(pixel_mean=tuple(settings["pixel_means"]), pixel_std=(1.0, 1.0, 1.0))
    for number, case in enumerate(settings["cases"]):
        boxes = resize_boxes(torch.cat([whole, arrays["cc.boxes"][order]]), size, new_size)
        image = resized
        if case["flip"]:
            image = resized[:, ::-1]
            boxes[:, [0, 2]] = new_size[1] - 1 - boxes[:, [2, 0]]
        boxes = boxes.clamp(min=0).minimum(limit)
        is_masked = arrays[f"cc.{number}.mvrc_ops_before_truncation"] == 1
        rectangles = mask_rectangles(boxes[is_masked], new_size, "truncate").to(boxes.dtype)
        masked = normalise_images(make_image_batch([image], [size], ["cc"]), colours, [rectangles]).pixels[0]
        expected = arrays[f"cc.{number}.image"]
        assert torch.allclose(masked, expected, atol=1e-3), case
        assert torch.equal(masked == 0, expected == 0), case
