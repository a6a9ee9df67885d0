"""Facts times rules: what is to happen at each site, which rule set what, and why not otherwise."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from precisionpass import graph
from precisionpass.capture import Captured
from precisionpass.numerics.fp8 import has_fp8
from precisionpass.origin import Origin
from precisionpass.rules import Condition, MissingFact, Resolved, RuleSet, Setting
from precisionpass.rules.groups import figures_of
from precisionpass.rules.own import is_own
from precisionpass.rules.predicate import ask, name_of, not_a_truth
from precisionpass.rules.settings import changes_numbers, contradiction
from precisionpass.sites.site import Attention, NearMiss, Rowwise, Site

_FLOATING = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_COMPUTED = ("bf16", "fp16", "fp32", "fp64")

MESSAGES = {
    "rewritten": "rewritten",
    "no_rule": "no rule matches this site",
    "rule_keeps": "the matching rules change nothing here",
    "recorded": "left as it is, and its figures are recorded",
    "not_recorded": "left as it is, and its figures cannot be recorded",
    "unused": "nothing reads its result: torch.compile leaves it out",
    "already_satisfied": "the statistics are already computed in FP32 or better",
    "contradiction": "two rules that both match cannot hold together",
    "unsupported_dtype": "the op computes bf16, fp16, fp32 and fp64 only",
    "no_kernel": "a rule says implementation: triton or hopper, and there is no kernel for this device or dtype",
    "probabilities_wanted": "the probabilities are used elsewhere, and a rule says probabilities: never",
    "no_fp8": "a rule asks for FP8 products, this device has none, and the rule says on_missing_fp8: refuse",
    "without_fp8": "rewritten without the FP8 products that a rule asks for: this device has none",
    "fp8_of_32_bits": "a rule asks for FP8 products, and the model computes this attention in 32 bits or more",
    "shift_too_large": "row_max_shift goes further than numbers of this dtype reach",
    "action_refuses": "the action of the rule does not compute this site",
    "cannot_be_placed": "the new call cannot be placed in the graph",
}


@dataclass(frozen=True)
class Decision:
    """What happens at a site. `values`: every setting of its kind; `settings`: those that a rule set and that count
    there, with the rule. `rules`: all that match.
    """

    site: Site
    origin: Origin
    graph: str
    action: str  # rewritten | kept | refused
    reason: str
    message: str
    rule: str
    values: Mapping[str, object]
    settings: Mapping[str, Setting]
    rules: tuple[str, ...]
    holds_while: str = ""

    @property
    def own_action(self) -> str:
        """The action of the user's that computes the site, "" where it is none."""
        chosen = str(self.values.get("implementation"))
        return chosen if is_own(chosen) else ""

    @property
    def observed(self) -> bool:
        """Whether the site stays as it is, and its figures are recorded."""
        return self.reason == "recorded"

    @property
    def escalates_when(self) -> Condition:
        """What the site's figures are asked; only where a rule says `escalate`."""
        return figures_of(self.values["escalate"]["when"])  # type: ignore[index]

    def refused(self, reason: str, detail: str = "") -> "Decision":
        return self._but("refused", reason, detail)

    def not_recorded(self, detail: str) -> "Decision":
        return self._but("kept", "not_recorded", detail)

    def noting(self, note: str) -> "Decision":
        return Decision(**{**self.__dict__, "message": f"{self.message}; {note}"})

    def _but(self, action: str, reason: str, detail: str) -> "Decision":
        message = MESSAGES[reason] + (f": {detail}" if detail else "")
        return Decision(**{**self.__dict__, "action": action, "reason": reason, "message": message})


def decide(captured: Captured, sites: tuple[Site, ...], rules: RuleSet) -> tuple[Decision, ...]:
    """One decision a site, in order."""
    return tuple(_decide(captured, site, rules) for site in sites)


def origin_of(captured: Captured, found: Site | NearMiss) -> Origin:
    nodes = found.interior if isinstance(found, Site) else (found.anchor,)
    return captured.origin([found.anchor, *sorted(n for n in nodes if n is not found.anchor)])


