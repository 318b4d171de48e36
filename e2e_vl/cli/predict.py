"""Predictions of a trained run: a file for a server or a leaderboard, or answers to texts about images.

    e2e-vl predict split --run RUN --split test2015 --boxes online --output vqa.json
    e2e-vl predict split --run RUN --rationale-run RUN --split test --boxes gt --output vcr.csv
    accelerate launch -m e2e_vl predict split --run RUN --split testA --boxes detections --output refcoco.json
    e2e-vl ask --run RUN --image IMAGE --text "the small red circle" --output DIR

split writes what the task's server or the literature expects, in the order of the data set:
  VQA      JSON list of {"question_id", "answer"}
  VCR      CSV of 21 columns; --run chooses answers, --rationale-run rationales (given each of the four answers)
  RefCOCO  JSON list of {"ref_id", "sent_id", "box"}, the box as [x1, y1, x2, y2] in pixels of the stored image
  GQA      JSON list of {"questionId", "prediction"}
  NLVR2    CSV of lines identifier,True or identifier,False, without a header
  Flickr30K Entities  JSON list of {"image", "sentence", "phrases"}, each phrase with "id", "phrase", "box" and "score"
Where the split has labels, the metrics are printed too; with two runs also Q->A, QA->R and Q->AR. Settings behind the
options (key=value) hold for both runs.

ask prints the answers to texts about images; `ask --help` shows more examples.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from detector.errors import UserError
from detector.io import read_json, write_json
from e2e_vl.cli.common import make_parser, says_errors
from e2e_vl.config import BoxSource, load_config
from e2e_vl.data.user_inputs import read_boxes
from e2e_vl.io import is_shared_model, model_folder, write_png
from e2e_vl.samples import Question

if TYPE_CHECKING:  # at run time it would import torch
    from e2e_vl.api.results import Answer

IMAGE_ENDS = (".jpg", ".jpeg", ".png")
ASK = """The answer of a trained run to texts about images.

    e2e-vl ask --run RUN --image IMAGE --text "the small red circle" --output DIR
    e2e-vl ask --run RUN --image IMAGE --text "What color is the star?" --boxes 10,20,60,80 5,5,40,90
    e2e-vl ask --run RUN --image IMAGE --text "Why is [0] there ?" --choices A B C D --boxes FILE
    e2e-vl ask --run RUN --image IMAGE --text "a [MASK] circle next to a square" --hide 10,20,60,80
    e2e-vl ask --run RUN --image DIR --text "the small red circle" --output DIR
    e2e-vl ask --run RUN --json questions.json --output DIR

Prints the answer, the best first, and in a run that grounds phrases what each phrase names, with its share of the
attention. Several images, or a folder of images, are asked the same text one by one; --pair says that the two images
belong to one text. --json is a list of {"image": FILE, "text": TEXT}, with files relative to it. The model is loaded
once, and the detector runs once per image. Images that are missing or cannot be read are named at the end, and the exit
status is 2; the others are answered.

Without --boxes the run's own detector finds the regions; VCR needs its boxes, and its texts name them as [0] or [1,2],
counted from 0; a VCR metadata file as --boxes brings their classes and outlines too. A pre-training run names the best
words at every [MASK], and the best classes of every region that --hide masks in the image before the detector.

