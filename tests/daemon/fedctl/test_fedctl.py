"""fedctl as a person and a script see it: command lines, what they print, how they end."""

from __future__ import annotations

import errno
import io
import math
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import typer.main
from rich.console import Console

from daemon.fedctl.commands import train
from daemon.fedctl.main import app
from daemon.fedctl.terminal.output import Exit
from daemon.fedctl.terminal.training_view import TrainingView
from proto import control_pb2 as control
from proto import federation_pb2 as federation
from tests.support.canned_daemon import CannedDaemon, canned_daemon
from tests.support.canned_replies import DIGEST, progress
from tests.support.command_line import Fedctl, Ran

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HANSE_SOCKET", raising=False)
    monkeypatch.delenv("COLUMNS", raising=False)


# ---- every command speaks JSON, and nothing but JSON ------------------------

ANSWERED = [
    (["status"], "site"),
    (["peers"], "peers"),
    (["rounds"], "rounds"),
    (["rounds", "show", "2"], "round"),
    (["ask", "Why do locks leak?"], "answer"),
    (["search", "Why do locks leak?", "--explain"], "passages"),
    (["eval"], "mrr_at_10"),
    (["eval", "--split", "valid"], "mrr_at_10"),
    (["eval", "--history"], "points"),
    (["pairs"], "kinds"),
    (["pairs", "list"], "kinds"),
    (["pairs", "show"], "examples"),
    (["pairs", "build", "--how", "cloze"], "made"),
    (["pairs", "drop", "--all"], "kinds"),
    (["train", "--rounds", "2", "--detach"], "run"),
    (["train", "--stop"], "run"),
    (["personalise"], "pairs_judged"),
]


@pytest.mark.parametrize(("words", "key"), ANSWERED, ids=lambda v: " ".join(v)[:24])
@pytest.mark.parametrize("before", [True, False], ids=["--json first", "--json last"])
def test_json_is_one_object_and_alone(
    fedctl: Fedctl, daemon: CannedDaemon, words: list[str], key: str, before: bool
) -> None:
    ran = fedctl("--json", *words) if before else fedctl(*words, "--json")
    assert (ran.code, ran.err) == (0, "")
    assert key in ran.object


@pytest.mark.parametrize(("words", "key"), ANSWERED, ids=lambda v: " ".join(v)[:24])
def test_people_get_no_json(
    fedctl: Fedctl, daemon: CannedDaemon, words: list[str], key: str
) -> None:
    ran = fedctl(*words)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.strip()
    assert "{" not in ran.out


NEED_A_DAEMON = [words for words, _ in ANSWERED] + [["train", "--attach"], ["ingest", str(ROOT)]]


@pytest.mark.parametrize("words", NEED_A_DAEMON, ids=lambda v: " ".join(v)[:24])
def test_without_a_daemon(fedctl: Fedctl, path: Path, words: list[str]) -> None:
    ran = fedctl(*words, "--socket", path, "--json")
    assert ran.code == Exit.UNREACHABLE
    assert ran.err == f"fedctl: {ran.object['error']}. {ran.object['remedy']}.\n"
    assert str(path) in ran.object["error"]


@pytest.mark.slow
def test_every_command_takes_the_same_options(fedctl: Fedctl) -> None:
    for words in ("ca init", "ca sign", "site init", "site install", "site show", "manifest sign",
                  "manifest show", "ingest", "train", "ask", "search", "eval", "status", "peers",
                  "rounds", "rounds show", "demo", "pairs", "pairs build",
                  "pairs drop"):  # fmt: skip
        shown = fedctl(*words.split(), "--help")
        assert shown.code == 0
        for option in ("--json", "--socket", "--config"):
            assert option in shown.out, f"{words} lacks {option}"


def every_command() -> Iterator[tuple[str, Any]]:
    commands: list[tuple[str, Any]] = [("fedctl", typer.main.get_command(app))]
    while commands:
        name, one = commands.pop()
        commands += [(f"{name} {n}", sub) for n, sub in getattr(one, "commands", {}).items()]
        yield name, one


