"""Captions of every source, read, loaded and worded for pre-training."""

from __future__ import annotations

import json
from functools import partial

import numpy as np
import pytest
import torch

from detector.config import SelectionRule
from e2e_vl.config import BoxSource, DataSettings
from e2e_vl.data.base import open_options
from e2e_vl.data.batching import BatchLoader, ExampleDataset, GroupedBatchSampler, Request, collate
from e2e_vl.data.captions import CaptionDataset
from e2e_vl.data.config import CLASS_NAMES
from e2e_vl.data.features import RegionFeatures, save_npz
from e2e_vl.data.image_loader import open_boxes
from e2e_vl.synthetic import make_scenes
from e2e_vl.text import build_vocabulary, load_tokenizer
from tests.data.drawn_metadata import write_metadata
from tests.data.helpers import examples, open_dataset, refused
from tests.tasks.objectives.tiny_objectives import make_preprocessor

SPLITS = {"train": 6, "val": 3}
COCO = {
    "captions": "captions/captions_{split}.json",
    "images": "images/train2014",
    "instances": "detection/instances_{split}.json",
    "detections": "detections/refcoco+_unc/res101_coco_minus_refer_notime_dets.json",
    "corpus": "corpus/corpus.doc",
}
SHARDS = {"shards": "shards/{split}"}
OFFICIAL = dict.fromkeys(("captions", "detections", "features"), "conceptual/{split}_frcnn.json")
RULE = SelectionRule(min_score=0.5, min_regions=1, max_regions=100)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("captions") / "data"
    make_scenes(root, scenes=SPLITS, seed=5)
    return root


@pytest.fixture(scope="module")
def tokenizer(root):
    path = root.parent / "vocab.txt"
    build_vocabulary(CaptionDataset.texts_of(*open_options(CaptionDataset, settings(root, COCO)), "train"), path)
    return load_tokenizer(path)


def settings(root, files=COCO, source="coco", **config) -> DataSettings:
    return DataSettings(name="captions", root=str(root), files=dict(files), config={"source": source, **config})


def read(root, files=COCO, source="coco", split="train", boxes="online", *, training=True, objects=False, **config):
    given = settings(root, files, source, **config)
    return open_dataset(CaptionDataset, given, split, boxes, objects=objects, training=training)


def make(
    root, tokenizer, files=COCO, source="coco", split="train", boxes="online", *, training=True, flip=0.5, **options
) -> ExampleDataset:
    """Captions and corpus in the wording of pre-training; `options` are objectives."""
    dataset = read(root, files, source, split, boxes, training=training)
    reader = None
    if boxes in ("detections", "precomputed") and dataset.parts:
        reader = open_boxes([root / files[boxes]], RULE, with_features=False)
    preprocessor = make_preprocessor(tokenizer, **({"masked_text": 1.0, "relationship": 1.0} | options))
    return examples(dataset, preprocessor, boxes, reader, seed=7, flip_probability=flip)


def requests(dataset, texts_per_image=None, epoch=0):
    sampler = GroupedBatchSampler(dataset.groups, 1, texts_per_image, shuffle=False)
    sampler.set_epoch(epoch)
    return [request for batch in sampler for request in batch]


