"""Phrases of texts: which wordpieces they are, and which boxes they name.

A reader states phrases as characters of a text with boxes of the stored image (`PhraseBoxes`); here they become
wordpieces with boxes of the resized image, for the head that points at regions beside any task.

Shape legend: see `e2e_vl/structures.py`; and here
    P   phrases of all texts in the batch
"""

from __future__ import annotations

import dataclasses
import itertools
import unicodedata
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from detector.structures import Movable
from e2e_vl.examples import ImageExample, TextExample, TextPhrases
from e2e_vl.layout import TextWriter
from e2e_vl.samples import SampleText
from e2e_vl.targets import Ragged


@dataclasses.dataclass
class PhraseBatch(Movable):
    """The phrases of M texts. Boxes are float32 xyxy in pixels of the resized image."""

    words: list[str]  # the texts as written
    places: Int64[Tensor, "M L 2"]  # first character of each wordpiece and the last plus one; 0, 0 at special ones
    spans: Ragged  # [P, 2]: first wordpiece of each phrase and the last plus one; a list per text
    boxes: Ragged  # [boxes, 4]: a list per phrase, empty where it names no box or none is known
    is_complete: Bool[Tensor, " M"]  # all phrases of the text are listed

    def continues_word(self) -> Bool[Tensor, "M L"]:
        """Wordpieces of the same word as the one before; words end where BERT's tokenizer ends them."""
        found = torch.zeros(self.places.shape[:2], dtype=torch.bool)
        for row, (text, places) in enumerate(zip(self.words, self.places.tolist(), strict=True)):
            for position, ((before, end), (start, after)) in enumerate(itertools.pairwise(places), start=1):
                if end > before and after > start:
                    found[row, position] = start < end or not _ends_word(text, end, start)
        return found.to(self.places.device)

    def is_punctuation(self) -> Bool[Tensor, "M L"]:
        """Wordpieces of the texts that are punctuation, and nothing else."""
        found = [
            [end > first and all(map(_is_mark, text[first:end])) for first, end in places]
            for text, places in zip(self.words, self.places.tolist(), strict=True)
        ]
        return torch.tensor(found, device=self.places.device).reshape(self.places.shape[:2])

    def cut(self, index: Int64[Tensor, "M L"], attend: Bool[Tensor, "M L"]) -> PhraseBatch:
        """A copy for shortened texts; `index` holds the old position of each wordpiece that stays.

        A phrase that was cut off altogether becomes the last wordpiece before it.
        """
        kept = index.masked_fill(~attend, torch.iinfo(torch.int64).max)[self.spans.owner]  # [P, L]
        first, end = ((kept < bound[:, None]).sum(dim=1) for bound in self.spans.values.unbind(dim=1))
        end = end.clamp(min=1)
        spans = torch.stack([torch.minimum(first, end - 1), end], dim=1)
        places = self.places.take_along_dim(index[..., None], dim=1) * attend[..., None]
        return dataclasses.replace(self, places=places, spans=Ragged(spans, self.spans.counts))


def _ends_word(text: str, end: int, start: int) -> bool:
    """Whether a word ends at `end`, where the next wordpiece begins at `start`, at or behind it.

    BERT splits at white space, and at both sides of each punctuation mark and each Chinese character; characters that
    it drops, such as a zero-width space, end no word.
    """
    apart = any(one.isspace() for one in text[end:start])
    return apart or _stands_alone(text[end - 1]) or _stands_alone(text[start])


def _stands_alone(one: str) -> bool:
    is_sign = one.isascii() and not one.isalnum()  # such as $, which Unicode does not call punctuation
    return is_sign or _is_mark(one) or unicodedata.name(one, "").startswith("CJK ")


def _is_mark(one: str) -> bool:
    return unicodedata.category(one).startswith("P")


def join_phrases(texts: Sequence[TextPhrases]) -> PhraseBatch:
    """The phrases of M texts, in their order."""
    length = max(len(text.places) for text in texts) or 1
    places = torch.zeros(len(texts), length, 2, dtype=torch.int64)
    for row, text in enumerate(texts):
        places[row, : len(text.places)] = torch.from_numpy(text.places)
    boxes = [own for text in texts for own in text.boxes]
    joined = np.concatenate([np.zeros((0, 4), np.float32), *boxes])
    return PhraseBatch(
        words=[text.words for text in texts],
        places=places,
        spans=Ragged(
            torch.from_numpy(np.concatenate([text.spans for text in texts])),
            torch.tensor([len(text.spans) for text in texts]),
        ),
        boxes=Ragged(torch.from_numpy(joined), torch.tensor([len(own) for own in boxes], dtype=torch.int64)),
        is_complete=torch.tensor([text.is_complete for text in texts]),
    )


def phrases_of(
    text: SampleText, example: TextExample, images: Sequence[ImageExample], writer: TextWriter
) -> TextPhrases:
    """The phrases that the data state of a text, in its wordpieces; none where they state none.

    The text must stand first among the texts of its example, whole or cut, as all tasks word it.
    """
    flipped = bool(text.looks_at) and images[text.looks_at[0]].placement.flipped
    _, found = writer.located_pieces(text.words, mirrored=flipped)
    source = example.laid.source
    own = (source >= 0) & (source < len(found))
    places = np.zeros((len(source), 2), dtype=np.int64)
    places[own] = found[source[own]]
    stated = text.phrases
    if stated is None or not text.looks_at or not own.any():
        return TextPhrases(text.words, places, np.zeros((0, 2), dtype=np.int64), [], False)
    move = images[text.looks_at[0]].placement.move_boxes
    unknown = [np.zeros((0, 4))] * len(stated.spans)
    return TextPhrases(
        words=text.words,
        places=places,
        spans=np.array([wordpieces_of(places, own, span) for span in stated.spans]).reshape(-1, 2),
        boxes=[move(boxes).astype(np.float32) for boxes in stated.boxes or unknown],
        is_complete=stated.is_complete,
    )


def wordpieces_of(
    places: Int64[np.ndarray, "L 2"], is_own: Bool[np.ndarray, " L"], span: tuple[int, int]
) -> tuple[int, int]:
    """First position of some characters of a text and the last plus one.

    Args:
        places: characters of each wordpiece.
        is_own: which positions belong to the text; at least one.

    Where all of them were cut off, it is the last wordpiece before their end.
    """
    kept = np.flatnonzero(is_own)
    starts = places[kept, 0]
    inside = kept[(starts >= span[0]) & (starts < span[1])]
    if not len(inside):
        inside = kept[starts < span[1]][-1:]
    if not len(inside):
        inside = kept[:1]
    return int(inside[0]), int(inside[-1]) + 1


def characters_of(places: Int64[Tensor, "L 2"], span: tuple[int, int]) -> tuple[int, int]:
    """First character of some wordpieces of a text and the last plus one."""
    own = places[span[0] : span[1]]
    real = own[own[:, 1] > 0]
    return (int(real[:, 0].min()), int(real[:, 1].max())) if len(real) else (0, 0)
