"""What an analysis keeps does not grow with the split: four times the images leave as many arrays of as many bytes."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from e2e_vl.analysis.captions import read_parses
from e2e_vl.analysis.collect import ENTITIES, RELATIONS, Collected, MeasureKey, collect_attention
from e2e_vl.analysis.options import AttentionOptions
from e2e_vl.analysis.run import AttentionRequest, caption_examples
from e2e_vl.config import BoxSource, load_config
from e2e_vl.data.features import write_tsv
from e2e_vl.run.build import build_collate, build_model, training_texts
from e2e_vl.run.launch import make_accelerator
from e2e_vl.synthetic import SceneConfig, make_scenes
from e2e_vl.text import build_vocabulary, load_tokenizer
from tests.analysis.miniature import CONFIG, ROOT, perfect_features

IMAGES, COPIES = 3, 4
NEXT = 1000  # what the id of a copy has more than the id of its image


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Two splits: a few images, and four times as many, which are the same ones under other ids."""
    folder = tmp_path_factory.mktemp("bounded")
    data, size = folder / "data", SceneConfig(min_side=96, max_side=96, min_objects=3, max_objects=5)
    make_scenes(data, scenes={"train": 1, "val": IMAGES}, seed=0, formats=["refcoco+", "flickr30k"], config=size)
    ids = [int(word) for word in (data / "flickr30k" / "val.txt").read_text().split()]
    for number in range(1, COPIES):
        for image in ids:
            for kind, ending in (("Sentences", "txt"), ("Annotations", "xml")):
                place = data / "flickr30k" / kind
                shutil.copy(place / f"{image}.{ending}", place / f"{image + number * NEXT}.{ending}")
    every = [image + number * NEXT for number in range(COPIES) for image in ids]
    (data / "flickr30k" / "more.txt").write_text("".join(f"{image}\n" for image in every))
    features = [
        dataclasses.replace(one, image_id=str(int(one.image_id) + number * NEXT))
        for one in perfect_features(data / "refcoco+" / "instances.json")
        for number in range(COPIES)
    ]
    write_tsv(data / "features.tsv", features, {})
    (folder / "config.yaml").write_text(CONFIG.format(root=ROOT, folder=folder))
    build_vocabulary(training_texts(load_config(folder / "config.yaml")), folder / "vocab.txt")
    return folder


def collected(folder: Path, split: str, shown: range) -> Collected:
    """The measures of an untrained model."""
    config = load_config(folder / "config.yaml")
    tokenizer = load_tokenizer(folder / "vocab.txt")
    torch.manual_seed(0)
    model = build_model(config, vocab_size=len(tokenizer), tokenizer=tokenizer)
    request = AttentionRequest(folder, split, BoxSource.PRECOMPUTED)
    parses = read_parses(folder / "data" / "flickr30k" / "parses" / "val.conllu")
    examples = caption_examples(config, model, tokenizer, request, parses)
    return collect_attention(
        *(model, examples, build_collate(config, model), AttentionOptions(), make_accelerator("no")),
        images_per_batch=2,
        shown=shown,
    )


def retained(value: Any) -> Iterator[int]:
    """The bytes behind every array that a value holds: also those that a slice keeps alive."""
    if isinstance(value, torch.Tensor):
        yield value.untyped_storage().nbytes()
    elif isinstance(value, np.ndarray):
        while isinstance(value.base, np.ndarray):
            value = value.base
        yield value.nbytes
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from retained(getattr(value, field.name))
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from retained(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from retained(one)


@pytest.mark.usefixtures("on_cpu")
def test_four_times_the_images_leave_what_is_kept_as_it_is(folder):
    shown = range(2)
    few, many = collected(folder, "val", shown), collected(folder, "more", shown)
    assert many.numbers["captions"] == COPIES * few.numbers["captions"] > 0
    assert sorted(retained(many)) == sorted(retained(few)) and len([*retained(few)]) > 20
    assert many.sums.keys() == few.sums.keys() and len(many.seen) == len(few.seen) == len(shown)
    for measure in (ENTITIES, RELATIONS):
        one, other = (found.sums[MeasureKey("joint", measure)] for found in (few, many))
        assert other.examples == COPIES * one.examples > 0
        torch.testing.assert_close(other.mean_attention, one.mean_attention)
    all_shown = collected(folder, "more", range(COPIES * few.numbers["captions"]))
    assert sum(retained(all_shown)) > 2 * sum(retained(many)), "a text that is kept is seen here"
