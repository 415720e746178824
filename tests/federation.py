"""A small real federation for tests: certificates, an aggregator's cohort, sites over loopback mTLS."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import torch

from fedtrain import __version__
from fedtrain.arena import Arena
from fedtrain.config import LimitsConfig
from fedtrain.digest import package_digest
from fedtrain.events import Emit, Event, silent
from fedtrain.messages import Evaluate, Reply, Request, Train, Update
from fedtrain.pki import Credentials, aggregator_target, identity_of, init, issue
from fedtrain.pki.proof import AggregatorCheck, prove
from fedtrain.runtime.star import checks
from fedtrain.schema import Schema, TensorSpec
from fedtrain.store import Spool
from fedtrain.transport.endpoints import TRANSPORTS, RemoteCohort
from fedtrain.transport.grpc import channel_options
from fedtrain.transport.site_link import SiteLink
from fedtrain.transport.streams import Connection, Transport
from fedtrain.transport.tls import Tls
from fedtrain.wire.frames import PROTOCOL, Hello
from tests.clear import ClearTransport

REQUESTS = Train | Evaluate
STARS = {**TRANSPORTS, "clear": ClearTransport}  # one more is a file and a line
STAR = "grpc"  # which of them a test runs over


def certificates(folder: Path, *sites: str) -> Path:
    init(folder)
    issue(folder, "aggregator")
    for site in sites:
        issue(folder, "site", site)
    return folder


def tls(folder: Path) -> Tls:
    c = Credentials.load(folder)
    return Tls(c.key, c.chain, c.root)


def random_arena(numel: int, seed: int, dtype: str = "float32") -> Arena:
    arena = Arena.zeros(Schema((TensorSpec("w", (numel,), dtype, True),)))
    for section in arena.schema.sections:
        flat = arena.flat(section)
        flat.copy_(torch.randn(numel, generator=torch.Generator().manual_seed(seed)))
    return arena


@dataclass
class Aggregator:
    cohort: RemoteCohort
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [fields for k, fields in self.events if k == kind]


@contextlib.asynccontextmanager
async def aggregator(
    certs: Path,
    folder: Path,
    schema: Schema,
    *,
    port: int = 0,
    limits: LimitsConfig | None = None,
    **options: Any,
) -> AsyncIterator[Aggregator]:
    events: list[tuple[str, dict[str, Any]]] = []
    limits, more = limits or LimitsConfig(), options.pop("emit", silent)

    def tell(event: Event) -> None:
        events.append((event.kind, event.fields()))
        more(event)

    cohort = RemoteCohort(
        transport(certs / "aggregator", options),
        listen=f"127.0.0.1:{port}",
        identify=options.pop("identify", lambda pem: identity_of(pem).name),
        welcome=options.pop("welcome", lambda site, hello: None),
        admit=lambda site, request, reply: checks.admit(request, reply, schema, limits, None),
        schemas=[schema],
        inbox=lambda site: Spool(folder / "inbox" / site),
        prove=options.pop("prove", proving(certs)),
        emit=tell,
        **options,
    )
    await cohort.start()
    try:
        yield Aggregator(cohort, events)
    finally:
        await cohort.stop()


def proving(certs: Path) -> Callable[[str, bytes], tuple[bytes, bytes]]:
    """The proof of the aggregator whose certificate is there, and no lists of revoked ones."""
    return lambda site, nonce: (prove(Credentials.load(certs / "aggregator"), site, nonce), b"")


def trusting(certs: Path, site: str, emit: Emit = silent) -> AggregatorCheck:
    """A site's own check of who welcomes it; it has no lists of revoked certificates."""
    return AggregatorCheck(Credentials.load(certs / "sites" / site), certs / "sites" / site, emit)


def link(certs: Path, site: str, port: int, folder: Path, **options: Any) -> SiteLink:
    return SiteLink(
        transport(certs / "sites" / site, options),
        address=options.pop("address", f"127.0.0.1:{port}"),
        target=options.pop("target", aggregator_target("fedtrain")),
        inbox=Spool(folder / site),
        requests=REQUESTS,
        trust=options.pop("trust", None) or trusting(certs, site),
        **{"emit": silent} | options,
    )


def transport(folder: Path, options: dict[str, Any]) -> Transport:
    """One end's, of the options that are its own."""
    return STARS[STAR](options.pop("tls", None) or tls(folder), options.pop("heartbeat_s", 5.0))


@contextlib.asynccontextmanager
async def connected(certs: Path, port: int, site: str = "a") -> AsyncIterator[Connection]:
    """A caller that makes the calls of a site by hand."""
    mine = transport(certs / "sites" / site, {})
    async with mine.connect(f"127.0.0.1:{port}", aggregator_target("fedtrain")) as call:
        yield call


@contextlib.asynccontextmanager
async def raw_channel(
    certs: Path, port: int, *, as_site: str = "a", with_tls: Tls | None = None, limit: int = 4 << 20
) -> AsyncIterator[grpc.aio.Channel]:
    """A caller that speaks gRPC by hand; `limit` is what it lets itself send."""
    ours = [option for option in channel_options(5) if "send" not in option[0]]
    options = [
        *ours,
        ("grpc.max_send_message_length", limit),
        ("grpc.ssl_target_name_override", aggregator_target("fedtrain")),
    ]
    credentials = (with_tls or tls(certs / "sites" / as_site)).channel()
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options=options) as channel:
        yield channel


def hello(schema: Schema, **fields: Any) -> Hello:
    return Hello(
        **{
            "protocol": PROTOCOL,
            "version": __version__,
            "package": package_digest(),
            "task_digest": "t",
            "schema": schema,
            "agreed": {},
        }
        | fields
    )


@contextlib.asynccontextmanager
async def sites(
    links: dict[str, SiteLink], schema: Schema, answer: Callable[[str], Callable[[Request], Awaitable[Reply]]]
) -> AsyncIterator[list[asyncio.Task[str]]]:
    tasks = [
        asyncio.create_task(each.serve(hello(schema), answer(name), schemas=[schema]))
        for name, each in links.items()
    ]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def echo_plus(seed: int) -> Callable[[Request], Awaitable[Reply]]:
    """Answers Train with a delta made from the seed, after reading the weights to their last byte."""

    async def answer(request: Request) -> Reply:
        assert isinstance(request, Train)
        weights = request.weights.load()
        return Update(
            delta=random_arena(weights.schema.numel, seed, weights.schema.sections[0].dtype),
            num_examples=1.0 + seed,
        )

    return answer
