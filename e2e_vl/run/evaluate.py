"""The evaluation loop: each text of a split exactly once, over any number of processes."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast, gather_object
from tqdm.auto import tqdm

from detector.errors import UserError, user_path
from detector.io import write_json
from detector.structures import Loss
from e2e_vl.config import BoxSource, RunConfig
from e2e_vl.data.batching import BatchLoader, EncodedDataset, GroupedBatchSampler, Unreadable, collate
from e2e_vl.io import check_output, file_name, replace_nan
from e2e_vl.metrics import baselines
from e2e_vl.metrics.sureness import MIN_ANSWERS, sure_threshold
from e2e_vl.model import VisionLanguageModel
from e2e_vl.predictions import PhrasesOnly, Prediction, with_target, write_list
from e2e_vl.run.build import Run, build_examples, draw_missing_scenes, warn_of_random_boxes
from e2e_vl.run.checkpoint import load_model, load_saved_config
from e2e_vl.run.launch import gather_to_main, make_accelerator, on_main
from e2e_vl.run.metric_names import LOSS, SURE_THRESHOLD, MetricName, Metrics, metrics_to_json, name_metrics
from e2e_vl.tasks.base import Task
from e2e_vl.tasks.box_refinement import REFINEMENT
from e2e_vl.tasks.phrase_head import SHORT_PATH, TAGS, add_grounded_phrases, grounding_metrics
from e2e_vl.tasks.segmentation import SEGMENTATION
from e2e_vl.terminal import lasting_output

logger = logging.getLogger(__name__)

EVALUATIONS = "evaluations"  # folder in a run directory for the output of `evaluate_run`


def task_loss_weights(config: RunConfig) -> dict[str, float]:
    """Return the weights of the losses that are added to the task's, by name; all others of a task have weight 1."""
    return {
        **phrase_weights(config),
        REFINEMENT: config.box_refinement.weight,
        SEGMENTATION: config.segmentation.weight,
    }


def phrase_weights(config: RunConfig) -> dict[str, float]:
    """Return the weights of the phrase losses, by name."""
    phrases = config.phrases
    return {
        "phrases": phrases.weight,
        TAGS: phrases.weight * phrases.tag_weight,
        SHORT_PATH: phrases.weight * phrases.short_path_weight,
    }


class LossSums:
    """Sums losses over the batches of this process."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, float]] = {}  # name -> total and number of items

    def add(self, losses: Mapping[str, Loss]) -> None:
        for name, loss in losses.items():
            total, count = self._sums.get(name, (0.0, 0.0))
            self._sums[name] = total + float(loss.total), count + float(loss.count)

    def means(self) -> dict[str, float]:
        """Return the mean of each loss over the items of all processes; losses without items are left out."""
        sums: dict[str, tuple[float, float]] = {}
        for name, total, count in gather_object([(name, *pair) for name, pair in self._sums.items()]):
            before = sums.get(name, (0.0, 0.0))
            sums[name] = before[0] + total, before[1] + count
        return {name: total / count for name, (total, count) in sums.items() if count}

    def metrics(self, config: RunConfig) -> dict[str, float]:
        """Return the metric `LOSS`, the weighted sum of the means; empty if no loss has items."""
        means = self.means()
        if not means:
            return {}
        weights = task_loss_weights(config)
        return {LOSS: sum(weights.get(name, 1.0) * mean for name, mean in sorted(means.items()))}


@dataclasses.dataclass
class Evaluation:
    """The result of one split with one box source."""

    predictions: list[Prediction]  # all on the main process, empty on the others
    metrics: Metrics
    unreadable: list[Unreadable]  # images that were skipped

    def write(self, predictions: Path, unreadable: Path) -> None:
        """Write the predictions, and a list of skipped images if there are any."""
        write_list(predictions, self.predictions)
        unreadable.unlink(missing_ok=True)
        if self.unreadable:
            write_json(unreadable, [dataclasses.asdict(request) for request in self.unreadable])


class InterruptedEvaluationError(Exception):
    """A process received a signal, so the evaluation was given up between two batches, on all processes."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"received signal {signal_number}")
        self.signal_number = signal_number


def compute_metrics(task: Task, predictions: Sequence[Prediction]) -> dict[str, Any]:
    """Return the task's metrics over the texts with a target, and the phrase metrics over all texts."""
    judged = with_target(predictions)
    metrics: dict[str, Any] = {}
    if judged or not predictions:  # otherwise the texts only have phrases
        metrics |= task.metrics(judged)
    return metrics | grounding_metrics(predictions)


