"""What a trained model answers: questions that a user asks, and whole splits as a submission file.

Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from detector.errors import UserError
from e2e_vl.config import BoxSource, RunConfig
from e2e_vl.data.batching import random_generator
from e2e_vl.data.user_inputs import require_inside
from e2e_vl.examples import Example, ImageExample
from e2e_vl.io import check_output
from e2e_vl.metrics.names import named_metrics
from e2e_vl.model import VisionLanguageModel
from e2e_vl.predictions import Prediction, with_target
from e2e_vl.run.build import build_collate, build_examples, build_loader, build_text_tokenizer, warn_of_random_boxes
from e2e_vl.run.checkpoint import load_model, saved_settings
from e2e_vl.run.evaluate import evaluate
from e2e_vl.run.launch import make_accelerator, on_main
from e2e_vl.samples import BrokenImageError, Sample, SampleImage
from e2e_vl.structures import Batch, ModelOutput, class_names_of
from e2e_vl.tasks.base import Task
from e2e_vl.tasks.phrase_head import with_phrases


@dataclasses.dataclass(frozen=True)
class Reply:
    """What a model says to one question. Boxes are xyxy in pixels of the original image."""

    task: Task
    prediction: Prediction  # what `Task.replies` returned
    boxes: np.ndarray  # float32 [R, 4], the candidate boxes that the answer was made from
    images: np.ndarray  # int64 [R], which of the sample's images each of them lies in
    names: list[str]  # R detected classes; "" where the boxes were given or the names are unknown
    attention: np.ndarray | None  # float32 [R], attention of the answer's position to each, mean of the last layer


class Predictor:
    """Answers samples that were made from a user's questions; they are read, preprocessed and batched as data are.

    Boxes are given if the sample's image has annotated objects; otherwise they come with the sample or the detector
    finds them.
    """

    def __init__(self, config: RunConfig, model: VisionLanguageModel, tokenizer: PreTrainedTokenizerBase):
        self.config, self.model, self.tokenizer = config, model, tokenizer
        self.loaders = {boxes: build_loader(config, model, None, boxes) for boxes in (BoxSource.ONLINE, BoxSource.GT)}
        self.preprocessor = model.task.preprocessor(build_text_tokenizer(config, model, tokenizer))
        self.collate = build_collate(config, model)

    def reply(self, samples: Sequence[Sample], *, keep_going: bool = False) -> list[list[Reply] | Exception]:
        """Answer all texts of all samples, with one detector pass per sample (two in a pre-training run).

        A batch has at most `eval.images_per_batch` samples, which follow each other and have images of one size, so
        that no answer depends on what else is asked: where images are padded, a detector sees other edges.

        Args:
            samples: each a user's (`Sample.from_user`).
            keep_going: a sample whose image is missing or unreadable gets its error, and the others are answered.

        Returns:
            For each sample the replies in the order of its texts.
        """
        answers: list[list[Reply] | Exception] = [[] for _ in samples]
        limit = self.config.eval.images_per_batch if self.model.task.batches_questions else 1
        waiting: dict[int, Example] = {}

        def answer_waiting() -> None:
            if waiting:
                replies = iter(self._replies(self._run([*waiting.values()])))
                for number in waiting:
                    answers[number] = [*itertools.islice(replies, len(samples[number].texts))]
                waiting.clear()

        for number, sample in enumerate(samples):
            try:
                example = self._read(sample)
            except (ValueError, OSError) as error:
                if not keep_going:
                    raise
                answers[number] = error
                continue
            sizes = {_largest_size(one) for one in (example, *waiting.values())}
            if len(waiting) == limit or len(sizes) > 1:
                answer_waiting()
            waiting[number] = example
        answer_waiting()
        return answers

    def look(self, sample: Sample, change: Callable[[Batch], Batch] | None = None) -> tuple[Reply, ModelOutput]:
        """Answer the one question of a sample, and keep the model's output with its attention maps.

        Args:
            change: makes another batch of the question's own, such as one with masked pixels.
        """
        output = self._run([self._read(sample)], change)
        [reply] = self._replies(output)
        return reply, output

    def _read(self, sample: Sample) -> Example:
        loader = self.loaders[BoxSource.ONLINE if sample.images[0].objects is None else BoxSource.GT]
        make_generator = functools.partial(random_generator, self.config.seed, 0)
        images = []
        for image in sample.images:
            try:
                example = loader.load(image, loader.draw_augmentation(make_generator(0)))
            except BrokenImageError as error:
                raise error.__cause__ from None
            _require_boxes_inside(image, example)
            images.append(example)
        return Example(images, list(self.preprocessor(sample, images, make_generator)))

    @torch.no_grad()
    def _run(self, examples: list[Example], change: Callable[[Batch], Batch] | None = None) -> ModelOutput:
        batch = self.collate(examples).to(next(self.model.parameters()).device)
        return self.model(batch if change is None else change(batch), output_attentions=True)

    @torch.no_grad()
    def _replies(self, output: ModelOutput) -> list[Reply]:
        predictions = self.model.task.replies(with_phrases(output))
        texts_of_each = len(output.batch) // len(predictions)  # a question with four choices is four texts
        return [
            self._reply(prediction, output, number * texts_of_each + prediction.chosen_text)
            for number, prediction in enumerate(predictions)
        ]

    def _reply(self, prediction: Prediction, output: ModelOutput, text: int) -> Reply:
        batch, regions, task = output.batch, output.text_regions, self.model.task
        kept = regions.row[text] >= 0
        images = regions.image[text, kept]
        boxes = (regions.boxes[text, kept] / batch.images.scales[images].repeat(1, 2)).cpu().numpy()
        slots = regions.image_slot[text, kept].cpu().numpy()
        names = [name for name, is_kept in zip(class_names_of(output)[text], kept.tolist(), strict=True) if is_kept]
        maps, attention = output.encoded.attentions, None
        if maps is not None and not task.predicts_box:
            length = batch.texts.input_ids.shape[1]
            position = _answer_position(output, text)
            rows = [one[text, :, position, length : length + len(kept)] for one in maps]
            last = next((row for row in reversed(rows) if row.any()), rows[-1])  # a map may have no such block
            attention = last.mean(dim=0)[kept].float().cpu().numpy()
        return Reply(task, prediction, boxes, slots, names, attention)


def _largest_size(example: Example) -> tuple[int, ...]:
    """Height and width that hold all images of an example."""
    return tuple(map(max, zip(*(image.pixels.shape[:2] for image in example.images), strict=True)))


def _require_boxes_inside(image: SampleImage, example: ImageExample) -> None:
    size = example.image_transform.original_size
    for own in (image.boxes, image.objects):
        if own is not None:
            require_inside(own.boxes, size, own.origin, example.name)
    if image.boxes_to_mask is not None:
        require_inside(image.boxes_to_mask, size, "boxes to hide", example.name)


def _answer_position(output: ModelOutput, text: int) -> int:
    """Where the answer is read: at its own place, at the first labelled wordpiece, at a masked region, or in front."""
    batch = output.batch
    if batch.texts.summary is not None:
        return int(batch.texts.summary[text])
    asked = [] if batch.targets is None else batch.targets.labelled_wordpieces(text)
    if asked:
        return asked[0]
    is_masked = output.text_regions.is_masked[text]
    return batch.texts.input_ids.shape[1] + int(is_masked.int().argmax()) if is_masked.any() else 0


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
    """
    check_output(output)
    boxes, overrides = BoxSource(boxes), overrides or []
    loaded = [load_model(run_dir, overrides=overrides)]
    config, model, _ = loaded[0]
    task = model.task
    if task.write_submission is None:
        raise UserError(
            f"{run_dir} was trained for the task '{config.task.name}', which has no submission file; write its "
            "predictions with tools/evaluate.py."
        )
    if (second_run_dir is None) != (task.second_run is None):
        wanted = "one run" if task.second_run is None else f"two runs, the other one as {task.second_run_option}"
        raise UserError(f"The submission file of the task '{config.task.name}' needs {wanted}.")
    if second_run_dir is not None:
        if saved_settings(second_run_dir).task.name != config.task.name:
            raise UserError(f"{second_run_dir} and {run_dir} were trained for different tasks; give two runs of one.")
        same = f'train.mixed_precision="{config.train.mixed_precision}"'
        loaded.append(load_model(second_run_dir, overrides=[*overrides, *task.second_run, same]))
    data = [build_examples(*parts, split, boxes=boxes) for parts in loaded]  # errors early
    accelerator = make_accelerator(config.train.mixed_precision, max_wait_minutes=config.train.max_wait_minutes)
    predictions = []
    for (config, model, _), examples in zip(loaded, data, strict=True):
        if boxes is BoxSource.ONLINE:
            warn_of_random_boxes(config.detector)
        model.to(accelerator.device)
        predictions.append(with_target(evaluate(config, model, examples, accelerator, name=f"{split}, {boxes}")))
        model.cpu()
    metrics = on_main(accelerator, lambda: task.metrics(predictions[0]))
    if len(predictions) == 2:
        metrics |= on_main(accelerator, lambda: task.joint_metrics(*predictions))
    if accelerator.is_main_process:
        task.write_submission(output, *predictions)
    accelerator.wait_for_everyone()
    return named_metrics(metrics, split, boxes), accelerator.is_main_process
