"""Reproduce a row of a paper's table: the chain of commands from published files to its numbers.

    e2e-vl reproduce vl_bert
    e2e-vl reproduce vl_bert 1 base --data DATA --dry-run
    e2e-vl reproduce vl_bert 1 base --data DATA --launch "accelerate launch --num_processes 4"
    e2e-vl reproduce vl_bert 1 base --data DATA --script vcr.sh

Without a row it lists the rows and their published numbers. With one (or `all` of a table) it prints the shortest
chain, which starts from published weights where there are any, and then the one with every training: the files that
DATA lacks with the command that downloads them, the commands, images and steps, with --estimate GPU memory and hours,
and what differs from the paper. Then it runs the chain, unless a file is missing; a training with published weights is
left out if they are there. Finished steps are not repeated and interrupted ones are continued. With `--seeds` each step
is run once per seed (one that sets its own: once), and numbers are mean ± standard deviation. --script writes the
shortest chain as a shell script for a cluster instead. A paper is a file in configs/reproduce; vl_bert.yaml has the
format.
"""

from __future__ import annotations

import functools
import math
import os
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from detector.errors import MissingFileError, UserError
from detector.io import atomic_file, read_json, read_yaml
from e2e_vl.cli.main import make_parser, print_errors
from e2e_vl.cli.processes import run_command
from e2e_vl.config_files import CONFIGS, find_config, load_config
from e2e_vl.registry import Config, decode
from e2e_vl.terminal import STOP_SIGNALS, make_stopped_error

PAPERS = CONFIGS / "reproduce"
BENCHMARK = Path(__file__).parents[2] / "tools" / "benchmark.py"
NAME = re.compile(r"\{(\w+)\}")  # in a command
SINGLE_PROCESS = ("import-features",)  # commands that are never launched with several processes


class PublishedFile(Config, frozen=True):
    """A file or folder that is published, and where the chains expect it."""

    path: str  # relative to --data
    download: str = ""  # name for `e2e-vl download`
    address: str = ""  # without such a name: where the project publishes it


class Step(Config, frozen=True):
    """A command of e2e-vl; {name} in it is the output of another step, a published file or a name of `Row.with`."""

    command: str
    needs: tuple[str, ...] = ()  # published files that the command reads without naming them
    instead: str | None = None  # published file with the same weights; if it exists, the step is not run
    best: bool = False  # the model of this training is its best one (train.metric_for_best_model), not the last
    samples: int | None = None  # of an epoch of training: images, each with its texts
    processes: int = 1  # GPUs of the official code
    boxes: int = 36  # of an image, and wordpieces of a text, for an estimate of memory and time
    words: int = 14
    differs: str = ""  # from the paper


class Number(Config, frozen=True, array_like=True):
    """A number of a row, as [published, step, metric]."""

    published: float | None  # None: not published
    step: str
    metric: str = ""  # of the step, as a fraction; "" = an evaluation server computes it

    @property
    def text(self) -> str:
        """The published number, or a dash."""
        return "–" if self.published is None else str(self.published)


class Row(Config, frozen=True):
    """A row of a table or figure."""

    title: str
    numbers: dict[str, Number]
    names: dict[str, str] = msgspec.field(default_factory=dict, name="with")  # used in steps -> step, file or word
    differs: str = ""


class Paper(Config, frozen=True):
    """The rows of a paper, and the steps that lead to their numbers."""

    title: str
    steps: dict[str, Step]
    tables: dict[str, dict[str, Row]]  # table or figure -> name of the row -> row
    files: dict[str, PublishedFile]
    differs: tuple[str, ...] = ()  # in all rows
    compare: tuple[str, ...] = ()  # results of other models, with their source


