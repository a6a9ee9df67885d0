"""What a dry run must leave as it was: arguments, module attributes, buffers."""

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
    """Attributes, buffers and an earlier in-place compilation of every module are as before on leaving."""
    modules = [] if model is None else list(model.modules())
    held = [
        (m, dict(m.__dict__), {k: dict(m.__dict__[k]) for k in ("_buffers", "_parameters", "_modules")})
        for m in modules
    ]
    buffers = [(b, b._version, b.detach().clone()) for m in modules for b in m.buffers(recurse=False)]
    for module in modules:
        module.__dict__.pop("_compiled_call_impl", None)
    try:
        yield
    finally:
        for module, attributes, tables in held:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for name, table in tables.items():
                module.__dict__[name].clear()
                module.__dict__[name].update(table)
        with torch.no_grad():
            for buffer, version, content in buffers:
                if buffer._version != version:
                    buffer.copy_(content)
