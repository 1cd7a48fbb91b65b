"""Change the code by machine, one small change at a time, and see who notices.

    python scripts/mutate.py --sample 300 --days 200              # the simulator
    python scripts/mutate.py --sample 300 --days 200 --tests      # and the tests, for survivors

A mutant is one change at one place: a comparison, a boolean, a number, an operator, a condition, or
a call whose result is not used. The seed fixes the sample. Each mutant has a process of its own,
which compiles the changed module in memory, so no file is ever changed, and plays simulated days
until an invariant breaks. A mutant that cannot be imported, raises out of the simulator or exceeds
the time limit is noticed too. The table goes to ``reports/mutation.md``. Each result is kept in
``reports/mutation.jsonl``: a run that was stopped goes on where it was. Remove the file after a
change of the code.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import io
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any, Final, NamedTuple

_ROOT: Final = Path(__file__).resolve().parent.parent
_SOURCE: Final = _ROOT / "src"
_PLACES: Final = (
    *("core", "services", "worker", "client", "leases"),
    *("adapters/store/memory", "adapters/locks/memory.py"),
)
_TESTS: Final = ("tests/core", "tests/services", "tests/contract", "tests/worker", "tests/client")
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


def places(file: Path) -> Iterator[Place]:
    """Every change that can be made in a file."""
    tree = ast.parse(file.read_text())
    skipped = _unseen(tree)
    for number, node in enumerate(ast.walk(tree)):
        if id(node) in skipped:
            continue
        new = changed(node)
        if new is not None:
            name = str(file.relative_to(_SOURCE))
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


def sample(count: int, seed: int) -> list[Place]:
    """The mutants of a seed."""
    files: list[Path] = []
    for place in _PLACES:
        at = _SOURCE / "stanchion" / place
        files += [at] if at.is_file() else sorted(at.rglob("*.py"))
    every = [place for file in files for place in places(file)]
    chosen = Random(seed).sample(every, min(count, len(every)))  # noqa: S311 - to be foreseen
    return sorted(chosen, key=lambda each: (each.file, each.line, each.node))


# ── One mutant, in a process of its own ──────────────────────────────────────────────────────────


class _Mutated(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module with its change."""

    def __init__(self, place: Place) -> None:
        self._place = place
        parts = Path(place.file).with_suffix("").parts
        self._name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        if name != self._name:
            return None
        file = _SOURCE / self._place.file
        packages = [str(file.parent)] if file.name == "__init__.py" else None
        return importlib.util.spec_from_file_location(
            name, file, loader=self, submodule_search_locations=packages
        )

    def exec_module(self, module: ModuleType) -> None:
        file = _SOURCE / self._place.file
        tree = ast.parse(file.read_text())
        old = next(node for number, node in enumerate(ast.walk(tree)) if number == self._place.node)
        new = changed(old)
        assert new is not None
        tree = ast.fix_missing_locations(_Swap(old, new).visit(tree))
        exec(compile(tree, str(file), "exec"), vars(module))  # noqa: S102 - our own code, changed


class _Swap(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self._old, self._new = old, new

    def visit(self, node: ast.AST) -> Any:  # noqa: ANN401 - as in the class it is from
        return ast.copy_location(self._new, node) if node is self._old else self.generic_visit(node)


def play_one(place: Place, days: int) -> dict[str, Any]:
    """Play days with the mutant: on which one it was noticed, and by what."""
    sys.meta_path.insert(0, _Mutated(place))
    day = 0
    try:
        from stanchion.sim.scenario import draw  # noqa: PLC0415 - with the change
        from stanchion.sim.world import play  # noqa: PLC0415 - likewise

        for day in range(1, days + 1):
            verdict = play(draw(day - 1))
            if verdict.broken:
                return {"day": day, "by": verdict.broken[0].partition(":")[0]}
    except Exception as error:  # noqa: BLE001 - whatever it is, it was noticed
        return {"day": day, "by": f"raised {type(error).__name__}"}
    return {"day": None, "by": ""}


def test_one(place: Place) -> dict[str, Any]:
    """Run the tests with the mutant: the first that fails."""
    sys.meta_path.insert(0, _Mutated(place))
    sys.path.insert(0, str(_ROOT))
    import pytest  # noqa: PLC0415 - with the change

    class First:
        failed = ""

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            self.failed = self.failed or (report.nodeid if report.failed else "")

    first = First()
    with contextlib.redirect_stdout(io.StringIO()):
        code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *_TESTS], plugins=[first])
    return {"by": first.failed or ("not collected" if code else "")}


