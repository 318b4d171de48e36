"""The explorer's page: as a program asks its server, and as a visitor sees it in a real browser."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

import e2e_vl
from e2e_vl.explorer.session import Explorer
from tests.conftest import cpu_with_one_thread
from tests.explorer.browser import Tab, browser_or_skip, open_browser
from tests.run.runs import predictions_of

pytest.importorskip("gradio", reason='gradio is not installed; pip install "e2e-vl[explore]" lets this test run')

from e2e_vl.explorer.web_page import HIDE_REGION, build_page, serve

# rows of the values that an event returns to a program: without the session, which stays on the server
PROBLEM, ANSWER, ANSWER_AFTER, BOXES = range(4)
SHARPER = 20.0  # factor on the scores of regions before their softmax: the answer stays, and changes of its score grow


@pytest.fixture(scope="module")
def asked(trained_run) -> SimpleNamespace:
    """A `file`, its `size` (width, height), a `text`, the `box` that the evaluation found, and the `far`thest other."""
    record = predictions_of(trained_run.path, "val_online")[4]
    file, box = Path(record["file_name"]), record["box"]
    far = max(record["candidate_boxes"], key=lambda one: math.dist(middle(one), middle(box)))
    return SimpleNamespace(file=file, size=Image.open(file).size, text=record["text"], box=box, far=far)


def middle(box: list[float]) -> tuple[float, float]:
    return (box[0] + box[2]) / 2, (box[1] + box[3]) / 2


@pytest.fixture(scope="module")
def address(trained_run) -> Iterator[str]:
    """Of the page of a run."""
    model = e2e_vl.load(trained_run.path, device="cpu")
    with torch.no_grad():
        model.network.task.head.output.weight.mul_(SHARPER)
    with cpu_with_one_thread():
        page = build_page(Explorer(model), "A run")
        try:
            yield serve(page, host="127.0.0.1", port=None)
        finally:
            page.close()


def numbers(text: str) -> list[float]:
    """The coordinates of the first box of a list of boxes."""
    return [float(one) for one in text.partition("  (")[0].split(", ")]


def test_a_program_asks_hides_and_is_refused(address, asked, tmp_path):
    from gradio_client import Client, handle_file

    visitor = Client(address, verbose=False, analytics_enabled=False)
    assert "no photo yet" in visitor.predict(asked.text, api_name="/ask")[PROBLEM]["value"]
    visitor.predict(handle_file(asked.file), "", api_name="/photo")
    shown = visitor.predict(asked.text, api_name="/ask")
    assert numbers(shown[BOXES]) == pytest.approx(asked.box, abs=0.06)
    assert shown[ANSWER] and not shown[ANSWER_AFTER]
    hidden = visitor.predict([0, 1], api_name="/hide")
    assert hidden[ANSWER] == shown[ANSWER] and hidden[ANSWER_AFTER] not in ("", shown[ANSWER])
    other = Client(address, verbose=False, analytics_enabled=False)
    assert "no photo yet" in other.predict(asked.text, api_name="/ask")[PROBLEM]["value"], "visitors share nothing"
    (tmp_path / "damaged.png").write_bytes(asked.file.read_bytes()[:500])
    problem = visitor.predict(handle_file(tmp_path / "damaged.png"), "", api_name="/photo")[PROBLEM]
    assert "damaged" in problem["value"] and problem["visible"]


@pytest.fixture(scope="module")
def tab(tmp_path_factory) -> Iterator[Tab]:
    with open_browser(browser_or_skip(), tmp_path_factory.mktemp("browser")) as found:
        yield found


def value(name: str) -> str:
    """What a text of the page says, as an expression."""
    return f"document.querySelector('#{name} textarea, #{name} input').value"


def ask(tab: Tab, address: str, file: Path, text: str) -> None:
    """Open the page, drop a photo, write a text, ask, and wait for the answer."""
    tab.go(address)
    tab.wait("!!document.querySelector('#photo button') && !document.querySelector('#regions img')")
    tab.drop("document.querySelector('#photo button')", file)
    tab.wait("!!document.querySelector('#regions img')")
    tab.type("document.querySelector('#text textarea, #text input')", text)
    tab.click("document.querySelector('button#ask')")
    tab.wait(value("answer"))
    tab.wait("!!document.querySelector('#picture img')")


def test_a_visitor_drops_a_photo_asks_and_hides_a_region(tab, address, asked):
    ask(tab, address, asked.file, asked.text)
    answer = tab.run(value("answer"))
    box = numbers(tab.wait(value("boxes")))
    assert box == pytest.approx(asked.box, abs=0.06)

    tab.click("document.querySelectorAll('#words .token')[1]")
    assert tab.wait(value("item")).startswith("2: ")
    tab.wait("!!document.querySelector('#words .score-token')")

    tab.click(f"[...document.querySelectorAll('#click label')].find(one => one.innerText.includes('{HIDE_REGION}'))")
    # the picture is as large as the photo, or larger at the right and the bottom
    picture = "document.querySelector('#regions img')"
    wide, high = tab.run(f"[{picture}.naturalWidth, {picture}.naturalHeight]")
    scale = min(wide / asked.size[0], high / asked.size[1])
    answers = {answer}  # their scores have three decimals
    for one in (box, asked.far):
        before = tab.run(f"{picture}.src")
        x, y = middle(one)
        tab.click(picture, (x * scale / wide, y * scale / high))
        changed = tab.wait(value("answer-after"))
        assert tab.run(value("answer")) == answer
        assert tab.run(value("boxes-after")) and "region" in tab.run("document.querySelector('#hidden').innerText")
        answers.add(changed)
        tab.wait(f"{picture}.src != '{before}'")
        tab.click(picture, (x * scale / wide, y * scale / high))
        tab.wait(f"!{value('answer-after')}")
    assert len(answers) == 3, "each region that is hidden changes the answer in its way"

    hosts = {one.split("/")[2] for one in tab.requests if one.startswith("http")}
    assert hosts == {address.split("/")[2]}, "the page asks nobody else"
