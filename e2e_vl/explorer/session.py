"""The state of one user's session: a photo, a text, masked regions, and the selected attention. Independent of gradio.

Shape legend: see `e2e_vl/structures.py`; also
    items  queries and keys of the attention: words, whole images, an end token, then the R regions
    steps  layers of the encoder's attention graphs, graph by graph (`Encoder.attention_graphs`)
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from torch import Tensor

from detector.errors import UserError
from detector.images import ResizeRule, load_resized, mask_rectangles, normalise_images
from e2e_vl.api.model import GREY, Answer, TrainedModel, box_marks
from e2e_vl.drawing import BLUE, RED, Colour, draw_boxes, draw_heat_map
from e2e_vl.predictions import Box
from e2e_vl.samples import ImageBytes, Question
from e2e_vl.structures import AttentionBlock, Batch, ModelOutput

logger = logging.getLogger(__name__)
# about the size on the page, so that labels are not scaled down; at least the minimum size of `e2e_vl.drawing`
DISPLAY_SIZE = ResizeRule(600, 640)
MAX_EXAMPLES = 12
MAX_TEXT_LENGTH = 500  # characters
REPOOLED_NOTE = (
    "The detector of this run pools features from its proposals before it refines them (FEATURES_OF: proposal). The "
    "explorer pools them from the refined boxes, with and without masked regions, so that the two answers can be "
    "compared; answers may differ from `ask` and evaluation."
)
WHOLE_IMAGE, END = "[whole image]", "[END]"  # items that are neither words nor regions


@dataclasses.dataclass(frozen=True, eq=False)
class Photo:
    """A user's photo."""

    file: ImageBytes
    size: tuple[int, int]  # (height, width) of the upright photo
    pixels: np.ndarray  # uint8 [height, width, 3] RGB, at display size

    @property
    def scale(self) -> np.ndarray:
        """Scale (x, y) from the original size to the display size."""
        return np.array([self.pixels.shape[1] / self.size[1], self.pixels.shape[0] / self.size[0]])


def read_photo(path: Path) -> Photo:
    """Read an image file; the format is detected from its content."""
    content = path.read_bytes()
    pixels, size = load_resized(content, DISPLAY_SIZE, "RGB", path.name)
    return Photo(ImageBytes(content, path.name), size, pixels)


@dataclasses.dataclass(frozen=True, eq=False)
class Inspection:
    """The answer to one text about one photo, with the attention maps."""

    answer: Answer  # its boxes are in pixels of the original photo
    words: tuple[str, ...]  # the items before the regions
    names: tuple[str, ...]  # R predicted classes; "" if unknown
    attention: np.ndarray  # float32 [steps, heads, items, items] (query, key)
    step_names: tuple[str, ...]  # name of each step, with the items that it connects
    boxes: Tensor  # float32 [R, 4] in pixels of the network's input

    def __len__(self) -> int:
        """The number of regions."""
        return len(self.names)

    @property
    def best_step(self) -> int:
        """The last step in which words attend to regions; the last one if there is none."""
        count = len(self.words)
        reads = [step for step, maps in enumerate(self.attention) if maps[:, :count, count:].any()]
        return reads[-1] if reads else len(self.attention) - 1

    def item_name(self, item: int) -> str:
        count = len(self.words)
        return f"{item + 1}: {self.words[item]}" if item < count else self.region_name(item - count)

    def region_name(self, row: int) -> str:
        return f"region {row} {self.names[row]}".strip()

    def region_at(self, x: float, y: float) -> int | None:
        """Index of the smallest region that contains a point of the original photo; None: there is none."""
        x1, y1, x2, y2 = self.answer.boxes.T
        areas = np.where((x1 <= x) & (x < x2) & (y1 <= y) & (y < y2), (x2 - x1) * (y2 - y1), np.inf)
        return int(areas.argmin()) if len(areas) and np.isfinite(areas.min()) else None

    def answer_boxes(self) -> list[tuple[str, Box]]:
        """Labels and boxes of the answer, in pixels of the original photo."""
        found = []
        for label, box in self.answer.answer_boxes:
            rows = np.flatnonzero(np.isclose(self.answer.boxes, box, atol=1e-3).all(axis=1))
            name = self.names[rows[0]] if len(rows) else ""  # labels of answers about given regions have no name
            label = label if label.startswith(name) else f"{name} {label}".strip()
            found.append((label or "answer", box.tolist()))
        return found


