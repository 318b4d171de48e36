"""What tests of starting weights share: rules of a run, and a pre-training task."""

from __future__ import annotations

import dataclasses
from typing import Any

from e2e_vl.config import RunConfig
from e2e_vl.parts import TASKS
from e2e_vl.run.build import ADAPTERS, build_objectives
from e2e_vl.tasks.config import PretrainingConfig
from e2e_vl.tasks.objectives.base import Sizes
from e2e_vl.tasks.pretraining import PretrainingTask
from e2e_vl.weights.start import StartRules


def rules(task_name: str) -> StartRules:
    """Of a run of VL-BERT."""
    return StartRules(task_name, TASKS, ADAPTERS["vl_bert"])


def replaced(config: RunConfig, **sections: dict[str, Any]) -> RunConfig:
    """Settings with other values: `replaced(config, task={"name": "vqa"})`."""
    changed = {name: dataclasses.replace(getattr(config, name), **fields) for name, fields in sections.items()}
    return dataclasses.replace(config, **changed)


def pretraining_task(hidden_size: int, vocab_size: int, objectives: dict[str, Any], **settings: Any) -> PretrainingTask:
    """With the heads of these objectives, besides those that have a weight by default."""
    config = PretrainingConfig(vocab_size=vocab_size, objectives=objectives, **settings)
    return PretrainingTask(hidden_size, config, build_objectives(objectives, Sizes(hidden_size, vocab_size)))
