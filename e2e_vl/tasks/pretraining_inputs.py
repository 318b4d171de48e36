"""What pre-training does to a batch before the detector sees it: label regions, hide some, cut long sequences.

Shape legend
    N   images in the batch
    M   texts in the batch
    L   wordpieces of the longest text
    R   candidate boxes of one image
    C   region classes, background included
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from detector.interface import Detector
from detector.pixel_masking import mask_pixels
from detector.structures import ImageBatch
from e2e_vl.masking import choose_regions, cut_lengths
from e2e_vl.structures import Batch, TextBatch


@torch.no_grad()
def describe_classes(
    teacher: Detector,
    images: ImageBatch,
    boxes: list[Tensor] | None,
    most: int | None,
    *,
    background_first: bool = False,
) -> tuple[list[Tensor], list[Tensor]]:
    """Boxes and their class distributions from a detector that sees the whole images.

    Args:
        teacher: in evaluation mode for this pass, whatever mode it is in.
        images: without anything hidden.
        boxes: N x [R, 4]; None: the teacher's own detections, best score first.
        most: keep at most so many of its own detections; None = all.
        background_first: put the background's column in front of the detector's classes instead of behind them.

    Returns:
        Boxes N x [R, 4], and probabilities N x float32 [R, C].
    """
    was_training = [(module, module.training) for module in teacher.modules()]
    teacher.eval()
    try:
        regions = teacher(images, boxes)
    finally:
        for module, training in was_training:
            module.training = training
    kept = slice(most if boxes is None else None)
    probabilities = [logits[kept].float().softmax(dim=1) for logits in regions.class_logits]
    if background_first:
        probabilities = [rows.roll(1, dims=1) for rows in probabilities]
    return [rows[kept] for rows in regions.boxes], probabilities


def draw_regions(
    counts: list[int], seeds: list[int | None], probability: float, hide: float, device: torch.device
) -> tuple[list[Tensor], list[Tensor]]:
    """Which regions of each image are to be predicted, and which of those are hidden: N x bool [R] each.

    Args:
        counts: candidate boxes of each image.
        seeds: of each image, so that the choice depends on the text alone; None = torch's global generator.
        probability, hide: see `choose_regions`.
    """
    labelled, hidden = [], []
    for count, seed in zip(counts, seeds, strict=True):
        drawn = int(torch.randint(2**62, ())) if seed is None else seed
        chosen = choose_regions(count, np.random.default_rng(drawn), probability, hide)
        labelled.append(torch.from_numpy(chosen[0]).to(device))
        hidden.append(torch.from_numpy(chosen[1]).to(device))
    return labelled, hidden


def image_seeds(batch: Batch) -> list[int | None]:
    """The `region_seed` of the first text that looks at each image; None without that target."""
    seeds: list[int | None] = [None] * len(batch.images.names)
    if "region_seed" not in batch.targets:
        return seeds
    values = batch.targets["region_seed"].tolist()
    for text in range(len(batch.looks_at) - 1, -1, -1):
        for image in batch.looks_at[text].tolist():
            if image >= 0:
                seeds[image] = values[text]
    return seeds


def with_black_pixels(images: ImageBatch, masks: list[Tensor], detector: Detector) -> ImageBatch:
    """A copy of the images whose pixels in whole-pixel boxes N x [P, 4] are black before the mean is subtracted."""
    settings = detector.config.input
    black = -torch.tensor(settings.pixel_mean) / torch.tensor(settings.pixel_std)
    return dataclasses.replace(images, pixels=mask_pixels(images.pixels, images.sizes, masks, fill=black))


def cut_to_length(batch: Batch, boxes: list[Tensor], limit: int, *, whole_image: bool) -> Batch:
    """Cut each text and its regions to `limit` positions together, as the official code does after masking.

    Texts keep their last wordpiece ([SEP]); regions are lost from the end. The whole image counts as a region. Texts
    without an image stay as they are.
    """
    lengths = batch.texts.attend.sum(dim=1).tolist()
    counts = [len(rows) + whole_image for rows in boxes]
    first_image = batch.looks_at[:, 0].tolist()
    kept = [
        cut_lengths(length, counts[image], limit) if image >= 0 else (length, 0)
        for length, image in zip(lengths, first_image, strict=True)
    ]
    device = batch.looks_at.device
    text_kept = torch.tensor([pair[0] for pair in kept], device=device)
    region_limit = torch.tensor([max(pair[1] - whole_image, 0) for pair in kept], device=device)
    texts, index = cut_texts(batch.texts, text_kept)
    real = torch.arange(index.shape[1], device=device) < text_kept[:, None]
    targets = {
        name: values.gather(1, index).masked_fill(~real, -1) if name.endswith("_labels") else values
        for name, values in batch.targets.items()
    }
    return dataclasses.replace(batch, texts=texts, targets=targets, region_limit=region_limit)


def cut_texts(texts: TextBatch, kept: Tensor) -> tuple[TextBatch, Tensor]:
    """Shorten texts to `kept` int64 [M] wordpieces: the first ones and the very last.

    Returns:
        The texts, and int64 [M, L'] which old position each new one came from.
    """
    last = texts.attend.sum(dim=1) - 1
    position = torch.arange(int(kept.max()), device=kept.device).expand(len(kept), -1)
    index = torch.where(position == kept[:, None] - 1, last[:, None], position)
    attend = position < kept[:, None]
    names = texts.region_of_token
    return (
        TextBatch(
            input_ids=texts.input_ids.gather(1, index) * attend,
            segment_ids=texts.segment_ids.gather(1, index) * attend,
            attend=attend,
            positions=texts.positions,
            region_of_token=None if names is None else names.gather(1, index).masked_fill(~attend, -1),
        ),
        index,
    )


def without_hidden_features(images: ImageBatch, hidden: list[Tensor]) -> ImageBatch:
    """With precomputed features, the whole image's feature is the mean of the regions that are not hidden.

    (Otherwise it would give away what is hidden. The divisor is the official code's count + 1e-5.)
    """
    if images.precomputed is None or images.precomputed.image_features is None:
        return images
    means = []
    for rows, is_hidden in zip(images.precomputed.features, hidden, strict=True):
        shown = (~is_hidden).to(rows.dtype)
        means.append((rows * shown[:, None]).sum(dim=0) / (shown.sum() + 1e-5))
    precomputed = dataclasses.replace(images.precomputed, image_features=torch.stack(means))
    return dataclasses.replace(images, precomputed=precomputed)
