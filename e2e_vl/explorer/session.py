"""The state of one user's session: an image, phrases, masked regions, and the selected attention. Without gradio.

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
import torch
import torchvision
from torch import Tensor

from detector.errors import UserError
from detector.images import ResizeRule, load_resized, mask_rectangles, normalise_images
from detector.io import json_text
from e2e_vl.api.model import GREY, Answer, TrainedModel
from e2e_vl.data.user_inputs import BoxesOfImages, boxes_of_image, read_boxes_file
from e2e_vl.drawing import BLUE, PALETTE, RED, Colour, choose_box_colours, draw_boxes, draw_heat_map, tint
from e2e_vl.predictions import Box, GroundedPhrase
from e2e_vl.samples import AnnotatedObjects, ImageBytes, Question
from e2e_vl.structures import AttentionBlock, Batch, ModelOutput

logger = logging.getLogger(__name__)
# about the size on the page, so that labels are not scaled down; at least the minimum size of `e2e_vl.drawing`
DISPLAY_SIZE = ResizeRule(600, 640)
MAX_EXAMPLES = 12
MAX_TEXT_LENGTH = 500  # characters
MAX_PHRASES = 8  # in one text
MIN_SCORE = 0.2  # detection score from which regions are shown at first
MAX_OVERLAP = 0.7  # IoU with a better region from which a region is hidden at first
REPOOLED_NOTE = (
    "The detector of this run pools features from its proposals before it refines them (FEATURES_OF: proposal). The "
    "explorer pools them from the refined boxes, with and without masked regions, so that the two answers can be "
    "compared; answers may differ from `ask` and evaluation."
)
# items that are neither words nor regions
WHOLE_IMAGE = "[whole image]"
END = "[END]"


@dataclasses.dataclass(frozen=True, eq=False)
class UserImage:
    """A user's image."""

    file: ImageBytes
    size: tuple[int, int]  # (height, width) of the upright image
    pixels: np.ndarray  # uint8 [height, width, 3] RGB, at display size

    @property
    def scale(self) -> np.ndarray:
        """The scale (x, y) from the original size to the display size."""
        height, width = self.size
        display_height, display_width = self.pixels.shape[:2]
        return np.array([display_width / width, display_height / height])


@dataclasses.dataclass(frozen=True, eq=False)
class UserBoxes:
    """A user's file of candidate boxes, of one image or of many."""

    content: AnnotatedObjects | BoxesOfImages
    file: Path

    def of(self, image: UserImage) -> AnnotatedObjects:
        """Return the boxes of an image; messages name the file without the folder that it was uploaded to."""
        try:
            boxes = boxes_of_image(self.content, image.file)
        except UserError as error:
            raise _without_folder(error, self.file) from error
        return dataclasses.replace(boxes, origin=self.file.name)


def _without_folder(error: UserError, file: Path) -> UserError:
    """Return an error whose message names a file without its folder."""
    return UserError(str(error).replace(str(file), file.name))


def read_boxes(path: Path) -> UserBoxes:
    """Read a file of boxes, such as `e2e-vl ask` takes as --boxes."""
    try:
        return UserBoxes(read_boxes_file(path), path)
    except UserError as error:
        raise _without_folder(error, path) from error


def read_image(path: Path) -> UserImage:
    """Read an image file; the format is detected from its content."""
    content = path.read_bytes()
    pixels, size = load_resized(content, DISPLAY_SIZE, "RGB", path.name)
    return UserImage(ImageBytes(content, path.name), size, pixels)


def percent(score: float) -> str:
    """Return a score as a whole percentage; only 0 and 1 are called 0 % and 100 %."""
    if 0 < score < 0.005:
        return "under 1 %"
    if 0.995 <= score < 1:
        return "over 99 %"
    return f"{100 * score:.0f} %"