@dataclasses.dataclass(frozen=True, eq=False)
class Session:
    """The state of the page for one user."""

    photo: Photo | None = None
    before: Inspection | None = None  # with all pixels; None: no text yet
    after: Inspection | None = None  # with masked regions; None: none is masked
    masked: tuple[int, ...] = ()  # indices of masked regions
    item: int | None = None  # the item whose attention is shown; None: none
    step: int = 0
    head: int | None = None  # None: the mean over the heads

    @property
    def shown(self) -> Inspection | None:
        """The inspection whose attention is shown: `after` if regions are masked, else `before`."""
        return self.after or self.before

    @property
    def attention(self) -> np.ndarray | None:
        """float32 [items], attention from the selected item to each item; None: none is selected."""
        if self.shown is None or self.item is None:
            return None
        maps = self.shown.attention[self.step]
        return maps.mean(axis=0)[self.item] if self.head is None else maps[self.head, self.item]

    @property
    def region_attention(self) -> np.ndarray | None:
        """float32 [R], the part of `attention` on the regions."""
        return None if self.attention is None else self.attention[len(self.shown.words) :]


def find_examples(model: TrainedModel) -> list[tuple[Path, str]]:
    """The scenes that come along with a model, or the first photos that a run was evaluated on and that still exist.

    Each has its longest text. The last word of a text for a pre-trained model is masked.
    """
    texts = {str(scene.image): max(scene.texts, key=len) for scene in model.examples}
    for file in sorted(model.source.glob("predictions_*.json"))[:1]:
        with file.open("rb") as lines:  # a prediction a line, see `write_list`; the file may be large
            for line in lines:
                if line.startswith(b"{"):
                    record = msgspec.json.decode(line.rstrip(b",\n"))
                    name = record.get("file_name", "")
                    if name not in texts and len(texts) == MAX_EXAMPLES:
                        break
                    texts[name] = max(texts.get(name, ""), record.get("text", ""), key=len)
    if model.tokenizer.mask_token in model.network.task.example_call:
        texts = {name: re.sub(r"\w+(\W*)$", rf"{model.tokenizer.mask_token}\1", text) for name, text in texts.items()}
    files = [(Path(name), text) for name, text in texts.items() if text and Path(name).is_file()]
    problems = {file: find_photo_problem(file) for file, _ in files}
    refused = [problem for problem in problems.values() if problem]
    if refused:  # the page serves these files, and the run may be a stranger's
        more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
        logger.warning("%s: an example is left out, because it is not an image: %s%s", model.source, refused[0], more)
    return [(file, text) for file, text in files if not problems[file]]


def find_photo_problem(path: Path) -> str:
    """Why a file cannot be read as an image; "" if it can."""
    try:
        read_photo(path)
    except (ValueError, OSError) as error:
        return str(error)
    return ""


