"""`report.html`: one self-contained page with the run's numbers, curves, and pictures of predictions beside truth."""

from __future__ import annotations

import base64
import html
import io
import json
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from e2e_vl.config import RunConfig
from e2e_vl.run_files import read_log
from e2e_vl.tasks.base import Task

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em; color: #222 }
table { border-collapse: collapse } td, th { padding: .15em .8em; text-align: left; border-bottom: 1px solid #ddd }
td.number { text-align: right; font-variant-numeric: tabular-nums }
.pictures { display: grid; grid-template-columns: repeat(auto-fill, minmax(240px, 1fr)); gap: 1em }
figure { margin: 0 } figure img { width: 100% } figcaption { font-size: 90% }
.right { color: #0a7d32 } .wrong { color: #b3261e } pre { background: #f5f5f5; padding: 1em; overflow: auto }
"""

_SCORES = ("accuracy_", "AP_", "AP50_")  # beginnings of the metrics that are plotted
_MARKS = {1: "right", 0: "wrong"}  # how right a prediction is -> class of its caption


def write_report(run_dir: Path, config: RunConfig, task: Task) -> Path:
    """Write `report.html` from what the run directory holds.

    Args:
        run_dir: with `metrics.json`, `config.yaml`, and, if there are any, `log.jsonl` and `predictions_*.json`.
        config: the run's settings; `eval.report_pictures` limits the pictures of each file of predictions.
        task: draws the predictions; see `Task.draw` and `Task.caption`.

    Returns:
        The path of the report.
    """
    metrics = json.loads((run_dir / "metrics.json").read_text(encoding="utf-8"))
    sections = [
        f"<h1>{html.escape(run_dir.name)}</h1>",
        "<h2>Numbers</h2>",
        _metrics_table(metrics),
        "<h2>Curves</h2>",
        _curves(read_log(run_dir / "log.jsonl")),
    ]
    for path in sorted(run_dir.glob("predictions_*.json")):
        records = json.loads(path.read_text(encoding="utf-8"))
        title = path.stem.removeprefix("predictions_").replace("_", ", boxes: ")
        pictures = _pictures(records, config.eval.report_pictures, task)
        sections += [f"<h2>Predictions: {html.escape(title)}</h2>", pictures]
    settings = html.escape((run_dir / "config.yaml").read_text(encoding="utf-8"))
    sections += ["<h2>Settings</h2>", f"<pre>{settings}</pre>"]
    page = f"<!doctype html><meta charset='utf-8'><title>{html.escape(run_dir.name)}</title><style>{_STYLE}</style>"
    path = run_dir / "report.html"
    path.write_text(page + "\n".join(sections), encoding="utf-8")
    return path


def _metrics_table(metrics: dict[str, Any]) -> str:
    rows = [
        f"<tr><td>{html.escape(name)}</td><td class='number'>{value:.4g}</td></tr>"
        for name, value in metrics.items()
        if isinstance(value, int | float)
    ]
    return "<table>" + "".join(rows) + "</table>"


def _curves(lines: list[dict[str, Any]]) -> str:
    """Two plots over the steps: the training losses, and the accuracies or average precisions of the evaluations."""
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    loss_axes, accuracy_axes = figure.subplots(1, 2)
    training = [line for line in lines if line["kind"] == "train"]
    others = {"step", "kind", "epoch", "grad_norm"}
    names = {key for line in training for key in line if key not in others and not key.startswith("lr_")}
    for name in sorted(names):  # "loss" is the weighted sum of the others
        points = [(line["step"], line[name]) for line in training if name in line]
        loss_axes.plot(*zip(*points, strict=True), label=name, linewidth=1)
    evaluations = [line for line in lines if line["kind"] == "eval"]
    names = {
        key for line in evaluations for key in line if key.partition("/")[2].startswith(_SCORES) and key.count("/") == 1
    }
    for name in sorted(names):
        points = [(line["step"], line[name]) for line in evaluations if line.get(name) is not None]
        accuracy_axes.plot(*zip(*points, strict=True), label=name, marker="o", linewidth=1)
    for axes, title in ((loss_axes, "losses"), (accuracy_axes, "evaluation")):
        axes.set_xlabel("step")
        axes.set_title(title)
        if axes.lines:
            axes.legend(fontsize=8)
    loss_axes.set_yscale("log")
    accuracy_axes.set_ylim(0, 1.02)
    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer)
    return f"<img alt='curves' src='data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}'>"


def _pictures(records: list[dict[str, Any]], number: int, task: Task) -> str:
    """Pictures of the first `number` predictions that the task draws, at most one picture per image."""
    figures: dict[str, str] = {}  # by image file
    for record in records:
        if len(figures) >= number:
            break
        if record.get("file_name") in figures:
            continue
        picture = task.draw(record)
        if picture is not None:
            figures[record["file_name"]] = _figure(picture, task.caption(record), record.get("correct"))
    legend = "<p>Green: what the text refers to. Blue: the right prediction. Red: a wrong prediction.</p>"
    return f"{legend}<div class='pictures'>{''.join(figures.values())}</div>"


def _figure(picture: np.ndarray, caption: str, correct: float | None) -> str:
    """HTML of a uint8 RGB picture [h, w, 3] and its caption in green (right), red (wrong) or black (anything else)."""
    jpeg = cv2.imencode(".jpg", cv2.cvtColor(picture, cv2.COLOR_RGB2BGR))[1].tobytes()
    image = f"<img src='data:image/jpeg;base64,{base64.b64encode(jpeg).decode()}'>"
    caption = f"<span class='{_MARKS.get(correct, '')}'>{html.escape(caption)}</span>"
    return f"<figure>{image}<figcaption>{caption}</figcaption></figure>"
