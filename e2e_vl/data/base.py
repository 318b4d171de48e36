"""Base classes of the data sets, which read images, texts and annotations from official files.

A data set returns `Sample`s. Resizing is done in `image_loader.py`, and tokenization in the task's preprocessor.
"""

from __future__ import annotations

import abc
import bisect
import dataclasses
import itertools
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from typing_extensions import override

from detector.errors import UserError, user_path
from e2e_vl.config import BoxSource, DataConfig
from e2e_vl.data.table_files import tabulate
from e2e_vl.data.tables import SerializedList, TextGroups
from e2e_vl.io import Record, require_unique
from e2e_vl.registry import check_name
from e2e_vl.samples import ImageKey, Sample, SampleImage, SampleText


@dataclasses.dataclass(frozen=True)
class DataNeeds:
    """What a run needs from a data set; no other files are opened."""

    boxes: BoxSource = BoxSource.GT  # source of the candidate boxes
    objects: bool = False  # annotated objects as targets for the detection losses
    training: bool = False  # the ground truth, and anything else that is read only in training
    phrases: bool = False  # the boxes of phrases, for any task
    masks: bool = False  # the masks of the objects that texts refer to

    @property
    def annotations(self) -> bool:
        """Whether annotated objects are needed, as candidate boxes or as targets."""
        return self.objects or self.boxes.reads_annotations


class VLDataset(abc.ABC):
    """Images, texts and annotations of one split."""

    file_keys: ClassVar[tuple[str, ...]]  # of `data.files`
    box_sources: ClassVar[tuple[BoxSource, ...]] = tuple(BoxSource)  # the supported sources of candidate boxes
    # keys of `data.files`, any one of which gives the annotated objects
    annotation_files: ClassVar[tuple[str, ...]] = ("instances",)
    # where the image ids come from, such as "vg"; None: from COCO if the file names do. See `e2e_vl/data/overlap.py`
    id_namespace: ClassVar[str | None] = None
    groups: Sequence[Sequence[int]]  # text indices of each image (or pair of images)
    # for each of the joined splits, the placeholder values for its box files in `data.files`, such as {"split": "val"};
    # by default, there is one split, whose box files have no placeholders
    split_values: Sequence[Mapping[str, str]] = ({},)
    class_names: Sequence[str] | None = None  # in the order of the detector's classes; None if there are no classes
    corpus: Sequence[str] | None = None  # texts without images, for pre-training
    has_phrases: bool = False  # some texts have annotated phrases (`SampleText.phrases`)
    has_truths: bool = True  # annotated splits have a ground truth for each text
    mixes_phrases: bool = False  # only some of several joined data sets have phrases
    mixes_objects: bool = False  # some images may lack object attributes or outlines that others have
    left_out: int = 0  # texts of the split that are skipped

    @abc.abstractmethod
    def __init__(self, files: DataFiles, options: Any, split: str, needs: DataNeeds) -> None:
        """Read the files of a split."""

    @classmethod
    @abc.abstractmethod
    def texts_of(cls, files: DataFiles, options: Any, split: str) -> Iterable[str]:
        """Yield all texts of a split, for building a vocabulary."""

    @classmethod
    def answers_of(cls, files: DataFiles, options: Any, split: str) -> dict[Any, str]:
        """Return the most frequent answer to each question of a split, for building an answer vocabulary."""
        raise UserError("The data set has no answers to build a vocabulary from; set task.config.answers.")

    @classmethod
    def class_names_of(cls, options: Any) -> Sequence[str] | None:
        """Return the classes that a user's boxes may have, for data sets whose texts refer to boxes by class."""
        return None

    @classmethod
    def accepts_answer(cls, options: Any) -> bool:
        """Return whether texts depend on a question and an answer to it, as rationales do."""
        return False

    @classmethod
    def reads_masks(cls, options: Any) -> bool:
        """Return whether its reader can read the masks of the objects that texts refer to."""
        return False

    @classmethod
    def select_candidates(cls, sample: Sample, options: Any) -> Sample:
        """Keep only those candidate boxes of a user's sample that the options select."""
        return sample

    @classmethod
    def files_by_image_id(cls, files: DataFiles, needs: DataNeeds, values: Mapping[str, str]) -> tuple[Path, ...]:
        """Return the files of a split with boxes or features by image id; `values` are its placeholders."""
        keys = list(needs.boxes.needs)
        if needs.annotations:
            keys += cls.annotation_files
        return tuple(files.path(key, **values) for key in dict.fromkeys(keys) if key in files)

    @abc.abstractmethod
    def __len__(self) -> int:
        """Return the number of texts."""

    @abc.abstractmethod
    def sample(self, texts: Sequence[int]) -> Sample:
        """Return some texts, all from one group, with their images."""

    def truths(self) -> Iterable[Any]:
        """Yield the ground truth of every text, or None where it is unknown; nothing if it depends on the images."""
        return ()

    def image_ids(self) -> Iterable[str]:
        """Yield the ids of all images that box files must contain; none if listing them would be slow."""
        return ()

    def image_keys(self) -> Iterable[ImageKey]:
        """Yield the keys of the images of `image_ids`, in the same order."""
        return (ImageKey(0, image_id) for image_id in self.image_ids())

    def image_locations(self) -> Iterable[tuple[Hashable, str]]:
        """Yield where each image of `image_keys` lies, and its name there.

        Two splits of a data set that share an image have an item in common.
        """
        return ((None, image_id) for image_id in self.image_ids())

    def contents(self) -> Iterable[np.ndarray | list[Any]]:
        """Yield what was read of the texts and images, in their order and without paths, for `tables.fingerprint`."""
        return (list(texts) for texts in self.groups)

    def check_classes(self, num_classes: int, detector_names: Sequence[str] | None = None) -> None:
        """Check that the classes of the annotated objects match the detector's class indices.

        A file with a subset of the detector's categories would number them differently.

        Args:
            detector_names: the names of the detector's classes, if they are stored with its weights.
        """
        names = self.class_names
        if names is None:
            return
        has_too_many = len(names) > num_classes
        has_too_few = detector_names is None and len(names) < num_classes
        if has_too_many or has_too_few:
            raise UserError(
                f"The data set has {len(names)} categories, but the detector has {num_classes} classes; set "
                "MODEL.ROI_HEADS.NUM_CLASSES in its config."
            )
        if detector_names is None:
            return
        for number, (name, other) in enumerate(zip(names, detector_names, strict=False)):
            if normalise_class_name(name) != normalise_class_name(other):
                raise UserError(
                    f"Class {number} is '{name}' in the data set, but '{other}' in the detector's weights; use a file "
                    "with the categories of the weights, or start a detector of the data set's classes from the other "
                    "parts of the weights (detector.expect=no_predictor)."
                )


