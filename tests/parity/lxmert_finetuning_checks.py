"""Fine-tuned models against arrays recorded from the official LXMERT code: logits, loss, gradients.

VQA is tested with `VQATask`; GQA's official model is the same one with another list of answers, and is tested with it
too. NLVR2's is tested with the encoder of two image slots and a head as `HEAD_OF_PAIRS` says: the layers that other
heads have, on a summary of twice the width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from detector.structures import ImageBatch
from e2e_vl.encoders.lxmert import LxmertEncoder
from e2e_vl.structures import Batch, EncoderOutput, TextRegions
from e2e_vl.tasks.base import Head, Transform
from e2e_vl.tasks.config import GQAConfig, VQAConfig
from e2e_vl.tasks.gqa import GQATask
from e2e_vl.tasks.question_answering import AnswerTargets
from e2e_vl.tasks.vqa import VQATask
from e2e_vl.weights.base import ModelWeights
from e2e_vl.weights.lxmert import to_official
from tests.parity import lxmert_common as common
from tests.parity.lxmert_common import assert_gradients_near, assert_near, gradients_of, regions_of, texts_of
from tests.parity.tolerances import NETWORK
from tests.parity.vl_bert_common import optional

golden = common.golden

ANSWERING = ("vqa", "gqa")


def answering_task(hidden_size: int, answers: int) -> VQATask:
    return VQATask(
        hidden_size,
        VQAConfig(
            answers=[f"answer {number}" for number in range(answers)],
            head_width=2,
            dropout=0.0,
            head_init="normal",
            init_from_words=False,
        ),
    )


def pair_head(hidden_size: int) -> nn.Module:
    """HEAD_OF_PAIRS: Linear, GELU, LayerNorm of the summary's width, which is twice E, and a Linear to two classes."""
    head = nn.Module()
    head.head = Head(2 * hidden_size, 2, 0.0, "normal", transform=Transform(2 * hidden_size, norm=True))
    return head


def two_images(features: Tensor, boxes: Tensor) -> TextRegions:
    """[M, 2, R, ...] -> the regions of both images, one after the other."""
    regions = regions_of(features.flatten(1, 2), boxes.flatten(1, 2))
    slot = torch.arange(2).repeat_interleave(features.shape[2]).expand_as(regions.attention_mask)
    return dataclasses.replace(regions, image_slot=slot)


def load(golden, name: str, encoder: nn.Module, head: nn.Module) -> None:
    ours, of_head = common.our_weights(common.official_weights(golden, name))
    encoder.load_state_dict(ours, strict=True)
    head.load_state_dict(of_head, strict=True)
    encoder.eval()
    head.eval()


def inputs_of(golden, name: str, dtype: torch.dtype) -> dict[str, Tensor]:
    arrays = golden.part(name, "in.")
    return {key: value.to(dtype, copy=True) if value.is_floating_point() else value for key, value in arrays.items()}


def batch_of(arrays: Mapping[str, Tensor]) -> Batch:
    count = len(arrays["input_ids"])
    side = torch.ones(count, 2, dtype=torch.int64)
    return Batch(
        images=ImageBatch(torch.zeros(count, 3, 0, 0), side, side, ["image"] * count),
        boxes=None,
        texts=texts_of(arrays),
        image_index=torch.arange(count)[:, None],
        targets=AnswerTargets(arrays["target"], arrays["target"].argmax(dim=1)),
    )


def run_answering(
    golden, name: str, dtype: torch.dtype = torch.float32
) -> tuple[LxmertEncoder, VQATask, dict[str, Tensor], EncoderOutput, Tensor, Tensor]:
    """The parts, the inputs, the encoder's output, logits and loss."""
    golden.require(f"{name}.safetensors")
    config = common.encoder_config(golden)
    encoder = LxmertEncoder(config)
    task = answering_task(config.hidden_size, golden.meta["configs"][name]["num_answers"])
    load(golden, name, encoder, task)
    encoder, task, arrays = encoder.to(dtype), task.to(dtype), inputs_of(golden, name, dtype)
    for key in ("visual_feats", "boxes"):
        arrays[key].requires_grad_()
    regions = regions_of(arrays["visual_feats"], arrays["boxes"])
    encoded = encoder(texts_of(arrays), regions)
    output = task(batch_of(arrays), regions, encoded)
    return encoder, task, arrays, encoded, output.logits, output.losses["vqa"].mean


