"""GQA's files: questions in one file or in pieces, what of them is kept, and files that are damaged."""

from __future__ import annotations

import json

import pytest

from e2e_vl.data.gqa import (
    EntryFile,
    GQAQuestions,
    find_entry,
    pieces_of,
    question_facts,
    read_choices,
    reasoning_steps,
    scene_objects,
)
from tests.data.tiny_gqa import CHOICES, put, question


def written(tmp_path, content, name="val_all_questions.json"):
    put(tmp_path / name, content)
    return tmp_path / name


def test_questions_lie_by_image_and_keep_their_ids(tmp_path):
    rows = {"007": question(5, "a"), "2": question(3, "b"), "3": question(5, "c")}
    questions = GQAQuestions([written(tmp_path, rows)])
    assert len(questions) == 3 and questions.image_ids == ["5", "3"] and questions.counts.tolist() == [2, 1]
    assert [questions[index] for index in range(3)] == [(key, rows[key]) for key in ("007", "3", "2")]
    assert list(questions.answers()) == ["red"] * 3
    with pytest.raises(IndexError):
        questions[3]


def test_pieces_are_read_in_the_order_of_their_numbers(tmp_path):
    folder = tmp_path / "train_all_questions"
    folder.mkdir()
    for number in range(11):
        put(folder / f"{folder.name}_{number}.json", {f"q{number}": question(number, "a")})
    pieces = pieces_of(tmp_path / "train_all_questions.json")
    assert [path.stem.rpartition("_")[2] for path in pieces] == [str(number) for number in range(11)]
    assert pieces_of(folder) == pieces
    assert GQAQuestions(pieces)[10][0] == "q10"
    put(folder / f"{folder.name}_10.json", {"q1": question(10, "a")})
    with pytest.raises(ValueError, match=r"_1\.json and .*_10\.json: question q1 is there twice"):
        GQAQuestions(sorted(pieces))
    (folder / f"{folder.name}_4.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"the piece train_all_questions_4\.json is missing"):
        pieces_of(folder)
    with pytest.raises(FileNotFoundError, match=r"no folder .*none with pieces none_0\.json"):
        pieces_of(tmp_path / "none.json")


def test_what_is_kept_of_a_question():
    facts = question_facts("05", question(7, "What color?", groups={"global": None, "local": "x"}))
    assert facts == json.loads(json.dumps(facts))
    assert (facts["questionId"], facts["imageId"], facts["answer"], facts["steps"]) == ("05", "7", "red", 2)
    assert facts["group"] is None and set(facts["types"]) == {"structural", "semantic", "detailed"}
    assert set(question_facts("6", question(7, "What?", None))) == {"questionId", "imageId", "question", "isBalanced"}


def test_steps_that_only_read_the_answer_do_not_count():
    program = [("select", "dog"), ("filter color", "blue"), ("exist", "?"), ("query", "name"), ("choose name", "a|b")]
    assert reasoning_steps({"operation": one, "argument": other} for one, other in program) == 2


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ([], r"questions\.json: question 9 is a list"),
        ({"question": "a", "imageId": "1"}, r"question 9 has no 'isBalanced'"),
        (question(1, " "), r"question 9: question is ' ', expected a text that is not blank"),
        (question(1, "a", imageId=1), r"question 9: imageId is 1, expected a text"),
        (question(1, "a", isBalanced=1), r"isBalanced is 1, expected true or false"),
        (question(1, "a", 3), r"answer is 3, expected a text"),
        (question(1, "a", types={"semantic": "a"}), r"question 9: types has no 'structural'"),
        (question(1, "a", groups={}), r"question 9: groups has no 'global'"),
        (question(1, "a", None, groups="x"), r"question 9: groups is 'x', expected"),
        (question(1, "a", None), r"question 9 has no answer, unlike the first"),
    ],
)
def test_damaged_questions_are_named(tmp_path, record, message):
    with pytest.raises(ValueError, match=message):
        GQAQuestions([written(tmp_path, {"8": question(1, "a"), "9": record})])


def test_a_file_without_questions(tmp_path):
    with pytest.raises(ValueError, match=r"questions\.json: there is no question in it"):
        GQAQuestions([written(tmp_path, {})])


def test_choices_and_scene_graphs(tmp_path):
    choices = EntryFile(written(tmp_path, {"1": CHOICES, "2": {"valid": []}}, "choices.json"), "choices")
    assert read_choices(choices, "1") == CHOICES and "3" not in choices
    with pytest.raises(ValueError, match=r"choices of question 2 has no 'plausible'"):
        read_choices(choices, "2")
    with pytest.raises(ValueError, match=r"choices\.json: there is no entry 3 among the choices"):
        find_entry([choices], "3")
    (tmp_path / "choices.json").write_text('{"1": {}, "2": {}, "1": {}}')
    with pytest.raises(ValueError, match=r"choices\.json: 1 is there twice among the choices"):
        EntryFile(tmp_path / "choices.json", "choices")
    assert "1" not in EntryFile(written(tmp_path, {}, "empty.json"), "choices")
    box = {"name": "cup", "x": 1, "y": 2, "w": 3, "h": 4}
    graphs = {"5": {"width": 40, "height": 30, "objects": {"77": box, "a": box}}, "6": {"width": 1, "height": 1}}
    graphs["7"] = {"width": 9, "height": 9, "objects": {"1": box | {"w": 0}}}
    file = EntryFile(written(tmp_path, graphs, "graphs.json"), "scene graphs")
    size, objects = scene_objects(file, "5")
    assert size == (30, 40) and objects.boxes.tolist() == [[1, 2, 4, 6]] * 2
    assert objects.names == ("cup", "cup") and objects.ids == (77, 1) and objects.classes is None
    with pytest.raises(ValueError, match=r"scene graph of image 6 has no 'objects'"):
        scene_objects(file, "6")
    with pytest.raises(ValueError, match=r"scene graph of image 7: object 1: the box .* is empty or inverted"):
        scene_objects(file, "7")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"h": -1}, "object b: the box .* is empty or inverted"),
        ({"x": True}, r"objects\.b\.x is True, expected a number"),
        ({"name": None}, r"objects\.b\.name is None, expected a text"),
        ({"y": None}, r"objects\.b\.y is None, expected a number"),
    ],
)
def test_the_wrong_object_of_a_scene_is_named(tmp_path, change, message):
    box = {"name": "cup", "x": 1, "y": 2, "w": 3, "h": 4}
    graph = {"width": 40, "height": 30, "objects": {"a": box, "b": box | change, "c": box}}
    file = EntryFile(written(tmp_path, {"5": graph}, "graphs.json"), "scene graphs")
    with pytest.raises(ValueError, match=f"scene graph of image 5: {message}"):
        scene_objects(file, "5")


def test_an_object_without_a_name_is_named(tmp_path):
    box = {"x": 1, "y": 2, "w": 3, "h": 4}
    graph = {"width": 40, "height": 30, "objects": {"a": box | {"name": "cup"}, "b": box}}
    file = EntryFile(written(tmp_path, {"5": graph}, "graphs.json"), "scene graphs")
    with pytest.raises(ValueError, match=r"scene graph of image 5: objects\.b has no 'name'"):
        scene_objects(file, "5")
