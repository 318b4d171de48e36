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
    MAX_OVERLAP,
    MAX_TEXT_LENGTH,
    MIN_SCORE,
    Explorer,
    Inspection,
    Session,
    draw_answer,
    draw_regions,
    percent,
    read_boxes,
    read_image,
)

# effects of clicking a region
MASK_REGION = "mask it"
SHOW_ATTENTION = "see its attention"
AFTER_HINT = (
    "Click a region in the image: its pixels turn grey, and the answer without them appears here. Another click shows "
    "the region again."
)
MEAN = "mean of all heads"
MAX_IMAGE_MEGABYTES = 20  # of an uploaded image
SESSION_SECONDS = 3600  # lifetime of a session after its last change, and minimum lifetime of images
MAX_SESSIONS = 50  # maximum number of sessions in memory
_MAX_QUEUE = 20  # maximum length of the request queue

Event = Callable[..., list[Any]]  # returns a session and values of components


def build_page(explorer: Explorer, title: str) -> gr.Blocks:
    """Build the page with its events; each user has a separate session. It opens with the first example."""
    page = gr.Blocks(title=title, analytics_enabled=False, delete_cache=(SESSION_SECONDS, SESSION_SECONDS))
    with page:
        state = gr.State(Session(), time_to_live=SESSION_SECONDS)
        [_, text, *_] = ast.literal_eval(f"[{explorer.model.network.task.example_call}]")
        start = "Click an example, or drop or paste an image" if explorer.examples else "Drop or paste an image"
        hint = f"{start} and ask about it, such as “{text}”."
        more = "Several phrases have semicolons between them. Click a region to mask it, or a word for its attention."
        known_words = [", ".join(words) for kind, words in explorer.model.knows.items() if kind != "word"]
        knows = f"The model knows only: {'; '.join(known_words)}." if known_words else ""
        lines = [f"<h2>{html.escape(title)}</h2>"]
        for sentence in (f"{hint} {more}", knows, explorer.warning, explorer.note):
            if sentence:
                lines.append(f"<p>{html.escape(sentence)}</p>")
        gr.HTML("".join(lines), elem_id="hints")
        with gr.Row(elem_id="examples"):
            buttons = [gr.Button(text, icon=str(file), size="sm", min_width=200) for file, text in explorer.examples]
        _connect(explorer, page, state, _components(), buttons)
    return page


