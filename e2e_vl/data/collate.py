"""Joins examples into a `Batch`.

Shape legend
    N   images of all examples
    M   texts of all examples
    K   most images any text looks at
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from detector.images import make_image_batch
from detector.structures import DetectionTargets, ImageBatch, PrecomputedFeatures
from e2e_vl.data.examples import Example, ImageExample, TextExample
from e2e_vl.structures import Batch
from e2e_vl.text import pad_texts


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
        examples: at least one, all of one kind: of the same dataset, or of datasets for the same task.
        pixel_mean: of the three channels in the order of the images; subtracted.
        pixel_std: of the three channels; divides.
        pad_to: (height, width) of the padded images, or None = the largest of the batch.
        canvas: (short edge, long edge) in pixels of the least canvas of an image, see `canvas_size`; the batch is as
            large as its largest canvas. None = an image's canvas is its own size. `pad_to` beats it.
        pad_id: wordpiece id of the padding.

    Returns:
        The batch: N images and M texts in the order of the examples, `looks_at` [M, K], padded with -1.

    Raises:
        ValueError: examples that do not go together: some with candidate boxes and some without, some with annotated
            objects and some without, or texts with different targets.
    """
    images = [image for example in examples for image in example.images]
    texts = [text for example in examples for text in example.texts]
    if not images or not texts:
        raise ValueError(f"a batch needs images and texts, this one has {len(images)} images and {len(texts)} texts")

    if pad_to is None and canvas is not None:
        pad_to = canvas_size([image.pixels.shape[:2] for image in images], canvas)
    has_boxes = _all_or_none(images, "boxes", "candidate boxes")
    has_masks = any(image.pixel_masks is not None for image in images)
    no_masks = np.zeros((0, 4), dtype=np.float32)
    return Batch(
        images=_precomputed_batch(images)
        if _all_or_none(images, "features", "precomputed features")
        else make_image_batch(
            [image.pixels for image in images],
            [image.original_size for image in images],
            [image.name for image in images],
            pixel_mean,
            pixel_std,
            pad_to=pad_to,
        ),
        boxes=[_box_tensor(image.boxes) for image in images] if has_boxes else None,
        texts=pad_texts(texts, pad_id),
        looks_at=_looks_at(examples),
        targets=_join_targets(texts),
        detection_targets=_detection_targets(images),
        pixel_masks=[_box_tensor(no_masks if i.pixel_masks is None else i.pixel_masks) for i in images]
        if has_masks
        else None,
        roi_masks=_roi_masks(images) if _all_or_none(images, "roi_masks", "instance masks") else None,
        region_targets=_region_targets(images),
        records=[text.record for text in texts],
    )


def canvas_size(sizes: Sequence[tuple[int, int]], canvas: Sequence[int]) -> tuple[int, int]:
    """Size of a batch whose images each lie on a canvas of at least (short edge, long edge).

    The canvas of an image lies as the image does, a square one's as that of a wide one; an image that is larger has a
    larger canvas. As in the official VL-BERT code on VCR, a batch of wide images is (short, long), of high ones (long,
    short), and of both (long, long). With images of one orientation a box's features no longer depend on its batch.

    Args:
        sizes: N (height, width) in pixels.
        canvas: (short edge, long edge) in pixels.

    Returns:
        (height, width) in pixels.
    """
    short, long = canvas
    least = [(short, long) if height <= width else (long, short) for height, width in sizes]
    heights, widths = zip(*sizes, *least, strict=True)
    return max(heights), max(widths)


def _precomputed_batch(images: Sequence[ImageExample]) -> ImageBatch:
    """Sizes and features without pixels."""
    has_whole = _all_or_none(images, "image_feature", "a feature of the whole image")
    whole = torch.from_numpy(np.stack([image.image_feature for image in images])) if has_whole else None
    return ImageBatch(
        pixels=torch.zeros(len(images), 3, 0, 0),
        sizes=torch.tensor([image.pixels.shape[:2] for image in images]),
        original_sizes=torch.tensor([tuple(image.original_size) for image in images]),
        names=[image.name for image in images],
        precomputed=PrecomputedFeatures([torch.from_numpy(image.features) for image in images], whole),
    )


