"""Masked language modelling: which words are hidden, and what is to be predicted (official VL-BERT code).

Shape legend
    L   wordpieces of one text
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

NO_LABEL = -1


@dataclasses.dataclass(frozen=True)
class WordMasking:
    """Which words are chosen, and what is put in their place.

    Whole words are chosen, before they are split into wordpieces. Of the chosen ones, 80 % become [MASK] at all of
    their pieces, 10 % random entries of the vocabulary (each piece its own, special tokens included) and 10 % stay.
    No word is ever forced, so a short text often has no label at all.

    Args:
        mask_id: wordpiece id of [MASK].
        vocabulary_size: random entries are drawn from 0 .. size - 1.
        probability: chance of a word to be chosen.
        always_mask: every chosen word becomes [MASK], as the paper (section 3.3) has it.

    Raises:
        ValueError: a probability that is not between 0 and 1.
    """

    mask_id: int
    vocabulary_size: int
    probability: float = 0.15
    always_mask: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.probability <= 1:
            raise ValueError(f"the masking probability is {self.probability}, expected a number from 0 to 1")

    def __call__(self, words: Sequence[Sequence[int]], generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """See `mask_words`."""
        return mask_words(words, self, generator)


def word_pieces(text: str, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Wordpiece ids of each word; words end at white space and at punctuation, which is a word of its own."""
    encoding = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
    words: list[list[int]] = []
    previous = None
    for piece, word in zip(encoding.ids, encoding.word_ids, strict=True):
        if word != previous:
            words.append([])
            previous = word
        words[-1].append(piece)
    return words


def mask_words(
    words: Sequence[Sequence[int]], masking: WordMasking, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Hide some words of a text.

    Args:
        words: wordpiece ids of each word, without special tokens.
        masking: the rule.
        generator: source of randomness.

    Returns:
        Two int64 arrays [L]: the ids after masking; the original id at every piece of a chosen word and `NO_LABEL`
        elsewhere.
    """
    lengths = np.array([len(word) for word in words], dtype=np.int64)
    ids = np.array([piece for word in words for piece in word], dtype=np.int64)
    drawn = np.repeat(generator.random(len(words)), lengths)
    labels = np.where(drawn < masking.probability, ids, NO_LABEL)
    masked = drawn < masking.probability * (1.0 if masking.always_mask else 0.8)
    replaced = (drawn < masking.probability * 0.9) & ~masked & (labels != NO_LABEL)
    ids[masked] = masking.mask_id
    ids[replaced] = generator.integers(masking.vocabulary_size, size=int(replaced.sum()))
    return ids, labels
