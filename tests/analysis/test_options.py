"""Options of the analysis: their values, their words, and names of heads."""

from __future__ import annotations

import msgspec
import pytest

from e2e_vl.analysis.options import AttentionOptions, parse_head


def test_every_option_says_what_it_means_and_what_was_chosen():
    described = {choice["name"]: choice for choice in AttentionOptions(gold_boxes="union").describe()}
    assert described["--gold-boxes"]["value"] == "union" and described["--gold-boxes"]["default"] == "any"
    assert described["--active-above"]["value"] == 0.2
    assert len(described) >= 12 and all(choice["meaning"] for choice in described.values())


@pytest.mark.parametrize("change", [{"entity_piece": "middle"}, {"active_above": 20}, {"min_count": 0}])
def test_other_values_are_refused(change):
    with pytest.raises(msgspec.ValidationError, match=next(iter(change))):
        msgspec.convert(change, AttentionOptions)


def test_head_words_need_parses():
    AttentionOptions().require_parses(given=False)
    AttentionOptions(entity_piece="head").require_parses(given=True)
    with pytest.raises(ValueError, match=r"--entity-piece head needs parses, .* give --parses or --spacy, or choose"):
        AttentionOptions(entity_piece="head").require_parses(given=False)


def test_heads_are_named_from_zero_or_one():
    assert AttentionOptions().number(10, 1) == "10-1" and AttentionOptions(first_number=1).number(10, 1) == "11-2"
    assert parse_head("10-1") == (None, 10, 1) and parse_head("cross:2-3", 1) == ("cross", 1, 2)
    for text in ("10", "1-", "a-b", ":1-1", "1-2-3"):
        with pytest.raises(ValueError, match="write a head as LAYER-HEAD"):
            parse_head(text)
    with pytest.raises(ValueError, match="counted from 1"):
        parse_head("0-3", 1)
