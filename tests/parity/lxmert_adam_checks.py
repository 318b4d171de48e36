"""BertAdam, update by update, against what the official LXMERT code computed."""

from __future__ import annotations

import pytest
from torch import nn

from tests.parity import lxmert_common as common
from tests.parity.bert_adam_common import TOLERANCE, Recorded
from tests.parity.vl_bert_common import assert_near

golden = common.golden
CASES = ("linear", "no_warmup", "constant", "skip")


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_every_update_of_bert_adam(golden, name, resumed):
    golden.require("optim.safetensors")
    options = golden.meta["configs"]["optim"]
    if name not in options["cases"]:
        pytest.skip(f"the set has no case {name}; it is optional")
    recorded = golden.part("optim", f"{name}.")
    run = Recorded(golden, options["cases"][name], None)
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
