"""VCR: which of four answers, or of four rationales, is right?

The texts of a batch come in fours: the choices of one question.

Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from detector.errors import UserError
from detector.images import load_image
from detector.interface import Detector
from detector.structures import Loss
from e2e_vl.converter import check_numbers
from e2e_vl.drawing import draw_boxes
from e2e_vl.evaluation.vcr import CHOICES, join_predictions, joint_metrics, write_submission
from e2e_vl.examples import ImageExample, TextExample
from e2e_vl.layout import LaidText, TextWriter
from e2e_vl.samples import AnnotatedObjects, ChoiceText, DataFacts, Question, Sample, Sentence
from e2e_vl.structures import Ability, Batch, EncoderOutput, ModelOutput, TaskOutput, TextRegions, at_least_float32
from e2e_vl.targets import Targets, stacked
from e2e_vl.tasks.base import HeadStart, PredictionWords, Records, Task, check_choices, check_dropout, check_masks
from e2e_vl.tasks.heads import Head, NewLayers, Sizes, Transform
from e2e_vl.tasks.vcr_sentences import (
    NEUTRAL_NAMES,
    PERSON,
    Piece,
    cut_answers,
    cut_choices,
    cut_rationales,
    encode_sentence,
    names_by_mention,
    names_of,
    number_of_words,
    plain_text,
    read_sentence,
    rows_by_word_number,
)
from e2e_vl.wording import Draw, Wording

MOVED = ("people_names", "turn_names", "join_word", "ground_words", "max_pieces", "mask_size", "blank_question")


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
    # how: "longer" takes the last pieces of the longer text, see `cut_answers` and `cut_rationales`. "choice" takes the
    # first pieces of the choice, and what stands in front must fit (official VisualBERT code).
    cut: Literal["longer", "choice"] = "longer"
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
        if not self.people_names:
            raise UserError("task.config.people_names needs at least one name.")


@dataclasses.dataclass
class VCRTargets(Targets):
    """Which choices are right."""

    is_right: float | np.float32 | Float[Tensor, " M"] | None = stacked()  # 1 for the right choice of each four


@dataclasses.dataclass(frozen=True)
class VCRWording(Wording):
    """Four texts per question, one per choice; words that name objects know the row of the object's box."""

    config: VCRConfig = dataclasses.field(default_factory=VCRConfig)

    def word(
        self, text: ChoiceText, sample: Sample, images: Sequence[ImageExample], draw: Draw
    ) -> Iterable[TextExample]:
        [stated] = sample.images
        names, rows = self._names(text, stated.objects, stated.candidates, draw)
        in_choices = self._names_in_choices(text, stated.objects, names)
        query, choices = self._pieces(text, names, in_choices, rows)
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
        for number, choice in enumerate(choices):
            laid = self.writer.pair([piece.id for piece in query], [piece.id for piece in choice])
            yield TextExample(
                laid,
                text.looks_at,
                record,
                VCRTargets(None if text.truth is None else np.float32(number == text.truth.number)),
                region_of_token=self._regions_of_words(laid, query, choice),
            )

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
    ) -> tuple[list[Piece], list[list[Piece]]]:
        """Wordpieces of what stands in front, and of the four choices, cut to their limit."""
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
        if self.config.cut == "choice":
            cut_choices(query, choices, limit)
        return query, choices


