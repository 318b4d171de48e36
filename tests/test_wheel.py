"""The installed package without the repository: a wheel is built from its sdist and used in an empty folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytest.importorskip("setuptools", minversion="77")
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, f'build_{sys.argv[1]}')('dist')"
USE = """
import sys
from pathlib import Path
import e2e_vl
from e2e_vl.cli.main import main
from e2e_vl.config import RunDetectorConfig
from e2e_vl.config_files import read_detector_config

assert e2e_vl.__file__.startswith(sys.argv[1]), e2e_vl.__file__
words = ["train", "--config", "tiny/refcoco", "train.max_steps=2", "eval.boxes=[gt]", "data.workers=0"]
assert main([*words, "data.synthetic.scenes={train: 4, val: 1}"]) == 0
scene = e2e_vl.load("demo").examples[0]
words = ["--image", str(scene.image), "--text", scene.texts[0]]
assert main(["ask", "--run", "demo", *words, "--output", "asked_demo"]) == 0
[image, *_] = map(str, Path("data").rglob("*.jpg"))
assert main(["ask", "--run", "runs/tiny_refcoco", "--image", image, "--text", "the circle", "--output", "asked"]) == 0
for name in Path(sys.argv[1]).glob("e2e_vl/configs/detector/*.yaml"):
    if name.stem != "swin_T_FPN":  # of the hub
        read_detector_config(RunDetectorConfig(config=f"detector/{name.stem}"))
assert main(["extract", image, "--output", "found", "--config", "detector/tiny"]) == 0
assert main(["reproduce", "vl_bert", "1", "base", "--dry-run"]) == 0
"""


def run(folder: Path, *words: str, **variables: str) -> None:
    line, names = [sys.executable, "-c", *words], {**os.environ, **variables}
    done = subprocess.run(line, cwd=folder, env=names, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_wheel_trains_asks_and_extracts_in_an_empty_folder(tmp_path: Path) -> None:
    source, installed, empty = (tmp_path / name for name in ("source", "installed", "empty"))
    for name in ("e2e_vl", "detector", "configs"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    assert not any(path.is_symlink() for path in source.rglob("*")), "a checkout on Windows makes text files of links"
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    run(source, BUILD, "sdist")
    with tarfile.open(next(source.glob("dist/*.tar.gz"))) as archive:
        archive.extractall(tmp_path, filter="data")
    [unpacked] = tmp_path.glob("e2e_vl-*")
    run(unpacked, BUILD, "wheel")
    with zipfile.ZipFile(next(unpacked.glob("dist/*.whl"))) as archive:
        archive.extractall(installed)
    written = {path.relative_to(ROOT) for path in (ROOT / "configs").rglob("*") if path.is_file()}
    assert all((installed / "e2e_vl" / path).is_file() for path in written)
    assert all((installed / package / "py.typed").is_file() for package in ("detector", "e2e_vl"))
    empty.mkdir()
    run(empty, USE, str(installed), PYTHONPATH=str(installed))
    assert all((empty / name).is_file() for name in ("asked/answer.png", "asked_demo/answer.png", "found/regions.npz"))
