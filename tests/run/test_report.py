"""`report.html`: curves, changed settings, tables of metrics, samples of predictions, and the page itself."""

from __future__ import annotations

import base64
import re
import tomllib
from collections import Counter
from html import unescape
from pathlib import Path

import cv2
import msgspec
import numpy as np
import pytest
from matplotlib.axes import Axes

from detector.io import write_json
from e2e_vl.cli.main import main
from e2e_vl.config import BoxSource, EvalConfig, RunConfig, TaskConfig
from e2e_vl.config_files import load_config, save_config
from e2e_vl.io import RunLog
from e2e_vl.predictions import GroundedPhrase, Prediction
from e2e_vl.registry import TASKS, Config, Entry
from e2e_vl.run import report as reports
from e2e_vl.run.metric_names import name_metrics
from e2e_vl.run.report import (
    Table,
    build_tables,
    count_mistakes,
    count_outcomes,
    describe,
    draw_curves,
    draw_samples,
    list_changed_settings,
    typed_command,
    write_report,
)
from e2e_vl.tasks.base import PredictionSummary
from tests.run.runs import ROOT, predictions_of


class Guess(Prediction, kw_only=True):
    """What the task of these tests predicts."""

    said: str = "blue"
    truth: str = ""
    mistakes: tuple[tuple[str, str], ...] | None = None
    has_picture: bool = True
    size: tuple[int, int] = (600, 900)


class FakeTask:
    """Draws a large dark red picture of every prediction."""

    prediction_class = Guess

    def draw(self, prediction: Guess) -> np.ndarray | None:
        if prediction.file_name == "lost":
            raise FileNotFoundError("Image lost does not exist.")
        return np.full((*prediction.size, 3), (200, 30, 10), np.uint8) if prediction.has_picture else None

    def describe(self, prediction: Guess) -> PredictionSummary:
        words = (prediction.text, prediction.said, 0.256, prediction.truth)
        return PredictionSummary(*words, group=prediction.family or "", mistakes=prediction.mistakes)

    def certainty(self, prediction: Guess) -> float:
        return 0.256


# Curves


def train_line(step: int, **values) -> dict:
    return {"step": step, "kind": "train", "epoch": 0.1 * step, "grad_norm": 9.0, "lr_head": 1.0, **values}


@pytest.fixture
def plots(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[str, dict[str, tuple[list, list]]]]:
    """Title -> (scale of the y axis, points of each line by its label), filled as plots are drawn."""
    found = {}
    draw = reports._plot

    def spy(axes: Axes, title: str, series: reports.Series) -> None:
        draw(axes, title, series)
        lines = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}
        found[title] = (axes.get_yscale(), lines)

    monkeypatch.setattr(reports, "_plot", spy)
    return found


def test_losses_are_grouped_and_their_sum_is_apart(plots):
    evaluation = {"step": 2, "kind": "eval", "val/accuracy_gt_boxes": 0.5, "val/count_gt_boxes": 40.0}
    lines = [
        train_line(1, loss=3.0, loss_cls=1.0, vqa=2.0),
        train_line(2, loss=2.0, loss_cls=0.5, vqa=0.0),
        train_line(3, vqa=None, not_finite=["vqa"], skipped_steps=0.5),
        evaluation | {"val/AP_predicted_boxes": None},
        evaluation | {"val/accuracy_gt_boxes": 0.25, "val/accuracy_gt_boxes/relation": 0.1},
        {"step": 3, "kind": "final", "val/accuracy_gt_boxes": 0.75},
    ]
    picture = cv2.imdecode(np.frombuffer(draw_curves(lines), np.uint8), 1)
    assert picture.shape[1] > 1000 and picture.std() > 5
    assert {title: points for title, (_, points) in plots.items()} == {
        reports.EVALUATION: {"val: accuracy, gt boxes": ([2, 3], [0.25, 0.75])},  # the last one of a step counts
        "weighted sum of all losses": {"loss": ([1, 2], [3.0, 2.0])},
        "losses of the task": {"vqa": ([1, 2], [2.0, 0.0])},
        "losses of the detector (not weighted)": {"loss_cls": ([1, 2], [1.0, 0.5])},
        "learning rate": {"head": ([1, 2, 3], [1.0, 1.0, 1.0])},
    }


