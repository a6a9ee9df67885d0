"""The command line: explain a model, compare reviews, check, lint and show rules.

Exit status: 0 all is well, 1 an expectation failed, lint found something or two reviews differ, 2 the input cannot be
used, 3 a defect of this package or of the model while it was traced (with the traceback).

Imports stand inside the commands here, and only here: `check` must answer without torch, and rich is only for drawing.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import gc
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

from precisionpass.errors import PrecisionPassError, RulesError, printable

FINE, EXPECTATION_FAILED, BAD_INPUT, DEFECT = 0, 1, 2, 3
FINDINGS = 1
DEVICES = ("cpu", "cuda", "mps", "xpu")
_PLUGINS = "PYDANTIC_DISABLE_PLUGINS"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status is returned. Messages go to stderr, results to stdout."""
    options = _parser().parse_args(arguments)
    try:
        return options.command(options)
    except PrecisionPassError as error:
        print(error, file=sys.stderr)
        return BAD_INPUT
    except BrokenPipeError:
        # Whoever read our output has seen enough; nothing more may be flushed to it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FINE
    except KeyboardInterrupt:
        return 130
    except Exception:  # noqa: BLE001  the status of a crash must not be that of a failed expectation
        traceback.print_exc()
        return DEFECT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "precisionpass", description="Attention, softmax and norms in safe precision, by rules."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    explain = commands.add_parser("explain", help="what the rules would do to a model; nothing is changed")
    explain.add_argument(
        "target",
        metavar="FILE.py:FACTORY",
        help="a function without arguments; returns model, (model, args) or (model, args, kwargs)",
    )
    explain.add_argument("--rules", required=True, metavar="R", help="a preset or a rules file")
    explain.add_argument("--own", metavar="NAME", help="a dict in FILE.py with sites and actions of your own")
    explain.add_argument("--review", metavar="DIR", help="also write the whole review into this folder")
    explain.add_argument("--json", action="store_true", help="print JSON instead of text")
    explain.add_argument(
        "--site", metavar="NAME", help="only these modules' sites, in full: a name, a pattern, or h.{0-3}.attn"
    )
    explain.add_argument(
        "--measure", action="store_true", help="also run each kind of rewritten site alone, against float64"
    )
    explain.set_defaults(command=_explain)

    diff = commands.add_parser("diff", help="what changed between two reviews; status 1 where anything did")
    diff.add_argument("a", metavar="A", help="a review folder, or its report.json")
    diff.add_argument("b", metavar="B", help="another")
    diff.add_argument("--html", metavar="FILE", help="also write it as a page")
    diff.set_defaults(command=_diff)

    check = commands.add_parser("check", help="check rules files; every problem with its line and column")
    check.add_argument("rules", nargs="+", metavar="R", help="a rules file or a preset")
    check.set_defaults(command=_check)

    lint = commands.add_parser("lint", help="find rules without effect, and patterns that match no module of a model")
    lint.add_argument("rules", metavar="R", help="a rules file or a preset")
    lint.add_argument("--model", metavar="FILE.py:FACTORY", help="the model to hold module patterns against")
    lint.add_argument("--device", metavar="D", choices=DEVICES, help=f"where it is to run: {', '.join(DEVICES)}")
    lint.set_defaults(command=_lint)

    show = commands.add_parser("show", help="print a preset; without a name, list them")
    show.add_argument("preset", nargs="?", metavar="PRESET")
    show.set_defaults(command=_show)

    schema = commands.add_parser("schema", help="print the JSON Schema of rules files, for editors")
    schema.set_defaults(command=_schema)
    return parser


def _check(options: argparse.Namespace) -> int:
    with _quickly():
        return _check_all(options.rules)


def _check_all(names: Sequence[str]) -> int:
    from precisionpass.rules.load import load

    status = FINE
    for given in names:
        name = printable(given)
        try:
            rules = load(given)
        except RulesError as error:
            print(error, file=sys.stderr)
            count = len(error.problems)
            print(f"{name}: {count} problem{'s' if count > 1 else ''}", file=sys.stderr)
            status = BAD_INPUT
            continue
        active = [rule.id for rule in rules.rules if rule.enabled]
        counted = f"{len(active)} rule{'' if len(active) == 1 else 's'}"
        print(f"{name}: good, {counted}{' (' + ', '.join(active) + ')' if active else ', changes nothing'}")
    return status


