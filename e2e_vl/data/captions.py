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

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from torch.utils.data import ConcatDataset

from detector.errors import MissingFileError, UserError
from detector.user_paths import user_path
from e2e_vl.box_sources import BoxSource
from e2e_vl.data.base import DataFiles, VLDataset, Wants, coco_image_set, split_names
from e2e_vl.data.formats.caption_sources import CaptionSource, CocoCaptions, JoinedCaptions
from e2e_vl.data.formats.coco import CocoInstances, read_instances
from e2e_vl.data.formats.conceptual import VLBertCaptions
from e2e_vl.data.formats.shards import ShardCaptions
from e2e_vl.data.formats.vcr_files import CLASS_NAMES, read_detected_objects
from e2e_vl.data.storage.corpus import TextLines
from e2e_vl.samples import AnnotatedObjects, Sample, SampleImage, SampleText, TextPool


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
        self.looks_at = (0,) if use_images else ()
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
            SampleText(text, caption, {"image_id": name, "sent": caption}, looks_at=self.looks_at)
            for text, caption in ((text, self.source.caption(text)) for text in texts)
        )
        return Sample((image,), stated, pool=self, own=self.groups[group], corpus=self.corpus)

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
