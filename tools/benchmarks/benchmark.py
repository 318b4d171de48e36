"""Measure speed and memory on this machine.

    python tools/benchmarks/benchmark.py train --json FILE
    python tools/benchmarks/benchmark.py train --preset base --json FILE
    python tools/benchmarks/benchmark.py train --config configs/demo/refcoco.yaml data.texts_per_image=8
    python tools/benchmarks/benchmark.py train --preset base --sweep --json FILE
    python tools/benchmarks/benchmark.py train --preset base_lxmert --sweep --no-checkpointing --rois 100
    python tools/benchmarks/benchmark.py detector --json FILE
    python tools/benchmarks/benchmark.py detector --detector-config configs/detector/R_101_C4.yaml --image-size 600 1000
    python tools/benchmarks/benchmark.py memory --folder DIR --corpus-mib 2048 --records 200000 --json FILE
    python tools/benchmarks/benchmark.py memory --folder DIR --steps 2000 --against 16 2000 --picture FILE --json FILE
    python tools/benchmarks/benchmark.py check --folder DIR --json FILE
    python tools/benchmarks/benchmark.py start --folder DIR --json FILE
    python tools/benchmarks/benchmark.py attention --folder DIR --images 160 --json FILE
    python tools/benchmarks/benchmark.py ask --run runs/demo_refcoco --image IMAGE --text "the small red circle"

`train` times whole training steps (forward, backward, optimiser) with several texts of each image in one batch
(grouped) against the same texts one per batch (ungrouped: as many passes over the same images, gradients accumulated,
one optimiser step), so both are the same update. `ratios.grouped_5_over_1` is the median time of the grouped step
divided by the median time of the ungrouped one, for the same texts: below 1, grouping is faster. The two ways take
turns. Before that it checks that both give the same loss and gradients; if not, the exit status is 1. With `--sweep` it
times single steps instead and shows their peak memory: one text per image and several, float32 and bfloat16, without
and (unless `--no-checkpointing`) with activation checkpointing. The presets base, base_visual_bert and base_lxmert are
the three encoders of BASE size on the same detector, images and texts.

`detector` times features of given boxes and training steps of the built-in detector and, where Detectron2 is installed,
of Detectron2's model with the same config and weights. `ratio` is Detectron2's median time divided by ours: above 1,
ours is faster. The two take turns. If their features differ, the exit status is 1.

`memory` writes a text corpus and captioned images in shards (of the given sizes; they stay in the folder) and reads
batches of them as pre-training does; with `--steps` it pre-trains for that many steps instead, model and optimiser
included. It shows the memory of the main process and of each worker early (from 20 to 30 % of the steps, when caches
have filled) and late (the last 10 %): RSS is all resident memory, PSS divides pages that processes share among them,
USS leaves them out. `--against` does the same on smaller files.

`check` times `e2e-vl check-data` on generated files as large as those of RefCOCO+ (expressions), VQA v2 (questions),
GQA (graph_questions), NLVR2 (pairs), VCR (choices) and Flickr30K Entities (captions), and tells what the processor
worked for it and for the processes that it forked, and the peak of their memory together.

`start` opens the training split of the same files, and of Conceptual Captions in archives (archived), as a run does.
It tells the seconds, the memory, and how much memory a data worker adds in a quarter of an epoch; images are not read.

`attention` measures what all 12 x 12 heads of an untrained VisualBERT of BASE size ground, on drawn images with five
captions each and random features of 36 regions, and tells seconds and peak resident memory after a quarter of the
images and after all of them: memory hardly grows with the split. Files of one size are written once and stay.

`ask` times the answers of a trained run: the first one with imports and loading, further ones, and one command each.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import asking_speed
import attention_memory
import check_speed
import detector_speed
import grouped_steps
import process_memory
import single_steps
import start_memory
from check_files import WRITERS
from detector.errors import UserError
from detector.io import write_json
from e2e_vl.cli.common import says_errors
from e2e_vl.config import load_config
from measuring import CONFIGS, ROOT

SHAPE: dict[str, Any] = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
PRESETS = {  # name -> config file, image size (height, width), boxes per image
    "small": (CONFIGS / "train.yaml", (320, 416), (16,)),
    "base": (CONFIGS / "train_base.yaml", (600, 800), (36, 100)),
    "base_visual_bert": (CONFIGS / "train_base_visual_bert.yaml", (600, 800), (36, 100)),
    "base_lxmert": (CONFIGS / "train_base_lxmert.yaml", (600, 800), (36, 100)),
}
Measured = tuple[dict[str, Any], Callable[[dict[str, Any]], int]]  # the numbers, and what shows them


@says_errors
def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(**SHAPE)
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="training steps", **SHAPE)
    add_train_options(train)
    add_detector_options(commands.add_parser("detector", help="built-in detector against Detectron2", **SHAPE))
    add_memory_options(commands.add_parser("memory", help="memory of pre-training on large files", **SHAPE))
    add_check_options(commands.add_parser("check", help="the check of annotation files", **SHAPE))
    add_start_options(commands.add_parser("start", help="time and memory of reading annotations", **SHAPE))
    add_attention_options(commands.add_parser("attention", help="time and memory of an analysis of attention", **SHAPE))
    add_ask_options(commands.add_parser("ask", help="answers of a trained run", **SHAPE))
    for command in commands.choices.values():
        command.add_argument("--json", type=Path, metavar="FILE", help="write all numbers to this file")
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["train"]:  # overrides may stand anywhere, which a parser of sub-commands cannot read
        arguments = train.parse_intermixed_args(words[1:])
    else:
        arguments = parser.parse_args(words)
    result, show = arguments.measure(arguments)
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        write_json(arguments.json, result)
    return show(result)


def numbers(text: str) -> list[int]:
    """`36,100` as numbers."""
    return [int(number) for number in text.split(",")]


def add_train_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--preset",
        choices=tuple(PRESETS),
        default="small",
        help="small: ResNet-50 C4 and 4 layers, 16 boxes, 320 x 416 pixels, about two minutes on two CPU cores "
        "(default); base: ResNet-101 C4 and BASE (12 layers of 768), 36 and 100 boxes, 600 x 800 pixels; "
        "base_visual_bert, base_lxmert: the same with these encoders",
    )
    parser.add_argument("--config", type=Path, help="YAML file of a run instead of a preset, with its own sizes")
    parser.add_argument("--sweep", action="store_true", help="precision, checkpointing and memory of single steps")
    parser.add_argument("--no-checkpointing", action="store_true", help="with --sweep: no activation checkpointing")
    add_step_options(parser)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that beat the file")
    parser.set_defaults(measure=measure_train)


def add_detector_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--detector-config",
        type=Path,
        default=ROOT / "configs" / "detector" / "vl_bert_R_101.yaml",
        help="Detectron2 YAML file (default: VL-BERT's ResNet-101 C4 with dilated res5)",
    )
    parser.add_argument("--images", type=int, default=1, help="images in a batch (default: 1)")
    parser.add_argument("--no-train", action="store_true", help="leave out the training step")
    add_step_options(parser)
    parser.set_defaults(measure=measure_detector, rois=[36, 100], image_size=(600, 1000))


def add_step_options(parser: argparse.ArgumentParser) -> None:
    """What training steps and detectors share; sizes without defaults come from the preset."""
    parser.add_argument(
        "--rois",
        type=numbers,
        metavar="N[,N...]",
        help="boxes per image; each number is measured (detector: default 36,100, the training step has the first)",
    )
    parser.add_argument(
        "--image-size",
        type=int,
        nargs=2,
        metavar=("H", "W"),
        help="pixels of the padded images (detector: default 600 1000)",
    )
    parser.add_argument("--repetitions", type=int, default=5, help="measured steps of each way (default: 5)")
    parser.add_argument("--warm-up", type=int, default=1, help="steps of each way before them (default: 1)")


def add_memory_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", type=Path, required=True, metavar="DIR", help="the files are written there")
    parser.add_argument("--corpus-mib", type=int, default=2048, help="size of the text corpus (default: 2048 MiB)")
    parser.add_argument("--records", type=int, default=200_000, help="images with captions (default: 200000)")
    parser.add_argument("--batches", type=int, default=1000, help="batches that are read (default: 1000)")
    parser.add_argument("--images-per-batch", type=int, default=8, help="captions in a batch (default: 8)")
    parser.add_argument("--workers", type=int, default=2, help="processes that read (default: 2)")
    parser.add_argument("--steps", type=int, metavar="N", help="pre-train for N steps instead of only reading")
    parser.add_argument(
        "--against",
        type=int,
        nargs=2,
        action="append",
        default=[],
        metavar=("MIB", "RECORDS"),
        help="the same on a corpus and records of these sizes, to compare",
    )
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the curves into this PNG file")
    parser.set_defaults(measure=measure_memory)


def add_check_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", type=Path, required=True, metavar="DIR", help="the files are written there")
    parser.add_argument("--kinds", nargs="+", choices=tuple(WRITERS), default=list(WRITERS))
    parser.add_argument("--share", type=float, default=1.0, help="of the full size (default: 1)")
    parser.set_defaults(measure=measure_check)


def add_start_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", type=Path, required=True, metavar="DIR", help="the files are written there")
    parser.add_argument("--kinds", nargs="+", choices=tuple(start_memory.KINDS), default=list(start_memory.KINDS))
    parser.add_argument("--share", type=float, default=1.0, help="of the full size (default: 1)")
    parser.set_defaults(measure=measure_start)


def add_attention_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", type=Path, required=True, metavar="DIR", help="the files are written there")
    parser.add_argument("--images", type=int, default=160, help="images with five captions each (default: 160)")
    parser.add_argument("--images-per-batch", type=int, default=4, help="images of one pass (default: 4)")
    parser.set_defaults(measure=measure_attention)


def add_ask_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run", type=Path, required=True, help="run directory, or a saved model")
    parser.add_argument("--image", type=Path, required=True, help="JPEG or PNG file")
    parser.add_argument("--text", required=True, help="what to ask")
    parser.add_argument("--repetitions", type=int, default=20, help="answers after the first one (default: 20)")
    parser.set_defaults(measure=measure_asking)


def measure_train(arguments: argparse.Namespace) -> Measured:
    if arguments.config is None:
        name, (file, image_size, rois) = arguments.preset, PRESETS[arguments.preset]
    else:
        name, file, image_size, rois = str(arguments.config), arguments.config, None, (None,)
    config = load_config(file, arguments.overrides)
    common = {
        "rois": arguments.rois or rois,
        "image_size": tuple(arguments.image_size) if arguments.image_size else image_size,
        "repetitions": arguments.repetitions,
        "warm_up": arguments.warm_up,
    }
    if arguments.sweep:
        if None in common["rois"]:
            raise UserError("Give the boxes per image with --rois, such as --rois 36,100.")
        kind, show, result = (
            "steps",
            single_steps.show,
            single_steps.benchmark_steps(
                config, **common, checkpointing=(False,) if arguments.no_checkpointing else (False, True)
            ),
        )
    else:
        kind, show, result = "train", grouped_steps.show, grouped_steps.benchmark_training(config, **common)
    return {"benchmark": kind, "config": name, "overrides": arguments.overrides, **result}, show


def measure_detector(arguments: argparse.Namespace) -> Measured:
    result = detector_speed.benchmark_detector(
        arguments.detector_config,
        image_size=tuple(arguments.image_size),
        images=arguments.images,
        rois=arguments.rois,
        repetitions=arguments.repetitions,
        warm_up=arguments.warm_up,
        training=not arguments.no_train,
    )
    return {"benchmark": "detector", **result}, detector_speed.show


def measure_check(arguments: argparse.Namespace) -> Measured:
    if not 0 < arguments.share <= 1:
        raise UserError(f"--share is {arguments.share}; give a share of the full size, up to 1.")
    result = check_speed.benchmark_check(arguments.folder.resolve(), arguments.kinds, arguments.share)
    return {"benchmark": "check", **result}, check_speed.show


def measure_start(arguments: argparse.Namespace) -> Measured:
    if not 0 < arguments.share <= 1:
        raise UserError(f"--share is {arguments.share}; give a share of the full size, up to 1.")
    result = start_memory.benchmark_start(arguments.folder.resolve(), arguments.kinds, arguments.share)
    return {"benchmark": "start", **result}, start_memory.show


def measure_attention(arguments: argparse.Namespace) -> Measured:
    result = attention_memory.benchmark_attention(
        CONFIGS / "attention.yaml",
        arguments.folder.resolve(),
        images=arguments.images,
        images_per_batch=arguments.images_per_batch,
    )
    return {"benchmark": "attention", **result}, attention_memory.show


def measure_asking(arguments: argparse.Namespace) -> Measured:
    if not arguments.image.is_file():
        raise UserError(f"{arguments.image} is no file; give a JPEG or PNG file as --image.")
    result = asking_speed.benchmark_asking(
        arguments.run.resolve(), arguments.image.resolve(), arguments.text, repetitions=arguments.repetitions
    )
    return {"benchmark": "ask", **result}, asking_speed.show


def measure_memory(arguments: argparse.Namespace) -> Measured:
    training = arguments.steps is not None
    result = process_memory.benchmark_memory(
        CONFIGS / "memory.yaml",
        arguments.folder,
        sizes=[(arguments.corpus_mib, arguments.records), *arguments.against],
        steps=arguments.steps if training else arguments.batches,
        images_per_batch=arguments.images_per_batch,
        workers=arguments.workers,
        training=training,
    )
    if arguments.picture is not None:
        process_memory.draw_memory(result, arguments.picture)
    return {"benchmark": "training_memory" if training else "memory", **result}, process_memory.show


if __name__ == "__main__":
    raise SystemExit(main())
