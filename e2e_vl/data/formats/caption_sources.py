"""Where captions, their images and candidate boxes come from: one small interface, and COCO's captions.

Conceptual Captions are in `shards.py` (webdataset) and `conceptual.py` (the official VL-BERT layout).
"""

from __future__ import annotations

import abc
import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from detector.errors import UserError
from detector.user_paths import user_path
from e2e_vl.data.loading.grouping import ConsecutiveGroups
from e2e_vl.data.storage.files import checked_records, read_json
from e2e_vl.data.storage.record_errors import RAISE, RecordErrors
from e2e_vl.data.storage.record_table import RecordTable, text_column
from e2e_vl.file_names import inside
from e2e_vl.records import Id, Name, Record, Side
from e2e_vl.samples import CandidateBoxes, EncodedImage

logger = logging.getLogger(__name__)


class _CaptionsFile(Record):
    images: list[Any]
    annotations: list[Any]


class _CaptionedRow(Record):
    id: Id
    file_name: Name
    width: Side | None = None
    height: Side | None = None


class _CaptionRow(Record):
    image_id: Id
    caption: str


class CaptionSource(abc.ABC):
    """Images with captions. Texts are numbered image by image.

    Attributes:
        path: the file or folder, for error messages.
        groups: the captions of each image.
    """

    path: Path
    groups: ConsecutiveGroups

    @abc.abstractmethod
    def caption(self, text: int) -> str:
        """One caption."""

    @abc.abstractmethod
    def name(self, group: int) -> str:
        """Id of an image, under which a file of boxes has it."""

    @abc.abstractmethod
    def image(self, group: int) -> Path | EncodedImage:
        """The image file, or its content.

        Raises:
            FileNotFoundError: it is missing.
        """

    def image_size(self, group: int) -> tuple[int, int] | None:
        """(height, width) that the annotations state, or None."""
        return None

    def boxes(self, group: int) -> CandidateBoxes | None:
        """Boxes that come with the captions themselves, or None."""
        return None


class CocoCaptions(CaptionSource):
    """COCO's `captions_*.json`: about five captions per image.

    Args:
        captions_file, images_root: the file, and the folder of the images that it names.
        errors: what becomes of an error about one record.

    Attributes:
        image_ids: ids of the images with captions, in file order. Images without a caption are left out and counted in
            the log.

    Raises:
        FileNotFoundError: no such file.
        ValueError: invalid JSON, a missing key, a duplicate image, a caption of an unknown image, an empty caption, or
            no caption at all; file and record are named.
    """

    def __init__(self, captions_file: str | Path, images_root: str | Path, errors: RecordErrors = RAISE) -> None:
        self.path = user_path(captions_file)
        self.images_root = user_path(images_root)
        content = read_json(self.path, "captions", _CaptionsFile)
        what, unique = f"{self.path}: image", "image ids"
        found = checked_records(_CaptionedRow, content.images, what, "id", unique=unique, errors=errors)
        rows = {row.id: row for _, row in found}
        captions: dict[int, list[str]] = {image_id: [] for image_id in rows}
        for where, row in checked_records(_CaptionRow, content.annotations, f"{self.path}: caption", errors=errors):
            with errors:
                if row.image_id not in rows:
                    raise UserError(f"{where} is about image {row.image_id}, which is not among the file's images")
                if not row.caption.strip():
                    raise UserError(f"{where} (of image {row.image_id}) is empty; remove it")
                captions[row.image_id].append(row.caption)
        self.image_ids = [image_id for image_id in rows if captions[image_id]]
        if not self.image_ids:
            raise UserError(f"{self.path}: there are no captions in the file")
        if len(self.image_ids) < len(rows):
            logger.warning("%s: %d images have no caption.", self.path, len(rows) - len(self.image_ids))
        self._rows = RecordTable(_CaptionedImage, (_captioned(rows[image_id]) for image_id in self.image_ids))
        self._captions = text_column(caption for image_id in self.image_ids for caption in captions[image_id])
        self.groups = ConsecutiveGroups([len(captions[image_id]) for image_id in self.image_ids])

    def caption(self, text: int) -> str:
        return self._captions[text]

    def name(self, group: int) -> str:
        return str(self.image_ids[group])

    def image(self, group: int) -> Path:
        where = f"{self.path}: image {self.name(group)}"
        return inside(self.images_root, self._rows[group].file_name, where, follows_links=True)

    def image_size(self, group: int) -> tuple[int, int] | None:
        return self._rows[group].size


@dataclasses.dataclass(frozen=True)
class _CaptionedImage:
    file_name: str
    size: tuple[int, int] | None  # (height, width)


def _captioned(row: _CaptionedRow) -> _CaptionedImage:
    size = None if row.height is None or row.width is None else (row.height, row.width)
    return _CaptionedImage(row.file_name, size)


class JoinedCaptions(CaptionSource):
    """Captions of several files, one after the other.

    Raises:
        ValueError: an image in two of the files.
    """

    def __init__(self, parts: Sequence[CocoCaptions]) -> None:
        self.parts = parts
        self.path = parts[0].path
        self.groups = ConsecutiveGroups(np.concatenate([np.diff(part.groups.starts) for part in parts]))
        self.image_ids = [image_id for part in parts for image_id in part.image_ids]
        self._first = np.cumsum([0, *(len(part.groups) for part in parts)])  # group of each part
        seen: set[int] = set()
        for image_id in self.image_ids:
            if image_id in seen:
                files = ", ".join(str(part.path) for part in parts)
                raise UserError(f"{files}: image {image_id} is in two of the files; name each image once")
            seen.add(image_id)

    def _of_group(self, group: int) -> tuple[CocoCaptions, int]:
        number = int(np.searchsorted(self._first, group, side="right")) - 1
        return self.parts[number], group - int(self._first[number])

    def caption(self, text: int) -> str:
        group = self.groups.of_text(text)
        part, own = self._of_group(group)
        return part.caption(part.groups[own][text - self.groups[group][0]])

    def name(self, group: int) -> str:
        return str(self.image_ids[group])

    def image(self, group: int) -> Path:
        part, own = self._of_group(group)
        return part.image(own)

    def image_size(self, group: int) -> tuple[int, int] | None:
        part, own = self._of_group(group)
        return part.image_size(own)
