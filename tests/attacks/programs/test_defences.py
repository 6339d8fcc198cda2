"""That every defence which a program takes out still stands where the program looks for it.

The programs themselves run in `make attacks`; a defence that was rewritten meanwhile would
make them prove nothing, or fail there alone.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import os, sys
from tests.attacks.programs import {module} as program

for name, take_out in program.{table}.items():
    child = os.fork()  # what is taken out is not put back
    if not child:
        take_out()
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(f"{{name!r}} can't be taken out")
print(len(program.{table}))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "table"),
    [
        ("defences", "OF_SUMS"),
        ("defences", "OF_WORKERS"),
        ("defences", "OF_DECISIONS"),
        ("second_chance_fedd", "DEFENCES"),
    ],
)
def test_each_defence_can_be_taken_out(module: str, table: str) -> None:
    program = PROGRAM.format(module=module, table=table)
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) > 0
