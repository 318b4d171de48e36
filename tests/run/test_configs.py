"""Every settings file that is shipped loads, and so does everything it names."""

from __future__ import annotations

import re
import types
from pathlib import Path

import msgspec
import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DistributedType

from detector.config import DetectorConfig
from e2e_vl.config import RunConfig
from e2e_vl.config_files import load_config
from e2e_vl.registry import TASKS
from e2e_vl.run.build import build_examples, build_model, resolve_config
from e2e_vl.samples import CorrectAnswer, CorrectChoice, HumanAnswers
from e2e_vl.text import load_tokenizer
from tests.run.runs import ROOT

FILES = sorted((ROOT / "configs").rglob("*.yaml"))
VOCABULARY = 1000
PIXEL_MEAN = [123.675, 116.28, 103.53]  # of ImageNet
PIXEL_STD = [58.395, 57.12, 57.375]


def is_run(path: Path) -> bool:
    keys = set(yaml.safe_load(path.read_text(encoding="utf-8")))
    return "output" in keys and bool(keys & {"data", "base"})


RUNS = [path for path in FILES if is_run(path)]
DETECTORS = [
    path
    for path in FILES
    if path.parent.name == "detector" and "TRANSFORMERS_BACKBONE" not in path.read_text("utf-8")  # read from the hub
]
ACCELERATE = [path for path in FILES if path.parent.name == "accelerate"]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT / "configs").as_posix()


@pytest.fixture(autouse=True)
def in_root(monkeypatch):
    """Files name each other relative to the repository, where the tools are run."""
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("path", DETECTORS, ids=name_of)
def test_detector_files_load_and_come_back_equal(path):
    config = DetectorConfig.from_yaml(path)
    assert DetectorConfig.from_yaml(yaml.safe_load(config.to_yaml())) == config


@pytest.mark.parametrize("path", ACCELERATE, ids=name_of)
def test_files_of_accelerate_are_for_any_machine(path):
    """The launcher refuses unknown keys; what differs between machines is given on its command line."""
    given = load_config_from_file(str(path))
    assert given.num_processes % given.num_machines == 0
    is_several = given.distributed_type is DistributedType.MULTI_GPU
    assert is_several == (given.num_processes > 1) and (given.num_machines > 1) == (path.stem == "several_machines")
    assert given.mixed_precision is None, "train.mixed_precision decides"
    assert given.main_process_ip is None and given.gpu_ids is None and given.machine_rank == 0


def without_files(config: RunConfig, answers: int = 2) -> RunConfig:
    """Settings of a model that starts at random, with a list of answers if it needs one, which comes with the data."""
    replace, task, answers = msgspec.structs.replace, config.task.config, ["yes", *map(str, range(1, answers))]
    if TASKS[config.task.name].cls.vocabulary_class is not None:
        task = replace(task, answers=answers)
    if config.task.name == "pretraining":
        image_qa = replace(task.objectives["image_qa"], answers=answers)
        task = replace(task, objectives=task.objectives | {"image_qa": image_qa})
    return replace(
        config,
        detector=replace(config.detector, weights=None),
        encoder=replace(config.encoder, weights=None),
        task=replace(config.task, weights=None, fallback_weights=None, config=task),
        phrases=replace(config.phrases, weights=None),
        box_refinement=replace(config.box_refinement, weights=None),
    )


def without_hub(config: RunConfig) -> RunConfig:
    """Settings of a Swin-T that are those of the hub, without the hub."""
    if "swin" not in config.detector.config:
        return config
    swin = {"NAME": "", "CONFIG": {"model_type": "swin"}}
    model = config.detector.overrides.get("MODEL", {})
    model = model | {"TRANSFORMERS_BACKBONE": swin, "PIXEL_MEAN": PIXEL_MEAN, "PIXEL_STD": PIXEL_STD}
    detector = msgspec.structs.replace(config.detector, overrides={"MODEL": model, "INPUT": {"FORMAT": "RGB"}})
    return msgspec.structs.replace(config, detector=detector)


@pytest.fixture
def no_draws(monkeypatch):
    """On the meta device they do nothing, slowly."""
    for draw in ("normal_", "uniform_"):
        monkeypatch.setattr(torch.Tensor, draw, lambda tensor, *more, **named: tensor)


