"""Files of a run directory: its log (`log.jsonl`, one JSON object per line), and which files a command may write."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from msgspec import UNSET, Meta, UnsetType

from detector.errors import MissingFileError, UserError
from detector.file_faults import reading
from detector.plain_json import parse_plain_json
from detector.plain_json import read_plain_json as read_plain_json  # reports find it here
from detector.user_paths import user_path
from detector.yaml_text import MAX_BYTES
from e2e_vl.records import Count, Record, checked
from e2e_vl.whole_files import json_text, without_nan, write_text
from e2e_vl.whole_files import write_json as write_json  # readers and reports find it here

FILE_ENDS = (".txt", ".json", ".bin", ".model", ".safetensors", ".pth", ".pkl")  # no hub names
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


class RunLog:
    """Appends to `log.jsonl`.

    Args:
        enabled: True on the main process only; the other processes write nothing.
        resume_step: drop the lines beyond this step and the evaluations of this step, because they are about to be
            computed again; None starts a new file.
    """

    def __init__(self, path: Path, *, enabled: bool, resume_step: int | None = None):
        self.path = path
        self.enabled = enabled
        if not enabled:
            return
        kept = [line for line in read_log(path) if _stays(line, resume_step)] if resume_step is not None else []
        write_text(path, "".join(json_text(line, str(path)) + "\n" for line in kept))

    def write(self, step: int, kind: str, values: dict[str, Any]) -> None:
        """Append one line; a value that is NaN or infinite becomes null, and its name stands under `not_finite`.

        Args:
            kind: "train"; "eval" for an evaluation of the images that all evaluations of the run look at, and "final"
                for the last one if it looks at more.
        """
        if self.enabled:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json_text({"step": step, "kind": kind, **without_nan(values)}, str(self.path)) + "\n")


def _stays(line: dict[str, Any], resume_step: int) -> bool:
    return line["step"] < resume_step or (line["step"] == resume_step and line["kind"] == "train")


def read_log(path: Path) -> list[dict[str, Any]]:
    """All lines of a `log.jsonl`. A missing file has no lines; a last line that was cut off is left out.

    Raises:
        UserError: a line is no JSON object with a step and a kind, or has values that are neither numbers nor null.
    """
    if not path.is_file():  # a pipe would be waited for without end
        if path.exists():
            raise UserError(f"{path} is not a file; remove it, or get the run again.")
        return []
    try:
        with reading(path):
            *lines, _ = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not JSON: byte {error.start} is not utf-8 text; get the file again.") from error
    return [_log_line(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1)]


def _log_line(line: str, where: str) -> dict[str, Any]:
    found = parse_plain_json(line, where)
    if not isinstance(found, dict) or not isinstance(found.get("step"), int) or not isinstance(found.get("kind"), str):
        raise UserError(f"{where} is not an object with a step and a kind; get the file again, or remove the line.")
    remedy = "get the file again, or remove the line."
    checked(_LogLine, found, where, remedy=remedy)
    checked(_Values, {"value": {name: one for name, one in found.items() if name not in _NAMED}}, where, remedy=remedy)
    return found


def read_settings_text(path: Path) -> str:
    """The text of a run's settings; raises UserError if it is no file, is too large for settings, or is not UTF-8."""
    if not path.is_file():  # a pipe would be waited for without end
        raise MissingFileError(f"{path}: no such settings file; get the whole run again.")
    with reading(path), path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise UserError(f"{path} is not a settings file: it has more than {MAX_BYTES} bytes; get the file again.")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start}); get the file again.") from error


@contextlib.contextmanager
def errors_naming(path: Path) -> Iterator[None]:
    """A user's error about what a file holds begins with the file."""
    try:
        yield
    except UserError as error:
        raise type(error)(f"{path}: {error}") from error


_Value = Annotated[float, Meta(ge=-1e300, le=1e300)]  # differences of two can be drawn
_NAMED = ("step", "kind", "not_finite")


