"""Reading Detectron2 YAML: `_BASE_` files, dotted keys, Python literals as values, keys that are not supported."""

from __future__ import annotations

import ast
import dataclasses
import types
from pathlib import Path
from typing import Any, ClassVar

from detector.errors import MissingFileError, UserError
from detector.user_paths import user_path
from detector.yaml_text import SUFFIX, PlainLoader, read_yaml

MAX_FILES = 50  # that a config is made of
LONGEST_PATH = 1000  # characters of the name of a base
LONGEST_LITERAL = 10_000  # characters of a text that is read as a Python literal

# Keys that have one possible value here.
FIXED: dict[str, Any] = {
    "VERSION": 2,
    "MODEL.META_ARCHITECTURE": "GeneralizedRCNN",
    "MODEL.LOAD_PROPOSALS": False,
    "MODEL.MASK_ON": False,
    "MODEL.KEYPOINT_ON": False,
    "MODEL.RESNETS.DEFORM_ON_PER_STAGE": [False, False, False, False],
    "MODEL.PROPOSAL_GENERATOR.NAME": "RPN",
    "MODEL.ANCHOR_GENERATOR.NAME": "DefaultAnchorGenerator",
    "MODEL.RPN.HEAD_NAME": "StandardRPNHead",
    "MODEL.ROI_BOX_HEAD.USE_FED_LOSS": False,
    "MODEL.ROI_BOX_HEAD.USE_SIGMOID_CE": False,
    "INPUT.CROP.ENABLED": False,
    "TEST.AUG.ENABLED": False,
}

# What is built instead, for the keys that published files often set to another value.
SUPPORTED: dict[str, str] = {
    "MODEL.META_ARCHITECTURE": "two-stage detectors of boxes are supported: GeneralizedRCNN with C4, DC5 or FPN",
    "MODEL.MASK_ON": "only the box branch is supported; MODEL.MASK_ON: False reads the box part of a Mask R-CNN",
    "MODEL.KEYPOINT_ON": "only the box branch is supported; MODEL.KEYPOINT_ON: False reads the box part",
}

# Keys of the bottom-up attention ports, and how the same setting is written here.
PORT_KEYS: dict[str, str] = {
    "MODEL.CAFFE_MAXPOOL": "MODEL.RESNETS.STEM_POOL: caffe_max",
    "MODEL.PROPOSAL_GENERATOR.HID_CHANNELS": "MODEL.RPN.CONV_DIMS: [512]",
    "MODEL.ROI_BOX_HEAD.RES5HALVE": "MODEL.RESNETS.RES5_DILATION: 2 for false",
    "MODEL.ROI_BOX_HEAD.ATTR": "MODEL.ROI_BOX_HEAD.ATTRIBUTES.NUM_CLASSES: 400",
    "MODEL.ROI_BOX_HEAD.NUM_ATTRS": "MODEL.ROI_BOX_HEAD.ATTRIBUTES.NUM_CLASSES: 400",
    "MODEL.BUA.CAFFE": "configs/detector/bottom_up_attention_caffe.yaml",
}

# Prefixes of keys (or whole keys) that do not change the output of this model.
IGNORED: tuple[str, ...] = (
    "CUDNN_BENCHMARK",
    "DATALOADER.",
    "DATASETS.",
    "FLOAT32_PRECISION",
    "GLOBAL.",
    "OUTPUT_DIR",
    "SEED",
    "SOLVER.",
    "VIS_PERIOD",
    "INPUT.CROP.",
    "INPUT.MASK_FORMAT",
    "INPUT.RANDOM_FLIP",  # augmentation belongs to the data config
    "MODEL.DEVICE",
    "MODEL.ANCHOR_GENERATOR.ANGLES",
    "MODEL.PANOPTIC_FPN.",
    "MODEL.RESNETS.DEFORM_MODULATED",
    "MODEL.RESNETS.DEFORM_NUM_GROUPS",
    "MODEL.RETINANET.",
    "MODEL.ROI_BOX_CASCADE_HEAD.",
    "MODEL.ROI_BOX_HEAD.FED_LOSS_",
    "MODEL.ROI_BOX_HEAD.TRAIN_ON_PRED_BOXES",
    "MODEL.ROI_KEYPOINT_HEAD.",
    "MODEL.ROI_MASK_HEAD.",
    "MODEL.SEM_SEG_HEAD.",
    "TEST.AUG.",
    "TEST.EVAL_PERIOD",
    "TEST.EXPECTED_RESULTS",
    "TEST.KEYPOINT_OKS_SIGMAS",
    "TEST.PRECISE_BN.",
)


