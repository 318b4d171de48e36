"""A new encoder that starts from other projects' files costs one adapter and one entry in `ADAPTERS`."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from e2e_vl import parts
from e2e_vl.cli import convert_weights
from e2e_vl.config import RunConfig
from e2e_vl.encoders.base import Encoder, EncoderConfig
from e2e_vl.model import VisionLanguageModel
from e2e_vl.parts import Settings
from e2e_vl.run import build
from e2e_vl.run.build import build_tokenizer
from e2e_vl.run.checkpoint import load_model, save_model
from e2e_vl.structures import Ability, EncoderOutput
from e2e_vl.text import build_vocabulary
from e2e_vl.weights.base import ModelWeights, WeightAdapter, replace_module
from tests.weights.starts import replaced

WEIGHTS = Path(__file__).parents[2] / "e2e_vl" / "weights"


class AverageSettings(Settings, frozen=True):
    hidden_size: int = 8
    uses_whole_image: bool = False
    power: int = 1  # no shape shows it
    with_summary: bool = False
    with_noise: bool = False


class AverageConfig(EncoderConfig, settings=AverageSettings):
    model_type = "average"


class AverageEncoder(Encoder):
    """Words and regions that never meet; it is only built here."""

    config_class = AverageConfig
    abilities = frozenset(Ability)

    def __init__(self, config: AverageConfig):
        super().__init__(config)
        self.words = nn.Embedding(config.vocab_size, config.hidden_size)
        self.segments = nn.Embedding(2, config.hidden_size)
        self.regions = nn.Linear(config.feature_dim, config.hidden_size)
        self.summary = nn.Linear(config.hidden_size, config.hidden_size) if config.with_summary else None
        self.noise = nn.Linear(1, config.hidden_size) if config.with_noise else None
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.words

    def forward(self, texts, regions, output_attentions=False) -> EncoderOutput:
        raise NotImplementedError


class AverageFiles(WeightAdapter):
    """Pre-trained ones with `first` and `second`, and others of referring expressions with `score`."""

    layout = "Average"
    suffix = ".average"
    same_config = ("power",)
    optional = ("summary.",)
    pretraining_only = ("noise.",)
    segment_tables = ("segments.weight",)
    names = {"w": "words", "s": "segments", "r": "regions", "u": "summary", "n": "noise"}  # noqa: RUF012
    heads = {  # noqa: RUF012
        "pretraining": {"first": "masked_regions.transform.dense", "second": "masked_regions.output"},
        "refcoco": {"score.inner": "head.transform", "score.outer": "head.output"},
    }

    def recognise(self, tensors: Mapping[str, Tensor]) -> bool:
        return "w.weight" in tensors

    def convert(self, tensors: Mapping[str, Tensor], source: str | Path) -> ModelWeights:
        task_name = "refcoco" if any(name.startswith("score.") for name in tensors) else "pretraining"
        parts = {}
        for part, names in (("encoder", self.names), ("task", self.heads[task_name])):
            moved = {replace_module(name, names): value.float() for name, value in tensors.items()}
            parts[part] = {name: value for name, value in moved.items() if name is not None}
        transferable = ("masked_regions.",) if task_name == "pretraining" else ()
        return ModelWeights({}, **parts, task_name=task_name, transferable=transferable, background_last=False)

    def export(self, model: VisionLanguageModel, task_name: str, path: str | Path) -> list[str]:
        back = {ours: theirs for theirs, ours in {**self.names, **self.heads[task_name]}.items()}
        state = model.encoder.state_dict() | model.task.state_dict()
        torch.save({replace_module(name, back): value for name, value in state.items()}, path)
        return [f"detector.{name}" for name in model.detector.state_dict()]


@pytest.fixture
def config_of(monkeypatch, tmp_path, tiny_config: Callable[..., RunConfig]) -> Callable[..., RunConfig]:
    """`config_of(task, words, encoder fields)`, where `build.py` knows the encoder and its adapter."""
    monkeypatch.setitem(parts.ENCODERS, "average", parts.Part(AverageSettings, AverageEncoder))
    monkeypatch.setitem(build.ADAPTERS, "average", (AverageFiles(),))
    build_vocabulary(["the red circle"], tmp_path / "vocab.txt")
    own = (f"data.vocabulary={tmp_path / 'vocab.txt'}",)

    def make(task: str, *words: str, **fields: object) -> RunConfig:
        config = replaced(tiny_config(*own, *words), encoder={"name": "average", "config": fields})
        return replaced(config, task={"name": task, "config": {}})

    return make


def made(config: RunConfig, seed: int = 0) -> VisionLanguageModel:
    torch.manual_seed(seed)
    tokenizer = build_tokenizer(config)
    return build.build_model(config, vocab_size=len(tokenizer), tokenizer=tokenizer)


@pytest.fixture
def published(config_of, tmp_path) -> Path:
    """A published model of pre-training, without the summary that only some tasks train."""
    encoder = made(config_of("refcoco", with_noise=True), seed=1).encoder
    names = {ours: theirs for theirs, ours in AverageFiles.names.items()}
    state = {replace_module(name, names): value for name, value in encoder.state_dict().items()}
    state |= {"first.weight": torch.rand(8, 8), "first.bias": torch.rand(8)}
    torch.save({**state, "second.weight": torch.rand(5, 8), "second.bias": torch.rand(5)}, tmp_path / "published.bin")
    return tmp_path / "published.bin"


def test_encoder_and_head_start_from_a_published_file(config_of, published, caplog):
    theirs = torch.load(published, weights_only=True)
    words = [f"encoder.weights={published}", f"task.weights={published}"]
    model = made(config_of("refcoco", *words, with_summary=True), seed=2)
    assert torch.equal(model.encoder.words.weight, theirs["w.weight"])
    assert torch.equal(model.encoder.segments.weight, theirs["s.weight"])
    assert torch.equal(model.task.head.transform["dense"].weight, theirs["first.weight"])
    for line in (
        "(Average names): 4 keys match, 2 missing (summary.weight, summary.bias), 2 unexpected (noise.weight,",
        "2 missing (head.output.weight, head.output.bias), 2 unexpected (masked_regions.output.weight,",
        "copied: masked_regions.transform -> head.transform",
    ):
        assert line in caplog.text


def test_a_second_segment_starts_as_the_adapter_and_the_task_say(config_of, published):
    first, _ = torch.load(published, weights_only=True)["s.weight"]
    table = made(config_of("vcr", f"encoder.weights={published}")).encoder.segments.weight
    assert torch.equal(table, torch.stack([first, first]))


@pytest.mark.parametrize("task", ["vqa", "detection"])
def test_a_task_that_takes_nothing_of_what_the_file_lends(config_of, published, task):
    config = config_of(task, f"task.weights={published}")
    settings = {"config": {"answers": ["yes", "no"]}} if task == "vqa" else {}
    with pytest.raises(ValueError, match=rf"bin: holds the head of pretraining, and no rule .* of {task} .* leave out"):
        made(replaced(config, task=settings))


def test_what_the_adapter_says_of_the_encoder_holds_for_own_runs(config_of, tmp_path):
    config = config_of("refcoco")
    save_model(tmp_path / "run" / "model", config, made(config, seed=1), build_tokenizer(config))
    start = f"encoder.weights={tmp_path / 'run'}"
    started = made(config_of("vcr", start, with_summary=True, with_noise=True), seed=2).encoder
    assert torch.equal(started.regions.weight, load_model(tmp_path / "run")[1].encoder.regions.weight)
    with pytest.raises(ValueError, match=r"does not fit .* missing \(noise.weight, noise.bias\)"):
        made(config_of("refcoco", start, with_noise=True))
    with pytest.raises(ValueError, match=r"config.json: power is 1, .* is 2; set encoder.config.power to 1"):
        made(config_of("refcoco", start, power=2))


def test_the_tool_writes_the_format_and_a_run_starts_from_it(config_of, tmp_path, capsys):
    config, written = config_of("refcoco"), tmp_path / "x.average"
    model = made(config, seed=1)
    save_model(tmp_path / "run", config, model, build_tokenizer(config))
    assert convert_weights.main([str(tmp_path / "run"), "--output", str(written)]) == 0
    assert "\n  detector.backbone.stem.conv1.weight\n" in capsys.readouterr().out
    assert {name.split(".")[0] for name in torch.load(written, weights_only=True)} == {"w", "s", "r", "score"}
    again = made(config_of("refcoco", f"encoder.weights={written}", f"task.weights={written}"), seed=2)
    for part in ("encoder", "task"):
        theirs, ours = (getattr(one, part).state_dict() for one in (model, again))
        assert all(torch.equal(value, ours[name]) for name, value in theirs.items())
    assert convert_weights.main([str(tmp_path / "run"), "--output", str(tmp_path / "y.model")]) == 2
    assert "its encoder 'average' has no official format that ends with .model" in capsys.readouterr().err
    assert convert_weights.main([str(tmp_path / "run"), "--output", str(tmp_path / "y.other")]) == 2
    assert "that ends with .average or .model or " in capsys.readouterr().err


@pytest.mark.parametrize("file", ["base.py", "start.py"])
def test_only_adapters_know_names(file):
    tree = ast.parse((WEIGHTS / file).read_text(encoding="utf-8"))
    names = {*parts.TASKS, *parts.ENCODERS, *parts.DATASETS, *build.ADAPTERS, "bert"} - {"pretraining"}
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    assert not names & texts
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not [
        name
        for name in modules
        if name.startswith(("e2e_vl.encoders", "e2e_vl.weights.")) and name != "e2e_vl.weights.base"
    ]
    beside_any_task = {"e2e_vl.tasks.base", "e2e_vl.tasks.phrase_head"}
    assert {name for name in modules if name.startswith("e2e_vl.tasks")} <= beside_any_task
