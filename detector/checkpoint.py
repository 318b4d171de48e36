"""Saving and loading detectors; the one strict loader of weights.

A saved detector is a folder of `config.yaml` (Detectron2 keys), `model.safetensors` and, where they are known,
`class_names.json`, a list of strings. Published checkpoints can be
loaded too: see `detector.weight_files` for the kinds of files and `detector.weight_names` for the layouts. Nothing is
copied into a model before every key of the file has found its place.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from detector.config import BACKENDS, DetectorConfig
from detector.errors import UserError
from detector.faster_rcnn import FasterRCNN, TwoStageDetector
from detector.io import atomic_file, read_json, write_text
from detector.rpn import configured_cell_anchors
from detector.structures import Detector
from detector.weight_files import WEIGHTS_NAME, find_weights, read_tensors, read_weights
from detector.weight_names import CELL_ANCHORS, LEFTOVERS, PREDICTOR, Renamed, to_detector_names
from detector.zoo import NamedWeights, known_weights, published_class_names, settings_of

# The detectors that compute their features from pixels, by name.


def detector_class(backend: str) -> type[TwoStageDetector]:
    """The class of a backend; its `config_class` reads the settings it is built from.

    Raises:
        ValueError: the backend does not exist, or Detectron2 is not installed.
    """
    if backend == "builtin":
        return FasterRCNN
    if backend != "detectron2":
        raise UserError(f"There is no detector backend '{backend}'; use one of {', '.join(BACKENDS)}.")
    try:
        from detector.detectron2_backend import Detectron2Detector  # imported only when it is chosen
    except ImportError as error:
        raise UserError(str(error)) from error
    return Detectron2Detector


CONFIG_NAME = "config.yaml"
CLASS_NAMES = "class_names.json"
logger = logging.getLogger(__name__)

SHOWN_KEYS = 3  # of each kind in an error message
TOLERANCE = 1e-3  # pixels or grey levels, between buffers of old checkpoints and the config

# The trunk below an FPN, torchvision's MobileNet, and the ResNet of other detectors.
TRUNKS = (("backbone.bottom_up.",), ("backbone.body.",), ("backbone.", "roi_heads.res5."))
# Settings on which weights depend although they fit without them.
CONVENTIONS = ("INPUT.FORMAT", "MODEL.PIXEL_MEAN", "MODEL.PIXEL_STD", "MODEL.RESNETS.STRIDE_IN_1X1")
ATTRIBUTE_HEAD = tuple(f"{PREDICTOR}{layer}." for layer in ("cls_embedding", "fc_attr", "attr_score"))
# The part of the detector that a file must hold -> arguments of `load_weights`. The rest of the detector keeps its
# values, the rest of the file is not used.
EXPECT: dict[str, dict[str, Sequence[str]]] = {
    "all": {"may_exceed": LEFTOVERS},
    "no_attributes": {"may_exceed": (*LEFTOVERS, *ATTRIBUTE_HEAD), "may_miss": ATTRIBUTE_HEAD},
    "backbone": {},  # `only` the names of `trunk_prefixes`
}


@dataclasses.dataclass(frozen=True)
class LoadReport:
    """How the keys of a weights file fit the keys of a model."""

    matched: list[str]
    missing: list[str]  # in the model, not in the file
    unexpected: list[str]  # in the file, not in the model (or not asked for)
    mismatched: list[str]  # in both, with different shapes: "key [file shape] -> [model shape]"
    layout: str = "this detector"  # the software whose names and conventions the file has
    copied: list[str] = dataclasses.field(default_factory=list)  # "from -> to": loaded under a different name
    # parts, as prefixes of missing keys, that start at zero: they add nothing until they are trained
    zero: list[str] = dataclasses.field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        return not (self.missing or self.unexpected or self.mismatched)

    def summary(self) -> str:
        """One clause that counts each kind of misfit and names the first keys of it."""
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
        """The whole report, one key per line; matched keys are only counted."""
        lines = [f"layout: {self.layout}", f"matched: {len(self.matched)}"]
        for kind in ("missing", "unexpected", "mismatched"):
            keys = getattr(self, kind)
            lines += [f"{kind}: {len(keys)}", *(f"  {key}" for key in keys)]
        lines += [f"copied: {rule}" for rule in self.copied]
        lines += [f"starts at zero: {part}" for part in self.zero]
        return "\n".join(lines)


def compare_keys(module: nn.Module, tensors: dict[str, Tensor]) -> LoadReport:
    """Match a state dict with a module, without loading it.

    `num_batches_tracked` of batch norms is left out: no output depends on it, and a frozen batch norm does not have it.
    """
    own = module.state_dict()
    names = [name for name in own if not name.endswith("num_batches_tracked")]
    given = [name for name in tensors if not name.endswith("num_batches_tracked")]
    shared = [name for name in names if name in tensors]
    fits = {name: own[name].shape == tensors[name].shape for name in shared}
    return LoadReport(
        matched=[name for name in shared if fits[name]],
        missing=[name for name in names if name not in tensors],
        unexpected=[name for name in given if name not in own],
        mismatched=[
            f"{name} {list(tensors[name].shape)} -> {list(own[name].shape)}" for name in shared if not fits[name]
        ],
    )


def load_weights(
    module: nn.Module,
    tensors: dict[str, Tensor],
    source: str | Path,
    *,
    may_miss: Sequence[str] = (),
    may_exceed: Sequence[str] = (),
    only: Sequence[str] = ("",),
    layout: str = LoadReport.layout,
) -> LoadReport:
    """Load a state dict; every key must fit, or nothing is loaded.

    Buffers of old Detectron2 checkpoints that repeat a detector's config are compared with it.

    Args:
        source: the file's name, for the error message.
        may_miss, may_exceed: prefixes of keys that may be missing from the file, or be in it without being used.
        only: prefixes of the keys to load; others are listed as missing and unexpected, and permitted.
        layout: for the report.

    Returns:
        the report, in which the permitted misfits are listed too.

    Raises:
        UserError: any other misfit, buffers that contradict the config, or weights that are whole numbers, NaN or
            infinite.
    """
    wanted = tuple(only)
    if isinstance(module, Detector):
        tensors = _drop_config_buffers(module.config, tensors, source)
    report = compare_keys(module, {name: value for name, value in tensors.items() if name.startswith(wanted)})
    unused = [name for name in tensors if not name.startswith(wanted) and not name.endswith("num_batches_tracked")]
    judged = dataclasses.replace(
        report,
        missing=[n for n in report.missing if n.startswith(wanted) and not n.startswith(tuple(may_miss))],
        unexpected=[name for name in report.unexpected if not name.startswith(tuple(may_exceed))],
    )
    if not judged.is_complete:
        part = " Or load a part of it: expect no_attributes or backbone." if isinstance(module, Detector) else ""
        raise UserError(
            f"{source} does not fit the model's config: {judged.summary()}; use the settings it was trained with.{part}"
        )
    own = module.state_dict()
    used = {name: tensors[name] for name in own if name in tensors and name.startswith(wanted)}
    for name, value in used.items():
        _check_numbers(value, own[name], name, source)
    module.load_state_dict(used, strict=False)  # the keys were judged above
    return dataclasses.replace(report, unexpected=[*report.unexpected, *unused], layout=layout)


def _check_numbers(value: Tensor, own: Tensor, name: str, source: str | Path) -> None:
    """Raise a ValueError that names a parameter whose values no network can be meant to have."""
    if not own.is_floating_point():
        return
    if not value.is_floating_point():
        kind = str(value.dtype).removeprefix("torch.")
        raise UserError(f"{source}: {name} holds {kind} numbers instead of fractions; use a file of unpacked weights.")
    numbers = value if value.dtype == torch.float64 else value.float()
    if not math.isfinite(numbers.sum().item()):  # one fast pass: a sum is finite only if all its terms are
        wrong = int((~torch.isfinite(numbers)).sum())
        if wrong:
            raise UserError(
                f"{source}: {name} has {wrong} values that are NaN or infinite, of {value.numel()}; the training that "
                "wrote it has diverged or the file is damaged: use another checkpoint."
            )


def load_strictly(module: nn.Module, path: str | Path) -> LoadReport:
    """Load a file with the module's own names; it must hold every key in its shape, and no other key.

    Raises:
        FileNotFoundError, ValueError: the file is missing or damaged, or does not fit.
    """
    return load_weights(module, read_tensors(path), path)


def load_checkpoint(detector: Detector, path: str | Path, *, expect: str = "all") -> LoadReport:
    """Start a detector from its own or a published checkpoint.

    Args:
        detector: a detector with Detectron2's names and a `config`.
        path: a file or a folder, see `read_weights`.
            Class names are read from beside the file, where they are there.
        expect: the part of the detector that the file must hold. "all": every parameter. "no_attributes": all but the
            attribute head, which may be missing from the file or from the detector. "backbone": stem to res5; RPN and
            box predictor keep their values even where the file holds some.

    Raises:
        FileNotFoundError, ValueError: the file does not exist, is damaged, has an unknown layout, or does not fit.
    """
    converted = convert_checkpoint(detector, path)
    report = load_converted(detector, converted, path, expect=expect)
    published = known_weights(path)
    if published is not None:
        _warn_of_conventions(detector.config, published)
    if expect == "backbone":
        return report
    load_class_names(detector, find_weights(path).parent)
    if detector.class_names is None and published is not None:
        names = published_class_names(published)
        if names is not None and len(names) == detector.num_classes:  # a file of the same name may be another one
            detector.class_names = names
    return report


def _warn_of_conventions(config: DetectorConfig, published: NamedWeights) -> None:
    """Warn of settings that differ from the ones that published weights were made with, and that no shape shows."""
    own, theirs = config.to_flat(), DetectorConfig.from_flat(settings_of(published)).to_flat()
    different = [f"{key} {theirs[key]}" for key in CONVENTIONS if own.get(key) != theirs.get(key) and key in theirs]
    if different:
        logger.warning(
            "%s was made with %s, and the detector's config has other values; its features will differ (%s.yaml in "
            "detector/published has what it needs).",
            *(published.name, ", ".join(different), published.config),
        )


def convert_checkpoint(detector: Detector, path: str | Path) -> Renamed:
    """The tensors of a file in the detector's names and conventions, and the layout of the file. Nothing is loaded."""
    weights = read_weights(path)
    try:
        return to_detector_names(weights, detector.state_dict(), detector.config)
    except (LookupError, TypeError, RuntimeError) as error:  # a layout that is known, with a part missing or misshapen
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{path}: the file is damaged or has another layout than its names say ({reason}).") from error


