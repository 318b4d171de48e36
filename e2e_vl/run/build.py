"""Builds the model, tokenizer and data of a run from its settings. `e2e_vl/registry.py` has the names."""

from __future__ import annotations

import copy
import dataclasses
import logging
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from transformers import PreTrainedTokenizerBase

from detector import checkpoint as detector_checkpoint
from detector.checkpoint import LoadReport, load_checkpoint
from detector.config import SelectionRule
from detector.errors import MissingFileError, UserError, user_path
from detector.faster_rcnn import FasterRCNN
from detector.images import ResizeRule
from detector.io import write_json
from detector.structures import Detector
from e2e_vl.config import BoxSource, ResizeConfig, RunConfig, RunDetectorConfig
from e2e_vl.config_files import read_detector_config
from e2e_vl.data.answer_lists import ANSWERS_FILE, read_answers
from e2e_vl.data.base import DataNeeds, VLDataset, check_boxes_source, open_options
from e2e_vl.data.batching import EncodedDataset, collate
from e2e_vl.data.image_loader import ImageLoader, ImageRules, open_boxes_of
from e2e_vl.encoders.base import Encoder
from e2e_vl.model import VisionLanguageModel
from e2e_vl.registry import DATASETS, DETECTORS, ENCODERS, TASKS, Config
from e2e_vl.structures import Ability, Batch
from e2e_vl.synthetic.generate import OtherFilesError, is_unfinished, make_scenes
from e2e_vl.tasks.base import Sizes, Task
from e2e_vl.tasks.box_refinement import BoxRefinementHead
from e2e_vl.tasks.phrase_head import PhraseHead
from e2e_vl.tasks.segmentation import Segmentation
from e2e_vl.text import TextTokenizer, build_vocabulary, load_tokenizer
from e2e_vl.weights.base import WeightAdapter
from e2e_vl.weights.loading import (
    InitRules,
    check_vocabulary,
    find_weights,
    load_box_refinement,
    load_encoder,
    load_phrase_head,
    load_task,
)
from e2e_vl.weights.lxmert import LxmertFromBert, OfficialLxmert, TransformersLxmert
from e2e_vl.weights.visual_bert import OfficialVisualBert, TransformersVisualBert, VisualBertFromBert
from e2e_vl.weights.vl_bert import OfficialVLBert, VLBertFromBert

logger = logging.getLogger(__name__)

BERT_WORDPIECES = 30522  # size of a vocabulary that cannot be read

ADAPTERS: dict[str, tuple[WeightAdapter, ...]] = {  # encoders that can load the weights of other projects
    "vl_bert": (OfficialVLBert(), VLBertFromBert()),
    "visual_bert": (OfficialVisualBert(), TransformersVisualBert(), VisualBertFromBert()),
    "lxmert": (OfficialLxmert(), TransformersLxmert(), LxmertFromBert()),
}


def resolve_config(config: RunConfig) -> RunConfig:
    """Return the settings with `data.resize` filled in from the detector's YAML file where it is null.

    It is an error to train on the boxes of a detector that stays random, and to read scores of boxes that have none.
    """
    is_random = config.detector.loss_weight == 0 and config.detector.weights is None
    if config.data.boxes.train is BoxSource.ONLINE and is_random:
        raise UserError(
            "data.boxes.train is online, but the detector is initialised at random and detector.loss_weight is 0, so "
            "its boxes would never become useful; set detector.loss_weight or detector.weights."
        )
    reads_proposals = getattr(config.encoder.config, "proposal_scores", False)
    if reads_proposals and config.data.boxes.train.reads_annotations:
        raise UserError(
            f"data.boxes.train is {config.data.boxes.train}, but annotated boxes have no scores, which "
            "encoder.config.proposal_scores reads; set it to detections."
        )
    return resolve_resize(config)


