"""S1-S5, S15-S18, S20, S21 of the security checklist, by number, against a real aggregator port."""

import asyncio
import contextlib
import math
import os
import re
import socket
import ssl
from datetime import UTC, datetime, timedelta

import grpc
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from fedtrain.arena import Arena, ArenaFile
from fedtrain.config import Config, LimitsConfig
from fedtrain.errors import BadUpdate, JoinRefused, Unreadable, WireError
from fedtrain.events import silent
from fedtrain.messages import Failure, Train, Update
from fedtrain.pki import Authority, Credentials, aggregator_target, sign
from fedtrain.pki.identity import Current
from fedtrain.runtime.journal import Journal
from fedtrain.runtime.star import checks
from fedtrain.runtime.star.aggregator import JoinedSites
from fedtrain.schema import Schema, TensorSpec
from fedtrain.store import RunStore
from fedtrain.transport.grpc import SERVICE
from fedtrain.transport.tls import Tls, explain, serving
from fedtrain.wire.codec import decode, encode
from fedtrain.wire.frames import Fetch, Offer, Refused, Resume, Stored, UploadAnswer
from tests.federation import (
    aggregator,
    certificates,
    echo_plus,
    hello,
    link,
    random_arena,
    raw_channel,
    sites,
    tls,
)
from tests.limits import WAIT_S, bounded

MODEL = random_arena(1000, 0)


@pytest.fixture(scope="module")
def certs(tmp_path_factory):
    return certificates(tmp_path_factory.mktemp("certs"), "a", "b", "c")


def odd(certs, *, dns, usage=ExtendedKeyUsageOID.CLIENT_AUTH, start=-1, days=10):
    """A certificate of the real authority that `issue` would never make."""
    authority = Authority.load(certs)
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    leaf = sign(
        authority, key.public_key(), "odd", dns=[dns], usages=[usage],
        not_before=now + timedelta(days=start), not_after=now + timedelta(days=start + days),
    )  # fmt: skip
    pem = serialization.Encoding.PEM
    return Tls(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
        leaf.public_bytes(pem) + authority.certificate.public_bytes(pem),
        authority.root.public_bytes(pem),
    )


async def why_not(certs, tmp_path, **options):
    """What a link with these credentials is told; it must never join."""
    async with aggregator(certs, tmp_path, MODEL.schema) as agg:
        told = await first_told(certs, tmp_path, agg.cohort.port, **options)
        assert agg.of("site_joined") == []
        return told


async def first_told(certs, tmp_path, port, **options):
    """Why the first call of a link ended."""
    told, stop = [], asyncio.Event()

    async def one_try(_):
        stop.set()
        await asyncio.sleep(3600)

    refused = link(
        certs, "a", port, tmp_path, sleep=one_try,
        emit=lambda event: told.append((event.kind, getattr(event, "reason", None))), **options,
    )  # fmt: skip
    task = asyncio.create_task(refused.serve(hello(MODEL.schema), echo_plus(0)))
    await stop.wait()
    task.cancel()
    assert [kind for kind, _ in told] == ["site_lost"]
    return told[0][1]


# --- who may speak


def test_s01_a_client_without_a_certificate_is_refused_at_the_handshake(certs, tmp_path):
    async def main():
        async with aggregator(certs, tmp_path, MODEL.schema) as agg:
            root = (certs / "sites" / "a" / "root.pem").read_bytes()
            options = [("grpc.ssl_target_name_override", aggregator_target("fedtrain"))]
            credentials = grpc.ssl_channel_credentials(root)
            async with grpc.aio.secure_channel(
                f"127.0.0.1:{agg.cohort.port}", credentials, options
            ) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as e:
                    await channel.unary_unary(f"/{SERVICE}/Session")(b"")
                assert e.value.code() is grpc.StatusCode.UNAVAILABLE
            assert {kind for kind, _ in agg.events} <= {"join_refused"}

    bounded(main())


def test_s02_a_certificate_of_another_ca_with_the_same_name_is_refused(certs, tmp_path):
    other = certificates(tmp_path / "other", "a")
    theirs, ours = tls(other / "sites" / "a"), tls(certs / "sites" / "a")
    forged = Tls(theirs.key, theirs.chain, ours.root)
    assert "refused our certificate" in bounded(why_not(certs, tmp_path, tls=forged))


