"""fedctl train: start a run, watch it, leave it running, come back to it, stop it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from config.recipes import RECIPES
from daemon.fedctl.terminal.connection import (
    ANSWER_WITHIN_S,
    asked_status,
    connected,
    run,
    socket_path,
)
from daemon.fedctl.terminal.options import MODELS, Model, command, of_field
from daemon.fedctl.terminal.output import (
    CommandError,
    Exit,
    Session,
    as_plain,
    short,
    visible,
)
from daemon.fedctl.terminal.training_view import TrainingView
from proto import bounds
from proto.bounds import names_of, numbers_of, traits_of
from proto.federation_pb2 import Mode, PrivacyPlan, RobustRule

if TYPE_CHECKING:
    from proto.control_pb2 import StatusReply, TrainingProgress, TrainReply
    from proto.control_pb2_grpc import ControlAsyncStub

topic = typer.Typer()

REMIND_AFTER_S = 60.0  # of silence; doubles while it lasts


# ---- options --------------------------------------------------------------------

LocalEpochs = Annotated[
    int | None,
    of_field(
        "TrainingPlan", "local_epochs", help="Passes over each site's own pairs; 0: learn nothing."
    ),
]
BatchSize = Annotated[int | None, of_field("TrainingPlan", "batch_size", help="Pairs a batch.")]
LearningRate = Annotated[float | None, of_field("TrainingPlan", "learning_rate", help="Of AdamW.")]
HardNegatives = Annotated[
    int | None, of_field("TrainingPlan", "hard_negatives", help="Mined passages a pair; 0: none.")
]
RecipeOption = Annotated[
    str,
    typer.Option(
        help=f"Learn as one of these says, where the federation exchanges what it trains: "
        f"{', '.join(RECIPES)}. What is personal stays as it is set."
    ),
]
Choices = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="AXIS=VALUE",
        help="One choice (fedctl learning has all), or with --clip a number of the noise; repeat.",
    ),
]
_RULES = [name for name in names_of(RobustRule.DESCRIPTOR).values() if name != "none"]
_MODES = numbers_of(Mode.DESCRIPTOR)
HiddenBy = Annotated[
    str | None,
    typer.Option(
        "--mode",
        metavar=f"<{'|'.join(_MODES)}>",
        help="How updates are hidden; by masking more sites must collude.",
    ),
]
Robust = Annotated[
    str | None,
    typer.Option(
        metavar=f"<{'|'.join(_RULES)}>", help="Keep updates that stand out out of the sum."
    ),
]
ByzantineSites = Annotated[
    int | None,
    of_field(
        "TrainingPlan", "byzantine_sites", help="With --robust: sites that may poison; 0: none."
    ),
]


class NoiseSchedule(Enum):
    """How a run's noise goes: the same in each round, or less as the loss falls."""

    STATIC = "static"
    ADAPTIVE = "adaptive"


# The options of `fedctl train` that concern noise.
ClipNorm = Annotated[
    float | None,
    of_field(
        "PrivacyPlan", "clip_norm", help="Differential privacy: L2 norm of an update at most."
    ),
]
Noise = Annotated[
    float | None,
    of_field("PrivacyPlan", "noise_multiplier", help="With --clip: the sum's noise over the norm."),
]
Schedule = Annotated[
    NoiseSchedule | None, typer.Option(help="With --clip: does the noise fall with the loss?")
]
Epsilon = Annotated[
    float | None,
    of_field(
        "TrainRequest", "epsilon", help="With --clip: the noise that spends this in all rounds."
    ),
]
Colluders = Annotated[
    int | None,
    of_field("PrivacyPlan", "colluders", help="With --clip: sites that may collude; 0: none."),
]
Quantile = Annotated[
    float | None,
    of_field(
        "PrivacyPlan", "clip_quantile", help="With --clip: the norm follows this share of updates."
    ),
]
# FedSearch-NLP's, beside Eq. 2.
_ADAPTIVE = {
    "noise_multiplier": 0.1,
    "noise_floor": 0.01,
    "noise_decay": 0.95,
    "loss_threshold": 1.0,
}


# ---- a run ----------------------------------------------------------------------


