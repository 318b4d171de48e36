"""Box refinement: which regions learn to move, where they move, and what tasks and phrases predict from them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn
from torchvision.ops import generalized_box_iou_loss, roi_align

from detector.boxes import encode_deltas
from detector.structures import Regions
from e2e_vl.structures import (
    Batch,
    EncoderOutput,
    IntermediateStates,
    ModelOutput,
    TaskOutput,
    TextRegions,
    gather_regions,
)
from e2e_vl.synthetic.base import move_box
from e2e_vl.targets import Ragged
from e2e_vl.tasks.box_refinement import DELTA_WEIGHTS, REFINEMENT, BoxRefinementHead, find_named_boxes
from e2e_vl.tasks.flickr30k import Flickr30KTargets, Flickr30KTask
from e2e_vl.tasks.phrase_head import PhraseHead, add_grounded_phrases, grounding_metrics
from e2e_vl.tasks.refcoco import ReferringTargets, ReferringTask
from tests.tasks.batches import make_batch
from tests.tasks.test_phrase_head import make_phrases

HIDDEN, WIDTH, LENGTH = 32, 3, 5
WHOLE = [0.0, 0, 59, 79]
TARGET = [10.0, 10, 30, 40]
NEAR, FAR = [12.0, 12, 34, 40], [40.0, 10, 50, 40]  # IoU 0.73 and 0 with the target
SIZE = {"sizes": [[80, 60]], "original_sizes": [[160, 120]]}  # (height, width): originals are twice as large


class FixedDeltas(nn.Module):
    """Gives the same deltas for any states."""

    def __init__(self, deltas: torch.Tensor) -> None:
        super().__init__()
        self.deltas = nn.Parameter(deltas)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.deltas


def run(
    head: BoxRefinementHead | None, batch: Batch, boxes=(WHOLE, NEAR, FAR), task: TaskOutput | None = None
) -> ModelOutput:
    """The output for regions of one image, the first of which is the whole image."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.tensor(boxes)
    regions = Regions([rows], [torch.randn(len(rows), WIDTH, generator=generator)], [torch.zeros(len(rows), 2)])
    gathered = gather_regions(regions, batch.images.sizes, batch.image_index, whole_image=True)
    states = torch.randn(len(batch), len(rows), HIDDEN, generator=generator, requires_grad=True)
    encoded = EncoderOutput(torch.zeros(len(batch), LENGTH, HIDDEN), states)
    refinement = None if head is None else head(batch, gathered, encoded)
    task = task or TaskOutput({}, torch.zeros(1))
    return ModelOutput(task, regions, gathered, encoded, batch, refinement=refinement)


def referring_batch(*named: list[list[float]], **fields) -> Batch:
    """Texts about one image, each with the boxes that it names."""
    targets = [ReferringTargets(np.array(boxes, np.float32).reshape(-1, 4)) for boxes in named]
    return make_batch([[0]] * len(named), **SIZE, length=LENGTH, targets=ReferringTargets.join(targets), **fields)


def make_head(loss: str = "smooth_l1", **options) -> BoxRefinementHead:
    torch.manual_seed(0)
    return BoxRefinementHead(HIDDEN, WIDTH, loss, **options)


def perfect_head(loss: str = "smooth_l1") -> BoxRefinementHead:
    """A head whose deltas move all regions onto the target."""
    head = make_head(loss)
    regions = torch.tensor([[WHOLE, NEAR, FAR]])
    head.deltas = FixedDeltas(encode_deltas(regions, torch.tensor(TARGET).expand_as(regions), DELTA_WEIGHTS))
    return head


@pytest.mark.parametrize("loss", ["smooth_l1", "giou", "ciou"])
def test_the_deltas_of_a_target_move_regions_onto_it_and_cost_nothing(loss):
    output = run(perfect_head(loss), referring_batch([TARGET]))
    torch.testing.assert_close(output.refinement.boxes, torch.tensor([[WHOLE, TARGET, TARGET]]))  # whole images stay
    assert output.refined_regions.boxes is output.refinement.boxes
    assert output.losses[REFINEMENT].count == 1
    assert output.losses[REFINEMENT].total.item() == pytest.approx(0, abs=1e-5)


def test_boxes_begin_almost_unmoved_and_end_at_the_borders_of_their_image():
    output = run(make_head(), referring_batch([TARGET]))
    torch.testing.assert_close(output.refinement.boxes, output.text_regions.boxes, atol=0.1, rtol=0)
    head = make_head()
    head.deltas = FixedDeltas(torch.tensor([[[9.0] * 4, [-30.0, -30, 0, 0], [30.0, 30, 5, 5]]]))
    moved = run(head, referring_batch([TARGET])).refinement.boxes[0]
    assert moved[0].tolist() == WHOLE
    assert (moved >= 0).all() and (moved[:, 2] <= 60).all() and (moved[:, 3] <= 80).all()
    assert run(None, referring_batch([TARGET])).refined_regions.boxes.equal(output.text_regions.boxes)


