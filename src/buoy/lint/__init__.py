"""`buoy check`: reads training code before it runs and names the lines that will kill the session.

sources.py     bytes to a Document: scripts, notebooks with their magics, Markdown fences
collector.py   one pass over the syntax trees into facts.py
training.py    frameworks, models, gradients, accumulation; and when a line runs, which is what a failure costs
constants.py   numbers, sizes and path endings that the source states
rules/         the rules in families, small functions over the facts; docs/rules/ has a page for each
engine.py      files in, diagnostics out
fixer.py       the edits, byte for byte
"""
