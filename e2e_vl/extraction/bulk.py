"""Region features of many images, over any number of processes, and again after a kill where it stopped.

Every image is first written to a `.npz` file of its own, in one step: a file that is there is complete, and its image
is not described again. The folder of these files is the output itself or, for the formats of one file, a working folder
beside it; when all images are done, the main process joins the files in the order of the list. So the output shows
neither kills nor the number of processes.
"""

from __future__ import annotations

import dataclasses
import datetime
import glob
import hashlib
import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from torch import nn
from torch.utils.data import DataLoader, Dataset
from tqdm.auto import tqdm

from detector.errors import UserError
from detector.images import ResizeRule
from detector.io import atomic_file, read_json, write_json
from e2e_vl.data.batching import unchanged
from e2e_vl.data.features import (
    STAMP_NAME,
    RegionFeatures,
    check_format,
    load_npz,
    npz_names,
    open_features,
    save_npz,
    write_features,
)
from e2e_vl.data.storage.array_files import read_npz
from e2e_vl.data.user_inputs import GivenBoxes, ListedImage
from e2e_vl.extraction.regions import InputImage, LoadedDetector, RegionExtractor, load_input
from e2e_vl.extraction.settings import ExtractionSettings
from e2e_vl.io import id_of, inside, name_of, shown

logger = logging.getLogger(__name__)

WAITING_BATCHES = 8  # images that wait for others of their size, in batches
LONGEST_WAIT = datetime.timedelta(days=30)  # for the accelerator: a process that is done waits for the others


@dataclasses.dataclass(frozen=True)
class ExtractionJob:
    """What to do.

    Raises:
        ValueError: a batch size below 1, or a negative number of workers.
    """

    images: list[ListedImage]
    output: Path
    layout: str  # one of `FORMATS`
    source: LoadedDetector
    settings: ExtractionSettings
    given: dict[str, GivenBoxes] | None = None  # by image id, with the rule "given"
    stamp: dict[str, Any] = dataclasses.field(default_factory=dict)
    batch_size: int = 8  # images of one size in one pass of the detector
    workers: int = 2  # processes that read images, per process

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.workers < 0:
            raise UserError(f"batch size {self.batch_size} and workers {self.workers}: at least 1 and 0 are needed")

    @property
    def folder(self) -> Path:
        """Where the `.npz` files are."""
        return self.output if self.layout == "npz" else self.output.with_name(self.output.name + ".parts")

    def file_of(self, image_id: str) -> Path:
        """The `.npz` file of an image, which lies in the folder whatever its id is."""
        return inside(self.folder, f"{name_of(image_id)}.npz")


@dataclasses.dataclass
class ExtractionSummary:
    """What was done, over all processes."""

    done: int = 0  # images described by this call
    before: int = 0  # images that were there already
    failures: dict[str, str] = dataclasses.field(default_factory=dict)  # id -> reason, in the order of the list
    few: int = 0  # images with fewer regions than the rule's `min_regions`, among the images of this call


def extract_images(job: ExtractionJob, accelerator: Accelerator) -> ExtractionSummary:
    """Describe all images; called on every process.

    Images that cannot be read are left out and reported in `failures`. The `.npz` files of a one-file format stay then,
    so that after a repair the same call describes only the missing images.

    Args:
        job: what to do.
        accelerator: its mixed precision is used; the written features are float32 all the same. With several processes
            its process group needs the timeout `LONGEST_WAIT`.

    Raises:
        ValueError: the output belongs to other settings or other images, or cannot be written in this format.
    """
    check_format(job.layout, job.output)
    if job.given is not None and not any(image.id in job.given for image in job.images):
        raise UserError("The file of given boxes has boxes of none of the images; give the file that belongs to them.")
    missing = _missing_images(job, accelerator)
    if missing is None:
        return ExtractionSummary(before=len(job.images))
    own = _describe_all(job, missing[accelerator.process_index :: accelerator.num_processes], accelerator)

    gathered = gather_object([own])
    accelerator.wait_for_everyone()
    failures = {image_id: reason for one in gathered for image_id, reason in one.failures.items()}
    summary = ExtractionSummary(
        done=sum(one.done for one in gathered),
        before=len(job.images) - len(missing),
        failures={image.id: failures[image.id] for image in job.images if image.id in failures},
        few=sum(one.few for one in gathered),
    )
    if accelerator.is_main_process and job.layout != "npz" and len(failures) < len(job.images):
        _join(job, failures)
    accelerator.wait_for_everyone()
    return summary


