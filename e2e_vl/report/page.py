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

from detector.images import load_image
from e2e_vl.config import RunConfig
from e2e_vl.drawing import draw_boxes
from e2e_vl.run_files import read_log

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em; color: #222 }
table { border-collapse: collapse } td, th { padding: .15em .8em; text-align: left; border-bottom: 1px solid #ddd }
td.number { text-align: right; font-variant-numeric: tabular-nums }
.pictures { display: grid; grid-template-columns: repeat(auto-fill, minmax(240px, 1fr)); gap: 1em }
figure { margin: 0 } figure img { width: 100% } figcaption { font-size: 90% }
.right { color: #0a7d32 } .wrong { color: #b3261e } pre { background: #f5f5f5; padding: 1em; overflow: auto }
"""

_SCORES = ("accuracy_", "AP_", "AP50_")  # beginnings of the metrics that are plotted
_SHOWN_SCORE = 0.5  # of detections in pictures


def write_report(run_dir: Path, config: RunConfig) -> Path:
    """Write `report.html` from what the run directory holds; returns its path."""
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
        sections += [f"<h2>Predictions: {html.escape(title)}</h2>", _pictures(records, config.eval.report_pictures)]
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
    """Training losses, and accuracies or average precisions of evaluations, over the steps."""
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


def _pictures(records: list[dict[str, Any]], number: int) -> str:
    """The first `number` predictions of boxes, at most one an image: truth green, prediction blue or (wrong) red.

    Of detection, truth green and detections with a score of at least 0.5 blue. Records of tasks that do not answer with
    boxes have no picture.
    """
    chosen: dict[str, dict[str, Any]] = {}
    for record in records:
        if len(chosen) >= number:
            break
        if "gt_box" in record or "objects" in record:
            chosen.setdefault(record["file_name"], record)
    figures = []
    for record in chosen.values():
        picture = picture_of(record)
        data = base64.b64encode(cv2.imencode(".jpg", picture)[1].tobytes()).decode()
        mark = "right" if record["correct"] else "wrong"
        if "gt_box" in record:
            caption = f"<span class='{mark}'>{html.escape(record['sent'])}</span> ({record['score']:.2f})"
        else:
            caption = f"F1 {record['correct']:.2f}"
        figures.append(f"<figure><img src='data:image/jpeg;base64,{data}'><figcaption>{caption}</figcaption></figure>")
    legend = "<p>Green: what the text refers to. Blue: the right prediction. Red: a wrong prediction.</p>"
    return f"{legend}<div class='pictures'>{''.join(figures)}</div>"


def picture_of(record: dict[str, Any]) -> np.ndarray:
    """uint8 BGR picture of one prediction: the true box in green, the predicted one, if any, in blue (wrong: red)."""
    image = load_image(record["file_name"], "BGR")
    if "objects" in record:
        return _picture_of_detections(image, record)
    colour = (200, 80, 0) if record["correct"] else (30, 30, 220)
    drawn = [(record["gt_box"], (60, 160, 0)), (record["box"], colour)]
    boxes, colours = zip(*(entry for entry in drawn if entry[0] is not None), strict=True)
    return draw_boxes(image, boxes, colours=colours)


def _picture_of_detections(image: np.ndarray, record: dict[str, Any]) -> np.ndarray:
    names = {entry["category_id"]: entry["category"] for entry in record["objects"]}
    drawn = [(entry["box"], entry["category"], (60, 160, 0)) for entry in record["objects"]]
    for box, score, category_id in zip(record["boxes"], record["scores"], record["category_ids"], strict=True):
        if score >= _SHOWN_SCORE:
            drawn.append((box, f"{names.get(category_id, category_id)} {score:.2f}", (200, 80, 0)))
    boxes, labels, colours = [list(column) for column in zip(*drawn, strict=True)] or [[], [], []]
    return draw_boxes(image, boxes, labels=labels, colours=colours)
