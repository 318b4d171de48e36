from __future__ import annotations

import concurrent.futures
import contextlib
import json
import multiprocessing
from pathlib import Path

import huggingface_hub
import pytest
from transformers import AutoTokenizer

from detector.errors import UserError
from e2e_vl import text
from e2e_vl.text import basic_tokenize, build_vocabulary, load_tokenizer, swap_left_right, word_pieces
from tests.tokenizer_folder import good_tokenizer, write_tokenizer

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


def build_again_and_again(path, times=30):
    for _ in range(times):
        build_vocabulary(SENTENCES * 20, path)


def test_several_processes_may_build_a_vocabulary_while_others_read_it(vocabulary_file):
    whole = vocabulary_file.read_text(encoding="utf-8")
    with concurrent.futures.ProcessPoolExecutor(3, multiprocessing.get_context("fork")) as pool:
        writers = [pool.submit(build_again_and_again, vocabulary_file) for _ in range(3)]
        while not all(writer.done() for writer in writers):
            assert vocabulary_file.read_text(encoding="utf-8") == whole, "never a part of it"
    assert [writer.result() for writer in writers] == [None] * 3
    assert list(vocabulary_file.parent.iterdir()) == [vocabulary_file], "nothing else stays"


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
    monkeypatch.setattr(text, "snapshot_download", refuse)
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
    with pytest.raises(FileNotFoundError, match=rf"{name}: neither a local file.*no connection in this test"):
        load_tokenizer(name)
    assert no_network == [name]


@pytest.fixture
def cached(tmp_path, monkeypatch) -> Path:
    """The folder of a model "someone/words" in the local cache of the hub, which is out of reach."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    model = tmp_path / "hub" / "models--someone--words"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text("0" * 40)
    folder = model / "snapshots" / ("0" * 40)
    folder.mkdir(parents=True)
    (folder / "modules.json").write_text("[]")  # another part of the model
    return folder


def test_a_tokenizer_of_the_hub_is_read_like_a_folder(cached, tmp_path):
    build_vocabulary(["a red circle"], tmp_path / "vocab.txt")
    own = load_tokenizer(tmp_path / "vocab.txt")
    (cached / "vocab.txt").write_bytes((tmp_path / "vocab.txt").read_bytes())
    assert load_tokenizer("someone/words")("a red box")["input_ids"] == own("a red box")["input_ids"]
    own.save_pretrained(cached)
    found = load_tokenizer("someone/words")
    assert found("a red box")["input_ids"] == own("a red box")["input_ids"]
    assert found.name_or_path == "someone/words"


def test_a_tokenizer_of_the_hub_goes_through_the_checks_of_a_folder(cached, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="someone/words: the model on the hub has neither"):
        load_tokenizer("someone/words")
    build_vocabulary(["a red circle"], tmp_path / "vocab.txt")
    load_tokenizer(tmp_path / "vocab.txt").save_pretrained(cached)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: pytest.fail("the file is checked before"))
    content = json.loads((cached / "tokenizer.json").read_text())
    (cached / "tokenizer.json").write_text(json.dumps(content | {"pre_tokenizer": {"type": "Split"}}))
    with pytest.raises(UserError, match=r"tokenizer\.json: the pre_tokenizer is of the kind 'Split'; BERT's are read"):
        load_tokenizer("someone/words")
    (cached / "tokenizer.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match=r"tokenizer\.json: .* too deep|tokenizer\.json.* more than 50 deep"):
        load_tokenizer("someone/words")
    with pytest.raises(FileNotFoundError, match="someone/else: neither a local file or folder nor a tokenizer"):
        load_tokenizer("someone/else")


def test_bad_vocabularies_are_named(tmp_path):
    path = tmp_path / "vocab.txt"
    path.write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\nred\n")
    with pytest.raises(ValueError, match=r"vocab\.txt: the vocabulary lacks \[MASK\]"):
        load_tokenizer(path)
    path.write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nred\nred\n")
    with pytest.raises(ValueError, match=r"vocab\.txt: the wordpiece 'red' is on several lines"):
        load_tokenizer(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"vocab\.txt: not a UTF-8 text file"):
        load_tokenizer(path)
    path.write_bytes(b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nr\0d\n")
    with pytest.raises(ValueError, match=r"vocab\.txt: a wordpiece holds a zero byte"):
        load_tokenizer(path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty: the folder holds neither"):
        load_tokenizer(tmp_path / "empty")


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


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", "[" * 100_000),
        ("tokenizer_config.json", '{"a":' * 100_000),
        ("tokenizer_config.json", '{"a": NaN}'),
        ("tokenizer_config.json", '{"model_max_length": 1' + "0" * 5000 + "}"),
        ("tokenizer_config.json", "no JSON"),
        ("tokenizer_config.json", "[]"),
        ("tokenizer.json", "[" * 100_000),
        ("tokenizer.json", "{}"),
        ("special_tokens_map.json", "[" * 100_000),
        ("added_tokens.json", "[" * 100_000),
    ],
)
def test_a_hostile_file_of_a_tokenizer_is_one_sentence(name, content, vocabulary_file, tmp_path):
    load_tokenizer(vocabulary_file).save_pretrained(tmp_path / "saved")
    (tmp_path / "saved" / name).write_text(content)
    with pytest.raises(UserError) as error:
        load_tokenizer(tmp_path / "saved")
    assert str(tmp_path / "saved") in str(error.value) and "\n" not in str(error.value)


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


def test_a_saved_tokenizer_neither_cuts_nor_fills_texts(tmp_path):
    content = good_tokenizer()
    content["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {
        "strategy": {"Fixed": 9},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "[PAD]",
    }
    assert word_pieces("a red box", load_tokenizer(write_tokenizer(tmp_path, content))) == [[5], [6], [7]]


def test_special_wordpieces_are_never_spelled(tmp_path):
    """Whatever tokenizer_config.json says, since [MASK] in a text is asked for."""
    write_tokenizer(tmp_path, good_tokenizer())
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "BertTokenizer", "split_special_tokens": True})
    )
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("a [MASK]", add_special_tokens=False) == [5, 4]
    assert word_pieces("a [MASK]", tokenizer) == [[5], [4]]
