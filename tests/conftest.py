"""Options and fixtures shared by all tests."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--golden-root",
        type=Path,
        default=Path(__file__).parent / "golden",
        help="folder of golden sets (detectron2/, vl_bert/, evaluation/) to test against",
    )


@pytest.fixture(scope="session")
def golden_root(request: pytest.FixtureRequest) -> Path:
    return request.config.getoption("--golden-root").resolve()