def _components() -> dict[str, Any]:
    """Create the components in their layout, and return them by element id."""
    components = {}

    def add(component_class: Any, name: str, label: str | None = None, **options: Any) -> None:
        components[name] = component_class(label=label, elem_id=name, **options)

    picture = {"interactive": False, "format": "png", "buttons": ["fullscreen", "download"]}
    with gr.Row(equal_height=True):
        add(gr.File, "image", f"Image, ≤ {MAX_IMAGE_MEGABYTES} MB", file_types=["image"], height=92)
        add(gr.File, "candidates", "Boxes, optional", file_types=[".json", ".npz"], height=92)
        add(gr.Textbox, "text", "Phrase or question", max_length=MAX_TEXT_LENGTH, max_lines=1, scale=2)
        components["ask"] = gr.Button("Ask", variant="primary", elem_id="ask", scale=0, min_width=100)
    # a pasted image goes into a file of its own, because one that holds a file takes no other (page.js)
    add(gr.File, "pasted", file_types=["image"], visible="hidden")
    components["problem"] = gr.HTML(visible=False, elem_id="problem")
    gallery = {"visible": False, "format": "png", "allow_preview": False, "buttons": [], "object_fit": "contain"}
    add(gr.Gallery, "phrases", "Answers: click one to examine it", **gallery)
    with gr.Row(elem_id="pictures"):
        with gr.Column(min_width=0):
            add(gr.Image, "regions", "Image: click a region", **picture)
            with gr.Group():
                add(gr.Radio, "click", "Click a region to", choices=[MASK_REGION, SHOW_ATTENTION], value=MASK_REGION)
                components["reset"] = gr.Button("Show all masked regions again", size="sm", elem_id="reset")
        with gr.Column(min_width=0):
            add(gr.Image, "picture", "Answer", **picture)
            add(gr.Textbox, "answer", "Answer and score", max_lines=8)
        with gr.Column(min_width=0):  # it is there from the start, so that the other pictures do not move
            components["after-hint"] = gr.HTML(html.escape(AFTER_HINT), elem_id="after-hint")
            with gr.Column(min_width=0, visible=False, elem_id="after") as components["after"]:
                add(gr.Image, "picture-after", "Answer with masked regions", **picture)
                add(gr.Textbox, "answer-after", "Answer and score with masked regions", max_lines=8)
        with gr.Column(min_width=0, elem_id="shown"), gr.Group():
            label = "Show regions with a detection score of at least"
            add(gr.Slider, "min-score", label, minimum=0, maximum=1, step=0.05, value=MIN_SCORE)
            label = f"Also regions that overlap a better one (IoU above {MAX_OVERLAP})"
            add(gr.Checkbox, "overlapping", label)
    add(gr.HighlightedText, "words", "Words: click one to see its attention", show_legend=False)
    add(gr.Checkbox, "markers", "Also the markers [CLS], [SEP] and [END]")
    with gr.Accordion("Attention by layer and head", open=False), gr.Row():
        add(gr.Dropdown, "item", "Attention of")
        add(gr.Dropdown, "step", "Layer", scale=2)
        add(gr.Dropdown, "head", "Head", choices=[MEAN], value=MEAN)
    with gr.Accordion("Boxes and masked regions", open=False):
        with gr.Row():
            add(gr.Textbox, "boxes", "Answer and phrases: x1, y1, x2, y2 in pixels of the image", max_lines=12)
            add(gr.Textbox, "boxes-after", "With masked regions", max_lines=12)
        add(gr.Dropdown, "masked", "Masked regions", multiselect=True)
        headers = ["region", "name", "score", "x1", "y1", "x2", "y2", "attention"]
        components["table"] = gr.Dataframe(headers=headers, interactive=False, elem_id="table")
    with gr.Accordion("Answer as JSON, to copy or to download", open=False):
        add(gr.Code, "json", "All that the model answered", language="json", interactive=False, max_lines=16)
    return components


