"""Readers of the feature files that VisualBERT's authors trained on, which are in the formats of other projects.

    Pythia     a folder of COCO_train2014_000000000009.npy: float [100, D], without boxes (VQA, COCO)
    Detectron  .th: a dict of torch, "dev-0-0-img0.png.npz" -> (features [R, D], boxes [R, 4], confidence [R]) (NLVR2)
    BAN        HDF5: image_features [N, D], image_bb [N, 4], spatial_features [N, 6], pos_boxes [images, 2]; and a
               pickle imgid2idx: id of an image -> its row in pos_boxes (Flickr30K)

Each reader gives the regions of one image after the other, in the order of the file. No code of a file is run. Facts
from the official VisualBERT code; the published files themselves were not at hand.

Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from detector.errors import MissingFileError, UserError
from detector.io import read_pickle
from e2e_vl.data.features import RegionFeatures, as_column, check_record, checked_dataset, import_optional
from e2e_vl.data.storage.array_files import read_npy
from e2e_vl.data.storage.files import checked_records, read_json, require_file
from e2e_vl.records import Record, Side

PYTHIA_NAME = re.compile(r"COCO_[a-z]+\d{4}_(\d{12})")
PYTHIA_FACTS = "_info.npy"  # pickles beside the features, which official VisualBERT does not read
NLVR2_ENDING = ".png.npz"
ROUNDING = 0.01  # pixels by which the columns of BAN's file may disagree, per pixel of the image's side
_ARRAYS = (OSError, KeyError, ValueError, TypeError, AttributeError, RuntimeError, MemoryError)


class _SizedImage(Record):
    id: int
    width: Side
    height: Side


class _SizedImagesFile(Record):
    images: list[Any]


def read_image_sizes(paths: Sequence[Path]) -> dict[int, tuple[int, int]]:
    """(height, width) of every image that COCO's files of captions, instances or image facts list, by its id.

    Raises:
        MissingFileError: no such file.
        UserError: a file is no such JSON, or two files state different sizes of one image.
    """
    sizes: dict[int, tuple[int, int]] = {}
    for path in paths:
        rows = read_json(path, "sizes of images", _SizedImagesFile).images
        for where, row in checked_records(_SizedImage, rows, f"{path}: image", "id"):
            if sizes.setdefault(row.id, (row.height, row.width)) != (row.height, row.width):
                raise UserError(f"{where} has two sizes in these files; give files of the same release.")
    return sizes


class PythiaFeatures:
    """Pythia's folder. Its features have no boxes: every region gets the box of its whole image.

    Args:
        folder: with the .npy files of one COCO image set.
        sizes: (height, width) of the images by COCO's id.

    Raises:
        MissingFileError: no such folder, or nothing in it.
        UserError: a file of another name, or an image without a size.
    """

    def __init__(self, folder: Path, sizes: Mapping[int, tuple[int, int]]) -> None:
        if not folder.is_dir():
            raise MissingFileError(f"{folder}: there is no such folder; give Pythia's folder of .npy files.")
        names = sorted(path.name for path in folder.iterdir() if path.suffix == ".npy")
        self.left_out = [name for name in names if name.endswith(PYTHIA_FACTS)]
        self.files: dict[int, Path] = {}
        for name in names:
            if name.endswith(PYTHIA_FACTS):
                continue
            found = PYTHIA_NAME.fullmatch(name.removesuffix(".npy"))
            if found is None:
                raise UserError(
                    f"{folder / name}: expected names such as COCO_train2014_000000000009.npy; remove other files."
                )
            if self.files.setdefault(int(found[1]), folder / name) != folder / name:
                raise UserError(f"{folder / name}: another file is about the same image; convert one set at a time.")
        if not self.files:
            raise MissingFileError(f"{folder}: holds no .npy files; give Pythia's folder of one image set.")
        unknown = [image_id for image_id in self.files if image_id not in sizes]
        if unknown:
            raise UserError(
                f"{self.files[unknown[0]]} and {len(unknown) - 1} more: no file of --sizes lists the image "
                f"{unknown[0]}; give COCO's JSON of this image set."
            )
        self.sizes = sizes

    def __len__(self) -> int:
        return len(self.files)

    def __iter__(self) -> Iterator[RegionFeatures]:
        """Raises UserError for an array that is not float [R, D], or that has NaN."""
        for image_id, path in self.files.items():
            height, width = self.sizes[image_id]
            values = read_npy(path)
            number = len(values) if values.ndim else 0
            boxes = np.tile(np.array([0, 0, width, height], dtype=np.float32), (number, 1))
            yield _record(str(image_id), (height, width), boxes, values, str(path))


class DetectronFeatures:
    """NLVR2's files of torch, which are in memory at once. Boxes are in pixels of an image whose size no file states.

    Every image is taken to end where its outermost boxes end.

    Args:
        paths: the files of one split; later ones go on where the first one ends.

    Raises:
        MissingFileError: no such file.
        UserError: a file is damaged, holds something else or names code; an image is in two files.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.images: dict[str, tuple[Path, Any]] = {}
        for path in paths:
            for name, entry in _load_torch(require_file(path, "features of NLVR2")).items():
                if not isinstance(name, str) or not name.endswith(NLVR2_ENDING):
                    raise UserError(f"{path}: expected names such as dev-0-0-img0{NLVR2_ENDING}; found {name!r:.80}.")
                if self.images.setdefault(name.removesuffix(NLVR2_ENDING), (path, entry))[0] is not path:
                    raise UserError(f"{path}: {name} is in another file, too; give each file once.")
        if not self.images:
            raise UserError(f"{paths[0]}: holds no image; download it again.")

    def __len__(self) -> int:
        return len(self.images)

    def __iter__(self) -> Iterator[RegionFeatures]:
        """Raises UserError for an entry of other shapes, NaN, or boxes that are inverted or begin left of the image."""
        for image_id, (path, entry) in self.images.items():
            where = f"{path}: {image_id}"
            if not isinstance(entry, list | tuple) or len(entry) != 3:
                raise UserError(f"{where} is not (features, boxes, confidence); download the file again.")
            features, boxes, scores = (np.asarray(one) for one in entry)
            if boxes.ndim != 2 or boxes.shape[1:] != (4,) or boxes.dtype.kind not in "fiu" or not len(boxes):
                raise UserError(f"{where}: its boxes are {boxes.dtype} {list(boxes.shape)}, expected [R, 4].")
            ends = boxes[:, 2:].max(axis=0)
            if not np.isfinite(ends).all() or ends.min() <= 0 or ends.max() > 1e6:
                raise UserError(f"{where}: its boxes end at {ends.tolist()}, which is no size of an image.")
            width, height = np.ceil(ends).astype(int).tolist()
            known = scores if scores.shape == (len(boxes),) else None  # one number per class says nothing of the best
            yield _record(image_id, (height, width), boxes, features, where, scores=known)