@dataclasses.dataclass(frozen=True)
class JoinedSplit:
    """One of the splits that "+" joins, or the only one."""

    name: str
    files: tuple[Path, ...] = ()  # with boxes or features by image id
    images: Hashable = None  # where its images lie: the same image id in another place is another image
    num_texts: int = 0

    @property
    def source(self) -> tuple[Hashable, ...]:
        """Splits of the same source share the images with the same ids."""
        return self.images, self.files

    @property
    def image_location(self) -> Hashable:
        """Where the images lie; without images, only the features say where they come from."""
        if self.images is None:
            return self.files
        return self.images


def require_distinct_ids(images: Iterable[tuple[ImageKey, Hashable]], splits: Sequence[JoinedSplit]) -> None:
    """Raise a UserError if two images of joined splits have the same id in one file.

    Args:
        images: the key of each image, and where it lies.
    """
    files = list(itertools.chain.from_iterable(split.files for split in splits))
    if len(set(files)) == len(files):  # no file is shared
        return
    earlier: dict[tuple[Path, str], tuple[int, Hashable]] = {}
    for (split_index, image_id), location in images:
        for path in splits[split_index].files:
            earlier_split, earlier_location = earlier.setdefault((path, image_id), (split_index, location))
            if earlier_location != location:
                earlier_name = splits[earlier_split].name
                raise UserError(
                    f"{path}: image {image_id} of the split {earlier_name} ({earlier_location}) and image {image_id} "
                    f"of the split {splits[split_index].name} ({location}) are two images with one id; set a file for "
                    "each split in data.files, with {split} in its name, or give all images different ids"
                )


class TextRecord(Record):
    """One text of a `RecordDataset`, with the fields or properties `id`, `image_id`, `words` and `metadata`."""

    @property
    def image_names(self) -> tuple[str, ...]:
        return (str(self.image_id),)

    @property
    def truth(self) -> Any:
        """The ground truth; None where it is unknown."""
        return None


