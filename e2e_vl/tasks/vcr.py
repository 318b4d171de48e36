"""VCR: which of four answers, or of four rationales, is right?

The texts of a batch come in fours: the choices of one question.

Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from detector.errors import UserError
from detector.images import load_image
from detector.interface import Detector
from detector.structures import Loss
from e2e_vl.drawing import draw_boxes
from e2e_vl.evaluation.vcr import CHOICES, join_predictions, joint_metrics, write_submission
from e2e_vl.layout import TextWriter
from e2e_vl.records import Count, FourNumbers, Score
from e2e_vl.samples import ChoiceText, DataFacts, Question, Sample
from e2e_vl.structures import Ability, Batch, EncoderOutput, ModelOutput, TaskOutput, TextRegions, at_least_float32
from e2e_vl.tasks.base import HeadStart, PredictionWords, Records, Task, check_masks
from e2e_vl.tasks.heads import Head, Sizes, Transform
from e2e_vl.tasks.prediction_records import PredictionRecord, check_lengths
from e2e_vl.tasks.vcr_sentences import PERSON, read_sentence
from e2e_vl.tasks.vcr_wording import VCRConfig, VCRTargets, VCRWording
from e2e_vl.wording import ONLY_PHRASES

MOVED = ("people_names", "turn_names", "join_word", "ground_words", "max_pieces", "mask_size", "blank_question")


class VCRPrediction(PredictionRecord, kw_only=True):
    """A prediction in a file."""

    sent: str
    file_name: str
    choices: tuple[str, ...]
    probabilities: tuple[Score, ...]
    choice: Count
    label: Count | None
    named_boxes: tuple[tuple[str, FourNumbers], ...]

    def __post_init__(self) -> None:
        check_lengths(choices=self.choices, probabilities=self.probabilities)
        if max(self.choice, self.label or 0) >= len(self.choices):
            raise ValueError(f"there are {len(self.choices)} choices, and 'choice' or 'label' is another one")


class VCRTask(Task):
    """A score per choice from its summary; beside it, every region is classified from its output state."""

    example_call = """
    "photo.jpg",
    "Why is [0] smiling at [1] ?",
    boxes=["person:10,20,80,200", "person:90,30,160,210"],
    choices=["[1] told a joke", "[0] is tired", "it is raining", "[1] has left"]"""
    writes_submission = True
    prediction_record = VCRPrediction
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
    def upgrade_rules(cls, task: dict[str, Any], given: frozenset[str]) -> None:
        if task.get("cut") == "choice":
            task |= {"cut": "fronts", "cut_choices_only": True}
        switch = "names_restart_in_choices"
        if task.get("names_by") == "mention" and switch not in task and not given & {switch, "names_by"}:
            raise UserError(
                f"`names_by: mention` of this run may mean two rules, because {switch} is not set; set it to true for "
                "a run that was saved before there was this setting (two people might share a name), or else to false."
            )

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
        """Score the four choices of U questions; texts that have phrases only are no questions.

        Returns:
            `logits` float32 [U, 4]; the loss `choice` if the batch has labels (count: choices with "sigmoid", questions
            with "softmax"), and with it `region_class`, already weighted (count: regions of all choices).

        Raises:
            ValueError: texts with a target that do not come in fours, or a class beyond `num_classes`.
        """
        targets = batch.targets or VCRTargets()
        number = len(batch) if targets.known is None else int(targets.known.sum())
        if number % CHOICES:
            raise UserError(f"VCR's texts come in fours, one per choice; this batch has {number} texts.")
        scores = at_least_float32(self.head(targets.with_target(encoded.summary)))
        logits = scores.view(number // CHOICES, CHOICES)
        losses = {}
        if targets.is_right is not None:
            losses["choice"] = self._choice_loss(logits, targets.with_target(targets.is_right).view_as(logits))
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
        """Every region of every choice counts, the whole image as class 0."""
        kept = regions.attend
        if batch.targets.known is not None:
            kept = kept & batch.targets.known[:, None]
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

        What they share has `named_boxes`, a list of [name, box in pixels of the original image]. Phrases
        (`grounded`) are those of the question with the chosen answer. A text that has phrases only keeps its record.

        As in the official code it is a softmax, whichever loss was trained.
        """
        probabilities = output.task.logits.softmax(dim=1).tolist()
        best = output.task.logits.argmax(dim=1).tolist()
        others = [record for record in batch.records if record.get(ONLY_PHRASES)]
        own = [record for record in batch.records if not record.get(ONLY_PHRASES)]
        return others + [
            {**own[CHOICES * number + choice], "probabilities": shares, "choice": choice}
            for number, (shares, choice) in enumerate(zip(probabilities, best, strict=True))
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
