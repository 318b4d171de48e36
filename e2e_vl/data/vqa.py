"""VQA v2: questions about images, with what people answered."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from detector.errors import UserError
from e2e_vl.data.base import DataFiles, VLDataset, Wants, coco_image_set, group_texts, split_names
from e2e_vl.data.formats.coco import CocoInstances, read_instances
from e2e_vl.data.formats.vqa_files import VQAQuestion, VQAQuestions, read_questions
from e2e_vl.data.storage.record_table import JoinedRecords
from e2e_vl.file_names import inside, is_name_pattern, shown
from e2e_vl.samples import HumanAnswers, Sample, SampleImage, SampleText


@dataclasses.dataclass(frozen=True)
class VQAOptions:
    """Fields of `data.config`."""

    # file name of an image; {id} is its id, {images} the COCO image set, such as train2014
    image_name: str = "COCO_{images}_{id:012d}.jpg"

    def __post_init__(self) -> None:
        if not is_name_pattern(self.image_name, "id", "images"):
            raise UserError(f"data.config.image_name is {shown(self.image_name)}; it takes {{id}} and {{images}}.")
        try:
            same = self.image_name.format(id=1, images="") == self.image_name.format(id=2, images="")
        except (KeyError, IndexError, ValueError) as error:
            raise UserError(
                f"data.config.image_name is '{self.image_name}'; it takes {{id}} and {{images}}."
            ) from error
        if same:
            raise UserError(f"data.config.image_name is '{self.image_name}'; it must hold {{id}}, the image's id.")


@dataclasses.dataclass
class VQAPart:
    """Questions of one split, and where their images are."""

    questions: VQAQuestions
    folder: Path  # of the images
    image_name: str  # with {id}
    instances: CocoInstances | None = None

    def image(self, image_id: int) -> SampleImage:
        """The facts about one image."""
        name, where = self.image_name.format(id=image_id), f"image {shown(image_id)}"
        path = inside(self.folder, name, where, follows_links=True)
        if self.instances is None:
            return SampleImage(str(image_id), path)
        return self.instances.sample_image(image_id, path)

    def check_images(self) -> None:
        """Raises ValueError unless the instances file lists all images."""
        if self.instances is None:
            return
        known = set(self.instances.images)
        missing = [image_id for image_id in self.questions.image_ids if image_id not in known]
        if missing:
            raise UserError(
                f"{self.instances.path}: has no image {missing[0]} and {len(set(missing)) - 1} more of the questions; "
                "use the instances file of the same images"
            )


class VQADataset(VLDataset):
    """Questions of one or several splits, grouped by image.

    Args:
        parts: the splits that are joined, such as train2014 and val2014.
        names: placeholder values of each part, see `VLDataset.parts`.

    Attributes:
        questions: the texts, part after part; their indices are text indices.

    Raises:
        ValueError: a question id in two splits, or an image that the instances file lacks.
    """

    known_files = ("images", "questions", "annotations", "answers", "instances", "detections", "features")
    options = VQAOptions

    def __init__(self, parts: Sequence[VQAPart], names: Sequence[Mapping[str, str]]) -> None:
        self.question_parts = list(parts)
        self.parts = names
        self.questions = JoinedRecords([part.questions for part in parts])
        seen: set[int] = set()
        for part in parts:
            double = next((number for number in part.questions.question_ids if number in seen), None)
            if double is not None:
                splits = "+".join(one["split"] for one in names)
                raise UserError(f"question {double} is in two of the splits {splits}; name each split once")
            seen.update(part.questions.question_ids if len(parts) > 1 else ())
        images = ((number, one) for number, part in enumerate(parts) for one in part.questions.image_ids)
        self.groups = group_texts(images)
        for part in parts:
            part.check_images()
        if parts[0].instances is not None:
            self.class_names = parts[0].instances.class_names

    @classmethod
    def open(cls, files: DataFiles, options: VQAOptions, split: str, wants: Wants) -> VQADataset:
        """`split` names one split or several joined by "+" (train2014+val2014).

        `data.files` holds `questions`, `annotations`, `images` (a folder) and, where annotated boxes are needed,
        `instances`; in all of them {split} is the split and {images} its COCO image set. Splits with "test" in their
        name need no annotation file.
        """
        parts, names = [], []
        for name in split_names(split):
            questions = _read_split(files, name, annotated=wants.training)
            values = {"split": name, "images": _image_set(questions[0], name)}
            part = VQAPart(
                questions, files.path("images", **values), options.image_name.replace("{images}", values["images"])
            )
            if wants.annotations and "instances" in files:
                part.instances = files.read(read_instances, files.path("instances", **values), drop_empty_boxes=True)
            parts.append(part)
            names.append(values)
        return cls(parts, names)

    @classmethod
    def reads(cls, options: VQAOptions, split: str, wants: Wants) -> tuple[str, ...]:
        keys = super().reads(options, split, wants)
        return tuple(key for key in keys if key != "answers" and (wants.training or key != "annotations"))

    @classmethod
    def texts_of(cls, files: DataFiles, options: VQAOptions, split: str) -> Iterable[str]:
        """All questions of a split and the most frequent answer to each."""
        for name in split_names(split):
            for question in _read_split(files, name, annotated=True):
                yield question.text
                yield question.most_frequent

    @classmethod
    def answers_of(cls, files: DataFiles, options: VQAOptions, split: str) -> dict[Any, str]:
        found: dict[Any, str] = {}
        for name in split_names(split):
            questions = _read_split(files, name, annotated=True)
            found.update(zip(questions.question_ids, questions.most_frequent, strict=True))
        return found

    def __len__(self) -> int:
        """Number of questions."""
        return len(self.questions)

    def image_ids(self) -> Iterable[str]:
        return (str(self._image_id(texts[0])) for texts in self.groups)

    def truths(self) -> Iterable[HumanAnswers | None]:
        return (_truth(question) for question in self.questions)

    def sample(self, texts: Sequence[int]) -> Sample:
        """Some questions about one image."""
        part = self.question_parts[self.questions.part_of(texts[0])]
        image = part.image(self._image_id(texts[0]))
        return Sample((image,), tuple(self._text(index) for index in texts))

    def _image_id(self, text: int) -> int:
        number = self.questions.part_of(text)
        return self.question_parts[number].questions.image_ids[text - self.questions.starts[number]]

    def _text(self, index: int) -> SampleText:
        question = self.questions[index]
        return SampleText(index, question.text, question.record(), _truth(question))


def _truth(question: VQAQuestion) -> HumanAnswers | None:
    return None if question.answers is None else HumanAnswers(question.answers)


def _read_split(files: DataFiles, name: str, *, annotated: bool) -> VQAQuestions:
    """Questions of one split, with answers if there are any or they are needed."""
    annotations = None
    if annotated or "annotations" in files:
        annotations = files.path("annotations", split=name)
        if not annotated and "test" in name and not annotations.is_file():
            annotations = None
    return files.read(read_questions, files.path("questions", split=name), annotations)


def _image_set(question: VQAQuestion, split: str) -> str:
    """COCO's image set of a split, or the split itself."""
    return coco_image_set(question.data_subtype) or coco_image_set(split) or split