def resolve_resize(config: RunConfig) -> RunConfig:
    """Return the settings with `data.resize` filled in from the detector's YAML file where it is null."""
    if config.data.resize is not None:
        return config
    sizes = read_detector_config(config.detector).input
    short = list(sizes.min_size_train)
    if sizes.min_size_train_sampling == "range":
        short = list(range(short[0], short[-1] + 1))
    if sizes.min_size_test not in short or sizes.max_size_test != sizes.max_size_train:
        raise UserError(
            f"data.resize is null, but {config.detector.config} has different sizes for training and testing (INPUT."
            "MIN_SIZE_TEST must be one of MIN_SIZE_TRAIN, and both MAX_SIZEs must be equal); set data.resize."
        )
    short.append(short.pop(short.index(sizes.min_size_test)))  # evaluation uses the last one
    resize = ResizeConfig(short, sizes.max_size_train, "detectron2", "pil")
    return msgspec.structs.replace(config, data=msgspec.structs.replace(config.data, resize=resize))


# The answer vocabulary of a task: read, or built from the training annotations, and saved with the model.


def has_answers(config: RunConfig) -> bool:
    """Return whether the settings give the answers, and with them the order of the classes."""
    return getattr(config.task.config, "answers", None) is not None or "answers" in config.data.files


def load_answers(config: RunConfig) -> list[str]:
    """Return the answers in the order of their classes.

    They come from `task.config.answers` (a list or a file) or from the file `data.files.answers`, under data.root.
    Without either, they are the answers to at least `task.config.min_answer_count` questions of the training split. The
    task normalises the spelling of answers from annotations and text files.
    """
    vocabulary_class = TASKS[config.task.name].cls.vocabulary_class
    dataset = DATASETS[config.data.name].cls
    settings = config.task.config
    if settings.answers is not None and not isinstance(settings.answers, str):
        return list(settings.answers)
    if not has_answers(config):
        most_frequent = dataset.answers_of(*open_options(dataset, config.data), config.data.train_split)
        return count_frequent_answers(most_frequent, settings.min_answer_count, vocabulary_class.canonical_answer)
    path = user_path(settings.answers or Path(config.data.root, config.data.files["answers"]), "task.config.answers")
    answers = read_answers(path)
    if path.suffix.lower() == ".txt":
        return [vocabulary_class.parse_official_answer(answer) for answer in answers]
    return answers


def count_frequent_answers(most_frequent: Mapping[Any, str], min_count: int, spell: Callable[[str], str]) -> list[str]:
    """Return the answers to at least `min_count` questions, by descending count, then alphabetically.

    The empty answer may be one of them. Published vocabularies have a different order.
    `spell` normalises the spelling of an answer.
    """
    counts = Counter(spell(answer) for answer in most_frequent.values())
    frequent = [answer for answer, count in counts.items() if count >= min_count]
    if not frequent:
        raise UserError(
            f"no answer occurs in at least {min_count} of the {len(most_frequent)} questions; lower that number"
        )
    return sorted(frequent, key=lambda answer: (-counts[answer], answer))


# The model.


class InitialWeights(NamedTuple):
    """The weights that a part of the model was initialised from."""

    part: str  # detector, encoder, task or phrases
    path: str
    report: LoadReport


def log_initial_weights(weights: InitialWeights) -> None:
    """Log what was loaded from a weights file; as a warning if tensors are missing or unused."""
    level = logging.INFO if weights.report.is_complete else logging.WARNING
    logger.log(level, "%s (%s names): %s.", weights.path, weights.report.layout, weights.report.summary())


