"""A question in wordpieces with a place for its answer, and what people answered as targets."""

from __future__ import annotations

import json

import numpy as np
import pytest

from e2e_vl.data.batching import pad_texts
from e2e_vl.encoders.vl_bert import VLBertModel
from e2e_vl.samples import HumanAnswers, Question, SampleText
from e2e_vl.tasks.config import VQAConfig
from e2e_vl.tasks.vqa import VQATask
from e2e_vl.text import TextTokenizer
from tests.tasks.preprocessors import make_tokenizer, photo, sample_of, tokens, word

GIVEN = HumanAnswers(("left side",) * 6 + ("left",) * 4)
ANSWERS = ["<unk>", "left", "right", "left side", "right side"]


@pytest.fixture
def tokenizer(tmp_path):
    return make_tokenizer(tmp_path, "red square left right blue side")


def preprocessor(tokenizer, **options):
    task = VQATask(8, VQAConfig(answers=ANSWERS))
    return task.preprocessor(TextTokenizer(tokenizer, **({"layout": VLBertModel.layout} | options)))


def questions(*words: str, truth: HumanAnswers | None = GIVEN):
    facts = {"question_id": 5} if truth is None else {"question_id": 5, "answers": list(truth.answers)}
    return sample_of(*(SampleText(2 * n, text, facts, truth) for n, text in enumerate(words)))


def test_the_answer_is_read_where_the_encoder_says(tokenizer):
    first, second = texts = word(preprocessor(tokenizer), questions("red square left", "blue"))
    assert tokens(first, tokenizer) == ["[CLS]", "red", "square", "left", "[SEP]", "[MASK]", "[SEP]"]
    assert first.encoding.token_type_ids.tolist() == [0, 0, 0, 0, 0, 1, 1]
    assert (first.encoding.summary, second.encoding.summary) == (5, 3)
    assert pad_texts(texts).summary.tolist() == [5, 3]
    assert first.record == json.loads(json.dumps(first.record))
    assert (first.record["text_index"], second.record["text_index"]) == (0, 2)
    assert first.record["answers"] == list(GIVEN.answers)
    [plain] = word(preprocessor(tokenizer, layout=type(VLBertModel.layout)()), questions("blue"))
    assert tokens(plain, tokenizer) == ["[CLS]", "blue", "[SEP]"] and plain.encoding.summary is None


def test_targets_of_the_answers(tokenizer):
    [text] = word(preprocessor(tokenizer), questions("blue"))
    np.testing.assert_allclose(text.targets.scores, [0, 1, 0, 1, 0])
    assert text.targets.scores.dtype == np.float32
    assert text.targets.best == 3
    [unknown] = word(preprocessor(tokenizer), questions("blue", truth=HumanAnswers(("green",) * 10)))
    assert not unknown.targets.scores.any() and unknown.targets.best == -1


def test_a_mirrored_image_swaps_left_and_right_in_question_and_answers(tokenizer):
    [text] = word(preprocessor(tokenizer), questions("red square left"), photo(flipped=True))
    assert tokens(text, tokenizer)[1:4] == ["red", "square", "right"]
    assert text.record["answers"] == ["right side"] * 6 + ["right"] * 4
    np.testing.assert_allclose(text.targets.scores, [0, 0, 1, 0, 1])
    assert text.targets.best == 4 and text.record["flipped"] is True


def test_without_answers_there_is_nothing_to_learn(tokenizer, tmp_path):
    [text] = word(preprocessor(tokenizer), questions("blue", truth=None))
    assert text.targets.scores is text.targets.best is None and "answers" not in text.record
    task = VQATask(8, VQAConfig(answers=ANSWERS))
    [text] = word(preprocessor(tokenizer), task.question(Question(tmp_path / "photo.jpg", "left?")))
    assert text.targets.scores is None


def test_a_blank_question_keeps_the_place_of_its_answer(tokenizer):
    [text] = word(preprocessor(tokenizer, is_blank=True), questions("red square left"))
    assert tokens(text, tokenizer) == ["[CLS]", "[SEP]", "[MASK]", "[SEP]"]
    assert text.encoding.token_type_ids.tolist() == [0, 0, 1, 1] and text.encoding.summary == 2


def test_long_questions_lose_their_last_pieces(tokenizer):
    [text] = word(preprocessor(tokenizer, max_length=5), questions("red square left"))
    assert tokens(text, tokenizer) == ["[CLS]", "red", "[SEP]", "[MASK]", "[SEP]"]
    assert text.record["cut_wordpieces"] == 2
    with pytest.raises(ValueError, match="alone need 4"):
        preprocessor(tokenizer, max_length=3)
