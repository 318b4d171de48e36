"""Referring expressions: labels, losses, predictions and pictures."""

from __future__ import annotations

import dataclasses
import math

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from detector.errors import UserError
from detector.structures import Regions
from e2e_vl.drawing import BLUE, GREEN, RED
from e2e_vl.metrics.refcoco import ReferringPrediction
from e2e_vl.predictions import GroundedPhrase
from e2e_vl.samples import ReferredBoxes, SampleText
from e2e_vl.structures import Batch, EncoderOutput, ModelOutput, TaskOutput, TextRegions, gather_regions
from e2e_vl.tasks.config import ReferringConfig
from e2e_vl.tasks.refcoco import OTHER_COLOURS, ReferringTargets, ReferringTask
from e2e_vl.text import TextTokenizer
from tests.tasks.batches import has_colour, make_batch
from tests.tasks.preprocessors import photo, preprocess, sample_of, tokens

HIDDEN = 8
SIZES = [[60, 80], [100, 50]]  # resized (height, width) of the two images
ORIGINAL_SIZES = [[30, 40], [200, 25]]  # scales (x, y): (2, 2) and (2, 0.5)
WHOLE = ([0.0, 0.0, 79.0, 59.0], [0.0, 0.0, 49.0, 99.0])
BOXES = (
    [[10.0, 10.0, 30.0, 30.0], [40.0, 20.0, 60.0, 50.0]],
    [[5.0, 5.0, 25.0, 45.0], [20.0, 60.0, 40.0, 90.0], [0.0, 0.0, 10.0, 10.0]],
)


def about(*boxes) -> ReferringTargets:
    """Targets of expressions about these boxes each."""
    return ReferringTargets.join([ReferringTargets(np.array(own, np.float32).reshape(-1, 4)) for own in boxes])


def expressions_about(
    image_index=(0, 1, 1), whole_image: bool = True, boxes=BOXES, referred=(BOXES[0][1], BOXES[1][0], BOXES[1][1])
) -> tuple[Batch, Regions, TextRegions]:
    """Texts about two images; the regions of an image are the whole image (if wanted) and then its boxes."""
    rows = [torch.tensor([whole] * whole_image + own).reshape(-1, 4) for whole, own in zip(WHOLE, boxes, strict=True)]
    regions = Regions(rows, [torch.zeros(len(r), 3) for r in rows], [torch.zeros(len(r), 2) for r in rows])
    batch = make_batch(
        [[index] for index in image_index],
        sizes=SIZES,
        original_sizes=ORIGINAL_SIZES,
        targets=ReferringTargets.join(
            [ReferringTargets(np.array([box], np.float32)) for box in referred[: len(image_index)]]
        ),
        records=[{"sent_id": 10 + index} for index in range(len(image_index))],
    )
    return batch, regions, gather_regions(regions, batch.images.sizes, batch.image_index, whole_image=whole_image)


def encoded(regions: TextRegions, seed: int = 0) -> EncoderOutput:
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(*regions.attention_mask.shape, HIDDEN, generator=generator) * regions.attention_mask[..., None]
    return EncoderOutput(text=torch.zeros(len(states), 2, HIDDEN), regions=states.requires_grad_())


def make_task(**config) -> ReferringTask:
    torch.manual_seed(0)
    return ReferringTask(HIDDEN, ReferringConfig(**config)).eval()


def predict(task: ReferringTask, scores: list, image_index=((0,), (1,), (1,)), **named) -> list[ReferringPrediction]:
    """Predictions for regions with the given scores; candidates as the task decides."""
    batch, regions, _ = expressions_about(**named)
    batch.image_index = torch.tensor(image_index)
    whole_image = named.get("whole_image", True)
    text_regions = gather_regions(regions, batch.images.sizes, batch.image_index, whole_image=whole_image)
    states = encoded(text_regions)
    logits = torch.tensor(scores).masked_fill(task(batch, text_regions, states).logits == -torch.inf, -torch.inf)
    return task.predict(ModelOutput(TaskOutput({}, logits), regions, text_regions, states, batch))


def test_binary_loss_is_the_mean_over_all_real_regions():
    task = make_task()
    batch, _, regions = expressions_about()
    states = encoded(regions)
    output = task(batch, regions, states)
    scores, is_real = task.head(states.regions), regions.attention_mask
    truth = torch.zeros_like(scores)
    truth[[0, 1, 2], [2, 1, 2]] = 1
    loss = output.losses["referring"]
    assert loss.count.item() == is_real.sum() == 11
    torch.testing.assert_close(loss.mean, F.binary_cross_entropy_with_logits(scores[is_real], truth[is_real]))
    loss.mean.backward()
    gradient = states.regions.grad.abs().sum(dim=-1)
    assert (gradient[regions.attention_mask] > 0).all() and (gradient[~regions.attention_mask] == 0).all()


