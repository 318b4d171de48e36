"""Pictures of boxes with labels, for reports and demos."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

Colour = tuple[int, int, int]

PALETTE: tuple[Colour, ...] = (
    (230, 60, 60),
    (50, 120, 230),
    (30, 150, 60),
    (240, 150, 0),
    (150, 70, 200),
    (0, 160, 170),
    (220, 70, 160),
    (120, 100, 20),
)
GREEN, BLUE, RED = (0, 160, 60), (0, 80, 200), (220, 30, 30)  # RGB: the truth, a right answer, a wrong answer
SHORTEST, LONGEST = 480, 1280  # the long side of a picture, pixels: smaller images are enlarged, larger ones shrunk
_MIN_SIDE = 160  # a very thin image gets a margin, so that labels have room
_MARGIN = (235, 235, 235)
_FONT_SIZE = 14


def draw_boxes(
    image: np.ndarray,
    boxes: Sequence[Sequence[float]] | np.ndarray,
    labels: Sequence[str] | None = None,
    colours: Sequence[Colour] | None = None,
    title: str | None = None,
) -> np.ndarray:
    """Draw boxes at a size at which lines and labels are legible, for images of any size.

    Args:
        image: uint8 [h, w, 3]; it is not changed.
        boxes: [R, 4] xyxy in pixels of `image`; the first box is drawn last, on top.
        labels: R texts, each written at the upper left corner of its box; an empty text is left out.
        colours: R colours in the image's own channel order; None = the colours of `PALETTE` in turn.
        title: a line of text above the picture.

    Returns:
        A new uint8 picture [h', w', 3] in the channel order of `image`; its long side has between 480 and 1280 pixels.

    Raises:
        ValueError: the numbers of boxes, labels and colours differ.
    """
    boxes = np.asarray(boxes, dtype=np.float64).reshape(-1, 4)
    labels = [""] * len(boxes) if labels is None else list(labels)
    colours = [PALETTE[row % len(PALETTE)] for row in range(len(boxes))] if colours is None else list(colours)
    if not len(boxes) == len(labels) == len(colours):
        raise ValueError(f"{len(boxes)} boxes, {len(labels)} labels and {len(colours)} colours: numbers must be equal.")
    font = ImageFont.load_default(_FONT_SIZE)
    lines = _wrap(title, max(_picture_size(image)[0], _MIN_SIDE), font) if title else []
    top = len(lines) * (_FONT_SIZE + 6)
    picture, scale = _canvas(image, header=top)
    draw = ImageDraw.Draw(picture)
    for number, line in enumerate(lines):
        draw.text((4, 2 + number * (_FONT_SIZE + 6)), line, fill=(0, 0, 0), font=font)
    placed = boxes * np.tile(scale, 2) + np.array([0, top, 0, top])
    drawn = list(zip(placed.tolist(), labels, colours, strict=True))[::-1]
    for (x1, y1, x2, y2), _, colour in drawn:  # PIL counts the last pixel in
        draw.rectangle((x1, y1, max(x2 - 1, x1), max(y2 - 1, y1)), outline=colour, width=2)
    for box, label, colour in drawn:  # after all rectangles, so that no line crosses a label
        if label:
            _label(draw, box, label, colour, picture.size, top, font)
    return np.array(picture)


def _picture_size(image: np.ndarray) -> tuple[int, int]:
    """(width, height) of the image in the picture."""
    height, width = image.shape[:2]
    longer = max(height, width)
    factor = min(max(longer, SHORTEST), LONGEST) / longer
    return max(round(width * factor), 1), max(round(height * factor), 1)


def _canvas(image: np.ndarray, header: int) -> tuple[Image.Image, np.ndarray]:
    """The enlarged or shrunken image on its margin below the header, and its (x, y) scale."""
    width, height = _picture_size(image)
    # Enlarged pixels stay squares, so that the picture shows what the network saw.
    enlarged = width > image.shape[1]
    content = Image.fromarray(image).resize(
        (width, height), Image.Resampling.NEAREST if enlarged else Image.Resampling.BILINEAR
    )
    picture = Image.new("RGB", (max(width, _MIN_SIDE), header + max(height, _MIN_SIDE)), _MARGIN)
    picture.paste(content, (0, header))
    return picture, np.array([width / image.shape[1], height / image.shape[0]])


def _label(
    draw: ImageDraw.ImageDraw,
    box: list[float],
    text: str,
    colour: Colour,
    size: tuple[int, int],
    top: int,
    font: ImageFont.ImageFont | ImageFont.FreeTypeFont,
) -> None:
    """White text on the box's colour, above the box if there is room, never outside the picture."""
    left, upper, right, lower = draw.textbbox((0, 0), text, font=font)
    width, height = right - left + 6, lower - upper + 4
    x = min(max(box[0], 0), max(size[0] - width, 0))
    y = box[1] - height if box[1] - height >= top else box[1]
    y = min(max(y, top), max(size[1] - height, 0))
    draw.rectangle((x, y, x + width, y + height), fill=colour)
    draw.text((x + 3 - left, y + 2 - upper), text, fill=(255, 255, 255), font=font)


def _wrap(text: str, width: int, font: ImageFont.ImageFont | ImageFont.FreeTypeFont) -> list[str]:
    """The text in lines of at most `width` pixels; a single longer word stays whole."""
    lines: list[str] = []
    for word in text.split():
        joined = f"{lines[-1]} {word}" if lines else word
        if lines and font.getlength(joined) <= width - 8:
            lines[-1] = joined
        else:
            lines.append(word)
    return lines
