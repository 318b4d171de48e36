"""From settings to objects: the only place that knows which detectors, encoders, tasks and data sets there are.

A new encoder, task or data set is a file of its own and one entry in a dict below; CONTRIBUTING.md walks through it.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from detector.backends import BACKENDS, detector_class
from detector.checkpoint import LoadReport, load_checkpoint
from detector.interface import Detector
from detector.precomputed import PrecomputedDetector
from e2e_vl.config import DataSettings, DetectorSettings, ResizeSettings, RunConfig
from e2e_vl.data.captions import CaptionDataset
from e2e_vl.data.coco_detection import CocoDetectionDataset
from e2e_vl.data.collate import collate
from e2e_vl.data.refcoco import RefCOCODataset
from e2e_vl.data.vcr import VCRDataset
from e2e_vl.data.vqa import VQADataset
from e2e_vl.encoders.base import Encoder
from e2e_vl.encoders.none import NoEncoder, NoEncoderConfig
from e2e_vl.encoders.vl_bert import VLBertConfig, VLBertModel
from e2e_vl.engine.answers import are_given, possible_answers
from e2e_vl.model import VisionLanguageModel
from e2e_vl.structures import Batch
from e2e_vl.synthetic.build import FORMATS, make_scenes
from e2e_vl.synthetic.sampling import LanguageConfig
from e2e_vl.synthetic.scenes import SceneConfig
from e2e_vl.tasks.base import Task
from e2e_vl.tasks.detection import DetectionConfig, DetectionTask
from e2e_vl.tasks.pretraining import PretrainingConfig, PretrainingTask
from e2e_vl.tasks.refcoco import ReferringConfig, ReferringTask
from e2e_vl.tasks.vcr import VCRConfig, VCRTask
from e2e_vl.tasks.vqa import VQAConfig, VQATask
from e2e_vl.text import build_vocabulary, load_tokenizer
from e2e_vl.weights.start import check_vocabulary, load_encoder, load_task

logger = logging.getLogger(__name__)


DETECTORS: dict[str, Callable[[], type[Detector]]] = {
    **{name: partial(detector_class, name) for name in BACKENDS},
    "precomputed": lambda: PrecomputedDetector,
}
ENCODERS = {"vl_bert": (VLBertConfig, VLBertModel), "none": (NoEncoderConfig, NoEncoder)}
TASKS = {
    "refcoco": (ReferringConfig, ReferringTask),
    "detection": (DetectionConfig, DetectionTask),
    "pretraining": (PretrainingConfig, PretrainingTask),
    "vqa": (VQAConfig, VQATask),
    "vcr": (VCRConfig, VCRTask),
}
DATASETS = {
    "refcoco": RefCOCODataset,
    "coco_detection": CocoDetectionDataset,
    "captions": CaptionDataset,
    "vqa": VQADataset,
    "vcr": VCRDataset,
}


class Parts(NamedTuple):
    """The classes that a run's settings name."""

    detector: type[Detector]
    encoder: tuple[type[PreTrainedConfig], type[Encoder]]
    task: tuple[type, type[Task]]
    dataset: Any  # a class with `from_settings` and `texts_of`


@dataclasses.dataclass
class Run:
    """What a run is made of."""

    model: VisionLanguageModel
    tokenizer: PreTrainedTokenizerBase
    train_dataset: Any  # has `groups` and answers `Request`s; None when only evaluating
    collate: Callable[..., Batch]
    eval_datasets: dict[tuple[str, str], Any] = dataclasses.field(default_factory=dict)  # (split, boxes) -> data set


def build_run(config: RunConfig) -> Run:
    """Data (drawn first if the settings ask for it), tokenizer and a model with its starting weights."""
    named_parts(config)  # a wrong name is found before data are drawn
    take_sizes_of_detector(config)
    make_synthetic_data(config)
    tokenizer = build_tokenizer(config)
    model = build_model(config, vocab_size=len(tokenizer), tokenizer=tokenizer)
    dataset = build_dataset(config, tokenizer, config.data.train_split, boxes=config.data.boxes.train, training=True)
    if config.detector.loss_weight > 0:
        dataset.check_classes(model.detector.num_classes)
    model.task.check_data(dataset, model.detector)
    return Run(model=model, tokenizer=tokenizer, train_dataset=dataset, collate=build_collate(model, config.data))


def named_parts(config: RunConfig) -> Parts:
    """Look up the names in the dicts above.

    Raises:
        ValueError: there is nothing of that name (the message lists what there is), or its package is not installed.
    """
    return Parts(
        detector=_named(DETECTORS, config.detector.backend, "detector.backend")(),
        encoder=_named(ENCODERS, config.encoder.name, "encoder.name"),
        task=_named(TASKS, config.task.name, "task.name"),
        dataset=_named(DATASETS, config.data.name, "data.name"),
    )


def _named(choices: dict[str, Any], name: str, setting: str) -> Any:
    if name not in choices:
        raise ValueError(f"{setting} is '{name}'; it must be one of {', '.join(choices)}.")
    return choices[name]


