"""Ask a trained run about images.

    e2e-vl ask --run RUN --image IMAGE --text "the small red circle" --output DIR
    e2e-vl ask --run RUN --image IMAGE --text "What color is the star?" --boxes 10,20,60,80 5,5,40,90
    e2e-vl ask --run RUN --image IMAGE --text "Why is [0] there ?" --choices A B C D --boxes FILE
    e2e-vl ask --run RUN --image IMAGE --text "a [MASK] circle next to a square" --mask 10,20,60,80
    e2e-vl ask --run RUN --image DIR --text "the small red circle" --output DIR
    e2e-vl ask --run RUN --image clip.mp4 --fps 2 --text "the small red circle" --output DIR
    e2e-vl ask --run RUN --json questions.json --output DIR

Prints the answers, best first; with phrase grounding, also the region of each phrase and its share of the attention.
Several images, a folder with its subfolders (in natural order: 2.jpg before 10.jpg) or a pattern share one text; with
--pair, the text is about both images. --json is a list of {"image": FILE, "text": TEXT}, with addresses or paths
relative to the JSON file. Of a video file, --fps frames per second are asked about, in order of time; its frames as
image files are a folder. The model is loaded once, and the detector runs once per image. Answers that are too
uncertain to rely on are marked "(unsure)". Unreadable images, and missing ones of --json, are skipped and listed at the
end; the exit status is then 2.

Without --boxes, the run's detector predicts the regions. VCR needs --boxes, and its texts refer to them as [0] or
[1,2], counted from 0; a VCR metadata file as --boxes also contains their classes and outlines. A pre-trained model
predicts the words at every [MASK] and the classes of the regions masked by --mask.

--output DIR writes answer.json (the prediction, the regions, and the last layer's attention on them unless the task
predicts a box), regions.png (all regions) and answer.png (the predicted box or the most attended regions, masked
pixels in grey, and boxes of phrases; dashed if unsure); for a pair also regions_2.png and answer_2.png. Each of
several questions gets its own folder: 0001, 0002, ...
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from detector.errors import UserError, user_path
from detector.io import read_json, write_json
from e2e_vl.cli.main import make_parser, print_errors
from e2e_vl.data.user_images import ImageFile, find_images, to_image_file
from e2e_vl.data.user_inputs import boxes_of_image, read_boxes
from e2e_vl.data.videos import is_video, read_frames
from e2e_vl.io import find_run, write_png
from e2e_vl.samples import Question

if TYPE_CHECKING:  # at run time it would import torch
    from e2e_vl.api.model import Answer


@print_errors
def main(argv: list[str] | None = None, prog: str | None = None) -> int:
    parser = make_parser(__doc__, prog)
    parser.add_argument(
        "--run", required=True, help="run directory of e2e-vl train, a saved model, or a model of the hub"
    )
    images = parser.add_mutually_exclusive_group(required=True)
    image_help = "image or video files, addresses, folders, or patterns such as 'photos/*.jpg'"
    images.add_argument("--image", nargs="+", help=image_help)
    images.add_argument("--json", type=Path, metavar="FILE", help="images and texts, instead of --image and --text")
    parser.add_argument("--fps", type=float, help="frames per second of a video (default: 1)")
    parser.add_argument("--text", help="phrase, question, or a caption with [MASK]")
    parser.add_argument("--pair", action="store_true", help="the two images belong to one text")
    parser.add_argument(
        "--boxes",
        nargs="+",
        metavar="BOX",
        help="candidates instead of the detector's: x1,y1,x2,y2 or class:x1,y1,x2,y2 in pixels of the image, or a file "
        "(JSON list, JSON object with `boxes` and optional `names` and `scores`, a saved result, the file of e2e-vl "
        "detect, a COCO instances file, or regions.npz of e2e-vl extract)",
    )
    parser.add_argument(
        "--mask",
        nargs="+",
        metavar="BOX",
        help="pre-training: regions to mask and classify, in the format of --boxes; candidates whose IoU with one of "
        "them is at least 0.5 are dropped",
    )
    parser.add_argument("--choices", nargs="+", default=(), metavar="TEXT", help="VCR: the four texts to choose from")
    parser.add_argument("--answer", help="VCR, a run that chooses rationales: the answer to justify")
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder for answer.json and pictures")
    parser.add_argument("--device", help="cpu, cuda, cuda:1 or mps (default: the CUDA GPU if there is one)")
    args = parser.parse_args(argv)
    questions = read_questions(args)
    find_run(args.run)  # raises an error if the run is missing
    from e2e_vl.api.model import load  # late: imports torch

    model = load(args.run, args.device)
    answers = model.answer_questions(questions, keep_going=True)
    failures = []
    for number, (question, answer) in enumerate(zip(questions, answers, strict=True), start=1):
        if isinstance(answer, Exception):
            failures.append(str(answer))
            continue
        if len(questions) > 1:
            print(f"{question.image}: {question.text}")
        for line in answer.marked_lines:
            print(line)
        for phrase in answer.phrases:
            print(f"phrase {phrase.line}")
        for warning in answer.warnings:
            print(f"warning: {warning}")
        if args.output is not None:
            folder = args.output
            if len(questions) > 1:
                folder /= f"{number:04d}"
            save_answer(folder, answer)
            print(f"written: {folder / 'answer.png'}, answer.json, regions.png")
    if failures:
        message = " | ".join(dict.fromkeys(failures))
        if len(questions) > 1:
            message = f"{len(failures)} of {len(questions)} questions have no answer: {message}"
        raise UserError(message)
    return 0


class QuestionEntry(msgspec.Struct, forbid_unknown_fields=True):
    """An entry of the file of --json."""

    image: str
    text: str


def read_questions(args: argparse.Namespace) -> list[Question]:
    """Read the questions of the command line."""
    if (args.json is None) == (args.text is None):
        raise UserError("Give either --image with --text, or --json, which contains the texts.")
    pairs: list[tuple[tuple[ImageFile, ...], str]] = []  # the images of a question, and its text
    if args.json is not None:
        for entry in read_json(args.json, list[QuestionEntry]):
            pairs.append(((image_of_entry(entry, args.json.parent),), entry.text))
    elif args.pair:
        pairs.append((tuple(map(to_image_file, args.image)), args.text))
    else:
        pairs = [((image,), args.text) for image in find_images_and_frames(args.image, args.fps)]
    if not pairs:
        raise UserError(f"{args.json}: the list is empty; give at least one question.")
    boxes = None
    if args.boxes is not None:
        boxes = read_boxes(args.boxes)
    boxes_to_mask = None
    if args.mask is not None:
        boxes_to_mask = read_boxes(args.mask, "--mask")
    questions = []
    for (first, *others), text in pairs:
        question = Question(
            first,
            text,
            boxes_of_image(boxes, first),
            choices=tuple(args.choices),
            answer=args.answer,
            others=tuple(others),
            boxes_to_mask=boxes_of_image(boxes_to_mask, first),
        )
        questions.append(question)
    return questions


def find_images_and_frames(sources: list[str], frames_per_second: float | None) -> list[ImageFile]:
    """Return the images that --image names, and the frames of its videos, in the order of the arguments."""
    if frames_per_second is not None and not any(map(is_video, sources)):
        raise UserError("--fps is for a video file, and --image names none; leave it out.")
    images: list[ImageFile] = []
    for source in sources:
        if is_video(source):
            images += read_frames(source, frames_per_second or 1.0)
        else:
            images += find_images([source])
    return images


def image_of_entry(entry: QuestionEntry, folder: Path) -> ImageFile:
    """Return the image of an entry of --json: an address, or a path relative to the JSON file's folder."""
    if "://" in entry.image or entry.image.startswith("data:"):
        return to_image_file(entry.image)
    return to_image_file(folder / user_path(entry.image, "Image"))


def save_answer(folder: Path, answer: Answer) -> None:
    """Write answer.json, regions.png and answer.png; for a second image, also regions_2.png and answer_2.png."""
    folder.mkdir(parents=True, exist_ok=True)
    prediction = msgspec.to_builtins(answer.prediction)
    for key in ("type", "text_index", "file_name", "text"):
        prediction.pop(key, None)
    first, *others = map(str, answer.images)
    content: dict[str, Any] = {"image": first, "text": answer.question, **prediction, "is_unsure": answer.is_unsure}
    content["regions"] = answer.boxes.tolist()
    if others:
        content |= {"other_images": others, "region_images": answer.box_images.tolist()}
    if answer.attention is not None:
        content["attention"] = answer.attention.tolist()
    if answer.unknown_words:
        content["unknown_words"] = list(answer.unknown_words)
    if answer.warnings:
        content["warnings"] = list(answer.warnings)
    write_json(folder / "answer.json", content)
    for number in range(len(answer.images)):
        suffix = f"_{number + 1}" if number else ""
        write_png(folder / f"regions{suffix}.png", answer.draw_candidates(number))
        write_png(folder / f"answer{suffix}.png", answer.draw(number))
