"""Hostile folders of tokenizers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from e2e_vl.text import SPECIAL_TOKENS
from e2e_vl.tokenizer_files import SPECIAL_NAMES
from tests.campaign.hostile_parts import Builder

WORDS = (*SPECIAL_TOKENS, "a", "red", "box", "dogs")


def good_tokenizer() -> dict[str, Any]:
    """A tokenizer.json as transformers saves it for a vocabulary of 9 words."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    ends = {"[CLS]": 2, "[SEP]": 3}
    pieces = [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": n, "content": word, **flags} for n, word in enumerate(SPECIAL_TOKENS)],
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": True,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": pieces,
            "pair": [*pieces, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {word: {"id": word, "ids": [n], "tokens": [word]} for word, n in ends.items()},
        },
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": {word: n for n, word in enumerate(WORDS)},
        },
    }


def write_tokenizer(folder: Path, content: dict[str, Any]) -> Path:
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    return folder


def _as_config(**fields: Any) -> Builder:
    """A good tokenizer.json beside a tokenizer_config.json that says something else."""

    def build(folder: Path, canary: Path) -> Path:
        write_tokenizer(folder, good_tokenizer())
        names = dict(zip(SPECIAL_NAMES, ("[CLS]", "[SEP]", "[MASK]", "[PAD]", "[UNK]"), strict=True))
        content = {"tokenizer_class": "BertTokenizer", **names, **fields}
        (folder / "tokenizer_config.json").write_text(json.dumps(content))
        (folder / "evil.py").write_text(f"open({str(canary)!r}, 'w')\nclass Evil: pass\n")
        return folder

    return build


def _with(**parts: Any) -> Builder:
    return lambda folder, canary: write_tokenizer(folder, {**good_tokenizer(), **parts})


def _model(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Builder:
    return _with(model=change(good_tokenizer()["model"]))


def _numbered(word: str, number: int) -> Builder:
    return _model(lambda model: {**model, "vocab": {**model["vocab"], word: number}})


def _nested_lowercase() -> dict[str, Any]:
    step: dict[str, Any] = {"type": "Lowercase"}
    for _ in range(15):
        step = {"type": "Sequence", "normalizers": [step, step]}
    return step


def _replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


TOKENIZERS: dict[str, Builder] = {
    "precompiled": _with(normalizer={"type": "Precompiled", "precompiled_charsmap": "/////wAAAAA="}),
    "precompiled_of_no_length": _with(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAAAAAA"}),
    "growing": _with(
        normalizer={"type": "Sequence", "normalizers": [_replace({"String": "a"}, "a" * 100)] * 6},
    ),
    "growing_at_nothing": _with(normalizer=_replace({"Regex": ""}, "x" * 1000)),
    "nested": _with(normalizer=_nested_lowercase()),
    "many_steps": _with(normalizer={"type": "Sequence", "normalizers": [{"type": "Lowercase"}] * 1000}),
    "fixed_length": _with(pre_tokenizer={"type": "FixedLength", "length": 0}),
    "slow_expression": _with(
        pre_tokenizer={
            "type": "Split",
            "pattern": {"Regex": "(a|a|b|ab|ba)*$c"},
            "behavior": "Isolated",
            "invert": False,
        }
    ),
    "bpe": _with(model={"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "a"]], "unk_token": "[UNK]"}),
    "unigram": _with(model={"type": "Unigram", "unk_id": 0, "vocab": [["[UNK]", 0.0], ["a", -1.0]]}),
    "gaps": _numbered("dogs", 1_000_000_000),
    "gaps_of_32_bits": _numbered("dogs", 2**32 - 1),
    "one_number_twice": _numbered("dogs", 7),
    "negative_number": _numbered("dogs", -1),
    "without_unknown": _model(lambda model: {**model, "unk_token": "nothing"}),
    "long_words": _model(lambda model: {**model, "max_input_chars_per_word": 10**12}),
    "added_again_and_again": _with(
        added_tokens=[{**good_tokenizer()["added_tokens"][0], "id": n, "content": "a"} for n in range(200)]
    ),
    "added_empty": _with(added_tokens=[{**good_tokenizer()["added_tokens"][0], "id": 9, "content": ""}]),
    "padding": _with(
        padding={
            "strategy": {"Fixed": 10**12},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "[PAD]",
        }
    ),
    "long_ends": _with(
        post_processor={
            **good_tokenizer()["post_processor"],
            "special_tokens": {"[CLS]": {"id": "[CLS]", "ids": [2] * 10**6, "tokens": ["[CLS]"] * 10**6}},
        }
    ),
    "ends_outside": _with(
        post_processor={
            **good_tokenizer()["post_processor"],
            "special_tokens": {word: {"id": word, "ids": [10**9], "tokens": [word]} for word in ("[CLS]", "[SEP]")},
        }
    ),
    "steps_of_text": _with(normalizer="Lowercase"),
    "class_of_other_steps": _as_config(tokenizer_class="GPT2Tokenizer"),
    "class_of_other_words": _as_config(tokenizer_class="CLIPTokenizer"),
    "class_of_no_tokenizer": _as_config(tokenizer_class="AutoTokenizer"),
    "class_from_elsewhere": _as_config(tokenizer_class="Evil", auto_map={"AutoTokenizer": ["evil.Evil", "evil.Evil"]}),
    "without_mask": _as_config(mask_token=None),
    "without_ends": _as_config(cls_token=None, sep_token=None),
    "blank_mask": _as_config(mask_token=""),
    "blank_unknown": _as_config(unk_token=""),
    "two_special_ones_alike": _as_config(cls_token="[SEP]"),
    "added_by_text": _as_config(added_tokens_decoder="x"),
}
