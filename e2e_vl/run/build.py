"""From settings to objects: the only place that knows which detectors, encoders, tasks, objectives and data sets exist.

A new encoder, task, objective or data set is a file of its own and one entry in a dict below; CONTRIBUTING.md walks
through it.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from transformers import PreTrainedTokenizerBase

from detector.checkpoint import LoadReport, load_checkpoint
from detector.errors import UserError, user_path
from detector.images import ResizeRule
from detector.io import read_json
from detector.structures import Detector
from e2e_vl.config import BoxSource, DetectorSettings, ResizeSettings, RunConfig, read_detector_config
from e2e_vl.data.answer_lists import ANSWERS_FILE, read_answers, write_answers
from e2e_vl.data.base import VLDataset, Wants, check_boxes_source, open_options
from e2e_vl.data.batching import ExampleDataset, collate
from e2e_vl.data.image_loader import ImageLoader, ImageRules, open_boxes_of
from e2e_vl.encoders.base import Encoder
from e2e_vl.model import VisionLanguageModel
from e2e_vl.parts import DATASETS, DETECTORS, ENCODERS, OBJECTIVES, TASKS
from e2e_vl.structures import Ability, Batch
from e2e_vl.synthetic import FORMATS, make_scenes
from e2e_vl.synthetic.generate import STAMP
from e2e_vl.tasks.base import Sizes, Task
from e2e_vl.tasks.config import PretrainingConfig
from e2e_vl.tasks.objectives.base import Objective
from e2e_vl.tasks.phrase_head import PhraseHead
from e2e_vl.text import TextTokenizer, build_vocabulary, load_tokenizer
from e2e_vl.weights.base import WeightAdapter
from e2e_vl.weights.bert import BertStart
from e2e_vl.weights.lxmert import BertBelow, OfficialLxmert, TransformersLxmert
from e2e_vl.weights.start import StartRules, check_vocabulary, load_encoder, load_phrase_head, load_task
from e2e_vl.weights.visual_bert import OfficialVisualBert, TransformersVisualBert, VisualBertFromBert
from e2e_vl.weights.vl_bert import OfficialVLBert

# The list of possible answers of a task: read, or built from the training annotations, and kept with the model.


OFFICIAL_SUFFIX = ".answers.txt"


def are_given(config: RunConfig) -> bool:
    """Whether the settings name the answers, so that the order of the classes is theirs."""
    return getattr(config.task.config, "answers", None) is not None or "answers" in config.data.files


def answers_path(config: RunConfig) -> Path | None:
    """The file that gives the answers; None where they are a list in the settings, or are built."""
    given = getattr(config.task.config, "answers", None)
    if given is None and "answers" in config.data.files:
        return user_path(config.data.root, "data.root") / config.data.files["answers"]
    return user_path(given, "task.config.answers") if isinstance(given, str) else None


def possible_answers(
    config: RunConfig,
    min_count: int,
) -> list[str]:
    """Answers in the order of their classes.

    `task.config.answers` (a list or a file) or the file `data.files.answers`, under data.root, gives them. Without
    either they are built from the annotations of the training split, where each must answer at least `min_count`
    questions. The task spells the answers of annotations and of text files.

    Raises:
        FileNotFoundError, ValueError: see `read_answers`, the data set's reader and `frequent_answers`.
    """
    task, dataset = TASKS[config.task.name].cls, DATASETS[config.data.name].cls
    given = getattr(config.task.config, "answers", None)
    if given is not None and not isinstance(given, str):
        return list(given)
    path = answers_path(config)
    if path is not None:
        answers = read_answers(path)
        return [task.official_answer(answer) for answer in answers] if path.suffix == ".txt" else answers
    given = dataset.answers_of(*open_options(dataset, config.data), config.data.train_split)
    return frequent_answers(given, min_count, task.spell_answer)


def with_answers(objective: Any) -> Any:
    """The settings of an objective, with the list in the place of a file of answers.

    Raises:
        FileNotFoundError, ValueError: see `read_answers`.
    """
    path = getattr(objective, "answers", None)
    if not isinstance(path, str):
        return objective
    return msgspec.structs.replace(objective, answers=list(read_answers(path, objective.answer_sources)))


def frequent_answers(most_frequent: Mapping[Any, str], min_count: int, spell: Callable[[str], str]) -> list[str]:
    """A list of answers from the most frequent answer to each question, by question id.

    Those that, spelled alike, at least `min_count` questions have. The empty answer may be one of them. Ordered by
    falling count, then alphabetically; published vocabularies have orders of their own.

    Raises:
        ValueError: no answer is frequent enough.
    """
    counts = Counter(spell(answer) for answer in most_frequent.values())
    kept = [answer for answer, count in counts.items() if count >= min_count]
    if not kept:
        raise UserError(
            f"no answer belongs to at least {min_count} of the {len(most_frequent)} questions; lower the least count"
        )
    return sorted(kept, key=lambda answer: (-counts[answer], answer))


def official_lines(task: Task) -> str:
    """A task's answers as the text file of official code, one per line in the order of their classes.

    Lines of an official file that the task spells alike are one answer with several classes, of which the first counts;
    they are written as different lines again ("t shirt", then "t-shirt"), since `read_answers` refuses equal ones.

    Raises:
        ValueError: an answer that such a file cannot hold: an empty one, one that is read back as another (lines are
            stripped and lower-cased, and the task spells them as official code does), or one that is there several
            times and that no other line is read as.
    """
    used: dict[str, int] = {}  # line -> number of its answer
    for number, answer in enumerate(task.answers):
        own = answer.strip().lower()
        if len(own.splitlines()) != 1 or task.official_answer(own) != answer:
            raise UserError(
                f"Answer {number} is {answer!r}, which an official answer vocabulary (one answer per line) cannot "
                "hold; train with a list without it, task.config.answers."
            )
        lines = (one for one in _spellings(own) if one not in used and task.official_answer(one) == answer)
        line = next(lines, None)
        if line is None:
            raise UserError(
                f"Answers {used[own]} and {number} are both {answer!r}, which an official answer vocabulary holds once "
                "only; train with a list that has it once, task.config.answers."
            )
        used[line] = number
    return "".join(f"{line}\n" for line in used)


def _spellings(line: str) -> Iterator[str]:
    """The line, then lines that official code may read as the same answer: with a hyphen, or with periods at the end.

    Official code deletes the first 32 periods that no digit follows.
    """
    yield line
    if " " in line:
        yield line.replace(" ", "-")
        yield line.replace(" ", "-", 1)
    for number in range(1, 33):
        yield line + "." * number


logger = logging.getLogger(__name__)


ADAPTERS: dict[str, tuple[WeightAdapter, ...]] = {  # of encoders that start from files of other projects
    "vl_bert": (OfficialVLBert(), BertStart()),
    "visual_bert": (OfficialVisualBert(), TransformersVisualBert(), VisualBertFromBert()),
    "lxmert": (OfficialLxmert(), TransformersLxmert(), BertBelow()),
}

# told which part's weights came from which path, and how they fit
TellStart = Callable[[str, str, LoadReport], None]


def resolve(config: RunConfig) -> RunConfig:
    """The settings with everything that follows from files; nothing changes them later.

    `data.resize` comes from the detector's YAML file where it is null, so that the saved settings hold numbers.

    Raises:
        UserError: predicted boxes of a detector that never learns to find any, a selection of boxes that
            nothing reads, or sizes of training and testing that `data.resize` cannot express together.
    """
    is_random = config.detector.loss_weight == 0 and config.detector.weights is None
    if config.data.boxes.train is BoxSource.ONLINE and is_random:
        raise UserError(
            "data.boxes.train is online, but the detector starts at random and detector.loss_weight is 0, so its boxes "
            "would never become useful; set detector.loss_weight or detector.weights."
        )
    sources = {config.data.boxes.train, *config.eval.boxes}
    unread = config.data.boxes.unread_by_predicted_boxes
    reads = any(source.reads_selection for source in sources)
    if unread is not None and reads and config.data.boxes.train is BoxSource.ONLINE:
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
    return msgspec.structs.replace(config, data=msgspec.structs.replace(config.data, resize=resize))


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
    is_saved: bool = False,
) -> VisionLanguageModel:
    """Detector, encoder and task with random or (`weights` of each) given starting values.

    With `is_saved` the weights of a saved model are to be loaded afterwards, so that starting values are left out.

    With the tokenizer, the task takes what it wants from the other parts (`Task.initialise`); `task.weights` beat that.
    `tell_start` is called for each part that starts from weights ("detector", "encoder", "task" or "phrases").

    Raises:
        ValueError: the encoder cannot do what the task needs, or weights do not fit.
    """
    if is_saved:
        none = {"weights": None, "fallback_weights": None}
        config = msgspec.structs.replace(
            config,
            detector=msgspec.structs.replace(config.detector, weights=None),
            encoder=msgspec.structs.replace(config.encoder, **none),
            task=msgspec.structs.replace(config.task, **none),
        )
    if tokenizer is not None and config.encoder.weights is not None:
        check_vocabulary(config.encoder.weights, tokenizer)
    detector = build_detector(config, tell_start)
    encoder = build_encoder(config, vocab_size=vocab_size, feature_dim=detector.feature_dim, tell_start=tell_start)
    sizes = Sizes(
        encoder.hidden_size, vocab_size, detector.feature_dim, detector.num_classes, summary_size=encoder.summary_size
    )
    task = build_task(config, sizes)
    for ability in task.needs:
        encoder.require(ability, f"The task {config.task.name}")
    if tokenizer is not None:
        task.initialise(tokenizer, encoder, detector)
    for weights in (config.task.fallback_weights, config.task.weights):
        if weights is not None:
            knows_order = are_given(config) or not task.chooses_answers
            report = load_task(task, weights, start_rules(config), knows_class_order=knows_order)
            tell_start("task", weights, report)
    rule = task.region_masking
    needs_copy = rule is not None and rule.enabled and rule.teacher == "frozen"
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
    encoder.require(Ability.INTERMEDIATE_STATES, "phrases.weight")
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
    try:
        detector_class = DETECTORS[config.detector.backend].cls
    except ImportError as error:  # Detectron2 is not installed
        raise UserError(str(error)) from error
    detector = detector_class(read_detector_config(config.detector))
    if config.detector.weights is not None:
        report = load_checkpoint(detector, config.detector.weights, expect=config.detector.expect)
        tell_start("detector", config.detector.weights, report)
    return detector


def start_rules(config: RunConfig) -> StartRules:
    """What says how the encoder and the task of the settings start from weights."""
    return StartRules(config.task.name, ADAPTERS.get(config.encoder.name, ()))


def build_encoder(
    config: RunConfig, *, vocab_size: int, feature_dim: int, tell_start: TellStart = log_start
) -> Encoder:
    model_class = ENCODERS[config.encoder.name].cls
    own = msgspec.structs.asdict(config.encoder.config)
    encoder = model_class(model_class.config_class(vocab_size=vocab_size, feature_dim=feature_dim, **own))
    for weights in (config.encoder.fallback_weights, config.encoder.weights):
        if weights is not None:
            tell_start("encoder", weights, load_encoder(encoder, weights, start_rules(config)))
    return encoder


def build_task(config: RunConfig, sizes: Sizes) -> Task:
    """The task with its head."""
    task_class, settings = TASKS[config.task.name].cls, config.task.config
    if task_class.chooses_answers:
        least = settings.min_answer_count
        answers = possible_answers(config, least)
        settings = msgspec.structs.replace(settings, answers=answers)
    if task_class.sums_objectives:
        task = task_class.build(sizes, settings, build_objectives(settings.objectives, sizes))
        if settings.choices is not None:
            # the task that words texts for this one, which uses nothing else of it but the size of its masks
            words_choices = TASKS[settings.choices.task].cls.build(sizes, settings.choices.config)
            task.choice_preprocessor = words_choices.preprocessor
            task.mask_size, task.mask_at = words_choices.mask_size, words_choices.mask_at
        return task
    return task_class.build(sizes, settings)


def build_objectives(settings: Mapping[str, Any], sizes: Sizes) -> dict[str, Objective]:
    """All objectives whose weight is not 0, in the order of `OBJECTIVES`; see `PretrainingConfig.objectives`."""
    return {
        name: OBJECTIVES[name].cls(sizes, with_answers(own))
        for name, own in PretrainingConfig(objectives=dict(settings)).objectives.items()
        if own.weight
    }


# The data of a run: from settings to texts, loaded images and batches.


def make_synthetic_data(config: RunConfig) -> None:
    """Draw the data set that `data.synthetic` describes into `data.root`, unless it is there already."""
    synthetic = config.data.synthetic
    if not synthetic.scenes:
        return
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
        config=synthetic.config.scene,
        language=synthetic.config.language,
        formats=synthetic.formats,
        workers=max(config.data.workers, os.cpu_count() or 1)
        if config.data.workers
        else 0,  # nothing else is at work yet
    )


def is_drawn(config: RunConfig) -> bool:
    """Whether the data set that `data.synthetic` describes is complete, so that nothing is left to draw."""
    stamp = user_path(config.data.root, "data.root") / STAMP
    if not stamp.is_file():
        return False
    formats = config.data.synthetic.formats
    present = read_json(stamp, dict[str, Any]).get("formats", FORMATS)
    if not isinstance(present, list | tuple) or not all(isinstance(name, str) for name in present):
        raise UserError(f"{stamp}: formats is not a list of names; remove the folder and draw the data again.")
    return set(FORMATS if formats is None else formats) <= set(present)


def build_tokenizer(config: RunConfig, *, writes: bool = True) -> PreTrainedTokenizerBase:
    """The named vocabulary, or one built from the training texts and kept with the run.

    Args:
        writes: this process builds the vocabulary; False: another one has built it for this run.
    """
    if config.data.vocabulary is not None:
        return load_tokenizer(config.data.vocabulary)
    path = Path(config.output) / "tokenizer" / "vocab.txt"
    if writes:
        build_vocabulary(training_texts(config), path)
    return load_tokenizer(path)


def training_texts(config: RunConfig) -> Iterable[str]:
    """All texts of the training split and what the task adds to them, to build a vocabulary from."""
    dataset = DATASETS[config.data.name].cls
    files, options = open_options(dataset, config.data)
    yield from dataset.texts_of(files, options, config.data.train_split)
    yield from TASKS[config.task.name].cls.own_words(config.task.config)


def build_examples(
    config: RunConfig,
    model: VisionLanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    split: str,
    *,
    boxes: BoxSource | str,
    training: bool = False,
    dataset: VLDataset | None = None,
) -> ExampleDataset:
    """One split, read, loaded and worded; training adds random resizing, mirroring and detection targets.

    Args:
        dataset: the split as `open_split` has read it already; None reads it.

    Raises:
        FileNotFoundError, ValueError: see `open_split`; or a task scores classes that are not the detector's.
    """
    boxes = BoxSource(boxes)
    if dataset is None:
        dataset = open_split(config, split, boxes, training=training)
    if model.task.predicts_classes and not training:
        dataset.check_classes(model.detector.num_classes, model.detector.class_names)
    preprocessor = model.task.preprocessor(build_text_tokenizer(config, model, tokenizer, training=training))
    loader = build_loader(config, model, dataset, boxes, training=training)
    loader.require_images(dataset.image_ids(), split)
    return ExampleDataset(
        dataset, loader, preprocessor, seed=config.seed, skip_broken=config.data.skip_broken and training
    )


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
) -> VLDataset:
    """The facts of one split, read from its files.

    Raises:
        ValueError: precomputed features for a detector that needs pixels, or the other way round; boxes or a file that
            the data set does not know; and see the data set.
    """
    if (boxes is BoxSource.PRECOMPUTED) != (config.detector.backend == "precomputed"):
        raise UserError(
            f"The box source is {boxes} and detector.backend is {config.detector.backend}: precomputed features need "
            "both to be precomputed (data.boxes.train, eval.boxes and detector.backend)."
        )
    if boxes is BoxSource.ONLINE and config.data.boxes.unread_by_predicted_boxes is not None:
        logger.warning("%s.", config.data.boxes.unread_by_predicted_boxes)
    kind = DATASETS[config.data.name].cls
    check_boxes_source(kind, config.data.name, boxes)
    wants = wants_of(config, boxes, training=training)
    files, options = open_options(kind, config.data)
    sources = [key for key in kind.annotation_files if key in kind.known_files]
    if wants.annotations and sources and not any(key in files for key in sources):
        wanted = "the targets of the detection losses" if wants.objects else f"boxes '{boxes}'"
        keys = " or ".join(f"data.files.{key}" for key in sources)
        raise UserError(f"{wanted} come from annotated objects; give an instances file as {keys}.")
    return kind(files, options, split, wants)


def build_text_tokenizer(
    config: RunConfig, model: VisionLanguageModel, tokenizer: PreTrainedTokenizerBase, *, training: bool = False
) -> TextTokenizer:
    """What puts texts into the layout of the model's encoder."""
    data = config.data
    marks = model.phrase_head is not None
    return TextTokenizer(tokenizer, model.encoder.layout, data.max_text_length, data.blank_text, training, marks)


