"""The pages that a run and an analysis write, in a real browser: nothing is cut off, whatever the window."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from detector.io import write_json
from e2e_vl.analysis.collect import CONFIDENCE, ENTITIES, LARGEST, RELATIONS, MeasureKey
from e2e_vl.analysis.measures import HeadSums
from e2e_vl.analysis.options import AnalysisConfig
from e2e_vl.analysis.results import AnalysisResults, Overlay, draw_head_figure
from e2e_vl.analysis.run import write_page
from e2e_vl.config import BoxSource, DataConfig, EncoderConfig, EvalConfig, RunConfig, TaskConfig
from e2e_vl.config_files import save_config
from e2e_vl.io import RunLog
from e2e_vl.metrics.refcoco import ReferringPrediction
from e2e_vl.predictions import GroundedPhrase, write_list
from e2e_vl.run.report import write_report
from e2e_vl.structures import AttentionGraph
from e2e_vl.tasks.refcoco import ReferringTask
from tests.explorer.browser import Tab, browser_or_skip, open_browser

# pixels, as of a large screen, of half a screen and of a telephone
WINDOWS = {"wide": (1600, 900), "half": (800, 900), "narrow": (360, 740)}
# Elements with words or pictures of their own that are not wholly in the window, unless they lie in a part that can be
# scrolled and is itself in the window, and boxes whose content is wider than they are and cannot be scrolled.
CUT = """
(() => {
    const scrolls = one => ["auto", "scroll"].includes(getComputedStyle(one).overflowX);
    const outside = one => (r => r.left < -1 || r.right > window.innerWidth + 1)(one.getBoundingClientRect());
    const inScrolled = one => {
        for (let above = one.parentElement; above; above = above.parentElement)
            if (scrolls(above)) return !outside(above);
        return false;
    };
    const own = one => one.tagName === "IMG"
        || [...one.childNodes].some(node => node.nodeType === Node.TEXT_NODE && node.textContent.trim());
    return [...document.body.querySelectorAll("*")].filter(one => {
        if (!own(one) || !one.getClientRects().length) return false;
        if (outside(one) && !inScrolled(one)) return true;
        return one.clientWidth && one.scrollWidth > one.clientWidth + 1 && !scrolls(one) && !inScrolled(one);
    }).map(one => one.outerHTML.slice(0, 200));
})()
"""

# tables that are wider than the part that scrolls them
SCROLLED = """
[...document.querySelectorAll("table")]
    .filter(table => table.parentElement.scrollWidth > table.parentElement.clientWidth + 1)
    .map(table => [table.innerText.slice(0, 200), table.scrollWidth])
