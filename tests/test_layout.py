"""How texts are laid out as wordpieces: templates, cutting, the place of the summary, values at their pieces."""

from __future__ import annotations

import dataclasses
import pickle

import numpy as np
import pytest

from e2e_vl.text import (
    BARE,
    CLS,
    MASK,
    SEP,
    Template,
    TextEncoding,
    TextLayout,
    TextTokenizer,
    build_vocabulary,
    fill_template,
    load_tokenizer,
    truncate_fronts,
)

SLOT = Template((CLS, 0, SEP, MASK, SEP), (0, 0, 0, 1, 1), summary=3)  # an answer behind the text
EARLY = Template((CLS, 0, MASK, SEP), (0, 0, 0, 0), summary=2)  # an answer before the end
SWAPPED = Template((CLS, 1, SEP, 0, SEP), (1, 1, 1, 0, 0), summary=0)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "vocab.txt"
    build_vocabulary(["is the red box left or right of a blue thing"], path)
    return load_tokenizer(path)


def words(encoding: TextEncoding, tokenizer) -> list[str]:
    return tokenizer.convert_ids_to_tokens(encoding.input_ids.tolist())


def pieces(tokenizer, text: str) -> list[int]:
    return TextTokenizer(tokenizer).pieces(text)


# Templates


def test_a_template_is_filled_with_its_texts(tokenizer):
    first, second = pieces(tokenizer, "the red box"), pieces(tokenizer, "left")
    encoding = fill_template(TextLayout().pair, (first, second), tokenizer)
    assert words(encoding, tokenizer) == ["[CLS]", "the", "red", "box", "[SEP]", "left", "[SEP]"]
    assert encoding.token_type_ids.tolist() == [0, 0, 0, 0, 0, 1, 1]
    assert encoding.source.tolist() == [-1, 0, 1, 2, -1, 3, -1], "pieces of both texts counted through"
    assert encoding.summary is None and encoding.num_truncated == 0
    for column in (encoding.input_ids, encoding.token_type_ids, encoding.source):
        assert column.dtype == np.int64


def test_texts_may_stand_in_any_order(tokenizer):
    first, second = pieces(tokenizer, "the red"), pieces(tokenizer, "left right box")
    encoding = fill_template(SWAPPED, (first, second), tokenizer)
    assert words(encoding, tokenizer) == ["[CLS]", "left", "right", "box", "[SEP]", "the", "red", "[SEP]"]
    assert encoding.token_type_ids.tolist() == [1, 1, 1, 1, 1, 0, 0, 0]
    assert encoding.source.tolist() == [-1, 2, 3, 4, -1, 0, 1, -1]
    assert encoding.summary == 0


@pytest.mark.parametrize(("template", "text", "summary"), [(SLOT, "the red box", 5), (EARLY, "the red box", 4)])
def test_the_summary_is_where_the_template_says(tokenizer, template, text, summary):
    encoding = fill_template(template, (pieces(tokenizer, text),), tokenizer)
    assert encoding.summary == summary
    assert words(encoding, tokenizer)[summary] == "[MASK]"
    shorter = fill_template(template, (pieces(tokenizer, "the"),), tokenizer)
    assert shorter.summary == summary - 2


@pytest.mark.parametrize("empty", [[], (), np.zeros(0, dtype=np.int64)])
def test_an_empty_text_leaves_the_special_wordpieces(tokenizer, empty):
    encoding = fill_template(SLOT, (empty,), tokenizer)
    assert words(encoding, tokenizer) == ["[CLS]", "[SEP]", "[MASK]", "[SEP]"]
    assert encoding.source.tolist() == [-1] * 4 and encoding.summary == 2
    nothing = fill_template(BARE, (empty,), tokenizer)
    assert nothing.input_ids.shape == nothing.token_type_ids.shape == nothing.source.shape == (0,)
    assert nothing.input_ids.dtype == np.int64


def test_arrays_are_taken_as_lists_are(tokenizer):
    ids = pieces(tokenizer, "the red box")
    one, other = fill_template(SLOT, (ids,), tokenizer), fill_template(SLOT, (np.array(ids),), tokenizer)
    np.testing.assert_array_equal(one.input_ids, other.input_ids)
    np.testing.assert_array_equal(one.source, other.source)


def test_wordpieces_beside_those_of_the_texts():
    assert (SLOT.num_special, EARLY.num_special, BARE.num_special) == (4, 3, 0)
    layout = TextLayout()
    assert (layout.single.num_special, layout.question.num_special, layout.pair.num_special) == (2, 2, 3)


