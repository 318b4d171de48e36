"""Pictures of boxes with labels, for answers, extracted regions and reports."""

from __future__ import annotations

import functools
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
from PIL import Image, ImageDraw, ImageFont

Colour = tuple[int, int, int]
Rectangle = tuple[int, int, int, int]  # x1, y1, x2, y2 in pixels of the picture, x2 and y2 excluded

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
# RGB
GREEN = (0, 160, 60)  # the truth
BLUE = (0, 80, 200)  # a right answer
RED = (220, 30, 30)  # a wrong answer
# the long side of a picture, pixels: smaller images are enlarged, larger ones shrunk
SHORTEST = 480
LONGEST = 1280
_MIN_SIDE = 160  # a very thin image gets a margin, so that labels have room
_MARGIN = (235, 235, 235)
_GAP = 12  # pixels between images side by side
_WHITE = (255, 255, 255)
_BLACK = (0, 0, 0)
_LABEL_SHARE = 1 / 6  # share of the picture that labels may cover before their font becomes smaller
_MIN_FONT_SIZE = 12
_PAD = 3  # between a label's text and its edge
_LUMINANCE = (0.299, 0.587, 0.114)  # of red, green and blue, ITU-R BT.601
_HEAT = "YlOrRd"  # matplotlib colormap: light for low values
_MOST_HEAT = 0.8  # opacity of the highest value
_TINT = 0.5  # opacity of a mask
_MOST_GREY = 0.55  # share of grey in the image below