@pytest.mark.parametrize("loss", ["smooth_l1", "giou"])
def test_regions_that_fit_learn_to_move_onto_the_named_box_that_they_overlap_most(loss):
    """Text 0 names two boxes that overlap, text 1 one that no region fits, text 2 none."""
    other = [14.0, 14, 34, 40]  # IoU 0.84 with the near region
    output = run(make_head(loss), referring_batch([TARGET, other], [[0, 60, 10, 80]], []))
    head = make_head(loss)
    states = torch.cat([output.encoded.regions, head.feature_norm(output.text_regions.features)], dim=-1)
    deltas = head.deltas(states)[0, 1]
    if loss == "smooth_l1":
        expected = (deltas - encode_deltas(torch.tensor(NEAR), torch.tensor(other), DELTA_WEIGHTS)).abs().sum()
    else:
        expected = generalized_box_iou_loss(output.refinement.boxes[0, 1], torch.tensor(other))
    assert output.losses[REFINEMENT].count == 1
    torch.testing.assert_close(output.losses[REFINEMENT].total, expected)
    output.losses[REFINEMENT].mean.backward()
    moving = output.encoded.regions.grad.any(dim=-1)
    assert moving.tolist() == [[False, True, False], [False] * 3, [False] * 3]


def test_the_least_iou_is_a_setting_and_without_fitting_regions_the_loss_is_zero():
    for min_iou, count in ((0.7, 1), (0.75, 0)):
        loss = run(make_head(min_iou=min_iou), referring_batch([TARGET])).losses[REFINEMENT]
        assert loss.count == count
        assert bool(loss.total > 0) == bool(count)
    for named in ([], [TARGET]):
        output = run(make_head(), referring_batch(named), boxes=[WHOLE])
        output.losses[REFINEMENT].mean.backward()
        assert output.losses[REFINEMENT].count == 0
        assert torch.isfinite(output.encoded.regions.grad).all()


def test_boxes_of_phrases_are_named_too():
    phrases = make_phrases(boxes=((TARGET, (0, 0, 10, 10)), ()))
    batch = referring_batch([TARGET], [FAR], phrases=phrases)
    named, of_phrases = find_named_boxes(batch)
    assert [len(rows) for rows in named.split()] == [1, 1]
    assert [len(rows) for rows in of_phrases.split()] == [2, 0]
    assert run(make_head(), batch).losses[REFINEMENT].count == 3  # the target of text 0 counts twice
    spans = Ragged(torch.tensor([[1, 2], [2, 3], [1, 2]]), torch.tensor([2, 1]))
    boxes = Ragged(torch.tensor([TARGET, NEAR, FAR]), torch.tensor([2, 0, 1]))
    assert Flickr30KTargets(spans, boxes).named_boxes().counts.tolist() == [2, 1]
    unknown = dataclasses.replace(batch, targets=None, phrases=None)
    assert find_named_boxes(unknown) == []
    assert run(make_head(), unknown).losses == {}


def test_an_expression_is_answered_with_the_refined_box_and_its_proposal():
    task = ReferringTask(HIDDEN)
    logits = TaskOutput({}, torch.tensor([[-torch.inf, 2.0, 0.0]]))
    record = {"gt_box": [20, 20, 60, 80], "image_size": [160, 120]}
    [prediction] = task.predict(run(perfect_head(), referring_batch([TARGET], records=[record]), task=logits))
    assert prediction.box == pytest.approx((20, 20, 60, 80), abs=1e-3)
    assert prediction.proposal == prediction.candidate_boxes[0] == prediction.chosen_candidate == (24, 24, 68, 80)
    assert prediction.refined_boxes[0] == prediction.box and len(prediction.refined_boxes) == 2
    assert task.correctness(prediction) == 1
    metrics = task.metrics([prediction])
    assert metrics["accuracy"] == metrics["accuracy_75"] == metrics["accuracy_90"] == metrics["proposal_accuracy"] == 1
    assert metrics["proposal_accuracy_75"] == metrics["ceiling_75"] == 0
    assert metrics["mean_iou"] == pytest.approx(1, abs=1e-4)
    assert metrics["proposal_mean_iou"] == metrics["ceiling_mean_iou"] == pytest.approx(504 / 712)
    [plain] = task.predict(run(None, referring_batch([TARGET], records=[record]), task=logits))
    assert plain.box == (24, 24, 68, 80) and plain.proposal is None and plain.refined_boxes == ()
    assert "mean_iou" not in task.metrics([plain])


