"""Whether a report has the sites that the rules file expects."""

from dataclasses import replace

from precisionpass.review.report import Report
from precisionpass.rules import RuleSet


def with_expectations(report: Report, rules: RuleSet) -> Report:
    """The report with what the rules file expected of the whole model and did not get."""
    failed: list[str] = []
    for expected in rules.expect:
        counted = [
            site
            for site in report.sites
            if expected.op in (None, site.kind)
            and expected.rule in (None, *(s["rule"] for s in site.settings.values()))
        ]
        refused = sum(site.count for site in counted if site.decision == "refused")
        failed += expected.failures(sum(site.count for site in counted), refused)
    return replace(report, failed_expectations=tuple(failed))
