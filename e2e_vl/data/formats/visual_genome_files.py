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
from typing import Any, TypeVar

from detector.errors import UserError
from e2e_vl.data.storage.files import checked_records
from e2e_vl.data.storage.json_entries import json_items
from e2e_vl.data.storage.record_errors import RAISE, RecordErrors
from e2e_vl.records import Number, Record, Side

_Row = TypeVar("_Row", bound=Record)


class _GenomeImageRow(Record):
    image_id: Number
    width: Side
    height: Side
    url: str | None = None
    coco_id: Number | None = None


class _RegionsRow(Record):
    id: Number
    regions: list[Any]


class _RegionRow(Record):
    region_id: Number
    phrase: str


class _QuestionsRow(Record):
    id: Number
    qas: list[Any]


class _GenomeQuestionRow(Record):
    qa_id: Number
    question: str
    answer: str


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
    found = {}
    for _, row in _rows(_GenomeImageRow, path, "images", "image_id", "image", errors):
        folder = PurePosixPath(row.url or "").parent.name
        found[row.image_id] = GenomeImage(row.image_id, (row.height, row.width), sys.intern(folder), row.coco_id)
    return found


def read_region_descriptions(path: str | Path, errors: RecordErrors = RAISE) -> dict[int, list[GenomeText]]:
    """The descriptions of the regions of each image that has any.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no such JSON, an image that is listed twice, or a description that is no text.
    """
    found = {}
    for where, row in _rows(_RegionsRow, path, "region descriptions", "id", "regions of image", errors):
        regions = checked_records(_RegionRow, row.regions, f"{where}: region", "region_id", errors=errors)
        own = [GenomeText(one.region_id, one.phrase) for _, one in regions]
        if own:
            found[row.id] = own
    return found


def read_genome_questions(path: str | Path, errors: RecordErrors = RAISE) -> dict[int, list[GenomeText]]:
    """The questions about each image that has any.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no such JSON, an image that is listed twice, or a question or an answer that is no text.
    """
    found = {}
    for where, row in _rows(_QuestionsRow, path, "questions", "id", "questions of image", errors):
        questions = checked_records(_GenomeQuestionRow, row.qas, f"{where}: question", "qa_id", errors=errors)
        own = [GenomeText(one.qa_id, one.question, sys.intern(one.answer)) for _, one in questions]
        if own:
            found[row.id] = own
    return found


def _rows(
    kind: type[_Row], path: str | Path, what: str, key: str, name: str, errors: RecordErrors
) -> Iterator[tuple[str, _Row]]:
    is_empty = True
    items = json_items(path, what)
    for row in checked_records(kind, items, f"{path}: {name}", key, unique="image ids", errors=errors):
        is_empty = False
        yield row
    if is_empty:
        raise UserError(f"{path}: there are no {what} in it; copy or download the file again")