def take_sizes_of_detector(config: RunConfig) -> None:
    """Fill in `data.resize` from the detector's YAML file where it is null, so that the saved settings hold numbers.

    Raises:
        ValueError: sizes of training and testing that `data.resize` cannot express together.
    """
    if config.data.resize is not None:
        return
    sizes = build_detector_config(config).input
    short = list(sizes.min_size_train)
    if sizes.min_size_train_sampling == "range":
        if len(short) != 2 or short[0] > short[1]:
            raise ValueError("INPUT.MIN_SIZE_TRAIN_SAMPLING is range: INPUT.MIN_SIZE_TRAIN must be two rising sizes.")
        short = list(range(short[0], short[1] + 1))
    if sizes.min_size_test not in short or sizes.max_size_test != sizes.max_size_train:
        raise ValueError(
            f"data.resize is null, but {config.detector.config} tests at other sizes than it trains at (INPUT."
            "MIN_SIZE_TEST must be one of MIN_SIZE_TRAIN, and the MAX_SIZEs equal); write data.resize yourself."
        )
    short.append(short.pop(short.index(sizes.min_size_test)))  # the last one is that of testing
    config.data.resize = ResizeSettings(short, sizes.max_size_train, "detectron2")


def make_synthetic_data(config: RunConfig) -> None:
    """Draw the data set that `data.synthetic` describes into `data.root`, unless it is there already."""
    synthetic = config.data.synthetic
    if not synthetic.scenes:
        return
    unknown = set(synthetic.config) - {"scene", "language"}
    if unknown:
        raise ValueError(f"data.synthetic.config has {', '.join(sorted(unknown))}; it takes scene and language.")
    for name, file in config.data.files.items():
        folder = file.partition("/")[0]
        if synthetic.formats is not None and folder in set(FORMATS) - set(synthetic.formats):
            raise ValueError(
                f"data.files.{name} is {file}, but data.synthetic.formats does not have '{folder}', so it would not be "
                "drawn; add it."
            )
    make_scenes(
        Path(config.data.root).expanduser(),
        scenes=synthetic.scenes,
        seed=synthetic.seed,
        config=_filled(SceneConfig, synthetic.config.get("scene", {}), "data.synthetic.config.scene"),
        language=_filled(LanguageConfig, synthetic.config.get("language", {}), "data.synthetic.config.language"),
        formats=synthetic.formats,
        workers=config.data.workers,
    )


def build_tokenizer(config: RunConfig) -> PreTrainedTokenizerBase:
    """The named vocabulary, or one built from the training texts and kept with the run."""
    if config.data.vocabulary is not None:
        return load_tokenizer(config.data.vocabulary)
    path = Path(config.output) / "tokenizer" / "vocab.txt"
    build_vocabulary(training_texts(config), path)
    return load_tokenizer(path)


def training_texts(config: RunConfig) -> Iterable[str]:
    """All texts of the training split, to build a vocabulary from."""
    return named_parts(config).dataset.texts_of(config.data, config.data.train_split)


def build_dataset(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, split: str, *, boxes: str, training: bool = False
) -> Any:
    """One split with candidate boxes from `boxes`; training adds random resizing, mirroring and detection targets.

    Raises:
        ValueError: precomputed features for a detector that needs pixels, or the other way round; a file that the data
            set does not know; and see the data set.
    """
    if (boxes == "precomputed") != (config.detector.backend == "precomputed"):
        raise ValueError(
            f"The box source is {boxes} and detector.backend is {config.detector.backend}: precomputed features need "
            "both to be precomputed (data.boxes.train, eval.boxes and detector.backend)."
        )
    dataset = named_parts(config).dataset
    unknown = sorted(set(config.data.files) - set(dataset.known_files))
    if unknown:
        raise ValueError(
            f"data.files has the unknown key '{unknown[0]}'; {config.data.name} takes {', '.join(dataset.known_files)}."
        )
    return dataset.from_settings(
        config.data,
        tokenizer,
        split,
        boxes=boxes,
        training=training,
        seed=config.seed,
        channel_order=build_detector_config(config).input.format,
        with_objects=training and config.detector.loss_weight > 0,
    )


def build_eval_datasets(config: RunConfig, run: Run) -> None:
    """Read all splits with all box sources that the settings evaluate, once a run."""
    if "online" in config.eval.boxes:
        warn_of_random_boxes(config.detector)
    for split in config.data.eval_splits:
        for boxes in config.eval.boxes:
            run.eval_datasets[split, boxes] = build_dataset(config, run.tokenizer, split, boxes=boxes)


def warn_of_random_boxes(settings: DetectorSettings) -> None:
    """To be called where a detector's own boxes are evaluated."""
    if settings.proposes_at_random:
        logger.warning(
            "The detector's own boxes are random: it was neither trained (detector.loss_weight is 0, or it is frozen) "
            "nor loaded with an RPN (detector.weights), so accuracies with boxes 'online' mean nothing."
        )


def build_collate(model: VisionLanguageModel, data: DataSettings | None = None) -> Callable[..., Batch]:
    """Examples -> batch, with the colour statistics of the model's detector and the canvas of the data settings."""
    settings = model.detector.config.input
    canvas = None if data is None else data.canvas
    return partial(collate, pixel_mean=settings.pixel_mean, pixel_std=settings.pixel_std, canvas=canvas)