def test_losses_of_evaluations_have_axes_of_their_own(plots):
    """They would press accuracies flat, or lie outside of their axes."""
    evaluations = [
        {"step": step, "kind": "eval", "val/accuracy_gt_boxes": 0.1 * step, "val/loss_gt_boxes": loss}
        for step, loss in ((1, 40.0), (2, 2.0))
    ]
    draw_curves(evaluations)
    assert plots == {
        reports.EVALUATION: ("linear", {"val: accuracy, gt boxes": ([1, 2], [0.1, 0.2])}),
        "loss of the evaluation": ("log", {"val: loss, gt boxes": ([1, 2], [40.0, 2.0])}),
    }
    assert draw_curves(evaluations[:0]) is None, "no values, no picture"


def test_a_schedule_is_drawn_before_the_run(plots, tmp_path):
    """Equal curves are one."""
    run = ["train", "--config", str(ROOT / "configs" / "pretraining" / "lxmert_paper.yaml"), "data.root=DATA"]
    picture = tmp_path / "schedule.png"
    assert main([*run, "--draw-schedule", str(picture)]) == 2, "epochs have no steps without data"
    assert main([*run, "--draw-schedule", str(picture), "train.max_steps=200"]) == 0
    assert cv2.imread(str(picture)).std() > 5
    curves = {title: [" ".join(line.split()) for line in lines] for title, (_, lines) in plots.items()}
    assert curves == {
        "learning rate": ["detector, encoder, head"],
        "weight of objectives": ["image_qa", "masked_words, object_labels, region_features, relationship"],
    }
    assert plots["weight of objectives"][1]["image_qa"] == (list(range(200)), [0.0] * 100 + [2.0] * 100)


# Tables


def test_metrics_of_a_split_become_tables_with_box_sources_side_by_side():
    """Whatever their names are; columns with other families are a table of their own, equal columns are one."""
    metrics = {
        **name_metrics({"count": 5.0, "n_acc": 0.8, "n_acc/relation": 0.5, "giou": 0.2}, "val", BoxSource.GT),
        **name_metrics({"n_acc": 0.7, "count": 5.0, "n_acc/in_front": None}, "val", BoxSource.ONLINE),
        **name_metrics({"n_acc": 0.1, "best_shortcut/how many": 0.25}, "testA", BoxSource.GT),
        **name_metrics({"n_acc": 0.1, "best_shortcut/how many": 0.25}, "testA", BoxSource.ONLINE),
    }
    both = ["gt boxes", "predicted boxes"]
    texts = {("texts", ""): {"all": 5, "relation": 5}}
    assert build_tables(metrics, "val", texts) == [
        Table("overall", [("", both)], {"n acc": [0.8, 0.7], "giou": [0.2, None], "count": [5.0, 5.0]}),
        Table(*("by kind", [("n acc", ["gt boxes"]), ("texts", [""])]), {"all": [0.8, 5], "relation": [0.5, 5]}),
        Table("by kind", [("n acc", ["predicted boxes"])], {"all": [0.7], "in front": [None]}),
    ]
    assert build_tables(metrics, "testA") == [
        Table("overall", [("", [""])], {"n acc": [0.1]}),
        Table("best shortcuts", [("best shortcut", [""])], {"how many": [0.25]}),
    ]


def test_a_wide_table_is_divided_where_its_counts_begin():
    sources = ["gt boxes", "detected boxes", "predicted boxes"]
    headings = [("accuracy", sources), ("ceiling", sources), ("texts", [""]), ("wrong", sources), ("unsure", sources)]
    table = Table("by kind", [*headings, ("other", sources)], {"all": list(range(16))})
    assert list(table.parts("texts")) == [
        Table("by kind", headings[:2], {"all": [0, 1, 2, 3, 4, 5]}),
        Table("by kind, continued", headings[2:], {"all": [6, 7, 8, 9, 10, 11, 12]}),
        Table("by kind, continued", [("other", sources)], {"all": [13, 14, 15]}),
    ]
    narrow = Table("by kind", [headings[0], headings[2]], {"all": [0, 1, 2, 3]})
    assert list(narrow.parts("texts")) == [narrow]


# Counts and samples of predictions


def guesses(outcomes: dict[str, list[float | None]]) -> list[Guess]:
    return [
        Guess(text=f"{group} {number}", family=group, correct=correct, file_name=f"{group} {number}")
        for group, values in outcomes.items()
        for number, correct in enumerate(values)
    ]


