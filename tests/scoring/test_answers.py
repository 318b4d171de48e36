"""What is read of a record, and what is refused with a sentence; tests/cli/test_score.py compares the formats."""

from __future__ import annotations

import json

import pytest

from detector.errors import UserError
from e2e_vl.scoring.answers import read_answers


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([{"sent_id": 1, "answer": "[1,2,3,4]", "bbox": [1, 2, 3, 4]}], "bbox, answer; name the one"),
        ([{"sent_id": 1, "guess": "[1,2,3,4]"}], "no key of the records"),
        ([{"sent_id": 1, "box": [1, 2, 3]}], r"record 0: \[1, 2, 3\] is no box"),
        ([{"sent_id": 1, "box": [1, 2, 3, None]}], "is no box"),
        ([{"sent_id": 1, "box": None}, {"sent_id": 2}], "record 1 has no 'box'"),
        ({"7": {"boxes": [[1, 2, 3, 4]], "scores": [0.5, 0.4]}}, "id 7: it has 1 boxes, but not as many"),
        ([{"image_id": 7, "bbox": [1, 2, 3, 4], "score": None}], "finite scores"),
        ([], "no list of predictions"),
        ({"7": [1, 2, 3, 4]}, "it has no 'boxes'"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(content, words, tmp_path):
    path = tmp_path / "f.json"
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=words):
        read_answers(path)


def test_a_pickle_is_refused(tmp_path):
    with pytest.raises(UserError, match="a pickle can run code"):
        read_answers(tmp_path / "results.pkl")


def test_boxes_of_one_expression_are_gathered_and_the_best_one_is_known(tmp_path):
    rows = [{"image_id": name, "bbox": [score, 0, 1, 1], "score": score} for name, score in ((7, 1), (8, 2), (7, 3))]
    (tmp_path / "f.json").write_text(json.dumps(rows))
    file = read_answers(tmp_path / "f.json")
    assert (file.layout, [len(answer.boxes) for answer in file.answers]) == ("xywh", [2, 1])
    assert file.answers[0].best_box == [3, 0, 1, 1]


def test_the_expression_in_lmms_eval_is_called_answer(tmp_path):
    row = {"doc": {"question_id": "5", "answer": "dog", "file_name": "x.jpg"}, "filtered_resps": ["[1,2,3,4]"]}
    (tmp_path / "f.jsonl").write_text(json.dumps(row | {"target": "", "resps": [["[1,2,3,4]"]]}) + "\n")
    [answer] = read_answers(tmp_path / "f.jsonl").answers
    assert answer.keys == {"ann_id": "5", "words": "dog", "image": "x.jpg"} and answer.boxes == [[1, 2, 3, 4]]
