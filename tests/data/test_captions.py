from __future__ import annotations

import json
import logging
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image

from detector.images import ResizeRule
from e2e_vl.config import DataSettings, ResizeSettings
from e2e_vl.data.caption_settings import CaptionConfig
from e2e_vl.data.caption_sources import CocoCaptions
from e2e_vl.data.captions import CaptionDataset
from e2e_vl.data.collate import collate
from e2e_vl.data.examples import Request
from e2e_vl.data.grouping import GroupedBatchSampler
from e2e_vl.data.loading import BatchLoader
from e2e_vl.data.storage.features.record import RegionFeatures, save_npz
from e2e_vl.engine.build import DATASETS
from e2e_vl.synthetic import make_scenes
from e2e_vl.text import build_vocabulary, load_tokenizer

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


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("captions") / "data"
    make_scenes(root, scenes=SPLITS, seed=5, progress=False)
    return root


@pytest.fixture(scope="module")
def tokenizer(root):
    path = root.parent / "vocab.txt"
    build_vocabulary(CaptionDataset.texts_of(settings(root, COCO), "train"), path)
    return load_tokenizer(path)


def settings(root, files, source="coco", flip=0.5, **config) -> DataSettings:
    resize = ResizeSettings([96], 160, "truncate")
    return DataSettings(
        name="captions",
        root=str(root),
        files=dict(files),
        resize=resize,
        flip=flip,
        config={"source": source, **config},
    )


def make(root, tokenizer, files, source="coco", split="train", *, boxes="online", training=True, flip=0.5, **config):
    return CaptionDataset.from_settings(
        settings(root, files, source, flip, **config),
        tokenizer,
        split,
        boxes=boxes,
        training=training,
        seed=7,
        channel_order="BGR",
        with_objects=False,
    )


def requests(dataset, texts_per_image=None, **options):
    sampler = GroupedBatchSampler(dataset.groups, 1, texts_per_image, shuffle=False, **options)
    return [request for batch in sampler for request in batch]


def restored(text, tokenizer) -> str:
    labels = text.targets["mlm_labels"]
    return tokenizer.decode(np.where(labels >= 0, labels, text.input_ids))


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
        dataset = make(root, tokenizer, files, source, split, boxes=boxes, training=training, flip=flip)
        assert len(dataset.groups) == SPLITS[split]
        assert sorted(text for group in dataset.groups for text in group) == list(range(len(dataset)))
        examples = [dataset[request] for request in requests(dataset)]
        batch = collate(examples, (0, 0, 0), (1, 1, 1))
        assert len(batch.images.names) == SPLITS[split]
        with_corpus = "corpus" in files and training
        assert len(batch) == len(dataset) * (2 if with_corpus else 1)
        captions = batch.looks_at[:, 0] >= 0
        assert int(captions.sum()) == len(dataset)
        assert [record["text_index"] for record in batch.records if record] == list(range(len(dataset)))
        assert batch.targets["is_match"].tolist() == [1 if is_caption else -1 for is_caption in captions]
        assert batch.targets["mlm_labels"].shape == batch.texts.input_ids.shape
        assert (batch.targets["mlm_labels"] >= 0).any()
        assert (batch.boxes is None) == (boxes == "online")
        names = {"gt": ["object_class"], "detections": ["class_probs"], "precomputed": ["class_probs"]}.get(boxes, [])
        names = [] if (source, boxes) == ("coco", "detections") else names
        assert sorted(batch.region_targets) == names
        for name in names:
            assert [len(rows) for rows in batch.region_targets[name]] == [len(rows) for rows in batch.boxes]
        assert (batch.images.precomputed is not None) == (boxes == "precomputed")


