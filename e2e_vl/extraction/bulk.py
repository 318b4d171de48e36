"""Region features of many images, over any number of processes, and again after a kill where it stopped.

Every image is first written to a `.npz` file of its own, in one step: what is there is complete and is not done again.
The folder of these files is the output itself or, for the formats of one file, a working folder beside it; when all
images are done, the main process joins them in the order of the list. So neither kills nor the number of processes show
in the output.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, broadcast_object_list, gather_object
from torch.utils.data import DataLoader, Dataset
from tqdm.auto import tqdm

from detector.faster_rcnn import TwoStageDetector
from detector.images import ResizeRule, load_resized, make_image_batch
from e2e_vl.data.features.record import RegionFeatures, load_npz, save_npz
from e2e_vl.data.features.stores import STAMP_NAME, open_features
from e2e_vl.data.features.writers import check_format, write_features
from e2e_vl.data.image_lists import GivenBoxes, ListedImage
from e2e_vl.engine.describe import Describer, DescribeSettings
from e2e_vl.engine.launch import make_accelerator
from e2e_vl.engine.logging import write_json

WAITING_BATCHES = 8  # images that wait for others of their size, in batches
LONGEST_WAIT = datetime.timedelta(days=30)  # a process that is done waits for the others, however long they take


@dataclasses.dataclass(frozen=True)
class Extraction:
    """What to do.

    Raises:
        ValueError: numbers that make no sense.
    """

    images: list[ListedImage]
    output: Path
    layout: str  # one of `FORMATS`
    detector: TwoStageDetector
    resize: ResizeRule
    settings: DescribeSettings
    given: dict[str, GivenBoxes] | None = None  # by image id, with the rule "given"
    stamp: dict[str, Any] = dataclasses.field(default_factory=dict)
    batch_size: int = 8  # images of one size in one pass of the detector
    workers: int = 2  # processes that read images, per process
    precision: str = "no"  # no, bf16 or fp16: Accelerate's mixed precision; what is written is float32 all the same

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.workers < 0:
            raise ValueError(f"batch size {self.batch_size} and workers {self.workers}: at least 1 and 0 are needed")

    @property
    def folder(self) -> Path:
        """Where the `.npz` files are."""
        return self.output if self.layout == "npz" else self.output.with_name(self.output.name + ".parts")


@dataclasses.dataclass
class Summary:
    """What was done, over all processes."""

    done: int = 0  # images described by this call
    before: int = 0  # images that were there already
    failures: dict[str, str] = dataclasses.field(default_factory=dict)  # id -> why, in the order of the list
    few: int = 0  # images with fewer regions than the rule's `min_regions`, among those of this call


def extract_features(job: Extraction) -> Summary:
    """Describe all images; called on every process.

    Images that cannot be read are left out and reported in `failures`. Then the `.npz` files of a one-file format stay,
    so that after a repair the same call describes only what is missing.

    Raises:
        ValueError: the output belongs to other settings or other images, or cannot be written in this format.
    """
    check_format(job.layout, job.output)
    if job.given is not None and not any(image.id in job.given for image in job.images):
        raise ValueError("The file of given boxes has boxes of none of the images; give the file that belongs to them.")
    accelerator = make_accelerator(job.precision, kwargs_handlers=[InitProcessGroupKwargs(timeout=LONGEST_WAIT)])
    todo: list[Any] = [None]
    if accelerator.is_main_process:
        try:
            todo = [_prepare(job)]
        except (ValueError, OSError) as error:
            todo = [error]
    broadcast_object_list(todo)  # one look at the folder: files appear while the others would still be looking
    if isinstance(todo[0], Exception):
        raise todo[0]
    if todo[0] is None:
        return Summary(before=len(job.images))
    missing = set(todo[0])
    summary = Summary(before=len(job.images) - len(missing))
    mine = [image for image in job.images if image.id in missing]
    mine = mine[accelerator.process_index :: accelerator.num_processes]
    own = _describe_all(job, mine, accelerator)

    gathered = gather_object([own])
    accelerator.wait_for_everyone()
    summary.done = sum(one.done for one in gathered)
    summary.few = sum(one.few for one in gathered)
    failures = {image_id: reason for one in gathered for image_id, reason in one.failures.items()}
    summary.failures = {image.id: failures[image.id] for image in job.images if image.id in failures}
    if accelerator.is_main_process and job.layout != "npz" and len(failures) < len(job.images):
        _join(job, failures)
    accelerator.wait_for_everyone()
    return summary


def _prepare(job: Extraction) -> list[str] | None:
    """Ids of images without features, after the folder and its stamp are made or checked; None: all is finished."""
    folder = job.folder
    shutil.rmtree(_to_be_removed(folder), ignore_errors=True)
    stamp = json.loads(json.dumps(job.stamp))
    wanted = {image.id for image in job.images}
    if job.layout != "npz" and job.output.exists() and not folder.exists():
        store = open_features(job.output)
        if store.stamp == stamp and set(store.ids) == wanted:
            return None
        raise ValueError(f"{job.output} exists and holds other images or was made differently; choose another output")
    written = folder / STAMP_NAME
    if written.is_file():
        before = json.loads(written.read_text(encoding="utf-8"))
        changed = sorted(key for key in {*before, *stamp} if before.get(key) != stamp.get(key))
        if changed:
            raise ValueError(
                f"{folder} was begun with other settings ({', '.join(changed)}); use the same again, or another output"
            )
    elif folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} holds other files; choose an empty or new output")
    folder.mkdir(parents=True, exist_ok=True)
    write_json(written, stamp)
    for cut_off in folder.rglob("*.npz.*.part"):
        cut_off.unlink()
    there = {file.relative_to(folder).as_posix().removesuffix(".npz") for file in folder.rglob("*.npz")}
    if job.layout == "npz" and there - wanted:
        raise ValueError(
            f"{folder} has features of image {min(there - wanted)}, which is not listed; list it, or choose another "
            "output"
        )
    return [image.id for image in job.images if image.id not in there]


def _describe_all(job: Extraction, images: list[ListedImage], accelerator: Accelerator) -> Summary:
    """This process's share of the images."""
    describer = Describer(job.detector.eval().to(accelerator.device), job.settings)
    summary = Summary()
    name = f"images (process 1 of {accelerator.num_processes})" if accelerator.num_processes > 1 else "images"
    with tqdm(total=len(images), desc=name, unit="image", disable=not accelerator.is_local_main_process) as bar:
        for batch in _batches(job, images, summary, bar):
            given = None
            if job.given is not None:
                empty = GivenBoxes(np.zeros((0, 4)), np.zeros(0, dtype=np.int64))
                given = [job.given.get(one.image.id, empty) for one in batch]
            try:
                records = _describe(describer, job, batch, given, accelerator)
            except ValueError:  # a bad box of one image: the others of the batch are done without it
                records = []
                for row, one in enumerate(batch):
                    try:
                        records += _describe(describer, job, [one], given and given[row : row + 1], accelerator)
                    except ValueError as error:
                        summary.failures[one.image.id] = str(error)
            for record in records:
                _save(job, record)
                summary.few += len(record) < job.settings.numbers.min_regions if job.given is None else 0
            summary.done += len(records)
            bar.update(len(batch))
    return summary