class RecordDataset(VLDataset):
    """A data set whose texts are serialised `TextRecord`s of one type, grouped by image."""

    is_pool: ClassVar[bool] = False  # texts of other images may be sampled, as captions are
    texts: SerializedList[Any]  # the records; their indices are text indices
    groups: TextGroups

    def set_texts(
        self, records: Sequence[Any], where: str, splits: Sequence[JoinedSplit] = (), *, need_labels: bool = False
    ) -> None:
        """Store the records.

        Args:
            splits: the joined splits, one after the other in `records`; empty: there is only one.
            need_labels: raise an error if a record has no label.
        """
        unlabelled = []
        if need_labels:
            unlabelled = [record.id for record in records if record.truth is None]
        if len(unlabelled) == len(records):
            raise UserError(f"{where}s: none found, or they have no labels for training; choose another split")
        if unlabelled:
            raise UserError(
                f"{where}s: {len(unlabelled):,} of {len(records):,} have no label for training, such as "
                f"{unlabelled[0]}; label or remove them"
            )
        remedy = "remove one of them"
        if len(splits) > 1:
            remedy = "give the texts of joined splits different ids, by which predictions are told apart"
        require_unique((record.id for record in records), where, remedy)
        if not isinstance(records, SerializedList):
            records = SerializedList(records, type(records[0]))
        self.texts = records
        splits = splits or [JoinedSplit("", num_texts=len(records))]
        self._set_splits(splits, [split.num_texts for split in splits])
        images = ((splits[self.split_index(text)].source, record.image_names) for text, record in enumerate(records))
        self.groups = TextGroups.of_images(images)
        self._require_distinct_ids(splits)

    def tabulate_texts(
        self,
        sources: Sequence[Path],
        folder: Path,
        read: Callable[[JoinedSplit], Iterable[TextRecord]],
        type: type[TextRecord],
        where: str,
        splits: Sequence[JoinedSplit],
        options: Sequence[Any] = (),
        *,
        need_labels: bool = False,
    ) -> None:
        """Store the records of annotation files, with the help of a table in `folder` if the files are large.

        Args:
            sources: the files.
            read: returns the records of a split, and adds the number of those that it skips to `left_out`.
            type: of the records.
            splits: the joined splits, without their numbers of texts, which are counted here.
            options: which of the data set's options shape the records, as plain values.
            need_labels: see `set_texts`.
        """

        def make() -> list[np.ndarray]:
            counts = [0] * len(splits)

            def records() -> Iterator[TextRecord]:
                for number, split in enumerate(splits):
                    for record in read(split):
                        counts[number] += 1
                        yield record

            texts = SerializedList(records(), type)
            counted = [dataclasses.replace(split, num_texts=count) for split, count in zip(splits, counts, strict=True)]
            self.set_texts(texts, where, counted, need_labels=need_labels)
            return [np.array([self.left_out, *counts]), self.groups.texts, np.diff(self.groups.starts), *texts.arrays]

        names = [split.name for split in splits]
        image_sources = [split.source for split in splits]
        first_with_source = [image_sources.index(source) for source in image_sources]  # it shapes the groups
        kind = [type.__name__, *type.__struct_fields__, names, first_with_source, need_labels, *options]
        counts, texts, texts_per_image, ends, data = tabulate(sources, folder, kind, make)
        self.left_out, *num_texts = counts.tolist()
        self.texts = SerializedList.from_arrays(ends, data, type)
        self.groups = TextGroups(texts, texts_per_image)
        self._set_splits(splits, num_texts)
        self._require_distinct_ids(splits)

    def _set_splits(self, splits: Sequence[JoinedSplit], counts: Sequence[int]) -> None:
        """Set the joined splits and the number of texts of each."""
        self._split_ends = list(itertools.accumulate(counts))
        self._image_locations = [split.image_location for split in splits]

    def _require_distinct_ids(self, splits: Sequence[JoinedSplit]) -> None:
        if len({split.source for split in splits}) > 1:
            require_distinct_ids(((key, splits[key.split_index].images) for key in self.image_keys()), splits)

    def split_index(self, text: int) -> int:
        """Return the index of the joined split that a text belongs to."""
        return bisect.bisect_right(self._split_ends, text)

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, text: int) -> str:
        return self.texts[text].words

    @override
    def image_ids(self) -> Iterable[str]:
        return (key.id for key in self.image_keys())

    @override
    def image_keys(self) -> Iterable[ImageKey]:
        for texts in self.groups:
            split_index = self.split_index(texts[0])
            for name in self.texts[texts[0]].image_names:
                yield ImageKey(split_index, name)

    @override
    def image_locations(self) -> Iterable[tuple[Hashable, str]]:
        return ((self._image_locations[key.split_index], key.id) for key in self.image_keys())

    @override
    def contents(self) -> Iterable[np.ndarray]:
        yield self.texts.encoded

    @override
    def truths(self) -> Iterable[Any]:
        return (record.truth for record in self.texts)

    @override
    def sample(self, texts: Sequence[int]) -> Sample:
        group = self.groups[self.groups.group_of(texts[0])]
        first = group[0]  # several joined splits may have texts about the image: it belongs to the first of them
        split_index = self.split_index(first)
        images = []
        for name in self.texts[first].image_names:
            images.append(dataclasses.replace(self.image(name, first), split_index=split_index))
        sample_texts = tuple(self.text(index) for index in texts)
        if not self.is_pool:
            return Sample(tuple(images), sample_texts)
        return Sample(tuple(images), sample_texts, pool=self, own_texts=group)

    @abc.abstractmethod
    def image(self, name: str, text: int) -> SampleImage:
        """Return one of the images of a text; its `split_index` is set by `sample`."""

    def text(self, index: int) -> SampleText:
        """Return a text with its ground truth."""
        record = self.texts[index]
        image_index = tuple(range(len(record.image_names)))
        return SampleText(index, record.words, record.metadata, record.truth, image_index=image_index)


