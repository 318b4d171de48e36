"""Reproduce a row of a paper's table: the chain of commands from published files to its numbers.

    e2e-vl reproduce vl_bert
    e2e-vl reproduce vl_bert 1 base --data DATA --dry-run
    e2e-vl reproduce vl_bert 1 base --data DATA --launch "accelerate launch --num_processes 4"

Without a row it lists the rows and their published numbers. With one (or `all` of a table) it prints the chain: the
commands, images and steps, with --estimate GPU memory and hours, the files that DATA lacks and where they are
published, and what differs from the paper. Then it runs the chain, unless a file is missing. Finished steps are not
repeated and interrupted ones are continued. With `--seeds` each step is run once per seed (one that sets its own:
once), and numbers are mean ± standard deviation. A paper is a file in configs/reproduce; vl_bert.yaml has the format.
"""

from __future__ import annotations

import math
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from detector.errors import MissingFileError, UserError
from detector.io import atomic_file, read_json, read_yaml
from e2e_vl.cli.main import make_parser, print_errors
from e2e_vl.config import CONFIGS, find_config, load_config
from e2e_vl.parts import Settings, decode

PAPERS = CONFIGS / "reproduce"
BENCHMARK = Path(__file__).parents[2] / "tools" / "benchmark.py"
NAME = re.compile(r"\{(\w+)\}")  # in a command


class PublishedFile(Settings, frozen=True):
    """A file or folder that is published, and where the chains expect it."""

    path: str  # relative to --data
    download: str = ""  # name for `e2e-vl download`
    address: str = ""  # without such a name: where the project publishes it


class Step(Settings, frozen=True):
    """A command of e2e-vl; {name} in it is the output of another step, a published file or a name of `Row.with`."""

    command: str
    needs: tuple[str, ...] = ()  # published files that the command reads without naming them
    instead: str | None = None  # published file with the same weights; if it exists, the step is not run
    best: bool = False  # the model of this training is its best one (train.keep_best), not the last
    samples: int | None = None  # of an epoch of training: images, each with its texts
    processes: int = 1  # GPUs of the official code
    boxes: int = 36  # of an image, and wordpieces of a text, for an estimate of memory and time
    words: int = 14
    differs: str = ""  # from the paper


class Number(Settings, frozen=True, array_like=True):
    """A number of a row, as [published, step, metric]."""

    published: float | None  # None: not published
    step: str
    metric: str = ""  # of the step, as a fraction; "" = an evaluation server computes it

    @property
    def text(self) -> str:
        return "–" if self.published is None else str(self.published)


class Row(Settings, frozen=True):
    """A row of a table or figure."""

    title: str
    numbers: dict[str, Number]
    names: dict[str, str] = msgspec.field(default_factory=dict, name="with")  # used in steps -> step, file or word
    from_memory: bool = False  # the numbers were not compared with the paper or a list of its results
    differs: str = ""


class Paper(Settings, frozen=True):
    """The rows of a paper, and the steps that lead to their numbers."""

    title: str
    steps: dict[str, Step]
    tables: dict[str, dict[str, Row]]  # table or figure -> name of the row -> row
    files: dict[str, PublishedFile]
    differs: tuple[str, ...] = ()  # in all rows


