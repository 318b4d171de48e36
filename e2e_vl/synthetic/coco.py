"""Writer of COCO's instances and captions files.

Annotations of an image are listed in the order of painting: of two that touch, the later one lies in front. Beside
COCO's keys an annotation has ``attribute_ids``, three indices (colour, texture, size) into the file's list
``attributes`` of {id, name}.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from e2e_vl.synthetic.scenes import COLOURS, SHAPES, SIZES, TEXTURES, Look

CATEGORIES = [{"supercategory": "shape", "id": i + 1, "name": name} for i, name in enumerate(SHAPES)]
ATTRIBUTES = [{"id": i, "name": name} for i, name in enumerate([*COLOURS, *TEXTURES, *SIZES])]
_CATEGORY_IDS = {entry["name"]: entry["id"] for entry in CATEGORIES}
_ATTRIBUTE_IDS = {entry["name"]: entry["id"] for entry in ATTRIBUTES}


def image_file_name(image_id: int, extension: str) -> str:
    """COCO's name of a train2014 image."""
    return f"COCO_train2014_{image_id:012d}.{extension}"


def image_record(image_id: int, file_name: str, height: int, width: int) -> dict[str, Any]:
    """An entry of ``images``."""
    return {
        "license": 1,
        "file_name": file_name,
        "coco_url": "",
        "height": height,
        "width": width,
        "date_captured": "2014-01-01 00:00:00",
        "flickr_url": "",
        "id": image_id,
    }


def annotation_record(
    annotation_id: int, image_id: int, look: Look, box: list[float], area: int, segmentation: list[list[int]]
) -> dict[str, Any]:
    """An entry of ``annotations``; ``box`` is [x, y, w, h] in pixels."""
    return {
        "segmentation": segmentation,
        "area": float(area),
        "iscrowd": 0,
        "image_id": image_id,
        "bbox": box,
        "category_id": category_id(look.shape),
        "id": annotation_id,
        "attribute_ids": attribute_ids(look),
    }


def attribute_ids(look: Look) -> list[int]:
    """Colour, texture and size as indices into ``ATTRIBUTES``."""
    return [_ATTRIBUTE_IDS[value] for value in (look.colour, look.texture, look.size)]


def category_id(shape: str) -> int:
    """COCO category id of a shape."""
    return _CATEGORY_IDS[shape]


def polygons(mask: np.ndarray) -> list[list[int]]:
    """Outlines of a mask along the edges of its pixels.

    Rasterised by pycocotools they give the mask back exactly; holes are left out, as COCO's polygons cannot have any.

    Args:
        mask: bool [H, W].

    Returns:
        one flat list x, y, x, y, ... of pixel coordinates per part.
    """
    # In the doubled picture a contour runs through the first or the second half of a pixel; rounding up after halving
    # moves it to the pixel's edge on that side.
    x, y, w, h = cv2.boundingRect(mask.view(np.uint8))
    doubled = cv2.resize(mask[y : y + h, x : x + w].view(np.uint8), (2 * w, 2 * h), interpolation=cv2.INTER_NEAREST)
    contours, _ = cv2.findContours(doubled, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_NONE)
    origin = np.array([x, y])
    return [(_corners((contour[:, 0] + 1) // 2) + origin).ravel().tolist() for contour in contours]


def _corners(path: np.ndarray) -> np.ndarray:
    """The points of a closed path of axis-parallel steps at which it turns, int [P, 2] -> int [C, 2]."""
    steps = np.diff(path, axis=0, append=path[:1])
    moved = steps.any(axis=1)
    path, steps = path[moved], np.sign(steps[moved])
    turned = (np.diff(steps, axis=0, prepend=steps[-1:]) != 0).any(axis=1)
    return path[turned]


def write_instances(path: Path, images: list[dict[str, Any]], annotations: list[dict[str, Any]]) -> None:
    """Write an instances file with the categories (shapes) and attributes of the scenes."""
    frame = _frame(images, annotations)
    _write(path, frame | {"categories": CATEGORIES, "attributes": ATTRIBUTES})


def write_captions(path: Path, images: list[dict[str, Any]], captions: dict[int, list[str]]) -> None:
    """Write a captions file; ``captions`` maps an image id to its captions."""
    annotations = [
        {"image_id": image_id, "id": number, "caption": caption}
        for number, (image_id, caption) in enumerate(
            ((image_id, caption) for image_id, items in captions.items() for caption in items), start=1
        )
    ]
    _write(path, _frame(images, annotations))


def _frame(images: list[dict[str, Any]], annotations: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "info": {
            "description": "Drawn scenes in the layout of COCO 2014; not part of COCO.",
            "url": "",
            "version": "1.0",
            "year": 2014,
            "contributor": "e2e-vl",
            "date_created": "2014-01-01 00:00:00",
        },
        "images": images,
        "licenses": [{"url": "http://www.apache.org/licenses/LICENSE-2.0", "id": 1, "name": "Apache-2.0"}],
        "annotations": annotations,
    }


def _write(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, separators=(",", ":")), encoding="utf-8")
