"""CoNLL-U files, parses aligned with their captions, and the wordpieces of phrases and parsed words."""

from __future__ import annotations

import dataclasses
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from e2e_vl.analysis.captions import (
    RECORD,
    CaptionAnnotations,
    CaptionPreprocessor,
    ParsedWord,
    Parses,
    parse_with_spacy,
    read_conllu,
    read_parses,
)
from e2e_vl.samples import PhraseBoxes, SampleText
from e2e_vl.text import TextTokenizer, load_tokenizer
from tests.tasks.preprocessors import photo, sample_of

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


def test_sentences_are_read(tmp_path):
    (tmp_path / "parses.conllu").write_text(GOOD)
    first, second = read_conllu(tmp_path / "parses.conllu")
    assert first == [
        ParsedWord("It", 3, "nsubj"),
        ParsedWord("isn't", 3, "cop"),
        ParsedWord("isn't", 3, "neg", is_joined=True),
        ParsedWord("red", -1, "root"),
        ParsedWord(".", 3, "punct"),
    ]
    assert second == [ParsedWord("Stars", -1, "root")]


@pytest.mark.parametrize(("old", "new"), [("\tnsubj", " nsubj"), ("1\tIt", "2\tIt"), ("\t4\tnsubj", "\t_\tnsubj")])
def test_a_damaged_line_is_named(tmp_path, old, new):
    (tmp_path / "parses.conllu").write_text(GOOD.replace(old, new))
    with pytest.raises(ValueError, match=r"parses\.conllu, line 2"):
        list(read_conllu(tmp_path / "parses.conllu"))


def words(*forms: str) -> list[ParsedWord]:
    return [ParsedWord(form, row - 1, "dep") for row, form in enumerate(forms)]


def placed(parsed: list[ParsedWord], text: str) -> list[str]:
    return [text[slice(*word.span)] for word in Parses.of([parsed], "here").find(text)]


def test_words_are_placed_in_the_caption():
    text = 'A man\'s  red car ( 3 ) , "old".'
    forms = ["A", "man", "'s", "red", "car", "-LRB-", "3", "-RRB-", ",", "``", "old", "''", "."]
    assert placed(words(*forms), text) == ["A", "man", "'s", "red", "car", "(", "3", ")", ",", '"', "old", '"', "."]
    assert placed(words("-LRB-", "x"), "-LRB- x") == ["-LRB-", "x"], "the caption may be written like its parse"
    assert placed(words("New York", "x"), "New York x") == ["New York", "x"]
    joined = words("a", "isn't", "isn't", "b")
    joined[2] = dataclasses.replace(joined[2], is_joined=True)
    assert placed(joined, "a isn't b") == ["a", "isn't", "isn't", "b"]


def test_parses_are_found_whatever_the_white_space():
    parses = Parses.of([words("A", "star", "."), words("``", "x", "''"), words("A", "star", ".")], "here")
    assert len(parses.by_text) == 2
    found = parses.find("A star.")
    assert [(word.span, word.governor) for word in found] == [((0, 1), -1), ((2, 6), 0), ((6, 7), 1)]
    assert parses.find('" x "') is not None and parses.find("A stars.") is None


# spaCy


@pytest.mark.parametrize("is_installed", [True, False])
def test_what_spacy_lacks_is_said(monkeypatch, is_installed):
    def load(name: str, **_):
        raise OSError("no such model")

    monkeypatch.setitem(sys.modules, "spacy", SimpleNamespace(load=load) if is_installed else None)
    with pytest.raises(ValueError, match="spacy download missing" if is_installed else "spaCy .* is not installed"):
        parse_with_spacy(["a"], "missing")


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
        for _ in range(60):
            own = {"det": draw.choice(["A", "The"]), "color": draw.choice(["red", "blue", "green"])}
            own |= {"shape": draw.choice(shapes), "other": draw.choice(shapes)}
            file.write(SENTENCES.format(**own) + "\n")
    return path


@pytest.fixture(scope="module")
def model(gold, tmp_path_factory) -> str:
    """Folder of a spaCy pipeline whose parser was trained on `gold`; its published models need a download."""
    spacy = pytest.importorskip(
        "spacy", reason='spaCy is not installed; pip install "e2e-vl[parse]" lets this test run'
    )
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


