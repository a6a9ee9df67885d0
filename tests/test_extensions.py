"""Recognisers and actions of a user's own: what they can do, and clear words for everything they can do wrong."""

import pytest
import torch
from torch.ops import aten

import precisionpass
from precisionpass import Found, Match, PrecisionPassError, Recogniser, Rule, default_sites
from tests.agreement import against_eager, relative
from tests.small_models import Attention

KIND = "own.squared_relu"
RULE = Rule(id="mine", match=Match(op=KIND), apply={"implementation": "own.act"})


def call(x):
    return torch.relu(x * 2) ** 2 + 1


def find(search):
    for node in search.nodes:
        if node.target is aten.pow.Tensor_Scalar and node.args[1] == 2 and node.args[0].target is aten.relu.default:
            yield Found((node.args[0].args[0],), node, "relu(x)^2", {"width": 8})


def wide(x):
    return x.double().relu().square().to(x.dtype)


def own(action=wide, finder=find, rules=(RULE,), first=False):
    mine = Recogniser(KIND, finder)
    sites = [mine, *default_sites] if first else [*default_sites, mine]
    return {"rules": list(rules), "sites": sites, "actions": {"own.act": action}}


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def x(dtype=torch.float32):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_kind_of_ones_own_forward_and_backward(backend):
    report = against_eager(call, (x(),), backend=backend, rewritten={KIND: 1}, **own())
    (site,) = report.sites
    assert (site.kind, site.formula, site.facts["width"], site.rule) == (KIND, "relu(x)^2", 8, "mine")
    assert site.settings["implementation"]["value"] == "own.act"
    assert f"{KIND} x 1" in report.text()
    assert precisionpass.explain(call, (x(),), **own()).sites[0].settings == site.settings


def test_the_action_is_what_runs():
    compiled = precisionpass.compile(call, backend="aot_eager", **own(lambda x: x * 0 + 7))
    assert torch.equal(compiled(x()), torch.full((4, 8), 8.0))


def test_dynamic_sizes():
    compiled = precisionpass.compile(call, backend="aot_eager", dynamic=True, **own())
    for length in (3, 5, 9):
        rows = torch.randn(length, 8)
        assert relative(compiled(rows), call(rows)) < 1e-6
    assert precisionpass.report(compiled).graphs == 1


def softmax_action(x, dim, dtype):
    return torch.softmax(x.double(), dim).to(dtype)


def norm_action(x, dims, weight, bias, eps, dtype):
    return torch.nn.functional.layer_norm(x.double(), x.shape[-dims:], None, None, eps).to(dtype)


def attention_action(q, k, v, scale=1.0, causal="none"):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale, is_causal=causal == "top_left")


@pytest.mark.parametrize(("op", "model", "action"), [
    ("softmax", lambda x: x.softmax(-1), softmax_action),
    ("softmax", lambda x: x.mT.softmax(0).mT.reshape(-1), softmax_action),
    ("layer_norm", lambda x: torch.nn.functional.layer_norm(x, (8,)), norm_action),
    ("layer_norm", lambda x: ((x - x.mean(0, True)) * (x.var(0, unbiased=False, keepdim=True) + 1e-3).rsqrt()).view(-1),
     norm_action),
    ("attention", lambda x: (x[None, None] @ x.T).softmax(-1) @ x[None, None], attention_action),
    ("attention", Attention(8, 2), attention_action),
])  # fmt: skip
def test_an_action_at_a_site_of_the_package(op, model, action):
    rule = Rule(id="mine", match=Match(op=op), apply={"implementation": "own.act"})
    # What other rules set for the op of the package does not concern the action.
    kernel = Rule(id="rest", match=Match(op=["softmax", "attention"]), apply={"lowering": "kernel"})
    parts = {"rules": [rule, kernel], "actions": {"own.act": action}}
    given = x()[None] if isinstance(model, Attention) else x()
    report = against_eager(model, (given,), rewritten={op: 1}, **parts)
    assert list(report.sites[0].settings) == ["implementation"]


def test_an_action_may_refuse():
    def picky(x):
        raise NotImplementedError("only on Tuesdays")

    report = against_eager(call, (x(),), rewritten={}, **own(picky))
    (site,) = report.sites
    assert (site.decision, site.reason) == ("refused", "action_refuses")
    assert site.message == "the action of the rule does not compute this site: only on Tuesdays"


def test_an_action_gives_no_probabilities():
    def shown(x):
        probabilities = (x @ x.T)[None, None].softmax(-1)
        return probabilities @ x[None, None], probabilities

    rule = Rule(id="mine", match=Match(op="attention"), apply={"implementation": "own.act"})
    report = against_eager(shown, (x(),), rewritten={}, rules=[rule], actions={"own.act": attention_action})
    assert "an action gives none" in report.sites[0].message


def raising(x):
    raise KeyError("oops")


@pytest.mark.parametrize(("action", "why"), [
    (raising, "KeyError: 'oops'"),
    (lambda: 3, "TypeError: "),
    (lambda x: None, "it gave a NoneType, not one tensor"),
    (lambda x: (x, x), "it gave a tuple, not one tensor"),
    (lambda x: x.double(), "it gave float64[4, 8] on cpu where the model has float32[4, 8] on cpu"),
    (lambda x: x[:2], "it gave float32[2, 8] on cpu where the model has float32[4, 8] on cpu"),
    (lambda x: x.sum(), "it gave float32[] on cpu where the model has float32[4, 8] on cpu"),
    (lambda x: x.to("meta"), "it gave float32[4, 8] on meta where the model has float32[4, 8] on cpu"),
])  # fmt: skip
def test_a_wrong_action_is_told_in_words(action, why):
    for run in (
        precisionpass.explain,
        lambda f, args, **parts: precisionpass.compile(f, backend="eager", **parts)(*args),
    ):
        with pytest.raises(PrecisionPassError) as raised:
            run(call, (x(),), **own(action))
        assert str(raised.value).startswith(
            f"PP133 the action own.act failed at a {KIND} site\n  where: tests/test_ext"
        )
        assert why in raised.value.why


