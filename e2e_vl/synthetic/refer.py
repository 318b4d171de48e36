"""Writer of REFER's pickle of referring expressions, ``refs(unc).p``."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any


def sentence_record(sent_id: int, sentence: str, raw: str, family: str) -> dict[str, Any]:
    """An entry of a ref's ``sentences``; ``family`` is ours, the other keys are REFER's."""
    return {"tokens": sentence.split(" "), "raw": raw, "sent_id": sent_id, "sent": sentence, "family": family}


def ref_record(
    ref_id: int,
    annotation: dict[str, Any],
    image_file_name: str,
    split: str,
    sentences: list[dict[str, Any]],
) -> dict[str, Any]:
    """An entry of the pickle: an object of an image and what is said about it.

    As in the release ``file_name`` has a number added and is not the name of a file.
    """
    stem, _, extension = image_file_name.rpartition(".")
    return {
        "sent_ids": [sentence["sent_id"] for sentence in sentences],
        "file_name": f"{stem}_{annotation['id']}.{extension}",
        "ann_id": annotation["id"],
        "ref_id": ref_id,
        "image_id": annotation["image_id"],
        "split": split,
        "sentences": sentences,
        "category_id": annotation["category_id"],
    }


def write_refs(path: Path, refs: list[dict[str, Any]]) -> None:
    """Write the refs with pickle protocol 2, the newest that Python 2 reads."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # A pickle also records which equal strings are one object, and that depends on the processes that made them.
    refs = json.loads(json.dumps(refs))
    with path.open("wb") as file:
        pickle.dump(refs, file, protocol=2)
