"""Names and shapes of all official models at their published size, and of transformers' models, go both ways."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from detector.config import DetectorConfig
from detector.r2c import R2CNetwork
from e2e_vl.config_files import load_config
from e2e_vl.encoders.visual_bert import PretrainedVisualBertConfig, VisualBertEncoder
from e2e_vl.tasks.base import Sizes, Task
from e2e_vl.tasks.config import Flickr30KConfig, NLVR2Config, VCRConfig, VQAConfig
from e2e_vl.tasks.flickr30k import Flickr30KTask
from e2e_vl.tasks.nlvr2 import NLVR2Task
from e2e_vl.tasks.pretraining import PretrainingTask, build_objectives
from e2e_vl.tasks.vcr import VCRTask
from e2e_vl.tasks.vqa import VQATask
from e2e_vl.weights.base import ModelWeights, replace_module
from e2e_vl.weights.visual_bert import (
    DECODER,
    HEAD,
    HEADS,
    PROJECTION,
    TRUNK,
    OfficialVisualBert,
    TransformersVisualBert,
    make_transformers_config,
    to_official,
    to_transformers,
)
from tests.parity import visual_bert_common as common
from tests.parity.visual_bert_common import recorded_parts
from tests.parity.vl_bert_common import Golden

visual_golden = common.visual_golden
LAYOUTS = "official_state_keys.json"
NOT_NAMES = ("total_keys", "with_detector")  # keys of a recorded layout that are no parameters
CONFIGS = Path(__file__).parents[2] / "configs"
NETWORK = CONFIGS / "detector/r2c_R_50.yaml"
HEAD_SIZE = 64  # of base models


def layouts(golden: Golden) -> dict[str, Any]:
    golden.require(LAYOUTS)
    return json.loads((golden.folder / LAYOUTS).read_text())


def official_layout(golden: Golden, model: str, *, late: bool = False) -> dict[str, list[int]]:
    """Names and shapes of one published model."""
    recorded = layouts(golden)
    own = recorded["models"][model]
    keys = {**recorded["trunk"], **{name: shape for name, shape in own.items() if name not in NOT_NAMES}}
    if own["with_detector"]:
        keys |= recorded["detector"]
    assert len(keys) == own["total_keys"]
    return keys | (recorded["late_fusion_adds"] if late else {})


def tensors_of(layout: dict[str, list[int]]) -> dict[str, Tensor]:
    """Without memory, except the word table and its copy, which are compared: every number is the same place."""
    return {
        name: torch.zeros(1).expand(shape) if name.endswith(("word_embeddings.weight", DECODER)) else meta(shape)
        for name, shape in layout.items()
    }


def meta(shape: list[int]) -> Tensor:
    return torch.empty(shape, device="meta")


def encoder_of(layout: dict[str, list[int]], **fields: Any) -> VisualBertEncoder:
    """Our encoder at the size of a layout."""

    def rows(name: str) -> list[int]:
        return layout[f"{TRUNK}{name}"]

    hidden, width = rows("embeddings.projection.weight")
    with torch.device("meta"):
        return VisualBertEncoder(
            PretrainedVisualBertConfig(
                vocab_size=rows("embeddings.word_embeddings.weight")[0],
                hidden_size=hidden,
                num_hidden_layers=len({name.split(".")[4] for name in layout if name.startswith(f"{TRUNK}encoder.")}),
                num_attention_heads=hidden // HEAD_SIZE,
                intermediate_size=rows("encoder.layer.0.intermediate.dense.weight")[0],
                max_position_embeddings=rows("embeddings.position_embeddings.weight")[0],
                feature_dim=width,
                **fields,
            )
        )


def pretraining_task(name: str, encoder: VisualBertEncoder) -> PretrainingTask:
    """The task of the shipped pre-training on COCO's captions for one data set."""
    settings = load_config(CONFIGS / f"pretraining/visual_bert_coco_{name}.yaml", ["data.root=unused"]).task.config
    sizes = Sizes(encoder.hidden_size, encoder.config.vocab_size, encoder.config.feature_dim)
    with torch.device("meta"):
        return PretrainingTask(sizes, settings, build_objectives(settings.objectives, sizes))


def task_of(name: str, head: dict[str, Tensor], encoder: VisualBertEncoder) -> Task:
    """Our task with a head as large as this one, as the shipped settings have it."""
    hidden_size = encoder.hidden_size
    with torch.device("meta"):
        if name == "vqa":
            answers = [str(number) for number in range(len(head["head.output.bias"]))]
            return VQATask(hidden_size, VQAConfig(answers=answers, hidden_layer=False, init_from_words=False))
        if name == "vcr":
            return VCRTask(hidden_size, VCRConfig(region_loss_weight=0))
        if name == "nlvr2":
            return NLVR2Task(hidden_size, NLVR2Config())
        return Flickr30KTask(hidden_size, Flickr30KConfig(head_size=len(head["query.bias"])))


