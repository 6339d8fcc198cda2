"""The generator's benchmark: FedSearch-NLP's configurations against each site alone.

`python -m tests.generator_bench --data ../shared/data` (or `make bench-generator`).
Triples, training, sums and noise are the daemon's own; what is here makes a small base model,
asks the held-out questions, keeps finished rows, and draws the table.
"""
