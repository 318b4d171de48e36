"""The batch file for Slurm, with stand-ins for `srun`, `scontrol` and `e2e-vl`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT

SRUN = """#!/bin/bash
shift
for rank in 0 1 2 3; do
    SLURM_PROCID=$rank SLURM_LOCALID=$((rank % 2)) "$@" &
    tasks+=($!)
done
status=0
for task in "${tasks[@]}"; do wait "$task" || status=$?; done
exit $status
"""
SCONTROL = """#!/bin/bash
echo "$@" >> "$CALLS/scontrol_calls"
[ "$1" != show ] || printf 'node1\\nnode2\\n'
"""
# the processes of a run write down their words, and end with the status that the test asks for
TRAINING = """#!/bin/bash
printf '%s\\n' "$WORLD_SIZE $LOCAL_WORLD_SIZE $LOCAL_RANK $MASTER_ADDR $MASTER_PORT" "$@" > "$CALLS/rank$RANK"
exit "$STATUS"
"""


@pytest.fixture
def submit(tmp_path):
    """Run the batch file as a job on two nodes with two processes each; return its status."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("e2e-vl", TRAINING)):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)

    def run(status: int, *words: str) -> int:
        environment = {
            **os.environ,
            "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
            "CALLS": str(tmp_path),
            "STATUS": str(status),
            "SLURM_JOB_ID": "12345",
            "SLURM_JOB_NODELIST": "node[1-2]",
            "SLURM_NTASKS": "4",
            "SLURM_NNODES": "2",
        }
        call = ["bash", str(ROOT / "configs/slurm/train.sbatch"), *words]
        return subprocess.run(call, env=environment, check=False, timeout=60).returncode

    return run


def words_of(folder: Path, rank: int) -> list[str]:
    return (folder / f"rank{rank}").read_text("utf-8").splitlines()


def test_processes_get_their_ranks_and_a_stopped_run_is_requeued_and_continued(submit, tmp_path):
    run = tmp_path / "a run"
    words = ["--config", "my config.yaml", "train.lr=1e-3"]
    assert submit(143, str(run), *words) == 143
    for rank in range(4):
        first, *arguments = words_of(tmp_path, rank)
        assert first == f"4 2 {rank % 2} node1 22345"
        assert arguments == ["train", *words, f"output={run}"]
    assert (tmp_path / "scontrol_calls").read_text("utf-8").splitlines() == [
        "show hostnames node[1-2]",
        "requeue 12345",
    ]
    run.mkdir()
    assert submit(0, str(run), *words) == 0
    assert words_of(tmp_path, 0)[1:] == ["train", *words, f"output={run}", "--resume"]


@pytest.mark.parametrize("status", [0, 2])
def test_a_run_that_ends_or_fails_is_not_requeued(submit, tmp_path, status):
    assert submit(status, str(tmp_path / "run"), "--config", "x") == status
    assert "requeue" not in (tmp_path / "scontrol_calls").read_text("utf-8")
