"""One target under atheris: libFuzzer, guided by the coverage of our Python code.

    python -m tests.fuzz.engine manifest .fuzz/manifest -max_total_time=60

A process of its own for each target, because a crash of native code ends it.
"""

from __future__ import annotations

import sys
from random import Random

import atheris

# What is imported in here is instrumented; it must not have been imported before.
with atheris.instrument_imports(include=["crypto", "peers", "daemon"]):
    from tests.fuzz.table import TARGETS

_BLIND = 0.3  # of the mutations are libFuzzer's own


def main() -> None:
    """Fuzz the target that the first argument names; the others are libFuzzer's."""
    target = TARGETS[sys.argv.pop(1)]
    for seed in target.seeds():
        target.judge(seed)  # what is loaded once is not any input's time

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        chance = Random(seed)
        if chance.random() > _BLIND:
            mutated = target.mutate(data, chance)
            while chance.random() < 0.4:
                mutated = target.mutate(mutated, chance)
            if len(mutated) <= max_size:
                return mutated
        blind: bytes = atheris.Mutate(data, max_size)
        return blind

    def take(data: bytes) -> None:
        target.take(data)

    atheris.Setup([*sys.argv, f"-max_len={target.largest}"], take, custom_mutator=mutate)
    atheris.Fuzz()


main()
