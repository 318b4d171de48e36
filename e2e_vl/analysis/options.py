"""What the papers leave open about measures of attention, each as a named option with a default."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any, Literal

from detector.errors import UserError
from e2e_vl.converter import check_choice

WordPiece = Literal["last", "first", "mean"]


@dataclasses.dataclass(frozen=True)
class AttentionChoices:
    """The options of an analysis; `describe` repeats them in its output.

    Raises:
        ValueError: a value that an option does not have; the message names it.
    """

    entity_piece: Literal["last", "first", "mean", "head"] = dataclasses.field(
        default="last",
        metadata={
            "help": "wordpiece of an entity that attends; mean: the mean of all its wordpieces; head: its head word in "
            "the parse, of several ones the first, at the wordpiece of --word-piece"
        },
    )
    word_piece: WordPiece = dataclasses.field(
        default="last", metadata={"help": "wordpiece of an attending word, which is one of a relation or a head word"}
    )
    phrase_word: Literal["any", "head"] = dataclasses.field(
        default="any",
        metadata={"help": "words of an entity that relations may lead to: any of them, or its head word alone"},
    )
    gold_boxes: Literal["any", "union"] = dataclasses.field(
        default="any",
        metadata={"help": "a region is right if it overlaps any box of the entity, or the box around all of them"},
    )
    min_iou: float = dataclasses.field(default=0.5, metadata={"help": "least IoU of a right region, inclusive"})
    without_box: Literal["skip", "miss"] = dataclasses.field(
        default="skip", metadata={"help": "entities without an annotated box are left out, or counted as missed"}
    )
    without_proposal: Literal["miss", "skip"] = dataclasses.field(
        default="miss", metadata={"help": "entities without a right region are counted as missed, or left out"}
    )
    mean_over: Literal["entities", "sentences"] = dataclasses.field(
        default="entities",
        metadata={
            "help": "means are over entities (or pairs of words), or over sentences, each with the mean of its own"
        },
    )
    directions: Literal["pooled", "separate"] = dataclasses.field(
        default="pooled",
        metadata={
            "help": "both directions of a relation are one measure, or two ('to its governor', 'from its governor')"
        },
    )
    min_count: int = dataclasses.field(
        default=1, metadata={"help": "least number of pairs of a relation that is shown"}
    )
    most_relations: int = dataclasses.field(
        default=10, metadata={"help": "relations that are shown, the most common ones"}
    )
    active_above: float = dataclasses.field(
        default=0.2,
        metadata={
            "help": "a head is active if more than this share of the attention of the measured words is on regions"
        },
    )
    active_over: Literal["examples", "entities"] = dataclasses.field(
        default="examples",
        metadata={
            "help": "samples on which the activity of a head is measured: the examples of each accuracy, or the "
            "entities, for relations too"
        },
    )
    whole_image: Literal["excluded", "candidate"] = dataclasses.field(
        default="excluded", metadata={"help": "whether the region of the whole image is a region like the others"}
    )
    missing_parse: Literal["error", "skip"] = dataclasses.field(
        default="error", metadata={"help": "a caption without a parse is an error, or has no relations"}
    )
    first_number: Literal[0, 1] = dataclasses.field(
        default=0, metadata={"help": "number of the first layer and of the first head in the output"}
    )

    def __post_init__(self) -> None:
        for name, hint in typing.get_type_hints(type(self)).items():
            if typing.get_origin(hint) is Literal:
                allowed = typing.get_args(hint)
                check_choice(option_name(name), str(getattr(self, name)), map(str, allowed))
        for name in ("min_iou", "active_above"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"{option_name(name)} is {getattr(self, name)}; it must be from 0 to 1.")
        for name in ("min_count", "most_relations"):
            if getattr(self, name) < 1:
                raise UserError(f"{option_name(name)} is {getattr(self, name)}; it must be at least 1.")

    def require_parses(self, *, given: bool) -> None:
        """Raises ValueError for a choice that parses alone can answer, where none are given."""
        if self.entity_piece == "head" and not given:
            raise UserError(
                "--entity-piece head needs parses, which say what the head word of a phrase is; give --parses or "
                "--spacy, or choose another --entity-piece."
            )

    def describe(self) -> list[dict[str, Any]]:
        """Of each option its `name`, `value`, `default` and `meaning`."""
        return [
            {
                "name": option_name(field.name),
                "value": getattr(self, field.name),
                "default": field.default,
                "meaning": field.metadata["help"],
            }
            for field in dataclasses.fields(self)
        ]

    def number(self, layer: int, head: int) -> str:
        """How the output names a head, such as "10-1"."""
        return f"{layer + self.first_number}-{head + self.first_number}"


def option_name(field: str) -> str:
    """How a command names an option."""
    return "--" + field.replace("_", "-")


def parse_head(text: str, first_number: int = 0) -> tuple[str | None, int, int]:
    """A head as `describe` and users write it: "10-1", or with its graph "cross:2-0"; layer and head from 0.

    Raises:
        ValueError: a text of another form.
    """
    graph, colon, numbers = text.rpartition(":")
    layer, dash, head = numbers.partition("-")
    if not (dash and layer.isdecimal() and head.isdecimal()) or (colon and not graph):
        raise UserError(f"--heads has '{text}'; write a head as LAYER-HEAD such as 10-1, or GRAPH:LAYER-HEAD.")
    if min(int(layer), int(head)) < first_number:
        raise UserError(f"--heads has '{text}', but layers and heads are counted from {first_number}.")
    return graph or None, int(layer) - first_number, int(head) - first_number
