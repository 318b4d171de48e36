"""Pictures of boxes with labels, for answers, extracted regions and reports."""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from detector.errors import UserError

Colour = tuple[int, int, int]
Place = tuple[int, int, int, int]  # x1, y1, x2, y2 in pixels of the picture, x2 and y2 excluded

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
MOST_CHARACTERS = 1000  # of a label; a longer one would cover the picture
_MIN_SIDE = 160  # a very thin image gets a margin, so that labels have room
_MARGIN = (235, 235, 235)
_GAP = 12  # pixels between images side by side
_WHITE, _BLACK = (255, 255, 255), (0, 0, 0)
_FONT_SIZES = (12, 36)  # pixels: the smallest and the largest
_FONT_SHARE = 1 / 30  # size of the font, relative to the root of the picture's area
_LINE_SHARE = 1 / 250  # width of a line, likewise
_DASH_LINES = 3  # length of a dash, and of the gap behind it, in widths of its line
_LABEL_SHARE = 1 / 6  # share of the picture that labels may cover before their font becomes smaller
_PAD = 3  # between a label's text and its edge
_LUMINANCE = (0.299, 0.587, 0.114)  # of red, green and blue, ITU-R BT.601
_BRIGHT = 150  # luminance from which the text on a colour is black


@dataclass(frozen=True)
class _Label:
    """A label that has no place yet."""

    text: str  # lines that fit the picture
    width: int
    height: int

    def at(self, x: float, y: float) -> Place:
        return round(x), round(y), round(x) + self.width, round(y) + self.height


def draw_boxes(
    image: np.ndarray,
    boxes: Sequence[Sequence[float]] | np.ndarray,
    labels: Sequence[str] | None = None,
    colours: Sequence[Colour] | None = None,
    title: str | None = None,
    dashed: Sequence[bool] | None = None,
) -> np.ndarray:
    """Draw boxes at a size at which lines and labels are legible, for images of any size.

    Labels lie inside the picture and never on each other: each is written above the upper left corner of its box or as
    near to it as there is room, with a line to the box where it is apart; what finds no room stands below the image.

    Args:
        image: uint8 [h, w, 3]; it is not changed.
        boxes: [R, 4] xyxy in pixels of `image`; the first box is drawn last, on top, and its label is placed first.
        labels: R texts; an empty text is left out, and of a long one the first `MOST_CHARACTERS` stay.
        colours: R colours in the image's own channel order; None = the colours of `PALETTE` in turn.
        title: a text above the picture.
        dashed: whether the outline of each of the R boxes is dashed; None = no outline is.

    Returns:
        A new uint8 picture [h', w', 3] in the channel order of `image`. The long side of the image in it has between
        480 and 1280 pixels; the picture is larger where the image is thin, has a title, or has no room for a label.

    Raises:
        ValueError: the numbers of boxes, labels, colours and dashed outlines differ.
    """
    boxes = np.asarray(boxes, dtype=np.float64).reshape(-1, 4)
    texts = [""] * len(boxes) if labels is None else list(labels)
    colours = [PALETTE[row % len(PALETTE)] for row in range(len(boxes))] if colours is None else list(colours)
    if not len(boxes) == len(texts) == len(colours):
        raise UserError(f"{len(boxes)} boxes, {len(texts)} labels and {len(colours)} colours: numbers must be equal.")
    dashed = [False] * len(boxes) if dashed is None else list(dashed)
    if len(dashed) != len(boxes):
        raise UserError(f"{len(boxes)} boxes, and {len(dashed)} values say whether they are dashed: give one per box.")
    content = _resized(image)
    width, height = (max(side, _MIN_SIDE) for side in content.size)
    scale = np.array(content.size) / (image.shape[1], image.shape[0])
    placed = np.round(boxes * np.tile(scale, 2)).clip(0, np.tile(content.size, 2)).astype(int)
    made, font = _fitting_labels([_shortened(text) for text in texts], width, height)
    places, leftover = _place_all(made, placed, width, height)
    below, bottom = _rows(leftover, width, height)

    picture = Image.new("RGB", (width, bottom), _MARGIN)
    picture.paste(content, (0, 0))
    draw = ImageDraw.Draw(picture)
    line = _share(width, height, _LINE_SHARE, 2, 5)
    for row in range(len(boxes))[::-1]:
        _draw_box(draw, placed[row].tolist(), colours[row], line, dashed[row])
    for row, place in places.items():  # after all boxes, so that no line crosses a label
        _draw_link(draw, place, placed[row].tolist(), colours[row], line)
    for row, place in (*places.items(), *below.items()):
        _draw_label(draw, place, made[row].text, colours[row], font)
    return np.array(_with_title(picture, title, height) if title else picture)


def box_colours(answers: int, phrases: int) -> list[Colour]:
    """Colours of the boxes that an answer points at, then of the boxes that its phrases name.

    They are those of `PALETTE` in turn, but no phrase ever has the first one, which an answer has.
    """
    own = [PALETTE[row % len(PALETTE)] for row in range(answers)]
    others, first = PALETTE[1:], max(answers - 1, 0)
    return own + [others[(first + row) % len(others)] for row in range(phrases)]


