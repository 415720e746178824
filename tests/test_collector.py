"""OpenTelemetry's exporter, and a collector that listens on loopback and speaks OTLP over HTTP."""

from __future__ import annotations

import gzip
import os
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from click.testing import CliRunner

from fedtrain import events as e
from fedtrain.cli import cli
from tests.logs import federation, write

pytest.importorskip("opentelemetry.sdk", reason="the extra opentelemetry is not installed")
pytest.importorskip("opentelemetry.proto", reason="the extra opentelemetry is not installed")


@contextmanager
def collector():
    """(its address, what it was sent: path and message each)"""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
        ExportTraceServiceRequest,
        ExportTraceServiceResponse,
    )

    sent = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            sent.append((self.path, ExportTraceServiceRequest.FromString(body)))
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", sent
        finally:
            server.shutdown()
            thread.join()


def value(of):
    return getattr(of, of.WhichOneof("value"))


def attributes(of):
    return {each.key: value(each.value) for each in of.attributes}


@pytest.mark.parametrize("named", ["by the tracker", "by OpenTelemetry's own variable"])
def test_a_collector_is_sent_each_round_as_a_trace_with_a_span_for_each_phase(tmp_path, monkeypatch, named):
    monkeypatch.chdir(tmp_path)
    for name in [each for each in os.environ if each.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    (tmp_path / "fedtrain.toml").write_text('[run]\ntask = "task:T"\n')
    script = [*federation(sites=("north", "south")), e.RunFinished(round=4, reason="rounds done")]
    log = write(tmp_path / "runs" / "clinic", script, every=1.0)
    with collector() as (address, sent):
        if named == "by the tracker":
            to = f"opentelemetry={address}/v1/traces"
        else:
            to = "opentelemetry"
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
        done = CliRunner().invoke(cli, ["track", "clinic", "--to", to, "--once"])
        assert done.exit_code == 0, done.output
    assert {path for path, _ in sent} == {"/v1/traces"}
    batches = [batch for _, message in sent for batch in message.resource_spans]
    for batch in batches:
        told = attributes(batch.resource)
        assert (told["service.name"], told["fedtrain.run"]) == ("fedtrain", "clinic")
    spans = [span for batch in batches for scope in batch.scope_spans for span in scope.spans]
    rounds = {span.name: span for span in spans if span.name.startswith("round ")}
    assert sorted(rounds) == ["round 1", "round 2", "round 3", "round 4"]
    for number in range(1, 5):
        whole = rounds[f"round {number}"]
        parts = [span for span in spans if span.parent_span_id == whole.span_id]
        assert {span.trace_id for span in parts} == {whole.trace_id}
        assert sorted(span.name for span in parts) == [
            "commit", "fetch north", "fetch south", "fold", "train north", "train south",
            "upload north", "upload south",
        ]  # fmt: skip
        assert attributes(whole)["train/loss"] == 1 / number
        began, ended = (
            next(event.time for event in log if isinstance(event, kind) and event.round == number)
            for kind in (e.RoundStarted, e.RoundCommitted)
        )
        assert (whole.start_time_unix_nano, whole.end_time_unix_nano) == (began * 1e9, ended * 1e9)
