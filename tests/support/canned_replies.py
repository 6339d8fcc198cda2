"""What `tests.support.canned_daemon` replies, unless a test has it say something else."""

from __future__ import annotations

import math
from typing import Any

from proto import control_pb2 as control
from proto import federation_pb2 as federation

DIGEST = bytes(range(32))


def judged_retrieval() -> control.EvaluateReply:
    """Three rankings in two metrics."""
    return control.EvaluateReply(
        questions=30,
        mrr_at_10=0.75,
        recall_at_10=0.9,
        retrieval="dense",
        model_digest=DIGEST,
        figures=[
            control.Figure(ranking=ranking, metric=metric, mean=mean, low=0.5, high=0.875)
            for ranking, mean in (("bm25", 0.625), ("vanilla", 0.6875), ("dense", 0.75))
            for metric in ("mrr@10", "map")
        ],
        over_vanilla=[
            control.Figure(ranking="dense", metric="mrr@10", mean=0.0625, low=-0.01, high=0.13)
        ],
    )


def judging_steps() -> list[control.EvaluateAnswersProgress]:
    """Before and behind the questions."""
    steps = [control.EvaluateAnswersProgress(step="answers", done=n, total=30) for n in (0, 30)]
    return [control.EvaluateAnswersProgress(step="index"), *steps]


def judged_answers() -> control.EvaluateAnswersReply:
    """Four figures, of all answers and of those of one label; WordNet is not there."""
    figures = [
        control.AnswerFigure(metric=name, mean=mean, low=0.25, high=0.875)
        for name, mean in (("answered", 0.75), ("token-f1", 0.5), ("rouge-1-f", 0.375))
    ]
    wer = control.AnswerFigure(metric="wer", mean=1.5, low=1.25, high=2, lower_is_better=True)
    return control.EvaluateAnswersReply(
        questions=30,
        without_answer=12,
        unanswered=7,
        generator="extractive",
        model_digest=DIGEST,
        seconds=2.5,
        figures=[*figures, wer],
        by_label=[
            control.LabelFigures(label="qtype", value="[b]cure", questions=9, figures=figures)
        ],
        missing=[control.MissingFigure(metric="meteor", cause="WordNet is not there")],
    )


def judged_versions() -> control.LearningCurveReply:
    """The base model and the generator's version of round 2, which answers; 1 is pruned."""
    reply = control.LearningCurveReply(answering_digest=DIGEST)
    for round_, nats in ((0, 5.5), (2, 2.25)):
        digest = DIGEST if round_ else b"\x01" * 32
        for metric, value, questions in (
            ("nats", nats, 16),
            ("perplexity", math.exp(nats), 16),
            ("tokens", 1234, 16),
            ("rouge-l-f", nats / 10, 12),
        ):
            reply.points.add(
                round=round_,
                model_digest=digest,
                metric=metric,
                value=value,
                questions=questions,
                kind="shared",
            )
    reply.unjudged.add(round=1, model_digest=b"\x02" * 32, pruned=True)
    return reply


def how_it_learns() -> control.LearningReply:
    """A site that has not trained yet."""
    return control.LearningReply(
        recipe="pfedrag",
        choices=[
            control.Choice(axis="personal", value="tiered_head", in_recipe="tiered_head"),
            control.Choice(axis="dropout", value="0.3", in_recipe="0.1"),
        ],
        shared_values=1_182_336,
        adaptation_index=math.nan,
        own_share=math.nan,
        facts=[
            control.Fact(
                name="personal layer", value="none until this site has trained for a round"
            )
        ],
    )