def test_paragraphs_of_help_are_broken_by_the_terminal_alone() -> None:
    broken = [name for name, one in every_command() if re.search(r"\S\n\S", one.help or "")]
    assert not broken


def test_no_help_text_loses_a_word() -> None:
    """Typer's help takes "[learning]" for a style, and drops it."""
    found = []
    for name, one in every_command():
        texts = [one.help, *(getattr(option, "help", "") for option in one.params)]
        found += [(name, word) for t in texts for word in re.findall(r"\[[a-z_]+\]", t or "")]
    assert not found


# ---- what people see --------------------------------------------------------


def test_status_for_people(fedctl: Fedctl, daemon: CannedDaemon) -> None:
    out = fedctl("status").out
    assert "north of hanse-test" in out
    assert "1 of 2 connected" in out
    assert "recall@10 0.987" in out
    assert "EXPIRED" in out  # the canned certificate ended in 1970
    assert "none; the last run ended with round 2, by " in out
    daemon.run = federation.Run(run_id="run", target_round=9, requested_by="west")
    assert "to round 9, by west" in fedctl("status").out
    # Markup and control characters from elsewhere are shown, not obeyed.
    assert "east [did not answer]\N{REPLACEMENT CHARACTER}[31m" in out
    daemon.empty = True  # and a version is here, with an index of nothing
    assert "nothing yet: no documents are here" in fedctl("status").out


def test_status_for_machines(fedctl: Fedctl, daemon: CannedDaemon) -> None:
    plain = fedctl("status", "--json").object
    assert plain["model_digest"] == DIGEST.hex()
    assert plain["run"]["target_round"] == 2
    assert plain["run"]["plan"] is None  # unset, and told to be
    assert plain["uptime_s"] == 0.0  # unset fields are there, too


@pytest.mark.parametrize(("reached", "code"), [(1, Exit.PARTLY), (0, Exit.FAILED)])
def test_a_run_that_is_stopped_before_anything_was_committed_was_a_run(
    fedctl: Fedctl, daemon: CannedDaemon, reached: int, code: Exit
) -> None:
    """Its stop is a run to round 0; a sum that was signed may be committed behind it."""
    daemon.training = [
        progress(round=1, phase="train", head_round=0),
        progress(round=1, head_round=reached, target_round=0, message="stopped", finished=True),
    ]
    ran = fedctl("train", "--attach")
    assert ran.code == code
    assert f"ended at round {reached} of 2. stopped" in ran.err


def test_who_attaches_to_nothing_is_told_so(fedctl: Fedctl, daemon: CannedDaemon) -> None:
    daemon.training = [progress(phase="idle", head_round=2, finished=True)]
    ran = fedctl("train", "--attach")
    assert ran.err == "No run is under way. The last one, asked for at site north, is over.\n"
    version = DIGEST.hex()[:12]
    assert (ran.code, f"Round 2 is committed. Model version {version}" in ran.out) == (0, True)
    daemon.training = [progress(phase="idle", head_round=2, target_round=0, finished=True)]
    ran = fedctl("train", "--attach")
    stopped = "nothing is being trained; the last run was stopped, with round 2 committed"
    assert (ran.code, stopped in ran.err) == (Exit.FAILED, True)


def test_a_stop_says_where_the_run_ends_and_what_may_follow(
    fedctl: Fedctl, daemon: CannedDaemon
) -> None:
    out = " ".join(fedctl("train", "--stop").out.split())
    assert "The run ends with round 2; stopped at site north. Only a sum that is signed" in out