def _all_or_none(images: Sequence[ImageExample], field: str, what: str) -> bool:
    has = [getattr(image, field) is not None for image in images]
    if any(has) and not all(has):
        raise ValueError(
            f"{images[has.index(True)].name} comes with {what}, {images[has.index(False)].name} without; "
            "one batch cannot mix box sources or datasets that differ in this"
        )
    return has[0]


def _box_tensor(boxes: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(boxes, dtype=np.float32).reshape(-1, 4))


def _roi_masks(images: Sequence[ImageExample]) -> list[Tensor]:
    return [torch.from_numpy(np.ascontiguousarray(image.roi_masks, dtype=np.float32)) for image in images]


def _region_targets(images: Sequence[ImageExample]) -> dict[str, list[Tensor]]:
    names = sorted(images[0].region_targets)
    for image in images:
        if sorted(image.region_targets) != names:
            raise ValueError(
                f"{images[0].name} has targets {names} of its regions, {image.name} "
                f"has {sorted(image.region_targets)}; one batch cannot mix datasets that differ in this"
            )
    return {name: [torch.from_numpy(image.region_targets[name]) for image in images] for name in names}


def _looks_at(examples: Sequence[Example]) -> Tensor:
    """int64 [M, K]: rows of each example's own images become rows of the batch."""
    slots = max((len(text.looks_at) for example in examples for text in example.texts), default=0) or 1
    rows, first = [], 0
    for example in examples:
        for text in example.texts:
            for image in text.looks_at:
                if not 0 <= image < len(example.images):
                    raise ValueError(
                        f"a text looks at image {image} of an example that has {len(example.images)} images"
                    )
            rows.append([first + image for image in text.looks_at] + [-1] * (slots - len(text.looks_at)))
        first += len(example.images)
    return torch.tensor(rows, dtype=torch.int64)


def _join_targets(texts: Sequence[TextExample]) -> dict[str, Tensor]:
    names = set(texts[0].targets)
    for text in texts:
        if set(text.targets) != names:
            raise ValueError(
                f"texts with targets {sorted(names)} and {sorted(text.targets)} cannot be in one batch; "
                "all texts of a batch must come from datasets of the same task"
            )
    return {
        name: (_pad_labels if name.endswith("_labels") else _stack)(name, [text.targets[name] for text in texts])
        for name in sorted(names)
    }


def _pad_labels(name: str, values: Sequence[np.ndarray]) -> Tensor:
    """int64 [M, L] from int64 [L] of every text, -1 at padding."""
    rows = [torch.from_numpy(np.asarray(value, dtype=np.int64)) for value in values]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)


def _stack(name: str, values: Sequence[Any]) -> Tensor:
    arrays = [np.asarray(value) for value in values]
    shapes = {array.shape for array in arrays}
    if len(shapes) > 1:
        raise ValueError(f"the target {name!r} has different shapes in one batch: {sorted(shapes)}")
    return torch.from_numpy(np.stack(arrays))


def _detection_targets(images: Sequence[ImageExample]) -> DetectionTargets | None:
    if not _all_or_none(images, "objects", "annotated objects"):
        return None
    objects = [image.objects for image in images]
    has_attributes = [one.attributes is not None for one in objects]
    if any(has_attributes) and not all(has_attributes):
        raise ValueError("one batch cannot mix objects with attributes and objects without")
    attributes = None
    if has_attributes[0]:
        slots = max(one.attributes.shape[1] for one in objects)
        padded = [
            np.pad(o.attributes, ((0, 0), (0, slots - o.attributes.shape[1])), constant_values=-1) for o in objects
        ]
        attributes = [torch.from_numpy(rows.astype(np.int64)) for rows in padded]
    return DetectionTargets(
        boxes=[_box_tensor(one.boxes) for one in objects],
        classes=[torch.from_numpy(one.classes.astype(np.int64)) for one in objects],
        attributes=attributes,
    )
