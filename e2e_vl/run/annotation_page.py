"""A page with annotated boxes drawn on their images, which shows at a glance whether a conversion is right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from detector.images import load_image
from e2e_vl.drawing import PALETTE, draw_boxes
from e2e_vl.run.report import Picture, encode_picture, render

MOST_PICTURES = 60


class _Card(NamedTuple):
    """An image on the page."""

    file_name: str
    picture: Picture
    split: str  # "" = no expression is about it
    lines: list[str]  # of each box: its id in the export, its category and the expressions about it


def write_annotation_page(
    path: Path, instances: Mapping[str, Any], refs: Sequence[Mapping[str, Any]], folder: Path, notes: Mapping[str, list]
) -> Path:
    """Write a page with at most `MOST_PICTURES` images, evenly spaced in the order of the instances file.

    Args:
        instances: content of a COCO instances file, whose annotations also have `id_in_export`.
        refs: content of a refs file.
        folder: of the images.
        notes: remark -> the records that it is about.
    """
    images = instances["images"]
    rows = np.linspace(0, len(images) - 1, min(len(images), MOST_PICTURES)).round().astype(int)
    names = {category["id"]: category["name"] for category in instances["categories"]}
    boxes_of: dict[Any, list[Mapping[str, Any]]] = {}
    for annotation in instances["annotations"]:
        boxes_of.setdefault(annotation["image_id"], []).append(annotation)
    ref_of = {ref["ann_id"]: ref for ref in refs}
    cards = []
    for row in rows:
        image = images[row]
        annotations = boxes_of[image["id"]]
        splits: set[str] = set()
        lines = []
        for annotation in annotations:
            line = _label(annotation, names)
            ref = ref_of.get(annotation["id"])
            if ref is not None:
                splits.add(ref["split"])
                texts = "; ".join(f"“{sentence['sent']}”" for sentence in ref["sentences"])
                if texts:
                    line += f": {texts}"
            lines.append(line)
        picture = _draw(folder / image["file_name"], annotations, names)
        cards.append(_Card(image["file_name"], picture, ", ".join(sorted(splits)), lines))
    counts = Counter(names[annotation["category_id"]] for annotation in instances["annotations"])
    return render(
        path,
        "annotation_page.html.jinja",
        cards=cards,
        images=len(images),
        boxes=len(instances["annotations"]),
        expressions=sum(len(ref["sentences"]) for ref in refs),
        categories=counts.most_common(),
        notes=notes,
    )


def _label(annotation: Mapping[str, Any], names: Mapping[int, str]) -> str:
    return f"{annotation['id_in_export']} {names[annotation['category_id']]}"


def _draw(path: Path, annotations: Sequence[Mapping[str, Any]], names: Mapping[int, str]) -> Picture:
    """Draw the boxes of an image in a colour per category; the labels are those of the list below it."""
    try:
        image = load_image(path, "RGB")
    except (OSError, ValueError) as error:  # the sizes were read from its header, but its pixels are damaged
        return Picture(problem=str(error))
    corners = np.array([annotation["bbox"] for annotation in annotations], dtype=np.float64)
    corners[:, 2:] += corners[:, :2]
    labels = [_label(annotation, names) for annotation in annotations]
    colours = [PALETTE[annotation["category_id"] % len(PALETTE)] for annotation in annotations]
    return encode_picture(draw_boxes(image, corners, labels, colours))
