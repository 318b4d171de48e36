"""`report.html`: one self-contained page with a run's metrics, errors, sampled predictions, curves and settings."""

from __future__ import annotations

import base64
import datetime
import functools
import io
import itertools
import shlex
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import msgspec
import numpy as np
from jaxtyping import UInt8
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image

from detector.config import DetectorConfig
from detector.errors import UserError
from detector.io import atomic_file, decode_yaml, read_json, write_text
from detector.yaml_tree import merge
from e2e_vl.config import DataConfig, EncoderConfig, RunConfig, TaskConfig
from e2e_vl.config_files import differences
from e2e_vl.io import file_name, read_log, read_text
from e2e_vl.metrics import baselines
from e2e_vl.predictions import Prediction, read_predictions, with_target
from e2e_vl.registry import Config
from e2e_vl.run.evaluate import find_sure_threshold, mark_unsure
from e2e_vl.run.metric_names import MetricName, Metrics, metrics_from_json
from e2e_vl.run.optim import preview
from e2e_vl.tasks.base import PredictionSummary, Task

# Curves of losses and evaluations.

Series = dict[str, list[tuple[int, float]]]  # name -> (step, value)

# titles of the plots
TASK = "losses of the task"
DETECTOR = "losses of the detector (not weighted)"
SUM = "weighted sum of all losses"
EVALUATION = "evaluation; the last point is on all images"
EVALUATION_LOSS = "loss of the evaluation"
SCHEDULES = {"lr": "learning rate", "weight": "weight of objectives"}  # by first word of a training line's values
TOTAL = "loss"  # the weighted sum of all losses, in training and in evaluation
DETECTOR_PREFIX = "loss_"  # detection losses have Detectron2's names
# values of a training line that are not drawn
OTHER_VALUES = ("step", "kind", "epoch", "grad_norm", "skipped_steps", "not_finite")
MAX_MARKERS = 30  # curves with more points have no markers
MAX_EVALUATIONS = 8  # if there are more curves, only accuracies are drawn
LEGEND_WIDTH = 46  # characters of a line


def draw_curves(lines: Sequence[dict[str, Any]]) -> bytes | None:
    """Plot the losses, the metrics and losses of evaluations, and the learning rates and weights of the schedule.

    Args:
        lines: the lines of log.jsonl, see `e2e_vl.io.RunLog`.

    Returns:
        The content of a PNG file; None if there is nothing to plot.
    """
    titles = (EVALUATION, EVALUATION_LOSS, SUM, TASK, DETECTOR, *SCHEDULES.values())
    plots: dict[str, Series] = {title: {} for title in titles}
    for line in lines:
        for name, value in sorted(line.items()):
            title, label = _find_plot(line["kind"], name)
            if title and value is not None:  # None: NaN or infinite
                plots[title].setdefault(label, []).append((line["step"], value))
    if len(plots[EVALUATION]) > MAX_EVALUATIONS:
        accuracies = {label: points for label, points in plots[EVALUATION].items() if "accuracy" in label}
        plots[EVALUATION] = accuracies or plots[EVALUATION]
    plots = {title: series for title, series in plots.items() if series}
    if not plots:
        return None
    rows = (len(plots) + 1) // 2
    height = 3.2 * rows  # inches; small ones, so that words are large on the page
    figure = Figure(figsize=(10, height), dpi=140)
    # fixed margins: matplotlib's layout engines draw all texts twice more to measure them
    figure.subplots_adjust(left=0.06, right=0.99, bottom=0.5 / height, top=1 - 0.3 / height, wspace=0.12, hspace=0.38)
    for number, (title, series) in enumerate(plots.items(), start=1):
        _plot(figure.add_subplot(rows, min(len(plots), 2), number), title, series)
    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer)
    return buffer.getvalue()


def draw_schedule(config: RunConfig, path: Path) -> None:
    """Write a picture of the learning rates and the weights of objectives over the steps of a run to come."""
    if config.train.max_steps is None:
        raise UserError("Epochs have no steps without data; give train.max_steps, the steps to draw.")
    with atomic_file(path) as new:
        new.write_bytes(draw_curves(list(preview(config, config.train.max_steps))))


