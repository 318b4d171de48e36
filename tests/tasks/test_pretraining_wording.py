"""What the wording of pre-training hands to objectives, and what it makes of the drafts that they hand back."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np
import pytest

from e2e_vl.examples import Targets, TextExample, stacked
from e2e_vl.samples import HumanAnswers, PhraseBoxes, Sample, SampleText
from e2e_vl.tasks.config import MaskedWordsConfig
from e2e_vl.tasks.objectives.base import Draft, ObjectivePreprocessor
from e2e_vl.tasks.objectives.words import WordMasking
from e2e_vl.tasks.pretraining import PretrainingPreprocessor
from e2e_vl.text import TextEncoding, TextTokenizer
from tests.tasks.preprocessors import make_tokenizer, sample_of, spoken, word


@pytest.fixture
def tokenizer(tmp_path):
    return make_tokenizer(tmp_path, "what is red", "the red box", "a dog and a cat")


def preprocessor_of(tokenizer, part: type[ObjectivePreprocessor], **options) -> PretrainingPreprocessor:
    text_tokenizer = TextTokenizer(tokenizer, **options)
    return PretrainingPreprocessor(text_tokenizer, {"part": part(text_tokenizer)})


# Texts of the data, and texts beside them


@dataclasses.dataclass
class AnswerTargets(Targets):
    known: np.ndarray | None = stacked()


class AnswerOfText(ObjectivePreprocessor):
    """Learns the answers that the reader states, and asks once more beside each question."""

    def targets(self, draft: Draft, encoding: TextEncoding) -> AnswerTargets:
        return AnswerTargets(np.int64(-1 if draft.text is None else len(draft.text.truth.answers)))

    def beside(self, sample: Sample, generator: np.random.Generator) -> Iterable[tuple[Draft, TextEncoding]]:
        for has_image in (True, False):
            yield Draft("", sample, has_image=has_image), self.text_tokenizer.single([])


def test_an_objective_reads_the_truth_of_a_text(tokenizer):
    question = SampleText(0, "what is red", {}, HumanAnswers(("the box", "a dog")))
    texts = word(preprocessor_of(tokenizer, AnswerOfText), sample_of(question))
    assert [int(text.targets.parts["part"].known) for text in texts] == [2, -1, -1]


def test_texts_beside_look_at_the_images_of_the_text_if_they_have_any(tokenizer):
    question = SampleText(0, "what is red", {}, HumanAnswers(()), image_index=(0,))
    texts = word(preprocessor_of(tokenizer, AnswerOfText), sample_of(question))
    assert [text.image_index for text in texts] == [(0,), (0,), ()]
    assert [bool(text.record) for text in texts] == [True, False, False]


# Pairs of texts


class TwoCaptions(ObjectivePreprocessor):
    """Puts the next text of the data behind each, as the second text of a pair."""

    def exchange(self, draft: Draft, index: int, generator: np.random.Generator) -> None:
        draft.second = draft.sample.pool[index + 1]


def pair_of(tokenizer, probability: float = 0.0, **options) -> TextExample:
    text_tokenizer = TextTokenizer(tokenizer, **options)
    masking = WordMasking(text_tokenizer, MaskedWordsConfig(probability=probability, always_mask=True))
    preprocessor = PretrainingPreprocessor(
        text_tokenizer, {"pair": TwoCaptions(text_tokenizer), "masked_words": masking}
    )
    [text] = word(preprocessor, sample_of("the red box", pool=["the red box", "a dog and a cat"]))
    return text


def test_two_texts_are_laid_out_as_a_pair(tokenizer):
    text = pair_of(tokenizer)
    assert spoken(text, tokenizer) == "[CLS] the red box [SEP] a dog and a cat [SEP]"
    assert text.encoding.token_type_ids.tolist() == [0] * 5 + [1] * 6
    assert spoken(pair_of(tokenizer, is_blank=True), tokenizer) == "[CLS] [SEP] [SEP]"


def test_words_of_both_texts_are_masked(tokenizer):
    text = pair_of(tokenizer, probability=1.0)
    assert spoken(text, tokenizer) == " ".join(["[CLS]", *["[MASK]"] * 3, "[SEP]", *["[MASK]"] * 5, "[SEP]"])
    labels = text.targets.parts["masked_words"].labels
    np.testing.assert_array_equal(
        np.where(labels < 0, text.encoding.input_ids, labels), pair_of(tokenizer).encoding.input_ids
    )


def test_a_pair_that_is_too_long_is_cut_with_its_labels(tokenizer):
    text = pair_of(tokenizer, probability=1.0, max_length=8)
    whole = pair_of(tokenizer, max_length=8)
    assert spoken(whole, tokenizer) == "[CLS] the red box [SEP] a dog [SEP]"
    assert text.record["cut_wordpieces"] == 3
    labels = text.targets.parts["masked_words"].labels
    np.testing.assert_array_equal(np.where(labels < 0, text.encoding.input_ids, labels), whole.encoding.input_ids)
    with pytest.raises(ValueError, match=r"data\.max_text_length is 2, but the special tokens alone need 3"):
        pair_of(tokenizer, max_length=2)


# Phrases


class OtherCaption(ObjectivePreprocessor):
    """Puts the next text of the data in the place of each."""

    def exchange(self, draft: Draft, index: int, generator: np.random.Generator) -> None:
        draft.words = draft.sample.pool[index + 1]


@pytest.mark.parametrize(
    ("part", "spans"), [(TwoCaptions, [[1, 4]]), (OtherCaption, []), (ObjectivePreprocessor, [[1, 4]])]
)
def test_phrases_belong_to_the_text_of_the_data(tokenizer, part, spans):
    """They stay with a first text of two, and are not those of another caption in its place."""
    text = SampleText(0, "the red box", {}, phrases=PhraseBoxes(((0, 11),), (np.zeros((1, 4)),), is_complete=True))
    text_tokenizer = TextTokenizer(tokenizer, with_phrase_spans=True)
    masking = WordMasking(text_tokenizer, MaskedWordsConfig(probability=0.9, always_mask=True))
    preprocessor = PretrainingPreprocessor(text_tokenizer, {"part": part(text_tokenizer), "masked_words": masking})
    [example] = word(preprocessor, sample_of(text, pool=["the red box", "a dog and a cat"]))
    assert example.phrases.spans.tolist() == spans and example.phrases.is_complete == bool(spans)
    is_other = part is OtherCaption
    assert example.phrases.words == ("a dog and a cat" if is_other else "the red box")
    characters = [example.phrases.words[slice(*place)] for place in example.phrases.offsets if place[1]]
    assert characters == example.phrases.words.split()


def test_a_text_beside_has_no_phrases_of_the_text_of_the_data(tokenizer):
    text = SampleText(0, "the red box", {}, HumanAnswers(()), phrases=PhraseBoxes(((0, 3),), (np.zeros((1, 4)),)))
    own, *beside = word(preprocessor_of(tokenizer, AnswerOfText, with_phrase_spans=True), sample_of(text))
    assert [len(one.phrases.spans) for one in (own, *beside)] == [1, 0, 0]