def gradients(name: str, encoder: nn.Module, head: nn.Module, arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By official names, with those of the inputs."""
    found = to_official(ModelWeights({}, gradients_of(encoder), gradients_of(head), name))
    return found | {f"in.{key}": arrays[key].grad for key in ("visual_feats", "boxes")}


@pytest.mark.parametrize("name", ANSWERING)
def test_answers(golden, name):
    _, _, _, encoded, logits, loss = run_answering(golden, name)
    recorded = golden[name]
    assert_near(encoded.summary, recorded["out.pooled"], f"{name}: pooled")
    assert_near(logits, recorded["out.logits"], f"{name}: logits")
    assert torch.equal(logits.argmax(dim=1), recorded["out.label"])
    assert_near(loss, recorded["loss.total"], f"{name}: loss")
    assert float(loss.detach()) == pytest.approx(golden.meta["values"][name]["total"], rel=NETWORK)
    if "loss.mean_bce" in recorded:
        assert_near(loss / logits.shape[1], recorded["loss.mean_bce"], f"{name}: mean_bce")


def test_the_other_loss_of_gqa(golden):
    """With `--mceLoss`: cross entropy times the number of answers, in which an answer outside the list is answer 0."""
    recorded = optional(golden, "gqa", "loss.mce_option")
    arrays, names = golden["gqa"], [f"answer {number}" for number in range(golden["gqa"]["in.target"].shape[1])]
    config = GQAConfig(answers=names, loss="softmax_times_answers", unlisted_is_first=True)
    target = arrays["in.target"]
    best = torch.where(target.any(dim=1), target.argmax(dim=1), -1)
    loss = GQATask(1, config)._loss(arrays["out.logits"], AnswerTargets(target, best)).mean
    assert_near(loss, recorded, "gqa: mce_option")


@pytest.mark.parametrize("name", ANSWERING)
def test_gradients_of_answers(golden, name):
    encoder, task, arrays, _, _, loss = run_answering(golden, name, torch.float64)
    loss.backward()
    assert_gradients_near(golden, name, gradients(name, encoder, task, arrays))


def run_pairs(golden, dtype: torch.dtype = torch.float32):
    """The parts, the inputs, the encoder's output, logits and loss."""
    golden.require("nlvr2.safetensors")
    config = common.encoder_config(golden, max_images=2)
    encoder, head = LxmertEncoder(config), pair_head(config.hidden_size)
    assert encoder.summary_size == 2 * config.hidden_size
    load(golden, "nlvr2", encoder, head)
    encoder, head, arrays = encoder.to(dtype), head.to(dtype), inputs_of(golden, "nlvr2", dtype)
    for key in ("visual_feats", "boxes"):
        arrays[key].requires_grad_()
    encoded = encoder(texts_of(arrays), two_images(arrays["visual_feats"], arrays["boxes"]))
    logits = head.head(encoded.summary)
    return encoder, head, arrays, encoded, logits, F.cross_entropy(logits, arrays["label"])


def test_pairs_of_images(golden):
    _, _, arrays, encoded, logits, loss = run_pairs(golden)
    recorded = golden["nlvr2"]
    both = recorded["out.pooled"].reshape(len(arrays["label"]), -1)  # rows 2i and 2i + 1 belong to pair i
    assert_near(encoded.summary, both, "nlvr2: pooled")
    assert_near(logits, recorded["out.logits"], "nlvr2: logits")
    assert_near(loss, recorded["loss.total"], "nlvr2: loss")


def test_gradients_of_pairs_of_images(golden):
    encoder, head, arrays, _, _, loss = run_pairs(golden, torch.float64)
    loss.backward()
    assert_gradients_near(golden, "nlvr2", gradients("nlvr2", encoder, head, arrays))
