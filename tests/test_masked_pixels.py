"""LXMERT's region objectives from pixels: what is hidden in the image reaches no logit of any of them.

As `test_hiding.py` tests it for VL-BERT, here with the encoders of LXMERT and VisualBERT. With the hiding off the same
pixels do change the logits, so the tests can fail.
"""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
import torch
from torch import Tensor

from e2e_vl.encoders.base import Encoder
from e2e_vl.encoders.lxmert import LxmertEncoder, LxmertEncoderConfig
from e2e_vl.encoders.visual_bert import VisualBertEncoder, VisualBertEncoderConfig
from e2e_vl.examples import Targets
from e2e_vl.model import VisionLanguageModel
from e2e_vl.structures import Batch
from e2e_vl.tasks.pretraining import PretrainingTargets
from tests.tasks.tiny_pretraining import (
    CLASSES,
    VOCABULARY,
    assert_same,
    is_same,
    make_batch,
    make_detector,
    make_pairs,
    put_together,
)

ATTRIBUTES = 6
REGION_OBJECTIVES = ("object_labels", "attribute_labels", "region_features")
OBJECTIVES = {
    "masked_words": {"weight": 1.0},
    "masked_text": 0.0,
    "masked_regions": 0.0,
    "relationship": 1.0,
    "object_labels": {"weight": 1.0, "classes": CLASSES - 1},
    "attribute_labels": {"weight": 1.0, "classes": ATTRIBUTES},
    "region_features": 1.0,
}
LAYERS = {"lxmert": {"l_layers": 1, "r_layers": 1, "x_layers": 1}, "visual_bert": {"num_hidden_layers": 2}}
OF_TWO_IMAGES = {"lxmert": {"max_images": 2}, "visual_bert": {"region_types": [0, 1]}}


def make_model(
    name: str, colour: str = "mean", mask_probability: float = 1.0, **encoder: object
) -> VisionLanguageModel:
    """With the same random weights for every chance of a region to be hidden."""
    torch.manual_seed(0)
    detector = make_detector(attributes=ATTRIBUTES)
    common = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
    common |= {"feature_dim": detector.feature_dim, "initializer_range": 0.3, "max_position_embeddings": 16}
    settings = common | LAYERS[name] | OF_TWO_IMAGES[name]
    made: Encoder
    if name == "lxmert":
        made = LxmertEncoder(LxmertEncoderConfig(**settings))
    else:
        made = VisualBertEncoder(VisualBertEncoderConfig(**settings))
    rule = {"region_probability": 0.6, "mask_probability": mask_probability, "masked_pixels": colour}
    return put_together(detector, made, OBJECTIVES, max_length=None, **rule).eval()


def with_targets(batch: Batch) -> Batch:
    """The batch with what the objectives of regions learn from, which is nothing of a text."""
    parts = {name: part for name, part in batch.targets.parts.items() if OBJECTIVES.get(name)}
    parts |= {name: Targets() for name in REGION_OBJECTIVES}
    return dataclasses.replace(batch, targets=PretrainingTargets(parts))


def with_other_pixels(batch: Batch, hidden: list[Tensor]) -> Batch:
    """Noise in these boxes, in the last row and column too."""
    pixels = batch.images.pixels.clone()
    torch.manual_seed(1)
    for own, rows in zip(pixels, hidden, strict=True):
        for x1, y1, x2, y2 in rows.int().tolist():
            own[:, y1 : y2 + 1, x1 : x2 + 1] += 100 * torch.randn(3, y2 + 1 - y1, x2 + 1 - x1)
    return dataclasses.replace(batch, images=dataclasses.replace(batch.images, pixels=pixels))


@pytest.mark.parametrize("colour", ["mean", "black"])
@pytest.mark.parametrize("make", [make_batch, make_pairs])
@pytest.mark.parametrize("encoder", LAYERS)
def test_hidden_pixels_change_no_logit_of_a_region_objective(encoder, make, colour):
    model, open_model = make_model(encoder, colour), make_model(encoder, colour, mask_probability=0.0)
    batch = with_targets(make())
    prepared = model.mask_regions(batch)
    hidden = [rows[mask] for rows, mask in zip(prepared.boxes, prepared.masked_regions.is_masked, strict=True)]
    assert sum(map(len, hidden)) in range(1, sum(map(len, prepared.boxes)))
    other = with_other_pixels(batch, hidden)
    with torch.no_grad():
        first, second = model(batch), model(other)
        seen = [open_model(one) for one in (batch, other)]
    for name in (*REGION_OBJECTIVES, "masked_words", "relationship"):
        assert len(first.task.parts[name]) > 0
        assert_same(first.task.parts[name], second.task.parts[name])
        assert not is_same(*(output.task.parts[name] for output in seen)), name
    for name in ("regions", "text", "summary"):
        assert_same(getattr(first.encoded, name), getattr(second.encoded, name))
    assert not any(rows.any() for rows in seen[0].batch.masked_regions.is_masked)
    for rows, wanted in zip(
        seen[0].batch.masked_regions.is_labelled, first.batch.masked_regions.is_labelled, strict=True
    ):
        assert torch.equal(rows, wanted)  # the same regions are predicted, and now they are seen

    # What is to be learned is another one, so the losses of the same logits differ.
    labels = [output.batch.region_labels for output in (first, second)]
    for name in ("features", "detected_scores", "detected_attribute_scores"):
        assert not is_same(*(torch.cat(getattr(one, name)) for one in labels)), name
    for name in REGION_OBJECTIVES:
        assert not is_same(*(output.losses[name].mean for output in (first, second))), name


@pytest.mark.parametrize("encoder", LAYERS)
def test_a_region_that_gets_anothers_feature_does_not_show_its_own(encoder):
    """LXMERT swaps some of the chosen regions instead of hiding them: their pixels stay, their feature goes."""
    batch = with_targets(make_batch())
    shown = make_model(encoder, mask_probability=0.0)
    swapped = make_model(encoder, mask_probability=0.0)
    swapped.task.config = msgspec.structs.replace(swapped.task.config, replace_probability=1.0)
    prepared = swapped.mask_regions(batch)
    assert any((replacement_index >= 0).any() for replacement_index in prepared.masked_regions.replacement_index)
    with torch.no_grad():
        outputs = [model(batch) for model in (shown, swapped)]
        regions, _, _ = swapped.encode(prepared)
    own = torch.cat(outputs[0].regions.features)
    replacement_index = torch.cat(prepared.masked_regions.replacement_index)
    expected = torch.where((replacement_index >= 0)[:, None], own[replacement_index.clamp(min=0)], own)
    assert_same(torch.cat(regions.features), expected)
    for name in REGION_OBJECTIVES:
        assert not is_same(*(output.task.parts[name] for output in outputs)), name
        # the label is still the region's own
    assert_same(*(torch.cat(output.batch.region_labels.features) for output in outputs))
