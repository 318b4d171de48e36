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
    """The targets of each objective, by its name."""

    parts: dict[str, Targets] = by_name()


@dataclasses.dataclass(frozen=True)
class PretrainingPreprocessor(Preprocessor):
    """Encodes a caption, or a caption and a second text as a pair, with the masks and targets of all objectives.

    "left" and "right" are not swapped in flipped images (official VL-BERT code).
    """

    prediction_class = PretrainingPrediction
    learns_from = (object,)
    preprocessors: Mapping[str, ObjectivePreprocessor] = dataclasses.field(default_factory=dict)
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
        text_generator, extra_generator = make_generator(text.index).spawn(2)
        is_blank = self.text_tokenizer.is_blank
        draft = TextDraft("" if is_blank else text.words, sample, text=text)
        region_of_token = None
        other_words = None
        if isinstance(text, ChoiceText):
            encoding, region_of_token = self._encode_choice(draft, images, make_generator, text_generator)
        else:
            encoding = self._encode_words(draft, text_generator)
            if draft.words != text.words:
                other_words = draft.words
        targets = self._targets(draft, encoding)
        seed = int(text_generator.integers(2**62))
        record = self.record(text, images, encoding)
        record["text"] = "" if is_blank else draft.words
        if draft.second is not None:
            record["second"] = "" if is_blank else draft.second
        yield EncodedText(
            encoding,
            text.image_index,
            record | draft.record,
            targets,
            seed,
            region_of_token=region_of_token,
            other_words=other_words,
        )
        for preprocessor in self.preprocessors.values():
            for extra_draft, extra_encoding in preprocessor.extra_texts(sample, extra_generator):
                targets = self._targets(extra_draft, extra_encoding)
                yield EncodedText(extra_encoding, (), {}, targets, seed=0, other_words=extra_draft.words)

    def _encode_words(self, draft: TextDraft, generator: np.random.Generator) -> TextEncoding:
        """Encode a caption, or a caption and a second text, after the objectives edited and masked them."""
        text_tokenizer = self.text_tokenizer
        for preprocessor in self.preprocessors.values():
            preprocessor.edit_text(draft, draft.text.index, generator)
        draft.pieces = self._word_pieces(draft.words)
        first_length = sum(map(len, draft.pieces))
        if draft.second is not None:
            draft.pieces += self._word_pieces(draft.second)
        draft.ids = np.array(list(itertools.chain.from_iterable(draft.pieces)), dtype=np.int64)
        for preprocessor in self.preprocessors.values():
            preprocessor.mask(draft, generator)
        if draft.second is None:
            return text_tokenizer.single(draft.ids)
        return text_tokenizer.pair(draft.ids[:first_length], draft.ids[first_length:], self.pair_truncation)

    def _word_pieces(self, words: str) -> list[list[int]]:
        """Return the wordpieces of each word; none for the control that sees no text."""
        if self.text_tokenizer.is_blank:
            return []
        return word_pieces(words, self.text_tokenizer.tokenizer)

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
        if self.drawn == "random":
            number = int(generator.integers(len(examples)))
        else:
            number = text.index % len(examples)
        if isinstance(text.truth, CorrectChoice):
            draft.is_choice = text.truth.number == number
        encoding = examples[number].encoding
        is_of_text = encoding.source >= 0
        # wordpieces that were truncated before the last remaining one are 0; `encoding.place` drops them
        draft.ids = np.zeros(encoding.source.max(initial=-1) + 1, dtype=np.int64)
        draft.ids[encoding.source[is_of_text]] = encoding.input_ids[is_of_text]
        draft.pieces = [[int(piece)] for piece in draft.ids]
        draft.words = self.text_tokenizer.tokenizer.decode(draft.ids)
        for preprocessor in self.preprocessors.values():
            preprocessor.mask(draft, generator)
        input_ids = np.where(is_of_text, encoding.place(draft.ids), encoding.input_ids)
        return dataclasses.replace(encoding, input_ids=input_ids), examples[number].region_of_token

    def _targets(self, draft: TextDraft, encoding: TextEncoding) -> PretrainingTargets:
        targets = {name: preprocessor.targets(draft, encoding) for name, preprocessor in self.preprocessors.items()}
        return PretrainingTargets(targets)


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
    hub_task = "fill-mask"
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
    @override
    def answer_vocabulary(self) -> AnswerVocabulary | None:
        for objective in self.objectives.values():
            if objective.answer_vocabulary is not None:
                return objective.answer_vocabulary
        return None

    @property
    @override
    def needs(self) -> tuple[Ability, ...]:
        needs: list[Ability] = []
        for objective in self.objectives.values():
            needs += objective.needs
        if self.region_masking.predicts_regions and not self.config.mask_pixels:
            needs.append(Ability.MASKED_FEATURES)
        return tuple(dict.fromkeys(needs))

    @override
    def preprocessor(self, text_tokenizer: TextTokenizer) -> PretrainingPreprocessor:
        preprocessors = {name: objective.preprocessor(text_tokenizer) for name, objective in self.objectives.items()}
        choices = None
        drawn = "random"
        if self.choice_preprocessor is not None:
            choices = self.choice_preprocessor(text_tokenizer)
            drawn = self.config.choices.drawn
        return PretrainingPreprocessor(text_tokenizer, preprocessors, self.config.pair_truncation, choices, drawn)

    @override
    def question(self, question: Question) -> Sample:
        masks_boxes = question.boxes_to_mask is not None and len(question.boxes_to_mask) > 0
        can_mask = self.region_masking.predicts_regions
        if (masks_boxes and not can_mask) or not (masks_boxes or MASK in question.text):
            if can_mask:
                boxes = ", or mask boxes"
            else:
                boxes = "; it was pre-trained without masked regions, so mask no boxes"
            raise UserError(f"This run predicts masked words: write {MASK} in the text{boxes}.")
        return question.sample(SampleText(0, question.text, {}), masks_regions=True)

    @override
    def init_weights(self, tokenizer: PreTrainedTokenizerBase, encoder: nn.Module, detector: Detector) -> None:
        """Store the vocabulary, and check that the objectives fit the detector."""
        if tokenizer is not None:
            self.wordpieces = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
        for objective in self.objectives.values():
            objective.check(None, detector, self.config)

    @override
    def check_data(self, info: DatasetInfo, detector: Detector) -> None:
        for objective in self.objectives.values():
            objective.check(info, detector, self.config)

    @override
    def forward(self, batch: Batch, text_regions: TextRegions, encoded: EncoderOutput) -> TaskOutput:
        """Compute the weighted losses of all objectives.

        Returns the losses, and by objective `parts`, the logits, and `details`, the outputs. `logits` is empty [M, 0].
        """
        details: dict[str, ObjectiveOutput] = {}
        transformed = encoded
        if self.region_transform is not None:
            transformed = dataclasses.replace(encoded, regions=self.region_transform(encoded.regions))
        for name, objective in self.objectives.items():
            states = transformed if objective.transforms_regions else encoded
            details[name] = objective(batch.targets.parts[name], batch, text_regions, states, self.word_head)
        return TaskOutput(
            losses={name: objective_output.loss for name, objective_output in details.items()},
            logits=encoded.text.new_zeros(len(batch), 0),
            details=details,
            parts={name: objective_output.logits for name, objective_output in details.items()},
        )

    @override
    def predict(self, output: ModelOutput) -> list[PretrainingPrediction]:
        batch = output.batch
        counts_of: list[dict[str, ObjectiveCounts]] = []  # of each text, by objective
        for _ in range(len(batch)):
            counts_of.append({name: ObjectiveCounts(0, 0, []) for name in self.objectives})
        for name, objective in self.objectives.items():
            items: ObjectiveOutput = output.task.details[name]
            class_names = objective.class_names(output, self.wordpieces, self.config)
            texts = items.text.tolist()
            for text, is_correct in zip(texts, items.is_correct.tolist(), strict=True):
                counts_of[text][name].count += 1
                counts_of[text][name].right += is_correct
            if class_names is not None:
                columns = (items.position.tolist(), items.best.tolist(), items.truth.tolist())
                for text, position, best, truth in zip(texts, *columns, strict=True):
                    item = ItemPrediction(position, class_names[best], class_names[truth])
                    counts_of[text][name].items.append(item)
        predictions = []
        for record, counts in zip(batch.records, counts_of, strict=True):
            if record:  # texts without an image have none
                predictions.append(self.prediction(record, objectives=counts))
        return predictions

    @override
    def predict_answers(self, output: ModelOutput, top_k: int | None = None) -> list[PretrainingPrediction]:
        """Return the prediction for a batch of one text: words for each [MASK], classes of masked regions."""
        answers: dict[str, Any] = {}
        for name, objective in self.objectives.items():
            names = objective.class_names(output, self.wordpieces, self.config)
            answers |= objective.answer(output, output.task.parts[name], names)
        return [self.prediction(output.batch.records[0], **answers)]

    @override
    def answer_lines(self, prediction: PretrainingPrediction) -> list[str]:
        lines: list[str] = []
        for objective in self.objectives.values():
            lines += objective.answer_lines(prediction)
        return lines

    @override
    def correctness(self, prediction: PretrainingPrediction) -> float | None:
        """Return the share of the text's masked items that were predicted correctly; None if none was masked."""
        num_masked = sum(counts.count for counts in prediction.objectives.values())
        if num_masked == 0:
            return None
        return sum(counts.right for counts in prediction.objectives.values()) / num_masked

    @override
    def describe(self, prediction: PretrainingPrediction) -> PredictionSummary:
        """Describe a caption: how many of its masked items each objective predicted correctly, and all predictions."""
        scores = []
        notes = []
        mistakes = []
        for name, counts in prediction.objectives.items():
            objective = name.replace("_", " ")
            kind = name.rpartition("_")[2]
            if counts.count:
                scores.append(f"{counts.right} of {counts.count} {objective}")
            items = []
            for item in counts.items:
                if item.predicted == item.truth:
                    items.append(f"{item.position}: {item.predicted}")
                else:
                    items.append(f"{item.position}: {item.predicted} instead of {item.truth}")
                    mistakes.append((f"{item.truth} ({kind})", f"{item.predicted} ({kind})"))
            if items:
                notes.append(f"{objective}: {', '.join(items)}")
        return PredictionSummary(
            question=prediction.text,
            answer=f"{', '.join(scores)} found" if scores else "nothing was masked",
            note="; ".join(notes),
            mistakes=tuple(mistakes),
        )

    @override
    def metrics(self, predictions: list[PretrainingPrediction]) -> dict[str, float]:
        scores = {}
        for name in self.objectives:
            counts = [prediction.objectives[name] for prediction in predictions]
            num_masked = sum(count.count for count in counts)
            if num_masked:
                scores[name] = sum(count.right for count in counts) / num_masked
        return scores
