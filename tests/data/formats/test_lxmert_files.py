"""The JSON files of the official LXMERT code: what is read of them, and files that are damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from e2e_vl.data.lxmert import read_image_sentences, read_listed_pairs, read_scored_questions

IMAGE = {"img_id": "a", "sentf": {"mscoco": ["A cat."], "vqa": ["Is it?", "So?"]}, "labelf": {"vqa": [{"yes": 1}, {}]}}
QUESTION = {"question_id": 7, "img_id": "a", "sent": "Is it?", "label": {"yes": 0.3}, "answer_type": "other"}
PAIR = {"identifier": "train-1-0-0", "img0": "a", "img1": "b", "sent": "So.", "label": 1, "uid": "u"}


def put(path: Path, content: Any) -> Path:
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def test_sentences_of_all_sources_or_some(tmp_path):
    path = put(tmp_path / "x.json", [IMAGE, {"img_id": "b", "sentf": {"vg": ["hat"]}}])
    found = read_image_sentences(path)
    assert [one.uid("a") for one in found["a"]] == ["a_mscoco_000", "a_vqa_000", "a_vqa_001"]
    assert [one.scores for one in found["a"]] == [None, {"yes": 1.0}, {}]
    assert found["b"][0].scores is None
    assert list(read_image_sentences(path, ["vg"])) == ["b"]
    with pytest.raises(ValueError, match="there is no sentence of the sources gqa"):
        read_image_sentences(path, ["gqa"])


def test_questions_and_pairs(tmp_path):
    [question] = read_scored_questions(put(tmp_path / "x.json", [QUESTION]))
    assert (question.question_id, question.scores, question.answer_type) == (7, {"yes": 0.3}, "other")
    [pair] = read_listed_pairs(put(tmp_path / "x.json", [PAIR]))
    assert (pair.images, pair.label, pair.uid) == (("a", "b"), 1, "u")


DAMAGED: list[tuple[Callable[[Path], Any], Any, str]] = [
    (read_image_sentences, {}, "is a dict, expected a list of sentences"),
    (read_image_sentences, [IMAGE, IMAGE], "image a is listed twice"),
    (read_image_sentences, [IMAGE | {"labelf": {"vqa": [{}]}}], "a list of labels of another length"),
    (
        read_image_sentences,
        [IMAGE | {"labelf": {"vqa": [{}, {"no": "1"}]}}],
        r"labelf\.vqa\[1\]\.no is '1', expected a number",
    ),
    (read_scored_questions, [], "there is nothing in the file"),
    (read_scored_questions, [QUESTION, QUESTION], "question 7 is listed twice"),
    (read_scored_questions, [QUESTION | {"sent": 3}], "sent is 3, expected a text"),
    (read_scored_questions, [QUESTION, {"question_id": 8, "img_id": "a", "sent": "So?"}], "others have none"),
    (read_listed_pairs, [PAIR | {"label": "True"}], "label is 'True', expected 0 or 1"),
    (read_listed_pairs, [{"identifier": "x", "sent": "So."}], "has no 'img0', 'img1'"),
]


@pytest.mark.parametrize(("reader", "content", "sentence"), DAMAGED)
def test_damaged_files_are_named(tmp_path, reader, content, sentence):
    path = put(tmp_path / "x.json", content)
    with pytest.raises(ValueError, match=sentence) as caught:
        reader(path)
    assert str(path) in str(caught.value)
