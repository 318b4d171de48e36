"""Rules of VCR's sentences: who is called what, what is cut, how users name objects."""

from __future__ import annotations

import pytest

from e2e_vl.tasks.config import NEUTRAL_NAMES
from e2e_vl.tasks.vcr import Piece, cut_answers, cut_rationales, encode_sentence, names_of, plain_text, read_sentence
from tests.tasks.preprocessors import make_tokenizer


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


def test_sentences_in_words():
    assert plain_text(["Is", [2, 0], "?"], ["a", "b", "c"]) == "Is c and a ?"
    assert plain_text(["Is", [2, 0], "?"], ["a", "b", "c"], None) == "Is c a ?"


def test_pieces_know_their_row_and_their_word(tmp_path):
    tokenizer = make_tokenizer(tmp_path, "is and casey hat")
    names, rows = ["Casey", "hats"], [4, -1]
    pieces = encode_sentence(["Is", [0, 1], "?"], names, rows, tokenizer)
    found = [(tokenizer.convert_ids_to_tokens(piece.id), piece.row, piece.word) for piece in pieces]
    spelled = [("hat", -1, 3), ("##s", -1, 3)]
    assert found == [("is", -1, 0), ("casey", 4, 1), ("and", -1, 2), *spelled, ("[UNK]", -1, 4)]


def test_sentences_of_users_name_objects():
    assert read_sentence("Why is [0, 2] near [1]'s hat ?", 3) == ["Why", "is", [0, 2], "near", [1], "'s", "hat", "?"]
    assert read_sentence("[sic] 3", 0) == ["[sic]", "3"]
    with pytest.raises(ValueError, match="names the object \\[3\\], but 3 boxes"):
        read_sentence("[0,3] waits", 3)
    with pytest.raises(ValueError, match="empty"):
        read_sentence(" ", 3)
