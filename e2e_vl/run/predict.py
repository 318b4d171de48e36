"""Predictions of a whole split as a file for others, and the answer to one question about one image.

Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from detector.errors import UserError
from e2e_vl.config import BoxSource, RunConfig
from e2e_vl.io import check_output
from e2e_vl.metrics.names import named_metrics
from e2e_vl.model import VisionLanguageModel
from e2e_vl.run.build import build_examples, warn_of_random_boxes
from e2e_vl.run.checkpoint import load_model, saved_settings
from e2e_vl.run.evaluate import evaluate
from e2e_vl.run.launch import make_accelerator, on_main
from e2e_vl.tasks.base import with_target


def predict_split(
    run_dir: Path,
    *,
    split: str,
    boxes: BoxSource | str,
    output: Path,
    second_run_dir: Path | None = None,
    overrides: list[str] | None = None,
) -> tuple[dict[str, Any], bool]:
    """Write the file that the task's server or the literature expects; to be called on every process.

    Args:
        run_dir: run directory of tools/train.py, or a saved model folder.
        split: any split of the run's data set, also one without labels.
        output: the file; written by the main process.
        second_run_dir: the run for the other half of the file, for a task that has `Task.second_run`.
        overrides: `key=value` settings, the same for both runs.

    Returns:
        Metrics by name (without labels no accuracy), and whether this is the main process.

    Raises:
        FileNotFoundError, ValueError: an output that is a folder or a file of a run, no model there, a task without
            such a file, a second run that is missing, not needed or of another task, or data that do not fit.
    """
    check_output(output)
    boxes = BoxSource(boxes)
    loaded = _load_runs(run_dir, second_run_dir, overrides or [])
    examples = [build_examples(*one, split, boxes=boxes) for _, *one in loaded]  # errors early
    settings = loaded[0][1].train
    accelerator = make_accelerator(settings.mixed_precision, max_wait_minutes=settings.max_wait_minutes)
    predictions = []
    for (path, config, model, _), own in zip(loaded, examples, strict=True):
        if boxes is BoxSource.ONLINE:
            warn_of_random_boxes(saved_settings(path).detector)
        model.to(accelerator.device)
        found = evaluate(config, model, own, accelerator, name=f"{path.name}: {split}, {boxes}")
        predictions.append(with_target(found))
        model.cpu()
    task = loaded[0][2].task
    metrics = named_metrics(on_main(accelerator, lambda: task.metrics(predictions[0])), split, boxes)
    if len(predictions) == 2:
        joint = on_main(accelerator, lambda: task.joint_metrics(*predictions))
        metrics.update(named_metrics(joint, split, boxes))
    if accelerator.is_main_process:
        task.write_submission(output, *predictions)
    accelerator.wait_for_everyone()
    return metrics, accelerator.is_main_process


def _load_runs(
    run_dir: Path, second_run_dir: Path | None, overrides: list[str]
) -> list[tuple[Path, RunConfig, VisionLanguageModel, PreTrainedTokenizerBase]]:
    """One run, or the two that a submission file needs."""
    config, model, tokenizer = load_model(run_dir, overrides=overrides)
    task = model.task
    if not task.writes_submission:
        raise UserError(
            f"{run_dir} was trained for the task '{config.task.name}', which has no submission file; write its "
            "predictions with tools/evaluate.py."
        )
    if (second_run_dir is None) != (task.second_run is None):
        wanted = "needs one run; leave out the second one"
        if second_run_dir is None:
            wanted = f"needs two runs; give the other one as {task.second_run_option}"
        raise UserError(f"The submission file of the task '{config.task.name}' {wanted}.")
    loaded = [(run_dir, config, model, tokenizer)]
    if second_run_dir is not None:
        second = load_model(second_run_dir, overrides=[*overrides, *task.second_run])
        if second[0].task.name != config.task.name:
            raise UserError(
                f"{second_run_dir} was trained for the task '{second[0].task.name}' and {run_dir} for "
                f"'{config.task.name}'; give two runs of one task."
            )
        if second[0].train.mixed_precision != config.train.mixed_precision:
            raise UserError("The two runs have different precisions; set train.mixed_precision for both.")
        loaded.append((second_run_dir, *second))
    return loaded
