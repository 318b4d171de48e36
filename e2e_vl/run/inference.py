"""What a trained model says to samples that were made by hand, such as a user's questions.

Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from e2e_vl.config import BoxSource, RunConfig
from e2e_vl.data.batching import random_generator
from e2e_vl.data.image_loader import Augmentation, ImageLoader
from e2e_vl.data.user_inputs import require_inside
from e2e_vl.examples import Example, ImageExample
from e2e_vl.model import VisionLanguageModel
from e2e_vl.run.build import build_collate, build_loader, build_text_tokenizer
from e2e_vl.samples import BrokenImageError, Sample, SampleImage
from e2e_vl.structures import Batch, ModelOutput, class_names_of
from e2e_vl.tasks.base import Task
from e2e_vl.tasks.phrase_head import with_phrases


@dataclasses.dataclass(frozen=True)
class Reply:
    """What a model says to one question. Boxes are xyxy in pixels of the original image."""

    task: Task
    record: dict[str, Any]  # what `Task.replies` returned
    boxes: np.ndarray  # float32 [R, 4], the candidate boxes that the answer was made from
    images: np.ndarray  # int64 [R], which of the sample's images each of them lies in
    names: list[str]  # R detected classes; "" where the boxes were given or the names are unknown
    attention: np.ndarray | None  # float32 [R]: how much the answer's position looks at each, mean of the last layer

    @property
    def lines(self) -> list[str]:
        """The answer in words, the best first."""
        return self.task.answer_lines(self.record)

    @property
    def box(self) -> list[float] | None:
        """What the text refers to, for a task that points at a box."""
        return self.record["box"] if self.task.points_at_box else None


def reply_to(
    config: RunConfig,
    model: VisionLanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    samples: Sequence[Sample],
    *,
    keep_going: bool = False,
) -> list[list[Reply] | Exception]:
    """Answer all questions of all samples, with one detector pass per sample (two in a pre-training run).

    The samples take the road of the data: they are loaded, worded and joined into batches of at most
    `eval.images_per_batch` samples, as in evaluation. Samples in a batch follow each other and have images of one size,
    so that no answer depends on what else is asked: where images are padded, a detector sees other edges.

    Args:
        samples: each a user's (`Sample.from_user`); those with and without annotated objects are not mixed.
        keep_going: a sample with such an image has its error in place of replies, and the others are answered.

    Returns:
        For each sample the replies in the order of its texts.

    Raises:
        FileNotFoundError, ValueError: an image that is missing or cannot be read, or boxes that lie outside it.
    """
    read = _reader(config, model, tokenizer, samples[0])
    collate = build_collate(config, model)
    together = config.eval.images_per_batch if model.task.answers_together else 1
    answers: list[list[Reply] | Exception] = []
    waiting: list[tuple[Example, int, list[Reply]]] = []  # with the number of questions

    def answer_waiting() -> None:
        if not waiting:
            return
        batch = collate([example for example, *_ in waiting]).to(next(model.parameters()).device)
        with torch.no_grad():
            replies = iter([*_replies(model, tokenizer, model(batch, output_attentions=True))])
        for _, number, own in waiting:
            own += itertools.islice(replies, number)
        waiting.clear()

    for sample in samples:
        try:
            example = read(sample)
        except (ValueError, OSError) as error:
            if not keep_going:
                raise
            answers.append(error)
            continue
        if len(waiting) == together or (waiting and _canvas(example) != _canvas(waiting[0][0])):
            answer_waiting()
        own: list[Reply] = []
        waiting.append((example, len(sample.texts), own))
        answers.append(own)
    answer_waiting()
    return answers


def _canvas(example: Example) -> tuple[int, ...]:
    """Height and width that hold all images of an example."""
    return tuple(map(max, zip(*(image.pixels.shape[:2] for image in example.images), strict=True)))


def look_at(
    config: RunConfig,
    model: VisionLanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    sample: Sample,
    change: Callable[[Batch], Batch] | None = None,
) -> tuple[Reply, ModelOutput]:
    """Answer the one question of a sample as `reply_to` does, and keep all that the model computed for it.

    Args:
        change: makes another batch of the question's own, such as one with hidden pixels, before the model sees it.

    Returns:
        The reply, and the model's output with attention maps.

    Raises:
        FileNotFoundError, ValueError: as `reply_to`.
    """
    example = _reader(config, model, tokenizer, sample)(sample)
    batch = build_collate(config, model)([example]).to(next(model.parameters()).device)
    with torch.no_grad():
        output = model(batch if change is None else change(batch), output_attentions=True)
        [reply] = _replies(model, tokenizer, output)
    return reply, output


def _reader(
    config: RunConfig, model: VisionLanguageModel, tokenizer: PreTrainedTokenizerBase, first: Sample
) -> Callable[[Sample], Example]:
    """What loads and words samples; whether boxes are given is decided by the first one."""
    boxes = BoxSource.ONLINE if first.images[0].objects is None else BoxSource.GT
    loader = build_loader(config, model, None, boxes)
    preprocessor = model.task.preprocessor(build_text_tokenizer(config, model, tokenizer))
    make_generator = functools.partial(random_generator, config.seed, 0)

    def read(sample: Sample) -> Example:
        images = [_load(loader, image, loader.draw_augmentation(make_generator(0))) for image in sample.images]
        return Example(images, list(preprocessor(sample, images, make_generator)))

    return read


def _load(loader: ImageLoader, image: SampleImage, augmentation: Augmentation) -> ImageExample:
    """One image with the user's boxes, which must lie in it."""
    try:
        example = loader.load(image, augmentation)
    except BrokenImageError as error:
        raise error.__cause__ from None
    size = example.image_transform.original_size
    for own in (image.boxes, image.objects):
        if own is not None:
            require_inside(own.boxes, size, own.origin, example.name)
    if image.boxes_to_mask is not None:
        require_inside(image.boxes_to_mask, size, "boxes to hide", example.name)
    return example


