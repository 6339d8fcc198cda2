"""The unit holds what it promises: systemd's own tools and a kernel filter are asked."""

from __future__ import annotations

import asyncio
import ctypes
import ctypes.util
import errno
import os
import re
import shutil
import socket
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from daemon.process.telemetry import resident_bytes
from daemon.process.workers import Worker, import_once

FOLDER = Path(__file__).parents[2] / "config" / "systemd"
UNIT = FOLDER / "fedd.service"
GATEWAY = FOLDER / "fedgate.service"

needs_analyze = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed"
)


def option(name: str, unit: Path = UNIT) -> list[str]:
    """All values of an option in the unit, in order."""
    text = unit.read_text(encoding="utf-8")
    return re.findall(rf"^{name}=(.*)$", text, re.MULTILINE)


def run(*command: str | Path, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=FOLDER.parent.parent,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@pytest.fixture(params=[UNIT, GATEWAY], ids=lambda path: path.stem)
def unit(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A unit with a program that exists, as `verify` demands, beside the other one."""
    for one in (UNIT, GATEWAY):
        (program,) = [line.split()[0] for line in option("ExecStart", one)]
        text = one.read_text(encoding="utf-8").replace(program, sys.executable)
        (tmp_path / one.name).write_text(text)
    return tmp_path / str(request.param.name)


# ---- what systemd says ------------------------------------------------------


@needs_analyze
def test_verify_finds_nothing(unit: Path) -> None:
    verified = run("systemd-analyze", "verify", unit)
    assert (verified.returncode, verified.stdout + verified.stderr) == (0, "")


@needs_analyze
def test_verify_would_find_a_misspelt_option(unit: Path) -> None:
    unit.write_text(unit.read_text().replace("NoNewPrivileges=", "NoNewPrivilege="))
    assert "NoNewPrivilege" in run("systemd-analyze", "verify", unit).stderr


@needs_analyze
def test_exposure_is_at_most_two_and_a_half(unit: Path) -> None:
    told = run("systemd-analyze", "security", "--offline=yes", "--no-pager", "--threshold=25", unit)
    (exposure,) = re.findall(r"Overall exposure level for fed\w+\.service: ([\d.]+)", told.stdout)
    assert float(exposure) <= 2.5
    assert told.returncode == 0


def test_the_account_and_the_folders_are_made(tmp_path: Path) -> None:
    if shutil.which("systemd-sysusers") is None or shutil.which("systemd-tmpfiles") is None:
        pytest.skip("systemd-sysusers or systemd-tmpfiles is not installed")
    if os.geteuid() != 0:
        pytest.skip("only root may give folders to another account")
    (tmp_path / "etc").mkdir()
    root = f"--root={tmp_path}"
    for done in (
        run("systemd-sysusers", root, FOLDER / "fedd.sysusers.conf"),
        run("systemd-tmpfiles", root, "--create", FOLDER / "fedd.tmpfiles.conf"),
    ):
        assert done.returncode == 0, done.stderr
    name, _, uid, gid, *_ = (tmp_path / "etc" / "passwd").read_text().splitlines()[0].split(":")
    lines = (tmp_path / "etc" / "group").read_text().splitlines()
    members = {line.split(":")[0]: line.split(":")[3] for line in lines}
    assert (members["fedgate"], members["hanse"]) == ("hanse", "")
    socket_folder = (tmp_path / "run" / "hanse-gateway").stat()
    assert (socket_folder.st_uid, stat.S_IMODE(socket_folder.st_mode)) == (int(uid), 0o750)
    assert socket_folder.st_gid != int(gid)
    settings, identity = (
        (tmp_path / "etc" / "hanse" / inner).stat() for inner in (".", "identity")
    )
    assert name == option("User")[0]
    assert (settings.st_uid, settings.st_gid, stat.S_IMODE(settings.st_mode)) == (
        0,
        int(gid),
        0o750,
    )
    assert (identity.st_uid, stat.S_IMODE(identity.st_mode)) == (int(uid), 0o700)


# ---- what the daemon needs --------------------------------------------------


def test_the_gateway_is_of_another_user_and_sees_no_folder_of_the_site() -> None:
    ours = {*option("User"), *option("Group")}
    theirs = {*option("User", GATEWAY), *option("Group", GATEWAY)}
    assert not ours & theirs
    assert not option("SupplementaryGroups", GATEWAY)
    (hidden,) = option("InaccessiblePaths", GATEWAY)
    folders = (option(f"{kind}Directory")[0] for kind in ("State", "Cache", "Runtime"))
    for folder, below in zip(folders, ("/var/lib", "/var/cache", "/run"), strict=True):
        assert f"-{below}/{folder}" in hidden.split()
    example = (FOLDER.parent / "fedd.example.toml").read_text(encoding="utf-8")
    (socket_folder,) = option("ReadWritePaths")
    assert f'socket = "{socket_folder.removeprefix("-")}/questions.sock"' in example
    assert f'# group = "{option("Group", GATEWAY)[0]}"' in example


def test_the_unit_and_the_default_settings_name_the_same_folders() -> None:
    example = (FOLDER.parent / "fedd.example.toml").read_text(encoding="utf-8")
    assert f'state_dir = "/var/lib/{option("StateDirectory")[0]}"' in example
    assert f'socket = "/run/{option("RuntimeDirectory")[0]}/fedd.sock"' in example
    assert option("Type") == ["notify"]
    assert option("ExecReload") == ["/bin/kill -HUP $MAINPID"]


@pytest.mark.slow
def test_a_refused_setting_is_no_reason_to_restart(tmp_path: Path) -> None:
    refused = run(sys.executable, "-m", "daemon.main", "--config", tmp_path / "missing.toml")
    assert "copy config/fedd.example.toml" in refused.stderr
    assert option("RestartPreventExitStatus") == [str(refused.returncode)]


def syscalls(set_name: str) -> set[str]:
    """The members of a systemd system call set, sets within it expanded."""
    if not set_name.startswith("@"):
        return {set_name}
    listed = run("systemd-analyze", "syscall-filter", "--no-pager", set_name).stdout
    lines = {line.strip() for line in listed.splitlines()[1:]}
    names = {line for line in lines if line and not line.startswith("#")}
    return set().union(*(syscalls(name) for name in names))


def filtered_syscalls() -> set[str]:
    """What the unit's SystemCallFilter= lines allow, read as systemd.exec(5) says."""
    allowed = syscalls("@default")
    for line in option("SystemCallFilter"):
        named = set().union(*(syscalls(name) for name in line.removeprefix("~").split()))
        allowed = allowed - named if line.startswith("~") else allowed | named
    return allowed


@pytest.mark.slow
@needs_analyze
def test_the_daemon_can_do_its_work_under_the_unit_s_filters(tmp_path: Path) -> None:
    if ctypes.util.find_library("seccomp") is None:
        pytest.skip("libseccomp.so.2 is not installed")
    allowed = filtered_syscalls()
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.config.test_systemd"),
            " ".join(allowed),
            " ".join(syscalls("@known") - allowed),
            option("RestrictAddressFamilies")[0],
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(FOLDER.parent.parent)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "all done\n"), done.stderr


# ---- the confined program ---------------------------------------------------
# What follows runs in a process of its own, under a filter that libseccomp makes as it
# does for systemd: what the unit does not allow fails with EPERM, what libseccomp does not
# know with ENOSYS, sockets of other families with EAFNOSUPPORT.

_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000  # SCMP_ACT_ALLOW, SCMP_ACT_ERRNO (seccomp.h)
_EQUAL = 4  # SCMP_CMP_EQ
_NO_NEW_PRIVILEGES = 38  # PR_SET_NO_NEW_PRIVS (prctl.h)


class _Comparison(ctypes.Structure):
    """struct scmp_arg_cmp: compare one argument of the system call."""

    _fields_ = (
        ("argument", ctypes.c_uint),
        ("operator", ctypes.c_int),
        ("value", ctypes.c_uint64),
        ("unused", ctypes.c_uint64),
    )


def confine(allowed: list[str], refused: list[str], families: list[str]) -> None:
    assert ctypes.CDLL(None).prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) == 0
    seccomp = ctypes.CDLL("libseccomp.so.2")
    seccomp.seccomp_init.restype = ctypes.c_void_p
    rules = ctypes.c_void_p(seccomp.seccomp_init(_ERRNO | errno.ENOSYS))

    def add(name: str, verdict: int, *comparisons: _Comparison) -> None:
        number = seccomp.seccomp_syscall_resolve_name(name.encode())
        if number >= 0:  # else: a system call of another architecture
            array = (_Comparison * len(comparisons))(*comparisons)
            added = seccomp.seccomp_rule_add_array(rules, verdict, number, len(array), array)
            assert added == 0, name

    for name in allowed:
        if name != "socket":
            add(name, _ALLOW)
    for name in refused:
        add(name, _ERRNO | errno.EPERM)
    members = {getattr(socket, family) for family in families}
    for family in range(64):
        verdict = _ALLOW if family in members else _ERRNO | errno.EAFNOSUPPORT
        add("socket", verdict, _Comparison(0, _EQUAL, family, 0))
    assert seccomp.seccomp_load(rules) == 0


