"""Each measure on maps of two words and three regions that can be checked by hand."""

from __future__ import annotations

import pytest
import torch

from e2e_vl.analysis.measures import (
    HeadSums,
    baseline_hits,
    entity_grounding,
    measure_hits,
    region_grouping,
    region_naming,
    word_dependency,
)

# Slots: [CLS] star red | region 0, 1, 2. One layer, two heads; rows attend.
HEAD_0 = [
    [1.0, 0.0, 0.0, 0.0, 0.0, 0.0],
    [0.5, 0.0, 0.1, 0.1, 0.3, 0.0],  # "star": region 1
    [0.0, 0.9, 0.0, 0.1, 0.0, 0.0],  # "red": region 0, mostly "star"
    [0.2, 0.5, 0.1, 0.0, 0.0, 0.2],  # region 0: "star", region 2
    [0.6, 0.0, 0.4, 0.0, 0.0, 0.0],  # region 1: [CLS], then "red"
    [0.0, 0.1, 0.1, 0.2, 0.6, 0.0],  # region 2: region 1
]
HEAD_1 = [
    [1.0, 0.0, 0.0, 0.0, 0.0, 0.0],
    [0.1, 0.0, 0.0, 0.2, 0.1, 0.6],  # "star": region 2, and region 0 among the first two
    [0.1, 0.1, 0.1, 0.1, 0.5, 0.1],  # "red": region 1
    [0.0, 0.0, 1.0, 0.0, 0.0, 0.0],
    [0.0, 1.0, 0.0, 0.0, 0.0, 0.0],
    [0.0, 0.0, 0.0, 1.0, 0.0, 0.0],
]
MAPS = torch.tensor([[HEAD_0, HEAD_1]])
REGIONS = slice(3, 6)
EVERY = torch.ones(3, dtype=torch.bool)


def spans(*pairs: tuple[int, int]) -> torch.Tensor:
    return torch.tensor(pairs).reshape(-1, 2)


def right(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.bool).reshape(-1, 3)


def test_entity_grounding():
    """Phrases "star" and "red": the regions 1 and 0 are right."""
    found = entity_grounding(
        *(MAPS, spans((1, 2), (2, 3)), REGIONS, EVERY, right([0, 1, 0], [1, 0, 1]), {"rule": torch.tensor([1.0, 0.0])})
    )
    assert found.hits[0].tolist() == [[True, True], [False, False]]
    torch.testing.assert_close(found.attention[0], torch.tensor([[0.4, 0.1], [0.9, 0.7]]))
    assert found.baselines["rule"].tolist() == [1, 0]
    torch.testing.assert_close(found.baselines["chance"], torch.tensor([1 / 3, 2 / 3]))


def test_only_candidates_are_chosen_and_counted():
    allowed = torch.tensor([True, True, False])
    found = entity_grounding(MAPS, spans((1, 2)), REGIONS, allowed, right([1, 0, 1]), {})
    assert found.hits[0].tolist() == [[False], [True]]  # head 1 prefers region 2, then region 0
    torch.testing.assert_close(found.attention[0, :, 0], torch.tensor([0.4, 0.3]))
    assert found.baselines["chance"].tolist() == [0.5]
    assert baseline_hits(torch.tensor([0.5, 0.2, 0.9]), allowed, right([1, 0, 0], [0, 0, 1])).tolist() == [1, 0]
    nothing = entity_grounding(MAPS, spans((1, 2)), REGIONS, ~EVERY, right([1, 1, 1]), {})
    assert not nothing.hits.any() and not nothing.attention.any() and nothing.baselines["chance"].tolist() == [0]
    assert baseline_hits(torch.ones(3), ~EVERY, right([1, 1, 1])).tolist() == [0]


def test_equal_attention_counts_for_the_first_choice_and_none_for_no_choice():
    equal = torch.full((1, 1, 2, 3), 0.2)
    assert measure_hits(equal, EVERY.expand(2, 3), right([1, 0, 0], [0, 1, 1])).hits.flatten().tolist() == [True, False]
    none = measure_hits(equal[..., :0], EVERY[:0].expand(2, 0), right([1, 0, 0], [0, 1, 1])[:, :0])
    assert none.hits.flatten().tolist() == [False, False]
    assert len(measure_hits(equal[:, :, :0], EVERY.expand(0, 3), right())) == 0


def test_regions_name_words():
    """Regions 0 and 1 belong to "star", region 2 to no phrase; [CLS] is no choice."""
    is_word = torch.tensor([False, True, True])
    found = region_naming(MAPS, REGIONS, right([1, 1, 0]), spans((1, 2)), is_word)
    assert found.hits[0].tolist() == [[True, False], [False, True]]
    torch.testing.assert_close(found.attention[0], torch.tensor([[0.6, 0.4], [1.0, 1.0]]))
    assert found.baselines["chance"].tolist() == [0.5, 0.5]