@pytest.mark.parametrize(("start", "days"), [(-20, 10), (+5, 10)], ids=["expired", "not-yet-valid"])
def test_s03_a_certificate_out_of_its_time_is_refused(certs, tmp_path, start, days):
    late = odd(certs, dns="a.site.fedtrain.fedtrain", start=start, days=days)
    assert "refused our certificate" in bounded(why_not(certs, tmp_path, tls=late))


def test_s03_tls_below_1_2_is_refused(certs, tmp_path):
    async def main():
        async with aggregator(certs, tmp_path, MODEL.schema) as agg:

            def handshake(version):
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
                context.set_ciphers("ALL:@SECLEVEL=0")
                context.check_hostname = False
                context.load_verify_locations(certs / "sites" / "a" / "root.pem")
                context.load_cert_chain(certs / "sites" / "a" / "cert.pem", certs / "sites" / "a" / "key.pem")
                context.set_alpn_protocols(["h2"])
                context.minimum_version = context.maximum_version = version
                plain = socket.create_connection(("127.0.0.1", agg.cohort.port), timeout=10)
                with plain, context.wrap_socket(plain) as tls_socket:
                    return tls_socket.version()

            assert await asyncio.to_thread(handshake, ssl.TLSVersion.TLSv1_2) == "TLSv1.2"
            with pytest.warns(DeprecationWarning, match="TLSv1_1"), pytest.raises((ssl.SSLError, OSError)):
                await asyncio.to_thread(handshake, ssl.TLSVersion.TLSv1_1)

    bounded(main())


def test_s04_a_site_refuses_an_aggregator_that_shows_another_sites_certificate(certs, tmp_path):
    """Whether it has only a site's key, or a certificate that may serve but has a site's name."""
    posing = odd(certs, dns="b.site.fedtrain.fedtrain", usage=ExtendedKeyUsageOID.SERVER_AUTH)
    for served in (tls(certs / "sites" / "b"), posing):

        async def main(served=served):
            told, stop = [], asyncio.Event()

            async def one_try(_):
                stop.set()
                await asyncio.sleep(3600)

            server = grpc.aio.server()
            port = server.add_secure_port("127.0.0.1:0", serving(lambda: served))
            await server.start()
            site = link(
                certs, "a", port, tmp_path, sleep=one_try, emit=lambda event: told.append(event.reason)
            )
            task = asyncio.create_task(site.serve(hello(MODEL.schema), echo_plus(0)))
            await stop.wait()
            task.cancel()
            await server.stop(None)
            return told

        assert "not this federation's aggregator" in bounded(main())[0]


@pytest.mark.parametrize("dns", ["aggregator.fedtrain.fedtrain", "a.site.other.fedtrain"])
def test_s04_a_certificate_of_another_role_or_federation_does_not_join(certs, tmp_path, dns):
    if "other" in dns:  # the issuing CA may not even sign it: name constraints
        assert "refused our certificate" in bounded(why_not(certs, tmp_path, tls=odd(certs, dns=dns)))
        return
    reason = bounded(why_not(certs, tmp_path, tls=odd(certs, dns=dns)))
    assert "aggregator" in reason


def test_s05_a_sites_certificate_cannot_read_or_answer_as_another(certs, tmp_path):
    request = Train(id="r/0/0/train", round=0, weights=MODEL)

    async def main():
        async with aggregator(certs, tmp_path, MODEL.schema) as agg:
            asked = agg.cohort.exchange({"b": request}, 30)
            waiting = asyncio.create_task(anext(asked))
            await pending(agg.cohort, "b", request)
            async with raw_channel(certs, agg.cohort.port, as_site="a") as channel:
                reply = Update(delta=random_arena(1000, 1), num_examples=5)
                answer = await offer(channel, request.id, reply)
                assert isinstance(answer, Refused)
                assert "another's" in answer.reason
                fetch = encode(Fetch(digest=MODEL.digest, offset=0))
                with pytest.raises(grpc.aio.AioRpcError) as e:
                    await channel.unary_stream(f"/{SERVICE}/Download")(fetch).read()
                assert e.value.code() is grpc.StatusCode.NOT_FOUND
            async with raw_channel(certs, agg.cohort.port, as_site="b") as channel:
                assert isinstance(await offer(channel, request.id, reply), Stored)
            assert (await waiting)[0] == "b"
            await asked.aclose()

    bounded(main())


