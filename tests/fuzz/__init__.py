"""Hostile bytes for every parser that takes a peer's, by coverage-guided mutation.

    make fuzz MINUTES=30            every target of tests/fuzz/table.py in turn
    python -m tests.fuzz replay manifest FILE...

What was found, and the inputs that reach most, lie in tests/fuzz/corpus/ and are
replayed by tests/fuzz/test_corpus.py in every `make test`.
"""