def _replies(model: VisionLanguageModel, tokenizer: PreTrainedTokenizerBase, output: ModelOutput) -> Iterator[Reply]:
    records = model.task.replies(with_phrases(output), tokenizer)
    texts_of_each = len(output.batch) // len(records)  # a question with four choices is four texts
    for number, record in enumerate(records):
        text = number * texts_of_each + int(record.get("choice", 0))
        yield Reply(model.task, record, *_regions(model, output, text))


def _regions(
    model: VisionLanguageModel, output: ModelOutput, text: int
) -> tuple[np.ndarray, np.ndarray, list[str], np.ndarray | None]:
    """Of one text: candidates [R, 4] in original pixels, their images, names, and the answer's attention on them."""
    batch, regions = output.batch, output.text_regions
    kept = regions.row[text] >= 0
    images = regions.image[text, kept]
    boxes = (regions.boxes[text, kept] / batch.images.scales[images].repeat(1, 2)).cpu().numpy()
    slots = regions.image_slot[text, kept].cpu().numpy()
    names = [name for name, is_kept in zip(class_names_of(output)[text], kept.tolist(), strict=True) if is_kept]
    maps = output.encoded.attentions
    if maps is None or model.task.points_at_box:
        return boxes, slots, names, None
    length = batch.texts.input_ids.shape[1]
    position = _asking_position(batch, output, text)
    rows = [one[text, :, position, length : length + len(kept)] for one in maps]
    last = next((row for row in reversed(rows) if row.any()), rows[-1])  # a map may have no such block
    return boxes, slots, names, last.mean(dim=0)[kept].float().cpu().numpy()


def _asking_position(batch: Batch, output: ModelOutput, text: int) -> int:
    """Where the answer is read: at its own place, at the first labelled wordpiece, at a hidden region, or in front."""
    if batch.texts.summary is not None:
        return int(batch.texts.summary[text])
    asked = [] if batch.targets is None else batch.targets.labelled_wordpieces(text)
    if asked:
        return asked[0]
    is_masked = output.text_regions.is_masked[text]
    return batch.texts.input_ids.shape[1] + int(is_masked.int().argmax()) if is_masked.any() else 0