def sureness_metrics(task: Task, predictions: Sequence[Prediction]) -> dict[str, float | None]:
    """Return the metric `SURE_THRESHOLD` of a whole split; empty if fewer than `MIN_ANSWERS` answers can be judged."""
    certainties: list[float] = []
    correctness: list[float] = []
    for prediction in with_target(predictions):
        certainty = task.certainty(prediction)
        if certainty is not None and prediction.correct is not None:
            certainties.append(certainty)
            correctness.append(prediction.correct)
    if len(certainties) < MIN_ANSWERS:
        return {}
    return {SURE_THRESHOLD: sure_threshold(certainties, correctness)}


def find_sure_threshold(metrics: Metrics, splits: Iterable[str], boxes: BoxSource) -> float:
    """Return the certainty from which on answers about such boxes are sure, from the metrics of a run.

    Args:
        splits: the first one with a threshold counts, so `data.eval_splits` begins with the validation split.

    Returns:
        The threshold; inf: no answer is sure; -inf: the run did not measure it, so no answer is called unsure.
    """
    for split in splits:
        name = MetricName(split, SURE_THRESHOLD, boxes)
        if name in metrics:
            threshold = metrics[name]
            return math.inf if threshold is None else threshold
    return -math.inf


def mark_unsure(task: Task, predictions: Iterable[Prediction], threshold: float) -> None:
    """Set `is_unsure` of the predictions whose certainty is below the threshold."""
    for prediction in predictions:
        certainty = task.certainty(prediction)
        prediction.is_unsure = certainty is not None and certainty < threshold


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """Evaluates models over all processes of an accelerator."""

    config: RunConfig
    accelerator: Accelerator
    # the number of a signal that this process has received, or None; called before each batch
    received_signal: Callable[[], int | None] = lambda: None

    def evaluate_splits(
        self,
        run: Run,
        *,
        max_images: int | None = None,
        output: Path | None = None,
        show: Callable[[list[Prediction], str], None] | None = None,
    ) -> Metrics:
        """Evaluate all of `data.eval_splits` with all of `eval.boxes`, on `run.eval_data`.

        Missing and unreadable images are skipped: they are logged, counted by the metric `unreadable_images`, and with
        `output` listed in `unreadable_<split>_<boxes>.json`.

        Args:
            max_images: evaluate only the first `max_images` images of each split; None = all.
            output: folder for `predictions_<split>_<boxes>.json`; None writes nothing.
            show: called on the main process with the predictions of each split and box source, and their name.

        Returns:
            The metrics of all splits, including the loss if `train.metric_for_best_model` names it.

        Raises:
            InterruptedEvaluationError: a process has received a signal.
        """
        metrics: Metrics = {}
        best = MetricName.read(self.config.train.metric_for_best_model or "")
        for split in self.config.data.eval_splits:
            for boxes in map(BoxSource, self.config.eval.boxes):
                needs_loss = best is not None and best.whole == MetricName(split, LOSS, boxes)
                examples = run.eval_data[split, boxes]
                evaluation = self.evaluate_split(
                    run.model, examples, split, boxes, max_images=max_images, with_loss=needs_loss
                )
                metrics |= evaluation.metrics
                if self.accelerator.is_main_process:
                    if show is not None:
                        show(evaluation.predictions, f"{split}, {boxes}")
                    if output is not None:
                        ending = f"{file_name(split)}_{boxes}.json"
                        evaluation.write(output / f"predictions_{ending}", output / f"unreadable_{ending}")
        return metrics

    def evaluate_split(
        self,
        model: VisionLanguageModel,
        examples: EncodedDataset,
        split: str,
        boxes: BoxSource,
        *,
        max_images: int | None = None,
        with_loss: bool = False,
        skip_broken: bool = True,
    ) -> Evaluation:
        """Return the predictions and metrics of one split.

        Args:
            with_loss: include the loss if any text has a target.
            skip_broken: skip missing and unreadable images; False: raise an error.
        """
        losses = LossSums() if with_loss else None
        unreadable: list[Unreadable] = []
        predictions = self.predict_texts(
            model,
            examples,
            max_images=max_images,
            name=f"{split}, {boxes}",
            losses=losses,
            unreadable=unreadable if skip_broken else None,
        )
        scores = on_main(self.accelerator, lambda: compute_metrics(model.task, predictions))
        if unreadable:
            unreadable_images: set[tuple[int, str]] = set()
            for request in unreadable:
                unreadable_images.update((request.split_index, image_id) for image_id in request.images)
            scores["unreadable_images"] = len(unreadable_images)
        if losses is not None:
            scores |= losses.metrics(self.config)
        if max_images is None:
            data = self.config.data
            scores |= on_main(self.accelerator, lambda: sureness_metrics(model.task, predictions))
            scores |= baselines.best_baselines(user_path(data.root, "data.root"), data.name, split)
        return Evaluation(predictions, name_metrics(scores, split, boxes), unreadable)

    def predict_texts(
        self,
        model: VisionLanguageModel,
        examples: EncodedDataset,
        *,
        max_images: int | None = None,
        name: str = "evaluation",
        losses: LossSums | None = None,
        unreadable: list[Unreadable] | None = None,
    ) -> list[Prediction]:
        """Predict every text of a split, with `correct`; the result is empty on all but the main process.

        Args:
            losses: accumulates the losses of the task and of phrases.
            unreadable: collects missing and unreadable images of all processes, which are skipped and logged; None:
                such an image raises an error.
        """
        accelerator = self.accelerator
        skipped = None if unreadable is None else []
        loader = make_loader(self.config, examples, accelerator, max_images=max_images, unreadable=skipped)
        was_training = model.training
        model.eval()
        if accelerator.num_processes > 1:  # use the batch statistics of the main process, as `save_model` does
            for buffer in model.buffers():
                broadcast(buffer, from_process=0)
        predictions: list[Prediction] = []
        bar = tqdm(loader, desc=name, unit="batch", leave=False, delay=1, disable=not accelerator.is_local_main_process)
        with torch.no_grad(), accelerator.autocast(), bar:
            for batch in bar:
                if self.received_signal() is not None:
                    break
                batch = batch.to(accelerator.device)
                output = model(batch, output_attentions=model.task.reads_attention).on_cpu()
                output = add_grounded_phrases(output)
                predictions += model.task.predict(output)
                if losses is not None:
                    losses.add(output.task_losses)
        model.train(was_training)
        signal_numbers = [number for number in gather_object([self.received_signal()]) if number is not None]
        if signal_numbers:
            raise InterruptedEvaluationError(signal_numbers[0])
        predictions = gather_to_main(accelerator, predictions)
        if unreadable is not None:
            unreadable += sorted(gather_object(skipped), key=lambda request: request.texts)
            if unreadable and accelerator.is_main_process:
                more = f" (and {len(unreadable) - 1} more)" if len(unreadable) > 1 else ""
                texts = sum(len(request.texts) for request in unreadable)
                logger.warning("%s: %s%s; %d texts have no prediction.", name, unreadable[0].reason, more, texts)
        if not accelerator.is_main_process:
            return predictions
        predictions.sort(key=lambda prediction: prediction.text_index)
        if unreadable and not predictions:
            raise UserError(f"{name}: no image can be read; {unreadable[0].reason}")
        for prediction in predictions:
            if not isinstance(prediction, PhrasesOnly):
                prediction.correct = model.task.correctness(prediction)
        return predictions


