"""Which pixels the numbers of somebody's boxes mean: layout (xyxy or xywh) and scale (pixels or shares of the image).

The scale is found from all boxes of a file together, and only where one reading alone fits. How well a reading scores
is never looked at.
"""

from __future__ import annotations

import numpy as np

from detector.errors import UserError

PIXELS = "pixels"
SCALES = {"0-1": 1.0, "0-100": 100.0, "0-999": 999.0, "0-1000": 1000.0}  # -> value at the right and the lower edge
LAYOUTS = ("xyxy", "xywh")
_MOST = 0.98  # share of the boxes that a reading must explain: models also write nonsense
_CLEARLY_NOT = 0.8  # of the boxes that fit what a format says, below which it cannot be so
_MARGIN = 0.05  # of a side, by which boxes in pixels may exceed their image: models see it resized to multiples of 28
_ENOUGH = 20  # boxes that tell pixels from shares of the image
_MAX_INVERTED = 0.1  # share of the boxes


def to_corners(boxes: np.ndarray, layout: str) -> np.ndarray:
    """Return boxes of one of the `LAYOUTS` as corners, float64 [R, 4] in the same scale."""
    corners = np.array(boxes, dtype=np.float64).reshape(-1, 4)
    if layout == "xywh":
        corners[:, 2:] += corners[:, :2]
    return corners


def to_pixels(corners: np.ndarray, sizes: np.ndarray, scale: str) -> np.ndarray:
    """Return corners in pixels of the original images.

    Args:
        corners: float64 [R, 4].
        sizes: (height, width) of the image of each box, [R, 2].
        scale: "pixels" or a key of `SCALES`.
    """
    if scale == PIXELS:
        return corners
    return corners / SCALES[scale] * np.tile(sizes[:, ::-1], 2)


def fitting_scales(corners: np.ndarray, sizes: np.ndarray) -> list[str]:
    """Return all scales in which the boxes of a file can be; arguments as in `to_pixels`.

    | scale | fits if at least 98 % of the boxes |
    | --- | --- |
    | 0-1 | lie between 0 and 1; then nothing else fits, because a pixel holds no box |
    | pixels | lie in their images, with a margin of 5 % |
    | 0-100 | lie between 0 and 100 |
    | 0-999, 0-1000 | lie between 0 and this number, unless 20 boxes in images with a side below 900 fit pixels |

    0-999 and 0-1000 differ by a thousandth, so that both fit unless some box ends after 999.
    """
    if len(corners) == 0:
        return []
    if share_inside(corners, 1.0, _MARGIN) >= _MOST:
        return ["0-1"]
    scales = []
    num_telling = int((sizes.min(axis=1) < 900).sum())
    fits_pixels = share_inside_images(corners, sizes) >= _MOST
    if fits_pixels:
        scales.append(PIXELS)
    if share_inside(corners, 100.0) >= _MOST:
        scales.append("0-100")
    if share_inside(corners, 1000.0) >= _MOST and not (fits_pixels and num_telling >= _ENOUGH):
        last = corners[(corners <= 1000).all(axis=1)].max()
        scales += ["0-1000"] if last > 999 else ["0-999", "0-1000"]
    return scales


def share_inside(corners: np.ndarray, last: np.ndarray | float, margin: float = 0.0) -> float:
    """Return the share of the boxes that lie between 0 and `last`, with a margin as a share of it."""
    is_inside = (corners >= -margin * last) & (corners <= (1 + margin) * last)
    return float(is_inside.all(axis=1).mean())


def share_inside_images(corners: np.ndarray, sizes: np.ndarray) -> float:
    """Return the share of the boxes that lie in their images, with a margin, if they are in pixels."""
    return share_inside(corners, np.tile(sizes[:, ::-1], 2).astype(np.float64), _MARGIN)


def choose_scale(corners: np.ndarray, sizes: np.ndarray, is_pixels: bool, where: str) -> str:
    """Return the scale of the boxes of a file.

    Args:
        corners: float64 [R, 4], the best box of each record.
        sizes: (height, width) of the image of each box, [R, 2].
        is_pixels: the format of the file says so; False: it says nothing, as of answers in words.
        where: the file, for error messages.

    Raises:
        UserError: the boxes do not fit what the format says, or several scales fit, or none.
    """
    scales = fitting_scales(corners, sizes)
    if is_pixels and len(corners):
        reason = ""
        if scales == ["0-1"]:
            reason = "all lie between 0 and 1"
        elif share_inside_images(corners, sizes) < _CLEARLY_NOT:
            reason = "many reach far outside of their images"
        if reason:
            raise UserError(
                f"{where}: the boxes are not in pixels, as this format has them: {reason}; state what they are with "
                "--coordinates, and their layout with --boxes."
            )
    if is_pixels:
        return PIXELS
    if len(scales) == 1:
        return scales[0]
    if not scales:
        raise UserError(
            f"{where}: the boxes fit no scale, because many reach far outside of their images, or there are none; "
            "state what they are with --coordinates, and their layout with --boxes."
        )
    raise UserError(
        f"{where}: the boxes may be in {' or '.join(scales)}, which the file does not say; add --coordinates."
    )


def require_upright(corners: np.ndarray, layout: str, where: str) -> None:
    """Raise a UserError if so many boxes end before they begin that the layout must be wrong."""
    if len(corners) == 0:
        return
    is_inverted = (corners[:, 2:] < corners[:, :2]).any(axis=1)
    if is_inverted.mean() > _MAX_INVERTED:
        raise UserError(
            f"{where}: {is_inverted.sum():,} of {len(corners):,} boxes end before they begin when read as {layout}; "
            "state their layout with --boxes."
        )
