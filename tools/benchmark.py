"""Measure the speed and memory of detectors, training, evaluation, answers and data loading on this machine.

    python tools/benchmark.py detector --detector-config configs/detector/R_50_FPN.yaml --boxes 36 --boxes 100
    python tools/benchmark.py train --precision bf16 --against CHECKOUT --pairs 5 --output FILE.json --chart FILE.png
    python tools/benchmark.py memory --config configs/benchmark/train_base.yaml --image-size 600 800 --boxes 36
    python tools/benchmark.py ask --run runs/demo_refcoco --image IMAGE --text "the small red circle"
    python tools/benchmark.py estimate --config configs/vqa/lxmert.yaml data.root=DATA --examples 632117 --epochs 4

detector  features of given boxes, whole inference and a training step, with the same random weights: built in, and by
          torchvision (detector/published/torchvision_R_50_FPN_v2.yaml) or Detectron2 (others, where it is installed)
train     an optimiser step over I images with k texts each in one batch ("grouped"), one text per batch ("ungrouped": k
          passes over the images, gradients accumulated), and only the first text of each image ("single")
official  such a step ("grouped"), and one with the same numbers of images, boxes and wordpieces in the official VL-BERT
          code of --checkout: k passes over the images, gradients accumulated, and torch's AdamW
evaluate  reading and predicting a batch, for each source of boxes in `eval.boxes`
ask       answers of a trained run
data      some batches, read by this process or by `data.workers` others; images/s are per worker, and
          `images per core second` is the best rate of this process by its own CPU time, whatever else runs
memory    a training step with stored and recomputed activations, for 1 and k texts per image, each in its own process
estimate  nothing is measured: a roofline of the recipes in configs/benchmark/epochs.yaml, or of --config: FLOPs per
          example, GiB of memory on each of --gpus GPUs, and hours on one / on all of them

Variants take turns, in alternating order. On a busy machine, --clock cpu measures CPU seconds; set OMP_NUM_THREADS=1.
`ratio`: a median / that of the first variant, or the median of this / other over the pairs of --against. A
multiplication and an addition are 2 FLOPs; those of matrix products and convolutions are counted. `share`: their rate /
the best one of a large matrix product and a 3x3 convolution in the same run. `peak`: memory allocated on the GPU; on
the CPU, the peak resident set of the process so far.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from accelerate.utils import DistributedDataParallelKwargs
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, flop_registry
from torchvision.models import detection
from tqdm.auto import tqdm

from detector.checkpoint import load_weights
from detector.config import DetectorConfig
from detector.errors import UserError
from detector.faster_rcnn import FasterRCNN, pad_to_multiple
from detector.images import ResizeRule
from detector.io import read_json, read_yaml, write_json
from detector.roi_pooler import RoIPooler
from detector.structures import DetectionTargets, ImageBatch, Loss, PrecomputedFeatures, Regions
from detector.weight_names import from_torchvision_detector
from e2e_vl.cli.main import print_errors
from e2e_vl.config import BoxSource, RunConfig
from e2e_vl.config_files import load_config
from e2e_vl.data.batching import BatchLoader, GroupedBatchSampler, Request, canvas_size
from e2e_vl.model import VisionLanguageModel
from e2e_vl.run.build import Run, build_detector, build_encoder, build_examples, build_run, resolve_config
from e2e_vl.run.evaluate import Evaluator
from e2e_vl.run.launch import make_accelerator
from e2e_vl.run.train import Trainer
from e2e_vl.structures import Batch, RegionLabels, TextBatch
from e2e_vl.tasks.config import MaskedRegionsConfig, ObjectLabelsConfig, RegionFeaturesConfig

ROOT = Path(__file__).resolve().parents[1]
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BATCHES = 16  # in a pass of `data`, at most
SAMPLED_ROIS = 64  # of each image, for the detection losses
OBJECTS = 8  # annotated objects of each image in the training step of a detector

Plan = dict[str, dict[str, tuple[Callable[[], Any], float]]]  # group -> variant -> step, and the images it handles
Rows = dict[str, dict[str, dict[str, Any]]]  # group -> variant -> numbers


@print_errors
def main(argv: list[str] | None = None) -> int:
    # options that are not passed on to the processes that are started
    outer_parser = argparse.ArgumentParser(add_help=False)
    outer_parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="compare this checkout with another one")
    outer_parser.add_argument("--pairs", type=int, default=5, help="runs of each checkout, in turn (default: 5)")
    outer_parser.add_argument("--output", type=Path, metavar="JSON", help="write all numbers to this file")
    outer_parser.add_argument("--chart", type=Path, metavar="PNG", help="draw medians and ranges")
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter, parents=[outer_parser])
    parser.add_argument("command", choices=[*PLANS, "memory", "estimate"])
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that override those of --config")
    default_device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument(
        "--device", type=torch.device, default=default_device, help="cpu or cuda (default: cuda if present)"
    )
    parser.add_argument("--precision", choices=DTYPES, default="fp32")
    parser.add_argument("--repetitions", type=int, default=5, help="timed calls of each variant (default: 5)")
    parser.add_argument("--only", metavar="VARIANT", help="the only variant to measure, such as grouped")
    parser.add_argument("--config", type=Path, default=ROOT / "configs/benchmark/train.yaml", help="settings of a run")
    parser.add_argument("--boxes", type=int, action="append", help="boxes per image; `detector` takes several --boxes")
    parser.add_argument("--image-size", type=int, nargs=2, metavar=("H", "W"), help="pixels of the padded images")
    parser.add_argument("--detector-config", type=Path, default=ROOT / "configs/detector/vl_bert_R_101.yaml")
    parser.add_argument("--checkout", type=Path, help="the official VL-BERT code, for `official`")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: CPU seconds of this process, all threads")
    parser.add_argument("--run", type=Path, help="run directory or saved model of `ask`")
    parser.add_argument("--image", type=Path)
    parser.add_argument("--text")
    parser.add_argument("--examples", type=int, help="`estimate` of --config, with so many texts in an epoch")
    parser.add_argument("--words", type=int, default=14, help="... and so many wordpieces in each (default: 14)")
    parser.add_argument("--epochs", type=float, default=1, help="of `estimate` (default: 1)")
    parser.add_argument("--gpus", type=int, default=4, help="... on one GPU, and on so many (default: 4)")
    outer_arguments, words = outer_parser.parse_known_args(argv)
    arguments = parser.parse_intermixed_args(words)  # settings may stand between options

    if arguments.command == "estimate":
        has_examples = arguments.examples is not None
        has_config = arguments.config != parser.get_default("config")
        if has_examples != has_config:
            parser.error("estimate needs both of --config and --examples, or neither")
        for line in estimate(arguments):
            print(line, flush=True)
        return 0

    on_cpu = arguments.device.type == "cpu"
    os.environ["ACCELERATE_USE_CPU"] = str(on_cpu).lower()
    if on_cpu:
        device_name = platform.processor() or "cpu"
    else:
        device_name = torch.cuda.get_device_name()
    machine = {"device": device_name, "threads": torch.get_num_threads(), "torch": torch.__version__}
    result = {"machine": machine, "command": words}
    if outer_arguments.against is not None:
        result |= compare_checkouts(words, outer_arguments.against.resolve(), outer_arguments.pairs)
    elif arguments.command == "memory":
        result |= measure_memory(words, arguments)
    else:
        with tempfile.TemporaryDirectory() as arguments.folder:
            result |= measure(arguments)

    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    print("\n".join(describe(result)))
    output = outer_arguments.output
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_json(output, result)
    chart = outer_arguments.chart
    if chart is not None:
        chart.parent.mkdir(parents=True, exist_ok=True)
        draw(result["cases"], f"{arguments.command} on {device_name}", chart)
    return 0


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure times, FLOPs and peak memory of every step of a command, and the best rates of the device."""
    plan, details = PLANS[arguments.command](arguments)
    clock = CLOCKS[arguments.clock]
    best_tflops = best_rates(arguments.device, DTYPES[arguments.precision], clock)
    cases: Rows = {}
    for group, steps in plan.items():
        calls = {name: call for name, (call, _) in steps.items() if arguments.only in (None, name)}
        if arguments.command == "data":  # it starts processes, which would count forever
            flops = dict.fromkeys(calls, 0)
        else:
            flops = {name: count_flops(call) for name, call in calls.items()}
        cases[group] = take_turns(calls, arguments.repetitions, arguments.device, clock)
        for name, row in cases[group].items():
            _, images = steps[name]
            row["gflop"] = flops[name] / 1e9
            row["tflops"] = flops[name] / row["median"] / 1e12
            row["share"] = row["tflops"] / max(best_tflops.values())
            row["images_per_second"] = images / row["median"]
    return {"best_tflops": best_tflops, "cases": cases, **details}


