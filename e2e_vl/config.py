"""A run's settings: frozen Structs, strictly decoded from YAML files and `key=value` arguments.

`e2e_vl/config_files.py` reads and writes them. The encoder, task and data set of a run have Structs of their own, see
`e2e_vl/registry.py`. The resolved settings are saved with the run.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from detector.config import (
    BoxLoss,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ResizeLibrary,
    Rounding,
    SelectionRule,
)
from detector.errors import UserError
from e2e_vl.registry import DATASETS, DETECTORS, ENCODERS, TASKS, Config, check_name, decode_config
from e2e_vl.synthetic.config import GeneratorConfig


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
        """Return all sources except the one that adds the ground truth."""
        return tuple(source for source in cls if source is not cls.DETECTIONS_GT)


class SyntheticDataConfig(Config, frozen=True):
    """Generate a data set in the official formats before the run, if it does not exist."""

    scenes: dict[str, NonNegativeInt] | None = {}  # split -> number of scenes; empty or None = no synthetic data
    seed: NonNegativeInt = 0
    # folders to write beside `images`, such as captions (see e2e_vl/synthetic/generate.py); None = all
    formats: list[str] | None = None
    config: GeneratorConfig = GeneratorConfig()

    def size_warning(self, image_size: tuple[int, int]) -> str:
        """Return a sentence for users if an image of this (height, width) cannot be a synthetic scene, or ""."""
        scene = self.config.scene
        if not self.scenes or all(scene.min_side <= side <= scene.max_side for side in image_size):
            return ""
        sides = " to ".join(dict.fromkeys(map(str, (scene.min_side, scene.max_side))))
        height, width = image_size
        return f"The model has seen synthetic scenes of {sides} pixels only; this image has {width} x {height}."


class CandidateBoxConfig(Config, frozen=True):
    """The source of candidate boxes in training, and which boxes of a file to keep."""

    train: BoxSource = BoxSource.GT
    selection: SelectionRule = SelectionRule()  # of boxes that come from a file
    max_precomputed: PositiveInt | None = None  # use only the first precomputed regions of each image, best score first


class ResizeConfig(Config, frozen=True):
    """Sizes of images, in pixels."""

    # training samples one, testing uses the last
    short_edge: Annotated[list[PositiveInt], Meta(min_length=1)] = msgspec.field(default_factory=lambda: [600])
    long_edge: PositiveInt = 1000
    rounding: Rounding = "truncate"  # VL-BERT's
    library: ResizeLibrary = "torch"  # "pil" gives the pixels of the official codes, at a third of the speed


class DataConfig(Config, frozen=True):
    """Which data set, and how its images and texts are loaded."""

    name: str  # the reader, a key of DATASETS in e2e_vl/registry.py
    root: str  # folder of the data set
    config: Any = {}  # the reader's own options, see e2e_vl/data/config.py
    files: dict[str, str] = {}  # the reader's files, relative to root
    vocabulary: str | None = None  # vocab.txt, saved tokenizer or hub name; None = built from the training texts
    train_split: str = "train"
    eval_splits: list[str] = msgspec.field(default_factory=lambda: ["val"])
    boxes: CandidateBoxConfig = CandidateBoxConfig()
    # None = INPUT.MIN_SIZE_TRAIN .. MAX_SIZE_TEST of the detector's YAML file, which have no effect otherwise
    resize: ResizeConfig | None = ResizeConfig()
    # [short, long] edge of the smallest canvas that images are padded to, pixels; None = pad to the largest image in
    # the batch
    canvas: tuple[PositiveInt, PositiveInt] | None = None
    flip: Fraction = 0.5  # of mirroring a training image
    # quirk: with precomputed features, flip boxes and swap words although the features are unflipped (official VL-BERT
    # code); False forbids `flip` with them
    mirror_precomputed: bool = False
    # quirk: use the mean of the region features for whole images without a feature of their own (official VL-BERT code)
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
    synthetic: SyntheticDataConfig = SyntheticDataConfig()

    def __post_init__(self) -> None:
        decode_config(self, DATASETS, self.name)


class RunDetectorConfig(Config, frozen=True):
    """Which detector, and how it is trained along with the task."""

    backend: str = "builtin"  # a key of DETECTORS in e2e_vl/registry.py
    config: str = "configs/detector/R_101_C4.yaml"  # a Detectron2 YAML file, or published weights by name
    overrides: dict[str, Any] = {}  # nested Detectron2 keys that override the file
    weights: str | None = None  # published weights by name, a file or a folder to start from; None = random
    # what the weights must contain; the rest is initialised randomly
    expect: Literal["all", "no_attributes", "no_predictor", "no_mask_head", "backbone"] = "all"
    # without `weights`, start from those that MODEL.TRANSFORMERS_BACKBONE.NAME names
    backbone_weights: bool = True
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
    def loads_classes(self) -> bool:
        """Whether the weights contain the box predictor, and so say what the classes are."""
        return self.weights is not None and self.expect in ("all", "no_attributes")

    @property
    def proposes_at_random(self) -> bool:
        """Whether the RPN and the box head are untrained, so predicted boxes are meaningless."""
        is_trained = self.loss_weight > 0 and not self.freeze
        return self.backend != "precomputed" and not is_trained and not self.loads_classes


class EncoderConfig(Config, frozen=True):
    """Which encoder, and its settings."""

    name: str  # a key of ENCODERS in e2e_vl/registry.py
    config: Any = {}  # see e2e_vl/encoders/config.py
    weights: str | None = None  # start: a run, a folder, a file of the official code or a BERT; None = random
    # a BERT for parameters missing from `weights`, such as VCR's pooler (official code)
    fallback_weights: str | None = None

    def __post_init__(self) -> None:
        decode_config(self, ENCODERS, self.name)


class TaskConfig(Config, frozen=True):
    """Which task, and its settings."""

    name: str  # a key of TASKS in e2e_vl/registry.py
    config: Any = {}  # see e2e_vl/tasks/config.py
    weights: str | None = None  # start of the head: a run, a file of the official code or a BERT; None = random
    # a BERT or a run for parameters missing from `weights`, such as additional pre-training objectives
    fallback_weights: str | None = None

    def __post_init__(self) -> None:
        decode_config(self, TASKS, self.name)


class TrackingConfig(Config, frozen=True):
    """What experiment trackers call a run: W&B, MLflow and trackio, the last without tags."""

    project: str = "e2e-vl"  # of W&B and trackio; the experiment of MLflow
    name: str | None = None  # of the run; None = the name of the folder `output`
    tags: list[str] = []


class TrainConfig(Config, frozen=True):
    """How the model is trained."""

    images_per_batch: PositiveInt = 32  # per optimiser step, over all processes and accumulated micro-batches
    gradient_accumulation_steps: PositiveInt = 1  # micro-batches per optimiser step
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
    # quirk: without decay_norm_and_bias, scales of batch norms alone decay (VisualBERT's code)
    decay_bn_scales: bool = False
    warmup_steps: NonNegativeInt = 0
    # instead of warmup_steps: fraction of all steps
    # quirk: with -1 there is no warm-up, and the learning rate decays from half of `lr` (BertAdam's schedule)
    warmup_ratio: Annotated[float, Meta(ge=-1, le=1)] | None = None
    # after the warm-up; linear (the same as triangle) and cosine fall to 0
    schedule: Literal["linear", "cosine", "constant", "steps", "triangle"] = "linear"
    # the part of a longer schedule, and of its objectives, that this run follows: [0.5, 1.0] is the second half,
    # whose optimiser begins with fresh moments
    schedule_fraction: tuple[Fraction, Fraction] = (0.0, 1.0)
    # quirk: the first update has the learning rate of step 1, not 0 (official VL-BERT code)
    schedule_skips_zero: bool = False
    milestones: list[Fraction] = []  # schedule "steps": fractions of all steps before each decay
    gamma: PositiveFloat = 0.1  # schedule "steps": factor per decay
    max_grad_norm: PositiveFloat | None = 1.0  # maximum norm of all gradients together
    max_grad_norm_per_tensor: PositiveFloat | None = None  # bert_adam: maximum norm per parameter (VisualBERT: 1.0)
    # an exponential moving average of the weights with this decay, such as 0.999, is evaluated and saved; None = off
    ema_decay: Annotated[float, Meta(gt=0, lt=1)] | None = None
    mixed_precision: Literal["no", "bf16", "fp16"] = "no"
    # whether GPUs may round the inputs of float32 convolutions and matrix products to TF32 (10 bits); None = torch's
    # default: of convolutions only
    tf32: bool | None = None
    bf16_gradients: bool = False  # sum the gradients of several processes in bfloat16: half the bytes
    # timeout between processes: the main process first reads the data and indexes large files
    max_wait_minutes: PositiveFloat = 240.0
    channels_last: bool = True
    # compile the blocks of the detector and the layers of the encoder, one graph for each kind of them; takes minutes,
    # and a C++ compiler on the CPU
    torch_compile: bool = False
    activation_checkpointing: bool = False  # recompute activations in the backward pass: less memory, more time
    save_every_epochs: NonNegativeFloat = 1.0
    save_total_limit: PositiveInt = 2
    log_every: PositiveInt = 10
    # experiment trackers that accelerate knows, such as wandb; each is a package that must be installed
    trackers: list[str] = msgspec.field(default_factory=lambda: ["tensorboard"])
    tracking: TrackingConfig = TrackingConfig()
    # a metric such as val/accuracy_predicted_boxes (higher is better) or a loss such as val/loss_predicted_boxes (lower
    # is better): the best model is kept in best/
    metric_for_best_model: str | None = None
    # stop after this many evaluations in which metric_for_best_model did not improve
    patience: PositiveInt | None = None

    @property
    def micro_batch_size(self) -> int:
        """Images per micro-batch, over all processes."""
        return self.images_per_batch // self.gradient_accumulation_steps

    def __post_init__(self) -> None:
        ratio = self.warmup_ratio
        falls = self.schedule in ("linear", "triangle")
        steps = self.gradient_accumulation_steps
        per_step = f"images_per_batch {self.images_per_batch} must be a multiple of gradient_accumulation_steps {steps}"
        for is_wrong, message in (
            (
                self.patience is not None and self.metric_for_best_model is None,
                "patience needs metric_for_best_model, the metric to improve",
            ),
            (
                self.max_grad_norm_per_tensor is not None and self.optimizer != "bert_adam",
                "max_grad_norm_per_tensor needs optimizer=bert_adam; the others have max_grad_norm",
            ),
            (
                self.decay_bn_scales and self.decay_norm_and_bias,
                "decay_bn_scales needs decay_norm_and_bias=false, or all norms decay anyway",
            ),
            (ratio is not None and self.warmup_steps > 0, "set one of warmup_steps and warmup_ratio"),
            (
                ratio is not None and ratio < 0 and not (ratio == -1 and falls),
                f"warmup_ratio is {ratio}; it must be from 0 to 1, or -1 with schedule linear or triangle",
            ),
            (
                (self.schedule == "steps") != bool(self.milestones) or self.milestones != sorted(set(self.milestones)),
                f"milestones is {self.milestones}; it must rise with schedule=steps, and be empty with the others",
            ),
            (
                self.schedule_fraction[0] >= self.schedule_fraction[1],
                f"schedule_fraction is {self.schedule_fraction}; it must rise",
            ),
            (self.images_per_batch % self.gradient_accumulation_steps != 0, per_step),
        ):
            if is_wrong:
                raise UserError(message)


class EvalConfig(Config, frozen=True):
    """How the model is evaluated during and after training."""

    every_epochs: NonNegativeFloat = 1.0
    # each is evaluated; see BoxSource.for_evaluation
    boxes: list[BoxSource] = msgspec.field(default_factory=lambda: [BoxSource.GT])
    images_per_batch: PositiveInt = 16
    # evaluations between epochs only use the first `max_images` images
    max_images: PositiveInt | None = None
    # maximum number of wrong, partly correct, correct and unlabelled predictions per split and source in the report
    report_pictures: NonNegativeInt = 12


class PhraseConfig(Config, frozen=True):
    """Phrase grounding as an additional loss of any task: which regions do the phrases of a text refer to?

    Only some data sets annotate phrases.
    """

    weight: NonNegativeFloat = 0.0  # weight of this loss relative to the task's; 0 = no phrase head
    tag_weight: NonNegativeFloat = 0.5  # weight of phrase detection, as a multiple of `weight`
    # weight of the short path, as a multiple of `weight`: before the first layer, the mean word embedding of a phrase
    # asks the regions, which teaches the detector what the texts speak of (docs/end_to_end.md); 0 = none
    short_path_weight: NonNegativeFloat = 0.0
    # use the hidden states after this number of multimodal layers; 0 = their input
    layer: NonNegativeInt = 2
    # the state that stands for a phrase: of its last or first wordpiece, or the mean of all
    phrase_state: Literal["last", "first", "mean"] = "last"
    size: PositiveInt = 128  # width of queries and keys
    weights: str | None = None  # another run to start this head from; None = random


class BoxRefinementConfig(Config, frozen=True):
    """Box refinement as an additional loss: regions move onto the objects that texts name, and so do the answers.

    For the tasks refcoco and flickr30k, and for every task with phrases (`phrases.weight`).
    """

    weight: NonNegativeFloat = 0.0  # weight of this loss relative to the task's; 0 = no refinement
    # "smooth_l1" compares deltas, by plain L1 as in Detectron2; the others compare boxes, as in torchvision
    loss: BoxLoss = "smooth_l1"
    # a region learns to move onto a box that a text names from this IoU on
    min_iou: Annotated[float, Meta(gt=0, le=1)] = 0.5
    weights: str | None = None  # another run to start this head from; None = random


class SegmentationConfig(Config, frozen=True):
    """Segmentation as an additional loss: the detector's mask head cuts out the regions that the task chooses.

    For the task refcoco. The detector needs MODEL.MASK_ON.
    """

    weight: NonNegativeFloat = 0.0  # weight of this loss relative to the task's; 0 = no masks
    # the region that fits the box of a named object best learns its mask, from this IoU on
    min_iou: Annotated[float, Meta(gt=0, le=1)] = 0.5


class RunConfig(Config, frozen=True, kw_only=True):
    """All settings of a run."""

    output: str  # run directory
    seed: NonNegativeInt = 12345
    detector: RunDetectorConfig = RunDetectorConfig()
    encoder: EncoderConfig
    task: TaskConfig
    data: DataConfig
    phrases: PhraseConfig = PhraseConfig()
    box_refinement: BoxRefinementConfig = BoxRefinementConfig()
    segmentation: SegmentationConfig = SegmentationConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()

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
            (
                self.box_refinement.weights is not None and not self.box_refinement.weight,
                "box_refinement.weights is set, but box_refinement.weight is 0, so there is no such head; set one only",
            ),
            (
                self.box_refinement.weight > 0 and self.data.boxes.train is BoxSource.GT,
                "box_refinement.weight needs boxes that differ from the annotated ones, so data.boxes.train cannot be "
                "gt; choose another source",
            ),
            (
                self.segmentation.weight > 0 and self.detector.freeze,
                "segmentation.weight trains the detector's mask head, which detector.freeze freezes; set one only",
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


class ProposalRule(Config, frozen=True):
    """Which boxes of one pass of an object detector are kept."""

    min_score: Fraction = 0.05  # the best box stays, whatever its score
    max_boxes: PositiveInt = 30  # those with the highest scores
    nms_threshold: Fraction = 0.8  # of boxes with a higher IoU, whatever they are called, the better one stays


@dataclasses.dataclass(frozen=True)
class ExtractionConfig:
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


def check_batch_size(config: RunConfig, processes: int) -> None:
    """Raise UserError unless the processes can share a batch evenly; images would be left out of it."""
    images = config.train.images_per_batch
    shares = processes * config.train.gradient_accumulation_steps
    if images % shares:
        raise UserError(
            f"train.images_per_batch is {images}; it must be a multiple of {shares}, the number of processes "
            f"({processes}) times train.gradient_accumulation_steps."
        )
