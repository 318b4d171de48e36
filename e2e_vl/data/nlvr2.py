"""NLVR2: is a sentence true of a pair of photos?

Files (`data.files`, relative to `data.root`; {split} is the split, such as train or dev, and {images} what stands
before the first hyphen of the identifiers, which differs for balanced/balanced_dev and the like)
    examples   data/{split}.json
    images     images/{images}: the images, or (train) the folders of the images by their `directory`
    instances  COCO instances, whose file names are the names of the images: boxes "gt" and detection losses
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

from msgspec import Meta

from detector.errors import UserError, reading
from e2e_vl.data.base import DataFiles, VLDataset, Wants, group_texts, split_names
from e2e_vl.data.coco import CocoInstances, read_instances
from e2e_vl.data.storage.files import require_file
from e2e_vl.data.storage.record_errors import RAISE, RecordErrors
from e2e_vl.data.storage.record_table import JoinedRecords, RecordTable
from e2e_vl.io import inside
from e2e_vl.records import Number, Record, Words, decoded
from e2e_vl.samples import CorrectChoice, Sample, SampleImage, SampleText

# Reader of the official NLVR2 files: one JSON object per line, although they end in .json.


LABELS = ("False", "True")  # as they are written; the index is the class
_IDENTIFIER = re.compile(r"\w+-[0-9]+-[0-9]+-[0-9]+")  # it names files of images


class _PairLine(Record):
    identifier: Words
    sentence: Words
    label: Annotated[Literal["True", "False"] | None, Meta(description='the text "True" or "False"')] = None
    directory: Number | str | None = None
    synset: str | None = None
    family: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class PairStatement:
    """A sentence about a pair of images."""

    identifier: str  # split-set-pair-sentence
    sentence: str
    label: str | None = None  # "True" or "False"; None in a test file without labels
    directory: str | None = None  # folder of the images, of the training split
    synset: str | None = None  # what was searched for to find the images
    family: str | None = None  # kind of statement, where the file says it (drawn scenes do)

    @property
    def pair(self) -> str:
        """The identifier without its sentence: the pair of images."""
        return self.identifier.rpartition("-")[0]

    @property
    def images(self) -> tuple[str, str]:
        """Names of the left and the right image, without suffix."""
        return f"{self.pair}-img0", f"{self.pair}-img1"


def read_examples(path: str | Path, errors: RecordErrors = RAISE) -> RecordTable[PairStatement]:
    """The examples of a file, in its order.

    Args:
        errors: what becomes of an error about one line.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a line that is no JSON object with the keys, an identifier of another form or one that is there
            twice, a label other than "True" and "False", labels in some lines only, or no line at all. File, line and
            identifier are named.
    """
    path = require_file(path, "NLVR2 examples")
    examples = RecordTable(PairStatement, _examples(path, errors))
    if not examples:
        raise UserError(f"{path}: there is no example in the file; copy or download it again")
    return examples


def _examples(path: Path, errors: RecordErrors) -> Iterator[PairStatement]:
    seen: set[str] = set()
    has_labels: bool | None = None
    with reading(path), path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            one = None
            with errors.about(f"{path}, line {number}"):
                example = _parse(line, f"{path}, line {number}")
                where = f"{path}, line {number} ({example.identifier})"
                if example.identifier in seen:
                    raise UserError(f"{where}: the identifier is there twice; remove one of the lines")
                if has_labels not in (None, example.label is not None):
                    raise UserError(
                        f"{where} has {'no' if example.label is None else 'a'} label, unlike the lines before; do not "
                        "mix splits with and without labels"
                    )
                seen.add(example.identifier)
                one, has_labels = example, example.label is not None
            if one is not None:
                yield one


def _parse(line: bytes, where: str) -> PairStatement:
    record = decoded(_PairLine, line, where, key="identifier", form="one object per line is expected")
    where = f"{where} ({record.identifier})"
    if not _IDENTIFIER.fullmatch(record.identifier):
        raise UserError(f"{where}: the identifier is not split-set-pair-sentence, such as dev-850-2-0; repair the line")
    directory = None if record.directory is None else str(record.directory)
    if directory is not None and not (directory.isascii() and directory.isdecimal()):
        raise UserError(f"{where}: directory is {directory!r}; it must be a number")
    synset, family = (None if text is None else sys.intern(text) for text in (record.synset, record.family))
    return PairStatement(record.identifier, record.sentence, record.label, directory, synset, family)


@dataclasses.dataclass(frozen=True)
class NLVR2Options:
    """Fields of `data.config`."""

    suffix: str = ".png"  # of the image files; in the release many of them are JPEG files inside
    use_directories: bool = True  # training images lie in folders by their `directory`; False: all in one folder


class NLVR2Dataset(VLDataset):
    """Sentences of one or several splits, grouped by their pair of images.

    Args:
        examples: the sentences; their indices are text indices.
        folders: of the images, by the first part of the identifiers.
        parts: placeholder values of each split, see `VLDataset.parts`.
        instances: annotated objects, by the first part of the identifiers.

    Raises:
        ValueError: an identifier in two splits, some splits with labels and some without, or an image that the
            instances lack.
    """

    known_files = ("images", "examples", "instances", "detections", "features")
    options = NLVR2Options
    id_space = "nlvr2"

    def __init__(
        self,
        examples: Sequence[PairStatement],
        folders: Mapping[str, Path],
        options: NLVR2Options,
        parts: Sequence[Mapping[str, str]],
        instances: Mapping[str, CocoInstances] | None = None,
    ) -> None:
        self.examples = examples
        self.folders = folders
        self.settings = options
        self.parts = parts
        self.groups = group_texts(example.pair for example in examples)
        self._objects: dict[str, tuple[CocoInstances, int]] = {}
        for one in (instances or {}).values():
            for number, image in one.images.items():
                self._objects[PurePosixPath(image.file_name).stem] = one, number
            self.class_names = one.class_names
        self.has_objects = instances is not None
        for name in self.image_ids() if self.has_objects else ():
            if name not in self._objects:
                files = ", ".join(dict.fromkeys(str(one.path) for one in instances.values()))
                raise UserError(f"{files}: no image has the file name {name}; use the instances of these pairs")

    @classmethod
    def open(cls, files: DataFiles, options: NLVR2Options, split: str, wants: Wants) -> NLVR2Dataset:
        """`split` names one split or several joined by "+"; the top of this file says which files there are."""
        examples: list[Sequence[PairStatement]] = []
        seen: set[str] = set()
        folders, parts, instances = {}, [], {}
        for name in split_names(split):
            path = files.path("examples", split=name)
            own = files.read(read_examples, path)
            double = next((one for one in own.column("identifier") if one in seen), None)
            if double is not None:
                raise UserError(f"{path}: example {double} is in two of the splits {split}; name each split once")
            values = {"split": name, "images": own[0].identifier.partition("-")[0]}
            seen.update(own.column("identifier"))
            examples.append(own)
            folders[values["images"]] = files.path("images", **values)
            if wants.annotations:
                of_images = files.path("instances", **values)
                instances[values["images"]] = files.read(read_instances, of_images, drop_empty_boxes=True)
            parts.append(values)
        labelled = {own[0].label is not None for own in examples}  # each is of one kind
        if len(labelled) > 1:
            raise UserError(f"some of the splits {split} have labels and some have none; join splits of one kind")
        if wants.training and labelled == {False}:
            raise UserError(f"{path}: the split {split} has no labels to learn from; train on another split")
        return cls(JoinedRecords(examples), folders, options, parts, instances or None)

    @classmethod
    def texts_of(cls, files: DataFiles, options: NLVR2Options, split: str) -> Iterable[str]:
        """All sentences of a split."""
        return [
            one.sentence
            for name in split_names(split)
            for one in files.read(read_examples, files.path("examples", split=name))
        ]

    def __len__(self) -> int:
        """Number of sentences about pairs."""
        return len(self.examples)

    def image_ids(self) -> Iterable[str]:
        return (name for texts in self.groups for name in self.examples[texts[0]].images)

    def truths(self) -> Iterable[CorrectChoice | None]:
        return (_truth(example) for example in self.examples)

    def sample(self, texts: Sequence[int]) -> Sample:
        """Some sentences about one pair."""
        example = self.examples[texts[0]]
        return Sample(
            tuple(self._image(example, name) for name in example.images), tuple(self._text(index) for index in texts)
        )

    def _image(self, example: PairStatement, name: str) -> SampleImage:
        folder = self.folders[name.partition("-")[0]]
        place = f"{name}{self.settings.suffix}"
        if example.directory is not None and self.settings.use_directories:
            place = f"{example.directory}/{place}"
        file = inside(folder, place, f"example {example.identifier}", follows_links=True)
        if not self.has_objects:
            return SampleImage(name, file)
        instances, number = self._objects[name]
        return dataclasses.replace(instances.sample_image(number, file), id=name)

    def _text(self, index: int) -> SampleText:
        example = self.examples[index]
        facts = {"identifier": example.identifier, "sent": example.sentence}
        if example.label is not None:
            facts["label"] = example.label
        for key in ("synset", "family"):
            if getattr(example, key) is not None:
                facts[key] = getattr(example, key)
        return SampleText(index, example.sentence, facts, _truth(example), image_index=(0, 1))


def _truth(example: PairStatement) -> CorrectChoice | None:
    return None if example.label is None else CorrectChoice(LABELS.index(example.label))