def take_turns(
    calls: dict[str, Callable], repetitions: int, device: torch.device, clock: Callable[[], float] = time.perf_counter
) -> dict[str, dict[str, Any]]:
    """Measure seconds and peak memory of each call, after a first one; they take turns, in alternating order."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    peaks = dict.fromkeys(calls, 0)  # bytes
    on_gpu = device.type == "cuda"
    for repetition in tqdm(range(repetitions + 1), leave=False):
        for name in in_turn(calls, repetition):
            if on_gpu:
                torch.cuda.reset_peak_memory_stats(device)
            started = clock()
            calls[name]()
            if on_gpu:
                torch.cuda.synchronize(device)
            seconds[name].append(clock() - started)
            if on_gpu:
                peak = torch.cuda.max_memory_allocated(device)
            else:
                peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # in kibibytes on Linux
            peaks[name] = max(peaks[name], peak)
    return {name: {**summarise(seconds[name][1:]), "peak_gib": peaks[name] / 2**30} for name in calls}


def in_turn(names: Iterable[str], repetition: int) -> list[str]:
    """Return the names in their order, or in reverse in every other repetition."""
    order = list(names)
    return order if repetition % 2 == 0 else order[::-1]


def summarise(values: list[float]) -> dict[str, Any]:
    """Return the median, the range, and the values themselves."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "values": values}


