"""The shipped settings of VisualBERT's pre-training equal its official code, and its ablation differs in its switches.

The official values are those of configs/ of uclanlp/visualbert; the ablation is table 7 of the ACL paper.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from e2e_vl.config import RunConfig, differences, load_config
from e2e_vl.encoders.visual_bert import VisualBertEncoderConfig
from e2e_vl.run.build import build_objectives, resolve, task_config
from e2e_vl.tasks.objectives.base import Sizes

ROOT = Path(__file__).parents[2]
PRETRAINING, ABLATION = (ROOT / "configs" / folder for folder in ("pretraining", "visual_bert_ablation"))
# batch, rate, epochs, share of warm-up, first regions that are kept
OFFICIAL = {
    "coco_vqa": (48, 5e-5, 10, 0.1, None),
    "coco_nlvr2": (64, 5e-5, 10, 0.1, 144),
    "coco_flickr30k": (32, 5e-5, 10, 0.1, None),
    "coco_vcr": (128, 1e-4, 10, 0.1, None),
    "vqa": (64, 5e-5, 10, 0.1, None),
    "nlvr2": (64, 5e-5, 10, 0.1, 144),
    "flickr30k": (32, 5e-5, 10, 0.1, None),
    "vcr": (32, 5e-5, 8, 0.1879, None),  # one epoch of eight texts per question
}
JUDGED = {"coco": "pair", "vqa": None, "nlvr2": "stated", "flickr30k": None, "vcr": "stated"}


def load(path: Path, *words: str) -> RunConfig:
    return resolve(load_config(path, ["data.root=DATA", *words]))


def load_phase(name: str) -> RunConfig:
    return load(PRETRAINING / f"visual_bert_{name}.yaml")


def objectives_of(config: RunConfig) -> dict[str, Any]:
    return build_objectives(config.task.config.objectives, Sizes(hidden_size=8, vocab_size=10))


def test_every_phase_is_there():
    files = {path.stem.removeprefix("visual_bert_") for path in PRETRAINING.glob("visual_bert_*.yaml")}
    assert files == {*OFFICIAL, "common"}


@pytest.mark.parametrize("name", OFFICIAL)
def test_batch_rate_and_schedule(name):
    batch, rate, epochs, warmup, regions = OFFICIAL[name]
    config = load_phase(name)
    train = config.train
    assert (train.images_per_batch, train.accumulate, config.data.texts_per_image) == (batch, 1, 1)
    assert (train.lr, train.detector_lr, train.head_lr) == (rate, None, None)
    assert (train.epochs, train.max_steps, train.warmup_share, train.warmup_steps) == (epochs, None, warmup, 0)
    assert (train.optimizer, train.schedule, train.schedule_first) == ("bert_adam", "linear", False)
    assert (train.betas, train.eps, train.weight_decay) == ([0.9, 0.999], 1e-6, 0.01)
    assert (train.clip_norm, train.clip_tensor_norm) == (None, 1.0)
    assert (train.decay_norm_and_bias, train.decay_bn_scales) == (False, True)
    assert (train.mixed_precision, train.patience) == ("no", 3)
    assert config.eval.every_epochs == (8 if name == "vcr" else 1)  # the one official epoch of VCR is 8 here
    assert config.data.boxes.max_precomputed == regions


@pytest.mark.parametrize("name", OFFICIAL)
def test_texts_and_encoder(name):
    config = load_phase(name)
    task, objectives = config.task.config, objectives_of(config)
    judged = JUDGED[name.split("_")[0]]
    assert list(objectives) == ["masked_words", "relationship"] if judged else ["masked_words"]
    assert all(objective.config.weight == 1 for objective in objectives.values())
    if judged:
        assert objectives["relationship"].config.texts == judged
        assert objectives["relationship"].config.probability == 0.5
    words = objectives["masked_words"].config
    assert (words.probability, words.whole_words, words.always_mask) == (0.15, False, False)
    assert words.answer == ("letters" if name == "vqa" else "left_out")
    assert (task.cut_pairs, task.max_length) == ("fronts_too_much", None)
    if name == "vcr":  # 128 with [CLS] and two [SEP]
        assert task.choices.config["max_pieces"] == 125
        assert task.choices.config["names_restart_in_choices"] is True
        assert (task.choices.drawn, config.data.config.question) == ("in_turn", "in_turn")
    else:
        assert (config.data.max_text_length, task.choices) == (128, None)
    encoder = VisualBertEncoderConfig(**config.encoder.config)
    sizes = (encoder.hidden_size, encoder.num_hidden_layers, encoder.num_attention_heads, encoder.intermediate_size)
    assert sizes == (768, 12, 12, 3072)
    assert (encoder.hidden_dropout_prob, encoder.attention_probs_dropout_prob) == (0.1, 0.1)
    assert (encoder.train_pooler, encoder.special_visual_initialize, encoder.bypass_transformer) == (False, True, False)
    assert encoder.with_box_numbers == name.endswith("flickr30k")
    assert encoder.uses_whole_image == name.endswith("vcr")
    assert config.data.vocabulary == "bert-base-uncased" and config.data.flip == 0


@pytest.mark.parametrize("name", OFFICIAL)
def test_a_phase_starts_from_the_one_before(name):
    config = load_phase(name)
    if name.startswith("coco_"):
        assert (config.encoder.weights, config.task.weights) == ("bert-base-uncased", "bert-base-uncased")
        return
    before = load_phase(f"coco_{name}")
    assert (config.encoder.weights, config.task.weights) == (f"{before.output}/best", f"{before.output}/best")
    assert before.train.keep_best is not None  # writes that folder
    assert config.encoder.config == before.encoder.config
    assert config.detector.config == before.detector.config
    is_vcr = name == "vcr"  # whose network of regions goes on too
    assert config.detector.weights == (f"{before.output}/best" if is_vcr else None)


def test_the_first_phase_of_vcr_reads_masks_and_classes():
    first, second = load_phase("coco_vcr"), load_phase("vcr")
    assert (first.detector.backend, first.detector.overrides) == (second.detector.backend, second.detector.overrides)
    assert (first.data.config.min_object_score, first.data.boxes.train) == (0.7, "gt")
    assert first.data.resize == second.data.resize
    task, choices = task_config(first), task_config(second).choices.config
    assert (task.mask_size, task.mask_at) == (14, choices["mask_at"])


# Fine-tuning -> the second phase that it goes on from
TUNED = {
    "vqa/visual_bert": "vqa",
    "nlvr2/visual_bert": "nlvr2",
    "flickr30k/visual_bert": "flickr30k",
    "vcr/visual_bert_q2a": "vcr",
    "vcr/visual_bert_qa2r": "vcr",
}


@pytest.mark.parametrize("name", TUNED)
def test_fine_tuning_starts_from_the_second_phase(name):
    """One `data.root` serves the whole chain, and no start is given by hand."""
    config, before = load(ROOT / "configs" / f"{name}.yaml"), load_phase(TUNED[name])
    assert (config.encoder.weights, config.task.weights) == (f"{before.output}/best", None)
    assert before.train.keep_best is not None  # writes that folder
    is_vcr = before.detector.backend == "r2c"  # whose network of regions goes on too
    assert config.detector.weights == (f"{before.output}/best" if is_vcr else None)
    assert (config.detector.backend, config.detector.config) == (before.detector.backend, before.detector.config)
    own = {key: value for key, value in config.encoder.config.items() if key != "region_types"}
    assert own == before.encoder.config
    answers = {"answers": "vqa/answers_vqa.txt"} if name.startswith("vqa/") else {}  # which pre-training does not read
    assert config.data.files == before.data.files | answers
    assert (config.data.name, config.data.vocabulary) == (before.data.name, before.data.vocabulary)
    assert (config.data.train_split, config.data.eval_splits) == (before.data.train_split, before.data.eval_splits)
    assert config.data.boxes.train == before.data.boxes.train and config.data.resize == before.data.resize
    assert config.data.boxes.max_precomputed == before.data.boxes.max_precomputed


def test_the_first_phases_read_what_the_later_ones_do():
    """Photos and features of one data set lie in one place for all phases of a task."""
    first, second = load_phase("coco_vqa"), load_phase("vqa")
    assert {key: second.data.files[key] for key in ("images", "features")} == {
        key: first.data.files[key] for key in ("images", "features")
    }
    assert first.data.eval_splits == second.data.eval_splits == ["minival2014"]


# The ablation: row -> phase -> what differs from the full model's phase, but for outputs and for starts from the same
# row's phase before
PHASES = ("coco", "task", "nlvr2")
LATE = {"encoder.config.bypass_transformer: None -> True"}
FROM_BERT = {
    "encoder.weights: runs/visual_bert_ablation_full_coco/best -> bert-base-uncased",
    "task.weights: runs/visual_bert_ablation_full_coco/best -> bert-base-uncased",
}
ROWS = {
    "no_grounding": {"coco": {"data.config.use_images: None -> False"}, "task": set(), "nlvr2": set()},
    "no_coco": {"task": FROM_BERT, "nlvr2": set()},
    "late_fusion": dict.fromkeys(PHASES, LATE),
    "no_bert": {
        "coco": {"encoder.weights: bert-base-uncased -> None", "task.weights: bert-base-uncased -> None"},
        "task": set(),
        "nlvr2": set(),
    },
    "no_objective2": {
        "coco": {"task.config.objectives.relationship"},
        "task": {"task.fallback_weights: None -> bert-base-uncased"},  # the sentence head, which phase 1 lacks
        "nlvr2": set(),
    },
    **{
        f"regions_{number}": {phase: {f"data.boxes.max_precomputed: 36 -> {number}"} for phase in PHASES}
        for number in (9, 18, 72)  # 36 are the full model of the ablation, 144 the published configs
    },
}
FULL = {"full_coco": "visual_bert_coco_nlvr2", "full_task": "visual_bert_nlvr2"}  # but for the number of regions
PUBLISHED = {  # NLVR2 (dev)
    "full": 66.7,
    "no_grounding": 63.9,
    "no_coco": 62.9,
    "late_fusion": 61.4,
    "no_bert": 64.7,
    "no_objective2": 64.9,
    "regions_9": 64.8,
    "regions_18": 65.5,
    "regions_72": 67.1,
}
NLVR2_FILES = [f"{row}_{phase}" for row, phases in ROWS.items() for phase in phases]


def of_rows(lines: list[str], prefix: str) -> set[str]:
    """Differences without outputs, and without starts from the same row's phase before."""
    return {
        line for line in lines if not line.startswith("output:") and not line.partition(" -> ")[2].startswith(prefix)
    }


