"""How an expelled site leaves the round under way. PURE.

The manifest of an attempt is fixed at its start (peers/tenure.py), so majorities are
counted under it to its end. What changes at once is who is waited for and whose update
may be in a sum: for the coordinator an expelled site is one that has failed, and what
can't be undone, an update that is in the sum already, costs the attempt. An attempt may
end at any moment without harm; a value that somebody has voted for is never dropped,
because another one could be committed beside it. (docs/decisions/0008)
"""

from __future__ import annotations

from peers import effects as do
from peers.coordination import AttemptFails, Coordination
from peers.participation import Order, Participation
from peers.tenure import Tenure
from proto import federation_pb2 as pb


def exclude(coordination: Coordination, tenure: Tenure, now: float) -> list[do.Effect]:
    """Go on without whom the newest manifest has expelled.

    Raises AttemptFails when the attempt can't: it is the site's own, or its key or its
    sum can't be had without that site.
    """
    result: list[do.Effect] = []
    why = _why(tenure)
    if coordination.site in tenure.expelled:
        raise AttemptFails(why)
    for site in sorted(tenure.expelled):
        if coordination.phase in ("vote", "commit"):
            break  # voted for somewhere: what was chosen must stay chosen
        if site in coordination.contributors():
            raise AttemptFails(f"the update of {site} is in the sum, and {why}")
        left = pb.AttemptFailed(
            round=coordination.round, attempt=coordination.attempt, reason=f"take part: {why}"
        )
        result += coordination.refused(site, left, now)
    return result


def check_added(event: do.Worked, tenure: Tenure) -> None:
    """Raises AttemptFails when an update came into the sum while its site was expelled."""
    if isinstance(event, do.UpdateAdded) and event.site in tenure.expelled:
        raise AttemptFails(f"the update of {event.site} came into the sum, and {_why(tenure)}")


def declined(part: Participation, message: Order, tenure: Tenure) -> list[do.Effect] | None:
    """A site's no to a sum with an expelled site's update; None when there is none.

    Its coordinator has not heard of the expulsion yet.
    """
    expelled = sorted(tenure.expelled & _in_the_sum(message))
    if not expelled:
        return None
    reason = f"the sum has the update of {', '.join(expelled)}, and {_why(tenure)}"
    return part.failed(do.WorkFailed(message.round, message.attempt, "apply", reason))


def _in_the_sum(message: Order) -> set[str]:
    """Whose updates are in the sum that is to be opened."""
    match message:
        case pb.Compare():
            return set(message.sites)
        case pb.Apply():
            return set(message.contributors)
        case pb.MaskingOrder(step=pb.OUTCOME):
            return {item.site for item in message.items}
    return set()


def _why(tenure: Tenure) -> str:
    return f"manifest {tenure.newest.version} has expelled {', '.join(sorted(tenure.expelled))}"
