"""Visual Genome: region descriptions as captions, or questions with one answer each, for pre-training.

Files (`data.files`, relative to `data.root`; the release has no splits, so {split} can be any name)
    images      folder that contains VG_100K and VG_100K_2
    image_data  image_data.json
    regions     region_descriptions.json, for `data.config.texts: regions`
    region_graphs  (optional) region_graphs.json: the boxes of phrases, for `phrases.weight`
    questions   question_answers.json, for `data.config.texts: questions`
    detections, features   boxes by image id

Without region graphs, the whole description is one phrase, with the box of its region. With them, a description has no
phrases if its text differs from its region graph's in more than whitespace.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from typing_extensions import override

from detector.errors import UserError
from e2e_vl.config import BoxSource
from e2e_vl.data.base import DataFiles, DataNeeds, JoinedSplit, RecordDataset, TextRecord
from e2e_vl.data.box_checks import has_part_inside
from e2e_vl.data.config import VisualGenomeDatasetConfig
from e2e_vl.data.overlap import COCO, VISUAL_GENOME
from e2e_vl.data.tables import SerializedDict, SkippedRecords, drop_repeats, stream_list
from e2e_vl.io import FourNumbers, Pixel, Record, Side
from e2e_vl.samples import CorrectAnswer, PhraseBoxes, SampleImage, SampleText

logger = logging.getLogger(__name__)

Span = tuple[int, int]  # first character, and last character + 1
NamedBoxes = list[tuple[Span, list[FourNumbers]]]  # spans of a description, with boxes xyxy


class GenomeImage(Record):
    """One image of Visual Genome."""

    image_id: int
    width: Side
    height: Side
    url: str | None = None  # its last folder is the image's folder, such as VG_100K_2
    coco_id: int | None = None  # the same image in COCO; None: not in COCO


class _Region(Record):
    region_id: int
    phrase: str
    x: Pixel | None = None
    y: Pixel | None = None
    width: Pixel | None = None
    height: Pixel | None = None


class _RegionsOfImage(Record):
    id: int
    regions: list[_Region]


class _Question(Record):
    qa_id: int
    question: str
    answer: str


class _QuestionsOfImage(Record):
    id: int
    qas: list[_Question]


class _Entity(Record):
    entity_idx_start: int
    entity_idx_end: int
    entity_name: str | None = None
    synset_name: str | None = None


class _GraphObject(Record):
    x: Pixel
    y: Pixel
    w: Pixel
    h: Pixel
    name: str | None = None
    names: list[str] | None = None
    synsets: list[str] | None = None


class _RegionGraph(Record):
    region_id: int
    phrase: str
    synsets: list[_Entity]
    objects: list[_GraphObject]


class _GraphsOfImage(Record):
    regions: list[_RegionGraph]


class GenomeText(TextRecord, array_like=True):
    """A region description, or a question with its answer."""

    id: int  # region id or question id
    image_id: int
    words: str
    answer: str | None = None  # None: not a question
    box: FourNumbers | None = None  # xyxy, of the region

    @property
    @override
    def truth(self) -> CorrectAnswer | None:
        return None if self.answer is None else CorrectAnswer(self.answer)

    @property
    def metadata(self) -> dict[str, int]:
        if self.answer is None:
            return {"region_id": self.id}
        return {"qa_id": self.id}


class RegionPhrases(Record, array_like=True):
    """The phrases of one description, from its region graph."""

    words: str
    named: NamedBoxes

    def of(self, words: str) -> PhraseBoxes | None:
        """Return the phrases of a description with this text; None if more than whitespace differs."""
        if _without_spaces(words) != _without_spaces(self.words):
            return None
        visible = [position for position, character in enumerate(words) if not character.isspace()]
        phrases: dict[Span, np.ndarray] = {}
        for (graph_start, graph_end), boxes in self.named:
            start = visible[len(_without_spaces(self.words[:graph_start]))]
            last = visible[len(_without_spaces(self.words[:graph_end])) - 1]
            phrases.setdefault((start, last + 1), np.array(boxes, dtype=np.float64))
        return PhraseBoxes(tuple(phrases), tuple(phrases.values()))


def _without_spaces(text: str) -> str:
    return "".join(text.split())


def read_region_descriptions(path: Path) -> Iterator[GenomeText]:
    """Read the descriptions; blank ones and exact repeats are skipped, and their numbers are logged."""
    skipped = SkippedRecords(path)
    for row in stream_list(path, _RegionsOfImage):
        descriptions = []
        for region in row.regions:
            if not region.phrase.strip():
                skipped.add("blank descriptions", region.region_id)
                continue
            box = None
            sides = (region.x, region.y, region.width, region.height)
            if None not in sides:
                box = _corners(*sides)
                if box is None:
                    skipped.add("boxes of regions without an area, but not their descriptions", region.region_id)
            descriptions.append(GenomeText(region.region_id, row.id, region.phrase, box=box))
        yield from drop_repeats(descriptions, skipped, "descriptions")
    skipped.log()


def read_genome_questions(path: Path) -> Iterator[GenomeText]:
    """Read the questions; those without words or an answer and exact repeats are skipped, and their numbers logged."""
    skipped = SkippedRecords(path)
    for row in stream_list(path, _QuestionsOfImage):
        questions = []
        for question in row.qas:
            if not question.question.strip() or not question.answer.strip():
                skipped.add("questions that are blank or have a blank answer", question.qa_id)
                continue
            questions.append(GenomeText(question.qa_id, row.id, question.question, question.answer))
        yield from drop_repeats(questions, skipped, "questions")
    skipped.log()


def read_region_graphs(path: Path, folder: Path | None = None) -> SerializedDict[RegionPhrases]:
    """Read the phrases of each description, by region id; `folder` is that of tables.

    Phrases outside their description and objects with empty boxes are skipped; their number is logged.
    """
    return SerializedDict.tabulate([path], folder, lambda: _phrases_by_region(path), RegionPhrases, str(path))


def _phrases_by_region(path: Path) -> Iterator[tuple[int, RegionPhrases]]:
    """Yield the id of each region with phrases, and the phrases."""
    num_skipped: Counter[str] = Counter()
    for image in stream_list(path, _GraphsOfImage):
        for graph in image.regions:
            named_boxes = _named_boxes(graph, num_skipped)
            if named_boxes:
                yield graph.region_id, RegionPhrases(graph.phrase, named_boxes)
    counts = [f"{number:,} {reason}" for reason, number in sorted(num_skipped.items()) if number]
    if counts:
        logger.warning("%s: skipped %s.", path, " and ".join(counts))


def _named_boxes(region: _RegionGraph, num_skipped: Counter[str]) -> NamedBoxes:
    """Return the boxes of each phrase of a description."""
    objects: list[tuple[FourNumbers, _GraphObject]] = []
    for graph_object in region.objects:
        box = _corners(graph_object.x, graph_object.y, graph_object.w, graph_object.h)
        if box is None:
            num_skipped["objects with empty boxes"] += 1
        else:
            objects.append((box, graph_object))
    named: dict[Span, list[FourNumbers]] = {}
    for entity in region.synsets:
        start = entity.entity_idx_start
        end = entity.entity_idx_end
        words = ""
        if 0 <= start < end <= len(region.phrase):
            words = region.phrase[start:end]
        if not words.strip():
            num_skipped["phrases outside their description"] += 1
            continue
        boxes = _boxes_of(entity, objects, words)
        if boxes:
            named.setdefault((start, end), boxes)
    return list(named.items())


def _boxes_of(entity: _Entity, objects: Sequence[tuple[FourNumbers, _GraphObject]], words: str) -> list[FourNumbers]:
    """Return the distinct boxes of the objects with the same synset as an entity, or else with the same name."""
    boxes: list[FourNumbers] = []
    if entity.synset_name is not None:
        boxes = [box for box, graph_object in objects if entity.synset_name in (graph_object.synsets or ())]
    if not boxes:
        name = (entity.entity_name or words).lower()
        boxes = [box for box, graph_object in objects if _name_of(graph_object).lower() == name]
    return list(dict.fromkeys(boxes))


def _name_of(graph_object: _GraphObject) -> str:
    """Return the name of an object, or the first one of several; "" if it has none."""
    return graph_object.name or next(iter(graph_object.names or ()), "")


def _corners(x: float, y: float, width: float, height: float) -> FourNumbers | None:
    """Return a box as corners; None if it is empty."""
    if width <= 0 or height <= 0:
        return None
    return (x, y, x + width, y + height)


READERS = {"regions": read_region_descriptions, "questions": read_genome_questions}


class VisualGenomeDataset(RecordDataset):
    """Texts about images, image by image."""

    file_keys = ("images", "image_data", "regions", "region_graphs", "questions", "detections", "features")
    box_sources = (BoxSource.ONLINE, BoxSource.DETECTIONS, BoxSource.PRECOMPUTED)
    id_namespace = VISUAL_GENOME
    is_pool = True

    def __init__(self, files: DataFiles, options: VisualGenomeDatasetConfig, split: str, needs: DataNeeds) -> None:
        self.options = options
        self.folder = Path() if needs.boxes is BoxSource.PRECOMPUTED else files.path("images", split=split)
        self.split_values = [{"split": split}]
        image_data = files.path("image_data", split=split)
        images = list(stream_list(image_data, GenomeImage))
        self.images = SerializedDict(((image.image_id, image) for image in images), GenomeImage, str(image_data))
        path = files.path(options.texts, split=split)
        may_be_in_coco = {"all": (True, False), "without": (False,), "only": (True,)}[options.coco]

        def texts(joined: JoinedSplit) -> Iterator[GenomeText]:
            image_of = {image.image_id: image for image in images}
            skipped = SkippedRecords(path)
            for text in READERS[options.texts](path):
                image = image_of.get(text.image_id)
                if image is None:
                    raise UserError(f"{image_data} lacks image {text.image_id} of {path}; use files of one release")
                if (image.coco_id is not None) not in may_be_in_coco:
                    continue
                if text.box is not None and not has_part_inside(text.box, image.width, image.height):
                    skipped.add("boxes of regions outside their image, but not their descriptions", text.id)
                    text.box = None
                yield text
            skipped.log()

        where = f"{path}, data.config.coco={options.coco}: text"
        splits = [JoinedSplit(split, images=self.folder)]
        options_of_texts = [options.texts, options.coco]
        self.tabulate_texts([path, image_data], files.index_folder, texts, GenomeText, where, splits, options_of_texts)
        self.has_truths = options.texts == "questions"
        self.has_phrases = needs.phrases and options.texts == "regions"
        self.graphs = None  # the phrases of descriptions, where they are needed and there are region graphs
        if self.has_phrases and "region_graphs" in files:
            graphs_path = files.path("region_graphs", split=split)
            self.graphs = read_region_graphs(graphs_path, files.index_folder)
            if not any(self._phrases(text) for text in self.texts):
                raise UserError(f"{graphs_path} has none of the descriptions in {path}; use files of the same release")

    def _phrases(self, text: GenomeText) -> PhraseBoxes | None:
        """Return the phrases of a description; None if unknown."""
        if self.graphs is not None:
            if text.id not in self.graphs:
                return None
            return self.graphs[text.id].of(text.words)
        if text.box is None or not text.words.strip():
            return None
        return PhraseBoxes(((0, len(text.words)),), (np.array([text.box]),))

    @classmethod
    @override
    def texts_of(cls, files: DataFiles, options: VisualGenomeDatasetConfig, split: str) -> Iterable[str]:
        return (text.words for text in READERS[options.texts](files.path(options.texts, split=split)))

    @classmethod
    @override
    def answers_of(cls, files: DataFiles, options: VisualGenomeDatasetConfig, split: str) -> dict[Any, str]:
        if options.texts != "questions":
            return super().answers_of(files, options, split)
        return {text.id: text.answer for text in read_genome_questions(files.path("questions", split=split))}

    @override
    def contents(self) -> Iterable[np.ndarray]:
        yield from super().contents()
        if self.graphs is not None:
            yield self.graphs.encoded

    @override
    def image(self, name: str, text: int) -> SampleImage:
        image = self.images[name]
        folder = ""
        if self.options.use_folders:
            folder = PurePosixPath(image.url or "").parent.name
        aliases = [(VISUAL_GENOME, name)]
        if image.coco_id is not None:
            aliases.append((COCO, str(image.coco_id)))
        file = self.folder / folder / f"{name}.jpg"
        return SampleImage(name, file, (image.height, image.width), image_aliases=tuple(aliases))

    @override
    def text(self, index: int) -> SampleText:
        phrases = self._phrases(self.texts[index]) if self.has_phrases else None
        return dataclasses.replace(super().text(index), phrases=phrases)
