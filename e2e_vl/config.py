"""A run's settings: frozen Structs, strictly decoded from YAML files and `key=value` arguments.

The command line (`train.lr=1e-5`) overrides the file, the file its `base:` file, and that the defaults below. The
encoder, task and data set of a run have separate settings Structs, see `e2e_vl/parts.py`. The resolved settings are
saved with the run.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import functools
import os
import re
import typing
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml
from msgspec import Meta

from detector.config import (
    DetectorConfig,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Rounding,
    SelectionRule,
    merge,
)
from detector.errors import MissingFileError, UserError, user_path
from detector.io import decode_yaml, read_yaml, write_text
from detector.zoo import PublishedWeights, resolve_weights
from e2e_vl.parts import DATASETS, DETECTORS, ENCODERS, TASKS, Settings, check_name, set_part_config
from e2e_vl.synthetic.config import SyntheticConfig


class BoxSource(enum.StrEnum):
    """A source of candidate boxes, as used in settings and commands.

    GT: all annotated objects of the image, including crowds. DETECTIONS: a file of detected boxes. DETECTIONS_GT: that
    file's boxes, then all annotated objects; for training only. ONLINE: boxes predicted by the model's detector.
    PRECOMPUTED: boxes and features from a features file; no image is read.
    """

    GT = "gt"
    DETECTIONS = "detections"
    DETECTIONS_GT = "detections+gt"
    ONLINE = "online"
    PRECOMPUTED = "precomputed"

    @property
    def metric_suffix(self) -> str:
        """Suffix of metrics measured with these boxes, as in `accuracy_predicted_boxes`."""
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
        """Whether annotated objects are among the candidates."""
        return self in (BoxSource.GT, BoxSource.DETECTIONS_GT)

    @classmethod
    def for_evaluation(cls) -> tuple[BoxSource, ...]:
        """All sources except the one that adds the ground truth."""
        return tuple(source for source in cls if source is not cls.DETECTIONS_GT)


class SyntheticSettings(Settings, frozen=True):
    """Generate a data set in the official formats before the run, if it does not exist."""

    scenes: dict[str, NonNegativeInt] = {}  # split -> number of scenes; empty = no synthetic data
    seed: NonNegativeInt = 0
    # folders to write beside `images`, such as captions (see e2e_vl/synthetic/generate.py); None = all
    formats: list[str] | None = None
    config: SyntheticConfig = SyntheticConfig()

    def size_warning(self, image_size: tuple[int, int]) -> str:
        """Return a sentence for users if an image of this (height, width) cannot be one of the drawn scenes, or ""."""
        scene = self.config.scene
        if not self.scenes or all(scene.min_side <= side <= scene.max_side for side in image_size):
            return ""
        sides = " to ".join(dict.fromkeys(map(str, (scene.min_side, scene.max_side))))
        height, width = image_size
        return f"The model has seen drawn scenes of {sides} pixels only; this image has {width} x {height}."


class BoxSettings(Settings, frozen=True):
    """The source of candidate boxes in training, and which boxes of a file to keep."""

    train: BoxSource = BoxSource.GT
    selection: SelectionRule = SelectionRule()  # of boxes that come from a file
    max_precomputed: PositiveInt | None = None  # use only the first precomputed regions of each image, best score first


class ResizeSettings(Settings, frozen=True):
    """Sizes of images, in pixels."""

    # training samples one, testing uses the last
    short_edge: Annotated[list[PositiveInt], Meta(min_length=1)] = msgspec.field(default_factory=lambda: [600])
    long_edge: PositiveInt = 1000
    rounding: Rounding = "truncate"  # VL-BERT's


class DataSettings(Settings, frozen=True):
    """Which data set, and how its images and texts are loaded."""

    name: str  # the reader, a key of DATASETS in e2e_vl/parts.py
    root: str  # folder of the data set
    config: Any = {}  # the reader's own options, see e2e_vl/data/config.py
    files: dict[str, str] = {}  # the reader's files, relative to root
    vocabulary: str | None = None  # vocab.txt, saved tokenizer or hub name; None = built from the training texts
    train_split: str = "train"
    eval_splits: list[str] = msgspec.field(default_factory=lambda: ["val"])
    boxes: BoxSettings = BoxSettings()
    # None = INPUT.MIN_SIZE_TRAIN .. MAX_SIZE_TEST of the detector's YAML file, which have no effect otherwise
    resize: ResizeSettings | None = ResizeSettings()
    # [short, long] edge of the smallest canvas that images are padded to, pixels; None = pad to the largest image in
    # the batch
    canvas: tuple[PositiveInt, PositiveInt] | None = None
    flip: Fraction = 0.5  # of mirroring a training image
    # precomputed features: flip boxes and swap words although the features are unflipped (official VL-BERT code); False
    # forbids `flip` with them
    mirror_precomputed: bool = False
    # use the mean of the region features for whole images without a feature of their own (official VL-BERT code)
    mean_image_feature: bool = False
    # missing or unreadable images: training logs them and uses the next image; with "blank" it keeps their texts and
    # boxes with an image of the mean colour, if annotations or box file state the size (official VL-BERT pre-training).
    # tools/evaluate.py skips and counts them, as evaluations during training always do.
    skip_broken: bool | Literal["blank"] = False
    # number of images of each split to check for before a run; 0 = none, None = all
    check_images: NonNegativeInt | None = 100
    keep_empty_images: bool = True  # detection: also train on images without objects
    texts_per_image: PositiveInt | None = 1  # texts of one image in one batch; None = all of them
    blank_text: bool = False  # text-blind control: every text is empty
    blank_image: bool = False  # image-blind control: every pixel is the mean colour
    # maximum number of wordpieces, including up to 4 special tokens; None = no limit
    max_text_length: Annotated[int, Meta(ge=4)] | None = None
    workers: NonNegativeInt = 2
    synthetic: SyntheticSettings = SyntheticSettings()

    def __post_init__(self) -> None:
        set_part_config(self, DATASETS, self.name)


class DetectorSettings(Settings, frozen=True):
    """Which detector, and how it is trained along with the task."""

    backend: str = "builtin"  # a key of DETECTORS in e2e_vl/parts.py
    config: str = "configs/detector/R_101_C4.yaml"  # a Detectron2 YAML file, or published weights by name
    overrides: dict[str, Any] = {}  # nested Detectron2 keys that override the file
    weights: str | None = None  # published weights by name, a file or a folder to start from; None = random
    # what the weights must contain; the rest is initialised randomly
    expect: Literal["all", "no_attributes", "no_predictor", "backbone"] = "all"
    freeze: bool = False  # keep the initial weights and batch statistics of the whole detector
    # weight of the detection losses relative to the task's; 0 = not computed, and the RPN and box predictor are frozen
    loss_weight: NonNegativeFloat = 0.0
    # weights of individual detection losses; default 1
    loss_weights: dict[
        Literal["loss_rpn_cls", "loss_rpn_loc", "loss_cls", "loss_box_reg", "loss_attribute"], float
    ] = {}

    def __post_init__(self) -> None:
        check_name(self.backend, DETECTORS, "backend")

    @property
    def proposes_at_random(self) -> bool:
        """Whether the RPN and the box head are untrained, so predicted boxes are meaningless."""
        is_trained = self.loss_weight > 0 and not self.freeze
        is_loaded = self.weights is not None and self.expect not in ("no_predictor", "backbone")
        return self.backend != "precomputed" and not is_trained and not is_loaded


class EncoderSettings(Settings, frozen=True):
    """Which encoder, and its settings."""

    name: str  # a key of ENCODERS in e2e_vl/parts.py
    config: Any = {}  # see e2e_vl/encoders/config.py
    weights: str | None = None  # start: a run, a folder, a file of the official code or a BERT; None = random
    # a BERT for parameters missing from `weights`, such as VCR's pooler (official code)
    fallback_weights: str | None = None

    def __post_init__(self) -> None:
        set_part_config(self, ENCODERS, self.name)


class TaskSettings(Settings, frozen=True):
    """Which task, and its settings."""

    name: str  # a key of TASKS in e2e_vl/parts.py
    config: Any = {}  # see e2e_vl/tasks/config.py
    weights: str | None = None  # start of the head: a run, a file of the official code or a BERT; None = random
    # a BERT or a run for parameters missing from `weights`, such as additional pre-training objectives
    fallback_weights: str | None = None

    def __post_init__(self) -> None:
        set_part_config(self, TASKS, self.name)


class TrainSettings(Settings, frozen=True):
    """How the model is trained."""

    images_per_batch: PositiveInt = 32  # per optimiser step, over all processes and accumulated micro-batches
    accumulate: PositiveInt = 1  # micro-batches per optimiser step
    epochs: PositiveFloat = 20.0
    max_steps: PositiveInt | None = None  # instead of epochs; the schedule spans these steps
    # adamw_official: VL-BERT's code; bert_adam: VisualBERT's and LXMERT's code
    optimizer: Literal["adamw", "adamw_official", "bert_adam", "sgd"] = "adamw"
    lr: NonNegativeFloat = 2.56e-5
    detector_lr: NonNegativeFloat | None = None  # None = lr
    head_lr: NonNegativeFloat | None = None  # None = lr
    betas: tuple[Annotated[float, Meta(ge=0, lt=1)], Annotated[float, Meta(ge=0, lt=1)]] = (0.9, 0.999)
    eps: PositiveFloat = 1e-6
    momentum: NonNegativeFloat = 0.9  # of sgd
    weight_decay: NonNegativeFloat = 1e-4
    decay_norm_and_bias: bool = True  # True: as in the official code
    decay_bn_scales: bool = False  # without decay_norm_and_bias: scales of batch norms alone decay (VisualBERT's code)
    warmup_steps: NonNegativeInt = 0
    # instead of warmup_steps: fraction of all steps; -1: no warm-up, and the rate decays from half of `lr` (a quirk of
    # BertAdam's schedule)
    warmup_share: Annotated[float, Meta(ge=-1, le=1)] | None = None
    # after the warm-up; linear (the same as triangle) and cosine fall to 0
    schedule: Literal["linear", "cosine", "constant", "steps", "triangle"] = "linear"
    # the part of a longer schedule, and of its objectives, that this run follows: [0.5, 1.0] is the second half,
    # whose optimiser begins with fresh moments
    schedule_part: tuple[Fraction, Fraction] = (0.0, 1.0)
    schedule_first: bool = False  # the first update has the rate of step 1, not 0 (official VL-BERT code)
    decay_shares: list[Fraction] = []  # schedule "steps": fractions of all steps before each decay
    decay_factor: PositiveFloat = 0.1  # schedule "steps": factor per decay
    clip_norm: PositiveFloat | None = 1.0  # maximum norm of all gradients together
    clip_tensor_norm: PositiveFloat | None = None  # bert_adam: maximum norm per parameter (VisualBERT: 1.0)
    mixed_precision: Literal["no", "bf16", "fp16"] = "no"
    # whether GPUs may round the inputs of float32 convolutions and matrix products to TF32 (10 bits); None = torch's
    # default: of convolutions only
    tf32: bool | None = None
    bf16_gradients: bool = False  # sum the gradients of several processes in bfloat16: half the bytes
    # timeout between processes: the main process first reads the data and indexes large files
    max_wait_minutes: PositiveFloat = 240.0
    channels_last: bool = True
    # compile the blocks of the backbone and the layers of the encoder; takes minutes, and a C++ compiler on the CPU
    torch_compile: bool = False
    activation_checkpointing: bool = False  # recompute activations in the backward pass: less memory, more time
    save_every_epochs: NonNegativeFloat = 1.0
    keep_checkpoints: PositiveInt = 2
    log_every: PositiveInt = 10
    # experiment trackers that accelerate knows, such as wandb; each is a package that must be installed
    trackers: list[str] = msgspec.field(default_factory=lambda: ["tensorboard"])
    # a metric such as val/accuracy_predicted_boxes (higher is better) or a loss such as val/loss_predicted_boxes (lower
    # is better): the best model is kept in best/
    keep_best: str | None = None
    patience: PositiveInt | None = None  # stop after this many evaluations without an improvement of keep_best

    def __post_init__(self) -> None:
        share, decays = self.warmup_share, self.decay_shares
        falls = self.schedule in ("linear", "triangle")
        per_step = f"images_per_batch {self.images_per_batch} must be a multiple of accumulate {self.accumulate}"
        for is_wrong, message in (
            (self.patience is not None and self.keep_best is None, "patience needs keep_best, the metric to improve"),
            (
                self.clip_tensor_norm is not None and self.optimizer != "bert_adam",
                "clip_tensor_norm needs optimizer=bert_adam; the others have clip_norm",
            ),
            (
                self.decay_bn_scales and self.decay_norm_and_bias,
                "decay_bn_scales needs decay_norm_and_bias=false, or all norms decay anyway",
            ),
            (share is not None and self.warmup_steps > 0, "set one of warmup_steps and warmup_share"),
            (
                share is not None and share < 0 and not (share == -1 and falls),
                f"warmup_share is {share}; it must be from 0 to 1, or -1 with schedule linear or triangle",
            ),
            (
                (self.schedule == "steps") != bool(decays) or decays != sorted(set(decays)),
                f"decay_shares is {decays}; it must rise with schedule=steps, and be empty with the others",
            ),
            (self.schedule_part[0] >= self.schedule_part[1], f"schedule_part is {self.schedule_part}; it must rise"),
            (self.images_per_batch % self.accumulate != 0, per_step),
        ):
            if is_wrong:
                raise UserError(message)


class EvalSettings(Settings, frozen=True):
    """How the model is evaluated during and after training."""

    every_epochs: NonNegativeFloat = 1.0
    # each is evaluated; see BoxSource.for_evaluation
    boxes: list[BoxSource] = msgspec.field(default_factory=lambda: [BoxSource.GT])
    images_per_batch: PositiveInt = 16
    # evaluations between epochs only use the first `max_images` images
    max_images: PositiveInt | None = None
    # maximum number of wrong, partly correct, correct and unlabelled predictions per split and source in the report
    report_pictures: NonNegativeInt = 12


class PhraseSettings(Settings, frozen=True):
    """Phrase grounding as an additional loss of any task: which regions do the phrases of a text refer to?

    Only some data sets annotate phrases.
    """

    weight: NonNegativeFloat = 0.0  # weight of this loss relative to the task's; 0 = no phrase head
    tag_weight: NonNegativeFloat = 0.5  # weight of phrase detection, as a multiple of `weight`
    # use the hidden states after this number of multimodal layers; 0 = their input
    layer: NonNegativeInt = 2
    size: PositiveInt = 128  # width of queries and keys
    weights: str | None = None  # another run to start this head from; None = random


class RunConfig(Settings, frozen=True, kw_only=True):
    """All settings of a run."""

    output: str  # run directory
    seed: NonNegativeInt = 12345
    detector: DetectorSettings = DetectorSettings()
    encoder: EncoderSettings
    task: TaskSettings
    data: DataSettings
    phrases: PhraseSettings = PhraseSettings()
    train: TrainSettings = TrainSettings()
    eval: EvalSettings = EvalSettings()

    def __post_init__(self) -> None:
        sources = (self.data.boxes.train, *self.eval.boxes)
        needs_detections = any("detections" in source.needs for source in sources)
        for is_wrong, message in (
            (
                self.train.patience is not None and self.eval.every_epochs == 0,
                "train.patience counts the evaluations of eval.every_epochs, which is 0; set it",
            ),
            (
                BoxSource.DETECTIONS_GT in self.eval.boxes,
                f"eval.boxes has '{BoxSource.DETECTIONS_GT}', which adds the truth and is for training only",
            ),
            (
                needs_detections and "detections" not in self.data.files,
                "boxes 'detections' need data.files.detections, the detections file",
            ),
            (
                self.phrases.weights is not None and not self.phrases.weight,
                "phrases.weights is set, but phrases.weight is 0, so there is no such head; set one only",
            ),
        ):
            if is_wrong:
                raise UserError(message)


Rule = Literal["score", "maxconf", "maxnms", "given"]
DEFAULT_SELECTIONS = {  # VL-BERT section 4.1; bottom-up attention; the features that LXMERT was trained on
    "score": SelectionRule(0.5, 10, 100),
    "maxconf": SelectionRule(0.2, 10, 100),
    "maxnms": SelectionRule(0.0, 36, 36),
}
DISPLAY_SELECTION = SelectionRule(0.2, 10, 36)  # with the rule "score", for display: fewer regions, at lower scores


@dataclasses.dataclass(frozen=True)
class ExtractionSettings:
    """How regions are selected, and what is stored for each.

    rule
      score     detections by score, after NMS within each class and merging of classes at the same place (VL-BERT)
      maxconf   proposals by their best class probability after NMS within each class (bottom-up attention)
      maxnms    the refined box of each proposal's best class, after NMS over all classes, whose threshold is raised
                until enough boxes remain (LXMERT)
      given     boxes from a file
    features_of
      proposal  features are pooled from the proposals, although "score" and "maxnms" return refined boxes, as in the
                original code
      final     features are pooled from the refined box of the best class
    """

    rule: Rule = "score"
    selection: SelectionRule | None = None  # None: the rule's `DEFAULT_SELECTIONS`
    features_of: Literal["proposal", "final"] = "final"
    attributes: bool = False  # store the most probable attribute of each region
    image_feature: bool = False  # store the feature of the whole image
    nms_threshold: float = 0.3  # IoU threshold of NMS with the rule "maxconf"

    def __post_init__(self) -> None:
        if self.rule == "maxnms" and self.selection_rule.min_score > 0:
            raise UserError("The rule maxnms has no score threshold; leave out min_score, or choose score or maxconf.")

    @property
    def selection_rule(self) -> SelectionRule:
        return self.selection or DEFAULT_SELECTIONS[self.rule]


# Reading and writing settings.


PACKAGED_CONFIGS = Path(__file__).parent / "configs"  # of an installed package; a clone has them beside the package
CONFIGS = PACKAGED_CONFIGS if PACKAGED_CONFIGS.is_dir() else Path(__file__).resolve().parents[1] / "configs"
INPUTS = (  # keys that name existing files or folders, see `load_config`
    *("detector.config", "detector.weights", "encoder.weights", "encoder.fallback_weights"),
    *("task.weights", "task.fallback_weights", "task.config.answers", "phrases.weights"),
    *("data.vocabulary", "data.root"),
)
Tree = dict[str, Any]  # nested settings, as in YAML


def find_config(name: str | Path) -> Path:
    """A config file: a path, or the name of a config that comes along, such as demo/refcoco; `.yaml` may be omitted."""
    path = user_path(name, "The config")
    for place in (Path(), CONFIGS.parent, CONFIGS):
        if found := next((one for one in (place / path, place / f"{path}.yaml") if one.is_file()), None):
            return found
    written = str(path.with_suffix("")).removeprefix("configs/")
    names = [one.relative_to(CONFIGS).with_suffix("").as_posix() for one in sorted(CONFIGS.glob("*/*.yaml"))]
    names += [str(one) for one in sorted(path.parent.glob("*.yaml"))]
    close = difflib.get_close_matches(written, names) or [one for one in names if Path(one).name == path.stem]
    hint = f"did you mean {' or '.join(close)}?" if close else f"give a path, or the name of a file in {CONFIGS}."
    raise MissingFileError(f"{name}: there is no such config; {hint}")


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> RunConfig:
    """Read a run's settings.

    Relative paths under the keys in `INPUTS` work from any directory: a path in a YAML file that does not exist in the
    working directory is searched for in the folder of that file, then in its parents, then (all but `data.root`) beside
    `CONFIGS`. Paths that are found nowhere, and paths from the command line, do not change.

    Args:
        path: YAML file, see `find_config`; its `base:` key names a file with the settings that it overrides, relative
            to it or as in `find_config`.
        overrides: `key=value` arguments; dots separate the levels (`train.lr=1e-5`).
    """
    path = find_config(path)
    default = _nest("detector.config", DetectorSettings().config)
    layers = [(str(path), _with_found_inputs(default, path.parent)), *_read_layers(path)]
    layers += [(f"Command line: {word}", parse_override(word)) for word in overrides]
    try:
        config = msgspec.convert(_merge_all(layers), RunConfig, strict=True)
    except msgspec.ValidationError as error:
        raise UserError(_explain(str(error), layers)) from error
    return msgspec.structs.replace(config, output=str(user_path(config.output, "output")))


def save_config(config: RunConfig, path: str | Path) -> None:
    text = yaml.safe_dump(msgspec.to_builtins(config, str_keys=True), sort_keys=False, allow_unicode=True)
    write_text(Path(path), text)


def parse_override(word: str) -> Tree:
    """Read a `key=value` argument as nested settings."""
    key, equals, value = word.partition("=")
    if not equals or not key:
        raise UserError(f"Command line: '{word}' is not of the form key=value, such as train.lr=1e-5.")
    return _nest(key, decode_yaml(value, f"Command line: the value in '{word}'"))


def parse_overrides(words: Iterable[str]) -> Tree:
    """Read `key=value` arguments as nested settings; later ones override earlier ones."""
    return functools.reduce(merge, map(parse_override, words), {})


def check_batch_size(config: RunConfig, processes: int) -> None:
    """Raise UserError unless the processes can share a batch evenly; images would be left out of it."""
    images = config.train.images_per_batch
    shares = processes * config.train.accumulate
    if images % shares:
        raise UserError(
            f"train.images_per_batch is {images}; it must be a multiple of {shares}, the number of processes "
            f"({processes}) times train.accumulate."
        )


def differences(first: Any, second: Any, prefix: str = "") -> list[str]:
    """The differences of two settings, as `key: one -> other` lines."""
    first, second = (msgspec.to_builtins(one) if isinstance(one, msgspec.Struct) else one for one in (first, second))
    if isinstance(first, dict) and isinstance(second, dict):
        lines = []
        for key in sorted({*first, *second}):
            lines += differences(first.get(key), second.get(key), f"{prefix}.{key}" if prefix else str(key))
        return lines
    return [] if first == second else [f"{prefix}: {first} -> {second}"]


def _read_layers(path: Path) -> list[tuple[str, Tree]]:
    """The settings of a file and of its base files, the innermost base first, each with its file name."""
    tree = dict(read_yaml(path) or {})
    base = tree.pop("base", None)
    below = (
        [] if base is None else _read_layers(beside if (beside := path.parent / base).is_file() else find_config(base))
    )
    return [*below, (str(path), _with_found_inputs(tree, path.parent))]


def _merge_all(layers: list[tuple[str, Tree]]) -> Tree:
    return functools.reduce(merge, (tree for _, tree in layers), {})


def _nest(key: str, value: Any) -> Tree:
    """`a.b` and 1 -> {"a": {"b": 1}}."""
    return functools.reduce(lambda inner, name: {name: inner}, reversed(key.split(".")), value)


def _with_found_inputs(tree: Tree, folder: Path) -> Tree:
    """The settings of a file in `folder`, with input paths that exist from the working directory; see `load_config`."""
    exists = os.path.exists  # unlike Path.exists, it returns False in a folder without permission
    for key in INPUTS:
        written = _get(tree, key.split("."))
        if not isinstance(written, str) or Path(written).is_absolute() or written.startswith("~"):
            continue
        places = (Path(), folder.resolve(), *folder.resolve().parents, CONFIGS.parent)
        if key == "data.root":  # what lies in a clone may be the drawn data of another run
            places = tuple(place for place in places if place != CONFIGS.parent)
        found = next((place / written for place in places if exists(place / written)), None)
        if found is not None and found.is_absolute():
            tree = merge(tree, _nest(key, str(found)))
    return tree


_ABSENT = object()


def _get(tree: Any, names: Sequence[str]) -> Any:
    """The setting under a path of keys; `_ABSENT` if it is not set."""
    for name in names:
        tree = tree.get(name, _ABSENT) if isinstance(tree, dict) else _ABSENT
    return tree


_PATH = re.compile(r" - at `(?:key` in `)?\$\.?([^`]*)`")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*?)`")
_MISSING = re.compile(r"Object missing required field `(.*?)`")


def _explain(message: str, layers: list[tuple[str, Tree]]) -> str:
    """Rewrite an error of `msgspec.convert` as a sentence with the file or argument, the key and the problem."""
    place = ".".join(name for name in reversed(_PATH.findall(message)) if name)
    problem = re.sub(r"\barray\b", "list", _PATH.sub("", message).rstrip("."))
    if found := _MISSING.fullmatch(problem):
        key = f"{place}.{found[1]}" if place else found[1]
        return f"{layers[0][0]}: {key} has no value; set it in the file or as key=value."
    types = _setting_types(layers)
    if found := _UNKNOWN.fullmatch(problem):
        prefix, last = f"{place}." if place else "", found[1]
        key = prefix + last
        siblings = [name for section, _, name in (one.rpartition(".") for one in types) if section == place]
        section, where = key.partition(".")[0], _find_source(key, layers)
        part, order = _find_source(f"{section}.name", layers), {one: level for level, (one, _) in enumerate(layers)}
        if place.startswith(f"{section}.config") and order[where] < order[part]:
            return f"{part}: {where} sets '{key}', which this {section} does not have; use a file that fits it."
        names = [prefix + name for name in difflib.get_close_matches(last, siblings, n=1)]
        near = [one for one in types if not place or one.startswith(f"{section}.")]
        names += difflib.get_close_matches(key, [one for one in near if not key.startswith(one)], n=1, cutoff=0.85)
        for name in difflib.get_close_matches(last, [one.rpartition(".")[2] for one in near], n=1):
            names += [one for one in near if one.rpartition(".")[2] == name]
        known = f"; {place or 'the top level'} has {', '.join(siblings)}." if siblings else "; see e2e_vl/config.py."
        hint = f"; did you mean '{names[0]}'?" if names else known
        return f"{where}: there is no setting '{key}'{hint}"
    if problem.startswith("Invalid enum value"):
        problem += f"; it must be one of {', '.join(_list_choices(types.get(place.partition('[')[0])))}"
    ending = "" if problem.endswith("?") else "."
    source = _find_source(place, layers)
    named = f"{place}: " if place and f": {place}=" not in source else ""
    return f"{source}: {named}{problem}{ending}"


def _list_choices(kind: Any) -> list[str]:
    """The allowed values of an enum or `Literal` type."""
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return [str(one) for one in kind]
    inner = typing.get_args(kind)
    if typing.get_origin(kind) is Literal:
        return [str(one) for one in inner]
    return [choice for one in inner for choice in _list_choices(one)]


def _setting_types(layers: list[tuple[str, Tree]]) -> dict[str, Any]:
    """Dotted names and types of all settings, including those of the selected parts."""
    merged, types = _merge_all(layers), dict(_types_in(RunConfig, ""))
    for section, parts in (("encoder", ENCODERS), ("task", TASKS), ("data", DATASETS)):
        part = parts.get(merged[section].get("name")) if isinstance(merged.get(section), dict) else None
        if part is not None:
            types.update(_types_in(part.config_class, f"{section}.config."))
    return types


def _types_in(struct: type[msgspec.Struct], prefix: str) -> Iterator[tuple[str, Any]]:
    for field in msgspec.structs.fields(struct):
        yield f"{prefix}{field.name}", field.type
        for inner in (field.type, *getattr(field.type, "__args__", ())):  # X, or the X of X | None
            if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
                yield from _types_in(inner, f"{prefix}{field.name}.")


def _find_source(key: str, layers: list[tuple[str, Tree]]) -> str:
    """The file or argument that last set a dotted key, or else the section around it."""
    names = key.partition("[")[0].split(".")
    for count in range(len(names), 0, -1):
        for source, tree in reversed(layers):
            if _get(tree, names[:count]) is not _ABSENT:
                return source
    return layers[0][0]


# The detector's settings


def read_detector_config(settings: DetectorSettings) -> DetectorConfig:
    """Read the Detectron2 YAML file (or that of published weights), with `detector.overrides`."""
    published = resolve_weights(settings.config)
    path = published.config_path if isinstance(published, PublishedWeights) else find_config(published)
    if not settings.overrides:
        return DetectorConfig.from_yaml(path)
    # not `resolve`: the cache of the Hugging Face hub links to files without an extension
    return DetectorConfig.from_yaml({"_BASE_": str(path.absolute()), **settings.overrides})
