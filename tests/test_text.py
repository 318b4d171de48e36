from __future__ import annotations

import contextlib
import json

import pytest
from transformers import AutoTokenizer

from detector.errors import UserError
from e2e_vl.text import basic_tokenize, build_vocabulary, load_tokenizer, swap_left_right, word_pieces

SENTENCES = ["the red, red circle!", "The RED café", "the 2 circles"]


@pytest.fixture
def vocabulary_file(tmp_path):
    build_vocabulary(SENTENCES, tmp_path / "vocab.txt")
    return tmp_path / "vocab.txt"


def test_the_vocabulary_has_a_fixed_order(vocabulary_file):
    lines = vocabulary_file.read_text(encoding="utf-8").split("\n")
    assert lines.pop() == ""
    assert lines[:5] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert lines[5:13] == ["red", "the", "!", ",", "2", "cafe", "circle", "circles"]
    characters = [line for line in lines[13:] if not line.startswith("##")]
    assert characters == sorted(characters)
    assert all(len(character) == 1 for character in characters)
    assert [line for line in lines[13:] if line.startswith("##")][-1] == "##z"
    assert len(set(lines)) == len(lines)
    assert build_vocabulary(reversed(SENTENCES), vocabulary_file) == lines


def test_unseen_words_are_spelled(vocabulary_file):
    tokenizer = load_tokenizer(vocabulary_file)
    assert tokenizer.tokenize("the red CAFÉ cafés") == ["the", "red", "cafe", "cafe", "##s"]
    assert tokenizer.tokenize("new word €") == [*["n", "##e", "##w", "w", "##o", "##r", "##d"], "[UNK]"]


def test_a_vocabulary_needs_words(tmp_path):
    with pytest.raises(ValueError, match="no word in the sentences"):
        build_vocabulary(["", "  "], tmp_path / "vocab.txt")


def test_splitting_follows_the_tokenizer(vocabulary_file):
    tokenizer = load_tokenizer(vocabulary_file)
    assert basic_tokenize("The red, CAFÉ!") == tokenizer.tokenize("The red, CAFÉ!") == ["the", "red", ",", "cafe", "!"]


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


@pytest.fixture
def no_network(monkeypatch):
    asked = []

    def refuse(name, **_):
        asked.append(name)
        raise OSError("no connection in this test")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", refuse)
    return asked


@pytest.mark.parametrize(
    "name", ["gone/vocab.txt", "vocab.txt", "./gone", "/gone/there", "a/b/c", "~/gone-folder", "here/gone"]
)
def test_a_missing_path_names_the_remedy_and_stays_off_the_network(name, no_network, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    with pytest.raises(FileNotFoundError, match=r"no tokenizer there; give an existing vocab\.txt"):
        load_tokenizer(name)
    assert no_network == []


@pytest.mark.parametrize("name", ["bert-base-uncased", "google-bert/bert-base-uncased"])
def test_a_hub_name_out_of_reach_is_one_sentence(name, no_network, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=rf"{name}: no tokenizer could be loaded.*no connection in this test"):
        load_tokenizer(name)
    assert no_network == [name]


def test_bad_vocabularies_are_named(tmp_path):
    path = tmp_path / "vocab.txt"
    path.write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\nred\n")
    with pytest.raises(UserError, match=r"vocab\.txt: the vocabulary lacks \[MASK\]"):
        load_tokenizer(path)
    path.write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nred\nred\n")
    with pytest.raises(UserError, match=r"vocab\.txt: the vocabulary has a wordpiece on several lines"):
        load_tokenizer(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"vocab\.txt: not a UTF-8 text file"):
        load_tokenizer(path)


@pytest.mark.parametrize("content", [None, "no JSON", "[]"])
def test_a_folder_without_a_tokenizer_is_one_sentence(content, vocabulary_file, tmp_path):
    folder = tmp_path / "saved"
    folder.mkdir()
    if content is not None:
        load_tokenizer(vocabulary_file).save_pretrained(folder)
        (folder / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match="saved: no tokenizer could be loaded from it") as caught:
        load_tokenizer(folder)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_without_the_special_tokens_of_bert_is_refused(vocabulary_file, tmp_path):
    tokenizer = load_tokenizer(vocabulary_file)
    tokenizer.mask_token = None
    tokenizer.save_pretrained(tmp_path / "saved")
    with pytest.raises(UserError, match=r"saved: not a tokenizer like BERT's, with \[CLS\]"):
        load_tokenizer(tmp_path / "saved")


def test_pieces_of_words_as_bert_splits_them(tmp_path):
    build_vocabulary(["a red box, left most!"], tmp_path / "vocab.txt")
    tokenizer = load_tokenizer(tmp_path / "vocab.txt")
    words = word_pieces("A red Boxes, left,most!", tokenizer)
    tokens = [tokenizer.convert_ids_to_tokens(word) for word in words]
    spelled = ["box", "##e", "##s"]
    assert tokens == [["a"], ["red"], spelled, [","], ["left"], [","], ["most"], ["!"]]
    assert [piece for word in words for piece in word] == tokenizer.convert_tokens_to_ids(
        tokenizer.tokenize("A red Boxes, left,most!")
    )
    assert word_pieces(" \n", tokenizer) == []


def test_the_words_of_a_mirrored_image():
    assert swap_left_right(["left", "of", "right", "leftmost"]) == ["right", "of", "left", "leftmost"]
    assert swap_left_right(iter(())) == []


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
