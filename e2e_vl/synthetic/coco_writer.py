"""Writers of COCO's instances and captions files.

Annotations of an image are listed in the order of painting: of two that touch, the later one lies in front. Beside
COCO's keys, an annotation has ``attribute_ids``, three indices (colour, texture, size) into the file's list
``attributes`` of {id, name}.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from e2e_vl.synthetic.format_writer import FormatWriter
from e2e_vl.synthetic.scene_records import ATTRIBUTES, CATEGORIES, SceneRecord, by_split


class COCOAnnotationsWriter(FormatWriter[None]):
    """Writes ``instances_train2014.json`` and ``captions_train2014.json``, both over all splits."""

    def write(self, folder: Path, scenes: Sequence[SceneRecord[None]]) -> None:
        write_instances(folder / "instances_train2014.json", scenes)
        _write_captions(folder / "captions_train2014.json", scenes)


class COCODetectionWriter(FormatWriter[None]):
    """Writes ``instances_<split>.json``."""

    def write(self, folder: Path, scenes: Sequence[SceneRecord[None]]) -> None:
        for split, part in by_split(scenes).items():
            write_instances(folder / f"instances_{split}.json", part)


class COCOCaptionsWriter(FormatWriter[None]):
    """Writes ``captions_<split>.json``."""

    def write(self, folder: Path, scenes: Sequence[SceneRecord[None]]) -> None:
        for split, part in by_split(scenes).items():
            _write_captions(folder / f"captions_{split}.json", part)


def write_instances(path: Path, scenes: Sequence[SceneRecord[Any]]) -> None:
    """Write an instances file with the categories (shapes) and attributes of the scenes."""
    annotations = [
        {
            "segmentation": item.outlines,
            "area": float(item.area),
            "iscrowd": 0,
            "image_id": scene.image_id,
            "bbox": item.box,
            "category_id": item.category_id,
            "id": annotation_id,
            "attribute_ids": item.attribute_ids,
        }
        for scene in scenes
        for annotation_id, item in enumerate(scene.objects, start=scene.first_annotation_id)
    ]
    _write(path, scenes, annotations, categories=CATEGORIES, attributes=ATTRIBUTES)


def _write_captions(path: Path, scenes: Sequence[SceneRecord[Any]]) -> None:
    said = [(scene.image_id, caption) for scene in scenes for caption in scene.captions]
    numbered = enumerate(said, start=1)
    _write(path, scenes, [{"image_id": image, "id": number, "caption": text} for number, (image, text) in numbered])


def _write(path: Path, scenes: Sequence[SceneRecord[Any]], annotations: list[dict[str, Any]], **lists: Any) -> None:
    info = {"description": "Drawn scenes in the layout of COCO 2014; not part of COCO.", "url": "", "version": "1.0"}
    info |= {"year": 2014, "contributor": "e2e-vl", "date_created": "2014-01-01 00:00:00"}
    content = {
        "info": info,
        "images": [
            {
                "license": 1,
                "file_name": scene.image_file.name,
                "coco_url": "",
                "height": scene.size[0],
                "width": scene.size[1],
                "date_captured": "2014-01-01 00:00:00",
                "flickr_url": "",
                "id": scene.image_id,
            }
            for scene in scenes
        ],
        "licenses": [{"url": "http://www.apache.org/licenses/LICENSE-2.0", "id": 1, "name": "Apache-2.0"}],
        "annotations": annotations,
        **lists,
    }
    path.write_text(json.dumps(content, separators=(",", ":")), encoding="utf-8")
