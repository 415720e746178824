"""A site and its aggregator through a real nginx as in deployment/nginx: it passes TLS and reads none."""

import asyncio
import contextlib
import ssl
import subprocess
import sys
from pathlib import Path

import pytest

from fedtrain.exchange import gather
from fedtrain.messages import Train
from tests.federation import aggregator, certificates, echo_plus, link, random_arena, sites
from tests.limits import WAIT_S, bounded
from tests.ports import free_port

CONF = Path(__file__).parents[2] / "deployment" / "nginx" / "fedtrain.conf"
ROOTS = [Path("/"), Path(sys.prefix) / "nginx"]  # where it is installed, and where `make` unpacks it
WEIGHTS, SEED = random_arena(300_000, 99), 1
UNCHECKED = ssl._create_unverified_context()


@pytest.fixture(scope="module")
def certs(tmp_path_factory):
    return certificates(tmp_path_factory.mktemp("certs"), "a")


@contextlib.contextmanager
def nginx(folder, listen, to):
    """nginx with the file of deployment/, on loopback, between these two ports."""
    both = [(at / "usr/sbin/nginx", at / "usr/lib/nginx/modules/ngx_stream_module.so") for at in ROOTS]
    program, module = next((pair for pair in both if all(map(Path.exists, pair))), (None, None))
    if program is None:
        pytest.skip("nginx or its stream module is not here: apt-get install nginx libnginx-mod-stream")
    text = CONF.read_text().replace("listen 443;", f"listen 127.0.0.1:{listen};")
    text = text.replace("127.0.0.1:8440", f"127.0.0.1:{to}")
    whole = folder / "nginx.conf"
    whole.write_text(
        f"load_module {module};\ndaemon off;\nmaster_process off;\npid {folder}/pid;\n"
        f"error_log {folder}/error.log info;\nevents {{ }}\n{text}"
    )
    command = [program, "-e", str(folder / "error.log"), "-p", str(folder), "-c", str(whole)]
    subprocess.run([*command, "-t"], check=True, capture_output=True, timeout=WAIT_S)
    running = subprocess.Popen(command)
    try:
        yield running
    finally:
        running.terminate()
        running.wait(WAIT_S)


async def until_open(port):
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.02)
        else:
            writer.close()
            return


def test_a_site_trains_through_nginx_that_passes_mutual_tls_and_hangs_up_on_other_names(certs, tmp_path):
    async def main():
        async with aggregator(certs, tmp_path, WEIGHTS.schema) as agg:
            with nginx(tmp_path, through := free_port(), agg.cohort.port):
                await until_open(through)
                site = link(certs, "a", through, tmp_path)
                async with sites({"a": site}, WEIGHTS.schema, lambda _: echo_plus(SEED)):
                    await agg.cohort.members(1)
                    request = Train(id="r/0/0/train", round=0, weights=WEIGHTS)
                    replies = await gather(agg.cohort, {"a": request}, 30)
                with pytest.raises((ssl.SSLError, ConnectionError)):
                    await asyncio.open_connection(
                        "127.0.0.1", through, ssl=UNCHECKED, server_hostname="aggregator.other.fedtrain"
                    )
            return replies["a"].delta.digest

    assert bounded(main()) == random_arena(300_000, SEED).digest
    log = (tmp_path / "error.log").read_text()
    assert "connected to 127.0.0.1:" in log, "nginx stood between them"
    assert "unix:/nowhere.sock" in log
