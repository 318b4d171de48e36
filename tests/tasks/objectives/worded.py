"""Preprocessors of pre-training with some of its objectives."""

from __future__ import annotations

import numpy as np
from transformers import PreTrainedTokenizerBase

from e2e_vl.examples import TextExample
from e2e_vl.run.build import build_objectives
from e2e_vl.tasks.config import PretrainingConfig
from e2e_vl.tasks.objectives.base import Objective, Sizes
from e2e_vl.tasks.pretraining import PretrainingPreprocessor, PretrainingTask
from e2e_vl.text import TextTokenizer

ONLY_WORDS = {"masked_text": 0.0, "masked_regions": 0.0, "relationship": 0.0}


def make_task(tokenizer: PreTrainedTokenizerBase, **objectives) -> PretrainingTask:
    """Masked words alone, unless other objectives are named with their weight or settings."""
    sizes = Sizes(hidden_size=4, vocab_size=len(tokenizer))
    made: dict[str, Objective] = build_objectives(ONLY_WORDS | objectives, sizes)
    return PretrainingTask(sizes, PretrainingConfig(), made)


def make_preprocessor(
    tokenizer: PreTrainedTokenizerBase, *, is_blank: bool = False, max_length: int | None = None, **objectives
) -> PretrainingPreprocessor:
    """The wording of `make_task`."""
    return make_task(tokenizer, **objectives).preprocessor(
        TextTokenizer(tokenizer, is_blank=is_blank, max_length=max_length)
    )


def word_labels(text: TextExample, objective: str = "masked_words") -> np.ndarray:
    """int64 [L], the masked wordpieces of a text; -1 elsewhere."""
    return text.targets.parts[objective].labels
