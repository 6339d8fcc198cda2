"""The secure-sum modes: each is an object in one table, and has its jobs in another."""

from __future__ import annotations

import ast
from pathlib import Path

from daemon.rounds.work import JOBS, WORK
from peers.attempts import effects as do
from peers.attempts.modes import MODES, MODES_ORDERS
from proto import federation_pb2 as pb

ROOT = Path(__file__).parents[3]
# The two tables, what a site has that says nothing of modes, and the digest of plans from
# before there were any.
ABOUT_A_MODE = {
    "peers/attempts/modes.py",
    "daemon/rounds/work.py",
    "peers/wire/certificates.py",
    "peers/plans/policy.py",
}


def test_every_mode_of_the_wire_has_its_object_and_its_jobs() -> None:
    assert set(MODES) == set(JOBS) == set(pb.Mode.values())
    assert set(MODES_ORDERS) == {order for mode in MODES.values() for order in mode.orders}


def test_every_piece_of_work_is_carried_out_once() -> None:
    own = [effect for jobs in JOBS.values() for effect in jobs.work]
    all_work: list[type] = []
    waiting: list[type] = [do.Work]
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        if hasattr(kind, "phase"):
            all_work.append(kind)
    assert sorted(one.__name__ for one in all_work) == sorted(one.__name__ for one in [*own, *WORK])


def test_nothing_else_asks_which_mode_a_plan_has() -> None:
    asking = {
        path.relative_to(ROOT).as_posix()
        for room in ("peers", "daemon")
        for path in (ROOT / room).rglob("*.py")
        if any(mode in (text := path.read_text(encoding="utf-8")) for mode in ("CKKS", "MASKING"))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("pb.CKKS", "pb.MASKING")
    }
    assert asking == ABOUT_A_MODE
