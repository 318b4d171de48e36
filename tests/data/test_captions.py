"""Captions of every source: COCO, shards of img2dataset, and the layout of the official VL-BERT code."""

from __future__ import annotations

import base64
import io
import itertools
import json
import pickle
import tarfile
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from detector.config import SelectionRule
from e2e_vl.config import DataConfig
from e2e_vl.data.base import open_options
from e2e_vl.data.batching import BatchLoader, EncodedDataset, GroupedBatchSampler, Request, collate
from e2e_vl.data.captions import CaptionDataset, CocoCaptions, ShardCaptions, VLBertCaptions
from e2e_vl.data.config import CLASS_NAMES
from e2e_vl.data.image_loader import open_boxes
from e2e_vl.samples import ImageBytes
from e2e_vl.structures import Batch
from e2e_vl.synthetic.generate import make_scenes
from e2e_vl.text import build_vocabulary, load_tokenizer
from tests.data.helpers import (
    assert_same_from_tables,
    examples,
    open_dataset,
    plain,
    read_by_processes,
    refused,
    write_json,
    write_json_lines,
    write_metadata,
)
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


def settings(root, files=COCO, source="coco", **config) -> DataConfig:
    return DataConfig(name="captions", root=str(root), files=dict(files), config={"source": source, **config})


def read(root, files=COCO, source="coco", split="train", boxes="online", *, training=True, objects=False, **config):
    data_settings = settings(root, files, source, **config)
    return open_dataset(CaptionDataset, data_settings, split, boxes, objects=objects, training=training)


def make(
    root, tokenizer, files=COCO, source="coco", split="train", boxes="online", *, training=True, flip=0.5, **options
) -> EncodedDataset:
    """Captions and corpus in the wording of pre-training; `options` are objectives."""
    dataset = read(root, files, source, split, boxes, training=training)
    reader = None
    if boxes in ("detections", "precomputed") and dataset.split_values:
        reader = open_boxes([root / files[boxes]], RULE, with_features=False)
    preprocessor = make_preprocessor(tokenizer, **({"masked_text": 1.0, "relationship": 1.0} | options))
    return examples(dataset, preprocessor, boxes, reader, seed=7, flip_probability=flip)


