"""Train detector, encoder and task together.

    e2e-vl train --config configs/demo/refcoco.yaml train.lr=1e-3 output=runs/my_run
    accelerate launch tools/train.py --config configs/demo/refcoco.yaml train.lr=1e-3 output=runs/my_run

`key=value` settings override the file. `--resume` continues the run in `output` exactly. `e2e-vl` trains in one
process; `accelerate launch` and `torchrun` start several. SIGTERM, SIGHUP and Ctrl-C end a run after the current step
and a checkpoint, with exit status 143, 129 or 130; errors have exit status 2.
"""

from __future__ import annotations

import argparse
import os
import sys

from e2e_vl.cli.common import make_parser, print_errors
from e2e_vl.config import load_config, read_detector_config


def build_parser(prog: str | None = None) -> argparse.ArgumentParser:
    """The options of the command."""
    parser = make_parser(__doc__, prog)
    parser.add_argument("--config", required=True, help="YAML file of the run")
    parser.add_argument("--resume", action="store_true", help="continue from the run directory's newest checkpoint")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that override the file")
    return parser


@print_errors
def main(argv: list[str] | None = None, prog: str | None = None) -> int:
    arguments = build_parser(prog).parse_intermixed_args(argv)
    config = load_config(arguments.config, arguments.overrides)
    read_detector_config(config.detector)  # errors before torch is imported
    # suppress DDP's warning on every process that find_unused_parameters found none
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        from e2e_vl.run.train import train  # late: it imports torch

        train(config, resume=arguments.resume)
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":  # print once
            print("interrupted; --resume continues from the newest checkpoint", file=sys.stderr)
        return 130
    return 0