def fitting_steps() -> list[control.PersonaliseProgress]:
    """A query encoder is fitted."""
    return [
        control.PersonaliseProgress(epoch=1, epochs=2, loss=1.5, mrr_before=math.nan),
        control.PersonaliseProgress(epoch=2, epochs=2, loss=1.25, mrr_before=math.nan),
        control.PersonaliseProgress(
            epoch=2,
            epochs=2,
            loss=1.25,
            done=True,
            model_digest=DIGEST,
            pairs=80,
            pairs_judged=20,
            mrr_before=0.5,
            mrr_after=0.625,
            changed=True,
            own_share=math.nan,
            answers_with="this site's own encoder of questions",
            steps=6,
            steps_unanswered=1,
            peers=[
                control.Exchanged(site="east", asked=160, answered=120, embeddings=1200),
                control.Exchanged(site="west", asked=32, reason="off\x1b[31m here"),
            ],
            seconds=2.5,
        ),
    ]


def stored(name: str) -> control.StoredDocument:
    return control.StoredDocument(
        id=name,
        title=f"Of {name}",
        passages=2,
        author="Ada Lock",
        date="2024-05-31",
        language="en",
        tags=["old", "wet"],
    )


def progress(**fields: Any) -> control.TrainingProgress:
    """One step of a run to round 2."""
    defaults: dict[str, Any] = {"target_round": 2, "coordinator": "north", "loss": math.nan}
    return control.TrainingProgress(**(defaults | fields))


def audited_embeddings() -> control.EmbeddingsAudit:
    """Exact embeddings tell much, a bucket of 8 bits little; one example."""

    def exposed(f1: float) -> control.TextsExposure:
        share = control.RecoveredShare(f1=f1, precision=f1, recall=f1, attacker="decoder")
        return control.TextsExposure(words=share, telling=share, names=share)

    example = control.RecoveredText(text="Locks \x1b[31mleak.", right_words=["locks"])
    levels = [
        control.LevelExposure(
            level="exact", passages=exposed(0.5), questions=exposed(0.75), overlap=1, cosine=0.625
        ),
        control.LevelExposure(
            level="bucket, 8 bits", bits=8, passages=exposed(0.125), questions=exposed(0.25)
        ),
    ]
    levels[0].examples.append(example)
    return control.EmbeddingsAudit(
        passages_known=700,
        passages_unseen=200,
        questions_unseen=50,
        subjects_unseen=30,
        guessing_passages=exposed(0.0625),
        guessing_questions=exposed(0.0625),
        levels=levels,
        advice="It is a lower bound.",
        model_digest=DIGEST,
    )


def audited_memory() -> control.MemoryAudit:
    """All is remembered without noise and nothing with it."""
    names = ("base model", "this site alone", "its share of 3 sites", "its share, noise 1")
    exposures = ((1.5, 0), (7.5, 3), (4.0, 0), (1.25, 0))
    versions = [
        control.CanaryExposure(
            version=name, mean=mean, largest=mean + 0.5, written=written, planted=name != names[0]
        )
        for name, (mean, written) in zip(names, exposures, strict=True)
    ]
    versions[-1].multiplier, versions[-1].epsilon = 1.0, 10.71
    return control.MemoryAudit(
        canaries=8,
        others=255,
        triples=60,
        rounds=4,
        local_epochs=3,
        sites=3,
        adapt="lora",
        learning_rate=0.01,
        update_norm=2.5,
        clip_norm=2.5,
        delta=1e-5,
        by_chance=1.42,
        chance_error=0.5,
        most=8.0,
        versions=versions,
        seconds=75,
        advice="It is a lower bound.",
    )


def committed_round(number: int) -> control.Round:
    """A round that three sites signed."""
    sites = ["east", "north", "west"]
    body = federation.VoteBody(round=number, model_digest=DIGEST, contributors=sites)
    votes = [federation.Vote(site=site) for site in sites]
    report = federation.RoundReport(
        round=number,
        coordinator=sites[number % 3],
        key_dealer=sites[(number + 1) % 3],
        contributors=sites,
        phases=[federation.PhaseTime(phase="train", seconds=2.5)],
        mean_loss=math.nan,
    )
    certificate = federation.Certificate(attempt=1, body=body, votes=votes, unix_ms=10**12)
    return control.Round(certificate=certificate, report=report)
