"""The page: gradio's components around a session. Needs the optional package gradio."""

# Annotations are evaluated here, unlike in other modules: gradio looks for `SelectData` in them, and finds no strings.

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from detector.errors import UserError
from e2e_vl.explorer.session import (
    FILE_ENDS,
    LONGEST_TEXT,
    Explorer,
    Inspection,
    Limits,
    Session,
    draw_pointed,
    draw_regions,
    read_photo,
)

if TYPE_CHECKING:
    import gradio

SHOWS, HIDES = "shows its attention", "hides it, or shows it again"  # what a click on a region does
MEAN = "mean of all heads"
KEPT_SECONDS = 3600  # how long sessions are kept after their last change, and photos at least
SESSIONS = 50  # visitors whose photos and attention are kept at a time
_WAITING = 20  # visitors' requests in the queue, above which more are refused
_CSS = """
.gradio-container {max-width: 1500px !important}
#problem {border-left: 4px solid #c0392b; padding: 0.4em 0.8em}
#words .token {margin: 2px; padding: 1px 5px; border: 1px solid #bbb; border-radius: 4px; cursor: pointer}
/* the label and the buttons of a picture stand above it, where they cover nothing of a thin photo */
#regions .image-container, #picture .image-container, #picture-after .image-container
    {padding-top: 2.4em; box-sizing: border-box}
/* texts are as high as what they say, in windows of any width */
#answer textarea, #answer-after textarea, #boxes textarea, #boxes-after textarea, #phrases textarea
    {field-sizing: content; height: auto !important; min-height: 3.2em; max-height: 16em}
@media (max-width: 640px) {
    .pair {flex-direction: column !important}
    .pair > * {width: 100% !important}
}
"""


def build_page(explorer: Explorer, limits: Limits, title: str) -> "gradio.Blocks":
    """The page with its events; every visitor has a session of their own."""
    import gradio as gr

    page = gr.Blocks(title=title, analytics_enabled=False, delete_cache=(KEPT_SECONDS, KEPT_SECONDS))
    with page:
        state = gr.State(Session(), time_to_live=KEPT_SECONDS)
        gr.Markdown(f"## {_plain(title)}")
        for sentence in filter(None, (explorer.warning, explorer.note)):
            gr.Markdown(_plain(sentence))
        with gr.Row():
            with gr.Column(scale=2, min_width=320):
                photo = gr.File(
                    label=f"Photo: JPEG or PNG, at most {limits.megabytes:g} MB and {limits.megapixels:g} megapixels",
                    file_types=list(FILE_ENDS),
                    height=140,
                    elem_id="photo",
                )
                text = gr.Textbox(label="Phrase or question", max_length=LONGEST_TEXT, max_lines=1, elem_id="text")
                ask = gr.Button("Ask", variant="primary", elem_id="ask")
                problem = gr.Markdown(visible=False, elem_id="problem")
                with gr.Row(elem_classes="pair"):
                    answer = gr.Textbox(label="Answer", lines=2, max_lines=8, elem_id="answer")
                    answer_after = gr.Textbox(
                        label="Answer with hidden regions", lines=2, max_lines=8, elem_id="answer-after"
                    )
                with gr.Row(elem_classes="pair"):
                    boxes = gr.Textbox(
                        label="Boxes: x1, y1, x2, y2 in pixels of the photo", max_lines=8, elem_id="boxes"
                    )
                    boxes_after = gr.Textbox(label="Boxes with hidden regions", max_lines=8, elem_id="boxes-after")
                phrases = gr.Textbox(label="Phrases", max_lines=10, visible=False, elem_id="phrases")
                words = gr.HighlightedText(
                    label="Words: click one to see its attention", show_legend=False, elem_id="words"
                )
                with gr.Row():
                    item = gr.Dropdown([], label="Attention of", elem_id="item")
                    step = gr.Dropdown([], label="Graph and layer", elem_id="step")
                    head = gr.Dropdown([MEAN], value=MEAN, label="Head", elem_id="head")
            with gr.Column(scale=3, min_width=400):
                click = gr.Radio([SHOWS, HIDES], value=SHOWS, label="A click on a region", elem_id="click")
                regions = gr.Image(
                    label="Regions",
                    interactive=False,
                    format="png",
                    buttons=["fullscreen"],
                    elem_id="regions",
                )
                hidden = gr.Dropdown([], multiselect=True, label="Hidden regions", elem_id="hidden")
        with gr.Row(elem_classes="pair"):
            shape = {"interactive": False, "format": "png", "buttons": ["fullscreen", "download"]}
            picture = gr.Image(label="Answer", elem_id="picture", **shape)
            picture_after = gr.Image(label="Answer with hidden regions", elem_id="picture-after", **shape)
        with gr.Accordion("All regions", open=False):
            table = gr.Dataframe(
                headers=["region", "name", "x1", "y1", "x2", "y2", "attention"],
                interactive=False,
                elem_id="table",
            )
        texts = [answer, answer_after, boxes, boxes_after, phrases]
        outputs = [state, problem, *texts, regions, hidden, words, item, step, head, picture, picture_after, table]

        def shown(session: Session, error: str = "") -> list[Any]:
            return [session, gr.update(value=_plain(error), visible=bool(error)), *_values(gr, session)]

        def saying(change: Callable[..., Session]) -> Callable[..., list[Any]]:
            """An event that changes the session, or says in one sentence why it cannot."""

            def event(session: Session, *values: Any) -> list[Any]:
                try:
                    return shown(change(session, *values))
                except (ValueError, OSError) as error:
                    return shown(session, str(error))

            return event

        def new_photo(session: Session, file: str | None, words: str) -> list[Any]:
            if file is None:
                return shown(Session())
            try:
                session = Session(read_photo(Path(file), limits))
                return shown(explorer.ask(session, words) if words and words.strip() else session)
            except (ValueError, OSError) as error:
                return shown(session, str(error))

        def clicked(session: Session, action: str, event: gr.SelectData) -> list[Any]:
            return saying(_click)(session, explorer, action, event.index)

        def word_clicked(session: Session, event: gr.SelectData) -> list[Any]:
            row = event.index[0] if isinstance(event.index, list | tuple) else event.index
            return shown(dataclasses.replace(session, item=row))

        def chosen_map(session: Session, item: int | None, step: int | None, head: int | str) -> Session:
            step = session.step if step is None else step
            return dataclasses.replace(session, item=item, step=step, head=None if head == MEAN else head)

        rules = {
            "outputs": outputs,
            "concurrency_limit": 1,
            "concurrency_id": "model",
            "api_visibility": "undocumented",
        }
        gr.on([photo.upload, photo.clear], new_photo, [state, photo, text], api_name="photo", **rules)
        gr.on([ask.click, text.submit], saying(explorer.ask), [state, text], api_name="ask", **rules)
        hidden.input(saying(explorer.hide), [state, hidden], api_name="hide", **rules)
        regions.select(clicked, [state, click], api_name="click", **rules)
        words.select(word_clicked, [state], api_name="word", **rules)
        gr.on(
            [item.input, step.input, head.input], saying(chosen_map), [state, item, step, head], api_name="map", **rules
        )
    return page


