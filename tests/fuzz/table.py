"""The table of targets: one row for every parser that takes a peer's bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.mutators import Mutate
from tests.fuzz.targets import embeddings, masks, papers, signed, transfers, vectors, wire

CORPUS = Path(__file__).with_name("corpus")
MOST_SECONDS = 1.0  # of a processor, for one input


@dataclass(frozen=True)
class Target:
    """A parser, the judge of what it does, honest inputs, and how to spoil them."""

    name: str
    parser: str
    judge: Callable[[bytes], bool]
    seeds: Callable[[], Iterable[bytes]]
    mutate: Mutate
    largest: int  # bytes of an input

    def files(self) -> list[Path]:
        """The inputs that are kept."""
        return sorted((CORPUS / self.name).glob("*"))

    def take(self, data: bytes) -> bool:
        """Judge an input, and the time that it took."""
        began = time.process_time()
        accepted = self.judge(data)
        took = time.process_time() - began
        assert took < MOST_SECONDS, f"{len(data)} bytes kept a processor for {took:.1f} s"
        return accepted


_ROWS = (
    Target(
        "message",
        "messages.parse: envelope, greetings, pull requests, frames",
        wire.judge_message,
        wire.message_seeds,
        wire.mutate_any_message,
        8192,
    ),
    Target(
        "signed",
        "read_promised, read_bundle, read_certificate, read_lock, check_evidence: what is signed",
        signed.judge_signed,
        signed.signed_seeds,
        signed.mutate_signed,
        32768,
    ),
    Target(
        "push",
        "Servicer.push: frames to us, broken off and gone on with",
        transfers.judge_push,
        transfers.push_seeds,
        transfers.mutate_push,
        4096,
    ),
    Target(
        "pull",
        "PartialFile.receive: frames that we asked for, from an offset on",
        transfers.judge_pull,
        transfers.pull_seeds,
        transfers.mutate_pull,
        4096,
    ),
    Target(
        "negatives",
        "Desk.admit, answers_of: requests for embeddings, and answers to ours",
        embeddings.judge_negatives,
        embeddings.negatives_seeds,
        embeddings.mutate_negatives,
        4096,
    ),
    Target(
        "certificate",
        "verify_certificate: the certificate of a round",
        wire.judge_certificate,
        wire.certificate_seeds,
        wire.mutate_certificate,
        8192,
    ),
    Target(
        "chain",
        "unpack_certificates, verify_chain: a file of round certificates",
        wire.judge_chain,
        wire.chain_seeds,
        wire.mutate_chain,
        16384,
    ),
    Target(
        "manifest",
        "parse_signed: JSON and the authority's signature",
        papers.judge_manifest,
        papers.manifest_seeds,
        papers.mutate_manifest,
        8192,
    ),
    Target(
        "manifests",
        "unpack_manifests: a file of signed manifests",
        papers.judge_manifests,
        papers.manifests_seeds,
        papers.mutate_manifests,
        16384,
    ),
    Target(
        "x509",
        "Trust.site_of, seal_for: the X.509 certificate of a plan's participant",
        papers.judge_x509,
        papers.x509_seeds,
        papers.mutate_x509,
        6000,
    ),
    Target(
        "request",
        "sign_request: a site's enrolment request, at the authority",
        papers.judge_request,
        papers.request_seeds,
        papers.mutate_request,
        6000,
    ),
    Target(
        "sealed",
        "Identity.unseal: a round's key, sealed for one site",
        papers.judge_sealed,
        papers.sealed_seeds,
        papers.mutate_sealed,
        1024,
    ),
    Target(
        "context",
        "RoundKey: a round's secret or public context, into SEAL",
        vectors.judge_context,
        vectors.edit_seeds,
        vectors.mutate_edits,
        256,
    ),
    Target(
        "block",
        "RunningSum.add, RoundKey.decrypt: a ciphertext, into SEAL",
        vectors.judge_block,
        vectors.edit_seeds,
        vectors.mutate_edits,
        256,
    ),
    Target(
        "vector",
        "CiphertextSum.add_file, read_encrypted: a file of ciphertexts",
        vectors.judge_vector,
        vectors.edit_seeds,
        vectors.mutate_edits,
        256,
    ),
    Target(
        "tags",
        "Tags.parse, Tally.answer: what stands behind an update",
        vectors.judge_tags,
        vectors.edit_seeds,
        vectors.mutate_edits,
        256,
    ),
    Target(
        "version",
        "import_version: a model version as a safetensors file",
        vectors.judge_version,
        vectors.version_seeds,
        vectors.mutate_version,
        2048,
    ),
    Target(
        "roster",
        "Roster.of, SiteKeys.deal: everybody's advertised keys in a masked attempt",
        masks.judge_roster,
        masks.roster_seeds,
        masks.mutate_roster,
        4096,
    ),
    Target(
        "shares",
        "Relay.take, Dealer.receive: shares, sealed for one site",
        masks.judge_sealed_shares,
        masks.sealed_shares_seeds,
        masks.mutate_nested,
        4096,
    ),
    Target(
        "shamir",
        "shamir.combine: points and shares",
        masks.judge_shamir,
        masks.shamir_seeds,
        masks.mutate_nested,
        4096,
    ),
    Target(
        "outcome",
        "Contributor.open, Unmasking: who is in the sum",
        masks.judge_outcome,
        masks.outcome_seeds,
        masks.mutate_nested,
        4096,
    ),
    Target(
        "opened",
        "Unmasking.take, Unmasking.finish: what sites open of the secrets of others",
        masks.judge_opened,
        masks.opened_seeds,
        masks.mutate_nested,
        8192,
    ),
)

TARGETS: dict[str, Target] = {target.name: target for target in _ROWS}
NATIVE = ("context", "block", "vector")  # SEAL reads these; a crash of it is one of the process
