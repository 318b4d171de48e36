"""Base classes of the data sets, which read images, texts and annotations from official files.

A data set returns a `Sample`. It knows no tokenizer, resized pixels, encoder or settings of a task: these belong to
`image_loader.py` and to the task's preprocessor.
"""

from __future__ import annotations

import abc
import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from detector.errors import UserError, user_path
from e2e_vl.config import BoxSource, DataSettings
from e2e_vl.data.tables import SerializedList, TextGroups, require_unique
from e2e_vl.io import Record
from e2e_vl.parts import check_name
from e2e_vl.samples import Sample, SampleImage, SampleText


@dataclasses.dataclass(frozen=True)
class DataNeeds:
    """What a run needs of a data set, so that nothing else has to be opened."""

    boxes: BoxSource = BoxSource.GT  # source of the candidate boxes
    objects: bool = False  # annotated objects, as targets of the detection losses
    training: bool = False  # the ground truth, and parts that only training reads
    phrases: bool = False  # the boxes of phrases, whatever the task

    @property
    def annotations(self) -> bool:
        """Annotated objects are needed, as candidates or as targets."""
        return self.objects or self.boxes.reads_annotations


class VLDataset(abc.ABC):
    """Images, texts and annotations of one split.

    Attributes:
        file_keys: keys of `data.files`.
        box_sources: the sources of candidate boxes that make sense.
        annotation_files: keys of `data.files`, any one of which gives the annotated objects.
        id_space: whose ids the images have, such as "vg"; None: COCO's where file names are COCO's. See
            `e2e_vl/data/overlap.py`.
        groups: text indices of each image (or pair of images).
        parts: values of the placeholders in `data.files` that name the files of boxes of this split, such as
            {"split": "val"}; several if splits are joined.
        class_names: of the annotated objects, in the order of the detector's classes; None if there are no classes.
        corpus: texts without images.
        has_phrases: some texts have annotated phrases (`SampleText.phrases`).
        has_truths: texts have a ground truth, unless the split has no annotations; False: no text of any split has.
        mixes_phrases: of several joined data sets, some have phrases and others have none.
        mixes_objects: the annotated objects of some images may lack attributes or outlines that others have.
        left_out: number of texts in the files of the split that are left out.
    """

    file_keys: ClassVar[tuple[str, ...]]
    box_sources: ClassVar[tuple[BoxSource, ...]] = tuple(BoxSource)
    annotation_files: ClassVar[tuple[str, ...]] = ("instances",)
    id_space: ClassVar[str | None] = None
    groups: Sequence[Sequence[int]]
    parts: Sequence[Mapping[str, str]]
    class_names: Sequence[str] | None = None
    corpus: Sequence[str] | None = None
    has_phrases: bool = False
    has_truths: bool = True
    mixes_phrases: bool = False
    mixes_objects: bool = False
    left_out: int = 0

    @abc.abstractmethod
    def __init__(self, files: DataFiles, options: Any, split: str, needs: DataNeeds) -> None:
        """Read the files of a split."""

    @classmethod
    @abc.abstractmethod
    def texts_of(cls, files: DataFiles, options: Any, split: str) -> Iterable[str]:
        """All texts of a split, to build a vocabulary from."""

    @classmethod
    def answers_of(cls, files: DataFiles, options: Any, split: str) -> dict[Any, str]:
        """The most frequent answer to each question of a split, to build a list of answers from."""
        raise UserError("The data have no answers that a list could be built from; set task.config.answers.")

    @classmethod
    def class_names_of(cls, options: Any) -> Sequence[str] | None:
        """The classes that a user's boxes may have, where texts name boxes by their classes."""
        return None

    @classmethod
    def takes_answer(cls, options: Any) -> bool:
        """Texts are about a question and a given answer, as rationales are."""
        return False

    @classmethod
    def narrowed(cls, sample: Sample, options: Any) -> Sample:
        """A user's sample with the candidate boxes that the options select."""
        return sample

    @abc.abstractmethod
    def __len__(self) -> int:
        """Number of texts."""

    @abc.abstractmethod
    def sample(self, texts: Sequence[int]) -> Sample:
        """Some texts of one group, with their images."""

    def truths(self) -> Iterable[Any]:
        """The ground truth of every text; None where it is unknown. Empty if it needs the images."""
        return ()

    def image_ids(self) -> Iterable[str]:
        """Ids of all images that files of boxes must have; empty where listing them would take long."""
        return ()

    def check_classes(self, num_classes: int, known: Sequence[str] | None = None) -> None:
        """Compare the classes of the annotated objects with the detector's, which sees them as numbers only.

        A file with only some of a detector's categories would number them differently.

        Args:
            num_classes: foreground classes of the detector.
            known: their names, if its weights come with them.
        """
        names = self.class_names
        if names is None:
            return
        if len(names) > num_classes or (known is None and len(names) < num_classes):
            raise UserError(
                f"The data have {len(names)} categories, but the detector has {num_classes} classes; set "
                "MODEL.ROI_HEADS.NUM_CLASSES in its config."
            )
        for number, (name, other) in enumerate(zip(names, known or names, strict=False)):
            if letters_of(name) != letters_of(other):
                raise UserError(
                    f"Class {number} is '{name}' in the data, but '{other}' to the detector's weights; give a file "
                    "with the categories of the weights, or start a detector of the data's own classes from a backbone "
                    "(detector.expect=backbone)."
                )