# ── The table ────────────────────────────────────────────────────────────────────────────────────


def _child(place: Place, given: argparse.Namespace, *, is_test: bool = False) -> dict[str, Any]:
    """Play or test one mutant. The place is passed on: to find it again costs as much as days."""
    words = [sys.executable, __file__, "--one", json.dumps(place), "--days", str(given.days)]
    try:
        done = subprocess.run(  # noqa: S603 - this file
            [*words, *(["--tests"] if is_test else [])],
            capture_output=True,
            text=True,
            timeout=given.timeout_s,
            check=True,
            cwd=_ROOT,
        )
    except subprocess.TimeoutExpired:
        return {"day": 0, "by": "exceeded the time limit"}
    except subprocess.CalledProcessError as error:
        return {"day": 0, "by": f"exit code {error.returncode}"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


class _Results:
    """What was found so far, in a file: a run that was stopped goes on where it was."""

    def __init__(self, file: Path, given: argparse.Namespace) -> None:
        self._file, self._given = file, given
        lines = file.read_text().splitlines() if file.exists() else []
        self._known: dict[tuple[Any, ...], dict[str, Any]] = {
            tuple(each["key"]): each["found"] for each in map(json.loads, lines)
        }

    def find(self, place: Place, *, is_test: bool = False) -> dict[str, Any]:
        """What days or tests find of a mutant, from the file if it is there."""
        key = ("tests" if is_test else f"{self._given.days} days", *place)
        if key not in self._known:
            self._known[key] = _child(place, self._given, is_test=is_test)
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
    if tested:
        lines.append(f"of the others, tests noticed {sum(bool(x['by']) for x in tested.values())}")
    areas: Counter[str] = Counter(each.file.split("/")[1] for each in mutants)
    for area, count in areas.items():
        of_area = [
            one for place, one in zip(mutants, played, strict=True) if f"/{area}/" in place.file
        ]
        lines.append(f"* {area}: {sum(bool(one['by']) for one in of_area)} of {count}")
    lines += ["", "| place | before | after | day | noticed by |", "|---|---|---|---|---|"]
    for number, (place, one) in enumerate(zip(mutants, played, strict=True)):
        by = one["by"] or tested.get(number, {}).get("by") or "**nobody**"
        cells = (f"{place.file}:{place.line}", f"`{place.before}`", f"`{place.after}`")
        told = " | ".join(each.replace("|", "\\|") for each in cells)
        lines.append(f"| {told} | {one['day'] if one['by'] else ''} | {by} |")
    return lines


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Change the code by machine; see who notices.")
    parser.add_argument("--sample", type=int, default=300, help="mutants; default 300")
    parser.add_argument("--seed", type=int, default=20, help="of the sample; default 20")
    parser.add_argument("--days", type=int, default=200, help="for each mutant; default 200")
    parser.add_argument("--workers", type=int, default=1, help="processes; default 1")
    parser.add_argument("--timeout-s", type=float, default=900, help="for each mutant; default 900")
    parser.add_argument("--tests", action="store_true", help="run the tests on survivors")
    parser.add_argument("--part", type=int, help="only so many of the sample, evenly spread")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one is not None:
        place = Place(*json.loads(given.one))
        print(json.dumps(test_one(place) if given.tests else play_one(place, given.days)))
        return 0
    mutants = sample(given.sample, given.seed)
    if given.part is not None:
        mutants = mutants[:: max(1, len(mutants) // given.part)]
    reports = _ROOT / "reports"
    reports.mkdir(exist_ok=True)
    results = _Results(reports / "mutation.jsonl", given)
    with ThreadPoolExecutor(given.workers) as pool:
        played = []
        for place, one in zip(mutants, pool.map(results.find, mutants), strict=True):
            played.append(one)
            told = f"day {one['day']}: {one['by']}" if one["by"] else "not noticed"
            print(f"{place.file}:{place.line}  {place.before} → {place.after}  {told}", flush=True)
    tested: dict[int, dict[str, Any]] = {}
    if given.tests:
        for number, one in enumerate(played):
            if not one["by"]:
                tested[number] = results.find(mutants[number], is_test=True)
    lines = table(mutants, played, tested)
    report = reports / "mutation.md"
    report.write_text("\n".join(lines) + "\n")
    print("\n".join(lines[:12]))
    print(f"the table is in {report.relative_to(_ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
