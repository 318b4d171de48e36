"""Phrase grounding as an auxiliary head of any task: attention of the phrases of a text over the regions.

The query is the state of a phrase's wordpieces, and the keys are the states of the regions, both after a chosen encoder
layer (VisualBERT's head for Flickr30K Entities uses the last wordpiece and the last layer). A tagging head detects the
phrases of unannotated texts. If no text of the data has complete phrase annotations, it is not trained, and the whole
text is one phrase. In training, a short path may teach the detector: words and regions meet without the encoder between
them.

Shape legend: see `e2e_vl/structures.py`; and here
    P   phrases of all texts in the batch
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from detector.boxes import area
from detector.structures import Loss, Movable
from e2e_vl.metrics.refinement import overlaps_of, refinement_metrics
from e2e_vl.phrases import PhraseBatch, find_characters
from e2e_vl.predictions import Box, GroundedPhrase, Overlaps, Prediction
from e2e_vl.structures import Batch, IntermediateStates, ModelOutput, PhraseOutput, TextRegions, at_least_float32
from e2e_vl.targets import Ragged
from e2e_vl.tasks.base import init_head

MIN_IOU = 0.5
SHORT_PATH = "short_path"  # the loss of the short path
TAGS = "phrase_tags"  # the loss of phrase detection, per wordpiece of texts with complete phrase annotations
# tags of wordpieces; 0 = outside all phrases
INSIDE = 1
FIRST = 2


class PhraseHead(nn.Module):
    """Attention of each phrase over the regions, and phrase tags of wordpieces.

    Args:
        hidden_size: E.
        size: width of queries and keys.
        layer: number of layers with words and regions after which the states are taken.
        phrase_state: the state that stands for a phrase, see `phrase_states`.
        has_short_path: see `ShortPath`.

    Attributes:
        layers: numbers of layers after which the head needs states.
    """

    def __init__(
        self, hidden_size: int, size: int, layer: int, phrase_state: str = "last", has_short_path: bool = False
    ):
        super().__init__()
        self.layer = layer
        self.layers = (0, layer) if has_short_path else (layer,)
        self.phrase_state = phrase_state
        self.query = nn.Linear(hidden_size, size)
        self.key = nn.Linear(hidden_size, size)
        self.tags = nn.Linear(hidden_size, 3)
        init_head([self.query, self.key, self.tags], "official")
        self.short_path = ShortPath(hidden_size, size) if has_short_path else None

    def forward(
        self, batch: Batch, text_regions: TextRegions, states_by_layer: Mapping[int, IntermediateStates]
    ) -> PhraseOutput:
        """Ground the phrases of M texts; outside training, the phrases of texts without annotations are predicted.

        Args:
            states_by_layer: the states after each number of `layers`.

        Returns:
            The losses `phrases`, the KL divergence of the attention from the uniform distribution over the regions that
            a phrase refers to (IoU of at least 0.5 with one of its boxes), `short_path`, the same of the short path,
            and `phrase_tags`, a cross entropy per wordpiece. Phrases without such a region, and texts with incomplete
            annotations, do not contribute.
        """
        states = states_by_layer[self.layer]
        annotated: PhraseBatch = batch.phrases
        tags = at_least_float32(self.tags(states.text))
        if self.training:
            spans = annotated.spans
            annotated_rows = slice(None)
        else:
            spans, annotated_rows = self._find_phrases(tags, annotated)
        # candidate boxes of a text's first image
        candidates = text_regions.attention_mask & (text_regions.row >= 0) & (text_regions.image_slot == 0)
        owner = spans.owner
        query = self.query(phrase_states(states.text, spans, self.phrase_state))
        key = self.key(states.regions)
        log_attention = log_attention_of(query, key[owner], candidates[owner])
        annotated_owner = annotated.spans.owner
        is_correct = overlapping(text_regions, annotated_owner, annotated.boxes) & candidates[annotated_owner]
        losses = {
            "phrases": grounding_loss(log_attention[annotated_rows], is_correct),
            TAGS: tagging_loss(tags, annotated),
        }
        if self.short_path is not None:
            short_attention = self.short_path(states_by_layer[0], annotated.spans, candidates)
            losses[SHORT_PATH] = grounding_loss(short_attention, is_correct)
        return PhraseOutput(spans, log_attention, is_correct, losses)

    def _find_phrases(
        self, tags: Float[Tensor, "M L 3"], annotated: PhraseBatch
    ) -> tuple[Ragged, Int64[Tensor, " annotated"]]:
        """Return the spans of the annotated or else the detected phrases, and the rows of the annotated ones.

        They are found on the CPU, so that a GPU waits once and not for every list.
        """
        texts = TaggedTexts(tags, self.tags.bias, annotated).cpu()
        if texts.has_trained_tags:
            detected_spans = predicted_spans(texts.tags, texts.annotated)
        else:
            detected_spans = whole_spans(is_word(texts.annotated))
        spans = fill_in_spans(texts.annotated, detected_spans)
        annotated_rows = (texts.annotated.spans.counts[spans.owner] > 0).nonzero()[:, 0]
        return spans.to(tags.device), annotated_rows.to(tags.device, non_blocking=True)

    @property
    def finds_phrases(self) -> bool:
        """Whether the tags were trained: the bias is then no longer 0, its initial value."""
        return bool(self.tags.bias.any())


@dataclasses.dataclass
class TaggedTexts(Movable):
    """What the phrases of M texts are found from."""

    tags: Float[Tensor, "M L 3"]
    tag_bias: Float[Tensor, " 3"]
    annotated: PhraseBatch

    @property
    def has_trained_tags(self) -> bool:
        """As `PhraseHead.finds_phrases`."""
        return bool(self.tag_bias.any())


class ShortPath(nn.Module):
    """Attention of the mean word embedding of each phrase over the embedded regions, before the first layer.

    Through the encoder alone, words learn late to ask for what the detector could pass on (docs/end_to_end.md).
    """

    def __init__(self, hidden_size: int, size: int):
        super().__init__()
        self.query = nn.Linear(hidden_size, size)
        self.key = nn.Linear(hidden_size, size)
        init_head([self.query, self.key], "official")

    def forward(
        self, states: IntermediateStates, spans: Ragged, candidates: Bool[Tensor, "M R"]
    ) -> Float[Tensor, "P R"]:
        """Return the log of each phrase's attention on the regions of its text; -inf for other regions."""
        query = self.query(phrase_states(states.text, spans, "mean"))
        key = self.key(states.regions)
        return log_attention_of(query, key[spans.owner], candidates[spans.owner])


