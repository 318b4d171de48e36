"""VQA: questions, answers, joined splits, names of images, and damaged files."""

from __future__ import annotations

import json

import pytest

from e2e_vl.config import DataConfig
from e2e_vl.data import table_files
from e2e_vl.data.base import open_options
from e2e_vl.data.vqa import VQADataset
from e2e_vl.metrics.vqa import answer_accuracy, soft_scores
from e2e_vl.samples import HumanAnswers
from tests.data.helpers import assert_same_from_tables, open_dataset, refused, with_files, with_options, write_json
from tests.data.tiny_readers import ANSWERS, write_vqa


@pytest.fixture
def settings(tiny) -> DataConfig:
    return write_vqa(tiny)


def make(settings, split="train2014", boxes="gt", *, training=True, objects=False) -> VQADataset:
    return open_dataset(VQADataset, settings, split, boxes, objects=objects, training=training)


def test_questions_and_answers(settings):
    dataset = make(settings)
    assert len(dataset) == 3 and list(dataset.groups) == [[0, 2], [1]]
    sample = dataset.sample((0, 2))
    [image] = sample.images
    assert image.id == "7" and image.size == (60, 100) and len(image.objects) == 3
    assert str(image.locate()).endswith("train2014/COCO_train2014_000000000007.jpg")
    first, second = sample.texts
    assert (first.index, second.index) == (0, 2)
    assert first.words == "red square left" and first.truth == HumanAnswers(tuple(ANSWERS), "left side")
    assert first.metadata["question_id"] == 7000
    assert first.metadata["answer_type"] == "other"
    assert list(dataset.truths()) == [first.truth] * 3


@pytest.mark.parametrize(
    ("boxes", "objects", "is_read"), [("gt", False, True), ("online", False, False), ("online", True, True)]
)
def test_instances_are_read_only_where_they_are_needed(settings, boxes, objects, is_read):
    dataset = make(settings, boxes=boxes, objects=objects)
    image = dataset.sample((0,)).images[0]
    assert (image.objects is not None) == (image.size is not None) == (dataset.class_names is not None) == is_read
    if not is_read:
        dataset.check_classes(0)


def test_splits_are_joined(settings, tiny):
    path = tiny.images_root.parent / "vqa" / "val2014_annotations.json"
    for file in (path, path.with_name("val2014_questions.json")):
        file.write_text(file.read_text().replace('"image_id": 9', '"image_id": 7'))
    with refused("instances.json", "image 7 of the split train2014", "image 7 of the split val2014"):
        make(settings, "train2014+val2014", boxes="detections+gt")
    dataset = make(settings, "train2014+val2014", boxes="online")
    assert len(dataset) == 4 and list(dataset.groups) == [[0, 2], [1], [3]], "an image of another set is another image"
    assert [values["split"] for values in dataset.split_values] == ["train2014", "val2014"]
    assert str(dataset.sample((3,)).images[0].locate()).endswith("val2014/COCO_val2014_000000000007.jpg")
    assert list(dataset.image_ids()) == ["7", "3", "7"]
    options = open_options(VQADataset, settings)
    assert len(list(VQADataset.texts_of(*options, "train2014+val2014"))) == 8
    assert VQADataset.answers_of(*options, "val2014") == {9000: "left side"}
    with refused("question 7000", "different ids"):
        make(settings, "train2014+train2014")


def test_a_test_split_has_no_answers(settings):
    dataset = make(settings, "test2015", training=False)
    [text] = dataset.sample((0,)).texts
    assert "answers" not in text.metadata and text.truth is None and list(dataset.truths()) == [None]
    with pytest.raises(FileNotFoundError, match=r"test2015_annotations\.json"):
        make(settings, "test2015", training=True)


@pytest.mark.parametrize(
    ("subtype", "images"), [("test-dev2015", "test2015"), ("valminusminival2014", "val2014"), ("own", "own")]
)
def test_names_of_image_sets(settings, subtype, images, tmp_path):
    path = tmp_path / "vqa" / "test2015_questions.json"
    write_json(path.with_name(f"{subtype}_questions.json"), json.loads(path.read_text()) | {"data_subtype": None})
    dataset = make(with_files(settings, annotations=None), subtype, training=False)
    found = dataset.sample((0,)).images[0].locate()
    assert found == tmp_path / images / f"COCO_{images}_000000000009.jpg"
    assert dataset.split_values == [{"split": subtype, "images": images}]


def test_images_that_the_instances_lack_are_named(settings, tiny):
    tiny.instances["images"].pop(0)
    tiny.instances["annotations"] = [row for row in tiny.instances["annotations"] if row["image_id"] != 7]
    tiny.write()
    with refused("instances.json", "such as 7"):
        make(settings)


