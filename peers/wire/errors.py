"""What may go wrong between two sites, by who is to blame. PURE."""

from __future__ import annotations


class PeerError(Exception):
    """Something between this site and a peer went wrong, and not by our fault."""


class RemoteProtocolError(PeerError):
    """The peer misbehaves: what it sent is not what the protocol allows."""


class PeerRefused(PeerError):
    """The peer refused us and said why."""


class BlobUnknown(PeerRefused):
    """The site that was asked does not have the object."""


class PeerBusy(PeerRefused):
    """We asked more of the peer than it gives one site; it says when to ask again."""

    def __init__(self, text: str, retry_after_s: float) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


class PeerUnreachable(PeerError):
    """The network, or a peer that is down: try again later."""


class LocalProtocolError(Exception):
    """This site was about to break the protocol: a bug of ours."""
