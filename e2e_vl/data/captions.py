"""Captions for pre-training, and text corpora without images.

Files (`data.files`, relative to `data.root`; {split} is the split, and {images} its COCO image set, such as val2014 for
valminusminival2014; splits of source coco may be joined by "+")
    source coco      captions (JSON), images (folder)
    source shards    shards (folder, or a pattern such as cc3m/*.tar)
    source json_lines captions (JSON lines), which name the images and the files of detected boxes
    any              corpus: text files joined by "+", used in training
    boxes gt         instances (COCO), or metadata: a folder of predicted boxes in the format of VCR's metadata files,
                     NAME.json for NAME.jpg (VisualBERT's first phase for VCR)
    boxes detections detections: MAttNet's JSON, or a file of region features; json_lines: lines with `frcnn`
    boxes precomputed features: a file of region features; json_lines: lines with `frcnn`
"""

from __future__ import annotations

import abc
import base64
import contextlib
import functools
import itertools
import logging
import mmap
import tarfile
import zlib
from collections.abc import Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

import msgspec
import numpy as np
from torch.utils.data import ConcatDataset
from tqdm.auto import tqdm
from typing_extensions import override

from detector.errors import MissingFileError, UserError, reading, user_path
from detector.io import decode_json, decode_text, map_file, read_json
from e2e_vl.config import BoxSource
from e2e_vl.data.base import (
    DataFiles,
    DataNeeds,
    JoinedSplit,
    VLDataset,
    coco_image_set,
    require_distinct_ids,
    split_names,
)
from e2e_vl.data.box_checks import require_pixels
from e2e_vl.data.coco import CocoInstances, encoded_objects, open_instances
from e2e_vl.data.config import CLASS_NAMES, CaptionDatasetConfig
from e2e_vl.data.table_files import tabulate
from e2e_vl.data.tables import (
    Archives,
    SerializedList,
    SkippedRecords,
    TextGroups,
    TextLines,
    cached_array,
    hash_name,
)
from e2e_vl.data.vcr import read_detected_objects
from e2e_vl.io import Count, Id, Name, Record, Side, is_listed
from e2e_vl.samples import CandidateBoxes, ImageBytes, ImageKey, Sample, SampleImage, SampleText

logger = logging.getLogger(__name__)


class CaptionSource(abc.ABC):
    """Images with captions, which are numbered image by image."""

    groups: TextGroups  # the captions of each image

    @abc.abstractmethod
    def caption(self, text: int) -> str:
        """Return the caption with index `text`."""

    @abc.abstractmethod
    def name(self, group: int) -> str:
        """Return the id of the image with index `group`, as used in box files."""

    @abc.abstractmethod
    def image(self, group: int) -> Path | ImageBytes:
        """Return the file of the image with index `group`, or its contents."""

    def split_index(self, group: int) -> int:
        """Return the index of the joined split that the image belongs to."""
        return 0

    @abc.abstractmethod
    def contents(self) -> Iterable[np.ndarray]:
        """Yield what was read, see `VLDataset.contents`."""

    def image_size(self, group: int) -> tuple[int, int] | None:
        """Return (height, width) according to the annotations; None if they do not state it."""
        return None

    def boxes(self, group: int) -> CandidateBoxes | None:
        """Return the boxes that are stored with the captions; None if there are none."""
        return None


class _CaptionedRow(Record):
    id: Id
    file_name: Name
    width: Side | None = None
    height: Side | None = None


class _CaptionRow(Record):
    image_id: Id
    caption: str


class _CaptionsFile(Record):
    images: list[_CaptionedRow]
    annotations: list[_CaptionRow]


class _CaptionedImage(msgspec.Struct, array_like=True):
    split_index: int  # the joined split
    name: str
    file_name: str
    size: tuple[int, int] | None  # (height, width)


