"""The page's markup and style: one file, no script, nothing from a network."""

STYLE = """\
:root {
  color-scheme: light dark;
  --font: system-ui, "Segoe UI", Roboto, "DejaVu Sans", "Noto Sans", sans-serif;
  --ground: #fcfcfa; --card: #ffffff; --ink: #1d2430; --soft: #566072; --faint: #b9c0ca;
  --line: #dfe3e8; --link: #0b57a4;
  --good: #11734a; --bad: #b3261e; --even: #5b6675;
  --s1: #0b62b5; --s2: #c2410c; --s3: #12805c; --s4: #7c3aad;
  --s5: #a16207; --s6: #0e7490; --s7: #be185d; --s8: #4d5a6b;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #12161c; --card: #1a2028; --ink: #e6eaf0; --soft: #a5b0be; --faint: #4d5866;
    --line: #2c3540; --link: #7db7f5;
    --good: #4cc38a; --bad: #ff8a80; --even: #a5b0be;
    --s1: #6cb2ff; --s2: #ff9a5c; --s3: #4fd1a1; --s4: #c99bff;
    --s5: #e3b341; --s6: #4fd0e3; --s7: #ff86b8; --s8: #b6c2d0;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--ground); color: var(--ink);
  font: 16px/1.55 var(--font); overflow-wrap: anywhere;
}
main { max-width: 72rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: clamp(1.6rem, 1.1rem + 2.2vw, 2.5rem); line-height: 1.15; margin: .5rem 0 1rem; }
h2 { font-size: clamp(1.25rem, 1.05rem + .9vw, 1.6rem); line-height: 1.25; margin: 3rem 0 .75rem; }
h3 { font-size: 1.05rem; margin: 1.5rem 0 .5rem; }
p { margin: .5rem 0; max-width: 68ch; }
a { color: var(--link); }
.lead { font-size: 1.15rem; }
.soft, figcaption, caption { color: var(--soft); font-size: .875rem; }
nav ul { display: flex; flex-wrap: wrap; gap: .25rem 1rem; padding: 0; list-style: none; }
.changes { list-style: none; padding: 0; margin: .5rem 0; max-width: 78ch; }
.changes li { padding: .3rem 0 .3rem .9rem; border-left: 3px solid var(--even); margin: .35rem 0; }
.changes.better li { border-color: var(--good); }
.changes.worse li { border-color: var(--bad); }
h3.better { color: var(--good); } h3.worse { color: var(--bad); }
.warning { border: 1px solid var(--line); background: var(--card); border-radius: .4rem;
  padding: .6rem .9rem; max-width: 78ch; }
figure { margin: 1.25rem 0; padding: .9rem; background: var(--card); border: 1px solid var(--line);
  border-radius: .4rem; }
figure strong { display: block; margin-bottom: .35rem; }
figure svg { display: block; width: 100%; height: auto; max-width: 56rem; margin: 0 auto; }
figure .narrow { display: none; }
.legend { display: flex; flex-wrap: wrap; gap: .1rem 1rem; list-style: none; padding: 0;
  margin: 0 0 .5rem; font-size: .875rem; }
.figures { display: grid; gap: 1rem; }
.figures figure { margin: 0; min-width: 0; }
.words, .scroll { margin: 0 0 1rem; }
.scroll { overflow-x: auto; max-width: 100%; }
table { border-collapse: collapse; font-size: .9rem; width: 100%; }
caption { caption-side: bottom; text-align: left; padding-top: .4rem; }
th, td { text-align: left; vertical-align: top; padding: .35rem .7rem .35rem 0;
  border-bottom: 1px solid var(--line); overflow-wrap: normal; }
th.number { text-align: right; }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.words td { overflow-wrap: anywhere; }
details { margin: .75rem 0; }
summary { cursor: pointer; color: var(--link); padding: .25rem 0; }
code, pre { font: .85rem/1.5 ui-monospace, "DejaVu Sans Mono", monospace; }
pre { background: var(--card); border: 1px solid var(--line); border-radius: .4rem;
  padding: .6rem .8rem; white-space: pre-wrap; overflow-wrap: anywhere; margin: .5rem 0; }
dl.facts { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem;
  margin: .5rem 0; }
dl.facts dt { color: var(--soft); } dl.facts dd { margin: 0; }
:focus-visible { outline: 2px solid var(--link); outline-offset: 2px; }
@media (min-width: 75rem) { .figures.many { grid-template-columns: 1fr 1fr; } }
@media (max-width: 40rem) {
  figure { padding: .7rem .5rem; }
  figure .wide { display: none; } figure .narrow { display: block; }
  /* a line of a table becomes a card: each cell under the name of its column */
  .words table, .words tbody, .words tr, .words td { display: block; width: 100%; }
  .words thead { display: none; }
  .words tr { padding: .5rem 0; border-bottom: 1px solid var(--line); }
  .words td { border: 0; padding: .1rem 0; text-align: left; white-space: normal; }
  .words td::before { content: attr(data-column) ": "; color: var(--soft); }
  .words td:first-child { font-weight: 600; } .words td:first-child::before { content: ""; }
  .words caption { display: block; }
  dl.facts { grid-template-columns: 1fr; } dl.facts dd { margin-bottom: .4rem; }
}
@media print { nav, summary { display: none; } }
"""

