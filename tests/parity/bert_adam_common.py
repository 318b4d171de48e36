"""BertAdam with the recorded gradients of two parameters, for the comparisons with the official code, update by update.

VisualBERT cuts the gradient of each parameter inside the optimiser, LXMERT all of them together in its training loop.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from e2e_vl.config import TrainConfig
from e2e_vl.run.optim import BertAdam, build_schedule
from tests.parity.vl_bert_common import Golden

TOLERANCE = 1e-5  # VisualBERT is recorded in float32
PARAMETERS = ("a", "b")


class Recorded:
    """Two parameters, their gradients of every update, and the optimiser with the settings of one case."""

    def __init__(self, golden: Golden, case: dict[str, Any], max_grad_norm_per_tensor: float | None) -> None:
        self.options, self.case = golden.meta["configs"]["optim"], case
        self.max_grad_norm_per_tensor = max_grad_norm_per_tensor
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
        return BertAdam(groups, tuple(self.options["betas"]), self.options["eps"], self.max_grad_norm_per_tensor)

    def start_schedule(self, steps_done: int) -> torch.optim.lr_scheduler.LambdaLR:
        total = self.case.get("t_total", -1)
        if total == -1:
            settings = TrainConfig(optimizer="bert_adam", schedule="constant")
        else:
            settings = TrainConfig(optimizer="bert_adam", warmup_ratio=self.case["warmup"])
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
