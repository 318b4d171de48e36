"""Seconds and memory of an analysis of attention with an encoder of BASE size, early and at the end."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from detector.errors import UserError
from e2e_vl.analysis.captions import read_parses
from e2e_vl.analysis.collect import collect_attention, texts_to_show
from e2e_vl.analysis.run import AttentionRequest, caption_examples
from e2e_vl.config import BoxSource, RunConfig, load_config
from e2e_vl.data.base import open_options
from e2e_vl.data.features import RegionFeatures, save_npz
from e2e_vl.run.build import (
    build_collate,
    build_detector,
    build_model,
    make_synthetic_data,
    named_parts,
    training_texts,
)
from e2e_vl.run.launch import make_accelerator
from e2e_vl.text import build_vocabulary, load_tokenizer
from measuring import machine_facts, peak_mib, print_machine

SPLIT = "val"
REGIONS = 36  # of each image: the annotated boxes and random ones
PICTURES = 6  # texts that are kept for pictures, as the command does by default
QUARTER = 0.25


def benchmark_attention(
    config_file: Path, folder: Path, *, images: int, images_per_batch: int, words: list[str] | None = None
) -> dict[str, Any]:
    """Measure all heads of an untrained encoder on drawn captions, five per image, in a fresh process on the CPU.

    Args:
        config_file: YAML file of a run on given features; scenes, captions, gold parses and random features are written
            into a folder of `folder` for this number of images, and stay.
        images: images that are analysed.
        images_per_batch: images of one pass of the model; their maps are in memory together.
        words: more settings.

    Returns:
        `machine`, `settings`, and `stages`, rows with `stage` (everything is open; a quarter; all), and so far: the
        `images`, the `captions`, the `seconds` and `cpu_seconds` of the measures (from the clock and of the processor),
        and the highest resident memory of the process, `peak_mib`.

    Raises:
        ValueError: a size that is not positive.
    """
    if min(images, images_per_batch) < 1:
        raise UserError("--images and --images-per-batch must be positive.")
    place = folder / f"{images}_images"
    settings = [f"data.root={place}", f"data.synthetic.scenes={{{SPLIT}: {images}}}", f"output={place / 'unused'}"]
    settings += [f"eval.images_per_batch={images_per_batch}", *(words or [])]
    config = load_config(config_file, settings)
    make_synthetic_data(config)
    files, _ = open_options(named_parts(config).dataset, config.data)
    features = files.path("features", split=SPLIT)
    if not features.is_dir():
        write_random_features(features, files.path("instances", split=SPLIT), build_detector(config).feature_dim)
    build_vocabulary(training_texts(config), place / "vocab.txt")
    # spawned, not forked: it must not inherit the memory of this process
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        found = pool.submit(analyze, config_file, settings).result()
    own = {"images": images, "images_per_batch": images_per_batch, "regions": REGIONS}
    return {"machine": found.pop("machine"), "settings": {"config": str(config_file), **own}, **found}


def write_random_features(folder: Path, instances: Path, width: int) -> None:
    """A file of random features per image; the folder is there once it is complete."""
    unfinished = folder.with_name(f"{folder.name}.part")
    unfinished.mkdir(exist_ok=True)
    for found in random_features(instances, width):
        save_npz(unfinished / f"{found.image_id}.npz", found)
    unfinished.replace(folder)


def random_features(instances: Path, width: int) -> Iterator[RegionFeatures]:
    """The annotated boxes of each image and random ones, with random features and confidences."""
    rng = np.random.default_rng(0)
    content = json.loads(instances.read_text(encoding="utf-8"))
    given: dict[int, list[list[float]]] = {image["id"]: [] for image in content["images"]}
    for one in content["annotations"]:
        given[one["image_id"]].append(one["bbox"])
    for image in content["images"]:
        size = np.array([image["width"], image["height"]], dtype=np.float32)
        annotated = np.array(given[image["id"]][:REGIONS], dtype=np.float32).reshape(-1, 4)
        corners = rng.uniform(0, 0.5, (REGIONS - len(annotated), 2)) * size
        drawn = np.concatenate([corners, rng.uniform(0.1, 0.5, corners.shape) * size], axis=1)
        boxes = np.concatenate([annotated, drawn.astype(np.float32)])
        boxes[:, 2:] += boxes[:, :2]
        scores = rng.random(REGIONS, dtype=np.float32)
        values = rng.standard_normal((REGIONS, width), dtype=np.float32)
        yield RegionFeatures(str(image["id"]), (image["height"], image["width"]), boxes, values, scores)


def analyze(config_file: Path, settings: list[str]) -> dict[str, Any]:
    """The analysis in this process, see `benchmark_attention`."""
    config = load_config(config_file, settings)
    place = Path(config.data.root)
    tokenizer = load_tokenizer(place / "vocab.txt")
    torch.manual_seed(config.seed)
    model = build_model(config, vocab_size=len(tokenizer), tokenizer=tokenizer)
    request = AttentionRequest(place, SPLIT, BoxSource.PRECOMPUTED)
    examples = caption_examples(config, model, tokenizer, request, read_parses(parses_of(config)))
    stages = Stages(build_collate(config, model), len(examples.groups))
    stages.note("everything is open", 0)
    found = collect_attention(
        *(model, examples, stages, request.choices, make_accelerator("no")),
        images_per_batch=config.eval.images_per_batch,
        shown=texts_to_show(examples.groups, PICTURES, config.seed),
    )
    stages.note("all", found.numbers["captions"])
    number = sum(value.numel() for value in model.encoder.parameters())
    return {"machine": machine_facts(torch.device("cpu")), "parameters": number, "stages": stages.rows}


def parses_of(config: RunConfig) -> Path:
    """The gold parses, which lie beside the list of images."""
    files, _ = open_options(named_parts(config).dataset, config.data)
    return files.path("ids", split=SPLIT).parent / "parses" / f"{SPLIT}.conllu"


class Stages:
    """A `collate` that notes time and memory when a quarter of the images is done; its calls are in this process."""

    def __init__(self, collate: Callable[..., Any], images: int) -> None:
        self.collate = collate
        self.images = images
        self.done = self.texts = 0  # handed over, so those before the present call have been measured
        self.rows: list[dict[str, Any]] = []
        self.begin, self.begin_cpu = time.perf_counter(), time.process_time()

    def __call__(self, examples: list[Any]) -> Any:
        if self.done >= QUARTER * self.images and len(self.rows) == 1:
            self.note("a quarter", self.texts)
        batch = self.collate(examples)
        self.done += len(examples)
        self.texts += len(batch)
        return batch

    def note(self, stage: str, captions: int) -> None:
        """What has been done by now."""
        seconds = {
            "seconds": round(time.perf_counter() - self.begin, 1),
            "cpu_seconds": round(time.process_time() - self.begin_cpu, 1),
        }
        self.rows.append({"stage": stage, "images": self.done, "captions": captions, **seconds, "peak_mib": peak_mib()})


def show(result: dict[str, Any]) -> int:
    """Print a table in Markdown; returns the exit status."""
    print_machine(result["machine"])
    settings = result["settings"]
    print(
        f"{result['parameters'] / 1e6:.1f} M parameters, {settings['regions']} regions per image, "
        f"{settings['images_per_batch']} images per batch"
    )
    print("| | images | captions | seconds | of the processor | peak resident memory, MiB |")
    print("|---|---:|---:|---:|---:|---:|")
    for row in result["stages"]:
        times = f"{row['seconds']:.0f} | {row['cpu_seconds']:.0f}"
        print(f"| {row['stage']} | {row['images']} | {row['captions']} | {times} | {row['peak_mib']:.0f} |")
    return 0