class _LogLine(Record):
    step: Count
    kind: str
    not_finite: tuple[str, ...] = ()


class _Values(Record):
    """All that a line has besides."""

    value: dict[str, _Value | None]


class _BestModel(Record):
    metric: str
    value: _Value | None
    step: Count
    images: Count
    metrics: dict[str, _Value | None] | UnsetType = UNSET


class _Metrics(Record):
    """What the page of a run needs of `metrics.json`."""

    steps: Count | None = None
    best: _BestModel | None = None


def read_metrics(path: Path) -> dict[str, Any]:
    """The content of a run's `metrics.json`: numbers or null by name, alone or in groups.

    Raises:
        MissingFileError: there is no such file.
        UserError: it is no JSON, holds a value of another kind, or lacks what it says of the best model.
    """
    found = read_plain_json(path)
    remedy = "get the file again, or evaluate the run again"
    metrics = checked(_Metrics, found, f"{path}", remedy=remedy)
    if metrics.best is not None and metrics.steps is None:
        raise UserError(f"{path} has no 'steps'; {remedy}.")
    others = {name: one for name, one in found.items() if name not in ("best", "not_finite")}
    checked(dict[str, _Value | dict[str, _Value | None] | None], others, f"{path}", remedy=remedy)
    return found


def looks_like_hub_name(name: str) -> bool:
    """Only a text that cannot be a path is a hub name, so that a mistyped path never reaches for the network."""
    if not _HUB_ID.fullmatch(name) or name.endswith(FILE_ENDS):
        return False
    owner, slash, _ = name.partition("/")
    return not (slash and Path(owner).exists())  # "runs/old" beside an existing folder "runs" is a path


def is_shared_model(source: str | Path) -> bool:
    """Whether it can only be a model of the hub, `owner/name`; a name without an owner is taken for a folder.

    Raises:
        FileNotFoundError: it is a path without a trained model.
    """
    path = user_path(source, "The run")
    if not path.exists() and "/" in str(source) and looks_like_hub_name(str(source)):
        return True
    model_folder(path)
    return False


def check_output(path: Path, *, may_replace: bool = False) -> None:
    """Check a file that a command is about to write; to be called before anything is computed.

    Args:
        may_replace: an existing file inside of a run may be replaced.

    Raises:
        ValueError: the path is a folder, lies below a file, or is an existing file inside of a run or a saved model.
    """
    if path.is_dir():
        raise UserError(f"{path} is a folder; name the file that is to be written as --output.")
    place = next(folder for folder in path.absolute().parents if folder.exists())
    if not place.is_dir():
        raise UserError(f"{path}: {place} is a file, not a folder; choose another --output.")
    runs = [*filter(_holds_run, path.resolve().parents)]  # a saved model lies in the folder of its run
    if path.exists() and runs and not may_replace:
        raise UserError(f"{path} belongs to the run {runs[-1]} and is not replaced; choose another --output.")


def _holds_run(folder: Path) -> bool:
    """Whether a folder is a run directory, finished or not, or a saved model."""
    if (folder / "model" / "config.yaml").is_file():
        return True
    parts = ("metrics.json", "log.jsonl", "checkpoints", "encoder")
    return (folder / "config.yaml").is_file() and any((folder / part).exists() for part in parts)


def model_folder(folder: Path) -> Path:
    """The folder that `save_model` (e2e_vl/engine/saving.py) wrote: `folder` itself, or `model/` in a run directory.

    Raises:
        FileNotFoundError: no model there.
    """
    folder = Path(folder)
    if (folder / "config.yaml").is_file() and (folder / "encoder").is_dir():
        return folder
    if not (folder / "model" / "config.yaml").is_file():
        raise MissingFileError(
            f"{folder} holds no trained model (no model/config.yaml); give a run directory of tools/train.py."
        )
    return folder / "model"
