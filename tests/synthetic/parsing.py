"""The way back from the words of a referring expression to its meaning."""

from __future__ import annotations

from e2e_vl.synthetic import language
from e2e_vl.synthetic.config import COLOURS, SHAPES
from e2e_vl.synthetic.language import Description, ReferringExpression


def parse(sentence: str) -> ReferringExpression:
    """The meaning of a sentence, the inverse of ``to_words``.

    Raises:
        ValueError: a word or a construction is not part of this language.
    """
    words = sentence.split()
    for operator, spellings in language._SUPERLATIVES.items():
        start = 1 if words[:1] == ["the"] else 0
        if words[start : start + 1] and words[start] in spellings:
            return ReferringExpression(_parse_noun_phrase(words[start + 1 :], sentence), operator)
    for operator, links in {**language._COMPARISONS, **language._RELATIONS}.items():
        for link in sorted(set(links), key=len, reverse=True):
            head, found, tail = f" {sentence} ".partition(f" {link} ")
            if not found:
                continue
            description = _parse_noun_phrase(head.removesuffix(" that is").split(), sentence)
            if operator in language._COMPARISONS and f"than {tail.strip()}" in language._OTHERS:
                return ReferringExpression(description, operator)
            return ReferringExpression(description, operator, _parse_noun_phrase(tail.split(), sentence))
    return ReferringExpression(_parse_noun_phrase(words, sentence))


def _parse_noun_phrase(words: list[str], sentence: str) -> Description:
    values: dict[str, str] = {}
    text = " ".join(words[1:] if words[:1] == ["the"] else words)
    for texture, ending in language._SUFFIXES.items():
        if text.endswith(" " + ending):
            values["texture"] = texture
            text = text.removesuffix(" " + ending)
    *adjectives, noun = text.split() or [""]
    if noun in SHAPES:
        values["shape"] = noun
    elif noun not in language.THINGS:
        raise ValueError(f'"{sentence}": "{noun}" is not a noun of this language')
    for word in adjectives:
        for slot, value in _meanings(word):
            if slot in values:
                raise ValueError(f'"{sentence}": the {slot} is said twice')
            values[slot] = value
            break
        else:
            raise ValueError(f'"{sentence}": "{word}" is not a word of this language')
    return Description(**values)


def _meanings(word: str) -> list[tuple[str, str]]:
    meanings = [("colour", word)] if word in COLOURS else []
    for slot, table in (("size", language._SIZE_WORDS), ("texture", language._TEXTURE_WORDS)):
        meanings += [(slot, value) for value, spellings in table.items() if word in spellings]
    return meanings
