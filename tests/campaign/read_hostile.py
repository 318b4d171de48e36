"""Reads files in a process with little memory, and prints one line of JSON before and after each.

    python read_hostile.py LIST

LIST is a JSON file with [reader, path] rows. A file that takes more than `SECONDS` ends the process, and so does one
that needs too much memory where the program cannot say so; the line that is missing tells which one it was.
"""

from __future__ import annotations

import io
import json
import resource
import signal
import sys
import time
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py  # noqa: F401 - its memory belongs to the imports
import torch
from accelerate.utils import load as load_without_code

from detector.images import load_image
from detector.weight_files import read_tensors
from e2e_vl.data.captions import ShardCaptions
from e2e_vl.data.features import open_features
from e2e_vl.data.refcoco import ReferFiles
from e2e_vl.data.storage.archives import ArchivedFiles
from e2e_vl.data.user_inputs import read_boxes
from e2e_vl.run.checkpoint import load_state
from e2e_vl.text import load_tokenizer

SECONDS = 10
ROOM = 3 << 29  # bytes of address space beyond the imports


def read_features(path: Path) -> Any:
    store = open_features(path)
    return [store[image_id] for image_id in ["1", *store.ids]]


def read_all_refs(path: Path) -> Any:
    instances = path.with_name("instances.json")
    images = [{"id": n, "file_name": f"{n}.jpg", "height": 30, "width": 40} for n in range(9)]
    objects = [{"id": n, "image_id": n, "category_id": 1, "bbox": [1, 1, 9, 9]} for n in range(9)]
    content = {"images": images, "annotations": objects, "categories": [{"id": 1, "name": "cat"}]}
    instances.write_text(json.dumps(content))
    return ReferFiles(path, instances)


def read_zip(path: Path) -> Any:
    return ArchivedFiles(path.parent, path.parent / "cache").read(f"{path.name}@/x")


def read_tar(path: Path) -> Any:
    captions = ShardCaptions(path.parent, path.parent / "cache")
    return [captions.caption(0), captions.image(0)]


def read_state(path: Path) -> Any:
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)])

    def load(folder: str) -> None:
        optimizer.load_state_dict(load_without_code(Path(folder) / "optimizer.bin"))
        torch.set_rng_state(load_without_code(Path(folder) / "random_states_0.pkl")["torch_manual_seed"])

    accelerator = types.SimpleNamespace(process_index=0, scaler=None, load_state=load)
    return load_state(accelerator, optimizer, path)


READERS: dict[str, Callable[[Path], Any]] = {
    "weights": read_tensors,
    "refs": read_all_refs,
    "features": read_features,
    "npz": lambda path: open_features(path.parent)["1"],
    "boxes": lambda path: read_boxes([str(path)]),
    "image": load_image,
    "zip": read_zip,
    "tar": read_tar,
    "state": read_state,
    "tokenizer": load_tokenizer,
}


def limit_memory() -> None:
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + ROOM, size + ROOM))


def main(words: list[str]) -> None:
    rows = json.loads(Path(words[0]).read_text())
    warnings.simplefilter("ignore")
    torch.load(io.BytesIO(_saved()), weights_only=True)  # what it imports belongs to the imports
    limit_memory()
    for number, (reader, path) in enumerate(rows):
        print(json.dumps({"begins": number}), flush=True)
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # its own time: the machine may be busy
        start = time.process_time()
        try:
            READERS[reader](Path(path))
            kind, text = "read", ""
        except Exception as error:
            kind, text = next(one.__name__ for one in type(error).__mro__ if one.__name__ in _KINDS), str(error)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(
            json.dumps({"number": number, "kind": kind, "text": text, "seconds": time.process_time() - start}),
            flush=True,
        )


_KINDS = ("UserError", "ValueError", "FileNotFoundError", "MemoryError", "RecursionError", "Exception")


def _saved() -> bytes:
    stream = io.BytesIO()
    torch.save({"w": torch.zeros(1)}, stream)
    return stream.getvalue()


if __name__ == "__main__":
    main(sys.argv[1:])
