"""A run's settings: typed dataclasses, read from YAML by OmegaConf.

Order of precedence: command line (`train.lr=1e-5`) beats the file, the file beats its `base:` file, and that beats the
defaults below. A key that is not a field here is an error. The resolved settings are saved with the run.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError


@dataclass
class DetectorSettings:
    """Which detector, and how it is trained beside the task."""

    backend: str = "builtin"
    config: str = "configs/detector/R_101_C4.yaml"  # a Detectron2 YAML file
    overrides: dict[str, Any] = field(default_factory=dict)  # nested Detectron2 keys that beat the file
    weights: str | None = None  # file or folder to start from, of any layout; None = random
    expect: str = "all"  # what the weights must hold: all, no_attributes or backbone; the rest starts random
    freeze: bool = False  # True: the whole detector keeps its starting values (and batch statistics)
    loss_weight: float = 0.0  # weight of the detection losses beside the task's; 0 = they are not computed
    loss_weights: dict[str, float] = field(default_factory=dict)  # weights of single detection losses; 1 unless named

    @property
    def proposes_at_random(self) -> bool:
        """Nothing trained the RPN and the box head: own boxes mean nothing."""
        is_trained = self.loss_weight > 0 and not self.freeze
        is_loaded = self.weights is not None and self.expect != "backbone"
        return self.backend != "precomputed" and not is_trained and not is_loaded


@dataclass
class EncoderSettings:
    """Which encoder, and the fields of its own config."""

    name: str = "vl_bert"
    config: dict[str, Any] = field(default_factory=dict)  # fields of the encoder's config class
    weights: str | None = None  # start: a run, a folder, an official VL-BERT file or a BERT; None = random
    fallback_weights: str | None = None  # a BERT for what `weights` lacks: VCR's pooler, as in the official code


@dataclass
class TaskSettings:
    name: str = "refcoco"
    config: dict[str, Any] = field(default_factory=dict)  # fields of the task's config class
    weights: str | None = None  # start of the head: a run, an official VL-BERT file or a BERT; None = random


@dataclass
class SyntheticSettings:
    """Draw a data set in the official formats before the run, if it is not there yet."""

    scenes: dict[str, int] = field(default_factory=dict)  # split -> number of scenes; empty = no synthetic data
    seed: int = 0
    # folders beside `images` that are written, such as captions (see e2e_vl/synthetic/build.py); None = all
    formats: list[str] | None = None
    config: dict[str, Any] = field(default_factory=dict)  # fields of the scene and language settings


@dataclass
class SelectionSettings:
    """Which boxes of a detector are kept (VL-BERT section 4.1: score at least 0.5, 10 to 100 boxes)."""

    min_score: float = 0.5
    min_regions: int = 10
    max_regions: int = 100


@dataclass
class BoxSettings:
    """Where boxes come from: gt, detections, detections+gt, online (the detector's own), or precomputed."""

    train: str = "gt"
    selection: SelectionSettings = field(default_factory=SelectionSettings)


@dataclass
class ResizeSettings:
    short_edge: list[int] = field(default_factory=lambda: [600])  # pixels; training draws one, testing takes the last
    long_edge: int = 1000
    rounding: str = "vl_bert"  # vl_bert | detectron2


@dataclass
class DataSettings:
    name: str = "refcoco"  # which reader
    config: dict[str, Any] = field(default_factory=dict)  # the reader's own options, see its file
    root: str = MISSING  # folder of the data set
    files: dict[str, str] = field(default_factory=dict)  # the reader's files, relative to root
    vocabulary: str | None = None  # vocab.txt, saved tokenizer or hub name; None = built from the training texts
    train_split: str = "train"
    eval_splits: list[str] = field(default_factory=lambda: ["val"])
    boxes: BoxSettings = field(default_factory=BoxSettings)
    # None = INPUT.MIN_SIZE_TRAIN .. MAX_SIZE_TEST of the detector's YAML file, which have no effect otherwise
    resize: ResizeSettings | None = field(default_factory=ResizeSettings)
    # [short, long] edge of the canvas that each image is padded to at least, pixels; None = a batch is as large as its
    # largest image
    canvas: list[int] | None = None
    flip: float = 0.5  # probability of mirroring a training image
    keep_empty_images: bool = True  # detection: also train on images without objects
    texts_per_image: int | None = 1  # texts of one image in one batch; None = all of them
    blank_text: bool = False  # text-blind control: every text is empty
    blank_image: bool = False  # image-blind control: every pixel is the mean colour
    max_text_length: int | None = None  # wordpieces, [CLS] and [SEP] included; None = no cut
    workers: int = 2
    synthetic: SyntheticSettings = field(default_factory=SyntheticSettings)


@dataclass
class TrainSettings:
    images_per_batch: int = 32  # per optimiser step, over all processes and accumulated micro-batches
    accumulate: int = 1  # micro-batches per optimiser step
    epochs: float = 20.0
    max_steps: int | None = None  # instead of epochs; the schedule is laid over these steps
    optimizer: str = "adamw"  # adamw | adamw_official (of the official VL-BERT code) | sgd
    lr: float = 2.56e-5
    detector_lr: float | None = None  # None = lr
    head_lr: float | None = None  # None = lr
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = 1e-6
    momentum: float = 0.9  # of sgd
    weight_decay: float = 1e-4
    decay_norm_and_bias: bool = True  # the official code decays them too
    warmup_steps: int = 0
    schedule: str = "linear"  # after the warm-up: linear (to 0; also: triangle) | cosine (to 0) | constant | steps
    schedule_first: bool = False  # the first update has the rate of step 1, the last one that of the end (official)
    decay_steps: list[int] = field(default_factory=list)  # schedule "steps": optimiser steps before each decay
    decay_factor: float = 0.1  # schedule "steps": what each decay multiplies the rates with
    clip_norm: float | None = 1.0
    mixed_precision: str = "no"  # no | bf16 | fp16
    channels_last: bool = True
    activation_checkpointing: bool = False  # less memory, more time: compute activations again in the backward pass
    save_every_epochs: float = 1.0
    keep_checkpoints: int = 2
    log_every: int = 10


@dataclass
class EvalSettings:
    every_epochs: float = 1.0
    boxes: list[str] = field(
        default_factory=lambda: ["gt"]
    )  # each is evaluated: gt | detections | online | precomputed
    images_per_batch: int = 16
    max_images: int | None = None  # evaluations between epochs only look at the first so many images
    report_pictures: int = 12


@dataclass
class RunConfig:
    output: str = MISSING  # run directory
    seed: int = 12345
    detector: DetectorSettings = field(default_factory=DetectorSettings)
    encoder: EncoderSettings = field(default_factory=EncoderSettings)
    task: TaskSettings = field(default_factory=TaskSettings)
    data: DataSettings = field(default_factory=DataSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    eval: EvalSettings = field(default_factory=EvalSettings)


CHOICES = {  # the names of detectors, encoders, tasks and data sets are in e2e_vl/engine/build.py
    "detector.expect": ("all", "no_attributes", "backbone"),
    "data.boxes.train": ("gt", "detections", "detections+gt", "online", "precomputed"),
    "data.resize.rounding": ("vl_bert", "detectron2"),
    "train.optimizer": ("adamw", "adamw_official", "sgd"),
    "train.schedule": ("linear", "cosine", "constant", "steps", "triangle"),
    "train.mixed_precision": ("no", "bf16", "fp16"),
}
EVAL_BOXES = ("gt", "detections", "online", "precomputed")
POSITIVE = (  # where they are set at all
    "data.resize.long_edge",
    "data.texts_per_image",
    "train.images_per_batch",
    "train.accumulate",
    "train.epochs",
    "train.max_steps",
    "train.eps",
    "train.decay_factor",
    "train.clip_norm",
    "train.keep_checkpoints",
    "train.log_every",
    "eval.images_per_batch",
    "eval.max_images",
)
NOT_NEGATIVE = (
    "seed",
    "detector.loss_weight",
    "data.workers",
    "train.lr",
    "train.detector_lr",
    "train.head_lr",
    "train.momentum",
    "train.weight_decay",
    "train.warmup_steps",
    "train.save_every_epochs",
    "eval.every_epochs",
    "eval.report_pictures",
)


def load_config(path: str | Path, overrides: list[str] | None = None) -> RunConfig:
    """Read a run's settings.

    Args:
        path: YAML file; its `base:` key names a file (relative to it) whose settings it changes.
        overrides: `key=value` words of the command line; dots go down (`train.lr=1e-5`).

    Raises:
        FileNotFoundError: the file or a base of it does not exist.
        ValueError: an unknown key, a value of the wrong type, or settings that contradict each other; the message
            names the file and the key.
    """
    merged = OmegaConf.structured(RunConfig)
    for layer in _layers(Path(path), seen=[]):
        merged = _merge(merged, layer[1], str(layer[0]))
    for word in overrides or []:
        key, separator, _ = word.partition("=")
        if not separator or not key:
            raise ValueError(f"Command line: '{word}' is not of the form key=value, such as train.lr=1e-5.")
        try:
            layer = OmegaConf.from_dotlist([word])
        except (YAMLError, OmegaConfBaseException) as error:
            raise ValueError(f"Command line: the value in '{word}' is not valid YAML: {_reason(error)}.") from error
        merged = _merge(merged, layer, f"Command line ({word})")
    try:
        missing = OmegaConf.missing_keys(merged)
        if missing:
            raise ValueError(f"{path}: no value for {', '.join(sorted(missing))}; set it in the file or as key=value.")
        config: RunConfig = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ValueError(f"{path}: setting '{error.full_key}' cannot be used: {_reason(error)}.") from error
    _check(config, str(path))
    return config


def load_overrides(words: list[str]) -> dict[str, Any]:
    """Nested detector settings of `detector.key=value` words, without anything from a file."""
    return OmegaConf.to_container(OmegaConf.from_dotlist(words)).get("detector", {})


def save_config(config: RunConfig, path: str | Path) -> None:
    """Write the resolved settings; `load_config` reads them back equal."""
    Path(path).write_text(OmegaConf.to_yaml(OmegaConf.structured(config)), encoding="utf-8")


def differences(first: Any, second: Any, prefix: str = "") -> list[str]:
    """Where two settings objects differ, as `key: one -> other` lines."""
    if dataclasses.is_dataclass(first) and dataclasses.is_dataclass(second):
        first, second = dataclasses.asdict(first), dataclasses.asdict(second)
    if isinstance(first, dict) and isinstance(second, dict):
        lines = []
        for key in sorted({*first, *second}):
            lines += differences(first.get(key), second.get(key), f"{prefix}.{key}" if prefix else str(key))
        return lines
    return [] if first == second else [f"{prefix}: {first} -> {second}"]


def _layers(path: Path, seen: list[Path]) -> list[tuple[Path, DictConfig]]:
    if not path.is_file():
        raise FileNotFoundError(f"Config file {path} does not exist.")
    if path.resolve() in seen:
        raise ValueError(f"{path}: `base:` leads back to the file itself.")
    try:
        own = OmegaConf.load(path)
    except (YAMLError, UnicodeDecodeError, OmegaConfBaseException) as error:
        raise ValueError(f"{path} is not valid YAML: {_reason(error)}.") from error
    if not isinstance(own, DictConfig):
        raise ValueError(f"{path} must hold settings as `key: value` lines.")
    base = own.pop("base", None)
    if base is None:
        return [(path, own)]
    if not isinstance(base, str):
        raise ValueError(f"{path}: `base:` is {base}; it must be the name of a file, relative to this one.")
    if not (path.parent / base).is_file():
        raise FileNotFoundError(f"{path}: its `base:` file {path.parent / base} does not exist.")
    return [*_layers(path.parent / base, [*seen, path.resolve()]), (path, own)]


def _merge(config: DictConfig, layer: DictConfig, source: str) -> DictConfig:
    try:
        return OmegaConf.merge(config, layer)
    except ConfigKeyError as error:
        known = _setting_names(OmegaConf.to_container(config))
        close = difflib.get_close_matches(str(error.full_key), known, n=1)
        hint = f"; did you mean '{close[0]}'?" if close else "; see the classes in e2e_vl/config.py."
        raise ValueError(f"{source}: there is no setting '{error.full_key}'{hint}") from error
    except OmegaConfBaseException as error:
        setting = f"setting '{error.full_key}'" if error.full_key else "a setting"
        raise ValueError(f"{source}: {setting} cannot be used: {_reason(error)}.") from error


def _setting_names(tree: Any, prefix: str = "") -> list[str]:
    """Dotted names of all settings of a nested dict."""
    if not isinstance(tree, dict):
        return []
    names = [f"{prefix}{key}" for key in tree]
    return names + [name for key, value in tree.items() for name in _setting_names(value, f"{prefix}{key}.")]


def _reason(error: Exception) -> str:
    """What a parser complains about, in one line."""
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        return f"{error.problem} (line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1})"
    return str(error).splitlines()[0].rstrip(".")


def _check(config: RunConfig, source: str) -> None:
    for key, choices in CHOICES.items():
        if _value(config, key) not in choices and not (key.startswith("data.resize.") and config.data.resize is None):
            raise ValueError(f"{source}: {key} is '{_value(config, key)}'; it must be one of {', '.join(choices)}.")
    for key in (*POSITIVE, *NOT_NEGATIVE):
        value = _value(config, key)
        if value is None or (math.isfinite(value) and (value > 0 or (value == 0 and key in NOT_NEGATIVE))):
            continue
        needed = "not be negative" if key in NOT_NEGATIVE else "be positive"
        raise ValueError(f"{source}: {key} is {value}; it must {needed}.")
    if len(config.train.betas) != 2 or not all(0 <= beta < 1 for beta in config.train.betas):
        raise ValueError(f"{source}: train.betas is {config.train.betas}; it must hold two numbers from 0 to below 1.")
    steps = config.train.decay_steps
    if (config.train.schedule == "steps") != bool(steps) or steps != sorted(set(steps)) or min(steps, default=1) < 1:
        raise ValueError(
            f"{source}: train.decay_steps is {steps}; it must rise from at least 1 with train.schedule=steps, and be "
            "empty with the others."
        )
    if config.data.resize is not None and (not config.data.resize.short_edge or min(config.data.resize.short_edge) < 1):
        raise ValueError(f"{source}: data.resize.short_edge is {config.data.resize.short_edge}; give positive sizes.")
    canvas = config.data.canvas
    if canvas is not None and (len(canvas) != 2 or not 0 < canvas[0] <= canvas[1]):
        raise ValueError(f"{source}: data.canvas is {canvas}; give its short and its long edge, such as [600, 1200].")
    for source_name in config.eval.boxes:
        if source_name not in EVAL_BOXES:
            raise ValueError(f"{source}: eval.boxes has '{source_name}'; it must be one of {', '.join(EVAL_BOXES)}.")
    wants_detections = [name for name in (config.data.boxes.train, *config.eval.boxes) if "detections" in name]
    if wants_detections and "detections" not in config.data.files:
        raise ValueError(f"{source}: boxes '{wants_detections[0]}' need data.files.detections, the detections file.")
    train = config.train
    if train.images_per_batch % train.accumulate:
        raise ValueError(
            f"{source}: train.images_per_batch ({train.images_per_batch}) must be a multiple of train.accumulate "
            f"({train.accumulate})."
        )
    if config.data.boxes.train == "online" and config.detector.loss_weight == 0 and config.detector.weights is None:
        raise ValueError(
            f"{source}: data.boxes.train is online, but the detector starts at random and detector.loss_weight is 0, "
            "so its boxes would never become useful; set detector.loss_weight or detector.weights."
        )


def _value(config: RunConfig, key: str) -> Any:
    """The setting at a dotted key; None below a part that is not there."""
    value: Any = config
    for part in key.split("."):
        value = None if value is None else getattr(value, part)
    return value