@topic.command("train")
@command
def train(
    session: Session,
    rounds: Annotated[
        int | None, of_field("TrainRequest", "rounds", help="Rounds to add to those committed.")
    ] = None,
    model: Model = MODELS[0],
    local_epochs: LocalEpochs = None,
    batch_size: BatchSize = None,
    learning_rate: LearningRate = None,
    hard_negatives: HardNegatives = None,
    recipe: RecipeOption = "",
    choose: Choices = None,
    mode: HiddenBy = None,
    robust: Robust = None,
    byzantine_sites: ByzantineSites = None,
    clip: ClipNorm = None,
    noise: Noise = None,
    noise_schedule: Schedule = None,
    epsilon: Epsilon = None,
    colluders: Colluders = None,
    clip_quantile: Quantile = None,
    detach: Annotated[bool, typer.Option("--detach", help="Start and return at once.")] = False,
    attach: Annotated[bool, typer.Option("--attach", help="Watch the run under way.")] = False,
    stop: Annotated[
        bool, typer.Option("--stop", help="Stop the run under way, everywhere.")
    ] = False,
) -> Exit:
    """Train what the federation shares, from any site; options left out take this site's settings.

    Ctrl-C leaves the run going and only stops watching; a script says --detach. Exit code 3 when
    the run ended before its last round, 1 when it committed none.
    """
    if sum((rounds is not None, attach, stop)) != 1:
        remedy = "`fedctl train --rounds 3` trains three rounds"
        raise _senseless("say one of --rounds N, --attach and --stop", remedy)
    plan = _given(
        local_epochs=local_epochs,
        batch_size=batch_size,
        learning_rate=learning_rate,
        hard_negatives=hard_negatives,
    )
    axes, of_noise = without_noise(choose or ())
    chosen = Chosen(recipe, axes, epsilon or 0.0, model)
    plan |= guards_of(robust, byzantine_sites, mode)
    of_noise |= _given(
        clip_norm=clip,
        noise_multiplier=noise,
        colluders=colluders,
        clip_quantile=clip_quantile,
    )
    noised = noise_of(of_noise, noise_schedule, epsilon)
    plan |= {"privacy": noised} if noised is not None else {}
    if rounds is None and (plan or detach or recipe or choose):
        raise _senseless("only a new run takes those options", "Add --rounds N")
    if stop:
        stopped, site = run(_stop(session, model))
        return _say_run(session, stopped, "stopped", site)
    if rounds is not None:
        started, site = run(_start(session, rounds, plan, chosen))
        if detach:
            return _say_run(session, started, "started", site)
        session.note(f"Training to round {started.run.target_round}, asked for at site {site}.")
    return _watch_until_interrupted(session, model)


def _given(**fields: float | None) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _say_run(session: Session, reply: TrainReply, what: str, site: str) -> Exit:
    text = (
        f"Training to round {reply.run.target_round} is under way, asked for at site {site}; "
        "watch it: fedctl train --attach"
    )
    if what == "stopped":
        text = (
            f"The run ends with round {reply.run.target_round}; stopped at site {site}. Only a sum "
            "that is signed already may still be committed behind that."
        )
    session.result({**as_plain(reply), "site": site}, lambda console: console.print(text))
    return Exit.OK


@dataclass(frozen=True)
class Chosen:
    """What a person chose beside the fields of a plan."""

    recipe: str = ""
    choices: tuple[str, ...] = ()
    epsilon: float = 0.0
    model: str = MODELS[0]


async def _start(
    session: Session, rounds: int, plan: dict[str, Any], chosen: Chosen
) -> tuple[TrainReply, str]:
    async with connected(socket_path(session)) as daemon:
        here = await asked_status(daemon)
        lacking = await _lacking(daemon, here, chosen.model)
        started = await start(daemon, rounds, plan, chosen)
        if lacking:
            # No refusal: a site that adds nothing may ask for a run of the others.
            session.note(f"fedctl: site {here.site} {lacking}")
        return started, here.site


