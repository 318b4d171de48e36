"""Texts whose phrases are grounded in boxes: what the data sets of grounding pre-training share.

A phrase is a span of characters of its text. It names all boxes that the file gives it, or nothing in the image if the
file says so.
"""

from __future__ import annotations

import abc
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

import numpy as np
from typing_extensions import override

from e2e_vl.config import BoxSource
from e2e_vl.data.base import DataFiles, DataNeeds, JoinedSplit, RecordDataset, TextRecord, split_names
from e2e_vl.data.box_checks import has_part_inside
from e2e_vl.data.config import GroundedTextsConfig
from e2e_vl.data.tables import SkippedRecords
from e2e_vl.io import Count, FourNumbers, Id
from e2e_vl.samples import EntityPhrases, PhraseBoxes, ReferredBoxes, SampleImage, SampleText

Span = tuple[int, int]  # first character, and last character + 1
NamedBoxes = list[tuple[Span, list[FourNumbers]]]  # phrases of a text in their order, with boxes xyxy


class GroundedText(TextRecord, array_like=True):
    """A caption or an expression about an image."""

    id: Id
    file_name: str  # of the image, in the folder of its source
    size: tuple[int, int]  # (height, width) of the image
    words: str
    phrases: NamedBoxes
    referred_boxes: tuple[FourNumbers, ...]  # xyxy, all that the text names
    source: str = ""  # of the image
    original_id: Id | None = None  # of the image, in the data set that it is from
    namespace: str | None = None  # of `original_id`, see `e2e_vl/data/overlap.py`
    sentence: Count | None = None  # number of the text among those of its image

    @property
    def image_id(self) -> str:
        """The path of the image without its suffix."""
        return PurePosixPath(self.file_name).with_suffix("").as_posix()

    @property
    def metadata(self) -> dict[str, Any]:
        """The ids, under the names that they have in REFER's files and in Flickr30K Entities."""
        image_id = self.image_id if self.original_id is None else self.original_id
        metadata = {"sent_id": self.id, "image_id": image_id}
        if self.sentence is not None:
            metadata["sentence"] = self.sentence
        return metadata


class PhraseCollector:
    """Collects the phrases of a file's texts; skips and counts what cannot be one, and judges all boxes together.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.skipped = SkippedRecords(path)
        self.image_ids: list[Id] = []  # of each box
        self._corners = array("d")
        self._sizes = array("q")

    @property
    def boxes(self) -> np.ndarray:
        """All boxes that have an area, xyxy, float64 [R, 4]."""
        return np.array(self._corners, dtype=np.float64).reshape(-1, 4)

    @property
    def sizes(self) -> np.ndarray:
        """The (width, height) of each box's image, int64 [R, 2]."""
        return np.array(self._sizes, dtype=np.int64).reshape(-1, 2)

    def usable_boxes(self, boxes: Iterable[FourNumbers], size: tuple[int, int], text_id: Id) -> list[FourNumbers]:
        """Return the boxes, xyxy, that have an area and a part inside an image of `size` (height, width)."""
        height, width = size
        usable = []
        for box in boxes:
            x1, y1, x2, y2 = box
            if x2 <= x1 or y2 <= y1:
                self.skipped.add("boxes without an area, by text", text_id)
                continue
            self._corners.extend(box)
            self._sizes.extend((width, height))
            self.image_ids.append(text_id)
            if has_part_inside(box, width, height):
                usable.append(box)
            else:
                self.skipped.add("boxes outside their image, by text", text_id)
        return usable

    def usable_spans(self, spans: Iterable[Span], words: str, text_id: Id) -> list[Span]:
        """Return the spans that have words."""
        usable = []
        for start, end in spans:
            if 0 <= start < end <= len(words) and words[start:end].strip():
                usable.append((start, end))
            else:
                self.skipped.add("phrases outside their text, by text", text_id)
        return usable


def join_spans(spans: Iterable[Span], words: str) -> list[Span]:
    """Join spans that overlap, or have nothing but spaces between them."""
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and not words[joined[-1][1] : start].strip():
            first_start, first_end = joined[-1]
            joined[-1] = (first_start, max(first_end, end))
        else:
            joined.append((start, end))
    return joined


