"""From settings to objects: the only place that knows which detectors, encoders, tasks, objectives and data sets exist.

A new encoder, task, objective or data set is a file of its own and one entry in a dict below; CONTRIBUTING.md walks
through it.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from detector.backends import BACKENDS, detector_class
from detector.checkpoint import LoadReport, load_checkpoint
from detector.errors import UserError
from detector.interface import Detector
from detector.precomputed import PrecomputedDetector
from detector.r2c_network import R2CNetwork
from e2e_vl.box_sources import BoxSource
from e2e_vl.config import RunConfig
from e2e_vl.converter import check_choice, check_keys, from_dict
from e2e_vl.data.base import VLDataset
from e2e_vl.data.captions import CaptionDataset
from e2e_vl.data.coco_detection import CocoDetectionDataset
from e2e_vl.data.flickr30k import Flickr30KDataset
from e2e_vl.data.gqa import GQADataset
from e2e_vl.data.image_sentences import ImageSentenceDataset
from e2e_vl.data.joined import JoinedDataset, JoinedOptions
from e2e_vl.data.listed_pairs import ListedPairDataset
from e2e_vl.data.nlvr2 import NLVR2Dataset
from e2e_vl.data.refcoco import RefCOCODataset
from e2e_vl.data.scored_questions import ScoredQuestionDataset
from e2e_vl.data.storage.record_errors import RAISE
from e2e_vl.data.storage.shared_reads import SharedReads
from e2e_vl.data.vcr import VCRDataset
from e2e_vl.data.visual_genome import VisualGenomeDataset
from e2e_vl.data.vqa import VQADataset
from e2e_vl.data_settings import ResizeSettings
from e2e_vl.detector_yaml import read_detector_config
from e2e_vl.encoders.base import Encoder
from e2e_vl.encoders.field_limits import own_fields
from e2e_vl.encoders.lxmert import LxmertEncoder, LxmertEncoderConfig
from e2e_vl.encoders.none import NoEncoder, NoEncoderConfig
from e2e_vl.encoders.visual_bert import VisualBertEncoder, VisualBertEncoderConfig
from e2e_vl.encoders.vl_bert import VLBertConfig, VLBertModel
from e2e_vl.engine.answer_lists import are_given, possible_answers, with_answers
from e2e_vl.model import VisionLanguageModel
from e2e_vl.structures import Ability
from e2e_vl.tasks.base import Task
from e2e_vl.tasks.detection import DetectionConfig, DetectionTask
from e2e_vl.tasks.drawn_choices import ChoiceTextsConfig
from e2e_vl.tasks.flickr30k import Flickr30KConfig, Flickr30KTask
from e2e_vl.tasks.gqa import GQAConfig, GQATask
from e2e_vl.tasks.heads import Sizes
from e2e_vl.tasks.nlvr2 import NLVR2Config, NLVR2Task
from e2e_vl.tasks.objectives.attribute_labels import AttributeLabels, AttributeLabelsConfig
from e2e_vl.tasks.objectives.base import Objective
from e2e_vl.tasks.objectives.image_qa import ImageQA, ImageQAConfig
from e2e_vl.tasks.objectives.masked_regions import MaskedRegions, MaskedRegionsConfig
from e2e_vl.tasks.objectives.masked_text import MaskedText, MaskedTextConfig
from e2e_vl.tasks.objectives.masked_words import MaskedWords, MaskedWordsConfig
from e2e_vl.tasks.objectives.object_labels import ObjectLabels, ObjectLabelsConfig
from e2e_vl.tasks.objectives.region_features import RegionFeaturesConfig, RegressedFeatures
from e2e_vl.tasks.objectives.relationship import Relationship, RelationshipConfig
from e2e_vl.tasks.phrase_head import PhraseHead
from e2e_vl.tasks.pretraining import PretrainingConfig, PretrainingTask
from e2e_vl.tasks.refcoco import ReferringConfig, ReferringTask
from e2e_vl.tasks.vcr import VCRTask
from e2e_vl.tasks.vcr_wording import VCRConfig
from e2e_vl.tasks.vqa import VQAConfig, VQATask
from e2e_vl.weights.base import WeightAdapter
from e2e_vl.weights.bert import BertStart
from e2e_vl.weights.lxmert import BertBelow, OfficialLxmert
from e2e_vl.weights.lxmert_transformers import TransformersLxmert
from e2e_vl.weights.start import StartRules, check_vocabulary, load_encoder, load_phrase_head, load_task
from e2e_vl.weights.visual_bert import OfficialVisualBert, VisualBertFromBert
from e2e_vl.weights.visual_bert_transformers import TransformersVisualBert
from e2e_vl.weights.vl_bert import OfficialVLBert

logger = logging.getLogger(__name__)


DETECTORS: dict[str, Callable[[], type[Detector]]] = {
    **{name: partial(detector_class, name) for name in BACKENDS},
    "r2c": lambda: R2CNetwork,
    "precomputed": lambda: PrecomputedDetector,
}
ENCODERS = {
    "vl_bert": (VLBertConfig, VLBertModel),
    "visual_bert": (VisualBertEncoderConfig, VisualBertEncoder),
    "lxmert": (LxmertEncoderConfig, LxmertEncoder),
    "none": (NoEncoderConfig, NoEncoder),
}
ADAPTERS: dict[str, tuple[WeightAdapter, ...]] = {  # of encoders that start from files of other projects
    "vl_bert": (OfficialVLBert(), BertStart()),
    "visual_bert": (OfficialVisualBert(), TransformersVisualBert(), VisualBertFromBert()),
    "lxmert": (OfficialLxmert(), TransformersLxmert(), BertBelow()),
}
TASKS = {
    "refcoco": (ReferringConfig, ReferringTask),
    "detection": (DetectionConfig, DetectionTask),
    "pretraining": (PretrainingConfig, PretrainingTask),
    "vqa": (VQAConfig, VQATask),
    "vcr": (VCRConfig, VCRTask),
    "gqa": (GQAConfig, GQATask),
    "nlvr2": (NLVR2Config, NLVR2Task),
    "flickr30k": (Flickr30KConfig, Flickr30KTask),
}
OBJECTIVES = {  # of pre-training; texts are changed in this order
    "masked_words": (MaskedWordsConfig, MaskedWords),
    "masked_text": (MaskedTextConfig, MaskedText),
    "masked_regions": (MaskedRegionsConfig, MaskedRegions),
    "relationship": (RelationshipConfig, Relationship),
    "object_labels": (ObjectLabelsConfig, ObjectLabels),
    "attribute_labels": (AttributeLabelsConfig, AttributeLabels),
    "region_features": (RegionFeaturesConfig, RegressedFeatures),
    "image_qa": (ImageQAConfig, ImageQA),
}


class AnyJoined(JoinedDataset):
    """Some of the data sets below as one."""

    options = JoinedOptions

    @classmethod
    def kind(cls, name: str) -> type[VLDataset]:
        return _named(DATASETS, name, "data.config.parts.<part>.name")


DATASETS: dict[str, type[VLDataset]] = {
    "refcoco": RefCOCODataset,
    "coco_detection": CocoDetectionDataset,
    "captions": CaptionDataset,
    "vqa": VQADataset,
    "vcr": VCRDataset,
    "gqa": GQADataset,
    "nlvr2": NLVR2Dataset,
    "flickr30k": Flickr30KDataset,
    "image_sentences": ImageSentenceDataset,
    "scored_questions": ScoredQuestionDataset,
    "listed_pairs": ListedPairDataset,
    "visual_genome": VisualGenomeDataset,
    "joined": AnyJoined,
}


# told which part's weights came from which path, and how they fit
TellStart = Callable[[str, str, LoadReport], None]


class PartClasses(NamedTuple):
    """The classes that a run's settings name."""

    detector: type[Detector]
    encoder: tuple[type[PreTrainedConfig], type[Encoder]]
    task: tuple[type, type[Task]]
    dataset: type[VLDataset]