def make_loader(
    config: RunConfig,
    examples: EncodedDataset,
    accelerator: Accelerator,
    *,
    max_images: int | None = None,
    unreadable: list[Unreadable] | None = None,
) -> BatchLoader:
    """Return the batches of this process, of the first `max_images` images (None: all), each image once.

    Processes receive whole batches: features depend slightly on padding, so the composition of a batch must not
    depend on the number of processes. `unreadable`: see `BatchLoader`.
    """
    sampler = GroupedBatchSampler(
        examples.groups[:max_images],
        images_per_batch=config.eval.images_per_batch,
        shuffle=False,
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
    )
    joined = functools.partial(collate, canvas=config.data.canvas)
    return BatchLoader(examples, sampler, joined, workers=config.data.workers, unreadable=unreadable)


@lasting_output()
def evaluate_run(
    run_dir: Path,
    *,
    split: str,
    boxes: BoxSource | str,
    iou: str | None = None,
    output: Path | None = None,
    overrides: list[str] | None = None,
    with_loss: bool = False,
) -> tuple[dict[str, Any], Path | None]:
    """Load a trained run and evaluate it; the implementation of `e2e-vl evaluate`.

    Args:
        with_loss: include the loss as `train.metric_for_best_model` uses it; its value is None if no text has a target.
        output: file of the predictions; metrics are written to `<its name>_metrics.json` beside it. None: a file in the
            run's folder `evaluations`, which replaces an earlier evaluation of the same name.

    Returns:
        The metrics by the names that their file has, and the predictions file on the main process (None on the
        others).
    """
    boxes = BoxSource(boxes)
    name = "_".join([split, boxes, *([iou] if iou is not None else [])])
    path = output or run_dir / EVALUATIONS / f"{file_name(name)}.json"
    metrics_path = path.with_name(f"{path.stem}_metrics.json")
    check_output(path, may_replace=metrics_path.is_file())  # only an earlier evaluation has a metrics file beside it
    check_output(metrics_path, may_replace=True)
    convention = [f"task.config.iou_convention={iou}"] if iou is not None else []
    config, model, tokenizer = load_model(run_dir, overrides=[*(overrides or []), *convention])
    if boxes is BoxSource.ONLINE:
        warn_of_random_boxes(config.detector)
    waits = config.train.max_wait_minutes
    accelerator = make_accelerator(config.train.mixed_precision, tf32=config.train.tf32, max_wait_minutes=waits)
    model.to(accelerator.device)
    draw_missing_scenes(config)
    examples = build_examples(config, model, tokenizer, split, boxes=boxes)
    evaluation = Evaluator(config, accelerator).evaluate_split(
        model, examples, split, boxes, with_loss=with_loss, skip_broken=config.data.skip_broken
    )
    metrics: Metrics = {}
    if with_loss:
        metrics[MetricName(split, LOSS, boxes)] = None
    metrics |= evaluation.metrics
    named_values = metrics_to_json(metrics)
    if accelerator.is_main_process:
        settings = [*(overrides or []), *convention]
        write_json(metrics_path, {**replace_nan(named_values), "run": str(run_dir), "settings": settings})
        evaluation.write(path, path.with_name(f"{path.stem}_unreadable.json"))
    accelerator.wait_for_everyone()
    return named_values, path if accelerator.is_main_process else None


