"""Readers of the official Visual Genome files: images, region descriptions, and questions with answers.

    image_data.json            list of {"image_id", "width", "height", "url", "coco_id", ...}
    region_descriptions.json   list of {"id": image id, "regions": [{"region_id", "phrase", ...}, ...]}
    question_answers.json      list of {"id": image id, "qas": [{"qa_id", "question", "answer", ...}, ...]}

The folder of an image, VG_100K or VG_100K_2, stands in its address. Sizes are those of the stored images. The files
are read image by image.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from e2e_vl.data.storage.files import checked_records
from e2e_vl.data.storage.json_entries import json_items
from e2e_vl.data.storage.record_errors import RAISE, RecordErrors


@dataclasses.dataclass(frozen=True, slots=True)
class GenomeImage:
    """One image of Visual Genome."""

    image_id: int
    size: tuple[int, int]  # (height, width)
    folder: str  # such as VG_100K_2; "" where the file has no address
    coco_id: int | None  # the same image in COCO; None: COCO does not have it


@dataclasses.dataclass(frozen=True, slots=True)
class GenomeText:
    """A description of a region, or a question with its answer."""

    number: int  # id of the region or of the question
    words: str
    answer: str | None = None  # None: it is no question


def read_genome_images(path: str | Path, errors: RecordErrors = RAISE) -> dict[int, GenomeImage]:
    """The images by their ids.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no such JSON, or an image that is listed twice.
    """
    keys = ("image_id", "width", "height")
    found = {}
    for _, row in _rows(path, "images", keys, "image_id", "image", errors):
        with errors:
            folder = PurePosixPath(row.get("url") or "").parent.name
            size = row["height"], row["width"]
            found[row["image_id"]] = GenomeImage(row["image_id"], size, sys.intern(folder), row.get("coco_id"))
    return found


def read_region_descriptions(path: str | Path, errors: RecordErrors = RAISE) -> dict[int, list[GenomeText]]:
    """The descriptions of the regions of each image that has any.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no such JSON, an image that is listed twice, or a description that is no text.
    """
    found = {}
    keys = ("region_id", "phrase")
    for where, row in _rows(path, "region descriptions", ("id", "regions"), "id", "regions of image", errors):
        with errors:
            own = []
            for name, one in checked_records(row["regions"], keys, f"{where}: region", "region_id", errors=errors):
                with errors:
                    own.append(GenomeText(one["region_id"], _words(one["phrase"], name)))
            if own:
                found[row["id"]] = own
    return found


def read_genome_questions(path: str | Path, errors: RecordErrors = RAISE) -> dict[int, list[GenomeText]]:
    """The questions about each image that has any.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no such JSON, an image that is listed twice, or a question or an answer that is no text.
    """
    found = {}
    keys = ("qa_id", "question", "answer")
    for where, row in _rows(path, "questions", ("id", "qas"), "id", "questions of image", errors):
        with errors:
            own = []
            for name, one in checked_records(row["qas"], keys, f"{where}: question", "qa_id", errors=errors):
                with errors:
                    answer = sys.intern(_words(one["answer"], name))
                    own.append(GenomeText(one["qa_id"], _words(one["question"], name), answer))
            if own:
                found[row["id"]] = own
    return found


def _rows(
    path: str | Path, what: str, keys: tuple[str, ...], key: str, name: str, errors: RecordErrors
) -> Iterator[tuple[str, dict[str, Any]]]:
    is_empty = True
    items = json_items(path, what)
    for row in checked_records(items, keys, f"{path}: {name}", key, unique="image ids", errors=errors):
        is_empty = False
        yield row
    if is_empty:
        raise ValueError(f"{path}: there are no {what} in it; copy or download the file again")


def _words(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where} has {value!r} in the place of a text")
    return value
