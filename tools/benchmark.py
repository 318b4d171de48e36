"""Measure the speed and memory of detectors, training, evaluation, answers and data loading on this machine.

    python tools/benchmark.py detector --detector-config configs/detector/R_50_FPN.yaml --boxes 36 --boxes 100
    python tools/benchmark.py train --precision bf16 --against CHECKOUT --pairs 5 --output FILE.json --chart FILE.png
    python tools/benchmark.py memory --config configs/benchmark/train_base.yaml --image-size 600 800 --boxes 36
    python tools/benchmark.py ask --run runs/demo_refcoco --image IMAGE --text "the small red circle"
    python tools/benchmark.py estimate --config configs/vqa/lxmert.yaml data.root=DATA --examples 632117 --epochs 4

detector  features of given boxes and a training step: built in, and by torchvision (detector/published/
          torchvision_R_50_FPN_v2.yaml) or Detectron2 (all others, where it is installed), with the same weights
train     an optimiser step over I images with k texts each in one batch ("grouped"), one text per batch ("ungrouped": k
          passes over the images, gradients accumulated), and only the first text of each image ("single")
evaluate  reading and predicting a batch, for each source of boxes in `eval.boxes`
ask       answers of a trained run
data      some batches, read by this process or by `data.workers` others; images/s are per worker
memory    a training step with stored and recomputed activations, for 1 and k texts per image, each in its own process
estimate  nothing is measured: a roofline of the recipes in configs/benchmark/epochs.yaml, or of --config: FLOPs per
          example, GiB of memory on each of --gpus GPUs, and hours on one / on all of them

Variants take turns, in alternating order. `ratio`: a median / that of the first variant, or the median of this / other
over the pairs of --against. A multiplication and an addition are 2 FLOPs; those of matrix products and convolutions are
counted. `share`: their rate / the best one of a large matrix product and a 3x3 convolution in the same run. `peak`:
memory allocated on the GPU; on the CPU, the peak resident set of the process so far.
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
from collections import deque
from collections.abc import Callable, Iterator
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
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BATCHES = 16  # in a pass of `data`, at most
SAMPLED_ROIS = 64  # of each image, for the detection losses
OBJECTS = 8  # annotated objects of each image in the training step of a detector

Plan = dict[str, dict[str, tuple[Callable[[], Any], float]]]  # group -> variant -> step, and the images it handles
Rows = dict[str, dict[str, dict[str, Any]]]  # group -> variant -> numbers


@print_errors
def main(argv: list[str] | None = None) -> int:
    outer = argparse.ArgumentParser(add_help=False)  # options that are not passed on to the processes that are started
    outer.add_argument("--against", type=Path, metavar="CHECKOUT", help="compare this checkout with another one")
    outer.add_argument("--pairs", type=int, default=5, help="runs of each checkout, in turn (default: 5)")
    outer.add_argument("--output", type=Path, metavar="JSON", help="write all numbers to this file")
    outer.add_argument("--chart", type=Path, metavar="PNG", help="draw medians and ranges")
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shape, parents=[outer])
    parser.add_argument("command", choices=[*PLANS, "memory", "estimate"])
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that override those of --config")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=torch.device, default=device, help="cpu or cuda (default: cuda if present)")
    parser.add_argument("--precision", choices=DTYPES, default="fp32")
    parser.add_argument("--repetitions", type=int, default=5, help="timed calls of each variant (default: 5)")
    parser.add_argument("--only", metavar="VARIANT", help="the only variant to measure, such as grouped")
    parser.add_argument("--config", type=Path, default=ROOT / "configs/benchmark/train.yaml", help="settings of a run")
    parser.add_argument("--boxes", type=int, action="append", help="boxes per image; `detector` takes several --boxes")
    parser.add_argument("--image-size", type=int, nargs=2, metavar=("H", "W"), help="pixels of the padded images")
    parser.add_argument("--detector-config", type=Path, default=ROOT / "configs/detector/vl_bert_R_101.yaml")
    parser.add_argument("--run", type=Path, help="run directory or saved model of `ask`")
    parser.add_argument("--image", type=Path)
    parser.add_argument("--text")
    parser.add_argument("--examples", type=int, help="`estimate` of --config, with so many texts in an epoch")
    parser.add_argument("--words", type=int, default=14, help="... and so many wordpieces in each (default: 14)")
    parser.add_argument("--epochs", type=float, default=1, help="of `estimate` (default: 1)")
    parser.add_argument("--gpus", type=int, default=4, help="... on one GPU, and on so many (default: 4)")
    own, words = outer.parse_known_args(argv)
    arguments = parser.parse_intermixed_args(words)  # settings may stand between options
    if arguments.command == "estimate":
        if (arguments.examples is None) != (arguments.config == parser.get_default("config")):
            parser.error("estimate needs both of --config and --examples, or neither")
        for line in estimate(arguments):
            print(line, flush=True)
        return 0
    on_cpu = arguments.device.type == "cpu"
    os.environ["ACCELERATE_USE_CPU"] = str(on_cpu).lower()
    device = platform.processor() or "cpu" if on_cpu else torch.cuda.get_device_name()
    machine = {"device": device, "threads": torch.get_num_threads(), "torch": torch.__version__}
    result = {"machine": machine, "command": words}
    if own.against is not None:
        result |= compare_checkouts(words, own.against.resolve(), own.pairs)
    elif arguments.command == "memory":
        result |= measure_memory(words, arguments)
    else:
        with tempfile.TemporaryDirectory() as arguments.folder:
            result |= measure(arguments)
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    print("\n".join(describe(result)))
    for path in filter(None, (own.output, own.chart)):
        path.parent.mkdir(parents=True, exist_ok=True)
    if own.output is not None:
        write_json(own.output, result)
    if own.chart is not None:
        draw(result["cases"], f"{arguments.command} on {device}", own.chart)
    return 0


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Times, FLOPs and peak memory of every step of a command, and the best rates of the device."""
    plan, details = PLANS[arguments.command](arguments)
    best, cases = best_rates(arguments.device, DTYPES[arguments.precision]), {}
    for group, steps in plan.items():
        calls = {name: call for name, (call, _) in steps.items() if arguments.only in (None, name)}
        # `data` starts processes, which would count forever
        flops = {name: 0 if arguments.command == "data" else count_flops(call) for name, call in calls.items()}
        cases[group] = take_turns(calls, arguments.repetitions, arguments.device)
        for name, row in cases[group].items():
            rate = flops[name] / row["median"] / 1e12
            row |= {"gflop": flops[name] / 1e9, "tflops": rate, "share": rate / max(best.values())}
            row["images_per_second"] = steps[name][1] / row["median"]
    return {"best_tflops": best, "cases": cases, **details}


