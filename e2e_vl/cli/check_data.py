"""Check the files of a run before training: what is missing, problems, sizes, and images shared with other data sets.

    e2e-vl check-data --config configs/refcoco/vl_bert_base.yaml data.root=DATA
    e2e-vl check-data --config configs/refcoco/vl_bert_base.yaml data.root=DATA \\
        --with configs/pretraining/vl_bert_base_e2e.yaml \\
        --visual-genome image_data.json --detector-images VG_train.txt

Reads all samples of the training and evaluation splits as training does, except that images are not decoded (only
their sizes are read, and none in archives) and that files of region features are read for a sample of the images.
Prints the first problems, which training would stop at, and counts images, missing image files, boxes, texts, texts
longer than data.max_text_length or than the encoder can read, and texts without a known answer. It also says which
tokenizer and weights are missing; those by name are downloaded into their caches, as training does, if there is a
network.
Reports images of the evaluation splits that are also in the training split, in the training splits of other configs
(--with) or among the training images of the detector (--detector-images). Images are identified by COCO ids in file
names and by Visual Genome ids; --visual-genome maps the latter to COCO ids.

The exit status is 1 if there are problems, and with --no-overlap if images are shared.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from detector.errors import MissingFileError
from detector.image_files import read_size
from detector.io import write_json
from e2e_vl.cli.main import make_parser, parse_with_settings, print_errors
from e2e_vl.config import BoxSource, RunConfig
from e2e_vl.config_files import load_config
from e2e_vl.data.base import VLDataset
from e2e_vl.data.box_checks import reach_outside
from e2e_vl.data.overlap import GlobalImageId, ImageIdLookup, count_distinct_images, read_visual_genome
from e2e_vl.registry import ENCODERS, TASKS
from e2e_vl.samples import (
    AnnotatedObjects,
    CategorisedObjects,
    ChoiceText,
    CorrectAnswer,
    HumanAnswers,
    ImageKey,
    Sample,
    SampleImage,
    SampleText,
    ScoredAnswers,
    Sentence,
)

if TYPE_CHECKING:  # these modules import torch
    from e2e_vl.data.batching import EncodedDataset
    from e2e_vl.data.image_loader import ImageLoader
    from e2e_vl.run.build import RunWithoutWeights
    from e2e_vl.transforms import LoadedImage

MAX_WHOLE_SAMPLES = 300  # of a split, whose region features are read and whose texts are encoded as in training


@dataclasses.dataclass
class SplitReport:
    """Sizes and problems of a split."""

    split: str
    texts: int = 0
    images: int = 0
    distinct_images: int = 0  # in joined data sets an image may have two ids
    missing_images: int = 0
    unreadable_images: int = 0  # image files that are damaged or of another format
    too_long: int = 0  # texts truncated to data.max_text_length, or too long for the encoder
    boxes: int = 0  # annotated boxes
    boxes_outside: int = 0  # boxes that exceed their image by more than a pixel
    texts_without_known_answer: int = 0  # texts with no annotated answer in the answer vocabulary
    problems: list[str] = dataclasses.field(default_factory=list)
    shared: list[str] = dataclasses.field(default_factory=list)  # sentences about images shared with other data

    def lines(self, examples: int) -> list[str]:
        """Return the lines that the command prints, with the first `examples` problems."""
        if self.images == 0 and self.problems:
            lines = [f"{self.split}: could not be read"]
        else:
            lines = [
                f"{self.split}: {self.images:,} images ({self.distinct_images:,} distinct), {self.missing_images:,} "
                f"files missing, {self.unreadable_images:,} unreadable; {self.boxes:,} boxes, {self.boxes_outside:,} "
                "of them reach outside their image",
                f"  {self.texts:,} texts; {self.too_long:,} are too long, {self.texts_without_known_answer:,} have no "
                "answer in the vocabulary",
            ]
        lines += [f"SHARED: {sentence}" for sentence in self.shared]
        lines += [f"PROBLEM: {sentence}" for sentence in self.problems[:examples]]
        hidden = len(self.problems) - examples
        if hidden > 0:
            lines.append(f"  ... and {hidden:,} more problems")
        return lines


@print_errors
def main(argv: list[str] | None = None, prog: str | None = None) -> int:
    file = {"type": Path, "metavar": "FILE"}
    files = file | {"action": "append", "default": []}
    lists = "training images of the detector: COCO's JSON, image_data.json, or a list of paths or ids (repeatable)"
    parser = make_parser(__doc__, prog)
    parser.add_argument("--config", type=Path, required=True, help="YAML file of the run")
    other = "YAML file of another run to compare with, by default in the same data.root (repeatable)"
    parser.add_argument("--with", dest="others", **files, help=other)
    parser.add_argument("--detector-images", **files, help=lists)
    parser.add_argument("--detector-ids", choices=("coco", "vg"), help="source of these ids, if names do not show it")
    parser.add_argument("--visual-genome", **file, help="Visual Genome's image_data.json, with COCO's ids")
    parser.add_argument("--images", type=int, metavar="N", help="read N images of each split (default: all)")
    parser.add_argument("--examples", type=int, default=10, metavar="N", help="problems shown per split (default: 10)")
    parser.add_argument("--no-overlap", action="store_true", help="exit with status 1 if images are shared")
    parser.add_argument("--json", **file, help="file for the full report, with all problems")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that override the file")
    args = parse_with_settings(parser, argv)
    config = load_config(args.config, [*args.overrides, "output=unused"])
    same_root = [f"data.root={json.dumps(config.data.root)}"]  # unless the other file says where its data are
    others = {str(path): load_config(path, ["output=unused"], same_root) for path in args.others}
    genome = None if args.visual_genome is None else read_visual_genome(args.visual_genome)
    id_lookup = ImageIdLookup(genome)
    detector_ids: set[GlobalImageId] = set()
    for path in args.detector_images:
        for ids in id_lookup.of_list(path, args.detector_ids):
            detector_ids.update(ids)
    missing_weights = list_missing_weights(config)
    for problem in missing_weights:
        print(f"PROBLEM: {problem}")
    reports = check_data(config, others, id_lookup, detector_ids, args.images)
    for report in reports:
        print("\n".join(report.lines(args.examples)))
    has_problems = bool(missing_weights) or any(report.problems for report in reports)
    if not has_problems:
        print("no problem found")
    if args.json is not None:
        splits = [dataclasses.asdict(report) for report in reports]
        write_json(args.json, {"missing_weights": missing_weights, "splits": splits})
    return int(has_problems or (args.no_overlap and any(report.shared for report in reports)))


def list_missing_weights(config: RunConfig) -> list[str]:
    """Return a sentence for each of the weights that the run starts from and that is missing."""
    from e2e_vl.run.build import find_missing_weights  # late: imports torch

    return list(dict.fromkeys(str(error) for error in find_missing_weights(config)))


def check_data(
    config: RunConfig,
    others: dict[str, RunConfig],
    id_lookup: ImageIdLookup,
    detector_ids: set[GlobalImageId],
    max_images: int | None = None,
) -> list[SplitReport]:
    """Read all splits that a run trains on and evaluates.

    Args:
        others: configs of other runs, by name; the evaluation splits are compared with their training splits.
        detector_ids: of the detector's training images.
        max_images: read this many evenly spaced images of each split; None: all.
    """
    from e2e_vl.run.build import RunWithoutWeights, build_run_without_weights  # late: imports torch

    train_split = config.data.train_split
    box_sources = {train_split: [BoxSource(config.data.boxes.train)]}
    for split in config.data.eval_splits:
        sources = [*box_sources.get(split, []), *map(BoxSource, config.eval.boxes)]
        box_sources[split] = list(dict.fromkeys(sources))
    run = build_run_without_weights(config)
    readers: dict[str, SplitReader] = {}
    class_names = None
    for split, sources in box_sources.items():
        readers[split] = SplitReader(config, split, sources, id_lookup, max_images, run, class_names)
        class_names = readers[train_split].learned_class_names

    trained_ids = {"the detector's training images": detector_ids}
    for name, other in others.items():
        split = other.data.train_split
        sources = [BoxSource(other.data.boxes.train)]
        only_data = RunWithoutWeights(other, model=None, tokenizer=None)  # only its images are compared
        reader = SplitReader(other, split, sources, id_lookup, max_images, only_data)
        trained_ids[f"the training split {split} of {name}"] = reader.all_global_ids()
        if not reader.global_ids:
            reasons = " ".join(reader.report.problems)
            readers[train_split].report.problems.append(f"{name} cannot be compared: {reasons}")
    train_ids = {f"the training split {train_split}": readers[train_split].all_global_ids()}
    for split in config.data.eval_splits:
        compared = trained_ids if split == train_split else train_ids | trained_ids
        readers[split].report_shared_images(compared)
    return [reader.report for reader in readers.values()]


class SplitReader:
    """Opens a split with the sources of candidate boxes that the run uses, and makes examples of it as training does.

    Images are not decoded; only the headers of image files are read. Region features, which are large, are read and
    texts are encoded for `MAX_WHOLE_SAMPLES` evenly spaced images; of the other texts, the length is checked.
    """

    def __init__(
        self,
        config: RunConfig,
        split: str,
        sources: Sequence[BoxSource],
        id_lookup: ImageIdLookup,
        max_images: int | None,
        run: RunWithoutWeights,
        class_names: Sequence[str] | None = None,
    ) -> None:
        """Read a split.

        Args:
            class_names: the classes that the detector learns from the training split; None: it learns none.
        """
        from e2e_vl.run.build import open_split  # late: imports torch and transformers

        self.config = run.config
        self.model = run.model
        self.tokenizer = run.tokenizer
        self.id_lookup = id_lookup
        self.is_training = split == config.data.train_split
        self.report = SplitReport(split)
        self.global_ids: dict[ImageKey, tuple[GlobalImageId, ...]] = {}  # of each image
        self.sizes: dict[ImageKey, tuple[int, int] | None] = {}  # (height, width) of each image's file; None: unknown
        self.task = TASKS[config.task.name].cls
        self.answers: set[str] | None = None  # None: the task chooses from no list, or the list cannot be read
        if self.task.vocabulary_class is not None and self.model is not None:
            self.answers = set(self.model.task.answer_vocabulary.answers)
        self.loaders: list[ImageLoader] = []  # one for each source of boxes
        self.class_names = class_names
        self.learned_class_names: Sequence[str] | None = None  # by a detector that trains on this split
        self.examples: EncodedDataset | None = None  # encodes texts; None: it cannot be built
        self.text_limit: int | None = None  # wordpieces, with special tokens; None: no limit
        self._listed: set[str] = set()  # the problems of the report
        try:
            main_source = next((source for source in sources if source.reads_annotations), sources[0])
            dataset = open_split(self.config, split, main_source, training=self.is_training)
            if self.model is not None:
                self._open_boxes(dataset, sources)
            if self.examples is not None:
                self._check_dataset(dataset)
            self._read(dataset, max_images)
        except (ValueError, OSError) as error:
            self._add_problem(f"{split}: {error}")
        if self.is_training:
            for problem in run.problems:
                if not any(problem in listed for listed in self.report.problems):
                    self._add_problem(problem)
        self.report.images = len(self.global_ids)
        self.report.distinct_images = count_distinct_images(self.global_ids.values())

    def all_global_ids(self) -> set[GlobalImageId]:
        """Return the global ids of all images that were read."""
        return set(itertools.chain.from_iterable(self.global_ids.values()))

    def report_shared_images(self, trained_ids: Mapping[str, set[GlobalImageId]]) -> None:
        """Add a sentence to the report for every training set that has images of this split.

        Args:
            trained_ids: the global ids of the images of each training set, by what the sentence calls it.
        """
        for training_set, ids in trained_ids.items():
            shared = {key: own_ids for key, own_ids in self.global_ids.items() if not ids.isdisjoint(own_ids)}
            if shared:
                examples = ", ".join(key.id for key in list(shared)[:3])
                self.report.shared.append(
                    f"{count_distinct_images(shared.values()):,} of {self.report.distinct_images:,} images of "
                    f"{self.report.split} are in {training_set} (such as {examples})"
                )

    def _add_problem(self, problem: str) -> None:
        """Add a problem that several texts or sources of boxes may have, once."""
        if problem not in self._listed:
            self._listed.add(problem)
            self.report.problems.append(problem)

    def _check_dataset(self, dataset: VLDataset) -> None:
        """Check what a run checks before its first step."""
        from e2e_vl.run.build import check_training_data

        settings = self.config.detector
        class_names = self.class_names
        if settings.loads_classes:  # the weights, which are not loaded, may name them
            class_names = dataset.class_names
        try:
            if self.is_training:
                check_training_data(self.config, self.model, self.examples, class_names)
                if settings.loss_weight > 0:
                    self.learned_class_names = dataset.class_names
            elif self.task.predicts_classes:
                dataset.check_classes(self.model.detector.num_classes, class_names)
        except (ValueError, OSError) as error:
            self._add_problem(f"{self.report.split}: {error}")

    def _open_boxes(self, dataset: VLDataset, sources: Sequence[BoxSource]) -> None:
        """Open the files of boxes, and prepare the encoding of texts."""
        from e2e_vl.data.image_loader import ImageLoader
        from e2e_vl.run.build import build_loader, make_examples

        config = self.config
        split = self.report.split
        for source in sources:
            try:
                loader = build_loader(config, self.model, dataset, source, training=self.is_training)
                loader.require_images(dataset.image_keys(), split)
            except (ValueError, OSError) as error:
                self._add_problem(f"{split}: {error}")
                continue
            # instance masks take long, and no image is refused for them
            rules = dataclasses.replace(loader.rules, mask_size=None)
            self.loaders.append(ImageLoader(rules, source, loader.box_reader))
        if self.tokenizer is not None:
            loader = build_loader(config, self.model, None, BoxSource.ONLINE)
            self.examples = make_examples(
                config, self.model, self.tokenizer, dataset, loader, split, training=self.is_training
            )
            limits = [config.data.max_text_length, self.examples.max_text_length]
            self.text_limit = min((limit for limit in limits if limit is not None), default=None)

    def _read(self, dataset: VLDataset, max_images: int | None) -> None:
        """Read the images and texts of evenly spaced groups; the first text of each group has the same images."""
        self.report.texts = len(dataset)
        num_groups = len(dataset.groups)
        steps = num_groups if max_images is None else min(max_images, num_groups)
        stride = math.ceil(steps / MAX_WHOLE_SAMPLES)
        for step in range(steps):
            texts = dataset.groups[step * num_groups // steps]
            try:
                sample = dataset.sample(texts) if len(texts) else Sample((), ())
            except (ValueError, OSError) as error:
                self._add_problem(str(error))
                continue
            for image in sample.images:
                if image.key not in self.global_ids:
                    self._read_image(image, dataset)
            is_whole = step % stride == 0
            images = self._load(sample, with_features=is_whole)
            for text in sample.texts:
                is_refused = self._read_text(text, sample.images[0].objects)
                if is_whole or is_refused:
                    self._encode(dataclasses.replace(sample, texts=(text,)), images)

    def _read_image(self, image: SampleImage, dataset: VLDataset) -> None:
        """Read the ids of an image, the size of its file, and its annotated boxes."""
        data = self.config.data
        file = image.file if isinstance(image.file, Path) else None
        if data.synthetic.scenes:  # synthetic images have the file names of COCO images
            ids = self.id_lookup.in_namespace(f"drawn in {data.root}", image.id)
        else:
            ids = self.id_lookup.of_sample_image(image, dataset.id_namespace)
        self.global_ids[image.key] = ids
        if file is not None and self.config.detector.backend != "precomputed":
            self.sizes[image.key] = self._file_size(image, file)
        if image.objects is not None:
            boxes = image.objects.boxes
            self.report.boxes += len(boxes)
            if image.size is not None:
                self.report.boxes_outside += int(reach_outside(boxes, image.size[::-1]).sum())

    def _file_size(self, image: SampleImage, file: Path) -> tuple[int, int] | None:
        """Read (height, width) of an image file.

        None: it cannot be read, which is a problem unless training skips it.
        """
        try:
            return read_size(file, image.size)
        except MissingFileError:
            self.report.missing_images += 1
            problem = f"{file}: the file of image {image.id} is missing"
        except (ValueError, OSError) as error:
            self.report.unreadable_images += 1
            problem = str(error)
        if not (self.config.data.skip_broken and self.is_training):
            self._add_problem(problem)
        return None

    def _load(self, sample: Sample, *, with_features: bool) -> list[LoadedImage]:
        """Load the images of a sample with the boxes of each source, but without pixels.

        Return the samples with the boxes of one source, or without boxes if no source gives any.
        """
        from e2e_vl.data.image_loader import StoredBoxes

        loaded: list[LoadedImage] = []
        for loader in self.loaders:
            reader = loader.box_reader
            if reader is not None:
                reader = reader.of_split(sample.images[0].split_index)
            if isinstance(reader, StoredBoxes) and not with_features:
                continue
            try:
                images = [loader.load_without_pixels(image, self.sizes.get(image.key)) for image in sample.images]
            except (ValueError, OSError) as error:
                self._add_problem(str(error))
            else:
                loaded = loaded or images
        if loaded or self.examples is None:
            return loaded
        bare = [dataclasses.replace(image, boxes=None, boxes_to_mask=None) for image in sample.images]
        return [self.examples.loader.load_without_pixels(image, size=None) for image in bare]  # refuses nothing

    def _read_text(self, text: SampleText, objects: AnnotatedObjects | None) -> bool:
        """Count the properties of a text, and return whether it is longer than the encoder can read."""
        report = self.report
        truth = text.truth
        has_words = isinstance(text, ChoiceText) or text.words.strip()
        if not has_words and not isinstance(truth, CategorisedObjects):  # detection has no texts
            self._add_problem(f"text {text.index} of {report.split} is empty ({text.metadata})")
        if self.answers is not None and truth is not None:
            answers = map(self.task.vocabulary_class.canonical_answer, _answers_in(truth))
            report.texts_without_known_answer += self.answers.isdisjoint(answers)
        lengths = [] if self.text_limit is None else self._text_lengths(text, objects)
        too_long = [length for length in lengths if length > self.text_limit]
        report.too_long += len(too_long)
        return bool(too_long) and self.text_limit == self.examples.max_text_length

    def _text_lengths(self, text: SampleText, objects: AnnotatedObjects | None) -> list[int]:
        """Count the wordpieces of a text, or of its query with each choice.

        Where the bytes are few enough, their number is returned: wordpieces are not more.
        """
        layout = ENCODERS[self.config.encoder.name].cls.layout
        if isinstance(text, ChoiceText):
            template = layout.pair
            texts = [_words_of([*text.query, choice], objects) for choice in text.choices]
        else:
            template = layout.single if self.task.vocabulary_class is None else layout.question
            texts = [text.words]
        lengths = []
        for words in texts:
            length = len(words.encode())  # a wordpiece has at least one byte
            if length + template.num_special > self.text_limit:
                length = len(self.tokenizer.backend_tokenizer.encode(words, add_special_tokens=False).ids)
            lengths.append(length + template.num_special)
        return lengths

    def _encode(self, sample: Sample, images: list[LoadedImage]) -> None:
        """Encode one text as training does, and check the region features of its images, if there are any."""
        from e2e_vl.data.batching import collate
        from e2e_vl.preprocessing import EncodedSample

        if self.examples is None:
            return
        try:
            texts = self.examples.preprocess(sample, images)
            for text in texts:
                self.examples.check_length(text)
            if any(image.features is not None for image in images):
                batch = collate([EncodedSample(images, texts)])
                self.model.detector(batch.images, batch.boxes, whole_image=self.model.encoder.uses_whole_image)
        except (ValueError, OSError) as error:
            self._add_problem(str(error))


def _answers_in(truth: Any) -> Collection[str]:
    """Return the annotated answers to a question; none for other truths."""
    if isinstance(truth, CorrectAnswer):
        return [truth.answer]
    if isinstance(truth, HumanAnswers):
        return truth.answers
    if isinstance(truth, ScoredAnswers):
        return truth.scores
    return []


def _words_of(sentences: Sequence[Sentence], objects: AnnotatedObjects | None) -> str:
    """Join sentences to a text, with the names of the objects that they refer to."""
    words: list[str] = []
    for token in itertools.chain.from_iterable(sentences):
        if isinstance(token, str):
            words.append(token)
        elif objects is None:
            words += ["object"] * len(token)
        else:
            words += [objects.names[number] for number in token]
    return " ".join(words)
