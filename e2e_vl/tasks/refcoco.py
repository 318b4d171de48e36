"""Referring expressions (RefCOCO, RefCOCO+, RefCOCOg, gRefCOCO): which region does an expression refer to, if any?

Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from typing_extensions import override

from detector.boxes import pairwise_iou
from detector.errors import UserError
from detector.mask_head import paste_mask
from detector.structures import Loss
from e2e_vl.drawing import BLUE, GREEN, PALETTE, RED, Colour, draw_boxes, tint
from e2e_vl.masks import RunLengths, encode_masks
from e2e_vl.metrics.refcoco import ReferringPrediction, referring_metrics, write_submission
from e2e_vl.metrics.refinement import referring_overlaps, refinement_metrics
from e2e_vl.metrics.segmentation import segmentation_metrics
from e2e_vl.predictions import Box, Ranked, box_text
from e2e_vl.preprocessing import EncodedText, GeneratorFactory, Preprocessor
from e2e_vl.samples import Question, ReferredBoxes, Sample, SampleText
from e2e_vl.structures import (
    Ability,
    Batch,
    EncoderOutput,
    ModelOutput,
    TaskOutput,
    TextRegions,
    at_least_float32,
    class_names_of,
)
from e2e_vl.targets import NamedMasks, Ragged, Targets, padded_masks, ragged
from e2e_vl.tasks.base import (
    Head,
    HeadInit,
    PredictionSummary,
    Sizes,
    Task,
    Transform,
    candidate_regions,
    load_predicted_image,
    phrase_boxes,
)
from e2e_vl.tasks.config import ReferringConfig
from e2e_vl.tasks.submission import Submission
from e2e_vl.text import TextTokenizer
from e2e_vl.transforms import LoadedImage

NOTHING = "nothing fits"  # the answer of the null candidate
OTHER_COLOURS = PALETTE[3:]  # for phrases: no green, blue or red
SAME_PLACE = 0.5  # IoU from which two candidates are at the same place
MAJORITY = 0.5  # score from which no other candidate has a higher one


@dataclasses.dataclass
class ReferringTargets(Targets):
    """The boxes that each expression refers to, in pixels of the resized image (scaled, flipped and clamped)."""

    boxes: Float[np.ndarray, "K 4"] | Ragged | None = ragged()
    # of the objects of these boxes; None: not needed
    masks: tuple[Bool[np.ndarray, "K height width"], Float[np.ndarray, "K 4"]] | NamedMasks | None = padded_masks()

    @override
    def named_boxes(self) -> Ragged | None:
        return self.boxes

    @override
    def named_masks(self) -> NamedMasks | None:
        return self.masks


class ReferringPreprocessor(Preprocessor):
    """Encodes an expression as one text; in flipped images "left" and "right" are swapped (official VL-BERT code)."""

    prediction_class = ReferringPrediction
    learns_from = (ReferredBoxes,)

    @override
    def truth_record(self, truth: ReferredBoxes, *, flipped: bool) -> dict[str, Any]:
        record: dict[str, Any] = {"category": truth.category}
        if len(truth.boxes) == 1:
            record["gt_box"] = list(truth.boxes[0])
            record["ann_id"] = None if truth.ann_ids is None else truth.ann_ids[0]
        else:
            record["gt_boxes"] = [list(box) for box in truth.boxes]
        return record

    def _mask_record(self, truth: ReferredBoxes, image: LoadedImage) -> dict[str, Any]:
        """Return the true mask of all objects together, as COCO's files have it."""
        if truth.masks is None:
            return {}
        mask = encode_masks(truth.masks, image.image_transform.original_size)
        return {"gt_segmentation": {"size": list(mask.size), "counts": mask.counts}}

    @override
    def placeholder_targets(self) -> ReferringTargets:
        return ReferringTargets(np.zeros((1, 4), dtype=np.float32))

    @override
    def encode_text(
        self, text: SampleText, sample: Sample, images: Sequence[LoadedImage], make_generator: GeneratorFactory
    ) -> Iterable[EncodedText]:
        [image] = images
        pieces = self.text_tokenizer.pieces(text.words, mirrored=image.image_transform.flipped)
        encoding = self.text_tokenizer.single(pieces)
        record = self.record(text, images, encoding)
        if image.box_ids is not None:
            record["candidate_ann_ids"] = list(image.box_ids)
        targets = ReferringTargets()
        if isinstance(text.truth, ReferredBoxes):
            targets.boxes = image.image_transform.transform_referred_boxes(np.array(text.truth.boxes))
            if text.truth.masks is not None:
                masks = [image.image_transform.transform_mask(mask) for mask in text.truth.masks]
                shape = (len(masks), *image.image_transform.size)
                targets.masks = (np.array(masks, dtype=bool).reshape(shape), targets.boxes)
            record = record | self._mask_record(text.truth, image)
        yield EncodedText(encoding, text.image_index, record, targets)


