"""Style and script of the HTML report. Both go into the page, whose security policy allows nothing else to be loaded."""

from __future__ import annotations

STYLE = """
:root {
  color-scheme: light dark;
  --page: #ffffff; --card: #f6f7f9; --ink: #1c2330; --soft: #5b6577; --rule: #dfe3ea;
  --good: #1a7f4b; --bad: #c62f3b; --open: #8a5d00; --lifted: #2558c9; --run: #b45309; --hit: #fff1f1;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #12151b; --card: #1b2029; --ink: #e4e8ef; --soft: #98a2b3; --rule: #2e3542;
    --good: #4cc38a; --bad: #ff7b85; --open: #e5b454; --lifted: #7aa7ff; --run: #f0a35e; --hit: #35191d;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
}
main, header, footer { max-width: 1320px; margin: 0 auto; padding: 0 24px; }
header { padding-top: 32px; }
h1 { font-size: 28px; line-height: 1.2; margin: 0 0 8px; }
h2 { font-size: 19px; margin: 40px 0 12px; }
h3 { font-size: 16px; margin: 0; }
p { margin: 4px 0; }
code, .mono { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: 13px; }
code, .what { overflow-wrap: anywhere; }
.soft { color: var(--soft); }
.passed, .equal { color: var(--good); }
.failed, .different { color: var(--bad); }
.skipped, .not-applicable, .inconclusive, .undecided { color: var(--open); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(230px, 1fr)); gap: 12px; margin-top: 20px; }
.card { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: 12px 16px; }
.card a { color: inherit; text-decoration: none; }
.card .verdict { float: right; font-weight: 600; }
.diagnosis { border-left: 4px solid var(--bad); margin-top: 24px; }
.diagnosis h2 { margin: 0 0 8px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 16px; margin: 8px 0 0; }
dt { color: var(--soft); }
dd { margin: 0; overflow-wrap: anywhere; }
figure { margin: 16px 0 0; overflow-x: auto; }
.plot { display: block; width: 100%; min-width: 680px; height: auto; }
.plot .grid, .plot .depth { stroke: var(--rule); stroke-width: 1; }
.plot .edge { stroke-dasharray: 1 3; stroke: var(--soft); }
.plot .depth { stroke-dasharray: 3 3; }
.plot .tick { fill: var(--soft); font-size: 11px; }
.drawn .line { fill: none; stroke-width: 1.5; opacity: .55; }
.drawn .bound { fill: none; stroke-width: 1.5; stroke-dasharray: 6 4; }
.drawn path.lifted { stroke: var(--lifted); }
.drawn path.run { stroke: var(--run); }
.drawn .point.lifted { fill: var(--lifted); }
.drawn .point.run { fill: var(--run); }
.plot .point.bad { fill: var(--page); stroke: var(--bad); stroke-width: 2; }
.plot .point.bad rect, .plot .point.bad circle { stroke: var(--bad); }
.plot line.first { stroke: var(--bad); stroke-width: 1.5; }
.plot text.first { fill: var(--bad); font-size: 13px; font-weight: 600; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 28px; font-size: 13px; color: var(--soft); margin: 0 0 0 64px; }
.legend svg { width: 34px; height: 10px; margin-right: 8px; vertical-align: middle; overflow: visible; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13px; }
th, td { text-align: left; padding: 5px 10px 5px 0; border-bottom: 1px solid var(--rule); vertical-align: top; }
th { color: var(--soft); font-weight: 500; white-space: nowrap; }
td.number, th.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
td.name, td.number, td.layout, td.rule { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
td.name { overflow-wrap: break-word; }
td.name .soft, td.layout, td .rows { white-space: nowrap; }
td.rule { white-space: nowrap; color: var(--soft); }
td .part + .part { margin-top: 3px; }
tr.bad td, tr:target td { background: var(--hit); }
td.beyond { color: var(--bad); font-weight: 600; }
tr[hidden] { display: none; }
details { margin-top: 12px; }
summary { cursor: pointer; color: var(--soft); }
ul { padding-left: 20px; margin: 8px 0; }
li { margin: 4px 0; }
.filter { display: none; gap: 12px; align-items: baseline; margin-bottom: 8px; }
.scripted .filter { display: flex; }
.filter input {
  flex: 0 1 420px; font: inherit; color: inherit; background: var(--card); border: 1px solid var(--rule);
  border-radius: 6px; padding: 6px 10px;
}
footer { padding-top: 32px; padding-bottom: 48px; color: var(--soft); font-size: 13px; }
@media print { .filter { display: none !important; } }
"""

SCRIPT = """
(() => {
  const box = document.getElementById("q");
  if (!box) return;
  const rows = [...document.querySelectorAll("#mapping tbody tr")];
  const text = (cells) => [...cells].map((cell) => cell.textContent).join(" ").toLowerCase();
  const texts = rows.map((row) => text(row.cells));
  const names = rows.map((row) => text([...row.cells].slice(0, -1))); // without the rule, whose line is a number, too
  const count = document.getElementById("count");
  const tests = () => box.value.toLowerCase().split(/\\s+/).filter(Boolean).map((word) => {
    const whole = /^\\d+$/.test(word) && new RegExp("(^|\\\\D)" + word + "(\\\\D|$)"); // 2 is not 12 or 32
    return (k) => whole ? whole.test(names[k]) : texts[k].includes(word);
  });
  const filter = () => {
    const all = tests();
    let shown = 0;
    rows.forEach((row, k) => {
      row.hidden = !all.every((test) => test(k));
      shown += !row.hidden;
    });
    count.textContent = shown + " of " + rows.length;
  };
  const read = () => {
    if (!location.hash.startsWith("#q=")) return;
    try { box.value = decodeURIComponent(location.hash.slice(3)); } catch { box.value = location.hash.slice(3); }
  };
  document.documentElement.classList.add("scripted");
  box.addEventListener("input", () => {
    filter();
    try { history.replaceState(null, "", "#q=" + encodeURIComponent(box.value)); } catch { /* some browsers: not in files */ }
  });
  addEventListener("hashchange", () => { read(); filter(); });
  read();
  filter();
})();
"""
