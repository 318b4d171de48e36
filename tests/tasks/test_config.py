"""Settings of tasks and objectives that are refused; the message names the field."""

from __future__ import annotations

import pytest

from detector.errors import UserError
from e2e_vl.parts import OBJECTIVES, TASKS, decode


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [("vcr", "people_names", []), ("pretraining", "replace_probability", 0.5), ("masked_words", "probability", 15)],
)
def test_a_wrong_value_is_named(name, field, value):
    with pytest.raises(UserError, match=field):
        decode({field: value}, (TASKS | OBJECTIVES)[name].config_class, "task.config")


def test_messages_name_an_objective_as_settings_do():
    assert all(part.config_class.name == name for name, part in OBJECTIVES.items())