def load_converted(detector: Detector, converted: Renamed, source: str | Path, *, expect: str) -> LoadReport:
    """The second half of `load_checkpoint`."""
    if expect not in EXPECT:
        raise UserError(f"Weights cannot be expected to hold '{expect}'; use one of {', '.join(EXPECT)}.")
    options = {"only": trunk_prefixes(detector)} if expect == "backbone" else EXPECT[expect]
    return load_weights(detector, converted.tensors, source, layout=converted.layout, **options)


def trunk_prefixes(detector: nn.Module) -> Sequence[str]:
    """Prefixes of the names of the trunk: of a ResNet, stem to res5."""
    names = list(detector.state_dict())
    return next(prefixes for prefixes in TRUNKS if any(name.startswith(prefixes) for name in names))


def save_weights(tensors: dict[str, Tensor], path: str | Path) -> None:
    """Write tensors as a `.safetensors` file, or as a `.pth` that Detectron2 loads ({"model": state dict}).

    Raises:
        UserError: a different suffix.
    """
    path = Path(path)
    plain = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".safetensors":
        with atomic_file(path) as part:
            save_file(plain, part)
    elif path.suffix == ".pth":
        with atomic_file(path) as part, part.open("wb") as file:
            torch.save({"model": plain}, file)
    else:
        raise UserError(f"{path}: weights are written as .pth or .safetensors; use one of these suffixes.")