@pytest.mark.usefixtures("no_draws")
@pytest.mark.parametrize("path", RUNS, ids=name_of)
def test_the_model_of_a_run_can_be_built_and_missing_data_are_named(path, tmp_path):
    """All options of the data are accepted, and the first file that is not there is named.

    The model is on the meta device: every parameter has its shape, none takes memory, and there is nothing to draw.
    """
    config = without_hub(load_config(path, [f"data.root={tmp_path / 'nowhere'}"]))
    with torch.device("meta"):
        model = build_model(without_files(config), vocab_size=VOCABULARY)
    assert model.encoder.config.feature_dim == model.detector.feature_dim
    if config.encoder.name != "none":
        assert model.encoder.get_input_embeddings().weight.shape[0] == VOCABULARY
    assert any(parameter.requires_grad for parameter in model.parameters())
    is_pretraining, task = config.task.name == "pretraining", model.task
    if is_pretraining or config.task.name == "vcr":  # objectives, encoder, detector and data fit each other
        task.init_weights(None, model.encoder, model.detector)  # needs no words
        options = config.data.config
        has_corpus = "corpus" in config.data.files and getattr(options, "use_corpus", False)
        dataset = types.SimpleNamespace(
            groups=[[0, 1], [2, 3]],
            class_names=getattr(options, "class_names", None),
            corpus="corpus" if has_corpus else None,
            truths=lambda: [CorrectAnswer("yes"), CorrectChoice(1), HumanAnswers(("yes",))],
        )
        task.check_data(dataset, model.detector)
    has_teacher = is_pretraining and task.config.teacher == "frozen" and task.region_masking.predicts_regions
    assert (model.teacher is not None) == has_teacher

    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "red"]))
    config, tokenizer = resolve_config(config), load_tokenizer(str(tmp_path / "vocab.txt"))
    split, boxes = config.data.train_split, config.data.boxes.train
    with pytest.raises(FileNotFoundError, match="nowhere"):
        build_examples(config, model, tokenizer, split, boxes=boxes, training=True)


@pytest.mark.parametrize("path", RUNS, ids=name_of)
def test_the_processes_of_the_command_in_a_header_share_each_batch_evenly(path):
    settings = load_config(path, ["data.root=DATA"]).train
    for processes in map(int, re.findall(r"--num_processes (\d+)", path.read_text(encoding="utf-8"))):
        assert settings.images_per_batch % (processes * settings.gradient_accumulation_steps) == 0


BASE = (
    *("pretraining/vl_bert_base_e2e", "pretraining/visual_bert_coco_vqa", "pretraining/lxmert"),
    *("refcoco/vl_bert_base", "vqa/vl_bert_base", "vcr/vl_bert_base_q2a"),
)


@pytest.mark.usefixtures("no_draws")
def test_the_table_of_larger_batches_is_computed_from_the_configs():
    rows = "\n".join(map(larger_batch, BASE))
    assert rows in (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8"), f"docs/scaling.md should have\n{rows}"


def larger_batch(name: str, factor: int = 4) -> str:
    """A recipe's row in docs/scaling.md: its batch and one `factor` times as large, and the bytes of its gradients."""
    config = load_config(ROOT / "configs" / f"{name}.yaml", ["data.root=DATA"])
    settings, images = config.train, config.train.images_per_batch
    with torch.device("meta"):
        model = build_model(without_files(config, 9500 if "pretraining" in name else 3129), vocab_size=30522)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    powers = (0, 1) if settings.optimizer == "sgd" else (0, 1, 0.5)
    rates = [f"{settings.lr * factor**power:.2e}".replace("e-0", "e-") for power in powers] + ["-"] * (3 - len(powers))
    warmup = [f"{settings.warmup_steps // n:,}" for n in (1, factor)]
    if settings.warmup_ratio is not None:
        warmup = [f"{100 * settings.warmup_ratio:.4g} %"] * 2
    cells = [
        f"`{name}`",
        images,
        rates[0],
        warmup[0],
        factor * images,
        *rates[1:],
        warmup[1],
        f"{trained / 250e3:.0f} MB",
    ]
    return f"| {' | '.join(map(str, cells))} |"
