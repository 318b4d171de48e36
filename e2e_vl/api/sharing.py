"""What a saved model needs on other machines: its card, and a config without paths of the machine it was trained on."""

from __future__ import annotations

from pathlib import PureWindowsPath
from typing import Any

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
