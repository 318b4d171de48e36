"""The layers that heads on an encoder's states are made of, and their start values.

Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Literal

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

NewLayers = Literal["official", "normal"]
STD_OF_NEW_LAYERS = 0.02  # VL-BERT, section 4.1, as in BERT


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What the heads of a task or an objective must fit."""

    hidden_size: int  # E
    vocab_size: int  # V
    feature_dim: int = 0  # D
    num_classes: int = 0  # foreground classes of the detector
    summary_size: int | None = None  # X; None: E

    def __post_init__(self) -> None:
        if self.summary_size is None:
            object.__setattr__(self, "summary_size", self.hidden_size)


def start_head(linears: Iterable[nn.Linear], start: NewLayers | float) -> None:
    """Start values of a head; all biases are zero.

    Args:
        start: "official": Xavier uniform weights, as in the official VL-BERT code. "normal": N(0, 0.02), which the
            paper says of all new layers. A number: N(0, number).
    """
    for linear in linears:
        if start == "official":
            nn.init.xavier_uniform_(linear.weight)
        else:
            nn.init.normal_(linear.weight, std=STD_OF_NEW_LAYERS if start == "normal" else start)
        nn.init.zeros_(linear.bias)


class Transform(nn.ModuleDict):
    """Linear and GELU; with `norm` also the LayerNorm of BERT's masked-word transform. `width`: None = as the input."""

    def __init__(self, hidden_size: int, *, norm: bool = False, width: int | None = None):
        width = hidden_size if width is None else width
        super().__init__({"dense": nn.Linear(hidden_size, width)})
        if norm:
            self["norm"] = nn.LayerNorm(width, eps=1e-12)

    def forward(self, states: Float[Tensor, "*shape _"]) -> Float[Tensor, "*shape _"]:
        states = F.gelu(self["dense"](states))
        return self["norm"](states) if "norm" in self else states


class Head(nn.Module):
    """The transform if there is one, dropout, Linear. With `outputs` None: one score per state, no axis of its own."""

    def __init__(
        self,
        hidden_size: int,
        outputs: int | None,
        dropout: float,
        start: NewLayers | float,
        *,
        transform: Transform | None = None,
    ):
        super().__init__()
        self.transform = transform
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(hidden_size, outputs or 1)
        self.is_score = outputs is None
        start_head([self.output] if transform is None else [transform["dense"], self.output], start)

    def forward(self, states: Float[Tensor, "*shape E"]) -> Float[Tensor, "*scores"]:
        if self.transform is not None:
            states = self.transform(states)
        scores = self.output(self.dropout(states))
        return scores.squeeze(-1) if self.is_score else scores
