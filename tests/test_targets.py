"""Typed targets: how the targets of several texts become a batch's, and what cutting texts does to them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from e2e_vl.examples import Ragged, Targets, by_name, nested, per_wordpiece, ragged, stacked
from e2e_vl.region_masking import truncate_texts
from e2e_vl.structures import TextBatch


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


def spans(*rows: tuple[int, int]) -> np.ndarray:
    return np.array(rows, dtype=np.int64).reshape(-1, 2)


def boxes(number: int, value: float = 1.0) -> np.ndarray:
    return np.full((number, 4), value, dtype=np.float32)


# One shape per text


def test_values_of_one_shape_are_stacked():
    joined = Some.join([Some(np.arange(4, dtype=np.float32) + row, np.int64(row)) for row in range(3)])
    assert isinstance(joined, Some)
    assert joined.box.shape == (3, 4) and joined.box.dtype == torch.float32
    assert joined.box[:, 0].tolist() == [0, 1, 2]
    assert joined.number.tolist() == [0, 1, 2] and joined.number.dtype == torch.int64


def test_plain_numbers_are_values_too():
    assert Some.join([Some(number=3), Some(number=0)]).number.tolist() == [3, 0]
    assert Some.join([Some(number=np.float32(0.5))]).number.dtype == torch.float32


@pytest.mark.parametrize(
    ("one", "other", "name"),
    [
        (Some(box=np.zeros(4)), Some(), r"Some: .* have box"),
        (Words(), Words(labels=np.zeros(3, dtype=np.int64)), r"Words: .* have labels"),
        (Phrases(spans((0, 2)), [boxes(1)]), Phrases(spans((0, 2))), r"Phrases: .* have boxes"),
        (Parts({"a": Some(number=1)}), Parts({"a": Some()}), r"Some: .* have number"),
    ],
)
def test_what_only_some_texts_have_is_an_error(one, other, name):
    for texts in ([one, other], [other, one]):
        with pytest.raises(ValueError, match=name):
            type(one).join(texts)


def test_what_is_unknown_for_all_stays_unknown():
    joined = Some.join([Some(number=1), Some(number=2)])
    assert joined.box is None and joined.number.tolist() == [1, 2]
    assert Some.join([Some(), Some()]) == Some()
    assert Phrases.join([Phrases()]) == Phrases()


# A value per wordpiece


def test_labels_of_wordpieces_are_padded_with_their_fill():
    joined = Words.join([Words(np.array([5, -1, 6]), np.array([1, 2, 3])), Words(np.array([7]), np.array([4]))])
    assert joined.labels.tolist() == [[5, -1, 6], [7, -1, -1]]
    assert joined.kinds.tolist() == [[1, 2, 3], [4, 0, 0]]
    assert joined.labels.dtype == torch.int64
    empty = Words.join([Words(labels=np.zeros(0, dtype=np.int64)), Words(labels=np.array([3]))])
    assert empty.labels.tolist() == [[-1], [3]]


def test_positions_with_a_label():
    joined = Words.join([Words(np.array([5, -1, 6]), np.array([0, 0, 0])), Words(np.array([7]), np.array([4]))])
    assert [joined.labelled_wordpieces(text) for text in (0, 1)] == [[0, 2], [0]]
    both = Words.join([Words(np.array([-1, 5, -1]), np.array([0, 0, 2]))])
    assert both.labelled_wordpieces(0) == [1, 2]
    assert Some.join([Some(number=1)]).labelled_wordpieces(0) == []


def test_targets_are_cut_with_their_texts():
    """The first wordpieces and the very last stay, as in `truncate_texts`."""
    joined = Words.join(
        [
            Words(np.array([5, -1, 6, 7, 8]), np.array([1, 2, 3, 4, 5]), 10),
            Words(np.array([9, 3]), np.array([6, 7]), 11),
            Words(np.array([1, 2, 3]), np.array([8, 9, 1]), 12),
        ]
    )
    attention_mask = torch.arange(5) < torch.tensor([5, 2, 3])[:, None]
    texts = TextBatch(
        torch.arange(15).view(3, 5) * attention_mask, torch.zeros(3, 5, dtype=torch.int64), attention_mask
    )
    shortened, index = truncate_texts(texts, torch.tensor([3, 2, 2]))
    cut = joined.truncate(index, shortened.attention_mask)
    assert cut.labels.tolist() == [[5, -1, 8], [9, 3, -1], [1, 3, -1]]
    assert cut.kinds.tolist() == [[1, 2, 5], [6, 7, 0], [8, 1, 0]]
    assert cut.number.tolist() == [10, 11, 12]
    assert joined.labels.shape == (3, 5), "a copy"
    parts = Parts({"words": joined, "some": Some(number=torch.tensor([1, 2, 3]))}).truncate(
        index, shortened.attention_mask
    )
    assert parts.parts["words"].labels.tolist() == cut.labels.tolist()
    assert parts.parts["some"].number.tolist() == [1, 2, 3]
    assert Words().truncate(index, shortened.attention_mask) == Words()


# Lists of different lengths


def test_lists_per_text_are_joined_and_split_again():
    joined = Phrases.join([Phrases(spans((0, 3), (4, 9))), Phrases(spans()), Phrases(spans((1, 2)))])
    assert joined.spans.values.tolist() == [[0, 3], [4, 9], [1, 2]]
    assert joined.spans.values.dtype == torch.int64
    assert joined.spans.counts.tolist() == [2, 0, 1]
    assert joined.spans.owner.tolist() == [0, 0, 2]
    assert [rows.tolist() for rows in joined.spans.split()] == [[[0, 3], [4, 9]], [], [[1, 2]]]


def test_several_phrases_per_text_and_several_boxes_per_phrase():
    texts = [
        Phrases(spans((0, 3), (4, 9)), [boxes(2, 1), boxes(0)]),  # the second phrase names nothing in the image
        Phrases(spans(), []),
        Phrases(spans((1, 2), (3, 4), (5, 6)), [boxes(1, 2), boxes(3, 3), boxes(1, 4)]),
    ]
    joined = Phrases.join(texts)
    assert joined.spans.counts.tolist() == [2, 0, 3]
    assert joined.boxes.counts.tolist() == [2, 0, 1, 3, 1], "a list per phrase, text by text"
    assert joined.boxes.values.shape == (7, 4) and joined.boxes.values.dtype == torch.float32
    assert joined.boxes.owner.tolist() == [0, 0, 2, 3, 3, 3, 4]
    text_of_box = joined.spans.owner[joined.boxes.owner]
    assert text_of_box.tolist() == [0, 0, 2, 2, 2, 2, 2]
    assert [len(rows) for rows in joined.boxes.split()] == [2, 0, 1, 3, 1]
    assert [float(rows[0, 0]) for rows in joined.boxes.split() if len(rows)] == [1, 2, 3, 4]
    # phrase p of text t is found again
    per_text = [list(joined.boxes.split())[2:], texts[2].boxes]
    for found, expected in zip(*per_text, strict=True):
        np.testing.assert_array_equal(found.numpy(), expected)


def test_a_batch_without_any_phrase():
    joined = Phrases.join([Phrases(spans(), []), Phrases(spans(), [])])
    assert joined.spans.values.shape == (0, 2) and joined.spans.counts.tolist() == [0, 0]
    assert joined.boxes.counts.tolist() == [] and len(joined.boxes.values) == 0
    assert joined.boxes.owner.tolist() == [] and joined.boxes.split() == ()


def test_lists_are_left_as_they_are_when_texts_are_cut():
    joined = Phrases.join([Phrases(spans((0, 3)), [boxes(1)])])
    assert joined.truncate(torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1, dtype=torch.bool)) == joined
    assert joined.labelled_wordpieces(0) == []


# Parts of a task that is a sum


def test_parts_are_joined_by_name():
    texts = [Parts({"some": Some(number=row), "words": Words(np.arange(row + 1))}) for row in range(3)]
    joined = Parts.join(texts)
    assert list(joined.parts) == ["some", "words"]
    assert joined.parts["some"].number.tolist() == [0, 1, 2] and joined.parts["some"].box is None
    assert joined.parts["words"].labels.tolist() == [[0, -1, -1], [0, 1, -1], [0, 1, 2]]
    assert joined.labelled_wordpieces(1) == [0, 1]


def test_targets_move_to_a_device_with_all_their_parts():
    joined = Parts.join([Parts({"phrases": Phrases(spans((0, 3)), [boxes(2)]), "some": Some(number=1)})])
    moved = joined.to("meta").parts
    assert moved["some"].number.is_meta
    assert moved["phrases"].boxes.values.is_meta and moved["phrases"].spans.counts.is_meta
    assert not joined.parts["some"].number.is_meta


def test_a_batch_without_any_array_keeps_the_shape_of_its_rows():
    @dataclasses.dataclass
    class Boxes(Targets):
        boxes: Ragged | None = nested(4)

    joined = Boxes.join([Boxes([]), Boxes([])]).boxes
    assert joined.values.shape == (0, 4) and joined.values.dtype == torch.float32 and len(joined.counts) == 0
    assert Boxes.join([Boxes([boxes(2), boxes(0)]), Boxes([])]).boxes.counts.tolist() == [2, 0]


# Texts without any target


def test_texts_without_a_target_are_told_apart():
    joined = Some.join([Some(np.ones(4), 3), Some(np.zeros(4), -1, has_target=False), Some(np.ones(4), 5)])
    assert joined.has_target.tolist() == [True, False, True] and joined.number.tolist() == [3, -1, 5]
    assert joined.with_target(joined.number).tolist() == [3, 5]
    assert joined.to("meta").has_target.is_meta
    cut = joined.truncate(torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1, dtype=torch.bool))
    assert cut.has_target.tolist() == [True, False, True]
    none = Some.join([Some(number=0, has_target=False)] * 2)
    assert none.has_target.tolist() == [False, False] and none.with_target(none.number).shape == (0,)


def test_where_no_text_lacks_a_target_nothing_is_selected():
    joined = Some.join([Some(number=3), Some(number=4)])
    assert joined.has_target is None and joined.with_target(joined.number) is joined.number
