"""The commands of docs/reference/visual_bert.md that cut minival and Karpathy's split; nothing is unpickled."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "visual_bert.md"
NEEDED = ("bash", "grep", "sed", "sort")
pytestmark = pytest.mark.skipif(not all(map(shutil.which, NEEDED)), reason="needs a shell with grep and sed")


class Trap:
    """What runs when it is unpickled: a file appears."""

    def __reduce__(self):
        return Path.touch, (Path("unpickled"),)


def run_block(word: str, folder: Path) -> None:
    """Run the block of the page that has a word, in a folder."""
    blocks = re.findall(r"^```bash\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    [block] = [block for block in blocks if word in block]
    python = folder / "python"
    python.symlink_to(sys.executable)
    subprocess.run(["bash", "-e", "-c", f'PATH="{folder}:$PATH"\n{block}'], cwd=folder, check=True)


def write(path: Path, content: dict) -> None:
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(json.dumps(content), encoding="utf-8")


def test_minival_is_cut_without_unpickling(tmp_path):
    """Images 12 and 301 are listed, each with two questions in the file of Pythia."""
    names = [f"COCO_val2014_{image:012d}" for image in (12, 301, 12, 301)]
    records = [{"image_name": name, "feature_path": f"{name}.npy", "question_id": n} for n, name in enumerate(names)]
    np.save(tmp_path / "imdb_minival2014.npy", np.array([{"dataset_name": "vqa"}, *records, {"x": Trap()}]))
    images = (7, 12, 301, 3010)
    own = [{"image_id": image, "id": image * 10} for image in images]
    captions = tmp_path / "coco" / "annotations"
    write(captions / "captions_val2014.json", {"images": [{"id": image} for image in images], "annotations": own})
    questions, annotations = "vqa/v2_OpenEnded_mscoco_{}_questions.json", "vqa/v2_mscoco_{}_annotations.json"
    write(tmp_path / questions.format("val2014"), {"questions": own, "data_subtype": "val2014"})
    write(tmp_path / annotations.format("val2014"), {"annotations": own})
    run_block("imdb_minival2014", tmp_path)
    assert not (tmp_path / "unpickled").exists()
    for split, expected in (("minival2014", [12, 301]), ("valminusminival2014", [7, 3010])):
        cut = json.loads((captions / f"captions_{split}.json").read_text("utf-8"))
        assert [one["id"] for one in cut["images"]] == expected
        assert [one["image_id"] for one in cut["annotations"]] == expected
        asked = json.loads((tmp_path / questions.format(split)).read_text("utf-8"))
        assert [one["image_id"] for one in asked["questions"]] == expected and asked["data_subtype"] == "val2014"
        answered = json.loads((tmp_path / annotations.format(split)).read_text("utf-8"))
        assert [one["image_id"] for one in answered["annotations"]] == expected


def test_the_lists_of_karpathy(tmp_path):
    splits = {5: "train", 6: "restval", 7: "val", 8: "test"}
    write(tmp_path / "dataset_coco.json", {"images": [{"cocoid": one, "split": name} for one, name in splits.items()]})
    run_block("dataset_coco", tmp_path)
    assert (tmp_path / "karpathy_train.txt").read_text("utf-8").split() == ["5", "6"]
    assert (tmp_path / "karpathy_val.txt").read_text("utf-8").split() == ["7"]
