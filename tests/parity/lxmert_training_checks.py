"""Some updates of the whole pre-training model against the official LXMERT code: losses, norms, rates, end values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from e2e_vl.config import TrainConfig
from e2e_vl.model import VisionLanguageModel
from e2e_vl.run.optim import BertAdam, build_schedule
from e2e_vl.weights.base import ModelWeights
from e2e_vl.weights.lxmert import to_official
from tests.parity import lxmert_common as common
from tests.parity.lxmert_common import KEY_BIAS, assert_near
from tests.parity.lxmert_pretraining_checks import make_batch, make_model, means
from tests.parity.tolerances import NETWORK

golden = common.golden


def values_of(model: VisionLanguageModel) -> dict[str, Tensor]:
    """All parameters by official names."""
    parts = model.encoder, model.task
    encoder, task = ({name: value.detach() for name, value in part.named_parameters()} for part in parts)
    return to_official(ModelWeights({}, encoder, task, "pretraining"))


def test_updates_of_the_whole_model(golden):
    """One group for all parameters, clipped together, with the decay inside the update."""
    golden.require("train.safetensors")
    options, recorded = golden.meta["configs"]["train"], golden["train"]
    model, batch = make_model(golden).double(), make_batch(golden, torch.float64)
    parameters = [*model.encoder.parameters(), *model.task.parameters()]
    group = {"params": parameters, "lr": options["lr"], "weight_decay": options["weight_decay"]}
    optimizer = BertAdam([group], tuple(options["betas"]), options["eps"], None)
    settings = TrainConfig(optimizer="bert_adam", warmup_ratio=options["warmup"])
    schedule = build_schedule(optimizer, settings, options["t_total"], steps_done=0)
    assert len(recorded["loss"]) == options["updates"]
    for step in range(options["updates"]):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(float(recorded["lr"][step]), rel=1e-5, abs=1e-12)
        optimizer.zero_grad()
        loss = sum(means(model(batch)).values())
        assert_near(loss, recorded["loss"][step].double(), f"loss {step}")
        loss.backward()
        norm = nn.utils.clip_grad_norm_(parameters, options["clip_norm"])
        assert_near(norm, recorded["norm_before_clip"][step].double(), f"norm {step}")
        optimizer.step()
        schedule.step()
    unused = {name: value for name, value in golden.part("pretrain", "state.").items() if name.startswith("cls.")}
    ends = unused | values_of(model)  # a head whose loss the set lacks stays as it is
    for name, value in golden.part("train", "end.").items():
        assert_near(ends[name], value.double(), f"end of {name}")
    norms = golden.meta["values"]["train"]["end_norms"]
    assert norms
    for name, norm in norms.items():
        if not name.endswith(KEY_BIAS):
            assert float(ends[name].norm()) == pytest.approx(norm, rel=NETWORK), name


def test_every_array_of_the_trunk_is_read(golden):
    """And none of the encoder is missing: the other checks start from it."""
    encoder = common.make_encoder(golden)
    ours = to_official(ModelWeights({}, encoder.state_dict(), {}, "pretraining"))
    assert set(ours) == set(golden["trunk"])
    for name, value in golden["trunk"].items():
        assert torch.equal(ours[name], value), name