def _describe(
    describer: Describer,
    job: Extraction,
    batch: list[_Loaded],
    given: list[GivenBoxes] | None,
    accelerator: Accelerator,
) -> list[RegionFeatures]:
    settings = job.detector.config.input
    pixels = make_image_batch(
        [one.pixels for one in batch],
        [one.original_size for one in batch],
        [str(one.image.path) for one in batch],
        settings.pixel_mean,
        settings.pixel_std,
    )
    with accelerator.autocast():
        return describer(pixels.to(accelerator.device), [one.image.id for one in batch], given)


def _save(job: Extraction, record: RegionFeatures) -> None:
    path = job.folder / f"{record.image_id}.npz"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")  # workers may outlive a launcher that was killed
    with temporary.open("wb") as file:
        save_npz(file, record, job.stamp if job.layout == "npz" else None)
    temporary.replace(path)


def _join(job: Extraction, failures: dict[str, str]) -> None:
    """Write the output file from the `.npz` files, and remove these if no image failed."""
    images = [image for image in job.images if image.id not in failures]
    paths = [job.folder / f"{image.id}.npz" for image in images]
    records = (load_npz(path)[0] for path in tqdm(paths, desc=f"writing {job.output.name}", unit="image"))
    job.output.parent.mkdir(parents=True, exist_ok=True)
    num_bytes = sum(path.stat().st_size for path in paths)
    write_features(job.layout, job.output, records, job.stamp, num_bytes=num_bytes)
    if not failures:
        job.folder.rename(_to_be_removed(job.folder))  # in one step, so that a kill does not leave half of it
        shutil.rmtree(_to_be_removed(job.folder))


