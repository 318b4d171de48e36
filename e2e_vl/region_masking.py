"""Regions that a model must predict without seeing them: labelled first, then hidden from the detector.

Masked RoI classification (VL-BERT, section 3.3) hides regions in the pixels; on saved features only the feature is
replaced. `e2e_vl/model.py` calls the steps in the order in which they stand here; the detector runs before
`replace_features`.

Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from detector.boxes import pairwise_iou
from detector.errors import UserError
from detector.pixel_masking import mask_pixels, mask_rectangles
from detector.structures import Detector, ImageBatch, Regions, evaluation_mode
from e2e_vl.structures import Batch, RegionLabels, RegionMasks, TextBatch

SAME_IOU = 0.5  # a candidate that overlaps a hidden box this much is the same object


@dataclasses.dataclass(frozen=True)
class RegionMasking:
    """What is hidden, how, and who says what it was."""

    enabled: bool = (
        True  # regions are predicted and hidden at all; False: only max_detected_regions and max_length count
    )
    probability: float = 0.15  # chance of a region to be predicted; every region is chosen on its own, none is forced
    mask_probability: float = 0.9  # chance of a region that is to be predicted to be hidden
    replace_probability: float = 0.0  # chance of a region that is to be predicted to get another region's feature
    pixels: bool = True  # hide a region in the image, before the detector; False: only its feature, in the encoder
    colour: Literal["mean", "black"] = "mean"  # hidden pixels: the mean colour, or black before the mean is subtracted
    # who labels the regions: a copy of the detector from when training began, the detector in training, or the data
    teacher: Literal["frozen", "current", "file"] = "frozen"
    background_first: bool = False  # class distributions of a detector get the background's column in front
    max_detected_regions: int | None = 100  # most boxes when a detector finds them; None = all its detections
    max_length: int | None = 64  # wordpieces and regions of a text together; None = no cut


def label_regions(batch: Batch, detector: Detector, teacher: Detector, rule: RegionMasking) -> Batch:
    """A copy of the batch with candidate boxes, and with what the teacher says of them when nothing is hidden.

    A user's own boxes to hide (`Batch.hide`) become the first candidates; candidates that overlap one of them with an
    IoU of 0.5 or more are left out. Saved features are what a file says of the regions.

    Args:
        detector: the model's own, which proposes boxes where there are none.
        teacher: labels the regions, and then proposes the boxes too; the detector itself unless it is a frozen copy.

    Raises:
        ValueError: the labels are to come from a file, and the batch has none.
    """
    boxes, labels = batch.boxes, batch.region_labels
    uses_detector = rule.teacher != "file"
    is_unknown = labels.class_probs is None and labels.detected_classes is None
    if not uses_detector and rule.enabled and batch.boxes_to_mask is None and is_unknown:
        raise UserError(
            "task.config.teacher is file, but the data come without class distributions of their boxes; set it to "
            "frozen or current."
        )
    if boxes is None and (batch.boxes_to_mask is not None or not uses_detector):
        boxes, labels = describe_regions(teacher if uses_detector else detector, batch.images, None, rule)
    if batch.boxes_to_mask is not None:
        boxes = [_with_hidden(rows, hide) for rows, hide in zip(boxes, batch.boxes_to_mask, strict=True)]
        labels = RegionLabels()
    if uses_detector:
        classes = labels.classes  # annotated, so they stay what they are
        boxes, labels = describe_regions(teacher, batch.images, boxes, rule)
        labels.classes = classes
    elif labels.features is None and batch.images.precomputed is not None:
        labels = dataclasses.replace(labels, features=batch.images.precomputed.features)
    return dataclasses.replace(batch, boxes=boxes, region_labels=labels)


@torch.no_grad()
def describe_regions(
    teacher: Detector, images: ImageBatch, boxes: list[Float[Tensor, "_R 4"]] | None, rule: RegionMasking
) -> tuple[list[Float[Tensor, "_R 4"]], RegionLabels]:
    """Boxes, their class distributions and features from a detector that sees the whole images.

    The teacher is in evaluation mode for this pass. `boxes` None: its own detections, best score first, at most
    `rule.max_detected_regions`.
    """
    with evaluation_mode(teacher):
        regions = teacher(images, boxes)
    kept = slice(rule.max_detected_regions if boxes is None else None)
    probabilities = [logits[kept].float().softmax(dim=1) for logits in regions.class_logits]
    labels = RegionLabels(features=[rows[kept] for rows in regions.features])
    if all(rows.shape[1] > 1 for rows in probabilities):  # background last
        best = [rows[:, :-1].max(dim=1) for rows in probabilities]
        labels.detected_scores, labels.detected_classes = (list(column) for column in zip(*best, strict=True))
    if regions.attribute_logits is not None:
        best = [logits[kept].float().softmax(dim=1).max(dim=1) for logits in regions.attribute_logits]
        labels.detected_attribute_scores, labels.detected_attributes = (
            list(column) for column in zip(*best, strict=True)
        )
    if rule.background_first:
        probabilities = [rows.roll(1, dims=1) for rows in probabilities]
    labels.class_probs = probabilities
    return [rows[kept] for rows in regions.boxes], labels


def _with_hidden(candidates: Float[Tensor, "R 4"], hide: Float[Tensor, "Q 4"]) -> Float[Tensor, "all 4"]:
    if len(hide) and len(candidates):
        candidates = candidates[(pairwise_iou(candidates, hide) < SAME_IOU).all(dim=1)]
    return torch.cat([hide, candidates])


def mask_regions(batch: Batch, detector: Detector, rule: RegionMasking) -> Batch:
    """A copy of the batch in which some regions are to be predicted, and most of these are not seen.

    Args:
        batch: with candidate boxes. The choice depends on the seed of the first text about each image alone, or on
            torch's global generator where the texts have no seeds.
        detector: of the model, for the colours of its input.

    Raises:
        ValueError: pixels are to be hidden, and the batch has saved features.
    """
    if rule.pixels and batch.images.precomputed is not None:
        raise UserError(
            "Precomputed features have no pixels to hide, so hidden regions would stay visible; set "
            "task.config.mask_pixels to false and encoder.config.masked_region_feature to true."
        )
    device = batch.image_index.device
    if batch.boxes_to_mask is None:
        counts, drawn = [len(rows) for rows in batch.boxes], []
        for count, generator in zip(counts, _image_generators(batch), strict=True):
            labelled, hidden, swapped = sample_masked_regions(
                count, generator, rule.probability, rule.mask_probability, rule.replace_probability
            )
            drawn.append((labelled, hidden, sample_replacements(swapped, counts, generator)))
        chosen = RegionMasks(
            *([torch.from_numpy(rows).to(device) for rows in column] for column in zip(*drawn, strict=True))
        )
        if not rule.replace_probability:
            chosen.replacement_index = None
    else:
        pairs = zip(batch.boxes, batch.boxes_to_mask, strict=True)
        first = [torch.arange(len(rows), device=device) < len(hide) for rows, hide in pairs]
        chosen = RegionMasks(first, first)
    images, masks = batch.images, batch.pixel_masks
    if rule.pixels:
        rectangles = [
            mask_rectangles(rows[is_masked], size, "truncate").to(rows.dtype)
            for rows, is_masked, size in zip(batch.boxes, chosen.is_masked, images.sizes.tolist(), strict=True)
        ]
        if rule.colour == "mean":
            masks = rectangles
        else:
            settings = detector.config.input
            black = -torch.tensor(settings.pixel_mean) / torch.tensor(settings.pixel_std)
            pixels = mask_pixels(images.pixels, images.sizes, rectangles, fill=black)
            images = dataclasses.replace(images, pixels=pixels)
    images = _without_hidden_features(images, chosen.is_masked)
    return dataclasses.replace(batch, images=images, masked_regions=chosen, pixel_masks=masks)


def sample_masked_regions(
    count: int, generator: np.random.Generator, probability: float = 0.15, hide: float = 0.9, swap: float = 0.0
) -> tuple[Bool[np.ndarray, " R"], Bool[np.ndarray, " R"], Bool[np.ndarray, " R"]]:
    """Choose the regions that are to be predicted, and among them the ones that the model may not see.

    One number is drawn for each region, and none is ever forced. The whole image is never chosen and not counted. The
    papers hide every chosen region (`hide=1`); VL-BERT's official code leaves one in ten visible, and LXMERT's hides 8
    of ten, gives one the feature of another region (`swap=0.1`) and leaves one as it is.

    Returns:
        Chosen (labelled); chosen and hidden; chosen and to be swapped.
    """
    drawn = generator.random(count)
    hidden = drawn < probability * hide
    return drawn < probability, hidden, (drawn < probability * (hide + swap)) & ~hidden


def sample_replacements(
    swapped: Bool[np.ndarray, " R"], counts: Sequence[int], generator: np.random.Generator
) -> Int64[np.ndarray, " R"]:
    """Whose feature each of the swapped regions gets: of a random image of the batch, a random region.

    (The official LXMERT code draws among the images of the data set; those of a batch are a random part of it.)

    Returns:
        Rows among the regions of all images, of which image n has `counts[n]`; -1 for the other regions, and where an
        image without regions was drawn.
    """
    starts = np.concatenate([[0], np.cumsum(counts)])
    replacement_index = np.full(len(swapped), -1, dtype=np.int64)
    for row in np.flatnonzero(swapped):
        image = int(generator.integers(len(counts)))
        if counts[image]:
            replacement_index[row] = starts[image] + int(generator.integers(counts[image]))
    return replacement_index


def _image_generators(batch: Batch) -> list[np.random.Generator]:
    """One generator per image; it starts from the seed of the first text that looks at the image, or else from 0."""
    seeds = torch.randint(2**62, (len(batch),)) if batch.seeds is None else batch.seeds
    found: dict[int, int] = {}
    for seed, images in zip(seeds.tolist(), batch.image_index.tolist(), strict=True):
        for image in images:
            found.setdefault(image, seed)
    return [np.random.default_rng(found.get(image, 0)) for image in range(len(batch.boxes))]


def _without_hidden_features(images: ImageBatch, hidden: list[Bool[Tensor, " _R"]]) -> ImageBatch:
    """With saved features, the whole image's feature is the mean of the regions that are not hidden.

    (Otherwise it would give away what is hidden. The divisor is the official code's count + 1e-5.)
    """
    if images.precomputed is None or images.precomputed.image_features is None:
        return images
    means = []
    for rows, is_masked in zip(images.precomputed.features, hidden, strict=True):
        shown = (~is_masked).to(rows.dtype)
        means.append((rows * shown[:, None]).sum(dim=0) / (shown.sum() + 1e-5))
    precomputed = dataclasses.replace(images.precomputed, image_features=torch.stack(means))
    return dataclasses.replace(images, precomputed=precomputed)


def replace_features(regions: Regions, hidden: RegionMasks | None, *, whole_image: bool) -> Regions:
    """A copy in which regions have the features of their replacement_index.

    Args:
        regions: of the N images, as the detector describes them.
        whole_image: row 0 of each image is the whole image, which keeps its feature.
    """
    if hidden is None or hidden.replacement_index is None:
        return regions
    given = torch.cat([rows[whole_image:] for rows in regions.features])
    features = []
    for rows, replacement_index in zip(regions.features, hidden.replacement_index, strict=True):
        own = rows[whole_image:]
        if len(own):
            own = torch.where((replacement_index >= 0)[:, None], given[replacement_index.clamp(min=0)], own)
        features.append(torch.cat([rows[:whole_image], own]))
    return dataclasses.replace(regions, features=features)


def truncate_batch(batch: Batch, limit: int, *, whole_image: bool) -> Batch:
    """Cut each text and its regions to `limit` positions together, as the official code does after masking.

    Texts keep their last wordpiece ([SEP]); regions are lost from the end of each image, evenly over the images of a
    text. A whole image that stands in the sequence counts as a region. Texts without an image stay as they are.

    Args:
        batch: with candidate boxes.
        whole_image: whole images stand in the sequence.
    """
    lengths = batch.texts.attention_mask.sum(dim=1).tolist()
    counts = [len(rows) + whole_image for rows in batch.boxes]
    kept, limits = [], []
    for length, images in zip(lengths, batch.image_index.tolist(), strict=True):
        own = [counts[image] if image >= 0 else 0 for image in images]
        text, regions = truncated_lengths(length, sum(own), limit)
        kept.append(text)
        limits.append([max(number - whole_image, 0) for number in _shares(own, regions)])
    device = batch.image_index.device
    texts, index = truncate_texts(batch.texts, torch.tensor(kept, device=device))
    targets = None if batch.targets is None else batch.targets.truncate(index, texts.attention_mask)
    phrases = None if batch.phrases is None else batch.phrases.truncate(index, texts.attention_mask)
    limits = torch.tensor(limits, device=device)
    return dataclasses.replace(batch, texts=texts, targets=targets, phrases=phrases, region_limit=limits)


def truncated_lengths(text_length: int, region_count: int, limit: int) -> tuple[int, int]:
    """How many wordpieces and regions of one text are kept, so that both together are no more than `limit`.

    One is dropped from the longer of the two again and again; of equally long ones the text is cut. At least two
    wordpieces ([CLS] and [SEP]) and one region stay, even where they pass the limit. Regions are dropped from the end,
    wordpieces from before the final [SEP], which stays. Words and regions are masked before they are cut, so a region
    that is cut off may still have hidden pixels.

    Args:
        text_length: wordpieces with [CLS] and [SEP].
        region_count: regions as they stand in the sequence, so with the whole image if the encoder takes it as one;
            without any the text stays as it is.
        limit: 64 in all official settings; the [END] element does not count.

    Returns:
        (wordpieces kept, regions kept).
    """
    if text_length + region_count <= limit or region_count == 0:
        return text_length, region_count
    text = min(text_length, max(limit // 2, limit - region_count))
    return max(text, 2), max(limit - text, 1)


def _shares(counts: list[int], total: int) -> list[int]:
    """How many of each image's regions stay if `total` do: the most crowded image loses one again and again."""
    kept = list(counts)
    while sum(kept) > total:
        fullest = max(range(len(kept)), key=lambda image: (kept[image], image))
        kept[fullest] -= 1
    return kept


def truncate_texts(texts: TextBatch, kept: Int64[Tensor, " M"]) -> tuple[TextBatch, Int64[Tensor, "M L"]]:
    """Shorten texts to `kept` wordpieces: the first ones and the very last.

    Where the summary is read is kept too: if it would be lost, it takes the place before the last wordpiece.

    Returns:
        The texts, and which old position each new one came from.
    """
    last = texts.attention_mask.sum(dim=1) - 1
    position = torch.arange(int(kept.max()), device=kept.device).expand(len(kept), -1)
    index = torch.where(position == kept[:, None] - 1, last[:, None], position)
    attention_mask = position < kept[:, None]
    names, summary = texts.region_of_token, texts.summary
    if summary is not None:
        is_lost = (summary >= kept - 1) & (summary < last)
        index = torch.where(is_lost[:, None] & (position == kept[:, None] - 2), summary[:, None], index)
    shortened = TextBatch(
        input_ids=texts.input_ids.gather(1, index) * attention_mask,
        token_type_ids=texts.token_type_ids.gather(1, index) * attention_mask,
        attention_mask=attention_mask,
        summary=None if summary is None else (index == summary[:, None]).int().argmax(dim=1),
        region_of_token=None if names is None else names.gather(1, index).masked_fill(~attention_mask, -1),
    )
    return shortened, index