def _find_plot(kind: str, name: str) -> tuple[str, str]:
    """Return the title of a value's plot ("": none) and its label there."""
    if kind == "train" and name not in OTHER_VALUES:
        first, _, rest = name.partition("_")
        if first in SCHEDULES:
            return SCHEDULES[first], rest
        if name == TOTAL:
            return SUM, name
        if name.startswith(DETECTOR_PREFIX):
            return DETECTOR, name
        return TASK, name
    if kind not in ("eval", "final"):
        return "", name
    metric = MetricName.read(name)
    if metric is None or metric.detail or not metric.measures_model:
        return "", name
    title = EVALUATION_LOSS if metric.metric == TOTAL else EVALUATION
    return title, f"{metric.split}: {metric.metric.replace('_', ' ')}, {metric.boxes}"


def _plot(axes: Axes, title: str, series: Series) -> None:
    names_of_curve: dict[tuple[tuple[int, float], ...], list[str]] = {}  # equal curves are drawn once
    for name, points in series.items():
        # the last evaluation may be logged twice: between epochs and at the end
        names_of_curve.setdefault(tuple(dict(points).items()), []).append(name)
    all_values: list[float] = []
    for points, names in names_of_curve.items():
        steps, values = zip(*points, strict=True)
        marker = "." if len(steps) <= MAX_MARKERS else None
        label = textwrap.fill(", ".join(names), LEGEND_WIDTH)
        axes.plot(steps, values, label=label, linewidth=1.2, marker=marker)
        all_values += values
    lowest = min(all_values)
    highest = max(all_values)
    if title == EVALUATION:
        axes.set_ylim(max(lowest - 0.1, 0), max(1.02, highest))
        axes.set_xlim(left=0)
    elif title not in SCHEDULES.values() and lowest > 0 and highest > 10 * lowest:
        axes.set_yscale("log")
    else:
        axes.ticklabel_format(axis="y", scilimits=(-3, 5))
    axes.set_title(title, fontsize=10, y=1)  # without y, matplotlib measures all texts to place it
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8)


def list_changed_settings(config: RunConfig) -> list[str]:
    """List the settings of a run that differ from the defaults, as `key: default -> value`."""
    defaults = msgspec.to_builtins(
        RunConfig(
            output="",
            encoder=EncoderConfig(config.encoder.name, config.encoder.config),
            task=TaskConfig(config.task.name, config.task.config),
            data=DataConfig(config.data.name, root="", config=config.data.config),
        )
    )
    for section in ("encoder", "task", "data"):
        defaults[section]["config"] = _list_defaults(getattr(config, section).config)
    defaults["detector"]["overrides"] = decode_yaml(DetectorConfig.from_yaml({}).to_yaml(), "detector")
    settings = msgspec.to_builtins(config)
    settings["detector"]["overrides"] = merge(defaults["detector"]["overrides"], settings["detector"]["overrides"])
    return differences(defaults, settings)


def _list_defaults(settings: Config) -> dict[str, Any]:
    """Return the defaults of a group of settings; a required field has none, and is left out."""
    required = [field.name for field in msgspec.structs.fields(settings) if field.required]
    defaults = type(settings)(**{name: getattr(settings, name) for name in required})
    return {name: value for name, value in msgspec.to_builtins(defaults).items() if name not in required}


# Tables with a column per box source.

Cells = dict[tuple[str, str], dict[str, Any]]  # (heading, box source in words) -> a value per row
ALL = "all"  # the row over all texts
MAX_MISTAKES = 8  # rows in the table of frequent mistakes
MAX_COLUMNS = 8  # of a table, so that it fits into a window of 800 pixels


class Table(NamedTuple):
    """Columns of one heading stand side by side; they are one column where all their values are equal."""

    title: str
    headings: list[tuple[str, list[str]]]  # heading, and the box sources below it; "" = any boxes
    rows: dict[str, list[Any]]  # row name -> a value per column; None: not measured

    @classmethod
    def build(cls, title: str, cells: Cells) -> Table:
        """Arrange cells as a table whose first row is that over all texts."""
        by_heading: dict[str, dict[str, dict[str, Any]]] = {}  # heading -> box source -> a value per row
        for (heading, source), values in cells.items():
            by_heading.setdefault(heading, {})[source] = values
        headings = []
        columns = []
        for heading, by_source in by_heading.items():
            distinct = {tuple(values.items()) for values in by_source.values()}
            if len(by_source) > 1 and len(distinct) == 1:
                by_source = {"": next(iter(by_source.values()))}
            headings.append((heading, list(by_source)))
            columns += by_source.values()
        names = dict.fromkeys(itertools.chain.from_iterable(columns))
        ordered = sorted(names, key=lambda row: row != ALL)
        return cls(title, headings, {row: [column.get(row) for column in columns] for row in ordered})

    def parts(self, first_count: str | None) -> Iterator[Table]:
        """Yield tables of at most `MAX_COLUMNS` columns with the same rows; a heading stays whole.

        A table that has more columns is divided first of all at the heading `first_count`, where counts begin.
        """
        is_wide = sum(len(sources) for _, sources in self.headings) > MAX_COLUMNS
        first = 0  # column of the part
        end = 0  # column after the part
        headings: list[tuple[str, list[str]]] = []
        for heading, sources in self.headings:
            is_full = end + len(sources) - first > MAX_COLUMNS
            if headings and (is_full or (is_wide and heading == first_count)):
                yield self._part(headings, first, end)
                headings = []
                first = end
            headings.append((heading, sources))
            end += len(sources)
        yield self._part(headings, first, end)

    def _part(self, headings: list[tuple[str, list[str]]], first: int, end: int) -> Table:
        title = f"{self.title}, continued" if first else self.title
        return Table(title, headings, {name: values[first:end] for name, values in self.rows.items()})


