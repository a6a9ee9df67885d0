"""The rules language: files and Python models in, a RuleSet out. Imports neither torch nor sympy nor rich."""

from precisionpass.rules.condition import Condition, MissingFact
from precisionpass.rules.load import load
from precisionpass.rules.model import Expect, Match, Rule
from precisionpass.rules.ruleset import Resolved, RuleSet, Setting
from precisionpass.rules.settings import Apply

__all__ = ["Apply", "Condition", "Expect", "Match", "MissingFact", "Resolved", "Rule", "RuleSet", "Setting", "load"]
