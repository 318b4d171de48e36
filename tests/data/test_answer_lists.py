"""Lists of answers in every format."""

from __future__ import annotations

import json

import pytest

from detector.io import write_json
from e2e_vl.data.answer_lists import read_answers
from tests.data.helpers import refused


def test_answers_of_every_format(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeff<unk>\r\nYes\n\nt - shirt \n".encode())
    (tmp_path / "label2ans.json").write_text('["", "yes", "no"]')
    (tmp_path / "ans2label.json").write_text('{"no": 1, "yes": 0}')
    rows = [{"ans": "a", "dsets": ["vqa"]}, {"ans": "b", "dsets": ["gqa"]}, {"ans": "c", "dsets": ["gqa", "vqa"]}]
    (tmp_path / "all_ans.json").write_text(json.dumps(rows))
    assert read_answers(tmp_path / "a.txt") == ["<unk>", "yes", "t - shirt"]
    assert read_answers(tmp_path / "label2ans.json") == ["", "yes", "no"]
    assert read_answers(tmp_path / "ans2label.json") == ["yes", "no"]
    assert read_answers(tmp_path / "all_ans.json") == ["a", "b", "c"]
    assert read_answers(tmp_path / "all_ans.json", ["vqa"]) == ["a", "c"]
    answers = ["", "yes", "café", "yes"]  # a task spells the lines of a text file, so that two of them may become one
    write_json(tmp_path / "new" / "answers.json", answers)
    assert read_answers(tmp_path / "new" / "answers.json") == answers


@pytest.mark.parametrize(
    ("name", "content", "sources", "part"),
    [
        ("a.pkl", "x", None, "JSON"),
        ("a.txt", "no\nyes\n Yes\n", None, "yes"),
        ("a.json", "[]", None, "answers"),
        ("a.json", '{"yes": 1, "no": 2}', None, "0 to 1"),
        ("a.json", '["", "no", "yes", "no"]', None, "no"),
        ("a.json", '["yes"]', ["vqa"], "[0]"),
        ("a.json", '[{"ans": "yes", "dsets": ["gqa"]}]', ["vqa"], "vqa"),
    ],
)
def test_bad_answer_files_are_named(tmp_path, name, content, sources, part):
    (tmp_path / name).write_text(content)
    with refused(name, part):
        read_answers(tmp_path / name, sources)
