"""Convert published region features of other projects to a file for data.files.features.

    e2e-vl import-features pythia detectron_fix_100/fc6/vqa/train2014 --sizes captions_train2014.json \\
        --output features/pythia/train2014.h5
    e2e-vl import-features detectron features_dev_150.th --output features/nlvr2/dev.h5
    e2e-vl import-features ban train.hdf5 --ids train_imgid2idx.pkl --output features/flickr30k/train.h5
    e2e-vl import-features vl-bert trainval2014_resnet101_faster_rcnn_genome --output features/trainval2014.h5

pythia: a folder of .npy files for one set of COCO images. They have no boxes (VisualBERT does not use any), so the box
of every region is the whole image; image sizes come from COCO's JSON of captions, instances or image info (--sizes, one
or more files). detectron: .th files of one split, as for NLVR2, all loaded into memory. They have no image sizes: give
--sizes for COCO; other images are assumed to end at their outermost boxes. ban: an HDF5 file and its pickle of rows;
image sizes follow from the boxes in pixels and in fractions of the image. vl-bert: a folder of one JSON file per COCO
image.

Regions keep their order, and values are stored as float32. Code in a file is never executed. The output's stamp records
the source and these assumptions.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from detector.errors import MissingFileError, UserError, reading
from detector.io import read_json, read_pickle
from e2e_vl.cli.main import make_parser, print_errors
from e2e_vl.data.features import RegionFeatures, check_format, import_optional, write_features
from e2e_vl.io import Id, Record, Side, files_in

ASSUMED = {
    "pythia": "every box is the whole image",
    "detectron": "images without --sizes end at their outermost boxes",
    "ban": "image sizes follow from image_bb and spatial_features",
    "vl-bert": "boxes and image sizes are in the files",
}
ROUNDING = 0.01  # how much the boxes in BAN's file may disagree, as a fraction of the image's side


@print_errors
def main(argv: list[str] | None = None, prog: str | None = None) -> int:
    parser = make_parser(__doc__, prog)
    subparsers = parser.add_subparsers(dest="kind", required=True, metavar="KIND", help=f"one of {', '.join(ASSUMED)}")
    for kind in ASSUMED:
        command = subparsers.add_parser(kind)
        if kind == "pythia":
            command.add_argument("input", type=Path, nargs=1, metavar="FOLDER", help="folder of one set of COCO images")
            command.add_argument(
                "--sizes", type=Path, nargs="+", required=True, metavar="JSON", help="COCO files with image sizes"
            )
        elif kind == "vl-bert":
            command.add_argument("input", type=Path, nargs=1, metavar="FOLDER", help="folder of <image id>.json")
        elif kind == "detectron":
            command.add_argument("input", type=Path, nargs="+", metavar="FILE", help=".th files of one split")
            command.add_argument("--sizes", type=Path, nargs="+", default=[], metavar="JSON", help="as for pythia")
        else:
            command.add_argument("input", type=Path, nargs=1, metavar="FILE", help="HDF5 file of one split")
            command.add_argument(
                "--ids", type=Path, required=True, metavar="PKL", help="pickle imgid2idx of that split"
            )
        command.add_argument("--output", type=Path, required=True, help="file to write: .h5, .lmdb or .tsv")
        command.add_argument("--format", default="hdf5", choices=("hdf5", "lmdb", "tsv"), help="default: hdf5")
    args = parser.parse_args(argv)
    if args.output.exists():
        raise UserError(f"{args.output} already exists; remove it, or choose another --output.")
    from tqdm import tqdm

    check_format(args.format, args.output)
    first = args.input[0]
    if args.kind == "pythia":
        images = read_pythia(first, read_sizes(args.sizes))
    elif args.kind == "detectron":
        images = read_detectron(args.input, read_sizes(args.sizes))
    elif args.kind == "vl-bert":
        images = read_vl_bert(first)
    else:
        images = read_ban(first, args.ids)
    files: list[Path] = []
    for path in args.input:
        if path.is_dir():
            files += path.iterdir()
        else:
            files.append(path)
    assumed = ASSUMED[args.kind]
    stamp = {"published_by": args.kind, "files": [path.name for path in args.input], "assumed": assumed}
    bar = tqdm(images, unit="image", desc="images")
    num_bytes = 2 * sum(file.stat().st_size for file in files)
    write_features(args.format, args.output, bar, stamp, num_bytes=num_bytes)
    print(f"{args.output}: {bar.n} images; {assumed}")
    return 0


# The formats that the official VisualBERT and VL-BERT code read; not tested on the published files. Each function
# yields the regions of one image at a time, in the order of the file.


class _SizedImage(Record):
    id: Id
    width: Side
    height: Side


class _SizedImagesFile(Record):
    images: list[_SizedImage]


def read_sizes(paths: list[Path]) -> dict[str, tuple[int, int]]:
    """Read the (height, width) of each image, by its id, from COCO files that agree on it."""
    sizes: dict[str, tuple[int, int]] = {}
    for path in paths:
        for row in read_json(path, _SizedImagesFile).images:
            size = (row.height, row.width)
            if sizes.setdefault(str(row.id), size) != size:
                raise UserError(
                    f"{path}: image {row.id} has another size in an earlier file of --sizes; give the files of these "
                    "images only"
                )
    return sizes


def read_pythia(folder: Path, size_of: dict[str, tuple[int, int]]) -> Iterator[RegionFeatures]:
    """Read Pythia's folder of COCO_train2014_000000000009.npy: float [100, D], without boxes (VQA, COCO).

    Pickles `*_info.npy` beside them are skipped, as in official VisualBERT.
    """
    paths = [path for path in files_in(folder, (".npy",), deep=False) if not path.stem.endswith("_info")]
    if not paths:
        raise MissingFileError(f"{folder}: has no .npy files; give Pythia's folder of one image set.")
    for path in paths:
        match = re.fullmatch(r"COCO_[a-z]+\d{4}_(\d{12})", path.stem)
        image_id = None
        if match is not None:
            image_id = str(int(match[1]))
        if image_id not in size_of:
            raise UserError(
                f"{path}: no image of a file of --sizes; give files such as COCO_train2014_000000000009.npy with "
                "COCO's JSON of the same image set."
            )
        height, width = size_of[image_id]
        with reading(path, ValueError, EOFError):
            values = np.load(path, allow_pickle=False)
        boxes = np.tile(np.array([0, 0, width, height]), (len(values), 1))
        yield _region_features(image_id, (height, width), boxes, values, str(path))


def read_detectron(paths: list[Path], size_of: dict[str, tuple[int, int]]) -> Iterator[RegionFeatures]:
    """Read VisualBERT's torch files.

    {"dev-0-0-img0.png.npz": (features [R, D], boxes [R, 4] in pixels, confidence [R])}, where ".npz" may be absent;
    the images of COCO are "COCO_train2014_000000000009.jpg.npz", and their ids are numbers.
    """
    from detector.checkpoint import load_torch  # late: it takes seconds

    for path in paths:
        with reading(path, pickle.UnpicklingError, RuntimeError, EOFError, ValueError):
            content, _ = load_torch(path)
        if not isinstance(content, dict):
            raise UserError(f"{path}: contains no dict of images; give VisualBERT's file of features.")
        for name, entry in content.items():
            image_id = re.sub(r"^COCO_[a-z]+\d{4}_0*|\.(png|jpg)(\.npz)?$", "", str(name))
            where = f"{path}: {image_id}"
            with reading(where, TypeError, ValueError, IndexError):
                features, boxes, scores = (np.asarray(values) for values in entry)
                width, height = np.ceil(boxes[:, 2:].max(axis=0)).astype(int).tolist()
            height, width = size_of.get(image_id, (height, width))
            if scores.shape != (len(boxes),):
                scores = None  # per class: the predicted class is unknown
            yield _region_features(image_id, (height, width), boxes, features, where, scores)


def read_ban(path: Path, ids: Path) -> Iterator[RegionFeatures]:
    """Read BAN's HDF5 file and its pickle of ids (Flickr30K).

    image_features [N, D]; image_bb [N, 4] in pixels; spatial_features [N, 6], first the boxes in fractions of the
    image; pos_boxes [images, 2], an image's first row and last row + 1. The pickle maps image ids to rows of pos_boxes.
    """
    rows = read_pickle(ids)
    with reading(path, OSError, KeyError):
        file = import_optional("h5py").File(path, "r")
        limits = file["pos_boxes"][:].astype(np.int64)
        num_rows = len(file["image_bb"])
    if limits.ndim != 2 or limits.shape[1] != 2 or (limits[:, 0] > limits[:, 1]).any() or limits.min(initial=0) < 0:
        raise UserError(f"{path}: pos_boxes must hold the first row of each image and its last one plus one.")
    if limits.max(initial=0) > num_rows:
        raise UserError(f"{path}: pos_boxes ends at row {limits.max()}, but image_bb has {num_rows} rows.")
    if not isinstance(rows, dict) or {*rows.values()} != {*range(len(limits))} or len(rows) != len(limits):
        raise UserError(
            f"{ids}: does not map ids to the {len(limits)} images of {path.name}; use that of the same split."
        )
    for image_id, row in rows.items():
        first, end = limits[row].tolist()
        where = f"{path}: image {image_id}"
        boxes = file["image_bb"][first:end].astype(np.float64)
        fractions = file["spatial_features"][first:end].astype(np.float64)
        features = file["image_features"][first:end].astype(np.float64)
        yield _region_features(str(image_id), _image_size(boxes, fractions, where), boxes, features, where)


def read_vl_bert(folder: Path) -> Iterator[RegionFeatures]:
    """Read VL-BERT's folder of one JSON file per COCO image."""
    from e2e_vl.data.captions import RegionFile  # late: it takes seconds

    for path in files_in(folder, (".json",), deep=False):
        content = read_json(path, RegionFile)
        where = str(path)
        boxes = content.matrix("boxes", where)
        features = content.matrix("features", where)
        yield _region_features(path.stem, (content.image_h, content.image_w), boxes, features, where)


def _image_size(boxes: np.ndarray, fractions: np.ndarray, where: str) -> tuple[int, int]:
    """Compute the (height, width) of an image from its boxes in pixels and in fractions of the image."""
    sides = []
    for end in (3, 2):  # y2, x2
        row = fractions[:, end].argmax()
        side = round(boxes[row, end] / fractions[row, end])
        pixels = boxes[:, [end - 2, end]]
        expected = fractions[:, [end - 2, end]] * side
        if side < 1 or np.abs(pixels - expected).max() > 0.5 + ROUNDING * side:
            raise UserError(f"{where}: image_bb and spatial_features contradict each other; download the file again.")
        sides.append(side)
    return sides[0], sides[1]


def _region_features(
    image_id: str,
    size: tuple[int, int],
    boxes: np.ndarray,
    features: np.ndarray,
    where: str,
    scores: np.ndarray | None = None,
) -> RegionFeatures:
    columns = {"boxes": boxes, "features": features}
    if scores is not None:
        columns["scores"] = scores
    regions = RegionFeatures.from_columns(image_id, size, columns)
    regions.check(image_id, where)
    return regions
