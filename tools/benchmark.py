"""Measure the speed and memory of training steps, detectors and answers on this machine.

    python tools/benchmark.py train --json FILE
    python tools/benchmark.py train --config configs/benchmark/train_base.yaml --image-size 600 800 --boxes 36 --sweep
    python tools/benchmark.py data --config configs/benchmark/train_base.yaml
    python tools/benchmark.py detector --repetitions 3
    python tools/benchmark.py detector --detector-config detector/published/torchvision_R_50_FPN.yaml
    python tools/benchmark.py ask --run runs/demo_refcoco --image IMAGE --text "the small red circle"

`train` times a whole optimiser step over I images with k texts each in one batch ("grouped") against the same texts one
per batch ("ungrouped": k passes over the same images, gradients accumulated), after checking that both give the same
loss and gradients; if they differ, the exit status is 1. `ratio` is grouped / ungrouped: below 1, grouping is faster.
With `--sweep` it times single steps and their peak memory: one text per image and k, float32 and bfloat16, without and
with activation checkpointing.

`detector` times features of given boxes and a training step of the built-in detector against torchvision's model (for
torchvision's settings) or Detectron2's (for all others, where it is installed), with the same weights. `ratio` is the
other's median / ours: above 1, ours is faster. If the features differ, the exit status is 1.

`data` counts the images that one worker loads in a second, and the bytes of a batch's pixels.

`ask` times the answers of a trained run: importing and loading, the first answer, and further ones.

The compared variants are run in turn, so that changes in machine speed affect all of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import platform
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor, nn
from torchvision.models import detection
from torchvision.models.detection.backbone_utils import resnet_fpn_backbone
from torchvision.models.detection.faster_rcnn import FasterRCNN as TorchvisionModel
from tqdm.auto import tqdm

from detector.checkpoint import load_weights
from detector.config import DetectorConfig
from detector.errors import UserError
from detector.faster_rcnn import FasterRCNN, pad_to_multiple
from detector.structures import DetectionTargets, ImageBatch, Loss, Regions
from detector.weight_names import from_torchvision_detector
from e2e_vl.cli.main import print_errors
from e2e_vl.config import BoxSource, load_config
from e2e_vl.data.batching import BatchLoader, GroupedBatchSampler, Request
from e2e_vl.io import write_json
from e2e_vl.model import VisionLanguageModel
from e2e_vl.run.build import build_run, resolve_config
from e2e_vl.run.optim import build_optimizer
from e2e_vl.structures import Batch, ModelOutput

ROOT = Path(__file__).resolve().parents[1]
TOLERANCE = 1e-3  # of losses, gradients and features, relative to the largest one
TORCHVISION = ("torchvision_R_50_FPN", "torchvision_R_50_FPN_v2")  # settings in detector/published
SAMPLED_ROIS = 64  # of each image, for the detection losses
OBJECTS = 8  # annotated objects of each image in the training step of a detector


@print_errors
def main(argv: list[str] | None = None) -> int:
    shape = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser(**shape)
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="training steps", **shape)
    train.add_argument("--config", type=Path, default=ROOT / "configs" / "benchmark" / "train.yaml")
    train.add_argument("--sweep", action="store_true", help="precision, checkpointing and memory of single steps")
    train.add_argument("--boxes", type=int, help="boxes per image (default: those of the data)")
    train.add_argument("--image-size", type=int, nargs=2, metavar=("H", "W"), help="pixels of the padded images")
    train.add_argument("overrides", nargs="*", metavar="key=value", help="settings that override the file")
    train.set_defaults(measure=measure_train)
    data = commands.add_parser("data", help="loading of images", **shape)
    data.add_argument("--config", type=Path, default=ROOT / "configs" / "benchmark" / "train.yaml")
    data.set_defaults(measure=measure_data)
    detectors = commands.add_parser("detector", help="the built-in detector against another implementation", **shape)
    detectors.add_argument("--detector-config", type=Path, default=ROOT / "configs" / "detector" / "vl_bert_R_101.yaml")
    detectors.add_argument("--boxes", type=int, nargs="+", default=[36, 100], help="boxes per image (default: 36 100)")
    detectors.add_argument("--image-size", type=int, nargs=2, default=(600, 1000), metavar=("H", "W"))
    detectors.add_argument("--images", type=int, default=1, help="images in a batch (default: 1)")
    detectors.set_defaults(measure=measure_detector)
    ask = commands.add_parser("ask", help="answers of a trained run", **shape)
    ask.add_argument("--run", type=Path, required=True, help="run directory or saved model")
    ask.add_argument("--image", type=Path, required=True)
    ask.add_argument("--text", required=True)
    ask.set_defaults(measure=measure_ask)
    for command in (train, data, detectors, ask):
        command.add_argument("--repetitions", type=int, default=5, help="measured calls of each way (default: 5)")
        command.add_argument("--warm-up", type=int, default=1, help="calls before them (default: 1)")
        command.add_argument("--json", type=Path, metavar="FILE", help="write all numbers to this file")
    words = sys.argv[1:] if argv is None else argv
    is_train = words[:1] == ["train"]  # a parser with subcommands cannot read overrides between options
    arguments = train.parse_intermixed_args(words[1:]) if is_train else parser.parse_args(words)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    machine = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or "cpu",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    result = arguments.measure(arguments, device)
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        write_json(arguments.json, {"machine": machine, "command": words, **result})
    return int(result.get("is_different", False))


def take_turns(
    ways: dict[str, Callable[[], Any]], arguments: argparse.Namespace, device: torch.device
) -> dict[str, dict[str, Any]]:
    """Seconds of every way (`median`, `min`, `max`); the ways take turns, every second time in reverse order."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for repetition in tqdm(range(arguments.warm_up + arguments.repetitions), leave=False):
        for name in list(ways) if repetition % 2 == 0 else list(ways)[::-1]:
            started = time.perf_counter()
            ways[name]()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if repetition >= arguments.warm_up:
                seconds[name].append(time.perf_counter() - started)
    return {
        name: {"median": statistics.median(values), "min": min(values), "max": max(values)}
        for name, values in seconds.items()
    }


