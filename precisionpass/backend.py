"""The backend that torch.compile calls: the pass, then the inner backend.

Private torch API used here, in one place: Inductor's `compile_fx` and `list_mode_options` (config patches are the only
way to give it a mode and our cache key), the compile id of the tracing context, and whether saved tensors have hooks.
`tests/test_backend.py` says so first when a new torch moves one of them.
"""

import contextlib
import functools
import os
import threading
import types
import uuid
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import distributed, fx
from torch._C._autograd import _top_saved_tensors_default_hooks as top_saved_tensors_hooks
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.exc import BackendCompilerFailed, InvalidBackend
from torch._guards import TracingContext
from torch._inductor import list_mode_options
from torch._inductor.compile_fx import compile_fx

from precisionpass import cache, pipeline
from precisionpass.capture import module_names
from precisionpass.complaints import (
    complain_of_missing_fp8,
    complain_of_refused,
    complain_of_unexpected,
    complain_of_unmatched,
)
from precisionpass.errors import PrecisionPassError
from precisionpass.extensions import NONE, Extensions
from precisionpass.hooks.monitor import Monitor
from precisionpass.hooks.recorder import Recorder
from precisionpass.review.expectations import with_rules
from precisionpass.review.report import Report, SiteRecord
from precisionpass.review.trace import tell
from precisionpass.rules import RuleSet, load
from precisionpass.rules.own import is_own

# Shadowing patches global tracing state, so one pass runs at a time in a process.
LOCK = threading.RLock()


class Backend:
    """One compilation's backend and the reports of its graphs.

    inner: the name of a backend, or a callable as torch.compile takes it. mode, options: as in torch.compile.
    review: a folder that is rewritten after each graph, or None. model: whose module names the report uses. own: the
    user's recognisers and actions. Raises PrecisionPassError where the rules name one that is not there.
    """

    def __init__(self, rules: RuleSet, inner: str | Callable = "inductor", *, mode: str | None = None,
                 options: Mapping[str, Any] | None = None, review: str | None = None,
                 model: torch.nn.Module | None = None, own: Extensions = NONE):  # fmt: skip
        own.check(rules)
        _check_mode(rules, inner, mode, options or {})
        self.own, self.recorder = own, Recorder()
        self.monitor = Monitor(self.recorder)
        self.rules, self.inner, self.mode, self.options = rules, inner, mode, dict(options or {})
        self.review, self.model = review, model
        self.reports: list[Report] = []
        self.events: list[str] = []
        self.frames: dict[int | None, int] = {}  # torch's number of a piece of code -> its first graph
        self.unchecked = True  # whether the rules have still to be held against the first graphs

    def __call__(self, module: fx.GraphModule, inputs, **_):
        report = self.look(module)
        rewritten = [site for site in report.sites if site.decision == "rewritten"]
        ours = bool(rewritten) or any(site.reason == "recorded" for site in report.sites)
        return self._compile(module, inputs, bool(rewritten), ours, any(map(_by_action, rewritten)))

    def look(self, module: fx.GraphModule, training: bool | None = None, guarded: bool = True) -> Report:
        """Run the pass over one captured graph, in place, and note its report.

        training: None for the model's own mode. guarded: whether torch checks later what is assumed of sizes.
        """
        if training is None:
            training = self.model.training if self.model is not None else torch.is_grad_enabled()
        with LOCK, _no_saved_tensor_hooks():
            names = module_names(self.model)
            recorder = self.recorder if guarded else None  # a program of torch.export outlives this process
            report = pipeline.run(module, self.rules, names, training, guarded, self.own, recorder)
        complain_of_refused(report, self.rules)
        complain_of_missing_fp8(report)
        self.reports.append(report)
        tell(report, len(self.reports) - 1)
        self._note_recompiles()
        if self.review is not None:
            self._save(self.review)
        return report

    def _save(self, folder: str) -> None:
        """Write the review. A run is not stopped for a folder that cannot be written, but it is told.

        Of several processes that train together each has a folder of its own in it.
        """
        if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
            folder = os.path.join(folder, f"rank_{distributed.get_rank()}")
        try:
            self.report().save(folder)
        except PrecisionPassError as problem:
            self.events.append(f"{problem.what}: {problem.where}: {problem.why}")
            warnings.warn(f"precisionpass: {problem}", stacklevel=2)

    def check(self) -> None:
        """Hold expectations and rules without a site against the graphs of the first call, once there are any."""
        if self.reports:
            self.unchecked = False
            report = self.report()
            complain_of_unmatched(report, self.rules)
            complain_of_unexpected(report, self.rules)

    def note_calls(self, calls: list[int]) -> None:
        """Count each site as often as its graph was called: one graph may serve every layer of a class."""
        for position, times in enumerate(calls[: len(self.reports)]):
            report = self.reports[position]
            if times > 1:
                sites = tuple(replace(site, count=site.count * times) for site in report.sites)
                self.reports[position] = replace(report, sites=sites)

    def report(self) -> Report:
        """One report of every graph so far."""
        if not self.reports:
            return Report(
                rules_name=self.rules.name,
                rules_digest=self.rules.digest,
                events=("nothing has been captured yet", *self.events),
            )
        merged = Report.merge(self.reports)
        merged = Report(**{**merged.__dict__, "events": (*merged.events, *self.events, *self._escalations())})
        return with_rules(merged, self.rules)

    def _escalations(self) -> list[str]:
        return [f"{event.site} at step {event.step}: {event.message}" for event in self.monitor.events]

    def _compile(self, module: fx.GraphModule, inputs, rewrote: bool, ours: bool, by_action: bool):
        if not callable(self.inner) and self.inner == "inductor":
            patches = {**(list_mode_options(self.mode) if self.mode else {}), **self.options}
            if rewrote:
                patches.setdefault("emulate_precision_casts", True)  # the model's own casts stay what they are
            if ours:
                own = patches.get(cache.PASS_OPTION)
                # No key can hold all of what a user's function depends on, so what it is part of gets one of its own.
                key = cache.key(self.rules.digest) + (uuid.uuid4().hex if by_action else "")
                patches[cache.PASS_OPTION] = cache.IdentityPass(key, own)
            return compile_fx(module, inputs, config_patches=patches)
        inner = self.inner if callable(self.inner) else lookup_backend(self.inner)
        extra = {name: value for name, value in (("mode", self.mode), ("options", self.options)) if value}
        return inner(module, inputs, **extra)

    def _note_recompiles(self) -> None:
        now = torch._guards.CompileContext.current_compile_id() if TracingContext.try_get() else None
        times = getattr(now, "frame_compile_id", 0) + 1
        limit = torch._dynamo.config.recompile_limit
        number, first = len(self.reports) - 1, self.frames.setdefault(now and now.frame_id, len(self.reports) - 1)
        if now is not None and first != number:
            self.events.append(f"graph {number} is graph {first} compiled again, for other inputs")
        if times >= limit:
            event = (
                f"compiled {times} times for different inputs: torch stops at {limit} (recompile_limit) and "
                "then runs the model as it is, without the rewrite; mark the changing sizes with dynamic=True or "
                "mark_dynamic"
            )
            self.events.append(event)
            warnings.warn("precisionpass: " + event, stacklevel=2)


