"""A truth is stated once: readers give it with the text, and the task makes the fields of its prediction from it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from detector.errors import UserError
from e2e_vl import registry
from e2e_vl.encoders.vl_bert import VLBertModel
from e2e_vl.predictions import PhrasesOnly, TrueObject
from e2e_vl.preprocessing import Preprocessor
from e2e_vl.samples import (
    AnnotatedObjects,
    CategorisedObjects,
    ChoiceText,
    CorrectAnswer,
    CorrectChoice,
    EntityPhrases,
    HumanAnswers,
    PhraseBoxes,
    ReferredBoxes,
    SampleImage,
    SampleText,
    ScoredAnswers,
    StructuredAnswer,
)
from e2e_vl.tasks.base import Sizes, Task
from e2e_vl.tasks.config import GQAConfig, PretrainingConfig, VQAConfig
from e2e_vl.tasks.detection import DetectionTask
from e2e_vl.tasks.flickr30k import Flickr30KTask
from e2e_vl.tasks.gqa import GQATask
from e2e_vl.tasks.nlvr2 import NLVR2Task
from e2e_vl.tasks.pretraining import PretrainingTask
from e2e_vl.tasks.refcoco import ReferringTask
from e2e_vl.tasks.vcr import VCRTask
from e2e_vl.tasks.vqa import VQATask
from e2e_vl.text import TextTokenizer
from tests.run.extensions.statements import StatementConfig, StatementTask
from tests.tasks.preprocessors import preprocess, sample_of

SIZE = 32
BOX = (10.0, 20.0, 30.0, 40.0)
ANSWERS = {"answers": ["red", "blue"], "head_width": 1, "init_from_words": False}
STRUCTURE = {"types": {"structural": "query"}, "group": None, "entailed": ("8",), "steps": 2}
PHRASES = EntityPhrases(((0, 3),), (np.array([BOX]),), entities=("1",), types=(("people",),))
OBJECTS = CategorisedObjects((2, 90), (TrueObject(BOX, 90, "cat", is_crowd=False),))
TASKS = {
    "refcoco": lambda: ReferringTask(SIZE),
    "vqa": lambda: VQATask(SIZE, VQAConfig(**ANSWERS)),
    "gqa": lambda: GQATask(SIZE, GQAConfig(**ANSWERS)),
    "nlvr2": lambda: NLVR2Task(SIZE),
    "flickr30k": lambda: Flickr30KTask(SIZE),
    "vcr": lambda: VCRTask(SIZE),
    "detection": lambda: DetectionTask(SIZE),
    "pretraining": lambda: PretrainingTask(Sizes(SIZE, vocab_size=9), PretrainingConfig(), {}),
    "statements": lambda: StatementTask(SIZE, StatementConfig()),
}
# a truth that each task learns from, and the fields that it fills
FIELDS = {
    "refcoco": (ReferredBoxes((BOX,), (9,), "cat"), {"gt_box": [*BOX], "ann_id": 9, "category": "cat"}),
    "vqa": (HumanAnswers(("red",), "red"), {"answers": ["red"], "multiple_choice_answer": "red"}),
    "gqa": (StructuredAnswer("red", **STRUCTURE), {"right_answer": "red", **STRUCTURE}),
    "nlvr2": (CorrectChoice(1), {"label": "True"}),
    "flickr30k": (PHRASES, {"gt_boxes": [[[*BOX]]], "phrase_ids": ["1"], "phrase_types": [["people"]]}),
    "vcr": (CorrectChoice(2), {"label": 2}),
    "detection": (
        OBJECTS,
        {"objects": [{"box": BOX, "category_id": 90, "category": "cat", "is_crowd": False, "area": None}]},
    ),
    "statements": (CorrectChoice(1), {"label": 1}),
}
OTHER_TRUTHS = {name: ReferredBoxes((BOX,)) for name in FIELDS} | {"refcoco": CorrectAnswer("red")}


@pytest.fixture
def make_preprocessor(tokenizer):
    def make(task: Task) -> Preprocessor:
        return task.preprocessor(TextTokenizer(tokenizer, VLBertModel.layout))

    return make


def text_of(name: str, truth, **metadata) -> SampleText:
    if name != "vcr":
        return SampleText(3, "red square", metadata, truth)
    choices = (["red"], ["blue"], ["no"], ["yes"])
    return ChoiceText(3, "red square", metadata, truth, query=(["red", [0]],), choices=choices)


def record_of(preprocessor: Preprocessor, text: SampleText) -> dict:
    objects = AnnotatedObjects(np.array([BOX]), "a test", names=("person",))
    image = SampleImage("7", Path("photo.jpg"), objects=objects)
    return preprocess(preprocessor, sample_of(text, image=image))[0].record


def test_every_task_is_tested():
    assert {type(make()) for make in TASKS.values()} == {part.cls for part in registry.TASKS.values()} | {StatementTask}


@pytest.mark.parametrize("name", TASKS)
def test_the_preprocessor_makes_records_of_the_tasks_predictions(make_preprocessor, name):
    task = TASKS[name]()
    assert make_preprocessor(task).prediction_class is task.prediction_class
    assert task.prediction_class.metadata_fields <= {*task.prediction_class.__struct_fields__}


@pytest.mark.parametrize("name", FIELDS)
def test_fields_are_made_from_the_truth(make_preprocessor, name):
    truth, fields = FIELDS[name]
    preprocessor = make_preprocessor(TASKS[name]())
    record = record_of(preprocessor, text_of(name, truth))
    assert {field: record[field] for field in fields} == fields
    assert fields.keys() <= {*preprocessor.prediction_class.__struct_fields__}
    if name != "detection":
        unknown = record_of(preprocessor, text_of(name, None))
        assert fields.keys().isdisjoint(unknown), "an unknown truth is no truth"


@pytest.mark.parametrize("name", TASKS)
def test_metadata_may_not_state_what_the_task_fills(make_preprocessor, name):
    truth, fields = FIELDS.get(name, (None, {"target_answer": "red"}))
    preprocessor = make_preprocessor(TASKS[name]())
    for field in [*fields, "correct", "file_name"]:
        with pytest.raises(UserError, match=f"'red square' state {field}, .* {preprocessor.prediction_class.__name__}"):
            record_of(preprocessor, text_of(name, truth, **{field: None}))
    ids = dict.fromkeys(preprocessor.prediction_class.metadata_fields, "5") | {"uid": "5"}
    assert ids.items() <= record_of(preprocessor, text_of(name, truth, **ids)).items()


@pytest.mark.parametrize("name", FIELDS)
def test_a_truth_of_another_kind_is_refused(make_preprocessor, name):
    preprocessor, truth = make_preprocessor(TASKS[name]()), OTHER_TRUTHS[name]
    known = " or ".join(kind.__name__ for kind in preprocessor.learns_from)
    message = f"of the class {type(truth).__name__}, but {type(preprocessor).__name__} knows {known};"
    with pytest.raises(UserError, match=message):
        record_of(preprocessor, text_of(name, truth))


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        (ReferredBoxes, "boxes"),
        (PhraseBoxes, "boxes"),
        (EntityPhrases, "entities"),
        (EntityPhrases, "types"),
        (HumanAnswers, "answers"),
        (CorrectAnswer, "answer"),
        (StructuredAnswer, "types"),
        (StructuredAnswer, "entailed"),
        (ScoredAnswers, "scores"),
        (CorrectChoice, "number"),
        (CategorisedObjects, "objects"),
    ],
)
def test_a_truth_without_one_of_its_fields_is_refused(kind, field):
    others = {other.name: None for other in dataclasses.fields(kind) if other.name != field}
    with pytest.raises(TypeError, match=f"missing 1 required .*'{field}'"):
        kind(**others)


def test_a_truth_of_joined_data_that_only_adds_phrases_is_in_no_field(tokenizer):
    """The text trains phrase grounding; its prediction has no truth of another task."""
    task = TASKS["vqa"]()
    preprocessor = task.preprocessor(TextTokenizer(tokenizer, VLBertModel.layout, with_phrase_spans=True))
    text = SampleText(0, "red", {"image_id": 4}, ReferredBoxes((BOX,)), phrases=PHRASES, may_lack_target=True)
    prediction = task.prediction(record_of(preprocessor, text))
    assert isinstance(prediction, PhrasesOnly) and prediction.metadata == {"image_id": 4}
