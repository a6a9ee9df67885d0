"""Files that look right to an eye, another YAML or Python, and are not; and some that look wrong and are right."""

import os
import time

import pytest

from precisionpass import cli
from precisionpass.errors import RulesError
from precisionpass.rules import load
from precisionpass.rules.codes import CODES
from precisionpass.rules.lint import lint
from precisionpass.rules.resolved import resolved_text


def apply(settings, match="op: attention"):
    return f"version: 1\nrules: [{{id: a, match: {{{match}}}, apply: {{{settings}}}}}]"


def where(text):
    return apply("lowering: auto", f"op: attention, where: {text}")


def module(text):
    return apply("lowering: auto", f"op: attention, module: {text}")


REFUSED = {
    # numbers that are none
    "version: true": "PP114", "version: 1.0": "PP114", "version: '1'": "PP114", "version: 0x1": "PP114",
    "version: 01": "PP114", "version: 1_0": "PP114", "version: [1]": "PP114",
    "version: \u0661": "PP114",
    apply("output_clip: .nan"): "PP104", apply("output_clip: .inf"): "PP104", apply("output_clip: 1:30"): "PP104",
    apply("output_clip: 1_000"): "PP104", apply("output_clip: 2001-01-01"): "PP104",
    apply("output_clip: true"): "PP104",
    apply("output_clip: 1e-999"): "PP104", apply("output_clip: 1e301"): "PP104", apply("output_clip: '3'"): "PP104",
    apply("row_max_shift: {beta: .nan}"): "PP104", apply("row_max_shift: false"): "PP104",
    "version: 1\nexpect: [{sites: true}]": "PP104", "version: 1\nexpect: [{sites: 99999999999999999999}]": "PP104",
    # keys of Python's, of pydantic's, and of look-alikes
    "version: 1\n__class__: 3": "PP103", "version: 1\nmodel_config: {extra: allow}": "PP103",
    "version: 1\nrules: [{id: a, enabled: false, _origin: 3}]": "PP103",
    apply("lowering: auto", "op: attention, class_: A"): "PP103",
    apply("lowering: auto", "op: attention, predicate: os.system"): "PP104",
    "version: 1\nr\u0443les: []": "PP103", "version: 1\nru\u200bles: []": "PP103",
    apply("lowering: auto", "op: \u0430ttention"): "PP105", 'version: 1\n"a\\e[31mb": 3': "PP103",
    "version: 1\ntrue: 3": "PP103", "version: 1\n~: 3": "PP103", "version: 1\n'': 3": "PP103",
    'version: 1\nrules: [{id: "a\\n", enabled: false}]': "PP104", "version: 1\n<<: [a, b]": "PP103",
    # files that are not beside this one
    "version: 1\nextends: ../../../../etc/passwd": "PP109", "version: 1\nextends: http://x/y.yaml": "PP109",
    "version: 1\nextends: ~/x.yaml": "PP109", 'version: 1\nextends: "a\\0.yaml"': "PP109",
    f"version: 1\nextends: {'a/' * 3000}b.yaml": "PP109", f"version: 1\nextends: {'b' * 300}.yaml": "PP109",
    "version: 1\nextends: ./././rules.yaml": "PP109", "version: 1\nextends: C:\\x.yaml": "PP109",
    "version: 1\nextends: loop.yaml": "PP109", "version: 1\nextends: pipe.yaml": "PP109",
    "version: 1\nextends: folder.yaml": "PP109",
    # conditions that only Python would read
    where('"(lambda: 1)() > seq_q"'): "PP108", where('"(x := seq_q) > 1"'): "PP108", where('"*seq_q"'): "PP108",
    where('"(yield) > seq_q"'): "PP108", where('"any(x for x in y)"'): "PP108", where('"seq_q > 1j"'): "PP108",
    where('"__debug__ and causal"'): "PP108", where('"causal; masked"'): "PP108", where('"..."'): "PP108",
    where("\"dtype == b'x'\""): "PP108", where("\"dtype == f'x'\""): "PP108", where('"seq_q @ seq_k > 1"'): "PP108",
    where('"-causal"'): "PP108", where('"~causal"'): "PP108", where('"seq_q in (1 in (2, 3), 4)"'): "PP108",
    where(f'"{"9223372036854775807*" * 30}seq_q > 0"'): "PP108", where('"seq_q > \u22121"'): "PP108",
    where('"seq_q\\0 > 1"'): "PP108", where('"seq_q\\_> 1"'): "PP108", where("[a, b]"): "PP104",
    # patterns that match nothing, or for ever
    module("'a[b'"): "PP111", module("'[z-a]'"): "PP111", module("'re:.*.*.*.*.*.*x'"): "PP111",
    module("'re:(a|aa)+b'"): "PP111", module("'re:(a?)*b'"): "PP111", module("'re:(a{1,100}){1,100}'"): "PP111",
    module("'re:(a)?(?(1)b|c)'"): "PP111", module("'re:[a-z&&[b]]'"): "PP111", module("'**a'"): "PP111",
    # not text, or another language
    b"version: 1 # \xc0\xaf": "PP100", b"version: 1 # \xed\xa0\x80": "PP100", b"version: 1 # \xe2\x82": "PP100",
    b"\x1f\x8b\x08\x00": "PP100", "version: 1\n\f": "PP100", "version: 1 # \x7f": "PP100",
    "version = 1\n[rules]\n": "PP104", "import os\nos.system('x')\n": "PP104", "%YAML 9.9\n---\nversion: 1": "PP101",
    "%TAG ! tag:yaml.org,2002:python/\n---\nversion: !object/apply:os.system [1]": "PP113",
    "version: !!binary MQ==": "PP113", "version: !<tag:yaml.org,2002:int> 1": "PP113",
    "version: 1\n...\ngarbage: [": "PP101",
}  # fmt: skip
READ = {
    b"\xef\xbb\xbfversion: 1\n", b"version: 1\rrules: []\r", "version: 1\r\n\r\n\rrules: []\n\r", "---\nversion: 1\n",
    "version: 1\n...\n", '{"version": 1, "rules": []}', "#!/bin/sh\nversion: 1\n", "version: 1\u2028rules: []",
    apply("row_max_shift: off, delta: output"), where('"seq_q in (1,)"'), where('"1 < seq_q in (2, 3)"'),
    module("'re:[*+?]{3}'"), "version: 1\n...\n# the end\n",
    where(f'"seq_q in ({",".join(map(str, range(390)))})"'), module("'layers.[!0-3].x[_a]'"),
    f"version: 1\nrules: [{{id: a, match: {{op: [{'attention, ' * 1000}softmax]}}, apply: {{lowering: auto}}}}]",
    "version: 1\nrules: [{id: a, because: 'x\u202ey', enabled: false}]",
    "version: 1\nextends: [off, off, off]",
}  # fmt: skip
READ = sorted(text if isinstance(text, bytes) else text.encode() for text in READ)


