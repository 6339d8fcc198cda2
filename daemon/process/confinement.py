"""What a process gives up before it looks at a stranger's file: the kernel does not give it back.

It writes nothing, signals nobody, and reads that one file and the programs that it is read by,
nothing else (Landlock): not the site's keys, its library, or the file beside it. It makes no
socket (seccomp(2)): Landlock would let it call `fedd` by its socket's path.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import shutil
import signal
import stat
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_STACK_BYTES: Final = 8 << 20
_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_PR_CAPBSET_DROP, _CAPABILITY_VERSION = 24, 0x20080522
_READ_ALL: Final = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000

# landlock_create_ruleset, _add_rule and _restrict_self (landlock(7))
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_GET_VERSION, _PATH_BENEATH = 1, 1
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
# WRITE_FILE, READ_FILE, READ_DIR, the REMOVE_ and MAKE_ rights, REFER and TRUNCATE: bits of
# files. To execute (bit 0) takes the right to read. Each is known from a version on.
_FILES: Final = {1: 0x1FFE, 2: 0x3FFE, 3: 0x7FFE}
_TCP: Final = 3  # to bind and to connect; version 4
_OUTWARDS: Final = 3  # abstract sockets and signals to processes outside; from this version on:
_SCOPED: Final = 6

# A filter of system calls (seccomp(2)) is a program for the kernel's classic packet filter.
_FILTER: Final = 2
_LOAD, _AND, _JUMP_IF_EQUAL, _JUMP_FROM, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
_CALL_AT, _MACHINE_AT, _ARGUMENTS_AT = 0, 4, 16  # in what it looks at; arguments have 8 bytes
_LET_IT, _REFUSE_IT = 0x7FFF0000, 0x00050000 | errno.EPERM
_X32: Final = 0x40000000  # calls from here on are other numbers for the same (x86_64)
_MACHINES: Final = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}  # linux/audit.h

# What is refused whatever is asked, by its number on x86_64 and on aarch64 (None: not there).
_REFUSED: Final = (
    # To call anybody: by a socket, or by what could be had instead of one.
    *((41, 198), (425, 425)),  # socket, io_uring_setup
    # To leave the group of processes, which is ended with its reader.
    *((109, 154), (112, 157)),  # setpgid, setsid
    # What Landlock lets everybody do to files by their paths: rights, owners, times, notes.
    *((90, None), (91, 52), (268, 53), (452, 452)),  # chmod, f-, -at, -at2
    *((92, None), (93, 55), (94, None), (260, 54)),  # chown, f-, l-, f-at
    *((132, None), (235, None), (261, None), (280, 88)),  # utime, -s, futimesat, utimensat
    *((188, 5), (189, 6), (190, 7), (463, 463)),  # setxattr, l-, f-, -at
    *((197, 14), (198, 15), (199, 16), (466, 466)),  # removexattr, l-, f-, -at
    (469, 469),  # file_setattr
    # ... and to learn of them: notes, and who is written when.
    *((191, 8), (192, 9), (193, 10), (194, 11), (195, 12), (196, 13)),  # getxattr, listxattr
    *((464, 464), (465, 465), (253, None), (294, 26), (300, 262)),  # ...at, inotify, fanotify
    # To put others of the same user off their work.
    *((141, 140), (142, 118), (144, 119), (314, 274)),  # setpriority, sched_setparam, ...
    *((251, 30), (256, 238), (279, 239)),  # ioprio_set, migrate_pages, move_pages
    # Memory that is no process's data, or outlives it.
    *((29, 194), (64, 190), (68, 186), (240, 180)),  # shmget, semget, msgget, mq_open
    *((319, 279), (248, 217), (249, 218), (250, 219)),  # memfd_create, add_key, request_key, keyctl
)
# What is refused where an argument, by its place, is something: on another process than this one,
# or memory that is shared with nobody (mmap(2), MAP_SHARED and MAP_ANONYMOUS) or grows downwards.
_OF_OTHERS: Final = ((302, 261), (203, 122))  # prlimit64, sched_setaffinity
# What signals anybody but this process, which Landlock keeps within from version 6 on.
_SIGNALS: Final = (
    *((62, 129), (200, 130), (234, 131)),  # kill, tkill, tgkill
    *((129, 138), (297, 240)),  # rt_sigqueueinfo, rt_tgsigqueueinfo
    (424, 424),  # pidfd_send_signal: a descriptor is nobody's number, or chance
)
_FCNTL, _SET_OWNER = (72, 25), (8, 15)  # of a file, whom the kernel signals: F_SETOWN, _EX
_MMAP: Final = (9, 222)
_FLAGS_AT: Final = _ARGUMENTS_AT + 3 * 8
_SHARED_AND_ANONYMOUS, _GROWS_DOWN = 0x21, 0x100

# Programs and their data, and what the C library and number crunchers ask of the machine. Of
# /etc, /home, /opt, /srv, /var and /tmp nothing.
_PROGRAMS: Final = (
    *("/bin", "/lib", "/lib32", "/lib64", "/nix/store", "/gnu/store"),
    *(f"/usr/{part}" for part in ("bin", "lib", "lib32", "lib64", "libexec", "share")),
    *(f"/usr/local/{part}" for part in ("bin", "lib", "lib64", "share")),
    *("/etc/ld.so.cache", "/etc/localtime", "/dev/null", "/dev/urandom"),
    *("/proc/cpuinfo", "/proc/meminfo", "/sys/devices/system/cpu"),
)
INSTALLED: Final = ("site-packages", "dist-packages")  # folders of what pip and Debian install


class ConfinementError(Exception):
    """This machine does not let a process give up its rights; the message says what to do."""


class _Rule(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("at", ctypes.c_int32))


class _Instruction(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_uint16),
        ("if_true", ctypes.c_uint8),
        ("if_false", ctypes.c_uint8),
        ("value", ctypes.c_uint32),
    )


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("first", ctypes.POINTER(_Instruction)))


def confine(readable: Path, *, memory_bytes: int, cpu_s: float) -> None:
    """Give up all but reading one file, with so much data and processor time.

    Raises OSError where that file can't be opened, and ConfinementError.
    """
    at = os.open(readable, os.O_PATH | os.O_CLOEXEC)
    try:
        end_with_parent()
        _limit(resource.RLIMIT_DATA, memory_bytes)
        _limit(resource.RLIMIT_STACK, _STACK_BYTES)  # which are not counted as data
        _limit(resource.RLIMIT_CORE, 0)
        _limit(resource.RLIMIT_FSIZE, 0)
        _limit(resource.RLIMIT_CPU, max(1, int(cpu_s)))
        _prctl(_PR_SET_NO_NEW_PRIVS, 1)
        # Another user's network has no routes. For root alone without one of users, in which
        # root could no longer read what belongs to others.
        is_root = os.geteuid() == 0
        _LIBC.unshare(_CLONE_NEWNET if is_root else _CLONE_NEWUSER | _CLONE_NEWNET)
        _drop_capabilities(keep=_READ_ALL if is_root else 0)
        _touch_nothing_but(at)
        _call_nobody()
    finally:
        os.close(at)


def end_with_parent() -> None:
    """Have the kernel end this process with the one that began it. Raises ConfinementError."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def landlock_version() -> int:
    """What this kernel knows of Landlock; 0: nothing.

    Raises ConfinementError where somebody denies it.
    """
    version = int(_LIBC.syscall(_CREATE_RULESET, None, 0, _GET_VERSION))
    if version >= 1:
        return version
    # Before Linux 5.13, or switched off at boot. A filter that denies it is another matter.
    if ctypes.get_errno() in (errno.ENOSYS, errno.EOPNOTSUPP):
        return 0
    raise _refused("landlock_create_ruleset")


