"""`report.html`: one self-contained page with a run's metrics, errors, sampled predictions, curves and settings."""

from __future__ import annotations

import base64
import functools
import io
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import msgspec
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image

from detector.config import DetectorConfig, merge
from detector.errors import UserError
from detector.io import decode_yaml, read_json, write_text
from e2e_vl.config import DataSettings, EncoderSettings, RunConfig, TaskSettings, differences
from e2e_vl.io import file_name, read_log, read_text
from e2e_vl.predictions import Prediction, read_predictions, with_target
from e2e_vl.run.evaluate import MetricName
from e2e_vl.run.optim import preview
from e2e_vl.tasks.base import PredictionSummary, Task

# Curves of losses and evaluations.

Series = dict[str, list[tuple[int, float]]]  # name -> (step, value)

TASK, DETECTOR, SUM = "losses of the task", "losses of the detector (not weighted)", "weighted sum of all losses"
EVALUATION, EVALUATION_LOSS = "evaluation", "loss of the evaluation"
SCHEDULES = {"lr": "learning rate", "weight": "weight of objectives"}  # by first word of a training line's values
TOTAL = "loss"  # the weighted sum of all losses, in training and in evaluation
DETECTOR_PREFIX = "loss_"  # detection losses have Detectron2's names
# values of a training line that are not drawn
OTHER_VALUES = ("step", "kind", "epoch", "grad_norm", "skipped_steps", "not_finite")
MAX_MARKERS = 30  # curves with more points have no markers


def draw_curves(lines: Sequence[dict[str, Any]]) -> bytes | None:
    """Plot losses of task and detector, their weighted sum, evaluations and their losses, and what is scheduled.

    Evaluations of the kind "final" are on more images and are not plotted.

    Args:
        lines: the lines of log.jsonl, see `e2e_vl.io.RunLog`.

    Returns:
        The content of a PNG file; None if there is nothing to plot.
    """
    titles = (TASK, DETECTOR, SUM, EVALUATION, EVALUATION_LOSS, *SCHEDULES.values())
    plots: dict[str, Series] = {title: {} for title in titles}
    for line in lines:
        for name in sorted(line):
            title, label = _find_plot(line["kind"], name)
            if title and line[name] is not None:  # None: NaN or infinite
                plots[title].setdefault(label, []).append((line["step"], line[name]))
    plots = {title: series for title, series in plots.items() if series}
    if not plots:
        return None
    rows = (len(plots) + 1) // 2
    height = 3.6 * rows
    figure = Figure(figsize=(12, height), dpi=120)
    # fixed margins: matplotlib's layout engines draw all texts twice more to measure them
    figure.subplots_adjust(left=0.05, right=0.99, bottom=0.5 / height, top=1 - 0.3 / height, wspace=0.12, hspace=0.28)
    for number, (title, series) in enumerate(plots.items(), start=1):
        _plot(figure.add_subplot(rows, min(len(plots), 2), number), title, series)
    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer)
    return buffer.getvalue()


def draw_schedule(config: RunConfig, path: Path) -> None:
    """Write a picture of the learning rates and the weights of objectives over the steps of a run to come."""
    if config.train.max_steps is None:
        raise UserError("Epochs have no steps without data; give train.max_steps, the steps to draw.")
    path.write_bytes(draw_curves(list(preview(config, config.train.max_steps))))


def _find_plot(kind: str, name: str) -> tuple[str, str]:
    """The plot of a value ("": none) and its label there."""
    if kind == "train" and name not in OTHER_VALUES:
        first, _, rest = name.partition("_")
        if first in SCHEDULES:
            return SCHEDULES[first], rest
        return (SUM if name == TOTAL else DETECTOR if name.startswith(DETECTOR_PREFIX) else TASK), name
    metric = MetricName.read(name) if kind == "eval" else None
    if metric is None or metric.detail or not metric.measures_model:
        return "", name
    label = f"{metric.split}: {metric.metric.replace('_', ' ')}, {metric.boxes}"
    return (EVALUATION_LOSS if metric.metric == TOTAL else EVALUATION), label


