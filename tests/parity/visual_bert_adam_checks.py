"""BertAdam, update by update, against what the official VisualBERT code computed."""

from __future__ import annotations

import pytest

from tests.parity import visual_bert_common as common
from tests.parity.bert_adam_common import TOLERANCE, Recorded
from tests.parity.vl_bert_common import assert_near

visual_golden = common.visual_golden
CASES = ("linear", "constant")


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_every_update_of_bert_adam(visual_golden, name, resumed):
    visual_golden.require("optim.safetensors")
    options = visual_golden.meta["configs"]["optim"]
    if name != CASES[0] and name not in options:
        pytest.skip(f"the set has no case {name} of the optimiser; it is optional")
    recorded, case = visual_golden.part("optim", f"{name}."), options.get(name, options)
    run = Recorded(visual_golden, case, options["max_grad_norm_per_tensor"])
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


def test_schedule_of_bert_adam(visual_golden):
    visual_golden.require("optim.safetensors")
    options, factors = visual_golden.meta["configs"]["optim"], visual_golden["optim"]["schedule.factor"]
    run = Recorded(visual_golden, options, None)
    for step, factor in enumerate(factors.tolist()):
        assert run.rate("a") == pytest.approx(options["lr"] * factor, rel=TOLERANCE, abs=1e-12), step
        run.optimizer.step()
        run.schedule.step()
