"""Gold parses of drawn captions: written for every caption, with governors and labels as in a grammar."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e_vl.synthetic.flickr30k import conllu_lines, parse_of

CAPTION = [
    *(("The big red star", True), (",", False), ("two blue things", True), ("and", False), ("the cross", True)),
    *(("in", False), ("a picture", True), ("while", False), ("it", True), ("is still", False), (".", False)),
]
EXPECTED = """
The det star|big amod star|red amod star|star root -|, punct star|two num things|blue amod things|things conj star
and cc star|the det cross|cross conj star|in prep star|a det picture|picture pobj in|while mark still
it nsubj still|is cop still|still advcl star|. punct star
"""


def told(words) -> list[str]:
    governors = ["-" if word.governor < 0 else words[word.governor].form for word in words]
    return [f"{word.form} {word.relation} {governor}" for word, governor in zip(words, governors, strict=True)]


def test_a_caption_with_everything():
    words = parse_of(CAPTION)
    assert told(words) == EXPECTED.strip().replace("\n", "|").split("|")
    assert told(parse_of([("A picture", True), (".", False)])) == ["A det picture", "picture root -", ". punct picture"]
    with pytest.raises(ValueError, match="'over' has no rule"):
        parse_of([("The star", True), ("over", False)])


def test_a_sentence_has_a_line_per_word():
    lines = conllu_lines("7#0", parse_of([("A picture", True), (".", False)])).split("\n")
    assert lines[:2] == ["# sent_id = 7#0", "# text = A picture ."] and lines[-2:] == ["", ""]
    assert lines[3] == "2\tpicture\t_\tNOUN\t_\t_\t0\troot\t_\t_"


def test_every_written_caption_has_one_parse(synthetic_folder):
    folder: Path = synthetic_folder / "flickr30k"
    for split in ("train", "val"):
        captions = set()
        for image in (folder / f"{split}.txt").read_text().split():
            for line in (folder / "Sentences" / f"{image}.txt").read_text().splitlines():
                words = [word for word in line.split() if not word.startswith("[/EN#")]
                captions.add(" ".join(word.rstrip("]") for word in words))
        parsed = (folder / "parses" / f"{split}.conllu").read_text()
        texts = [line.removeprefix("# text = ") for line in parsed.splitlines() if line.startswith("# text = ")]
        assert len(texts) == len(set(texts)) and set(texts) == captions
        for sentence in parsed.strip().split("\n\n"):
            rows = [line.split("\t") for line in sentence.splitlines() if not line.startswith("#")]
            assert [row[6] for row in rows].count("0") == 1 and {len(row) for row in rows} == {10}
    assert not (synthetic_folder / "refcoco+_phrases" / "parses").exists()
