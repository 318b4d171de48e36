"""The answer of a trained run to one text about one image.

    e2e-vl ask --run RUN --image IMAGE --text "the small red circle" --output DIR
    e2e-vl ask --run RUN --image IMAGE --text "What color is the star?" --boxes 10,20,60,80 5,5,40,90
    e2e-vl ask --run RUN --image IMAGE --text "Why is [0] there ?" --choices A B C D --boxes FILE
    e2e-vl ask --run RUN --image IMAGE --text "a [MASK] circle next to a square" --hide 10,20,60,80

Prints the answer, the best first. Without --boxes the run's own detector finds the regions; VCR needs its boxes,
and its texts name them as [0] or [1,2], counted from 0; a VCR metadata file as --boxes brings their classes and
outlines too. A pre-training run names the best words at every [MASK], and the best classes of every region that --hide
takes out of the image before the detector sees it. --output DIR writes answer.json (the whole prediction, the regions,
and the last layer's attention on them where the task points at no box), regions.png (all regions) and answer.png (the
answer's box, or the regions it looked at most, without the pixels that were hidden). A run whose texts are about two
images takes --image A B, and writes pictures of the second one as regions_2.png and answer_2.png.
`python tools/predict.py ask` is the same command.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from e2e_vl.command_line import make_parser, says_errors
from e2e_vl.data.formats.user_boxes import read_boxes
from e2e_vl.drawing import draw_boxes
from e2e_vl.run_files import model_folder
from e2e_vl.samples import Question

if TYPE_CHECKING:  # at run time it would import torch
    from e2e_vl.engine.predict import Answer

MOST_ATTENDED = 5  # regions in answer.png
GREY = 127  # in place of hidden pixels


def build_parser(prog: str | None = None) -> argparse.ArgumentParser:
    """The options of the command."""
    parser = make_parser(__doc__, prog)
    add_options(parser)
    return parser


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options about one question."""
    parser.add_argument("--run", type=Path, required=True, help="run directory of tools/train.py, or a saved model")
    parser.add_argument(
        "--image", type=Path, nargs="+", required=True, help="any JPEG or PNG file; two for a run on pairs of images"
    )
    parser.add_argument("--text", required=True, help="phrase, question, or a caption with [MASK]")
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
    ask_one(build_parser(prog).parse_args(argv))
    return 0


def ask_one(arguments: argparse.Namespace) -> None:
    question = Question(
        arguments.image[0],
        arguments.text,
        boxes=None if arguments.boxes is None else read_boxes(arguments.boxes),
        choices=tuple(arguments.choices),
        answer=arguments.answer,
        hidden=None if arguments.hide is None else read_boxes(arguments.hide, "--hide"),
        others=tuple(arguments.image[1:]),
    )
    model_folder(arguments.run)
    from e2e_vl.engine.predict import answer_question  # late: it imports torch

    answer = answer_question(arguments.run, question)
    for line in answer.lines:
        print(line)
    if arguments.output is not None:
        save(arguments.output, question, answer)
        print(f"written: {arguments.output / 'answer.json'}")


def save(folder: Path, question: Question, answer: Answer) -> None:
    """Write answer.json, regions.png and answer.png; of a second image regions_2.png and answer_2.png."""
    folder.mkdir(parents=True, exist_ok=True)
    record = {key: value for key, value in answer.record.items() if key not in ("text_index", "file_name", "sent")}
    shown = {"image": str(question.image), "text": question.text, **record, "regions": answer.boxes.tolist()}
    if question.others:
        shown |= {"other_images": list(map(str, question.others)), "region_images": answer.images.tolist()}
    if answer.attention is not None:
        shown["attention"] = answer.attention.tolist()
    text = json.dumps(shown, indent=2, ensure_ascii=False)
    (folder / "answer.json").write_text(text + "\n", encoding="utf-8")
    names = answer.record.get("objects", [""] * len(answer.boxes))
    labels = [f"{row} {name}".strip() for row, name in enumerate(names)]
    for number, image in enumerate(question.images):
        end = f"_{number + 1}" if number else ""
        rows = np.flatnonzero(answer.images == number)
        save_picture(folder / f"regions{end}.png", image, answer.boxes[rows], [labels[row] for row in rows], None)
        save_answer(folder / f"answer{end}.png", image, question.text, answer, labels, rows)


def save_answer(path: Path, image: Path, text: str, answer: Answer, labels: list[str], rows: np.ndarray) -> None:
    """Draw the answer's box, or the boxes among `rows` of this image that the answer looked at most."""
    title = text if answer.task.points_at_box else f"{text} -> {answer.lines[0]}"
    if answer.box is not None:
        save_picture(path, image, [answer.box], [f"{answer.record['score']:.2f}"], title)
    elif answer.attention is not None:
        hidden = answer.record.get("hidden", [])
        best = np.argsort(-answer.attention, kind="stable")[:MOST_ATTENDED]
        best = [row for row in best if row >= len(hidden) and row in rows]
        covered = [one["box"] for one in hidden]  # the first of the regions
        shown = [f"hidden: {one['classes'][0][0]} {one['classes'][0][1]:.2f}" for one in hidden]
        shown += [f"{labels[row]}: {answer.attention[row]:.2f}" for row in best]
        save_picture(path, image, [*covered, *answer.boxes[best]], shown, title, covered)
    else:
        save_picture(path, image, [], [], title)


def save_picture(
    path: Path, image: Path, boxes: Any, labels: list[str], title: str | None, covered: list[list[float]] | None = None
) -> None:
    """Draw boxes, given in pixels of the original image, on the image; `covered` boxes hide what is in them."""
    from detector.images import ResizeRule, load_resized, resize_boxes  # late: it imports torch

    pixels, size = load_resized(image, ResizeRule(600, 1000, "detectron2"), "RGB")
    pixels = pixels.copy()
    for x1, y1, x2, y2 in resize_boxes(np.array(covered or []).reshape(-1, 4), size, pixels.shape[:2]).astype(int):
        pixels[y1 : y2 + 1, x1 : x2 + 1] = GREY
    boxes = resize_boxes(np.asarray(boxes, dtype=np.float64).reshape(-1, 4), size, pixels.shape[:2])
    Image.fromarray(draw_boxes(pixels, boxes, labels, title=title)).save(path)
