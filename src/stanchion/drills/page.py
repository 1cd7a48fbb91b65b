"""Pages: a report as one HTML file without outside requests, and the index over all of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import Final

import msgspec

from stanchion.charts import Chart, svg_of
from stanchion.core.json_value import JsonValue
from stanchion.drills.verdict import Report

TITLES: Final = {
    "admission": "Admission: a full tenant under bursts",
    "retry": "Retries: one policy for all refusals, or one for each",
    "fallback": "Fallback: the lock store is cut under load",
    "renewal": "Renewal: a holder that cannot renew its lease",
    "lock-busy": "Lock busy: retries of runs that another replica holds",
}


def write_report(report: Report, charts: Sequence[Chart], out: Path) -> Path:
    """Write ``report.json``, ``index.html`` and the charts; the path of the page.

    ``charts.json`` has the charts as data: a server's console draws them from it.
    """
    folder = out / report.drill
    folder.mkdir(parents=True, exist_ok=True)
    document = msgspec.json.format(msgspec.json.encode(report), indent=2)
    (folder / "report.json").write_bytes(document + b"\n")
    (folder / "charts.json").write_bytes(msgspec.json.encode(tuple(charts)) + b"\n")
    for old in folder.glob("chart-*.svg"):
        old.unlink()
    for number, chart in enumerate(charts, 1):
        (folder / f"chart-{number}.svg").write_text(svg_of(chart) + "\n", encoding="utf-8")
    page = folder / "index.html"
    page.write_text(_page(report, charts), encoding="utf-8")
    return page


def write_index(out: Path) -> Path:
    """Write ``index.html`` over every report in the directory; the path of the page."""
    reports = []
    for path in sorted(out.glob("*/report.json")):
        # Another program may keep reports in the same directory.
        with suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
            reports.append(msgspec.json.decode(path.read_bytes(), type=Report))
    order = list(TITLES)
    reports.sort(key=lambda each: order.index(each.drill) if each.drill in order else len(order))
    passed = sum(report.verdict == "pass" for report in reports)
    rows = "".join(
        f'<tr><td><a href="{escape(report.drill)}/index.html">{escape(_title(report))}</a></td>'
        f"<td>{_badge(report.verdict == 'pass')}</td>"
        f"<td>{sum(each.holds for each in report.promises)} of {len(report.promises)}</td>"
        f"<td>{report.duration_s:.0f} s</td><td>{report.seed}</td>"
        f"<td>{escape(report.started_at)}</td></tr>"
        for report in reports
    )
    body = (
        f"<h1>Drills: {passed} of {len(reports)} pass</h1>"
        "<table><thead><tr><th>drill</th><th>verdict</th><th>promises that hold</th>"
        "<th>took</th><th>seed</th><th>began (UTC)</th></tr></thead>"
        f"<tbody>{rows}</tbody></table>"
    )
    page = out / "index.html"
    page.write_text(_document("Drills", body), encoding="utf-8")
    return page


def _page(report: Report, charts: Sequence[Chart]) -> str:
    broken = report.broken
    if broken:
        names = ", ".join(promise.id for promise in broken)
        headline = f"{len(broken)} of {len(report.promises)} promises broken: {names}"
    else:
        headline = f"All {len(report.promises)} promises hold"
    rows = "".join(
        f"<tr><td>{_badge(promise.holds)}</td><td><code>{escape(promise.id)}</code></td>"
        f"<td>{escape(promise.says)}</td><td>{escape(promise.measured)}</td></tr>"
        for promise in report.promises
    )
    settings = json.dumps(report.environment.get("settings", {}), indent=2, ensure_ascii=False)
    command = str(report.environment.get("command", ""))
    repeat = f"stanchion drill {report.drill} --seed {report.seed}"
    against = report.environment.get("against")
    if against:
        repeat += f" --against {against}"
    if report.environment.get("quick"):
        repeat += " --quick"
    body = "".join(
        [
            '<p class="quiet"><a href="../index.html">all drills</a></p>',
            f"<h1>{escape(_title(report))}</h1>",
            f'<p class="headline">{_badge(not broken)} {escape(headline)}</p>',
            f'<p class="quiet">Note: {escape(report.busy_note)}.</p>' if report.busy_note else "",
            '<table class="promises"><thead><tr><th></th><th>promise</th>',
            "<th>what must hold</th><th>measured</th></tr></thead>",
            f"<tbody>{rows}</tbody></table>",
            *(f"<figure>{svg_of(chart)}</figure>" for chart in charts),
            "<h2>Figures</h2>",
            _figures(report.figures),
            "<h2>Settings under test</h2>",
            f"<pre>{escape(settings)}</pre>",
            "<h2>Where and how</h2>",
            _figures(
                {
                    "began": report.started_at,
                    "took": f"{report.duration_s:.1f} s",
                    "seed": report.seed,
                    **{
                        name: value
                        for name, value in report.environment.items()
                        if name not in {"settings", "command"}
                    },
                    "command": command,
                    "repeat with": repeat,
                }
            ),
        ]
    )
    return _document(_title(report), body)


def _figures(figures: Mapping[str, JsonValue]) -> str:
    """Simple values as one table, lists of objects as tables of their own."""
    simple, tables = [], []
    for name, value in figures.items():
        if isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
            tables.append(_table(name, [each for each in value if isinstance(each, dict)]))
        else:
            simple.append(
                f"<tr><th>{escape(_words(name))}</th><td>{escape(_shown(value))}</td></tr>"
            )
    first = f'<table class="facts"><tbody>{"".join(simple)}</tbody></table>' if simple else ""
    return first + "".join(tables)


def _table(name: str, rows: Sequence[Mapping[str, JsonValue]]) -> str:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    head = "".join(f"<th>{escape(_words(column))}</th>" for column in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(_shown(row.get(each)))}</td>" for each in columns) + "</tr>"
        for row in rows
    )
    return (
        f"<h3>{escape(_words(name))}</h3><table><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table>"
    )


def _words(name: str) -> str:
    return name.replace("_", " ")


def _shown(value: JsonValue) -> str:
    match value:
        case None:
            return "–"
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"  # noqa: PLR2004 - digits
        case dict():
            return ", ".join(f"{name}: {_shown(each)}" for name, each in value.items())
        case list():
            return ", ".join(_shown(each) for each in value)
        case _:
            return str(value)


def _badge(holds: bool) -> str:  # noqa: FBT001 - the one thing it shows
    # The word says it; colour only repeats it.
    return f'<span class="{"holds" if holds else "broken"}">{"holds" if holds else "BROKEN"}</span>'


def _title(report: Report) -> str:
    return TITLES.get(report.drill, report.drill)


def _document(title: str, body: str) -> str:
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)} · Stanchion</title><style>{_STYLE}</style></head>"
        f"<body><main>{body}</main></body></html>\n"
    )


_STYLE: Final = (
    ":root{color-scheme:light dark;--ink:#1c2733;--quiet:#55606c;--paper:#fff;--line:#dde2e7;"
    "--good:#00694e;--bad:#a8321a;--soft:#f5f7f9}"
    "@media screen and (prefers-color-scheme:dark){:root{--ink:#e8ecf0;--quiet:#a9b4bf;"
    "--paper:#14191e;--line:#2c353e;--good:#3ecf9e;--bad:#ff8a70;--soft:#1c2329}}"
    "body{margin:0;background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,sans-serif}"
    "main{max-width:960px;margin:0 auto;padding:24px 20px 60px}"
    "h1{font-size:24px;margin:8px 0}h2{font-size:18px;margin:32px 0 8px}h3{font-size:15px}"
    "a{color:inherit}.quiet{color:var(--quiet);margin:0}.headline{font-size:17px}"
    "table{border-collapse:collapse;width:100%;margin:8px 0;font-size:14px}"
    "th,td{text-align:left;vertical-align:top;padding:5px 10px 5px 0;"
    "border-bottom:1px solid var(--line)}"
    "thead th{color:var(--quiet);font-weight:500}.facts th{width:16em;font-weight:500}"
    "td{overflow-wrap:anywhere}.promises td:nth-child(-n+2){white-space:nowrap}"
    ".holds{color:var(--good);font-weight:600}.broken{color:var(--bad);font-weight:700}"
    ".holds,.broken{white-space:nowrap}"
    "pre{background:var(--soft);padding:12px;overflow:auto;font-size:13px}"
    "figure{margin:20px 0;overflow-x:auto}figure svg{max-width:100%;height:auto}"
    "@media screen and (max-width:640px){.promises thead{display:none}"
    ".promises,.promises tbody,.promises tr,.promises td{display:block;border:0}"
    ".promises tr{border-bottom:1px solid var(--line);padding:8px 0}.facts th{width:8em}}"
    "@media print{main{max-width:none;padding:0}figure,tr{break-inside:avoid}"
    "h2,h3{break-after:avoid}}@page{margin:15mm}"
)
