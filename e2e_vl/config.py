"""A run's settings: typed dataclasses, read from YAML by OmegaConf.

Order of precedence: command line (`train.lr=1e-5`) beats the file, the file beats its `base:` file, and that beats the
defaults below. A key that is not a field here is an error. The resolved settings are saved with the run. They never
change: `dataclasses.replace` makes others, and every dataclass checks itself.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import os
import typing
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException
from yaml import YAMLError

from detector.config import EXPECTED_PARTS, SelectionRule
from detector.errors import MissingFileError, UserError, user_path
from detector.io import decode_yaml, read_yaml, write_text
from e2e_vl.converter import check_choice, check_numbers, nearest
from e2e_vl.io import shown
from e2e_vl.setting_kinds import check_kinds
from e2e_vl.setting_references import check_references, check_resolved, check_targets, misplaced, refused_setting

# Where the candidate boxes of an image come from: the one list of sources, and what each of them reads.


class BoxSource(enum.StrEnum):
    """A source of candidate boxes, as settings and commands name it.

    GT: all annotated objects of the image, crowds too. DETECTIONS: a file of detected boxes. DETECTIONS_GT: that file's
    boxes, then all annotated objects; for training only. ONLINE: the detector of the model proposes them. PRECOMPUTED:
    boxes and features of a features file; no image is read.
    """

    GT = "gt"
    DETECTIONS = "detections"
    DETECTIONS_GT = "detections+gt"
    ONLINE = "online"
    PRECOMPUTED = "precomputed"

    @property
    def metric_suffix(self) -> str:
        """How names of metrics end that were measured with these boxes, such as `accuracy_predicted_boxes`."""
        return {
            BoxSource.GT: "gt_boxes",
            BoxSource.DETECTIONS: "detected_boxes",
            BoxSource.ONLINE: "predicted_boxes",
            BoxSource.PRECOMPUTED: "precomputed_boxes",
        }[self]

    @property
    def needs(self) -> tuple[str, ...]:
        """Keys of `data.files` that the source reads."""
        return {
            BoxSource.GT: ("instances",),
            BoxSource.DETECTIONS: ("detections",),
            BoxSource.DETECTIONS_GT: ("instances", "detections"),
            BoxSource.ONLINE: (),
            BoxSource.PRECOMPUTED: ("features",),
        }[self]

    @property
    def reads_annotations(self) -> bool:
        """Annotated objects are among the candidates."""
        return self in (BoxSource.GT, BoxSource.DETECTIONS_GT)

    @property
    def reads_selection(self) -> bool:
        """`data.boxes.selection` says which of its boxes are candidates."""
        return self in (BoxSource.DETECTIONS, BoxSource.DETECTIONS_GT)

    @classmethod
    def for_evaluation(cls) -> tuple[BoxSource, ...]:
        """All sources but the mixture that adds the truth."""
        return tuple(source for source in cls if source is not cls.DETECTIONS_GT)


# Settings about data: `data.` of a run, see `e2e_vl/config.py`.


@dataclass(frozen=True)
class SyntheticSettings:
    """Draw a data set in the official formats before the run, if it is not there yet."""

    scenes: dict[str, int] = field(default_factory=dict)  # split -> number of scenes; empty = no synthetic data
    seed: int = 0
    # folders beside `images` that are written, such as captions (see e2e_vl/synthetic/generate.py); None = all
    formats: list[str] | None = None
    config: dict[str, Any] = field(default_factory=dict)  # fields of the scene and language settings


class SelectionSettings(SelectionRule):
    """The rule of `data.boxes.selection`."""

    where = "data.boxes.selection"


@dataclass(frozen=True)
class BoxSettings:
    """Where the boxes of training images come from, and which boxes of a detector are kept."""

    train: str = "gt"  # a value of BoxSource, see e2e_vl/config.py
    selection: SelectionRule = field(default_factory=SelectionSettings)  # of boxes that come from a file
    max_precomputed: int | None = None  # of precomputed regions, only the first of each image, by falling score

    def __post_init__(self) -> None:
        check_numbers(self, "data.boxes.", positive=["max_precomputed"])
        check_choice("data.boxes.train", self.train, BoxSource)

    @property
    def unread_by_predicted_boxes(self) -> str | None:
        """A sentence where a selection is set, which boxes 'online' do not read; else None."""
        if astuple(self.selection) == astuple(SelectionSettings()):
            return None
        return (
            "data.boxes.selection chooses among boxes of files, so it does not change boxes 'online': these are the "
            "detector's final detections, which MODEL.ROI_HEADS.SCORE_THRESH_TEST and TEST.DETECTIONS_PER_IMAGE of its "
            "config limit"
        )


@dataclass(frozen=True)
class ResizeSettings:
    short_edge: list[int] = field(default_factory=lambda: [600])  # pixels; training draws one, testing takes the last
    long_edge: int = 1000
    rounding: str = "truncate"  # truncate (VL-BERT) | detectron2 | torchvision

    def __post_init__(self) -> None:
        check_choice("data.resize.rounding", self.rounding, ("truncate", "detectron2", "torchvision"))
        check_numbers(self, "data.resize.", positive=["long_edge"])
        if not self.short_edge or min(self.short_edge) < 1:
            raise UserError(f"data.resize.short_edge is {self.short_edge}; give positive sizes.")


@dataclass(frozen=True)
class DataSettings:
    name: str = MISSING  # the reader, a key of DATASETS in e2e_vl/run/build.py
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
    # precomputed features: mirror boxes and words although the features stay as they are (official VL-BERT code); False
    # forbids `flip` with them
    mirror_precomputed: bool = False
    # the whole image's feature is the mean of its regions' where a features file has none (official VL-BERT code)
    mean_image_feature: bool = False
    # missing or unreadable images: training takes the next one and logs it; tools/evaluate.py leaves them out and
    # counts them, as the evaluations of a training run always do
    skip_broken: bool = False
    check_images: int | None = 100  # images of each split that are looked for before a run; 0 = none, None = all
    keep_empty_images: bool = True  # detection: also train on images without objects
    texts_per_image: int | None = 1  # texts of one image in one batch; None = all of them
    blank_text: bool = False  # text-blind control: every text is empty
    blank_image: bool = False  # image-blind control: every pixel is the mean colour
    max_text_length: int | None = None  # wordpieces, [CLS] and [SEP] included; None = no cut
    workers: int = 2
    synthetic: SyntheticSettings = field(default_factory=SyntheticSettings)

    def __post_init__(self) -> None:
        counts = ("texts_per_image", "max_text_length")
        check_numbers(self, "data.", positive=counts, not_negative=["workers", "check_images"])
        if not 0 <= self.flip <= 1:
            raise UserError(f"data.flip is {self.flip}; it must be a probability, from 0 to 1.")
        if self.canvas is not None and (len(self.canvas) != 2 or not 0 < self.canvas[0] <= self.canvas[1]):
            raise UserError(f"data.canvas is {self.canvas}; give its short and its long edge, such as [600, 1200].")


VERSION = 2  # layout of the settings
REVISION = 1  # of the rules that values of this layout stand for
MAX_BASES = 20  # `base:` files above each other
INPUTS = {  # section -> keys that name existing files or folders, see `load_config`
    "detector": ("config", "weights"),
    "encoder": ("weights", "fallback_weights"),
    "task": ("weights", "fallback_weights"),
    "task.config": ("answers",),
    "phrases": ("weights",),
    "data": ("vocabulary", "root"),
}


@dataclass(frozen=True)
class DetectorSettings:
    """Which detector, and how it is trained beside the task."""

    backend: str = "builtin"
    config: str = "configs/detector/R_101_C4.yaml"  # a Detectron2 YAML file, or published weights by name
    overrides: dict[str, Any] = field(default_factory=dict)  # nested Detectron2 keys that beat the file
    weights: str | None = None  # published weights by name, a file or a folder to start from; None = random
    expect: str = "all"  # what the weights must hold: all, no_attributes or backbone; the rest starts random
    freeze: bool = False  # True: the whole detector keeps its starting values (and batch statistics)
    loss_weight: float = 0.0  # weight of the detection losses beside the task's; 0 = they are not computed
    loss_weights: dict[str, float] = field(default_factory=dict)  # weights of single detection losses; 1 unless named

    def __post_init__(self) -> None:
        check_choice("detector.expect", self.expect, EXPECTED_PARTS)
        check_numbers(self, "detector.", not_negative=["loss_weight"])

    @property
    def proposes_at_random(self) -> bool:
        """Nothing trained the RPN and the box head: predicted boxes mean nothing."""
        is_trained = self.loss_weight > 0 and not self.freeze
        is_loaded = self.weights is not None and self.expect != "backbone"
        return self.backend != "precomputed" and not is_trained and not is_loaded


@dataclass(frozen=True)
class EncoderSettings:
    """Which encoder, and the fields of its own config."""

    name: str = MISSING  # a key of ENCODERS in e2e_vl/run/build.py
    config: dict[str, Any] = field(default_factory=dict)  # fields of the encoder's config class
    weights: str | None = None  # start: a run, a folder, a file of the official code or a BERT; None = random
    fallback_weights: str | None = None  # a BERT for what `weights` lacks: VCR's pooler, as in the official code


@dataclass(frozen=True)
class TaskSettings:
    name: str = MISSING  # a key of TASKS in e2e_vl/run/build.py
    config: dict[str, Any] = field(default_factory=dict)  # fields of the task's config class
    weights: str | None = None  # start of the head: a run, a file of the official code or a BERT; None = random
    # a BERT or a run for what `weights` lacks: objectives of pre-training that its run did not have
    fallback_weights: str | None = None


@dataclass(frozen=True)
class TrainSettings:
    images_per_batch: int = 32  # per optimiser step, over all processes and accumulated micro-batches
    accumulate: int = 1  # micro-batches per optimiser step
    epochs: float = 20.0
    max_steps: int | None = None  # instead of epochs; the schedule is laid over these steps
    # adamw | sgd, or of official code: adamw_official (VL-BERT) | bert_adam (VisualBERT and LXMERT)
    optimizer: str = "adamw"
    lr: float = 2.56e-5
    detector_lr: float | None = None  # None = lr
    head_lr: float | None = None  # None = lr
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = 1e-6
    momentum: float = 0.9  # of sgd
    weight_decay: float = 1e-4
    decay_norm_and_bias: bool = True  # the official code decays them too
    decay_bn_scales: bool = False  # without decay_norm_and_bias: scales of batch norms alone decay (VisualBERT's code)
    warmup_steps: int = 0
    # instead of warmup_steps: share of all steps, or -1: no warm-up, and the rate falls from half of `lr` (a quirk of
    # BertAdam's own schedule)
    warmup_share: float | None = None
    schedule: str = "linear"  # after the warm-up: linear (to 0; also: triangle) | cosine (to 0) | constant | steps
    schedule_first: bool = False  # the first update has the rate of step 1, the last one the rate of the end (official)
    decay_steps: list[int] = field(default_factory=list)  # schedule "steps": optimiser steps before each decay
    decay_factor: float = 0.1  # schedule "steps": what each decay multiplies the rates with
    clip_norm: float | None = 1.0  # of all gradients together
    clip_tensor_norm: float | None = None  # of bert_adam: of the gradient of each parameter (VisualBERT: 1.0)
    mixed_precision: str = "no"  # no | bf16 | fp16
    # how long processes wait for each other: the main one reads the data, and makes indices of large files, first
    max_wait_minutes: float = 240.0
    channels_last: bool = True
    activation_checkpointing: bool = False  # less memory, more time: compute activations again in the backward pass
    save_every_epochs: float = 1.0
    keep_checkpoints: int = 2
    log_every: int = 10
    # experiment trackers that accelerate knows, such as wandb; each is a package that must be installed
    trackers: list[str] = field(default_factory=lambda: ["tensorboard"])
    # name of a metric, of which more is better, such as val/accuracy_predicted_boxes, or of a loss, of which less is, such as
    # val/loss_predicted_boxes: the model that is best by it is kept in best/
    keep_best: str | None = None
    patience: int | None = None  # stop after this many evaluations in a row without a better value of keep_best

    def __post_init__(self) -> None:
        check_choice("train.optimizer", self.optimizer, ("adamw", "adamw_official", "bert_adam", "sgd"))
        check_choice("train.schedule", self.schedule, ("linear", "cosine", "constant", "steps", "triangle"))
        check_choice("train.mixed_precision", self.mixed_precision, ("no", "bf16", "fp16"))
        counts = ("images_per_batch", "accumulate", "epochs", "max_steps", "keep_checkpoints", "log_every", "patience")
        rates = ("lr", "detector_lr", "head_lr", "momentum", "weight_decay")
        check_numbers(
            self,
            "train.",
            positive=[*counts, "max_wait_minutes", "eps", "decay_factor", "clip_norm", "clip_tensor_norm"],
        )
        check_numbers(self, "train.", not_negative=[*rates, "warmup_steps", "save_every_epochs"])
        if self.patience is not None and self.keep_best is None:
            raise UserError("train.patience needs train.keep_best, the metric that is to become better.")
        if self.clip_tensor_norm is not None and self.optimizer != "bert_adam":
            raise UserError("train.clip_tensor_norm needs train.optimizer=bert_adam; the others have train.clip_norm.")
        if self.decay_bn_scales and self.decay_norm_and_bias:
            raise UserError("train.decay_bn_scales needs train.decay_norm_and_bias=false, or all norms decay anyway.")
        self._check_warmup()
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise UserError(f"train.betas is {self.betas}; it must hold two numbers from 0 to below 1.")
        steps = self.decay_steps
        if (self.schedule == "steps") != bool(steps) or steps != sorted(set(steps)) or min(steps, default=1) < 1:
            raise UserError(
                f"train.decay_steps is {steps}; it must rise from at least 1 with train.schedule=steps, and be empty "
                "with the others."
            )
        if self.images_per_batch % self.accumulate:
            raise UserError(
                f"train.images_per_batch ({self.images_per_batch}) must be a multiple of train.accumulate "
                f"({self.accumulate})."
            )

    def _check_warmup(self) -> None:
        share = self.warmup_share
        if share is None:
            return
        if self.warmup_steps:
            raise UserError("train.warmup_steps and train.warmup_share say the same in two ways; set one of them.")
        falls = self.schedule in ("linear", "triangle")
        if not (0 <= share <= 1 or (share == -1 and falls)):
            raise UserError(
                f"train.warmup_share is {share}; it must be from 0 to 1, or -1 with train.schedule linear or triangle."
            )


@dataclass(frozen=True)
class EvalSettings:
    every_epochs: float = 1.0
    boxes: list[str] = field(default_factory=lambda: ["gt"])  # each is evaluated; see BoxSource.for_evaluation
    images_per_batch: int = 16
    max_images: int | None = None  # evaluations between epochs only look at the first `max_images` images
    # the report shows at most this many wrong, partly right, right and unlabelled predictions of each split and source
    report_pictures: int = 12

    def __post_init__(self) -> None:
        counts = ("images_per_batch", "max_images")
        check_numbers(self, "eval.", positive=counts, not_negative=["every_epochs", "report_pictures"])
        choices = BoxSource.for_evaluation()
        for name in self.boxes:
            if name not in choices:
                raise UserError(f"eval.boxes has '{name}'; it must be one of {', '.join(choices)}.")


@dataclass(frozen=True)
class PhraseSettings:
    """The phrases of a text point at the regions that they name, beside any task and in pre-training.

    A data set states them where it knows them; the encoder learns them with the task.
    """

    weight: float = 0.0  # of this loss beside the task's; 0 = there is no such head
    tag_weight: float = 0.5  # of finding the phrases in a text, as a multiple of `weight`
    layer: int = 2  # states after this number of layers with words and regions are read; 0 = before the first
    size: int = 128  # width of queries and keys
    weights: str | None = None  # another run to start this head from; None = random

    def __post_init__(self) -> None:
        check_numbers(self, "phrases.", positive=["size"], not_negative=["weight", "tag_weight", "layer"])
        if self.weights is not None and not self.weight:
            raise UserError("phrases.weights is set, but phrases.weight is 0, so there is no such head; set one only.")


@dataclass(frozen=True)
class RunConfig:
    output: str = MISSING  # run directory
    seed: int = 12345
    detector: DetectorSettings = field(default_factory=DetectorSettings)
    encoder: EncoderSettings = field(default_factory=EncoderSettings)
    task: TaskSettings = field(default_factory=TaskSettings)
    data: DataSettings = field(default_factory=DataSettings)
    phrases: PhraseSettings = field(default_factory=PhraseSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    eval: EvalSettings = field(default_factory=EvalSettings)
    version: int = VERSION  # a run that was saved before has none, see `saved_version`
    revision: int = REVISION  # a run that was saved before has none, see `e2e_vl/run/earlier_rules.py`

    def __post_init__(self) -> None:
        check_numbers(self, "", not_negative=["seed"])
        if self.version != VERSION:
            raise UserError(f"version is {self.version}; this code reads settings of version {VERSION}.")
        if self.revision != REVISION:
            raise UserError(f"revision is {self.revision}; this code reads settings of revision {REVISION}.")
        if self.train.patience is not None and self.eval.every_epochs == 0:
            raise UserError("train.patience counts the evaluations of eval.every_epochs, which is 0; set it.")
        for name in (self.data.boxes.train, *self.eval.boxes):
            if "detections" in BoxSource(name).needs and "detections" not in self.data.files:
                raise UserError(f"boxes '{name}' need data.files.detections, the detections file.")


def load_config(
    path: str | Path,
    overrides: list[str] | None = None,
    upgrade: Callable[[dict[str, Any]], None] | None = None,
) -> RunConfig:
    """Read a run's settings.

    Files and folders that the keys in `INPUTS` name are found from any working directory: where a relative path in a
    YAML file does not exist, it is looked for in the folder of that file, then in the folder's parents. A path that
    exists nowhere stays as it is; so do paths of the command line.

    Args:
        path: YAML file; its `base:` key names a file (relative to it) whose settings it changes.
        overrides: `key=value` words of the command line; dots go down (`train.lr=1e-5`).
        upgrade: brings the content of a file of an earlier layout into today's, in place, before anything is checked.

    Raises:
        FileNotFoundError: the file or a base of it does not exist.
        UserError: an unknown key, a value of the wrong type, or settings that contradict each other; the message
            names the file and the key.
    """
    merged = _defaults()
    defaults = OmegaConf.create({"detector": {"config": DetectorSettings.config}})
    for file, layer in [(Path(path), defaults), *_layers(Path(path), seen=[])]:
        if upgrade is not None:
            content = OmegaConf.to_container(layer)
            upgrade(content)
            layer = OmegaConf.create(content)
        check_kinds(RunConfig, OmegaConf.to_container(layer), str(file))
        merged = _merge(merged, _with_found_inputs(layer, file.parent), str(file))
    merged = _with_overrides(merged, overrides or [])
    try:
        check_targets(OmegaConf.to_container(merged, resolve=False))
        missing = OmegaConf.missing_keys(merged)
        if not missing:
            check_resolved(OmegaConf.to_container(merged, resolve=True, enum_to_str=True))
            found = OmegaConf.to_object(merged)
            OmegaConf.structured(found)  # as it will be saved: a list may have come into a mapping of texts
            return dataclasses.replace(found, output=str(user_path(found.output, "output")))
    except OmegaConfBaseException as error:
        raise UserError(f"{path}: setting '{error.full_key}' cannot be used: {_reason(error)}.") from error
    except ValueError as error:  # from the dataclass that it is about
        raise UserError(f"{path}: {error}") from error
    raise UserError(f"{path}: no value for {', '.join(sorted(missing))}; set it in the file or as key=value.")


def check_overrides(words: list[str]) -> None:
    """Raise the ValueError that `load_config` raises for `key=value` words that no settings file can take."""
    _with_overrides(_defaults(), words)


def load_overrides(words: list[str]) -> dict[str, Any]:
    """Nested detector settings of `detector.key=value` words, without anything from a file."""
    _with_overrides(_defaults(), words)
    return OmegaConf.to_container(OmegaConf.from_dotlist(words)).get("detector", {})


def save_config(config: RunConfig, path: str | Path) -> None:
    """Write the resolved settings; `load_config` reads them back equal."""
    write_text(Path(path), OmegaConf.to_yaml(OmegaConf.structured(config)))


def saved_version(path: str | Path) -> int:
    """Layout of saved settings: 1 for a YAML file (and its `base:` files) without the key `version`.

    Raises:
        FileNotFoundError, ValueError: there is no such file, or it holds no settings.
    """
    found = []
    for file, layer in _layers(Path(path), seen=[]):
        version = layer.get("version", 1)
        if not isinstance(version, int):
            raise UserError(f"{file}: version is not a whole number; write the one of this code, {VERSION}.")
        found.append(version)
    return max(found)


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


def setting_names(section: type = RunConfig, prefix: str = "") -> Iterator[str]:
    """Dotted names of all settings."""
    for name, kind in typing.get_type_hints(section).items():
        yield prefix + name
        for inner in (kind, *typing.get_args(kind)):  # X, or the X of X | None
            if dataclasses.is_dataclass(inner):
                yield from setting_names(inner, f"{prefix}{name}.")


@functools.cache
def _defaults() -> DictConfig:
    """What no file says; read-only, as whoever merges gets a copy. To read the classes takes OmegaConf long."""
    return OmegaConf.structured(RunConfig)


def _layers(path: Path, seen: list[Path]) -> list[tuple[Path, DictConfig]]:
    """The file and its bases, the lowest base first."""
    own = _read(path)  # before `resolve`, which fails for links in a circle
    if path.resolve() in seen:
        raise UserError(f"{path}: `base:` leads back to the file itself.")
    base = OmegaConf.to_container(own, resolve=False).get("base")
    if "base" in own:
        del own["base"]
    if base is None:
        return [(path, own)]
    if not isinstance(base, str) or not base.endswith(".yaml") or "\0" in base or "${" in base:
        raise UserError(
            f"{path}: `base:` is {shown(base)}; it must be the name of a file (.yaml), relative to this one."
        )
    if len(seen) >= MAX_BASES:
        raise UserError(f"{path}: it is the base of {MAX_BASES} files above each other; write fewer files.")
    if not _is_file(path.parent / base):
        raise MissingFileError(f"{path}: its `base:` file {path.parent / base} does not exist.")
    below = _layers(path.parent / base, [*seen, path.resolve()])
    file, lowest = below[-1]
    if lowest and not set(lowest) & {field.name for field in dataclasses.fields(RunConfig)}:
        raise UserError(f"{path}: its `base:` file {file} has none of the settings of a run; name another file.")
    return [*below, (path, own)]


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long
        return False


def _read(path: Path) -> DictConfig:
    """The settings in one YAML file."""
    if not path.is_file():
        raise MissingFileError(f"Config file {path} does not exist.")
    own = read_yaml(path)
    if not isinstance(own, dict | None):
        raise UserError(f"{path} must hold settings as `key: value` lines.")
    check_references(own, str(path))
    try:
        return OmegaConf.create(own or {})
    except OmegaConfBaseException as error:
        raise UserError(f"{path} cannot be read as settings: {_reason(error)}.") from error


def _with_found_inputs(layer: DictConfig, folder: Path) -> DictConfig:
    """The settings of a file in `folder`, with the paths of inputs as they are found from the working directory."""
    values = OmegaConf.to_container(layer, resolve=False)
    for section, keys in INPUTS.items():
        settings = values
        for name in section.split("."):
            settings = settings.get(name) if isinstance(settings, dict) else None
        for key in keys:
            if isinstance(settings, dict) and isinstance(settings.get(key), str):
                settings[key] = _found(settings[key], folder.resolve())
    return OmegaConf.create(values)


def _found(name: str, folder: Path) -> str:
    exists = os.path.exists  # unlike Path.exists, it takes a folder without permission as one without the file
    if Path(name).is_absolute() or name.startswith("~") or exists(name):
        return name
    return next((str(place / name) for place in (folder, *folder.parents) if exists(place / name)), name)


def _with_overrides(config: DictConfig, words: list[str]) -> DictConfig:
    """The settings with the words of a command line, each `key=value`."""
    for word in words:
        name = word
        if "=" not in word or word.startswith("="):
            raise UserError(f"Command line: '{name}' is not of the form key=value, such as train.lr=1e-5.")
        key, _, value = word.partition("=")
        content = decode_yaml(value, f"Command line: the value in '{name}'")
        check_references({key: content}, "Command line")
        try:
            layer = OmegaConf.from_dotlist([word])
        except (YAMLError, ValueError, OmegaConfBaseException) as error:
            raise UserError(f"Command line: the value in '{name}' cannot be read: {_reason(error)}.") from error
        check_kinds(RunConfig, OmegaConf.to_container(layer), f"Command line ({name})")
        config = _merge(config, layer, f"Command line ({name})")
    return config


def _merge(config: DictConfig, layer: DictConfig, source: str) -> DictConfig:
    try:
        return OmegaConf.merge(config, layer)
    except ConfigKeyError as error:
        near = nearest(str(error.full_key), setting_names())
        hint = f"; did you mean '{near}'?" if near else "; see the classes in e2e_vl/config.py."
        raise UserError(f"{source}: there is no setting '{error.full_key}'{hint}") from error
    except OmegaConfBaseException as error:
        setting = f"setting '{error.full_key}'" if error.full_key else "a setting"
        raise UserError(f"{source}: {setting} cannot be used: {_reason(error)}.") from error
    except TypeError:  # OmegaConf's for a list in the place of a mapping, or a mapping in the place of a list
        values, others = (OmegaConf.to_container(one, resolve=False) for one in (config, layer))
        name, kind = misplaced(values, others) or (refused_setting(config, others), "another kind of value")
        raise UserError(f"{source}: setting '{name}' must be {kind}; write it so.") from None


def _reason(error: Exception) -> str:
    """What OmegaConf complains about, in one line."""
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
