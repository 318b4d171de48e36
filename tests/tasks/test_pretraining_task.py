"""Pre-training: what is hidden stays hidden, nothing masked is no NaN, and the rules of labelling and cutting."""

from __future__ import annotations

import dataclasses
import types

import pytest
import torch
from torch import nn

from detector.config import DetectorConfig, InputConfig
from detector.faster_rcnn import FasterRCNN
from detector.images import make_image_batch
from detector.structures import ImageBatch, PrecomputedFeatures
from e2e_vl.encoders.vl_bert import VLBertConfig, VLBertModel
from e2e_vl.model import VisionLanguageModel
from e2e_vl.structures import Batch, TextBatch
from e2e_vl.tasks.pretraining import PretrainingConfig, PretrainingTask
from e2e_vl.tasks.pretraining_inputs import cut_to_length, with_black_pixels, without_hidden_features

SEP, CLASSES, VOCABULARY = 3, 5, 40
PAPER = {"region_word": "img", "hidden_region_embedding": False, "whole_image_in_sequence": False}
BOXES = [[[5, 5, 40, 40], [30, 30, 80, 60], [2, 50, 30, 62]], [[10, 0, 50, 30], [0, 0, 20, 20]]]


def make_model(norm: str = "FrozenBN", encoder: dict | None = None, **options) -> VisionLanguageModel:
    torch.manual_seed(0)
    detector = FasterRCNN(
        DetectorConfig.from_flat(
            {
                "MODEL.RESNETS.DEPTH": 18,
                "MODEL.RESNETS.STEM_OUT_CHANNELS": 4,
                "MODEL.RESNETS.WIDTH_PER_GROUP": 4,
                "MODEL.RESNETS.RES2_OUT_CHANNELS": 4,
                "MODEL.RESNETS.NORM": norm,
                "MODEL.BACKBONE.FREEZE_AT": 0,
                "MODEL.ROI_HEADS.NUM_CLASSES": CLASSES - 1,
                "MODEL.ROI_HEADS.SCORE_THRESH_TEST": 0.0,
            }
        )
    )
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "feature_dim": detector.feature_dim,
        "geometry_dim": 16,
        "visual_scale_text_init": 1.0,
        "visual_scale_object_init": 1.0,
        "text_only_embedding": True,
        "hidden_region_embedding": True,
        "with_pooler": True,
    }
    encoder = VLBertModel(VLBertConfig(**settings | (encoder or {})))
    task = PretrainingTask(16, PretrainingConfig(**{"vocab_size": VOCABULARY, "region_classes": CLASSES} | options))
    task.initialise(None, encoder, detector)
    return VisionLanguageModel(detector, encoder, task)


