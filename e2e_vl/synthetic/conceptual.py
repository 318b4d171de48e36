"""Writers of captioned images as Conceptual Captions come: webdataset shards, and the official VL-BERT code's layout.

Shards are laid out as img2dataset writes them: ``00000.tar`` with ``KEY.jpg``, ``KEY.txt`` and ``KEY.json`` side by
side, and ``00000_stats.json``. The other layout is a file of JSON lines (image, caption words, file of detected boxes)
beside archives, stored without compression, of images and of boxes.
"""

from __future__ import annotations

import base64
import io
import json
import tarfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from e2e_vl.synthetic.coco import CATEGORIES

RECORDS_PER_SHARD = 10_000  # img2dataset's default
FEATURE_DIM = 32
_KEY_DIGITS = 4  # of a record in its shard


@dataclass(frozen=True)
class CaptionedImage:
    """One image with one caption and the boxes of an imitated detector."""

    path: Path  # the image file
    size: tuple[int, int]  # (height, width), pixels
    caption: str
    boxes: list[list[float]]  # [x1, y1, x2, y2] in pixels
    classes: list[list[float]]  # distributions over the background and all categories


def draw_caption(
    captions: Sequence[str], detections: Sequence[dict[str, Any]], rng: np.random.Generator
) -> dict[str, Any]:
    """One of the captions, and a class distribution for each detection: its score for its category, the rest spread.

    Returns:
        "caption"; "boxes" [x1, y1, x2, y2] in pixels; "classes", the background first, as bottom-up attention has it.
    """
    columns = {entry["id"]: column for column, entry in enumerate(CATEGORIES, start=1)}
    boxes, classes = [], []
    for detection in detections:
        x, y, width, height = detection["box"]
        boxes.append([x, y, round(x + width, 4), round(y + height, 4)])
        column = columns[detection["category_id"]]
        rest = rng.dirichlet(np.full(len(CATEGORIES), 0.3)) * (1 - detection["score"])
        classes.append([round(float(value), 6) for value in np.insert(rest, column, detection["score"])])
    return {"caption": str(captions[rng.integers(len(captions))]), "boxes": boxes, "classes": classes}


def write_shards(folder: Path, images: Sequence[CaptionedImage], records_per_shard: int = RECORDS_PER_SHARD) -> None:
    """Write webdataset shards, in the order of the images."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, first in enumerate(range(0, len(images), records_per_shard)):
        part = images[first : first + records_per_shard]
        with tarfile.open(folder / f"{number:05d}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            for row, image in enumerate(part):
                key = f"{number:05d}{row:0{_KEY_DIGITS}d}"
                height, width = image.size
                facts = {"caption": image.caption, "url": "", "key": key, "status": "success", "error_message": None}
                facts |= {"width": width, "height": height, "original_width": width, "original_height": height}
                _add(tar, f"{key}.json", json.dumps(facts, indent=4).encode())
                _add(tar, f"{key}{image.path.suffix}", image.path.read_bytes())
                _add(tar, f"{key}.txt", image.caption.encode())
        stats = {"count": len(part), "successes": len(part), "failed_to_download": 0, "failed_to_resize": 0}
        stats |= {"duration": 0.0, "status_dict": {"success": len(part)}}
        (folder / f"{number:05d}_stats.json").write_text(json.dumps(stats, indent=4), encoding="utf-8")


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def write_official(folder: Path, split: str, images: Sequence[CaptionedImage]) -> None:
    """Write ``<split>.json`` and ``<split>_frcnn.json`` (JSON lines) with the archives that they name."""
    folder.mkdir(parents=True, exist_ok=True)
    lines: list[dict[str, Any]] = []
    with (
        zipfile.ZipFile(folder / f"{split}_image.zip", "w") as pictures,
        zipfile.ZipFile(folder / f"{split}_frcnn.zip", "w") as regions,
    ):
        for number, image in enumerate(images):
            name, boxes_name = f"{number:08d}{image.path.suffix}", f"{number:08d}.json"
            pictures.writestr(zipfile.ZipInfo(name), image.path.read_bytes())
            regions.writestr(zipfile.ZipInfo(boxes_name), json.dumps(_frcnn(image)))
            lines.append(
                {
                    "image": f"{split}_image.zip@/{name}",
                    "caption": image.caption.split(" "),
                    "frcnn": f"{split}_frcnn.zip@/{boxes_name}",
                }
            )
    for file, keys in ((f"{split}.json", ("image", "caption")), (f"{split}_frcnn.json", ("image", "caption", "frcnn"))):
        text = "".join(json.dumps({key: line[key] for key in keys}) + "\n" for line in lines)
        (folder / file).write_text(text, encoding="utf-8")


def _frcnn(image: CaptionedImage) -> dict[str, Any]:
    classes = np.array(image.classes, dtype=np.float32)
    mixing = np.random.default_rng(0).normal(size=(classes.shape[1], FEATURE_DIM))  # boxes of a class look alike
    return {
        "image_w": image.size[1],
        "image_h": image.size[0],
        "num_boxes": len(image.boxes),
        "boxes": _base64(np.array(image.boxes)),
        "classes": _base64(classes),
        "features": _base64(np.maximum(classes @ mixing, 0)),
    }


def _base64(values: np.ndarray) -> str:
    return base64.b64encode(values.astype("<f4").tobytes()).decode()
