"""What one visitor does: a photo, a text, regions to hide, and whose attention to see. Knows nothing of pages.

Shape legend: see `e2e_vl/structures.py`; besides
    items  what attends and is attended to: wordpieces, whole images, an end, then the R regions
    steps  layers of the encoder's graphs of attention, graph by graph (`Encoder.attention_graphs`)
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor

from detector.errors import MissingFileError, UserError
from detector.images import ResizeRule, load_resized
from detector.pixel_masking import mask_pixels, mask_rectangles
from e2e_vl.api.model import TrainedModel
from e2e_vl.api.results import Answer, marks_of
from e2e_vl.drawing import BLUE, RED, Colour, draw_boxes
from e2e_vl.explorer.limits import Limits
from e2e_vl.io import shown
from e2e_vl.samples import ImageBytes, Question
from e2e_vl.structures import AttentionBlock, AttentionGraph, Batch, ModelOutput

# Photos that visitors give: which are accepted, and what is kept of them.


# About the room on the page, so that labels are not shrunk; not below the size to which `e2e_vl.drawing` enlarges.
SHOWN_SIZE = ResizeRule(600, 640)
FILE_ENDS = (".jpg", ".jpeg", ".png")
_SIGNATURES = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n")  # first bytes of JPEG and PNG files


@dataclasses.dataclass(frozen=True, eq=False)
class Photo:
    """A photo that was accepted."""

    file: ImageBytes
    size: tuple[int, int]  # (height, width) of the upright photo
    pixels: np.ndarray  # uint8 [height, width, 3] RGB, at the size at which it is shown

    @property
    def scale(self) -> np.ndarray:
        """Pixels of the photo as it is shown, per pixel of the original: of x and of y."""
        return np.array([self.pixels.shape[1] / self.size[1], self.pixels.shape[0] / self.size[0]])


def read_photo(path: Path, limits: Limits) -> Photo:
    """Accept a file; its format is read from its content, not from its name.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a file that is too large, no JPEG or PNG file, damaged, or of too many pixels.
    """
    name = path.name
    if not path.is_file():  # a pipe would be waited for without end
        raise MissingFileError(f"{name} is no file; drop the photo again.")
    size = path.stat().st_size
    if size > limits.bytes:
        raise UserError(
            f"{name} has {size / 1e6:.1f} MB; the limit is {limits.megabytes:g} MB, so make it smaller first."
        )
    content = path.read_bytes()
    if not content.startswith(_SIGNATURES):
        raise UserError(f"{name} is neither a JPEG nor a PNG file; convert it first.")
    with contextlib.suppress(OSError), Image.open(io.BytesIO(content), formats=("JPEG", "PNG")) as opened:
        if opened.width * opened.height > limits.pixels:
            raise UserError(
                f"{name} has {opened.width} x {opened.height} pixels; the limit is {limits.megapixels:g} megapixels, "
                "so make it smaller first."
            )
    pixels, original = load_resized(content, SHOWN_SIZE, "RGB", name)
    return Photo(ImageBytes(content, name), original, pixels)


LONGEST_TEXT = 500  # characters
DESCRIBED_AGAIN = (
    "The detector of this run describes its proposals before it refines them (FEATURES_OF: proposal). Here it "
    "describes the refined boxes, with and without hidden regions, so that the two answers can be compared; `ask` and "
    "an evaluation may answer otherwise."
)
WHOLE_IMAGE, END = "[whole image]", "[END]"  # items that are neither words nor regions


@dataclasses.dataclass(frozen=True, eq=False)
class Inspection:
    """What the model said to one text about one photo, and where it looked."""

    answer: Answer  # its boxes are in pixels of the original photo
    words: tuple[str, ...]  # the items before the regions
    names: tuple[str, ...]  # R classes that the detector found; "" where it is unknown
    attention: np.ndarray  # float32 [steps, heads, items, items]: of the first item to the second
    # GRAPH:LAYER of each step, counted from 0 as in an analysis, with what it connects where that is not everything
    step_names: tuple[str, ...]
    boxes: Tensor  # float32 [R, 4] in pixels of the network's input

    def __len__(self) -> int:
        """The number of regions."""
        return len(self.names)

    @property
    def num_heads(self) -> int:
        return self.attention.shape[1]

    @property
    def best_step(self) -> int:
        """The last map in which words attend to regions; the last one if none does."""
        count = len(self.words)
        reads = [step for step, maps in enumerate(self.attention) if maps[:, :count, count:].any()]
        return reads[-1] if reads else len(self.attention) - 1

    def attention_of(self, item: int, step: int, head: int | None) -> np.ndarray:
        """float32 [items], how much one item looks at each; `head` None: the mean over the heads."""
        maps = self.attention[step]
        return maps.mean(axis=0)[item] if head is None else maps[head, item]

    def item_name(self, item: int) -> str:
        count = len(self.words)
        if item < count:
            return f"{item + 1}: {self.words[item]}"
        return self.region_name(item - count)

    def region_name(self, row: int) -> str:
        return f"region {row} {self.names[row]}".strip()

    def region_at(self, x: float, y: float) -> int | None:
        """The smallest region around a point of the original photo."""
        x1, y1, x2, y2 = self.answer.boxes.T
        areas = np.where((x1 <= x) & (x < x2) & (y1 <= y) & (y < y2), (x2 - x1) * (y2 - y1), np.inf)
        return int(areas.argmin()) if len(areas) and np.isfinite(areas.min()) else None


@dataclasses.dataclass(frozen=True, eq=False)
class Session:
    """Everything that a page shows to one visitor."""

    photo: Photo | None = None
    before: Inspection | None = None  # with all pixels; None: no text was asked
    after: Inspection | None = None  # with hidden regions; None: nothing is hidden
    hidden: tuple[int, ...] = ()  # rows of the regions
    item: int | None = None  # whose attention is shown; None: nobody's
    step: int = 0
    head: int | None = None  # None: the mean over the heads

    @property
    def shown(self) -> Inspection | None:
        """Whose attention is shown: with hidden regions where some are hidden."""
        return self.after or self.before

    @property
    def attention(self) -> np.ndarray | None:
        """float32 [items], how much the chosen item looks at each; None: no item is chosen."""
        return (
            None
            if self.shown is None or self.item is None
            else self.shown.attention_of(self.item, self.step, self.head)
        )

    def attending(self, item: int | None) -> Session:
        """The session with another item whose attention is shown.

        Raises:
            ValueError: no such item.
        """
        shown = self._require_answer()
        if item is not None and not _is_row(item, len(shown.words) + len(shown)):
            raise UserError(f"There is no item {item}; choose a word or a region.")
        return dataclasses.replace(self, item=item)

    def with_map(self, step: int, head: int | None) -> Session:
        """The session with another attention map.

        Raises:
            ValueError: no such map.
        """
        shown = self._require_answer()
        if not _is_row(step, len(shown.attention)) or not (head is None or _is_row(head, shown.num_heads)):
            raise UserError("There is no such attention map; choose a layer and a head of the list.")
        return dataclasses.replace(self, step=step, head=head)

    def _require_answer(self) -> Inspection:
        if self.shown is None:
            raise UserError("Nothing was asked yet; give a photo, write a phrase or a question, and ask.")
        return self.shown


class Explorer:
    """A model that is loaded once and answers all visitors.

    Raises:
        ValueError: the model does not answer a text about one image without further facts, or has no attention to show.

    Attributes:
        warning: one sentence if boxes that mean nothing stand behind every answer; else empty.
        note: sentences on what the answers are that the page must say; else empty.
    """

    def __init__(self, model: TrainedModel):
        # pre-training answers only texts with a masked word, and other tasks read it as any word
        question = Question(ImageBytes(b"", "(a photo)"), f"a {model.tokenizer.mask_token}")
        model.check_question(question)
        if not model.network.encoder.attention_graphs:
            raise UserError(
                f"The encoder '{model.settings.encoder.name}' has no attention to show; give a run with another one."
            )
        self.model = model
        self.warning = model.warning_of_boxes([question])
        heads = getattr(model.network.detector.config, "roi_heads", None)
        self._describes_again = heads is not None and heads.features_of == "proposal"
        self.note = DESCRIBED_AGAIN if self._describes_again else ""

    def ask(self, session: Session, text: str) -> Session:
        """The session with the answer to a text about its photo; nothing is hidden.

        Raises:
            ValueError: no photo, or a text that is empty or too long, or as `TrainedModel.ask`.
        """
        if session.photo is None:
            raise UserError("There is no photo yet; drop a JPEG or PNG file first.")
        if not isinstance(text, str):
            raise UserError("There is no text; write a phrase or a question.")
        if len(text) > LONGEST_TEXT:
            raise UserError(f"The text has {len(text)} characters; write at most {LONGEST_TEXT}.")
        look = self._look(session.photo, text)
        if self._describes_again:
            look = self._look(session.photo, text, look)
        return Session(session.photo, look, step=look.best_step)

    def hide(self, session: Session, rows: Iterable[int]) -> Session:
        """The session with the answer to the same text when the pixels of some regions have the mean colour.

        The regions stay the same: the detector describes them, but does not look for others. All else is as it was
        without hidden regions.

        Raises:
            ValueError: nothing was asked yet, or there is no such region.
        """
        before = session.before
        if before is None:
            raise UserError("Nothing was asked yet; there are no regions to hide.")
        rows = list(rows)
        unknown = [row for row in rows if not _is_row(row, len(before))]
        if unknown:
            raise UserError(f"There is no region {shown(unknown[0])}; this photo has {len(before)}.")
        hidden = tuple(sorted(set(rows)))
        after = self._look(session.photo, before.answer.text, before, hidden) if hidden else None
        return dataclasses.replace(session, hidden=hidden, after=after)

    def toggle(self, session: Session, row: int) -> Session:
        """Hide a region, or show it again."""
        shown_again = [one for one in session.hidden if one != row]
        return self.hide(session, shown_again if len(shown_again) < len(session.hidden) else [*session.hidden, row])

    def _look(
        self, photo: Photo, text: str, before: Inspection | None = None, hidden: Sequence[int] = ()
    ) -> Inspection:
        change = None if before is None else _hiding(before.boxes, hidden)
        answer, output = self.model.look(Question(photo.file, text), change)
        names = tuple(answer.box_names) if before is None else before.names
        return _look_of(answer, output, self.model, names)


def _is_row(value: object, count: int) -> bool:
    """Whether a value, which may come from a browser, is the number of a row."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and 0 <= value < count