# --- what may be said


async def pending(cohort, site, request):
    """Return once the aggregator takes the site's reply; the request is encoded on a thread before."""
    while request.id not in cohort._end._pending.get(site, {}):  # noqa: ASYNC110 - no event tells it
        await asyncio.sleep(0.001)


async def offer(channel, id, reply, *, send=None):
    """Upload by hand; `send` replaces the bytes of the delta. The aggregator's last word, or None."""
    call = channel.stream_stream(f"/{SERVICE}/Upload")()
    await call.write(encode(Offer(id=id, body=reply if isinstance(reply, bytes) else encode(reply))))
    answer = decode(await call.read(), UploadAnswer)
    if not isinstance(answer, Resume):
        return answer
    payload = bytes(reply.delta.payload)[answer.offset :] if send is None else send
    for at in range(0, len(payload), 1 << 20):
        await call.write(payload[at : at + (1 << 20)])
    await call.done_writing()
    data = await call.read()
    return None if data is grpc.aio.EOF else decode(data, UploadAnswer)


def broken_off(events):
    return [f["text"] for _, f in events if "upload broke off, 100 of" in f.get("text", "")]


def one_upload(certs, tmp_path, reply, *, ends=True, **options):
    """The aggregator's answer to one upload of site a, and what the exchange yields for a and an honest b.
    `ends`: whether a's upload is answered; else until it is told that it broke off."""
    request = Train(id="r/0/0/train", round=0, weights=MODEL)

    async def main():
        async with (
            aggregator(certs, tmp_path, MODEL.schema) as agg,
            sites({"b": link(certs, "b", agg.cohort.port, tmp_path)}, MODEL.schema, lambda _: echo_plus(1)),
        ):
            await agg.cohort.members(1)
            asked, got = agg.cohort.exchange(dict.fromkeys(["a", "b"], request), WAIT_S), {}

            async def collect():
                async for site, each in asked:
                    got[site] = each  # noqa: PERF403  # it is looked at meanwhile

            collecting = asyncio.create_task(collect())
            await pending(agg.cohort, "a", request)
            async with raw_channel(certs, agg.cohort.port) as channel:
                answer = await offer(channel, request.id, reply, **options)
            while not ends and not ("b" in got and broken_off(agg.events)):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            if not ends:
                collecting.cancel()
            await asyncio.gather(collecting, return_exceptions=not ends)
            return answer, got, agg.events

    return bounded(main())


def test_s15_a_replayed_update_is_refused_by_its_id(certs, tmp_path):
    first, second = (Train(id=f"r/{n}/0/train", round=n, weights=MODEL) for n in (0, 1))
    reply = Update(delta=random_arena(1000, 1), num_examples=5)

    async def main():
        async with (
            aggregator(certs, tmp_path, MODEL.schema) as agg,
            raw_channel(certs, agg.cohort.port) as channel,
        ):
            for request, replays in ((first, []), (second, [first.id, "other-run/1/0/train"])):
                asked = agg.cohort.exchange({"a": request}, WAIT_S)
                waiting = asyncio.create_task(anext(asked))
                await pending(agg.cohort, "a", request)
                for old in replays:  # an old round, another run
                    assert isinstance(await offer(channel, old, reply), Refused)
                assert isinstance(await offer(channel, request.id, reply), Stored)
                again = await offer(channel, request.id, reply)  # the same round
                assert isinstance(again, Refused)
                assert "answered already" in again.reason
                await waiting
                await asked.aclose()
            return agg

    told = [event["reason"] for event in bounded(main()).of("update_refused")]
    more = [re.search(r"\(and (\d+) more like it\)$", reason) for reason in told]
    assert len(told) + sum(int(found[1]) for found in more if found) == 4


