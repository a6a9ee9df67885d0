"""The base of every model a user writes, in YAML or in Python: strict, frozen, and refused in our words."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from precisionpass.errors import RulesError
from precisionpass.rules.problems import problems_of


class Checked(BaseModel):
    """No key that does not exist, no text for a number, no inf or nan, no change afterwards."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        populate_by_name=True,
        hide_input_in_errors=True,
        defer_build=True,  # a rules file needs one validator, not one for every model
    )

    def __init__(self, /, **values: Any) -> None:
        """Raises RulesError, with the wording a rules file gets, instead of pydantic's ValidationError."""
        try:
            self.__pydantic_validator__.validate_python(values, self_instance=self)
        except ValidationError as error:
            raise RulesError(problems_of(error, type(self), values)) from None

    # A nested model is validated without __init__, so that all problems of a file are collected at once.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]
