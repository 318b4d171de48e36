"""A run as a whole: model, tokenizer, data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from transformers import PreTrainedTokenizerBase

from e2e_vl.box_sources import BoxSource
from e2e_vl.config import RunConfig
from e2e_vl.data.loading.example_dataset import ExampleDataset
from e2e_vl.engine.build import build_model
from e2e_vl.engine.build_data import (
    build_collate,
    build_examples,
    build_tokenizer,
    make_synthetic_data,
    warn_of_random_boxes,
)
from e2e_vl.model import VisionLanguageModel
from e2e_vl.structures import Batch


@dataclasses.dataclass
class Run:
    """What a run is made of."""

    model: VisionLanguageModel
    tokenizer: PreTrainedTokenizerBase
    train_data: ExampleDataset
    collate: Callable[..., Batch]
    # by split and boxes
    eval_data: dict[tuple[str, BoxSource], ExampleDataset] = dataclasses.field(default_factory=dict)


def build_run(config: RunConfig) -> Run:
    """Data (drawn first if the settings ask for it), tokenizer and model of settings as `resolve` returns them."""
    make_synthetic_data(config)
    tokenizer = build_tokenizer(config)
    model = build_model(config, vocab_size=len(tokenizer), tokenizer=tokenizer)
    source = BoxSource(config.data.boxes.train)
    examples = build_examples(config, model, tokenizer, config.data.train_split, boxes=source, training=True)
    if config.detector.loss_weight > 0:
        examples.dataset.check_classes(model.detector.num_classes)
    model.task.check_data(examples.dataset, model.detector)
    return Run(model, tokenizer, examples, build_collate(config, model))


def build_eval_data(config: RunConfig, run: Run) -> None:
    """Read all splits with all box sources that the settings evaluate, once per run."""
    sources = [BoxSource(boxes) for boxes in config.eval.boxes]
    if BoxSource.ONLINE in sources:
        warn_of_random_boxes(config.detector)
    for split in config.data.eval_splits:
        for boxes in sources:
            run.eval_data[split, boxes] = build_examples(config, run.model, run.tokenizer, split, boxes=boxes)