def build_tables(metrics: Metrics, split: str, counts: Cells | None = None) -> list[Table]:
    """Build a table of the metrics of a split over all texts, then one of each set of families.

    Args:
        counts: columns that join the first table with all of their families.
    """
    of_split = [(metric, value) for metric, value in metrics.items() if metric.split == split]
    of_split.sort(key=lambda entry: entry[0].is_count)
    overall = Cells()
    by_family = Cells()
    for metric, value in of_split:
        words = metric.metric.replace("_", " ")
        if metric.detail:
            family = metric.detail.replace("_", " ")
            by_family.setdefault((words, metric.boxes), {})[family] = value
        else:
            overall.setdefault(("", metric.boxes), {})[words] = value
    for (words, source), column in by_family.items():
        if words in overall.get(("", source), {}):
            column[ALL] = overall["", source][words]
    tables = []
    if overall:
        tables.append(Table.build("overall", overall))
    alike: dict[frozenset[str], Cells] = {}  # columns by the families that they have
    for column, values in [*by_family.items(), *(counts or {}).items()]:
        families = frozenset(values) - {ALL}
        key = families
        if families:  # they join the first table that has all of them
            key = next((other for other in alike if families <= other), families)
        alike.setdefault(key, {})[column] = values
    first_count = next((words for words, _ in counts or ()), None)
    for families, cells in alike.items():
        title = "by kind" if families else "answers"
        if {words for words, _ in cells} == {baselines.METRIC.replace("_", " ")}:
            title = "best shortcuts"
        tables += Table.build(title, cells).parts(first_count)
    return tables


# Predictions in a report: counts by family, frequent mistakes, and random samples.

OUTCOMES = ("wrong", "partly correct", "correct", "unlabelled")


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
        if correct >= 1:
            return "correct"
        if correct > 0:
            return "partly correct"
        return "wrong"

    @property
    def phrases(self) -> str:
        """The phrases of the text, their scores and whether they are right; "" without phrases."""
        ends = {None: "", True: ", right", False: ", wrong"}
        texts = [f"{phrase.text} {phrase.score:.2f}{ends[phrase.correct]}" for phrase in self.prediction.grounded]
        return "; ".join(texts)

    @property
    def families(self) -> list[str]:
        """`ALL`, then "relation" and "relation/nearest" of a text of that family."""
        group = self.summary.group.replace("_", " ")
        if not group:
            return [ALL]
        return [ALL, *itertools.accumulate(group.split("/"), "{}/{}".format)]


def describe(predictions: Iterable[Prediction], task: Task) -> list[DescribedPrediction]:
    """Describe predictions; texts with phrases only are left out."""
    return [DescribedPrediction(prediction, task.describe(prediction)) for prediction in with_target(predictions)]


def count_outcomes(described: Mapping[str, Sequence[DescribedPrediction]]) -> Cells:
    """Count texts, and answers that are not correct, by family.

    Args:
        described: box source -> predictions.
    """
    counts: dict[tuple[str, str], Counter[str]] = {}
    for source, predictions in described.items():
        for entry in predictions:
            for heading in _headings_of(entry):
                counts.setdefault((heading, source), Counter()).update(entry.families)

    def order_of(column: tuple[str, str]) -> int:
        heading, _ = column
        headings = ("texts", *OUTCOMES)
        if heading in headings:
            return headings.index(heading)
        return len(headings)  # others come after them, in the order of their first texts

    cells = Cells()
    for heading, source in sorted(counts, key=order_of):
        families = sorted(counts["texts", source])
        cells[heading, source] = {family: counts[heading, source][family] for family in families}
    return cells


