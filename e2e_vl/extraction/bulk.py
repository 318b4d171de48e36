"""Region features of many images, over any number of processes, resumable after an interruption.

Each image is written atomically to a separate `.npz` file, so existing files are complete and are skipped on resume.
They are the output itself or, for the single-file formats, are kept in a temporary folder beside it, and the main
process merges them at the end, in the order of the list. Apart from rounding, the output depends neither on
interruptions nor on the number of processes; both change which images share a batch.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import datetime
import hashlib
import json
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from filelock import FileLock, Timeout
from torch import nn
from torch.utils.data import DataLoader, Dataset
from tqdm.auto import tqdm

from detector.errors import UserError
from detector.images import load_image, load_resized
from detector.io import read_json, write_json
from e2e_vl.config import ExtractionConfig
from e2e_vl.data.batching import ignore_signals, kill_workers
from e2e_vl.data.features import (
    STAMP_NAME,
    FeatureStore,
    check_format,
    load_npz,
    npz_names,
    open_features,
    save_npz,
    write_features,
)
from e2e_vl.data.user_inputs import GivenBoxes, ListedImage
from e2e_vl.extraction.regions import InputImage, LoadedDetector, RegionExtractor
from e2e_vl.io import LOCK_FILE, file_name, file_sha256
from e2e_vl.terminal import lasting_output

IMAGE_FILES_NAME = "image_files.json"  # in the folder of `.npz` files: image id -> size of the image file in bytes
IMAGES_COMPARED = 20  # about, where a file is complete already
WAITING_BATCHES = 8  # in batches: maximum number of images that wait for others of the same size
MAX_WAIT = datetime.timedelta(days=30)  # timeout of collectives: a finished process waits for the others


@dataclasses.dataclass(frozen=True)
class ExtractionJob:
    """What `extract_images` does: the images to describe, the detector that describes them, and where they go."""

    images: list[ListedImage]
    output: Path
    layout: str  # one of `FORMATS`
    source: LoadedDetector
    settings: ExtractionConfig
    given_boxes: dict[str, GivenBoxes] | None = None  # by image id, with the rule "given"
    stamp: dict[str, Any] = dataclasses.field(default_factory=dict)
    batch_size: int = 8  # images per forward pass, all of the same size
    workers: int = 2  # data loader workers per process

    @property
    def folder(self) -> Path:
        """The folder of the `.npz` files."""
        return self.output if self.layout == "npz" else self.output.with_name(self.output.name + ".parts")

    def file_of(self, image_id: str) -> Path:
        """Return the path of an image's `.npz` file, which is never outside the folder."""
        return self.folder / f"{file_name(image_id)}.npz"


@dataclasses.dataclass
class ExtractionSummary:
    """What an extraction did, over all processes."""

    extracted: int = 0  # images processed by this call
    existing: int = 0  # images processed by earlier calls
    failures: dict[str, str] = dataclasses.field(default_factory=dict)  # id -> reason, in the order of the list
    below_minimum: int = 0  # images of this call with fewer regions than the rule's `min_regions`


@lasting_output()
def extract_images(job: ExtractionJob, accelerator: Accelerator) -> ExtractionSummary:
    """Extract the features of all images; called on every process.

    Unreadable images are skipped and reported in `failures`. The `.npz` files of a single-file format are then kept, so
    that a repeated call processes only the missing images. Features are written as float32, whatever the precision of
    the accelerator, whose process group needs the timeout `MAX_WAIT`.
    """
    with contextlib.ExitStack() as lock:
        summary, is_merged = _extract_locked(job, accelerator, lock)
    if is_merged:
        shutil.rmtree(job.folder, ignore_errors=True)
    accelerator.wait_for_everyone()
    return summary


def _extract_locked(
    job: ExtractionJob, accelerator: Accelerator, lock: contextlib.ExitStack
) -> tuple[ExtractionSummary, bool]:
    """Extract the features of all images, see `extract_images`.

    Args:
        lock: gets the lock of the folder.

    Returns:
        A summary, and whether this process has merged the files of the single images, which are then of no use.
    """
    # only the main process lists the folder, or others could see files that it has just written
    state: Any = None
    if accelerator.is_main_process:
        state = _prepare(job, lock)
    [(missing, is_complete)] = broadcast_object_list([state])
    by_id = {image.id: image for image in job.images}
    ids_here = missing[accelerator.process_index :: accelerator.num_processes]
    summary_here = _extract_in_process(job, [by_id[image_id] for image_id in ids_here], accelerator)
    summaries = gather_object([summary_here])
    failures: dict[str, str] = {}
    for process_summary in summaries:
        failures |= process_summary.failures
    summary = ExtractionSummary(
        extracted=sum(process_summary.extracted for process_summary in summaries),
        existing=len(job.images) - len(missing),
        failures={image.id: failures[image.id] for image in job.images if image.id in failures},
        below_minimum=sum(process_summary.below_minimum for process_summary in summaries),
    )
    must_merge = accelerator.is_main_process and not is_complete and len(failures) < len(job.images)
    if must_merge:
        paths = [job.file_of(image.id) for image in job.images if image.id not in failures]
        records = (load_npz(path) for path in tqdm(paths, desc=f"writing {job.output.name}", unit="image", delay=1))
        num_bytes = sum(path.stat().st_size for path in paths)
        write_features(job.layout, job.output, records, job.stamp, num_bytes=num_bytes)
    return summary, must_merge and not failures


