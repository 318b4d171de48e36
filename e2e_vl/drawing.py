"""Pictures of boxes with labels, for answers, extracted regions and reports."""

from __future__ import annotations

import functools
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

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
_MIN_SIDE = 160  # a very thin image gets a margin, so that labels have room
_MARGIN = (235, 235, 235)
_GAP = 12  # pixels between images side by side
_WHITE, _BLACK = (255, 255, 255), (0, 0, 0)
_LABEL_SHARE = 1 / 6  # share of the picture that labels may cover before their font becomes smaller
_PAD = 3  # between a label's text and its edge
_LUMINANCE = (0.299, 0.587, 0.114)  # of red, green and blue, ITU-R BT.601
_HEAT = "YlOrRd"  # matplotlib colormap: light for low values
_MOST_HEAT, _MOST_GREY = 0.8, 0.55  # opacity of the highest value; share of grey in the image below


class _Label(NamedTuple):
    """A label before placement."""

    text: str  # lines that fit the picture
    width: int
    height: int


def draw_boxes(
    image: np.ndarray,
    boxes: Sequence[Sequence[float]] | np.ndarray,
    labels: Sequence[str] | None = None,
    colours: Sequence[Colour] | None = None,
    title: str | None = None,
    dashed: Sequence[bool] | None = None,
) -> np.ndarray:
    """Draw labelled boxes; small images are enlarged and large ones shrunk, so that lines and labels are legible.

    Labels never overlap. Each goes above the upper left corner of its box or to the nearest free place, where a line
    connects it to the box. Labels that do not fit go below the image.

    Args:
        image: uint8 [h, w, 3]; it is not changed.
        boxes: [R, 4] xyxy in pixels of `image`; the first box is drawn last, on top, and its label is placed first.
        labels: R texts; an empty text is left out.
        colours: R colours in the image's own channel order; None = the colours of `PALETTE` in turn.
        title: a text above the picture.
        dashed: whether the outline of each of the R boxes is dashed; None = no outline is.

    Returns:
        A new uint8 picture [h', w', 3] in the channel order of `image`. The long side of the resized image has 480 to
        1280 pixels; margins of thin images, labels below the image and the title are added to that.
    """
    boxes = np.asarray(boxes, dtype=np.float64).reshape(-1, 4)
    texts = [""] * len(boxes) if labels is None else list(labels)
    colours = [PALETTE[row % len(PALETTE)] for row in range(len(boxes))] if colours is None else list(colours)
    dashed = [False] * len(boxes) if dashed is None else list(dashed)
    content = _resize(image)
    width, height = (max(side, _MIN_SIDE) for side in content.size)
    root = math.sqrt(width * height)
    line = min(max(round(root / 250), 2), 5)
    size = title_size = min(max(round(root / 30), 12), 36)
    made = [_make_label(text, width, size) for text in texts]
    while size > 12 and sum(one.width * one.height for one in made if one.text) > _LABEL_SHARE * width * height:
        size -= 1
        made = [_make_label(text, width, size) for text in texts]
    scale = np.tile(np.array(content.size) / (image.shape[1], image.shape[0]), 2)
    placed = np.round(boxes * scale).clip(0, np.tile(content.size, 2)).astype(int)
    inside: dict[int, Place] = {}
    below: dict[int, Place] = {}
    x, y, bottom = 0, height + _PAD, height  # of the next label below the image
    for row, label in enumerate(made):
        if not label.text:
            continue
        place = _find_free_place(label, placed[row], np.array([*inside.values()]).reshape(-1, 4), width, height)
        if place is not None:
            inside[row] = place
            continue
        if x and x + label.width > width:
            x, y = 0, bottom + _PAD
        below[row] = (x, y, x + label.width, y + label.height)
        x, bottom = x + label.width + _PAD, max(bottom, y + label.height)

    picture = Image.new("RGB", (width, bottom), _MARGIN)
    picture.paste(content, (0, 0))
    draw = ImageDraw.Draw(picture)
    for row in range(len(boxes))[::-1]:
        _draw_box(draw, placed[row].tolist(), colours[row], line, dashed[row])
    for row, place in inside.items():  # after all boxes, so that no line crosses a label
        _draw_link(draw, place, placed[row].tolist(), colours[row], line)
    for row, (x1, y1, x2, y2) in (inside | below).items():
        draw.rectangle((x1, y1, x2 - 1, y2 - 1), fill=colours[row])
        ink = _WHITE if np.dot(colours[row], _LUMINANCE) < 150 else _BLACK
        draw.text((x1 + _PAD, y1 + _PAD // 2), made[row].text, fill=ink, font=_font(size), spacing=0)
    if not title:
        return np.array(picture)
    header = _make_label(title, width, title_size)
    result = Image.new("RGB", (width, header.height + _PAD + bottom), _WHITE)
    ImageDraw.Draw(result).text((_PAD, _PAD), header.text, fill=_BLACK, font=_font(title_size), spacing=0)
    result.paste(picture, (0, header.height + _PAD))
    return np.array(result)


def choose_box_colours(answers: int, phrases: int) -> list[Colour]:
    """Colours of `PALETTE` for the boxes of an answer, then for those of its phrases.

    The first colour is reserved for answers.
    """
    own = [PALETTE[row % len(PALETTE)] for row in range(answers)]
    others, first = PALETTE[1:], max(answers - 1, 0)
    return own + [others[(first + row) % len(others)] for row in range(phrases)]


def draw_side_by_side(images: Sequence[np.ndarray]) -> np.ndarray:
    """Join uint8 images [h, w, 3], each resized as in `draw_boxes` and then to the smallest height, with a margin."""
    contents = [_resize(image) for image in images]
    height = min(content.height for content in contents)
    gap, joined = np.full((height, _GAP, 3), _MARGIN, dtype=np.uint8), []
    for content in contents:
        size = max(round(content.width * height / content.height), 1), height
        joined += [gap, np.asarray(content.resize(size, Image.Resampling.BILINEAR))]
    return np.concatenate(joined[1:], axis=1)


def draw_heat_map(image: np.ndarray, boxes: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Draw boxes coloured by value on a greyed image; where boxes overlap, the highest value counts.

    Args:
        image: uint8 RGB [h, w, 3]; it is not changed.
        boxes: [R, 4] xyxy in pixels of `image`.
        values: [R], not negative; the colours are relative to the highest one.
    """
    from matplotlib import colormaps  # slow to import, see `_font`

    height, width = image.shape[:2]
    strength = np.zeros((height, width), dtype=np.float32)
    highest = float(values.max()) if len(values) else 0.0
    for box, value in zip(boxes, values / highest if highest > 0 else values, strict=True):
        x1, y1 = (int(side) for side in np.floor(box[:2]).clip(0, (width, height)))
        x2, y2 = (int(side) for side in np.ceil(box[2:]).clip(0, (width, height)))
        strength[y1:y2, x1:x2] = np.maximum(strength[y1:y2, x1:x2], value)
    grey = (image @ np.array(_LUMINANCE, dtype=np.float32))[..., None]
    faded = (1 - _MOST_GREY) * image + _MOST_GREY * grey
    table = (colormaps[_HEAT](np.linspace(0, 1, 256))[:, :3] * 255).astype(np.float32)
    heat = table[np.round(strength * 255).astype(np.uint8)]
    share = (_MOST_HEAT * strength)[..., None]
    return np.round((1 - share) * faded + share * heat).clip(0, 255).astype(np.uint8)


def _resize(image: np.ndarray) -> Image.Image:
    """Resize the image so that its long side is between `SHORTEST` and `LONGEST`."""
    height, width = image.shape[:2]
    longer = max(height, width)
    factor = min(max(longer, SHORTEST), LONGEST) / longer
    # enlarged pixels remain visible squares: the picture shows what the network saw
    method = Image.Resampling.NEAREST if factor > 1 else Image.Resampling.BILINEAR
    return Image.fromarray(image).resize((max(round(width * factor), 1), max(round(height * factor), 1)), method)


@functools.cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    import matplotlib  # slow to import, and not every command draws

    # PIL's default font has no accents, Greek or Cyrillic
    return ImageFont.truetype(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf", size)


def _make_label(text: str, width: int, size: int) -> _Label:
    """Wrap the lines of a text to the width of the picture; longer words are broken."""
    font, most = _font(size), width - 2 * _PAD
    characters = max(min(len(text), int(most / font.getlength("i"))), 1)
    while True:
        lines = [line for part in text.splitlines() for line in textwrap.wrap(part, characters)]
        longest = max(map(font.getlength, lines), default=0)
        if longest <= most or characters == 1:
            break
        characters = max(min(characters - 1, int(characters * most / longest)), 1)
    line_height = sum(font.getmetrics())
    return _Label("\n".join(lines), math.ceil(longest) + 2 * _PAD, len(lines) * line_height + 2 * (_PAD // 2))


def _find_free_place(label: _Label, box: np.ndarray, taken: np.ndarray, width: int, height: int) -> Place | None:
    """Find the free place nearest to the one just above the upper left corner of the box; None: there is none."""
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
    x, y = free[np.abs(free - wanted).sum(axis=1).argmin()].tolist()
    return x, y, x + label.width, y + label.height


def _draw_link(draw: ImageDraw.ImageDraw, label: Place, box: list[int], colour: Colour, line: int) -> None:
    """Draw a line from a label to its box unless they touch."""
    on_label, on_box = [], []
    for first in (0, 1):  # x, then y
        nearest = min(max((label[first] + label[first + 2]) // 2, box[first]), box[first + 2])
        on_box.append(nearest)
        on_label.append(min(max(nearest, label[first]), label[first + 2]))
    if math.dist(on_label, on_box) > 2 * line:
        draw.line((*on_label, *on_box), fill=_WHITE, width=line + 2)
        draw.line((*on_label, *on_box), fill=colour, width=line)


def _draw_box(draw: ImageDraw.ImageDraw, box: list[int], colour: Colour, line: int, is_dashed: bool) -> None:
    """Draw an outline inside the box, with a thin white edge for contrast."""
    x1, y1, x2, y2 = box
    x2, y2 = max(x2 - 1, x1), max(y2 - 1, y1)  # PIL counts the last pixel in
    line = max(min(line, (x2 - x1) // 4, (y2 - y1) // 4), 1)
    if min(x2 - x1, y2 - y1) > 4 * line:
        draw.rectangle((x1, y1, x2, y2), outline=_WHITE, width=line + 1)
    if not is_dashed:
        draw.rectangle((x1, y1, x2, y2), outline=colour, width=line)
        return
    dash = 3 * line
    for x in range(x1, x2 + 1, 2 * dash):
        end = min(x + dash - 1, x2)
        draw.rectangle((x, y1, end, y1 + line - 1), fill=colour)
        draw.rectangle((x, y2 - line + 1, end, y2), fill=colour)
    for y in range(y1, y2 + 1, 2 * dash):
        end = min(y + dash - 1, y2)
        draw.rectangle((x1, y, x1 + line - 1, end), fill=colour)
        draw.rectangle((x2 - line + 1, y, x2, end), fill=colour)