def _headings_of(described: DescribedPrediction) -> list[str]:
    """Return the headings of the columns that count a prediction."""
    headings = ["texts"]
    is_wrong = described.outcome == "wrong"
    if described.outcome != "correct":
        headings.append(described.outcome)
    # the first phrase usually refers to the answer itself, and others to the landmark of a relation
    other_phrases = described.prediction.grounded[1:]
    judgements = [phrase.correct for phrase in other_phrases if phrase.correct is not None]
    if is_wrong and judgements and all(judgements):
        headings.append("wrong, other phrases right")
    if described.prediction.is_unsure:
        headings.append("unsure")
        if is_wrong:
            headings.append("wrong, unsure")
    return headings


def count_mistakes(described: Mapping[str, Sequence[DescribedPrediction]]) -> Cells:
    """Count the most frequent pairs of a ground truth and a wrong answer by the number of images of each."""
    counts: dict[str, Counter[str]] = {}
    for source, predictions in described.items():
        mistakes: dict[tuple[str, str, str | None], None] = {}  # each pair once per image, in order
        for entry in predictions:
            if entry.outcome not in ("wrong", "partly correct"):
                continue
            summary = entry.summary
            pairs = summary.mistakes
            if pairs is None:  # the answer has no parts
                pairs = []
                if entry.outcome == "wrong":
                    pairs.append((summary.truth, summary.answer))
            for truth, answer in pairs:
                mistakes[truth, answer, entry.prediction.file_name] = None
        counts[source] = Counter(f"{truth} → {answer}" for truth, answer, _ in mistakes if truth)
    frequent = []
    for row, _ in sum(counts.values(), Counter()).most_common(MAX_MISTAKES):
        if any(numbers[row] > 1 for numbers in counts.values()):
            frequent.append(row)
    cells = Cells()
    if frequent:
        for source, numbers in counts.items():
            cells["images", source] = {row: numbers[row] for row in frequent}
    return cells


class PredictionSample(NamedTuple):
    """A random sample of the `total` predictions with an outcome."""

    boxes: str
    outcome: str
    total: int
    shown: list[DescribedPrediction]


def draw_samples(
    described: Mapping[str, Sequence[DescribedPrediction]], number: int, generator: np.random.Generator
) -> list[PredictionSample]:
    """Draw at most `number` predictions of each outcome and box source, spread evenly over families, wrong ones first.

    Families take turns, and the one with the most predictions of the outcome comes first.
    """
    samples = []
    for outcome, (boxes, predictions) in itertools.product(OUTCOMES, reversed(described.items())):
        members = [entry for entry in predictions if entry.outcome == outcome]
        totals = Counter(entry.summary.group for entry in members)
        turns: Counter[str] = Counter()
        drawn = []  # (turn of its family, minus the size of its family, prediction)
        for row in generator.permutation(len(members)):
            group = members[row].summary.group
            drawn.append((turns[group], -totals[group], members[row]))
            turns[group] += 1
        drawn.sort(key=lambda turn_and_size: turn_and_size[:2])
        shown = [entry for _, _, entry in drawn[:number]]
        if members:
            samples.append(PredictionSample(boxes, outcome, len(members), shown))
    return samples


# The page.

TEMPLATES = [Path(__file__).parent, Path(__file__).parents[1] / "analysis"]
MAX_PICTURE_AREA = 640 * 480  # pixels; a limit on the sides would make labels of thin pictures illegible
WIDE = 2.0  # aspect ratio above which a picture takes a whole row
OPEN_CARDS = 3  # a row of pictures; the others are folded


