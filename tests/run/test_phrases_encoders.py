"""Phrases beside every task with every encoder: the losses of a batch, and how far the gradients of phrases reach."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from e2e_vl.config import RunConfig, load_config
from e2e_vl.data.batching import Request
from e2e_vl.run.build import build_run
from tests.run.test_phrases_joined import TASKS, settings
from tests.run.test_phrases_pretraining import LAYERS, SIZES
from tests.run.test_phrases_vcr import vcr_joined
from tests.weights.starts import replaced

ROOT = Path(__file__).parents[2]
# fields of the encoder that one task needs
NEEDED = {
    ("vl_bert", "nlvr2"): {"max_images": 2},
    ("lxmert", "nlvr2"): {"max_images": 2},
    ("lxmert", "vcr"): {"named_regions": True},
}
LOSSES = {"refcoco": "referring", "vcr": "choice"}


def of_task(task: str, folder: Path) -> RunConfig:
    """Settings of a tiny run of the task, whose phrases are those of its own data or of captions joined with them."""
    if task == "vcr":
        return vcr_joined(folder)
    if task in TASKS:
        return settings(task, folder)
    words = [
        f"detector.config={ROOT / 'configs' / 'detector' / 'tiny.yaml'}",
        *(f"data.root={folder / 'data'}", f"output={folder / 'run'}", "data.boxes.train=gt"),
        *("data.synthetic.scenes={train: 4, val: 3}", "phrases={weight: 1.0, layer: 1, size: 8}"),
    ]
    return load_config(ROOT / "configs" / "tiny" / f"{task}.yaml", words)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Each task's scenes are drawn once, for all encoders."""
    return tmp_path_factory.mktemp("phrases")


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("task", [*TASKS, "vcr", "flickr30k"])
def test_phrases_beside_each_task_train_the_backbone_of_each_encoder(folder, task, name):
    own = SIZES | LAYERS[name] | NEEDED.get((name, task), {}) | {"relative_geometry": True}
    run = build_run(replaced(of_task(task, folder / task), encoder={"name": name, "config": own}))
    data = run.train_data
    batch = run.collate([data[Request(group, tuple(texts[:2]))] for group, texts in enumerate(data.groups)])
    model = run.model.train()
    output = model(batch)
    assert LOSSES.get(task, task) in output.losses and {"phrases", "phrase_tags"} <= output.losses.keys()
    assert all(torch.isfinite(loss.total) and loss.count > 0 for loss in output.losses.values())
    output.losses["phrases"].mean.backward()
    for part in ("detector", "encoder"):
        gradients = [
            value.grad
            for key, value in getattr(model, part).named_parameters()
            if value.grad is not None and (part == "encoder" or "backbone" in key)
        ]
        assert gradients and any(one.abs().sum() > 0 for one in gradients), part
    with torch.no_grad():
        asked = model.eval()(batch)
    assert asked.phrases.log_attention.shape[0] == asked.phrases.spans.counts.sum() > 0
