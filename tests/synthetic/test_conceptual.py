"""Shards and the corpus, read with nothing of this project; tests/data reads the official layout."""

from __future__ import annotations

import json
import re
import tarfile

import cv2
import numpy as np

from e2e_vl.synthetic.conceptual import CaptionedImage, write_shards
from tests.synthetic.meaning import SPLITS


def read_shard(path) -> dict[str, bytes]:
    with tarfile.open(path) as tar:
        return {name: tar.extractfile(name).read() for name in tar.getnames()}


def test_shards_in_the_layout_of_img2dataset(synthetic_folder):
    for split, count in SPLITS.items():
        folder = synthetic_folder / "shards" / split
        assert sorted(path.name for path in folder.iterdir()) == ["00000.tar", "00000_stats.json"]
        stats = json.loads((folder / "00000_stats.json").read_text())
        assert stats["count"] == stats["successes"] == count
        captions = json.loads((synthetic_folder / "captions" / f"captions_{split}.json").read_text())
        content = read_shard(folder / "00000.tar")
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
    write_shards(tmp_path, [CaptionedImage(image, (4, 5), str(number), [], []) for number in range(5)], 2)
    shards = [read_shard(tmp_path / f"{number:05d}.tar") for number in range(3)]
    keys = ["000000000", "000000001", "000010000", "000010001", "000020000"]
    names = [name for shard in shards for name in shard]
    assert names == [f"{key}.{suffix}" for key in keys for suffix in ("json", "png", "txt")]
    texts = [content.decode() for shard in shards for name, content in shard.items() if name.endswith("txt")]
    assert texts == list("01234")


def test_the_corpus_speaks_about_the_drawn_world(synthetic_folder, refs):
    text = (synthetic_folder / "corpus" / "corpus.doc").read_text(encoding="utf-8")
    lines = [line for line in text.split("\n") if line]
    assert len(lines) == 4 * sum(SPLITS.values()) and "\n\n" in text
    frames = re.compile(r"there is |look at |i see |this is | is here$")
    sentences = [frames.sub("", one.strip().lower()) for line in lines for one in line.split(".")[:-1]]
    assert len(sentences) > 3 * len(lines)
    known = {word for ref in refs for sentence in ref["sentences"] for word in sentence["tokens"]}
    assert {word for sentence in sentences for word in sentence.split()} == known
