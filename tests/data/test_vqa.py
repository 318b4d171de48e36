"""What the reader of VQA states: questions, answers, joined splits, names of images."""

from __future__ import annotations

import dataclasses
import json

import pytest

from e2e_vl.config import DataSettings
from e2e_vl.data.base import open_options
from e2e_vl.data.vqa import VQADataset
from e2e_vl.samples import HumanAnswers
from tests.data.roads import open_dataset
from tests.data.tiny_vqa import ANSWERS, write_vqa


@pytest.fixture
def settings(tiny) -> DataSettings:
    return write_vqa(tiny)


def make(settings, split="train2014", boxes="gt", *, training=True, objects=False) -> VQADataset:
    return open_dataset(VQADataset, settings, split, boxes, objects=objects, training=training)


def without(settings, *files: str) -> DataSettings:
    kept = {name: path for name, path in settings.files.items() if name not in files}
    return dataclasses.replace(settings, files=kept)


def test_questions_and_answers(settings):
    dataset = make(settings)
    assert len(dataset) == 3 and dataset.groups == [[0, 2], [1]]
    sample = dataset.sample((0, 2))
    [image] = sample.images
    assert image.id == "7" and image.size == (60, 100) and len(image.objects) == 3
    assert str(image.locate()).endswith("train2014/COCO_train2014_000000000007.jpg")
    first, second = sample.texts
    assert (first.index, second.index) == (0, 2)
    assert first.words == "red square left" and first.truth == HumanAnswers(tuple(ANSWERS))
    assert first.metadata["question_id"] == 7000 and first.metadata["question"] == "red square left"
    assert first.metadata["answers"] == ANSWERS and first.metadata["answer_type"] == "other"
    assert list(dataset.truths()) == [HumanAnswers(tuple(ANSWERS))] * 3


@pytest.mark.parametrize(
    ("boxes", "objects", "is_read"),
    [("gt", False, True), ("detections+gt", False, True), ("online", False, False), ("online", True, True)],
)
def test_instances_are_read_only_where_they_are_needed(settings, boxes, objects, is_read):
    dataset = make(settings, boxes=boxes, objects=objects)
    image = dataset.sample((0,)).images[0]
    assert (image.objects is not None) == (image.size is not None) == (dataset.class_names is not None) == is_read
    if not is_read:
        dataset.check_classes(0)


def test_splits_are_joined_and_share_files(settings):
    dataset = make(settings, "train2014+val2014", boxes="detections+gt")
    assert len(dataset) == 4 and dataset.groups == [[0, 2], [1], [3]]
    assert dataset.question_parts[0].instances is dataset.question_parts[1].instances
    assert [part["split"] for part in dataset.parts] == ["train2014", "val2014"]
    assert str(dataset.sample((3,)).images[0].locate()).endswith("val2014/COCO_val2014_000000000009.jpg")
    assert list(dataset.image_ids()) == ["7", "3", "9"]
    options = open_options(VQADataset, settings)
    assert len(list(VQADataset.texts_of(*options, "train2014+val2014"))) == 8
    assert VQADataset.answers_of(*options, "val2014") == {9000: "left side"}
    with pytest.raises(ValueError, match="question 7000 is in two of the splits"):
        make(settings, "train2014+train2014")
    with pytest.raises(ValueError, match="has an empty name"):
        make(settings, "train2014+")


def test_one_image_in_two_splits_is_two_images(settings, tiny):
    path = tiny.images_root.parent / "vqa" / "val2014_questions.json"
    content = json.loads(path.read_text())
    content["questions"][0]["image_id"] = 7
    path.write_text(json.dumps(content))
    dataset = make(without(settings, "annotations"), "train2014+val2014", boxes="online", training=False)
    assert dataset.groups == [[0, 2], [1], [3]]
    assert str(dataset.sample((3,)).images[0].locate()).endswith("COCO_val2014_000000000007.jpg")


def test_a_test_split_has_no_answers(settings):
    dataset = make(settings, "test2015", training=False)
    [text] = dataset.sample((0,)).texts
    assert "answers" not in text.metadata and text.truth is None
    assert list(dataset.truths()) == [None]
    with pytest.raises(FileNotFoundError, match=r"test2015_annotations\.json"):
        make(settings, "test2015", training=True)


@pytest.mark.parametrize(
    ("subtype", "images"),
    [("test-dev2015", "test2015"), ("valminusminival2014", "val2014"), ("minival2014", "val2014"), ("own", "own")],
)
def test_names_of_image_sets(settings, subtype, images, tmp_path):
    path = tmp_path / "vqa" / "test2015_questions.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "data_subtype": None}))
    path.rename(path.with_name(f"{subtype}_questions.json"))
    dataset = make(without(settings, "annotations"), subtype, training=False)
    found = dataset.sample((0,)).images[0].locate()
    assert found == tmp_path / images / f"COCO_{images}_000000000009.jpg"
    assert dataset.parts == [{"split": subtype, "images": images}]


@pytest.mark.parametrize("key", ["questions", "annotations", "images"])
def test_files_that_are_not_set(settings, key):
    with pytest.raises(ValueError, match=rf"data\.files\.{key} is not set"):
        make(without(settings, key))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"colour": 1}, r"data\.config has the unknown key 'colour'"),
        ({"image_name": "a.jpg"}, r"it must hold \{id\}"),
        ({"image_name": "{name}.jpg"}, r"it takes \{id\} and \{images\}"),
        ({"image_name": 3}, r"data\.config\.image_name is 3; it must be a str"),
    ],
)
def test_options_that_do_not_fit(settings, config, message):
    with pytest.raises(ValueError, match=message):
        make(dataclasses.replace(settings, config=config))


def test_an_image_that_the_instances_lack_is_named(settings, tiny):
    tiny.instances["images"].pop(0)
    tiny.instances["annotations"] = [row for row in tiny.instances["annotations"] if row["image_id"] != 7]
    tiny.write()
    with pytest.raises(ValueError, match=r"instances\.json: has no image 7 and 0 more of the questions"):
        make(settings)
