"""The learning benchmark: recipes against baselines, on real institutions' data.

`python -m tests.learning_bench --data ../shared/data` (or `make bench-learning`).
Training and averaging are the daemon's own functions; what is here reads the
data, asks the questions, keeps finished cells, and draws the tables.
"""
