"""The wording of every error: place, reason, way out. What a person reads is tested as what a person reads.

tests/rules/messages.txt holds what is written and what is answered; here is what does not fit into a text.
"""

import pickle
from pathlib import Path

import pytest

from precisionpass.errors import PrecisionPassError, RulesError, RulesProblem
from precisionpass.rules import load
from precisionpass.rules.codes import CODES

RULE = "version: 1\nrules:\n- id: r\n  match: {op: attention}\n  apply: {delta: output}\n"


def cases() -> list[tuple[str, list[str]]]:
    """(what is written, the messages) of every block of messages.txt."""
    text = (Path(__file__).parent / "rules" / "messages.txt").read_text(encoding="utf-8")
    blocks = [block.splitlines() for block in text.split("\n\n") if "| " in block]
    return [
        ("\n".join(line[2:] for line in block if line[0] == "|"), [line[2:] for line in block if line[0] == ">"])
        for block in blocks
    ]


def as_file(written: str) -> str:
    """The whole file: a lone match or apply stands in RULE."""
    key = written.partition(":")[0]
    if key not in ("match", "apply"):
        return written
    return "".join(f"  {written}\n" if f"{key}:" in line else f"{line}\n" for line in RULE.splitlines())


def messages(folder: Path, content: str | bytes) -> list[str]:
    """First lines of all problems, with the file's bare name."""
    path = folder / "rules.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(RulesError) as raised:
        load(path)
    return [str(problem).splitlines()[0].replace(f"{folder}/", "") for problem in raised.value.problems]


@pytest.mark.parametrize(("written", "expected"), cases())
def test_what_can_be_wrong(tmp_path, written, expected):
    assert messages(tmp_path, as_file(written)) == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "rules.yaml PP106 the file is empty; write version: 1 and rules"),
        ("version: 1\n\0", "rules.yaml:2:1 PP100 control character U+0000; a rules file is plain text"),
        (b"# 1\n# \xe9", "rules.yaml PP100 the file is not UTF-8 text: byte 0xe9 in line 2; save it as UTF-8"),
        (b"#" * 300_000, "rules.yaml PP100 the file is larger than 256 KiB; write less, or extend"),
        (
            f"version: 1\nrules: [{{id: a, because: {'x' * 1001}, enabled: false}}]",
            'rules.yaml:2:26 PP104 "because" in rule "a" has more than 1000 characters',
        ),
    ],
    ids=["empty", "NUL", "Latin-1", "large", "long"],
)
def test_what_is_no_text_or_too_long(tmp_path, content, message):
    assert messages(tmp_path, content) == [message]


def test_every_problem_of_a_file_comes_at_once_with_its_line_and_a_caret(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("rules.yaml").write_text(
        "version: 1\n"
        "rules:\n"
        "  - id: attn-stable\n"
        "    match:\n"
        "      op: attention\n"
        '      where: "seq_q >= 1024 and dtyp == bf16"\n'
        "    apply:\n"
        "      statistic: float32\n"
        "      implementation: auto\n"
        "      implementation: keep\n"
        "on_refused: eror\n"
    )
    with pytest.raises(RulesError) as raised:
        load("rules.yaml")
    assert str(raised.value) == (
        'rules.yaml:6:33 PP108 where in rule "attn-stable": unknown fact "dtyp"; did you mean "dtype"?\n'
        '          where: "seq_q >= 1024 and dtyp == bf16"\n'
        "                                    ^\n"
        'rules.yaml:8:7 PP103 unknown key "statistic" in rule "attn-stable"; did you mean "statistics"?\n'
        "          statistic: float32\n"
        "          ^\n"
        'rules.yaml:10:7 PP102 duplicate key "implementation"; it is given in line 9\n'
        "          implementation: keep\n"
        "          ^\n"
        'rules.yaml:11:13 PP105 "eror" is no choice for "on_refused"; did you mean "error"?\n'
        "    on_refused: eror\n"
        "                ^"
    )


def test_problems_of_extended_files_come_along(tmp_path):
    (tmp_path / "base.yaml").write_text("version: 1\nrulez: []\n")
    assert messages(tmp_path, "version: 1\nextends: base.yaml\non_refused: x\n") == [
        'rules.yaml:3:13 PP105 "x" is no choice for "on_refused"; choose "warn", "error" or "keep"',
        'base.yaml:2:1 PP103 unknown key "rulez"; did you mean "rules"?',
    ]


def test_two_extended_files_with_one_id(tmp_path):
    for name in ("left", "right"):
        (tmp_path / f"{name}.yaml").write_text(RULE.replace("output", {"left": "output", "right": "residual"}[name]))
    (message,) = messages(tmp_path, "version: 1\nextends: [left.yaml, right.yaml]\n")
    assert message == 'rules.yaml:2:22 PP110 left.yaml and right.yaml both have a rule "r"; write it here'


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("stable-bf61", 'PP109 no preset is called "stable-bf61"; did you mean "stable-bf16"?'),
        ("no/rules.yaml", 'PP100 the file "no/rules.yaml" cannot be read: it does not exist'),
        ("/dev/zero", 'PP100 the file "/dev/zero" cannot be read: it is not a plain file'),
        ("a\0.yaml", 'PP100 the file "a?.yaml" cannot be read: it does not exist'),
        (f"{'x' * 300}.yaml", f'PP100 the file "{"x" * 40}..." cannot be read: File name too long'),
    ],
)
def test_names_of_nothing(name, message):
    with pytest.raises(RulesError) as raised:
        load(name)
    assert str(raised.value) == message


def test_a_long_line_is_cut_around_the_caret(tmp_path):
    problem = RulesProblem("PP103", "unknown", "f", 1, 200, "x" * 199 + "HERE" + "y" * 500)
    _, line, caret = str(problem).splitlines()
    assert len(line) == 114
    assert line[caret.index("^") :].startswith("HERE")


def test_tabs_and_control_characters_keep_the_caret_in_place():
    problem = RulesProblem("PP103", "unknown", "f", 1, 4, "\ta\x1bbc")
    assert str(problem).splitlines()[1:] == ["    \ta?bc", "    \t  ^"]


def test_many_problems_are_cut():
    error = RulesError([RulesProblem("PP103", f"problem {index}") for index in range(60)])
    assert str(error).splitlines()[-2:] == ["PP103 problem 49", "and 10 more problems"]


def test_every_code_has_a_test():
    tested = {message.partition("PP")[2][:3] for _, expected in cases() for message in expected} | {"100"}
    rules_codes = {code[2:] for code in CODES if code < "PP120"}
    assert tested == rules_codes


def test_an_error_is_one_screen():
    error = PrecisionPassError("what", where="where", why="why\nmore", fix="fix", code="PP999")
    assert str(error) == "PP999 what\n  where: where\n  why: why\n    more\n  fix: fix"
    assert str(PrecisionPassError("what")) == "what"


def test_errors_survive_a_process_border():
    error = PrecisionPassError("what", where="where", fix="fix", code="PP999")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    refused = RulesError([RulesProblem("PP103", "a", "f", 1, 1, "x"), RulesProblem("PP103", "b")])
    twin = pickle.loads(pickle.dumps(refused))
    assert (type(twin), str(twin), twin.problems, twin.code) == (RulesError, str(refused), refused.problems, "PP103")