def test_the_forms_of_bert_need_no_declaration(tokenizer):
    text_tokenizer, ids = TextTokenizer(tokenizer), pieces(tokenizer, "the red box")
    expected = tokenizer("the red box", "left")
    assert text_tokenizer.single(ids).input_ids.tolist() == tokenizer("the red box")["input_ids"]
    np.testing.assert_array_equal(text_tokenizer.question(ids).input_ids, text_tokenizer.single(ids).input_ids)
    pair = text_tokenizer.pair(ids, pieces(tokenizer, "left"))
    assert pair.input_ids.tolist() == expected["input_ids"]
    assert pair.token_type_ids.tolist() == expected["token_type_ids"]


# Values at the pieces


def test_values_stand_at_their_pieces(tokenizer):
    first, second = pieces(tokenizer, "the red box"), pieces(tokenizer, "left")
    text_tokenizer = TextTokenizer(tokenizer)
    assert text_tokenizer.pair(first, second).place([5, 6, 7, 8]).tolist() == [-1, 5, 6, 7, -1, 8, -1]
    assert text_tokenizer.pair(first, second).place(np.array([5, 6, 7, 8]), fill=0).tolist() == [0, 5, 6, 7, 0, 8, 0]
    assert fill_template(SWAPPED, (first, second), tokenizer).place([5, 6, 7, 8]).tolist() == [-1, 8, -1, 5, 6, 7, -1]
    assert text_tokenizer.bare(first).place([5, 6, 7]).tolist() == [5, 6, 7]
    assert text_tokenizer.single([]).place([]).tolist() == [-1, -1]
    assert text_tokenizer.pair(first, second).place([5, 6, 7, 8]).dtype == np.int64


def test_values_of_pieces_that_were_cut_off_are_left_out(tokenizer):
    encoding = TextTokenizer(tokenizer, max_length=4).single(pieces(tokenizer, "the red box left"))
    assert encoding.place([5, 6, 7, 8]).tolist() == [-1, 5, 6, -1]
    assert encoding.num_truncated == 2


# The text_tokenizer


def test_pieces_of_a_text(tokenizer):
    text_tokenizer = TextTokenizer(tokenizer)
    assert tokenizer.convert_ids_to_tokens(text_tokenizer.pieces("The RED boxes")) == [
        "the",
        "red",
        "box",
        "##e",
        "##s",
    ]
    mirrored = tokenizer.convert_ids_to_tokens(text_tokenizer.pieces("left or right of lefts", mirrored=True))
    assert mirrored == ["right", "or", "left", "of", "right", "##s"], "wordpieces are swapped, as in the official code"
    assert text_tokenizer.pieces("") == []
    blank = TextTokenizer(tokenizer, is_blank=True)
    assert blank.pieces("the red box") == blank.pieces("left", mirrored=True) == []


@pytest.mark.parametrize(("form", "extra"), [("single", 2), ("question", 4)])
@pytest.mark.parametrize("max_length", [None, 4, 5, 7, 8, 20])
def test_what_is_too_long_loses_its_last_pieces(tokenizer, form, extra, max_length):
    text_tokenizer = TextTokenizer(tokenizer, TextLayout(question=SLOT), max_length)
    ids = pieces(tokenizer, "is the red box left")
    encoding = getattr(text_tokenizer, form)(ids)
    kept = 5 if max_length is None else min(max_length - extra, 5)
    assert len(encoding.input_ids) == kept + extra
    assert encoding.num_truncated == 5 - kept
    assert encoding.source[encoding.source >= 0].tolist() == list(range(kept))
    assert encoding.input_ids[encoding.source >= 0].tolist() == ids[:kept]
    assert encoding.input_ids[-1] == tokenizer.sep_token_id
    assert (encoding.summary is None) == (form == "single")
    if form == "question":
        assert encoding.input_ids[encoding.summary] == tokenizer.mask_token_id


def test_of_a_pair_the_longer_text_is_cut(tokenizer):
    first, second = pieces(tokenizer, "is the red box left"), pieces(tokenizer, "the box")
    for length, kept in ((20, (5, 2)), (9, (4, 2)), (7, (2, 2)), (6, (2, 1)), (5, (1, 1)), (3, (0, 0))):
        encoding = TextTokenizer(tokenizer, max_length=length).pair(first, second)
        assert encoding.input_ids[encoding.source >= 0].tolist() == first[: kept[0]] + second[: kept[1]]
        assert encoding.source[encoding.source >= 0].tolist() == [*range(kept[0]), *range(5, 5 + kept[1])]
        assert encoding.num_truncated == 7 - sum(kept) and len(encoding.input_ids) == sum(kept) + 3


