"""NLVR2: is a sentence true of a pair of photos?

Files (`data.files`, relative to `data.root`; {split} is the split, such as train or dev, and {images} what stands
before the first hyphen of the identifiers, which differs for balanced/balanced_dev and the like)
    examples   data/{split}.json
    images     images/{images}: the images, or (train) the folders of the images by their `directory`
    instances  COCO instances, whose file names are the names of the images: boxes "gt" and detection losses
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath

from detector.errors import UserError
from e2e_vl.data.base import DataFiles, VLDataset, Wants, group_texts, split_names
from e2e_vl.data.formats.coco import CocoInstances, read_instances
from e2e_vl.data.formats.nlvr2_files import LABELS, PairStatement, read_examples
from e2e_vl.data.storage.record_table import JoinedRecords
from e2e_vl.file_names import inside
from e2e_vl.samples import RightChoice, Sample, SampleImage, SampleText


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

    def truths(self) -> Iterable[RightChoice | None]:
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
        return SampleText(index, example.sentence, facts, _truth(example), looks_at=(0, 1))


def _truth(example: PairStatement) -> RightChoice | None:
    return None if example.label is None else RightChoice(LABELS.index(example.label))
