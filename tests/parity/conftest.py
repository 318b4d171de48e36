"""Makes the helper modules of this folder available to its tests."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

# so that their asserts say what they compared
pytest.register_assert_rewrite(
    *(f"tests.parity.{path.stem}" for path in Path(__file__).parent.glob("*_checks.py")),
    "tests.parity.evaluation_common",
    "tests.parity.visual_bert_common",
    "tests.parity.lxmert_common",
    "tests.parity.vl_bert_common",
    "tests.parity.detectron2_common",
)


def load_helper(name: str) -> ModuleType:
    """Import NAME.py of this folder, which is no package."""
    spec = spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def backends() -> ModuleType:
    return load_helper("backends")


@pytest.fixture(scope="session")
def vl_bert_keys() -> ModuleType:
    return load_helper("vl_bert_keys")
