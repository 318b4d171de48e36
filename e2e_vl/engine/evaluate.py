"""The evaluation loop: every text of a split exactly once, over any number of processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast, gather_object
from tqdm.auto import tqdm

from e2e_vl.box_sources import BoxSource
from e2e_vl.config import RunConfig
from e2e_vl.data.loading.batches import BatchLoader
from e2e_vl.data.loading.example_dataset import ExampleDataset
from e2e_vl.data.loading.grouping import GroupedBatchSampler
from e2e_vl.engine.build_data import build_collate, build_examples, warn_of_random_boxes
from e2e_vl.engine.launch import make_accelerator
from e2e_vl.engine.loss_sums import LOSS, LossSums
from e2e_vl.engine.run import Run
from e2e_vl.engine.saving import load_model, saved_settings
from e2e_vl.metric_names import MetricName, named_metrics
from e2e_vl.model import VisionLanguageModel
from e2e_vl.run_files import check_output, write_json, write_text
from e2e_vl.tasks.base import Records, Task
from e2e_vl.tasks.phrase_head import grounding_metrics, in_short, with_phrases

EVALUATIONS = "evaluations"  # folder of a run directory, for what evaluate_run writes


def evaluate_splits(
    config: RunConfig,
    run: Run,
    accelerator: Accelerator,
    *,
    max_images: int | None = None,
    output: Path | None = None,
    show: Callable[[Records, str], None] | None = None,
) -> dict[str, Any]:
    """Evaluate all of `data.eval_splits` with all of `eval.boxes`, on `run.eval_data`.

    Args:
        max_images: look only at the first `max_images` images of each split; None = all.
        output: folder for `predictions_<split>_<boxes>.json`; None writes none.
        show: given the predictions of each split and box source, and their name, on the main process.

    Returns:
        Metrics under names such as `val/accuracy_own_boxes` and `val/accuracy_own_boxes/relation`; with `val/loss_...`,
        the sum of the mean losses, if `train.keep_best` judges by it.
    """
    metrics: dict[str, Any] = {}
    best = MetricName.read(config.train.keep_best or "")
    for split in config.data.eval_splits:
        for boxes in map(BoxSource, config.eval.boxes):
            examples, name = run.eval_data[split, boxes], f"{split}, {boxes}"
            is_judged = best is not None and (best.metric, best.split, best.source) == (LOSS, split, boxes)
            losses = LossSums() if is_judged else None
            records = evaluate(
                config, run.model, examples, accelerator, max_images=max_images, name=name, losses=losses
            )
            scores = run.model.task.metrics(records) | grounding_metrics(records)
            if losses is not None:
                scores |= losses.score(config)
            metrics.update(named_metrics(scores, split, boxes))
            if output is not None and accelerator.is_main_process:
                write_predictions(output / f"predictions_{split}_{boxes}.json", records, run.model.task)
            if show is not None and accelerator.is_main_process:
                show(records, name)
    return metrics


def evaluate(
    config: RunConfig,
    model: VisionLanguageModel,
    examples: ExampleDataset,
    accelerator: Accelerator,
    *,
    max_images: int | None = None,
    name: str = "evaluation",
    losses: LossSums | None = None,
) -> list[dict[str, Any]]:
    """Predictions for every text of a split, as plain records, the same list on every process.

    Whole batches are dealt to the processes: a box's features depend a little on how far its image is padded, so the
    make-up of a batch must not depend on how many processes there are.

    Args:
        max_images: look only at the first `max_images` images; None = all.
        name: for the progress bar and errors.
        losses: the losses of the task and of phrases are added to it.

    Raises:
        RuntimeError: a text was predicted twice or not at all.
    """
    groups = examples.groups[:max_images] if max_images is not None else examples.groups
    sampler = GroupedBatchSampler(
        groups,
        images_per_batch=config.eval.images_per_batch,
        shuffle=False,
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
    )
    loader = BatchLoader(examples, sampler, build_collate(config, model), workers=config.data.workers)
    was_training = model.training
    model.eval()
    if accelerator.num_processes > 1:  # batch statistics of the main process count, as when the model is saved
        for buffer in model.buffers():
            broadcast(buffer, from_process=0)
    records: list[dict[str, Any]] = []
    bar = tqdm(loader, desc=name, unit="batch", leave=False, delay=1, disable=not accelerator.is_local_main_process)
    with torch.no_grad(), accelerator.autocast(), bar:
        for batch in bar:
            batch = batch.to(accelerator.device)
            output = with_phrases(model(batch, output_attentions=model.task.reads_attention))
            records += model.task.predict(output.batch, output)
            if losses is not None:
                losses.add(output.task_losses)
    model.train(was_training)
    records = gather_object(records)
    records.sort(key=lambda record: record["text_index"])
    expected = sorted(index for group in groups for index in group)
    if [record["text_index"] for record in records] != expected:
        raise RuntimeError(f"{name}: {len(records)} predictions for {len(expected)} texts; some are missing or double.")
    return records


def write_predictions(path: Path, records: list[dict[str, Any]], task: Task) -> None:
    """One JSON list, one object per text, each with `correct`; all boxes xyxy in pixels of the original image."""
    lines = [json.dumps(in_short(record) | {"correct": task.correct(record)}, ensure_ascii=False) for record in records]
    write_text(path, "[\n" + ",\n".join(lines) + "\n]\n")


def evaluate_run(
    run_dir: Path,
    *,
    split: str,
    boxes: BoxSource | str,
    iou: str | None = None,
    output: Path | None = None,
    overrides: list[str] | None = None,
) -> tuple[dict[str, Any], Path | None]:
    """Load a trained run and evaluate it; what tools/evaluate.py does.

    Args:
        output: file of the predictions; the metrics go beside it, into `<its name>_metrics.json`. None: the folder
            `evaluations` of the run, where an earlier evaluation of the same name is replaced.

    Returns:
        The metrics (as in `evaluate_splits`), and the predictions file on the main process (None on the others).

    Raises:
        FileNotFoundError, ValueError: no model there, an unknown split, data that do not fit, or an output that is a
            folder or a file of a run itself.
    """
    boxes = BoxSource(boxes)
    name = "_".join([split, boxes, *([iou] if iou is not None else [])])
    path = output or run_dir / EVALUATIONS / f"{name}.json"
    metrics_path = path.with_name(f"{path.stem}_metrics.json")
    # an earlier evaluation has its metrics beside it, which no file of a run itself has
    check_output(path, may_replace=metrics_path.is_file())
    check_output(metrics_path, may_replace=True)
    convention = [f"task.config.iou_convention={iou}"] if iou is not None else []
    config, model, tokenizer = load_model(run_dir, overrides=[*(overrides or []), *convention])
    if boxes is BoxSource.ONLINE:
        warn_of_random_boxes(saved_settings(run_dir).detector)
    accelerator = make_accelerator(config.train.mixed_precision)
    model.to(accelerator.device)
    examples = build_examples(config, model, tokenizer, split, boxes=boxes)
    records = evaluate(config, model, examples, accelerator, name=f"{split}, {boxes}")
    metrics = named_metrics(model.task.metrics(records) | grounding_metrics(records), split, boxes)
    if accelerator.is_main_process:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(metrics_path, {**metrics, "run": str(run_dir), "settings": [*(overrides or []), *convention]})
        write_predictions(path, records, model.task)
    accelerator.wait_for_everyone()
    return metrics, path if accelerator.is_main_process else None