def draw_side_by_side(images: Sequence[np.ndarray]) -> np.ndarray:
    """Images of one height beside each other, with a margin between them.

    Args:
        images: uint8 [h, w, 3] each, of any sizes.

    Returns:
        A new uint8 picture [h', w', 3]; each image is enlarged or shrunk as by `draw_boxes`, then to the least height.
    """
    contents = [_resized(image) for image in images]
    height = min(content.height for content in contents)
    widths = [max(round(content.width * height / content.height), 1) for content in contents]
    picture = Image.new("RGB", (sum(widths) + _GAP * (len(images) - 1), height), _MARGIN)
    x = 0
    for content, width in zip(contents, widths, strict=True):
        picture.paste(content.resize((width, height), Image.Resampling.BILINEAR), (x, 0))
        x += width + _GAP
    return np.array(picture)


def _with_title(picture: Image.Image, title: str, height: int) -> Image.Image:
    """The picture with a text above it; `height` is the height of the image in it."""
    font = _font(_share(picture.width, height, _FONT_SHARE, *_FONT_SIZES))
    lines = _wrap(title, picture.width - 2 * _PAD, font)
    top = _text_height(lines, font) + 2 * _PAD
    result = Image.new("RGB", (picture.width, top + picture.height), _WHITE)
    _write(ImageDraw.Draw(result), (_PAD, _PAD), lines, font, _BLACK)
    result.paste(picture, (0, top))
    return result


def _resized(image: np.ndarray) -> Image.Image:
    """The image, enlarged or shrunk until its long side is between `SHORTEST` and `LONGEST`."""
    height, width = image.shape[:2]
    longer = max(height, width)
    factor = min(max(longer, SHORTEST), LONGEST) / longer
    # Enlarged pixels stay squares, so that the picture shows what the network saw.
    method = Image.Resampling.NEAREST if factor > 1 else Image.Resampling.BILINEAR
    return Image.fromarray(image).resize((max(round(width * factor), 1), max(round(height * factor), 1)), method)


def _share(width: int, height: int, share: float, least: int, most: int) -> int:
    """A share of the root of the area, within limits."""
    return min(max(round(math.sqrt(width * height) * share), least), most)


@functools.cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(_font_file(), size)


def _font_file() -> Path:
    import matplotlib  # takes half a second, and many commands that can draw do not

    # PIL's own font has neither accents nor Greek nor Cyrillic
    return Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"


@functools.cache
def _drawable() -> frozenset[int]:
    """The code points that the font has."""
    from matplotlib.ft2font import FT2Font

    return frozenset(FT2Font(str(_font_file())).get_charmap())


def _in_font(text: str) -> str:
    """The text with `\\u4e2d` in place of what the font lacks, such as Chinese.

    Every such character would be the same empty box, so that different labels would look alike; a font that has all
    scripts weighs more than this package, and the code points can at least be told apart and looked up.
    """
    if text.isascii():
        return text
    return "".join(
        one if one.isspace() or ord(one) in _drawable() else one.encode("ascii", "backslashreplace").decode()
        for one in text
    )


def _text_height(lines: str, font: ImageFont.FreeTypeFont) -> int:
    return (lines.count("\n") + 1) * sum(font.getmetrics())


def _write(
    draw: ImageDraw.ImageDraw, at: tuple[int, int], lines: str, font: ImageFont.FreeTypeFont, ink: Colour
) -> None:
    x, y = at
    for number, line in enumerate(lines.split("\n")):
        draw.text((x, y + number * sum(font.getmetrics())), line, fill=ink, font=font)


def _wrap(text: str, width: int, font: ImageFont.FreeTypeFont) -> str:
    """The text in lines of at most `width` pixels; a longer word is broken."""
    lines: list[str] = []
    for word in _in_font(text).split():
        joined = f"{lines[-1]} {word}" if lines else word
        if lines and font.getlength(joined) <= width:
            lines[-1] = joined
            continue
        while len(word) > 1 and (len(word) > width or font.getlength(word) > width):
            lengths = range(1, min(len(word) - 1, max(width, 1)) + 1)  # a character takes a pixel or more
            fitting = max(bisect.bisect_right(lengths, width, key=lambda n: font.getlength(word[:n])), 1)
            lines.append(word[:fitting])
            word = word[fitting:]
        lines.append(word)
    return "\n".join(lines)


def _fitting_labels(texts: Sequence[str], width: int, height: int) -> tuple[list[_Label], ImageFont.FreeTypeFont]:
    """All labels in the largest font in which they cover no more than their share of the picture."""
    size = _share(width, height, _FONT_SHARE, *_FONT_SIZES)
    while True:
        font = _font(size)
        labels = [_label(text, width, font) for text in texts]
        covered = sum(label.width * label.height for label in labels if label.text)
        if size == _FONT_SIZES[0] or covered <= _LABEL_SHARE * width * height:
            return labels, font
        size -= 1


