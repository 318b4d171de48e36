"""Heads as the shipped LXMERT configs build them have the names and shapes of the official ones at full size."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

from e2e_vl.config_files import load_config
from e2e_vl.encoders.lxmert import LxmertEncoder, PretrainedLxmertConfig
from e2e_vl.tasks.base import Sizes
from e2e_vl.tasks.gqa import GQATask
from e2e_vl.tasks.nlvr2 import NLVR2Task
from e2e_vl.tasks.pretraining import PretrainingTask, build_objectives
from e2e_vl.tasks.vqa import VQATask
from tests.parity import lxmert_common as common
from tests.parity.lxmert_encoder_checks import official_keys

golden = common.golden
CONFIGS = Path(__file__).parents[2] / "configs"
DECODER = "cls.predictions.decoder.weight"  # the word table of the encoder
TRUNK = ("bert.", "lxrt_encoder.")
ANSWERING = {"vqa": VQATask, "gqa": GQATask}


def shipped_task(kind: str, answers: int) -> nn.Module:
    """The task of a config, with so many answers; everything else is the config's, and has no memory."""
    config = load_config(
        CONFIGS / ("pretraining" if kind == "pretrain" else kind) / "lxmert.yaml", ["data.root=unused"]
    )
    settings = config.task.config
    names = [f"answer {number}" for number in range(answers)]
    with torch.device("meta"):
        encoder = LxmertEncoder(PretrainedLxmertConfig(**msgspec.structs.asdict(config.encoder.config)))
        sizes = Sizes(
            encoder.hidden_size,
            encoder.config.vocab_size,
            encoder.config.feature_dim,
            summary_size=encoder.summary_size,
        )
        if kind == "nlvr2":
            return NLVR2Task.build(sizes, settings)
        if kind in ANSWERING:
            return ANSWERING[kind].build(sizes, msgspec.structs.replace(settings, answers=names))
        image_qa = msgspec.structs.replace(settings.objectives["image_qa"], answers=names)
        objectives = settings.objectives | {"image_qa": image_qa}
        return PretrainingTask(sizes, settings, build_objectives(objectives, sizes))


@pytest.mark.parametrize("kind", ["pretrain", "vqa", "gqa", "nlvr2"])
def test_heads_at_full_size(golden, kind):
    """The number of answers is the only size that comes from the data, and so from the recorded shapes."""
    official = {
        name: torch.empty(shape, device="meta")
        for name, shape in official_keys(golden)[kind].items()
        if name != DECODER  # a tensor without values cannot be compared with its alias
    }
    [answers] = [len(value) for name, value in official.items() if name.endswith("logit_fc.3.bias")]
    _, head = common.our_weights(official)
    ours = shipped_task(kind, answers).state_dict()
    assert {name: value.shape for name, value in ours.items()} == {name: value.shape for name, value in head.items()}
    assert head and len(head) == sum(not name.startswith(TRUNK) for name in official)