def starts(config: RunConfig) -> list[str]:
    """Runs that a run goes on from."""
    given = (config.detector.weights, config.encoder.weights, config.task.weights)
    return [path for path in given if path is not None and path.startswith("runs/")]


def header_of(path: Path) -> str:
    lines = path.read_text("utf-8").splitlines()
    return " ".join(line.removeprefix("#").strip() for line in lines if line.startswith("#"))


def test_every_row_of_the_ablation_is_there():
    """All phases of every row, so that a row is a chain of configs without settings of the command line."""
    assert {path.stem for path in ABLATION.glob("*.yaml")} == {*NLVR2_FILES, *FULL, "full_nlvr2"}
    assert set(PUBLISHED) == {"full", *ROWS}
    for name in (*NLVR2_FILES, *FULL, "full_nlvr2"):
        assert f"NLVR2 {PUBLISHED[name.rpartition('_')[0]]} (dev)" in header_of(ABLATION / f"{name}.yaml"), name


@pytest.mark.parametrize("name", NLVR2_FILES)
def test_a_row_of_the_ablation_differs_in_its_switch_only(name):
    row, _, phase = name.rpartition("_")
    full, own = load(ABLATION / f"full_{phase}.yaml"), load(ABLATION / f"{name}.yaml")
    assert own.output == f"runs/visual_bert_ablation_{name}"
    changed = of_rows(differences(full, own), f"runs/visual_bert_ablation_{row}_")
    before = [one for one in ROWS[row] if PHASES.index(one) < PHASES.index(phase)]
    expected = f"runs/visual_bert_ablation_{row}_{before[-1]}/best" if before else None
    assert starts(own) == ([expected] * (1 if phase == "nlvr2" else 2) if before else [])
    if name == "no_objective2_coco":
        assert list(objectives_of(full)) == ["masked_words", "relationship"]
        assert list(objectives_of(own)) == ["masked_words"]
        assert {line.partition(":")[0] for line in changed} == ROWS[row][phase]
    else:
        assert changed == ROWS[row][phase]