def _no_saved_tensor_hooks() -> contextlib.AbstractContextManager:
    """The hooks of a checkpoint around the call count what its forward saves: what the pass tries out is none of it."""
    if top_saved_tensors_hooks(False) is None:
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def _check_mode(rules: RuleSet, inner: str | Callable, mode: str | None, options: Mapping[str, Any]) -> None:
    """CUDA graphs replay what was launched once; an escalation is read at each launch."""
    replays = mode in ("reduce-overhead", "max-autotune") or options.get("triton.cudagraphs") or inner == "cudagraphs"
    escalates = any(rule.enabled and rule.apply and rule.apply.escalate for rule in rules.rules)
    if replays and escalates:
        raise PrecisionPassError("escalate does not work with CUDA graphs", where="precisionpass.compile", code="PP404",
                                 why="a replayed graph asks nobody which settings count",
                                 fix='mode="default" or "max-autotune-no-cudagraphs"')  # fmt: skip


def _by_action(site: SiteRecord) -> bool:
    """Whether a function of the user's is part of what runs there."""
    value = {name: setting["value"] for name, setting in site.settings.items()}
    return is_own(value.get("implementation")) or bool(value.get("hooks"))


def watched(call: Callable, backend: Backend) -> Callable:
    """`call`, which torch has compiled through `backend`, as a user meets it.

    PrecisionPassError comes out as it was raised: torch wraps what a backend raises in a BackendCompilerFailed. After
    the first call that captured something the backend's `check` runs.
    """

    @functools.wraps(call)
    def run(*args, **kwargs):
        try:
            result = call(*args, **kwargs)
        except BackendCompilerFailed as failure:
            if isinstance(failure.inner_exception, PrecisionPassError):
                raise failure.inner_exception from None
            raise
        if backend.unchecked and not torch.compiler.is_compiling():
            backend.check()
        return result

    return run


def compile_in_place(model: torch.nn.Module, backend: Backend, **options) -> None:
    """`model.compile(backend=...)`, for PyTorch's own layers as well.

    Dynamo passes over frames of torch.nn, so a bare nn.TransformerDecoder would run uncompiled: it is called from a
    frame of its own.
    """
    model.compile(backend=backend, **options)
    if type(model).forward.__module__.startswith("torch.nn."):
        frame = types.FunctionType(_frame.__code__.replace(), _frame.__globals__, "forward")
        model._compiled_call_impl = functools.partial(torch.compile(frame, backend=backend, **options), model)
    model._compiled_call_impl = watched(model._compiled_call_impl, backend)


def _frame(model, *args, **kwargs):
    return model._call_impl(*args, **kwargs)


def checked_inner(inner: str | Callable) -> str | Callable:
    """The inner backend, if torch has one of that name. Raises PrecisionPassError."""
    if callable(inner):
        return inner
    try:
        lookup_backend(inner)
    except InvalidBackend as problem:
        known = ", ".join(torch._dynamo.list_backends())
        raise PrecisionPassError(f"torch.compile has no backend {inner!r}", where="precisionpass.compile",
                                 why=f"it has: {known}", fix="name one of them, or give a callable", code="PP408",
                                 ) from problem  # fmt: skip
    return inner


def precisionpass(module: fx.GraphModule, inputs, *, options: Mapping[str, Any] | None = None, mode: str | None = None):
    """The `precisionpass` entry of torch.compile's backends.

    options["rules"] and options["review"], or the environment's PRECISIONPASS_RULES and PRECISIONPASS_REVIEW, say what
    to do; other options and the mode go to Inductor.
    """
    own = dict(options or {})
    rules = load(own.pop("rules", os.environ.get("PRECISIONPASS_RULES", "stable-bf16")))
    review = own.pop("review", os.environ.get("PRECISIONPASS_REVIEW"))
    inner = own.pop("backend", "inductor")
    key = (rules.name, rules.digest, review, repr(inner), mode, repr(sorted(own.items())))
    if key not in _BY_NAME:
        _BY_NAME[key] = Backend(rules, inner, mode=mode, options=own, review=review)
    return _BY_NAME[key](module, inputs)


# Backends made by name: torch calls the entry point once a graph, and one review holds all the graphs of a process.
_BY_NAME: dict[tuple, Backend] = {}