--output DIR writes answer.json (the whole prediction, the regions, and the last layer's attention on them where the
task points at no box), regions.png (all regions) and answer.png (the answer's box, or the regions that get much more
attention than others, without the masked pixels; and boxes of phrases, dashed where they are unsure); for a pair also
regions_2.png and answer_2.png. Of several questions each has a folder 0001, 0002, ... there.
"""


def build_parser(prog: str | None = None) -> argparse.ArgumentParser:
    """The options of `predict split` and `predict ask`."""
    parser = make_parser(__doc__, prog)
    kinds = parser.add_subparsers(dest="command", required=True)
    shape: dict[str, Any] = {"formatter_class": parser.formatter_class}
    split = kinds.add_parser("split", help="predictions of a whole split as a file", description=__doc__, **shape)
    split.add_argument("--run", type=Path, required=True, help="run directory of tools/train.py, or a saved model")
    split.add_argument("--rationale-run", type=Path, help="VCR: the run that chooses rationales")
    split.add_argument("--split", required=True, help="split of the data set, such as test")
    split.add_argument("--boxes", required=True, choices=BoxSource.for_evaluation())
    split.add_argument("--output", type=Path, required=True, metavar="FILE", help="file to write")
    split.add_argument("overrides", nargs="*", metavar="key=value", help="settings to change, such as data.root=DIR")
    split.set_defaults(action=write_split)
    one = kinds.add_parser("ask", help="images and texts in, answers out", description=ASK, **shape)
    add_ask_options(one)
    one.set_defaults(action=ask)
    return parser


def add_ask_options(parser: argparse.ArgumentParser) -> None:
    """The options of `ask`."""
    parser.add_argument(
        "--run", required=True, help="run directory of tools/train.py, a saved model, or a model of the hub"
    )
    parser.add_argument("--image", type=Path, nargs="+", default=[], help="JPEG or PNG files, or a folder of them")
    parser.add_argument("--text", help="phrase, question, or a caption with [MASK]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="images and texts, instead of --image and --text")
    parser.add_argument("--pair", action="store_true", help="the two images belong to one text")
    parser.add_argument(
        "--boxes",
        nargs="+",
        metavar="BOX",
        help="candidates instead of the detector's: x1,y1,x2,y2 or class:x1,y1,x2,y2 in pixels of the image, or a file "
        "(JSON list, JSON object with `boxes` and maybe `names`, or regions.npz of tools/extract_demo.py)",
    )
    parser.add_argument(
        "--hide",
        nargs="+",
        metavar="BOX",
        help="pre-training: regions to recognise without their pixels, as --boxes; candidates that overlap one with an "
        "IoU of 0.5 or more are left out, it stands for them",
    )
    parser.add_argument("--choices", nargs="+", default=(), metavar="TEXT", help="VCR: the four texts to choose from")
    parser.add_argument("--answer", help="VCR, a run for rationales: the answer that they are for")
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder for answer.json and pictures")


@says_errors
def main(argv: list[str] | None = None, prog: str | None = None) -> int:
    options = build_parser(prog).parse_args(argv)
    options.action(options)
    return 0


@says_errors
def ask_main(argv: list[str] | None = None, prog: str | None = None) -> int:
    """`e2e-vl ask`."""
    parser = make_parser(ASK, prog)
    add_ask_options(parser)
    ask(parser.parse_args(argv))
    return 0


def write_split(options: argparse.Namespace) -> None:
    load_config(model_folder(options.run) / "config.yaml", options.overrides)  # before torch is imported
    from e2e_vl.run.evaluate import predict_split  # late: it imports torch

    metrics, is_main = predict_split(
        options.run,
        split=options.split,
        boxes=options.boxes,
        output=options.output,
        second_run_dir=options.rationale_run,
        overrides=options.overrides,
    )
    if is_main:
        for name, value in metrics.items():
            print(f"{name:45s} {value:.4f}")
        if not any("accuracy" in name for name in metrics):
            print(f"The split {options.split} has no labels, so nothing is scored.")
        print(f"predictions: {options.output}")


def ask(options: argparse.Namespace) -> None:
    """Answer, print and write; then name the images that could not be read."""
    questions = read_questions(options)
    is_shared_model(options.run)  # says in one sentence what is missing
    from e2e_vl.api.model import load  # late: it imports torch

    model = load(options.run)
    answers = model.replies(questions, keep_going=True)
    failures = []
    for number, (question, answer) in enumerate(zip(questions, answers, strict=True), start=1):
        if isinstance(answer, Exception):
            failures.append(str(answer))
            continue
        if len(questions) > 1:
            print(f"{question.image}: {question.text}")
        print(*answer.lines, *(f"phrase {phrase.line}" for phrase in answer.phrases), sep="\n")
        if answer.unknown_words:
            print(f"words that the vocabulary lacks: {', '.join(answer.unknown_words)}")
        if options.output is not None:
            folder = options.output if len(questions) == 1 else options.output / f"{number:04d}"
            save(folder, answer)
            print(f"written: {folder / 'answer.json'}")
    if len(failures) < len(questions) and (about_boxes := model.warning_of_boxes(questions)):
        print(about_boxes)
    if failures:
        start = "" if len(questions) == 1 else f"{len(failures)} of {len(questions)} questions have no answer: "
        raise UserError(start + " | ".join(dict.fromkeys(failures)))


class AskedText(msgspec.Struct, forbid_unknown_fields=True):
    """A question in a JSON file."""

    image: str
    text: str


def read_questions(options: argparse.Namespace) -> list[Question]:
    """What the options ask."""
    if (options.json is None) == (not options.image and options.text is None and not options.pair):
        raise UserError("Give either --image and --text, or --json with both.")
    if options.json is not None:
        asked = [((options.json.parent / one.image,), one.text) for one in read_json(options.json, list[AskedText])]
    elif options.text is None or not options.image:
        raise UserError("--image and --text belong together; give both.")
    elif options.pair:
        asked = [(tuple(options.image), options.text)]
    else:
        asked = [((image,), options.text) for path in options.image for image in _images(path)]
    if not asked:
        raise UserError("There is no question; name images, a folder with JPEG or PNG files, or a JSON list.")
    boxes = None if options.boxes is None else read_boxes(options.boxes)
    to_mask = None if options.hide is None else read_boxes(options.hide, "--hide")
    own: dict[str, Any] = {"choices": tuple(options.choices), "answer": options.answer, "boxes_to_mask": to_mask}
    return [Question(images[0], text, boxes, others=images[1:], **own) for images, text in asked]


def _images(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    return sorted(file for file in path.iterdir() if file.suffix.lower() in IMAGE_ENDS)


def save(folder: Path, answer: Answer) -> None:
    """Write answer.json, regions.png and answer.png; of a second image regions_2.png and answer_2.png."""
    folder.mkdir(parents=True, exist_ok=True)
    said = msgspec.to_builtins(answer.prediction)
    said = {key: value for key, value in said.items() if key not in ("type", "text_index", "file_name", "text")}
    first, *others = map(str, answer.images)
    content: dict[str, Any] = {"image": first, "text": answer.text, **said, "regions": answer.boxes.tolist()}
    if others:
        content |= {"other_images": others, "region_images": answer.box_images.tolist()}
    if answer.attention is not None:
        content["attention"] = answer.attention.tolist()
    if answer.unknown_words:
        content["unknown_words"] = list(answer.unknown_words)
    write_json(folder / "answer.json", content)
    for number in range(len(answer.images)):
        end = f"_{number + 1}" if number else ""
        write_png(folder / f"regions{end}.png", answer.draw_candidates(number))
        write_png(folder / f"answer{end}.png", answer.draw(number))