def test_rounds(fedctl: Fedctl, daemon: CannedDaemon) -> None:
    both = fedctl("rounds", "--json").object["rounds"]
    assert [one["round"] for one in both] == [1, 2]
    assert both[0]["coordinator"] == "north"
    assert both[0]["key_dealer"] == "west"
    assert both[0]["contributors"] == ["east", "north", "west"]
    assert both[0]["seconds"] == {"train": 2.5}
    assert both[0]["mean_loss"] is None
    one = fedctl("rounds", "show", 2, "--json").object
    assert (one["round"], one["signed_by"]) == (2, ["east", "north", "west"])
    assert "round 9 is not committed" in fedctl("rounds", "show", 9).err
    daemon.rounds = []
    assert "No round is committed yet" in fedctl("rounds").out


def test_what_a_site_that_caught_up_does_not_know_is_not_called_nought(
    fedctl: Fedctl, daemon: CannedDaemon
) -> None:
    """A script that reads 0 would conclude that the round was without noise."""
    daemon.rounds[1].report.CopyFrom(federation.RoundReport(round=2))
    told = fedctl("rounds", "show", 2, "--json").object
    unknown = ("shared_values", "mean_loss", "noise_multiplier", "clip_norm")
    assert [told[name] for name in unknown] == [None] * 4
    shown = fedctl("rounds", "show", 2).out
    assert re.search(r"shared values +unknown here", shown)
    assert re.search(r"noise +unknown here", shown)


def test_privacy_says_what_its_ledger_lacks(fedctl: Fedctl, daemon: CannedDaemon) -> None:
    daemon.privacy.warning = "this site's record of what it spent lacks round 7"
    assert re.search(r"WARNING +this site's record", fedctl("privacy").out)
    assert "lacks round 7" in fedctl("privacy", "--json").object["warning"]


def test_a_noised_loss_is_marked(fedctl: Fedctl, daemon: CannedDaemon) -> None:
    for one, noise in zip(daemon.rounds, (0.0, 2.0), strict=True):
        one.report.mean_loss, one.report.noise_multiplier = 1.25, noise
    plain, noised = (line for line in fedctl("rounds").out.splitlines() if "1.250" in line)
    assert "noised" not in plain
    assert "1.250 (noised)" in noised
    assert "1.2500 (noised)" in fedctl("rounds", "show", 2).out
    assert "noised" not in fedctl("train", "--attach").err
    daemon.run.plan.privacy.noise_multiplier = 2.0
    assert "round 1 committed, mean loss 1.2500 (noised)" in fedctl("train", "--attach").err


def test_errors_of_peers_stand_whole_below_the_table(fedctl: Fedctl, daemon: CannedDaemon) -> None:
    out = fedctl("peers").out
    assert "\nlast error of west: refused\n" in out
    assert "last error of east" not in out


def test_ask_for_people(fedctl: Fedctl, daemon: CannedDaemon) -> None:
    out = fedctl("ask", "Why do locks leak?", "--top-k", 3).out
    assert "Locks leak. [1]" in out
    assert "[1] Locks (d1#0, page 3, read by OCR)" in out
    assert (daemon.asked[0].question, daemon.asked[0].top_k) == ("Why do locks leak?", 3)


# ---- refusals ---------------------------------------------------------------


def test_the_daemons_refusal_is_told_in_one_line(fedctl: Fedctl, daemon: CannedDaemon) -> None:
    daemon.refusal = "a question has at most 16384 bytes\nAsk it in fewer words"
    ran = fedctl("ask", "why", "--json")
    assert ran.code == Exit.FAILED
    assert ran.object == {
        "error": "a question has at most 16384 bytes",
        "remedy": "Ask it in fewer words",
    }
    assert ran.err == "fedctl: a question has at most 16384 bytes. Ask it in fewer words.\n"


def test_what_the_daemon_finds_senseless_is_a_usage_error(
    fedctl: Fedctl, daemon: CannedDaemon
) -> None:
    daemon.refusal = "there is no recipe 'nix': there are hanse, fedavg"
    daemon.refused_as = grpc.StatusCode.INVALID_ARGUMENT
    ran = fedctl("train", "--rounds", 1, "--recipe", "nix")
    assert (ran.code, "there are hanse" in ran.err) == (Exit.USAGE, True)