def count_flops(call: Callable[[], Any]) -> int:
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:  # others are not counted on the CPU
        call()
    return counter.get_total_flops()


def best_rates(device: torch.device, dtype: torch.dtype, clock: Callable[[], float]) -> dict[str, float]:
    """Return the TFLOP/s of a large matrix product and of a 3x3 convolution of 256 channels."""
    matrix_size, batch_size = (8192, 32) if device.type == "cuda" else (1536, 1)
    matrix = torch.randn(matrix_size, matrix_size, device=device, dtype=dtype)
    images = torch.randn(batch_size, 256, 64, 64, device=device, dtype=dtype).to(memory_format=torch.channels_last)
    kernel = torch.randn(256, 256, 3, 3, device=device, dtype=dtype).to(memory_format=torch.channels_last)
    calls = {"matrix product": lambda: matrix @ matrix, "3x3 convolution": lambda: F.conv2d(images, kernel, padding=1)}
    rows = take_turns(calls, 5, device, clock)
    return {name: count_flops(calls[name]) / row["min"] / 1e12 for name, row in rows.items()}


def measure_in_process(words: list[str], checkout: Path = ROOT) -> dict[str, Any]:
    """Return what this program measures with the code of a checkout, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        command = [sys.executable, __file__, *words, "--output", str(output)]
        environment = {**os.environ, "PYTHONPATH": str(checkout)}
        process = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if process.returncode:
            last_line = process.stderr.strip().splitlines()[-1]
            raise UserError(f"This program cannot run `{' '.join(words)}` with the code in {checkout}: {last_line}")
        return read_json(output)


def compare_checkouts(words: list[str], checkout: Path, pairs: int) -> dict[str, Any]:
    """Return medians of this checkout and another one, measured in turn, and the ratios this / other of all pairs."""
    checkouts = {"other": checkout, "this": ROOT}
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in checkouts}
    for pair in tqdm(range(pairs), desc="pairs"):
        for name in in_turn(checkouts, pair):
            results[name].append(measure_in_process(words, checkouts[name]))

    cases: Rows = {}
    for group, variants in results["this"][0]["cases"].items():
        for variant in variants:
            case: dict[str, dict[str, Any]] = {}
            medians: dict[str, list[float]] = {}
            for name, checkout_results in results.items():
                rows = [result["cases"][group][variant] for result in checkout_results]
                medians[name] = [row["median"] for row in rows]
                case[name] = {**rows[-1], **summarise(medians[name])}
            ratios = [this / other for this, other in zip(medians["this"], medians["other"], strict=True)]
            case["this"]["ratio"] = summarise(ratios)
            cases[f"{group}, {variant}"] = case
    return {"cases": cases, "best_tflops": results["this"][-1]["best_tflops"]}


def measure_memory(words: list[str], arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure a training step, each case in a process of its own, with activations stored and recomputed."""
    texts_per_image = load_config(arguments.config, arguments.overrides).data.texts_per_image
    train_words = ["train" if word == "memory" else word for word in words]
    cases: Rows = {}
    for variant, number in (("single", 1), ("grouped", texts_per_image)):
        rows: dict[str, dict[str, Any]] = {}
        for name, is_checkpointed in (("stored activations", "false"), ("recomputed activations", "true")):
            setting = f"train.activation_checkpointing={is_checkpointed}"
            result = measure_in_process([*train_words, "--only", variant, setting])
            rows[name] = result["cases"]["step"][variant]
        cases.setdefault(f"{number} texts per image", {}).update(rows)
    return {"cases": cases, "best_tflops": result["best_tflops"]}


