"""`report.html`: one self-contained page with a run's metrics, errors, samples of predictions, curves and settings."""

from __future__ import annotations

import base64
import dataclasses
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
from PIL import Image

from e2e_vl.box_sources import BoxSource
from e2e_vl.config import RunConfig
from e2e_vl.file_names import id_of, name_of
from e2e_vl.metric_names import MetricName
from e2e_vl.report.changed_settings import changed_settings
from e2e_vl.report.curves import draw_curves
from e2e_vl.report.metric_tables import metric_tables
from e2e_vl.report.prediction_lists import (
    Prediction,
    PredictionLists,
    check_predictions,
    list_predictions,
    phrase_line,
)
from e2e_vl.run_files import (
    errors_naming,
    read_log,
    read_metrics,
    read_plain_json,
    read_settings_text,
    write_text,
)
from e2e_vl.tasks.base import PredictionWords, Task

MAX_PREDICTIONS = 1 << 31  # bytes
TEMPLATE = Path(__file__).with_name("page.html.jinja")
PICTURE_AREA = 640 * 480  # most pixels of a picture in the page, so that labels of thin ones stay legible
WIDE = 2.0  # width by height from which a picture has a row of its own


@dataclasses.dataclass(frozen=True)
class Card:
    """One prediction as the page shows it."""

    words: PredictionWords
    outcome: str
    picture: str  # a data URI; "" without a picture
    problem: str  # why there is no picture; "" where there is one, or nothing to draw
    phrases: str  # what its phrases name; "" for a run without them
    is_wide: bool = False  # the picture needs a row of its own


@dataclasses.dataclass(frozen=True)
class Section:
    """One file of predictions."""

    title: str
    lists: PredictionLists


def write_report(run_dir: Path, config: RunConfig, task: Task, part_defaults: Mapping[str, Any] | None = None) -> Path:
    """Write `report.html` from what the run directory holds.

    Args:
        run_dir: with `metrics.json`, `config.yaml`, and, if there are any, `log.jsonl` and `predictions_*.json`.
        config: the run's settings. Of each file of predictions, up to `eval.report_pictures` wrong ones, partly right
            ones, right ones and ones without a label are shown, drawn at random from `seed`.
        task: describes and draws the predictions; see `Task.describe` and `Task.draw`.
        part_defaults: see `changed_settings`.

    Returns:
        The path of the report.

    Raises:
        UserError: a file of the run is damaged, or a prediction lacks what the task's predictions hold.
    """
    metrics = read_metrics(run_dir / "metrics.json")
    curves = draw_curves(read_log(run_dir / "log.jsonl"))
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"value": _value, "share": _share}
    page = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        title=run_dir.resolve().name,
        task=config.task.name,
        data=config.data.name,
        tables=metric_tables(metrics),
        best=metrics.get("best"),
        best_tables=metric_tables((metrics.get("best") or {}).get("metrics", {})),
        numbers=_numbers(metrics),
        sections=[_section(path, config, task) for path in _prediction_files(run_dir, config)],
        card=lambda prediction: _card(prediction, task),
        curves=None if curves is None else _data_uri(curves, "png"),
        changed=changed_settings(config, part_defaults),
        settings=read_settings_text(run_dir / "config.yaml"),
    )
    path = run_dir / "report.html"
    write_text(path, page)
    return path


def _numbers(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """What `metrics.json` says of the run itself, nested values under joined names; the best model is shown apart."""
    numbers = {}
    for name, value in metrics.items():
        if MetricName.read(name) is not None or name == "best":
            continue
        if isinstance(value, dict):
            numbers |= {f"{name} of the {part}": one for part, one in value.items()}
        else:
            numbers[name.replace("_", " ")] = value
    return numbers


def _prediction_files(run_dir: Path, config: RunConfig) -> list[Path]:
    """In the order of the run's splits and box sources, then others."""
    order = [
        f"predictions_{name_of(split, flat=True)}_{boxes}.json"
        for split in config.data.eval_splits
        for boxes in config.eval.boxes
    ]
    own = [run_dir / name for name in order if (run_dir / name).is_file()]
    return [*own, *sorted(set(run_dir.glob("predictions_*.json")) - set(own))]


def _section(path: Path, config: RunConfig, task: Task) -> Section:
    split, _, boxes = path.stem.removeprefix("predictions_").rpartition("_")
    known = {source.value: source.metric_suffix.replace("_", " ") for source in BoxSource.for_evaluation()}
    records = read_plain_json(path, list, max_bytes=MAX_PREDICTIONS)
    check_predictions(records, task, path)
    with errors_naming(path):
        lists = list_predictions(records, task, config.eval.report_pictures, config.seed)
    return Section(f"{id_of(split)}, {known.get(boxes, boxes)}", lists)


def _card(prediction: Prediction, task: Task) -> Card:
    picture, problem, is_wide = "", "", False
    try:
        drawn = task.draw(prediction.record)
    except (OSError, ValueError) as error:  # of the image: it lies in an archive, or was moved meanwhile
        drawn, problem = None, str(error)
    if drawn is not None:
        buffer, image = io.BytesIO(), Image.fromarray(drawn)
        is_wide = image.width > WIDE * image.height
        factor = min((PICTURE_AREA / (image.width * image.height)) ** 0.5, 1)
        image = image.resize((max(round(image.width * factor), 1), max(round(image.height * factor), 1)))
        image.save(buffer, "JPEG", quality=85)
        picture = _data_uri(buffer.getvalue(), "jpeg")
    return Card(prediction.words, prediction.outcome, picture, problem, phrase_line(prediction.record), is_wide)


def _data_uri(content: bytes, kind: str) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def _value(value: Any) -> str:
    """A number as text: whole numbers in full, others with three decimals or digits; a dash for none."""
    if value is None:
        return "–"
    if not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or (value.is_integer() and abs(value) > 1):
        return f"{value:,.0f}"
    return f"{value:.3f}" if abs(value) >= 0.001 or value == 0 else f"{value:.3g}"


def _share(part: int, total: int) -> str:
    return f"{100 * part / total:.1f} %" if total else "–"