def phrase_states(text: Float[Tensor, "M L E"], spans: Ragged, phrase_state: str) -> Float[Tensor, "P E"]:
    """Return the state that stands for each phrase: of its "first" or "last" wordpiece, or the "mean" of all."""
    first, end = spans.values.unbind(dim=1)
    owner = spans.owner
    if phrase_state == "mean":
        position = torch.arange(text.shape[1], device=text.device)
        inside = ((position >= first[:, None]) & (position < end[:, None])).to(text.dtype)  # [P, L]
        return torch.einsum("pl,ple->pe", inside / inside.sum(dim=1, keepdim=True), text[owner])
    if phrase_state == "first":
        return text[owner, first]
    return text[owner, end - 1]


def log_attention_of(
    query: Float[Tensor, "P width"], key: Float[Tensor, "P R width"], candidates: Bool[Tensor, "P R"], heads: int = 1
) -> Float[Tensor, "P R"]:
    """Return the log of each phrase's attention on the regions of its text; -inf for other regions.

    The attention is the mean over the heads.
    """
    query = query.unflatten(-1, (heads, -1))
    key = key.unflatten(-1, (heads, -1))
    scores = at_least_float32(torch.einsum("phd,prhd->phr", query, key)) / math.sqrt(query.shape[-1])
    # the lowest number instead of -inf, which would make gradients NaN for texts without regions
    scores = scores.masked_fill(~candidates[:, None], torch.finfo(scores.dtype).min)
    log_attention = scores.log_softmax(dim=2).logsumexp(dim=1) - math.log(heads)
    return log_attention.masked_fill(~candidates, -torch.inf)


def overlapping(text_regions: TextRegions, text: Int64[Tensor, " P"], boxes: Ragged) -> Bool[Tensor, "P R"]:
    """Return which regions have an IoU of at least 0.5 with any box of the phrase.

    `boxes`: the boxes of each phrase, xyxy in pixels of the resized image.
    """
    phrase = boxes.owner  # phrase index of each box
    region_boxes = text_regions.boxes[text[phrase]]  # [boxes, R, 4]
    true_boxes = boxes.values[:, None].to(region_boxes)  # [boxes, 1, 4]
    low = torch.maximum(region_boxes[..., :2], true_boxes[..., :2])
    high = torch.minimum(region_boxes[..., 2:], true_boxes[..., 2:])
    intersection = (high - low).clamp(min=0).prod(dim=-1)
    union = area(region_boxes) + area(true_boxes) - intersection
    overlaps = (intersection >= MIN_IOU * union) & (union > 0)
    num_overlaps = torch.zeros(len(text), region_boxes.shape[1], dtype=torch.int64, device=overlaps.device)
    return num_overlaps.index_add(0, phrase, overlaps.long()) > 0