def bad_schema(name="w", shape=(1000,), dtype="float32"):
    return Schema((TensorSpec(name, shape, dtype, True),))


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        (bad_schema(shape=(1,)), r"w float32\[1000\] here is w float32\[1\] there"),  # would broadcast
        (bad_schema(shape=(10, 100)), r"here is w float32\[10, 100\] there"),
        (bad_schema(dtype="float16"), r"here is w float16\[1000\] there"),
        (bad_schema(name="v"), "missing there"),
        (
            Schema((*bad_schema().tensors, TensorSpec("extra", (1,), "float32", True))),
            "extra .* is not in the model",
        ),
        (Schema(()), "missing there"),
    ],
    ids=["shape-1", "shape", "dtype", "key", "extra", "empty"],
)
def test_s17_a_wrong_shape_dtype_or_key_is_refused_and_named(certs, tmp_path, schema, said):
    answer, got, _ = one_upload(certs, tmp_path, Update(delta=Arena.zeros(schema), num_examples=5))
    assert isinstance(answer, Refused)
    assert isinstance(got["a"], Failure)
    assert isinstance(got["b"], Update)
    import re

    assert re.search(said, answer.reason), answer.reason


@pytest.mark.parametrize("claim", [1e12, 0.0, -5.0, float("nan"), float("inf")])
def test_s18_an_impossible_sample_count_is_refused(certs, tmp_path, claim):
    answer, got, _ = one_upload(certs, tmp_path, Update(delta=random_arena(1000, 3), num_examples=claim))
    assert isinstance(answer, Refused)
    assert "examples" in answer.reason
    assert isinstance(got["b"], Update)


def test_s21_a_truncated_stream_is_not_an_update_and_may_go_on_later(certs, tmp_path):
    reply = Update(delta=random_arena(1000, 3), num_examples=5)
    answer, got, events = one_upload(
        certs, tmp_path, reply, send=bytes(reply.delta.payload)[:100], ends=False
    )
    assert answer is None
    assert set(got) == {"b"}
    assert broken_off(events)


@pytest.mark.parametrize("send", [b"x" * 4096, b"y" * 4032], ids=["too-long", "other-bytes"])
def test_s21_bytes_that_are_not_the_announced_ones_are_refused(certs, tmp_path, send):
    answer, got, _ = one_upload(
        certs, tmp_path, Update(delta=random_arena(1000, 3), num_examples=5), send=send
    )
    assert isinstance(answer, Refused)
    assert isinstance(got["a"], Failure)
    assert isinstance(got["b"], Update)


def test_s18_more_examples_than_were_registered_at_joining_are_refused(tmp_path):
    request = Train(id="r/0/0/train", round=0, weights=MODEL)
    update = Update(delta=random_arena(1000, 1), num_examples=100)
    checks.admit(request, update, MODEL.schema, LimitsConfig(), 100)
    with pytest.raises(BadUpdate, match="claims 100 training examples, but registered 99 at joining"):
        checks.admit(request, update, MODEL.schema, LimitsConfig(), 99)


def test_s18_a_site_that_joins_again_with_more_examples_or_none_or_nan_is_refused(certs, tmp_path):
    """Its updates may claim what it said first: NaN would be no bound at all."""
    config = Config.of({"run": {"name": "r"}, "network": {"certs": str(certs)}}, tmp_path)
    with contextlib.closing(RunStore(config.run_dir)) as store:
        schema = MODEL.schema
        store.begin(schema, config.agreed(), run="r", task_digest="t")
        journal = Journal(config, store, silent)
        sites = JoinedSites(journal, schema, "t", Current(certs / "aggregator"))
        sites.callers.identify(Credentials.load(certs / "sites" / "a").chain)

        def join(examples):
            sites._welcome("a", hello(schema, agreed=config.agreed(), examples=examples))

        for bad in (math.nan, math.inf, -1.0):
            with pytest.raises(JoinRefused, match="examples: a number that is 0 or more is needed"):
                join(bad)
        join(None)  # as under masks
        join(100.0)
        join(60.0)
        for more, why in ((101.0, "has 101 now"), (None, "does not say how many it has now")):
            with pytest.raises(JoinRefused, match=f"a had 100 examples when it joined this run, and {why}"):
                join(more)
        assert store.joined() == {"a": 100.0}