def describe(result: dict[str, Any]) -> Iterator[str]:
    """Yield a Markdown table of all cases, and lines with everything else."""
    columns = ("", "", "s (range)", "ratio", "images/s", "GFLOP", "TFLOP/s", "share", "peak GiB")
    yield f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}"
    for group, rows in result["cases"].items():
        first_median = next(iter(rows.values()))["median"]
        for name, row in rows.items():
            if "ratio" in row:
                ratios = row["ratio"]
                ratio = f"{ratios['median']:.3f} ({ratios['min']:.3f} .. {ratios['max']:.3f})"
            else:
                ratio = f"{row['median'] / first_median:.3f}"
            yield (
                f"| {group} | {name} | {row['median']:.3f} ({row['min']:.3f} .. {row['max']:.3f}) "
                f"| {ratio} | {row['images_per_second']:.2f} | {row['gflop']:.1f} "
                f"| {row['tflops']:.3f} | {row['share']:.0%} | {row['peak_gib']:.2f} |"
            )
    yield "best rate: " + ", ".join(f"{name} {rate:.3f} TFLOP/s" for name, rate in result["best_tflops"].items())
    for key in sorted(result.keys() - {"machine", "command", "cases", "best_tflops"}):
        yield f"{key.replace('_', ' ')}: {result[key]}"


def draw(cases: Rows, title: str, path: Path) -> None:
    """Draw a bar for the median of each case, and a line for its range."""
    rows: dict[str, dict[str, Any]] = {}
    colors: list[str] = []  # a variant's number within its group
    for group, variants in cases.items():
        for number, (name, row) in enumerate(variants.items()):
            rows[f"{group}, {name}"] = row
            colors.append(f"C{number}")
    figure = Figure(figsize=(8, 1.2 + 0.4 * len(rows)), layout="constrained")
    axes = figure.subplots()
    axes.barh(list(rows), [row["median"] for row in rows.values()], color=colors)
    minima = [row["min"] for row in rows.values()]
    maxima = [row["max"] for row in rows.values()]
    axes.hlines(list(rows), minima, maxima, colors="black")
    axes.invert_yaxis()
    axes.set(xlabel="seconds (median and range)", title=title)
    figure.savefig(path)


def open_run(arguments: argparse.Namespace, *settings: str) -> tuple[RunConfig, Run]:
    """Build the run of `--config`; synthetic scenes, and files of the run, are in a temporary folder."""
    precision = "'no'" if arguments.precision == "fp32" else arguments.precision
    words = [*arguments.overrides, *settings, f"output={arguments.folder}/run", f"train.mixed_precision={precision}"]
    config = load_config(arguments.config, words)
    if arguments.boxes is not None and config.data.boxes.train == BoxSource.ONLINE:
        raise UserError("--boxes needs given boxes; set data.boxes.train=gt, or leave --boxes out.")
    if config.data.synthetic.scenes:  # more than a batch, because not every scene has k texts
        scenes = {config.data.train_split: 4 * config.train.micro_batch_size + 8}
        words += [f"data.root={arguments.folder}/data", f"data.synthetic.scenes={scenes}"]
    config = resolve_config(load_config(arguments.config, words))
    torch.manual_seed(config.seed)
    return config, build_run(config)


def plan_train(arguments: argparse.Namespace) -> tuple[Plan, dict[str, Any]]:
    config, run = open_run(arguments, "data.flip=0")
    images = config.train.micro_batch_size
    grouped, *singles = make_batches(arguments, config, run)
    trainer = make_trainer(config, run)
    steps = {
        "ungrouped": (lambda: trainer.train_step(singles), images),
        "grouped": (lambda: trainer.train_step([grouped]), images),
        "single": (lambda: trainer.train_step(singles[:1]), images),
    }
    pixels = list(grouped.images.pixels.shape[-2:])
    return {"step": steps}, {"images": images, "texts_per_image": config.data.texts_per_image, "pixels": pixels}


def plan_official(arguments: argparse.Namespace) -> tuple[Plan, dict[str, Any]]:
    from official_vl_bert import OfficialTrainer

    if arguments.checkout is None:
        raise UserError("official needs --checkout, a clone of github.com/jackroos/VL-BERT.")
    config, run = open_run(arguments, "data.flip=0")
    images = config.train.micro_batch_size
    grouped, *singles = make_batches(arguments, config, run)
    trainer = make_trainer(config, run)
    official = OfficialTrainer(arguments.checkout.resolve(), arguments.device, autocast(arguments))
    steps = {
        "grouped": (lambda: trainer.train_step([grouped]), images),
        "official": (lambda: official.train_step(singles), images),
    }
    return {"step": steps}, {"texts_per_image": config.data.texts_per_image}


