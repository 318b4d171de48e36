"""Phrase grounding beside any task: the phrases of a text point at regions, in a layer that is a setting.

The state of a phrase's last wordpiece asks, the states of the regions answer, both between the layers of the encoder
(VisualBERT's head for Flickr30K Entities does so behind the last one). A second small head finds the phrases in a text
where nobody marked them; if the data never marked all phrases of a text, it learned nothing, and a text is one phrase.

Shape legend: see `e2e_vl/structures.py`; and here
    P   phrases of all texts in the batch
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from detector.boxes import area
from detector.checkpoint import LoadReport, load_weights, read_tensors
from detector.structures import Loss
from e2e_vl.examples import PhraseBatch, Ragged, characters_of
from e2e_vl.predictions import GroundedPhrase, Prediction
from e2e_vl.structures import Batch, IntermediateStates, ModelOutput, PhraseOutput, TextRegions, at_least_float32
from e2e_vl.tasks.base import init_head

MIN_IOU = 0.5
TAGS = "phrase_tags"  # the loss of finding phrases, counted in words of texts whose phrases are all known
INSIDE, FIRST = 1, 2  # tags of wordpieces in a phrase; 0 = outside


class PhraseHead(nn.Module):
    """A share of attention per region for each phrase, and tags that say which wordpieces are phrases.

    Args:
        hidden_size: E.
        size: width of queries and keys.
        layer: number of layers with words and regions after which states are read.
    """

    def __init__(self, hidden_size: int, size: int, layer: int):
        super().__init__()
        self.layer = layer
        self.query, self.key = (nn.Linear(hidden_size, size) for _ in range(2))
        self.tags = nn.Linear(hidden_size, 3)
        init_head([self.query, self.key, self.tags], "official")

    def forward(self, batch: Batch, regions: TextRegions, states: IntermediateStates) -> PhraseOutput:
        """Find the phrases of M texts where they are not stated, and point at regions.

        Returns:
            The losses `phrases`, the divergence (Kullback-Leibler) of the attention from equal shares for all regions
            that a phrase names (IoU of at least 0.5 with one of its boxes), and `phrase_tags`, a cross entropy per
            wordpiece. Phrases without such a region, and texts whose phrases are not all known, add nothing.
        """
        stated: PhraseBatch = batch.phrases
        tags = at_least_float32(self.tags(states.text))
        spans, is_stated = stated.spans, slice(None)
        if not self.training:
            found = predicted_spans(tags, stated) if self.finds_phrases else whole_spans(is_word(stated))
            spans = fill_in_spans(stated, found)
            is_stated = stated.spans.counts[spans.owner] > 0
        log_attention = self.point(spans, regions, states)
        is_right = positive_regions_of(regions, stated)
        losses = {"phrases": grounding_loss(log_attention[is_stated], is_right), TAGS: tagging_loss(tags, stated)}
        return PhraseOutput(spans, log_attention, is_right, losses)

    @property
    def finds_phrases(self) -> bool:
        """It learned from texts whose phrases are all known: the bias of its tags, which starts at 0, has moved."""
        return bool(self.tags.bias.any())

    def point(self, spans: Ragged, regions: TextRegions, states: IntermediateStates) -> Float[Tensor, "P R"]:
        """Logarithm of each phrase's attention on the regions of its text."""
        owner = spans.owner
        query = self.query(states.text[owner, spans.values[:, 1] - 1])
        key = self.key(states.regions)[owner]
        scores = at_least_float32(torch.einsum("pd,prd->pr", query, key)) / math.sqrt(query.shape[1])
        allowed = candidate_regions(regions)[owner]
        # the lowest number while the sum is formed: a text without regions must not give NaN
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).log_softmax(dim=1)
        return scores.masked_fill(~allowed, -torch.inf)


def load_head(head: PhraseHead, path: str | Path) -> LoadReport:
    """Load a saved head; all of it must fit.

    Raises:
        FileNotFoundError, ValueError: no such file, a damaged one, or one that does not fit.
    """
    return load_weights(head, read_tensors(path), path, layout="this project")


def candidate_regions(regions: TextRegions) -> Bool[Tensor, "M R"]:
    """Regions that a phrase may name: candidate boxes of the text's first image."""
    return regions.attention_mask & (regions.row >= 0) & (regions.image_slot == 0)


