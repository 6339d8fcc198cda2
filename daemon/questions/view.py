"""What an operator sees without being one: how rounds, peers and the curve are.

It is chosen field by field of what fedctl is told. What is left out may name documents or folders
(a status' last error and its warnings of the library), or is of no use to who looks on.
"""

from __future__ import annotations

import peers.link.tls13  # noqa: F401  before grpc, see there

# isort: split
import time

from daemon.control.context import Context, ServiceContext
from daemon.control.service import ControlService
from peers.wire.messages import SOFTWARE_VERSION
from proto import control_pb2 as control
from proto import questions_pb2 as questions


async def seen_by_an_operator(
    around: ServiceContext, request: questions.ViewRequest, context: Context
) -> questions.ViewReply:
    """As fedctl's status, peers, rounds and eval --history have it."""
    service, driver = ControlService(around, ""), around.driver
    peers = await service.Peers(control.PeersRequest(), context)
    rounds = await service.Rounds(control.RoundsRequest(limit=request.rounds), context)
    for one in rounds.rounds:
        for vote in one.certificate.votes:
            vote.ClearField("signature")
            vote.ClearField("certificate")
    curve = await service.LearningCurve(control.LearningCurveRequest(), context)
    return questions.ViewReply(
        site=driver.identity.site_id,
        federation_id=driver.identity.federation_id,
        software_version=SOFTWARE_VERSION,
        uptime_s=time.monotonic() - around.process.started,
        manifest_version=driver.protocol.manifest.version,
        head_round=driver.protocol.head_round,
        model_digest=driver.protocol.durable.head_digest,
        index_digest=around.collection.served_digest,
        run=driver.protocol.run,
        progress=driver.progress.now,
        warnings=service.federation_warnings(),
        peers=peers.peers,
        accused=peers.accused,
        rounds=rounds,
        curve=_newest(curve, request.rounds),
    )


def _newest(curve: control.LearningCurveReply, rounds: int) -> control.LearningCurveReply:
    """The points of the newest rounds; and where it began, which the others are compared with."""
    last = max((point.round for point in curve.points), default=0)
    points = [one for one in curve.points if not one.round or one.round > last - rounds]
    return control.LearningCurveReply(points=points, missing=curve.missing)
