"""Output of a run: experiment trackers, and the texts printed before and after training."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from e2e_vl.config import RunConfig
from e2e_vl.data.batching import EncodedDataset
from e2e_vl.drawing import draw_boxes
from e2e_vl.predictions import Prediction, with_target
from e2e_vl.run.build import InitialWeights, Run
from e2e_vl.run.launch import has_bf16_instructions
from e2e_vl.run.metric_names import COUNTS, Metrics, metrics_from_json
from e2e_vl.tasks.base import Task

PICTURES = 4  # per evaluation


def flatten_settings(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, bool | int | float | str]]:
    """Yield dotted names and plain values of settings; lists become text, and None is left out."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flatten_settings(value, f"{prefix}{name}.")
        elif isinstance(value, bool | int | float | str):
            yield prefix + name, value
        elif value is not None:
            yield prefix + name, str(value)


def tracker_options(config: RunConfig) -> dict[str, dict[str, Any]]:
    """Return the name and the tags of a run as the arguments that each tracker has for them, by tracker."""
    tracking = config.train.tracking
    name = tracking.name or Path(config.output).name
    return {
        "wandb": {"name": name, "tags": tracking.tags},
        "trackio": {"name": name},
        "mlflow": {"run_name": name, "tags": dict.fromkeys(tracking.tags, "true")},
    }


def track_pictures(
    accelerator: Accelerator, task: Task, predictions: Sequence[Prediction], name: str, step: int
) -> None:
    """Draw a few predictions and log them to the trackers that accept images.

    The pictures show the first text with a target of each of the first images, the same in every evaluation. Images in
    archives are not drawn.
    """
    trackers = [tracker for tracker in accelerator.trackers if hasattr(tracker, "log_images")]
    if not trackers:
        return
    first_of: dict[str, Prediction] = {}  # by image file
    for prediction in with_target(predictions):
        if prediction.file_name is not None:
            first_of.setdefault(prediction.file_name, prediction)
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
    """Summarise a run, to be printed before training."""
    settings = config.train
    boxes = config.eval.boxes
    if accelerator.device.type == "cpu":
        device = f"CPU with {torch.get_num_threads()} of {os.cpu_count()} threads"
    elif accelerator.device.type == "cuda":
        device = torch.cuda.get_device_name()
    else:
        device = str(accelerator.device)
    processes = _count(accelerator.num_processes, "process", "es")
    limit = config.data.texts_per_image
    if limit is None:
        texts = "all texts"
    elif limit == 1:
        texts = "1 text"
    else:
        texts = f"at most {limit} texts"
    done = f", {step:,} of them done" if step else ""
    micro_batches = ""
    if settings.gradient_accumulation_steps > 1:
        micro_batches = f" in {settings.gradient_accumulation_steps} parts"
    steps = (
        f"{total_steps:,}{done}, each with {settings.images_per_batch} images{micro_batches} and {texts} per image "
        f"({total_steps * settings.images_per_batch:,} images in all)"
    )
    evaluations = []
    if boxes:
        for split in config.data.eval_splits:
            size = _describe_size(run.eval_data[split, boxes[0]])
            evaluations.append(("evaluation", f"{split}: {size}, boxes: {', '.join(boxes)}"))
    lines = [
        ("device", f"{device}, {processes}, {PRECISIONS[settings.mixed_precision]}"),
        *suggest_bf16(accelerator.device, settings.mixed_precision),
        ("training", f"{config.data.train_split}: {_describe_size(run.train_data)}, boxes: {config.data.boxes.train}"),
        *evaluations,
        ("steps", steps),
        *describe_schedule_part(*settings.schedule_fraction),
        ("vocabulary", f"{len(run.tokenizer)} wordpieces, {config.data.vocabulary or 'built from the training texts'}"),
    ]
    modules = {"detector": run.model.detector, "encoder": run.model.encoder, "head": run.model.task}
    if run.model.phrase_head is not None:
        modules["phrases"] = run.model.phrase_head
    if run.model.box_refinement is not None:
        modules["box_refinement"] = run.model.box_refinement
    for name, module in modules.items():
        part_name = "task" if name == "head" else name
        loaded = [weights for weights in run.initial_weights if weights.part == part_name]
        number = sum(parameter.numel() for parameter in module.parameters())
        num_frozen = sum(parameter.numel() for parameter in module.parameters() if not parameter.requires_grad)
        frozen = ""
        if num_frozen:
            frozen = ", frozen" if num_frozen == number else f", {num_frozen:,} of them frozen"
        lines.append((name, f"{number:,} parameters{frozen}, {describe_weights(module, loaded)}"))
    return "\n".join([config.output, *(f"  {name:<11s} {text}" for name, text in lines)])


def suggest_bf16(device: torch.device, mixed_precision: str) -> list[tuple[str, str]]:
    """Return the line of a run in float32 on a CPU that is faster in bf16; none for other runs."""
    if device.type != "cpu" or mixed_precision != "no" or not has_bf16_instructions():
        return []
    advice = "with train.mixed_precision=bf16, models of BASE size train about 1.8 times as fast"
    return [("precision", f"this CPU has bf16 instructions: {advice}")]


