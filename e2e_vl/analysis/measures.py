"""Measures of attention heads on one text, and their sums over many texts.

Entity and syntactic grounding follow section 3 of VisualBERT's ACL paper; `AnalysisConfig` covers the details that
it leaves open. The other measures also suit encoders with separate attention for words and for regions.

All maps are probabilities of one text, [layers heads slots slots] (query, key), with slots as in `EncoderOutput`.

Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

Maps = Float[Tensor, "layers heads slots slots"]


@dataclasses.dataclass
class Measurement:
    """One measure on the examples of one text."""

    hits: Bool[Tensor, "layers heads examples"]  # whether the choice with the largest attention is correct
    attention: Float[Tensor, "layers heads examples"]  # total attention on the allowed choices
    baselines: dict[str, Float[Tensor, " examples"]]  # accuracy of rules that ignore the attention

    def __len__(self) -> int:
        return self.hits.shape[2]

    def select(self, is_selected: Bool[Tensor, " examples"]) -> Measurement:
        """Return the measure on some of the examples."""
        baselines = {name: values[is_selected] for name, values in self.baselines.items()}
        return Measurement(self.hits[:, :, is_selected], self.attention[:, :, is_selected], baselines)


@dataclasses.dataclass
class HeadSums:
    """Sums of one measure over examples, or over sentences."""

    hits: Float[Tensor, "layers heads"]
    attention: Float[Tensor, "layers heads"]
    baselines: dict[str, float]
    count: float = 0.0  # what the sums are divided by
    examples: int = 0

    @classmethod
    def zero(cls, layers: int, heads: int, names: Sequence[str]) -> HeadSums:
        """Return sums over no examples."""
        zeros = torch.zeros(layers, heads, dtype=torch.float64)
        return cls(zeros, zeros.clone(), dict.fromkeys(names, 0.0))

    def add(self, measurement: Measurement, *, per_sentence: bool = False) -> None:
        """Add the examples of one text; with `per_sentence` their mean counts once."""
        number = len(measurement)
        weight = 1 / number if per_sentence else 1.0
        self.hits += measurement.hits.sum(dim=2).cpu().double() * weight
        self.attention += measurement.attention.cpu().double().sum(dim=2) * weight
        for name, values in measurement.baselines.items():
            self.baselines[name] += float(values.cpu().double().sum()) * weight
        self.count += 1 if per_sentence else number
        self.examples += number

    def merge(self, other: HeadSums) -> None:
        """Add the sums of another process."""
        self.hits += other.hits
        self.attention += other.attention
        for name, value in other.baselines.items():
            self.baselines[name] += value
        self.count += other.count
        self.examples += other.examples

    @property
    def accuracy(self) -> Float[Tensor, "layers heads"]:
        """The share of hits of each head; 0 without examples."""
        return self.hits / max(self.count, 1)

    @property
    def mean_attention(self) -> Float[Tensor, "layers heads"]:
        """The mean total attention on the allowed choices."""
        return self.attention / max(self.count, 1)

    def baseline_accuracy(self, name: str) -> float:
        return self.baselines[name] / max(self.count, 1)

    def best_head(self, allowed: Bool[Tensor, "layers heads"] | None = None) -> tuple[int, int] | None:
        """Return layer and head with the highest accuracy among the allowed heads (None: all); ties go to the first.

        It is None without examples, or without an allowed head.
        """
        if allowed is None:
            allowed = torch.ones_like(self.hits, dtype=torch.bool)
        if not self.examples or not allowed.any():
            return None
        best = int(self.accuracy.masked_fill(~allowed, -1).argmax())  # of layers and heads in one row
        return divmod(best, self.hits.shape[1])


def attention_from(
    maps: Maps, spans: Int64[Tensor, "queries 2"], piece: str
) -> Float[Tensor, "layers heads queries slots"]:
    """Return the attention distributions of words or phrases.

    Args:
        spans: first slot and last slot plus one of each word or phrase.
        piece: "last" or "first" wordpiece, or the "mean" of all.
    """
    first, end = spans.unbind(dim=1)
    if piece == "mean":
        slots = torch.arange(maps.shape[2], device=maps.device)
        inside = ((slots >= first[:, None]) & (slots < end[:, None])).to(maps.dtype)
        return torch.einsum("qs,lhst->lhqt", inside / inside.sum(dim=1, keepdim=True), maps)
    query = first if piece == "first" else end - 1
    return maps[:, :, query]


def measure_hits(
    attention: Float[Tensor, "layers heads examples choices"],
    allowed: Bool[Tensor, "examples choices"],
    is_correct: Bool[Tensor, "examples choices"],
    baselines: Mapping[str, Float[Tensor, " examples"]] | None = None,
) -> Measurement:
    """Check whether the allowed choice with the largest attention is correct; ties go to the first choice.

    The baseline "chance" is added: the share of correct choices among the allowed ones.
    """
    correct = is_correct & allowed
    number = allowed.sum(dim=1)
    chance = correct.sum(dim=1) / number.clamp(min=1)
    seen = attention.masked_fill(~allowed, -1)
    if not allowed.shape[1]:
        hits = torch.zeros(attention.shape[:3], dtype=torch.bool, device=attention.device)
    else:
        chosen = seen.argmax(dim=3)  # [layers heads examples]
        rows = torch.arange(len(correct), device=correct.device)
        hits = correct[rows, chosen]
    total = (attention * allowed).sum(dim=3)
    return Measurement(hits, total, {**(baselines or {}), "chance": chance.to(attention.dtype)})


def baseline_hits(
    score: Float[Tensor, " choices"], allowed: Bool[Tensor, " choices"], is_correct: Bool[Tensor, "examples choices"]
) -> Float[Tensor, " examples"]:
    """Return 1 for each example in which the allowed choice with the highest score is correct, else 0.

    The choice is the same in all examples.
    """
    if not bool(allowed.any()):
        return is_correct.new_zeros(len(is_correct), dtype=torch.float32)
    chosen = score.masked_fill(~allowed, -torch.inf).argmax()
    return is_correct[:, chosen].float()


def entity_grounding(
    maps: Maps,
    spans: Int64[Tensor, "examples 2"],
    regions: slice,
    allowed: Bool[Tensor, " R"],
    is_correct: Bool[Tensor, "examples R"],
    baselines: Mapping[str, Float[Tensor, " examples"]],
    piece: str = "last",
) -> Measurement:
    """Measure how often the region that a phrase attends to most is a correct one.

    Syntactic grounding is the same with the words w2 as queries and the regions of w1 as correct ones.

    Args:
        regions: slots of the regions.
        allowed: candidate regions.
    """
    seen = attention_from(maps, spans, piece)[..., regions]
    return measure_hits(seen, allowed.expand_as(is_correct), is_correct, baselines)


def region_naming(
    maps: Maps,
    regions: slice,
    is_correct: Bool[Tensor, "entities R"],
    spans: Int64[Tensor, "entities 2"],
    is_word: Bool[Tensor, " L"],
) -> Measurement:
    """Measure how often the word that an entity's region attends to most is in a phrase that names the entity.

    An example is a region that is correct for some phrase; special tokens are not allowed as choices.
    """
    named = is_correct.any(dim=0).nonzero()[:, 0]
    length = len(is_word)
    slots = torch.arange(length, device=maps.device)
    inside = (slots >= spans[:, :1]) & (slots < spans[:, 1:])  # [entities, L]
    names = (is_correct[:, named].T.float() @ inside.float()) > 0  # [examples, L]
    seen = maps[:, :, regions][:, :, named, :length]
    return measure_hits(seen, is_word.expand_as(names), names)


def region_grouping(
    maps: Maps, regions: slice, allowed: Bool[Tensor, " R"], is_correct: Bool[Tensor, "entities R"]
) -> Measurement:
    """Measure how often the other region that an entity's region attends to most belongs to the same entity.

    An example is a region of a phrase with at least two correct regions.
    """
    correct = is_correct & allowed
    has_others = correct.sum(dim=1, keepdim=True) > 1
    phrase, region = (correct & has_others).nonzero().unbind(dim=1)
    others = torch.arange(len(allowed), device=maps.device) != region[:, None]
    seen = maps[:, :, regions, regions][:, :, region]
    return measure_hits(seen, allowed & others, correct[phrase] & others)


def word_dependency(
    maps: Maps,
    spans: Int64[Tensor, "words 2"],
    targets: Int64[Tensor, " examples"],
    sources: Int64[Tensor, " examples"],
    piece: str = "last",
) -> Measurement:
    """Measure how often the other word that a word attends to most is the one it is related to.

    The attention on a word is the sum over its wordpieces, without special tokens. Words with the same wordpieces are
    one choice, and words that share a wordpiece with the query word are not allowed. The baselines "previous word" and
    "next word" always choose that neighbour.

    Args:
        targets: row of w1 of each pair; it shares no wordpiece with w2.
        sources: row of w2, the query word.
    """
    choices, choice = torch.unique(spans, dim=0, return_inverse=True)  # in the order of the text
    slots = torch.arange(maps.shape[3], device=maps.device)
    inside = ((slots >= choices[:, :1]) & (slots < choices[:, 1:])).to(maps.dtype)  # [choices, slots]
    seen = attention_from(maps, spans[sources], piece) @ inside.T  # [layers heads examples choices]
    rows = torch.arange(len(choices), device=maps.device)
    others = (inside[choice[sources]] @ inside.T) == 0  # [examples, choices]
    step = choice[targets] - choice[sources]
    baselines = {"previous word": (step == -1).to(maps.dtype), "next word": (step == 1).to(maps.dtype)}
    return measure_hits(seen, others, rows == choice[targets][:, None], baselines)
