"""Bounds that nothing else notices when they are gone: on the size of what is read, and on what it may be."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from fedtrain.arena import ArenaFile
from fedtrain.errors import CertificateError, WireError
from fedtrain.messages import Failure, Train
from fedtrain.pki.revocation import LIST_BYTES, Revoked
from fedtrain.pki.signing import CHAIN_BYTES, SIGNED_BYTES, signed_claim
from fedtrain.runtime.sites.site import Site
from fedtrain.schema import Schema, TensorSpec
from fedtrain.store import Ledger
from fedtrain.wire import decode, encode
from fedtrain.wire.codec import Named
from fedtrain.wire.frames import MESSAGE_BYTES, Leaving
from tests.test_pki_signing import certs, credentials, verifier  # noqa: F401


def test_s21_a_frame_over_4_mib_is_refused_unread():
    with pytest.raises(WireError, match=r"a frame of 4194305 bytes is over the limit of 4194304"):
        decode(b"\xc0" * (MESSAGE_BYTES + 1), Leaving)


def test_s21_a_header_that_names_an_impossible_schema_is_refused():
    weights = ArenaFile(Schema((TensorSpec("w", (4,), "float32", True),)), Path("w"), "0" * 32)
    good = encode(Train(id="r/0/0/train", round=0, weights=weights))
    fields = msgspec.msgpack.decode(good)
    named = msgspec.convert(fields["weights"], Named)
    fields["weights"] = msgspec.to_builtins(named)
    text = msgspec.msgpack.encode(fields).replace(b"float32", b"float99")
    with pytest.raises(WireError, match="unknown dtype float99"):
        decode(text, Train)


def test_s21_a_long_chain_a_long_claim_and_a_long_list_are_refused_unread(certs):  # noqa: F811
    ward = verifier(certs)
    with pytest.raises(CertificateError, match=f"a certificate chain of .* bytes: at most {CHAIN_BYTES}"):
        ward.trust(credentials(certs).chain * 40)
    with pytest.raises(CertificateError, match=f"a greeting of .* bytes: at most {SIGNED_BYTES}"):
        signed_claim(b"x" * (SIGNED_BYTES + 1), msgspec.Struct, b"", "greeting", ward)
    begin = b"-----BEGIN X509 CRL-----\n"
    with pytest.raises(CertificateError, match=f"a revocation list of .* bytes: at most {LIST_BYTES}"):
        Revoked(Path("none"), credentials(certs).root).add(begin + b"A" * LIST_BYTES)


def test_a_chain_with_other_bytes_in_it_is_another_name_for_a_certificate_and_refused(certs):  # noqa: F811
    """Each certificate has one encoding, so that what is signed over it can't be said in two ways."""
    chain = credentials(certs).chain
    verifier(certs).trust(chain)
    for other in (b"# a comment\n" + chain, chain.replace(b"\n-----BEGIN", b"\n\n-----BEGIN"), chain + b"\n"):
        with pytest.raises(CertificateError, match="not in plain PEM"):
            verifier(certs).trust(other)


def test_a_site_trains_no_model_but_its_own(tmp_path):
    """Also where the aggregator's model was fetched already."""
    own, other = (Schema((TensorSpec("w", (n,), "float32", True),)) for n in (4, 5))

    class Never:
        description = None

        async def close(self):
            """There is no process."""

    ledger = Ledger(tmp_path)
    site = Site("a", own, ledger, Never())
    request = Train(id="r/0/0/train", round=0, weights=ArenaFile(other, tmp_path / "w", "0" * 32))
    reply = asyncio.run(site.answer(request))
    ledger.close()
    assert isinstance(reply, Failure)
    assert "the aggregator's model is not this site's: w" in reply.reason
