"""RefCOCO: expressions, the rules of splits, bad refs files, and ten real photos.

The photos are not part of the repository. E2E_VL_REAL_MINI names their folder; default: ../shared/real_mini.
"""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from detector.config import SelectionRule
from detector.images import ResizeRule
from e2e_vl.config import DataConfig
from e2e_vl.data.base import open_options
from e2e_vl.data.batching import GroupedBatchSampler, collate
from e2e_vl.data.coco import CocoInstances
from e2e_vl.data.image_loader import DetectedBoxes, read_detections
from e2e_vl.data.refcoco import Expression, RefCOCODataset, read_expressions, read_refs
from e2e_vl.metrics.refcoco import box_iou
from e2e_vl.samples import ReferredBoxes
from e2e_vl.tasks.refcoco import ReferringTask
from e2e_vl.text import TextTokenizer, build_vocabulary, load_tokenizer
from tests.data.helpers import examples, open_dataset, refused

DEFAULT = Path(__file__).resolve().parents[2].parent / "shared" / "real_mini"
SPLITS = ("train", "val", "testA", "testB")
VL_BERT = ResizeRule(short_edge=600, long_edge=1000, rounding="truncate")


def make(tiny, split="train", **named) -> RefCOCODataset:
    return open_dataset(RefCOCODataset, tiny.settings, split, "gt", **named)


def read(tiny) -> list[Expression]:
    return read_expressions(tiny.refs_file, CocoInstances(tiny.instances_file))


def test_texts_are_grouped_by_image(tiny):
    dataset = make(tiny, training=True)
    assert len(dataset) == 7 and list(dataset.groups) == [[0, 1, 2, 3, 4], [5, 6]]
    assert list(dataset.image_ids()) == ["7", "3"] and dataset.split_values == [{"split": "train"}]
    assert list(make(tiny, "test").groups) == [[0, 1]]
    options = open_options(RefCOCODataset, tiny.settings)
    texts = list(RefCOCODataset.texts_of(*options, "train"))
    assert texts == [expression.words for expression in dataset.texts]
    with refused("refs(unc).p", "'val'", "testA, testB, train"):
        make(tiny, "val")


def test_expressions_of_grefcoco_refer_to_any_number_of_objects(tiny):
    refs = json.loads(json.dumps(pickle.loads(tiny.refs_file.read_bytes())))
    one, other = (ref for ref in refs if ref["image_id"] == 7 and ref["split"] == "train")
    general = [
        one | {"ann_id": [one["ann_id"], other["ann_id"]], "category_id": [1, 1]},
        other | {"ann_id": [-1], "category_id": [-1]},
    ]
    path = tiny.refs_file.with_name("grefs(unc).json")
    path.write_text(json.dumps(general))
    several, *_, nothing = read_expressions(path, CocoInstances(tiny.instances_file))
    assert several.truth.boxes == several.boxes and len(several.truth.boxes) == 2
    assert nothing.truth == ReferredBoxes((), ann_ids=(), category=None)


def test_metadata_and_truth_in_pixels_of_the_stored_image(tiny):
    sample = make(tiny).sample((0, 4))
    [image] = sample.images
    assert (image.id, image.size) == ("7", (60, 100))
    assert image.locate() == tiny.images_root / "seven.png"
    first, second = sample.texts
    assert first.words == "red square on the left"
    assert first.metadata == {"ref_id": 1, "sent_id": 10, "image_id": 7, "family": "relation"}
    assert first.truth == ReferredBoxes(((10, 20, 30, 40),), ann_ids=(100,), category="square")
    assert second.truth.boxes == ((60, 10, 90, 40),)
    assert "family" not in second.metadata
    assert first.phrases.spans == ((0, len(first.words)),) and first.phrases.boxes[0].tolist() == [[10, 20, 30, 40]]


