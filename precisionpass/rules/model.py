"""What a rules file holds, and the same models for rules written in Python.

from precisionpass import Match, Rule
Rule(id="attention", match=Match(op="attention", where="dtype == bf16"), apply={"implementation": "auto"})
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PrivateAttr,
    ValidationInfo,
    WithJsonSchema,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from precisionpass.rules.checked import Checked
from precisionpass.rules.condition import Condition, parse
from precisionpass.rules.condition_tree import ConditionError
from precisionpass.rules.facts import FACTS
from precisionpass.rules.nearest import or_list
from precisionpass.rules.own import is_own, own_or, schema_of
from precisionpass.rules.pattern import PatternError, check_pattern, matches
from precisionpass.rules.predicate import PredicateField
from precisionpass.rules.settings import OPS, Apply, belongs_to, changes_numbers, contradiction, has

MOST_RULES = 1000
FROM_A_FILE: dict[str, Any] = {"from": "a file"}  # the context of validation; in Python a class is spelt class_

OnTrouble = Literal["warn", "error", "keep"]


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _whole(value: Any) -> Any:
    """true and 1.0 are equal to 1 in Python, and are no version."""
    return str(value).lower() if isinstance(value, bool | float) else value


def _one_or_many(value: Any) -> Any:
    return _as_tuple(value) if isinstance(value, list | tuple) else (value,)


def _show_one_or_many(schema: dict[str, Any]) -> None:
    """In the JSON Schema: one of them, or a list."""
    items = schema["items"]
    del schema["type"], schema["items"]
    schema["anyOf"] = [items, {"type": "array", "items": items, "minItems": schema.pop("minItems", 0)}]


def _checked_pattern(pattern: str) -> str:
    try:
        return check_pattern(pattern)
    except PatternError as error:
        raise PydanticCustomError("PP111", "{message}", {"message": str(error)}) from None


def _checked_condition(text: str) -> str:
    try:
        parse(text)
    except ConditionError as error:
        raise PydanticCustomError("PP108", "{message}", {"message": error.message, "offset": error.offset}) from None
    return text


BuiltIn = Literal["attention", "softmax", "log_softmax", "layer_norm", "rms_norm"]
Op = Annotated[BuiltIn, WrapValidator(own_or), WithJsonSchema(schema_of(OPS))]
Many = BeforeValidator(_as_tuple)
OneOrMany = BeforeValidator(_one_or_many)
Pattern = Annotated[str, AfterValidator(_checked_pattern)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,79}$")]


@dataclass(frozen=True)
class Origin:
    """Where a rule was written: file as shown to people, line and column from 1 (0: in Python), the line of each
    setting, and line and column of the value of each key of match.
    """

    file: str = "python"
    line: int = 0
    setting_lines: Mapping[str, int] = field(default_factory=dict)
    column: int = 0
    match_places: Mapping[str, tuple[int, int]] = field(default_factory=dict)


class Match(Checked):
    """Which sites a rule is for: those for which every key given here holds."""

    op: Annotated[tuple[Op, ...], OneOrMany] = Field(
        min_length=1,
        description="The kind of site, or a list of kinds; own.NAME: one that Python code finds.",
        json_schema_extra=_show_one_or_many,
    )
    module: Annotated[tuple[Pattern, ...], OneOrMany] = Field(
        default=(),
        min_length=1,
        description="Module names: a glob such as model.layers.*.self_attn, or re:..., or a list.",
        json_schema_extra=_show_one_or_many,
    )
    not_module: Annotated[tuple[Pattern, ...], OneOrMany] = Field(
        default=(), min_length=1, description="Module names to leave out.", json_schema_extra=_show_one_or_many
    )
    class_: Annotated[tuple[Pattern, ...], OneOrMany] = Field(
        default=(),
        min_length=1,
        alias="class",
        description="Names of the module's class, such as *Attention.",
        json_schema_extra=_show_one_or_many,
    )
    where: Annotated[str, AfterValidator(_checked_condition)] | None = Field(
        default=None, description='A condition over the facts of a site, such as "dtype == bf16 and seq_q >= 1024".'
    )
    training: bool | None = Field(default=None, description="true: only in training mode. false: only in evaluation.")
    predicate: PredicateField = Field(
        default=None,
        description="In Python only: a function of (facts, module) that says whether the rule matches. It is asked "
        "last; its name and source are part of the digest of the rules.",
        json_schema_extra={"not": {}},  # an editor marks it in a file, and shows why
    )

    @model_validator(mode="before")
    @classmethod
    def _no_python_names(cls, data: Any, info: ValidationInfo) -> Any:
        if info.context is FROM_A_FILE and isinstance(data, dict) and "class_" in data:
            message = 'unknown key "class_"; did you mean "class"?'
            raise PydanticCustomError("PP103", "{message}", {"message": message, "at": ("class_",)})
        return data

    @property
    def condition(self) -> Condition | None:
        """The where condition, parsed; None: there is none."""
        return None if self.where is None else parse(self.where)

    def accepts(self, kind: str, module: str, class_name: str, training: bool) -> bool:
        """Whether everything but the where condition and the predicate holds. class_name: bare or dotted."""
        if kind not in self.op or (self.training is not None and self.training != training):
            return False
        if any(matches(pattern, module) for pattern in self.not_module):
            return False
        if self.module and not any(matches(pattern, module) for pattern in self.module):
            return False
        names = {class_name, class_name.rpartition(".")[2]}
        return not self.class_ or any(matches(pattern, name) for pattern in self.class_ for name in names)

    @model_validator(mode="after")
    def _facts_exist(self) -> Match:
        for name in self.condition.names if self.condition else ():
            if not set(FACTS[name].ops) & set(self.op) and not any(map(is_own, self.op)):
                message = f'no {or_list(self.op)} site has the fact "{name}"; it belongs to {or_list(FACTS[name].ops)}'
                offset = self.where.find(name) if self.where else 0
                context = {"message": message, "offset": offset, "at": ("where",)}
                raise PydanticCustomError("PP108", "{message}", context)
        return self


class Rule(Checked):
    """One named rule: which sites, and what to do there."""

    id: Name = Field(description="The name a review shows: letters, digits, dots, dashes, underscores.")
    because: str = Field(default="", max_length=1000, description="The reason, shown in the review.")
    enabled: bool = Field(
        default=True, description="false: as if the rule were not there; match and apply may be left out."
    )
    match: Match | None = Field(default=None, description="Which sites.")
    apply: Apply | None = Field(default=None, description="What to do there.")
    _origin: Origin = PrivateAttr(default_factory=Origin)

    @property
    def origin(self) -> Origin:
        """Where the rule was written."""
        return self._origin

    def at(self, origin: Origin) -> Rule:
        """The same rule with its place."""
        copy = self.model_copy()
        copy._origin = origin
        return copy

    @model_validator(mode="after")
    def _makes_sense(self) -> Rule:
        if not self.enabled:
            return self
        if self.match is None or self.apply is None:
            key = "match" if self.match is None else "apply"
            raise PydanticCustomError("PP106", "{message}", {"message": f'missing key "{key}"', "at": ()})
        given = self.apply.given()
        if not given:
            raise PydanticCustomError("PP106", "{message}", {"message": "apply sets nothing", "at": ("apply",)})
        problem = _misplaced(given, self.match.op) or contradiction(given) or _kept_and_changed(given)
        if problem:
            raise PydanticCustomError("PP112", "{message}", {"message": problem[1], "at": ("apply", problem[0])})
        return self


def _misplaced(given: Mapping[str, Any], ops: tuple[str, ...]) -> tuple[str, str] | None:
    for name, value in given.items():
        owners = belongs_to(name, value)
        if not any(has(op, name, value) for op in ops):
            what = f'{name} "{value}"' if isinstance(value, str) else f'"{name}" with these values'
            what = f'"{name}"' if name != "implementation" and owners == belongs_to(name) else what
            return name, f"{what} belongs to {or_list(owners)}, and the rule matches {or_list(ops)}"
    return None


def _kept_and_changed(given: Mapping[str, Any]) -> tuple[str, str] | None:
    chosen = given.get("implementation")
    changing = [name for name, value in given.items() if changes_numbers(name, value)]
    if not changing or not (chosen == "keep" or is_own(chosen)):
        return None
    does = "leaves it as it is" if chosen == "keep" else "is all that is done to it"
    return changing[0], f'"{changing[0]}" changes the site, and implementation "{chosen}" {does}'


class Expect(Checked):
    """How many sites there must be; without op and rule, all sites count."""

    op: Op | None = Field(default=None, description="Count the sites of this kind.")
    rule: Name | None = Field(default=None, description="Count the sites this rule matches.")
    sites: int | None = Field(
        default=None, ge=0, le=1_000_000, description="Exactly so many sites, whatever became of them."
    )
    min_sites: int | None = Field(default=None, ge=0, le=1_000_000, description="At least so many.")
    max_refused: int | None = Field(default=None, ge=0, le=1_000_000, description="At most so many of them refused.")

    @model_validator(mode="after")
    def _says_something(self) -> Expect:
        if self.sites is None and self.min_sites is None and self.max_refused is None:
            message = "expect needs sites, min_sites or max_refused"
            raise PydanticCustomError("PP106", "{message}", {"message": message, "at": ()})
        if self.op is not None and self.rule is not None:
            message = "expect counts by op or by rule, not by both"
            raise PydanticCustomError("PP112", "{message}", {"message": message, "at": ("rule",)})
        return self

    def failures(self, sites: int, refused: int) -> tuple[str, ...]:
        """What does not hold, one sentence each. sites: counted sites; refused: those of them that were refused."""
        of = f"{self.op} sites" if self.op else f'sites of rule "{self.rule}"' if self.rule else "sites"
        failed = []
        if self.sites is not None and sites != self.sites:
            failed.append(f"expected {self.sites} {of}, found {sites}")
        if self.min_sites is not None and sites < self.min_sites:
            failed.append(f"expected at least {self.min_sites} {of}, found {sites}")
        if self.max_refused is not None and refused > self.max_refused:
            failed.append(f"expected at most {self.max_refused} refused {of}, found {refused}")
        return tuple(failed)


class RulesFile(Checked):
    """A rules file. Rules count in the order written, and the first that sets a setting wins."""

    version: Annotated[Literal[1], BeforeValidator(_whole)] = Field(description="The version of the rules language.")
    extends: Annotated[tuple[str, ...], OneOrMany] = Field(
        default=(),
        max_length=16,
        description="Presets by name, or files relative to this one; their rules follow.",
        json_schema_extra=_show_one_or_many,
    )
    rules: Annotated[tuple[Rule, ...], Many] = Field(
        default=(), max_length=MOST_RULES, description="The rules, strongest first."
    )
    expect: Annotated[tuple[Expect, ...], Many] = Field(
        default=(), max_length=MOST_RULES, description="Site counts that must hold; exit status 1 where one does not."
    )
    on_unmatched: OnTrouble | None = Field(
        default=None, description="A rule that matched no site: warn, error or keep quiet."
    )
    on_refused: OnTrouble | None = Field(default=None, description="A site that is refused: warn, error or keep quiet.")
    on_unexpected: OnTrouble | None = Field(
        default=None, description="An expectation that failed, in compile: warn, error or keep quiet."
    )