def _prepare(job: ExtractionJob, lock: contextlib.ExitStack) -> tuple[list[str], bool]:
    """Create or check the output, and lock it.

    Returns:
        Ids of images without features, and whether the output needs no merging.
    """
    check_format(job.layout, job.output)
    folder = job.folder
    stamp = json.loads(json.dumps(job.stamp))  # as it will be read, with lists in place of tuples
    image_ids = {image.id for image in job.images}
    if job.given_boxes is not None and not job.given_boxes.keys() & image_ids:
        raise UserError("The file of given boxes has no boxes for any of the images; give the matching file.")
    if job.layout != "npz" and job.output.exists():
        store = open_features(job.output)
        if store.stamp == stamp and set(store.ids) == image_ids:
            _check_image_sizes(job, store)
            shutil.rmtree(folder, ignore_errors=True)  # left by an extraction interrupted after merging
            return [], True
        if not folder.exists():
            raise UserError(f"{job.output} exists with other images or settings; choose another output")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock.enter_context(FileLock(folder / LOCK_FILE, blocking=False))
    except Timeout:
        raise UserError(
            f"{job.output} is in use by another extraction; wait for it, or choose another output."
        ) from None
    for cut_off in folder.rglob("*.part"):
        cut_off.unlink()
    if (folder / STAMP_NAME).is_file():
        stamp_before = read_json(folder / STAMP_NAME, dict[str, Any])
        changed = sorted(key for key in {*stamp_before, *stamp} if stamp_before.get(key) != stamp.get(key))
        if changed:
            raise UserError(
                f"{folder} was started with other settings ({', '.join(changed)}); use them, or another output"
            )
    extracted = npz_names(folder)
    if extracted and not (folder / STAMP_NAME).is_file():
        raise UserError(
            f"{folder} has features but no {STAMP_NAME}, which says how they were extracted; choose another output"
        )
    _check_same_images(job, extracted)
    write_json(folder / STAMP_NAME, stamp)
    missing = [image.id for image in job.images if image.id not in extracted]
    return missing, job.layout == "npz"


