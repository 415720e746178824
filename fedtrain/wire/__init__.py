"""Message formats on the network: frames, headers, size limits, the protocol's version."""

from .codec import decode, encode, fetch_list
from .frames import CHUNK_BYTES, MESSAGE_BYTES, PROTOCOL

__all__ = ["CHUNK_BYTES", "MESSAGE_BYTES", "PROTOCOL", "decode", "encode", "fetch_list"]