def named_parts(config: RunConfig) -> PartClasses:
    """Look up the names in the dicts above.

    Raises:
        ValueError: there is nothing of that name (the message lists what there is), or its package is not installed.
    """
    return PartClasses(
        detector=_named(DETECTORS, config.detector.backend, "detector.backend")(),
        encoder=_named(ENCODERS, config.encoder.name, "encoder.name"),
        task=_named(TASKS, config.task.name, "task.name"),
        dataset=_named(DATASETS, config.data.name, "data.name"),
    )


def task_class(name: str) -> type[Task]:
    """The class of a task by its name in settings. Raises ValueError if no task has it."""
    return _named(TASKS, name, "task.name")[1]


def _named(choices: dict[str, Any], name: str, setting: str) -> Any:
    check_choice(setting, name, choices)
    return choices[name]


def resolve(config: RunConfig) -> RunConfig:
    """The settings with everything that follows from files; nothing changes them later.

    `data.resize` comes from the detector's YAML file where it is null, so that the saved settings hold numbers.

    Raises:
        ValueError: a wrong name, own boxes of a detector that never learns to find any, a selection of boxes that
            nothing reads, or sizes of training and testing that `data.resize` cannot express together.
    """
    named_parts(config)
    is_random = config.detector.loss_weight == 0 and config.detector.weights is None
    if config.data.boxes.train == BoxSource.ONLINE and is_random:
        raise UserError(
            "data.boxes.train is online, but the detector starts at random and detector.loss_weight is 0, so its boxes "
            "would never become useful; set detector.loss_weight or detector.weights."
        )
    sources = {BoxSource(source) for source in (config.data.boxes.train, *config.eval.boxes)}
    unread = config.data.boxes.unread_by_own_boxes
    reads = any(source.reads_selection for source in sources)
    if unread is not None and reads and config.data.boxes.train == BoxSource.ONLINE:
        raise UserError(
            f"{unread}. Training would not read it, only the evaluation with boxes of files; leave it out, set these, "
            "and give it to tools/evaluate.py afterwards."
        )
    if unread is not None and BoxSource.ONLINE in sources and not reads:
        raise UserError(f"{unread}; leave it out and set these.")
    if config.data.resize is not None:
        return config
    sizes = read_detector_config(config.detector).input
    short = list(sizes.min_size_train)
    if sizes.min_size_train_sampling == "range":
        if len(short) != 2 or short[0] > short[1]:
            raise UserError("INPUT.MIN_SIZE_TRAIN_SAMPLING is range: INPUT.MIN_SIZE_TRAIN must be two rising sizes.")
        short = list(range(short[0], short[1] + 1))
    if sizes.min_size_test not in short or sizes.max_size_test != sizes.max_size_train:
        raise UserError(
            f"data.resize is null, but {config.detector.config} tests at other sizes than it trains at (INPUT."
            "MIN_SIZE_TEST must be one of MIN_SIZE_TRAIN, and the MAX_SIZEs equal); write data.resize yourself."
        )
    short.append(short.pop(short.index(sizes.min_size_test)))  # the last one is the size of testing
    resize = ResizeSettings(short, sizes.max_size_train, "detectron2")
    return dataclasses.replace(config, data=dataclasses.replace(config.data, resize=resize))