def _missing_images(job: ExtractionJob, accelerator: Accelerator) -> list[ListedImage] | None:
    """Images that are still to be described, the same on all processes; None: the output is finished.

    Only the main process looks at the folder: others would already see files that it has just written.
    """
    found: list[Any] = [None]
    if accelerator.is_main_process:
        try:
            found = [_prepare(job)]
        except (ValueError, OSError) as error:
            found = [error]
    broadcast_object_list(found)
    if isinstance(found[0], Exception):
        raise found[0]
    if found[0] is None:
        return None
    missing = set(found[0])
    return [image for image in job.images if image.id in missing]


def _prepare(job: ExtractionJob) -> list[str] | None:
    """Ids of images without features, after the folder and its stamp are made or checked; None: all is finished."""
    folder = job.folder
    shutil.rmtree(_to_be_removed(folder), ignore_errors=True)
    for cut_off in job.output.parent.glob(glob.escape(f".{job.output.name}.") + "*.part"):  # or the index of a TSV file
        if not cut_off.is_dir():
            cut_off.unlink()
    stamp = json.loads(json.dumps(job.stamp))
    wanted = {image.id for image in job.images}
    if job.layout != "npz" and job.output.exists() and not folder.exists():
        store = open_features(job.output)
        if store.stamp == stamp and set(store.ids) == wanted:
            return None
        raise UserError(f"{job.output} exists and holds other images or was made differently; choose another output")
    folder.mkdir(parents=True, exist_ok=True)
    for cut_off in folder.glob(f".{STAMP_NAME}.*.part"):  # may be the only file that a killed extraction left
        cut_off.unlink()
    _check_begun(folder, stamp)
    write_json(folder / STAMP_NAME, stamp)
    for cut_off in folder.rglob("*.npz.*.part"):
        if not cut_off.is_dir():
            cut_off.unlink()
    found = {id_of(name): name for name in npz_names(folder)}
    for image_id in found.keys() & wanted:
        if found[image_id] != name_of(image_id):  # of an earlier version
            (folder / f"{found[image_id]}.npz").replace(job.file_of(image_id))
    there = found.keys()
    damaged = {image_id for image_id in there & wanted if not _is_whole(job.file_of(image_id), image_id)}
    if job.layout == "npz" and there - wanted:
        raise UserError(
            f"{folder} has features of image {shown(min(there - wanted))}, which is not listed; list it, or choose "
            "another output"
        )
    if damaged:
        logger.warning(
            "%s: the features of %d images are damaged or cut off (%s); these images are described again.",
            *(folder, len(damaged), ", ".join(map(shown, sorted(damaged)[:3]))),
        )
    return [image.id for image in job.images if image.id not in there - damaged]


def _is_whole(path: Path, image_id: str) -> bool:
    """Whether the features of an image are all there: after a power loss a file may end early in spite of its name.

    Only the directory at the end of the file and the image's id are read.
    """
    try:
        return str(read_npz(path, only=("image_id",)).get("image_id")) == image_id
    except UserError:
        return False


def _check_begun(folder: Path, stamp: dict[str, Any]) -> None:
    """Raise a ValueError if the folder holds files of another extraction or other files."""
    written = folder / STAMP_NAME
    if written.is_file():
        before = read_json(written, dict[str, Any])
        changed = sorted(key for key in {*before, *stamp} if before.get(key) != stamp.get(key))
        if changed:
            raise UserError(
                f"{folder} was begun with other settings ({', '.join(changed)}); use the same again, or another output"
            )
    elif any(folder.iterdir()):
        raise UserError(f"{folder} holds other files; choose an empty or new output")


def _describe_all(job: ExtractionJob, images: list[ListedImage], accelerator: Accelerator) -> ExtractionSummary:
    """This process's share of the images."""
    chain = RegionExtractor(job.source.detector.eval().to(accelerator.device), job.settings)
    summary = ExtractionSummary()
    name = f"images (process 1 of {accelerator.num_processes})" if accelerator.num_processes > 1 else "images"
    with tqdm(
        total=len(images), desc=name, unit="image", delay=1, disable=not accelerator.is_local_main_process
    ) as bar:
        for batch in _batches(job, images, summary, bar):
            with accelerator.autocast():
                records = _describe(chain, job, batch, summary.failures)
            for record in records:
                _save(job, record)
                summary.few += len(record) < job.settings.numbers.min_regions if job.given is None else 0
            summary.done += len(records)
            bar.update(len(batch))
    return summary


