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

import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from detector.errors import MissingFileError, UserError, first_line
from detector.io import read_json, read_pickle
from e2e_vl.data.features import RegionFeatures, import_optional
from e2e_vl.io import Record, Side

PYTHIA_NAME = re.compile(r"COCO_[a-z]+\d{4}_(\d{12})")
PYTHIA_FACTS = "_info.npy"  # pickles beside the features, which official VisualBERT does not read
NLVR2_ENDING = ".png.npz"
ROUNDING = 0.01  # pixels by which the columns of BAN's file may disagree, per pixel of the image's side


class _SizedImage(Record):
    id: int
    width: Side
    height: Side


class _SizedImagesFile(Record):
    images: list[_SizedImage]


def read_image_sizes(paths: Sequence[Path]) -> dict[int, tuple[int, int]]:
    """(height, width) of every image that COCO's files of captions, instances or image facts list, by its id."""
    return {row.id: (row.height, row.width) for path in paths for row in read_json(path, _SizedImagesFile).images}


class PythiaFeatures:
    """Pythia's folder. Its features have no boxes: every region gets the box of its whole image.

    Args:
        folder: with the .npy files of one COCO image set.
        sizes: (height, width) of the images by COCO's id.

    Raises:
        MissingFileError: there is no such file.
        UserError: a file of another name, or an image without a size.
    """

    def __init__(self, folder: Path, sizes: Mapping[int, tuple[int, int]]) -> None:
        paths = sorted(folder.glob("*.npy"))
        self.left_out = [path.name for path in paths if path.name.endswith(PYTHIA_FACTS)]
        self.files: dict[int, Path] = {}
        for path in paths:
            if path.name in self.left_out:
                continue
            found = PYTHIA_NAME.fullmatch(path.stem)
            if found is None:
                raise UserError(f"{path}: expected names such as COCO_train2014_000000000009.npy; remove other files.")
            self.files[int(found[1])] = path
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
        for image_id, path in self.files.items():
            height, width = self.sizes[image_id]
            try:
                values = np.load(path, allow_pickle=False)
            except (ValueError, EOFError) as error:
                raise UserError(f"{path}: no readable array ({first_line(error)}); download it again.") from error
            boxes = np.tile(np.array([0, 0, width, height], dtype=np.float32), (len(values), 1))
            yield _record(str(image_id), (height, width), boxes, values, str(path))


class DetectronFeatures:
    """NLVR2's files of torch, which are in memory at once. Boxes are in pixels of an image whose size no file states.

    Every image is taken to end where its outermost boxes end.

    Args:
        paths: the files of one split; later ones go on where the first one ends.

    Raises:
        MissingFileError: there is no such file.
        UserError: a file is damaged, holds something else, or an image is in two files.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.images: dict[str, tuple[Path, Any]] = {}
        for path in paths:
            for name, entry in _load_torch(path).items():
                if not name.endswith(NLVR2_ENDING):
                    raise UserError(f"{path}: expected names such as dev-0-0-img0{NLVR2_ENDING}; found {name!r:.80}.")
                if self.images.setdefault(name.removesuffix(NLVR2_ENDING), (path, entry))[0] is not path:
                    raise UserError(f"{path}: {name} is in another file, too; give each file once.")

    def __len__(self) -> int:
        return len(self.images)

    def __iter__(self) -> Iterator[RegionFeatures]:
        for image_id, (path, entry) in self.images.items():
            where = f"{path}: {image_id}"
            features, boxes, scores = (np.asarray(one) for one in entry)
            if boxes.ndim != 2 or boxes.shape[1:] != (4,) or not len(boxes):
                raise UserError(f"{where}: its boxes are {boxes.dtype} {list(boxes.shape)}, expected [R, 4].")
            ends = boxes[:, 2:].max(axis=0)
            if not np.isfinite(ends).all() or ends.min() <= 0:
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
        MissingFileError: there is no such file.
        UserError: a file is damaged, or the two do not fit together.
    """

    def __init__(self, path: Path, ids: Path) -> None:
        if not path.is_file():
            raise MissingFileError(f"{path}: there is no such file of BAN's features.")
        self.path = path
        self.rows = {str(image_id): int(row) for image_id, row in read_pickle(ids).items()}
        try:
            self.file = import_optional("h5py").File(path, "r")
            self.places = self.file["pos_boxes"][:].astype(np.int64)
        except (OSError, KeyError) as error:
            raise UserError(
                f"{path}: no readable file of BAN's features ({first_line(error)}); download it again."
            ) from error
        if sorted(self.rows.values()) != list(range(len(self.places))):
            raise UserError(
                f"{ids}: does not give each of the {len(self.places)} images of {path.name} one row; use the pickle of "
                "the same split."
            )

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[RegionFeatures]:
        for image_id, row in self.rows.items():
            first, end = self.places[row].tolist()
            where = f"{self.path}: image {image_id}"
            boxes, shares, features = (
                self.file[name][first:end].astype(np.float64)
                for name in ("image_bb", "spatial_features", "image_features")
            )
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
    columns = {"boxes": boxes, "features": features, **({} if scores is None else {"scores": scores})}
    record = RegionFeatures(image_id, size, **{name: values.astype(np.float32) for name, values in columns.items()})
    record.check(image_id, where)
    return record


def _load_torch(path: Path) -> dict[str, Any]:
    """The dict in a file of torch, whose values may be tensors or arrays of numpy."""
    import torch

    if not path.is_file():
        raise MissingFileError(f"{path}: there is no such file of NLVR2's features.")
    reconstruct = np.zeros(0).__reduce__()[0]
    names = [(reconstruct, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")]
    kinds = [type(np.dtype(code)) for code in ("f2", "f4", "f8", "i4", "i8")]
    try:
        with torch.serialization.safe_globals([*names, np.ndarray, np.dtype, *kinds]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise UserError(
            f"{path}: no plain file of torch ({first_line(error)}); nothing in it was run, download it again."
        ) from error
