"""What region features know, at every depth of a model and over the checkpoints of its run: `e2e-vl probe`.

The detector describes annotated boxes in evaluation mode, and the encoder reads them with the first text about each
image. Linear probes then read the labels of the objects off the features: of each stage of the backbone (its map,
pooled over the box), of the region feature that goes to the encoder, and of the encoder's states of the region.
Where phrases name annotated boxes, others read the labels of the named object off the phrase's words: off their
embeddings, and off the encoder's states of them.

Shape legend: see `e2e_vl/structures.py`; and here
    J  boxes of all images, joined
    P  phrases that name one of these boxes; a whole text may be one
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torchvision.ops import box_iou, roi_align
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from detector.errors import MissingFileError, UserError
from detector.io import atomic_folder, read_json
from detector.roi_pooler import to_rois
from detector.structures import Detector, ImageBoxes
from e2e_vl.analysis.gradients import PYRAMID, StageGradient, measure_gradients, trunk_stages
from e2e_vl.analysis.linear_probe import Label, fit_probes, read_labels
from e2e_vl.analysis.probe_report import (
    REGION_FEATURE,
    RESULT_FILES,
    RESULTS_FOLDER,
    WORDS,
    GradientRow,
    ProbeResults,
    ProbeRow,
    spread,
    write_results,
)
from e2e_vl.analysis.run import check_results_folder, replace_data, split_overrides, use_data, with_phrases
from e2e_vl.config import BoxSource, RunConfig
from e2e_vl.data.base import DataNeeds, VLDataset, open_options
from e2e_vl.data.batching import BatchLoader, EncodedDataset, GroupedBatchSampler, Request, collate
from e2e_vl.io import find_model_folder
from e2e_vl.model import VisionLanguageModel
from e2e_vl.predictions import Prediction
from e2e_vl.preprocessing import EncodedText, GeneratorFactory, Preprocessor
from e2e_vl.registry import DATASETS
from e2e_vl.run.build import build_examples, build_loader, build_text_tokenizer, open_split
from e2e_vl.run.checkpoint import list_checkpoints, load_initial_model, load_model
from e2e_vl.run.devices import default_device
from e2e_vl.samples import AnnotatedObjects, Sample, SampleText
from e2e_vl.structures import Ability, Batch
from e2e_vl.targets import Ragged
from e2e_vl.tasks.phrase_head import MIN_IOU, phrase_states
from e2e_vl.terminal import lasting_output
from e2e_vl.transforms import LoadedImage

logger = logging.getLogger(__name__)

POOLED_SIDE = 7  # of the map that is pooled over a box before its mean
TEXTS_PER_IMAGE = 8  # at most, of data with phrases; of other data the first one is read


@dataclasses.dataclass(frozen=True)
class ProbeArguments:
    """The arguments of a diagnosis."""

    runs: tuple[Path, ...]
    split: str = "val"
    output: Path | None = None  # None: a folder of the first run
    data: Path | None = None  # config with the data to read; None: those of the first run
    max_images: int | None = 800
    max_checkpoints: int = 8  # of each run
    gradient_batches: int = 8  # 0: no gradients
    overrides: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """The folder of the result files."""
        return self.output or self.runs[0] / RESULTS_FOLDER


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A model of a run at one step."""

    run: Path
    step: int
    folder: Path | None  # of the saved model; None: the model that the run started from
    optimizer_state: Path | None = None  # None: there is none

    @property
    def name(self) -> str:
        return f"{self.run}, step {self.step}"

    def load(self, overrides: Sequence[str]) -> tuple[RunConfig, VisionLanguageModel, PreTrainedTokenizerBase]:
        """Load the model, in evaluation mode on the CPU."""
        if self.folder is None:
            return load_initial_model(self.run)
        return load_model(self.folder, overrides=list(overrides))


