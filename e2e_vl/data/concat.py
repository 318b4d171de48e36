"""Several data sets joined into one, such as captions and questions for pre-training.

Each has its own files, options and splits, all below `data.root`; files that all of them share may be set in
`data.files`. Tasks that accept any text about an image can be trained on them.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import logging
from collections.abc import Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from torch.utils.data import ConcatDataset
from typing_extensions import override

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
from e2e_vl.data.config import JoinedDatasetConfig, JoinedMemberConfig
from e2e_vl.data.image_loader import BoxReader, open_boxes_of
from e2e_vl.data.overlap import GlobalImageId, ImageIdLookup
from e2e_vl.data.tables import TextGroups
from e2e_vl.io import read_text, require_unique
from e2e_vl.registry import DATASETS
from e2e_vl.samples import ImageKey, Sample, SampleImage, SampleText, TextPool

logger = logging.getLogger(__name__)


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
    split_values = ()  # samples contain their boxes
    mixes_objects = True

    def __init__(self, files: DataFiles, options: JoinedDatasetConfig, split: str, needs: DataNeeds) -> None:
        self.members: list[JoinedPart] = []
        self.starts = [0]
        self._groups_of_image: dict[tuple[str, str], list[int]] = {}  # for images that several parts may have
        numbers: list[np.ndarray] = []
        counts: list[int] = []
        splits_of: dict[type[VLDataset], list[JoinedSplit]] = {}
        located_images_of: dict[type[VLDataset], list[tuple[ImageKey, str]]] = {}
        held_out_ids = self._held_out_ids(files, options) if needs.training else set()
        left_out_images: list[str] = []  # of each part: how many, and of how many
        for name, part, part_files, part_options in self._parts_of(files, options, split):
            kind = DATASETS[part.name].cls
            check_boxes_source(kind, name, needs.boxes)
            dataset = kind(part_files, part_options, part.splits[split], needs)
            box_reader = open_boxes_of(dataset, part_files.settings, needs.boxes)
            groups, images = _select_groups(name, part, dataset, files.root)
            if held_out_ids:
                num_groups = len(groups)
                groups, images = _leave_out(name, part, dataset, groups, images, held_out_ids)
                left_out_images.append(f"{num_groups - len(groups):,} of the {num_groups:,} images of {name}")
            if box_reader is not None:
                box_reader.require_images(images, f"{split} of {name}")
            splits = splits_of.setdefault(kind, [])
            located_images_of.setdefault(kind, []).extend(_locate(part, dataset, images, first_split=len(splits)))
            for values in dataset.split_values:
                splits.append(JoinedSplit(name, dataset.files_by_image_id(part_files, needs, values)))
            texts = np.fromiter(itertools.chain.from_iterable(groups), dtype=np.int64)
            ascending = np.sort(texts)
            self.members.append(JoinedPart(part.images or f"of {name}", dataset, box_reader, ascending))
            if part.images is not None:
                # an id that two joined splits of a part use excludes too many mismatched texts, never too few
                for group, image in enumerate(images, start=len(counts)):
                    self._groups_of_image.setdefault((part.images, image.id), []).append(group)
            numbers.append(self.starts[-1] + np.searchsorted(ascending, texts))
            counts += map(len, groups)
            self.starts.append(self.starts[-1] + len(texts))
        if held_out_ids:
            held_out = ", ".join(options.held_out_splits)
            logger.info("Training leaves out images that are in %s: %s.", held_out, ", ".join(left_out_images))
        for kind, splits in splits_of.items():  # other kinds may name the same locations in other ways
            require_distinct_ids(located_images_of[kind], splits)
        self.groups = TextGroups(np.concatenate(numbers), counts)
        datasets = [member.dataset for member in self.members]
        lists_of_classes = {tuple(map(normalise_class_name, dataset.class_names or ())) for dataset in datasets}
        if not needs.objects:  # then some may have no classes
            lists_of_classes.discard(())
        if len(lists_of_classes) > 1:
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
        cls, files: DataFiles, options: JoinedDatasetConfig, split: str
    ) -> Iterator[tuple[str, JoinedMemberConfig, DataFiles, Any]]:
        """Yield name, settings, files and options of each part of a split."""
        parts = {name: part for name, part in options.datasets.items() if split in part.splits}
        if not parts:
            raise UserError(f"No data set in data.config.datasets has the split {split}; add it to the `splits` of one")
        for name, part in parts.items():
            kind = DATASETS[part.name].cls
            shared_files = {key: file for key, file in files.settings.files.items() if key in kind.file_keys}
            settings = msgspec.structs.replace(
                files.settings, name=part.name, files=shared_files | part.files, config=part.config
            )
            part_files, part_options = open_options(kind, settings)
            yield name, part, part_files, part_options

    @classmethod
    def _held_out_ids(cls, files: DataFiles, options: JoinedDatasetConfig) -> set[GlobalImageId]:
        """Return the ids of the images of `held_out_splits`, which training leaves out."""
        held_out_ids: set[GlobalImageId] = set()
        for held_out_split in options.held_out_splits:
            for name, part, part_files, part_options in cls._parts_of(files, options, held_out_split):
                needs = DataNeeds(BoxSource.ONLINE)
                dataset = DATASETS[part.name].cls(part_files, part_options, part.splits[held_out_split], needs)
                groups, _ = _select_groups(name, part, dataset, files.root)
                for ids in _global_ids(part, dataset, groups):
                    held_out_ids |= ids
        return held_out_ids

    @classmethod
    @override
    def texts_of(cls, files: DataFiles, options: JoinedDatasetConfig, split: str) -> Iterable[str]:
        """Yield all texts of all parts, including those about images that are left out."""
        for _, part, part_files, part_options in cls._parts_of(files, options, split):
            yield from DATASETS[part.name].cls.texts_of(part_files, part_options, part.splits[split])

    @classmethod
    @override
    def class_names_of(cls, options: JoinedDatasetConfig) -> Sequence[str] | None:
        """Return the classes of the first part whose texts refer to boxes by class."""
        for kind, part_options in cls._kinds_of(options):
            names = kind.class_names_of(part_options)
            if names:
                return names
        return None

    @classmethod
    @override
    def accepts_answer(cls, options: JoinedDatasetConfig) -> bool:
        return any(kind.accepts_answer(part_options) for kind, part_options in cls._kinds_of(options))

    @classmethod
    @override
    def reads_masks(cls, options: JoinedDatasetConfig) -> bool:
        """Return whether one of the parts can; texts of the others teach no masks."""
        return any(kind.reads_masks(part_options) for kind, part_options in cls._kinds_of(options))

    @classmethod
    @override
    def select_candidates(cls, sample: Sample, options: JoinedDatasetConfig) -> Sample:
        """Keep the candidates that the first part whose texts refer to boxes by class would keep."""
        for kind, part_options in cls._kinds_of(options):
            if kind.class_names_of(part_options):
                return kind.select_candidates(sample, part_options)
        return sample

    @classmethod
    def _kinds_of(cls, options: JoinedDatasetConfig) -> Iterator[tuple[type[VLDataset], Any]]:
        for part in options.datasets.values():
            yield DATASETS[part.name].cls, part.config

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, text: int) -> str:
        """Return the words of a text; texts of other images may be sampled."""
        member, member_text = self._find(text)
        if isinstance(member.dataset, TextPool):
            return member.dataset[member_text]
        return member.dataset.sample([member_text]).texts[0].words

    @override
    def image_locations(self) -> Iterable[tuple[Hashable, str]]:
        for member in self.members:
            images = list(member.dataset.image_locations())
            if len(images) == len(member.dataset.groups):  # one image each: some may be left out
                first_texts = [texts[0] for texts in member.dataset.groups]
                images = itertools.compress(images, np.isin(first_texts, member.texts))
            for location, name in images:
                yield (type(member.dataset), location), name

    @override
    def contents(self) -> Iterable[np.ndarray | list[Any] | dict[str, Any] | None]:
        for member in self.members:
            yield member.texts
            yield from member.dataset.contents()
            if member.box_reader is not None:
                yield from member.box_reader.contents()

    @override
    def truths(self) -> Iterable[Any]:
        for member in self.members:
            is_used = np.isin(np.arange(len(member.dataset)), member.texts)
            yield from itertools.compress(member.dataset.truths(), is_used)

    @override
    def sample(self, texts: Sequence[int]) -> Sample:
        """Return some texts about one image, whose id is prefixed with the name of its image set."""
        member, _ = self._find(texts[0])
        sample = member.dataset.sample([self._find(text)[1] for text in texts])
        images = [self._convert_image(image, member) for image in sample.images]
        sample_texts = []
        for text, index in zip(sample.texts, texts, strict=True):
            sample_texts.append(self._convert_text(text, index, member))
        groups = [self.groups.group_of(texts[0])]
        if len(sample.images) == 1:
            groups = self._groups_of_image.get((member.images, sample.images[0].id), groups)
        texts_of_image = list(itertools.chain.from_iterable(self.groups[group] for group in groups))
        return dataclasses.replace(
            sample,
            images=tuple(images),
            texts=tuple(sample_texts),
            pool=self,
            own_texts=texts_of_image,
            corpus=self.corpus,
        )

    def _convert_text(self, text: SampleText, index: int, member: JoinedPart) -> SampleText:
        """Return a part's text as one of the joined data set; if it has phrases only, it lacks the task's truth."""
        has_other_truth = text.truth is not None or not member.dataset.has_truths
        may_lack_target = member.dataset.has_phrases and has_other_truth
        return dataclasses.replace(text, index=index, may_lack_target=may_lack_target)

    def _convert_image(self, image: SampleImage, member: JoinedPart) -> SampleImage:
        """Return a part's image as one of the joined data set, with its candidate boxes."""
        boxes = image.boxes
        objects = image.objects
        if self.class_names is not None and objects is not None and objects.classes is None:
            objects = dataclasses.replace(objects, classes=np.full(len(objects), -1, dtype=np.int64))
        if boxes is None and member.box_reader is not None:
            boxes = member.box_reader.of_split(image.split_index).read(image.id)
        namespace = member.dataset.id_namespace
        image_aliases = image.image_aliases
        if namespace is not None and not image_aliases:
            image_aliases = ((namespace, image.id),)
        return dataclasses.replace(
            image, id=f"{member.images}/{image.id}", boxes=boxes, objects=objects, image_aliases=image_aliases
        )

    def _find(self, text: int) -> tuple[JoinedPart, int]:
        """Return the part that a text is from, and its index in the data set of the part."""
        number = bisect.bisect_right(self.starts, text, hi=len(self.members)) - 1
        member = self.members[number]
        return member, int(member.texts[text - self.starts[number]])