@dataclasses.dataclass(frozen=True, eq=False)
class Inspection:
    """The answer to one text about one image, with the attention maps."""

    answer: Answer  # its boxes are in pixels of the original image
    words: tuple[str, ...]  # the items before the regions
    names: tuple[str, ...]  # R predicted classes; "" if unknown
    attention: np.ndarray  # float32 [steps, heads, items, items] (query, key)
    step_names: tuple[str, ...]  # name of each step, with the items that it connects
    boxes: Tensor  # float32 [R, 4] in pixels of the network's input
    scores: np.ndarray | None  # float32 [R], detection scores; None: unknown
    markers: frozenset[int]  # the items [CLS], [SEP] and [END]

    def __len__(self) -> int:
        """Return the number of regions."""
        return len(self.names)

    @property
    def best_step(self) -> int:
        """The last step in which words attend to regions; the last one if there is none."""
        count = len(self.words)
        steps = [step for step, maps in enumerate(self.attention) if maps[:, :count, count:].any()]
        return steps[-1] if steps else len(self.attention) - 1

    def item_name(self, item: int) -> str:
        """Return the name of an item: a word with its number, a marker, or a region."""
        if item >= len(self.words):
            return self.region_name(item - len(self.words))
        if item in self.markers:
            return self.words[item]
        number = item + 1 - sum(marker < item for marker in self.markers)
        return f"{number}: {self.words[item]}"

    def region_name(self, row: int) -> str:
        """Return the index of a region with its class."""
        return f"region {row} {self.names[row]}".strip()

    def is_best(self, min_score: float, max_overlap: float) -> np.ndarray:
        """Return whether each region scores at least `min_score` and overlaps no better one more, bool [R].

        Regions without scores are all best. Regions of the answer are always among them.

        Args:
            max_overlap: IoU; 1 hides no region.
        """
        if self.scores is None:
            return np.ones(len(self), dtype=bool)
        boxes = torch.from_numpy(self.answer.boxes)
        rows = torchvision.ops.nms(boxes, torch.from_numpy(self.scores), max_overlap).numpy()
        is_best = np.zeros(len(self), dtype=bool)
        is_best[rows] = self.scores[rows] >= min_score
        for _, box in self.answer.answer_boxes:
            is_best |= self._is_at(box)
        return is_best

    def _is_at(self, box: np.ndarray) -> np.ndarray:
        """Return whether each region has a box of the original image, after refinement if there is one, bool [R]."""
        boxes = self.answer.boxes if self.answer.refined_boxes is None else self.answer.refined_boxes
        return np.isclose(boxes, box, atol=1e-3).all(axis=1)

    def region_at(self, x: float, y: float, rows: Sequence[int]) -> int | None:
        """Return which of some regions is the smallest around a point of the original image; None: there is none."""
        around = []
        for row in rows:
            x1, y1, x2, y2 = self.answer.boxes[row].tolist()
            if x1 <= x < x2 and y1 <= y < y2:
                around.append(((x2 - x1) * (y2 - y1), row))
        return min(around)[1] if around else None

    @property
    def sentences(self) -> list[str]:
        """The answer with its score, such as "star, 77 %", further answers, and warnings."""
        answer = self.answer
        if answer.box is not None:
            sentences = [f"{self._name_at(answer.box) or 'a region'}, {percent(answer.score)}"]
        elif answer.top_answers:
            sentences = [f"{text}, {percent(score)}" for text, score in answer.top_answers]
        else:
            sentences = list(answer.lines)
        if answer.is_unsure and sentences:
            sentences[0] += ", unsure"
        return [*sentences, *answer.warnings]

    def _name_at(self, box: np.ndarray) -> str:
        """Return the class of the region with a box; "" if it is unknown."""
        rows = np.flatnonzero(self._is_at(box))
        return self.names[rows[0]] if len(rows) else ""

    def answer_boxes(self) -> list[tuple[str, Box]]:
        """Return labels and boxes of the answer, in pixels of the original image."""
        if self.answer.box is not None:
            return [(self.sentences[0], self.answer.box.tolist())]
        labelled_boxes = []
        for label, box in self.answer.answer_boxes:  # of given regions: without a name
            name = self._name_at(box)
            if not label.startswith(name):
                label = f"{name} {label}".strip()
            labelled_boxes.append((label or "answer", box.tolist()))
        return labelled_boxes