def describe_schedule_part(start: float, end: float) -> list[tuple[str, str]]:
    """Return the line of a run that follows a part of a longer schedule; none for a whole one."""
    if (start, end) == (0.0, 1.0):
        return []
    moments = ""
    if start:
        moments = "; the moments of the optimiser begin at zero, whatever the earlier part left"
    return [("schedule", f"{start:g} to {end:g} of a longer one{moments}")]


def _describe_size(examples: EncodedDataset) -> str:
    """Say how many images and texts a split has."""
    size = f"{len(examples.groups):,} images with {len(examples):,} texts"
    corpus = examples.dataset.corpus
    if corpus is not None:
        size += f" and {len(corpus):,} texts without images"
    return size


def describe_weights(part: nn.Module, loaded: Sequence[InitialWeights]) -> str:
    """Say in one line how a part was initialised: its files, and what is copied, zero, random or not used."""
    if not loaded:
        has_parameters = next(part.parameters(), None) is not None
        return "all random" if has_parameters else "nothing to learn"
    sources: list[str] = []
    copied: list[str] = []
    unused: list[str] = []
    zero = set(loaded[0].report.zero)  # modules that no file has, and that begin at zero
    missing = set(loaded[0].report.missing)  # parameters that no file has
    for weights in loaded:
        report = weights.report
        sources.append(f"{_count(len(report.matched), 'tensor')} from {weights.path} ({report.layout} names)")
        copied += report.copied
        unused += report.unexpected
        zero &= set(report.zero)
        missing &= set(report.missing)
    not_random = tuple(f"{module}." for module in zero)
    random = [name for name in part.state_dict() if name in missing and not name.startswith(not_random)]
    sentences = [" and ".join(sources)]
    if copied:
        sentences.append(f"copied: {', '.join(copied)}")
    if zero:
        sentences.append(f"starts at zero: {', '.join(sorted(zero))}")
    sentences.append(f"random: {_shorten_list(random) or 'nothing'}")
    if unused:
        sentences.append(f"not used: {_shorten_list(unused)}")
    return "; ".join(sentences)


def _count(number: int, what: str, plural: str = "s") -> str:
    ending = "" if number == 1 else plural
    return f"{number:,} {what}{ending}"


def _shorten_list(names: Sequence[str]) -> str:
    """Join the first names; the others are counted."""
    text = ", ".join(names[:SHOWN_NAMES])
    if len(names) > SHOWN_NAMES:
        text += f", and {len(names) - SHOWN_NAMES} more"
    return text


def describe_finished_run(output: Path, steps: int) -> str:
    """Say that a run which is to be resumed has ended, and how it can go on."""
    return (
        f"{output} is already finished after {_count(steps, 'step')}; to continue, raise train.epochs or "
        "train.max_steps, or evaluate it with `e2e-vl evaluate`."
    )


def describe_results(summary: Mapping[str, Any], output: Path, report: Path) -> str:
    """Return the table of results and the output paths, to be printed after training.

    Args:
        summary: the content of `metrics.json`.
    """
    seconds = summary["seconds_training"]
    best = summary.get("best")
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


def _titled_table(title: str, content: Mapping[str, Any]) -> list[str]:
    """Return a table with a title and a blank line before and after it; no lines without metrics.

    Args:
        content: metrics by their names in files; other values are ignored.
    """
    table = format_results(metrics_from_json(content))
    if not table:
        return []
    if title:
        table.insert(0, title)
    return ["", *table, ""]


def format_results(metrics: Metrics) -> list[str]:
    """Return the lines of a table with a row per split, metric and family, and a column per box source."""
    cells: dict[tuple[str, str, str], dict[str, Any]] = {}  # (split, metric, family) -> boxes -> value
    columns: list[str] = []
    for name, value in metrics.items():
        cells.setdefault((name.split, name.metric, name.detail), {})[name.boxes] = value
        columns.append(name.boxes)
    columns = list(dict.fromkeys(columns))
    splits = list(dict.fromkeys(split for split, *_ in cells))
    kinds = list(dict.fromkeys(metric for _, metric, _ in cells))
    # families follow the overall value; numbers of texts come last
    rows = sorted(cells, key=lambda row: (splits.index(row[0]), row[1] in COUNTS, kinds.index(row[1])))
    labels = {row: "/".join(filter(None, row)) for row in rows}
    width = max(map(len, labels.values()), default=0)
    lines = []
    if cells:
        lines.append("  ".join([" " * width, *columns]))
    for row in rows:
        form = ".0f" if row[1] in COUNTS else ".3f"
        texts = [f"{labels[row]:<{width}s}"]
        for column in columns:
            value = cells[row].get(column)
            text = "-" if value is None else format(value, form)
            texts.append(f"{text:>{len(column)}s}")
        lines.append("  ".join(texts))
    return lines
