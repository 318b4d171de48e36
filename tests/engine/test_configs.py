"""Every settings file that is shipped loads, and so does everything it names."""

from __future__ import annotations

import dataclasses
import types
from pathlib import Path

import pytest
import torch
import yaml

from detector.config import DetectorConfig
from e2e_vl.config import load_config
from e2e_vl.data.caption_settings import CaptionConfig
from e2e_vl.data.files import read_options
from e2e_vl.data.vcr_options import VCROptions
from e2e_vl.engine.build import build_dataset, build_model, take_sizes_of_detector
from e2e_vl.text import load_tokenizer

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "configs").rglob("*.yaml"))
VOCABULARY = 1000
OBJECTIVES = {"masked_words": 1.0, "masked_regions": 1.0, "relationship": 0.0, "masked_text": 1.0}  # and defaults


def is_run(path: Path) -> bool:
    keys = set(yaml.safe_load(path.read_text(encoding="utf-8")))
    return "output" in keys and bool(keys & {"data", "base"})


RUNS = [path for path in FILES if is_run(path)]
DETECTORS = [path for path in FILES if path.parent.name == "detector"]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT / "configs").as_posix()


@pytest.fixture(autouse=True)
def in_root(monkeypatch):
    """Files name each other relative to the repository, where the tools are run."""
    monkeypatch.chdir(ROOT)


def test_the_files_are_found():
    assert {"demo/refcoco.yaml", "tiny/refcoco.yaml", "refcoco/vl_bert_base.yaml"} <= {name_of(path) for path in RUNS}
    assert {"tiny.yaml", "R_101_C4.yaml"} <= {path.name for path in DETECTORS}
    assert not set(RUNS) & set(DETECTORS)


@pytest.mark.parametrize("path", DETECTORS, ids=name_of)
def test_detector_files_load_and_come_back_equal(path):
    config = DetectorConfig.from_yaml(path)
    assert DetectorConfig.from_yaml(yaml.safe_load(config.to_yaml())) == config


@pytest.mark.parametrize("path", RUNS, ids=name_of)
def test_the_model_of_a_run_can_be_built(path):
    """On the meta device: every parameter has its shape, and none takes memory."""
    missing = [] if "root" in yaml.safe_load(path.read_text()).get("data", {}) else ["data.root=DATA"]
    config = load_config(path, missing)
    config = dataclasses.replace(
        config,
        detector=dataclasses.replace(config.detector, weights=None),
        encoder=dataclasses.replace(config.encoder, weights=None),
    )
    if config.task.name == "vqa":  # the list of answers comes with the data
        config = dataclasses.replace(config, task=dataclasses.replace(config.task, config={"answers": ["yes", "no"]}))
    with torch.device("meta"):
        model = build_model(config, vocab_size=VOCABULARY)
    assert model.encoder.config.feature_dim == model.detector.feature_dim
    if config.encoder.name != "none":
        assert model.encoder.get_input_embeddings().weight.shape[0] == VOCABULARY
    assert any(parameter.requires_grad for parameter in model.parameters())
    if config.task.name == "pretraining":  # objectives, encoder and detector fit each other; needs no words
        model.task.initialise(None, model.encoder, model.detector)
        frozen_copy = config.task.config.get("teacher", "frozen") == "frozen" and model.task.config.masked_regions > 0
        assert (model.task.teacher is not None) == frozen_copy
    if config.task.name in ("pretraining", "vcr"):  # and the data fit them
        kind = CaptionConfig if config.task.name == "pretraining" else VCROptions
        options = read_options(kind, config.data.config, "data.config")
        has_corpus = "corpus" in config.data.files and getattr(options, "use_corpus", False)
        data = types.SimpleNamespace(config=options, options=options, corpus="corpus" if has_corpus else None)
        if kind is VCROptions:
            model.task.initialise(None, model.encoder, model.detector)
        model.task.check_data(data, model.detector)


@pytest.mark.parametrize("path", RUNS, ids=name_of)
def test_missing_data_are_named(path, tmp_path):
    """All options of the data are accepted, and the first file that is not there is named."""
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "red"]))
    config = load_config(path, [f"data.root={tmp_path / 'nowhere'}"])
    take_sizes_of_detector(config)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        build_dataset(
            config,
            load_tokenizer(str(vocabulary)),
            config.data.train_split,
            boxes=config.data.boxes.train,
            training=True,
        )


def test_the_ablations_differ_in_their_switches_only():
    """Paper, table 4; the full model is the official one."""
    runs = {
        name: load_config(ROOT / "configs" / "pretraining" / f"{name}.yaml", ["data.root=DATA", "output=RUN"])
        for name in ("vl_bert_base_e2e", *(f"ablation_{letter}" for letter in ("a", "b", "c", "d", "full")))
    }
    switches = {
        name.removeprefix("ablation_"): (
            *(config.task.config.get(key, default) for key, default in OBJECTIVES.items()),
            config.data.config.get("relationship", 0.0) > 0,
            config.data.config.get("use_corpus", True),
            config.detector.freeze,
        )
        for name, config in runs.items()
    }
    assert switches == {
        "a": (1, 0, 0, 0, False, False, True),
        "b": (1, 1, 0, 0, False, False, True),
        "c": (1, 1, 1, 0, True, False, True),
        "d": (1, 1, 0, 1, False, True, True),
        "full": (1, 1, 0, 1, False, True, False),
        "vl_bert_base_e2e": (1, 1, 0, 1, False, True, False),
    }
    assert all(config.train == runs["vl_bert_base_e2e"].train for config in runs.values())


@pytest.mark.parametrize("path", RUNS, ids=name_of)
def test_what_a_run_reads_is_drawn(path):
    """The formats of its own drawn scenes; runs of configs/table4 share those of its detector.yaml."""
    own = load_config(path, ["data.root=DATA"])
    drawn = own if path.parent.name != "table4" else load_config(path.parent / "detector.yaml")
    if drawn.data.synthetic.scenes and drawn.data.synthetic.formats is not None:
        assert {file.partition("/")[0] for file in own.data.files.values()} <= {
            "images",
            *drawn.data.synthetic.formats,
        }


@pytest.mark.parametrize("path", RUNS, ids=name_of)
def test_a_run_names_its_command(path):
    comment = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    assert any("tools/" in line and (name_of(path) in line or "/benchmark.py" in line) for line in comment)