class Announced(ArenaFile):
    """A delta that only exists as a claim."""

    digest = "0" * 32

    def __init__(self, schema):
        self.schema = schema


def test_s21_a_declared_length_of_10_gb_is_refused_before_anything_is_allocated(certs, tmp_path):
    huge = bad_schema(shape=(10 * 2**30 // 4,))
    answer, got, _ = one_upload(certs, tmp_path, Update(delta=Announced(huge), num_examples=5))
    assert isinstance(answer, Refused)
    assert "here is w float32[2684354560] there" in answer.reason
    assert list((tmp_path / "inbox").glob("*/0000*")) == []
    assert isinstance(got["b"], Update)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x00" * 64,
        b"\x91" * 100_000,
        b"\x81\xa4type\xa4Boom",
        b"\xdf\xff\xff\xff\xff",
        os.urandom(3_000_000),
    ],
    ids=["empty", "zeros", "deep", "unknown", "length-4-billion", "noise"],
)
def test_s21_an_unknown_or_malformed_message_is_refused_and_the_round_goes_on(certs, tmp_path, body):
    answer, got, _ = one_upload(certs, tmp_path, body)
    assert isinstance(answer, Refused)
    assert isinstance(got["b"], Update)


def test_s20_a_pickle_payload_is_bytes_that_do_not_decode(certs, tmp_path):
    bomb = b"\x80\x04\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x05false\x94\x85\x94R\x94."
    answer, got, _ = one_upload(certs, tmp_path, bomb)
    assert isinstance(answer, Refused)
    assert isinstance(got["b"], Update)
    with pytest.raises(WireError):
        decode(bomb, Update)


def test_s21_garbage_on_the_port_leaves_the_aggregator_alive(certs, tmp_path):
    def throw(port, data):
        with socket.create_connection(("127.0.0.1", port), timeout=5) as s, contextlib.suppress(OSError):
            s.sendall(data)
            s.settimeout(0.2)
            s.recv(100)

    async def main():
        async with aggregator(certs, tmp_path, MODEL.schema) as agg:
            for data in (
                b"GET / HTTP/1.1\r\n\r\n",
                os.urandom(100_000),
                b"\x16\x03\x01\xff\xff" + b"\0" * 70_000,
                b"",
            ):
                await asyncio.to_thread(throw, agg.cohort.port, data)
            async with raw_channel(certs, agg.cohort.port) as channel:
                for method, body in (
                    ("Session", b"\x91" * 50),
                    ("Upload", os.urandom(100)),
                    ("Session", b""),
                ):
                    call = channel.stream_stream(f"/{SERVICE}/{method}")()
                    await call.write(body)
                    assert isinstance(decode(await call.read(), Refused | UploadAnswer), Refused)
            async with raw_channel(certs, agg.cohort.port, limit=1 << 30) as channel:
                call = channel.stream_stream(f"/{SERVICE}/Upload")()
                await call.write(b"z" * (5 << 20))
                with pytest.raises(grpc.aio.AioRpcError) as e:  # a frame over the limit is never read
                    await call.read()
                assert e.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            async with sites(
                {"b": link(certs, "b", agg.cohort.port, tmp_path)}, MODEL.schema, lambda _: echo_plus(1)
            ):
                assert await agg.cohort.members(1) == ["b"]

    bounded(main())


@pytest.mark.parametrize("method", ["Session", "Upload"])
def test_a_stream_that_ends_before_its_first_word_is_no_refusal(certs, tmp_path, method):
    """A request that is cancelled between the opening of its upload and the offer ends so."""

    async def main():
        async with (
            aggregator(certs, tmp_path, MODEL.schema) as agg,
            raw_channel(certs, agg.cohort.port) as channel,
        ):
            call = channel.stream_stream(f"/{SERVICE}/{method}")()
            await call.done_writing()
            assert await call.read() is grpc.aio.EOF
            assert await call.code() is grpc.StatusCode.OK
            return agg.events

    assert bounded(main()) == []


