"""From the settings of the rules to the arguments of the attention op."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from precisionpass.decide import Decision
from precisionpass.ops.arguments import AttentionArguments
from precisionpass.ops.capabilities import shift_limit
from precisionpass.rewriting.writer import ShiftTooLarge
from precisionpass.sites.band import as_arguments
from precisionpass.sites.describe import attention_dtype, short
from precisionpass.sites.site import Attention

_DEFAULTS = {field.name: field.default for field in fields(AttentionArguments)}


def settings(decision: Decision, operation: Attention) -> dict[str, object]:
    """The op's own names for what the rules set; what is at the op's default is left out. Raises ShiftTooLarge."""
    return _settings(decision.values, operation)


def overrides(decision: Decision, operation: Attention) -> dict[str, object]:
    """What an escalation changes of `settings`, by the op's own names. Raises ShiftTooLarge."""
    to = {name: None if value == "off" else value for name, value in decision.values["escalate"]["to"].items()}
    calm, safer = (_settings(values, operation) for values in (decision.values, decision.values | to))
    names = [name for name in calm | safer if calm.get(name) != safer.get(name)]
    return {name: _as_held(safer.get(name, _DEFAULTS[name])) for name in names}


def _as_held(value: object) -> object:
    """As AttentionArguments holds it."""
    return tuple(value) if isinstance(value, list) else value


def _settings(values: Mapping, operation: Attention) -> dict[str, object]:
    chosen: dict[str, object] = {name: values[name] for name in ("normaliser", "delta", "deterministic")}
    chosen["implementation"] = values["implementation"]
    same = "zero" if operation.safe_softmax else "nan"
    chosen["dead_rows"] = same if values["dead_rows"] == "same" else values["dead_rows"]
    if values["row_max_shift"]:
        shift, dtype = values["row_max_shift"], attention_dtype(operation)
        in_fp8 = bool(values["matmul"]) and values["matmul"]["pv"] != "same"
        most = shift_limit(dtype, in_fp8)
        if shift["limit"] > most:
            room = "a P in FP8" if in_fp8 else short(dtype)
            raise ShiftTooLarge(f"limit {shift['limit']:g}, and {room} has room for {most:g}")
        chosen["row_max_shift"] = [float(shift["beta"]), float(shift["limit"]), float(shift["tolerance"])]
    if values["matmul"]:
        named = {name: values["matmul"][name] for name in ("qk", "pv", "scale")}
        chosen["matmul"] = " ".join(f"{name}={value}" for name, value in named.items() if value != "same")
    if values["logit_clip"]:
        chosen |= {"logit_clip": values["logit_clip"]["kind"], "logit_clip_max": float(values["logit_clip"]["max"])}
    if values["output_clip"]:
        chosen["output_clip"] = float(values["output_clip"])
    if values["grad_clip"]:
        clip = values["grad_clip"]
        chosen |= {
            "grad_clip_kind": clip["kind"],
            "grad_clip": float(clip["max"]),
            "on_nonfinite": clip["on_nonfinite"],
        }
    chosen |= as_arguments(operation.band, operation) or {}
    if operation.probabilities_stage != "none":
        chosen["probabilities"] = operation.probabilities_stage
    return {name: value for name, value in chosen.items() if value != _DEFAULTS[name]}