def test_144_regions_are_the_published_configs():
    for name in ("pretraining/visual_bert_coco_nlvr2", "pretraining/visual_bert_nlvr2", "nlvr2/visual_bert"):
        assert load(ROOT / "configs" / f"{name}.yaml").data.boxes.max_precomputed == 144


# Rows of the tables of whole tasks: task -> config of each last phase -> config of the full model
TASK_FILES = {
    "vqa": {"vqa": "vqa/visual_bert"},
    "nlvr2": {"nlvr2": "nlvr2/visual_bert"},
    "flickr30k": {"flickr30k": "flickr30k/visual_bert"},
    "vcr": {"q2a": "vcr/visual_bert_q2a", "qa2r": "vcr/visual_bert_qa2r"},
}
TASK_NUMBERS = {  # (task, row) -> in the header
    ("vqa", "late_fusion"): "68.18 (test-dev)",
    ("vqa", "no_coco"): "70.18 (test-dev)",
    ("nlvr2", "late_fusion"): "64.6 (dev)",
    ("nlvr2", "no_coco"): "63.5 (dev)",
    ("flickr30k", "late_fusion"): "R@1 70.33, R@5 84.53, R@10 86.39 (dev)",
    ("flickr30k", "no_coco"): "R@1 68.07, R@5 83.98, R@10 86.24 (dev)",
    ("vcr", "late_fusion"): "Q->A 70.1, QA->R 71.9, Q->AR 50.6 (val)",
    ("vcr", "no_coco"): "Q->A 67.9, QA->R 69.5, Q->AR 47.9 (val)",
}
FROZEN = {"detector.overrides.MODEL: None -> {'BACKBONE': {'FREEZE_AT': 4}, 'R2C': {'FROZEN_STATISTICS': 'batch'}}"}


