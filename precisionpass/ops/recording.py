"""What an op does with its `record`: the collector of a call, and the settings that an escalation has put in force."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from precisionpass.hooks import recorder
from precisionpass.hooks.collector import Collector
from precisionpass.ops.arguments import AttentionArguments


def collector_of(arguments: AttentionArguments) -> Collector | None:
    """Collects the figures of this call, or None where nobody reads them."""
    site = recorder.find(arguments.record)
    return Collector(site, arguments) if site is not None and site.records else None


def in_force(arguments: AttentionArguments) -> AttentionArguments:
    """The arguments, with what the site's escalation has changed; read on the host at each launch."""
    site = recorder.find(arguments.record)
    return replace(arguments, **site.overrides) if site is not None and site.overrides else arguments


def see_forward(collector: Collector, arguments: AttentionArguments, output: Tensor) -> None:
    """The figures that any implementation leaves in its tensors."""
    collector.operands(q=arguments.q, k=arguments.k, v=arguments.v, output=output)
    collector.output(output)