class CocoCaptions(CaptionSource):
    """COCO's `captions_*.json`: about five captions per image.

    Blank captions, captions of images that their file does not list, and images without captions are skipped, and their
    numbers are logged.

    Args:
        files: (caption file, image folder) of each joined split. An image that several of them list, with the same id
            and the same image file, is one image.
        sources: of each joined split, what its images have besides: images of different sources are different images.
        index_folder: of a table, from which later starts read large files; None: there is none.
    """

    def __init__(
        self,
        files: Sequence[tuple[Path, Path]],
        sources: Sequence[Hashable] | None = None,
        index_folder: Path | None = None,
    ) -> None:
        self._folders = [folder for _, folder in files]
        sources = list(sources or [None] * len(files))
        first_with_source = [sources.index(source) for source in sources]
        folders = [str(folder) for folder in self._folders]  # they tell whose images are the same
        kind = [_CaptionedImage.__name__, *_CaptionedImage.__struct_fields__, folders, first_with_source]
        counts, *arrays = tabulate([path for path, _ in files], index_folder, kind, lambda: _read_coco(files, sources))
        self._images = SerializedList.from_arrays(*arrays[:2], _CaptionedImage)
        self._captions = SerializedList.from_arrays(*arrays[2:], str)
        self.groups = TextGroups.consecutive(counts)

    @override
    def caption(self, text: int) -> str:
        return self._captions[text]

    @override
    def name(self, group: int) -> str:
        return self._images[group].name

    @override
    def split_index(self, group: int) -> int:
        return self._images[group].split_index

    @override
    def contents(self) -> Iterable[np.ndarray]:
        return self._images.encoded, self._captions.encoded

    @override
    def image(self, group: int) -> Path:
        image = self._images[group]
        return self._folders[image.split_index] / image.file_name

    @override
    def image_size(self, group: int) -> tuple[int, int] | None:
        return self._images[group].size


def _read_coco(files: Sequence[tuple[Path, Path]], sources: Sequence[Hashable]) -> list[np.ndarray]:
    """Read the files of `CocoCaptions`.

    Returns:
        The number of captions of each image, int64 [images], and the arrays of the images and of all captions.
    """
    numbers: dict[tuple[Hashable, str, Path], int] = {}
    images: list[_CaptionedImage] = []
    captions: list[list[str]] = []
    for split_index, (path, folder) in enumerate(files):
        content = read_json(path, _CaptionsFile)
        number_of: dict[str, int] = {}  # of the images of this file; 12 and "12" are the same id
        for row in content.images:
            number = numbers.setdefault((sources[split_index], str(row.id), folder / row.file_name), len(images))
            if number_of.setdefault(str(row.id), number) != number:
                raise UserError(
                    f"{path}: two images have the id {row.id}, such as {row.file_name}; give each image its own "
                    "id, by which captions name it"
                )
            if number == len(images):
                size = None
                if row.height is not None and row.width is not None:
                    size = (row.height, row.width)
                images.append(_CaptionedImage(split_index, str(row.id), row.file_name, size))
                captions.append([])
        skipped = SkippedRecords(path)
        for row in content.annotations:
            if not row.caption.strip():
                skipped.add("blank captions, by image", row.image_id)
            elif str(row.image_id) not in number_of:
                skipped.add("captions of images that the file does not list", row.image_id)
            else:
                captions[number_of[str(row.image_id)]].append(row.caption)
        skipped.log()
    first_path, _ = files[0]
    captioned = [number for number, image_captions in enumerate(captions) if image_captions]
    if len(captioned) < len(images):
        logger.warning("%s: %d images have no caption.", first_path, len(images) - len(captioned))
    if not captioned:
        raise UserError(f"{first_path} has no caption of an image that it lists; use another captions file.")
    captioned_images = SerializedList((images[number] for number in captioned), _CaptionedImage)
    caption_list = SerializedList(itertools.chain.from_iterable(captions), str)
    counts = np.array([len(captions[number]) for number in captioned])
    return [counts, *captioned_images.arrays, *caption_list.arrays]


# Conceptual Captions in the format of the official VL-BERT code: JSON lines, with images and detected boxes in archives


class _CaptionLine(Record):
    image: Name
    caption: str | list[str]


class _CaptionLineWithBoxes(_CaptionLine):
    frcnn: Name  # box file


class RegionFile(Record):
    """One image's regions as JSON; the strings are base64 of float32."""

    image_w: Side
    image_h: Side
    num_boxes: Count
    boxes: str
    classes: str = ""
    features: str = ""

    def matrix(self, key: str, origin: str) -> np.ndarray:
        """Decode one of the strings: float32 [R, columns], finite."""
        with reading(f"{origin}: {key}", ValueError):
            values = np.frombuffer(base64.b64decode(getattr(self, key)), dtype="<f4").reshape(self.num_boxes, -1)
        if not values.size or not np.isfinite(values).all():
            raise UserError(f"{origin}: {key} is empty or contains NaN or infinite values; download the file again.")
        return values


