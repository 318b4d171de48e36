"""Masks of objects as COCO's files have them: polygons, or run-length encodings (RLE).

pycocotools, by the authors of COCO, turns them into pixels. This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import cv2
import numpy as np
from jaxtyping import Bool, Int64
from msgspec import Meta

from detector.errors import UserError
from e2e_vl.io import Count, Pixel, Record, Side

MIN_NUMBERS = 6  # of a polygon: three points
COMPRESSED = r"^[0-o]*[0-O]\Z"  # COCO's text of run lengths: five bits a character, and one more if others follow


class RunLengths(Record, frozen=True):
    """COCO's RLE of one mask: its (height, width) and the lengths of runs, column by column, that begin with zeros."""

    size: tuple[Side, Side]
    counts: Annotated[str, Meta(pattern=COMPRESSED)] | list[Count]  # COCO's compressed text, or plain numbers

    @classmethod
    def of_mask(cls, mask: Bool[np.ndarray, "height width"]) -> RunLengths:
        from pycocotools import mask as mask_api

        return cls.of_coco(mask_api.encode(np.asfortranarray(mask.astype(np.uint8))))

    @classmethod
    def of_coco(cls, encoding: dict[str, Any]) -> RunLengths:
        """Return what pycocotools encodes, with the counts as text."""
        height, width = encoding["size"]
        return cls((int(height), int(width)), encoding["counts"].decode("ascii"))

    def to_coco(self) -> dict[str, Any]:
        """Return a compressed encoding for pycocotools."""
        from pycocotools import mask as mask_api

        if isinstance(self.counts, str):
            return {"size": list(self.size), "counts": self.counts.encode("ascii")}
        return mask_api.frPyObjects({"size": list(self.size), "counts": self.counts}, *self.size)

    def lengths(self) -> Int64[np.ndarray, " runs"]:
        """Return the lengths of the runs, as `rleFrString` of pycocotools reads them, which does not return them."""
        if not isinstance(self.counts, str):
            return np.array(self.counts, dtype=np.int64)
        codes = np.frombuffer(self.counts.encode("ascii"), dtype=np.uint8).astype(np.int64) - ord("0")
        is_last = codes & 32 == 0
        starts = np.flatnonzero(np.append(True, is_last[:-1]))
        sizes = np.diff(np.append(starts, len(codes)))  # characters of each number
        positions = np.arange(len(codes)) - np.repeat(starts, sizes)
        lengths = np.add.reduceat((codes & 31) << 5 * positions, starts)
        lengths -= (codes[is_last] >> 4 & 1) << 5 * sizes  # the highest bit is the sign
        # from the fourth number on, a number is the difference from the last but one
        lengths[1::2] = lengths[1::2].cumsum()
        lengths[2::2] = lengths[2::2].cumsum()
        return lengths

    def to_mask(self) -> Bool[np.ndarray, "height width"]:
        from pycocotools import mask as mask_api

        return mask_api.decode(self.to_coco()).astype(bool)


Polygon = Annotated[list[Pixel], Meta(min_length=MIN_NUMBERS)]  # x, y, x, y, ... in pixels of the original image
ObjectMask = list[Polygon] | RunLengths  # of one object: its visible parts, or runs


def encode_masks(masks: Sequence[ObjectMask], size: tuple[int, int]) -> RunLengths:
    """Return the union of the masks of objects in an image of (height, width) pixels; no masks: an empty one."""
    from pycocotools import mask as mask_api

    parts = []
    for mask in masks:
        if isinstance(mask, RunLengths):
            parts.append(mask.to_coco())
        elif mask:
            parts += mask_api.frPyObjects([list(polygon) for polygon in mask], *size)
    if not parts:
        return RunLengths.of_mask(np.zeros(size, dtype=bool))
    return RunLengths.of_coco(mask_api.merge(parts))


def resize_mask(
    mask: ObjectMask, size: tuple[int, int], new_size: tuple[int, int], *, flipped: bool = False
) -> Bool[np.ndarray, "height width"]:
    """Return a mask of an image in pixels of the resized image, as Detectron2 does.

    Polygons are scaled, and then turned into pixels; runs are turned into pixels, of which the nearest are taken.

    Args:
        size: (height, width) of the original image, in whose pixels the mask is.
        flipped: the resized image is mirrored.
    """
    height, width = new_size
    if isinstance(mask, RunLengths):
        pixels = cv2.resize(mask.to_mask().view(np.uint8), (width, height), interpolation=cv2.INTER_NEAREST_EXACT)
        resized = pixels.astype(bool)
    else:
        scale = (width / size[1], height / size[0])
        polygons = [(np.reshape(polygon, (-1, 2)) * scale).ravel().tolist() for polygon in mask]
        resized = encode_masks([polygons], new_size).to_mask()
    return resized[:, ::-1] if flipped else resized


def check_mask(mask: ObjectMask, size: tuple[int, int], where: str) -> None:
    """Raise a UserError for runs of another image size or length, or a polygon with half a point.

    `where` names the record. Of runs that do not fill the image, pycocotools would return whatever is in memory.
    """
    if isinstance(mask, RunLengths):
        if mask.size != size:
            raise UserError(
                f"{where}: its mask is of an image of {mask.size[1]} x {mask.size[0]} pixels, but the image has "
                f"{size[1]} x {size[0]}; correct or remove it."
            )
        num_pixels = mask.lengths().sum()
        if num_pixels != size[0] * size[1]:
            raise UserError(
                f"{where}: the run lengths of its mask add up to {num_pixels:,}, but the image has "
                f"{size[0] * size[1]:,} pixels; correct or remove it."
            )
        return
    for polygon in mask:
        if len(polygon) % 2:
            raise UserError(f"{where}: a polygon of its mask has {len(polygon)} numbers, not pairs x, y; correct it.")


def mask_overlap(predicted: RunLengths, true: RunLengths) -> tuple[int, int]:
    """Return the number of pixels in both masks and in at least one of them."""
    from pycocotools import mask as mask_api

    pair = [predicted.to_coco(), true.to_coco()]
    intersection = mask_api.area(mask_api.merge(pair, intersect=True))
    return int(intersection), int(mask_api.area(mask_api.merge(pair)))
