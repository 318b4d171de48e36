"""Save and load detectors, read weights files and load state dicts strictly.

A saved detector is a folder with `config.yaml` (Detectron2 keys), `model.safetensors` and, if class names are known,
`class_names.json` (a list of strings). Published checkpoints can be loaded too; `detector.weight_names` lists their
layouts. Loading a file never executes code. If a key does not fit, the model is left unchanged.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import pickle
import pickletools
import re
import zipfile
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING  # private, but the tables that `pickle` itself renames by
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from detector.config import NORM_EPS, DetectorConfig
from detector.errors import MissingFileError, UserError, first_line, reading
from detector.file_kinds import name_kind, read_start
from detector.io import NUMPY_IN_PICKLES, atomic_file, read_json, read_pickle, write_text
from detector.rpn import configured_cell_anchors
from detector.structures import Detector
from detector.weight_names import CELL_ANCHORS, MASK_HEAD, PREDICTOR, UNUSED_KEYS, strip_wrappers, to_detector_names
from detector.yaml_tree import flatten, load_tree
from detector.zoo import PublishedWeights, download_weights, find_published_weights, resolve_weights, suggest_names

logger = logging.getLogger(__name__)

CONFIG_NAME = "config.yaml"
WEIGHTS_NAME = "model.safetensors"
CLASS_NAMES = "class_names.json"
# Weights files in the folder of a saved detector, a saved model, a training run, and Detectron2's OUTPUT_DIR.
IN_FOLDERS = (WEIGHTS_NAME, f"detector/{WEIGHTS_NAME}", f"model/detector/{WEIGHTS_NAME}", "model_final.pth")

# Keys under which a torch file may have its state dict, also one within the other.
STATE_KEYS = ("model", "state_dict", "model_state_dict", "model_state", "net", "network", "blobs")
# of tensors that a model can load; 8-bit floats need scales of their own
WEIGHT_DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool}
WEIGHT_DTYPES |= {torch.int8, torch.int16, torch.int32, torch.int64}
WEIGHT_DTYPES |= {torch.uint8, torch.uint16, torch.uint32, torch.uint64}
LEGACY_PICKLES = 5  # of torch files before version 1.6: magic number, version, system, content, keys of the storages

SHOWN_KEYS = 3  # number of keys of each kind in an error message
TOLERANCE = 1e-3  # in pixels or grey levels, between the buffers of old checkpoints and the config

# Settings that the weights depend on but that do not change any shape.
CONVENTIONS = ("INPUT.FORMAT", "MODEL.PIXEL_MEAN", "MODEL.PIXEL_STD", "MODEL.RESNETS.STRIDE_IN_1X1")
ATTRIBUTE_HEAD = tuple(f"{PREDICTOR}{layer}." for layer in ("cls_embedding", "fc_attr", "attr_score"))
# Part of the detector that a file must contain -> arguments of `load_weights`. The rest of the detector keeps its
# values; the rest of the file is ignored.
EXPECT: dict[str, dict[str, Sequence[str]]] = {
    "all": {"allow_unexpected": UNUSED_KEYS},
    "no_attributes": {"allow_unexpected": (*UNUSED_KEYS, *ATTRIBUTE_HEAD), "allow_missing": ATTRIBUTE_HEAD},
    "no_predictor": {"allow_unexpected": UNUSED_KEYS},  # `load_checkpoint` sets `allow_missing`, see `_left_out`
    "no_mask_head": {"allow_unexpected": UNUSED_KEYS},
    "backbone": {},  # `load_checkpoint` sets `only`
}


@dataclasses.dataclass(frozen=True)
class WeightsFile:
    """A weights file as read, before its keys are renamed."""

    path: Path
    tensors: dict[str, Tensor]
    matching_heuristics: bool = False  # keys may be suffixes of the model's keys, see `match_ends`
    norm_eps: float = NORM_EPS  # epsilon of the frozen batch norms that the weights were trained with


def find_weights(path: str | Path) -> Path:
    """Find a weights file by its path, a folder with a detector, or the name or address of published weights.

    Published weights (`detector.zoo`) are downloaded into the cache.
    """
    path = resolve_weights(path)
    if isinstance(path, PublishedWeights):
        return download_weights(path)
    candidates = [path, *(path / name for name in IN_FOLDERS)]
    weights_file = next((file for file in candidates if file.is_file()), None)
    if weights_file is None:
        similar = suggest_names(path)
        hint = ""
        if path.is_dir():
            hint = f" The folder must contain one of {', '.join(IN_FOLDERS)}."
        elif similar:
            hint = f" Did you mean the published weights {' or '.join(similar)}?"
        elif not path.suffix:
            hint = " Give a file or a folder that exists, or published weights by a name in docs/detectors.md."
        raise MissingFileError(f"{path}: no such weights file.{hint}")
    return weights_file


def read_weights(path: str | Path) -> WeightsFile:
    """Read a safetensors file, a pickle of arrays (`.pkl`) or a torch file (`.pth`, `.model`, `.bin`).

    A pickle contains a dict of arrays, optionally under the key `model` (Detectron2) or `blobs` (Caffe2; momentum blobs
    are skipped). A torch file contains a state dict, optionally under one of `STATE_KEYS`. Objects of other classes
    beside it, such as the arguments of the training, are ignored and logged. For `path` see `find_weights`.
    """
    published = find_published_weights(path)
    norm_eps = NORM_EPS if published is None else published.norm_eps
    path = find_weights(path)
    start = read_start(path)
    is_zip = zipfile.is_zipfile(path)  # as torch writes them
    is_pickle = path.suffix.lower() == ".pkl" and not is_zip
    is_safetensors = start[4:9] == b"\0\0\0\0{" or (path.suffix.lower() == ".safetensors" and not is_zip)
    ignored_classes: list[str] = []
    try:
        if is_safetensors:  # eight bytes with the length of a header in JSON
            loaded = load_file(path)
        elif is_pickle:
            loaded = read_pickle(path)
        else:
            loaded, ignored_classes = load_torch(path)
    except Exception as error:  # torch, pickle and safetensors raise many types
        reason = first_line(error).rstrip(".")
        kind = name_kind(start)
        if kind is not None:
            reason = f"it is {kind}"
        elif isinstance(error, pickle.UnpicklingError):
            reason = f"it is damaged or contains other objects than tensors: {reason}"
        raise UserError(
            f"{path}: cannot be read as weights ({reason}); no code in it was executed. Copy or download it again, or "
            "save only the state_dict() in it."
        ) from error
    if is_safetensors:
        _require_plain_tensors(loaded, path)
        return WeightsFile(path, strip_wrappers(loaded), norm_eps=norm_eps)
    if not isinstance(loaded, dict):
        loaded = {type(loaded).__name__: loaded}
    author = loaded.get("__author__")
    heuristics = loaded.get("matching_heuristics") is True or (isinstance(author, str) and author == "Caffe2")
    state = _state_dict(loaded, path)
    if is_pickle and "model" not in loaded:  # Detectron2 also treats such a file as Caffe2's
        heuristics = True
        state = {name: value for name, value in state.items() if not str(name).endswith("_momentum")}
    tensors = {}
    for name, value in state.items():
        if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
            value = torch.from_numpy(value)
        tensors[name] = value
    _check_tensors(tensors, path, ignored_classes)
    return WeightsFile(path, strip_wrappers(tensors), heuristics, norm_eps)


def _check_tensors(values: Mapping[Any, Any], path: Path, ignored_classes: Sequence[str]) -> None:
    """Raise a UserError unless values are tensors by name; log the classes of other objects in their file."""
    classes = f" ({', '.join(ignored_classes)})" if ignored_classes else ""
    if not values and classes:
        raise UserError(
            f"{path}: contains objects{classes} instead of a state dict; no code in it was executed. Save the "
            "model's state_dict()."
        )
    for name, value in values.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise UserError(
                f"{path}: not a state dict (perhaps under the key `model`): {name!r} is not a tensor{classes}; no code "
                "in it was executed."
            )
    _require_plain_tensors(values, path)
    if ignored_classes:
        logger.warning("%s: ignored the objects beside the weights%s.", path, classes)


def _require_plain_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Raise a UserError for sparse, nested, quantised or complex tensors, and for those without values."""
    for name, value in tensors.items():
        is_dense = value.layout is torch.strided and not value.is_nested
        if is_dense and not value.is_meta and value.dtype in WEIGHT_DTYPES:
            continue
        layout = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
        dtype = str(value.dtype).removeprefix("torch.")
        raise UserError(
            f"{path}: {name!r} is a {layout} tensor of {dtype} on the device {value.device}; save dense real tensors."
        )


