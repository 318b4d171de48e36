"""Types of JSON fields, file names, checksums, the log of a run, model folders, and checks of output paths."""

from __future__ import annotations

import hashlib
import logging
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import msgspec
from msgspec import Meta

from detector import io
from detector.errors import MissingFileError, UserError, user_path
from detector.io import atomic_file, decode_json, flush_to_disk, json_text, read_json, write_json, write_text

if TYPE_CHECKING:
    from PIL import Image

logger = logging.getLogger(__name__)

# Types of JSON fields; msgspec validates them and names the field in its errors.

_LARGEST = 1e9  # pixels; the sum of two such numbers is finite in float32

# an integer beyond 64 bits becomes a string, see `detector.io.decode_json`
Id = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | str
Count = Annotated[int, Meta(ge=0)]
Side = Annotated[int, Meta(ge=1, le=int(_LARGEST))]  # of an image, pixels
Words = Annotated[str, Meta(pattern=r"\S")]  # a text that is not blank
Name = Annotated[str, Meta(min_length=1)]
Pixel = Annotated[float, Meta(ge=-_LARGEST, le=_LARGEST)]
Score = Annotated[float, Meta(ge=0, le=1.0001)]  # a probability; float32 sums may slightly exceed 1
FourNumbers = tuple[Pixel, Pixel, Pixel, Pixel]


class Record(msgspec.Struct, gc=False):
    """An object in a JSON file. Unknown keys are ignored, because official files have additional ones."""


def box_corners(box: FourNumbers, where: str) -> FourNumbers:
    """Turn [x, y, width, height] into continuous corners (x, y, x + width, y + height), in the same pixels.

    `where` names the file and the record in the error message.
    """
    x, y, width, height = box
    if x + width <= x or y + height <= y:
        raise UserError(
            f"{where}: the box [x, y, width, height] = {list(box)} is empty or inverted; correct or remove the record"
        )
    return x, y, x + width, y + height


def require_unique(ids: Iterable[Any], what: str, remedy: str = "remove one of them") -> None:
    """Raise a UserError if an id occurs twice; `what` names the file and the kind of record."""
    seen = set()
    for id in ids:
        if id in seen:
            raise UserError(f"{what} {id} is listed twice; {remedy}")
        seen.add(id)


def read_text(path: str | Path) -> str:
    """Read a text file of a user, see `detector.io.decode_text`."""
    return io.read_text(user_path(path))


def files_in(folder: Path, suffixes: Sequence[str], *, deep: bool = True) -> list[Path]:
    """List the files of a folder (`deep`: and of the folders in it) with these suffixes, in any case, sorted.

    Files of macOS that begin with `._` are left out: they accompany others of the same name and suffix.
    """
    paths = folder.rglob("*") if deep else folder.iterdir()
    return sorted(path for path in paths if is_listed(path.name, suffixes) and path.is_file())


def is_listed(name: str, suffixes: Sequence[str] = ("",)) -> bool:
    """Return whether a name has one of the suffixes, in any case, and is not of a file that macOS adds to another."""
    return name.lower().endswith(tuple(suffixes)) and not name.startswith("._")


def file_name(text: str) -> str:
    """Return a safe file name (without suffix) for an id or another text; `urllib.parse.unquote` is the inverse."""
    return quote(text, safe=" +")


def write_png(path: Path, picture: Image.Image) -> None:
    with atomic_file(path) as part:
        picture.save(part, "PNG")


# Checksums

CHECKSUMS = "checksums.json"


def write_checksums(folder: Path) -> None:
    """Write `checksums.json` with the SHA-256 of every file in the folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    write_json(folder / CHECKSUMS, {path.relative_to(folder).as_posix(): file_sha256(path) for path in files})


def find_checksum_mismatch(folder: Path) -> str | None:
    """Describe the first file that does not match its checksum; None if all match. Files added later are ignored."""
    try:
        expected = read_json(folder / CHECKSUMS, dict[str, str])
    except UserError:
        return f"its {CHECKSUMS} is missing or damaged"
    for name, digest in expected.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if file_sha256(path) != digest:
            return f"{name} has changed since it was written"
    return None


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# The log of a run: `log.jsonl`, with one JSON object per line


class RunLog:
    """Appends to `log.jsonl`.

    Args:
        enabled: whether to write; True on the main process only.
        resume_step: drop lines after this step, and evaluations at this step, because they will be computed again;
            None starts a new file.
        logged_step: step of the newest line of the training when the checkpoint was written; a warning is logged if
            it is missing.
    """

    def __init__(self, path: Path, *, enabled: bool, resume_step: int | None = None, logged_step: int = 0) -> None:
        self.path = path
        self.enabled = enabled
        if not enabled:
            return
        lines: list[dict[str, Any]] = []  # that stay
        if resume_step is not None:
            for line in read_log(path):
                if line["step"] < resume_step or (line["step"] == resume_step and line["kind"] == "train"):
                    lines.append(line)
        write_text(path, "".join(json_text(line, str(path)) + "\n" for line in lines))
        last_step = max((line["step"] for line in lines if line["kind"] == "train"), default=0)
        if last_step < logged_step:
            logger.warning(
                "%s: the lines from step %d to step %d have been lost; curves have a gap.",
                path,
                last_step + 1,
                logged_step,
            )

    def write(self, step: int, kind: str, values: dict[str, Any]) -> None:
        """Append one line; NaN and infinite values become null and are listed in `not_finite`.

        The kinds are "train", "eval" (on the images that all evaluations of the run use) and "final" (on more images).
        """
        if self.enabled:
            line = {"step": step, "kind": kind, **replace_nan(values)}
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json_text(line, str(self.path)) + "\n")

    def flush_to_disk(self) -> None:
        """Make the lines survive a power cut. Without it, a checkpoint could be ahead of the log."""
        if self.enabled:
            flush_to_disk(self.path)


def read_log(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a `log.jsonl`; none if the file is missing. A truncated last line is skipped."""
    if not path.is_file():
        return []
    *lines, _ = read_text(path).split("\n")
    return [decode_json(line, f"{path}, line {number}", dict[str, Any]) for number, line in enumerate(lines, start=1)]


