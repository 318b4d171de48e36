"""Options of the analysis: what they need, and names of heads."""

from __future__ import annotations

import pytest

from e2e_vl.analysis.options import AttentionOptions, parse_head


def test_head_words_need_parses():
    AttentionOptions().require_parses(given=False)
    AttentionOptions(entity_piece="head").require_parses(given=True)
    with pytest.raises(ValueError, match="--entity-piece head needs parses"):
        AttentionOptions(entity_piece="head").require_parses(given=False)


def test_heads_are_named_from_zero_or_one():
    assert AttentionOptions().number(10, 1) == "10-1" and AttentionOptions(first_number=1).number(10, 1) == "11-2"
    assert parse_head("10-1") == (None, 10, 1) and parse_head("cross:2-3", 1) == ("cross", 1, 2)
    for text, first in (("10", 0), ("a-b", 0), ("1-2-3", 0), ("0-3", 1)):
        with pytest.raises(ValueError, match=f"--heads has '{text}'"):
            parse_head(text, first)
