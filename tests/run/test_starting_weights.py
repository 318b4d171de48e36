"""`detector.weights`, `encoder.weights` and `task.weights` from a run, an official file or a BERT."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertModel

from e2e_vl.config import RunConfig, read_detector_config
from e2e_vl.model import VisionLanguageModel
from e2e_vl.run.build import build_model, build_tokenizer
from e2e_vl.run.checkpoint import load_model, save_model
from e2e_vl.text import load_tokenizer
from e2e_vl.weights.start import check_vocabulary
from e2e_vl.weights.vl_bert import OfficialVLBert
from tests.weights.official_detector import OFFICIAL_DETECTOR
from tests.weights.starts import options, replaced

# The official architecture, small: the tiny config's own departs from it.
ENCODER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
ENCODER |= {"max_position_embeddings": 64, "geometry_dim": 64}
save_official = OfficialVLBert().export
LEARNED_VECTORS = {"text_only_embedding": True, "masked_region_embedding": True}


@pytest.fixture
def config_of(tiny_config: Callable[..., RunConfig]) -> Callable[..., RunConfig]:
    """`config_of(task, words, encoder fields)`: a tiny run of the official architecture."""

    def make(task: str, *words: str, **encoder: object) -> RunConfig:
        config = replaced(tiny_config(*words), detector={"overrides": OFFICIAL_DETECTOR})
        more, settings = {}, {}
        if task == "pretraining":
            more = LEARNED_VECTORS
            classes = read_detector_config(config.detector).roi_heads.num_classes + 1
            settings = {"objectives": {"masked_regions": {"classes": classes}}}
        fields = {"config": {**ENCODER, **more, **encoder}}
        return replaced(config, encoder=fields, task={"name": task, "config": settings})

    return make


def with_options(config: RunConfig, **changed: object) -> RunConfig:
    """Settings with more entries of `task.config`."""
    return replaced(config, task={"config": options(config.task.config) | changed})


def build(config: RunConfig, seed: int = 0) -> VisionLanguageModel:
    torch.manual_seed(seed)
    tokenizer = build_tokenizer(config)
    return build_model(config, vocab_size=len(tokenizer), tokenizer=tokenizer)


@pytest.fixture
def pretrained(config_of: Callable[..., RunConfig], tmp_path: Path) -> tuple[VisionLanguageModel, dict[str, Path]]:
    """A pre-trained model, and the same as a run directory and as an official file."""
    config = config_of("pretraining")
    model = build(config, seed=1)
    save_model(tmp_path / "pretrained" / "model", config, model, build_tokenizer(config))
    save_official(model, "pretraining", tmp_path / "pretrained.model")
    return model, {"run": tmp_path / "pretrained", "file": tmp_path / "pretrained.model"}


def test_class_names_come_with_the_weights_of_the_detector(tiny_config, trained_run):
    names = trained_run.model.detector.class_names
    assert len(names) == trained_run.model.detector.num_classes and "star" in names
    for path in (trained_run.path, trained_run.path / "model" / "detector"):
        assert build(tiny_config(f"detector.weights={path}")).detector.class_names == names
    assert build(tiny_config()).detector.class_names is None


@pytest.mark.parametrize("kind", ["run", "folders", "file"])
def test_fine_tuning_starts_from_pre_training(config_of, pretrained, caplog, kind):
    source, paths = pretrained
    path = paths["file" if kind == "file" else "run"]
    encoder, task = (path / "model" / name if kind == "folders" else path for name in ("encoder", "task"))
    words = [f"detector.weights={path}", f"encoder.weights={encoder}", f"task.weights={task}"]
    with caplog.at_level(logging.INFO):
        started = build(config_of("refcoco", *words, *(["detector.expect=backbone"] if kind == "file" else [])), seed=2)
    own = build(config_of("refcoco"), seed=2)
    for a, b in (
        (source.detector.roi_heads.res5, started.detector.roi_heads.res5),
        (source.encoder.layers, started.encoder.layers),
        (source.encoder.embeddings.region_projection, started.encoder.embeddings.region_projection),
        (source.task.masked_regions.transform, started.task.head.transform),
        (own.task.head.output, started.task.head.output),
    ):
        assert all(torch.equal(value, b.state_dict()[name]) for name, value in a.state_dict().items())
    assert "copied: masked_regions.transform -> head.transform" in caplog.text
    assert "2 missing (head.output.weight, head.output.bias)" in caplog.text


def test_pre_training_goes_on_from_its_own_files_but_learns_from_the_new_detector(config_of, pretrained):
    source, paths = pretrained
    for path in paths.values():
        started = build(config_of("pretraining", f"encoder.weights={path}", f"task.weights={path}"), seed=2)
        for name, value in source.task.state_dict().items():
            assert torch.equal(started.task.state_dict()[name], value), name
        for name, value in started.detector.state_dict().items():
            assert torch.equal(started.teacher.state_dict()[name], value), name


@pytest.mark.parametrize("more", [{"background": "first"}, {"teacher": "file"}, {"teacher": "current"}])
@pytest.mark.parametrize("kind", ["run", "file"])
def test_region_classes_keep_their_meaning_where_the_background_has_another_place(config_of, pretrained, kind, more):
    """The source has it last. Files of class distributions have it first."""
    source, paths = pretrained
    config = with_options(config_of("pretraining", f"task.weights={paths[kind]}"), **more)
    started = build(config, seed=2).task.masked_regions.output
    order = torch.arange(source.task.masked_regions.config.classes)
    if more != {"teacher": "current"}:
        order = order.roll(1)
    for name, value in source.task.masked_regions.output.state_dict().items():
        assert torch.equal(started.state_dict()[name], value[order]), name


@pytest.mark.parametrize("order", [{"background": "first"}, {"teacher": "file"}])
def test_region_classes_of_a_run_with_the_background_first(config_of, tmp_path, order):
    config = with_options(config_of("pretraining"), **order)
    model = build(config, seed=1)
    save_model(tmp_path / "first" / "model", config, model, build_tokenizer(config))
    config = replaced(config, task={"weights": str(tmp_path / "first")})
    for more, moved in ((order, 0), ({"teacher": "frozen", "background": "last"}, -1)):
        started = build(with_options(config, **more), seed=2).task.masked_regions.output
        for name, value in model.task.masked_regions.output.state_dict().items():
            assert torch.equal(started.state_dict()[name], value.roll(moved, dims=0)), (more, name)


def test_unknown_names_in_a_head_of_ours_are_errors(config_of, tmp_path):
    config = config_of("refcoco")
    save_model(tmp_path / "run" / "model", config, build(config), build_tokenizer(config))
    path = tmp_path / "run" / "model" / "task" / "model.safetensors"
    save_file({**load_file(path), "adapter.weight": torch.zeros(2)}, path)
    with pytest.raises(ValueError, match=r"safetensors does not fit .* 1 unexpected \(adapter.weight\)"):
        build(replaced(config, task={"weights": str(tmp_path / "run")}))


@pytest.mark.parametrize("name", ["visual_part_on_end", "whole_image_in_sequence"])
def test_another_input_sequence_is_an_error(config_of, pretrained, name):
    """No shape shows it; only the paper's side or the official one is learned."""
    other = {name: not getattr(pretrained[0].encoder.config, name)}
    with pytest.raises(ValueError, match=f"set encoder.config.{name} to {not other[name]}"):
        build(config_of("pretraining", f"encoder.weights={pretrained[1]['run']}", **other))


