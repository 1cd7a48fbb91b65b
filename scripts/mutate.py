"""Change the code by machine, one small change at a time, and see who notices.

    python scripts/mutate.py --sample 300 --days 200              # the simulator
    python scripts/mutate.py --sample 300 --days 200 --tests      # and the tests, for survivors

A mutant is one change at one place: a comparison, a boolean, a number, an operator, a condition, or
a call whose result is not used. The seed fixes the sample. Each mutant has a process of its own,
which compiles the changed module in memory, so no file is ever changed, and plays simulated days
until an invariant breaks. A mutant that cannot be imported, raises out of the simulator or exceeds
the time limit is noticed too.

Days are deterministic, so a day on which the changed expression gives what the original gives
cannot notice the change. Which days those are is recorded first, with one play of every day:
each place of the sample counts how often its change would make a difference. Only the other days
are played, those with the highest counts first. A change of what is executed at import counts as a
difference on every day.

The sample of a seed changes with every change of the code. ``--of COMMIT`` takes it from an earlier
version and seeks each change in the present code, by function, statement and text; changes that
are no longer there are left out.

The table goes to ``reports/mutation.md``. Each result is kept in ``reports/mutation.jsonl``, the
recording in ``reports/mutation-days.json``: a run that was stopped goes on where it was. Remove
both files after a change of the code; results of mutants that were noticed may stay.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import io
import json
import operator
import os
import resource
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any, Final, NamedTuple

_ROOT: Final = Path(__file__).resolve().parent.parent
_SOURCE: Final = _ROOT / "src"
_PLACES: Final = (
    *("core", "services", "worker", "client", "leases"),
    *("adapters/store/memory", "adapters/locks/memory.py"),
)
_TESTS: Final = (
    *("tests/core", "tests/services", "tests/contract", "tests/worker", "tests/client"),
    *("tests/leases", "tests/gateway"),
)
_PYTEST: Final = (
    *("-p", "no:cacheprovider"),
    *("-m", "not soak and not bench and not chaos and not alone"),
)
_TEXT_MAX: Final = 60
_COMPARED: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_COMPUTED: Final[dict[type[ast.operator], type[ast.operator]]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.Mult,
}

_OPERATORS: Final[dict[type[ast.AST], Callable[[Any, Any], Any]]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda one, other: one in other,
    ast.NotIn: lambda one, other: one not in other,
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
}
_SWAPPED: Final[dict[type[ast.AST], type[ast.AST]]] = dict([*_COMPARED.items(), *_COMPUTED.items()])
_FIRST_DAYS: Final = 12
"""Days that each mutant is given before those that are left are given the others."""
_DAY_CPU_S: Final = 20
"""Processor time of one day, which takes half a second. Time on the clock says nothing: the
process may be paused while others measure."""
_MEMORY_BYTES: Final = 4 << 30
_EVERY_DAY: Final = -1
"""Stands for the count of a place that is executed at import."""


class Place(NamedTuple):
    """One change: the node in the order of ``ast.walk``, and what is done to it."""

    file: str
    node: int
    line: int
    before: str
    after: str


# ── Changes ──────────────────────────────────────────────────────────────────────────────────────


def changed(node: ast.AST) -> ast.AST | None:
    """The node with one small change; ``None`` if there is none to make."""
    new = deepcopy(node)
    match new:
        case ast.Compare(ops=[op]) if type(op) in _COMPARED:
            new.ops = [_COMPARED[type(op)]()]
            return new
        case ast.BoolOp(op=op):
            new.op = ast.Or() if isinstance(op, ast.And) else ast.And()
            return new
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return operand
        case ast.BinOp(op=op) if type(op) in _COMPUTED and not _is_text(new):
            new.op = _COMPUTED[type(op)]()
            return new
        case ast.Constant(value=bool(value)):
            return ast.Constant(not value)
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            return ast.Constant(value + 1)
        case ast.If(test=test):
            new.test = ast.UnaryOp(ast.Not(), test)
            return new
        case ast.Expr(value=ast.Call() | ast.Await()):
            return ast.Pass()
        case _:
            return None


def _is_text(node: ast.BinOp) -> bool:
    return any(
        isinstance(side, ast.JoinedStr | ast.Tuple | ast.List)
        or (isinstance(side, ast.Constant) and isinstance(side.value, str))
        for side in (node.left, node.right)
    )


def places(name: str, text: str) -> Iterator[Place]:
    """Every change that can be made in a file."""
    tree = ast.parse(text)
    skipped = _unseen(tree)
    for number, node in enumerate(ast.walk(tree)):
        if id(node) in skipped:
            continue
        new = changed(node)
        if new is not None:
            yield Place(name, number, getattr(node, "lineno", 0), _text(node), _text(new))


def _unseen(tree: ast.AST) -> set[int]:
    """Nodes that are not executed, or only checked: annotations, log lines, texts for people."""
    unseen: set[int] = set()
    for node in ast.walk(tree):
        parts: list[ast.AST | None] = []
        match node:
            case ast.arg(annotation=annotation) | ast.AnnAssign(annotation=annotation):
                parts = [annotation]
            case ast.FunctionDef(returns=returns) | ast.AsyncFunctionDef(returns=returns):
                parts = [returns, *node.decorator_list]
            case ast.If(test=ast.Name(id="TYPE_CHECKING")) | ast.Assert():
                parts = [node]
            case ast.Expr(value=ast.Call(func=ast.Name(id="log_event"))):
                parts = [node]
            case ast.JoinedStr() | ast.Subscript(value=ast.Name(id="Annotated")):
                parts = [node]
            case _:
                continue
        for part in parts:
            if part is not None:
                unseen.update(id(each) for each in ast.walk(part))
    return unseen


def _text(node: ast.AST) -> str:
    whole = ast.unparse(node.test) if isinstance(node, ast.If) else ast.unparse(node)
    line = " ".join(whole.split())
    return line if len(line) <= _TEXT_MAX else f"{line[: _TEXT_MAX - 3]}..."


def sources(commit: str | None) -> dict[str, str]:
    """The texts of the files that mutants change, of a commit or as they are."""
    if commit is None:
        return {str(each.relative_to(_SOURCE)): each.read_text() for each in _files(_SOURCE)}
    done = subprocess.run(  # noqa: S603 - our own repository
        ["git", "archive", commit, "src"],  # noqa: S607 - whichever git there is
        capture_output=True,
        check=True,
        cwd=_ROOT,
    )
    with TemporaryDirectory() as folder, tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
        old = Path(folder) / "src"
        return {str(each.relative_to(old)): each.read_text() for each in _files(old)}


def _files(source: Path) -> list[Path]:
    files: list[Path] = []
    for place in _PLACES:
        at = source / "stanchion" / place
        files += [at] if at.is_file() else sorted(at.rglob("*.py"))
    return files


def sample(count: int, seed: int, commit: str | None = None) -> list[Place]:
    """The mutants of a seed."""
    texts = sources(commit)
    every = [place for name, text in texts.items() for place in places(name, text)]
    chosen = Random(seed).sample(every, min(count, len(every)))  # noqa: S311 - to be foreseen
    if commit is not None:
        chosen = sought(chosen, texts)
    return sorted(chosen, key=lambda each: (each.file, each.line, each.node))


def sought(chosen: Sequence[Place], texts: dict[str, str]) -> list[Place]:
    """Those of the changes of other texts that are in the present code, as they are there.

    A change whose function or statement is no longer there is sought by its text alone: it has
    moved if one place of the file has this text.
    """
    now = sources(None)
    there: list[Place] = []
    for file in sorted({each.file for each in chosen} & set(now)):
        old, new = _named(file, texts[file]), _named(file, now[file])
        by_name = {name: place for place, name in new.items()}
        for place in (each for each in chosen if each.file == file):
            alike = [each for each in new if each[3:] == place[3:]]
            found = by_name.get(old[place]) or (alike[0] if len(alike) == 1 else None)
            if found is not None:
                there.append(found)
    return there


def _named(file: str, text: str) -> dict[Place, tuple[str | int, ...]]:
    """Names of changes without lines: function, statement, text, and which of those it is."""
    outer: dict[int, tuple[str, str]] = {}

    def descend(node: ast.AST, function: str, statement: str) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            function = f"{function}.{node.name}"
        if isinstance(node, ast.stmt):
            statement = ast.unparse(node).partition("\n")[0]
        outer[id(node)] = (function, statement)
        for child in ast.iter_child_nodes(node):
            descend(child, function, statement)

    tree = ast.parse(text)
    descend(tree, "", "")
    nodes = list(ast.walk(tree))
    seen: Counter[tuple[str, ...]] = Counter()
    found: dict[Place, tuple[str | int, ...]] = {}
    for place in places(file, text):
        name = (*outer[id(nodes[place.node])], place.before, place.after)
        seen[name] += 1
        found[place] = (*name, seen[name])
    return found


# ── One mutant, in a process of its own ──────────────────────────────────────────────────────────


class _Rewritten(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports modules with their trees rewritten."""

    def __init__(self, rewrite: dict[str, Callable[[ast.Module], ast.Module]]) -> None:
        self._rewrite = {_module_of(file): (file, how) for file, how in rewrite.items()}
        self.names: dict[str, Any] = {}
        """Names that rewritten modules use."""

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        if name not in self._rewrite:
            return None
        file = _SOURCE / self._rewrite[name][0]
        packages = [str(file.parent)] if file.name == "__init__.py" else None
        return importlib.util.spec_from_file_location(
            name, file, loader=self, submodule_search_locations=packages
        )

    def exec_module(self, module: ModuleType) -> None:
        name, rewrite = self._rewrite[module.__name__]
        file = _SOURCE / name
        tree = ast.fix_missing_locations(rewrite(ast.parse(file.read_text())))
        vars(module).update(self.names)
        exec(compile(tree, str(file), "exec"), vars(module))  # noqa: S102 - our own code, changed