def list_models(run: Path, config: RunConfig, limit: int) -> list[Checkpoint]:
    """List the models of a run by step: the one that it started from, its checkpoints, its best and its last one.

    Args:
        limit: maximum number; the last one stays, then the first one, and the others are spread evenly.
    """
    last = find_model_folder(run)
    by_step = {0: Checkpoint(run, 0, None)}
    for folder in list_checkpoints(run):
        step = int(folder.name.removeprefix("step_"))
        state = folder / "state" / "optimizer.bin"
        by_step[step] = Checkpoint(run, step, folder / "model", state if state.is_file() else None)
    best = run / "best" / "best.json"
    if best.is_file():
        step = read_json(best, dict[str, Any])["step"]
        by_step.setdefault(step, Checkpoint(run, step, best.parent))
    metrics = last.parent / "metrics.json"
    last_step = config.train.max_steps or max(*by_step, 1)
    if metrics.is_file():
        last_step = read_json(metrics, dict[str, Any]).get("steps", last_step)
    by_step.setdefault(last_step, Checkpoint(run, last_step, last))
    models = [by_step[step] for step in sorted(by_step)]
    return models[-1:] if limit == 1 else spread(models, limit)


# The annotated boxes of a split


class WithoutTexts(Preprocessor):
    """Replaces each text by an empty one, for models that read no texts, or other texts than those of the data."""

    prediction_class = Prediction
    learns_from = (object,)

    @override
    def truth_record(self, truth: Any, *, flipped: bool) -> dict[str, Any]:
        return {}

    @override
    def encode_text(
        self, text: SampleText, sample: Sample, images: Sequence[LoadedImage], make_generator: GeneratorFactory
    ) -> Iterable[EncodedText]:
        yield EncodedText(self.text_tokenizer.single([]), text.image_index, {"text_index": text.index})


@dataclasses.dataclass
class ProbedBoxes:
    """The annotated boxes of a split as one model reads them; the same boxes in the same order for every model."""

    dataset: VLDataset
    examples: EncodedDataset
    requests: list[list[Request]]  # of each batch: an image with its first text, or several with phrases
    reads_texts: bool  # the model reads the texts of the data

    def objects(self) -> list[AnnotatedObjects]:
        """Return the annotated objects of each image.

        Raises:
            UserError: an image has none, because the data set does not list them.
        """
        objects = []
        for request in itertools.chain.from_iterable(self.requests):
            for image in self.dataset.sample(request.texts).images:
                if image.objects is None:
                    raise UserError(f"image {image.id} has no annotated objects to probe; give --data with some.")
                objects.append(select_objects(image.objects, image.candidates))
        return objects


def select_objects(objects: AnnotatedObjects, rows: Sequence[int] | None) -> AnnotatedObjects:
    """Return the annotated objects that are candidate boxes; None: all of them."""
    if rows is None:
        return objects
    chosen = list(rows)
    changes: dict[str, Any] = {"boxes": objects.boxes[chosen], "ids": None, "outlines": None}
    for name in ("classes", "is_crowd", "attributes"):
        values = getattr(objects, name)
        if values is not None:
            changes[name] = values[chosen]
    if objects.names is not None:
        changes["names"] = tuple(objects.names[row] for row in chosen)
    return dataclasses.replace(objects, **changes)


def open_boxes(
    config: RunConfig,
    model: VisionLanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    split: str,
    *,
    max_images: int | None,
    reads_texts: bool,
) -> ProbedBoxes:
    """Open the annotated boxes of a split for a model, whatever it reads in its evaluations."""
    dataset_class = DATASETS[config.data.name].cls
    if BoxSource.GT in dataset_class.box_sources:
        boxes = BoxSource.GT
        dataset = open_split(with_phrases(config), split, boxes, training=False)
    else:
        boxes = BoxSource.ONLINE
        files, options = open_options(dataset_class, config.data)
        dataset = dataset_class(files, options, split, DataNeeds(boxes, objects=True))
    loader = build_loader(config, model, dataset, boxes)
    text_tokenizer = build_text_tokenizer(config, model, tokenizer)
    reads_texts = reads_texts and model.encoder.lacks(Ability.INTERMEDIATE_STATES) is None
    reads_phrases = reads_texts and dataset.has_phrases
    text_tokenizer = dataclasses.replace(text_tokenizer, with_phrase_spans=reads_phrases)
    preprocessor = model.task.preprocessor(text_tokenizer) if reads_texts else WithoutTexts(text_tokenizer)
    examples = EncodedDataset(dataset, loader, preprocessor, seed=config.seed)
    texts_per_image = TEXTS_PER_IMAGE if reads_phrases else 1
    groups = [list(texts[:texts_per_image]) for texts in dataset.groups if len(texts)]
    sampler = GroupedBatchSampler(groups[:max_images], config.eval.images_per_batch, shuffle=False)
    return ProbedBoxes(dataset, examples, list(sampler), reads_texts)


