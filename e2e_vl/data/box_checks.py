"""Whether boxes from a file or a user are what they are taken for: corners in pixels of the original image.

Normalised boxes (shares of the image's sides, 0 to 1) and corners in a file of [x, y, width, height] have the right
types and would be trained on without an error. Where a file is read as a whole, all its boxes are judged together: a
single tiny box, or one that reaches outside its image, is legal and occurs in COCO and Visual Genome.

All arrays of boxes here are continuous xyxy, float [R, 4].
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from detector.errors import UserError
from detector.logs import OnceFilter
from e2e_vl.io import FourNumbers

logger = logging.getLogger(__name__)
logger.addFilter(OnceFilter())  # a file is opened for several splits and box sources

MARGIN = 1.0  # pixels by which a box may exceed its image: corners are often rounded, or counted from 1
MAX_SHARE_OUTSIDE = 0.01  # of the boxes of a file
_LOWEST_NORMALISED = -0.05  # normalised boxes of a model may exceed their image a little
_LARGEST_NORMALISED = 2.1  # x1 + x2 of corners that were read as [x, y, width, height]
_LARGEST_NORMALISED_SIDE = 1.1


def are_normalised(boxes: np.ndarray) -> bool:
    """Return whether boxes can only be shares of their images' sides: all of them in the first pixel, with fractions.

    Normalised corners that were read as [x, y, width, height] end in the second pixel. Whole numbers are no evidence:
    [0, 0, 1, 1] is the first pixel, or the whole image.
    """
    boxes = np.asarray(boxes, dtype=np.float64).reshape(-1, 4)
    if not len(boxes) or not (boxes % 1 != 0).any():
        return False
    largest_side = (boxes[:, 2:] - boxes[:, :2]).max()
    is_near_origin = boxes.min() >= _LOWEST_NORMALISED and boxes.max() <= _LARGEST_NORMALISED
    return bool(is_near_origin and largest_side <= _LARGEST_NORMALISED_SIDE)


def require_pixels(boxes: np.ndarray, where: str) -> None:
    """Raise a UserError if boxes are normalised, see `are_normalised`; `where` names them in its message."""
    if are_normalised(boxes):
        values = ", ".join(f"{value:g}" for value in np.reshape(boxes, (-1, 4))[0].tolist())
        raise UserError(
            f"{where}: the boxes are normalised to 0 .. 1, such as the corners [{values}]; multiply them by the width "
            "and height of their image, because boxes are in pixels of the original image."
        )


def has_part_inside(box: FourNumbers, width: float, height: float) -> bool:
    """Return whether a part of a box, xyxy, lies inside an image."""
    x1, y1, x2, y2 = box
    return x1 < width and y1 < height and x2 > 0 and y2 > 0


def reach_outside(boxes: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return which boxes exceed their image by more than `MARGIN`: bool [R].

    Args:
        sizes: [R, 2] (width, height) of each box's image, or [2] of the image of all boxes.
    """
    begins_outside = boxes[:, :2] < -MARGIN
    ends_outside = boxes[:, 2:] > np.asarray(sizes) + MARGIN
    return (begins_outside | ends_outside).any(axis=1)


def look_like_corners(boxes: np.ndarray, sizes: np.ndarray) -> bool:
    """Return whether boxes read as [x, y, width, height] all fit their images as [x1, y1, x2, y2] too.

    `sizes`: as in `reach_outside`.
    """
    ends = boxes[:, 2:] - boxes[:, :2]  # what the file calls width and height
    has_area = ends > boxes[:, :2]
    is_inside = ends <= np.asarray(sizes) + MARGIN
    return bool((has_area & is_inside).all())


def check_file_boxes(boxes: np.ndarray, sizes: np.ndarray, image_ids: Sequence[object], where: str) -> None:
    """Check all boxes of a file of [x, y, width, height], after their conversion to corners.

    Logs one warning if the boxes of some images are normalised, and one if more than `MAX_SHARE_OUTSIDE` of the boxes
    reach outside their image.

    Args:
        sizes: [R, 2] (width, height) of each box's image.
        image_ids: of each box, R.
        where: the file.

    Raises:
        UserError: all boxes are normalised.
    """
    require_pixels(boxes, where)
    warn_of_normalised_images(boxes, image_ids, where)
    warn_of_boxes_outside(boxes, sizes, image_ids, where)


def warn_of_boxes_outside(boxes: np.ndarray, sizes: np.ndarray, image_ids: Sequence[object], where: str) -> None:
    """Log a warning if more than `MAX_SHARE_OUTSIDE` of the boxes reach outside; arguments as in `check_file_boxes`."""
    outside = reach_outside(boxes, sizes)
    if outside.sum() <= MAX_SHARE_OUTSIDE * len(boxes):
        return
    row = int(outside.argmax())
    x1, y1, x2, y2 = boxes[row].tolist()
    width, height = map(int, sizes[row])
    remedy = "check that they are [x, y, width, height] in pixels of these images"
    if look_like_corners(boxes, sizes):
        remedy = "they look like corners [x1, y1, x2, y2]; convert them to [x, y, width, height]"
    message = (
        f"{where}: {outside.sum()} of {len(boxes)} boxes reach outside their image by more than a pixel, such as "
        f"[{x1:g}, {y1:g}, {x2 - x1:g}, {y2 - y1:g}] of image {image_ids[row]} of {width} x {height} pixels; {remedy}."
    )
    logger.warning("%s", message, extra={"once": message})


def warn_of_normalised_images(boxes: np.ndarray, image_ids: Sequence[object], where: str) -> None:
    """Log one warning about images all of whose boxes are normalised, in a file that also has others."""
    is_near_origin = (boxes <= _LARGEST_NORMALISED).all(axis=1)
    rows_of: dict[object, list[int]] = {}
    for row in np.flatnonzero(is_near_origin).tolist():
        rows_of.setdefault(image_ids[row], []).append(row)
    if not rows_of:
        return
    for row in np.flatnonzero(~is_near_origin).tolist():
        rows_of.pop(image_ids[row], None)
    normalised = [image_id for image_id, rows in rows_of.items() if are_normalised(boxes[rows])]
    if normalised:
        message = (
            f"{where}: all boxes of {len(normalised)} images lie in their first pixels, such as those of image "
            f"{normalised[0]}; if they are normalised to 0 .. 1, multiply them by the width and height of the image, "
            "because boxes are in pixels."
        )
        logger.warning("%s", message, extra={"once": message})
