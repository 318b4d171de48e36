"""VCR: losses of choices and regions, what is predicted, and what does not fit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from detector.structures import ImageBatch, Regions
from e2e_vl.structures import (
    Ability,
    Batch,
    EncoderOutput,
    ModelOutput,
    RegionLabels,
    TaskOutput,
    TextBatch,
    TextRegions,
    gather_regions,
)
from e2e_vl.tasks.config import VCRConfig
from e2e_vl.tasks.vcr import VCRTargets, VCRTask

H = 6
CLASSES = [torch.tensor([2, 0]), torch.tensor([1])]  # of the candidate boxes of two images


def make_regions(whole_image: bool = True) -> TextRegions:
    """Two questions about two images, of 2 and 1 candidate boxes."""
    counts = [len(rows) + whole_image for rows in CLASSES]
    regions = Regions(
        boxes=[torch.rand(count, 4) for count in counts],
        features=[torch.rand(count, 5) for count in counts],
        class_logits=[torch.zeros(count, 3) for count in counts],
    )
    image_index = torch.tensor([0] * 4 + [1] * 4)[:, None]
    return gather_regions(regions, torch.tensor([[10, 10], [10, 10]]), image_index, whole_image=whole_image)


def make_batch(labels: list[int] | None = None) -> Batch:
    ids = torch.zeros(8, 3, dtype=torch.int64)
    targets = VCRTargets(None if labels is None else F.one_hot(torch.tensor(labels), 4).flatten().float())
    shown = labels or [None, None]
    return Batch(
        images=ImageBatch(
            torch.zeros(2, 3, 10, 10), torch.tensor([[10, 10]] * 2), torch.tensor([[10, 10]] * 2), ["a", "b"]
        ),
        boxes=None,
        texts=TextBatch(ids, ids, torch.ones(8, 3, dtype=torch.bool)),
        image_index=torch.tensor([0] * 4 + [1] * 4)[:, None],
        targets=targets,
        region_labels=RegionLabels(classes=CLASSES),
        records=[{"text_index": row // 4, "annot_id": f"val-{row // 4}", "label": shown[row // 4]} for row in range(8)],
    )


def run(task: VCRTask, batch: Batch, whole_image: bool = True) -> tuple[TaskOutput, TextRegions, EncoderOutput]:
    torch.manual_seed(0)
    regions = make_regions(whole_image)
    states = torch.randn(8, regions.attention_mask.shape[1], H, requires_grad=True)
    encoded = EncoderOutput(torch.randn(8, 3, H), states, summary=torch.randn(8, H, requires_grad=True))
    return task(batch, regions, encoded), regions, encoded


def test_sigmoid_loss_is_a_mean_over_all_choices():
    task = VCRTask(H).eval()
    output, _, encoded = run(task, make_batch([2, 0]))
    assert output.logits.shape == (2, 4)
    torch.testing.assert_close(output.logits.flatten(), task.head.output(encoded.summary)[:, 0])
    truth = torch.tensor([[0, 0, 1, 0], [1, 0, 0, 0]]).float()
    expected = F.binary_cross_entropy_with_logits(output.logits, truth)
    torch.testing.assert_close(output.losses["choice"].mean, expected)
    assert output.losses["choice"].count == 8


def test_softmax_loss_is_a_mean_over_questions():
    output, _, _ = run(VCRTask(H, VCRConfig(loss="softmax")).eval(), make_batch([2, 0]))
    expected = F.cross_entropy(output.logits, torch.tensor([2, 0]))
    torch.testing.assert_close(output.losses["choice"].mean, expected)
    assert output.losses["choice"].count == 2


@pytest.mark.parametrize("whole_image", [True, False])
def test_every_region_of_every_choice_is_classified(whole_image):
    task = VCRTask(H, VCRConfig(num_classes=5)).eval()
    output, regions, encoded = run(task, make_batch([2, 0]), whole_image)
    first = [0] if whole_image else []  # the whole image is a class of its own, before those of objects
    classes = [torch.tensor(first + (rows + 1).tolist()) for rows in CLASSES]
    states = [encoded.regions[row, regions.attention_mask[row]] for row in range(8)]
    scores = task.region_classifier(torch.cat(states))
    expected = F.cross_entropy(scores, torch.cat([classes[row // 4] for row in range(8)]))
    torch.testing.assert_close(output.losses["region_class"].mean, expected)
    assert output.losses["region_class"].count == regions.attention_mask.sum() == 4 * sum(map(len, classes))


def test_weight_of_the_region_loss():
    task = VCRTask(H, VCRConfig(num_classes=5)).eval()
    double = VCRTask(H, VCRConfig(num_classes=5, region_loss_weight=2.0)).eval()
    double.load_state_dict(task.state_dict())
    losses = [run(one, make_batch([2, 0]))[0].losses["region_class"].mean for one in (task, double)]
    torch.testing.assert_close(losses[1], 2 * losses[0])
    without = VCRTask(H, VCRConfig(region_loss_weight=0.0))
    assert set(run(without, make_batch([2, 0]))[0].losses) == {"choice"}
    assert not any(name.startswith("region_classifier") for name, _ in without.named_parameters())


def test_no_loss_without_labels():
    assert run(VCRTask(H), make_batch())[0].losses == {}


def test_padding_gets_no_gradient():
    output, regions, encoded = run(VCRTask(H, VCRConfig(num_classes=5)), make_batch([2, 0]))
    output.losses["region_class"].mean.backward()
    assert not regions.attention_mask.all()
    assert not encoded.regions.grad[~regions.attention_mask].any()
    assert encoded.regions.grad[regions.attention_mask].any(dim=1).all()


def test_one_prediction_per_question():
    task = VCRTask(H).eval()
    batch = make_batch([2, 0])
    output, regions, encoded = run(task, batch)
    records = task.predict(batch, ModelOutput(output, None, regions, encoded, batch))
    assert [(record["text_index"], record["annot_id"]) for record in records] == [(0, "val-0"), (1, "val-1")]
    for record, logits in zip(records, output.logits, strict=True):
        assert record["probabilities"] == pytest.approx(logits.softmax(dim=0).tolist())
        assert record["choice"] == int(logits.argmax())
        assert task.correct(record) == float(record["choice"] == record["label"])


def test_metrics_count_the_questions_with_a_label():
    task = VCRTask(H)
    records = [
        {"choice": 1, "label": 1, "family": "colour"},
        {"choice": 1, "label": 0, "family": "colour"},
        {"choice": 3, "label": 3, "family": "pair"},
        {"choice": 3, "label": None},
    ]
    assert task.metrics(records) == {"accuracy": 2 / 3, "accuracy/colour": 0.5, "accuracy/pair": 1.0}
    assert task.metrics(records[3:]) == {}
    assert task.correct(records[3]) is None


def test_inputs_that_do_not_fit():
    task = VCRTask(H, VCRConfig(num_classes=3))
    with pytest.raises(ValueError, match=r"class 3, but task.config.num_classes is 3"):
        run(task, make_batch([2, 0]))
    regions = make_regions()
    encoded = EncoderOutput(torch.randn(8, 3, H), torch.randn(8, 3, H), summary=torch.randn(8, H))
    batch = make_batch()
    batch.texts = TextBatch(*(tensor[:6] for tensor in (batch.texts.input_ids,) * 2), batch.texts.attention_mask[:6])
    with pytest.raises(ValueError, match="fours, one per choice; this batch has 6"):
        task(batch, regions, encoded)


def test_what_does_not_fit_is_found_before_training():
    def task(**config) -> VCRTask:
        return VCRTask(H, VCRConfig(**{"mask_size": 7} | config))

    facts, detector = SimpleNamespace(class_names=["person", "chair"]), SimpleNamespace(map_size=7)
    task(num_classes=3).check_data(facts, detector)
    task(num_classes=2, region_loss_weight=0).check_data(facts, detector)
    task().check_data(SimpleNamespace(class_names=None), SimpleNamespace(map_size=None))  # neither may say anything
    task(mask_size=None).check_data(facts, SimpleNamespace(map_size=14))
    with pytest.raises(ValueError, match=r"task.config.num_classes is 2, but the data have 2 classes .*set it to 3"):
        task(num_classes=2).check_data(facts, detector)
    with pytest.raises(ValueError, match=r"mask_size is 7, but .* are 14 x 14; set task.config.mask_size=14"):
        task().check_data(facts, SimpleNamespace(map_size=14))


def test_what_the_encoder_must_be_able_to_do():
    assert VCRTask(H).needs == (Ability.SUMMARY_OF_PAIR, Ability.NAMED_REGIONS)
    assert VCRTask(H, VCRConfig(ground_words=False)).needs == (Ability.SUMMARY_OF_PAIR,)
    assert (VCRTask(H).mask_size, VCRTask(H, VCRConfig(mask_size=None)).mask_size) == (14, None)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("loss", "hinge"),
        ("region_loss_weight", -1.0),
        ("dropout", 1.5),
        ("region_dropout", -0.1),
        ("max_pieces", 1),
        ("mask_size", 0),
    ],
)
def test_wrong_settings(field, value):
    with pytest.raises(ValueError, match=rf"task\.config\.{field} is"):
        VCRConfig(**{field: value})