def test_a_caption_is_masked_and_can_be_restored(root, tokenizer):
    dataset = make(root, tokenizer, COCO, word_probability=0.5)
    source = CocoCaptions(root / "captions" / "captions_train.json", root / "images" / "train2014")
    chosen = 0
    for request in requests(dataset, epoch=1):
        example = dataset[request]
        assert len(example.images) == 1
        assert [text.looks_at for text in example.texts] == [(0,), ()] * len(request.texts)
        for index, caption, corpus in zip(request.texts, example.texts[::2], example.texts[1::2], strict=True):
            sentence = source.caption(index)
            assert caption.record["sent"] == sentence
            assert restored(caption, tokenizer).replace(" ", "") == f"[CLS]{sentence}[SEP]".lower().replace(
                "[cls]", "[CLS]"
            ).replace("[sep]", "[SEP]").replace(" ", "")
            assert caption.targets["mlm_labels"][[0, -1]].tolist() == [-1, -1]
            chosen += int((caption.targets["mlm_labels"] >= 0).sum())
            assert corpus.input_ids.shape == (64,)
            assert corpus.record == {}
    assert chosen > 50


def test_masks_depend_on_seed_epoch_and_text_only(root, tokenizer):
    dataset = make(root, tokenizer, COCO, word_probability=0.5, relationship=0.5)

    def texts(epoch: int, texts_per_image):
        found = {}
        for request in requests(dataset, texts_per_image, epoch=epoch):
            own = dataset[request].texts
            for index, caption, corpus in zip(request.texts, own[::2], own[1::2], strict=True):
                found[index] = (
                    caption.input_ids.tolist(),
                    corpus.input_ids.tolist(),
                    int(caption.targets["region_seed"]),
                )
        return found

    assert texts(0, None) == texts(0, 1)
    assert all(one != other for one, other in zip(texts(0, 1).values(), texts(1, 1).values(), strict=True))
    assert len({seed for _, _, seed in texts(0, 1).values()}) == len(dataset)
    assert len({tuple(ids) for _, ids, _ in texts(0, 1).values()}) > len(dataset) / 2, "the corpus is drawn at random"


@pytest.mark.parametrize(
    ("files", "source"), [({**SHARDS, "corpus": COCO["corpus"]}, "shards"), (OFFICIAL, "json_lines")]
)
def test_workers_read_what_one_process_reads(root, tokenizer, files, source):
    dataset = make(root, tokenizer, files, source, relationship=0.5)
    dataset[Request(0, (0,))]  # files are open before the workers are forked
    joined = partial(collate, pixel_mean=(0, 0, 0), pixel_std=(1, 1, 1))

    def batches(workers: int):
        return list(BatchLoader(dataset, GroupedBatchSampler(dataset.groups, 2, 1, seed=3), joined, workers=workers))

    for one, other in zip(batches(0), batches(2), strict=True):
        assert torch.equal(one.images.pixels, other.images.pixels)
        assert torch.equal(one.texts.input_ids, other.texts.input_ids)
        assert {name: values.tolist() for name, values in one.targets.items()} == {
            name: values.tolist() for name, values in other.targets.items()
        }
        assert one.records == other.records


def test_the_choice_of_words_does_not_depend_on_the_mirroring(root, tokenizer):
    dataset = make(root, tokenizer, COCO, word_probability=0.15)
    masked = {True: [], False: []}
    for epoch in range(30):
        for request in requests(dataset, 1, epoch=epoch)[::5]:
            example = dataset[request]
            first_word = example.texts[0].targets["mlm_labels"][1] >= 0
            masked[example.texts[0].record["flipped"]].append(first_word)
    shares = {flipped: np.mean(values) for flipped, values in masked.items()}
    assert 0 < shares[True] < 0.4
    assert 0 < shares[False] < 0.4