def build_model(
    config: RunConfig, *, vocab_size: int, tokenizer: PreTrainedTokenizerBase | None = None
) -> VisionLanguageModel:
    """Detector, encoder and task with random or (`weights` of each) given starting values.

    With the tokenizer, the task takes what it wants from the other parts (`Task.initialise`); `task.weights` beat that.
    """
    if tokenizer is not None and config.encoder.weights is not None:
        check_vocabulary(config.encoder.weights, tokenizer)
    detector = build_detector(config)
    encoder = build_encoder(config, vocab_size=vocab_size, feature_dim=detector.feature_dim)
    task = build_task(config, encoder.hidden_size, vocab_size)
    if tokenizer is not None:
        task.initialise(tokenizer, encoder, detector)
    if config.task.weights is not None:
        knows_order = are_given(config) or not hasattr(task, "answers")
        report = load_task(task, config.task.weights, task_name=config.task.name, knows_class_order=knows_order)
        _log_start(config.task.weights, report)
    return VisionLanguageModel(detector, encoder, task, freeze_detector=config.detector.freeze)


def build_detector_config(config: RunConfig) -> Any:
    """The Detectron2 YAML file, with `detector.overrides` on top, as the config class of the chosen backend."""
    config_class = named_parts(config).detector.config_class
    path = Path(config.detector.config)
    if not path.is_file():
        raise FileNotFoundError(
            f"Detector config {path} does not exist; set detector.config to a Detectron2 YAML file."
        )
    if not config.detector.overrides:
        return config_class.from_yaml(path)
    return config_class.from_yaml({"_BASE_": str(path.resolve()), **config.detector.overrides})


def build_detector(config: RunConfig) -> Detector:
    if config.detector.backend == "precomputed" and (config.detector.weights or config.detector.loss_weight):
        raise ValueError(
            "detector.backend is precomputed: there is no network that detector.weights or detector.loss_weight could "
            "be for; leave them out."
        )
    detector = named_parts(config).detector(build_detector_config(config))
    if config.detector.weights is not None:
        report = load_checkpoint(detector, config.detector.weights, expect=config.detector.expect)
        _log_start(config.detector.weights, report)
    return detector


def _log_start(path: str, report: LoadReport) -> None:
    """What came from a weights file; a warning if something stayed random or unused."""
    level = logging.INFO if report.is_complete else logging.WARNING
    logger.log(level, "%s (%s names): %s.", path, report.layout, report.summary())


def build_encoder(config: RunConfig, *, vocab_size: int, feature_dim: int) -> Encoder:
    config_class, model_class = named_parts(config).encoder
    known = {field.name for field in dataclasses.fields(config_class)}
    unknown = sorted(set(config.encoder.config) - known)
    if unknown:
        raise ValueError(
            f"encoder.config has the unknown key '{unknown[0]}'; see the fields of {config_class.__name__}."
        )
    fixed = [key for key in ("vocab_size", "feature_dim") if key in config.encoder.config]
    if fixed:
        raise ValueError(f"encoder.config.{fixed[0]} follows from the tokenizer and the detector; leave it out.")
    try:
        encoder = model_class(config_class(vocab_size=vocab_size, feature_dim=feature_dim, **config.encoder.config))
    except (TypeError, KeyError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"encoder.config cannot be used: {reason}.") from error
    for weights in (config.encoder.fallback_weights, config.encoder.weights):
        if weights is not None:
            _log_start(weights, load_encoder(encoder, weights, task_name=config.task.name))
    return encoder


def build_task(config: RunConfig, hidden_size: int, vocab_size: int) -> Task:
    config_class, task_class = named_parts(config).task
    values = dict(config.task.config)
    if "vocab_size" in {field.name for field in dataclasses.fields(config_class)}:
        if "vocab_size" in values:
            raise ValueError("task.config.vocab_size follows from the tokenizer; leave it out.")
        values["vocab_size"] = vocab_size
    task_config = _filled(config_class, values, "task.config")
    if hasattr(task_config, "answers"):  # it chooses from a list
        answers = possible_answers(config, named_parts(config).dataset, task_config.min_answer_count)
        task_config = dataclasses.replace(task_config, answers=answers)
    return task_class(hidden_size, task_config)


def _filled(cls: type, values: dict[str, Any], name: str) -> Any:
    """A dataclass from settings; an unknown key is an error that lists the known ones."""
    known = [field.name for field in dataclasses.fields(cls)]
    unknown = [key for key in values if key not in known]
    if unknown:
        raise ValueError(f"{name} has the unknown key '{unknown[0]}'; it takes {', '.join(known)}.")
    try:
        return cls(**values)
    except (TypeError, AttributeError, KeyError) as error:  # a value of the wrong type
        raise ValueError(f"{name} cannot be used, a value has the wrong type: {error}.") from error


def detector_yaml(config: RunConfig) -> dict[str, Any]:
    """The detector's settings as nested Detectron2 keys, to compare two runs."""
    return yaml.safe_load(build_detector_config(config).to_yaml())
