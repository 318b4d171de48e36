"""VCR's reader on a small hand-made data set in the official formats."""

from __future__ import annotations

import json

import numpy as np
import pytest

from e2e_vl.config import DataSettings
from e2e_vl.data.examples import Request
from e2e_vl.data.files import read_options
from e2e_vl.data.vcr import VCRDataset
from e2e_vl.data.vcr_options import VCROptions
from e2e_vl.data.vcr_text import CLASS_NAMES, NEUTRAL_NAMES
from tests.data.tiny_vcr import BOXES, TinyVCR


@pytest.fixture
def tiny(tmp_path) -> TinyVCR:
    return TinyVCR(tmp_path)


def words(dataset: VCRDataset, text) -> list[str]:
    return dataset.tokenizer.convert_ids_to_tokens(text.input_ids.tolist())


def spoken(dataset: VCRDataset, text) -> str:
    return " ".join(words(dataset, text))


def test_four_texts_of_a_question(tiny):
    dataset = tiny.dataset()
    example = dataset[Request(0, (0,))]
    assert len(example.images) == 1
    assert len(example.texts) == 4
    first = example.texts[0]
    assert spoken(dataset, first) == "[CLS] why is riley and chair there ? [SEP] no casey . [SEP]"
    assert first.segment_ids.tolist() == [0] * 9 + [1] * 4
    assert first.region_of_token.tolist() == [-1, -1, -1, 1, -1, 2, -1, -1, -1, -1, 0, -1, -1]
    assert words(dataset, example.texts[2])[9:] == ["riley", "'", "s", "chair", ".", "[SEP]"]
    assert example.texts[2].region_of_token[9:].tolist() == [1, -1, -1, -1, -1, -1]
    assert [float(text.targets["is_right"]) for text in example.texts] == [0, 0, 1, 0]
    assert {text.looks_at for text in example.texts} == {(0,)}
    for text in tiny.dataset(ground_words=False)[Request(0, (0,))].texts:
        assert set(text.region_of_token.tolist()) == {-1}


def test_question_and_right_answer_stand_before_a_rationale(tiny):
    dataset = tiny.dataset(question="rationale")
    example = dataset[Request(0, (0,))]
    said = spoken(dataset, example.texts[1])
    assert said == "[CLS] why is riley and chair there ? riley ' s chair . [SEP] jessie is . [SEP]"
    assert example.texts[1].segment_ids.tolist() == [0] * 14 + [1] * 4
    assert [float(text.targets["is_right"]) for text in example.texts] == [0, 1, 0, 0]
    assert (example.texts[0].record["label"], example.texts[0].record["conditioned_on"]) == (1, 2)


def test_rationales_given_each_answer(tiny):
    for line in tiny.lines:  # as in the test split
        del line["answer_label"], line["rationale_label"]
    dataset = tiny.dataset(question="rationale", condition_on="each")
    assert len(dataset) == 12
    assert dataset.groups == [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7]]
    example = dataset[Request(0, (1, 8))]
    assert len(example.texts) == 8
    records = [text.record for text in example.texts]
    assert [record["text_index"] for record in records] == [1] * 4 + [8] * 4
    assert {(record["annot_id"], record["conditioned_on"]) for record in records} == {("val-0", 1), ("val-2", 0)}
    assert spoken(dataset, example.texts[0]).startswith("[CLS] why is riley and chair there ? yes . [SEP]")
    assert all(text.targets == {} for text in example.texts)
    with pytest.raises(ValueError, match=r"val.jsonl: the questions have no labels.*condition_on=each"):
        tiny.dataset(question="rationale")


def test_only_rationales_given_the_right_answer_have_a_label(tiny):
    dataset = tiny.dataset(question="rationale", condition_on="each")
    example = dataset[Request(0, (0, 1, 2, 3))]
    assert [text.record["label"] for text in example.texts[::4]] == [None, None, 1, None]


def test_image_boxes_classes_and_masks(tiny):
    [image] = tiny.dataset()[Request(1, (1,))].images
    assert image.pixels.shape == (60, 100, 3)
    assert image.name.endswith("b.png")
    np.testing.assert_array_equal(image.boxes, np.array(BOXES, dtype=np.float32)[:, :4])
    assert image.region_targets["object_class"].tolist() == [1, 1, CLASS_NAMES.index("chair") + 1, 1]
    assert image.roi_masks.shape == (4, 14, 14)
    assert image.objects is None
    assert tiny.dataset(mask_size=None)[Request(1, (1,))].images[0].roi_masks is None


