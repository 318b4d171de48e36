"""What the official VisualBERT optimiser trains and decays, and where five updates of it lead."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from e2e_vl.config import TrainConfig
from e2e_vl.run.optim import build_optimizer, build_schedule
from tests.parity import visual_bert_common as common
from tests.parity.visual_bert_common import (
    PretrainingModel,
    our_name,
    pretraining_losses,
    pretraining_model,
)
from tests.parity.vl_bert_common import RELATIVE, Golden, assert_near, optional

visual_golden = common.visual_golden
LAYERS = ("encoder.encoder.layer.",)  # inside of them the recorded lists name only what does not decay
ROUNDING = 1e-6  # of the largest movement: what has a gradient of rounding errors only moves less


def settings(golden: Golden, **changes: Any) -> TrainConfig:
    """The official optimiser's; the schedule is that of configs.training."""
    if not {"optim", "training"} <= golden.meta["configs"].keys():
        pytest.skip("the set has no settings of the optimiser; they are optional")
    optim, training = (golden.meta["configs"][name] for name in ("optim", "training"))
    return TrainConfig(
        optimizer="bert_adam",
        lr=training["learning_rate"],
        betas=optim["betas"],
        eps=optim["eps"],
        weight_decay=max(optim["weight_decay"].values()),
        decay_norm_and_bias=False,
        decay_bn_scales=True,
        warmup_ratio=training["warmup_proportion"],
        max_grad_norm=None,
        max_grad_norm_per_tensor=optim["max_grad_norm_per_tensor"],
        **changes,
    )


def official_model(golden: Golden, part: str = "pretrain") -> PretrainingModel:
    """With the pooler as the official optimiser leaves it."""
    return pretraining_model(golden, part, train_pooler=False)


@pytest.mark.parametrize(("part", "groups"), [("pretrain", "pretraining"), ("late_fusion", "late_fusion")])
def test_what_decays(visual_golden, part, groups):
    if groups not in visual_golden.meta["optimizer_groups"]:
        pytest.skip(f"the set has no groups of {groups}; they are optional")
    recorded = visual_golden.meta["optimizer_groups"][groups]
    model = official_model(visual_golden, part)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed, undecayed = set(), set()
    for group in build_optimizer(model, settings(visual_golden)).param_groups:
        (decayed if group["weight_decay"] else undecayed).update(names.pop(id(one)) for one in group["params"])
    assert undecayed == {our_name(name) for name in recorded["no_decay"]}
    assert set(names.values()) == {our_name(name) for name in recorded["not_in_optimiser"]}
    outside = {name for name in decayed if not name.startswith(LAYERS)}
    assert outside == {our_name(name) for name in recorded["decay"]}
    assert all(name.endswith(".weight") and "LayerNorm" not in name for name in decayed)


def test_five_updates(visual_golden):
    losses = optional(visual_golden, "training", "loss")
    recorded, training = visual_golden["training"], visual_golden.meta["configs"]["training"]
    model = official_model(visual_golden)
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    own = settings(visual_golden)
    optimizer = build_optimizer(model, own)
    schedule = build_schedule(optimizer, own, training["t_total"])
    features = visual_golden["pretrain"]["in.features"].double()
    for step in range(training["steps"] + 1):
        loss = pretraining_losses(visual_golden, model, features)["loss"]
        assert loss.item() == pytest.approx(float(losses[step]), rel=RELATIVE), step
        optimizer.zero_grad()
        loss.backward()
        if step < training["steps"]:
            optimizer.step()
            schedule.step()
    after = dict(model.named_parameters())
    for name, value in recorded.items():
        if name.startswith("after."):
            assert_near(after[our_name(name.removeprefix("after."))], value, name)
    moved = {our_name(name): norm for name, norm in training["moved_norm"].items()}
    assert moved.keys() | {our_name(name) for name in training["unmoved"]} == after.keys()
    for name, value in after.items():
        norm = float((value.detach() - start[name]).norm())
        expected = moved.get(name, 0.0)
        assert norm == pytest.approx(expected, rel=RELATIVE, abs=ROUNDING * max(moved.values())), name
    for name in training["unmoved"]:
        assert torch.equal(after[our_name(name)], start[our_name(name)])