def _to_be_removed(folder: Path) -> Path:
    return folder.with_name(folder.name + ".done")


# Reading images


@dataclasses.dataclass
class _Loaded:
    image: ListedImage
    pixels: np.ndarray | None = None  # uint8 [h, w, 3], resized
    original_size: tuple[int, int] = (0, 0)
    error: str | None = None


class _Images(Dataset):
    def __init__(self, images: list[ListedImage], resize: ResizeRule, channel_order: str) -> None:
        self.images = images
        self.resize = resize
        self.channel_order = channel_order

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> _Loaded:
        image = self.images[index]
        try:
            pixels, size = load_resized(image.path, self.resize, self.channel_order)
        except (ValueError, OSError) as error:
            return _Loaded(image, error=str(error))
        return _Loaded(image, pixels, size)


def _batches(job: Extraction, images: list[ListedImage], summary: Summary, bar: tqdm) -> Iterator[list[_Loaded]]:
    """Batches of one image size each: padding would make features depend on the neighbours in the batch."""
    dataset = _Images(images, job.resize, job.detector.config.input.format)
    loader = DataLoader(dataset, batch_size=None, num_workers=job.workers if images else 0, collate_fn=_unchanged)
    waiting: dict[tuple[int, ...], list[_Loaded]] = {}
    for loaded in loader:
        if loaded.error is not None:
            summary.failures[loaded.image.id] = loaded.error
            bar.update(1)
            continue
        size = loaded.pixels.shape[:2]
        waiting.setdefault(size, []).append(loaded)
        if len(waiting[size]) == job.batch_size:
            yield waiting.pop(size)
        elif sum(map(len, waiting.values())) >= WAITING_BATCHES * job.batch_size:
            yield waiting.pop(max(waiting, key=lambda key: len(waiting[key])))
    yield from waiting.values()


def _unchanged(loaded: _Loaded) -> _Loaded:
    return loaded


# Stamp


def make_stamp(
    detector: TwoStageDetector,
    resize: ResizeRule,
    settings: DescribeSettings,
    *,
    weights: Path | None,
    seed: int,
    boxes_file: Path | None,
    backend: str = "builtin",
    precision: str = "no",
) -> dict[str, Any]:
    """How features come about, as JSON: two files with equal stamps were made alike.

    Args:
        weights: file that was loaded; None = random values from `seed`.
        boxes_file: given boxes.
        backend, precision: written where they are not "builtin" and "no".
    """
    config = detector.config
    is_given = settings.rule == "given"
    numbers = None if is_given else dataclasses.asdict(settings.numbers)
    unusual = {"backend": backend} if backend != "builtin" else {}
    unusual |= {"precision": precision} if precision != "no" else {}
    return {
        "format": "e2e-vl region features 1",
        **unusual,
        "detector": config.to_flat(),
        "weights": {
            "file": None if weights is None else weights.name,
            "file_sha256": None if weights is None else file_hash(weights),
            "random_seed": seed if weights is None else None,
            "parameters_sha256": parameters_hash(detector),
        },
        "channel_order": config.input.format,
        "resize": dataclasses.asdict(resize),
        "box_rule": {"rule": settings.rule, "selection": numbers, "boxes_sha256": boxes_file and file_hash(boxes_file)},
        "features_of": "given boxes" if is_given else settings.features_of,
        "attributes": settings.attributes,
        "image_feature": settings.image_feature,
        "feature_dim": detector.feature_dim,
        "box_format": "x1, y1, x2, y2 in pixels of the original image, continuous",
    }


def file_hash(path: Path) -> str:
    """SHA-256 of a file, as `sha256sum` prints it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def parameters_hash(module: torch.nn.Module) -> str:
    """SHA-256 of all names, shapes and values of a state dict: the same for equal weights from different files."""
    digest = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        if name.endswith("num_batches_tracked"):
            continue
        digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