def test_a_site_that_trains_something_else_is_told_so_once_and_no_data_moves(certs, tmp_path):
    def refuse(site, hello):
        raise JoinRefused(f"{site} and the aggregator differ in train.lr")

    async def main():
        async with aggregator(certs, tmp_path, MODEL.schema, welcome=refuse) as agg:
            site = link(certs, "a", agg.cohort.port, tmp_path)
            with pytest.raises(JoinRefused, match=r"a and the aggregator differ in train\.lr"):
                await site.serve(hello(MODEL.schema), echo_plus(0))
            assert agg.of("join_refused") == [
                {"site": "a", "reason": "a and the aggregator differ in train.lr"}
            ]
            assert agg.cohort.bytes_out == 0

    bounded(main())


def test_a_call_that_ends_while_it_is_written_is_told_in_words_of_ours():
    said = explain("Internal error from Core", "hospital.example:8440")
    assert said == "hospital.example:8440: the aggregator ended the call while this end was still sending."


@pytest.mark.parametrize(
    "error", [Unreadable("/srv/runs/audit is full"), OSError(28, "full", "/srv/runs/audit")]
)
@pytest.mark.parametrize("where", ["welcome", "prove", "emit", "identify"])
def test_s35_where_the_aggregators_own_disk_fails_its_run_ends_and_no_site_hears_a_path(
    certs, tmp_path, where, error
):
    def fails(*given):
        if where != "emit" or given[0].kind == "site_joined":
            raise error

    async def main():
        told = []
        async with aggregator(certs, tmp_path, MODEL.schema, **{where: fails}) as agg:
            site = link(certs, "a", agg.cohort.port, tmp_path, emit=lambda event: told.append(str(event)))
            asked = agg.cohort.exchange({"a": Train(id="r/0/0/train", round=0, weights=MODEL)}, WAIT_S)
            waiting = [
                asyncio.ensure_future(each)
                for each in (agg.cohort.members(2), agg.cohort.newcomer({"a"}), anext(asked))
            ]
            async with sites({"a": site}, MODEL.schema, lambda name: echo_plus(0)):
                assert await asyncio.gather(*waiting, return_exceptions=True) == [error] * 3
                with pytest.raises(type(error)):
                    await agg.cohort.members(0)
                while not told:  # noqa: ASYNC110 - the site has heard the end of its call
                    await asyncio.sleep(0.01)
        return told

    assert not [line for line in bounded(main()) if "/srv" in line]


def test_s35_an_error_that_nobody_foresaw_is_logged_here_and_told_to_a_site_without_its_text(
    certs, tmp_path, caplog
):
    def fails(site, hello):
        raise RuntimeError("of /srv/runs")

    async def main():
        async with aggregator(certs, tmp_path, MODEL.schema, welcome=fails) as agg:
            return await first_told(certs, tmp_path, agg.cohort.port)

    assert "an error at the aggregator; its log has it" in bounded(main())
    assert "RuntimeError: of /srv/runs" in caplog.text


@pytest.mark.parametrize("over", [True, False], ids=["of a request that is over", "of one that is open"])
def test_s35_a_models_file_that_is_gone_in_a_download_ends_the_run_where_the_request_is_open(
    certs, tmp_path, monkeypatch, over
):
    async def main():
        async with (
            aggregator(certs, tmp_path, MODEL.schema, inline=False) as agg,
            raw_channel(certs, agg.cohort.port) as channel,
        ):
            request = Train(id="r/0/0/train", round=0, weights=MODEL)
            asked = agg.cohort.exchange({"a": request}, WAIT_S)
            waiting = asyncio.ensure_future(anext(asked))
            await pending(agg.cohort, "a", request)

            def gone(arena, offset):
                if over:
                    agg.cohort._end._pending.clear()
                raise FileNotFoundError(2, "No such file", "/srv/runs/r/blobs/1")

            monkeypatch.setattr("fedtrain.transport.streams.read_chunk", gone)
            fetch = encode(Fetch(digest=MODEL.digest, offset=0))
            told = await asyncio.gather(
                channel.unary_stream(f"/{SERVICE}/Download")(fetch).read(), return_exceptions=True
            )
            assert "/srv" not in str(told)
            if not over:
                with pytest.raises(FileNotFoundError):
                    await waiting
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            return agg.cohort._end.error

    assert (bounded(main()) is None) == over
