"""What a dry run must leave as it was: arguments, module attributes, buffers."""

import collections
import contextlib
import copy
from collections.abc import Iterator

import torch


def own_copy(leaf):
    """An argument whose changes do not reach the user's: tensors share memory (no graph is run), objects are copied."""
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().requires_grad_(leaf.requires_grad)
    try:
        return copy.deepcopy(leaf)
    except Exception:  # noqa: BLE001  (a user's object may refuse in any way)
        return leaf  # what cannot be copied is passed as it is


@contextlib.contextmanager
def restored(model: torch.nn.Module | None) -> Iterator[None]:
    """On leaving, every module has its attributes, what they held, its buffers and its compilation as before."""
    modules = [] if model is None else list(model.modules())
    held = _contents([module.__dict__ for module in modules])
    buffers = [(b, b._version, b.detach().clone()) for m in modules for b in m.buffers(recurse=False)]
    for module in modules:
        module.__dict__.pop("_compiled_call_impl", None)
    try:
        yield
    finally:
        for container, content in held:
            _put_back(container, content)
        with torch.no_grad():
            for buffer, version, content in buffers:
                if buffer._version != version:
                    buffer.copy_(content)


def _contents(roots: list) -> list[tuple]:
    """Every list, dict, set and attribute dict that can be reached, with a shallow copy of what it holds now."""
    found, seen, pending = [], set(), list(roots)
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if type(value) in _CONTAINERS:  # a subclass may do more than hold
            found.append((value, copy.copy(value)))
            pending += value.values() if isinstance(value, dict) else value
        elif isinstance(value, tuple):
            pending += value
        elif _is_plain_object(value):
            pending.append(value.__dict__)
    return found


_CONTAINERS = (list, dict, set, collections.deque, collections.OrderedDict, collections.defaultdict)


def _is_plain_object(value) -> bool:
    """An object of the user's that may keep state, such as a key-value cache. (Modules come by themselves.)"""
    home = type(value).__module__.partition(".")[0]
    return (
        isinstance(getattr(value, "__dict__", None), dict)
        and home not in ("torch", "builtins", "logging", "threading", "types", "functools", "enum", "precisionpass")
        and not isinstance(value, torch.nn.Module | torch.Tensor | type)
    )


def _put_back(container, content) -> None:
    """The old content into the same container, which is left alone where nothing has changed."""
    old, new = ([*c.items()] if isinstance(c, dict) else [*c] for c in (content, container))
    if len(old) == len(new) and all(_same(a, b) for a, b in zip(old, new, strict=True)):
        return
    container.clear()
    container.extend(content) if isinstance(container, list | collections.deque) else container.update(content)


def _same(one, other) -> bool:
    """Whether two entries are the same objects; entries of a dict are (key, value)."""
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other) == 2:
        return one[0] is other[0] and one[1] is other[1]
    return one is other
