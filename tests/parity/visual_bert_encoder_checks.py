"""VisualBERT's embeddings, layers and late fusion against the official code, forward and backward."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from e2e_vl.encoders.visual_bert import VisualBertEncoder
from tests.parity import visual_bert_common as common
from tests.parity.visual_bert_common import (
    assert_gradients_near,
    assert_slots_near,
    make_case,
    pretraining_losses,
    pretraining_model,
    recorded_encoder,
)
from tests.parity.vl_bert_common import assert_near, optional

visual_golden = common.visual_golden
CASES = ("plain", "typed", "aligned", "text_only")


@pytest.mark.parametrize("name", [*CASES, "aligned_long"])
def test_embeddings(visual_golden, name):
    recorded = optional(visual_golden, "embeddings", f"{name}.out")
    encoder, case = recorded_encoder(visual_golden), make_case(visual_golden, name)
    with torch.no_grad():
        hidden, layout = case.embed(encoder)
    assert torch.equal(layout.is_real, case.is_real)
    assert_slots_near(layout.unpack(hidden), recorded, case, f"{name}.out")


def test_words_name_regions_as_the_official_lists_do(visual_golden):
    """A text names a region by `region_of_token`; the same as lists of positions gives the same input."""
    encoder, case = recorded_encoder(visual_golden), make_case(visual_golden, "plain")
    texts, regions = case.texts, case.regions
    number = torch.arange(texts.attention_mask.shape[1]).expand_as(texts.input_ids)
    named = (number % (regions.attention_mask.sum(dim=1, keepdim=True) + 1)) - 1  # -1, 0, 1, ... of each text's regions
    texts = dataclasses.replace(texts, region_of_token=torch.where(texts.attention_mask, named, -1))
    lists = torch.full((*regions.attention_mask.shape, texts.attention_mask.shape[1]), -1)
    for text, word in texts.attention_mask.nonzero().tolist():
        if named[text, word] >= 0:
            lists[text, named[text, word], word] = word
    listed = dataclasses.replace(case, alignment=common.word_counts(lists, regions, texts.attention_mask.shape[1]))
    with torch.no_grad():
        assert_near(encoder(texts, regions).regions, listed.run(encoder).regions, "regions")
        assert not torch.allclose(encoder(texts, regions).regions, encoder(case.texts, regions).regions, atol=1e-2)


def run_recorded(encoder: VisualBertEncoder, case: common.Case) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """States over the slots, and other results, by their recorded names."""
    states: list[Tensor] = []
    hooks = [layer.register_forward_hook(lambda *run: states.append(run[2][0])) for layer in encoder.encoder["layer"]]
    with torch.no_grad():
        hidden, layout = case.embed(encoder)
        output = encoder.encode(case.texts, hidden, layout, output_attentions=True)
        plain = encoder.encode(case.texts, hidden, layout)
    for hook in hooks:
        hook.remove()
    assert_near(plain.text, output.text, "text without attention maps")
    layers = {f"layer.{index}": layout.unpack(one) for index, one in enumerate(states[: len(hooks)])}
    assert_near(torch.cat([output.text, output.regions], dim=1), layers[f"layer.{len(hooks) - 1}"], "output")
    maps = {f"attention.{index}": one for index, one in enumerate(output.attentions)}
    return layers, {"pooled": output.summary, **maps}


def test_every_recorded_case_is_compared(visual_golden):
    cases = {name.split(".")[0] for name in visual_golden["encoder"]}
    assert cases and cases <= set(CASES)
    cases = {name.split(".")[0] for name in visual_golden[common.INPUTS] if name.endswith(".out")}
    assert cases and cases <= {*CASES, "aligned_long"}
    if (visual_golden.folder / "late_fusion.safetensors").exists():
        cases = {name.split(".")[0] for name in visual_golden["late_fusion"] if name.endswith(".sequence")}
        assert cases and cases <= set(LATE)


@pytest.mark.parametrize("name", CASES)
def test_encoder(visual_golden, name):
    recorded = visual_golden.part("encoder", f"{name}.")
    if not recorded:
        pytest.skip(f"the set has no case {name}; it is optional")
    encoder, case = recorded_encoder(visual_golden), make_case(visual_golden, name)
    layers, others = run_recorded(encoder, case)
    assert recorded.keys() <= layers.keys() | others.keys()
    for what, theirs in recorded.items():
        if what in layers:
            assert_slots_near(layers[what], theirs, case, f"{name}.{what}")
        elif what == "pooled":
            assert_near(others[what], theirs, f"{name}.{what}")
        else:
            length = theirs.shape[-1]
            queries = case.is_real[:, None, :length].expand(theirs.shape[:-1])
            assert_near(others[what][..., :length, :length][queries], theirs[queries], f"{name}.{what}")


LATE = {"base": "plain", "base_aligned": "aligned", "base_text_only": "text_only"}


@pytest.mark.parametrize("name", LATE)
def test_late_fusion(visual_golden, name):
    recorded = optional(visual_golden, "late_fusion", f"{name}.sequence")
    encoder = recorded_encoder(visual_golden, "late_fusion", bypass_transformer=True)
    case = make_case(visual_golden, LATE[name])
    with torch.no_grad():
        output = case.run(encoder)
    assert_slots_near(torch.cat([output.text, output.regions], dim=1), recorded, case, f"{name}.sequence")
    assert_near(output.summary, visual_golden["late_fusion"][f"{name}.pooled"], f"{name}.pooled")


@pytest.mark.parametrize(("part", "prefix"), [("pretrain", "out."), ("late_fusion", "pretrain.")])
def test_losses_and_gradients(visual_golden, part, prefix):
    optional(visual_golden, part, f"{prefix}loss")
    model = pretraining_model(visual_golden, part)
    features = visual_golden["pretrain"]["in.features"].double().requires_grad_()
    losses = pretraining_losses(visual_golden, model, features)
    for name, ours in losses.items():
        assert_near(ours.float(), visual_golden[part][f"{prefix}{name}"], f"{part}.{name}")
    losses["loss"].backward()
    assert_gradients_near(visual_golden, part, model, {"in.features": features})
