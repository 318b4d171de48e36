from __future__ import annotations

import json

import numpy as np
import pytest
from torch.utils.data import DataLoader

from detector.images import ResizeRule
from detector.selection import SelectionRule
from e2e_vl.data.examples import Request
from e2e_vl.data.refcoco import RefCOCODataset

SAME = ResizeRule(short_edge=60, long_edge=1000)  # photo 7 is 100 x 60 pixels and keeps its size
DOUBLE = ResizeRule(short_edge=120, long_edge=1000)
GT_7 = [[10, 20, 30, 40], [60, 10, 90, 40], [0, 0, 99, 59]]
DETECTIONS_7 = [[61, 11, 89, 39], [11, 21, 29, 39]]


def make(tiny, split="train", resize=SAME, **options) -> RefCOCODataset:
    return RefCOCODataset(
        tiny.images_root, tiny.instances_file, tiny.refs_file, split, tiny.tokenizer, resize, **options
    )


def words(dataset, text) -> list[str]:
    return dataset.tokenizer.convert_ids_to_tokens(text.input_ids.tolist())


def test_texts_are_grouped_by_image(tiny):
    dataset = make(tiny)
    assert len(dataset) == 7
    assert dataset.groups == [[0, 1, 2, 3, 4], [5, 6]]
    assert make(tiny, "test").groups == [[0, 1]]


def test_one_image_with_several_texts(tiny):
    example = make(tiny, resize=DOUBLE)[Request(0, (0, 3))]
    [image] = example.images
    assert image.pixels.shape == (120, 200, 3)
    assert image.pixels.dtype == np.uint8
    assert image.original_size == (60, 100)
    assert image.name.endswith("seven.png")
    assert image.objects is None
    assert len(example.texts) == 2
    first, second = example.texts
    assert words(make(tiny), first) == ["[CLS]", "red", "square", "on", "the", "left", "[SEP]"]
    assert first.segment_ids.tolist() == [0] * 7
    assert first.looks_at == second.looks_at == (0,)
    np.testing.assert_array_equal(first.targets["box"], [20, 40, 60, 80])
    np.testing.assert_array_equal(second.targets["box"], [120, 20, 180, 80])
    assert first.targets["box"].dtype == np.float32


def test_records_are_plain_and_in_pixels_of_the_stored_image(tiny):
    example = make(tiny, resize=DOUBLE)[Request(0, (0, 4))]
    record = example.texts[0].record
    assert record == json.loads(json.dumps(record))
    assert record["gt_box"] == [10, 20, 30, 40]
    assert record["image_size"] == [60, 100]
    assert (record["ref_id"], record["sent_id"], record["image_id"], record["ann_id"]) == (1, 10, 7, 100)
    assert record["sent"] == "red square on the left"
    assert record["family"] == "relation"
    assert record["candidate_ann_ids"] == [100, 101, 102]
    assert record["file_name"].endswith("seven.png")
    assert record["flipped"] is False
    assert "family" not in example.texts[1].record


@pytest.mark.parametrize(
    ("source", "boxes"),
    [("gt", GT_7), ("detections", DETECTIONS_7), ("detections+gt", DETECTIONS_7 + GT_7), ("online", None)],
)
def test_box_sources(tiny, source, boxes):
    dataset = make(tiny, box_source=source, detections_file=tiny.detections_file)
    found = dataset[Request(0, (0,))].images[0].boxes
    if boxes is None:
        assert found is None
    else:
        np.testing.assert_array_equal(found, boxes)
        assert found.dtype == np.float32


def test_the_selection_rule_applies_to_detections_only(tiny):
    rule = SelectionRule(min_score=0.5, min_regions=1, max_regions=100)
    dataset = make(tiny, box_source="detections+gt", detections_file=tiny.detections_file, selection=rule)
    np.testing.assert_array_equal(dataset[Request(0, (0,))].images[0].boxes, [DETECTIONS_7[1], *GT_7])


def test_an_image_of_the_split_without_detections_is_named(tiny):
    tiny.detections = [row for row in tiny.detections if row["image_id"] != 3]
    tiny.write()
    make(tiny, "test", box_source="detections", detections_file=tiny.detections_file)  # needs photo 9 only
    with pytest.raises(ValueError, match=r"dets\.json: no detections for image 3"):
        make(tiny, box_source="detections", detections_file=tiny.detections_file)


def test_a_detection_outside_its_image_is_named(tiny):
    tiny.detections[1]["box"] = [101, 5, 10, 10]
    dataset = make(tiny.write(), box_source="detections", detections_file=tiny.detections_file)
    with pytest.raises(ValueError, match=r"dets\.json: image 7: box 0 .* outside the 100 x 60 image"):
        dataset[Request(0, (0,))]


def test_objects_are_the_annotations_without_crowds(tiny):
    objects = make(tiny, with_objects=True, box_source="online")[Request(0, (0,))].images[0].objects
    np.testing.assert_array_equal(objects.boxes, GT_7[:2])
    np.testing.assert_array_equal(objects.classes, [0, 0])
    np.testing.assert_array_equal(objects.attributes, [[1, -1], [0, 2]])