@pytest.mark.parametrize(
    ("files", "source", "boxes"),
    [
        (COCO, "coco", "online"),
        (COCO, "coco", "gt"),
        (COCO, "coco", "detections"),
        (SHARDS, "shards", "online"),
        (OFFICIAL, "json_lines", "online"),
        (OFFICIAL, "json_lines", "detections"),
        (OFFICIAL, "json_lines", "precomputed"),
    ],
)
def test_every_source_gives_whole_batches(root, tokenizer, files, source, boxes):
    flip = 0.0 if boxes == "precomputed" else 0.5
    for split, training in (("train", True), ("val", False)):
        dataset = make(root, tokenizer, files, source, split, boxes, training=training, flip=flip)
        assert len(dataset.groups) == SPLITS[split]
        assert sorted(text for group in dataset.groups for text in group) == list(range(len(dataset)))
        batch = collate([dataset[request] for request in requests(dataset)], (0, 0, 0), (1, 1, 1))
        assert len(batch.images.names) == SPLITS[split]
        with_corpus = "corpus" in files and training
        assert len(batch) == len(dataset) * (2 if with_corpus else 1)
        captions = batch.image_index[:, 0] >= 0
        assert int(captions.sum()) == len(dataset)
        assert [record["text_index"] for record in batch.records if record] == list(range(len(dataset)))
        parts = batch.targets.parts
        assert (parts["relationship"].is_match >= 0).tolist() == captions.tolist()
        for name in ("masked_words", "masked_text"):
            assert parts[name].labels.shape == batch.texts.input_ids.shape
            assert (parts[name].labels >= 0).any() == (name == "masked_words" or with_corpus)
        assert batch.seeds.dtype == torch.int64 and len(batch.seeds) == len(batch)
        assert (batch.boxes is None) == (boxes == "online")
        labels = batch.region_labels
        assert (labels.classes is not None) == (boxes == "gt")
        assert (labels.class_probs is not None) == (source == "json_lines" and boxes != "online")
        for rows in filter(None, (labels.classes, labels.class_probs)):
            assert [len(one) for one in rows] == [len(one) for one in batch.boxes]
        assert (batch.images.precomputed is not None) == (boxes == "precomputed")


@pytest.mark.parametrize(
    ("files", "source"), [({**SHARDS, "corpus": COCO["corpus"]}, "shards"), (OFFICIAL, "json_lines")]
)
def test_workers_read_what_one_process_reads(root, tokenizer, files, source):
    dataset = make(root, tokenizer, files, source)
    dataset[Request(0, (0,))]  # files are open before the workers are forked
    joined = partial(collate, pixel_mean=(0, 0, 0), pixel_std=(1, 1, 1))

    def batches(workers: int):
        return list(BatchLoader(dataset, GroupedBatchSampler(dataset.groups, 2, 1, seed=3), joined, workers=workers))

    for one, other in zip(batches(0), batches(2), strict=True):
        assert torch.equal(one.images.pixels, other.images.pixels)
        assert torch.equal(one.texts.input_ids, other.texts.input_ids)
        assert torch.equal(one.seeds, other.seeds)
        for name in ("masked_words", "masked_text"):
            assert torch.equal(one.targets.parts[name].labels, other.targets.parts[name].labels)
        assert torch.equal(one.targets.parts["relationship"].is_match, other.targets.parts["relationship"].is_match)
        assert one.records == other.records


@pytest.mark.parametrize(("files", "source"), [(COCO, "coco"), (SHARDS, "shards")])
def test_half_of_the_captions_belong_to_other_images(root, tokenizer, files, source):
    dataset = make(root, tokenizer, files, source, masked_words={"probability": 0.0})
    captions = dataset.dataset
    matches = []
    for epoch in range(20):
        for request in requests(dataset, epoch=epoch):
            own = {captions[text] for text in dataset.groups[request.group]}
            for text in dataset[request].texts:
                if text.image_index:
                    matches.append(int(text.targets.parts["relationship"].is_match))
                    assert text.record["is_match"] == bool(matches[-1])
                    assert matches[-1] == 0 or text.record["text"] in own
    assert 0.35 < np.mean(matches) < 0.65


def test_all_captions_are_a_pool_of_texts(root):
    dataset = read(root, SHARDS, "shards")
    sample = dataset.sample(dataset.groups[2])
    assert sample.pool is dataset and list(sample.own_texts) == list(dataset.groups[2])
    assert [dataset[text.index] for text in sample.texts] == [text.words for text in sample.texts]
    assert {text.metadata["image_id"] for text in sample.texts} == {sample.images[0].id}
    assert len(dataset) == len([dataset[text] for text in range(len(dataset))])


