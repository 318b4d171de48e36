"""The shipped settings of VL-BERT equal the YAML files of its official code (cfgs/ of commit 4373674).

Official learning rates are per sample: the code multiplies them with GPUs x samples per GPU x accumulated batches. In
pre-training, samples are captions and texts of the corpus. The number of GPUs is in the file's name.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from detector.config import DetectorConfig
from e2e_vl.config import RunConfig, load_config
from e2e_vl.encoders.vl_bert import VLBertConfig
from e2e_vl.parts import TASKS
from e2e_vl.run.build import build_objectives
from e2e_vl.tasks.objectives.base import Sizes

ROOT = Path(__file__).parents[2]
VCR_QUESTIONS = 212_923  # of the training split
SIZES = {"base": (768, 12, 12, 3072), "large": (1024, 24, 16, 4096)}  # width, layers, heads, inner width
EXPRESSIONS = {"refcoco": ("refcoco", "unc"), "refcocog": ("refcocog", "umd")}  # folder and split of REFER
# Settings that the official code does not have.
OWN = {
    *("pretraining/paper", "refcoco/vl_bert_base_precomputed", "refcoco/vl_bert_base_fpn"),
    "vqa/vl_bert_base_pixels",
}


@dataclasses.dataclass(frozen=True)
class Official:
    """One official YAML file."""

    file: str
    gpus: int
    images: int  # on each GPU, beside each other
    accumulate: int
    lr: float  # per sample
    epochs: int
    warmup: int
    clip: float
    fp16: bool = False
    texts: int = 0  # of the corpus, on each GPU

    @property
    def images_per_step(self) -> int:
        return self.gpus * self.images * self.accumulate

    @property
    def samples_per_step(self) -> int:
        return self.gpus * (self.images + self.texts) * self.accumulate


PRETRAINING = {"lr": 1e-7, "epochs": 10, "warmup": 16000, "clip": 10}
REFCOCO = {"gpus": 4, "lr": 8e-7, "epochs": 20, "warmup": 3750, "clip": 1}
VQA = {"gpus": 4, "lr": 6.25e-7, "epochs": 5, "warmup": 500, "clip": 1}
VCR = {"gpus": 4, "images": 4, "accumulate": 4, "lr": 7e-5, "epochs": 20, "warmup": 1000, "clip": 10}

OFFICIAL = {
    "pretraining/vl_bert_base_e2e": Official(
        "base_e2e_16x16G_fp16", gpus=16, images=8, texts=8, accumulate=1, fp16=True, **PRETRAINING
    ),
    "pretraining/vl_bert_large_e2e": Official(
        "large_e2e_16x16G_fp16", gpus=16, images=4, texts=4, accumulate=2, fp16=True, **PRETRAINING
    ),
    "pretraining/vl_bert_base_prec": Official(
        "base_prec_4x16G_fp32", gpus=4, images=32, texts=32, accumulate=1, **PRETRAINING
    ),
    "pretraining/vl_bert_large_prec": Official(
        "large_prec_4x16G_fp16", gpus=4, images=32, texts=32, accumulate=1, fp16=True, **PRETRAINING
    ),
    "pretraining/vl_bert_base_prec_no_text": Official(
        "base_prec_withouttextonly_4x16G_fp32", gpus=4, images=64, accumulate=1, **PRETRAINING | {"warmup": 8000}
    ),
    "refcoco/vl_bert_base": Official("base_gt_boxes_4x16G", images=4, accumulate=2, **REFCOCO),
    "refcoco/vl_bert_base_detected": Official("base_detected_regions_4x16G", images=4, accumulate=2, **REFCOCO),
    "refcoco/vl_bert_large": Official("large_gt_boxes_4x16G", images=2, accumulate=4, **REFCOCO),
    "refcoco/vl_bert_large_detected": Official("large_detected_regions_4x16G", images=2, accumulate=4, **REFCOCO),
    "vqa/vl_bert_base": Official("base_4x16G_fp32", images=64, accumulate=1, **VQA),
    "vqa/vl_bert_large": Official("large_4x16G_fp32", images=16, accumulate=4, **VQA),
    "vcr/vl_bert_base_q2a": Official("base_q2a_4x16G_fp32", **VCR),
    "vcr/vl_bert_base_qa2r": Official("base_qa2r_4x16G_fp32", **VCR),
    "vcr/vl_bert_large_q2a": Official("large_q2a_4x16G_fp16", fp16=True, **VCR),
    "vcr/vl_bert_large_qa2r": Official("large_qa2r_4x16G_fp16", fp16=True, **VCR),
}


def file_of(name: str) -> Path:
    return ROOT / "configs" / f"{name}.yaml"


def load(name: str) -> RunConfig:
    return load_config(file_of(name), ["data.root=DATA"])


def task_config(config: RunConfig):
    return TASKS[config.task.name][0](**config.task.config)


def test_every_file_is_accounted_for():
    files = {
        f"{folder}/{path.stem}"
        for folder in ("pretraining", "refcoco", "vqa", "vcr")
        for path in (ROOT / "configs" / folder).glob("*.yaml")
        # tests/run/test_visual_bert_settings.py, test_lxmert_settings.py
        if not path.stem.startswith(("visual_bert", "lxmert"))
    }
    other_expressions = {name for name in files if name.split("/")[1].startswith(tuple(EXPRESSIONS))}
    ablations = {name for name in files if "ablation" in name}  # tests/run/test_configs.py
    assert files - other_expressions - ablations - OWN == set(OFFICIAL)


@pytest.mark.parametrize("name", OFFICIAL)
def test_batch_rate_and_schedule(name):
    official, train = OFFICIAL[name], load(name).train
    assert train.images_per_batch == official.images_per_step
    assert train.accumulate == official.accumulate
    assert train.lr == pytest.approx(official.lr * official.samples_per_step, rel=1e-9)
    assert (train.detector_lr, train.head_lr) == (None, None)  # LR_MULT is empty
    assert (train.epochs, train.max_steps) == (official.epochs, None)
    assert train.warmup_steps == official.warmup
    assert train.schedule_first
    assert (train.clip_norm, train.weight_decay) == (official.clip, 1e-4)
    assert train.decay_norm_and_bias
    assert train.mixed_precision == ("fp16" if official.fp16 else "no")
    if not name.startswith("vcr/"):
        assert (train.optimizer, train.schedule) == ("adamw_official", "triangle")
        assert (train.betas, train.eps) == ([0.9, 0.999], 1e-6)
        return
    assert (train.optimizer, train.momentum, train.schedule, train.decay_factor) == ("sgd", 0.9, "steps", 0.1)
    loaded = -(-VCR_QUESTIONS // (official.gpus * official.images))  # batches of a GPU in an epoch
    assert train.decay_steps == [int(epoch * loaded / official.accumulate) for epoch in (14, 18)]


@pytest.mark.parametrize("name", OFFICIAL)
def test_header_names_the_official_file_and_its_number_of_gpus(name):
    header = "".join(line for line in file_of(name).read_text().splitlines(keepends=True) if line.startswith("#"))
    assert f"{OFFICIAL[name].file}.yaml" in header
    assert f"--num_processes {OFFICIAL[name].gpus} " in header
    assert ("LARGE" in header) == ("large" in name)


@pytest.mark.parametrize("name", OFFICIAL)
def test_encoder(name):
    config = load(name)
    encoder, size = VLBertConfig(**config.encoder.config), "large" if "large" in name else "base"
    sizes = (encoder.hidden_size, encoder.num_hidden_layers, encoder.num_attention_heads, encoder.intermediate_size)
    assert sizes == SIZES[size]
    assert config.data.vocabulary == f"bert-{size}-uncased"
    assert encoder.visual_size == encoder.hidden_size
    assert (encoder.hidden_dropout_prob, encoder.attention_probs_dropout_prob, encoder.hidden_act) == (0.1, 0.1, "gelu")
    assert (encoder.max_position_embeddings, encoder.type_vocab_size, encoder.initializer_range) == (512, 3, 0.02)
    assert (encoder.visual_scale_text_init, encoder.visual_scale_object_init) == (0.0, 0.0)
    assert encoder.visual_layer_norm
    assert encoder.uses_whole_image  # ADD_IMAGE_AS_A_BOX
    assert encoder.with_pooler == name.startswith("vcr/")
    pretraining, precomputed = name.startswith("pretraining/"), "prec" in name
    learned = (encoder.text_only_embedding, encoder.masked_region_embedding, encoder.masked_region_feature)
    assert learned == (pretraining, pretraining, pretraining and precomputed)


@pytest.mark.parametrize("name", OFFICIAL)
def test_detector_and_images(name):
    config = load(name)
    if "prec" in name or name.startswith("vqa/"):
        assert config.detector.backend == "precomputed"
    else:
        assert (config.detector.backend, config.detector.freeze) == ("builtin", False)
        assert config.data.resize.short_edge == [600]
        assert config.data.resize.long_edge == (1200 if name.startswith("vcr/") else 1000)
    # the official code mirrors the boxes of precomputed features too; in pre-training nothing is mirrored here
    assert config.data.flip == (0.0 if name.startswith("pretraining/") and "prec" in name else 0.5)
    assert (config.seed, config.data.workers, config.data.texts_per_image) == (12345, 4, 1)
    detector = DetectorConfig.from_yaml(ROOT / config.detector.config)
    assert not config.detector.overrides
    resnet, images = detector.resnet, detector.input
    assert (resnet.depth, resnet.res5_dilation, resnet.stride_in_1x1) == (101, 2, True)
    assert (resnet.freeze_at, resnet.norm) == (2, "FrozenBN")
    assert images.format == "BGR"
    assert (images.pixel_mean, images.pixel_std) == ((102.9801, 115.9465, 122.7717), (1.0, 1.0, 1.0))


@pytest.mark.parametrize("name", [name for name in OFFICIAL if name.startswith("pretraining/")])
def test_pretraining(name):
    config = load(name)
    task, with_texts = config.task.config, OFFICIAL[name].texts > 0
    objectives = build_objectives(task.objectives, Sizes(hidden_size=8, vocab_size=10))
    weights = {objective: module.config.weight for objective, module in objectives.items()}
    assert weights == {"masked_words": 1.0, "masked_regions": 1.0} | ({"masked_text": 1.0} if with_texts else {})
    assert config.data.config.get("use_corpus", True) == with_texts
    if with_texts:
        corpus = objectives["masked_text"].config
        assert (corpus.min_words, corpus.max_length, corpus.special_tokens) == (64, 64, False)
    masking = [
        (one.probability, one.always_mask)
        for one in (objectives[key].config for key in weights if key != "masked_regions")
    ]
    assert set(masking) == {(0.15, False)}
    assert task.max_length == 64
    assert task.mask_pixels == ("prec" not in name)  # MASK_RAW_PIXELS cannot hide what is precomputed


@pytest.mark.parametrize("name", [name for name in OFFICIAL if not name.startswith("pretraining/")])
def test_fine_tuning(name):
    config = load(name)
    task, track = config.task.config, name.split("/")[0]
    assert task.dropout == (0.0 if track == "refcoco" else 0.1)
    boxes = (config.data.boxes.train, config.eval.boxes)
    if track == "refcoco":
        assert boxes == (("detections+gt", ["detections"]) if "detected" in name else ("gt", ["gt", "detections"]))
        assert (task.loss, task.positive_weight) == ("binary", 1.0)
    elif track == "vqa":
        assert boxes == ("precomputed", ["precomputed"])
        assert (task.loss, task.initialise_from_words) == ("binary", True)
        assert (config.data.train_split, config.data.eval_splits) == ("train2014+val2014", ["val2014"])
    else:
        assert boxes == ("gt", ["gt"])
        assert config.data.config.question == ("answer" if "q2a" in name else "rationale")
        assert config.data.config.objects == "all"  # not ONLY_USE_RELEVANT_DETS
        losses = (task.loss, task.region_loss_weight, task.num_classes, task.region_dropout)
        assert losses == ("sigmoid", 1.0, 81, 0.0)


@pytest.mark.parametrize("name", EXPRESSIONS)
@pytest.mark.parametrize("settings", ["base", "base_detected", "large", "large_detected"])
def test_other_expressions_are_trained_as_refcoco_plus(name, settings):
    """Neither paper nor official code has RefCOCO and RefCOCOg."""
    ours, plus = load(f"refcoco/{name}_vl_bert_{settings}"), load(f"refcoco/vl_bert_{settings}")
    folder, split = EXPRESSIONS[name]
    assert ours.data.files == {
        "images": plus.data.files["images"],
        "instances": f"{folder}/instances.json",
        "refs": f"{folder}/refs({split}).p",
        "detections": f"detections/{folder}_{split}/res101_coco_minus_refer_notime_dets.json",
    }
    assert ours.data.eval_splits == (["val", "test"] if name == "refcocog" else ["val", "testA", "testB"])
    assert ours.output != plus.output
    same = dataclasses.replace(
        ours,
        output=plus.output,
        data=dataclasses.replace(ours.data, files=plus.data.files, eval_splits=plus.data.eval_splits),
    )
    assert same == plus
