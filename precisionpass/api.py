"""What a user calls: compile, explain, rewrite, report, monitor, is_active."""

import os
import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.export import ExportedProgram

from precisionpass.backend import Backend, checked_inner, compile_in_place, watched
from precisionpass.capture import dry_run
from precisionpass.complaints import complain_of_unmatched
from precisionpass.errors import PrecisionPassError
from precisionpass.export import rewritten
from precisionpass.extensions import extensions
from precisionpass.hooks.monitor import Monitor
from precisionpass.review.measured import with_measures
from precisionpass.review.report import Report
from precisionpass.rules import load

_ATTRIBUTE = "_precisionpass"


# explain switches modes and restores attributes of the model, so one explanation runs at a time in a process. Dynamo's
# own lock is taken inside this one and never around it: another thread may compile meanwhile.
_EXPLAINING = threading.RLock()


class Compilation:
    """What a compiled model carries: its backend. A copy or a pickle of the model loses it, and says so once.

    call: what torch made of the model in place, by which a later compilation by someone else is told apart.
    """

    def __init__(self, backend: Backend, call: Callable | None = None):
        self.backend, self.call = backend, call

    def __deepcopy__(self, memo):
        return _lost()

    def __reduce__(self):
        return _lost, ()


def _lost() -> None:
    warnings.warn(
        "precisionpass: a copy of a compiled model is not compiled; call precisionpass.compile on the copy",
        stacklevel=3,
    )


def compile(model: Callable, rules: Any = "stable-bf16", *, review: str | os.PathLike | None = None,
            backend: str | Callable = "inductor", sites: Any = None, actions: Any = None, hooks: Any = None,
            **torch_compile_options):  # fmt: skip
    """Compile `model` with torch.compile after rewriting its attention, softmax and norm sites as the rules say.

    model: a module, compiled in place (weight names unchanged) and returned, or a function, for which a compiled one is
    returned. rules: a preset's name, a path, or a list of Rule. review: a folder for the review, written when the model
    is first called. backend, mode, options, fullgraph, dynamic: as in torch.compile.
    sites: recognisers instead of default_sites, usually [*default_sites, mine]. actions: functions of one's own by the
    name "own.NAME" that a rule gives as implementation. hooks: functions of one's own by the name that a rule calls.
    A second call replaces the first. Raises PrecisionPassError for bad rules, before anything is changed. Calling the
    model raises it where the rules say so: on_refused while a graph is captured, on_unmatched and on_unexpected after
    the first call.
    """
    loaded, own_parts = load(rules), extensions(sites, actions, hooks)
    own = {name: torch_compile_options.pop(name, None) for name in ("mode", "options")}
    if own["mode"] and own["options"]:
        raise PrecisionPassError("mode and options are both given", where="precisionpass.compile",
                                 why="torch.compile takes one of them", fix="leave one out", code="PP404")  # fmt: skip
    root = model if isinstance(model, torch.nn.Module) else None
    folder = None if review is None else os.fspath(review)
    made = Backend(loaded, checked_inner(backend), review=folder, model=root, own=own_parts, **own)
    if root is not None:
        compile_in_place(root, made, **torch_compile_options)
        root.__dict__[_ATTRIBUTE] = Compilation(made, root._compiled_call_impl)
        return root
    compiled = watched(torch.compile(model, backend=made, **torch_compile_options), made)
    compiled.__dict__[_ATTRIBUTE] = Compilation(made)
    return compiled


def explain(model: Callable, args: tuple = (), kwargs: Mapping[str, Any] | None = None, rules: Any = "stable-bf16",
            training: bool | None = None, measure: bool = False, *, sites: Any = None,
            actions: Any = None, hooks: Any = None) -> Report:  # fmt: skip
    """What compile would do to `model` on these arguments, without compiling or running it; works on meta tensors.

    training: True or False for a training step or inference, None for the model's own mode and the current grad mode.
    measure: also run each kind of rewritten site alone, old and new, on made-up values of the captured shapes, against
    float64. sites, actions, hooks: as in compile.
    Nothing in the model, its gradients or the random number state changes. Raises PrecisionPassError for bad rules and
    for a model that torch cannot capture.
    """
    loaded = load(rules)
    if isinstance(args, torch.Tensor):
        raise PrecisionPassError("args is one tensor, not a tuple of arguments", where="precisionpass.explain",
                                 fix="write explain(model, (x,))", code="PP407")  # fmt: skip
    root = model if isinstance(model, torch.nn.Module) else None
    backend = Backend(loaded, model=root, own=extensions(sites, actions, hooks))
    grad = torch.is_grad_enabled() if training is None else training
    modes = [] if root is None else [(module, module.training) for module in root.modules()]
    with _EXPLAINING, torch.set_grad_enabled(grad):
        try:
            if root is not None and training is not None:
                root.train(training)
            calls, not_captured = dry_run(model, tuple(args), kwargs or {}, backend.look)
        finally:
            for module, mode in modes:
                module.training = mode
    backend.note_calls(calls)
    backend.events += not_captured
    found = backend.report()
    complain_of_unmatched(found, loaded)
    return with_measures(found) if measure else found


def rewrite(program: ExportedProgram, rules: Any = "stable-bf16", *, review: str | os.PathLike | None = None
            ) -> ExportedProgram:  # fmt: skip
    """A new program of torch.export with its sites rewritten as the rules say; `program` stays as it is.

    report(...) of the new program says what was done. It runs, saves and loads wherever precisionpass is installed:
    `import precisionpass.ops` before loading one. Raises PrecisionPassError for bad rules or another kind of program.
    """
    loaded = load(rules)
    backend = Backend(loaded, review=None if review is None else os.fspath(review))
    made = rewritten(program, backend)
    complain_of_unmatched(backend.report(), loaded)
    made.__dict__[_ATTRIBUTE] = Compilation(backend)
    return made


def report(compiled: Callable | ExportedProgram) -> Report:
    """The report of every graph that a compiled model or function has captured so far: call it once first.

    Of a program that `rewrite` made: what was done to it.
    """
    return _compilation(compiled).backend.report()


def monitor(compiled: Callable) -> Monitor:
    """What a compiled model or function records while it runs, where its rules say `record`."""
    return _compilation(compiled, "monitor").backend.monitor


def is_active(model: Callable) -> bool:
    """Whether calling this model or function runs what precisionpass.compile made of it."""
    found = getattr(model, "__dict__", {}).get(_ATTRIBUTE)
    if not isinstance(found, Compilation):
        return False
    return not isinstance(model, torch.nn.Module) or (
        found.call is not None and model._compiled_call_impl is found.call
    )


def _compilation(compiled: Callable | ExportedProgram, asked: str = "report") -> Compilation:
    found = getattr(compiled, "__dict__", {}).get(_ATTRIBUTE)
    if not isinstance(found, Compilation):
        raise PrecisionPassError("this model was not compiled by precisionpass", where=f"precisionpass.{asked}",
                                 why="it is a copy, or compile was never called on it",
                                 fix="call precisionpass.compile(model, rules=...) first", code="PP405")  # fmt: skip
    return found
