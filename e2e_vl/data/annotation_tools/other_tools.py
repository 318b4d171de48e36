"""Exports that are not read, and the export of the same tool that is."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from e2e_vl.data.annotation_tools.files import list_files

LABEL_STUDIO = "Label Studio's own JSON; export COCO"
VIA = "a project of VIA; export Annotations (COCO format)"
CVAT = "CVAT's own XML; export COCO 1.0"
_SUFFIXES = {
    ".tfrecord": "TFRecords; export COCO",
    ".tfrecords": "TFRecords; export COCO",
    ".record": "TFRecords; export COCO",
    ".zip": "an archive; unpack it and give the folder",
    ".tar": "an archive; unpack it and give the folder",
    ".gz": "an archive; unpack it and give the folder",
    ".xlsx": "a workbook; save it as CSV in UTF-8",
    ".xls": "a workbook; save it as CSV in UTF-8",
    ".ods": "a workbook; save it as CSV in UTF-8",
    ".jsonl": "JSON lines; export COCO",
    ".ndjson": "JSON lines; export COCO",
    ".parquet": "a Parquet file; save the table as CSV in UTF-8",
}


def describe_suffix(suffix: str) -> str | None:
    """Say what a file with a suffix is, and what to give instead."""
    return _SUFFIXES.get(suffix.lower())


def describe_coco(content: Any) -> str | None:
    """Say what a JSON file of COCO without boxes is; None for another file."""
    annotations = content.get("annotations") if isinstance(content, dict) else None
    if not isinstance(annotations, list):
        return None
    rows = [row for row in annotations if isinstance(row, dict)]
    if not rows or any("bbox" in row or "segmentation" in row for row in rows):
        return None
    first = rows[0]
    if "category_id" in first:
        return "a file of COCO with labels of whole images; give the one of the instances"
    if "caption" in first:
        return "a file of COCO captions; give the one of the instances"
    if "segments_info" in first:
        return "a panoptic file of COCO; give the one of the instances"
    return None


def describe_json(content: Any) -> str | None:
    """Say what a JSON file is, and the export to choose instead; None if it is not known."""
    if isinstance(content, list):
        if not content or not isinstance(content[0], dict):
            return None
        return _describe_list(content[0].keys())
    if not isinstance(content, dict):
        return None
    keys = content.keys()
    has_regions = any(isinstance(value, dict) and "regions" in value for value in content.values())
    if "_via_img_metadata" in keys or has_regions:
        return VIA
    if "annotations" in keys and "data" in keys:
        return LABEL_STUDIO
    if keys >= {"objects", "size"} or keys >= {"classes", "tags"}:
        return "Supervisely's JSON; export COCO"
    if "assets" in keys:
        return "a project of VoTT; export Pascal VOC or CSV"
    if "data_row" in keys:
        return "Labelbox's JSON; export COCO"
    if keys >= {"items", "categories"}:
        return "Datumaro's JSON; export COCO"
    if keys >= {"item", "annotations"}:
        return "V7's Darwin JSON; export COCO"
    return None


def _describe_list(keys: Collection[str]) -> str | None:
    """Say what a list of objects with these keys is."""
    if "annotator" in keys or ("data" in keys and ("annotations" in keys or "completions" in keys)):
        return LABEL_STUDIO
    if "image" in keys and "annotations" in keys:
        return "Create ML's JSON; export COCO, Pascal VOC or YOLO"
    if {"image_id", "category_id", "bbox"} <= set(keys):
        return "a list of detections (COCO's results); give the file with images, annotations and categories"
    if "data_row" in keys or "Labeled Data" in keys:
        return "Labelbox's JSON; export COCO"
    return None


def describe_xml(root: ElementTree.Element) -> str | None:
    """Say what an XML file is that is not Pascal VOC's; None if it is not known."""
    if root.tag == "annotations" and root.find("image") is not None:
        return CVAT
    if root.tag == "dataset":
        return "imglab's XML; export Pascal VOC"
    if root.tag == "annotation" and root.find("object/polygon/pt") is not None:
        return "the XML of LabelMe on the web; use the JSON files of the LabelMe program"
    return None


def describe_folder(folder: Path) -> str | None:
    """Say what the files of a folder are in which nothing can be read; None if it is not known."""
    tables = list_files(folder, (".csv", ".tsv"))
    if tables:
        return f"tables; give one of them, such as {tables[0]}"
    others = list_files(folder, tuple(_SUFFIXES))
    if others:
        return f"{others[0].name}: {describe_suffix(others[0].suffix)}"
    return None
