"""Shards, the official layout of Conceptual Captions and the corpus, read with nothing of this project."""

from __future__ import annotations

import base64
import json
import re
import tarfile
import zipfile

import cv2
import numpy as np
import pytest

from e2e_vl.synthetic.conceptual import CaptionedImage, write_corpus, write_shards
from e2e_vl.synthetic.config import SceneConfig
from tests.synthetic.parsing import parse

SPLITS = {"train": 110, "val": 20, "testA": 10, "testB": 10}


def test_coco_captions_of_each_split(synthetic_folder):
    whole = json.loads((synthetic_folder / "annotations" / "captions_train2014.json").read_text())
    parts = [json.loads((synthetic_folder / "captions" / f"captions_{split}.json").read_text()) for split in SPLITS]
    assert [len(part["images"]) for part in parts] == list(SPLITS.values())
    said = {(row["image_id"], row["caption"]) for row in whole["annotations"]}
    assert {(row["image_id"], row["caption"]) for part in parts for row in part["annotations"]} == said
    for part in parts:
        assert {row["image_id"] for row in part["annotations"]} == {row["id"] for row in part["images"]}


@pytest.mark.parametrize("split", SPLITS)
def test_shards_in_the_layout_of_img2dataset(synthetic_folder, split):
    folder = synthetic_folder / "shards" / split
    assert sorted(path.name for path in folder.iterdir()) == ["00000.tar", "00000_stats.json"]
    stats = json.loads((folder / "00000_stats.json").read_text())
    assert stats["count"] == stats["successes"] == SPLITS[split]
    captions = json.loads((synthetic_folder / "captions" / f"captions_{split}.json").read_text())
    with tarfile.open(folder / "00000.tar") as tar:
        names = tar.getnames()
        content = {name: tar.extractfile(name).read() for name in names}
    keys = [f"{number:09d}" for number in range(SPLITS[split])]
    assert names == [f"{key}.{suffix}" for key in keys for suffix in ("json", "jpg", "txt")]
    for key, row in zip(keys, captions["images"], strict=True):
        facts = json.loads(content[f"{key}.json"])
        assert facts["status"] == "success"
        assert facts["caption"] == content[f"{key}.txt"].decode()
        assert facts["caption"] in [c["caption"] for c in captions["annotations"] if c["image_id"] == row["id"]]
        assert content[f"{key}.jpg"] == (synthetic_folder / "images" / "train2014" / row["file_name"]).read_bytes()


def test_records_are_spread_over_shards(synthetic_folder, tmp_path):
    image = next((synthetic_folder / "images" / "train2014").iterdir())
    images = [CaptionedImage(image, (128, 128), f"caption {number}", [], []) for number in range(7)]
    write_shards(tmp_path, images, records_per_shard=3)
    texts = []
    for number, count in enumerate((3, 3, 1)):
        with tarfile.open(tmp_path / f"{number:05d}.tar") as tar:
            names = [name for name in tar.getnames() if name.endswith(".txt")]
            assert names == [f"{number:05d}{row:04d}.txt" for row in range(count)]
            texts += [tar.extractfile(name).read().decode() for name in names]
    assert texts == [image.caption for image in images]


def test_the_official_layout(synthetic_folder, coco):
    folder = synthetic_folder / "conceptual"
    for split, count in SPLITS.items():
        lines, full = (
            [json.loads(line) for line in (folder / f"{split}{end}.json").read_text().splitlines()]
            for end in ("", "_frcnn")
        )
        assert len(lines) == count
        assert [{key: line[key] for key in ("image", "caption")} for line in full] == lines
        with (
            zipfile.ZipFile(folder / f"{split}_image.zip") as images,
            zipfile.ZipFile(folder / f"{split}_frcnn.zip") as boxes,
        ):
            assert {info.compress_type for info in (*images.infolist(), *boxes.infolist())} == {zipfile.ZIP_STORED}
            for line in full:
                assert all(isinstance(word, str) and word for word in line["caption"])
                archive, member = line["image"].split("@/")
                assert archive == f"{split}_image.zip"
                picture = cv2.imdecode(np.frombuffer(images.read(member), np.uint8), cv2.IMREAD_COLOR)
                check_boxes(json.loads(boxes.read(line["frcnn"].split("@/")[1])), picture.shape, len(coco.cats))


def check_boxes(content: dict, shape: tuple[int, ...], categories: int) -> None:
    assert (content["image_h"], content["image_w"]) == shape[:2]
    boxes, classes, features = (
        np.frombuffer(base64.b64decode(content[key]), np.float32).reshape(content["num_boxes"], -1)
        for key in ("boxes", "classes", "features")
    )
    assert boxes.shape[1] == 4
    assert (boxes[:, 2:] > boxes[:, :2]).all()
    assert classes.shape[1] == categories + 1
    np.testing.assert_allclose(classes.sum(axis=1), 1, atol=1e-4)
    assert (classes[:, 1:].max(axis=1) > 0.5).all(), "column 0 is the background"
    assert features.shape[1] > 8
    assert np.isfinite(features).all()


def test_the_corpus_speaks_about_the_drawn_world(synthetic_folder):
    text = (synthetic_folder / "corpus" / "corpus.doc").read_text(encoding="utf-8")
    lines = [line for line in text.split("\n") if line]
    assert len(lines) == 4 * sum(SPLITS.values())
    assert "\n\n" in text
    frames = re.compile(r"there is |look at |i see |this is | is here$")
    understood = 0
    for line in lines:
        for sentence in line.split(".")[:-1]:
            parse(frames.sub("", sentence.strip().lower()))
            understood += 1
    assert understood > 3 * len(lines)


def test_a_corpus_of_any_length(tmp_path):
    for lines in (1, 300):
        write_corpus(tmp_path / "a.doc", SceneConfig(colours=("red",)), np.random.default_rng(1), lines=lines)
        text = (tmp_path / "a.doc").read_text()
        assert len([line for line in text.split("\n") if line]) == lines
    assert "red" in text
    assert "blue" not in text


def test_an_image_that_is_no_jpeg_keeps_its_suffix(tmp_path):
    picture = tmp_path / "a.png"
    cv2.imwrite(str(picture), np.zeros((4, 5, 3), np.uint8))
    write_shards(tmp_path / "shards", [CaptionedImage(picture, (4, 5), "black", [], [])])
    with tarfile.open(tmp_path / "shards" / "00000.tar") as tar:
        assert tar.getnames() == ["000000000.json", "000000000.png", "000000000.txt"]
        assert cv2.imdecode(np.frombuffer(tar.extractfile("000000000.png").read(), np.uint8), 1).shape == (4, 5, 3)
        assert tar.extractfile("000000000.txt").read() == b"black"
