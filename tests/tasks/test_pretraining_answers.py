"""Pre-training answers a user: words at [MASK], classes of hidden regions."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from detector.structures import ImageBatch
from e2e_vl.examples import Targets
from e2e_vl.model import VisionLanguageModel
from e2e_vl.samples import AnnotatedObjects, Question
from e2e_vl.structures import Batch, TextBatch
from e2e_vl.tasks.objectives.texts import MatchTargets
from e2e_vl.tasks.objectives.words import WordLabels
from e2e_vl.tasks.pretraining import PretrainingTargets
from tests.tasks.tiny_pretraining import BOXES, CLASSES, assert_same, make_batch, make_model

CORNER = [[6.0, 6.0, 40.0, 40.0]]


class Vocabulary:
    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [f"word{number}" for number in ids]


def question_batch(hidden: list[list[float]] | None = None, mask_at: int = 1) -> Batch:
    """One text with one [MASK] about the first image; boxes of it that a user hides."""
    batch = make_batch()
    images = batch.images
    labels, corpus = torch.full((2, 1, 7), -1)
    labels[0, mask_at] = 9
    parts = {
        "masked_words": WordLabels(labels),
        "masked_text": WordLabels(corpus),
        "masked_regions": Targets(),
        "relationship": MatchTargets(torch.tensor([1])),
    }
    return dataclasses.replace(
        batch,
        images=ImageBatch(images.pixels[:1], images.sizes[:1], images.original_sizes[:1] * 2, images.names[:1]),
        boxes=batch.boxes[:1],
        texts=TextBatch(
            *(rows[:1] for rows in (batch.texts.input_ids, batch.texts.token_type_ids, batch.texts.attention_mask))
        ),
        image_index=batch.image_index[:1],
        targets=PretrainingTargets(parts),
        seeds=batch.seeds[:1],
        boxes_to_mask=[torch.tensor(hidden or [], dtype=torch.float32).reshape(-1, 4)],
        records=[{"text_index": 0, "sent": "[MASK] b"}],
    )


def answer(model: VisionLanguageModel, batch: Batch) -> dict:
    with torch.no_grad():
        return model.task.replies(model(batch), Vocabulary())[0]


# Hidden regions


def test_every_hidden_box_is_named():
    hidden = [*CORNER, [60.0, 5.0, 90.0, 25.0]]
    record = answer(make_model(region_probability=1.0).eval(), question_batch(hidden))
    assert [region["box"] for region in record["hidden"]] == (2 * torch.tensor(hidden)).tolist()  # original pixels
    assert all(len(region["classes"]) == CLASSES and region["seen"] is not None for region in record["hidden"])
    shares = [share for _, share in record["hidden"][0]["classes"]]
    assert sum(shares) == pytest.approx(1) and shares == sorted(shares, reverse=True)
    assert {name for name, _ in record["hidden"][0]["classes"]} == {*"abcd", "background"}


def test_answers_are_those_of_the_colour_that_training_hides_with():
    black, mean = (make_model(masked_pixels=colour).eval() for colour in ("black", "mean"))
    answers = [answer(model, question_batch(CORNER))["hidden"][0] for model in (black, mean)]
    assert answers[0]["seen"] == [answers[1]["seen"][0], pytest.approx(answers[1]["seen"][1])]  # the teacher sees it
    one, other = (dict(region["classes"]) for region in answers)
    assert one != pytest.approx(other)


def test_names_of_hidden_regions_follow_the_order_of_the_classes():
    """The same model with its classes in another order says the same."""
    answers = []
    for place in ("last", "first"):
        model = make_model(background=place).eval()
        if place == "first":
            for name in ("weight", "bias"):
                rows = getattr(model.task.masked_regions.output, name)
                rows.data = rows.data.roll(1, dims=0)
        answers += answer(model, question_batch(CORNER))["hidden"]
    assert answers[0]["seen"][0] == answers[1]["seen"][0] in [*"abcd", "background"]
    assert answers[0]["seen"][1] == pytest.approx(answers[1]["seen"][1])
    assert [name for name, _ in answers[0]["classes"]] == [name for name, _ in answers[1]["classes"]]


def test_classes_of_a_file_have_numbers_and_nobody_sees_the_hidden_region():
    model = make_model(teacher="file").eval()
    with torch.no_grad():
        output = model(question_batch([[0.0, 0.0, 9.0, 9.0]]))
        [region] = model.task.replies(output, Vocabulary())[0]["hidden"]
        states = output.encoded.regions[output.text_regions.is_masked]
        shares = model.task.masked_regions.classify(states)[0].softmax(dim=0)
    assert region["seen"] is None
    names = ["background", "class 0", "class 1", "class 2", "class 3"]
    assert region["classes"] == [
        [names[row], pytest.approx(float(shares[row]))] for row in shares.argsort(descending=True)
    ]


@pytest.mark.parametrize("names", [None, ["a", "b"]])
def test_classes_without_names_have_numbers(names):
    model = make_model().eval()
    model.detector.class_names = names
    [region] = answer(model, question_batch(CORNER))["hidden"]
    assert {name for name, _ in region["classes"]} == {"background", *(f"class {number}" for number in range(4))}


def test_a_hidden_region_that_is_cut_off_is_an_error():
    model = make_model(max_length=5).eval()
    batch = question_batch([[10.0 * row, 5.0, 10.0 * row + 8, 30.0] for row in range(4)])
    batch.records[0]["sent"] = "b"
    with pytest.raises(ValueError, match="hidden region is cut off; shorten the text, or hide fewer regions"):
        answer(model, batch)


def test_an_objective_names_its_own_classes_and_overwrites_no_entry(monkeypatch):
    model = make_model(region_probability=1.0).eval()
    with torch.no_grad():
        output = model(question_batch(CORNER))
        regions = model.task.masked_regions
        said = regions.answer(output, output.task.parts["masked_regions"], Vocabulary(), model.task.region_masking)
    assert {name for name, _ in said["hidden"][0]["classes"]} == {*"abcd", "background"}
    monkeypatch.setattr(model.task.objectives["masked_text"], "answer", lambda *_: said)
    message = "objective masked_regions answers with 'hidden', which the record holds already; rename its entry"
    with pytest.raises(ValueError, match=message):
        model.task.replies(output, Vocabulary())


# Words


def test_nothing_to_hide_hides_nothing():
    model = make_model(region_probability=1.0).eval()
    batch = question_batch()
    with torch.no_grad():
        output = model(batch)
        record = model.task.replies(output, Vocabulary())[0]
    assert output.batch.boxes[0].tolist() == BOXES[0] and not output.batch.masked_regions.is_masked[0].any()
    plain = make_model(objectives={"masked_regions": 0.0}).eval()
    missing, unexpected = plain.load_state_dict(model.state_dict(), strict=False)
    of_regions = ("teacher.", "task.masked_regions.")
    assert not missing and unexpected and all(name.startswith(of_regions) for name in unexpected)
    with torch.no_grad():
        expected = plain(dataclasses.replace(batch, boxes_to_mask=None)).task.parts["masked_words"]
    assert_same(output.task.parts["masked_words"], expected)
    best = int(expected[0].argmax())
    assert record["filled"] == f"word{best} b" and record["hidden"] == []
    assert record["masks"][0][0] == [f"word{best}", pytest.approx(float(expected[0].softmax(dim=0)[best]))]
    assert "hidden" not in answer(plain, batch)


def test_a_mask_that_is_cut_off_is_an_error():
    model = make_model(max_length=5).eval()
    with pytest.raises(ValueError, match=r"longer than task.config.max_length, and a \[MASK\] is cut off; shorten"):
        answer(model, question_batch(mask_at=5))


def test_an_answer_in_words():
    record = answer(make_model().eval(), question_batch(CORNER))
    filled, mask, region = make_model().task.answer_lines(record)
    assert filled == record["filled"] and mask.startswith("[MASK] 1: word")
    name, share = record["hidden"][0]["classes"][0]
    seen, seen_share = record["hidden"][0]["seen"]
    assert region.startswith(f"hidden region 1: {name} {share:.3f}, ")
    assert region.endswith(f" (not hidden: {seen} {seen_share:.3f})")


# Questions


def ask(text: str = "a [MASK] dog", **more) -> Question:
    return Question(Path("photo.jpg"), text, **more)


def boxes(*rows: list[float]) -> AnnotatedObjects:
    return AnnotatedObjects(np.array(rows, dtype=np.float64).reshape(-1, 4), "--boxes")


def test_a_question_is_a_sample_with_the_given_boxes():
    task = make_model().task
    sample = task.question(ask(boxes=boxes([1, 2, 3, 4]), boxes_to_mask=boxes([5, 6, 7, 8])))
    [image], [text] = sample.images, sample.texts
    assert sample.from_user and image.file == Path("photo.jpg")
    assert image.boxes.boxes.tolist() == [[1, 2, 3, 4]] and image.boxes_to_mask.tolist() == [[5, 6, 7, 8]]
    assert text.metadata == {"sent": "a [MASK] dog"}
    assert task.question(ask()).images[0].boxes_to_mask.shape == (0, 4)  # none but the given ones: here none
    assert task.question(ask("a dog", boxes_to_mask=boxes([5, 6, 7, 8]))).images[0].boxes is None


@pytest.mark.parametrize(
    ("question", "message"),
    [
        (ask("a dog"), r"write \[MASK\] in the text, or hide boxes"),
        (ask("a dog", boxes_to_mask=boxes()), r"write \[MASK\] in the text"),
        (ask(choices=["yes"]), "takes neither choices nor an answer"),
        (ask(answer="yes"), "takes neither choices nor an answer"),
    ],
)
def test_questions_that_cannot_be_answered(question, message):
    with pytest.raises(ValueError, match=message):
        make_model().task.question(question)


def test_a_model_that_never_saw_hidden_regions_names_none():
    with pytest.raises(ValueError, match="without masked regions"):
        make_model(objectives={"masked_regions": 0.0}).task.question(ask(boxes_to_mask=boxes([0, 0, 9, 9])))
