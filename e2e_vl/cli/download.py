"""Download data sets, published weights and features by name, into the folders that the configs read.

    e2e-vl download
    e2e-vl download refcoco+ vl_bert_base_e2e --data DATA --dry-run
    e2e-vl download refcoco+ vl_bert_base_e2e --data DATA
    e2e-vl download refcoco+ --data DATA --check

Without a name it lists the names. What is there is kept; interrupted downloads continue; sizes and checksums are
compared where they are known; archives are unpacked and deleted. Models of the Hugging Face hub, such as the tokenizer
and BERT, go into its cache (HF_HOME), where training finds them without a network. What needs a form is one sentence
that says where the files go. --dry-run downloads nothing, but checks that the disk has room, that the servers answer,
that the configs are valid, and whether there is a GPU. --check says what is there, missing or odd, and compares
checksums. The table of addresses is configs/downloads.yaml.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import shutil
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from filelock import FileLock, Timeout

from detector.downloads import download_file, missing_library, try_address
from detector.errors import MissingFileError, UserError
from detector.io import read_yaml
from detector.zoo import file_difference
from e2e_vl.cli.hub_models import HubModel
from e2e_vl.cli.main import make_parser, print_errors
from e2e_vl.config_files import CONFIGS, load_config
from e2e_vl.registry import Config, check_name, decode


class PublishedFile(Config, frozen=True):
    """A file or an archive that `e2e-vl download` fetches. configs/downloads.yaml describes the fields."""

    source: str
    address: tuple[str, ...] = ()
    form: str = ""
    path: str = ""
    holds: dict[str, int | None] = {}  # noqa: RUF012 - msgspec copies it
    links: dict[str, str] = {}  # noqa: RUF012
    size: int | None = None
    gb: float | None = None
    checksum: str = ""
    note: str = ""

    needs_gdown: ClassVar[bool] = True

    @property
    def bytes(self) -> int:
        """The approximate size of the download; 0 = unknown."""
        return self.size or int(1e9 * (self.gb or 0))

    def paths(self, data: Path) -> dict[Path, int | None]:
        """Return the files and folders that it becomes -> number of files in a folder, if known.

        A folder under the name of a link counts as well.
        """
        paths = {}
        for name, number in (self.holds or {self.path: None}).items():
            names = [name, *(link for link, target in self.links.items() if target == name)]
            existing = [data / name for name in names if (data / name).exists()]
            paths[existing[0] if existing else data / name] = number
        return paths

    def problem(self, data: Path, *, with_checksum: bool = False) -> str:
        """Return what is missing or odd; "" if all is there."""
        for path, number in self.paths(data).items():
            if not path.exists():
                return f"missing: {path}"
            if path.is_dir():
                difference = folder_difference(path, number)
                if difference:
                    return f"odd: {path} {difference}"
            elif self.path or path.stat().st_size == 0:
                difference = file_difference(path, self.checksum if with_checksum else "", self.size)
                if difference:
                    return f"odd: {path}: {difference}"
        return ""

    def fetch(self, name: str, data: Path) -> None:
        """Download the file as DATA/downloads/NAME, compare it, and move it, or what it holds, to its places."""
        fetch(name, self, data)

    def try_addresses(self) -> dict[str, str]:
        """Ask the servers for the file, without downloading it; answers that begin with "answers" are good."""
        return {address: try_address(address, self.size) for address in self.address}

    def make_links(self, data: Path) -> None:
        """Make the other names of what is there, as relative links."""
        for link, target in self.links.items():
            old, new = sorted((data / target, data / link), key=Path.exists, reverse=True)
            if old.exists() and not new.exists():
                new.parent.mkdir(parents=True, exist_ok=True)
                try:
                    new.symlink_to(os.path.relpath(old, new.parent), target_is_directory=old.is_dir())
                except FileExistsError:  # made by another process in the meantime
                    pass
                except OSError as error:  # on Windows without its developer mode, and on some file systems
                    raise UserError(f"{new}: no link can be made here ({error.strerror}); copy {old} there.") from error


class FileSet(Config, frozen=True):
    """Files that are downloaded together, and the configs that read them."""

    files: tuple[str, ...]
    configs: tuple[str, ...] = ()


class Table(Config, frozen=True):
    """The content of configs/downloads.yaml."""

    files: dict[str, PublishedFile]
    sets: dict[str, FileSet]
    models: dict[str, HubModel] = {}  # noqa: RUF012

    @property
    def downloads(self) -> dict[str, PublishedFile | HubModel]:
        """All that has a name of its own."""
        return {**self.files, **self.models}

    def named(self, names: list[str]) -> dict[str, PublishedFile | HubModel]:
        """Return the files and models of these sets, and those of these names."""
        downloads = self.downloads
        selected = {}
        for name in names:
            if name in downloads:
                selected[name] = downloads[name]
                continue
            check_name(name, {**self.sets, **self.models}, "name")
            for part in self.sets[name].files:
                selected[part] = downloads[part]
        return selected


def read_table() -> Table:
    """Read configs/downloads.yaml."""
    return decode(read_yaml(CONFIGS / "downloads.yaml"), Table, "downloads")


def count_files(folder: Path) -> int:
    return sum(len(files) for _, _, files in os.walk(folder))


def folder_difference(folder: Path, number: int | None) -> str:
    """Describe why a folder cannot be the published one, of `number` files if that is known; "" if it can."""
    count = count_files(folder)
    if number and count != number:
        return f"has {count:,} files instead of {number:,}"
    return "" if count else "has 0 files"


def fetch(name: str, file: PublishedFile, data: Path) -> None:
    """Download a file as DATA/downloads/NAME, compare it, and move it, or what it holds, to its places."""
    if file.form:
        missing = " and ".join(str(path) for path in file.paths(data) if not path.exists())
        raise MissingFileError(f"{name} cannot be fetched: {file.form}, as {missing}; see {file.source}.")
    download = data / "downloads" / name
    download.parent.mkdir(parents=True, exist_ok=True)
    with waiting_for_lock(data / ".locks" / f"{name}.lock", name):
        problem = file.problem(data)  # another process may have fetched it in the meantime
        if problem.startswith("missing"):
            fetch_locked(name, file, data, download)
        elif problem:
            raise UserError(f"{name} is {problem}; move it away to download it again.")


@contextlib.contextmanager
def waiting_for_lock(path: Path, name: str) -> Iterator[None]:
    """Let one process at a time into a context: two would write to one partial file, and a wrong file would result."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        print(f"Waiting for another process that is downloading {name}", flush=True)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def fetch_locked(name: str, file: PublishedFile, data: Path, download: Path) -> None:
    """Do the work of `fetch` while no other process does it."""
    if download.exists():  # saved by hand, or complete when an earlier call was stopped
        reason = file_difference(download, file.checksum, file.size)
        if reason:
            raise UserError(f"{download} is not the published file: {reason}; delete it.")
    reasons = []
    for address in file.address:
        if not download.exists():
            reason = download_file(address, download) or file_difference(download, file.checksum, file.size)
            if reason:
                download.unlink(missing_ok=True)
                reasons.append(f"{address}: {reason}")
    if not download.exists():
        by_hand = f"repeat the command later, or save the file of {file.source} as {download} and repeat it"
        note = f"; {file.note}" if file.note else ""
        raise MissingFileError(f"{name} cannot be fetched ({'; '.join(reasons)}): {by_hand}{note}.")
    if file.path:
        move(download, data / file.path)
    else:
        unpack(download, file, data)