@pytest.mark.parametrize("loss", ["binary", "softmax"])
def test_no_region_at_all_gives_loss_zero(loss):
    task = make_task(loss=loss)
    batch, _, regions = expressions_about(whole_image=False, boxes=([], []))
    states = encoded(regions)
    output = task(batch, regions, states)
    assert output.losses["referring"].mean.item() == 0
    output.losses["referring"].mean.backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in task.parameters())
    assert output.logits.tolist() == [[-math.inf]] * 3


def test_softmax_loss_is_minus_the_log_share_of_the_positive_regions():
    task = make_task(loss="softmax")
    batch, _, regions = expressions_about(referred=(BOXES[0][1], BOXES[1][0], [300.0, 300.0, 310.0, 310.0]))
    states = encoded(regions)
    output = task(batch, regions, states)
    shares = output.logits.softmax(dim=1)
    loss = output.losses["referring"]
    assert loss.count.item() == 2  # the third text has no positive region
    assert loss.total.item() == pytest.approx(-(shares[0, 2].log() + shares[1, 1].log()).item(), rel=1e-5)
    loss.mean.backward()
    assert states.regions.grad.isfinite().all()
    assert states.regions.grad[2].abs().max() == 0


@pytest.mark.parametrize("loss", ["binary", "softmax"])
def test_the_null_candidate_is_right_where_nothing_fits(loss):
    task = make_task(null_candidate=True, loss=loss)
    batch, regions, text_regions = expressions_about(image_index=(0, 1, 1))
    batch.targets = about([BOXES[0][1]], [], BOXES[1][:2])
    states = encoded(text_regions)
    states = dataclasses.replace(states, summary=torch.randn(3, HIDDEN))
    output = task(batch, text_regions, states)
    [found] = output.losses.values()
    found.total.backward()
    assert task.null_head.output.weight.grad.abs().max() > 0
    if loss == "softmax":
        null = -output.logits[1].log_softmax(0)[-1]
        several = -output.logits[2].log_softmax(0)[1:3].logsumexp(0)
        one = -output.logits[0].log_softmax(0)[2]
        torch.testing.assert_close(found.total, null + several + one)
    logits = torch.tensor([[0.0, 1, 2, -torch.inf, 3], [0, 1, 5, 2, 3], [0, 1, 5, 2, 6]])
    made = ModelOutput(TaskOutput({}, logits), regions, text_regions, states, batch)
    shares = logits.sigmoid() if loss == "binary" else logits.softmax(1)
    none, second, also_none = task.predict(made)
    assert none.box is None and also_none.box is None and second.box is not None
    scores = [one.score for one in (none, second, also_none)]
    assert scores == pytest.approx(shares[[0, 1, 2], [4, 2, 4]].tolist())
    assert len(none.candidate_scores) == len(none.candidate_boxes) == 3
    assert task.answer_lines(none) == [f"{none.score:.3f}  nothing fits"]


def test_the_last_region_wins_beside_the_null_candidate():
    task = make_task(null_candidate=True)
    batch, regions, text_regions = expressions_about(image_index=(0, 1, 1))
    states = dataclasses.replace(encoded(text_regions), summary=torch.randn(3, HIDDEN))
    logits = torch.tensor([[0.0, 1, 2, -torch.inf, 1], [0, 1, 2, 5, 3], [0, 1, 2, 3, 5]])
    _, last, none = task.predict(ModelOutput(TaskOutput({}, logits), regions, text_regions, states, batch))
    assert none.box is None
    assert last.box == last.candidate_boxes[-1] and last.score == pytest.approx(torch.tensor(5.0).sigmoid().item())


@pytest.mark.parametrize(
    ("box", "config", "positive"),
    [
        # IoU of [0, 0, 9, 9] with [0, 0, 4, 9]: 50 / 100 inclusive pixels, 36 / 81 continuous
        ([0.0, 0.0, 4.0, 9.0], {}, False),
        ([0.0, 0.0, 4.0, 9.0], {"positive_iou": 0.49}, True),
        ([0.0, 0.0, 4.0, 9.0], {"positive_iou": 0.49, "plus_one": False}, False),
        ([0.0, 0.0, 5.0, 9.0], {}, True),
        ([0.0, 0.0, 9.0, 9.0], {"plus_one": False}, True),
    ],
)
def test_positive_means_iou_above_the_threshold(box, config, positive):
    batch, _, regions = expressions_about(
        (0,), whole_image=False, boxes=([box], [box]), referred=([0.0, 0.0, 9.0, 9.0],)
    )
    assert make_task(**config).positive_regions(regions, batch.targets.boxes).tolist() == [[positive]]


