"""Predictions of a whole split as a file for others, and the answer to one text about one image."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch

from e2e_vl.config import RunConfig, load_config
from e2e_vl.data.asked import Asked
from e2e_vl.engine.build import Run, build_collate, build_dataset, named_parts, warn_of_random_boxes
from e2e_vl.engine.checkpoint import load_model, model_folder
from e2e_vl.engine.evaluate import evaluate, named_metrics
from e2e_vl.engine.launch import make_accelerator
from e2e_vl.model import VisionLanguageModel
from e2e_vl.structures import Batch, ModelOutput
from e2e_vl.tasks.base import Task


@dataclasses.dataclass
class Answer:
    """What a model says to one text about one image. Boxes are xyxy in pixels of the original image."""

    task: Task
    record: dict[str, Any]  # what `Task.predict` returned
    lines: list[str]  # the same for people, the answer first
    boxes: np.ndarray  # float32 [R, 4], the candidate boxes that the answer was made from
    attention: np.ndarray | None  # float32 [R]: how much the answer's position looks at each, mean of the last layer

    @property
    def box(self) -> list[float] | None:
        """What the text refers to, for a task that points at a box."""
        return self.record["box"] if self.task.points_at_box else None


def predict_split(
    run_dir: Path,
    *,
    split: str,
    boxes: str,
    output: Path,
    second_run_dir: Path | None = None,
    overrides: list[str] | None = None,
) -> tuple[dict[str, Any], bool]:
    """Write the file that the task's server or the literature expects; to be called on every process.

    Args:
        run_dir: run directory of tools/train.py, or a saved model folder.
        split: any split of the run's data set, also one without labels.
        boxes: source of the candidate boxes.
        output: the file; written by the main process.
        second_run_dir: the run for the other half of the file, for a task that has `Task.second_run`.
        overrides: `key=value` settings, the same for both runs.

    Returns:
        Metrics by name (without labels no accuracy), and whether this is the main process.

    Raises:
        FileNotFoundError, ValueError: an output that is a folder, no model there, a task without such a file, a second
            run that is missing, not needed or of another task, or data that do not fit.
    """
    if output.is_dir():  # known before everything is predicted
        raise ValueError(f"{output} is a folder; name the file that is to be written as --output.")
    words = list(overrides or [])
    config, model, tokenizer = load_model(run_dir, overrides=words)
    task = model.task
    if not task.writes_submission:
        raise ValueError(
            f"{run_dir} was trained for the task '{config.task.name}', which has no submission file; write its "
            "predictions with tools/evaluate.py."
        )
    if (second_run_dir is None) != (task.second_run is None):
        wanted = "needs two runs; give the other one" if second_run_dir is None else "needs one run; leave out the one"
        raise ValueError(f"The submission file of the task '{config.task.name}' {wanted} as --rationale-run.")
    loaded = [(run_dir, config, model, tokenizer)]
    if second_run_dir is not None:
        second = load_model(second_run_dir, overrides=[*words, *task.second_run])
        if second[0].task.name != config.task.name:
            raise ValueError(
                f"{second_run_dir} was trained for the task '{second[0].task.name}' and {run_dir} for "
                f"'{config.task.name}'; give two runs of one task."
            )
        if second[0].train.mixed_precision != config.train.mixed_precision:
            raise ValueError("The two runs have different precisions; set train.mixed_precision for both.")
        loaded.append((second_run_dir, *second))
    datasets = [build_dataset(own, tokenizer, split, boxes=boxes) for _, own, _, tokenizer in loaded]  # errors early

    accelerator = make_accelerator(config.train.mixed_precision)
    predictions = []
    for (path, own, own_model, own_tokenizer), dataset in zip(loaded, datasets, strict=True):
        if boxes == "online":
            warn_of_random_boxes(load_config(model_folder(path) / "config.yaml").detector)
        own_model.to(accelerator.device)
        run = Run(own_model, own_tokenizer, train_dataset=None, collate=build_collate(own_model, own.data))
        predictions.append(evaluate(own, run, own_model, dataset, accelerator, name=f"{path.name}: {split}, {boxes}"))
        own_model.cpu()
    metrics = named_metrics(task.metrics(predictions[0]), split, boxes)
    if len(predictions) == 2:
        metrics.update(named_metrics(task.joint_metrics(*predictions), split, boxes))
    if accelerator.is_main_process:
        task.write_submission(output, *predictions)
    accelerator.wait_for_everyone()
    return metrics, accelerator.is_main_process


def answer_text(run_dir: Path, asked: Asked) -> Answer:
    """Ask a trained model about one image.

    Args:
        run_dir: run directory of tools/train.py, or a saved model folder.
        asked: image, text and what else the task needs. The text is cut as in training.

    Raises:
        FileNotFoundError, ValueError: no model or image there, an empty text, a model that cannot answer one, or
            something that the task needs or does not take.
    """
    if not asked.text.strip():
        raise ValueError("The text is empty; write what to ask or to look for.")
    config, model, tokenizer = load_model(Path(run_dir))
    example_of = _reader(config, run_dir)
    if asked.boxes is None:
        warn_of_random_boxes(load_config(model_folder(run_dir) / "config.yaml").detector)
    example = example_of(asked, config.data, tokenizer, model.detector.config.input.format)
    batch = build_collate(model, config.data)([example])
    with torch.no_grad():
        batch = model.task.prepare_asked(batch, model.detector)
        output = model(batch, output_attentions=True)
        record = model.task.answer(batch, output, tokenizer)
    return Answer(model.task, record, model.task.answer_lines(record), *_regions(model, batch, output, record))


def _reader(config: RunConfig, run_dir: Path) -> Any:
    """`example_of` of the run's data set.

    Raises:
        ValueError: the run does not answer a text about an image.
    """
    example_of = getattr(named_parts(config).dataset, "example_of", None)
    if example_of is None:
        raise ValueError(
            f"{run_dir} was trained for the task '{config.task.name}', which does not answer a text; give a run of a "
            "task that does, such as refcoco, vqa, vcr or pretraining."
        )
    if config.detector.backend == "precomputed":
        raise ValueError(
            f"{run_dir} reads saved region features, so it cannot look at an image; give a run with a detector."
        )
    if config.data.blank_text or config.data.blank_image:
        missing = "text" if config.data.blank_text else "image"
        raise ValueError(f"{run_dir} is a control that was trained without seeing any {missing}; give another run.")
    return example_of


def _regions(
    model: VisionLanguageModel, batch: Batch, output: ModelOutput, record: dict[str, Any]
) -> tuple[np.ndarray, np.ndarray | None]:
    """Candidate boxes [R, 4] in original pixels, and the answer's attention [R] on them."""
    text = int(record.get("choice", 0))  # of several texts the chosen one
    regions = output.text_regions
    kept = regions.row[text] >= 0
    scales = batch.images.scales[0]
    boxes = (regions.boxes[text, kept] / torch.cat([scales, scales])).numpy()
    maps = output.encoded.attentions
    if maps is None or model.task.points_at_box:
        return boxes, None
    length = batch.texts.input_ids.shape[1]
    position = int(batch.texts.positions["mask"][text]) if "mask" in batch.texts.positions else 0
    if position == 0 and regions.is_hidden[text].any():  # a hidden region is the question
        position = length + int(regions.is_hidden[text].int().argmax())
    return boxes, maps[-1][text, :, position, length : length + len(kept)].mean(dim=0)[kept].float().numpy()


def ground_phrase(run_dir: Path, image_path: Path, text: str) -> dict[str, Any]:
    """Find what a phrase refers to, with the boxes of the model's own detector.

    Args:
        run_dir: run directory of tools/train.py, or a saved model folder.
        image_path: any JPEG or PNG.
        text: the referring expression; cut to the run's `data.max_text_length` as in training.

    Returns:
        `box` [4] (None if there is no region and the task allows that), `score` (probability), `boxes` [R, 4] and
        `scores` [R] of all candidates; boxes are xyxy in pixels of the original image.

    Raises:
        FileNotFoundError, ValueError: no model or image there, an empty phrase, or a model of another task.
    """
    if not text.strip():
        raise ValueError("The phrase is empty; say what to look for.")
    config = load_config(model_folder(run_dir) / "config.yaml")
    if not named_parts(config).task[1].points_at_box:
        raise ValueError(
            f"{run_dir} was trained for the task '{config.task.name}', which does not answer a phrase with a box; give "
            "a run of a task that does, such as refcoco."
        )
    record = answer_text(run_dir, Asked(Path(image_path), text)).record
    return {
        "box": record["box"],
        "score": record["score"],
        "boxes": record["candidate_boxes"],
        "scores": record["candidate_scores"],
    }
