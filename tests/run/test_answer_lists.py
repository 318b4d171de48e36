"""Lists of answers from annotations and from files, in the spelling of the task."""

from __future__ import annotations

import types

import pytest

from e2e_vl.data.config import NoOptions
from e2e_vl.metrics.vqa import vocabulary_answer
from e2e_vl.parts import DATASETS, TASKS, Part
from e2e_vl.run import build
from e2e_vl.run.build import frequent_answers, possible_answers
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
    dataset = types.SimpleNamespace(answers_of=lambda *_: GIVEN)
    monkeypatch.setitem(DATASETS, config.data.name, Part(NoOptions, dataset))
    monkeypatch.setitem(TASKS, config.task.name, Part(VQAConfig, task))
    monkeypatch.setattr(build, "open_options", lambda *_: (None, None))
    (tmp_path / "a.txt").write_text("<unk>\nT - shirt\n")
    for answers, expected in ((None, built), (str(tmp_path / "a.txt"), read), (["x", "y"], ["x", "y"])):
        given = replaced(config, task={"config": {"answers": answers, "min_answer_count": 2}})
        assert possible_answers(given) == expected
    assert not (tmp_path / "run").exists()  # the run writes the list, see `build_run`