@pytest.fixture
def path(tmp_path):
    """Where the file stands: beside a link to itself, a pipe, and a folder of a file's name."""
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "folder.yaml").mkdir()
    return tmp_path / "rules.yaml"


@pytest.mark.parametrize(("text", "code"), REFUSED.items(), ids=lambda value: ascii(value)[:60])
def test_refused_at_once(path, text, code):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    start = time.perf_counter()
    with pytest.raises(RulesError) as raised:
        load(path)
    assert time.perf_counter() - start < 1
    assert raised.value.problems[0].code == code and code in CODES
    assert all(letter.isprintable() or letter in "\n\t" for letter in str(raised.value))


@pytest.mark.parametrize("content", READ, ids=lambda value: ascii(value)[:60])
def test_read(path, content):
    path.write_bytes(content)
    loaded = load(path)
    lint(loaded)
    assert resolved_text(loaded).isascii()


@pytest.mark.parametrize("name", ["\udcff.yaml", "\x1b[2J.yaml", "a\nb.yaml"])
def test_names_that_a_terminal_must_not_see(tmp_path, name, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text("version: 1\n")
    assert cli.main(["check", name]) == cli.main(["lint", name]) == 0
    (tmp_path / name).write_text("version: 2\n")
    assert cli.main(["check", name]) == 2
    out, err = capsys.readouterr()
    assert all(letter.isprintable() or letter == "\n" for letter in out + err)
    assert len(out.splitlines()) == 2
