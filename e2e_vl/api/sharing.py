"""What a saved model tells others: a model card, and settings without the paths of the machine it was trained on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import PureWindowsPath
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from detector.user_paths import user_path
from e2e_vl.config import INPUTS, RunConfig
from e2e_vl.run_files import looks_like_hub_name
from e2e_vl.tasks.base import Task

CARD = """---
{{ card_data }}
---

# {{ name }}

A vision-and-language model of e2e-vl, trained end to end from raw pixels: the detector `{{ detector }}`, the
encoder `{{ encoder }}` and the task `{{ task }}`, trained on the data `{{ data }}`.

```python
import e2e_vl

model = e2e_vl.load("{{ name }}")
{{ example }}
```
{% if metrics %}
| metric | value |
|---|---:|
{% for key, value in metrics.items() %}| {{ key }} | {{ "%.3f" | format(value) }} |
{% endfor %}{% endif %}"""
NOT_SHOWN = ("count", "ceiling")  # metrics that do not measure the model


def make_card(
    name: str,
    settings: RunConfig,
    task: Task,
    metrics: Mapping[str, Any],
    *,
    wants_answer: bool = False,
    license: str | None = None,
    **more: Any,
) -> ModelCard:
    """What the model is made of, how to load and ask it, and its metrics where the run has them.

    Args:
        metrics: by name, such as "val/accuracy_own_boxes".
        wants_answer: a given answer belongs to the questions.
        license: of the weights, which only their owner can name; None: the card names none.
        more: further values of the template.
    """
    shown = {key: value for key, value in metrics.items() if "/" in key and isinstance(value, float)}
    data = ModelCardData(library_name="e2e-vl", tags=["vision-and-language", settings.task.name])
    if license is not None:
        data.license = license
    return ModelCard.from_template(
        card_data=data,
        template_str=CARD,
        name=name,
        detector=settings.detector.backend,
        encoder=settings.encoder.name,
        task=settings.task.name,
        data=settings.data.name,
        example=_example(settings, task, wants_answer),
        metrics={key: value for key, value in shown.items() if not key.partition("/")[2].startswith(NOT_SHOWN)},
        **more,
    )


def _example(settings: RunConfig, task: Task, wants_answer: bool) -> str:
    """A call that the model answers."""
    if settings.detector.backend == "precomputed":
        return "# it reads saved region features, so `tools/evaluate.py` and `tools/predict.py split` run it"
    if not task.answers_questions:
        return 'found = model.regions("photo.jpg")'
    words = f'{task.example_call}, answer="because [1] is happy"' if wants_answer else task.example_call
    return f"answer = model.ask({words})"


def without_paths(settings: RunConfig) -> RunConfig:
    """The settings with the plain names of files and folders in place of their paths; names on the hub stay.

    A saved model needs none of the files, and whether weights were loaded (`DetectorSettings.proposes_at_random`) can
    still be told.
    """
    shared = _without_absolute(settings)
    changes: dict[str, Any] = {"output": _name(shared.output)}
    for section, keys in INPUTS.items():
        first, _, inner = section.partition(".")
        part = changes.get(first, getattr(shared, first))
        values = getattr(part, inner) if inner else {key: getattr(part, key) for key in keys}
        named = {key: _name(values[key]) for key in keys if isinstance(values.get(key), str)}
        changes[first] = dataclasses.replace(part, **({inner: {**values, **named}} if inner else named))
    return dataclasses.replace(shared, **changes)


def _name(path: str) -> str:
    is_on_hub = looks_like_hub_name(path) and not user_path(path).exists()
    return path if is_on_hub else PureWindowsPath(path).name


def _without_absolute(value: Any) -> Any:
    """The names of all absolute paths, at any depth."""
    if dataclasses.is_dataclass(value):
        fields = [field.name for field in dataclasses.fields(value)]
        return dataclasses.replace(value, **{name: _without_absolute(getattr(value, name)) for name in fields})
    if isinstance(value, dict):
        return {key: _without_absolute(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_without_absolute(one) for one in value]
    is_absolute = isinstance(value, str) and (value.startswith(("/", "~")) or bool(PureWindowsPath(value).drive))
    return PureWindowsPath(value).name if is_absolute else value
