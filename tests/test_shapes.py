"""The shapes in annotations are enforced while the tests run (see `CHECKED` in tests/conftest.py)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from jaxtyping import TypeCheckError

import detector
from detector.structures import ImageBatch

PLANTED = """
from __future__ import annotations

import dataclasses

from jaxtyping import Float
from torch import Tensor


@dataclasses.dataclass
class Row:
    values: Float[Tensor, "N 3"]
    masks: list[Float[Tensor, "_R N"]] | None = None


Map = Float[Tensor, "N 3"]


def total(x: Float[Tensor, "N 3"]) -> Float[Tensor, "RETURNED"]:
    return x.sum(dim=1)


def named_otherwise(x: Map) -> None:
    pass
"""


@pytest.fixture
def plant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Imports source code as a module of `detector`, and so under the hook of tests/conftest.py."""
    monkeypatch.setattr(detector, "__path__", [*detector.__path__, str(tmp_path)])
    before = set(sys.modules)

    def make(source: str) -> ModuleType:
        name = f"planted_{len(list(tmp_path.glob('*.py')))}"
        (tmp_path / f"{name}.py").write_text(source)
        return importlib.import_module(f"detector.{name}")

    yield make
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_wrong_annotation_fails(plant: Callable[[str], ModuleType]):
    right = plant(PLANTED.replace("RETURNED", " N"))
    assert right.total(torch.zeros(2, 3)).shape == (2,)
    right.Row(torch.zeros(2, 3), [torch.zeros(4, 2), torch.zeros(0, 2)])
    for call in (
        lambda: right.total(torch.zeros(2, 4)),
        lambda: right.total(torch.zeros(2, 3, dtype=torch.int64)),
        lambda: right.Row(torch.zeros(2, 4)),
        lambda: right.Row(torch.zeros(2, 3), [torch.zeros(4, 3)]),
        lambda: right.named_otherwise(torch.zeros(2, 4)),
    ):
        with pytest.raises(TypeCheckError):
            call()
    wrong = plant(PLANTED.replace("RETURNED", "N 3"))
    with pytest.raises(TypeCheckError, match=r"return value of detector\.planted_1\.total"):
        wrong.total(torch.zeros(2, 3))


@pytest.mark.usefixtures("unchecked_shapes")
def test_checks_can_be_switched_off_for_a_test():
    sizes = torch.tensor([[8, 8]])
    assert ImageBatch(torch.zeros(1, 4, 8, 8), sizes, sizes, ["a.jpg"]).pixels.shape[1] == 4
