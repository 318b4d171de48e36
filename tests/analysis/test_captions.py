"""CoNLL-U: words with governors; what is damaged is named with its line."""

from __future__ import annotations

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
        (changed(2, "\tnsubj", " nsubj"), "line 2"),  # 9 columns
        (changed(2, "1\t", "2\t"), "line 2"),
        (changed(2, "\t4\t", "\t_\t"), "line 2"),
        (changed(2, "\t4\t", "\t6\t"), "line 2"),  # a governor that is not there
    ],
)
def test_damaged_lines_are_named(tmp_path, text, message):
    with pytest.raises(ValueError, match=rf"parses\.conllu, {message}: not a word of CoNLL-U"):
        list(read_conllu(written(tmp_path, text)))


@pytest.mark.parametrize("text", ["", "\n\n", "# sent_id = 1\n\n"])
def test_a_file_without_a_sentence_is_refused(tmp_path, text):
    path = tmp_path / "parses.conllu"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"parses\.conllu: there is no sentence in the file; parse the captions first"):
        list(read_conllu(path))
