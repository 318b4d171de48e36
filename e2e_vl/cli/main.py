"""End-to-end vision-and-language training, from raw pixels.

    e2e-vl train --config configs/demo/refcoco.yaml
    e2e-vl ask --run runs/demo_refcoco --image IMAGE --text "the small red circle" --output DIR

`e2e-vl COMMAND --help` says more about each command. `accelerate launch -m e2e_vl COMMAND` starts several processes.
"""

from __future__ import annotations

import importlib
import sys

from e2e_vl.cli.common import make_parser

# Name -> its function in this package, and what it does. A module is imported when it is called.
COMMANDS = {
    "check-data": ("check_data:main", "problems and sizes of a run's annotation files, and images seen before"),
    "train": ("train:main", "train detector, encoder and task together"),
    "evaluate": ("evaluate:main", "evaluate a trained run on a split"),
    "predict": ("predict:main", "predictions of a whole split as a file"),
    "ask": ("ask:main", "the answer of a trained run to texts about images"),
    "explore": ("explore:main", "a page in the browser: regions, answers, phrases, attention, hidden regions"),
    "extract": ("extract:main", "regions and features of one image, or of many"),
    "import-features": ("import_features:main", "turn published region features into a file that runs read"),
    "analyze-attention": ("analyze_attention:main", "what the attention heads of a trained run ground"),
    "convert": ("convert_weights:main", "read published weights, or write a trained run as an official file"),
    "synthesize": ("make_synthetic:main", "draw a data set of scenes in the official formats"),
}


def main(argv: list[str] | None = None) -> int:
    """Call a command by its name; returns its exit status."""
    words = sys.argv[1:] if argv is None else argv
    parser = make_parser(__doc__, "e2e-vl")
    kinds = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, text) in COMMANDS.items():
        kinds.add_parser(name, help=text, add_help=False)
    command = parser.parse_args(words[:1]).command  # the command reads the other words itself
    module, _, function = COMMANDS[command][0].partition(":")
    return getattr(importlib.import_module(f"e2e_vl.cli.{module}"), function)(words[1:], f"e2e-vl {command}")
