"""The explorer's page: as a program asks its server, and as a visitor sees it in a real browser."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import requests
import torch
from PIL import Image

import e2e_vl
from e2e_vl.explorer.session import Explorer, Inspection, Session, read_image
from tests.conftest import cpu_with_one_thread
from tests.explorer.browser import Tab, browser_or_skip, open_browser
from tests.run.runs import predictions_of

pytest.importorskip("gradio", reason='gradio is not installed; pip install "e2e-vl[explore]" lets this test run')

from e2e_vl.explorer.web_page import build_page, serve

# rows of the values that an event returns to a program: without the session, which stays on the server
PROBLEM, ANSWER, ANSWER_AFTER, BOXES = range(4)
BOUNDS = "document.querySelector('#{} img').getBoundingClientRect()"  # of a picture on the page
# where the image of the regions lies on the page, however far it is scrolled
PLACE = f"(r => [r.x, r.y + window.scrollY, r.width, r.height])({BOUNDS.format('regions')})"
SHARPER = 20.0  # factor on the scores of regions before their softmax: the answer stays, and changes of its score grow


@pytest.fixture(scope="module")
def explorer(trained_run) -> Explorer:
    model = e2e_vl.load(trained_run.path, device="cpu")
    with torch.no_grad():
        model.network.task.head.output.weight.mul_(SHARPER)
    return Explorer(model)


@pytest.fixture(scope="module")
def asked(explorer, trained_run) -> SimpleNamespace:
    """A `file`, its `size` (width, height), a `text`, the `box` that the evaluation found, and the `far`thest other.

    Masking either box, or the regions 0 and 1, changes what the page says.
    """
    for record in predictions_of(trained_run.path, "val_online"):
        file, box = Path(record["file_name"]), record["box"]
        far = max(record["candidate_boxes"], key=lambda one: math.dist(middle(one), middle(box)))
        session = dataclasses.replace(explorer.ask(Session(read_image(file)), record["text"]), min_score=0.0)
        regions = [session.before.region_at(*middle(one), session.shown_regions) for one in (box, far)]
        masked = [explorer.mask(session, rows).after for rows in ([0, 1], regions[:1], regions[1:])]
        if answer_lines(session.before) not in map(answer_lines, masked):
            size = Image.open(file).size
            return SimpleNamespace(file=file, size=size, text=record["text"], box=box, far=far)
    raise AssertionError("masking changes no answer")


def middle(box: list[float]) -> tuple[float, float]:
    return (box[0] + box[2]) / 2, (box[1] + box[3]) / 2


@pytest.fixture(scope="module")
def address(explorer) -> Iterator[str]:
    """Of the page of a run."""
    with cpu_with_one_thread():
        page = build_page(explorer, "A run")
        try:
            yield serve(page, host="127.0.0.1", port=None)
        finally:
            page.close()


def numbers(text: str) -> list[float]:
    """The coordinates of the first box of a list of boxes."""
    return [float(one) for one in text.partition("  (")[0].split(", ")]


def test_a_program_asks_masks_and_is_refused(address, asked, tmp_path):
    from gradio_client import Client, handle_file

    visitor = Client(address, verbose=False, analytics_enabled=False)
    assert "no image yet" in visitor.predict(asked.text, api_name="/ask")[PROBLEM]["value"]
    visitor.predict(handle_file(asked.file), "", api_name="/image")
    shown = visitor.predict(asked.text, api_name="/ask")
    assert numbers(shown[BOXES]) == pytest.approx(asked.box, abs=0.06)
    assert shown[ANSWER] and not shown[ANSWER_AFTER]
    masked = visitor.predict([0, 1], api_name="/mask")
    assert masked[ANSWER] == shown[ANSWER] and masked[ANSWER_AFTER] not in ("", shown[ANSWER])
    (tmp_path / "boxes.json").write_text(json.dumps({"boxes": [asked.far], "names": ["a cup"]}))
    chosen = visitor.predict(handle_file(tmp_path / "boxes.json"), asked.text, api_name="/boxes")
    assert chosen[ANSWER].startswith("a cup, ") and numbers(chosen[BOXES]) == pytest.approx(asked.far, abs=1.01)
    (tmp_path / "boxes.json").write_text("[[1, 2]]")
    *refused, file = visitor.predict(handle_file(tmp_path / "boxes.json"), asked.text, api_name="/boxes")
    assert refused[PROBLEM]["value"].startswith("boxes.json: ") and not refused[ANSWER] and file is None
    other = Client(address, verbose=False, analytics_enabled=False)
    assert "no image yet" in other.predict(asked.text, api_name="/ask")[PROBLEM]["value"], "visitors share nothing"
    (tmp_path / "damaged.png").write_bytes(asked.file.read_bytes()[:500])
    problem = visitor.predict(handle_file(tmp_path / "damaged.png"), "", api_name="/image")[PROBLEM]
    assert "damaged" in problem["value"] and problem["visible"]


@pytest.mark.parametrize(("name", "status"), [("localhost", 200), ("127.0.0.1:80", 200), ("evil.example", 400)])
def test_other_names_than_those_of_this_machine_are_refused(address, name, status):
    """DNS rebinding: a web site whose name leads to this machine."""
    assert requests.get(address, headers={"Host": name}, timeout=20).status_code == status


@pytest.fixture(scope="module")
def tab(tmp_path_factory) -> Iterator[Tab]:
    with open_browser(browser_or_skip(), tmp_path_factory.mktemp("browser")) as found:
        yield found


def value(name: str) -> str:
    """What a text of the page says, as an expression."""
    return f"document.querySelector('#{name} textarea, #{name} input')?.value"


def answer_lines(found: Inspection) -> str:
    return "\n".join(found.sentences)


@pytest.mark.parametrize("width", [1400, 800])
def test_the_page_opens_with_an_answer_and_answers_the_example_that_is_clicked(tab, address, explorer, width):
    resize(tab, width)
    tab.go(address)
    for number in (0, 2):
        if number:
            tab.click(f"document.querySelectorAll('#examples button')[{number}]")
        file, text = explorer.examples[number]
        expected = answer_lines(explorer.ask(Session(read_image(file)), text).before)
        tab.wait(f"document.querySelector('#text textarea, #text input')?.value === {json.dumps(text)}")
        tab.wait(f"{value('answer')} === {json.dumps(expected)}")
    tab.run("window.scrollTo(0, 0)")
    photo, picture = (BOUNDS.format(name) for name in ("regions", "picture"))
    assert tab.run(f"{photo}.right <= {picture}.left && {picture}.right <= {width}"), "side by side"
    assert 0 < tab.run(f"Math.max({photo}.bottom, {picture}.bottom)") < 900, "above the fold"
    assert tab.run("document.documentElement.scrollWidth") <= width


def resize(tab: Tab, width: int) -> None:
    """Set the width of the window, pixels."""
    tab.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)


def ask(tab: Tab, address: str, file: Path, text: str) -> None:
    """Open the page, drop a photo without a text, write a text, and ask."""
    box = "document.querySelector('#text textarea, #text input')"
    tab.go(address)
    tab.wait(f"{box}?.value && {value('answer')}")
    tab.run(f"{box}.value = ''; {box}.dispatchEvent(new Event('input', {{bubbles: true}}))")
    tab.drop("document.querySelector('#image button')", file)
    tab.wait(f"{value('answer')} === '' && document.querySelector('#image').innerText.includes('{file.stem}')")
    tab.type(box, text)
    tab.click("document.querySelector('button#ask')")


def show_regions_from(tab: Tab, session: Session) -> None:
    """Set the slider of the detection score."""
    number = "document.querySelector('#min-score input[type=number]')"
    tab.run(f"{number}.value = '{session.min_score}'; {number}.dispatchEvent(new Event('input', {{bubbles: true}}))")
    hidden = len(session.before) - len(session.shown_regions)
    tab.wait(f"document.querySelector('#min-score').innerText.includes('{hidden} of {len(session.before)} regions')")


def test_several_phrases_have_their_answers_side_by_side(tab, address, explorer, asked):
    phrases = [asked.text, "a star"]
    ask(tab, address, asked.file, "; ".join(phrases))
    session = explorer.ask(Session(read_image(asked.file)), "; ".join(phrases))
    captions = [f"{inspection.answer.question}: {inspection.sentences[0]}" for inspection in session.asked]
    shown = "[...document.querySelectorAll('#phrases .caption-label')].map(one => one.innerText)"
    tab.wait(f"JSON.stringify({shown}) === {json.dumps(json.dumps(captions, separators=(',', ':')))}")
    tab.click("document.querySelectorAll('#phrases .thumbnail-item')[1]")
    tab.wait("document.querySelector('#words').innerText.includes('a\\nstar')")
    tab.wait(f"{value('answer')} === {json.dumps(answer_lines(session.asked[1]))}")


def test_a_visitor_drops_a_photo_asks_and_masks_a_region(tab, address, explorer, asked):
    resize(tab, 1400)
    ask(tab, address, asked.file, asked.text)
    session = dataclasses.replace(explorer.ask(Session(read_image(asked.file)), asked.text), min_score=0.0)
    tab.wait(f"{value('answer')} === {json.dumps(answer_lines(session.before))}")
    tab.run("document.querySelectorAll('.label-wrap').forEach(one => one.click())")  # unfolds what is folded
    show_regions_from(tab, session)
    box = numbers(tab.wait(value("boxes")))
    assert box == pytest.approx(asked.box, abs=0.06)

    assert tab.run("document.querySelectorAll('#words .token')[0].innerText") == asked.text.split()[0], "no [CLS]"
    tab.click("document.querySelectorAll('#words .token')[1]")
    tab.wait(f"{value('item')}.startsWith('2: ')")
    tab.wait("!!document.querySelector('#words .score-token')")

    # the picture is as large as the photo, or larger at the right and the bottom
    picture = "document.querySelector('#regions img')"
    wide, high = tab.wait(f"{picture}.naturalWidth > 0 && [{picture}.naturalWidth, {picture}.naturalHeight]")
    scale = min(wide / asked.size[0], high / asked.size[1])
    place = tab.run(PLACE)
    for one in (box, asked.far):
        before = tab.wait(f"{picture}.complete && {picture}.src")
        x, y = middle(one)
        row = session.before.region_at(x, y, session.shown_regions)
        after = explorer.mask(session, [row]).after
        assert answer_lines(after) != answer_lines(session.before)
        tab.click(picture, (x * scale / wide, y * scale / high))
        tab.wait(f"{value('answer-after')} === {json.dumps(answer_lines(after))}")
        assert tab.run(value("answer")) == answer_lines(session.before)
        assert session.before.region_name(row) in tab.run("document.querySelector('#masked').innerText")
        tab.wait(f"{picture}.src != '{before}' && {picture}.complete")
        first, second = (BOUNDS.format(name) for name in ("picture", "picture-after"))
        assert tab.run(f"{first}.right <= {second}.left && {first}.top === {second}.top"), "side by side"
        assert tab.run(PLACE) == place, "the picture under the mouse does not move"
        if one is box:
            tab.click(picture, (x * scale / wide, y * scale / high))
        else:
            tab.click("document.querySelector('#reset')")
        tab.wait(f"!{value('answer-after')} && {picture}.src == '{before}'")

    tab.paste("document.querySelector('#text input, #text textarea')", explorer.examples[0][0])
    tab.wait(f"document.querySelector('#image').innerText.includes('{explorer.examples[0][0].stem}')")

    hosts = {one.split("/")[2] for one in tab.requests if one.startswith("http")}
    assert hosts == {address.split("/")[2]}, "the page asks nobody else"