def test_a_fine_tuned_model_comes_back_without_its_starting_weights(config_of, pretrained, tmp_path):
    _, paths = pretrained
    config = config_of("refcoco", f"encoder.weights={paths['run']}", f"task.weights={paths['run']}")
    model = build(config)
    save_model(tmp_path / "tuned", config, model, build_tokenizer(config))
    (paths["run"] / "model" / "config.yaml").unlink()  # the start is not read again
    again, loaded, _ = load_model(tmp_path / "tuned")
    assert again.task.weights is None
    assert again.encoder.weights is None
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in model.state_dict().items())


def test_bert_fills_what_the_weights_lack(config_of, pretrained, tmp_path):
    source, paths = pretrained
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    fields = {name: getattr(source.encoder.config, name) for name in (*sizes, "max_position_embeddings")}
    bert = BertModel(BertConfig(**fields))
    bert.save_pretrained(tmp_path / "bert")
    words = [f"encoder.weights={paths['run']}", f"encoder.fallback_weights={tmp_path / 'bert'}"]
    started = build(config_of("refcoco", *words, with_pooler=True)).encoder
    assert torch.equal(started.layers[0].output.dense.weight, source.encoder.layers[0].output.dense.weight)
    assert torch.equal(started.pooler.dense.weight, bert.pooler.dense.weight)


