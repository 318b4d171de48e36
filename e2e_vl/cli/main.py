"""End-to-end vision-and-language training, from raw pixels.

    e2e-vl train --config configs/demo/refcoco.yaml
    e2e-vl ask --run runs/demo_refcoco --image IMAGE --text "the small red circle" --output DIR

`e2e-vl COMMAND --help` says more about each command. `accelerate launch -m e2e_vl COMMAND` starts several processes.
"""

from __future__ import annotations

import importlib
import sys

from e2e_vl.cli.common import make_parser

# name -> function (imported when called) and description
COMMANDS = {
    "check-data": ("check_data:main", "check annotation files, and find images shared between data sets"),
    "train": ("train:main", "train detector, encoder and task together"),
    "evaluate": ("evaluate:main", "evaluate a trained run on a split"),
    "predict": ("predict:main", "write the predictions for a split to a file"),
    "ask": ("ask:main", "ask a trained run about images"),
    "explore": ("explore:main", "open a web page with regions, answers, phrases, attention and hidden regions"),
    "extract": ("extract:main", "extract regions and features from one or many images"),
    "import-features": ("import_features:main", "convert published region features"),
    "analyze-attention": ("analyze_attention:main", "measure the grounding of attention heads"),
    "convert": ("convert_weights:main", "convert published weights, or export a trained run to an official format"),
    "synthesize": ("make_synthetic:main", "draw a data set of scenes in the official formats"),
}


def main(argv: list[str] | None = None) -> int:
    """Run the named command; returns its exit status."""
    words = sys.argv[1:] if argv is None else argv
    parser = make_parser(__doc__, "e2e-vl")
    kinds = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, text) in COMMANDS.items():
        kinds.add_parser(name, help=text, add_help=False)
    command = parser.parse_args(words[:1]).command  # the command parses the other words
    module, _, function = COMMANDS[command][0].partition(":")
    return getattr(importlib.import_module(f"e2e_vl.cli.{module}"), function)(words[1:], f"e2e-vl {command}")
