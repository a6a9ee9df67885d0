"""What a decision says: only settings that count at the site, and every rule that matches it."""

import pytest
import torch

import precisionpass
from precisionpass import Match, Rule
from precisionpass.review.expectations import with_rules
from precisionpass.rules import Expect, RuleSet
from tests.small_models import Attention

KEEP = Rule(id="keep", match=Match(op="attention"), apply={"implementation": "keep", "deterministic": False})
REST = Rule(id="rest", match=Match(op=["attention", "softmax"]), apply={"lowering": "auto", "statistics": "float32"})
DELTA = Rule(
    id="delta", match=Match(op="attention"), apply={"delta": "output", "grad_clip": {"kind": "norm", "max": 1}}
)
QUIET = Rule(id="quiet", match=Match(op="attention"), apply={"dead_rows": "same", "logit_clip": "off"})


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def site(*rules, call=None):
    (found,) = precisionpass.explain(call or Attention(), (torch.randn(2, 5, 32),), rules=list(rules)).sites
    return found


def test_a_kept_site_has_the_setting_that_keeps_it_and_no_other():
    found = site(KEEP, DELTA, REST)
    assert (found.decision, found.reason, found.rule) == ("kept", "rule_keeps", "keep")
    assert {name: setting["rule"] for name, setting in found.settings.items()} == {"implementation": "keep"}
    assert found.rules == ("keep", "delta", "rest")


def test_a_site_whose_rules_change_nothing_has_no_settings():
    found = site(QUIET)
    assert (found.decision, found.reason, found.settings, found.rules) == ("kept", "rule_keeps", {}, ("quiet",))


def test_a_site_that_is_already_satisfied_has_what_satisfies_it():
    found = site(REST, call=lambda x: x.softmax(-1))
    assert (found.decision, found.reason) == ("kept", "already_satisfied")
    assert list(found.settings) == ["statistics"]


def test_a_rewritten_site_has_all_of_them():
    found = site(DELTA, REST)
    assert (found.decision, list(found.settings)) == ("rewritten", ["delta", "grad_clip", "lowering", "statistics"])


def test_expectations_count_the_sites_a_rule_matches_and_not_only_those_it_sets_something_at():
    other = Rule(id="shadowed", match=Match(op="attention"), apply={"delta": "output"})
    report = precisionpass.explain(Attention(), (torch.randn(2, 5, 32),), rules=[DELTA, other])
    expected = RuleSet("r", (), (Expect(rule="shadowed", sites=1),))
    assert with_rules(report, expected).failed_expectations == ()
