"""Bytes between named peers. Knows no strategy and no round."""

import os

# Core writes every failed handshake to stderr; tls.explain says it once, in a line that a person can act on.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
# A child that is forked while calls are under way would abort in gRPC's handlers; it has no use for them.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