def full_config(task: str, phase: str) -> str:
    first = {"coco": f"pretraining/visual_bert_coco_{task}", "task": f"pretraining/visual_bert_{task}"}
    return (first | TASK_FILES[task])[phase]


def test_every_row_of_a_whole_task_is_there():
    for task, tuned in TASK_FILES.items():
        late = [f"late_fusion_{phase}" for phase in ("coco", "task", *tuned)]
        frozen = [f"frozen_cnn_{phase}" for phase in tuned] if task == "vcr" else []
        found = {path.stem for path in (ABLATION / task).glob("*.yaml")}
        assert found == {*late, *frozen, *(f"no_coco_{phase}" for phase in ("task", *tuned))}


@pytest.mark.parametrize(("task", "row"), TASK_NUMBERS)
def test_a_row_of_a_whole_task_differs_in_its_switch_only(task, row):
    prefix, before = f"runs/visual_bert_ablation_{task}_{row}_", None
    for phase in (*(["coco"] if row == "late_fusion" else []), "task", *TASK_FILES[task]):
        path = ABLATION / task / f"{row}_{phase}.yaml"
        full, own = load(ROOT / "configs" / f"{full_config(task, phase)}.yaml"), load(path)
        assert own.output == f"{prefix}{phase}"
        changed = of_rows(differences(full, own), prefix)
        if row == "late_fusion":
            assert changed == LATE
        elif phase == "task":
            given = f"runs/pretraining_visual_bert_coco_{task}/best -> bert-base-uncased"
            network = (
                {"detector.weights: runs/pretraining_visual_bert_coco_vcr/best -> None"} if task == "vcr" else set()
            )
            assert changed == {f"encoder.weights: {given}", f"task.weights: {given}"} | network
        else:  # without COCO, the paper's CNN of VCR is not fine-tuned
            assert changed == (FROZEN if task == "vcr" else set())
        assert set(starts(own)) == ({before} if before else set())
        assert TASK_NUMBERS[task, row] in header_of(path)
        before = f"{prefix}{phase}/best" if phase in ("coco", "task") else before