class ReferringTask(Task):
    """Scores each region; the region with the highest score is predicted, or none if `null_candidate` scores higher.

    Padding is masked (the official code does not mask padded boxes, so it may predict them).
    """

    predicts_box = True
    chooses_region = True
    names_boxes = True
    prediction_class = ReferringPrediction
    example_call = '"photo.jpg", "the small red circle"'
    hub_task = "referring-expression-comprehension"
    submission = Submission(write_submission)
    init_from = HeadInit(copies={"masked_regions.transform.": "head.transform."}, random=("head.output.", "null_head."))

    def __init__(self, hidden_size: int, config: ReferringConfig | None = None, summary_size: int | None = None):
        super().__init__()
        self.config = config = config or ReferringConfig()
        self.head = Head(hidden_size, None, config.dropout, config.head_init, transform=Transform(hidden_size))
        if config.null_candidate:
            self.null_head = Head(summary_size or hidden_size, None, config.dropout, config.head_init)

    @classmethod
    @override
    def build(cls, sizes: Sizes, config: ReferringConfig) -> Self:
        return cls(sizes.hidden_size, config, sizes.summary_size)

    @property
    @override
    def needs(self) -> tuple[Ability, ...]:
        return (Ability.SUMMARY_OF_SINGLE,) if self.config.null_candidate else ()

    @override
    def preprocessor(self, text_tokenizer: TextTokenizer) -> ReferringPreprocessor:
        return ReferringPreprocessor(text_tokenizer)

    @override
    def question(self, question: Question) -> Sample:
        return question.sample(SampleText(0, question.text, {}))

    def forward(self, batch: Batch, text_regions: TextRegions, encoded: EncoderOutput) -> TaskOutput:
        """Score the regions of M texts.

        Returns:
            `logits` float32 [M, R], -inf for padding (and for the whole image if it is no candidate), with
            `null_candidate` [M, R + 1], its score last; and the loss `referring` if the batch has the target `boxes`.
            Its count is the number of candidates of texts with a target ("binary") or of texts with a positive
            candidate ("softmax").
        """
        scores = at_least_float32(self.head(encoded.regions))
        config = self.config
        candidates = candidate_regions(
            text_regions, whole_image_can_win=config.whole_image_can_win, may_be_empty=config.allow_no_regions
        )
        if config.null_candidate:
            scores = torch.cat([scores, at_least_float32(self.null_head(encoded.summary))[:, None]], dim=1)
            candidates = F.pad(candidates, (0, 1), value=True)
        losses = {}
        if batch.targets is not None and batch.targets.boxes is not None:
            positive = self.positive_regions(text_regions, batch.targets.boxes)
            if config.null_candidate:
                positive = torch.cat([positive, (batch.targets.boxes.counts == 0)[:, None]], dim=1)
            positive &= candidates
            with_target = batch.targets.with_target
            compute_loss = self._binary_loss if config.loss == "binary" else self._softmax_loss
            losses["referring"] = compute_loss(with_target(scores), with_target(positive), with_target(candidates))
        return TaskOutput(losses=losses, logits=scores.masked_fill(~candidates, -torch.inf))

    def positive_regions(self, text_regions: TextRegions, referred: Ragged) -> Bool[Tensor, "M R"]:
        """Return whether the IoU of each region with a referred box is greater than `positive_iou`."""
        iou_of_each = torch.vmap(functools.partial(pairwise_iou, plus_one=self.config.plus_one))
        boxes = text_regions.boxes[referred.owner]  # one row per referred box
        fits = iou_of_each(boxes, referred.values[:, None])[..., 0] > self.config.positive_iou
        counts = torch.zeros(text_regions.boxes.shape[:2], dtype=torch.int64, device=boxes.device)
        return counts.index_add(0, referred.owner, fits.long()) > 0

    def _binary_loss(
        self, scores: Float[Tensor, "texts R"], positive: Bool[Tensor, "texts R"], candidates: Bool[Tensor, "texts R"]
    ) -> Loss:
        weight = scores.new_tensor(self.config.positive_weight)
        truth = positive.to(scores.dtype)
        each = F.binary_cross_entropy_with_logits(scores, truth, pos_weight=weight, reduction="none")
        return Loss(total=(each * candidates).sum(), count=candidates.sum().float())

    def _softmax_loss(
        self, scores: Float[Tensor, "texts R"], positive: Bool[Tensor, "texts R"], candidates: Bool[Tensor, "texts R"]
    ) -> Loss:
        labelled = positive.any(dim=1)
        # the lowest number instead of -inf, which would make gradients NaN for skipped rows
        lowest = torch.finfo(scores.dtype).min
        over_all = scores.masked_fill(~candidates, lowest).logsumexp(dim=1)
        over_positive = scores.masked_fill(~positive, lowest).logsumexp(dim=1)
        each = torch.where(labelled, over_all - over_positive, torch.zeros_like(over_all))
        return Loss(total=each.sum(), count=labelled.sum().float())

    @override
    def chosen_regions(self, output: TaskOutput, text_regions: TextRegions) -> Int64[Tensor, " M"]:
        num_regions = text_regions.boxes.shape[1]
        best = output.logits.max(dim=1)
        has_region = (best.indices < num_regions) & (best.values > -torch.inf)
        return torch.where(has_region, best.indices, -1)

    @override
    def predict(self, output: ModelOutput) -> list[ReferringPrediction]:
        """Predict the refined box of the candidate with the highest logit; no box if that is the null candidate.

        Its score is the sigmoid of the logit, or with the softmax loss, the softmax over the candidates.
        """
        batch = output.batch
        logits = output.task.logits
        text_regions = output.text_regions
        num_regions = text_regions.boxes.shape[1]
        candidates = (logits > -torch.inf)[:, :num_regions]
        if not self.config.allow_no_regions:
            for row in (~candidates.any(dim=1)).nonzero().flatten().tolist():
                names = [batch.images.names[index] for index in batch.image_index[row].tolist() if index >= 0]
                raise UserError(
                    f"There are no candidate regions in {', '.join(names) or 'a text without an image'}; give "
                    "boxes, keep at least one detection per image, or set the task's allow_no_regions."
                )
        boxes = text_regions.original_boxes(batch.images.scales).cpu()
        refined_boxes = output.refined_regions.original_boxes(batch.images.scales).cpu()
        probabilities = logits.sigmoid() if self.config.loss == "binary" else logits.softmax(dim=1)
        probabilities = probabilities.cpu()
        class_names = class_names_of(output)
        chosen_regions = self.chosen_regions(output.task, text_regions).tolist()
        predictions = []
        for row, (chosen, is_candidate) in enumerate(zip(chosen_regions, candidates.cpu(), strict=True)):
            has_box = chosen >= 0
            box = None
            score = 0.0
            detected_class = None
            null_score = None
            refinement = {}
            if output.refinement is not None:
                refinement["refined_boxes"] = refined_boxes[row, is_candidate].tolist()
            if has_box:
                box = refined_boxes[row, chosen].tolist()
                score = float(probabilities[row, chosen])
                detected_class = class_names[row][chosen] or None
                if output.refinement is not None:
                    refinement["proposal"] = boxes[row, chosen].tolist()
            if self.config.null_candidate:
                null_score = float(probabilities[row, -1])
                if not has_box:
                    score = null_score
            predictions.append(
                self.prediction(
                    batch.records[row],
                    box=box,
                    score=score,
                    null_score=null_score,
                    detected_class=detected_class,
                    candidate_boxes=boxes[row, is_candidate].tolist(),
                    candidate_scores=probabilities[row, :num_regions][is_candidate].tolist(),
                    segmentation=self._cut_out(output, row, refined_boxes[row, chosen] if has_box else None),
                    **refinement,
                )
            )
        return predictions

    def _cut_out(self, output: ModelOutput, row: int, box: Float[Tensor, " 4"] | None) -> RunLengths | None:
        """Return the mask of the answer to a text, empty without a box; None: there are no masks.

        `box` is in pixels of the original image.
        """
        if output.segmentation is None:
            return None
        size = output.batch.records[row]["image_size"]
        if box is None:
            return encode_masks([], size)
        pixels = paste_mask(output.segmentation.probabilities[row].cpu(), box, tuple(size))
        return RunLengths.of_mask(pixels.numpy())

    @override
    def correctness(self, prediction: ReferringPrediction) -> float | None:
        """Return 1 if the predicted box is correct under the task's IoU convention, else 0; None: unknown truth."""
        if prediction.targets == ():
            return float(prediction.box is None)
        if prediction.targets is None and prediction.ann_id is None:
            return None
        return referring_metrics([prediction], self.config.iou_convention)["accuracy"]

    @override
    def metrics(self, predictions: list[ReferringPrediction]) -> dict[str, float]:
        convention = self.config.iou_convention
        fit = "continuous" if convention == "same_annotation" else convention
        refinement = refinement_metrics(referring_overlaps(predictions, fit), fit)
        referring = referring_metrics(predictions, convention, self.config.f1_overlap)
        return refinement | referring | segmentation_metrics(predictions)

    @override
    def certainty(self, prediction: ReferringPrediction) -> float:
        """Return the score of the answer; of a box with the softmax loss, that of all candidates at the same place.

        Detections of one object share its softmax score, so other boxes at the same place confirm the answer. They do
        not confirm a box with less than half of the score, which would look wrong without a mark.
        """
        has_most = self.config.loss == "softmax" and prediction.score >= MAJORITY
        if prediction.box is None or not has_most or not prediction.candidate_scores:
            return prediction.score
        overlaps = pairwise_iou(np.array([prediction.chosen_candidate]), np.array(prediction.candidate_boxes))[0]
        confirming_scores = np.array(prediction.candidate_scores)[overlaps >= SAME_PLACE]
        return min(float(confirming_scores.sum()), 1.0)

    @override
    def ranked(self, prediction: ReferringPrediction) -> Ranked:
        """Return the predicted box as text, with its score."""
        if prediction.box is None:
            if prediction.null_score is None:
                return ()
            return ((NOTHING, prediction.null_score),)
        x1, y1, x2, y2 = (round(value, 1) for value in prediction.box)
        return ((f"x {x1} to {x2}, y {y1} to {y2}", prediction.score),)

    @override
    def answer_lines(self, prediction: ReferringPrediction) -> list[str]:
        """Return the predicted box, or that nothing fits, and its score as one line of text."""
        return super().answer_lines(prediction) or ["nothing: there are no candidate regions"]

    @override
    def draw(self, prediction: ReferringPrediction) -> np.ndarray:
        """Draw the true box in green, the predicted box and its mask in blue (wrong: red), phrases in other colours.

        The first phrase usually refers to the answer itself; it is left out if its box is the predicted one. Boxes of
        unsure phrases are dashed, see `phrase_boxes`, and so is the box of an unsure answer.
        """
        box = prediction.box
        phrases = prediction.grounded
        boxes: list[Box] = []
        labels: list[str] = []
        colours: list[Colour] = []
        dashed: list[bool] = []
        for target in prediction.targets or ():
            boxes.append(target)
            labels.append(f"meant: {prediction.category}" if prediction.category else "meant")
            colours.append(GREEN)
            dashed.append(False)
        if box is not None:
            chosen = f"chosen: {prediction.detected_class}" if prediction.detected_class else "chosen"
            unsure = ", unsure" if prediction.is_unsure else ""
            boxes.append(box)
            labels.append(f"{chosen} {prediction.score:.2f}{unsure}")
            colours.append(BLUE if prediction.correct else RED)
            dashed.append(prediction.is_unsure)
        first = 0
        both_have_boxes = box is not None and bool(phrases) and phrases[0].box is not None
        if both_have_boxes and np.allclose(phrases[0].box, box, atol=0.5):  # the boxes are rounded
            first = 1
        boxes_of_phrases, labels_of_phrases, unsure_phrases = phrase_boxes(prediction, first)
        boxes += boxes_of_phrases
        labels += labels_of_phrases
        colours += itertools.islice(itertools.cycle(OTHER_COLOURS), len(boxes_of_phrases))
        dashed += unsure_phrases
        image = load_predicted_image(prediction)
        if prediction.segmentation is not None:
            image = tint(image, prediction.segmentation.to_mask(), BLUE if prediction.correct else RED)
        return draw_boxes(image, boxes, labels, colours, dashed=dashed)

    @override
    def describe(self, prediction: ReferringPrediction) -> PredictionSummary:
        """Describe the expression, the predicted and the true box, and whether any candidate was right."""
        if prediction.box is not None:
            answer = box_text(prediction.box)
            score = prediction.score
        else:
            answer = "no box" if prediction.null_score is None else NOTHING
            score = prediction.null_score
        truth = ""
        note = ""
        if prediction.targets:
            truth = ", ".join(map(box_text, prediction.targets))
            reachable = referring_metrics([prediction], self.config.iou_convention)["ceiling"]
            note = f"{'a' if reachable else 'no'} right box was among {len(prediction.candidate_boxes)} candidates"
        elif prediction.targets is not None:
            truth = NOTHING
        mistakes = None
        meant = prediction.category
        chosen = prediction.detected_class
        if meant and chosen:
            mistakes = ((meant, f"another {chosen}" if chosen == meant else chosen),)
        return PredictionSummary(prediction.text, answer, score, truth, note, prediction.family or "", mistakes)