def test_positive_weight_counts_positive_regions_more():
    batch, _, regions = expressions_about()
    states = encoded(regions)
    once, thrice = (make_task(positive_weight=weight)(batch, regions, states).losses["referring"] for weight in (1, 3))
    scores = make_task().head(states.regions)
    positive = F.softplus(-scores[[0, 1, 2], [2, 1, 2]]).sum()
    assert (thrice.total - once.total).item() == pytest.approx(2 * positive.item(), rel=1e-4)
    assert thrice.count.item() == once.count.item()


def test_highest_real_region_wins_and_padding_never():
    found = predict(make_task(), [[0, 1, 2, 9], [3, 1, 2, 0], [0, 1, 2, 3.0]])
    assert [prediction.box for prediction in found] == [
        (20, 10, 30, 25),  # [40, 20, 60, 50] / (2, 2)
        (0, 0, 24.5, 198),  # the whole image / (2, 0.5)
        (0, 0, 5, 20),
    ]
    assert [prediction.sent_id for prediction in found] == [10, 11, 12]
    assert found[0].score == pytest.approx(1 / (1 + math.exp(-2)))
    assert [len(prediction.candidate_boxes) for prediction in found] == [3, 4, 4]
    assert found[1].candidate_boxes[2] == (10, 120, 20, 180)


def test_whole_image_cannot_win_if_told_so():
    task = make_task(whole_image_can_win=False)
    batch, _, regions = expressions_about()
    output = task(batch, regions, encoded(regions))
    candidates = [[False, True, True, False], [False, True, True, True], [False, True, True, True]]
    assert (output.logits > -torch.inf).tolist() == candidates
    assert output.losses["referring"].count.item() == 8
    found = predict(task, [[9, 1, 2, 0.0]] * 3)
    assert found[0].box == (20, 10, 30, 25)
    assert [len(prediction.candidate_boxes) for prediction in found] == [2, 3, 3]


def test_an_image_without_regions_is_a_miss_or_the_whole_image_is_the_answer():
    task = make_task(whole_image_can_win=False, allow_no_regions=True)
    missed, other, _ = predict(task, [[9, 1, 2, 0.0]] * 3, boxes=([], BOXES[1]))
    assert (missed.box, missed.score, missed.candidate_boxes) == (None, 0, ())
    assert task.answer_lines(missed) == ["nothing: there are no candidate regions"]
    assert other.box == (10, 120, 20, 180)
    whole = predict(make_task(whole_image_can_win=False), [[9, 1, 2, 0.0]] * 3, boxes=([], BOXES[1]))
    assert whole[0].box == (0, 0, 39.5, 29.5)
    with pytest.raises(UserError, match=r"no candidate regions in b\.jpg"):
        predict(make_task(), [[0.0, 1.0]] * 3, whole_image=False, boxes=(BOXES[0], []))


def test_texts_about_two_images_use_each_image_scale():
    scores = [[0.0] * 7 for _ in range(3)]
    scores[0][4] = scores[1][6] = scores[2][1] = 1.0  # box 0 of image 1, box 1 of image 0, box 0 of image 1
    found = predict(make_task(), scores, image_index=[[0, 1], [1, 0], [1, -1]])
    assert [prediction.box for prediction in found] == [(2.5, 10, 12.5, 90), (20, 10, 30, 25), (2.5, 10, 12.5, 90)]


def prediction_of(file_name: str = "", **changes) -> ReferringPrediction:
    base = {"file_name": file_name, "text": "x", "score": 0.5, "correct": 1.0, "candidate_boxes": []}
    return ReferringPrediction.from_record({**base, "gt_box": [10, 10, 40, 40], "box": [50, 10, 80, 50], **changes})


@pytest.mark.parametrize(
    ("changes", "seen", "unseen"),
    [({}, (GREEN, BLUE), (RED,)), ({"correct": 0.0}, (GREEN, RED), (BLUE,)), ({"box": None}, (GREEN,), (BLUE, RED))],
)
def test_truth_is_green_right_is_blue_and_wrong_is_red(grey, changes, seen, unseen):
    picture = ReferringTask(8).draw(prediction_of(grey, **changes))
    assert all(has_colour(picture, colour).sum() > 100 for colour in seen)
    assert not any(has_colour(picture, colour).any() for colour in unseen)