def build_model(
    config: RunConfig,
    *,
    vocab_size: int,
    tokenizer: PreTrainedTokenizerBase | None = None,
    class_names: Sequence[str] | None = None,
    on_init: Callable[[InitialWeights], None] = log_initial_weights,
) -> VisionLanguageModel:
    """Build detector, encoder and task, initialised at random or from the `weights` of each.

    Args:
        tokenizer: if given, the task initialises itself from the other parts (`Task.init_weights`) before
            `task.weights` are loaded.
        class_names: see `build_detector`.
        on_init: called for each part that loads weights.
    """
    if tokenizer is not None and config.encoder.weights is not None:
        check_vocabulary(config.encoder.weights, tokenizer)
    detector = build_detector(config, on_init, class_names)
    rules = InitRules(config.task.name, ADAPTERS.get(config.encoder.name, ()))
    encoder = build_encoder(config, vocab_size, detector.feature_dim)
    for weights in filter(None, (config.encoder.fallback_weights, config.encoder.weights)):
        on_init(InitialWeights("encoder", weights, load_encoder(encoder, weights, rules)))
    sizes = Sizes(encoder.hidden_size, vocab_size, detector.feature_dim, detector.num_classes, encoder.summary_size)
    task = build_task(config, sizes)
    for ability in task.needs:
        encoder.require(ability, f"The task {config.task.name}")
    if tokenizer is not None:
        task.init_weights(tokenizer, encoder, detector)
    knows_order = has_answers(config) or task.vocabulary_class is None
    for weights in filter(None, (config.task.fallback_weights, config.task.weights)):
        on_init(InitialWeights("task", weights, load_task(task, weights, rules, knows_class_order=knows_order)))
    phrase_head = None
    if config.phrases.weight:
        encoder.require(Ability.INTERMEDIATE_STATES, "phrases.weight")
        if config.phrases.layer > encoder.num_joint_layers:
            raise UserError(
                f"phrases.layer is {config.phrases.layer}, but the encoder has {encoder.num_joint_layers} multimodal "
                "layers; lower it."
            )
        phrase_head = PhraseHead(
            encoder.hidden_size,
            config.phrases.size,
            config.phrases.layer,
            config.phrases.phrase_state,
            has_short_path=config.phrases.short_path_weight > 0,
        )
        if config.phrases.weights is not None:
            report = load_phrase_head(phrase_head, config.phrases.weights)
            on_init(InitialWeights("phrases", config.phrases.weights, report))
    box_refinement = None
    if config.box_refinement.weight:
        if not task.names_boxes and phrase_head is None:
            raise UserError(
                f"box_refinement.weight is {config.box_refinement.weight}, but the texts of {config.task.name} name no "
                "boxes to learn from; set phrases.weight too, or set box_refinement.weight to 0."
            )
        box_refinement = BoxRefinementHead(
            encoder.hidden_size, detector.feature_dim, config.box_refinement.loss, config.box_refinement.min_iou
        )
        if config.box_refinement.weights is not None:
            report = load_box_refinement(box_refinement, config.box_refinement.weights)
            on_init(InitialWeights("box_refinement", config.box_refinement.weights, report))
    segmentation = None
    if config.segmentation.weight:
        check_segmentation(config, detector, task)
        segmentation = Segmentation(config.segmentation.min_iou)
    elif detector.config.mask_on:
        raise UserError(
            f"{config.detector.config}, with detector.overrides, has MODEL.MASK_ON true, but segmentation.weight is 0, "
            "so that nothing trains the mask head; set segmentation.weight, or detector.overrides.MODEL.MASK_ON to "
            "false."
        )
    if config.detector.loss_weight == 0:
        detector.freeze_predictions()
    needs_teacher = task.region_masking is not None and task.region_masking.needs_frozen_teacher
    return VisionLanguageModel(
        detector,
        encoder,
        task,
        teacher=copy.deepcopy(detector) if needs_teacher else None,
        phrase_head=phrase_head,
        box_refinement=box_refinement,
        segmentation=segmentation,
        freeze_detector=config.detector.freeze,
    )


def check_segmentation(config: RunConfig, detector: Detector, task: Task) -> None:
    """Raise a UserError if a run cannot have the masks that `segmentation.weight` asks for."""
    if not task.chooses_region:
        raise UserError(
            f"segmentation.weight is {config.segmentation.weight}, but the task {config.task.name} has no masks; only "
            "referring expressions (refcoco) have. Set it to 0."
        )
    if not DATASETS[config.data.name].cls.reads_masks(config.data.config):
        raise UserError(
            f"segmentation.weight is {config.segmentation.weight}, but the reader of data.name {config.data.name} "
            "reads no masks; use refcoco with the official files, or set it to 0."
        )
    if not detector.config.mask_on or config.detector.backend != "builtin":
        raise UserError(
            "segmentation.weight needs a detector with a mask head: set detector.overrides.MODEL.MASK_ON to true, and "
            "detector.backend to builtin."
        )


def build_model_without_weights(config: RunConfig, vocab_size: int) -> VisionLanguageModel:
    """Build the model of a run with tensors that have shapes but no values (torch's device "meta"), in almost no time.

    It encodes texts and checks data like the model that is trained, but cannot be run.
    """
    replace = msgspec.structs.replace
    # the detectron2 package would move the tensors to a real device
    backend = "builtin" if config.detector.backend == "detectron2" else config.detector.backend
    bare = replace(
        config,
        detector=replace(config.detector, weights=None, backbone_weights=False, backend=backend),
        encoder=replace(config.encoder, weights=None, fallback_weights=None),
        task=replace(config.task, weights=None, fallback_weights=None),
        phrases=replace(config.phrases, weights=None),
        box_refinement=replace(config.box_refinement, weights=None),
    )
    with torch.device("meta"):
        return build_model(bare, vocab_size=vocab_size)


