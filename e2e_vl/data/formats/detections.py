"""Reader of detection files in MAttNet's format: one flat list of boxes for all images.

Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from pathlib import Path

import numpy as np

from detector.errors import UserError
from detector.user_paths import user_path
from e2e_vl.data.storage.files import checked_records, corners_of, read_json
from e2e_vl.data.storage.record_errors import RAISE, RecordErrors
from e2e_vl.records import Box, Id, Record, Score


class _ScoredDetection(Record):
    image_id: Id
    box: Box
    category_id: Id
    score: Score


@dataclasses.dataclass(frozen=True)
class ImageDetections:
    """Detected boxes of one image, in file order."""

    boxes: np.ndarray  # float64 [R, 4], xyxy (x2 = x + w), pixels of the stored image
    scores: np.ndarray  # float32 [R]


class DetectionsFile:
    """`*_dets.json`: a list of {`image_id`, `box` [x, y, w, h], `category_id`, `score`, ...}, in no particular order.

    Args:
        path: the file.
        errors: what becomes of an error about one detection.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the older layout with a key `dets`, a missing key, a box that is empty, inverted or not finite, or a
            score that is not finite; the file and the detection are named.
    """

    def __init__(self, path: str | Path, errors: RecordErrors = RAISE) -> None:
        self.path = user_path(path)
        rows = read_json(self.path, "detections")
        if isinstance(rows, dict) and "dets" in rows:
            raise UserError(
                f"{self.path}: has the older layout with a key 'dets'; expected MAttNet's flat list of "
                "{image_id, box [x, y, width, height], category_id, score}"
            )
        if not isinstance(rows, list):
            raise UserError(f"{self.path}: holds a {type(rows).__name__}, expected a flat list of detections")
        boxes, scores = defaultdict(list), defaultdict(list)
        for where, row in checked_records(_ScoredDetection, rows, f"{self.path}: detection", "det_id", errors=errors):
            with errors:
                boxes[row.image_id].append(corners_of(row.box, where))
                scores[row.image_id].append(row.score)
        self.by_image = {
            image_id: ImageDetections(np.array(rows, dtype=np.float64), np.array(scores[image_id], dtype=np.float32))
            for image_id, rows in boxes.items()
        }