def _locate(
    part: JoinedMemberConfig, dataset: VLDataset, images: Sequence[ImageKey], *, first_split: int
) -> Iterator[tuple[ImageKey, str]]:
    """Yield the images of a part with their locations; parts of one image set share images wherever they lie.

    Args:
        first_split: the index of the part's first split among those of all parts.
    """
    if not images:  # the data set does not list them, or a group has several
        return
    location_of = dict(zip(dataset.image_keys(), dataset.image_locations(), strict=True))
    for key in images:
        folder, name = location_of[key]
        location = f"{folder}: {name}" if part.images is None else part.images
        yield ImageKey(first_split + key.split_index, key.id), location


def _select_groups(
    name: str, part: JoinedMemberConfig, dataset: VLDataset, root: Path
) -> tuple[Sequence[Sequence[int]], list[ImageKey]]:
    """Return the groups that `only_images` and `without_images` select, and their images (empty if unknown)."""
    images = list(dataset.image_keys())
    if len(images) != len(dataset.groups):  # ids are unknown, or a group has several images
        images = []
    if part.only_images is None and part.without_images is None:
        return dataset.groups, images
    image_ids = [key.id for key in images]
    require_unique(
        image_ids, f"data.config.datasets.{name}: only_images and without_images need one image per id; image"
    )
    selected_ids = set(image_ids)
    if part.only_images is not None:
        selected_ids &= set(read_text(root / part.only_images).split())
    if part.without_images is not None:
        selected_ids -= set(read_text(root / part.without_images).split())
    rows = [row for row, image_id in enumerate(image_ids) if image_id in selected_ids]
    if not rows:
        raise UserError(
            f"data.config.datasets.{name}: no image is left by only_images and without_images; they list ids such as "
            f"{', '.join(image_ids[:1]) or 'those of a data set that lists its images'}"
        )
    return [dataset.groups[row] for row in rows], [images[row] for row in rows]


