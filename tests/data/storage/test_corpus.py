from __future__ import annotations

import multiprocessing
import pickle

import numpy as np
import pytest

from e2e_vl.data import corpus as module
from e2e_vl.data.corpus import TextCorpus, TextLines
from e2e_vl.data.masking import WordMasking
from e2e_vl.text import build_vocabulary, load_tokenizer

LINES = ["The first line.", "  zweite Zeile: naïve ", "x", "the last line has a few more words"]


@pytest.fixture
def tokenizer(tmp_path):
    build_vocabulary(LINES, tmp_path / "vocab.txt")
    return load_tokenizer(tmp_path / "vocab.txt")


def write(path, content: str | bytes):
    path.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
    return path


def make(files, tokenizer, cache, probability=0.0, **options) -> TextCorpus:
    masking = WordMasking(tokenizer.mask_token_id, len(tokenizer), probability)
    return TextCorpus(files, tokenizer, masking, cache, **options)


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 1 << 20])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("last", ["", "\n", "\n \n\n"])
def test_lines_are_found_whatever_the_chunks_and_line_ends(tmp_path, monkeypatch, chunk, end, last):
    monkeypatch.setattr(module, "_CHUNK", chunk)
    content = end.join(["", "  ", *LINES[:2], " \t ", "", *LINES[2:]]) + last
    lines = TextLines(write(tmp_path / "a.txt", content), tmp_path / "cache")
    assert list(lines) == [line.strip() for line in LINES]


def test_long_lines_and_a_byte_order_mark(tmp_path):
    lines = TextLines(write(tmp_path / "a.txt", "\ufeffone\n" + "ab " * 50_000 + "\nend"), tmp_path)
    assert lines[0] == "one"
    assert lines[1] == ("ab " * 50_000).strip()
    assert lines[2] == "end"


def test_the_index_is_kept_and_made_again_when_the_file_changes(tmp_path, monkeypatch):
    path = write(tmp_path / "a.doc", "one\ntwo\n")
    assert list(TextLines(path, tmp_path / "cache")) == ["one", "two"]
    [index] = (tmp_path / "cache").iterdir()
    before = index.stat().st_mtime_ns
    with monkeypatch.context() as patch:
        patch.setattr(module, "_line_starts", None)
        assert list(TextLines(path, tmp_path / "cache")) == ["one", "two"]
    assert index.stat().st_mtime_ns == before
    write(path, "one\ntwo\nthree\n")
    assert list(TextLines(path, tmp_path / "cache")) == ["one", "two", "three"]


def _count(path, cache, results):
    results.put(list(TextLines(path, cache)))