def replace_nan(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace NaN and infinite values with None, and list their names in `not_finite` if there are any."""
    lost = [name for name, value in values.items() if isinstance(value, float) and not math.isfinite(value)]
    replaced = {**values, **dict.fromkeys(lost)}
    if lost:
        replaced["not_finite"] = lost
    return replaced


LOCK_FILE = ".lock"  # in a run directory
POSITION_FILE = "step.json"  # in a complete checkpoint

# Run directories, saved models and models on the Hugging Face Hub

DEMO = Path(__file__).parent / "demo"  # the model that ships with the package, see tools/package_demo.py
_FILE_ENDS = (".txt", ".json", ".bin", ".model", ".safetensors", ".pth", ".pkl")  # suffixes of files, not models
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def looks_like_hub_name(name: str) -> bool:
    """Return whether a name can only be a model on the Hub, not a path, so that a mistyped path is never downloaded."""
    if not _HUB_ID.fullmatch(name) or name.endswith(_FILE_ENDS):
        return False
    owner, slash, _ = name.partition("/")
    return not (slash and Path(owner).exists())  # "runs/old" beside an existing folder "runs" is a path


def find_run(source: str | Path) -> Path | None:
    """Return the path of a run directory or saved model, which must exist; None for a model on the Hub (`owner/name`).

    "demo" is the model that ships with the package, unless there is a run of this name.
    """
    path = user_path(source, "The run")
    if not path.exists() and "/" in str(source) and looks_like_hub_name(str(source)):
        return None
    return DEMO if find_model_folder(path) == DEMO else path


def find_model_folder(folder: Path) -> Path:
    """Find the folder that `save_model` (e2e_vl/run/checkpoint.py) wrote: `folder`, or `model/` in a run directory."""
    folder = Path(folder)
    if (folder / "config.yaml").is_file() and (folder / "encoder").is_dir():
        return folder
    if (folder / "model" / "config.yaml").is_file():
        return folder / "model"
    if folder == Path("demo"):
        return DEMO
    if (folder / LOCK_FILE).exists():
        raise MissingFileError(
            f"The training of {folder} has not ended; continue it with e2e-vl train --config {folder / 'config.yaml'} "
            "--resume."
        )
    if (folder.suffix in _FILE_ENDS[2:] and folder.exists()) or any(folder.glob("*.safetensors")):
        raise UserError(f"{folder} has weights without a run; a detector is loaded by e2e_vl.load_detector.")
    what = "contains no trained model (no model/config.yaml)" if folder.exists() else "does not exist"
    raise MissingFileError(f"{folder} {what}; give a run directory of `e2e-vl train`, or demo.")


def refuse_to_overwrite(output: Path) -> None:
    """Raise UserError unless the folder is empty or its run was stopped before the first checkpoint."""
    has_results = any(output.glob("checkpoints/step_*")) or (output / "metrics.json").exists()
    has_other_files = output.is_file() or (output.is_dir() and any(output.iterdir()))
    if has_results:
        raise UserError(f"{output} contains a run; continue with --resume, or choose another `output`.")
    if has_other_files and not (output / LOCK_FILE).exists():
        raise UserError(f"{output} contains other files, but no run; choose another `output`.")


def check_output(path: Path, *, may_replace: bool = False) -> None:
    """Check the path of an output file before anything is computed; `may_replace` allows a file of a run directory."""
    if path.is_dir():
        raise UserError(f"{path} is a folder; give the path of a file as --output.")
    parts = ("metrics.json", "log.jsonl", "checkpoints", "encoder", "model")  # of a run or of a saved model
    runs = []
    for folder in path.resolve().parents:
        if (folder / "config.yaml").is_file() and any((folder / part).exists() for part in parts):
            runs.append(folder)
    if path.exists() and runs and not may_replace:  # a saved model is in the folder of its run
        raise UserError(f"{path} is a file of the run {runs[-1]} and is not overwritten; choose another --output.")