@dataclasses.dataclass(frozen=True)
class RunWithoutWeights:
    """What makes examples of the samples of a run, as far as it can be built."""

    config: RunConfig  # with `data.resize`
    model: VisionLanguageModel | None  # without weights; None: it cannot be built
    tokenizer: PreTrainedTokenizerBase | None  # None: there is no vocabulary
    problems: tuple[str, ...] = ()  # why one of them is None


def build_run_without_weights(config: RunConfig) -> RunWithoutWeights:
    """Build tokenizer and model of a run to check its data; nothing is written into its folder."""
    problems: list[str] = []
    model = tokenizer = None
    try:
        with tempfile.TemporaryDirectory() as folder:  # of a vocabulary that is built from the training texts
            tokenizer = build_tokenizer(msgspec.structs.replace(config, output=folder))
    except (ValueError, OSError) as error:
        problems.append(str(error))
    try:
        config = resolve_resize(config)
        vocab_size = BERT_WORDPIECES if tokenizer is None else len(tokenizer)
        model = build_model_without_weights(config, vocab_size)
    except (ValueError, OSError) as error:
        problems.append(str(error))
    return RunWithoutWeights(config, model, tokenizer, tuple(problems))


def build_detector(
    config: RunConfig,
    on_init: Callable[[InitialWeights], None] = log_initial_weights,
    class_names: Sequence[str] | None = None,
) -> Detector:
    """Build the detector with random weights or those of `detector.weights`, or with those that its backbone names.

    Args:
        on_init: gets the report of the weights that were loaded.
        class_names: names of the classes, which are used if the weights have none; None: unknown.
    """
    settings = config.detector
    detector_config = read_detector_config(settings)
    num_classes = detector_config.roi_heads.num_classes
    names = None
    if settings.loads_classes:
        names = detector_checkpoint.read_class_names(settings.weights, num_classes)
    if names is None and class_names is not None and len(class_names) == num_classes:
        names = class_names
    detector = DETECTORS[settings.backend].cls(detector_config, class_names=names)
    if settings.weights is not None:
        report = load_checkpoint(detector, settings.weights, expect=settings.expect)
        on_init(InitialWeights("detector", settings.weights, report))
    elif settings.backbone_weights and isinstance(detector, FasterRCNN):
        report = detector.backbone.load_published_weights()
        if report is not None:
            on_init(InitialWeights("detector", detector_config.transformers.name, report))
    return detector


def build_encoder(config: RunConfig, vocab_size: int, feature_dim: int) -> Encoder:
    """Build the encoder with random weights."""
    model_class = ENCODERS[config.encoder.name].cls
    settings = msgspec.structs.asdict(config.encoder.config)
    return model_class(model_class.config_class(vocab_size=vocab_size, feature_dim=feature_dim, **settings))


def build_task(config: RunConfig, sizes: Sizes) -> Task:
    """Build the task with random weights."""
    return TASKS[config.task.name].cls.build(sizes, read_answer_lists(config))


def read_answer_lists(config: RunConfig) -> Config:
    """Return the settings of the task, with lists of answers in place of their files."""
    replace = msgspec.structs.replace
    settings = config.task.config
    if TASKS[config.task.name].cls.vocabulary_class is not None:
        return replace(settings, answers=load_answers(config))
    if not hasattr(settings, "objectives"):
        return settings
    objectives = dict(settings.objectives)
    for name, objective in objectives.items():
        path = getattr(objective, "answers", None)
        if isinstance(path, str):
            objectives[name] = replace(objective, answers=read_answers(path, objective.answer_sources))
    return replace(settings, objectives=objectives)


# The data of a run: texts, images and batches.


def check_inputs(config: RunConfig) -> None:
    """Raise a UserError if the folder of the data or any weights are missing, before anything is drawn or built."""
    if not config.data.synthetic.scenes and not user_path(config.data.root, "data.root").is_dir():
        raise MissingFileError(f"data.root {config.data.root}: no such folder; it is the folder of the data set.")
    for error in find_missing_weights(config):
        raise error


