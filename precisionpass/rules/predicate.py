"""A Python function as part of a match: Match(op="attention", predicate=lambda facts, module: facts["heads"] == 8)."""

from __future__ import annotations

import functools
import hashlib
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator
from pydantic_core import PydanticCustomError

from precisionpass.errors import PrecisionPassError
from precisionpass.rules.nearest import shown

# (facts of the site, dotted name of its module) -> whether the rule matches
Predicate = Callable[[Mapping[str, object], str], bool]


def _only_from_python(value: Any) -> Any:
    if value is None or callable(value):
        return value
    message = f'only rules written in Python have one, a function of (facts, module), not {shown(value)}; write "where"'
    raise PydanticCustomError("PP104", "{message}", {"message": message})


def _called_with_two(value: Any) -> Any:
    try:
        if value is not None:
            inspect.signature(value).bind({}, "")
    except TypeError:
        message = f"{name_of(value)} is called with two arguments, (facts, module)"
        raise PydanticCustomError("PP104", "{message}", {"message": message}) from None
    except ValueError:
        pass  # a function of C that tells nothing of its arguments
    return value


# Any: a type that pydantic cannot write a JSON Schema of would need an import that `check` has no time for.
PredicateField = Annotated[Any, BeforeValidator(_only_from_python), AfterValidator(_called_with_two)]


def name_of(predicate: Callable) -> str:
    """The dotted name of the function, or of the class of an object that can be called."""
    inner = _innermost(predicate)
    named = inner if hasattr(inner, "__qualname__") else type(inner)
    return f"{named.__module__}.{named.__qualname__}"


def identity(predicate: Callable) -> dict[str, str]:
    """What the digest of a rule set sees of a predicate: its dotted name, SHA-256 of its source, and plain values.

    Values that are defaults, enclosed or bound by functools.partial count: numbers, words and what is made of them by
    what they are, others by which object it is, so that the digest is then another in each process. Globals are not
    seen. Where there is no source, the name and the values alone count.
    """
    inner = _innermost(predicate)
    try:
        source = inspect.getsource(inner if hasattr(inner, "__qualname__") else type(inner))
    except (OSError, TypeError):
        source = ""
    code = getattr(inner, "__code__", None)
    if code is not None:
        source += repr(_plain(code))  # two lambdas may share a line
    closed = [cell.cell_contents for cell in getattr(inner, "__closure__", None) or () if _is_filled(cell)]
    values = [getattr(inner, "__defaults__", None), getattr(inner, "__kwdefaults__", None), closed]
    values.append(getattr(inner, "__self__", None) if hasattr(inner, "__qualname__") else inner)
    if isinstance(predicate, functools.partial):
        values += [predicate.args, predicate.keywords]
    digest = hashlib.sha256(source.encode()).hexdigest() if source else ""
    return {"name": name_of(predicate), "source": digest, "values": repr(_plain(values))}


def ask(predicate: Predicate, rule: str, facts: Mapping[str, object], module: str) -> Any:
    """The predicate's answer. Raises PrecisionPassError, which names the rule, where the predicate fails."""
    try:
        return predicate(facts, module)
    except Exception as error:
        raise PrecisionPassError(
            f"the predicate of rule {shown(rule)} failed",
            where=f"{name_of(predicate)}, asked about the module {shown(module)}",
            why=f"{type(error).__name__}: {error}",
            fix='a fact that a site may lack is read with facts.get("window")',
            code="PP131",
        ) from error


def not_a_truth(predicate: Predicate, rule: str, answer: object) -> PrecisionPassError:
    """For an answer that is neither true nor false."""
    return PrecisionPassError(
        f"the predicate of rule {shown(rule)} gave {type(answer).__name__}, neither True nor False",
        where=name_of(predicate),
        fix="return a bool, or a comparison of sizes",
        code="PP131",
    )


def _plain(value: object) -> object:
    """What stands for a value in the digest: the same text for equal plain values, in every process."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if isinstance(value, types.CodeType):
        return [value.co_code, value.co_names, _plain(value.co_consts)]
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    if isinstance(value, set | frozenset):
        return ["set", *sorted(repr(_plain(one)) for one in value)]
    if isinstance(value, dict):
        return ["dict", *sorted(repr((_plain(key), _plain(one))) for key, one in value.items())]
    return f"{type(value).__name__} {id(value)}"


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _innermost(predicate: Callable) -> Any:
    return predicate.func if isinstance(predicate, functools.partial) else predicate
