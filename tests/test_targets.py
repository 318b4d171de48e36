from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from e2e_vl.region_masking import truncate_texts
from e2e_vl.structures import TextBatch
from e2e_vl.targets import Ragged, Targets, by_name, nested, per_wordpiece, ragged, stacked


@dataclasses.dataclass
class Some(Targets):
    box: Tensor | None = stacked()
    number: Tensor | None = stacked()


@dataclasses.dataclass
class Words(Targets):
    labels: Tensor | None = per_wordpiece()
    kinds: Tensor | None = per_wordpiece(fill=0)
    number: Tensor | None = stacked()


@dataclasses.dataclass
class Phrases(Targets):
    """Several phrases per text, several boxes per phrase."""

    spans: Ragged | None = ragged()  # int64 [n, 2] per text
    boxes: Ragged | None = nested()  # a list of float32 [n, 4] per text


@dataclasses.dataclass
class Parts(Targets):
    parts: dict[str, Targets] | None = by_name()


def test_targets_are_joined_and_truncated_with_their_texts():
    """The first wordpieces and the very last stay, as in `truncate_texts`."""
    rows = ([5, -1, 6, 7, 8], [1, 2, 3, 4, 5]), ([9, 3], [6, 7]), ([1, 2, 3], [8, 9, 1])
    joined = Words.join([Words(*map(np.array, pair), 10 + row) for row, pair in enumerate(rows)])
    assert joined.labels.tolist() == [[5, -1, 6, 7, 8], [9, 3, -1, -1, -1], [1, 2, 3, -1, -1]]
    assert joined.kinds.tolist()[1] == [6, 7, 0, 0, 0] and joined.labels.dtype == torch.int64
    attention_mask = torch.arange(5) < torch.tensor([5, 2, 3])[:, None]
    ids = torch.arange(15).view(3, 5) * attention_mask
    texts = TextBatch(ids, torch.zeros_like(ids), attention_mask)
    shortened, index = truncate_texts(texts, torch.tensor([3, 2, 2]))
    parts = Parts({"words": joined, "some": Some(number=torch.tensor([1, 2, 3]))})
    cut = parts.truncate(index, shortened.attention_mask).parts
    assert cut["words"].labels.tolist() == [[5, -1, 8], [9, 3, -1], [1, 3, -1]]
    assert cut["words"].kinds.tolist() == [[1, 2, 5], [6, 7, 0], [8, 1, 0]]
    assert cut["words"].number.tolist() == [10, 11, 12] and cut["some"].number.tolist() == [1, 2, 3]
    assert joined.labels.shape == (3, 5), "a copy"


def phrases(spans: list[tuple[int, int]], *counts: int) -> Phrases:
    """With so many boxes per phrase; the coordinates of a box are its phrase's number."""
    boxes = [np.full((count, 4), number, dtype=np.float32) for number, count in enumerate(counts)]
    return Phrases(np.array(spans, dtype=np.int64).reshape(-1, 2), boxes)


def test_several_phrases_per_text_and_several_boxes_per_phrase():
    texts = [
        phrases([(0, 3), (4, 9)], 2, 0),  # the second phrase names nothing in the image
        phrases([]),
        phrases([(1, 2), (3, 4), (5, 6)], 1, 3, 1),
    ]
    joined = Phrases.join(texts)
    assert joined.spans.values.tolist() == [[0, 3], [4, 9], [1, 2], [3, 4], [5, 6]]
    assert joined.spans.counts.tolist() == [2, 0, 3] and joined.spans.owner.tolist() == [0, 0, 2, 2, 2]
    assert [rows.tolist() for rows in joined.spans.split()][:2] == [[[0, 3], [4, 9]], []]
    assert joined.boxes.counts.tolist() == [2, 0, 1, 3, 1], "a list per phrase, text by text"
    assert joined.boxes.values.shape == (7, 4) and joined.boxes.values.dtype == torch.float32
    assert joined.boxes.owner.tolist() == [0, 0, 2, 3, 3, 3, 4]
    assert [rows[:, 0].tolist() for rows in joined.boxes.split()] == [[0, 0], [], [0], [1, 1, 1], [2]]


def test_parts_are_joined_by_name_and_move_to_a_device():
    texts = [Parts({"some": Some(np.full(4, row), row), "words": Words(np.arange(row + 1))}) for row in range(3)]
    texts = [Parts({**text.parts, "phrases": phrases([(0, 3)], 2)}) for text in texts]
    joined = Parts.join(texts)
    assert list(joined.parts) == ["some", "words", "phrases"]
    assert joined.parts["some"].number.tolist() == [0, 1, 2] and joined.parts["some"].box[:, 0].tolist() == [0, 1, 2]
    assert joined.parts["words"].labels.tolist() == [[0, -1, -1], [0, 1, -1], [0, 1, 2]]
    assert joined.labelled_wordpieces(1) == [0, 1]
    moved = joined.to("meta").parts
    assert moved["some"].number.is_meta and not joined.parts["some"].number.is_meta
    assert moved["phrases"].boxes.values.is_meta and moved["phrases"].spans.counts.is_meta


def test_texts_without_a_target_are_told_apart():
    joined = Some.join([Some(np.ones(4), 3), Some(np.zeros(4), -1, has_target=False), Some(np.ones(4), 5)])
    assert joined.has_target.tolist() == [True, False, True] and joined.number.tolist() == [3, -1, 5]
    assert joined.with_target(joined.number).tolist() == [3, 5] and joined.to("meta").has_target.is_meta
    cut = joined.truncate(torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1, dtype=torch.bool))
    assert cut.has_target.tolist() == [True, False, True]