def take_turns(calls: dict[str, Callable], repetitions: int, device: torch.device) -> dict[str, dict[str, Any]]:
    """Seconds and peak memory of each, after one call; they take turns, in alternating order."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    peaks = dict.fromkeys(calls, 0)
    on_gpu = device.type == "cuda"
    for repetition in tqdm(range(repetitions + 1), leave=False):
        for name in list(calls)[:: 1 if repetition % 2 == 0 else -1]:
            if on_gpu:
                torch.cuda.reset_peak_memory_stats(device)
            started = time.perf_counter()
            calls[name]()
            if on_gpu:
                torch.cuda.synchronize(device)
            seconds[name].append(time.perf_counter() - started)
            resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # in kibibytes on Linux
            peaks[name] = max(peaks[name], torch.cuda.max_memory_allocated(device) if on_gpu else resident)
    return {name: {**summarise(seconds[name][1:]), "peak_gib": peaks[name] / 2**30} for name in calls}


def summarise(values: list[float]) -> dict[str, Any]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "values": values}


def count_flops(call: Callable[[], Any]) -> int:
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:  # others are not counted on the CPU
        call()
    return counter.get_total_flops()


def best_rates(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """TFLOP/s of a large matrix product and of a 3x3 convolution of 256 channels."""
    side, number = (8192, 32) if device.type == "cuda" else (1536, 1)
    matrix = torch.randn(side, side, device=device, dtype=dtype)
    images = torch.randn(number, 256, 64, 64, device=device, dtype=dtype).to(memory_format=torch.channels_last)
    kernel = torch.randn(256, 256, 3, 3, device=device, dtype=dtype).to(memory_format=torch.channels_last)
    calls = {"matrix product": lambda: matrix @ matrix, "3x3 convolution": lambda: F.conv2d(images, kernel, padding=1)}
    rows = take_turns(calls, 5, device)
    return {name: count_flops(calls[name]) / row["min"] / 1e12 for name, row in rows.items()}


def measure_in_process(words: list[str], checkout: Path = ROOT) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        command = [sys.executable, __file__, *words, "--output", str(output)]
        environment = {**os.environ, "PYTHONPATH": str(checkout)}
        done = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1]
            raise UserError(f"This program cannot run `{' '.join(words)}` with the code in {checkout}: {last}")
        return read_json(output)


def compare_checkouts(words: list[str], checkout: Path, pairs: int) -> dict[str, Any]:
    """Medians of this checkout and another one, measured in turn, and the ratios this / other of all pairs."""
    results: dict[str, list[dict[str, Any]]] = {"other": [], "this": []}
    for pair in tqdm(range(pairs), desc="pairs"):
        for name in list(results)[:: 1 if pair % 2 == 0 else -1]:
            results[name].append(measure_in_process(words, ROOT if name == "this" else checkout))
    cases: Rows = {}
    for group, variants in results["this"][0]["cases"].items():
        for variant in variants:
            other, this = ([one["cases"][group][variant] for one in found] for found in results.values())
            case = cases[f"{group}, {variant}"] = {
                name: {**rows[-1], **summarise([one["median"] for one in rows])}
                for name, rows in (("other", other), ("this", this))
            }
            case["this"]["ratio"] = summarise([a["median"] / b["median"] for a, b in zip(this, other, strict=True)])
    return {"cases": cases, "best_tflops": results["this"][-1]["best_tflops"]}


def measure_memory(words: list[str], arguments: argparse.Namespace) -> dict[str, Any]:
    """A training step in a process of its own for each case."""
    texts = load_config(arguments.config, arguments.overrides).data.texts_per_image
    train = ["train" if word == "memory" else word for word in words]
    cases: Rows = {}
    for (only, number), is_checkpointed in itertools.product({"single": 1, "grouped": texts}.items(), (False, True)):
        setting = f"train.activation_checkpointing={str(is_checkpointed).lower()}"
        found = measure_in_process([*train, "--only", only, setting])
        name = "recomputed activations" if is_checkpointed else "stored activations"
        cases.setdefault(f"{number} texts per image", {})[name] = found["cases"]["step"][only]
    return {"cases": cases, "best_tflops": found["best_tflops"]}


def describe(result: dict[str, Any]) -> Iterator[str]:
    """A Markdown table of all cases, and lines with everything else."""
    columns = ("", "", "s (range)", "ratio", "images/s", "GFLOP", "TFLOP/s", "share", "peak GiB")
    yield f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}"
    for group, rows in result["cases"].items():
        for name, row in rows.items():
            ratio = row.get("ratio", {"median": row["median"] / next(iter(rows.values()))["median"]})
            spread = f" ({ratio['min']:.3f} .. {ratio['max']:.3f})" if "min" in ratio else ""
            yield (
                f"| {group} | {name} | {row['median']:.3f} ({row['min']:.3f} .. {row['max']:.3f}) "
                f"| {ratio['median']:.3f}{spread} | {row['images_per_second']:.2f} | {row['gflop']:.1f} "
                f"| {row['tflops']:.3f} | {row['share']:.0%} | {row['peak_gib']:.2f} |"
            )
    yield "best rate: " + ", ".join(f"{name} {rate:.3f} TFLOP/s" for name, rate in result["best_tflops"].items())
    for key in sorted(result.keys() - {"machine", "command", "cases", "best_tflops"}):
        yield f"{key.replace('_', ' ')}: {result[key]}"


def draw(cases: Rows, title: str, path: Path) -> None:
    """A bar for the median of each case, and a line for its range."""
    rows = {f"{group}, {name}": row for group, variants in cases.items() for name, row in variants.items()}
    medians, least, most = ([row[key] for row in rows.values()] for key in ("median", "min", "max"))
    colors = [f"C{number}" for variants in cases.values() for number in range(len(variants))]
    figure = Figure(figsize=(8, 1.2 + 0.4 * len(rows)), layout="constrained")
    axes = figure.subplots()
    axes.barh(list(rows), medians, color=colors)
    axes.hlines(list(rows), least, most, colors="black")
    axes.invert_yaxis()
    axes.set(xlabel="seconds (median and range)", title=title)
    figure.savefig(path)


def open_run(arguments: argparse.Namespace, *settings: str) -> tuple[RunConfig, Run]:
    """The run of `--config`; drawn scenes, and files of the run, are in a temporary folder."""
    precision = arguments.precision.replace("fp32", "'no'")
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
    number, texts = (
        config.train.micro_batch_size,
        config.data.texts_per_image,
    )
    rich = [group[:texts] if len(group) >= texts else [] for group in run.train_data.groups]
    requests = next(iter(GroupedBatchSampler(rich, number, texts, shuffle=False)))
    parts = [[Request(one.group, one.texts[row : row + 1]) for one in requests] for row in range(texts)]
    batches = [
        run.collate([run.train_data[one] for one in part], pad_to=arguments.image_size) for part in (requests, *parts)
    ]
    if arguments.boxes is not None:
        pairs, count = zip(batches[0].boxes, batches[0].images.sizes, strict=True), arguments.boxes[0]
        boxes = [torch.cat([own, random_boxes(count) * size.flip(0).repeat(2)])[:count] for own, size in pairs]
        batches = [dataclasses.replace(batch, boxes=boxes) for batch in batches]
    handlers = [DistributedDataParallelKwargs()]  # of which Trainer sets fields
    accelerator = make_accelerator(config.train.mixed_precision, kwargs_handlers=handlers)
    trainer = Trainer(config, accelerator, run, checkpoint=None)
    grouped, *singles = batches
    steps = {
        "ungrouped": (lambda: trainer.train_step(singles), number),
        "grouped": (lambda: trainer.train_step([grouped]), number),
        "single": (lambda: trainer.train_step(singles[:1]), number),
    }
    pixels = list(grouped.images.pixels.shape[-2:])
    return {"step": steps}, {"images": number, "texts_per_image": texts, "pixels": pixels}


def plan_evaluate(arguments: argparse.Namespace) -> tuple[Plan, dict[str, Any]]:
    config, run = open_run(arguments, "data.workers=0")
    accelerator, number = make_accelerator(config.train.mixed_precision), config.eval.images_per_batch
    model, steps = run.model.to(arguments.device), {}
    for source in config.eval.boxes:
        data = build_examples(config, model, run.tokenizer, config.data.train_split, boxes=source)
        call = functools.partial(Evaluator(config, accelerator).predict_texts, model, data, max_images=number)
        steps[str(source)] = call, min(number, len(data.groups))
    return {"batch": steps}, {}


def plan_data(arguments: argparse.Namespace) -> tuple[Plan, dict[str, Any]]:
    config, run = open_run(arguments)
    number, steps = config.train.micro_batch_size, {}
    sampler = GroupedBatchSampler(run.train_data.groups, number, config.data.texts_per_image)
    for workers in dict.fromkeys((0, config.data.workers)):
        loader = BatchLoader(run.train_data, sampler, run.collate, workers=workers, keep_workers=True)
        images = number * min(BATCHES, len(sampler)) / max(workers, 1)
        steps[f"{workers} workers"] = lambda loader=loader: deque(itertools.islice(loader, BATCHES), maxlen=0), images
    pixels = next(iter(loader)).images.pixels
    return {"pass": steps}, {"batch": f"{pixels.dtype} {list(pixels.shape)}, {pixels.nbytes / 1e6:.1f} MB"}


def plan_ask(arguments: argparse.Namespace) -> tuple[Plan, dict[str, Any]]:
    """`seconds`: until the model is loaded, and its first answer."""
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
    """float32 [number, 4], xyxy in units of the image: top-left in its first half, sides of 10 to 50 % of its sides."""
    corners = torch.rand(number, 2) * 0.5
    return torch.cat([corners, corners + 0.1 + torch.rand(number, 2) * 0.4], dim=1)


def plan_detector(arguments: argparse.Namespace) -> tuple[Plan, dict[str, Any]]:
    torch.manual_seed(0)
    detectors = {name: one.to(arguments.device) for name, one in make_detectors(arguments.detector_config).items()}
    detectors["builtin"].to(memory_format=torch.channels_last)  # as `train.channels_last` does
    height, width = arguments.image_size or (600, 1000)
    sizes, scale = torch.tensor([(height, width)]), torch.tensor([width, height, width, height])
    batch = ImageBatch(torch.randn(1, 3, height, width) * 50, sizes, sizes, ["image"]).to(arguments.device)
    plan, difference, precision = {}, 0.0, autocast(arguments)
    for count in arguments.boxes or [100, 36]:
        boxes = [(random_boxes(count) * scale).to(arguments.device)]
        calls = {name: functools.partial(get_features, precision, one, batch, boxes) for name, one in detectors.items()}
        ours, theirs = calls["builtin"](), list(calls.values())[-1]()
        difference = max(difference, ((ours - theirs).abs().max() / theirs.abs().max()).item())
        plan[f"features of {count} boxes"] = {name: (call, 1) for name, call in calls.items()}
    plan["training step"] = {}  # with the last boxes; it changes the weights
    for name, one in detectors.items():
        optimizer = torch.optim.SGD([p for p in one.parameters() if p.requires_grad], lr=1e-6)
        step = functools.partial(train_detector, precision, one, batch, boxes, optimizer)
        plan["training step"][name] = step, 1
    return plan, {"feature_difference": difference}


@torch.no_grad()
def get_features(autocast: torch.autocast, detector: nn.Module, batch: ImageBatch, boxes: list[Tensor]) -> Tensor:
    detector.eval()
    with autocast:
        return torch.cat(detector(batch, boxes).features)


def train_detector(
    autocast: torch.autocast, detector: nn.Module, batch: ImageBatch, boxes: list[Tensor], optimizer: torch.optim.SGD
) -> None:
    """Forward with detection losses and features of the boxes, backward of both, and a step."""
    detector.train()
    objects = [rows[:OBJECTS] for rows in boxes]
    targets = DetectionTargets(objects, [rows.new_zeros(len(rows), dtype=torch.int64) for rows in objects])
    with autocast:
        regions = detector(batch, boxes, targets)
        loss = sum(loss.mean for loss in regions.losses.values()) + torch.cat(regions.features).float().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def make_detectors(file: Path) -> dict[str, nn.Module]:
    """The built-in detector and another one with the same weights, if there is one."""
    sampled = {"ROI_HEADS": {"BATCH_SIZE_PER_IMAGE": SAMPLED_ROIS}}
    tree: dict[str, Any] = {"_BASE_": str(file.resolve()), "MODEL": sampled}
    is_torchvision = file.stem == "torchvision_R_50_FPN_v2"
    if is_torchvision:
        tree["MODEL"]["BACKBONE"] = {"FREEZE_AT": 0}  # torchvision trains all of it
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
    other = Detectron2Detector(Detectron2Detector.config_class.from_yaml(tree))
    other.load_state_dict(builtin.state_dict())
    return {"builtin": builtin, "detectron2": other}


class TorchvisionDetector(nn.Module):
    """Torchvision's Faster R-CNN with the calls of this project's detectors."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: ImageBatch, boxes: list[Tensor], targets: DetectionTargets | None = None) -> Regions:
        """The images are resized and normalised already; torchvision's own transform is not used."""
        model, heads = self.model, self.model.roi_heads
        sizes = [(height, width) for height, width in images.sizes.tolist()]
        pixels = pad_to_multiple(images.pixels, 32)
        maps = model.backbone(pixels)
        losses = {}
        if targets is not None:
            pairs = zip(targets.boxes, targets.classes, strict=True)
            objects = [{"boxes": rows, "labels": classes + 1} for rows, classes in pairs]
            proposals, losses = model.rpn(detection.image_list.ImageList(pixels, sizes), maps, objects)
            losses |= heads(maps, proposals, sizes, objects)[1]
        features = heads.box_head(heads.box_roi_pool(maps, boxes, sizes))
        counts = [len(rows) for rows in boxes]
        logits = heads.box_predictor.cls_score(features)
        means = {name: Loss(value, features.new_ones(())) for name, value in losses.items()}
        return Regions(boxes, list(features.split(counts)), list(logits.split(counts)), losses=means)