def find_missing_weights(config: RunConfig) -> Iterator[UserError]:
    """Yield an error for each of the weights that a run starts from and that is missing.

    Weights by name are downloaded into the caches of torch and the Hugging Face hub if they are not there.
    """
    if config.detector.weights is not None:
        try:
            detector_checkpoint.find_weights(config.detector.weights)
        except UserError as error:
            yield error
    for part, settings in (("encoder", config.encoder), ("task", config.task), ("phrases", config.phrases)):
        for name in filter(None, (settings.weights, getattr(settings, "fallback_weights", None))):
            try:
                find_weights(name, part)
            except UserError as error:
                yield error


def make_synthetic_data(config: RunConfig) -> None:
    """Draw the data set of `data.synthetic` into `data.root`, unless it exists."""
    synthetic = config.data.synthetic
    if not synthetic.scenes:
        return
    workers = 0
    if config.data.workers:  # no other process of the run is busy
        workers = max(config.data.workers, os.cpu_count() or 1)
    try:
        make_scenes(
            user_path(config.data.root, "data.root"),
            scenes=synthetic.scenes,
            seed=synthetic.seed,
            config=synthetic.config.scene,
            language=synthetic.config.language,
            rendering=synthetic.config.rendering,
            detections=synthetic.config.detections,
            formats=synthetic.formats,
            workers=workers,
        )
    except OtherFilesError as error:
        raise UserError(
            f"data.root {config.data.root} has files that were not drawn here; choose another data.root, or set "
            "data.synthetic.scenes to null for data of your own."
        ) from error


def draw_missing_scenes(config: RunConfig) -> None:
    """Draw the scenes of a trained run if the folder `data.root` is gone: the bundled demo comes without them.

    They are also drawn if such a drawing was interrupted.
    """
    if not config.data.synthetic.scenes:
        return
    root = user_path(config.data.root, "data.root")
    if not root.exists():
        logger.warning("%s does not exist, so the scenes of this run are drawn there first.", config.data.root)
        make_synthetic_data(config)
    elif is_unfinished(root):
        logger.warning("%s is unfinished, so the scenes of this run are drawn there first.", config.data.root)
        make_synthetic_data(config)


def build_tokenizer(config: RunConfig, *, writes: bool = True) -> PreTrainedTokenizerBase:
    """Load the tokenizer of `data.vocabulary`, or build one from the training texts and save it in the run directory.

    `writes`: whether this process builds the vocabulary; if not, another process has already written it.
    """
    if config.data.vocabulary is not None:
        return load_tokenizer(config.data.vocabulary)
    path = Path(config.output) / "tokenizer" / "vocab.txt"
    if writes:
        build_vocabulary(read_training_texts(config), path)
    return load_tokenizer(path)


def read_training_texts(config: RunConfig) -> Iterable[str]:
    """Read the texts of the training split, and the task's extra words, to build a vocabulary from."""
    dataset = DATASETS[config.data.name].cls
    files, options = open_options(dataset, config.data)
    yield from dataset.texts_of(files, options, config.data.train_split)
    yield from TASKS[config.task.name].cls.extra_words(config.task.config)


def build_examples(
    config: RunConfig,
    model: VisionLanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    split: str,
    *,
    boxes: BoxSource | str,
    training: bool = False,
) -> EncodedDataset:
    """Return the examples of a split; training adds random resizing, horizontal flips and detection targets."""
    boxes = BoxSource(boxes)
    dataset = open_split(config, split, boxes, training=training)
    if model.task.predicts_classes and not training:
        dataset.check_classes(model.detector.num_classes, model.detector.class_names)
    return load_split(config, model, tokenizer, dataset, split, boxes, training=training)


def load_split(
    config: RunConfig,
    model: VisionLanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    dataset: VLDataset,
    split: str,
    boxes: BoxSource,
    *,
    training: bool,
) -> EncodedDataset:
    """Return the examples of an open split, whose images are all there."""
    loader = build_loader(config, model, dataset, boxes, training=training)
    loader.require_images(dataset.image_keys(), split)
    return make_examples(config, model, tokenizer, dataset, loader, split, training=training)


