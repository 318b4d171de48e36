"""The site: its navigation names every page, and pages that are made from the source name what exists."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT

OUTSIDE = {"README.md", "CONTRIBUTING.md", "CHANGELOG.md"}  # pages outside docs/, see .ci/site_hooks.py


def pages_of(entries: list[dict[str, Any]]) -> Iterator[str]:
    """The files that a part of the navigation names."""
    for entry in entries:
        for value in entry.values():
            if isinstance(value, str):
                yield value
            else:
                yield from pages_of(value)


def test_the_navigation_names_every_page_once() -> None:
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"]
    docs = ROOT / "docs"
    pages = [path.relative_to(docs).as_posix() for path in docs.rglob("*") if path.suffix in (".md", ".ipynb")]
    assert sorted(pages_of(navigation)) == sorted([*pages, *OUTSIDE])


@pytest.mark.parametrize("page", ["api", "settings"])
def test_the_reference_names_what_exists(page: str) -> None:
    content = (ROOT / "docs" / "reference" / f"{page}.md").read_text("utf-8")
    for block in content.split("\n::: ")[1:]:
        name, *_ = block.splitlines()
        module, _, attribute = name.rpartition(".")
        try:
            described = importlib.import_module(name)
        except ImportError:
            described = getattr(importlib.import_module(module), attribute)
        members = re.search(r"members: \[(.*)\]", block)
        if members is not None:
            assert all(hasattr(described, member) for member in members[1].split(", ")), name


def test_the_reference_has_the_whole_interface() -> None:
    import e2e_vl

    content = (ROOT / "docs" / "reference" / "api.md").read_text("utf-8")
    for name in e2e_vl.__all__:
        assert name == "__version__" or f"::: e2e_vl.{name}\n" in content