def make_trainer(config: RunConfig, run: Run) -> Trainer:
    handlers = [DistributedDataParallelKwargs()]  # of which Trainer sets fields
    accelerator = make_accelerator(config.train.mixed_precision, kwargs_handlers=handlers)
    return Trainer(config, accelerator, run, checkpoint=None)


def make_batches(arguments: argparse.Namespace, config: RunConfig, run: Run) -> list[Batch]:
    """Make a batch of I images with k texts each, and k batches with one text of each image."""
    images = config.train.micro_batch_size
    texts_per_image = config.data.texts_per_image

    # only images with enough texts are read; the indices of the groups stay
    groups = [[] if len(group) < texts_per_image else group[:texts_per_image] for group in run.train_data.groups]
    grouped_requests = next(iter(GroupedBatchSampler(groups, images, texts_per_image, shuffle=False)))
    request_lists = [grouped_requests]
    for position in range(texts_per_image):
        request_lists.append(
            [Request(request.group, request.texts[position : position + 1]) for request in grouped_requests]
        )
    batches: list[Batch] = []
    for requests in request_lists:
        examples = [run.train_data[request] for request in requests]
        batches.append(run.collate(examples, pad_to=arguments.image_size))
    if arguments.boxes is not None:
        count = arguments.boxes[0]
        boxes: list[Tensor] = []
        for image_boxes, size in zip(batches[0].boxes, batches[0].images.sizes, strict=True):
            added_boxes = random_boxes(count) * size.flip(0).repeat(2)
            boxes.append(torch.cat([image_boxes, added_boxes])[:count])
        batches = [dataclasses.replace(batch, boxes=boxes) for batch in batches]
    return batches


def plan_evaluate(arguments: argparse.Namespace) -> tuple[Plan, dict[str, Any]]:
    config, run = open_run(arguments, "data.workers=0")
    accelerator = make_accelerator(config.train.mixed_precision)
    model = run.model.to(arguments.device)
    images = config.eval.images_per_batch
    steps = {}
    for source in config.eval.boxes:
        data = build_examples(config, model, run.tokenizer, config.data.train_split, boxes=source)
        call = functools.partial(Evaluator(config, accelerator).predict_texts, model, data, max_images=images)
        steps[str(source)] = (call, min(images, len(data.groups)))
    return {"batch": steps}, {}


def plan_data(arguments: argparse.Namespace) -> tuple[Plan, dict[str, Any]]:
    config, run = open_run(arguments)
    images_per_batch = config.train.micro_batch_size
    sampler = GroupedBatchSampler(run.train_data.groups, images_per_batch, config.data.texts_per_image)
    images = images_per_batch * min(BATCHES, len(sampler))
    steps = {}
    for workers in dict.fromkeys((0, config.data.workers)):
        loader = BatchLoader(run.train_data, sampler, run.collate, workers=workers, keep_workers=True)
        steps[f"{workers} workers"] = (functools.partial(read_batches, loader), images / max(workers, 1))
    pixels = next(iter(loader)).images.pixels
    details = {
        "batch": f"{pixels.dtype} {list(pixels.shape)}, {pixels.nbytes / 1e6:.1f} MB",
        "images_per_core_second": round(images / min(cpu_seconds(steps["0 workers"][0], arguments.repetitions)), 1),
    }
    return {"pass": steps}, details


def cpu_seconds(call: Callable[[], Any], repetitions: int) -> list[float]:
    """Return the CPU time of this process in each call, after a first one."""
    call()
    seconds: list[float] = []
    for _ in range(repetitions):
        started = time.process_time()
        call()
        seconds.append(time.process_time() - started)
    return seconds


def read_batches(loader: BatchLoader) -> None:
    for _ in itertools.islice(loader, BATCHES):
        pass


def plan_ask(arguments: argparse.Namespace) -> tuple[Plan, dict[str, Any]]:
    """Plan an answer; `seconds` are those until the model is loaded, and of its first answer."""
    import e2e_vl

    if None in (arguments.run, arguments.image, arguments.text):
        raise UserError("ask needs --run, --image and --text.")
    started = time.perf_counter()
    model = e2e_vl.load(arguments.run, device=arguments.device)
    loaded = time.perf_counter()

    def ask() -> None:
        with autocast(arguments):
            model.ask(arguments.image, arguments.text)

    ask()
    seconds = {"load": loaded - started, "first": time.perf_counter() - loaded}
    return {"answer": {"ask": (ask, 1)}}, {"seconds": seconds}


