"""VQA files: what is read, and that what is wrong is named."""

from __future__ import annotations

import json

import pytest

from e2e_vl.data.vqa import read_questions


class Files:
    """Two questions about one image; change the contents, then `read`."""

    def __init__(self, folder) -> None:
        self.paths = folder / "questions.json", folder / "annotations.json"
        self.questions = {
            "data_subtype": "val2014",
            "questions": [
                {"question_id": 7001, "image_id": 7, "question": "How many?"},
                {"question_id": 7000, "image_id": 7, "question": "Is it left?"},
            ],
        }
        answers = [{"answer": "left" if number < 4 else "no", "answer_id": number} for number in range(1, 11)]
        kinds = {"answer_type": "other", "question_type": "is it", "multiple_choice_answer": "no"}
        self.annotations = {
            "annotations": [
                {"question_id": number, "image_id": 7, "answers": answers, **kinds} for number in (7000, 7001)
            ]
        }

    def read(self, annotated: bool = True):
        for path, content in zip(self.paths, (self.questions, self.annotations), strict=True):
            path.write_text(json.dumps(content), encoding="utf-8")
        return read_questions(self.paths[0], self.paths[1] if annotated else None)


@pytest.fixture
def files(tmp_path) -> Files:
    return Files(tmp_path)


def test_the_files_are_joined_by_question(files):
    first, second = files.read()
    assert (first.question_id, second.question_id) == (7001, 7000)
    assert second.text == "Is it left?" and second.data_subtype == "val2014"
    assert second.answers == ("left",) * 3 + ("no",) * 7
    assert second.record()["multiple_choice_answer"] == "no"
    without = files.read(annotated=False)
    assert without[0].answers is None and "answers" not in without[0].record()


def _pop(path: str):
    def change(files: Files) -> None:
        name, index, key = path.split(".")
        del getattr(files, name)[name][int(index)][key]

    return change


def _set(name: str, index: int, **values):
    return lambda files: getattr(files, name)[name][index].update(values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_pop("questions.0.image_id"), r"questions\.json: question 7001 has no 'image_id'"),
        (_pop("questions.1.question_id"), r"questions\.json: question number 1 has no 'question_id'"),
        (_pop("annotations.1.answer_type"), r"annotations\.json: annotation of question 7001 has no 'answer_type'"),
        (_set("questions", 1, question_id=7001), r"questions\.json: question 7001 is listed twice"),
        (_set("annotations", 1, question_id=7000), r"annotations\.json: annotation of question 7000 is listed twice"),
        (_set("questions", 0, question=" "), "question 7001 has the text ' '"),
        (_set("questions", 0, question_id=9), r"question 9 has no annotation in .*annotations\.json"),
        (_set("annotations", 0, image_id=8), "question 7000 is about image 7, but in .* about another"),
        (_set("annotations", 0, answers=[{"answer": 3}]), "question 7000: answers.0..answer is 3, expected a text"),
        (_set("annotations", 0, answers=[]), "question 7000 has no answers"),
        (_set("annotations", 1, answer_type=None), "question 7001: answer_type is None, expected a text"),
        (lambda files: files.questions["questions"].pop(), "annotation of question 7000 .*and 0 more"),
        (lambda files: files.questions.update(questions={}), "questions is a dict, expected a list"),
        (lambda files: files.questions.update(questions=[]), "has no questions"),
    ],
)
def test_what_is_wrong_is_named(files, change, message):
    change(files)
    with pytest.raises(ValueError, match=message):
        files.read()


def test_missing_and_broken_files(files, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"questions\.json: cannot read the questions"):
        read_questions(tmp_path / "questions.json")
    (tmp_path / "questions.json").write_text("[")
    with pytest.raises(ValueError, match="the questions are not one JSON object"):
        read_questions(tmp_path / "questions.json")
