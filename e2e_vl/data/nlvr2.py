"""NLVR2: is a sentence true of a pair of photos?

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

from msgspec import Meta, field

from detector.errors import UserError
from e2e_vl.data.base import DataFiles, DataNeeds, RecordDataset, TextRecord, split_names
from e2e_vl.data.coco import CocoInstances
from e2e_vl.data.config import NLVR2Options
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
    def image_names(self) -> tuple[str, ...]:
        """Names of the left and the right image, without suffix: the identifier up to its sentence, plus the side."""
        pair = self.id.rpartition("-")[0]
        return f"{pair}-img0", f"{pair}-img1"

    @property
    def truth(self) -> CorrectChoice | None:
        return None if self.label is None else CorrectChoice(LABELS.index(self.label))

    @property
    def metadata(self) -> dict[str, str]:
        values = {"identifier": self.id, "label": self.label, "synset": self.synset, "family": self.family}
        return {key: value for key, value in values.items() if value is not None}


def read_examples(path: str | Path) -> list[PairStatement]:
    """Read all lines; exact repeats are skipped, and their number is logged."""
    skipped = SkippedRecords(path)
    examples = drop_repeats(stream_lines(path, PairStatement), skipped, "examples")
    skipped.log()
    if not examples:
        raise UserError(f"{path} has no examples; download it again.")
    return examples


class NLVR2Dataset(RecordDataset):
    """Sentences of one split, or of several joined by "+", grouped by image pair."""

    file_keys = ("images", "examples", "instances", "detections", "features")
    id_space = "nlvr2"

    def __init__(self, files: DataFiles, options: NLVR2Options, split: str, needs: DataNeeds) -> None:
        self.options = options
        self.folders: dict[str, Path] = {}  # of images, by the first part of the identifiers
        self.parts: list[dict[str, str]] = []
        examples: list[PairStatement] = []
        objects: dict[str, tuple[CocoInstances, int | str]] = {}  # annotated, by the name of the image
        for name in split_names(split):
            own = read_examples(files.path("examples", split=name))
            values = {"split": name, "images": own[0].id.partition("-")[0]}
            self.folders[values["images"]] = files.path("images", **values)
            if needs.annotations:
                instances = CocoInstances(files.path("instances", **values))
                objects |= {PurePosixPath(one.file_name).stem: (instances, one.id) for one in instances.images}
                self.class_names = instances.class_names
            examples += own
            self.parts.append(values)
        self.set_texts(examples, f"the splits {split}: example", need_labels=needs.training)
        self.objects = objects if needs.annotations else None
        missing = next((name for name in self.image_ids() if needs.annotations and name not in objects), None)
        if missing is not None:
            raise UserError(f"{instances.path}: no image is named {missing}; use the instances file of these pairs")

    @classmethod
    def texts_of(cls, files: DataFiles, options: NLVR2Options, split: str) -> Iterable[str]:
        paths = [files.path("examples", split=name) for name in split_names(split)]
        return [example.words for path in paths for example in read_examples(path)]

    def image(self, name: str, text: int) -> SampleImage:
        example, place = self.texts[text], f"{name}{self.options.suffix}"
        if example.directory is not None and self.options.use_folders:
            place = f"{example.directory}/{place}"
        file = self.folders[name.partition("-")[0]] / place
        if self.objects is None:
            return SampleImage(name, file)
        instances, image_id = self.objects[name]
        return dataclasses.replace(instances.sample_image(image_id, file), id=name)
