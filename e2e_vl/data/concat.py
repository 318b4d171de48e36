"""Several data sets as one, such as captions and questions for one pre-training.

Each is opened with its own files, options and splits, all below `data.root`; a file that all of them share may stand in
`data.files`. What they state comes out as it is, so this is for tasks that take any text about an image.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from detector.errors import UserError
from e2e_vl.config import BoxSource
from e2e_vl.data.base import DataFiles, DataNeeds, VLDataset, check_boxes_source, letters_of, open_options
from e2e_vl.data.config import JoinedOptions, PartSettings
from e2e_vl.data.image_loader import BoxReader, open_boxes_of
from e2e_vl.io import read_text
from e2e_vl.parts import DATASETS
from e2e_vl.samples import Sample, SampleImage, SampleText, TextPool


@dataclasses.dataclass
class JoinedPart:
    """One of the data sets, read."""

    images: str  # name of its set of images
    dataset: VLDataset
    boxes: BoxReader | None
    kept: np.ndarray | None = None  # int64, its texts that are not left out, rising; None: all

    def __len__(self) -> int:
        return len(self.dataset) if self.kept is None else len(self.kept)

    def own_number(self, text: int) -> int:
        """The number in the data set of the text with this number among the kept ones."""
        return text if self.kept is None else int(self.kept[text])

    def stated(self, text: SampleText, index: int) -> SampleText:
        """One of its texts, as one of the joined data set.

        It may lack a target of the task if this data set states phrases and, as a whole, no truth of the task's kind.
        """
        has_other_truth = text.truth is not None or not self.dataset.has_truths
        may_lack_target = self.dataset.has_phrases and has_other_truth
        return dataclasses.replace(text, index=index, may_lack_target=may_lack_target)

    def groups(self) -> Iterator[Sequence[int]]:
        """Texts of each image that is kept, by their numbers among the kept ones."""
        if self.kept is None:
            yield from self.dataset.groups
            return
        number = np.full(len(self.dataset), -1)
        number[self.kept] = np.arange(len(self.kept))
        for texts in self.dataset.groups:
            if len(texts) and number[texts[0]] >= 0:
                yield number[np.asarray(texts)].tolist()


class JoinedDataset(VLDataset):
    """The texts of some data sets, one data set after the other.

    Captions of other images are drawn from all of them; texts about the same image, in whichever part, are never taken
    for texts of another image.

    Classes are the same if their names have the same letters ("traffic light", "trafficlight"). Where the detector does
    not learn from objects, parts without classes may stand beside parts with classes; their objects get the class -1.
    """

    file_keys = ("images", "instances", "detections", "features")  # that all parts share
    box_sources = BoxSource.for_evaluation()
    annotation_files = ()  # each part has its own
    parts = ()  # boxes come with the samples
    mixes_objects = True

    def __init__(self, files: DataFiles, options: JoinedOptions, split: str, needs: DataNeeds) -> None:
        self.members: list[JoinedPart] = []
        for name, part, own_files, own_options in self._parts_of(files, options, split):
            kind, own_split = DATASETS[part.name].cls, part.splits[split]
            check_boxes_source(kind, name, needs.boxes)
            dataset = kind(own_files, own_options, own_split, needs)
            boxes = open_boxes_of(dataset, own_files.settings, needs.boxes)
            kept = _kept_texts(name, part, dataset, files.root)
            member = JoinedPart(part.images or f"of {name}", dataset, boxes, kept)
            if boxes is not None:
                boxes.require_images(_kept_images(member), f"{split} of {name}")
            self.members.append(member)
        self.starts = [0, *itertools.accumulate(map(len, self.members))]
        self.groups = [
            range(start + texts[0], start + texts[-1] + 1) if isinstance(texts, range) else [start + t for t in texts]
            for start, member in zip(self.starts[:-1], self.members, strict=True)
            for texts in member.groups()
        ]
        self._group_of = np.zeros(self.starts[-1], dtype=np.int32)
        for number, texts in enumerate(self.groups):
            self._group_of[np.asarray(texts)] = number
        self._same_image = self._find_same_images()
        names = {tuple(map(letters_of, member.dataset.class_names or ())) for member in self.members}
        if len(names if needs.objects else names - {()}) > 1:
            raise UserError(
                "the joined data sets have annotated objects of different classes, or some have none; use boxes of a "
                "file or of the detector, and set detector.loss_weight to 0"
            )
        self.class_names = next((m.dataset.class_names for m in self.members if m.dataset.class_names), None)
        corpora = [member.dataset.corpus for member in self.members if member.dataset.corpus is not None]
        if len(corpora) > 1:
            raise UserError("several of the joined data sets have a corpus; name it in one of them")
        self.corpus = corpora[0] if corpora else None
        with_phrases = [member.dataset.has_phrases for member in self.members]
        self.has_phrases = any(with_phrases)
        self.mixes_phrases = self.has_phrases and not all(with_phrases)
        self.left_out = sum(member.dataset.left_out for member in self.members)

    @classmethod
    def _parts_of(
        cls, files: DataFiles, options: JoinedOptions, split: str
    ) -> Iterator[tuple[str, PartSettings, DataFiles, Any]]:
        """Name, settings, files and options of each part of a split."""
        chosen = {name: part for name, part in options.parts.items() if split in part.splits}
        if not chosen:
            raise UserError(f"no part of data.config.parts has the split {split}; name it in its `splits`")
        for name, part in chosen.items():
            kind = DATASETS[part.name].cls
            shared = {key: file for key, file in files.settings.files.items() if key in kind.file_keys}
            settings = msgspec.structs.replace(
                files.settings, name=part.name, files={**shared, **part.files}, config=part.config
            )
            try:
                yield name, part, *open_options(kind, settings)
            except ValueError as error:
                raise UserError(f"data.config.parts.{name}: {error}") from error

    @classmethod
    def texts_of(cls, files: DataFiles, options: JoinedOptions, split: str) -> Iterable[str]:
        """All texts of all parts, also about images that are left out."""
        for _, part, *own in cls._parts_of(files, options, split):
            yield from DATASETS[part.name].cls.texts_of(*own, part.splits[split])

    @classmethod
    def class_names_of(cls, options: JoinedOptions) -> Sequence[str] | None:
        """As the first part says whose texts name boxes by their classes."""
        return next((names for kind, own in cls._kinds_of(options) if (names := kind.class_names_of(own))), None)

    @classmethod
    def takes_answer(cls, options: JoinedOptions) -> bool:
        return any(kind.takes_answer(own) for kind, own in cls._kinds_of(options))

    @classmethod
    def narrowed(cls, sample: Sample, options: JoinedOptions) -> Sample:
        """As the first part says whose texts name boxes by their classes."""
        for kind, own in cls._kinds_of(options):
            if kind.class_names_of(own):
                return kind.narrowed(sample, own)
        return sample

    @classmethod
    def _kinds_of(cls, options: JoinedOptions) -> Iterator[tuple[type[VLDataset], Any]]:
        """The data set class and the options of each part."""
        for part in options.parts.values():
            yield DATASETS[part.name].cls, part.config

    def __len__(self) -> int:
        """Number of texts."""
        return self.starts[-1]

    def __getitem__(self, text: int) -> str:
        """One text; the data set is a pool of texts."""
        member, own = self._find(text)
        dataset = member.dataset
        return dataset[own] if isinstance(dataset, TextPool) else dataset.sample([own]).texts[0].words

    def truths(self) -> Iterable[Any]:
        for member in self.members:
            truths = member.dataset.truths()
            if member.kept is not None:
                is_kept = np.isin(np.arange(len(member.dataset)), member.kept)
                truths = itertools.compress(truths, is_kept)
            yield from truths

    def sample(self, texts: Sequence[int]) -> Sample:
        """Some texts about one image; the image's id has the name of its set of images in front."""
        member, _ = self._find(texts[0])
        sample = member.dataset.sample([self._find(text)[1] for text in texts])
        stated = tuple(member.stated(*pair) for pair in zip(sample.texts, texts, strict=True))
        groups = self._same_image.get(_key(member, sample.images), [self._group_of[texts[0]]])
        own = [text for group in groups for text in self.groups[group]]
        images = tuple(self._with_boxes(image, member) for image in sample.images)
        return dataclasses.replace(sample, images=images, texts=stated, pool=self, own_texts=own, corpus=self.corpus)

    def _with_boxes(self, image: SampleImage, member: JoinedPart) -> SampleImage:
        boxes, objects = image.boxes, image.objects
        if self.class_names is not None and objects is not None and objects.classes is None:
            objects = dataclasses.replace(objects, classes=np.full(len(objects), -1, dtype=np.int64))
        if boxes is None and member.boxes is not None:
            boxes = member.boxes.read(image.id)
        space, photo_aliases = member.dataset.id_space, image.photo_aliases
        if space is not None and not photo_aliases:
            photo_aliases = ((space, image.id),)
        return dataclasses.replace(
            image, id=f"{member.images}/{image.id}", boxes=boxes, objects=objects, photo_aliases=photo_aliases
        )

    def _find(self, text: int) -> tuple[JoinedPart, int]:
        """The part that has a text, and the number of the text in it."""
        if not 0 <= text < len(self):
            raise IndexError(text)
        number = bisect.bisect_right(self.starts, text) - 1
        member = self.members[number]
        return member, member.own_number(text - self.starts[number])

    def _find_same_images(self) -> dict[tuple[str, str], list[int]]:
        """Groups of each image that parts share."""
        times = Counter(member.images for member in self.members)
        found: dict[tuple[str, str], list[int]] = {}
        first = 0
        for member in self.members:
            count = sum(1 for _ in member.groups())
            if times[member.images] > 1:
                for number, image_id in enumerate(_kept_images(member)):
                    found.setdefault((member.images, image_id), []).append(first + number)
            first += count
        return found


