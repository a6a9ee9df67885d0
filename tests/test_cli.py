"""The command line as a stranger uses it: what is printed where, the exit status, and how fast `check` answers."""

import dataclasses
import gc
import io
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

import precisionpass
from precisionpass import cli
from precisionpass.errors import PrecisionPassError
from precisionpass.rules import presets
from precisionpass.rules.schema import schema_text

GOOD = """
class Model:
    def named_modules(self):
        return []

print("noise while loading")

def plain():
    print("noise while building")
    return Model()

def with_args():
    return Model(), (1, 2)

def with_kwargs():
    return Model(), [1], {"mask": None}
"""


@dataclasses.dataclass(frozen=True)
class Record:
    module: str


@dataclasses.dataclass(frozen=True)
class FakeReport:
    sites: tuple = (Record("model.layers.0.attn"), Record("model.layers.1.attn"), Record("norm"))
    near_misses: tuple = ()
    failed_expectations: tuple = ()

    def text(self):
        return f"sites: {', '.join(site.module for site in self.sites)}\n"

    def only(self, wanted):
        return dataclasses.replace(self, sites=tuple(site for site in self.sites if wanted(site.module)))

    def full_text(self):
        return f"in full: {', '.join(site.module for site in self.sites)}\n"

    def to_json(self):
        return json.dumps([site.module for site in self.sites]) + "\n"

    def save(self, folder):
        Path(folder).mkdir()


@pytest.fixture
def explained(monkeypatch, tmp_path):
    """Stands for precisionpass.api: what explain was called with, and the report it gives."""
    api = ModuleType("precisionpass.api")
    api.calls, api.report = [], FakeReport()

    def explain(model, **given):
        print("noise while tracing")
        api.calls.append({"model": model, **given})
        return api.report

    api.explain = explain
    monkeypatch.setitem(sys.modules, "precisionpass.api", api)
    monkeypatch.setattr(precisionpass, "api", api, raising=False)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.delitem(sys.modules, "my_model", raising=False)
    monkeypatch.chdir(tmp_path)
    Path("my_model.py").write_text(GOOD)
    return api


def explain(*arguments):
    return cli.main(["explain", *arguments])


def test_explain_prints_the_report_and_nothing_else(explained, capsys):
    assert explain("my_model.py:plain", "--rules", "stable-bf16") == 0
    out, err = capsys.readouterr()
    assert out == "sites: model.layers.0.attn, model.layers.1.attn, norm\n"
    assert err.splitlines() == ["noise while loading", "noise while building", "noise while tracing"]
    (call,) = explained.calls
    assert sorted(call) == ["model", "rules"]
    Path("my_model.py").write_text(GOOD + "parts = {'sites': [1]}")
    assert explain("my_model.py:plain", "--rules", "off", "--own", "parts") == 0
    assert explained.calls[1]["sites"] == [1]
    assert (type(call["model"]).__name__, call["rules"].name) == ("Model", "stable-bf16")


def test_a_factory_may_give_arguments(explained):
    explain("my_model.py:with_args", "--rules", "off")
    explain("my_model.py:with_kwargs", "--rules", "off")
    first, second = explained.calls
    assert first["args"] == (1, 2)
    assert (second["args"], second["kwargs"]) == ([1], {"mask": None})


def test_json_review_and_site(explained, capsys):
    assert explain("my_model.py:plain", "--rules", "off", "--json", "--review", "review", "--site", "**.attn") == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == ["model.layers.0.attn", "model.layers.1.attn"]
    assert Path("review").is_dir()
    assert "review written to review" in err


def test_one_site_is_shown_in_full(explained, capsys):
    assert explain("my_model.py:plain", "--rules", "off", "--site", "norm") == 0
    assert capsys.readouterr().out == "in full: norm\n"


@pytest.mark.parametrize("site", ["model.layers.{0-1}.attn", "re:model.layers.[01]{1}.attn", "**.layers.{1,0}.*"])
def test_a_site_as_the_review_prints_it(explained, capsys, site):
    assert explain("my_model.py:plain", "--rules", "off", "--json", "--site", site) == 0
    assert json.loads(capsys.readouterr().out) == ["model.layers.0.attn", "model.layers.1.attn"]


def test_an_expectation_that_fails_is_status_1(explained, capsys):
    explained.report = FakeReport(failed_expectations=("expected 4 attention sites, found 3",))
    assert explain("my_model.py:plain", "--rules", "off", "--json") == 1
    assert "expectation failed: expected 4 attention sites, found 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("site", "message"),
    [
        ("nrom", 'PP126 no site lies in the module "nrom"\n  why: sites were found in: model.layers.0.attn, '
         'model.layers.1.attn, norm\n  fix: did you mean "norm"?'),
        ("**.zzz", 'PP126 no site lies in the module "**.zzz"\n  why: sites were found in: model.layers.0.attn, '
         'model.layers.1.attn, norm\n  fix: give a module name, or a pattern such as "**.self_attn"'),
        ("x.{0-3}.y", 'PP126 no site lies in the module "x.{0-3}.y"\n  why: sites were found in: model.layers.0.attn, '
         'model.layers.1.attn, norm\n  fix: give a module name, or a pattern such as "**.self_attn"'),
        ("x.{0-99999}", 'PP126 --site "x.{0-99999}" cannot be used: its numbers stand for more than 10000 names'),
        ("a..b", 'PP126 --site "a..b" cannot be used: two dots meet, or a dot is first or last'),
    ],
)  # fmt: skip
def test_a_site_that_is_not_there(explained, capsys, site, message):
    assert explain("my_model.py:plain", "--rules", "off", "--site", site) == 2
    assert message in capsys.readouterr().err