class VLBertCaptions(CaptionSource):
    """One caption per image. Detected boxes have class distributions.

    Args:
        lines_file: the JSON lines; paths in the file are relative to its folder.
        cache: folder for the indices.
        with_boxes: read the detected boxes (key `frcnn`), sorted by descending score of the best class.
        with_features: also read their features; the feature of the whole image is their mean.
    """

    def __init__(
        self, lines_file: str | Path, cache: str | Path, *, with_boxes: bool = False, with_features: bool = False
    ) -> None:
        self.lines = TextLines(lines_file, cache)
        self.with_boxes = with_boxes or with_features
        self.with_features = with_features
        self._archives = Archives(self.lines.path.parent, cache)
        self.groups = TextGroups.consecutive(np.ones(len(self.lines), dtype=np.int64))
        self._record(0)  # fail early if the file has another format

    @override
    def caption(self, text: int) -> str:
        caption = self._record(text).caption
        if isinstance(caption, str):
            return caption
        return " ".join(caption)

    @override
    def name(self, group: int) -> str:
        return self._record(group).image

    @override
    def contents(self) -> Iterable[np.ndarray]:
        return (self.lines.offsets,)

    @override
    def image(self, group: int) -> Path | ImageBytes:
        name = self._record(group).image
        location = self._archives.find(name)
        if isinstance(location, Path):
            return location
        archive, member = location
        return ImageBytes(self._archives.read(name), f"{archive}: {member}")

    @override
    def boxes(self, group: int) -> CandidateBoxes | None:
        if not self.with_boxes:
            return None
        name = self._record(group).frcnn
        origin = str(self._archives.root / name)
        content = decode_json(self._archives.read(name), origin, RegionFile)
        boxes = content.matrix("boxes", origin)
        class_probs = content.matrix("classes", origin)
        require_pixels(boxes, origin)
        order = np.argsort(-class_probs.max(axis=1), kind="stable")
        features = None
        image_feature = None
        if self.with_features:
            features = content.matrix("features", origin)[order]
            image_feature = features.mean(axis=0)
        return CandidateBoxes(
            boxes[order],
            origin,
            class_probs[order],
            image_size=(content.image_h, content.image_w),
            features=features,
            image_feature=image_feature,
        )

    def _record(self, number: int) -> _CaptionLine | _CaptionLineWithBoxes:
        kind = _CaptionLineWithBoxes if self.with_boxes else _CaptionLine
        where = f"{self.lines.path}: line {number + 1} (not counting blank lines)"
        return decode_json(self.lines[number], where, kind)


# Captions in webdataset shards, as written by img2dataset


SHARD_SUFFIXES = {**dict.fromkeys(("jpg", "jpeg", "png", "webp"), "image"), "txt": "caption"}


class _ShardMember(NamedTuple):
    """A file in a tar archive; the numbers are bytes."""

    name: str
    header: int  # offset of its header, or of another one that extends it
    start: int  # offset of its contents
    size: int


_BLOCK = 512  # bytes of a header; contents are padded to multiples of it


