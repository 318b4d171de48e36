"""Sampling, loading and collating batches, in the main process or in workers."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import io
import itertools
import logging
import multiprocessing
import pickle
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from detector.errors import MissingFileError, UserError
from detector.images import make_image_batch
from detector.structures import DetectionTargets, ImageBatch, PrecomputedFeatures
from e2e_vl.data.base import VLDataset
from e2e_vl.data.image_loader import ImageLoader
from e2e_vl.data.tables import TextGroups, fingerprint
from e2e_vl.phrases import PhraseBatch
from e2e_vl.preprocessing import EncodedSample, EncodedText, GeneratorFactory, Preprocessor
from e2e_vl.samples import BoxPredictions, BrokenImageError, Sample
from e2e_vl.structures import Batch, DetectedLabels, MaskingBatch, RegionLabels, TextBatch
from e2e_vl.targets import Targets
from e2e_vl.terminal import STOP_SIGNALS
from e2e_vl.transforms import DetectionObjects, LoadedImage


@dataclasses.dataclass(frozen=True)
class Request:
    """An image to load, with some of its texts."""

    group: int  # index of the image in the data set's `groups`
    texts: tuple[int, ...]  # text indices, all from this group
    epoch: int = 0  # seeds the random generator


def random_generator(seed: int, epoch: int, text: int) -> np.random.Generator:
    """Make the random generator for one text in one epoch, independent of workers and order."""
    return np.random.default_rng([seed, epoch, text])


class GroupedBatchSampler(Sampler[list[Request]]):
    """Yields the `Request`s of each batch of one process, for `DataLoader(batch_sampler=...)`.

    Each image comes with several of its texts, so that the detector runs once per image. Every text is seen once per
    epoch, and the batches do not depend on the number of processes.

    With `shuffle` (training), the groups and the texts within each group are shuffled by (seed, epoch). Each rank takes
    a slice of every batch; the slices of all ranks together are the batch of a single process. The last batches are
    filled up from the start of the epoch, so that all batches have the same size, and an epoch has a multiple of
    `gradient_accumulation_steps` batches.

    Without `shuffle` (evaluation), groups keep their order, nothing is repeated, and the last batch may be smaller.
    Whole batches are assigned to the ranks in turn, because the features of a box depend slightly on the padding, and
    so on the other images in the batch. Ranks may differ by one batch.

    Args:
        groups: text indices of each image (`dataset.groups`).
        images_per_batch: groups per batch; with `shuffle` over all processes, so a multiple of `world_size`.
        texts_per_image: maximum number of texts per request; None = all texts of the image.
        gradient_accumulation_steps: batches per optimiser step.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[int]],
        images_per_batch: int,
        texts_per_image: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        gradient_accumulation_steps: int = 1,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if not isinstance(groups, TextGroups):
            groups = TextGroups.of_lists(groups)
        self._texts = groups.texts
        self._starts = groups.starts  # where the texts of each group begin in `_texts`
        self.images_per_batch = images_per_batch
        self.texts_per_image = texts_per_image
        self.seed = seed
        self.shuffle = shuffle
        self.gradient_accumulation_steps = gradient_accumulation_steps if shuffle else 1
        self.rank = rank
        self.world_size = world_size
        num_texts = np.diff(self._starts)  # of each group
        if texts_per_image is None:
            num_requests = np.minimum(num_texts, 1)
        else:
            num_requests = -(-num_texts // texts_per_image)
        self.num_groups = int(num_requests.sum())
        # per request: its group, and where its texts begin
        self._group_of = np.repeat(np.arange(len(num_texts)), num_requests)
        first_request = np.cumsum(num_requests) - num_requests
        number_in_group = np.arange(self.num_groups) - np.repeat(first_request, num_requests)
        self._first = self._starts[self._group_of] + number_in_group * (texts_per_image or 0)
        self.set_epoch(0)

    def set_epoch(self, epoch: int, start_batch: int = 0) -> None:
        """Set the epoch, and the batch (counted over all ranks) to resume from."""
        self.epoch = epoch
        self.start_batch = start_batch

    @property
    def batches_per_epoch(self) -> int:
        per_step = self.images_per_batch * self.gradient_accumulation_steps
        return -(-self.num_groups // per_step) * self.gradient_accumulation_steps

    def __len__(self) -> int:
        """Return the number of batches this rank will yield, from `start_batch` to the end of the epoch."""
        return len(self._batches_of_rank())

    def __iter__(self) -> Iterator[list[Request]]:
        order, texts = self._epoch_order()
        share = self.images_per_batch // self.world_size
        for batch in self._batches_of_rank():
            first = batch * self.images_per_batch
            if self.shuffle:
                first += self.rank * share
                numbers = order[np.arange(first, first + share) % len(order)]  # the end is filled up from the start
            else:
                numbers = order[first : first + self.images_per_batch]
            yield [self._request(int(number), texts) for number in numbers]

    def _request(self, number: int, texts: np.ndarray) -> Request:
        group = int(self._group_of[number])
        first = int(self._first[number])
        last = int(self._starts[group + 1])
        if self.texts_per_image is not None:
            last = min(last, first + self.texts_per_image)
        return Request(group, tuple(texts[first:last].tolist()), self.epoch)

    def _batches_of_rank(self) -> range:
        if self.shuffle:
            return range(self.start_batch, self.batches_per_epoch)
        first = self.start_batch + (self.rank - self.start_batch) % self.world_size
        return range(first, self.batches_per_epoch, self.world_size)

    def _epoch_order(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the order of the requests, and all texts, shuffled within each group."""
        if not self.shuffle:
            return np.arange(self.num_groups), self._texts
        generator = np.random.default_rng([self.seed, self.epoch])
        texts = self._texts.copy()
        for group in np.flatnonzero(np.diff(self._starts) > 1):  # shuffling one text would draw random numbers
            first, last = self._starts[group : group + 2]
            texts[first:last] = texts[first:last][generator.permutation(last - first)]
        return generator.permutation(self.num_groups), texts


# Sending a batch from a worker to the main process

_LARGE = 1 << 20  # bytes


class PackedBatch(NamedTuple):
    """A batch whose large tensors are sent in shared memory, and everything else in one pickle.

    Otherwise each tensor would need a file descriptor, and a batch of many images has thousands of small tensors.
    """

    content: bytes
    large: list[Tensor]


def pack(batch: Any) -> PackedBatch:
    """Pack a batch for sending it from a worker; `unpack` restores it."""
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    pickler.dump(batch)
    return PackedBatch(stream.getvalue(), pickler.large)


def unpack(packed: PackedBatch) -> Any:
    return _Unpickler(packed).load()


class _Unpickler(pickle.Unpickler):
    """Restores what `_Pickler` wrote; Python 3.13.0 allows no method to be set from outside."""

    def __init__(self, packed: PackedBatch) -> None:
        super().__init__(io.BytesIO(packed.content))
        self.large = packed.large

    def persistent_load(self, index: int) -> Tensor:
        return self.large[index]


class _Pickler(pickle.Pickler):
    """Pickles small tensors as arrays, which is much faster, and leaves large ones out."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=5)
        self.large: list[Tensor] = []

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, Tensor) or value.nbytes < _LARGE:
            return None
        self.large.append(value)
        return len(self.large) - 1

    def reducer_override(self, value: Any) -> Any:
        return (torch.from_numpy, (value.numpy(),)) if isinstance(value, Tensor) else NotImplemented


@dataclasses.dataclass(frozen=True)
class Unreadable:
    """An evaluation request whose image is missing or cannot be read."""

    images: tuple[str, ...]  # image ids of the request
    texts: tuple[int, ...]  # indices of the texts without a prediction
    reason: str
    split_index: int = 0  # the joined split of the images, see `ImageKey`


class BatchLoader:
    """Iterates over the batches of one epoch of the sampler.

    Errors about the data are raised unchanged, also from a worker. (`DataLoader` would add the worker's traceback to
    the message.)

    Args:
        dataset: loads the `EncodedSample` of a `Request`.
        workers: number of worker processes; 0 reads in the main process.
        keep_workers: keep the workers for the next epoch.
        unreadable: collects images that are missing or cannot be read; they are left out of the batch. None: they are
            errors, or `dataset` replaces them.
    """

    def __init__(
        self,
        dataset: Dataset,
        sampler: GroupedBatchSampler,
        collate: Callable[[list[EncodedSample]], Batch],
        *,
        workers: int = 0,
        keep_workers: bool = False,
        unreadable: list[Unreadable] | None = None,
    ) -> None:
        self._unreadable = unreadable
        if workers:
            atexit.register(kill_workers)
        self._loader = DataLoader(
            _Batches(dataset, collate, skip_unreadable=unreadable is not None),
            batch_sampler=sampler,
            collate_fn=_identity,
            num_workers=workers,
            persistent_workers=keep_workers and workers > 0,
            worker_init_fn=ignore_signals,
            pin_memory=torch.cuda.is_available(),  # of the large tensors of a `PackedBatch`
            # DataLoader draws a seed for its workers; keep it off the generator that dropout and RoI sampling use
            generator=torch.Generator(),
        )

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Batch]:
        for loaded in self._loader:
            if isinstance(loaded, Exception):
                try:
                    raise loaded
                finally:  # its traceback has this frame: the cycle would keep the workers, which ignore SIGTERM, alive
                    del loaded
            batch, unreadable = loaded
            if self._unreadable is not None:
                self._unreadable += unreadable
            if batch is None:  # no image could be read
                continue
            if isinstance(batch, PackedBatch):
                batch = unpack(batch)
            yield batch


@dataclasses.dataclass
class _Batches(Dataset):
    """Loads whole batches, so that errors and unreadable images can be returned in place of a batch."""

    dataset: Dataset
    collate: Callable[[list[EncodedSample]], Batch]
    skip_unreadable: bool = False

    def __getitems__(self, requests: list[Request]) -> tuple[Any, list[Unreadable]] | Exception:
        examples: list[EncodedSample] = []
        unreadable: list[Unreadable] = []
        read = self.dataset.read if self.skip_unreadable else self.dataset.__getitem__
        try:
            for request in requests:
                try:
                    examples.append(read(request))
                except BrokenImageError as error:
                    images = self.dataset.dataset.sample(request.texts).images
                    ids = tuple(image.id for image in images)
                    unreadable.append(Unreadable(ids, request.texts, str(error.__cause__), images[0].split_index))
            batch = self.collate(examples) if examples else None
        except (ValueError, OSError) as error:  # raised by readers for bad files and records
            return error
        if batch is not None and get_worker_info() is not None:
            batch = pack(batch)
        return batch, unreadable


def kill_workers() -> None:
    """End the workers at exit: multiprocessing would send SIGTERM, which they ignore, and wait for them forever."""
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()


def ignore_signals(worker: int) -> None:
    """Ignore signals that launchers also send to workers: a run needs its workers until it has saved a checkpoint."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _identity(loaded: Any) -> Any:
    """Return the `collate_fn` for `_Batches`, which are already collated."""
    return loaded


# Collating examples into a `Batch`, for any task and data set


def collate(
    examples: Sequence[EncodedSample], *, pad_to: tuple[int, int] | None = None, canvas: Sequence[int] | None = None
) -> Batch:
    """Pad images and texts, and compute the image index of each text.

    Args:
        examples: at least one; all for the same task, with the same kinds of boxes, objects and targets.
        pad_to: (height, width) of the padded images; None = the largest in the batch.
        canvas: (short edge, long edge) in pixels of the smallest canvas of an image, see `canvas_size`; images are
            padded to the largest canvas in the batch. None = pad to the largest image. `pad_to` takes precedence.

    Returns:
        The batch: N images and M texts in the order of the examples, `image_index` [M, I], padded with -1.
    """
    images: list[LoadedImage] = []
    texts: list[EncodedText] = []
    for example in examples:
        images += example.images
        texts += example.texts
    if pad_to is None and canvas is not None:
        pad_to = canvas_size([image.image_transform.size for image in images], canvas)
    return Batch(
        images=_image_batch(images, pad_to),
        boxes=_column(images, "boxes", "candidate boxes"),
        texts=pad_texts(texts),
        image_index=_image_index(examples),
        targets=_targets(texts),
        detection_targets=_detection_targets(images),
        region_labels=RegionLabels(
            classes=_column(images, "box_classes", "classes of the candidate boxes"),
            class_probs=_column(images, "class_probs", "class distributions"),
            detected=_detected_labels(images),
        ),
        roi_masks=_column(images, "roi_masks", "instance masks"),
        masking=_masking(images, texts),
        phrases=_phrases(texts),
        phrase_matches=_phrase_matches(texts),
        records=[text.record for text in texts],
    )


def _phrases(texts: Sequence[EncodedText]) -> PhraseBatch | None:
    """Join the phrases of the texts; None if any text has none listed."""
    phrases = [text.phrases for text in texts]
    if any(text_phrases is None for text_phrases in phrases):
        return None
    return PhraseBatch.join(phrases)


def _phrase_matches(texts: Sequence[EncodedText]) -> Tensor | None:
    """Join the matches of the texts to float32 [M, I, R, 2], padded with 0; None if they have none."""
    matches = [text.phrase_matches or [] for text in texts]
    slots = max(map(len, matches), default=0)
    if not slots:
        return None
    most_boxes = max(map(len, itertools.chain.from_iterable(matches)))
    result = torch.zeros(len(texts), slots, max(most_boxes, 1), 2)
    for number, text_matches in enumerate(matches):
        for slot, rows in enumerate(text_matches):
            result[number, slot, : len(rows)] = torch.from_numpy(rows)
    return result


def canvas_size(sizes: Sequence[tuple[int, int]], canvas: Sequence[int]) -> tuple[int, int]:
    """Return the padded (height, width) of a batch whose images have a canvas of at least (short, long edge) pixels.

    A canvas has the orientation of its image (landscape if the image is square) and grows with a larger image. As in
    the official VL-BERT code on VCR, a batch of landscape images is (short, long), of portrait images (long, short),
    and of both (long, long). If all images have one orientation, a box's features do not depend on the batch.
    """
    short, long = canvas
    minimum_sizes = []
    for height, width in sizes:
        is_portrait = height > width
        minimum_sizes.append((long, short) if is_portrait else (short, long))
    heights, widths = zip(*sizes, *minimum_sizes, strict=True)
    return max(heights), max(widths)


def pad_texts(texts: Sequence[EncodedText]) -> TextBatch:
    """Pad M texts on the right ([PAD] is 0 in BERT's vocabularies) to the length L of the longest text, at least 1."""
    lengths = [len(text.encoding.input_ids) for text in texts]
    shape = (len(texts), max(lengths, default=0) or 1)
    input_ids = torch.zeros(shape, dtype=torch.int64)
    token_type_ids = torch.zeros(shape, dtype=torch.int64)
    attention_mask = torch.zeros(shape, dtype=torch.bool)
    has_regions = any(text.region_of_token is not None for text in texts)
    region_of_token = torch.full(shape, -1, dtype=torch.int64) if has_regions else None
    for row, (text, length) in enumerate(zip(texts, lengths, strict=True)):
        input_ids[row, :length] = torch.from_numpy(text.encoding.input_ids)
        token_type_ids[row, :length] = torch.from_numpy(text.encoding.token_type_ids)
        attention_mask[row, :length] = True
        if text.region_of_token is not None:
            region_of_token[row, :length] = torch.from_numpy(text.region_of_token)
    summaries = [text.encoding.summary for text in texts]
    summary = None
    if any(position is not None for position in summaries):
        summary = torch.tensor(summaries)
    return TextBatch(input_ids, token_type_ids, attention_mask, summary, region_of_token)


def _image_batch(images: Sequence[LoadedImage], pad_to: tuple[int, int] | None) -> ImageBatch:
    """Join pixels and image sizes; only the sizes if features are precomputed."""
    names = [image.name for image in images]
    original_sizes = [image.image_transform.original_size for image in images]
    features = _column(images, "features", "precomputed features")
    if features is None:
        return make_image_batch([image.pixels for image in images], original_sizes, names, pad_to)
    image_features = _column(images, "image_feature", "a feature of the whole image")
    if image_features is not None:
        image_features = torch.stack(image_features)
    return ImageBatch(
        pixels=torch.zeros(len(images), 3, 0, 0),
        sizes=torch.tensor([image.image_transform.size for image in images]),
        original_sizes=torch.tensor(original_sizes),
        names=names,
        precomputed=PrecomputedFeatures(features, image_features),
    )


def _masking(images: Sequence[LoadedImage], texts: Sequence[EncodedText]) -> MaskingBatch | None:
    """Return what pre-training texts need for the masking of regions; None for other texts."""
    boxes_to_mask = _column(images, "boxes_to_mask", "boxes to mask")
    seeds = None
    if not any(text.seed is None for text in texts):
        seeds = torch.tensor([text.seed for text in texts])
    if seeds is None and boxes_to_mask is None:
        return None
    return MaskingBatch(seeds=seeds, boxes_to_mask=boxes_to_mask)


def _all_or_none(values: Sequence[Any], images: Sequence[LoadedImage], what: str) -> bool:
    """Return whether each image has a value; raise a UserError if some have one and others do not."""
    has_value = [value is not None for value in values]
    if any(has_value) and not all(has_value):
        with_value = images[has_value.index(True)].name
        without_value = images[has_value.index(False)].name
        raise UserError(
            f"{with_value} has {what}, but {without_value} does not; a batch cannot mix box sources or data sets that "
            "differ in this"
        )
    return has_value[0]


def _column(images: Sequence[LoadedImage], field: str, what: str) -> list[Tensor] | None:
    """Return one field of every image, as tensors; None if no image has it."""
    return _as_tensors([getattr(image, field) for image in images], images, what)


def _as_tensors(arrays: Sequence[np.ndarray | None], images: Sequence[LoadedImage], what: str) -> list[Tensor] | None:
    """Return the arrays of the images as tensors; None if no image has one."""
    if not _all_or_none(arrays, images, what):
        return None
    return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]


def _detected_labels(images: Sequence[LoadedImage]) -> DetectedLabels:
    """Join what a detector predicts for the candidate boxes of each image."""
    predictions = [image.predictions for image in images]
    columns = {}
    for field in dataclasses.fields(BoxPredictions):
        arrays = [getattr(prediction, field.name) for prediction in predictions]
        columns[field.name] = _as_tensors(arrays, images, f"detected {field.name.replace('_', ' ')}")
    return DetectedLabels(**columns)


def _image_index(examples: Sequence[EncodedSample]) -> Tensor:
    """Return int64 [M, I], the indices of each text's images within the batch, padded with -1."""
    rows: list[list[int]] = []
    first = 0  # index of the example's first image
    for example in examples:
        for text in example.texts:
            rows.append([first + image for image in text.image_index])
        first += len(example.images)
    slots = max(map(len, rows), default=0) or 1
    padded = [row + [-1] * (slots - len(row)) for row in rows]
    return torch.tensor(padded, dtype=torch.int64)


def _targets(texts: Sequence[EncodedText]) -> Targets | None:
    [kind] = {type(text.targets) for text in texts}
    if kind is type(None):
        return None
    return kind.join([text.targets for text in texts])


def _detection_targets(images: Sequence[LoadedImage]) -> DetectionTargets | None:
    if not _all_or_none([image.objects for image in images], images, "annotated objects"):
        return None
    objects: list[DetectionObjects] = [image.objects for image in images]
    attributes = None
    if objects[0].attributes is not None:
        slots = max(image_objects.attributes.shape[1] for image_objects in objects)
        attributes = []
        for image_objects in objects:
            padded = torch.full((len(image_objects.boxes), slots), -1)
            padded[:, : image_objects.attributes.shape[1]] = torch.from_numpy(image_objects.attributes)
            attributes.append(padded)
    return DetectionTargets(
        boxes=[torch.from_numpy(np.ascontiguousarray(image_objects.boxes)) for image_objects in objects],
        classes=[torch.from_numpy(image_objects.classes) for image_objects in objects],
        attributes=attributes,
    )


# Loading examples: read the sample, load its images, preprocess its texts


logger = logging.getLogger(__name__)

_BROKEN_IN_A_ROW = 20  # unreadable images in a row after which a run stops


@dataclasses.dataclass(eq=False)
class EncodedDataset(Dataset):
    """Loads an image with some of its texts, for any data set.

    All texts of a request share the image, and so its flip and its size.
    """

    dataset: VLDataset
    loader: ImageLoader
    preprocessor: Preprocessor
    _: dataclasses.KW_ONLY
    seed: int = 0  # all random choices depend only on (seed, epoch, text)
    # replace an image that is missing or cannot be read by the next one, or by a "blank" one of its size, and log it
    skip_broken: bool | Literal["blank"] = False
    split: str = ""  # for error messages
    max_text_length: int | None = None  # wordpieces that the encoder can encode; None: no limit

    def __post_init__(self) -> None:
        self.groups = self.dataset.groups  # the text indices of each image
        self.broken: set[int] = set()  # groups whose images were replaced in this process

    def __len__(self) -> int:
        return len(self.dataset)

    def fingerprint(self) -> str:
        """Return a hash of the records that were read, but of no image: it tells whether a split has changed."""
        contents = self.dataset.contents()
        if self.loader.box_reader is not None:
            contents = itertools.chain(contents, self.loader.box_reader.contents())
        return fingerprint(contents)

    def __getitem__(self, request: Request) -> EncodedSample:
        """Load the request's image once, with all texts of the request."""
        group = request.group
        texts = request.texts
        cause = None
        for _ in range(_BROKEN_IN_A_ROW):
            try:
                return self.read(request, texts)
            except BrokenImageError as error:
                cause = error.__cause__
                if not self.skip_broken:
                    kind = MissingFileError if isinstance(cause, FileNotFoundError) else UserError
                    hint = "(To train without it, set data.skip_broken=true; the next image is then used instead.)"
                    raise kind(f"{cause} {hint}") from cause
                self.broken.add(group)
                blank = self._read_blank(request, texts)
                replacement = "The next image" if blank is None else "A blank image"
                logger.warning(
                    "%s %s is used instead (%d unreadable images so far in this process).",
                    cause,
                    replacement,
                    len(self.broken),
                )
                if blank is not None:
                    return blank
            group = self._next_group(group)
            texts = tuple(self.groups[group][: len(request.texts)])
        raise UserError(f"{_BROKEN_IN_A_ROW} images in a row cannot be read; check the paths. The last error: {cause}")

    def _next_group(self, group: int) -> int:
        """Return the next group that has texts; after the last one comes the first."""
        following = (group + 1) % len(self.groups)
        while not len(self.groups[following]):
            following = (following + 1) % len(self.groups)
        return following

    def _read_blank(self, request: Request, texts: tuple[int, ...]) -> EncodedSample | None:
        """Return the texts with a blank image; None if images are not replaced so, or if the size is unknown."""
        if self.skip_broken != "blank":
            return None
        try:
            return self.read(request, texts, blank_if_broken=True)
        except BrokenImageError:
            return None

    def read(
        self, request: Request, texts: tuple[int, ...] | None = None, *, blank_if_broken: bool = False
    ) -> EncodedSample:
        """Load the request's image with all its texts, or with `texts`, using the request's random generator.

        Args:
            blank_if_broken: replace an image that is missing or cannot be read by a blank one, if its size is known.

        Raises:
            BrokenImageError: the image is missing or cannot be read; its cause names the file.
        """
        make_generator: GeneratorFactory = functools.partial(random_generator, self.seed, request.epoch)
        augmentation = self.loader.draw_augmentation(make_generator(request.texts[0]))
        if texts is None:
            texts = request.texts
        sample = self.dataset.sample(texts)
        images = [self.loader.load(image, augmentation, blank_if_broken=blank_if_broken) for image in sample.images]
        texts = self.preprocess(sample, images, request.epoch)
        for text in texts:
            self.check_length(text)
        return EncodedSample(images, texts)

    def preprocess(self, sample: Sample, images: Sequence[LoadedImage], epoch: int = 0) -> list[EncodedText]:
        """Encode the texts of a sample in the way of an epoch; `images` are its loaded images."""
        make_generator: GeneratorFactory = functools.partial(random_generator, self.seed, epoch)
        return list(self.preprocessor(sample, images, make_generator))

    def check_length(self, text: EncodedText) -> None:
        """Raise a UserError that names the text if it is longer than `max_text_length`."""
        length = len(text.encoding.input_ids)
        if self.max_text_length is None or length <= self.max_text_length:
            return
        ids = [f"{name} {value}" for name, value in text.record.items() if name.endswith("id")]
        number = f"text {text.record.get('text_index', 'of the corpus')}"
        raise UserError(
            f"{', '.join([number, *ids])} of the split {self.split} has {length} wordpieces, but the encoder reads at "
            f"most {self.max_text_length}; shorten it, or set data.max_text_length={self.max_text_length} to truncate "
            "such texts."
        )