async def _lacking(daemon: ControlAsyncStub, here: StatusReply, model: str) -> str:
    """Why this site adds nothing to a run of its own; empty if it does."""
    if model != MODELS[0]:
        why = here.generator.why_not
        return f"adds nothing to this run: it {why}" if why else ""
    if here.pairs_train or await _makes_pairs(daemon):
        return ""
    return (
        "has no pairs to learn from and adds nothing to this run. `fedctl ingest` adds pairs, "
        "`fedctl pairs build` makes some."
    )


async def _makes_pairs(daemon: ControlAsyncStub) -> bool:
    """Whether the site learns from pairs that were made here; status counts the others."""
    from proto.control_pb2 import MadePairsRequest

    reply = await daemon.MadePairs(MadePairsRequest(), timeout=ANSWER_WITHIN_S)
    return reply.training_pairs > 0


async def start(
    daemon: ControlAsyncStub, rounds: int, plan: dict[str, Any], chosen: Chosen | None = None
) -> TrainReply:
    """Ask for that many more rounds; ``plan`` holds only what the person chose."""
    from proto.control_pb2 import TrainRequest
    from proto.federation_pb2 import TrainingPlan

    chosen = chosen or Chosen()
    request = TrainRequest(
        rounds=rounds,
        plan=TrainingPlan(**plan),
        epsilon=chosen.epsilon,
        recipe=chosen.recipe,
        choices=chosen.choices,
        model=chosen.model,
        # On the wire a number that is 0 is left open.
        noughts=[name for name, value in {**plan, **plan.get("privacy", {})}.items() if value == 0],
    )
    return await daemon.Train(request, timeout=ANSWER_WITHIN_S)


async def _stop(session: Session, model: str) -> tuple[TrainReply, str]:
    from proto.control_pb2 import StopTrainingRequest

    async with connected(socket_path(session)) as daemon:
        here = await asked_status(daemon)
        return (
            await daemon.StopTraining(StopTrainingRequest(model=model), timeout=ANSWER_WITHIN_S),
            here.site,
        )


# ---- what a plan says of masks, rules and noise ---------------------------------


def guards_of(rule: str | None, byzantine_sites: int | None, mode: str | None) -> dict[str, Any]:
    """How updates are hidden and compared, as fields of a training plan."""
    if mode is not None and mode not in _MODES:
        raise _senseless(f"there is no mode {mode}", f"Use one of {', '.join(_MODES)}")
    if mode is not None and rule is not None and not traits_of(_MODES[mode]).comparable:
        raise _senseless(
            f"updates that are hidden by {mode} can't be compared",
            "choose one of --mode and --robust",
        )
    if byzantine_sites is not None and rule is None:
        raise _senseless(
            "--byzantine-sites says how many a rule must withstand", "Add --robust RULE"
        )
    if rule is not None and rule not in _RULES:
        raise _senseless(f"there is no robust rule {rule}", f"Use one of {', '.join(_RULES)}")
    guards: dict[str, Any] = {} if mode is None else {"mode": _MODES[mode]}
    if rule is not None:
        guards["robust"] = numbers_of(RobustRule.DESCRIPTOR)[rule]
        guards |= {"byzantine_sites": byzantine_sites} if byzantine_sites is not None else {}
    return guards


