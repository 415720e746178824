"""OpenTelemetry: a round as a trace, with a span for each site's training, upload …, and the sum. `where`:
the OTLP endpoint, as in http://localhost:4318/v1/traces; else OTEL_EXPORTER_OTLP_ENDPOINT.

A trace's id is worked out from the run and the round, so a round that is told twice is one trace.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.trace import Span, Status, StatusCode, set_span_in_context

from ... import events as e
from ...events import Event
from .base import Tracker, scalars

PHASES = {"training": "train", "masking": "mask", "uploading": "upload"}


class OpenTelemetry(Tracker):
    """A trace for each round; its attributes are the round's numbers."""

    extra = "opentelemetry"

    def __init__(
        self, run_dir: Path, where: str, kept: dict[str, str], exporter: SpanExporter | None = None
    ) -> None:
        super().__init__(run_dir, where, kept)
        self._ids = RoundIds(run_dir.name)
        names = Resource.create({"service.name": "fedtrain", "fedtrain.run": run_dir.name})
        self._provider = TracerProvider(resource=names, id_generator=self._ids)
        self._provider.add_span_processor(BatchSpanProcessor(exporter or _otlp(where)))
        self._tracer = self._provider.get_tracer("fedtrain")
        self._round: Span | None = None
        self._began: dict[str, tuple[str, float]] = {}  # site -> its phase, and since when
        self._last = 0.0  # when the last update came

    def __call__(self, event: Event) -> None:
        match event:
            case e.RoundStarted():
                self._end(event.time, "left by a new attempt")
                self._ids.round = event.round, event.attempt
                told = {"round": event.round, "attempt": event.attempt}
                self._round = self._tracer.start_span(
                    f"round {event.round}", attributes=told, start_time=_ns(event.time)
                )
                self._began = dict.fromkeys(event.neighbors or event.sites, ("fetch", event.time))
                self._last = event.time
            case e.SiteState() if event.state in PHASES:
                self._phase(event.site, event.time, PHASES[event.state])
            case e.UpdateReceived():
                self._phase(event.site, event.time, "")
                self._last = event.time
            case e.UpdateRefused() | e.SiteLost():
                self._phase(event.site, event.time, "", event.reason or "lost")
            case e.RoundFailed():
                self._end(event.time, event.reason)
            case e.RoundCommitted() if self._round is not None:
                commit = event.time - (event.commit_s or 0.0)
                self._span("fold", self._last, max(self._last, commit), {})
                self._span("commit", max(self._last, commit), event.time, {})
                self._round.set_attributes(scalars(event)[1])
                self._end(event.time, "")

    def flush(self) -> None:
        self._provider.force_flush()

    def close(self) -> None:
        self._provider.shutdown()

    def _phase(self, site: str, now: float, following: str, why: str = "") -> None:
        """A site's phase ends, and another one begins, unless it is ""."""
        phase, since = self._began.pop(site, ("", now))
        if phase and self._round is not None:
            self._span(f"{phase} {site}", since, now, {"site": site, "phase": phase}, why)
        if following:
            self._began[site] = following, now

    def _span(self, name: str, since: float, until: float, told: dict[str, Any], why: str = "") -> None:
        assert self._round is not None, "spans are inside a round's"
        inside = set_span_in_context(self._round)
        span = self._tracer.start_span(name, inside, attributes=told, start_time=_ns(since))
        if why:
            span.set_status(Status(StatusCode.ERROR, why))
        span.end(_ns(until))

    def _end(self, now: float, why: str) -> None:
        if self._round is not None:
            if why:
                self._round.set_status(Status(StatusCode.ERROR, why))
            self._round.end(_ns(now))
        self._round = None
        self._began.clear()


class RoundIds(IdGenerator):
    """Ids that follow from the run's name, the round and the attempt."""

    def __init__(self, run: str) -> None:
        self._run, self._count = run, 0
        self._at = (0, 0)

    @property
    def round(self) -> tuple[int, int]:
        """Of which the next ids are: round and attempt."""
        return self._at

    @round.setter
    def round(self, at: tuple[int, int]) -> None:
        self._at, self._count = at, 0

    def generate_trace_id(self) -> int:
        return self._id("trace", 16)

    def generate_span_id(self) -> int:
        self._count += 1
        return self._id(f"span {self._count}", 8)

    def _id(self, what: str, size: int) -> int:
        digest = hashlib.sha256(f"{self._run}/{self._at}/{what}".encode()).digest()
        return int.from_bytes(digest[:size], "big") or 1


def _otlp(where: str) -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    exporter: SpanExporter = OTLPSpanExporter(endpoint=where or None)
    return exporter


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