@pytest.mark.parametrize("code", [grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN])
def test_what_grpc_says_in_the_daemons_place_has_a_cause_and_a_remedy(
    fedctl: Fedctl, daemon: CannedDaemon, code: grpc.StatusCode
) -> None:
    daemon.refusal, daemon.refused_as = "Internal error from Core", code
    ran = fedctl("ask", "why", "--json")
    assert ran.code == Exit.FAILED
    assert ran.object["error"].startswith("the daemon failed at this, or broke it off (")
    assert "journalctl -u fedd" in ran.object["remedy"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["train", "--rounds", "0"], "'--rounds': must be at least 1, not 0."),
        (["train", "--rounds", "x"], "'--rounds': must be a whole number, not x."),
        (["train", "--clip", "x"], "'--clip': must be a number, not x."),
        (["ask", "why", "--top-k", "101"], "'--top-k': must be at most 100, not 101."),
        (["eval", "--split", "all"], "'--split': 'all' is not one of 'test', "),
    ],
    ids=lambda v: " ".join(v)[:24],
)
def test_a_refused_value_is_told_in_plain_words(fedctl: Fedctl, words: list[str], why: str) -> None:
    assert f"fedctl: Invalid value for {why}" in fedctl(*words).err


def test_socket_without_a_listener(fedctl: Fedctl, path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(path))
    ran = fedctl("status", "--socket", path)
    assert (ran.code, "Connection refused" in ran.err) == (Exit.UNREACHABLE, True)


def test_socket_path_longer_than_the_kernel_takes(fedctl: Fedctl, tmp_path: Path) -> None:
    ran = fedctl("status", "--socket", tmp_path / ("s" * 120))
    assert (ran.code, "107 bytes" in ran.err) == (Exit.USAGE, True)


def test_socket_from_the_settings(fedctl: Fedctl, path: Path, tmp_path: Path) -> None:
    file = tmp_path / "fedd.toml"
    file.write_text(f'[control]\nsocket = "{path}"\n')
    with canned_daemon(path):
        assert fedctl("status", "--config", file, "--json").object["site"] == "north"
    file.write_text("[control]\nsocket = 7\n[oops]\n")
    refused = fedctl("--config", file, "status")
    assert refused.code == Exit.USAGE
    assert "control.socket" in refused.err
    assert "[oops]" in refused.err
    assert refused.err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("option", ["--socket", "--config"])
def test_an_option_beats_the_environment(
    fedctl: Fedctl, daemon: CannedDaemon, path: Path, tmp_path: Path, option: str, *, behind: bool
) -> None:
    """The environment names the site north (`daemon`), the option the site south."""
    socket_south, file = path.with_name("south.sock"), tmp_path / "fedd.toml"
    file.write_text(f'[control]\nsocket = "{socket_south}"\n')
    (tmp_path / "a.txt").write_text("Locks keep the level of a canal.")
    named = [option, socket_south if option == "--socket" else file]

    def at_south(*words: object) -> Ran:
        return fedctl(*words, *named) if behind else fedctl(*named, *words)

    with canned_daemon(socket_south) as south:
        south.site = "south"
        assert at_south("status", "--json").object["site"] == "south"
        assert at_south("rounds", "show", 1).code == 0  # a group's own options stand between
        assert "At site south: documents: 1 new" in at_south("ingest", tmp_path / "a.txt").out
        assert "at site south" in at_south("train", "--rounds", 1, "--detach").out
        assert "at site south" in at_south("train", "--rounds", 1).err
        assert daemon.asked == []
        assert fedctl("status", "--json").object["site"] == "north"


