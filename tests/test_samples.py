"""A user's question as a sample, as a data set makes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from e2e_vl.samples import AnnotatedObjects, Question, SampleText

BOXES = AnnotatedObjects(np.array([[1.0, 2, 30, 40]]), "boxes.json", names=("cat",))
TEXT = SampleText(0, "the cat", {})


def question(**fields) -> Question:
    return Question(Path("photo.jpg"), "the cat", **fields)


def test_a_question_is_a_sample_of_one_image_and_one_text():
    sample = question().sample(TEXT)
    assert sample.from_user and sample.texts == (TEXT,)
    [image] = sample.images
    assert (image.id, image.locate()) == ("photo.jpg", Path("photo.jpg"))
    assert image.boxes is image.objects is image.size is image.boxes_to_mask is None


def test_given_boxes_are_the_candidates_or_the_objects():
    [image] = question(boxes=BOXES).sample(TEXT).images
    assert image.boxes.boxes is BOXES.boxes and image.boxes.origin == "boxes.json"
    [image] = question(boxes=BOXES).sample(TEXT, objects=BOXES).images
    assert image.boxes is None and image.objects is BOXES and image.candidates is None
    assert len(BOXES) == 1


def test_only_the_given_boxes_are_masked():
    [image] = question(boxes_to_mask=BOXES).sample(TEXT, masks_regions=True).images
    assert image.boxes_to_mask is BOXES.boxes
    [image] = question().sample(TEXT, masks_regions=True).images
    assert image.boxes_to_mask.shape == (0, 4)


def test_what_a_task_does_not_take_is_refused():
    fields = {"choices": ["a"], "answer": "b", "boxes_to_mask": BOXES, "others": (Path("b.jpg"),)}
    for (name, value), part in zip(fields.items(), ("choices", "answer", "boxes to mask", "1 image"), strict=True):
        with pytest.raises(ValueError, match=part):
            question(**{name: value}).sample(TEXT)
