"""NLVR2: is a sentence true of a pair of images?

Files (`data.files`, relative to `data.root`; {split} is the split, such as train or dev, and {images} the first part
of the identifiers, up to the first hyphen, which differs from the split for balanced/balanced_dev and similar)
    examples   data/{split}.json: one JSON object per line
    images     images/{images}: folder of the images, or (train) of subfolders named by `directory`
    instances  COCO instances with the same image file names: boxes "gt" and detection losses
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

import numpy as np
from msgspec import Meta, field
from typing_extensions import override

from detector.errors import UserError
from e2e_vl.data.base import DataFiles, DataNeeds, JoinedSplit, RecordDataset, TextRecord, split_names
from e2e_vl.data.coco import CocoInstances, open_instances
from e2e_vl.data.config import NLVR2DatasetConfig
from e2e_vl.data.tables import SkippedRecords, drop_repeats, stream_lines
from e2e_vl.io import Id, Words
from e2e_vl.samples import CorrectChoice, SampleImage

LABELS = ("False", "True")  # as in the files; the index is the class


class PairStatement(TextRecord):
    """A sentence about a pair of images."""

    # split-set-pair-sentence
    id: Annotated[str, Meta(pattern=r"^\w+-[0-9]+-[0-9]+-[0-9]+$")] = field(name="identifier")
    words: Words = field(name="sentence")
    label: Literal["True", "False"] | None = None  # None in a test file without labels
    directory: Id | None = None  # image folder, in the training split
    synset: str | None = None  # search term with which the images were found
    family: str | None = None  # kind of statement, in synthetic data only

    @property
    @override
    def image_names(self) -> tuple[str, ...]:
        """Names of the left and the right image, without suffix: the identifier up to its sentence, plus the side."""
        pair = self.id.rpartition("-")[0]
        return f"{pair}-img0", f"{pair}-img1"

    @property
    @override
    def truth(self) -> CorrectChoice | None:
        return None if self.label is None else CorrectChoice(LABELS.index(self.label))

    @property
    def metadata(self) -> dict[str, str]:
        values = {"identifier": self.id, "synset": self.synset, "family": self.family}
        return {key: value for key, value in values.items() if value is not None}


def read_examples(path: str | Path) -> list[PairStatement]:
    """Read all lines; exact repeats are skipped, and their number is logged."""
    skipped = SkippedRecords(path)
    examples = list(drop_repeats(stream_lines(path, PairStatement), skipped, "examples"))
    skipped.log()
    if not examples:
        raise UserError(f"{path} has no examples; download it again.")
    return examples


class NLVR2Dataset(RecordDataset):
    """Sentences of one split, or of several joined by "+", grouped by image pair."""

    file_keys = ("images", "examples", "instances", "detections", "features")
    id_namespace = "nlvr2"

    def __init__(self, files: DataFiles, options: NLVR2DatasetConfig, split: str, needs: DataNeeds) -> None:
        self.options = options
        self.folders: list[Path] = []  # of images, for each split
        self.split_values: list[dict[str, str]] = []
        examples: list[PairStatement] = []
        splits: list[JoinedSplit] = []
        for name in split_names(split):
            split_examples = read_examples(files.path("examples", split=name))
            values = {"split": name, "images": split_examples[0].id.partition("-")[0]}
            folder = files.path("images", **values)
            boxes = self.files_by_image_id(files, needs, values)
            splits.append(JoinedSplit(name, boxes, folder, len(split_examples)))
            self.folders.append(folder)
            examples += split_examples
            self.split_values.append(values)
        self.set_texts(examples, f"the splits {split}: example", splits, need_labels=needs.training)
        self.instances: list[CocoInstances] = []  # of each split
        if needs.annotations:
            self.instances = open_instances(files, self.split_values)
            self.class_names = self.instances[0].class_names
            self._ids_of_names = {instances.path: _ids_of_names(instances) for instances in self.instances}
            for split_index, name in self.image_keys():
                path = self.instances[split_index].path
                if name not in self._ids_of_names[path]:
                    raise UserError(f"{path}: no image is named {name}; use the instances file of these pairs")

    @classmethod
    @override
    def texts_of(cls, files: DataFiles, options: NLVR2DatasetConfig, split: str) -> Iterable[str]:
        for name in split_names(split):
            for example in read_examples(files.path("examples", split=name)):
                yield example.words

    @override
    def contents(self) -> Iterable[np.ndarray]:
        yield from super().contents()
        if self.instances:
            for split_index, name in self.image_keys():
                instances = self.instances[split_index]
                yield instances.encoded(self._ids_of_names[instances.path][name])

    @override
    def image(self, name: str, text: int) -> SampleImage:
        example = self.texts[text]
        split_index = self.split_index(text)
        folder = self.folders[split_index]
        if example.directory is not None and self.options.use_folders:
            folder = folder / str(example.directory)
        file = folder / f"{name}{self.options.suffix}"
        if not self.instances:
            return SampleImage(name, file)
        instances = self.instances[split_index]
        image_id = self._ids_of_names[instances.path][name]
        return dataclasses.replace(instances.sample_image(image_id, file), id=name)


def _ids_of_names(instances: CocoInstances) -> dict[str, Id]:
    """Return the id of each image, by its file name without folder and suffix."""
    return {PurePosixPath(image.file_name).stem: image.id for image in instances.images}
