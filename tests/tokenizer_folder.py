"""A folder with a small tokenizer, as transformers saves it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from e2e_vl.text import SPECIAL_TOKENS

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
