"""Wordpieces: load a tokenizer, build a vocabulary, and encode texts in the layout that an encoder declares.

Shape legend
    L  wordpieces of a text
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import operator
import re
import string
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Int64
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from transformers import AutoTokenizer, BertTokenizer, PreTrainedTokenizerBase

from detector.errors import MissingFileError, UserError, first_line, user_path
from detector.io import write_text
from e2e_vl.io import looks_like_hub_name, read_text

NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
SPELLINGS = {  # of LXMERT's list of answers
    "a man": "man",
    "the man": "man",
    "a woman": "woman",
    "the woman": "woman",
    "grey": "gray",
    **{word: str(number) for number, word in enumerate(NUMBERS, start=1)},
}
FUNCTION_WORDS = {"a", "an", "the", "this", "that", "these", "those", "it", "its", "of", "to", "and", "or", "but"}
FUNCTION_WORDS |= {"is", "are", "was", "were", "be"}
_UPPER_CASE = re.compile(r"^(?![\[<].*[\]>]$).*[A-Z]")  # in a wordpiece, not in [CLS], [unused1] or <URL>
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def load_tokenizer(name_or_path: str | Path) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a BERT-style `vocab.txt` (one wordpiece per line), a folder or a hub name.

    A folder contains a `vocab.txt` or what `save_pretrained` wrote. Texts are lower-cased for a `vocab.txt`, unless it
    has upper-case wordpieces. Only a text that cannot be a path is taken for a hub name such as `bert-base-uncased`, so
    a mistyped path never reaches for the network.
    """
    path = user_path(name_or_path)
    if path.is_dir() and not (path / "tokenizer_config.json").is_file() and (path / "vocab.txt").is_file():
        path = path / "vocab.txt"
    if path.is_file():
        words = read_text(path).removesuffix("\n").split("\n")  # other line breaks, as U+2028, may be wordpieces
        vocabulary = {word: index for index, word in enumerate(words)}
        if len(vocabulary) != len(words) or not vocabulary.keys() >= set(SPECIAL_TOKENS):
            raise UserError(
                f"{path}: not a vocabulary, it must have {', '.join(SPECIAL_TOKENS)} and each wordpiece once; give a "
                "BERT-style vocab.txt, one wordpiece per line"
            )
        is_cased = any(_UPPER_CASE.search(word) for word in words)
        return BertTokenizer(vocab=vocabulary, do_lower_case=not is_cased)
    is_folder = path.is_dir()
    if not is_folder and not looks_like_hub_name(str(name_or_path)):
        raise MissingFileError(
            f"{path}: no tokenizer there; give an existing vocab.txt (e2e_vl.text.build_vocabulary writes one), a "
            "folder written by save_pretrained, or a hub name such as bert-base-uncased"
        )
    source = str(path if is_folder else name_or_path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=is_folder, trust_remote_code=False)
    except Exception as error:  # transformers, tokenizers and the hub raise many kinds
        kind = UserError if is_folder else MissingFileError
        raise kind(f"{source}: no tokenizer could be loaded from it ({first_line(error)})") from error
    # a saved tokenizer may truncate or pad texts, which is done here
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer


def basic_tokenize(sentence: str) -> list[str]:
    """Lower-case, strip accents, split at whitespace and punctuation: BERT's steps before wordpieces."""
    normal = BertNormalizer(lowercase=True).normalize_str(sentence)
    return [word for word, _ in BertPreTokenizer().pre_tokenize_str(normal)]


def swap_left_right(words: Iterable[str]) -> list[str]:
    """Swap the words "left" and "right", as in the text of a flipped image (official VL-BERT code)."""
    swapped = {"left": "right", "right": "left"}
    return [swapped.get(word, word) for word in words]


def simplify_answer(answer: str) -> str:
    """Spell an answer as the list of LXMERT's pre-training does (official code).

    In lower case, without a final full stop and leading articles, with the numbers one to ten as digits.
    """
    answer = answer.lower()
    if answer.endswith("."):
        answer = answer[:-1].strip()
    for article in ("a ", "an ", "the "):
        if answer.startswith(article):
            answer = answer.removeprefix(article).strip()
    return SPELLINGS.get(answer, answer)


def build_vocabulary(sentences: Iterable[str], path: str | Path) -> list[str]:
    """Write a BERT-style vocab.txt of all words of some sentences, for training from scratch, and return its lines.

    The order is fixed: [PAD] 0, [UNK] 1, [CLS] 2, [SEP] 3, [MASK] 4; words by falling count, then alphabetically; then
    single characters and their `##` continuations (from the sentences, a-z and 0-9), with which unseen words are
    spelled.
    """
    counts: collections.Counter[str] = collections.Counter()
    for sentence in sentences:
        counts.update(basic_tokenize(sentence))
    words = sorted(counts, key=lambda word: (-counts[word], word))
    characters = sorted({*"".join(counts), *string.ascii_lowercase, *string.digits})
    continuations = [f"##{character}" for character in characters]
    vocabulary = list(dict.fromkeys([*SPECIAL_TOKENS, *words, *characters, *continuations]))
    write_text(Path(path), "".join(f"{word}\n" for word in vocabulary))
    return vocabulary


