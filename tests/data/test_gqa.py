"""GQA: questions in one file or in pieces, answers, choices, boxes of scene graphs or of instances."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from e2e_vl.config import DataConfig
from e2e_vl.data.base import open_options
from e2e_vl.data.gqa import Choices, GQADataset, SceneGraph, find_pieces, read_entries, read_questions
from tests.data.helpers import assert_same_from_tables, open_dataset, refused, with_files, with_options, write_json
from tests.data.tiny_refcoco import TinyRefCOCO

BOX = {"name": "cup", "x": 1, "y": 2, "w": 3, "h": 4}
TYPES = {"structural": "query", "semantic": "attr", "detailed": "color"}
PROGRAM = [
    {"operation": "select", "dependencies": [], "argument": "box (1)"},
    {"operation": "query", "dependencies": [0], "argument": "color"},
]
CHOICES = {"valid": ["red", "blue"], "plausible": ["red"]}


def question(image: int, text: str, answer: str | None = "red", **changes: Any) -> dict[str, Any]:
    """One record of a question file."""
    record = {"imageId": str(image), "question": text, "isBalanced": True}
    if answer is not None:
        record |= {"answer": answer, "types": TYPES, "groups": {"global": "color", "local": "x"}, "entailed": []}
        record |= {"semantic": PROGRAM, "fullAnswer": f"{answer}.", "equivalent": []}
    return record | changes


QUESTIONS = {
    "train_balanced": {
        "05": question(7, "What color is it?"),
        "1": question(3, "Is it tall?", "yes"),
        "2": question(7, "Is it red ?", "yes", entailed=["2", "3"]),
    },
    "val_all": {"3": question(9, "What is it?", "box"), "4": question(9, "é?", "box", isBalanced=False)},
    "test_balanced": {"6": question(9, "What?", None)},
}


@pytest.fixture
def settings(tiny) -> DataConfig:
    """A folder with the tiny photos under names of GQA."""
    root = tiny.images_root.parent
    (root / "photos").mkdir()
    for split, questions in QUESTIONS.items():
        write_json(root / "questions" / f"{split}_questions.json", questions)
        part = split.partition("_")[0]
        if part != "test":
            write_json(root / "eval" / f"{part}_choices.json", dict.fromkeys(questions, CHOICES))
        graphs = {one["imageId"]: scene_graph(tiny, int(one["imageId"])) for one in questions.values()}
        write_json(root / "sceneGraphs" / f"{part}_sceneGraphs.json", graphs)
    for image in tiny.instances["images"]:
        (root / "photos" / f"{image['id']}.jpg").write_bytes((tiny.images_root / image["file_name"]).read_bytes())
    files = {
        "images": "photos",
        "questions": "questions/{split}_questions.json",
        "choices": "eval/{part}_choices.json",
        "scene_graphs": "sceneGraphs/{part}_sceneGraphs.json",
        "detections": "dets.json",
    }
    return DataConfig(name="gqa", root=str(root), files=files)


def scene_graph(tiny: TinyRefCOCO, image_id: int) -> dict[str, Any]:
    [image] = [row for row in tiny.instances["images"] if row["id"] == image_id]
    objects = {}
    for row in tiny.instances["annotations"]:
        if row["image_id"] == image_id:
            x, y, w, h = map(int, row["bbox"])
            objects[str(row["id"])] = {"name": "box", "x": x, "y": y, "w": w, "h": h, "attributes": [], "relations": []}
    return {"width": image["width"], "height": image["height"], "objects": objects}


def make(settings, split="train_balanced", boxes="gt", *, training=True, objects=False) -> GQADataset:
    return open_dataset(GQADataset, settings, split, boxes, objects=objects, training=training)


def test_questions_and_answers(settings):
    dataset = make(settings)
    assert len(dataset) == 3 and list(dataset.groups) == [[0, 2], [1]]
    assert list(dataset.image_ids()) == ["7", "3"]
    sample = dataset.sample((0, 2))
    [image] = sample.images
    assert image.id == "7" and image.size == (60, 100)
    assert image.objects.boxes.tolist() == [[10, 20, 30, 40], [60, 10, 90, 40], [0, 0, 100, 60]]
    assert image.objects.ids == (100, 101, 102) and image.objects.names == ("box",) * 3
    assert image.locate().name == "7.jpg" and image.locate().is_file()
    first, second = sample.texts
    assert (first.words, first.truth.answer) == ("What color is it?", "red")
    assert (first.metadata["question_id"], second.truth.entailed) == ("05", ("2", "3"))
    assert (first.truth.steps, first.truth.group) == (2, "color")
    assert first.truth.choices is None  # only evaluation reads them
    assert [truth.answer for truth in dataset.truths()] == ["red", "yes", "yes"]
    assert make(settings, boxes="online").sample((0,)).images[0].objects is None


@pytest.mark.parametrize("split", ["train_balanced", "val_all", "train_balanced+val_all"])
def test_tables_give_the_same_questions_choices_and_scene_graphs(settings, tiny, monkeypatch, caplog, split):
    graphs = tiny.images_root.parent / "sceneGraphs" / "train_sceneGraphs.json"
    flat = scene_graph(tiny, 7)
    flat["objects"]["100"]["w"] = 0
    write_json(graphs, {"7": flat, "3": scene_graph(tiny, 3)})
    boxes, training = ("gt", True) if split == "train_balanced" else ("online", False)
    assert_same_from_tables(
        tiny.images_root.parent, monkeypatch, caplog, lambda: make(settings, split, boxes, training=training)
    )


def test_choices_of_balanced_questions_are_read_for_scores(settings, tiny, caplog):
    first, second = make(settings, "val_all", training=False).sample((0, 1)).texts
    assert first.truth.choices == CHOICES and second.truth.choices is None
    assert second.words == "é?"
    dataset = make(settings, "test_balanced", "online", training=False)
    assert "test_choices.json does not exist" in caplog.text
    [text] = dataset.sample((0,)).texts
    assert text.truth is None and list(dataset.truths()) == [None]


def test_boxes_that_a_question_names_are_read_for_the_grounding_score(settings, tiny, caplog):
    named = {"answer": {"0": "102"}, "question": {"1": "100", "3": "101"}, "fullAnswer": {"2": "100"}}
    questions = {"8": question(7, "Is it?", annotations=named), "9": question(7, "So?", isBalanced=False)}
    write_json(tiny.images_root.parent / "questions" / "named_questions.json", questions)
    graphs = tiny.images_root.parent / "sceneGraphs"
    (graphs / "train_sceneGraphs.json").rename(graphs / "named_sceneGraphs.json")
    settings = with_options(with_files(settings, choices=None), grounding=True)
    first, second = make(settings, "named", "online", training=False).sample((0, 1)).texts
    left = [0.1, 20 / 60, 0.3, 40 / 60]
    np.testing.assert_allclose(first.truth.named_boxes, [left, [0.6, 1 / 6, 0.9, 4 / 6], left])
    assert second.truth.named_boxes is None
    assert make(settings, "named", "online").sample((0,)).texts[0].truth.named_boxes is None
    (graphs / "named_sceneGraphs.json").unlink()
    make(settings, "named", "online", training=False)
    assert "so grounding is left out" in caplog.text


@pytest.mark.parametrize("odd", [{"w": 0}, {"h": -1}, {"x": 100}, {"y": -9}])
def test_objects_without_a_box_in_the_image_are_no_candidates_but_may_be_named(settings, tiny, caplog, odd):
    folder = tiny.images_root.parent
    graphs = {str(image): scene_graph(tiny, image) for image in (3, 7)}
    graphs["7"]["objects"]["100"] = BOX | odd
    write_json(folder / "sceneGraphs" / "train_sceneGraphs.json", graphs)
    [image] = make(settings).sample((0,)).images
    assert image.objects.ids == (101, 102) and len(image.objects) == len(image.objects.names) == 2
    assert "skipped 1 objects with boxes that are empty or outside the image: 100 of 7" in caplog.text
    named = question(7, "Is it?", annotations={"question": {"1": "100", "3": "101"}})
    write_json(folder / "questions" / "train_named_questions.json", {"8": named})
    settings = with_options(with_files(settings, choices=None), grounding=True)
    [text] = make(settings, "train_named", training=False).sample((0,)).texts
    assert len(text.truth.named_boxes) == 2
    del graphs["7"]["objects"]["101"]
    write_json(folder / "sceneGraphs" / "train_sceneGraphs.json", graphs)
    with refused("train_sceneGraphs.json", "image 7", "object 101", "question 8"):
        make(settings, "train_named", "online", training=False)


def test_splits_are_joined(settings):
    dataset = make(settings, "train_balanced+val_all")
    assert len(dataset) == 5 and [values["part"] for values in dataset.split_values] == ["train", "val"]
    assert dataset.sample((3,)).images[0].objects is not None
    options = open_options(GQADataset, settings)
    answers = GQADataset.answers_of(*options, "train_balanced+val_all")
    assert sorted(answers.values()) == ["box", "red", "yes", "yes"]
    assert list(GQADataset.texts_of(*options, "val_all")) == ["What is it?", "box", "é?", "box"]


def test_instances_have_classes_and_scene_graphs_have_none(settings):
    with refused("data.files.instances"):
        make(settings, objects=True)
    dataset = make(with_files(settings, instances="instances.json"), objects=True)
    assert dataset.class_names == ["square", "box"]
    assert dataset.sample((0,)).images[0].objects.classes.tolist() == [0, 0, 1]


def test_normalised_boxes_are_refused(settings, tiny):
    graphs = {str(image): scene_graph(tiny, image) for image in (3, 7)}
    graphs["3"]["objects"] = {"1": BOX | {"x": 0.1, "y": 0.2, "w": 0.5, "h": 0.5}}
    write_json(tiny.images_root.parent / "sceneGraphs" / "train_sceneGraphs.json", graphs)
    dataset = make(settings)
    dataset.sample((0,))
    with refused("scene graph of image 3", "normalised"):
        dataset.sample((1,))


def test_names_of_image_files(settings):
    named = with_options(settings, image_name="COCO_{id:0>12}.jpg")
    assert make(named).sample((0,)).images[0].locate().name == "COCO_000000000007.jpg"
    for name in ("a.jpg", "{name}.jpg", "{id:012d}.jpg"):
        with refused("image_name"):
            with_options(settings, image_name=name)


def test_pieces_are_read_in_the_order_of_their_numbers(tmp_path):
    folder = tmp_path / "train_all_questions"
    for number in range(11):
        write_json(folder / f"{folder.name}_{number}.json", {f"q{number}": question(number, "a")})
    pieces = find_pieces(tmp_path / "train_all_questions.json")
    assert [path.stem.rpartition("_")[2] for path in pieces] == [str(number) for number in range(11)]
    assert find_pieces(folder) == pieces
    assert [one.id for one in read_questions(pieces)] == [f"q{number}" for number in range(11)]
    (folder / f"{folder.name}_4.json").unlink()
    with refused("train_all_questions"):
        find_pieces(folder)


@pytest.mark.parametrize(
    ("read", "record", "part"),
    [
        (read_questions, {"question": "a", "imageId": "1"}, "isBalanced"),
        (read_questions, question(1, " "), "question"),
        (read_questions, question(1, "a", types={"semantic": "a"}), "structural"),
        (partial(read_entries, kind=Choices), {"valid": []}, "plausible"),
        (partial(read_entries, kind=SceneGraph), {"width": 9, "height": 9, "objects": {"1": BOX | {"w": ""}}}, ".w"),
    ],
)
def test_a_bad_record_is_named(tmp_path, read, record, part):
    write_json(tmp_path / "x.json", {"9": record})
    with refused("x.json", "9", part):
        list(read([tmp_path / "x.json"]))