class Explorer:
    """Answers the questions of all users with one model."""

    def __init__(self, model: TrainedModel):
        # pre-training needs a text with a masked word; for other tasks it is a word like any other
        question = Question(ImageBytes(b"", "(a photo)"), f"a {model.tokenizer.mask_token}")
        model.check_question(question)
        self.model = model
        self.examples = find_examples(model)
        self.warning = model.boxes_warning  # "": none
        heads = getattr(model.network.detector.config, "roi_heads", None)
        self._repools = heads is not None and heads.features_of == "proposal"
        self.note = REPOOLED_NOTE if self._repools else ""  # how answers may differ from `ask`

    def ask(self, session: Session, text: str) -> Session:
        """The session after asking a text about its photo; no region is masked."""
        if session.photo is None:
            raise UserError("There is no photo yet; upload an image first.")
        if len(text or "") > MAX_TEXT_LENGTH:  # the page's own limit does not bind a program
            raise UserError(f"The text has {len(text):,} characters; write at most {MAX_TEXT_LENGTH}.")
        found = self.inspect(session.photo, text)
        if self._repools:
            found = self.inspect(session.photo, text, found)
        return Session(session.photo, found, step=found.best_step)

    def mask(self, session: Session, rows: Iterable[int]) -> Session:
        """The session after asking its text again with the pixels of some regions set to the mean colour.

        The boxes stay the same; only their features are computed again.
        """
        before, masked = session.before, tuple(sorted(set(rows)))
        after = self.inspect(session.photo, before.answer.question, before, masked) if masked else None
        return dataclasses.replace(session, masked=masked, after=after)

    def toggle(self, session: Session, row: int) -> Session:
        """Mask a region, or show it again."""
        return self.mask(session, set(session.masked) ^ {row})

    def inspect(
        self, photo: Photo, text: str, before: Inspection | None = None, masked: Sequence[int] = ()
    ) -> Inspection:
        """Answer a text, with the regions of `before` if given and the pixels of some of them `masked`."""

        def with_regions(batch: Batch) -> Batch:
            # mask the same pixels as pre-training does; a teacher sees the masked image too
            images = batch.images
            rectangles = mask_rectangles(before.boxes[list(masked)], images.sizes[0].tolist(), "truncate")
            settings = self.model.network.detector.config.input
            images = normalise_images(images, settings, [rectangles.to(before.boxes.dtype)])
            return dataclasses.replace(batch, images=images, boxes=[before.boxes.to(images.pixels.device)])

        answer, output = self.model.ask_with_output(
            Question(photo.file, text), None if before is None else with_regions
        )
        return self._inspection(answer, output, tuple(answer.box_names) if before is None else before.names)

    def _inspection(self, answer: Answer, output: ModelOutput, names: tuple[str, ...]) -> Inspection:
        """The inspection of a batch with one photo and one text."""
        texts, regions = output.batch.texts, output.text_regions
        length, width = texts.input_ids.shape[1], regions.row.shape[1]
        pieces = texts.attention_mask[0].nonzero()[:, 0].tolist()
        whole = regions.is_whole_image[0].nonzero()[:, 0].tolist()
        rows = (regions.row[0] >= 0).nonzero()[:, 0].tolist()
        ends = range(length + width, output.encoded.attentions[0].shape[-1])
        slots = [*pieces, *(length + row for row in whole), *ends, *(length + row for row in rows)]
        tokens = self.model.tokenizer.convert_ids_to_tokens(texts.input_ids[0, pieces].tolist())
        starts = [slot for slot, token in enumerate(tokens) if not token.startswith("##")]
        words = " ".join(tokens).replace(" ##", "").split(" ")
        words = (*words, *[WHOLE_IMAGE] * len(whole), *[END] * len(ends))
        starts += range(len(tokens), len(slots))
        maps = [one[0][:, slots][:, :, slots].float().cpu().numpy() for one in output.encoded.attentions]
        # of a whole word: the mean over its pieces as queries, the sum as keys (Clark et al., What Does BERT Look At?)
        counts = np.diff([*starts, len(slots)])[:, None]
        maps = [np.add.reduceat(np.add.reduceat(one, starts, axis=1) / counts, starts, axis=2) for one in maps]
        # graphs may share a map; each shows only its blocks
        places = {"words": slice(0, len(words)), "regions": slice(len(words), None)}
        step_names, attention = [], []
        for graph, layers in self.model.network.encoder.attention_graphs.items():
            visible = np.zeros((len(starts), len(starts)), dtype=bool)
            for block in layers.blocks:
                source, _, target = block.partition(" to ")
                visible[places[source], places[target]] = True
            blocks = ", ".join(block for block in AttentionBlock if block in layers.blocks)
            name, ends = ("layer", "words and regions") if visible.all() else (f"{graph} layer", blocks)
            count = len(layers.steps)
            step_names += [f"{name} {layer} of {count}: {ends}" for layer in range(1, count + 1)]
            attention += [np.where(visible, maps[step], 0) for step in layers.steps]
        boxes = regions.boxes[0, rows]
        return Inspection(answer, words, names, np.stack(attention), tuple(step_names), boxes)