def word_pieces(text: str, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return the wordpiece ids of each word.

    Words end at whitespace and punctuation; each punctuation mark is a separate word.
    """
    encoding = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
    words: dict[int, list[int]] = {}  # number of a word -> its wordpieces
    for word_id, piece in zip(encoding.word_ids, encoding.ids, strict=True):
        words.setdefault(word_id, []).append(piece)
    return list(words.values())


def unknown_words(text: str, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the words and symbols that the vocabulary lacks, in order, without repetitions or punctuation.

    Such a word has an unknown wordpiece, or is spelled in wordpieces of one letter each. A number that is spelled digit
    by digit is known.
    """
    encoding = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
    pieces = zip(encoding.word_ids, encoding.offsets, encoding.tokens, strict=True)
    unknown = []
    for _, group in itertools.groupby(pieces, key=operator.itemgetter(0)):
        _, offsets, tokens = zip(*group, strict=True)
        word = text[offsets[0][0] : offsets[-1][1]]
        is_spelled = len(tokens) > 1 and all(len(token.removeprefix("##")) == 1 for token in tokens)
        is_punctuation = all(unicodedata.category(character)[0] == "P" for character in word)
        is_unknown = tokenizer.unk_token in tokens and not is_punctuation
        if is_unknown or (is_spelled and any(character.isalpha() for character in word)):
            unknown.append(word)
    return list(dict.fromkeys(unknown))


def has_content(text: str) -> bool:
    """Return whether a text has any word beyond articles, forms of "be" and the like, letters and punctuation."""
    for word in re.findall(r"[^\W_]+", text.lower()):
        is_letter = len(word) == 1 and word in string.ascii_lowercase
        if word not in FUNCTION_WORDS and not is_letter:
            return True
    return False


# Templates: special tokens, segments and summary position for each encoder


Pieces = Sequence[int] | np.ndarray  # wordpiece ids, or values of wordpieces
# how two texts that are too long together are truncated, see `TextTokenizer.pair`
Truncation = Literal["ends", "fronts", "fronts_too_much"]
FIRST_KEPT = 32  # wordpieces of a first text that are not truncated at its front
# attributes of a tokenizer
CLS = "cls_token_id"
SEP = "sep_token_id"
MASK = "mask_token_id"


@dataclasses.dataclass(frozen=True)
class Template:
    """A sequence of special tokens and slots for texts."""

    # `CLS`, `SEP` or `MASK` for that token; a number for the text of that number, from 0
    parts: tuple[str | int, ...]
    segments: tuple[int, ...]  # segment id of each part
    # the part whose output state is the summary of text and image; None: the encoder's pooled vector
    summary: int | None = None

    @property
    def num_special(self) -> int:
        """The number of special tokens, which belong to no text."""
        return sum(isinstance(part, str) for part in self.parts)


@dataclasses.dataclass(frozen=True)
class TextLayout:
    """The text formats of an encoder. The defaults are BERT's."""

    single: Template = Template((CLS, 0, SEP), (0, 0, 0))  # one text
    question: Template = Template((CLS, 0, SEP), (0, 0, 0))  # one text whose answer is read at a place of its own
    # two texts, such as a question and one of its answers
    pair: Template = Template((CLS, 0, SEP, 1, SEP), (0, 0, 0, 1, 1))


BARE = Template((0,), (0,))  # wordpieces alone


class WordPieces(NamedTuple):
    """The wordpieces of a text, without special tokens."""

    ids: list[int]
    offsets: Int64[np.ndarray, "L 2"]  # first character of each and the last plus one
    word_ids: Int64[np.ndarray, " L"]  # number of its word in the text


@dataclasses.dataclass(frozen=True)
class TextEncoding:
    """One text as wordpieces."""

    input_ids: Int64[np.ndarray, " L"]
    token_type_ids: Int64[np.ndarray, " L"]
    source: Int64[np.ndarray, " L"]  # index of the given piece, counted through all texts; -1 at special tokens
    summary: int | None = None  # position of the summary; None: the encoder's pooled vector
    num_truncated: int = 0  # pieces that were cut off

    def place(self, values: Pieces, fill: int = -1) -> Int64[np.ndarray, " L"]:
        """Return a value of each given piece at its position, `fill` at special tokens."""
        padded = np.array([*values, fill], dtype=np.int64)
        return padded[self.source]


@dataclasses.dataclass(frozen=True)
class TextTokenizer:
    """Turns texts into wordpieces, in the layout that the encoder declares."""

    tokenizer: PreTrainedTokenizerBase  # of the encoder
    layout: TextLayout = dataclasses.field(default_factory=TextLayout)  # of the encoder
    max_length: int | None = None  # longest sequence in wordpieces, special tokens included; None: no limit
    is_blank: bool = False  # drop all words: the control that sees no text
    training: bool = False  # random choices are made that only training makes
    with_phrase_spans: bool = False  # say which wordpieces are phrases
    with_phrase_matches: bool = False  # say how well the phrase of each candidate box matches the text

    def pieces(self, text: str, *, mirrored: bool = False) -> list[int]:
        """Return the wordpiece ids of a text; `mirrored` swaps "left" and "right", see `swap_left_right`."""
        return self.encode(text, mirrored=mirrored).ids

    def encode(self, text: str, *, mirrored: bool = False) -> WordPieces:
        """Split a text into wordpieces, as `pieces` does, and say where they are in it."""
        if self.is_blank:
            text = ""
        encoding = self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
        tokens = encoding.tokens
        if mirrored:
            tokens = swap_left_right(tokens)
        offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        return WordPieces(self.tokenizer.convert_tokens_to_ids(tokens), offsets, np.array(encoding.word_ids, np.int64))

    def single(self, pieces: Pieces) -> TextEncoding:
        """Lay out one text; a text that is too long loses its last pieces."""
        return self._truncated(self.layout.single, pieces)

    def question(self, pieces: Pieces) -> TextEncoding:
        """Lay out one text with a position for its answer; a text that is too long loses its last pieces."""
        return self._truncated(self.layout.question, pieces)

    def pair(self, first: Pieces, second: Pieces, truncation: Truncation = "ends") -> TextEncoding:
        """Lay out two texts, truncated if together they exceed the maximum length.

        "ends" removes the last piece of the longer text until they fit; if both are equally long, of the second.
        "fronts" and "fronts_too_much" remove the first pieces of both, see `truncate_fronts`; if nothing is left of
        the second text, the first is encoded alone.
        """
        if truncation == "ends" or self.max_length is None:
            return self._truncated(self.layout.pair, first, second)
        room = self.max_length - self.layout.pair.num_special
        too_much = truncation == "fronts_too_much"
        lost_of_first, lost_of_second = truncate_fronts(len(first), len(second), room, too_much=too_much)
        template = self.layout.pair
        if len(second) and lost_of_second == len(second):
            template = self.layout.single
        selection = [slice(lost_of_first, None), slice(lost_of_second, None)]
        return fill_template(template, (first, second), self.tokenizer, selection)

    def without_special_tokens(self, pieces: Pieces) -> TextEncoding:
        """Encode wordpieces without special tokens; truncation is up to the caller."""
        return fill_template(BARE, (pieces,), self.tokenizer)

    def _truncated(self, template: Template, *texts: Pieces) -> TextEncoding:
        lengths = list(map(len, texts))
        while self.max_length is not None and sum(lengths) > max(self.max_length - template.num_special, 0):
            longest = max(range(len(lengths)), key=lambda number: (lengths[number], number))  # the last of equal ones
            lengths[longest] -= 1
        return fill_template(template, texts, self.tokenizer, [slice(length) for length in lengths])


def truncate_fronts(first: int, second: int, room: int, *, too_much: bool = False) -> tuple[int, int]:
    """Return how many pieces two texts lose at their fronts, from their lengths and the room for both (VisualBERT).

    Of the surplus the first text loses half, rounded up, but not from its last `FIRST_KEPT` pieces. The second loses
    the rest, and what it is too short for the first loses too. With `too_much` the second loses the surplus and once
    more what the first lost, where the difference would be enough: a wrong sign in the official code.
    """
    surplus = max(first + second - room, 0)
    from_first = min((surplus + 1) // 2, max(first - FIRST_KEPT, 0))
    if too_much and surplus:
        return from_first, min(surplus + from_first, second)
    from_second = min(surplus - from_first, second)
    return surplus - from_second, from_second


def fill_template(
    template: Template,
    texts: Sequence[Pieces],
    tokenizer: PreTrainedTokenizerBase,
    selection: Sequence[slice] | None = None,
) -> TextEncoding:
    """Fill a template with the pieces of its texts, or with the pieces that `selection` takes of each.

    Further texts, for which the template has no place, must lose all of theirs.
    """
    lengths = list(map(len, texts))
    starts = [0, *itertools.accumulate(lengths)]  # of each text, counted through all pieces
    if selection is None:
        selection = [slice(None)] * len(texts)
    ids: list[int] = []
    segments: list[int] = []
    source: list[int] = []
    summary = None
    for number, (part, segment) in enumerate(zip(template.parts, template.segments, strict=True)):
        if number == template.summary:
            summary = len(ids)
        if isinstance(part, str):
            ids.append(getattr(tokenizer, part))
            source.append(-1)
        else:
            ids.extend(texts[part][selection[part]])
            source.extend(range(starts[part], starts[part + 1])[selection[part]])
        segments += [segment] * (len(ids) - len(segments))
    num_pieces = sum(index >= 0 for index in source)
    return TextEncoding(
        np.array(ids, dtype=np.int64),
        np.array(segments, dtype=np.int64),
        np.array(source, dtype=np.int64),
        summary=summary,
        num_truncated=sum(lengths) - num_pieces,
    )