@pytest.mark.parametrize("kind", ["run", "model", "encoder", "encoder/model.safetensors"])
def test_another_vocabulary_of_the_same_size_is_no_start(config_of, pretrained, tmp_path, kind):
    _, paths = pretrained
    run = paths["run"]
    path = {"run": run, "model": run / "model"}.get(kind, run / "model" / kind)
    vocabulary = load_tokenizer(run / "model" / "tokenizer").get_vocab()
    words = sorted(vocabulary, key=vocabulary.get)
    own = sorted(words[5:], reverse=True)
    (tmp_path / "vocab.txt").write_text("\n".join([*words[:5], *own]) + "\n")
    config = config_of("refcoco", f"encoder.weights={path}", f"data.vocabulary={tmp_path / 'vocab.txt'}")
    with pytest.raises(ValueError, match=rf"set data.vocabulary={run / 'model' / 'tokenizer'}\."):
        build(config)
    build(replaced(config, data={"vocabulary": str(run / "model" / "tokenizer")}))


def test_a_vocabulary_that_lies_beside_a_file_by_chance_is_not_its_own(config_of, pretrained, tmp_path, monkeypatch):
    source, paths = pretrained
    vocabulary = load_tokenizer(paths["run"] / "model" / "tokenizer").get_vocab()
    words = sorted(vocabulary, key=vocabulary.get)
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "vocab.txt").write_text("\n".join([*words[:5], *words[:4:-1]]) + "\n")
    own = f"data.vocabulary={paths['run'] / 'model' / 'tokenizer'}"
    config = config_of("pretraining", f"encoder.weights={paths['file']}", own)
    expected = source.encoder.embeddings.word_embeddings.weight
    assert torch.equal(build(config, seed=2).encoder.embeddings.word_embeddings.weight, expected)
    monkeypatch.chdir(tmp_path)
    check_vocabulary("bert-base-uncased", load_tokenizer(paths["run"] / "model" / "tokenizer"))  # a name, no path


def test_a_head_for_the_same_answers_in_another_order_is_no_start(config_of, tmp_path):
    config = with_options(config_of("vqa"), answers=["yes", "no"])
    model = build(config)
    save_model(tmp_path / "vqa" / "model", config, model, build_tokenizer(config))
    config = replaced(config, task={"weights": str(tmp_path / "vqa")})
    assert torch.equal(build(config, seed=1).task.head.output.weight, model.task.head.output.weight)
    with pytest.raises(ValueError, match=r"answers.json: the head was trained for other answers"):
        build(with_options(config, answers=["no", "yes"]))


def test_an_official_head_needs_the_list_of_its_answers(config_of, tmp_path, monkeypatch):
    config = with_options(config_of("vqa"), answers=["yes", "no"])
    model, tokenizer = build(config), build_tokenizer(config)
    save_official(model, "vqa", tmp_path / "vqa.model")
    (tmp_path / "order.txt").write_text("yes\nno\n")
    for name in ("task.config", "data.files"):  # two ways to give it
        order = f"{name}.answers={tmp_path / 'order.txt'}"
        config = config_of("vqa", f"task.weights={tmp_path / 'vqa.model'}", *([order] if name == "data.files" else []))
        if name == "task.config":
            config = with_options(config, answers=str(tmp_path / "order.txt"))
        started = build_model(config, vocab_size=len(tokenizer), tokenizer=tokenizer)
        assert torch.equal(started.task.head.output.weight, model.task.head.output.weight)
    config = config_of("vqa", f"task.weights={tmp_path / 'vqa.model'}")
    monkeypatch.setattr("e2e_vl.run.build.possible_answers", lambda *_: ["no", "yes"])
    with pytest.raises(ValueError, match=r"vqa\.model: .* built from annotations.*task\.config\.answers"):
        build(config)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("encoder.weights=./nothing", "nothing: no weights"),
        ("task.weights=./nothing", "nothing: no weights"),
        ("encoder.weights={here}", "no weights of the encoder"),
    ],
)
def test_a_start_that_is_not_there(config_of, tmp_path, word, message):
    with pytest.raises(FileNotFoundError, match=message):
        build(config_of("refcoco", word.format(here=tmp_path)))
