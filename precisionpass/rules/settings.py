"""The settings a rule may apply: each with its default, its range and what it does.

The models here are the single description: the loader checks against them, the JSON Schema and the documentation are
generated from them. A setting that a rule leaves out is not set by that rule; the default counts where no rule sets it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema, WrapValidator

from precisionpass.rules.checked import Checked
from precisionpass.rules.groups import (
    Escalate,
    GradClip,
    Hooks,
    LogitClip,
    MatMul,
    OffIsNone,
    Records,
    RowMaxShift,
    list_or_off,
    or_off,
)
from precisionpass.rules.own import is_own, own_or, schema_of

OPS = ("attention", "softmax", "log_softmax", "layer_norm", "rms_norm")
ATTENTION = ("attention",)
IMPLEMENTATIONS = ("auto", "hopper", "triton", "reference", "keep")
Implementation = Annotated[
    Literal["auto", "hopper", "triton", "reference", "keep"],
    WrapValidator(own_or),
    WithJsonSchema(schema_of(IMPLEMENTATIONS)),
]


class Apply(Checked):
    """What to do at the sites a rule matches."""

    implementation: Implementation = Field(
        default="auto",
        description="Who computes the site. auto: the fastest that can. triton: the kernels for every GPU. hopper: "
        "those for Hopper GPUs, of attention, which auto leaves alone. reference: plain PyTorch, slow and exact, the "
        "specification. keep: leave the site as it is. own.NAME: an action passed from Python.",
    )
    lowering: Literal["auto", "inline", "kernel"] = Field(
        default="auto",
        description="inline: plain arithmetic in the graph, which the inner backend fuses with its neighbours; not for "
        "attention. kernel: an op of its own. auto: inline, as an op would keep the backend from fusing around it.",
    )
    deterministic: bool = Field(default=True, description="Same input, same bits, run after run.")
    prescale: bool = Field(
        default=False,
        description="Divide a row by its largest magnitude before squaring it, so that no square overflows or vanishes "
        "(without it FP32 gives 0 from about 1e19 on).",
    )
    statistics: Literal["float32", "float64"] = Field(
        default="float32",
        description="The least precision of maxima, sums, means and variances. float64: computed inline, to compare "
        "with; not for attention.",
    )
    normaliser: Literal["rounded", "float32"] = Field(
        default="rounded",
        description="Which probabilities the softmax denominator adds up. rounded: those that multiply V, which "
        "makes the output unbiased. float32: those before rounding, as other kernels do.",
    )
    delta: Literal["residual", "recompute", "output"] = Field(
        default="residual",
        description="How the backward gets rowsum(dO * O). residual: from the output and one saved byte per element. "
        "recompute: rowsum(P * dP) / rowsum(P), no memory, one more pass. output: from the rounded output, biased.",
    )
    matmul: Annotated[MatMul | None, OffIsNone] = Field(
        default=None, description="Products in FP8; off: in the model's format.", json_schema_extra=or_off
    )
    on_missing_fp8: Literal["refuse", "bf16"] = Field(
        default="refuse",
        description="Where the device has no FP8. refuse: the site is refused. bf16: its products stay in BF16 or "
        "FP16, with a warning. implementation: reference computes FP8 anywhere, slowly.",
    )
    row_max_shift: Annotated[RowMaxShift | None, OffIsNone] = Field(
        default=None, description="The bounded shift of a repeated row maximum; off: none.", json_schema_extra=or_off
    )
    logit_clip: Annotated[LogitClip | None, OffIsNone] = Field(
        default=None, description="A bound on the scores; off: none.", json_schema_extra=or_off
    )
    output_clip: Annotated[float | None, OffIsNone] = Field(
        default=None, gt=0, le=1e30, description="Largest magnitude of an output; off: none.", json_schema_extra=or_off
    )
    grad_clip: Annotated[GradClip | None, OffIsNone] = Field(
        default=None,
        description="A bound on the gradients that leave this site: dq, dk and dv of attention, that of the input of "
        "the other kinds; off: none.",
        json_schema_extra=or_off,
    )
    dead_rows: Literal["same", "zero", "nan"] = Field(
        default="same",
        description="A query that may attend to nothing. same: what the model gives today. zero: zeros. nan: nan.",
    )
    probabilities: Literal["same", "never"] = Field(
        default="same",
        description="Attention weights the model returns. same: returned if they are used. never: a site that "
        "returns them is refused.",
    )
    record: Records = Field(
        default=(),
        description="Figures that add up while the model runs, for precisionpass.monitor; off: none. By itself it "
        "leaves a site as it is.",
        json_schema_extra=list_or_off,
    )

    escalate: Annotated[Escalate | None, OffIsNone] = Field(
        default=None,
        description="Safer settings while the site's figures ask for them; off: never.",
        json_schema_extra=or_off,
    )

    hooks: Hooks = Field(
        default=(),
        description="Functions of yours on the site's tensors, in this order; off: none.",
        json_schema_extra=list_or_off,
    )

    def given(self) -> dict[str, Any]:
        """The settings that were written, as plain data (None for off, a dict for a group)."""
        return {name: _plain(getattr(self, name)) for name in sorted(self.model_fields_set)}


def _plain(value: Any) -> Any:
    if isinstance(value, Checked):
        return {name: _plain(held) for name, held in value if held is not None}
    return tuple(map(_plain, value)) if isinstance(value, tuple) else value


# Settings that only some ops have; the others belong to every op.
_ONLY: dict[str, tuple[str, ...]] = dict.fromkeys(
    (
        "normaliser",
        "delta",
        "matmul",
        "on_missing_fp8",
        "row_max_shift",
        "logit_clip",
        "output_clip",
        "dead_rows",
        "probabilities",
        "record",
        "escalate",
        "hooks",
    ),
    ATTENTION,
) | {"prescale": ("rms_norm",)}
_ROWWISE = ("softmax", "log_softmax", "layer_norm", "rms_norm")
_ONLY_VALUES = {
    ("lowering", "inline"): _ROWWISE,
    ("statistics", "float64"): _ROWWISE,
    ("implementation", "hopper"): ATTENTION,
}
_NEVER_NUMERIC = {"implementation", "lowering", "deterministic", "probabilities", "on_missing_fp8", "record"}


def belongs_to(setting: str, value: Any = None) -> tuple[str, ...]:
    """The ops that have this setting, or this value of it."""
    if setting == "grad_clip" and isinstance(value, Mapping) and value.get("on_nonfinite") == "raise":
        return ATTENTION  # the other kinds count nothing that a monitor could raise for
    only = _ONLY_VALUES.get((setting, value)) if isinstance(value, str) else None
    return only or _ONLY.get(setting, OPS)


def has(kind: str, setting: str, value: Any = None) -> bool:
    """Whether sites of this kind have this setting, or this value of it; those of a kind of one's own have only
    implementation: keep and actions.
    """
    if is_own(kind):
        return setting == "implementation" and value not in ("auto", "hopper", "triton", "reference")
    return kind in belongs_to(setting, value)


def defaults(kind: str) -> dict[str, Any]:
    """What counts for a site of this kind where no rule says otherwise, as plain data."""
    if is_own(kind):
        return {"implementation": "keep"}
    return {name: _plain(value) for name, value in Apply() if kind in belongs_to(name)}


def changes_numbers(setting: str, value: Any) -> bool:
    """Whether this setting alone asks for other arithmetic than the model's own (off, false and same do not)."""
    return setting not in _NEVER_NUMERIC and value not in (None, False, "same", ())


