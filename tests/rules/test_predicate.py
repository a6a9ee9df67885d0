"""A function of the user's own in a match: what it is asked, what the digest sees of it, what is refused."""

import functools
import pickle

import pytest
import torch
from torch.nn import functional

import precisionpass
from precisionpass import Match, PrecisionPassError, Rule
from precisionpass.errors import RulesError
from precisionpass.rules import load


def first_block(facts, module):
    return module.startswith("blocks.0")


def other_block(facts, module):
    return module.startswith("blocks.1")


def either(facts, module, name=""):
    return name in module


class Named:
    def __init__(self, name):
        self.name = name

    def __call__(self, facts, module):
        return module == self.name

    def is_it(self, facts, module):
        return module == self.name


def more_heads_than(limit):
    return lambda facts, module: facts["heads"] > limit


def attend(q, k, v):
    return functional.scaled_dot_product_attention(q, k, v)


def qkv(length=6):
    return tuple(torch.randn(2, 3, length, 8) for _ in range(3))


def ruled(predicate, **match):
    return [Rule(id="mine", match=Match(op="attention", predicate=predicate, **match), apply={"delta": "output"})]


def test_it_is_asked_last_with_the_facts_and_the_module():
    asked = []

    def says(predicate, rule):
        asked.append((predicate, rule))
        return predicate({}, "blocks.0.attention")

    rules = load(ruled(first_block, module="blocks.**", where="seq_q > 1"))
    assert rules.resolve("attention", "blocks.0", "A", True, lambda _: False, says).rules == ()
    assert asked == []
    assert rules.resolve("attention", "blocks.0", "A", True, lambda _: True, says).rules == ("mine",)
    assert asked == [(first_block, "mine")]
    assert rules.resolve("attention", "blocks.0", "A", True, lambda _: True).rules == ()


def test_the_digest_sees_its_name_and_its_source():
    digests = [load(ruled(one)).digest for one in (None, first_block, other_block, either)]
    digests += [load(ruled(functools.partial(either, name=name))).digest for name in "ab"]
    assert len(set(digests)) == 6
    assert load(ruled(first_block)).digest == load(ruled(first_block)).digest
    assert load(ruled(more_heads_than({1, 2}))).digest == load(ruled(more_heads_than({2, 1}))).digest
    sets = [functools.partial(either, name={"a", name}) for name in "bc"]
    objects = [functools.partial(either, name=object()) for _ in range(2)]
    lambdas = [lambda facts, module: True, lambda facts, module: False]
    callables = [Named("a"), Named("b")]
    methods = [callables[0].is_it, callables[1].is_it]
    for pair in (sets, objects, lambdas, callables, methods, [more_heads_than(3), more_heads_than(4)]):
        assert len({load(ruled(one)).digest for one in pair}) == 2


def test_rules_with_a_named_function_can_be_pickled():
    rules = load(ruled(first_block))
    assert pickle.loads(pickle.dumps(rules)).digest == rules.digest


def test_it_decides_on_the_facts_of_a_site():
    for limit, decision in ((4, "rewritten"), (100, "kept")):
        rules = ruled(lambda facts, module, limit=limit: facts["seq_q"] > limit and facts["dtype"] == "fp32")
        (site,) = precisionpass.explain(attend, qkv(), rules=rules).sites
        assert (site.decision, site.holds_while) == (decision, "")


def test_on_dynamic_sizes_the_decision_holds_as_long_as_the_review_says():
    def long(facts, module):
        return facts["seq_q"] > 16

    compiled = precisionpass.compile(attend, rules=ruled(long), backend="eager", dynamic=True)
    compiled(*qkv(6))
    compiled(*qkv(40))
    sites = precisionpass.report(compiled).sites
    assert {(site.decision, site.holds_while.rpartition(".")[2]) for site in sites} == {
        ("kept", "long"), ("rewritten", "long"),
    }  # fmt: skip
    assert any(site.holds_while.startswith("not ") for site in sites)


def test_one_that_fails_is_named_with_its_rule():
    def fails(facts, module):
        return facts["no such fact"]

    with pytest.raises(PrecisionPassError, match='PP131 the predicate of rule "mine" failed') as raised:
        precisionpass.explain(attend, qkv(), rules=ruled(fails))
    assert "KeyError: 'no such fact'" in str(raised.value)
    with pytest.raises(PrecisionPassError, match="gave str, neither True nor False"):
        precisionpass.explain(attend, qkv(), rules=ruled(lambda facts, module: "yes"))


def test_a_file_has_none(rules):
    with pytest.raises(RulesError) as raised:
        rules("rules: [{id: r, match: {op: attention, predicate: os.system}, apply: {delta: output}}]")
    (problem,) = raised.value.problems
    assert (problem.code, problem.line) == ("PP104", 2)
    assert problem.message == (
        'predicate in rule "r": only rules written in Python have one, a function of (facts, module), not "os.system"; '
        'write "where"'
    )


@pytest.mark.parametrize(("given", "message"), [(3, "not 3"), (lambda facts: True, "called with two arguments")])
def test_what_is_no_predicate_is_refused(given, message):
    with pytest.raises(RulesError, match=message):
        ruled(given)


def test_rules_that_contradict_each_other_once_merged_refuse_the_site():
    rules = [
        Rule(id="shift", match={"op": "attention"}, apply={"row_max_shift": {}}),
        Rule(id="exact", match={"op": "attention"}, apply={"normaliser": "float32"}),
    ]
    (site,) = precisionpass.explain(attend, qkv(), rules=rules).sites
    assert (site.decision, site.reason) == ("refused", "contradiction")
    assert site.message.startswith(
        'two rules that both match cannot hold together: rule "shift" sets row_max_shift and rule "exact" sets '
        'normaliser; row_max_shift needs normaliser "rounded"'
    )
