"""Files from outside run no code, take a bounded time and memory, and become one sentence that names them."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import random
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save

from tests.campaign.hostile_archives import member, zip_bytes
from tests.campaign.hostile_features import npz_bytes, store_bytes
from tests.campaign.hostile_files import TABLE
from tests.campaign.hostile_images import HARMLESS_IMAGES, image_bytes
from tests.campaign.hostile_parts import torch_bytes

pytest.importorskip("h5py")
pytest.importorskip("lmdb")

ROOT = Path(__file__).parents[2]
ROUNDS = 20


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of one file."""

    name: str
    path: Path
    kind: str  # "read", or the kind of error
    text: str
    seconds: float


def read_all(files: Sequence[tuple[str, str, Path]], folder: Path) -> list[Outcome]:
    """Read (name, reader, path) in one process with little memory."""
    rows = folder / "rows.json"
    rows.write_text(json.dumps([(reader, str(path)) for _, reader, path in files]))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
    environment["ACCELERATE_USE_CPU"] = "true"
    command = [sys.executable, str(Path(__file__).with_name("read_hostile.py")), str(rows)]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, cwd=folder)
    lines = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    begun = [line["begins"] for line in lines if "begins" in line]
    assert begun, ended.stderr[-3000:]
    last = files[begun[-1]]
    assert ended.returncode == 0, f"{last[0]} ended the process: {ended.returncode} {ended.stderr[-2000:]}"
    done = [line for line in lines if "number" in line]
    assert len(done) == len(files)
    return [Outcome(*files[one["number"]][::2], one["kind"], one["text"], one["seconds"]) for one in done]


def is_sentence(outcome: Outcome) -> bool:
    names = (str(outcome.path), str(outcome.path.parent))
    return (
        outcome.kind == "UserError" and any(name in outcome.text for name in names) and "\n" not in outcome.text.strip()
    )


def test_hostile_files_become_one_sentence(tmp_path):
    files, canaries = [], []
    for reader, builders in TABLE.items():
        for name, build in builders.items():
            folder = tmp_path / name
            folder.mkdir()
            canaries.append(tmp_path / f"{name}.canary")
            files.append((name, reader, build(folder, canaries[-1])))
    assert len(files) == 347
    outcomes = read_all(files, tmp_path)
    assert [canary.name for canary in canaries if canary.exists()] == []
    harmless = {f"image_{name}" for name in HARMLESS_IMAGES}
    read = {one.name for one in outcomes if one.kind == "read"}
    assert read == harmless
    bad = [(one.name, one.kind, one.text[:300]) for one in outcomes if one.kind != "read" and not is_sentence(one)]
    assert bad == []
    assert max(one.seconds for one in outcomes) < 10


def good_files() -> dict[str, tuple[str, str, bytes]]:
    """A file of each kind that can be read: its reader, its name and its content."""
    weights = {
        "model": {"w": torch.arange(7.0), "v": torch.zeros(2, 3)},
        "optimizer": [torch.zeros(3), 1, "a", (2, None)],
    }
    arrays = {"model": {"w": np.zeros((3, 4), np.float32), "x": np.arange(3)}, "__author__": "x"}
    refs = [
        {"ref_id": n, "ann_id": n, "image_id": n, "split": "train", "sentences": [{"sent_id": n, "sent": "a"}]}
        for n in range(9)
    ]
    tar = member("1.jpg", b"%011o" % 900, content=image_bytes("JPEG")[:900].ljust(900, b"\0"))
    tar += member("1.txt", b"%011o" % 5, content=b"a cat") + bytes(1024)
    stores = {"tsv": "f.tsv", "lxmert": "f.tsv", "hdf5": "f.h5", "lmdb": "f.lmdb"}
    kinds = {"JPEG": "jpg", "PNG": "png", "GIF": "gif", "WEBP": "webp", "BMP": "bmp", "TIFF": "tif"}
    return {
        **{f"pickle {protocol}": ("weights", "w.pkl", pickle.dumps(arrays, protocol)) for protocol in (0, 2, 4, 5)},
        **{f"refs {protocol}": ("refs", "refs.p", pickle.dumps(refs, protocol)) for protocol in (0, 2, 4)},
        "torch": ("weights", "w.pth", torch_bytes(weights)),
        "old torch": ("weights", "w.pth", torch_bytes(weights, is_zip=False)),
        "safetensors": ("weights", "w.safetensors", save({"w": torch.arange(7.0)})),
        **{layout: ("features", name, store_bytes(layout, name, 59)) for layout, name in stores.items()},
        "npz": ("npz", "1.npz", npz_bytes()),
        **{kind: ("image", f"photo.{end}", image_bytes(kind, (60, 50))) for kind, end in kinds.items()},
        "zip": ("zip", "a.zip", zip_bytes(zipfile.ZIP_DEFLATED)),
        "tar": ("tar", "00000.tar", tar),
    }


def damage(content: bytes, draw: random.Random) -> bytes:
    """Cut, flip, overwrite or repeat something, up to four times."""
    for _ in range(draw.randint(1, 4)):
        if len(content) < 2:
            return content
        at, data = draw.randrange(len(content)), bytearray(content)
        end = min(at + draw.choice([1, 2, 4, 8, 64]), len(content))
        kind = draw.choice(["cut", "flip", "flip", "zeros", "ones", "repeat", "remove"])
        if kind == "flip":
            data[at] ^= 1 << draw.randrange(8)
        elif kind in ("zeros", "ones"):
            data[at:end] = bytes([255 * (kind == "ones")]) * (end - at)
        elif kind == "repeat":
            data[at:at] = data[at:end] * draw.choice([1, 9])
        else:
            del data[at : len(data) if kind == "cut" else end]
        content = bytes(data)
    return content


def read_damaged(folder: Path, rounds: int, seed: int) -> list[Outcome]:
    draw, files = random.Random(seed), []
    for kind, (reader, name, content) in good_files().items():
        for number in range(rounds):
            place = folder / f"{kind} {number}"
            place.mkdir()
            (place / name).write_bytes(content if number == 0 else damage(content, draw))
            files.append((f"{kind} {number}", reader, place / name))
    outcomes = read_all(files, folder)
    whole = [one.name for one in outcomes if one.name.endswith(" 0") and one.kind != "read"]
    assert whole == []
    return [one for one in outcomes if one.kind != "read"]


def test_a_few_damaged_files_become_one_sentence(tmp_path):
    damaged = read_damaged(tmp_path, 3, seed=1)
    assert [(one.name, one.kind, one.text[:300]) for one in damaged if not is_sentence(one)] == []


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(ROUNDS))
def test_damaged_files_become_one_sentence(tmp_path, seed):
    damaged = read_damaged(tmp_path, 20, seed=100 + seed)
    assert [(one.name, one.kind, one.text[:300]) for one in damaged if not is_sentence(one)] == []
