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

import itertools
import logging
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta, field

from detector.errors import MissingFileError, UserError, user_path
from e2e_vl.data.base import DataFiles, DataNeeds, RecordDataset, TextRecord, split_names
from e2e_vl.data.box_checks import require_pixels
from e2e_vl.data.coco import CocoInstances
from e2e_vl.data.config import GQAOptions
from e2e_vl.data.tables import SerializedDict, SerializedList, stream_dict
from e2e_vl.io import Pixel, Record, Side, Words
from e2e_vl.samples import AnnotatedObjects, CorrectAnswer, SampleImage, SampleText

logger = logging.getLogger(__name__)

# program steps that only read out the answer, and that the official evaluation script does not count
_NO_STEP = re.compile("exist|query: name|choose name")

_Length = Annotated[float, Meta(gt=0)]  # width or height of a box, pixels


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
    def truth(self) -> CorrectAnswer | None:
        return None if self.answer is None else CorrectAnswer(self.answer)

    @property
    def metadata(self) -> dict[str, Any]:
        """Metadata for predictions and metrics; see `e2e_vl.metrics.gqa.GQAPrediction`."""
        metadata: dict[str, Any] = {"question_id": self.id, "image_id": self.image_id, "is_balanced": self.is_balanced}
        if self.answer is not None:
            metadata |= {"right_answer": self.answer, "types": self.types, "group": self.group}
            metadata |= {"entailed": self.entailed, "steps": self.steps}
        return metadata


class Choices(Record):
    """The valid and the plausible answers to a question."""

    valid: list[str]
    plausible: list[str]


class SceneObject(Record):
    """One object of a scene graph."""

    name: str
    x: Pixel
    y: Pixel
    w: _Length
    h: _Length

    @property
    def corners(self) -> tuple[float, float, float, float]:
        return self.x, self.y, self.x + self.w, self.y + self.h


class SceneGraph(Record):
    """The objects of one image."""

    width: Side
    height: Side
    objects: dict[str, SceneObject]


def find_pieces(path: str | Path) -> list[Path]:
    """The file, or the parts in which a large file is released: NAME/NAME_0.json, ... for NAME.json."""
    path = user_path(path)
    if path.is_file():
        return [path]
    folder = path if path.is_dir() else path.with_suffix("")
    numbered = {}
    for piece in folder.glob("*.json") if folder.is_dir() else ():
        if found := re.fullmatch(rf"{re.escape(folder.name)}_([0-9]+)", piece.stem):
            numbered[int(found[1])] = piece
    if not numbered or len(numbered) <= max(numbered):
        raise MissingFileError(
            f"{path} does not exist, and {folder} does not have all parts {folder.name}_0.json, "
            f"{folder.name}_1.json, ...; check the path in the data config, or download all parts"
        )
    return [numbered[number] for number in sorted(numbered)]


def read_questions(paths: Iterable[Path]) -> Iterator[GQAQuestion]:
    """The questions of several files (parts of a split, or several splits), in file order."""
    for path in paths:
        for key, row in stream_dict(path, _FileQuestion):
            question = GQAQuestion(key, row.image_id, row.question, row.is_balanced)
            if row.answer is not None:
                if row.types is None:
                    raise UserError(f"{path}: question {key} has an answer but no types, which the metrics need")
                question.answer, question.group, question.entailed = row.answer, row.groups.get("global"), row.entailed
                question.types = msgspec.structs.asdict(row.types)
                program = [f"{step.operation}: {step.argument}" for step in row.semantic]
                question.steps = sum(_NO_STEP.search(step) is None for step in program)
                question.named = [*row.annotations.question.values(), *row.annotations.full_answer.values()]
            yield question


def read_entries(paths: Iterable[Path], kind: type) -> SerializedDict:
    """The `Choices` of every question, or the `SceneGraph` of every image, from one or several files."""
    paths = list(dict.fromkeys(paths))
    entries = itertools.chain.from_iterable(stream_dict(path, kind) for path in paths)
    return SerializedDict(entries, kind, ", ".join(map(str, paths)))


