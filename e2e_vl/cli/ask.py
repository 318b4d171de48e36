"""The answer of a trained run to texts about images.

    e2e-vl ask --run RUN --image IMAGE --text "the small red circle" --output DIR
    e2e-vl ask --run RUN --image IMAGE --text "What color is the star?" --boxes 10,20,60,80 5,5,40,90
    e2e-vl ask --run RUN --image IMAGE --text "Why is [0] there ?" --choices A B C D --boxes FILE
    e2e-vl ask --run RUN --image IMAGE --text "a [MASK] circle next to a square" --hide 10,20,60,80
    e2e-vl ask --run RUN --image DIR --text "the small red circle" --output DIR
    e2e-vl ask --run RUN --json questions.json --output DIR

Prints the answer, the best first, and in a run that grounds phrases what each phrase names, with its share of the
attention. Several images, or a folder of images, are asked the same text one by one; --pair says that the two images
belong to one text. --json is a list of {"image": FILE, "text": TEXT}, with files relative to it. The model is loaded
once, and looks at each image once. Images that are missing or cannot be read are named at the end, and the exit status
is 2; the others are answered.

Without --boxes the run's own detector finds the regions; VCR needs its boxes, and its texts name them as [0] or [1,2],
counted from 0; a VCR metadata file as --boxes brings their classes and outlines too. A pre-training run names the best
words at every [MASK], and the best classes of every region that --hide takes out of the image before the detector.

--output DIR writes answer.json (the whole prediction, the regions, and the last layer's attention on them where the
task points at no box), regions.png (all regions) and answer.png (the answer's box, or the regions that it looks at much
more than at others, without the pixels that were hidden; and boxes of phrases, dashed where they are unsure); for a
pair also regions_2.png and answer_2.png. Of several questions each has a folder 0001, 0002, ... there.
`python tools/predict.py ask` is the same command.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from detector.errors import UserError
from detector.io import write_json
from e2e_vl.cli.common import make_parser, says_errors
from e2e_vl.data.storage.files import read_json
from e2e_vl.data.user_inputs import read_boxes
from e2e_vl.io import is_shared_model, write_png
from e2e_vl.records import Name, Record, checked
from e2e_vl.samples import Question

if TYPE_CHECKING:  # at run time it would import torch
    from e2e_vl.api.results import Answer

KEYS = ("image", "text")  # of a question in a JSON file
IMAGE_ENDS = (".jpg", ".jpeg", ".png")


class _AskedText(Record):
    image: Name
    text: str


def build_parser(prog: str | None = None) -> argparse.ArgumentParser:
    """The options of the command."""
    parser = make_parser(__doc__, prog)
    add_options(parser)
    return parser


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options about one question."""
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
    ask(build_parser(prog).parse_args(argv))
    return 0


def ask(arguments: argparse.Namespace) -> None:
    """Answer, print and write.

    Raises:
        FileNotFoundError, ValueError: see `questions_of`; or, after all others were answered, images that were not.
    """
    questions = questions_of(arguments)
    is_shared_model(arguments.run)  # says in one sentence what is missing
    missing = {number: _missing(question) for number, question in enumerate(questions)}
    failures = {number: reason for number, reason in missing.items() if reason}
    asked = [number for number in missing if number not in failures]
    if asked:
        failures |= _answer(arguments, questions, asked)
    if failures:
        reasons = list(dict.fromkeys(failures[number] for number in sorted(failures)))
        if len(questions) == 1:
            raise UserError(reasons[0])
        raise UserError(f"{len(failures)} of {len(questions)} questions have no answer: {' | '.join(reasons)}")


def _answer(arguments: argparse.Namespace, questions: list[Question], asked: list[int]) -> dict[int, str]:
    """Print and write the answers to the questions with these numbers; returns why others have none."""
    from e2e_vl.api.model import load  # late: it imports torch

    model = load(arguments.run)
    own = [questions[number] for number in asked]
    answers, errors = model.replies(own, keep_going=True)
    for number, question, answer in zip(asked, own, answers, strict=True):
        if answer is None:
            continue
        if len(questions) > 1:
            print(f"{question.image}: {question.text}")
        for line in answer.lines:
            print(line)
        for phrase in answer.phrases:
            print(f"phrase {phrase.line}")
        if answer.unknown_words:
            print(f"words that the vocabulary lacks: {', '.join(answer.unknown_words)}")
        if arguments.output is not None:
            folder = arguments.output if len(questions) == 1 else arguments.output / f"{number + 1:04d}"
            save(folder, answer)
            print(f"written: {folder / 'answer.json'}")
    about_boxes = model.warning_of_boxes(own)
    if about_boxes and len(errors) < len(own):
        print(about_boxes)
    return {asked[row]: str(error) for row, error in errors.items()}


