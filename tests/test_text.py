"""Vocabularies, tokenizers, and texts in the layout of an encoder."""

from __future__ import annotations

import contextlib
import json

import numpy as np
import pytest
from transformers import AutoTokenizer

from detector.errors import UserError
from e2e_vl.text import (
    CLS,
    MASK,
    SEP,
    SPECIAL_TOKENS,
    Template,
    TextEncoding,
    TextLayout,
    TextTokenizer,
    build_vocabulary,
    fill_template,
    has_content,
    load_tokenizer,
    truncate_fronts,
    word_pieces,
)

SENTENCES = ["the red, red circle!", "The RED café", "the 2 circles"]


@pytest.fixture
def vocabulary_file(tmp_path):
    build_vocabulary(SENTENCES, tmp_path / "vocab.txt")
    return tmp_path / "vocab.txt"


def test_the_vocabulary_has_a_fixed_order_and_unseen_words_are_spelled(vocabulary_file):
    lines = vocabulary_file.read_text(encoding="utf-8").split("\n")
    assert lines.pop() == ""
    assert lines[:5] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert lines[5:13] == ["red", "the", "!", ",", "2", "cafe", "circle", "circles"]
    characters = [line for line in lines[13:] if not line.startswith("##")]
    assert characters == sorted(characters) and all(len(character) == 1 for character in characters)
    assert lines[-1] == "##z" and len(set(lines)) == len(lines)
    assert build_vocabulary(reversed(SENTENCES), vocabulary_file) == lines
    tokenizer = load_tokenizer(vocabulary_file)
    assert tokenizer.tokenize("the red CAFÉ cafés") == ["the", "red", "cafe", "cafe", "##s"]
    assert tokenizer.tokenize("new word €") == [*["n", "##e", "##w", "w", "##o", "##r", "##d"], "[UNK]"]


@pytest.mark.parametrize(
    ("words", "pieces"),
    [
        (["the", "dog"], ["the", "dog"]),
        (["the", "The", "Dog"], ["The", "Dog"]),
        (["the", "dog", "[unused1]", "<URL>"], ["the", "dog"]),
    ],
)
def test_a_vocabulary_with_upper_case_is_cased(tmp_path, words, pieces):
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, *words]))
    assert load_tokenizer(tmp_path).tokenize("The Dog") == pieces


def test_loading_a_file_and_a_saved_folder_give_the_same_ids(vocabulary_file, tmp_path):
    tokenizer = load_tokenizer(vocabulary_file)
    assert (tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.cls_token_id) == (0, 1, 2)
    assert (tokenizer.sep_token_id, tokenizer.mask_token_id) == (3, 4)
    tokenizer.save_pretrained(tmp_path / "saved")
    saved = load_tokenizer(str(tmp_path / "saved"))
    sentence = "the red circles unseen [MASK]"
    assert saved(sentence)["input_ids"] == tokenizer(sentence)["input_ids"]
    (tmp_path / "plain").mkdir()
    vocabulary_file.rename(tmp_path / "plain" / "vocab.txt")
    assert load_tokenizer(tmp_path / "plain")(sentence)["input_ids"] == tokenizer(sentence)["input_ids"]


@pytest.mark.parametrize(
    ("name", "is_asked_for"),
    [
        *((path, False) for path in ("vocab.txt", "./gone", "/gone/there", "a/b/c", "~/gone-folder", "here/gone")),
        *((name, True) for name in ("bert-base-uncased", "google-bert/bert-base-uncased")),
    ],
)
def test_only_names_of_the_hub_reach_for_the_network(name, is_asked_for, tmp_path, monkeypatch):
    asked = []

    def refuse(name, **_):
        asked.append(name)
        raise OSError("no connection in this test")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", refuse)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    message = f"{name}: .*no connection" if is_asked_for else name.rpartition("/")[2]
    with pytest.raises(FileNotFoundError, match=message):
        load_tokenizer(name)
    assert asked == [name] * is_asked_for