def test_a_picture_of_a_photo_that_was_annotated_without_its_exif_rotation(tmp_path):
    stored = Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 100, 3), dtype=np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6
    stored.save(tmp_path / "a.png")
    stored.save(tmp_path / "rotated.png", exif=exif)
    names = ("a.png", "rotated.png")
    pictures = [ReferringTask(8).draw(prediction_of(str(tmp_path / name), image_size=[60, 100])) for name in names]
    assert np.array_equal(*pictures)


def test_candidates_at_one_place_confirm_a_box_with_most_of_the_score(grey):
    box, near, far = [50, 10, 80, 50], [50, 10, 80, 48], [10, 10, 40, 40]
    candidates = {"candidate_boxes": [box, near, far]}
    cases = [
        ("softmax", 0.6, [0.6, 0.3, 0.1], 0.9),
        ("softmax", 0.4, [0.4, 0.4, 0.2], 0.4),
        ("binary", 0.6, [0.6, 0.5, 0.4], 0.6),
    ]
    for loss, score, scores, certainty in cases:
        prediction = prediction_of(score=score, candidate_scores=scores, **candidates)
        assert make_task(loss=loss).certainty(prediction) == pytest.approx(certainty)
    nothing = prediction_of(box=None, score=0.7, null_score=0.7, candidate_scores=[0.1, 0.1, 0.1], **candidates)
    assert make_task(loss="softmax", null_candidate=True).certainty(nothing) == 0.7
    sure, unsure = (prediction_of(grey, is_unsure=is_unsure) for is_unsure in (False, True))
    assert make_task().answer_boxes(unsure)[0][0] == "0.50, unsure"
    dashed, solid = (has_colour(make_task().draw(one), BLUE).sum() for one in (unsure, sure))
    assert dashed != solid


def test_phrases_have_other_colours_and_the_first_is_left_out_where_it_names_the_answer(grey):
    own = GroundedPhrase("a cat", (0, 5), (50.004, 10, 80, 50), 0.9, True)
    other, unsure = (
        GroundedPhrase("a dog", (0, 5), (5, 60, 30, 90), 0.9, False),
        msgspec.structs.replace(own, score=0.1),
    )
    for phrases in ([own, other], [other, unsure]):
        picture = ReferringTask(8).draw(prediction_of(grey, grounded=phrases))
        assert has_colour(picture, OTHER_COLOURS[0]).any() and not has_colour(picture, OTHER_COLOURS[1]).any()


def test_an_expression_is_described_with_both_boxes_and_whether_there_was_a_right_one():
    task, chosen = ReferringTask(8), [50, 10, 80, 50]
    summary = task.describe(prediction_of(candidate_boxes=[chosen, [10, 10, 40, 40.2]]))
    assert (summary.answer, summary.truth) == ("x 50 to 80, y 10 to 50", "x 10 to 40, y 10 to 40")
    assert summary.note == "a right box was among 2 candidates"
    assert "no right box" in task.describe(prediction_of(candidate_boxes=[chosen])).note
    assert task.describe(prediction_of(box=None)).score is None
    assert [task.correctness(prediction_of(box=box)) for box in (chosen, [10, 10, 40, 38])] == [0, 1]
    assert task.correctness(prediction_of(gt_box=None)) is None
    for name, mistake in (("dog", "dog"), ("cat", "another cat")):
        summary = task.describe(prediction_of(category="cat", detected_class=name))
        assert summary.mistakes == (("cat", mistake),)


@pytest.mark.parametrize("flipped", [False, True])
def test_an_expression_and_its_box_in_resized_pixels(tokenizer, flipped):
    sample = sample_of(SampleText(3, "Red square on the left", {"ref_id": 8}, ReferredBoxes(((-4, 20, 30, 40),), (9,))))
    image = photo(scale=2, flipped=flipped, box_ids=(100, 101))
    [text] = preprocess(ReferringTask(8).preprocessor(TextTokenizer(tokenizer)), sample, image)
    side = "right" if flipped else "left"
    assert tokens(text, tokenizer) == ["[CLS]", "red", "square", "on", "the", side, "[SEP]"]
    x1, x2 = (200 - 1 - 60, 200 - 1) if flipped else (0, 60)  # clamped to the pixels, as in the official VL-BERT code
    np.testing.assert_array_equal(text.targets.boxes, [[x1, 40, x2, 80]])
    assert (text.record["flipped"], text.record["candidate_ann_ids"]) == (flipped, [100, 101])
    assert (text.record["text_index"], text.record["ann_id"], text.record["image_size"]) == (3, 9, [60, 100])
