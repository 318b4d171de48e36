"""Schedule, clipping and optimisers against what the official VL-BERT code computed, step by step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from e2e_vl.config import TrainConfig
from e2e_vl.run.optim import build_optimizer, build_schedule

TOLERANCE = 1e-6  # tests/run/test_optim.py tells the AdamWs apart, whose epsilons hardly matter here


class Parts(nn.Module):
    """Two parameters in the places where `build_optimizer` looks for them."""

    phrase_head = None

    def __init__(self, a: Tensor, b: Tensor) -> None:
        super().__init__()
        self.detector, self.encoder, self.task = (
            nn.Module(),
            nn.ParameterList([a.clone()]),
            nn.ParameterList([b.clone()]),
        )


@pytest.fixture(scope="module")
def recorded(golden_root: Path) -> dict[str, Tensor]:
    return load_file(golden_root / "vl_bert" / "optim.safetensors")


@pytest.fixture(scope="module")
def options(golden_root: Path) -> dict:
    return json.loads((golden_root / "vl_bert" / "meta.json").read_text())["configs"]["optim"]


def settings_of(name: str, options: dict) -> TrainConfig:
    common = {
        "lr": options["base_lr"],
        "weight_decay": options["weight_decay"],
        "warmup_steps": options["warmup_steps"],
        "max_grad_norm": options["clip_norm"],
        "schedule_skips_zero": True,
    }
    if name == "adamw":
        adamw = options["adamw"]
        return TrainConfig(
            optimizer="adamw_official", betas=adamw["betas"], eps=adamw["eps"], schedule="triangle", **common
        )
    sgd, milestones = options["sgd"], options["sgd"]["milestones"]
    schedule = "steps" if milestones else "constant"
    shares = [step / options["steps"] for step in milestones]
    return TrainConfig(optimizer="sgd", momentum=sgd["momentum"], schedule=schedule, milestones=shares, **common)


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_optimiser_every_update(recorded, options, name, resumed):
    settings, steps = settings_of(name, options), options["steps"]
    model = Parts(recorded["in.a"], recorded["in.b"])
    optimizer = build_optimizer(model, settings)
    schedule = build_schedule(optimizer, settings, steps)
    a, b = model.encoder[0], model.task[0]
    for step in range(steps):
        if resumed and step == steps // 2:
            state = optimizer.state_dict()
            optimizer = build_optimizer(model, settings)
            optimizer.load_state_dict(state)
            for group in optimizer.param_groups:  # as engine/saving.py: rates are those of the settings
                group["lr"] = settings.lr
            schedule = build_schedule(optimizer, settings, steps, steps_done=step)
        a.grad, b.grad = recorded["in.grads_a"][step].clone(), recorded["in.grads_b"][step].clone()
        norm = nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        assert float(norm) == pytest.approx(float(recorded[f"{name}.norm_before_clip"][step]), rel=TOLERANCE)
        for group in optimizer.param_groups:
            assert group["lr"] == pytest.approx(float(recorded[f"{name}.lr"][step]), rel=TOLERANCE, abs=1e-12)
        optimizer.step()
        schedule.step()
        for ours, parameter in ((a, "a"), (b, "b")):
            theirs = recorded[f"{name}.{parameter}"][step]
            torch.testing.assert_close(ours.detach(), theirs, rtol=TOLERANCE, atol=TOLERANCE)
