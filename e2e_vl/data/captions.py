"""Captions for pre-training, and text without images.

Files (`data.files`, relative to `data.root`; {split} is the split, and {images} its COCO image set, such as val2014 for
valminusminival2014; splits of source coco may be joined by "+")
    source coco      captions (JSON), images (folder)
    source shards    shards (folder, or a pattern such as cc3m/*.tar)
    source json_lines captions (JSON lines); these name images and detected boxes
    any              corpus: text files joined by "+", read in training
    boxes gt         instances (COCO), or metadata: a folder with what a detector found, in the form of VCR's metadata
                     files, NAME.json for NAME.jpg (VisualBERT's first phase for VCR)
    boxes detections detections: MAttNet's JSON, or a file of region features; json_lines: lines with `frcnn`
    boxes precomputed features: a file of region features; json_lines: lines with `frcnn`
"""

from __future__ import annotations

import abc
import base64
import binascii
import codecs
import dataclasses
import functools
import logging
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from torch.utils.data import ConcatDataset
from tqdm.auto import tqdm

from detector.errors import MissingFileError, UserError, reading, user_path
from e2e_vl.config import BoxSource
from e2e_vl.data.base import DataFiles, VLDataset, Wants, coco_image_set, split_names
from e2e_vl.data.batching import ConsecutiveGroups
from e2e_vl.data.coco import CocoInstances, read_instances
from e2e_vl.data.storage.archives import LARGEST_MEMBER, ArchivedFiles
from e2e_vl.data.storage.files import checked_records, read_json, require_file
from e2e_vl.data.storage.index_files import ArrayFile, OpenFiles, cached_index
from e2e_vl.data.storage.record_errors import RAISE, RecordErrors
from e2e_vl.data.storage.record_table import RecordTable, text_column
from e2e_vl.data.storage.tar_headers import DamagedTarError, TarMember, member_at, members_of
from e2e_vl.data.vcr import CLASS_NAMES, read_detected_objects
from e2e_vl.io import inside
from e2e_vl.records import Count, Id, Name, Record, Side, decoded
from e2e_vl.samples import AnnotatedObjects, CandidateBoxes, ImageBytes, Sample, SampleImage, SampleText, TextPool

# Where captions, their images and candidate boxes come from: one small interface, and COCO's captions.


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
    def image(self, group: int) -> Path | ImageBytes:
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


# Text corpora: plain text or the official `.doc` files, UTF-8, one sample a line; of any size.


_VERSION = "lines 1"
_CHUNK = 1 << 20  # bytes read at once while a file is indexed
_LONGEST_LINE = 1 << 24  # bytes
_WHITE = np.isin(np.arange(256), list(b" \t\n\r\v\f"))


class TextLines(Sequence):
    """The lines of a UTF-8 text file by their number, without the blank ones; only an index is kept, and that on disk.

    Args:
        path: the file. It is read once, to find the lines and to check its encoding, and never held in memory.
        cache: folder that keeps the index.
        what: names the content in errors.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file is not UTF-8 text or has no line with content.
    """

    def __init__(self, path: str | Path, cache: str | Path, what: str = "text") -> None:
        self.path = require_file(path, what)
        index = cached_index([self.path], Path(cache), _VERSION, lambda: _line_starts(self.path, what))
        self._files = OpenFiles()
        self._starts = ArrayFile(index, self._files)
        if not len(self._starts):
            raise UserError(f"{self.path}: the {what} file has no line with content")

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, number: int) -> str:
        """One line without white space around it.

        Raises:
            ValueError: the file has changed, or the line is longer than 16 MiB.
        """
        start = int(self._starts[number])
        size = 1 << 12
        while True:
            data = self._files.read(self.path, start, size)
            line, found, _ = data.partition(b"\n")
            if found or len(data) < size:
                break
            size *= 8
            if size > 8 * _LONGEST_LINE:
                raise UserError(
                    f"{self.path}: the line at byte {start} is longer than {_LONGEST_LINE} bytes; one sample is "
                    "expected on each line"
                )
        try:
            return line.decode("utf-8").strip().removeprefix("\ufeff")
        except UnicodeDecodeError as error:
            raise UserError(f"{self.path}: has changed while it was in use (line at byte {start})") from error