def save_pretrained(detector: TwoStageDetector, directory: str | Path) -> None:
    """Write `config.yaml` and `model.safetensors` (Detectron2's parameter names) into a folder, made if needed."""
    save_weights(detector.state_dict(), Path(directory) / WEIGHTS_NAME)
    save_settings(detector, directory)


def save_settings(detector: Detector, directory: str | Path) -> None:
    """Write all of a detector that is not weights, its config and its class names, into a folder."""
    write_text(Path(directory, CONFIG_NAME), detector.config.to_yaml())
    names = Path(directory, CLASS_NAMES)
    names.unlink(missing_ok=True)
    if detector.class_names is not None:
        write_text(names, json.dumps(detector.class_names, ensure_ascii=False) + "\n")


def load_class_names(detector: Detector, directory: str | Path) -> None:
    """Set the detector's class names to the ones in a folder, if it holds any.

    Raises:
        UserError: the file is damaged, or holds another number of names than the detector has classes.
    """
    path = Path(directory, CLASS_NAMES)
    if not path.is_file():
        return
    names = read_json(path, list[str])
    if len(names) != detector.num_classes:
        raise UserError(
            f"{path} names {len(names)} classes, but the detector has {detector.num_classes}; remove it or correct it."
        )
    detector.class_names = tuple(names)


def load_pretrained(directory: str | Path, backend: str = "builtin") -> TwoStageDetector:
    """A detector as `save_pretrained` wrote it, on CPU and in evaluation mode.

    Args:
        backend: builtin or detectron2; each reads the files of the other.

    Raises:
        FileNotFoundError, ValueError: a file is missing or damaged, the weights do not fit the config, or the backend
            does not exist.
    """
    directory = Path(directory)
    cls = detector_class(backend)
    detector = cls(cls.config_class.from_yaml(directory / CONFIG_NAME))
    load_strictly(detector, directory / WEIGHTS_NAME)
    load_class_names(detector, directory)
    return detector.eval()


def _drop_config_buffers(config: DetectorConfig, tensors: dict[str, Tensor], source: str | Path) -> dict[str, Tensor]:
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
        found = tensors[name]
        if found.numel() != value.numel():  # before anything is copied: a small file may claim any size
            raise UserError(
                f"{source}: its {name} has {found.numel()} numbers, but {key} of the config {value.numel()}."
            )
        found = found.float().cpu().reshape(-1)
        if not torch.allclose(found, value.reshape(-1), rtol=0, atol=TOLERANCE):
            shown = [round(number, 2) for number in found[:8].tolist()]
            raise UserError(f"{source}: its {name} {shown} contradicts {key} of the config; correct the config.")
    return {name: value for name, value in tensors.items() if name not in expected}