def test_bare_texts_are_cut_by_the_caller(tokenizer):
    text_tokenizer, ids = TextTokenizer(tokenizer, max_length=3), pieces(tokenizer, "is the red box left")
    assert text_tokenizer.bare(ids).input_ids.tolist() == ids


def test_a_limit_must_leave_room_for_the_special_wordpieces(tokenizer):
    TextTokenizer(tokenizer).require_room(SLOT)
    TextTokenizer(tokenizer, max_length=4).require_room(SLOT)
    with pytest.raises(ValueError, match=r"data\.max_text_length is 3, but the special tokens alone need 4"):
        TextTokenizer(tokenizer, max_length=3).require_room(SLOT)


def test_a_writer_is_sent_to_workers(tokenizer):
    text_tokenizer = TextTokenizer(tokenizer, TextLayout(question=SLOT), 6)
    copy = pickle.loads(pickle.dumps(text_tokenizer))
    ids = pieces(tokenizer, "is the red box left")
    np.testing.assert_array_equal(copy.question(ids).input_ids, text_tokenizer.question(ids).input_ids)
    assert dataclasses.replace(text_tokenizer, max_length=None).question(ids).num_truncated == 0


# Places of wordpieces in their text


def test_wordpieces_know_their_characters(tokenizer):
    text = "The  red box, zzq"
    ids, places, words = TextTokenizer(tokenizer).encode(text)
    assert ids == TextTokenizer(tokenizer).pieces(text)
    assert [text[first:end].lower() for first, end in places[:4]] == ["the", "red", "box", ","]
    assert "".join(text[first:end] for first, end in places[4:]) == "zzq"
    assert words.tolist() == [0, 1, 2, 3, *[4] * (len(ids) - 4)]
    swapped, same, _ = TextTokenizer(tokenizer).encode("left box", mirrored=True)
    assert swapped == pieces(tokenizer, "right box") and same.tolist() == [[0, 4], [5, 8]]
    assert TextTokenizer(tokenizer, is_blank=True).encode(text)[1].shape == (0, 2)


@pytest.mark.parametrize(
    ("first", "second", "room", "lost"),
    [(10, 10, 20, (0, 0)), (100, 60, 125, (18, 53)), (20, 120, 125, (0, 15)), (126, 2, 125, (2, 2))],
)
def test_fronts_lose_too_much(first, second, room, lost):
    assert truncate_fronts(first, second, room, too_much=True) == lost


@pytest.mark.parametrize(
    ("first", "second", "room", "lost"),
    [
        (10, 10, 20, (0, 0)),
        (100, 60, 125, (18, 17)),  # half of 35, rounded up, and the rest
        (20, 120, 125, (0, 15)),  # the first has nothing to lose
        (126, 2, 125, (2, 1)),
        (126, 2, 100, (26, 2)),  # the second is too short for its share
        (33, 3, 20, (13, 3)),
    ],
)
def test_fronts_lose_what_does_not_fit(first, second, room, lost):
    assert truncate_fronts(first, second, room) == lost
    assert first + second - sum(lost) == min(first + second, room)


def test_a_pair_that_is_cut_at_its_fronts(tokenizer):
    first, second = pieces(tokenizer, "red " * 33), pieces(tokenizer, "left or right of a box")
    encoding = TextTokenizer(tokenizer, max_length=41).pair(first, second, "fronts_too_much")
    assert words(encoding, tokenizer) == ["[CLS]", *["red"] * 32, "[SEP]", "right", "of", "a", "box", "[SEP]"]
    assert (
        encoding.place(range(39)).tolist() == [-1, *range(1, 33), -1, 35, 36, 37, 38, -1]
        and encoding.num_truncated == 3
    )
    assert TextTokenizer(tokenizer).pair(first, second, "fronts").num_truncated == 0
    clean = TextTokenizer(tokenizer, max_length=40).pair(first, second, "fronts")
    assert words(clean, tokenizer) == ["[CLS]", *["red"] * 32, "[SEP]", "or", "right", "of", "a", "box", "[SEP]"]
    gone = TextTokenizer(tokenizer, max_length=37).pair(first, second[:2], "fronts_too_much")
    assert words(gone, tokenizer) == ["[CLS]", *["red"] * 32, "[SEP]"] and not gone.token_type_ids.any()
