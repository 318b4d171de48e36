"""Rules of VCR's sentences: who is called what, what is cut, which objects are named."""

from __future__ import annotations

from e2e_vl.data.vcr_text import (
    NEUTRAL_NAMES,
    Piece,
    cut_answers,
    cut_rationales,
    mentioned_objects,
    names_of,
    plain_text,
    relevant_objects,
)


def test_people_are_named_in_turn():
    assert names_of(["person", "cup", "person"], ["A", "B"], 1) == ["B", "cup", "A"]
    assert len(NEUTRAL_NAMES) == 13
    assert names_of(["person"] * 14)[-1] == names_of(["person"])[0]


def pieces(number: int) -> list[Piece]:
    return [Piece(index, -1, index) for index in range(number)]


def test_the_longer_of_question_and_answer_is_cut():
    question, answers = pieces(6), [pieces(3), pieces(9), pieces(5)]
    cut_answers(question, answers, limit=8)
    # 6 + 3: the question -> 5; 5 + 9: the answer -> 5, a tie, the question -> 4, ... and the third sees what is left
    assert ([len(answer) for answer in answers], len(question)) == ([3, 4, 4], 4)
    assert question == pieces(4)


def test_cutting_rationales():
    question, answer, rationales = pieces(4), pieces(3), [pieces(9), pieces(5)]
    cut_rationales(question, answer, rationales, limit=10)
    assert (len(question), len(answer), [len(rationale) for rationale in rationales]) == (2, 3, [5, 5])
    question, answer, rationales = pieces(2), pieces(6), [pieces(4)]
    cut_rationales(question, answer, rationales, limit=8)
    assert (len(question), len(answer), len(rationales[0])) == (1, 3, 4)


def test_rules_about_mentions():
    sentences = [["Is", [2, 0], "?"], [[0], "and", [1]]]
    assert mentioned_objects(sentences) == [2, 0, 1]
    objects = ["cup", "person", "person", "car"]
    assert relevant_objects(objects, [["No", "."]]) == [1, 2]
    assert relevant_objects(objects, [[[3], "."]]) == [3]
    assert relevant_objects(objects, [[[3], "and", "EVERYONE"]]) == [1, 2, 3]
    assert plain_text(["Is", [2, 0], "?"], ["a", "b", "c"]) == "Is c and a ?"