def expect_refusals() -> None:
    for what, number in (
        (lambda: os.setuid(os.getuid()), errno.EPERM),
        (lambda: os.chroot("."), errno.EPERM),
        (lambda: socket.socket(socket.AF_NETLINK), errno.EAFNOSUPPORT),
    ):
        with pytest.raises(OSError) as refused:
            what()
        assert refused.value.errno == number


def arithmetic() -> int:
    """What workers do: JIT-compiled torch kernels, CKKS, an index on disk."""
    import hnswlib
    import numpy as np
    import tenseal
    import torch

    torch.nn.Conv1d(8, 8, 3)(torch.randn(1, 8, 9)).sum().backward()
    torch.nn.Linear(8, 8).bfloat16()(torch.randn(4, 8).bfloat16())
    index = hnswlib.Index("cosine", 8)
    index.init_index(16)
    index.add_items(np.eye(8))
    index.save_index("index.hnsw")
    context = tenseal.context(tenseal.SCHEME_TYPE.CKKS, 8192, coeff_mod_bit_sizes=[60, 60])
    context.global_scale = 2**20
    return len(tenseal.ckks_vector(context, [1.0]).serialize())


def open_to_group(path: Path) -> None:
    path.chmod(0o660)
    os.chown(path, -1, os.getgid())


async def daily_work() -> None:
    """What the daemon does: workers, a store, connections, the control socket."""
    import_once(["torch"], threads=1)
    for forked in (False, True):
        worker = Worker("confined", threads=1, nice=5, forked=forked)
        assert await worker.run(arithmetic) > 0
        assert worker.pid is not None
        assert resident_bytes([os.getpid(), worker.pid]) > 0
        await worker.stop()
    with sqlite3.connect("state.sqlite3") as store:
        store.execute("PRAGMA journal_mode=WAL")
        store.execute("CREATE TABLE head (round INTEGER)")
    server = grpc.aio.server()
    port = server.add_insecure_port("localhost:0")
    server.add_insecure_port("unix:fedd.sock")
    open_to_group(Path("fedd.sock"))
    await server.start()
    for address in (f"localhost:{port}", "unix:fedd.sock"):
        async with grpc.aio.insecure_channel(address) as channel:
            await channel.channel_ready()
    await server.stop(None)


if __name__ == "__main__":
    confine(*(argument.split() for argument in sys.argv[1:4]))
    expect_refusals()
    asyncio.run(asyncio.wait_for(daily_work(), 90))
    print("all done")
