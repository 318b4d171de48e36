"""Pre-training: what is hidden stays hidden, nothing masked is no NaN, and the rules of labelling and cutting."""

from __future__ import annotations

import dataclasses
import types

import pytest
import torch
from torch import nn

from detector.config import InputConfig
from detector.images import make_image_batch
from detector.structures import ImageBatch, PrecomputedFeatures
from e2e_vl.encoders.vl_bert import VLBertConfig
from e2e_vl.tasks.pretraining import PretrainingConfig, PretrainingTask
from e2e_vl.tasks.pretraining_inputs import (
    cut_to_length,
    describe_classes,
    with_black_pixels,
    without_hidden_features,
)
from tests.tasks.tiny_pretraining import BOXES, CLASSES, PAPER, SEP, make_batch, make_model


@pytest.mark.parametrize(
    ("teacher", "colour", "encoder"), [("frozen", "mean", {}), ("current", "mean", {}), ("frozen", "black", PAPER)]
)
def test_hidden_pixels_change_no_logit(teacher, colour, encoder):
    """The model that could peek is caught: other pixels in the hidden boxes give other labels, but the same logits."""
    objectives = {"region_probability": 0.6, "hide_probability": 1.0, "relationship": 1.0}
    model = make_model(teacher=teacher, hidden_pixels=colour, encoder=encoder, **objectives).eval()
    batch = make_batch()
    prepared = model.task.prepare(batch, model.detector)
    hidden = [rows[mask] for rows, mask in zip(prepared.boxes, prepared.hidden_regions, strict=True)]
    assert sum(len(rows) for rows in hidden) in range(1, 5)
    other = make_batch()
    for pixels, rows in zip(other.images.pixels, hidden, strict=True):
        for x1, y1, x2, y2 in rows.int().tolist():
            pixels[:, y1 : y2 + 1, x1 : x2 + 1] += 100 * torch.randn(3, y2 + 1 - y1, x2 + 1 - x1)
    with torch.no_grad():
        first, second = model(batch), model(other)
        scores = [model.task.region_classifier(output.encoded.regions) for output in (first, second)]
    assert torch.equal(first.task.logits, second.task.logits)
    assert torch.equal(*scores)
    assert torch.equal(first.encoded.pooled, second.encoded.pooled)
    assert not torch.equal(first.losses["masked_regions"].total, second.losses["masked_regions"].total)  # the labels

    shown = dataclasses.replace(other, images=dataclasses.replace(other.images, pixels=other.images.pixels.clone()))
    shown.images.pixels[:, :, 10, 60] += 100  # outside of the hidden boxes
    with torch.no_grad():
        assert not torch.equal(model(shown).task.logits, first.task.logits)


def test_hidden_pixels_are_those_of_a_black_image():
    """Zeros before the mean is subtracted, in the last row and column of the box too."""
    photo, mean, std = torch.randint(1, 255, (12, 16, 3)).byte().numpy(), (10.0, 20.0, 30.0), (1.0, 2.0, 4.0)
    painted = photo.copy()
    painted[3:9, 5:12] = 0
    images, expected = (make_image_batch([one], [(12, 16)], ["a"], mean, std) for one in (photo, painted))
    colours = types.SimpleNamespace(config=types.SimpleNamespace(input=InputConfig(pixel_mean=mean, pixel_std=std)))
    before = images.pixels.clone()
    assert torch.equal(with_black_pixels(images, [torch.tensor([[5.0, 3, 12, 9]])], colours).pixels, expected.pixels)
    assert torch.equal(images.pixels, before)


def test_the_teacher_sees_what_is_painted_black():
    every = {"region_probability": 1.0, "hide_probability": 1.0, "teacher": "current"}
    mean, black = (make_model(hidden_pixels=colour, **every).eval() for colour in ("mean", "black"))
    batch = make_batch()
    before = batch.images.pixels.clone()
    prepared = black.task.prepare(batch, black.detector)
    assert prepared.pixel_masks is None and torch.equal(batch.images.pixels, before)
    colour = -torch.tensor(black.detector.config.input.pixel_mean)
    assert torch.equal(prepared.images.pixels[0, :, 40, 40], colour)  # the last corner of the first box
    assert torch.equal(prepared.images.pixels[0, :, 0, 95], before[0, :, 0, 95])
    for one, other in zip(
        prepared.region_targets["class_probs"],
        mean.task.prepare(make_batch(), mean.detector).region_targets["class_probs"],
        strict=True,
    ):
        assert torch.equal(one, other)
    with torch.no_grad():
        assert not torch.equal(*(model(make_batch()).task.logits for model in (mean, black)))