def test_mirroring_moves_boxes_and_pixels_and_leaves_the_words(root, tokenizer):
    plain = make(root, tokenizer, COCO, boxes="gt", flip=0.0, word_probability=0.0)
    mirrored = make(root, tokenizer, COCO, boxes="gt", flip=1.0, word_probability=0.0)
    request = Request(2, tuple(plain.groups[2]))
    one, other = plain[request], mirrored[request]
    np.testing.assert_array_equal(one.images[0].pixels[:, ::-1], other.images[0].pixels)
    width = one.images[0].pixels.shape[1]
    np.testing.assert_allclose(other.images[0].boxes[:, [2, 0]], width - 1 - one.images[0].boxes[:, [0, 2]], atol=1.01)
    for first, second in zip(one.texts[::2], other.texts[::2], strict=True):
        np.testing.assert_array_equal(first.input_ids, second.input_ids)
    evaluation = make(root, tokenizer, COCO, "coco", "val", training=False, flip=1.0)
    assert not evaluation[Request(0, (0,))].texts[0].record["flipped"]


@pytest.mark.parametrize(("files", "source"), [(COCO, "coco"), (SHARDS, "shards")])
def test_half_of_the_captions_belong_to_other_images(root, tokenizer, files, source):
    dataset = make(root, tokenizer, files, source, relationship=0.5, word_probability=0.0)
    matches = []
    for epoch in range(20):
        for request in requests(dataset, epoch=epoch):
            own = {dataset.source.caption(text) for text in dataset.groups[request.group]}
            for text in dataset[request].texts:
                if text.looks_at:
                    matches.append(int(text.targets["is_match"]))
                    assert text.record["is_match"] == bool(matches[-1])
                    assert matches[-1] == 0 or text.record["sent"] in own
    assert 0.35 < np.mean(matches) < 0.65
    whole = make(root, tokenizer, files, source, relationship=0.0)
    assert all(text.targets["is_match"] for r in requests(whole) for text in whole[r].texts if text.looks_at)


def test_blank_and_cut_texts(root, tokenizer):
    options = settings(root, COCO)
    options.blank_text = True
    build = {"boxes": "online", "training": False, "seed": 0, "channel_order": "BGR", "with_objects": False}
    blank = CaptionDataset.from_settings(options, tokenizer, "val", **build)
    [text] = blank[Request(0, (0,))].texts
    assert text.input_ids.tolist() == [tokenizer.cls_token_id, tokenizer.sep_token_id]
    options.blank_text, options.max_text_length = False, 5
    cut = CaptionDataset.from_settings(options, tokenizer, "val", **build)
    [text] = cut[Request(0, (0,))].texts
    assert len(text.input_ids) == len(text.targets["mlm_labels"]) == 5
    assert text.input_ids[-1] == tokenizer.sep_token_id
    assert text.record["cut_wordpieces"] > 0


@pytest.mark.parametrize(("files", "source", "boxes"), [(COCO, "coco", "gt"), (OFFICIAL, "json_lines", "precomputed")])
def test_blank_images(root, tokenizer, files, source, boxes):
    options = settings(root, files, source, flip=0)
    options.blank_image = True
    build = {"boxes": boxes, "training": False, "seed": 0, "channel_order": "BGR", "with_objects": False}
    [image] = CaptionDataset.from_settings(options, tokenizer, "val", **build)[Request(0, (0,))].images
    assert len(np.unique(image.pixels.reshape(-1, 3), axis=0)) == 1
    assert image.features is None or not (image.features.any() or image.image_feature.any())


def test_the_corpus_can_be_left_out(root, tokenizer):
    with_corpus, without = (make(root, tokenizer, COCO, use_corpus=use) for use in (True, False))
    assert [text.looks_at for text in with_corpus[Request(0, (0,))].texts] == [(0,), ()]
    assert [text.looks_at for text in without[Request(0, (0,))].texts] == [(0,)]


