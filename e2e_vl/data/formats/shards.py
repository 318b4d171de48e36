"""Captions in webdataset shards, in the layout that img2dataset writes.

    00000.tar          000000000.jpg  000000000.txt  000000000.json  000000001.jpg ...
    00000_stats.json   {"count", "successes", "failed_to_download", "failed_to_resize", ...}
    00000.parquet      not read

Images whose download failed are not in the tar file; the statistics tell how many they were.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from tqdm.auto import tqdm

from detector.errors import MissingFileError, UserError
from detector.file_faults import reading
from detector.user_paths import user_path
from e2e_vl.data.formats.caption_sources import CaptionSource
from e2e_vl.data.loading.grouping import ConsecutiveGroups
from e2e_vl.data.storage.archives import LARGEST_MEMBER
from e2e_vl.data.storage.files import read_json, require_file
from e2e_vl.data.storage.index_files import ArrayFile, OpenFiles, cached_index
from e2e_vl.data.storage.tar_headers import DamagedTarError, TarMember, member_at, members_of
from e2e_vl.records import Count, Record
from e2e_vl.samples import EncodedImage

logger = logging.getLogger(__name__)

_VERSION = "shard 4"
_IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp")
_COLUMNS = 7  # offset of the image's headers; offset, size and CRC-32 of the image, and of the caption
_LONGEST = {"image": LARGEST_MEMBER, "caption": 1 << 20}  # bytes
_CHUNK = 1 << 20


class _Statistics(Record):
    count: Count
    successes: Count


class ShardCaptions(CaptionSource):
    """One caption per image, from tar files, in any order: an index knows where in its file each record lies.

    webdataset itself only streams shards, in an order of its own with a buffer to shuffle, so it knows neither epochs
    that every text is seen once in, nor how to resume in the middle, nor how to give several processes equal shares.
    (Its random-access part `wids` is gone since version 1.0.)

    The format has no checksums of contents, so the index has them: making it reads every byte once, and an image or a
    caption whose bytes change later is refused.

    Args:
        shards: a folder (all its `*.tar`) or a pattern such as `cc3m/0000*.tar`.
        cache: folder that keeps the indices.

    Attributes:
        left_out: how many records were left out, by reason: "no image", "no caption" (none or an empty one), and
            "failed" (downloads and resizes, by the statistics files; -1 unless every shard has one).

    Raises:
        FileNotFoundError: no shard there.
        ValueError: a file that is no tar file, is cut off or damaged, or holds links or devices; two records, images or
            captions with one key in a shard; an image or a caption that is far too large; or not one complete record
            in all of them.
    """

    def __init__(self, shards: str | Path, cache: str | Path) -> None:
        self.path = user_path(shards)
        self.shards = sorted(self.path.glob("*.tar") if self.path.is_dir() else self.path.parent.glob(self.path.name))
        if not self.shards:
            raise MissingFileError(f"{self.path}: no shards (*.tar) there; check data.files.shards")
        for shard in self.shards:
            require_file(shard, "shard")  # a pipe would be waited for without end
        self._files = OpenFiles(limit=64)
        self._indices = [
            ArrayFile(cached_index([shard], Path(cache), _VERSION, lambda s=shard: _rows(s), _COLUMNS), self._files)
            for shard in tqdm(self.shards, desc="indices of shards", unit=" shards", delay=1, leave=False)
        ]
        # the first row of an index counts what is left out
        self._records = ConsecutiveGroups([len(index) - 1 for index in self._indices])
        bad = np.sum([index[0] for index in self._indices], axis=0)
        self.left_out = {"no image": int(bad[0]), "no caption": int(bad[1]), "failed": _failed(self.shards)}
        number = self._records.num_texts
        if not number:
            raise UserError(f"{self.path}: the {len(self.shards)} shards hold no image with a caption")
        self.groups = ConsecutiveGroups(np.ones(number, dtype=np.int64))
        failed = self.left_out["failed"]
        logger.log(
            logging.WARNING if bad[:2].any() else logging.INFO,
            "%s: %d images with captions in %d shards; left out: %d captions without image, %d images without caption; "
            "failed downloads: %s.",
            *(self.path, number, len(self.shards), bad[0], bad[1]),
            "not known" if failed < 0 else failed,
        )

    def caption(self, text: int) -> str:
        shard, row = self._find(text)
        data = self._content(shard, row[4:], "caption", text)
        try:
            return data.decode("utf-8").strip()
        except UnicodeDecodeError as error:
            raise UserError(f"{shard}: the caption of record {self.name(text)} is not UTF-8 text") from error

    def name(self, group: int) -> str:
        """The record's key."""
        folder, slash, file = self._member(group).rpartition("/")
        return folder + slash + file.partition(".")[0]

    def image(self, group: int) -> EncodedImage:
        shard, row = self._find(group)
        return EncodedImage(self._content(shard, row[1:4], "image", group), f"{shard}: {self._member(group)}")

    def _content(self, shard: Path, place: np.ndarray, what: str, record: int) -> bytes:
        """What lies at a place of offset, size and CRC-32."""
        offset, size, checksum = map(int, place)
        data = self._files.read(shard, offset, size)
        if zlib.crc32(data) != checksum:
            raise UserError(
                f"{shard}: the {what} of record {self.name(record)} is not as it was when the index of the file was "
                "made (its checksum differs); get the file again"
            )
        return data

    def _find(self, record: int) -> tuple[Path, np.ndarray]:
        shard = self._records.of_text(record)
        return self.shards[shard], self._indices[shard][record - self._records[shard].start + 1]

    def _member(self, record: int) -> str:
        """Name of the record's image in its shard, from the headers before it."""
        shard, row = self._find(record)
        try:
            member = member_at(self._files[shard], int(row[0]))
        except DamagedTarError as error:
            raise UserError(f"{shard}: has changed while it was in use ({error}); start again") from error
        return member.name


