"""The web page: gradio components that show a session. Needs the optional package gradio."""

# without `from __future__ import annotations`: gradio looks for `SelectData` in annotations, not for strings

import ast
import dataclasses
import functools
import html
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gradio as gr
import numpy as np
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware

from e2e_vl.explorer.hosts import allowed_hosts
from e2e_vl.explorer.session import (
    MAX_TEXT_LENGTH,
    Explorer,
    Inspection,
    Session,
    draw_answer,
    draw_regions,
    read_photo,
)

MASK_REGION, SHOW_ATTENTION = "mask it, or show it again", "show its attention"  # effects of clicking a region
MEAN = "mean of all heads"
MAX_PHOTO_MEGABYTES = 20  # of an uploaded photo
SESSION_SECONDS = 3600  # lifetime of a session after its last change, and minimum lifetime of photos
MAX_SESSIONS = 50  # maximum number of sessions in memory
_MAX_QUEUE = 20  # maximum length of the request queue


def build_page(explorer: Explorer, title: str) -> gr.Blocks:
    """Build the page with its events; each user has a separate session. It opens with the first example."""
    page = gr.Blocks(title=title, analytics_enabled=False, delete_cache=(SESSION_SECONDS, SESSION_SECONDS))
    with page:
        state = gr.State(Session(), time_to_live=SESSION_SECONDS)
        [_, text, *_] = ast.literal_eval(f"[{explorer.model.network.task.example_call}]")
        start = "Click an example, or drop a photo" if explorer.examples else "Drop a photo"
        hint = f"{start} and ask about it, such as “{text}”; click a region to mask it, or a word for its attention."
        known = [", ".join(words) for kind, words in explorer.model.knows.items() if kind != "word"]
        knows = f"The model knows only: {'; '.join(known)}." if known else ""
        sentences = map(html.escape, filter(None, (hint, knows, explorer.warning, explorer.note)))
        gr.HTML(f"<h2>{html.escape(title)}</h2>" + "".join(f"<p>{one}</p>" for one in sentences), elem_id="hints")
        with gr.Row(elem_id="examples"):
            buttons = [gr.Button(text, icon=str(file), size="sm", min_width=200) for file, text in explorer.examples]
        _connect(explorer, page, state, _components(), buttons)
    return page


def _components() -> dict[str, Any]:
    """The components in their layout, by element id."""
    parts = {}

    def add(kind: Any, name: str, label: str | None = None, **options: Any) -> None:
        parts[name] = kind(label=label, elem_id=name, **options)

    picture = {"interactive": False, "format": "png", "buttons": ["fullscreen", "download"]}
    with gr.Row(equal_height=True):
        add(gr.File, "photo", f"Photo, at most {MAX_PHOTO_MEGABYTES} MB", file_types=["image"], height=92)
        add(gr.Textbox, "text", "Phrase or question", max_length=MAX_TEXT_LENGTH, max_lines=1, scale=2)
        parts["ask"] = gr.Button("Ask", variant="primary", elem_id="ask", scale=0, min_width=100)
    parts["problem"] = gr.HTML(visible=False, elem_id="problem")
    with gr.Row(elem_id="pictures"):
        with gr.Column(min_width=300):
            add(gr.Image, "regions", "Photo: click a region", **picture)
            add(gr.Radio, "click", "Click a region to", choices=[MASK_REGION, SHOW_ATTENTION], value=MASK_REGION)
        with gr.Column(min_width=300):
            add(gr.Image, "picture", "Answer", **picture)
            add(gr.Textbox, "answer", "Score and answer", max_lines=8)
        with gr.Column(min_width=300, visible=False, elem_id="after") as parts["after"]:
            add(gr.Image, "picture-after", "Answer with masked regions", **picture)
            add(gr.Textbox, "answer-after", "Score and answer with masked regions", max_lines=8)
    add(gr.HighlightedText, "words", "Words: click one to see its attention", show_legend=False)
    with gr.Accordion("Attention by layer and head", open=False), gr.Row():
        add(gr.Dropdown, "item", "Attention of")
        add(gr.Dropdown, "step", "Layer")
        add(gr.Dropdown, "head", "Head", choices=[MEAN], value=MEAN)
    with gr.Accordion("Boxes and masked regions", open=False):
        with gr.Row():
            add(gr.Textbox, "boxes", "Answer and phrases: x1, y1, x2, y2 in pixels of the photo", max_lines=12)
            add(gr.Textbox, "boxes-after", "With masked regions", max_lines=12)
        add(gr.Dropdown, "masked", "Masked regions", multiselect=True)
        headers = ["region", "name", "x1", "y1", "x2", "y2", "attention"]
        parts["table"] = gr.Dataframe(headers=headers, interactive=False, elem_id="table")
    return parts


