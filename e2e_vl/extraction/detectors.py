"""The detector that extracts region features: a config with weights, or the detector of a trained run."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from detector.backends import BACKENDS, detector_class
from detector.checkpoint import CONFIG_NAME, load_checkpoint
from detector.errors import MissingFileError, UserError
from detector.faster_rcnn import TwoStageDetector
from detector.images import ResizeRule
from detector.named_weights import NamedWeights, known_weights, resolve_weights
from detector.user_paths import user_path
from detector.vocabulary import read_vocabulary
from detector.weight_files import find_weights
from e2e_vl.config import load_config
from e2e_vl.plain_yaml import check_plain

RANDOM_WEIGHTS = "The detector's weights are random, so its boxes, classes and features mean nothing."
RANDOM_BOXES = "The run's detector learned to describe given boxes only: the boxes that it finds itself are random."


@dataclasses.dataclass(frozen=True)
class LoadedDetector:
    """A detector in evaluation mode, with the image size that it is used at and where it comes from."""

    detector: TwoStageDetector
    resize: ResizeRule
    backend: str = "builtin"  # name of the detector's class
    weights: Path | None = None  # the file that was loaded; None = random values
    seed: int = 0  # of the random values
    attribute_names: tuple[str, ...] | None = None  # A names; None: regions are described without attributes
    warning: str = ""  # one sentence for users if the boxes that the detector finds mean nothing


def open_detector(
    config: str | Path,
    weights: str | Path | None,
    *,
    backend: str = "builtin",
    resize: ResizeRule | None = None,
    max_proposals: int | None = None,
    seed: int = 0,
) -> LoadedDetector:
    """Build a detector from its config and load its weights.

    Args:
        config: Detectron2 YAML file.
        weights: file or folder of any kind that `load_checkpoint` reads; None = random values that depend on the seed
            only.
        backend: builtin or detectron2.
        resize: size of the network input; None = the config's INPUT.MIN_SIZE_TEST and MAX_SIZE_TEST.
        max_proposals: upper limit for RPN.POST_NMS_TOPK_TEST, the number of proposals that the RoI head sees; None =
            the config's number. Time on a CPU grows with it; bottom-up attention uses 300, Detectron2 1000.
        seed: of the random values.

    Raises:
        FileNotFoundError, ValueError: a file is missing or does not fit, the backend does not exist, or
            `max_proposals` is less than 1.
    """
    if max_proposals is not None and max_proposals < 1:
        raise UserError(f"The detector needs at least 1 proposal, not {max_proposals} proposals.")
    cls = detector_class(backend)
    settings = cls.config_class.from_yaml(config)
    weights = None if weights is None else find_weights(weights)  # before the network is built, which takes seconds
    if max_proposals is not None:
        changes = {"MODEL.RPN.POST_NMS_TOPK_TEST": min(settings.rpn.post_nms_topk_test, max_proposals)}
        settings = cls.config_class.from_flat(settings.to_flat() | changes, str(config))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        detector = cls(settings).eval()
    if weights is not None:
        load_checkpoint(detector, weights)
    resize = resize or ResizeRule(settings.input.min_size_test, settings.input.max_size_test, "detectron2")
    return LoadedDetector(detector, resize, backend, weights, seed, warning=RANDOM_WEIGHTS if weights is None else "")


def find_detector(
    source: str | Path,
    config: str | Path | None = None,
    *,
    backend: str | None = None,
    max_proposals: int | None = None,
) -> LoadedDetector:
    """A detector by what a user has of it.

    Args:
        source: the name of published weights, see `detector.named_weights`; a run directory or saved model folder; a
            folder with `config.yaml` and `model.safetensors`; or any weights file that `load_checkpoint` reads.
        config: Detectron2 YAML file; needed for a file that comes without one.
        backend, max_proposals: as in `open_detector` and `detector_of_run`.

    Raises:
        FileNotFoundError, ValueError: nothing there, no config, or files that do not fit together.
    """
    published = resolve_weights(source)
    if isinstance(published, NamedWeights):
        return _published_detector(
            published, config, published.name, backend=backend or "builtin", max_proposals=max_proposals
        )
    path = user_path(published)
    same_name = known_weights(path)
    if config is None and path.is_file() and same_name is not None and not same_name.unsupported:
        return _published_detector(same_name, None, path, backend=backend or "builtin", max_proposals=max_proposals)
    if config is not None:
        return open_detector(config, path, backend=backend or "builtin", max_proposals=max_proposals)
    if (path / "model").is_dir() or (path / "detector").is_dir():
        return detector_of_run(path, backend=backend, max_proposals=max_proposals)
    if (path / CONFIG_NAME).is_file():
        check_plain(path / CONFIG_NAME)
        return open_detector(path / CONFIG_NAME, path, backend=backend or "builtin", max_proposals=max_proposals)
    find_weights(path)  # says in one sentence what is missing
    raise UserError(f"{path}: weights alone do not say how the detector is built; give its Detectron2 YAML as config.")


def with_names(
    source: LoadedDetector, class_names: str | Path | None = None, attribute_names: str | Path | None = None
) -> LoadedDetector:
    """The same detector with the names of its classes and attributes from text files, see `read_vocabulary`.

    The detector itself takes the class names.

    Args:
        class_names: a line for each class, in the order of the detector's classes; None = as they are.
        attribute_names: a line for each attribute; None = none.

    Raises:
        FileNotFoundError, ValueError: no such file, another number of lines, or a detector without attributes.
    """
    if class_names is not None:
        source.detector.class_names = read_vocabulary(class_names, source.detector.num_classes, "classes")
    if attribute_names is None:
        return source
    number = source.detector.config.attributes.num_classes
    if not number:
        raise UserError(f"The detector has no attribute head; leave out the attribute names of {attribute_names}.")
    return dataclasses.replace(source, attribute_names=read_vocabulary(attribute_names, number, "attributes"))


def _published_detector(
    published: NamedWeights,
    config: str | Path | None,
    weights: str | Path,
    *,
    backend: str,
    max_proposals: int | None,
) -> LoadedDetector:
    """A detector of the table, downloaded once, or from a file that came by other means.

    Args:
        weights: the name of the table, or the path of a file with the published file's name.

    Raises:
        ValueError: a trunk, which detects nothing.
    """
    if published.expect == "backbone":
        raise UserError(
            f"{published.name} is a trunk trained on ImageNet, which finds no objects; name a detector, or start a "
            "training from it with detector.weights and detector.expect=backbone."
        )
    config = config or published.config_path
    settings = detector_class(backend).config_class.from_yaml(config).input
    return open_detector(
        config,
        weights,
        backend=backend,
        resize=ResizeRule(settings.min_size_test, settings.max_size_test, published.rounding),
        max_proposals=max_proposals,
    )


def detector_of_run(
    run_dir: str | Path, *, backend: str | None = None, max_proposals: int | None = None
) -> LoadedDetector:
    """The trained detector of a run directory or saved model folder, with the image size of the run's evaluation.

    Args:
        backend: builtin or detectron2; None = the run's own.

    Raises:
        FileNotFoundError: the folder holds no trained model.
        ValueError: the run was trained on precomputed features, so that it has no detector; or settings that refer to
            something outside of their file.
    """
    folder = Path(run_dir)
    folder = folder / "model" if (folder / "model").is_dir() else folder
    if not (folder / "detector" / "config.yaml").is_file():
        raise MissingFileError(f"{run_dir} holds no trained model; give a run directory of tools/train.py.")
    for settings in (folder / "config.yaml", folder / "detector" / "config.yaml"):
        check_plain(settings)
    config = load_config(folder / "config.yaml")
    if config.detector.backend not in BACKENDS:
        raise UserError(
            f"{run_dir}: detector.backend is {config.detector.backend}, so the run has no detector that can look at "
            "images; give --config and --weights."
        )
    resize = config.data.resize
    loaded = open_detector(
        folder / "detector" / "config.yaml",
        folder / "detector",
        backend=backend or config.detector.backend,
        resize=ResizeRule(resize.short_edge[-1], resize.long_edge, resize.rounding),
        max_proposals=max_proposals,
    )
    return dataclasses.replace(loaded, warning=RANDOM_BOXES if config.detector.proposes_at_random else "")
