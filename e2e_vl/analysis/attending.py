"""Which words of a caption attend and are attended to: the queries of phrases, and pairs of related words.

Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int64

from e2e_vl.analysis.attention_choices import AttentionChoices, WordPiece
from e2e_vl.analysis.caption_wording import CaptionFacts


@dataclasses.dataclass(frozen=True)
class PhraseQueries:
    """From which wordpieces the phrases of a caption attend."""

    spans: Int64[np.ndarray, "phrases 2"]  # first wordpiece and the last plus one; without a query those of the phrase
    attends: Bool[np.ndarray, " phrases"]  # False: it has no head word, so nothing of it attends
    piece: WordPiece  # which wordpieces of a span attend


def phrase_queries(facts: CaptionFacts, choices: AttentionChoices) -> PhraseQueries:
    """The wordpieces that `choices.entity_piece` chooses.

    With "head" it is the head word of the parse, of several ones the first, read at `choices.word_piece`. A phrase has
    none where its caption has no parse, or where no word belongs to it (its words belong to phrases inside of it).
    """
    spans, attends = facts.phrase_spans, np.ones(len(facts.phrases), dtype=bool)
    if choices.entity_piece != "head":
        return PhraseQueries(spans, attends, choices.entity_piece)
    spans = spans.copy()
    for phrase in range(len(facts.phrases)):
        heads = [row for row, own in enumerate(facts.phrase_of) if own == phrase and facts.is_head[row]]
        attends[phrase] = facts.is_parsed and len(heads) > 0
        if attends[phrase]:
            spans[phrase] = facts.word_spans[heads[0]]
    return PhraseQueries(spans, attends, choices.word_piece)


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Pairs of words that a relation joins: the attending word, and the other one or its phrase."""

    columns: tuple[list[int], list[int]]
    labels: list[str]

    def apart(self, spans: Int64[np.ndarray, "words 2"]) -> Pairs:
        """The pairs of two words that share no wordpiece, which attention could not tell apart."""
        kept = [row for row, pair in enumerate(zip(*self.columns, strict=True)) if not shares_piece(spans, *pair)]
        source, target = ([column[row] for row in kept] for column in self.columns)
        return Pairs((source, target), [self.labels[row] for row in kept])


def shares_piece(spans: Int64[np.ndarray, "words 2"], first: int, second: int) -> bool:
    """Whether two words have a wordpiece together."""
    return bool(max(spans[first, 0], spans[second, 0]) < min(spans[first, 1], spans[second, 1]))


def word_pairs(facts: CaptionFacts, choices: AttentionChoices) -> Pairs:
    """Both directions of every relation: (attending word w2, word w1)."""
    sources, targets, labels = [], [], []
    for relation in facts.relations:
        for source, target, direction in (
            (relation.dependent, relation.governor, "to its governor"),
            (relation.governor, relation.dependent, "from its governor"),
        ):
            sources.append(source)
            targets.append(target)
            labels.append(relation.label if choices.directions == "pooled" else f"{relation.label}, {direction}")
    return Pairs((sources, targets), labels)


def grounded_pairs(facts: CaptionFacts, counted: Sequence[bool], choices: AttentionChoices) -> Pairs:
    """The pairs whose word w1 is in a counted phrase: (attending word w2, phrase of w1)."""
    pairs = word_pairs(facts, choices)
    rows = [
        (source, facts.phrase_of[target], label)
        for source, target, label in zip(*pairs.columns, pairs.labels, strict=True)
        if facts.phrase_of[target] >= 0
        and counted[facts.phrase_of[target]]
        and (choices.phrase_word == "any" or facts.is_head[target])
    ]
    return Pairs(([row[0] for row in rows], [row[1] for row in rows]), [row[2] for row in rows])
