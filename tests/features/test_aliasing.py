"""Tensors changed in place, views, and values that something else reads too."""

import math

import pytest
import torch
from torch.nn import functional

from tests.agreement import against_eager, counts, reasons


def qkv(*shape: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(*(shape or (2, 3, 5, 8)), requires_grad=True) for _ in range(3))


def written(*tensors):
    return [t.detach().clone() for t in tensors]


@pytest.mark.parametrize("training", [True, False])
def test_masks_applied_in_place(training):
    def call(q, k, v, mask):
        scores = q @ k.mT
        scores /= math.sqrt(8)
        scores += mask
        scores.masked_fill_(mask > 1, -math.inf)
        return scores.softmax(-1) @ v

    against_eager(call, (*qkv(), torch.randn(5, 5)), training=training)


@pytest.mark.parametrize("what", ["v", "k", "q"])
@pytest.mark.parametrize("through", ["itself", "a view", "a view of a view", "its base"])
def test_an_operand_mutated_between_scores_and_values_is_right(what, through):
    """In the model's order: the scores read the old value, P V the new one."""

    def call(q, k, v):
        held = {"q": q.clone(), "k": k.clone(), "v": v.clone()}
        base = held[what]
        if through == "its base":
            held[what] = base[:]
        scores = held["q"] @ held["k"].mT
        probabilities = scores.softmax(-1)
        target = {"itself": base, "a view": base[:, 1], "a view of a view": base[:, 1:].mT[0], "its base": base}
        target[through].mul_(2.0)
        return probabilities @ held["v"]

    against_eager(call, qkv(), training=False)


def test_a_view_mutated_between_is_refused_with_its_reason():
    def call(q, k, v):
        k = k.clone()
        row = k[:, :, 0]
        probabilities = (q @ k.mT).softmax(-1)
        row.zero_()
        return probabilities @ v

    report = against_eager(call, qkv(), training=False)
    assert "mutated_between" in reasons(report)
    assert "attention" not in counts(report)


def test_scores_mutated_through_a_view():
    """A causal mask written into a slice of the scores."""

    def call(q, k, v):
        scores = q @ k.mT
        scores[:, :, :, 3:] = -1e9
        return scores.softmax(-1) @ v

    against_eager(call, qkv(), training=False)


def test_probabilities_mutated_after_the_product():
    def call(q, k, v):
        probabilities = (q @ k.mT).softmax(-1)
        out = probabilities @ v
        probabilities.zero_()
        return out, probabilities

    against_eager(call, qkv(), training=False)


def test_an_output_mutated_in_place_and_a_mutated_input():
    def call(q, k, v):
        out = (q @ k.mT).softmax(-1) @ v
        out += q
        out.mul_(2)
        return out, out.view(2, 3, 40)

    against_eager(call, qkv())


def test_a_users_input_is_changed_as_in_eager():
    def call(q, k, v, state):
        state.copy_((q @ k.mT).softmax(-1) @ v)
        return state * 2

    against_eager(call, (*(t.detach() for t in qkv()), torch.zeros(2, 3, 5, 8)), training=False)
    import precisionpass

    torch._dynamo.reset()
    q, k, v = (t.detach() for t in qkv())
    ours, theirs = torch.zeros(2, 3, 5, 8), torch.zeros(2, 3, 5, 8)
    precisionpass.compile(call, backend="aot_eager")(q, k, v, ours)
    call(q, k, v, theirs)
    assert torch.allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("sdpa", [True, False])
def test_views_of_the_output(sdpa, backend):
    """`.view` after the attention works wherever it works in eager."""

    def call(q, k, v):
        out = functional.scaled_dot_product_attention(q, k, v) if sdpa else (q @ k.mT).softmax(-1) @ v
        flat = out.view(2, 3, -1) if not sdpa else out.reshape(2, 3, -1)
        merged = out.transpose(1, 2).reshape(2, 5, 24)
        return flat, merged, out.stride(1) * out

    against_eager(call, qkv(), backend=backend)


