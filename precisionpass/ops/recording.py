"""What an op does with its `record`: the collector of a call, and the settings that an escalation has put in force."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

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


def kernel_forward(
    kernels: ModuleType, arguments: AttentionArguments, collector: Collector | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The kernels' forward. It alone knows the largest logits, and records them in training too.

    A maximum is the same however often it is taken, so a forward that is computed again does no harm.
    """
    if collector is not None:
        collector.measure = kernels.magnitudes
    site = recorder.find(arguments.record)
    if site is None or "max_logit" not in site.records or not arguments.q.numel():
        return kernels.forward(arguments)
    asked = replace(arguments, return_max_logits=True)
    output, residual, lse, largest, probabilities = kernels.forward(asked)
    parts = {"max_logit": largest.amax(0)}
    if collector is not None:
        collector.parts |= parts
    else:
        site.add(parts, {}, arguments.q.shape[1], arguments.q.device, is_step=False)
    return output, residual, lse, largest if arguments.return_max_logits else lse.new_empty(0), probabilities