class Chain:
    """The steps of a row in order, with their commands, and the published files (in the folder `data`) that they read.

    Args:
        settings: `key=value`, of all trainings.
        seed: of all trainings that do not set their own.
        from_published: whether published weights take the place of the trainings before them; None: those that are
            there.
    """

    def __init__(
        self,
        paper: Paper,
        name: str,
        row: Row,
        data: Path,
        output: Path,
        settings: list[str],
        seed: int | None = None,
        *,
        from_published: bool | None = None,
    ) -> None:
        self.paper = paper
        self.name = name
        self.row = row
        self.data = data
        self.output = output
        self.settings = settings
        self.seed = seed
        self.from_published = from_published
        self.steps: dict[str, Step] = {}
        self.files: dict[str, PublishedFile] = {}
        for number in row.numbers.values():
            self._add(number.step)

    def _add(self, name: str) -> None:
        """Add a file, or a step after all that it reads; other names are words."""
        if name in self.paper.files:
            self.files[name] = self.paper.files[name]
        elif name in self.paper.steps and self.is_replaced(name):
            self._add(self.paper.steps[name].instead)
        elif name in self.paper.steps:
            for other in (*self._names(name), *self.paper.steps[name].needs):
                self._add(other)
            self.steps[name] = self.paper.steps[name]

    def _names(self, name: str) -> list[str]:
        """Return what the names in a command stand for."""
        return [self.row.names.get(word, word) for word in NAME.findall(self.paper.steps[name].command)]

    def is_replaced(self, name: str) -> bool:
        """Return whether published weights take the place of a training."""
        file = self.paper.steps[name].instead
        if file is None:
            return False
        if self.from_published is None:
            return self.path_of(file).exists()
        return self.from_published

    def _depends_on_row(self, name: str) -> bool:
        if name not in self.paper.steps:
            return False
        words = NAME.findall(self.paper.steps[name].command)
        return any(word in self.row.names or self._depends_on_row(word) for word in words)

    def _trains(self, name: str) -> bool:
        step = self.paper.steps.get(name)
        if step is None:
            return False
        return step.command.startswith("train ") or any(map(self._trains, self._names(name)))

    def path_of(self, name: str) -> Path:
        """Return the path of a published file or of a step's output, which a published file may replace."""
        if name in self.paper.files:
            return self.data / self.paper.files[name].path
        step = self.paper.steps[name]
        if self.is_replaced(name):
            return self.path_of(step.instead)
        folder = name
        if self._depends_on_row(name):
            folder += f"_{self.name}"
        is_shared = self.seed is None or " seed=" in step.command or not self._trains(name)
        if not is_shared:
            folder += f"_{self.seed}"
        return self.output / folder

    def command(self, name: str) -> list[str]:
        """Return the words of a step's command, without `e2e-vl`."""
        command = self.steps[name].command
        words = [self._fill(word, name) for word in shlex.split(command)]
        if words[0] == "train":
            if " data.root=" not in command:
                words.append(f"data.root={self.data}")
            words.append(f"output={self.path_of(name)}")
            if self.seed is not None and " seed=" not in command:
                words.append(f"seed={self.seed}")
            words += self.settings
        return words

    def _fill(self, word: str, step_name: str) -> str:
        """Replace the names in a word of a step's command."""
        names = {"output": step_name, "data": str(self.data), **self.row.names}

        def replacement(match: re.Match[str]) -> str:
            target = names.get(match[1], match[1])
            if target not in self.paper.steps and target not in self.paper.files:
                return target if match[1] in names else match[0]
            path = self.path_of(target)
            step = self.paper.steps.get(target)
            if step is not None and step.best and not self.is_replaced(target):
                path /= "best"
            if word.startswith("data.files."):  # they are relative to data.root
                return self._relative_to_data(path)
            return str(path)

        return NAME.sub(replacement, word)

    def _relative_to_data(self, path: Path) -> str:
        if path.is_absolute():
            return str(path)
        return os.path.relpath(os.path.realpath(path), os.path.realpath(self.data))

    def download_command(self, *, only_missing: bool) -> list[str]:
        """Return the words of the command that downloads the files; none if no file has a name for it."""
        files = self.missing() if only_missing else self.files.values()
        names = list(dict.fromkeys(file.download for file in files if file.download))
        if not names:
            return []
        return ["download", *names, "--data", str(self.data)]

    def missing(self) -> list[PublishedFile]:
        """Return the published files that are not there."""
        return [file for name, file in self.files.items() if not self.path_of(name).exists()]

    def describe(self, *, with_estimate: bool = False) -> Iterator[str]:
        """Yield the lines of a dry run.

        Args:
            with_estimate: add the GPU memory and the hours to expect of trainings.
        """
        yield f"{self.name}: {self.row.title}"
        for name, number in self.row.numbers.items():
            yield f"  {name} {number.text}: {number.metric or 'the file for a server'} of {number.step}"
        for result in self.paper.compare:
            yield f"compare: {result}"
        yield from self.describe_steps(with_estimate=with_estimate)

    def describe_steps(self, *, with_estimate: bool = False) -> Iterator[str]:
        """Yield the missing files, the commands, and what differs from the paper; arguments as in `describe`."""
        download = self.download_command(only_missing=True)
        if download:
            paths = [str(self.data / file.path) for file in self.missing() if file.download]
            yield f"missing: {', '.join(paths)}"
            yield f"   e2e-vl {shlex.join(download)}"
        for file in self.missing():
            if not file.download:
                yield f"missing: {self.data / file.path}: {file.address}"
        for order, (name, step) in enumerate(self.steps.items(), start=1):
            words = self.command(name)
            alternative = f" (or {self.path_of(step.instead)})" if step.instead else ""
            yield f"{order}. {name}{alternative}"
            yield f"   e2e-vl {shlex.join(words)}"
            if words[0] == "train":
                yield from _describe_training(name, step, words, with_estimate=with_estimate)
        differs = [*self.paper.differs, *(step.differs for step in self.steps.values()), self.row.differs]
        for text in dict.fromkeys(differs):
            if text:
                yield f"differs: {text}"

    def script_lines(self, launch: str | None) -> Iterator[str]:
        """Yield the lines of a shell script, one command a line.

        Args:
            launch: the command that starts Python in trainings and evaluations; None: the console script.
        """
        for file in self.files.values():
            if not file.download:
                yield f"# needs {self.data / file.path}: {file.address}"
        download = self.download_command(only_missing=False)
        if download:
            yield f"e2e-vl {shlex.join(download)}"
        for name in self.steps:
            words = self.command(name)
            start = "e2e-vl"
            if launch is not None and words[0] not in SINGLE_PROCESS:
                start = f"{launch} -m e2e_vl"
            yield f"{start} {shlex.join(words)}"

    def run(self, launch: str) -> None:
        """Run the steps that are not finished; when one is, OUTPUT/STEP.log has its command and what it printed."""
        for name in self.steps:
            path = self.path_of(name)
            log = path.with_name(f"{path.name}.log")
            words = self.command(name)
            command = f"e2e-vl {shlex.join(words)}"
            if log.exists() and log.read_text("utf-8").partition("\n")[0] != command:
                raise UserError(f"{log} does not begin with `{command}`: choose another --output.")
            if log.exists():  # the step is finished
                continue
            if words[0] == "train" and path.is_dir():
                words.append("--resume")
            print(f"e2e-vl {shlex.join(words)}", flush=True)
            start = [sys.executable] if words[0] in SINGLE_PROCESS else shlex.split(launch)
            with atomic_file(log) as part, part.open("w", encoding="utf-8") as file:
                print(command, file=file, flush=True)
                status = run_command([*start, "-m", "e2e_vl", *words], file)
                if status - 128 in STOP_SIGNALS:
                    raise make_stopped_error(status - 128, "Repeat the command to continue.")
                if status != 0:
                    raise UserError(f"The step {name} ended with status {status}; repeat the command to continue.")

    def measured(self, number: Number) -> float:
        """Return a number after the run, in percent."""
        path = self.path_of(number.step)
        if (path / "metrics.json").exists():
            metrics = read_json(path / "metrics.json")
            best_metrics = metrics.get("best", {}).get("metrics", metrics)  # absent if the last model is best
            return 100 * best_metrics[number.metric]
        printed = path.with_name(f"{path.name}.log").read_text("utf-8")
        match = re.search(rf"^{re.escape(number.metric)} +([\d.]+)( |$)", printed, re.MULTILINE)
        return 100 * float(match[1])


