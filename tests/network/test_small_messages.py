"""What is small travels in the frame that names it; a schema that both ends have is named by its digest."""

import asyncio
import contextlib
import re

import pytest

from fedtrain.arena import Arena, ArenaFile
from fedtrain.errors import WireError
from fedtrain.exchange import gather
from fedtrain.messages import Evaluate, Evaluation, Failure, Train, Update
from fedtrain.schema import Schema, TensorSpec
from fedtrain.store import Spool
from fedtrain.transport.streams import unpack
from fedtrain.wire.codec import UNFETCHED, decode, encode, fetch_list, known
from fedtrain.wire.frames import INLINE_BYTES, Answered, Ask, FromAggregator, Rejected, Welcome
from tests import federation
from tests.federation import (
    STARS,
    aggregator,
    certificates,
    connected,
    echo_plus,
    hello,
    link,
    random_arena,
    sites,
)
from tests.limits import bounded

NAMES = ["a", "b", "c"]
MODEL = random_arena(1000, 0)
LAYERS = Schema(tuple(TensorSpec(f"layer{i}.weight", (2, 3), "float32", True) for i in range(100)))


@pytest.fixture(scope="module")
def certs(tmp_path_factory):
    return certificates(tmp_path_factory.mktemp("certs"), *NAMES)


@pytest.fixture(autouse=True, params=sorted(STARS))
def kind(request, monkeypatch):
    """Every claim of this page holds over each of the transports."""
    monkeypatch.setattr(federation, "STAR", request.param)


@pytest.mark.parametrize(
    ("numel", "calls"),
    [(INLINE_BYTES // 4, []), (INLINE_BYTES // 4 + 1, [*["_download"] * 3, *["_upload"] * 3])],
    ids=["fits", "one more"],
)
def test_a_small_model_and_its_updates_need_no_call_beside_the_session(
    certs, tmp_path, monkeypatch, numel, calls
):
    weights, made = random_arena(numel, 99), []
    assert weights.schema.nbytes >= 4 * numel

    for name in ("_download", "_upload"):

        async def noted(cohort, *args, name=name, call=getattr(federation.RemoteCohort, name)):
            made.append(name)
            await call(cohort, *args)

        monkeypatch.setattr(federation.RemoteCohort, name, noted)

    async def main():
        async with aggregator(certs, tmp_path, weights.schema) as agg:
            links = {n: link(certs, n, agg.cohort.port, tmp_path) for n in NAMES}
            async with sites(links, weights.schema, lambda n: echo_plus(NAMES.index(n))):
                await agg.cohort.members(3)
                request = Train(id="r/0/0/train", round=0, weights=weights)
                got = await gather(agg.cohort, dict.fromkeys(NAMES, request), 30)
                again = Train(id="r/1/0/train", round=1, weights=weights)  # the model is there already
                return got, await gather(agg.cohort, {"a": again}, 30), agg.cohort

    got, again, cohort = bounded(main())
    for i, name in enumerate(NAMES):
        assert isinstance(got[name].delta, ArenaFile)
        assert got[name].delta.load().digest == random_arena(numel, i).digest
    assert again["a"].delta.digest == got["a"].delta.digest
    assert sorted(made[:6]) == sorted(calls)
    assert cohort.bytes_in == 3 * weights.schema.nbytes + (not calls) * weights.schema.nbytes
    assert cohort.bytes_out == 3 * weights.schema.nbytes, "who has it is not given it again"


def test_a_schema_that_both_ends_have_is_named_by_its_digest_and_any_other_spelled_out():
    request = Train(id="r/0/0/train", round=0, weights=Arena.zeros(LAYERS))
    short, long = encode(request, known([LAYERS])), encode(request, known([MODEL.schema]))
    assert len(short) < 250 < 2000 < len(long)
    for body in (short, long):
        assert decode(body, Train, known([LAYERS])).weights.schema == LAYERS
    assert decode(short, Train, known([LAYERS])).weights.schema is LAYERS
    assert decode(long, Train).weights.schema == LAYERS
    with pytest.raises(WireError, match="is none that both ends have"):
        decode(short, Train, known([MODEL.schema]))


def test_bytes_that_came_are_put_into_files_by_the_schemas_and_any_other_number_of_them_refused(tmp_path):
    files, data = Spool(tmp_path), bytes(MODEL.payload)
    update = Update(delta=ArenaFile(MODEL.schema, UNFETCHED, MODEL.digest), num_examples=1.0)
    for wrong in (b"", data[:-1], data + b"x"):
        with pytest.raises(WireError, match=f"{len(wrong)} bytes came with a header that names {len(data)}"):
            asyncio.run(unpack(files, fetch_list(update), wrong))
    with pytest.raises(WireError, match="1 bytes came"):
        asyncio.run(unpack(files, [], b"x"))
    assert [*tmp_path.iterdir()] == []
    for _ in range(2):
        asyncio.run(unpack(files, fetch_list(update), data))
        assert update.delta.path.read_bytes() == data


# --- a hostile site in its session


@contextlib.asynccontextmanager
async def session(certs, agg, name="a"):
    """A session by hand, after its Welcome: (say, heard)."""
    async with connected(certs, agg.cohort.port, name) as call, call("Session") as stream:
        await stream.write(encode(hello(MODEL.schema)))

        async def say(frame):
            await stream.write(encode(frame))

        async def heard():
            return decode(await stream.read(), FromAggregator)

        assert isinstance(await heard(), Welcome)
        yield say, heard


def answer(request, reply, **fields):
    data = bytes(reply.delta.payload) if isinstance(reply, Update) else b""
    return Answered(**{"id": request.id, "body": encode(reply), "data": data} | fields)


UPDATE = Update(delta=random_arena(1000, 1), num_examples=5)
OTHER = Arena.zeros(Schema((TensorSpec("w", (1,), "float32", True),)))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"body": b""}, "not a valid frame"),
        ({"body": b"\x91" * 50_000}, "not a valid frame"),
        ({"body": encode(Update(delta=OTHER, num_examples=5))}, r"w float32\[1000\] here is w float32\[1\]"),
        ({"body": encode(Update(delta=UPDATE.delta, num_examples=float("nan")))}, "claims nan examples"),
        (
            {"body": encode(Update(delta=Arena.zeros(LAYERS), num_examples=5), known([LAYERS]))},
            "is none that",
        ),
        ({"data": b""}, "0 bytes came with a header that names 4032"),
        ({"data": b"x" * 4031}, "4031 bytes came with a header that names 4032"),
        ({"data": b"x" * 4033}, "4033 bytes came with a header that names 4032"),
        ({"data": b"x" * 4032}, "do not have the digest"),
        ({"body": encode(Evaluation(metrics={})), "data": b""}, "Evaluation does not answer Train"),
    ],
)
def test_an_answer_that_cannot_be_used_is_a_failure_of_its_site_which_hears_why(
    certs, tmp_path, fields, said
):
    request = Train(id="r/0/0/train", round=0, weights=MODEL)

    async def main():
        async with (
            aggregator(certs, tmp_path, MODEL.schema) as agg,
            sites({"b": link(certs, "b", agg.cohort.port, tmp_path)}, MODEL.schema, lambda _: echo_plus(1)),
            session(certs, agg) as (say, heard),
        ):
            await agg.cohort.members(2)
            gathering = asyncio.create_task(gather(agg.cohort, dict.fromkeys(["a", "b"], request), 30))
            assert isinstance(await heard(), Ask)
            await say(answer(request, UPDATE, **fields))
            return await heard(), await gathering

    rejected, got = bounded(main())
    assert isinstance(rejected, Rejected)
    assert rejected.id == request.id
    assert re.search(said, rejected.reason), rejected.reason
    assert got["a"] == Failure(reason=rejected.reason)
    assert isinstance(got["b"], Update)
    assert [*(tmp_path / "inbox").glob("a/*")] in ([], [tmp_path / "inbox" / "a" / "free"])