@pytest.mark.parametrize(
    "content",
    [b"[PAD]\n[UNK]\n[CLS]\n[SEP]\nred\n", b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nred\nred\n", b"\xff\xfe\x00"],
)
def test_damaged_files_are_named(vocabulary_file, tmp_path, content):
    load_tokenizer(vocabulary_file).save_pretrained(tmp_path / "saved")
    (tmp_path / "saved" / "tokenizer.json").write_bytes(content)
    with pytest.raises(UserError, match="saved: "):
        load_tokenizer(tmp_path / "saved")
    vocabulary_file.write_bytes(content)
    with pytest.raises(UserError, match=r"vocab\.txt"):
        load_tokenizer(vocabulary_file)


def test_a_tokenizer_never_brings_code(vocabulary_file, tmp_path):
    folder = tmp_path / "saved"
    load_tokenizer(vocabulary_file).save_pretrained(folder)
    (folder / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: ...\n")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    for kind in ("Own", settings["tokenizer_class"]):
        changed = settings | {"tokenizer_class": kind, "auto_map": {"AutoTokenizer": ["code.Own", "code.Own"]}}
        (folder / "tokenizer_config.json").write_text(json.dumps(changed))
        with contextlib.suppress(ValueError):
            load_tokenizer(folder)
        assert not (tmp_path / "ran").exists()


def test_a_saved_tokenizer_neither_truncates_nor_pads_texts(vocabulary_file, tmp_path):
    tokenizer = load_tokenizer(vocabulary_file)
    expected = word_pieces("the red circle", tokenizer)
    tokenizer.backend_tokenizer.enable_truncation(2)
    tokenizer.backend_tokenizer.enable_padding(length=9)
    tokenizer.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    saved = json.loads((tmp_path / "tokenizer.json").read_text())
    load_tokenizer(vocabulary_file).save_pretrained(tmp_path / "saved")
    (tmp_path / "saved" / "tokenizer.json").write_text(json.dumps(saved))
    assert saved["truncation"] and saved["padding"]
    assert word_pieces("the red circle", load_tokenizer(tmp_path / "saved")) == expected


# Layouts


SLOT = Template((CLS, 0, SEP, MASK, SEP), (0, 0, 0, 1, 1), summary=3)  # an answer behind the text
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


def test_a_template_is_filled_with_its_texts(tokenizer):
    first, second = pieces(tokenizer, "the red box"), pieces(tokenizer, "left")
    encoding = fill_template(TextLayout().pair, (first, second), tokenizer)
    assert words(encoding, tokenizer) == ["[CLS]", "the", "red", "box", "[SEP]", "left", "[SEP]"]
    assert encoding.token_type_ids.tolist() == [0, 0, 0, 0, 0, 1, 1]
    assert encoding.source.tolist() == [-1, 0, 1, 2, -1, 3, -1], "pieces of both texts counted through"
    assert encoding.summary is None and encoding.num_truncated == 0
    assert {one.dtype for one in (encoding.input_ids, encoding.token_type_ids, encoding.source)} == {np.dtype("int64")}
    for text, summary in (("the red box", 5), ("the", 3)):
        encoding = fill_template(SLOT, (pieces(tokenizer, text),), tokenizer)
        assert encoding.summary == summary and words(encoding, tokenizer)[summary] == "[MASK]"


def test_values_stand_at_their_pieces(tokenizer):
    first, second = pieces(tokenizer, "the red box"), pieces(tokenizer, "left")
    text_tokenizer = TextTokenizer(tokenizer)
    pair = text_tokenizer.pair(first, second)
    assert pair.place([5, 6, 7, 8]).tolist() == [-1, 5, 6, 7, -1, 8, -1]
    assert pair.place(np.array([5, 6, 7, 8]), fill=0).tolist() == [0, 5, 6, 7, 0, 8, 0]
    assert fill_template(SWAPPED, (first, second), tokenizer).place([5, 6, 7, 8]).tolist() == [-1, 8, -1, 5, 6, 7, -1]
    assert text_tokenizer.without_special_tokens(first).place([5, 6, 7]).tolist() == [5, 6, 7]
    assert text_tokenizer.single([]).place([]).tolist() == [-1, -1]
    shorter = TextTokenizer(tokenizer, max_length=4).single(first + second)  # values of lost pieces are left out
    assert shorter.place([5, 6, 7, 8]).tolist() == [-1, 5, 6, -1] and shorter.num_truncated == 2


def test_pieces_of_a_text(tokenizer):
    text_tokenizer = TextTokenizer(tokenizer)
    plain = tokenizer.convert_ids_to_tokens(text_tokenizer.pieces("The RED boxes"))
    assert plain == ["the", "red", "box", "##e", "##s"]
    mirrored = tokenizer.convert_ids_to_tokens(text_tokenizer.pieces("left or right of lefts", mirrored=True))
    assert mirrored == ["right", "or", "left", "of", "right", "##s"], "wordpieces are swapped, as in the official code"
    blank = TextTokenizer(tokenizer, is_blank=True)
    assert blank.pieces("the red box") == blank.pieces("left", mirrored=True) == text_tokenizer.pieces("") == []


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
    ("first", "second", "room", "lost", "too_much"),
    [
        (10, 10, 20, (0, 0), (0, 0)),
        (100, 60, 125, (18, 17), (18, 53)),  # half of 35, rounded up, and the rest
        (20, 120, 125, (0, 15), (0, 15)),  # the first has nothing to lose
        (126, 2, 125, (2, 1), (2, 2)),
        (126, 2, 100, (26, 2), None),  # the second is too short for its share
        (33, 3, 20, (13, 3), None),
    ],
)
def test_fronts_lose_what_does_not_fit(first, second, room, lost, too_much):
    """Or too much, as the official code."""
    assert truncate_fronts(first, second, room) == lost
    assert first + second - sum(lost) == min(first + second, room)
    assert too_much is None or truncate_fronts(first, second, room, too_much=True) == too_much


def test_a_pair_that_is_cut_at_its_fronts(tokenizer):
    first, second = pieces(tokenizer, "red " * 33), pieces(tokenizer, "left or right of a box")
    reds = ["[CLS]", *["red"] * 32, "[SEP]"]
    encoding = TextTokenizer(tokenizer, max_length=41).pair(first, second, "fronts_too_much")
    assert words(encoding, tokenizer) == [*reds, "right", "of", "a", "box", "[SEP]"] and encoding.num_truncated == 3
    assert encoding.place(range(39)).tolist() == [-1, *range(1, 33), -1, 35, 36, 37, 38, -1]
    clean = TextTokenizer(tokenizer, max_length=40).pair(first, second, "fronts")
    assert words(clean, tokenizer) == [*reds, "or", "right", "of", "a", "box", "[SEP]"]
    gone = TextTokenizer(tokenizer, max_length=37).pair(first, second[:2], "fronts_too_much")
    assert words(gone, tokenizer) == reds and not gone.token_type_ids.any()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("the star", True),
        ("[MASK]", True),
        ("what is it?", True),
        ("2", True),
        ("猫", True),
        ("!!! ?", False),
        ("the of A", False),
        ("x, y z_", False),
        ("", False),
    ],
)
def test_articles_letters_and_punctuation_are_no_content(text, expected):
    assert has_content(text) is expected
