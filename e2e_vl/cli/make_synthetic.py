"""Make a RefCOCO+-style data set of drawn scenes in the official formats.

    e2e-vl synthesize --output data/synthetic --train 3500 --val 200 --testA 100 --testB 100

The layout is described in `e2e_vl/synthetic/generate.py`, and each format in its writer class. The same settings give
the same files; a second call with the same settings does nothing.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from e2e_vl.cli.main import print_errors
from e2e_vl.parts import decode
from e2e_vl.synthetic.config import LanguageConfig, SceneConfig
from e2e_vl.synthetic.generate import FORMATS, make_scenes

SPLITS = {"train": 3500, "val": 200, "testA": 100, "testB": 100}  # number of scenes
LIMITS = {
    "min_objects": "smallest number of objects in a scene",
    "max_objects": "largest number of objects in a scene",
    "min_side": "smallest height and width, pixels",
    "max_side": "largest height and width, pixels",
}


@print_errors
def main(argv: list[str] | None = None, prog: str | None = None) -> int:
    scene = SceneConfig()
    parser = argparse.ArgumentParser(
        prog=prog,
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--output", type=Path, required=True, help="folder to write to")
    for split, count in SPLITS.items():
        parser.add_argument(f"--{split}", type=int, default=count, metavar="N", help=f"number of {split} scenes")
    parser.add_argument("--seed", type=int, default=0, help="seed of everything drawn")
    for name, text in LIMITS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(scene, name), help=text)
    parser.add_argument("--textures", nargs="+", default=list(scene.textures), help="textures of the objects")
    parser.add_argument(
        "--families",
        nargs="+",
        type=_share,
        default=list(LanguageConfig().family_mix.items()),
        metavar="NAME=SHARE",
        help="mix of the families of expressions",
    )
    parser.add_argument("--image-format", choices=("jpg", "png"), default="jpg", help="format of the images")
    parser.add_argument(
        "--formats",
        nargs="+",
        choices=FORMATS,
        default=list(FORMATS),
        metavar="FORMAT",
        help="file formats written beside the images; a folder that is already there gets the formats it lacks",
    )
    parser.add_argument("--workers", type=int, default=0, help="processes that draw; 0 draws in this process")
    options = parser.parse_args(argv)
    limits = {name: getattr(options, name) for name in LIMITS}
    stamp = make_scenes(
        options.output,
        scenes={split: getattr(options, split) for split in SPLITS},
        seed=options.seed,
        config=decode({**limits, "textures": options.textures}, SceneConfig, "scene"),
        language=decode({"family_mix": dict(options.families)}, LanguageConfig, "language"),
        image_format=options.image_format,
        formats=options.formats,
        workers=options.workers,
    )
    print(json.dumps(stamp["statistics"], indent=2))
    return 0


def _share(text: str) -> tuple[str, float]:
    name, _, share = text.partition("=")
    return name, float(share)