def without_noise(choices: Sequence[str]) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Choices of axes, and those that are numbers of a plan's noise, by their fields' names.

    Raises CommandError for a number out of its bounds. When noise began the daemon says.
    """
    numbers = {field.name: field for field in PrivacyPlan.DESCRIPTOR.fields}
    del numbers["first_round"]
    axes: list[str] = []
    of_noise: dict[str, Any] = {}
    for choice in choices:
        name, _, value = choice.partition("=")
        if name not in numbers:
            axes.append(choice)
            continue
        low, above, high = bounds.chosen("PrivacyPlan", name)
        kind = float if numbers[name].cpp_type == numbers[name].CPPTYPE_DOUBLE else int
        try:
            number = kind(value)
        except ValueError:
            number = math.nan
        if not low <= number <= high or (above and number == low):
            raise _senseless(
                f"{visible(choice)!r} is out of its bounds",
                f"Say a number {'above' if above else 'from'} {low:g} up to {high:g}",
            )
        of_noise[name] = number
    return tuple(axes), of_noise


def noise_of(
    fields: dict[str, Any], schedule: NoiseSchedule | None, epsilon: float | None
) -> dict[str, Any] | None:
    """The plan's ``privacy`` from what was chosen of its fields; None: no noise is asked for.

    Raises CommandError for options that make no sense together.
    """
    if "clip_norm" not in fields:
        if fields or schedule is not None or epsilon is not None:
            raise _senseless("noise needs a norm that updates are clipped to", "Add --clip NORM")
        return None
    noise = fields.get("noise_multiplier")
    if epsilon is not None and (noise is not None or schedule is NoiseSchedule.ADAPTIVE):
        raise _senseless(
            "--epsilon chooses the noise itself", "Leave out --noise and --noise-schedule"
        )
    if schedule is NoiseSchedule.ADAPTIVE:
        return _ADAPTIVE | _given(noise_floor=noise and noise / 10) | fields
    return fields


def _senseless(cause: str, remedy: str) -> CommandError:
    return CommandError(cause, remedy, exit_code=Exit.USAGE)


# ---- watching -------------------------------------------------------------------


def _watch_until_interrupted(session: Session, model: str) -> Exit:
    try:
        return run(_watch(session, model))
    except KeyboardInterrupt:
        raise CommandError(
            "no longer watching; the training goes on",
            f"`{_again(model)} --attach` watches it again, `{_again(model)} --stop` stops it",
            exit_code=Exit.INTERRUPTED,
        ) from None


def _again(model: str) -> str:
    return "fedctl train" if model == MODELS[0] else f"fedctl train --model {model}"


async def _watch(session: Session, model: str) -> Exit:
    """Show progress until the run is over; its outcome as the exit code."""
    first: int | None = None
    target = 0  # the last round that was wanted: a stopped run's own target is where it ended
    last: TrainingProgress | None = None
    under_way = False
    async with connected(socket_path(session)) as daemon:
        reply = await asked_status(daemon)
        status = reply if model == MODELS[0] else reply.generator
        private = status.run.plan.HasField("privacy")
        with TrainingView(session.notes, quiet=session.json, private=private) as view:
            reminding = asyncio.create_task(view.remind(REMIND_AFTER_S))
            async for progress in watched(daemon, model):
                first = progress.head_round if first is None else first
                target = max(target, progress.target_round)
                last, under_way = progress, under_way or not progress.finished
                session.line(as_plain(progress))
                view.show(progress)
            reminding.cancel()
    if last is None or first is None or not target:
        ended = (
            f"; the last run was stopped, with round {last.head_round} committed" if last else ""
        )
        raise CommandError(
            f"nothing is being trained{ended}", "`fedctl train --rounds 3` starts a run"
        )
    if last.head_round >= target:
        if not under_way:
            by = visible(status.run.requested_by)
            session.note(f"No run is under way. The last one, asked for at site {by}, is over.")
        if not session.json:
            session.console.print(_outcome(last, status.model_digest))
        return Exit.OK
    session.note(
        f"fedctl: the run ended at round {last.head_round} of {target}. " + visible(last.message)
    )
    return Exit.PARTLY if last.head_round > first else Exit.FAILED


def _outcome(last: TrainingProgress, before: bytes) -> str:
    """``before``: the version when watching began; of a run that was over then nothing is told."""
    version = short((last.model_digest or before).hex())
    return f"Round {last.head_round} is committed. Model version {version}."


async def watched(
    daemon: ControlAsyncStub, model: str = MODELS[0]
) -> AsyncIterator[TrainingProgress]:
    """Each step of the run under way; ends with the run.

    Raises CommandError when the daemon hangs up before the run is over.
    """
    from proto.control_pb2 import WatchTrainingRequest

    finished = anything = False
    async for progress in daemon.WatchTraining(WatchTrainingRequest(model=model)):
        anything = True
        finished = progress.finished
        yield progress
    if anything and not finished:
        raise CommandError(
            "the daemon stopped telling before the run was over",
            "`fedctl train --attach` watches again",
            exit_code=Exit.UNREACHABLE,
        )
