"""Names of one's own in rules: a kind of site or an action that Python code passes along, such as own.squared_relu."""

from __future__ import annotations

import re
from typing import Any

PATTERN = r"own\.[A-Za-z_][A-Za-z0-9_]{0,59}"
_OWN = re.compile(PATTERN)


def is_own(name: object) -> bool:
    """Whether this is a name of one's own and none of the package's."""
    return isinstance(name, str) and _OWN.fullmatch(name) is not None


def own_or(value: Any, handler: Any) -> Any:
    """For pydantic: a name of one's own as it is, anything else to the built-in choices."""
    return value if is_own(value) else handler(value)


def schema_of(choices: tuple[str, ...]) -> dict[str, Any]:
    """The JSON Schema of the built-in choices or a name of one's own."""
    return {"anyOf": [{"enum": list(choices), "type": "string"}, {"pattern": f"^{PATTERN}$", "type": "string"}]}
