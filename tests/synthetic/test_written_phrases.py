"""Noun phrases of drawn expressions, in the format of Flickr30K Entities, and as the reader of RefCOCO states them."""

from __future__ import annotations

import numpy as np
import pytest

from e2e_vl.config import DataSettings
from e2e_vl.data import refcoco
from e2e_vl.data.flickr30k import read_sentences
from e2e_vl.data.refcoco import RefCOCODataset
from e2e_vl.synthetic.language import Description, ReferringExpression, to_words, two_phrases
from tests.data.roads import open_dataset

STAR, RED = Description(shape="star"), Description(colour="red", shape="circle")


@pytest.mark.parametrize("operator", ["near", "nearest", "in front", "behind", "bigger", "smaller", "farthest"])
@pytest.mark.parametrize("anchor", [RED, None])
def test_every_wording_comes_apart_into_its_phrases(operator, anchor):
    if anchor is None and operator not in ("bigger", "smaller"):
        return
    expression = ReferringExpression(STAR, operator, anchor)
    rng = np.random.default_rng(0)
    for _ in range(60):
        sentence = to_words(expression, rng)
        head, link, rest = two_phrases(expression, sentence)
        assert " ".join((head, link, rest)) == sentence
        assert head in ("star", "the star") and "star" not in rest
        assert rest in (("red circle", "the red circle") if anchor else ("the others", "all the others"))


@pytest.mark.parametrize("operator", [None, "biggest"])
def test_an_expression_about_one_object_is_one_phrase(operator):
    expression = ReferringExpression(STAR, operator)
    sentence = to_words(expression, np.random.default_rng(0))
    assert two_phrases(expression, sentence) == (sentence, "", "")


@pytest.fixture(scope="module")
def dataset(synthetic_folder) -> RefCOCODataset:
    return opened(synthetic_folder, "train")


def opened(folder, split: str, *, phrases: bool = True) -> RefCOCODataset:
    files = {"images": "images/train2014", "refs": "refcoco+/refs(unc).p", "instances": "refcoco+/instances.json"}
    if phrases:
        files |= {"phrases": "refcoco+_phrases/Sentences", "phrase_boxes": "refcoco+_phrases/Annotations"}
    settings = DataSettings(name="refcoco", root=str(folder), files=files)
    return open_dataset(RefCOCODataset, settings, split, "gt", phrases=True)


def test_the_reader_states_the_phrases_of_every_expression(dataset):
    """The first phrase names the object that is meant, others like it too; the second one other objects."""
    numbers = {"attribute": set(), "superlative": set(), "comparison": set(), "relation": set()}
    for texts in dataset.groups:
        for text in dataset.sample(texts).texts:
            phrases, meant = text.phrases, np.array(text.truth.box)
            assert phrases.is_complete
            numbers[text.metadata["family"]].add(len(phrases.spans))
            named = [text.words[slice(*span)] for span in phrases.spans]
            assert text.words.startswith(named[0]) and text.words.endswith(named[-1])
            assert all(len(boxes) for boxes in phrases.boxes)
            assert (phrases.boxes[0] == meant).all(axis=1).any(), text.words
            for boxes in phrases.boxes[1:]:
                assert not (boxes == meant).all(axis=1).any(), text.words
            if text.metadata["family"] == "relation":
                assert len(phrases.boxes[1]) == 1  # one landmark
    assert numbers == {"attribute": {1}, "superlative": {1}, "comparison": {2}, "relation": {2}}


def test_the_files_of_an_image_are_read_once_for_all_of_its_expressions(dataset, monkeypatch):
    dataset.sample(dataset.groups[3])  # the image that was asked for last is kept
    read = []
    monkeypatch.setattr(refcoco, "read_sentences", lambda path: read.append(path) or read_sentences(path))
    for texts in dataset.groups[:3]:
        dataset.sample(texts)
    assert len(read) == len(set(read)) == 3
    dataset.sample(dataset.groups[0])
    assert read[3] == read[0]


def test_without_files_of_phrases_an_expression_is_one(synthetic_folder):
    plain = opened(synthetic_folder, "val", phrases=False)
    [text] = plain.sample(plain.groups[0][:1]).texts
    assert text.phrases.spans == ((0, len(text.words)),) and not text.phrases.is_complete
    assert text.phrases.boxes[0].tolist() == [list(text.truth.box)]


def test_phrases_of_other_expressions_are_refused(dataset):
    image_id = dataset.texts[0].image_id
    with pytest.raises(ValueError, match=f"{image_id}.txt: no line has the expression 'a fox'"):
        dataset.phrases.of(image_id, "a fox")
