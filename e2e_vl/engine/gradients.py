"""Where gradients come from, and whether a step may use them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from detector.structures import Loss
from e2e_vl.model import VisionLanguageModel
from e2e_vl.structures import Batch

NORM = "grad_norm"
SKIPPED = "skipped_steps"  # share of the logged steps that fp16 could not make
OVERFLOWS = 50  # in a row; the scale of fp16 is below any use then


class LossesOnly(nn.Module):
    """The model as DistributedDataParallel may see it: it returns nothing but what gradients come from.

    (From the parameters behind any other output it would wait for gradients that never come.)
    """

    def __init__(self, model: VisionLanguageModel):
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> tuple[dict[str, Loss], dict[str, Loss]]:
        """Task losses (with those of phrases) and detection losses, unweighted."""
        output = self.model(batch)
        return output.task_losses, output.regions.losses


def clip(accelerator: Accelerator, parameters: Iterable[nn.Parameter], limit: float | None) -> Tensor:
    """Clip all gradients together, unless `limit` is None; returns their norm before it, float32, on their device."""
    if limit is not None:
        return torch.as_tensor(accelerator.clip_grad_norm_(parameters, limit), dtype=torch.float32)
    accelerator.unscale_gradients()
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return torch.nn.utils.get_total_norm(gradients).float()


class NumberCheck:
    """Judges the numbers of each step; gradients that overflow in fp16 are left to its scaler, for a while.

    Args:
        scaled: the gradients are those of a scaled loss.
    """

    def __init__(self, *, scaled: bool) -> None:
        self.scaled = scaled
        self.overflows = 0  # in a row

    def bad(self, values: dict[str, float]) -> list[str]:
        """Names of what is NaN or infinite and must not be; `values` gets `SKIPPED`, if the scaler skips steps."""
        bad = [name for name, value in values.items() if not math.isfinite(value)]
        if not self.scaled:
            return bad
        is_overflow = bad == [NORM]
        self.overflows = self.overflows + 1 if is_overflow else 0
        values[SKIPPED] = float(is_overflow)
        if not is_overflow or self.overflows == OVERFLOWS:
            return bad
        values[NORM] = 0.0
        return []


def averages(sums: Mapping[str, float], steps: int) -> dict[str, float]:
    """Means over some steps; of the gradient norm over those that the scaler did not skip."""
    means = {name: value / steps for name, value in sums.items()}
    made = 1 - means.get(SKIPPED, 0.0)
    if made < 1:
        norm = means.pop(NORM)
        means |= {NORM: norm / made} if made else {}
    return means
