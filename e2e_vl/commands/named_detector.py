"""The detector that the options of a command name."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from detector.errors import MissingFileError, UserError

if TYPE_CHECKING:  # at run time it would import torch
    from e2e_vl.extraction.detectors import LoadedDetector

DEFAULT_CONFIG = Path(__file__).resolve().parents[2] / "configs" / "detector" / "R_101_C4.yaml"


def load_source(arguments: argparse.Namespace) -> LoadedDetector:
    """The detector of `--detector`; or of `--run`; or the one of `--config` and `--weights`, which beat the run's.

    Raises:
        FileNotFoundError, ValueError: a file is missing or does not fit; see e2e_vl/extraction/detectors.py.
    """
    if arguments.detector is not None:
        if arguments.weights is not None:
            raise UserError("--detector and --weights both name weights; leave one of them out.")
        from e2e_vl.extraction.detectors import find_detector  # late: it imports torch

        return find_detector(
            arguments.detector,
            arguments.config,
            backend=arguments.backend,
            max_proposals=arguments.max_proposals,
        )
    if arguments.run is None and arguments.config is None and not DEFAULT_CONFIG.is_file():
        raise MissingFileError(
            f"The default detector's settings, {DEFAULT_CONFIG}, come with a clone of the project and not with the "
            "installed package; name a detector with --config or --run."
        )
    from e2e_vl.extraction.detectors import detector_of_run, open_detector  # late: it imports torch

    if arguments.run is not None and arguments.config is None and arguments.weights is None:
        return detector_of_run(arguments.run, backend=arguments.backend, max_proposals=arguments.max_proposals)
    return open_detector(
        arguments.config or DEFAULT_CONFIG,
        arguments.weights,
        backend=arguments.backend or "builtin",
        max_proposals=arguments.max_proposals,
        seed=arguments.seed,
    )