class BanFeatures:
    """BAN's HDF5 file with its pickle of ids. The size of an image follows from a box in pixels and in shares of it.

    Args:
        path: the HDF5 file.
        ids: the pickle.

    Raises:
        MissingFileError: no such file.
        UserError: a file is damaged, holds something else or names code, or the two do not fit together.
    """

    def __init__(self, path: Path, ids: Path) -> None:
        self.path = require_file(path, "features of BAN")
        rows = read_pickle(require_file(ids, "rows of BAN's images"))
        h5py = import_optional("h5py")
        try:
            self.file = h5py.File(self.path, "r")
            size = self.path.stat().st_size
            names = ("image_features", "image_bb", "spatial_features", "pos_boxes")
            self.data = {name: checked_dataset(self.file, name, size, "biuf") for name in names}
            self.places = as_column("pos_boxes", self.data["pos_boxes"][:], np.int64)
            shapes = [self.data[name].shape for name in names]
            total = shapes[0][0]
            if [shape[1:] for shape in shapes[1:]] != [(4,), (6,), (2,)] or any(s[0] != total for s in shapes[:3]):
                raise ValueError(f"{', '.join(names)} have the shapes {[list(shape) for shape in shapes]}")
            wrong = (self.places < 0) | (self.places > total) | (self.places[:, :1] > self.places[:, 1:])
            if wrong.any():
                raise ValueError(f"row {int(wrong.any(axis=1).argmax())} of pos_boxes is no range of its {total} boxes")
        except _ARRAYS as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"{path}: no readable file of BAN's features ({reason}); download it again.") from error
        is_map = isinstance(rows, dict) and all(isinstance(row, int | np.integer) for row in rows.values())
        if not is_map or sorted(map(int, rows.values())) != list(range(len(self.places))):
            raise UserError(
                f"{ids}: does not give each of the {len(self.places)} images of {path.name} one row; use the pickle of "
                "the same split."
            )
        self.rows = {str(image_id): int(row) for image_id, row in rows.items()}
        if len(self.rows) != len(rows):
            raise UserError(f"{ids}: two of its ids are the same text; use the pickle of the same split.")

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[RegionFeatures]:
        """Raises UserError for NaN, boxes outside of the image, or columns that contradict each other."""
        for image_id, row in self.rows.items():
            first, end = self.places[row].tolist()
            where = f"{self.path}: image {image_id}"
            try:
                boxes, shares, features = (
                    self.data[name][first:end].astype(np.float64)
                    for name in ("image_bb", "spatial_features", "image_features")
                )
            except _ARRAYS as error:
                raise UserError(f"{where} is damaged ({str(error)[:100]}); download the file again.") from error
            yield _record(image_id, _size_of(boxes, shares, where), boxes, features, where)


