"""How VCR's questions and choices become texts, and the settings of the task.

A question is four texts, one per choice, whose words know which boxes they name.

Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float
from torch import Tensor

from detector.errors import UserError
from e2e_vl.converter import check_numbers
from e2e_vl.examples import ImageExample, TextExample, TextPhrases
from e2e_vl.layout import LaidText, cut_fronts
from e2e_vl.samples import AnnotatedObjects, ChoiceText, RightChoice, Sample, SampleText, Sentence
from e2e_vl.targets import Targets, stacked
from e2e_vl.tasks.base import check_choices, check_dropout
from e2e_vl.tasks.heads import NewLayers
from e2e_vl.tasks.vcr_phrases import choice_phrases
from e2e_vl.tasks.vcr_sentences import (
    NEUTRAL_NAMES,
    Piece,
    cut_answers,
    cut_choices,
    cut_rationales,
    encode_sentence,
    names_by_mention,
    names_of,
    number_of_words,
    plain_text,
    rows_by_word_number,
    said_words,
)
from e2e_vl.wording import Draw, Wording


@dataclasses.dataclass(frozen=True)
class VCRConfig:
    """The official VL-BERT code has the same defaults."""

    people_names: tuple[str, ...] = NEUTRAL_NAMES  # what people are called, in turn
    # "box": people take turns in the order of their boxes. "mention": in the order in which sentences name them
    # (R2C, official VisualBERT code).
    names_by: Literal["box", "mention"] = "box"
    # in the order of mention: for people whom only a choice names the turn begins with the first name again, so that
    # two people may share a name (a mistake of R2C's code, which the official VisualBERT code has too)
    names_restart_in_choices: bool = False
    # by boxes and in training the turn begins with a random name (the official code goes on from question to question);
    # otherwise always with the first
    turn_names: bool = True
    join_word: str | None = "and"  # between several objects; None leaves it out (R2C)
    # words that name an object carry its region's vector; False: every word carries the vector of the whole image
    ground_words: bool = True
    # where those stand: "pieces", at all wordpieces of an object's name. "word_number": at one position, the number of
    # the name among the words before they were split, see `rows_by_word_number` (official VisualBERT code).
    ground_at: Literal["pieces", "word_number"] = "pieces"
    # question and choice are cut to this number of wordpieces together, [CLS] and [SEP] not counted
    max_pieces: int = 64
    # how: "longer" takes the last pieces of the longer text, see `cut_answers` and `cut_rationales`. "fronts" takes the
    # first pieces of both, of the choice and of what stands in front, see `cut_fronts`.
    cut: Literal["longer", "fronts"] = "longer"
    # with "fronts": the choice alone is cut, and what stands in front must fit (a mistake of the official VisualBERT
    # code, which takes the length of a pair for the length of what stands in front)
    cut_choices_only: bool = False
    mask_size: int | None = 14  # side of the instance masks and of the detector's RoI maps; None = no masks
    # a mask's cell belongs to the object if its upper left corner does, or (R2C, official VisualBERT code) its centre
    mask_at: Literal["corners", "centres"] = "corners"
    blank_question: bool = False  # control that reads the choices only
    dropout: float = 0.1  # on the summary, before the Linear that scores a choice
    # "sigmoid": a binary cross entropy per choice, mean over all choices (official). "softmax": a cross entropy over
    # the four choices (paper, section 4.2.1).
    loss: Literal["sigmoid", "softmax"] = "sigmoid"
    region_loss_weight: float = 1.0  # weight of the classification of regions; 0 leaves it out
    num_classes: int = 81  # C, classes of regions, the whole image (class 0) included
    region_dropout: float = 0.0  # dropout between the two Linears of that classification
    initializer_range: float = 0.02  # standard deviation of their start values
    new_layers: NewLayers = "official"  # start of the Linear that scores a choice, see `e2e_vl.tasks.heads.start_head`

    def __post_init__(self) -> None:
        check_choices(self)
        check_dropout("dropout", self.dropout)
        check_dropout("region_dropout", self.region_dropout)
        check_numbers(self, "task.config.", not_negative=["region_loss_weight"])
        if self.max_pieces < 2:
            raise UserError(f"task.config.max_pieces is {self.max_pieces}; question and choice need at least 2.")
        if self.mask_size is not None and self.mask_size < 1:
            raise UserError(f"task.config.mask_size is {self.mask_size}; give the side of the detector's RoI maps.")
        if self.names_restart_in_choices and self.names_by != "mention":
            raise UserError(
                f"task.config.names_restart_in_choices needs the order of mention, but task.config.names_by is "
                f"'{self.names_by}'; set it to mention."
            )
        if self.cut_choices_only and self.cut != "fronts":
            raise UserError(
                f"task.config.cut_choices_only needs texts that are cut at their fronts, but task.config.cut is "
                f"'{self.cut}'; set it to fronts."
            )
        if not self.people_names:
            raise UserError("task.config.people_names needs at least one name.")


@dataclasses.dataclass
class VCRTargets(Targets):
    """Which choices are right."""

    is_right: float | np.float32 | Float[Tensor, " M"] | None = stacked()  # 1 for the right choice of each four


@dataclasses.dataclass(frozen=True)
class VCRWording(Wording):
    """Four texts per question, one per choice; words that name objects know the row of the object's box."""

    learns_from = (RightChoice,)
    config: VCRConfig = dataclasses.field(default_factory=VCRConfig)

    def no_target(self) -> VCRTargets:
        return VCRTargets(np.float32(0))

    def word(
        self, text: SampleText, sample: Sample, images: Sequence[ImageExample], draw: Draw
    ) -> Iterable[TextExample]:
        if isinstance(text, ChoiceText):
            yield from self._choices(text, sample, images, draw)
        else:
            yield self._other(text, images)

    def _other(self, text: SampleText, images: Sequence[ImageExample]) -> TextExample:
        """A text of joined data that has phrases and no choices; it is cut to `max_pieces` too."""
        if not self.lacks_target(text):
            raise UserError(
                f"'{text.words}' has no four choices, so VCR has nothing to learn from it; leave its data out, or set "
                "phrases.weight if they state what their phrases name."
            )
        mirrored = bool(text.looks_at) and images[text.looks_at[0]].placement.flipped
        pieces = self.writer.pieces(text.words, mirrored=mirrored)
        laid = self.writer.single(pieces[: self.config.max_pieces])
        record = self.record(text, images, laid) | {"sent": text.words}
        return TextExample(laid, text.looks_at, record, self.no_target())

    def _choices(
        self, text: ChoiceText, sample: Sample, images: Sequence[ImageExample], draw: Draw
    ) -> Iterable[TextExample]:
        [stated] = sample.images
        names, rows = self._names(text, stated.objects, stated.candidates, draw)
        in_choices = self._names_in_choices(text, stated.objects, names)
        fronts, choices = self._pieces(text, names, in_choices, rows)
        join_word = self.config.join_word
        record = self.record(text, images) | {
            "sent": " ".join(plain_text(sentence, names, join_word) for sentence in text.query),
            "choices": [plain_text(*named, join_word) for named in zip(text.choices, in_choices, strict=True)],
            "named_boxes": [
                [name, box.tolist()]
                for name, row, box in zip(names, rows, stated.objects.boxes, strict=True)
                if row >= 0
            ],
        }
        if sample.is_asked:
            record["question"] = record["sent"]
            record["objects"] = [name for name, row in zip(names, rows, strict=True) if row >= 0]
        boxes = self._phrase_boxes(text, images[text.looks_at[0]])
        for number, (query, choice) in enumerate(zip(fronts, choices, strict=True)):
            laid = self.writer.pair([piece.id for piece in query], [piece.id for piece in choice])
            yield TextExample(
                laid,
                text.looks_at,
                record,
                VCRTargets(None if text.truth is None else np.float32(number == text.truth.number)),
                region_of_token=self._regions_of_words(laid, query, choice),
                phrases=self._phrases(text, laid, (query, choice), (names, in_choices[number]), number, boxes),
            )

    def _phrases(
        self,
        text: ChoiceText,
        laid: LaidText,
        pieces: tuple[list[Piece], list[Piece]],
        names: tuple[list[str], list[str]],
        choice: int,
        boxes: np.ndarray | None,
    ) -> TextPhrases | None:
        """The phrases of one of the texts; pieces and names are of what stands in front and of the choice."""
        if not self.writer.marks_phrases:
            return None
        sentences = [*((one, names[0]) for one in text.query), (text.choices[choice], names[1])]
        *front, last = ([word for word, _ in said_words(*one, self.config.join_word)] for one in sentences)
        return choice_phrases(laid, pieces, ([word for words in front for word in words], last), boxes)

    def _phrase_boxes(self, text: ChoiceText, image: ImageExample) -> np.ndarray | None:
        """Boxes that names point at, by row; None where names are no phrases.

        Raises:
            UserError: a name would carry the region that it is to point at.
        """
        if not (text.names_are_phrases and self.writer.marks_phrases):
            return None
        if self.config.ground_words:
            raise UserError(
                "data.config.names_are_phrases asks which region a name means, but task.config.ground_words adds that "
                "region to the name; set task.config.ground_words to false, or names_are_phrases."
            )
        return image.boxes

    def _regions_of_words(self, laid: LaidText, query: list[Piece], choice: list[Piece]) -> np.ndarray | None:
        """int64 [L]; None: words carry no region."""
        if not self.config.ground_words:
            return None
        if self.config.ground_at == "word_number":
            return rows_by_word_number(laid, query, choice)
        return laid.place([piece.row for piece in (*query, *choice)])

    def _names(
        self, text: ChoiceText, objects: AnnotatedObjects, candidates: Sequence[int] | None, draw: Draw
    ) -> tuple[list[str], list[int]]:
        """What each object of the question is called in front, and the row of its box (-1 = it has none)."""
        people, start = self.config.people_names, 0
        if self.writer.training and self.config.turn_names:
            # the third draw: the first two decide about the image
            start = int(draw(text.index).random(3)[2] * len(people))
        kept = range(len(objects)) if candidates is None else candidates
        names, rows = list(objects.names), [-1] * len(objects)
        called = names_of([objects.names[number] for number in kept], people, start)
        for row, (number, name) in enumerate(zip(kept, called, strict=True)):
            names[number], rows[number] = name, row
        if self.config.names_by == "mention":
            said = [token for sentence in text.query for token in sentence]
            called = names_by_mention(said, objects.names, people, {})
            names = [called.get(number, name) for number, name in enumerate(objects.names)]
        return names, rows

    def _names_in_choices(self, text: ChoiceText, objects: AnnotatedObjects, names: list[str]) -> list[list[str]]:
        """What each object is called in each of the choices."""
        if self.config.names_by == "box":
            return [names] * len(text.choices)
        said = {number for sentence in text.query for token in sentence if isinstance(token, list) for number in token}
        known, people = {number: names[number] for number in said}, self.config.people_names
        restarts = self.config.names_restart_in_choices
        called = [names_by_mention(one, objects.names, people, known, restarts=restarts) for one in text.choices]
        return [[own.get(number, name) for number, name in enumerate(names)] for own in called]

    def _pieces(
        self, text: ChoiceText, names: list[str], in_choices: list[list[str]], rows: list[int]
    ) -> tuple[list[list[Piece]], list[list[Piece]]]:
        """Wordpieces of what stands in front of each of the four choices, and of the choices, cut to their limit."""
        join_word, limit = self.config.join_word, self.config.max_pieces

        def encode(sentence: Sentence, names: list[str], first_word: int = 0) -> list[Piece]:
            if self.writer.is_blank:
                return []
            return encode_sentence(sentence, names, rows, self.writer.tokenizer, join_word, first_word)

        front, words = [], 0
        for sentence in text.query:
            front.append([] if self.config.blank_question else encode(sentence, names, words))
            words += number_of_words(sentence, join_word)
        choices = [encode(*named) for named in zip(text.choices, in_choices, strict=True)]
        if self.config.cut == "longer":
            cut = cut_answers if len(front) == 1 else cut_rationales
            cut(*front, choices, limit)
        query = [piece for sentence in front for piece in sentence]
        if self.config.cut == "longer":
            return [query] * len(choices), choices
        if self.config.cut_choices_only:
            cut_choices(query, choices, limit)
            return [query] * len(choices), choices
        lost = [cut_fronts(len(query), len(choice), limit) for choice in choices]
        return (
            [query[number:] for number, _ in lost],
            [choice[number:] for choice, (_, number) in zip(choices, lost, strict=True)],
        )