def log_start(part: str, path: str, report: LoadReport) -> None:
    """Log what came from a weights file; a warning if something stayed random or unused."""
    level = logging.INFO if report.is_complete else logging.WARNING
    logger.log(level, "%s (%s names): %s.", path, report.layout, report.summary())


def build_model(
    config: RunConfig,
    *,
    vocab_size: int,
    tokenizer: PreTrainedTokenizerBase | None = None,
    tell_start: TellStart = log_start,
    shared: SharedReads | None = None,
) -> VisionLanguageModel:
    """Detector, encoder and task with random or (`weights` of each) given starting values.

    With the tokenizer, the task takes what it wants from the other parts (`Task.initialise`); `task.weights` beat that.
    `tell_start` is called for each part that starts from weights ("detector", "encoder", "task" or "phrases").
    `shared` is what splits have read already, for a list of answers that is built from the data.

    Raises:
        ValueError: the encoder cannot do what the task needs, or weights do not fit.
    """
    if tokenizer is not None and config.encoder.weights is not None:
        check_vocabulary(config.encoder.weights, tokenizer)
    detector = build_detector(config, tell_start)
    encoder = build_encoder(config, vocab_size=vocab_size, feature_dim=detector.feature_dim, tell_start=tell_start)
    sizes = Sizes(
        encoder.hidden_size, vocab_size, detector.feature_dim, detector.num_classes, summary_size=encoder.summary_size
    )
    task = build_task(config, sizes, shared)
    for ability in task.needs:
        encoder.require(ability, f"The task {config.task.name}")
    if tokenizer is not None:
        task.initialise(tokenizer, encoder, detector)
    for weights in (config.task.fallback_weights, config.task.weights):
        if weights is not None:
            knows_order = are_given(config) or not task.chooses_answers
            report = load_task(task, weights, start_rules(config), knows_class_order=knows_order)
            tell_start("task", weights, report)
    rule = task.hiding
    needs_copy = rule is not None and rule.hides and rule.teacher == "frozen"
    teacher = copy.deepcopy(detector) if needs_copy else None
    phrase_head = build_phrase_head(config, encoder, tell_start)
    freeze = config.detector.freeze
    return VisionLanguageModel(
        detector, encoder, task, teacher=teacher, phrase_head=phrase_head, freeze_detector=freeze
    )