def _lint(options: argparse.Namespace) -> int:
    from precisionpass.rules.lint import Modules, lint
    from precisionpass.rules.load import load
    from precisionpass.target import load_model, split_target

    rules, modules = load(options.rules), None
    if options.model:
        path, name = split_target(options.model)
        with _progress(f"loading {options.model}"), contextlib.redirect_stdout(sys.stderr):
            modules = Modules.of(load_model(path, name)["model"])
    findings = lint(rules, modules, options.device or "")
    for finding in findings:
        print(finding)
    count = len(findings)
    print(f"{printable(options.rules)}: {f'{count} finding' + 's' * (count > 1) if findings else 'nothing found'}")
    return FINDINGS if findings else FINE


def _show(options: argparse.Namespace) -> int:
    from precisionpass.rules import presets

    if options.preset is None:
        for name in presets.names():
            print(f"{name:<18}{presets.summary(name)}")
        return FINE
    print(presets.text(options.preset), end="")
    return FINE


def _schema(options: argparse.Namespace) -> int:
    from precisionpass.rules.schema import schema_text

    print(schema_text(), end="")
    return FINE


def _explain(options: argparse.Namespace) -> int:
    from precisionpass.rules.load import load
    from precisionpass.target import load_model, split_target

    rules = load(options.rules)  # bad rules are refused before torch is loaded and before the user's file runs
    path, name = split_target(options.target)
    with _progress(f"loading {options.target}"), contextlib.redirect_stdout(sys.stderr):
        from precisionpass import api

        given = load_model(path, name, options.own)
    with _progress("finding sites"), contextlib.redirect_stdout(sys.stderr):
        report = api.explain(**given, rules=rules, **({"measure": True} if options.measure else {}))
    if options.review:
        report.save(options.review)
        print(f"review written to {options.review}", file=sys.stderr)
    shown = _only(report, options.site) if options.site else report
    text = shown.full_text if options.site else shown.text
    sys.stdout.write(shown.to_json() if options.json else text())
    if options.json:
        for sentence in report.failed_expectations:
            print(f"expectation failed: {sentence}", file=sys.stderr)
    return EXPECTATION_FAILED if report.failed_expectations else FINE


def _diff(options: argparse.Namespace) -> int:
    from precisionpass.review.compare import compare
    from precisionpass.review.files import write_file
    from precisionpass.review.load import load_review

    comparison = compare(load_review(options.a), load_review(options.b))
    if options.html:
        write_file(options.html, comparison.html())
        print(f"page written to {options.html}", file=sys.stderr)
    sys.stdout.write(comparison.text())
    return FINDINGS if comparison.differs else FINE


def _only(report: Any, name: str) -> Any:
    """The report cut down to the modules that a name or pattern matches, folded as the review prints it or not."""
    from precisionpass.review.folding import unfold
    from precisionpass.rules.nearest import did_you_mean, shown
    from precisionpass.rules.pattern import PatternError, check_pattern, matches

    try:
        patterns = [check_pattern(one) for one in ([name] if name.startswith("re:") else unfold(name))]
    except (PatternError, ValueError) as error:
        raise PrecisionPassError(f"--site {shown(name)} cannot be used: {error}", code="PP126") from None
    found = report.only(lambda module: any(matches(pattern, module) for pattern in patterns))
    if not found.sites and not found.near_misses:
        modules = sorted({record.module for record in (*report.sites, *report.near_misses)})
        listed = ", ".join(modules[:8]) + (f" and {len(modules) - 8} more" if len(modules) > 8 else "")
        raise PrecisionPassError(
            f"no site lies in the module {shown(name)}",
            why=f"sites were found in: {listed}" if modules else "no site was found in this model",
            fix=did_you_mean(name, modules) or 'give a module name, or a pattern such as "**.self_attn"',
            code="PP126",
        )
    return found


@contextlib.contextmanager
def _progress(what: str) -> Iterator[None]:
    """A turning sign on stderr while something long runs; nothing where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(f"{what} ..."):
        yield


@contextlib.contextmanager
def _quickly() -> Iterator[None]:
    """Without what a short command can do without: collecting garbage, now and at exit, and pydantic's plugins."""
    atexit.register(gc.freeze)
    was_collecting, plugins = gc.isenabled(), os.environ.get(_PLUGINS)
    gc.disable()
    os.environ[_PLUGINS] = "__all__"
    try:
        yield
    finally:
        if was_collecting:
            gc.enable()
        if plugins is None:
            del os.environ[_PLUGINS]
        else:
            os.environ[_PLUGINS] = plugins