def test_objects_without_an_outline_are_counted_and_said(tiny, caplog):
    tiny.metadata["segms"][2:] = [[], [[[53, 11], [57, 19]]]]  # nothing, and a line
    dataset = tiny.dataset()
    for text in (0, 2, 1, 0):  # questions 0 and 2 are about the same image
        masks = dataset[Request(0, (text,))].images[0].roi_masks
        assert masks.any(axis=(1, 2)).tolist() == [True, True, False, False]
    assert dataset.without_outline == {(f"film/{name}.png", row) for name in "ab" for row in (2, 3)}
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 3
    assert "a.json: object 2 (chair) has no outline" in caplog.records[0].getMessage()
    assert [record.args[-1] for record in caplog.records] == [1, 2, 4]
    caplog.clear()
    tiny.dataset(mask_size=None)[Request(0, (0,))]
    assert not caplog.records


def test_a_flip_mirrors_boxes_and_masks_but_no_words(tiny):
    tiny.metadata["segms"][0] = [[[0, 0], [10, 0], [10, 59], [0, 59]]]  # the left half
    plain = tiny.dataset()[Request(0, (0,))]
    mirrored = tiny.dataset(flip_probability=1.0)[Request(0, (0,))]
    x1, _, x2, _ = plain.images[0].boxes[0]
    assert mirrored.images[0].boxes[0].tolist() == [99 - x2, 0, 99 - x1, 59]
    np.testing.assert_array_equal(mirrored.images[0].roi_masks, plain.images[0].roi_masks[:, :, ::-1])
    assert plain.images[0].roi_masks[0, :, :3].all() and not plain.images[0].roi_masks[0, :, 10:].any()
    for one, other in zip(plain.texts, mirrored.texts, strict=True):
        np.testing.assert_array_equal(one.input_ids, other.input_ids)


def test_objects_in_the_order_of_first_mention(tiny):
    dataset = tiny.dataset(objects="mentioned")
    assert dataset.groups == [[0], [1], [2]]  # the boxes depend on the question
    example = dataset[Request(0, (0,))]
    np.testing.assert_array_equal(example.images[0].boxes[:, 0], [30, 60, 0])  # objects 1, 2, 0
    assert example.images[0].roi_masks.shape == (3, 14, 14)
    assert spoken(dataset, example.texts[0]) == "[CLS] why is casey and chair there ? [SEP] no riley . [SEP]"
    assert example.texts[0].region_of_token[[3, 5, 10]].tolist() == [0, 1, 2]
    rationale = tiny.dataset(objects="mentioned", question="rationale")
    assert len(rationale[Request(0, (0,))].images[0].boxes) == 4  # [3] in a rationale; answers count too


def test_objects_of_r2c(tiny):
    dataset = tiny.dataset(objects="r2c", join_word=None)
    example = dataset[Request(0, (0,))]
    np.testing.assert_array_equal(example.images[0].boxes[:, 0], [0, 30, 60])
    assert spoken(dataset, example.texts[0]).startswith("[CLS] why is riley chair there ? [SEP]")
    everyone = tiny.dataset(objects="r2c", question="rationale")[Request(0, (0,))]
    assert len(everyone.images[0].boxes) == 4


def test_people_are_named_in_turn_and_in_training_from_anywhere(tiny):
    dataset = tiny.dataset(training=True)
    seen = {tuple(words(dataset, dataset[Request(0, (0,), epoch)].texts[0])) for epoch in range(20)}
    assert len(seen) > 5
    assert len({tuple(words(tiny.dataset(), tiny.dataset()[Request(0, (0,), e)].texts[0])) for e in range(5)}) == 1
    fixed = tiny.dataset(training=True, turn_names=False)
    assert words(fixed, fixed[Request(0, (0,), 3)].texts[0])[3] == "riley"


def test_a_name_does_not_depend_on_the_other_questions(tiny):
    dataset = tiny.dataset(training=True)
    alone, together = dataset[Request(0, (2,), 1)], dataset[Request(0, (0, 2), 1)]
    for one, other in zip(alone.texts, together.texts[4:], strict=True):
        np.testing.assert_array_equal(one.input_ids, other.input_ids)


def test_texts_are_cut_without_special_tokens(tiny):
    dataset = tiny.dataset(max_pieces=6)
    lengths = [len(text.input_ids) for text in dataset[Request(0, (0,))].texts]
    assert max(lengths) == 6 + 3


def test_controls(tiny):
    blank = tiny.dataset(blank_text=True)
    assert [words(blank, text) for text in blank[Request(0, (0,))].texts] == [["[CLS]", "[SEP]", "[SEP]"]] * 4
    answers = tiny.dataset(blank_question=True)
    assert words(answers, answers[Request(0, (0,))].texts[1]) == ["[CLS]", "[SEP]", "yes", ".", "[SEP]"]
    [image] = tiny.dataset(blank_image=True)[Request(0, (0,))].images
    assert len(np.unique(image.pixels.reshape(-1, 3), axis=0)) == 1
    assert image.roi_masks.all()


