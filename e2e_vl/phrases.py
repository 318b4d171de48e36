"""The phrases of texts, as spans of wordpieces with boxes.

Shape legend: see `e2e_vl/structures.py`. Boxes are xyxy float32 in pixels of the resized image.
"""

from __future__ import annotations

import dataclasses
import re
import unicodedata
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from detector.structures import Movable
from e2e_vl.targets import Ragged, join_ragged


@dataclasses.dataclass(frozen=True)
class TextPhrases:
    """The phrases of one text, see `PhraseBatch`."""

    words: str  # the text as written
    offsets: Int64[np.ndarray, "L 2"]  # first character of each wordpiece and the last plus one; 0, 0 at special tokens
    continues_word: Bool[np.ndarray, " L"]  # wordpieces of the same word as the one before
    spans: Int64[np.ndarray, "n 2"]  # first wordpiece of each phrase and the last plus one
    boxes: list[Float[np.ndarray, "_ 4"]]  # of each phrase; empty if it refers to no box or its boxes are unknown
    is_complete: bool  # all phrases of the text are listed


@dataclasses.dataclass
class PhraseBatch(Movable):
    """The phrases of M texts. Boxes are float32 xyxy in pixels of the resized image."""

    words: list[str]  # the texts as written
    offsets: Int64[Tensor, "M L 2"]  # first character of each wordpiece and the last plus one; 0, 0 at special tokens
    continues_word: Bool[Tensor, "M L"]  # wordpieces of the same word as the one before
    spans: Ragged  # [P, 2]: first wordpiece of each phrase and the last plus one; a list per text
    boxes: Ragged  # [boxes, 4]: a list per phrase; empty if it refers to no box or its boxes are unknown
    is_complete: Bool[Tensor, " M"]  # all phrases of the text are listed

    @classmethod
    def join(cls, texts: Sequence[TextPhrases]) -> PhraseBatch:
        offsets = [torch.from_numpy(text.offsets) for text in texts]
        continues = [torch.from_numpy(text.continues_word) for text in texts]
        boxes = []
        for text in texts:
            boxes += text.boxes
        return cls(
            words=[text.words for text in texts],
            offsets=torch.nn.utils.rnn.pad_sequence(offsets, batch_first=True),
            continues_word=torch.nn.utils.rnn.pad_sequence(continues, batch_first=True),
            spans=join_ragged([text.spans for text in texts]),
            boxes=join_ragged(boxes, (4,)),
            is_complete=torch.tensor([text.is_complete for text in texts]),
        )

    def named_boxes(self) -> Ragged:
        """Return the boxes [boxes, 4] of all phrases, a list per text."""
        return self.boxes.regroup(self.spans)

    def is_punctuation(self) -> Bool[Tensor, "M L"]:
        """Return which wordpieces consist of punctuation only."""
        flags: list[bool] = []
        for text, offsets in zip(self.words, self.offsets.tolist(), strict=True):
            for first, end in offsets:
                categories = map(unicodedata.category, text[first:end])
                flags.append(end > first and all(category.startswith("P") for category in categories))
        return torch.tensor(flags, device=self.offsets.device).reshape(self.offsets.shape[:2])

    def truncate(self, index: Int64[Tensor, "M L"], attention_mask: Bool[Tensor, "M L"]) -> PhraseBatch:
        """Return a copy for truncated texts; `index` holds the old position of each kept wordpiece.

        A phrase that was truncated completely becomes the last wordpiece before it.
        """
        padding = torch.iinfo(torch.int64).max
        old_positions = index.masked_fill(~attention_mask, padding)[self.spans.owner]  # [P, L]
        old_first, old_end = self.spans.values.unbind(dim=1)
        first = (old_positions < old_first[:, None]).sum(dim=1)
        end = (old_positions < old_end[:, None]).sum(dim=1).clamp(min=1)
        return dataclasses.replace(
            self,
            offsets=self.offsets.take_along_dim(index[..., None], dim=1) * attention_mask[..., None],
            continues_word=self.continues_word.gather(1, index) & attention_mask,
            spans=Ragged(torch.stack([torch.minimum(first, end - 1), end], dim=1), self.spans.counts),
        )


def find_characters(offsets: Int64[Tensor, "L 2"], span: tuple[int, int]) -> tuple[int, int]:
    """Convert a span of wordpieces to a span of characters: the first one and the last one plus one."""
    first, end = span
    span_offsets = offsets[first:end]
    with_characters = span_offsets[span_offsets[:, 1] > 0]  # special tokens have none
    if not len(with_characters):
        return (0, 0)
    return (int(with_characters[:, 0].min()), int(with_characters[:, 1].max()))


def match_phrase(phrase: str, text: str) -> tuple[float, float]:
    """Return the share of a phrase's words that a text has, and the share of the text's words that the phrase has.

    Both are 1 where a detector looked for the text itself. Words are compared in lower case; both are 0 without words.
    """
    phrase_words = set(re.findall(r"\w+", phrase.lower()))
    text_words = set(re.findall(r"\w+", text.lower()))
    common = len(phrase_words & text_words)
    return common / max(len(phrase_words), 1), common / max(len(text_words), 1)
