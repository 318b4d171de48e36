"""Turn region features that other projects published into a file that runs read (data.files.features).

    e2e-vl import-features pythia detectron_fix_100/fc6/vqa/train2014 --sizes captions_train2014.json \\
        --output features/pythia/train2014.h5
    e2e-vl import-features detectron features_dev_150.th --output features/nlvr2/dev.h5
    e2e-vl import-features ban train.hdf5 --ids train_imgid2idx.pkl --output features/flickr30k/train.h5

pythia: a folder of .npy files, COCO's images of one set. They hold no boxes, so every region gets the box of its whole
image, whose size COCO's JSON of captions, instances or image facts states (--sizes, several if need be). VisualBERT
reads no boxes of them. detectron: one or more .th files of one split, as for NLVR2, which take as much memory as they
are large. No file says how large the images are, so an image ends where its outermost boxes end. ban: an HDF5 file and
its pickle of rows; an image's size follows from its boxes in pixels and in shares of the image.

The regions keep their order and every number, as float32. Nothing in a file is run. The output's stamp says where it
comes from and what was assumed.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from detector.errors import UserError
from e2e_vl.cli.common import make_parser, says_errors

logger = logging.getLogger(__name__)
ASSUMED = {
    "pythia": "every box is the whole image",
    "detectron": "every image ends where its outermost boxes end",
    "ban": "sizes of images follow from image_bb and spatial_features",
}


def build_parser(prog: str | None = None) -> argparse.ArgumentParser:
    """The options of the command."""
    parser = make_parser(__doc__, prog)
    parser.add_argument("kind", choices=tuple(ASSUMED), help="who published them")
    parser.add_argument("input", type=Path, nargs="+", help="the folder (pythia), or the file or files of one split")
    parser.add_argument("--output", type=Path, required=True, help="file to write: .h5, .lmdb or .tsv")
    parser.add_argument("--format", default="hdf5", choices=("hdf5", "lmdb", "tsv"), help="default: hdf5")
    parser.add_argument("--sizes", type=Path, nargs="+", metavar="JSON", help="pythia: COCO's files with image sizes")
    parser.add_argument("--ids", type=Path, metavar="PKL", help="ban: the pickle imgid2idx of the same split")
    return parser


@says_errors
def main(argv: list[str] | None = None, prog: str | None = None) -> int:
    options = build_parser(prog).parse_args(argv)
    for name, kind in (("sizes", "pythia"), ("ids", "ban")):
        if (getattr(options, name) is None) == (options.kind == kind):
            raise UserError(f"--{name} belongs to {kind}, which needs it; see --help.")
    first, *others = options.input
    if others and options.kind != "detectron":
        raise UserError(f"{options.kind} has one input for each output; give {first} alone.")
    if options.output.exists():
        raise UserError(f"{options.output} is there already; remove it, or choose another --output.")
    from tqdm import tqdm  # late: they import numpy and its readers

    from e2e_vl.data.features import check_format, write_features
    from e2e_vl.data.published_features import BanFeatures, DetectronFeatures, PythiaFeatures, read_image_sizes

    check_format(options.format, options.output)
    if options.kind == "pythia":
        images = PythiaFeatures(first, read_image_sizes(options.sizes))
        if images.left_out:
            logger.warning("%d files *_info.npy are left out: VisualBERT reads none of them.", len(images.left_out))
    elif options.kind == "detectron":
        images = DetectronFeatures(options.input)
    else:
        images = BanFeatures(first, options.ids)
    files = [one for path in options.input for one in (path.iterdir() if path.is_dir() else [path])]
    assumed = ASSUMED[options.kind]
    stamp = {"published_by": options.kind, "files": [path.name for path in options.input], "assumed": assumed}
    records = tqdm(images, total=len(images), unit="image", desc="images")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    num_bytes = 2 * sum(file.stat().st_size for file in files)
    write_features(options.format, options.output, records, stamp, num_bytes=num_bytes)
    print(f"{options.output}: {len(images)} images; {assumed}")
    return 0