def _connect(
    explorer: Explorer, page: gr.Blocks, state: gr.State, components: dict[str, Any], buttons: list[gr.Button]
) -> None:
    """Connect the components' events to the session."""

    def show(session: Session, error: str = "") -> list[Any]:
        """Return the session and the values of the components that show it."""
        return [session, *values(session, error).values()]

    def show_asked(session: Session, error: str = "") -> list[Any]:
        """Return the same after a text was asked, and the answers to its phrases."""
        return [*show(session, error), _update_phrases(session)]

    def changing(change: Callable[..., Session], show: Event = show) -> Event:
        """Make an event handler that changes the session, or shows an error message."""

        def event(session: Session, *inputs: Any) -> list[Any]:
            try:
                return show(change(session, *inputs))
            except (ValueError, OSError) as error:
                return show(session, str(error))

        return event

    def ask_again(session: Session, text: str) -> list[Any]:
        """Ask the text about another image or other boxes, which stay after an error about the text."""
        try:
            if session.image is not None and text and text.strip():
                return show_asked(explorer.ask(session, text))
            return show_asked(session)
        except (ValueError, OSError) as error:
            return show_asked(session, str(error))

    def open_image(session: Session, file: str | None, text: str) -> list[Any]:
        try:
            image = None if file is None else read_image(Path(file))
        except (ValueError, OSError) as error:
            return show_asked(session, str(error))
        return ask_again(session.with_image(image), text)

    def open_boxes(session: Session, file: str | None, text: str) -> list[Any]:
        try:
            boxes = None if file is None else read_boxes(Path(file))
        except (ValueError, OSError) as error:  # the page names no file whose boxes are not used
            return [*show_asked(session.with_boxes(None), str(error)), None]
        return [*ask_again(session.with_boxes(boxes), text), file]

    def click(session: Session, action: str, pixel: tuple[float, float]) -> Session:
        """Handle a click on the picture of the regions, at pixel (x, y)."""
        inspection = session.shown
        if inspection is None:
            return session
        x, y = np.array(pixel, dtype=np.float64) / session.image.scale
        row = inspection.region_at(x, y, session.shown_regions)
        if row is None:
            return session
        if action == MASK_REGION:
            return explorer.toggle(session, row)
        return dataclasses.replace(session, item=len(inspection.words) + row)

    def select_region(session: Session, action: str, event: gr.SelectData) -> list[Any]:
        return changing(click)(session, action, event.index)

    def select_word(session: Session, event: gr.SelectData) -> list[Any]:
        word = event.index[0] if isinstance(event.index, list | tuple) else event.index
        return show(dataclasses.replace(session, item=session.shown_words[word]))

    def select_phrase(session: Session, event: gr.SelectData) -> list[Any]:
        return changing(explorer.select)(session, event.index)

    def reset(session: Session) -> Session:
        return explorer.mask(session, ())

    def choose_shown(session: Session, min_score: float, overlapping: bool, markers: bool) -> Session:
        return dataclasses.replace(session, min_score=min_score, shows_overlapping=overlapping, shows_markers=markers)

    def select_map(session: Session, item: int | None, step: int | None, head: int | str) -> Session:
        if step is None:
            step = session.step
        if head == MEAN:
            head = None
        return dataclasses.replace(session, item=item, step=step, head=head)

    outputs = [state, *(components[name] for name in values(Session(), ""))]
    outputs_asked = [*outputs, components["phrases"]]

    def on(triggers: list[Any], event: Event, inputs: list[str], **options: Any) -> None:
        options = {"outputs": outputs, "concurrency_limit": 1, "concurrency_id": "model"} | options
        sources = [state, *(components[name] for name in inputs)]
        gr.on(triggers, event, sources, api_visibility="undocumented", **options)

    def open_example(session: Session, *, number: int) -> list[Any]:
        file, text = explorer.examples[number]
        return [*open_image(session.with_boxes(None), file, text), text, None, None]

    def paste(session: Session, file: str, text: str) -> list[Any]:
        return [*open_image(session, file, text), file, None]

    image, text, item, step, head = (components[name] for name in ("image", "text", "item", "step", "head"))
    pasted = components["pasted"]
    candidates = components["candidates"]
    on([image.upload, image.clear], open_image, ["image", "text"], outputs=outputs_asked, api_name="image")
    triggers = [candidates.upload, candidates.clear]
    on(triggers, open_boxes, ["candidates", "text"], outputs=[*outputs_asked, candidates], api_name="boxes")
    on([pasted.upload], paste, ["pasted", "text"], outputs=[*outputs_asked, image, pasted], api_name="paste")
    ask = changing(explorer.ask, show_asked)
    on([components["ask"].click, text.submit], ask, ["text"], outputs=outputs_asked, api_name="ask")
    on([components["masked"].input], changing(explorer.mask), ["masked"], api_name="mask")
    on([components["regions"].select], select_region, ["click"], api_name="click")
    on([components["reset"].click], changing(reset), [], api_name="reset")
    on([components["phrases"].select], select_phrase, [], api_name="phrase")
    choices = ["min-score", "overlapping", "markers"]
    triggers = [components[name].change for name in choices]
    live = {"trigger_mode": "always_last", "show_progress": "hidden"}  # the picture follows the slider
    on(triggers, changing(choose_shown), choices, api_name="shown", **live)
    on([components["words"].select], select_word, [], api_name="word")
    on([item.input, step.input, head.input], changing(select_map), ["item", "step", "head"], api_name="map")
    for number, button in enumerate(buttons):
        triggers = [button.click]
        if number == 0:  # the page opens with the first one
            triggers.insert(0, page.load)
        on(
            triggers,
            functools.partial(open_example, number=number),
            [],
            outputs=[*outputs_asked, text, image, candidates],
        )


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
        max_file_size=MAX_IMAGE_MEGABYTES * 10**6,
        show_error=True,
        footer_links=[],
        run_history=False,
        state_session_capacity=MAX_SESSIONS,
        quiet=True,
        app_kwargs={"middleware": [Middleware(TrustedHostMiddleware, allowed_hosts=allowed_hosts(host))]},
        css_paths=Path(__file__).with_name("page.css"),
        js=Path(__file__).with_name("page.js").read_text(encoding="utf-8"),
        theme=gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["monospace"]),  # nothing is downloaded
    )
    return address