def _hiding(boxes: Tensor, hidden: Sequence[int]) -> Callable[[Batch], Batch]:
    """Makes a batch of one photo in which the regions are given and the pixels of some have the mean colour.

    The pixels are those that pre-training hides; they are changed before any detector, so a teacher does not see them.
    """

    def change(batch: Batch) -> Batch:
        images = batch.images
        rectangles = mask_rectangles(boxes[list(hidden)], images.sizes[0].tolist(), "truncate").to(boxes.dtype)
        pixels = mask_pixels(images.pixels, images.sizes, [rectangles])
        return dataclasses.replace(batch, images=dataclasses.replace(images, pixels=pixels), boxes=[boxes])

    return change


def _look_of(answer: Answer, output: ModelOutput, model: TrainedModel, names: tuple[str, ...]) -> Inspection:
    """What is shown of a batch of one photo and one text."""
    texts, regions = output.batch.texts, output.text_regions
    length, width = texts.input_ids.shape[1], regions.row.shape[1]
    pieces = texts.attention_mask[0].nonzero()[:, 0].tolist()
    is_region = (regions.row[0] >= 0).tolist()
    whole = [row for row, is_whole in enumerate(regions.is_whole_image[0].tolist()) if is_whole]
    rows = [row for row, is_one in enumerate(is_region) if is_one]
    ends = range(length + width, output.encoded.attentions[0].shape[-1])
    slots = [*pieces, *(length + row for row in whole), *ends, *(length + row for row in rows)]
    words = model.tokenizer.convert_ids_to_tokens(texts.input_ids[0, pieces].tolist())
    maps = [one[0][:, slots][:, :, slots].float().cpu().numpy() for one in output.encoded.attentions]
    words = (*words, *[WHOLE_IMAGE] * len(whole), *[END] * len(ends))
    step_names, attention = _maps_of(model.network.encoder.attention_graphs, maps, len(words))
    return Inspection(
        answer=answer,
        words=words,
        names=names,
        attention=attention,
        step_names=step_names,
        boxes=regions.boxes[0, rows],
    )