def _state_dict(loaded: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the innermost dict under `STATE_KEYS`; `loaded` itself if it has none of them."""
    while True:
        keys = [key for key in STATE_KEYS if isinstance(loaded.get(key), dict) and loaded[key]]
        if not keys:
            return loaded
        if len(keys) > 1:
            raise UserError(
                f"{path}: has weights under {' and '.join(keys)}; save the ones to use in a file of their own."
            )
        loaded = loaded[keys[0]]


def load_torch(path: Path) -> tuple[Any, list[str]]:
    """Load a torch file without executing code in it.

    Arrays and scalars of NumPy are read. Objects of other classes become dicts.

    Returns:
        the content, and the names of these classes.
    """
    arrays = dict(NUMPY_IN_PICKLES)
    for name, value in NUMPY_IN_PICKLES.items():
        arrays[name.replace("numpy.core.", "numpy._core.")] = value  # of NumPy 2
    other_names = [name for name in _pickled_names(path) if name not in arrays]
    replacements = {**dict.fromkeys(other_names, _IgnoredObject), "collections.deque": _ignored_list, **arrays}
    with torch.serialization.safe_globals([(value, name) for name, value in replacements.items()]):
        try:
            with path.open("rb") as file:  # by its path, torch would read a file named .safetensors as such
                return torch.load(file, map_location="cpu", weights_only=True), other_names
        except pickle.UnpicklingError as error:  # torch puts a page of advice around the cause
            raise pickle.UnpicklingError(first_line(error.__context__ or error)) from error


def check_arrays(path: Path) -> None:
    """Raise a UserError if NumPy arrays in a torch file have false state, for loaders that let NumPy read them."""
    with reading(path, Exception):  # damaged files raise many types
        if any(name.startswith("numpy.") for name in _pickled_names(path)):
            load_torch(path)


class _IgnoredObject:
    """Replaces any other class: a Counter, which `torch.load` fills with items. Its state, of any type, is dropped."""

    def __new__(cls, *arguments: object) -> Counter[Any]:
        ignored: Counter[Any] = Counter()
        vars(ignored)["__setstate__"] = _drop_state
        return ignored


def _drop_state(state: object) -> None:
    pass


def _ignored_list(*arguments: object) -> list[Any]:
    """Replace `collections.deque`; `torch.load` fills plain lists, and up to torch 2.11 no others."""
    return []


def _pickled_names(path: Path) -> list[str]:
    """List the classes and functions in a torch file that `torch.load` refuses, without loading it."""
    if zipfile.is_zipfile(path):
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    names = set()
    with path.open("rb") as file:
        for _ in range(LEGACY_PICKLES):
            for opcode, argument, _ in pickletools.genops(file):
                if opcode.name == "GLOBAL":  # by its name in Python 2
                    module, name = argument.split(" ", 1)
                    module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
                    names.add(f"{module}.{name}")
    readable = re.compile(r"torch\.(?!nn\.).*|collections\.(OrderedDict|Counter)|_codecs\.encode|builtins\.set")
    return sorted(name for name in names if not readable.fullmatch(name))


def read_tensors(path: str | Path) -> dict[str, Tensor]:
    return read_weights(path).tensors


@dataclasses.dataclass(frozen=True)
class LoadReport:
    """Comparison of the keys of a weights file with those of a model."""

    matched: list[str]
    missing: list[str]  # in the model, not in the file
    unexpected: list[str]  # in the file, not in the model or not requested
    mismatched: list[str]  # in both, with different shapes: "key [file shape] -> [model shape]"
    layout: str = "this detector"  # software whose key names and conventions the file uses
    copied: list[str] = dataclasses.field(default_factory=list)  # "from -> to": copied to another key
    # prefixes of missing keys whose parameters are initialised to zero: they have no effect until they are trained
    zero: list[str] = dataclasses.field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        return not (self.missing or self.unexpected or self.mismatched)

    def summary(self) -> str:
        """Return one line with the number of keys of each kind and the first keys that do not match."""
        parts = [f"{len(self.matched)} keys match"]
        for kind in ("missing", "unexpected", "mismatched"):
            keys = getattr(self, kind)
            if keys:
                more = ", ..." if len(keys) > SHOWN_KEYS else ""
                parts.append(f"{len(keys)} {kind} ({', '.join(keys[:SHOWN_KEYS])}{more})")
        if self.copied:
            parts.append(f"copied: {', '.join(self.copied)}")
        if self.zero:
            parts.append(f"starts at zero: {', '.join(self.zero)}")
        return ", ".join(parts)

    def __str__(self) -> str:
        """Return the full report, one key per line. Matched keys are only counted."""
        lines = [f"layout: {self.layout}", f"matched: {len(self.matched)}"]
        for kind in ("missing", "unexpected", "mismatched"):
            keys = getattr(self, kind)
            lines.append(f"{kind}: {len(keys)}")
            lines += [f"  {key}" for key in keys]
        lines += [f"copied: {rule}" for rule in self.copied]
        lines += [f"starts at zero: {part}" for part in self.zero]
        return "\n".join(lines)


def load_weights(
    module: nn.Module,
    tensors: dict[str, Tensor],
    source: str | Path,
    *,
    allow_missing: Sequence[str] = (),
    allow_unexpected: Sequence[str] = (),
    only: Sequence[str] = ("",),
    layout: str = LoadReport.layout,
) -> LoadReport:
    """Load a state dict if all its keys and shapes match and all its values are finite; otherwise load nothing.

    Args:
        allow_missing: prefixes of keys that may be missing from the file. The report still lists them.
        allow_unexpected: prefixes of keys that only the file may have. The report still lists them.
        only: prefixes of the keys to load. Other keys are reported as missing or unexpected, without an error.
    """
    if isinstance(module, Detector):
        tensors = _drop_config_buffers(module.config, tensors, source)
    state = module.state_dict()
    prefixes = tuple(only)
    used = {name: value for name, value in tensors.items() if name in state and name.startswith(prefixes)}
    counter = "num_batches_tracked"  # affects no output; frozen batch norms do not have it
    names = [name for name in state if not name.endswith(counter)]
    fits = {name: used[name].shape == state[name].shape for name in names if name in used}
    report = LoadReport(
        matched=[name for name in fits if fits[name]],
        missing=[name for name in names if name not in used],
        unexpected=[name for name in tensors if name not in used and not name.endswith(counter)],
        mismatched=[f"{name} {list(used[name].shape)} -> {list(state[name].shape)}" for name in fits if not fits[name]],
        layout=layout,
    )
    missing = [name for name in report.missing if name.startswith(prefixes)]
    unexpected = [name for name in report.unexpected if name.startswith(prefixes)]
    refused = dataclasses.replace(
        report,
        missing=[name for name in missing if not name.startswith(tuple(allow_missing))],
        unexpected=[name for name in unexpected if not name.startswith(tuple(allow_unexpected))],
    )
    if not refused.is_complete:
        part = ""
        if isinstance(module, Detector):
            part = " To load a part of it, expect no_attributes, no_predictor, no_mask_head or backbone."
        raise UserError(
            f"{source} does not fit the model's config: {refused.summary()}. Use the config it was trained with.{part}"
        )
    diverged = next((name for name, value in used.items() if not torch.isfinite(value).all()), None)
    if diverged is not None:
        raise UserError(
            f"{source}: {diverged} is NaN or infinite; training diverged or the file is damaged; use another."
        )
    module.load_state_dict(used, strict=False)  # the keys were checked above
    return report


def _drop_config_buffers(config: DetectorConfig, tensors: dict[str, Tensor], source: str | Path) -> dict[str, Tensor]:
    """Drop the buffers of old checkpoints that duplicate config values, after checking that they are equal."""
    expected = {
        "pixel_mean": (torch.tensor(config.input.pixel_mean), "MODEL.PIXEL_MEAN"),
        "pixel_std": (torch.tensor(config.input.pixel_std), "MODEL.PIXEL_STD"),
    }
    cells = configured_cell_anchors(config.anchors, len(config.rpn.in_features))
    for number, value in enumerate(cells):
        expected[f"{CELL_ANCHORS}{number}"] = (value, "MODEL.ANCHOR_GENERATOR")
    for name, (value, key) in expected.items():
        if name not in tensors:
            continue
        stored = tensors[name].float().flatten()
        value = value.flatten()
        if len(stored) != len(value) or not torch.allclose(stored, value, rtol=0, atol=TOLERANCE):
            shown = [round(number, 2) for number in stored[:8].tolist()]
            raise UserError(f"{source}: its {name} {shown} differs from {key} in the config; correct the config.")
    return {name: value for name, value in tensors.items() if name not in expected}


def _read_conventions(path: Path) -> dict[str, Any]:
    """Read the `CONVENTIONS` that a file beside weights states; none if it is missing or no detector config."""
    if not path.is_file():
        return {}
    try:
        tree = flatten(load_tree(path))
        stated = {key: tree[key] for key in CONVENTIONS if key in tree}
        return {key: DetectorConfig.from_flat(stated).to_flat()[key] for key in stated}
    except UserError:  # a YAML file of another program
        return {}


def _warn_of_other_conventions(config: DetectorConfig, trained_with: dict[str, Any], weights: str, where: str) -> None:
    """Log a warning if weights were trained with other `CONVENTIONS`, although all their shapes fit."""
    used = config.to_flat()
    different = [key for key in CONVENTIONS if key in trained_with and used.get(key) != trained_with[key]]
    if different:
        logger.warning(
            "%s was trained with %s, but the detector's config has other values, so its features will differ. See "
            "%s for the right config.",
            weights,
            ", ".join(f"{key} {trained_with[key]}" for key in different),
            where,
        )


def load_checkpoint(
    detector: Detector,
    path: str | Path,
    *,
    expect: Literal["all", "no_attributes", "no_predictor", "no_mask_head", "backbone"] = "all",
) -> LoadReport:
    """Load a saved or published checkpoint into a detector.

    Args:
        path: see `read_weights`.
        expect: the part of the detector that the file must contain. "no_attributes": all but the attribute head, which
            may be missing from the file or from the detector. "no_predictor": all but the box predictor, and the last
            layer of a mask head with a mask per class, which keep their values: for a detector of other classes. The
            rest of the mask head must be in the file. "no_mask_head": all but the mask head, which keeps its values:
            for the weights of a Faster R-CNN, or of a Mask R-CNN with another head. "backbone": stem to res5; the RPN
            and the box predictor keep their values even if the file contains them.
    """
    weights = read_weights(path)
    names = detector.state_dict().keys()
    tensors, layout = to_detector_names(
        weights.tensors,
        names,
        detector.config,
        weights.path,
        matching_heuristics=weights.matching_heuristics,
        norm_eps=weights.norm_eps,
    )
    options = EXPECT[expect]
    left_out = _left_out(expect, detector.config)
    if left_out:
        tensors = {name: value for name, value in tensors.items() if not name.startswith(left_out)}
        options = options | {"allow_missing": left_out}
    if detector.config.mask_on and expect != "backbone":  # then the file's mask head is used
        options = options | {"allow_unexpected": [name for name in options["allow_unexpected"] if name != MASK_HEAD]}
    if expect == "backbone":
        options = {"only": detector.config.backbone_spec.weight_prefixes}
    report = load_weights(detector, tensors, path, layout=layout, **options)
    published = find_published_weights(path)
    if published is not None:
        theirs = DetectorConfig.from_yaml(published.config_path).to_flat()
        config_name = f"{published.config}.yaml in detector/published"
        _warn_of_other_conventions(detector.config, theirs, published.name, config_name)
    else:
        for config_path in (weights.path.with_suffix(".yaml"), weights.path.with_name(CONFIG_NAME)):
            _warn_of_other_conventions(detector.config, _read_conventions(config_path), str(path), str(config_path))
    return report


def _left_out(expect: str, config: DetectorConfig) -> tuple[str, ...]:
    """Return the prefixes of the parameters that keep their values, whatever the file contains."""
    if expect == "no_mask_head":
        return (MASK_HEAD,)
    if expect != "no_predictor":
        return ()
    if config.mask_on and not config.mask_head.class_agnostic:
        return (PREDICTOR, f"{MASK_HEAD}predictor.")
    return (PREDICTOR,)


def save_weights(tensors: Mapping[str, Tensor], path: str | Path, key: str = "model") -> None:
    """Write a `.safetensors` file, or, with any other suffix, a torch file.

    A torch file has the state dict under `key` (Detectron2: "model"), or is the state dict if `key` is empty.
    """
    path = Path(path)
    plain = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    with atomic_file(path) as part:
        if path.suffix.lower() == ".safetensors":
            save_file(plain, part)
        else:
            state = {key: plain} if key else plain
            torch.save(state, part)


def save_settings(detector: Detector, directory: str | Path) -> None:
    write_text(Path(directory, CONFIG_NAME), detector.config.to_yaml())
    names = Path(directory, CLASS_NAMES)
    names.unlink(missing_ok=True)
    if detector.class_names is not None:
        write_text(names, json.dumps(detector.class_names, ensure_ascii=False) + "\n")


def read_class_names(path: str | Path, num_classes: int) -> tuple[str, ...] | None:
    """Return the names of the classes of a detector's weights, or None if they are unknown.

    The names are in the folder of the weights, or in the list of published weights.

    Args:
        path: see `find_weights`.
        num_classes: classes of the detector's config.

    Raises:
        UserError: the file of the names is damaged, or has another number of names.
    """
    names_path = find_weights(path).with_name(CLASS_NAMES)
    if names_path.is_file():
        names = read_json(names_path, list[str])
        if len(names) != num_classes:
            raise UserError(
                f"{names_path} has {len(names)} class names, but the detector's config has {num_classes} classes; use "
                "the config that the weights were trained with, load a part of them (no_predictor or backbone), or, if "
                "only the names are wrong, correct or remove their file."
            )
        return tuple(names)
    published = find_published_weights(path)
    if published is None:
        return None
    class_names = published.read_class_names()
    if class_names is None or len(class_names) != num_classes:  # another file may have the same name
        return None
    return class_names