def network_shapes() -> dict[str, list[int]]:
    """Of VCR's network of regions."""
    with torch.device("meta"):
        return shapes(R2CNetwork(DetectorConfig.from_yaml(NETWORK)).state_dict())


def shapes(state: dict[str, Tensor]) -> dict[str, list[int]]:
    return {name: list(value.shape) for name, value in state.items()}


def models(golden_root: Path) -> list[str]:
    """None for a set without layouts, whose checks are then skipped."""
    path = golden_root / "visual_bert" / LAYOUTS
    return list(json.loads(path.read_text())["models"]) if path.is_file() else []


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "published" in metafunc.fixturenames:
        metafunc.parametrize("published", models(metafunc.config.getoption("--golden-root").resolve()))


@pytest.mark.parametrize("late", [False, True])
def test_a_published_layout_is_our_encoder_and_head(visual_golden, published, late):
    layout = official_layout(visual_golden, published, late=late)
    parts = OfficialVisualBert().convert(tensors_of(layout), published)
    encoder = encoder_of(layout, bypass_transformer=late)
    assert shapes(parts.encoder) == shapes(encoder.state_dict())
    task, _, phase = published.partition("_")
    is_fine_tuned = phase.startswith("fine_tune")
    kind = {"flickr": "flickr30k"}.get(task, task)
    wanted = kind if is_fine_tuned else "pretraining"
    assert parts.task_name == wanted
    assert parts.transferable == (() if is_fine_tuned else ("",))
    rule = HEADS[wanted]
    assert all(any(replace_module(name, {ours: ours}) for name in parts.task) for ours in rule.names.values())
    ours = task_of(wanted, parts.task, encoder) if is_fine_tuned else pretraining_task(kind, encoder)
    assert shapes(parts.task) == shapes(ours.state_dict())
    assert shapes(parts.detector) == (network_shapes() if task == "vcr" else {})

    state, left_out = to_official(parts)
    unread = tuple(f"{HEAD}{module}." for module in rule.unused)
    assert shapes(state) == {
        name: shape for name, shape in layout.items() if not name.startswith(unread) or name.startswith(TRUNK)
    }
    assert left_out == []


def test_transformers_models_have_the_names_that_are_written(visual_golden, published):
    """What is tied in transformers is written once."""
    layout = official_layout(visual_golden, published)
    encoder = encoder_of(layout)
    parts = OfficialVisualBert().convert(tensors_of(layout), published)
    state, _ = to_transformers(parts)
    config = make_transformers_config(encoder, parts)
    with torch.device("meta"):
        theirs = getattr(transformers, config.architectures[0])(config)
    assert config.visual_embedding_dim == encoder.state_dict()[PROJECTION].shape[1]
    expected, written = shapes(theirs.state_dict()), shapes(state)
    unread = [name for name in expected if name.startswith(("cls.", "attention.value")) and name not in written]
    tied = ["cls.predictions.decoder.weight", "cls.predictions.decoder.bias"]
    assert written == {name: shape for name, shape in expected.items() if name not in unread}
    if parts.task_name == "pretraining":
        assert sorted(unread) == sorted(tied)
    elif not HEADS[parts.task_name].unused:
        assert unread == []
    whole = tensors_of(expected) | {
        name: torch.zeros(1).expand(shape)
        for name, shape in expected.items()
        if name.endswith(("predictions.bias", "decoder.bias"))
    }
    again = TransformersVisualBert().convert(whole, published)
    assert again.task_name == parts.task_name
    for ours, first in ((again.encoder, parts.encoder), (again.task, parts.task)):
        assert shapes(ours) == shapes(first)


@pytest.mark.parametrize("files", [("pretrain",), ("pretrain", "late_fusion")])
def test_recorded_weights_go_through_unchanged(visual_golden, files):
    recorded = dict(visual_golden["trunk"])
    for file in files:
        recorded |= visual_golden.part(file, "state.")
    parts = recorded_parts(visual_golden, *files)
    state, left_out = to_official(ModelWeights({}, parts.encoder, parts.task, "pretraining"))
    assert left_out == []
    assert state.keys() - recorded.keys() == {f"{HEAD}{DECODER}"}
    assert all(torch.equal(state[name], value) for name, value in recorded.items())