def unpack(archive: Path, file: PublishedFile, data: Path) -> None:
    """Unpack an archive, move what it holds to its places, wherever in the archive it was, and delete the archive."""
    folder = archive.with_name(f"{archive.name}.unpacked")
    shutil.rmtree(folder, ignore_errors=True)
    is_zip = zipfile.is_zipfile(archive)
    print(f"Unpacking {archive}", flush=True)
    try:
        # both refuse or leave out members outside of the folder
        shutil.unpack_archive(archive, folder, "zip" if is_zip else "tar", **({} if is_zip else {"filter": "data"}))
        members = [member for member in folder.rglob("*") if "__MACOSX" not in member.parts]
        moves = {}
        for path, number in file.paths(data).items():
            if not path.exists():
                same_name = [member for member in members if member.name == path.name]
                member = max(same_name, key=lambda member: member.parent.name == path.parent.name, default=None)
                if member is None or (number and count_files(member) != number):
                    content = f"{path.name} with {number:,} files" if number else path.name
                    raise UserError(f"{archive} holds no {content}, so it is not the published file; delete it.")
                moves[member] = path
        for member, path in moves.items():
            move(member, path)
    except (shutil.ReadError, zipfile.BadZipFile, tarfile.TarError, EOFError, zlib.error) as error:
        archive.unlink()
        raise UserError(f"{archive} was damaged ({error}) and is deleted; repeat the command.") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    archive.unlink()


