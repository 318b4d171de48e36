"""Conceptual Captions in the layout of the official VL-BERT code: JSON lines, images and detected boxes in archives.

    train_frcnn.json     a line: {"image": "train_image.zip@/00000000.jpg", "caption": ["a", "word", ...],
                                  "frcnn": "train_frcnn.zip@/00000000.json"}
    train.json           the same lines without "frcnn"
    train_image.zip      or a folder train_image/
    train_frcnn.zip      or a folder train_frcnn/, or parts train_frcnn.0.zip ...; a member:
                         {"image_w", "image_h", "num_boxes", "boxes", "classes", "features"}

The last three are base64 of float32 [R, 4], [R, C] and [R, D]: corners in pixels of the stored image, the detector's
distribution over its classes (1601 for bottom-up attention, the background first) and region features.

Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

import base64
import binascii
from pathlib import Path

import numpy as np

from detector.errors import UserError
from e2e_vl.data.formats.caption_sources import CaptionSource
from e2e_vl.data.loading.grouping import ConsecutiveGroups
from e2e_vl.data.storage.archives import ArchivedFiles
from e2e_vl.data.storage.corpus import TextLines
from e2e_vl.records import Count, Name, Record, Side, decoded
from e2e_vl.samples import CandidateBoxes, EncodedImage


class _CaptionLine(Record):
    image: Name
    caption: str | list[str]


class _CaptionLineWithBoxes(_CaptionLine):
    frcnn: Name


class _Boxes(Record):
    image_w: Side
    image_h: Side
    num_boxes: Count
    boxes: str
    classes: str


class _BoxesWithFeatures(_Boxes):
    features: str


class VLBertCaptions(CaptionSource):
    """One caption per image.

    Args:
        lines_file: the JSON lines; the paths in it start from its folder.
        cache: folder that keeps the indices.
        with_boxes: read the detected boxes (key `frcnn`), sorted by falling score of the best class.
        with_features: and their features; the whole image's is their mean.

    Its boxes have class distributions.

    Raises:
        FileNotFoundError: no such file.
        ValueError: see `TextLines`; a line that is not such an object, or a boxes file that is damaged, when it is
            read.
    """

    def __init__(
        self, lines_file: str | Path, cache: str | Path, *, with_boxes: bool = False, with_features: bool = False
    ) -> None:
        self.lines = TextLines(lines_file, cache, "captions")
        self.path = self.lines.path
        self.with_boxes = with_boxes or with_features
        self.with_features = with_features
        self._archives = ArchivedFiles(self.path.parent, cache)
        self.groups = ConsecutiveGroups(np.ones(len(self.lines), dtype=np.int64))
        first = self._record(0)  # so that a file of another kind is noticed at once
        self._archives.prepare(first.image)
        if self.with_boxes:
            self._archives.prepare(first.frcnn)

    def caption(self, text: int) -> str:
        found = self._record(text).caption
        words = found if isinstance(found, str) else " ".join(found)
        if not words.strip():
            raise UserError(f"{self.path}: the caption of line {self._where(text)} is not a list of words")
        return words

    def name(self, group: int) -> str:
        return self._record(group).image

    def image(self, group: int) -> Path | EncodedImage:
        name = self._record(group).image
        found = self._archives.find(name)
        return found if isinstance(found, Path) else EncodedImage(self._archives.read(name), f"{found[0]}: {found[1]}")

    def boxes(self, group: int) -> CandidateBoxes | None:
        if not self.with_boxes:
            return None
        name = self._record(group).frcnn
        origin = str(self._archives.root / name)
        content = decoded(_BoxesWithFeatures if self.with_features else _Boxes, self._archives.read(name), origin)
        boxes, classes = (_matrix(content, key, origin) for key in ("boxes", "classes"))
        if boxes.shape[1:] != (4,):
            raise UserError(f"{origin}: boxes have {boxes.shape[1]} numbers each, expected 4; get the file again")
        if (boxes[:, 2:] < boxes[:, :2]).any():
            raise UserError(f"{origin}: a box [x1, y1, x2, y2] is inverted; get the file again")
        if classes.min() < 0 or classes.max() > 1.0001:
            raise UserError(f"{origin}: the classes have values that are no probabilities; get the file again")
        order = np.argsort(-classes.max(axis=1), kind="stable")
        features = _matrix(content, "features", origin)[order] if self.with_features else None
        return CandidateBoxes(
            boxes[order],
            origin,
            classes[order],
            (content.image_h, content.image_w),
            features,
            None if features is None else features.mean(axis=0),
        )

    def _record(self, number: int) -> _CaptionLine:
        where = f"{self.path}: line {self._where(number)}"
        kind = _CaptionLineWithBoxes if self.with_boxes else _CaptionLine
        return decoded(kind, self.lines[number], where, form="one object is expected on each line")

    def _where(self, number: int) -> str:
        return f"{number + 1} (blank ones not counted)"


def _matrix(content: _Boxes, key: str, origin: str) -> np.ndarray:
    """float32 [R, columns], finite."""
    try:
        values = np.frombuffer(base64.b64decode(getattr(content, key)), dtype="<f4")
        rows = content.num_boxes
        if rows < 1 or not len(values) or len(values) % rows:
            raise UserError(f"{len(values)} numbers for {rows} boxes")
        if not np.isfinite(values).all():
            raise UserError("a number is not finite")
    except (ValueError, binascii.Error) as error:
        raise UserError(f"{origin}: the {key} are damaged ({error}); get the file again") from error
    return values.reshape(rows, -1)