# Pictures: clickable regions with attention, and the boxes of an answer.


MAX_LABELLED_REGIONS = 5  # regions labelled with their attention

_OUTLINE: Colour = (90, 90, 90)  # of regions that are neither selected nor masked


def draw_regions(session: Session) -> np.ndarray | None:
    """Picture, uint8 RGB [height, width, 3], of all regions with their indices or attention; None: no photo."""
    photo, shown = session.photo, session.shown
    if photo is None:
        return None
    if shown is None:
        return draw_boxes(photo.pixels, [])
    shares = session.region_attention
    pixels, boxes = _covered(photo, shown, session.masked), _on_picture(photo, shown.answer.boxes)
    labels, colours = [str(row) for row in range(len(shown))], [_OUTLINE] * len(shown)
    order = list(range(len(shown)))
    if shares is not None:
        pixels = draw_heat_map(pixels, boxes, shares)
        order.sort(key=lambda row: -shares[row])
        named = [row for row in order[:MAX_LABELLED_REGIONS] if shares[row] > 0]
        labels = [f"{row}: {shares[row]:.2f}" if row in named else "" for row in range(len(shown))]
    for row in session.masked:
        labels[row], colours[row] = f"{row} masked", RED
    chosen = -1 if session.item is None else session.item - len(shown.words)
    if chosen >= 0:
        labels[chosen], colours[chosen] = f"{chosen}: {shares[chosen]:.2f} chosen", BLUE
    order.sort(key=lambda row: colours[row] is _OUTLINE)  # `draw_boxes` places the labels of the first boxes first
    return draw_boxes(pixels, boxes[order], [labels[row] for row in order], [colours[row] for row in order])


def draw_answer(session: Session, found: Inspection | None, masked: tuple[int, ...] = ()) -> np.ndarray | None:
    """Draw the boxes of an answer (or else the regions with the most attention) and its phrases.

    Returns uint8 RGB [height, width, 3]; None: no photo or answer.
    """
    if found is None or session.photo is None:
        return None
    answer_boxes, phrases = found.answer_boxes(), found.answer.shown_phrases()
    shown = answer_boxes or found.answer.attended_regions()
    boxes = [*(box for _, box in shown), *(phrase.box for phrase in phrases)]
    is_unsure = bool(answer_boxes) and found.answer.is_unsure
    marks = box_marks([label for label, _ in shown], phrases, is_unsure)
    return draw_boxes(_covered(session.photo, found, masked), _on_picture(session.photo, boxes), **marks)


def _on_picture(photo: Photo, boxes: Any) -> np.ndarray:
    return np.asarray(boxes, dtype=np.float64).reshape(-1, 4) * np.tile(photo.scale, 2)


def _covered(photo: Photo, found: Inspection, masked: tuple[int, ...]) -> np.ndarray:
    """A copy of the photo with some regions in grey."""
    pixels = photo.pixels.copy()
    for x1, y1, x2, y2 in _on_picture(photo, found.answer.boxes[list(masked)]).astype(int).clip(min=0):
        pixels[y1 : y2 + 1, x1 : x2 + 1] = GREY
    return pixels