@dataclasses.dataclass(frozen=True, eq=False)
class Session:
    """The state of the page for one user."""

    image: UserImage | None = None
    boxes: UserBoxes | None = None  # the candidates; None: those that the detector predicts
    asked: tuple[Inspection, ...] = ()  # of each phrase, with all pixels; empty: no text yet
    phrase: int = 0  # index of the phrase whose regions, words and attention are shown
    after: Inspection | None = None  # of that phrase with masked regions; None: none is masked
    masked: tuple[int, ...] = ()  # indices of masked regions
    item: int | None = None  # the item whose attention is shown; None: none
    step: int = 0
    head: int | None = None  # None: the mean over the heads
    min_score: float = MIN_SCORE  # detection score of shown regions
    shows_overlapping: bool = False  # also regions that overlap a better one by more than `MAX_OVERLAP`
    shows_markers: bool = False  # also [CLS], [SEP] and [END]

    @property
    def before(self) -> Inspection | None:
        """The inspection of the phrase with all pixels; None: no text yet."""
        return self.asked[self.phrase] if self.asked else None

    @property
    def shown(self) -> Inspection | None:
        """The inspection whose attention is shown: `after` if regions are masked, else `before`."""
        return self.after or self.before

    @property
    def shown_words(self) -> list[int]:
        """The items in the row of words."""
        inspection = self.shown
        if inspection is None:
            return []
        return [item for item in range(len(inspection.words)) if self.shows_markers or item not in inspection.markers]

    @property
    def shown_regions(self) -> list[int]:
        """The regions in the picture: the best ones, those that are masked, and the one whose attention is shown."""
        if self.before is None:
            return []
        # those of `before`, because given regions have no scores
        is_shown = self.before.is_best(self.min_score, 1 if self.shows_overlapping else MAX_OVERLAP)
        is_shown[list(self.masked)] = True
        if self.item is not None and self.item >= len(self.before.words):
            is_shown[self.item - len(self.before.words)] = True
        return np.flatnonzero(is_shown).tolist()

    @property
    def answers(self) -> str:
        """What the page shows as JSON, as `Answer.save` writes it; a list if it is several answers.

        The last one is that with masked regions, with their indices as `masked`.
        """
        answers = [inspection.answer.to_dict() for inspection in self.asked]
        if self.after is not None:
            answers.append(self.after.answer.to_dict() | {"masked": list(self.masked)})
        if not answers:
            return ""
        return json_text(answers if len(answers) > 1 else answers[0], "the answer", indent=1)

    def with_image(self, image: UserImage | None) -> Session:
        """Return the session with another image, the same boxes and the same choices of what is shown."""
        return Session(
            image,
            self.boxes,
            min_score=self.min_score,
            shows_overlapping=self.shows_overlapping,
            shows_markers=self.shows_markers,
        )

    def with_boxes(self, boxes: UserBoxes | None) -> Session:
        """Return the session with other candidate boxes and the same image."""
        return dataclasses.replace(self.with_image(self.image), boxes=boxes)

    @property
    def attention(self) -> np.ndarray | None:
        """The attention from the selected item to each item, float32 [items]; None: none is selected."""
        if self.shown is None or self.item is None:
            return None
        maps = self.shown.attention[self.step]
        if self.head is None:
            return maps.mean(axis=0)[self.item]
        return maps[self.head, self.item]

    @property
    def region_attention(self) -> np.ndarray | None:
        """The part of `attention` on the regions, float32 [R]."""
        attention = self.attention
        return None if attention is None else attention[len(self.shown.words) :]


def find_examples(model: TrainedModel) -> list[tuple[Path, str]]:
    """Find the scenes that ship with a model, or the first images that a run was evaluated on and that exist.

    Each has its longest text. The last word of a text for a pre-trained model is masked.
    """
    texts = {str(scene.image): max(scene.texts, key=len) for scene in model.examples}  # by file name
    for file in sorted(model.source.glob("predictions_*.json"))[:1]:
        with file.open("rb") as lines:  # a prediction a line, see `write_list`; the file may be large
            for line in lines:
                if not line.startswith(b"{"):
                    continue
                record = msgspec.json.decode(line.rstrip(b",\n"))
                name = record.get("file_name", "")
                if name not in texts and len(texts) == MAX_EXAMPLES:
                    break
                texts[name] = max(texts.get(name, ""), record.get("text", ""), key=len)
    mask_token = model.tokenizer.mask_token
    masks_last_word = mask_token in model.network.task.example_call
    examples = []
    problems = []
    for name, text in texts.items():
        file = Path(name)
        if not text or not file.is_file():
            continue
        problem = find_image_problem(file)
        if problem:
            problems.append(problem)
            continue
        if masks_last_word:
            text = re.sub(r"\w+(\W*)$", rf"{mask_token}\1", text)
        examples.append((file, text))
    if problems:  # the page serves these files, and the run may be a stranger's
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        logger.warning("%s: an example is left out, because it is not an image: %s%s", model.source, problems[0], more)
    return examples


