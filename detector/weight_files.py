"""Reading weights files of every kind as tensors by name. No file can run code."""

from __future__ import annotations

import dataclasses
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from detector.config_groups import NORM_EPS
from detector.download import cached_weights, remedy
from detector.errors import MissingFileError, UserError, in_one_line
from detector.named_weights import NamedWeights, known_weights, resolve_weights, similar_names
from detector.pickles import load_arrays
from detector.plain_json import has_half_characters
from detector.torch_files import MOST_DIMENSIONS, DamagedTorchFileError, ForbiddenGlobalError, check_torch_file

# Where the detector is in a folder: a saved detector, a saved model, a run directory, a Detectron2 output directory.
WEIGHTS_NAME = "model.safetensors"
INDEX_END = ".index.json"  # of the file in which transformers lists the parts of weights
_LONGEST = 1 << 62  # of a dimension
_MOST_TENSORS = 1 << 16  # of a file
IN_FOLDERS = (WEIGHTS_NAME, f"detector/{WEIGHTS_NAME}", f"model/detector/{WEIGHTS_NAME}", "model_final.pth")


@dataclasses.dataclass(frozen=True)
class WeightsFile:
    """The content of a file, under the names that it uses."""

    path: Path
    tensors: dict[str, Tensor]
    matching_heuristics: bool = False  # Detectron2 may match its names with the ends of the model's
    norm_eps: float = NORM_EPS  # epsilon of the frozen batch norms that the numbers are meant for


def read_weights(path: str | Path) -> WeightsFile:
    """Read a `.safetensors` file, a pickle of arrays (`.pkl`), or a `.pth` / `.model` / `.bin` file of torch.

    A pickle holds arrays by name: bare, under `model` (Detectron2) or under `blobs` (Caffe2; the optimiser's momentum
    is left out). A torch file holds a state dict: bare, or under `model` (Detectron2) or `state_dict`. If `path` is a
    folder, the detector in it is read; if it is the name of published weights, they are downloaded (`find_weights`).

    Raises:
        FileNotFoundError, ValueError: the file is missing, damaged, of an unknown kind, or holds more than tensors.
    """
    published = known_weights(path)
    norm_eps = WeightsFile.norm_eps if published is None else published.norm_eps
    path = find_weights(path)
    if path.suffix == ".safetensors":
        try:
            check_safetensors(path)
            return WeightsFile(path, _checked(load_file(path), path))
        except UserError:
            raise
        except (SafetensorError, OSError, MemoryError, ValueError) as error:
            raise _unreadable(path, error) from error
    is_pickle = path.suffix == ".pkl" and not zipfile.is_zipfile(path)  # torch writes zip archives
    loaded = _load_pickle(path) if is_pickle else _load_torch(path)
    if not isinstance(loaded, dict):
        raise UserError(f"{path}: expected weights by name, found {type(loaded).__name__}; {remedy(path)}.")
    flag, author = loaded.get("matching_heuristics"), loaded.get("__author__")
    heuristics = (isinstance(flag, bool | int) and bool(flag)) or (isinstance(author, str) and author == "Caffe2")
    state = next((loaded[key] for key in ("model", "state_dict", "blobs") if isinstance(loaded.get(key), dict)), loaded)
    if is_pickle and "model" not in loaded:  # Detectron2 takes it for a file of Caffe2, too
        heuristics = True
        state = {name: value for name, value in state.items() if not str(name).endswith("_momentum")}
    try:
        tensors = {name: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for name, v in state.items()}
    except (TypeError, ValueError) as error:  # numbers in another order of bytes, or of a kind that torch lacks
        raise _unreadable(path, error) from error
    return WeightsFile(path, _checked(tensors, path), heuristics, norm_eps)


def check_safetensors(path: Path) -> None:
    """Look at the shapes that a `.safetensors` file states, before torch makes tensors of them.

    Raises:
        ValueError: a tensor has more dimensions than numpy knows, or one of them is longer than torch can count; or
            there are very many tensors, or two of one name.
        SafetensorError, OSError: the file is damaged, or cannot be read.
    """
    with safe_open(path, framework="pt"), path.open("rb") as file:  # the first one refuses what is no such file
        length = int.from_bytes(file.read(8), "little")
        entries = json.loads(file.read(length), object_pairs_hook=list)
    if len(entries) > _MOST_TENSORS or len({name for name, _ in entries}) < len(entries):
        raise ValueError(f"it has more than {_MOST_TENSORS} tensors, or one name twice")
    for name, entry in entries:
        shape = next((value for key, value in entry if key == "shape"), ())
        if len(shape) > MOST_DIMENSIONS or any(size >= _LONGEST for size in shape):
            raise ValueError(f"{in_one_line(name)[:100]} has a shape that no tensor has")


