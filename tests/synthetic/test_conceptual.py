"""Shards and the corpus, read with nothing of this project; tests/data reads the official layout."""

from __future__ import annotations

import json
import re
import tarfile

import cv2
import numpy as np

from e2e_vl.synthetic.conceptual import CaptionedImage, write_shards
from tests.synthetic.meaning import SPLITS, parse


def test_shards_in_the_layout_of_img2dataset(synthetic_folder):
    for split, count in SPLITS.items():
        folder = synthetic_folder / "shards" / split
        assert sorted(path.name for path in folder.iterdir()) == ["00000.tar", "00000_stats.json"]
        stats = json.loads((folder / "00000_stats.json").read_text())
        assert stats["count"] == stats["successes"] == count
        captions = json.loads((synthetic_folder / "captions" / f"captions_{split}.json").read_text())
        with tarfile.open(folder / "00000.tar") as tar:
            content = {name: tar.extractfile(name).read() for name in tar.getnames()}
        keys = [f"{number:09d}" for number in range(count)]
        assert list(content) == [f"{key}.{suffix}" for key in keys for suffix in ("json", "jpg", "txt")]
        for key, row in zip(keys, captions["images"], strict=True):
            caption = json.loads(content[f"{key}.json"])["caption"]
            assert caption == content[f"{key}.txt"].decode()
            assert caption in [one["caption"] for one in captions["annotations"] if one["image_id"] == row["id"]]
            image = synthetic_folder / "images" / "train2014" / row["file_name"]
            assert content[f"{key}.jpg"] == image.read_bytes()


def test_records_are_spread_over_shards_and_keep_their_suffix(tmp_path):
    image = tmp_path / "a.png"
    cv2.imwrite(str(image), np.zeros((4, 5, 3), np.uint8))
    images = [CaptionedImage(image, (4, 5), f"caption {number}", [], []) for number in range(7)]
    write_shards(tmp_path, images, records_per_shard=3)
    texts = []
    for number, count in enumerate((3, 3, 1)):
        with tarfile.open(tmp_path / f"{number:05d}.tar") as tar:
            keys = [f"{number:05d}{row:04d}" for row in range(count)]
            assert tar.getnames() == [f"{key}.{suffix}" for key in keys for suffix in ("json", "png", "txt")]
            texts += [tar.extractfile(f"{key}.txt").read().decode() for key in keys]
    assert texts == [image.caption for image in images]


def test_the_corpus_speaks_about_the_drawn_world(synthetic_folder):
    text = (synthetic_folder / "corpus" / "corpus.doc").read_text(encoding="utf-8")
    lines = [line for line in text.split("\n") if line]
    assert len(lines) == 4 * sum(SPLITS.values())
    assert "\n\n" in text
    frames = re.compile(r"there is |look at |i see |this is | is here$")
    sentences = [sentence for line in lines for sentence in line.split(".")[:-1]]
    for sentence in sentences:
        parse(frames.sub("", sentence.strip().lower()))
    assert len(sentences) > 3 * len(lines)