def values(session: Session, error: str) -> dict[str, Any]:
    """Return the values of the components, by element id."""
    before = session.before
    after = session.after
    inspection = session.shown
    # choices of the dropdowns: texts and their values
    regions = []
    items = []
    steps = []
    heads = [(MEAN, MEAN)]
    step = None
    table = []
    if inspection is not None:
        regions = [(inspection.region_name(row), row) for row in range(len(inspection))]
        items = [(inspection.item_name(item), item) for item in range(len(inspection.words) + len(inspection))]
        steps = [(name, number) for number, name in enumerate(inspection.step_names)]
        step = session.step
        count = inspection.attention.shape[1]
        heads += [(f"head {number + 1} of {count}", number) for number in range(count)]
        shares = session.region_attention
        for row, (name, box) in enumerate(zip(inspection.names, inspection.answer.boxes, strict=True)):
            sides = [round(float(side), 1) for side in box]
            score = "" if inspection.scores is None else f"{inspection.scores[row]:.2f}"
            share = "" if shares is None else f"{shares[row]:.3f}"
            table.append([row, name, score, *sides, share])
    return {
        "problem": gr.update(value=html.escape(error), visible=bool(error)),
        "answer": "" if before is None else "\n".join(before.sentences),
        "answer-after": "" if after is None else "\n".join(after.sentences),
        "boxes": _format_boxes(before),
        "boxes-after": _format_boxes(after),
        "regions": draw_regions(session),
        "masked": gr.update(choices=regions, value=list(session.masked)),
        "words": _coloured_words(session),
        "item": gr.update(choices=items, value=session.item),
        "step": gr.update(choices=steps, value=step),
        "head": gr.update(choices=heads, value=MEAN if session.head is None else session.head),
        "picture": draw_answer(session, before),
        "picture-after": draw_answer(session, after, session.masked),
        "after": gr.update(visible=after is not None),
        "after-hint": gr.update(visible=after is None),
        "reset": gr.update(interactive=bool(session.masked)),
        "min-score": gr.update(info=_count_hidden(session)),
        "table": table,
        "json": session.answers,
    }


def _count_hidden(session: Session) -> str:
    """Return how many regions are not shown, as a sentence."""
    if session.before is None:
        return ""
    count = len(session.before)
    return f"{count - len(session.shown_regions)} of {count} regions are hidden."


def _update_phrases(session: Session) -> dict[str, Any]:
    """Return the pictures of the answers to several phrases, with captions; none for a single phrase."""
    if len(session.asked) < 2:
        return gr.update(value=[], visible=False)
    pictures = []
    for inspection in session.asked:
        caption = f"{inspection.answer.question}: {inspection.sentences[0]}"
        pictures.append((draw_answer(session, inspection), caption))
    return gr.update(value=pictures, visible=True, selected_index=session.phrase)


def _format_boxes(inspection: Inspection | None) -> str:
    """Return the boxes of the answer, then of all its phrases, a line each."""
    if inspection is None:
        return ""
    labelled_boxes = inspection.answer_boxes()
    for phrase in inspection.answer.phrases:
        labelled_boxes.append((f"{phrase.text}, {percent(phrase.score)}", phrase.box))
    lines = []
    for label, box in labelled_boxes:
        sides = "no region"
        if box is not None:
            sides = ", ".join(f"{side:.1f}" for side in box)
        lines.append(f"{sides}  ({label})")
    return "\n".join(lines)


def _coloured_words(session: Session) -> list[tuple[str, float | None]]:
    """Return the shown words with their attention relative to the highest one."""
    attention = session.attention
    items = session.shown_words
    if attention is None:
        return [(session.shown.words[item], None) for item in items]
    highest = max(float(attention[items].max(initial=0)), 1e-12)
    return [(session.shown.words[item], float(attention[item]) / highest) for item in items]