def make_batch(seed: int = 0, mlm: bool = True, boxes: bool = True) -> Batch:
    """Two captions about image 0, one about image 1, and one text of the corpus."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([7, 4, 5, 6])
    attend = torch.arange(7) < lengths[:, None]
    ids = torch.randint(4, VOCABULARY, (4, 7), generator=generator) * attend
    ids[torch.arange(4), lengths - 1] = SEP
    labels = torch.full((4, 7), -1)
    if mlm:
        labels[0, 1], labels[1, 2], labels[3, 0] = 9, 8, 7
    return Batch(
        images=ImageBatch(
            torch.randn(2, 3, 64, 96, generator=generator) * 50,
            torch.tensor([[64, 96], [60, 80]]),
            torch.tensor([[64, 96], [60, 80]]),
            ["first.jpg", "second.jpg"],
        ),
        boxes=[torch.tensor(rows, dtype=torch.float32) for rows in BOXES] if boxes else None,
        texts=TextBatch(ids, torch.zeros_like(ids), attend),
        looks_at=torch.tensor([[0], [0], [1], [-1]]),
        targets={
            "mlm_labels": labels,
            "is_match": torch.tensor([1, 0, 1, -1]),
            "region_seed": torch.tensor([11, 12, 13, 14]),
        },
        records=[{"text_index": index} for index in range(4)],
    )


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
    assert torch.equal(with_black_pixels(images, [torch.tensor([[5, 3, 12, 9]])], colours).pixels, expected.pixels)
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
        torch.ones(1, 2),
        torch.ones(1, 2),
        ["image"],
        PrecomputedFeatures([features], torch.zeros(1, 2)),
    )
    changed = without_hidden_features(images, [torch.tensor([False, False, True])])
    torch.testing.assert_close(changed.precomputed.image_features, torch.tensor([[2.0, 3.0]]), rtol=1e-4, atol=0)


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


def asked_batch(hidden: list[list[float]] | None, boxes: bool = True) -> Batch:
    """One text with one [MASK] about the first image."""
    batch = make_batch(boxes=boxes)
    first = batch.images
    images = ImageBatch(first.pixels[:1], first.sizes[:1], first.original_sizes[:1], first.names[:1])
    record = {"text_index": 0, "sent": "[MASK] b", "num_masks": 1, "class_names": ["a", "b", "c", "d"]}
    return dataclasses.replace(
        batch,
        images=images,
        boxes=batch.boxes[:1] if boxes else None,
        texts=TextBatch(*(rows[:1] for rows in (batch.texts.input_ids, batch.texts.segment_ids, batch.texts.attend))),
        looks_at=batch.looks_at[:1],
        targets={name: rows[:1] for name, rows in batch.targets.items()},
        pixel_masks=None if hidden is None else [torch.tensor(hidden, dtype=torch.float32)],
        records=[record],
    )


def test_asked_boxes_are_hidden_and_no_others():
    model = make_model(region_probability=1.0).eval()
    hidden = [[6.0, 6.0, 40.0, 40.0], [60.0, 5.0, 90.0, 25.0]]
    batch = model.task.prepare_asked(asked_batch(hidden), model.detector)
    assert batch.boxes[0].tolist() == [*hidden, *BOXES[0][1:]]  # the first candidate is the first hidden one
    assert batch.hidden_regions[0].tolist() == [True, True, False, False]
    assert batch.pixel_masks[0].tolist() == [[6, 6, 41, 41], [60, 5, 91, 26]]
    assert model.task.prepare(batch, model.detector) is batch
    with torch.no_grad():
        record = model.task.answer(batch, model(batch), Vocabulary())
    assert [region["box"] for region in record["hidden"]] == hidden
    assert all(len(region["classes"]) == CLASSES and region["seen"] is not None for region in record["hidden"])
    shares = [share for _, share in record["hidden"][0]["classes"]]
    assert sum(shares) == pytest.approx(1) and shares == sorted(shares, reverse=True)
    assert {name for name, _ in record["hidden"][0]["classes"]} == {*"abcd", "background"}


def test_asked_boxes_are_painted_black_where_training_paints_them_black():
    black, mean = (make_model(hidden_pixels=colour).eval() for colour in ("black", "mean"))
    batch = asked_batch([[6.0, 6.0, 40.0, 40.0]])
    before = batch.images.pixels.clone()
    prepared = black.task.prepare_asked(batch, black.detector)
    assert prepared.pixel_masks is None and torch.equal(batch.images.pixels, before)
    colour = -torch.tensor(black.detector.config.input.pixel_mean)[:, None, None]
    assert (prepared.images.pixels[0, :, 6:41, 6:41] == colour).all()
    assert torch.equal(prepared.images.pixels[0, :, 41:], before[0, :, 41:])
    with torch.no_grad():
        answers = [
            model.task.answer(one, model(one), Vocabulary())["hidden"][0]
            for model, one in ((black, prepared), (mean, mean.task.prepare_asked(batch, mean.detector)))
        ]
    assert answers[0]["seen"] == answers[1]["seen"]  # the teacher sees the box in both
    assert answers[0]["classes"] != answers[1]["classes"]


def test_names_of_hidden_regions_follow_the_order_of_the_classes():
    """The same model with its classes in another order says the same."""
    answers = []
    for place in ("last", "first"):
        model = make_model(background=place).eval()
        if place == "first":
            for name in ("weight", "bias"):
                rows = getattr(model.task.region_classifier.output, name)
                rows.data = rows.data.roll(1, dims=0)
        batch = model.task.prepare_asked(asked_batch([[6.0, 6.0, 40.0, 40.0]]), model.detector)
        with torch.no_grad():
            answers += model.task.answer(batch, model(batch), Vocabulary())["hidden"]
    assert answers[0]["seen"] == answers[1]["seen"] and answers[0]["seen"][0] in [*"abcd", "background"]
    assert [name for name, _ in answers[0]["classes"]] == [name for name, _ in answers[1]["classes"]]


class Vocabulary:
    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [f"word{number}" for number in ids]


def test_nothing_asked_to_hide_hides_nothing():
    model = make_model(region_probability=1.0, masked_regions=0.0).eval()
    batch = model.task.prepare_asked(asked_batch(None), model.detector)
    assert batch.boxes[0].tolist() == BOXES[0] and not batch.hidden_regions[0].any()
    with torch.no_grad():
        output = model(batch)
        plain = model(dataclasses.replace(asked_batch(None), pixel_masks=None))
        record = model.task.answer(batch, output, Vocabulary())
    assert torch.equal(output.task.logits, plain.task.logits)
    best = int(plain.task.logits[0].argmax())
    assert record["filled"] == f"word{best} b" and record["hidden"] == []
    with pytest.raises(ValueError, match="without masked regions"):
        model.task.prepare_asked(asked_batch([[0.0, 0.0, 9.0, 9.0]]), model.detector)


def test_classes_of_a_file_have_numbers_and_nobody_sees_the_hidden_region():
    model = make_model(teacher="file").eval()
    batch = model.task.prepare_asked(asked_batch([[0.0, 0.0, 9.0, 9.0]]), model.detector)
    with torch.no_grad():
        output = model(batch)
        [region] = model.task.answer(batch, output, Vocabulary())["hidden"]
        shares = model.task.region_classifier(output.encoded.regions[output.text_regions.is_hidden])[0].softmax(dim=0)
    assert region["seen"] is None
    names = ["background", "class 0", "class 1", "class 2", "class 3"]
    assert region["classes"] == [
        [names[row], pytest.approx(float(shares[row]))] for row in shares.argsort(descending=True)
    ]


def test_a_mask_that_is_cut_off_is_an_error():
    model = make_model(max_length=5).eval()
    batch = asked_batch(None)
    batch.targets["mlm_labels"][0] = -1
    batch.targets["mlm_labels"][0, 5] = 1
    batch = model.task.prepare_asked(batch, model.detector)
    with torch.no_grad(), pytest.raises(ValueError, match="shorten the text"):
        model.task.answer(batch, model(batch), Vocabulary())