def write_report(run_dir: Path, config: RunConfig, task: Task) -> Path:
    """Write `report.html` into a run directory.

    Args:
        run_dir: contains `metrics.json`, `config.yaml`, and optionally `log.jsonl` and `predictions_*.json`.
        config: the run's config; `eval.report_pictures` limits the samples of each outcome.
        task: describes and draws the predictions; see `Task.describe` and `Task.draw`.

    Returns:
        The path of the report.
    """
    summary = read_json(run_dir / "metrics.json", dict[str, Any])
    metrics = metrics_from_json(summary)
    curves = draw_curves(read_log(run_dir / "log.jsonl"))
    generator = np.random.default_rng(config.seed)
    best = summary.get("best") or {}
    best_metrics = metrics_from_json(best.get("metrics", {}))
    sections = []
    for split in config.data.eval_splits:
        described = {}
        for boxes in config.eval.boxes:
            path = run_dir / f"predictions_{file_name(split)}_{boxes}.json"
            if path.is_file():
                words = boxes.metric_suffix.replace("_", " ")
                predictions = with_target(read_predictions(path, task.prediction_class))
                mark_unsure(task, predictions, find_sure_threshold(metrics, config.data.eval_splits, boxes))
                described[words] = describe(predictions, task)
        outcomes: dict[int, dict[str, str]] = {}  # index of a text -> box source -> outcome
        for boxes, predictions in described.items():
            for entry in predictions:
                outcomes.setdefault(entry.prediction.text_index, {})[boxes] = entry.outcome
        mistakes = []
        mistake_cells = count_mistakes(described)
        if mistake_cells:
            mistakes.append(Table.build("most frequent mistakes: truth → answer", mistake_cells))
        sections.append(
            {
                "split": split,
                "tables": build_tables(metrics, split, count_outcomes(described)),
                "best": build_tables(best_metrics, split),
                "mistakes": mistakes,
                "samples": draw_samples(described, config.eval.report_pictures, generator),
                "outcomes": outcomes,
            }
        )
    command = typed_command("--config")
    if command is None:
        command = shlex.join(["e2e-vl", "train", "--config", str(run_dir / "config.yaml")])
    task_title = (sys.modules[type(task).__module__].__doc__ or config.task.name).splitlines()[0].rstrip(".")
    # statistics of the run itself, such as `steps`; the best model has its own section
    numbers = {}
    for name, value in summary.items():
        if name != "best" and MetricName.read(name) is None:
            numbers[name] = value
    return render(
        run_dir / "report.html",
        "page.html.jinja",
        title=run_dir.resolve().name,
        task=task_title,
        data=config.data,
        date=datetime.datetime.fromtimestamp((run_dir / "metrics.json").stat().st_mtime),
        command=command,
        numbers=numbers,
        best=best,
        sections=sections,
        open_cards=OPEN_CARDS,
        draw=functools.partial(draw_prediction, task),
        curves=None if curves is None else data_uri(curves, "png"),
        changed=list_changed_settings(config),
        settings=read_text(run_dir / "config.yaml"),
    )


def typed_command(option: str) -> str | None:
    """Return the command that started Python; None if it does not have the option, as in a notebook."""
    program, *words = sys.argv
    if not any(word.startswith(option) for word in words):
        return None
    if Path(program).name in ("e2e-vl", "__main__.py"):
        program = "e2e-vl"
    return shlex.join([program, *words])


def render(path: Path, template: str, **values: Any) -> Path:
    """Write a page from one of the templates of `TEMPLATES`."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": _format_number}
    write_text(path, environment.get_template(template).render(values))
    return path


class Picture(NamedTuple):
    """The picture of a prediction on the page."""

    uri: str = ""  # "" without a picture
    is_wide: bool = False  # it takes a whole row
    problem: str = ""  # why there is no picture; "" if there is one, or nothing to draw


def draw_prediction(task: Task, prediction: Prediction) -> Picture:
    """Draw a prediction, or say why it cannot be drawn."""
    try:
        drawn = task.draw(prediction)
    except (OSError, ValueError) as error:  # the image is in an archive, or was moved since
        return Picture(problem=str(error))
    if drawn is None:
        return Picture()
    return encode_picture(drawn)


def encode_picture(drawn: UInt8[np.ndarray, "height width 3"]) -> Picture:
    """Encode an RGB picture, in the size of the page."""
    buffer = io.BytesIO()
    image = Image.fromarray(drawn)
    factor = min((MAX_PICTURE_AREA / (image.width * image.height)) ** 0.5, 1)
    size = (max(round(image.width * factor), 1), max(round(image.height * factor), 1))
    image.resize(size).save(buffer, "JPEG", quality=85)
    return Picture(data_uri(buffer.getvalue(), "jpeg"), is_wide=image.width > WIDE * image.height)


def data_uri(content: bytes, kind: str) -> str:
    """Return the content of a PNG or JPEG file as an address within the page."""
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def _format_number(value: Any) -> str:
    """Write a number: whole and large ones without decimals, others with three decimals or digits; None as a dash."""
    if value is None:
        return "–"
    if not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or abs(value) >= 1000 or (value.is_integer() and abs(value) > 1):
        return f"{value:,.0f}"
    if abs(value) >= 0.001 or value == 0:
        return f"{value:.3f}"
    return f"{value:.3g}"
