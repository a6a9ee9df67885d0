"""Five model families, whole: every site with its name, one graph, eager's outputs and gradients."""

import re
from collections import Counter

import pytest
import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

import precisionpass
from tests.agreement import against_eager, counts, step
from tests.small_models import FAMILIES, family

EVERY = pytest.mark.parametrize(
    ("name", "attention"), [(name, attention) for name in FAMILIES for attention in ("eager", "sdpa")]
)

ONE_EACH = pytest.mark.parametrize(
    ("name", "attention"), list(zip(FAMILIES, ("sdpa", "eager", "sdpa", "eager", "eager"), strict=True))
)

# All sites, in FP32 too, where softmax and norms already have FP32 statistics and a preset would keep them.
KERNELS = """
version: 1
rules:
- id: all
  match: {op: [attention, softmax, log_softmax, layer_norm, rms_norm]}
  apply: {implementation: auto, lowering: kernel}
"""


@pytest.fixture
def all_sites(tmp_path) -> str:
    path = tmp_path / "all.yaml"
    path.write_text(KERNELS)
    return str(path)


class Executed(TorchFunctionMode):
    """What a run really calls, with the module it happens in: independent of any graph."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.inside: list[str] = [""]
        self.sites: list[tuple[str, str]] = []
        for name, module in model.named_modules():
            module.register_forward_pre_hook(lambda m, a, name=name: self.enter(m, name))
            module.register_forward_hook(lambda m, a, o: self.leave())

    def enter(self, module: torch.nn.Module, name: str) -> None:
        self.inside.append(name)
        if re.search(r"RMSNorm|T5LayerNorm", type(module).__name__):
            self.sites.append(("rms_norm", name))

    def leave(self) -> None:
        self.inside.pop()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in (functional.softmax, functional.scaled_dot_product_attention):
            self.sites.append(("attention", self.inside[-1]))
        if function is functional.layer_norm:
            self.sites.append(("layer_norm", self.inside[-1]))
        return function(*args, **(kwargs or {}))


@EVERY
def test_every_site_is_found_with_its_name_in_one_graph(name, attention):
    model, kwargs = family(name, attention)
    report = precisionpass.explain(model, kwargs=kwargs)
    with Executed(model) as executed:
        model(**kwargs)
    assert Counter((site.kind, site.module) for site in report.sites) == Counter(executed.sites)
    assert all(site.decision == "rewritten" for site in report.sites if site.kind == "attention")
    assert all(site.source for site in report.sites)
    assert (report.graphs, report.near_misses, report.events) == (1, (), ())


@EVERY
@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
def test_fp32_equals_eager(name, attention, training, all_sites):
    model, kwargs = family(name, attention)
    model.train(training)
    report = against_eager(model, kwargs=kwargs, rules=all_sites, training=training)
    assert {site.decision for site in report.sites} == {"rewritten"}


@ONE_EACH
def test_fp32_equals_eager_under_inductor(name, attention, all_sites):
    model, kwargs = family(name, attention, layers=1)
    against_eager(model, kwargs=kwargs, rules=all_sites, backend="inductor")
    model.eval()
    against_eager(model, kwargs=kwargs, rules=all_sites, backend="inductor", training=False)


@pytest.mark.parametrize("name", FAMILIES)
def test_no_graph_break_is_added(name):
    """As many graphs as torch alone captures of the same call."""
    model, kwargs = family(name)
    alone = torch._dynamo.explain(model)(**kwargs)
    torch._dynamo.reset()
    compiled = precisionpass.compile(model, backend="eager", fullgraph=alone.graph_count == 1)
    compiled(**kwargs)
    assert precisionpass.report(compiled).graphs == alone.graph_count == 1


@ONE_EACH
def test_as_many_ops_execute_as_the_report_says(name, attention, all_sites):
    torch._dynamo.reset()
    model, kwargs = family(name, attention)
    compiled = precisionpass.compile(model, rules=all_sites, backend="aot_eager")
    step(compiled, kwargs=kwargs)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        step(compiled, kwargs=kwargs)
    called = {event.key: event.count for event in profiler.key_averages() if event.key.startswith("precisionpass::")}
    said = counts(precisionpass.report(compiled))
    norm = next(kind for kind in said if kind != "attention")
    for direction in ("", "_backward"):
        ran = {kind: called.pop(f"precisionpass::{kind}{direction}", 0) for kind in said}
        with_sums = called.pop(f"precisionpass::add_norm{direction}", 0)  # most norms of these models are of a sum
        assert ran | {norm: ran[norm] + with_sums} == said and with_sums > ran[norm]
    assert not called