def _leave_out(
    name: str,
    part: JoinedMemberConfig,
    dataset: VLDataset,
    groups: Sequence[Sequence[int]],
    images: Sequence[ImageKey],
    held_out_ids: set[GlobalImageId],
) -> tuple[Sequence[Sequence[int]], list[ImageKey]]:
    """Return the groups of a part without those that have a held-out image, and their images (empty if unknown)."""
    rows = []
    for row, ids in enumerate(_global_ids(part, dataset, groups)):
        if held_out_ids.isdisjoint(ids):
            rows.append(row)
    if not rows:
        raise UserError(
            f"data.config.datasets.{name}: no image is left, because all are in the splits of held_out_splits; remove "
            "this data set or those splits"
        )
    remaining_images = [images[row] for row in rows] if images else []
    return [groups[row] for row in rows], remaining_images


def _global_ids(
    part: JoinedMemberConfig, dataset: VLDataset, groups: Iterable[Sequence[int]]
) -> Iterator[set[GlobalImageId]]:
    """Yield the ids of the images of each group in all data sets, and in the image set of the part."""
    lookup = ImageIdLookup()
    for texts in groups:
        ids: set[GlobalImageId] = set()
        for image in dataset.sample(texts[:1]).images if len(texts) else ():
            ids.update(lookup.of_sample_image(image, dataset.id_namespace))
            if part.images is not None:
                ids.add(GlobalImageId(f"images: {part.images}", image.id))
        yield ids
