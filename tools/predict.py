"""Predictions of a trained run: a file for a server or a leaderboard, or the answer to one text about one image.

    accelerate launch tools/predict.py split --run RUN --split test2015 --boxes online --output vqa.json
    accelerate launch tools/predict.py split --run RUN --rationale-run RUN --split test --boxes gt --output vcr.csv
    accelerate launch tools/predict.py split --run RUN --split testA --boxes detections --output refcoco.json
    python tools/predict.py ask --run RUN --image IMAGE --text "the small red circle" --output DIR
    python tools/predict.py ask --run RUN --image IMAGE --text "What color is the star?" --boxes 10,20,60,80 5,5,40,90
    python tools/predict.py ask --run RUN --image IMAGE --text "Why is [0] there ?" --choices A B C D --boxes FILE
    python tools/predict.py ask --run RUN --image IMAGE --text "a [MASK] circle next to a square" --hide 10,20,60,80

split writes what the task's server or the literature expects, in the order of the data set:
  VQA      JSON list of {"question_id", "answer"}
  VCR      CSV of 21 columns; --run chooses answers, --rationale-run rationales (given each of the four answers)
  RefCOCO  JSON list of {"ref_id", "sent_id", "box"}, the box as [x1, y1, x2, y2] in pixels of the stored image
Where the split has labels, the metrics are printed too; with two runs also Q->A, QA->R and Q->AR. Settings behind the
options (key=value) hold for both runs.

ask prints the answer, the best first. Without --boxes the run's own detector finds the regions; VCR needs its boxes,
and its texts name them as [0] or [1,2], counted from 0; a VCR metadata file as --boxes brings their classes and
outlines too. A pre-training run names the best words at every [MASK], and the best classes of every region that --hide
takes out of the image before the detector sees it. --output DIR writes answer.json (the whole prediction, the regions,
and the last layer's attention on them where the task points at no box), regions.png (all regions) and answer.png (the
answer's box, or the regions it looked at most, without the pixels that were hidden). A run whose texts are about two
images takes --image A B, and writes pictures of the second one as regions_2.png and answer_2.png.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from detector.images import ResizeRule, load_resized, resize_boxes
from e2e_vl.box_sources import BoxSource
from e2e_vl.command_line import make_parser, says_errors
from e2e_vl.data.formats.user_boxes import read_boxes
from e2e_vl.drawing import draw_boxes
from e2e_vl.engine.asking import Reply as Answer
from e2e_vl.engine.predict import answer_question, predict_split
from e2e_vl.samples import Question

MOST_ATTENDED = 5  # regions in answer.png
GREY = 127  # in place of hidden pixels


@says_errors
def main(argv: list[str] | None = None) -> int:
    parser = make_parser(__doc__)
    shape: dict[str, Any] = {"description": __doc__, "formatter_class": parser.formatter_class}
    commands = parser.add_subparsers(dest="command", required=True)
    split = commands.add_parser("split", help="predictions of a whole split as a file", **shape)
    split.add_argument("--run", type=Path, required=True, help="run directory of tools/train.py, or a saved model")
    split.add_argument("--rationale-run", type=Path, help="VCR: the run that chooses rationales")
    split.add_argument("--split", required=True, help="split of the data set, such as test")
    split.add_argument("--boxes", required=True, choices=BoxSource.for_evaluation())
    split.add_argument("--output", type=Path, required=True, metavar="FILE", help="file to write")
    split.add_argument("overrides", nargs="*", metavar="key=value", help="settings to change, such as data.root=DIR")
    split.set_defaults(action=write_split)
    ask = commands.add_parser("ask", help="one image and one text in, the answer out", **shape)
    ask.add_argument("--run", type=Path, required=True, help="run directory of tools/train.py, or a saved model")
    ask.add_argument(
        "--image", type=Path, nargs="+", required=True, help="any JPEG or PNG file; two for a run on pairs of images"
    )
    ask.add_argument("--text", required=True, help="phrase, question, or a caption with [MASK]")
    ask.add_argument(
        "--boxes",
        nargs="+",
        metavar="BOX",
        help="candidates instead of the detector's: x1,y1,x2,y2 or class:x1,y1,x2,y2 in pixels of the image, or a file "
        "(JSON list, JSON object with `boxes` and maybe `names`, or regions.npz of tools/extract_demo.py)",
    )
    ask.add_argument(
        "--hide",
        nargs="+",
        metavar="BOX",
        help="pre-training: regions to recognise without their pixels, as --boxes; candidates that overlap one with an "
        "IoU of 0.5 or more are left out, it stands for them",
    )
    ask.add_argument("--choices", nargs="+", default=(), metavar="TEXT", help="VCR: the four texts to choose from")
    ask.add_argument("--answer", help="VCR, a run for rationales: the answer that they are for")
    ask.add_argument("--output", type=Path, metavar="DIR", help="folder for answer.json and pictures")
    ask.set_defaults(action=ask_one)
    arguments = parser.parse_args(argv)
    arguments.action(arguments)
    return 0


def write_split(arguments: argparse.Namespace) -> None:
    metrics, is_main = predict_split(
        arguments.run,
        split=arguments.split,
        boxes=arguments.boxes,
        output=arguments.output,
        second_run_dir=arguments.rationale_run,
        overrides=arguments.overrides,
    )
    if not is_main:
        return
    for name, value in metrics.items():
        print(f"{name:45s} {value:.4f}")
    if not any("accuracy" in name for name in metrics):
        print(f"The split {arguments.split} has no labels, so nothing is scored.")
    print(f"predictions: {arguments.output}")


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
    pixels, size = load_resized(image, ResizeRule(600, 1000, "detectron2"), "RGB")
    pixels = pixels.copy()
    for x1, y1, x2, y2 in resize_boxes(np.array(covered or []).reshape(-1, 4), size, pixels.shape[:2]).astype(int):
        pixels[y1 : y2 + 1, x1 : x2 + 1] = GREY
    boxes = resize_boxes(np.asarray(boxes, dtype=np.float64).reshape(-1, 4), size, pixels.shape[:2])
    Image.fromarray(draw_boxes(pixels, boxes, labels, title=title)).save(path)


if __name__ == "__main__":
    raise SystemExit(main())
