"""The data of a run: from settings to texts, loaded images and batches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from detector.errors import UserError
from detector.images import ResizeRule
from detector.plain_json import read_plain_json
from detector.user_paths import user_path
from e2e_vl.box_sources import BoxSource
from e2e_vl.config import DetectorSettings, RunConfig
from e2e_vl.converter import check_keys, from_dict
from e2e_vl.data.base import VLDataset, Wants, check_boxes_source, open_options
from e2e_vl.data.images.candidates import open_boxes_of
from e2e_vl.data.images.loader import ImageLoader, ImageRules
from e2e_vl.data.loading.collate import collate
from e2e_vl.data.loading.example_dataset import ExampleDataset
from e2e_vl.data.storage.record_errors import RAISE, RecordErrors
from e2e_vl.data.storage.shared_reads import SharedReads
from e2e_vl.engine.build import named_parts, task_config
from e2e_vl.engine.forked_work import cores
from e2e_vl.layout import TextWriter
from e2e_vl.model import VisionLanguageModel
from e2e_vl.structures import Batch
from e2e_vl.synthetic import FORMATS, LanguageConfig, SceneConfig, make_scenes
from e2e_vl.synthetic.generate import STAMP
from e2e_vl.text import build_vocabulary, load_tokenizer

logger = logging.getLogger(__name__)


def make_synthetic_data(config: RunConfig) -> None:
    """Draw the data set that `data.synthetic` describes into `data.root`, unless it is there already."""
    synthetic = config.data.synthetic
    if not synthetic.scenes:
        return
    check_keys(("scene", "language"), synthetic.config, "data.synthetic.config")
    for name, file in config.data.files.items():
        folder = file.partition("/")[0]
        if synthetic.formats is not None and folder in set(FORMATS) - set(synthetic.formats):
            raise UserError(
                f"data.files.{name} is {file}, but data.synthetic.formats does not have '{folder}', so it would not be "
                "drawn; add it."
            )
    make_scenes(
        user_path(config.data.root, "data.root"),
        scenes=synthetic.scenes,
        seed=synthetic.seed,
        config=from_dict(SceneConfig, synthetic.config.get("scene", {}), "data.synthetic.config.scene"),
        language=from_dict(LanguageConfig, synthetic.config.get("language", {}), "data.synthetic.config.language"),
        formats=synthetic.formats,
        workers=max(config.data.workers, cores()) if config.data.workers else 0,  # nothing else is at work yet
    )


def is_drawn(config: RunConfig) -> bool:
    """Whether the data set that `data.synthetic` describes is complete, so that nothing is left to draw."""
    stamp = user_path(config.data.root, "data.root") / STAMP
    if not stamp.is_file():
        return False
    formats = config.data.synthetic.formats
    present = read_plain_json(stamp).get("formats", FORMATS)
    if not isinstance(present, list | tuple) or not all(isinstance(name, str) for name in present):
        raise UserError(f"{stamp}: formats is not a list of names; remove the folder and draw the data again.")
    return set(FORMATS if formats is None else formats) <= set(present)


def build_tokenizer(
    config: RunConfig, shared: SharedReads | None = None, *, writes: bool = True
) -> PreTrainedTokenizerBase:
    """The named vocabulary, or one built from the training texts and kept with the run.

    Args:
        shared: what splits have read already; None: nothing.
        writes: this process builds the vocabulary; False: another one has built it for this run.
    """
    if config.data.vocabulary is not None:
        return load_tokenizer(config.data.vocabulary)
    path = Path(config.output) / "tokenizer" / "vocab.txt"
    if writes:
        build_vocabulary(training_texts(config, shared), path)
    return load_tokenizer(path)


def training_texts(config: RunConfig, shared: SharedReads | None = None) -> Iterable[str]:
    """All texts of the training split and what the task adds to them, to build a vocabulary from."""
    parts = named_parts(config)
    files, options = open_options(parts.dataset, config.data, shared=shared)
    yield from parts.dataset.texts_of(files, options, config.data.train_split)
    yield from parts.task[1].own_words(task_config(config))


def build_examples(
    config: RunConfig,
    model: VisionLanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    split: str,
    *,
    boxes: BoxSource | str,
    training: bool = False,
    dataset: VLDataset | None = None,
    shared: SharedReads | None = None,
) -> ExampleDataset:
    """One split, read, loaded and worded; training adds random resizing, mirroring and detection targets.

    Args:
        dataset: the split as `open_split` has read it already; None reads it.
        shared: what other splits have read already; None: nothing.

    Raises:
        FileNotFoundError, ValueError: see `open_split`; or a task scores classes that are not the detector's.
    """
    boxes = BoxSource(boxes)
    if dataset is None:
        dataset = open_split(config, split, boxes, training=training, shared=shared)
    if model.task.predicts_classes and not training:
        dataset.check_classes(model.detector.num_classes, model.detector.class_names)
    wording = model.task.wording(build_writer(config, model, tokenizer, training=training))
    loader = build_loader(config, model, dataset, boxes, training=training, shared=shared)
    loader.require_images(dataset.image_ids(), split)
    return ExampleDataset(dataset, loader, wording, seed=config.seed, skip_broken=config.data.skip_broken and training)


def wants_of(config: RunConfig, boxes: BoxSource, *, training: bool) -> Wants:
    """What the settings read of a split that is trained or evaluated with these boxes."""
    objects = training and config.detector.loss_weight > 0
    return Wants(boxes, objects=objects, training=training, phrases=config.phrases.weight > 0)


def open_split(
    config: RunConfig,
    split: str,
    boxes: BoxSource,
    *,
    training: bool,
    errors: RecordErrors = RAISE,
    shared: SharedReads | None = None,
) -> VLDataset:
    """The facts of one split, read from its files.

    Args:
        errors: what becomes of an error about one record of a file.
        shared: what other splits have read already; None: nothing.

    Raises:
        ValueError: precomputed features for a detector that needs pixels, or the other way round; boxes or a file that
            the data set does not know; and see the data set.
    """
    if (boxes is BoxSource.PRECOMPUTED) != (config.detector.backend == "precomputed"):
        raise UserError(
            f"The box source is {boxes} and detector.backend is {config.detector.backend}: precomputed features need "
            "both to be precomputed (data.boxes.train, eval.boxes and detector.backend)."
        )
    if boxes is BoxSource.ONLINE and config.data.boxes.unread_by_own_boxes is not None:
        logger.warning("%s.", config.data.boxes.unread_by_own_boxes)
    kind = named_parts(config).dataset
    check_boxes_source(kind, config.data.name, boxes)
    wants = wants_of(config, boxes, training=training)
    files, options = open_options(kind, config.data, errors, shared)
    sources = [key for key in kind.annotation_files if key in kind.known_files]
    if wants.annotations and sources and not any(key in files for key in sources):
        wanted = "the targets of the detection losses" if wants.objects else f"boxes '{boxes}'"
        keys = " or ".join(f"data.files.{key}" for key in sources)
        raise UserError(f"{wanted} come from annotated objects; give an instances file as {keys}.")
    return kind.open(files, options, split, wants)


def build_writer(
    config: RunConfig, model: VisionLanguageModel, tokenizer: PreTrainedTokenizerBase, *, training: bool = False
) -> TextWriter:
    """What puts texts into the layout of the model's encoder."""
    data = config.data
    marks = model.phrase_head is not None
    return TextWriter(tokenizer, model.encoder.layout, data.max_text_length, data.blank_text, training, marks)


