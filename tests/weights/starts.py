"""What tests of starting weights share: rules of a run, and a pre-training task."""

from __future__ import annotations

from typing import Any

import msgspec

from e2e_vl.config import RunConfig
from e2e_vl.run.build import ADAPTERS, build_objectives
from e2e_vl.tasks.config import PretrainingConfig
from e2e_vl.tasks.objectives.base import Sizes
from e2e_vl.tasks.pretraining import PretrainingTask
from e2e_vl.weights.start import StartRules


def rules(task_name: str) -> StartRules:
    """Of a run of VL-BERT."""
    return StartRules(task_name, ADAPTERS["vl_bert"])


def replaced(config: RunConfig, **sections: dict[str, Any]) -> RunConfig:
    """Settings with other values: `replaced(config, task={"name": "vqa", "config": {}})`."""
    tree = msgspec.to_builtins(config, str_keys=True)
    for name, fields in sections.items():
        tree[name] |= msgspec.to_builtins(fields, str_keys=True)
    return msgspec.convert(tree, RunConfig)


def options(config: msgspec.Struct) -> dict[str, Any]:
    """The options of a task, an encoder or a data set, to be changed and given to `replaced`."""
    return msgspec.to_builtins(config, str_keys=True)


def pretraining_task(hidden_size: int, vocab_size: int, objectives: dict[str, Any], **settings: Any) -> PretrainingTask:
    """With the heads of these objectives, besides those that have a weight by default."""
    sizes = Sizes(hidden_size, vocab_size)
    config = PretrainingConfig(objectives=objectives, **settings)
    return PretrainingTask(sizes, config, build_objectives(objectives, sizes))
