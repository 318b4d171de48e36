"""Train detector, encoder and task together.

    accelerate launch tools/train.py --config configs/demo/refcoco.yaml train.lr=1e-3 output=runs/my_run

Everything after the options is `key=value` and beats the file. `--resume` continues the run in `output` exactly.
"""

from __future__ import annotations

import sys

from e2e_vl.command_line import make_parser, says_errors
from e2e_vl.config import load_config
from e2e_vl.engine.train import train


@says_errors
def main(argv: list[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--config", required=True, help="YAML file of the run")
    parser.add_argument("--resume", action="store_true", help="continue from the run directory's newest checkpoint")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that beat the file")
    arguments = parser.parse_intermixed_args(argv)
    try:
        train(load_config(arguments.config, arguments.overrides), resume=arguments.resume)
    except KeyboardInterrupt:
        print("interrupted; --resume continues from the newest checkpoint", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
