"""Random attention and norms: right where they are rewritten, with a reason where they are not.

make fuzz                                          # many of them, about an hour
FUZZ_GRAPHS=100 FUZZ_COMPILED=20 pytest tests/fuzzing
"""

import os

import torch
from hypothesis import HealthCheck, Phase, given, settings

import precisionpass
from tests.fuzzing.attention import attention
from tests.fuzzing.case import EVERYTHING, Case, assert_same, rewritten, step
from tests.fuzzing.norms import norms

GRAPHS, COMPILED = int(os.environ.get("FUZZ_GRAPHS", 60)), int(os.environ.get("FUZZ_COMPILED", 8))
# The few cases of a test run are the same in every run; `make fuzz` draws new ones each time.
QUIET = {"deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": "FUZZ_GRAPHS" not in os.environ}


def check_graph(case: Case) -> None:
    """Capture without Dynamo, find, rewrite, run: found or explained, and as eager forward and backward."""
    module, report = rewritten(case)
    assert not report.events, report.events
    kinds = {site.kind for site in report.sites if site.decision == "rewritten"}
    if case.plain:
        assert kinds & {"attention", "layer_norm", "rms_norm"}, f"not found{case!r}{report.text()}"
    assert all(site.reason for site in report.sites) and all(miss.reason for miss in report.near_misses)
    assert_same(case, step(module, case.tensors()))


def check_compiled(case: Case, backend: str) -> None:
    torch._dynamo.reset()
    compiled = precisionpass.compile(case.function(), rules=EVERYTHING.rules, backend=backend)
    assert_same(case, step(compiled, case.tensors()))


@settings(max_examples=GRAPHS, **QUIET)
@given(attention())
def test_attention_graphs(case):
    check_graph(case)


@settings(max_examples=GRAPHS, **QUIET)
@given(norms())
def test_norm_graphs(case):
    check_graph(case)


@settings(max_examples=COMPILED, phases=set(Phase) - {Phase.shrink}, **QUIET)
@given(attention() | norms())
def test_compiled(case):
    check_compiled(case, "aot_eager")
