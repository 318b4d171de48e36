"""Options for the details of the attention measures that the paper leaves open."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from detector.errors import UserError

WordPiece = Literal["last", "first", "mean"]


class AnalysisConfig(msgspec.Struct, frozen=True):
    """The options of an analysis; the description of each field is its help text."""

    entity_piece: Annotated[
        Literal["last", "first", "mean", "head"],
        Meta(
            description="wordpiece of an entity whose attention is measured; mean: average over all its wordpieces; "
            "head: its head word in the parse (the first if there are several), read at --word-piece"
        ),
    ] = "last"
    word_piece: Annotated[
        WordPiece, Meta(description="wordpiece of a word (of a relation, or a head word) whose attention is measured")
    ] = "last"
    phrase_word: Annotated[
        Literal["any", "head"],
        Meta(description="entity words that count as the target of a relation: any word, or the head word only"),
    ] = "any"
    gold_boxes: Annotated[
        Literal["any", "union"],
        Meta(description="a region is correct if it overlaps any box of the entity, or the box enclosing all of them"),
    ] = "any"
    min_iou: Annotated[float, Meta(ge=0, le=1, description="minimum IoU of a correct region, inclusive")] = 0.5
    without_box: Annotated[
        Literal["skip", "miss"], Meta(description="entities without an annotated box are skipped, or counted as misses")
    ] = "skip"
    without_region: Annotated[
        Literal["miss", "skip"], Meta(description="entities without a correct region are counted as misses, or skipped")
    ] = "miss"
    mean_over: Annotated[
        Literal["entities", "sentences"],
        Meta(description="average over all entities (or word pairs), or over the means of all sentences"),
    ] = "entities"
    directions: Annotated[
        Literal["pooled", "separate"],
        Meta(
            description="measure both directions of a relation together, or one by one ('to' and 'from its governor')"
        ),
    ] = "pooled"
    min_count: Annotated[int, Meta(ge=1, description="minimum number of word pairs for a relation to be shown")] = 1
    max_relations: Annotated[int, Meta(ge=1, description="maximum number of relations shown, most common first")] = 10
    active_above: Annotated[
        float,
        Meta(ge=0, le=1, description="a head is active above this share of the measured words' attention on regions"),
    ] = 0.2
    active_over: Annotated[
        Literal["examples", "entities"],
        Meta(
            description="where the activity of a head is measured: on the examples of each measure, or on the "
            "entities, also for relations"
        ),
    ] = "examples"
    whole_image: Annotated[
        Literal["excluded", "candidate"], Meta(description="whether the whole-image region is a candidate")
    ] = "excluded"
    missing_parse: Annotated[
        Literal["error", "skip"], Meta(description="a caption without a parse is an error, or has no relations")
    ] = "error"
    first_number: Annotated[Literal[0, 1], Meta(description="number of the first layer and head in the output")] = 0

    def require_parses(self, *, has_parses: bool) -> None:
        """Raise an error if an option needs parses and there are none."""
        if self.entity_piece == "head" and not has_parses:
            raise UserError(
                "--entity-piece head needs parses to find the head word of a phrase; give --parses or --spacy, or "
                "choose another --entity-piece."
            )

    def describe(self) -> list[dict[str, Any]]:
        """Return `name`, `value`, `default` and `meaning` of each option."""
        descriptions = []
        for field, _, default, meaning in list_options():
            value = getattr(self, field)
            descriptions.append({"name": option_flag(field), "value": value, "default": default, "meaning": meaning})
        return descriptions

    def head_name(self, layer: int, head: int) -> str:
        """Return the name of a head in the output, such as "10-1"."""
        return f"{layer + self.first_number}-{head + self.first_number}"


def list_options() -> Iterator[tuple[str, Any, Any, str]]:
    """Yield the field, type, default and meaning of every option."""
    types = typing.get_type_hints(AnalysisConfig, include_extras=True)
    for field in msgspec.structs.fields(AnalysisConfig):
        kind, meta = typing.get_args(types[field.name])
        yield field.name, kind, field.default, meta.description


def option_flag(field: str) -> str:
    """Return the command-line name of an option."""
    return "--" + field.replace("_", "-")


def parse_head(text: str, first_number: int = 0) -> tuple[str | None, int, int]:
    """Parse "10-1" or "cross:2-0" into graph (or None), layer and head, both counted from 0."""
    match = re.fullmatch(r"(?:(.+):)?(\d+)-(\d+)", text)
    if match is None or min(int(match[2]), int(match[3])) < first_number:
        raise UserError(
            f"--heads has '{text}'; write a head as LAYER-HEAD such as 10-1, or GRAPH:LAYER-HEAD, counted from "
            f"{first_number}."
        )
    graph, layer, head = match.groups()
    return graph, int(layer) - first_number, int(head) - first_number
