"""Saved settings whose values meant another rule when they were saved.

`revision` marks the settings of runs that were saved since each mistake of an official code has a switch of its own.
Before, some values joined a rule with a mistake. Where today's settings have words for what they meant, these take
their place; where the same value had two meanings one after the other, the user must say which one it was.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from detector.errors import UserError
from e2e_vl.run.build import task_class

PREFIX = "task.config."


def rules_of(path: Path, overrides: Iterable[str] = ()) -> Callable[[dict[str, Any]], None]:
    """What puts the saved settings of a file, in place, into today's words; for `load_config`.

    Args:
        overrides: `key=value` settings that the user gives now; what they say needs not be guessed.
    """
    names = {word.partition("=")[0] for word in overrides}
    given = frozenset(name.removeprefix(PREFIX) for name in names if name.startswith(PREFIX))
    return functools.partial(_upgrade_rules, path=path, given=given)


def _upgrade_rules(content: dict[str, Any], path: Path, given: frozenset[str]) -> None:
    """Raises UserError for a value that had two meanings and is not among the `given` ones."""
    task = content.get("task")
    if "revision" in content or not isinstance(task, dict):
        return
    try:
        config = task.get("config")
        _upgrade_task(task.get("name"), config, given)
        choices = config.get("choices") if isinstance(config, dict) else None
        if isinstance(choices, dict):  # texts that another task words
            inner = frozenset(name.removeprefix("choices.config.") for name in given)
            _upgrade_task(choices.get("task"), choices.get("config"), inner)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error


def _upgrade_task(name: Any, config: Any, given: frozenset[str]) -> None:
    if isinstance(name, str) and isinstance(config, dict):
        task_class(name).upgrade_rules(config, given)