def build_phrase_head(config: RunConfig, encoder: Encoder, tell_start: TellStart = log_start) -> PhraseHead | None:
    """The head that grounds phrases, if the settings have one.

    Raises:
        FileNotFoundError, ValueError: a layer that is not there, or weights that do not fit.
    """
    settings = config.phrases
    if not settings.weight:
        return None
    encoder.require(Ability.INNER_STATES, "phrases.weight")
    if settings.layer > encoder.num_joint_layers:
        raise UserError(
            f"phrases.layer is {settings.layer}, but the encoder has {encoder.num_joint_layers} layers in which words "
            "and regions read each other; set a number from 0 to that."
        )
    head = PhraseHead(encoder.hidden_size, settings.size, settings.layer)
    if settings.weights is not None:
        tell_start("phrases", settings.weights, load_phrase_head(head, settings.weights))
    return head


def build_detector(config: RunConfig, tell_start: TellStart = log_start) -> Detector:
    if config.detector.backend == "precomputed" and (config.detector.weights or config.detector.loss_weight):
        raise UserError(
            "detector.backend is precomputed: there is no network that detector.weights or detector.loss_weight could "
            "be for; leave them out."
        )
    detector = named_parts(config).detector(read_detector_config(config.detector))
    if config.detector.weights is not None:
        report = load_checkpoint(detector, config.detector.weights, expect=config.detector.expect)
        tell_start("detector", config.detector.weights, report)
    return detector


def start_rules(config: RunConfig) -> StartRules:
    """What says how the encoder and the task of the settings start from weights."""
    return StartRules(config.task.name, TASKS, ADAPTERS.get(config.encoder.name, ()))


def build_encoder(
    config: RunConfig, *, vocab_size: int, feature_dim: int, tell_start: TellStart = log_start
) -> Encoder:
    config_class, model_class = named_parts(config).encoder
    check_keys(own_fields(config_class), config.encoder.config, "encoder.config")
    fixed = [key for key in ("vocab_size", "feature_dim") if key in config.encoder.config]
    if fixed:
        raise UserError(f"encoder.config.{fixed[0]} follows from the tokenizer and the detector; leave it out.")
    try:
        encoder = model_class(config_class(vocab_size=vocab_size, feature_dim=feature_dim, **config.encoder.config))
    except UserError as error:
        raise UserError(f"encoder.config: {error}") from error
    except (TypeError, KeyError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"encoder.config cannot be used: {reason}.") from error
    for weights in (config.encoder.fallback_weights, config.encoder.weights):
        if weights is not None:
            tell_start("encoder", weights, load_encoder(encoder, weights, start_rules(config)))
    return encoder


def task_config(config: RunConfig) -> Any:
    """`task.config` as the config class of the task."""
    return from_dict(named_parts(config).task[0], dict(config.task.config), "task.config")


def build_task(config: RunConfig, sizes: Sizes, shared: SharedReads | None = None) -> Task:
    """The task with its head; `shared` is what splits have read already, for a list of answers that is built."""
    task_class = named_parts(config).task[1]
    settings = task_config(config)
    if task_class.chooses_answers:
        least = settings.min_answer_count
        answers = possible_answers(config, named_parts(config).dataset, task_class, least, RAISE, shared)
        settings = dataclasses.replace(settings, answers=answers)
    if task_class.sums_objectives:
        task = task_class.build(sizes, settings, build_objectives(settings.objectives, sizes))
        if settings.choices is not None:
            words_choices = _task_of(settings.choices, sizes)
            task.choice_wording = words_choices.wording
            task.mask_size, task.mask_at = words_choices.mask_size, words_choices.mask_at
        return task
    return task_class.build(sizes, settings)


def _task_of(settings: ChoiceTextsConfig, sizes: Sizes) -> Task:
    """The task that words texts for another one, which uses nothing else of it but the size of its masks."""
    config_class, other = _named(TASKS, settings.task, "task.config.choices.task")
    return other.build(sizes, from_dict(config_class, settings.config, "task.config.choices.config"))


def build_objectives(settings: dict[str, Any], sizes: Sizes) -> dict[str, Objective]:
    """All objectives whose weight is not 0, in the order of `OBJECTIVES`; see `PretrainingConfig.objectives`."""
    where = "task.config.objectives"
    check_keys(OBJECTIVES, settings, where)
    objectives = {}
    for name, (config_class, objective_class) in OBJECTIVES.items():
        values = settings.get(name, {})
        if isinstance(values, int | float):
            values = {"weight": values}
        own = from_dict(config_class, values, f"{where}.{name}")
        if own.weight:
            objectives[name] = objective_class(sizes, with_answers(own))
    return objectives