def find_image_problem(path: Path) -> str:
    """Return why a file cannot be read as an image; "" if it can."""
    try:
        read_image(path)
    except (ValueError, OSError) as error:
        return str(error)
    return ""


class Explorer:
    """One model that answers the questions of all users."""

    def __init__(self, model: TrainedModel):
        """Check that the model can answer, and find examples for the page."""
        # pre-training needs a text with a masked word; for other tasks it is a word like any other
        question = Question(ImageBytes(b"", "(an image)"), f"a {model.tokenizer.mask_token}")
        model.check_question(question)
        self.model = model
        self.examples = find_examples(model)
        self.warning = model.boxes_warning  # "": none
        heads = getattr(model.network.detector.config, "roi_heads", None)
        self._repools = heads is not None and heads.features_of == "proposal"
        self.note = REPOOLED_NOTE if self._repools else ""  # how answers may differ from `ask`

    def ask(self, session: Session, text: str) -> Session:
        """Return the session after asking a text about its image; no region is masked.

        The text may be several phrases, with semicolons or line ends between them.
        """
        if session.image is None:
            raise UserError("There is no image yet; upload one first.")
        text = text or ""
        if len(text) > MAX_TEXT_LENGTH:  # the page's own limit does not bind a program
            raise UserError(f"The text has {len(text):,} characters; write at most {MAX_TEXT_LENGTH}.")
        phrases = [phrase.strip() for phrase in re.split(r"[;\n]", text) if phrase.strip()]
        if len(phrases) > MAX_PHRASES:
            raise UserError(f"The text has {len(phrases)} phrases; write at most {MAX_PHRASES}.")
        boxes = None if session.boxes is None else session.boxes.of(session.image)
        asked = []
        for phrase in phrases or [text]:
            inspection = self.inspect(session.image, phrase, boxes)
            if self._repools and boxes is None:
                inspection = self.inspect(session.image, phrase, before=inspection)
            asked.append(inspection)
        session = session.with_image(session.image)
        return dataclasses.replace(session, asked=tuple(asked), step=asked[0].best_step)

    def select(self, session: Session, phrase: int) -> Session:
        """Return the session with another phrase of its text; the same regions are masked."""
        session = dataclasses.replace(
            session, phrase=phrase, item=None, step=session.asked[phrase].best_step, head=None
        )
        return self.mask(session, session.masked)

    def mask(self, session: Session, rows: Iterable[int]) -> Session:
        """Return the session after asking its text again with the pixels of some regions set to the mean colour.

        The boxes stay the same; only their features are computed again.
        """
        masked = tuple(sorted(set(rows)))
        after = None
        if masked:
            boxes = None if session.boxes is None else session.boxes.of(session.image)
            after = self.inspect(session.image, session.before.answer.question, boxes, session.before, masked)
        return dataclasses.replace(session, masked=masked, after=after)

    def toggle(self, session: Session, row: int) -> Session:
        """Return the session after masking a region, or showing it again."""
        return self.mask(session, set(session.masked) ^ {row})

    def inspect(
        self,
        image: UserImage,
        text: str,
        boxes: AnnotatedObjects | None = None,
        before: Inspection | None = None,
        masked: Sequence[int] = (),
    ) -> Inspection:
        """Answer a text, with the regions of `before` unless it is None and the pixels of some of them `masked`.

        `boxes`: of the user, as candidates.
        """
        question = Question(image.file, text, boxes)
        if before is None:
            answer, output = self.model.ask_with_output(question)
            scores = _detection_scores(output) if boxes is None else _given_scores(output, boxes)
            return self._inspection(answer, output, tuple(answer.box_names), scores)

        def with_regions(batch: Batch) -> Batch:
            # mask the same pixels as pre-training does; a teacher sees the masked image too
            images = batch.images
            rectangles = mask_rectangles(before.boxes[list(masked)], images.sizes[0].tolist(), "truncate")
            settings = self.model.network.detector.config.input
            images = normalise_images(images, settings, [rectangles.to(before.boxes.dtype)])
            return dataclasses.replace(batch, images=images, boxes=[before.boxes.to(images.pixels.device)])

        answer, output = self.model.ask_with_output(question, with_regions)
        return self._inspection(answer, output, before.names, before.scores)

    def _inspection(
        self, answer: Answer, output: ModelOutput, names: tuple[str, ...], scores: np.ndarray | None
    ) -> Inspection:
        """Return the inspection of a batch with one image and one text."""
        texts = output.batch.texts
        regions = output.text_regions
        # slots of the encoder: wordpieces, then regions (of which one may be the whole image), then perhaps an end
        piece_slots = texts.attention_mask[0].nonzero()[:, 0].tolist()
        region_begin = texts.input_ids.shape[1]
        region_end = region_begin + regions.row.shape[1]
        rows = (regions.row[0] >= 0).nonzero()[:, 0]
        region_slots = (region_begin + rows).tolist()
        whole_image_slots = (region_begin + regions.is_whole_image[0].nonzero()[:, 0]).tolist()
        end_slots = range(region_end, output.encoded.attentions[0].shape[-1])
        slots = [*piece_slots, *whole_image_slots, *end_slots, *region_slots]

        tokens = self.model.tokenizer.convert_ids_to_tokens(texts.input_ids[0, piece_slots].tolist())
        words = " ".join(tokens).replace(" ##", "").split(" ")
        words += [WHOLE_IMAGE] * len(whole_image_slots)
        words += [END] * len(end_slots)
        marker_words = {self.model.tokenizer.cls_token, self.model.tokenizer.sep_token, END}
        markers = frozenset(item for item, word in enumerate(words) if word in marker_words)
        # the first slot of each item, in the order of `slots`
        starts = [slot for slot, token in enumerate(tokens) if not token.startswith("##")]
        starts += range(len(tokens), len(slots))
        num_pieces = np.diff([*starts, len(slots)])[:, None]
        maps = []
        for attention in output.encoded.attentions:
            piece_map = attention[0][:, slots][:, :, slots].float().cpu().numpy()
            # of a whole word: the mean over its pieces as queries, the sum over them as keys
            # (Clark et al., What Does BERT Look At?)
            mean_of_queries = np.add.reduceat(piece_map, starts, axis=1) / num_pieces
            maps.append(np.add.reduceat(mean_of_queries, starts, axis=2))

        step_names = []
        visible_maps = []
        items = {"words": slice(0, len(words)), "regions": slice(len(words), None)}
        for graph_name, graph in self.model.network.encoder.attention_graphs.items():
            # graphs may share a map; each shows only its blocks
            is_visible = np.zeros((len(starts), len(starts)), dtype=bool)
            for block in graph.blocks:
                source, _, target = block.partition(" to ")
                is_visible[items[source], items[target]] = True
            if is_visible.all():
                layer_name = "layer"
                blocks = "words and regions"
            else:
                layer_name = f"{graph_name} layer"
                blocks = ", ".join(block for block in AttentionBlock if block in graph.blocks)
            for number, step in enumerate(graph.steps, start=1):
                step_names.append(f"{layer_name} {number} of {len(graph.steps)}: {blocks}")
                visible_maps.append(np.where(is_visible, maps[step], 0))
        return Inspection(
            answer=answer,
            words=tuple(words),
            names=names,
            attention=np.stack(visible_maps),
            step_names=tuple(step_names),
            boxes=regions.boxes[0, rows],
            scores=scores,
            markers=markers,
        )


