"""Pictures of answers: the answer's box, and what the phrases name."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from e2e_vl.api.results import Answer
from e2e_vl.drawing import PALETTE
from e2e_vl.predictions import GroundedPhrase, Prediction
from e2e_vl.samples import ImageBytes

SIZE = (600, 800)  # height and width: the picture is as large, below its title
BOX = [20.0, 100.0, 120.0, 200.0]
LANDMARK = [300.0, 200.0, 500.0, 400.0]


def phrase(score: float, box: list[float] | None = None, text: str = "it") -> GroundedPhrase:
    return GroundedPhrase(text, (0, len(text)), box, score)


def answer(*phrases: GroundedPhrase, answer_boxes: list[tuple[str, list[float]]] | None = None, **changes) -> Answer:
    stream = io.BytesIO()
    Image.new("RGB", SIZE[::-1], (128, 128, 128)).save(stream, "PNG")
    values = {
        "text": "the circle next to the star",
        "answer": "",
        "score": 0.9,
        "box": None,
        "top": [],
        "lines": [],
        "boxes": np.zeros((0, 4), np.float32),
        "box_images": np.zeros(0, np.int64),
        "box_names": [],
        "attention": None,
        "unknown_words": (),
        "prediction": Prediction(grounded=phrases),
        "images": (ImageBytes(stream.getvalue(), "grey.png"),),
        "answer_boxes": [("circle 0.90", BOX)] if answer_boxes is None else answer_boxes,
    }
    return Answer(**values | changes)


def coloured(drawn: Answer, colour: int) -> np.ndarray:
    """Which pixels of the image in the picture, without its title, have a colour of `PALETTE`."""
    pixels = np.array(drawn.draw())[-SIZE[0] :]
    return (pixels == PALETTE[colour]).all(axis=2)


def outline(box: list[float]) -> int:
    """Pixels of a closed line, 3 pixels wide, inside a box."""
    return round(2 * 3 * (box[2] - box[0] + box[3] - box[1]) - 4 * 3 * 3)


def test_the_answer_and_the_landmark_have_their_colours():
    own, other = phrase(0.95, BOX, "the circle"), phrase(0.8, LANDMARK, "the star")
    drawn = answer(own, other)
    assert drawn.shown_phrases() == [other], "the first one names the box of the answer"
    assert not any(coloured(drawn, colour).any() for colour in range(2, len(PALETTE)))
    for colour, box in ((0, BOX), (1, LANDMARK)):
        x1, y1, x2, y2 = map(int, box)
        found = coloured(drawn, colour)
        assert found[y1 : y2 + 1, x1 : x2 + 1].sum() == pytest.approx(outline(box), rel=0.02)
        assert found[y1 - 40 : y1, x1:].sum() > 500, "the label above"
    assert not coloured(answer(own), 1).any()


def test_an_unsure_landmark_is_dashed():
    own, sure, unsure = phrase(0.3, BOX), phrase(0.5, LANDMARK, "the star"), phrase(0.49, LANDMARK, "the star")
    inside = np.s_[200:401, 300:501]
    counts = [coloured(answer(own, other), 1)[inside].sum() for other in (sure, unsure)]
    assert counts[0] == pytest.approx(outline(LANDMARK), rel=0.02)
    assert 0.4 < counts[1] / counts[0] < 0.65
    assert (sure.label, unsure.label) == ("the star 0.50", "the star 0.49, unsure")
    assert coloured(answer(own, unsure), 0)[100:201, 20:121].sum() == pytest.approx(outline(BOX), rel=0.02)


def test_of_unsure_landmarks_only_the_best_is_shown():
    near, far = [30.0, 30.0, 60.0, 60.0], [400.0, 20.0, 500.0, 90.0]
    first, low, high = phrase(0.45, far), phrase(0.2, LANDMARK), phrase(0.4, near)
    assert answer(first, low, high).shown_phrases() == [high]
    assert answer(first, low, high, phrase(0.6, far)).shown_phrases() == [phrase(0.6, far)], "one is clear"
    assert answer(first, phrase(0.9, BOX), high).shown_phrases() == [], "a clear one names the answer's box"
    assert answer(phrase(0.7, far), low).shown_phrases() == [phrase(0.7, far), low]
    assert answer(first).shown_phrases() == answer().shown_phrases() == []
    assert answer(first, phrase(0.0), phrase(0.3, BOX)).shown_phrases() == [], "nowhere, or where the answer is"
    assert answer(first, low, answer_boxes=[]).shown_phrases() == [low], "also where the answer is in words"
