"""Output of a run: experiment trackers, and the texts printed before and after training."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from e2e_vl.config import RunConfig
from e2e_vl.data.batching import ExampleDataset
from e2e_vl.drawing import draw_boxes
from e2e_vl.predictions import Prediction, with_target
from e2e_vl.run.build import Run, Start
from e2e_vl.run.evaluate import COUNTS, MetricName
from e2e_vl.tasks.base import Task

PICTURES = 4  # per evaluation


def flatten_settings(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, bool | int | float | str]]:
    """Dotted names and plain values; lists become text, and None is left out."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flatten_settings(value, f"{prefix}{name}.")
        elif value is not None:
            yield prefix + name, value if isinstance(value, bool | int | float | str) else str(value)


def track_pictures(
    accelerator: Accelerator, task: Task, predictions: Sequence[Prediction], name: str, step: int
) -> None:
    """Draw a few predictions and log them to the trackers that accept images.

    The pictures show the first text with a target of each of the first images, the same in every evaluation. Images in
    archives are not drawn.
    """
    trackers = [one for one in accelerator.trackers if hasattr(one, "log_images")]
    if not trackers:
        return
    first_of: dict[str, Prediction] = {}  # by image file
    for one in with_target(predictions):
        if one.file_name is not None:
            first_of.setdefault(one.file_name, one)
    for number, prediction in enumerate(list(first_of.values())[:PICTURES]):
        words = task.describe(prediction)
        try:
            picture = draw_boxes(task.draw(prediction), [], title=f"{words.question} -> {words.answer}")
        except (FileNotFoundError, ValueError):  # in an archive, or the image was moved
            continue
        for tracker in trackers:
            key = f"{name} {number}"
            if tracker.name == "tensorboard":
                tracker.log_images({key: picture[None]}, step=step, dataformats="NHWC")
            else:  # aim and clearml take one picture per key, the others a list
                value = picture if tracker.name in ("aim", "clearml") else [picture]
                tracker.log_images({key: value}, step=step)


PRECISIONS = {"no": "float32", "bf16": "bfloat16 mixed with float32", "fp16": "float16 mixed with float32"}
SHOWN_NAMES = 3  # parameter names in a list


def describe_run(config: RunConfig, run: Run, accelerator: Accelerator, step: int, total_steps: int) -> str:
    """A summary of the run, printed before training."""
    settings, boxes, processes = config.train, config.eval.boxes, accelerator.num_processes
    if accelerator.device.type == "cpu":
        device = f"CPU with {torch.get_num_threads()} of {os.cpu_count()} threads"
    else:
        device = torch.cuda.get_device_name() if accelerator.device.type == "cuda" else str(accelerator.device)
    limit = config.data.texts_per_image
    texts = "all texts" if limit is None else "1 text" if limit == 1 else f"at most {limit} texts"
    steps = (
        f"{total_steps:,}{f', {step:,} of them done' if step else ''}, each with {settings.images_per_batch} images"
        f"{f' in {settings.accumulate} parts' if settings.accumulate > 1 else ''} and {texts} per image "
        f"({total_steps * settings.images_per_batch:,} images in all)"
    )
    lines = [
        ("device", f"{device}, {_count(processes, 'process', 'es')}, {PRECISIONS[settings.mixed_precision]}"),
        ("training", f"{config.data.train_split}: {_size(run.train_data)}, boxes: {config.data.boxes.train}"),
        *(
            ("evaluation", f"{split}: {_size(run.eval_data[split, boxes[0]])}, boxes: {', '.join(boxes)}")
            for split in (config.data.eval_splits if boxes else ())
        ),
        ("steps", steps),
        *describe_schedule_part(*settings.schedule_part),
        ("vocabulary", f"{len(run.tokenizer)} wordpieces, {config.data.vocabulary or 'built from the training texts'}"),
    ]
    parts = {"detector": run.model.detector, "encoder": run.model.encoder, "head": run.model.task}
    if run.model.phrase_head is not None:
        parts["phrases"] = run.model.phrase_head
    for name, part in parts.items():
        starts = [one for one in run.starts if one.part == ("task" if name == "head" else name)]
        number = sum(one.numel() for one in part.parameters())
        num_frozen = number - sum(one.numel() for one in part.parameters() if one.requires_grad)
        frozen = ", frozen" if num_frozen == number > 0 else f", {num_frozen:,} of them frozen" if num_frozen else ""
        lines.append((name, f"{number:,} parameters{frozen}, {describe_weights(part, starts)}"))
    return "\n".join([config.output, *(f"  {name:<11s} {text}" for name, text in lines)])


def describe_schedule_part(start: float, end: float) -> list[tuple[str, str]]:
    """The line of a run that follows a part of a longer schedule."""
    if (start, end) == (0.0, 1.0):
        return []
    moments = "; the moments of the optimiser begin at zero, whatever the earlier part left" if start else ""
    return [("schedule", f"{start:g} to {end:g} of a longer one{moments}")]


