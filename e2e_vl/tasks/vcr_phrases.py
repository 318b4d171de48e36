"""Phrases of VCR's texts: the names of objects, which the sentences mark, as phrases for the objects' boxes.

"Why is [0] smiling at [1] ?"  ->  why is casey smiling at riley ?
                                          0                1
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from e2e_vl.examples import TextPhrases
from e2e_vl.layout import LaidText
from e2e_vl.tasks.vcr_sentences import Piece


def choice_phrases(
    laid: LaidText,
    texts: Sequence[Sequence[Piece]],
    words: Sequence[Sequence[str]],
    boxes: Float[np.ndarray, "R 4"] | None,
) -> TextPhrases:
    """The phrases of what stands in front of a choice, and of the choice.

    Args:
        laid: both, joined.
        texts: the wordpieces of both that were laid out, in the same order.
        words: of both, to which the pieces refer; a space stands between them.
        boxes: of the objects, by the rows of the pieces, xyxy in pixels of the resized image; None: the text states no
            phrases.

    A wordpiece is placed at the characters of its whole word, because texts are split into wordpieces word by word. A
    name of which every wordpiece was cut off is left out.
    """
    characters = np.zeros((sum(map(len, texts)) + 1, 2), dtype=np.int64)  # the last row is for special wordpieces
    runs: list[tuple[int, int, int]] = []  # row of the box, first piece and the last plus one
    start = first = 0
    for own, pieces in zip(words, texts, strict=True):
        starts = [start, *(start + np.cumsum([len(word) + 1 for word in own]))]
        for number, piece in enumerate(pieces, start=first):
            characters[number] = starts[piece.word], starts[piece.word] + len(own[piece.word])
        for (_, row), run in itertools.groupby(enumerate(pieces, start=first), lambda one: (one[1].word, one[1].row)):
            found = [number for number, _ in run]
            if row >= 0:
                runs.append((row, found[0], found[-1] + 1))
        start, first = int(starts[-1]), first + len(pieces)
    known = [] if boxes is None else runs
    position = {int(number): place for place, number in enumerate(laid.source) if number >= 0}
    spans = [(position[one], position[end - 1] + 1) for _, one, end in known]
    return TextPhrases(
        words=" ".join(word for own in words for word in own),
        places=characters[laid.source],
        spans=np.array(spans, dtype=np.int64).reshape(-1, 2),
        boxes=[np.asarray(boxes[row : row + 1], dtype=np.float32) for row, _, _ in known],
        is_complete=False,
    )