def move(old: Path, new: Path) -> None:
    new.parent.mkdir(parents=True, exist_ok=True)
    old.rename(new)


def check_disk(files: dict[str, PublishedFile], data: Path) -> str:
    """Compare the free space with the files, their sizes as far as they are known; archives are there twice."""
    folder = data.absolute()
    while not folder.exists():
        folder = folder.parent
    sizes = [file.bytes for file in files.values()]
    needed = sum(sizes) + max(sizes, default=0)
    free = shutil.disk_usage(folder).free
    text = f"{data} needs {needed / 1e9:.1f} GB"
    num_unknown = sizes.count(0)
    if num_unknown:
        text += f" and {num_unknown} files of unknown size"
    text += f", and {free / 1e9:.1f} GB are free"
    if needed > free:
        raise UserError(f"{text}: choose another --data, or free some space.")
    return text


def list_names(table: Table) -> None:
    """Print the sets with the sum of the known sizes of their files, and the models."""
    for name, file_set in table.sets.items():
        sizes = {file: table.downloads[file].bytes for file in file_set.files}
        files = [file if size else f"{file} (?)" for file, size in sizes.items()]
        total = sum(sizes.values())
        at_least = "" if all(sizes.values()) else ">"
        size = f"{at_least:>2s}{total / 1e9:5.1f} GB" if total else f"{'unknown':>10s}"
        print(f"{name:22s}{size}  {', '.join(files)}")
    for name, model in table.models.items():
        print(f"{name:22s}  {model.bytes / 1e9:5.1f} GB  tokenizer and weights, in the cache of the Hugging Face hub")
    print("(?): of unknown size")


@functools.partial(print_errors, advice="Repeat the command to continue.")
def main(argv: list[str] | None = None, prog: str | None = None) -> int:
    parser = make_parser(__doc__, prog)
    parser.add_argument("names", nargs="*", metavar="NAME", help="sets or single files; without any: list them")
    parser.add_argument("--data", type=Path, default=Path("DATA"), help="folder for them (default: DATA)")
    parser.add_argument("--dry-run", action="store_true", help="only check what can be checked before")
    parser.add_argument("--check", action="store_true", help="only say what is there, missing or odd")
    args = parser.parse_args(argv)
    data = args.data
    table = read_table()
    if not args.names:
        list_names(table)
        return 0
    files = table.named(args.names)
    problems = {name: file.problem(data, with_checksum=args.check) for name, file in files.items()}
    for name, problem in problems.items():
        state = problem or f"there: {', '.join(map(str, files[name].paths(data)))}"
        print(f"{name:22s} {state}")
    if args.check:
        return int(any(problems.values()))
    missing = {name: file for name, file in files.items() if problems[name]}
    if missing_library() and (args.dry_run or any(file.needs_gdown for file in missing.values())):
        raise UserError(f"{args.names[0]} is not fetched: {missing_library()}.")
    files_in_data = {name: file for name, file in missing.items() if isinstance(file, PublishedFile)}
    if files_in_data:
        print(check_disk(files_in_data, data))
    if args.dry_run:
        configs = []
        for name in args.names:
            if name in table.sets:
                configs += table.sets[name].configs
        return dry_run(missing, configs, data)
    failed = 0
    for name, file in missing.items():
        try:
            if problems[name].startswith("odd"):
                raise UserError(f"{name} is {problems[name]}; move it away to download it again.")
            file.fetch(name, data)
        except UserError as error:  # the others are downloaded all the same
            failed += 1
            print(f"error: {error}", file=sys.stderr)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise UserError(
                f"{data}: the disk is full; free some space and repeat the command, which goes on."
            ) from error
    for file in files.values():
        file.make_links(data)
    return 2 if failed else 0


def dry_run(missing: dict[str, PublishedFile | HubModel], configs: list[str], data: Path) -> int:
    """Check what downloads and a training need, without downloading; 1 if a server does not answer as expected."""
    import torch  # slow to import

    failed = 0
    for name, file in missing.items():
        if isinstance(file, PublishedFile) and file.form:
            print(f"{name}: by hand: {file.form}")
            continue
        answers = file.try_addresses()
        failed += not any(text.startswith("answers") for text in answers.values())
        for address, text in answers.items():
            print(f"{name}: {address} {text}")
    for config in configs:
        load_config(CONFIGS / f"{config}.yaml", [f"data.root={data}"])
        print(f"configs/{config}.yaml is valid")
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    print("GPUs:", ", ".join(f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB" for gpu in gpus) or "none")
    return int(failed > 0)