def _detection_scores(output: ModelOutput) -> np.ndarray | None:
    """Return the detection scores of the regions of a batch's only text, float32 [R]; None: they are unknown."""
    if output.regions.scores is None:
        return None
    regions = output.text_regions
    rows = regions.row[0][regions.row[0] >= 0]
    first = int(regions.is_whole_image[0].any())  # a whole image comes before the candidate boxes
    return output.regions.scores[0][first + rows].float().cpu().numpy()


def _given_scores(output: ModelOutput, boxes: AnnotatedObjects) -> np.ndarray | None:
    """Return the scores that a user's boxes have, of the regions of a batch's only text, float32 [R]; None: none."""
    if boxes.scores is None:
        return None
    row = output.text_regions.row[0]
    return boxes.scores[row[row >= 0].cpu().numpy()]


# Pictures: clickable regions with attention, and the boxes of an answer.


MAX_LABELLED_REGIONS = 5  # regions labelled with their attention

_OUTLINE: Colour = (90, 90, 90)  # of regions that are neither selected nor masked


def draw_regions(session: Session) -> np.ndarray | None:
    """Draw the shown regions with their indices or attention.

    Returns uint8 RGB [height, width, 3]; None: no image.
    """
    image = session.image
    inspection = session.shown
    if image is None:
        return None
    if inspection is None:
        return draw_boxes(image.pixels, [])
    shares = session.region_attention
    pixels = _cover(image, inspection, session.masked)
    boxes = _on_picture(image, inspection.answer.boxes)
    labels = [str(row) for row in range(len(inspection))]
    if session.boxes is not None:
        labels = [f"{row} {name}".strip() for row, name in enumerate(inspection.names)]
    colours = [_OUTLINE] * len(inspection)
    order = session.shown_regions
    if shares is not None:
        pixels = draw_heat_map(pixels, boxes[order], shares[order])
        order.sort(key=lambda row: -shares[row])
        labels = [""] * len(inspection)
        for row in order[:MAX_LABELLED_REGIONS]:
            if shares[row] > 0:
                labels[row] = f"{row}: {shares[row]:.2f}"
    for row in session.masked:
        labels[row] = f"{row} masked"
        colours[row] = RED
    if session.item is not None and session.item >= len(inspection.words):
        chosen = session.item - len(inspection.words)
        labels[chosen] = f"{chosen}: {shares[chosen]:.2f} chosen"
        colours[chosen] = BLUE
    order.sort(key=lambda row: colours[row] is _OUTLINE)  # `draw_boxes` places the labels of the first boxes first
    return draw_boxes(pixels, boxes[order], [labels[row] for row in order], [colours[row] for row in order])