def _describe(
    chain: RegionExtractor, job: ExtractionJob, batch: list[InputImage], failures: dict[str, str]
) -> list[RegionFeatures]:
    """Records of the batch. A bad box of one image goes to `failures`; the others are done without that image."""
    given = None
    if job.given is not None:
        empty = GivenBoxes(np.zeros((0, 4)), np.zeros(0, dtype=np.int64))
        given = [job.given.get(image.id, empty) for image in batch]
    try:
        return chain(batch, given)
    except ValueError as error:
        if len(batch) == 1:
            failures[batch[0].id] = str(error)
            return []
        return [record for image in batch for record in _describe(chain, job, [image], failures)]


def _save(job: ExtractionJob, record: RegionFeatures) -> None:
    path = job.file_of(record.image_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as part, part.open("wb") as file:
        save_npz(file, record, job.stamp if job.layout == "npz" else None)


def _join(job: ExtractionJob, failures: dict[str, str]) -> None:
    """Write the output file from the `.npz` files, and remove these if no image failed."""
    images = [image for image in job.images if image.id not in failures]
    paths = [job.file_of(image.id) for image in images]
    records = (load_npz(path) for path in tqdm(paths, desc=f"writing {job.output.name}", unit="image", delay=1))
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
class _ImageFiles(Dataset):
    images: list[ListedImage]
    resize: ResizeRule
    channel_order: str

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> InputImage | tuple[str, str]:
        """The image, or its id and why it cannot be read."""
        image = self.images[index]
        try:
            return load_input(image, self.resize, self.channel_order)
        except (ValueError, OSError) as error:
            return image.id, str(error)


def _batches(
    job: ExtractionJob, images: list[ListedImage], summary: ExtractionSummary, bar: tqdm
) -> Iterator[list[InputImage]]:
    """Batches of one image size each: padding would make features depend on the neighbours in the batch."""
    dataset = _ImageFiles(images, job.source.resize, job.source.detector.config.input.format)
    loader = DataLoader(dataset, batch_size=None, num_workers=job.workers if images else 0, collate_fn=unchanged)
    waiting: dict[tuple[int, ...], list[InputImage]] = {}
    for loaded in loader:
        if not isinstance(loaded, InputImage):
            summary.failures[loaded[0]] = loaded[1]
            bar.update(1)
            continue
        size = loaded.pixels.shape[:2]
        waiting.setdefault(size, []).append(loaded)
        if len(waiting[size]) == job.batch_size:
            yield waiting.pop(size)
        elif sum(map(len, waiting.values())) >= WAITING_BATCHES * job.batch_size:
            yield waiting.pop(max(waiting, key=lambda key: len(waiting[key])))
    yield from waiting.values()


# How features came about, as JSON that goes with them: two files with equal stamps were made alike.


def make_stamp(
    source: LoadedDetector, settings: ExtractionSettings, *, boxes_file: Path | None = None, precision: str = "no"
) -> dict[str, Any]:
    """The stamp of one extraction.

    Args:
        source: the detector, its weights file and the image size.
        settings: which boxes are described.
        boxes_file: the file of given boxes.
        precision: Accelerate's mixed precision; like the backend and the NMS threshold, it is written only if it is not
            the default.
    """
    detector, config = source.detector, source.detector.config
    is_given = settings.rule == "given"
    numbers = None if is_given else dataclasses.asdict(settings.numbers)
    unusual = {"backend": source.backend} if source.backend != "builtin" else {}
    unusual |= {"precision": precision} if precision != "no" else {}
    unusual |= {"nms_threshold": settings.nms_threshold} if settings.nms_threshold != 0.3 else {}
    return {
        "format": "e2e-vl region features 1",
        **unusual,
        "detector": config.to_flat(),
        "weights": {
            "file": None if source.weights is None else source.weights.name,
            "file_sha256": None if source.weights is None else file_hash(source.weights),
            "random_seed": source.seed if source.weights is None else None,
            "parameters_sha256": parameters_hash(detector),
        },
        "channel_order": config.input.format,
        "resize": dataclasses.asdict(source.resize),
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


def parameters_hash(module: nn.Module) -> str:
    """SHA-256 of all names, shapes and values of a state dict: the same for equal weights from different files."""
    digest = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        if name.endswith("num_batches_tracked"):
            continue
        digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
