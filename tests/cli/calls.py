"""Calls of `e2e-vl predict` and `e2e-vl ask`, and what they leave behind."""

from __future__ import annotations

import json
from pathlib import Path

from PIL import Image

from e2e_vl.cli import main as tool
from e2e_vl.config_files import load_config
from tests.run.runs import predictions_of


def refused(words: list, capsys) -> str:
    """The one sentence that a call ends with."""
    assert tool.main([str(word) for word in words]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1
    return message


def split(run: Path, split: str, output: Path, *more: object, boxes: str = "gt") -> list[str]:
    words = ["predict", "--run", run, "--split", split, "--boxes", boxes, "--output", output, *more]
    return [str(word) for word in words]


def data_root(run: Path) -> Path:
    return Path(load_config(run / "model" / "config.yaml").data.root)


def ask(run: Path, image: Path | tuple[Path, ...], text: str, *more: object) -> list[str]:
    images = image if isinstance(image, tuple) else (image,)
    pair = ["--pair"] if len(images) > 1 else []
    return [str(word) for word in ("ask", "--run", run, "--image", *images, *pair, "--text", text, *more)]


def first_image(run: Path) -> Path:
    return Path(predictions_of(run)[0]["file_name"])


def is_picture(path: Path) -> bool:
    with Image.open(path) as picture:
        return min(picture.size) >= 100


def corners(run: Path, image: str | Path) -> list[str]:
    """The annotated boxes of an image as words of a command, in their order in the file."""
    content = json.loads((data_root(run) / "refcoco+" / "instances.json").read_text("utf-8"))
    [number] = [one["id"] for one in content["images"] if one["file_name"] == Path(image).name]
    boxes = [one["bbox"] for one in content["annotations"] if one["image_id"] == number]
    return [f"{x},{y},{x + w},{y + h}" for x, y, w, h in boxes]


def tagged(sentence: list) -> str:
    return " ".join(token if isinstance(token, str) else json.dumps(token) for token in sentence)
