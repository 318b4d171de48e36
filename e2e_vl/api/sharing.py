"""What a saved model needs on other machines: its card, and a config without paths of the machine it was trained on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PureWindowsPath
from typing import Any

from huggingface_hub import EvalResult

from e2e_vl.config import DataConfig
from e2e_vl.run.metric_names import MetricName

MODEL_CARD = """---
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
{% if knows %}
It knows only this:
{% for name, values in knows.items() %}
- {{ name }}: {{ values | join(", ") }}{% endfor %}
{% endif %}{% if metrics %}
| metric | value |
|---|---:|
{% for key, value in metrics.items() %}| {{ key }} | {{ "%.3f" | format(value) }} |
{% endfor %}{% endif %}{% if thresholds %}
Answers are marked unsure below a certainty of
{% for boxes, value in thresholds.items() %}{{ "%.2f" | format(value) }} with {{ boxes }}
{{- ", " if not loop.last }}{% endfor %};
fewer than {{ sure }} % of such answers were right in validation.
{% endif %}"""


def evaluation_results(hub_task: str, data: DataConfig, scores: Mapping[MetricName, float]) -> list[EvalResult]:
    """Return the scores over whole splits as a model card lists them in its metadata.

    Args:
        hub_task: what the Hugging Face hub calls the task.
        data: of the run; synthetic scenes are named as such.
    """
    dataset = data.name
    if data.synthetic.scenes:
        dataset = f"{data.name}, synthetic scenes"
    results = []
    for name, value in scores.items():
        if name.detail:
            continue
        result = EvalResult(
            task_type=hub_task,
            dataset_type=data.name,
            dataset_name=dataset,
            dataset_split=name.split,
            metric_type=name.metric,
            metric_name=f"{name.metric}, {name.boxes}",
            metric_value=round(value, 4),
        )
        results.append(result)
    return results


def without_absolute_paths(value: Any) -> Any:
    """Return a config whose absolute paths are replaced by file names: they only exist on the training machine."""
    if isinstance(value, dict):
        return {key: without_absolute_paths(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [without_absolute_paths(entry) for entry in value]
    if not isinstance(value, str):
        return value
    is_absolute = value.startswith(("/", "~")) or bool(PureWindowsPath(value).drive)
    return PureWindowsPath(value).name if is_absolute else value