def _check_image_sizes(job: ExtractionJob, store: FeatureStore) -> None:
    """Raise a UserError if a complete file is of other images with the same ids, judged by the sizes of some images."""
    step = max(len(job.images) // IMAGES_COMPARED, 1)
    for image in job.images[::step]:
        try:
            size = load_image(image.path, annotated_size=image.annotated_size).shape[:2]
        except (ValueError, OSError):  # a missing image says nothing
            continue
        stored = store[image.id].image_size
        if sorted(stored) != sorted(size):  # features may be of the image without its EXIF rotation
            raise UserError(
                f"{job.output} has features of another image {image.id}, of {stored[1]} x {stored[0]} pixels; "
                f"{image.path} has {size[1]} x {size[0]}. Choose an output for each set of images"
            )


def _check_same_images(job: ExtractionJob, extracted: Collection[str]) -> None:
    """Raise a UserError if features in the folder are of another image with the same id; note the files of this call.

    Images are told apart by the sizes of their files, so that the files may be moved between two calls.
    """
    path = job.folder / IMAGE_FILES_NAME
    bytes_before: dict[str, int] = {}
    if path.is_file():
        bytes_before = read_json(path, dict[str, int])
    num_bytes = {image.id: image.path.stat().st_size for image in job.images if image.path.is_file()}
    for image in job.images:
        before = bytes_before.get(image.id)
        now = num_bytes.get(image.id)
        if image.id in extracted and None not in (before, now) and before != now:
            raise UserError(
                f"{job.folder} has features of another image {image.id}, whose file had {before:,} bytes; {image.path} "
                f"has {now:,}. Choose an output for each set of images, or extract into an empty folder"
            )
    write_json(path, bytes_before | num_bytes)


def _extract_in_process(job: ExtractionJob, images: list[ListedImage], accelerator: Accelerator) -> ExtractionSummary:
    """Extract the features of this process's images and write their `.npz` files."""
    extractor = RegionExtractor(job.source.detector.eval().to(accelerator.device), job.settings)
    summary = ExtractionSummary()
    bar = tqdm(total=len(images), unit="image", delay=1, disable=not accelerator.is_local_main_process)
    for batch in _batches(job, images, summary.failures):
        with accelerator.autocast():
            records = extractor(batch)
        for record in records:
            stamp = job.stamp if job.layout == "npz" else None  # a single file has one stamp
            save_npz(job.file_of(record.image_id), record, stamp)
            if job.given_boxes is None and len(record) < job.settings.selection_rule.min_regions:
                summary.below_minimum += 1
        summary.extracted += len(records)
        bar.update(len(batch))
    bar.close()
    return summary


class _ImageFiles(Dataset):
    """The images of one process; for an unreadable image, its id and the reason."""

    def __init__(self, job: ExtractionJob, images: list[ListedImage]) -> None:
        self.images = images
        self.given_boxes = job.given_boxes
        self.resize = job.source.resize
        self.channel_order = job.source.detector.config.input.format

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> InputImage | tuple[str, str]:
        image = self.images[index]
        annotated_size = image.annotated_size
        boxes = None
        if self.given_boxes is not None:
            no_boxes = GivenBoxes(np.zeros((0, 4)), np.zeros(0, dtype=np.int64))
            boxes = self.given_boxes.get(image.id, no_boxes)
            annotated_size = boxes.annotated_size or annotated_size
        try:
            pixels, size = load_resized(image.path, self.resize, self.channel_order, annotated_size=annotated_size)
            if boxes is not None and boxes.annotated_size not in (None, size):
                height, width = boxes.annotated_size
                raise UserError(f"the boxes are of an image of {width} x {height} pixels, not {size[1]} x {size[0]}")
            return InputImage(image.id, str(image.path), pixels, size, boxes)
        except (ValueError, OSError) as error:
            return image.id, str(error)


def _batches(job: ExtractionJob, images: list[ListedImage], failures: dict[str, str]) -> Iterator[list[InputImage]]:
    """Yield batches of images of the same size: with padding, features would depend on the others in a batch."""
    workers = job.workers if images else 0
    if workers:
        atexit.register(kill_workers)
    files = _ImageFiles(job, images)
    loader = DataLoader(files, batch_size=None, num_workers=workers, worker_init_fn=ignore_signals)
    waiting: dict[tuple[int, ...], list[InputImage]] = {}
    for loaded in loader:
        if not isinstance(loaded, InputImage):
            image_id, reason = loaded
            failures[image_id] = reason
            continue
        size = loaded.pixels.shape[:2]
        waiting.setdefault(size, []).append(loaded)
        if len(waiting[size]) == job.batch_size:
            yield waiting.pop(size)
        elif sum(map(len, waiting.values())) >= WAITING_BATCHES * job.batch_size:
            most_frequent_size, _ = max(waiting.items(), key=lambda entry: len(entry[1]))
            yield waiting.pop(most_frequent_size)
    yield from waiting.values()


# The stamp: metadata (JSON) on how features were extracted, stored with them


def make_stamp(
    source: LoadedDetector, settings: ExtractionConfig, *, boxes_file: Path | None = None, precision: str = "no"
) -> dict[str, Any]:
    """Make the stamp of one extraction; `precision` is Accelerate's mixed precision."""
    detector = source.detector
    if source.weights is None:
        weights = {"file": None, "file_sha256": None, "random_seed": source.seed}
    else:
        weights = {"file": source.weights.name, "file_sha256": file_sha256(source.weights), "random_seed": None}
    if settings.rule == "given":
        selection = None
        features_of = "given boxes"
    else:
        selection = msgspec.to_builtins(settings.selection_rule)
        features_of = settings.features_of
    return {
        "format": "e2e-vl region features 1",
        "backend": source.backend,
        "precision": precision,
        "detector": detector.config.to_flat(),
        "weights": {**weights, "parameters_sha256": parameters_hash(detector)},
        "channel_order": detector.config.input.format,
        "resize": dataclasses.asdict(source.resize),
        "box_rule": {
            "rule": settings.rule,
            "selection": selection,
            "nms_threshold": settings.nms_threshold,
            "boxes_sha256": boxes_file and file_sha256(boxes_file),
        },
        "features_of": features_of,
        "attributes": settings.attributes,
        "image_feature": settings.image_feature,
        "feature_dim": detector.feature_dim,
        "box_format": "x1, y1, x2, y2 in pixels of the original image, continuous",
    }


def parameters_hash(module: nn.Module) -> str:
    """Return the SHA-256 of a state dict's names, shapes and values; equal for equal weights of different files."""
    digest = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        if not name.endswith("num_batches_tracked"):
            digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
            digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
