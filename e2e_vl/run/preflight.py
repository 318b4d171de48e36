"""What is looked at before a run begins, so that it does not stop half-way for something that could be known.

Nothing is drawn, fetched or written here; the hub is only asked whether it has what the settings name. The annotations
are read, because they name the images; the run goes on with what was read. Every finding is one sentence, and all
findings come at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from accelerate import init_empty_weights
from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError

from detector.errors import MissingFileError, UserError, first_line, user_path
from detector.weight_files import find_weights
from e2e_vl.config import BoxSource, DataSettings, RunConfig
from e2e_vl.data.base import VLDataset, open_options
from e2e_vl.data.storage.shared_reads import SharedReads
from e2e_vl.detector_yaml import read_detector_config
from e2e_vl.run import checkpoint as checkpoints
from e2e_vl.run.best import check_metric_name
from e2e_vl.run.build import (
    DataSets,
    answers_path,
    build_detector,
    build_encoder,
    is_drawn,
    named_parts,
    open_split,
    resolve,
    splits_of,
    wants_of,
)
from e2e_vl.run.trackers import check_trackers
from e2e_vl.synthetic import FORMATS
from e2e_vl.text import load_tokenizer, looks_like_hub_name
from e2e_vl.weights.start import find_part

# Whether names of models on the Hugging Face hub lead anywhere, before a run relies on them.


FILES = ("config.json", "tokenizer_config.json", "tokenizer.json", "vocab.txt")  # one of which a model has
PATIENCE = 10  # seconds


def is_on_hub(name: str) -> bool:
    """Whether a name of weights or of a vocabulary is to be looked up on the hub; nothing is asked there."""
    return not user_path(name).exists() and looks_like_hub_name(name)


def check_hub_name(name: str) -> None:
    """Ask the hub once for a model of this name, unless a part of it is in the local cache.

    Raises:
        FileNotFoundError: the hub has no such model, or is out of reach.
    """
    if any(isinstance(try_to_load_from_cache(name, file), str) for file in FILES):
        return
    try:
        get_hf_file_metadata(hf_hub_url(name, FILES[0]), timeout=PATIENCE)
    except EntryNotFoundError:
        return  # there is such a model, without this file
    except Exception as error:  # errors of the connection are of a library that depends on huggingface_hub's version
        raise MissingFileError(
            f"{name}: neither a local file or folder nor a model within reach on the hub ({first_line(error)}); check "
            "the name and the connection, or give a local file."
        ) from error


WORDPIECES = 1000  # of a vocabulary that is not known yet: too few, so that no run is refused for too little disk
VOCABULARY = "data.vocabulary"
# numbers that the optimiser keeps for each parameter
MOMENTS = {"adamw": 2, "adamw_official": 2, "bert_adam": 2, "sgd": 1}


@dataclasses.dataclass
class Preflight:
    """What is known once nothing was found."""

    config: RunConfig  # as `resolve` returns it
    datasets: DataSets = dataclasses.field(default_factory=dict)  # splits that have been read; empty before drawing
    shared: SharedReads = dataclasses.field(default_factory=SharedReads)  # what they have read
    resume_from: Path | None = None  # checkpoint


class Findings(list[str]):
    """Sentences about what stands in the way of a run."""

    @contextlib.contextmanager
    def noting(self, prefix: str = "") -> Iterator[None]:
        """An error about settings, data or files becomes a finding, and the looking goes on."""
        try:
            yield
        except (ValueError, OSError) as error:
            self.append(f"{prefix}{error}")

    def refuse(self) -> None:
        """Raises ValueError with all findings, each once, if there are any."""
        sentences = list(dict.fromkeys(self))
        if len(sentences) == 1:
            raise UserError(sentences[0])
        if sentences:
            lines = "".join(f"\n  {number}. {sentence}" for number, sentence in enumerate(sentences, start=1))
            raise UserError(f"the run cannot begin, for {len(sentences)} reasons:{lines}")


def look_ahead(config: RunConfig, processes: int, *, resume: bool = False, looks_at_output: bool = True) -> Preflight:
    """Look at everything that a run of these settings needs.

    Args:
        processes: number of processes that train together.
        resume: the run goes on from its newest checkpoint.
        looks_at_output: look into the run directory, too; of several processes one does, and checks the checkpoints.

    Raises:
        ValueError: there are findings.
    """
    found = Findings()
    known = Preflight(config)
    with found.noting():
        read_detector_config(config.detector)
    with found.noting():
        known.config = config = resolve(config)
    output = Path(config.output)
    with found.noting():
        if resume and looks_at_output:
            known.resume_from = checkpoints.find_resumable(output, config, processes)
        if known.resume_from is None and looks_at_output:
            checkpoints.refuse_to_overwrite(output)
    with found.noting():
        _check_batch(config, processes)
    with found.noting():
        check_trackers(config.train.trackers)
    with found.noting():
        if config.train.keep_best is not None:
            check_metric_name(config.train.keep_best, config.data.eval_splits, [*map(BoxSource, config.eval.boxes)])
    _find_weights(config, found)
    vocab_size = WORDPIECES
    name = config.data.vocabulary
    with found.noting(f"{VOCABULARY}: "):
        if name is not None and not is_on_hub(name):
            vocab_size = len(load_tokenizer(name))
    with found.noting():
        if looks_at_output:
            _check_disk(config, vocab_size, resumes=known.resume_from is not None)
    known.datasets = _read_data(config, found, known.shared, resume=resume)
    _ask_hub(config, found)
    found.refuse()
    return known


def _check_batch(config: RunConfig, processes: int) -> None:
    settings = config.train
    if settings.images_per_batch % (settings.accumulate * processes):
        raise UserError(
            f"train.images_per_batch is {settings.images_per_batch}; it must be a multiple of train.accumulate "
            f"({settings.accumulate}) x the number of processes ({processes})."
        )


def _find_weights(config: RunConfig, found: Findings) -> None:
    """Look for the files of all starting weights that are not on the hub."""
    if config.detector.weights is not None:
        with found.noting("detector.weights: "):
            find_weights(config.detector.weights)
    for setting, name in _named_models(config).items():
        with found.noting(f"{setting}: "):
            if setting != VOCABULARY and not is_on_hub(name):
                find_part(name, setting.partition(".")[0])


def _ask_hub(config: RunConfig, found: Findings) -> None:
    """Look for weights and the vocabulary that can only be on the hub."""
    for setting, name in _named_models(config).items():
        with found.noting(f"{setting}: "):
            if is_on_hub(name):
                check_hub_name(name)


def _named_models(config: RunConfig) -> dict[str, str]:
    """Settings that may name a model of the hub, where they are set."""
    named = {
        "encoder.weights": config.encoder.weights,
        "encoder.fallback_weights": config.encoder.fallback_weights,
        "task.weights": config.task.weights,
        "task.fallback_weights": config.task.fallback_weights,
        "phrases.weights": config.phrases.weights,
        VOCABULARY: config.data.vocabulary,
    }
    return {setting: name for setting, name in named.items() if name is not None}


# Disk


def _check_disk(config: RunConfig, vocab_size: int, *, resumes: bool) -> None:
    """Compare the free disk space with what the checkpoints of the detector and the encoder will take."""
    output, keep = Path(config.output), config.train.keep_checkpoints
    place = next(folder for folder in (output.absolute(), *output.absolute().parents) if folder.is_dir())
    model, checkpoint = _sizes(config, vocab_size)
    # the oldest checkpoint goes after the newest is there
    number = keep + 1 if config.train.save_every_epochs > 0 else 1
    if resumes:
        number = max(number - len(checkpoints.complete_checkpoints(output)), 1)
    needed = number * checkpoint + model * (2 if config.train.keep_best is not None else 1)
    free = shutil.disk_usage(place).free
    if free < needed:
        raise UserError(
            f"{output}: the disk has {_in_words(free)} left, and the checkpoints of this run (up to {number} at a "
            f"time) and its models take at least {_in_words(needed)}; make room, choose another `output`, or lower "
            f"train.keep_checkpoints ({keep})."
        )


def _sizes(config: RunConfig, vocab_size: int) -> tuple[int, int]:
    """Bytes of the saved model and of a checkpoint, of which the head of the task is left out."""
    if config.detector.backend == "detectron2":  # moves parameters while it builds a model, which needs their memory
        return 0, 0
    config = dataclasses.replace(
        config,
        detector=dataclasses.replace(config.detector, weights=None),
        encoder=dataclasses.replace(config.encoder, weights=None, fallback_weights=None),
    )
    with init_empty_weights():  # shapes without memory
        detector = build_detector(config)
        encoder = build_encoder(config, vocab_size=vocab_size, feature_dim=detector.feature_dim)
    counts = [sum(one.numel() for one in part.parameters()) for part in (detector, encoder)]
    trained = counts[1] if config.detector.freeze else sum(counts)
    model = 4 * sum(counts)  # float32
    return model, 2 * model + 4 * MOMENTS[config.train.optimizer] * trained  # the model, and the state to go on from


def _in_words(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


# Data


def _read_data(config: RunConfig, found: Findings, shared: SharedReads, *, resume: bool) -> DataSets:
    """Read all splits if their files are there, and look for their images.

    A run that goes on is not held up by images of its evaluation, which counts what it cannot read.
    """
    will_be_drawn = False
    before = len(found)
    with found.noting():
        will_be_drawn = bool(config.data.synthetic.scenes) and not is_drawn(config)
        kind = named_parts(config).dataset
        find_files(config, kind, found, will_be_drawn)
    if will_be_drawn or len(found) > before:
        return {}
    datasets: DataSets = {}
    looked_at = set()
    for split, boxes, training in splits_of(config):
        with found.noting():
            dataset = open_split(config, split, boxes, training=training, shared=shared)
            datasets[split, boxes, training] = dataset
            may_miss_images = config.data.skip_broken or (resume and not training)
            needs_images = boxes is not BoxSource.PRECOMPUTED and not may_miss_images
            if needs_images and split not in looked_at:
                looked_at.add(split)
                _find_images(dataset, split, config.data.check_images)
    return datasets


def find_files(config: RunConfig, kind: type[VLDataset], found: Findings, will_be_drawn: bool) -> None:
    """Look for the files of `data.files`; those that will be drawn need not be there yet."""
    root = user_path(config.data.root, "data.root")
    files, options = open_options(kind, config.data)
    if not root.is_dir() and not will_be_drawn:
        raise MissingFileError(f"data.root is {config.data.root}, and there is no such folder; set it to your data.")
    answers = answers_path(config)
    if answers is not None and not answers.is_file() and not will_be_drawn:
        found.append(f"{answers}: cannot read the answers, there is no such file; check the path in the settings.")
    for split, boxes, training in splits_of(config):
        wants = wants_of(config, boxes, training=training)
        for key in (key for key in kind.reads(options, split, wants) if key in files):
            for part in split.split("+"):  # joined splits
                name = files.name(key, split=part)
                is_drawn_later = will_be_drawn and name.partition("/")[0] in ("images", *FORMATS)
                # other placeholders are known only when the file that says them is read
                if "{" not in name and not is_drawn_later and not (root / name).exists():
                    found.append(_not_there(key, root / name, config.data))


def _not_there(key: str, path: Path, settings: DataSettings) -> str:
    kind = "file" if path.suffix else "file or folder"
    return (
        f"{path}: cannot read the {key}, there is no such {kind}; check data.root ({settings.root}) and "
        f"data.files.{key} ({settings.files[key]})."
    )


def _find_images(dataset: VLDataset, split: str, number: int | None) -> None:
    """Look for the image files of `number` groups of texts, evenly spread over the split; None = of all groups.

    Raises:
        FileNotFoundError: images are missing; the first one is named, and the others are counted.
        ValueError: the annotations of an image cannot be used.
    """
    groups = dataset.groups
    number = len(groups) if number is None else min(number, len(groups))
    missing: list[str] = []
    for step in range(number):
        texts: Sequence[int] = groups[step * len(groups) // number]
        for image in dataset.sample(texts[:1]).images if len(texts) else ():
            try:
                place = image.locate()
            except OSError as error:  # of an archive
                missing.append(str(error))
                continue
            if isinstance(place, Path) and not place.is_file():
                missing.append(f"{place}: the file of image {image.id} is missing; check the image folder's path")
    if missing:
        more = f" ({len(missing)} of {number} images of the split {split} are missing)" if len(missing) > 1 else ""
        raise MissingFileError(f"{missing[0]}{more}")