class Chain:
    """The steps of a row in order, with their commands, and the published files (in the folder `data`) that they read.

    `settings` (`key=value`) are of all trainings, and so is `seed`, where they do not set their own.
    """

    def __init__(
        self, paper: Paper, name: str, row: Row, data: Path, output: Path, settings: list[str], seed: int | None = None
    ) -> None:
        self.paper, self.name, self.row, self.data, self.output = paper, name, row, data, output
        self.settings, self.seed = settings, seed
        self.steps: dict[str, Step] = {}
        self.files: dict[str, PublishedFile] = {}
        for number in row.numbers.values():
            self._add(number.step)

    def _add(self, name: str) -> None:
        if name in self.paper.files:
            self.files[name] = self.paper.files[name]
        elif name in self.paper.steps and not self.is_replaced(name):
            for other in (*self._names(name), *self.paper.steps[name].needs):
                self._add(other)
            self.steps[name] = self.paper.steps[name]

    def _names(self, name: str) -> list[str]:
        """What the names in a command stand for."""
        return [self.row.names.get(word, word) for word in NAME.findall(self.paper.steps[name].command)]

    def is_replaced(self, name: str) -> bool:
        file = self.paper.steps[name].instead
        return file is not None and self.place(file).exists()

    def _depends_on_row(self, name: str) -> bool:
        words = NAME.findall(self.paper.steps[name].command) if name in self.paper.steps else []
        return any(word in self.row.names or self._depends_on_row(word) for word in words)

    def _trains(self, name: str) -> bool:
        step = self.paper.steps.get(name)
        return step is not None and (step.command.startswith("train ") or any(map(self._trains, self._names(name))))

    def place(self, name: str) -> Path:
        """A published file, the output of a step, or the file that takes its place."""
        if name in self.paper.files:
            return self.data / self.paper.files[name].path
        step = self.paper.steps[name]
        if self.is_replaced(name):
            return self.place(step.instead)
        row = f"_{self.name}" if self._depends_on_row(name) else ""
        is_shared = self.seed is None or " seed=" in step.command or not self._trains(name)
        return self.output / f"{name}{row}{'' if is_shared else f'_{self.seed}'}"

    def command(self, name: str) -> list[str]:
        def fill(found: re.Match[str]) -> str:
            names = {"output": name, "data": str(self.data), **self.row.names}
            word = names.get(found[1], found[1])
            if word in self.paper.steps or word in self.paper.files:
                step, place = self.paper.steps.get(word), self.place(word)
                return str(place / "best" if step is not None and step.best and not self.is_replaced(word) else place)
            return word if found[1] in names else found[0]

        words = [NAME.sub(fill, word) for word in shlex.split(self.steps[name].command)]
        if words[0] != "train":
            return words
        seed = [] if self.seed is None or " seed=" in self.steps[name].command else [f"seed={self.seed}"]
        return [*words, f"data.root={self.data}", f"output={self.place(name)}", *seed, *self.settings]

    def missing(self) -> list[PublishedFile]:
        return [file for name, file in self.files.items() if not self.place(name).exists()]

    def describe(self, *, with_estimate: bool = False) -> Iterator[str]:
        """The lines of a dry run, with the GPU memory and the hours to expect of trainings if wanted."""
        yield f"{self.name}: {self.row.title}"
        for name, number in self.row.numbers.items():
            yield f"  {name} {number.text}: {number.metric or 'the file for a server'} of {number.step}"
        if self.row.from_memory:
            yield "  These numbers are from memory: they were not compared with the paper."
        for order, (name, step) in enumerate(self.steps.items(), start=1):
            words = self.command(name)
            yield f"{order}. {name}{f' (or {self.place(step.instead)})' if step.instead else ''}"
            yield f"   e2e-vl {shlex.join(words)}"
            if words[0] == "train":
                train = load_config(words[2], words[3:]).train
                epochs = math.ceil((step.samples or 0) / train.images_per_batch)
                steps = train.max_steps or math.ceil(train.epochs * epochs)
                images, gpus = steps * train.images_per_batch, f"{step.processes} GPU{'s' * (step.processes > 1)}"
                yield f"   {images:,} examples in {steps:,} steps of {train.images_per_batch}, on {gpus}"
                if with_estimate and step.samples:
                    own = [word for word in words[3:] if "weights=" not in word]
                    share = {"examples": step.samples, "epochs": images / step.samples, "gpus": step.processes}
                    share |= {"boxes": step.boxes, "words": step.words}
                    options = [f"--{key}={value}" for key, value in share.items()]
                    call = [sys.executable, str(BENCHMARK), "estimate", "--config", words[2], *options, *own]
                    done = subprocess.run(call, check=False, stdout=subprocess.PIPE, text=True)
                    if done.returncode != 0:
                        raise UserError(f"There is no estimate of the step {name}, see above; leave out --estimate.")
                    yield "   GFLOP of an example, GiB of each GPU, and hours on 1 / all GPUs in bf16, not measured:"
                    yield from (f"   {line}" for line in done.stdout.splitlines() if "---" not in line)
        for file in self.missing():
            how = f"e2e-vl download {file.download} --data {self.data}" if file.download else file.address
            yield f"missing: {self.data / file.path}: {how}"
        differs = (*self.paper.differs, *(step.differs for step in self.steps.values()), self.row.differs)
        yield from (f"differs: {text}" for text in dict.fromkeys(filter(None, differs)))

    def run(self, launch: str) -> None:
        """Run the steps that are not finished; when one is, OUTPUT/STEP.log has its command and what it printed."""
        for name in self.steps:
            place, words = self.place(name), self.command(name)
            log, command = place.with_name(f"{place.name}.log"), f"e2e-vl {shlex.join(words)}"
            if log.exists() and log.read_text("utf-8").partition("\n")[0] != command:
                raise UserError(f"{log} does not begin with `{command}`: choose another --output.")
            if not log.exists():
                words += ["--resume"] if words[0] == "train" and place.is_dir() else []
                print(f"e2e-vl {shlex.join(words)}", flush=True)
                with atomic_file(log) as part, part.open("w", encoding="utf-8") as file:
                    print(command, file=file, flush=True)
                    start = [sys.executable] if words[0] == "import-features" else shlex.split(launch)  # one process
                    call = [*start, "-m", "e2e_vl", *words]
                    if (status := subprocess.run(call, check=False, stdout=file).returncode) != 0:
                        raise UserError(f"The step {name} ended with status {status}; repeat the command to continue.")

    def measured(self, number: Number) -> float:
        """A number after the run, in percent."""
        place = self.place(number.step)
        if (place / "metrics.json").exists():
            found = read_json(place / "metrics.json")
            return 100 * found.get("best", {}).get("metrics", found)[number.metric]  # absent if the last model is best
        printed = place.with_name(f"{place.name}.log").read_text("utf-8")
        return 100 * float(re.search(rf"^{re.escape(number.metric)} +([\d.]+)( |$)", printed, re.MULTILINE)[1])


