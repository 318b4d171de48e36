"""A run as a whole: model, tokenizer, data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from detector.checkpoint import LoadReport
from detector.errors import UserError
from e2e_vl.box_sources import BoxSource
from e2e_vl.config import RunConfig
from e2e_vl.data.base import VLDataset
from e2e_vl.data.formats.answer_files import ANSWERS_FILE, write_answers
from e2e_vl.data.loading.example_dataset import ExampleDataset
from e2e_vl.data.storage.shared_reads import SharedReads
from e2e_vl.engine.answer_lists import are_given
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

# by split, boxes, and whether it is for training
DataSets = dict[tuple[str, BoxSource, bool], VLDataset]


class Start(NamedTuple):
    """Weights that a part of the model started from."""

    part: str  # detector, encoder, task or phrases
    path: str
    report: LoadReport


@dataclasses.dataclass
class Run:
    """What a run is made of."""

    model: VisionLanguageModel
    tokenizer: PreTrainedTokenizerBase
    train_data: ExampleDataset
    collate: Callable[..., Batch]
    starts: list[Start] = dataclasses.field(default_factory=list)
    # by split and boxes
    eval_data: dict[tuple[str, BoxSource], ExampleDataset] = dataclasses.field(default_factory=dict)


def build_run(
    config: RunConfig, datasets: DataSets | None = None, shared: SharedReads | None = None, *, writes: bool = True
) -> Run:
    """Data (drawn first if the settings ask for it), tokenizer and model of settings as `resolve` returns them.

    A vocabulary and a list of answers that are built from the data are written into the run directory.

    Args:
        datasets: splits that have been read already, see `splits_of`.
        shared: what they have read; None: nothing.
        writes: this process writes these files; False: another one has written them.
    """
    make_synthetic_data(config)
    shared = SharedReads() if shared is None else shared
    tokenizer = build_tokenizer(config, shared, writes=writes)
    starts: list[Start] = []
    model = build_model(
        config,
        vocab_size=len(tokenizer),
        tokenizer=tokenizer,
        tell_start=lambda *start: starts.append(Start(*start)),
        shared=shared,
    )
    if writes and model.task.chooses_answers and not are_given(config):
        write_answers(Path(config.output) / ANSWERS_FILE, model.task.answers)
    [(split, source, _)] = [one for one in splits_of(config) if one[2]]
    read = (datasets or {}).get((split, source, True))
    examples = build_examples(config, model, tokenizer, split, boxes=source, training=True, dataset=read, shared=shared)
    if config.detector.loss_weight > 0:
        known = model.detector.class_names
        examples.dataset.check_classes(model.detector.num_classes, known)
        if known is None and examples.dataset.class_names is not None:
            model.detector.class_names = tuple(examples.dataset.class_names)
    model.task.check_data(examples.dataset, model.detector)
    if model.phrase_head is not None:
        check_phrases(config, examples)
    return Run(model, tokenizer, examples, build_collate(config, model), starts)


def check_phrases(config: RunConfig, examples: ExampleDataset) -> None:
    """Check once, before training, that there are phrases to learn from.

    Raises:
        ValueError: the data state none, or the task cannot take the texts of the data set that states them.
    """
    weight, dataset, takes_others = config.phrases.weight, examples.dataset, bool(examples.wording.learns_from)
    if not dataset.has_phrases:
        remedy = ", or join data that do (data.name=joined, see docs/training.md)" if takes_others else ""
        raise UserError(
            f"phrases.weight is {weight}, but no text of {config.data.name} says what its phrases name; set it to 0"
            f"{remedy}."
        )
    if dataset.mixes_phrases and not takes_others:
        raise UserError(
            f"phrases.weight is {weight}, but the task {config.task.name} cannot take texts that have phrases and no "
            "target of its own, so its data cannot be joined with such texts; set it to 0 and leave them out."
        )


def build_eval_data(
    config: RunConfig, run: Run, datasets: DataSets | None = None, shared: SharedReads | None = None
) -> None:
    """Read all splits with all box sources that the settings evaluate, once per run; see `build_run`."""
    if BoxSource.ONLINE in map(BoxSource, config.eval.boxes):
        warn_of_random_boxes(config.detector)
    shared = SharedReads() if shared is None else shared
    for split, boxes, training in splits_of(config):
        if not training:
            read = (datasets or {}).get((split, boxes, False))
            run.eval_data[split, boxes] = build_examples(
                config, run.model, run.tokenizer, split, boxes=boxes, dataset=read, shared=shared
            )


def splits_of(config: RunConfig) -> list[tuple[str, BoxSource, bool]]:
    """What a run reads: (split, boxes, whether it is for training)."""
    evaluated = [(split, BoxSource(boxes), False) for split in config.data.eval_splits for boxes in config.eval.boxes]
    return [(config.data.train_split, BoxSource(config.data.boxes.train), True), *evaluated]