@pytest.mark.parametrize("boxes", [True, False])
def test_background_comes_first_if_asked_for(boxes):
    """Then class k of the detector is column k + 1, as in files of bottom-up attention."""
    last, first = (make_model(background=place, region_probability=1.0).eval() for place in ("last", "first"))
    ours = last.task.prepare(make_batch(boxes=boxes), last.detector)
    theirs = first.task.prepare(make_batch(boxes=boxes), first.detector)
    assert sum(map(len, theirs.boxes)) > 0
    logits = first.detector(theirs.images, theirs.boxes).class_logits
    for one, other, scores in zip(
        ours.region_targets["class_probs"], theirs.region_targets["class_probs"], logits, strict=True
    ):
        assert torch.equal(one[:, -1], other[:, 0]) and torch.equal(one[:, :-1], other[:, 1:])
        assert not torch.equal(one, other)
        torch.testing.assert_close(other[:, 0], scores.softmax(dim=1)[:, CLASSES - 1])


def test_a_whole_image_that_is_no_region_takes_no_place_of_the_length():
    limits = []
    for in_sequence in (True, False):
        model = make_model(encoder={"whole_image_in_sequence": in_sequence}, max_length=5).eval()
        limits.append(model.task.prepare(make_batch(), model.detector).region_limit.tolist())
        with torch.no_grad():
            output = model(make_batch())
        assert (output.text_regions.row.ge(0) == output.text_regions.attend).all() == (not in_sequence)
    assert limits == [[2, 2, 2, 0], [3, 3, 2, 0]]


def test_visible_region_is_predicted_but_not_hidden():
    model = make_model(region_probability=1.0, hide_probability=0.0).eval()
    batch = model.task.prepare(make_batch(), model.detector)
    assert all(rows.all() for rows in batch.region_targets["is_labelled"])
    assert not any(rows.any() for rows in batch.hidden_regions)
    assert all(len(rows) == 0 for rows in batch.pixel_masks)
    output = model(make_batch())
    assert output.losses["masked_regions"].count == 3 + 3 + 2


def test_nothing_masked_is_loss_zero_with_gradients():
    model = make_model(region_probability=0.0, relationship=1.0).train()
    batch = make_batch(mlm=False)
    output = model(batch)
    losses = {name: loss.mean for name, loss in output.losses.items()}
    assert {name for name, loss in losses.items() if loss == 0} == {"masked_words", "masked_text", "masked_regions"}
    sum(losses.values()).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_losses_are_means_over_labelled_items():
    model = make_model(teacher="file", masked_words=0.5, relationship=2.0).eval()
    batch = make_batch()
    probabilities = [torch.rand(len(rows), CLASSES).softmax(dim=1) for rows in BOXES]
    probabilities[0][0] *= 0.5  # does not add up to 1: ignored
    batch.region_targets = {
        "class_probs": probabilities,
        "is_labelled": [torch.tensor([True, True, False]), torch.tensor([False, True])],
    }
    batch.hidden_regions = [torch.zeros(len(rows), dtype=torch.bool) for rows in BOXES]
    output = model(batch)
    counts = {name: float(loss.count) for name, loss in output.losses.items()}
    assert counts == {"masked_words": 2, "masked_text": 1, "masked_regions": 3, "relationship": 3}

    words = model.task.mlm(output.encoded.text, output.encoded.word_table).log_softmax(dim=2)
    expected = -0.5 * (words[0, 1, 9] + words[1, 2, 8]) / 2
    torch.testing.assert_close(output.losses["masked_words"].mean, expected)
    torch.testing.assert_close(output.losses["masked_text"].mean, -words[3, 0, 7])
    regions = model.task.region_classifier(output.encoded.regions).log_softmax(dim=2)
    rows = [(0, 2, probabilities[0][1]), (1, 2, probabilities[0][1]), (2, 2, probabilities[1][1])]
    expected = -sum((regions[text, row] * truth).sum() for text, row, truth in rows) / 3
    torch.testing.assert_close(output.losses["masked_regions"].mean, expected)