class TextRecord(Record):
    """One text of a `RecordDataset`, with the fields or properties `id`, `image_id`, `words` and `metadata`."""

    @property
    def image_names(self) -> tuple[str, ...]:
        """The ids of its images."""
        return (str(self.image_id),)

    @property
    def truth(self) -> Any:
        """The ground truth; None where it is unknown."""
        return None


class RecordDataset(VLDataset):
    """A data set whose texts are `TextRecord`s of one kind, serialised and grouped by their images.

    Attributes:
        texts: the records; their indices are text indices.
        is_pool: texts of other images may be drawn, as captions are.
    """

    is_pool: ClassVar[bool] = False
    texts: SerializedList[Any]
    groups: TextGroups

    def set_texts(
        self, records: Sequence[Any], where: str, images: Iterable[Any] | None = None, *, need_labels: bool = False
    ) -> None:
        """Keep the records.

        Args:
            records: with unique ids.
            where: the file and the kind of record, for errors.
            images: keys to group by, one per record, where two images may have the same name.
            need_labels: the run learns from their labels.
        """
        if not records or (need_labels and records[0].truth is None):
            raise UserError(f"{where}s: there are none, or they have no labels to learn from; choose another split")
        require_unique((record.id for record in records), where)
        self.texts = records if isinstance(records, SerializedList) else SerializedList(records, type(records[0]))
        self.groups = TextGroups.of_images(images or (record.image_names for record in records))

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, text: int) -> str:
        """The words of a text."""
        return self.texts[text].words

    def image_ids(self) -> Iterable[str]:
        return (name for own in self.groups for name in self.texts[own[0]].image_names)

    def truths(self) -> Iterable[Any]:
        return (record.truth for record in self.texts)

    def sample(self, texts: Sequence[int]) -> Sample:
        images = tuple(self.image(name, texts[0]) for name in self.texts[texts[0]].image_names)
        chosen = tuple(self.text(index) for index in texts)
        if not self.is_pool:
            return Sample(images, chosen)
        return Sample(images, chosen, pool=self, own_texts=self.groups[self.groups.group_of(texts[0])])

    @abc.abstractmethod
    def image(self, name: str, text: int) -> SampleImage:
        """An image of a text."""

    def text(self, index: int) -> SampleText:
        """One text, with its ground truth."""
        record = self.texts[index]
        image_index = tuple(range(len(record.image_names)))
        return SampleText(index, record.words, record.metadata, record.truth, image_index=image_index)


class DataFiles:
    """The files of `data.files`, relative to `data.root`; their names may have placeholders such as {split}.

    Args:
        file_keys: keys of the files that the data set reads.
    """

    def __init__(self, settings: DataSettings, file_keys: Sequence[str]) -> None:
        for key in settings.files:
            check_name(key, file_keys, f"data.files of {settings.name}: the key")
        self.root = user_path(settings.root, "data.root")
        self.settings = settings

    def __contains__(self, key: str) -> bool:
        return key in self.settings.files

    def path(self, key: str, **values: str) -> Path:
        """The path of `data.files.<key>`, with values for its placeholders."""
        return self.root / self.name(key, **values)

    def name(self, key: str, **values: str) -> str:
        """The name in the settings, with values for its placeholders."""
        if key not in self:
            raise UserError(f"data.files.{key} is not set; it names the {key} of {self.settings.name}.")
        name = self.settings.files[key]
        for placeholder, value in values.items():
            name = name.replace(f"{{{placeholder}}}", value)
        return name


def letters_of(name: str) -> str:
    """A class name in the form that its spellings share: "traffic light", "trafficlight", "Traffic_Light"."""
    return "".join(letter for letter in name.casefold() if letter.isalnum()) or name


def open_options(dataset: type[VLDataset], settings: DataSettings) -> tuple[DataFiles, Any]:
    """The files and the options of a data set."""
    return DataFiles(settings, dataset.file_keys), settings.config


def split_names(split: str) -> list[str]:
    """Names in a joined split such as train2014+val2014."""
    return [name.strip() for name in split.split("+")]


def coco_image_set(split: str | None) -> str | None:
    """COCO's image set of a split: test2015 for test-dev2015, val2014 for valminusminival2014; None for other names."""
    found = re.match(r"(train|val|test|minival|nominival).*?(20\d\d)$", split or "")
    return found[1].removeprefix("mini").removeprefix("nomini") + found[2] if found else None


def check_boxes_source(dataset: type[VLDataset], name: str, boxes: BoxSource) -> None:
    """Raise a UserError if the data set cannot have candidate boxes of this source."""
    if boxes not in dataset.box_sources:
        raise UserError(
            f"{name} cannot have boxes from '{boxes}'; set data.boxes.train and eval.boxes to one of "
            f"{', '.join(dataset.box_sources)}."
        )