def test_a_region_of_two_phrases_is_named_by_the_words_of_both():
    is_word = torch.tensor([False, True, True])
    found = region_naming(MAPS, REGIONS, right([1, 0, 0], [1, 0, 0]), spans((1, 2), (2, 3)), is_word)
    assert found.hits[0].tolist() == [[True], [True]] and found.baselines["chance"].tolist() == [1]


def test_regions_of_one_phrase_are_grouped():
    """Regions 0 and 2 belong together; region 1 is alone in the second phrase."""
    found = region_grouping(MAPS, REGIONS, EVERY, right([1, 0, 1], [0, 1, 0]))
    assert found.hits[0].tolist() == [[True, False], [False, True]]  # from region 0, from region 2
    torch.testing.assert_close(found.attention[0], torch.tensor([[0.2, 0.8], [0.0, 1.0]]))
    assert found.baselines["chance"].tolist() == [0.5, 0.5]
    assert len(region_grouping(MAPS, REGIONS, torch.tensor([True, True, False]), right([1, 0, 1]))) == 0


def test_words_attend_to_related_words():
    """Three words: [CLS], which no pair has, "star" and "red"; the attention on a word's wordpieces is summed."""
    words = spans((0, 1), (1, 2), (2, 3))
    found = word_dependency(MAPS, words, torch.tensor([1, 2]), torch.tensor([2, 1]))
    assert found.hits[0].tolist() == [[True, False], [False, False]]
    assert found.baselines["previous word"].tolist() == [1, 0] and found.baselines["next word"].tolist() == [0, 1]
    assert found.baselines["chance"].tolist() == [0.5, 0.5]
    joined = word_dependency(MAPS, spans((0, 2), (2, 3)), torch.tensor([0]), torch.tensor([1]))
    torch.testing.assert_close(joined.attention[0, :, 0], torch.tensor([0.9, 0.2]))


def test_words_that_share_a_wordpiece_are_one_choice_or_none():
    """Five words in three wordpieces: a (0), b and its like c (1), d (1 and 2), e (2)."""
    maps = torch.tensor([[[[0.1, 0.5, 0.4], [0.0, 1.0, 0.0], [0.4, 0.6, 0.0]]]])
    words = spans((0, 1), (1, 2), (1, 2), (1, 3), (2, 3))
    found = word_dependency(maps, words, torch.tensor([1, 2, 3, 0]), torch.tensor([0, 0, 0, 3]))
    # a's choices are b with c, d (which has all of their attention and more) and e; d can only choose a
    assert found.hits[0, 0].tolist() == [False, False, True, True]
    assert found.baselines["chance"].tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 1])
    like = word_dependency(maps, words[:3], torch.tensor([1, 2]), torch.tensor([0, 0]))
    assert like.hits[0, 0].tolist() == [True, True] and like.baselines["chance"].tolist() == [1, 1]
    assert like.baselines["next word"].tolist() == [1, 1]


def measured(hits: list[list[bool]], attention: list[list[float]], rule: list[float]):
    """Examples of one layer with two heads."""
    found = measure_hits(torch.zeros(1, 2, len(rule), 3), EVERY.expand(len(rule), 3), right(*[[0, 0, 0]] * len(rule)))
    found.hits, found.attention = torch.tensor([hits]), torch.tensor([attention])
    found.baselines = {"rule": torch.tensor(rule)}
    return found


FIRST = measured([[True, False], [True, True]], [[0.1, 0.2], [0.4, 0.2]], [1.0, 0.0])
SECOND = measured([[True], [False]], [[0.3], [0.0]], [1.0])


@pytest.mark.parametrize(
    ("per_sentence", "count", "accuracy", "attention", "rule"),
    [(False, 3, [2 / 3, 2 / 3], [0.2, 0.2], 2 / 3), (True, 2, [3 / 4, 1 / 2], [0.225, 0.15], 3 / 4)],
)
def test_means_are_over_examples_or_over_sentences(per_sentence, count, accuracy, attention, rule):
    sums, other = HeadSums.zero(1, 2, ["rule"]), HeadSums.zero(1, 2, ["rule"])
    sums.add(FIRST, per_sentence=per_sentence)
    other.add(SECOND, per_sentence=per_sentence)
    sums.merge(other)
    assert (sums.count, sums.examples) == (count, 3)
    assert sums.accuracy[0].tolist() == pytest.approx(accuracy)
    assert sums.mean_attention[0].tolist() == pytest.approx(attention)
    assert sums.baseline_accuracy("rule") == pytest.approx(rule)


def test_the_best_head_is_the_first_of_the_active_ones():
    sums = HeadSums.zero(2, 2, [])
    sums.hits = torch.tensor([[3.0, 1.0], [2.0, 2.0]])
    sums.count, sums.examples = 4, 4
    active = torch.tensor([[False, True], [True, True]])
    assert (
        sums.best_head() == (0, 0)
        and sums.best_head(active) == (1, 0)
        and sums.best_head(torch.zeros(2, 2).bool()) is None
    )
    assert HeadSums.zero(2, 2, []).best_head() is None
    assert HeadSums.zero(2, 2, ["rule"]).baseline_accuracy("rule") == 0