def _list_files(shard: Path, content: mmap.mmap | bytes) -> Iterator[_ShardMember]:
    """Yield the files of a tar archive, whose bytes are `content`.

    Headers of plain files are decoded here, because `tarfile` takes twenty times as long. It gets all the others: long
    names, folders, links, damage, the end.
    """
    with reading(shard, tarfile.TarError), tarfile.open(shard, "r:") as archive:
        first = archive.next()
        position = 0
        while True:
            member = _decode_header(content[position : position + _BLOCK], position)
            if member is not None:
                yield member
                position = member.start + -(-member.size // _BLOCK) * _BLOCK
                continue
            other = first
            if position:
                archive.offset = position
                other = archive.next()
            if other is None:
                break
            if other.isfile():
                yield _ShardMember(other.name, other.offset, other.offset_data, other.size)
            position = archive.offset
    rest = content[position:]
    if not rest or rest.strip(b"\0"):  # `tarfile` stops silently at a damaged header
        raise UserError(f"{shard}: damaged or truncated at byte {position}; run img2dataset again")


def _decode_header(header: bytes, position: int) -> _ShardMember | None:
    """Decode the header of a plain file at `position` (POSIX ustar); None: it is another one, or damaged."""
    if header[156:157] != tarfile.REGTYPE or len(header) < _BLOCK:
        return None
    stored_sum = header[148:156]  # of the header, with spaces in its own place
    try:
        size = int(header[124:136].rstrip(b"\0 "), 8)
        expected = int(stored_sum.rstrip(b"\0 "), 8) - sum(b" " * 8) + sum(stored_sum)
    except ValueError:  # more than 8 GiB, or damaged
        return None
    if zlib.adler32(header, 0) & 0xFFFF != expected % 65521:  # this half of Adler-32 is the sum of all bytes
        return None
    name, _, _ = header[:100].partition(b"\0")
    prefix, _, _ = header[345:500].partition(b"\0")
    if prefix:
        name = prefix + b"/" + name
    return _ShardMember(name.decode("utf-8", "surrogateescape"), position, position + _BLOCK, size)


class ShardCaptions(CaptionSource):
    """One caption per image, from tar files, with random access through an index of record offsets.

    The webdataset package only streams shards: it does not guarantee that each text is seen once per epoch, cannot
    resume within an epoch, and does not split the data evenly between processes.

    Args:
        shards: a folder (all its `*.tar`) or a pattern such as `cc3m/0000*.tar`.
        cache: folder for the index.
    """

    def __init__(self, shards: str | Path, cache: str | Path) -> None:
        path = user_path(shards)
        paths = path.iterdir() if path.is_dir() else path.parent.glob(path.name)
        self.shards = sorted(shard for shard in paths if is_listed(shard.name, (".tar",)))
        if not self.shards:
            raise MissingFileError(f"{path}: no shards (*.tar) found; check data.files.shards")
        self._index = cached_array(self.shards, Path(cache), "shards 3", self._find_records)
        self.groups = TextGroups.consecutive(np.ones(len(self._index), dtype=np.int64))

    def _find_records(self) -> np.ndarray:
        """Return int64 [n, 4]: shard, offsets of the headers of image and caption in it, and hash of the name."""
        rows: list[tuple[int, int, int, int]] = []
        member_names: list[str] = []  # of the first members, for an error message
        skipped = SkippedRecords(self.shards[0].parent)
        for number, shard in enumerate(tqdm(self.shards, desc="indexing shards", unit=" shards", delay=1)):
            records: dict[str, dict[str, int]] = {}
            content = map_file(shard)
            if hasattr(mmap, "MADV_RANDOM") and content:  # the images between the headers need not be read
                content.madvise(mmap.MADV_RANDOM)
            for member in _list_files(shard, content):
                folder, _, name = member.name.rpartition("/")
                if not is_listed(name):
                    continue
                if len(member_names) < 3:
                    member_names.append(member.name)
                key, _, suffix = name.partition(".")
                record = records.setdefault(f"{folder}/{key}", {})
                kind = SHARD_SUFFIXES.get(suffix.lower())
                is_blank = kind == "caption" and not content[member.start : member.start + member.size].strip()
                if kind is None or is_blank or not member.size:
                    continue
                if kind in record:
                    raise UserError(
                        f"{shard}: the record {folder}/{key} has two files for its {kind}, such as {member.name}; "
                        "give each record a name of its own, as img2dataset does"
                    )
                record[kind] = member.header
            for name, record in records.items():
                if len(record) == 2:
                    rows.append((number, record["image"], record["caption"], hash_name(name)))
                else:
                    skipped.add("records without an image or a caption", f"{name.lstrip('/')} of {shard.name}")
        if not rows:
            raise UserError(
                f"{self.shards[0].parent}: no record of the shards has an image and a caption; they are members "
                "KEY.jpg (or jpeg, png, webp) and KEY.txt with the same KEY, without further dots, and the shards have "
                f"{', '.join(member_names) or 'no members'}"
            )
        skipped.log()
        return np.array(rows, dtype=np.int64)

    @override
    def caption(self, text: int) -> str:
        with self._member(text, 2) as (name, content):
            return decode_text(content.read(), f"{self.shards[self._index[text, 0]]}: {name}").strip()

    @override
    def name(self, group: int) -> str:
        with self._member(group, 1) as (name, _):
            folder, slash, file = name.rpartition("/")
            return folder + slash + file.partition(".")[0]

    def require_distinct_names(self) -> None:
        """Raise a UserError if two images share a name, because files of boxes find images by name."""
        _, first_rows = np.unique(self._index[:, 3], return_index=True)
        number = len(self._index) - len(first_rows)
        if number:
            repeated = np.setdiff1d(np.arange(len(self._index)), first_rows)[0]
            raise UserError(
                f"{self.shards[0].parent}: {number:,} images have the name of an earlier one, such as "
                f"{self.name(repeated)}, so boxes and features by name are ambiguous; give each image in all shards a "
                "name of its own, as img2dataset does"
            )

    @override
    def contents(self) -> Iterable[np.ndarray]:
        return (self._index,)

    @override
    def image(self, group: int) -> ImageBytes:
        with self._member(group, 1) as (name, content):
            return ImageBytes(content.read(), f"{self.shards[self._index[group, 0]]}: {name}")

    @contextlib.contextmanager
    def _member(self, record: int, column: int) -> Iterator[tuple[str, IO[bytes]]]:
        """Open the record's image (column 1) or caption (column 2): its name and its contents."""
        with self.shards[self._index[record, 0]].open("rb") as file:
            file.seek(int(self._index[record, column]))
            with tarfile.open(fileobj=file, mode="r:") as archive:  # reads from the file's position
                member = archive.next()
                yield member.name, archive.extractfile(member)


class CaptionDataset(VLDataset):
    """Captions of one split, grouped by image."""

    file_keys = ("images", "captions", "shards", "instances", "metadata", "corpus", "detections", "features")
    annotation_files = ("instances", "metadata")
    box_sources = BoxSource.for_evaluation()

    def __init__(self, files: DataFiles, options: CaptionDatasetConfig, split: str, needs: DataNeeds) -> None:
        split_values = _split_values(options, split)
        splits = [JoinedSplit(values["split"], self.files_by_image_id(files, needs, values)) for values in split_values]
        self.source = _source(files, options, split, needs.boxes, [joined.files for joined in splits])
        if isinstance(self.source, ShardCaptions) and needs.boxes in (BoxSource.DETECTIONS, BoxSource.PRECOMPUTED):
            self.source.require_distinct_names()
        self.groups = self.source.groups
        self.corpus = _corpus(files, options, split) if needs.training else None
        self.image_index = (0,) if options.use_images else ()
        # in VL-BERT's format, the caption files name the box files
        self.split_values = [] if options.source == "json_lines" else split_values
        self.min_object_score = options.min_object_score
        image_files = ((key, self.source.image(group)) for group, key in enumerate(self.image_keys()))
        require_distinct_ids(image_files, splits)
        # of each joined split
        self.instances: list[CocoInstances] = []
        self.metadata: list[Path] = []
        if not needs.annotations:
            return
        if options.source != "coco":
            raise UserError("Annotated objects need data.config.source=coco and data.files.instances (or metadata).")
        if "metadata" in files:
            self.metadata = [files.path("metadata", **values) for values in self.split_values]
            self.class_names = CLASS_NAMES
            self._require_distinct_metadata()
        else:
            self.instances = open_instances(files, self.split_values, self.image_keys())
            self.class_names = self.instances[0].class_names

    @classmethod
    @override
    def texts_of(cls, files: DataFiles, options: CaptionDatasetConfig, split: str) -> Iterable[str]:
        """Yield all captions of a split and all lines of the corpus."""
        source = _source(files, options, split, BoxSource.ONLINE)  # with this one, no file of boxes is opened
        yield from (source.caption(text) for text in range(len(source.groups.texts)))
        yield from _corpus(files, options, split) or ()

    def __len__(self) -> int:
        return len(self.groups.texts)

    def __getitem__(self, text: int) -> str:
        """Return a caption; captions of other images may be sampled."""
        return self.source.caption(text)

    @override
    def image_ids(self) -> Iterable[str]:
        """Yield the ids of the images of COCO captions; reading millions of names of other images would be slow."""
        return (key.id for key in self.image_keys())

    @override
    def image_keys(self) -> Iterable[ImageKey]:
        if not isinstance(self.source, CocoCaptions):
            return ()
        return (ImageKey(self.source.split_index(group), self.source.name(group)) for group in range(len(self.groups)))

    @override
    def image_locations(self) -> Iterable[tuple[Path, str]]:
        if not isinstance(self.source, CocoCaptions):
            return ()
        images = map(self.source.image, range(len(self.groups)))
        return ((image.parent, image.name) for image in images)

    @override
    def contents(self) -> Iterable[np.ndarray]:
        yield from self.source.contents()
        if self.corpus is not None:
            for lines in self.corpus.datasets:
                yield lines.offsets
        yield from encoded_objects(self.instances, self.image_keys())

    def _metadata_file(self, group: int) -> Path:
        folder = self.metadata[self.source.split_index(group)]
        return folder / self.source.image(group).with_suffix(".json").name

    def _require_distinct_metadata(self) -> None:
        """Raise a UserError if two image files share a metadata file."""
        image_of: dict[Path, Path] = {}
        for group in range(len(self.groups)):
            file = self._metadata_file(group)
            image = self.source.image(group)
            if image_of.setdefault(file, image) != image:
                raise UserError(
                    f"{file} would have the boxes of two images, {image_of[file]} and {image}; set a folder for each "
                    "split in data.files.metadata, with {split} in its name, or give the images different names"
                )

    @override
    def sample(self, texts: Sequence[int]) -> Sample:
        group = self.groups.group_of(texts[0])
        name = self.source.name(group)
        split_index = self.source.split_index(group)
        size = self.source.image_size(group)
        objects = None
        if self.instances:
            image_record = self.instances[split_index][name]
            size = (image_record.height, image_record.width)
            objects = self.instances[split_index].objects(name)
        elif self.metadata:
            size, objects = read_detected_objects(self._metadata_file(group), self.min_object_score)
        file = functools.partial(self.source.image, group)  # searches archives, when it is needed
        if isinstance(self.source, CocoCaptions):
            file = self.source.image(group)
        image = SampleImage(name, file, size, objects=objects, boxes=self.source.boxes(group), split_index=split_index)
        captions = []
        for text in texts:
            caption = self.source.caption(text)
            captions.append(SampleText(text, caption, {"image_id": name}, image_index=self.image_index))
        return Sample((image,), tuple(captions), pool=self, own_texts=self.groups[group], corpus=self.corpus)


def _split_values(options: CaptionDatasetConfig, split: str) -> list[dict[str, str]]:
    """Return the placeholder values of each joined split."""
    if options.source != "coco":
        return [{"split": split}]
    return [{"split": name, "images": coco_image_set(name) or name} for name in split_names(split)]


def _source(
    files: DataFiles,
    options: CaptionDatasetConfig,
    split: str,
    boxes: BoxSource,
    sources: Sequence[Hashable] | None = None,
) -> CaptionSource:
    """Open the captions of a split, with their stored boxes if the box source needs them.

    Args:
        sources: see `CocoCaptions`.
    """
    if options.source == "coco":
        caption_files = []
        for values in _split_values(options, split):
            caption_files.append((files.path("captions", **values), files.path("images", **values)))
        return CocoCaptions(caption_files, sources, _index_folder(files, options))
    if options.source == "shards":
        return ShardCaptions(files.path("shards", split=split), _index_folder(files, options))
    file_keys = {BoxSource.DETECTIONS: "detections", BoxSource.PRECOMPUTED: "features"}
    return VLBertCaptions(
        files.path(file_keys.get(boxes, "captions"), split=split),
        _index_folder(files, options),
        with_boxes=boxes is BoxSource.DETECTIONS,
        with_features=boxes is BoxSource.PRECOMPUTED,
    )


def _corpus(files: DataFiles, options: CaptionDatasetConfig, split: str) -> ConcatDataset | None:
    """Open the lines of the text files; the settings join the file names by "+" (as in the official code)."""
    if "corpus" not in files or not options.use_corpus:
        return None
    names = files.name("corpus", split=split).split("+")
    return ConcatDataset([TextLines(files.root / name, _index_folder(files, options)) for name in names])


def _index_folder(files: DataFiles, options: CaptionDatasetConfig) -> Path:
    """Return the folder for the indices of large files."""
    if options.cache is None:
        return files.index_folder
    return user_path(options.cache)
