"""End-to-end vision-and-language training, from raw pixels.

    e2e-vl train --config configs/demo/refcoco.yaml
    e2e-vl ask --run runs/demo_refcoco --image IMAGE --text "the small red circle" --output DIR

See `e2e-vl COMMAND --help`. `e2e-vl train --num-processes N` starts several processes.
"""

# torch, transformers, accelerate and matplotlib take seconds to import. Only functions that need them import them, so
# that `--help` and errors in settings appear at once.

from __future__ import annotations

import argparse
import difflib
import functools
import importlib
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from typing_extensions import override

from detector.errors import StoppedRunError, UserError
from e2e_vl import __version__
from e2e_vl.registry import check_name
from e2e_vl.terminal import LAUNCHED, LOST_PROCESS, lasting_output, make_stopped_error, stopped_by_signals

# errors whose message is shown without a traceback
EXPECTED_ERRORS = (UserError, ChildProcessError, ConnectionError, FloatingPointError, MemoryError)
# what torch.distributed (gloo, NCCL) says of a process that has ended
CONNECTION_LOST = ("Connection closed by peer", "Connection reset by peer", "Socket closed", "remote process exited")


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors are one sentence, followed by the first example of the help instead of all options."""

    words: Sequence[str] = ()  # of the call

    @override
    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        self.words = sys.argv[1:] if args is None else args
        return super().parse_known_args(args, namespace)

    @override
    def parse_known_intermixed_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        self.words = sys.argv[1:] if args is None else args  # newer versions of Python call no other method
        return super().parse_known_intermixed_args(args, namespace)

    def starts_with_value(self) -> bool:
        """Return whether the call begins with a word that needs an option before it, as in `e2e-vl evaluate demo`."""
        if not self.words or self.words[0].startswith("-") or "=" in self.words[0]:
            return False
        positional = [action.dest for action in self._actions if not action.option_strings]
        return positional in ([], ["overrides"])  # a word that is no setting has no place there

    @override
    def error(self, message: str) -> NoReturn:
        """Print a mistake with an example, and exit with status 2."""
        for word in re.findall(r"(?<!\S)--[\w-]+", message.partition("unrecognized arguments:")[2]):
            message += suggest_option(self, word)
        required = re.search(r"arguments are required: (--[\w-]+)", message)
        if required is not None and self.starts_with_value():
            message += f"; did you mean {required[1]} {self.words[0]}?"
        example = re.search(r"^ {4}(\S.*(?:\\\n.*)*)", self.description, re.MULTILINE)
        if example is not None:
            message += f"\nexample: {example[1]}"
        self.exit(2, f"error: {message}\n{self.prog} --help explains every option.\n")


def suggest_option(parser: argparse.ArgumentParser, word: str) -> str:
    """Return a question that names the option nearest to a mistyped one; "" if none is near."""
    options = re.findall(r"--[\w-]+", parser.format_help())
    nearest = difflib.get_close_matches(word, options, n=1, cutoff=0.75)
    return f"; did you mean {nearest[0]}?" if nearest else ""


def make_parser(doc: str, prog: str | None = None) -> CommandParser:
    """Make a parser whose help begins with `doc`, unformatted; `prog` None = the name of the script."""
    return CommandParser(prog=prog, description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def parse_with_settings(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """Parse options and `key=value` settings, which may be mixed."""
    args, unknown = parser.parse_known_intermixed_args(argv)
    if unknown:
        suggestion = suggest_option(parser, unknown[0])
        if suggestion:
            raise UserError(f"There is no option {unknown[0]}{suggestion}")
        key, _, value = unknown[0].lstrip("-").partition("=")
        if not value:
            value = next((word for word in args.overrides if "=" not in word), "VALUE")
        raise UserError(f"There is no option {unknown[0]}; a setting has no dashes: {key}={value}.")
    return args


def print_errors(main: Callable[..., int], advice: str = "") -> Callable[..., int]:
    """Print expected errors, and errors of the operating system, without a traceback and exit with status 2.

    Every other error is a bug and keeps its traceback. A command that a signal stopped says so in one sentence, then
    `advice`, and exits with the signal's status. Output whose reader has gone stops nothing.
    """

    @functools.wraps(main)
    def wrapped(*args: Any, **kwargs: Any) -> int:
        with lasting_output():
            try:
                with stopped_by_signals(advice):
                    return main(*args, **kwargs)
            except KeyboardInterrupt:
                return print_stop(make_stopped_error(signal.SIGINT, advice))
            except StoppedRunError as stopped:
                return print_stop(stopped)
            except (*EXPECTED_ERRORS, OSError) as error:
                if not isinstance(error, EXPECTED_ERRORS) and error.errno is None:  # raised by a library
                    raise
                message = str(error) or f"{type(error).__name__}: out of memory, or the system gave no reason."
                sys.stderr.write(f"error: {message}\n")  # in one piece, because all processes of a run may write it
                return 2
            except RuntimeError as error:
                if "RANK" not in os.environ or not any(text in str(error) for text in CONNECTION_LOST):
                    raise
                if LAUNCHED not in os.environ:  # that launcher waits for the process that knows the reason
                    print(
                        f"error: process {os.environ['RANK']} stops because another process has ended.", file=sys.stderr
                    )
                return LOST_PROCESS

    return wrapped


def print_stop(stopped: StoppedRunError) -> int:
    """Print why a command was stopped, and return its exit status."""
    if str(stopped):
        print(stopped, file=sys.stderr)
    return stopped.status


# name -> function (imported when called) and description
COMMANDS = {
    "download": ("download:main", "download data sets, published weights and features by name"),
    "check-data": ("check_data:main", "check the files of a training before it, and find shared images"),
    "train": ("run:train", "train detector, encoder and task together"),
    "evaluate": ("run:evaluate", "evaluate a trained run on a split"),
    "score": ("score:main", "score anybody's predictions of referring expressions or phrases"),
    "predict": ("run:predict", "write the predictions for a split to a file"),
    "ask": ("ask:main", "ask a trained run about images"),
    "explore": ("explore:main", "open a web page to explore a trained run"),
    "extract": ("extract:main", "extract regions and features from one or many images"),
    "detect": ("detect:main", "let any object detector of transformers propose boxes"),
    "import-features": ("import_features:main", "convert published region features"),
    "analyze-attention": ("analyze_attention:main", "measure what attention heads ground"),
    "probe": ("probe:main", "measure what region features know, and their gradients"),
    "convert": ("convert:main", "convert published weights, or export a trained run to an official format"),
    "convert-annotations": ("convert_annotations:main", "convert the export of an annotation tool to training data"),
    "export": ("export:main", "export detector and encoder with torch.export"),
    "reproduce": ("reproduce:main", "run the chain of commands that leads to a row of a paper's table"),
    "synthesize": ("synthesize:main", "draw a data set of scenes in the official formats"),
}


def main(argv: list[str] | None = None) -> int:
    """Run the named command, and return its exit status."""
    words = sys.argv[1:] if argv is None else argv
    parser = make_parser(__doc__, "e2e-vl")
    if words and not words[0].startswith("-"):
        try:
            check_name(words[0], COMMANDS, "The command")
        except UserError as error:
            parser.error(str(error))
    parser.add_argument("--version", action="version", version=f"e2e-vl {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, text) in COMMANDS.items():
        subparsers.add_parser(name, help=text, add_help=False)
    command = parser.parse_args(words[:1] or ["--help"]).command  # the command parses its own arguments
    module_name, _, function_name = COMMANDS[command][0].partition(":")
    run_command = getattr(importlib.import_module(f"e2e_vl.cli.{module_name}"), function_name)
    return run_command(words[1:], f"e2e-vl {command}")
