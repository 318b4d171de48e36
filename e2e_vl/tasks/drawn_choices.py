"""Pre-training on questions with several choices: one choice of each is drawn, worded as by the task that judges it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from jaxtyping import Int64

from e2e_vl.examples import ImageExample, TextExample
from e2e_vl.layout import LaidText
from e2e_vl.samples import ChoiceText, RightChoice, Sample
from e2e_vl.wording import Draw, Wording


@dataclasses.dataclass(frozen=True)
class ChoiceTextsConfig:
    """Who words questions with choices, and which of the choices is read."""

    task: str  # the task that words them, a key of TASKS in e2e_vl/engine/build.py; it cuts them by its own rule
    config: dict[str, Any] = dataclasses.field(default_factory=dict)  # fields of that task's config
    # "random": one of the choices, drawn anew in each epoch. "in_turn": of text i the choice i modulo their number, in
    # every epoch (VisualBERT's code, by mistake)
    drawn: Literal["random", "in_turn"] = "random"


@dataclasses.dataclass(frozen=True)
class ChoiceDraw:
    """Draws one choice of a question. It is sent to data workers."""

    wording: Wording  # yields one text per choice, in their order
    drawn: Literal["random", "in_turn"] = "random"

    def __call__(
        self,
        text: ChoiceText,
        sample: Sample,
        images: Sequence[ImageExample],
        draw: Draw,
        generator: np.random.Generator,
    ) -> tuple[TextExample, bool | None]:
        """The text of one choice, and whether it is the right one; None where nobody says."""
        examples = list(self.wording.word(text, sample, images, draw))
        is_random = self.drawn == "random"
        number = int(generator.integers(len(examples))) if is_random else text.index % len(examples)
        return examples[number], text.truth.number == number if isinstance(text.truth, RightChoice) else None


def given_pieces(laid: LaidText) -> Int64[np.ndarray, " pieces"]:
    """The wordpieces that a text was laid out from; 0 for those that were cut off before the last one that stays."""
    is_given = laid.source >= 0
    pieces = np.zeros(laid.source.max(initial=-1) + 1, dtype=np.int64)
    pieces[laid.source[is_given]] = laid.input_ids[is_given]
    return pieces


def with_pieces(laid: LaidText, pieces: Int64[np.ndarray, " pieces"]) -> LaidText:
    """A copy with other wordpieces in the places of the given ones."""
    return dataclasses.replace(laid, input_ids=np.where(laid.source >= 0, laid.place(pieces), laid.input_ids))
