"""Files in the form of VCR's metadata about COCO's drawn images: what a detector of VCR's classes may have found."""

from __future__ import annotations

import json
from pathlib import Path

from e2e_vl.data.config import CLASS_NAMES


def write_metadata(instances: Path, folder: Path) -> None:
    """A file per image of a COCO file: its boxes with scores 0.1, 0.2, ..., its corners as outlines."""
    content = json.loads(instances.read_text())
    for image in content["images"]:
        rows = [row for row in content["annotations"] if row["image_id"] == image["id"]]
        boxes = [[x, y, x + width, y + height] for x, y, width, height in (row["bbox"] for row in rows)]
        file = folder / Path(image["file_name"]).with_suffix(".json").name
        scores = [min((row + 1) / 10, 1.0) for row in range(len(rows))]
        found = {
            "boxes": [[*box, score] for box, score in zip(boxes, scores, strict=True)],
            "segms": [[[[x1, y1], [x2, y1], [x2, y2], [x1, y2]]] for x1, y1, x2, y2 in boxes],
            "names": [CLASS_NAMES[row["category_id"] % len(CLASS_NAMES)] for row in rows],
            "width": image["width"],
            "height": image["height"],
        }
        file.write_text(json.dumps(found))