def positive_regions_of(regions: TextRegions, phrases: PhraseBatch) -> Bool[Tensor, "P R"]:
    """Candidates that the stated phrases name."""
    text = phrases.spans.owner
    return overlapping(regions, text, phrases.boxes) & candidate_regions(regions)[text]


def overlapping(regions: TextRegions, text: Int64[Tensor, " P"], boxes: Ragged) -> Bool[Tensor, "P R"]:
    """Regions whose IoU with any box of the phrase is at least 0.5.

    Args:
        text: row of each phrase's text.
        boxes: xyxy in pixels of the resized image, a list per phrase.
    """
    phrase = boxes.owner  # of each box
    ours, true = regions.boxes[text[phrase]], boxes.values[:, None].to(regions.boxes)
    low, high = torch.maximum(ours[..., :2], true[..., :2]), torch.minimum(ours[..., 2:], true[..., 2:])
    overlap = (high - low).clamp(min=0).prod(dim=-1)
    union = area(ours) + area(true) - overlap
    hits = (overlap >= MIN_IOU * union) & (union > 0)
    found = torch.zeros(len(text), ours.shape[1], dtype=torch.int64, device=hits.device)
    return found.index_add(0, phrase, hits.long()) > 0


def grounding_loss(log_attention: Float[Tensor, "P R"], is_right: Bool[Tensor, "P R"]) -> Loss:
    """Divergence (Kullback-Leibler) of the attention from equal shares for all right regions.

    Its count is the number of phrases that have a right region; the others add nothing.
    """
    number = is_right.sum(dim=1)
    known = number > 0
    number = number.clamp(min=1)
    each = -(log_attention.masked_fill(~is_right, 0).sum(dim=1) / number) - number.log()
    return Loss(total=each.masked_fill(~known, 0).sum(), count=known.sum().to(log_attention.dtype))


def tagging_loss(tags: Float[Tensor, "M L 3"], phrases: PhraseBatch) -> Loss:
    """Cross entropy of the tags over the words of texts whose phrases are all known."""
    position = torch.arange(tags.shape[1], device=tags.device)
    first, end = phrases.spans.values.unbind(dim=1)
    inside = (position >= first[:, None]) & (position < end[:, None])  # [P, L]
    marked = torch.zeros(2, *tags.shape[:2], dtype=torch.int64, device=tags.device)
    marks = torch.stack([inside, position == first[:, None]]).long()
    is_inside, is_first = marked.index_add(1, phrases.spans.owner, marks) > 0
    truth = torch.where(is_first, FIRST, is_inside.long() * INSIDE)
    counted = is_word(phrases) & phrases.is_complete[:, None]
    each = F.cross_entropy(tags.flatten(0, 1), truth.flatten(), reduction="none").unflatten(0, tags.shape[:2])
    return Loss(total=(each * counted).sum(), count=counted.sum().to(tags.dtype))


def is_word(phrases: PhraseBatch) -> Bool[Tensor, "M L"]:
    """Wordpieces of the texts as written; special ones and those of other texts are not."""
    return phrases.offsets[..., 1] > 0


def predicted_spans(tags: Float[Tensor, "M L 3"], phrases: PhraseBatch) -> list[list[tuple[int, int]]]:
    """The phrases of each text that the tags say: whole words, without punctuation at either end.

    (A phrase that ends inside a word names nothing, and where no text of the training ends with a mark, its state says
    nothing.)
    """
    spans = find_spans(word_level_tags(tags, phrases.continues_word), is_word(phrases))
    marks = phrases.is_punctuation().tolist()
    trimmed = ([_without_marks(span, own) for span in found] for found, own in zip(spans, marks, strict=True))
    return [[span for span in found if span[0] < span[1]] for found in trimmed]


def word_level_tags(tags: Float[Tensor, "M L 3"], continues: Bool[Tensor, "M L"]) -> Int64[Tensor, "M L"]:
    """The most probable tags among those that take each word as a whole.

    Args:
        continues: wordpieces of the same word as the one before.
    """
    each = tags.log_softmax(dim=2)
    # only the first wordpiece of a word begins a phrase
    first = torch.where(continues, each[..., INSIDE], each[..., FIRST])
    each = torch.stack([each[..., 0], each[..., INSIDE], first], dim=2)
    word = (~continues).cumsum(dim=1) - 1  # the first wordpiece continues nothing
    sums = torch.zeros_like(each).scatter_add(1, word[..., None].expand_as(each), each)
    best = sums.argmax(dim=2).gather(1, word)
    return best.masked_fill(continues & (best == FIRST), INSIDE)


