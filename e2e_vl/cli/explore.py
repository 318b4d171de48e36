"""A page in the browser that shows what a trained run does with your photos.

    python tools/explore.py --run runs/demo_refcoco
    e2e-vl explore --run runs/demo_refcoco --port 7861

Open the printed address, drop a photo, write a phrase or a question, and ask. The page shows the regions, the answer
and the phrases. A click on a word or a region shows its attention in any layer and head; or a click on a region hides
it, and the answer of before and after stand side by side. Only this machine can open the page, and the photos stay on
it. It needs gradio: pip install "e2e-vl[explore]".
"""

from __future__ import annotations

import argparse
import ipaddress
import os
import sys

from detector.errors import UserError
from e2e_vl.cli.common import make_parser, says_errors
from e2e_vl.explorer.limits import Limits
from e2e_vl.io import is_shared_model

LOOPBACK = "127.0.0.1"
PORT = 7860
HIGHEST_PORT = 65535


def build_parser(prog: str | None = None) -> argparse.ArgumentParser:
    """The options of the command."""
    parser = make_parser(__doc__, prog)
    parser.add_argument(
        "--run", required=True, help="run directory of tools/train.py, a saved model, or a model of the hub"
    )
    parser.add_argument(
        "--host", default=LOOPBACK, help=f"address to listen at (default {LOOPBACK}: this machine only)"
    )
    parser.add_argument(
        "--open-to-network",
        action="store_true",
        help="allow a --host that other machines can reach, without a password",
    )
    parser.add_argument("--port", type=int, default=PORT, help=f"port to listen at (default {PORT})")
    parser.add_argument("--device", help="where the model runs, such as cpu (default: the GPU if there is one)")
    parser.add_argument(
        "--max-megapixels",
        type=float,
        default=Limits.megapixels,
        help=f"largest photo, decoded (default {Limits.megapixels:g})",
    )
    parser.add_argument(
        "--max-megabytes",
        type=float,
        default=Limits.megabytes,
        help=f"largest photo, as a file (default {Limits.megabytes:g})",
    )
    return parser


@says_errors
def main(argv: list[str] | None = None, prog: str | None = None) -> int:
    arguments = build_parser(prog).parse_args(argv)
    check_place(arguments.host, arguments.port, arguments.open_to_network)
    limits = Limits(arguments.max_megapixels, arguments.max_megabytes)
    is_shared_model(arguments.run)  # says in one sentence what is missing
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read when gradio is imported
    from e2e_vl.explorer.web_page import import_gradio

    import_gradio()  # before the model, which takes longer to load
    from e2e_vl.api.model import load
    from e2e_vl.explorer.session import Explorer
    from e2e_vl.explorer.web_page import build_page, serve

    if not is_loopback(arguments.host):
        print(
            f"warning: every machine that reaches {arguments.host} can use this page, without a password.",
            file=sys.stderr,
        )
    explorer = Explorer(load(arguments.run, arguments.device))
    if explorer.warning:
        print(f"warning: {explorer.warning}", file=sys.stderr)
    page = build_page(explorer, limits, f"e2e-vl explorer: {arguments.run}")
    address = serve(page, limits, host=arguments.host, port=arguments.port)
    print(f"{address}  (Ctrl+C ends it)", flush=True)
    page.block_thread()
    return 0


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_place(host: str, port: int, is_open: bool) -> None:
    """Raises ValueError for a port that does not exist, or a host that others can reach and nobody allowed."""
    if not 0 < port <= HIGHEST_PORT:
        raise UserError(f"--port is {port}; give a number from 1 to {HIGHEST_PORT}.")
    if not is_loopback(host) and not is_open:
        raise UserError(
            f"--host {host} lets other machines use this page without a password; add --open-to-network if you want "
            f"that, or leave --host at {LOOPBACK}."
        )