def _module_of(file: str) -> str:
    parts = Path(file).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _mutated(place: Place) -> _Rewritten:
    """Imports the module of a place with its change."""

    def change(tree: ast.Module) -> ast.Module:
        old = next(node for number, node in enumerate(ast.walk(tree)) if number == place.node)
        new = changed(old)
        assert new is not None
        swapped: ast.Module = _Swap(old, new).visit(tree)
        return swapped

    return _Rewritten({place.file: change})


class _Swap(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self._old, self._new = old, new

    def visit(self, node: ast.AST) -> Any:  # noqa: ANN401 - as in the class it is from
        return ast.copy_location(self._new, node) if node is self._old else self.generic_visit(node)


def play_one(place: Place, days: Sequence[int]) -> dict[str, Any]:
    """Play days with the mutant: the one on which it was noticed, by what, and their digests."""
    sys.meta_path.insert(0, _mutated(place))
    digests: dict[int, str] = {}
    try:
        _import_days()
        for day in days:
            told = _in_fork(partial(_play, day))
            if told["by"]:
                return {"day": day, "by": told["by"], "played": len(digests) + 1}
            digests[day] = told["digest"]
    except Exception as error:  # noqa: BLE001 - whatever it is, it was noticed
        return {"day": None, "by": f"import raised {type(error).__name__}", "played": 0}
    return {"day": None, "by": "", "played": len(digests), "digests": digests}


def _import_days() -> None:
    import stanchion.sim.scenario  # noqa: PLC0415 - with the change
    import stanchion.sim.world  # noqa: F401, PLC0415 - likewise

    # Collecting what was imported would copy its pages in every fork.
    gc.freeze()


def _play(day: int) -> dict[str, Any]:
    from stanchion.sim.scenario import draw  # noqa: PLC0415 - with the change
    from stanchion.sim.world import play  # noqa: PLC0415 - likewise

    try:
        verdict = play(draw(day))
    except Exception as error:  # noqa: BLE001 - whatever it is, it was noticed
        return {"by": f"raised {type(error).__name__}"}
    broken = verdict.broken[0].partition(":")[0] if verdict.broken else ""
    return {"by": broken, "digest": verdict.digest}


def _in_fork(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Do the work of one day in a fork: no day finds what another left in the process."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            resource.setrlimit(resource.RLIMIT_CPU, (_DAY_CPU_S, _DAY_CPU_S + 5))
            resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
            # What days print is not for the table.
            sys.stdout = sys.stderr = io.StringIO()
            with os.fdopen(writing, "w") as out:
                out.write(json.dumps(work()))
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as source:
        told = source.read()
    os.waitpid(child, 0)
    found: dict[str, Any] = json.loads(told) if told else {"by": "exceeded the time limit"}
    return found


# ── Which days can notice a mutant ───────────────────────────────────────────────────────────────


class _Counting(ast.NodeTransformer):
    """Count how often the change of each place would make a difference."""

    def __init__(self, numbers: dict[int, int]) -> None:
        self._numbers = numbers
        """Numbers of mutants by the identity of their nodes."""

    def visit(self, node: ast.AST) -> Any:  # noqa: ANN401 - as in the class it is from
        if isinstance(node, ast.MatchValue):
            return node  # A pattern cannot be replaced by a call.
        number = self._numbers.get(id(node))
        self.generic_visit(node)
        if number is None:
            return node
        match node:
            case ast.Compare(left=left, ops=[how], comparators=[right]):
                return self._compared(number, how, left, right)
            case ast.BinOp(left=left, op=how, right=right):
                return self._compared(number, how, left, right)
            case ast.If(test=test):
                node.test = self._counted(number, test)
            case ast.Expr(value=value):
                node.value = self._counted(number, value)
            case ast.expr():
                return self._counted(number, node)
            case _:
                pass
        return node

    def _counted(self, number: int, value: ast.expr) -> ast.expr:
        call = ast.Call(ast.Name("__executed__", ast.Load()), [ast.Constant(number)], [])
        both = ast.Tuple([call, value], ast.Load())
        return ast.Subscript(both, ast.Constant(1), ast.Load())

    def _compared(self, number: int, how: ast.AST, left: ast.expr, right: ast.expr) -> ast.expr:
        words = [ast.Constant(number), ast.Constant(type(how).__name__), left, right]
        return ast.Call(ast.Name("__differ__", ast.Load()), words, [])


class Counts:
    """How often the change of each mutant would have made a difference."""

    def __init__(self, mutants: Sequence[Place]) -> None:
        self.of = [0] * len(mutants)
        by_file: dict[str, dict[int, int]] = {}
        for number, place in enumerate(mutants):
            by_file.setdefault(place.file, {})[place.node] = number

        def rewrite(numbers: dict[int, int]) -> Callable[[ast.Module], ast.Module]:
            def counting(tree: ast.Module) -> ast.Module:
                nodes = {
                    id(node): numbers[number]
                    for number, node in enumerate(ast.walk(tree))
                    if number in numbers
                }
                in_patterns = {
                    id(node.value) for node in ast.walk(tree) if isinstance(node, ast.MatchValue)
                }
                for each in nodes.keys() & in_patterns:
                    self.of[nodes[each]] += 1
                rewritten: ast.Module = _Counting(nodes).visit(tree)
                return rewritten

            return counting

        finder = _Rewritten({file: rewrite(numbers) for file, numbers in by_file.items()})
        finder.names = {"__executed__": self._executed, "__differ__": self._differ}
        sys.meta_path.insert(0, finder)

    def _executed(self, number: int) -> None:
        self.of[number] += 1

    def _differ(self, number: int, how: str, left: Any, right: Any) -> Any:  # noqa: ANN401
        kind = getattr(ast, how)
        self.of[number] += 1
        value = _OPERATORS[kind](left, right)
        with contextlib.suppress(Exception):
            other = _OPERATORS[_SWAPPED[kind]](left, right)
            self.of[number] -= bool(value == other)
        return value


def record(mutants: Sequence[Place], days: int) -> dict[str, Any]:
    """Play every day once: the counts of each mutant by day, and the digests of the days."""
    counts = Counts(mutants)
    _import_days()
    at_import = list(counts.of)

    def one(day: int) -> dict[str, Any]:
        counts.of[:] = [0] * len(mutants)
        told = _play(day)
        return {**told, "counts": {n: count for n, count in enumerate(counts.of) if count}}

    digests: list[str] = []
    by_mutant: list[dict[int, int]] = [{_EVERY_DAY: 1} if each else {} for each in at_import]
    for day in range(days):
        told = _in_fork(partial(one, day))
        if told["by"]:
            sys.exit(f"day {day} is not clean: {told['by']}")
        digests.append(told["digest"])
        for number, count in told["counts"].items():
            by_mutant[int(number)][day] = count
    return {"mutants": mutants, "digests": digests, "counts": by_mutant}


def days_of(counts: dict[str, int], days: int) -> list[int]:
    """The days that can notice a mutant, those with the most differences first."""
    if str(_EVERY_DAY) in counts:
        return list(range(days))
    return sorted(map(int, counts), key=lambda day: (-counts[str(day)], day))


# ── Tests ────────────────────────────────────────────────────────────────────────────────────────


def record_tests(mutants: Sequence[Place]) -> dict[str, Any]:
    """Run every test once: those that pass, how long they take, and what they can notice."""
    counts = Counts(mutants)
    sys.path.insert(0, str(_ROOT))
    import pytest  # noqa: PLC0415 - after the finder

    tests: dict[str, Any] = {}

    class Noting:
        before: list[int] = []  # noqa: RUF012 - replaced, never changed

        def pytest_runtest_logstart(self, nodeid: str) -> None:
            self.before = list(counts.of)
            tests[nodeid] = {"took_s": 0.0, "passed": True}

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            tests[report.nodeid]["took_s"] += report.duration
            tests[report.nodeid]["passed"] &= report.passed

        def pytest_runtest_logfinish(self, nodeid: str) -> None:
            both = zip(self.before, counts.of, strict=True)
            tests[nodeid]["counts"] = [n for n, (was, now) in enumerate(both) if now > was]

    with contextlib.redirect_stdout(io.StringIO()):
        pytest.main(["-q", *_PYTEST, *_TESTS], plugins=[Noting()])
    return {"mutants": mutants, "tests": tests}


def tests_of(number: int, place: Place, recorded: dict[str, Any]) -> list[str]:
    """The tests that can notice a mutant, the quick ones first.

    What is executed at import is executed by no test: all tests of the area, then the others.
    """
    passed = [(name, each) for name, each in recorded["tests"].items() if each["passed"]]
    noticing = [one for one in passed if number in one[1]["counts"]]
    if noticing:
        return [name for name, _ in sorted(noticing, key=lambda one: one[1]["took_s"])]
    area = place.file.split("/")[1]
    of_area = [each for each in _TESTS if each == f"tests/{area}"]
    return [*of_area, *(each for each in _TESTS if each not in of_area)]


def test_one(place: Place, tests: Sequence[str]) -> dict[str, Any]:
    """Run tests with the mutant: the first that fails."""
    sys.meta_path.insert(0, _mutated(place))
    sys.path.insert(0, str(_ROOT))
    import pytest  # noqa: PLC0415 - with the change

    class First:
        failed = ""

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            self.failed = self.failed or (report.nodeid if report.failed else "")

    first = First()
    with contextlib.redirect_stdout(io.StringIO()):
        code = pytest.main(["-x", "-q", *_PYTEST, *tests], plugins=[first])
    return {"by": first.failed or ("not collected" if code else "")}


# ── The table ────────────────────────────────────────────────────────────────────────────────────


def _child(task: dict[str, Any], given: argparse.Namespace) -> dict[str, Any]:
    """Do one task in a process of its own, which imports the changed code."""
    try:
        done = subprocess.run(  # noqa: S603 - this file
            [sys.executable, __file__, "--task"],
            input=json.dumps(task),
            capture_output=True,
            text=True,
            timeout=given.timeout_s,
            check=True,
            cwd=_ROOT,
        )
    except subprocess.TimeoutExpired:
        return {"day": None, "by": "exceeded the time limit"}
    except subprocess.CalledProcessError as error:
        print(error.stderr[-2000:], file=sys.stderr)
        return {"day": None, "by": f"exit code {error.returncode}"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def do(task: dict[str, Any]) -> dict[str, Any]:
    """Do the task that a parent process gave."""
    match task:
        case {"record": mutants, "days": days}:
            return record([Place(*each) for each in mutants], days)
        case {"record_tests": mutants}:
            return record_tests([Place(*each) for each in mutants])
        case {"play": place, "days": days}:
            return play_one(Place(*place), days)
        case {"test": place, "tests": tests}:
            return test_one(Place(*place), tests)
        case _:
            raise ValueError(task)


class Results:
    """What was found so far, in files: a run that was stopped goes on where it was."""

    def __init__(self, folder: Path, mutants: Sequence[Place], given: argparse.Namespace) -> None:
        self._folder, self._mutants, self._given = folder, mutants, given
        self._file = folder / "mutation.jsonl"
        lines = self._file.read_text().splitlines() if self._file.exists() else []
        self._known: dict[tuple[Any, ...], dict[str, Any]] = {
            tuple(each["key"]): each["found"] for each in map(json.loads, lines)
        }

    def recorded(self, name: str, task: dict[str, Any]) -> dict[str, Any]:
        """The answer to a task about all mutants, from its file if it is there."""
        file = self._folder / name
        known: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        mutants = [list(each) for each in self._mutants]
        if known.get("mutants") != mutants or len(known.get("digests", ())) < task.get("days", 0):
            known = _child(task, self._given)
            if "mutants" not in known:
                sys.exit(f"{name} could not be recorded: {known['by']}")
            file.write_text(json.dumps(known))
        return known

    def played(self, number: int, counts: dict[str, int], *, is_first: bool) -> dict[str, Any]:
        """What days find of a mutant: the first few days, or all that can notice it."""
        place, days = self._mutants[number], days_of(counts, self._given.days)
        first = self._find(("first days", *place), {"play": place, "days": days[:_FIRST_DAYS]})
        if is_first or first["by"] or len(days) <= _FIRST_DAYS:
            return {**first, "days": len(days)}
        key = (f"{self._given.days} days", *place)
        rest = self._find(key, {"play": place, "days": days[_FIRST_DAYS:]})
        return {
            **rest,
            "days": len(days),
            "played": first["played"] + rest.get("played", 0),
            "digests": {**first["digests"], **rest.get("digests", {})},
        }

    def tested(self, number: int, tests: Sequence[str]) -> dict[str, Any]:
        """What tests find of a mutant."""
        place = self._mutants[number]
        return self._find(("tests", *place), {"test": place, "tests": tests})

    def _find(self, key: tuple[Any, ...], task: dict[str, Any]) -> dict[str, Any]:
        if key not in self._known:
            is_idle = task.get("days") == []
            idle: dict[str, Any] = {"day": None, "by": "", "played": 0, "digests": {}}
            self._known[key] = idle if is_idle else _child(task, self._given)
            with self._file.open("a") as out:
                out.write(json.dumps({"key": key, "found": self._known[key]}) + "\n")
        return self._known[key]


def table(
    mutants: Sequence[Place], played: Sequence[dict[str, Any]], tested: dict[int, dict[str, Any]]
) -> list[str]:
    """The result as Markdown."""
    by_simulator = sum(bool(each["by"]) for each in played)
    share = f"{100 * by_simulator / len(mutants):.0f} %"
    lines = [f"{len(mutants)} mutants; the simulator noticed {by_simulator} ({share})"]
    reached = [each for each in played if each["by"] or each["days"]]
    lines.append(f"{len(mutants) - len(reached)} make no difference on any day")
    if tested:
        lines.append(f"of the others, tests noticed {sum(bool(x['by']) for x in tested.values())}")
    areas: Counter[str] = Counter(each.file.split("/")[1] for each in mutants)
    for area, count in areas.items():
        of_area = [
            one for place, one in zip(mutants, played, strict=True) if f"/{area}/" in place.file
        ]
        lines.append(f"* {area}: {sum(bool(one['by']) for one in of_area)} of {count}")
    head = "| place | before | after | days that can | that differed | day | noticed by |"
    lines += ["", head, "|---|---|---|---|---|---|---|"]
    for number, (place, one) in enumerate(zip(mutants, played, strict=True)):
        by = one["by"] or tested.get(number, {}).get("by") or "**nobody**"
        day = "" if one["day"] is None else one["day"]
        cells = (f"{place.file}:{place.line}", f"`{place.before}`", f"`{place.after}`")
        told = " | ".join(each.replace("|", "\\|") for each in cells)
        lines.append(f"| {told} | {one['days']} | {one['moved']} | {day} | {by} |")
    return lines


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Change the code by machine; see who notices.")
    parser.add_argument("--sample", type=int, default=300, help="mutants; default 300")
    parser.add_argument("--seed", type=int, default=20, help="of the sample; default 20")
    parser.add_argument("--of", metavar="COMMIT", help="take the sample from an earlier version")
    parser.add_argument("--days", type=int, default=200, help="for each mutant; default 200")
    parser.add_argument("--workers", type=int, default=1, help="processes; default 1")
    parser.add_argument("--timeout-s", type=float, default=7200, help="of a process; default 7200")
    parser.add_argument("--tests", action="store_true", help="run the tests on survivors")
    parser.add_argument("--part", type=int, help="only so many of the sample, evenly spread")
    parser.add_argument("--task", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.task:
        print(json.dumps(do(json.load(sys.stdin))))
        return 0
    mutants = sample(given.sample, given.seed, given.of)
    if given.part is not None:
        mutants = mutants[:: max(1, len(mutants) // given.part)]
    reports = _ROOT / "reports"
    reports.mkdir(exist_ok=True)
    results = Results(reports, mutants, given)
    recorded = results.recorded("mutation-days.json", {"record": mutants, "days": given.days})
    played: list[dict[str, Any]] = []
    # What is executed at import is seldom noticed, and costs all days.
    counts: list[dict[str, int]] = recorded["counts"]
    order = sorted(
        range(len(mutants)), key=lambda each: (str(_EVERY_DAY) in counts[each], len(counts[each]))
    )
    for is_first in (True, False):
        with ThreadPoolExecutor(given.workers) as pool:
            pending = {
                each: pool.submit(results.played, each, counts[each], is_first=is_first)
                for each in order
            }
            for each in order:
                one = pending[each].result()
                _tell(mutants[each], one, recorded["digests"])
        played = [pending[each].result() for each in range(len(mutants))]
        # A mutant that changes what happens is likelier to be noticed on another day.
        order.sort(key=lambda each: not played[each]["moved"])
        _write(reports / "mutation.md", table(mutants, played, {}))
    tested: dict[int, dict[str, Any]] = {}
    if given.tests:
        by_test = results.recorded("mutation-tests.json", {"record_tests": mutants})
        for number, one in enumerate(played):
            if not one["by"]:
                tested[number] = results.tested(number, tests_of(number, mutants[number], by_test))
    lines = table(mutants, played, tested)
    _write(reports / "mutation.md", lines)
    print("\n".join(lines[:12]))
    return 0


def _tell(place: Place, one: dict[str, Any], digests: Sequence[str]) -> None:
    """Print what was found, and count the days whose history the mutant changed."""
    one["moved"] = sum(digests[int(day)] != each for day, each in one.get("digests", {}).items())
    told = f"day {one['day']}: {one['by']}" if one["by"] else "not noticed"
    days = f"{one.get('played', 0)} of {one['days']} days, {one['moved']} differed"
    at = f"{place.file}:{place.line}"
    print(f"{at}  {place.before} → {place.after}  {days}  {told}", flush=True)


def _write(file: Path, lines: Sequence[str]) -> None:
    file.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