@pytest.mark.parametrize(
    ("files", "source", "boxes"),
    [
        (COCO, "coco", "gt"),
        (COCO, "coco", "detections"),
        (SHARDS, "shards", "online"),
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
        requests = [Request(number, tuple(group)) for number, group in enumerate(dataset.groups)]
        batch = collate([dataset[request] for request in requests])
        with_corpus = "corpus" in files and training
        assert len(batch) == len(batch.masking.seeds) == len(dataset) * (2 if with_corpus else 1)
        captions = batch.image_index[:, 0] >= 0
        assert [record["text_index"] for record in batch.records if record] == list(range(int(captions.sum())))
        parts = batch.targets.parts
        assert (parts["relationship"].is_match >= 0).tolist() == captions.tolist()
        for name in ("masked_words", "masked_text"):
            assert (parts[name].labels >= 0).any() == (name == "masked_words" or with_corpus)
        assert (batch.boxes is None) == (boxes == "online")
        labels = batch.region_labels
        assert (labels.classes is not None) == (boxes == "gt")
        assert (labels.class_probs is not None) == (source == "json_lines")
        for rows in filter(None, (labels.classes, labels.class_probs)):
            assert [len(boxes) for boxes in rows] == [len(boxes) for boxes in batch.boxes]
        assert (batch.images.precomputed is not None) == (boxes == "precomputed")


@pytest.mark.parametrize(
    ("files", "source"), [({**SHARDS, "corpus": COCO["corpus"]}, "shards"), (OFFICIAL, "json_lines")]
)
def test_workers_read_what_one_process_reads(root, tokenizer, files, source):
    dataset = make(root, tokenizer, files, source)
    dataset[Request(0, (0,))]  # files are open before the workers are forked

    def batches(workers: int) -> list[Batch]:
        return list(BatchLoader(dataset, GroupedBatchSampler(dataset.groups, 2, 1, seed=3), collate, workers=workers))

    assert plain(batches(0)) == plain(batches(2))


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


def test_shards_are_not_searched_for_their_ids_but_a_missing_one_is_named(root, tokenizer):
    dataset = read(root, SHARDS, "shards")
    assert list(dataset.image_ids()) == [], "millions of names would take long to read"
    reader = open_boxes([root / COCO["detections"]], RULE, with_features=False)
    with refused("dets.json"):
        examples(dataset, tokenizer, "detections", reader)[Request(0, (0,))]


@pytest.mark.parametrize(
    ("files", "options", "key"),
    [
        (SHARDS, {"source": "shards", "boxes": "gt"}, "data.config.source"),
        ({**COCO, "instances": "detection/instances_val.json"}, {"boxes": "gt"}, "instances_val.json: 6 images"),
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
    assert len(joined.groups) == sum(SPLITS.values())
    assert list(joined.image_ids()) == [name for part in parts for name in part.image_ids()]
    assert [joined[text] for text in range(len(joined))] == [part[text] for part in parts for text in range(len(part))]
    text = len(parts[0]) + 1
    sample = joined.sample((text,))
    expected = parts[1].sample((1,))
    assert sample.images[0].id == expected.images[0].id
    assert sample.images[0].locate() == expected.images[0].locate()
    assert text in sample.own_texts and joined.sample((0,)).own_texts == parts[0].sample((0,)).own_texts


@pytest.mark.parametrize("split", ["train", "val+train", "train+train"])
def test_tables_give_the_same_captions(root, tmp_path, monkeypatch, caplog, split):
    for name in SPLITS:
        content = json.loads((root / "captions" / f"captions_{name}.json").read_text(encoding="utf-8"))
        content["annotations"].append({"image_id": content["images"][0]["id"], "caption": " "})
        write_json(tmp_path / "captions" / f"captions_{name}.json", content)
    assert_same_from_tables(tmp_path, monkeypatch, caplog, lambda: read(tmp_path, COCO, split=split, use_corpus=False))


def test_folders_of_joined_splits_are_named_by_their_image_sets(root, tmp_path):
    for source, name in zip(SPLITS, ("train2014", "valminusminival2014"), strict=True):
        content = json.loads((root / "captions" / f"captions_{source}.json").read_text(encoding="utf-8"))
        write_json(tmp_path / "captions" / f"captions_{name}.json", content)
    files = COCO | {"images": "images/{images}"}
    dataset = read(tmp_path, files, split="train2014+valminusminival2014", use_corpus=False)
    assert dataset.split_values == [
        {"split": "train2014", "images": "train2014"},
        {"split": "valminusminival2014", "images": "val2014"},
    ]
    folders = [dataset.sample((text,)).images[0].locate().parent.name for text in (0, len(dataset) - 1)]
    assert folders == ["train2014", "val2014"]


def test_boxes_are_of_images_of_the_size_in_the_instances(root, tmp_path):
    content = json.loads((root / COCO["captions"].format(split="val")).read_text(encoding="utf-8"))
    images = [{key: image[key] for key in ("id", "file_name")} for image in content["images"]]
    write_json(tmp_path / "captions.json", content | {"images": images})
    files = COCO | {"captions": str(tmp_path / "captions.json")}
    image, original = (read(root, names, split="val", boxes="gt").sample((0,)).images[0] for names in (files, COCO))
    assert image.size == original.size is not None


def test_objects_of_vcrs_metadata_files(root):
    folder = root / "metadata"
    folder.mkdir(exist_ok=True)
    write_metadata(root / COCO["instances"].format(split="train"), folder)
    files = {key: COCO[key] for key in ("captions", "images")} | {"metadata": "metadata"}
    dataset = read(root, files, boxes="gt", training=False, min_object_score=0.15)
    annotated = read(root, boxes="gt", training=False)
    assert dataset.class_names == CLASS_NAMES
    for texts in dataset.groups:
        objects = dataset.sample(texts).images[0].objects
        all_objects = annotated.sample(texts).images[0].objects
        np.testing.assert_allclose(objects.boxes, all_objects.boxes[1:])  # the first one has the score 0.1
    file = folder / dataset.sample((0,)).images[0].file.with_suffix(".json").name
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | {"width": content["width"] + 1}))
    assert dataset.sample((0,)).images[0].size == (content["height"], content["width"] + 1)


COCO_FILE = {
    "images": [
        {"id": 5, "file_name": "a.jpg", "height": 3, "width": 4},
        {"id": 1, "file_name": "b.jpg"},
        {"id": 2, "file_name": "c.jpg"},
    ],
    "annotations": [
        {"image_id": 1, "id": 7, "caption": "one"},
        {"image_id": 5, "id": 8, "caption": "two"},
        {"image_id": 1, "id": 9, "caption": "three"},
    ],
}


@pytest.mark.parametrize("number", [int, float, str])
def test_coco_captions_are_numbered_image_by_image(tmp_path, number):
    rows = [row | {"image_id": number(row["image_id"])} for row in COCO_FILE["annotations"]]
    path = write_json(tmp_path / "captions.json", COCO_FILE | {"annotations": rows})
    source = CocoCaptions([(path, tmp_path / "images")])
    assert list(source.groups) == [[0], [1, 2]], "an image without a caption is left out"
    assert [source.caption(text) for text in range(3)] == ["two", "one", "three"]
    assert [source.name(group) for group in range(2)] == ["5", "1"]
    assert source.image(1) == tmp_path / "images" / "b.jpg"
    assert [source.image_size(group) for group in range(2)] == [(3, 4), None]
    assert source.boxes(0) is None


def test_blank_captions_and_those_of_other_images_are_skipped(tmp_path, caplog):
    odd = [{"image_id": 1, "caption": " "}, {"image_id": 8, "caption": "other"}]
    content = COCO_FILE | {"annotations": [*odd, *COCO_FILE["annotations"]]}
    source = CocoCaptions([(write_json(tmp_path / "captions.json", content), tmp_path)])
    assert [source.caption(text) for text in range(len(source.groups.texts))] == ["two", "one", "three"]
    assert "skipped 1 blank captions, by image: 1" in caplog.text
    assert "skipped 1 captions of images that the file does not list: 8" in caplog.text
    with refused("captions.json", "no caption"):
        CocoCaptions([(write_json(tmp_path / "captions.json", COCO_FILE | {"annotations": odd}), tmp_path)])


def test_two_images_with_one_id_are_named(tmp_path):
    path = write_json(
        tmp_path / "captions.json", COCO_FILE | {"images": [*COCO_FILE["images"], {"id": 1, "file_name": "d.jpg"}]}
    )
    with refused("captions.json", "two images have the id 1", "d.jpg"):
        CocoCaptions([(path, tmp_path)])


def jpeg(value: int, size=(20, 10)) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.full((size[1], size[0], 3), value, dtype=np.uint8)).save(stream, "JPEG")
    return stream.getvalue()


def write(path: Path, members: list[tuple[str, bytes]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def record(key: str, caption: str | None, image: bytes | None = b"x", suffix: str = "jpg") -> list[tuple[str, bytes]]:
    members = [(f"{key}.json", b"{}")]
    if image is not None:
        members.append((f"{key}.{suffix}", image))
    if caption is not None:
        members.append((f"{key}.txt", caption.encode()))
    return members


@pytest.fixture
def folder(tmp_path):
    write(
        tmp_path / "cc" / "00000.tar",
        [
            *record("000000000", "A red box.", jpeg(10)),
            *record("000000002", "eine Hütte\n", jpeg(20, (30, 30))),
            *record("000000003", None, jpeg(30)),
            *record("000000004", " \n", jpeg(40)),
            *record("000000005", "lost", None),
            *record("000000006", "empty", b""),
        ],
    )
    write(tmp_path / "cc" / "00001.tar", record("000010000", "last", jpeg(50), "PNG"))
    return tmp_path / "cc"


def test_records_of_all_shards_in_order(folder, tmp_path, caplog):
    source = ShardCaptions(folder, tmp_path / "cache")
    examples = "; ".join(f"00000000{number} of 00000.tar" for number in (3, 4, 5, 6))
    assert f"skipped 4 records without an image or a caption: {examples}" in caplog.text
    for opened in (source, pickle.loads(pickle.dumps(source))):
        assert [opened.caption(i) for i in range(3)] == ["A red box.", "eine Hütte", "last"]
        assert [opened.name(i) for i in range(3)] == ["000000000", "000000002", "000010000"]
    assert list(source.groups) == [[0], [1], [2]]
    image = source.image(1)
    assert image.content == jpeg(20, (30, 30))
    assert image.name == f"{folder / '00000.tar'}: 000000002.jpg"
    assert source.image_size(0) is source.boxes(0) is None
    write(folder / "00001.tar", [*record("a", "new"), *record("b", "newer")])
    changed = ShardCaptions(folder, tmp_path / "cache")
    assert [changed.caption(i) for i in range(4)] == ["A red box.", "eine Hütte", "new", "newer"]


def test_a_pattern_names_some_shards_and_names_may_be_long(tmp_path):
    """The header of a member holds only the beginning of its name, and only ASCII letters."""
    for number in range(12):
        write(tmp_path / "cc" / f"{number:05d}.tar", record(f"part.d/{'é' * 120}{number}", f"caption {number}"))
    source = ShardCaptions(tmp_path / "cc" / "0000*.tar", tmp_path / "cache")
    assert len(source.groups) == 10
    assert source.name(9) == f"part.d/{'é' * 120}9"


def test_boxes_need_one_name_per_image_of_all_shards(tmp_path):
    for number, keys in enumerate((("1", "2"), ("2", "3"))):
        members = [part for key in keys for part in record(key, f"caption {key}", jpeg(0))]
        write(tmp_path / "train" / f"{number}.tar", members)
    files = {"shards": "{split}", "detections": "dets.json"}
    assert len(read(tmp_path, files, "shards", boxes="online")) == 4
    with refused("train: 1 images have the name of an earlier one, such as 2,"):
        read(tmp_path, files, "shards", boxes="detections")


@pytest.mark.parametrize(("shuffle", "filling"), [(True, 3), (False, 0)])
def test_two_processes_with_two_workers_read_every_record_of_all_shards_once(tmp_path, shuffle, filling):
    """Shards are not dealt to processes or workers, so their number and sizes do not matter."""
    records = [record(f"{number:09d}", f"caption {number}") for number in range(21)]
    for shard, (first, last) in enumerate(((0, 11), (11, 12), (12, 21))):
        write(tmp_path / "train" / f"{shard:05d}.tar", list(itertools.chain.from_iterable(records[first:last])))
    dataset = read(tmp_path, {"shards": "{split}"}, "shards")
    rows = read_by_processes(dataset, 4, shuffle=shuffle, seed=3)
    counts = Counter(words for *_, words in rows)
    assert set(counts) == {f"caption {number}" for number in range(21)}
    assert len(rows) == 21 + filling and max(counts.values()) <= 2
    assert {row[:2] for row in rows} == {(0, 0), (0, 1), (1, 0), (1, 1)}, "all workers of both read"


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_shards_of_every_kind_of_header(tmp_path, format):
    """Long names, which take headers of their own, and folders and links, which are no records."""
    keys = ["first", f"{'folder' * 20}/second", f"folder/{'third' * (30 if format != tarfile.USTAR_FORMAT else 15)}"]
    path = tmp_path / "cc" / "00000.tar"
    path.parent.mkdir()
    with tarfile.open(path, "w", format=format) as tar:
        for number, key in enumerate(keys):
            special = tarfile.TarInfo(f"special{number}.jpg")
            special.type = (tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE)[number]
            special.linkname = "first.jpg"
            tar.addfile(special)
            for name, content in record(key, f"caption {number}", bytes([number + 1]) * 600):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                member.mtime = 1.5  # a header of its own in PAX
                tar.addfile(member, io.BytesIO(content))
    with tarfile.open(path) as tar:
        offsets = {member.name: member.offset for member in tar}
    source = ShardCaptions(path.parent, tmp_path / "cache")
    assert [source.name(number) for number in range(len(source.groups))] == keys
    for number, key in enumerate(keys):
        assert source.caption(number) == f"caption {number}"
        assert source.image(number).content == bytes([number + 1]) * 600
        assert next(iter(source.contents()))[number, 1:3].tolist() == [offsets[f"{key}.jpg"], offsets[f"{key}.txt"]]


def test_shards_that_cannot_be_used(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        ShardCaptions(tmp_path / "nowhere", tmp_path)
    path = tmp_path / "cc" / "00000.tar"
    whole = write(path, [*record("a", "caption", b"i" * 600), *record("b", "other")]).read_bytes()
    header = whole.index(b"b.json")
    damaged = whole[:header] + b"?" * 512 + whole[header + 512 :]
    other_size = bytearray(whole)
    other_size[header + 134] ^= 1  # which the checksum shows
    contents = [b"", b"not a tar file" * 100, damaged, bytes(other_size)]
    contents += [whole[:size] for size in (700, 1024, 1300, 3072)]
    for content in contents:
        path.write_bytes(content)
        with refused("00000.tar"):
            ShardCaptions(path.parent, tmp_path)


def test_two_files_of_a_kind_in_a_record_are_named(tmp_path):
    for number, name in enumerate(("a.jpg", "a.png", "a.txt")):
        folder = tmp_path / str(number)
        write(folder / "00000.tar", [*record("a", "one"), (name, b"two")])
        with refused("00000.tar", "the record /a has two files", name):
            ShardCaptions(folder, tmp_path)


def test_files_of_macos_in_shards_and_beside_them_are_left_out(tmp_path):
    path = write(tmp_path / "cc" / "00000.tar", [("._a.jpg", b"\0\5"), ("._a.txt", b"\0\5"), *record("a", "one")])
    (path.parent / "._00000.tar").write_bytes(b"\0\5")
    for shards in (path.parent, path.parent / "*.tar"):
        source = ShardCaptions(shards, tmp_path)
        assert [source.caption(text) for text in range(len(source.groups))] == ["one"]


BOXES = np.array([[0, 0, 10, 10], [5, 5, 20, 15], [1, 2, 3, 4]], dtype=np.float32)
CLASSES = np.array([[0.1, 0.6, 0.3], [0.8, 0.1, 0.1], [0.0, 0.3, 0.7]], dtype=np.float32)
FEATURES = np.arange(12, dtype=np.float32).reshape(3, 4)


def encoded(values: np.ndarray) -> str:
    return base64.encodebytes(values.tobytes()).decode()  # with line breaks, as the official files have them


def frcnn(**changes) -> dict:
    content = {"image_w": 20, "image_h": 15, "num_boxes": 3, "boxes": encoded(BOXES), "classes": encoded(CLASSES)}
    return {**content, "features": encoded(FEATURES), **changes}


class Official:
    """The layout on disk; change its contents, then `write`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.lines = [
            {
                "image": f"train_image.zip@/{i:08d}.jpg",
                "caption": ["word", f"w{i}", "."],
                "frcnn": f"train_frcnn.{i % 2}.zip@/{i:08d}.json",
            }
            for i in range(4)
        ]
        self.files = {f"{i:08d}.json": json.dumps(frcnn(image_w=20 + i)) for i in range(4)}

    def write(self) -> VLBertCaptions:
        write_json_lines(self.root / "train_frcnn.json", self.lines)
        members = {line["image"]: f"jpeg {number}" for number, line in enumerate(self.lines)}
        members |= {f"train_frcnn.{int(name[:8]) % 2}.zip@/{name}": content for name, content in self.files.items()}
        for location, content in members.items():
            archive, name = location.split("@/")
            with zipfile.ZipFile(self.root / archive, "a") as file:
                file.writestr(name, content)
        return self.read()

    def read(self, **options) -> VLBertCaptions:
        return VLBertCaptions(self.root / "train_frcnn.json", self.root.parent / "cache", **options)


@pytest.fixture
def official(tmp_path):
    return Official(tmp_path / "cc")


def test_images_and_boxes_in_archives(official):
    source = official.write()
    assert [source.caption(i) for i in range(4)] == [f"word w{i} ." for i in range(4)]
    image = source.image(2)
    assert isinstance(image, ImageBytes) and image.content == b"jpeg 2"
    assert image.name.endswith("train_image.zip: 00000002.jpg")
    assert source.boxes(0) is None, "not asked for"
    boxes = official.read(with_boxes=True).boxes(3)
    assert boxes.image_size == (15, 23) and boxes.features is None
    boxes = official.read(with_features=True).boxes(0)
    order = [1, 2, 0]  # by the best class: 0.8, 0.7, 0.6
    np.testing.assert_array_equal(boxes.boxes, BOXES[order])
    np.testing.assert_array_equal(boxes.class_probs, CLASSES[order])
    assert boxes.class_probs.dtype == np.float32
    np.testing.assert_array_equal(boxes.features, FEATURES[order])
    np.testing.assert_allclose(boxes.image_feature, FEATURES.mean(axis=0))


@pytest.mark.parametrize(
    "changes",
    [
        {"boxes": encoded(BOXES[:2])},
        {"boxes": encoded(BOXES / 1000)},
        {"classes": 3},
        {"features": ""},
        {"features": encoded(FEATURES * np.nan)},
    ],
)
def test_damaged_boxes_name_the_file(official, changes):
    official.files["00000000.json"] = json.dumps(frcnn(**changes))
    official.write()
    with refused("train_frcnn.0.zip@/00000000.json", next(iter(changes))):
        official.read(with_features=True).boxes(0)


def test_lines_with_errors(official):
    official.lines[1]["caption"] = ["a", 3]
    del official.lines[3]["frcnn"]
    source = official.write()
    with refused("train_frcnn.json: line 2", "caption[1]"):
        source.caption(1)
    with refused("train_frcnn.json: line 4", "frcnn"):
        official.read(with_boxes=True).boxes(3)
    (official.root / "train_frcnn.json").write_text('{"image": "x",')
    with refused("train_frcnn.json: line 1"):
        official.read()