def _connect(
    explorer: Explorer, page: gr.Blocks, state: gr.State, parts: dict[str, Any], buttons: list[gr.Button]
) -> None:
    """Connect the components' events to the session."""

    def shown(session: Session, error: str = "") -> list[Any]:
        return [session, *values(session, error).values()]

    def changing(change: Callable[..., Session]) -> Callable[..., list[Any]]:
        """An event handler that changes the session, or shows an error message."""

        def event(session: Session, *inputs: Any) -> list[Any]:
            try:
                return shown(change(session, *inputs))
            except (ValueError, OSError) as error:
                return shown(session, str(error))

        return event

    def new_photo(session: Session, file: str | None, text: str) -> list[Any]:
        if file is None:
            return shown(Session())
        try:
            session = Session(read_photo(Path(file)))
            return shown(explorer.ask(session, text) if text and text.strip() else session)
        except (ValueError, OSError) as error:  # after an error about the text the photo stays
            return shown(session, str(error))

    def click(session: Session, action: str, place: tuple[float, float]) -> Session:
        """Handle a click on the picture of the regions, at pixel (x, y)."""
        seen = session.shown
        row = None if seen is None else seen.region_at(*(np.array(place, dtype=np.float64) / session.photo.scale))
        if row is None:
            return session
        if action == MASK_REGION:
            return explorer.toggle(session, row)
        return dataclasses.replace(session, item=len(seen.words) + row)

    def clicked(session: Session, action: str, event: gr.SelectData) -> list[Any]:
        return changing(click)(session, action, event.index)

    def word_clicked(session: Session, event: gr.SelectData) -> list[Any]:
        row = event.index[0] if isinstance(event.index, list | tuple) else event.index
        return shown(dataclasses.replace(session, item=row))

    def chosen_map(session: Session, item: int | None, step: int | None, head: int | str) -> Session:
        step = session.step if step is None else step
        return dataclasses.replace(session, item=item, step=step, head=None if head == MEAN else head)

    outputs = [state, *(parts[name] for name in values(Session(), ""))]

    def on(triggers: list[Any], event: Callable[..., list[Any]], inputs: list[str], **options: Any) -> None:
        options = {"outputs": outputs, "concurrency_limit": 1, "concurrency_id": "model"} | options
        gr.on(triggers, event, [state, *(parts[one] for one in inputs)], api_visibility="undocumented", **options)

    def example(session: Session, *, number: int) -> list[Any]:
        file, text = explorer.examples[number]
        return [*new_photo(session, file, text), text, None]

    photo, text, item, step, head = (parts[name] for name in ("photo", "text", "item", "step", "head"))
    on([photo.upload, photo.clear], new_photo, ["photo", "text"], api_name="photo")
    on([parts["ask"].click, text.submit], changing(explorer.ask), ["text"], api_name="ask")
    on([parts["masked"].input], changing(explorer.mask), ["masked"], api_name="mask")
    on([parts["regions"].select], clicked, ["click"], api_name="click")
    on([parts["words"].select], word_clicked, [], api_name="word")
    on([item.input, step.input, head.input], changing(chosen_map), ["item", "step", "head"], api_name="map")
    for number, button in enumerate(buttons):  # the page opens with the first one
        triggers = [button.click] if number else [page.load, button.click]
        on(triggers, functools.partial(example, number=number), [], outputs=[*outputs, text, photo])


