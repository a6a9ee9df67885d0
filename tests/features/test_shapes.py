"""Sizes that change, sizes that are symbols, and sizes at the edge."""

import itertools
import math

import pytest
import torch
from torch.nn import functional

import precisionpass
from tests.agreement import against_eager, counts, same, step
from tests.small_models import Attention, Stack


def attend(q, k, v, mask=None):
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    return (scores if mask is None else scores + mask).softmax(-1) @ v


def qkv(*shape: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(*shape, requires_grad=True) for _ in range(3))


@pytest.mark.parametrize(("dynamic", "backend"), [(True, "aot_eager"), (None, "aot_eager"), (True, "inductor")])
def test_several_lengths_and_back(dynamic, backend):
    torch._dynamo.reset()
    model = Stack(1)
    twin = Stack(1)
    twin.load_state_dict(model.state_dict())
    precisionpass.compile(twin, backend=backend, dynamic=dynamic)
    for batch, length in ((2, 7), (2, 11), (3, 16), (2, 7), (1, 1)):
        x = torch.randn(batch, length, 32)
        same(step(twin, (x,)), step(model, (x,)), 1e-5)
    assert {site.decision for site in precisionpass.report(twin).sites if site.kind == "attention"} == {"rewritten"}


@pytest.mark.parametrize("marked", [(0,), (1,), (0, 1)])
def test_mark_dynamic(marked):
    torch._dynamo.reset()
    model = Attention()
    twin = Attention()
    twin.load_state_dict(model.state_dict())
    precisionpass.compile(twin, backend="aot_eager")

    def call_marked(x):
        for dim in marked:
            torch._dynamo.mark_dynamic(x, dim)
        return twin(x)

    for batch, length in ((2, 6), (4, 9), (5, 13)):
        x = torch.randn(batch if 0 in marked else 2, length if 1 in marked else 6, 32, requires_grad=True)
        same(step(call_marked, (x,)), step(lambda x: model(x), (x,)), 1e-5)
    report = precisionpass.report(twin)
    assert (report.graphs, counts(report)) == (1, {"attention": 1})


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_symbolic_sizes_of_cross_attention(backend):
    """q and k of one length today, of others tomorrow."""
    torch._dynamo.reset()
    compiled = precisionpass.compile(attend, backend=backend, dynamic=True)
    for queries, keys in ((6, 6), (6, 9), (4, 3)):
        inputs = (*qkv(2, 3, queries, 8)[:1], *qkv(2, 3, keys, 8)[:2])
        same(step(compiled, inputs), step(attend, inputs), 1e-5)
    assert counts(precisionpass.report(compiled))["attention"] >= 1


def test_where_on_a_size_is_guarded():
    """A rule for long sequences: a short one, then a long one, each as its own condition says."""
    torch._dynamo.reset()
    rule = precisionpass.Rule(id="long", match={"op": "attention", "where": "seq_q >= 16"},
                              apply={"implementation": "auto"})  # fmt: skip
    compiled = precisionpass.compile(attend, rules=[rule], backend="aot_eager", dynamic=True)
    for length in (9, 32, 10, 40):
        inputs = qkv(2, 3, length, 8)
        same(step(compiled, inputs), step(attend, inputs), 1e-5)
    report = precisionpass.report(compiled)
    assert [(site.decision, site.holds_while) for site in report.sites] == [
        ("kept", "not (seq_q >= 16)"),
        ("rewritten", "seq_q >= 16"),
    ]


SIZES = ((0, 3, 5, 5), (2, 0, 5, 5), (2, 3, 0, 5), (2, 3, 5, 0), (2, 3, 1, 1), (1, 1, 1, 7), (1, 1, 7, 1), (1, 3, 5, 7),
         (2, 1, 5, 7))  # fmt: skip


@pytest.mark.parametrize(("batch", "heads", "queries", "keys"), SIZES)
@pytest.mark.parametrize("spelling", [attend, functional.scaled_dot_product_attention], ids=["written", "sdpa"])
def test_sizes_at_the_edge(batch, heads, queries, keys, spelling):
    q, k, v = (torch.randn(batch, heads, n, 8, requires_grad=True) for n in (queries, keys, keys))
    against_eager(lambda q, k, v: spelling(q, k, v), (q, k, v))


@pytest.mark.parametrize("width", [0, 1])
def test_width_at_the_edge(width):
    q, k = (torch.randn(2, 3, 5, width, requires_grad=True) for _ in range(2))
    v = torch.randn(2, 3, 5, 4, requires_grad=True)
    against_eager(lambda q, k, v: (q @ k.transpose(-2, -1)).softmax(-1) @ v, (q, k, v))


