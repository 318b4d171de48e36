"""BertAdam, update by update, against what the official VisualBERT and LXMERT code computed.

VisualBERT cuts the gradient of each parameter inside the optimiser, LXMERT all of them together in its training loop.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from e2e_vl.config import TrainSettings
from e2e_vl.engine.bert_adam import BertAdam
from e2e_vl.engine.optim import build_schedule
from tests.parity.vl_bert_common import Golden, assert_near

TOLERANCE = 1e-5  # VisualBERT is recorded in float32
PARAMETERS = ("a", "b")
VISUAL_CASES = ("linear", "constant")
LXMERT_CASES = ("linear", "no_warmup", "constant", "skip")


class Recorded:
    """Two parameters, their gradients of every update, and the optimiser with the settings of one case."""

    def __init__(self, golden: Golden, case: dict[str, Any], clip_tensor_norm: float | None) -> None:
        self.options, self.case = golden.meta["configs"]["optim"], case
        self.clip_tensor_norm = clip_tensor_norm
        arrays = golden["optim"]
        self.values = {name: nn.Parameter(arrays[f"in.{name}"].double()) for name in PARAMETERS}
        self.gradients = {name: arrays[f"in.grads_{name}"].double() for name in PARAMETERS}
        self.optimizer = self.build()
        self.schedule = self.start_schedule(0)

    def build(self) -> BertAdam:
        decay = self.options["weight_decay"]
        groups = [
            {
                "params": [value],
                "lr": self.options.get("lr", self.case.get("lr")),
                "weight_decay": decay[name] if isinstance(decay, dict) else decay,
            }
            for name, value in self.values.items()
        ]
        return BertAdam(groups, tuple(self.options["betas"]), self.options["eps"], self.clip_tensor_norm)

    def start_schedule(self, steps_done: int) -> torch.optim.lr_scheduler.LambdaLR:
        total = self.case.get("t_total", -1)
        if total == -1:
            settings = TrainSettings(optimizer="bert_adam", schedule="constant")
        else:
            settings = TrainSettings(optimizer="bert_adam", warmup_share=self.case["warmup"])
        return build_schedule(self.optimizer, settings, total, steps_done=steps_done)

    def resume(self, steps_done: int) -> None:
        """Go on with another optimiser that has read the state of this one."""
        state = self.optimizer.state_dict()
        peaks = [group["initial_lr"] for group in self.optimizer.param_groups]
        self.optimizer = self.build()
        self.optimizer.load_state_dict(state)
        for group, peak in zip(self.optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak  # as engine/saving.py: rates are those of the settings
        self.schedule = self.start_schedule(steps_done)

    def set_gradients(self, step: int, without: tuple[str, ...] = ()) -> None:
        for name, value in self.values.items():
            value.grad = None if name in without else self.gradients[name][step].clone()

    def rate(self, name: str) -> float:
        return self.optimizer.param_groups[PARAMETERS.index(name)]["lr"]

    def assert_values(self, step: int, recorded: dict[str, Tensor]) -> None:
        for name, value in self.values.items():
            torch.testing.assert_close(
                value.detach(), recorded[name][step].double(), rtol=TOLERANCE, atol=TOLERANCE, msg=f"{name} {step}"
            )


@pytest.fixture(scope="module")
def visual(golden_root) -> Golden:
    return Golden(golden_root / "visual_bert")


@pytest.fixture(scope="module")
def lxmert(golden_root) -> Golden:
    if not (golden_root / "lxmert" / "optim.safetensors").is_file():
        pytest.skip("there is no set of LXMERT with the optimiser; it is optional")
    return Golden(golden_root / "lxmert")


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("name", VISUAL_CASES)
def test_visual_bert_every_update(visual, name, resumed):
    recorded, options = visual.part("optim", f"{name}."), visual.meta["configs"]["optim"]
    case = options.get(name, options)
    run = Recorded(visual, case, options["max_grad_norm_per_tensor"])
    for step in range(options["steps"]):
        if resumed and step == options["steps"] // 2:
            run.resume(step)
        assert run.rate("a") == pytest.approx(float(recorded["lr"][step]), rel=TOLERANCE, abs=1e-12)
        run.set_gradients(step)
        run.optimizer.step()
        run.schedule.step()
        run.assert_values(step, recorded)
        for parameter, value in run.values.items():
            norm = float(recorded[f"clipped_grad_norm_{parameter}"][step])
            assert float(value.grad.norm()) == pytest.approx(norm, rel=TOLERANCE)
            state = run.optimizer.state[value]
            assert_near(state["exp_avg"], recorded[f"m_{parameter}"][step], f"m_{parameter} {step}", TOLERANCE)
            assert_near(state["exp_avg_sq"], recorded[f"v_{parameter}"][step], f"v_{parameter} {step}", TOLERANCE)


def test_visual_bert_schedule(visual):
    options, factors = visual.meta["configs"]["optim"], visual["optim"]["schedule.factor"]
    run = Recorded(visual, options, None)
    for step, factor in enumerate(factors.tolist()):
        assert run.rate("a") == pytest.approx(options["lr"] * factor, rel=TOLERANCE, abs=1e-12), step
        run.optimizer.step()
        run.schedule.step()


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("name", LXMERT_CASES)
def test_lxmert_every_update(lxmert, name, resumed):
    options = lxmert.meta["configs"]["optim"]
    if name not in options["cases"]:
        pytest.skip(f"the set has no case {name}; it is optional")
    recorded = lxmert.part("optim", f"{name}.")
    run = Recorded(lxmert, options["cases"][name], None)
    skipped = options["skip_updates_of_b"] if name == "skip" else []
    for step in range(options["steps"]):
        if resumed and step == options["steps"] // 2:
            run.resume(step)
        run.set_gradients(step, without=("b",) if step in skipped else ())
        norm = nn.utils.clip_grad_norm_(run.values.values(), options["clip_norm"])
        assert float(norm) == pytest.approx(float(recorded["norm_before_clip"][step]), rel=TOLERANCE)
        assert run.rate("a") == pytest.approx(float(recorded["lr"][step]), rel=TOLERANCE, abs=1e-12)
        run.optimizer.step()
        run.schedule.step()
        run.assert_values(step, recorded)
    for kind, ours in (("m_a", "exp_avg"), ("v_a", "exp_avg_sq")):
        assert_near(run.optimizer.state[run.values["a"]][ours], recorded[kind], kind, TOLERANCE)
