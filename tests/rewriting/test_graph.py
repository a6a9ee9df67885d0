"""Graph in, graph out: what a rewrite leaves in the captured graph, and that it touches nothing else."""

import math

import pytest
import torch
from torch.nn import functional

import precisionpass
from precisionpass import Rule

NORMS = [Rule(id="all", match={"op": ["softmax", "log_softmax", "layer_norm", "rms_norm", "attention"]},
              apply={"implementation": "auto", "lowering": "kernel"})]  # fmt: skip


def calls(call, *args, rules=NORMS, dynamic=None) -> list[str]:
    """Names of what the rewritten graph calls, in order."""
    seen = []

    def keep(module, inputs):
        module.graph.lint()
        nodes = [n for n in module.graph.nodes if n.op.startswith("call_") and not _unread_view(n)]
        names = [str(getattr(n.target, "__name__", n.target)) for n in nodes]
        seen.append([name.removesuffix(".default").removeprefix("precisionpass.") for name in names])
        return module

    torch._dynamo.reset()
    compiled = precisionpass.compile(call, rules=rules, backend=keep, dynamic=dynamic)
    expected = call(*args)
    torch.testing.assert_close(compiled(*args), expected, rtol=1e-4, atol=1e-5)
    (names,) = seen
    return names


def _unread_view(node) -> bool:
    """k.mT, whose only reader was the old site: it computes nothing."""
    return node.target is getattr and not node.users


def qkv(*shape: int) -> list[torch.Tensor]:
    return [torch.randn(*(shape or (2, 3, 5, 8))) for _ in range(3)]


@pytest.mark.parametrize(
    ("call", "left"),
    [
        (lambda q, k, v: (q @ k.mT / math.sqrt(8)).softmax(-1) @ v, ["attention", "getitem", "contiguous"]),
        (lambda q, k, v: functional.scaled_dot_product_attention(q, k, v), ["attention", "getitem", "contiguous"]),
        (lambda q, k, v: ((q @ k.mT).softmax(-1) @ v) @ torch.ones(8, 8), ["attention", "getitem", "ones", "matmul"]),
        (lambda q, k, v: torch.softmax(q, 1), ["softmax"]),
        (lambda q, k, v: functional.log_softmax(q, -1), ["log_softmax"]),
        (lambda q, k, v: functional.layer_norm(q, (8,)), ["layer_norm", "getitem"]),
        (lambda q, k, v: functional.layer_norm(q, (5, 8)), ["layer_norm", "getitem"]),
        (lambda q, k, v: functional.rms_norm(q, (8,), eps=1e-6), ["rms_norm", "getitem"]),
        (lambda q, k, v: q * torch.rsqrt(q.pow(2).mean(-1, keepdim=True) + 1e-6), ["rms_norm", "getitem"]),
    ],
)  # fmt: skip
def test_nothing_of_the_old_site_is_left(call, left):
    assert calls(call, *qkv()) == left


def test_what_is_around_a_site_stays_in_place():
    def call(q, k, v):
        q = q + 1
        out = (q @ k.mT).softmax(-1) @ v
        q.mul_(2)
        return out * 3 + q

    names = [name for name in calls(call, *qkv()) if name != "contiguous"]
    assert names == ["add", "attention", "getitem", "mul_", "mul", "add"]


def test_a_statement_without_a_user_stays():
    """y.mul_(2) has no user and is no dead code."""

    def call(q, k, v):
        y = q.clone()
        out = (q @ k.mT).softmax(-1) @ v
        y.mul_(2.0)
        return out, y

    assert "mul_" in calls(call, *qkv())


def test_one_seed_for_dropout_and_none_without():
    def call(q, k, v, rate):
        return functional.dropout((q @ k.mT).softmax(-1), rate) @ v

    assert "randint" not in calls(lambda q, k, v: call(q, k, v, 0.0), *qkv())
    seen = []
    torch._dynamo.reset()
    precisionpass.compile(call, backend=lambda m, i: seen.append(m.code) or m)(*qkv(), 0.5)
    assert seen[0].count("torch.randint(") == 1 and "dropout(" not in seen[0]


def test_queries_and_keys_are_taken_without_copies():
    """Heads split by view and transpose go into the op as they are, and its output goes back without a copy."""

    def call(x):
        q, k, v = (x.view(2, 5, 4, 8).transpose(1, 2) for _ in range(3))
        return ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).reshape(2, 5, 32)

    names = calls(call, torch.randn(2, 5, 32))
    assert set(names) == {"view", "transpose", "attention", "getitem", "reshape"}


def test_grouped_keys_are_not_repeated():
    def call(q, k, v):
        k, v = (t.repeat_interleave(4, 1) for t in (k, v))
        return (q @ k.mT).softmax(-1) @ v

    q, k, v = torch.randn(2, 8, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    seen = []
    torch._dynamo.reset()
    precisionpass.compile(call, backend=lambda m, i: seen.extend(m.graph.nodes) or m)(q, k, v)
    (attention,) = [node for node in seen if "precisionpass.attention" in str(node.target)]
    assert [node.meta["example_value"].shape[1] for node in attention.args[:3]] == [8, 2, 2]


def test_the_meta_of_new_calls_names_the_users_line():
    seen = []
    torch._dynamo.reset()

    def keep(module, inputs):
        seen.extend(n for n in module.graph.nodes if "precisionpass" in str(n.target))
        return module

    precisionpass.compile(lambda q, k, v: (q @ k.mT).softmax(-1) @ v, backend=keep)(*qkv())
    (node,) = seen
    assert "test_graph.py" in node.meta["stack_trace"]


def test_a_site_that_only_part_of_the_graph_reads_late():
    """The result is used after other sites have been rewritten."""

    def call(q, k, v):
        first = (q @ k.mT).softmax(-1) @ v
        second = (first @ k.mT).softmax(-1) @ v
        third = functional.layer_norm(first + second, (8,))
        return third @ first.mT

    assert calls(call, *qkv()).count("attention") == 2


@pytest.mark.parametrize("dynamic", [True, False])
def test_symbolic_sizes(dynamic):
    def call(x):
        batch, length, _ = x.shape
        q, k, v = x.view(batch, length, 3, 4, 8).permute(2, 0, 3, 1, 4)
        return ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).reshape(batch, length, 32)

    assert "attention" in calls(call, torch.randn(2, 5, 96), dynamic=dynamic)


def test_new_calls_have_example_values():
    """AOTAutograd caches no graph in which a method is called on a value without one."""
    seen = []
    torch._dynamo.reset()
    q, k, v = (t.to(torch.bfloat16) for t in qkv())
    call = lambda q, k, v: torch.dropout((q @ k.mT).float().softmax(-1), 0.5, True).to(v.dtype) @ v  # noqa: E731
    compiled = precisionpass.compile(call, backend=lambda m, i: seen.extend(m.graph.nodes) or m, dynamic=True)
    out = compiled(q, k, v)
    calls_ = [node for node in seen if node.op.startswith("call_")]
    assert "precisionpass.attention.default" in {str(node.target) for node in calls_}
    assert all("example_value" in node.meta for node in calls_)
    last = calls_[-1].meta["example_value"]
    assert (last.dtype, tuple(int(s) for s in last.shape), last.is_contiguous()) == (out.dtype, tuple(out.shape), True)
