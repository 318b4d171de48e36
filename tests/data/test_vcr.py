"""VCR: questions, choices, objects that are candidates, and bad files, on a small hand-made data set."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from e2e_vl.config import DataConfig
from e2e_vl.data import table_files
from e2e_vl.data.base import open_options
from e2e_vl.data.batching import Request
from e2e_vl.data.config import CLASS_NAMES, VCRDatasetConfig
from e2e_vl.data.vcr import VCRDataset, find_relevant_objects, read_detected_objects, read_questions
from e2e_vl.samples import AnnotatedObjects, ChoiceText, CorrectChoice, Sample, SampleImage, SampleText
from tests.data.helpers import assert_same_from_tables, examples, refused
from tests.data.tiny_vcr import BOXES, OBJECTS, TinyVCR


@pytest.fixture
def tiny(tmp_path) -> TinyVCR:
    return TinyVCR(tmp_path)


def test_a_question_and_its_choices(tiny):
    dataset = tiny.dataset()
    assert len(dataset) == 3 and list(dataset.groups) == [[0, 2], [1]]
    sample = dataset.sample((0, 2))
    assert len(sample.images) == 1
    first, second = sample.texts
    assert (first.index, second.index) == (0, 2)
    assert first.query == (["Why", "is", [1, 2], "there", "?"],)
    assert first.choices[0] == ["No", [0], "."] and len(first.choices) == 4
    assert first.words == "Why is [1, 2] there ?"
    assert first.truth == CorrectChoice(2)
    assert first.metadata == {"annot_id": "val-0", "kind": "answer", "conditioned_on": None}


def test_the_right_answer_comes_before_a_rationale(tiny):
    [text] = tiny.dataset(question="rationale").sample((0,)).texts
    assert text.query == (tiny.lines[0]["question"], tiny.lines[0]["answer_choices"][2])
    assert text.choices == tuple(tiny.lines[0]["rationale_choices"])
    assert text.truth == CorrectChoice(1)
    assert (text.metadata["kind"], text.metadata["conditioned_on"]) == ("rationale", 2)


def test_rationales_given_each_answer(tiny):
    dataset = tiny.dataset(question="rationale", condition_on="each")
    assert list(dataset.groups) == [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7]]
    texts = dataset.sample((0, 1, 2, 3, 8)).texts
    assert [text.metadata["annot_id"] for text in texts] == ["val-0"] * 4 + ["val-2"]
    assert [text.metadata["conditioned_on"] for text in texts] == [0, 1, 2, 3, 0]
    assert [text.query[1] for text in texts] == [*tiny.lines[0]["answer_choices"], tiny.lines[2]["answer_choices"][0]]
    truths = [text.truth for text in texts]
    assert truths == [None, None, CorrectChoice(1), None, None], "only for the right answer"
    assert not any(text.is_learned for text in texts)


def test_a_split_without_labels(tiny):
    for line in tiny.lines:
        del line["answer_label"], line["rationale_label"]
    for options in ({}, {"question": "rationale", "condition_on": "each"}):
        [text] = tiny.dataset(**options).sample((0,)).texts
        assert text.truth is None
    with refused("val.jsonl", "no labels", "condition_on=each"):
        tiny.dataset(question="rationale")
    with refused("val.jsonl", "no labels"):
        tiny.dataset(training=True)


@pytest.mark.parametrize("options", [{"training": True}, {"question": "rationale"}])
def test_a_question_without_a_label_among_others_is_named(tiny, options):
    tiny.lines[1]["answer_label"] = None
    with refused("val.jsonl", "1 questions have no labels", "val-1"):
        tiny.dataset(**options)


def test_a_repeated_question_is_skipped_and_one_id_of_two_is_named(tiny, caplog):
    lines = list(tiny.lines)
    tiny.lines.append(lines[0])
    assert len(tiny.dataset()) == len(lines)
    assert f"skipped 1 questions that repeat an earlier one: {lines[0]['annot_id']}" in caplog.text
    tiny.lines[-1] = lines[0] | {"question": ["Who", "?"]}
    with refused("val.jsonl", f"the annot_id {lines[0]['annot_id']} is listed twice"):
        tiny.dataset()


def test_image_boxes_classes_and_outlines(tiny):
    tiny.metadata["segms"][1] = []  # an object may have no outline
    [image] = tiny.dataset().sample((1,)).images
    assert image.id == "film/b.png" and image.size == (60, 100)
    assert image.locate() == tiny.images_root / "film" / "b.png"
    np.testing.assert_array_equal(image.objects.boxes, np.array(BOXES)[:, :4])
    assert image.objects.classes.tolist() == [0, 0, CLASS_NAMES.index("chair"), 0]
    assert image.objects.names == tuple(OBJECTS)
    assert [len(outlines) for outlines in image.objects.outlines] == [1, 0, 1, 1]
    assert image.objects.attributes is None and image.candidates is None
    tiny.metadata["attribute_ids"] = [[1, 4], [2, 4], [3, 4], [1, 5]]
    [image] = tiny.dataset().sample((1,)).images
    assert image.objects.attributes.tolist() == tiny.metadata["attribute_ids"]


@pytest.mark.parametrize(
    ("objects", "question", "kept"),
    [
        ("all", "answer", None),
        ("mentioned", "answer", (1, 2, 0)),
        ("mentioned", "rationale", (1, 2, 0, 3)),  # answers count too
        ("r2c", "answer", (0, 1, 2)),
        ("r2c", "rationale", (0, 1, 2, 3)),  # "Everyone"
        ("r2c_all_texts", "answer", (0, 1, 2, 3)),
    ],
)
def test_objects_that_are_candidates(tiny, objects, question, kept):
    dataset = tiny.dataset(objects=objects, question=question)
    assert dataset.sample((0,)).images[0].candidates == kept
    assert list(dataset.groups) == ([[0, 2], [1]] if objects == "all" else [[0], [1], [2]])
    if kept is not None:
        left = [BOXES[number][0] for number in kept]
        image = examples(dataset, tiny.tokenizer, mask_size=14)[Request(0, (0,))].images[0]
        assert image.boxes[:, 0].tolist() == left and image.roi_masks.shape == (len(kept), 14, 14)


def test_people_are_relevant_where_nobody_or_everyone_is_named():
    objects = ["cup", "person", "person", "car"]
    assert find_relevant_objects(objects, [["No", "."]]) == (1, 2)
    assert find_relevant_objects(objects, [[[3], "and", "EVERYONE"]]) == (1, 2, 3)


def test_own_classes(tiny):
    for line in tiny.lines:
        line["objects"][0] = "robot"
    tiny.metadata["names"][0] = "robot"
    with refused("val.jsonl", "'robot'", "data.config.class_names"):
        tiny.dataset()
    dataset = tiny.dataset(class_names=("robot", "chair", "person"))
    assert dataset.sample((0,)).images[0].objects.classes.tolist() == [0, 2, 1, 2]
    assert dataset.class_names == ("robot", "chair", "person")


def test_questions_with_other_objects_are_apart(tiny):
    tiny.lines[2]["objects"] = ["chair", *OBJECTS[1:]]
    dataset = tiny.dataset()
    assert list(dataset.groups) == [[0], [1], [2]]
    with refused("a.json", "val-2"):
        dataset.sample((2,))


@pytest.mark.parametrize(
    "options", [{"training": True}, {"question": "both"}, {"question": "rationale", "condition_on": "each"}]
)
def test_tables_give_the_same_questions(tiny, monkeypatch, caplog, options):
    tiny.lines.append(tiny.lines[0])
    tiny.dataset()  # writes the files
    assert_same_from_tables(tiny.root, monkeypatch, caplog, lambda: tiny.opened(**options))
    monkeypatch.undo()
    monkeypatch.setattr(table_files, "MIN_SOURCE_BYTES", 0)
    tiny.lines[1]["answer_label"] = None
    tiny.lines[2]["objects"] = ["robot", *OBJECTS[1:]]
    tiny.dataset(class_names=(*CLASS_NAMES, "robot"))
    for _ in range(2):
        with refused("1 questions have no labels", "val-1"):
            tiny.opened(training=True, class_names=(*CLASS_NAMES, "robot"))
        with refused("'robot'"):
            tiny.opened()


def test_options(tiny):
    for options, part in (({"question": "all"}, "question"), ({"condition_on": "each"}, "rationale")):
        with refused(part):
            DataConfig(name="vcr", root=".", config=options)
    with refused("condition_on=right"):
        tiny.dataset(question="rationale", condition_on="each", training=True)
    assert VCRDataset.accepts_answer(VCRDatasetConfig(question="rationale")) and not VCRDataset.accepts_answer(
        VCRDatasetConfig()
    )
    texts = list(VCRDataset.texts_of(*open_options(VCRDataset, tiny.settings()), "val"))
    assert len(texts) == 3 * 9 and texts[:3] == ["Why is person chair there ?", "No person .", "Yes ."]


def test_a_users_boxes_are_narrowed():
    objects = AnnotatedObjects(np.eye(3, 4), "--boxes", names=("person", "dog", "cat"))
    text = ChoiceText(0, "Why ?", {}, query=(["Why", [2], "?"],), choices=(["Because", [1]],))
    sample = Sample((SampleImage("a", Path("a.jpg"), objects=objects),), (text,), from_user=True)
    options = VCRDatasetConfig(objects="mentioned")
    assert VCRDataset.select_candidates(sample, options).images[0].candidates == (2, 1)
    masked = dataclasses.replace(sample, texts=(SampleText(0, "Why [MASK] ?", {}),))
    assert VCRDataset.select_candidates(masked, options) is masked, "a pre-trained model fills in a text"


def test_both_questions_for_pretraining(tiny):
    dataset = tiny.dataset(question="both", objects="r2c", training=True)
    alone = [tiny.dataset(question=kind, objects="r2c") for kind in ("answer", "rationale")]
    assert len(dataset) == 6 and list(dataset.groups) == [[index] for index in range(6)]
    for index in range(6):
        sample, own = dataset.sample((index,)), alone[index % 2].sample((index // 2,))
        assert sample.images[0].candidates == own.images[0].candidates
        [text], [expected] = sample.texts, own.texts
        assert (text.query, text.choices, text.truth) == (expected.query, expected.choices, expected.truth)
        assert text.metadata == expected.metadata
    assert [truth.number for truth in dataset.truths()] == [2, 1] * 3


def test_questions_in_turn(tiny):
    tiny.lines = [{**tiny.lines[0], "annot_id": f"val-{number}"} for number in range(9)]
    dataset = tiny.dataset(question="in_turn", training=True)
    kinds = [dataset.sample((index,)).texts[0].metadata["kind"] for index in range(len(dataset))]
    assert kinds == ["answer"] * 4 + ["rationale"] * 4 + ["answer"]
    assert [truth.number for truth in dataset.truths()] == [2] * 4 + [1] * 4 + [2]


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda line: line.update(question=[]), "question"),
        (lambda line: line["question"].append([]), "question"),
        (lambda line: line["answer_choices"][3].append(7), "answer_choices[3]"),
        (lambda line: line["rationale_choices"][3].append([-1]), "rationale_choices[3]"),
        (lambda line: line["answer_choices"].pop(), "answer_choices"),
        (lambda line: line.update(answer_label=4), "answer_label"),
    ],
)
def test_a_bad_line_is_named(tiny, change, part):
    change(tiny.lines[1])
    with refused("val.jsonl", "line 2", part):
        tiny.dataset()


@pytest.mark.parametrize("key", ["question", "answer_choices", "rationale_choices"])
def test_an_object_that_a_question_lacks_is_named(tiny, key):
    sentence = tiny.lines[1][key] if key == "question" else tiny.lines[1][key][2]
    sentence.append([0, len(tiny.lines[1]["objects"])])
    for read in (tiny.dataset, lambda: read_questions(tiny.file)):
        with refused("val.jsonl", tiny.lines[1]["annot_id"], f"object {len(tiny.lines[1]['objects'])}"):
            read()


def test_a_file_without_questions_is_named(tiny):
    tiny.lines.clear()
    with refused("val.jsonl", "no questions"):
        tiny.dataset()


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"names": ["person"]}, "names"),
        ({"boxes": BOXES[:2]}, "boxes"),
        ({"boxes": [[5, 5, 5, 9, 1], *BOXES[1:]]}, "box"),
        ({"segms": [[[1, 2]], [], [], []]}, "segms[0]"),
        ({"attribute_ids": [[1], [2]]}, "attribute_ids"),
        ({"boxes": [[0.1, 0.2, 0.5, 0.6, 1]] * 4}, "normalised"),
    ],
)
def test_bad_metadata_are_named(tiny, change, part):
    tiny.metadata |= change
    with refused("a.json", part):
        tiny.dataset().sample((0,))


def test_only_detected_objects_with_a_higher_score_are_kept(tiny):
    tiny.metadata["boxes"] = [[*box[:4], score] for box, score in zip(BOXES, (0.7, 0.71, 1.0, 0.0), strict=True)]
    file = tiny.write().images_root / "film" / "a.json"
    size, objects = read_detected_objects(file, 0.7)
    assert size == (tiny.metadata["height"], tiny.metadata["width"])
    assert objects.boxes.tolist() == [[float(value) for value in box[:4]] for box in BOXES[1:3]]
    assert objects.names == tuple(tiny.metadata["names"][1:3])
    assert [CLASS_NAMES[number] for number in objects.classes] == list(objects.names)
    assert [len(outlines) for outlines in objects.outlines] == [len(one) for one in tiny.metadata["segms"][1:3]]
    assert len(read_detected_objects(file, 1.0)[1].boxes) == 0
    for change, part in (({"boxes": [box[:4] for box in BOXES]}, "score"), ({"names": ["unicorn"] * 4}, "unicorn")):
        file.write_text(json.dumps(tiny.metadata | change))
        with refused("a.json", part):
            read_detected_objects(file, 0.7)
