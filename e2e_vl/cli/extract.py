"""The regions of one image, with a picture; or the region features of many images, in the formats of the field.

    e2e-vl extract IMAGE --output DIR
    e2e-vl extract FOLDER --output FILE --format tsv
    e2e-vl extract --images instances.json --output FILE --format hdf5

One image is described as by tools/extract_demo.py. A folder, or a list or COCO file that --images names, is described
as by tools/extract_features.py. Each has options of its own; both follow.
"""

from __future__ import annotations

import sys
from pathlib import Path

from e2e_vl.cli import extract_demo, extract_features
from e2e_vl.cli.common import says_errors


@says_errors
def main(argv: list[str] | None = None, prog: str | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    if words[:1] in (["-h"], ["--help"]):
        helps = [module.build_parser(prog).format_help() for module in (extract_demo, extract_features)]
        print(__doc__, *helps, sep="\n\n")
        raise SystemExit(0)  # as after every other `--help`
    if words and Path(words[0]).is_dir():
        words = ["--images", *words]
    is_many = any(word.partition("=")[0] == "--images" for word in words)
    return (extract_features if is_many else extract_demo).main(words, prog)
