"""Pre-training answers a user: words at [MASK], classes of hidden regions."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from detector.structures import ImageBatch
from e2e_vl.structures import Batch, TextBatch
from tests.tasks.tiny_pretraining import BOXES, CLASSES, make_batch, make_model


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