def _touch_nothing_but(readable: int) -> None:
    """Nothing is written, made, renamed or removed, nobody called or killed, and little read."""
    version = landlock_version()
    if version == 0:  # the other limits hold
        return
    rights = [_FILES[min(version, 3)], _TCP, _OUTWARDS][: 1 + (version >= 4) + (version >= _SCOPED)]
    handled = (ctypes.c_uint64 * len(rights))(*rights)
    rules = _LIBC.syscall(_CREATE_RULESET, ctypes.byref(handled), ctypes.sizeof(handled), 0)
    if rules < 0:
        raise _refused("landlock_create_ruleset")
    try:
        _allow(rules, readable, _READ_FILE)
        _allow_at(rules, "/proc", _READ_DIR)  # to close descriptors; no file below it is read
        for path in _programs():
            _allow_at(rules, path, _READ_FILE | _READ_DIR)
        if _LIBC.syscall(_RESTRICT_SELF, rules, 0) != 0:
            raise _refused("landlock_restrict_self")
    finally:
        os.close(rules)


def _call_nobody() -> None:
    """No socket is made from here on, and nothing else is done that Landlock lets everybody do."""
    if platform.machine() not in _MACHINES:  # calls have numbers that are not written here
        return  # the other limits hold
    machine, column = _MACHINES[platform.machine()]
    refuse, let_it = (_RETURN, 0, 0, _REFUSE_IT), (_RETURN, 0, 0, _LET_IT)
    # Jumps say how many steps are passed over, if it is so and if not.
    steps = [(_LOAD, 0, 0, _MACHINE_AT), (_JUMP_IF_EQUAL, 1, 0, machine), refuse]
    steps += [(_LOAD, 0, 0, _CALL_AT), (_JUMP_FROM, 0, 1, _X32), refuse]
    for numbers in _REFUSED:
        if (call := numbers[column]) is not None:
            steps += [(_JUMP_IF_EQUAL, 0, 1, call), refuse]
    for numbers in _OF_OTHERS:  # 0: this process
        steps += [(_JUMP_IF_EQUAL, 0, 4, numbers[column]), (_LOAD, 0, 0, _ARGUMENTS_AT)]
        steps += [(_JUMP_IF_EQUAL, 0, 1, 0), let_it, refuse]
    if landlock_version() < _SCOPED:
        for numbers in _SIGNALS:
            steps += [(_JUMP_IF_EQUAL, 0, 4, numbers[column]), (_LOAD, 0, 0, _ARGUMENTS_AT)]
            steps += [(_JUMP_IF_EQUAL, 0, 1, os.getpid()), let_it, refuse]
        steps += [(_JUMP_IF_EQUAL, 0, 6, _FCNTL[column]), (_LOAD, 0, 0, _ARGUMENTS_AT + 8)]
        for command in _SET_OWNER:
            steps += [(_JUMP_IF_EQUAL, 0, 1, command), refuse]
        steps += [let_it]
    steps += [(_JUMP_IF_EQUAL, 0, 8, _MMAP[column])]
    for unwanted in (_SHARED_AND_ANONYMOUS, _GROWS_DOWN):
        steps += [(_LOAD, 0, 0, _FLAGS_AT), (_AND, 0, 0, unwanted)]
        steps += [(_JUMP_IF_EQUAL, 0, 1, unwanted), refuse]
    steps += [let_it]
    code = (_Instruction * len(steps))(*(_Instruction(*step) for step in steps))
    program = _Program(len(steps), code)
    if _LIBC.prctl(_PR_SET_SECCOMP, _FILTER, ctypes.byref(program), 0, 0) == 0:
        return
    if ctypes.get_errno() != errno.EINVAL:  # that: a kernel that knows no filters
        raise _refused("prctl, PR_SET_SECCOMP")