@pytest.mark.parametrize("phase", TASK_FILES["vcr"])
def test_the_frozen_cnn_of_vcr(phase):
    path = ABLATION / "vcr" / f"frozen_cnn_{phase}.yaml"
    full, own = load(ROOT / "configs" / f"{full_config('vcr', phase)}.yaml"), load(path)
    assert of_rows(differences(full, own), "nothing") == FROZEN
    assert own.detector.overrides == load_phase("vcr").detector.overrides and "Q->AR 51.4 (val)" in header_of(path)


@pytest.mark.parametrize("name", FULL)
def test_the_full_model_of_the_ablation_is_the_official_one_with_36_regions(name):
    official, own = load(PRETRAINING / f"{FULL[name]}.yaml"), load(ABLATION / f"{name}.yaml")
    changed = [line for line in differences(official, own) if "weights: runs/" not in line]
    assert changed == ["data.boxes.max_precomputed: 144 -> 36", f"output: {official.output} -> {own.output}"]


def test_fine_tuning_of_the_ablation():
    config = load(ABLATION / "full_nlvr2.yaml")
    pretraining = load(ABLATION / "full_task.yaml")
    assert config.encoder.weights == f"{pretraining.output}/best" and config.task.weights is None
    assert config.data.boxes == pretraining.data.boxes and config.data.files == pretraining.data.files
    changed = {line for line in differences(pretraining.train, config.train) if not line.startswith("keep_best")}
    assert changed == {"lr: 5e-05 -> 2e-05"}


# Mistakes of the official code -> what is right
MISTAKES = {
    "cut_pairs": ("fronts_too_much", ("ends", "fronts")),
    "answer": ("letters", ("words", "left_out")),
    "drawn": ("in_turn", ("random",)),
    "question": ("in_turn", ("both", "answer", "rationale")),
    "names_restart_in_choices": (True, (False,)),
    "cut_choices_only": (True, (False,)),
    "ground_at": ("word_number", ("pieces",)),
}
PAPER = ROOT / "configs/visual_bert_paper"


def settings_in(part: Any) -> list[tuple[str, Any]]:
    """Names and values at every depth of nested settings."""
    if not isinstance(part, dict):
        return []
    return [pair for name, value in part.items() for pair in [(name, value), *settings_in(value)]]


def is_for_visual_bert(path: Path) -> bool:
    return "visual_bert" in path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", sorted(PAPER.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_paper_has_no_mistake_of_the_official_code(path):
    config = load(path)
    found = settings_in(config.task.config) + settings_in(config.data.config)
    stated = [(name, value) for name, value in found if name in MISTAKES]
    assert stated
    assert all(value in MISTAKES[name][1] for name, value in stated), stated
    if config.task.name == "vcr":
        assert {name for name, _ in stated} >= {"names_restart_in_choices", "cut_choices_only", "ground_at"}


def test_mistakes_are_on_only_where_the_official_code_is_followed():
    """From pixels and in drawn runs nothing of the official code is to be repeated."""
    official = {"pretraining", "vcr", "visual_bert_ablation"}
    seen = set()
    for path in sorted((ROOT / "configs").rglob("*.yaml")):
        folder = path.relative_to(ROOT / "configs").parts[0]
        if not is_for_visual_bert(path) or folder == "analysis" or path.stem == "visual_bert_common":
            continue
        config = load(path)
        found = settings_in(config.task.config) + settings_in(config.data.config)
        on = {name for name, value in found if name in MISTAKES and value == MISTAKES[name][0]}
        assert not on or folder in official, (path, on)
        seen |= on
    assert seen == set(MISTAKES)
