"""Run by test_two_processes.py under `accelerate launch`: several trainings, one after the other.

    accelerate launch --num_processes 2 two_processes.py JOBS.json

JOBS.json holds a list of [config file, list of key=value words].
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from accelerate import Accelerator
from accelerate.state import PartialState

from e2e_vl.config import load_config
from e2e_vl.engine.evaluate import evaluate_run
from e2e_vl.engine.launch import start_all_processes
from e2e_vl.engine.train import train


def main() -> None:
    start_all_processes()
    Accelerator.end_training = lambda self: None  # it would end the process group before the next training
    for config, words in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        settings = load_config(config, words)
        train(settings)
        again = Path(settings.output) / "again.json"
        evaluate_run(Path(settings.output), split="val", boxes="gt", output=again)
    PartialState().destroy_process_group()


if __name__ == "__main__":
    main()
