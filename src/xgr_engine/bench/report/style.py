"""The report's style sheet: light or dark as the reader's system is, one column on a phone."""

STYLE = """
:root {
  color-scheme: light dark; --ink: #1c2127; --dim: #5b6672; --paper: #ffffff; --panel: #f5f7f9; --rule: #d9dfe5;
  --bad: #b3261e; --warn: #fff4d6; --warn-ink: #5c4400; --s0: #0b62c4; --s1: #c2410c; --s2: #7c3aed;
  --s3: #0f766e; --s4: #b4237a; --s5: #7a5b00; --s6: #4b5563; --s7: #166534;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ink: #e8ecf0; --dim: #9aa7b4; --paper: #14181c; --panel: #1d2329; --rule: #37404a; --bad: #ff8a80;
    --warn: #3a2f10; --warn-ink: #ffe3a0; --s0: #6cb2ff; --s1: #ff9d66; --s2: #b79bff; --s3: #5fd4c6;
    --s4: #ff8ccb; --s5: #e5c352; --s6: #aab4c0; --s7: #86d69b;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 1320px; padding: 20px 16px 60px; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
}
h1 { font-size: 1.6rem; margin: 0 0 4px; }
h2 { font-size: 1.2rem; margin: 36px 0 8px; }
h3 { font-size: 1rem; margin: 4px 0 8px; }
p { margin: 6px 0; }
.dim, .nothing { color: var(--dim); }
.warnings { background: var(--warn); color: var(--warn-ink); border-radius: 8px; padding: 8px 14px; margin: 14px 0; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: 16px; }
.card {
  background: var(--panel); border: 1px solid var(--rule); border-radius: 10px; padding: 12px 14px; min-width: 0;
}
.cards {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 200px), 1fr)); gap: 12px; margin: 14px 0;
}
.cards .card b { display: block; font-size: 1.35rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; min-width: min(100%, 36rem); font-size: 0.88rem; }
.short { white-space: nowrap; }
th, td { padding: 5px 16px 5px 0; text-align: left; border-bottom: 1px solid var(--rule); vertical-align: top; }
th { color: var(--dim); font-weight: 600; white-space: nowrap; }
td.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
th.n { text-align: right; }
td.bad, .bad { color: var(--bad); font-weight: 600; }
code {
  font: 0.88em ui-monospace, SFMono-Regular, Menlo, monospace; background: var(--panel); padding: 1px 4px;
  border-radius: 4px; overflow-wrap: anywhere;
}
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--ink); font-size: 13px; }
svg text.small { fill: var(--dim); font-size: 12px; }
svg .grid { stroke: var(--rule); }
svg .axis { stroke: var(--dim); }
svg .mark { stroke: var(--dim); stroke-dasharray: 5 4; }
svg .roof { fill: none; stroke: var(--dim); stroke-width: 2; }
svg .line { fill: none; stroke-width: 2.5; stroke: var(--c); }
svg .whisker { stroke: var(--c); stroke-width: 1.5; }
svg .dot, svg .bar { fill: var(--c); }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; font-size: 0.85rem; }
.key {
  display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 6px; background: var(--c);
}
.s0 { --c: var(--s0); }
.s1 { --c: var(--s1); }
.s2 { --c: var(--s2); }
.s3 { --c: var(--s3); }
.s4 { --c: var(--s4); }
.s5 { --c: var(--s5); }
.s6 { --c: var(--s6); }
.s7 { --c: var(--s7); }
@media (max-width: 600px) {
  body { padding: 14px 10px 40px; font-size: 16px; }
  .card { padding: 10px; }
  svg text { font-size: 17px; }
  svg text.small { font-size: 15px; }
}
"""