def _missing(question: Question) -> str:
    """Which image of a question is missing; empty where none is."""
    for image in question.images:
        if not image.exists():
            return f"Image {image} is missing; check the path."
    return ""


def questions_of(arguments: argparse.Namespace) -> list[Question]:
    """What the options ask.

    Raises:
        FileNotFoundError, ValueError: options that contradict each other, a folder without images, or a JSON file of
            another form.
    """
    if arguments.json is not None and (arguments.image or arguments.text is not None or arguments.pair):
        raise UserError("--json holds images and texts; leave --image, --text and --pair out beside it.")
    if arguments.json is None and (not arguments.image or arguments.text is None):
        raise UserError("Give either --image and --text, or --json with both.")
    if arguments.json is not None:
        asked = [((image,), text) for image, text in _read_questions(arguments.json)]
    elif arguments.pair:
        asked = [(tuple(arguments.image), arguments.text)]
    else:
        asked = [((image,), arguments.text) for path in arguments.image for image in _images(path)]
    boxes = None if arguments.boxes is None else read_boxes(arguments.boxes)
    if boxes is not None and not len(boxes):
        raise UserError(f"{boxes.origin}: there is no box; give at least one, or leave --boxes out.")
    boxes_to_mask = None if arguments.hide is None else read_boxes(arguments.hide, "--hide")
    return [
        Question(
            images[0],
            text,
            boxes=boxes,
            choices=tuple(arguments.choices),
            answer=arguments.answer,
            boxes_to_mask=boxes_to_mask,
            others=images[1:],
        )
        for images, text in asked
    ]


def _read_questions(path: Path) -> list[tuple[Path, str]]:
    """Images and texts of a JSON file.

    Raises:
        FileNotFoundError, ValueError: no such file, or a content of another form; names the question.
    """
    rows = read_json(path, "questions")
    if not isinstance(rows, list) or not rows:
        raise UserError(f'{path}: expected a list of {{"image": FILE, "text": TEXT}}.')
    asked = []
    for number, row in enumerate(rows):
        where = f"{path}: question {number}"
        one = checked(_AskedText, row, where, remedy="correct the question")
        unknown = [key for key in row if key not in KEYS]
        if unknown:
            raise UserError(f"{where} has the key '{unknown[0]}'; only {' and '.join(KEYS)} are known.")
        asked.append((path.parent / one.image, one.text))
    return asked


def _images(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    images = sorted(file for file in path.iterdir() if file.suffix.lower() in IMAGE_ENDS)
    if not images:
        raise UserError(f"{path} holds no JPEG or PNG file; give a folder of images.")
    return images


def save(folder: Path, answer: Answer) -> None:
    """Write answer.json, regions.png and answer.png; of a second image regions_2.png and answer_2.png."""
    folder.mkdir(parents=True, exist_ok=True)
    record = {key: value for key, value in answer.record.items() if key not in ("text_index", "file_name", "sent")}
    first, *others = map(str, answer.images)
    shown: dict[str, Any] = {"image": first, "text": answer.text, **record, "regions": answer.boxes.tolist()}
    if others:
        shown |= {"other_images": others, "region_images": answer.box_images.tolist()}
    if answer.attention is not None:
        shown["attention"] = answer.attention.tolist()
    if answer.unknown_words:
        shown["unknown_words"] = list(answer.unknown_words)
    write_json(folder / "answer.json", shown)
    for number in range(len(answer.images)):
        end = f"_{number + 1}" if number else ""
        write_png(folder / f"regions{end}.png", answer.draw_candidates(number))
        write_png(folder / f"answer{end}.png", answer.draw(number))