def build_loader(
    config: RunConfig,
    model: VisionLanguageModel,
    dataset: VLDataset | None,
    boxes: BoxSource,
    *,
    training: bool = False,
) -> ImageLoader:
    """The rules for images of a run, with its files of boxes; in evaluation nothing is random.

    Args:
        dataset: whose files of boxes are opened; None: boxes come with each sample, or the detector finds them.
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
    reader = None if dataset is None else open_boxes_of(dataset, data, boxes)
    return ImageLoader(rules, boxes, reader)


def build_collate(config: RunConfig, model: VisionLanguageModel) -> Callable[..., Batch]:
    """Examples -> batch, with the colour statistics of the model's detector and the canvas of the data settings."""
    settings = model.detector.config.input
    return partial(collate, pixel_mean=settings.pixel_mean, pixel_std=settings.pixel_std, canvas=config.data.canvas)


def warn_of_random_boxes(settings: DetectorSettings) -> None:
    """To be called where a detector's predicted boxes are evaluated."""
    if settings.proposes_at_random:
        logger.warning(
            "The detector's predicted boxes are random: it was neither trained (detector.loss_weight is 0, or it is frozen) "
            "nor loaded with an RPN (detector.weights), so accuracies with boxes 'online' mean nothing."
        )


# A run as a whole: model, tokenizer, data.


