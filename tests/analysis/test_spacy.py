"""Parses by the real spaCy, with a parser that is trained here on drawn captions, because its published models need a
download. Skipped where spaCy is not installed (`tests/analysis/test_parses.py` has a stand-in for it)."""

import random
from pathlib import Path

import pytest

from e2e_vl.analysis.captions import parse_with_spacy, read_conllu, read_parses

spacy = pytest.importorskip("spacy", reason='spaCy is not installed; pip install "e2e-vl[parse]" lets this test run')

SENTENCES = """\
1	{det}	_	DET	_	_	3	det	_	_
2	{color}	_	ADJ	_	_	3	amod	_	_
3	{shape}	_	NOUN	_	_	0	root	_	_
4	next	_	ADP	_	_	3	prep	_	_
5	to	_	ADP	_	_	4	prep	_	_
6	the	_	DET	_	_	7	det	_	_
7	{other}	_	NOUN	_	_	5	pobj	_	_
8	.	_	PUNCT	_	_	3	punct	_	_
"""


@pytest.fixture(scope="module")
def gold(tmp_path_factory) -> Path:
    draw = random.Random(0)
    shapes = ["star", "circle", "square", "cross"]
    path = tmp_path_factory.mktemp("gold") / "captions.conllu"
    with path.open("w") as file:
        for number in range(60):
            words = {"det": draw.choice(["A", "The"]), "color": draw.choice(["red", "blue", "green"])}
            words |= {"shape": draw.choice(shapes), "other": draw.choice(shapes)}
            text = "{det} {color} {shape} next to the {other} .".format(**words)
            file.write(f"# sent_id = {number}#0\n# text = {text}\n{SENTENCES.format(**words)}\n")
    return path


@pytest.fixture(scope="module")
def model(gold, tmp_path_factory) -> str:
    """Folder of a spaCy pipeline whose parser was trained on `gold`."""
    from spacy.tokens import Doc
    from spacy.training import Example

    spacy.util.fix_random_seed(0)
    pipeline = spacy.blank("en")
    pipeline.add_pipe("parser")
    examples = []
    for sentence in read_conllu(gold):
        forms = [word.form for word in sentence]
        heads = [row if word.governor < 0 else word.governor for row, word in enumerate(sentence)]
        truth = {"words": forms, "heads": heads, "deps": [word.relation for word in sentence]}
        examples.append(Example.from_dict(Doc(pipeline.vocab, words=forms), truth))
    pipeline.initialize(lambda: examples)
    for _ in range(8):
        for start in range(0, len(examples), 10):
            pipeline.update(examples[start : start + 10])
    folder = tmp_path_factory.mktemp("spacy") / "model"
    pipeline.to_disk(folder)
    return str(folder)


def test_its_parses_are_the_gold_ones(gold, model):
    truth = read_parses(gold)
    texts = {" ".join(word.form for word in sentence) for sentence in read_conllu(gold)}
    parses = parse_with_spacy(sorted(texts), model)
    assert len(parses) == len(truth) == len(texts) > 20
    for text in texts:
        found, expected = parses.find(text), truth.find(text)
        assert [(word.span, word.governor) for word in found] == [(word.span, word.governor) for word in expected]
        assert [word.relation.lower() for word in found] == [word.relation for word in expected]  # spaCy writes ROOT


def test_a_pipeline_without_a_parser_is_refused(tmp_path):
    spacy.blank("en").to_disk(tmp_path / "blank")
    with pytest.raises(ValueError, match="the spaCy model has no parser"):
        parse_with_spacy(["a star"], str(tmp_path / "blank"))
    with pytest.raises(ValueError, match=r"spaCy has no model 'missing'"):
        parse_with_spacy(["a star"], "missing")


def test_white_space_is_no_word(model):
    parses = parse_with_spacy(["The red star \n next to the cross ."], model)
    words = parses.find("The red star \n next to the cross .")
    assert [word.span for word in words][:3] == [(0, 3), (4, 7), (8, 12)] and len(words) == 8
    assert all(-1 <= word.governor < 8 for word in words)
