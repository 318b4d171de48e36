"""BertAdam, with which the official VisualBERT and LXMERT code trains."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn


class BertAdam(torch.optim.Optimizer):
    """Adam without bias correction, whose decay is a part of the scheduled update.

    `weight -= rate * (m / (sqrt(v) + eps) + weight_decay * weight)`, with m and v of the new gradient. Every parameter
    counts its own updates: one without a gradient is left alone, and its schedule waits.

    Args:
        groups: every group brings its own `lr` and `weight_decay`.
        clip_tensor_norm: the gradient of each parameter is cut to this norm first; None: it is left as it is.
    """

    # of the highest rate, from the number of updates that a parameter has had; None: `lr` of the group as it is
    factor: Callable[[int], float] | None = None

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        betas: tuple[float, float],
        eps: float,
        clip_tensor_norm: float | None = None,
    ):
        super().__init__(groups, {"betas": betas, "eps": eps, "clip_tensor_norm": clip_tensor_norm})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """One update of all parameters that have a gradient."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            of_age = defaultdict(list)  # updates so far -> parameters, which have the same rate
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                of_age[state["step"]].append(parameter)
                state["step"] += 1
            for age, parameters in of_age.items():
                rate = group["lr"] if self.factor is None else group["initial_lr"] * self.factor(age)
                self._update(parameters, group, rate)
        return loss

    def _update(self, parameters: list[nn.Parameter], group: dict[str, Any], rate: float) -> None:
        beta1, beta2 = group["betas"]
        gradients = [parameter.grad for parameter in parameters]
        if group["clip_tensor_norm"] is not None:
            norms = torch.stack(torch._foreach_norm(gradients))
            factors = (group["clip_tensor_norm"] / (norms + 1e-6)).clamp(max=1.0)  # as torch's `clip_grad_norm_`
            torch._foreach_mul_(gradients, list(factors.unbind()))
        means = [self.state[parameter]["exp_avg"] for parameter in parameters]
        squares = [self.state[parameter]["exp_avg_sq"] for parameter in parameters]
        torch._foreach_mul_(means, beta1)
        torch._foreach_add_(means, gradients, alpha=1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, value=1 - beta2)
        updates = torch._foreach_sqrt(squares)
        torch._foreach_add_(updates, group["eps"])
        updates = torch._foreach_div(means, updates)
        if group["weight_decay"]:
            torch._foreach_add_(updates, parameters, alpha=group["weight_decay"])
        torch._foreach_add_(parameters, updates, alpha=-rate)