def read_paper(name: str) -> Paper:
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
    parser.add_argument("--launch", default=shlex.quote(sys.executable), metavar="COMMAND", help=launch)
    args = parser.parse_args(argv)
    if args.estimate and not BENCHMARK.is_file():
        raise MissingFileError("--estimate needs tools/benchmark.py, which is only in a clone of the repository.")
    paper = read_paper(args.paper)
    tables = {name: rows for name, rows in paper.tables.items() if args.table in (None, name)}
    if not tables:
        raise UserError(f"{args.paper} has no table {args.table}; `e2e-vl reproduce {args.paper}` lists the tables.")
    if args.row is None:
        print(paper.title)
        for table, name, row in ((table, *item) for table, rows in tables.items() for item in rows.items()):
            numbers = ", ".join(f"{key} {number.text}" for key, number in row.numbers.items())
            print(f"{table:10s} {name:20s} {row.title}: {numbers}{' (from memory)' if row.from_memory else ''}")
        return 0
    rows = {name: row for own in tables.values() for name, row in own.items() if args.row in ("all", name)}
    if not rows:
        raise UserError(f"{args.paper} has no such row; `e2e-vl reproduce {args.paper}` lists them.")
    output = (args.output or Path("runs") / args.paper).absolute()
    for name, row in rows.items():
        chains = [Chain(paper, name, row, args.data, output, args.set, seed) for seed in args.seeds]
        print("\n".join(chains[0].describe(with_estimate=args.estimate)))
        if args.dry_run:
            continue
        if missing := chains[0].missing():
            raise MissingFileError(f"{args.data} lacks {', '.join(file.path for file in missing)}; see above.")
        for chain in chains:
            chain.run(args.launch)
        for key, number in row.numbers.items():
            values = [chain.measured(number) for chain in chains] if number.metric else []
            mean = f"{statistics.mean(values):.2f}" if values else "see the file for the server"
            spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
            print(f"{name}: {key} {mean}{spread} (published: {number.text})")
    return 0