def test_phrases_are_grounded_in_refined_boxes():
    phrases = make_phrases(spans=(((1, 3), (3, 4)),), boxes=((TARGET,), ()), complete=(True,))
    batch = referring_batch([TARGET], phrases=phrases, records=[{"text": "the star here"}])
    output = run(perfect_head(), batch)
    states = IntermediateStates(torch.zeros(1, LENGTH, HIDDEN), output.encoded.regions)
    torch.manual_seed(0)
    phrase_head = PhraseHead(HIDDEN, 4, 2)
    output.phrases = phrase_head.eval()(batch, output.text_regions, {2: states})
    output.phrases.log_attention = torch.tensor([[-torch.inf, -0.1, -3.0]] * 2)
    [record] = add_grounded_phrases(output).batch.records
    known, unknown = record["grounded"]
    assert known.box == (20, 20, 60, 80) and known.proposal == (24, 24, 68, 80) and known.correct
    assert known.overlaps.refined == pytest.approx(1, abs=1e-4)
    assert known.overlaps.proposal == known.overlaps.best_proposal == pytest.approx(504 / 712)
    assert unknown.box == (20, 20, 60, 80) and unknown.correct is None and unknown.overlaps is None
    prediction = ReferringTask(HIDDEN).prediction_class.from_record(record, box=None, score=0, candidate_boxes=())
    metrics = grounding_metrics([prediction])
    assert metrics["phrase_accuracy_90"] == 1 and metrics["phrase_ceiling_90"] == 0


def test_the_phrases_of_a_sentence_are_answered_with_refined_boxes():
    task = Flickr30KTask(HIDDEN)
    spans = Ragged(torch.tensor([[1, 2]]), torch.tensor([1]))
    targets = Flickr30KTargets(spans, Ragged(torch.tensor([TARGET]), torch.tensor([1])))
    record = {"phrases": ["it"], "gt_boxes": [[[20, 20, 60, 80]]], "phrase_types": [["other"]], "phrase_ids": ["1"]}
    batch = make_batch([[0]], **SIZE, length=LENGTH, targets=targets, records=[record])
    logits = TaskOutput({}, torch.tensor([[-torch.inf, -0.1, -3.0]]))
    [prediction] = task.predict(run(perfect_head(), batch, task=logits))
    assert prediction.boxes[0] == pytest.approx((20, 20, 60, 80), abs=1e-3)
    assert prediction.proposals == ((24, 24, 68, 80),) and prediction.ranks == (0,)
    assert prediction.overlaps[0].proposal == pytest.approx(504 / 712)
    assert task.metrics([prediction])["accuracy_90"] == 1
    [plain] = task.predict(run(None, batch, task=logits))
    assert plain.boxes == ((24, 24, 68, 80),) and plain.proposals is None and plain.overlaps is None


def draw_batch(rng: np.random.Generator, number: int = 64) -> tuple[Batch, TextRegions]:
    """White boxes on black images, with a proposal of IoU 0.5 to 0.7 each; its feature is what it sees, in 7 x 7 cells.

    Outside of the proposal, it sees a third of its size on each side.
    """
    side = 64
    pixels = torch.zeros(number, 1, side, side)
    targets = []
    proposals = []
    for image in range(number):
        x, y, width, height = rng.integers([12, 12, 16, 16], [28, 28, 24, 24])
        pixels[image, 0, y : y + height, x : x + width] = 1
        targets.append(np.array([x, y, x + width, y + height], np.float32))
        proposals.append(move_box(targets[-1], (side, side), (0.5, 0.7), rng).astype(np.float32))
    rows = [torch.from_numpy(box)[None] for box in proposals]
    grow = torch.tensor([-1 / 3, -1 / 3, 1 / 3, 1 / 3])
    seen = [box + grow * (box[:, 2:] - box[:, :2]).repeat(1, 2) for box in rows]
    features = roi_align(pixels, seen, 7, aligned=True).flatten(1)
    batch = make_batch(
        [[image] for image in range(number)],
        sizes=[[side, side]] * number,
        targets=ReferringTargets.join([ReferringTargets(box[None]) for box in targets]),
        records=[{"gt_box": box.tolist(), "image_size": [side, side]} for box in targets],
    )
    regions = Regions(rows, list(features[:, None]), [torch.zeros(1, 2)] * number)
    return batch, gather_regions(regions, batch.images.sizes, batch.image_index)


@pytest.mark.parametrize(("loss", "weight"), [("smooth_l1", 0.3), ("giou", 3.0)])
def test_poor_proposals_become_good_boxes(loss, weight):
    """Choosing alone reaches an accuracy of 0 at an IoU of 0.75."""
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    task = ReferringTask(HIDDEN)
    head = BoxRefinementHead(HIDDEN, 49, loss)
    optimizer = torch.optim.Adam(head.parameters(), lr=1e-2)

    def answer(batch: Batch, text_regions: TextRegions) -> ModelOutput:
        encoded = EncoderOutput(torch.zeros(len(batch), 3, HIDDEN), torch.ones(len(batch), 1, HIDDEN))
        refinement = head(batch, text_regions, encoded)
        output = task(batch, text_regions, encoded)
        return ModelOutput(output, Regions([], [], []), text_regions, encoded, batch, refinement=refinement)

    batches = [draw_batch(rng) for _ in range(16)]
    for step in range(300):
        optimizer.zero_grad()
        (weight * answer(*batches[step % 16]).losses[REFINEMENT].mean).backward()
        optimizer.step()
    with torch.no_grad():
        metrics = task.metrics(task.predict(answer(*draw_batch(rng, 200))))
    assert metrics["ceiling_75"] == metrics["proposal_accuracy_75"] == 0
    assert metrics["proposal_accuracy"] == 1
    assert metrics["accuracy_75"] > 0.85, metrics