def described(**sources: list[Guess]) -> dict[str, list[reports.DescribedPrediction]]:
    return {name: describe(found, FakeTask()) for name, found in sources.items()}


def test_answers_are_counted_by_family_and_outcome():
    found = described(gt=guesses({"b/c_d": [0.0, 1.0, 0.3], "a": [None, 1.0]}), online=guesses({"b/e": [0.0]}))
    assert count_outcomes(found) == {
        ("texts", "gt"): {"a": 2, "all": 5, "b": 3, "b/c d": 3},
        ("texts", "online"): {"all": 1, "b": 1, "b/e": 1},
        ("wrong", "gt"): {"a": 0, "all": 1, "b": 1, "b/c d": 1},
        ("wrong", "online"): {"all": 1, "b": 1, "b/e": 1},
        ("partly correct", "gt"): {"a": 0, "all": 1, "b": 1, "b/c d": 1},
        ("unlabelled", "gt"): {"a": 1, "all": 1, "b": 0, "b/c d": 0},
    }


def test_frequent_mistakes_are_those_of_several_images():
    pairs = [
        *(("red", "blue", str(number)) for number in range(3)),
        *(("one", "two", "the same") for _ in range(9)),
        *(("yes", "no", str(number)) for number in range(2)),
    ]
    data = [Guess(correct=0.0, truth=truth, said=said, file_name=file) for truth, said, file in pairs]
    pair = ("red", "blue")
    several = [(0.5, (pair, ("one", "two"))), (0.0, (pair, pair)), (1.0, (pair,)), (0.0, ())]  # a right one has none
    other = [Guess(correct=c, mistakes=m, file_name=str(n), truth="all") for n, (c, m) in enumerate(several)]
    assert count_mistakes(described(gt=data, online=other)) == {
        ("images", "gt"): {"red → blue": 3, "yes → no": 2},
        ("images", "online"): {"red → blue": 2, "yes → no": 0},
    }
    assert count_mistakes(described(gt=other[:1])) == {}


def sample(data: list[Guess], number: int, seed: int = 0) -> list[reports.Sample]:
    return draw_samples(described(gt=data), number, np.random.default_rng(seed))


def test_families_take_turns_and_the_one_with_the_most_errors_comes_first():
    data = guesses({"few": [0.0] * 2, "none": [1.0], "many": [0.0] * 50, "some": [0.0] * 9})

    def shown(number: int) -> dict[str, int]:
        wrong, correct = sample(data, number)
        assert (wrong.outcome, wrong.total, correct.outcome, correct.total) == ("wrong", 61, "correct", 1)
        return dict(Counter(one.summary.group for one in wrong.shown))

    assert shown(8) == {"many": 3, "some": 3, "few": 2} and list(shown(8)) == ["many", "some", "few"]
    assert shown(1) == {"many": 1} and shown(100) == {"many": 50, "some": 9, "few": 2} and shown(0) == {}


def test_samples_are_drawn_by_the_seed_from_all_predictions():
    data = guesses({"": [1.0] * 40 + [0.0] * 40})
    drawn = [{one.summary.question for one in sample(data, 10, seed)[1].shown} for seed in range(100)]
    assert drawn[0] == {one.summary.question for one in sample(data, 10)[1].shown} != drawn[1]
    assert len(drawn[0]) == 10 and len(set().union(*drawn)) == 40


def phrases(*correct: bool | None) -> tuple[GroundedPhrase, ...]:
    """Phrases of a prediction; None: the right box is unknown."""
    return tuple(GroundedPhrase("a star", (0, 6), (9.6, 20.2, 30.0, 40.4), 0.25, one) for one in correct)


def test_wrong_relations_are_counted_by_whether_the_landmark_was_right():
    def wrong(*correct: bool | None, **changes) -> Guess:
        return Guess(**{"family": "relation", "correct": 0.0, "grounded": phrases(*correct), **changes})

    data = [
        *(wrong(False, True), wrong(True, False), wrong(False, None)),
        *(wrong(True), wrong()),  # without a second phrase
        *(wrong(False, True, False), wrong(False, None, True)),  # all that have a label must be right
        *(wrong(True, True, correct=1.0), wrong(True, True, correct=0.5), wrong(True, True, correct=None)),
        wrong(True, False, family="attribute"),
    ]
    counts = count_outcomes(described(gt=data))
    assert counts["wrong, other phrases right", "gt"] == {"all": 2, "attribute": 0, "relation": 2}


