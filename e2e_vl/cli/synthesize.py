"""Draw a data set of scenes in the official formats of RefCOCO+, VQA, GQA, COCO and others.

    e2e-vl synthesize --output data/synthetic --train 3500 --val 200 --testA 100 --testB 100

See `e2e_vl/synthetic/generate.py` for the layout of the folder. The same settings give the same files, and a second
call with them does nothing.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from e2e_vl.cli.main import CommandParser, print_errors
from e2e_vl.registry import decode
from e2e_vl.synthetic.config import LanguageConfig, RenderingConfig, SceneConfig
from e2e_vl.synthetic.generate import FORMATS, make_scenes

SPLITS = {"train": 3500, "val": 200, "testA": 100, "testB": 100}  # number of scenes
LIMITS = {
    "min_objects": "minimum number of objects in a scene",
    "max_objects": "maximum number of objects in a scene",
    "min_side": "minimum height and width, pixels",
    "max_side": "maximum height and width, pixels",
}
RENDERING = {
    "blur": "standard deviation of a blur, pixels",
    "contrast": "factor of the contrast",
    "brightness": "added to all grey values, of 255",
    "noise": "standard deviation of noise, in grey values of 255",
}


@print_errors
def main(argv: list[str] | None = None, prog: str | None = None) -> int:
    scene = SceneConfig()
    rendering = RenderingConfig()
    parser = CommandParser(
        prog=prog, description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="folder to write to")
    for split, count in SPLITS.items():
        parser.add_argument(f"--{split}", type=int, default=count, metavar="N", help=f"number of {split} scenes")
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    for name, text in LIMITS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(scene, name), help=text)
    parser.add_argument("--textures", nargs="+", default=list(scene.textures), help="textures of the objects")
    parser.add_argument(
        "--families",
        nargs="+",
        type=_share,
        default=list(LanguageConfig().family_mix.items()),
        metavar="NAME=SHARE",
        help="share of each family of expressions",
    )
    for name, text in RENDERING.items():
        text += "; it changes the pixels and nothing else"
        parser.add_argument(f"--{name}", type=float, default=getattr(rendering, name), metavar="X", help=text)
    parser.add_argument(
        "--palette",
        nargs="+",
        type=_colour,
        default=[],
        metavar="NAME=R,G,B",
        help="other values of some colours, such as red=200,90,40",
    )
    parser.add_argument("--image-format", choices=("jpg", "png"), default="jpg", help="format of the images")
    parser.add_argument(
        "--formats",
        nargs="+",
        choices=FORMATS,
        metavar="FORMAT",
        help="file formats to write beside the images (default: all whose packages are installed); an existing folder "
        "gets the formats that it lacks",
    )
    parser.add_argument("--workers", type=int, default=0, help="worker processes; 0: draw in this process")
    args = parser.parse_args(argv)
    limits = {name: getattr(args, name) for name in LIMITS}
    degradation = {name: getattr(args, name) for name in RENDERING}
    stamp = make_scenes(
        args.output,
        scenes={split: getattr(args, split) for split in SPLITS},
        seed=args.seed,
        config=decode({**limits, "textures": args.textures}, SceneConfig, "scene"),
        language=decode({"family_mix": dict(args.families)}, LanguageConfig, "language"),
        rendering=decode({**degradation, "palette": dict(args.palette)}, RenderingConfig, "rendering"),
        image_format=args.image_format,
        formats=args.formats,
        workers=args.workers,
    )
    print(json.dumps(stamp["statistics"], indent=2))
    return 0


def _share(text: str) -> tuple[str, float]:
    """Read NAME=SHARE."""
    name, _, share = text.partition("=")
    return name, float(share)


def _colour(text: str) -> tuple[str, list[int]]:
    """Read NAME=R,G,B."""
    name, _, values = text.partition("=")
    return name, [int(value) for value in values.split(",")]