def test_boxes_of_a_features_file_by_image_id(root, tokenizer, tmp_path):
    source = CocoCaptions(root / "captions" / "captions_val.json", root / "images" / "train2014")
    store = tmp_path / "features"
    store.mkdir()
    scores = np.array([0.2, 0.9, 0.6], dtype=np.float32)
    boxes = np.array([[0, 0, 9, 9], [10, 10, 40, 40], [5, 5, 60, 60]], dtype=np.float32)
    for image_id in source.image_ids:
        record = RegionFeatures(str(image_id), (128, 128), boxes, np.eye(3, dtype=np.float32), scores)
        save_npz(store / f"{image_id}.npz", record)
    options = settings(root, {**COCO, "detections": str(store), "features": str(store)}, flip=0.0)
    options.boxes.selection.min_regions = 1
    build = {"training": False, "seed": 0, "channel_order": "BGR", "with_objects": False}
    found = CaptionDataset.from_settings(options, tokenizer, "val", boxes="detections", **build)
    np.testing.assert_allclose(found[Request(0, (0,))].images[0].boxes, boxes[[1, 2]] * 96 / 128)
    whole = CaptionDataset.from_settings(options, tokenizer, "val", boxes="precomputed", **build)
    image = whole[Request(0, (0,))].images[0]
    np.testing.assert_array_equal(image.features, np.eye(3)[[1, 2, 0]])
    np.testing.assert_allclose(image.boxes, boxes[[1, 2, 0]] * 96 / 128)
    assert image.pixels.shape == (96, 96, 3)
    with pytest.raises(ValueError, match=r"features: has no regions of image \d+ and 5 more"):
        CaptionDataset.from_settings(options, tokenizer, "train", boxes="detections", **build)


def test_detection_losses_need_objects_and_get_them(root, tokenizer):
    build = {"boxes": "online", "training": True, "seed": 0, "channel_order": "BGR", "with_objects": True}
    dataset = CaptionDataset.from_settings(settings(root, COCO), tokenizer, "train", **build)
    objects = dataset[Request(0, (0,))].images[0].objects
    assert len(objects.boxes) == len(objects.classes) >= 5
    dataset.check_classes(100)
    with pytest.raises(ValueError, match="but the detector has 2 classes"):
        dataset.check_classes(2)
    with pytest.raises(ValueError, match=r"captions has no data.files.instances"):
        CaptionDataset.from_settings(settings(root, SHARDS, "shards"), tokenizer, "train", **build)


def broken(root, tmp_path, tokenizer, number: int, **options) -> CaptionDataset:
    """A copy of the images of which the first `number` are damaged."""
    folder = tmp_path / "images"
    folder.mkdir()
    dataset = make(root, tokenizer, {**COCO, "images": str(folder)}, **options)
    for group in range(len(dataset.groups)):
        path = dataset.source.image(group)
        good = (root / "images" / "train2014" / path.name).read_bytes()
        path.write_bytes(good[:100] if group < number else good)
    return dataset


def test_a_broken_image_is_an_error_that_names_it_and_the_way_out(root, tmp_path, tokenizer):
    dataset = broken(root, tmp_path, tokenizer, 1)
    with pytest.raises(ValueError, match=r"COCO_train2014_000000000001.jpg is .*skip_broken=true"):
        dataset[Request(0, (0,))]
    dataset.source.image(0).unlink()
    with pytest.raises(FileNotFoundError, match=r"image 1 is missing.*skip_broken=true"):
        dataset[Request(0, (0,))]


def test_broken_images_may_be_replaced_but_never_in_silence(root, tmp_path, tokenizer, caplog):
    dataset = broken(root, tmp_path, tokenizer, 2, skip_broken=True)
    with caplog.at_level(logging.WARNING):
        example = dataset[Request(0, tuple(dataset.groups[0][:2]))]
    assert example.texts[0].record["image_id"] == "3"
    assert [text.record["text_index"] for text in example.texts[::2]] == list(dataset.groups[2][:2])
    assert example.texts[0].record["sent"] == dataset.source.caption(dataset.groups[2][0])
    assert dataset.broken == {0, 1}
    assert "COCO_train2014_000000000001.jpg" in caplog.text
    assert "Image 3 takes its place (2 unreadable images so far" in caplog.text
    evaluation = make(root, tokenizer, {**COCO, "images": str(tmp_path / "images")}, training=False, skip_broken=True)
    with pytest.raises(ValueError, match=r"000000000001\.jpg"):
        evaluation[Request(0, (0,))]