# The page


def images_of(page: str) -> list[np.ndarray]:
    found = re.findall(r"data:image/\w+;base64,([^\"]+)", page)
    return [cv2.imdecode(np.frombuffer(base64.b64decode(one), np.uint8), 1) for one in found]


def text_of(page: str) -> str:
    body = page.partition("<body>")[2]
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", body)).split())


def settings(run: Path, **evaluation) -> RunConfig:
    config = load_config(ROOT / "configs" / "tiny" / "refcoco.yaml", [f"output={run}"])
    return msgspec.structs.replace(config, eval=EvalConfig(**evaluation))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with nothing but what the report reads."""
    save_config(settings(tmp_path), tmp_path / "config.yaml")
    write_json(tmp_path / "metrics.json", {"val/accuracy_gt_boxes": 0.5, "val/none": None, "parameters": {"task": 3}})
    return tmp_path


def guess(text: str = "x", correct: float | None = 1.0, **changes) -> Guess:
    return Guess(text=text, correct=correct, **changes)


def report(run: Path, *predictions: Guess, number: int = 12) -> str:
    write_json(run / "predictions_val_gt.json", msgspec.to_builtins(predictions))
    return write_report(run, settings(run, report_pictures=number), FakeTask()).read_text(encoding="utf-8")


def test_the_report_of_a_run_is_one_self_contained_page(trained_run):
    page = (trained_run.path / "report.html").read_text(encoding="utf-8")
    assert "http" not in page
    assert not re.search(r'<(script|link|iframe)|src="(?!data:)|url\(', page)
    *pictures, curves = images_of(page)
    assert curves.shape[1] > 800 and curves.std() > 5
    assert len(pictures) == page.count("<figcaption>")
    words, counts = text_of(page), []
    assert "RefCOCOg, gRefCOCO): which region does an expression refer to, if any?" in words
    assert words.index("command") < words.index("settings differ") < words.index("overall")
    for boxes, name in (("gt", "gt boxes"), ("detections", "detected boxes"), ("online", "predicted boxes")):
        records = predictions_of(trained_run.path, f"val_{boxes}")
        wrong = sum(record["correct"] == 0 for record in records)
        counts.append(f"{wrong:,}")
        assert re.search(rf"Wrong with {name}: \d+ of {wrong}\b", words) or not wrong
        assert f"{trained_run.metrics['val/accuracy_' + name.replace(' ', '_')]:.3f} with {name}" in words
    assert f" {len(records):,} {' '.join(counts)} " in words, "texts, and wrong answers with each source"
    assert "task.config.loss: binary -> softmax" in words


class RequiredConfig(Config, frozen=True):
    """The settings of a task, one of which has no default."""

    margin: float
    dropout: float = 0.1


def test_a_setting_without_a_default_always_counts_as_changed(tmp_path, monkeypatch):
    monkeypatch.setitem(TASKS, "margin", Entry(RequiredConfig, FakeTask))
    config = msgspec.structs.replace(settings(tmp_path), task=TaskConfig("margin", {"margin": 0.5}))
    changed = [line for line in list_changed_settings(config) if line.startswith("task")]
    assert changed == ["task.config.margin: None -> 0.5"]


def test_texts_are_escaped(run):
    (run / "config.yaml").write_text("output: <b>\n")
    page = report(run, guess(text="a <b>bold</b> & 'quoted' cup", correct=0.0, truth="<i>", family="<u>"))
    assert not re.search(r"<[iu]>|<b>bold", page)
    assert "a &lt;b&gt;bold&lt;/b&gt; &amp; &#39;quoted&#39; cup" in page
    assert "ground truth: <i> <u>" in text_of(page)


def test_errors_come_first_and_only_some_are_shown(run):
    wrong = guess(text="bad", correct=0.0, truth="red", family="colours")
    words = text_of(report(run, guess(text="fine"), wrong, guess(correct=None)))
    assert "Wrong with gt boxes: 1 of 1 bad wrong: blue (0.26) ground truth: red colours" in words
    assert words.index("Wrong with") < words.index("Correct with") < words.index("Unlabelled with")
    assert "texts wrong unlabelled all 3 1 1 colours 1 1 0" in words

    assert "unsure" not in words, "the run has no threshold"
    write_json(run / "metrics.json", {"val/sure_threshold_gt_boxes": 0.3})
    words = text_of(report(run, guess(text="fine"), wrong))
    assert "bad wrong: blue (0.26), unsure ground truth: red" in words
    assert "texts wrong unsure wrong, unsure all 2 1 2 1 colours 1 1 1 1" in words

    page = report(run, *[guess()] * 3, *[guess(correct=0.0)] * 5, *[guess(correct=0.5)] * 2, number=2)
    assert page.count("<figure>") == 6
    for heading in ("Wrong with gt boxes: 2 of 5, drawn", "Partly correct with gt boxes: 2 of 2 x", "Correct with"):
        assert heading in text_of(page)
    page = report(run, *[guess(correct=0.0)] * 9)
    assert page.partition("6 more</summary>")[2].count("<figure>") == 6, "a row is open, the others are folded"
    assert "<figure>" not in report(run, guess(), number=0)


def test_phrases_say_whether_they_are_right_and_sources_whether_the_answer_is(run):
    config = settings(run, boxes=[BoxSource.GT, BoxSource.ONLINE])
    for boxes, correct in (("gt", 1.0), ("online", 0.0)):
        one = guess(text_index=3, correct=correct, grounded=phrases(True, False, None))
        write_json(run / f"predictions_val_{boxes}.json", msgspec.to_builtins([one]))
    words = text_of(write_report(run, config, FakeTask()).read_text(encoding="utf-8"))
    assert "Wrong with predicted boxes: 1 of 1 A phrase is right if its region overlaps" in words
    assert words.count("phrases: a star 0.25, right; a star 0.25, wrong; a star 0.25 ") == 2
    assert words.count("gt boxes: correct; predicted boxes: wrong") == 2


def test_the_command_is_the_one_that_was_typed(monkeypatch):
    typed = ["/bin/e2e-vl", "train", "--config", "a b.yaml"]
    monkeypatch.setattr("sys.argv", typed)
    assert typed_command("--config") == "e2e-vl train --config 'a b.yaml'" and typed_command("--run") is None
    monkeypatch.setattr("sys.argv", ["tools/train.py", "--config=x"])
    assert typed_command("--config") == "tools/train.py --config=x"


def test_a_run_without_evaluations_or_losses_has_a_report(run):
    RunLog(run / "log.jsonl", enabled=True).write(1, "eval", {"val/accuracy_gt_boxes": None})
    page = write_report(run, settings(run), FakeTask()).read_text(encoding="utf-8")
    assert images_of(page) == [] and "Curves" not in page and "overall gt boxes accuracy 0.500" in text_of(page)


def test_pictures_are_small_keep_their_colours_and_may_be_wide_or_missing(run):
    own = {"size": (200, 1500)}, {"file_name": "lost"}, {"text": "no image", "has_picture": False}
    page = report(run, guess(), *(guess(**changes) for changes in own))
    assert page.count('<figure class="wide">') == 1 and page.count("<figure>") == 3
    [picture] = [one for one in images_of(page) if one.shape[1] < 2 * one.shape[0]]
    assert picture.shape[0] * picture.shape[1] == pytest.approx(reports.MAX_PICTURE_AREA, rel=0.01)
    assert np.abs(picture.astype(int) - (10, 30, 200)).max() < 8  # OpenCV reads BGR
    [wide] = [one for one in images_of(page) if one.shape[1] > 2 * one.shape[0]]
    assert wide.shape[1] > 1000  # labels would be illegible in a small one
    assert "No picture: Image lost does not exist." in text_of(page) and page.count("No picture") == 1


def test_an_installed_package_has_the_template():
    """setuptools copies no file that is not Python, unless the settings name it."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    copied = {
        path
        for package, patterns in settings["package-data"].items()
        for pattern in patterns
        for path in (ROOT / package.replace(".", "/")).glob(pattern)
    }
    own = {path for folder in ("detector", "e2e_vl") for path in (ROOT / folder).rglob("*") if path.is_file()}
    apart = {ROOT / "e2e_vl" / name for name in ("configs", "demo")}  # the tests of the wheel use them
    own, copied = ({path for path in found if not apart & {*path.parents}} for found in (own, copied))
    assert {path for path in own if path.suffix not in (".py", ".pyc")} == copied
