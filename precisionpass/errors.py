"""Every error a person sees, in one shape: what is wrong, where, why, and the way out."""

from __future__ import annotations

from dataclasses import dataclass

MOST_SHOWN = 50  # problems of a rules file


class PrecisionPassError(Exception):
    """The base of every error this package raises on purpose; `str()` of it is one screen.

    what: one sentence. where: a file, site or argument. why: the reason. fix: the way out.
    code: stable, such as "PP103", listed in the documentation; "" where there is none.
    """

    def __init__(self, what: str, *, where: str = "", why: str = "", fix: str = "", code: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.why = why
        self.fix = fix
        self.code = code

    def __reduce__(self) -> tuple:
        return _rebuild, (type(self), self.__dict__)

    def __str__(self) -> str:
        first = f"{self.code} {self.what}" if self.code else self.what
        details = (("where", self.where), ("why", self.why), ("fix", self.fix))
        return "\n".join([first, *(f"  {label}: {_indented(text)}" for label, text in details if text)])


@dataclass(frozen=True)
class RulesProblem:
    """One thing wrong with a rules file.

    line and column count from 1; 0 means the whole file (or rules written in Python). source_line is the line as
    written, for the caret; "" where there is none to show.
    """

    code: str
    message: str
    file: str = ""
    line: int = 0
    column: int = 0
    source_line: str = ""

    def __str__(self) -> str:
        file = printable(self.file)
        place = f"{file}:{self.line}:{self.column} " if self.line else f"{file} " if file else ""
        first = f"{place}{self.code} {self.message}"
        return f"{first}\n{self._excerpt()}" if self.source_line else first

    def _excerpt(self) -> str:
        """The source line with a caret under the column; a long line is cut around it."""
        start = max(0, self.column - 1 - 80)
        shown = printable(self.source_line[start : start + 110])
        before = shown[: max(0, self.column - 1 - start)]
        indent = "".join(letter if letter == "\t" else " " for letter in before)
        return f"    {shown}\n    {indent}^"


class RulesError(PrecisionPassError):
    """A rules file, or a list of Python rules, that was refused; holds every problem found, in file order."""

    def __init__(self, problems: tuple[RulesProblem, ...] | list[RulesProblem]) -> None:
        self.problems = tuple(problems)
        first = self.problems[0]
        count = len(self.problems)
        what = first.message if count == 1 else f"{count} problems in the rules"
        super().__init__(what, where=first.file, code=first.code)

    def __str__(self) -> str:
        shown = [str(problem) for problem in self.problems[:MOST_SHOWN]]
        more = len(self.problems) - len(shown)
        return "\n".join([*shown, f"and {more} more problems"] if more else shown)


def printable(text: str) -> str:
    """The text with every character that could move a terminal's cursor or hide others as "?"; as long as before."""
    return "".join(letter if letter.isprintable() or letter == "\t" else "?" for letter in text)


def _indented(text: str) -> str:
    return text.replace("\n", "\n    ")


def _rebuild(error_type: type[PrecisionPassError], state: dict) -> PrecisionPassError:
    """Unpickle without calling the subclass's own __init__, whose arguments may differ."""
    error = error_type.__new__(error_type)
    error.__dict__.update(state)
    error.args = (state.get("what", ""),)
    return error