def make_examples(
    config: RunConfig,
    model: VisionLanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    dataset: VLDataset,
    loader: ImageLoader,
    split: str,
    *,
    training: bool,
) -> EncodedDataset:
    """Return the examples of an open split, with the task's preprocessor."""
    preprocessor = model.task.preprocessor(build_text_tokenizer(config, model, tokenizer, training=training))
    skip_broken = config.data.skip_broken and training
    return EncodedDataset(
        dataset,
        loader,
        preprocessor,
        seed=config.seed,
        skip_broken=skip_broken,
        split=split,
        max_text_length=max_text_length(model),
    )


def max_text_length(model: VisionLanguageModel) -> int | None:
    """Return the most wordpieces of a text that a model can read; None: no limit, or it truncates texts by itself."""
    masking = model.task.region_masking
    truncates = masking is not None and masking.config.max_length is not None
    return None if truncates else model.encoder.max_text_length


def open_split(config: RunConfig, split: str, boxes: BoxSource, *, training: bool) -> VLDataset:
    """Open the data set of a split, and check that box source, detector and files match."""
    if (boxes is BoxSource.PRECOMPUTED) != (config.detector.backend == "precomputed"):
        raise UserError(
            f"The box source is {boxes} and detector.backend is {config.detector.backend}; with precomputed features "
            "set data.boxes.train, eval.boxes and detector.backend all to precomputed."
        )
    if boxes is BoxSource.ONLINE and config.data.boxes.selection != SelectionRule():
        logger.warning(
            "data.boxes.selection applies to boxes from files only; boxes 'online' are limited by "
            "MODEL.ROI_HEADS.SCORE_THRESH_TEST and TEST.DETECTIONS_PER_IMAGE of the detector's config."
        )
    kind = DATASETS[config.data.name].cls
    check_boxes_source(kind, config.data.name, boxes)
    objects = training and config.detector.loss_weight > 0
    needs = DataNeeds(
        boxes,
        objects=objects,
        training=training,
        phrases=config.phrases.weight > 0,
        masks=config.segmentation.weight > 0,
    )
    files, options = open_options(kind, config.data)
    sources = [key for key in kind.annotation_files if key in kind.file_keys]
    if needs.annotations and sources and not any(key in files for key in sources):
        purpose = "the targets of the detection losses" if needs.objects else f"boxes '{boxes}'"
        keys = " or ".join(f"data.files.{key}" for key in sources)
        raise UserError(f"{purpose} come from annotated objects; set {keys} to an instances file.")
    dataset = kind(files, options, split, needs)
    if not any(map(len, dataset.groups)):
        raise UserError(
            f"{config.data.name}: no usable record in the split {split} of {config.data.root}; check data.files "
            "and the name of the split."
        )
    return dataset


def build_text_tokenizer(
    config: RunConfig, model: VisionLanguageModel, tokenizer: PreTrainedTokenizerBase, *, training: bool = False
) -> TextTokenizer:
    """Return the tokenizer that encodes texts in the layout of the model's encoder."""
    data = config.data
    return TextTokenizer(
        tokenizer,
        model.encoder.layout,
        data.max_text_length,
        data.blank_text,
        training,
        with_phrase_spans=model.phrase_head is not None,
        with_phrase_matches=model.encoder.reads_proposals,
    )


def build_loader(
    config: RunConfig,
    model: VisionLanguageModel,
    dataset: VLDataset | None,
    boxes: BoxSource,
    *,
    training: bool = False,
) -> ImageLoader:
    """Return the loader of a run's images and their boxes; in evaluation, nothing is random.

    Args:
        dataset: the data set that the box files belong to; None: boxes come with each sample or from the detector.
    """
    data = config.data
    resize = data.resize
    sizes = resize.short_edge if training else resize.short_edge[-1:]
    rules = ImageRules(
        resize=tuple(ResizeRule(size, resize.long_edge, resize.rounding, resize.library) for size in sizes),
        flip_probability=data.flip if training else 0.0,
        channel_order=model.detector.config.input.format,
        with_objects=training and config.detector.loss_weight > 0,
        fill_masks=dataset is not None and dataset.mixes_objects,
        is_blank=data.blank_image,
        blank_boxes=model.task.blind_without_boxes,
        mirror_precomputed=data.mirror_precomputed,
        mean_image_feature=data.mean_image_feature,
    )
    masks = model.task.instance_masks
    if masks is not None:
        rules = dataclasses.replace(rules, mask_size=masks.size, mask_at=masks.at)
    reader = None if dataset is None else open_boxes_of(dataset, data, boxes)
    return ImageLoader(rules, boxes, reader)


