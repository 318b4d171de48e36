"""What a run says: a block of text before training, and a table of results at the end."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from e2e_vl.box_sources import BoxSource
from e2e_vl.config import RunConfig
from e2e_vl.data.loading.example_dataset import ExampleDataset
from e2e_vl.engine.run import Run, Start

PRECISIONS = {"no": "float32", "bf16": "bfloat16 mixed with float32", "fp16": "float16 mixed with float32"}
SHOWN_NAMES = 3  # of parameters that stay random


def start_text(config: RunConfig, run: Run, accelerator: Accelerator, step: int, total_steps: int) -> str:
    """What is about to be trained, on what, from what.

    Args:
        step: optimiser steps that are done already, in a run that goes on.
        total_steps: optimiser steps of the whole run.
    """
    settings = config.train
    lines = [
        ("device", f"{_device(accelerator)}, {PRECISIONS[settings.mixed_precision]}"),
        ("training", f"{config.data.train_split}: {_size(run.train_data)}, boxes: {config.data.boxes.train}"),
        *(
            ("evaluation", f"{split}: {_size(run.eval_data[split, sources[0]])}, boxes: {', '.join(sources)}")
            for split, sources in _evaluated(run).items()
        ),
        ("steps", _steps(config, run, step, total_steps)),
        ("vocabulary", f"{len(run.tokenizer)} wordpieces, {config.data.vocabulary or 'built from the training texts'}"),
    ]
    for name, part in (("detector", run.model.detector), ("encoder", run.model.encoder), ("head", run.model.task)):
        starts = [one for one in run.starts if one.part == ("task" if name == "head" else name)]
        is_frozen = name == "detector" and config.detector.freeze
        number = sum(one.numel() for one in part.parameters())
        lines.append((name, f"{number:,} parameters{', frozen' if is_frozen else ''}, {_origin(part, starts)}"))
    return "\n".join([config.output, *(f"  {name:<11s} {text}" for name, text in lines)])


def _device(accelerator: Accelerator) -> str:
    number = accelerator.num_processes
    if accelerator.device.type == "cpu":
        what = f"CPU with {torch.get_num_threads()} of {os.cpu_count()} threads"
    else:
        what = torch.cuda.get_device_name() if accelerator.device.type == "cuda" else str(accelerator.device)
    return f"{what}, {number} process{'es' if number > 1 else ''}"


def _size(examples: ExampleDataset) -> str:
    corpus = examples.dataset.corpus
    alone = f" and {len(corpus):,} texts without images" if corpus is not None else ""
    return f"{len(examples.groups):,} images with {len(examples):,} texts{alone}"


def _evaluated(run: Run) -> dict[str, list[BoxSource]]:
    """The box sources of each split."""
    found: dict[str, list[BoxSource]] = {}
    for split, boxes in run.eval_data:
        found.setdefault(split, []).append(boxes)
    return found


def _steps(config: RunConfig, run: Run, step: int, total_steps: int) -> str:
    settings = config.train
    parts = f" in {settings.accumulate} parts" if settings.accumulate > 1 else ""
    number = config.data.texts_per_image
    seen = total_steps * settings.images_per_batch
    texts = "all texts" if number is None else "1 text" if number == 1 else f"at most {number} texts"
    done = f", {step:,} of them done" if step else ""
    return (
        f"{total_steps:,}{done}, each with {settings.images_per_batch} images{parts} and {texts} per image "
        f"({seen:,} images in all)"
    )


def _origin(part: nn.Module, starts: Sequence[Start]) -> str:
    """Where the starting values of a part are from, and which of them are random."""
    if not starts:
        return "all random" if any(True for _ in part.parameters()) else "nothing to learn"
    sources = " and ".join(
        f"{_count(len(one.report.matched), 'tensor')} from {one.path} ({one.report.layout} names)" for one in starts
    )
    copied = [rule for one in starts for rule in one.report.copied]
    random = set.intersection(*({*one.report.missing} for one in starts))
    unused = [name for one in starts for name in one.report.unexpected]
    return "; ".join(
        [
            sources,
            *([f"copied: {', '.join(copied)}"] if copied else []),
            f"random: {_names(name for name in part.state_dict() if name in random) or 'nothing'}",
            *([f"not used: {_names(unused)}"] if unused else []),
        ]
    )


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _names(names: Iterable[str]) -> str:
    names = list(names)
    more = f", and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return ", ".join(names[:SHOWN_NAMES]) + more


def end_text(summary: Mapping[str, Any], output: Path, report: Path) -> str:
    """The table of results, and where everything is.

    Args:
        summary: what `metrics.json` holds.
    """
    seconds = summary["seconds_training"]
    time = f"{seconds / 60:.0f} minutes" if seconds > 100 else f"{seconds:.0f} seconds"
    table = result_table(summary)
    lines = [*(["", *table, ""] if table else []), f"{_count(summary['steps'], 'step')} in {time} of training"]
    if "best" in summary:
        best = summary["best"]
        lines.append(f"best model: {output / 'best'} ({best['metric']} {best['value']:.3f} at step {best['step']})")
    return "\n".join([*lines, f"last model: {output / 'model'}", f"report: {report}"])


def result_table(metrics: Mapping[str, Any]) -> list[str]:
    """Lines of a table with a row per split, metric and family, and a column per source of boxes.

    Args:
        metrics: names such as `val/accuracy_own_boxes/relation`; others are left out.
    """
    cells: dict[str, dict[str, Any]] = {}
    for name, value in metrics.items():
        split, _, rest = name.partition("/")
        metric, slash, family = rest.partition("/")
        for source in BoxSource.for_evaluation():
            if metric.endswith(f"_{source.metric_suffix}"):
                row = f"{split}/{metric.removesuffix(f'_{source.metric_suffix}')}{slash}{family}"
                cells.setdefault(row, {})[source.metric_suffix.replace("_", " ")] = value
    kinds = list(dict.fromkeys("/".join(row.split("/")[:2]) for row in cells))  # families stand below the whole
    cells = dict(sorted(cells.items(), key=lambda item: kinds.index("/".join(item[0].split("/")[:2]))))
    columns = list(dict.fromkeys(column for row in cells.values() for column in row))
    width = max((len(row) for row in cells), default=0)
    lines = ["  ".join([" " * width, *columns])] if cells else []
    for row, values in cells.items():
        form = ".0f" if row.split("/")[1] == "count" else ".3f"
        texts = ["-" if values.get(column) is None else format(values[column], form) for column in columns]
        shown = [f"{text:>{len(column)}s}" for text, column in zip(texts, columns, strict=True)]
        lines.append("  ".join([f"{row:<{width}s}", *shown]))
    return lines
