"""Files of predictions for referring expressions.

No server takes them; the literature compares on one's own machine. The file is a JSON list with an object per
expression: {"ref_id": int, "sent_id": int, "box": [x1, y1, x2, y2]}, in pixels of the stored image, null where the
model found nothing. (A file by `ref_id` alone could not tell a referred object's several expressions apart.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from e2e_vl.evaluation.submission_files import write_list

_KEYS = ("ref_id", "sent_id", "box")


def write_submission(path: str | Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Write the file, an expression a line, in the order of the records.

    Raises:
        ValueError: an expression twice, ids that are no whole numbers, or a box that is not four finite numbers.
    """
    entries = [{key: record[key] for key in _KEYS} for record in records]
    seen = set()
    for number, entry in enumerate(entries):
        key, box = (entry["ref_id"], entry["sent_id"]), entry["box"]
        if any(type(value) is not int for value in key):
            raise ValueError(f"{path}: entry {number} has the ids {key}, expected two whole numbers.")
        if key in seen:
            raise ValueError(f"{path}: the expression {key[1]} of ref {key[0]} is there twice; remove one of them.")
        seen.add(key)
        is_box = isinstance(box, list) and len(box) == 4
        is_box = is_box and all(type(value) in (int, float) and math.isfinite(value) for value in box)
        if box is not None and not is_box:
            raise ValueError(f"{path}: expression {key[1]} has the box {box!r}, expected [x1, y1, x2, y2] or null.")
    write_list(path, entries)
