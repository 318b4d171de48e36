"""Pre-training on questions with choices: which choice is read, what is masked, which regions its words name."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from e2e_vl.config import load_config
from e2e_vl.data.batching import random_generator
from e2e_vl.run.build import build_objectives, build_task
from e2e_vl.tasks.base import Sizes
from e2e_vl.tasks.config import PretrainingConfig, VCRConfig
from e2e_vl.tasks.pretraining import PretrainingTask
from e2e_vl.tasks.vcr import VCRPreprocessor
from e2e_vl.text import TextTokenizer
from tests.data.tiny_vcr import TinyVCR
from tests.tasks.preprocessors import photo
from tests.weights.starts import replaced

CONFIG = "configs/tiny/visual_bert_pretraining.yaml"
WORDS = {"mask_size": None, "turn_names": False}


@pytest.fixture
def tiny(tmp_path) -> TinyVCR:
    return TinyVCR(tmp_path)


def task_of(
    tokenizer, drawn: str = "random", texts: str = "stated", mask_size: int | None = None, **masking
) -> PretrainingTask:
    config = load_config(CONFIG)
    settings = {
        "objectives": {
            "masked_words": {"weight": 1.0, **masking},
            "masked_text": 0.0,
            "masked_regions": 0.0,
            "relationship": {"weight": 1.0, "texts": texts},
        },
        "choices": {"task": "vcr", "config": WORDS | {"mask_size": mask_size}, "drawn": drawn},
    }
    return build_task(replaced(config, task={"config": settings}), Sizes(8, len(tokenizer)))


def texts_of(task, dataset, tokenizer, index: int, epoch: int = 0, config: VCRConfig | None = None) -> list:
    text_tokenizer = TextTokenizer(tokenizer, training=True)
    preprocessor = task.preprocessor(text_tokenizer) if config is None else VCRPreprocessor(text_tokenizer, config)
    draw = functools.partial(random_generator, 0, epoch)
    return list(preprocessor(dataset.sample((index,)), [photo()], draw))


def test_a_random_choice_is_read_as_the_other_task_words_it(tiny):
    dataset, tokenizer = tiny.dataset(), tiny.tokenizer
    task = task_of(tokenizer, probability=0.0)
    choices = texts_of(task, dataset, tokenizer, 0, config=VCRConfig(**WORDS))
    shown = set()
    for epoch in range(40):
        [text] = texts_of(task, dataset, tokenizer, 0, epoch)
        [number] = [
            n for n, one in enumerate(choices) if np.array_equal(one.encoding.input_ids, text.encoding.input_ids)
        ]
        np.testing.assert_array_equal(text.encoding.token_type_ids, choices[number].encoding.token_type_ids)
        np.testing.assert_array_equal(text.region_of_token, choices[number].region_of_token)
        assert int(text.targets.parts["relationship"].is_match) == (number == 2) == text.record["is_match"]
        shown.add(number)
    assert shown == {0, 1, 2, 3} and not [name for name, _ in task.named_modules() if "region_classifier" in name]


def test_masks_of_objects_are_those_of_the_other_task(tiny):
    assert [task_of(tiny.tokenizer, mask_size=size).mask_size for size in (None, 7)] == [None, 7]


def test_choices_in_turn_are_the_same_in_every_epoch(tiny):
    dataset, tokenizer = tiny.dataset(), tiny.tokenizer
    task = task_of(tokenizer, "in_turn", probability=0.0)
    for index in range(3):
        expected = texts_of(task, dataset, tokenizer, index, config=VCRConfig(**WORDS))[index]
        for epoch in range(3):
            [text] = texts_of(task, dataset, tokenizer, index, epoch)
            np.testing.assert_array_equal(text.encoding.input_ids, expected.encoding.input_ids)


def test_wordpieces_are_masked_where_they_stand(tiny):
    dataset, tokenizer = tiny.dataset(), tiny.tokenizer
    plain, masked = (task_of(tokenizer, "in_turn", probability=p, always_mask=True) for p in (0.0, 0.5))
    [before], [after] = (texts_of(task, dataset, tokenizer, 0) for task in (plain, masked))
    labels = after.targets.parts["masked_words"].labels
    is_masked = labels >= 0
    assert 0 < is_masked.sum() < len(labels) and not is_masked[before.encoding.source < 0].any()
    np.testing.assert_array_equal(labels[is_masked], before.encoding.input_ids[is_masked])
    assert (after.encoding.input_ids[is_masked] == tokenizer.mask_token_id).all()
    np.testing.assert_array_equal(after.encoding.input_ids[~is_masked], before.encoding.input_ids[~is_masked])


def test_settings_that_cannot_work(tiny):
    dataset, tokenizer = tiny.dataset(), tiny.tokenizer
    with pytest.raises(ValueError, match=r"set task\.config\.objectives\.relationship\.texts to stated"):
        texts_of(task_of(tokenizer, texts="pair"), dataset, tokenizer, 0)
    sizes = Sizes(8, len(tokenizer))
    objectives = build_objectives({"masked_text": 0.0, "masked_regions": 0.0}, sizes)
    task = PretrainingTask(sizes, PretrainingConfig(), objectives)
    with pytest.raises(ValueError, match=r"set task\.config\.choices\.task, which words them"):
        texts_of(task, dataset, tokenizer, 0)
