"""How often a detector's boxes have the target first, or among the first few."""

from __future__ import annotations

import numpy as np
import pytest

import proposals as tool
from e2e_vl.samples import BoxPredictions, CandidateBoxes


def test_boxes_are_ranked_by_their_phrase_and_then_by_their_score() -> None:
    boxes = np.array([[0.0, 0, 10, 10], [20, 0, 30, 10], [40, 0, 50, 10], [60, 0, 70, 10]])
    scores = np.array([0.9, 0.5, 0.8, 0.7], dtype=np.float32)
    phrases = ("circle", "star", "star", "")
    candidates = CandidateBoxes(boxes, "file", predictions=BoxPredictions(scores=scores), phrases=phrases)
    ranks = [tool.rank_of_first(candidates, "the big star", boxes[row : row + 1] + 1) for row in range(4)]
    assert ranks == [2, 1, 0, 3]
    assert tool.rank_of_first(candidates, "the big star", [[80.0, 0, 90, 10]]) == np.inf
    assert tool.rank_of_first(candidates, "a circle", [[80.0, 0, 90, 10], [1.0, 0, 10, 10]]) == 0


@pytest.mark.usefixtures("on_cpu")
def test_the_command_prints_shares_that_rise(tiny_words, capsys) -> None:
    assert tool.main(["--config", "tiny/refcoco", "--split", "val", *tiny_words]) == 0
    title, *rows = capsys.readouterr().out.splitlines()
    assert "expressions with a target of the split val" in title
    shares = [float(row.split()[-1]) for row in rows]
    assert shares == sorted(shares) and len(shares) == 5 and shares[0] < 0.6 < shares[-1]