def autocast(arguments: argparse.Namespace) -> torch.autocast:
    dtype = DTYPES[arguments.precision]
    return torch.autocast(arguments.device.type, dtype, enabled=dtype != torch.float32)


def random_boxes(number: int) -> Tensor:
    """Draw boxes: top-left corners in the first half of the image, sides of 10 to 50 % of its sides.

    Returns:
        float32 [number, 4], xyxy in units of the image.
    """
    top_left = torch.rand(number, 2) * 0.5
    bottom_right = top_left + 0.1 + torch.rand(number, 2) * 0.4
    return torch.cat([top_left, bottom_right], dim=1)


def plan_detector(arguments: argparse.Namespace) -> tuple[Plan, dict[str, Any]]:
    torch.manual_seed(0)
    detectors = make_detectors(arguments.detector_config)
    for detector in detectors.values():
        detector.to(arguments.device)
    detectors["builtin"].to(memory_format=torch.channels_last)  # as `train.channels_last` does
    height, width = arguments.image_size or (600, 1000)
    sizes = torch.tensor([(height, width)])
    batch = ImageBatch(torch.randn(1, 3, height, width) * 50, sizes, sizes, ["image"]).to(arguments.device)
    precision = autocast(arguments)

    plan: Plan = {}
    difference = 0.0
    for count in arguments.boxes or [100, 36]:
        boxes = [(random_boxes(count) * torch.tensor([width, height, width, height])).to(arguments.device)]
        calls = {
            name: functools.partial(get_features, precision, detector, batch, boxes)
            for name, detector in detectors.items()
        }
        features = [call() for call in calls.values()]
        ours = features[0]
        theirs = features[-1]  # of the built-in detector again, if there is no other one
        difference = max(difference, ((ours - theirs).abs().max() / theirs.abs().max()).item())
        plan[f"features of {count} boxes"] = {name: (call, 1) for name, call in calls.items()}

    calls = {name: functools.partial(detect, precision, detector, batch) for name, detector in detectors.items()}
    plan["whole inference"] = {name: (call, 1) for name, call in calls.items()}

    training_steps = {}  # with the last boxes; they change the weights
    for name, detector in detectors.items():
        parameters = [parameter for parameter in detector.parameters() if parameter.requires_grad]
        optimizer = torch.optim.SGD(parameters, lr=1e-6)
        training_steps[name] = (functools.partial(train_detector, precision, detector, batch, boxes, optimizer), 1)
    plan["training step"] = training_steps
    return plan, {"feature_difference": difference}


@torch.no_grad()
def get_features(autocast: torch.autocast, detector: nn.Module, batch: ImageBatch, boxes: list[Tensor]) -> Tensor:
    detector.eval()
    with autocast:
        return torch.cat(detector(batch, boxes).features)


@torch.no_grad()
def detect(autocast: torch.autocast, detector: nn.Module, batch: ImageBatch) -> None:
    """Predict boxes, and the features of the chosen ones."""
    detector.eval()
    with autocast:
        detector(batch)


def train_detector(
    autocast: torch.autocast, detector: nn.Module, batch: ImageBatch, boxes: list[Tensor], optimizer: torch.optim.SGD
) -> None:
    """Train one step: forward with detection losses and features of the boxes, backward of both, and an update."""
    detector.train()
    object_boxes = [image_boxes[:OBJECTS] for image_boxes in boxes]
    object_classes = [image_boxes.new_zeros(len(image_boxes), dtype=torch.int64) for image_boxes in object_boxes]
    with autocast:
        regions = detector(batch, boxes, DetectionTargets(object_boxes, object_classes))
        detection_loss = sum(loss.mean for loss in regions.losses.values())
        loss = detection_loss + torch.cat(regions.features).float().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def make_detectors(file: Path) -> dict[str, nn.Module]:
    """Make the built-in detector and another one with the same weights, if there is one."""
    model_settings: dict[str, Any] = {"ROI_HEADS": {"BATCH_SIZE_PER_IMAGE": SAMPLED_ROIS}}
    is_torchvision = file.stem == "torchvision_R_50_FPN_v2"
    if is_torchvision:
        model_settings["BACKBONE"] = {"FREEZE_AT": 0}  # torchvision trains all of it
    tree = {"_BASE_": str(file.resolve()), "MODEL": model_settings}
    config = DetectorConfig.from_yaml(tree)
    builtin = FasterRCNN(config)
    if is_torchvision:
        options = {"num_classes": config.roi_heads.num_classes + 1, "box_batch_size_per_image": SAMPLED_ROIS}
        model = detection.fasterrcnn_resnet50_fpn_v2(weights=None, weights_backbone=None, **options)
        load_weights(builtin, from_torchvision_detector(model.state_dict()), file.stem)
        return {"builtin": builtin, "torchvision": TorchvisionDetector(model)}
    try:
        from detector.detectron2_backend import Detectron2Detector
    except ImportError:
        return {"builtin": builtin}
    other = Detectron2Detector(config)
    other.load_state_dict(builtin.state_dict())
    return {"builtin": builtin, "detectron2": other}