def serve(page: gr.Blocks, *, host: str, port: int | None) -> str:
    """Start the server in background threads, until `page.close()`, and return its address; `port` None: any free one.

    No public link is created. Requests for other names than those of `allowed_hosts` are refused.
    """
    page.queue(max_size=_MAX_QUEUE, default_concurrency_limit=1)
    _, address, _ = page.launch(
        server_name=host,
        server_port=port,
        share=False,
        prevent_thread_lock=True,
        max_file_size=MAX_PHOTO_MEGABYTES * 10**6,
        show_error=True,
        footer_links=[],
        run_history=False,
        state_session_capacity=MAX_SESSIONS,
        quiet=True,
        app_kwargs={"middleware": [Middleware(TrustedHostMiddleware, allowed_hosts=allowed_hosts(host))]},
        css_paths=Path(__file__).with_name("page.css"),
        theme=gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["monospace"]),  # nothing is downloaded
    )
    return address


def values(session: Session, error: str) -> dict[str, Any]:
    """The values of the components, by element id."""
    before, after, seen = session.before, session.after, session.shown
    regions, items, steps, heads, table = [], [], [], [], []
    if seen is not None:
        regions = [(seen.region_name(row), row) for row in range(len(seen))]
        items = [(seen.item_name(item), item) for item in range(len(seen.words) + len(seen))]
        steps = [(name, number) for number, name in enumerate(seen.step_names)]
        count = seen.attention.shape[1]
        heads = [(f"head {number + 1} of {count}", number) for number in range(count)]
        shares = session.region_attention
        for row, (name, box) in enumerate(zip(seen.names, seen.answer.boxes, strict=True)):
            sides = [round(float(side), 1) for side in box]
            table.append([row, name, *sides, "" if shares is None else f"{shares[row]:.3f}"])
    return {
        "problem": gr.update(value=html.escape(error), visible=bool(error)),
        "answer": _answer(before),
        "answer-after": _answer(after),
        "boxes": _boxes(before),
        "boxes-after": _boxes(after),
        "regions": draw_regions(session),
        "masked": gr.update(choices=regions, value=list(session.masked)),
        "words": _coloured_words(session),
        "item": gr.update(choices=items, value=session.item),
        "step": gr.update(choices=steps, value=session.step if steps else None),
        "head": gr.update(choices=[(MEAN, MEAN), *heads], value=MEAN if session.head is None else session.head),
        "picture": draw_answer(session, before),
        "picture-after": draw_answer(session, after, session.masked),
        "after": gr.update(visible=after is not None),
        "table": table,
    }


def _answer(found: Inspection | None) -> str:
    if found is None:
        return ""
    return "\n".join([*found.answer.marked_lines, *found.answer.warnings])


def _boxes(found: Inspection | None) -> str:
    """The boxes of the answer, then of all its phrases, a line each."""
    if found is None:
        return ""
    phrases = [(f"{phrase.text} {phrase.score:.2f}", phrase.box) for phrase in found.answer.phrases]
    rows = [(label, () if box is None else box) for label, box in found.answer_boxes() + phrases]
    return "\n".join(f"{', '.join(f'{side:.1f}' for side in box) or 'no region'}  ({label})" for label, box in rows)


def _coloured_words(session: Session) -> list[tuple[str, float | None]]:
    """The words with their attention relative to the highest one."""
    words = () if session.shown is None else session.shown.words
    if session.attention is None:
        return [(word, None) for word in words]
    shares = session.attention[: len(words)]
    return [(word, float(share) / max(float(shares.max()), 1e-12)) for word, share in zip(words, shares, strict=True)]
