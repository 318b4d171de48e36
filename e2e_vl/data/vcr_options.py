"""What users set in `data.config` of VCR."""

from __future__ import annotations

import dataclasses

from e2e_vl.data import vcr_text

CHOSEN = {
    "question": ("answer", "rationale"),
    "condition_on": ("right", "each"),
    "objects": ("all", "mentioned", "r2c"),
}


@dataclasses.dataclass
class VCROptions:
    """What users set in `data.config`. The defaults are those of the official VL-BERT code.

    Attributes:
        question: "answer" (Q->A) or "rationale" (QA->R).
        condition_on: "right": rationales are given the right answer. "each": given each of the four answers, as the
            leaderboard file wants it; a question is then four text indices, and there is nothing to learn.
        objects: which boxes there are. "all" of the image, in file order: its questions can share a detector pass.
            "mentioned": those that question and choices name, in the order of first mention (for rationales those of
            the answers too). "r2c": R2C's choice of them, see `relevant_objects`, in file order.
        people_names: what people are called, in turn.
        turn_names: in training the turn begins with a random name (the official code goes on from question to
            question); otherwise always with the first.
        join_word: between several objects; None leaves it out (R2C).
        ground_words: words that name an object carry its region's vector; False: every word that of the whole image.
        max_pieces: question and choice are cut to so many wordpieces together, [CLS] and [SEP] not counted.
        mask_size: side of the instance masks, that of the detector's RoI maps; None = no masks.
        class_names: the classes 1, 2, ... of objects.
        blank_question: control that reads the choices only.
    """

    question: str = "answer"
    condition_on: str = "right"
    objects: str = "all"
    people_names: list[str] = dataclasses.field(default_factory=lambda: list(vcr_text.NEUTRAL_NAMES))
    turn_names: bool = True
    join_word: str | None = "and"
    ground_words: bool = True
    max_pieces: int = 64
    mask_size: int | None = 14
    class_names: list[str] = dataclasses.field(default_factory=lambda: list(vcr_text.CLASS_NAMES))
    blank_question: bool = False

    def __post_init__(self) -> None:
        for name, choices in CHOSEN.items():
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"data.config.{name} is {getattr(self, name)!r}; it must be one of {', '.join(choices)}."
                )
        if self.condition_on == "each" and self.question != "rationale":
            raise ValueError(
                "data.config.condition_on=each is about rationales; set data.config.question=rationale, or give a run "
                "that was trained with it."
            )
        if self.max_pieces < 2:
            raise ValueError(f"data.config.max_pieces is {self.max_pieces}; question and choice need at least 2.")
        if self.mask_size is not None and self.mask_size < 1:
            raise ValueError(f"data.config.mask_size is {self.mask_size}; give the side of the detector's RoI maps.")
        if not self.people_names or len(set(self.class_names)) != len(self.class_names):
            raise ValueError("data.config needs people_names, and class_names that are all different.")