def _plot(axes: Axes, title: str, series: Series) -> None:
    names: dict[tuple[tuple[int, float], ...], list[str]] = {}  # equal curves are one
    for name, points in series.items():
        # the last evaluation may be logged twice: between epochs and at the end
        names.setdefault(tuple(dict(points).items()), []).append(name)
    for points, found in names.items():
        steps, values = zip(*points, strict=True)
        marker = "." if len(steps) <= MAX_MARKERS else None
        axes.plot(steps, values, label=", ".join(found), linewidth=1.2, marker=marker)
    values = [value for points in series.values() for _, value in points]
    if title == EVALUATION:
        axes.set_ylim(0, max(1.02, *values))
    elif title not in SCHEDULES.values() and min(values) > 0 and max(values) > 10 * min(values):
        axes.set_yscale("log")
    else:
        axes.ticklabel_format(axis="y", scilimits=(-3, 5))
    axes.set_title(title, fontsize=10, y=1)  # without y, matplotlib measures all texts to place it
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8)


def list_changed_settings(config: RunConfig) -> list[str]:
    """The settings of a run that differ from the defaults, as `key: default -> value`."""
    defaults = msgspec.to_builtins(
        RunConfig(
            output="",
            encoder=EncoderSettings(config.encoder.name),
            task=TaskSettings(config.task.name),
            data=DataSettings(config.data.name, root=""),
        )
    )
    defaults["detector"]["overrides"] = decode_yaml(DetectorConfig.from_yaml({}).to_yaml(), "detector")
    settings = msgspec.to_builtins(config)
    settings["detector"]["overrides"] = merge(defaults["detector"]["overrides"], settings["detector"]["overrides"])
    return differences(defaults, settings)


# Tables of metrics with names such as `val/accuracy_predicted_boxes/relation`.


class MetricTable(NamedTuple):
    """A table with a column per box source."""

    title: str
    columns: list[str]  # box sources, in words
    rows: dict[str, list[float | None]]  # row name -> a value per column; None: not measured


def build_metric_tables(metrics: Mapping[str, Any]) -> list[MetricTable]:
    """For each split, a table of its metrics over all texts, then a table for each metric with families."""
    tables: dict[str, dict[tuple[str, str], float | None]] = {}  # title -> (row, column) -> value
    names = {name: found for name in metrics if (found := MetricName.read(name)) is not None}
    families = {(found.split, found.metric) for found in names.values() if found.detail}
    for name, found in sorted(names.items(), key=lambda item: item[1].is_count):
        words = found.metric.replace("_", " ")
        if not found.detail:
            tables.setdefault(found.split, {})[words, found.boxes] = metrics[name]
        if (found.split, found.metric) in families:
            row = found.detail.replace("_", " ") or "all"
            tables.setdefault(f"{found.split}: {words}", {})[row, found.boxes] = metrics[name]
    splits = list(dict.fromkeys(found.split for found in names.values()))
    found_tables = []
    for title in sorted(tables, key=lambda title: splits.index(title.partition(": ")[0])):
        values = tables[title]
        columns = list(dict.fromkeys(column for _, column in values))
        rows = {row: [values.get((row, column)) for column in columns] for row, _ in values}
        found_tables.append(MetricTable(title, columns, rows))
    return found_tables


# Predictions in a report: counts by family, errors, and random samples of the rest.

OUTCOMES = ("wrong", "partly correct", "correct", "unlabelled")
MAX_MISTAKES = 8  # rows in the table of frequent mistakes


class DescribedPrediction(NamedTuple):
    """One prediction and the task's description of it."""

    prediction: Prediction
    summary: PredictionSummary

    @property
    def outcome(self) -> str:
        """One of `OUTCOMES`."""
        correct = self.prediction.correct
        if correct is None:
            return "unlabelled"
        return "correct" if correct >= 1 else "partly correct" if correct > 0 else "wrong"

    @property
    def phrases(self) -> str:
        """The phrases of the text and their boxes; "" without phrases."""
        outcomes = {None: "", True: " correct", False: " wrong"}
        return "; ".join(f"{one.line}{outcomes[one.correct]}" for one in self.prediction.grounded)


