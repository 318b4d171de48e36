from __future__ import annotations

import re

import pytest

from detector.errors import UserError
from e2e_vl.tokenizer_files import SPECIAL_NAMES, check_special_tokens, check_tokenizer, require_each_number
from tests.tokenizer_folder import WORDS, good_tokenizer


def test_steps_of_bert_are_accepted():
    check_tokenizer(good_tokenizer(), "t.json")
    steps = [{"type": "NFD"}, {"type": "Lowercase"}, {"type": "StripAccents"}]
    splits = [{"type": "Whitespace"}, {"type": "Punctuation", "behavior": "Isolated"}]
    others = {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": splits},
        "post_processor": {"type": "BertProcessing", "sep": ["[SEP]", 3], "cls": ["[CLS]", 2]},
        "decoder": None,
    }
    check_tokenizer(good_tokenizer() | others, "t.json")
    old = good_tokenizer()
    del old["model"]["type"]
    check_tokenizer(old, "t.json")


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("normalizer", {"type": "Precompiled"}, "t.json: the normalizer is of the kind 'Precompiled'; BERT's are read"),
        ("pre_tokenizer", {"type": "Split"}, "t.json: the pre_tokenizer is of the kind 'Split'"),
        ("model", {"type": "BPE"}, "t.json: the model is of the kind 'BPE'"),
        ("decoder", {}, "t.json: the decoder is of the kind None"),
        ("post_processor", {"type": "Sequence"}, "t.json: the post_processor is of the kind 'Sequence'"),
        ("padding", {"strategy": {"Fixed": 10**9}}, "t.json: padding.strategy.Fixed is 1000000000, expected"),
        ("added_tokens", [{"id": 7, "content": "a"}], "t.json: the wordpiece 'a' has two numbers"),
        ("model", {"unk_token": "[UNK]", "vocab": {"a": 0}}, "t.json: the vocabulary lacks '[UNK]'"),
    ],
)
def test_other_steps_are_refused(part, value, message):
    with pytest.raises(UserError, match="^" + re.escape(message)) as caught:
        check_tokenizer(good_tokenizer() | {part: value}, "t.json")
    assert "\n" not in str(caught.value)


def test_numbers_have_no_gaps():
    require_each_number(range(len(WORDS)), "t.json")
    with pytest.raises(UserError, match="two wordpieces have one number"):
        require_each_number([0, 1, 1], "t.json")
    with pytest.raises(UserError, match="3 wordpieces have numbers up to 9, with gaps"):
        require_each_number([0, 1, 9], "t.json")


def test_each_special_wordpiece_is_there_once():
    numbers = dict(zip(SPECIAL_NAMES, (2, 3, 4, 0, 1), strict=True))
    check_special_tokens(numbers, "[UNK]", good_tokenizer(), "t")
    with pytest.raises(UserError, match=r"t: the tokenizer has no cls_token, mask_token; save"):
        check_special_tokens(numbers | {"cls_token": None, "mask_token": None}, "[UNK]", good_tokenizer(), "t")
    with pytest.raises(UserError, match=r"t: two of cls_token, .* are one wordpiece"):
        check_special_tokens(numbers | {"mask_token": 3}, "[UNK]", good_tokenizer(), "t")
    with pytest.raises(UserError, match=re.escape("t: unk_token is 'a', and the model in it has '[UNK]'")):
        check_special_tokens(numbers | {"unk_token": 5}, "a", good_tokenizer(), "t")
