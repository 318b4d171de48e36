"""Builders that the tests of the data sets share: files, settings, data sets, loaders and examples."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.utils.data import get_worker_info
from transformers import PreTrainedTokenizerBase

from detector.errors import UserError
from detector.images import ResizeRule
from e2e_vl.config import BoxSource, DataConfig
from e2e_vl.data import table_files
from e2e_vl.data.base import DataNeeds, VLDataset, open_options
from e2e_vl.data.batching import BatchLoader, EncodedDataset, GroupedBatchSampler, Request
from e2e_vl.data.config import CLASS_NAMES
from e2e_vl.data.image_loader import BoxReader, ImageLoader, ImageRules
from e2e_vl.data.tables import fingerprint
from e2e_vl.predictions import Prediction
from e2e_vl.preprocessing import EncodedText, GeneratorFactory, Preprocessor
from e2e_vl.samples import Sample, SampleText
from e2e_vl.text import TextTokenizer
from e2e_vl.transforms import LoadedImage

SAME = ResizeRule(short_edge=60, long_edge=1000)  # a photo of 100 x 60 pixels keeps its size
DOUBLE = ResizeRule(short_edge=120, long_edge=1000)


def write_json(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    return path


def write_json_lines(path: Path, rows: Iterable[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def with_files(settings: DataConfig, **files: str | None) -> DataConfig:
    """Settings with other files; None removes a file."""
    files = {key: name for key, name in (settings.files | files).items() if name is not None}
    return msgspec.structs.replace(settings, files=files)


def with_options(settings: DataConfig, **options: Any) -> DataConfig:
    return msgspec.structs.replace(settings, config=options)


class PlainPreprocessor(Preprocessor):
    """Every text as it is, without targets."""

    prediction_class = Prediction
    learns_from = (object,)

    def truth_record(self, truth: Any, *, flipped: bool) -> dict[str, Any]:
        return {}

    def encode_text(
        self, text: SampleText, sample: Sample, images: Sequence[LoadedImage], make_generator: GeneratorFactory
    ) -> Iterable[EncodedText]:
        encoding = self.text_tokenizer.single(self.text_tokenizer.pieces(text.words))
        yield EncodedText(
            encoding,
            text.image_index,
            self.record(text, images, encoding),
            seed=int(make_generator(text.index).integers(99)),
        )


def make_loader(
    boxes: BoxSource | str = BoxSource.GT,
    reader: BoxReader | None = None,
    *,
    resize: ResizeRule | Sequence[ResizeRule] = SAME,
    **rules,
) -> ImageLoader:
    """A loader of images; `rules` are fields of `ImageRules`."""
    sizes = (resize,) if isinstance(resize, ResizeRule) else tuple(resize)
    return ImageLoader(ImageRules(sizes, **rules), BoxSource(boxes), reader)


def examples(
    dataset: VLDataset,
    preprocessor: Preprocessor | PreTrainedTokenizerBase,
    boxes: BoxSource | str = BoxSource.GT,
    reader: BoxReader | None = None,
    *,
    seed: int = 0,
    skip_broken: bool | str = False,
    **rules,
) -> EncodedDataset:
    """The examples of a data set: preprocessed by a task, or (given a tokenizer) every text as it is."""
    if not isinstance(preprocessor, Preprocessor):
        preprocessor = PlainPreprocessor(TextTokenizer(preprocessor))
    return EncodedDataset(
        dataset, make_loader(boxes, reader, **rules), preprocessor, seed=seed, skip_broken=skip_broken
    )


def assert_same_from_tables(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, open_it: Callable[[], VLDataset]
) -> None:
    """Read a data set without tables, with tables that it writes, and from these tables alone."""

    def describe() -> tuple[Any, ...]:
        caplog.clear()
        dataset = open_it()
        keys = list(dataset.image_keys())
        return fingerprint(dataset.contents()), list(dataset.groups), keys, list(dataset.truths()), caplog.messages

    expected = describe()
    assert not list(root.glob("**/*.table"))
    monkeypatch.setattr(table_files, "MIN_SOURCE_BYTES", 0)
    assert describe() == expected
    assert list(root.glob("index/*.table"))
    monkeypatch.setattr(table_files, "_make", None)
    assert describe() == expected


def open_dataset(
    kind: type[VLDataset],
    settings: DataConfig,
    split: str,
    boxes: BoxSource | str = BoxSource.ONLINE,
    *,
    objects: bool = False,
    training: bool = False,
    phrases: bool = False,
) -> VLDataset:
    """A data set as a run opens it."""
    files, options = open_options(kind, settings)
    return kind(files, options, split, DataNeeds(BoxSource(boxes), objects, training, phrases))


@contextlib.contextmanager
def refused(*parts: str) -> Iterator[None]:
    """What is done within must raise a UserError whose sentence has all of these parts."""
    with pytest.raises(UserError) as caught:
        yield
    missing = [part for part in parts if part not in str(caught.value)]
    assert not missing, f"{missing} not in {caught.value}"


def plain(value: Any) -> Any:
    """A value in which tensors are lists with their dtype and shape, so that two can be compared."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.tolist()
    if dataclasses.is_dataclass(value):
        return type(value), {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list | tuple) else value


def write_metadata(instances: Path, folder: Path) -> None:
    """VCR's metadata per image of a COCO file: its boxes with scores 0.1, 0.2, ..., its corners as outlines."""
    content = json.loads(instances.read_text(encoding="utf-8"))
    for image in content["images"]:
        rows = [row for row in content["annotations"] if row["image_id"] == image["id"]]
        boxes = [[x, y, x + width, y + height] for x, y, width, height in (row["bbox"] for row in rows)]
        file = folder / Path(image["file_name"]).with_suffix(".json").name
        scores = [min((row + 1) / 10, 1.0) for row in range(len(rows))]
        found = {
            "boxes": [[*box, score] for box, score in zip(boxes, scores, strict=True)],
            "segms": [[[[x1, y1], [x2, y1], [x2, y2], [x1, y2]]] for x1, y1, x2, y2 in boxes],
            "names": [CLASS_NAMES[row["category_id"] % len(CLASS_NAMES)] for row in rows],
            "width": image["width"],
            "height": image["height"],
        }
        file.write_text(json.dumps(found))


@dataclasses.dataclass
class WhoReads:
    """Answers a request with the index and the words of its texts, and the worker that read them."""

    dataset: VLDataset

    def __getitem__(self, request: Request) -> list[tuple[int, int, Any]]:
        return [(get_worker_info().id, text.index, text.words) for text in self.dataset.sample(request.texts).texts]


def read_by_processes(dataset: VLDataset, images_per_batch: int, **options: Any) -> list[tuple[int, int, int, Any]]:
    """What two processes with two workers each read in an epoch: (process, worker, index of the text, its words).

    The processes take turns in this one; `options` are those of the sampler.
    """
    found = []
    for process in range(2):
        sampler = GroupedBatchSampler(dataset.groups, images_per_batch, rank=process, world_size=2, **options)
        for batch in BatchLoader(WhoReads(dataset), sampler, list, workers=2):
            found += [(process, *one) for texts in batch for one in texts]
    return found