@pytest.mark.parametrize(("sites", "why"), [
    ([find], "it is no Recogniser"),
    (find, "sites is a function, not a list"),
    ("own.x", "sites is a str, not a list"),
    ([Recogniser("squared", find)], 'its kind is "own."'),
    ([Recogniser("softmax", find)], 'its kind is "own."'),
    ([Recogniser("own.a b", find)], 'its kind is "own."'),
    ([Recogniser(KIND, find), Recogniser(KIND, find)], "it is there twice"),
    ([*default_sites, *default_sites], "it is there twice"),
])  # fmt: skip
def test_wrong_recognisers_are_refused_at_once(sites, why):
    with pytest.raises(PrecisionPassError) as raised:
        precisionpass.compile(call, rules="watch", sites=sites)
    assert raised.value.code == "PP132" and why in raised.value.why
    with pytest.raises(PrecisionPassError, match="PP132"):
        Recogniser("own.x", 3)


def gives(*found):
    return lambda search: found


@pytest.mark.parametrize(("finder", "why"), [
    (lambda search: 1 / 0, "ZeroDivisionError: division by zero"),
    (lambda: [], "TypeError: "),
    (lambda search: None, "TypeError: "),
    (gives(3), "find gave a int"),
    (lambda s: [Found((), s.nodes[0])], "is computed from"),
    (lambda s: [Found((), "x")], "an output is no tensor of the graph"),
    (lambda s: [Found([s.nodes[0]], s.nodes[2])], "inputs is a list, not a tuple"),
    (lambda s: [Found((s.nodes[3],), s.nodes[2])], "does not come before the output"),
    (lambda s: [Found((s.nodes[0], object()), s.nodes[2])], "an input is a object"),
    (lambda s: [Found((3,), s.nodes[3])], "which is not among the inputs"),
])  # fmt: skip
def test_a_recogniser_that_goes_wrong_is_told_in_words(finder, why):
    with pytest.raises(PrecisionPassError) as raised:
        precisionpass.explain(call, (x(),), **own(finder=finder))
    assert raised.value.code == "PP132" and why in raised.value.why, str(raised.value)


@pytest.mark.parametrize(("actions", "why"), [
    ([wide], "it is a list, not a dict"), ({"fast": wide}, 'a name is "own."'), ({"own.fast": 3}, "not a function"),
    ({3: wide}, 'a name is "own."'),
])  # fmt: skip
def test_wrong_actions_are_refused_at_once(actions, why):
    with pytest.raises(PrecisionPassError) as raised:
        precisionpass.explain(call, (x(),), rules="watch", actions=actions)
    assert raised.value.code == "PP133" and why in raised.value.why


@pytest.mark.parametrize(("given", "message"), [
    ({}, 'PP134 rule "mine" matches "own.squared_relu", which was not passed\n  where: own.squared_relu\n'
     "  fix: pass sites=[*default_sites, ...] to precisionpass.compile or explain"),
    ({"sites": [Recogniser("own.squared_rel", find)]}, 'PP134 rule "mine" matches "own.squared_relu", which was not '
     'passed\n  where: own.squared_relu\n  why: did you mean "own.squared_rel"?\n'
     "  fix: pass sites=[*default_sites, ...] to precisionpass.compile or explain"),
    ({"sites": own()["sites"], "actions": {"own.at": wide}}, 'PP134 rule "mine" names the action "own.act", which was '
     'not passed\n  where: own.act\n  why: did you mean "own.at"?\n'
     '  fix: pass actions={"own.act": ...} to precisionpass.compile or explain'),
])  # fmt: skip
def test_names_of_nothing_are_refused_at_once(given, message):
    for function in (precisionpass.compile, lambda f, **parts: precisionpass.explain(f, (x(),), **parts)):
        with pytest.raises(PrecisionPassError) as raised:
            function(call, rules=[RULE], **given)
        assert str(raised.value) == message


def test_rules_files_may_name_what_python_passes(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(
        "version: 1\nrules:\n- id: mine\n  match: {op: [softmax, own.squared_relu], where: width == 8}\n"
        "  apply: {implementation: own.act}\nexpect: [{op: own.squared_relu, sites: 1}]\n"
    )
    report = precisionpass.explain(call, (x(),), **own() | {"rules": path})
    assert [site.decision for site in report.sites] == ["rewritten"] and not report.failed_expectations
    path.write_text(path.read_text().replace("width == 8", "width == 9"))
    report = precisionpass.explain(call, (x(),), **own() | {"rules": path})
    assert [(site.decision, site.reason) for site in report.sites] == [("kept", "no_rule")]
    with pytest.raises(PrecisionPassError, match="PP134"):
        precisionpass.explain(call, (x(),), rules=path)


def test_nothing_compiled_with_an_action_is_reused():
    """No key of a cache holds all of what a function depends on."""
    counters = torch._dynamo.utils.counters
    for factor in (3.0, 3.0):
        torch._dynamo.reset()
        counters.clear()
        compiled = precisionpass.compile(call, **own(lambda x: x * factor))  # noqa: B023
        given = x()
        compiled(given).sum().backward()
        assert torch.equal(given.grad, torch.full((4, 8), 2 * factor))
        told = {**counters["inductor"], **counters["aot_autograd"]}
        assert not [key for key in told if key.endswith("cache_hit")], told