def _size_of(boxes: np.ndarray, shares: np.ndarray, where: str) -> tuple[int, int]:
    """(height, width) of an image whose boxes are known in pixels and in shares of the image.

    Raises:
        UserError: there is no box, or the two contradict each other.
    """
    sides = []
    for end in (3, 2):  # y2, x2
        row = int(shares[:, end].argmax()) if len(shares) else -1
        share = shares[row, end] if row >= 0 else np.nan
        side = boxes[row, end] / share if share > 0 else np.nan
        whole = round(side) if np.isfinite(side) and 0.5 < side < 1e6 else 0
        starts_and_ends = boxes[:, [end - 2, end]], shares[:, [end - 2, end]]
        if not whole or np.abs(starts_and_ends[0] - starts_and_ends[1] * whole).max() > 0.5 + ROUNDING * whole:
            raise UserError(f"{where}: image_bb and spatial_features say different things; download the file again.")
        sides.append(whole)
    return sides[0], sides[1]


def _record(
    image_id: str,
    size: tuple[int, int],
    boxes: np.ndarray,
    features: np.ndarray,
    where: str,
    scores: np.ndarray | None = None,
) -> RegionFeatures:
    """The regions of one image, checked as those of a file of the project are."""
    try:
        record = RegionFeatures(
            image_id,
            size,
            as_column("boxes", boxes, np.float32),
            as_column("features", features, np.float32),
            scores=None if scores is None else as_column("scores", scores, np.float32),
        )
    except ValueError as error:
        raise UserError(f"{where}: {error}; download it again.") from error
    check_record(record, image_id, where)
    return record


def _load_torch(path: Path) -> dict[Any, Any]:
    """The dict in a file of torch, whose values may be tensors or arrays of numpy.

    Raises:
        UserError: it is damaged, holds something else, or names code.
    """
    import torch

    make = np.zeros(0).__reduce__()[0]
    named = [(make, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")]
    kinds = [type(np.dtype(code)) for code in ("f2", "f4", "f8", "i4", "i8")]
    try:
        with torch.serialization.safe_globals([*named, np.ndarray, np.dtype, *kinds]):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises errors of many kinds
        raise UserError(f"{path}: no plain file of torch ({type(error).__name__}); download it again.") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds a {type(content).__name__}, expected a dict of images; download it again.")
    return content
