"""What a pre-trained model says to one text of a user: the words at [MASK], and what hidden regions are.

Shape legend
    R   candidate boxes of the image
    P   hidden boxes
    C   region classes, background included
    V   wordpieces of the vocabulary
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from detector.boxes import pairwise_iou
from detector.interface import Detector
from e2e_vl.structures import Batch
from e2e_vl.tasks.pretraining_inputs import describe_classes

TOP = 5  # words or classes that are named
SAME_IOU = 0.5  # a candidate that overlaps a hidden box so much is the same object
MASK = "[MASK]"


def hide_asked(
    batch: Batch,
    detector: Detector,
    teacher: Detector | None,
    most: int | None,
    region_classes: int,
    *,
    background_first: bool = False,
) -> Batch:
    """A copy of a batch of one image in which exactly its `pixel_masks` are regions to hide and to predict.

    Args:
        batch: without boxes the detector (the teacher, if there is one) proposes them.
        detector: that of the model.
        teacher: says what the hidden boxes are when it sees them; None: nobody does.
        most: keep at most so many proposed boxes; None = all.
        region_classes: C.
        background_first: the order of the region classes.

    Returns:
        The batch with `boxes` (the P hidden ones first), `hidden_regions`, and `region_targets` with `is_labelled` and
        `class_probs`, which are zero without a teacher. Its images still show everything, and it has no `pixel_masks`.
    """
    boxes = batch.boxes
    if boxes is None:
        boxes, _ = describe_classes(detector if teacher is None else teacher, batch.images, None, most)
    candidates = boxes[0]
    hidden = candidates[:0] if batch.pixel_masks is None else batch.pixel_masks[0]
    if len(hidden) and len(candidates):
        candidates = candidates[(pairwise_iou(candidates, hidden) < SAME_IOU).all(dim=1)]
    joined = torch.cat([hidden, candidates])
    is_hidden = torch.arange(len(joined), device=joined.device) < len(hidden)
    probabilities = joined.new_zeros(len(joined), region_classes)
    if teacher is not None and len(hidden):
        _, [probabilities] = describe_classes(teacher, batch.images, [joined], None, background_first=background_first)
    return dataclasses.replace(
        batch,
        boxes=[joined],
        hidden_regions=[is_hidden],
        pixel_masks=None,
        region_targets={**batch.region_targets, "is_labelled": [is_hidden], "class_probs": [probabilities]},
    )


def describe_answer(
    batch: Batch,
    word_logits: Tensor,
    region_logits: Tensor,
    tokenizer: PreTrainedTokenizerBase,
    *,
    background_first: bool,
    are_detectors: bool = True,
) -> dict[str, Any]:
    """The record of the text with what the model says.

    Args:
        batch: one text and one image, see `hide_asked`.
        word_logits: float [number of [MASK]s, V].
        region_logits: float [P, C].
        tokenizer: names the words.
        background_first: the order of the region classes.
        are_detectors: the classes are those of the detector, so that they have the names of the record.

    Returns:
        `sent` and so on; `filled`, the text with the best word at each [MASK]; `masks`, a list per [MASK] of
        [word, probability]; `hidden`, a dict per hidden region with its `box` (xyxy, pixels of the original image),
        `classes` [[name, probability], ...] and `seen`, the same pair from the detector that sees it (None: nobody
        does). Best first; classes without a name are numbered from 0.

    Raises:
        ValueError: the sequence was cut before a [MASK] or a hidden region.
    """
    record = dict(batch.records[0])
    num_masks, class_names = record.pop("num_masks"), record.pop("class_names", None)
    is_hidden = batch.hidden_regions[0]
    if len(word_logits) < num_masks or len(region_logits) < int(is_hidden.sum()):
        raise ValueError(
            "Text and regions together are longer than task.config.max_length, and something that was asked for is cut "
            "off; shorten the text, or hide fewer regions."
        )
    masks = [
        list(zip(tokenizer.convert_ids_to_tokens(ids.tolist()), values.tolist(), strict=True))
        for values, ids in zip(*_best(word_logits.softmax(dim=1)), strict=True)
    ]
    best = iter(words[0][0].removeprefix("##") for words in masks)
    parts = record["sent"].split(MASK)
    record["filled"] = parts[0] + "".join(next(best) + part for part in parts[1:])
    record["masks"] = [[list(pair) for pair in words] for words in masks]

    classes = region_logits.shape[1]
    if class_names is None or len(class_names) != classes - 1 or not are_detectors:
        class_names = [f"class {number}" for number in range(classes - 1)]
    names = ["background", *class_names] if background_first else [*class_names, "background"]
    scales = batch.images.scales[0]
    boxes = (batch.boxes[0] / torch.cat([scales, scales]))[is_hidden].tolist()
    seen = batch.region_targets["class_probs"][0][is_hidden]
    record["hidden"] = [
        {
            "box": box,
            "classes": [[names[index], value] for value, index in zip(values.tolist(), indices.tolist(), strict=True)],
            "seen": [names[int(whole.argmax())], float(whole.max())] if whole.any() else None,
        }
        for box, values, indices, whole in zip(boxes, *_best(region_logits.softmax(dim=1)), seen, strict=True)
    ]
    return record


def answer_lines(record: dict[str, Any]) -> list[str]:
    """What `describe_answer` returned, for people."""
    lines = [record["filled"]] if record["masks"] else []
    for number, words in enumerate(record["masks"], start=1):
        lines.append(f"{MASK} {number}: {_listed(words)}")
    for number, region in enumerate(record["hidden"], start=1):
        seen = "" if region["seen"] is None else f" (not hidden: {_listed([region['seen']])})"
        lines.append(f"hidden region {number}: {_listed(region['classes'])}{seen}")
    return lines


def _best(probabilities: Tensor) -> tuple[Tensor, Tensor]:
    """Values and indices of the `TOP` best columns of each row."""
    return probabilities.topk(min(TOP, probabilities.shape[1]), dim=1)


def _listed(pairs: list[list[Any]]) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in pairs)
