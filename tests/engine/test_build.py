"""Starting weights of a run's detector."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from detector.checkpoint import save_pretrained, save_weights
from e2e_vl.config import RunConfig, load_config
from e2e_vl.data.loading.requests import Request
from e2e_vl.engine.build import build_detector, build_model
from e2e_vl.engine.build_data import build_examples, build_tokenizer, make_synthetic_data

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
    with pytest.raises(ValueError, match=r"detector\.expect is 'most'"):
        tiny_config("detector.expect=most")


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
