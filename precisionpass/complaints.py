"""What the rules file says about trouble: a warning, an error, or silence."""

import logging

from precisionpass.errors import PrecisionPassError
from precisionpass.review.report import Report
from precisionpass.rules import RuleSet

log = logging.getLogger("precisionpass")


def complain_of_refused(report: Report, rules: RuleSet) -> None:
    """Of sites that a rule matches and that cannot be rewritten (on_refused)."""
    refused = [site for site in report.sites if site.decision == "refused"]
    if not refused or rules.on_refused == "keep":
        return
    first = refused[0]
    what = f"{len(refused)} site(s) that a rule matches cannot be rewritten"
    if rules.on_refused == "error":
        raise PrecisionPassError(what, where=first.module or first.source, why=first.message, code="PP402",
                                 fix="set on_refused: warn, or leave the site out with not_module")  # fmt: skip
    log.warning("%s, the first at %s: %s", what, first.module or first.source, first.message)


def complain_of_missing_fp8(report: Report) -> None:
    """Of sites that a rule wants in FP8 and that are not (on_missing_fp8: bf16); no rule makes it quiet."""
    found = [site for site in report.sites if site.reason == "without_fp8"]
    if found:
        first = found[0].module or found[0].source
        log.warning("%d site(s) without the FP8 of a rule, as this device has none; the first at %s", len(found), first)


def complain_of_unmatched(report: Report, rules: RuleSet) -> None:
    """Of rules without a site (on_unmatched). For a report of every graph."""
    if not report.unused_rules or rules.on_unmatched == "keep":
        return
    what = f"no site is matched by {', '.join(report.unused_rules)}"
    if rules.on_unmatched == "error":
        raise PrecisionPassError(what, where=rules.name, code="PP406",
                                 why="a rule that matches nothing is often a module name that has changed",
                                 fix="correct its match, or set on_unmatched: warn or keep")  # fmt: skip
    log.warning("%s", what)


def complain_of_unexpected(report: Report, rules: RuleSet) -> None:
    """Of expectations that failed (on_unexpected). For a report of every graph."""
    failed = report.failed_expectations
    if not failed or rules.on_unexpected == "keep":
        return
    if rules.on_unexpected == "error":
        raise PrecisionPassError(f"the model has other sites than the rules expect: {failed[0]}", where=rules.name,
                                 why="; ".join(failed), code="PP409",
                                 fix="correct expect or the model, or set on_unexpected: warn or keep")  # fmt: skip
    log.warning("the model has other sites than the rules expect: %s", "; ".join(failed))
