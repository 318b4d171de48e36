"""Files of predictions: what is written is read back, and what does not fit is refused."""

from __future__ import annotations

import msgspec
import pytest

from e2e_vl.metrics.vqa import VQAPrediction
from e2e_vl.predictions import (
    GroundedPhrase,
    PhrasesOnly,
    Prediction,
    box_text,
    read_predictions,
    with_target,
    write_list,
)

PHRASE = GroundedPhrase("the cat", (0, 7), (1.0, 2.0, 3.0, 4.0), 0.75, True)


def test_predictions_are_read_back(tmp_path):
    record = {"text_index": 3, "text": "Is it?", "image_size": [4, 5], "uid": "a", "grounded": [PHRASE]}
    ours = [VQAPrediction.from_record(record, answer="yes", score=0.5), PhrasesOnly.from_record(record)]
    assert ours[0].metadata == {"uid": "a"} and ours[0].image_size == (4, 5) and ours[0].correct is None
    write_list(tmp_path / "new" / "p.json", ours)
    assert read_predictions(tmp_path / "new" / "p.json", VQAPrediction) == ours
    assert with_target(ours) == ours[:1]
    with pytest.raises(ValueError, match=r"p\.json"):
        read_predictions(tmp_path / "new" / "p.json", Prediction)


@pytest.mark.parametrize("change", [{"score": 2}, {"answer": 7}, {"type": "other"}])
def test_a_file_of_another_form_is_named(tmp_path, change):
    content = msgspec.to_builtins([VQAPrediction(answer="yes", score=0.5)] * 2)
    (tmp_path / "p.json").write_bytes(msgspec.json.encode([content[0], content[1] | change]))
    with pytest.raises(ValueError, match=r"p\.json.*\[1\]"):
        read_predictions(tmp_path / "p.json", VQAPrediction)


def test_a_value_that_cannot_be_names_the_text():
    with pytest.raises(ValueError, match=r"VQAPrediction of text 5 .*score"):
        VQAPrediction.from_record({"text_index": 5}, answer="yes", score=float("nan"))


def test_phrases_in_words():
    assert PHRASE.is_clear and PHRASE.label == "the cat 0.75" and PHRASE.line == "the cat: x 1 to 3, y 2 to 4 (0.75)"
    unsure = msgspec.structs.replace(PHRASE, score=0.25, box=None)
    assert unsure.label == "the cat 0.25, unsure" and unsure.line == "the cat: no region"
    assert box_text((0.4, 1.6, 2, 3)) == "x 0 to 2, y 2 to 3"
