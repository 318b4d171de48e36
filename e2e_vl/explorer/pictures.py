"""Pictures of a session: the regions to click with the attention on them, and what an answer points at.

All are as large as the photo is shown, or larger at the right and the bottom, so a point of a picture is a point of the
photo.
"""

from __future__ import annotations

import numpy as np

from e2e_vl.api.results import marks_of
from e2e_vl.drawing import BLUE, RED, Colour, draw_boxes
from e2e_vl.explorer.session import Inspection, Session
from e2e_vl.explorer.uploads import Photo

GREY = 127  # in place of hidden pixels
MOST_NAMED = 5  # regions whose share of the attention is written on them
_HEAT = (255, 80, 0)  # RGB, laid over regions that attention goes to
_STRONGEST = 0.6  # how much of a pixel this colour covers where most attention goes
_OUTLINE: Colour = (90, 90, 90)  # of the other regions


def to_photo(photo: Photo, point: tuple[float, float]) -> tuple[float, float]:
    """The place in the original photo, (x, y) in its pixels, of a place in any picture of this module."""
    x, y = np.asarray(point, dtype=np.float64) / photo.scale
    return float(x), float(y)


def draw_regions(session: Session) -> np.ndarray | None:
    """uint8 RGB picture of all regions with their numbers; with a chosen item, of its attention. None: no photo."""
    photo, shown = session.photo, session.shown
    if photo is None:
        return None
    if shown is None:
        return draw_boxes(photo.pixels, [])
    count = len(shown)
    shares = None if session.attention is None else session.attention[len(shown.words) :]
    pixels = _covered(photo, shown, session.hidden)
    labels, colours = [str(row) for row in range(count)], [_OUTLINE] * count
    order = list(range(count))
    if shares is not None:
        pixels = _heated(pixels, _on_picture(photo, shown.answer.boxes), shares)
        order = sorted(order, key=lambda row: -shares[row])
        labels = [f"{row}: {shares[row]:.2f}" if shares[row] > 0 else "" for row in range(count)]
        for row in order[MOST_NAMED:]:
            labels[row] = ""
    for row in session.hidden:
        labels[row], colours[row] = f"{row} hidden", RED
    chosen = None if session.item is None else session.item - len(shown.words)
    if chosen is not None and chosen >= 0:
        labels[chosen], colours[chosen] = f"{row_label(chosen, shares)} chosen", BLUE
    first = [row for row in order if colours[row] is not _OUTLINE]  # their labels are placed first
    order = first + [row for row in order if colours[row] is _OUTLINE]
    boxes = _on_picture(photo, shown.answer.boxes)[order]
    return draw_boxes(pixels, boxes, [labels[row] for row in order], [colours[row] for row in order])


def row_label(row: int, shares: np.ndarray | None) -> str:
    return str(row) if shares is None else f"{row}: {shares[row]:.2f}"


def draw_pointed(session: Session, look: Inspection | None, hidden: tuple[int, ...] = ()) -> np.ndarray | None:
    """uint8 RGB picture of the boxes that an answer points at and of phrases, dashed where they are unsure.

    None: no photo, or no answer.
    """
    if look is None or session.photo is None:
        return None
    found = boxes_of(look)
    boxes = _on_picture(session.photo, np.array([box for _, box in found]).reshape(-1, 4))
    labels = [label for label, _ in found[: len(look.answer.pointed)]]
    marks = marks_of(labels, look.answer.shown_phrases())
    return draw_boxes(_covered(session.photo, look, hidden), boxes, **marks)


def boxes_of(look: Inspection) -> list[tuple[str, list[float]]]:
    """Labels and boxes, in pixels of the original photo: the answer's, then those of `Answer.shown_phrases`."""
    return [
        *((_with_name(look, label, box) or "answer", list(box)) for label, box in look.answer.pointed),
        *((phrase.label, list(phrase.box)) for phrase in look.answer.shown_phrases()),
    ]


def _with_name(look: Inspection, label: str, box: list[float]) -> str:
    """The label with what the detector called the region, which an answer about given regions does not say."""
    rows = np.flatnonzero(np.isclose(look.answer.boxes, box, atol=1e-3).all(axis=1))
    name = look.names[rows[0]] if len(rows) else ""
    return label if label.startswith(name) else f"{name} {label}".strip()


def _on_picture(photo: Photo, boxes: np.ndarray) -> np.ndarray:
    return np.asarray(boxes, dtype=np.float64).reshape(-1, 4) * np.tile(photo.scale, 2)


def _covered(photo: Photo, look: Inspection, hidden: tuple[int, ...]) -> np.ndarray:
    """A copy of the photo without the pixels of some regions."""
    pixels = photo.pixels.copy()
    for x1, y1, x2, y2 in _on_picture(photo, look.answer.boxes[list(hidden)]).astype(int):
        pixels[max(y1, 0) : y2 + 1, max(x1, 0) : x2 + 1] = GREY
    return pixels


def _heated(pixels: np.ndarray, boxes: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """The picture with more colour where more attention goes; where regions overlap the strongest one counts."""
    heat = np.zeros(pixels.shape[:2])
    strongest = shares.max(initial=0.0)
    for (x1, y1, x2, y2), share in zip(boxes.round().astype(int).clip(min=0), shares, strict=True):
        part = heat[y1:y2, x1:x2]
        np.maximum(part, share / strongest if strongest > 0 else 0.0, out=part)
    alpha = (_STRONGEST * heat)[..., None]
    return (pixels * (1 - alpha) + np.array(_HEAT) * alpha).round().astype(np.uint8)
