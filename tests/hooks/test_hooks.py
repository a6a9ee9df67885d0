"""Functions of the user's on a site's tensors: what they see, and what is refused."""

import pytest
import torch

import precisionpass
from precisionpass.errors import PrecisionPassError
from tests.agreement import relative

RULES = "version: 1\nrules:\n- {id: r, match: {op: attention}, apply: {hooks: HOOKS}}\n"


def attend(q, k, v):
    return (q @ k.mT * 8**-0.5).softmax(-1) @ v


def tensors():
    torch.manual_seed(0)
    return [torch.randn(2, 3, 9, 8).requires_grad_() for _ in range(3)]


@pytest.fixture
def hooked(tmp_path):
    """hooked("[{at: q, call: halve}]", backend="eager", halve=function): the compiled attention."""

    def compiled(at, backend="aot_eager", **functions):
        torch._dynamo.reset()
        path = tmp_path / "rules.yaml"
        path.write_text(RULES.replace("HOOKS", at))
        return precisionpass.compile(attend, rules=path, backend=backend, hooks=functions)

    return compiled


def gradients(call, upstream=1.0):
    inputs = tensors()
    output = call(*inputs)
    return output, torch.autograd.grad(output, inputs, torch.full_like(output, upstream))


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_each_tensor_in_the_order_of_the_rules(hooked, backend):
    where = "[{at: q, call: halve}, {at: q, call: clip}, {at: output, call: halve}, {at: grad_output, call: clip}]"
    call = hooked(where, backend, halve=lambda t: t / 2, clip=lambda t: t.clamp(-0.3, 0.3))

    def expected(q, k, v):
        q = (q / 2).clamp(-0.3, 0.3)
        output = attend(q, k, v) / 2
        output.register_hook(lambda gradient: gradient.clamp(-0.3, 0.3))
        return output

    ours, theirs = gradients(call, 2.0), gradients(expected, 2.0)
    assert relative(ours[0], theirs[0]) < 1e-5
    for one, two in zip(ours[1], theirs[1], strict=True):
        assert relative(one, two) < 1e-5


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_gradients_after_the_sites_own_clip(hooked, backend, tmp_path):
    path = tmp_path / "clipped.yaml"
    path.write_text(
        "version: 1\nrules:\n- id: r\n  match: {op: attention}\n  apply:\n    grad_clip: {kind: value, max: 0.01}\n"
        "    hooks: [{at: grad_q, call: double}, {at: grad_v, call: nothing}]\n"
    )
    torch._dynamo.reset()
    own = {"double": lambda t: 2 * t, "nothing": torch.zeros_like}
    dq, dk, dv = gradients(precisionpass.compile(attend, rules=path, backend=backend, hooks=own))[1]
    assert float(dq.abs().max()) == pytest.approx(0.02) and float(dk.abs().max()) <= 0.01 and not dv.any()


def test_a_hook_may_close_over_what_it_counts_with(hooked):
    seen = torch.zeros(())

    def count(tensor):
        return tensor + 0 * seen

    output, _ = gradients(hooked("[{at: output, call: count}]", count=count))
    assert relative(output, attend(*tensors())) < 1e-6


@pytest.mark.parametrize("at", ["output", "grad_k"])
@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda t: t[:1], r"it gave float32\[1, 3, 9, 8\] on cpu for float32\[2, 3, 9, 8\] on cpu"),
        (lambda t: t.double(), "it gave float64"),
        (lambda t: None, "it gave a NoneType"),
        (lambda t: t.no_such(), "AttributeError"),
        (lambda t: t.mul_(2), "it changed its tensor in place, which others read too"),
    ],
)
def test_what_a_hook_may_not_give(hooked, at, function, why):
    with pytest.raises(Exception, match="PP135 the hook wrong failed") as raised:
        gradients(hooked(f"[{{at: {at}, call: wrong}}]", wrong=function))
    assert raised.match(why)


def test_names_that_nobody_passed_and_what_is_no_hook(hooked):
    with pytest.raises(
        PrecisionPassError, match='PP134 rule "r" calls the hook "halve", which was not passed'
    ) as raised:
        hooked("[{at: q, call: halve}]", have=abs)
    assert 'did you mean "have"' in raised.value.why and 'hooks={"halve": ...}' in raised.value.fix
    with pytest.raises(PrecisionPassError, match="PP135 the hook halve cannot be used"):
        hooked("[{at: q, call: halve}]", halve=3)
    with pytest.raises(PrecisionPassError, match='PP105 "scores" is no choice for "at"'):
        hooked("[{at: scores, call: halve}]", halve=abs)


def test_a_site_that_is_kept_has_no_hooks():
    with pytest.raises(PrecisionPassError, match=r'PP112 .*"hooks" changes the site'):
        precisionpass.Rule(id="r", match=precisionpass.Match(op="attention"),
                           apply={"implementation": "keep", "hooks": [{"at": "q", "call": "f"}]})  # fmt: skip


def test_explain_tries_them_and_the_review_names_them():
    rule = precisionpass.Rule(id="r", match=precisionpass.Match(op="attention"),
                              apply={"hooks": [{"at": "q", "call": "halve"}]})  # fmt: skip
    report = precisionpass.explain(attend, tuple(tensors()), rules=[rule], hooks={"halve": lambda t: t / 2})
    (site,) = report.sites
    assert site.settings["hooks"]["value"] == ({"at": "q", "call": "halve"},)
    assert "halve" in report.artifacts["graph_0.after.py"]
    with pytest.raises(PrecisionPassError, match="PP135 the hook halve failed"):
        precisionpass.explain(attend, tuple(tensors()), rules=[rule], hooks={"halve": lambda t: t[..., :2]})
