"""Pascal VOC's XML files, one per image (LabelImg's default, Roboflow, CVAT, Label Studio).

The files of Pascal VOC itself count pixels from 1, and both corners lie in the box: xmin = 1 and xmax = width cover the
image, which is 0 to width here. Tools write the corners as they were drawn (LabelImg truncates them to integers), so
their numbers are taken as they are. The database that a file names tells which it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from e2e_vl.data.annotation_tools.files import relative_name
from e2e_vl.data.annotation_tools.records import Annotation, Remarks, beside, split_of_path
from e2e_vl.io import FourNumbers


def read_voc(path: Path, root: ElementTree.Element, source: Path, remarks: Remarks) -> Iterator[Annotation]:
    """Read the boxes of a file; the id of a box is the number of its object, from 1.

    Args:
        root: of the XML; ElementTree reads no other files, and expat limits what entities may expand to.
    """
    name = relative_name(path, source)
    stem = name.rpartition(".")[0]
    image_name = (root.findtext("filename") or "").strip()
    image = beside(name, image_name) if image_name else stem
    size = _read_size(root)
    is_official = "VOC" in (root.findtext("source/database") or "")
    for number, element in enumerate(root.findall("object"), start=1):
        where = f"{name}, object {number}"
        label = (element.findtext("name") or "").strip()
        corners = _read_corners(element)
        if corners is None or not label:
            remarks.refuse("objects without a name and a bndbox of four numbers", where)
            continue
        x1, y1, x2, y2 = corners
        if is_official:
            x1 -= 1
            y1 -= 1
        yield Annotation(
            where,
            image,
            label,
            (x1, y1, x2, y2),
            id=number,
            states_corners=True,
            image_size=size,
            other_name=stem,  # LabelImg keeps the old file name of a renamed image
            folder_split=split_of_path(name),
        )


def _read_size(root: ElementTree.Element) -> tuple[int, int] | None:
    """Return (width, height); None where the file has none, or 0 0, as some tools write."""
    try:
        width = int(float(root.findtext("size/width", "")))
        height = int(float(root.findtext("size/height", "")))
    except ValueError:
        return None
    if width <= 0 or height <= 0:
        return None
    return width, height


def _read_corners(element: ElementTree.Element) -> FourNumbers | None:
    try:
        x1, y1, x2, y2 = (float(element.findtext(f"bndbox/{side}", "")) for side in ("xmin", "ymin", "xmax", "ymax"))
    except ValueError:
        return None
    if not math.isfinite(x1 + y1 + x2 + y2):
        return None
    return x1, y1, x2, y2