def test_the_files_are_joined_by_question(settings, tiny):
    path = tiny.images_root.parent / "vqa" / "train2014_annotations.json"
    content = json.loads(path.read_text())
    content["annotations"][2]["answers"] = ["no"] * 10  # as ST-VQA lists answers
    content["annotations"].reverse()
    write_json(path, content)
    first, second, third = make(settings).texts
    assert first.answers == second.answers == tuple(ANSWERS) and (third.id, third.answers) == (7002, ("no",) * 10)


def write_answers(tiny, answers: list[str], without: str = "") -> None:
    path = tiny.images_root.parent / "vqa" / "train2014_annotations.json"
    content = json.loads(path.read_text())
    content["annotations"][0]["answers"] = [{"answer": answer} for answer in answers]
    content["annotations"][0].pop(without, None)
    write_json(path, content)


@pytest.mark.parametrize(
    ("answers", "repeated", "target"),
    [
        (["red"], ["red"] * 10, {"red": 1.0}),
        (["red", "blue"], ["red", "blue"] * 5, {"red": 1.0, "blue": 1.0}),
        (["red", "red", "blue"], ["red", "red", "blue"] * 3 + ["red"], {"red": 1.0, "blue": 0.9}),
    ],
)
def test_questions_with_few_answers_are_warned_of_or_get_ten(settings, tiny, caplog, answers, repeated, target):
    """As MMF repeats the answers of ST-VQA."""
    write_answers(tiny, answers)
    assert make(settings).texts[0].answers == tuple(answers)
    counts = f"1 of 3 questions have fewer than ten answers, such as question 7000 with {len(answers)}."
    assert f"train2014_annotations.json: {counts}" in caplog.text
    caplog.clear()
    make(settings, boxes="online")
    assert not caplog.text, "once, although a split is opened for each source of boxes"
    filled = make(with_options(settings, repeat_answers=True)).texts[0].answers
    assert list(filled) == repeated and not caplog.text
    assert soft_scores(filled) == pytest.approx(target)
    assert answer_accuracy("red", filled) == 1


def test_the_most_frequent_answer_may_be_missing(settings, tiny):
    """OK-VQA's files lack it."""
    write_answers(tiny, ["a", "b", "b"], without="multiple_choice_answer")
    assert make(settings).texts[0].most_frequent == "b"


def test_ids_may_be_strings_in_one_of_the_files(settings, tiny):
    path = tiny.images_root.parent / "vqa" / "train2014_annotations.json"
    before = list(make(settings).truths())
    content = json.loads(path.read_text())
    for row in content["annotations"]:
        row |= {key: str(row[key]) for key in ("question_id", "image_id")}
    path.write_text(json.dumps(content))
    assert list(make(settings).truths()) == before


def test_a_repeated_question_is_skipped(settings, tiny, caplog):
    path = tiny.images_root.parent / "vqa" / "train2014_questions.json"
    content = json.loads(path.read_text())
    content["questions"].append(content["questions"][0])
    write_json(path, content)
    assert len(make(settings)) == 3
    assert "skipped 1 questions that repeat an earlier one: 7000" in caplog.text


@pytest.mark.parametrize(
    ("kind", "change", "part"),
    [
        ("questions", lambda rows: rows[0].pop("image_id"), "image_id"),
        ("questions", lambda rows: rows[0].update(question=" "), "entry 0"),
        ("questions", lambda rows: rows[0].update(question_id=7002), "7002"),
        ("questions", lambda rows: rows[0].update(question_id=9), "question 9"),
        ("questions", lambda rows: rows.clear(), "questions"),
        ("annotations", lambda rows: rows[0].update(image_id=8), "question 7000"),
        ("annotations", lambda rows: rows[0].update(answers=[]), "answers"),
        ("annotations", lambda rows: rows.pop(), "question 7002"),
        ("annotations", lambda rows: rows.append(rows[0] | {"answers": [{"answer": "a"}]}), "question 7000"),
    ],
)
def test_a_bad_record_is_named(settings, tiny, kind, change, part):
    path = tiny.images_root.parent / "vqa" / f"train2014_{kind}.json"
    content = json.loads(path.read_text())
    change(content[kind])
    write_json(path, content)
    with refused("train2014", part):
        make(settings)


@pytest.mark.parametrize("split", ["train2014", "val2014+train2014"])
def test_tables_give_the_same_questions(settings, tiny, monkeypatch, caplog, split):
    assert_same_from_tables(tiny.images_root.parent, monkeypatch, caplog, lambda: make(settings, split, "online"))
    write_answers(tiny, ["red"])
    repeated = with_options(settings, repeat_answers=True)
    monkeypatch.undo()
    monkeypatch.setattr(table_files, "MIN_SOURCE_BYTES", 0)
    for _ in range(2):
        lengths = {len(make(options, "train2014").texts[0].answers) for options in (settings, repeated)}
        assert lengths == {1, 10}, "the files have changed, and other options make another table"