def draw_answer(session: Session, inspection: Inspection | None, masked: tuple[int, ...] = ()) -> np.ndarray | None:
    """Draw the boxes of an answer (or else the regions with the most attention) and its phrases.

    Returns uint8 RGB [height, width, 3]; None: no image or answer.
    """
    if inspection is None or session.image is None:
        return None
    answer = inspection.answer
    answer_boxes = inspection.answer_boxes()
    labelled_boxes = answer_boxes or answer.attended_regions()
    is_dashed = [bool(answer_boxes) and answer.is_unsure] * len(labelled_boxes)
    if answer.is_unsure and not answer_boxes:  # a frame around the image says so
        height, width = session.image.size
        labelled_boxes.insert(0, (inspection.sentences[0], (0, 0, width, height)))
        is_dashed.insert(0, True)
    phrases = answer.shown_phrases()
    labels = [label for label, _ in labelled_boxes] + [_phrase_label(phrase) for phrase in phrases]
    boxes = [box for _, box in labelled_boxes] + [phrase.box for phrase in phrases]
    is_dashed += [not phrase.is_clear for phrase in phrases]
    colours = choose_box_colours(len(labelled_boxes), len(phrases))
    pixels = _cover(session.image, inspection, masked)
    if answer.mask is not None:
        pixels = tint(pixels, answer.mask, PALETTE[0])
    return draw_boxes(pixels, _on_picture(session.image, boxes), labels, colours, dashed=is_dashed)


def _phrase_label(phrase: GroundedPhrase) -> str:
    """Return the words of a phrase with its score."""
    unsure = "" if phrase.is_clear else ", unsure"
    return f"{phrase.text}, {percent(phrase.score)}{unsure}"


def _on_picture(image: UserImage, boxes: Any) -> np.ndarray:
    """Scale boxes from pixels of the original image to those of the displayed one."""
    return np.asarray(boxes, dtype=np.float64).reshape(-1, 4) * np.tile(image.scale, 2)


def _cover(image: UserImage, inspection: Inspection, masked: tuple[int, ...]) -> np.ndarray:
    """Return a copy of the image's pixels with some regions in grey."""
    pixels = image.pixels.copy()
    for x1, y1, x2, y2 in _on_picture(image, inspection.answer.boxes[list(masked)]).astype(int).clip(min=0):
        pixels[y1 : y2 + 1, x1 : x2 + 1] = GREY
    return pixels
