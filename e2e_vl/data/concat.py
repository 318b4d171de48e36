"""Several data sets joined into one, such as captions and questions for pre-training.

Each has its own files, options and splits, all below `data.root`; files that all of them share may be set in
`data.files`. Tasks that accept any text about an image can be trained on them.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from torch.utils.data import ConcatDataset

from detector.errors import UserError
from e2e_vl.config import BoxSource
from e2e_vl.data.base import (
    DataFiles,
    DataNeeds,
    JoinedSplit,
    VLDataset,
    check_boxes_source,
    normalise_class_name,
    open_options,
    require_distinct_ids,
)
from e2e_vl.data.config import JoinedOptions, PartSettings
from e2e_vl.data.image_loader import BoxReader, open_boxes_of
from e2e_vl.data.tables import TextGroups
from e2e_vl.io import read_text, require_unique
from e2e_vl.parts import DATASETS
from e2e_vl.samples import ImageKey, Sample, SampleImage, SampleText, TextPool


@dataclasses.dataclass
class JoinedPart:
    """One of the joined data sets, and which of its texts are used."""

    images: str  # name of its image set
    dataset: VLDataset
    box_reader: BoxReader | None
    texts: np.ndarray  # int64, ascending

    def __len__(self) -> int:
        return len(self.texts)


class JoinedDataset(VLDataset):
    """The texts of several data sets, one data set after the other.

    Mismatched captions are sampled from all data sets, but never from the same image in another data set.

    Classes are the same if their names have the same letters ("traffic light", "trafficlight"). Without detection
    losses, some parts may have no classes; their objects then have class -1.
    """

    file_keys = ("images", "instances", "detections", "features")  # files that all parts may share
    box_sources = BoxSource.for_evaluation()
    annotation_files = ()  # each part sets its own files
    parts = ()  # samples contain their boxes
    mixes_objects = True

    def __init__(self, files: DataFiles, options: JoinedOptions, split: str, needs: DataNeeds) -> None:
        self.members: list[JoinedPart] = []
        self.starts = [0]
        self._same_image: dict[tuple[str, str], list[int]] = {}  # groups of each image that several parts may have
        numbers: list[np.ndarray] = []
        counts: list[int] = []
        splits_of: dict[type[VLDataset], list[JoinedSplit]] = {}
        located_images_of: dict[type[VLDataset], list[tuple[ImageKey, str]]] = {}
        for name, part, own_files, own_options in self._parts_of(files, options, split):
            kind = DATASETS[part.name].cls
            check_boxes_source(kind, name, needs.boxes)
            dataset = kind(own_files, own_options, part.splits[split], needs)
            box_reader = open_boxes_of(dataset, own_files.settings, needs.boxes)
            groups, images = _kept_groups(name, part, dataset, files.root)
            if box_reader is not None:
                box_reader.require_images(images, f"{split} of {name}")
            splits = splits_of.setdefault(kind, [])
            located_images_of.setdefault(kind, []).extend(_locate(part, dataset, images, first_split=len(splits)))
            for values in dataset.parts:
                splits.append(JoinedSplit(name, dataset.files_by_image_id(own_files, needs, values)))
            texts = np.fromiter(itertools.chain.from_iterable(groups), dtype=np.int64)
            ascending = np.sort(texts)
            self.members.append(JoinedPart(part.images or f"of {name}", dataset, box_reader, ascending))
            if part.images is not None:
                # an id that two joined splits of a part use excludes too many mismatched texts, never too few
                for group, image in enumerate(images, start=len(counts)):
                    self._same_image.setdefault((part.images, image.id), []).append(group)
            numbers.append(self.starts[-1] + np.searchsorted(ascending, texts))
            counts += map(len, groups)
            self.starts.append(self.starts[-1] + len(texts))
        for kind, splits in splits_of.items():  # other kinds may name the same places in other ways
            require_distinct_ids(located_images_of[kind], splits)
        self.groups = TextGroups(np.concatenate(numbers), counts)
        datasets = [member.dataset for member in self.members]
        names = {tuple(map(normalise_class_name, dataset.class_names or ())) for dataset in datasets}
        if len(names if needs.objects else names - {()}) > 1:
            raise UserError(
                "The joined data sets have objects of different classes, or some have none; use boxes from a file or "
                "from the detector, and set detector.loss_weight to 0"
            )
        self.class_names = next((dataset.class_names for dataset in datasets if dataset.class_names), None)
        corpora = [dataset.corpus for dataset in datasets if dataset.corpus is not None]
        self.corpus = ConcatDataset(corpora) if corpora else None
        self.has_phrases = any(dataset.has_phrases for dataset in datasets)
        self.mixes_phrases = self.has_phrases and not all(dataset.has_phrases for dataset in datasets)
        self.left_out = sum(dataset.left_out for dataset in datasets)

    @classmethod
    def _parts_of(
        cls, files: DataFiles, options: JoinedOptions, split: str
    ) -> Iterator[tuple[str, PartSettings, DataFiles, Any]]:
        """Name, settings, files and options of each part of a split."""
        chosen = {name: part for name, part in options.parts.items() if split in part.splits}
        if not chosen:
            raise UserError(f"No part in data.config.parts has the split {split}; add it to the `splits` of a part")
        for name, part in chosen.items():
            kind = DATASETS[part.name].cls
            shared = {key: file for key, file in files.settings.files.items() if key in kind.file_keys}
            settings = msgspec.structs.replace(
                files.settings, name=part.name, files={**shared, **part.files}, config=part.config
            )
            yield name, part, *open_options(kind, settings)

    @classmethod
    def texts_of(cls, files: DataFiles, options: JoinedOptions, split: str) -> Iterable[str]:
        """All texts of all parts, including those about images that are left out."""
        for _, part, *own in cls._parts_of(files, options, split):
            yield from DATASETS[part.name].cls.texts_of(*own, part.splits[split])

    @classmethod
    def class_names_of(cls, options: JoinedOptions) -> Sequence[str] | None:
        """The classes of the first part whose texts refer to boxes by class."""
        return next((names for kind, own in cls._kinds_of(options) if (names := kind.class_names_of(own))), None)

    @classmethod
    def accepts_answer(cls, options: JoinedOptions) -> bool:
        return any(kind.accepts_answer(own) for kind, own in cls._kinds_of(options))

    @classmethod
    def select_candidates(cls, sample: Sample, options: JoinedOptions) -> Sample:
        """As in the first part whose texts refer to boxes by class."""
        for kind, own in cls._kinds_of(options):
            if kind.class_names_of(own):
                return kind.select_candidates(sample, own)
        return sample

    @classmethod
    def _kinds_of(cls, options: JoinedOptions) -> Iterator[tuple[type[VLDataset], Any]]:
        for part in options.parts.values():
            yield DATASETS[part.name].cls, part.config

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, text: int) -> str:
        """One text; texts of other images may be sampled."""
        member, own = self._find(text)
        dataset = member.dataset
        return dataset[own] if isinstance(dataset, TextPool) else dataset.sample([own]).texts[0].words

    def image_locations(self) -> Iterable[tuple[Hashable, str]]:
        for member in self.members:
            photos = list(member.dataset.image_locations())
            if len(photos) == len(member.dataset.groups):  # one image each: some may be left out
                first_texts = [texts[0] for texts in member.dataset.groups]
                photos = itertools.compress(photos, np.isin(first_texts, member.texts))
            for location, name in photos:
                yield (type(member.dataset), location), name

    def contents(self) -> Iterable[np.ndarray | list[Any] | dict[str, Any] | None]:
        for member in self.members:
            yield member.texts
            yield from member.dataset.contents()
            if member.box_reader is not None:
                yield from member.box_reader.contents()

    def truths(self) -> Iterable[Any]:
        for member in self.members:
            is_kept = np.isin(np.arange(len(member.dataset)), member.texts)
            yield from itertools.compress(member.dataset.truths(), is_kept)

    def sample(self, texts: Sequence[int]) -> Sample:
        """The given texts about one image, whose id is prefixed with the name of its image set."""
        member, _ = self._find(texts[0])
        sample = member.dataset.sample([self._find(text)[1] for text in texts])
        groups = [self.groups.group_of(texts[0])]
        if len(sample.images) == 1:
            groups = self._same_image.get((member.images, sample.images[0].id), groups)
        return dataclasses.replace(
            sample,
            images=tuple(self._image(image, member) for image in sample.images),
            texts=tuple(self._text(text, index, member) for text, index in zip(sample.texts, texts, strict=True)),
            pool=self,
            own_texts=[text for group in groups for text in self.groups[group]],
            corpus=self.corpus,
        )

    def _text(self, text: SampleText, index: int, member: JoinedPart) -> SampleText:
        """A text of a part; a part with phrases only has no ground truth for the task."""
        has_other_truth = text.truth is not None or not member.dataset.has_truths
        may_lack_target = member.dataset.has_phrases and has_other_truth
        return dataclasses.replace(text, index=index, may_lack_target=may_lack_target)

    def _image(self, image: SampleImage, member: JoinedPart) -> SampleImage:
        boxes, objects = image.boxes, image.objects
        if self.class_names is not None and objects is not None and objects.classes is None:
            objects = dataclasses.replace(objects, classes=np.full(len(objects), -1, dtype=np.int64))
        if boxes is None and member.box_reader is not None:
            boxes = member.box_reader.of_part(image.part).read(image.id)
        space, image_aliases = member.dataset.id_namespace, image.image_aliases
        if space is not None and not image_aliases:
            image_aliases = ((space, image.id),)
        return dataclasses.replace(
            image, id=f"{member.images}/{image.id}", boxes=boxes, objects=objects, image_aliases=image_aliases
        )

    def _find(self, text: int) -> tuple[JoinedPart, int]:
        number = bisect.bisect_right(self.starts, text, hi=len(self.members)) - 1
        member = self.members[number]
        return member, int(member.texts[text - self.starts[number]])


def _locate(
    part: PartSettings, dataset: VLDataset, images: Sequence[ImageKey], *, first_split: int
) -> Iterator[tuple[ImageKey, str]]:
    """Images of a part with their places; parts of one image set have the same images wherever they lie.

    Args:
        first_split: the index of the part's first split among those of all parts.
    """
    if not images:  # the data set does not list them, or a group has several
        return
    photo_of = dict(zip(dataset.image_keys(), dataset.image_locations(), strict=True))
    for key in images:
        location, name = photo_of[key]
        place = f"{location}: {name}" if part.images is None else part.images
        yield ImageKey(first_split + key.part, key.id), place


def _kept_groups(
    name: str, part: PartSettings, dataset: VLDataset, root: Path
) -> tuple[Sequence[Sequence[int]], list[ImageKey]]:
    """The groups that `only_images` and `without_images` keep, and their images (empty if unknown)."""
    images = list(dataset.image_keys())
    if len(images) != len(dataset.groups):  # ids are unknown, or a group has several images
        images = []
    if part.only_images is None and part.without_images is None:
        return dataset.groups, images
    ids = [key.id for key in images]
    require_unique(ids, f"data.config.parts.{name}: only_images and without_images need one image per id; image")
    only = None if part.only_images is None else set(read_text(root / part.only_images).split())
    without = set() if part.without_images is None else set(read_text(root / part.without_images).split())
    kept = [row for row, one in enumerate(ids) if (only is None or one in only) and one not in without]
    if not kept:
        raise UserError(
            f"data.config.parts.{name}: no image is left by only_images and without_images; they list ids such as "
            f"{', '.join(ids[:1]) or 'those of a data set that lists its images'}"
        )
    return [dataset.groups[row] for row in kept], [images[row] for row in kept]