def contradiction(settings: Mapping[str, Any]) -> tuple[str, str, tuple[str, str]] | None:
    """Two settings that cannot hold together: (the one to change, the reason, both), or None.

    settings: plain values by name, of one rule or merged over several.
    """
    for (name, held), (other, values), reason in _TOGETHER:
        value = settings.get(name)
        if settings.get(other) in values and (value is not None if held is None else value == held):
            return other, reason.format(settings[other]), (name, other)
    return None


# (a setting and its value; None: any), (another and values it cannot have beside it), why.
_TOGETHER = (
    (
        ("row_max_shift", None),
        ("normaliser", ("float32",)),
        'row_max_shift needs normaliser "rounded": a shift with "{}" biases every output',
    ),
    (
        ("matmul", None),
        ("delta", ("output",)),
        'matmul needs delta "residual" or "recompute": "{}" takes the errors of FP8 into every gradient',
    ),
    (
        ("implementation", "reference"),
        ("lowering", ("kernel",)),
        'lowering "{}" needs a kernel, and implementation "reference" is none',
    ),
    (
        ("lowering", "inline"),
        ("implementation", ("triton", "reference")),
        'lowering "inline" leaves no op for implementation "{}" to compute',
    ),
    (
        ("statistics", "float64"),
        ("lowering", ("kernel",)),
        'statistics "float64" is computed inline, and lowering "{}" asks for an op',
    ),
    (
        ("statistics", "float64"),
        ("implementation", ("triton",)),
        'statistics "float64" is computed inline, and implementation "{}" asks for a kernel',
    ),
    (
        ("implementation", "triton"),
        ("prescale", (True,)),
        'prescale is computed in plain PyTorch, and implementation "triton" asks for a kernel',
    ),
)