def test_json_has_the_same_content_and_a_ref_may_have_the_family(tiny):
    tiny.refs[2]["family"] = "attribute"
    expressions = read(tiny.write())
    assert [one.sent_id for one in expressions][:7] == [10, 11, 20, 21, 22, 30, 31]
    assert [one.family for one in expressions][:7] == ["relation", *[None] * 4, "attribute", "attribute"]
    path = tiny.refs_file.with_suffix(".json")
    path.write_text(json.dumps(tiny.refs))
    assert read_refs(path) == read_refs(tiny.refs_file)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda refs: refs[1].update(ann_id=999), ["ref 2", "annotation 999", "instances.json"]),
        (lambda refs: refs[1].update(image_id=3), ["ref 2", "image 3", "instances.json"]),
        (lambda refs: refs[1].update(image_id=99, ann_id=[-1]), ["ref 2", "image 99", "instances.json"]),
        (lambda refs: refs[1]["sentences"][0].pop("sent"), ["[1].sentences[0]", "sent"]),
    ],
)
def test_a_bad_ref_is_named(tiny, change, parts):
    change(tiny.refs)
    with refused("refs(unc).p", *parts):
        read(tiny.write())


def test_a_file_whose_refs_are_all_skipped_says_so(tiny):
    for ref in tiny.refs:
        ref["sentences"] = []
    tiny.write()
    with refused("refs(unc).p", "all its refs are skipped"):
        make(tiny)


class Exploit:
    def __reduce__(self):
        return os.mkdir, ("harm",)


@pytest.mark.parametrize("number", [np.int64, np.float64, str])
def test_ids_of_numpy_and_of_other_types(tiny, number):
    """Pickles made with pandas hold scalars of NumPy."""
    before = [(expression.words, expression.boxes) for expression in read(tiny)]
    for ref in tiny.refs:
        ref |= {key: number(ref[key]) for key in ("ref_id", "ann_id", "image_id")}
        for sentence in ref["sentences"]:
            sentence |= {"sent_id": number(sentence["sent_id"]), "sent": np.str_(sentence["sent"])}
    tiny.write()
    expressions = read(tiny)
    assert [(expression.words, expression.boxes) for expression in expressions] == before
    # as in the instances file, whose ids are compared with these
    assert (expressions[0].ann_ids, expressions[0].image_id) == ((100,), 7)


