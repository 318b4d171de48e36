"""One self-contained page with the numbers, figures and pictures of an analysis."""

from __future__ import annotations

import base64
import io
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from PIL import Image

from e2e_vl.analysis.attention_tables import BASELINE_WORDS, AttentionResults
from e2e_vl.analysis.overlays import Overlay
from e2e_vl.run_files import write_text

PAGE = Path(__file__).with_name("attention_page.html.jinja")
LONGEST_SIDE = 720  # of a picture in the page, pixels


def write_page(
    path: Path, results: AttentionResults, figures: Mapping[str, bytes], overlays: Sequence[Overlay]
) -> Path:
    """Write the page.

    Args:
        figures: PNG files by their names.
        overlays: pictures that lie beside the page; those of one caption follow each other.
    """
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"percent": _percent}
    page = environment.from_string(PAGE.read_text(encoding="utf-8")).render(
        results=results,
        measures={
            graph: {name: results.summary(graph, name) for name in results.measures(graph)} for graph in results.graphs
        },
        relations={graph: results.relation_rows(graph) for graph in results.graphs},
        baseline_words=BASELINE_WORDS,
        figures={name: _uri(content, "png") for name, content in figures.items()},
        captions=[
            (text, [(one, _picture(one)) for one in own])
            for (_, text), own in itertools.groupby(overlays, key=lambda one: (one.index, one.text))
        ],
    )
    write_text(path, page)
    return path


def _picture(overlay: Overlay) -> str:
    """A data URI; "" without a picture."""
    if overlay.file is None:
        return ""
    buffer = io.BytesIO()
    with Image.open(overlay.file, formats=("JPEG", "PNG")) as image:  # `overlays.py` wrote it
        image.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
        image.convert("RGB").save(buffer, "JPEG", quality=85)
    return _uri(buffer.getvalue(), "jpeg")


def _uri(content: bytes, kind: str) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def _percent(value: Any) -> str:
    """A share as per cent with two decimals, as in the paper; a dash for none."""
    return "–" if value is None else f"{100 * value:.2f}"