def test_only_training_reads_a_corpus_and_it_can_be_left_out(root):
    corpus = read(root).corpus
    assert len(corpus) > 5 and read(root).sample((0,)).corpus is not None
    assert read(root, training=False).corpus is None
    assert read(root, use_corpus=False).corpus is None
    files = {**COCO, "corpus": "corpus/corpus.doc+corpus/corpus.doc"}
    assert len(read(root, files).corpus) == 2 * len(corpus)


def test_indices_are_kept_beside_the_data_or_where_the_settings_say(root, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    read(root, SHARDS, "shards")
    assert any((root / "index").iterdir())
    read(root, SHARDS, "shards", cache="~/cache")
    assert any((tmp_path / "cache").iterdir())


def test_boxes_of_a_features_file_by_image_id(root, tokenizer, tmp_path):
    source = read(root, split="val", training=False)
    scores = np.array([0.2, 0.9, 0.6], dtype=np.float32)
    boxes = np.array([[0, 0, 9, 9], [10, 10, 40, 40], [5, 5, 60, 60]], dtype=np.float32)
    for image_id in source.image_ids():
        record = RegionFeatures(str(image_id), (128, 128), boxes, np.eye(3, dtype=np.float32), scores)
        save_npz(tmp_path / f"{image_id}.npz", record)
    dataset = read(root, split="val", boxes="detections", training=False)
    assert dataset.parts == [{"split": "val", "images": "val"}]
    found, whole = (open_boxes([tmp_path], RULE, with_features=value) for value in (False, True))
    found.require_images(dataset.image_ids(), "val")
    image = examples(dataset, tokenizer, "detections", found)[Request(0, (0,))].images[0]
    np.testing.assert_allclose(image.boxes, boxes[[1, 2]] * 60 / 128)
    image = examples(dataset, tokenizer, "precomputed", whole)[Request(0, (0,))].images[0]
    np.testing.assert_array_equal(image.features, np.eye(3)[[1, 2, 0]])
    np.testing.assert_allclose(image.boxes, boxes[[1, 2, 0]] * 60 / 128)
    assert image.pixels.shape == (60, 60, 3)
    first = open_boxes([tmp_path], RULE, with_features=True, limit=2)
    image = examples(dataset, tokenizer, "precomputed", first)[Request(0, (0,))].images[0]
    np.testing.assert_array_equal(image.features, np.eye(3)[[1, 2]])


def test_shards_are_not_searched_for_their_ids_but_a_missing_one_is_named(root, tokenizer):
    dataset = read(root, SHARDS, "shards")
    assert list(dataset.image_ids()) == [], "millions of names would take long to read"
    reader = open_boxes([root / COCO["detections"]], RULE, with_features=False)
    with refused("dets.json"):
        examples(dataset, tokenizer, "detections", reader)[Request(0, (0,))]


def test_boxes_of_the_official_layout_come_along(root):
    dataset = read(root, OFFICIAL, "json_lines", boxes="detections")
    assert dataset.parts == [], "no other file of boxes is opened"
    boxes = dataset.sample((0,)).images[0].boxes
    assert len(boxes.boxes) == len(boxes.class_probs) and boxes.features is None
    precomputed = read(root, OFFICIAL, "json_lines", boxes="precomputed").sample((0,)).images[0].boxes
    assert len(precomputed.features) == len(precomputed.boxes) and precomputed.image_feature is not None
    assert read(root, OFFICIAL, "json_lines").sample((0,)).images[0].boxes is None


def test_detection_losses_need_objects_and_get_them(root, tokenizer):
    dataset = read(root, objects=True)
    image = examples(dataset, tokenizer, BoxSource.ONLINE, with_objects=True)[Request(0, (0,))].images[0]
    assert len(image.objects.boxes) == len(image.objects.classes) >= 5


def test_annotations_of_other_images_are_named(root):
    files = {**COCO, "instances": "detection/instances_val.json"}
    with refused("instances_val.json", "6 images"):
        read(root, files, boxes="gt")


@pytest.mark.parametrize(
    ("files", "options", "key"),
    [
        (SHARDS, {"source": "shards", "boxes": "gt"}, "data.config.source"),
        ({}, {"source": "shards"}, "data.files.shards"),
        ({}, {"source": "json_lines", "boxes": "precomputed"}, "data.files.features"),
    ],
)
def test_settings_that_do_not_go_together(root, files, options, key):
    with refused(key):
        read(root, files, **options)


def test_joined_splits_are_read_one_after_the_other(root):
    parts = [read(root, split=name) for name in SPLITS]
    joined = read(root, split="+".join(SPLITS))
    assert len(joined) == sum(map(len, parts)) and len(joined.groups) == sum(SPLITS.values())
    assert list(joined.image_ids()) == [name for part in parts for name in part.image_ids()]
    assert [joined[text] for text in range(len(joined))] == [part[text] for part in parts for text in range(len(part))]
    text = len(parts[0]) + 1
    sample, own = joined.sample((text,)), parts[1].sample((1,))
    assert (sample.images[0].id, sample.images[0].locate()) == (own.images[0].id, own.images[0].locate())
    assert sample.images[0].size == own.images[0].size and sample.texts[0].words == own.texts[0].words
    assert text in sample.own_texts and joined.sample((0,)).own_texts == parts[0].sample((0,)).own_texts


def test_folders_of_joined_splits_are_named_by_their_image_sets(root, tmp_path):
    (tmp_path / "captions").mkdir()
    for source, name in zip(SPLITS, ("train2014", "valminusminival2014"), strict=True):
        content = (root / "captions" / f"captions_{source}.json").read_text(encoding="utf-8")
        (tmp_path / "captions" / f"captions_{name}.json").write_text(content, encoding="utf-8")
    files = COCO | {"images": "images/{images}"}
    dataset = read(tmp_path, files, split="train2014+valminusminival2014", use_corpus=False)
    assert dataset.parts == [
        {"split": "train2014", "images": "train2014"},
        {"split": "valminusminival2014", "images": "val2014"},
    ]
    folders = [dataset.sample((text,)).images[0].locate().parent.name for text in (0, len(dataset) - 1)]
    assert folders == ["train2014", "val2014"]


def test_objects_of_vcrs_metadata_files(root):
    """Classes, outlines and boxes above the score, as VisualBERT's first phase for VCR reads them."""
    folder = root / "metadata"
    folder.mkdir(exist_ok=True)
    for split in SPLITS:
        write_metadata(root / COCO["instances"].format(split=split), folder)
    files = {key: COCO[key] for key in ("captions", "images")} | {"metadata": "metadata"}
    dataset = read(root, files, boxes="gt", training=False, min_object_score=0.15)
    known = read(root, boxes="gt", training=False)
    assert dataset.class_names == CLASS_NAMES
    for group in range(len(dataset.groups)):
        found, whole = (one.sample(one.groups[group]).images[0].objects for one in (dataset, known))
        np.testing.assert_allclose(found.boxes, whole.boxes[1:])
        assert found.classes.tolist() == [(number + 1) % len(CLASS_NAMES) for number in whole.classes[1:]]
        assert len(found.outlines) == len(found.boxes) and found.outlines[0][0].shape == (4, 2)
    image = dataset.sample(dataset.groups[0]).images[0]
    file = folder / image.file.with_suffix(".json").name
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | {"width": content["width"] + 1}))
    assert dataset.sample(dataset.groups[0]).images[0].size == (content["height"], content["width"] + 1)
    file.unlink()
    with pytest.raises(FileNotFoundError, match=file.name):
        dataset.sample(dataset.groups[0])
