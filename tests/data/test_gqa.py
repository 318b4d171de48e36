"""What the reader of GQA states: questions, answers, choices, boxes of scene graphs or of instances."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from e2e_vl.config import DataSettings
from e2e_vl.data.base import open_options
from e2e_vl.data.batching import Request
from e2e_vl.data.gqa import GQADataset
from e2e_vl.samples import CorrectAnswer
from tests.data.roads import examples, open_dataset
from tests.data.tiny_gqa import CHOICES, QUESTIONS, put, question, write_gqa


@pytest.fixture
def settings(tiny) -> DataSettings:
    return write_gqa(tiny)


def make(settings, split="train_balanced", boxes="gt", *, training=True, objects=False) -> GQADataset:
    return open_dataset(GQADataset, settings, split, boxes, objects=objects, training=training)


def changed(settings, **files: str | None) -> DataSettings:
    joined = {name: path for name, path in (settings.files | files).items() if path is not None}
    return dataclasses.replace(settings, files=joined)


def test_questions_and_answers(settings):
    dataset = make(settings)
    assert len(dataset) == 3 and [list(texts) for texts in dataset.groups] == [[0, 1], [2]]
    assert list(dataset.image_ids()) == ["7", "3"]
    sample = dataset.sample((0, 1))
    [image] = sample.images
    assert image.id == "7" and image.size == (60, 100) and len(image.objects) == 3
    assert image.locate().name == "7.jpg" and image.locate().is_file()
    first, second = sample.texts
    assert (first.words, first.truth) == ("What color is it?", CorrectAnswer("red"))
    assert (first.metadata["questionId"], second.metadata["entailed"]) == ("05", ["2", "3"])
    assert "choices" not in first.metadata  # only evaluation reads them
    assert list(dataset.truths()) == [CorrectAnswer("red"), CorrectAnswer("yes"), CorrectAnswer("yes")]


def test_choices_of_balanced_questions_are_read_for_scores(settings, caplog):
    first, second = make(settings, "val_all", training=False).sample((0, 1)).texts
    assert first.metadata["choices"] == CHOICES and "choices" not in second.metadata
    assert second.words == "é?"
    dataset = make(settings, "test_balanced", "online", training=False)
    assert "test_choices.json: there is no such file of choices" in caplog.text
    [text] = dataset.sample((0,)).texts
    assert text.truth is None and "answer" not in text.metadata and list(dataset.truths()) == [None]


def test_boxes_that_a_question_names_are_stated_for_the_grounding_score(settings, tiny, caplog):
    named = {"answer": {"0": "102"}, "question": {"1": "100", "3": "101"}, "fullAnswer": {"2": "100"}}
    path = tiny.images_root.parent / "questions" / "named_questions.json"
    put(path, {"8": question(7, "Is it?", annotations=named), "9": question(7, "So?", isBalanced=False)})
    graphs = tiny.images_root.parent / "sceneGraphs"
    (graphs / "train_sceneGraphs.json").rename(graphs / "named_sceneGraphs.json")
    settings = dataclasses.replace(changed(settings, choices=None), config={"grounding": True})
    first, second = make(settings, "named", "online", training=False).sample((0, 1)).texts
    left = [0.1, 20 / 60, 0.3, 40 / 60]
    np.testing.assert_allclose(first.metadata["named_boxes"], [left, [0.6, 1 / 6, 0.9, 4 / 6], left])
    assert "named_boxes" not in second.metadata
    assert "named_boxes" not in make(settings, "named", "online").sample((0,)).texts[0].metadata
    put(path, {"8": question(7, "Is it?", annotations={"question": {"0": "77"}})})
    with pytest.raises(ValueError, match="question 8 names the object 77, which the scene graph of image 7 lacks"):
        make(settings, "named", "online", training=False).sample((0,))
    (graphs / "named_sceneGraphs.json").unlink()
    make(settings, "named", "online", training=False)
    assert "so grounding is left out" in caplog.text


def test_splits_are_joined(settings):
    dataset = make(settings, "train_balanced+val_all")
    assert len(dataset) == 5 and [part["part"] for part in dataset.parts] == ["train", "val"]
    assert dataset.sample((3,)).images[0].objects is not None
    options = open_options(GQADataset, settings)
    answers = GQADataset.answers_of(*options, "train_balanced+val_all")
    assert sorted(answers.values()) == ["box", "red", "yes", "yes"]
    assert list(GQADataset.texts_of(*options, "val_all")) == ["What is it?", "box", "é?", "box"]
    with pytest.raises(ValueError, match=r"question \d+ is there twice; name each split once"):
        make(settings, "train_balanced+train_balanced")
    with pytest.raises(ValueError, match="question 6 has no answer"):
        GQADataset.answers_of(*options, "test_balanced")


def test_instances_have_classes_and_scene_graphs_have_none(settings, tiny):
    with pytest.raises(ValueError, match="names in scene graphs are no classes of a detector"):
        make(settings, objects=True)
    with_instances = changed(settings, instances="instances.json")
    dataset = make(with_instances, objects=True)
    assert dataset.class_names == ["square", "box"]
    assert dataset.sample((0,)).images[0].objects.classes.tolist() == [0, 0, 1]
    tiny.instances["images"] = [row for row in tiny.instances["images"] if row["id"] != 3]
    tiny.instances["annotations"] = [row for row in tiny.instances["annotations"] if row["image_id"] != 3]
    tiny.write()
    with pytest.raises(ValueError, match=r"instances\.json: has no image 3 and 0 more of the texts"):
        make(with_instances)
    path = tiny.images_root.parent / "sceneGraphs" / "train_sceneGraphs.json"
    put(path, {"7": {}})
    with pytest.raises(ValueError, match=r"train_sceneGraphs\.json: there is no entry 3 among the scene graphs"):
        make(settings)


def test_boxes_of_other_files(settings, tiny):
    dataset = make(settings, boxes="online")
    assert dataset.sample((0,)).images[0].objects is None
    assert len(examples(make(settings), tiny.tokenizer)[Request(0, (0, 1))].texts) == 2


def test_images_may_have_other_names(settings, tiny):
    named = dataclasses.replace(settings, config={"image_name": "COCO_{id:0>12}.jpg"})
    assert make(named).sample((0,)).images[0].locate().name == "COCO_000000000007.jpg"
    for name, message in (("a.jpg", r"it must hold \{id\}"), ("{name}.jpg", r"it takes \{id\} alone")):
        with pytest.raises(ValueError, match=message):
            make(dataclasses.replace(settings, config={"image_name": name}))


@pytest.mark.parametrize("key", ["questions", "images"])
def test_files_that_are_not_set(settings, key):
    with pytest.raises(ValueError, match=rf"data\.files\.{key} is not set"):
        make(changed(settings, **{key: None}), boxes="online")


def test_a_question_without_its_choices_is_named(settings, tiny):
    path = tiny.images_root.parent / "questions" / "val_all_questions.json"
    put(path, QUESTIONS["val_all"] | {"99": question(9, "What?")})
    dataset = make(settings, "val_all", training=False)
    with pytest.raises(ValueError, match="there is no entry 99 among the choices"):
        dataset.sample((2,))
