"""What the tests of the rules language share."""

from collections.abc import Callable
from pathlib import Path

import pytest

from precisionpass.rules import RuleSet, load


@pytest.fixture
def rules(tmp_path: Path) -> Callable[..., RuleSet]:
    """rules(text, more={"base.yaml": text}): the loaded file. A text without a version gets version: 1."""

    def written(text: str, more: dict[str, str] | None = None) -> RuleSet:
        for name, content in {"rules.yaml": text, **(more or {})}.items():
            full = content if "version:" in content else f"version: 1\n{content}"
            (tmp_path / name).write_text(full, encoding="utf-8")
        return load(tmp_path / "rules.yaml")

    return written