def _maps_of(
    graphs: Mapping[str, AttentionGraph], steps: Sequence[np.ndarray], words: int
) -> tuple[tuple[str, ...], np.ndarray]:
    """Name and map of each layer of each graph, in their order; where graphs share a map, each has its own part of it.

    Args:
        steps: maps [heads, items, items] of the encoder, one after the other.
        words: number of items before the regions.
    """
    parts = (slice(0, words), slice(words, None))
    places = {
        AttentionBlock.WORDS_TO_WORDS: (parts[0], parts[0]),
        AttentionBlock.WORDS_TO_REGIONS: (parts[0], parts[1]),
        AttentionBlock.REGIONS_TO_WORDS: (parts[1], parts[0]),
        AttentionBlock.REGIONS_TO_REGIONS: (parts[1], parts[1]),
    }
    names, maps = [], []
    for graph, stated in graphs.items():
        left_out = [block for block in places if block not in stated.blocks]
        said = f" ({', '.join(block for block in places if block in stated.blocks)})" if left_out else ""
        for layer, step in enumerate(stated.steps):
            own = steps[step].copy()
            for block in left_out:
                own[:, *places[block]] = 0
            names.append(f"{graph}:{layer}{said}")
            maps.append(own)
    return tuple(names), np.stack(maps)


# Pictures of a session: the regions to click with the attention on them, and what an answer points at.


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