# Features of boxes and words at every depth


@dataclasses.dataclass
class Features:
    """Features by the name of their depth, from the stem to the last layer of the encoder."""

    boxes: dict[str, Float[Tensor, "J _D"]]
    words: dict[str, Float[Tensor, "P _E"]]  # mean over the words of each phrase
    named_rows: Int64[Tensor, " P"]  # which of the J boxes each phrase names

    def on_cpu(self) -> Features:
        """Return a copy in float32 on the CPU."""
        boxes = {depth: values.float().cpu() for depth, values in self.boxes.items()}
        words = {depth: values.float().cpu() for depth, values in self.words.items()}
        return Features(boxes, words, self.named_rows.cpu())

    @classmethod
    def join(cls, parts: Sequence[Features]) -> Features:
        """Join the features of several batches."""
        boxes = {}
        for depth in parts[0].boxes:
            boxes[depth] = torch.cat([part.boxes[depth] for part in parts])
        words = {}
        for depth in parts[0].words:
            words[depth] = torch.cat([part.words[depth] for part in parts])
        named_rows = []
        first_row = 0
        for part in parts:
            named_rows.append(first_row + part.named_rows)
            first_row += len(part.boxes[REGION_FEATURE])
        return cls(boxes, words, torch.cat(named_rows))


def collect_features(
    config: RunConfig, model: VisionLanguageModel, boxes: ProbedBoxes, objects: Sequence[AnnotatedObjects], *, name: str
) -> Features:
    """Return the features of all boxes, and of the words that name them, at every depth of a model, on the CPU."""
    device = next(model.parameters()).device
    parts = []
    join = functools.partial(collate, canvas=config.data.canvas)
    loader = BatchLoader(boxes.examples, boxes.requests, join, workers=config.data.workers)
    image = 0
    model.eval()
    for batch in tqdm(loader, desc=f"{name}: features", unit="batch", leave=False, delay=1):
        if batch.boxes is None:
            batch = dataclasses.replace(
                batch, boxes=boxes_of_objects(batch, objects[image : image + len(batch.images)])
            )
        image += len(batch.images)
        parts.append(describe_batch(model, batch.to(device), reads_texts=boxes.reads_texts).on_cpu())
    return Features.join(parts)


def boxes_of_objects(batch: Batch, objects: Sequence[AnnotatedObjects]) -> ImageBoxes:
    """Return annotated boxes in pixels of the resized images, clamped to them."""
    boxes = []
    for image_objects, scale, size in zip(objects, batch.images.scales, batch.images.sizes, strict=True):
        limits = size.flip(0).float().repeat(2)
        scaled = torch.from_numpy(image_objects.boxes).float().reshape(-1, 4) * scale.repeat(2)
        boxes.append(scaled.clamp(min=0).minimum(limits))
    return boxes