def serve(page: "gradio.Blocks", limits: Limits, *, host: str, port: int | None) -> str:
    """Start the server in threads of its own, until `page.close()`; no link is shared.

    Args:
        port: None: a free one.

    Returns:
        The address.
    """
    import gradio as gr

    page.queue(max_size=_WAITING, default_concurrency_limit=1)
    _, address, _ = page.launch(
        server_name=host,
        server_port=port,
        share=False,
        prevent_thread_lock=True,
        max_file_size=int(limits.megabytes * 1e6),
        show_error=True,
        footer_links=[],
        run_history=False,
        state_session_capacity=SESSIONS,
        enable_monitoring=False,
        mcp_server=False,
        ssr_mode=False,
        pwa=False,
        quiet=True,
        css=_CSS,
        theme=gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["monospace"]),  # nothing is downloaded
    )
    return address


def _click(session: Session, explorer: Explorer, action: str, place: tuple[float, float]) -> Session:
    """A click on the picture of the regions, at (x, y) of its pixels."""
    if session.photo is None or session.shown is None:
        raise UserError("Nothing was asked yet; write a phrase or a question, and ask.")
    row = session.shown.region_at(*(np.array(place, dtype=np.float64) / session.photo.scale))
    if row is None:
        raise UserError("There is no region at this place; click inside a box.")
    if action == HIDES:
        return explorer.toggle(session, row)
    return dataclasses.replace(session, item=len(session.shown.words) + row)


def _values(gr: Any, session: Session) -> list[Any]:
    """What the components show, in the order of the page's outputs."""
    before, after, seen = session.before, session.after, session.shown
    regions = [] if before is None else [(before.region_name(row), row) for row in range(len(before))]
    items = [] if seen is None else [(seen.item_name(item), item) for item in range(len(seen.words) + len(seen))]
    steps = [] if seen is None else [(name, number) for number, name in enumerate(seen.step_names)]
    heads = [] if seen is None else [(str(number), number) for number in range(seen.num_heads)]
    phrases = [] if seen is None else seen.answer.phrases
    phrase_lines = [
        f"{one.text}: {'no region' if one.box is None else _numbers(one.box)}  ({one.score:.2f})" for one in phrases
    ]
    return [
        _answer(before),
        _answer(after),
        _boxes(before),
        _boxes(after),
        gr.update(value="\n".join(phrase_lines), visible=bool(phrase_lines)),
        draw_regions(session),
        gr.update(choices=regions, value=list(session.hidden)),
        _coloured_words(session),
        gr.update(choices=items, value=session.item),
        gr.update(choices=steps, value=session.step if steps else None),
        gr.update(choices=[(MEAN, MEAN), *heads], value=MEAN if session.head is None else session.head),
        draw_pointed(session, before),
        draw_pointed(session, after, session.hidden),
        _table(session),
    ]


def _answer(found: Inspection | None) -> str:
    if found is None:
        return ""
    unknown = found.answer.unknown_words
    return "\n".join([*found.answer.lines, *([f"unknown words: {', '.join(unknown)}"] if unknown else [])])


def _boxes(found: Inspection | None) -> str:
    return "" if found is None else "\n".join(f"{_numbers(box)}  ({label})" for label, box in found.shown_boxes())


def _numbers(box: Any) -> str:
    return ", ".join(f"{number:.1f}" for number in box)


def _coloured_words(session: Session) -> list[tuple[str, float | None]]:
    """The words with their share of the attention, relative to the largest one."""
    words = () if session.shown is None else session.shown.words
    if session.attention is None:
        return [(word, None) for word in words]
    shares = session.attention[: len(words)]
    return [(word, float(share) / max(float(shares.max()), 1e-12)) for word, share in zip(words, shares, strict=True)]


def _table(session: Session) -> list[list[Any]]:
    if session.shown is None:
        return []
    shares = session.region_attention
    return [
        [row, name, *(round(float(side), 1) for side in box), "" if shares is None else f"{shares[row]:.3f}"]
        for row, (name, box) in enumerate(zip(session.shown.names, session.shown.answer.boxes, strict=True))
    ]


def _plain(text: str) -> str:
    """A text that Markdown shows as it is."""
    return "".join(f"&#{ord(one)};" if one in "\\`*_{}[]()#+-!|~<>&\"'" else one for one in text)