def gather_phrases(named: Iterable[tuple[Sequence[Span], Sequence[FourNumbers]]]) -> NamedBoxes:
    """Return each phrase once, in the order of the text, with the boxes of all entries that have it."""
    boxes_of: dict[Span, dict[FourNumbers, None]] = {}
    for spans, boxes in named:
        for span in spans:
            boxes_of.setdefault(span, {}).update(dict.fromkeys(boxes))
    return [(span, list(boxes)) for span, boxes in sorted(boxes_of.items())]


def gather_boxes(named: Iterable[tuple[Sequence[Span], Sequence[FourNumbers]]]) -> tuple[FourNumbers, ...]:
    """Return each box of the entries once."""
    boxes_in_order: dict[FourNumbers, None] = {}
    for _, boxes in named:
        boxes_in_order.update(dict.fromkeys(boxes))
    return tuple(boxes_in_order)


class GroundedDataset(RecordDataset):
    """The texts of one split, or of several joined by "+", grouped by image."""

    file_keys = ("images", "annotations", "detections", "features")
    text_files: ClassVar[tuple[str, ...]] = ("annotations",)  # keys of the files that the texts are read from
    box_sources = (BoxSource.ONLINE, BoxSource.DETECTIONS, BoxSource.PRECOMPUTED)
    has_phrases = True
    is_pool = True

    def __init__(self, files: DataFiles, options: GroundedTextsConfig, split: str, needs: DataNeeds) -> None:
        self.options = options
        self.split_values = [{"split": name} for name in split_names(split)]
        self.files = files
        self.reads_images = needs.boxes is not BoxSource.PRECOMPUTED
        splits = []
        for values in self.split_values:
            folder = files.name("images", **values) if self.reads_images else None
            splits.append(JoinedSplit(values["split"], self.files_by_image_id(files, needs, values), folder))
        paths = []
        for values in self.split_values:
            paths += [files.path(key, **values) for key in self.text_files if key in files or key == "annotations"]

        def texts(joined: JoinedSplit) -> Iterator[GroundedText]:
            return self.texts_in(files, options, joined.name)

        where = f"{', '.join(map(str, paths))}: text"
        self.tabulate_texts(paths, files.index_folder, texts, GroundedText, where, splits, [options.texts])

    @classmethod
    @abc.abstractmethod
    def texts_in(cls, files: DataFiles, options: Any, split: str) -> Iterator[GroundedText]:
        """Read the texts of one split, in the order of the file."""

    @classmethod
    @override
    def texts_of(cls, files: DataFiles, options: Any, split: str) -> Iterable[str]:
        for name in split_names(split):
            for text in cls.texts_in(files, options, name):
                yield text.words

    @override
    def truths(self) -> Iterable[EntityPhrases | ReferredBoxes]:
        return map(self._truth, self.texts)

    @override
    def image(self, name: str, text: int) -> SampleImage:
        record = self.texts[text]
        file = Path(record.file_name)
        if self.reads_images:
            values = self.split_values[self.split_index(text)]
            file = self.files.path("images", **values, source=self.source_folder(record.source)) / file
        aliases = ()
        if record.namespace is not None:
            aliases = ((record.namespace, str(record.original_id)),)
        return SampleImage(name, file, record.size, image_aliases=aliases)

    def source_folder(self, source: str) -> str:
        """Return what {source} in `data.files.images` stands for."""
        return source

    @override
    def text(self, index: int) -> SampleText:
        record = self.texts[index]
        spans = tuple(span for span, _ in record.phrases)
        boxes = tuple(_as_array(phrase_boxes) for _, phrase_boxes in record.phrases)
        return SampleText(index, record.words, record.metadata, self._truth(record), phrases=PhraseBoxes(spans, boxes))

    def _truth(self, record: GroundedText) -> EntityPhrases | ReferredBoxes:
        """Return the boxes that an expression refers to, or those phrases of a caption that have boxes."""
        if self.options.texts == "expressions":
            return ReferredBoxes(record.referred_boxes)
        phrases = [(span, boxes) for span, boxes in record.phrases if boxes]
        return EntityPhrases(
            tuple(span for span, _ in phrases),
            tuple(_as_array(boxes) for _, boxes in phrases),
            entities=tuple(str(number) for number in range(len(phrases))),
            types=((),) * len(phrases),
        )


def _as_array(boxes: Sequence[FourNumbers]) -> np.ndarray:
    """Return boxes as float64 [R, 4]."""
    return np.array(boxes, dtype=np.float64).reshape(-1, 4)
