"""Figures of the analysis."""

from __future__ import annotations

import numpy as np

from e2e_vl.analysis.figures import draw_word_map


def test_words_are_shown_as_they_are_written():
    """A dollar sign would begin a formula."""
    words = ["$_$", "$5-$10", r"\frac"]
    picture = draw_word_map("layer 0, head 1: $x", words, np.eye(3))
    assert picture.startswith(b"\x89PNG")
    assert picture != draw_word_map("layer 0, head 1: $x", ["a", "b", "c"], np.eye(3))
