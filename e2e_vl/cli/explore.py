"""Open a web page to explore the predictions of a trained run on your images.

    e2e-vl explore
    e2e-vl explore --run runs/demo_refcoco --port 7861

Open the printed address. The page opens with an answer about an image of the run; click another example, or drop your
own image and ask about it, perhaps with a file of boxes to choose from. Click a region to mask it and compare the
answers before and after, or a word to see its attention in any layer and head. Only this machine can open the page, and
images are not uploaded anywhere else.
Requires gradio: pip install "e2e-vl[explore]".
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys

from detector.errors import UserError
from e2e_vl.cli.main import make_parser, print_errors
from e2e_vl.explorer.hosts import LOOPBACK, is_loopback
from e2e_vl.io import find_run


def build_parser(prog: str | None = None) -> argparse.ArgumentParser:
    parser = make_parser(__doc__, prog)
    run_help = "run directory of e2e-vl train, a saved model, or a model of the hub (default: the demo's model)"
    parser.add_argument("--run", default="demo", help=run_help)
    parser.add_argument("--host", default=LOOPBACK, help="address to listen on (default: this machine only)")
    parser.add_argument(
        "--open-to-network",
        action="store_true",
        help="allow a --host that other machines can reach, without a password",
    )
    parser.add_argument("--port", type=int, default=7860, help="port to listen on (default: %(default)s)")
    parser.add_argument("--device", help="cpu, cuda, cuda:1 or mps (default: the CUDA GPU if there is one)")
    return parser


@print_errors
def main(argv: list[str] | None = None, prog: str | None = None) -> int:
    args = build_parser(prog).parse_args(argv)
    is_local = is_loopback(args.host)
    if not is_local and not args.open_to_network:
        raise UserError(
            f"--host {args.host} lets other machines use this page without a password; add --open-to-network if "
            f"you want that, or leave --host at {LOOPBACK}."
        )
    find_run(args.run)  # raises an error if the run is missing
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read when gradio is imported
    if importlib.util.find_spec("gradio") is None:
        raise UserError('The explorer needs gradio; install it with pip install "e2e-vl[explore]".')
    from e2e_vl.api.model import load  # late: imports torch
    from e2e_vl.explorer.session import Explorer
    from e2e_vl.explorer.web_page import build_page, serve

    if not is_local:
        print(f"warning: every machine that reaches {args.host} can use this page.", file=sys.stderr)
    explorer = Explorer(load(args.run, args.device))
    if explorer.warning:
        print(f"warning: {explorer.warning}", file=sys.stderr)
    page = build_page(explorer, f"e2e-vl explorer: {explorer.model.source.name}")
    address = serve(page, host=args.host, port=args.port)
    print(f"{address}  (Ctrl+C to quit)", flush=True)
    page.block_thread()
    return 0