def _rows(shard: Path) -> Iterator[np.ndarray]:
    """int64 [1 + n, 7]: the counts of records without image and without caption, then the complete records."""
    rows: list[tuple[int, ...]] = []
    without_image = without_caption = 0
    try:
        with reading(shard), shard.open("rb") as file:
            # the walk over the headers goes on behind each record, wherever its content was read
            for record in _records(members_of(file), shard):
                image, caption = record.get("image"), record.get("caption")
                if image is None or image.size == 0:
                    without_image += 1
                elif caption is None or not _is_text(file, caption):
                    without_caption += 1
                else:
                    rows.append((image.start, *_place(file, image), *_place(file, caption)))
    except DamagedTarError as error:
        raise UserError(f"{shard}: no readable tar file ({error}); {_REMEDY}") from error
    yield np.array([(without_image, without_caption, *[0] * (_COLUMNS - 2)), *rows], dtype=np.int64)


def _is_text(file: BinaryIO, caption: TarMember) -> bool:
    file.seek(caption.offset)
    return bool(file.read(caption.size).strip())


def _place(file: BinaryIO, member: TarMember) -> tuple[int, int, int]:
    """Offset, size and CRC-32 of a member's content."""
    file.seek(member.offset)
    checksum, left = 0, member.size
    while left and (data := file.read(min(left, _CHUNK))):
        checksum, left = zlib.crc32(data, checksum), left - len(data)
    if left:
        raise DamagedTarError("it is shorter than its members")
    return member.offset, member.size, checksum


_REMEDY = "run img2dataset again, it writes unfinished shards anew, or remove the file"


def _records(members: Iterator[TarMember], shard: Path) -> Iterator[dict[str, TarMember]]:
    """Of each record its member under "image" and under "caption".

    The members of a record stand side by side and share the name up to its first dot.
    """
    key, record = None, {}
    seen: set[tuple[str, str]] = set()
    for member in members:
        folder, _, file = member.name.rpartition("/")
        stem, _, suffix = file.partition(".")
        if (folder, stem) != key:
            if key is not None:
                yield record
            key, record = (folder, stem), {}
            if key in seen:
                raise UserError(
                    f"{shard}: the record of {member.name} is there twice, or its members do not stand side by side; "
                    "give every record a key of its own"
                )
            seen.add(key)
        what = "image" if suffix.lower() in _IMAGE_SUFFIXES else "caption" if suffix.lower() == "txt" else "other"
        if what != "other" and what in record:
            raise UserError(
                f"{shard}: {record[what].name} and {member.name} are two {what}s of one record; give every record a "
                "key of its own (a key ends at the first dot of the name)"
            )
        if what != "other" and member.size > _LONGEST[what]:
            raise UserError(
                f"{shard}: the {what} {member.name} has {member.size} bytes; the limit is {_LONGEST[what]}, so leave "
                "it out"
            )
        record[what] = member
    if key is not None:
        yield record


def _failed(shards: list[Path]) -> int:
    """Records that img2dataset could not fetch; -1 if it does not say so for every shard."""
    failed = 0
    for shard in shards:
        path = shard.with_name(f"{shard.stem}_stats.json")
        if not path.is_file():
            return -1
        stats = read_json(path, "statistics of a shard", _Statistics)
        failed += stats.count - stats.successes
    return failed
