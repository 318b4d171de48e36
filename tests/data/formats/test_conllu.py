"""CoNLL-U: words with governors; what is damaged is named with its line."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from e2e_vl.analysis.captions import ParsedWord, read_conllu

GOOD = """# text = It isn't red.
1\tIt\tit\tPRON\t_\t_\t4\tnsubj\t_\t_
2-3\tisn't\t_\t_\t_\t_\t_\t_\t_\t_
2\tis\tbe\tAUX\t_\t_\t4\tcop\t_\t_
3\tn't\tnot\tPART\t_\t_\t4\tneg\t_\t_
3.1\tnothing\t_\t_\t_\t_\t_\t_\t_\t_
4\tred\tred\tADJ\t_\t_\t0\troot\t_\tSpaceAfter=No
5\t.\t.\tPUNCT\t_\t_\t4\tpunct\t_\t_

# another one, without an empty line behind it
1\tStars\tstar\tNOUN\t_\t_\t0\troot\t_\t_
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "parses.conllu"
    path.write_bytes(text.encode())
    return path


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_sentences_are_read(tmp_path, end):
    first, second = read_conllu(written(tmp_path, GOOD.replace("\n", end)))
    assert first == [
        ParsedWord("It", "PRON", 3, "nsubj"),
        ParsedWord("isn't", "AUX", 3, "cop"),
        ParsedWord("isn't", "PART", 3, "neg", joined=1),
        ParsedWord("red", "ADJ", -1, "root"),
        ParsedWord(".", "PUNCT", 3, "punct"),
    ]
    assert second == [ParsedWord("Stars", "NOUN", -1, "root")]


def changed(line: int, old: str, new: str) -> str:
    lines = GOOD.split("\n")
    assert old in lines[line - 1]
    lines[line - 1] = lines[line - 1].replace(old, new)
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (changed(2, "\tnsubj", " nsubj"), r"line 2: 9 columns; CoNLL-U has 10, divided by tabs"),
        (changed(2, "1\t", "2\t"), r"line 2: word '2' stands where word 1 should"),
        (changed(2, "1\t", "one\t"), r"line 2: word 'one' stands where word 1 should"),
        (changed(2, "\tIt", "\t"), r"line 2: the word has no form"),
        (changed(2, "\t4\t", "\t_\t"), r"line 2: the governor is '_' and the relation 'nsubj'"),
        (changed(2, "nsubj", "_"), r"line 2: the governor is '4' and the relation '_'"),
        (changed(2, "\t4\t", "\t6\t"), r"line 2: the governors of word 1 do not lead to a root among the 5 words"),
        (changed(2, "\t4\t", "\t1\t"), r"line 2: the governors of word 1 do not lead to a root"),
        (changed(7, "\t0\t", "\t5\t"), r"line 2: the governors of word 1 do not lead to a root"),
        (changed(3, "2-3", "3-4"), r"line 3: the words 3-4 stand behind word 1"),
        (changed(3, "2-3", "2-2"), r"line 3: the words 2-2 stand behind word 1"),
        (changed(3, "2-3", "2-9"), r"line 8: the words 2-9 are not all there"),
        ("1-2\tdon't\t_\t_\t_\t_\t_\t_\t_\t_\n", r"line 1: the words 1-2 are not all there"),
        ("0.1\tx\t_\t_\t_\t_\t_\t_\t_\t_\n", r"line 1: a sentence without words"),
    ],
)
def test_damaged_lines_are_named(tmp_path, text, message):
    path = written(tmp_path, text)
    with pytest.raises(ValueError, match=rf"parses\.conllu, {message}"):
        list(read_conllu(path))


@pytest.mark.parametrize(
    ("line", "old", "new"), [(2, "1\t", "9" * 5000 + "\t"), (2, "\t4\t", "\t" + "9" * 5000 + "\t")]
)
def test_numbers_of_thousands_of_digits(tmp_path, line, old, new):
    with pytest.raises(ValueError, match=r"parses\.conllu, line 2: "):
        list(read_conllu(written(tmp_path, changed(line, old, new))))


def test_a_long_chain_of_governors_takes_one_pass(tmp_path):
    number = 20_000
    rows = [f"{row}\tx\t_\tNOUN\t_\t_\t{(row + 1) % (number + 1)}\tdep\t_\t_" for row in range(1, number + 1)]
    started = time.process_time()
    [words] = read_conllu(written(tmp_path, "\n".join(rows) + "\n"))
    assert len(words) == number and words[-1].governor == -1
    assert time.process_time() - started < 2


def test_a_file_that_is_missing_or_no_text(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        list(read_conllu(tmp_path / "nowhere.conllu"))
    path = tmp_path / "bytes.conllu"
    path.write_bytes(b"# caf\xe9\n")
    with pytest.raises(ValueError, match="not a UTF-8 text file"):
        list(read_conllu(path))


@pytest.mark.parametrize("text", ["", "\n\n", "# sent_id = 1\n\n"])
def test_a_file_without_a_sentence_is_refused(tmp_path, text):
    path = tmp_path / "parses.conllu"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"parses\.conllu: there is no sentence in the file; parse the captions first"):
        list(read_conllu(path))