@pytest.mark.parametrize(
    "words",
    [
        ["bogus"],
        ["ca"],
        ["ask"],
        ["eval", "--bogus"],
        ["train"],
        ["train", "--rounds", "0"],
        ["train", "--rounds", "1", "--stop"],
        ["train", "--attach", "--learning-rate", "0.1"],
        ["rounds", "show", "x"],
        ["ca", "sign", "missing.csr", "--ca", "ca", "--out", "x"],
        ["ca", "init", "ca", "--federation", "Trade_X"],
        ["ca", "init", "ca", "--federation", "trade", "--days", "99999999"],
        ["ca", "rotate", "missing", "authority-2"],
        ["site", "init", "site", "--federation", "trade", "--site", "Nord"],
        ["site", "show", "missing"],
        ["site", "renew", "missing"],
        ["audit", "verify", "missing.jsonl"],
        ["audit", "show", "audit-000009.jsonl"],
        ["rounds", "verify", "--authority", "missing.crt"],
        ["manifest", "show", "missing.json"],
        ["status", "--config", "missing.toml"],
        ["ingest", "missing.txt"],
        ["demo", "--data", "missing"],
        ["demo", "--sites", "a,b"],
    ],
    ids=" ".join,
)
def test_usage_errors(fedctl: Fedctl, words: list[str]) -> None:
    ran = fedctl(*words, "--json")
    assert ran.code == Exit.USAGE
    assert ran.err.startswith("fedctl: ")
    assert ran.err.count("\n") == 1
    assert set(ran.object) == {"error", "remedy"}