def _checked(tensors: dict[Any, Any], path: Path) -> dict[str, Tensor]:
    """The same tensors; raises UserError for names or values of another kind."""
    for name, value in tensors.items():
        if not isinstance(name, str) or not isinstance(value, Tensor) or not _is_plain(value):
            raise UserError(
                f"{path}: expected a state dict of tensors, bare or under the key `model`; {name!r} is not a tensor: "
                f"{remedy(path)}."
            )
        if has_half_characters(name, name):
            raise UserError(f"{path}: the name {name!r} of a tensor holds half of a character: {remedy(path)}.")
    return tensors


def _is_plain(tensor: Tensor) -> bool:
    """Whether it has numbers of its own; sparse, quantised and meta tensors may claim any size.

    Two numbers of 4 bits in a byte are no numbers that torch could turn into others.
    """
    is_packed = str(tensor.dtype).startswith("torch.float4")
    return tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized and not is_packed


def read_tensors(path: str | Path) -> dict[str, Tensor]:
    """The tensors of `read_weights`, under the file's own names."""
    return read_weights(path).tensors


def find_weights(path: str | Path) -> Path:
    """The path of a file as it is; for a folder, the path of the detector's weights in it.

    For the name of published weights (`detector.named_weights`), it is the path of the file in the cache, which is
    downloaded once.

    Raises:
        FileNotFoundError: the file does not exist, the folder holds no weights, or a download fails.
        ValueError: an unknown name of published weights, or a file in the cache that is not the published one.
    """
    path = resolve_weights(path)
    if isinstance(path, NamedWeights):
        return cached_weights(path)
    if path.is_dir():
        found = next((path / name for name in IN_FOLDERS if (path / name).is_file()), None)
        if found is None:
            expected = f"expected one of {', '.join(IN_FOLDERS)}"
            raise MissingFileError(f"{path}: holds no detector's weights{split_weights(path)}; {expected}.")
        return found
    if path.name.endswith(INDEX_END):
        raise UserError(f"{path}: names the files of weights{split_weights(path)}.")
    if not path.is_file():
        similar = similar_names(path)
        hint = f" Did you mean the published weights {' or '.join(similar)}?" if similar else ""
        raise MissingFileError(f"{path}: no such weights file.{hint}")
    return path


def split_weights(path: Path) -> str:
    """What to do with weights that transformers split over several files, as a part of a sentence; "" without them.

    Args:
        path: a folder, or the index of the files.
    """
    names = [path.name] if not path.is_dir() else sorted(one.name for one in path.glob(f"*{INDEX_END}"))
    if not any(name.endswith(INDEX_END) for name in names):
        return ""
    return (
        f" in one file, but parts of them ({in_one_line(names[0])}), which are not read one by one: load them with "
        'transformers and save them by save_pretrained(DIR, max_shard_size="100GB")'
    )


def _load_pickle(path: Path) -> Any:
    try:
        return load_arrays(path)
    except ValueError as error:  # it names the file
        raise UserError(f"{str(error).rstrip('.')}; {remedy(path)}.") from error


def _load_torch(path: Path) -> Any:
    try:
        check_torch_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except ForbiddenGlobalError as error:
        raise UserError(
            f"{path}: not a plain file of tensors (it names {str(error)[:100]}), and nothing in it was executed; "
            f"{remedy(path)}."
        ) from error
    except (DamagedTorchFileError, RuntimeError, EOFError, ValueError, OSError, MemoryError) as error:
        raise _unreadable(path, error) from error
    except Exception as error:  # torch raises pickle errors of several kinds for a file that is not plain tensors
        raise UserError(
            f"{path}: not a plain file of tensors ({type(error).__name__}), and nothing in it was executed; "
            f"{remedy(path)}."
        ) from error


def _unreadable(path: Path, error: Exception) -> UserError:
    reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
    return UserError(f"{path}: cannot be read as weights ({reason}); {remedy(path)}.")
