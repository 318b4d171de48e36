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
import json
from pathlib import Path
from typing import Any

import numpy as np

from e2e_vl.data.formats.caption_sources import CaptionSource
from e2e_vl.data.loading.grouping import ConsecutiveGroups
from e2e_vl.data.storage.archives import ArchivedFiles
from e2e_vl.data.storage.corpus import TextLines
from e2e_vl.data.storage.files import require_keys
from e2e_vl.samples import CandidateBoxes, EncodedImage


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
        self._archives.prepare(first["image"])
        if self.with_boxes:
            self._archives.prepare(first["frcnn"])

    def caption(self, text: int) -> str:
        words = self._record(text)["caption"]
        if isinstance(words, list) and all(isinstance(word, str) for word in words):
            words = " ".join(words)
        if not isinstance(words, str) or not words.strip():
            raise ValueError(f"{self.path}: the caption of line {self._where(text)} is not a list of words")
        return words

    def name(self, group: int) -> str:
        return self._record(group)["image"]

    def image(self, group: int) -> Path | EncodedImage:
        name = self._record(group)["image"]
        found = self._archives.find(name)
        return found if isinstance(found, Path) else EncodedImage(self._archives.read(name), f"{found[0]}: {found[1]}")

    def boxes(self, group: int) -> CandidateBoxes | None:
        if not self.with_boxes:
            return None
        name = self._record(group)["frcnn"]
        origin = str(self._archives.root / name)
        try:
            content = json.loads(self._archives.read(name))
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(f"{origin}: the boxes are not valid JSON ({error}); get the file again") from error
        keys = ("image_w", "image_h", "num_boxes", "boxes", "classes")
        require_keys(content, (*keys, "features") if self.with_features else keys, origin)
        boxes, classes = (_matrix(content, key, origin) for key in ("boxes", "classes"))
        if boxes.shape[1:] != (4,):
            raise ValueError(f"{origin}: boxes have {boxes.shape[1]} numbers each, expected 4")
        order = np.argsort(-classes.max(axis=1), kind="stable")
        features = _matrix(content, "features", origin)[order] if self.with_features else None
        return CandidateBoxes(
            boxes[order],
            origin,
            classes[order],
            (int(content["image_h"]), int(content["image_w"])),
            features,
            None if features is None else features.mean(axis=0),
        )

    def _record(self, number: int) -> dict[str, Any]:
        where = f"{self.path}: line {self._where(number)}"
        try:
            record = json.loads(self.lines[number])
        except json.JSONDecodeError as error:
            raise ValueError(f"{where} is not valid JSON ({error}); one object is expected on each line") from error
        require_keys(record, ("image", "caption", "frcnn") if self.with_boxes else ("image", "caption"), where)
        return record

    def _where(self, number: int) -> str:
        return f"{number + 1} (blank ones not counted)"


def _matrix(content: dict[str, Any], key: str, origin: str) -> np.ndarray:
    """float32 [R, columns]."""
    try:
        values = np.frombuffer(base64.b64decode(content[key]), dtype="<f4")
        rows = int(content["num_boxes"])
        if rows < 1 or not len(values) or len(values) % rows:
            raise ValueError(f"{len(values)} numbers for {rows} boxes")
    except (ValueError, TypeError, binascii.Error) as error:
        raise ValueError(f"{origin}: the {key} are damaged ({error}); get the file again") from error
    return values.reshape(rows, -1)