# by split, boxes, and whether it is for training
DataSets = dict[tuple[str, BoxSource, bool], VLDataset]


class Start(NamedTuple):
    """Weights that a part of the model started from."""

    part: str  # detector, encoder, task or phrases
    path: str
    report: LoadReport


@dataclasses.dataclass
class Run:
    """What a run is made of."""

    model: VisionLanguageModel
    tokenizer: PreTrainedTokenizerBase
    train_data: ExampleDataset
    collate: Callable[..., Batch]
    starts: list[Start] = dataclasses.field(default_factory=list)
    # by split and boxes
    eval_data: dict[tuple[str, BoxSource], ExampleDataset] = dataclasses.field(default_factory=dict)


def build_run(config: RunConfig, datasets: DataSets | None = None, *, writes: bool = True) -> Run:
    """Data (drawn first if the settings ask for it), tokenizer and model of settings as `resolve` returns them.

    A vocabulary and a list of answers that are built from the data are written into the run directory.

    Args:
        datasets: splits that have been read already, see `splits_of`.
        writes: this process writes these files; False: another one has written them.
    """
    make_synthetic_data(config)
    tokenizer = build_tokenizer(config, writes=writes)
    starts: list[Start] = []
    model = build_model(
        config,
        vocab_size=len(tokenizer),
        tokenizer=tokenizer,
        tell_start=lambda *start: starts.append(Start(*start)),
    )
    if writes and model.task.chooses_answers and not are_given(config):
        write_answers(Path(config.output) / ANSWERS_FILE, model.task.answers)
    [(split, source, _)] = [one for one in splits_of(config) if one[2]]
    read = (datasets or {}).get((split, source, True))
    examples = build_examples(config, model, tokenizer, split, boxes=source, training=True, dataset=read)
    if config.detector.loss_weight > 0:
        known = model.detector.class_names
        examples.dataset.check_classes(model.detector.num_classes, known)
        if known is None and examples.dataset.class_names is not None:
            model.detector.class_names = tuple(examples.dataset.class_names)
    model.task.check_data(examples.dataset, model.detector)
    if model.phrase_head is not None:
        check_phrases(config, examples)
    return Run(model, tokenizer, examples, build_collate(config, model), starts)