PAGE = """\
{% macro table(one, words=false) %}
<div class="{{ 'words' if words else 'scroll' }}"{% if not words %} tabindex="0" role="region"
 aria-label="{{ one.name }}"{% endif %}><table>
{% if one.caption %}<caption>{{ one.caption }}</caption>{% endif %}
<thead><tr>{% for name in one.columns %}<th scope="col"
{%- if one.rows and one.rows[0][loop.index0] is number %} class="number"{% endif %}>
{{- name }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in one.rows %}<tr>{% for cell in row %}
<td data-column="{{ one.columns[loop.index0] }}"{% if cell is number %} class="number"{% endif %}>
{{- cell | cell -}}
</td>{% endfor %}</tr>
{% endfor %}</tbody></table></div>
{% endmacro %}
{% macro picture(one) %}
<figure><strong>{{ one.title }}</strong>
{% if one.legend %}<ul class="legend">{% for key in one.legend %}
<li><span style="color: var(--s{{ key.place + 1 }})" aria-hidden="true">
{{- key.glyph }}</span> {{ key.label }}</li>
{%- endfor %}</ul>{% endif %}
<div class="wide">{{ one.wide | safe }}</div><div class="narrow">{{ one.narrow | safe }}</div>
{% if one.caption %}<figcaption>{{ one.caption }}</figcaption>{% endif %}</figure>
{% endmacro %}
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>What keyfront changes, measured</title>
<style>
{{ style | safe }}</style>
</head>
<body>
<main>
<header>
<h1>What does keyfront change for me?</h1>
{% for line in answer.summary %}
<p{% if loop.first %} class="lead"{% endif %}>{{ line | unbroken }}</p>
{% endfor %}
{% for line in answer.warnings %}<p class="warning">{{ line }}</p>
{% endfor %}
</header>
{% if hero %}{{ picture(hero) }}{% endif %}
{% for verdict in verdicts %}{% set found = answer.by_verdict(verdict) %}{% if found %}
{% set class = verdict if verdict != "no difference" else "even" %}
<h3 class="{{ class }}">{{ verdict | capitalize }}: {{ found | length }}</h3>
<ul class="changes {{ class }}">
{% for line in found %}<li>{{ line.sentence | unbroken }}</li>
{% endfor %}</ul>
{% endif %}{% endfor %}
<nav aria-label="Results"><ul>
{% for part in parts %}<li><a href="#{{ part.anchor }}">{{ part.result.title }}</a></li>
{% endfor %}<li><a href="#machine">Machine, versions, commands</a></li>
</ul></nav>
{% for part in parts %}
<section id="{{ part.anchor }}">
<h2>{{ part.result.title }}</h2>
{% for one in part.comparisons %}{{ table(one, true) }}{% endfor %}
{% if part.figures %}<div class="figures">
{% for one in part.figures %}{{ picture(one) }}{% endfor %}</div>{% endif %}
{% if part.result.notes %}<h3>What differs, and what to know</h3>
<ul>{% for note in part.result.notes %}<li>{{ note }}</li>
{% endfor %}</ul>{% endif %}
{% for one in part.tables %}<details{% if not part.figures and loop.first %} open{% endif %}>
<summary>Table: {{ one.name }} ({{ one.rows | length }} lines)</summary>
{{ table(one) }}</details>
{% endfor %}
{% if part.timelines %}<details><summary>Over time: CPU, connections, pools and caches
({{ part.timelines | length }} figures)</summary>
<div class="figures many">{% for one in part.timelines %}{{ picture(one) }}{% endfor %}</div>
</details>{% endif %}
<p class="soft">Measured {{ part.result.began[:16] | replace("T", " ") }} UTC in
{{ part.result.seconds | round | int }} s;
{{ "the machine was quiet otherwise" if part.result.others.quiet else
"others took " ~ part.result.others.other_cores ~ " cores meanwhile" }}.
To measure it again:</p>
<pre>{{ part.command }}</pre>
</section>
{% endfor %}
<section id="machine">
<h2>Machine, versions, commands</h2>
{% for one in machines %}
<dl class="facts">{% for name, value in one.facts %}<dt>{{ name }}</dt><dd>{{ value }}</dd>
{% endfor %}</dl>
{% endfor %}
<h3>Versions</h3>
<dl class="facts">{% for name, value in versions %}<dt>{{ name }}</dt><dd>{{ value }}</dd>
{% endfor %}</dl>
<h3>Commands</h3>
<pre>{% for command in commands %}{{ command }}
{% endfor %}</pre>
</section>
</main>
</body>
</html>
"""
