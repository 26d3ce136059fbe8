"""How does the page look? One style sheet, light and dark as the reader's system says, down to a phone's width."""

from __future__ import annotations

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --line: #e2e5ea; --text: #1c2430; --soft: #5d6878;
  --bar: #3f73d8; --bar-limit: #c9741a; --track: #eef0f4;
  --learnt: #d5f0de; --learnt-line: #1f8a4c; --special: #7b3fb5; --special-back: #f0e7fa; --edge: #0000001a;
  --error: #b3261e; --error-back: #fdeceb; --warning: #8a5a00; --warning-back: #fff5dc;
  --good: #1f7a44; --good-back: #e6f6ec;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #12161c; --card: #1a2029; --line: #2c3542; --text: #e4e8ee; --soft: #98a4b5;
    --bar: #6d9bf1; --bar-limit: #e59a4b; --track: #232b36;
    --learnt: #15402a; --learnt-line: #4cc481; --special: #cfa6f5; --special-back: #33244a; --edge: #ffffff24;
    --error: #ff9e97; --error-back: #3d1f1e; --warning: #f2c265; --warning-back: #372c15;
    --good: #74d69d; --good-back: #17352a;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 32px 24px 48px; }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 19px; margin: 40px 0 12px; }
h3 { font-size: 13px; margin: 0 0 12px; color: var(--soft); font-weight: 600; }
code, .mono, .row-text { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
.lead { color: var(--soft); margin: 0; overflow-wrap: anywhere; }
.lead b { color: var(--text); font-weight: 600; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 18px 20px;
  margin: 14px 0; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(158px, 1fr)); gap: 12px; }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 14px 16px; }
.tile .name { color: var(--soft); font-size: 13px; }
.tile .value { font-size: 24px; font-weight: 600; line-height: 1.3; font-variant-numeric: tabular-nums; }
.tile .note { color: var(--soft); font-size: 12.5px; line-height: 1.4; }
.finding { border-left: 4px solid; border-radius: 6px; padding: 12px 16px; margin: 10px 0; overflow-wrap: anywhere; }
.finding p { margin: 2px 0; color: var(--text); }
.finding .what { font-weight: 600; }
.finding .word { color: var(--soft); display: inline-block; min-width: 2.4em; }
.finding .level { display: inline-block; } .finding .level::first-letter { text-transform: uppercase; }
.error { border-color: var(--error); background: var(--error-back); } .error .level { color: var(--error); }
.warning { border-color: var(--warning); background: var(--warning-back); } .warning .level { color: var(--warning); }
.good { border-color: var(--good); background: var(--good-back); } .good .level { color: var(--good); }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { text-align: left; color: var(--soft); font-weight: 500; font-size: 13px; padding: 2px 12px 6px 0; }
td { padding: 3px 12px 3px 0; }
th, td { vertical-align: baseline; }
th.number, td.number { text-align: right; white-space: nowrap; }
.plot td { padding-top: 1px; padding-bottom: 1px; vertical-align: middle; }
.plot .bar-cell { width: 100%; min-width: 70px; }
.track { background: var(--track); border-radius: 3px; height: 17px; overflow: hidden; }
.bar { background: var(--bar); height: 100%; min-width: 2px; border-radius: 3px; }
.limit .bar { background: var(--bar-limit); }
.limit td { font-weight: 600; }
.limit small { color: var(--bar-limit); font-size: 12px; }
.facts td:first-child, .facts th { color: var(--soft); white-space: nowrap; font-weight: 400; width: 1%;
  padding-right: 20px; text-align: left; font-size: 15px; }
.facts td { padding-top: 4px; padding-bottom: 4px; overflow-wrap: anywhere; }
.longest td.begin { overflow-wrap: anywhere; width: 100%; font-size: 13px; }
.scale { display: grid; grid-template-columns: repeat(auto-fit, minmax(84px, 1fr)); gap: 6px 12px; margin-top: 16px;
  padding-top: 14px; border-top: 1px solid var(--line); }
.scale div { font-variant-numeric: tabular-nums; font-weight: 600; }
.scale span { display: block; color: var(--soft); font-size: 12.5px; font-weight: 400; }
.legend { color: var(--soft); font-size: 13.5px; margin: 0 0 8px; }
.legend .t { margin-right: 2px; color: var(--text); } .legend > span.item { margin-right: 18px; display: inline-block; }
details.card { padding: 0; }
summary { cursor: pointer; padding: 12px 18px; font-weight: 600; }
summary span { color: var(--soft); font-weight: 400; }
.row-text { white-space: pre-wrap; overflow-wrap: anywhere; font-size: 13.5px; line-height: 1.75; margin: 0;
  padding: 14px 18px 18px; border-top: 1px solid var(--line); tab-size: 4; }
.t { box-shadow: inset -1px 0 var(--edge); padding: 2px 0; }
.t:hover { outline: 1px solid var(--soft); }
.learnt { background: var(--learnt); border-bottom: 2px solid var(--learnt-line); }
.special { color: var(--special); background: var(--special-back); border-radius: 3px; padding: 2px 3px;
  font-weight: 600; }
.special.learnt { background: var(--learnt); border-radius: 3px 3px 0 0; }
.sign { color: var(--soft); opacity: .75; }
.gap { display: block; color: var(--soft); text-align: center; padding: 10px; font-style: italic; }
footer { color: var(--soft); font-size: 13px; margin-top: 36px; overflow-wrap: anywhere; }
@media (max-width: 560px) {
  main { padding: 20px 14px 32px; }
  h1 { font-size: 21px; } h2 { margin-top: 30px; }
  .card { padding: 14px; } .tiles { grid-template-columns: 1fr 1fr; gap: 8px; }
  .tile { padding: 10px 12px; } .tile .value { font-size: 20px; }
  .wide { display: none; }
  .facts tr { display: block; padding: 5px 0; } .facts th, .facts td { display: block; width: auto; padding: 0; }
  .facts th { font-size: 12.5px; }
  .row-text { padding: 12px 14px; } summary { padding: 10px 14px; }
}
@media print { details.card, .tile, .finding { break-inside: avoid; } }
"""