def test_processes_may_make_the_index_at_once_and_read_it_after_a_fork(tmp_path):
    path = write(tmp_path / "a.txt", "\n".join(str(i) for i in range(3000)))
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    workers = [context.Process(target=_count, args=(path, tmp_path / "cache", results)) for _ in range(4)]
    for worker in workers:
        worker.start()
    found = [results.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join()
    assert all(lines == [str(i) for i in range(3000)] for lines in found)
    assert len(list((tmp_path / "cache").iterdir())) == 1
    lines = pickle.loads(pickle.dumps(TextLines(path, tmp_path / "cache")))
    assert lines[2999] == "2999"


def test_a_sample_joins_lines_of_all_files_and_wraps(tmp_path, tokenizer):
    files = [write(tmp_path / "a.txt", "\n".join(LINES[:2])), write(tmp_path / "b.doc", "\n\n".join(LINES[2:]))]
    corpus = make(files, tokenizer, tmp_path / "cache", min_words=12)
    assert len(corpus) == 4
    assert [corpus[i] for i in range(4)] == [line.strip() for line in LINES]
    example = corpus.example(2, np.random.default_rng(0))
    words = " ".join([LINES[2], LINES[3], LINES[0]])
    expected = tokenizer.encode(words, add_special_tokens=False)
    assert len(corpus.words(2)) == 13
    np.testing.assert_array_equal(example.input_ids, expected)
    assert example.looks_at == ()
    assert example.record == {}
    assert (example.segment_ids == 0).all()
    np.testing.assert_array_equal(example.targets["mlm_labels"], [-1] * len(expected))
    assert example.targets["mlm_labels"].dtype == np.int64


def test_a_small_corpus_repeats_itself_and_samples_are_cut(tmp_path, tokenizer):
    corpus = make([write(tmp_path / "a.txt", "x\n")], tokenizer, tmp_path / "cache", min_words=64, max_length=10)
    assert len(corpus.words(0)) == 64
    np.testing.assert_array_equal(corpus.example(0, np.random.default_rng(0)).input_ids, [tokenizer.vocab["x"]] * 10)


def test_samples_have_64_pieces_without_special_tokens(tmp_path, tokenizer):
    corpus = make([write(tmp_path / "a.txt", "\n".join(LINES))], tokenizer, tmp_path / "cache")
    for number in range(4):
        example = corpus.example(number, np.random.default_rng(number))
        assert example.input_ids.shape == example.targets["mlm_labels"].shape == (64,)
        assert not {tokenizer.cls_token_id, tokenizer.sep_token_id} & set(example.input_ids.tolist())


def test_special_tokens_count_among_the_pieces_and_are_never_masked(tmp_path, tokenizer):
    files = [write(tmp_path / "a.txt", "\n".join(LINES))]
    corpus = make(files, tokenizer, tmp_path / "cache", 1.0, special_tokens=True)
    example = corpus.example(0, np.random.default_rng(0))
    assert example.input_ids.shape == example.targets["mlm_labels"].shape == example.segment_ids.shape == (64,)
    assert example.input_ids[[0, -1]].tolist() == [tokenizer.cls_token_id, tokenizer.sep_token_id]
    assert (example.targets["mlm_labels"] < 0).nonzero()[0].tolist() == [0, 63]
    with pytest.raises(ValueError, match="at most 2 pieces make no sense"):
        make(files, tokenizer, tmp_path / "cache", max_length=2, special_tokens=True)


def test_masked_samples_restore_to_the_text(tmp_path, tokenizer):
    corpus = make([write(tmp_path / "a.txt", "\n".join(LINES))], tokenizer, tmp_path / "cache", probability=0.5)
    plain = make([tmp_path / "a.txt"], tokenizer, tmp_path / "cache")
    for number in range(4):
        example = corpus.example(number, np.random.default_rng(number))
        labels = example.targets["mlm_labels"]
        assert 10 < (labels >= 0).sum() < 54
        restored = np.where(labels >= 0, labels, example.input_ids)
        np.testing.assert_array_equal(restored, plain.example(number, np.random.default_rng(9)).input_ids)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no line with content"),
        (b"\n \n\t\r\n", "no line with content"),
        (b"fine\nbroken \xff\xfe\n", r"not UTF-8 text \(near byte 12\)"),
        (b"cut off \xc3", "not UTF-8 text"),
        (b"PK\x03\x04\0\0", "zero bytes"),
    ],
)
def test_files_that_are_no_text(tmp_path, content, message):
    with pytest.raises(ValueError, match=message) as caught:
        TextLines(write(tmp_path / "a.txt", content), tmp_path / "cache", "corpus")
    assert str(tmp_path / "a.txt") in str(caught.value)
    assert not [path for path in (tmp_path / "cache").iterdir() if "unfinished" in path.name]


def test_other_errors(tmp_path, tokenizer):
    with pytest.raises(FileNotFoundError, match=r"nowhere.txt: cannot read the corpus"):
        make([tmp_path / "nowhere.txt"], tokenizer, tmp_path)
    with pytest.raises(ValueError, match="at least one file"):
        make([], tokenizer, tmp_path)
    with pytest.raises(ValueError, match="make no sense"):
        make([write(tmp_path / "b.txt", "b")], tokenizer, tmp_path, min_words=0)
    silent = make([write(tmp_path / "c.txt", "\u00ad\n")], tokenizer, tmp_path / "cache")
    with pytest.raises(ValueError, match="no word in the corpus"):
        silent.words(0)
    write(tmp_path / "file", "")
    with pytest.raises(OSError, match=r"set data.config.cache"):
        TextLines(tmp_path / "b.txt", tmp_path / "file")