class TorchvisionDetector(nn.Module):
    """Torchvision's Faster R-CNN with the calls of this project's detectors."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, images: ImageBatch, boxes: list[Tensor] | None = None, targets: DetectionTargets | None = None
    ) -> Regions:
        """Return the regions of images that are resized and normalised already, without torchvision's own transform."""
        model = self.model
        heads = model.roi_heads
        sizes = [(height, width) for height, width in images.sizes.tolist()]
        pixels = pad_to_multiple(images.pixels, 32)
        maps = model.backbone(pixels)
        batch = detection.image_list.ImageList(pixels, sizes)
        losses = {}
        if boxes is None:
            proposals, _ = model.rpn(batch, maps)
            detections, _ = heads(maps, proposals, sizes)
            boxes = [rows["boxes"] for rows in detections]
        if targets is not None:
            objects = [
                {"boxes": image_boxes, "labels": classes + 1}
                for image_boxes, classes in zip(targets.boxes, targets.classes, strict=True)
            ]
            proposals, losses = model.rpn(batch, maps, objects)
            _, head_losses = heads(maps, proposals, sizes, objects)
            losses |= head_losses
        features = heads.box_head(heads.box_roi_pool(maps, boxes, sizes))
        logits = heads.box_predictor.cls_score(features)
        counts = [len(image_boxes) for image_boxes in boxes]
        means = {name: Loss(value, features.new_ones(())) for name, value in losses.items()}
        return Regions(boxes, list(features.split(counts)), list(logits.split(counts)), losses=means)


PLANS = {
    "detector": plan_detector,
    "train": plan_train,
    "official": plan_official,
    "evaluate": plan_evaluate,
    "ask": plan_ask,
    "data": plan_data,
}