def warn_of_random_boxes(settings: RunDetectorConfig) -> None:
    """Log a warning if predicted boxes are evaluated although nothing trained them."""
    if settings.proposes_at_random:
        logger.warning(
            "The detector's predicted boxes are random: its RPN was neither trained (detector.loss_weight is 0, or it "
            "is frozen) nor loaded (detector.weights), so accuracies with boxes 'online' are meaningless."
        )


# A run as a whole: model, tokenizer, data.


@dataclasses.dataclass
class Run:
    """Model, tokenizer and data of a run."""

    model: VisionLanguageModel
    tokenizer: PreTrainedTokenizerBase
    train_data: EncodedDataset
    collate: Callable[..., Batch]
    initial_weights: list[InitialWeights]  # that were loaded, in their order
    eval_data: dict[tuple[str, BoxSource], EncodedDataset]  # by split and boxes


def build_run(config: RunConfig, *, writes: bool = True, evaluates: bool = False) -> Run:
    """Build data, tokenizer and model of a run; draws synthetic data if needed.

    A vocabulary or answer list built from the data is written into the run directory.

    Args:
        config: as returned by `resolve_config`.
        writes: whether this process writes these files; if not, another process has already written them.
        evaluates: open every split of `data.eval_splits` with every box source of `eval.boxes`, too.
    """
    check_inputs(config)
    make_synthetic_data(config)
    tokenizer = build_tokenizer(config, writes=writes)
    initial_weights: list[InitialWeights] = []
    boxes = config.data.boxes.train
    dataset = open_split(config, config.data.train_split, boxes, training=True)
    model = build_model(
        config,
        vocab_size=len(tokenizer),
        tokenizer=tokenizer,
        class_names=dataset.class_names if config.detector.loss_weight > 0 else None,
        on_init=initial_weights.append,
    )
    if writes and model.task.vocabulary_class is not None and not has_answers(config):
        write_json(Path(config.output) / ANSWERS_FILE, model.task.answer_vocabulary.answers)
    examples = load_split(config, model, tokenizer, dataset, config.data.train_split, boxes, training=True)
    check_training_data(config, model, examples, model.detector.class_names)
    eval_data = open_eval_data(config, model, tokenizer) if evaluates else {}
    return Run(model, tokenizer, examples, partial(collate, canvas=config.data.canvas), initial_weights, eval_data)


def check_training_data(
    config: RunConfig, model: VisionLanguageModel, examples: EncodedDataset, class_names: Sequence[str] | None
) -> None:
    """Raise a UserError if the training data lack what detector, task or phrase head learn from.

    `class_names`: of the detector; None: unknown.
    """
    dataset = examples.dataset
    if config.detector.loss_weight > 0:
        dataset.check_classes(model.detector.num_classes, class_names)
    model.task.check_data(dataset, model.detector)
    if model.phrase_head is not None:
        takes_others = bool(examples.preprocessor.learns_from)
        if not dataset.has_phrases or (dataset.mixes_phrases and not takes_others):
            remedy = ""
            if takes_others:
                remedy = "join data that have some (data.name=joined, see docs/phrase_grounding.md), or "
            raise UserError(
                f"phrases.weight is {config.phrases.weight}, but the texts of {config.data.name} have no phrases that "
                f"the task {config.task.name} can learn from; {remedy}set it to 0."
            )


def open_eval_data(
    config: RunConfig, model: VisionLanguageModel, tokenizer: PreTrainedTokenizerBase
) -> dict[tuple[str, BoxSource], EncodedDataset]:
    """Open every split of `data.eval_splits` with every box source of `eval.boxes`."""
    eval_data: dict[tuple[str, BoxSource], EncodedDataset] = {}
    if BoxSource.ONLINE in config.eval.boxes:
        warn_of_random_boxes(config.detector)
    for split in config.data.eval_splits:
        for boxes in config.eval.boxes:
            eval_data[split, boxes] = build_examples(config, model, tokenizer, split, boxes=boxes)
    return eval_data