def test_nothing_but_broken_images_is_an_error(root, tmp_path, tokenizer):
    dataset = broken(root, tmp_path, tokenizer, 6, skip_broken=True)
    with pytest.raises(ValueError, match=r"captions_train.json: 20 images in a row cannot be read"):
        dataset[Request(0, (0,))]


def test_annotations_of_another_image_size_are_an_error(root, tmp_path, tokenizer):
    dataset = broken(root, tmp_path, tokenizer, 0, boxes="gt", skip_broken=True)  # it is not broken
    Image.new("RGB", (64, 64)).save(dataset.source.image(0))
    with pytest.raises(ValueError, match=r"is 64 x 64 pixels, but its annotation file says 128 x 128"):
        dataset[Request(0, (0,))]


def test_coco_files_with_errors(tmp_path):
    content = {
        "images": [{"id": 1, "file_name": "a.jpg"}, {"id": 2, "file_name": "b.jpg"}],
        "annotations": [{"image_id": 1, "id": 5, "caption": "a"}],
    }

    def read(**changes) -> CocoCaptions:
        (tmp_path / "captions.json").write_text(json.dumps({**content, **changes}))
        return CocoCaptions(tmp_path / "captions.json", tmp_path)

    assert read().image_ids == [1]
    assert read().image_size(0) is None
    for changes, message in (
        ({"images": [{"id": 1}]}, "image number 0 has no 'file_name'"),
        ({"images": content["images"][:1] * 2}, "image 1 is listed twice"),
        ({"annotations": [{"image_id": 3, "caption": "a"}]}, "caption number 0 is about image 3, which is not among"),
        ({"annotations": [{"image_id": 1, "caption": " "}]}, r"caption number 0 \(of image 1\) is empty"),
        ({"annotations": [{"image_id": 1}]}, "caption number 0 has no 'caption'"),
        ({"annotations": []}, "there are no captions"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            read(**changes)
        assert "captions.json" in str(caught.value)


@pytest.mark.parametrize(
    ("files", "options", "message"),
    [
        (COCO, {"source": "laion"}, "data.config.source is 'laion'; it must be one of coco, shards, vl_bert"),
        (COCO, {"word_probability": 15}, "data.config.word_probability is 15"),
        (COCO, {"masking": 0.1}, "data.config has the unknown key 'masking'; it takes source,"),
        (COCO, {"skip_broken": "yes"}, "data.config.skip_broken is 'yes'; it must be a bool"),
        (COCO, {"boxes": "nowhere"}, "cannot have boxes from 'nowhere'"),
        (COCO, {"boxes": "precomputed"}, "set data.flip to 0"),
        (SHARDS, {"source": "shards", "boxes": "gt"}, "need source coco and data.files.instances"),
        ({}, {"source": "shards"}, "data.files.shards is not set"),
        (
            {**SHARDS, "detections": COCO["detections"]},
            {"source": "shards", "boxes": "detections"},
            "COCO's images only",
        ),
    ],
)
def test_settings_that_make_no_sense(root, tokenizer, files, options, message):
    with pytest.raises(ValueError, match=message):
        make(root, tokenizer, files, **options)


def test_sizes_of_training_images_are_drawn_and_the_dataset_can_be_chosen_by_name(root, tokenizer):
    assert DATASETS["captions"] is CaptionDataset
    source = CocoCaptions(root / "captions" / "captions_train.json", root / "images" / "train2014")
    rules = [ResizeRule(size, 200, "truncate") for size in (32, 48)]
    dataset = CaptionDataset(source, tokenizer, rules, CaptionConfig(), seed=1)
    sizes = {dataset[Request(0, (0,), epoch)].images[0].pixels.shape[0] for epoch in range(20)}
    assert sizes == {32, 48}
    assert torch.is_tensor(collate([dataset[Request(0, (0,))]], (0, 0, 0), (1, 1, 1)).targets["region_seed"])
