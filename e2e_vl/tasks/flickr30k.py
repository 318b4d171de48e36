"""Flickr30K Entities: ground all phrases of a sentence in the regions of its image.

The head is attention without values, with the states of phrases as queries and the states of regions as keys.

Shape legend: see `e2e_vl/structures.py`; and here
    P   phrases of all texts in the batch
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import nn
from typing_extensions import override

from detector.structures import Loss
from e2e_vl.drawing import PALETTE, draw_boxes
from e2e_vl.metrics.flickr30k import (
    Flickr30KPrediction,
    correct_candidates,
    first_hit,
    phrase_metrics,
    write_submission,
)
from e2e_vl.metrics.refinement import overlaps_of
from e2e_vl.predictions import Box, box_text
from e2e_vl.preprocessing import EncodedText, GeneratorFactory, Preprocessor, find_wordpieces
from e2e_vl.samples import EntityPhrases, Question, Sample, SampleText
from e2e_vl.structures import Batch, EncoderOutput, ModelOutput, TaskOutput, TextRegions
from e2e_vl.targets import Ragged, Targets, nested, ragged
from e2e_vl.tasks.base import PredictionSummary, Task, candidate_regions, init_head, load_predicted_image
from e2e_vl.tasks.config import Flickr30KConfig
from e2e_vl.tasks.phrase_head import grounding_loss, log_attention_of, overlapping, phrase_states
from e2e_vl.tasks.submission import Submission
from e2e_vl.text import TextTokenizer
from e2e_vl.transforms import LoadedImage

_BRACKETS = re.compile(r"\[([^\[\]]+)\]")  # phrases in a user's text
NO_PHRASES = EntityPhrases((), None, entities=(), types=())
NO_REGIONS = "nothing: there are no candidate regions"


@dataclasses.dataclass
class Flickr30KTargets(Targets):
    """The wordpiece spans of the phrases, and their boxes if known."""

    spans: Ragged | Int64[np.ndarray, "n 2"] | None = ragged()  # first wordpiece, last + 1; ragged by text
    # float32 [boxes, 4] of each phrase, xyxy in pixels of the resized image; ragged by phrase in a batch
    boxes: Ragged | list[Float[np.ndarray, "_ 4"]] | None = nested(4)

    @override
    def named_boxes(self) -> Ragged | None:
        return None if self.boxes is None else self.boxes.regroup(self.spans)


@dataclasses.dataclass(frozen=True)
class Flickr30KPreprocessor(Preprocessor):
    """Encodes a sentence as one text; in flipped images "left" and "right" are swapped."""

    config: Flickr30KConfig = dataclasses.field(default_factory=Flickr30KConfig)
    prediction_class = Flickr30KPrediction
    learns_from = (EntityPhrases,)

    @override
    def truth_record(self, truth: EntityPhrases, *, flipped: bool) -> dict[str, Any]:
        if truth.boxes is None:
            return {}
        return {
            "phrase_ids": list(truth.entities),
            "phrase_types": [list(types) for types in truth.types],
            "gt_boxes": [boxes.tolist() for boxes in truth.boxes],
        }

    @override
    def placeholder_targets(self) -> Flickr30KTargets:
        return Flickr30KTargets(np.zeros((0, 2), dtype=np.int64), [])

    @override
    def encode_text(
        self, text: SampleText, sample: Sample, images: Sequence[LoadedImage], make_generator: GeneratorFactory
    ) -> Iterable[EncodedText]:
        [image] = images
        pieces, piece_offsets, _ = self.text_tokenizer.encode(text.words, mirrored=image.image_transform.flipped)
        encoding = self.text_tokenizer.single(pieces)
        truth = text.truth if isinstance(text.truth, EntityPhrases) else NO_PHRASES
        record = self.record(text, images, encoding)
        record["phrases"] = [text.words[slice(*span)] for span in truth.spans]
        spans = truth.spans
        if self.config.occurrence == "first":
            spans = [first_occurrence(text.words, span) for span in spans]
        is_word = encoding.source >= 0
        offsets = np.zeros((len(is_word), 2), dtype=np.int64)
        offsets[is_word] = piece_offsets[encoding.source[is_word]]
        wordpieces = [(0, 1)] * len(spans)
        if is_word.any():
            wordpieces = [find_wordpieces(offsets, is_word, span) for span in spans]
        targets = Flickr30KTargets(spans=np.array(wordpieces, dtype=np.int64).reshape(-1, 2))
        if truth.boxes is not None:
            targets.boxes = [image.image_transform.transform_boxes(boxes).astype(np.float32) for boxes in truth.boxes]
        yield EncodedText(encoding, text.image_index, record, targets)


def first_occurrence(words: str, span: tuple[int, int]) -> tuple[int, int]:
    """Return the character span of the first occurrence of a phrase in a text.

    As in the official code, only whole words between single spaces match, and matching is case-sensitive.
    """
    phrase = words[slice(*span)]
    occurrence = re.search(rf"(?<!\S){re.escape(phrase)}(?!\S)", words)
    return span if occurrence is None else occurrence.span()


class Flickr30KTask(Task):
    """Attention of each phrase over the regions; the region with the highest attention is the answer."""

    prediction_class = Flickr30KPrediction
    names_boxes = True
    metrics = staticmethod(phrase_metrics)
    submission = Submission(write_submission)
    example_call = '"photo.jpg", "[a man] in [a red shirt]"'
    hub_task = "phrase-grounding"

    def __init__(self, hidden_size: int, config: Flickr30KConfig | None = None):
        super().__init__()
        self.config = config or Flickr30KConfig()
        width = self.config.num_heads * self.config.head_size
        self.query = nn.Linear(hidden_size, width)
        self.key = nn.Linear(hidden_size, width)
        init_head([self.query, self.key], self.config.head_init)

    @override
    def preprocessor(self, text_tokenizer: TextTokenizer) -> Flickr30KPreprocessor:
        return Flickr30KPreprocessor(text_tokenizer, self.config)

    @override
    def question(self, question: Question) -> Sample:
        """Take the phrases in brackets of a user's sentence; without brackets, the whole sentence is one phrase."""
        words = ""
        spans = []
        for number, part in enumerate(_BRACKETS.split(question.text)):
            if number % 2:  # between brackets
                spans.append((len(words), len(words) + len(part)))
            words += part
        if not spans:
            spans = [(0, len(words))]
        phrases = EntityPhrases(tuple(spans), None, entities=("",) * len(spans), types=((),) * len(spans))
        return question.sample(SampleText(0, words, {}, phrases))

    def forward(self, batch: Batch, text_regions: TextRegions, encoded: EncoderOutput) -> TaskOutput:
        """Score the regions for the P phrases of M texts.

        Returns:
            `logits` float32 [P, R], the log of the attention on each region, -inf if a region is no candidate; and the
            loss `flickr30k` if the batch has the target `boxes`: the KL divergence of the attention from the uniform
            distribution over all right regions. Phrases without a right region do not contribute.
        """
        targets: Flickr30KTargets = batch.targets
        owner = targets.spans.owner
        candidates = candidate_regions(text_regions, whole_image_can_win=self.config.whole_image_can_win)[owner]
        query = self.query(phrase_states(encoded.text, targets.spans, self.config.phrase_state))
        log_attention = log_attention_of(query, self.key(encoded.regions)[owner], candidates, self.config.num_heads)
        losses = {}
        if targets.boxes is not None:
            loss = grounding_loss(log_attention, overlapping(text_regions, owner, targets.boxes) & candidates)
            if self.config.loss_per == "text":
                number = len(targets.with_target(batch.image_index))
                loss = Loss(loss.total, loss.count.new_tensor(float(number)))
            losses["flickr30k"] = loss
        return TaskOutput(losses=losses, logits=log_attention)

    @override
    def predict(self, output: ModelOutput) -> list[Flickr30KPrediction]:
        """Choose the region with the highest attention for each phrase, and rank the best right region if known.

        Boxes are refined if the model refines them, also those that are ranked.
        """
        batch = output.batch
        text_regions = output.text_regions
        spans = batch.targets.spans
        scales = batch.images.scales
        proposals = text_regions.original_boxes(scales).detach().cpu().double().numpy()
        boxes = output.refined_regions.original_boxes(scales).detach().cpu().double().numpy()
        attention = output.task.logits.detach().cpu().double().exp().numpy()  # small values would be 0 in float32
        is_candidate = (output.task.logits > -torch.inf).cpu().numpy()
        predictions = []
        phrase = 0  # among the P phrases of all texts
        for text, (record, count) in enumerate(zip(batch.records, spans.counts.tolist(), strict=True)):
            best_boxes = []
            best_scores = []
            ranks = []
            best_proposals = []
            overlaps = []
            for number in range(count):
                candidate_boxes = boxes[text, is_candidate[phrase]]
                candidate_proposals = proposals[text, is_candidate[phrase]]
                scores = attention[phrase, is_candidate[phrase]]
                if len(candidate_boxes):
                    best = int(np.argsort(-scores, kind="stable")[0])
                    best_boxes.append(candidate_boxes[best].tolist())
                    best_proposals.append(candidate_proposals[best].tolist())
                    best_scores.append(float(scores[best]))
                else:
                    best_boxes.append(None)
                    best_proposals.append(None)
                    best_scores.append(0.0)
                if "gt_boxes" in record:
                    is_correct = correct_candidates(candidate_boxes, record["gt_boxes"][number])
                    ranks.append(first_hit(scores, is_correct))
                    if output.refinement is not None:
                        gt_boxes = record["gt_boxes"][number]
                        overlaps.append(overlaps_of(best_boxes[-1], best_proposals[-1], candidate_proposals, gt_boxes))
                phrase += 1
            if "gt_boxes" not in record:
                ranks = None
                overlaps = None
            refinement = {}
            if output.refinement is not None:
                refinement = {"proposals": best_proposals, "overlaps": overlaps}
            answers = {"boxes": best_boxes, "scores": best_scores, "ranks": ranks, **refinement}
            predictions.append(self.prediction(record, **answers))
        return predictions

    @override
    def correctness(self, prediction: Flickr30KPrediction) -> float | None:
        """Return the share of phrases with a right region; None if the truth is unknown, or there is no phrase."""
        ranks = prediction.ranks
        if not ranks:
            return None
        return sum(rank == 0 for rank in ranks) / len(ranks)

    @override
    def answer_lines(self, prediction: Flickr30KPrediction) -> list[str]:
        rows = zip(prediction.phrases, prediction.boxes, prediction.scores, strict=True)
        lines = []
        for phrase, box, score in rows:
            if box is None:
                lines.append(f"{phrase}: {NO_REGIONS}")
            else:
                lines.append(f"{phrase}: {box_text(box)} ({score:.3f})")
        return lines

    @override
    def answer_boxes(self, prediction: Flickr30KPrediction) -> list[tuple[str, Box]]:
        rows = zip(prediction.phrases, prediction.boxes, prediction.scores, strict=True)
        return [(f"{phrase} {score:.2f}", box) for phrase, box, score in rows if box is not None]

    @override
    def draw(self, prediction: Flickr30KPrediction) -> np.ndarray:
        """Draw the region of each phrase in a different colour, and the true boxes of wrong phrases."""
        boxes = []
        labels = []
        colours = []
        ranks = prediction.ranks or [0] * len(prediction.phrases)
        for number, (phrase, box, rank) in enumerate(zip(prediction.phrases, prediction.boxes, ranks, strict=True)):
            colour = PALETTE[number % len(PALETTE)]
            if box is not None:
                boxes.append(box)
                labels.append(phrase if rank == 0 else f"{phrase}?")
                colours.append(colour)
            if rank != 0:
                for true_box in prediction.gt_boxes[number]:
                    boxes.append(true_box)
                    labels.append(f"meant: {phrase}")
                    colours.append(colour)
        return draw_boxes(load_predicted_image(prediction), boxes, labels, colours)

    @override
    def describe(self, prediction: Flickr30KPrediction) -> PredictionSummary:
        answer = "; ".join(self.answer_lines(prediction))
        group = ""
        distinct_types = set().union(*(prediction.phrase_types or ()))
        if distinct_types:
            group = distinct_types.pop() if len(distinct_types) == 1 else "several types"
        ranks = prediction.ranks
        if ranks is None:
            return PredictionSummary(prediction.text, answer, group=group)
        truths = []
        for phrase, boxes in zip(prediction.phrases, prediction.gt_boxes, strict=True):
            truths.append(f"{phrase}: {' or '.join(map(box_text, boxes))}")
        num_right = sum(rank == 0 for rank in ranks)
        num_unreachable = sum(rank is None for rank in ranks)
        note = f"{num_right} of {len(ranks)} phrases are right"
        if num_unreachable:
            note += f", {num_unreachable} have no right candidate"
        mistakes = []
        for types, rank in zip(prediction.phrase_types, ranks, strict=True):
            if rank != 0:
                mistakes.append(("/".join(types), "no right candidate" if rank is None else "another region"))
        return PredictionSummary(
            prediction.text, answer, truth="; ".join(truths), note=note, group=group, mistakes=tuple(mistakes)
        )