def _line_starts(path: Path, what: str) -> Iterator[np.ndarray]:
    """int64 [n]: where lines with something other than ASCII white space begin, a part of the file at a time."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    position = 0  # of the chunk
    start, has_content = 0, False  # of the line that is not finished yet
    with reading(path), path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            _check_text(decoder, chunk, path, what, position)
            data = np.frombuffer(chunk, dtype=np.uint8)
            ends = np.flatnonzero(data == ord("\n"))
            if len(ends):
                segments = np.concatenate([[0], ends[:-1] + 1])
                counts = np.add.reduceat(~_WHITE[data[: ends[-1] + 1]], segments, dtype=np.int64)
                begins = np.concatenate([[start], position + ends[:-1] + 1])
                counts[0] += has_content
                yield begins[counts > 0]
                start, has_content = position + int(ends[-1]) + 1, False
                data = data[ends[-1] + 1 :]
            has_content = has_content or not _WHITE[data].all()
            position += len(chunk)
    _check_text(decoder, b"", path, what, position)
    if has_content:
        yield np.array([start])


def _check_text(decoder: codecs.IncrementalDecoder, chunk: bytes, path: Path, what: str, position: int) -> None:
    try:
        text = decoder.decode(chunk, final=not chunk)
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: the {what} file is not UTF-8 text (near byte {position + error.start}); convert or unpack it"
        ) from error
    if "\0" in text:
        raise UserError(f"{path}: the {what} file holds zero bytes (near byte {position}), so it is no text file")


# Conceptual Captions in the layout of the official VL-BERT code: JSON lines, images and detected boxes in archives.


class _CaptionLine(Record):
    image: Name
    caption: str | list[str]


class _CaptionLineWithBoxes(_CaptionLine):
    frcnn: Name


class _Boxes(Record):
    image_w: Side
    image_h: Side
    num_boxes: Count
    boxes: str
    classes: str


class _BoxesWithFeatures(_Boxes):
    features: str


class VLBertCaptions(CaptionSource):
    """One caption per image.

    Args:
        lines_file: the JSON lines; the paths in it start from its folder.
        cache: folder that keeps the indices.
        with_boxes: read the detected boxes (key `frcnn`), sorted by falling score of the best class.
        with_features: and their features; the whole image's is their mean.

    Its boxes have class distributions.

    Raises:
        FileNotFoundError: no such file.
        ValueError: see `TextLines`; a line that is not such an object, or a boxes file that is damaged, when it is
            read.
    """

    def __init__(
        self, lines_file: str | Path, cache: str | Path, *, with_boxes: bool = False, with_features: bool = False
    ) -> None:
        self.lines = TextLines(lines_file, cache, "captions")
        self.path = self.lines.path
        self.with_boxes = with_boxes or with_features
        self.with_features = with_features
        self._archives = ArchivedFiles(self.path.parent, cache)
        self.groups = ConsecutiveGroups(np.ones(len(self.lines), dtype=np.int64))
        first = self._record(0)  # so that a file of another kind is noticed at once
        self._archives.prepare(first.image)
        if self.with_boxes:
            self._archives.prepare(first.frcnn)

    def caption(self, text: int) -> str:
        found = self._record(text).caption
        words = found if isinstance(found, str) else " ".join(found)
        if not words.strip():
            raise UserError(f"{self.path}: the caption of line {self._where(text)} is not a list of words")
        return words

    def name(self, group: int) -> str:
        return self._record(group).image

    def image(self, group: int) -> Path | ImageBytes:
        name = self._record(group).image
        found = self._archives.find(name)
        return found if isinstance(found, Path) else ImageBytes(self._archives.read(name), f"{found[0]}: {found[1]}")

    def boxes(self, group: int) -> CandidateBoxes | None:
        if not self.with_boxes:
            return None
        name = self._record(group).frcnn
        origin = str(self._archives.root / name)
        content = decoded(_BoxesWithFeatures if self.with_features else _Boxes, self._archives.read(name), origin)
        boxes, classes = (_matrix(content, key, origin) for key in ("boxes", "classes"))
        if boxes.shape[1:] != (4,):
            raise UserError(f"{origin}: boxes have {boxes.shape[1]} numbers each, expected 4; get the file again")
        if (boxes[:, 2:] < boxes[:, :2]).any():
            raise UserError(f"{origin}: a box [x1, y1, x2, y2] is inverted; get the file again")
        if classes.min() < 0 or classes.max() > 1.0001:
            raise UserError(f"{origin}: the classes have values that are no probabilities; get the file again")
        order = np.argsort(-classes.max(axis=1), kind="stable")
        features = _matrix(content, "features", origin)[order] if self.with_features else None
        return CandidateBoxes(
            boxes[order],
            origin,
            classes[order],
            (content.image_h, content.image_w),
            features,
            None if features is None else features.mean(axis=0),
        )

    def _record(self, number: int) -> _CaptionLine:
        where = f"{self.path}: line {self._where(number)}"
        kind = _CaptionLineWithBoxes if self.with_boxes else _CaptionLine
        return decoded(kind, self.lines[number], where, form="one object is expected on each line")

    def _where(self, number: int) -> str:
        return f"{number + 1} (blank ones not counted)"


def _matrix(content: _Boxes, key: str, origin: str) -> np.ndarray:
    """float32 [R, columns], finite."""
    try:
        values = np.frombuffer(base64.b64decode(getattr(content, key)), dtype="<f4")
        rows = content.num_boxes
        if rows < 1 or not len(values) or len(values) % rows:
            raise UserError(f"{len(values)} numbers for {rows} boxes")
        if not np.isfinite(values).all():
            raise UserError("a number is not finite")
    except (ValueError, binascii.Error) as error:
        raise UserError(f"{origin}: the {key} are damaged ({error}); get the file again") from error
    return values.reshape(rows, -1)


# Captions in webdataset shards, in the layout that img2dataset writes.


_SHARD_VERSION = "shard 4"
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
            ArrayFile(
                cached_index([shard], Path(cache), _SHARD_VERSION, lambda s=shard: _rows(s), _COLUMNS), self._files
            )
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

    def image(self, group: int) -> ImageBytes:
        shard, row = self._find(group)
        return ImageBytes(self._content(shard, row[1:4], "image", group), f"{shard}: {self._member(group)}")

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


@dataclasses.dataclass(frozen=True)
class CaptionOptions:
    """Fields of `data.config`.

    Attributes:
        source: where captions come from: "coco", "shards" (img2dataset) or "json_lines" (VL-BERT's official code).
        use_corpus: False leaves `data.files.corpus` out.
        use_images: False states captions without their images: the control that learns from words alone.
        cache: folder for the indices of large files; None = `index` in `data.root`.
        min_object_score: of `data.files.metadata` only objects with a higher score are kept (official VisualBERT: 0.7).
    """

    source: Literal["coco", "shards", "json_lines"] = "coco"
    use_corpus: bool = True
    use_images: bool = True
    cache: str | None = None
    min_object_score: float = 0.7

    def __post_init__(self) -> None:
        if not 0 <= self.min_object_score <= 1:
            raise UserError(f"data.config.min_object_score is {self.min_object_score}; give a number from 0 to 1.")


class CaptionDataset(VLDataset):
    """Captions of one split, grouped by image.

    Args:
        source: images and captions.
        corpus: texts without images, for training.
        instances: annotated objects of the images.
        metadata: folder of the files with the objects of the images, in place of `instances`; with `min_object_score`.
        parts: placeholder values of each split, see `VLDataset.parts`.
        use_images: see `CaptionOptions`.
        boxes_come_along: the captions' own file has the boxes, so that no other one is read.

    Raises:
        ValueError: an image that the instances file lacks.
    """

    known_files = ("images", "captions", "shards", "instances", "metadata", "corpus", "detections", "features")
    annotation_files = ("instances", "metadata")
    options = CaptionOptions
    box_sources = BoxSource.for_evaluation()

    def __init__(
        self,
        source: CaptionSource,
        *,
        corpus: TextPool | None = None,
        instances: CocoInstances | None = None,
        metadata: Path | None = None,
        min_object_score: float = 0.7,
        parts: Sequence[Mapping[str, str]] = ({"split": "train"},),
        boxes_come_along: bool = False,
        use_images: bool = True,
    ) -> None:
        self.source = source
        self.groups = source.groups
        self.corpus = corpus
        self.instances = instances
        self.metadata = metadata
        self.min_object_score = min_object_score
        if metadata is not None:
            self.class_names = CLASS_NAMES
        self.parts = [] if boxes_come_along else list(parts)
        self.image_index = (0,) if use_images else ()
        if instances is not None:
            self.class_names = instances.class_names
            missing = [name for name in self.image_ids() if instances.images.id_written(name) is None]
            if missing:
                raise UserError(
                    f"{instances.path}: image {missing[0]} and {len(missing) - 1} more are not listed; use the "
                    "instances of these images"
                )

    @classmethod
    def open(cls, files: DataFiles, options: CaptionOptions, split: str, wants: Wants) -> CaptionDataset:
        """The top of this file says which files there are; only training reads a corpus."""
        instances = metadata = None
        if wants.annotations:
            if options.source != "coco":
                raise UserError(
                    "annotated objects need data.config.source=coco and data.files.instances (or metadata)."
                )
            if "metadata" in files:
                if "instances" in files:
                    raise UserError("data.files has instances and metadata; remove one of them.")
                metadata = files.path("metadata", split=split)
                if not metadata.is_dir():
                    raise MissingFileError(f"{metadata}: there is no such folder; correct data.files.metadata.")
            else:
                if len(split_names(split)) > 1:
                    raise UserError(f"annotated objects need a single split, not {split}; use other boxes.")
                instances = files.read(read_instances, files.path("instances", split=split), drop_empty_boxes=True)
        return cls(
            _source(files, options, split, wants.boxes),
            corpus=_corpus(files, options, split) if wants.training else None,
            instances=instances,
            metadata=metadata,
            min_object_score=options.min_object_score,
            parts=_parts(options, split),
            boxes_come_along=options.source == "json_lines",
            use_images=options.use_images,
        )

    @classmethod
    def reads(cls, options: CaptionOptions, split: str, wants: Wants) -> tuple[str, ...]:
        """The shards are a pattern, and the corpus is several files; `open` looks for them."""
        if options.source == "json_lines":
            return wants.boxes.needs or ("captions",)
        left_out = {"shards", "corpus", *(["captions", "images"] if options.source == "shards" else [])}
        left_out |= set() if wants.annotations else {"metadata"}
        return tuple(key for key in super().reads(options, split, wants) if key not in left_out)

    @classmethod
    def texts_of(cls, files: DataFiles, options: CaptionOptions, split: str) -> Iterable[str]:
        """All captions of a split and all lines of the corpus."""
        source = _source(files, options, split, BoxSource.ONLINE)
        yield from (source.caption(text) for text in range(source.groups.num_texts))
        corpus = _corpus(files, options, split) or ()
        yield from (corpus[number] for number in range(len(corpus)))

    def __len__(self) -> int:
        """Number of captions."""
        return self.groups.num_texts

    def __getitem__(self, text: int) -> str:
        """One caption; a data set of captions is a pool of texts."""
        return self.source.caption(text)

    def image_ids(self) -> Iterable[str]:
        """Only of COCO's captions: millions of names would take long to read."""
        if not isinstance(self.source, CocoCaptions | JoinedCaptions):
            return ()
        return (self.source.name(group) for group in range(len(self.groups)))

    def sample(self, texts: Sequence[int]) -> Sample:
        """Some captions of one image."""
        group = self.groups.of_text(texts[0])
        name = self.source.name(group)
        is_loose = isinstance(self.source, CocoCaptions)  # its images are files, which need no looking for
        image = SampleImage(
            name,
            self.source.image(group) if is_loose else functools.partial(self.source.image, group),
            self.source.image_size(group),
            objects=self._objects(group),
            boxes=self.source.boxes(group),
        )
        stated = tuple(
            SampleText(text, caption, {"image_id": name, "sent": caption}, image_index=self.image_index)
            for text, caption in ((text, self.source.caption(text)) for text in texts)
        )
        return Sample((image,), stated, pool=self, own_texts=self.groups[group], corpus=self.corpus)

    def _objects(self, group: int) -> AnnotatedObjects | None:
        """The annotated or detected objects of an image; None if no file has any."""
        name = self.source.name(group)
        if self.instances is not None:
            return self.instances.objects(self.instances.images.id_written(name))
        if self.metadata is None:
            return None
        file = self.metadata / self.source.image(group).with_suffix(".json").name
        size, objects = read_detected_objects(file, name, self.min_object_score)
        stated = self.source.image_size(group)
        if stated is not None and stated != size:
            raise UserError(
                f"{file}: the image was {size[1]} x {size[0]} pixels, but the captions say {stated[1]} x {stated[0]} "
                f"of image {name}; use the objects of the same images"
            )
        return objects


def _parts(options: CaptionOptions, split: str) -> list[dict[str, str]]:
    """Placeholder values of each of the joined splits."""
    if options.source != "coco":
        return [{"split": split}]
    return [{"split": name, "images": coco_image_set(name) or name} for name in split_names(split)]


def _source(files: DataFiles, options: CaptionOptions, split: str, boxes: BoxSource) -> CaptionSource:
    """Captions of a split, with the boxes that lie beside them if `boxes` asks for them."""
    if options.source == "coco":
        parts = [
            files.read(CocoCaptions, files.path("captions", **values), files.path("images", **values))
            for values in _parts(options, split)
        ]
        return parts[0] if len(parts) == 1 else JoinedCaptions(parts)
    if options.source == "shards":
        return ShardCaptions(files.path("shards", split=split), _index_folder(files, options))
    name = {BoxSource.DETECTIONS: "detections", BoxSource.PRECOMPUTED: "features"}.get(boxes, "captions")
    return VLBertCaptions(
        files.path(name, split=split),
        _index_folder(files, options),
        with_boxes=boxes is BoxSource.DETECTIONS,
        with_features=boxes is BoxSource.PRECOMPUTED,
    )


def _corpus(files: DataFiles, options: CaptionOptions, split: str) -> ConcatDataset | None:
    """The lines of the text files, whose names the settings join by "+" (as the official code does)."""
    if "corpus" not in files or not options.use_corpus:
        return None
    names = files.name("corpus", split=split).split("+")
    return ConcatDataset([TextLines(files.root / name, _index_folder(files, options), "corpus") for name in names])


def _index_folder(files: DataFiles, options: CaptionOptions) -> Path:
    """Where indices of large files are kept."""
    return files.root / "index" if options.cache is None else user_path(options.cache)