def test_a_defect_of_ours_is_no_traceback(
    fedctl: Fedctl, daemon: CannedDaemon, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    # A reply that the converter was not made for.
    monkeypatch.setattr(math, "isfinite", lambda _: 1 / 0)
    ran = fedctl("status", "--json")
    assert ran.code == Exit.FAILED
    assert ran.err.count("\n") == 1
    assert "ZeroDivisionError" in ran.object["error"]
    (report,) = tmp_path.glob("fedctl-*.txt")
    assert str(report) in ran.object["remedy"]
    assert "Traceback" in report.read_text()
    assert stat.S_IMODE(report.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "words",
    [
        "documents export --out FOLDER/all.jsonl",
        "documents original a.txt --out FOLDER/a.txt",
        "documents page a.pdf 1 --out FOLDER/a.png",
        "manifest show FOLDER/manifest.json",
        "manifest sign --ca CA --site a=h:1 --site b=h:2 --site c=h:3 --out FOLDER/manifest.json",
    ],
)
def test_a_path_that_nobody_can_open_is_no_defect(
    fedctl: Fedctl, daemon: CannedDaemon, tmp_path: Path, words: str
) -> None:
    """Of a name that is too long, for a folder's mode keeps root from nothing."""
    ca, folder = tmp_path / "ca", tmp_path / ("x" * 300)
    fedctl("ca", "init", ca, "--federation", "trade")
    ran = fedctl(*words.replace("CA", str(ca)).replace("FOLDER", str(folder)).split())
    assert ran.code == (Exit.USAGE if "show" in words else Exit.FAILED), ran.err
    assert f"{folder}" in ran.err
    assert os.strerror(errno.ENAMETOOLONG) in ran.err
    assert "defect" not in ran.err


def test_a_folder_that_only_others_may_look_into_is_no_defect(
    fedctl: Fedctl, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(path: Path, **_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "stat", refuse)
    ran = fedctl("documents", "export", "--out", tmp_path / "all.jsonl", "--json")
    assert (ran.code, ran.err.count("\n")) == (Exit.FAILED, 1)
    assert ran.object["error"] == f"cannot open {tmp_path / 'all.jsonl'}: Permission denied"
    assert "or run it as the user who may" in ran.object["remedy"]


# ---- train ------------------------------------------------------------------


def test_train_watches_until_the_end(fedctl: Fedctl, daemon: CannedDaemon) -> None:
    ran = fedctl("train", "--rounds", 2, "--local-epochs", 3)
    assert ran.code == Exit.OK
    (asked,) = [one for one in daemon.asked if isinstance(one, control.TrainRequest)]
    assert (asked.rounds, asked.plan.local_epochs) == (2, 3)
    assert "round 1 attempt 0: train, coordinator north" in ran.err
    assert "round 1 committed, mean loss 1.2500" in ran.err
    assert "Round 2 is committed" in ran.out


def test_nought_is_chosen_where_it_says_something(fedctl: Fedctl, daemon: CannedDaemon) -> None:
    """On the wire 0 is what was left open; so what was chosen is named beside it."""
    chosen = ["local-epochs", "hard-negatives", "byzantine-sites", "colluders"]
    words = [word for name in chosen for word in (f"--{name}", 0)]
    ran = fedctl("train", "--rounds", 1, "--detach", *words, "--robust", "norm", "--clip", 1)
    assert ran.code == Exit.OK
    assert sorted(daemon.asked[-1].noughts) == sorted(name.replace("-", "_") for name in chosen)
    assert fedctl("train", "--rounds", 1, "--detach", "--mode", "masking").code == Exit.OK
    assert not daemon.asked[-1].noughts
    assert fedctl("train", "--rounds", 1, "--batch-size", 0).code == Exit.USAGE
    assert fedctl("personalise", "--local-epochs", 0).code == Exit.USAGE


def test_the_panel_says_whose_loss_it_is_and_who_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")  # on a dumb terminal no panel is drawn

    def shown(**fields: Any) -> str:
        screen = io.StringIO()
        console = Console(file=screen, force_terminal=True, color_system=None, width=100)
        with TrainingView(console) as view:
            view.show(progress(round=2, loss=0.75, **fields))
        return screen.getvalue()

    assert re.search(
        r"loss here\S* +0\.7500, mean of the last pass", shown(phase="train", fraction=0.5)
    )
    for elsewhere in (
        "prepare",
        "train",
        "committed",
    ):  # it is still of the round before, or of all
        panel = shown(phase=elsewhere, unreachable=["east", "west"])
        assert "loss here" not in panel
        assert "no answer from east, west: `fedctl peers` says why" in panel


def test_train_for_machines_is_a_line_a_step(fedctl: Fedctl, daemon: CannedDaemon) -> None:
    ran = fedctl("train", "--attach", "--json")
    assert (ran.code, ran.err) == (Exit.OK, "")
    assert [line["phase"] for line in ran.lines] == ["train", "committed", "train", "committed"]
    assert ran.lines[0]["loss"] is None  # NaN is no JSON


@pytest.mark.parametrize(("reached", "code"), [(1, Exit.PARTLY), (0, Exit.FAILED)])
def test_a_run_that_ends_early(
    fedctl: Fedctl, daemon: CannedDaemon, reached: int, code: Exit
) -> None:
    daemon.training = [
        progress(round=1, phase="train", head_round=0),
        progress(phase="idle", head_round=reached, finished=True, message="stopped by east"),
    ]
    ran = fedctl("train", "--attach")
    assert ran.code == code
    assert f"ended at round {reached} of 2. stopped by east" in ran.err


def test_a_reason_that_comes_back_is_counted(fedctl: Fedctl, daemon: CannedDaemon) -> None:
    """Two coordinators in turn, each with a reason of its own, and at last another one."""
    reasons = ["0 sites are ready; east: has 0 pairs", "0 sites are ready; east: did not answer"]
    daemon.training = []
    for attempt in range(13):
        for phase, message in (("prepare", ""), ("failed", reasons[attempt % 2])):
            said = progress(round=1, attempt=attempt, phase=phase, message=message)
            daemon.training += [said, said]  # an epoch's report repeats what stands
    last = progress(phase="idle", round=1, attempt=13, finished=True, message="stopped")
    daemon.training.append(last)
    lines = fedctl("train", "--attach").err.splitlines()
    assert [lines.count(f"  {reason}") for reason in reasons] == [1, 1]
    first = "  same reason, {} times: 0 sites are ready; east: has 0 pairs…"
    assert [lines.count(first.format(n)) for n in (2, 3, 4, 7)] == [1, 0, 1, 1]
    assert "  same reason, 2 times" in lines
    assert "  same reason, 6 times: 0 sites are ready; east: did not answer…" in lines


def test_a_run_of_which_nothing_is_heard_says_why_it_waits(
    fedctl: Fedctl, daemon: CannedDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    said, reminded = TrainingView._say, threading.Event()

    def say(view: TrainingView, text: str) -> None:
        said(view, text)
        if "nothing new" in text:
            reminded.set()

    def silent() -> Iterator[Any]:
        yield progress(round=1, phase="waiting", message="two of three sites are away")
        assert reminded.wait(30)
        yield progress(round=1, phase="idle", finished=True)

    monkeypatch.setattr(TrainingView, "_say", say)
    monkeypatch.setattr(train, "REMIND_AFTER_S", 0.01)
    daemon.training = silent()  # type: ignore[assignment]
    assert "s, phase waiting: two of three sites are away\n" in fedctl("train", "--attach").err


def test_a_site_without_pairs_is_told_and_may_ask(fedctl: Fedctl, daemon: CannedDaemon) -> None:
    assert "no pairs" not in fedctl("train", "--rounds", 1).err  # it has pairs that it made
    daemon.training_pairs = 0
    ran = fedctl("train", "--rounds", 1)
    assert ran.code == Exit.OK
    assert "site north has no pairs to learn from and adds nothing" in ran.err
    assert "`fedctl ingest` adds pairs" in ran.err


def test_attempts_alike_are_one_row(fedctl: Fedctl, daemon: CannedDaemon) -> None:
    for n in range(6):
        daemon.rounds[1].attempts.add(
            attempt=n,
            coordinator=("east", "north", "west")[n % 3],
            outcome="failed" if n < 5 else "committed",
            phase="prepare" if n < 5 else "",
            reason="0 sites are ready" if n != 3 else "the line was cut",
            seconds=1.5,
            bytes_sent=100,
        )
    out = fedctl("rounds", "show", 2).out
    row = next(line for line in out.splitlines() if "0–2 (3 ×)" in line)
    assert "east, north, west" in row
    assert "4.5" in row
    assert "300 B" in row
    assert out.count("0 sites are ready") == 3  # 0 to 2, 4, and 5, which was committed
    assert len(fedctl("rounds", "show", 2, "--json").object["attempts"]) == 6


def test_daemon_that_hangs_up_while_watched(fedctl: Fedctl, daemon: CannedDaemon) -> None:
    daemon.training = daemon.training[:1]
    ran = fedctl("train", "--attach")
    assert (ran.code, "--attach" in ran.err) == (Exit.UNREACHABLE, True)


@pytest.mark.slow
def test_ctrl_c_leaves_the_run_going(daemon: CannedDaemon, path: Path) -> None:
    interrupted = threading.Event()

    def slowly() -> Iterator[Any]:
        yield progress(round=1, phase="train", head_round=0)
        interrupted.wait(30)

    daemon.training = slowly()  # type: ignore[assignment]
    with _process("train", "--attach", "--socket", path) as process:
        assert process.stderr is not None
        assert "round 1 attempt 0: train" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        assert process.wait(10) == Exit.INTERRUPTED
    interrupted.set()
    assert "the training goes on" in rest
    assert "fedctl train --attach" in rest
    assert "Traceback" not in rest


# ---- the program ------------------------------------------------------------


def _process(*words: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "daemon.fedctl", *(str(word) for word in words)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from daemon.fedctl.main import main; main(['--help']); "
        "heavy = {'grpc', 'torch', 'transformers', 'tenseal', 'hnswlib', 'numpy', "
        "'cryptography', 'pydantic'} & set(sys.modules); "
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.slow
def test_a_reader_that_goes_away_is_no_traceback(daemon: CannedDaemon, path: Path) -> None:
    with _process("rounds", "--socket", path) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert "Traceback" not in process.stderr.read()
