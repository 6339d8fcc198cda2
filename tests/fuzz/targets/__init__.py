"""What is fuzzed: each parser that takes a peer's bytes."""
