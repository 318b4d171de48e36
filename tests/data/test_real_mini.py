"""Ten real photos in the official formats: do expressions, boxes, detections and pixels line up?

The photos are not part of the repository. E2E_VL_REAL_MINI names their folder; default: ../shared/real_mini.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from detector.config import SelectionRule
from detector.images import ResizeRule
from e2e_vl.config import DataSettings
from e2e_vl.data.base import open_options
from e2e_vl.data.batching import ExampleDataset, GroupedBatchSampler, Request, collate
from e2e_vl.data.captions import CaptionDataset
from e2e_vl.data.coco import CocoInstances
from e2e_vl.data.image_loader import DetectedBoxes, read_detections
from e2e_vl.data.refcoco import Expression, RefCOCODataset, read_expressions, read_refs
from e2e_vl.data.vqa import VQADataset
from e2e_vl.encoders.vl_bert import VLBertModel
from e2e_vl.metrics.refcoco import box_iou
from e2e_vl.metrics.vqa import answer_accuracy
from e2e_vl.tasks.config import VQAConfig
from e2e_vl.tasks.refcoco import ReferringTask
from e2e_vl.tasks.vqa import VQATask
from e2e_vl.text import TextTokenizer, build_vocabulary, load_tokenizer
from tests.data.helpers import examples, open_dataset
from tests.tasks.objectives.worded import make_preprocessor

DEFAULT = Path(__file__).resolve().parents[2].parent / "shared" / "real_mini"
SPLITS = ("train", "val", "testA", "testB")
VL_BERT = ResizeRule(short_edge=600, long_edge=1000, rounding="truncate")


@pytest.fixture(scope="module")
def root() -> Path:
    root = Path(os.environ.get("E2E_VL_REAL_MINI", DEFAULT))
    if not (root / "images" / "train2014").is_dir():
        pytest.skip(f"the ten real photos are not at {root}; set E2E_VL_REAL_MINI to their folder")
    return root


@pytest.fixture(scope="module")
def instances(root) -> CocoInstances:
    return CocoInstances(root / "refcoco+" / "instances.json")


@pytest.fixture(scope="module")
def expressions(root, instances) -> list[Expression]:
    return read_expressions(root / "refcoco+" / "refs(unc).p", instances)


@pytest.fixture(scope="module")
def detections(root) -> Path:
    return root / "detections" / "refcoco+_unc" / "res101_coco_minus_refer_notime_dets.json"


@pytest.fixture(scope="module")
def tokenizer(expressions, tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "vocab.txt"
    build_vocabulary((expression.words for expression in expressions), path)
    return load_tokenizer(path)


def make(root, tokenizer, split, boxes="gt", reader=None, *, resize=VL_BERT, **rules) -> ExampleDataset:
    files = {"images": "images/train2014", "refs": "refcoco+/refs(unc).p", "instances": "refcoco+/instances.json"}
    settings = DataSettings(name="refcoco", root=str(root), files=files)
    dataset = open_dataset(RefCOCODataset, settings, split, "gt")
    preprocessor = ReferringTask(8).preprocessor(TextTokenizer(tokenizer))
    return examples(dataset, preprocessor, boxes, reader, resize=resize, **rules)


def test_the_files_hold_what_they_should(root, instances, expressions, detections):
    assert len(expressions) == 78
    assert len({expression.ref_id for expression in expressions}) == 31
    assert [len({one.image_id for one in expressions if one.split == split}) for split in SPLITS] == [6, 2, 1, 1]
    objects = [one for image in instances.images for one in image.objects]
    assert (len(instances.images), len(objects), len(instances.class_names)) == (10, 47, 80)
    assert sum(one.is_crowd for one in objects) == 1
    assert sum(len(boxes) for boxes, _ in read_detections(detections).values()) == 158
    assert read_refs(root / "refcoco+" / "refs.json") == read_refs(root / "refcoco+" / "refs(unc).p")


def test_every_referred_box_is_within_reach_of_a_detection(instances, expressions, detections):
    detected = read_detections(detections)
    for expression in expressions:
        [gt_box] = [one.box for one in instances[expression.image_id].objects if one.id == expression.ann_id]
        best = box_iou(detected[str(expression.image_id)][0], np.array(gt_box), "mattnet").max()
        assert 0.6 <= best <= 0.95 + 1e-6, expression


def test_all_78_expressions_boxes_and_detections_line_up_with_the_photos(root, instances, detections, tokenizer):
    seen, detected = 0, read_detections(detections)
    for split in SPLITS:
        reader = DetectedBoxes([detections], SelectionRule(min_score=0.0, max_regions=1000))
        dataset = make(root, tokenizer, split, "detections+gt", reader, with_objects=True)
        sampler = GroupedBatchSampler(dataset.groups, 2, shuffle=False)
        for requests in sampler:
            batch = collate([dataset[request] for request in requests], (0, 0, 0), (1, 1, 1))
            scales = batch.images.scales.repeat(1, 2)
            for row, record in enumerate(batch.records):
                image = int(batch.image_index[row, 0])
                info = instances[record["image_id"]]
                assert record["file_name"].endswith(info.file_name)
                assert batch.images.original_sizes[image].tolist() == [info.height, info.width]
                assert max(batch.images.sizes[image].tolist()) <= 1000

                back = (batch.targets.box[row] / scales[image]).numpy()
                np.testing.assert_allclose(back, record["gt_box"], atol=1e-3)

                num_detections = len(detected[str(record["image_id"])][0])
                annotations = info.objects
                assert len(batch.boxes[image]) == num_detections + len(annotations)
                referred = num_detections + [a.id for a in annotations].index(record["ann_id"])
                # candidates are clamped to the last pixel, targets are not
                np.testing.assert_allclose(batch.boxes[image][referred], batch.targets.box[row], atol=1.01)
                num_objects = len(batch.detection_targets.boxes[image])
                assert num_objects == sum(not annotation.is_crowd for annotation in annotations)

                ids = batch.texts.input_ids[row][batch.texts.attention_mask[row]].tolist()
                assert ids[0] == tokenizer.cls_token_id
                assert ids[-1] == tokenizer.sep_token_id
                assert tokenizer.unk_token_id not in ids
                assert tokenizer.decode(ids[1:-1]).split() == " ".join(tokenizer.tokenize(record["text"])).split()
                seen += 1
    assert seen == 78


def test_a_flipped_photo_shows_the_same_pixels_in_its_boxes(root, tokenizer):
    small = ResizeRule(short_edge=200, long_edge=400)
    plain = make(root, tokenizer, "val", resize=small)
    flipped = make(root, tokenizer, "val", resize=small, flip_probability=1.0)
    for request in (request for batch in GroupedBatchSampler(plain.groups, 1, shuffle=False) for request in batch):
        one, other = plain[request].images[0], flipped[request].images[0]
        np.testing.assert_array_equal(one.pixels, other.pixels[:, ::-1])
        width = one.pixels.shape[1]
        mirrored = other.boxes.copy()
        mirrored[:, [0, 2]] = width - 1 - other.boxes[:, [2, 0]]
        np.testing.assert_allclose(mirrored, one.boxes, atol=1.01)


def test_the_folder_holds_every_photo_that_is_annotated(root, instances):
    for image in instances.images:
        assert (root / "images" / "train2014" / image.file_name).is_file()


def test_the_50_captions_belong_to_the_ten_photos(root, tmp_path):
    files = {"captions": "captions/captions_{split}.json", "images": "images/{images}"}
    settings = DataSettings(name="captions", root=str(root), files=files | {"instances": "refcoco+/instances.json"})
    captioned = open_dataset(CaptionDataset, settings, "train2014", "gt")
    assert (len(captioned.groups), len(captioned)) == (10, 50)
    captions = [captioned[text] for text in range(50)]
    build_vocabulary(captions, tmp_path / "vocab.txt")
    tokenizer = load_tokenizer(tmp_path / "vocab.txt")
    preprocessor = make_preprocessor(tokenizer)
    dataset = examples(captioned, preprocessor, resize=VL_BERT, flip_probability=0.5, seed=3)
    for request in (request for batch in GroupedBatchSampler(dataset.groups, 1) for request in batch):
        example = dataset[request]
        assert [text.record["text"] for text in example.texts] == [captions[text] for text in request.texts]
        assert len(example.images[0].boxes) == len(example.images[0].box_classes) >= 1
        batch = collate([example], (0, 0, 0), (1, 1, 1))
        assert batch.targets.parts["masked_words"].labels.shape == batch.texts.input_ids.shape
        assert min(batch.images.sizes[0].tolist()) <= 600


def test_30_questions_and_their_photos(root, tmp_path):
    if not (root / "vqa").is_dir():
        pytest.skip(f"there are no questions about the ten real photos at {root}")
    files = {
        "images": "images/{images}",
        "questions": "vqa/v2_OpenEnded_mscoco_{split}_questions.json",
        "annotations": "vqa/v2_mscoco_{split}_annotations.json",
        "instances": "refcoco+/instances.json",
    }
    settings = DataSettings(name="vqa", root=str(root), files=files)
    options = open_options(VQADataset, settings)
    build_vocabulary(VQADataset.texts_of(*options, "train2014"), tmp_path / "vocab.txt")
    tokenizer = load_tokenizer(tmp_path / "vocab.txt")
    answers = sorted(set(VQADataset.answers_of(*options, "train2014").values()))
    task = VQATask(8, VQAConfig(answers=answers))
    questions = open_dataset(VQADataset, settings, "train2014", "gt")
    preprocessor = task.preprocessor(TextTokenizer(tokenizer, VLBertModel.layout))
    dataset = examples(questions, preprocessor, resize=ResizeRule(100, 200))
    assert len(dataset) == 30 and len(dataset.groups) == 10
    for group, texts in enumerate(dataset.groups):
        example = dataset[Request(group, tuple(texts))]
        assert len(example.images[0].boxes)
        for text in example.texts:
            assert tokenizer.unk_token_id not in text.encoding.input_ids
            assert text.encoding.input_ids[text.encoding.summary] == tokenizer.mask_token_id
            assert len(text.record["answers"]) == 10
            assert answer_accuracy(text.record["multiple_choice_answer"], text.record["answers"]) > 0.5
            assert answers[text.targets.best] in text.record["answers"]