def grounding_loss(log_attention: Float[Tensor, "P R"], is_correct: Bool[Tensor, "P R"]) -> Loss:
    """Return the KL divergence of the attention from the uniform distribution over all right regions.

    Its count is the number of phrases with a right region; the others do not contribute.
    """
    num_correct = is_correct.sum(dim=1)
    is_reachable = num_correct > 0
    num_correct = num_correct.clamp(min=1)
    losses = -(log_attention.masked_fill(~is_correct, 0).sum(dim=1) / num_correct) - num_correct.log()
    return Loss(total=losses.masked_fill(~is_reachable, 0).sum(), count=is_reachable.sum().to(log_attention.dtype))


def tagging_loss(tags: Float[Tensor, "M L 3"], phrases: PhraseBatch) -> Loss:
    """Return the cross entropy of the tags over the wordpieces of texts with complete phrase annotations."""
    position = torch.arange(tags.shape[1], device=tags.device)
    first, end = phrases.spans.values.unbind(dim=1)
    inside = (position >= first[:, None]) & (position < end[:, None])  # [P, L]
    marked = torch.zeros(2, *tags.shape[:2], dtype=torch.int64, device=tags.device)
    marks = torch.stack([inside, position == first[:, None]]).long()
    is_inside, is_first = marked.index_add(1, phrases.spans.owner, marks) > 0
    truth = torch.where(is_first, FIRST, is_inside.long() * INSIDE)
    is_counted = is_word(phrases) & phrases.is_complete[:, None]
    losses = F.cross_entropy(tags.flatten(0, 1), truth.flatten(), reduction="none").unflatten(0, tags.shape[:2])
    return Loss(total=(losses * is_counted).sum(), count=is_counted.sum().to(tags.dtype))


def is_word(phrases: PhraseBatch) -> Bool[Tensor, "M L"]:
    """Return which positions are wordpieces of the text: neither special tokens nor padding."""
    return phrases.offsets[..., 1] > 0


def predicted_spans(tags: Float[Tensor, "M L 3"], phrases: PhraseBatch) -> list[list[tuple[int, int]]]:
    """Return the phrases of each text according to its tags: whole words, without punctuation at either end.

    (A punctuation mark as the last wordpiece would be a query that was never trained.)
    """
    tagged_spans = find_spans(word_level_tags(tags, phrases.continues_word), is_word(phrases))
    spans_by_text = []
    for text_spans, is_mark in zip(tagged_spans, phrases.is_punctuation().tolist(), strict=True):
        trimmed_spans = []
        for first, end in text_spans:
            positions = [position for position in range(first, end) if not is_mark[position]]
            if positions:
                trimmed_spans.append((positions[0], positions[-1] + 1))
        spans_by_text.append(trimmed_spans)
    return spans_by_text


def word_level_tags(tags: Float[Tensor, "M L 3"], continues: Bool[Tensor, "M L"]) -> Int64[Tensor, "M L"]:
    """Return the most probable tags that are consistent within words.

    `continues`: a wordpiece of the word of the previous one.
    """
    log_probs = tags.log_softmax(dim=2)
    # only the first wordpiece of a word can begin a phrase
    first = torch.where(continues, log_probs[..., INSIDE], log_probs[..., FIRST])
    log_probs = torch.stack([log_probs[..., 0], log_probs[..., INSIDE], first], dim=2)
    word = (~continues).cumsum(dim=1) - 1  # word index of each wordpiece
    word_log_probs = torch.zeros_like(log_probs).scatter_add(1, word[..., None].expand_as(log_probs), log_probs)
    best = word_log_probs.argmax(dim=2).gather(1, word)
    return best.masked_fill(continues & (best == FIRST), INSIDE)


def find_spans(tags: Int64[Tensor, "M L"], is_real: Bool[Tensor, "M L"]) -> list[list[tuple[int, int]]]:
    """Find the spans of phrases; a phrase begins with `FIRST`, or with `INSIDE` after an outside tag."""
    spans_by_text = []
    for text_tags in tags.masked_fill(~is_real, 0).tolist():
        spans = []
        start = None
        for position, tag in enumerate([*text_tags, 0]):
            if start is not None and tag != INSIDE:
                spans.append((start, position))
                start = None
            if tag == FIRST or (tag == INSIDE and start is None):
                start = position
        spans_by_text.append(spans)
    return spans_by_text


def whole_spans(is_real: Bool[Tensor, "M L"]) -> list[list[tuple[int, int]]]:
    """Return each whole text as one phrase; none for texts without words."""
    spans_by_text = []
    for is_real_position in is_real:
        positions = is_real_position.nonzero()[:, 0].tolist()
        spans_by_text.append([(positions[0], positions[-1] + 1)] if positions else [])
    return spans_by_text