@dataclasses.dataclass(frozen=True)
class UnreadTag:
    """In the place of a YAML value whose tag is not read, such as `!!python/object/apply:eval` of zoo files."""

    tag: str


class _TagLoader(PlainLoader):
    """Runs nothing; values with other tags become an `UnreadTag`, which `DetectorConfig.from_flat` refuses."""

    yaml_multi_constructors: ClassVar[dict[str, Any]] = {"": lambda loader, tag, node: UnreadTag(tag)}


def load_tree(path: Path, chain: tuple[Path, ...] = (), loaded: list[Path] | None = None) -> dict[str, Any]:
    """A YAML file with its `_BASE_` files merged below it.

    Args:
        path: the file.
        chain: the files that led here.
        loaded: all files so far, to which this one is added.

    Raises:
        MissingFileError: the file does not exist.
        UserError: it is not a YAML mapping, is its own base, or has too many bases.
    """
    loaded = [] if loaded is None else loaded
    if not path.is_file():
        raise MissingFileError(f"{path}: no such config file" + (f" (_BASE_ of {chain[-1]})." if chain else "."))
    if path.resolve() in chain:
        raise UserError(f"{path}: _BASE_ leads back to this file; remove it from one of the files.")
    loaded.append(path)
    if len(loaded) > MAX_FILES:
        raise UserError(f"{chain[0]}: its _BASE_ files are more than {MAX_FILES} in all; write fewer files.")
    tree = read_yaml(path, _TagLoader)
    if not isinstance(tree, dict):
        raise UserError(f"{path}: expected a mapping of keys, found {type(tree).__name__}.")
    return merge_bases(tree, path.parent, (*chain, path.resolve()), loaded)


def merge_bases(
    tree: dict[str, Any], folder: Path, chain: tuple[Path, ...] = (), loaded: list[Path] | None = None
) -> dict[str, Any]:
    """`tree` on top of the files (one or a list) in its `_BASE_`, whose paths are relative to `folder`."""
    tree = dict(tree)
    bases = tree.pop("_BASE_", [])
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise UserError(f"{folder}: _BASE_ is {bases!r}; it must be the path of a YAML file, or a list of paths.")
    merged: dict[str, Any] = {}
    loaded = [] if loaded is None else loaded
    for base in bases:
        if not base.endswith(SUFFIX) or "\0" in base or len(base) > LONGEST_PATH:
            raise UserError(
                f"{folder}: _BASE_ is {base[:80]!r}; it must be the path of a YAML file, whose name ends in {SUFFIX}."
            )
        merged = _merge(merged, load_tree(folder / user_path(base), chain, loaded))
    return _merge(merged, tree)


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"A": {"B": 1}} -> {"A.B": 1}."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def nest(flat: dict[str, Any]) -> dict[str, Any]:
    """{"A.B": 1} -> {"A": {"B": 1}}."""
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *parents, leaf = key.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return tree


def decode(value: Any) -> Any:
    """A value in which strings such as "(640, 672)" are read as Python literals, as in Detectron2."""
    if isinstance(value, str) and len(value) <= LONGEST_LITERAL:
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError, RecursionError, MemoryError):  # the last two for thousands of signs
            return value
    return list(value) if isinstance(value, tuple) else value


def convert(value: Any, hint: Any, name: str) -> Any:
    """A YAML value as the type of its field.

    Raises:
        UserError: a value of a different type; the message begins with `name`.
    """
    if hint is not str:
        value = decode(value)
    if isinstance(hint, types.GenericAlias):
        item = hint.__args__[0]
        if isinstance(value, list):
            return tuple(convert(part, item, name) for part in value)
        if item is int and isinstance(value, int):  # Detectron2 accepts a single size too
            return (value,)
    elif isinstance(value, (int, float) if hint is float else hint) and isinstance(value, bool) == (hint is bool):
        return hint(value)
    shown = hint.__name__ if isinstance(hint, type) else str(hint)
    raise UserError(f"{name} = {value!r} has the wrong type; expected {shown}.")


def plain(value: Any) -> Any:
    """Tuples as lists, for YAML."""
    return [plain(item) for item in value] if isinstance(value, tuple) else value