def _shortened(text: str) -> str:
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}..."


def _label(text: str, width: int, font: ImageFont.FreeTypeFont) -> _Label:
    lines = _wrap(text, width - 2 * _PAD, font)
    longest = max((font.getlength(line) for line in lines.split("\n")), default=0)
    return _Label(lines, math.ceil(longest) + 2 * _PAD, _text_height(lines, font) + 2 * (_PAD // 2))


def _place_all(
    labels: Sequence[_Label], boxes: np.ndarray, width: int, height: int
) -> tuple[dict[int, Place], dict[int, _Label]]:
    """The places of the labels by row, and the labels for which the picture has no room left."""
    places: dict[int, Place] = {}
    leftover: dict[int, _Label] = {}
    for row, label in enumerate(labels):
        if not label.text:
            continue
        place = _free_place(label, boxes[row], np.array([*places.values()]).reshape(-1, 4), width, height)
        if place is None:
            leftover[row] = label
        else:
            places[row] = place
    return places, leftover


def _free_place(label: _Label, box: np.ndarray, taken: np.ndarray, width: int, height: int) -> Place | None:
    """The free place that is nearest to the upper left corner of the box, best just above it."""
    if label.height > height:
        return None
    wanted = np.array([box[0], box[1] - label.height])
    step = label.height
    ranges = [
        np.unique((at + step * np.arange(-(side // step) - 2, side // step + 3)).clip(0, side - own))
        for at, side, own in zip(wanted, (width, height), (label.width, label.height), strict=True)
    ]
    corners = np.stack(np.meshgrid(*ranges), axis=-1).reshape(-1, 2)
    ends = corners + np.array([label.width, label.height])
    overlaps = (corners[:, None] < taken[:, 2:]) & (ends[:, None] > taken[:, :2])
    free = corners[~overlaps.all(axis=2).any(axis=1)]
    if not len(free):
        return None
    nearest = free[np.abs(free - wanted).sum(axis=1).argmin()]
    return label.at(*nearest)


def _rows(labels: dict[int, _Label], width: int, height: int) -> tuple[dict[int, Place], int]:
    """Labels side by side in rows below an image of this height, and where the last row ends."""
    places: dict[int, Place] = {}
    x, y, bottom = 0, height + _PAD, height
    for row, label in labels.items():
        if x and x + label.width > width:
            x, y = 0, bottom + _PAD
        places[row] = label.at(x, y)
        x, bottom = x + label.width + _PAD, max(bottom, y + label.height)
    return places, bottom


def _draw_link(draw: ImageDraw.ImageDraw, label: Place, box: list[int], colour: Colour, line: int) -> None:
    """A line from a label to its box where the two are apart."""
    on_label, on_box = [], []
    for first in (0, 1):  # x, then y
        nearest = min(max((label[first] + label[first + 2]) // 2, box[first]), box[first + 2])
        on_box.append(nearest)
        on_label.append(min(max(nearest, label[first]), label[first + 2]))
    if math.dist(on_label, on_box) > 2 * line:
        draw.line((*on_label, *on_box), fill=_WHITE, width=line + 2)
        draw.line((*on_label, *on_box), fill=colour, width=line)


def _draw_label(
    draw: ImageDraw.ImageDraw, place: Place, text: str, colour: Colour, font: ImageFont.FreeTypeFont
) -> None:
    x1, y1, x2, y2 = place
    draw.rectangle((x1, y1, x2 - 1, y2 - 1), fill=colour)
    ink = _WHITE if np.dot(colour, _LUMINANCE) < _BRIGHT else _BLACK
    _write(draw, (x1 + _PAD, y1 + _PAD // 2), text, font, ink)


def _draw_box(draw: ImageDraw.ImageDraw, box: list[int], colour: Colour, line: int, is_dashed: bool) -> None:
    """An outline inside the box, with a thin white edge that sets it off from any background."""
    x1, y1, x2, y2 = box
    x2, y2 = max(x2 - 1, x1), max(y2 - 1, y1)  # PIL counts the last pixel in
    line = max(min(line, (x2 - x1) // 4, (y2 - y1) // 4), 1)
    if min(x2 - x1, y2 - y1) > 4 * line:
        draw.rectangle((x1, y1, x2, y2), outline=_WHITE, width=line + 1)
    if not is_dashed:
        draw.rectangle((x1, y1, x2, y2), outline=colour, width=line)
        return
    dash = _DASH_LINES * line
    for x in range(x1, x2 + 1, 2 * dash):
        end = min(x + dash - 1, x2)
        draw.rectangle((x, y1, end, y1 + line - 1), fill=colour)
        draw.rectangle((x, y2 - line + 1, end, y2), fill=colour)
    for y in range(y1, y2 + 1, 2 * dash):
        end = min(y + dash - 1, y2)
        draw.rectangle((x1, y, x1 + line - 1, end), fill=colour)
        draw.rectangle((x2 - line + 1, y, x2, end), fill=colour)