def _describe_training(name: str, step: Step, words: list[str], *, with_estimate: bool) -> Iterator[str]:
    """Yield the examples and steps of a training, with an estimate of GPU memory and hours if asked for, as lines."""
    train = load_config(words[2], words[3:]).train
    steps_per_epoch = math.ceil((step.samples or 0) / train.images_per_batch)
    steps = train.max_steps or math.ceil(train.epochs * steps_per_epoch)
    examples = steps * train.images_per_batch
    gpus = "1 GPU" if step.processes == 1 else f"{step.processes} GPUs"
    yield f"   {examples:,} examples in {steps:,} steps of {train.images_per_batch}, on {gpus}"
    if not with_estimate or not step.samples:
        return
    settings = [word for word in words[3:] if "weights=" not in word]
    values = {"examples": step.samples, "epochs": examples / step.samples, "gpus": step.processes}
    values |= {"boxes": step.boxes, "words": step.words}
    options = [f"--{key}={value}" for key, value in values.items()]
    call = [sys.executable, str(BENCHMARK), "estimate", "--config", words[2], *options, *settings]
    done = subprocess.run(call, check=False, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise UserError(f"There is no estimate of the step {name}, see above; leave out --estimate.")
    yield "   GFLOP of an example, GiB of each GPU, and hours on 1 / all GPUs in bf16, not measured:"
    for line in done.stdout.splitlines():
        if "---" not in line:
            yield f"   {line}"


def write_script(path: Path, title: str, chains: Sequence[Chain], launch: str | None) -> None:
    """Write the chains as an executable shell script; a step that several chains share is there once."""
    commands: dict[str, None] = {}
    for chain in chains:
        commands |= dict.fromkeys(chain.script_lines(launch))
    lines = ["#!/usr/bin/env bash", f"# {title}", "set -euo pipefail", *commands]
    with atomic_file(path) as part:
        part.write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")
        part.chmod(0o755)


def read_paper(name: str) -> Paper:
    """Read the file of a paper in configs/reproduce."""
    return decode(read_yaml(find_config(f"reproduce/{name}")), Paper, name)


@print_errors
def main(argv: list[str] | None = None, prog: str | None = None) -> int:
    parser = make_parser(__doc__, prog)
    parser.add_argument("paper", help="name of a file in configs/reproduce")
    parser.add_argument("table", nargs="?", help="table or figure")
    parser.add_argument("row", nargs="?", help="row of the table, or all")
    parser.add_argument("--dry-run", action="store_true", help="only print the chain")
    parser.add_argument(
        "--estimate", action="store_true", help="print GPU memory and hours (tools/benchmark.py estimate)"
    )
    parser.add_argument("--data", type=Path, default=Path("DATA"), help="folder of the published files (default: DATA)")
    parser.add_argument("--output", type=Path, help="folder of the runs (default: runs/PAPER)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[None], help="seeds (default: those of the configs)")
    parser.add_argument("--set", nargs="+", default=[], metavar="key=value", help="settings for all trainings")
    launch = "command that starts Python, such as 'accelerate launch --num_processes 4' (default: this Python)"
    parser.add_argument("--launch", metavar="COMMAND", help=launch)
    script = "write the shortest chain as a shell script, and run nothing"
    parser.add_argument("--script", type=Path, metavar="FILE", help=script)
    args = parser.parse_args(argv)
    if args.script is not None and args.row is None:
        raise UserError("--script needs a table and a row.")
    if args.estimate and not BENCHMARK.is_file():
        raise MissingFileError("--estimate needs tools/benchmark.py, which is only in a clone of the repository.")
    paper = read_paper(args.paper)
    tables = {name: rows for name, rows in paper.tables.items() if args.table in (None, name)}
    if not tables:
        raise UserError(f"{args.paper} has no table {args.table}; `e2e-vl reproduce {args.paper}` lists the tables.")
    if args.row is None:
        print(paper.title)
        for table, rows_of_table in tables.items():
            for name, row in rows_of_table.items():
                numbers = ", ".join(f"{key} {number.text}" for key, number in row.numbers.items())
                print(f"{table:10s} {name:20s} {row.title}: {numbers}")
        for result in paper.compare:
            print(f"compare: {result}")
        return 0
    rows: dict[str, Row] = {}
    for rows_of_table in tables.values():
        rows |= {name: row for name, row in rows_of_table.items() if args.row in ("all", name)}
    if not rows:
        raise UserError(f"{args.paper} has no such row; `e2e-vl reproduce {args.paper}` lists them.")
    output = args.output or Path("runs") / args.paper

    def chains_of(name: str, row: Row, *, from_published: bool | None) -> list[Chain]:
        """Return the chain of a row for each seed."""
        chain = functools.partial(Chain, paper, name, row, args.data, output, args.set, from_published=from_published)
        return [chain(seed) for seed in args.seeds]

    if args.script is not None:
        short: list[Chain] = []
        for name, row in rows.items():
            short += chains_of(name, row, from_published=True)
        write_script(args.script, f"{paper.title}: {args.table} {args.row}", short, args.launch)
        print(f"{args.script} has the shortest chain of {', '.join(rows)}; run it in the same folder as this command.")
        return 0
    for name, row in rows.items():
        short = chains_of(name, row, from_published=True)[0]
        long = chains_of(name, row, from_published=False)[0]
        print("\n".join(short.describe(with_estimate=args.estimate)))
        if long.steps != short.steps:
            print("with every training, instead of published weights:")
            print("\n".join(long.describe_steps(with_estimate=args.estimate)))
        if args.dry_run:
            continue
        chains = chains_of(name, row, from_published=None)
        if chains[0].missing():
            paths = ", ".join(str(args.data / file.path) for file in short.missing())
            raise MissingFileError(f"The shortest chain lacks {paths}; see above.")
        for chain in chains:
            chain.run(args.launch or shlex.quote(sys.executable))
        for key, number in row.numbers.items():
            result = "see the file for the server"
            if number.metric:
                values = [chain.measured(number) for chain in chains]
                result = f"{statistics.mean(values):.2f}"
                if len(values) > 1:
                    result += f" ± {statistics.stdev(values):.2f}"
            print(f"{name}: {key} {result} (published: {number.text})")
    return 0