@torch.no_grad()
def describe_batch(model: VisionLanguageModel, batch: Batch, *, reads_texts: bool) -> Features:
    """Return the features of the candidate boxes of a batch, and of the words that name them, at every depth."""
    counts = [len(image_boxes) for image_boxes in batch.boxes]
    with pooled_maps(model.detector, to_rois(batch.boxes)) as features:
        regions, text_regions, _ = model.encode(batch)
    first = int(model.encoder.uses_whole_image)  # row 0 is the whole image
    features[REGION_FEATURE] = torch.cat([rows[first:] for rows in regions.features])
    spans, named_rows = find_named_boxes(batch)
    words: dict[str, Tensor] = {}
    if not reads_texts:
        return Features(features, words, named_rows)
    # the encoder also read whole images that tasks do not see
    readable = dataclasses.replace(text_regions, attention_mask=text_regions.image >= 0)
    starts = torch.tensor([0, *itertools.accumulate(counts)], device=text_regions.row.device)
    is_first = first_about_image(batch.image_index).to(starts.device)
    is_box = text_regions.attention_mask & (text_regions.row >= 0) & is_first[:, None]
    target_rows = starts[text_regions.image[is_box]] + text_regions.row[is_box]
    if batch.phrases is not None and model.encoder.lacks(Ability.WORD_EMBEDDINGS) is None:
        embeddings = model.encoder.get_input_embeddings()(batch.texts.input_ids)
        words[f"{WORDS}embeddings"] = phrase_states(embeddings, spans, "mean")
    numbers = range(model.encoder.num_joint_layers + 1)
    for number, states in model.encoder(batch.texts, readable, intermediate_layers=numbers).intermediate.items():
        sorted_states = states.regions.new_zeros(sum(counts), states.regions.shape[2])
        sorted_states[target_rows] = states.regions[is_box]
        features[f"encoder {number}"] = sorted_states
        if batch.phrases is not None:
            words[f"{WORDS}encoder {number}"] = phrase_states(states.text, spans, "mean")
    return Features(features, words, named_rows)


def first_about_image(image_index: Int64[Tensor, "M I"]) -> Bool[Tensor, " M"]:
    """Return which texts are the first one about their first image."""
    images = image_index[:, 0].tolist()
    return torch.tensor([image not in images[:number] for number, image in enumerate(images)])


def find_named_boxes(batch: Batch) -> tuple[Ragged, Int64[Tensor, " P"]]:
    """Find the candidate box that a phrase with one box names, with an IoU of at least 0.5.

    Returns:
        The spans of such phrases, a list per text as in `PhraseBatch`; and of each phrase the row of its box among the
        boxes of all images.
    """
    boxes = torch.cat(batch.boxes)
    phrases = batch.phrases
    if phrases is None or not len(boxes):
        counts = torch.zeros(len(batch), dtype=torch.int64, device=boxes.device)
        return Ragged(counts.new_zeros(0, 2), counts), counts.new_zeros(0)
    has_one_box = phrases.boxes.counts == 1
    named_boxes = phrases.boxes.values[has_one_box[phrases.boxes.owner]]
    text = phrases.spans.owner[has_one_box]
    image = batch.image_index[:, 0].to(text.device)[text]
    image_of_box = torch.cat([torch.full((len(rows),), number) for number, rows in enumerate(batch.boxes)])
    is_other_image = image[:, None] != image_of_box.to(text.device)
    best_overlap, rows = box_iou(named_boxes, boxes).masked_fill(is_other_image, 0).max(dim=1)
    is_box = best_overlap >= MIN_IOU
    spans = phrases.spans.values[has_one_box][is_box]
    return Ragged(spans, torch.bincount(text[is_box], minlength=len(batch))), rows[is_box]