class _Label(NamedTuple):
    """A label before it has a place; sides in pixels."""

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
    if labels is None:
        labels = [""] * len(boxes)
    if colours is None:
        colours = [PALETTE[row % len(PALETTE)] for row in range(len(boxes))]
    if dashed is None:
        dashed = [False] * len(boxes)
    content = _resize(image)
    width = max(content.width, _MIN_SIDE)
    height = max(content.height, _MIN_SIDE)
    mean_side = math.sqrt(width * height)
    line = min(max(round(mean_side / 250), 2), 5)
    title_size = min(max(round(mean_side / 30), _MIN_FONT_SIZE), 36)
    size, sized_labels = _size_labels(labels, width, height, title_size)
    scale = np.tile(np.array(content.size) / (image.shape[1], image.shape[0]), 2)
    boxes = np.round(boxes * scale).clip(0, np.tile(content.size, 2)).astype(int)

    inside: dict[int, Rectangle] = {}  # places of labels in the image, by row
    below: dict[int, Rectangle] = {}  # and below it, from left to right, line by line
    x = 0  # of the next label below the image
    y = height + _PAD
    bottom = height
    for row, label in enumerate(sized_labels):
        if not label.text:
            continue
        taken = np.array([*inside.values()]).reshape(-1, 4)
        rectangle = _find_free_rectangle(label, boxes[row], taken, width, height)
        if rectangle is not None:
            inside[row] = rectangle
            continue
        if x > 0 and x + label.width > width:
            x = 0
            y = bottom + _PAD
        below[row] = (x, y, x + label.width, y + label.height)
        x += label.width + _PAD
        bottom = max(bottom, y + label.height)

    picture = Image.new("RGB", (width, bottom), _MARGIN)
    picture.paste(content, (0, 0))
    draw = ImageDraw.Draw(picture)
    for row in reversed(range(len(boxes))):
        _draw_box(draw, boxes[row].tolist(), colours[row], line, dashed[row])
    for row, rectangle in inside.items():  # after all boxes, so that no line crosses a label
        _draw_link(draw, rectangle, boxes[row].tolist(), colours[row], line)
    for row, (x1, y1, x2, y2) in (inside | below).items():
        draw.rectangle((x1, y1, x2 - 1, y2 - 1), fill=colours[row])
        is_dark = np.dot(colours[row], _LUMINANCE) < 150
        ink = _WHITE if is_dark else _BLACK
        draw.text((x1 + _PAD, y1 + _PAD // 2), sized_labels[row].text, fill=ink, font=_font(size), spacing=0)
    if not title:
        return np.array(picture)
    header = _make_label(title, width, title_size)
    titled = Image.new("RGB", (width, header.height + _PAD + bottom), _WHITE)
    ImageDraw.Draw(titled).text((_PAD, _PAD), header.text, fill=_BLACK, font=_font(title_size), spacing=0)
    titled.paste(picture, (0, header.height + _PAD))
    return np.array(titled)


def tint(image: np.ndarray, mask: np.ndarray, colour: Colour) -> np.ndarray:
    """Return a copy of an image, uint8 [h, w, 3], in which the pixels of a mask are tinted.

    The mask, bool [h', w'], is stretched over the image.
    """
    height, width = image.shape[:2]
    mask = cv2.resize(mask.view(np.uint8), (width, height), interpolation=cv2.INTER_NEAREST_EXACT).astype(bool)
    tinted = image.copy()
    tinted[mask] = np.round((1 - _TINT) * image[mask] + _TINT * np.array(colour)).astype(np.uint8)
    return tinted


def _size_labels(texts: Sequence[str], width: int, height: int, size: int) -> tuple[int, list[_Label]]:
    """Return the font size, at most `size`, in which labels leave enough of the picture visible, and the labels."""
    labels = [_make_label(text, width, size) for text in texts]
    while size > _MIN_FONT_SIZE:
        covered = sum(label.width * label.height for label in labels if label.text)
        if covered <= _LABEL_SHARE * width * height:
            break
        size -= 1
        labels = [_make_label(text, width, size) for text in texts]
    return size, labels


def choose_box_colours(answers: int, phrases: int) -> list[Colour]:
    """Choose colours of `PALETTE` for the boxes of an answer, then for those of its phrases.

    The first colour is reserved for answers.
    """
    answer_colours = [PALETTE[row % len(PALETTE)] for row in range(answers)]
    others = PALETTE[1:]
    first = max(answers - 1, 0)  # the one after those of the answers
    phrase_colours = [others[(first + row) % len(others)] for row in range(phrases)]
    return answer_colours + phrase_colours


def draw_side_by_side(images: Sequence[np.ndarray]) -> np.ndarray:
    """Join uint8 images [h, w, 3], each resized as in `draw_boxes` and then to the smallest height, with a margin."""
    contents = [_resize(image) for image in images]
    height = min(content.height for content in contents)
    gap = np.full((height, _GAP, 3), _MARGIN, dtype=np.uint8)
    columns = []
    for content in contents:
        if columns:
            columns.append(gap)
        width = max(round(content.width * height / content.height), 1)
        columns.append(np.asarray(content.resize((width, height), Image.Resampling.BILINEAR)))
    return np.concatenate(columns, axis=1)


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
    if len(values) and values.max() > 0:
        values = values / float(values.max())
    for box, value in zip(boxes, values, strict=True):
        x1, y1 = np.floor(box[:2]).clip(0, (width, height)).astype(int)
        x2, y2 = np.ceil(box[2:]).clip(0, (width, height)).astype(int)
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
    size = (max(round(width * factor), 1), max(round(height * factor), 1))
    # enlarged pixels remain visible squares: the picture shows what the network saw
    method = Image.Resampling.NEAREST if factor > 1 else Image.Resampling.BILINEAR
    return Image.fromarray(image).resize(size, method)


@functools.cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    """Return the font of labels and titles."""
    import matplotlib  # slow to import, and not every command draws

    # PIL's default font has no accents, Greek or Cyrillic
    return ImageFont.truetype(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf", size)


def _make_label(text: str, width: int, size: int) -> _Label:
    """Wrap the lines of a text to the width of the picture; longer words are broken."""
    font = _font(size)
    max_length = width - 2 * _PAD  # pixels
    characters = max(min(len(text), int(max_length / font.getlength("i"))), 1)
    while True:
        lines = []
        for paragraph in text.splitlines():
            lines += textwrap.wrap(paragraph, characters)
        longest = max(map(font.getlength, lines), default=0)
        if longest <= max_length or characters == 1:
            break
        characters = max(min(characters - 1, int(characters * max_length / longest)), 1)
    line_height = sum(font.getmetrics())
    return _Label("\n".join(lines), math.ceil(longest) + 2 * _PAD, len(lines) * line_height + 2 * (_PAD // 2))


def _find_free_rectangle(
    label: _Label, box: np.ndarray, taken: np.ndarray, width: int, height: int
) -> Rectangle | None:
    """Find the free rectangle nearest to the one just above the upper left corner of the box; None: there is none.

    Args:
        taken: [n, 4], xyxy, of the labels that have a place.
        width, height: of the image.
    """
    if label.height > height:
        return None
    preferred = np.array([box[0], box[1] - label.height])
    step = label.height  # of the grid of candidates around it
    steps_x = step * np.arange(-(width // step) - 2, width // step + 3)
    steps_y = step * np.arange(-(height // step) - 2, height // step + 3)
    xs = np.unique((preferred[0] + steps_x).clip(0, width - label.width))
    ys = np.unique((preferred[1] + steps_y).clip(0, height - label.height))
    corners = np.stack(np.meshgrid(xs, ys), axis=-1).reshape(-1, 2)
    ends = corners + np.array([label.width, label.height])
    overlaps = (corners[:, None] < taken[:, 2:]) & (ends[:, None] > taken[:, :2])
    free = corners[~overlaps.all(axis=2).any(axis=1)]
    if not len(free):
        return None
    x, y = free[np.abs(free - preferred).sum(axis=1).argmin()].tolist()
    return x, y, x + label.width, y + label.height


def _draw_link(draw: ImageDraw.ImageDraw, label: Rectangle, box: list[int], colour: Colour, line: int) -> None:
    """Draw a line from a label to its box unless they touch."""
    # the point of the box that is nearest to the label's middle, and the point of the label that is nearest to that
    on_label = []
    on_box = []
    for axis in (0, 1):  # x, then y
        middle = (label[axis] + label[axis + 2]) // 2
        nearest = min(max(middle, box[axis]), box[axis + 2])
        on_box.append(nearest)
        on_label.append(min(max(nearest, label[axis]), label[axis + 2]))
    if math.dist(on_label, on_box) > 2 * line:
        draw.line((*on_label, *on_box), fill=_WHITE, width=line + 2)
        draw.line((*on_label, *on_box), fill=colour, width=line)


def _draw_box(draw: ImageDraw.ImageDraw, box: list[int], colour: Colour, line: int, is_dashed: bool) -> None:
    """Draw an outline inside the box, with a thin white edge for contrast."""
    x1, y1, x2, y2 = box
    # PIL counts the last pixel in
    x2 = max(x2 - 1, x1)
    y2 = max(y2 - 1, y1)
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