def _without_marks(span: tuple[int, int], is_mark: list[bool]) -> tuple[int, int]:
    first, end = span
    while first < end and is_mark[first]:
        first += 1
    while first < end and is_mark[end - 1]:
        end -= 1
    return first, end


def find_spans(tags: Int64[Tensor, "M L"], is_real: Bool[Tensor, "M L"]) -> list[list[tuple[int, int]]]:
    """Runs of tags that make a phrase: from each `FIRST`, or an `INSIDE` after something outside, to the next one."""
    found = []
    for row in tags.masked_fill(~is_real, 0).tolist():
        spans, start = [], None
        for position, tag in enumerate([*row, 0]):
            if start is not None and tag != INSIDE:
                spans.append((start, position))
                start = None
            if tag == FIRST or (tag == INSIDE and start is None):
                start = position
        found.append(spans)
    return found


def whole_spans(is_real: Bool[Tensor, "M L"]) -> list[list[tuple[int, int]]]:
    """Each text with words as one phrase."""
    places = [row.nonzero()[:, 0].tolist() for row in is_real]
    return [[(own[0], own[-1] + 1)] if own else [] for own in places]


def fill_in_spans(stated: PhraseBatch, found: list[list[tuple[int, int]]]) -> Ragged:
    """The stated spans of each text; of texts that state none, those that were found."""
    rows = [
        own if len(own) or is_complete else own.new_tensor(spans).reshape(-1, 2)
        for own, spans, is_complete in zip(stated.spans.split(), found, stated.is_complete.tolist(), strict=True)
    ]
    counts = torch.tensor([len(row) for row in rows], device=stated.spans.counts.device)
    return Ragged(torch.cat(rows), counts)


def with_phrases(output: ModelOutput) -> ModelOutput:
    """A copy whose records hold what the phrases of each text point at, under `grounded`.

    To be called before the task predicts from the records; a text without a record keeps none.
    """
    if output.phrases is None:
        return output
    found = grounded_phrases(output.phrases, output.batch, output.text_regions)
    rows = zip(output.batch.records, found, strict=True)
    records = [record | {"grounded": own} if record else record for record, own in rows]
    return dataclasses.replace(output, batch=dataclasses.replace(output.batch, records=records))


def grounding_metrics(predictions: Iterable[Prediction]) -> dict[str, float]:
    """`phrase_accuracy`, the share of right phrases among those whose boxes are known; empty where none is."""
    judged = [one.correct for prediction in predictions for one in prediction.grounded if one.correct is not None]
    return {"phrase_accuracy": sum(judged) / len(judged)} if judged else {}


def grounded_phrases(output: PhraseOutput, batch: Batch, regions: TextRegions) -> list[list[GroundedPhrase]]:
    """The phrases of each text. Boxes have two decimals and scores four, all that mean anything in files."""
    boxes = regions.original_boxes(batch.images.scales)
    phrases = batch.phrases
    found: list[list[GroundedPhrase]] = [[] for _ in range(len(batch))]
    # texts without stated phrases have found ones
    stated = zip(output.is_right, phrases.boxes.counts.tolist(), strict=True)
    for number, (text, span) in enumerate(zip(output.spans.owner.tolist(), output.spans.values.tolist(), strict=True)):
        first, end = characters_of(phrases.offsets[text], tuple(span))
        shares = output.log_attention[number].detach()
        best = int(shares.argmax())
        box, score, correct = None, 0.0, None
        if shares[best] > -torch.inf:
            box = tuple(round(value, 2) for value in boxes[text, best].tolist())
            score = round(float(shares[best].exp()), 4)
        if phrases.spans.counts[text] > 0:
            is_right, num_boxes = next(stated)
            correct = bool(is_right[best]) if num_boxes else None
        found[text].append(GroundedPhrase(phrases.words[text][first:end], (first, end), box, score, correct))
    return found
