"""Files made to hurt: each gets an answer within a second, and no file gets a traceback.

PRECISIONPASS_MUTATIONS=10000 runs the mutation test with as many examples; 200 otherwise.
"""

import os
import time

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from precisionpass.errors import RulesError
from precisionpass.rules import load, presets
from precisionpass.rules.codes import CODES

MUTATIONS = int(os.environ.get("PRECISIONPASS_MUTATIONS", "200"))

NESTED_ALIASES = "a: &a [x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
WHERE = "version: 1\nrules: [{id: a, match: {op: attention, where: %r}, apply: {lowering: auto}}]"
MODULE = "version: 1\nrules: [{id: a, match: {op: attention, module: %r}, apply: {lowering: auto}}]"
RULE = "- {id: r%d, match: {op: attention}, apply: {lowering: auto}}\n"

HOSTILE = {
    "alias bomb": (NESTED_ALIASES, "PP113"),
    "recursive alias": ("version: 1\nrules: &a [*a]", "PP113"),
    "anchor": ("version: &v 1", "PP113"),
    "deep lists": ("a: " + "[" * 200_000, "PP101"),
    "deep closed lists": ("a: " + "[" * 900 + "]" * 900, "PP113"),
    "deep groups": ("{a: " * 60_000, "PP113"),
    "deep blocks": ("".join(" " * depth + "a:\n" for depth in range(600)), "PP113"),
    "deep dashes": ("- " * 100_000, "PP113"),
    "deep keys": ("? " * 100_000, "PP113"),
    "list as a key": ("? [a, b]\n: 3", "PP104"),
    "huge integer": ("version: " + "9" * 200_000, "PP104"),
    "huge decimal": ("version: 0." + "9" * 200_000, "PP104"),
    "huge exponent": ("version: 1e99999", "PP104"),
    "NUL": ("version: 1\n\0", "PP100"),
    "escape sequence": ("version: 1\n# \x1b[2J", "PP100"),
    "escaped NUL": ('version: 1\nrules: [{id: "\\0\\e[2J"}]', "PP104"),
    "surrogate": ('version: "\\ud800"', "PP101"),
    "UTF-16": ("version: 1".encode("utf-16"), "PP100"),
    "UTF-32": ("version: 1".encode("utf-32"), "PP100"),
    "Latin-1": ("# é\nversion: 1".encode("latin-1"), "PP100"),
    "10 MB": (b"#" * 10_000_000, "PP100"),
    "empty": ("", "PP106"),
    "only a comment": ("# nothing", "PP106"),
    "two documents": ("version: 1\n---\nversion: 1", "PP113"),
    "python object": ("version: !!python/object/apply:os.system ['exit 3']", "PP113"),
    "python name": ("!!python/name:os.system {version: 1}", "PP113"),
    "merge key": ("version: 1\n<<: {rules: []}", "PP103"),
    "unknown directive": ("%FOO\n---\nversion: 1", "PP101"),
    "tab": ("version: 1\n\trules: []", "PP101"),
    "unclosed": ("version: [1", "PP101"),
    "many values": ("version: 1\nx: [" + "1," * 50_000 + "]", "PP113"),
    "many keys": ("version: 1\n" + "".join(f"k{index}: 1\n" for index in range(9_000)), "PP103"),
    "one key many times": ("version: 1\n" + "k: 1\n" * 6_000, "PP102"),
    "many rules": ("version: 1\nrules:\n" + "- {id: a, enabled: false}\n" * 2_000, "PP104"),
    "many wrong rules": ("version: 1\nrules:\n" + "- {idd: 1, mach: 2}\n" * 900, "PP103"),
    "where of 10 000 terms": (WHERE % " and ".join(["seq_q > 1"] * 10_000), "PP108"),
    "where with a call": (WHERE % "__import__(os).system(1) == 0", "PP108"),
    "where with an attribute": (WHERE % "causal.__class__ == 1", "PP108"),
    "where with a power": (WHERE % "9 ** 9 ** 9 ** 9 > seq_q", "PP108"),
    "where with a shift": (WHERE % "1 << 999999999 > seq_q", "PP108"),
    "where in parentheses": (WHERE % ("(" * 1900 + "causal"), "PP108"),
    "where with nots": (WHERE % ("not " * 480 + "causal"), "PP108"),
    "where with minuses": (WHERE % ("-" * 1900 + "1 > seq_q"), "PP108"),
    "slow expression": (MODULE % "re:(a+)+b", "PP111"),
    "large expression": (MODULE % ("re:" + "(" * 150), "PP111"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_within_a_second(name, tmp_path):
    text, code = HOSTILE[name]
    path = tmp_path / "rules.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    start = time.perf_counter()
    with pytest.raises(RulesError) as raised:
        load(path)
    shown = str(raised.value)
    assert time.perf_counter() - start < 1
    assert code in {problem.code for problem in raised.value.problems}
    assert len(shown) < 20_000
    assert all(letter.isprintable() or letter in "\n\t" for letter in shown)


@pytest.mark.parametrize("path", ["/dev/zero", "a\0b.yaml", "x" * 5000 + ".yaml", ".", "/", "", " ", "../x", "no.yaml"])
def test_names_of_no_file_are_refused(path):
    with pytest.raises(RulesError, match=r"PP100|PP109"):
        load(path)


def test_a_thousand_rules_load_within_a_second(tmp_path):
    path = tmp_path / "rules.yaml"
    path.write_text("version: 1\nrules:\n" + "".join(RULE % index for index in range(1_000)))
    start = time.perf_counter()
    assert len(load(path).rules) == 1_000
    assert time.perf_counter() - start < 1


def test_files_that_extend_one_another_without_end_are_refused(tmp_path):
    for index in range(40):
        (tmp_path / f"r{index}.yaml").write_text(f"version: 1\nextends: r{index + 1}.yaml\n")
    with pytest.raises(RulesError, match="more than 32 files extend one another"):
        load(tmp_path / "r0.yaml")
    doubling = "version: 1\nextends: [r{0}.yaml, r{0}.yaml, r{0}.yaml]\n"
    for index in range(20):
        (tmp_path / f"r{index}.yaml").write_text(doubling.format(index + 1))
    start = time.perf_counter()
    with pytest.raises(RulesError, match="more than 32 files extend one another"):
        load(tmp_path / "r0.yaml")
    assert time.perf_counter() - start < 1


PIECES = [
    "version: 1\n", "rules:\n", "- id: x\n", "  match: {op: attention}\n", "  apply:\n", "    delta: output\n",
    "extends: off\n", "expect: [{sites: 1}]\n", "&a ", "*a ", "!!int ", "? ", "- ", ": ", "[", "]", "{", "}", '"', "'",
    "|\n", ">\n", "---\n", "...\n", "#", "\t", "\n", " ", "\\", "%", "@", "`", "null", "~", "true", "no", "1e999", "-1",
    "\0", "\ud800", "é", "\x85", "\ufeff",
    "where: seq_q > 1", "module: re:(", "re:", "**", "<<: ", "0x1", ".", "999999999999999999999999",
]  # fmt: skip


@st.composite
def mutated(draw) -> bytes:
    """A shipped rules file with pieces cut out, doubled, swapped in, or bytes changed."""
    text = draw(st.sampled_from([presets.text(name) for name in presets.names()]))
    lines = [line for line in text.splitlines(keepends=True) if draw(st.booleans()) or "#" not in line]
    text = "".join(lines)
    for _ in range(draw(st.integers(1, 6))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.integers(0, 30)))
        piece = draw(st.sampled_from(PIECES) | st.text(max_size=8) | st.just(text[start:end] * 2))
        text = text[:start] + piece + text[end:]
    content = text.encode("utf-8", "surrogatepass")
    if draw(st.integers(0, 9)) == 0:
        at = draw(st.integers(0, len(content)))
        content = content[:at] + draw(st.binary(max_size=4)) + content[at + 2 :]
    return content


@hypothesis_settings(max_examples=MUTATIONS, deadline=1000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=mutated())
def test_a_mutated_file_is_read_or_refused_with_places(tmp_path, content):
    path = tmp_path / "rules.yaml"
    path.write_bytes(content)
    try:
        load(path)
    except RulesError as error:
        assert error.problems
        for problem in error.problems:
            assert problem.code in CODES
            assert problem.line >= 0
            assert all(letter.isprintable() or letter in "\n\t" for letter in str(problem))
