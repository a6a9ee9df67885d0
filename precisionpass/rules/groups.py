"""Settings that are groups of keys, or lists: what may stand in each."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from precisionpass.rules.checked import Checked
from precisionpass.rules.condition import Condition, parse
from precisionpass.rules.condition_tree import ConditionError


def _off_is_none(value: Any) -> Any:
    return None if value == "off" else value


def or_off(schema: dict[str, Any]) -> None:
    """Show "off" in the JSON Schema where Python says None."""
    schema["anyOf"] = [{"const": "off"} if option == {"type": "null"} else option for option in schema["anyOf"]]
    schema["default"] = "off"


def list_or_off(schema: dict[str, Any]) -> None:
    """In the JSON Schema: a list, or "off"."""
    items = schema.pop("items")
    del schema["type"]
    schema["anyOf"] = [{"type": "array", "items": items}, {"const": "off"}]
    schema["default"] = "off"


OffIsNone = BeforeValidator(_off_is_none)

Record = Literal[
    "delta_bias", "row_sum", "max_logit", "repeated_maxima", "entropy", "clipped", "amax", "nonfinite", "fp8"
]


def _listed(value: Any) -> Any:
    if value in ("off", None):
        return ()
    return tuple(value) if isinstance(value, list) else value


Records = Annotated[tuple[Record, ...], BeforeValidator(_listed)]


class Hook(Checked):
    """A function of yours on one tensor of the site, passed as compile(..., hooks={"NAME": function})."""

    at: Literal["q", "k", "v", "output", "grad_output", "grad_q", "grad_k", "grad_v"] = Field(
        description="The tensor: what goes into the op or comes out of it, or the gradient of it."
    )
    call: str = Field(pattern=r"^[A-Za-z][A-Za-z0-9_]{0,79}$", description="The name of the function.")


Hooks = Annotated[tuple[Hook, ...], BeforeValidator(_listed)]


class RowMaxShift(Checked):
    """Subtract a little more than a repeated row maximum, so that no probability is exactly 1 (arXiv 2510.04212).

    Bounded: shift = max(previous, min(beta * m, m + limit)) for m > 0 and min(0, m + limit) for m < 0.
    """

    beta: float = Field(default=2.0, gt=1, le=100, description="Factor on a positive row maximum.")
    limit: float = Field(
        default=8.0, ge=0, le=40, description="Largest distance of the shift from the row maximum, in logits."
    )
    tolerance: float = Field(
        default=0.0, ge=0, le=1, description="Scores this close to the maximum count as repeats of it."
    )


class LogitClip(Checked):
    """Bound the scores after scale, before bias and mask."""

    kind: Literal["hard", "tanh"] = Field(description="hard: clamp. tanh: max * tanh(score / max).")
    max: float = Field(gt=0, le=1e6, description="Largest magnitude of a score, in logits.")


class GradClip(Checked):
    """Bound the gradients that leave this site's backward: dq, dk and dv, or dx of a softmax or norm."""

    kind: Literal["value", "norm"] = Field(description="value: clamp each element. norm: scale the tensor down.")
    max: float = Field(gt=0, le=1e30, description="Largest element, or largest norm.")
    on_nonfinite: Literal["zero", "keep", "raise"] = Field(
        default="keep",
        description="What becomes of inf and nan in a gradient. raise: they are kept and counted, and the next "
        "monitor.check() raises; of attention only.",
    )


Product = Literal["same", "fp8_e4m3", "fp8_e5m2"]


class MatMul(Checked):
    """The formats of the two products of attention in the forward; the backward is that of the model's own format."""

    qk: Product = Field(
        default="same",
        description="Q K^T. same: the model's format. fp8_e4m3: three bits after the point, up to 448. fp8_e5m2: two, "
        "up to 57344.",
    )
    pv: Product = Field(default="same", description="P V, with a P that is scaled before it is rounded.")
    scale: Literal["tensor", "head", "row", "block"] = Field(
        default="head",
        description="What has a scale of its own: the tensor, a head of a sequence, a row of q and k and a column of "
        "v, or 128 rows of a head.",
    )
    recipe: Literal["current"] = Field(
        default="current", description="What scales are made of. current: the largest magnitude of the tensor at hand."
    )

    @model_validator(mode="after")
    def _asks_for_something(self) -> MatMul:
        if self.qk == self.pv == "same":
            message = "matmul sets no product: qk, pv or both"
            raise PydanticCustomError("PP106", "{message}", {"message": message, "at": ()})
        return self


class Safer(Checked):
    """Settings that an escalation may put in force: none changes what the backward of a forward has to be."""

    delta: Literal["residual", "recompute"] | None = Field(
        default=None, description="As in apply; recompute has the least bias of all."
    )
    normaliser: Literal["rounded"] | None = Field(default=None, description="As in apply.")
    matmul: Literal["off"] | None = Field(default=None, description="off: products in the model's format, not in FP8.")
    row_max_shift: RowMaxShift | None = Field(default=None, description="As in apply.")
    grad_clip: GradClip | None = Field(default=None, description="As in apply.")
    implementation: Literal["auto", "triton", "reference"] | None = Field(default=None, description="As in apply.")

    @model_validator(mode="after")
    def _says_something(self) -> Safer:
        if not self.model_fields_set:
            raise PydanticCustomError("PP106", "{message}", {"message": "to sets nothing", "at": ()})
        return self


def _checked_condition(text: str) -> str:
    try:
        parse(text, of_figures=True)
    except ConditionError as error:
        raise PydanticCustomError("PP108", "{message}", {"message": error.message, "offset": error.offset}) from None
    return text


class Escalate(Checked):
    """Safer settings while the site's figures ask for them."""

    when: Annotated[str, AfterValidator(_checked_condition)] = Field(
        description='A condition over the figures of the site, such as "delta_bias_t > 6 and delta_bias > 1e-5".'
    )
    to: Safer = Field(description="The settings that count instead, while it lasts.")
    hold: int = Field(default=500, ge=1, le=1_000_000, description="How many steps it lasts: backwards of the site.")
    window: int = Field(
        default=128, ge=2, le=1_000_000, description="Over how many sequences the figures are taken, each time."
    )


def figures_of(when: str) -> Condition:
    """The condition of an `escalate`, parsed."""
    return parse(when, of_figures=True)
