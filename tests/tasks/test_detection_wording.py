"""Detection reads no words, but every image has a text."""

from __future__ import annotations

import pytest

from e2e_vl.samples import Categories, SampleText
from e2e_vl.tasks.detection import DetectionTask
from e2e_vl.text import TextTokenizer
from tests.tasks.preprocessors import make_tokenizer, sample_of, word


@pytest.mark.parametrize("max_length", [None, 2])
def test_an_empty_text_with_the_numbers_of_the_categories(tmp_path, max_length):
    tokenizer = make_tokenizer(tmp_path, "square")
    sample = sample_of(SampleText(4, "", {"image_id": 7, "objects": []}, Categories((2, 90))))
    [text] = word(DetectionTask(8).preprocessor(TextTokenizer(tokenizer, max_length=max_length)), sample)
    assert text.encoding.input_ids.tolist() == tokenizer("")["input_ids"]
    assert text.image_index == (0,)
    assert text.targets.category_ids.tolist() == [2, 90]
    assert text.record["text_index"] == 4 and text.record["image_id"] == 7
    assert text.record["image_size"] == [60, 100] and "cut_wordpieces" not in text.record
