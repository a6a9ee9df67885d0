"""From rules and a site to settings: what matches, which rule wins, and that order matters only where rules overlap."""

from hypothesis import given
from hypothesis import strategies as st

from precisionpass.rules import Match, Rule, load

KINDS = ("attention", "softmax", "log_softmax", "layer_norm", "rms_norm")


def rule(name, match, **apply):
    return Rule(id=name, match=match, apply=apply)


def resolve(rules, kind="attention", module="m", class_name="M", training=True, holds=lambda condition: True):
    return load(rules).resolve(kind, module, class_name, training, holds)


def values(resolved):
    return {name: setting.value for name, setting in resolved.settings.items()}


def test_the_first_rule_wins_setting_by_setting():
    every = Match(op="attention")
    resolved = resolve([
        rule("first", Match(op="attention", module="m"), delta="recompute"),
        rule("other", Match(op="attention", module="elsewhere"), delta="output", dead_rows="nan"),
        rule("last", every, delta="residual", normaliser="float32"),
    ])  # fmt: skip
    assert values(resolved) == {"delta": "recompute", "normaliser": "float32"}
    assert {name: setting.rule for name, setting in resolved.settings.items()} == {
        "delta": "first", "normaliser": "last",
    }  # fmt: skip
    assert resolved.rules == ("first", "last")
    assert resolved.value("delta") == "recompute"
    assert resolved.value("dead_rows") == "same"
    assert resolved.values()["implementation"] == "auto"


def test_every_setting_remembers_rule_file_and_line(rules):
    text = "rules:\n- id: a\n  match: {op: attention}\n  apply:\n    delta: output\n    dead_rows: zero\n"
    resolved = rules("extends: base.yaml\n" + text, {"base.yaml": text.replace("id: a", "id: b")}).resolve(
        "attention", "", "M", True, lambda condition: True
    )
    places = {name: (one.rule, one.file.rpartition("/")[2], one.line) for name, one in resolved.settings.items()}
    assert places == {"delta": ("a", "rules.yaml", 7), "dead_rows": ("a", "rules.yaml", 8)}
    assert resolved.rules == ("a", "b")


def test_what_a_rule_can_match_on():
    def hit(match, **site):
        return bool(resolve([rule("r", match, lowering="auto")], **site).rules)

    assert hit(Match(op=["softmax", "rms_norm"]), kind="rms_norm")
    assert not hit(Match(op="softmax"), kind="rms_norm")
    assert hit(Match(op="attention", module=["x", "a.*"]), module="a.b")
    assert not hit(Match(op="attention", module="**", not_module=["q", "a.**"]), module="a.b")
    assert hit(Match(op="attention", class_="*Attention"), class_name="transformers.models.LlamaAttention")
    assert not hit(Match(op="attention", class_="Attention"), class_name="LlamaAttention")
    assert hit(Match(op="attention", training=False), training=False)
    assert not hit(Match(op="attention", training=False), training=True)
    assert not hit(Match(op="attention", where="causal"), holds=lambda condition: False)


def test_conditions_are_asked_last_and_only_when_all_else_matches():
    asked = []

    def holds(condition):
        asked.append(condition.text)
        return True

    rules = [
        rule("elsewhere", Match(op="attention", module="x", where="seq_q > 1"), lowering="auto"),
        rule("here", Match(op="attention", module="m", where="seq_q > 2"), lowering="auto"),
    ]
    resolve(rules, holds=holds)
    assert asked == ["seq_q > 2"]


def test_a_setting_goes_only_to_kinds_that_have_it():
    both = [rule("both", Match(op=["attention", "rms_norm"]), delta="output", implementation="auto")]
    assert values(resolve(both, "rms_norm")) == {"implementation": "auto"}
    assert values(resolve(both, "attention")) == {"implementation": "auto", "delta": "output"}


def test_disabled_rules_do_not_count():
    off = load([Rule(id="a", enabled=False), Rule(id="b", match=Match(op="softmax"), apply={}, enabled=False)])
    assert off.is_off
    assert off.resolve("softmax", "", "M", True, lambda condition: True).rules == ()


def test_what_is_rewritten():
    every = Match(op="attention")
    keep, auto = rule("keep", every, implementation="keep"), rule("auto", every, implementation="auto")
    numeric, quiet = rule("numeric", every, output_clip=3.0), rule("quiet", every, output_clip="off", lowering="kernel")
    assert not resolve([]).rewrites
    assert not resolve([keep, numeric]).rewrites
    assert resolve([auto]).rewrites
    assert resolve([numeric]).rewrites
    assert not resolve([quiet]).rewrites
    assert not resolve([quiet, numeric]).rewrites
    assert resolve([quiet, auto]).rewrites


def test_expectations_fail_in_sentences(rules):
    loaded = rules("expect: [{op: attention, sites: 4}, {min_sites: 2, max_refused: 0}, {rule: r, max_refused: 1}]\n"
                   "rules: [{id: r, match: {op: softmax}, apply: {lowering: auto}}]")  # fmt: skip
    by_op, overall, by_rule = loaded.expect
    assert by_op.failures(4, 4) == overall.failures(2, 0) == by_rule.failures(0, 1) == ()
    assert by_op.failures(3, 0) == ("expected 4 attention sites, found 3",)
    assert overall.failures(1, 1) == (
        "expected at least 2 sites, found 1", "expected at most 0 refused sites, found 1",
    )  # fmt: skip
    assert by_rule.failures(5, 2) == ('expected at most 1 refused sites of rule "r", found 2',)


settings = st.fixed_dictionaries(
    {},
    optional={
        "implementation": st.sampled_from(["auto", "reference"]),
        "deterministic": st.booleans(),
        "statistics": st.just("float32"),
        "lowering": st.just("auto"),
    },
).filter(bool)


@given(st.data())
def test_permuting_rules_that_do_not_overlap_changes_nothing(data):
    modules = data.draw(st.lists(st.sampled_from("abcdefgh"), unique=True, min_size=1))
    rules = [
        rule(f"r{module}", Match(op=data.draw(st.sampled_from(KINDS)), module=f"{module}.**"), **data.draw(settings))
        for module in modules
    ]
    permuted = data.draw(st.permutations(rules))
    for kind in KINDS:
        for module in "abcdefgh":
            assert resolve(rules, kind, f"{module}.x") == resolve(permuted, kind, f"{module}.x")


@given(st.lists(settings, min_size=1, max_size=4))
def test_the_order_of_keys_changes_nothing(applies):
    def build(order):
        ordered = [dict(order(one.items())) for one in applies]
        return [rule(f"r{index}", Match(op="attention"), **one) for index, one in enumerate(ordered)]

    written, reversed_ = build(list), build(lambda items: list(items)[::-1])
    assert load(written).digest == load(reversed_).digest
    assert str(resolve(written)) == str(resolve(reversed_))
