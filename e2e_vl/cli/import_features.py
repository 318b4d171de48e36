"""Convert region features that other projects published into a file for data.files.features.

    e2e-vl import-features pythia detectron_fix_100/fc6/vqa/train2014 --sizes captions_train2014.json \\
        --output features/pythia/train2014.h5
    e2e-vl import-features detectron features_dev_150.th --output features/nlvr2/dev.h5
    e2e-vl import-features ban train.hdf5 --ids train_imgid2idx.pkl --output features/flickr30k/train.h5

pythia: a folder of .npy files, COCO's images of one set. They have no boxes, so every region gets the box of its whole
image, whose size is in COCO's JSON of captions, instances or image info (--sizes, one or several files). VisualBERT
reads no boxes of them. detectron: one or more .th files of one split, as for NLVR2, which are in memory at once. No
file has the sizes of the images, so an image ends at its outermost boxes. ban: an HDF5 file and its pickle of rows; an
image's size follows from its boxes in pixels and in fractions of the image.

The regions keep their order and every number, as float32. No code in a file is run. The output's stamp records the
source and the assumptions.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from detector.errors import MissingFileError, UserError, reading
from detector.io import read_json, read_pickle
from e2e_vl.cli.main import make_parser, print_errors
from e2e_vl.data.features import RegionFeatures, check_format, import_optional, write_features
from e2e_vl.io import Record, Side

ASSUMED = {
    "pythia": "every box is the whole image",
    "detectron": "every image ends at its outermost boxes",
    "ban": "sizes of images follow from image_bb and spatial_features",
}
ROUNDING = 0.01  # pixels by which the columns of BAN's file may disagree, per pixel of the image's side


@print_errors
def main(argv: list[str] | None = None, prog: str | None = None) -> int:
    parser = make_parser(__doc__, prog)
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND", help=f"one of {', '.join(ASSUMED)}")
    for kind in ASSUMED:
        own = kinds.add_parser(kind)
        if kind == "pythia":
            own.add_argument("input", type=Path, nargs=1, metavar="FOLDER", help="the folder of one COCO image set")
            own.add_argument(
                "--sizes", type=Path, nargs="+", required=True, metavar="JSON", help="COCO's files with image sizes"
            )
        elif kind == "detectron":
            own.add_argument("input", type=Path, nargs="+", metavar="FILE", help="the .th files of one split")
        else:
            own.add_argument("input", type=Path, nargs=1, metavar="FILE", help="the HDF5 file of one split")
            own.add_argument("--ids", type=Path, required=True, metavar="PKL", help="its pickle imgid2idx")
        own.add_argument("--output", type=Path, required=True, help="file to write: .h5, .lmdb or .tsv")
        own.add_argument("--format", default="hdf5", choices=("hdf5", "lmdb", "tsv"), help="default: hdf5")
    options = parser.parse_args(argv)
    if options.output.exists():
        raise UserError(f"{options.output} is there already; remove it, or choose another --output.")
    from tqdm import tqdm

    check_format(options.format, options.output)
    first, assumed = options.input[0], ASSUMED[options.kind]
    if options.kind == "pythia":
        images = read_pythia(first, options.sizes)
    elif options.kind == "detectron":
        images = read_detectron(options.input)
    else:
        images = read_ban(first, options.ids)
    files = [one for path in options.input for one in (path.iterdir() if path.is_dir() else [path])]
    stamp = {"published_by": options.kind, "files": [path.name for path in options.input], "assumed": assumed}
    bar = tqdm(images, unit="image", desc="images")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    num_bytes = 2 * sum(file.stat().st_size for file in files)
    write_features(options.format, options.output, bar, stamp, num_bytes=num_bytes)
    print(f"{options.output}: {bar.n} images; {assumed}")
    return 0


# The formats of VisualBERT's authors, from the official code; the published files themselves were not at hand. Each
# function gives the regions of one image after the other, in the order of the file.


class _SizedImage(Record):
    id: int
    width: Side
    height: Side


class _SizedImagesFile(Record):
    images: list[_SizedImage]


def read_pythia(folder: Path, sizes: list[Path]) -> Iterator[RegionFeatures]:
    """Pythia's folder of COCO_train2014_000000000009.npy: float [100, D], without boxes (VQA, COCO).

    Pickles `*_info.npy` beside them are skipped, as in official VisualBERT.
    """
    size_of = {row.id: (row.height, row.width) for path in sizes for row in read_json(path, _SizedImagesFile).images}
    paths = [path for path in sorted(folder.glob("*.npy")) if not path.name.endswith("_info.npy")]
    if not paths:
        raise MissingFileError(f"{folder}: has no .npy files; give Pythia's folder of one image set.")
    for path in paths:
        name = re.fullmatch(r"COCO_[a-z]+\d{4}_(\d{12})", path.stem)
        image_id = None if name is None else int(name[1])
        if image_id not in size_of:
            raise UserError(
                f"{path}: no image of a file of --sizes; give files such as COCO_train2014_000000000009.npy with "
                "COCO's JSON of the same image set."
            )
        height, width = size_of[image_id]
        with reading(path, ValueError, EOFError):
            values = np.load(path, allow_pickle=False)
        boxes = np.tile(np.array([0, 0, width, height]), (len(values), 1))
        yield _record(str(image_id), (height, width), boxes, values, str(path))


def read_detectron(paths: list[Path]) -> Iterator[RegionFeatures]:
    """Torch files {"dev-0-0-img0.png.npz": (features [R, D], boxes [R, 4], confidence [R])} of NLVR2.

    Boxes are in pixels of an image of unknown size: it is assumed to end at its outermost boxes.
    """
    for path in paths:
        for name, entry in _load_torch(path).items():
            image_id = name.removesuffix(".png.npz")
            features, boxes, scores = (np.asarray(one) for one in entry)
            width, height = np.ceil(boxes[:, 2:].max(axis=0)).astype(int).tolist()
            if scores.shape != (len(boxes),):
                scores = None  # a score per class does not tell the predicted class
            yield _record(image_id, (height, width), boxes, features, f"{path}: {image_id}", scores)


def read_ban(path: Path, ids: Path) -> Iterator[RegionFeatures]:
    """BAN's HDF5 file and its pickle of ids (Flickr30K).

    image_features [N, D], image_bb [N, 4], spatial_features [N, 6] with the boxes in fractions of the image first,
    pos_boxes [images, 2]: first and last row + 1 of an image; the pickle has the row of each image id in pos_boxes.
    """
    rows = read_pickle(ids)
    with reading(path, OSError, KeyError):
        file = import_optional("h5py").File(path, "r")
        places = file["pos_boxes"][:].astype(np.int64)
    if sorted(rows.values()) != list(range(len(places))):
        raise UserError(
            f"{ids}: does not give each of the {len(places)} images of {path.name} one row; use the pickle of the same "
            "split."
        )
    for image_id, row in rows.items():
        first, end = places[row].tolist()
        where = f"{path}: image {image_id}"
        boxes, fractions, features = (
            file[name][first:end].astype(np.float64) for name in ("image_bb", "spatial_features", "image_features")
        )
        yield _record(str(image_id), _image_size(boxes, fractions, where), boxes, features, where)


def _image_size(boxes: np.ndarray, fractions: np.ndarray, where: str) -> tuple[int, int]:
    """(height, width) of an image from its boxes in pixels and in fractions of the image."""
    sides = []
    for end in (3, 2):  # y2, x2
        row = fractions[:, end].argmax()
        side = round(boxes[row, end] / fractions[row, end])
        pixels, expected = boxes[:, [end - 2, end]], fractions[:, [end - 2, end]] * side
        if side < 1 or np.abs(pixels - expected).max() > 0.5 + ROUNDING * side:
            raise UserError(f"{where}: image_bb and spatial_features contradict each other; download the file again.")
        sides.append(side)
    return sides[0], sides[1]


def _record(
    image_id: str,
    size: tuple[int, int],
    boxes: np.ndarray,
    features: np.ndarray,
    where: str,
    scores: np.ndarray | None = None,
) -> RegionFeatures:
    columns = {"boxes": boxes, "features": features, **({} if scores is None else {"scores": scores})}
    record = RegionFeatures(image_id, size, **{name: values.astype(np.float32) for name, values in columns.items()})
    record.check(image_id, where)
    return record


def _load_torch(path: Path) -> dict[str, Any]:
    """The dict in a torch file, whose values may be tensors or numpy arrays."""
    import torch  # late: it takes seconds

    reconstruct = np.zeros(0).__reduce__()[0]
    names = [(reconstruct, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")]
    kinds = [type(np.dtype(code)) for code in ("f2", "f4", "f8", "i4", "i8")]
    with (
        reading(path, pickle.UnpicklingError, RuntimeError, EOFError),
        torch.serialization.safe_globals([*names, np.ndarray, np.dtype, *kinds]),
    ):
        return torch.load(path, map_location="cpu", weights_only=True)