class SampledPredictions(NamedTuple):
    """A random sample of `total` predictions."""

    title: str
    total: int
    shown: list[DescribedPrediction]


class PredictionLists(NamedTuple):
    """Counts and samples of one file of predictions."""

    groups: dict[str, Counter[str]]  # family or question type, "all" first -> number of predictions by outcome
    mistakes: list[tuple[str, str, int]]  # the most frequent (ground truth, wrong answer) pairs, with numbers of images
    outcomes: list[str]  # outcomes that occur; always "wrong" and "correct"
    wrong: list[SampledPredictions]  # one per group with errors, most errors first
    # group -> wrong predictions with more than one phrase, by whether all phrases but the first are correct
    grounded: dict[str, Counter[str]]
    others: list[SampledPredictions]  # partly correct, correct and unlabelled predictions, if any


def list_predictions(predictions: Sequence[Prediction], task: Task, number: int, seed: int) -> PredictionLists:
    """Count and sample the predictions of a split with one box source.

    Args:
        predictions: with `correct` (None: unlabelled). Texts with phrases only are left out.
        task: describes the predictions.
        number: maximum number of sampled predictions per outcome. Wrong ones are spread evenly over the groups.
        seed: seed of the random samples.
    """
    generator = np.random.default_rng(seed)

    def draw(title: str, members: Sequence[DescribedPrediction], count: int) -> SampledPredictions:
        rows = generator.choice(len(members), size=min(count, len(members)), replace=False)
        return SampledPredictions(title, len(members), [members[row] for row in sorted(rows)])

    described = [DescribedPrediction(one, task.describe(one)) for one in with_target(predictions)]
    by_outcome = {outcome: [one for one in described if one.outcome == outcome] for outcome in OUTCOMES}
    groups = {"all": Counter(one.outcome for one in described)}
    for name in sorted({one.summary.group for one in described} - {""}):
        groups[name] = Counter(one.outcome for one in described if one.summary.group == name)
    others = [draw(outcome, by_outcome[outcome], number) for outcome in OUTCOMES[1:] if by_outcome[outcome]]

    wrong: dict[str, list[DescribedPrediction]] = {}
    # the first phrase usually refers to the answer itself, and others to the landmark of a relation
    grounded: dict[str, Counter[str]] = {}
    for one in by_outcome["wrong"]:
        wrong.setdefault(one.summary.group, []).append(one)
        judged = [phrase.correct for phrase in one.prediction.grounded[1:] if phrase.correct is not None]
        if judged:
            grounded.setdefault(one.summary.group, Counter())["correct" if all(judged) else "wrong"] += 1
    ordered = sorted(wrong.items(), key=lambda item: (-len(item[1]), item[0]))
    # round-robin over the groups until there are enough errors
    turns = sorted((turn, rank) for rank, (_, members) in enumerate(ordered) for turn in range(len(members)))[:number]
    shares = Counter(rank for _, rank in turns)
    return PredictionLists(
        groups,
        _count_mistakes([*by_outcome["wrong"], *by_outcome["partly correct"]]),
        [outcome for outcome in OUTCOMES if by_outcome[outcome] or outcome in ("wrong", "correct")],
        [draw(name, members, shares[rank]) for rank, (name, members) in enumerate(ordered)],
        grounded,
        others,
    )


def _count_mistakes(predictions: Sequence[DescribedPrediction]) -> list[tuple[str, str, int]]:
    """Pairs of a ground truth and a wrong answer that occur in more than one image."""
    found: dict[tuple[str, str, str | None], None] = {}  # each pair once per image, in order
    for one in predictions:
        whole = ((one.summary.truth, one.summary.answer),) if one.outcome == "wrong" else ()
        for pair in whole if one.summary.mistakes is None else one.summary.mistakes:
            found[(*pair, one.prediction.file_name)] = None
    pairs = Counter((truth, answer) for truth, answer, _ in found if truth)
    return [(*pair, count) for pair, count in pairs.most_common(MAX_MISTAKES) if count > 1]