class DataFiles:
    """The files in `data.files`, relative to `data.root`; their names may contain placeholders such as {split}.

    Args:
        file_keys: keys of the files that the data set reads.
    """

    def __init__(self, settings: DataConfig, file_keys: Sequence[str]) -> None:
        for key in settings.files:
            check_name(key, file_keys, f"data.files of {settings.name}: the key")
        self.root = user_path(settings.root, "data.root")
        self.settings = settings

    def __contains__(self, key: str) -> bool:
        return key in self.settings.files

    def path(self, key: str, **values: str) -> Path:
        """Return the path in `data.files.<key>`, with its placeholders filled in."""
        return self.root / self.name(key, **values)

    @property
    def index_folder(self) -> Path:
        """The folder for tables and indices of large files."""
        return self.root / "index"

    def name(self, key: str, **values: str) -> str:
        """Return the name in the settings, with its placeholders filled in."""
        if key not in self:
            raise UserError(f"data.files.{key} is not set; set it to the {key} of {self.settings.name}.")
        name = self.settings.files[key]
        for placeholder, value in values.items():
            name = name.replace(f"{{{placeholder}}}", value)
        return name


def normalise_class_name(name: str) -> str:
    """Reduce a class name to small letters and digits: "traffic light" and "Traffic_Light" become "trafficlight"."""
    return "".join(letter for letter in name.casefold() if letter.isalnum()) or name


def open_options(dataset: type[VLDataset], settings: DataConfig) -> tuple[DataFiles, Any]:
    return DataFiles(settings, dataset.file_keys), settings.config


def split_names(split: str) -> list[str]:
    """Split a joined split such as train2014+val2014 into its names."""
    return [name.strip() for name in split.split("+")]


def coco_image_set(split: str | None) -> str | None:
    """Return COCO's image set of a split; None for other names.

    It is test2015 for test-dev2015, and val2014 for valminusminival2014.
    """
    match = re.match(r"(train|val|test|minival|nominival).*?(20\d\d)$", split or "")
    if match is None:
        return None
    name = match[1].removeprefix("mini").removeprefix("nomini")
    return name + match[2]


def check_boxes_source(dataset: type[VLDataset], name: str, boxes: BoxSource) -> None:
    """Raise a UserError if the data set does not support this source of candidate boxes."""
    if boxes not in dataset.box_sources:
        raise UserError(
            f"{name} does not support boxes from '{boxes}'; set data.boxes.train and eval.boxes to one of "
            f"{', '.join(dataset.box_sources)}."
        )