def test_a_wrong_factory_is_status_2(explained, capsys):
    assert explain("my_model.py:plian", "--rules", "off") == 2
    assert "PP122 my_model.py has no function plian" in capsys.readouterr().err
    assert not explained.calls


def test_bad_rules_are_refused_before_the_file_runs(explained, capsys):
    assert explain("my_model.py:plain", "--rules", "stable") == 2
    assert capsys.readouterr().err == 'PP109 no preset is called "stable"; did you mean "stable-bf16"?\n'


def test_an_error_of_the_pass_is_status_2_and_a_crash_is_status_3(explained, capsys):
    def refuses(model, **given):
        raise PrecisionPassError("refused", fix="do this")

    def crashes(model, **given):
        raise RuntimeError("a defect")

    explained.explain = refuses
    assert explain("my_model.py:plain", "--rules", "off") == 2
    assert "refused\n  fix: do this\n" in capsys.readouterr().err
    explained.explain = crashes
    assert explain("my_model.py:plain", "--rules", "off") == 3
    assert "RuntimeError: a defect" in capsys.readouterr().err


def test_progress_is_drawn_on_terminals_only(explained, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    for stream, drawn in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stderr", stream)
        assert explain("my_model.py:plain", "--rules", "off") == 0
        assert ("finding sites" in stream.getvalue()) is drawn


def test_check(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("good.yaml").write_text("version: 1\nextends: stable-bf16\nrules: [{id: softmax-fp32, enabled: false}]\n")
    Path("bad.yaml").write_text("version: 1\nrulez: []\non_refused: 3\n")
    assert cli.main(["check", "good.yaml", "off"]) == 0
    assert capsys.readouterr().out == (
        "good.yaml: good, 2 rules (attention-unbiased, norms-fp32)\noff: good, 0 rules, changes nothing\n"
    )
    assert cli.main(["check", "bad.yaml", "good.yaml", "no.yaml"]) == 2
    out, err = capsys.readouterr()
    assert out == "good.yaml: good, 2 rules (attention-unbiased, norms-fp32)\n"
    assert err == (
        'bad.yaml:2:1 PP103 unknown key "rulez"; did you mean "rules"?\n    rulez: []\n    ^\n'
        'bad.yaml:3:13 PP105 3 is no choice for "on_refused"; choose "warn", "error" or "keep"\n'
        "    on_refused: 3\n                ^\n"
        "bad.yaml: 2 problems\n"
        'PP100 the file "no.yaml" cannot be read: it does not exist\nno.yaml: 1 problem\n'
    )


def test_check_leaves_the_process_as_it_was(capsys):
    environment = dict(os.environ)
    assert cli.main(["check", "stable-bf16"]) == 0
    assert gc.isenabled()
    assert dict(os.environ) == environment


def test_show(capsys):
    assert cli.main(["show"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(presets.names())
    assert cli.main(["show", "watch"]) == 0
    assert capsys.readouterr().out == presets.text("watch")
    assert cli.main(["show", "wacht"]) == 2
    assert capsys.readouterr().err == 'PP109 no preset is called "wacht"; did you mean "watch"?\n'


def test_schema(capsys):
    assert cli.main(["schema"]) == 0
    assert capsys.readouterr().out == schema_text()


@pytest.mark.parametrize("arguments", [[], ["chek"], ["check"], ["explain", "a.py:b"], ["show", "--no"]])
def test_wrong_usage_is_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as raised:
        cli.main(arguments)
    assert raised.value.code == 2
    assert capsys.readouterr().err.startswith("usage: precisionpass")


def fresh(*command: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, **options)


def test_a_closed_pipe_is_no_error():
    command = f"{sys.executable} -m precisionpass schema | head -c 10"
    ran = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_check_imports_nothing_heavy():
    code = "import sys; from precisionpass import cli; cli.main(['check', 'stable-bf16']); print(*sys.modules)"
    ran = fresh("-c", code)
    loaded = {name.partition(".")[0] for name in ran.stdout.splitlines()[-1].split()}
    assert "pydantic" in loaded
    assert not loaded & {"torch", "sympy", "rich", "numpy", "jinja2", "triton"}


def test_check_answers_in_a_quarter_of_a_second(tmp_path):
    """The best of fifteen, compiled files in place as after the first use: a busy machine only ever adds to it.

    Waiting is not ours either: the processor time, which includes no waiting, is what must hold.
    """
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(tmp_path)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    check = ("-m", "precisionpass", "check", "stable-bf16")
    assert fresh(*check, env=environment).returncode == 0
    measured = []
    for _ in range(15):
        start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        fresh(*check, env=environment)
        wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
        measured.append((wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime))
    wall, processor = (min(one) for one in zip(*measured, strict=True))
    assert min(wall, processor) <= 0.25, f"wall {wall:.3f} s, processor {processor:.3f} s"