def test_region_labels_are_the_teachers_view_of_the_whole_image():
    model = make_model(norm="BN", teacher="current", region_probability=1.0).train()
    batch = make_batch()
    before = {name: buffer.clone() for name, buffer in model.detector.named_buffers()}
    prepared = model.task.prepare(batch, model.detector)
    assert model.detector.training
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.detector.named_buffers())
    model.detector.eval()
    regions = model.detector(batch.images, batch.boxes)
    for ours, logits in zip(prepared.region_targets["class_probs"], regions.class_logits, strict=True):
        torch.testing.assert_close(ours, logits.softmax(dim=1))
    assert batch.hidden_regions is None and not batch.region_targets  # the caller's batch is untouched


def test_own_boxes_come_from_the_teacher():
    model = make_model(max_own_regions=4, region_probability=0.5).train()
    batch = model.task.prepare(make_batch(boxes=False), model.detector)
    assert [len(rows) for rows in batch.boxes] == [len(rows) for rows in batch.region_targets["class_probs"]]
    assert 0 < len(batch.boxes[0]) <= 4
    losses = model(make_batch(boxes=False)).task.losses
    sum(loss.mean for loss in losses.values()).backward()
    assert model.detector.backbone.res2[0].conv1.weight.grad.abs().sum() > 0
    assert all(parameter.grad is None for parameter in model.task.teacher.parameters())


def test_frozen_teacher_stays_as_it_was():
    model = make_model(norm="BN").train()
    assert not any(module.training for module in model.task.teacher.modules())
    nn.init.zeros_(model.detector.backbone.stem.conv1.weight)
    assert model.task.teacher.backbone.stem.conv1.weight.abs().sum() > 0


def test_choice_depends_on_the_seed_of_the_first_text():
    model = make_model(region_probability=0.5).eval()
    batches = [make_batch(), make_batch(), make_batch()]
    batches[2].targets["region_seed"] = torch.tensor([5, 12, 6, 14])
    chosen = [model.task.prepare(batch, model.detector).region_targets["is_labelled"] for batch in batches]
    assert all(torch.equal(*pair) for pair in zip(chosen[0], chosen[1], strict=True))
    assert not all(torch.equal(*pair) for pair in zip(chosen[0], chosen[2], strict=True))


def test_cutting_keeps_the_last_wordpiece_and_the_first_regions():
    batch = make_batch()
    batch.targets["mlm_labels"][0, 5] = 30
    cut = cut_to_length(batch, batch.boxes, 6, whole_image=True)
    assert cut.texts.attend.sum(dim=1).tolist() == [3, 3, 3, 6]  # the corpus text stays
    assert cut.texts.input_ids[0, :3].tolist() == [*batch.texts.input_ids[0, :2].tolist(), SEP]
    assert cut.targets["mlm_labels"][0].tolist() == [-1, 9, -1, -1, -1, -1]
    assert cut.targets["mlm_labels"][3].tolist() == batch.targets["mlm_labels"][3, :6].tolist()
    assert cut.region_limit.tolist() == [2, 2, 2, 0]


def test_whole_image_feature_leaves_out_hidden_regions():
    features = torch.tensor([[1.0, 2.0], [3.0, 4.0], [100.0, 100.0]])
    images = ImageBatch(
        torch.zeros(1, 3, 0, 0),
        torch.ones(1, 2, dtype=torch.int64),
        torch.ones(1, 2, dtype=torch.int64),
        ["image"],
        PrecomputedFeatures([features], torch.zeros(1, 2)),
    )
    changed = without_hidden_features(images, [torch.tensor([False, False, True])])
    torch.testing.assert_close(changed.precomputed.image_features, torch.tensor([[2.0, 3.0]]), rtol=1e-4, atol=0)


