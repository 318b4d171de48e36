"""Writer of RefCOCO+ in parquet files of the Hugging Face hub."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from typing_extensions import override

from e2e_vl.parquet import import_parquet
from e2e_vl.synthetic.base import FormatWriter, SceneRecord, by_split
from e2e_vl.synthetic.coco import reference_entries

_ROWS_PER_GROUP = 100  # of files with images, by the package datasets


class ParquetWriter(FormatWriter):
    """Writes `<layout>/<split>-00000-of-00001.parquet` with the expressions of `RefCOCOPlusWriter`.

    The layouts have the columns of these data sets:

    - `images`: a row per image, as jxu124/refcoco-benchmark
    - `objects`: a row per object, as lmms-lab/RefCOCOplus
    - `refs`: a row per ref, without images, as jxu124/refcocoplus
    """

    @classmethod
    @override
    def require_packages(cls) -> None:
        import_parquet()

    @override
    def write(self, folder: Path, scenes: Sequence[SceneRecord]) -> None:
        first_ref_id = 0
        for split, split_scenes in by_split(scenes).items():
            images: list[dict[str, Any]] = []
            objects: list[dict[str, Any]] = []
            refs: list[dict[str, Any]] = []
            for scene in split_scenes:
                entries = reference_entries(scene, first_ref_id)
                first_ref_id += len(entries)
                images.append(_image_row(scene, entries))
                objects += _object_rows(scene, entries)
                refs += _ref_rows(scene, entries)
            for layout, rows in (("images", images), ("objects", objects), ("refs", refs)):
                path = folder / layout / f"{split}-00000-of-00001.parquet"
                path.parent.mkdir(exist_ok=True)
                _write(path, rows)


def _write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    import_parquet()
    import pyarrow

    table = pyarrow.Table.from_pylist(list(rows))
    import_parquet().write_table(table, path, row_group_size=_ROWS_PER_GROUP)


def _image(scene: SceneRecord) -> dict[str, Any]:
    """Return the entry of the column of images."""
    return {"bytes": scene.image_file.read_bytes(), "path": scene.image_file.name}


def _image_info(scene: SceneRecord) -> dict[str, Any]:
    return {
        "file_name": scene.image_file.name,
        "height": scene.size[0],
        "width": scene.size[1],
        "id": scene.image_id,
    }


def _referred(scene: SceneRecord, entries: Sequence[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield REFER's entry of each object that is referred to, and its annotation as in COCO."""
    for entry in entries:
        item = scene.objects[entry["ann_id"] - scene.first_annotation_id]
        annotation = {
            "area": float(item.area),
            "bbox": item.box,
            "category_id": item.category_id,
            "id": entry["ann_id"],
            "image_id": scene.image_id,
            "iscrowd": 0,
            "segmentation": [[float(value) for value in outline] for outline in item.outlines],
        }
        yield entry, annotation


def _image_row(scene: SceneRecord, entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the row of an image with all that is referred to."""
    ref_list = [{"ann_info": annotation, "ref_info": ref} for ref, annotation in _referred(scene, entries)]
    return {"ref_list": ref_list, "image_info": _image_info(scene), "image": _image(scene)}


def _object_rows(scene: SceneRecord, entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each object that is referred to; it has its first outline only, as in the release."""
    rows = []
    for ref, annotation in _referred(scene, entries):
        row = {
            "question_id": str(ref["ann_id"]),
            "image": _image(scene),
            "question": "Provide a short description for this region.",
            "answer": [sentence["sent"] for sentence in ref["sentences"]],
            "segmentation": annotation["segmentation"][0],
            "bbox": annotation["bbox"],
            "iscrowd": 0,
            "file_name": ref["file_name"],
        }
        rows.append(row)
    return rows


def _ref_rows(scene: SceneRecord, entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return REFER's entry of each object that is referred to, with annotation and image as JSON."""
    rows = []
    for ref, annotation in _referred(scene, entries):
        x, y, width, height = annotation["bbox"]
        row = {
            **ref,
            "raw_anns": json.dumps(annotation),
            "raw_image_info": json.dumps(_image_info(scene)),
            "image_path": f"coco/train2014/{scene.image_file.name}",
            "bbox": [x, y, x + width, y + height],
            "captions": [sentence["sent"] for sentence in ref["sentences"]],
        }
        rows.append(row)
    return rows
