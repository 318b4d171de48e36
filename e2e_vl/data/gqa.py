"""GQA: questions generated from scene graphs of images, with one answer each.

Files (`data.files`, relative to `data.root`; {split} is the split, such as train_balanced, and {part} its name before
the first underscore, such as train)
    questions     questions/{split}_questions.json, or a folder of parts with this name
    images        folder of the images
    choices       eval/{part}_choices.json (optional): valid and plausible answers, for two of the metrics
    answers       answer vocabulary; None: built from the balanced training questions
    scene_graphs  sceneGraphs/{part}_sceneGraphs.json: boxes "gt", and the grounding metric
    instances     COCO instances of the same images (numeric ids only): boxes "gt" and detection losses
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import field
from typing_extensions import override

from detector.errors import MissingFileError, UserError, user_path
from e2e_vl.data.base import DataFiles, DataNeeds, JoinedSplit, RecordDataset, TextRecord, split_names
from e2e_vl.data.box_checks import has_part_inside, require_pixels
from e2e_vl.data.coco import CocoInstances, encoded_objects, open_instances
from e2e_vl.data.config import GQADatasetConfig
from e2e_vl.data.tables import SerializedDict, SkippedRecords, stream_dict
from e2e_vl.io import Pixel, Record, Side, Words, files_in
from e2e_vl.samples import AnnotatedObjects, SampleImage, SampleText, StructuredAnswer

logger = logging.getLogger(__name__)

# program steps that only read out the answer, and that the official evaluation script does not count
_NO_STEP = re.compile("exist|query: name|choose name")


class _Types(Record):
    structural: str | None
    semantic: str | None
    detailed: str | None


class _Step(Record):
    operation: str
    argument: str


class _NamedObjects(Record):
    question: dict[str, str] = field(default_factory=dict)
    full_answer: dict[str, str] = field(name="fullAnswer", default_factory=dict)


class _FileQuestion(Record, kw_only=True):
    question: Words
    image_id: Words = field(name="imageId")
    is_balanced: bool = field(name="isBalanced")
    answer: str | None = None  # missing in the splits test, challenge and submission
    types: _Types | None = None
    groups: dict[str, str | None] = field(default_factory=dict)
    entailed: list[str] = field(default_factory=list)
    semantic: list[_Step] = field(default_factory=list)
    annotations: _NamedObjects = field(default_factory=_NamedObjects)


class GQAQuestion(TextRecord, array_like=True):
    """One question; the fields after `answer` are for metrics."""

    id: str
    image_id: str
    words: str
    is_balanced: bool
    answer: str | None = None
    types: dict[str, str | None] = field(default_factory=dict)
    group: str | None = None
    entailed: list[str] = field(default_factory=list)
    steps: int = 0  # number of reasoning steps in its program
    named: list[str] = field(default_factory=list)  # objects mentioned in the question and its full answer

    @property
    def has_score(self) -> bool:
        """Whether the official script scores its answer."""
        return self.answer is not None and self.is_balanced

    @property
    @override
    def truth(self) -> StructuredAnswer | None:
        if self.answer is None:
            return None
        return StructuredAnswer(
            self.answer, types=self.types, group=self.group, entailed=tuple(self.entailed), steps=self.steps
        )

    @property
    def metadata(self) -> dict[str, Any]:
        """The ids, and whether the official script scores the question."""
        return {"question_id": self.id, "image_id": self.image_id, "is_balanced": self.is_balanced}


class Choices(Record):
    """The valid and the plausible answers to a question."""

    valid: list[str]
    plausible: list[str]


class SceneObject(Record):
    """One object of a scene graph."""

    name: str
    x: Pixel
    y: Pixel
    w: Pixel
    h: Pixel

    @property
    def corners(self) -> tuple[float, float, float, float]:
        return self.x, self.y, self.x + self.w, self.y + self.h


class SceneGraph(Record):
    """The objects of one image."""

    width: Side
    height: Side
    objects: dict[str, SceneObject]

    def shows(self, key: str) -> bool:
        """Return whether the box of an object has an area, and reaches into the image."""
        x1, y1, x2, y2 = self.objects[key].corners
        has_area = x1 < x2 and y1 < y2
        return has_area and has_part_inside((x1, y1, x2, y2), self.width, self.height)


def find_pieces(path: str | Path) -> list[Path]:
    """Return the file, or the parts in which a large one is released: NAME/NAME_0.json, ... for NAME.json."""
    path = user_path(path)
    if path.is_file():
        return [path]
    folder = path if path.is_dir() else path.with_suffix("")
    numbered = {}
    pieces = files_in(folder, (".json",), deep=False) if folder.is_dir() else []
    for piece in pieces:
        match = re.fullmatch(rf"{re.escape(folder.name)}_([0-9]+)", piece.stem)
        if match is not None:
            numbered[int(match[1])] = piece
    if not numbered or len(numbered) <= max(numbered):
        raise MissingFileError(
            f"{path} does not exist, and {folder} does not have all parts {folder.name}_0.json, "
            f"{folder.name}_1.json, ...; check the path in the data config, or download all parts"
        )
    return [numbered[number] for number in sorted(numbered)]


def read_questions(paths: Iterable[Path]) -> Iterator[GQAQuestion]:
    """Yield the questions of several files (parts of a split, or several splits), in file order."""
    for path in paths:
        for key, row in stream_dict(path, _FileQuestion):
            question = GQAQuestion(key, row.image_id, row.question, row.is_balanced)
            if row.answer is not None:
                if row.types is None:
                    raise UserError(f"{path}: question {key} has an answer but no types, which the metrics need")
                question.answer = row.answer
                question.group = row.groups.get("global")
                question.entailed = row.entailed
                question.types = msgspec.structs.asdict(row.types)
                program = [f"{step.operation}: {step.argument}" for step in row.semantic]
                question.steps = sum(_NO_STEP.search(step) is None for step in program)
                question.named = [*row.annotations.question.values(), *row.annotations.full_answer.values()]
            yield question


def read_entries(paths: Iterable[Path], kind: type, folder: Path | None = None) -> SerializedDict:
    """Read the `Choices` of every question, or the `SceneGraph` of every image, from one or several files.

    `folder` is that of tables.
    """
    paths = list(dict.fromkeys(paths))

    def entries() -> Iterator[tuple[str, Any]]:
        for path in paths:
            yield from stream_dict(path, kind)

    return SerializedDict.tabulate(paths, folder, entries, kind, ", ".join(map(str, paths)))


def read_scene_graphs(paths: Iterable[Path], folder: Path | None = None) -> SerializedDict[SceneGraph]:
    """Read the scene graph of every image; the number of objects that are no candidate boxes is logged.

    `folder` is that of tables.
    """
    paths = list(dict.fromkeys(paths))

    def graphs() -> Iterator[tuple[str, SceneGraph]]:
        for path in paths:
            skipped = SkippedRecords(path)
            for image_id, graph in stream_dict(path, SceneGraph):
                for key in graph.objects:
                    if not graph.shows(key):
                        skipped.add("objects with boxes that are empty or outside the image", f"{key} of {image_id}")
                yield image_id, graph
            skipped.log()

    return SerializedDict.tabulate(paths, folder, graphs, SceneGraph, ", ".join(map(str, paths)))


class GQADataset(RecordDataset):
    """Questions of one split, or of several joined by "+", grouped by image."""

    file_keys = ("images", "questions", "choices", "answers", "scene_graphs", "instances", "detections", "features")
    annotation_files = ("instances", "scene_graphs")
    id_namespace = "vg"

    def __init__(self, files: DataFiles, options: GQADatasetConfig, split: str, needs: DataNeeds) -> None:
        self.options = options
        self.folder = files.path("images")
        self.split_values = [{"split": name, "part": name.partition("_")[0]} for name in split_names(split)]
        splits: list[JoinedSplit] = []
        for values in self.split_values:
            splits.append(JoinedSplit(values["split"], self.files_by_image_id(files, needs, values), self.folder))
        self.tabulate_texts(
            _question_files(files, split),
            files.index_folder,
            lambda joined: read_questions(_question_files(files, joined.name)),
            GQAQuestion,
            f"the splits {split}: question",
            splits,
        )
        self.instances: list[CocoInstances] = []  # of each split: COCO's objects
        # of all images: scene graphs, whose objects are the candidate boxes, where there are no instances; for the
        # metrics: answer choices and scene graphs; None: not needed
        self.scene_graphs: SerializedDict[SceneGraph] | None = None
        self.choices: SerializedDict[Choices] | None = None
        self.grounding_graphs: SerializedDict[SceneGraph] | None = None
        # detection losses need classes; the objects of scene graphs have only free-text names
        if needs.objects or (needs.annotations and "instances" in files):
            self.instances = open_instances(files, self.split_values, self.image_keys())
            self.class_names = self.instances[0].class_names
        elif needs.annotations:
            paths = [files.path("scene_graphs", **values) for values in self.split_values]
            self.scene_graphs = read_scene_graphs(paths, files.index_folder)
            self.scene_graphs.require(self.image_ids())
        if "choices" in files and not needs.training:
            paths = self._paths_for_metrics(files, "choices", "validity and plausibility are")
            self.choices = read_entries(paths, Choices, files.index_folder) if paths else None
        if options.grounding and not needs.training:
            paths = self._paths_for_metrics(files, "scene_graphs", "grounding is")
            if paths:
                self.grounding_graphs = self.scene_graphs or read_scene_graphs(paths, files.index_folder)
                self._check_named_objects(", ".join(map(str, paths)))

    def _check_named_objects(self, where: str) -> None:
        """Raise a UserError if a scene graph lacks an object that a balanced question names."""
        for texts in self.groups:
            questions = [self.texts[index] for index in texts]
            questions = [question for question in questions if question.has_score]
            if not questions:
                continue
            graph = self.grounding_graphs[questions[0].image_id]
            for question in questions:
                for key in question.named:
                    if key not in graph.objects:
                        raise UserError(
                            f"{where}: image {question.image_id} has no object {key}, which question {question.id} "
                            "names; use questions and scene graphs of one release."
                        )

    def _paths_for_metrics(self, files: DataFiles, key: str, left_out: str) -> list[Path]:
        """Return the file of each split for the metrics; none if one is missing, because a metric needs all of them."""
        paths = [files.path(key, **values) for values in self.split_values]
        missing = [path for path in paths if not path.is_file()]
        if missing:  # released for train and val only
            logger.warning("%s does not exist, so %s left out.", missing[0], left_out)
            return []
        return paths

    @classmethod
    @override
    def texts_of(cls, files: DataFiles, options: GQADatasetConfig, split: str) -> Iterable[str]:
        for question in read_questions(_question_files(files, split)):
            yield question.words
            if question.answer is not None:
                yield question.answer

    @classmethod
    @override
    def answers_of(cls, files: DataFiles, options: GQADatasetConfig, split: str) -> dict[Any, str]:
        """Return the answers to the balanced questions: the 1,842 answers come from train_balanced+val_balanced."""
        questions = read_questions(_question_files(files, split))
        return {question.id: question.answer for question in questions if question.has_score}

    @override
    def contents(self) -> Iterable[np.ndarray]:
        yield from super().contents()
        yield from encoded_objects(self.instances, self.image_keys())
        if self.scene_graphs is not None:
            yield from map(self.scene_graphs.encoded_item, self.image_ids())

    @override
    def image(self, name: str, text: int) -> SampleImage:
        file = self.options.file(self.folder, name)
        if self.instances:
            return self.instances[self.split_index(text)].sample_image(name, file)
        if self.scene_graphs is None:
            return SampleImage(name, file)
        graph = self.scene_graphs[name]
        shown = {key: graph.objects[key] for key in graph.objects if graph.shows(key)}
        boxes = np.array([shown_object.corners for shown_object in shown.values()], dtype=np.float64).reshape(-1, 4)
        require_pixels(boxes, f"scene graph of image {name}")
        ids = []
        for number, key in enumerate(shown):
            ids.append(int(key) if key.isdecimal() else number)
        names = tuple(shown_object.name for shown_object in shown.values())
        objects = AnnotatedObjects(boxes, f"scene graph of image {name}", ids=tuple(ids), names=names)
        return SampleImage(name, file, (graph.height, graph.width), objects)

    @override
    def text(self, index: int) -> SampleText:
        """Return the question, whose truth has what is known of its choices and of the objects that it mentions."""
        question = self.texts[index]
        text = super().text(index)
        if not question.has_score:
            return text
        truth = text.truth
        if self.choices is not None:
            truth = dataclasses.replace(truth, choices=msgspec.to_builtins(self.choices[question.id]))
        if self.grounding_graphs is not None:
            boxes = named_boxes(question, self.grounding_graphs[question.image_id])
            truth = dataclasses.replace(truth, named_boxes=boxes)
        return dataclasses.replace(text, truth=truth)


def named_boxes(question: GQAQuestion, graph: SceneGraph) -> list[list[float]]:
    """Return the boxes of the objects mentioned in a question and its full answer: xyxy, relative to the image's size.

    As in the official evaluation script, which uses `annotations`, an object mentioned twice is listed twice.
    """
    boxes = (graph.objects[key].corners for key in question.named)
    return [[x1 / graph.width, y1 / graph.height, x2 / graph.width, y2 / graph.height] for x1, y1, x2, y2 in boxes]


def _question_files(files: DataFiles, split: str) -> list[Path]:
    """Return the files of questions of one or several splits."""
    paths: list[Path] = []
    for name in split_names(split):
        paths += find_pieces(files.path("questions", split=name))
    return paths