def _programs() -> Iterator[str]:
    """The code that reads files, with its data.

    Of Python's, what is installed; of what is imported from elsewhere, as from a checkout, its
    package alone: a state folder may lie beside it.
    """
    roots = [*_PROGRAMS, sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")]
    roots += [
        f"{sys.base_prefix}/lib",
        *(path for path in sys.path if Path(path).name in INSTALLED),
    ]
    if engine := shutil.which("tesseract"):  # which may be no part of the system
        prefix = Path(engine).resolve().parent.parent
        roots += [engine, f"{prefix}/lib", f"{prefix}/share"]
    roots += filter(None, [os.environ.get("TESSDATA_PREFIX")])
    yield from dict.fromkeys(roots)
    below = tuple(f"{root}/" for root in roots)
    for name, module in tuple(sys.modules.items()):
        if "." not in name:
            for path in getattr(module, "__path__", None) or [getattr(module, "__file__", None)]:
                if path and not path.startswith(below):
                    yield path


def _allow_at(rules: int, path: str, rights: int) -> None:
    try:
        at = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # not on this machine
    try:
        _allow(rules, at, rights)
    finally:
        os.close(at)


def _allow(rules: int, at: int, rights: int) -> None:
    """To do that with a file, or with all that is below a folder."""
    if not stat.S_ISDIR(os.fstat(at).st_mode):
        rights &= _READ_FILE
    rule = _Rule(rights, at)
    if _LIBC.syscall(_ADD_RULE, rules, _PATH_BENEATH, ctypes.byref(rule), 0) != 0:
        raise _refused("landlock_add_rule")


def _drop_capabilities(*, keep: int) -> None:
    """But for those, by their bits; also for programs that are begun."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; then of bits from 32 on
    if _LIBC.capget(ctypes.byref(header), ctypes.byref(sets)) == 0 and not any(sets):
        return  # as under the unit, which lets nobody change them
    for capability in range(64):
        if not keep >> capability & 1:
            _LIBC.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)  # refused for those that are not
    sets = (ctypes.c_uint32 * 6)(keep, keep)
    if _LIBC.capset(ctypes.byref(header), ctypes.byref(sets)) != 0:
        raise _refused("capset")


def _limit(kind: int, most: int) -> None:
    """Less, where less is all that this process may have."""
    _, hard = resource.getrlimit(kind)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    try:
        resource.setrlimit(kind, (most, most))
    except (ValueError, OSError) as error:
        raise ConfinementError(f"this machine lets no reader be limited ({error})") from None


def _prctl(option: int, value: int) -> None:
    if _LIBC.prctl(option, value, 0, 0, 0) != 0:
        raise _refused("prctl")


def _refused(call: str) -> ConfinementError:
    return ConfinementError(
        f"this machine lets no reader give up its rights ({call}: "
        f"{os.strerror(ctypes.get_errno())}), so nothing is read: permit that call, as "
        "config/systemd/fedd.service does"
    )