class GQADataset(RecordDataset):
    """Questions of one split, or of several joined by "+", grouped by image."""

    file_keys = ("images", "questions", "choices", "answers", "scene_graphs", "instances", "detections", "features")
    annotation_files = ("instances", "scene_graphs")
    id_space = "vg"

    def __init__(self, files: DataFiles, options: GQAOptions, split: str, needs: DataNeeds) -> None:
        self.options = options
        self.folder = files.path("images")
        self.parts = [{"split": name, "part": name.partition("_")[0]} for name in split_names(split)]
        questions = SerializedList(read_questions(_question_files(files, split)), GQAQuestion)
        self.set_texts(questions, f"the splits {split}: question")
        # of all images: COCO's objects, or else scene graphs, whose objects are the candidate boxes; for the metrics:
        # answer choices and scene graphs; None: not needed
        self.instances = self.scene_graphs = self.choices = self.grounding_graphs = None
        # detection losses need classes; the objects of scene graphs have only free-text names
        if needs.objects or (needs.annotations and "instances" in files):
            self.instances = CocoInstances(files.path("instances", **self.parts[0]))
            self.instances.require_images(self.image_ids())
            self.class_names = self.instances.class_names
        elif needs.annotations:
            self.scene_graphs = read_entries((files.path("scene_graphs", **one) for one in self.parts), SceneGraph)
            self.scene_graphs.require(self.image_ids())
        if "choices" in files and not needs.training:
            self.choices = self._read_for_metrics(files, "choices", Choices, "validity and plausibility are")
        if options.grounding and not needs.training:
            graphs = self.scene_graphs
            self.grounding_graphs = graphs or self._read_for_metrics(files, "scene_graphs", SceneGraph, "grounding is")

    def _read_for_metrics(self, files: DataFiles, key: str, kind: type, left_out: str) -> SerializedDict | None:
        """Read a file of each part for the metrics; None if one is missing, because a metric needs all of them."""
        paths = [files.path(key, **values) for values in self.parts]
        missing = [path for path in paths if not path.is_file()]
        if missing:  # released for train and val only
            logger.warning("%s does not exist, so %s left out.", missing[0], left_out)
            return None
        return read_entries(paths, kind)

    @classmethod
    def texts_of(cls, files: DataFiles, options: GQAOptions, split: str) -> Iterable[str]:
        for question in read_questions(_question_files(files, split)):
            yield question.words
            if question.answer is not None:
                yield question.answer

    @classmethod
    def answers_of(cls, files: DataFiles, options: GQAOptions, split: str) -> dict[Any, str]:
        """The answers to the balanced questions: the 1,842 answers come from train_balanced+val_balanced."""
        questions = read_questions(_question_files(files, split))
        return {one.id: one.answer for one in questions if one.is_balanced and one.answer is not None}

    def image(self, name: str, text: int) -> SampleImage:
        file = self.options.file(self.folder, name)
        if self.instances is not None:
            return self.instances.sample_image(name, file)
        if self.scene_graphs is None:
            return SampleImage(name, file)
        graph = self.scene_graphs[name]
        boxes = np.array([one.corners for one in graph.objects.values()], dtype=np.float64).reshape(-1, 4)
        require_pixels(boxes, f"scene graph of image {name}")
        ids = tuple(int(key) if key.isdecimal() else number for number, key in enumerate(graph.objects))
        names = tuple(one.name for one in graph.objects.values())
        objects = AnnotatedObjects(boxes, f"scene graph of image {name}", ids=ids, names=names)
        return SampleImage(name, file, (graph.height, graph.width), objects)

    def text(self, index: int) -> SampleText:
        question, text = self.texts[index], super().text(index)
        if question.answer is not None and question.is_balanced:
            if self.choices is not None:
                text.metadata["choices"] = msgspec.to_builtins(self.choices[question.id])
            if self.grounding_graphs is not None:
                text.metadata["named_boxes"] = named_boxes(question, self.grounding_graphs[question.image_id])
        return text


def named_boxes(question: GQAQuestion, graph: SceneGraph) -> list[list[float]]:
    """Boxes of the objects mentioned in a question and its full answer: xyxy, relative to the image's width and height.

    As in the official evaluation script, which uses `annotations`, an object mentioned twice is listed twice.
    """
    boxes = (graph.objects[key].corners for key in question.named)
    return [[x1 / graph.width, y1 / graph.height, x2 / graph.width, y2 / graph.height] for x1, y1, x2, y2 in boxes]


def _question_files(files: DataFiles, split: str) -> list[Path]:
    return [piece for name in split_names(split) for piece in find_pieces(files.path("questions", split=name))]