PLANS = {"detector": plan_detector, "train": plan_train, "evaluate": plan_evaluate, "ask": plan_ask, "data": plan_data}


class Roofline(TorchDispatchMode):
    """Collects the FLOPs of each operation, and the bytes that it reads and writes."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[float, float]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result, count = function(*args, **(kwargs or {})), flop_registry.get(function._overloadpacket)
        if not function.is_view:
            moved = sum(one.nbytes for one in tree_leaves((args, kwargs, result)) if isinstance(one, Tensor))
            self.operations.append((count(*args, **(kwargs or {}), out_val=result) if count else 0, moved))
        return result

    def seconds(self, tflops: float, gbytes: float) -> float:
        """Seconds in which every operation takes as long as its FLOPs or its bytes do."""
        return sum(max(flops / tflops / 1e12, moved / gbytes / 1e9) for flops, moved in self.operations)


def count_pass(config: RunConfig, boxes: int, words: int, gpus: int) -> tuple[Roofline, int, float]:
    """A pass of each of some GPUs in bf16 over a micro-batch of photos of 640 x 480 pixels, forward and backward.

    It is without the task's head, detection losses and text corpora.

    Args:
        boxes, words: boxes of an image, and wordpieces of a sequence.

    Returns:
        Its operations, its number of examples, and the GiB of weights, gradients, AdamW's moments and saved
        activations, without work space.
    """
    texts = max(config.train.micro_batch_size // gpus, 1)
    pairs, choices = 1 + (config.task.name == "nlvr2"), 4 if config.task.name == "vcr" else 1
    images, sequences, resize = texts * pairs, texts * choices, config.data.resize
    size = ResizeRule(resize.short_edge[-1], resize.long_edge, resize.rounding).target_size(480, 640)
    canvas = size if config.data.canvas is None else canvas_size([size], config.data.canvas)
    sizes, index = torch.tensor([size] * images), torch.arange(images).view(texts, pairs)
    with torch.device("meta"):  # nothing is computed
        detector = build_detector(config)
        encoder = build_encoder(config, 30522, detector.feature_dim)  # words of bert-base-uncased
        ids, rows = torch.ones(sequences, words, dtype=torch.int64), torch.empty(boxes, 4)
        given = torch.empty(images, boxes + 1, detector.feature_dim)
        pixels, classes = torch.empty(images, 3, *canvas), torch.empty(boxes, dtype=torch.int64)
    precomputed = PrecomputedFeatures(list(given[:, 1:]), given[:, 0])
    batch = Batch(
        *(ImageBatch(pixels, sizes, sizes, ["image"] * images, precomputed), [rows] * images),
        TextBatch(ids, ids, ids.bool(), lengths=torch.full((sequences,), words)),
        image_index=index.repeat_interleave(choices, dim=0),
        region_labels=RegionLabels(classes=[classes] * images),
    )
    model = VisionLanguageModel(detector, encoder, nn.Identity(), freeze_detector=config.detector.freeze).train()
    saved: dict[int, int] = {}  # bytes of each storage

    def save(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    # tensors on "meta" have no values: every check is passed, the only number that is read is that of the boxes, and
    # all boxes are pooled from the first level of a pyramid
    values = mock.patch.multiple(Tensor, __bool__=lambda _: True, __int__=lambda _: boxes)
    pool = mock.patch.object(
        RoIPooler, "__call__", lambda self, maps, rois, step=1: self._pool(maps[0], rois, self.strides[0], step)
    )
    precision = mock.patch("torch.is_autocast_enabled", lambda *_: False)
    with values, pool, precision, sdpa_kernel(SDPBackend.MATH), Roofline() as roofline:
        predict = (MaskedRegionsConfig, ObjectLabelsConfig, RegionFeaturesConfig)  # regions, which a teacher labels
        objectives = getattr(config.task.config, "objectives", {}).values()
        if any(isinstance(one, predict) and one.weight for one in objectives) and config.task.config.teacher != "file":
            with torch.no_grad():
                model.detector(batch.images, batch.boxes)
        with torch.autograd.graph.saved_tensors_hooks(save, lambda one: one):
            _, _, encoded = model.encode(batch)
        (encoded.text.sum() + encoded.regions.sum()).backward()
    weights = {one.untyped_storage()._cdata for one in model.parameters()}
    activations = sum(size for storage, size in saved.items() if storage not in weights) / 2  # they are float32 here
    trained = sum(one.numel() for one in model.parameters() if one.requires_grad)
    fixed = sum(one.numel() for one in model.parameters()) - trained
    roofline.operations = [(flops, moved / 2) for flops, moved in roofline.operations]
    roofline.operations.append(
        (0, 28 * trained / config.train.gradient_accumulation_steps)
    )  # AdamW reads 4 float32 numbers, writes 3
    return roofline, texts, (18 * trained + 6 * fixed + activations) / 2**30  # with copies in bf16


def estimate(arguments: argparse.Namespace) -> Iterator[str]:
    """Hours of each recipe, or of `--config`, on one GPU and on `--gpus` of them, as a Markdown table."""
    table = read_yaml(ROOT / "configs" / "benchmark" / "epochs.yaml")
    recipes = {ROOT / "configs" / name: recipe for name, recipe in table["recipes"].items()}
    if arguments.examples is not None:
        one = {"examples": arguments.examples, "boxes": (arguments.boxes or [36])[0], "words": arguments.words}
        recipes = {arguments.config: one}
    yield f"| | examples | GFLOP | GiB | {' | '.join(table['gpus'])} |\n|---|{'---:|' * (3 + len(table['gpus']))}"
    for path, recipe in recipes.items():
        words = ("data.root=unused", "data.boxes.train=gt", "detector.weights=null", "encoder.weights=null")
        config = resolve_config(load_config(path, [*words, *arguments.overrides]))
        roofline, number, gib = count_pass(config, recipe["boxes"], recipe["words"], arguments.gpus)
        passes, cells = recipe["examples"] * arguments.epochs / number, []
        for rates in table["gpus"].values():
            hours = roofline.seconds(*rates) / table["share"] * passes / 3600
            both = (hours, hours / (1 + (arguments.gpus - 1) * table["scaling"]))
            cells.append(" / ".join(f"{one:.{1 + (one < 1)}f}" for one in both))
        gflop = sum(flops for flops, _ in roofline.operations) / number / 1e9
        name = f"{path.parent.name}/{path.stem}"
        yield f"| {name} | {recipe['examples']:,} | {gflop:.0f} | {gib:.1f} | {' | '.join(cells)} |"


if __name__ == "__main__":
    raise SystemExit(main())
