"""Helpers for tests of initial weights."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor, nn

from e2e_vl.config import RunConfig
from e2e_vl.run.build import ADAPTERS
from e2e_vl.tasks.config import PretrainingConfig
from e2e_vl.tasks.objectives.base import Sizes
from e2e_vl.tasks.pretraining import PretrainingTask, build_objectives
from e2e_vl.weights.loading import InitRules

Module = TypeVar("Module", bound=nn.Module)
BERT_SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 20,
}
# settings of the official VL-BERT code's detector that are not visible in the weights
OFFICIAL_DETECTOR = {
    "MODEL": {
        "PIXEL_MEAN": [102.9801, 115.9465, 122.7717],
        "PIXEL_STD": [1.0, 1.0, 1.0],
        "RESNETS": {"STRIDE_IN_1X1": True, "RES5_DILATION": 2},
        "ROI_BOX_HEAD": {"POOLER_TYPE": "ROIAlign", "POOLER_RESOLUTION": 14, "POOLER_SAMPLING_RATIO": 1},
    }
}


def rules(task_name: str, encoder: str = "vl_bert") -> InitRules:
    """The rules of a run with this task and encoder."""
    return InitRules(task_name, ADAPTERS[encoder])


def fill(module: Module, seed: int) -> Module:
    """Set all parameters to random values, including those initialised to 0, 1 or copies."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.1)
    return module


def same(one: nn.Module | dict[str, Tensor], other: nn.Module | dict[str, Tensor]) -> bool:
    """Whether two modules or state dicts have the same names and values."""
    first, second = (part.state_dict() if isinstance(part, nn.Module) else part for part in (one, other))
    return first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())


def replaced(config: RunConfig, **sections: dict[str, Any]) -> RunConfig:
    """A copy of a config with other values: `replaced(config, task={"name": "vqa", "config": {}})`."""
    tree = msgspec.to_builtins(config, str_keys=True)
    for name, fields in sections.items():
        tree[name] |= msgspec.to_builtins(fields, str_keys=True)
    return msgspec.convert(tree, RunConfig)


def options(config: msgspec.Struct) -> dict[str, Any]:
    """The config of a task, an encoder or a data set as a dict for `replaced`."""
    return msgspec.to_builtins(config, str_keys=True)


def pretraining_task(hidden_size: int, vocab_size: int, objectives: dict[str, Any], **settings: Any) -> PretrainingTask:
    """A task with these objectives and those that have a weight by default."""
    sizes = Sizes(hidden_size, vocab_size)
    config = PretrainingConfig(objectives=objectives, **settings)
    return PretrainingTask(sizes, config, build_objectives(objectives, sizes))
