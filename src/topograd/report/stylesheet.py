"""The stylesheet of a report: system fonts, one column, light and dark, and figures on white cards."""

STYLESHEET = """
:root {
  color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --ink: #1d2433; --muted: #5d6779; --line: #dfe3ea; --accent: #0067a3;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #12151c; --card: #1b202b; --ink: #e8ebf2; --muted: #a3adbf; --line: #323a49; --accent: #7cc4f2;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 2.5rem 1.25rem 4rem; max-width: 57rem; background: var(--page); color: var(--ink);
  font: 1rem/1.6 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
}
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .4rem; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; line-height: 1.3; margin: 0 0 .7rem; }
p { margin: 0 0 1rem; max-width: 46rem; }
section { margin-top: 2.75rem; }
a { color: var(--accent); }
nav ul { list-style: none; margin: 0; padding: 0; display: flex; flex-wrap: wrap; gap: .3rem 1.1rem; }
nav { font-size: .92rem; margin-top: 1.5rem; }
.lead, figcaption, .missing, .note { color: var(--muted); }
.tiles {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .75rem;
  margin: 1.5rem 0; padding: 0;
}
.tiles div, .plot, pre { background: var(--card); border: 1px solid var(--line); border-radius: .75rem; }
.tiles div { padding: .8rem 1rem; display: flex; flex-direction: column; justify-content: space-between; }
.tiles dt { font-size: .84rem; line-height: 1.35; color: var(--muted); }
.tiles dd { margin: .15rem 0 0; font-size: 1.4rem; font-weight: 650; font-variant-numeric: tabular-nums; }
figure { margin: 0; }
.plot { background: #ffffff; padding: .5rem; overflow-x: auto; }
.plot svg { display: block; width: 100%; height: auto; }
.plot .narrow { display: none; }
figcaption { margin: .8rem 0 .5rem; font-size: .95rem; max-width: 46rem; }
details { margin-top: .5rem; }
summary { cursor: pointer; color: var(--accent); font-size: .92rem; }
.wide { overflow-x: auto; margin-top: .6rem; }
table {
  border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; background: var(--card);
  min-width: 60%;
}
caption { text-align: left; color: var(--muted); padding-bottom: .4rem; }
th, td { padding: .32rem .8rem; border: 1px solid var(--line); text-align: right; vertical-align: top; }
th { font-weight: 600; }
tbody th, thead th:first-child { text-align: left; font-weight: 500; }
.text { text-align: left; }
.settings th, .settings td { text-align: left; overflow-wrap: anywhere; }
.warning { border-left: 3px solid #d55e00; padding-left: .9rem; }
.advice { margin: 1.2rem 0; padding-left: 1.2rem; max-width: 46rem; }
.omitted { margin-top: 2.75rem; color: var(--muted); font-size: .92rem; }
pre {
  margin: 0; padding: .9rem 1rem;
  font: .86rem/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
  white-space: pre-wrap; overflow-wrap: anywhere;
}
pre b { color: var(--accent); }
.sample { margin-top: 1.1rem; }
.sample figcaption { margin: 0 0 .35rem; }
.gallery { display: flex; flex-wrap: wrap; gap: .6rem; margin: .3rem 0 1rem; }
.gallery figure { width: 4.6rem; text-align: center; }
.gallery img {
  width: 4.2rem; height: 4.2rem; object-fit: contain; image-rendering: pixelated; border: 1px solid
  var(--line);
}
.gallery figcaption { font-size: .78rem; line-height: 1.25; margin: .15rem 0 0; }
.missing { border-left: 3px solid var(--line); padding-left: .9rem; }
@media (max-width: 40rem) {
  body { padding: 1.5rem .9rem 3rem; }
  .plot .broad { display: none; }
  .plot .narrow { display: block; }
  table { width: 100%; font-size: .86rem; }
  th, td { padding: .28rem .5rem; }
  tbody th { overflow-wrap: anywhere; }
  .stack thead { position: absolute; clip-path: inset(50%); }
  .stack :is(tbody, tr, th, td) { display: block; border: 0; }
  .stack caption { display: block; }
  .stack, .stack tbody { background: none; }
  .stack tr { background: var(--card); border: 1px solid var(--line); margin-bottom: .5rem; }
  .stack tbody th { font-weight: 600; }
  .stack td { display: flex; justify-content: space-between; gap: 1rem; text-align: right; }
  .stack td::before { content: attr(data-label); color: var(--muted); text-align: left; }
  .stack td:empty { display: none; }
}
@media print { body { background: #ffffff; } section { break-inside: avoid; } }
"""
