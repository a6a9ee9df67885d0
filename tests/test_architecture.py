"""What keeps the code small and its imports one way. The import contracts themselves stand in pyproject.toml."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "precisionpass"
LONGEST_FILE = 300

# The only places that may use what PyTorch does not promise to keep: a new release of torch is then read against these.
MAY_USE_PRIVATE_TORCH = {"capture.py", "shadow.py", "cache.py", "backend.py", "review/trace.py"}
PRIVATE_TORCH = re.compile(r"torch(\.\w+)*\.(_(?!_)\w+|experimental)\b")


def python_files(*folders: str) -> list[Path]:
    return sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def private_torch_names(source: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every private torch name that code imports or reads; strings and comments do not count."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        else:
            continue
        for name in names:
            if PRIVATE_TORCH.match(name):
                yield node.lineno, name


def imported_by(code: str) -> set[str]:
    """Top-level modules that a fresh interpreter has after running the code."""
    script = f"{code}\nimport sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(ran.stdout.split())


def test_imports_go_one_way():
    ran = subprocess.run(
        [Path(sys.executable).parent / "lint-imports", "--no-logo"], capture_output=True, text=True, cwd=ROOT
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_no_file_is_long():
    lengths = {named(file): len(file.read_text().splitlines()) for file in python_files("precisionpass", "tests")}
    long = {name: length for name, length in lengths.items() if length > LONGEST_FILE}
    assert not long, f"over {LONGEST_FILE} lines, to be split by idea: {long}"


def test_every_folder_is_a_package():
    """A folder without __init__.py escapes the import contracts."""
    folders = {file.parent for file in python_files("precisionpass")}
    assert [named(folder) for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


def test_private_torch_stays_in_its_places():
    uses = [
        f"{named(file)}:{line} {name}"
        for file in python_files("precisionpass")
        if file.relative_to(PACKAGE).as_posix() not in MAY_USE_PRIVATE_TORCH
        for line, name in private_torch_names(file.read_text())
    ]
    allowed = ", ".join(sorted(MAY_USE_PRIVATE_TORCH))
    assert not uses, "private torch names outside " + allowed + ":\n" + "\n".join(uses)


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import torch._dynamo", ["torch._dynamo"]),
        ("from torch._inductor import config", ["torch._inductor.config"]),
        ("from torch.fx.experimental import proxy_tensor", ["torch.fx.experimental.proxy_tensor"]),
        ("torch._C._jit_x()", ["torch._C._jit_x", "torch._C"]),
        ("import torch\ntorch.__version__", []),
        ("# torch._dynamo\n'torch._dynamo'", []),
        ("self._torch._x; torch.library.custom_op", []),
    ],
)  # fmt: skip
def test_the_private_torch_test_sees_private_names(code, found):
    assert [name for _, name in private_torch_names(code)] == found


def test_importing_the_package_imports_nothing_heavy():
    assert not imported_by("import precisionpass") & {"torch", "sympy", "rich", "yaml", "pydantic", "jinja2", "numpy"}


def test_the_public_names():
    import precisionpass

    public = ["Found", "MasterWeights", "Match", "PrecisionPassError", "Recogniser", "Rule", "SpectralMonitor"]
    public += ["clip_grad_norm_", "compile", "default_sites", "explain", "is_active", "monitor", "report", "rewrite"]
    assert sorted(name for name in precisionpass.__all__ if name != "__version__") == public
    assert set(precisionpass.__all__) <= set(dir(precisionpass))
    with pytest.raises(AttributeError, match="module 'precisionpass' has no attribute 'compyle'"):
        precisionpass.compyle  # noqa: B018


def test_the_rules_answer_without_torch():
    assert not imported_by("import precisionpass.rules") & {"torch", "sympy", "rich"}