def test_parses_of_the_real_spacy_are_the_gold_ones(gold, model):
    truth = read_parses(gold)
    texts = {" ".join(word.form for word in sentence) for sentence in read_conllu(gold)}
    parses = parse_with_spacy([*sorted(texts), "The red star \n next to the cross ."], model)
    assert len(truth.by_text) == len(texts) > 20
    for text in texts:
        found, expected = parses.find(text), truth.find(text)
        assert [(word.span, word.governor) for word in found] == [(word.span, word.governor) for word in expected]
        assert [word.relation.lower() for word in found] == [word.relation for word in expected]  # spaCy writes ROOT
    spaced = parses.find("The red star \n next to the cross .")
    assert [word.span for word in spaced][:3] == [(0, 3), (4, 7), (8, 12)] and len(spaced) == 8


# Wordpieces


TEXT = "The red star and it ."
SPANS = ((0, 12), (17, 19))
BOXES = (np.array([[1.0, 2, 3, 4]]), np.zeros((0, 4)))
RELATIONS = [("The", 2, "det"), ("red", 2, "amod"), ("star", -1, "root"), ("and", 2, "cc"), ("it", 2, "conj")]
PARSE = [ParsedWord(*row) for row in [*RELATIONS, (".", 2, "punct")]]


def annotated(tmp_path, *, parse=PARSE, max_length: int | None = None, **options) -> CaptionAnnotations:
    """The vocabulary spells "star" as st ##ar."""
    pieces = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "red", "st", "##ar", "and", "it", ".", "x")
    (tmp_path / "vocab.txt").write_text("".join(f"{piece}\n" for piece in pieces))
    tokenizer = load_tokenizer(tmp_path / "vocab.txt")
    parses = None if parse is None else Parses.of([parse], "here")
    preprocessor = CaptionPreprocessor(TextTokenizer(tokenizer, max_length=max_length), parses, **options)
    text = SampleText(0, TEXT, {}, phrases=PhraseBoxes(SPANS, BOXES))
    [example] = preprocessor(sample_of(text), [photo()], None)
    return example.record[RECORD]


def test_phrases_and_words_have_their_wordpieces(tmp_path):
    caption = annotated(tmp_path)
    assert caption.phrases == ["The red star", "it"] and caption.phrase_spans.tolist() == [[1, 5], [6, 7]]
    assert caption.forms == ["The", "red", "star", "and", "it", "."]
    assert caption.word_spans.tolist() == [[1, 2], [2, 3], [3, 5], [5, 6], [6, 7], [7, 8]]
    assert caption.phrase_of == [0, 0, 0, -1, 1, -1]
    assert caption.is_head == [False, False, True, False, True, False]
    found = {(caption.forms[one.governor], caption.forms[one.dependent], one.label) for one in caption.relations}
    assert found == {
        ("star", form, label) for form, governor, label in [*RELATIONS, (".", 2, "punct")] if governor == 2
    }
    assert caption.is_word.tolist() == [False, *[True] * 7, False]
    assert [len(own) for own in caption.boxes] == [1, 0] and caption.is_parsed


def test_what_is_cut_off_is_counted(tmp_path):
    caption = annotated(tmp_path, max_length=6)  # [CLS] the red st ##ar [SEP]
    assert caption.phrases == ["The red star"] and caption.phrases_cut == 1
    assert caption.forms == ["The", "red", "star"] and caption.words_cut == 3
    assert [one.label for one in caption.relations] == ["det", "amod"]
    caption = annotated(tmp_path, max_length=5)  # [CLS] the red st [SEP]: a phrase is cut in its middle
    assert caption.phrases == [] and caption.phrases_cut == 2
    assert caption.forms == ["The", "red"] and caption.words_cut == 4


def test_without_a_parse_there_are_words_without_relations(tmp_path):
    caption = annotated(tmp_path, parse=None)
    assert caption.forms == TEXT.split() and not caption.relations and not caption.is_parsed
    other = [dataclasses.replace(word, form="x") for word in PARSE]
    with pytest.raises(ValueError, match=r"here: the caption 'The red star and it \.' has no parse"):
        annotated(tmp_path, parse=other)
    assert not annotated(tmp_path, parse=other, needs_parses=False).is_parsed