def test_s05_s15_an_answer_counts_once_and_only_to_a_request_of_its_own_site(certs, tmp_path):
    mine, other = (Train(id=f"r/{n}/0/train", round=n, weights=MODEL) for n in (0, 1))

    async def main():
        async with (
            aggregator(certs, tmp_path, MODEL.schema) as agg,
            session(certs, agg, "a") as (say, heard),
            session(certs, agg, "b") as (_, heard_b),
        ):
            of_b = asyncio.create_task(gather(agg.cohort, {"b": other}, 30))
            assert isinstance(await heard_b(), Ask)
            of_a = asyncio.create_task(gather(agg.cohort, {"a": mine}, 30))
            assert isinstance(await heard(), Ask)
            await say(answer(other, UPDATE))
            assert "another's" in (await heard()).reason
            await say(answer(mine, UPDATE))
            got = await of_a
            await say(answer(mine, UPDATE))
            assert "answered already" in (await heard()).reason
            assert not of_b.done()
            of_b.cancel()
            return got, agg

    got, agg = bounded(main())  # an aggregator that has ended tells all that it held back
    assert got["a"].delta.digest == UPDATE.delta.digest
    assert [event["site"] for event in agg.of("update_refused")] == ["a", "a"]


def test_an_evaluation_travels_in_the_session_and_one_that_nobody_waits_for_is_told_nothing(certs, tmp_path):
    request = Evaluate(id="r/1/0/evaluate", round=1, weights=MODEL)
    found = Evaluation(metrics={"loss": (1.0, 2.0)})

    async def main():
        async with (
            aggregator(certs, tmp_path, MODEL.schema) as agg,
            session(certs, agg, "a") as (say, heard),
            session(certs, agg, "b") as (say_b, heard_b),
        ):
            replies = agg.cohort.exchange(dict.fromkeys(["a", "b"], request), 30)
            first = asyncio.create_task(anext(replies))
            assert isinstance(await heard(), Ask)
            assert isinstance(await heard_b(), Ask)
            await say(answer(request, found))
            assert await first == ("a", found)
            await replies.aclose()  # enough sites have answered
            assert (await heard_b()).id == request.id, "a Cancel"
            await say_b(answer(request, found))
            agg.cohort.tell("b", "the next frame")
            return await heard_b(), agg.of("update_refused")

    note, refused = bounded(main())
    assert note.line == "the next frame"
    assert refused == []


def test_a_site_whose_session_breaks_after_its_answer_left_is_asked_again_and_answers(certs, tmp_path):
    request = Train(id="r/0/0/train", round=0, weights=MODEL)

    async def main():
        async with aggregator(certs, tmp_path, MODEL.schema) as agg:
            async with session(certs, agg) as (_, heard):
                gathering = asyncio.create_task(gather(agg.cohort, {"a": request}, 30))
                assert (await heard()).data == bytes(MODEL.payload)
            async with session(certs, agg) as (say, heard):
                assert (await heard()).data == bytes(MODEL.payload)
                await say(answer(request, UPDATE))
                return await gathering

    assert bounded(main())["a"].delta.digest == UPDATE.delta.digest