def test_own_boxes_are_labelled_in_the_order_of_the_file():
    """A file's distributions belong to its boxes; those of the detector replace them in evaluation with own boxes."""
    model = make_model(teacher="file", region_probability=1.0).eval()
    batch = make_batch(boxes=False)
    batch.region_targets["class_probs"] = [torch.ones(1, CLASSES) / CLASSES] * 2
    prepared = model.task.prepare(batch, model.detector)
    _, expected = describe_classes(model.detector, batch.images, prepared.boxes, None, background_first=True)
    for rows, wanted in zip(prepared.region_targets["class_probs"], expected, strict=True):
        torch.testing.assert_close(rows, wanted)
        assert not torch.allclose(rows, wanted.roll(-1, dims=1))


def test_precomputed_features_cannot_hide_pixels():
    """Otherwise hidden regions would keep their features: the model could peek."""
    model = make_model(teacher="file")
    batch = make_batch()
    features = [torch.zeros(len(rows), model.detector.feature_dim) for rows in BOXES]
    batch.images = dataclasses.replace(batch.images, precomputed=PrecomputedFeatures(features))
    with pytest.raises(ValueError, match=r"hide_pixels to false and encoder\.config\.hidden_region_feature to true"):
        model.task.prepare(batch, model.detector)


def test_predictions_count_captions_only():
    model = make_model(region_probability=1.0, relationship=1.0).eval()
    batch = make_batch()
    with torch.no_grad():
        records = model.task.predict(batch, model(batch))
    assert [record["text_index"] for record in records] == [0, 1, 2]
    assert [record["words"] for record in records] == [1, 1, 0]
    assert [record["regions"] for record in records] == [3, 3, 2]
    scores = model.task.metrics(records)
    assert set(scores) == {"masked_words", "masked_regions", "relationship"}
    assert scores["masked_regions"] == pytest.approx(sum(record["regions_right"] for record in records) / 8)
    assert model.task.correct(records[2]) == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"region_classes": 7}, "region_classes is 7, but the detector has 4 classes"),
        ({"hide_pixels": False}, "hidden_region_feature: true"),
        ({"masked_words": -1}, "must not be negative"),
        ({"teacher": "none"}, "choose one of frozen, current, file"),
        ({"hidden_pixels": "grey"}, 'hidden_pixels is "grey"; choose one of mean, black'),
        ({"background": "middle"}, 'background is "middle"; choose one of last, first'),
        ({"encoder": {"hidden_region_embedding": False}}, "hidden_region_embedding: true, or region_word: img"),
        ({"region_probability": 1.5}, "must be from 0 to 1"),
        ({"max_length": 2}, "need 3"),
    ],
)
def test_settings_that_cannot_work(options, message):
    with pytest.raises(ValueError, match=message):
        make_model(**options)


def test_file_labels_must_be_there():
    model = make_model(teacher="file")
    with pytest.raises(ValueError, match="without class distributions"):
        model(make_batch())
    encoder = types.SimpleNamespace(whole_image_is_region=True, config=VLBertConfig(with_pooler=False))
    task = PretrainingTask(8, PretrainingConfig(vocab_size=5, relationship=1.0))
    with pytest.raises(ValueError, match="with_pooler"):
        task.initialise(None, encoder, model.detector)


def test_objectives_need_their_data():
    def check(corpus: object = "corpus", other_captions: float = 0.5, **options) -> None:
        task = PretrainingTask(8, PretrainingConfig(vocab_size=5, **options))
        config = types.SimpleNamespace(relationship=other_captions)
        task.check_data(types.SimpleNamespace(corpus=corpus, config=config), None)

    check(relationship=1.0)
    check(corpus=None, other_captions=0.0, masked_text=0.0)
    PretrainingTask(8, PretrainingConfig(vocab_size=5, relationship=1.0)).check_data(object(), None)  # says nothing
    with pytest.raises(ValueError, match=r"masked_text is 1.0, but the data have no text-only corpus; .*masked_text=0"):
        check(corpus=None)
    with pytest.raises(ValueError, match=r"relationship is 1.0, but .*data.config.relationship is 0; set it to 0.5"):
        check(other_captions=0.0, relationship=1.0)
