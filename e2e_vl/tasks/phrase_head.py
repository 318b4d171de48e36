"""Phrase grounding as an auxiliary head of any task: attention of the phrases of a text over the regions.

The query is the state of a phrase's last wordpiece, and the keys are the states of the regions, both after a chosen
encoder layer (VisualBERT's head for Flickr30K Entities uses the last layer). A tagging head detects the phrases of
unannotated texts. If no text of the data has complete phrase annotations, it is not trained, and the whole text is one
phrase.

Shape legend: see `e2e_vl/structures.py`; and here
    P   phrases of all texts in the batch
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from detector.boxes import area
from detector.structures import Loss
from e2e_vl.phrases import PhraseBatch, find_characters
from e2e_vl.predictions import GroundedPhrase, Prediction
from e2e_vl.structures import Batch, IntermediateStates, ModelOutput, PhraseOutput, TextRegions, at_least_float32
from e2e_vl.targets import Ragged
from e2e_vl.tasks.base import init_head

MIN_IOU = 0.5
TAGS = "phrase_tags"  # the loss of phrase detection, per wordpiece of texts with complete phrase annotations
INSIDE, FIRST = 1, 2  # tags of wordpieces in a phrase; 0 = outside


class PhraseHead(nn.Module):
    """Attention of each phrase over the regions, and phrase tags of wordpieces.

    Args:
        hidden_size: E.
        size: width of queries and keys.
        layer: number of layers with words and regions after which the states are taken.
    """

    def __init__(self, hidden_size: int, size: int, layer: int):
        super().__init__()
        self.layer = layer
        self.query, self.key = (nn.Linear(hidden_size, size) for _ in range(2))
        self.tags = nn.Linear(hidden_size, 3)
        init_head([self.query, self.key, self.tags], "official")

    def forward(self, batch: Batch, text_regions: TextRegions, states: IntermediateStates) -> PhraseOutput:
        """Ground the phrases of M texts; outside training, the phrases of texts without annotations are predicted.

        Returns:
            The losses `phrases`, the KL divergence of the attention from the uniform distribution over the regions that
            a phrase refers to (IoU of at least 0.5 with one of its boxes), and `phrase_tags`, a cross entropy per
            wordpiece. Phrases without such a region, and texts with incomplete annotations, do not contribute.
        """
        annotated: PhraseBatch = batch.phrases
        tags = at_least_float32(self.tags(states.text))
        spans, is_annotated = annotated.spans, slice(None)
        if not self.training:
            found = predicted_spans(tags, annotated) if self.finds_phrases else whole_spans(is_word(annotated))
            spans = fill_in_spans(annotated, found)
            is_annotated = annotated.spans.counts[spans.owner] > 0
        # candidate boxes of a text's first image
        candidates = text_regions.attention_mask & (text_regions.row >= 0) & (text_regions.image_slot == 0)
        owner = spans.owner
        query, key = self.query(states.text[owner, spans.values[:, 1] - 1]), self.key(states.regions)
        log_attention = log_attention_of(query, key[owner], candidates[owner])
        text = annotated.spans.owner
        is_correct = overlapping(text_regions, text, annotated.boxes) & candidates[text]
        losses = {
            "phrases": grounding_loss(log_attention[is_annotated], is_correct),
            TAGS: tagging_loss(tags, annotated),
        }
        return PhraseOutput(spans, log_attention, is_correct, losses)

    @property
    def finds_phrases(self) -> bool:
        """Whether the tags were trained: the bias is then no longer 0, its initial value."""
        return bool(self.tags.bias.any())


def log_attention_of(
    query: Float[Tensor, "P width"], key: Float[Tensor, "P R width"], candidates: Bool[Tensor, "P R"], heads: int = 1
) -> Float[Tensor, "P R"]:
    """Log attention of each phrase on the regions of its text, averaged over heads; -inf for other regions."""
    query, key = query.unflatten(-1, (heads, -1)), key.unflatten(-1, (heads, -1))
    scores = at_least_float32(torch.einsum("phd,prhd->phr", query, key)) / math.sqrt(query.shape[-1])
    # the lowest number instead of -inf, which would make gradients NaN for texts without regions
    scores = scores.masked_fill(~candidates[:, None], torch.finfo(scores.dtype).min)
    shares = scores.log_softmax(dim=2).logsumexp(dim=1) - math.log(heads)
    return shares.masked_fill(~candidates, -torch.inf)


def overlapping(text_regions: TextRegions, text: Int64[Tensor, " P"], boxes: Ragged) -> Bool[Tensor, "P R"]:
    """Return which regions have an IoU of at least 0.5 with any box of the phrase.

    `boxes`: the boxes of each phrase, xyxy in pixels of the resized image.
    """
    phrase = boxes.owner  # phrase index of each box
    ours, true = text_regions.boxes[text[phrase]], boxes.values[:, None].to(text_regions.boxes)
    low, high = torch.maximum(ours[..., :2], true[..., :2]), torch.minimum(ours[..., 2:], true[..., 2:])
    overlap = (high - low).clamp(min=0).prod(dim=-1)
    union = area(ours) + area(true) - overlap
    hits = (overlap >= MIN_IOU * union) & (union > 0)
    found = torch.zeros(len(text), ours.shape[1], dtype=torch.int64, device=hits.device)
    return found.index_add(0, phrase, hits.long()) > 0


def grounding_loss(log_attention: Float[Tensor, "P R"], is_correct: Bool[Tensor, "P R"]) -> Loss:
    """KL divergence of the attention from the uniform distribution over all right regions.

    Its count is the number of phrases with a right region; the others do not contribute.
    """
    number = is_correct.sum(dim=1)
    is_reachable = number > 0
    number = number.clamp(min=1)
    each = -(log_attention.masked_fill(~is_correct, 0).sum(dim=1) / number) - number.log()
    return Loss(total=each.masked_fill(~is_reachable, 0).sum(), count=is_reachable.sum().to(log_attention.dtype))


def tagging_loss(tags: Float[Tensor, "M L 3"], phrases: PhraseBatch) -> Loss:
    """Cross entropy of the tags over the wordpieces of texts with complete phrase annotations."""
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
    return phrases.offsets[..., 1] > 0


def predicted_spans(tags: Float[Tensor, "M L 3"], phrases: PhraseBatch) -> list[list[tuple[int, int]]]:
    """The phrases of each text according to its tags: whole words, without punctuation at either end.

    (A punctuation mark as the last wordpiece would be a query that was never trained.)
    """
    found = []
    spans = find_spans(word_level_tags(tags, phrases.continues_word), is_word(phrases))
    for own, is_mark in zip(spans, phrases.is_punctuation().tolist(), strict=True):
        words = ([place for place in range(*span) if not is_mark[place]] for span in own)
        found.append([(places[0], places[-1] + 1) for places in words if places])
    return found


def word_level_tags(tags: Float[Tensor, "M L 3"], continues: Bool[Tensor, "M L"]) -> Int64[Tensor, "M L"]:
    """Return the most probable tags that are consistent within words.

    `continues`: a wordpiece of the word of the previous one.
    """
    each = tags.log_softmax(dim=2)
    # only the first wordpiece of a word can begin a phrase
    first = torch.where(continues, each[..., INSIDE], each[..., FIRST])
    each = torch.stack([each[..., 0], each[..., INSIDE], first], dim=2)
    word = (~continues).cumsum(dim=1) - 1  # word index of each wordpiece
    sums = torch.zeros_like(each).scatter_add(1, word[..., None].expand_as(each), each)
    best = sums.argmax(dim=2).gather(1, word)
    return best.masked_fill(continues & (best == FIRST), INSIDE)


def find_spans(tags: Int64[Tensor, "M L"], is_real: Bool[Tensor, "M L"]) -> list[list[tuple[int, int]]]:
    """The spans of phrases; a phrase begins with `FIRST`, or with `INSIDE` after an outside tag."""
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
    """The whole text as one phrase; none for texts without words."""
    places = [row.nonzero()[:, 0].tolist() for row in is_real]
    return [[(own[0], own[-1] + 1)] if own else [] for own in places]


def fill_in_spans(annotated: PhraseBatch, found: list[list[tuple[int, int]]]) -> Ragged:
    """The annotated spans of each text; for texts without annotations, the detected ones."""
    rows = [
        own if len(own) or is_complete else own.new_tensor(spans).reshape(-1, 2)
        for own, spans, is_complete in zip(annotated.spans.split(), found, annotated.is_complete.tolist(), strict=True)
    ]
    counts = torch.tensor([len(row) for row in rows], device=annotated.spans.counts.device)
    return Ragged(torch.cat(rows), counts)


def add_grounded_phrases(output: ModelOutput) -> ModelOutput:
    """A copy with the grounded phrases of each text in its record, under `grounded`.

    Called before the task makes predictions from the records.
    """
    if output.phrases is None:
        return output
    found = grounded_phrases(output.phrases, output.batch, output.text_regions)
    rows = zip(output.batch.records, found, strict=True)
    records = [record | {"grounded": own} if record else record for record, own in rows]
    return dataclasses.replace(output, batch=dataclasses.replace(output.batch, records=records))


def grounding_metrics(predictions: Iterable[Prediction]) -> dict[str, float]:
    """`phrase_accuracy`, the share of right phrases among those with annotated boxes; empty if there are none."""
    judged = [one.correct for prediction in predictions for one in prediction.grounded if one.correct is not None]
    return {"phrase_accuracy": sum(judged) / len(judged)} if judged else {}


def grounded_phrases(output: PhraseOutput, batch: Batch, text_regions: TextRegions) -> list[list[GroundedPhrase]]:
    """The phrases of each text, with boxes rounded to two decimals and scores to four."""
    boxes = text_regions.original_boxes(batch.images.scales)
    phrases = batch.phrases
    found: list[list[GroundedPhrase]] = [[] for _ in range(len(batch))]
    # `is_correct` has only the annotated phrases
    annotated = zip(output.is_correct, phrases.boxes.counts.tolist(), strict=True)
    for number, (text, span) in enumerate(zip(output.spans.owner.tolist(), output.spans.values.tolist(), strict=True)):
        first, end = find_characters(phrases.offsets[text], tuple(span))
        shares = output.log_attention[number].detach()
        best = int(shares.argmax())
        box, score, correct = None, 0.0, None
        if shares[best] > -torch.inf:
            box = tuple(round(value, 2) for value in boxes[text, best].tolist())
            score = round(float(shares[best].exp()), 4)
        if phrases.spans.counts[text] > 0:
            is_correct, num_boxes = next(annotated)
            correct = bool(is_correct[best]) if num_boxes else None
        found[text].append(GroundedPhrase(phrases.words[text][first:end], (first, end), box, score, correct))
    return found
