"""Read the annotation files of a run before training: what is wrong and where, how large all is, what was seen before.

    e2e-vl check-data --config configs/refcoco/vl_bert_base.yaml data.root=DATA
    e2e-vl check-data --config configs/refcoco/vl_bert_base.yaml data.root=DATA \\
        --with configs/pretraining/vl_bert_base_e2e.yaml \\
        --visual-genome image_data.json --detector-images VG_train.txt

Opens every split that is trained on and evaluated and walks over its samples; prints the first problems, the numbers of
images, missing image files, texts, texts beyond data.max_text_length, boxes and answers; and says which photos of the
evaluated splits occur in the training split, in the training splits of other configs (--with) and among the training
images of the detector (--detector-images). Photos are found again by COCO's ids in file names, and by Visual Genome's
with --visual-genome, which also says which of them are photos of COCO.

The exit status is 1 if there are problems, and with --no-overlap if photos are shared. Images are not opened, and those
in archives not looked for.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from detector.errors import UserError
from detector.io import write_json
from e2e_vl.cli.common import make_parser, says_errors
from e2e_vl.config import BoxSource, RunConfig, load_config

if TYPE_CHECKING:
    from e2e_vl.data.base import VLDataset
    from e2e_vl.data.overlap import PhotoId, PhotoIds
    from e2e_vl.samples import AnnotatedObjects, Sample, SampleImage, SampleText

MARGIN = 1.0  # pixels by which a box may leave its image without being counted: corners are often rounded


@dataclasses.dataclass
class SplitReport:
    """What a split holds, and what is wrong with it."""

    split: str
    texts: int = 0
    images: int = 0
    photos: int = 0  # different ones; joined data sets may have the same photo under two ids
    missing_images: int = 0
    longest: int = 0  # wordpieces (words, where a vocabulary is built from the data), special ones included
    too_long: int = 0  # texts that data.max_text_length cuts
    boxes: int = 0  # annotated ones
    images_without_boxes: int = 0
    empty_boxes: int = 0
    boxes_outside: int = 0  # by more than `MARGIN`
    texts_without_known_answer: int = 0  # no annotated answer is in the list of possible answers
    problems: list[str] = dataclasses.field(default_factory=list)
    shared: list[str] = dataclasses.field(default_factory=list)  # sentences about photos that occur elsewhere

    def lines(self, examples: int) -> list[str]:
        """The report as text."""
        lines = [
            f"{self.split}: {self.texts:,} texts, {self.images:,} images of {self.photos:,} photos, "
            f"{self.missing_images:,} image files missing",
            f"  texts: at most {self.longest} wordpieces; {self.too_long:,} are too long, "
            f"{self.texts_without_known_answer:,} have no answer of the list",
            f"  boxes: {self.boxes:,}; {self.empty_boxes:,} empty, {self.boxes_outside:,} reach outside their image; "
            f"{self.images_without_boxes:,} images have none",
            *(f"SHARED: {sentence}" for sentence in self.shared),
            *(f"PROBLEM: {sentence}" for sentence in self.problems[:examples]),
        ]
        more = len(self.problems) - examples
        return [*lines, f"  ... and {more:,} more problems"] if more > 0 else lines


def build_parser(prog: str | None = None) -> argparse.ArgumentParser:
    """The options of the command."""
    parser = make_parser(__doc__, prog)
    parser.add_argument("--config", type=Path, required=True, help="YAML file of the run")
    parser.add_argument(
        "--with",
        dest="others",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="YAML file of another run, such as pre-training, whose training images are compared; may be repeated",
    )
    parser.add_argument(
        "--detector-images",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="training images of the detector: COCO's JSON, Visual Genome's image_data.json, or a list of paths or "
        "ids; may be repeated",
    )
    parser.add_argument(
        "--detector-ids", choices=("coco", "vg"), help="whose ids the lists hold where names do not tell"
    )
    parser.add_argument(
        "--visual-genome", type=Path, metavar="FILE", help="Visual Genome's image_data.json, with COCO's ids"
    )
    parser.add_argument("--images", type=int, metavar="N", help="look at N images of each split (default: all)")
    parser.add_argument("--examples", type=int, default=10, metavar="N", help="problems shown per split (default: 10)")
    parser.add_argument("--no-overlap", action="store_true", help="shared photos are problems too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was found, all problems too")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that beat the file")
    return parser


@says_errors
def main(argv: list[str] | None = None, prog: str | None = None) -> int:
    options = build_parser(prog).parse_intermixed_args(argv)
    if options.images is not None and options.images < 1:
        raise UserError(f"--images is {options.images}; give a positive number.")
    config = load_config(options.config, [*options.overrides, "output=unused"])
    others = {str(path): load_config(path, ["output=unused"]) for path in options.others}
    from e2e_vl.data.overlap import PhotoIds, read_visual_genome  # late: they import numpy, torch and transformers

    photo_ids = PhotoIds(None if options.visual_genome is None else read_visual_genome(options.visual_genome))
    detector_photos = {
        photo
        for path in options.detector_images
        for photos in photo_ids.of_list(path, options.detector_ids)
        for photo in photos
    }
    reports = check_data(config, others, photo_ids, detector_photos, options.images)
    for report in reports:
        print("\n".join(report.lines(options.examples)))
    has_problems = any(report.problems for report in reports)
    if not has_problems:
        print("no problem found")
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        write_json(options.json, {"splits": [dataclasses.asdict(report) for report in reports]})
    return int(has_problems or (options.no_overlap and any(report.shared for report in reports)))


def check_data(
    config: RunConfig,
    others: dict[str, RunConfig],
    photo_ids: PhotoIds,
    detector_photos: set[PhotoId],
    max_images: int | None = None,
) -> list[SplitReport]:
    """Read all splits that the settings train on and evaluate.

    Args:
        others: settings of other runs, by name, with whose training splits the evaluated splits are compared.
        photo_ids: finds photos again in other data sets.
        detector_photos: what the detector was trained on.
        max_images: look at this many images of each split, evenly spread; None = all.
    """
    from e2e_vl.data.overlap import number_of_photos

    train, evaluated = config.data.train_split, [BoxSource(boxes) for boxes in config.eval.boxes]
    sources = {train: [BoxSource(config.data.boxes.train)]}
    for split in config.data.eval_splits:
        sources[split] = list(dict.fromkeys([*sources.get(split, []), *evaluated]))
    walks = {split: SplitWalk(config, split, boxes, photo_ids, max_images) for split, boxes in sources.items()}
    places = {f"the training split {train}": walks[train].all_photos, "the detector's training images": detector_photos}
    for name, other in others.items():
        split = other.data.train_split
        walk = SplitWalk(other, split, [BoxSource(other.data.boxes.train)], photo_ids, max_images)
        places[f"the training split {split} of {name}"] = walk.all_photos
    for split, walk in walks.items():
        for place, photos in places.items() if split != train or split in config.data.eval_splits else ():
            common = {name: ids for name, ids in walk.photos.items() if not photos.isdisjoint(ids)}
            if common and (split, place) != (train, f"the training split {train}"):
                walk.report.shared.append(
                    f"{number_of_photos(common.values()):,} of {walk.report.photos:,} photos of {split} are in {place} "
                    f"(such as {', '.join([*common][:3])})"
                )
    return [walk.report for walk in walks.values()]


class SplitWalk:
    """Opens a split and looks at its samples.

    Args:
        boxes: the sources of candidate boxes that the run uses.

    Attributes:
        report: what was found.
        photos: ids of the photo of each image, by the image's id.
    """

    def __init__(
        self, config: RunConfig, split: str, boxes: Sequence[BoxSource], photo_ids: PhotoIds, max_images: int | None
    ) -> None:
        from e2e_vl.data.image_loader import open_boxes_of
        from e2e_vl.data.overlap import number_of_photos
        from e2e_vl.parts import ENCODERS, TASKS
        from e2e_vl.run.build import is_drawn, open_split, possible_answers
        from e2e_vl.text import load_tokenizer

        self.config, self.photo_ids = config, photo_ids
        self.report, self.photos = SplitReport(split), {}
        vocabulary = config.data.vocabulary
        self.task, layout = TASKS[config.task.name].cls, ENCODERS[config.encoder.name].cls.layout
        self.extra = (layout.question if self.task.chooses_answers else layout.single).num_special
        self.extra_of_pair = layout.pair.num_special
        if config.data.synthetic.scenes and not is_drawn(config):
            raise UserError(f"{config.data.root}: the scenes of this config are not drawn yet; a run draws them.")
        try:
            self.tokenizer = None if vocabulary is None else load_tokenizer(vocabulary)
            self.answers: set[str] | None = None
            if self.task.chooses_answers:
                self.answers = set(possible_answers(config))
            main = next((one for one in boxes if one.reads_annotations), boxes[0])
            dataset = open_split(config, split, main, training=split == config.data.train_split)
            self._walk(dataset, max_images)
            for source in boxes:
                reader = open_boxes_of(dataset, config.data, source)
                if reader is not None:
                    reader.require_images(dataset.image_ids(), split)
        except (ValueError, OSError) as error:
            self.report.problems.append(f"{split}: {error}")
        self.report.images, self.report.photos = len(self.photos), number_of_photos(self.photos.values())

    @property
    def all_photos(self) -> set[PhotoId]:
        """The ids of the photos of all images."""
        return {one for ids in self.photos.values() for one in ids}

    def _walk(self, dataset: VLDataset, max_images: int | None) -> None:
        number = len(dataset.groups)
        self.report.texts = len(dataset)
        looked_at = number if max_images is None else min(max_images, number)
        for step in range(looked_at):
            try:
                self._look_at(dataset.sample(dataset.groups[step * number // looked_at]), dataset)
            except (ValueError, OSError) as error:
                self.report.problems.append(str(error))

    def _look_at(self, sample: Sample, dataset: VLDataset) -> None:
        for image in sample.images:
            if image.id not in self.photos:
                self._look_at_image(image, dataset)
        for text in sample.texts:
            self._look_at_text(text, sample.images[0].objects)

    def _look_at_image(self, image: SampleImage, dataset: VLDataset) -> None:
        report, file = self.report, image.file if isinstance(image.file, Path) else None
        if self.config.data.synthetic.scenes:  # drawn scenes have names of COCO, but are no photos
            self.photos[image.id] = self.photo_ids.in_space(f"drawn in {self.config.data.root}", image.id)
        else:
            aliases = image.photo_aliases
            self.photos[image.id] = self.photo_ids.of_image(image.id, file, dataset.id_space, aliases)
        if file is not None and self.config.detector.backend != "precomputed" and not file.is_file():
            report.missing_images += 1
            if not (self.config.data.skip_broken and report.split == self.config.data.train_split):
                report.problems.append(f"{file}: the file of image {image.id} is missing")
        if image.objects is not None:
            boxes = image.objects.boxes
            report.boxes += len(boxes)
            report.images_without_boxes += not len(boxes)
            report.empty_boxes += int((boxes[:, 2:] <= boxes[:, :2]).any(axis=1).sum())
            if image.size is not None:
                limits = [image.size[1] + MARGIN, image.size[0] + MARGIN]
                report.boxes_outside += int(((boxes[:, :2] < -MARGIN) | (boxes[:, 2:] > limits)).any(axis=1).sum())

    def _look_at_text(self, text: SampleText, objects: AnnotatedObjects | None) -> None:
        from e2e_vl.samples import Categories, ChoiceText, CorrectAnswer, HumanAnswers, ScoredAnswers

        report, truth = self.report, text.truth
        if isinstance(text, ChoiceText):
            named = [[*text.query, choice] for choice in text.choices]
            texts = [" ".join(_words(token, objects) for part in parts for token in part) for parts in named]
        else:
            texts = [text.words]
            if not text.words.strip() and not isinstance(truth, Categories):  # detection has no texts
                report.problems.append(f"text {text.index} of {report.split} is empty ({text.metadata})")
        for words in texts:
            pieces = words.split() if self.tokenizer is None else self.tokenizer.tokenize(words)
            length = len(pieces) + (self.extra_of_pair if isinstance(text, ChoiceText) else self.extra)
            report.longest = max(report.longest, length)
            limit = self.config.data.max_text_length
            report.too_long += limit is not None and length > limit
        if self.answers is not None and truth is not None:
            answers = [truth.answer] if isinstance(truth, CorrectAnswer) else []
            answers = truth.answers if isinstance(truth, HumanAnswers) else answers
            answers = truth.scores if isinstance(truth, ScoredAnswers) else answers
            report.texts_without_known_answer += self.answers.isdisjoint(map(self.task.canonical_answer, answers))


def _words(token: str | list[int], objects: AnnotatedObjects | None) -> str:
    """A token of a choice in words; objects are called by their classes."""
    if isinstance(token, str):
        return token
    return " ".join("object" if objects is None else objects.names[number] for number in token)
