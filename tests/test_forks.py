"""A process with connections under way may fork: a task's own tools do."""

import os
import subprocess
import sys

FORKS = """
import os, subprocess, threading
from concurrent import futures

import fedtrain.transport
import grpc

server = grpc.server(futures.ThreadPoolExecutor(2))
port = server.add_insecure_port("127.0.0.1:0")
server.start()
call = grpc.insecure_channel(f"127.0.0.1:{port}").unary_unary("/a/b")

def calls():
    while True:
        try:
            call(b"", timeout=1)
        except grpc.RpcError:
            pass

for _ in range(2):
    threading.Thread(target=calls, daemon=True).start()
codes = [subprocess.Popen(["true"], preexec_fn=os.getpid).wait(30) for _ in range(100)]
print(codes, flush=True)
os._exit(any(codes))
"""


def test_no_child_aborts_that_is_forked_while_calls_are_under_way():
    env = {key: value for key, value in os.environ.items() if not key.startswith("GRPC_")}
    done = subprocess.run(
        [sys.executable, "-c", FORKS], env=env, timeout=120, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