def test_as_strided_of_the_output_sees_the_models_own_memory():
    def call(q, k, v):
        out = (q @ k.mT).softmax(-1) @ v
        return out.as_strided((2, 3, 5), (120, 40, 8))

    against_eager(call, qkv(), training=False)


def test_an_output_returned_twice_and_an_unused_one():
    def call(q, k, v):
        out = (q @ k.mT).softmax(-1) @ v
        _ = (q @ v.mT).softmax(-1) @ k
        return out, out, out.detach()

    against_eager(call, qkv(), rewritten={"attention": 1})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_returned_probabilities_and_gradients_through_them(dtype, backend):
    def call(q, k, v):
        probabilities = (q @ k.mT / math.sqrt(8)).softmax(-1)
        return probabilities @ v, probabilities

    inputs = tuple(t.detach().to(dtype).requires_grad_() for t in qkv())
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    against_eager(call, inputs, backend=backend, rewritten={"attention": 1}, tolerance=tolerance)


def test_a_loss_on_the_probabilities_alone():
    def call(q, k, v):
        probabilities = (q @ k.mT).softmax(-1)
        return (probabilities @ v).detach(), probabilities.log()

    against_eager(call, qkv())


def test_head_mask_after_the_softmax():
    def call(q, k, v, heads):
        return ((q @ k.mT).softmax(-1) * heads) @ v

    against_eager(call, (*qkv(), torch.tensor([1.0, 0.0, 0.5]).view(1, 3, 1, 1)), rewritten={"attention": 1})


def test_a_head_mask_with_its_own_gradient():
    def call(q, k, v, heads):
        return ((q @ k.mT).softmax(-1) * heads) @ v

    against_eager(call, (*qkv(), torch.rand(3, 1, 1, requires_grad=True)), rewritten={"attention": 1})


@pytest.mark.parametrize("spelling", ["chunk", "unbind", "split", "slices"])
def test_packed_queries_keys_and_values(spelling):
    def call(packed):
        if spelling == "chunk":
            q, k, v = packed.chunk(3, -1)
        elif spelling == "unbind":
            q, k, v = packed.unflatten(-1, (3, 8)).unbind(-2)
        elif spelling == "split":
            q, k, v = packed.split(8, -1)
        else:
            q, k, v = packed[..., :8], packed[..., 8:16], packed[..., 16:]
        return (q @ k.mT / math.sqrt(8)).softmax(-1) @ v

    against_eager(call, (torch.randn(2, 3, 5, 24, requires_grad=True),), rewritten={"attention": 1})


def test_one_attention_function_called_twice_and_chained():
    def attend(q, k, v):
        return (q @ k.mT / math.sqrt(8)).softmax(-1) @ v

    def call(q, k, v):
        return attend(attend(q, k, v), k, v) + attend(k, q, v)

    against_eager(call, qkv(), rewritten={"attention": 3})


def test_queries_keys_and_values_may_be_one_tensor():
    def call(x):
        return (x @ x.mT).softmax(-1) @ x

    against_eager(call, (torch.randn(2, 3, 5, 8, requires_grad=True),), rewritten={"attention": 1})


def test_scores_that_serve_two_attentions_and_are_changed_in_place_for_the_second():
    """Both directions of a cross attention share their scores; the first has read them when the mask is written."""

    def call(q, k, v, values, mask):
        scores = (q @ k.mT).clamp(-50000, 50000)
        back = scores.mT.softmax(-1) @ v
        scores.masked_fill_(mask, -1e9)
        return back, scores.softmax(-1) @ values

    q, k, v = qkv()
    inputs = (*(t.detach() for t in (q, k, v)), torch.randn(2, 3, 5, 8), torch.rand(5, 5) > 0.7)
    against_eager(call, inputs, training=False, rewritten={"attention": 2})


def test_scores_changed_through_a_view_before_the_softmax_reads_them():
    def call(q, k, v):
        scores = q @ k.mT
        seen = scores.mT
        scores.mul_(2)
        return seen.softmax(-1) @ v

    against_eager(call, tuple(t.detach() for t in qkv()), training=False)
