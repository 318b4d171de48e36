"""Checking a tokenizer.json before the tokenizers library reads it: BERT's kinds of steps only, with bounded numbers.

The library knows many more kinds. Some of them end the process for a damaged file, and some make texts a hundred times
longer at each step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta

from detector.errors import UserError
from e2e_vl.records import Count, Name, Record, checked, cut_text

_NORMALIZERS = ("BertNormalizer", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Strip", "StripAccents")
_PRE_TOKENIZERS = ("BertPreTokenizer", "Punctuation", "Whitespace", "WhitespaceSplit")
SPECIAL_NAMES = ("cls_token", "sep_token", "mask_token", "pad_token", "unk_token")  # attributes of a tokenizer
_STEPS = 8  # of a sequence
_REMEDY = "save the tokenizer again with transformers, or give a BERT-style vocab.txt"

_Short = Annotated[str, Meta(max_length=16)]
_Id = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_Segment = Annotated[int, Meta(ge=0, le=15)]
_Length = Annotated[int, Meta(ge=0, le=1 << 16)]
_Positive = Annotated[int, Meta(ge=1, le=1 << 16)]


class _WordPiece(Record):
    unk_token: Name
    vocab: dict[str, _Id]
    continuing_subword_prefix: _Short = "##"
    max_input_chars_per_word: Annotated[int, Meta(ge=1, le=1000)] = 100


class _AddedToken(Record):
    id: _Id
    content: Name


class _Fixed(Record):
    Fixed: _Length


class _Padding(Record):
    strategy: _Fixed | Literal["BatchLongest"]
    pad_to_multiple_of: _Positive | None = None


class _Truncation(Record):
    max_length: Count


class _Piece(Record):
    id: Name
    type_id: _Segment


class _SpecialToken(Record):
    id: Name
    ids: Annotated[list[_Id], Meta(max_length=_STEPS)]


class _Template(Record):
    single: Annotated[list[dict[str, _Piece]], Meta(max_length=2 * _STEPS)]
    pair: Annotated[list[dict[str, _Piece]], Meta(max_length=2 * _STEPS)]
    special_tokens: dict[str, _SpecialToken]


class _BertEnds(Record):
    sep: tuple[str, _Id]
    cls: tuple[str, _Id]


class _TokenizerFile(Record):
    model: dict[str, Any]
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    post_processor: dict[str, Any] | None = None
    decoder: dict[str, Any] | None = None
    added_tokens: tuple[_AddedToken, ...] = ()
    padding: _Padding | None = None
    truncation: _Truncation | None = None


def check_tokenizer(content: dict[str, Any], name: str) -> None:
    """Check the content of a tokenizer.json.

    Args:
        content: the parsed file.
        name: begins the error.

    Raises:
        UserError: a step is not one of BERT's, a number is out of range, or the wordpieces are not numbered from 0 on,
            each once.
    """
    file = checked(_TokenizerFile, content, name, remedy=_REMEDY)
    _check_steps(file.normalizer, _NORMALIZERS, "normalizers", f"{name}: the normalizer")
    _check_steps(file.pre_tokenizer, _PRE_TOKENIZERS, "pretokenizers", f"{name}: the pre_tokenizer")
    _check_steps(file.decoder, ("WordPiece",), None, f"{name}: the decoder")
    _check_kind({"type": "WordPiece", **file.model}, ("WordPiece",), f"{name}: the model")  # old files have no type
    model = checked(_WordPiece, file.model, f"{name}: the model", remedy=_REMEDY)
    if model.unk_token not in model.vocab:
        raise UserError(f"{name}: the vocabulary lacks {cut_text(model.unk_token)}, its unknown wordpiece; {_REMEDY}")
    words = dict(model.vocab)
    for token in file.added_tokens:
        if words.setdefault(token.content, token.id) != token.id:
            raise UserError(f"{name}: the wordpiece {cut_text(token.content)} has two numbers; {_REMEDY}")
    require_each_number(words.values(), name)
    largest = max(_check_ends(file.post_processor, name), default=0)
    if largest >= len(words):
        raise UserError(f"{name}: the post_processor adds wordpiece {largest}, and there are {len(words)}; {_REMEDY}")


def check_special_tokens(numbers: Mapping[str, int | None], unknown: str, content: dict[str, Any], name: str) -> None:
    """Check the special wordpieces that tokenizer_config.json, or a file beside it, names.

    Args:
        numbers: of each of `SPECIAL_NAMES`; None: the tokenizer lacks it.
        unknown: the unknown wordpiece.
        content: as of a tokenizer.json, checked.
        name: begins the error.

    Raises:
        UserError: one of them is missing, two are one wordpiece, or the unknown one is not the model's.
    """
    missing = [one for one in SPECIAL_NAMES if numbers[one] is None]
    if missing:
        raise UserError(f"{name}: the tokenizer has no {', '.join(missing)}; {_REMEDY}")
    if len(set(numbers.values())) < len(numbers):
        raise UserError(f"{name}: two of {', '.join(SPECIAL_NAMES)} are one wordpiece; {_REMEDY}")
    if unknown != content["model"]["unk_token"]:
        model = cut_text(content["model"]["unk_token"])
        raise UserError(f"{name}: unk_token is {cut_text(unknown)}, and the model in it has {model}; {_REMEDY}")


def require_each_number(numbers: Collection[int], name: str) -> None:
    """Raises UserError unless the numbers of the wordpieces are 0, 1, 2, ..., each once; `name` begins the error."""
    if len(set(numbers)) != len(numbers):
        raise UserError(f"{name}: two wordpieces have one number; {_REMEDY}")
    if numbers and max(numbers) != len(numbers) - 1:
        raise UserError(
            f"{name}: {len(numbers)} wordpieces have numbers up to {max(numbers)}, with gaps between them; {_REMEDY}"
        )


def _check_ends(processor: dict[str, Any] | None, name: str) -> list[int]:
    """The numbers of the wordpieces that are put around a text."""
    if processor is None:
        return []
    where = f"{name}: the post_processor"
    _check_kind(processor, ("TemplateProcessing", "BertProcessing"), where)
    if processor["type"] == "BertProcessing":
        ends = checked(_BertEnds, processor, where, remedy=_REMEDY)
        return [ends.sep[1], ends.cls[1]]
    template = checked(_Template, processor, where, remedy=_REMEDY)
    return [number for token in template.special_tokens.values() for number in token.ids]


def _check_steps(step: dict[str, Any] | None, kinds: Collection[str], inner: str | None, where: str) -> None:
    """Check one step, or a sequence of them under the key `inner`; a sequence in a sequence is not one of BERT's."""
    steps = [] if step is None else [step]
    if step is not None and inner is not None and step.get("type") == "Sequence":
        steps = step.get(inner)
        if not isinstance(steps, list) or len(steps) > _STEPS:
            raise UserError(f"{where} is not a sequence of at most {_STEPS} steps; {_REMEDY}")
    for one in steps:
        _check_kind(one, kinds, where)


def _check_kind(part: Any, kinds: Collection[str], where: str) -> None:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind not in kinds:
        raise UserError(f"{where} is of the kind {cut_text(kind)}; BERT's are read ({', '.join(kinds)}); {_REMEDY}")