class Roofline(TorchDispatchMode):
    """Collects the FLOPs of each operation, and the bytes that it reads and writes."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[float, float]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if not function.is_view:
            count = flop_registry.get(function._overloadpacket)
            flops = 0 if count is None else count(*args, **kwargs, out_val=result)
            tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
            self.operations.append((flops, sum(tensor.nbytes for tensor in tensors)))
        return result

    def seconds(self, tflops: float, gbytes: float) -> float:
        """Return the seconds in which every operation takes as long as its FLOPs or its bytes do."""
        return sum(max(flops / tflops / 1e12, moved / gbytes / 1e9) for flops, moved in self.operations)


def count_pass(config: RunConfig, boxes: int, words: int, gpus: int) -> tuple[Roofline, int, float]:
    """Count a pass of each of some GPUs in bf16 over a micro-batch of images of 640 x 480 pixels, forward and backward.

    It is without the task's head, detection losses and text corpora.

    Args:
        boxes, words: boxes of an image, and wordpieces of a sequence.

    Returns:
        Its operations, its number of examples, and the GiB of weights, gradients, AdamW's moments and saved
        activations, without work space.
    """
    texts = max(config.train.micro_batch_size // gpus, 1)
    images_per_text = 2 if config.task.name == "nlvr2" else 1
    choices = 4 if config.task.name == "vcr" else 1
    images = texts * images_per_text
    sequences = texts * choices

    resize = config.data.resize
    size = ResizeRule(resize.short_edge[-1], resize.long_edge, resize.rounding).target_size(480, 640)
    canvas = size if config.data.canvas is None else canvas_size([size], config.data.canvas)
    sizes = torch.tensor([size] * images)
    image_index = torch.arange(images).view(texts, images_per_text).repeat_interleave(choices, dim=0)
    with torch.device("meta"):  # nothing is computed
        detector = build_detector(config)
        encoder = build_encoder(config, 30522, detector.feature_dim)  # words of bert-base-uncased
        token_ids = torch.ones(sequences, words, dtype=torch.int64)
        pixels = torch.empty(images, 3, *canvas)
        image_boxes = torch.empty(boxes, 4)
        box_classes = torch.empty(boxes, dtype=torch.int64)
        features = torch.empty(images, boxes + 1, detector.feature_dim)  # the first: of the whole image
    precomputed = PrecomputedFeatures(list(features[:, 1:]), features[:, 0])
    batch = Batch(
        ImageBatch(pixels, sizes, sizes, ["image"] * images, precomputed),
        [image_boxes] * images,
        TextBatch(token_ids, token_ids, token_ids.bool(), lengths=torch.full((sequences,), words)),
        image_index=image_index,
        region_labels=RegionLabels(classes=[box_classes] * images),
    )
    model = VisionLanguageModel(detector, encoder, nn.Identity(), freeze_detector=config.detector.freeze).train()
    saved_bytes: dict[int, int] = {}  # of each storage

    def save(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved_bytes[storage._cdata] = storage.nbytes()
        return tensor

    # tensors on "meta" have no values: every check is passed, the only number that is read is that of the boxes, and
    # all boxes are pooled from the first level of a pyramid
    values = mock.patch.multiple(Tensor, __bool__=lambda _: True, __int__=lambda _: boxes)
    pool = mock.patch.object(
        RoIPooler, "__call__", lambda self, maps, rois, step=1: self._pool(maps[0], rois, self.strides[0], step)
    )
    precision = mock.patch("torch.is_autocast_enabled", lambda *_: False)
    with values, pool, precision, sdpa_kernel(SDPBackend.MATH), Roofline() as roofline:
        if has_teacher(config):
            with torch.no_grad():
                model.detector(batch.images, batch.boxes)
        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            _, _, encoded = model.encode(batch)
        (encoded.text.sum() + encoded.regions.sum()).backward()

    # numbers are float32 here, and half as large in bf16
    weight_storages = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    float32_bytes = sum(size for storage, size in saved_bytes.items() if storage not in weight_storages)
    activations = float32_bytes / 2
    roofline.operations = [(flops, moved / 2) for flops, moved in roofline.operations]

    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    frozen = sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad)
    # AdamW reads 4 float32 numbers of each weight, writes 3
    roofline.operations.append((0, 28 * trained / config.train.gradient_accumulation_steps))
    gib = (18 * trained + 6 * frozen + activations) / 2**30  # with copies in bf16
    return roofline, texts, gib


def has_teacher(config: RunConfig) -> bool:
    """Return whether the detector labels the regions that an objective of pre-training predicts."""
    predicts_regions = (MaskedRegionsConfig, ObjectLabelsConfig, RegionFeaturesConfig)
    objectives = getattr(config.task.config, "objectives", {}).values()
    weights = [objective.weight for objective in objectives if isinstance(objective, predicts_regions)]
    return any(weights) and config.task.config.teacher != "file"


def estimate(arguments: argparse.Namespace) -> Iterator[str]:
    """Yield hours of each recipe, or of `--config`, on one GPU and on `--gpus` of them, as a Markdown table."""
    table = read_yaml(ROOT / "configs" / "benchmark" / "epochs.yaml")
    if arguments.examples is None:
        recipes = {ROOT / "configs" / name: recipe for name, recipe in table["recipes"].items()}
    else:
        boxes = (arguments.boxes or [36])[0]
        recipe = {"examples": arguments.examples, "boxes": boxes, "words": arguments.words}
        recipes = {arguments.config: recipe}
    speedup = 1 + (arguments.gpus - 1) * table["scaling"]
    yield f"| | examples | GFLOP | GiB | {' | '.join(table['gpus'])} |\n|---|{'---:|' * (3 + len(table['gpus']))}"
    for path, recipe in recipes.items():
        boxes_of_a_file = ("data.boxes.train=detections", "data.files.detections=unused")
        settings = ("data.root=unused", *boxes_of_a_file, "detector.weights=null", "encoder.weights=null")
        config = resolve_config(load_config(path, [*settings, *arguments.overrides]))
        roofline, number, gib = count_pass(config, recipe["boxes"], recipe["words"], arguments.gpus)
        passes = recipe["examples"] * arguments.epochs / number
        cells = []
        for rates in table["gpus"].values():
            hours = roofline.seconds(*rates) / table["share"] * passes / 3600
            cells.append(f"{format_hours(hours)} / {format_hours(hours / speedup)}")
        gflop = sum(flops for flops, _ in roofline.operations) / number / 1e9
        name = f"{path.parent.name}/{path.stem}"
        yield f"| {name} | {recipe['examples']:,} | {gflop:.0f} | {gib:.1f} | {' | '.join(cells)} |"


def format_hours(hours: float) -> str:
    return f"{hours:.2f}" if hours < 1 else f"{hours:.1f}"


if __name__ == "__main__":
    raise SystemExit(main())
