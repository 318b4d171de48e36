"""ODVG's JSON lines, in which Open-GroundingDino and MMDetection train Grounding DINO: a line per image with a text.

Files (`data.files`, relative to `data.root`; {split} is the split)
    annotations  JSON lines
    images       folder of the images
    label_map    (optional) JSON, class names by number, for instances without a `category`
    detections, features   boxes by image id, which is the path of the image's file without its suffix

A line has one of these; of several, the first one is read:
    grounding    a caption and its regions: a phrase with one box or several, and the spans of the caption that it has
                 (`tokens_positive`, MMDetection). Without spans, it is the first place of its words in the caption.
    referring    expressions, several for each object (MMDetection's `refcoco2odvg.py`)
    detection    objects with class names. The text is "dog . cat .", as Open-GroundingDino makes it, but without the
                 names of absent classes, in the order of the line.

Boxes are corners, x1, y1, x2, y2. Those without an area or outside their image are skipped and counted; MMDetection
skips them, too. Facts: `data_format.md` and `datasets/odvg.py` of github.com/longzw1997/Open-GroundingDino;
`mmdet/datasets/odvg.py` and `tools/dataset_converters` of github.com/open-mmlab/mmdetection.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from typing_extensions import override

from detector.errors import UserError
from detector.io import read_json
from e2e_vl.data.base import DataFiles
from e2e_vl.data.box_checks import MAX_SHARE_OUTSIDE, require_pixels, warn_of_normalised_images
from e2e_vl.data.config import GroundedTextsConfig
from e2e_vl.data.grounded import (
    GroundedDataset,
    GroundedText,
    PhraseCollector,
    Span,
    gather_boxes,
    gather_phrases,
    join_spans,
)
from e2e_vl.data.tables import stream_lines
from e2e_vl.io import FourNumbers, Id, Name, Pixel, Record, Side

# of one box, or of several; an empty list: nothing in the image. Not a tuple in a union, which ends msgspec 0.22
_Corners = list[Pixel | list[Pixel]]


class _Region(Record):
    bbox: _Corners
    phrase: str | list[str]  # a list: its parts in the caption
    tokens_positive: list[Span] | None = None


class _Grounding(Record):
    caption: str
    regions: list[_Region]


class _ReferredObject(Record):
    bbox: _Corners
    phrase: str | list[str]  # a list: several expressions


class _Instance(Record):
    bbox: FourNumbers
    label: Id | None = None
    category: str | None = None


class _Detection(Record):
    instances: list[_Instance]


class _Line(Record):
    filename: Name
    height: Side
    width: Side
    grounding: _Grounding | None = None
    referring: list[_ReferredObject] | None = None
    detection: _Detection | None = None


_Named = list[tuple[Sequence[Span], Sequence[FourNumbers]]]  # phrases and their boxes


class ODVGReader:
    """Reads the texts of a file of JSON lines.

    Args:
        label_map: class names by their numbers.
    """

    def __init__(self, path: Path, options: GroundedTextsConfig, label_map: Mapping[str, str]) -> None:
        self.path = path
        self.options = options
        self.label_map = label_map
        self.collector = PhraseCollector(path)
        self.num_boxes = 0
        self.inverted_box: tuple[list[float], int] | None = None  # the first one, and its line
        self.num_inverted = 0

    def texts(self) -> Iterator[GroundedText]:
        """Yield the texts, in file order."""
        for number, line in enumerate(stream_lines(self.path, _Line), start=1):
            if line.grounding is not None:
                yield from self._captions(number, line, line.grounding)
            elif line.referring is not None:
                yield from self._expressions(number, line, line.referring)
            elif line.detection is not None:
                yield from self._class_names(number, line, line.detection)
            else:
                raise UserError(
                    f"{self.path}, record {number}: no grounding, referring or detection; correct or remove the line"
                )
        self._check_boxes()
        self.collector.skipped.log()

    def _captions(self, number: int, line: _Line, grounding: _Grounding) -> Iterator[GroundedText]:
        """Yield the caption of a line."""
        words = grounding.caption
        if not words.strip():
            self.collector.skipped.add("blank captions, by line", number)
            return
        named: _Named = []
        is_empty = False
        for region in grounding.regions:
            spans = self._spans(region, words, number)
            boxes = self._boxes(region.bbox, line, number)
            is_empty = is_empty or not region.bbox
            if boxes or not region.bbox:
                named.append((join_spans(spans, words), boxes))
        if self.options.texts == "expressions" and not gather_boxes(named) and not is_empty:
            self.collector.skipped.add("expressions without a box, by line", number)
            return
        yield self._text(str(number), line, words, named)

    def _spans(self, region: _Region, words: str, number: int) -> list[Span]:
        """Return where the words of a region are in the caption."""
        if region.tokens_positive is not None:
            return self.collector.usable_spans(region.tokens_positive, words, number)
        spans = []
        for phrase in _as_list(region.phrase):
            match = re.search(rf"(?<!\w){re.escape(phrase.strip())}(?!\w)", words, re.IGNORECASE)
            if phrase.strip() and match is not None:
                spans.append(match.span())
            else:
                self.collector.skipped.add("phrases that their caption lacks, by line", number)
        return spans

    def _expressions(self, number: int, line: _Line, referring: Sequence[_ReferredObject]) -> Iterator[GroundedText]:
        """Yield the expressions of a line, each as one phrase."""
        expressions: list[tuple[str, list[FourNumbers]]] = []
        for referred in referring:
            boxes = self._boxes(referred.bbox, line, number)
            if not boxes and referred.bbox:
                self.collector.skipped.add("objects without a usable box, by line", number)
                continue
            for words in _as_list(referred.phrase):
                if words.strip():
                    expressions.append((words, boxes))
                else:
                    self.collector.skipped.add("blank expressions, by line", number)
        for position, (words, boxes) in enumerate(expressions):
            yield self._text(f"{number}.{position}", line, words, [([(0, len(words))], boxes)])

    def _class_names(self, number: int, line: _Line, detection: _Detection) -> Iterator[GroundedText]:
        """Yield the class names of a line's objects, each as one phrase; none of a line without objects."""
        if self.options.texts == "expressions":
            self.collector.skipped.add("lines of detection, which have no expressions", number)
            return
        boxes_of: dict[str, list[FourNumbers]] = {}
        for instance in detection.instances:
            name = instance.category or self.label_map.get(str(instance.label), "")
            if not name.strip():
                raise UserError(
                    f"{self.path}, record {number}: no category for the label {instance.label!r}; name it in "
                    "data.files.label_map"
                )
            boxes = self._boxes(list(instance.bbox), line, number)
            if boxes:
                boxes_of.setdefault(name, []).extend(boxes)
        named: _Named = []
        words = ""
        for name, boxes in boxes_of.items():
            named.append(([(len(words), len(words) + len(name))], boxes))
            words += f"{name} . "
        if words:
            yield self._text(str(number), line, words.rstrip(), named)
        else:
            self.collector.skipped.add("lines of detection without an object", number)

    def _boxes(self, corners: _Corners, line: _Line, number: int) -> list[FourNumbers]:
        """Return the usable boxes of a region."""
        if corners and not isinstance(corners[0], list):
            corners = [corners]
        boxes: list[FourNumbers] = []
        for sides in corners:
            if not isinstance(sides, list) or len(sides) != 4 or any(isinstance(side, list) for side in sides):
                raise UserError(
                    f"{self.path}, record {number}: a bbox is four numbers x1, y1, x2, y2, or a list of such boxes; "
                    "correct or remove the line"
                )
            x1, y1, x2, y2 = sides
            self.num_boxes += 1
            if x2 < x1 or y2 < y1:
                self.num_inverted += 1
                self.inverted_box = self.inverted_box or (sides, number)
            boxes.append((x1, y1, x2, y2))
        return self.collector.usable_boxes(boxes, (line.height, line.width), number)

    def _text(self, name: str, line: _Line, words: str, named: _Named) -> GroundedText:
        return GroundedText(
            f"{self.path.name}:{name}",
            line.filename,
            (line.height, line.width),
            words,
            phrases=gather_phrases(named),
            referred_boxes=gather_boxes(named),
        )

    def _check_boxes(self) -> None:
        """Raise a UserError if the boxes are normalised, or [x, y, width, height]."""
        if self.num_inverted > MAX_SHARE_OUTSIDE * self.num_boxes:
            box, number = self.inverted_box
            raise UserError(
                f"{self.path}: {self.num_inverted} of {self.num_boxes} boxes end before they begin, such as "
                f"{box} of record {number}; ODVG's boxes are corners x1, y1, x2, y2, so convert "
                "[x, y, width, height]"
            )
        require_pixels(self.collector.boxes, str(self.path))
        warn_of_normalised_images(self.collector.boxes, self.collector.image_ids, str(self.path))


def _as_list(phrase: str | list[str]) -> list[str]:
    return [phrase] if isinstance(phrase, str) else phrase


class ODVGDataset(GroundedDataset):
    """Captions, expressions or class names in ODVG's files."""

    file_keys = (*GroundedDataset.file_keys, "label_map")
    text_files = ("annotations", "label_map")

    @classmethod
    @override
    def texts_in(cls, files: DataFiles, options: GroundedTextsConfig, split: str) -> Iterator[GroundedText]:
        label_map: dict[str, str] = {}
        if "label_map" in files:
            label_map = read_json(files.path("label_map", split=split), dict[str, str])
        yield from ODVGReader(files.path("annotations", split=split), options, label_map).texts()
