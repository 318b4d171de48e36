"""Lists of answers from annotations and from files, in the spelling of the task."""

from __future__ import annotations

import types

import pytest

from detector.errors import UserError
from e2e_vl.data.answer_lists import read_answers
from e2e_vl.data.config import NoOptions
from e2e_vl.metrics.vqa import vocabulary_answer
from e2e_vl.parts import DATASETS, TASKS, Part
from e2e_vl.run import build as answer_lists
from e2e_vl.run.build import frequent_answers, official_lines, possible_answers
from e2e_vl.tasks.config import VQAConfig
from e2e_vl.tasks.vqa import VQATask
from tests.run.extensions.statements import StatementTask
from tests.weights.starts import replaced

GIVEN = dict(enumerate(["Two, three"] * 3 + ["2 3"] * 3 + ["the box"] * 2))


def test_a_list_is_ordered_by_count_then_alphabet():
    given = dict(enumerate(["yes"] * 3 + ["no"] * 3 + ["Two"] + ["2"] + ["rare"]))
    assert frequent_answers(given, 2, vocabulary_answer) == ["no", "yes", "2"]
    assert frequent_answers(given, 1, str) == ["no", "yes", "2", "Two", "rare"]
    with pytest.raises(ValueError, match="no answer belongs to at least 4 of the 9 questions"):
        frequent_answers(given, 4, vocabulary_answer)


@pytest.mark.parametrize(
    ("task", "built", "read"),
    [
        (VQATask, ["2 3", "box"], ["<unk>", "t  shirt"]),
        (StatementTask, ["2 3", "Two, three", "the box"], ["<unk>", "t - shirt"]),  # compares answers as they are
    ],
)
def test_the_task_spells_the_answers(tiny_config, monkeypatch, tmp_path, task, built, read):
    config = tiny_config()
    monkeypatch.setattr(answer_lists, "open_options", lambda *_: (None, None))
    dataset = types.SimpleNamespace(answers_of=lambda *_: GIVEN)
    monkeypatch.setitem(DATASETS, config.data.name, Part(NoOptions, dataset))
    monkeypatch.setitem(TASKS, config.task.name, Part(VQAConfig, task))
    assert possible_answers(config, 2) == built
    assert not (tmp_path / "run").exists()  # the run writes the list, see `build_run`
    (tmp_path / "a.txt").write_text("<unk>\nT - shirt\n")
    answers = {"answers": str(tmp_path / "a.txt")}
    given = replaced(config, task={"config": answers})
    assert possible_answers(given, 2) == read


def test_lines_that_are_read_back_as_another_answer_are_refused():
    task = VQATask(4, VQAConfig(answers=["<unk>", "at night", "t - shirt"]))
    with pytest.raises(ValueError, match=r"Answer 2 is 't - shirt', which an official answer vocabulary"):
        official_lines(task)
    assert official_lines(VQATask(4, VQAConfig(answers=["<unk>", "at night"]))) == "<unk>\nat night\n"
    plain = types.SimpleNamespace(answers=["t - shirt"], official_answer=StatementTask.official_answer)
    assert official_lines(plain) == "t - shirt\n"


OFFICIAL = "<unk>\nt shirt\nt-shirt\nyes\nt/shirt\nu.s.\nus\nred, white\n"


def test_answers_that_are_spelled_alike_are_written_as_lines_that_are_read_back(tmp_path):
    """An official file may have several lines that its code reads as one answer; each keeps its class."""
    (tmp_path / "official.txt").write_text(OFFICIAL)
    answers = [VQATask.official_answer(line) for line in read_answers(tmp_path / "official.txt")]
    assert len(set(answers)) == len(answers) - 3
    task = VQATask(4, VQAConfig(answers=answers))
    lines = official_lines(task)
    assert lines == "<unk>\nt shirt\nt-shirt\nyes\nt shirt.\nus\nus.\nred white\n"
    (tmp_path / "again.txt").write_text(lines)
    again = [VQATask.official_answer(line) for line in read_answers(tmp_path / "again.txt")]
    assert again == answers
    assert VQATask(4, VQAConfig(answers=again)).answer_list.class_of == task.answer_list.class_of
    assert official_lines(VQATask(4, VQAConfig(answers=again))) == lines


@pytest.mark.parametrize(("task", "answer"), [(StatementTask, "yes"), (VQATask, "<unk>")])
def test_an_answer_that_a_file_cannot_hold_twice_is_refused(task, answer):
    twice = types.SimpleNamespace(answers=["no", answer, answer], official_answer=task.official_answer)
    with pytest.raises(UserError, match=rf"Answers 1 and 2 are both '{answer}', .* task\.config\.answers"):
        official_lines(twice)