def _size(examples: ExampleDataset) -> str:
    corpus = examples.dataset.corpus
    alone = f" and {len(corpus):,} texts without images" if corpus is not None else ""
    return f"{len(examples.groups):,} images with {len(examples):,} texts{alone}"


def describe_weights(part: nn.Module, starts: Sequence[Start]) -> str:
    """How a part of the model was initialised: the weights files, and the names of random parameters."""
    if not starts:
        return "all random" if any(True for _ in part.parameters()) else "nothing to learn"
    sources = " and ".join(
        f"{_count(len(one.report.matched), 'tensor')} from {one.path} ({one.report.layout} names)" for one in starts
    )
    copied = [rule for one in starts for rule in one.report.copied]
    zero = sorted(set.intersection(*({*one.report.zero} for one in starts)))
    not_random = tuple(f"{part}." for part in zero)
    random = {
        name for name in set.intersection(*({*one.report.missing} for one in starts)) if not name.startswith(not_random)
    }
    unused = [name for one in starts for name in one.report.unexpected]
    return "; ".join(
        [
            sources,
            *([f"copied: {', '.join(copied)}"] if copied else []),
            *([f"starts at zero: {', '.join(zero)}"] if zero else []),
            f"random: {_names(name for name in part.state_dict() if name in random) or 'nothing'}",
            *([f"not used: {_names(unused)}"] if unused else []),
        ]
    )


def _count(number: int, what: str, plural: str = "s") -> str:
    return f"{number:,} {what}{'' if number == 1 else plural}"


def _names(names: Iterable[str]) -> str:
    names = list(names)
    more = f", and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return ", ".join(names[:SHOWN_NAMES]) + more


def describe_finished_run(output: Path, steps: int) -> str:
    return (
        f"{output} is already finished after {_count(steps, 'step')}; to continue, raise train.epochs or "
        "train.max_steps, or evaluate it with `e2e-vl evaluate`."
    )


def describe_results(summary: Mapping[str, Any], output: Path, report: Path) -> str:
    """The table of results and the output paths, printed after training. `summary` is the content of `metrics.json`."""
    seconds, best = summary["seconds_training"], summary.get("best")
    time = f"{seconds / 60:.0f} minutes" if seconds > 100 else f"{seconds:.0f} seconds"
    lines = _titled_table(f"last model, step {summary['steps']:,}:" if best else "", summary)
    if best and "metrics" in best:
        lines += _titled_table(f"best model, step {best['step']:,}:", best["metrics"])
    lines.append(f"{_count(summary['steps'], 'step')} in {time} of training")
    if "stopped_early" in summary:
        lines.append(f"stopped early: {_count(summary['stopped_early'], 'evaluation')} without a better value")
    if best:
        value = f"{best['metric']} {best['value']:.3f} at step {best['step']:,}, over {_count(best['images'], 'image')}"
        lines.append(f"best model: {output / 'best'} ({value})")
    return "\n".join([*lines, f"last model: {output / 'model'}", f"report: {report}"])


def _titled_table(title: str, metrics: Mapping[str, Any]) -> list[str]:
    table = format_results(metrics)
    return ["", *([title] if title else []), *table, ""] if table else []


def format_results(metrics: Mapping[str, Any]) -> list[str]:
    """A table with a row per split, metric and family, and a column per box source.
    Other names than those of metrics are ignored.
    """
    cells: dict[tuple[str, str, str], dict[str, Any]] = {}  # (split, metric, family) -> boxes -> value
    names = {name: found for name in metrics if (found := MetricName.read(name)) is not None}
    for name, found in names.items():
        cells.setdefault((found.split, found.metric, found.detail), {})[found.boxes] = metrics[name]
    splits = list(dict.fromkeys(split for split, *_ in cells))
    kinds = list(dict.fromkeys(metric for _, metric, _ in cells))
    # families follow the overall value; numbers of texts come last
    rows = sorted(cells, key=lambda row: (splits.index(row[0]), row[1] in COUNTS, kinds.index(row[1])))
    columns = list(dict.fromkeys(found.boxes for found in names.values()))
    labels = {row: "/".join(filter(None, row)) for row in rows}
    width = max(map(len, labels.values()), default=0)
    lines = ["  ".join([" " * width, *columns])] if cells else []
    for row in rows:
        form = ".0f" if row[1] in COUNTS else ".3f"
        texts = ["-" if cells[row].get(column) is None else format(cells[row][column], form) for column in columns]
        shown = [f"{text:>{len(column)}s}" for text, column in zip(texts, columns, strict=True)]
        lines.append("  ".join([f"{labels[row]:<{width}s}", *shown]))
    return lines
