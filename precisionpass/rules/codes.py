"""Every code a rules file or the command line can answer with. Codes are stable: none is reused or renamed."""

from __future__ import annotations

CODES = {
    "PP100": "the file cannot be read: missing, not a file, too large, or not UTF-8 text",
    "PP101": "the file is not valid YAML",
    "PP102": "a key is given twice",
    "PP103": "a key that does not exist",
    "PP104": "a value of the wrong type or out of range",
    "PP105": "a word that is not one of the choices",
    "PP106": "a required key is missing",
    "PP107": "a setting or value that this version cannot carry out yet",
    "PP108": "a where condition that cannot be read",
    "PP109": "extends names nothing, names itself, or goes too deep",
    "PP110": "two rules have one id",
    "PP111": "a module or class pattern that cannot be read",
    "PP112": "settings that contradict each other or do not belong to the op",
    "PP113": "a YAML feature that rules files do not have: anchors, aliases, tags, several documents, deep nesting",
    "PP114": "a version of the rules language that this version does not know",
    "PP115": "expect names a rule that does not exist",
    "PP120": "the model to explain is not given as file.py:factory",
    "PP121": "the Python file cannot be found or read",
    "PP122": "the Python file has no such factory",
    "PP123": "the Python file failed while it was loaded",
    "PP124": "the factory failed, or needs arguments",
    "PP125": "the factory returned something else than a model, (model, args) or (model, args, kwargs)",
    "PP126": "no site of that name",
    "PP131": "the predicate of a Python rule failed, or gave no truth",
}
