"""Pre-training: the sum of the objectives in `tasks/objectives/`, on images and captions.

Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Self

import numpy as np
from jaxtyping import Int64
from torch import nn
from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from detector.errors import UserError
from detector.structures import Detector
from e2e_vl.preprocessing import EncodedText, GeneratorFactory, Preprocessor
from e2e_vl.region_masking import RegionMasking
from e2e_vl.registry import OBJECTIVES, TASKS
from e2e_vl.samples import ChoiceText, CorrectChoice, DatasetInfo, Question, Sample, SampleText
from e2e_vl.structures import Ability, Batch, EncoderOutput, ModelOutput, TaskOutput, TextRegions
from e2e_vl.targets import Targets, by_name
from e2e_vl.tasks.answers import AnswerVocabulary
from e2e_vl.tasks.base import HeadInit, InstanceMasks, PredictionSummary, Sizes, Task, Transform, init_head
from e2e_vl.tasks.config import PretrainingConfig
from e2e_vl.tasks.objectives.base import (
    MASK,
    ItemPrediction,
    MLMHead,
    Objective,
    ObjectiveCounts,
    ObjectiveOutput,
    ObjectivePreprocessor,
    PretrainingPrediction,
    TextDraft,
)
from e2e_vl.text import TextEncoding, TextTokenizer, Truncation, word_pieces
from e2e_vl.transforms import LoadedImage

WORD_BIAS = "word_head.bias"  # the parameter


@dataclasses.dataclass
class PretrainingTargets(Targets):
    """Targets by objective."""

    parts: dict[str, Targets] = by_name()


@dataclasses.dataclass(frozen=True)
class PretrainingPreprocessor(Preprocessor):
    """Encodes a caption, or a caption and a second text as a pair, with the masks and targets of all objectives.

    "left" and "right" are not swapped in flipped images (official VL-BERT code).
    """

    prediction_class = PretrainingPrediction
    learns_from = (object,)
    parts: Mapping[str, ObjectivePreprocessor] = dataclasses.field(default_factory=dict)
    pair_truncation: Truncation = "ends"
    choices: Preprocessor | None = None  # of a task that encodes each choice of a question; None: other data sets
    drawn: Literal["random", "in_turn"] = "random"  # which choice is used, see `ChoiceTextsConfig`

    @override
    def truth_record(self, truth: Any, *, flipped: bool) -> dict[str, Any]:
        return {}  # what is learned of a truth, each objective says itself

    @override
    def encode_text(
        self, text: SampleText, sample: Sample, images: Sequence[LoadedImage], make_generator: GeneratorFactory
    ) -> Iterable[EncodedText]:
        own, other = make_generator(text.index).spawn(2)
        draft = TextDraft("" if self.text_tokenizer.is_blank else text.words, sample, text=text)
        region_of_token = other_words = None
        if isinstance(text, ChoiceText):
            encoding, region_of_token = self._encode_choice(draft, images, make_generator, own)
        else:
            encoding = self._encode_words(draft, own)
            other_words = None if draft.words == text.words else draft.words
        targets = self._targets(draft, encoding)
        seed = int(own.integers(2**62))
        texts = {"text": draft.words} | ({} if draft.second is None else {"second": draft.second})
        if self.text_tokenizer.is_blank:
            texts = dict.fromkeys(texts, "")
        record = self.record(text, images, encoding) | texts | draft.record
        yield EncodedText(
            *(encoding, text.image_index, record, targets, seed),
            region_of_token=region_of_token,
            other_words=other_words,
        )
        for part in self.parts.values():
            for extra, extra_encoding in part.extra_texts(sample, other):
                targets = self._targets(extra, extra_encoding)
                yield EncodedText(extra_encoding, (), {}, targets, seed=0, other_words=extra.words)

    def _encode_words(self, draft: TextDraft, generator: np.random.Generator) -> TextEncoding:
        tokenizer = self.text_tokenizer
        for part in self.parts.values():
            part.edit_text(draft, draft.text.index, generator)
        texts = [draft.words] if draft.second is None else [draft.words, draft.second]
        words = [word_pieces("" if tokenizer.is_blank else one, tokenizer.tokenizer) for one in texts]
        draft.pieces = list(itertools.chain(*words))
        draft.ids = np.array([piece for word in draft.pieces for piece in word], dtype=np.int64)
        for part in self.parts.values():
            part.mask(draft, generator)
        if draft.second is None:
            return tokenizer.single(draft.ids)
        first = sum(map(len, words[0]))
        return tokenizer.pair(draft.ids[:first], draft.ids[first:], self.pair_truncation)

    def _encode_choice(
        self,
        draft: TextDraft,
        images: Sequence[LoadedImage],
        make_generator: GeneratorFactory,
        generator: np.random.Generator,
    ) -> tuple[TextEncoding, Int64[np.ndarray, " L"] | None]:
        """Encode a question with one of its choices; each wordpiece is masked as a separate word.

        Returns the encoding, and the candidate box of each wordpiece (-1 = none), see `EncodedText.region_of_token`.
        """
        if self.choices is None:
            raise UserError("The data set has questions with choices; set task.config.choices.task to their task.")
        text = draft.text
        examples = list(self.choices.encode_text(text, draft.sample, images, make_generator))
        number = int(generator.integers(len(examples))) if self.drawn == "random" else text.index % len(examples)
        draft.is_choice = text.truth.number == number if isinstance(text.truth, CorrectChoice) else None
        encoding = examples[number].encoding
        is_given = encoding.source >= 0
        # truncated wordpieces before the last kept one are 0; `encoding.place` drops them
        draft.ids = np.zeros(encoding.source.max(initial=-1) + 1, dtype=np.int64)
        draft.ids[encoding.source[is_given]] = encoding.input_ids[is_given]
        draft.pieces = [[int(piece)] for piece in draft.ids]
        draft.words = self.text_tokenizer.tokenizer.decode(draft.ids)
        for part in self.parts.values():
            part.mask(draft, generator)
        masked = np.where(is_given, encoding.place(draft.ids), encoding.input_ids)
        return dataclasses.replace(encoding, input_ids=masked), examples[number].region_of_token

    def _targets(self, draft: TextDraft, encoding: TextEncoding) -> PretrainingTargets:
        return PretrainingTargets({name: part.targets(draft, encoding) for name, part in self.parts.items()})


def build_objectives(settings: Mapping[str, Any], sizes: Sizes) -> dict[str, Objective]:
    """Build the objectives with a non-zero weight, in the order of `OBJECTIVES`.

    `settings`: see `PretrainingConfig.objectives`.
    """
    objectives: dict[str, Objective] = {}
    for name, config in PretrainingConfig(objectives=dict(settings)).objectives.items():
        if config.weight:
            objectives[name] = OBJECTIVES[name].cls(sizes, config)
    return objectives


class PretrainingTask(Task):
    """The sum of several objectives. Each loss is a mean over the labelled items of the batch; 0 if there are none."""

    example_call = '"photo.jpg", "a [MASK] on a table"'
    batches_questions = False  # predictions for [MASK] and masked regions are made for one text at a time
    prediction_class = PretrainingPrediction
    transferable = ("",)
    init_from = HeadInit(
        copies={"word_head.": "word_head.", "relationship.": "relationship."},
        random=("",),
        region_classes=("masked_regions.output.",),
        allows_new_modules=True,
    )

    def __init__(self, sizes: Sizes, config: PretrainingConfig, objectives: Mapping[str, Objective]):
        super().__init__()
        self.config = config
        predicts_regions = any(objective.predicts_regions for objective in objectives.values())
        self.region_masking = RegionMasking(config, predicts_regions)
        if config.word_start == "bias":
            self.init_from = dataclasses.replace(type(self).init_from, copies={WORD_BIAS: WORD_BIAS})
        self.objectives = dict(objectives)  # registered as modules below
        self.wordpieces = [f"wordpiece {number}" for number in range(sizes.vocab_size)]  # until `init_weights`
        self.word_head = None
        if any(objective.reads_words for objective in objectives.values()):
            self.word_head = MLMHead(sizes.hidden_size, sizes.vocab_size)
        self.region_transform = None
        if any(objective.transforms_regions for objective in objectives.values()):
            self.region_transform = Transform(sizes.hidden_size, norm=True)
            init_head([self.region_transform["dense"]], "normal")
        for name, objective in objectives.items():
            self.add_module(name, objective)
        self.instance_masks = InstanceMasks.from_settings(config.mask_size, config.mask_at)
        # for questions with choices: the preprocessor and the masks of another task, which is no part of this one
        self.choice_preprocessor: Callable[[TextTokenizer], Preprocessor] | None = None
        if config.choices is not None:
            choice_task = TASKS[config.choices.task].cls.build(sizes, config.choices.config)
            self.choice_preprocessor = choice_task.preprocessor
            self.instance_masks = choice_task.instance_masks

    @classmethod
    @override
    def build(cls, sizes: Sizes, config: PretrainingConfig) -> Self:
        return cls(sizes, config, build_objectives(config.objectives, sizes))

    @property
    def answer_vocabulary(self) -> AnswerVocabulary | None:
        vocabularies = [objective.answer_vocabulary for objective in self.objectives.values()]
        return next((vocabulary for vocabulary in vocabularies if vocabulary is not None), None)

    @property
    def needs(self) -> tuple[Ability, ...]:
        needs = [ability for objective in self.objectives.values() for ability in objective.needs]
        if self.region_masking.predicts_regions and not self.config.mask_pixels:
            needs.append(Ability.MASKED_FEATURES)
        return tuple(dict.fromkeys(needs))

    def preprocessor(self, text_tokenizer: TextTokenizer) -> PretrainingPreprocessor:
        parts = {name: objective.preprocessor(text_tokenizer) for name, objective in self.objectives.items()}
        choices = drawn = None
        if self.choice_preprocessor is not None:
            choices, drawn = self.choice_preprocessor(text_tokenizer), self.config.choices.drawn
        return PretrainingPreprocessor(text_tokenizer, parts, self.config.pair_truncation, choices, drawn)

    def question(self, question: Question) -> Sample:
        masks_boxes = question.boxes_to_mask is not None and len(question.boxes_to_mask) > 0
        can_mask = self.region_masking.predicts_regions
        if (masks_boxes and not can_mask) or not (masks_boxes or MASK in question.text):
            boxes = ", or mask boxes" if can_mask else "; it was pre-trained without masked regions, so mask no boxes"
            raise UserError(f"This run predicts masked words: write {MASK} in the text{boxes}.")
        return question.sample(SampleText(0, question.text, {}), masks_regions=True)

    def init_weights(self, tokenizer: PreTrainedTokenizerBase, encoder: nn.Module, detector: Detector) -> None:
        """Store the vocabulary, and check that the objectives fit the detector."""
        if tokenizer is not None:
            self.wordpieces = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
        for objective in self.objectives.values():
            objective.check(None, detector, self.config)

    def check_data(self, info: DatasetInfo, detector: Detector) -> None:
        for objective in self.objectives.values():
            objective.check(info, detector, self.config)

    def forward(self, batch: Batch, text_regions: TextRegions, encoded: EncoderOutput) -> TaskOutput:
        """Compute the weighted losses of all objectives.

        Returns the losses, and by objective `parts`, the logits, and `details`, the outputs. `logits` is empty [M, 0].
        """
        details = {}
        transformed = encoded
        if self.region_transform is not None:
            transformed = dataclasses.replace(encoded, regions=self.region_transform(encoded.regions))
        for name, objective in self.objectives.items():
            states = transformed if objective.transforms_regions else encoded
            details[name] = objective(batch.targets.parts[name], batch, text_regions, states, self.word_head)
        return TaskOutput(
            losses={name: found.loss for name, found in details.items()},
            logits=encoded.text.new_zeros(len(batch), 0),
            details=details,
            parts={name: found.logits for name, found in details.items()},
        )

    def predict(self, output: ModelOutput) -> list[PretrainingPrediction]:
        batch = output.batch
        found = [{name: ObjectiveCounts(0, 0, []) for name in self.objectives} for _ in range(len(batch))]
        for name, objective in self.objectives.items():
            items: ObjectiveOutput = output.task.details[name]
            names = objective.class_names(output, self.wordpieces, self.config)
            texts = items.text.tolist()
            for text, is_correct in zip(texts, items.is_correct.tolist(), strict=True):
                found[text][name].count += 1
                found[text][name].right += is_correct
            if names is not None:
                columns = items.position.tolist(), items.best.tolist(), items.truth.tolist()
                for text, position, best, truth in zip(texts, *columns, strict=True):
                    found[text][name].items.append(ItemPrediction(position, names[best], names[truth]))
        rows = zip(batch.records, found, strict=True)
        return [self.prediction(record, objectives=own) for record, own in rows if record]

    @override
    def predict_answers(self, output: ModelOutput, top_k: int | None = None) -> list[PretrainingPrediction]:
        """The prediction for a batch of one text: words for each [MASK], classes of masked regions."""
        answers: dict[str, Any] = {}
        for name, objective in self.objectives.items():
            names = objective.class_names(output, self.wordpieces, self.config)
            answers |= objective.answer(output, output.task.parts[name], names)
        return [self.prediction(output.batch.records[0], **answers)]

    def answer_lines(self, prediction: PretrainingPrediction) -> list[str]:
        return [line for objective in self.objectives.values() for line in objective.answer_lines(prediction)]

    def correctness(self, prediction: PretrainingPrediction) -> float | None:
        """Share of the text's masked items that were predicted correctly; None if none was masked."""
        found = prediction.objectives.values()
        total = sum(one.count for one in found)
        return sum(one.right for one in found) / total if total else None

    def describe(self, prediction: PretrainingPrediction) -> PredictionSummary:
        """The caption, how many of its masked items each objective predicted correctly, and all predictions."""
        found, notes, mistakes = [], [], []
        for name, counts in prediction.objectives.items():
            words, kind = name.replace("_", " "), name.rpartition("_")[2]
            if counts.count:
                found.append(f"{counts.right} of {counts.count} {words}")
            wrong = [one for one in counts.items if one.predicted != one.truth]
            mistakes += [(f"{one.truth} ({kind})", f"{one.predicted} ({kind})") for one in wrong]
            if counts.items:
                items = (
                    f"{one.position}: {one.predicted}"
                    + ("" if one.predicted == one.truth else f" instead of {one.truth}")
                    for one in counts.items
                )
                notes.append(f"{words}: {', '.join(items)}")
        return PredictionSummary(
            prediction.text,
            f"{', '.join(found)} found" if found else "nothing was masked",
            note="; ".join(notes),
            mistakes=tuple(mistakes),
        )

    def metrics(self, predictions: list[PretrainingPrediction]) -> dict[str, float]:
        scores = {}
        for name in self.objectives:
            total = sum(one.objectives[name].count for one in predictions)
            if total:
                scores[name] = sum(one.objectives[name].right for one in predictions) / total
        return scores