# The page.

TEMPLATE = Path(__file__).with_name("page.html.jinja")
MAX_PICTURE_AREA = 640 * 480  # pixels; a limit on the sides would make labels of thin pictures illegible
WIDE = 2.0  # aspect ratio above which a picture takes a whole row


def write_report(run_dir: Path, config: RunConfig, task: Task) -> Path:
    """Write `report.html` into a run directory.

    Args:
        run_dir: contains `metrics.json`, `config.yaml`, and optionally `log.jsonl` and `predictions_*.json`.
        config: the run's config; `eval.report_pictures` limits the samples of each outcome.
        task: describes and draws the predictions; see `Task.describe` and `Task.draw`.

    Returns:
        The path of the report.
    """
    metrics = read_json(run_dir / "metrics.json", dict[str, Any])
    curves = draw_curves(read_log(run_dir / "log.jsonl"))
    sections = []
    for split, boxes in itertools.product(config.data.eval_splits, config.eval.boxes):
        path = run_dir / f"predictions_{file_name(split)}_{boxes}.json"
        if path.is_file():
            predictions = read_predictions(path, task.prediction_class)
            lists = list_predictions(predictions, task, config.eval.report_pictures, config.seed)
            sections.append({"title": f"{split}, {boxes.metric_suffix.replace('_', ' ')}", "lists": lists})
    numbers: dict[str, Any] = {}  # statistics of the run itself, such as `steps`
    for name, value in metrics.items():
        if isinstance(value, dict) and name != "best":  # the best model has its own section
            numbers |= {f"{name} of the {part}": one for part, one in value.items()}
        elif name != "best" and MetricName.read(name) is None:
            numbers[name.replace("_", " ")] = value
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"value": _format_number}
    page = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        title=run_dir.resolve().name,
        task=config.task.name,
        data=config.data.name,
        tables=build_metric_tables(metrics),
        best=metrics.get("best"),
        best_tables=build_metric_tables((metrics.get("best") or {}).get("metrics", {})),
        numbers=numbers,
        sections=sections,
        draw=functools.partial(draw_prediction, task),
        curves=None if curves is None else _make_data_uri(curves, "png"),
        changed=list_changed_settings(config),
        settings=read_text(run_dir / "config.yaml"),
    )
    path = run_dir / "report.html"
    write_text(path, page)
    return path


class Picture(NamedTuple):
    """The picture of a prediction on the page."""

    uri: str = ""  # "" without a picture
    is_wide: bool = False  # it takes a whole row
    problem: str = ""  # why there is no picture; "" if there is one, or nothing to draw


def draw_prediction(task: Task, prediction: Prediction) -> Picture:
    try:
        drawn = task.draw(prediction)
    except (OSError, ValueError) as error:  # the image is in an archive, or was moved since
        return Picture(problem=str(error))
    if drawn is None:
        return Picture()
    buffer, image = io.BytesIO(), Image.fromarray(drawn)
    factor = min((MAX_PICTURE_AREA / (image.width * image.height)) ** 0.5, 1)
    size = (max(round(image.width * factor), 1), max(round(image.height * factor), 1))
    image.resize(size).save(buffer, "JPEG", quality=85)
    return Picture(_make_data_uri(buffer.getvalue(), "jpeg"), is_wide=image.width > WIDE * image.height)


def _make_data_uri(content: bytes, kind: str) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def _format_number(value: Any) -> str:
    """A number as text: whole numbers in full, others with three decimals or significant digits; None as a dash."""
    if value is None:
        return "–"
    if not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or (value.is_integer() and abs(value) > 1):
        return f"{value:,.0f}"
    return f"{value:.3f}" if abs(value) >= 0.001 or value == 0 else f"{value:.3g}"
