"""What one peer may take of us: calls, bytes and streams. PURE: the clock is an argument.

A peer is a site, not a connection: a site that opens a hundred connections has no
more than one that opens one. Calls are counted before a byte of their message is
read, and a call that is over its quota is refused with the time after which it
would not be.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from peers.wire.messages import MIB

# A call costs one token, and another for so many bytes of its message, which are paid for
# before it is parsed, and for so much of our processor's time that parsing it took: with 50 a
# second a peer has a tenth of the event loop, whatever its messages are made of.
_BYTES_A_TOKEN: Final = 64 * 1024
_SECONDS_A_TOKEN: Final = 0.002

# Of a peer's pushes whose bytes are counted; an attempt has at most two kinds from one peer.
_OBJECTS_OF_A_PEER: Final = 16

# A peer's calls that wait to be told that they are too many; above it they are told at once.
_HELD_AT_MOST: Final = 256


@dataclass(frozen=True)
class Quotas:
    """What a peer may take of us; ``config/fedd.example.toml`` says what each is for.

    ``copies``: how often over an object may arrive within its attempt.
    ``hold_s``: so long a call waits for its refusal when it is one too many. A
    connection has 32 streams, so its flood shrinks to 32 calls in ``hold_s``.
    """

    requests_per_s: float = 50.0
    burst: int = 200
    pulls_per_minute: float = 240.0
    streams: int = 32
    copies: int = 4
    hold_s: float = 0.5


class TooMuch(Exception):
    """A peer asked for more than its quota; ``retry_after_s``: when it may ask again."""

    def __init__(self, text: str, retry_after_s: float) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


@dataclass
class TokenBucket:
    """Tokens that come at ``rate`` a second, at most ``size`` of them (a token bucket).

    May be charged below nothing: who sent a large message waits the longer.
    """

    rate: float
    size: float
    _tokens: float = field(init=False)
    _at: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self._tokens = self.size

    def take(self, now: float) -> float:
        """Take one token; 0.0 if there was one, else the seconds until there will be."""
        # A clock that stands or goes back brings no tokens and takes none.
        self._tokens = min(self.size, self._tokens + max(0.0, now - self._at) * self.rate)
        self._at = now
        if self._tokens < 1:
            return (1 - self._tokens) / self.rate
        self._tokens -= 1
        return 0.0

    def charge(self, tokens: float) -> float:
        """Take what a call costs beside its one token, also where it isn't there.

        0.0 if it was, or a bucket as full as it can be, else the seconds until that is so.
        """
        wanted = min(tokens, self.size - 1)
        was_there = self._tokens >= wanted
        self._tokens = max(self._tokens - tokens, -self.size)
        return 0.0 if was_there else (1 + wanted - self._tokens) / self.rate


@dataclass
class _Account:
    """One peer's."""

    requests: TokenBucket
    pulls: TokenBucket
    streams: int = 0
    held: int = 0
    pushed: OrderedDict[Hashable, int] = field(default_factory=OrderedDict)


class QuotaLedger:
    """Every peer's account. Its memory is bounded by the sites that the authority vouches for."""

    def __init__(self, quotas: Quotas) -> None:
        self._quotas = quotas
        self._accounts: defaultdict[str, _Account] = defaultdict(self._open)
        self.refused: Counter[str] = Counter()

    def _open(self) -> _Account:
        quotas = self._quotas
        a_minute = quotas.pulls_per_minute
        return _Account(
            TokenBucket(quotas.requests_per_s, quotas.burst), TokenBucket(a_minute / 60, a_minute)
        )

    @contextmanager
    def stream(self, site: str) -> Iterator[None]:
        """While a call of ``site`` is under way, waiting included. Raises TooMuch."""
        account, most = self._accounts[site], self._quotas.streams
        if account.streams >= most:
            raise self._too_much(
                site, f"{most} calls of site {site!r} are under way already", self._quotas.hold_s
            )
        account.streams += 1
        try:
            yield
        finally:
            account.streams -= 1

    def request(self, site: str, now: float, *, pull: bool = False) -> None:
        """Count a call. Raises TooMuch."""
        account, quotas = self._accounts[site], self._quotas
        if wait_s := account.requests.take(now):
            raise self._too_much(
                site,
                f"more than {quotas.requests_per_s:g} calls a second (or their worth in bytes) "
                f"of site {site!r}",
                wait_s,
            )
        if pull and (wait_s := account.pulls.take(now)):
            raise self._too_much(
                site, f"more than {quotas.pulls_per_minute:g} pulls a minute of {site!r}", wait_s
            )

    def message(self, site: str, size: int) -> None:
        """A message of ``size`` bytes came with a call that `request` has counted.

        Raises TooMuch where the peer can't pay for it: of many calls at once, each was counted
        before any message was here.
        """
        if wait_s := self._accounts[site].requests.charge(size / _BYTES_A_TOKEN):
            raise self._too_much(
                site, f"more bytes of messages of site {site!r} than it may send at once", wait_s
            )

    def parsed(self, site: str, seconds: float) -> None:
        """So much of our processor's time has gone into a message's parsing and its check."""
        self._accounts[site].requests.charge(seconds / _SECONDS_A_TOKEN)

    def frame(self, site: str, what: Hashable, size: int, total: int) -> None:
        """A frame of an object of ``total`` bytes that we want came. Raises TooMuch.

        An honest peer may push an object again, when a receipt or a connection was lost.
        """
        pushed, copies = self._accounts[site].pushed, self._quotas.copies
        pushed[what] = pushed.get(what, 0) + size
        pushed.move_to_end(what)
        while len(pushed) > _OBJECTS_OF_A_PEER:
            pushed.popitem(last=False)
        if pushed[what] > copies * (total + 2 * MIB):  # each try repeats a frame or two
            raise self._too_much(
                site, f"site {site!r} has pushed this object {copies} times over", 60.0
            )

    def hold(self, site: str) -> float:
        """Seconds for which a refused call shall wait for its refusal; then `let_go`, if any."""
        account = self._accounts[site]
        if account.held >= _HELD_AT_MOST:
            return 0.0
        account.held += 1
        return self._quotas.hold_s

    def let_go(self, site: str) -> None:
        """A call that was held has been told."""
        self._accounts[site].held -= 1

    def _too_much(self, site: str, text: str, wait_s: float) -> TooMuch:
        self.refused[site] += 1
        return TooMuch(f"{text}: ask again in {wait_s:.2g} s", wait_s)