def test_a_pickle_that_tries_to_run_code_is_refused_before_it_runs(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny.refs_file.write_bytes(pickle.dumps([Exploit()], protocol=2))
    with refused("refs(unc).p", "mkdir"):
        read_refs(tiny.refs_file)
    assert not (tmp_path / "harm").exists()
    tiny.refs_file.write_bytes(pickle.dumps({}))
    with refused("refs(unc).p"):
        read_refs(tiny.refs_file)


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_python_2_byte_strings(tiny, encoding):
    """`protocol=0` writes texts by escapes, which Python 2 wrote for byte strings."""
    tiny.refs[0]["sentences"][0]["sent"] = "AT THE CAFE"
    data = pickle.dumps(tiny.refs, protocol=2)
    text = b"X\x0b\x00\x00\x00AT THE CAFE"
    own = "at the café".encode(encoding)
    assert data.count(text) == 1
    tiny.refs_file.write_bytes(data.replace(text, b"U" + bytes([len(own)]) + own))
    assert read_refs(tiny.refs_file)[0].sentences[0].sent == "at the café"


def test_empty_boxes_are_left_out_and_so_are_refs_to_them(tiny, caplog):
    """COCO's own file, which RefCOCO's is made from, has some."""
    boxes = {row["id"]: row for row in tiny.instances["annotations"]}
    boxes[102]["bbox"] = [10, 20, 0, 5]
    everything = read(tiny.write())
    assert len(everything) == 9
    assert "skipped 1 annotations with empty boxes: [102]" in caplog.text
    boxes[100]["bbox"] = [10, 20, 0, 5]
    assert read(tiny.write()) == [expression for expression in everything if 100 not in expression.ann_ids]
    assert "skipped 1 refs to annotations with empty boxes: 1" in caplog.text


@pytest.mark.parametrize(
    ("change", "left_out", "message"),
    [
        (lambda refs: refs[1].update(sentences=[]), 3, "1 refs without a sentence: 2"),  # as gRefCOCO's own file
        (lambda refs: refs[1].update(sentences=None), 3, "1 refs without a sentence: 2"),
        (lambda refs: refs[1]["sentences"][0].update(sent=" "), 1, "1 blank sentences: 20"),
        (lambda refs: refs.append(refs[1]), 0, "3 sentences that repeat an earlier one: 20; 21; 22"),
    ],
)
def test_odd_refs_are_skipped_and_counted(tiny, caplog, change, left_out, message):
    everything = read(tiny)
    change(tiny.refs)
    assert len(read(tiny.write())) == len(everything) - left_out
    assert f"skipped {message}" in caplog.text
    assert all(text.strip() for text in RefCOCODataset.texts_of(*open_options(RefCOCODataset, tiny.settings), "train"))


def test_a_sentence_id_with_two_texts_is_named(tiny):
    tiny.refs[1]["sentences"][0]["sent_id"] = tiny.refs[0]["sentences"][0]["sent_id"]
    tiny.write()
    with refused("refs(unc).p", "sentence 10", "twice"):
        make(tiny)


def test_expressions_boxes_and_detections_line_up_with_real_photos(tmp_path):
    root = Path(os.environ.get("E2E_VL_REAL_MINI", DEFAULT))
    if not (root / "images" / "train2014").is_dir():
        pytest.skip(f"the ten real photos are not at {root}; set E2E_VL_REAL_MINI to their folder")
    files = {"images": "images/train2014", "refs": "refcoco+/refs(unc).p", "instances": "refcoco+/instances.json"}
    settings = DataConfig(name="refcoco", root=str(root), files=files)
    instances = CocoInstances(root / files["instances"])
    expressions = read_expressions(root / files["refs"], instances)
    assert len(expressions) == 78
    assert [len({one.image_id for one in expressions if one.split == split}) for split in SPLITS] == [6, 2, 1, 1]
    detections = root / "detections" / "refcoco+_unc" / "res101_coco_minus_refer_notime_dets.json"
    detected = read_detections(detections)
    assert sum(len(detections.boxes) for detections in detected.values()) == 158

    build_vocabulary((expression.words for expression in expressions), tmp_path / "vocab.txt")
    preprocessor = ReferringTask(8).preprocessor(TextTokenizer(load_tokenizer(tmp_path / "vocab.txt")))
    reader = DetectedBoxes([detections], SelectionRule(min_score=0.0, max_regions=1000))
    seen = 0
    for split in SPLITS:
        dataset = open_dataset(RefCOCODataset, settings, split, "gt")
        data = examples(dataset, preprocessor, "detections+gt", reader, resize=VL_BERT, with_objects=True)
        for requests in GroupedBatchSampler(data.groups, 2, shuffle=False):
            batch = collate([data[request] for request in requests])
            scales = batch.images.scales.repeat(1, 2)
            for row, record in enumerate(batch.records):
                image, info = int(batch.image_index[row, 0]), instances[record["image_id"]]
                assert batch.images.original_sizes[image].tolist() == [info.height, info.width]
                gt_box = np.array(record["gt_box"])
                height, width = batch.images.sizes[image].tolist()
                last_pixels = [width - 1, height - 1, width - 1, height - 1]
                resized_box = np.clip(gt_box * scales[image].numpy(), 0, last_pixels)
                target = batch.targets.boxes.values[row]
                np.testing.assert_allclose(target, resized_box, atol=1e-3)

                found = detected[str(record["image_id"])][0]
                assert 0.6 <= box_iou(found, gt_box, "mattnet").max() <= 0.95 + 1e-6
                assert len(batch.boxes[image]) == len(found) + len(info.objects)
                referred = len(found) + [one.id for one in info.objects].index(record["ann_id"])
                np.testing.assert_allclose(batch.boxes[image][referred], target, atol=1e-3)
                assert len(batch.detection_targets.boxes[image]) == sum(not one.is_crowd for one in info.objects)
                seen += 1
    assert seen == 78