def fill_in_spans(annotated: PhraseBatch, detected_spans: list[list[tuple[int, int]]]) -> Ragged:
    """Return the annotated spans of each text; for texts without annotations, the detected ones."""
    spans_by_text = []
    texts = zip(annotated.spans.split(), detected_spans, annotated.is_complete.tolist(), strict=True)
    for spans, detected, is_complete in texts:
        is_annotated = len(spans) > 0 or is_complete
        spans_by_text.append(spans if is_annotated else spans.new_tensor(detected).reshape(-1, 2))
    counts = torch.tensor([len(spans) for spans in spans_by_text], device=annotated.spans.counts.device)
    return Ragged(torch.cat(spans_by_text), counts)


def add_grounded_phrases(output: ModelOutput) -> ModelOutput:
    """Return a copy with the grounded phrases of each text in its record, under `grounded`.

    Called before the task makes predictions from the records.
    """
    if output.phrases is None:
        return output
    phrases_by_text = grounded_phrases(output)
    records = []
    for record, phrases in zip(output.batch.records, phrases_by_text, strict=True):
        records.append(record | {"grounded": phrases} if record else record)
    return dataclasses.replace(output, batch=dataclasses.replace(output.batch, records=records))


def grounding_metrics(predictions: Iterable[Prediction]) -> dict[str, float]:
    """Return how well the phrases with annotated boxes are grounded; empty without such.

    It is `phrase_accuracy`, the share of right ones, and with refined boxes the metrics of
    `e2e_vl/metrics/refinement.py` with `phrase_` before their names.
    """
    is_correct: list[bool] = []
    overlaps: list[Overlaps] = []
    for prediction in predictions:
        for phrase in prediction.grounded:
            if phrase.correct is not None:
                is_correct.append(phrase.correct)
            if phrase.overlaps is not None:
                overlaps.append(phrase.overlaps)
    if not is_correct:
        return {}
    metrics = {f"phrase_{name}": value for name, value in refinement_metrics(overlaps).items()}
    return metrics | {"phrase_accuracy": sum(is_correct) / len(is_correct)}


def grounded_phrases(output: ModelOutput) -> list[list[GroundedPhrase]]:
    """Return the phrases of each text, with boxes rounded to two decimals and scores to four."""
    phrases = output.batch.phrases
    grounding = output.phrases
    proposals = output.text_regions.original_boxes(output.batch.images.scales)
    boxes = output.refined_regions.original_boxes(output.batch.images.scales)
    phrases_by_text: list[list[GroundedPhrase]] = [[] for _ in range(len(output.batch))]
    # of the annotated phrases only
    annotated = zip(grounding.is_correct, phrases.boxes.split(), strict=True)
    spans = zip(grounding.spans.owner.tolist(), grounding.spans.values.tolist(), strict=True)
    for number, (text, span) in enumerate(spans):
        first, end = find_characters(phrases.offsets[text], tuple(span))
        log_attention = grounding.log_attention[number].detach()
        best = int(log_attention.argmax())
        box = None
        proposal = None
        score = 0.0
        if log_attention[best] > -torch.inf:
            box = _rounded(boxes[text, best])
            score = round(float(log_attention[best].exp()), 4)
            if output.refinement is not None:
                proposal = _rounded(proposals[text, best])
        correct = None
        overlaps = None
        if phrases.spans.counts[text] > 0:
            is_correct, true_boxes = next(annotated)
            if len(true_boxes):
                correct = bool(is_correct[best])
                if output.refinement is not None:
                    candidates = log_attention > -torch.inf
                    overlaps = _overlaps(output, text, best, candidates, true_boxes)
                    correct = overlaps.refined >= MIN_IOU
        words = phrases.words[text][first:end]
        phrase = GroundedPhrase(words, (first, end), box, score, correct, proposal, overlaps)
        phrases_by_text[text].append(phrase)
    return phrases_by_text


def _rounded(box: Float[Tensor, " 4"]) -> Box:
    return tuple(round(coordinate, 2) for coordinate in box.tolist())


def _overlaps(
    output: ModelOutput, text: int, best: int, candidates: Bool[Tensor, " R"], true_boxes: Float[Tensor, "n 4"]
) -> Overlaps:
    """Return the IoUs of a phrase whose region is `best`, with the best of its true boxes."""
    proposals = output.text_regions.boxes[text, candidates].cpu().numpy()
    refined = None
    proposal = None
    if candidates[best]:
        refined = output.refined_regions.boxes[text, best].tolist()
        proposal = output.text_regions.boxes[text, best].tolist()
    return overlaps_of(refined, proposal, proposals, true_boxes.cpu().numpy())
