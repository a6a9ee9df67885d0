"""What a report can say only with the rules at hand: expectations that failed, and the rules as they were applied."""

from dataclasses import replace

from precisionpass.review.html import RESOLVED
from precisionpass.review.report import Report
from precisionpass.rules import RuleSet
from precisionpass.rules.resolved import resolved_text


def with_rules(report: Report, rules: RuleSet) -> Report:
    """The report of a whole model, with what the rules file expected and did not get, and the rules in one file."""
    failed: list[str] = []
    for expected in rules.expect:
        counted = [
            site for site in report.sites if expected.op in (None, site.kind) and expected.rule in (None, *site.rules)
        ]
        refused = sum(site.count for site in counted if site.decision == "refused")
        failed += expected.failures(sum(site.count for site in counted), refused)
    artifacts = {RESOLVED: resolved_text(rules), **report.artifacts}
    return replace(report, failed_expectations=tuple(failed), artifacts=artifacts)
