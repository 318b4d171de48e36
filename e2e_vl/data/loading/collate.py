"""Joins examples into a `Batch`; knows neither tasks nor data sets.

Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from detector.errors import UserError
from detector.images import make_image_batch
from detector.structures import DetectionTargets, ImageBatch, PrecomputedFeatures
from e2e_vl.examples import DetectionObjects, Example, ImageExample, TextExample
from e2e_vl.phrases import join_phrases
from e2e_vl.samples import FOUND
from e2e_vl.structures import Batch, RegionLabels, TextBatch
from e2e_vl.targets import Targets


def collate(
    examples: Sequence[Example],
    pixel_mean: Sequence[float],
    pixel_std: Sequence[float],
    *,
    pad_to: tuple[int, int] | None = None,
    canvas: Sequence[int] | None = None,
    pad_id: int = 0,
) -> Batch:
    """Pad images and texts, and renumber the images that texts look at.

    Args:
        examples: at least one, all of one kind: of the same data set, or of data sets for the same task.
        pixel_mean, pixel_std: of the three channels in the order of the images; subtracted, then divided by.
        pad_to: (height, width) of the padded images, or None = the largest of the batch.
        canvas: (short edge, long edge) in pixels of the least canvas of an image, see `canvas_size`; the batch is as
            large as its largest canvas. None = an image's canvas is its own size. `pad_to` beats it.
        pad_id: wordpiece id of the padding.

    Returns:
        The batch: N images and M texts in the order of the examples, `looks_at` [M, I], padded with -1.

    Raises:
        ValueError: examples that do not go together: some with candidate boxes and some without, some with annotated
            objects and some without, or texts with different targets.
    """
    images = [image for example in examples for image in example.images]
    texts = [text for example in examples for text in example.texts]
    if not images or not texts:
        raise UserError(f"a batch needs images and texts, this one has {len(images)} images and {len(texts)} texts")
    if pad_to is None and canvas is not None:
        pad_to = canvas_size([image.placement.size for image in images], canvas)
    return Batch(
        images=_image_batch(images, pixel_mean, pixel_std, pad_to),
        boxes=_column(images, "boxes", "candidate boxes"),
        texts=pad_texts(texts, pad_id),
        looks_at=_looks_at(examples),
        targets=_targets(texts),
        detection_targets=_detection_targets(images),
        region_labels=RegionLabels(
            classes=_column(images, "box_classes", "classes of the candidate boxes"),
            class_probs=_column(images, "class_probs", "class distributions"),
            **{name: _column(images, name, name.replace("_", " ")) for name in FOUND},
        ),
        roi_masks=_column(images, "roi_masks", "instance masks"),
        seeds=None if any(text.seed is None for text in texts) else torch.tensor([text.seed for text in texts]),
        hide=_column(images, "hide", "boxes to hide"),
        phrases=None if any(text.phrases is None for text in texts) else join_phrases([text.phrases for text in texts]),
        records=[text.record for text in texts],
    )


def canvas_size(sizes: Sequence[tuple[int, int]], canvas: Sequence[int]) -> tuple[int, int]:
    """(height, width) of a batch whose images each lie on a canvas of at least (short edge, long edge), all in pixels.

    The canvas of an image lies as the image does, and the canvas of a square image as if it were wide; a larger image
    has a larger canvas. As in the official VL-BERT code on VCR, a batch of wide images is (short, long), of high images
    (long, short), and of both (long, long). With images of one orientation a box's features do not depend on its batch.
    """
    short, long = canvas
    least = [(short, long) if height <= width else (long, short) for height, width in sizes]
    heights, widths = zip(*sizes, *least, strict=True)
    return max(heights), max(widths)


def pad_texts(texts: Sequence[TextExample], pad_id: int = 0) -> TextBatch:
    """Pad the wordpieces of M texts at the end ([PAD] is 0 in BERT's vocabularies).

    Returns:
        `TextBatch` with L = the longest sequence (at least 1). `region_of_token` is there if any text has it.

    Raises:
        ValueError: texts that are read at a place of their own beside others that are not, or region indices of another
            length than the wordpieces.
    """
    lengths = [len(text.laid.input_ids) for text in texts]
    shape = (len(texts), max(lengths, default=0) or 1)
    input_ids = torch.full(shape, pad_id, dtype=torch.int64)
    segment_ids = torch.zeros(shape, dtype=torch.int64)
    attend = torch.zeros(shape, dtype=torch.bool)
    names_regions = any(text.region_of_token is not None for text in texts)
    region_of_token = torch.full(shape, -1, dtype=torch.int64) if names_regions else None
    for row, (text, length) in enumerate(zip(texts, lengths, strict=True)):
        input_ids[row, :length] = torch.from_numpy(text.laid.input_ids)
        segment_ids[row, :length] = torch.from_numpy(text.laid.segment_ids)
        attend[row, :length] = True
        if text.region_of_token is not None:
            if len(text.region_of_token) != length:
                raise UserError(
                    f"text {row} of the batch has {length} wordpieces but {len(text.region_of_token)} region indices"
                )
            region_of_token[row, :length] = torch.from_numpy(text.region_of_token)
    summaries = [text.laid.summary for text in texts]
    has_place = [summary is not None for summary in summaries]
    if any(has_place) and not all(has_place):
        raise UserError("texts with a place for an answer and texts without one cannot be in one batch")
    summary = torch.tensor(summaries, dtype=torch.int64) if any(has_place) else None
    return TextBatch(input_ids, segment_ids, attend, summary, region_of_token)


def _image_batch(
    images: Sequence[ImageExample],
    pixel_mean: Sequence[float],
    pixel_std: Sequence[float],
    pad_to: tuple[int, int] | None,
) -> ImageBatch:
    """Pixels; or with precomputed features these and the sizes, without pixels."""
    names, original_sizes = [image.name for image in images], [image.placement.original_size for image in images]
    features = _column(images, "features", "precomputed features")
    if features is None:
        pixels = [image.pixels for image in images]
        return make_image_batch(pixels, original_sizes, names, pixel_mean, pixel_std, pad_to=pad_to)
    whole = _column(images, "image_feature", "a feature of the whole image")
    return ImageBatch(
        pixels=torch.zeros(len(images), 3, 0, 0),
        sizes=torch.tensor([image.placement.size for image in images]),
        original_sizes=torch.tensor(original_sizes),
        names=names,
        precomputed=PrecomputedFeatures(features, None if whole is None else torch.stack(whole)),
    )


def _all_or_none(images: Sequence[ImageExample], field: str, what: str) -> bool:
    has = [getattr(image, field) is not None for image in images]
    if any(has) and not all(has):
        raise UserError(
            f"{images[has.index(True)].name} comes with {what}, {images[has.index(False)].name} without; "
            "one batch cannot mix box sources or data sets that differ in this"
        )
    return has[0]


def _column(images: Sequence[ImageExample], field: str, what: str) -> list[Tensor] | None:
    """An array of each image as a tensor; None if no image has it."""
    if not _all_or_none(images, field, what):
        return None
    return [torch.from_numpy(np.ascontiguousarray(getattr(image, field))) for image in images]


def _looks_at(examples: Sequence[Example]) -> Tensor:
    """int64 [M, I]: rows of each example's own images become rows of the batch."""
    slots = max((len(text.looks_at) for example in examples for text in example.texts), default=0) or 1
    rows, first = [], 0
    for example in examples:
        for text in example.texts:
            for image in text.looks_at:
                if not 0 <= image < len(example.images):
                    raise UserError(
                        f"a text looks at image {image} of an example that has {len(example.images)} images"
                    )
            rows.append([first + image for image in text.looks_at] + [-1] * (slots - len(text.looks_at)))
        first += len(example.images)
    return torch.tensor(rows, dtype=torch.int64)


def _targets(texts: Sequence[TextExample]) -> Targets | None:
    kinds = {type(text.targets) for text in texts}
    if len(kinds) > 1:
        names = " and ".join(sorted(kind.__name__ for kind in kinds))
        raise UserError(f"texts with targets {names} cannot be in one batch; all must be of one task and one kind")
    [kind] = kinds
    return None if kind is type(None) else kind.join([text.targets for text in texts])


def _detection_targets(images: Sequence[ImageExample]) -> DetectionTargets | None:
    if not _all_or_none(images, "objects", "annotated objects"):
        return None
    objects: list[DetectionObjects] = [image.objects for image in images]
    has_attributes = [one.attributes is not None for one in objects]
    if any(has_attributes) and not all(has_attributes):
        raise UserError("one batch cannot mix objects with attributes and objects without")
    return DetectionTargets(
        boxes=[torch.from_numpy(np.ascontiguousarray(one.boxes)) for one in objects],
        classes=[torch.from_numpy(one.classes) for one in objects],
        attributes=_padded_attributes([one.attributes for one in objects]) if has_attributes[0] else None,
    )


def _padded_attributes(rows: Sequence[Any]) -> list[Tensor]:
    slots = max(one.shape[1] for one in rows)
    padded = [np.pad(one, ((0, 0), (0, slots - one.shape[1])), constant_values=-1) for one in rows]
    return [torch.from_numpy(one.astype(np.int64)) for one in padded]