@pytest.mark.parametrize("shape", [(5, 8), (3, 5, 8), (2, 3, 5, 8), (2, 2, 3, 5, 8)])
@pytest.mark.parametrize("spelling", [attend, functional.scaled_dot_product_attention], ids=["written", "sdpa"])
def test_every_rank(shape, spelling):
    report = against_eager(lambda q, k, v: spelling(q, k, v), qkv(*shape))
    assert counts(report) == {"attention": 1}, report.text()


@pytest.mark.parametrize("layout", ["heads last", "strided", "negative view", "expanded", "flipped"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_layouts_of_memory(layout, backend):
    def arranged(x):
        if layout == "heads last":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        if layout == "strided":
            return torch.stack([x, x + 1], -1)[..., 0]
        if layout == "negative view":
            return x[:, :, 1:-1]
        if layout == "expanded":
            return x[:1].expand(2, -1, -1, -1)
        return x.flip(2)

    q, k, v = (arranged(x.detach()).requires_grad_() for x in qkv(2, 3, 7, 8))
    against_eager(attend, (q, k, v), backend=backend, rewritten={"attention": 1})


MASKS = [*itertools.product((1, 2), (1, 3), (1, 5), (1, 7)), (5, 7), (1, 7), (7,), (3, 5, 7), (1,), ()]


@pytest.mark.parametrize("shape", MASKS, ids=str)
@pytest.mark.parametrize("kind", ["bool", "additive", "sdpa bool", "sdpa additive"])
def test_masks_of_every_broadcast_shape(shape, kind):
    q = torch.randn(2, 3, 5, 8, requires_grad=True)
    k, v = (torch.randn(2, 3, 7, 8, requires_grad=True) for _ in range(2))
    mask = torch.rand(shape) > 0.3 if "bool" in kind else torch.randn(shape)
    if "bool" in kind and shape:
        mask[..., :1] = True

    def call(q, k, v, mask):
        if "sdpa" in kind:
            return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        if kind == "bool":
            return (q @ k.mT / 8**0.5).masked_fill(~mask, -math.inf).softmax(-1) @ v
        return attend(q, k, v, mask)

    if "sdpa" in kind and len(shape) < 2:
        pytest.skip("scaled_dot_product_attention itself wants two dimensions")
    if kind == "bool" and not bool(mask.any()):
        mask = torch.ones_like(mask)
    against_eager(call, (q, k, v, mask), rewritten={"attention": 1})


@pytest.mark.parametrize("shape", [(1, 1, 5, 7), (2, 3, 5, 7), (3, 1, 7), (7,)], ids=str)
def test_a_bias_has_its_gradient(shape):
    q = torch.randn(2, 3, 5, 8, requires_grad=True)
    k, v = (torch.randn(2, 3, 7, 8, requires_grad=True) for _ in range(2))
    against_eager(attend, (q, k, v, torch.randn(shape, requires_grad=True)), rewritten={"attention": 1})


SDPA = functional.scaled_dot_product_attention  # torch itself captures it with an unbacked batch only


@pytest.mark.parametrize(("spelling", "of"), [*((attend, of) for of in ("keys", "queries", "batch")), (SDPA, "batch")])
def test_sizes_that_only_the_data_know(of, spelling):
    """nonzero gives an unbacked size: rewritten or refused, right for every count."""

    def call(q, k, v, chosen):
        at = torch.nonzero(chosen).flatten()
        dim = 0 if of == "batch" else -2
        q = q.index_select(dim, at) if of != "keys" else q
        k, v = (t.index_select(dim, at) if of != "queries" else t for t in (k, v))
        return spelling(q, k, v)

    q, k, v = (torch.randn(6, 3, 6, 8, requires_grad=True) for _ in range(3))
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        report = against_eager(call, (q, k, v, torch.tensor([1, 0, 1, 1, 0, 0])), fullgraph=True)
        assert len(report.sites) == 1 and not report.events, report.text()
        compiled = precisionpass.compile(call, backend="aot_eager", fullgraph=True)
        for chosen in ([1, 1, 1, 1, 1, 1], [0, 1, 0, 0, 0, 0], [1, 0, 1, 0, 0, 1]):
            same(step(compiled, (q, k, v, torch.tensor(chosen))), step(call, (q, k, v, torch.tensor(chosen))), 1e-5)