class VCRTask(Task):
    """A score per choice from its summary; beside it, every region is classified from its output state."""

    example_call = """
    "photo.jpg",
    "Why is [0] smiling at [1] ?",
    boxes=["person:10,20,80,200", "person:90,30,160,210"],
    choices=["[1] told a joke", "[0] is tired", "it is raining", "[1] has left"]"""
    writes_submission = True
    second_run = ("data.config.condition_on=each",)  # rationales, given each of the four answers
    second_run_option = "--rationale-run"
    copies_first_segment = True
    starts_from = HeadStart(
        copies={"masked_regions.transform.": "region_classifier.transform."},
        difference=("relationship.head.", "head.output."),
        random=("region_classifier.output.", "head.output."),
    )

    def __init__(self, hidden_size: int, config: VCRConfig | None = None, summary_size: int | None = None):
        super().__init__()
        self.config = config or VCRConfig()
        self.head = Head(summary_size or hidden_size, None, self.config.dropout, self.config.new_layers)
        self.region_classifier = None
        if self.config.region_loss_weight > 0:
            self.region_classifier = Head(
                hidden_size,
                self.config.num_classes,
                self.config.region_dropout,
                self.config.initializer_range,
                transform=Transform(hidden_size),
            )

    @classmethod
    def build(cls, sizes: Sizes, config: VCRConfig) -> Self:
        """A choice is scored from the summary, a region from its output state."""
        return cls(sizes.hidden_size, config, sizes.summary_size)

    @property
    def needs(self) -> tuple[Ability, ...]:
        words = (Ability.NAMED_REGIONS,) if self.config.ground_words else ()
        return (Ability.SUMMARY_OF_PAIR, *words)

    @property
    def mask_size(self) -> int | None:
        return self.config.mask_size

    @property
    def mask_at(self) -> str:
        return self.config.mask_at

    @classmethod
    def upgrade(cls, task: dict[str, Any], data: dict[str, Any]) -> None:
        """How sentences are put into words was an option of the reader."""
        options = data.setdefault("config", {})
        task.update({key: options.pop(key) for key in MOVED if key in options})

    @classmethod
    def own_words(cls, config: VCRConfig) -> Iterable[str]:
        """What people are called."""
        return (*config.people_names, config.join_word or "")

    def wording(self, writer: TextWriter) -> VCRWording:
        """Raises ValueError for a length limit that is not this task's own."""
        if writer.max_length is not None:
            raise UserError("VCR cuts question and choice by a rule of its own; set task.config.max_pieces instead.")
        return VCRWording(writer, self.config)

    def question(self, question: Question) -> Sample:
        """A user's question with four choices; texts name the given boxes as [0] or [1,2].

        Boxes without a class name are people; without outlines the whole rectangle counts as the object.

        Raises:
            ValueError: no boxes, a class that the data do not have, or other than four choices.
        """
        question.refuse_hidden()
        given = question.boxes
        if given is None:
            raise UserError("VCR's boxes are given, not found: give boxes, such as person:10,20,80,200.")
        if len(question.choices) != CHOICES:
            raise UserError(f"VCR chooses one of four texts, here are {len(question.choices)}; give four choices.")
        if not question.wants_answer and question.answer is not None:
            raise UserError("This run chooses answers, so it takes none; leave the answer out.")
        if question.wants_answer and question.answer is None:
            raise UserError(
                "This run chooses rationales, so it needs the answer that they are for; give the answer too."
            )
        names = given.names or (PERSON,) * len(given)
        known = question.class_names or names
        unknown = [name for name in names if name not in known]
        if unknown:
            raise UserError(
                f"{given.origin}: the class '{unknown[0]}' is none of the run's {len(known)} classes "
                f"({', '.join(known[:4])}, ...)."
            )
        corners = [np.array([[x1, y1], [x2 + 1, y1], [x2 + 1, y2 + 1], [x1, y2 + 1]]) for x1, y1, x2, y2 in given.boxes]
        objects = dataclasses.replace(
            given,
            classes=np.array([known.index(name) for name in names], dtype=np.int64),
            names=names,
            outlines=given.outlines or [[rectangle] for rectangle in corners],
        )
        texts = [question.text] if question.answer is None else [question.text, question.answer]
        text = ChoiceText(
            0,
            question.text,
            {"annot_id": "asked", "kind": "rationale" if question.answer else "answer", "label": None},
            query=tuple(read_sentence(one, len(given)) for one in texts),
            choices=tuple(read_sentence(one, len(given)) for one in question.choices),
        )
        return question.sample(text, objects=objects)

    def check_data(self, facts: DataFacts, detector: Detector) -> None:
        """The data's classes and the size of the masks must fit the region classifier and the detector's maps."""
        names = facts.class_names
        if self.region_classifier is not None and names is not None and len(names) >= self.config.num_classes:
            raise UserError(
                f"task.config.num_classes is {self.config.num_classes}, but the data have {len(names)} classes and the "
                f"whole image is one more; set it to {len(names) + 1}."
            )
        check_masks(self.config.mask_size, detector)

    def forward(self, batch: Batch, regions: TextRegions, encoded: EncoderOutput) -> TaskOutput:
        """Score the four choices of U questions.

        Returns:
            `logits` float32 [U, 4]; the loss `choice` if the batch has labels (count: choices with "sigmoid", questions
            with "softmax"), and with it `region_class`, already weighted (count: regions of all texts).

        Raises:
            ValueError: texts that do not come in fours, or a class beyond `num_classes`.
        """
        if len(batch) % CHOICES:
            raise UserError(f"VCR's texts come in fours, one per choice; this batch has {len(batch)} texts.")
        logits = at_least_float32(self.head(encoded.summary)).view(-1, CHOICES)
        losses = {}
        if batch.targets is not None and batch.targets.is_right is not None:
            losses["choice"] = self._choice_loss(logits, batch.targets.is_right.view(-1, CHOICES))
            if self.region_classifier is not None:
                losses["region_class"] = self._region_loss(batch, regions, encoded.regions)
        return TaskOutput(losses=losses, logits=logits)

    def _choice_loss(self, logits: Float[Tensor, "U 4"], is_right: Float[Tensor, "U 4"]) -> Loss:
        if self.config.loss == "sigmoid":
            total = F.binary_cross_entropy_with_logits(logits, is_right.to(logits.dtype), reduction="sum")
            return Loss(total=total, count=total.new_tensor(float(logits.numel())).detach())
        total = F.cross_entropy(logits, is_right.argmax(dim=1), reduction="sum")
        return Loss(total=total, count=total.new_tensor(float(len(logits))).detach())

    def _region_loss(self, batch: Batch, regions: TextRegions, states: Float[Tensor, "M R E"]) -> Loss:
        """Every region of every text counts, the whole image as class 0."""
        kept = regions.attend
        classes = regions.gather(batch.region_labels.classes, fill=-1)[kept] + 1
        if len(classes) and int(classes.max()) >= self.config.num_classes:
            raise UserError(
                f"A region has the class {int(classes.max())}, but task.config.num_classes is "
                f"{self.config.num_classes}, the whole image included; set it to the number of classes plus one."
            )
        scores = at_least_float32(self.region_classifier(states[kept]))
        total = F.cross_entropy(scores, classes, reduction="sum") * self.config.region_loss_weight
        return Loss(total=total, count=kept.sum().to(total.dtype))

    def predict(self, batch: Batch, output: ModelOutput) -> Records:
        """One record per question: what its texts share plus `probabilities` (four, softmax) and `choice`.

        What they share has `named_boxes`, a list of [name, box in pixels of the original image].

        As in the official code it is a softmax, whichever loss was trained.
        """
        probabilities = output.task.logits.softmax(dim=1).tolist()
        best = output.task.logits.argmax(dim=1).tolist()
        return [
            {**record, "probabilities": shares, "choice": choice}
            for record, shares, choice in zip(batch.records[::CHOICES], probabilities, best, strict=True)
        ]

    def correct(self, record: dict[str, Any]) -> float | None:
        """1 if the right choice was made, 0 if not; None where the right one is unknown (test split)."""
        return None if record["label"] is None else float(record["choice"] == record["label"])

    def metrics(self, records: Records) -> dict[str, float]:
        """`accuracy` over the questions with a label, `accuracy/<family>` where records have a family.

        Whether it is the accuracy of Q->A or of QA->R is the data's `question`. Without any label there is no accuracy.
        """
        scores: dict[str, list[float]] = defaultdict(list)
        for record in records:
            if record["label"] is not None:
                scores["accuracy"].append(self.correct(record))
                if "family" in record:
                    scores[f"accuracy/{record['family']}"].append(self.correct(record))
        return {name: sum(values) / len(values) for name, values in sorted(scores.items())}

    def draw(self, record: dict[str, Any]) -> np.ndarray:
        """The objects that the sentences may name, with the names that they have there."""
        names, boxes = zip(*record["named_boxes"], strict=True) if record["named_boxes"] else ((), ())
        return draw_boxes(load_image(record["file_name"], "RGB"), boxes, names)

    def describe(self, record: dict[str, Any]) -> PredictionWords:
        """The question, the chosen and the right text, and the probability of the right one if it was not chosen."""
        label, shares = record["label"], record["probabilities"]
        return PredictionWords(
            record["sent"],
            record["choices"][record["choice"]],
            shares[record["choice"]],
            "" if label is None else record["choices"][label],
            "" if label in (None, record["choice"]) else f"the right choice has {shares[label]:.2f}",
            record.get("family") or "",
        )

    def write_submission(self, path: Path, records: Records, second: Records | None = None) -> None:
        """The leaderboard's CSV of 21 columns: answers, and rationales given each answer (`second`)."""
        write_submission(path, join_predictions(records, second or []))

    def joint_metrics(self, records: Records, second: Records) -> dict[str, float]:
        """ "Q->A", "QA->R" and "Q->AR"; empty without labels."""
        return {} if any(record["label"] is None for record in records) else joint_metrics(records, second)

    def ranked(self, record: dict[str, Any]) -> list[tuple[str, float]]:
        """The choices with their probabilities, best first."""
        return sorted(zip(record["choices"], record["probabilities"], strict=True), key=lambda pair: -pair[1])