def print_times(label: str, times: dict[str, dict[str, Any]]) -> None:
    for name, values in times.items():
        print(f"  {label:14s} {name:12s} {values['median']:8.3f} s ({values['min']:.3f} .. {values['max']:.3f})")


def random_boxes(number: int) -> Tensor:
    """float32 [number, 4], xyxy in units of the image: top-left in its first half, sides of 10 to 50 % of its sides."""
    corners = torch.rand(number, 2) * 0.5
    return torch.cat([corners, corners + 0.1 + torch.rand(number, 2) * 0.4], dim=1)


# Training steps


def measure_train(arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Grouped against ungrouped steps, or with `--sweep` single steps; no file of the run is written."""
    config = resolve_config(load_config(arguments.config, arguments.overrides))
    if arguments.boxes is not None and config.data.boxes.train == BoxSource.ONLINE:
        raise UserError("--boxes needs given boxes; set data.boxes.train=gt, or leave --boxes out.")
    number, texts = config.train.images_per_batch // config.train.accumulate, config.data.texts_per_image
    with tempfile.TemporaryDirectory() as folder:
        words = [*arguments.overrides, "data.flip=0", "data.workers=0", f"output={folder}/run"]
        words.append(f"data.resize.short_edge=[{config.data.resize.short_edge[-1]}]")  # all batches see the same pixels
        if config.data.synthetic.scenes:  # not every scene has k texts
            words += [
                f"data.root={folder}/data",
                f"data.synthetic.scenes={{{config.data.train_split}: {4 * number + 8}}}",
            ]
        config = resolve_config(load_config(arguments.config, words))
        set_seed(config.seed)
        run = build_run(config)
        model = run.model.to(device)
        if config.train.channels_last:
            model.detector.to(memory_format=torch.channels_last)
        rich = [group[:texts] if len(group) >= texts else [] for group in run.train_data.groups]
        requests = next(iter(GroupedBatchSampler(rich, number, texts, shuffle=False)))
        parts = [[Request(one.group, one.texts[row : row + 1]) for one in requests] for row in range(texts)]
        batches = [
            run.collate([run.train_data[one] for one in part], pad_to=arguments.image_size)
            for part in (requests, *parts)
        ]
    if arguments.boxes is not None:
        scales = [size.flip(0).repeat(2) for size in batches[0].images.sizes]
        boxes = [
            torch.cat([own, random_boxes(arguments.boxes) * scale])[: arguments.boxes]
            for own, scale in zip(batches[0].boxes, scales, strict=True)
        ]
        batches = [dataclasses.replace(batch, boxes=boxes) for batch in batches]
    grouped, *singles = [batch.to(device) for batch in batches]
    height, width = grouped.images.pixels.shape[-2:]
    size = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    print(f"{number} images of {height} x {width} pixels with {texts} texts each, {size:.1f} M parameters")
    if arguments.sweep:
        return {"cases": sweep(config, model, {1: singles[0], texts: grouped}, arguments, device)}
    checks = compare_gradients(model, grouped, singles)
    accelerator = Accelerator(mixed_precision=config.train.mixed_precision)
    model, optimizer = accelerator.prepare(model, build_optimizer(model, config.train))
    with torch.no_grad():
        counts = task_counts(model.train()(grouped))

    def step(batches: Sequence[Batch]) -> None:
        for batch in batches:
            output = model(batch)
            losses = output.regions.losses.items()
            detection = sum(config.detector.loss_weights.get(name, 1.0) * loss.mean for name, loss in losses)
            accelerator.backward(task_loss(output, counts) + config.detector.loss_weight * detection / len(batches))
        if config.train.clip_norm is not None:
            accelerator.clip_grad_norm_(model.parameters(), config.train.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    times = take_turns({"grouped": lambda: step([grouped]), "ungrouped": lambda: step(singles)}, arguments, device)
    ratio = times["grouped"]["median"] / times["ungrouped"]["median"]
    print_times("step", times)
    print(f"  ratio {ratio:.3f}; {checks}")
    is_different = checks["loss_difference"] > TOLERANCE or checks["gradient_difference"] > TOLERANCE
    return {"times": times, "ratio": ratio, "checks": checks, "is_different": is_different}


def compare_gradients(model: VisionLanguageModel, grouped: Batch, singles: Sequence[Batch]) -> dict[str, float]:
    """Relative differences of task losses and gradients between both ways, without dropout, in float32.

    Each loss is its total over the batches divided by its count in the grouped batch.
    """
    model.eval()
    losses, gradients = [], []
    counts: dict[str, Tensor] = {}
    for batches in ([grouped], singles):
        model.zero_grad(set_to_none=True)
        total = 0.0
        for batch in batches:
            output = model(dataclasses.replace(batch, detection_targets=None))
            counts = counts or task_counts(output)  # the grouped batch comes first
            loss = task_loss(output, counts)
            loss.backward()
            total += loss.item()
        losses.append(total)
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    model.zero_grad(set_to_none=True)
    ours, theirs = gradients
    largest = max(gradient.abs().max().item() for gradient in ours.values())
    difference = max((ours[name] - theirs[name]).abs().max().item() for name in ours)
    return {
        "loss": losses[0],
        "loss_difference": abs(losses[0] - losses[1]) / max(abs(losses[0]), 1e-9),
        "gradient_difference": difference / max(largest, 1e-30),
    }


def task_counts(output: ModelOutput) -> dict[str, Tensor]:
    """The divisor of each task loss: its count, at least 1."""
    return {name: loss.count.clamp(min=1) for name, loss in output.task.losses.items()}


def task_loss(output: ModelOutput, counts: dict[str, Tensor]) -> Tensor:
    """Sum of the task losses, each divided by the given count."""
    return sum(loss.total / counts[name] for name, loss in output.task.losses.items())


def sweep(
    config: Any,
    model: VisionLanguageModel,
    batches: dict[int, Batch],
    arguments: argparse.Namespace,
    device: torch.device,
) -> list[dict[str, Any]]:
    """Seconds and peak memory of a step: without and with checkpointing, in fp32 and bf16, for each number of texts."""
    model.train()
    optimizer = build_optimizer(model, config.train)
    cases = []
    print("| texts per image | precision | checkpointing | s per step | peak GiB |\n|---:|---|---|---:|---:|")
    for is_checkpointed, precision, texts in itertools.product((False, True), ("fp32", "bf16"), batches):
        if is_checkpointed:  # the last half: it is never switched off again
            model.recompute_activations()

        def step(batch: Batch = batches[texts], is_bf16: bool = precision == "bf16") -> None:
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=is_bf16):
                loss = sum(loss.mean for loss in model(batch).losses.values())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        seconds, peak = with_peak_memory(lambda: take_turns({"step": step}, arguments, device), device)
        row = {"texts_per_image": texts, "precision": precision, "activation_checkpointing": is_checkpointed}
        cases.append({**row, **seconds["step"], "peak_gib": peak / 2**30})
        print(f"| {texts} | {precision} | {is_checkpointed} | {seconds['step']['median']:.2f} | {peak / 2**30:.2f} |")
    return cases


def with_peak_memory(function: Callable[[], Any], device: torch.device) -> tuple[Any, int]:
    """The result and the peak in bytes: on CPU the resident memory of the process, on CUDA the allocator's."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return function(), torch.cuda.max_memory_allocated(device)
    process, finished, peak = psutil.Process(), threading.Event(), [0]

    def watch() -> None:
        while not finished.wait(0.005):
            peak[0] = max(peak[0], process.memory_info().rss)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        return function(), peak[0]
    finally:
        finished.set()
        watcher.join()


# Loading of images


def measure_data(arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Load an epoch of drawn scenes in one worker; no file of the run is written."""
    with tempfile.TemporaryDirectory() as folder:
        words = [f"output={folder}/run", f"data.root={folder}/data", "data.synthetic.scenes={train: 200}"]
        config = resolve_config(load_config(arguments.config, words))
        run = build_run(config)
        sampler = GroupedBatchSampler(run.train_data.groups, config.train.images_per_batch)
        loader = BatchLoader(run.train_data, sampler, run.collate, workers=1, keep_workers=True)
        times = take_turns({"one worker": lambda: list(map(len, loader))}, arguments, device)
        pixels = next(iter(loader)).images.pixels
    rate = len(sampler) * len(pixels) / times["one worker"]["median"]
    shape = f"{str(pixels.dtype).removeprefix('torch.')} {list(pixels.shape)}"
    print(f"  {rate:.1f} images per second; a batch is {shape}, {pixels.nbytes / 1e6:.1f} MB")
    return {"images_per_second": rate, "batch_bytes": pixels.nbytes}


# Detectors


def measure_detector(arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Features of given boxes and training steps in float32, on random images and boxes."""
    torch.manual_seed(0)
    detectors = {name: one.to(device) for name, one in make_detectors(arguments.detector_config).items()}
    detectors["builtin"].to(memory_format=torch.channels_last)  # as `train.channels_last` does
    height, width = arguments.image_size
    pixels = torch.randn(arguments.images, 3, height, width) * 50
    sizes = torch.tensor([(height, width)] * arguments.images)
    batch = ImageBatch(pixels, sizes, sizes, [f"image {row}" for row in range(arguments.images)]).to(device)
    scale = torch.tensor([width, height, width, height], device=device)
    boxes = {
        number: [random_boxes(number).to(device) * scale for _ in range(arguments.images)] for number in arguments.boxes
    }
    cases, difference = {}, 0.0
    for number, rows in boxes.items():
        calls = {name: make_feature_call(detector, batch, rows) for name, detector in detectors.items()}
        if len(calls) > 1:
            ours, theirs = (call() for call in calls.values())
            difference = max(difference, ((ours - theirs).abs().max() / theirs.abs().max()).item())
        cases[f"features_{number}"] = take_turns(calls, arguments, device)
    steps = {name: make_training_call(one, batch, boxes[arguments.boxes[0]]) for name, one in detectors.items()}
    cases["train"] = take_turns(steps, arguments, device)  # last, because it changes the weights
    ratios = {}
    for name, times in cases.items():
        print_times(name, times)
        if len(times) > 1:
            ours, theirs = (one["median"] for one in times.values())
            ratios[name] = theirs / ours
            print(f"  {name:14s} {'ratio':12s} {ratios[name]:8.3f}")
    if len(detectors) == 1:
        print("Detectron2 is not installed: only the built-in detector was measured.")
    print(f"  largest difference of features: {difference:.2g}")
    return {"cases": cases, "ratios": ratios, "feature_difference": difference, "is_different": difference > TOLERANCE}


def make_detectors(file: Path) -> dict[str, nn.Module]:
    """The built-in detector and another one with the same weights, if there is one."""
    tree: dict[str, Any] = {
        "_BASE_": str(file.resolve()),
        "MODEL": {"ROI_HEADS": {"BATCH_SIZE_PER_IMAGE": SAMPLED_ROIS}},
    }
    is_v2 = file.stem == TORCHVISION[1]
    if is_v2:  # torchvision trains all of it; of version 1 it trains from res3 on
        tree["MODEL"]["BACKBONE"] = {"FREEZE_AT": 0}
    config = DetectorConfig.from_yaml(tree)
    builtin = FasterRCNN(config)
    if file.stem in TORCHVISION:
        options = {"num_classes": config.roi_heads.num_classes + 1, "box_batch_size_per_image": SAMPLED_ROIS}
        if is_v2:
            model = detection.fasterrcnn_resnet50_fpn_v2(weights=None, weights_backbone=None, **options)
        else:
            backbone = resnet_fpn_backbone(backbone_name="resnet50", weights=None, trainable_layers=3)
            model = TorchvisionModel(backbone, **options)
        load_weights(builtin, from_torchvision_detector(model.state_dict()), file.stem)
        return {"builtin": builtin, "torchvision": TorchvisionDetector(model)}
    try:
        from detector.detectron2_backend import Detectron2Detector
    except ImportError:
        return {"builtin": builtin}
    other = Detectron2Detector(Detectron2Detector.config_class.from_yaml(tree))
    other.load_state_dict(builtin.state_dict())
    return {"builtin": builtin, "detectron2": other}


def make_feature_call(detector: nn.Module, batch: ImageBatch, boxes: list[Tensor]) -> Callable[[], Tensor]:
    @torch.no_grad()
    def call() -> Tensor:
        detector.eval()
        return torch.cat(detector(batch, boxes).features)

    return call


def make_training_call(detector: nn.Module, batch: ImageBatch, boxes: list[Tensor]) -> Callable[[], None]:
    """Forward with detection losses and features of the boxes, backward of both, and a step of SGD."""
    objects = [rows[:OBJECTS] for rows in boxes]
    classes = [torch.arange(len(rows), device=rows.device) % detector.num_classes for rows in objects]
    targets = DetectionTargets(objects, classes)
    optimizer = torch.optim.SGD([p for p in detector.parameters() if p.requires_grad], lr=1e-6)

    def call() -> None:
        detector.train()
        regions = detector(batch, boxes, targets)
        loss = sum(loss.mean for loss in regions.losses.values()) + torch.cat(regions.features).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return call


class TorchvisionDetector(nn.Module):
    """Torchvision's Faster R-CNN with the calls of this project's detectors."""

    def __init__(self, model: TorchvisionModel) -> None:
        super().__init__()
        self.model = model
        self.num_classes = model.roi_heads.box_predictor.cls_score.out_features - 1

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


# Answers


def measure_ask(arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Seconds until a model is loaded, of its first answer and of further ones."""
    started = time.perf_counter()
    import e2e_vl

    model = e2e_vl.load(arguments.run)
    loaded = time.perf_counter()
    model.ask(arguments.image, arguments.text)
    seconds = {"load": loaded - started, "first": time.perf_counter() - loaded}
    times = take_turns({"ask": lambda: model.ask(arguments.image, arguments.text)}, arguments, device)
    mib = psutil.Process().memory_info().rss / 2**20
    print(f"  load {seconds['load']:.2f} s, first answer {seconds['first']:.2f} s, {mib:.0f} MiB resident")
    print_times("next", times)
    return {"seconds": seconds, "times": times, "mib": mib}


if __name__ == "__main__":
    raise SystemExit(main())