@contextlib.contextmanager
def pooled_maps(detector: Detector, rois: Float[Tensor, "J 5"]) -> Iterator[dict[str, Tensor]]:
    """Pool the maps of each stage of a detector's backbone over boxes, in the passes that are made meanwhile.

    A stage with several maps, such as a pyramid, has the mean of each, one after the other.
    Yields:
        stage -> features of the boxes, filled by the passes. It is empty for a detector without a backbone, and one
        that moves the images to other places before its backbone sees them.
    """
    features: dict[str, Tensor] = {}
    backbone = getattr(detector, "backbone", None)
    if backbone is None or detector.config.r2c.canvas:
        yield features
        return
    stages = trunk_stages(backbone)
    if hasattr(backbone, "bottom_up"):
        stages[PYRAMID] = backbone
    widths = []  # of the padded images

    def note_width(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        widths.append(inputs[0].shape[3])

    def pool(stage: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            maps = list(output.values()) if isinstance(output, Mapping) else [output]
            features[stage] = torch.cat([mean_over_boxes(level, rois, widths[-1]) for level in maps], dim=1)

        return hook

    with contextlib.ExitStack() as hooks:
        hooks.callback(backbone.register_forward_pre_hook(note_width).remove)
        for stage, module in stages.items():
            hooks.callback(module.register_forward_hook(pool(stage)).remove)
        yield features


def mean_over_boxes(maps: Float[Tensor, "N C h w"], rois: Float[Tensor, "J 5"], width: int) -> Float[Tensor, "J C"]:
    """Return the mean of a map over boxes; `width`: of the padded images, in pixels."""
    stride = 2 ** round(math.log2(width / maps.shape[3]))
    pooled = roi_align(maps.float().contiguous(), rois.to(maps.device), POOLED_SIDE, 1 / stride, 2, aligned=True)
    return pooled.mean(dim=(2, 3))


# The diagnosis


@lasting_output()
def probe_runs(args: ProbeArguments) -> tuple[ProbeResults, Path]:
    """Probe the models of runs, measure their gradients, and write the results; returns them and the page."""
    check_results_folder(args.folder, RESULT_FILES)
    run_overrides, data_overrides = split_overrides(args.overrides, has_data=args.data is not None)
    first_config, *_ = load_model(args.runs[0], overrides=run_overrides)
    probed = first_config
    if args.data is not None:
        probed = replace_data(first_config, args.data, data_overrides)
    diagnosis = Diagnosis(args, probed, run_overrides)
    for run in args.runs:
        diagnosis.add_run(run)
    with atomic_folder(args.folder.resolve()) as folder:  # replaces an earlier diagnosis
        page = write_results(folder, diagnosis.results)
    return diagnosis.results, args.folder.resolve() / page.name


class Diagnosis:
    """Probes one run after the other, on the same boxes."""

    def __init__(self, args: ProbeArguments, probed: RunConfig, overrides: list[str]) -> None:
        self.args = args
        self.probed = probed  # its data are those of all runs
        self.overrides = overrides
        self.device = default_device()
        self.results = ProbeResults([str(run) for run in args.runs], probed.data.name, args.split)
        self.objects: list[AnnotatedObjects] = []
        self.labels: dict[str, Label] = {}
        self.is_counted = torch.zeros(0, dtype=torch.bool)  # rows of the boxes that are no crowds
        self.is_train = torch.zeros(0, dtype=torch.bool)  # of these

    def add_run(self, run: Path) -> None:
        """Probe all models of a run."""
        own_config, *_ = load_model(run, overrides=self.overrides)
        batches = None
        for checkpoint in list_models(run, own_config, self.args.max_checkpoints):
            try:
                config, model, tokenizer = checkpoint.load(self.overrides)
            except (MissingFileError, UserError) as error:
                if checkpoint.folder is not None:
                    raise
                self.note(f"{run}: the model that the run started from is left out: {error}")
                continue
            model.to(self.device)
            self.add_model(checkpoint, config, model, tokenizer)
            if batches is None:
                batches = self.load_batches(own_config, model, tokenizer)
            if batches:
                gradients = measure_gradients(
                    config,
                    model,
                    batches,
                    optimizer_state=checkpoint.optimizer_state,
                    is_untrained=checkpoint.folder is None,
                    name=checkpoint.name,
                )
                self.add_gradients(checkpoint, gradients)

    def add_model(
        self,
        checkpoint: Checkpoint,
        config: RunConfig,
        model: VisionLanguageModel,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        """Probe the features of one model."""
        boxes = open_boxes(
            use_data(config, self.probed.data),
            model,
            tokenizer,
            self.args.split,
            max_images=self.args.max_images,
            reads_texts=config.data.name == self.probed.data.name,
        )
        if not self.labels:
            self.set_objects(boxes.objects())
        features = collect_features(config, model, boxes, self.objects, name=checkpoint.name)
        counted = {depth: values[self.is_counted] for depth, values in features.boxes.items()}
        self.add_probes(checkpoint, counted, self.labels, self.is_train)
        if not boxes.reads_texts:
            self.note(
                f"The words of {checkpoint.run} are not probed, because it does not read the texts of these data."
            )
        elif not len(features.named_rows):
            self.note("The words are not probed, because no text of these data refers to one annotated object.")
        else:
            self.add_words(checkpoint, features)

    def add_words(self, checkpoint: Checkpoint, features: Features) -> None:
        """Probe the words of phrases for the labels of the boxes that they name."""
        is_counted = self.is_counted[features.named_rows]
        counted_rows = (self.is_counted.cumsum(dim=0) - 1)[features.named_rows[is_counted]]
        words = {depth: values[is_counted] for depth, values in features.words.items()}
        labels = {}
        for name, label in self.labels.items():
            labels[name] = dataclasses.replace(label, values=label.values[counted_rows.numpy()])
        self.add_probes(checkpoint, words, labels, self.is_train[counted_rows])
        self.results.phrases = len(counted_rows)

    def add_probes(
        self,
        checkpoint: Checkpoint,
        features: Mapping[str, Float[Tensor, "rows _D"]],
        labels: Mapping[str, Label],
        is_train: Bool[Tensor, " rows"],
    ) -> None:
        """Fit the probes of one model at every depth."""
        for depth, values in tqdm(features.items(), desc=f"{checkpoint.name}: probes", leave=False, delay=1):
            accuracies = fit_probes(values.to(self.device), labels, is_train.to(self.device))
            for label, accuracy in accuracies.items():
                row = ProbeRow(str(checkpoint.run), checkpoint.step, depth, label, **dataclasses.asdict(accuracy))
                self.results.probes.append(row)

    def set_objects(self, objects: list[AnnotatedObjects]) -> None:
        """Read the labels of the annotated objects; every second image is for learning, the others for judging."""
        self.objects = objects
        is_counted = []
        is_train = []
        counted_objects = []
        numbers: dict[str, int] = {}  # of the images, some of which may come several times
        for image_objects in objects:
            number = numbers.setdefault(image_objects.origin, len(numbers))
            rows = np.ones(len(image_objects), dtype=bool)
            if image_objects.is_crowd is not None:
                rows = ~image_objects.is_crowd
            is_counted.append(rows)
            is_train.append(np.full(rows.sum(), number % 2 == 0))
            counted_objects.append(select_objects(image_objects, np.flatnonzero(rows).tolist()))
        self.is_counted = torch.from_numpy(np.concatenate(is_counted))
        self.is_train = torch.from_numpy(np.concatenate(is_train))
        self.labels = read_labels(counted_objects)
        self.results.images = len(objects)
        self.results.boxes = len(self.is_train)
        self.results.labels = {name: list(label.classes) for name, label in self.labels.items()}
        if not self.labels:
            raise UserError(
                f"The annotated objects of {self.probed.data.name} have neither classes nor attributes to probe; give "
                "--data with some."
            )

    def load_batches(
        self, config: RunConfig, model: VisionLanguageModel, tokenizer: PreTrainedTokenizerBase
    ) -> list[Batch]:
        """Load training batches of a run, from its own data; none, with a note, where they are not there."""
        if not self.args.gradient_batches:
            return []
        try:
            split = config.data.train_split
            examples = build_examples(config, model, tokenizer, split, boxes=config.data.boxes.train, training=True)
            sampler = GroupedBatchSampler(
                examples.groups,
                images_per_batch=config.train.micro_batch_size,
                texts_per_image=config.data.texts_per_image,
                seed=config.seed,
            )
            batches = []
            for requests in itertools.islice(sampler, self.args.gradient_batches):
                batches.append(collate([examples[request] for request in requests], canvas=config.data.canvas))
            self.results.gradient_batches = len(batches)
            return batches
        except (MissingFileError, UserError) as error:
            self.note(f"There are no gradients, because the training data cannot be read: {error}")
            return []

    def add_gradients(self, checkpoint: Checkpoint, gradients: Sequence[StageGradient]) -> None:
        for gradient in gradients:
            values = dataclasses.asdict(gradient) | {"relative_gradient": gradient.relative_gradient}
            self.results.gradients.append(GradientRow(str(checkpoint.run), checkpoint.step, **values))

    def note(self, text: str) -> None:
        """Say once what could not be measured."""
        if text not in self.results.notes:
            logger.warning("%s", text)
            self.results.notes.append(text)