def check_phrases(config: RunConfig, examples: ExampleDataset) -> None:
    """Check once, before training, that there are phrases to learn from.

    Raises:
        ValueError: the data state none, or the task cannot take the texts of the data set that states them.
    """
    weight, dataset, takes_others = config.phrases.weight, examples.dataset, bool(examples.preprocessor.learns_from)
    if not dataset.has_phrases:
        remedy = ", or join data that do (data.name=joined, see docs/training.md)" if takes_others else ""
        raise UserError(
            f"phrases.weight is {weight}, but no text of {config.data.name} says what its phrases name; set it to 0"
            f"{remedy}."
        )
    if dataset.mixes_phrases and not takes_others:
        raise UserError(
            f"phrases.weight is {weight}, but the task {config.task.name} cannot take texts that have phrases and no "
            "target of its own, so its data cannot be joined with such texts; set it to 0 and leave them out."
        )


def build_eval_data(config: RunConfig, run: Run, datasets: DataSets | None = None) -> None:
    """Read all splits with all box sources that the settings evaluate, once per run; see `build_run`."""
    if BoxSource.ONLINE in config.eval.boxes:
        warn_of_random_boxes(config.detector)
    for split, boxes, training in splits_of(config):
        if not training:
            read = (datasets or {}).get((split, boxes, False))
            run.eval_data[split, boxes] = build_examples(
                config, run.model, run.tokenizer, split, boxes=boxes, dataset=read
            )


def splits_of(config: RunConfig) -> list[tuple[str, BoxSource, bool]]:
    """What a run reads: (split, boxes, whether it is for training)."""
    evaluated = [(split, boxes, False) for split in config.data.eval_splits for boxes in config.eval.boxes]
    return [(config.data.train_split, config.data.boxes.train, True), *evaluated]
