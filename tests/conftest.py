"""Settings and fixtures for all tests. Set before torch is imported: one thread, and no model hub."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write tests/golden anew instead of comparing")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tour runs first: it is the product in 100 lines, so its failure is the one to read."""
    items.sort(key=lambda item: item.path.name != "test_tour.py")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """golden(name, text): the text is the one in tests/golden/name, which a person has read."""

    def compare(name: str, text: str) -> None:
        file = GOLDEN / name
        if request.config.getoption("--update-golden"):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8", newline="\n")
        assert file.exists(), f"{file} is missing; pytest --update-golden writes it, then read it"
        assert text == file.read_text(encoding="utf-8"), f"differs from {file}; write it anew with --update-golden"

    return compare


@pytest.fixture
def no_cached_backward() -> Iterator[None]:
    """For tests that compile ops without our key: AOTAutograd's cache would hand them another version's backward."""
    from torch._functorch import config

    with config.patch(enable_autograd_cache=False):
        yield