def _decide(captured: Captured, site: Site, rules: RuleSet) -> Decision:
    origin = origin_of(captured, site)
    facts = {name: captured.sized(value) for name, value in site.facts.items()} | {"training": captured.training}
    conditions: list[str] = []

    def check(condition) -> bool:
        try:
            truth = condition.evaluate(facts, not_=torch.sym_not)
        except MissingFact:
            return False
        if isinstance(truth, bool):
            return truth
        answer = captured.holds(truth)
        conditions.append(condition.text if answer else f"not ({condition.text})")
        return answer

    def says(predicate, rule: str) -> bool:
        answer = ask(predicate, rule, facts, origin.module)
        if not isinstance(answer, bool | torch.SymBool):
            raise not_a_truth(predicate, rule, answer)
        truth = captured.holds(answer)
        if any(isinstance(fact, torch.SymInt | torch.SymFloat) for fact in facts.values()):
            conditions.append(f"{'' if truth else 'not '}{name_of(predicate)}")
        return truth

    resolved = rules.resolve(site.kind, origin.module, origin.module_class, captured.training, check, says)
    action, reason = _action(site, resolved)
    by_action = is_own(resolved.value("implementation"))
    detail = _contradicting(resolved) if action == "rewritten" and not by_action else ""
    if detail:
        action, reason = "refused", "contradiction"
    chosen = resolved.settings.get("implementation")
    rule = chosen.rule if chosen else resolved.rules[0] if resolved.rules else ""
    values = resolved.values()
    if reason == "without_fp8":
        values = values | {"matmul": None}
    return Decision(
        site, origin, captured.name, action, reason, MESSAGES[reason] + (f": {detail}" if detail else ""), rule,
        values, _in_force(action, reason, resolved), resolved.rules, " and ".join(conditions),
    )  # fmt: skip


# What a site is kept for: no other setting applies to a site that stays as it is.
_KEPT_FOR = {
    "rule_keeps": ("implementation",),
    "already_satisfied": ("statistics",),
    "recorded": ("implementation", "record"),
}


def _in_force(action: str, reason: str, resolved: Resolved) -> dict[str, Setting]:
    """The settings that rules set and that count at this site."""
    if reason == "without_fp8":
        return {name: setting for name, setting in resolved.settings.items() if name != "matmul"}
    only = ("implementation",) if is_own(resolved.value("implementation")) else tuple(resolved.settings)
    if action == "kept":
        only = _KEPT_FOR.get(reason, ())
    return {name: setting for name, setting in resolved.settings.items() if name in only}


def _contradicting(resolved: Resolved) -> str:
    """What cannot hold together once the rules are merged, with the rules that set it; "" where all is well."""
    values = {name: setting.value for name, setting in resolved.settings.items()}
    found = contradiction(values)
    if found is None:
        return _contradicting_once_escalated(values)
    setters = [f'rule "{resolved.settings[name].rule}" sets {name}' for name in found[2]]
    return f"{' and '.join(setters)}; {found[1]}"


def _contradicting_once_escalated(values: Mapping[str, Any]) -> str:
    """The same of the settings that an escalation would leave."""
    to = (values.get("escalate") or {}).get("to", {})
    found = contradiction(values | {name: None if value == "off" else value for name, value in to.items()})
    return f"once escalated, {found[1]}" if found else ""


def _action(site: Site, resolved) -> tuple[str, str]:
    if not resolved.rules:
        return "kept", "no_rule"
    records = site.kind == "attention" and resolved.value("record")
    if not resolved.rewrites and not records:
        return "kept", "rule_keeps"
    if not site.output.meta["live"]:
        return "kept", "unused"
    if not resolved.rewrites:
        return "kept", "recorded" if site.facts["dtype"] in _COMPUTED else "not_recorded"
    if is_own(resolved.value("implementation")):
        return "rewritten", "rewritten"
    if resolved.value("implementation") in ("triton", "hopper") and not _has_kernel(site):
        return "refused", "no_kernel"
    if isinstance(site.operation, Rowwise):
        if graph.dtype(site.operation.x) not in _FLOATING or graph.dtype(site.output) not in _FLOATING:
            return "refused", "unsupported_dtype"
        only_statistics = not any(
            changes_numbers(n, s.value) for n, s in resolved.settings.items() if n != "statistics"
        )
        enough = ("fp64",) if resolved.value("statistics") == "float64" else ("fp32", "fp64")
        if site.facts["statistics"] in enough and only_statistics and resolved.value("lowering") != "kernel":
            return "kept", "already_satisfied"
    if isinstance(site.operation, Attention):
        if site.facts["dtype"] not in _COMPUTED:
            return "refused", "unsupported_dtype"
        if site.operation.probabilities and resolved.value("probabilities") == "never":
            return "refused", "probabilities_wanted"
        if resolved.value("matmul"):
            return _with_fp8(site, resolved)
    return "rewritten", "rewritten"


def _with_fp8(site: Site, resolved) -> tuple[str, str]:
    if site.facts["dtype"] not in ("bf16", "fp16"):
        return "refused", "fp8_of_32_bits"
    if resolved.value("implementation") == "reference" or has_fp8(site.facts["device"]):
        return "rewritten", "rewritten"
    return ("refused", "no_fp8") if resolved.value("on_missing_fp8") == "refuse" else ("rewritten", "without_fp8")


def _has_kernel(site: Site) -> bool:
    """Whether there are Triton kernels for such a site; what they refuse of attention is met in the call."""
    operation = site.operation
    if site.facts["device"] not in ("cuda", "meta"):
        return False
    read = (operation.x, operation.weight, operation.bias, operation.output) if isinstance(operation, Rowwise) else ()
    return all(node is None or graph.dtype(node) != torch.float64 for node in read)
