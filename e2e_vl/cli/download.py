"""Download data sets, published weights and features by name, into the folders that the configs read.

    e2e-vl download
    e2e-vl download refcoco+ vl_bert_base_e2e --data DATA --dry-run
    e2e-vl download refcoco+ vl_bert_base_e2e --data DATA
    e2e-vl download refcoco+ --data DATA --check

Without a name it lists the names. What is there is kept; interrupted downloads continue; sizes and checksums are
compared where they are known; archives are unpacked and deleted. What needs a form is one sentence that says where the
files go. --dry-run downloads nothing, but checks that the disk has room, that the servers answer, that the configs are
valid, and whether there is a GPU. --check says what is there, missing or odd, and compares checksums. The table of
addresses is configs/downloads.yaml.
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

from filelock import FileLock, Timeout

from detector.errors import MissingFileError, UserError
from detector.io import read_yaml
from detector.zoo import file_difference
from e2e_vl.cli.main import make_parser, print_errors
from e2e_vl.config import CONFIGS, load_config
from e2e_vl.parts import Settings, check_name, decode

RETRIES = 5  # of a transfer that breaks; each goes on where the last one stopped


class PublishedFile(Settings, frozen=True):
    """A file or an archive. configs/downloads.yaml describes the fields."""

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

    @property
    def bytes(self) -> int:
        """About the size of the download; 0 = unknown."""
        return self.size or int(1e9 * (self.gb or 0))

    def places(self, data: Path) -> dict[Path, int | None]:
        """The files and folders that it becomes -> number of files in a folder, if known.

        A folder under the name of a link counts as well.
        """
        places = {}
        for name, number in (self.holds or {self.path: None}).items():
            names = [data / name, *(data / link for link, place in self.links.items() if place == name)]
            places[next((one for one in names if one.exists()), names[0])] = number
        return places

    def problem(self, data: Path, *, with_checksum: bool = False) -> str:
        """What is missing or odd; "" if all is there."""
        for place, number in self.places(data).items():
            if not place.exists():
                return f"missing: {place}"
            if place.is_dir() and (found := count_files(place)) != (number or found or 1):
                return f"odd: {place} has {found:,} files{f' instead of {number:,}' if number else ''}"
            if place.is_file() and (self.path or not place.stat().st_size):
                reason = file_difference(place, self.checksum if with_checksum else "", self.size)
                if reason:
                    return f"odd: {place}: {reason}"
        return ""

    def make_links(self, data: Path) -> None:
        """Make the other names of what is there, as relative links."""
        for link, place in self.links.items():
            old, new = sorted((data / place, data / link), key=Path.exists, reverse=True)
            if old.exists() and not new.exists():
                new.parent.mkdir(parents=True, exist_ok=True)
                try:
                    new.symlink_to(os.path.relpath(old, new.parent), target_is_directory=old.is_dir())
                except FileExistsError:  # made by another process in the meantime
                    pass
                except OSError as error:  # on Windows without its developer mode, and on some file systems
                    raise UserError(f"{new}: no link can be made here ({error.strerror}); copy {old} there.") from error


class FileSet(Settings, frozen=True):
    """Files that are downloaded together, and the configs that read them."""

    files: tuple[str, ...]
    configs: tuple[str, ...] = ()


class Table(Settings, frozen=True):
    """The content of configs/downloads.yaml."""

    files: dict[str, PublishedFile]
    sets: dict[str, FileSet]

    def named(self, names: list[str]) -> dict[str, PublishedFile]:
        """The files of these sets, and these files."""
        for name in names:
            check_name(name, self.sets if name not in self.files else self.files, "name")
        files = (file for name in names for file in (self.sets[name].files if name in self.sets else [name]))
        return {name: self.files[name] for name in files}


def read_table() -> Table:
    """Read configs/downloads.yaml."""
    return decode(read_yaml(CONFIGS / "downloads.yaml"), Table, "downloads")


def count_files(folder: Path) -> int:
    return sum(len(files) for _, _, files in os.walk(folder))


def fetch(name: str, file: PublishedFile, data: Path) -> None:
    """Download a file as DATA/downloads/NAME, compare it, and move it, or what it holds, to its places."""
    if file.form:
        places = " and ".join(str(place) for place in file.places(data) if not place.exists())
        raise MissingFileError(f"{name} cannot be fetched: {file.form}, as {places}; see {file.source}.")
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
    """Context that only one process is in: two would write to one partial file, and a wrong file would result."""
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
    """`fetch`, in a context that only one process is in."""
    if download.exists() and (reason := file_difference(download, file.checksum, file.size)):
        raise UserError(f"{download} is not the published file: {reason}; delete it.")
    reasons = []
    for address in file.address:
        if not download.exists():
            reason = transfer(address, download) or file_difference(download, file.checksum, file.size)
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


def transfer(address: str, download: Path) -> str:
    """Download a file, going on with the .part that an earlier call left. Returns why it failed, or ""."""
    import gdown
    import requests

    options = {"resume": True, "retries": RETRIES, "timeout": 60.0, "use_cookies": False}
    try:
        try:
            gdown.download(address, str(download), **options)
        except gdown.exceptions.DownloadError as error:
            if "byte range" not in str(error):
                raise
            print(f"{address} cannot be continued and begins anew", flush=True)
            for part in download.parent.glob(f"{download.name}????????.part"):
                part.unlink()
            gdown.download(address, str(download), **options)
    except (gdown.exceptions.DownloadError, requests.RequestException) as error:
        return why(error)
    return ""


def why(error: Exception) -> str:
    """The message of an error on one line, without the names of connection pools before it."""
    text = " ".join(str(error).split()).rpartition("): ")[2].rstrip("\"'.)")
    return text + ")" * (text.count("(") - text.count(")"))


def unpack(archive: Path, file: PublishedFile, data: Path) -> None:
    """Unpack an archive, move what it holds to its places, wherever in the archive it was, and delete the archive."""
    folder = archive.with_name(f"{archive.name}.unpacked")
    shutil.rmtree(folder, ignore_errors=True)
    is_zip = zipfile.is_zipfile(archive)
    print(f"Unpacking {archive}", flush=True)
    try:
        # both refuse or leave out members outside of the folder
        shutil.unpack_archive(archive, folder, "zip" if is_zip else "tar", **({} if is_zip else {"filter": "data"}))
        names = [one for one in folder.rglob("*") if "__MACOSX" not in one.parts]
        found = {}
        for place, number in file.places(data).items():
            if not place.exists():
                own = [one for one in names if one.name == place.name]
                name = max(own, key=lambda one: one.parent.name == place.parent.name, default=None)
                if name is None or (number and count_files(name) != number):
                    what = f"no {place.name}{f' with {number:,} files' if number else ''}"
                    raise UserError(f"{archive} holds {what}, so it is not the published file; delete it.")
                found[name] = place
        for name, place in found.items():
            move(name, place)
    except (shutil.ReadError, zipfile.BadZipFile, tarfile.TarError, EOFError, zlib.error) as error:
        archive.unlink()
        raise UserError(f"{archive} was damaged ({error}) and is deleted; repeat the command.") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    archive.unlink()


def move(name: Path, place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    name.rename(place)


def check_disk(files: dict[str, PublishedFile], data: Path) -> str:
    """Compare the free space with the files, their sizes as far as they are known; archives are there twice."""
    folder = next(folder for folder in (data.absolute(), *data.absolute().parents) if folder.exists())
    sizes = [file.bytes for file in files.values()]
    need, free = sum(sizes) + max(sizes, default=0), shutil.disk_usage(folder).free
    unknown = sum(not size for size in sizes)
    text = f"{data} needs {need / 1e9:.1f} GB{f' and {unknown} files of unknown size' * bool(unknown)}"
    text += f", and {free / 1e9:.1f} GB are free"
    if need > free:
        raise UserError(f"{text}: choose another --data, or free some space.")
    return text


def answer(address: str, size: int | None) -> str:
    """How a server answers, without the download."""
    import gdown
    import requests

    try:
        if gdown.parse_url.parse_url(address)[0]:
            return f"answers, {gdown.download(address, skip_download=True, use_cookies=False, timeout=10).path}"
        with requests.get(address, stream=True, timeout=10) as response:
            response.raise_for_status()
            length = int(response.headers.get("Content-Length", size or 0))
            return "answers" if length == (size or length) else f"has {length:,} bytes instead of {size:,}"
    except (gdown.exceptions.DownloadError, requests.RequestException) as error:
        return f"does not answer: {why(error)}"


@functools.partial(print_errors, advice="Repeat the command to continue.")
def main(argv: list[str] | None = None, prog: str | None = None) -> int:
    parser = make_parser(__doc__, prog)
    parser.add_argument("names", nargs="*", metavar="NAME", help="sets or single files; without any: list them")
    parser.add_argument("--data", type=Path, default=Path("DATA"), help="folder for them (default: DATA)")
    parser.add_argument("--dry-run", action="store_true", help="only check what can be checked before")
    parser.add_argument("--check", action="store_true", help="only say what is there, missing or odd")
    args = parser.parse_args(argv)
    table, data = read_table(), args.data
    if not args.names:
        for name, one in table.sets.items():
            sizes = [table.files[file].bytes for file in one.files]
            print(f"{name:22s}{'' if all(sizes) else '>':>2s}{sum(sizes) / 1e9:5.1f} GB  {', '.join(one.files)}")
        return 0
    files = table.named(args.names)
    problems = {name: file.problem(data, with_checksum=args.check) for name, file in files.items()}
    for name, problem in problems.items():
        print(f"{name:22s} {problem or 'there: ' + ', '.join(map(str, files[name].places(data)))}")
    if args.check:
        return int(any(problems.values()))
    missing = {name: file for name, file in files.items() if problems[name]}
    print(check_disk(missing, data))
    if args.dry_run:
        return dry_run(
            missing, [one for name in args.names if name in table.sets for one in table.sets[name].configs], data
        )
    failed = 0
    for name, file in missing.items():
        try:
            if problems[name].startswith("odd"):
                raise UserError(f"{name} is {problems[name]}; move it away to download it again.")
            fetch(name, file, data)
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


def dry_run(missing: dict[str, PublishedFile], configs: list[str], data: Path) -> int:
    """Check what downloads and a training need, without downloading; 1 if a server does not answer as expected."""
    import torch

    failed = 0
    for name, file in missing.items():
        answers = {address: answer(address, file.size) for address in file.address}
        failed += not file.form and not any(text.startswith("answers") for text in answers.values())
        for address, text in answers.items():
            print(f"{name}: {address} {text}")
        if file.form:
            print(f"{name}: by hand: {file.form}")
    for config in configs:
        load_config(CONFIGS / f"{config}.yaml", [f"data.root={data}"])
        print(f"configs/{config}.yaml is valid")
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    print("GPUs:", ", ".join(f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB" for gpu in gpus) or "none")
    return int(failed > 0)
