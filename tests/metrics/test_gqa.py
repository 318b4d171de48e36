"""GQA's scores by hand: what is scored, consistency, distribution, choices, grounding."""

from __future__ import annotations

import json

import pytest

from detector.errors import UserError
from e2e_vl.metrics.gqa import GQAPrediction, belongs, gqa_metrics, gqa_scores, grounding, write_submission

QUERY = {"structural": "query", "semantic": "attr", "detailed": "color"}
VERIFY = {"structural": "verify", "semantic": "obj", "detailed": "exist"}


def record(name: str, answer: str, right_answer: str | None = "yes", **more) -> GQAPrediction:
    base = {"question_id": name, "text": "a b c", "answer": answer, "score": 1.0}
    if right_answer is not None:
        base |= {"right_answer": right_answer, "types": VERIFY, "steps": 2}
    return GQAPrediction.from_record(base | more)


def test_only_balanced_questions_count_and_letters_are_compared_as_they_are():
    records = [record("1", "yes"), record("2", "Yes"), record("3", "no", is_balanced=False)]
    scores = gqa_scores(records)
    assert scores["accuracy"] == scores["binary"] == 50 and scores["open"] == 0 and scores["consistency"] == 0
    assert scores["accuracyPerLength"] == {"3": {"accuracy": 50, "count": 2}}
    metrics = gqa_metrics(records)
    assert metrics["accuracy/binary"] == 0.5 and "accuracy/open" not in metrics and "validity" not in metrics
    assert gqa_metrics([record("1", "yes", None)]) == {"count": 1}
    untyped = [record("1", "yes", types={}), record("2", "no", types={})]
    assert gqa_metrics(untyped) == {"count": 2, "accuracy": 0.5}


def test_consistency_looks_at_what_right_answers_entail():
    records = [
        record("1", "yes", entailed=["1", "3", "4"]),
        record("2", "no", entailed=["3"]),
        record("3", "yes", is_balanced=False),
        record("4", "no", is_balanced=False, entailed=["3"]),
    ]
    assert gqa_scores(records)["consistency"] == 50
    assert gqa_metrics(records)["consistency"] == 0.5
    assert "consistency" not in gqa_metrics(records[:3])
    assert "consistency" not in gqa_metrics([record("1", "yes")])


def test_common_attributes_have_choices_of_their_own():
    common = QUERY | {"detailed": "twoCommon"}
    assert belongs("color", ["red"], common) and not belongs("red", ["red"], common)
    assert belongs("red", ["red"], QUERY) and not belongs("color", ["red"], QUERY)


def test_grounding_weighs_attention_by_the_share_of_a_region_in_the_boxes():
    regions = [((0.0, 0.0, 0.5, 1.0), 0.6), ((0.5, 0.0, 1.0, 1.0), 0.4)]
    assert grounding([(0.0, 0.0, 1.0, 1.0)], regions) == pytest.approx(1.0)
    assert grounding([(0.25, 0.0, 0.75, 1.0)], regions) == pytest.approx(0.5)
    assert grounding([(0.0, 0.0, 0.5, 1.0)] * 2, regions) == pytest.approx(1.2), "each box counts"
    assert grounding([], regions) == 0


def test_the_file_of_the_server(tmp_path):
    """Ids are texts, with their zeros."""
    path = tmp_path / "deep" / "gqa.json"
    write_submission(path, [record("00000100", "blue", None), record("7", "yes")])
    expected = [{"questionId": "00000100", "prediction": "blue"}, {"questionId": "7", "prediction": "yes"}]
    assert json.loads(path.read_text(encoding="utf-8")) == expected
    with pytest.raises(UserError, match="the text 7 is listed twice"):
        write_submission(path, [record("7", "yes"), record("7", "no")])
