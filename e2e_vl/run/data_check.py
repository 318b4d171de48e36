"""Reads the annotations of a run without training: all problems, sizes, and photos that several data sets share.

The readers of the data sets do the work; told to note errors (`NotedErrors`), they leave a malformed record out and
read on. What is wrong with a file as a whole (no JSON, other questions than annotations) ends the reading of this file;
the other files and splits are read all the same. Nothing is written, no image is opened.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from detector.errors import MissingFileError, UserError, user_path
from e2e_vl.config import BoxSource, DataSettings, RunConfig
from e2e_vl.data.base import VLDataset, Wants, check_boxes_source, open_options
from e2e_vl.data.image_loader import open_boxes_of
from e2e_vl.data.overlap import PhotoId, PhotoIds, number_of_photos
from e2e_vl.data.storage.record_errors import NotedErrors
from e2e_vl.data.storage.shared_reads import SharedReads, collection_paused
from e2e_vl.parts import DATASETS, ENCODERS, TASKS
from e2e_vl.run.build import (
    answers_path,
    is_drawn,
    open_split,
    possible_answers,
    splits_of,
    wants_of,
)
from e2e_vl.run.split_walk import FolderLists, SplitFacts, SplitWalk, TextLengths, WalkRules
from e2e_vl.samples import SampleImage
from e2e_vl.synthetic import FORMATS
from e2e_vl.text import load_tokenizer

_VALUES = re.compile(r"'[^']*'|\"[^\"]*\"|\[[^\]]*\]|\d[\d.]*(?:-\d+)*")


@dataclasses.dataclass(frozen=True)
class Overlap:
    """Photos of an evaluated split that occur elsewhere."""

    split: str
    elsewhere: str
    number: int
    of: int  # photos of the split
    examples: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class DataReport:
    """What a check has found.

    Attributes:
        problems: sentences that each name a file and mostly a record; see `alike`.
    """

    splits: list[SplitFacts]
    overlaps: list[Overlap]
    problems: list[str]
    counts_words: bool  # lengths are in words: the vocabulary is not known yet

    def alike(self) -> list[list[str]]:
        """The problems, those together that differ in ids, values and numbers only."""
        kinds: dict[str, list[str]] = {}
        for sentence in self.problems:
            kinds.setdefault(_VALUES.sub("#", sentence), []).append(sentence)
        return list(kinds.values())


def check_data(
    config: RunConfig,
    *,
    others: Sequence[tuple[str, RunConfig]] = (),
    photo_ids: PhotoIds | None = None,
    detector_photos: set[PhotoId] | None = None,
    max_images: int | None = None,
    processes: int | None = None,
) -> DataReport:
    """Read all splits that the settings train on and evaluate.

    Args:
        others: (name, settings) of runs whose training splits the evaluated splits are compared with.
        photo_ids: finds photos again in other data sets.
        detector_photos: what the detector was trained on.
        max_images: look at this many images of each split, evenly spread; None = all.
        processes: at most this many look at the records of a large split; None = as `forked_work.affordable` says.

    Raises:
        ValueError: drawn data that are not drawn yet.
        ChildProcessError: one of the processes has died.
    """
    with collection_paused():  # what is made in millions stays until the end
        return _Check(config, photo_ids or PhotoIds(), max_images, processes).run(others, detector_photos)


class _Check:
    def __init__(self, config: RunConfig, photo_ids: PhotoIds, max_images: int | None, processes: int | None) -> None:
        self.config, self.photo_ids, self.max_images, self.processes = config, photo_ids, max_images, processes
        self.errors = NotedErrors()
        self.shared = SharedReads()  # what the splits have read
        self.files = FolderLists()
        self.dataset = DATASETS[config.data.name].cls
        self.tokenizer: PreTrainedTokenizerBase | None = None
        self.answers: set[str] | None = None
        self.known: dict[str, bool] = {}  # annotated answers, as written, that have been looked up
        self.not_there: tuple[str, ...] = ()  # beginnings of sentences about files that are known to be missing

    def run(self, others: Sequence[tuple[str, RunConfig]], detector_photos: set[PhotoId] | None) -> DataReport:
        _require_drawn(self.config)
        found = Findings()
        with found.noting():
            find_files(self.config, self.dataset, found, will_be_drawn=False)
        for sentence in found:
            self.errors.note(sentence)
        self.not_there = tuple(sentence.partition(": ")[0] for sentence in found)
        if self.config.data.vocabulary is not None:
            with self.errors:
                self.tokenizer = load_tokenizer(self.config.data.vocabulary)
        with self.errors:
            self.answers = self._known_answers()
        facts, photos = [], {}
        for split, sources, is_trained in _each_split(self.config):
            facts.append(SplitFacts(split, is_trained))
            photos[split] = self._read(facts[-1], sources)
        places: dict[str, set[PhotoId]] = {}
        train = self.config.data.train_split
        own = f"the training split {train}"
        places[own] = _joined(photos[train])
        for name, other in others:
            places[f"the training split {other.data.train_split} of {name}"] = self._photos_of(name, other)
        if detector_photos is not None:
            places["the training images of the detector"] = detector_photos
        overlaps = [
            overlap
            for split in dict.fromkeys(self.config.data.eval_splits)
            for place, known in places.items()
            if (split, place) != (train, own) and (overlap := _overlap(split, photos[split], place, known))
        ]
        problems = [sentence for sentence in self.errors.sentences if not self._is_repeated(sentence, found)]
        return DataReport(facts, overlaps, problems, counts_words=self.tokenizer is None)

    def _is_repeated(self, sentence: str, found: Sequence[str]) -> bool:
        """A reader says again that a file is missing."""
        is_about_file = "there is no such file" in sentence and sentence not in found
        return is_about_file and sentence.partition(": ")[0] in self.not_there

    def _known_answers(self) -> set[str] | None:
        if not TASKS[self.config.task.name].cls.chooses_answers:
            return None
        least = self.config.task.config.min_answer_count
        return set(possible_answers(self.config, least, self.errors, self.shared))

    # One split

    def _read(self, facts: SplitFacts, sources: Sequence[BoxSource]) -> dict[str, tuple[PhotoId, ...]]:
        """Fill in the facts; returns the ids of the photos by image id."""
        main = next((one for one in sources if one.reads_annotations), sources[0])
        photos: dict[str, tuple[PhotoId, ...]] = {}
        with self.errors.about(f"the split {facts.split}"):
            for boxes in sources:
                check_boxes_source(self.dataset, self.config.data.name, boxes)
            dataset = open_split(
                self.config, facts.split, main, training=facts.is_trained, errors=self.errors, shared=self.shared
            )
            walk = SplitWalk(dataset, self._rules(facts), facts, photos, self.errors)
            walk.run(self.max_images, self.processes)
            for boxes in sources:
                with self.errors:
                    reader = open_boxes_of(dataset, self.config.data, boxes, self.errors, self.shared)
                    if reader is not None:
                        reader.require_images(dataset.image_ids(), facts.split)
        return photos

    def _rules(self, facts: SplitFacts) -> WalkRules:
        data, layout = self.config.data, ENCODERS[self.config.encoder.name].cls.layout
        alone = (layout.question if TASKS[self.config.task.name].cls.chooses_answers else layout.single).num_special
        return WalkRules(
            lengths=TextLengths(self.tokenizer, data.max_text_length, facts.split),
            extras=(alone, layout.pair.num_special),
            files=None if self.config.detector.backend == "precomputed" else self.files,
            ids=partial(self._ids, self.config),
            answers=None if self.answers is None else len(self.answers),
            is_known=self._is_known,
            skips_missing=facts.is_trained and data.skip_broken,
        )

    def _is_known(self, answer: str) -> bool:
        """Whether an answer is in the list; the same answers come again and again."""
        if answer not in self.known:
            self.known[answer] = TASKS[self.config.task.name].cls.spell_answer(answer) in self.answers
        return self.known[answer]

    # Photos

    def _ids(self, config: RunConfig, dataset: VLDataset, image: SampleImage) -> tuple[PhotoId, ...]:
        if config.data.synthetic.scenes:  # drawn scenes have names of COCO, but are no photos
            return (PhotoId(f"drawn in {config.data.root}", image.id),)
        file = image.file if isinstance(image.file, Path) else None
        return self.photo_ids.of_image(image.id, file, dataset.id_space, image.photo_aliases)

    def _photos_of(self, name: str, config: RunConfig) -> set[PhotoId]:
        """The photos that another run is trained on."""
        found: set[PhotoId] = set()
        errors = NotedErrors()  # records of the other run are its own business
        kind = DATASETS[config.data.name].cls
        with self.errors.about(f"--with {name}"):
            _require_drawn(config)
            boxes = BoxSource.ONLINE if BoxSource.ONLINE in kind.box_sources else kind.box_sources[0]
            # what only the other run reads need not stay
            files, options = open_options(kind, config.data, errors, self.shared.copy())
            dataset = kind.open(files, options, config.data.train_split, Wants(boxes))
            for texts in dataset.groups:
                with errors:
                    for image in dataset.sample(texts[:1]).images:
                        found.update(self._ids(config, dataset, image))
        return found


def _require_drawn(config: RunConfig) -> None:
    if config.data.synthetic.scenes and not is_drawn(config):
        raise UserError(
            f"{config.data.root}: the scenes of this config are not drawn yet; a run draws them, or e2e-vl synthesize."
        )


def _each_split(config: RunConfig) -> Iterator[tuple[str, list[BoxSource], bool]]:
    """(split, box sources, whether it is trained on); a split that is trained on comes first and once."""
    found: dict[str, tuple[list[BoxSource], bool]] = {}
    for split, boxes, training in splits_of(config):
        sources, is_trained = found.get(split, ([], False))
        found[split] = ([*sources, *([] if boxes in sources else [boxes])], is_trained or training)
    yield from ((split, *facts) for split, facts in found.items())


def _joined(photos: dict[str, tuple[PhotoId, ...]]) -> set[PhotoId]:
    return {one for ids in photos.values() for one in ids}


def _overlap(split: str, photos: dict[str, tuple[PhotoId, ...]], place: str, known: set[PhotoId]) -> Overlap | None:
    """None if no photo of the split is known there."""
    common = [name for name, ids in photos.items() if not known.isdisjoint(ids)]
    if not common:
        return None
    number, of = (number_of_photos(photos[name] for name in names) for names in (common, photos))
    return Overlap(split, place, number, of, tuple(common[:3]))


class Findings(list[str]):
    """Sentences about what stands in the way of a run."""

    @contextlib.contextmanager
    def noting(self, prefix: str = "") -> Iterator[None]:
        """An error about settings, data or files becomes a finding, and the looking goes on."""
        try:
            yield
        except (ValueError, OSError) as error:
            self.append(f"{prefix}{error}")


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
