"""Check the annotation files of a run before training: problems, sizes, and photos shared with other data sets.

    e2e-vl check-data --config configs/refcoco/vl_bert_base.yaml data.root=DATA
    e2e-vl check-data --config configs/refcoco/vl_bert_base.yaml data.root=DATA \\
        --with configs/pretraining/vl_bert_base_e2e.yaml \\
        --visual-genome image_data.json --detector-images VG_train.txt

Reads all samples of the training and evaluation splits, without opening images. Prints the first problems and counts
images, missing image files, boxes, texts, texts longer than data.max_text_length, and texts without a known answer.
Reports photos of the evaluation splits that are also in the training split, in the training splits of other configs
(--with) or among the training images of the detector (--detector-images). Photos are identified by COCO ids in file
names and by Visual Genome ids; --visual-genome maps the latter to COCO ids.

The exit status is 1 if there are problems, and with --no-overlap if photos are shared.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path

from detector.io import write_json
from e2e_vl.cli.main import make_parser, parse_with_settings, print_errors
from e2e_vl.config import BoxSource, RunConfig, load_config
from e2e_vl.data.base import VLDataset
from e2e_vl.data.overlap import PhotoId, PhotoIds, count_photos, read_visual_genome
from e2e_vl.parts import ENCODERS, TASKS
from e2e_vl.samples import (
    AnnotatedObjects,
    Categories,
    ChoiceText,
    CorrectAnswer,
    HumanAnswers,
    ImageKey,
    SampleImage,
    SampleText,
    ScoredAnswers,
    Sentence,
)

MARGIN = 1.0  # pixels by which a box may exceed its image: corners are often rounded


@dataclasses.dataclass
class SplitReport:
    """Sizes and problems of a split."""

    split: str
    texts: int = 0
    images: int = 0
    photos: int = 0  # distinct photos: in joined data sets a photo may have two image ids
    missing_images: int = 0
    too_long: int = 0  # texts truncated to data.max_text_length
    boxes: int = 0  # annotated boxes
    boxes_outside: int = 0  # boxes that exceed their image by more than `MARGIN`
    texts_without_known_answer: int = 0  # texts with no annotated answer in the answer vocabulary
    problems: list[str] = dataclasses.field(default_factory=list)
    shared: list[str] = dataclasses.field(default_factory=list)  # sentences about photos shared with other data

    def lines(self, examples: int) -> list[str]:
        lines = [
            f"{self.split}: {self.images:,} images of {self.photos:,} photos, {self.missing_images:,} files missing; "
            f"{self.boxes:,} boxes, {self.boxes_outside:,} of them reach outside their image",
            f"  {self.texts:,} texts; {self.too_long:,} are too long, {self.texts_without_known_answer:,} have no "
            "answer in the vocabulary",
            *(f"SHARED: {sentence}" for sentence in self.shared),
            *(f"PROBLEM: {sentence}" for sentence in self.problems[:examples]),
        ]
        more = len(self.problems) - examples
        return [*lines, f"  ... and {more:,} more problems"] if more > 0 else lines


@print_errors
def main(argv: list[str] | None = None, prog: str | None = None) -> int:
    file = {"type": Path, "metavar": "FILE"}
    files = file | {"action": "append", "default": []}
    lists = "training images of the detector: COCO's JSON, image_data.json, or a list of paths or ids (repeatable)"
    parser = make_parser(__doc__, prog)
    parser.add_argument("--config", type=Path, required=True, help="YAML file of the run")
    parser.add_argument("--with", dest="others", **files, help="YAML file of another run to compare with (repeatable)")
    parser.add_argument("--detector-images", **files, help=lists)
    parser.add_argument("--detector-ids", choices=("coco", "vg"), help="source of these ids, if names do not show it")
    parser.add_argument("--visual-genome", **file, help="Visual Genome's image_data.json, with COCO's ids")
    parser.add_argument("--images", type=int, metavar="N", help="read N images of each split (default: all)")
    parser.add_argument("--examples", type=int, default=10, metavar="N", help="problems shown per split (default: 10)")
    parser.add_argument("--no-overlap", action="store_true", help="exit with status 1 if photos are shared")
    parser.add_argument("--json", **file, help="file for the full report, with all problems")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that override the file")
    args = parse_with_settings(parser, argv)
    config = load_config(args.config, [*args.overrides, "output=unused"])
    others = {str(path): load_config(path, ["output=unused"]) for path in args.others}
    photo_ids = PhotoIds(None if args.visual_genome is None else read_visual_genome(args.visual_genome))
    listed = (photo_ids.of_list(path, args.detector_ids) for path in args.detector_images)
    detector_photos = {photo for photos in itertools.chain.from_iterable(listed) for photo in photos}
    reports = check_data(config, others, photo_ids, detector_photos, args.images)
    for report in reports:
        print("\n".join(report.lines(args.examples)))
    has_problems = any(report.problems for report in reports)
    if not has_problems:
        print("no problem found")
    if args.json is not None:
        write_json(args.json, {"splits": [dataclasses.asdict(report) for report in reports]})
    return int(has_problems or (args.no_overlap and any(report.shared for report in reports)))


def check_data(
    config: RunConfig,
    others: dict[str, RunConfig],
    photo_ids: PhotoIds,
    detector_photos: set[PhotoId],
    max_images: int | None = None,
) -> list[SplitReport]:
    """Read all splits that a run trains on and evaluates.

    Args:
        others: configs of other runs, by name; the evaluation splits are compared with their training splits.
        max_images: read this many evenly spaced images of each split; None: all.
    """
    train, evaluated = config.data.train_split, config.data.eval_splits
    sources = {train: [BoxSource(config.data.boxes.train)]}
    for split in evaluated:
        sources[split] = list(dict.fromkeys([*sources.get(split, []), *map(BoxSource, config.eval.boxes)]))
    read = {split: SplitReader(config, split, boxes, photo_ids, max_images) for split, boxes in sources.items()}
    places = {"the detector's training images": detector_photos}
    for name, other in others.items():
        split = other.data.train_split
        reader = SplitReader(other, split, [BoxSource(other.data.boxes.train)], photo_ids, max_images)
        places[f"the training split {split} of {name}"] = reader.photo_ids
    for split in evaluated:
        report, photos = read[split].report, read[split].photos
        seen = places if split == train else {f"the training split {train}": read[train].photo_ids} | places
        for place, ids in seen.items():
            common = {key: photo for key, photo in photos.items() if not ids.isdisjoint(photo)}
            if common:
                report.shared.append(
                    f"{count_photos(common.values()):,} of {report.photos:,} photos of {split} are in {place} "
                    f"(such as {', '.join(key.id for key in [*common][:3])})"
                )
    return [reader.report for reader in read.values()]


class SplitReader:
    """Opens a split with the sources of candidate boxes that the run uses, and reads its samples."""

    def __init__(
        self, config: RunConfig, split: str, boxes: Sequence[BoxSource], all_ids: PhotoIds, max_images: int | None
    ) -> None:
        from e2e_vl.data.image_loader import open_boxes_of  # late: imports torch and transformers
        from e2e_vl.run.build import load_answers, open_split
        from e2e_vl.text import load_tokenizer

        self.config, self.all_ids = config, all_ids
        self.report = SplitReport(split)
        self.photos: dict[ImageKey, tuple[PhotoId, ...]] = {}  # of each image
        self.task = TASKS[config.task.name].cls
        vocabulary = config.data.vocabulary
        try:
            self.tokenizer = None if vocabulary is None else load_tokenizer(vocabulary)
            self.answers = set(load_answers(config)) if self.task.chooses_answers else None
            main = next((one for one in boxes if one.reads_annotations), boxes[0])
            dataset = open_split(config, split, main, training=split == config.data.train_split)
            self._read(dataset, max_images)
            for source in boxes:
                reader = open_boxes_of(dataset, config.data, source)
                if reader is not None:
                    reader.require_images(dataset.image_keys(), split)
        except (ValueError, OSError) as error:
            self.report.problems.append(f"{split}: {error}")
        self.report.images, self.report.photos = len(self.photos), count_photos(self.photos.values())

    @property
    def photo_ids(self) -> set[PhotoId]:
        return set(itertools.chain.from_iterable(self.photos.values()))

    def _read(self, dataset: VLDataset, max_images: int | None) -> None:
        self.report.texts = len(dataset)
        number = len(dataset.groups)
        steps = number if max_images is None else min(max_images, number)
        for step in range(steps):
            try:
                sample = dataset.sample(dataset.groups[step * number // steps])
            except (ValueError, OSError) as error:
                self.report.problems.append(str(error))
                continue
            for image in sample.images:
                if image.key not in self.photos:
                    self._read_image(image, dataset)
            for text in sample.texts:
                self._read_text(text, sample.images[0].objects)

    def _read_image(self, image: SampleImage, dataset: VLDataset) -> None:
        report, data, file = self.report, self.config.data, image.file if isinstance(image.file, Path) else None
        if data.synthetic.scenes:  # drawn scenes are named like COCO images, but are not photos
            self.photos[image.key] = self.all_ids.in_space(f"drawn in {data.root}", image.id)
        else:
            aliases = image.photo_aliases
            self.photos[image.key] = self.all_ids.of_image(image.id, file, dataset.id_space, aliases)
        if file is not None and self.config.detector.backend != "precomputed" and not file.is_file():
            report.missing_images += 1
            if not (data.skip_broken and report.split == data.train_split):
                report.problems.append(f"{file}: the file of image {image.id} is missing")
        if image.objects is not None:
            boxes = image.objects.boxes
            report.boxes += len(boxes)
            if image.size is not None:
                limits = [image.size[1] + MARGIN, image.size[0] + MARGIN]
                report.boxes_outside += int(((boxes[:, :2] < -MARGIN) | (boxes[:, 2:] > limits)).any(axis=1).sum())

    def _read_text(self, text: SampleText, objects: AnnotatedObjects | None) -> None:
        report, truth, limit = self.report, text.truth, self.config.data.max_text_length
        layout = ENCODERS[self.config.encoder.name].cls.layout
        if isinstance(text, ChoiceText):
            template = layout.pair
            texts = [_words_of([*text.query, choice], objects) for choice in text.choices]
        else:
            template = layout.question if self.task.chooses_answers else layout.single
            texts = [text.words]
            if not text.words.strip() and not isinstance(truth, Categories):  # detection has no texts
                report.problems.append(f"text {text.index} of {report.split} is empty ({text.metadata})")
        for words in texts if limit is not None else ():
            pieces = words.split() if self.tokenizer is None else self.tokenizer.tokenize(words)
            report.too_long += len(pieces) + template.num_special > limit
        if self.answers is not None and truth is not None:
            answers = [truth.answer] if isinstance(truth, CorrectAnswer) else []
            answers = truth.answers if isinstance(truth, HumanAnswers) else answers
            answers = truth.scores if isinstance(truth, ScoredAnswers) else answers
            report.texts_without_known_answer += self.answers.isdisjoint(map(self.task.canonical_answer, answers))


def _words_of(sentences: Sequence[Sentence], objects: AnnotatedObjects | None) -> str:
    words: list[str] = []
    for token in itertools.chain.from_iterable(sentences):
        if isinstance(token, str):
            words.append(token)
        else:
            words += ["object" if objects is None else objects.names[number] for number in token]
    return " ".join(words)
