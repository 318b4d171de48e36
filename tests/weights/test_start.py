"""A new encoder with an adapter of its own, encoders of our runs, and relative geometry that weights lack."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from detector.config import DetectorConfig
from detector.structures import PrecomputedDetector
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
from e2e_vl.tasks.config import VQAConfig
from e2e_vl.tasks.vqa import VQATask
from e2e_vl.text import build_vocabulary
from e2e_vl.weights.base import ModelWeights, WeightAdapter, replace_module, reverse
from e2e_vl.weights.lxmert import OfficialLxmert
from e2e_vl.weights.start import load_encoder
from e2e_vl.weights.visual_bert import OfficialVisualBert
from e2e_vl.weights.vl_bert import OfficialVLBert
from tests.encoders.small import make_inputs, make_lxmert, make_visual_bert, make_vl_bert
from tests.regions import learn_geometry
from tests.weights.starts import replaced, rules


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
        back = reverse({**self.names, **self.heads[task_name]})
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
    state = {replace_module(name, reverse(AverageFiles.names)): value for name, value in encoder.state_dict().items()}
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
    for part in (
        "(Average names): 4 keys match, 2 missing (summary.weight, summary.bias), 2 unexpected (noise.weight,",
        "copied: masked_regions.transform -> head.transform",
    ):
        assert part in caplog.text


def test_a_second_segment_starts_as_the_adapter_and_the_task_say(config_of, published):
    first, _ = torch.load(published, weights_only=True)["s.weight"]
    table = made(config_of("vcr", f"encoder.weights={published}")).encoder.segments.weight
    assert torch.equal(table, torch.stack([first, first]))


def test_a_task_that_takes_nothing_of_the_file_is_refused(config_of, published):
    config = config_of("vqa", f"task.weights={published}")
    with pytest.raises(ValueError, match=r"published.bin: .*pretraining.* vqa .*task.weights"):
        made(replaced(config, task={"config": {"answers": ["yes", "no"]}}))


def test_what_the_adapter_says_of_the_encoder_holds_for_own_runs(config_of, tmp_path):
    config = config_of("refcoco")
    save_model(tmp_path / "run" / "model", config, made(config, seed=1), build_tokenizer(config))
    start = f"encoder.weights={tmp_path / 'run'}"
    started = made(config_of("vcr", start, with_summary=True, with_noise=True), seed=2).encoder
    assert torch.equal(started.regions.weight, load_model(tmp_path / "run")[1].encoder.regions.weight)
    with pytest.raises(ValueError, match=r"missing \(noise.weight, noise.bias\)"):
        made(config_of("refcoco", start, with_noise=True))
    with pytest.raises(ValueError, match=r"config.json: power .*encoder.config.power"):
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


# Relative geometry may be switched on in a run that starts from weights without it


ENCODERS = {
    "vl_bert": (make_vl_bert, OfficialVLBert(), {}),
    "visual_bert": (make_visual_bert, OfficialVisualBert(), {"hidden_layer": False}),
    "lxmert": (make_lxmert, OfficialLxmert(), {"head_width": 2}),
}


def own_run(encoder: Encoder, name: str, folder: Path) -> Path:
    encoder.save_pretrained(folder / "model" / "encoder")
    return folder


def official_file(encoder: Encoder, name: str, folder: Path) -> Path:
    _, adapter, options = ENCODERS[name]
    head = VQAConfig(answers=["yes", "no"], initialise_from_words=False, **options)
    task, detector = VQATask(encoder.config.hidden_size, head), PrecomputedDetector(DetectorConfig())
    adapter.export(VisionLanguageModel(detector, encoder, task), "vqa", folder / f"published{adapter.suffix}")
    return folder / f"published{adapter.suffix}"


@pytest.mark.parametrize("save", [own_run, official_file])
@pytest.mark.parametrize("name", ENCODERS)
def test_weights_without_relative_geometry_start_as_they_were(tmp_path, name, save):
    make = ENCODERS[name][0]
    torch.manual_seed(1)
    plain = make()
    path = save(plain, name, tmp_path)
    torch.manual_seed(2)
    paired = make(relative_geometry=True)
    report = load_encoder(paired, path, rules("vqa", name))
    assert report.zero == ["relative_geometry"]
    assert {key.split(".")[0] for key in report.missing} == {"relative_geometry"}
    inputs = make_inputs()
    before, after = plain(*inputs), paired(*inputs)
    for one, other in ((before.text, after.text), (before.regions, after.regions), (before.summary, after.summary)):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_part_of_relative_geometry_is_not_enough(tmp_path):
    saved, loaded = make_vl_bert(relative_geometry=True), make_vl_bert(relative_geometry=True)
    learn_geometry(saved)
    path = own_run(saved, "vl_bert", tmp_path) / "model" / "encoder" / "model.safetensors"
    assert load_encoder(loaded, tmp_path, rules("vqa")).is_complete
    assert torch.equal(loaded.relative_geometry.output[0].weight, saved.relative_geometry.output[0].weight)
    lost = "relative_geometry.output.0.bias"
    save_file({key: value for key, value in load_file(path).items() if key != lost}, path)
    with pytest.raises(ValueError, match=rf"1 missing \({lost}\)"):
        load_encoder(make_vl_bert(relative_geometry=True), tmp_path, rules("vqa"))
