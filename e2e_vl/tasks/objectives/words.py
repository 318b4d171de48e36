"""Masked language modelling with visual clues, and on a text-only corpus (VL-BERT, section 3.3).

Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Int64
from torch import Tensor
from typing_extensions import override

from detector.errors import UserError
from detector.structures import Detector
from e2e_vl.samples import DatasetInfo, HumanAnswers, Sample
from e2e_vl.structures import Ability, Batch, EncoderOutput, ModelOutput, TextRegions, at_least_float32
from e2e_vl.targets import Targets, per_wordpiece
from e2e_vl.tasks.config import MaskedTextConfig, MaskedWordsConfig, PretrainingConfig
from e2e_vl.tasks.objectives.base import (
    MASK,
    NO_LABEL,
    MLMHead,
    Objective,
    ObjectiveOutput,
    ObjectivePreprocessor,
    PretrainingPrediction,
    TextDraft,
    classified,
    format_ranked,
    top_classes,
)
from e2e_vl.text import TextEncoding, TextTokenizer, word_pieces


@dataclasses.dataclass
class WordLabels(Targets):
    """Labels of the wordpieces."""

    # original ids of the masked wordpieces; -1 elsewhere
    labels: Int64[np.ndarray, " L"] | Int64[Tensor, "M L"] | None = per_wordpiece(fill=NO_LABEL)


@dataclasses.dataclass(frozen=True)
class WordMasking(ObjectivePreprocessor):
    """Masks random words of captions; in a user's text only its [MASK] tokens are predicted."""

    of_images: ClassVar[bool] = True  # masks texts with an image; False: texts without an image
    config: MaskedWordsConfig = dataclasses.field(default_factory=MaskedWordsConfig)

    @override
    def edit_text(self, draft: TextDraft, index: int, generator: np.random.Generator) -> None:
        """Append an answer to the question, separated by one question mark."""
        if self.config.answer == "left_out" or draft.sample.from_user or draft.has_image != self.of_images:
            return
        if isinstance(draft.text.truth, HumanAnswers):
            answers = draft.text.truth.answers
            answer = answers[int(generator.integers(len(answers)))]
            if self.config.answer == "letters":
                answer = " ".join(answer)
            draft.words = f"{draft.words.rstrip(' ?')} ? {answer}"

    @override
    def mask(self, draft: TextDraft, generator: np.random.Generator) -> None:
        if draft.has_image != self.of_images:
            return
        if draft.sample.from_user:
            mask_id = self.text_tokenizer.tokenizer.mask_token_id
            draft.labels = np.where(draft.ids == mask_id, draft.ids, NO_LABEL)
        else:
            draft.ids, draft.labels = self.mask_words(draft.pieces, generator)

    def mask_words(
        self, words: Sequence[Sequence[int]], generator: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return ids and labels after masking with the configured settings, see the function `mask_words`."""
        config = self.config
        if not config.whole_words:
            words = [[piece] for piece in itertools.chain.from_iterable(words)]
        tokenizer = self.text_tokenizer.tokenizer
        return mask_words(
            words,
            generator,
            tokenizer.mask_token_id,
            len(tokenizer),
            config.probability,
            always_mask=config.always_mask,
        )

    @override
    def targets(self, draft: TextDraft, encoding: TextEncoding) -> WordLabels:
        if draft.has_image != self.of_images or draft.labels is None:  # texts of other objectives may have no labels
            return WordLabels(np.full_like(encoding.source, NO_LABEL))
        return WordLabels(encoding.place(draft.labels, fill=NO_LABEL))


def mask_words(
    words: Sequence[Sequence[int]],
    generator: np.random.Generator,
    mask_id: int,
    vocab_size: int,
    probability: float = 0.15,
    *,
    always_mask: bool = False,
) -> tuple[Int64[np.ndarray, " pieces"], Int64[np.ndarray, " pieces"]]:
    """Mask random words of a text (official VL-BERT code).

    Whole words are chosen. 80 % of them become [MASK] at all their wordpieces; at 10 %, each wordpiece is replaced by a
    random vocabulary entry, possibly a special token; 10 % are unchanged. A text may have no chosen word.

    Args:
        always_mask: replace all chosen words by [MASK] (paper, section 3.3).

    Returns:
        Per wordpiece: the ids after masking, and the labels, which are the original ids of the chosen words and
        `NO_LABEL` elsewhere.
    """
    lengths = np.array([len(word) for word in words], dtype=np.int64)
    ids = np.array(list(itertools.chain.from_iterable(words)), dtype=np.int64)
    drawn = np.repeat(generator.random(len(words)), lengths)
    labels = np.where(drawn < probability, ids, NO_LABEL)
    mask_share = 1.0 if always_mask else 0.8
    masked = drawn < probability * mask_share
    replaced = (drawn < probability * 0.9) & ~masked & (labels != NO_LABEL)
    ids[masked] = mask_id
    ids[replaced] = generator.integers(vocab_size, size=int(replaced.sum()))
    return ids, labels


class MaskedWords(Objective):
    """Cross entropy over the vocabulary, averaged over all masked wordpieces of the batch."""

    needs = (Ability.WORD_EMBEDDINGS,)
    reads_words = True
    config: MaskedWordsConfig

    @override
    def preprocessor(self, text_tokenizer: TextTokenizer) -> WordMasking:
        return WordMasking(text_tokenizer, self.config)

    @override
    def check(self, info: DatasetInfo | None, detector: Detector, masking: PretrainingConfig) -> None:
        reads_answers = info is not None and self.config.answer != "left_out"
        if reads_answers and not any(isinstance(truth, HumanAnswers) for truth in info.truths()):
            raise UserError(
                f"task.config.objectives.masked_words.answer is {self.config.answer}, but no text of the data has "
                "human answers; set it to left_out, or use questions with human answers."
            )

    @override
    def forward(
        self, targets: WordLabels, batch: Batch, text_regions: TextRegions, encoded: EncoderOutput, word_head: MLMHead
    ) -> ObjectiveOutput:
        """Classify the masked wordpieces; the logits are float32 [masked wordpieces, V]."""
        index = (targets.labels >= 0).nonzero(as_tuple=True)
        logits = at_least_float32(word_head(encoded.text[index], encoded.word_embeddings))
        return classified(self.config.weight, index, logits, targets.labels[index])

    @override
    def class_names(self, output: ModelOutput, wordpieces: Sequence[str], masking: PretrainingConfig) -> Sequence[str]:
        return wordpieces

    @override
    def answer(self, output: ModelOutput, logits: Tensor, names: Sequence[str]) -> dict[str, Any]:
        """Return `filled`, the text with the best word at each [MASK], and `masks`."""
        text = output.batch.records[0]["text"]
        if len(logits) < text.count(MASK):
            raise UserError(
                "The text is longer than data.max_text_length, or with the regions longer than task.config.max_length, "
                f"and a {MASK} is truncated; shorten the text."
            )
        masks = top_classes(logits.softmax(dim=1), names)
        filled, *rest = text.split(MASK)
        for ranked_words, words_between in zip(masks, rest, strict=True):
            best_word = ranked_words[0][0]
            filled += best_word.removeprefix("##") + words_between
        return {"filled": filled, "masks": masks}

    @override
    def answer_lines(self, prediction: PretrainingPrediction) -> list[str]:
        if not prediction.masks:
            return []
        masks = [f"{MASK} {number}: {format_ranked(words)}" for number, words in enumerate(prediction.masks, start=1)]
        return [prediction.filled, *masks]


# Masked language modelling on a text-only corpus, with one corpus text per caption


@dataclasses.dataclass(frozen=True)
class CorpusMasking(WordMasking):
    """Samples a corpus text for each text of the data set, and masks its words."""

    of_images = False
    config: MaskedTextConfig = dataclasses.field(default_factory=MaskedTextConfig)

    @override
    def extra_texts(self, sample: Sample, generator: np.random.Generator) -> Iterable[tuple[TextDraft, TextEncoding]]:
        if sample.corpus is None:
            return
        words = self.words_from_line(sample.corpus, int(generator.integers(len(sample.corpus))))
        ids, labels = self.mask_words(words, generator)
        text_tokenizer = dataclasses.replace(self.text_tokenizer, max_length=None)
        max_length = self.config.max_length
        if self.config.special_tokens:
            encoding = text_tokenizer.single(ids[: max_length - text_tokenizer.layout.single.num_special])
        else:
            encoding = text_tokenizer.without_special_tokens(ids[:max_length])
        yield TextDraft("", sample, has_image=False, ids=ids, labels=labels), encoding

    def words_from_line(self, corpus: Sequence[str], number: int) -> list[list[int]]:
        """Return the wordpieces of each word of the text that begins at a line; the first line follows the last."""
        words: list[list[int]] = []
        for step in range(len(corpus) * self.config.min_words):
            words += word_pieces(corpus[(number + step) % len(corpus)], self.text_tokenizer.tokenizer)
            if len(words) >= self.config.min_words:
                break
        return words


class MaskedText(MaskedWords):
    """As `MaskedWords`, on corpus texts without an image."""

    config: MaskedTextConfig

    @override
    def preprocessor(self, text_tokenizer: TextTokenizer) -> CorpusMasking:
        return CorpusMasking(text_tokenizer, self.config)

    @override
    def check(self, info: DatasetInfo | None, detector: Detector, masking: PretrainingConfig) -> None:
        if info is not None and info.corpus is None:
            raise UserError(
                f"task.config.objectives.masked_text has the weight {self.config.weight}, but the data have no "
                "text-only corpus; set data.files.corpus and data.config.use_corpus=true, or "
                "task.config.objectives.masked_text=0."
            )

    # a user's text has an image, so this objective answers nothing
    answer = Objective.answer
    answer_lines = Objective.answer_lines