"""


@pytest.fixture(scope="module")
def tab(tmp_path_factory) -> Iterator[Tab]:
    with open_browser(browser_or_skip(), tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    """The report of a run with images of any shape, long words, all outcomes, and wrong relations."""
    folder = tmp_path_factory.mktemp("run_with_a_long_name_" + 8 * "and_no_space")
    records = []
    for number, (height, width) in enumerate([(900, 60), (60, 900), (30, 40), (1200, 1600)]):
        file = draw(folder / f"image{number}.png", (height, width))
        box, other = (0, 0, width / 2, height / 2), (width / 2, height / 2, width, height)
        phrases = (
            GroundedPhrase("an elephant", (0, 11), box, 0.9, correct=False),
            GroundedPhrase("the otorhinolaryngologists", (17, 43), other, 0.3, correct=bool(number % 2)),
        )
        record = {"file_name": str(file), "text": "an elephant near the " + "otorhinolaryngologists" * 3}
        record |= {"box": box, "gt_box": other, "score": 0.5, "grounded": phrases, "candidate_boxes": (box, other)}
        record |= {"image_size": (height, width), "category": "elephant", "detected_class": "a class with a long name"}
        for family, correct in (("relation", 0.0), ("attribute", 1.0)):
            records.append(ReferringPrediction(**record, family=family, correct=correct))
    parts = {"encoder": EncoderConfig("vl_bert"), "task": TaskConfig("refcoco")}
    parts |= {"data": DataConfig("refcoco", root="data"), "eval": EvalConfig(boxes=[BoxSource.ONLINE])}
    config = RunConfig(output=str(folder / ("a_folder" * 12)), **parts)
    save_config(config, folder / "config.yaml")
    write_list(folder / "predictions_val_online.json", records)
    metrics = {f"val/accuracy_{boxes}_boxes": 0.5 for boxes in ("gt", "detected", "predicted")}
    metrics |= {f"{name}/{family}": 0.25 for name in metrics for family in ("relation", "attribute", "superlative")}
    write_json(folder / "metrics.json", metrics | {"parameters": {"task": 3}, "seconds": 1.5})
    log = RunLog(folder / "log.jsonl", enabled=True)
    for step in range(1, 30):
        log.write(step, "train", {"loss": 1 / step, "referring": 1 / step})
    return write_report(folder, config, ReferringTask(8))


def draw(path: Path, size: tuple[int, int]) -> Path:
    cv2.imwrite(str(path), np.full(size, 120, np.uint8))
    return path


@pytest.fixture(scope="module")
def analysis(tmp_path_factory) -> Path:
    """The page of an analysis of two graphs with 12 layers and heads, many relations, and pictures of any shape."""
    folder = tmp_path_factory.mktemp("analysis")
    graphs = {"joint": AttentionGraph(tuple(range(12))), "cross": AttentionGraph((0, 1))}
    labels = ["amod", "nsubjpass", "prep_of_a_very_long_relation", "det", "pobj", "dobj"]
    generator = np.random.default_rng(0)
    sums = {}
    for graph, phrases in graphs.items():
        for key in (MeasureKey(graph, ENTITIES), *(MeasureKey(graph, RELATIONS, label) for label in ("all", *labels))):
            shape = (len(phrases.steps), 12)
            hits, attention = (torch.from_numpy(1000 * generator.random(shape)) for _ in range(2))
            chances = dict.fromkeys((LARGEST, CONFIDENCE, "chance"), 250.0)
            sums[key] = HeadSums(hits, attention, chances, 1000, 1000)
    names = "a_run_with_a_long_name" * 4, "visual_bert", "flickr30k", "val", "gt", "/parses" * 20 + ".conllu"
    counts = {"captions": 12345, "phrases that have no box": 7}
    results = AnalysisResults(*names, AnalysisConfig(), graphs, sums, counts, dict.fromkeys(graphs, labels), 1000)
    figures = {}
    for graph in graphs:
        figures[f"entities_{graph}.png"] = draw_head_figure(results, graph, ENTITIES)
        figures[f"relations_{graph}.png"] = draw_head_figure(results, graph, RELATIONS, labels)
    caption = "a caption with " + "honorificabilitudinitatibus" * 3
    title = f"“{'otorhinolaryngologists' * 3}”, joint:0-1"
    overlays = [
        Overlay(7, caption, "joint", title, "right", draw(folder / f"{number}.png", size))
        for number, size in enumerate([(1280, 160), (160, 1280), (480, 640)])
    ]
    missing = "/no_such_folder" * 9 + ".png is missing"
    overlays.append(Overlay(8, "another caption", "cross", "a word", "", None, missing))
    return write_page(folder / "attention.html", results, figures, overlays)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("name", ["report", "analysis"])
def test_every_picture_is_shown_and_nothing_is_cut_off(tab, request, name, window):
    page, (width, height) = request.getfixturevalue(name), WINDOWS[window]
    tab.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
    tab.go(page.as_uri())
    tab.wait(f"document.readyState === 'complete' && location.href === '{page.as_uri()}'")
    assert tab.run("window.innerWidth") == width
    images = "[...document.images]"
    assert tab.run(f"{images}.length") > 3
    tab.wait(f"{images}.every(one => one.complete && one.naturalWidth > 0)")
    assert name == "analysis" or window == "narrow" or tab.run("document.documentElement.scrollHeight") < 8000
    tab.run("document.querySelectorAll('details').forEach(one => one.open = true)")
    assert tab.run("document.documentElement.scrollWidth") <= width
    assert (found := tab.run(CUT)) == [], found
    if window != "narrow":
        scrolled = tab.run(SCROLLED)
        assert scrolled == [], scrolled
    assert not [one for one in tab.requests if one.startswith("http")], "a page loads nothing else"
    if name == "report":
        return
    # smaller ones could not be read, so that a narrow window scrolls them
    shown = tab.run("[...document.querySelectorAll('img.figure')].map(one => [one.width, one.naturalWidth])")
    assert shown and all(width >= min(450, natural) - 1 for width, natural in shown), shown