@lasting_output()
def predict_split(
    run_dir: Path,
    *,
    split: str,
    boxes: BoxSource | str,
    output: Path,
    second_run_dir: Path | None = None,
    overrides: list[str] | None = None,
) -> tuple[dict[str, Any], bool]:
    """Write the task's submission file; called on every process.

    Args:
        second_run_dir: the run for the second half of the file, for a task whose `Submission` has a `second_run`.

    Returns:
        The metrics by their names in files (no accuracy without labels), and whether this is the main process.
    """
    check_output(output)
    boxes = BoxSource(boxes)
    overrides = overrides or []
    loaded = [load_model(run_dir, overrides=overrides)]
    config, model, _ = loaded[0]
    task = model.task
    submission = model.task.submission
    if submission is None:
        raise UserError(
            f"{run_dir} was trained for the task '{config.task.name}', which has no submission file; write its "
            "predictions with `e2e-vl evaluate`."
        )
    second_task = None if second_run_dir is None else load_saved_config(second_run_dir).task.name
    second_run = submission.second_run
    if second_run is None and second_task is not None:
        raise UserError(f"The submission file of the task '{config.task.name}' needs one run.")
    if second_run is not None and second_task != config.task.name:
        raise UserError(
            f"The submission file of the task '{config.task.name}' needs two runs of it, the other one as "
            f"{second_run.option}."
        )
    if second_run_dir is not None:
        same = f'train.mixed_precision="{config.train.mixed_precision}"'
        loaded.append(load_model(second_run_dir, overrides=[*overrides, *second_run.settings, same]))
    draw_missing_scenes(config)
    data = [build_examples(*parts, split, boxes=boxes) for parts in loaded]  # errors early
    accelerator = make_accelerator(
        config.train.mixed_precision, tf32=config.train.tf32, max_wait_minutes=config.train.max_wait_minutes
    )
    predictions = []
    for (config, model, _), examples in zip(loaded, data, strict=True):
        if boxes is BoxSource.ONLINE:
            warn_of_random_boxes(config.detector)
        model.to(accelerator.device)
        evaluator = Evaluator(config, accelerator)
        predictions.append(with_target(evaluator.predict_texts(model, examples, name=f"{split}, {boxes}")))
        model.cpu()
    metrics = on_main(accelerator, lambda: task.metrics(predictions[0]))
    if len(predictions) == 2:
        metrics |= on_main(accelerator, lambda: second_run.joint_metrics(*predictions))
    if accelerator.is_main_process:
        submission.write(output, *predictions)
    accelerator.wait_for_everyone()
    return metrics_to_json(name_metrics(metrics, split, boxes)), accelerator.is_main_process
