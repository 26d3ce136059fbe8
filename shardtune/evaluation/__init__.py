"""How good are base and tuned model on given data? `evaluate`, top to bottom; every number with its 95 % interval.

Rows as the run's pipeline makes them (`rows`) → loss of each (`likelihood`), greedy answers (`answers`), fields of JSON
answers (`json_fields`) → `metrics` with their `intervals` → the result and its files (`result`), a table (`table`).
`tasks` runs those of lm-evaluation-harness.
"""