def _key(member: JoinedPart, images: Sequence[SampleImage]) -> tuple[str, str]:
    return member.images, images[0].id if len(images) == 1 else ""


def _images_of(dataset: VLDataset) -> list[str]:
    """The image id of each group; empty where the data set does not say it, or has several images in a group."""
    ids = list(dataset.image_ids())
    return ids if len(ids) == len(dataset.groups) else []


def _kept_images(member: JoinedPart) -> list[str]:
    if member.kept is None:
        return _images_of(member.dataset)
    kept = set(member.kept.tolist())
    images = zip(_images_of(member.dataset), member.dataset.groups, strict=True)
    return [image_id for image_id, texts in images if len(texts) and texts[0] in kept]


def _kept_texts(name: str, part: PartSettings, dataset: VLDataset, root: Path) -> np.ndarray | None:
    if part.only_images is None and part.without_images is None:
        return None
    ids = _images_of(dataset)
    if not ids:
        raise UserError(f"data.config.parts.{name} does not say its images one by one, so none can be left out.")
    listed = [
        None if file is None else set(read_text(root / file).split())
        for file in (part.only_images, part.without_images)
    ]
    only, without = listed
    kept = [
        text
        for image_id, texts in zip(ids, dataset.groups, strict=True)
        if (only is None or image_id in only) and (without is None or image_id not in without)
        for text in texts
    ]
    if not kept:
        raise UserError(
            f"data.config.parts.{name}: no image is left after only_images and without_images; write ids of the "
            f"data there, such as {ids[0]}."
        )
    return np.sort(np.array(kept, dtype=np.int64))
