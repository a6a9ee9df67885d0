"""The model a command line names: FILE.py:FACTORY, run and called, with one screen for everything that can go wrong."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from precisionpass.errors import PrecisionPassError
from precisionpass.rules.nearest import did_you_mean


def split_target(target: str) -> tuple[Path, str]:
    """The file and the name of FILE.py:FACTORY. Raises PrecisionPassError."""
    file, colon, name = target.rpartition(":")
    if not colon or not name.isidentifier() or not file.endswith(".py"):
        example = f"{target}:make_model" if target.endswith(".py") else "my_model.py:make_model"
        raise PrecisionPassError(
            f"the model to explain is given as FILE.py:FACTORY, not {target!r}",
            why="a function in a Python file of yours builds the model",
            fix=f"write for example: precisionpass explain {example} --rules stable-bf16",
            code="PP120",
        )
    if not Path(file).is_file():
        raise PrecisionPassError(
            f"there is no file {file}",
            where=f"looked in {Path(file).absolute().parent}",
            fix="give a path from the folder you are in, or an absolute one",
            code="PP121",
        )
    return Path(file), name


def load_model(path: Path, name: str, own: str | None = None) -> dict[str, Any]:
    """Run the file, call the factory: {"model"} and, where given, "args" and "kwargs". Raises PrecisionPassError.

    own: the name of a dict in the file, whose "sites" and "actions" are added. The file runs as it would in its own
    folder, but not as __main__; what it prints goes where stdout is sent.
    """
    module = _run_file(path)
    parts = {} if own is None else _own_parts(module, own, path)
    factory = getattr(module, name, None)
    functions = sorted(key for key, value in vars(module).items() if inspect.isfunction(value) and key[0] != "_")
    if factory is None:
        raise PrecisionPassError(
            f"{path.name} has no function {name}",
            where=str(path),
            fix=did_you_mean(name, functions) or f"its functions are: {', '.join(functions) or 'none'}",
            code="PP122",
        )
    if not callable(factory) or (hasattr(factory, "named_modules") and not inspect.isclass(factory)):
        raise PrecisionPassError(
            f"{name} is no function but {_kind(factory)}",
            where=str(path),
            fix=f"write: def make_model(): return {name}",
            code="PP122",
        )
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        raise PrecisionPassError(
            f"{name} needs arguments, and a factory is called without",
            where=_place(factory, path),
            why=str(error),
            fix=f"give them defaults, or write a small function that calls {name}",
            code="PP124",
        ) from None
    with _users_code(path, f"{name} failed", "PP124"):
        made = factory()
    return _as_arguments(made, name, _place(factory, path)) | parts


def _own_parts(module: ModuleType, name: str, path: Path) -> dict[str, Any]:
    parts = getattr(module, name, None)
    strange = sorted(set(parts) - {"sites", "actions"}, key=str) if isinstance(parts, dict) else []
    if isinstance(parts, dict) and not strange:
        return parts
    raise PrecisionPassError(
        f"--own {name} names no dict of sites and actions",
        where=str(path),
        why=f"its key {strange[0]!r} is neither" if strange else f"it is {_kind(parts)}",
        fix=f'write: {name} = {{"sites": [*default_sites, ...], "actions": {{"own.NAME": function}}}}',
        code="PP127",
    )


def _run_file(path: Path) -> ModuleType:
    name = path.stem if path.stem not in sys.modules else f"{path.stem}_to_explain"  # a file may be called torch.py
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles of the file look themselves up there
    sys.path.insert(0, str(path.absolute().parent))
    with _users_code(path, f"{path.name} failed while it was loaded", "PP123"):
        spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _users_code(path: Path, what: str, code: str) -> Iterator[None]:
    """Whatever a user's code raises becomes one screen with the last line of theirs that was running."""
    try:
        yield
    except PrecisionPassError:
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        frames = [frame for frame in frames if Path(frame.filename).resolve() == path.resolve()]
        line = error.lineno if isinstance(error, SyntaxError) else frames[-1].lineno if frames else None
        raise PrecisionPassError(
            what,
            where=f"{path}:{line}" if line else str(path),
            why=f"{type(error).__name__}: {error}",
            fix=f"run it by itself: python {path}",
            code=code,
        ) from error


def _as_arguments(made: Any, name: str, place: str) -> dict[str, Any]:
    """What a factory returned, as arguments of explain."""
    names = ("model", "args", "kwargs")
    parts: dict[str, Any] = dict(zip(names, made if isinstance(made, tuple) else (made,), strict=False))
    problem = ""
    if isinstance(made, tuple) and not 1 < len(made) < 4:
        problem = f"it returned a tuple of {len(made)}"
    elif not hasattr(parts["model"], "named_modules"):
        problem = f"it returned {_kind(made)}" if parts["model"] is made else f"its model is {_kind(parts['model'])}"
    elif not isinstance(parts.get("args", ()), tuple | list):
        problem = f"its args are {_kind(parts['args'])}"
    elif not isinstance(parts.get("kwargs", {}), dict):
        problem = f"its kwargs are {_kind(parts['kwargs'])}"
    if problem:
        raise PrecisionPassError(
            f"{name} returned no model to explain",
            where=place,
            why=problem,
            fix="return model, (model, args) or (model, args, kwargs): a torch.nn.Module, a tuple such as (x,), a dict",
            code="PP125",
        )
    return parts


def _kind(value: Any) -> str:
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _place(factory: Any, path: Path) -> str:
    code = getattr(factory, "__code__", None)
    return f"{path}:{code.co_firstlineno}" if code else str(path)
