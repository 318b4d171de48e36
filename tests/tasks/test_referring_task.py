"""Referring expressions: labels, losses, and which region may win."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch

from detector.structures import ImageBatch, Regions
from e2e_vl.structures import Batch, EncoderOutput, ModelOutput, TaskOutput, TextBatch, TextRegions, gather_regions
from e2e_vl.tasks.config import ReferringConfig
from e2e_vl.tasks.refcoco import ReferringTargets, ReferringTask

HIDDEN = 8
SIZES = torch.tensor([[60, 80], [100, 50]])  # resized (height, width) of the two images
ORIGINAL_SIZES = torch.tensor([[30, 40], [200, 25]])  # scales (x, y): (2, 2) and (2, 0.5)
WHOLE = ([0.0, 0.0, 79.0, 59.0], [0.0, 0.0, 49.0, 99.0])
BOXES = (
    [[10.0, 10.0, 30.0, 30.0], [40.0, 20.0, 60.0, 50.0]],
    [[5.0, 5.0, 25.0, 45.0], [20.0, 60.0, 40.0, 90.0], [0.0, 0.0, 10.0, 10.0]],
)


def make_batch(
    image_index=(0, 1, 1), whole_image: bool = True, boxes=BOXES, referred=(BOXES[0][1], BOXES[1][0], BOXES[1][1])
) -> tuple[Batch, Regions, TextRegions]:
    """Texts about two images; the regions of an image are the whole image (if wanted) and then its boxes."""
    rows = [torch.tensor([whole] * whole_image + own).reshape(-1, 4) for whole, own in zip(WHOLE, boxes, strict=True)]
    regions = Regions(rows, [torch.zeros(len(r), 3) for r in rows], [torch.zeros(len(r), 2) for r in rows])
    images = ImageBatch(torch.zeros(2, 3, 100, 80), SIZES, ORIGINAL_SIZES, ["first.jpg", "second.jpg"])
    count = len(image_index)
    texts = TextBatch(*(torch.ones(count, 2, dtype=kind) for kind in (torch.long, torch.long, torch.bool)))
    batch = Batch(
        images=images,
        boxes=None,
        texts=texts,
        image_index=torch.tensor(image_index)[:, None],
        targets=ReferringTargets(torch.tensor(referred[:count])),
        records=[{"sent_id": 10 + index} for index in range(count)],
    )
    return batch, regions, gather_regions(regions, SIZES, batch.image_index, whole_image=whole_image)


def encoded(regions: TextRegions, seed: int = 0) -> EncoderOutput:
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(*regions.attention_mask.shape, HIDDEN, generator=generator) * regions.attention_mask[..., None]
    return EncoderOutput(text=torch.zeros(len(states), 2, HIDDEN), regions=states.requires_grad_())


def make_task(**config) -> ReferringTask:
    torch.manual_seed(0)
    return ReferringTask(HIDDEN, ReferringConfig(**config)).eval()


def scored(task: ReferringTask, batch: Batch, regions: Regions, text_regions: TextRegions, scores: list) -> ModelOutput:
    """A model output in which the regions have the given scores; candidates as the task decides."""
    logits = torch.tensor(scores).masked_fill(~task.candidates(text_regions), -torch.inf)
    return ModelOutput(TaskOutput({}, logits), regions, text_regions, encoded(text_regions), batch)


def test_binary_loss_is_the_mean_over_all_real_regions():
    task = make_task()
    batch, _, regions = make_batch()
    states = encoded(regions)
    output = task(batch, regions, states)
    scores = task.head(states.regions).detach()
    expected = []
    positives = [{2}, {1}, {2}]
    for text, count in enumerate((3, 4, 4)):
        for row in range(count):
            probability = 1 / (1 + math.exp(-float(scores[text, row])))
            expected.append(-math.log(probability if row in positives[text] else 1 - probability))
    loss = output.losses["referring"]
    assert loss.count.item() == 11
    assert loss.mean.item() == pytest.approx(sum(expected) / 11, rel=1e-5)
    loss.mean.backward()
    gradient = states.regions.grad.abs().sum(dim=-1)
    assert (gradient[regions.attention_mask] > 0).all() and (gradient[~regions.attention_mask] == 0).all()


def test_batch_without_a_positive_region_is_all_negative():
    task = make_task()
    batch, _, regions = make_batch(referred=([70.0, 50.0, 78.0, 58.0],) * 3)
    states = encoded(regions)
    assert not task.positive_regions(regions, batch.targets.box).any()
    loss = task(batch, regions, states).losses["referring"]
    scores = task.head(states.regions)[regions.attention_mask]
    assert loss.mean.item() == pytest.approx(torch.nn.functional.softplus(scores).mean().item(), rel=1e-5)
    soft = make_task(loss="softmax")(batch, regions, states).losses["referring"]
    assert (soft.total.item(), soft.count.item(), soft.mean.item()) == (0, 0, 0)
    soft.mean.backward()
    assert states.regions.grad.abs().max() == 0


@pytest.mark.parametrize("loss", ["binary", "softmax"])
def test_no_region_at_all_gives_loss_zero(loss):
    task = make_task(loss=loss)
    batch, _, regions = make_batch(whole_image=False, boxes=([], []))
    states = encoded(regions)
    output = task(batch, regions, states)
    assert output.losses["referring"].mean.item() == 0
    output.losses["referring"].mean.backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in task.parameters())
    assert output.logits.tolist() == [[-math.inf]] * 3


def test_softmax_loss_is_minus_the_log_share_of_the_positive_regions():
    task = make_task(loss="softmax")
    batch, _, regions = make_batch(referred=(BOXES[0][1], BOXES[1][0], [300.0, 300.0, 310.0, 310.0]))
    states = encoded(regions)
    output = task(batch, regions, states)
    shares = output.logits.softmax(dim=1)
    loss = output.losses["referring"]
    assert loss.count.item() == 2  # the third text has no positive region
    assert loss.total.item() == pytest.approx(-(shares[0, 2].log() + shares[1, 1].log()).item(), rel=1e-5)
    loss.mean.backward()
    assert states.regions.grad.isfinite().all()
    assert states.regions.grad[2].abs().max() == 0


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
    batch, _, regions = make_batch((0,), whole_image=False, boxes=([box], [box]), referred=([0.0, 0.0, 9.0, 9.0],))
    assert make_task(**config).positive_regions(regions, batch.targets.box).tolist() == [[positive]]


def test_positive_weight_counts_positive_regions_more():
    batch, _, regions = make_batch()
    states = encoded(regions)
    once, thrice = (make_task(positive_weight=weight)(batch, regions, states).losses["referring"] for weight in (1, 3))
    scores = make_task().head(states.regions)
    positive = torch.nn.functional.softplus(-scores[[0, 1, 2], [2, 1, 2]]).sum()
    assert (thrice.total - once.total).item() == pytest.approx(2 * positive.item(), rel=1e-4)
    assert thrice.count.item() == once.count.item()


def test_highest_real_region_wins_and_padding_never():
    task = make_task()
    batch, regions, text_regions = make_batch()
    output = scored(task, batch, regions, text_regions, [[0, 1, 2, 9], [3, 1, 2, 0], [0, 1, 2, 3.0]])
    predictions = task.predict(batch, output)
    assert [prediction["box"] for prediction in predictions] == [
        [20, 10, 30, 25],  # [40, 20, 60, 50] / (2, 2)
        [0, 0, 24.5, 198],  # the whole image / (2, 0.5)
        [0, 0, 5, 20],
    ]
    assert [prediction["sent_id"] for prediction in predictions] == [10, 11, 12]
    assert predictions[0]["score"] == pytest.approx(1 / (1 + math.exp(-2)))
    assert [len(prediction["candidate_boxes"]) for prediction in predictions] == [3, 4, 4]
    assert predictions[1]["candidate_boxes"][2] == [10, 120, 20, 180]
    assert predictions[1]["image_size"] == [200, 25]
    assert json.loads(json.dumps(predictions)) == predictions
    assert "box" not in batch.records[0]


def test_a_batch_without_records_is_answered_too():
    batch, regions, text_regions = make_batch()
    output = scored(make_task(), batch, regions, text_regions, [[0, 1, 2, 9.0]] * 3)
    predictions = make_task().predict(dataclasses.replace(batch, records=[]), output)
    assert [row | {"sent_id": 10 + index} for index, row in enumerate(predictions)] == make_task().predict(
        batch, output
    )


def test_whole_image_cannot_win_if_told_so():
    task = make_task(whole_image_can_win=False)
    batch, regions, text_regions = make_batch()
    states = encoded(text_regions)
    assert task.candidates(text_regions).tolist() == [
        [False, True, True, False],
        [False, True, True, True],
        [False, True, True, True],
    ]
    assert task(batch, text_regions, states).losses["referring"].count.item() == 8
    predictions = task.predict(batch, scored(task, batch, regions, text_regions, [[9, 1, 2, 0.0]] * 3))
    assert predictions[0]["box"] == [20, 10, 30, 25]
    assert [len(prediction["candidate_boxes"]) for prediction in predictions] == [2, 3, 3]


def test_whole_image_is_the_answer_where_there_is_nothing_else():
    task = make_task(whole_image_can_win=False)
    batch, regions, text_regions = make_batch(boxes=([], BOXES[1]))
    predictions = task.predict(batch, scored(task, batch, regions, text_regions, [[9, 1, 2, 0.0]] * 3))
    assert predictions[0]["box"] == [0, 0, 39.5, 29.5]
    assert predictions[1]["box"] == [10, 120, 20, 180]


def test_the_whole_image_is_no_answer_where_no_region_is_a_miss():
    task = make_task(whole_image_can_win=False, no_region_is_miss=True)
    batch, regions, text_regions = make_batch(boxes=([], BOXES[1]))
    for loss in ("binary", "softmax"):
        states = encoded(text_regions)
        found = make_task(whole_image_can_win=False, no_region_is_miss=True, loss=loss)(batch, text_regions, states)
        assert torch.isfinite(found.losses["referring"].total)
    predictions = task.predict(batch, scored(task, batch, regions, text_regions, [[9, 1, 2, 0.0]] * 3))
    assert (predictions[0]["box"], predictions[0]["score"], predictions[0]["candidate_boxes"]) == (None, 0, [])
    assert task.answer_lines(predictions[0]) == ["nothing: there is no region to choose from"]
    assert predictions[1]["box"] == [10, 120, 20, 180]


def test_an_object_as_large_as_the_image_stays_a_candidate():
    task = make_task(whole_image_can_win=False)
    _, _, text_regions = make_batch(boxes=([WHOLE[0], BOXES[0][0]], BOXES[1]))
    assert task.candidates(text_regions)[0].tolist() == [False, True, True, False]


def test_text_without_any_region_is_an_error_that_names_the_image():
    task = make_task()
    batch, regions, text_regions = make_batch(whole_image=False, boxes=(BOXES[0], []))
    output = scored(task, batch, regions, text_regions, [[0.0, 1.0]] * 3)
    with pytest.raises(ValueError, match=r"no region to choose from in second\.jpg"):
        task.predict(batch, output)


def test_text_without_any_region_can_count_as_a_miss():
    task = make_task(no_region_is_miss=True)
    batch, regions, text_regions = make_batch(whole_image=False, boxes=(BOXES[0], []))
    predictions = task.predict(batch, scored(task, batch, regions, text_regions, [[0.0, 1.0]] * 3))
    assert predictions[0]["box"] == [20, 10, 30, 25]
    assert (predictions[1]["box"], predictions[1]["score"], predictions[1]["candidate_boxes"]) == (None, 0, [])


def test_metrics_score_the_predictions():
    task = make_task()
    batch, regions, text_regions = make_batch()
    predictions = task.predict(batch, scored(task, batch, regions, text_regions, [[0, 1, 2, 9.0]] * 3))
    truths = ([20, 10, 30, 25], [2.5, 10, 12.5, 90], [100, 100, 110, 110])
    records = [{**prediction, "gt_box": truth} for prediction, truth in zip(predictions, truths, strict=True)]
    metrics = task.metrics(records)
    assert metrics["accuracy"] == pytest.approx(1 / 3)  # the last text's region 3 is wrong, so is the second's
    assert metrics["ceiling"] == pytest.approx(2 / 3)
    assert [task.correct(record) for record in records] == [1, 0, 0]


def test_texts_about_two_images_use_each_image_scale():
    task = make_task()
    batch, regions, _ = make_batch()
    batch.image_index = torch.tensor([[0, 1], [1, 0], [1, -1]])
    text_regions = gather_regions(regions, SIZES, batch.image_index, whole_image=True)
    scores = [[0.0] * 7 for _ in range(3)]
    scores[0][4] = scores[1][6] = scores[2][1] = 1.0  # box 0 of image 1, box 1 of image 0, box 0 of image 1
    predictions = task.predict(batch, scored(task, batch, regions, text_regions, scores))
    assert predictions[0]["box"] == [2.5, 10, 12.5, 90]
    assert predictions[1]["box"] == [20, 10, 30, 25]
    assert predictions[2]["box"] == [2.5, 10, 12.5, 90]


def test_head_starts_as_in_the_official_code():
    task = make_task()
    assert all(value.abs().max() == 0 for name, value in task.named_parameters() if name.endswith("bias"))
    assert set(task.state_dict()) == {
        "head.transform.dense.weight",
        "head.transform.dense.bias",
        "head.output.weight",
        "head.output.bias",
    }


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"loss": "hinge"}, 'loss is "hinge"'),
        ({"positive_iou": 1.5}, "positive_iou is 1.5"),
        ({"iou_convention": "giou"}, 'convention is "giou"'),
    ],
)
def test_bad_config_is_one_clear_sentence(config, message):
    with pytest.raises(ValueError, match=message):
        ReferringConfig(**config)
