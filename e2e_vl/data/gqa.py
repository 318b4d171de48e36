"""GQA: questions about the scene graphs of images, with one answer each.

Files (`data.files`, relative to `data.root`; {split} is the split, such as train_balanced, and {part} what stands
before its first underscore, such as train)
    questions     questions/{split}_questions.json, or a folder of pieces of that name
    images        folder of the images
    choices       eval/{part}_choices.json: valid and plausible answers, for two of the scores; may be left out
    answers       list of possible answers; None: built from the balanced training questions
    scene_graphs  sceneGraphs/{part}_sceneGraphs.json: boxes "gt", and the grounding score
    instances     COCO instances of the same images, whose ids are numbers: boxes "gt" and detection losses
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from detector.errors import UserError
from e2e_vl.data.base import DataFiles, VLDataset, Wants, split_names
from e2e_vl.data.formats.coco import CocoInstances, read_instances
from e2e_vl.data.formats.gqa_files import (
    EntryFile,
    GQAQuestions,
    check_question,
    find_entry,
    named_boxes,
    pieces_of,
    question_facts,
    read_choices,
    scene_objects,
)
from e2e_vl.data.formats.image_names import ImageNames, instances_image, require_instances
from e2e_vl.data.loading.grouping import ConsecutiveGroups
from e2e_vl.data.storage.json_entries import json_entries
from e2e_vl.samples import RightAnswer, Sample, SampleImage, SampleText

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class GQAOptions(ImageNames):
    """Fields of `data.config`."""

    # in evaluation, state where the objects are that a question and its answer name; needs `data.files.scene_graphs`
    grounding: bool = False


class GQADataset(VLDataset):
    """Questions of one or several splits; the texts of an image stand one after the other.

    Args:
        questions: of all splits.
        folder: of the images.
        names: how the images are called.
        parts: placeholder values of each split, see `VLDataset.parts`.
        choices, scene_graphs: files that together have all questions and images; empty: they are not needed.
        instances: annotated objects of all images.
        grounds: scene graphs of all images, for the objects that questions name; empty: they are not needed.

    Raises:
        ValueError: an image that the instances or the scene graphs lack.
    """

    known_files = (
        *("images", "questions", "choices", "answers", "scene_graphs"),
        *("instances", "detections", "features"),
    )
    options = GQAOptions
    annotation_files = ("instances", "scene_graphs")
    id_space = "vg"

    def __init__(
        self,
        questions: GQAQuestions,
        folder: Path,
        names: ImageNames,
        parts: Sequence[Mapping[str, str]],
        *,
        choices: Sequence[EntryFile] = (),
        scene_graphs: Sequence[EntryFile] = (),
        instances: CocoInstances | None = None,
        grounds: Sequence[EntryFile] = (),
    ) -> None:
        self.questions = questions
        self.folder = folder
        self.names = names
        self.parts = parts
        self.choices = choices
        self.scene_graphs = scene_graphs
        self.instances = instances
        self.grounds = grounds
        self.groups = ConsecutiveGroups(questions.counts)
        if instances is not None:
            require_instances(instances, questions.image_ids)
            self.class_names = instances.class_names
        elif scene_graphs:
            for image_id in questions.image_ids:
                find_entry(scene_graphs, image_id)

    @classmethod
    def open(cls, files: DataFiles, options: GQAOptions, split: str, wants: Wants) -> GQADataset:
        """`split` names one split or several joined by "+"; the top of this file says which files there are."""
        parts = [{"split": name, "part": name.partition("_")[0]} for name in split_names(split)]
        more: dict[str, Any] = {}
        if wants.annotations and "instances" in files:
            paths = {files.path("instances", **values) for values in parts}
            if len(paths) > 1:
                raise UserError("data.files.instances must be one file for splits that are joined.")
            more["instances"] = files.read(read_instances, paths.pop(), drop_empty_boxes=True)
        elif wants.objects:
            raise UserError(
                "The names in scene graphs are no classes of a detector; give an instances file as "
                "data.files.instances, or set detector.loss_weight to 0."
            )
        elif wants.annotations:
            paths = dict.fromkeys(files.path("scene_graphs", **values) for values in parts)
            more["scene_graphs"] = [files.read(EntryFile, path, "scene graphs") for path in paths]
        if "choices" in files and not wants.training:
            more["choices"] = _open_parts(files, parts, "choices", "validity and plausibility are")
        if options.grounding and not wants.training:
            more["grounds"] = more.get("scene_graphs") or _open_parts(files, parts, "scene_graphs", "grounding is")
        questions = files.read(GQAQuestions, tuple(_question_files(files, split)))
        return cls(questions, files.path("images"), options, parts, **more)

    @classmethod
    def reads(cls, options: GQAOptions, split: str, wants: Wants) -> tuple[str, ...]:
        """Questions may lie in pieces, and not every split has choices; `open` looks for them."""
        unread = ("questions", "choices", "answers", "scene_graphs")
        return tuple(key for key in super().reads(options, split, wants) if key not in unread)

    @classmethod
    def texts_of(cls, files: DataFiles, options: GQAOptions, split: str) -> Iterable[str]:
        """All questions of a split with their answers."""
        for path in _question_files(files, split):
            for entry in json_entries(path, "questions"):
                check_question(entry.value, f"{path}: question {entry.key}")
                yield entry.value["question"]
                if entry.value.get("answer") is not None:
                    yield entry.value["answer"]

    @classmethod
    def answers_of(cls, files: DataFiles, options: GQAOptions, split: str) -> dict[Any, str]:
        """Of the balanced questions: the table of 1,842 answers comes from train_balanced+val_balanced."""
        questions = files.read(GQAQuestions, tuple(_question_files(files, split)))
        found = {row: answer for row, answer in enumerate(questions.answers()) if questions.is_balanced[row]}
        for row in (row for row, answer in found.items() if answer is None):
            with files.errors:
                raise UserError(f"{questions.place(row)} has no answer; build the list of answers from another split")
        return {row: answer for row, answer in found.items() if answer is not None}

    def __len__(self) -> int:
        """Number of questions."""
        return len(self.questions)

    def image_ids(self) -> Iterable[str]:
        return self.questions.image_ids

    def truths(self) -> Iterable[RightAnswer | None]:
        return (None if answer is None else RightAnswer(answer) for answer in self.questions.answers())

    def sample(self, texts: Sequence[int]) -> Sample:
        """Some questions about one image."""
        image = self._image(self.questions.image_ids[self.groups.of_text(texts[0])])
        return Sample((image,), tuple(self._text(index) for index in texts))

    def _image(self, image_id: str) -> SampleImage:
        file = self.names.file(self.folder, image_id)
        if self.instances is not None:
            return instances_image(self.instances, image_id, file)
        if self.scene_graphs:
            return SampleImage(image_id, file, *scene_objects(find_entry(self.scene_graphs, image_id), image_id))
        return SampleImage(image_id, file)

    def _text(self, index: int) -> SampleText:
        question_id, record = self.questions[index]
        facts = question_facts(question_id, record)
        answer = facts.get("answer")
        if self.choices and answer is not None and facts["isBalanced"]:
            facts["choices"] = read_choices(find_entry(self.choices, question_id), question_id)
        if self.grounds and answer is not None and facts["isBalanced"]:
            where = self.questions.place(index)
            facts["named_boxes"] = named_boxes(record, find_entry(self.grounds, record["imageId"]), where)
        return SampleText(index, facts["question"], facts, None if answer is None else RightAnswer(answer))


def _question_files(files: DataFiles, split: str) -> list[Path]:
    return [piece for name in split_names(split) for piece in pieces_of(files.path("questions", split=name))]


def _open_parts(files: DataFiles, parts: Sequence[Mapping[str, str]], key: str, left_out: str) -> list[EntryFile]:
    """A file for each part; none if a part has no file, since a score needs all of them."""
    what = key.replace("_", " ")
    paths = list(dict.fromkeys(files.path(key, **values) for values in parts))
    for path in paths:
        if not path.is_file():  # the release has them for train and val only
            logger.warning("%s: there is no such file of %s, so %s left out.", path, what, left_out)
            return []
    return [files.read(EntryFile, path, what) for path in paths]