def build_loader(
    config: RunConfig,
    model: VisionLanguageModel,
    dataset: VLDataset | None,
    boxes: BoxSource,
    *,
    training: bool = False,
    shared: SharedReads | None = None,
) -> ImageLoader:
    """The rules for images of a run, with its files of boxes; in evaluation nothing is random.

    Args:
        dataset: whose files of boxes are opened; None: boxes come with each sample, or the detector finds them.
        shared: what other splits have read already; None: nothing.
    """
    data = config.data
    sizes = data.resize.short_edge if training else data.resize.short_edge[-1:]
    rules = ImageRules(
        resize=tuple(ResizeRule(size, data.resize.long_edge, data.resize.rounding) for size in sizes),
        flip_probability=data.flip if training else 0.0,
        channel_order=model.detector.config.input.format,
        with_objects=training and config.detector.loss_weight > 0,
        mask_size=model.task.mask_size,
        mask_at=model.task.mask_at,
        fill_masks=dataset is not None and dataset.mixes_objects,
        is_blank=data.blank_image,
        blank_boxes=model.task.blind_without_boxes,
        mirror_precomputed=data.mirror_precomputed,
        mean_image_feature=data.mean_image_feature,
    )
    reader = None if dataset is None else open_boxes_of(dataset, data, boxes, shared=shared)
    return ImageLoader(rules, boxes, reader)


def build_collate(config: RunConfig, model: VisionLanguageModel) -> Callable[..., Batch]:
    """Examples -> batch, with the colour statistics of the model's detector and the canvas of the data settings."""
    settings = model.detector.config.input
    return partial(collate, pixel_mean=settings.pixel_mean, pixel_std=settings.pixel_std, canvas=config.data.canvas)


def warn_of_random_boxes(settings: DetectorSettings) -> None:
    """To be called where a detector's own boxes are evaluated."""
    if settings.proposes_at_random:
        logger.warning(
            "The detector's own boxes are random: it was neither trained (detector.loss_weight is 0, or it is frozen) "
            "nor loaded with an RPN (detector.weights), so accuracies with boxes 'online' mean nothing."
        )
