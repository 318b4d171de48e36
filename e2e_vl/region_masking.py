"""Masked regions: label them, mask them in the pixels or features, and truncate sequences that are too long.

Masked RoI classification (VL-BERT, section 3.3) masks pixels; on saved features only the feature is replaced.
`RegionMasking` takes the steps in the order of this file; the detector runs before `replace_features`.
Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from detector.boxes import pairwise_iou
from detector.errors import UserError
from detector.images import mask_pixels, mask_rectangles
from detector.structures import Detector, ImageBatch, Regions, evaluation_mode
from e2e_vl.structures import Batch, DetectedLabels, MaskingBatch, RegionLabels, RegionMasks, TextBatch
from e2e_vl.tasks.config import PretrainingConfig

SAME_IOU = 0.5  # a candidate that overlaps a masked box this much is the same object


@dataclasses.dataclass(frozen=True)
class RegionMasking:
    """How a task labels, masks and truncates the regions of a batch."""

    config: PretrainingConfig
    predicts_regions: bool  # masked regions are predicted; False: no region is masked

    @property
    def needs_frozen_teacher(self) -> bool:
        """Whether a frozen copy of the detector labels the regions."""
        return self.predicts_regions and self.config.teacher == "frozen"

    def prepare(self, batch: Batch, detector: Detector, teacher: Detector, *, whole_image: bool) -> Batch:
        """Return a copy of the batch with labelled, masked and truncated regions.

        Args:
            detector: the model's.
            teacher: labels the regions; a frozen copy, or the detector itself.
            whole_image: whole images are part of the sequence.
        """
        config = self.config
        if self.predicts_regions or batch.boxes is None:  # a separate detector pass, without gradients
            batch = label_regions(batch, detector, teacher, config, is_required=self.predicts_regions)
        if self.predicts_regions:
            batch = mask_regions(batch, config)
        if config.max_length is not None:
            batch = truncate_batch(batch, config.max_length, whole_image=whole_image)
        return batch


def label_regions(
    batch: Batch, detector: Detector, teacher: Detector, config: PretrainingConfig, *, is_required: bool = True
) -> Batch:
    """Return a copy of the batch with candidate boxes, and with labels from a file or from the teacher.

    The teacher sees the whole images. Boxes that a user wants masked (`MaskingBatch.boxes_to_mask`) become the first
    candidates, and others that overlap one of them with an IoU of 0.5 or more are dropped.

    Args:
        detector: the model's, which predicts boxes where there are none and labels come from a file.
        teacher: labels the regions and predicts boxes where there are none; a frozen copy, or the detector itself.
        is_required: an error if there are no labels.
    """
    boxes = batch.boxes
    labels = batch.region_labels
    boxes_to_mask = None if batch.masking is None else batch.masking.boxes_to_mask
    uses_detector = config.teacher != "file"
    is_unlabelled = labels.class_probs is None and labels.detected.classes is None
    if not uses_detector and is_required and boxes_to_mask is None and is_unlabelled:
        raise UserError(
            "task.config.teacher is file, but the data come without class distributions; set it to frozen or current."
        )
    if boxes is None and (boxes_to_mask is not None or not uses_detector):
        proposer = teacher if uses_detector else detector
        boxes, labels = describe_regions(proposer, batch.images, None, config)
    phrase_matches = batch.phrase_matches
    if boxes_to_mask is not None:
        phrase_matches = None  # other boxes follow
        candidates = boxes
        boxes = []
        for image_candidates, masked_boxes in zip(candidates, boxes_to_mask, strict=True):
            others = image_candidates
            if len(masked_boxes) and len(image_candidates):
                is_other = (pairwise_iou(image_candidates, masked_boxes) < SAME_IOU).all(dim=1)
                others = image_candidates[is_other]
            boxes.append(torch.cat([masked_boxes, others]))
        labels = RegionLabels()
    if uses_detector:
        annotated_classes = labels.classes
        boxes, labels = describe_regions(teacher, batch.images, boxes, config)
        labels = dataclasses.replace(labels, classes=annotated_classes)
    elif labels.features is None and batch.images.precomputed is not None:
        labels = dataclasses.replace(labels, features=batch.images.precomputed.features)
    return dataclasses.replace(batch, boxes=boxes, region_labels=labels, phrase_matches=phrase_matches)


@torch.no_grad()
def describe_regions(
    teacher: Detector, images: ImageBatch, boxes: list[Float[Tensor, "_R 4"]] | None, config: PretrainingConfig
) -> tuple[list[Float[Tensor, "_R 4"]], RegionLabels]:
    """Return boxes, their class distributions and features from a teacher in evaluation mode.

    `boxes` None: its detections, best score first, at most `config.max_detected_regions`.
    """
    with evaluation_mode(teacher):
        regions = teacher(images, boxes)
    limit = config.max_detected_regions if boxes is None else None
    first = slice(limit)
    probabilities = [logits[first].float().softmax(dim=1) for logits in regions.class_logits]
    detected = DetectedLabels()
    if all(rows.shape[1] > 1 for rows in probabilities):  # background last
        best_classes = [rows[:, :-1].max(dim=1) for rows in probabilities]
        detected.scores = [best.values for best in best_classes]
        detected.classes = [best.indices for best in best_classes]
    if regions.attribute_logits is not None:
        best_attributes = [logits[first].float().softmax(dim=1).max(dim=1) for logits in regions.attribute_logits]
        detected.attribute_scores = [best.values for best in best_attributes]
        detected.attributes = [best.indices for best in best_attributes]
    if not config.has_background_last:
        probabilities = [rows.roll(1, dims=1) for rows in probabilities]
    features = [rows[first] for rows in regions.features]
    labels = RegionLabels(class_probs=probabilities, features=features, detected=detected)
    return [rows[first] for rows in regions.boxes], labels


def mask_regions(batch: Batch, config: PretrainingConfig) -> Batch:
    """Return a copy of the batch in which some regions are to be predicted, and most of these are masked.

    The choice depends only on the seed of the first text about each image, or on torch's global generator where texts
    have no seeds.
    """
    if config.mask_pixels and batch.images.precomputed is not None:
        raise UserError(
            "Precomputed features have no pixels to mask, so masked regions would stay visible; set "
            "task.config.mask_pixels to false and encoder.config.masked_region_feature to true."
        )
    device = batch.images.pixels.device
    masking = batch.masking or MaskingBatch()
    if masking.boxes_to_mask is None:
        region_masks = _draw_regions(batch, config)
    else:
        is_first: list[Tensor] = []  # the boxes to mask are the first candidates, see `label_regions`
        for boxes, boxes_to_mask in zip(batch.boxes, masking.boxes_to_mask, strict=True):
            is_first.append(torch.arange(len(boxes)) < len(boxes_to_mask))
        region_masks = RegionMasks(is_labelled=is_first, is_masked=is_first)
    images = batch.images
    pixel_masks = masking.pixel_masks
    if config.mask_pixels:
        host_boxes = torch.cat(batch.boxes).cpu().split([len(boxes) for boxes in batch.boxes])
        rectangles = []
        for boxes, is_masked, size in zip(host_boxes, region_masks.is_masked, images.sizes.tolist(), strict=True):
            rectangles.append(mask_rectangles(boxes[is_masked], size, "truncate").to(boxes.dtype))
        if config.masked_pixels == "mean":
            pixel_masks = rectangles
        else:
            images = dataclasses.replace(images, pixels=mask_pixels(images.pixels, images.sizes, rectangles))
    region_masks = region_masks.to(device)
    if images.precomputed is not None and images.precomputed.image_features is not None:
        # The saved feature of the whole image would reveal the masked regions. It is replaced by the mean of the
        # others; the divisor is the official code's count + 1e-5.
        means = []
        for features, is_masked in zip(images.precomputed.features, region_masks.is_masked, strict=True):
            is_visible = (~is_masked).to(features.dtype)
            means.append((features * is_visible[:, None]).sum(dim=0) / (is_visible.sum() + 1e-5))
        precomputed = dataclasses.replace(images.precomputed, image_features=torch.stack(means))
        images = dataclasses.replace(images, precomputed=precomputed)
    masking = dataclasses.replace(masking, masked_regions=region_masks, pixel_masks=pixel_masks)
    return dataclasses.replace(batch, images=images, masking=masking)


def _draw_regions(batch: Batch, config: PretrainingConfig) -> RegionMasks:
    """Draw the regions of every image that are labelled, masked and replaced."""
    counts = [len(rows) for rows in batch.boxes]
    is_labelled: list[Tensor] = []
    is_masked: list[Tensor] = []
    replacement_index: list[Tensor] = []
    for count, generator in zip(counts, _image_generators(batch), strict=True):
        labelled, masked, replaced = sample_masked_regions(
            count, generator, config.region_probability, config.mask_probability, config.replace_probability
        )
        is_labelled.append(torch.from_numpy(labelled))
        is_masked.append(torch.from_numpy(masked))
        replacement_index.append(torch.from_numpy(sample_replacements(replaced, counts, generator)))
    if not config.replace_probability:
        return RegionMasks(is_labelled, is_masked)
    return RegionMasks(is_labelled, is_masked, replacement_index)


def sample_masked_regions(
    count: int, generator: np.random.Generator, probability: float = 0.15, mask: float = 0.9, replace: float = 0.0
) -> tuple[Bool[np.ndarray, " R"], Bool[np.ndarray, " R"], Bool[np.ndarray, " R"]]:
    """Choose the regions that are to be predicted, and which of them are masked or get another region's feature.

    One number is drawn for each region, and none is ever forced; the whole image is never chosen. The papers mask every
    chosen region (`mask=1`). VL-BERT's official code leaves 10 % of them visible; LXMERT's masks 80 %, replaces 10 %
    (`replace=0.1`) and leaves 10 % unchanged. Returns chosen (labelled); chosen and masked; chosen and to be replaced.
    """
    drawn = generator.random(count)
    labelled = drawn < probability
    masked = drawn < probability * mask
    replaced = (drawn < probability * (mask + replace)) & ~masked
    return labelled, masked, replaced


def sample_replacements(
    replaced: Bool[np.ndarray, " all_regions"], counts: Sequence[int], generator: np.random.Generator
) -> Int64[np.ndarray, " all_regions"]:
    """Draw the region whose feature each replaced region gets: a random region of a random image in the batch.

    The official LXMERT code draws among the images of the data set; those of a batch are a random part of it.

    Args:
        replaced: of the regions of all images; image n has `counts[n]`.

    Returns:
        Rows among the regions of all images; -1 for regions that are not replaced, and where an image without regions
        was drawn.
    """
    starts = np.concatenate([[0], np.cumsum(counts)])
    index = np.full(len(replaced), -1, dtype=np.int64)
    for row in np.flatnonzero(replaced):
        image = int(generator.integers(len(counts)))
        if counts[image]:
            index[row] = starts[image] + int(generator.integers(counts[image]))
    return index


def _image_generators(batch: Batch) -> list[np.random.Generator]:
    """Return one generator per image; its seed is that of the first text about the image, or 0."""
    seeds = None if batch.masking is None else batch.masking.seeds
    if seeds is None:
        seeds = torch.randint(2**62, (len(batch),))
    seed_of: dict[int, int] = {}
    for seed, images in zip(seeds.tolist(), batch.image_index.tolist(), strict=True):
        for image in images:
            seed_of.setdefault(image, seed)
    return [np.random.default_rng(seed_of.get(image, 0)) for image in range(len(batch.boxes))]


def replace_features(regions: Regions, masks: RegionMasks | None, *, whole_image: bool) -> Regions:
    """Return a copy in which regions have the features of their replacements.

    With `whole_image`, row 0 keeps its feature.
    """
    if masks is None or masks.replacement_index is None:
        return regions
    candidate_features = torch.cat([features[whole_image:] for features in regions.features])
    replaced_features = []
    for features, index in zip(regions.features, masks.replacement_index, strict=True):
        image_features = features[whole_image:]
        if len(image_features):
            is_replaced = (index >= 0)[:, None]
            image_features = torch.where(is_replaced, candidate_features[index.clamp(min=0)], image_features)
        replaced_features.append(torch.cat([features[:whole_image], image_features]))
    return dataclasses.replace(regions, features=replaced_features)


def truncate_batch(batch: Batch, limit: int, *, whole_image: bool) -> Batch:
    """Truncate each text and its regions to `limit` positions together, as the official code does after masking.

    See `truncated_lengths`. Of several images the one with the most regions loses one first. With `whole_image`, whole
    images are part of the sequence, and count as regions.
    """
    regions_of_image = [len(boxes) + whole_image for boxes in batch.boxes]
    text_lengths: list[int] = []
    limits: list[list[int]] = []
    for length, images in zip(batch.texts.lengths.tolist(), batch.image_index.tolist(), strict=True):
        region_counts = [0] * len(images)
        for slot, image in enumerate(images):
            if image >= 0:
                region_counts[slot] = regions_of_image[image]
        text_length, region_count = truncated_lengths(length, sum(region_counts), limit)
        text_lengths.append(text_length)
        while sum(region_counts) > region_count:
            # of images with equally many regions the last one
            fullest = max(range(len(region_counts)), key=lambda slot: (region_counts[slot], slot))
            region_counts[fullest] -= 1
        limits.append([max(count - whole_image, 0) for count in region_counts])
    texts, index = truncate_texts(batch.texts, torch.tensor(text_lengths, dtype=torch.int64))
    targets = None if batch.targets is None else batch.targets.truncate(index, texts.attention_mask)
    phrases = None if batch.phrases is None else batch.phrases.truncate(index, texts.attention_mask)
    region_limit = torch.tensor(limits, dtype=torch.int64).reshape(batch.image_index.shape)
    masking = dataclasses.replace(batch.masking or MaskingBatch(), region_limit=region_limit)
    return dataclasses.replace(batch, texts=texts, targets=targets, phrases=phrases, masking=masking)


def truncated_lengths(text_length: int, region_count: int, limit: int) -> tuple[int, int]:
    """Return how many wordpieces (with [CLS] and [SEP]) and regions of one text are kept.

    The longer of the two loses one until both together are no more than `limit`; of equally long ones the text does.
    At least two wordpieces and one region stay, even where they exceed the limit. Regions are dropped from the end,
    wordpieces from before the final [SEP]. Truncation comes after masking, so a dropped region may have masked pixels.
    A text without any region stays as it is. All official settings have the limit 64, without [END].
    """
    if text_length + region_count <= limit or region_count == 0:
        return text_length, region_count
    new_length = min(text_length, max(limit // 2, limit - region_count))
    return max(new_length, 2), max(limit - new_length, 1)


def truncate_texts(texts: TextBatch, lengths: Int64[Tensor, " M"]) -> tuple[TextBatch, Int64[Tensor, "M L"]]:
    """Shorten texts to `lengths` wordpieces (a tensor on the CPU): the first ones and the very last.

    The position of the summary is kept too: if it would be lost, it takes the place before the last wordpiece. Returns
    the texts, and which old position each new one came from.
    """
    device = texts.input_ids.device
    longest = max(lengths.tolist(), default=0)
    new_lengths = lengths.to(device)
    last = (texts.lengths - 1).to(device)
    position = torch.arange(longest, device=device).expand(len(lengths), -1)
    index = torch.where(position == new_lengths[:, None] - 1, last[:, None], position)
    attention_mask = position < new_lengths[:, None]
    summary = texts.summary
    if summary is not None:
        is_lost = (summary >= new_lengths - 1) & (summary < last)
        is_before_last = position == new_lengths[:, None] - 2
        index = torch.where(is_lost[:, None] & is_before_last, summary[:, None], index)
        summary = (index == summary[:, None]).int().argmax(dim=1)
    region_of_token = texts.region_of_token
    if region_of_token is not None:
        region_of_token = region_of_token.gather(1, index).masked_fill(~attention_mask, -1)
    truncated = TextBatch(
        input_ids=texts.input_ids.gather(1, index) * attention_mask,
        token_type_ids=texts.token_type_ids.gather(1, index) * attention_mask,
        attention_mask=attention_mask,
        summary=summary,
        region_of_token=region_of_token,
        lengths=lengths,
    )
    return truncated, index
