"""Settings of tasks and objectives that are refused; the message names the field."""

from __future__ import annotations

import pytest

from e2e_vl.parts import OBJECTIVES, TASKS, decode

WRONG = [
    *((name, "new_layers", "other") for name in ("refcoco", "vqa", "gqa", "vcr", "nlvr2", "flickr30k")),
    *((name, "loss", "hinge") for name in ("refcoco", "vqa", "gqa", "vcr", "nlvr2")),
    *((name, "dropout", value) for name in ("refcoco", "vqa", "vcr", "nlvr2") for value in (1.5, -0.1)),
    ("refcoco", "positive_iou", 1.5),
    ("refcoco", "iou_convention", "giou"),
    ("vqa", "min_answer_count", 0),
    ("vqa", "hidden_layer", None),
    ("gqa", "head_width", 0),
    ("vcr", "region_loss_weight", -1.0),
    ("vcr", "region_dropout", -0.1),
    ("vcr", "max_pieces", 1),
    ("vcr", "max_pieces", None),
    ("vcr", "mask_size", 0),
    ("vcr", "people_names", []),
    ("vcr", "people_names", "Casey"),
    ("vcr", "ground_words", "maybe"),
    ("vcr", "ground_at", "start"),
    ("flickr30k", "head_size", 0),
    ("detection", "shown_score", 1.5),
    ("detection", "positive_iou", 0.0),
    ("pretraining", "teacher", "other"),
    ("pretraining", "masked_pixels", "other"),
    ("pretraining", "background", "other"),
    ("pretraining", "region_probability", 1.5),
    ("pretraining", "max_length", 2),
    ("pretraining", "replace_probability", 0.5),
    ("masked_words", "weight", -0.5),
    ("masked_words", "probability", 15),
    ("masked_text", "min_words", 0),
    ("masked_text", "max_length", 2),
    ("relationship", "probability", 0),
    ("relationship", "probability", 1),
    ("object_labels", "regions", "some"),
    ("region_features", "loss", "l1"),
    ("image_qa", "label", "worst"),
]


@pytest.mark.parametrize(("name", "field", "value"), WRONG)
def test_a_wrong_value_is_named(name, field, value):
    part = (TASKS | OBJECTIVES)[name]
    with pytest.raises(ValueError, match=field):
        decode({field: value}, part.config_class, "task.config")


def test_messages_name_an_objective_as_settings_do():
    assert all(part.config_class.name == name for name, part in OBJECTIVES.items())
