"""Parts from settings: starting weights of a run's detector, what a task is built with, where data lie."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from detector.checkpoint import save_pretrained, save_weights
from e2e_vl import parts
from e2e_vl.config import BoxSource, RunConfig, TaskSettings, load_config
from e2e_vl.data.batching import Request
from e2e_vl.parts import Settings
from e2e_vl.run.build import (
    build_detector,
    build_examples,
    build_model,
    build_task,
    build_tokenizer,
    make_synthetic_data,
    open_split,
    resolve,
)
from e2e_vl.tasks.base import Sizes
from e2e_vl.tasks.detection import DetectionTask

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("kind", ["a.pth", "a.safetensors", "a.pkl", "folder"])
def test_detector_weights_of_every_kind(tiny_config: Callable[..., RunConfig], tmp_path: Path, kind: str):
    source, path = build_detector(tiny_config()), tmp_path / kind
    if kind == "folder":
        save_pretrained(source, path)
    elif kind == "a.pkl":
        path.write_bytes(pickle.dumps({"model": {k: v.numpy() for k, v in source.state_dict().items()}}))
    else:
        save_weights(source.state_dict(), path)
    started = build_detector(tiny_config(f"detector.weights={path}"))
    expected = source.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in started.state_dict().items())


def test_a_backbone_alone_must_be_asked_for(
    tiny_config: Callable[..., RunConfig], tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    source = build_detector(tiny_config())
    trunk = {k: v for k, v in source.state_dict().items() if k.startswith(("backbone.", "roi_heads.res5."))}
    path = tmp_path / "backbone.pth"
    save_weights(trunk, path)
    with pytest.raises(ValueError, match=r"backbone\.pth does not fit .* missing \(proposal_generator"):
        build_detector(tiny_config(f"detector.weights={path}"))
    with caplog.at_level(logging.WARNING):
        started = build_detector(tiny_config(f"detector.weights={path}", "detector.expect=backbone"))
    assert "missing (proposal_generator" in caplog.text
    assert torch.equal(started.backbone.stem.conv1.weight, source.backbone.stem.conv1.weight)
    with pytest.raises(ValueError, match=r"detector\.expect: Invalid enum value 'most'"):
        tiny_config("detector.expect=most")


class OwnConfig(Settings, frozen=True):
    vocab_size: int = 3
    objectives: str = "whatever the task calls so"


def test_the_names_of_a_tasks_settings_are_its_own(tiny_config, monkeypatch):
    monkeypatch.setitem(parts.TASKS, "own", parts.Part(OwnConfig, DetectionTask))
    config = msgspec.structs.replace(tiny_config(), task=TaskSettings("own", {}))
    assert build_task(config, Sizes(hidden_size=8, vocab_size=9)).config == OwnConfig()


def test_a_sum_of_objectives_gets_the_size_of_the_vocabulary(tmp_path):
    path, words = ROOT / "configs" / "tiny" / "pretraining.yaml", [f"data.root={tmp_path}", f"output={tmp_path}"]
    task = build_task(load_config(path, words), Sizes(hidden_size=8, vocab_size=9, num_classes=6))
    assert task.word_head.bias.shape == (9,)


@pytest.mark.parametrize("name", ["refcoco", "vqa", "vcr", "pretraining"])
def test_data_under_the_home_folder(monkeypatch, tmp_path, name):
    """A shell leaves the ~ of data.root=~/data as it is."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(ROOT)
    words = ["data.root=~/drawn", "data.synthetic.scenes={train: 3}", f"output={tmp_path / 'run'}"]
    config = load_config(ROOT / "configs" / "tiny" / f"{name}.yaml", [*words, "data.workers=0"])
    make_synthetic_data(config)
    assert (tmp_path / "home" / "drawn" / "synthetic.json").is_file()
    tokenizer = build_tokenizer(config)
    model = build_model(config, vocab_size=len(tokenizer), tokenizer=tokenizer)
    examples = build_examples(config, model, tokenizer, "train", boxes=config.data.boxes.train, training=True)
    assert len(examples[Request(0, (examples.groups[0][0],))].images) == 1


def test_one_process_builds_the_vocabulary_and_the_others_read_it(tiny_config, monkeypatch):
    config = tiny_config()
    with pytest.raises(FileNotFoundError, match=r"vocab\.txt: no tokenizer there"):
        build_tokenizer(config, writes=False)
    built = build_tokenizer(config)
    monkeypatch.setattr("e2e_vl.run.build.training_texts", lambda *_: pytest.fail("it is there already"))
    assert build_tokenizer(config, writes=False).get_vocab() == built.get_vocab()


def test_a_selection_that_own_boxes_would_not_read_is_refused(tiny_config, caplog):
    own, keep_five = "data.boxes.train=online", "data.boxes.selection={min_regions: 5, max_regions: 5}"
    for sources in ("[online]", "[gt, online]"):
        with pytest.raises(ValueError, match=r"selection chooses among boxes of files, .* TEST\.DETECTIONS_PER_IMAGE"):
            resolve(tiny_config(own, keep_five, f"eval.boxes={sources}"))
    mixed = tiny_config(own, keep_five, "eval.boxes=[detections]")
    with pytest.raises(ValueError, match=r"selection chooses .* Training would not read it, .*tools/evaluate\.py"):
        resolve(mixed)
    read = resolve(tiny_config("data.boxes.train=detections", keep_five, "eval.boxes=[detections, online]"))
    assert read.data.boxes.selection.max_regions == 5
    resolve(tiny_config("data.boxes.train=gt", keep_five, "eval.boxes=[gt]"))
    resolve(tiny_config(own, "eval.boxes=[online]"))
    open_split(mixed, "val", BoxSource.DETECTIONS, training=False)
    assert not caplog.messages
    open_split(mixed, "val", BoxSource.ONLINE, training=False)
    assert "data.boxes.selection chooses among boxes of files" in caplog.text
