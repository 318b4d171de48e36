"""Lists of answers in every format."""

from __future__ import annotations

import pytest

from e2e_vl.data.answer_lists import read_answers, write_answers


def test_answers_of_every_format(tmp_path):
    (tmp_path / "a.txt").write_text("<unk>\nYes\n\nt - shirt \n", encoding="utf-8")
    (tmp_path / "label2ans.json").write_text('["", "yes", "no"]')
    (tmp_path / "ans2label.json").write_text('{"no": 1, "yes": 0}')
    assert read_answers(tmp_path / "a.txt") == ["<unk>", "yes", "t - shirt"]
    assert read_answers(tmp_path / "label2ans.json") == ["", "yes", "no"]
    assert read_answers(tmp_path / "ans2label.json") == ["yes", "no"]
    answers = ["", "yes", "café"]
    write_answers(tmp_path / "new" / "answers.json", answers)
    assert read_answers(tmp_path / "new" / "answers.json") == answers


def test_a_models_own_list_may_have_an_answer_twice(tmp_path):
    """A task spells the lines of a text file, so that two of them may become one."""
    write_answers(tmp_path / "answers.json", ["t-shirt", "yes", "t-shirt"])
    assert read_answers(tmp_path / "answers.json") == ["t-shirt", "yes", "t-shirt"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.pkl", "x", r"a\.pkl: an answer vocabulary is a \.txt"),
        ("a.txt", "\n", "holds no answers"),
        ("a.json", "3", "expected a list of answers"),
        ("a.json", '["yes", 1]', "expected a list of answers"),
        ("a.json", '{"yes": 1, "no": 2}', "are not 0 to 1"),
        (
            "a.txt",
            "<unk>\n\nno\nyes\n Yes\n",
            r"a\.txt: the lines 4 and 5 are both the answer 'yes', which has one class",
        ),
        (
            "a.json",
            '["", "no", "yes", "no"]',
            r"a\.json: the entries 1 and 3 \(counted from 0\) are both the answer 'no'",
        ),
        ("a.json", '{"yes": 0, "no": 2, "yes": 1}', r"a\.json: the answers are not clear: .* has the key 'yes' twice"),
        (
            "a.json",
            '[{"ans": "a", "dsets": ["vqa"]}, {"ans": "b", "dsets": ["gqa"]}, {"ans": "a", "dsets": []}]',
            "the entries 0 and 2",
        ),
    ],
)
def test_answer_files_that_are_none(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        read_answers(tmp_path / name)


def test_texts_of_other_editors(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffYes\r\nno\r\n".encode())
    assert read_answers(path) == ["yes", "no"]
    path.write_bytes(b"yes\nn\0o\n")
    with pytest.raises(ValueError, match=r"a\.txt: the file of the answers is not a text file, as it holds zero bytes"):
        read_answers(path)
    path.write_bytes("yes\n".encode("utf-16"))
    with pytest.raises(ValueError, match=r"a\.txt: the file of the answers is not a UTF-8 text file"):
        read_answers(path)
