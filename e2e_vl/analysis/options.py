"""Options for details of the attention measures that the papers do not specify."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from detector.errors import UserError

WordPiece = Literal["last", "first", "mean"]


class AttentionOptions(msgspec.Struct, frozen=True):
    """The options of an analysis. The metadata of each type is the help text."""

    entity_piece: Annotated[
        Literal["last", "first", "mean", "head"],
        Meta(
            description="attending wordpiece of an entity; mean: the mean of all its wordpieces; head: its head word "
            "in the parse, the first of several ones, at the wordpiece of --word-piece"
        ),
    ] = "last"
    word_piece: Annotated[
        WordPiece, Meta(description="wordpiece of an attending word, which is one of a relation or a head word")
    ] = "last"
    phrase_word: Annotated[
        Literal["any", "head"],
        Meta(description="words of an entity that relations may lead to: any of them, or its head word alone"),
    ] = "any"
    gold_boxes: Annotated[
        Literal["any", "union"],
        Meta(description="a region is right if it overlaps any box of the entity, or the box around all of them"),
    ] = "any"
    min_iou: Annotated[float, Meta(ge=0, le=1, description="least IoU of a right region, inclusive")] = 0.5
    without_box: Annotated[
        Literal["skip", "miss"],
        Meta(description="entities without an annotated box are left out, or counted as missed"),
    ] = "skip"
    without_proposal: Annotated[
        Literal["miss", "skip"], Meta(description="entities without a right region are counted as missed, or left out")
    ] = "miss"
    mean_over: Annotated[
        Literal["entities", "sentences"],
        Meta(
            description="means are over entities (or pairs of words), or over sentences, each with the mean of its own"
        ),
    ] = "entities"
    directions: Annotated[
        Literal["pooled", "separate"],
        Meta(
            description="both directions of a relation are one measure, or two ('to its governor', 'from its governor')"
        ),
    ] = "pooled"
    min_count: Annotated[int, Meta(ge=1, description="least number of pairs of a relation that is shown")] = 1
    most_relations: Annotated[int, Meta(ge=1, description="relations that are shown, the most common ones")] = 10
    active_above: Annotated[
        float,
        Meta(ge=0, le=1, description="least share of the measured words' attention that an active head has on regions"),
    ] = 0.2
    active_over: Annotated[
        Literal["examples", "entities"],
        Meta(
            description="samples on which the activity of a head is measured: the examples of each accuracy, or the "
            "entities, for relations too"
        ),
    ] = "examples"
    whole_image: Annotated[
        Literal["excluded", "candidate"],
        Meta(description="whether the region of the whole image is a region like the others"),
    ] = "excluded"
    missing_parse: Annotated[
        Literal["error", "skip"], Meta(description="a caption without a parse is an error, or has no relations")
    ] = "error"
    first_number: Annotated[
        Literal[0, 1], Meta(description="number of the first layer and of the first head in the output")
    ] = 0

    def require_parses(self, *, given: bool) -> None:
        """Check that parses are given where an option needs them."""
        if self.entity_piece == "head" and not given:
            raise UserError(
                "--entity-piece head needs parses, which name the head word of a phrase; give --parses or --spacy, or "
                "choose another --entity-piece."
            )

    def describe(self) -> list[dict[str, Any]]:
        """`name`, `value`, `default` and `meaning` of each option."""
        return [
            {"name": option_name(name), "value": getattr(self, name), "default": default, "meaning": meaning}
            for name, _, default, meaning in options()
        ]

    def number(self, layer: int, head: int) -> str:
        """The name of a head in the output, such as "10-1"."""
        return f"{layer + self.first_number}-{head + self.first_number}"


def options() -> Iterator[tuple[str, Any, Any, str]]:
    """(field, type, default, meaning) of every option."""
    types = typing.get_type_hints(AttentionOptions, include_extras=True)
    for field in msgspec.structs.fields(AttentionOptions):
        kind, meta = typing.get_args(types[field.name])
        yield field.name, kind, field.default, meta.description


def option_name(field: str) -> str:
    """The command-line name of an option."""
    return "--" + field.replace("_", "-")


def parse_head(text: str, first_number: int = 0) -> tuple[str | None, int, int]:
    """A head as `number` and users write it: "10-1", or with its graph "cross:2-0"; layer and head from 0."""
    found = re.fullmatch(r"(?:(.+):)?(\d+)-(\d+)", text)
    if found is None or min(int(found[2]), int(found[3])) < first_number:
        raise UserError(
            f"--heads has '{text}'; write a head as LAYER-HEAD such as 10-1, or GRAPH:LAYER-HEAD, counted from "
            f"{first_number}."
        )
    return found[1], int(found[2]) - first_number, int(found[3]) - first_number
