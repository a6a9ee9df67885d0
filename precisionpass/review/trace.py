"""The review of each graph in the log and among the artefacts that TORCH_TRACE collects and tlparse shows.

Private torch API used here, in one place: `trace_structured`. `tests/review/test_trace.py` says so first when a new
torch moves it.
"""

import logging

from torch._logging import trace_structured  # pyright: ignore[reportPrivateImportUsage]

from precisionpass.review import text
from precisionpass.review.report import Report

log = logging.getLogger("precisionpass")


def tell(report: Report, number: int) -> None:
    """Say what became of a captured graph: the verdict at INFO, every group at DEBUG, the table and the code's change
    as artefacts `precisionpass_review` and `precisionpass_<graph>.diff` of the compilation that torch traces just now.
    """
    log.info("graph %d: %s", number, text.verdict(report))
    if log.isEnabledFor(logging.DEBUG):
        log.debug("graph %d:\n%s", number, report.text())
    _artifact("precisionpass_review", report.text)
    for name in sorted(name for name in report.artifacts if name.endswith(".diff")):
        _artifact(f"precisionpass_{name}", lambda name=name: report.artifacts[name])


def _artifact(name: str, payload) -> None:
    """payload: called only where somebody collects."""
    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=payload)