def test_objects_for_the_detection_losses(tiny):
    [image] = tiny.dataset(with_objects=True)[Request(0, (0,))].images
    assert image.objects.classes.tolist() == [0, 0, CLASS_NAMES.index("chair"), 0]
    assert image.objects.attributes is None
    tiny.metadata["attribute_ids"] = [[1, 4], [2, 4], [3, 4], [1, 5]]
    [image] = tiny.dataset(with_objects=True)[Request(0, (0,))].images
    assert image.objects.attributes.tolist() == tiny.metadata["attribute_ids"]
    tiny.dataset().check_classes(80)
    with pytest.raises(ValueError, match=r"80 classes, but the detector has 6"):
        tiny.dataset().check_classes(6)


def test_records_are_plain(tiny):
    tiny.lines[0]["family"] = "colour"
    record = tiny.dataset()[Request(0, (0,))].texts[3].record
    assert record == json.loads(json.dumps(record))
    assert (record["text_index"], record["annot_id"], record["kind"], record["label"]) == (0, "val-0", "answer", 2)
    assert record["sent"] == "Why is Riley and chair there ?"
    assert record["choices"][0] == "No Casey ."
    assert record["family"] == "colour"


def test_own_classes(tiny):
    for line in tiny.lines:
        line["objects"][0] = "robot"
    tiny.metadata["names"][0] = "robot"
    with pytest.raises(ValueError, match=r"val.jsonl \(val-0\): the object class 'robot' .*data.config.class_names"):
        tiny.dataset()
    [image] = tiny.dataset(class_names=["robot", "chair", "person"])[Request(0, (0,))].images
    assert image.region_targets["object_class"].tolist() == [1, 3, 2, 3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"question": "both"}, "data.config.question is 'both'"),
        ({"objects": "some"}, "must be one of all, mentioned, r2c"),
        ({"condition_on": "each"}, "is about rationales"),
        ({"max_pieces": 1}, "need at least 2"),
        ({"mask_size": 0}, "side of the detector's RoI maps"),
        ({"people_names": []}, "needs people_names"),
        ({"ask": 1}, "unknown key 'ask'; it takes question, condition_on"),
        ({"max_pieces": "many"}, r"data\.config\.max_pieces is 'many'; it must be a int"),
        ({"ground_words": "maybe"}, r"data\.config\.ground_words is 'maybe'; it must be a bool"),
        ({"people_names": "Casey"}, r"data\.config\.people_names is 'Casey'; it must be a list"),
        ({"max_pieces": None}, r"data\.config\.max_pieces is None"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        read_options(VCROptions, options, "data.config")


def test_options_that_may_be_left_open():
    options = read_options(VCROptions, {"mask_size": None, "join_word": None, "class_names": ["a"]}, "data.config")
    assert options == VCROptions(mask_size=None, join_word=None, class_names=["a"])


def settings_of(tiny, **changes) -> DataSettings:
    files = {"images": "vcr1images", "questions": "{split}.jsonl"}
    return DataSettings(**({"name": "vcr", "root": str(tiny.root), "files": files} | changes))


def build(tiny, settings, **changes):
    known = {"boxes": "gt", "training": False, "seed": 0, "channel_order": "BGR", "with_objects": False}
    return VCRDataset.from_settings(settings, tiny.dataset().tokenizer, "val", **(known | changes))


def test_from_settings(tiny):
    dataset = build(tiny, settings_of(tiny, config={"question": "rationale"}, blank_image=True), training=True)
    assert (dataset.options.question, dataset.blank_image, dataset.flip_probability) == ("rationale", True, 0.5)
    assert build(tiny, settings_of(tiny)).flip_probability == 0
    with pytest.raises(ValueError, match=r"cannot come from 'online'; set data.boxes.train=gt"):
        build(tiny, settings_of(tiny), boxes="online")
    with pytest.raises(ValueError, match=r"data.config.max_pieces"):
        build(tiny, settings_of(tiny, max_text_length=20))
    with pytest.raises(ValueError, match=r"data.files.questions is not set"):
        build(tiny, settings_of(tiny, files={"images": "vcr1images"}))
    with pytest.raises(ValueError, match="train with condition_on=right"):
        build(tiny, settings_of(tiny, config={"question": "rationale", "condition_on": "each"}), training=True)


def test_texts_for_a_vocabulary(tiny):
    tiny.write()
    texts = VCRDataset.texts_of(settings_of(tiny), "val")
    assert len(texts) == 1 + 3
    assert set(NEUTRAL_NAMES) <= set(texts[0].split())
    assert texts[1].startswith("Why is Riley and chair there ? No Casey . Yes .")