def test_a_flip_moves_pixels_boxes_targets_objects_and_swaps_left_and_right(tiny):
    plain = make(tiny, with_objects=True)[Request(0, (0, 3))]
    dataset = make(tiny, with_objects=True, flip_probability=1.0)
    flipped = dataset[Request(0, (0, 3))]
    image = flipped.images[0]
    np.testing.assert_array_equal(image.pixels, plain.images[0].pixels[:, ::-1])
    np.testing.assert_array_equal(image.boxes, [[69, 20, 89, 40], [9, 10, 39, 40], [0, 0, 99, 59]])
    # x' = width - 1 - x for candidates (official VL-BERT code), width - x for the detector's targets (Detectron2)
    np.testing.assert_array_equal(image.objects.boxes, [[70, 20, 90, 40], [10, 10, 40, 40]])
    np.testing.assert_array_equal(flipped.texts[0].targets["box"], [69, 20, 89, 40])
    assert words(dataset, flipped.texts[0]) == ["[CLS]", "red", "square", "on", "the", "right", "[SEP]"]
    assert words(dataset, flipped.texts[1]) == ["[CLS]", "blue", "thing", "left", "[SEP]"]
    assert flipped.texts[0].record["flipped"] is True
    assert flipped.texts[0].record["gt_box"] == [10, 20, 30, 40]


def test_the_target_box_is_not_clamped(tiny):
    tiny.instances["annotations"][0]["bbox"] = [-4, 20, 24, 45]
    example = make(tiny.write())[Request(0, (0,))]
    np.testing.assert_array_equal(example.texts[0].targets["box"], [-4, 20, 20, 65])
    np.testing.assert_array_equal(example.images[0].boxes[0], [0, 20, 20, 59])


def test_randomness_depends_on_seed_epoch_and_text_only(tiny):
    def draws(seed: int) -> list[tuple[bool, int]]:
        dataset = make(tiny, resize=[SAME, DOUBLE], flip_probability=0.5, seed=seed)
        requests = [Request(0, (text,), epoch) for epoch in range(8) for text in range(5)]
        examples = [dataset[request] for request in requests]
        assert [dataset[request].images[0].pixels.shape for request in reversed(requests)] == [
            example.images[0].pixels.shape for example in reversed(examples)
        ]
        return [(example.texts[0].record["flipped"], example.images[0].pixels.shape[0]) for example in examples]

    first = draws(1)
    assert first == draws(1)
    assert first != draws(2)
    assert set(first) == {(flipped, height) for flipped in (False, True) for height in (60, 120)}


def test_workers_give_the_same_examples(tiny):
    dataset = make(tiny, resize=[SAME, DOUBLE], flip_probability=0.5)
    requests = [Request(0, (text,), epoch) for epoch in range(2) for text in range(5)]
    loader = DataLoader(dataset, sampler=requests, batch_size=None, num_workers=2)
    for example, request in zip(loader, requests, strict=True):
        np.testing.assert_array_equal(example.images[0].pixels, dataset[request].images[0].pixels)


def test_blank_text_drops_all_words(tiny):
    dataset = make(tiny, blank_text=True)
    assert {tuple(words(dataset, text)) for text in dataset[Request(0, (0, 1, 2))].texts} == {("[CLS]", "[SEP]")}


def test_a_length_limit_keeps_the_separator_and_records_the_loss(tiny):
    dataset = make(tiny, max_text_length=5)
    long, short = dataset[Request(0, (0, 2))].texts
    assert words(dataset, long) == ["[CLS]", "red", "square", "on", "[SEP]"]
    assert long.record["cut_wordpieces"] == 2
    assert words(dataset, short) == ["[CLS]", "blue", "square", "[SEP]"]
    assert "cut_wordpieces" not in short.record


def test_image_files_are_checked_when_loaded(tiny):
    (tiny.images_root / "seven.png").unlink()
    dataset = make(tiny)
    with pytest.raises(FileNotFoundError, match=r"seven\.png: the file of image 7 is missing"):
        dataset[Request(0, (0,))]
    tiny.instances["images"][1]["width"] = 41
    tiny.instances_file.write_text(json.dumps(tiny.instances))
    with pytest.raises(
        ValueError, match=r"three\.png: image 3 is 40 x 80 pixels, but its annotation file says 41 x 80"
    ):
        make(tiny)[Request(1, (5,))]
    (tiny.images_root / "three.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"three\.png"):
        make(tiny)[Request(1, (5,))]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"box_source": "proposals"}, "unknown box source 'proposals'; choose one of gt, detections"),
        ({"box_source": "detections"}, "box source 'detections' needs a detections file"),
        ({"flip_probability": 1.5}, "flip_probability is 1.5"),
        ({"max_text_length": 1}, "max_text_length is 1"),
        ({"resize": []}, "at least one resize rule"),
        ({"split": "val"}, "no split 'val'; the file has testA, testB, train"),
    ],
)
def test_options_that_do_not_fit(tiny, options, message):
    with pytest.raises(ValueError, match=message):
        make(tiny, **options)
