"""Measure speed and memory on this machine.

    python tools/benchmark.py train --json FILE
    python tools/benchmark.py train --preset base --json FILE
    python tools/benchmark.py train --config configs/demo/refcoco.yaml data.texts_per_image=8
    python tools/benchmark.py train --preset base --sweep --json FILE
    python tools/benchmark.py detector --json FILE
    python tools/benchmark.py detector --detector-config configs/detector/R_101_C4.yaml --image-size 600 1000
    python tools/benchmark.py memory --folder DIR --corpus-mib 2048 --records 200000 --json FILE
    python tools/benchmark.py memory --folder DIR --steps 2000 --against 16 2000 --picture FILE --json FILE

`train` times whole training steps (forward, backward, optimiser) with several texts of each image in one batch
(grouped) against the same texts one per batch (ungrouped: as many passes over the same images, gradients accumulated,
one optimiser step), so both are the same update. `ratios.grouped_5_over_1` is the median time of the grouped step
divided by the median time of the ungrouped one, for the same texts: below 1, grouping is faster. The two ways take
turns. Before that it checks that both give the same loss and gradients; if not, the exit status is 1. With `--sweep` it
times single steps instead and shows their peak memory: one text per image and several, float32 and bfloat16, with and
without activation checkpointing.

`detector` times features of given boxes and training steps of the built-in detector and, where Detectron2 is installed,
of Detectron2's model with the same config and weights. `ratio` is Detectron2's median time divided by ours: above 1,
ours is faster. The two take turns. If their features differ, the exit status is 1.

`memory` writes a text corpus and captioned images in shards (as large as asked for; they stay in the folder), reads
batches of them as pre-training does, and shows the resident memory of the main process and of each worker. With
`--steps` it pre-trains for so many steps instead, model and optimiser included, and shows the memory of each process
early (from 20 to 30 % of the steps, when caches have filled) and late (the last 10 %): RSS is all resident memory, PSS
divides pages that processes share among them, USS leaves them out. `--against` does the same on smaller files.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

from e2e_vl.config import load_config
from e2e_vl.engine.benchmark import benchmark_training
from e2e_vl.engine.detector_benchmark import benchmark_detector
from e2e_vl.engine.memory_benchmark import benchmark_memory
from e2e_vl.engine.step_benchmark import benchmark_steps
from e2e_vl.engine.training_memory import benchmark_training_memory, draw_memory

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "configs" / "benchmark"
DETECTOR_CONFIG = ROOT / "configs" / "detector" / "vl_bert_R_101.yaml"


class Preset(NamedTuple):
    """A config file with the sizes that go with it."""

    config: Path
    image_size: tuple[int, int]
    rois: tuple[int, ...]


PRESETS = {
    "small": Preset(CONFIGS / "train.yaml", (320, 416), (16,)),
    "base": Preset(CONFIGS / "train_base.yaml", (600, 800), (36, 100)),
}
TOLERANCE = 1e-3  # of the loss, relative to it, and of gradients, relative to the largest one


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser(
        "train", help="training steps", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    train.add_argument(
        "--preset",
        choices=tuple(PRESETS),
        default="small",
        help="small: ResNet-50 C4 and 4 layers, 16 boxes, 320 x 416 pixels, about two minutes on two CPU cores "
        "(default); base: ResNet-101 C4 and BASE (12 layers of 768), 36 and 100 boxes, 600 x 800 pixels",
    )
    train.add_argument("--config", type=Path, help="YAML file of a run instead of a preset, with its own sizes")
    train.add_argument(
        "--rois",
        type=lambda numbers: [int(number) for number in numbers.split(",")],
        metavar="N[,N...]",
        help="boxes per image; each number is measured",
    )
    train.add_argument("--image-size", type=int, nargs=2, metavar=("H", "W"), help="pad images to this size, pixels")
    train.add_argument("--sweep", action="store_true", help="precision, checkpointing and memory of single steps")
    train.add_argument("--repetitions", type=int, default=5, help="measured steps of each way (default: 5)")
    train.add_argument("--warm-up", type=int, default=1, help="steps of each way before them (default: 1)")
    train.add_argument("--json", type=Path, metavar="FILE", help="write all numbers to this file")
    train.add_argument("overrides", nargs="*", metavar="key=value", help="settings that beat the file")
    _add_detector_command(commands)
    _add_memory_command(commands)
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["train"]:  # overrides may stand anywhere, which a parser of sub-commands cannot read
        arguments = train.parse_intermixed_args(words[1:])
    else:
        arguments = parser.parse_args(words)
    try:
        runs = {"detector": run_detector, "memory": run_memory}
        result = runs.get(words[0], run_train)(arguments)
        if arguments.json is not None:
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if result["benchmark"] == "detector":
        print_detector_result(result)
        return 0 if has_same_features(result) else 1
    if result["benchmark"] == "memory":
        print_memory(result)
        return 0
    if result["benchmark"] == "training_memory":
        print_training_memory(result)
        return 0
    if result["benchmark"] == "steps":
        print_steps(result)
        return 0
    print_result(result)
    return 0 if is_same_update(result) else 1


def _add_detector_command(commands: Any) -> None:
    parser = commands.add_parser(
        "detector",
        help="built-in detector against Detectron2",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--detector-config",
        type=Path,
        default=DETECTOR_CONFIG,
        help="Detectron2 YAML file (default: VL-BERT's ResNet-101 C4 with dilated res5)",
    )
    parser.add_argument(
        "--rois",
        type=lambda numbers: [int(number) for number in numbers.split(",")],
        default=[36, 100],
        metavar="N[,N...]",
        help="given boxes per image (default: 36,100); the training step has the first number",
    )
    parser.add_argument(
        "--image-size", type=int, nargs=2, default=(600, 1000), metavar=("H", "W"), help="default: 600 1000 pixels"
    )
    parser.add_argument("--images", type=int, default=1, help="images in a batch (default: 1)")
    parser.add_argument("--repetitions", type=int, default=5, help="measured calls of each (default: 5)")
    parser.add_argument("--warm-up", type=int, default=1, help="calls of each before them (default: 1)")
    parser.add_argument("--no-train", action="store_true", help="leave out the training step")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers to this file")


def _add_memory_command(commands: Any) -> None:
    parser = commands.add_parser(
        "memory",
        help="memory of pre-training on large files",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--folder", type=Path, required=True, metavar="DIR", help="the files are written there")
    parser.add_argument("--corpus-mib", type=int, default=2048, help="size of the text corpus (default: 2048 MiB)")
    parser.add_argument("--records", type=int, default=200_000, help="images with captions (default: 200000)")
    parser.add_argument("--batches", type=int, default=1000, help="batches that are read (default: 1000)")
    parser.add_argument("--images-per-batch", type=int, default=8, help="captions in a batch (default: 8)")
    parser.add_argument("--workers", type=int, default=2, help="processes that read (default: 2)")
    parser.add_argument("--steps", type=int, metavar="N", help="pre-train so many steps instead of only reading")
    parser.add_argument(
        "--against",
        type=int,
        nargs=2,
        metavar=("MIB", "RECORDS"),
        help="with --steps: the same on a corpus and records of these sizes, to compare",
    )
    parser.add_argument("--picture", type=Path, metavar="FILE", help="with --steps: draw the curves into this PNG file")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers to this file")


def run_memory(arguments: argparse.Namespace) -> dict[str, Any]:
    """The measurement that the command line describes."""
    if arguments.steps is not None:
        sizes = [(arguments.corpus_mib, arguments.records)]
        result = benchmark_training_memory(
            CONFIGS / "memory.yaml",
            arguments.folder,
            sizes=sizes if arguments.against is None else [*sizes, tuple(arguments.against)],
            steps=arguments.steps,
            images_per_batch=arguments.images_per_batch,
            workers=arguments.workers,
        )
        if arguments.picture is not None:
            draw_memory(result, arguments.picture)
        return {"benchmark": "training_memory", **result}
    if arguments.against is not None or arguments.picture is not None:
        raise ValueError("--against and --picture belong to --steps; give the number of steps too.")
    result = benchmark_memory(
        arguments.folder,
        corpus_mib=arguments.corpus_mib,
        records=arguments.records,
        batches=arguments.batches,
        images_per_batch=arguments.images_per_batch,
        workers=arguments.workers,
    )
    return {"benchmark": "memory", **result}


def print_memory(result: dict[str, Any]) -> None:
    """A short table for people."""
    settings, files, seconds, memory = (result[name] for name in ("settings", "files", "seconds", "memory"))
    print(f"corpus {files['corpus']} MiB, {settings['records']} images in {files['shards']} MiB of shards")
    print(f"  {'imported':20s} {memory['start']:8.1f} MiB")
    print(f"  {'peak at the index':20s} {memory['index']:8.1f} MiB, {seconds['index']} s")
    print(f"{settings['batches']} batches of {settings['images_per_batch']} captions, {seconds['batches']} s:")
    rows = {"main process": memory["main"]}
    rows |= {f"worker {number}": values for number, values in enumerate(memory["workers"])}
    for name, values in rows.items():
        print(f"  {name:20s} {values['peak']:8.1f} MiB peak, {values['growth']:+.1f} MiB growth")


def print_training_memory(result: dict[str, Any]) -> None:
    """A table for people, in Markdown; MiB."""
    settings = result["settings"]
    print(f"{settings['steps']} steps of {settings['images_per_batch']} captions and as many texts of the corpus, MiB:")
    print("| corpus | records | process | RSS peak | RSS late | RSS growth | PSS late | USS late | USS growth |")
    print("|---:|---:|---|---:|---:|---:|---:|---:|---:|")
    for case in result["cases"]:
        rows = {"main": case["main"]} | {f"worker {number}": one for number, one in enumerate(case["workers"])}
        for name, process in rows.items():
            values = process["summary"]
            print(
                f"| {case['files']['corpus']:.0f} | {case['records']} | {name} | {values['peak']:.0f} | "
                f"{values['rss_late']:.0f} | {values['rss_growth']:+.1f} | {values['pss_late']:.0f} | "
                f"{values['uss_late']:.0f} | {values['uss_growth']:+.1f} |"
            )
    for case in result["cases"]:
        print(f"{case['records']} records: {case['start']:.0f} MiB with everything imported, {case['seconds']:.0f} s")


def run_detector(arguments: argparse.Namespace) -> dict[str, Any]:
    """The measurement that the command line describes."""
    result = benchmark_detector(
        arguments.detector_config,
        image_size=tuple(arguments.image_size),
        images=arguments.images,
        rois=arguments.rois,
        repetitions=arguments.repetitions,
        warm_up=arguments.warm_up,
        training=not arguments.no_train,
    )
    return {"benchmark": "detector", **result}


def has_same_features(result: dict[str, Any]) -> bool:
    """Whether both backends agree (or only one was measured)."""
    difference = result["max_feature_difference"]
    return difference is None or difference <= TOLERANCE


def print_detector_result(result: dict[str, Any]) -> None:
    """A short table for people."""
    machine, settings = result["machine"], result["settings"]
    height, width = settings["image_size"]
    print(f"{machine['device']}, {machine['cpu']}, {machine['threads']} threads, torch {machine['torch']}")
    print(f"{settings['config']}, {settings['images']} x {height} x {width} pixels, float32")
    for name, case in result["cases"].items():
        for backend, times in case["times"].items():
            print(f"  {name:14s} {backend:12s} {times['median']:8.3f} s ({times['min']:.3f} .. {times['max']:.3f})")
        if "ratio" in case:
            print(f"  {name:14s} {'ratio':12s} {case['ratio']:8.3f}")
    if "detectron2" not in result["backends"]:
        print("Detectron2 is not installed: only the built-in detector was measured.")
    if not has_same_features(result):
        print(f"The backends' features differ by {result['max_feature_difference']:.2g}.", file=sys.stderr)


def run_train(arguments: argparse.Namespace) -> dict[str, Any]:
    """The measurement that the command line describes."""
    preset = PRESETS[arguments.preset] if arguments.config is None else Preset(arguments.config, None, (None,))
    config = load_config(preset.config, arguments.overrides)
    image_size = tuple(arguments.image_size) if arguments.image_size else preset.image_size
    name = arguments.preset if arguments.config is None else str(arguments.config)
    if arguments.sweep:
        rois = arguments.rois or [number for number in preset.rois if number is not None]
        if not rois:
            raise ValueError("Give the boxes per image with --rois, such as --rois 36,100.")
        result = benchmark_steps(
            config,
            rois=rois,
            image_size=image_size,
            repetitions=arguments.repetitions,
            warm_up=arguments.warm_up,
        )
        return {"benchmark": "steps", "config": name, "overrides": arguments.overrides, **result}
    result = benchmark_training(
        config,
        rois=arguments.rois or preset.rois,
        image_size=image_size,
        repetitions=arguments.repetitions,
        warm_up=arguments.warm_up,
    )
    return {"benchmark": "train", "config": name, "overrides": arguments.overrides, **result}


def is_same_update(result: dict[str, Any]) -> bool:
    """Whether loss and gradients agree in every case."""
    checks = [case["checks"] for case in result["cases"]]
    return all(
        check["loss_difference"] <= TOLERANCE * abs(check["loss"]) and check["max_gradient_difference"] <= TOLERANCE
        for check in checks
    )


def print_steps(result: dict[str, Any]) -> None:
    """A table for people, in Markdown."""
    machine, settings = result["machine"], result["settings"]
    height, width = settings["image_size"]
    print(f"{machine['device']}, {machine['cpu']}, {machine['threads']} threads, torch {machine['torch']}")
    print(
        f"{settings['images_per_batch']} images of {height} x {width} pixels, {settings['parameters'] / 1e6:.1f} M "
        f"parameters, {settings['repetitions']} repetitions"
    )
    print("| boxes | texts per image | precision | checkpointing | s per step | of it forward + backward | peak GiB |")
    print("|---:|---:|---|---|---:|---:|---:|")
    for case in result["cases"]:
        print(
            f"| {case['rois']} | {case['texts_per_image']} | {case['precision']} | "
            f"{'on' if case['activation_checkpointing'] else 'off'} | {case['seconds']:.2f} | "
            f"{case['seconds_forward_backward']:.2f} | {case['peak_gib']:.2f} |"
        )


def print_result(result: dict[str, Any]) -> None:
    """A short table for people."""
    machine, settings = result["machine"], result["settings"]
    print(f"{machine['device']}, {machine['cpu']}, {machine['threads']} threads, torch {machine['torch']}")
    height, width = settings["image_size"]
    texts = settings["texts_per_image"]
    print(
        f"{settings['images_per_batch']} images of {height} x {width} pixels with {texts} texts each, "
        f"{settings['parameters'] / 1e6:.1f} M parameters, {settings['repetitions']} repetitions"
    )
    for case in result["cases"]:
        if case["rois"] is not None:
            print(f"{case['rois']} boxes per image:")
        for name, label in (("grouped", f"1 batch of {texts} texts"), ("ungrouped", f"{texts} batches of 1 text")):
            times, speed = case["times"][name], case["texts_per_second"][name]
            spread = f"({times['min']:.3f} .. {times['max']:.3f})"
            print(f"  {label:24s} {times['median']:8.3f} s {spread:22s} {speed:8.2f} texts/s")
        for group in ("ratios", "checks"):
            for name, value in case[group].items():
                print(f"  {group}.{name:32s} {value:.4g}")
    if not all(case["checks"]["loss"] for case in result["cases"]):
        print("The loss before training is 0 (no region fits a text), so the check of the update says nothing.")
    if not is_same_update(result):
        print("The grouped and the ungrouped batches do not give the same loss and gradients.", file=sys.stderr)


if __name__ == "__main__":
    raise SystemExit(main())
